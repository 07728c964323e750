"""Plans of Keras models that are compiled: their optimizer's state, and the gradients of what it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._cli.main import main
from tests.keras.models import save_preset

RULES = {".*kernel": P(None, "model"), ".*": P()}
KERNELS, BIASES, NORM = (16 * 32 + 32 * 8) * 4, (32 + 8) * 4, 2 * 32 * 4  # bytes of the trainable ones
TRAINED = KERNELS + BIASES + NORM
# Not trainable: moving mean and variance, a dropout's seed, and what averages the loss.
REST = 2 * 32 * 4 + 2 * 4 + 2 * 4


def net(optimizer: Any, *, build: bool = True, frozen: str = "") -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, name="up"),
            keras.layers.Dropout(0.1, seed=3),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(8, name="down"),
        ],
        name="net",
    )
    for layer in model.layers:
        layer.trainable = layer.name != frozen
    model.compile(optimizer, "mse")
    if build:
        model.optimizer.build(model.trainable_variables)
    return model


COUNTS = 2 * 4  # of steps, and the learning rate


@pytest.mark.parametrize(
    ("optimizer", "slots"), [(keras.optimizers.SGD, 0), (keras.optimizers.Adam, 2), (keras.optimizers.RMSprop, 1)]
)
def test_state_and_gradients_of_a_compiled_model(optimizer: Any, slots: int) -> None:
    plan = lm.build_abstract(lambda: net(optimizer())).plan()
    assert plan.parts == {
        "parameters": TRAINED + REST, "optimizer state": slots * TRAINED + COUNTS, "gradients": TRAINED
    }  # fmt: skip
    assert plan.device_nbytes == TRAINED + REST + slots * TRAINED + COUNTS
    assert plan.used_nbytes == sum(row.used_nbytes for row in plan.rows)


def test_on_a_mesh_and_on_what_is_not_frozen(mesh8: Mesh) -> None:
    abstract = lm.build_abstract(lambda: net(keras.optimizers.Adam(), frozen="up")).shard(mesh8, RULES)
    trained = 32 * 8 * 4 // 8 + 8 * 4 + NORM
    assert abstract.plan().parts["gradients"] == trained
    assert abstract.plan().parts["optimizer state"] == 2 * trained + COUNTS


def test_an_optimizer_that_wraps_another() -> None:
    abstract = lm.build_abstract(lambda: net(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())))
    plan = abstract.plan()
    assert plan.parts["gradients"] == TRAINED
    state = {v.path: v.nbytes for v in abstract.values() if v.follows is not None}
    assert plan.parts["optimizer state"] == sum(state.values()) >= 2 * TRAINED + COUNTS
    assert plan.parts["parameters"] == TRAINED + REST


def test_a_second_optimizer_is_refused_and_one_that_was_not_built_is_none() -> None:
    built = lm.build_abstract(lambda: net(keras.optimizers.Adam()))
    with pytest.raises(lm.LazyModelError, match="optimizer='lion' would be a second one: net has an optimizer already"):
        built.plan(what_if=lm.WhatIf(optimizer="lion"))
    with pytest.raises(lm.LazyModelError, match="has an optimizer already"):
        built.with_optimizer(optax.adam(1e-3))
    waiting = lm.build_abstract(lambda: net(keras.optimizers.Adam(), build=False))
    assert waiting.plan().parts == {"parameters": TRAINED + REST, "optimizer state": COUNTS}
    assert waiting.plan(what_if=lm.WhatIf(optimizer="adam")).parts["optimizer state"] == COUNTS + 2 * TRAINED
    assert waiting.with_optimizer(optax.sgd(0.1)).plan().parts["gradients"] == TRAINED


def test_lora_pairs_are_what_is_trained() -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, name="up"), keras.layers.Dense(8)])
        model.layers[0].enable_lora(16)
        model.layers[1].trainable = False
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    abstract = lm.build_abstract(make)
    bias, pair = 256 * 4, (64 * 16 + 16 * 256) * 4
    plan = abstract.plan()
    assert plan.parts["gradients"] == bias + pair
    assert plan.parts["optimizer state"] == 2 * (bias + pair) + COUNTS
    # The pair has enough elements to be quantized, and is trained.
    quantized = abstract.plan(what_if=lm.WhatIf(quantize="int8"))
    assert quantized.parts["gradients"] == bias + pair
    assert quantized.parts["parameters"] == plan.parts["parameters"] - 64 * 256 * 3 + 256 * 4


def test_a_compiled_training_step(mesh8: Mesh) -> None:
    own = lm.build_abstract(lambda: net(keras.optimizers.Adam())).shard(mesh8, RULES)
    optax_own = lm.build_abstract(lambda: net(keras.optimizers.Adam(), build=False)).with_optimizer(optax.adam(1e-3))
    for abstract in (own, optax_own.shard(mesh8, RULES)):
        plan = abstract.plan(compile=lm.Compile("train", batch=8))
        assert plan.compiled is not None and "gradients" not in plan.parts
        assert plan.compiled.argument_nbytes == plan.device_nbytes + 8 * 16 * 4
        state = sum(v.shard_nbytes for v in abstract.values() if v.follows is not None)
        assert plan.parts["optimizer state"] == state
        assert plan.compiled.alias_nbytes == state + (KERNELS // 8 + BIASES + NORM)  # updated in place
        forward = abstract.plan(compile=lm.Compile("forward", batch=8))
        assert forward.parts["gradients"] == KERNELS // 8 + BIASES + NORM
        assert forward.parts["activations"] > 0


def test_under_a_distribution(mesh8: Mesh) -> None:
    devices = keras.distribution.DeviceMesh((8,), ["model"], keras.distribution.list_devices())
    layouts = keras.distribution.LayoutMap(devices)
    layouts[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="model"))
    try:
        abstract = lm.build_abstract(lambda: net(keras.optimizers.Adam()))
        with pytest.raises(lm.TraceError, match="Adam"):  # an optimizer alone is no model
            lm.build_abstract(lambda: keras.optimizers.Adam())
    finally:
        keras.distribution.set_distribution(None)
    assert all(v.sharding is not None and len(v.sharding.device_set) == 8 for v in abstract.values())
    split = KERNELS // 8 + BIASES + NORM
    assert abstract.plan().parts["optimizer state"] == 2 * split + COUNTS


def test_the_command_line_refuses_a_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "compiled_net.py").write_text(
        "import keras\n\n\ndef make():\n"
        "    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)], name='small')\n"
        "    model.compile(keras.optimizers.Adam(), 'mse')\n"
        "    model.optimizer.build(model.trainable_variables)\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "compiled_net:make", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    weights = (16 * 8 + 8) * 4
    assert found["parts"] == {
        "parameters": weights + 2 * 4,
        "optimizer state": 2 * weights + COUNTS,
        "gradients": weights,
    }
    assert main(["plan", "compiled_net:make", "--optimizer", "adamw"]) == 2
    assert "optimizer='adamw' would be a second one: small has an optimizer already" in capsys.readouterr().err


def test_a_weights_file_is_planned_by_the_configuration_beside_it(tmp_path: Path, capsys: Any) -> None:
    folder = save_preset(tmp_path / "gemma", "gemma")
    assert main(["plan", str(folder), "--mesh", "model=2", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main(["plan", str(folder / "model.weights.h5"), "--mesh", "model=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == expected and expected["read_nbytes"] > 0
    assert "model.weights.h5 holds weights; planning its folder by config.json" in err
