"""`build_abstract`, and its result: the model as data with a method for every step.

Each of these methods is written and documented once, in the package of its stage, and assigned here.
"""

from __future__ import annotations

import dataclasses
import reprlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.garbage import no_full_collections
from lazymodel._abstract.variable import (
    AbstractVariable,
    device_nbytes,
    resident_nbytes,
    sharding_text,
    stays_on_host,
)
from lazymodel._errors import LazyModelError
from lazymodel._extras import ExtraMethod
from lazymodel._materialize.materialize import materialize, stream
from lazymodel._plan.make import plan
from lazymodel._sharding.shard import explain, shard
from lazymodel._show.progress import Span
from lazymodel._show.table import Column, Table, Tabled, shape_text
from lazymodel._show.text import format_bytes, plural
from lazymodel._trace.errors import watched
from lazymodel._trace.function import trace_function
from lazymodel._transform import lora, quantize, reinitialize, rekey, with_optimizer

if TYPE_CHECKING:
    from lazymodel.extras.run.run import run
else:
    run = ExtraMethod()

T = TypeVar("T")
BuiltT = TypeVar("BuiltT", covariant=True)
Arguments = ParamSpec("Arguments")


def _built(method: Callable[Concatenate[Any, Arguments], Any]) -> Callable[Concatenate[AbstractModel[T], Arguments], T]:
    """The method; for type checkers, it returns the built object."""
    return method


def _with_state(
    method: Callable[Concatenate[Any, Arguments], Any],
) -> Callable[Concatenate[AbstractModel[T], Arguments], AbstractModel[tuple[T, Any]]]:
    """The method; for type checkers, its result builds a pair."""
    return method


class _Initializes(Protocol):
    """An object with an init function: a Linen module, a Haiku pair."""

    @property
    def init(self) -> Callable[..., Any]: ...

    @property
    def apply(self) -> Callable[..., Any]: ...


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AbstractModel(Tabled, ModelSpec, Generic[BuiltT]):
    """A model of shapes and dtypes, an immutable mapping of paths to `AbstractVariable`.

    Made by `lazymodel.build_abstract`, or by an integration's own functions; its attributes are those of `ModelSpec`.
    Every step returns another model, and changes nothing. An `AbstractModel[T]` materializes to a `T`.

    Example:
        >>> abstract
        init: 2 variables, 32,768 parameters, 128.00 KiB
        in all rows: dtype: float32; origin: normal
        variable     count  shape          bytes
        ────────────────────────────────────────
        down/kernel      1  (256, 64)  64.00 KiB
        up/kernel        1  (64, 256)  64.00 KiB
    """

    quantize = quantize
    lora = lora
    with_optimizer = _with_state(with_optimizer)
    reinitialize = reinitialize
    rekey = rekey
    shard = shard
    explain = explain
    plan = plan
    stream = stream
    materialize = _built(materialize)
    run = run

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """The model with these fields."""
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return spec if isinstance(spec, cls) else cls(**fields)

    def table(self) -> Table:
        """A row for variables that differ only in numbers of their paths; the largest ones if there are too many."""
        sharded = any(variable.sharding is not None for variable in self.values())
        counts = plural(len(self), "variable"), plural(self.num_parameters, "parameter"), format_bytes(self.nbytes)
        title = f"{self.name}: {', '.join(counts)}"
        if sharded:
            held = device_nbytes(self.values())
            anywhere = sum(resident_nbytes(variable) for variable in self.values() if variable.sharding is None)
            title += f", {format_bytes(max(held.values()) + anywhere)} per device on {plural(len(held), 'device')}"

        def cells(variable: AbstractVariable) -> tuple[Any, ...]:
            first = (variable.path, shape_text(variable.shape), variable.dtype.name)
            if not sharded:
                return *first, variable.nbytes, variable.origin
            spec = "on the host" if stays_on_host(variable) else sharding_text(variable.sharding)
            return *first, spec, resident_nbytes(variable), variable.origin

        placed = (Column("spec"), Column.nbytes("bytes/device")) if sharded else (Column.nbytes("bytes"),)
        columns = (Column.names("variable"), Column("shape"), Column("dtype"), *placed, Column.notes("origin"))
        return Table(title, columns, [*map(cells, self.values())])


@overload
def build_abstract(build: _Initializes, /, *args: Any, **kwargs: Any) -> AbstractModel[Any]: ...
@overload
def build_abstract(build: Callable[..., T], /, *args: Any, **kwargs: Any) -> AbstractModel[T]: ...
@no_full_collections()
def build_abstract(build: Any, /, *args: Any, **kwargs: Any) -> AbstractModel[Any]:
    """Builds a model abstractly: shapes and dtypes, nothing allocated, within seconds for any size.

    Args:
        build: A JAX function that returns any pytree of arrays; a Flax NNX module class or factory, a Flax Linen
            module; a Haiku `Transformed` pair or another object with `init` and `apply`, whose `init` is run; a
            Keras class, factory or bound `from_preset` method.
        *args: Its arguments. For JAX functions, `jax.Array`s (PRNG keys above all) are run-time inputs of the init
            programs; everything else, NumPy arrays too, is a constant of the build.
        **kwargs: Its keyword arguments.

    Returns:
        The abstract model, for `shard`, `plan` and `materialize`.

    Raises:
        TraceError: The function cannot be traced with shapes alone; the message names the operation. Or its result has
            arrays in objects that are not pytrees, or no arrays where it should; the message names the place.
        LazyModelError: `build` does not build a model.

    Warns:
        LazyModelWarning: The function left traced arrays in an argument, a global or a closure.

    Example:
        >>> abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (8, 4))}, jax.random.key(0))
        >>> abstract["w"].shape
        (8, 4)
    """
    if isinstance(build, str):
        raise LazyModelError(
            f"build_abstract takes something that builds a model, then its arguments; got the string {build!r}. "
            "Pass the class or function itself, not its name"
        )
    start = time.perf_counter()
    spec = _build(build, args, kwargs)
    return AbstractModel.of(spec if spec.spent else dataclasses.replace(spec, spent=(Span.since(start, "build"),)))


def _build(build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
    for adapter in adapters():
        if adapter.matches(build, args, kwargs):
            return adapter.build_abstract(build, args, kwargs)
    function, name = _init_function(build)
    with watched(function, args, kwargs):
        return trace_function(function, args, kwargs, name=name)


def _init_function(build: Any) -> tuple[Callable[..., Any], str | None]:
    """The function that builds a model that no adapter knows, and its name for messages; None for its own name."""
    if not isinstance(build, type) and callable(init := getattr(build, "init", None)):
        if callable(getattr(build, "apply", None)):  # as in Haiku
            return init, type(build).__name__
        if callable(getattr(build, "update", None)):  # as in Optax
            raise LazyModelError(
                "build_abstract got an optimizer: build the model, and `abstract.with_optimizer(optimizer)` adds its "
                "state; or pass `optimizer.init` and parameters"
            )
    if callable(build):
        return build, None
    hint = ". Pass the function that makes it, not what it returns"
    if isinstance(build, tuple) and callable(next(iter(cast("tuple[Any, ...]", build)), None)):
        hint = "; for an (init, apply) pair pass `init`, the first of them"
    what = "build_abstract takes something that builds a model, then its arguments"
    raise LazyModelError(f"{what}; got {type(build).__name__} {reprlib.repr(build)}{hint}")
