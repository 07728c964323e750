"""Devices with memory of their own, to which transfers are late: no buffer is written, given up or paid back before.

    python -m pytest -n 4 --repeat 200 tests/core/materialize/test_foreign_memory.py

runs everything 200 times, each time with transfers in another order, on more processes than most machines have cores.
"""

import math
import signal
import threading
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._errors import CheckpointError
from lazymodel._materialize import bands
from lazymodel._materialize import stream as streaming
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors import shards
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import FileLeaf
from lazymodel._tensors.shards import boxes_for
from tests.foreign_memory import bits, foreign_memory

P = PartitionSpec
F32 = np.dtype(np.float32)
SHAPE, NBYTES = (160, 128), 160 * 128 * 4  # of what `items_of` makes: too large to be one of a group

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def transfers(repetition):
    with foreign_memory(repetition) as transfers:
        yield transfers


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "weights.bin"
    path.write_bytes(np.random.default_rng(0).bytes(40 * NBYTES))
    return path


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def tensor_of(source, shape, dtype, offset):
    """The lazy tensor, and its values by other means."""
    values = np.fromfile(source.path, np.uint8)[offset : offset + math.prod(shape) * dtype.itemsize].copy()
    return LazyTensor(FileLeaf(f"t{offset}", source, offset, shape, dtype)), values.view(dtype).reshape(shape)


def items_of(path, sharding, count=40):
    """Items, and their values by path."""
    source = FileSource(path)
    pairs = [tensor_of(source, SHAPE, F32, number * NBYTES) for number in range(count)]
    items = [StreamItem(f"v{i}", tensor, SHAPE, F32, sharding) for i, (tensor, _) in enumerate(pairs)]
    return items, {f"v{i}": values for i, (_, values) in enumerate(pairs)}


def assert_equal(array, expected):
    for shard in array.addressable_shards:
        found, wanted = np.asarray(shard.data), np.ascontiguousarray(expected[shard.index])
        assert found.shape == wanted.shape
        if found.dtype.itemsize * 8 > bits(found.dtype):  # whatever is in the rest of the byte
            found, wanted = (each.view(np.uint8) & (2 ** bits(found.dtype) - 1) for each in (found, wanted))
        assert found.tobytes() == wanted.tobytes()


class Buffers:
    """Bytes of all buffers that the stream has allocated and that anybody still holds, transfers too."""

    def __init__(self, patch):
        self.now = self.most = self.made = 0
        self._lock = threading.Lock()
        self._empty = streaming.empty_aligned
        for module in (streaming, bands):
            patch.setattr(module, "empty_aligned", self.empty)

    def empty(self, shape, dtype):
        buffer = self._empty(shape, dtype)
        base = buffer
        while isinstance(base.base, np.ndarray):
            base = base.base
        self.made += 1
        self.add(buffer.nbytes)
        weakref.finalize(base, self.add, -buffer.nbytes)
        return buffer

    def add(self, nbytes):
        with self._lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


SHAPES = [(8, 16), (64, 32), (1024,), (4, 8, 32)]
SPECS = [P(), P("x"), P("y"), P(("x", "y")), P(None, "x"), P("y", "x"), P(None, ("x", "y")), P(None, None, "y")]
DTYPES = [F32, np.dtype(np.int8), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4), np.dtype(np.bool_)]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_tensors_under_any_budget_are_bit_for_bit_what_the_file_has(path, mesh, data):
    source = FileSource(path)
    items, expected = [], {}
    for number in range(data.draw(st.integers(1, 8))):
        shape = data.draw(st.sampled_from(SHAPES))
        dtype, stored = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES[:3]))
        tensor, values = tensor_of(source, shape, stored, 4 * data.draw(st.integers(0, 1000)))
        if data.draw(st.booleans()):
            tensor, values = tensor.T, values.T
        dtype = dtype if stored == F32 else stored
        if dtype != stored:
            with np.errstate(all="ignore"):
                values = np.nan_to_num(values).clip(-8, 7)
            tensor, values = values.astype(dtype), values.astype(dtype)
        spec = data.draw(st.sampled_from([spec for spec in SPECS if len(spec) <= values.ndim]))
        kind = data.draw(st.sampled_from([None, None, "pinned_host"]))
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        items.append(StreamItem(f"v{number}", tensor, values.shape, dtype, sharding))
        expected[f"v{number}"] = values
    budget = data.draw(st.sampled_from([1000, 12_000, 1 << 20, None]))
    with foreign_memory(data.draw(st.integers(0, 1000))) as transfers, pytest.MonkeyPatch.context() as patch:
        buffers = Buffers(patch)
        transfers.held = data.draw(st.booleans())
        for name, array in stream(items, max_host_memory=budget):
            assert_equal(array, expected.pop(name))
            assert array.sharding.memory_kind == items[int(name[1:])].sharding.memory_kind
        assert not expected
        assert transfers.under_way == 0
        assert max(buffers.most, transfers.most_nbytes) <= (budget or 1 << 30)


@pytest.mark.parametrize("budget", [NBYTES // 2, 2 * NBYTES, 10 * NBYTES])
@pytest.mark.parametrize("spec", [P(("x", "y")), P("x"), P()])
def test_buffers_are_used_again_once_they_were_read(path, mesh, transfers, monkeypatch, spec, budget):
    buffers = Buffers(monkeypatch)
    items, expected = items_of(path, NamedSharding(mesh, spec), count=4 if budget < NBYTES else 40)
    arrays = dict(stream(items, max_host_memory=budget))
    for name, array in arrays.items():
        assert_equal(array, expected[name])
    assert buffers.most <= budget
    assert transfers.most_nbytes <= max(budget // 2, NBYTES)
    assert transfers.started >= 4 * len(items)
    assert transfers.under_way == 0
    if budget > 4 * NBYTES:
        assert 2 * buffers.made < len(items) * len(boxes_for(items[0].sharding, SHAPE).boxes)
        assert transfers.most_nbytes > NBYTES  # more than one variable was under way at a time


def test_what_is_not_waited_for_would_be_seen(path, mesh, monkeypatch):
    """Of every array and of the buffers."""
    items, expected = items_of(path, NamedSharding(mesh, P("x")))
    with foreign_memory() as transfers:
        transfers.held = True
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "wait", lambda tree: None)
            arrays = dict(stream(items, max_host_memory=4 * NBYTES))
        with pytest.raises(AssertionError):
            assert_equal(arrays["v0"], expected["v0"])
        transfers.wait(arrays)
        assert "was written before a transfer had read it" in transfers.wrongs[0]
        transfers.wrongs.clear()


def test_reading_goes_on_while_transfers_are_under_way(path, mesh, transfers, monkeypatch):
    """With two threads three more variables are filled while one goes to its devices."""
    monkeypatch.setattr(streaming, "cores", lambda: 1)
    items, expected = items_of(path, NamedSharding(mesh, P()), count=8)
    counted, enough = [], threading.Event()

    def on_bytes(nbytes):
        counted.append(nbytes)
        if sum(counted) >= 4 * NBYTES:
            enough.set()

    in_time = []

    def wait(done):
        in_time.append(enough.wait(30))
        enough.set()

    transfers.on_read = wait
    for name, array in stream(items, on_bytes=on_bytes):
        assert_equal(array, expected[name])
    assert all(in_time)


@pytest.mark.parametrize("number", [0, 17])
@pytest.mark.parametrize("when", ["on_start", "on_read"])
@pytest.mark.parametrize("budget", [NBYTES // 2, 4 * NBYTES, None])
def test_a_transfer_that_fails_is_an_error_that_names_a_variable(path, mesh, transfers, budget, when, number):
    def fail(count):
        if count >= number:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    setattr(transfers, when, fail)
    items, _ = items_of(path, NamedSharding(mesh, P("x")), count=12)
    with pytest.raises(CheckpointError, match=r"^'v\d+' from tensor .*weights\.bin.*: RESOURCE_EXHAUSTED"):
        list(stream(items, max_host_memory=budget))


def test_a_file_that_fails_meanwhile_waits_for_what_is_under_way(path, mesh, transfers):
    transfers.held = True
    items, _ = items_of(path, NamedSharding(mesh, P("x")), count=12)
    beyond = LazyTensor(FileLeaf("w", items[0].tensor.leaf.source, 40 * NBYTES - 100, SHAPE, F32))
    items.append(StreamItem("bad", beyond, SHAPE, F32, NamedSharding(mesh, P())))
    with pytest.raises(CheckpointError, match="truncated"):
        list(stream(items, max_host_memory=4 * NBYTES))
    assert transfers.under_way == 0


def test_who_stops_early_finds_nothing_under_way(path, mesh, transfers):
    items, expected = items_of(path, NamedSharding(mesh, P("x")))
    arrays = stream(items, max_host_memory=4 * NBYTES)
    name, array = next(arrays)
    arrays.close()
    assert_equal(array, expected[name])
    assert transfers.under_way == 0
    assert transfers.started < 4 * len(items)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="interrupts itself")
def test_an_interrupt_while_transfers_are_under_way_ends_everything(path, mesh, transfers):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:

        def interrupt(done):
            if done == 30:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        transfers.on_read = interrupt
        items, _ = items_of(path, NamedSharding(mesh, P()))
        with pytest.raises(KeyboardInterrupt):
            list(stream(items, max_host_memory=4 * NBYTES))
    finally:
        signal.signal(signal.SIGINT, before)
    assert transfers.under_way == 0


def test_what_ends_a_thread_ends_the_load(path, mesh, transfers):
    def leave(nbytes):
        raise SystemExit("leaving")

    items, _ = items_of(path, NamedSharding(mesh, P("x")))
    with pytest.raises(CheckpointError, match="leaving"):
        list(stream(items, on_bytes=leave))


def test_small_tensors_go_together(path, mesh, transfers, monkeypatch):
    source = FileSource(path)
    pairs = [tensor_of(source, (8, 8), F32, number * 256) for number in range(300)]
    specs = [P("x"), P(None, "y"), P()]
    items = [
        StreamItem(f"v{i}", tensor, (8, 8), F32, NamedSharding(mesh, specs[i % 3]))
        for i, (tensor, _) in enumerate(pairs)
    ]
    transfers.held = True
    for name, array in stream(items, max_host_memory=64 << 10):
        assert_equal(array, pairs[int(name[1:])][1])
    assert transfers.most_nbytes <= 64 << 10
    assert transfers.under_way == 0


@pytest.mark.parametrize("budget", [NBYTES // 8, 4 * NBYTES])
def test_buffers_that_may_be_kept_are_never_written_again(path, mesh, monkeypatch, budget):
    """Of platforms that nothing is known of; CPU devices do keep them."""
    monkeypatch.delitem(shards.MEMORIES, "cpu")
    boxes_for.cache_clear()
    try:
        items, expected = items_of(path, NamedSharding(mesh, P("x")), count=2 if budget < NBYTES else 40)
        arrays = dict(stream(items, max_host_memory=budget))
    finally:
        boxes_for.cache_clear()
    for name, array in arrays.items():
        assert_equal(array, expected[name])


@pytest.mark.parametrize("dtype", ["bool", "complex64", "int2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_shards_of_any_dtype_and_in_any_memory_come_in_pieces(mesh, transfers, dtype, kind):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.random.default_rng(0).integers(0, 2, (32, 8)).astype(dtype)
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    ((_, array),) = stream([StreamItem("w", values, values.shape, dtype, sharding)], max_host_memory=200)
    assert array.dtype == dtype
    assert array.sharding.memory_kind == kind
    assert_equal(array, values)


def test_signalling_nans_keep_their_bits_in_pieces(mesh, transfers):
    values = np.array([0x7F81, 0xFF82] * 64, np.uint16).view(ml_dtypes.bfloat16)
    ((_, array),) = stream(
        [StreamItem("w", values, values.shape, values.dtype, NamedSharding(mesh, P("x")))], max_host_memory=200
    )
    assert np.asarray(array).tobytes() == values.tobytes()
