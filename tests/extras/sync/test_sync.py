"""A sampler follows its trainer: every value, as few bytes between devices as possible, and nothing compiled twice."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events
from tests.core.trace._eager import random_spec
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers

FLOAT, HALF = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)
LAYERS, SIZE, HEADS, DIM = 2, 48, 8, 6

TRAINER: dict[str, tuple[int, ...]] = {"embed": (96, SIZE), "norm": (SIZE,)}
for _layer in range(LAYERS):
    TRAINER |= {f"layers/{_layer}/qkv": (SIZE, 3 * HEADS * DIM), f"layers/{_layer}/up": (SIZE, 96)}
SAMPLER = {"embed": (96, SIZE), "head": (SIZE, 96), "norm": (SIZE,), "up": (LAYERS, SIZE, 96)} | {
    f"layers/{layer}/{name}": (HEADS, DIM, SIZE) for layer in range(LAYERS) for name in "qkv"
}
MAPPING = lm.WeightMap(
    {
        "embed": "embed",
        "head": lm.From("embed").T.unsaved(),
        "norm": lm.From("norm").scale(0.5),
        "up": lm.From("layers/{layer}/up").stack("layer"),
    }
    | {
        f"layers/{{layer}}/{name}": lm.From("layers/{layer}/qkv")
        .part(n, of=3, axis=1)
        .rearrange("model (heads dim) -> heads dim model")
        for n, name in enumerate("qkv")
    }
)


def mesh(devices: Any, *shape: int) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), ("data", "model")[: len(shape)])


@pytest.fixture(scope="module")
def meshes() -> dict[str, Mesh]:
    all8 = jax.devices()[:8]
    return {
        "trainer": mesh(all8, 8, 1),
        "same": mesh(all8, 2, 4),
        "flat": mesh(all8, 1, 8),
        "turned": mesh(all8[::-1], 2, 4),
        "four": mesh(all8[:4], 1, 4),
        "low": mesh(all8[:4], 2, 2),
        "high": mesh(all8[4:], 1, 4),
    }


def model(shapes: dict[str, tuple[int, ...]], dtype: Any, where: Mesh, rules: dict[str, P]) -> Any:
    def init() -> dict[str, Any]:
        return nested({path: jnp.zeros(shape, dtype) for path, shape in shapes.items()})

    return lm.build_abstract(init).shard(where, ({"norm": P()} if "norm" in shapes else {}) | rules)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def numbers(abstract: Any, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=v.shape).astype(v.dtype) for path, v in abstract.items()}


def live(abstract: Any, values: dict[str, np.ndarray]) -> Any:
    return abstract.materialize(values)


def flat(tree: Any) -> dict[str, jax.Array]:
    return {"/".join(key.key for key in keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def fewest(trainer: Any, sampler: Any, mapping: lm.WeightMap | None) -> int:
    """Bytes that devices must get from others: elements of their shards that they do not hold as the trainer's."""
    ends = np.cumsum([0, *(v.size for v in trainer.values())])
    ids = {path: np.arange(v.size).reshape(v.shape) + ends[n] for n, (path, v) in enumerate(trainer.items())}
    held: dict[Any, set[int]] = {}
    for path, variable in trainer.items():
        for device, index in variable.sharding.devices_indices_map(variable.shape).items():
            held.setdefault(device, set()).update(ids[path][index].ravel().tolist())
    found = ids if mapping is None else lm.map_checkpoint(ids, mapping, sampler)
    total = 0
    for path, variable in sampler.items():
        wanted = np.rint(np.asarray(found[path]) * (2 if path == "norm" and mapping else 1)).astype(int)
        size = min(variable.dtype.itemsize, 4)
        for device, index in variable.sharding.devices_indices_map(variable.shape).items():
            total += size * len(set(wanted[index].ravel().tolist()) - held.get(device, set()))
    return total


def sent(compiled: Any) -> int:
    """Bytes that a program sends; exchanges are all that it may have."""
    text = compiled.as_text()
    assert not re.search(r"all-(gather|reduce|to-all)|reduce-scatter", text)
    total = 0
    for dtype, shape, pairs in re.findall(
        r"= (\w+?)\[([\d,]*)\]\S* collective-permute.*?source_target_pairs=\{(.*?)\}\}", text
    ):
        size = int(re.sub(r"\D", "", dtype)) // 8
        total += size * math.prod(int(n) for n in shape.split(",") if n) * pairs.count("{")
    return total


@pytest.mark.parametrize(
    ("there", "before", "after", "dtype"),
    mostly_large(
        [
            ("same", P("data"), P(None, "model"), FLOAT),
            ("same", P("data"), P(None, "model"), HALF),
            ("flat", P("data"), P(None, "model"), FLOAT),
            ("trainer", P(None, "data"), P("data"), HALF),
            ("turned", P("data"), P(None, "model"), FLOAT),
            ("four", P("data"), P("model"), HALF),
            ("high", P("data"), P(None, "model"), FLOAT),
            ("same", P(), P("model", "data"), HALF),
            ("same", P("data"), P(), FLOAT),
        ],
        [
            ("same", P("data"), P(None, "model"), FLOAT),
            ("four", P("data"), P("model"), HALF),
            ("same", P("data"), P(), FLOAT),
        ],
    ),
)
def test_plain_moves(meshes: dict[str, Mesh], there: str, before: P, after: P, dtype: Any) -> None:
    shapes = {f"layers/{n}/up": (64, 32) for n in range(2)}
    trainer = model(shapes, FLOAT, meshes["trainer"], {".*": before})
    sampler = model(shapes, dtype, meshes[there], {".*": after})
    sync = lm.Sync(trainer, sampler)
    values = numbers(trainer)
    old = sampler.materialize()
    new = sync(live(trainer, values), into=old)
    for path, array in flat(new).items():
        assert array.sharding == sampler[path].sharding and flat(old)[path].is_deleted()
        assert np.asarray(array).tobytes() == values[path].astype(dtype).tobytes()
    least = fewest(trainer, sampler, None) * dtype.itemsize // min(dtype.itemsize, 4)
    assert least <= sync.moved_nbytes <= 1.02 * least
    if len(sync.compiled) == 1:
        assert sent(sync.compiled[0]) == sync.moved_nbytes


@pytest.mark.parametrize(
    ("here", "there"),
    mostly_large(
        [("same", "flat"), ("trainer", "low"), ("low", "high"), ("four", "same")], [("low", "high"), ("four", "same")]
    ),
)
def test_tables_are_computed_on_the_way(meshes: dict[str, Mesh], here: str, there: str) -> None:
    rows, columns = ("data", "model") if here != "trainer" else (None, "data")
    trainer = model(TRAINER, FLOAT, meshes[here], {".*": P(rows, columns)})
    sampler = model(SAMPLER, HALF, meshes[there], {"up": P(None, None, "model"), ".*": P("model")})
    sync = lm.Sync(trainer, sampler, MAPPING)
    values = numbers(trainer)
    expected = lm.map_checkpoint(values, MAPPING, sampler)
    new = flat(sync(live(trainer, values), into=sampler.materialize()))
    for path, array in new.items():
        assert np.asarray(array).tobytes() == expected[path].astype(HALF).read().tobytes(), path
    least = fewest(trainer, sampler, MAPPING)
    assert least <= sync.moved_nbytes <= 1.02 * least
    assert "are computed" in str(sync) and sync.computed_nbytes == sampler.nbytes
    for program in sync.compiled:
        assert not re.search(rf"\[{SIZE},{3 * HEADS * DIM}\]|\[{LAYERS},{SIZE},96\]", program.as_text())


VIEWS: list[Any] = [
    lambda a, b: np.transpose(np.reshape(a, (8, 6, 32)), (2, 1, 0)),
    lambda a, b: np.concatenate([a.T, b.T], 0)[16:48],
    lambda a, b: np.reshape(np.stack([b, a], 1), (96, 32)),
    lambda a, b: np.reshape(np.transpose(np.reshape(a, (48, 4, 8)), (1, 2, 0)), (32, 48)),
    lambda a, b: np.reshape(np.broadcast_to(np.reshape(b, (8, 1, 6, 32)), (8, 2, 6, 32)), (96, 32)),
    lambda a, b: np.concatenate([a[:, 8:24], np.zeros((48, 16), FLOAT)], 1),
]


@pytest.mark.parametrize("seed", mostly_large(range(6), range(2)))
def test_random_views(seed: int, meshes: dict[str, Mesh]) -> None:
    rng, specs = np.random.default_rng(seed), random.Random(seed)
    six = Mesh(np.array(jax.devices()[1:7]).reshape(2, 3), ("data", "model"))

    def placed(shape: tuple[int, ...], where: Mesh) -> NamedSharding:
        return NamedSharding(where, random_spec(specs, shape, where))

    here, there = ([*meshes.values(), six][n] for n in rng.integers(0, len(meshes) + 1, 2))
    values = {name: rng.normal(size=(48, 32)).astype(FLOAT) for name in "ab"}
    trainer = {name: jax.device_put(value, placed(value.shape, here)) for name, value in values.items()}
    chosen = rng.permutation(len(VIEWS))[:3]

    def mapping(w: Any) -> dict[str, Any]:
        return {str(n): VIEWS[n](w["a"], w["b"]) for n in chosen}

    expected = mapping(values)
    into = {path: jax.device_put(np.ones_like(each), placed(each.shape, there)) for path, each in expected.items()}
    new = lm.Sync(trainer, into, mapping)(trainer, into=into)
    for path, array in new.items():
        assert np.array_equal(array, expected[path]), path


@pytest.mark.parametrize("there", ["same", "high"])
def test_the_second_call_compiles_nothing_and_values_follow(meshes: dict[str, Mesh], there: str) -> None:
    shapes = {f"layers/{n}/up": (64, 256) for n in range(40)}
    trainer = model(shapes, FLOAT, meshes["trainer"], {".*": P("data")})
    sampler = model(shapes, FLOAT, meshes[there], {".*": P(None, "model")})
    sync = lm.Sync(trainer, sampler, max_device_memory="64KiB")
    assert sync.num_groups > len(sync.compiled) <= 4
    assert sync.peak_nbytes <= trainer.nbytes // 8 + sampler.nbytes // 4 + (512 << 10)
    weights, into = live(trainer, numbers(trainer)), sampler.materialize()
    into = sync(weights, into=into)
    values = numbers(trainer, seed=1)
    weights = live(trainer, values)
    pointers = {path: array.addressable_data(0).unsafe_buffer_pointer() for path, array in flat(into).items()}
    with compile_events() as events:
        into = sync(weights, into=into)
    assert not events
    for path, array in flat(into).items():
        assert np.array_equal(array, values[path]) and not flat(weights)[path].is_deleted()
        assert array.addressable_data(0).unsafe_buffer_pointer() == pointers[path]


def test_leaves_that_begin_as_one_array_stay_two_variables(meshes: dict[str, Mesh]) -> None:
    place, other = NamedSharding(meshes["trainer"], P("data")), NamedSharding(meshes["high"], P(None, "model"))
    values = {name: np.random.default_rng(0).normal(size=(16, 8)).astype(FLOAT) for name in "abc"}
    put = jax.device_put
    tied = put(values["a"], place)
    trainer = {"a": tied, "b": tied, "c": put(values["c"], place), "step": 3}
    shared = put(np.zeros((16, 8), FLOAT), other)
    sampler = {"a": shared, "b": shared, "c": put(values["b"], other), "step": 4}
    sync = lm.Sync(trainer, sampler, only="[ab]")
    with pytest.raises(lm.LazyModelError, match="'b' and 'a' of the sampler are one array.*jax.tree.map"):
        sync(trainer, into=sampler)
    new = sync({**trainer, "b": put(values["b"], place)}, into=jax.tree.map(jnp.copy, sampler))
    assert np.array_equal(new["c"], sampler["c"]) and new["step"] == 4
    assert np.array_equal(new["a"], values["a"]) and np.array_equal(new["b"], values["b"])
    assert "1 variable of the sampler keep their values: 'c'" in str(sync)
    new = lm.Sync(trainer, new, lambda w: {"c": w["b"][::1] * 2}, only=lambda path: path == "c")(trainer, into=new)
    assert np.array_equal(new["c"], values["a"] * 2)


def test_keys_move_and_small_numbers_keep_every_bit(meshes: dict[str, Mesh]) -> None:
    bits = np.arange(256, dtype=np.uint8).reshape(16, 16)
    half = np.arange(1 << 16, dtype=np.uint16).view(HALF).reshape(256, 256)
    here, there = NamedSharding(meshes["trainer"], P("data")), NamedSharding(meshes["same"], P(None, "model"))
    keys = jax.random.split(jax.random.key(0), (8, 8))
    trainer = {"f8": bits.view(ml_dtypes.float8_e4m3fn), "half": half, "mask": bits % 3 == 0, "keys": keys}
    trainer = {name: jax.device_put(each, here) for name, each in trainer.items()}
    into = {name: jax.device_put(jnp.zeros_like(each), there) for name, each in trainer.items() if name != "keys"}
    into["keys"] = jax.device_put(jax.random.split(jax.random.key(1), (8, 8)), there)
    new = lm.Sync(trainer, into)(trainer, into=into)
    assert np.array_equal(jax.random.key_data(new.pop("keys")), jax.random.key_data(keys))
    for name, array in new.items():
        assert np.asarray(array).tobytes() == np.asarray(trainer[name]).tobytes(), name


def test_explicit_axes(meshes: dict[str, Mesh]) -> None:
    explicit = jax.make_mesh((2, 4), ("x", "y"))
    value = np.arange(64.0, dtype=FLOAT).reshape(8, 8)
    trainer = {"w": jax.device_put(value, NamedSharding(explicit, P("x")))}
    into = {"w": jax.device_put(value * 0, NamedSharding(explicit, P(None, "y")))}
    new = lm.Sync(trainer, into)(trainer, into=into)
    assert np.array_equal(new["w"], value) and new["w"].sharding == NamedSharding(explicit, P(None, "y"))


def test_errors_come_before_anything_moves(meshes: dict[str, Mesh]) -> None:
    trainer = model({"w": (16, 8), "v": (8,)}, FLOAT, meshes["trainer"], {".*": P()})
    place = meshes["four"]
    with pytest.raises(lm.LazyModelError, match="the trainer has no variable 'ww'.*closest: 'w'.*Pass a mapping"):
        lm.Sync(trainer, model({"ww": (16, 8)}, FLOAT, place, {".*": P()}))
    with pytest.raises(lm.LazyModelError, match=r"'w': expected shape \(8, 16\), found \(16, 8\)"):
        lm.Sync(trainer, model({"w": (8, 16)}, FLOAT, place, {".*": P()}))
    with pytest.raises(lm.LazyModelError, match="'w': expected int8, found float32.*quantize"):
        lm.Sync(trainer, model({"w": (16, 8)}, np.int8, place, {".*": P()}))
    sampler = model({"w": (16, 8)}, FLOAT, place, {".*": P()})
    with pytest.raises(lm.LazyModelError, match="(?s)does not fit.*no entry takes.*'v'"):
        lm.Sync(trainer, sampler, lm.WeightMap({"w": "w"}))
    with pytest.raises(lm.LazyModelError, match="'w': its mapping cannot be planned"):
        lm.Sync(trainer, sampler, lambda w: {"w": w["w"][::-1]})
    with pytest.raises(lm.LazyModelError, match="chooses no variable"):
        lm.Sync(trainer, sampler, only="nothing")
    sync = lm.Sync(trainer, sampler)
    weights, into = trainer.materialize(), sampler.materialize()
    with pytest.raises(lm.LazyModelError, match=r"'w' of the sampler: expected float32\[16, 8\].*found bfloat16"):
        sync(weights, into={"w": jnp.zeros((16, 8), HALF)})
    with pytest.raises(lm.LazyModelError, match="the trainer has no array 'w'"):
        sync({"v": weights["v"]}, into=into)
    itself, pair = lm.Sync(trainer, trainer), {"a": into["w"], "b": into["w"] + 0}
    with pytest.raises(lm.LazyModelError, match="'v' of the sampler is the trainer's own array 'v'"):
        itself(weights, into=weights)
    both = lm.Sync(pair, {"a": jnp.zeros((16, 8)), "b": jnp.zeros((16, 8))})
    one = jnp.zeros((16, 8))
    with pytest.raises(
        lm.LazyModelError, match="'b' and 'a' of the sampler are one array, which would be donated twice"
    ):
        both(pair, into={"a": one, "b": one})
    sync(weights, into=into)
    with pytest.raises(lm.LazyModelError, match="'w' was deleted"):
        sync(weights, into=into)


@pytest.mark.parametrize("function", ["device_put", "block_until_ready"])  # before and after donation
def test_a_group_that_fails_is_named(meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    shapes = dict.fromkeys("abc", (512, 1024))
    trainer = model(shapes, FLOAT, meshes["low"], {".*": P("data")})
    sampler = model(shapes, FLOAT, meshes["high"], {".*": P(None, "model")})
    sync = lm.Sync(trainer, sampler, max_device_memory="1KiB")
    assert sync.num_groups == 3
    values = numbers(trainer)
    weights, into = live(trainer, values), sampler.materialize()
    stock, calls = getattr(jax, function), iter([True, False])

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            return stock(*args, **kwargs)
        raise RuntimeError("the link is down")

    monkeypatch.setattr(jax, function, failing)
    with pytest.raises(
        lm.SyncError, match=r"1 variable of the sampler are new \('a'\),.*the others.*link is down"
    ) as error:
        sync(weights, into=into)
    monkeypatch.undo()
    rest = error.value.sampler
    assert np.array_equal(rest["a"], values["a"]) and not np.asarray(rest["b"]).any()
    assert (rest["b"] is into["b"]) == (function == "device_put")
    assert ("'b' are lost" in str(error.value)) == (function != "device_put")
    new = sync(weights, into=rest)
    assert all(np.array_equal(new[name], values[name]) for name in "abc")


@pytest.mark.large
@pytest.mark.timeout(90)
def test_several_processes(tmp_path: Path) -> None:
    address = free_address()
    worker = Path(__file__).with_name("_sync_worker.py")
    codes = run_workers(worker, [(process, 2, address) for process in range(2)], tmp_path, patience=80)
    assert codes == [0, 0], printed(tmp_path, 2)


@pytest.mark.parametrize(("there", "most"), [("high", 4), ("flat", 5)])  # one more for what stays where it is
def test_few_updates_join_pieces(there: str, most: int, meshes: dict[str, Mesh]) -> None:
    """As many as senders: those of layers side by side are one, and no receiver waits for those of another.

    A chain of many updates of one array is one slow loop in XLA:CPU.
    """
    for layers in (2, 16):
        own = model(
            {f"{n}/up": (32, 64) for n in range(layers)}, FLOAT, mesh(jax.devices()[:4], 4, 1), {".*": P("data")}
        )
        wanted = model({"up": (layers, 32, 64)}, HALF, meshes[there], {"up": P(None, None, "model")})
        sync = lm.Sync(own, wanted, lm.WeightMap({"up": lm.From("{layer}/up").stack("layer")}))
        text = sync.compiled[-1].as_text()
        assert 1 <= text.count(" dynamic-update-slice(") <= most
