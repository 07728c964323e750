"""`lazymodel convert`: every format into every other one, what is chosen and cast on the way, what is refused."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lazymodel as lm
from tests.command import lazymodel
from tests.large import mostly_large
from tests.small import make_small

TARGETS = {
    "file": ["out.safetensors"],
    "shards": ["out", "--shard-size", "1KB"],
    "hdf5": ["out.weights.h5"],
    "hdf5 shards": ["out.weights.json", "--shard-size", "1KB"],
    "orbax": ["out", "--to", "orbax"],
}
VALUES = np.random.default_rng(0)


def values(*, bfloat16: bool = True) -> dict[str, np.ndarray]:
    made = {
        "layers/0/kernel": VALUES.normal(size=(33, 20)).astype("float32"),
        "layers/0/bias": VALUES.normal(size=7),
        "layers/1/kernel": VALUES.normal(size=(5, 6, 7)).astype("float16"),
        "embedding/ä": np.arange(600, dtype="int8").reshape(3, 200),
        "step": np.array(3, "int64"),
        "mask": np.array([True, False, True]),
        "nothing": np.zeros((0, 3), "float32"),
    }
    return made | ({"norm": VALUES.normal(size=11).astype(ml_dtypes.bfloat16)} if bfloat16 else {})


def check(path: Path, expected: dict[str, np.ndarray]) -> None:
    with lm.open_checkpoint(path) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            tensor = found[name].read()
            assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (value.dtype, value.shape, value.tobytes()), name


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    made = values(bfloat16=False)
    lm.save(made, tmp_path / "in.safetensors", metadata={"made": "here"})
    return tmp_path / "in.safetensors", made


def convert(*arguments: object) -> int:
    return lazymodel("convert", "--quiet", *arguments)


@pytest.mark.parametrize("target", mostly_large(TARGETS, ["orbax", "hdf5 shards", "shards"]))
def test_there_and_back(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = values()
    make_small(monkeypatch, orbax_chunk=100)  # several chunks in each direction
    lm.save(made, tmp_path / "in.safetensors")
    name, *options = TARGETS[target]
    assert convert(tmp_path / "in.safetensors", tmp_path / name, *options, "--verify", "--max-host-memory", "1MiB") == 0
    check(tmp_path / name, made)
    assert convert(tmp_path / name, tmp_path / "back", "--verify") == 0
    check(tmp_path / "back", made)
    assert not any("saving" in path.name for path in tmp_path.rglob("*"))


def test_other_programs_read_what_is_written(tmp_path: Path, source: Any) -> None:
    path, made = source
    for name, *options in (TARGETS["hdf5"], TARGETS["orbax"]):
        assert convert(path, tmp_path / name, *options) == 0
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "out.weights.h5") as file:
        assert all((file[name][()] == value).all() for name, value in made.items())
    orbax = pytest.importorskip("orbax.checkpoint")
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(tmp_path / "out")
    assert tree["nothing"].shape == made["nothing"].shape and tree["step"] == 3
    assert (tree["layers"]["0"]["kernel"] == made["layers/0/kernel"]).all()


def test_what_is_chosen_and_cast(tmp_path: Path, source: Any) -> None:
    path, made = source
    chosen = ["--include", "layers/*", "--include", "step", "--exclude", "*/1/*", "--dtype", "bfloat16"]
    assert convert(path, tmp_path / "some", *chosen, "--verify") == 0
    cast = {"layers/0/kernel", "layers/0/bias"}
    expected = {name: made[name].astype(ml_dtypes.bfloat16) for name in cast} | {"step": made["step"]}
    check(tmp_path / "some", expected)
    with lm.open_checkpoint(tmp_path / "some") as found:
        assert found.metadata == {"made": "here", "format": "pt"}


TABLE = """
import numpy as np
import lazymodel as lm
weights = lm.WeightMap({"layers/{n}/kernel": lm.From("model.{n}.weight").T, "step": None})
both = lambda tensors: {
    "joined": np.concatenate([tensors["layers/0/kernel"]] * 2), "one": tensors["step"], "two": tensors["step"]
}
nothing = 3
"""


def test_a_table_or_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "convert_table.py").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "convert_table", raising=False)
    made = {name: value for name, value in values().items() if name in ("layers/0/kernel", "layers/1/kernel", "step")}
    lm.save(made, "in")
    assert convert("in", "named.h5", "--map", "convert_table:weights", "--verify") == 0
    check(tmp_path / "named.h5", {f"model.{n}.weight": made[f"layers/{n}/kernel"].T.copy() for n in (0, 1)})
    assert convert("in", "joined", "--map", "convert_table:both", "--to", "orbax") == 0
    joined = {"joined": np.concatenate([made["layers/0/kernel"]] * 2), "one": made["step"], "two": made["step"]}
    check(tmp_path / "joined", joined)
    assert convert("in", "x", "--map", "convert_table:nothing") == 2
    assert "expected a WeightMap or a function" in capsys.readouterr().err


def put(monkeypatch: pytest.MonkeyPatch, where: Path, content: bytes) -> None:
    """Has other bytes in a file as soon as it is in place: as of a disk that lies."""
    replace = os.replace

    def replaced(one: Any, other: Any) -> None:
        replace(one, other)
        if Path(other) == where:
            where.write_bytes(content)

    monkeypatch.setattr(os, "replace", replaced)


def test_verify_finds_a_flipped_bit(tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path, _ = source
    out = tmp_path / "out.safetensors"
    assert convert(path, out, "--verify") == 0
    content = bytearray(out.read_bytes())
    content[-5] ^= 4
    put(monkeypatch, out, bytes(content))
    assert convert(path, out, "--overwrite") == 0
    assert convert(path, out, "--overwrite", "--verify") == 1
    assert "expected other bytes in [" in capsys.readouterr().out


@pytest.mark.parametrize("budget", [[], ["--max-host-memory", "512"]])
def test_verify_says_what_is_different(
    tmp_path: Path, budget: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    one = {"a": np.zeros(3), "b": np.zeros(3), "c": np.zeros((40, 3), "float32"), "d": np.array([np.nan, -0.0])}
    two = {"b": np.zeros(3, "float32"), "c": one["c"].copy(), "d": one["d"], "e": np.zeros(1)}
    two["c"][30, 1] = -0.0
    for name, made in (("one", one), ("two", two)):
        lm.save(made, tmp_path / f"{name}.safetensors")
    put(monkeypatch, tmp_path / "out.safetensors", (tmp_path / "two.safetensors").read_bytes())
    assert convert(tmp_path / "one.safetensors", tmp_path / "out.safetensors", "--verify", *budget) == 1
    found = " ".join(capsys.readouterr().out.split())
    assert re.search(r"'a' .*'e' .*'b': .*float64\[3\].*float32\[3\].*'c': .*\[0:40, 0:3\]", found), found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "out"], "there is no checkpoint at absent"),
        (["in.safetensors", "in.safetensors"], "is what is converted, or its folder"),
        (["in.safetensors", "out", "--include", "Layers/*"], "pattern 'Layers/*' matches no tensor"),
        (["in.safetensors", "out", "--exclude", "*"], "no tensor is left"),
        (["in.safetensors", "out", "--dtype", "int8"], "expected a floating-point dtype"),
        (["in.safetensors", "out", "--to", "hdf5"], "expected a name such as x.weights.h5"),
        (["in.safetensors", "out.npz"], "lazymodel writes no such files"),
        (["in.safetensors", "out.h5", "--to", "orbax"], "the name is one of hdf5"),
        (["in.safetensors", "out", "--to", "huggingface"], "name one with --cls"),
        (["in.safetensors", "out", "--quantize", "int8"], "name one with --cls"),
        (["in.safetensors", "out", "--map", "absent_module:weights"], "there is no module 'absent_module'"),
        (["in.safetensors", "out", "--map", ":"], "expected MODULE:NAME"),
        (["in.safetensors", "out", "--storage-option", "region=x"], "neither SRC nor DST is one"),
        (["in.safetensors", "out.weights.h5"], "HDF5 weights have NumPy's numbers and bfloat16, and no float8_e4m3fn"),
        (["in.safetensors", "out", "--dtype", "float32"], "with 'w_scale_inv' alongside"),
        (["in.safetensors", "s3://bucket/out.h5"], "only safetensors are saved to buckets"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lm.save(
        {"w": np.ones((4, 4), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones((1, 1), "float32")}, "in.safetensors"
    )
    assert convert(*arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["above/orbax/inner", "above", "--to", "orbax"],
        ["k_00000.weights.h5", "k.weights.json"],
        ["loose", "loose/out.safetensors"],
    ],
)
def test_the_source_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    made = {"a": np.ones(2, "float32"), "b": np.zeros(3, "float32")}
    lm.save(made, "above/orbax/inner", format="orbax")
    lm.save(made, "k.weights.json", max_shard_size=8)
    for name, value in made.items():
        lm.save({name: value}, f"loose/{name}.safetensors")
    assert convert(*arguments, "--overwrite") == 2
    assert "convert to another path" in capsys.readouterr().err
    assert convert("loose", "out.h5") == 0  # and no other


def test_names_that_a_format_cannot_have(tmp_path: Path) -> None:
    for name, given, message in [
        ("x.h5", {"a": np.zeros(1), "a/b": np.zeros(1)}, "HDF5 has a tree of names"),
        ("x.h5", {"a//b": np.zeros(1)}, "cannot be the path of a dataset"),
        ("x.h5", {"a": np.zeros(1, ml_dtypes.float8_e5m2)}, "and no float8_e5m2"),
    ]:
        with pytest.raises(lm.LazyModelError, match=message):
            lm.save(given, tmp_path / name)
    assert not list(tmp_path.iterdir())
    for names, message in [(["a.b", "a/b"], "would be one array"), (["a" * 300], "cannot be the name of a folder")]:
        with pytest.raises(lm.LazyModelError, match=message):
            lm.save({name: np.zeros(1) for name in names}, tmp_path / "x", format="orbax", mapping=_as_they_are)
    small = {"a": np.ones(3, ml_dtypes.float8_e5m2)}  # whose kind is that of NumPy's own
    lm.save(small, tmp_path / "x", format="orbax", mapping=_as_they_are)
    check(tmp_path / "x", small)


def _as_they_are(tensors: Any) -> dict[str, Any]:
    return {name: np.negative(np.negative(tensor)) for name, tensor in tensors.items()}
