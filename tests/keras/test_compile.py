"""What will be called is compiled while weights come: the first `predict`, `fit` or `generate` compiles nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
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
from tests.compile_events import compile_events
from tests.large import mostly_large

from .models import BACKBONES, bits, causal_lm, randomize

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*vocabulary.spm:ResourceWarning")  # KerasHub's

RULES = {".*/kernel": P(None, "model"), ".*": P()}
X, Y = np.random.default_rng(0).standard_normal((16, 16), "float32"), np.arange(16) % 8


def make_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, name="up"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(8, name="down")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def used(model: keras.Model) -> list[Any]:
    """Everything that a first prediction and two first epochs leave."""
    predicted = model.predict(X, batch_size=8, verbose=0)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [predicted, history, *(bits(variable) for variable in [*model.variables, *model.optimizer.variables])]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert found[1] == expected[1]
    for one, other in zip([found[0], *found[2:]], [expected[0], *expected[2:]], strict=True):
        np.testing.assert_array_equal(one, other)


@contextlib.contextmanager
def nothing_is_compiled() -> Generator[None]:
    with compile_events() as programs:
        yield
    assert not programs


COMPILE = [lm.Compile("train", batch=8), lm.Compile("predict", batch=8)]


@pytest.mark.parametrize("distributed", mostly_large([False, True], [True]))
def test_the_first_prediction_and_epoch_compile_nothing(mesh42: Mesh, distributed: bool) -> None:
    scope = lk.distribution(mesh42, "batch").scope() if distributed else contextlib.nullcontext()
    with scope:
        abstract = lm.build_abstract(make_model)
        abstract = abstract.shard(mesh42, RULES) if distributed else abstract
        models = [abstract.materialize(compile=COMPILE), abstract.materialize()]
        assert models[0] is not models[1]
        with nothing_is_compiled():
            found = used(models[0])
        assert_equal(found, used(models[1]))
    if not distributed:
        assert_equal(found, used(make_model()))
    (moment,) = (v for v in models[0].optimizer.variables if "up" in v.path and v.path.endswith("kernel_momentum"))
    assert moment.value.sharding == models[0].layers[0].kernel.value.sharding


def test_on_a_mesh_without_a_distribution_fit_says_what_it_needs(mesh8: Mesh) -> None:
    with pytest.warns(UserWarning, match=r"compiles its second step .*distribution\(mesh\)\.scope"):
        model = lm.build_abstract(make_model).shard(mesh8, RULES).materialize(compile=COMPILE)
    with nothing_is_compiled():
        model.predict(X, batch_size=8, verbose=0)
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)


@pytest.fixture(scope="module")
def gemma() -> str:
    return causal_lm(1)


PROMPTS = ["the quick", "fox"]


@pytest.mark.parametrize("where", mostly_large(["mesh", "distribution"], ["distribution"]))
def test_the_first_text_compiles_nothing(gemma: str, mesh42: Mesh, where: str) -> None:
    def make() -> Any:
        task, samplers = keras_hub.models.CausalLM.from_preset(gemma), keras_hub.samplers
        task.compile(sampler=samplers.GreedySampler() if where == "mesh" else samplers.TopKSampler(k=5, seed=3))
        return task

    with lk.distribution(mesh42, "batch").scope() if where == "distribution" else contextlib.nullcontext():
        abstract = lm.build_abstract(make).shard(mesh42, lm.auto())
        task = abstract.materialize(compile=lm.Compile("generate", batch=4, sequence=10))
        with nothing_is_compiled():
            texts = [task.generate(PROMPTS * 2, max_length=10) for _ in range(2)]
        other = abstract.materialize()
        assert texts == [other.generate(PROMPTS * 2, max_length=10) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_a_task_of_a_preset(gemma: str) -> None:
    cls = keras_hub.models.CausalLM
    compiles = [lm.Compile("train", batch=2), lm.Compile("generate", PROMPTS, sequence=8)]
    task = lk.from_preset(cls, gemma, compile=compiles)
    with nothing_is_compiled():
        task.fit(PROMPTS * 2, batch_size=2, verbose=0)
        task.train_on_batch(PROMPTS)
        task.generate(PROMPTS, max_length=8)
    assert lk.from_preset(cls, gemma, compile=False).compiled is False, "True and False are KerasHub's"


def test_within_deferred_and_of_saved_models(gemma: str, tmp_path: Path) -> None:
    with lk.deferred(compile=lm.Compile("generate", batch=2, sequence=8)):
        task = keras_hub.models.CausalLM.from_preset(gemma)
    with nothing_is_compiled():
        task.generate(PROMPTS, max_length=8)
    saved = make_model()
    saved.train_on_batch(X, Y)
    saved.save(tmp_path / "model.keras")
    model = lk.load_model(tmp_path / "model.keras", compile=lm.Compile("train", batch=8))
    restored = lk.restore(lm.build_abstract(make_model), tmp_path / "model.keras", compile=lm.Compile("predict", X[:8]))
    assert_equal([None, {}, *map(bits, restored.weights)], [None, {}, *map(bits, model.weights)])
    with nothing_is_compiled():
        restored.predict(X, batch_size=8, verbose=0)
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.large  # other tasks are above
def test_a_classifier_of_texts(tmp_path: Path) -> None:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "the", "fox"]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=words)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    cls, config = BACKBONES["bert"]
    backbone = randomize(cls(**{**config, "num_layers": 1}))
    keras_hub.models.BertTextClassifier(backbone, 3, preprocessor).save_to_preset(str(tmp_path / "bert"))
    cls = keras_hub.models.TextClassifier
    task = lk.from_preset(cls, tmp_path / "bert", compile=lm.Compile("predict", batch=2))
    with nothing_is_compiled():
        task.predict(["the fox", "fox"], verbose=0)


def test_models_say_what_they_take_or_are_told(mesh8: Mesh) -> None:
    def several() -> keras.Model:
        one, two = keras.Input((4,), name="one"), keras.Input((None, 3), name="two")
        pooled = keras.layers.GlobalAveragePooling1D()(two)
        outputs = keras.layers.Dense(2)(keras.layers.concatenate([one, pooled]))
        model = keras.Model({"one": one, "two": two}, outputs)
        model.compile("sgd", "mse", steps_per_execution=2)
        return model

    x = {"one": np.ones((8, 4), "float32"), "two": np.ones((8, 5, 3), "float32")}
    y, weights = np.ones((8, 2), "float32"), np.ones((8,), "float32")
    some = {name: jax.ShapeDtypeStruct((4, *array.shape[1:]), array.dtype) for name, array in x.items()}
    compiles = [
        lm.Compile("train", batch=4, sequence=5),
        lm.Compile("train", some, y[:4], weights[:4]),
        lm.Compile("train", x, y, None),
        lm.Compile("predict", some),
    ]
    model = lm.build_abstract(several).materialize(compile=compiles)
    with nothing_is_compiled():
        model.fit(x, y, batch_size=4, verbose=0)
        model.fit(x, y, batch_size=4, sample_weight=weights, verbose=0)
        model.predict(x, batch_size=4, verbose=0)


def test_a_plan_asks_the_compiler_and_leaves_the_model_as_it_was(mesh8: Mesh) -> None:
    abstract = lm.build_abstract(make_model).shard(mesh8, RULES)
    plan = abstract.plan(compile=lm.Compile("predict", batch=8))
    assert plan.compiled is not None
    assert plan.compiled.argument_nbytes > X[:8].nbytes
    assert "predict: sequential" in str(plan)
    with pytest.raises(lm.LazyModelError, match="takes batch and sequence"):
        abstract.plan(compile=lm.Compile("train", X, Y))
    predicted: list[Any] = []
    for _ in range(2):  # each model of it has its own programs
        model = abstract.materialize(compile=lm.Compile("predict", batch=8))
        with nothing_is_compiled():
            predicted.append(model.predict(X, batch_size=8, verbose=0))
    np.testing.assert_array_equal(*predicted)


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def test_functions_of_ones_own_take_the_variables_as_arguments() -> None:
    current: list[Any] = []

    def loss(variables: Any, x: Any) -> Any:
        return jax.numpy.mean(current[0].stateless_call(variables, [], x)[0] ** 2)

    step, reads = jax.jit(jax.value_and_grad(loss)), jax.jit(lambda x: current[0](x))

    def split(model: Any) -> tuple[Any]:
        current[:] = [model]
        return ([variable.value for variable in model.trainable_variables],)

    model = lm.build_abstract(plain).materialize(compile=lm.Compile(step, X[:4, :4]).of(split))
    with nothing_is_compiled():
        value, _ = step(*split(model), X[:4, :4])
    assert value == loss([v.value for v in model.trainable_variables], X[:4, :4])
    compile = lm.Compile(reads, X[:4, :4]).of(lambda model: split(model)[:0])
    with pytest.raises(lm.LazyModelError, match=r"/kernel, which is none of its arguments"):
        lm.build_abstract(plain).materialize(compile=compile)


@pytest.mark.parametrize(
    ("options", "compile", "message"),
    [
        ({}, lm.Compile("generate", batch=1), "has no generate"),
        ({"run_eagerly": True}, lm.Compile("train", batch=1), "run_eagerly=True"),
        ({"jit_compile": False}, lm.Compile("predict", batch=1), "jit_compile=False"),
        (None, lm.Compile("train"), "is not compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused_first(options: Any, compile: lm.Compile, message: str) -> None:
    abstract = lm.build_abstract(plain if options is None else lambda: make_model(**options))
    with pytest.raises(lm.LazyModelError, match=message):
        abstract.materialize(compile=compile)
    abstract.materialize()
