"""Devices with memory of their own, to which transfers are late: no buffer is written, given up or paid back before.

    python -m pytest -n 4 --repeat 200 tests/core/materialize/test_foreign_memory.py

runs everything 200 times, each time with transfers in another order, on more processes than most machines have cores.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.core.materialize._variables import assert_shards_equal, model_of
from tests.foreign_memory import Transfers, foreign_memory, unknown_memory
from tests.large import mostly_large

COUNT, SHAPE, NBYTES = 40, (160, 128), 160 * 128 * 4  # tensors that are too large to share a job

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def transfers(repetition: int) -> Iterator[Transfers]:
    with foreign_memory(repetition) as transfers:
        yield transfers


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"v{i:02}": rng.standard_normal(SHAPE).astype(np.float32) for i in range(COUNT)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, values: dict[str, np.ndarray]) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "model.safetensors"
    save_file(values, path)
    return path


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def first(path: Path, count: int = COUNT) -> dict[str, lm.LazyTensor]:
    return dict(sorted(lm.open_checkpoint(path).items())[:count])


def stream(tensors: Mapping[str, Any], sharding: Sharding, budget: int | None = None) -> Any:
    return model_of(tensors, sharding).stream(tensors, max_host_memory=budget)


@pytest.mark.parametrize(
    ("spec", "budget"),
    mostly_large(
        [*itertools.product([P(("x", "y")), P("x"), P()], [NBYTES // 2, 2 * NBYTES, 10 * NBYTES])],
        [(P(("x", "y")), NBYTES // 2), (P("x"), 10 * NBYTES), (P(), 2 * NBYTES)],
    ),
)
def test_buffers_are_used_again_once_they_were_read(
    path: Path, values: dict[str, np.ndarray], mesh: Mesh, transfers: Transfers, spec: P, budget: int
) -> None:
    tensors = first(path, 4 if budget < NBYTES else COUNT)
    for name, array in dict(stream(tensors, NamedSharding(mesh, spec), budget)).items():
        assert_shards_equal(array, values[name])
    assert transfers.buffers.most_nbytes <= budget
    assert transfers.most_nbytes <= max(budget // 2, NBYTES)
    assert transfers.started >= 4 * len(tensors)
    assert transfers.under_way == 0
    if budget > 4 * NBYTES:
        parts = len({str(index) for index in NamedSharding(mesh, spec).devices_indices_map(SHAPE).values()})
        assert 2 * transfers.buffers.made < len(tensors) * parts
        assert transfers.most_nbytes > NBYTES, "more than one variable was under way at a time"


def test_small_tensors_go_together(mesh: Mesh, transfers: Transfers, tmp_path: Path) -> None:
    """Several groups of them, of which few are in memory at a time."""
    rng = np.random.default_rng(1)
    values = {f"v{i:03}": rng.standard_normal((32, 16)).astype(np.float32) for i in range(300)}
    save_file(values, tmp_path / "small.safetensors")
    specs = [P("x"), P(None, "y"), P()]
    shardings = {name: NamedSharding(mesh, specs[i % 3]) for i, name in enumerate(values)}
    checkpoint = lm.open_checkpoint(tmp_path / "small.safetensors")
    transfers.held = True
    for name, array in model_of(checkpoint, shardings).stream(checkpoint, max_host_memory=64 << 10):
        assert_shards_equal(array, values[name])
    assert max(transfers.buffers.most_nbytes, transfers.most_nbytes) <= 64 << 10
    assert transfers.buffers.made <= 100, "three or more a group"
    assert transfers.under_way == 0


def test_memory_that_arrays_may_keep_is_not_used_again(
    mesh: Mesh, transfers: Transfers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors for two kinds of memory in turn: those for the host's may use their buffers forever."""
    values = {f"v{i:03}": np.full((32, 16), i, np.float32) for i in range(120)}
    save_file(values, tmp_path / "small.safetensors")
    kinds = ["device", "pinned_host"]
    specs = {name: NamedSharding(mesh, P(("x", "y")), memory_kind=kinds[i % 2]) for i, name in enumerate(values)}
    used: list[tuple[str, int]] = []
    held: list[np.ndarray] = []  # so that no new buffer has the address of an old one
    start = transfers.start

    def watched(values: np.ndarray, put: Callable[..., jax.Array], place: Any) -> jax.Array:
        used.append((place.memory_kind, values.ctypes.data))
        held.append(values)
        return start(values, put, place)

    monkeypatch.setattr(transfers, "start", watched)
    checkpoint = lm.open_checkpoint(tmp_path / "small.safetensors")
    for name, array in model_of(checkpoint, specs).stream(checkpoint, max_host_memory=64 << 10):
        assert_shards_equal(array, values[name])
    assert len(used) == 4 * len(values)
    last = {address: number for number, (_, address) in enumerate(used)}
    again = [kind for number, (kind, address) in enumerate(used) if last[address] > number]
    assert set(again) == {"device"}, "and that is seen"


def test_what_is_not_waited_for_would_be_seen(path: Path, values: dict[str, np.ndarray], mesh: Mesh) -> None:
    """Of every array and of the buffers."""
    with foreign_memory() as transfers:
        transfers.held = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfers, "wait", lambda tree: None)
            arrays = dict(stream(first(path), NamedSharding(mesh, P("x")), 4 * NBYTES))
        with pytest.raises(AssertionError):
            assert_shards_equal(arrays["v00"], values["v00"])
        transfers.wait(arrays)
        assert "was written before a transfer had read it" in transfers.wrongs[0]
        transfers.wrongs.clear()


def test_reading_goes_on_while_transfers_are_under_way(
    path: Path, values: dict[str, np.ndarray], mesh: Mesh, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two threads three more variables are filled while one goes to its devices."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    enough, in_time = threading.Event(), list[bool]()

    def progress(done: int, total: int) -> None:
        if done >= 4 * NBYTES:
            enough.set()

    def wait(done: int) -> None:
        in_time.append(enough.wait(30))
        enough.set()

    transfers.on_read = wait
    tensors = first(path, 8)
    arrays = model_of(tensors, NamedSharding(mesh, P())).materialize(tensors, progress=progress)
    for name, array in arrays.items():
        assert_shards_equal(array, values[name])
    assert in_time and all(in_time)


@pytest.mark.parametrize("number", [0, 17])
@pytest.mark.parametrize("when", ["on_start", "on_read"])
@pytest.mark.parametrize("budget", [NBYTES // 2, 4 * NBYTES, None])
def test_a_transfer_that_fails_is_an_error_that_names_a_variable(
    path: Path, mesh: Mesh, transfers: Transfers, budget: int | None, when: str, number: int
) -> None:
    def fail(count: int) -> None:
        if count >= number:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    setattr(transfers, when, fail)
    with pytest.raises(lm.CheckpointError, match=r"^'v\d+' from tensor .*model\.safetensors.*: RESOURCE_EXHAUSTED"):
        list(stream(first(path, 12), NamedSharding(mesh, P("x")), budget))


def test_a_file_that_fails_meanwhile_waits_for_what_is_under_way(
    path: Path, values: dict[str, np.ndarray], mesh: Mesh, transfers: Transfers, tmp_path: Path
) -> None:
    transfers.held = True
    save_file({"z": values["v00"]}, tmp_path / "z.safetensors")
    tensors = first(path, 12) | dict(lm.open_checkpoint(tmp_path / "z.safetensors"))
    (tmp_path / "z.safetensors").unlink()
    with pytest.raises(lm.CheckpointError, match=r"'z' from .*z\.safetensors"):
        list(stream(tensors, NamedSharding(mesh, P("x")), 4 * NBYTES))
    assert transfers.under_way == 0


def test_who_stops_early_finds_nothing_under_way(
    path: Path, values: dict[str, np.ndarray], mesh: Mesh, transfers: Transfers
) -> None:
    arrays = stream(first(path), NamedSharding(mesh, P("x")), 4 * NBYTES)
    name, array = next(arrays)
    arrays.close()
    assert_shards_equal(array, values[name])
    assert transfers.under_way == 0
    assert transfers.started < 4 * COUNT


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_transfers_are_under_way_ends_everything(
    path: Path, mesh: Mesh, transfers: Transfers
) -> None:
    def interrupt(done: int) -> None:
        if done == 30:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    transfers.on_read = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(stream(first(path), NamedSharding(mesh, P()), 4 * NBYTES))
    assert transfers.under_way == 0


def test_what_ends_a_thread_ends_the_load(path: Path, mesh: Mesh, transfers: Transfers) -> None:
    def leave(done: int, total: int) -> None:
        if done:
            raise SystemExit("leaving")

    tensors = first(path)
    with pytest.raises(lm.CheckpointError, match="leaving"):
        model_of(tensors, NamedSharding(mesh, P("x"))).materialize(tensors, progress=leave)


@pytest.mark.parametrize("budget", [NBYTES // 8, 4 * NBYTES])
def test_buffers_that_may_be_kept_are_never_written_again(
    path: Path, values: dict[str, np.ndarray], mesh: Mesh, budget: int
) -> None:
    """Of platforms that nothing is known of; CPU devices do keep them."""
    with unknown_memory():
        arrays = dict(stream(first(path, 2 if budget < NBYTES else COUNT), NamedSharding(mesh, P("x")), budget))
    for name, array in arrays.items():
        assert_shards_equal(array, values[name])


NARROW = ["bool", "complex64", "int2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "bfloat16"]


@pytest.mark.parametrize("kind", mostly_large(["device", "pinned_host"], ["pinned_host"]))
def test_shards_of_any_dtype_and_in_any_memory_come_in_pieces(mesh: Mesh, transfers: Transfers, kind: str) -> None:
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 2, (64, 40)).astype(getattr(ml_dtypes, name, name)) for name in NARROW}
    values["signalling"] = np.array([0x7F81, 0xFF82] * 640, np.uint16).view(ml_dtypes.bfloat16)
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    for name, array in stream(values, sharding, 1000):
        assert array.sharding.memory_kind == kind
        assert_shards_equal(array, values[name])
    assert transfers.buffers.made > 2 * len(values), "in pieces"


@pytest.mark.parametrize(
    ("rows", "spec", "source", "through_host"),
    [
        (128, P("batch"), lambda array: array, False),
        (128, P(None, ("batch", "model")), lambda array: array, False),
        (8, P("batch"), lambda array: array, True),  # small: nothing is compiled for it
        (128, P("batch"), lambda array: array[::-1], True),
        (128, P("batch"), lambda array: array.astype(np.float16).astype(np.float32), True),
    ],
)
def test_a_live_models_arrays_are_copied_on_their_devices(
    transfers: Transfers, mesh42: Mesh, rows: int, spec: P, source: Callable[[Any], Any], through_host: bool
) -> None:
    values = np.arange(rows << 8, dtype=np.float32).reshape(rows, -1)
    array = jax.device_put(values, NamedSharding(mesh42, P("batch", "model")))
    model = model_of({"a": values}, NamedSharding(mesh42, spec))
    loaded = model.materialize(lm.map_checkpoint({"a": array}, lambda tensors: {"a": source(tensors["a"])}))["a"]
    assert bool(transfers.buffers.made) == through_host
    assert loaded.sharding.spec == spec
    array.delete()  # or donated, by the next step of training
    assert_shards_equal(loaded, source(values))
