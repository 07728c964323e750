"""`lm.pin_batch`: what is pinned, what a compiled step then sends and holds, and that values stay."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import sent_nbytes
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers

ROWS, LENGTH, WIDTH, WORDS, LAYERS = 32, 16, 32, 256, 2


def _layer(key: jax.Array) -> dict[str, Any]:
    up, down = jax.random.split(key)
    scale = WIDTH**-0.5
    return {
        "up": {"kernel": jax.random.normal(up, (WIDTH, 4 * WIDTH)) * scale},
        "down": {"kernel": jax.random.normal(down, (4 * WIDTH, WIDTH)) * scale / 2},
    }


def init(key: jax.Array, *, stacked: bool) -> dict[str, Any]:
    keys = jax.random.split(key, LAYERS + 1)
    layers = jax.vmap(_layer)(keys[1:]) if stacked else [_layer(each) for each in keys[1:]]
    return {"embed": {"embedding": jax.random.normal(keys[0], (WORDS, WIDTH))}, "layers": layers}


def loss(params: Any, tokens: Any, by_hand: Callable[[Any], Any] = lambda x: x, *, remat: bool = False) -> Any:
    def block(x: Any, layer: Any) -> tuple[Any, None]:
        return by_hand(x + jax.nn.gelu(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]), None

    block = jax.checkpoint(block) if remat else block
    x = by_hand(params["embed"]["embedding"][tokens])
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x, _ = block(x, layer)
    else:
        x, _ = jax.lax.scan(block, x, params["layers"])
    logits = jax.nn.log_softmax(x @ params["embed"]["embedding"].T)
    return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()


def training(by_hand: Callable[[Any], Any] = lambda x: x, *, remat: bool = False) -> Callable[..., Any]:
    def step(params: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(functools.partial(loss, by_hand=by_hand, remat=remat))(params, tokens)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def _mesh(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


def _rules(mesh: Mesh) -> dict[str, P]:
    data = mesh.axis_names[0]
    model = mesh.axis_names[1] if len(mesh.axis_names) > 1 else None
    stack = (None,)
    return {
        "embed/embedding": P(model, data),
        r"layers/\d+/up/kernel": P(data, model),
        r"layers/\d+/down/kernel": P(model, data),
        "layers/up/kernel": P(*stack, data, model),
        "layers/down/kernel": P(*stack, model, data),
    }


def _abstract(mesh: Mesh, *, stacked: bool) -> lm.AbstractModel[Any]:
    build = functools.partial(init, stacked=stacked)
    rules = {path: spec for path, spec in _rules(mesh).items() if ("\\d" in path) != stacked or "embed" in path}
    return lm.build_abstract(build, jax.random.key(0)).shard(mesh, rules)


@pytest.mark.parametrize(
    ("axes", "remat", "stacked"),
    mostly_large(
        [
            (axes, remat, stacked)
            for axes, remat in (({"data": 8}, False), ({"fsdp": 4, "model": 2}, True))
            for stacked in (False, True)
        ],
        [({"fsdp": 4, "model": 2}, True, True)],
    ),
)
def test_a_step_is_as_one_that_is_pinned_by_hand(
    axes: dict[str, int], remat: bool, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = _mesh(**axes)
    abstract = _abstract(mesh, stacked=stacked)
    data = NamedSharding(mesh, P(mesh.axis_names[0]))
    tokens = jax.device_put(np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH)), data)
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract.tree)
    steps = {
        "plain": training(remat=remat),
        "hand": training(lambda x: jax.lax.with_sharding_constraint(x, data), remat=remat),
        "pinned": lm.pin_batch(training(remat=remat), abstract),
    }
    sent, temp, values = dict[str, int](), dict[str, int](), dict[str, Any]()
    for name, step in steps.items():
        compiled = jax.jit(step, donate_argnums=0, out_shardings=(None, placed)).lower(abstract.tree, tokens).compile()
        sent[name] = sent_nbytes(compiled)
        temp[name] = compiled.memory_analysis().temp_size_in_bytes
        values[name] = jax.tree.map(np.asarray, compiled(abstract.materialize(), tokens))
    assert sent["pinned"] <= 1.3 * sent["hand"]
    assert temp["pinned"] <= 1.1 * temp["hand"]
    assert sent["pinned"] < 0.6 * sent["plain"]
    for other in ("plain", "hand"):
        jax.tree.map(
            lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), values["pinned"], values[other]
        )


def _pinned_dimensions(function: Callable[..., Any], *args: Any, **options: Any) -> list[int]:
    """The dimensions of the results that are pinned, of a function of parameters and an input."""
    mesh = _mesh(fsdp=8)
    abstract = lm.build_abstract(lambda: {"w": jnp.ones((8, 8))}).shard(mesh, {"w": P("fsdp")})
    traced = jax.make_jaxpr(lm.pin_batch(function, abstract, **options))(abstract.tree, *args)
    return [dimension for eqn in _equations(traced.jaxpr) if (dimension := _pinned(eqn)) is not None]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _equations(getattr(inner, "jaxpr", inner))
        yield eqn


def _pinned(eqn: Any) -> int | None:
    if eqn.primitive.name != "sharding_constraint":
        return None
    (dimension,) = (index for index, entry in enumerate(eqn.params["sharding"].spec) if entry in ("fsdp", ("fsdp",)))
    return dimension


X = np.ones((16, 4, 8), "float32")
OPERATIONS: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "elementwise": (lambda x: jnp.tanh(x) * 2 + 1, 0),
    "transpose": (lambda x: x.transpose(1, 0, 2), 1),
    "merged": (lambda x: x.reshape(64, 8), 0),
    "merged and split": (lambda x: x.reshape(64, 8).reshape(16, 4, 8), 0),
    "inner": (lambda x: x.transpose(1, 0, 2).reshape(64, 8), None),
    "new dimension": (lambda x: x[:, None], 0),
    "expanded": (lambda x: jnp.broadcast_to(x, (3, *x.shape)), 1),
    "reduced": (lambda x: x.sum(1), 0),
    "reduced away": (lambda x: x.sum(0), None),
    "a slice": (lambda x: x[:, 1:3], 0),
    "a row": (lambda x: x[3], None),
    "concatenated": (lambda x: jnp.concatenate([x, x], 1), 0),
    "concatenated rows": (lambda x: jnp.concatenate([x, x], 0), None),
    "cumulative": (lambda x: jnp.cumsum(x, 1), 0),
    "sorted": (lambda x: jnp.sort(x, 1), 0),
    "a product": (lambda x: jnp.einsum("bsd,de->ebs", x, jnp.ones((8, 8))).transpose(1, 2, 0), 0),
    "attention": (lambda x: jnp.einsum("bst,btd->bsd", jnp.einsum("bsd,btd->bst", x, x), x), 0),
    "contracted": (lambda x: jnp.einsum("bsd,bse->de", x, x), None),
    "taken along": (lambda x: jnp.take_along_axis(x, jnp.zeros((16, 4, 8), int), -1), 0),
    "padded": (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), 0),
    "jitted": (lambda x: jax.jit(lambda y: y.transpose(1, 0, 2))(x), 1),
    "remat": (lambda x: jax.checkpoint(jnp.sin)(x), 0),
    "custom derivative": (lambda x: jax.nn.relu(x), 0),
    "while": (lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1], 0),
    "cond": (lambda x: jax.lax.cond(x[0, 0, 0] > 0, lambda y: y * 2, lambda y: y, x), 0),
    "carried": (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], 0),
    "stacked": (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=8)[1].sum(0), 0),
    "scanned over time": (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[:, 0], x.swapaxes(0, 1))[1], 1),
    "zeros at first": (lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + x, jnp.zeros_like(x)), 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_batch_is_followed(name: str) -> None:
    operation, dimension = OPERATIONS[name]
    shape = jax.eval_shape(operation, X).shape

    def function(params: Any, x: Any) -> Any:
        return operation(x) @ params["w"] if shape[-1] == 8 and len(shape) > 1 else operation(x)

    found = _pinned_dimensions(function, X)
    assert (found[-1:] or [None]) == [dimension]


def test_the_batch_is_where_it_is_said_to_be() -> None:
    def function(params: Any, x: Any, y: Any) -> Any:
        return (x.transpose(1, 0, 2) * y) @ params["w"]

    x, y = np.ones((4, 16, 8), "float32"), np.ones((8,), "float32")
    assert _pinned_dimensions(function, x, y, batch={"x": 1, "y": None}) == [0]
    with pytest.raises(lm.LazyModelError, match=r"'x' have 4 rows .* 'y' 8: say where the batch is"):
        _pinned_dimensions(function, x, y)
    with pytest.raises(lm.LazyModelError, match="no argument 'z'"):
        _pinned_dimensions(function, x, y, batch={"z": 1})
    with pytest.raises(lm.LazyModelError, match=r"shape \(8,\), without a dimension 1"):
        _pinned_dimensions(function, x, y, batch=1)


def test_a_batch_that_does_not_divide_is_left_alone() -> None:
    assert _pinned_dimensions(lambda params, x: x @ params["w"], np.ones((12, 8), "float32")) == []


def test_what_is_not_followed_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lazymodel"):
        found = _pinned_dimensions(
            lambda params, x: jnp.linalg.cholesky(x) @ params["w"], np.ones((16, 8, 8), "float32")
        )
    assert found == [] and "cholesky" in caplog.text


@pytest.mark.parametrize("whole", mostly_large([True, False], [True]), ids=["state", "parts"])
def test_optimizers_are_no_batch(whole: bool) -> None:
    mesh, optimizer = _mesh(fsdp=8), optax.adam(0.1)
    abstract = _abstract(mesh, stacked=False).with_optimizer(optimizer)
    abstract = abstract.shard(
        mesh,
        {
            path: spec
            for path, spec in _rules(mesh).items()
            if path != "layers/up/kernel" and path != "layers/down/kernel"
        },
    )

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    def of_pair(pair: Any, tokens: Any) -> Any:
        return step(*pair, tokens)

    tokens = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH))
    pair = abstract.materialize()
    expected = jax.jit(step)(*pair, tokens)
    found = (
        jax.jit(lm.pin_batch(of_pair, abstract))(pair, tokens)
        if whole
        else jax.jit(lm.pin_batch(step, abstract))(*pair, tokens)
    )
    assert np.allclose(found[0], expected[0], rtol=1e-5)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_custom_derivatives_and_randomness_stay() -> None:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return x * 2

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (g * 100,))
    mesh = _mesh(fsdp=8)
    abstract = lm.build_abstract(lambda: {"w": jnp.ones((8, 8))}).shard(mesh, {"w": P("fsdp")})

    def function(params: Any, x: Any, key: Any) -> Any:
        return (doubled(x @ params["w"]) * jax.random.normal(key, (16, 8))).sum()

    x, key = np.ones((16, 8), "float32"), jax.random.key(1)
    params = abstract.materialize()
    pinned = lm.pin_batch(function, abstract)
    assert np.allclose(pinned(params, x, key), function(params, x, key), rtol=1e-5)
    both = [jax.jit(jax.grad(each))(params, x, key)["w"] for each in (pinned, function)]
    assert np.allclose(*both, rtol=1e-4) and abs(np.asarray(both[0])).max() > 50
    assert np.allclose(jax.jit(pinned)(params, x=x, key=key), function(params, x, key), rtol=1e-5)


def test_leaves_that_are_functions() -> None:
    eqx = pytest.importorskip("equinox")
    mesh = _mesh(fsdp=8)
    abstract = lm.build_abstract(eqx.nn.MLP, 8, 8, 16, 2, key=jax.random.key(0))
    abstract = abstract.shard(mesh, {".*weight": P("fsdp"), ".*": P()})

    def step(model: Any, x: Any) -> Any:
        return jax.vmap(model)(x)

    model, pinned = abstract.materialize(), lm.pin_batch(step, abstract)
    assert np.allclose(eqx.filter_jit(pinned)(model, X[:, 0]), step(model, X[:, 0]), rtol=1e-5)
    traced = eqx.filter_make_jaxpr(pinned)(model, X[:, 0])[0]
    assert [_pinned(eqn) for eqn in _equations(traced.jaxpr) if _pinned(eqn) is not None] == [1, 1, 1]


def test_meshes() -> None:
    abstract = lm.build_abstract(lambda: {"w": jnp.ones((8, 8))})

    def step(params: Any, x: Any) -> Any:
        return x @ params["w"]

    with pytest.raises(lm.ShardingError, match="not sharded over a mesh"):
        lm.pin_batch(step, abstract)
    explicit = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(lm.ShardingError, match="needs a mesh of Auto axes"):
        lm.pin_batch(step, abstract.shard(explicit, {"w": P("fsdp")}))
    assert lm.pin_batch(step, abstract.shard(_mesh(model=8), {"w": P("model")})) is step


def test_a_plan_counts_the_step_in_which_the_batch_stays_split() -> None:
    mesh = _mesh(fsdp=4, model=2)
    abstract, step = _abstract(mesh, stacked=False), training()
    tokens = jax.ShapeDtypeStruct((16 * ROWS, LENGTH), "int32", sharding=NamedSharding(mesh, P("fsdp")))

    def planned(*args: Any) -> tuple[int, list[str]]:
        """Bytes of activations, and the lines that would keep the batch split."""
        plan = abstract.plan(compile=lm.Compile(*args))
        notes = [re.fullmatch(r"\S+ leaves it to the compiler.*: (.*) keeps it split", note) for note in plan.notes]
        return plan.parts["activations"], [note[1] for note in notes if note]

    own, lines = planned("train", loss, tokens)
    assert lines == []
    assert planned("train", lm.pin_batch(loss, abstract), tokens) == (own, [])
    plain, lines = planned(jax.jit(step, donate_argnums=0), tokens)
    assert lines == ["lm.pin_batch(step, abstract)"]
    pinned, lines = planned(jax.jit(lm.pin_batch(step, abstract), donate_argnums=0), tokens)
    assert lines == []
    assert max(own, pinned) < 0.6 * plain

    def masked(params: Any, x: Any, mask: Any) -> Any:
        return params["embed"]["embedding"][x] * mask

    _, lines = planned("forward", masked, tokens, np.ones((1, WIDTH), "float32"))
    assert lines == ["lm.pin_batch(masked, abstract, batch={…})"]


@pytest.mark.large
def test_two_processes(tmp_path: Path) -> None:
    address = free_address()
    arguments = [(process, address) for process in range(2)]
    assert run_workers(Path(__file__).with_name("_pin_batch_worker.py"), arguments, tmp_path, patience=80) == [0, 0], (
        printed(tmp_path, 2)
    )
