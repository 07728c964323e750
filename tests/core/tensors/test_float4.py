"""Blocks of 4-bit floats as a leaf: any box of any view, bit for bit, from the bytes of its blocks and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors.float4 import Float4Leaf, decoded_pairs
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.source import BYTES_READ

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([NUMBERS, -NUMBERS])


def decode(blocks: Any, scales: Any) -> np.ndarray:
    """As the specification has it: the lower half of a byte first."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    with np.errstate(all="ignore"):  # the largest scale is no number
        values = E2M1[codes] * np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def decoded(blocks: Any, scales: Any) -> LazyTensor:
    table = decoded_pairs(decode)
    assert table is not None
    return LazyTensor(Float4Leaf(blocks, scales, table))


def stored(shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """Every byte there is, and every scale, infinite ones and those that lead below the normal numbers as well."""
    rng = np.random.default_rng(seed)
    return {"blocks": rng.integers(0, 256, (*shape, 16), np.uint8), "scales": rng.integers(0, 256, shape, np.uint8)}


def test_a_box_reads_its_blocks(tmp_path: Path) -> None:
    arrays = stored((8, 64, 3))
    save_file(arrays, tmp_path / "model.safetensors")
    expected = decode(**arrays).transpose(0, 2, 1)
    with lm.open_checkpoint(str(tmp_path / "model.safetensors")) as checkpoint:
        tensor: Any = np.transpose(decoded(checkpoint["blocks"], checkpoint["scales"]), (0, 2, 1))
        for box, count in (
            ((slice(3, 4), slice(0, 96), slice(0, 64)), 64 * 3),
            ((slice(3, 4), slice(0, 96), slice(8, 24)), 16 * 3),
            ((slice(7, 8), slice(40, 41), slice(63, 64)), 1),
        ):
            before = BYTES_READ.count
            np.testing.assert_array_equal(tensor.read(box), expected[box])
            assert BYTES_READ.count - before == count * 17


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_of_views(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, limit)) for limit in (3, 7, 4))
    arrays = stored(shape, data.draw(st.integers(0, 9)))
    found: Any = decoded(lazy(arrays["blocks"]), lazy(arrays["scales"]))
    expected = decode(**arrays)
    axes = data.draw(st.permutations(range(3)))
    found, expected = np.transpose(found, axes), np.transpose(expected, axes)
    if data.draw(st.booleans()):
        found, expected = found[..., ::2], expected[..., ::2]
    dtype = data.draw(st.sampled_from(["float32", "float16", "float64"]))
    with np.errstate(all="ignore"):
        found, expected = found.astype(dtype), expected.astype(dtype)
    box = tuple(
        slice(start, data.draw(st.integers(start, extent)))
        for extent in expected.shape
        for start in [data.draw(st.integers(0, extent))]
    )
    assert found.read(box).tobytes() == np.ascontiguousarray(expected[box]).tobytes()


@pytest.mark.parametrize("budget", [40 << 10, 1 << 20, None])
def test_within_the_budget(budget: int | None, tmp_path: Path, mesh8: Mesh) -> None:
    arrays = stored((2, 100, 40))
    save_file(arrays, tmp_path / "model.safetensors")
    with lm.open_checkpoint(str(tmp_path / "model.safetensors")) as checkpoint:
        tensor: Any = np.transpose(decoded(checkpoint["blocks"], checkpoint["scales"]), (0, 2, 1))
        item = StreamItem("w", tensor, tensor.shape, np.dtype(np.float32), NamedSharding(mesh8, P(None, "model")))
        ((_, array),) = stream([item], max_host_memory=budget)
    assert np.asarray(array).tobytes() == decode(**arrays).transpose(0, 2, 1).tobytes()


def test_what_means_something_else_elsewhere_has_no_table() -> None:
    def placed(blocks: Any, scales: Any) -> np.ndarray:
        values = decode(blocks, scales)
        return values + np.arange(values.shape[-1], dtype=np.float32)

    assert decoded_pairs(placed) is None
    assert decoded_pairs(lambda blocks, scales: decode(blocks, scales).astype(np.float64)) is None
    assert decoded_pairs(lambda blocks, scales: decode(blocks, scales)[..., ::2]) is None
