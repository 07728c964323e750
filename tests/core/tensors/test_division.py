"""Division: every byte that a group holds is read by one of its members, and all have their boxes in the end."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._materialize import exchange
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors import division as dividing
from lazymodel._tensors.division import PartsLeaf, divide, grouped, ranges
from lazymodel._tensors.lazy import LazyTensor, lazy

SPECS = [
    *(P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")), P(None, None, "y")),
    *(P("x", None, "y"), P(None, "y", "x"), P(("y", "x"), None, None)),
]


@given(
    extents=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_ranges_are_boxes_in_order(extents: list[int], ends: tuple[float, float]) -> None:
    flat = np.arange(np.prod(extents)).reshape(extents)
    start, stop = sorted(int(end * flat.size) for end in ends)
    pieces = list(ranges(extents, start, stop)) if start < stop else []
    found = [flat[box].ravel() for box, _ in pieces]
    assert [part.start for _, part in pieces] == list(start + np.cumsum([0, *map(len, found)])[:-1])
    np.testing.assert_array_equal(np.concatenate([np.zeros(0, int), *found]), np.arange(start, stop))
    assert len(pieces) <= 2 * len(extents) - 1


@settings(deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    units=st.tuples(*(st.integers(1, 5),) * 3),
    axes=st.permutations(range(3)),
    processes=st.sampled_from(["rows", "columns", "all"]),
)
def test_every_element_has_one_reader_in_its_group(
    spec: P, units: tuple[int, int, int], axes: list[int], processes: str
) -> None:
    """On a mesh that is nowhere; the tensor is a transposed view, so that its file has other axes outermost."""
    mesh = AbstractMesh((2, 4), ("x", "y"))
    shape = tuple(8 * unit for unit in units)
    values = np.arange(np.prod(shape), dtype=np.int32).reshape([shape[axes.index(axis)] for axis in range(3)])
    tensor = lazy(values).transpose(axes)
    assert tensor.shape == shape
    where = {"rows": np.array([[0] * 4, [1] * 4]), "columns": np.array([[0, 0, 1, 1]] * 2), "all": np.arange(8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "SMALL", 0)
        division = divide(tensor, NamedSharding(mesh, spec), where[processes].reshape(2, 4))
    if division is None:
        return
    parts = LazyTensor(PartsLeaf(tensor, division, tensor.dtype)).read()
    ordered = tensor.read().transpose(division.order)
    own = division.all_own_elements()
    groups: dict[str, list[np.ndarray]] = {}
    boxes = {}
    for device in range(8):
        box, first, last = division.share(device)
        rows = parts[device * division.rows :][: last - first]
        assert rows.size == own[device]
        groups.setdefault(str(box), []).append(rows.ravel())
        boxes[str(box)] = box
    for name, box in boxes.items():
        read = np.sort(np.concatenate(groups[name]))
        np.testing.assert_array_equal(read, np.sort(ordered[box].ravel()))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("stored", ["as it is", "transposed"])
def test_parts_become_the_array(spec: P, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight devices of this process, which are taken for eight processes."""
    monkeypatch.setattr(dividing, "SMALL", 0)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    values = np.random.default_rng(0).integers(0, 2**32, (24, 40, 16), np.uint32).view(np.float32)
    save_file({"w": values}, tmp_path / "w.safetensors")
    tensor = lm.open_checkpoint(tmp_path / "w.safetensors")["w"]
    if stored == "transposed":
        tensor, values = tensor.transpose(2, 0, 1), values.transpose(2, 0, 1)
    sharding = NamedSharding(mesh, spec)
    division = divide(tensor, sharding, np.arange(8).reshape(2, 4))
    # No two devices hold the same, in rows that are ranges of the file.
    ranges_alone = [P(None, ("y", "x"))] if stored == "transposed" else [P(("x", "y")), P(("y", "x"), None, None)]
    assert (division is None) == (spec in ranges_alone)
    if division is None:
        return
    each = exchange.Exchange(StreamItem("w", tensor, tensor.shape, tensor.dtype, sharding), division)
    ((_, parts),) = stream([each.part])
    (array,) = exchange._run(division, tensor.dtype, [parts])
    assert array.sharding.is_equivalent_to(sharding, 3)
    assert np.asarray(array).tobytes() == np.ascontiguousarray(values).tobytes()


def test_groups_keep_their_order_and_limit() -> None:
    assert list(grouped({"a": 3, "b": 3, "c": 9, "d": 1, "e": 5}, 6)) == [["a", "b"], ["c"], ["d", "e"]]
