"""What people type first and is wrong: one error each, of ours, with the mend. Values are tested where they belong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

optax = pytest.importorskip("optax")
ADAM = optax.adam(1e-3)


def init(key: Any) -> dict[str, Any]:
    return {"a": {"kernel": jax.random.normal(key, (64, 512))}, "b": jnp.zeros((512,))}


MODEL = lm.build_abstract(init, jax.random.key(0))
MESH = AbstractMesh((8,), ("model",))
X = jax.ShapeDtypeStruct((4, 64), jnp.float32)


def shard(rules: Any, **options: Any) -> Callable[[], Any]:
    return lambda: MODEL.shard(MESH, rules, **options)  # pyright: ignore[reportArgumentType]


def plan(checkpoint: Any) -> Callable[[], Any]:
    return lambda: MODEL.plan(checkpoint)


def what_if(**options: Any) -> Callable[[], Any]:
    return lambda: lm.WhatIf(**options)


def planned(**options: Any) -> Callable[[], Any]:
    return lambda: MODEL.plan(**options)


def plan_what_if(**options: Any) -> Callable[[], Any]:
    return lambda: MODEL.plan(what_if=lm.WhatIf(**options))


def forward(*inputs: Any) -> Callable[[], Any]:
    return lambda: MODEL.plan(compile=lm.Compile("forward", *inputs))


def train(function: Any) -> Callable[[], Any]:
    return lambda: MODEL.plan(compile=lm.Compile("train", function))


def with_optimizer(optimizer: Any, **options: Any) -> Callable[[], Any]:
    return lambda: MODEL.with_optimizer(optimizer, **options)


def plans(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: lm.plans(MODEL, *args, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (shard([(".*kernel", P("model"))]), "Rules by path are a mapping, {path pattern: PartitionSpec}"),
        (shard((".*", P())), "Rules by path are a mapping"),
        (shard(P("model")), "got P ... For all variables: {'.*': P"),
        (lambda: lm.auto(tensor=3), "axes are the name of a mesh axis, a sequence of names or None; got 3"),  # pyright: ignore
        (plan("absent.safetensors"), "there is no checkpoint at absent.safetensors: No such file"),
        (lambda: MODEL.materialize("absent"), "there is no checkpoint at absent: No such file"),
        (plan(MESH), "a checkpoint is a mapping of path to tensor, or a pytree; got AbstractMesh"),
        (plan(3), "a checkpoint is a mapping of path to tensor, or a pytree; got 3"),
        *(
            (call, f"or a pytree; got {got}")
            for call, got in (
                (lambda: lm.map_checkpoint(None, dict), "None"),
                (lambda: lm.WeightMap.suggest(None, MODEL), "None"),
                (lambda: lm.WeightMap({}).check(len, MODEL), "<built-in"),
                (lambda: lm.diff(None, {}), "None"),
                (lambda: lm.grow.experts(None, {}, 2), "None"),
            )
        ),
        (lambda: lm.map_checkpoint("absent", dict), "there is no checkpoint at absent: No such file"),
        (lambda: lm.map_checkpoint({}, None, MODEL), "a mapping is a WeightMap or a function of the checkpoint"),  # pyright: ignore
        (lambda: lm.map_checkpoint({}, lm.WeightMap({})), "pass map_checkpoint the abstract model too"),
        (lambda: lm.map_checkpoint({}, lm.WeightMap({}), {}), "a table is for a model ... got dict"),
        (lambda: lm.WeightMap.suggest({"a": X}, {"a": "x"}), "a table is for a model, abstract as ... got dict"),
        *(
            (lambda path=path: lm.open_checkpoint(path), f"expected a path or URL ... got {path!r}")  # pyright: ignore
            for path in (None, 3, b"x", {})
        ),
        (what_if(optimizer=ADAM), "with_optimizer() takes an optimizer itself, and a plan then counts its state"),
        (what_if(optimizer=2.0), "optimizer is a name, a number of slots or their dtypes; got 2.0"),
        (what_if(optimizer="adam", moments="int8"), "moments is a floating-point dtype such as 'float32'"),
        (what_if(optimizer="adam", master_weights="bf16"), "master_weights is a floating-point dtype"),
        (what_if(optimizer=["float32"], moments="float32"), "moments='float32' and the slots' dtypes ['float32']"),
        (what_if(master_weights="float32"), "master_weights was given without optimizer"),
        (what_if(memory_kind="pinned_host"), "memory_kind was given without optimizer"),
        (what_if(batch=0, sequence=8), "batch is a positive number; got 0"),
        (what_if(sequence=8), "sequence was given without batch"),
        (what_if(batch=8, sequence=8, remat="full"), "remat='full' is for training; pass optimizer"),
        (what_if(lora_rank="8"), "lora_rank is a positive number; got '8'"),
        (what_if(lora_rank=8, lora_targets=["a"]), "lora_targets=['a'] is not a regular expression"),
        (what_if(quantize=["int8"]), "quantize is 'int8' or 'int4'; got ['int8']"),
        (what_if(optimizer="adamx"), "optimizer 'adamx' is not known; closest: 'adam"),
        (what_if(lora_rank=2, lora_targets="("), "not a regular expression"),
        (what_if(lora_targets=".*"), "lora_targets was given without lora_rank"),
        (plan_what_if(lora_rank=2, lora_targets="nothing"), "no variable of ... is a LoRA target 'nothing'"),
        (plan_what_if(quantize="int8", optimizer="adam"), "quantized parameters cannot be trained; add lora_rank"),
        (planned(what_if=lm.WhatIf(quantize="int8"), compile=lm.Compile("train")), "build it quantized"),
        (planned(what_if="adam"), "what_if is a lazymodel.WhatIf, ... ; got 'adam'"),
        (planned(compile="forward"), "compile is a lazymodel.Compile, ... ; got 'forward'"),
        (lambda: MODEL.shard(MESH, "auto").plan(compile=lm.Compile("forward", len)), "needs devices to compile for"),
        (planned(compile=lm.Compile("train")), "needs a function and its inputs: Compile('train', f"),
        (planned(device_memory="16 potatoes"), "cannot read '16 potatoes' as bytes"),
        (lambda: lm.Compile("fast"), "expected a jitted function or one of 'init', ... , got 'fast'"),  # pyright: ignore
        (lambda: lm.Compile("forward", batch=0), "batch and sequence are positive numbers; got {'batch': 0}"),
        (lambda: lm.Compile("forward", sequence=True), "are positive numbers; got {'sequence': True}"),
        (lambda: lm.Compile("forward", inputs=(X,)), "a keyword of 'forward' is batch or sequence; got inputs"),  # pyright: ignore
        (lambda: lm.Compile("train", len, batch=4), "batch and sequence are for a model's own functions"),
        (lambda: lm.Compile("init", batch=4), "'init' takes neither a function nor sizes; got ... 'batch': 4"),
        (lambda: lm.Compile("init", len, X), "neither a function nor sizes; got"),
        (forward("f"), "a function is called with the model, then the inputs; got 'f'"),
        (forward(len, (4, 64)), "jax.ShapeDtypeStruct(shape, dtype); got (4, 64)"),
        (train(lambda tree: tree["b"]), "needs the loss, a floating-point scalar ... <lambda> returns float32[512]"),
        (train(lambda tree: jnp.ones((), "int32")), "needs the loss, ... <lambda> returns int32[]"),
        (lambda: MODEL.plan().by_module("2"), "depth is a number of path parts, from 1; got '2'"),  # pyright: ignore
        (lambda: MODEL.quantize("int8"), "only Keras models and NNX modules are quantized as a step"),
        (lambda: MODEL.lora(2), "only Keras models and NNX modules are ... as a step"),
        (with_optimizer(ADAM, trained="("), "pattern '(' is not a regular expression"),
        (with_optimizer(ADAM, trained=["a/kernel"]), "a path regex or a function of a variable; got ['a/kernel']"),
        (plans("v5e-1", rules="atuo"), "rules='atuo' is not known; closest: 'auto'"),
        (plans("v5e-1", rules={".*": P("modle")}), "no axis 'modle'"),
        (plans("v5e-1", axes=["model"]), "axes as a mapping of axis name to size"),
        (plans("v5e-1", what_if="adam"), "what_if is a lazymodel.WhatIf, ... ; got 'adam'"),
    ],
)  # fmt: skip
def test_an_error_of_ours_names_it_and_the_mend(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(lm.LazyModelError) as raised:
        call()
    assert all(piece in str(raised.value) for piece in message.split(" ... ")), str(raised.value)


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(lm.LazyModelError, match=r"cannot write .*absent/plan\.png: No such file or directory"):
        MODEL.plan().plot(tmp_path / "absent" / "plan.png")
    with pytest.raises(lm.LazyModelError, match="Format 'zzz' is not supported"):
        MODEL.plan().plot(tmp_path / "plan.zzz")


def test_a_path_that_is_no_text_is_no_variable() -> None:
    with pytest.raises(KeyError, match="3 is not a variable of init"):
        MODEL.explain(3)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_numbers_are_inputs_too(mesh8: Mesh) -> None:
    sharded = MODEL.shard(mesh8, "auto")
    found = sharded.plan(compile=lm.Compile("forward", lambda tree, x, k: x @ tree["a"]["kernel"] * k, X, 2.0))
    assert found.compiled is not None


def test_explicit_axes_are_taken(mesh8: Mesh) -> None:
    """`jax.make_mesh` makes them."""
    mesh = jax.make_mesh((8,), ("model",))
    rules = {".*kernel": P(None, "model"), "b": P("model")}
    sharded = MODEL.shard(mesh, rules).with_optimizer(ADAM)
    assert sharded.plan().device_nbytes == MODEL.shard(mesh8, rules).with_optimizer(ADAM).plan().device_nbytes
    params, state = sharded.materialize()
    assert params["a"]["kernel"].sharding == state[0].mu["a"]["kernel"].sharding == sharded["a/kernel"].sharding
    np.testing.assert_array_equal(params["a"]["kernel"], init(jax.random.key(0))["a"]["kernel"])
    assert "each of 8 devices" in str(sharded.explain("b"))
