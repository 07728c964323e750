"""On devices with memory of their own: values, peaks and speed of what copies to them, and of what reads them.

    JAX_PLATFORMS= python -m pytest -s tests/accelerator

uses what there is, GPUs or TPUs, and prints figures (`-s`). Without one CPU devices stand in, so that the tests
themselves are tested, and what only an accelerator has is skipped.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.foreign_memory import MEMORIES
from tests.small import shard_small

LAYERS = 4
BUDGETS = [None, 256, 24]  # MiB; where CPU devices stand in, KiB
RULES = {".*up": P(None, "model"), ".*down": P("model"), ".*": P()}


def layers(size: int, dtype: Any, count: int = LAYERS) -> dict[str, np.ndarray]:
    """A model's arrays by path, of any bits: NaNs of all kinds too."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    shapes = {"up": (size, 4 * size), "down": (4 * size, size), "norm": (size,)}
    return {
        f"layer_{number}/{name}": np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
        for number in range(count)
        for name, shape in shapes.items()
    }


def abstract(arrays: dict[str, np.ndarray]) -> lm.AbstractModel:
    return lm.build_abstract(lambda: {path: jnp.zeros(array.shape, array.dtype) for path, array in arrays.items()})


def saved(arrays: dict[str, np.ndarray], folder: Path) -> Any:
    save_file(arrays, folder / "model.safetensors")
    return lm.open_checkpoint(folder / "model.safetensors")


def assert_same(model: Any, arrays: dict[str, np.ndarray]) -> None:
    for path, array in arrays.items():
        for shard in model[path].addressable_shards:
            found, expected = np.asarray(shard.data), np.ascontiguousarray(array[shard.index])
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes(), path


def test_there_is_an_accelerator(on_accelerator: bool) -> None:
    if not on_accelerator:
        pytest.skip("no accelerator here, CPU devices stand in (JAX_PLATFORMS= lets JAX look for one)")
    assert {MEMORIES.get(device.platform) for device in jax.local_devices()} == {"own"}, "a new platform"


def test_the_peak_is_what_was_planned(tmp_path: Path, mesh: Mesh, size: int, on_accelerator: bool) -> None:
    """Comes first: the peak that devices tell of is that of the whole process."""
    arrays = layers(size, np.float32, 4 * LAYERS)
    sharded = abstract(arrays).shard(mesh, RULES)
    plan = sharded.plan(saved(arrays, tmp_path))
    before = [device.memory_stats() for device in mesh.devices.flat]
    model = sharded.materialize(saved(arrays, tmp_path), max_host_memory="1GiB" if on_accelerator else 4 << 20)
    after = [device.memory_stats() for device in mesh.devices.flat]
    assert_same(model, arrays)
    for device, first, last in zip(mesh.devices.flat, before, after, strict=True):
        if not first or not last or "peak_bytes_in_use" not in last:
            pytest.skip("these devices do not tell how much memory is in use")
        used, peak = first["bytes_in_use"], last["peak_bytes_in_use"]
        assert last["bytes_in_use"] - used >= plan.device_nbytes
        found, planned = (nbytes / plan.device_nbytes for nbytes in (peak - used, plan.peak_nbytes))
        print(f"\n{device}: peak {found:.3f} × its part of the model, planned {planned:.3f} ×")
        # A band of a shard and what it takes to put it there besides; allocators round up.
        assert peak <= max(used + 1.02 * plan.peak_nbytes + (64 << 20), first["peak_bytes_in_use"])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_values_bit_for_bit(
    tmp_path: Path, mesh: Mesh, size: int, on_accelerator: bool, dtype: str, budget: int | None
) -> None:
    arrays = layers(size, getattr(ml_dtypes, dtype, dtype), 2)
    if budget is not None:
        budget <<= 20 if on_accelerator else 10
    model = abstract(arrays).shard(mesh, RULES).materialize(saved(arrays, tmp_path), max_host_memory=budget)
    assert_same(model, arrays)


def test_thousands_of_small_tensors(tmp_path: Path, mesh: Mesh, on_accelerator: bool) -> None:
    arrays = layers(8, np.float32, 2000 if on_accelerator else 20)
    assert_same(abstract(arrays).shard(mesh, RULES).materialize(saved(arrays, tmp_path)), arrays)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
@pytest.mark.parametrize("budget", [None, 24])
def test_other_memory(
    tmp_path: Path, mesh: Mesh, size: int, on_accelerator: bool, kind: str, budget: int | None
) -> None:
    if kind not in {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}:
        pytest.skip(f"these devices have no {kind}")
    if budget is not None:
        budget <<= 20 if on_accelerator else 10
    arrays = layers(size, np.float32, 1)
    place = NamedSharding(mesh, P(), memory_kind=kind)
    model = (
        abstract(arrays)
        .shard(mesh, lambda variable: place)
        .materialize(saved(arrays, tmp_path), max_host_memory=budget)
    )
    assert {array.sharding.memory_kind for array in model.values()} == {kind}
    assert_same(model, arrays)
    lm.save(model, tmp_path / "again.safetensors")
    for path, tensor in lm.open_checkpoint(tmp_path / "again.safetensors").items():
        np.testing.assert_array_equal(np.asarray(tensor).view(np.uint32), arrays[path].view(np.uint32))


def test_auto(tmp_path: Path, mesh: Mesh, size: int) -> None:
    arrays = layers(size, jnp.bfloat16)
    sharded = shard_small(abstract(arrays), mesh, lm.auto(), large=2 * size)
    plan = sharded.plan(saved(arrays, tmp_path))
    total = sum(array.nbytes for array in arrays.values())
    assert plan.device_nbytes <= 1.1 * total / mesh.size
    assert_same(sharded.materialize(saved(arrays, tmp_path)), arrays)


def test_initialized_like_eager(mesh: Mesh, size: int) -> None:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"up": jax.random.normal(key, (size, 4 * size)), "norm": jnp.ones(size)}

    model = lm.build_abstract(init, jax.random.key(0)).shard(mesh, {"up": RULES[".*up"], "norm": P()}).materialize()
    expected = init(jax.random.key(0))
    for path, array in model.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[path]))


def test_saved_back(tmp_path: Path, mesh: Mesh, size: int, on_accelerator: bool) -> None:
    arrays = layers(size, np.float32)
    model = abstract(arrays).shard(mesh, RULES).materialize(saved(arrays, tmp_path))
    lm.save(model, tmp_path / "again", max_host_memory="64MiB" if on_accelerator else 64 << 10)
    again = lm.open_checkpoint(tmp_path / "again")
    for path, array in arrays.items():
        assert np.asarray(again[path]).tobytes() == array.tobytes()


def test_resharded(tmp_path: Path, mesh: Mesh, size: int) -> None:
    """From device to device, and onto half of them through the host."""
    arrays = layers(size, np.float32)
    model = abstract(arrays).shard(mesh, RULES).materialize(saved(arrays, tmp_path))
    assert_same(lm.reshard(model, NamedSharding(mesh, P("model"))), arrays)
    half = Mesh(mesh.devices[: max(mesh.size // 2, 1)], ("model",))
    moved = lm.reshard(model, NamedSharding(half, P("model")), max_device_memory="16MiB", donate=True)
    assert_same(moved, arrays)


def test_compiled_beside_the_stream(tmp_path: Path, mesh: Mesh, size: int) -> None:
    compile_events = pytest.importorskip("tests.compile_events").compile_events
    arrays = {path: array for path, array in layers(size, np.float32).items() if "norm" not in path}

    @jax.jit
    def step(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for number in range(LAYERS):
            x = x @ model[f"layer_{number}/up"] @ model[f"layer_{number}/down"]
        return x

    x = np.ones((8, size), np.float32)
    sharded = abstract(arrays).shard(mesh, RULES)
    model = sharded.materialize(saved(arrays, tmp_path), compile=lm.Compile(step, x))
    with compile_events() as events:
        step(model, x).block_until_ready()
    assert events == []
    assert_same(model, arrays)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning")
@pytest.mark.parametrize("how", ["int8"])
def test_quantized_while_read(tmp_path: Path, mesh: Mesh, size: int, how: str) -> None:
    keras = pytest.importorskip("keras")
    stock = keras.Sequential([keras.Input((size,)), keras.layers.Dense(4 * size), keras.layers.Dense(size)])
    stock.save(tmp_path / "net.keras")
    abstract = lm.build_abstract(keras.models.load_model, tmp_path / "net.keras").quantize(how)
    stock.quantize(how)
    assert_equal_variables(stock, abstract.shard(mesh, lm.auto()).materialize())


def test_trained_saved_and_restored(tmp_path: Path, mesh: Mesh, on_accelerator: bool) -> None:
    keras = pytest.importorskip("keras")
    lk = pytest.importorskip("lazymodel_keras")
    width = 1024 if on_accelerator else 16

    def net() -> Any:
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(width)])
        model.compile("adam", "mse")
        return model

    model = lm.build_abstract(net).shard(mesh, lm.auto()).materialize()
    x = np.ones((8, width), np.float32)
    model.fit(x, x, verbose=0)
    model.save(tmp_path / "trained.keras")
    restored = lk.restore(lm.build_abstract(net).shard(mesh, lm.auto()), tmp_path / "trained.keras")
    assert_equal_variables(model, restored)
    assert_equal_variables(model.optimizer, restored.optimizer)
    restored.fit(x, x, verbose=0)


def assert_equal_variables(one: Any, other: Any) -> None:
    assert len(one.variables) == len(other.variables)
    for first, second in zip(one.variables, other.variables, strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes(), first.path


def test_how_fast(tmp_path: Path, mesh: Mesh, size: int) -> None:
    """Prints GB/s of a load from the page cache and of what it cannot be faster than; asserts values alone."""
    arrays = layers(size, np.float32, 16)
    total = sum(array.nbytes for array in arrays.values())
    checkpoint = saved(arrays, tmp_path)
    device = mesh.devices.flat[0]
    place = SingleDeviceSharding(device)
    figures = {"CPU cores": os.cpu_count() or 1}

    def timed(what: str, function: Any, nbytes: int) -> Any:
        jax.block_until_ready(function())
        start = time.perf_counter()
        result = jax.block_until_ready(function())
        figures[what] = nbytes / (time.perf_counter() - start) / 1e9
        return result

    large = next(iter(arrays.values()))
    timed("pageable memory to one device, GB/s", lambda: jax.device_put(large, place), large.nbytes)
    if "pinned_host" in {memory.kind for memory in device.addressable_memories()}:
        pinned = jax.block_until_ready(jax.device_put(large, place.with_memory_kind("pinned_host")))
        timed("pinned memory to one device, GB/s", lambda: jax.device_put(pinned, place), large.nbytes)
    sharded = abstract(arrays).shard(mesh, RULES)
    model = timed(f"a load onto {mesh.size}, GB/s", lambda: sharded.materialize(checkpoint, progress=False), total)
    assert_same(model, arrays)
    print("", *(f"{what:40} {figure:8.2f}" for what, figure in figures.items()), sep="\n")
