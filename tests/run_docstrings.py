"""Runs the examples of a package's docstrings: `run_docstrings.py PACKAGE`, in an empty folder, on eight devices.

The package's own docstring runs first, and every other goes on from the names that it leaves.
"""

import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import lazymodel as lm

FLAGS = doctest.ELLIPSIS | doctest.REPORT_ONLY_FIRST_FAILURE
OF_LAYERS = ("quantize", "lora")  # verbs that need a framework's layers; Keras' examples show them


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


def main(package: str, *skipped: str) -> int:
    module = importlib.import_module(package)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS)
    first = doctest.DocTestParser().get_doctest(module.__doc__ or "", {}, package, module.__file__, 0)
    runner.run(first, clear_globs=False)
    bare: list[str] = []
    for name, value in public(module):
        if name in skipped:
            continue
        tests = [test for test in finder.find(value, name, extraglobs=first.globs) if test.examples]
        if name not in [test.name for test in tests]:
            bare.append(name)
        for test in tests:
            test.globs = dict(first.globs)
            runner.run(test)
    if bare:
        print("without an example:", *bare)
    return 1 if bare or runner.failures or not first.examples else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
