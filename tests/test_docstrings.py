"""Everything public has an example in its docstring, and the examples run, in an empty folder.

The package's own docstring runs first, and every other goes on from the names that it leaves.
"""

import doctest
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lazymodel as lm
from tests.conftest import HAS_LIBTPU
from tests.large import mostly_large

FLAGS = doctest.ELLIPSIS | doctest.REPORT_ONLY_FIRST_FAILURE
OF_LAYERS = ("quantize", "lora")  # verbs that need a framework's layers; Keras' examples show them
PACKAGES = {"lazymodel": ("optax",), "lazymodel_keras": ("keras", "keras_hub"), "lazymodel_flax": ("flax",)}
# Examples of most of a second and more.
LARGE = {
    "lazymodel": "coordinate_check initializers.orthogonal initializers.stacked path_key pin_batch reshard topology",
    "lazymodel_keras": """
        AbstractModel.lora AbstractModel.quantize TrainingCheckpoint deferred distribution enable_lora
        leave_out_tensorflow load_model restore save_preset training_state
    """,
    "lazymodel_flax": "tunix.load_and_create_model",
}


def public(package: Any) -> Iterator[tuple[str, Any]]:
    """What users call or annotate with: exported names, functions of exported modules, and the verbs of a model."""
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.ismodule(value):
            inner = [each for each in value.__all__ if each not in package.__all__]
            yield from ((f"{name}.{each}", getattr(value, each)) for each in inner)
        else:
            yield name, value if callable(value) else type(value)
    for name in list(vars(lm.AbstractModel)):
        verb = getattr(lm.AbstractModel, name)
        is_verb = inspect.isfunction(verb) and name[0] != "_" and verb.__module__ != lm.AbstractModel.__module__
        if is_verb and package.__name__ == ("lazymodel_keras" if name in OF_LAYERS else "lazymodel"):
            yield f"AbstractModel.{name}", verb


@pytest.mark.usefixtures("settings_come_back")
@pytest.mark.parametrize("large", mostly_large([False, True], [False]))
@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in PACKAGES[package]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    skipped = [] if HAS_LIBTPU else ["topology"]
    if package == "lazymodel_keras":
        import keras

        if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
            skipped += ["TrainingCheckpoint", "training_state", "restore"]
    chosen = set(LARGE[package].split())
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(package)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS)
    first = doctest.DocTestParser().get_doctest(module.__doc__ or "", {}, package, module.__file__, 0)
    assert first.examples
    bare: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        runner.run(first, clear_globs=False)
        for name, value in public(module):
            if name in skipped or (name in chosen) != large:
                continue
            tests = [test for test in finder.find(value, name, extraglobs=first.globs) if test.examples]
            if name not in [test.name for test in tests]:
                bare.append(name)
            for test in tests:
                test.globs = dict(first.globs)
                runner.run(test)
    assert chosen <= {name for name, _ in public(module)}
    assert not bare, "without an example"
    assert not runner.failures, "what was printed"
