"""The errors and warnings that lazymodel raises.

    LazyModelError
    ├── TraceError         an init function that cannot be traced
    ├── ShardingError      rules or meshes that do not fit the model
    ├── CheckpointError    missing, corrupt, hostile or mismatching weights
    ├── DoesNotFitError    a plan that exceeds the device's memory
    └── SyncError          weights that moved into a sampler in part, or not at all
    LazyModelWarning       code that works, but is probably a mistake

Every message names its subject (variable path, file), what was expected, what was found, and the fix.
"""

import importlib
import re
import sys
import warnings
from types import FrameType
from typing import Any

_OURS = ("lazymodel", "lazymodel_flax", "lazymodel_keras")
# Modules possible between a user's line and ours: frameworks that call us, `with` statements, decorated functions.
_BETWEEN = frozenset(
    (*_OURS, "flax", "jax", "jaxlib", "keras", "keras_hub", "numpy", "optax", "orbax", "contextlib", "functools")
)
_WORD, _LINE = 400, 4000  # characters; paths are shorter, while a file may give a tensor a name of megabytes


def shortened(text: str) -> str:
    """The text, without the middle of its longest words and lines: messages quote contents of files."""
    lines = (re.sub(r"\S+", lambda word: _ends(word[0], _WORD), line) for line in text.split("\n"))
    return "\n".join(_ends(line, _LINE) for line in lines)


def _ends(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


class LazyModelError(Exception):
    """Base class of every error that lazymodel raises on purpose.

    Example:
        >>> try:
        ...     model = sharded.materialize(lm.open_checkpoint("absent.safetensors"))
        ... except lm.LazyModelError as error:
        ...     print(error)
        there is no checkpoint at absent.safetensors: No such file or directory
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message)))


class TraceError(LazyModelError):
    """An init function cannot be traced abstractly; names the operation and how to fix it.

    Example:
        >>> lm.build_abstract(lambda key: np.asarray(jax.random.normal(key, (8,))), jax.random.key(0))
        Traceback (most recent call last):
        lazymodel.TraceError: the init function needs the value of an array, and tracing has only its shape ...
    """


class ShardingError(LazyModelError):
    """A sharding rule does not fit: unknown axis, indivisible dimension, nothing matched, mesh too small.

    Example:
        >>> abstract.shard(mesh, {"up/kernl": P("model")})
        Traceback (most recent call last):
        lazymodel.ShardingError: rule 'up/kernl' matches no variable; closest: 'up/kernel', ...
    """


class CheckpointError(LazyModelError):
    """A checkpoint is missing, corrupt or hostile, or its tensors do not match the model's variables.

    Example:
        >>> sharded.materialize({"up/kernel": np.zeros((64, 128), "float32")}, initialize="missing")
        Traceback (most recent call last):
        lazymodel.CheckpointError: ...'up/kernel'... expected shape (64, 256), found (64, 128)...
    """


class DoesNotFitError(LazyModelError):
    """A plan needs more memory than a device has; names the largest variables.

    Attributes:
        needed_nbytes: Bytes that one device would need, if known.
        limit_nbytes: Bytes that it has, if known.

    Example:
        >>> sharded.plan().check("8KiB")
        Traceback (most recent call last):
        lazymodel.DoesNotFitError: init needs ... and a device has 8.00 KiB, ... too little. Largest on a device: ...
    """

    def __init__(self, message: str, *, needed_nbytes: int | None = None, limit_nbytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_nbytes = needed_nbytes
        self.limit_nbytes = limit_nbytes


class SyncError(LazyModelError):
    """Moving weights into a sampler failed; names the variables that are new.

    Attributes:
        sampler: The sampler with what is new and what is as before, to pass as `into` of the next call; None if it is
            unchanged, and for a `SyncClient`.

    Example:
        >>> try:
        ...     sampler = lm.Sync(sharded, sharded)(model, into=sharded.materialize())
        ... except lm.SyncError as error:
        ...     sampler = error.sampler
    """

    def __init__(self, message: str, sampler: Any = None) -> None:
        super().__init__(message)
        self.sampler = sampler


class LazyModelWarning(UserWarning):
    """Something that works but is likely a mistake, such as a large variable that no rule shards.

    Example:
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", lm.LazyModelWarning)
        ...     lm.build_abstract(jax.numpy.zeros, (1024, 512)).shard(mesh, {})
        Traceback (most recent call last):
        lazymodel.LazyModelWarning: 1 variables of at least 1.00 MiB match no sharding rule and are replicated ...
    """


_ERRORS = LazyModelError, TraceError, ShardingError, CheckpointError, DoesNotFitError, SyncError, LazyModelWarning
for _public in _ERRORS:
    _public.__module__ = "lazymodel"  # the name that users import, and see in tracebacks


def is_library(frame: FrameType) -> bool:
    """Returns True for a line of this repository or of a framework, which is not the user's own."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN


def required(module: str, what: str, package: str, error: type[LazyModelError] = LazyModelError) -> Any:
    """Imports a module of a package that may be missing; then raises an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        name = (missing.name or module).partition(".")[0]  # the package, or one that it needs
        raise error(f"{what} needs {name}, which is not installed: pip install {package}") from missing
    except ImportError as broken:
        raise error(f"{what} needs {module}, which cannot be imported ({broken}): pip install {package}") from broken


def warn(message: str, category: type[Warning] = LazyModelWarning) -> None:
    """Warns about the user's own line: the first one outside of this repository and the frameworks.

    Deprecated features warn with `DeprecationWarning`, and name the replacement.
    """
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # documented, and 100 times as fast as inspect
    while frame.f_back is not None and is_library(frame):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__"))
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(shortened(message), category, frame.f_code.co_filename, frame.f_lineno, module, seen)
