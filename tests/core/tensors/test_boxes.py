"""Arithmetic of boxes and strides, against NumPy's own."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lazymodel._tensors.boxes import (
    Geometry,
    box_shape,
    c_strides,
    clip,
    cover,
    grid,
    normalize,
    repeat,
    shift,
    slabs,
    strided,
    unshift,
)


@st.composite
def boxes(draw, shape, empty=False):
    starts = [draw(st.integers(0, extent - 1)) for extent in shape]
    return tuple(slice(a, draw(st.integers(a + (not empty), n))) for a, n in zip(starts, shape, strict=True))


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_view_is_filled_in_file_order(data):
    """Steps, reversed axes, axes of one index, repeated ones: what is normalized fills all of it."""
    shape = data.draw(SHAPES)
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    view = array[tuple(slice(None, None, data.draw(st.sampled_from([1, 1, 2, -1, -2]))) for _ in shape)]
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    if data.draw(st.booleans()):
        view = np.broadcast_to(view[:, None], (view.shape[0], 3, *view.shape[1:]))
    start = view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
    geometry = Geometry(start, view.shape, view.strides)
    out = np.zeros(view.shape, np.int32)
    normalized, target, repeated = normalize(geometry, out)
    assert normalized.start == geometry.first == (view.min() * 4 if view.size else 0)
    assert all(a >= b > 0 for a, b in zip(normalized.strides, normalized.strides[1:], strict=False))
    assert geometry.span(4) == (int(view.max()) - int(view.min())) * 4 + 4
    target[...] = strided(array, normalized)
    repeat(out, repeated)
    np.testing.assert_array_equal(out, view)
    assert_covered(array, normalized)


def assert_covered(array, geometry):
    """The box that covers a geometry has all of it; returns that."""
    covering = cover(geometry, array.shape, 4)
    copy, found = array[covering.box].copy(), np.zeros(geometry.shape, np.int32)
    if covering.inner is None:
        covering.align(found)[...] = copy
    else:
        found[...] = strided(copy, covering.inner)
    np.testing.assert_array_equal(found, strided(array, geometry))
    return covering


def test_an_axis_that_runs_over_several_is_split_where_it_has_whole_rows():
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    for length, rows in ((12, 2), (15, 3)):
        covering = assert_covered(array, Geometry(0, (length,), (4,)))
        assert covering.box == (slice(0, rows), slice(0, 6))
        assert (covering.inner is None) == (length == 12)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_are_divided_and_clipped(data):
    shape = data.draw(SHAPES)
    array = np.arange(math.prod(shape)).reshape(shape)
    box = data.draw(boxes(shape))
    whole = Geometry(0, shape, tuple(c_strides(shape, array.itemsize)))
    np.testing.assert_array_equal(strided(array, whole.box(box)), array[box])
    for pieces in (
        list(grid(box, [data.draw(st.integers(1, 4)) for _ in shape])),
        [unshift(piece, box) for piece in slabs(box_shape(box), data.draw(st.integers(1, 30)))],
    ):
        assert np.concatenate([array[piece].ravel() for piece in pieces]).size == array[box].size
        assert set(np.concatenate([array[piece].ravel() for piece in pieces])) == set(array[box].ravel())
    region = data.draw(boxes(shape))
    for common, part in clip([(box, array[box])], region):
        np.testing.assert_array_equal(part, array[common])
        np.testing.assert_array_equal(part, array[region][shift(common, region)])
    assert bool(clip([(box, array[box])], region)) == bool(set(array[box].ravel()) & set(array[region].ravel()))
