"""Values never change their meaning on their way into a variable unless that was asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.large import examples, mostly_large
from tests.small import buffer_sizes

BF16 = ml_dtypes.bfloat16
F8 = ml_dtypes.float8_e4m3fn


def model_of(dtype: Any, shape: tuple[int, ...] = (8, 4), name: str = "w") -> lm.AbstractModel:
    return lm.build_abstract(lambda key: {name: jnp.zeros(shape, dtype)}, jax.random.key(0))


def file_of(folder: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def ones(dtype: Any) -> np.ndarray:
    return np.ones((8, 4), dtype)


REFUSED = [
    (np.float32, jnp.int32, "fractions, infinities and NaN"),
    (np.float16, jnp.int8, "fractions, infinities and NaN"),
    (BF16, jnp.uint32, "fractions, infinities and NaN"),
    (np.float32, jnp.bool_, "everything except whether a number is zero"),
    (np.complex64, jnp.float32, "imaginary parts"),
    (np.complex64, jnp.int32, "imaginary parts"),
    (np.complex64, jnp.bool_, "imaginary parts"),
]


@pytest.mark.parametrize(("stored", "wanted", "lost"), REFUSED)
def test_a_cast_that_loses_is_refused_before_anything_is_read(
    stored: Any, wanted: Any, lost: str, tmp_path: Path
) -> None:
    file, model = file_of(tmp_path, w=ones(stored)), model_of(wanted)
    expected, found = np.dtype(wanted).name, np.dtype(stored).name
    words = f"'w': expected {expected}, found {found} in tensor 'w' of {file}: the cast can lose {lost}"
    with lm.open_checkpoint(file) as checkpoint:
        plan = " ".join(str(model.plan(checkpoint)).split())
        assert f"materialize rejects this checkpoint: {words}" in plan
        with pytest.raises(lm.CheckpointError, match=re.escape(words)):
            model.materialize(checkpoint)
        with pytest.raises(lm.CheckpointError, match=re.escape(words)) as caught:
            model.materialize(checkpoint, strict=False)
        assert "unsafe" not in str(caught.value), "which would lose it"
        assert checkpoint.bytes_read == 0
        loaded = model.materialize(checkpoint, cast="unsafe")
        np.testing.assert_array_equal(loaded["w"], np.ones((8, 4), wanted))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        *((float_, other) for float_ in (np.float64, np.float32, BF16, np.float16) for other in (BF16, np.float16, F8)),
        (F8, np.float32), (np.bool_, np.float32), (np.bool_, np.int32), (np.int8, np.int32), (np.uint8, np.int16),
        (np.int8, BF16), (np.uint8, BF16), (np.int16, np.float32), (np.float32, np.complex64),
    ],
)  # fmt: skip
def test_a_cast_that_keeps_is_numpys(stored: Any, wanted: Any, tmp_path: Path) -> None:
    """Floats beyond the range of narrower ones become infinite: the variable's dtype was chosen."""
    with np.errstate(all="ignore"):
        values = (np.random.default_rng(0).standard_normal((8, 4)) * 100).astype(stored)
        values[0] = np.array([1e6, -1e6, 65504, np.nan if np.dtype(stored).kind not in "iub" else 1]).astype(stored)
        expected = values.astype(wanted)
    file = file_of(tmp_path, w=values)
    assert "rejects" not in str(model_of(wanted).plan(lm.open_checkpoint(file)))
    found = model_of(wanted).materialize(lm.open_checkpoint(file))["w"]
    assert found.dtype == wanted
    assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("value", "stored", "wanted"),
    [
        (2**40, np.int64, jnp.int32), (-(2**31) - 1, np.int64, jnp.int32), (2**31, np.uint32, jnp.int32),
        (-1, np.int32, jnp.uint32), (300, np.int32, jnp.int8), (-1, np.int8, jnp.uint8), (2, np.int32, jnp.bool_),
        (2**24 + 1, np.int32, jnp.float32), (257, np.int16, jnp.bfloat16), (2**31 - 1, np.int32, jnp.float16),
        (2**63 - 1, np.int64, jnp.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sharded", mostly_large([False, True], [True]))
def test_integers_that_do_not_fit(
    value: int, stored: Any, wanted: Any, sharded: bool, tmp_path: Path, mesh8: Mesh
) -> None:
    values = ones(stored)
    model = model_of(wanted)
    if sharded:
        model = model.shard(mesh8, {"w": P("model")})
    found = model.materialize(lm.open_checkpoint(file_of(tmp_path, w=values)))["w"]
    np.testing.assert_array_equal(found, values.astype(wanted))
    values[5, 2] = value
    file = file_of(tmp_path, w=values)
    with pytest.raises(lm.CheckpointError) as caught:
        model.materialize(lm.open_checkpoint(file))
    assert str(caught.value).startswith(f"'w' from tensor 'w' of {file}: ")
    told = f"found {value} ({np.dtype(stored).name})"
    words = f"expected numbers that fit into {np.dtype(wanted).name}, {told}; is this the checkpoint of another"
    assert words in str(caught.value)
    with np.errstate(all="ignore"):
        expected = values.astype(wanted)
    np.testing.assert_array_equal(model.materialize(lm.open_checkpoint(file), cast="unsafe")["w"], expected)


def test_many_integers_are_not_tried_one_by_one(tmp_path: Path) -> None:
    with buffer_sizes(tried=64), lm.open_checkpoint(file_of(tmp_path, w=ones(np.int64))) as checkpoint:
        with pytest.raises(lm.CheckpointError, match="'w'.*too large"):
            model_of(jnp.int32).materialize(checkpoint)
        assert checkpoint.bytes_read == 0
        model_of(jnp.int32, (8,)).materialize({"w": np.arange(8)})


_INTEGERS = [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ml_dtypes.int4]
_FLOATS = [np.float16, np.float32, np.float64, BF16, F8, ml_dtypes.float8_e5m2, np.complex64]


@examples(
    40,
    200,
    stored=st.sampled_from(_INTEGERS),
    wanted=st.sampled_from(_INTEGERS + _FLOATS),
    number=st.integers(-(2**70), 2**70),
    edge=st.integers(0, 4),
)
def test_what_is_not_refused_keeps_every_integer(stored: Any, wanted: Any, number: int, edge: int) -> None:
    """Whatever the dtypes: integers and booleans come back as they were, or there is an error."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    low, high = (0, 1) if stored == np.bool_ else (int(jnp.iinfo(stored).min), int(jnp.iinfo(stored).max))
    number = [low, low + 1, high - 1, high, min(max(number, low), high)][edge]
    with jax.enable_x64(True):
        try:
            found = model_of(wanted, (1,)).materialize({"w": np.array([number]).astype(stored)})["w"]
        except lm.CheckpointError:
            return
        found = np.asarray(found)
    assert found.dtype == wanted
    value = complex(found[0].item() if wanted.kind != "V" else float(found[0]))
    assert value.imag == 0
    assert int(found[0].item().real if wanted.kind in "iufcb" else value.real) == number


QUANTIZED_NAMES = [
    ("a.weight", "a.weight_scale"), ("a.weight", "a.weight_scale_inv"), ("a.weight", "a.scales"),
    ("a.weight", "a.scale_weight"), ("a.weight", "a.weight.absmax"), ("a.weight", "a.SCB"),
    ("a/kernel", "a/kernel_scale"), ("a/kernel", "a/scale"), ("a.up_blocks", "a.up_scales"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("weight", "scale", "dtype"),
    [*((*names, np.int8) for names in QUANTIZED_NAMES)]
    + [("w", "w_scale", dtype) for dtype in (np.int8, np.uint8, np.int32, F8, ml_dtypes.float8_e5m2)],
)
def test_quantized_weights_without_their_scale(weight: str, scale: str, dtype: Any, tmp_path: Path) -> None:
    file = file_of(tmp_path, **{weight: ones(dtype), scale: np.full((8, 1), 0.01, np.float32)})
    checkpoint = lm.open_checkpoint(file)
    words = (
        f"{weight!r}: expected float32, found {np.dtype(dtype).name} in tensor {weight!r} of {file} with {scale!r} "
        "alongside: quantized numbers, which mean nothing without their scale"
    )
    model = model_of(jnp.float32, name=weight)
    with pytest.raises(lm.CheckpointError, match=re.escape(words)):
        model.materialize(checkpoint, strict=False)
    assert "materialize rejects this checkpoint" in str(model.plan(checkpoint))
    mapped = lm.map_checkpoint(checkpoint, lambda weights: {weight: weights[weight]})
    with pytest.raises(lm.CheckpointError, match=re.escape(words)):
        model.materialize(mapped)
    # What is decoded by the mapping, or asked for, is loaded.
    decoded = lm.map_checkpoint(checkpoint, lambda weights: {weight: weights[weight].astype("float32") * 0.01})
    np.testing.assert_array_equal(model.materialize(decoded)[weight], np.full((8, 4), 0.01, np.float32))
    with pytest.warns(lm.LazyModelWarning, match="leaves out 1 tensor"):
        bare = model.materialize(checkpoint, strict=False, cast="unsafe")
    np.testing.assert_array_equal(bare[weight], np.ones((8, 4), np.float32))


@pytest.mark.parametrize("dtype", [np.int8, F8])
def test_a_scale_that_nothing_takes_is_no_matter_of_strict(dtype: Any, tmp_path: Path) -> None:
    """Even where the weight's own dtype is the variable's."""
    file = file_of(tmp_path, w=ones(dtype), w_scale=np.ones((), np.float32), other=np.ones(2, np.float32))
    checkpoint = lm.open_checkpoint(file)
    with pytest.raises(lm.CheckpointError, match="tensor 'w' is .*, with a scale 'w_scale', which .* no variable"):
        model_of(dtype).materialize(checkpoint, strict=False)
    mapped = lm.map_checkpoint(checkpoint, lambda weights: {"w": weights["w"]})
    with pytest.raises(lm.CheckpointError, match="load a dequantized copy"):
        model_of(dtype).materialize(mapped)
    both = lm.build_abstract(lambda key: {"w": jnp.zeros((8, 4), dtype), "w_scale": jnp.zeros(())}, jax.random.key(0))
    with pytest.warns(lm.LazyModelWarning, match="'other'"):
        found = both.materialize(checkpoint, strict=False)
    assert found["w"].dtype == dtype


def test_a_norms_scale_is_no_scale_of_integers(tmp_path: Path) -> None:
    file = file_of(tmp_path, **{"norm/count": np.array(3, np.int32), "norm/scale": np.ones(4, np.float32)})
    with pytest.warns(lm.LazyModelWarning, match="norm/scale"):
        found = model_of(jnp.int32, (), "norm/count").materialize(lm.open_checkpoint(file), strict=False)
    assert int(found["norm/count"]) == 3


def test_arrays_in_memory_follow_the_rule() -> None:
    with pytest.raises(lm.CheckpointError, match="expected int32, found float64 in an array"):
        model_of(jnp.int32, ()).materialize({"w": np.array(1.5)})
    with pytest.raises(lm.CheckpointError, match="found 1099511627776"):
        model_of(jnp.int32, ()).materialize({"w": np.array(2**40)})
    assert int(model_of(jnp.int32, ()).materialize({"w": 7})["w"]) == 7


def test_keys_are_not_made_of_floats() -> None:
    model = lm.build_abstract(lambda key: {"key": key}, jax.random.key(0))
    with pytest.raises(lm.CheckpointError, match="'key': expected uint32, found float32"):
        model.materialize({"key": np.ones(2, np.float32)})


def test_tables_that_join_or_scale(tmp_path: Path) -> None:
    file = file_of(tmp_path, a=ones(np.int64), b=ones(np.float32), c=ones(np.int8))
    checkpoint = lm.open_checkpoint(file)
    joined = lm.WeightMap({"w": lm.From("a", "b")}, ignore="c")
    with pytest.raises(lm.CheckpointError, match="tensors of one variable are int64 and float32"):
        lm.map_checkpoint(checkpoint, joined, model_of(jnp.float32, (16, 4)))
    # A factor makes other numbers of integers, which no integer variable takes unasked.
    scaled = lm.map_checkpoint(
        checkpoint, lm.WeightMap({"w": lm.From("c").scale(0.5)}, ignore=("a", "b")), model_of("i1")
    )
    with pytest.raises(lm.CheckpointError, match="expected int8, found float64"):
        model_of(jnp.int8).materialize(scaled)


def test_growing_does_not_truncate_integers() -> None:
    tensors = {"up": np.ones((4, 2), np.int32), "down": np.ones((2, 4), np.int32)}
    with pytest.raises(lm.LazyModelError, match="'down' has int32 numbers, which cannot be divided among copies"):
        lm.grow.width(tensors, 4, incoming={"up": 1}, outgoing={"down": 0})
    floats = {name: tensor.astype(BF16) for name, tensor in tensors.items()}
    grown = lm.grow.width(floats, 4, incoming={"up": 1}, outgoing={"down": 0})
    assert grown["down"].dtype == BF16
    assert float(grown["down"].read()[0, 0]) == 0.5


@pytest.mark.parametrize("cast", [None, "same_kind", True])
def test_no_other_word(cast: Any) -> None:
    with pytest.raises(lm.LazyModelError, match=f"expected cast='safe' .* or cast='unsafe' .*, got {cast!r}"):
        model_of(jnp.float32).materialize({"w": ones(np.float32)}, cast=cast)
