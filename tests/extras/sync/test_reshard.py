"""A live model moves to other shardings and devices, equal bit for bit, and gives up what it left where it may."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events
from tests.core.trace._eager import random_spec
from tests.large import mostly_large

DTYPES = {
    "float": np.float32,
    "half": ml_dtypes.bfloat16,
    "eight": ml_dtypes.float8_e4m3fn,
    "four": ml_dtypes.uint4,
    "mask": np.bool_,
}


@pytest.fixture(scope="module")
def meshes() -> dict[str, Mesh]:
    devices = np.array(jax.devices()[:8])
    return {
        "trainer": Mesh(devices.reshape(8, 1), ("data", "model")),
        "sampler": Mesh(devices.reshape(2, 4), ("data", "model")),
        "four": Mesh(devices[:4].reshape(1, 4), ("data", "model")),
        "turned": Mesh(devices[::-1].reshape(2, 4), ("data", "model")),
    }


def values(name: str) -> np.ndarray:
    """Every bit pattern that there is, so that what was computed with would show."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(DTYPES[name])
    raw = rng.integers(0, 256, 64 * 256 * dtype.itemsize, np.uint8)
    raw = raw & {"four": 15, "mask": 1}.get(name, 255)
    return raw.view(dtype).reshape(64, 256)


def put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.ascontiguousarray(value[index]))


def model(mesh: Mesh, spec: P) -> dict[str, Any]:
    return {"layer": {name: put(values(name), NamedSharding(mesh, spec)) for name in DTYPES}, "step": 3}


@pytest.mark.parametrize(
    ("there", "spec", "donate"),
    mostly_large(
        [
            ("sampler", P(None, "model"), False),
            ("sampler", P("model", "data"), True),
            ("sampler", P(), False),
            ("four", P("model"), True),
            ("turned", P("data", "model"), False),
        ],
        [("sampler", P(None, "model"), False), ("four", P("model"), True)],
    ),
)
def test_every_bit_is_as_it_was(meshes: dict[str, Mesh], there: str, spec: P, donate: bool) -> None:
    before = model(meshes["trainer"], P("data"))
    target = NamedSharding(meshes[there], spec)
    reports: list[lm.ReshardReport] = []
    after = lm.reshard(before, target, donate=donate, report=reports.append)
    assert after["step"] == 3
    assert {row.way for row in reports[0].rows} == {"devices"}
    for name in DTYPES:
        array = after["layer"][name]
        assert array.sharding == target and before["layer"][name].is_deleted() == donate
        for shard in array.addressable_shards:
            got, wanted = np.asarray(shard.data), values(name)[shard.index]
            assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), name


def test_only_what_is_named_moves_and_ties_stay_ties(meshes: dict[str, Mesh]) -> None:
    place = NamedSharding(meshes["trainer"], P("data"))
    tied = put(values("float"), place)
    tree = {"in": tied, "out": tied, "other": put(values("half"), place), "host": np.arange(3)}
    moved = lm.reshard(tree, {"in": NamedSharding(meshes["sampler"], P("model"))})
    assert moved["in"] is moved["out"] and moved["in"].sharding.spec == P("model")
    assert moved["other"] is tree["other"] and moved["host"] is tree["host"]


def test_one_array_at_two_places_has_one_sharding(meshes: dict[str, Mesh]) -> None:
    array = put(values("float"), NamedSharding(meshes["trainer"], P("data")))
    tied = {"embed": array, "head": {"kernel": array}}
    columns, rows = (NamedSharding(meshes["sampler"], spec) for spec in (P(None, "model"), P("model")))
    after = lm.reshard(tied, {"embed": columns, "head": {"kernel": columns}})
    assert after["embed"] is after["head"]["kernel"] and after["embed"].sharding == columns
    assert lm.reshard(tied, {"head": {"kernel": rows}})["embed"].sharding == rows
    with pytest.raises(lm.ShardingError, match="'head/kernel' and 'embed' are one array"):
        lm.reshard(tied, {"embed": columns, "head": {"kernel": rows}})


@pytest.mark.parametrize("there", ["sampler", "four"])
def test_arrays_without_elements(there: str, meshes: dict[str, Mesh]) -> None:
    made = jax.jit(lambda: jnp.zeros((0, 3, 16)), out_shardings=NamedSharding(meshes["trainer"], P(None, None, "data")))
    keys = jax.random.split(jax.random.key(0), (0, 16))
    target = NamedSharding(meshes[there], P(None, None, "model"))
    after = lm.reshard({"made": made(), "keys": keys}, {"made": target, "keys": NamedSharding(target.mesh, P())})
    assert {shard.data.shape for shard in after["made"].addressable_shards} == {(0, 3, 4)}
    assert np.asarray(after["made"] + 1).shape == (0, 3, 16) and after["keys"].shape == (0, 16)


@pytest.mark.parametrize("seed", mostly_large(range(12), range(2)))
def test_random_moves(seed: int, meshes: dict[str, Mesh]) -> None:
    rng = np.random.default_rng(seed)

    def placed(shape: tuple[int, ...]) -> NamedSharding:
        mesh = meshes[str(rng.choice(list(meshes)))]
        return NamedSharding(mesh, random_spec(random.Random(int(rng.integers(1 << 30))), shape, mesh))

    shapes = [tuple(rng.choice([0, 1, 3, 8, 16, 24], rng.integers(0, 5))) for _ in range(6)]
    before = {str(i): jax.device_put(rng.normal(size=shape), placed(shape)) for i, shape in enumerate(shapes)}
    targets = {path: placed(array.shape) for path, array in before.items()}
    after = lm.reshard(before, targets, max_device_memory=int(rng.integers(1, 1 << 16)))
    for path, array in after.items():
        assert array.sharding.is_equivalent_to(targets[path], array.ndim)
        assert np.asarray(array).tobytes() == np.asarray(before[path]).tobytes()


def test_rules_come_with_an_abstract_model(meshes: dict[str, Mesh]) -> None:
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (64, 32))}, jax.random.key(0))
    live = abstract.shard(meshes["trainer"], {"w": P("data")}).materialize()
    moved = lm.reshard(live, abstract.shard(meshes["sampler"], {"w": P(None, "model")}))
    assert moved["w"].sharding.spec == P(None, "model")
    np.testing.assert_array_equal(moved["w"], live["w"])
    with pytest.raises(lm.ShardingError, match="'w' has no sharding yet"):
        lm.reshard(live, abstract)


@pytest.mark.parametrize("there", ["sampler", "four"])
def test_keys_move_as_keys(meshes: dict[str, Mesh], there: str) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 64), NamedSharding(meshes["trainer"], P("data")))
    moved = lm.reshard({"keys": keys}, NamedSharding(meshes[there], P("model")))["keys"]
    assert moved.dtype == keys.dtype and moved.sharding.spec == P("model")
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_one_variable_moves_at_a_time(meshes: dict[str, Mesh]) -> None:
    """Sixteen equal variables are as many groups as the limit says; with donation none is there twice."""
    place, target = NamedSharding(meshes["trainer"], P("data")), NamedSharding(meshes["sampler"], P("data", "model"))
    tree = {str(n): put(values("float"), place) for n in range(16)}
    shard = values("float").nbytes // 8
    reports: list[lm.ReshardReport] = []
    told: list[tuple[int, int]] = []
    lm.reshard(tree, target, max_device_memory="1MiB", report=reports.append, progress=lambda *pair: told.append(pair))
    lm.reshard(tree, target, donate=True, max_device_memory=4 * shard, report=reports.append)
    kept, given = reports
    assert kept.num_groups == 1 and given.num_groups == 4
    assert kept.held_nbytes == (16 * shard, 32 * shard) and given.held_nbytes == (16 * shard, 16 * shard)
    assert given.peak_nbytes <= 16 * shard + 3 * shard
    assert told[-1] == (16 * values("float").nbytes,) * 2
    assert given.to_dict()["rows"][0]["way"] == "devices"
    assert "most loaded device" in str(given)


def test_what_cannot_be_is_refused_before_anything_moves(meshes: dict[str, Mesh]) -> None:
    before = model(meshes["trainer"], P("data"))
    sampler = NamedSharding(meshes["sampler"], P("model"))
    with pytest.raises(lm.ShardingError, match="no array 'layer/flaot'; closest: 'layer/float'"):
        lm.reshard(before, {"layer/flaot": sampler}, donate=True)
    odd = {"w": jnp.zeros((7, 3)), "fine": jnp.zeros((8,))}
    with pytest.raises(lm.ShardingError, match=r"'w'.* does not divide \(7, 3\)"):
        lm.reshard(odd, sampler, donate=True)
    assert not odd["fine"].is_deleted()
    with pytest.raises(lm.ShardingError, match="is P"):
        lm.reshard(odd, {"fine": P("model")})
    with pytest.raises(lm.LazyModelError, match="max_device_memory"):
        lm.reshard(odd, sampler, max_device_memory="lots")
    gone = lm.reshard({"w": odd["fine"]}, sampler, donate=True)
    with pytest.raises(lm.LazyModelError, match="'w' was deleted"):
        lm.reshard({"w": odd["fine"]}, SingleDeviceSharding(jax.devices()[1]))
    assert gone["w"].sharding == sampler
    with pytest.raises(lm.LazyModelError, match="no arrays"):
        lm.reshard({"step": 3}, sampler)


def test_variables_of_one_kind_share_a_program(meshes: dict[str, Mesh]) -> None:
    """Forty variables of two kinds compile two programs, whose shapes no other test has; a program for all would take
    minutes to compile. An equal sharding moves nothing.
    """
    before, after = NamedSharding(meshes["trainer"], P("data")), NamedSharding(meshes["sampler"], P("data", "model"))
    model = jax.device_put({f"w{n}": np.full((56, 128 + 64 * (n % 2)), n, "float32") for n in range(40)}, before)
    with compile_events() as events:
        moved = lm.reshard(model, after, max_device_memory=1)
    assert sum(event.startswith("compile") for event in events) == 2
    for name, array in moved.items():
        assert array.sharding == after and (np.asarray(array) == np.asarray(model[name])).all()
    same = lm.reshard(model, NamedSharding(meshes["sampler"], P(("data", "model"))))
    assert all(same[name] is model[name] for name in model)
