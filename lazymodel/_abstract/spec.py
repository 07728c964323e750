"""The abstract model as data: its variables and the sources of their values; nothing is allocated.

Every stage takes a `ModelSpec` and returns one of the same class with other fields. It knows a framework only through
the `Framework` of an adapter, and decides nothing itself.
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
    """The variables that a model's optimizer trains."""

    paths: tuple[str, ...]  # of the parameters
    model: ModelSpec | None = None  # the model without the optimizer; None if the user's own object holds both
    memory_kind: str | None = None  # kind of memory of the parameters' state; None is the devices' own memory


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelSpec(Mapping[str, AbstractVariable]):
    """The model as data, without methods for further steps.

    Attributes:
        variables: Path to variable, in the model's own order.
        recipes: How to compute the variables that come from an initializer; each path in at most one recipe.
        sources: Path to the value of variables that got one while building: a constant, or a tensor of the checkpoint
            that the model was built with.
        framework: The framework's part: builds the user's object from finished arrays, and has further steps.
        programs: Compiled init programs, shared by every model derived from the same `build_abstract`.
        name: The model's name, for tables.
        unused: Tensors of the checkpoint that the model was built with and that no variable uses, for the load report.
        mismatched: Tensors that were left out because of their shapes, likewise.
        sharding_notes: Notes of `shard` on the rules.
        derived: How to compute variables that depend on the values of others, once these exist.
        optimized: The variables that the model's optimizer trains; None without one.
        spent: Time spent on making it: building, sharding.
        aliases: Other paths of variables that occur in several places, as tied weights do → the variable's path.
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
            "that builds it and its arguments, and call build_abstract after unpickling"
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
        """Bytes of all variables, each counted once, however many devices hold it."""
        return sum(variable.nbytes for variable in self.values())

    @property
    def num_parameters(self) -> int:
        """Number of elements of the model's own floating-point or complex variables: without counters, masks, keys."""
        own = (variable for variable in self.values() if variable.follows is None)
        return sum(variable.size for variable in own if jax.numpy.issubdtype(variable.dtype, np.inexact))

    def with_variables(self, variables: Mapping[str, AbstractVariable]) -> Self:
        """The same model with other variables (same paths), such as resharded ones."""
        return dataclasses.replace(self, variables=variables)


AnyModel = TypeVar("AnyModel", bound=ModelSpec)  # a step returns a model of the same class
