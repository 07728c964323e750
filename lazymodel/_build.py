"""`build_abstract`: whatever builds a model, handed to the adapter of its framework, or traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lazymodel._abstract import AbstractModel
from lazymodel._adapters import adapters
from lazymodel._errors import LazyModelError
from lazymodel._escaped import watched
from lazymodel._trace_function import trace_function


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
    for adapter in adapters():
        if adapter.matches(build, args, kwargs):
            return adapter.build_abstract(build, args, kwargs)
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
