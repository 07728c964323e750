"""Buffers that are handed over: aligned, apart from each other, and given back when nobody uses them; copies of arrays
whose axes are in another order.
"""

from __future__ import annotations

import mmap

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazymodel._tensors.buffers import ALIGNMENT, ARENA, TILE, Arena, assign


@pytest.mark.parametrize("rows", [3, ARENA // 4 // (8 * 1000)], ids=["one buffer", "a buffer each"])
def test_buffers_of_one_array_are_aligned_and_apart(rows):
    shapes = [(rows, 250)] * 7 + [(1, 3), (0, 5), ()]
    buffers = Arena().several(shapes, np.dtype(np.float32))
    for number, (shape, buffer) in enumerate(zip(shapes, buffers, strict=True)):
        assert (buffer.shape, buffer.dtype) == (shape, np.float32)
        assert buffer.flags.c_contiguous and buffer.flags.writeable
        assert not buffer.size or buffer.ctypes.data % ALIGNMENT == 0
        buffer[...] = number
    assert [set(buffer.ravel().tolist()) for buffer in buffers] == [{n} if n != 8 else set() for n in range(10)]


def test_no_buffers():
    assert Arena().several([], np.dtype(np.float32)) == []


def test_a_buffer_is_given_back_with_the_last_array_in_it():
    one, other = Arena().several([(64, mmap.PAGESIZE)] * 2, np.dtype(np.uint8))
    one[...], other[...] = 1, 2
    memory = np.frombuffer(one.base.base.obj, np.uint8)  # the whole map
    mine = memory[one.ctypes.data - memory.ctypes.data :][: 128 * mmap.PAGESIZE]
    del one
    assert mine.any()
    del other
    assert not mine.any()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_assigns_whatever_the_order_of_axes(data):
    shape = data.draw(st.lists(st.sampled_from([1, 3, 17, TILE + 5]), min_size=1, max_size=2))
    shape.append(3 * TILE * TILE // int(np.prod(shape)))  # large enough for tiles
    dtypes = st.sampled_from([np.float32, ml_dtypes.bfloat16, np.uint8, np.float64])
    values = (np.arange(np.prod(shape)) % 251).astype(data.draw(dtypes)).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    values = values.transpose(order)[..., :: data.draw(st.sampled_from([1, 2]))]
    room = np.zeros((*values.shape[:-1], values.shape[-1] + 1), data.draw(dtypes))
    assign(room[..., 1:], values)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            room[..., 1:], values.real.astype(room.dtype) if room.dtype.kind != "c" else values
        )
    assert not room[..., 0].any()
