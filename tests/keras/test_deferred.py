"""`lk.deferred()`: unchanged Keras code, loaded on return of what loads, initialized on leaving the block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk

from .models import (
    BACKBONES,
    assert_same,
    assert_same_values,
    bits,
    device_mesh,
    in_block,
    preset_of,
    save_preset,
    seeded,
)


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])


def has_values(model: Any) -> bool:
    return all(variable._value is not None for variable in model.weights)


def test_from_preset_is_loaded_when_it_returns(mesh8: Mesh) -> None:
    folder, cls = preset_of("bert"), BACKBONES["bert"][0]
    stock = seeded(lambda: cls.from_preset(folder))
    seeded(lambda: in_block(lambda: assert_same(stock, cls.from_preset(folder))))  # runs the model inside the block
    with lk.deferred(mesh=mesh8, rules=lambda v: P("model") if v.shape and v.shape[0] % 8 == 0 else P()):
        model = keras_hub.models.Backbone.from_preset(folder)
    assert model.get_layer("pooled_dense").kernel.value.sharding.spec == P("model")


def test_what_was_only_built_is_initialized_on_leaving() -> None:
    def build() -> keras.Model:
        model = small()
        assert all(v._value is None for v in model.weights)
        return model

    assert_same(seeded(small), seeded(lambda: in_block(build)))


@pytest.mark.parametrize("built", ["inside", "before"])
def test_load_weights(built: str, tmp_path: Path) -> None:
    source = seeded(small, seed=1)
    source.save_weights(tmp_path / "small.weights.h5")
    source.save(tmp_path / "small.keras")
    for file in ("small.weights.h5", "small.keras"):
        before = seeded(small, seed=2)
        with lk.deferred():
            model = small() if built == "inside" else before
            model.load_weights(tmp_path / file)
            assert_same_values(source.weights, model.weights)


def larger() -> keras.Model:
    """`small` and a layer more."""
    model = small()
    model.add(keras.layers.Dense(3))
    return model


@pytest.mark.parametrize("file", ["larger.weights.h5", "larger.keras"])
def test_load_weights_finds_tensors_that_the_model_has_no_variable_for(tmp_path: Path, file: str) -> None:
    larger().save(tmp_path / file) if file.endswith(".keras") else larger().save_weights(tmp_path / file)
    holds = rf"{file} .*2 .*: layers/dense_1/vars/0, layers/dense_1/vars/1"
    with pytest.raises(lm.CheckpointError, match=rf"Model\.load_weights: .*{holds}.*strict=False"), lk.deferred():
        small().load_weights(tmp_path / file)
    assert has_values(seeded(small)), "Keras is as it was"
    reports: list[lm.LoadReport] = []
    with lk.deferred(strict=False, report=reports.append):
        model = small()
        with pytest.warns(lm.LazyModelWarning, match=holds) as caught:
            model.load_weights(tmp_path / file)
        assert [warning.filename for warning in caught] == [__file__], "it points to the caller's line"
        assert has_values(model)
    assert [[tensor.name for tensor in report.unused] for report in reports] == [
        ["layers/dense_1/vars/0", "layers/dense_1/vars/1"]
    ]


def test_load_weights_that_is_told_to_skip_may(tmp_path: Path) -> None:
    larger().save_weights(file := tmp_path / "larger.weights.h5")
    with lk.deferred():
        model, other = small(), small()
        model.load_weights(file, skip_mismatch=True)
        assert has_values(model)
        other.load_weights(file, objects_to_skip=[other.layers[0]])
    assert has_values(other)


def test_each_load_answers_for_its_own_files(tmp_path: Path) -> None:
    """The same file in two models, one after the other, and a failure that the program survives."""
    source = seeded(small, seed=1)
    source.save_weights(tmp_path / "small.weights.h5")
    larger().save_weights(tmp_path / "larger.weights.h5")
    reports: list[lm.LoadReport] = []
    with lk.deferred(report=reports.append):
        rest = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        first = small()
        first.load_weights(tmp_path / "small.weights.h5")
        with pytest.raises(lm.CheckpointError, match="dense_1"):
            small().load_weights(tmp_path / "larger.weights.h5")
        second = small()
        second.load_weights(tmp_path / "small.weights.h5")
    assert_same_values(source.weights * 2, first.weights + second.weights)
    assert has_values(rest)
    assert [len(report.loaded) for report in reports[:2]] == [len(source.weights)] * 2
    took = [[span for span in report.timeline if span.name in ("build", "rebuild")] for report in reports]
    assert [[span.name for span in spans] for spans in took] == [["build", "rebuild"]] * 3
    edges = [edge for spans in took for span in spans for edge in (span.start, span.stop)]
    assert edges == sorted(edges), "what comes after a load is of the next model"
    assert {"lazymodel", "lazymodel_keras"} <= {span.detail for span in reports[0].timeline}
    assert reports[-1].initialized
    assert all(report.unused == () for report in reports)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # the file was saved without one
def test_training_afterwards(tmp_path: Path) -> None:
    source = seeded(small, seed=1)
    source.save_weights(tmp_path / "small.weights.h5")
    with lk.deferred():
        model = small()
        model.compile("adam", "mse")
        model.load_weights(tmp_path / "small.weights.h5")
    before = bits(model.weights[0])
    rng = np.random.default_rng(0)  # of equal rows, normalization leaves nothing to learn from
    model.fit(rng.standard_normal((8, 4)), rng.standard_normal((8, 8)), verbose=0)
    assert not np.array_equal(before, bits(model.weights[0]))
    assert int(model.optimizer.iterations.value) == 1


def test_an_exception_inside_leaves_keras_as_it_was(tmp_path: Path) -> None:
    load_weights, from_preset = keras.Model.load_weights, vars(keras_hub.models.Backbone)["from_preset"]
    with pytest.raises(RuntimeError, match="no"), lk.deferred():
        fail()
    assert keras.Model.load_weights is load_weights
    assert vars(keras_hub.models.Backbone)["from_preset"] is from_preset
    assert has_values(seeded(small))
    folder = save_preset(tmp_path / "bert", "bert")
    (folder / "model.weights.h5").write_bytes(b"\0" * 100)
    with pytest.raises(lm.LazyModelError), lk.deferred():
        keras_hub.models.BertBackbone.from_preset(str(folder))
    assert has_values(seeded(small))


def fail(built: list[keras.Model] | None = None) -> None:
    model = small()
    model.compile("sgd", "mse")
    if built is not None:
        built.append(model)
    raise RuntimeError("no")


USES = {
    "predict": lambda model: model.predict(np.ones((2, 4)), verbose=0),
    "fit": lambda model: model.fit(np.ones((2, 4)), np.ones((2, 8)), verbose=0),
    "jit": lambda model: jax.jit(model)(np.ones((2, 4))),
    "get_weights": lambda model: model.get_weights(),
    "assign": lambda model: model.weights[0].assign(np.ones((4, 8))),
    "assign in another block": lambda model: in_block(lambda: model.weights[0].assign(np.ones((4, 8)))),
    "optimizer": lambda model: float(model.optimizer.learning_rate),
}


def test_models_of_a_block_that_failed_have_no_values(mesh8: Mesh) -> None:
    """Rather than values that are whole on one device."""
    built: list[keras.Model] = []
    with pytest.raises(RuntimeError, match="no"), lk.deferred(mesh=mesh8, rules={".*": P()}):
        fail(built)
    for use in USES.values():
        with pytest.raises(lm.LazyModelError, match="has no value.*[Bb]uild the model again"):
            use(built[0])
    built[0].summary(print_fn=lambda *_, **__: None)


def test_clearing_the_session_inside(mesh8: Mesh) -> None:
    def build() -> keras.Model:
        first = keras.layers.Dense(8, name="first")
        keras.utils.clear_session()
        inputs = keras.Input((8,))
        return keras.Model(inputs, keras.layers.Dense(16)(first(inputs)))

    expected = seeded(build)
    rules = {".*/kernel": P(None, "model"), ".*": P()}
    model = seeded(lambda: in_block(build, mesh=mesh8, rules=rules))
    assert [variable.path for variable in model.weights] == [variable.path for variable in expected.weights]
    assert_same(expected, model, outputs=False)
    assert [v.value.sharding.spec for v in model.weights] == [P(None, "model"), P()] * 2


def test_layouts_of_variables_without_a_distribution(mesh8: Mesh) -> None:
    """They hold as for stock Keras, in a block with other rules and for what an optimizer keeps, too."""
    mesh = device_mesh(8)

    def build() -> Any:
        layer = keras.layers.Layer()
        layout = keras.distribution.TensorLayout(["model", None], mesh)
        layer.random = keras.Variable(keras.initializers.GlorotUniform(), shape=(16, 8), layout=layout)
        layer.given = keras.Variable(np.ones((8, 8)), layout=layout)
        optimizer = keras.optimizers.Adam()
        optimizer.build([layer.random, layer.given])
        return layer, optimizer

    def variables(built: Any) -> list[Any]:
        return [*built[0].variables, *built[1].variables]

    expected = variables(seeded(build))
    assert expected[0].value.sharding.spec == P("model", None)
    every = [
        seeded(lambda: in_block(build)),
        seeded(lambda: in_block(build, mesh=mesh8, rules={".*": P()})),
        seeded(lambda: lm.build_abstract(build).materialize()),
    ]
    for found in map(variables, every):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
            assert type(a._layout) is type(b._layout) or a._layout is None, a.path
            assert a._layout is None or a.value.sharding == b.value.sharding, a.path


def test_rules_hold_for_all_models_of_a_block(mesh8: Mesh) -> None:
    def named(name: str) -> keras.Model:
        return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, name=name)])

    rules = {".*/first/kernel": P(None, "model"), ".*/second/kernel": P("model"), ".*bias": None}
    with lk.deferred(mesh=mesh8, rules=rules):
        models = named("first"), named("second")
    assert [model.weights[0].value.sharding.spec for model in models] == [P(None, "model"), P("model")]
    roles = {lm.role("embedding"): P("model", None), lm.role("mlp_up"): P(), ".*": P()}
    for given, build, unused in (
        (rules, lambda: named("first"), "'.\\*/second/kernel'"),
        (roles, lambda: keras.Sequential([keras.layers.Input((8,)), keras.layers.Embedding(64, 16)]), "mlp_up"),
    ):
        with (
            pytest.warns(lm.LazyModelWarning, match=f"no model of the block .*{unused}"),
            lk.deferred(mesh=mesh8, rules=given),
        ):
            model = build()
    assert model.weights[0].value.sharding.spec == P("model", None)
