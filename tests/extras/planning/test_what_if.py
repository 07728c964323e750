"""Plans of models that have an optimizer: its state, the gradients of what it trains, each counted once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

optax = pytest.importorskip("optax")

RULES = {"layers/.*/kernel": P(None, "model"), "layers/.*/bias": P("model"), "table": P("model"), "steps": P()}


def init(key: Any) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    layers = [{"kernel": jax.random.normal(keys[i], (64, 128)), "bias": jnp.zeros(128)} for i in range(2)]
    return {"layers": layers, "table": jax.random.normal(keys[2], (64, 64), "bfloat16"), "steps": jnp.arange(2)}


KERNEL, BIAS, TABLE, STEPS = 64 * 128 * 4 // 8, 128 * 4 // 8, 64 * 64 * 2 // 8, 8  # bytes on one of eight devices
PARAMETERS = 2 * (KERNEL + BIAS) + TABLE + STEPS
TRAINED = PARAMETERS - STEPS


def abstract_mesh() -> AbstractMesh:
    return AbstractMesh((8,), ("model",))


def model(optimizer: Any = None, *, mesh: Any = None, **options: Any) -> lm.AbstractModel:
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh or abstract_mesh(), RULES)
    return abstract if optimizer is None else abstract.with_optimizer(optimizer, **options)


def test_state_and_gradients_are_counted_once() -> None:
    plan = model(optax.adamw(1e-3)).plan(device_memory="1GiB")
    assert plan.parts == {"parameters": PARAMETERS, "optimizer state": 2 * TRAINED + 4, "gradients": TRAINED}
    assert plan.device_nbytes == plan.peak_nbytes == PARAMETERS + 2 * TRAINED + 4
    assert plan.timeline[-1].held_nbytes == plan.device_nbytes
    assert plan.used_nbytes == plan.needed_nbytes == sum(row.used_nbytes for row in plan.rows)
    rows = {row.path: row for row in plan.rows}
    assert rows["layers/0/kernel"].used_nbytes == 2 * KERNEL  # and its gradient
    assert rows["optimizer/0/mu/layers/0/kernel"].used_nbytes == KERNEL
    assert rows["optimizer/0/count"].used_nbytes == 4
    assert rows["steps"].used_nbytes == STEPS
    assert "training with the model's own optimizer: 11 variables of state for 5 trainable variables" in plan.notes


def test_moments_and_master_weights_have_dtypes_of_their_own() -> None:
    """Master weights are of what has another dtype: the table, in bfloat16."""
    kernels = 2 * (KERNEL + BIAS)
    plan = model().plan(what_if=lm.WhatIf(optimizer="adamw", moments="float32", master_weights="float32"))
    assert plan.parts["optimizer state"] == 2 * kernels + 3 * 2 * TABLE
    assert plan.counted == {
        "parameters": "float32, bfloat16", "optimizer state": "float32", "gradients": "float32, bfloat16"
    }  # fmt: skip
    half = model().plan(what_if=lm.WhatIf(optimizer="adamw", moments="bfloat16"))
    assert half.parts["optimizer state"] == kernels + 2 * TABLE
    assert half.counted["optimizer state"] == "bfloat16"
    copies = model().plan(what_if=lm.WhatIf(optimizer="sgd", master_weights="float32"))
    assert copies.parts["optimizer state"] == 2 * TABLE
    away = model().plan(what_if=lm.WhatIf(optimizer="sgd", master_weights="float32", memory_kind="pinned_host"))
    assert away.parts["optimizer state"] == 0 and away.offloaded_nbytes >= 2 * TABLE


def test_compiled_master_weights_are_held(mesh8: Mesh) -> None:
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    found = {}
    for master in (None, "float32"):
        what_if = lm.WhatIf(optimizer="sgd", master_weights=master)
        found[master] = model(mesh=mesh8).plan(what_if=what_if, compile=lm.Compile("train", loss, x))
    one, two = (plan.compiled for plan in found.values())
    assert one is not None and two is not None and two.argument_nbytes == one.argument_nbytes + 2 * TABLE


def test_a_model_with_an_optimizer_gets_no_other() -> None:
    for optimizer, kept in ((optax.adamw(1e-3), "11 variables of state, such as 'optimizer/0/count'"),
                            (optax.sgd(0.1), "no state")):  # fmt: skip
        trained = model(optimizer)
        for stated in ("lion", 3):
            with pytest.raises(lm.LazyModelError) as raised:
                trained.plan(what_if=lm.WhatIf(optimizer=stated))
            assert f"optimizer={stated!r}" in str(raised.value)
            assert f"has an optimizer already ({kept})" in str(raised.value)
            assert "leave optimizer out" in str(raised.value)
        with pytest.raises(lm.LazyModelError, match="lora_rank=4 .* has an optimizer already"):
            trained.plan(what_if=lm.WhatIf(lora_rank=4, lora_targets=".*kernel"))


def decays(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


@pytest.mark.parametrize(
    ("optimizer", "trained", "state", "gradients"),
    [
        (optax.sgd(0.1), None, 0, TRAINED),
        (optax.adam(1e-3), ".*kernel", 2 * 2 * KERNEL + 4, 2 * KERNEL),
        (optax.masked(optax.adam(1e-3), decays), None, 2 * (2 * KERNEL + TABLE) + 4, TRAINED),
    ],
    ids=["no state", "some trained", "masked"],
)
def test_only_what_is_trained_has_gradients_and_state(optimizer: Any, trained: Any, state: int, gradients: int) -> None:
    plan = model(optimizer, **({"trained": trained} if trained else {})).plan()
    kept = {"optimizer state": state} if state else {}
    assert plan.parts == {"parameters": PARAMETERS, **kept, "gradients": gradients}


def test_factored_state_and_copies_of_parameters() -> None:
    factored = model(optax.adafactor(1e-3, min_dim_size_to_factor=16, momentum=None))
    state = sum(v.shard_nbytes for v in factored.values() if v.follows is not None)
    assert factored.plan().parts["optimizer state"] == state < TRAINED
    copies = model(optax.contrib.schedule_free_adamw())
    assert copies.plan().parts["gradients"] == TRAINED
    assert copies.plan().device_nbytes == sum(v.shard_nbytes for v in copies.values())


def test_state_spread_further_than_its_parameters(mesh42: Mesh) -> None:
    rules = {".*kernel": P(None, "model"), ".*": P(), r"optimizer/.*kernel": P("batch", "model")}
    plan = lm.build_abstract(init, jax.random.key(0)).with_optimizer(optax.sgd(0.1, momentum=0.9))
    found = plan.shard(mesh42, rules).plan()
    kernels, rest = 2 * 64 * 128 * 4, 2 * 128 * 4 + 64 * 64 * 2
    assert found.parts == {
        "parameters": kernels // 2 + rest + 8, "optimizer state": kernels // 8 + rest, "gradients": kernels // 2 + rest
    }  # fmt: skip


def kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.2f} KiB"


def test_what_does_not_fit_counts_nothing_twice() -> None:
    plan = model(optax.adam(1e-3)).plan()
    with pytest.raises(lm.DoesNotFitError) as raised:
        plan.check(plan.used_nbytes - 1)
    assert f"needs {kib(plan.used_nbytes)} on a device" in str(raised.value)
    listed = ", ".join(f"{kib(nbytes)} {kind}" for kind, nbytes in plan.parts.items())
    assert f"once materialized; in use {kib(plan.used_nbytes)}: {listed})" in str(raised.value)
    assert plan.check(plan.used_nbytes) is plan


def test_quantizing_leaves_optimizers_and_what_they_train_alone() -> None:
    with pytest.raises(lm.LazyModelError, match="'layers/0/kernel' .* quantized parameters cannot be trained"):
        model(optax.adam(1e-3)).plan(what_if=lm.WhatIf(quantize="int8"))
    plan = model(optax.adam(1e-3), trained=".*bias").plan(what_if=lm.WhatIf(quantize="int8"))
    scales = 4 * (2 * 128 // 8 + 64)  # a float32 a column of what a device holds
    assert plan.parts == {
        "parameters": 2 * KERNEL // 4 + TABLE // 2 + scales + 2 * BIAS + STEPS,
        "optimizer state": 4 * BIAS + 4,
        "gradients": 2 * BIAS,
    }


def test_variables_on_several_meshes_are_summed_where_they_are() -> None:
    devices = jax.devices()
    one, other = Mesh(devices[:4], ("model",)), Mesh(devices[4:8], ("model",))
    abstract = lm.build_abstract(lambda: {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 32), "int8")})
    shardings = {
        "a": jax.sharding.NamedSharding(one, P("model")),
        "b": jax.sharding.NamedSharding(other, P()),
    }
    abstract = abstract.shard(one, lambda variable: shardings[variable.path]).with_optimizer(optax.adam(1e-3))
    plan = abstract.plan()
    quarter = 64 * 64 * 4 // 4
    assert plan.parts == {"parameters": quarter, "optimizer state": 2 * quarter + 4, "gradients": quarter}


def loss(tree: Any, x: Any) -> Any:
    hidden = x @ tree["layers"][0]["kernel"] + tree["layers"][0]["bias"]
    return jnp.mean((hidden @ tree["layers"][1]["kernel"].T @ tree["table"].astype("float32")) ** 2)


def test_a_training_step_is_compiled_with_the_state_there_is(mesh8: Mesh) -> None:
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    own = model(optax.adam(1e-3), mesh=mesh8).plan(compile=lm.Compile("train", loss, x))
    stated = model(mesh=mesh8).plan(what_if=lm.WhatIf(optimizer="adam"), compile=lm.Compile("train", loss, x))
    assert own.compiled is not None and stated.compiled is not None
    assert "gradients" not in own.parts  # they are among the compiler's temporaries
    assert own.parts["optimizer state"] == 2 * TRAINED + 4
    assert own.compiled.argument_nbytes == stated.compiled.argument_nbytes + 4
    assert own.compiled.alias_nbytes == stated.compiled.alias_nbytes + 4  # all of it is updated in place
    assert own.used_nbytes == sum(own.parts.values()) == own.compiled.peak_nbytes
    frozen = model(optax.adam(1e-3), trained=".*table", mesh=mesh8).plan(compile=lm.Compile("train", loss, x))
    assert frozen.compiled is not None
    assert frozen.compiled.argument_nbytes == PARAMETERS + 2 * TABLE + 4 + x.size * 4
    assert frozen.parts["optimizer state"] == 2 * TABLE + 4


def test_a_forward_pass_beside_the_state(mesh8: Mesh) -> None:
    """What is compiled knows nothing of state and gradients, which lie there all the same."""
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    alone = model(mesh=mesh8).plan(compile=lm.Compile("forward", loss, x))
    for training in (
        model(optax.adam(1e-3), mesh=mesh8).plan(compile=lm.Compile("forward", loss, x)),
        model(mesh=mesh8).plan(what_if=lm.WhatIf(optimizer="adam"), compile=lm.Compile("forward", loss, x)),
    ):
        assert training.parts["activations"] == alone.parts["activations"] > 0
        assert training.parts["optimizer state"] in (2 * TRAINED, 2 * TRAINED + 4)
        assert training.parts["gradients"] == TRAINED


def test_what_a_function_leaves_unused_is_on_the_device_all_the_same(mesh8: Mesh) -> None:
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    plan = model(mesh=mesh8).plan(compile=lm.Compile("forward", lambda tree, x: x * 2, x))
    assert plan.compiled is not None and plan.compiled.argument_nbytes == PARAMETERS + x.size * 4
    assert plan.parts["activations"] >= 2 * x.size * 4


def test_nnx_and_linen_models_have_optimizers_too() -> None:
    pytest.importorskip("flax")
    from flax import linen, nnx

    module = lm.build_abstract(nnx.Linear, 16, 32, rngs=nnx.Rngs(0)).with_optimizer(optax.adam(1e-3))
    weights = (16 * 32 + 32) * 4
    assert module.plan().parts == {"parameters": weights, "optimizer state": 2 * weights + 4 + 4, "gradients": weights}
    variables = lm.build_abstract(linen.Dense(32), jax.random.key(0), jnp.ones((1, 16)))
    plan = variables.with_optimizer(optax.adam(1e-3)).plan()
    assert plan.parts == {"parameters": weights, "optimizer state": 2 * weights + 4, "gradients": weights}


@pytest.mark.parametrize("before", [True, False])
def test_whenever_it_is_sharded(before: bool) -> None:
    abstract = lm.build_abstract(init, jax.random.key(0))
    if before:
        abstract = abstract.with_optimizer(optax.adam(1e-3)).shard(abstract_mesh(), RULES)
    else:
        abstract = abstract.shard(abstract_mesh(), RULES).with_optimizer(optax.adam(1e-3))
    plan = abstract.reinitialize("table", jax.nn.initializers.ones).rekey(1, "layers.*").plan()
    assert plan.parts == {"parameters": PARAMETERS, "optimizer state": 2 * TRAINED + 4, "gradients": TRAINED}
    one = lm.build_abstract(init, jax.random.key(0)).with_optimizer(optax.adam(1e-3)).plan()
    floats = 2 * (64 * 128 + 128) * 4 + 64 * 64 * 2
    assert one.parts == {"parameters": floats + 8, "optimizer state": 2 * floats + 4, "gradients": floats}
