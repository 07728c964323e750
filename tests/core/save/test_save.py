"""Saving: what is written is what was there, bit for bit, in pieces within the budget; or nothing is written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file

import lazymodel as lm
from lazymodel import From, WeightMap
from tests.command import problems
from tests.core.save._places import placed
from tests.large import mostly_large
from tests.private_memory import Peak
from tests.small import make_small


def random_bits(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every kind of value, NaNs included."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    values = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype == np.dtype(ml_dtypes.float4_e2m1fn):
        values &= 15
    return values.view(dtype)[..., 0]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def arrays(mesh8: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Sharded on either axis, replicated, without dimensions, without elements."""
    floats = np.dtype("float32")
    return {
        "rows": placed(random_bits(floats, (16, 6), 1), mesh8, "model"),
        "columns": placed(random_bits(np.dtype(ml_dtypes.bfloat16), (5, 24), 2), mesh8, None, "model"),
        "everywhere": placed(random_bits(floats, (7,), 3), mesh8),
        "count": jnp.asarray(3),
        "nothing": jnp.zeros((0, 4)),
    }


@pytest.mark.parametrize(
    "dtype",
    mostly_large(
        [
            *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
            *("float16", "bfloat16", "float32", "float64", "complex64", "float4_e2m1fn"),
            *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        ],
        ["bool", "int64", "bfloat16", "complex64", "float4_e2m1fn", "float8_e8m0fnu"],
    ),
)
def test_every_dtype_comes_back_on_another_mesh_bit_for_bit(
    tmp_path: Path, mesh8: jax.sharding.Mesh, mesh42: jax.sharding.Mesh, dtype: str
) -> None:
    values = random_bits(jnp.dtype(dtype), (8, 16))
    with jax.enable_x64(True):
        lm.save({"a/w": placed(values, mesh8, None, "model")}, tmp_path / "saved")
        with lm.open_checkpoint(tmp_path / "saved") as ckpt:
            assert ckpt["a/w"].dtype == values.dtype
            abstract = lm.build_abstract(lambda: {"a": {"w": jnp.zeros((8, 16), values.dtype)}})
            abstract = abstract.shard(mesh42, {"a/w": P("batch", "model")})
            array = abstract.materialize(ckpt, initialize="nothing")["a"]["w"]
    assert array.dtype == values.dtype and array.sharding.spec == P("batch", "model")
    assert np.asarray(array).tobytes() == values.tobytes()


def test_one_file_is_what_the_reference_implementation_reads(tmp_path: Path, arrays: dict[str, jax.Array]) -> None:
    lm.save(arrays, tmp_path / "x.safetensors", metadata={"made by": "test"}, max_shard_size=1)
    assert files_in(tmp_path) == ["x.safetensors"]
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].shape == array.shape and loaded[name].tobytes() == np.asarray(array).tobytes()
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "made by": "test"}
    header = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0


def test_a_sharded_folder_has_an_index(tmp_path: Path, arrays: dict[str, jax.Array]) -> None:
    lm.save(arrays, tmp_path / "deep" / "saved", max_shard_size="400B")
    names = files_in(tmp_path / "deep" / "saved")
    assert names == [*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "deep" / "saved" / names[-1]).read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in arrays.values())}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "deep" / "saved" / file)
    assert max((tmp_path / "deep" / "saved" / name).stat().st_size for name in names[:2]) < 400 + 400
    with lm.open_checkpoint(tmp_path / "deep" / "saved") as ckpt:
        assert ckpt.keys() == arrays.keys()
        for name, array in arrays.items():
            assert ckpt[name].read().tobytes() == np.asarray(array).tobytes()


def test_pytrees_keys_and_ties(tmp_path: Path) -> None:
    def build(key: jax.Array) -> dict[str, Any]:
        tied = jax.random.normal(key, (2, 3))
        return {"layers": [{"w": tied}, {"w": jnp.zeros(2)}], "head": tied, "name": "x", "key": jax.random.key(5)}

    tree = build(jax.random.key(1))
    lm.save(tree, tmp_path / "saved")
    abstract = lm.build_abstract(build, jax.random.key(0))
    with lm.open_checkpoint(tmp_path / "saved") as ckpt:
        assert set(ckpt) == set(abstract) == {"head", "layers/0/w", "layers/1/w", "key"}
        model = abstract.materialize(ckpt, initialize="nothing")
    np.testing.assert_array_equal(model["layers"][0]["w"], tree["head"])
    assert jax.random.key_data(model["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()


@pytest.mark.parametrize(
    "name", mostly_large(["x.safetensors", "folder", "x.h5", "x.weights.json", "orbax"], ["folder", "orbax"])
)
def test_an_array_in_several_places_is_under_each_path(tmp_path: Path, mesh8: jax.sharding.Mesh, name: str) -> None:
    def tied(key: jax.Array, other: float = 0) -> dict[str, Any]:
        table = placed(np.asarray(jax.random.normal(key, (16, 8))), mesh8, "model")
        return {"embed": table, "lm_head": table + other if other else table, "bias": jnp.ones((3,))}

    format = name if name == "orbax" else None
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    trees = tied(jax.random.key(1)), tied(jax.random.key(1), 1e-3)
    for number, tree in enumerate(trees):
        lm.save(tree, tmp_path / str(number) / name, format=format)
        with lm.open_checkpoint(tmp_path / str(number) / name) as ckpt:
            assert set(ckpt) == set(tree)
            for path, array in tree.items():
                assert ckpt[path].read().tobytes() == np.asarray(array).tobytes()

    def init(key: jax.Array) -> dict[str, Any]:
        table = jax.random.normal(key, (16, 8))
        return {"embed": table, "lm_head": table, "bias": jnp.ones((3,))}

    rules = {"embed|lm_head": P(None, "model"), "bias": P()}
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh8, rules)
    for number, tree in enumerate(trees):
        for source in (tree, lm.open_checkpoint(tmp_path / str(number) / name)):
            model = abstract.materialize(source, initialize="nothing", max_host_memory="64KiB")
            jax.tree.map(np.testing.assert_array_equal, model, tree)
    only, reports = {"lm_head": trees[1]["lm_head"], "bias": trees[1]["bias"]}, list[lm.LoadReport]()
    table = lm.WeightMap({"embed": "lm_head", "lm_head": "absent", "bias": "bias"})
    for source in (only, lm.map_checkpoint(only, table, abstract)):
        model = abstract.materialize(source, initialize="nothing", report=reports.append)
        np.testing.assert_array_equal(model["embed"], only["lm_head"])
        np.testing.assert_array_equal(model["lm_head"], only["lm_head"])
    assert [report.filled for report in reports] == [{"embed": "lm_head"}, {"lm_head": "embed"}]
    assert "began equal to another: 'embed' of 'lm_head'" in str(reports[0])
    lm.save(abstract, tmp_path / "abstract")
    with lm.open_checkpoint(tmp_path / "abstract") as ckpt:
        assert set(ckpt) == {"embed", "lm_head", "bias"}


def test_a_table_and_a_function_write_what_was_read(tmp_path: Path, mesh8: jax.sharding.Mesh) -> None:
    stored = {f"h.{n}.qkv": random_bits(np.dtype("float32"), (48, 16), n) for n in range(3)}
    lm.save(stored, tmp_path / "stored")
    fused = From("h.{n}.qkv")
    table = WeightMap(
        {
            "q": fused.part(0, of=(16, 32)).T.stack("n"),
            "kv": fused.part(1, of=(16, 32)).rearrange("(kv d) m -> kv m d", kv=2).stack("n", axis=1),
        }
    )
    abstract = lm.build_abstract(lambda: {"q": jnp.zeros((3, 16, 16)), "kv": jnp.zeros((2, 3, 16, 16))})
    abstract = abstract.shard(mesh8, {"q": P(None, "model"), "kv": P(None, None, None, "model")})
    model = abstract.materialize(lm.map_checkpoint(lm.open_checkpoint(tmp_path / "stored"), table, abstract))

    def back(arrays: Mapping[str, lm.LazyTensor]) -> dict[str, Any]:
        q, kv = arrays["q"], arrays["kv"]
        return {
            f"h.{n}.qkv": np.concatenate([q[n].T, np.reshape(np.transpose(kv[:, n], (0, 2, 1)), (32, 16))])
            for n in range(3)
        }

    for name, mapping in (("table", table), ("function", back)):
        lm.save(model, tmp_path / name, mapping=mapping, max_host_memory=600)
        loaded = load_file(tmp_path / name / "model.safetensors")
        assert loaded.keys() == stored.keys()
        for key, value in stored.items():
            assert loaded[key].tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "mapping", [None, lambda arrays: {"w": arrays["w"].T.astype("float16")}], ids=["as is", "other"]
)
def test_the_budget_bounds_what_is_staged(
    tmp_path: Path, mesh8: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch, mapping: Any
) -> None:
    """Half of it is for what is about to be written, half for making that."""
    values, budget = np.ones((1024, 4096), "float32"), 2 << 20
    array, done, staged, write = placed(values, mesh8, None, "model"), list[tuple[int, int]](), list[int](), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (staged.append(len(data)), write(fd, data, at))[1])
    lm.save({"w": array[:8]}, tmp_path / "first", mapping=mapping)  # what stays
    staged.clear()
    with Peak() as peak:
        lm.save(
            {"w": array},
            tmp_path / "saved",
            max_host_memory=budget,
            mapping=mapping,
            progress=lambda now, total: done.append((now, total)),
        )
    assert max(staged) <= budget // 2
    assert peak.nbytes < budget + (1 << 20)  # and what is no tensor's
    nbytes = array.nbytes if mapping is None else array.nbytes // 2
    assert done[-1] == (nbytes, nbytes) and len(done) > 8
    if mapping is None:
        assert load_file(tmp_path / "saved" / "model.safetensors")["w"].tobytes() == values.tobytes()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="writes past the page cache are Linux'")
@pytest.mark.parametrize("block", [1, 8192, None])
def test_large_runs_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int | None) -> None:
    """As far as the file system lets them; one that asks for larger blocks, or for none, has them in the cache."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 256, (size,), np.uint8) for name, size in (("a", 3_000_001), ("b", 5), ("c", 4 << 20))
    }
    arrays["large"] = rng.normal(size=(1023, 1031)).astype("float32")
    direct: list[int] = []
    write, opened = os.pwrite, os.open
    (tmp_path / "probe").touch()
    try:
        os.close(opened(tmp_path / "probe", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct writes")

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return write(fd, data, offset)
        if block and (offset | len(data)) % block:
            raise OSError(errno.EINVAL, "Invalid argument")
        direct.append(write(fd, data[: 1 << 20], offset))  # not all at once, as a full disk or a signal has it
        return direct[-1]

    def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if block is None and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "open", open_)
    make_small(monkeypatch, write_chunk=3 << 20)
    lm.save(arrays, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all((loaded[name] == array).all() for name, array in arrays.items())
    if block == 1:
        assert sum(direct) > 0.98 * sum(array.nbytes for array in arrays.values())


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"w": np.zeros(2, np.longdouble)}, {}, "'w': safetensors has no dtype .*, only those of JAX; cast it with"),
        ({"w": np.zeros(3, ml_dtypes.float4_e2m1fn)}, {}, r"'w': safetensors packs 4-bit floats in pairs, and \[3\]"),
        ({"w": None}, {}, "no arrays in what was given, .*dict"),
        ({"__metadata__": np.zeros(2)}, {}, "cannot be called '__metadata__'"),
        ({"\ud800": np.zeros(2)}, {}, "cannot be written as UTF-8"),
        ({"w": np.zeros(2)}, {"format": "pickle"}, "format is one of hdf5, orbax, safetensors, or None"),
        ({"w": np.zeros(2)}, {"metadata": {"a": 1}}, "metadata maps strings to strings; found 'a': 1"),
        ({"w": np.zeros(2)}, {"mapping": lambda a: a["v"]}, "no variable 'v'; closest: 'w'|no variable 'v'"),
        ({"w": np.zeros(2)}, {"mapping": lambda a: {"w": {"v": a["w"]}}}, "a flat dict of tensor name to tensor"),
        ({"w": np.zeros(2)}, {"mapping": lambda a: [a["w"]]}, "returns a dict of tensor name to tensor"),
        ({"w": np.zeros(2)}, {"mapping": WeightMap({"v": "v"})}, "variable 'w' has no entry in the table"),
        ({"w": np.zeros(2)}, {"max_host_memory": 8}, "max_host_memory"),
        ({"w": np.zeros(2)}, {"max_shard_size": "lots"}, "max_shard_size: cannot read 'lots'"),
        ({"w": np.zeros(2)}, {"path": "w.gguf"}, "w.gguf: lazymodel writes no such files; .*safetensors"),
        ({"w": np.zeros(2)}, {"path": "w.npz"}, "w.npz: lazymodel writes no such files; .*safetensors"),
        ({"w": np.zeros(2)}, {"format": "hdf5"}, "expected a name such as x.weights.h5, or x.weights.json"),
        ({"a": np.zeros(2), "a/b": np.zeros(2)}, {"format": "orbax"}, "'a': Orbax saves a tree"),
        ({"a/b": np.zeros(2), "a#": np.zeros(2)}, {"format": "orbax", "mapping": lambda t: {"a/b": t["a/b"],
            "a": t["a#"]}}, "'a': Orbax saves a tree"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_said_before_anything_is_written(
    tmp_path: Path, given: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        lm.save(given, tmp_path / options.pop("path", "saved"), **options)
    assert files_in(tmp_path) == []


def test_a_donated_array_is_named(tmp_path: Path) -> None:
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(lm.LazyModelError, match="'w' was deleted or donated"):
        lm.save({"w": array}, tmp_path / "saved")


# Orbax ----------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_within_the_budget_is_not_begun(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(1 << 18, np.float32))
    with pytest.raises(lm.LazyModelError, match=r"'w': reading any of it takes .* more than max_host_memory=1\.00 KiB"):
        lm.save(lm.open_checkpoint(tmp_path / "a.npz"), tmp_path / "out", max_host_memory=1024)
    assert not (tmp_path / "out").exists()


def test_orbax_with_no_array_that_has_elements(tmp_path: Path) -> None:
    lm.save({"only": jnp.zeros((0, 3), "bfloat16")}, tmp_path / "saved", format="orbax")
    abstract = lm.build_abstract(lambda: {"only": jnp.zeros((0, 3), "bfloat16")})
    with lm.open_checkpoint(tmp_path / "saved") as ckpt:
        assert (ckpt["only"].shape, ckpt["only"].dtype) == ((0, 3), jnp.bfloat16)
        abstract.materialize(ckpt, initialize="nothing")
        lm.save(ckpt, tmp_path / "again", format="orbax")
    with lm.open_checkpoint(tmp_path / "again") as ckpt:
        assert set(ckpt) == {"only"}
    assert not problems(tmp_path / "saved")


def test_a_failure_leaves_nothing(
    tmp_path: Path, arrays: dict[str, jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for target in ("saved", "x.safetensors"):
        with pytest.raises(lm.LazyModelError, match=rf"cannot write .*{target} \(.*safetensors\): No space left"):
            lm.save(arrays, tmp_path / target)
    assert files_in(tmp_path) == []
