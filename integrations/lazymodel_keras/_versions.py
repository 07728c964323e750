"""The oldest Keras and KerasHub that this package works with, checked before anything of theirs is used.

Older ones lack the private parts in `_upstream`, and would fail in ways that say nothing to whoever has them installed.
"""

from __future__ import annotations

import re
from importlib import metadata

from lazymodel import LazyModelError

try:
    import keras
except ModuleNotFoundError as error:
    text = f"lazymodel_keras needs {error.name}, which is not installed: pip install 'lazymodel[keras]'"
    raise ModuleNotFoundError(text, name=error.name) from error

# As declared in `pyproject.toml`; the oldest with which the tests pass.
OLDEST_KERAS = "3.13.2"  # earlier ones read sharded weight files in another way
OLDEST_KERAS_HUB = "0.26"


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a release; what comes after them, `rc1` or `.dev2026`, does not count."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _require(name: str, found: str, oldest: str) -> None:
    if _parts(found) < _parts(oldest):
        raise LazyModelError(
            f"lazymodel needs {name} {oldest} or newer; this is {found}. Upgrade it: pip install -U keras keras-hub"
        )


_require("Keras", keras.__version__, OLDEST_KERAS)
try:
    # Importing KerasHub takes its time, and plain Keras models do without it.
    _keras_hub = metadata.version("keras-hub")
except metadata.PackageNotFoundError:
    pass
else:
    _require("KerasHub", _keras_hub, OLDEST_KERAS_HUB)
