"""The oldest Keras and KerasHub that this package works with, checked before anything of them is used.

In older versions private parts that `_upstream` uses are missing, and errors would not show the reason.
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
OLDEST_KERAS = "3.13.2"  # earlier ones read sharded weight files differently
OLDEST_KERAS_HUB = "0.26"


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a release; suffixes such as `rc1` or `.dev2026` do not count."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _require(name: str, found: str, oldest: str) -> None:
    if _parts(found) < _parts(oldest):
        raise LazyModelError(
            f"lazymodel needs {name} {oldest} or newer; this is {found}. Upgrade it: pip install -U keras keras-hub"
        )


_require("Keras", keras.__version__, OLDEST_KERAS)
try:
    # Importing KerasHub is slow, and plain Keras models do not need it.
    _keras_hub = metadata.version("keras-hub")
except metadata.PackageNotFoundError:
    pass
else:
    _require("KerasHub", _keras_hub, OLDEST_KERAS_HUB)
