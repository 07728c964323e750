"""Traced arrays in objects that JAX does not look into: refused with place and mend, never lost."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm

KEY = jax.random.key(0)


def normal(key: Any) -> jax.Array:
    return jax.random.normal(key, (3, 2))


class Plain:
    def __init__(self, key: Any):
        self.w = normal(key)


class Slotted:
    __slots__ = ("__hidden", "empty", "w")

    def __init__(self, key: Any):
        self.__hidden = normal(key)


class Nested:
    def __init__(self, key: Any):
        self.parts = {"layers": [1, Plain(key)]}
        self.itself = self


class Params(dict[str, Any]):
    """A dict of a type of its own is a leaf to JAX."""


class Callable:
    def __init__(self, key: Any):
        self.w = normal(key)

    def method(self) -> Any:
        return self.w


@dataclasses.dataclass
class Record:
    w: Any


def closure(key: Any) -> Any:
    w = normal(key)
    return lambda x: x @ w


def default(key: Any) -> Any:
    w = normal(key)

    def apply(x: Any, w: Any = w) -> Any:
        return x @ w

    return apply


def cached(key: Any) -> Any:
    @functools.lru_cache
    def table(size: int) -> Any:
        return normal(key)

    table(3)
    return Record(table)


def objects(key: Any) -> Any:
    array = np.empty(2, object)
    array[1] = normal(key)
    return array


OPAQUE: dict[str, tuple[Any, str]] = {
    "an object": (Plain, r"Plain at 'value'.*float32\[3, 2\].*value\.w.*register_dataclass"),
    "slots": (Slotted, r"Slotted at 'value'.*value"),
    "an object in a dict": (lambda k: {"a": [0, Plain(k)]}, r"Plain at 'a/1'.*a/1\.w"),
    "beside a variable": (lambda k: {"a": normal(k), "b": Plain(k)}, r"Plain at 'b'"),
    "deep inside": (Nested, r"Nested at 'value'.*value\.parts\['layers'\]\[1\]\.w"),
    "a dataclass": (lambda k: Record(normal(k)), r"register_dataclass\(Record\)"),
    "a dict of its own": (lambda k: Params(w=normal(k)), r"Params at 'value'.*\['w'\]"),
    "a closure": (closure, r"function closure.*w of <lambda>.*jax\.tree_util\.Partial"),
    "a default": (default, r"function default"),
    "a partial": (lambda k: functools.partial(jnp.dot, normal(k)), r"functools\.partial at 'value'"),
    "a method": (lambda k: Callable(k).method, r"function Callable\.method.*value\.w"),
    "a set": (lambda k: {Plain(k)}, r"set at 'value'.*in a list"),
    "a deque": (lambda k: collections.deque([normal(k)]), r"deque at 'value'"),
    "a read-only dict": (lambda k: types.MappingProxyType({"a": normal(k)}), r"mappingproxy.*\['a'\]"),
    "an array of objects": (objects, r"ndarray at 'value'.*flat\[1\]"),
    "a cache": (cached, r"Record at 'value'"),
    "a jitted function": (lambda k: jax.jit(closure(k)), r"value"),
}


ITERATORS: dict[str, Any] = {
    "a generator": lambda k: (normal(key) for key in jax.random.split(k)),
    "without arrays yet": lambda k: (jnp.ones(3) for _ in range(2)),
    "map": lambda k: map(normal, jax.random.split(k)),
    "zip": lambda k: zip([normal(k)], [1], strict=True),
    "a list's": lambda k: iter([normal(k)]),
    "chain": lambda k: itertools.chain([normal(k)]),
    "in a tuple": lambda k: (normal(k), (normal(k) for _ in range(2))),
}


EMPTY: dict[str, tuple[Any, str]] = {
    "None": (lambda k: None, "returned None"),
    "shapes": (lambda k: jax.eval_shape(normal, k), "pass the class or the init function itself"),
    "shapes in a dict": (lambda k: {"a": {"b": jax.eval_shape(normal, k)}}, "'a/b' is ShapeDtypeStruct"),
    "a function": (lambda k: normal, "the function normal"),
    "a pair": (lambda k: (normal, len), "pass that one"),
    "an object without arrays": (lambda k: types.SimpleNamespace(a=3), "return its arrays"),
}
REFUSED = OPAQUE | {name: (build, "return a list or a tuple") for name, build in ITERATORS.items()} | EMPTY


@pytest.mark.parametrize("name", REFUSED)
def test_results_that_hold_no_arrays_or_hide_them_are_refused(name: str) -> None:
    """In objects that are no pytrees, in what is yet to be gone through, or nowhere."""
    build, message = REFUSED[name]
    with pytest.raises(lm.TraceError, match=message):
        lm.build_abstract(build, KEY)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    w: Any

    def __hash__(self) -> int:
        return 0


def test_static_parts_of_pytrees_are_searched_too() -> None:
    with pytest.raises(lm.TraceError, match=r"a Static of the result.*float32\[3, 2\].*\.w"):
        lm.build_abstract(lambda key: {"a": normal(key), "b": Static(normal(key))}, KEY)
    model = lm.build_abstract(lambda key: {"a": normal(key), "b": Static((1, "x"))}, KEY).materialize()
    assert model["b"] == Static((1, "x"))


class Aside:
    """Its arrays are in the structure, as distrax keeps those of some of its objects."""

    def __init__(self, w: Any):
        self.w = w


jax.tree_util.register_pytree_node(Aside, lambda node: ((), (node.w,)), lambda static, _: Aside(*static))


def in_a_structure(key: Any) -> Any:
    structure = jax.tree.structure({"a": [Aside(normal(key))]})
    return {"w": normal(key), "nested": Static(("x", structure))}


def test_structures_among_the_static_parts_are_searched_too() -> None:
    with pytest.raises(lm.TraceError, match=r"a Static of the result.*float32\[3, 2\].*\(child 0\).*make it a field"):
        lm.build_abstract(in_a_structure, KEY)
    with pytest.raises(lm.TraceError, match=r"PyTreeDef at 'd'.*float32\[3, 2\].*Return the arrays themselves"):
        lm.build_abstract(lambda key: {"w": normal(key), "d": jax.tree.structure(Aside(normal(key)))}, KEY)
    constant = lm.build_abstract(lambda key: {"w": normal(key), "d": Aside(jnp.ones(3))}, KEY).materialize()
    assert np.array_equal(constant["d"].w, np.ones(3))


def test_references_are_refused_and_arrays_become_some() -> None:
    def in_place(key: Any) -> Any:
        reference = jax.new_ref(normal(key))
        reference[...] = reference[...] * 2
        return {"w": reference[...]}

    def two(key: Any) -> Any:
        return jax.jit(lambda key: (in_place(key)["w"], in_place(key)["w"]))(key)

    for build in (lambda key: {"w": jax.new_ref(normal(key))}, in_place, two):
        with pytest.raises(lm.TraceError, match=r"jax\.new_ref.*return arrays, and make references of them"):
            lm.build_abstract(build, KEY)
    made = lm.build_abstract(lambda key: {"w": normal(key)}, KEY).materialize()
    assert np.array_equal(jax.new_ref(made["w"])[...], normal(KEY))


def test_objects_with_values_are_handed_back() -> None:
    table, holder = np.arange(3), types.SimpleNamespace(a=jnp.ones(3), f=jax.nn.relu)
    model = lm.build_abstract(lambda key: {"w": normal(key), "holder": holder, "table": (table, len)}, KEY)
    made = model.materialize()
    assert made["holder"] is holder
    assert made["table"][1] is len


@pytest.mark.parametrize("result", [{}, [], (), {"a": {}, "b": [None]}, {"size": 3, "name": "x"}])
def test_a_function_that_really_makes_no_arrays(result: Any) -> None:
    model = lm.build_abstract(lambda: result)
    assert len(model) == 0
    assert model.materialize() == result


# --- side effects ---------------------------------------------------------------------------------------------------

GLOBAL: dict[str, Any] = {}


def to_a_global(key: Any) -> Any:
    _helper(key)
    return {"w": normal(key)}


def _helper(key: Any) -> None:
    GLOBAL["kept"] = normal(key)


@functools.lru_cache
def _table(size: int) -> Any:
    return jnp.arange(size) * 2


def to_a_cache(key: Any) -> Any:
    return {"w": normal(key) + _table(2)}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    GLOBAL.clear()
    _table.cache_clear()


def to_an_argument(key: Any, config: Any) -> Any:
    config.last = normal(key)
    return {"w": normal(key)}


class Builder:
    def build(self, key: Any) -> Any:
        self.made = [normal(key)]
        return {"w": self.made[0]}


def test_what_is_left_behind_is_warned_about() -> None:
    config = types.SimpleNamespace(size=3)
    with pytest.warns(lm.LazyModelWarning, match=r"to_an_argument left a traced float32\[3, 2\] in argument 1\.last"):
        assert_equal(lm.build_abstract(to_an_argument, KEY, config).materialize())
    config = types.SimpleNamespace(size=3)
    with pytest.warns(lm.LazyModelWarning, match=r"argument 'config'\.last"):
        lm.build_abstract(to_an_argument, KEY, config=config)
    with pytest.warns(
        lm.LazyModelWarning, match=r"in to_a_global \(the global '_helper'\) \(the global 'GLOBAL'\)\['kept'\]"
    ):
        assert_equal(lm.build_abstract(to_a_global, KEY).materialize())
    with pytest.warns(lm.LazyModelWarning, match=r"in build\.made\[0\]"):
        assert_equal(lm.build_abstract(Builder().build, KEY).materialize())
    with pytest.warns(lm.LazyModelWarning, match=r"the global '_table'"):
        lm.build_abstract(to_a_cache, KEY)
    kept: list[Any] = []

    def to_a_closure(key: Any) -> Any:
        kept.append(normal(key))
        return {"w": kept[0]}

    with pytest.warns(lm.LazyModelWarning, match=r"in to_a_closure \(kept of to_a_closure\)\[0\]"):
        lm.build_abstract(functools.partial(to_a_closure), KEY)


def assert_equal(made: Any) -> None:
    assert np.array_equal(made["w"], normal(KEY))


class Guide:
    """It makes its arrays on the first call, and keeps them, as numpyro's automatic guides do."""

    kept: Any = None

    def init(self, key: Any) -> Any:
        if self.kept is None:
            self.kept = normal(key)
        return {"w": self.kept * 2}


def test_an_array_of_an_earlier_build_is_named() -> None:
    guide = Guide()
    with pytest.warns(lm.LazyModelWarning, match=r"left a traced float32\[3, 2\] in init\.kept"):
        lm.build_abstract(guide.init, KEY)
    for build in (guide.init, lambda key: guide.init(key)):
        with pytest.raises(lm.TraceError, match=r"earlier build left in an object \(at .*\.kept\).*create such"):
            lm.build_abstract(build, KEY)
    assert lm.build_abstract(lambda key: Guide().init(key), KEY).num_parameters == 6


# --- objects with init ----------------------------------------------------------------------------------------------


class Transformed(NamedTuple):
    """As Haiku's `transform` returns."""

    init: Any
    apply: Any


class TransformedWithState(NamedTuple):
    init: Any
    apply: Any


class Transformation(NamedTuple):
    """As Optax has it."""

    init: Any
    update: Any


def test_an_object_with_init_and_apply_is_built_by_its_init(mesh8: Any) -> None:
    def init(key: Any, x: Any) -> Any:
        return {"linear": {"w": jax.random.normal(key, (x.shape[-1], 16)), "b": jnp.zeros(16)}}

    pair, x = Transformed(init, lambda params, key, x: x @ params["linear"]["w"]), jnp.ones((2, 8))
    abstract = lm.build_abstract(pair, KEY, jax.ShapeDtypeStruct((2, 8), jnp.float32))
    assert list(abstract) == ["linear/b", "linear/w"]
    assert abstract.name == "Transformed"
    params = abstract.shard(mesh8, {".*/w": jax.P(None, "model"), ".*": jax.P()}).materialize()
    assert np.array_equal(params["linear"]["w"], init(KEY, x)["linear"]["w"])
    stateful = TransformedWithState(lambda key, x: (init(key, x), {"counter": jnp.zeros(())}), pair.apply)
    params, state = lm.build_abstract(stateful, KEY, x).materialize()
    assert np.array_equal(params["linear"]["w"], init(KEY, x)["linear"]["w"])
    assert state["counter"].shape == ()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Transformation(len, len), r"an optimizer.*with_optimizer"),
        ((normal, len), r"pass `init`, the first"),
        ("Linear", r"Pass the class or function itself, not its name"),
        (3, r"something that builds a model.*got int 3"),
        (None, r"something that builds a model"),
        ({"w": 3}, r"something that builds a model"),
    ],
)
def test_what_builds_no_model(build: Any, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        lm.build_abstract(build, KEY)


@pytest.mark.large
def test_stateful_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    ours, state = lm.build_abstract(make, 4, "batch", mode="batch").materialize()
    eager, expected = make(4, "batch", mode="batch")
    x = jnp.arange(8.0).reshape(2, 4)
    run = lambda model, state: jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)  # noqa: E731
    assert np.array_equal(run(ours, state)[0], run(eager, expected)[0])


def test_haiku(mesh8: Any) -> None:
    hk = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        return hk.BatchNorm(True, True, 0.9)(hk.nets.MLP([16, 8])(x), is_training=True)

    transformed, x = hk.transform_with_state(forward), jnp.ones((2, 4))
    abstract = lm.build_abstract(transformed, KEY, x)
    ours, eager = abstract.shard(mesh8, lm.auto()).materialize(), transformed.init(KEY, x)
    assert jax.tree.structure(ours) == jax.tree.structure(eager)
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(eager)))
    without = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    assert set(lm.build_abstract(without, KEY, x)) == {"linear/b", "linear/w"}


def test_penzai() -> None:
    pz = pytest.importorskip("penzai.pz")
    mlp = pytest.importorskip("penzai.models.simple_mlp").MLP

    def make(key: Any) -> Any:
        return mlp.from_config(name="mlp", init_base_rng=key, feature_sizes=[2, 4, 3])

    with pytest.raises(
        lm.TraceError, match=r"penzai.*Parameter at 'sublayers/0.*pz\.unbind_params\(model, freeze=True\)"
    ):
        lm.build_abstract(make, KEY)
    abstract = lm.build_abstract(lambda key: pz.unbind_params(make(key), freeze=True), KEY)
    assert abstract.num_parameters == 2 * 4 + 4 + 4 * 3 + 3
    model, params = abstract.materialize()
    bound = pz.bind_variables(model, [value.unfreeze_as_copy() for value in params])
    inputs = pz.nx.ones({"features": 2})
    assert np.array_equal(bound(inputs).unwrap("features"), make(KEY)(inputs).unwrap("features"))
