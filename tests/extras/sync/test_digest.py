"""Digests are equal for equal bits, wherever these are and however they are divided, and differ for others."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.command import command
from tests.gguf_files import gguf_file, random_tensor
from tests.processes import free_address, printed, run_workers

implementation: Any = importlib.import_module("lazymodel.extras.sync.digest")
RNG = np.random.default_rng(0)
NARROW = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}  # bits
DTYPES = (
    *NARROW,
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)


def bits(dtype: str, *shape: int) -> np.ndarray:
    """Any bit patterns of a dtype: NaNs with payloads, both zeros, numbers that are not normal."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype not in NARROW:
        return RNG.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)
    half = 2 ** (NARROW[dtype] - 1)
    return (
        RNG.integers(-half, half, shape).astype(kind)
        if dtype[0] == "i"
        else RNG.integers(0, 2 * half, shape, np.uint8).view(kind)
    )


def put(value: np.ndarray, mesh: Mesh, *spec: Any, memory_kind: str | None = None) -> jax.Array:
    sharding = NamedSharding(mesh, P(*spec), memory_kind=memory_kind)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.ascontiguousarray(value[index]))


def of(value: Any) -> int:
    return lm.digest({"w": value})["w"]


def differ(values: Iterable[np.ndarray]) -> bool:
    found = [of(value) for value in values]
    return len({*found}) == len(found)


# Equal ----------------------------------------------------------------------------------------------------------------


def test_what_is_counted_does_not_change():
    """Digests are kept in files: these were computed by an earlier version."""
    found = lm.digest(
        {"a": np.arange(6, dtype="float32"), "b": np.arange(3, dtype="complex128"), "c": np.zeros((0, 2))}
    )
    assert found.to_dict() == {
        "a": {"shape": [6], "dtype": "float32", "digest": "a4054d0bac1bfc40"},
        "b": {"shape": [3], "dtype": "complex128", "digest": "fda3230b5723567f"},
        "c": {"shape": [0, 2], "dtype": "float64", "digest": "0" * 16},
    }


@pytest.mark.parametrize("names", [(), ("batch",), ("model",), ("batch", "model"), ("model", "batch")])
def test_every_sharding(names: tuple[str, ...], mesh8: Mesh, mesh42: Mesh) -> None:
    value = bits("float32", 16, 8, 24)
    expected = of(value)
    specs = [[None] * axis + [names] for axis in range(3)]
    specs += [
        list(order) for order in ((names[:1], names[1:]), (None, names[:1], names[1:]), (names[1:], None, names[:1]))
    ]
    explicit = Mesh(mesh42.devices, mesh42.axis_names, axis_types=(AxisType.Explicit,) * 2)
    for mesh in (mesh42, explicit):
        assert {of(put(value, mesh, *(each or None for each in spec))) for spec in specs} == {expected}
    with jax.set_mesh(explicit):
        assert of(put(value, explicit, names or None)) == expected
    assert of(put(value, mesh8, None, "model", memory_kind="pinned_host")) == expected
    assert of(jax.device_put(value, jax.devices()[3])) == expected


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, x64: bool, mesh42: Mesh) -> None:
    value = bits(dtype, 8, 12)
    with jax.enable_x64(True):
        live = {"split": put(value, mesh42, "batch", "model"), "whole": jax.device_put(value)}
    with jax.enable_x64(x64):
        found = lm.digest({**live, "host": value})
    assert len({*found.rows.values()}) == 1 and found.rows["host"].dtype == dtype
    other = value.copy()
    other[5, 7] = (
        other[5, 7] == 0 if dtype == "bool" else next(e for e in value.flat if e.tobytes() != value[5, 7].tobytes())
    )
    assert of(other) != found["host"]


def test_scalars_keys_and_arrays_without_elements(mesh8: Mesh) -> None:
    keys = jax.random.split(jax.random.key(3), 16)
    live = {
        "step": jnp.int32(7),
        "key": jax.device_put(keys, NamedSharding(mesh8, P("model"))),
        "none": jnp.zeros((0, 3)),
    }
    host = {"step": np.int32(7), "key": np.asarray(jax.random.key_data(keys)), "none": np.zeros((0, 3), "float32")}
    assert lm.digest(live) == lm.digest(host)
    assert lm.digest({"lr": 0.5}).rows["lr"].dtype == "float64"


def test_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"w": bits("bfloat16", 333, 1001), "t": bits("uint8", 1001, 333).T, "c": bits("complex128", 40_001)}
    expected = lm.digest({name: jnp.asarray(each) for name, each in value.items() if name != "c"})
    whole = lm.digest(value)
    monkeypatch.setattr(implementation, "_CHUNK", 16 << 16)
    assert lm.digest(value) == whole
    assert {name: whole[name] for name in expected} == dict(expected)


def test_indices_of_more_than_31_bits(monkeypatch: pytest.MonkeyPatch, mesh8: Mesh) -> None:
    """As if bits of the index from the eighth on were the high ones, which there is no memory for in a test."""
    value = bits("float32", 16, 64, 8)
    low = of(value)
    for name, number in (("_LOW", 7), ("_MASK", 127)):
        monkeypatch.setattr(implementation, name, number)
    jax.clear_caches()
    implementation.PROGRAMS.clear()
    try:
        found = {of(value), *(of(put(value, mesh8, *[None] * axis, "model")) for axis in range(3))}
        swapped = value.reshape(-1, 128)[[1, 0, *range(2, 64)]].reshape(value.shape)
        assert len(found) == 1 and of(swapped) not in found | {low}
    finally:
        jax.clear_caches()
        implementation.PROGRAMS.clear()


def test_formats(tmp_path: Path) -> None:
    values = {"a/vars/0": bits("float32", 64, 40), "a/vars/1": bits("int32", 40), "b/vars/0": bits("float16", 3, 5, 7)}
    expected = lm.digest(values)
    save_file(values, tmp_path / "m.safetensors")
    arrays: dict[str, Any] = {name.replace("/", "_"): value for name, value in values.items()}
    np.savez(tmp_path / "m.npz", **arrays)
    live = {name: jnp.asarray(value) for name, value in values.items()}
    lm.save(live, tmp_path / "m.weights.h5")
    lm.save(live, tmp_path / "orbax", format="orbax")
    lm.save(live, tmp_path / "folder", max_shard_size="8KiB")
    for path in ("m.safetensors", "m.weights.h5", "orbax", "folder"):
        assert lm.digest(tmp_path / path) == expected, path
    assert [*lm.digest(tmp_path / "m.npz").values()] == [*expected.values()]
    assert lm.digest(lm.build_abstract(lambda: live)) == lm.digest(live) == expected


def test_gguf_is_decoded(tmp_path: Path) -> None:
    stored = {"plain": random_tensor(RNG, "F32", 4, 64), "blocks": random_tensor(RNG, "Q4_0", 4, 64)}
    (tmp_path / "m.gguf").write_bytes(gguf_file({}, stored))
    assert lm.digest(tmp_path / "m.gguf") == lm.digest({name: each.decoded() for name, each in stored.items()})


def test_a_mapping_gives_the_model_s_names_and_layouts(mesh8: Mesh) -> None:
    weights = {f"layers.{n}.weight": bits("float32", 24, 16) for n in range(2)}
    stacked = np.stack([each.T for each in weights.values()])
    model = {"layers": {"kernel": put(stacked, mesh8, None, "model")}}
    table = lm.WeightMap({"layers/kernel": lm.From("layers.{layer}.weight").T.stack("layer")})
    abstract = lm.build_abstract(lambda: {"layers": {"kernel": jnp.zeros((2, 16, 24))}})
    assert lm.digest(weights, table, abstract) == lm.digest(model)

    def stack(w: Any) -> Any:
        return {"layers": {"kernel": np.stack([w[name].T for name in weights])}}

    assert lm.digest(weights, stack) == lm.digest(model) == lm.digest(weights, table, model)


def test_only_once_read_and_in_bounded_memory(tmp_path: Path) -> None:
    save_file({"w": bits("uint8", 33 << 20)}, tmp_path / "m.safetensors")
    with lm.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        largest: list[int] = []
        fill = implementation.fill

        def counted(*given: Any) -> None:
            largest.append(given[2][0].nbytes)
            fill(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(implementation, "fill", counted)
            lm.digest(checkpoint)
    assert sum(largest) == 33 << 20 and max(largest) == 4 << 20


# Different ------------------------------------------------------------------------------------------------------------


def test_what_a_sum_of_values_would_not_find() -> None:
    value = RNG.standard_normal((32, 16)).astype("float32")
    swapped, rows, columns, flipped, sign = (value.copy() for _ in range(5))
    swapped[0, 0], swapped[0, 1] = value[0, 1], value[0, 0]
    rows[[3, 17]], columns[:, [2, 9]] = value[[17, 3]], value[:, [9, 2]]
    flipped.view(np.uint32)[31, 15] ^= 1
    sign[4, 4] *= -1
    assert differ([value, swapped, rows, columns, flipped, sign, value.T, value[::-1], np.roll(value, 1), value + 0.5])
    assert differ([np.zeros(4, "float32"), np.array([0, 0, -0.0, 0], "float32")])
    nans = np.full(3, 0x7FC00000, np.uint32)
    nans[1] += 1
    assert differ([nans.view(np.float32), np.full(3, np.nan, "float32")])
    assert differ([np.full(size, number, "uint8") for size in range(1, 40) for number in range(5)])
    raw = bits("uint8", 64)
    assert differ([raw.view(dtype) for dtype in ("uint8", "uint16", "uint32", "uint64")])


@pytest.mark.parametrize("kind", ["random", "flips", "permutations", "signs"])
def test_no_collision_among_ten_thousand_pairs(kind: str) -> None:
    """Rows as arrays of their own, compared all with all, and by either half of the bits alone."""
    base = np.tile(RNG.standard_normal(32).astype("float32").view(np.uint32), (20_000, 1))
    if kind == "random":
        base = RNG.integers(0, 2**32, base.shape, np.uint32)
    elif kind == "permutations":
        base = RNG.permuted(base, axis=1)
    else:
        for _ in range(4):
            bit = RNG.integers(0, 32, len(base)).astype(np.uint32) if kind == "flips" else np.uint32(31)
            base[np.arange(len(base)), RNG.integers(0, 32, len(base))] ^= np.uint32(1) << bit
    rows = np.unique(base, axis=0)
    low = jnp.arange(32, dtype=np.uint32)

    def sums(row: jax.Array) -> jax.Array:
        return implementation._mixed([row], low, np.uint32(0))

    found = np.asarray(jax.jit(jax.vmap(sums))(rows))
    assert len(np.unique(found, axis=0)) == len(rows)
    assert all(len(np.unique(half)) >= len(rows) - 3 for half in found.T)  # random 32 bits: one in twenty runs
    assert f"{found[0, 0]:08x}{found[0, 1]:08x}" == lm.digest({"w": rows[0]}).rows["w"].digest


# The result -----------------------------------------------------------------------------------------------------------


def test_what_differs() -> None:
    first = {"layers": [{"w": np.full(3, n, "float32")} for n in range(3)], "a": np.ones(2), "same": np.ones(2)}
    other = {"layers": [{"w": np.full(3, n + 1, "float32")} for n in range(3)], "b": np.ones(2), "same": np.ones(2)}
    one, two = lm.digest(first), lm.digest(other)
    found = one.diff(two)
    assert found and one != two and found.only_in_a == ("a",) and found.only_in_b == ("b",)
    assert [*found.differing] == [f"layers/{n}/w" for n in range(3)] and found.compared == 4
    text = str(found)
    assert "3 of 4 arrays that both have differ" in text and "layers/{0..2}/w" in text and "only in b: b" in text
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert not one.diff(one) and "the same, 5 arrays" in str(one.diff(one)) and "layers/0/w" in str(one)
    kinds = lm.digest({"w": np.zeros((2, 3), "float32")}).diff(lm.digest({"w": np.zeros((3, 2), "int32")}))
    assert "float32 → int32" in str(kinds) and "(2, 3) → (3, 2)" in str(kinds)


def test_kept_in_a_file() -> None:
    found = lm.digest({"w": np.ones((2, 3))})
    again = lm.Digest.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found and again["w"] == found["w"] and not again.diff(found)
    for wrong in ({"w": 3}, {"w": {"shape": [2]}}, [1], {"w": {"shape": 2, "dtype": "a", "digest": "b"}}):
        with pytest.raises(lm.LazyModelError, match=r"expected what Digest\.to_dict returns, found"):
            lm.Digest.from_dict(wrong)  # type: ignore[arg-type]


def test_nothing_to_digest() -> None:
    with pytest.raises(lm.LazyModelError, match="there are no arrays in what was given"):
        lm.digest({})
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(lm.LazyModelError, match="'w' was deleted"):
        lm.digest({"w": array})


def test_command(tmp_path: Path) -> None:
    value: dict[str, Any] = {"a.w": bits("float32", 8, 4), "b": bits("int32", 3)}
    save_file(value, tmp_path / "one.safetensors")
    save_file(value | {"b": value["b"][::-1].copy()}, tmp_path / "two.safetensors")
    np.savez(tmp_path / "three.npz", **value)
    paths = [tmp_path / name for name in ("one.safetensors", "two.safetensors", "three.npz")]
    ran = command("digest", paths[0], "--json")
    assert ran.status == 0
    document = json.loads(ran.out)
    assert document == {"schema": "lazymodel.digest/1", "tensors": lm.digest(value).to_dict()}
    assert document["tensors"]["b"]["digest"] in command("digest", paths[0]).out
    ran = command("digest", paths[0], paths[1])
    assert ran.status == 1 and "1 of 2 arrays that both have differ" in ran.out
    ran = command("digest", paths[0], paths[2], "--json")
    assert ran.status == 0 and json.loads(ran.out)["same"]
    assert command("digest", tmp_path / "four.safetensors").status == 2


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.timeout(90)
def test_processes_agree(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("_digest_worker.py")
    address = free_address()
    codes = run_workers(worker, [(process, 2, address, tmp_path) for process in range(2)], tmp_path, patience=80)
    assert codes == [0, 0], printed(tmp_path, 2)
