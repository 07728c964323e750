"""Compiled Keras models: plans of their state, state placed like its variables, losses as stock Keras'."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.command import command
from tests.keras.models import (
    assert_same_values,
    device_mesh,
    distribution,
    in_block,
    layouts,
    preset_of,
    seeded,
    state_of,
)

optimizers = keras.optimizers
RULES = {".*up/kernel": P(None, "model"), ".*up/bias": P("model"), ".*down/kernel": P("model", None), ".*": P()}

# Every optimizer class, and the options that change which variables one has.
_PLAIN = "Adadelta Adafactor Adagrad Adam Adamax AdamW Ftrl Lamb Lion Muon Nadam SGD ScheduleFreeAdamW"
OPTIMIZERS: dict[str, Any] = {
    **{name.lower(): getattr(optimizers, name) for name in _PLAIN.split() if hasattr(optimizers, name)},
    "adam accumulating": lambda: optimizers.Adam(gradient_accumulation_steps=2),
    "adam amsgrad": lambda: optimizers.Adam(amsgrad=True),
    "adam averaging": lambda: optimizers.Adam(use_ema=True),
    "adam scheduled": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.01, 100)),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam()),
    "rmsprop": lambda: optimizers.RMSprop(centered=True, momentum=0.9),
    "sgd momentum": lambda: optimizers.SGD(momentum=0.9, nesterov=True),
}
if hasattr(optimizers, "MultiOptimizer"):

    def multi() -> keras.Optimizer:
        kernels, others = optimizers.Adam(), optimizers.SGD(momentum=0.9)
        return optimizers.MultiOptimizer(lambda variable: kernels if "kernel" in variable.path else others)

    OPTIMIZERS["multi"] = multi


# Those that keep their state in ways of their own.
DIFFERENT = {"adafactor", "adam accumulating", "loss scale", "multi", "muon", "nadam", "schedulefreeadamw", "sgd"}


def some(few: set[str]) -> Any:
    names = [name if name in few else pytest.param(name, marks=pytest.mark.large) for name in OPTIMIZERS]
    return pytest.mark.parametrize("optimizer", names)


def net(optimizer: str = "adam", *, build: bool = True, frozen: str = "") -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu", name="up"),
            keras.layers.Dropout(0.1, seed=3),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(8, name="down"),
        ],
        name="net",
    )
    for layer in model.layers:
        layer.trainable = layer.name != frozen
    model.compile(OPTIMIZERS[optimizer](), "mse")
    if build:
        model.optimizer.build(model.trainable_variables)
    return model


# Plans ----------------------------------------------------------------------------------------------------------------

KERNELS, BIASES, NORM = (16 * 32 + 32 * 8) * 4, (32 + 8) * 4, 2 * 32 * 4  # bytes of the trainable ones
TRAINED = KERNELS + BIASES + NORM
SPLIT = KERNELS // 8 + 32 * 4 // 8 + 8 * 4 + NORM  # on each of eight devices in one axis, by the rules
# Not trainable: moving mean and variance, a dropout's seed, and what averages the loss.
REST = 2 * 32 * 4 + 2 * 4 + 2 * 4
COUNTS = 2 * 4  # of steps, and the learning rate


@pytest.mark.parametrize(("optimizer", "slots"), [("sgd", 0), ("adam", 2), ("sgd momentum", 1), ("loss scale", 2)])
def test_state_and_gradients_are_planned(optimizer: str, slots: int, mesh8: Mesh) -> None:
    abstract = lm.build_abstract(net, optimizer)
    plan = abstract.plan()
    state = slots * TRAINED + COUNTS
    if optimizer == "loss scale":  # which wraps another, and has counts of its own
        state = sum(v.nbytes for v in abstract.values() if v.follows is not None)
        assert slots * TRAINED + COUNTS <= state < slots * TRAINED + 4 * COUNTS
    assert plan.parts == {"parameters": TRAINED + REST, "optimizer state": state, "gradients": TRAINED}
    assert plan.device_nbytes == TRAINED + REST + state
    assert plan.used_nbytes == sum(row.used_nbytes for row in plan.rows)


def test_on_a_mesh_and_of_what_is_not_frozen(mesh8: Mesh) -> None:
    parts = lm.build_abstract(net, frozen="up").shard(mesh8, RULES).plan().parts
    trained = 32 * 8 * 4 // 8 + 8 * 4 + NORM
    assert (parts["gradients"], parts["optimizer state"]) == (trained, 2 * trained + COUNTS)


def test_a_second_optimizer_is_refused_and_one_that_was_not_built_is_none() -> None:
    built = lm.build_abstract(net)
    with pytest.raises(lm.LazyModelError, match="optimizer='lion' .*net has an optimizer already"):
        built.plan(what_if=lm.WhatIf(optimizer="lion"))
    with pytest.raises(lm.LazyModelError, match="has an optimizer already"):
        built.with_optimizer(optax.adam(1e-3))
    waiting = lm.build_abstract(net, build=False)
    assert waiting.plan().parts == {"parameters": TRAINED + REST, "optimizer state": COUNTS}
    assert waiting.plan(what_if=lm.WhatIf(optimizer="adam")).parts["optimizer state"] == COUNTS + 2 * TRAINED
    assert waiting.with_optimizer(optax.sgd(0.1)).plan().parts["gradients"] == TRAINED


def test_lora_pairs_are_what_is_trained() -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, name="up"), keras.layers.Dense(8)])
        model.layers[0].enable_lora(16)
        model.layers[1].trainable = False
        model.compile(optimizers.Adam(), "mse")
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
    own = lm.build_abstract(net)
    optax_own = lm.build_abstract(net, build=False).with_optimizer(optax.adam(1e-3))
    for abstract in (own, optax_own):
        abstract = abstract.shard(mesh8, RULES)
        plan = abstract.plan(compile=lm.Compile("train", batch=8))
        assert plan.compiled is not None and "gradients" not in plan.parts
        assert plan.compiled.argument_nbytes == plan.device_nbytes + 8 * 16 * 4
        state = sum(v.shard_nbytes for v in abstract.values() if v.follows is not None)
        assert plan.parts["optimizer state"] == state
        assert plan.compiled.alias_nbytes == state + SPLIT  # updated in place
    forward = own.shard(mesh8, RULES).plan(compile=lm.Compile("forward", batch=8))
    assert forward.parts["gradients"] == SPLIT
    assert forward.parts["activations"] > 0


def test_the_command_line_refuses_a_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled_net.py").write_text(
        "import keras\n\n\ndef make():\n"
        "    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)], name='small')\n"
        "    model.compile(keras.optimizers.Adam(), 'mse')\n"
        "    model.optimizer.build(model.trainable_variables)\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    weights = (16 * 8 + 8) * 4
    assert json.loads(command("plan", "compiled_net:make", "--json").out)["parts"] == {
        "parameters": weights + 2 * 4, "optimizer state": 2 * weights + COUNTS, "gradients": weights
    }  # fmt: skip
    refused = command("plan", "compiled_net:make", "--optimizer", "adamw")
    assert refused.status == 2 and "--optimizer adamw" in refused.err and "small has an optimizer" in refused.err


def test_a_weights_file_is_planned_by_the_configuration_beside_it() -> None:
    folder, file = preset_of("gemma"), f"{preset_of('gemma')}/model.weights.h5"
    expected = json.loads(command("plan", folder, "--mesh", "model=2", "--json").out)
    _, out, err = command("plan", file, "--mesh", "model=2", "--json")
    assert json.loads(out) == expected and expected["read_nbytes"] > 0
    assert "model.weights.h5" in err and "config.json" in err


# State and its places -------------------------------------------------------------------------------------------------


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((64, 16)).astype("f"), rng.standard_normal((64, 8)).astype("f")


def losses(model: keras.Model, **options: Any) -> list[float]:
    return model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0, **options).history["loss"]


def owners(model: keras.Model) -> dict[str, keras.Variable]:
    """Optimizer variable's path → the variable it is named after and shaped like."""
    return {
        slot.path: variable
        for variable in model.trainable_variables
        for slot in model.optimizer.variables
        if variable.path.replace("/", "_") in slot.path and slot.shape == variable.shape
    }


def assert_placed_like_owners(model: keras.Model) -> None:
    slots = {slot.path: slot for slot in model.optimizer.variables}
    for path, variable in owners(model).items():
        placed, expected = slots[path].value.sharding, variable.value.sharding
        assert placed.is_equivalent_to(expected, len(variable.shape)), path


def test_every_optimizer_is_here() -> None:
    classes = {
        name
        for name, cls in vars(optimizers).items()
        if inspect.isclass(cls) and issubclass(cls, optimizers.Optimizer) and name != "Optimizer"
    }
    assert classes == {type(make()).__name__ for make in OPTIMIZERS.values()}


@some(DIFFERENT)
def test_state_is_placed_like_its_variables(optimizer: str, mesh42: Mesh) -> None:
    stock = seeded(lambda: net(optimizer))
    abstract = seeded(lambda: lm.build_abstract(net, optimizer)).shard(mesh42, RULES)
    for path, variable in abstract.items():
        if variable.follows and variable.shape == abstract[variable.follows].shape:
            assert variable.spec == abstract[variable.follows].spec, path
    model = abstract.materialize()
    for one, other in zip(stock.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)  # one of them begins with copies of the variables
        assert len(other.value.sharding.device_set) == 8
    assert_placed_like_owners(model)
    assert optimizer == "sgd" or any("model" in str(slot.value.sharding.spec) for slot in model.optimizer.variables)


def test_copies_of_variables_that_are_loaded(tmp_path: Path, mesh42: Mesh) -> None:
    """Schedule-free optimizers begin where the variables are: at what was loaded, and in no other place."""
    if "schedulefreeadamw" not in OPTIMIZERS:
        pytest.skip(f"Keras {keras.__version__} has no such optimizer")
    net("sgd").save_weights(tmp_path / "net.weights.h5")

    def build() -> keras.Model:
        model = net("schedulefreeadamw", build=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(tmp_path / "net.weights.h5")
        model.optimizer.build(model.trainable_variables)
        return model

    abstract = lm.build_abstract(build).shard(mesh42, RULES)
    copy = next(variable for path, variable in abstract.items() if path.endswith("up_kernel_momentum"))
    assert copy.origin == abstract["net/up/kernel"].origin and "net.weights.h5" in copy.origin
    model = abstract.materialize()
    for slot, variable in ((s, v) for s in model.optimizer.variables for v in model.trainable_variables):
        if slot.path.endswith(variable.path.replace("/", "_") + "_momentum"):
            np.testing.assert_array_equal(slot.value, variable.value)
            assert slot.value is not variable.value


def test_factored_state_keeps_what_is_left_of_the_spec(mesh42: Mesh) -> None:
    abstract = lm.build_abstract(net, "adafactor").shard(mesh42, RULES)
    found = {(v.follows, v.shape): v.spec for v in abstract.values() if v.follows}
    assert found["net/up/kernel", (16,)] == P()
    assert found["net/up/kernel", (32,)] == P("model")
    assert found["net/down/kernel", (32,)] == P("model")
    assert found["net/down/kernel", (8,)] == P()


@some({"nadam"})
def test_state_is_restored(optimizer: str, tmp_path: Path, mesh42: Mesh) -> None:
    """From Keras' own files and Orbax checkpoints, and the file can be written again."""
    pytest.importorskip("orbax.checkpoint")
    source, rng = net(optimizer), np.random.default_rng(0)
    for variable in state_of(source):
        if variable.dtype == "float32":
            variable.assign(rng.standard_normal(variable.shape))
    source.save_weights(tmp_path / "net.weights.h5")
    paths = [tmp_path / "net.weights.h5"]
    # Keras can save neither variables of one path, nor functions whose source is not in a module, with Orbax.
    if optimizer not in ("adafactor", "multi") and hasattr(keras.callbacks, "OrbaxCheckpoint"):
        callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "orbax"), save_on_background=False)
        callback.set_model(source)
        callback.on_epoch_end(0)
        callback.on_train_end()
        paths.append(tmp_path / "orbax")
    for path in paths:
        model = lk.restore(lm.build_abstract(net, optimizer, build=False).shard(mesh42, RULES), path)
        assert_same_values(state_of(source), state_of(model))
        assert_placed_like_owners(model)
        if path.suffix == ".h5":
            model.save_weights(path)


def test_an_optimizer_built_later(mesh42: Mesh) -> None:
    """For a model that has its values: in a block of its own, with or without rules, which are not for it."""
    for options in ({}, {"mesh": mesh42, "rules": lambda variable: P()}):
        model = lm.build_abstract(net, build=False).shard(mesh42, RULES).materialize()
        in_block(lambda model=model: model.optimizer.build(model.trainable_variables), **options)
        assert len(model.optimizer.variables) == 14
        assert_placed_like_owners(model)


def test_under_a_distribution() -> None:
    """Layout maps have patterns for the model's variables; its optimizer's go beside them, as in stock Keras."""
    with distribution(layouts(device_mesh(1, 8), **{"net/.*kernel": (None, "model")})):
        abstract = lm.build_abstract(net)
        with pytest.raises(lm.TraceError, match="Adam"):  # an optimizer alone is no model
            lm.build_abstract(lambda: optimizers.Adam())
    assert all(v.sharding is not None and len(v.sharding.device_set) == 8 for v in abstract.values())
    assert abstract.plan().parts["optimizer state"] == 2 * (KERNELS // 8 + BIASES + NORM) + COUNTS
    model = abstract.materialize()
    assert model.get_layer("up").kernel.value.sharding.spec == P(None, "model")
    assert_placed_like_owners(model)


def test_explicit_axes_are_taken_as_automatic_ones() -> None:
    """`jax.make_mesh` makes Explicit axes, with which Keras' Dropout fails."""
    mesh = jax.make_mesh((4, 2), ("model", "data"))
    assert all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)
    model = lm.build_abstract(net).shard(mesh, RULES).materialize()
    kernel = model.get_layer("up").kernel.value
    assert kernel.sharding.spec == P(None, "model")
    assert all(kind == jax.sharding.AxisType.Auto for kind in kernel.sharding.mesh.axis_types)
    assert np.isfinite(model.layers[1](kernel, training=True)).all()


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer: str, mesh42: Mesh) -> None:
    expected = seeded(lambda: losses(net(optimizer)))
    found = seeded(lambda: losses(lm.build_abstract(net, optimizer).shard(mesh42, RULES).materialize()))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class Watch(keras.callbacks.Callback):
    """Notes how the state is placed within an epoch."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.specs = [value.sharding.spec for value in self.model._jax_state["trainable_variables"]]


def test_losses_are_those_of_stock_keras(mesh42: Mesh) -> None:
    """Without a distribution, and with one that splits the batches over a mesh axis."""
    expected = seeded(lambda: losses(net(build=False)))

    def deferred() -> keras.Model:
        return in_block(lambda: net(build=False), mesh=mesh42, rules=RULES)

    model = seeded(deferred)
    np.testing.assert_allclose(losses(model), expected, rtol=1e-5)
    assert_placed_like_owners(model)

    model, watch = seeded(deferred), Watch()
    with lk.distribution(mesh42, "batch").scope():
        np.testing.assert_allclose(losses(model, callbacks=[watch]), expected, rtol=1e-5)
    assert watch.specs[:2] == [P(None, "model"), P("model")]
    assert_placed_like_owners(model)
    with pytest.raises(lm.ShardingError, match="no axis 'rows' to split batches over"):
        lk.distribution(mesh42, "rows")

    def compiled_outside() -> keras.Model:
        return lm.build_abstract(net, build=False).shard(mesh42, RULES).materialize()

    model = seeded(compiled_outside)
    model.compile(OPTIMIZERS["adam"](), "mse")  # its step count is on one device
    with lk.distribution(mesh42, "batch").scope():
        np.testing.assert_allclose(losses(model), expected, rtol=1e-5)
        model.evaluate(*data(), verbose=0)
    assert_placed_like_owners(model)
