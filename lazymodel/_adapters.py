"""Finding the adapter for what a user builds: a table, looked at only once its framework is imported.

An adapter turns one framework's way of building into an `AbstractModel`. The core imports none of them: an entry of
the table is loaded only when its framework is already in `sys.modules`, since nobody can hand over a Keras class
without having imported Keras. Adapters that live elsewhere register in the entry-point group `lazymodel.adapters`
under the name of their framework's top-level module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from lazymodel._abstract import AbstractModel
from lazymodel._errors import LazyModelError

# Framework module → (the module that exposes `adapter`, the extra that installs what it needs).
_KNOWN = {"keras": "lazymodel_keras", "flax": "lazymodel_flax"}


class Adapter(Protocol):
    """What a framework's integration provides as its module-level `adapter`."""

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this framework builds what `build` is or returns."""
        ...

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractModel:
        """Builds abstractly what `build(*args, **kwargs)` would build."""
        ...

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """A built model's arrays, under the paths that `build_abstract` gives; None for what is not the framework's."""
        ...


def build_abstract(build: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AbstractModel:
    """Builds a model abstractly: shapes and dtypes, nothing allocated, within seconds for any size.

    Args:
        build: A JAX function that returns any pytree of arrays; a Flax NNX module class or factory, a Flax Linen
            module; a Haiku `Transformed` pair or another object with `init` and `apply`, of which `init` is run; a
            Keras class, factory or bound `from_preset` method.
        *args: Its arguments. For JAX functions, `jax.Array`s (PRNG keys first of all) are run-time inputs of the init
            programs; everything else, NumPy arrays too, is a constant of the build.
        **kwargs: Its keyword arguments.

    Returns:
        The abstract model; `shard`, `plan` and `materialize` take it from there.

    Raises:
        TraceError: The function cannot be traced with shapes alone; the message names the operation. Or what it returns
            has arrays in objects that are no pytrees, or no arrays where it should; the message names the place.
        LazyModelError: `build` is nothing that builds a model.

    Warns:
        LazyModelWarning: The function left traced arrays in an argument, a global or a closure.

    Example:
        >>> abstract = build_abstract(lambda key: {"w": jax.random.normal(key, (8, 4))}, jax.random.key(0))
        >>> abstract["w"].shape
        (8, 4)
    """
    if isinstance(build, str):
        raise LazyModelError(
            f"build_abstract takes something that builds a model, then its arguments; got the string {build!r}. "
            "Pass the class or function itself, not its name"
        )
    for adapter in _adapters():
        if adapter.matches(build, args, kwargs):
            return adapter.build_abstract(build, args, kwargs)
    from lazymodel._escaped import watched
    from lazymodel._trace import trace_function

    function, name = _init_function(build)
    with watched(function, args, kwargs):
        return trace_function(function, args, kwargs, name=name)


def _init_function(build: Any) -> tuple[Callable[..., Any], str | None]:
    """What is run to build a model that no adapter knows, and what to call it; None for its own name.

    Raises:
        LazyModelError: Nothing of it can be.
    """
    if not isinstance(build, type) and callable(init := getattr(build, "init", None)):
        if callable(getattr(build, "apply", None)):  # as Haiku has it
            return init, type(build).__name__
        if callable(getattr(build, "update", None)):  # as Optax has it
            raise LazyModelError(
                "build_abstract got an optimizer: build the model, and `abstract.with_optimizer(optimizer)` adds its "
                "state; or pass `optimizer.init` and parameters"
            )
    if callable(build):
        return build, None
    mend = ""
    if isinstance(build, tuple) and callable(next(iter(cast("tuple[Any, ...]", build)), None)):
        mend = "; of an (init, apply) pair pass `init`, the first of them"
    raise LazyModelError(
        f"build_abstract takes something that builds a model, then its arguments; got {type(build).__name__} "
        f"{build!r}{mend}"
    )


def model_arrays(model: Any) -> dict[str, Any] | None:
    """A model's arrays by path, where it is one of a framework that has been imported; None for anything else."""
    for adapter in _adapters():
        find = getattr(adapter, "arrays", None)  # an adapter from elsewhere may be older
        if find is not None and (found := find(model)) is not None:
            return found
    return None


def named(framework: str) -> Any:
    """The adapter of a framework, which is imported for it; that of Keras has a `from_config` besides.

    Raises:
        LazyModelError: There is none, or what it needs is not installed.
    """
    modules = dict((*_KNOWN.items(), *_registered()))
    if framework not in modules:
        raise LazyModelError(f"there is no adapter for {framework!r}; known are {', '.join(modules)}")
    try:
        return importlib.import_module(modules[framework]).adapter
    except ModuleNotFoundError as error:
        raise LazyModelError(
            f"the adapter for {framework} needs {error.name}, which is not installed: "
            f"pip install 'lazymodel[{framework}]'"
        ) from error


def _adapters() -> Iterator[Adapter]:
    """The adapters whose framework has been imported."""
    for framework, module in (*_KNOWN.items(), *_registered()):
        if framework in sys.modules:
            yield importlib.import_module(module).adapter


@functools.cache
def _registered() -> tuple[tuple[str, str], ...]:
    found = importlib.metadata.entry_points(group="lazymodel.adapters")
    return tuple((entry.name, entry.value) for entry in found if entry.name not in _KNOWN)
