"""Orbax checkpoints: every layout reads back bit for bit, in chunks; what is missing or half written is an error."""

from __future__ import annotations

import functools
import json
import os
import shutil
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
from tests.command import inspected, problems
from tests.core.checkpoints._formats import numbers, refused, unreadable
from tests.small import buffer_sizes, read_within

ocp = pytest.importorskip("orbax.checkpoint")
ts = pytest.importorskip("tensorstore")


def arrays() -> dict[str, np.ndarray]:
    return {
        "layers/0/kernel": numbers((16, 32)),
        "layers/0/bias": numbers((32,), ml_dtypes.bfloat16),
        "layers/1/kernel": np.random.default_rng(0).standard_normal((64, 64), np.float32),
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tree` as one layout or another saves it, once."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("model",))
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def make(layout: str) -> Path:
        return LAYOUTS[layout](folder / layout, tree(mesh))

    return make


@pytest.fixture
def copied(made: Any, tmp_path: Path) -> Any:
    """A copy of it, to be damaged."""
    return lambda layout: shutil.copytree(made(layout), tmp_path / "saved")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_back_bit_for_bit(made, layout):
    path = made(layout)
    expected = {**arrays(), "rate": np.array(0.25)}
    with lm.open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "orbax"
        assert checkpoint.path == str(path)
        assert set(checkpoint) == set(expected)
        for name, array in expected.items():
            tensor = checkpoint[name]
            assert (tensor.name, tensor.shape, tensor.dtype) == (name, array.shape, array.dtype)
            assert tensor.read().tobytes() == array.tobytes()
            assert tensor.file == checkpoint.item and name in repr(tensor)
        assert checkpoint.bytes_read == sum(array.nbytes for array in expected.values()) == checkpoint.nbytes
        kernel, tensor = expected["layers/0/kernel"], checkpoint["layers/0/kernel"]
        np.testing.assert_array_equal(tensor.T[::-2, 1:].read(), kernel.T[::-2, 1:])
        assert all(Path(file).is_file() for file in checkpoint.files)


@pytest.mark.parametrize("zarr3", [False, True])
def test_dtypes(tmp_path, mesh8, zarr3):
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "bool", "complex64", "float16")
    values = {name: (numbers((8, 4)) % 7).astype(jnp.dtype(name)) for name in names}
    path = save(tmp_path / "saved", jax.device_put(values, NamedSharding(mesh8, P("model"))), use_zarr3=zarr3)
    for name, tensor in lm.open_checkpoint(path).items():
        assert tensor.dtype == values[name].dtype
        assert tensor.read().tobytes() == values[name].tobytes()
        part, expected = tensor[2:5, ::2].astype(np.complex64), values[name][2:5, ::2].astype(np.complex64)
        np.testing.assert_array_equal(part.read(), expected)


def test_keys_and_single_arrays(tmp_path):
    keys = jax.random.split(jax.random.key(3), 4)
    tensor = lm.open_checkpoint(save(tmp_path / "keys", {"k": keys}))["k"]
    np.testing.assert_array_equal(tensor.read(), jax.random.key_data(keys))
    checkpoint = lm.open_checkpoint(save(tmp_path / "single", jnp.arange(3)))
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
    checkpoint = lm.open_checkpoint(path)
    model = other.materialize(checkpoint)
    jax.tree.map(np.testing.assert_array_equal, saved, model)
    assert model["layers"][0]["kernel"].sharding == NamedSharding(mesh42, P("batch", "model"))
    assert checkpoint.bytes_read == checkpoint.nbytes


# Chunks ---------------------------------------------------------------------------------------------------------------


def test_only_the_chunks_of_a_box_are_read(copied):
    path = copied("files")
    checkpoint = lm.open_checkpoint(path)
    tensor = checkpoint["layers/0/kernel"]
    for index in (*range(3), *range(5, 8)):
        (path / "layers.0.kernel" / f"0.{index}").write_bytes(b"torn")
    box = (slice(2, 7), slice(13, 20))
    np.testing.assert_array_equal(tensor.read(box), arrays()["layers/0/kernel"][box])
    assert checkpoint.bytes_read == 5 * 7 * 4
    with pytest.raises(
        lm.CheckpointError, match=r"cannot read array 'layers/0/kernel' of .*saved: .*0\.2.*copy it again"
    ):
        tensor.read((slice(0, 1), slice(11, 13)))


def write_shard(folder: Path, array: np.ndarray, chunk: tuple[int, ...], written: Any = ...) -> None:
    """Writes the array `w` of an item as one shard of chunks, or a part of it."""
    inner = {"chunk_shape": chunk, "codecs": [{"name": "bytes"}]}
    description = {
        "shape": array.shape,
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.shape}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/w/"}, "metadata": description}
    ts.open(spec, create=True).result()[written].write(array[written]).result()


def test_zarr3_shards_are_read_by_inner_chunks(tmp_path, mesh8):
    """Of a shard of 256 KiB, in less host memory than that."""
    weights = numbers((64, 1024))
    write_shard(tmp_path, weights, (8, 64))
    checkpoint = lm.open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint["w"][5:40, 3:].read(), weights[5:40, 3:])
    model = lm.build_abstract(lambda: {"w": jnp.zeros((64, 1024))}).shard(mesh8, {"w": P("model")})
    np.testing.assert_array_equal(model.materialize(checkpoint, max_host_memory="192KiB")["w"], weights)


@pytest.mark.parametrize("workspace", [0, 3 * 4096])
def test_large_boxes_are_read_in_pieces_that_fit(tmp_path, workspace):
    weights = numbers((256, 256))  # 256 KiB
    write(tmp_path, weights, (32, 32))  # in chunks of 4
    values, extra = read_within(lm.open_checkpoint(tmp_path)["w"].astype(np.float64), workspace)
    np.testing.assert_array_equal(values, weights)
    assert extra < 64 << 10


def write(folder: Path, array: np.ndarray, chunk: tuple[int, ...], driver: str = "zarr") -> None:
    """Writes the array `w` of an item, without `_METADATA`, through tensorstore."""
    layout = ts.ChunkLayout(chunk_shape=chunk, inner_order=tuple(reversed(range(array.ndim))))  # as Fortran has it
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/w/"}}
    options = {"dtype": array.dtype, "shape": array.shape, "chunk_layout": layout}
    spec["store_data_equal_to_fill_value"] = True
    ts.open(spec, create=True, **options).result().write(array).result()


CHUNK = 512 << 10


def decoded() -> int:
    """Chunks of that size that tensorstore has decoded in this process."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/internal/riegeli/")
    return sum(int(value["value"]) for metric in found for value in metric["values"]) // CHUNK


@pytest.fixture
def chunks(tmp_path):
    """A checkpoint with two arrays, each one chunk."""
    values = {name: numbers((256, 512)) + number for number, name in enumerate("vw")}
    path = save(tmp_path / "saved", {name: jnp.asarray(value) for name, value in values.items()})
    with buffer_sizes(kept_chunk=1024), lm.open_checkpoint(path) as checkpoint:
        yield checkpoint, values


def sharded(shape: tuple[int, int], mesh: Any) -> Any:
    abstract = lm.build_abstract(lambda: {name: jnp.zeros(shape) for name in "vw"})
    return abstract.shard(mesh, {".*": P("model")})


def test_a_large_chunk_is_decoded_once_for_all_shards(chunks, mesh8):
    """Rows, read one shard after the other, as those of a tensor larger than the budget are."""
    checkpoint, values = chunks
    before = decoded()
    model = sharded((256, 512), mesh8).materialize(checkpoint, max_host_memory="3MiB")
    jax.tree.map(np.testing.assert_array_equal, values, model)
    assert decoded() - before == 2
    for rows, count in ((slice(0, 3), 3), (slice(3, 9), 3), (slice(0, 3), 4)):
        np.testing.assert_array_equal(checkpoint["w"][rows].read(), values["w"][rows])
        assert decoded() - before == count, "what was loaded is not kept, nor what was closed"
        if rows.start:
            checkpoint.close()


@pytest.mark.parametrize("finished", [True, False])
def test_a_stream_leaves_no_chunk_behind(chunks, mesh8, finished):
    """A chunk that is needed in part would be kept, and in nobody's budget, once its tensor is there."""
    checkpoint, values = chunks
    stream = iter(sharded((128, 512), mesh8).stream({name: checkpoint[name][:128] for name in values}))
    for name, array in stream:
        np.testing.assert_array_equal(array, values[name][:128])
        if not finished:
            stream.close()
    before = decoded()
    [checkpoint[name][:3].read() for name in values]
    assert decoded() - before == 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_any_chunking(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunk = tuple(data.draw(st.integers(1, extent)) for extent in shape)
    driver = data.draw(st.sampled_from(["zarr", "zarr3"]))
    array = numbers(shape, np.int16)
    folder = tmp_path_factory.mktemp("item")
    write(folder, array, chunk, driver)
    tensor = lm.open_checkpoint(folder)["w"]
    index = tuple(
        slice(data.draw(st.integers(0, extent)), data.draw(st.integers(0, extent)), data.draw(st.sampled_from([1, 2])))
        for extent in shape
    )
    expected = array[index].T.astype(np.float32)
    np.testing.assert_array_equal(tensor[index].T.astype(np.float32).read(), expected)
    shutil.rmtree(folder)


# Which folder ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with one array, `w`."""
    return save(tmp_path_factory.mktemp("first") / "saved", {"w": jnp.zeros(2)}, use_ocdbt=False)


@pytest.fixture
def steps(tmp_path: Path, first: Path) -> Any:
    """Makes a folder of steps, each with one array, whose value is its number."""

    def make(*names: str, item: str = "") -> Path:
        for name in names:
            folder = tmp_path / "root" / name / item
            shutil.copytree(first, folder, dirs_exist_ok=True)
            shutil.rmtree(folder / "w")
            number = float("".join(c for c in name.split(".")[0] if c.isdigit()))
            write(folder, np.full(2, number, np.float32), (2,))
            if item:
                shutil.move(folder / "_CHECKPOINT_METADATA", tmp_path / "root" / name)
        return tmp_path / "root"

    return make


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
def test_the_newest_committed_step(steps, names, newest, item):
    root = steps(*names, item=item)
    (root / "metrics").mkdir()
    checkpoint = lm.open_checkpoint(root)
    assert checkpoint["w"].read()[0] == newest
    assert checkpoint.path == str(root)
    assert Path(checkpoint.item).is_relative_to(root)


def uncommit(folder: Path) -> None:
    """What saving leaves until it commits, where a commit is no renaming."""
    (folder / "commit_success.txt").unlink(missing_ok=True)
    change(folder, {"_CHECKPOINT_METADATA": {"commit_timestamp_nsecs": None}})


def test_uncommitted_steps_are_skipped_and_refused(steps):
    root = steps("1", "2")
    uncommit(root / "2")
    assert lm.open_checkpoint(root)["w"].read()[0] == 1
    refused(root / "2", "2 is half written: expected a committed checkpoint, found that _CHECK")
    assert "is half written" in problems(root / "2")[0] and inspected(root / "2")["format"] == "orbax"
    uncommit(root / "1")
    refused(root, "root: expected a committed step, found 2 that were never committed, 2 ")
    (root / "2" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs":')
    refused(root, "2/_CHECKPOINT_METADATA: expected a JSON object")


UNFINISHED = ("1.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-17")


@pytest.mark.parametrize(
    ("names", "opened", "message"),
    [
        (UNFINISHED, "", "found only unfinished ones .1.orbax-checkpoint-tmp, 2.*; wait until"),
        (UNFINISHED, UNFINISHED[0], "tmp is half written: .* its name has '.orbax-checkpoint-tmp'"),
        (("step_1", "checkpoint_2"), "", r"prefixes \['checkpoint', 'step'\]; open one of '.*checkpoint_2'"),
        (("1", "01"), "", r"step 1 more than once: \['1', '01'\]"),
    ],
)
def test_steps_that_are_not_one(steps, names, opened, message):
    refused(steps(*names) / opened, message)


def test_an_unfinished_item(steps):
    step = steps("1", item="state") / "1"
    (step / "state").rename(step / "state.orbax-checkpoint-tmp")
    refused(step, r"expected an Orbax item.* found state.orbax-checkpoint-tmp; wait until")


def test_items(tmp_path):
    root = tmp_path / "root"
    with ocp.CheckpointManager(root) as manager:
        items = {
            "params": ocp.args.StandardSave({"w": jnp.ones(2)}),
            "words": ocp.args.PyTreeSave({"config": "text"}),
            "data": ocp.args.JsonSave({"position": 3}),
        }
        manager.save(1, args=ocp.args.Composite(**items))
        items["opt_state"] = ocp.args.StandardSave({"m": jnp.full(2, 2)})
        manager.save(2, args=ocp.args.Composite(**items))
    one = lm.open_checkpoint(root / "1")
    assert list(one) == ["w"]
    assert one.item == str(root / "1" / "params")
    with lm.open_checkpoint(root) as two:
        assert sorted(two) == ["opt_state/m", "params/w"]
        assert {name: tensor.read().tolist() for name, tensor in two.items()} == {
            "opt_state/m": [2, 2],
            "params/w": [1, 1],
        }
        assert len(two.files) == len(one.files) + len(lm.open_checkpoint(root / "2" / "opt_state").files)
        state = {"params": {"w": jnp.zeros(2)}, "opt_state": {"m": jnp.zeros(2)}}
        loaded = lm.build_abstract(lambda: state).materialize(two)
        assert loaded["opt_state"]["m"].tolist() == [2, 2]
    assert list(lm.open_checkpoint(root / "2" / "opt_state")) == ["m"]
    refused(root / "2" / "words", "words: expected arrays, found a tree of 1 leaves without any")
    refused(root / "2" / "data", "found no checkpoint in folder .*data")
    for item in ("params", "opt_state"):
        shutil.rmtree(root / "2" / item)
    refused(root, r"2: expected an Orbax item .* arrays, found data, words;")


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ocdbt", "files-zarr3"])
def test_names_without_metadata_are_those_of_the_storage(copied, layout):
    path = copied(layout)
    (path / "_METADATA").unlink()
    checkpoint = lm.open_checkpoint(path)
    assert set(checkpoint) == {*arrays(), "rate"}
    np.testing.assert_array_equal(checkpoint["layers/0/kernel"].read(), arrays()["layers/0/kernel"])


def test_keys_with_dots_and_slashes(tmp_path):
    item = {"a.b": jnp.ones(1), "transformer/layer_0": {"w": jnp.ones(2)}, "..": {"..": {"x": jnp.ones(3)}}}
    checkpoint = lm.open_checkpoint(save(tmp_path / "saved", item))
    shapes = {"a.b": (1,), "transformer/layer_0/w": (2,), "../../x": (3,)}
    assert {name: tensor.shape for name, tensor in checkpoint.items()} == shapes
    for number, other in enumerate(("a.b", "a/b")):
        path = save(tmp_path / str(number), jax.tree.map(jnp.float32, {"a": {"b": 1.0}, other: 2.0}))
        refused(path, r"_METADATA: expected paths that differ .* \('a', 'b'\) and \('a")


# What is missing or corrupt -------------------------------------------------------------------------------------------


def change(path: Path, changes: dict[str, Any]) -> None:
    """Writes bytes, updates JSON, cuts a file to a size, or removes it: a file, or the value of a key in a database."""
    for name, new in changes.items():
        for file in list(path.glob(name)) or [path / name]:
            match new:
                case bytes():
                    file.write_bytes(new)
                case dict():
                    file.write_text(json.dumps({**json.loads(file.read_text()), **new}))
                case int():
                    os.truncate(file, new)
                case _ if file.exists():
                    file.unlink()
                case _:
                    store = ts.KvStore.open(
                        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
                    ).result()
                    assert store.read(name).result().state == "value"
                    store.write(name, None).result()


LEAF = b'{"tree_metadata": {"a": {"key_metadata": [{"key": 3}], "value_metadata": {"value_type": "x"}}}}'
INDEX = r"saved/manifest\.ocdbt: expected the index .*copy it again"
NO_INDEX = r"expected manifest\.ocdbt, .* found none.* Copy it"
CHUNKS = {"ocdbt": ("0.3", "0"), "ocdbt-zarr3": ("c/0/3", "c"), "files": ("0.3", "0"), "files-zarr3": ("c/0/3", "c")}
# Layout, changes, the error.
REFUSED = [
    *((at, {f"layers.0.kernel/{key}": None}, "'layers/0/kernel': .*1 missing") for at, (key, _) in CHUNKS.items()),
    *((at, {f"step/{key}": None}, "array 'step': .*1 missing") for at, (_, key) in CHUNKS.items()),
    ("ocdbt", {"host/.zarray": None}, "none stored for 1: host; copy the whole"),
    ("files", {"host/.zarray": None}, "none stored for 1: host; copy the whole"),
    ("files", {"host/.zarray": None, "checkpoint": b"msgpack"}, "1: host; they are in the 'checkpoint' file of an old"),
    (
        "files",
        {"_METADATA": None, "checkpoint": b"\x81\xa4host\xc7\x15\x01\x93\x91\x02\xa7float32\xc4\x08" + bytes(8)},
        "some in 'checkpoint'; they are in the 'checkpoint' file of an old Orbax: restore it",
    ),
    ("ocdbt", {"manifest.ocdbt": 40}, INDEX),
    ("ocdbt", {"d/*": 16}, INDEX),
    ("ocdbt", {"d/*": None}, INDEX),
    (
        "ocdbt",
        {"manifest.ocdbt": b"version https://git-lfs.github.com/spec/v1\nsize 9\n"},
        "ocdbt is a Git LFS pointer",
    ),
    ("ocdbt", {"manifest.ocdbt": None}, NO_INDEX),
    ("ocdbt", {"manifest.ocdbt": None, "_METADATA": None}, NO_INDEX),
    ("ocdbt", {"_METADATA": b"{"}, "_METADATA: expected a JSON object"),
    ("ocdbt", {"_METADATA": b"[]"}, "_METADATA: expected a JSON object, found a list"),
    ("ocdbt", {"_METADATA": b"{}"}, "_METADATA: expected a 'tree_metadata' object"),
    ("ocdbt", {"_METADATA": b'{"tree_metadata": {"a": 3}}'}, "'key_metadata' and 'value_metadata' of leaf a"),
    ("ocdbt", {"_METADATA": LEAF}, "text"),
    ("ocdbt", {"_METADATA": b'{"tree_metadata": {"a": 1, "a": 2}}'}, "'a' twice"),
    ("files", {"step/.zarray": {"shape": [1 << 10], "chunks": [1]}}, "expected every chunk"),
    # Small: tensorstore 0.1.86 ends the process over a chunk that does not fit into memory.
    ("files", {"step/.zarray": {"shape": [1], "chunks": [1 << 10]}}, "expected chunks inside its shape"),
    ("files", {"step/.zarray": {"shape": [-1], "chunks": [1]}}, "cannot be opened"),
    ("files", {"step/.zarray": {"dtype": "uint4"}}, "cannot be opened: .* tensorstore has no such dtype; save it as"),
    ("files-zarr3", {"step/zarr.json": {"data_type": "float8_e4m3"}}, "tensorstore has no such dtype; save it as"),
    ("files", {"step/.zarray": {"dtype": "<q9"}}, "cannot be opened"),
    ("files", {"step/.zarray": b"{}"}, "expected an array that step/.zarray describes"),
    ("files", {"step/.zarray": {"compressor": {"id": "mystery"}}}, "cannot be opened"),
    ("files", {"step/.zarray": {"dtype": "|S4"}}, "expected numbers|cannot be opened"),
]


@pytest.mark.parametrize(("layout", "changes", "message"), REFUSED)
def test_what_is_missing_or_corrupt_is_refused(copied, layout, changes, message):
    change(path := copied(layout), changes)
    refused(path, message)
    found = inspected(path)
    assert found["problems"]
    if layout == "files" and "step/.zarray" in changes:  # what is well is listed still
        assert [tensor["name"] for tensor in found["tensors"]] == sorted({*arrays(), "rate"} - {"step"})


def test_links_and_pipes(copied):
    path = copied("files")
    chunk = (path / "host" / "0").rename(path.parent / "outside")
    (path / "host" / "0").symlink_to(chunk)
    refused(path, "host/0: expected a file in the checkpoint's folder, found a symbolic link")
    (path / "host" / "0").unlink()
    os.mkfifo(path / "host" / "0")
    refused(path, "host/0: expected a file, found a pipe")


@pytest.mark.parametrize("layout", ["ocdbt", "files"])
@pytest.mark.parametrize("new", [16, None, "a bomb"])
def test_what_is_damaged_once_it_is_open_is_an_error_of_reading(tmp_path, copied, layout, new):
    """Cut, lost, or a chunk that unpacks to more than it should."""
    tensor = lm.open_checkpoint(path := copied(layout))["layers/1/kernel"]
    if new == "a bomb":
        new = (save(tmp_path / "bomb", {"w": jnp.zeros(1 << 20)}, use_ocdbt=False) / "w" / "0").read_bytes()
    change(path, {"ocdbt.process_0/d/*" if layout == "ocdbt" else "layers.1.kernel/3.0": new})
    with pytest.raises(lm.CheckpointError, match="cannot read array 'layers/1/kernel' of .*saved: .*copy it again"):
        tensor.read()


def test_an_inner_chunk_that_was_never_written_is_an_error(tmp_path):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)}, use_ocdbt=False, use_zarr3=True)
    shutil.rmtree(path / "w")
    write_shard(path, np.ones(8, np.float32), (4,), np.s_[:4])
    np.testing.assert_array_equal(lm.open_checkpoint(path)["w"][:4].read(), np.ones(4))
    unreadable(path, "cannot read array 'w'.*missing")


def test_chunks_of_zeros_that_an_older_orbax_left_out(copied):
    path = copied("files")
    change(path, {"_METADATA": {"store_array_data_equal_to_fill_value": False}})
    change(path, {"moments.0/0.0": None, "layers.0.kernel/0.3": None})
    (problem,) = problems(path)  # elsewhere a warning
    assert "array 'layers/0/kernel' is missing 1 of its chunks" in problem
    checkpoint = lm.open_checkpoint(path)
    with pytest.warns(lm.LazyModelWarning, match="'moments/0' is missing 1 of its chunks, which are read as zeros"):
        np.testing.assert_array_equal(checkpoint["moments/0"].read(), np.zeros((8, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not checkpoint["layers/0/kernel"][:, 12:16].read().any()  # said once a checkpoint


@pytest.mark.parametrize("layout", ["ocdbt", "files"])
def test_a_hugging_face_cache(tmp_path, made, layout):
    """Files of a cache are links into `blobs`."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc" / "2b"
    blobs.mkdir(parents=True)
    for index, file in enumerate(sorted(file for file in made(layout).rglob("*") if file.is_file())):
        shutil.copy(file, blobs / str(index))
        link = snapshot / file.relative_to(made(layout))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(index))
    np.testing.assert_array_equal(lm.open_checkpoint(snapshot)["host"].read(), arrays()["host"])


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path):
    path = save(tmp_path / "saved", {"w": jnp.ones(8)})
    tensor = lm.open_checkpoint(path)["w"]
    shutil.rmtree(path)
    save(path, {"w": jnp.zeros(8)})
    with pytest.raises(lm.CheckpointError, match="changed while it was being read"):
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
    checkpoint = lm.open_checkpoint(path)
    assert list(checkpoint) == ["w"]
    np.testing.assert_array_equal(checkpoint["w"].read(), weights)
    (path / "ocdbt.process_1" / "manifest.ocdbt").unlink()
    np.testing.assert_array_equal(lm.open_checkpoint(path)["w"].read(), weights)
