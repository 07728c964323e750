"""The abstract model as data: its variables, how each comes to be, and nothing allocated.

Every stage takes a `ModelSpec` and returns one of the same class with other fields; it knows no framework but by the
`Framework` that an adapter gave it, and decides nothing itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Self, TypeVar

import jax
import numpy as np

from lazymodel._abstract.framework import Derived, Framework
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._programs.programs import InitRecipe, ProgramCache
from lazymodel._show.text import closest
from lazymodel._show.timeline import Span
from lazymodel._tensors.stored import MismatchedTensor, StoredTensor


@dataclasses.dataclass(frozen=True)
class Optimized:
    """What an optimizer that a model has trains."""

    paths: tuple[str, ...]  # of the parameters
    model: ModelSpec | None = None  # as it was without the optimizer; None where the user's own object holds both
    memory_kind: str | None = None  # where the parameters' state lies; None is the devices' own memory


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelSpec(Mapping[str, AbstractVariable]):
    """The model as data: what is known of it, with no step to take.

    Attributes:
        variables: Path to variable, in the model's own order.
        recipes: How to compute the variables that come from an initializer; each path in at most one recipe.
        sources: Path to the value of variables that were given one while building: a constant, or a tensor of the
            checkpoint that the model was built with.
        framework: What the model's framework does with it: the user's object of finished arrays, and further steps.
        programs: Compiled init programs, shared by every model derived from the same `build_abstract`.
        name: What the model calls itself, for tables.
        unused: Tensors of the checkpoint that the model was built with which no variable takes, for the load report.
        mismatched: Those that were left out for their shapes, likewise.
        sharding_notes: What `shard` had to say of the rules besides what it says of each variable.
        derived: How to compute the variables that depend on the values of others, once these are there.
        optimized: What the optimizer that the model has trains; None without one.
        spent: What making it took: building, sharding.
        aliases: Other paths of variables that occur in several places, as tied weights do, to the variable's path.
    """

    variables: Mapping[str, AbstractVariable]
    recipes: tuple[InitRecipe, ...]
    sources: Mapping[str, Any]
    framework: Framework
    programs: ProgramCache = dataclasses.field(default_factory=ProgramCache)
    name: str = "model"
    unused: tuple[StoredTensor, ...] = ()
    mismatched: tuple[MismatchedTensor, ...] = ()
    sharding_notes: tuple[str, ...] = ()
    derived: Derived | None = None
    optimized: Optimized | None = None
    spent: tuple[Span, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", MappingProxyType(dict(self.variables)))
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "aliases", MappingProxyType(dict(self.aliases)))
        known = {path for recipe in self.recipes for path in recipe.paths} | set(self.sources)
        known.update(() if self.derived is None else self.derived.paths)
        if unknown := [path for path in self.variables if path not in known]:
            raise LazyModelError(f"no way to initialize {unknown[0]!r} ({len(unknown)} such variables); this is a bug")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise LazyModelError(
            f"{self.name} is an abstract model, which holds traced programs and cannot be pickled. Pickle the function "
            "that builds it and its arguments, and call build_abstract where they arrive"
        )

    def __getitem__(self, path: str) -> AbstractVariable:
        try:
            return self.variables[path]
        except KeyError:
            raise KeyError(f"{path!r} is not a variable of {self.name}{closest(str(path), self.variables)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    @property
    def tree(self) -> Any:
        """The model as a pytree of `jax.ShapeDtypeStruct` with shardings, for `jax.jit(...).lower(tree)`."""
        return self.framework.structure({path: variable.struct for path, variable in self.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all variables, each counted once however many devices hold it."""
        return sum(variable.nbytes for variable in self.values())

    @property
    def num_parameters(self) -> int:
        """Number of elements of the model's own floating-point or complex variables: no counters, masks, keys."""
        own = (variable for variable in self.values() if variable.follows is None)
        return sum(variable.size for variable in own if jax.numpy.issubdtype(variable.dtype, np.inexact))

    def with_variables(self, variables: Mapping[str, AbstractVariable]) -> Self:
        """The same model with other variables (same paths), such as resharded ones."""
        return dataclasses.replace(self, variables=variables)


AnyModel = TypeVar("AnyModel", bound=ModelSpec)  # a step returns a model of the class that it was given
