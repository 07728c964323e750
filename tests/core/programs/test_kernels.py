"""What runs one eager kernel at a time: as few programs as layers are different, counted bytes, JAX left as it was."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lazymodel as lm
from lazymodel._programs.kernels import _compiled_kernels
from lazymodel._programs.programs import ProgramCache
from lazymodel._trace.inlined import INLINED, comes_apart, keep_inlined

KEY = jax.random.key(5)


def names(jaxpr: Any) -> list[str]:
    return [str(eqn.params.get("name", eqn.primitive.name)) for eqn in jaxpr.eqns]


def test_functions_that_jax_inlines_stay_whole_while_tracing_and_only_there() -> None:
    """Fails when JAX moves the rule that is wrapped, upon which means would be divided as eager execution does not."""

    def outer(x: Any) -> Any:
        return jax.jit(lambda y: y.mean(1))(x) - x.mean(0)[:3]

    with keep_inlined():
        kept = jax.make_jaxpr(lambda x: outer(x))(jnp.ones((3, 7)))
    assert f"{INLINED}_mean" in names(kept)
    (inner,) = [eqn.params["jaxpr"] for eqn in kept.eqns if eqn.params.get("name") == "<lambda>"]
    assert names(inner.jaxpr) == ["reduce_sum", "div"]  # what a compiled function calls is inlined as ever
    assert names(jax.make_jaxpr(lambda x: x.mean(0))(jnp.ones((3, 7)))) == ["reduce_sum", "div"]


def test_what_comes_apart() -> None:
    def first(function: Any) -> bool:
        with keep_inlined():
            (eqn, *_) = jax.make_jaxpr(lambda x: function(x))(jnp.ones((3, 7))).eqns
        return comes_apart(eqn)

    assert first(lambda x: x * 0.5)
    assert first(jnp.sqrt)
    assert not first(lambda x: x.mean(0))
    assert not first(lambda x: x.sum(0, keepdims=True))
    assert not first(jnp.log10)


def test_programs_do_not_grow_with_depth() -> None:
    def init(key: Any, layers: int) -> Any:
        drawn = [jax.random.normal(k, (40, 24)) for k in jax.random.split(key, layers)]
        return [(w - w.mean(0)) / (jnp.linalg.norm(w) * (depth + 1.0)) for depth, w in enumerate(drawn)]

    counts: list[tuple[int, int]] = []
    for layers in (2, 9):
        ProgramCache.clear_shared()
        model = lm.build_abstract(lambda key, layers=layers: init(key, layers), KEY)
        found = model.materialize()
        for a, b in zip(found, init(KEY, layers), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        counts.append((len(model.programs), len(_compiled_kernels)))
    assert counts[0] == counts[1]
    assert counts[0][0] == 1


def test_only_one_device_holds_a_variable_whole_and_the_program_says_so(mesh8: Any) -> None:
    sharding = jax.NamedSharding(mesh8, jax.P(None, "model"))
    model = lm.build_abstract(lambda key: (lambda w: w - w.mean(0))(jax.random.normal(key, (512, 256))), KEY)
    program = model.programs.get(model.recipes[0], [sharding])
    whole = 512 * 256 * 4
    assert program.output_nbytes == whole // 8
    assert 2 * whole <= program.output_nbytes + program.temp_nbytes <= 6 * whole
    (array,) = program(model.recipes[0].inputs)
    assert [shard.data.nbytes for shard in array.addressable_shards] == [whole // 8] * 8


def test_some_of_the_results_of_one_computation() -> None:
    def init(key: Any) -> Any:
        q, r = jnp.linalg.qr(jax.random.normal(key, (96, 80)))
        return {"q": q, "r": r, "both": q @ r, "bias": jnp.zeros(8)}

    model, expected = lm.build_abstract(init, KEY), init(KEY)
    (recipe,) = [recipe for recipe in model.recipes if "r" in recipe.paths]
    assert set(recipe.paths) == {"q", "r", "both"}
    part = recipe.restricted_to(["r"])
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    (r,) = model.programs.get(part, [device])(part.inputs)
    assert r.devices() == {jax.devices()[3]}
    assert np.asarray(r).tobytes() == np.asarray(expected["r"]).tobytes()
    assert part.kernels is not None and recipe.kernels is not None
    assert len(part.kernels.needed()) < len(recipe.kernels.needed())  # no matrix product


def test_a_compiled_function_of_a_whole_model_keeps_a_kernel_for_each_variable() -> None:
    @jax.jit
    def init(key: Any) -> Any:
        x, tree = jnp.ones((1, 32)), {}
        for layer, k in enumerate(jax.random.split(key, 6)):
            tree[f"w{layer}"] = (lambda w: w / jnp.linalg.norm(w, axis=0))(jax.random.normal(k, (32, 32)))
            x = jnp.tanh(x @ tree[f"w{layer}"])  # a forward pass that nobody needs
        return tree

    model = lm.build_abstract(init, KEY)
    found = model.materialize()
    assert [recipe.paths for recipe in model.recipes] == [(f"w{layer}",) for layer in range(6)]
    assert len(model.programs) == 1
    for name, value in init(KEY).items():
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()


def test_64_bit_types() -> None:
    def init(key: Any) -> Any:
        x = jax.random.normal(key, (30, 7), jnp.float64)
        return (x - x.mean(0)) / x.std(0)

    with jax.enable_x64(True):
        model, expected = lm.build_abstract(init, KEY), init(KEY)
    found = model.materialize()
    assert found.dtype == np.float64
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
