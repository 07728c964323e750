"""What is read of a URL is what is in the file, whatever is read of it, and each byte of it comes once."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.large import examples, mostly_large
from tests.servers.object_server import ObjectServer
from tests.small import make_small

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

KIB, MIB = 1 << 10, 1 << 20
GAP = 128 * KIB  # bytes between two ranges that are fetched along
REQUEST = 256 * KIB  # bytes of a request, here
RANDOM = np.random.default_rng(0)
VIEWED = {
    "bytes": RANDOM.integers(0, 100, (9, 70), np.uint8),
    "shorts": RANDOM.integers(0, 100, (5, 7, 9), np.int16),
    "line": RANDOM.integers(0, 100, (300,), np.int32),
    "wide": RANDOM.integers(0, 100, (12, 60_000), np.int32),  # of rows that are longer than a gap
}
PARTS = {f"p{n}": RANDOM.integers(0, 256, (8, 1 + 3000 * (n % 7) ** 2), np.uint8) for n in range(14)}
TIED = RANDOM.integers(0, 1 << 30, (512, 768), np.int32)


@pytest.fixture(scope="module")
def folder(_object_server: ObjectServer) -> Path:
    folder = _object_server.root / "reads"
    folder.mkdir(exist_ok=True)
    for name, tensors in (("viewed", VIEWED), ("parts", PARTS), ("tied", {"w": TIED})):
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def server(object_server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    make_small(monkeypatch, read_request=REQUEST)
    return object_server


@examples(20, 60, data=st.data())
def test_any_view_is_that_of_the_file(server: ObjectServer, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*VIEWED]))
    expected: Any = VIEWED[name]
    with lm.open_checkpoint(server.url("reads/viewed.safetensors")) as checkpoint:
        view = checkpoint[name]
        index = tuple(slice(None, None, data.draw(st.sampled_from([1, 1, 2, -1, -3]))) for _ in expected.shape)
        order = data.draw(st.permutations(range(expected.ndim)))
        expected, view = expected[index].transpose(order), view[index].transpose(order)
        for _ in range(data.draw(st.integers(1, 3))):
            cuts = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in expected.shape]
            box = tuple(slice(*cut) for cut in cuts)
            np.testing.assert_array_equal(view[box].astype(np.float64).read(), expected[box].astype(np.float64))


@examples(4, 12, data=st.data())
def test_each_byte_that_is_wanted_comes_once_and_few_others(
    server: ObjectServer, mesh8: Mesh, data: st.DataObject
) -> None:
    chosen: dict[str, slice] = {}
    for name in data.draw(st.lists(st.sampled_from([*PARTS]), min_size=1, unique=True)):
        first = data.draw(st.integers(0, 7))
        chosen[name] = slice(first, data.draw(st.integers(first + 1, 8)))
    expected = {name: PARTS[name][rows] for name, rows in chosen.items()}
    abstract = lm.build_abstract(lambda: {name: jax.numpy.zeros(v.shape, np.uint8) for name, v in expected.items()})
    with lm.open_checkpoint(server.url("reads/parts.safetensors")) as checkpoint:
        tensors = {name: checkpoint[name][rows] for name, rows in chosen.items()}
        server.reset_counters()
        model = abstract.shard(mesh8, {".*": P()}).materialize(tensors)
        ((_, ranges),) = server.counters()["ranges"].items()
    for name, values in expected.items():
        np.testing.assert_array_equal(model[name], values)
    size = max(stop for _, stop in ranges)
    wanted, fetched = np.zeros(size, bool), np.zeros(size, int)
    for tensor in tensors.values():
        wanted[tensor.offset : tensor.offset + tensor.nbytes] = True
    for start, stop in ranges:
        assert stop - start <= REQUEST
        fetched[start:stop] += 1
    assert fetched.max() == 1 and fetched[wanted].all()
    for start, stop in runs(fetched > wanted):  # in a gap that is worth it
        assert wanted[start - 1] and wanted[stop] and stop - start <= GAP
    (first, *gaps) = runs(fetched == 0)
    assert first[0] == 0 and all(stop - start > GAP for start, stop in gaps)


def test_what_waits_to_be_read_stays_within_the_budget(server: ObjectServer, tmp_path: Path) -> None:
    budget = MIB
    with lm.open_checkpoint(server.url("reads/parts.safetensors")) as checkpoint:
        tracemalloc.start()
        try:
            lm.save(checkpoint, tmp_path / "saved", max_host_memory=budget)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < budget + MIB < 0.5 * sum(values.nbytes for values in PARTS.values())  # a MiB for what is no tensor's
    with lm.open_checkpoint(tmp_path / "saved") as found:
        assert all((found[name].read() == values).all() for name, values in PARTS.items())


def runs(mask: np.ndarray) -> list[list[int]]:
    """Where a mask is true: first and behind the last of each run."""
    return np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()


def test_far_ranges_are_asked_for_alone_and_near_ones_together(server: ObjectServer) -> None:
    with lm.open_checkpoint(server.url("reads/viewed.safetensors")) as checkpoint:
        for columns, far in ((100, True), (20_000, True), (30_000, False), (40_000, False)):
            server.reset_counters()
            np.testing.assert_array_equal(checkpoint["wide"][:, :columns].read(), VIEWED["wide"][:, :columns])
            ((_, ranges),) = server.counters()["ranges"].items()
            span = 4 * (11 * 60_000 + columns)
            assert sum(stop - start for start, stop in ranges) == (12 * 4 * columns if far else span)
            assert len(ranges) == (12 if far else -(-span // REQUEST))
        server.reset_counters()
        np.testing.assert_array_equal(checkpoint["shorts"][:, 2:3, ::2].read(), VIEWED["shorts"][:, 2:3, ::2])
        assert server.counters()["requests"] == 1


@pytest.mark.parametrize(
    ("spec", "max_host_memory"),
    mostly_large(
        [*itertools.product([("model",), (None, "model"), ()], ["100KiB", "64MiB"])],
        [(("model",), "64MiB"), ((None, "model"), "100KiB")],
    ),
)
def test_tied_tensors_and_little_memory(
    server: ObjectServer, mesh8: Mesh, spec: tuple[str | None, ...], max_host_memory: str
) -> None:
    """One tensor for three variables, one of them of another dtype, one transposed."""
    expected = {"a": TIED, "b": TIED.astype(np.float32), "c": TIED.T}
    with lm.open_checkpoint(server.url("reads/tied.safetensors")) as checkpoint:
        tensor = checkpoint["w"]
        mapping = {"a": tensor, "b": tensor.astype(np.float32), "c": tensor.T}
        abstract = lm.build_abstract(lambda: {n: jax.numpy.zeros(v.shape, v.dtype) for n, v in expected.items()})
        arrays = abstract.shard(mesh8, {".*": P(*spec)}).materialize(mapping, max_host_memory=max_host_memory)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), values)
