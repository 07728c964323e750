"""`diff` and `lazymodel diff`: names, shapes, dtypes and values; how far apart; what counts as the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import lazymodel as lm
from tests.command import main


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    layers = {f"layers/{i}/w": rng.standard_normal((1100, 1030)).astype("float32") for i in range(2)}
    return {
        **layers,
        "counts": np.arange(6),
        "odd": np.array([1, np.nan, np.inf, 0], "float32"),
        "none": np.zeros((0, 3)),
    }


def saved(folder: Path, name: str, tensors: Any) -> str:
    lm.save(tensors, folder / f"{name}.safetensors")
    return str(folder / f"{name}.safetensors")


def test_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (saved(tmp_path, name, weights()) for name in "ab")
    assert main(["diff", a, b]) == 0
    text = f"{a} and {b}: the same, 5 tensors, bytes equal"
    assert " ".join(capsys.readouterr().out.split()) == text
    assert " ".join(str(lm.diff(a, Path(b))).split()) == text  # paths, as on the command line
    assert lm.statistics(a).to_dict() == lm.statistics(lm.open_checkpoint(a)).to_dict()


def test_what_differs_and_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = weights()
    other["layers/1/w"][1099, 1029] += 0.5  # in the last slab
    other["layers/0/w"] *= np.float32(1.001)
    other["counts"][5] = 2**60
    other["odd"][:] = [1, np.nan, 7, -0.0]
    other["new"] = other.pop("none")
    a, b = saved(tmp_path, "a", weights()), saved(tmp_path, "b", other)
    found = lm.diff(lm.open_checkpoint(a), lm.open_checkpoint(b))
    rows = {tensor.name: tensor for tensor in found.tensors}
    assert bool(found) and found.only == (("none",), ("new",)) and set(rows) == set(weights()) - {"none"}
    last, value = rows["layers/1/w"], float(other["layers/1/w"][1099, 1029])
    assert (last.different, last.largest) == (1, pytest.approx(0.5, rel=1e-5))
    assert last.relative == pytest.approx(0.5 / max(abs(value), abs(value - 0.5)), rel=1e-5)
    assert rows["layers/0/w"].different == 1100 * 1030
    assert rows["layers/0/w"].relative == pytest.approx(0.001, rel=1e-2)
    assert rows["counts"].largest == float(2**60 - 5)
    odd = rows["odd"]
    assert (odd.different, odd.nonfinite, odd.largest, odd.relative) == (2, 1, 0, 0)
    assert main(["diff", a, b, "--tolerance", "0.01"]) == 1
    printed = " ".join(capsys.readouterr().out.split())  # long paths break lines
    assert "3 of 4 tensors that both have differ" in printed and "layers/1/w" in printed and "layers/0/w" not in printed
    assert f"only in {b}: new" in printed and "1 element of odd not finite in one" in printed


def test_dtypes_shapes_and_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = saved(tmp_path, "a", weights())
    b = saved(tmp_path, "b", {name: v.astype(ml_dtypes.bfloat16) for name, v in weights().items()})
    assert main(["diff", a, b, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "lazymodel.diff/1" and not document["same"] and document["compared"] == 5
    layer = next(tensor for tensor in document["tensors"] if tensor["name"] == "layers/0/w")
    assert layer["dtypes"] == ["float32", "bfloat16"] and 0 < layer["relative"] < 2**-8 and not layer["within"]
    assert main(["diff", a, b, "--tolerance", "0.004"]) == 0
    assert "the same within 0.004" in capsys.readouterr().out
    c = saved(tmp_path, "c", {name: v.T.copy() for name, v in weights().items()})
    assert main(["diff", a, c, "--tolerance", "1"]) == 1
    assert "(1100, 1030) → (1030, 1100)" in capsys.readouterr().out


def test_trouble_is_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = saved(tmp_path, "a", weights())
    assert main(["diff", a, str(tmp_path / "absent.safetensors")]) == 2
    assert main(["diff", a, a, "--storage-option", "region=x"]) == 2
    assert main(["diff", a, a, "--tolerance", "-1"]) == 2
    assert capsys.readouterr().err.count("lazymodel: error: ") == 3


def test_what_is_beyond_float32_is_no_infinity() -> None:
    most = np.finfo(np.float32).max
    (found,) = lm.diff({"w": np.array([most, 1])}, {"w": np.array([-most, 1], np.float64)}).tensors
    assert found.largest == 2 * float(most) and math.isfinite(found.relative) and found.nonfinite == 0
    (found,) = lm.diff({"w": np.float32([most])}, {"w": np.float32([-most])}).tensors
    assert found.largest == 2 * float(most) and found.nonfinite == 0


@pytest.mark.parametrize("other", ["int64", "uint64", "float64", "float32", "complex128", "int32"])
@pytest.mark.parametrize("wide", ["int64", "uint64"])
def test_64_bit_integers_are_compared_exactly(wide: str, other: str) -> None:
    for number in (2**30, 2**53, 2**62, 2**63 - 2**40):  # in all of these types, or clipped to the largest
        number = min(number, 2**30) if other == "int32" else number
        a, b = np.array([number, 5], wide), np.array([number, 5], other)
        assert not lm.diff({"w": a}, {"w": b}, tolerance=0)
        (found,) = lm.diff({"w": a + np.array([1, 0], wide)}, {"w": b}, tolerance=0).beyond
        assert (found.different, found.largest) == (1, 1.0)


def test_models_there_and_not_there(tmp_path: Path) -> None:
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (64, 48))}, jax.random.key(0))
    assert not lm.diff(abstract, abstract.materialize())
    other = abstract.rekey(jax.random.key(1))
    (found,) = lm.diff(abstract, other).tensors
    assert found.different == 64 * 48
