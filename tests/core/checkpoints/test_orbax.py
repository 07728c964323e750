"""Orbax checkpoints: every layout reads back bit for bit, in chunks; what is missing or half written is an error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._errors import CheckpointError, LazyModelWarning
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors.source import BYTES_READ
from lazymodel.checkpoints import _orbax, open_checkpoint
from lazymodel.checkpoints._orbax import ChunkedLeaf

ocp = pytest.importorskip("orbax.checkpoint")
ts = pytest.importorskip("tensorstore")


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def arrays() -> dict[str, np.ndarray]:
    return {
        "layers/0/kernel": numbers((16, 32)),
        "layers/0/bias": numbers((32,), ml_dtypes.bfloat16),
        "layers/1/kernel": numbers((8, 16)) / 3,
        "moments/0": numbers((8, 8)) * 0,
        "moments/1": numbers((4,), np.int8),
        "host": numbers((5,), np.uint16),
        "step": np.array(7, np.int32),
    }


def tree(mesh: Any) -> dict[str, Any]:
    """`arrays` as someone would save them: sharded, on one device, on the host, and things that are no arrays."""
    values = arrays()

    def sharded(name: str, spec: P) -> jax.Array:
        return jax.device_put(values[name], NamedSharding(mesh, spec))

    return {
        "layers": [
            {"kernel": sharded("layers/0/kernel", P(None, "model")), "bias": sharded("layers/0/bias", P("model"))},
            {"kernel": sharded("layers/1/kernel", P("model"))},
        ],
        "moments": (sharded("moments/0", P()), jnp.asarray(values["moments/1"])),
        "host": values["host"],
        "step": jnp.int32(7),
        "rate": 0.25,
        "nothing": None,
        "empty": {},
    }


def save(path: Path, item: Any, **options: Any) -> Path:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(path, item)
    return path


def save_text(path: Path, item: Any) -> Path:
    return save(path, {**item, "name": "text"})


def save_standard(path: Path, item: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, item)
    return path


def save_managed(path: Path, item: Any) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave({"other": jnp.ones(3)}))
        manager.save(20, args=ocp.args.StandardSave(item))
    return path


def save_v1(path: Path, item: Any) -> Path:
    from orbax.checkpoint import v1

    v1.save(path, item)
    return path


def save_v1_training(path: Path, item: Any) -> Path:
    from orbax.checkpoint import v1

    with v1.training.Checkpointer(path) as checkpointer:
        checkpointer.save(9, {"other": jnp.ones(3)})
        checkpointer.save(10, item)
    return path


LAYOUTS = {
    "ocdbt": lambda path, item: save(path, item),
    "ocdbt-zarr3": lambda path, item: save(path, item, use_zarr3=True),
    "files": lambda path, item: save(path, item, use_ocdbt=False),
    "files-zarr3": lambda path, item: save(path, item, use_ocdbt=False, use_zarr3=True),
    "text": save_text,
    "standard": save_standard,
    "manager": save_managed,
    "v1": save_v1,
    "v1-training": save_v1_training,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_back_bit_for_bit(tmp_path, mesh8, layout):
    path = LAYOUTS[layout](tmp_path / "saved", tree(mesh8))
    expected = {**arrays(), "rate": np.array(0.25)}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "orbax"
        assert checkpoint.path == str(path)
        assert set(checkpoint) == set(expected)
        before = BYTES_READ.count
        for name, array in expected.items():
            tensor = checkpoint[name]
            assert (tensor.name, tensor.shape, tensor.dtype) == (name, array.shape, array.dtype)
            assert tensor.read().tobytes() == array.tobytes()
        total = sum(array.nbytes for array in expected.values())
        assert checkpoint.bytes_read == BYTES_READ.count - before == total == checkpoint.nbytes
        kernel = expected["layers/0/kernel"]
        tensor = checkpoint["layers/0/kernel"]
        assert isinstance(tensor.leaf, ChunkedLeaf)
        assert tensor.leaf.chunk == (16, 4)
        assert tensor.file == checkpoint.item
        np.testing.assert_array_equal(tensor.read((slice(3, 9), slice(2, 13))), kernel[3:9, 2:13])
        np.testing.assert_array_equal(tensor.T[::-2, 1:].read(), kernel.T[::-2, 1:])
        np.testing.assert_array_equal(tensor.reshape(8, 64)[1:3].astype(np.float64).read(), kernel.reshape(8, 64)[1:3])
        assert all(Path(file).is_file() for file in checkpoint.files)
    np.testing.assert_array_equal(tensor.read(), kernel)  # usable after close
    assert "layers/0/kernel" in repr(tensor)


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "bool", "complex64", "float16"])
def test_dtypes(tmp_path, mesh8, name, zarr3):
    values = (numbers((8, 4)) % 7).astype(jnp.dtype(name))
    path = save(tmp_path / "saved", {"w": jax.device_put(values, NamedSharding(mesh8, P("model")))}, use_zarr3=zarr3)
    tensor = open_checkpoint(path)["w"]
    assert tensor.dtype == values.dtype
    assert tensor.read().tobytes() == values.tobytes()
    np.testing.assert_array_equal(tensor[2:5, ::2].astype(np.complex64).read(), values[2:5, ::2].astype(np.complex64))


def test_keys_and_single_arrays(tmp_path):
    keys = jax.random.split(jax.random.key(3), 4)
    tensor = open_checkpoint(save(tmp_path / "keys", {"k": keys}))["k"]
    np.testing.assert_array_equal(tensor.read(), jax.random.key_data(keys))
    checkpoint = open_checkpoint(save(tmp_path / "single", jnp.arange(3)))
    assert list(checkpoint) == ["value"] == list(lm.build_abstract(lambda: jnp.arange(3)))
    np.testing.assert_array_equal(checkpoint["value"].read(), [0, 1, 2])


def init(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    return {
        "embedding": jax.random.normal(keys[0], (64, 16), jnp.bfloat16),
        "layers": [{"kernel": jax.random.normal(k, (16, 32))} for k in keys[1:]],
        "steps": jnp.zeros((), jnp.int32),
    }


@pytest.mark.parametrize("ocdbt", [False, True])
def test_materializing_in_other_shards_than_were_saved(tmp_path, mesh8, mesh42, ocdbt):
    abstract = lm.build_abstract(init, jax.random.key(1))
    rules = {"embedding": P("model"), "layers/.*": P(None, "model"), "steps": P()}
    saved = abstract.shard(mesh8, rules).materialize()
    path = save(tmp_path / "saved", saved, use_ocdbt=ocdbt)
    other = lm.build_abstract(init, jax.random.key(2)).shard(
        mesh42, {"embedding": P(None, "batch"), "layers/.*": P("batch", "model"), "steps": P()}
    )
    checkpoint = open_checkpoint(path)
    before = BYTES_READ.count
    model = other.materialize(checkpoint)
    jax.tree.map(np.testing.assert_array_equal, saved, model)
    assert model["layers"][0]["kernel"].sharding == NamedSharding(mesh42, P("batch", "model"))
    assert BYTES_READ.count - before == checkpoint.nbytes


# Chunks ---------------------------------------------------------------------------------------------------------------


def test_only_the_chunks_of_a_box_are_read(tmp_path, mesh8):
    path = save(tmp_path / "saved", tree(mesh8), use_ocdbt=False)
    checkpoint = open_checkpoint(path)
    tensor = checkpoint["layers/0/kernel"]
    for index in (*range(3), *range(5, 8)):
        (path / "layers.0.kernel" / f"0.{index}").write_bytes(b"torn")
    box = (slice(2, 7), slice(13, 20))
    np.testing.assert_array_equal(tensor.read(box), arrays()["layers/0/kernel"][box])
    assert checkpoint.bytes_read == 5 * 7 * 4
    with pytest.raises(CheckpointError, match=r"cannot read array 'layers/0/kernel' of .*saved: .*0\.2.*copy it again"):
        tensor.read((slice(0, 1), slice(11, 13)))


def test_zarr3_shards_are_read_by_inner_chunks(tmp_path):
    weights = numbers((64, 64))
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True)
    save_args = {"w": ocp.SaveArgs(chunk_byte_size=1024)}
    ocp.Checkpointer(handler).save(
        tmp_path / "saved", args=ocp.args.PyTreeSave({"w": jnp.asarray(weights)}, save_args=save_args)
    )
    tensor = open_checkpoint(tmp_path / "saved")["w"]
    assert math.prod(tensor.leaf.chunk) * 4 == 1024
    assert tensor.leaf.unit_nbytes == 3 * 1024
    assert tensor.leaf.row_step == tensor.leaf.chunk[0]
    np.testing.assert_array_equal(tensor[5:40, 3:].read(), weights[5:40, 3:])


class Room:
    """A workspace that counts."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.largest = 0

    @contextlib.contextmanager
    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        self.largest = max(self.largest, math.prod(shape) * dtype.itemsize)
        yield np.empty(shape, dtype)


@pytest.mark.parametrize(("room", "largest"), [(0, 64), (3 * 64 * 4, 64 * 4), (1 << 30, 32 * 32 * 4)])
def test_large_boxes_are_read_in_pieces_that_fit(tmp_path, room, largest):
    weights = numbers((32, 32))
    write(tmp_path, weights, (4, 4))
    tensor = open_checkpoint(tmp_path)["w"]
    out = np.zeros((32, 32))
    workspace = Room(room)
    steps = tensor.astype(np.float64).steps
    tensor.leaf.fill_box((slice(0, 32), slice(0, 32)), out, steps, workspace)
    np.testing.assert_array_equal(out, weights)
    assert workspace.largest == largest


def write(folder: Path, array: np.ndarray, chunk: tuple[int, ...], driver: str = "zarr") -> None:
    """Writes the array `w` of an item, without `_METADATA`, through tensorstore."""
    layout = ts.ChunkLayout(chunk_shape=chunk, inner_order=tuple(reversed(range(array.ndim))))  # as Fortran has it
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/w/"}}
    options = {"dtype": array.dtype, "shape": array.shape, "chunk_layout": layout}
    spec["store_data_equal_to_fill_value"] = True
    ts.open(spec, create=True, **options).result().write(array).result()


def test_a_large_chunk_is_decoded_once_for_all_shards(tmp_path, mesh8, monkeypatch):
    monkeypatch.setattr(_orbax, "_KEEP", 1024)
    values = {"w": numbers((64, 16)), "v": numbers((16, 64))}
    path = save(tmp_path / "saved", {name: jnp.asarray(value) for name, value in values.items()})
    decoded: list[str] = []
    read = ChunkedLeaf._read

    def count(leaf: ChunkedLeaf, box: Any, out: np.ndarray) -> None:
        decoded.append(leaf.name)
        read(leaf, box, out)

    monkeypatch.setattr(ChunkedLeaf, "_read", count)
    abstract = lm.build_abstract(lambda: {name: jnp.zeros(value.shape) for name, value in values.items()})
    checkpoint = open_checkpoint(path)
    # Rows, read one shard after the other, as those of a tensor larger than the budget are.
    model = abstract.shard(mesh8, {".*": P("model")}).materialize(checkpoint, max_host_memory="32KiB")
    jax.tree.map(np.testing.assert_array_equal, values, model)
    assert sorted(decoded) == ["v", "w"]
    assert not checkpoint._kept._chunks, "nothing is kept of a chunk that was read"
    checkpoint["w"][:3].read()
    assert len(checkpoint._kept._chunks) == 1
    tensor = checkpoint["w"]
    nbytes = tensor.leaf.unit_nbytes // values["w"].nbytes
    assert nbytes == _orbax._COPIES + 1, "a chunk on its way, and the other that is kept"
    checkpoint.close()
    assert not checkpoint._kept._chunks


def test_a_stream_leaves_no_chunk_behind(tmp_path, mesh8, monkeypatch):
    """A chunk that is needed in part would be kept, and in nobody's budget, once its tensor is there."""
    monkeypatch.setattr(_orbax, "_KEEP", 1024)
    values = {"w": numbers((64, 16)), "v": numbers((64, 16))}
    checkpoint = open_checkpoint(save(tmp_path / "saved", {name: jnp.asarray(value) for name, value in values.items()}))
    sharding = NamedSharding(mesh8, P("model"))
    halves = [StreamItem(name, checkpoint[name][:32], (32, 16), np.dtype(np.float32), sharding) for name in values]
    for name, array in stream(halves):
        np.testing.assert_array_equal(array, values[name][:32])
    assert not checkpoint._kept._chunks
    unfinished = stream(halves)
    next(unfinished)
    unfinished.close()
    assert not checkpoint._kept._chunks


def test_steps_are_looked_for_once(tmp_path):
    """A step is no root of further steps, however deep someone nests them."""
    folder = tmp_path
    for _ in range(300):
        folder = folder / "1"
    folder.mkdir(parents=True)
    place = tmp_path
    for _ in range(300):
        place = place / "1"
        (place / "x").mkdir()
        (place / "x" / "_METADATA").write_text("{}")
    with pytest.raises(CheckpointError, match="_METADATA: expected a 'tree_metadata' object"):
        open_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_tile_their_box(data):
    ndim = data.draw(st.integers(0, 3))
    shape = [data.draw(st.integers(1, 12)) for _ in range(ndim)]
    chunk = tuple(data.draw(st.integers(1, extent)) for extent in shape)
    starts = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    box = tuple(slice(s, data.draw(st.integers(s + 1, extent))) for s, extent in zip(starts, shape, strict=True))
    limit = data.draw(st.integers(0, 200))
    seen = np.zeros(shape, int)
    for piece in _orbax._whole_chunks(box, chunk, limit):
        seen[piece] += 1
        touched = [-(-part.stop // step) - part.start // step for part, step in zip(piece, chunk, strict=True)]
        assert math.prod(touched) == 1 or math.prod(touched) * math.prod(chunk) <= limit
    expected = np.zeros(shape, int)
    expected[box] = 1
    np.testing.assert_array_equal(seen, expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_any_chunking(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunk = tuple(data.draw(st.integers(1, extent)) for extent in shape)
    driver = data.draw(st.sampled_from(["zarr", "zarr3"]))
    array = numbers(shape, np.int16)
    folder = tmp_path_factory.mktemp("item")
    write(folder, array, chunk, driver)
    tensor = open_checkpoint(folder)["w"]
    index = tuple(
        slice(data.draw(st.integers(0, extent)), data.draw(st.integers(0, extent)), data.draw(st.sampled_from([1, 2])))
        for extent in shape
    )
    expected = array[index].T.astype(np.float32)
    np.testing.assert_array_equal(tensor[index].T.astype(np.float32).read(), expected)
    shutil.rmtree(folder)


# Which folder ---------------------------------------------------------------------------------------------------------


def steps(root: Path, *names: str, item: str = "") -> Path:
    """Folders of steps; each has one array, whose value is its number."""
    first = save(root.parent / f"{root.name}-first", {"w": jnp.zeros(2)}, use_ocdbt=False)
    for name in names:
        folder = root / name / item
        shutil.copytree(first, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / "w")
        number = float("".join(c for c in name.split(".")[0] if c.isdigit()))
        write(folder, np.full(2, number, np.float32), (2,))
        if item:
            shutil.move(folder / "_CHECKPOINT_METADATA", root / name)
    return root


@pytest.mark.parametrize("item", ["", "default", "params"])
@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (("9", "10", "2"), 10),
        (("step_9", "step_0010"), 10),
        (("my_run_1", "my_run_2"), 2),
        (("5", "6.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-123"), 5),
    ],
)
def test_the_newest_committed_step(tmp_path, names, newest, item):
    root = steps(tmp_path / "root", *names, item=item)
    (root / "metrics").mkdir()
    checkpoint = open_checkpoint(root)
    assert checkpoint["w"].read()[0] == newest
    assert checkpoint.path == str(root)
    assert Path(checkpoint.item).is_relative_to(root)


def uncommit(folder: Path) -> None:
    """What saving leaves until it commits, where a commit is no renaming."""
    (folder / "commit_success.txt").unlink(missing_ok=True)
    metadata = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({**metadata, "commit_timestamp_nsecs": None}))


def test_uncommitted_steps_are_skipped_and_refused(tmp_path):
    root = steps(tmp_path / "root", "1", "2")
    uncommit(root / "2")
    assert open_checkpoint(root)["w"].read()[0] == 1
    with pytest.raises(CheckpointError, match="2 is half written: expected a committed checkpoint, found that _CHECK"):
        open_checkpoint(root / "2")
    uncommit(root / "1")
    with pytest.raises(CheckpointError, match="root: expected a committed step, found 2 that were never committed, 2 "):
        open_checkpoint(root)


def test_half_written_checkpoints(tmp_path):
    root = steps(tmp_path / "root", "1.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-17")
    with pytest.raises(CheckpointError, match="found only unfinished ones .1.orbax-checkpoint-tmp, 2.*Wait until"):
        open_checkpoint(root)
    with pytest.raises(CheckpointError, match="tmp is half written: .* its name has '.orbax-checkpoint-tmp'"):
        open_checkpoint(root / "1.orbax-checkpoint-tmp")
    step = steps(tmp_path / "items", "1", item="state") / "1"
    (step / "state").rename(step / "state.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointError, match=r"expected an Orbax item.* found state.orbax-checkpoint-tmp. Wait until"):
        open_checkpoint(step)


def test_ambiguous_steps(tmp_path):
    root = steps(tmp_path / "root", "step_1", "checkpoint_2")
    with pytest.raises(CheckpointError, match=r"prefixes \['checkpoint', 'step'\]; open one of '.*checkpoint_2'"):
        open_checkpoint(root)
    root = steps(tmp_path / "twice", "1", "01")
    with pytest.raises(CheckpointError, match=r"step 1 more than once: \['1', '01'\]"):
        open_checkpoint(root)


def test_items(tmp_path):
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        items = {
            "params": ocp.args.StandardSave({"w": jnp.ones(2)}),
            "words": ocp.args.PyTreeSave({"config": "text"}),
            "data": ocp.args.JsonSave({"position": 3}),
        }
        manager.save(1, args=ocp.args.Composite(**items))
        items["opt_state"] = ocp.args.StandardSave({"m": jnp.ones(2)})
        manager.save(2, args=ocp.args.Composite(**items))
    one = open_checkpoint(tmp_path / "root" / "1")
    assert list(one) == ["w"]
    assert one.item == str(tmp_path / "root" / "1" / "params")
    with pytest.raises(CheckpointError, match="2 has 2 items that hold arrays; open one of '.*opt_state', '.*params'"):
        open_checkpoint(tmp_path / "root")
    assert list(open_checkpoint(tmp_path / "root" / "2" / "opt_state")) == ["m"]
    with pytest.raises(CheckpointError, match="words: expected arrays, found a tree of 1 leaves without any"):
        open_checkpoint(tmp_path / "root" / "2" / "words")
    with pytest.raises(CheckpointError, match="found no checkpoint in folder .*data"):
        open_checkpoint(tmp_path / "root" / "2" / "data")
    for item in ("params", "opt_state"):
        shutil.rmtree(tmp_path / "root" / "2" / item)
    with pytest.raises(CheckpointError, match=r"2: expected an Orbax item .* arrays, found data, words\."):
        open_checkpoint(tmp_path / "root")


def test_other_folders_are_no_orbax_checkpoints(tmp_path):
    (tmp_path / "12").mkdir()
    (tmp_path / "src" / "inner").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="found no checkpoint in folder .*Orbax"):
        open_checkpoint(tmp_path)


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_without_metadata_are_those_of_the_storage(tmp_path, mesh8):
    for layout in ("ocdbt", "files-zarr3"):
        path = LAYOUTS[layout](tmp_path / layout, tree(mesh8))
        (path / "_METADATA").unlink()
        checkpoint = open_checkpoint(path)
        assert set(checkpoint) == {*arrays(), "rate"}
        np.testing.assert_array_equal(checkpoint["layers/0/kernel"].read(), arrays()["layers/0/kernel"])


def test_keys_with_dots_and_slashes(tmp_path):
    item = {"a.b": jnp.ones(1), "transformer/layer_0": {"w": jnp.ones(2)}, "..": {"..": {"x": jnp.ones(3)}}}
    checkpoint = open_checkpoint(save(tmp_path / "saved", item))
    assert {name: tensor.shape for name, tensor in checkpoint.items()} == {
        "a.b": (1,),
        "transformer/layer_0/w": (2,),
        "../../x": (3,),
    }


@pytest.mark.parametrize("item", [{"a": {"b": 1.0}, "a.b": 2.0}, {"a": {"b": 1.0}, "a/b": 2.0}])
def test_paths_that_are_one_name(tmp_path, item):
    path = save(tmp_path / "saved", jax.tree.map(jnp.float32, item))
    with pytest.raises(CheckpointError, match=r"_METADATA: expected paths that differ .* \('a', 'b'\) and \('a"):
        open_checkpoint(path)


# What is missing or corrupt -------------------------------------------------------------------------------------------


def metadata(path: Path, **changes: Any) -> None:
    content = json.loads((path / "_METADATA").read_text())
    (path / "_METADATA").write_text(json.dumps({**content, **changes}))


def remove_chunk(path: Path, key: str) -> None:
    if (path / "manifest.ocdbt").exists():
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
        store = ts.KvStore.open(spec).result()
        assert store.read(key).result().state == "value"
        store.write(key, None).result()
    else:
        (path / key).unlink()


@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("zarr3", [False, True])
def test_a_lost_chunk_is_an_error_and_not_zeros(tmp_path, mesh8, ocdbt, zarr3):
    path = save(tmp_path / "saved", tree(mesh8), use_ocdbt=ocdbt, use_zarr3=zarr3)
    remove_chunk(path, f"layers.0.kernel/{'c/0/3' if zarr3 else '0.3'}")
    remove_chunk(path, f"step/{'c' if zarr3 else '0'}")
    checkpoint = open_checkpoint(path)
    for name in ("layers/0/kernel", "step"):
        with pytest.raises(CheckpointError, match=f"saved: array '{name}': expected every chunk.*1 missing"):
            checkpoint[name]
    np.testing.assert_array_equal(checkpoint["moments/0"].read(), np.zeros((8, 8)))  # chunks of zeros are stored


def test_a_chunk_that_is_lost_later_is_an_error(tmp_path, mesh8):
    path = save(tmp_path / "saved", tree(mesh8), use_ocdbt=False)
    tensor = open_checkpoint(path)["layers/0/kernel"]
    remove_chunk(path, "layers.0.kernel/0.3")
    with pytest.raises(CheckpointError, match="layers/0/kernel.*missing"):
        tensor.read()


def test_an_inner_chunk_that_was_never_written_is_an_error(tmp_path, mesh8):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)}, use_ocdbt=False, use_zarr3=True)
    shutil.rmtree(path / "w")
    codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [4], "codecs": [{"name": "bytes"}]}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [8]}}
    description = {"shape": [8], "data_type": "float32", "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/w/"}, "metadata": description}
    ts.open(spec, create=True).result()[:4].write(np.ones(4, np.float32)).result()
    tensor = open_checkpoint(path)["w"]
    np.testing.assert_array_equal(tensor[:4].read(), np.ones(4))
    with pytest.raises(CheckpointError, match="cannot read array 'w'.*missing"):
        tensor.read()


def test_chunks_of_zeros_that_an_older_orbax_left_out(tmp_path, mesh8):
    path = save(tmp_path / "saved", tree(mesh8), use_ocdbt=False)
    metadata(path, store_array_data_equal_to_fill_value=False)
    remove_chunk(path, "moments.0/0.0")
    remove_chunk(path, "layers.0.kernel/0.3")
    checkpoint = open_checkpoint(path)
    with pytest.warns(LazyModelWarning, match="'moments/0' lacks 1 of its chunks, which are read as zeros"):
        np.testing.assert_array_equal(checkpoint["moments/0"].read(), np.zeros((8, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not checkpoint["layers/0/kernel"][:, 12:16].read().any()  # said once a checkpoint


@pytest.mark.parametrize("ocdbt", [False, True])
def test_missing_arrays(tmp_path, mesh8, ocdbt):
    path = save(tmp_path / "saved", tree(mesh8), use_ocdbt=ocdbt)
    remove_chunk(path, "host/.zarray")
    with pytest.raises(CheckpointError, match="saved: expected .* found none stored for 1: host. Copy the whole"):
        open_checkpoint(path)
    (path / "checkpoint").write_bytes(b"msgpack")
    with pytest.raises(CheckpointError, match="1: host. They are in the 'checkpoint' file of an old Orbax"):
        open_checkpoint(path)


def test_a_missing_or_torn_manifest(tmp_path, mesh8):
    path = save(tmp_path / "saved", tree(mesh8))
    manifest = path / "manifest.ocdbt"
    content = manifest.read_bytes()
    manifest.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt: expected the index of an OCDBT .* corrupt"):
        open_checkpoint(path)
    manifest.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98765\n")
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt is a Git LFS pointer"):
        open_checkpoint(path)
    manifest.unlink()
    for remove in (None, path / "_METADATA"):
        if remove:
            remove.unlink()
        with pytest.raises(CheckpointError, match=r"saved: expected manifest\.ocdbt, .* found none.* Copy it again"):
            open_checkpoint(path)


@pytest.mark.parametrize("damage", ["torn", "lost"])
def test_damaged_data_of_a_database(tmp_path, damage):
    weights = np.random.default_rng(0).standard_normal((64, 64))
    path = save(tmp_path / "saved", {"w": weights})
    checkpoint = open_checkpoint(path)
    for file in path.glob("ocdbt.process_0/d/*"):
        os.truncate(file, 16) if damage == "torn" else file.unlink()
    with pytest.raises(CheckpointError, match="cannot read array 'w' of .*saved: .*copy it again"):
        checkpoint["w"].read()
    for file in path.glob("d/*"):
        os.truncate(file, 16) if damage == "torn" else file.unlink()
    with pytest.raises(CheckpointError, match=r"saved/manifest\.ocdbt: expected the index .*Copy the checkpoint again"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "_METADATA: expected a JSON object"),
        (b"[]", "_METADATA: expected a JSON object, found a list"),
        (b"{}", "_METADATA: expected a 'tree_metadata' object"),
        (b'{"tree_metadata": {"a": 3}}', "_METADATA: expected 'key_metadata' and 'value_metadata' of leaf a"),
        (b'{"tree_metadata": {"a": {"key_metadata": [{"key": 3}], "value_metadata": {"value_type": "x"}}}}', "text"),
        (b'{"tree_metadata": {"a": 1, "a": 2}}', "'a' twice"),
    ],
)
def test_corrupt_metadata(tmp_path, content, message):
    path = save(tmp_path / "saved", {"w": jnp.ones(2)})
    (path / "_METADATA").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as info:
        open_checkpoint(path)
    assert str(path) in str(info.value)


def test_corrupt_step_metadata(tmp_path):
    root = steps(tmp_path / "root", "1", "2")
    (root / "2" / "commit_success.txt").unlink(missing_ok=True)
    (root / "2" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs":')
    with pytest.raises(CheckpointError, match="2/_CHECKPOINT_METADATA: expected a JSON object"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1 << 40]}, "expected every chunk"),
        ({"shape": [1 << 40], "chunks": [1]}, "expected every chunk"),
        ({"chunks": [1 << 40]}, "expected chunks inside its shape"),
        ({"shape": [-1]}, "cannot be opened"),
        ({"dtype": "<q9"}, "cannot be opened"),
        ({"compressor": {"id": "mystery"}}, "cannot be opened"),
        ({"dtype": "|S4"}, "expected numbers|cannot be opened"),
    ],
)
def test_hostile_array_descriptions(tmp_path, change, message):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)}, use_ocdbt=False)
    description = json.loads((path / "w" / ".zarray").read_text())
    (path / "w" / ".zarray").write_text(json.dumps({**description, **change}))
    with pytest.raises(CheckpointError, match=message) as info:
        open_checkpoint(path)["w"]
    assert str(path) in str(info.value)


def test_a_chunk_that_unpacks_to_more_than_it_should(tmp_path):
    path = save(tmp_path / "saved", {"w": jnp.zeros(8)}, use_ocdbt=False)
    other = save(tmp_path / "other", {"w": jnp.zeros(1 << 20)}, use_ocdbt=False)
    shutil.copy(other / "w" / "0", path / "w" / "0")
    with pytest.raises(CheckpointError, match="cannot read array 'w'"):
        open_checkpoint(path)["w"].read()


def test_links_and_pipes(tmp_path):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)}, use_ocdbt=False)
    chunk = path / "w" / "0"
    outside = tmp_path / "outside"
    chunk.rename(outside)
    chunk.symlink_to(outside)
    with pytest.raises(CheckpointError, match="w/0: expected a file in the checkpoint's folder, found a symbolic link"):
        open_checkpoint(path)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CheckpointError, match="w/0: expected a file, found a pipe"):
        open_checkpoint(path)


@pytest.mark.parametrize("ocdbt", [False, True])
def test_a_hugging_face_cache(tmp_path, ocdbt):
    """Files of a cache are links into `blobs`."""
    path = save(tmp_path / "saved", {"w": jnp.arange(8)}, use_ocdbt=ocdbt)
    cache = tmp_path / "models--x"
    snapshot = cache / "snapshots" / "abc" / "2b"
    (cache / "blobs").mkdir(parents=True)
    for index, file in enumerate(sorted(file for file in path.rglob("*") if file.is_file())):
        shutil.copy(file, cache / "blobs" / str(index))
        link = snapshot / file.relative_to(path)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(cache / "blobs" / str(index))
    np.testing.assert_array_equal(open_checkpoint(snapshot)["w"].read(), np.arange(8))


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)})
    tensor = open_checkpoint(path)["w"]
    shutil.rmtree(path)
    save(path, {"w": jnp.zeros(8)})
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        tensor.read()


def test_databases_of_several_processes(tmp_path):
    """Each process writes its chunks to a database of its own; the manifest on top refers to all of them."""
    path = tmp_path / "saved"
    weights = numbers((8, 4))

    context = ts.Context()

    def database(folder: Path) -> dict[str, Any]:
        folder.mkdir()
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}

    parent = ts.KvStore.open(database(path), context=context).result()
    merge = ts.Transaction(atomic=True)
    for process, part in enumerate((slice(0, 4), slice(4, 8))):
        child = database(path / f"ocdbt.process_{process}")
        spec = {"driver": "zarr", "kvstore": {**child, "path": "w/"}}
        layout = ts.ChunkLayout(chunk_shape=(4, 4))
        options = {"dtype": weights.dtype, "shape": (8, 4), "chunk_layout": layout}
        ts.open(spec, context=context, create=True, **options).result()[part].write(weights[part]).result()
        written = ts.KvStore.open(child, context=context).result()
        written.experimental_copy_range_to(parent.with_transaction(merge)).result()
    merge.commit_sync()
    checkpoint = open_checkpoint(path)
    assert list(checkpoint) == ["w"]
    np.testing.assert_array_equal(checkpoint["w"].read(), weights)
    (path / "ocdbt.process_1" / "manifest.ocdbt").unlink()
    np.testing.assert_array_equal(open_checkpoint(path)["w"].read(), weights)


def test_tensorstore_is_imported_on_use_only(tmp_path):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)})
    code = (
        "import sys; sys.modules['tensorstore'] = None\n"
        "import lazymodel\n"
        "assert not any(name.startswith('orbax') for name in sys.modules)\n"
        "try: lazymodel.open_checkpoint(sys.argv[1])\n"
        "except lazymodel.CheckpointError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "pip install 'lazymodel[orbax]'" in result.stdout
