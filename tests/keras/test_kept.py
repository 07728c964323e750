"""Programs of Keras models that are kept: recognized by the model's parts, without tracing, or else by a trace."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
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
from tests.conftest import child_environment

from .models import bits, causal_lm

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*vocabulary.spm:ResourceWarning")  # KerasHub's

X, Y = np.random.default_rng(0).standard_normal((16, 16), "float32"), np.arange(16) % 8


class Own(keras.layers.Dense):
    """A layer that no version of Keras decides."""

    def call(self, x: Any, training: bool = False) -> Any:
        return super().call(x, training) * 2.0


def make_model(cls: type = keras.layers.Dense, rate: float = 0.1) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [cls(8, name="up"), keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(rate, name="drop")]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(8, name="down")], name="model")
    model.compile(keras.optimizers.AdamW(weight_decay=0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    return model


def used(model: keras.Model) -> list[Any]:
    predicted = model.predict(X, batch_size=8, verbose=0)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [
        predicted,
        *history.values(),
        *(bits(variable) for variable in [*model.variables, *model.optimizer.variables]),
    ]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def start(keep: Path, make: Any = make_model, mesh: Mesh | None = None) -> tuple[Any, list[str], list[str]]:
    """What `used` returns after a load as in a new process, the report's words, and what was done with the functions
    of the model while it was loaded."""
    keras.utils.clear_session()
    jax.clear_caches()
    reports: list[lm.LoadReport] = []
    compiles = [lm.Compile("train", batch=8, keep=keep), lm.Compile("predict", batch=8, keep=keep)]
    with contextlib.nullcontext() if mesh is None else lk.distribution(mesh, "batch").scope():
        abstract = lm.build_abstract(make)
        abstract = abstract if mesh is None else abstract.shard(mesh, {".*/kernel": P(None, "model"), ".*": P()})
        with compile_events() as events:
            model = abstract.materialize(compile=compiles, report=reports.append)
        donated = model.layers[0].kernel.value
        with compile_events() as later:
            results = used(model)
        assert later == []
        assert donated.is_deleted()
        with compile_events() as later:
            assert model.predict(X[:4], verbose=0).shape == (4, 8)
        assert later, "another batch is compiled"
    return results, [each.cache for each in reports[0].compiled], [event for event in events if "_step" in event]


@pytest.mark.parametrize("distributed", [False, True])
def test_nothing_is_traced_and_results_are_equal(tmp_path: Path, mesh42: Mesh, distributed: bool) -> None:
    mesh = mesh42 if distributed else None
    expected, caches, _ = start(tmp_path, mesh=mesh)
    assert caches == ["kept: no program yet"] * 2
    found, caches, events = start(tmp_path, mesh=mesh)
    assert (caches, events) == (["kept: hit"] * 2, [])
    assert_equal(found, expected)
    if not distributed:
        assert_equal(found, used(make_model()))


def replaced(self: Any, inputs: Any, training: Any = None) -> Any:
    return 2.0 * (inputs @ self.kernel + self.bias)


def with_lambda() -> keras.Model:
    model = make_model()
    model.layers[0].activation = lambda x: 3.0 * x
    return model


def regularized() -> keras.Model:
    model = make_model()
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.5)
    return model


@pytest.mark.parametrize(
    ("make", "patched", "traced"),
    [
        (lambda: make_model(rate=0.5), {}, False),
        (regularized, {}, False),
        (lambda: make_model(Own), {}, True),
        (with_lambda, {}, True),
        (make_model, {"call": replaced}, True),
    ],
    ids=["attribute", "regularizer", "class", "function", "method"],
)
def test_what_differs_is_compiled(tmp_path: Path, make: Any, patched: Any, traced: bool) -> None:
    start(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(keras.layers.Dense, name, value)
        expected, caches, _ = start(tmp_path, make)
        assert caches[0] == "kept: the function changed"
        found, caches, events = start(tmp_path, make)
        assert caches == ["kept: hit"] * 2
        assert {event.split()[0] for event in events} == ({"trace"} if traced else set())
        assert_equal(found, expected)


CODE = """
import sys, lazymodel_keras as lk
lk.leave_out_tensorflow()
from tests.keras.test_kept import generated
print(generated(*sys.argv[1:]))
"""


def generated(preset: str, keep: str, sampler: str = "greedy") -> tuple[str, str, list[str]]:
    """The report's word, the text, and what was traced and compiled for a text of a preset."""

    def make() -> Any:
        task = keras_hub.models.CausalLM.from_preset(preset)
        task.compile(sampler=sampler)
        return task

    reports: list[lm.LoadReport] = []
    compile = lm.Compile("generate", batch=1, sequence=10, keep=keep)
    with compile_events() as events:
        task = lm.build_abstract(make).materialize(compile=compile, report=reports.append)
        text = task.generate("the quick", max_length=10)
    return reports[0].compiled[0].cache, text, [event for event in events if "generate" in event]


def test_a_text_in_another_process(tmp_path: Path) -> None:
    preset = causal_lm(1)
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def child(*arguments: str) -> tuple[str, str, list[str]]:
        command = [sys.executable, "-c", CODE, preset, str(tmp_path), *arguments]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return eval(printed.splitlines()[-1])

    cache, text, events = child()
    assert cache == "kept: no program yet"
    assert events
    assert child() == ("kept: hit", text, [])
    assert generated(preset, str(tmp_path / "here"), "top_p")[0] == "kept: no program yet"
    assert generated(preset, str(tmp_path / "here"), "top_k")[0] == "kept: the function changed"
