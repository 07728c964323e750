"""The abstract model as data, and the interface between it and a framework; nothing is allocated.

Every stage takes a `ModelSpec` and returns one of the same class with other fields. It knows a framework only through
the `Framework` of an adapter: Flax and Keras derive theirs from the one here, which is for plain pytrees. A new
framework begins in `adapters.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, Self, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._abstract.pairs import LoraPair, named_pairs
from lazymodel._abstract.variable import AbstractVariable, automatic, on_device, path_text
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import PROGRAMS, without_mesh
from lazymodel._programs.programs import InitRecipe, ProgramCache
from lazymodel._show.progress import Span
from lazymodel._show.text import closest
from lazymodel._tensors.stored import MismatchedTensor, StoredTensor


class _Outline(jax.Array):
    """A `jax.ShapeDtypeStruct` in place of an array to lower with, committed to its sharding if it has one.

    A struct itself is not a `jax.Array`: Equinox' `filter_jit` and `partition` would treat it as static.
    """

    def __init__(self, struct: jax.ShapeDtypeStruct) -> None:
        self._struct = struct

    shape: Any = property(lambda self: self._struct.shape)
    dtype: Any = property(lambda self: self._struct.dtype)
    ndim: Any = property(lambda self: self._struct.ndim)
    size: Any = property(lambda self: self._struct.size)
    weak_type: Any = property(lambda self: self._struct.weak_type)
    committed: Any = property(lambda self: self._struct.sharding is not None)
    sharding: Any = property(lambda self: self._struct.sharding)
    format: Any = property(lambda self: self._struct.format)

    def __repr__(self) -> str:
        return f"Outline({self._struct})"


class Optimizer(Protocol):
    """An optimizer: an Optax `GradientTransformation`, or another object with its `init`."""

    @property
    def init(self) -> Callable[[Any], Any]:
        """Takes the parameters and returns the state."""
        ...


@dataclasses.dataclass(frozen=True)
class Training:
    """The start of an optimizer, in the form of a framework."""

    state: Any  # the optimizer's state, any pytree
    finish: Callable[[Any, Any], Any]  # (finished model, state) → the result of `materialize`
    path_of: Callable[[Sequence[Any]], str]  # names a leaf of the state from its `jax.tree_util` key path
    parameters: Mapping[str, str]  # path in a tree of parameters, named by `path_of` → path of the variable


@dataclasses.dataclass(frozen=True)
class Derived:
    """State that is computed from the values of parameters, and so after them, loaded or initialized."""

    paths: tuple[str, ...]
    parameters: tuple[str, ...]  # the paths of the parameters that it needs
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # path → parameter to path → state; traceable

    def compute(
        self, paths: Sequence[str], arrays: Mapping[str, jax.Array], shardings: Mapping[str, Sharding]
    ) -> dict[str, jax.Array]:
        """The state at these paths, each shard directly on its device, in separate buffers."""

        def some(parameters: Mapping[str, Any]) -> dict[str, Any]:
            found = self.function({path: on_device(each, shardings[path]) for path, each in parameters.items()})
            # A parameter that is returned unchanged would be the parameter's own buffer, which training donates.
            return {path: jax.numpy.copy(found[path]) for path in paths}

        placed = {path: shardings[path] for path in paths}
        with without_mesh():
            return jax.jit(some, out_shardings=placed)({path: arrays[path] for path in self.parameters})


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Variables that are computed from one value that is not kept, such as the numbers and scales of a kernel."""

    variable: AbstractVariable  # that value: what a checkpoint or an init recipe has
    paths: tuple[str, ...]
    # Traceable; the same object for all values of one shape, dtype and computation, so that it is compiled once.
    function: Callable[[jax.Array], Sequence[jax.Array]]

    def compute(self, array: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """The variables, complete when this returns, so that few of the values exist at once."""
        array = automatic(array)
        with without_mesh():
            made = self.program(array.sharding, shardings)(array)
        return dict(zip(self.paths, jax.block_until_ready(made), strict=True))

    def program(self, given: Sharding, shardings: Mapping[str, Sharding]) -> Any:
        """The jitted function of the value's array."""
        function, placed = self.function, tuple(shardings[path] for path in self.paths)

        def compute(array: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(function(on_device(array, given)))

        key = "conversion", function, given, placed
        return PROGRAMS.get(key, lambda: jax.jit(compute, out_shardings=placed))


@dataclasses.dataclass(frozen=True)
class PlannedFunction:
    """A forward pass or loss that a framework provides."""

    function: Callable[..., Any]  # takes the model's own pytree and the inputs; for training, returns the scalar loss
    inputs: tuple[Any, ...]  # pytrees of `jax.ShapeDtypeStruct`; the first dimension of each is the batch
    description: str  # what it computes, as text


@dataclasses.dataclass(frozen=True)
class LoweredFunction:
    """A program that will be run, not compiled yet."""

    description: str  # what it computes, as text, such as "predict: gemma of 1 × 128 int32"
    lowered: jax.stages.Lowered | jax.stages.Compiled  # compiled if it was kept by an earlier process
    # Takes the compiled program, and compiles small ones that are run with it, for example by running them on zeros.
    besides: Callable[[jax.stages.Compiled], object] | None = None


@dataclasses.dataclass(frozen=True)
class OpenedArguments:
    """The arguments of a call, `(args, kwargs)`, whose objects a function may change, as a pytree of arrays."""

    arrays: Any
    closed: Callable[[Any], Any] = lambda arrays: arrays  # the arguments with other arrays
    state: Callable[[Any], Any] = lambda _: ()  # what such arguments hold after the call, a pytree
    write: Callable[[Any], object] = lambda _: None  # puts that into the objects that were given


class Framework:
    """The operations of a framework on its models; this class is for a model that is a plain pytree.

    `unflatten` takes a mapping of path to anything and returns it in the user's own pytree structure.
    """

    def __init__(self, unflatten: Callable[[Mapping[str, Any]], Any]) -> None:
        self._unflatten = unflatten

    def structure(self, leaves: Mapping[str, Any]) -> Any:
        """Path → anything, in the user's own pytree structure."""
        return self._unflatten(leaves)

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        """Raises ShardingError, before anything is created, if the user's object could not use its variables there."""

    def check_sharded(self, variables: Mapping[str, AbstractVariable]) -> None:
        """Warns, once variables have shardings, if the user's object cannot compute with them so."""

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The user's object, from path → finished array."""
        return self.structure(arrays)

    def outline(self, struct: jax.ShapeDtypeStruct) -> Any:
        """The placeholder of an array for lowering a jitted function."""
        return _Outline(struct)

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        """The model with an `outline` in place of each array, to lower a jitted function with.

        `structs` describe the finished array of every path: its sharding (None for a NumPy array), layout and
        weak type. The object holds the outlines only in the context.
        """
        yield self.structure({path: self.outline(struct) for path, struct in structs.items()})

    def traceable(self) -> Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]:
        """Returns a function from traced arrays to the user's object, valid in a context, to trace functions of it."""
        return lambda arrays: contextlib.nullcontext(self.rebuild(arrays))

    def usable_sharding(self, sharding: Sharding) -> Sharding:
        """The sharding that the arrays of the user's object have if variables are materialized with this one."""
        return sharding

    def prepared(
        self, model: Any, what: str, *, inputs: Sequence[Any] = (), batch: int | None, sequence: int | None
    ) -> Any:
        """The abstract model with the variables that one of its own functions creates on its first call, such as an
        optimizer's state; arguments are as for `lowered`, before which this is called.
        """
        return model

    def lowered(
        self,
        what: str,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        *,
        inputs: Sequence[Any] = (),
        batch: int | None,
        sequence: int | None,
    ) -> Sequence[LoweredFunction]:
        """The programs of the model's own functions, traced and lowered; once they are compiled, the first call of the
        functions compiles nothing.

        Args:
            what: `"predict"`, `"train"` or `"generate"`.
            structs: As for `outlined`.
            inputs: Arguments of the future call; empty if the framework can infer them.
            batch: Batch size; None is the framework's default.
            sequence: Sequence length; None likewise.

        Raises:
            LazyModelError: The model has no such function, or does not define its inputs.
        """
        raise LazyModelError(
            f"only Keras models have functions of their own to compile, and {what!r} is one of those: pass the jitted "
            "function that will be called with the model, and its inputs: Compile(step, batch)"
        )

    def start_training(
        self, variables: Mapping[str, AbstractVariable], optimizer: Optimizer, leaves: Mapping[str, Any]
    ) -> Training:
        """Starts an optimizer on the model's own tree, with None in place of variables that are not trained.

        `leaves` is path → array of the parameters that are trained; called while tracing.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(self.structure({path: Leaf(path) for path in variables}))
        places = {path_text(keys) if keys else "": leaf.path for keys, leaf in flat if isinstance(leaf, Leaf)}
        kept = [leaves.get(leaf.path) if isinstance(leaf, Leaf) else None for _, leaf in flat]
        state = optimizer.init(jax.tree.unflatten(treedef, kept))
        return Training(state, lambda model, state: (model, state), path_text, places)

    def forward(self, what: str, *, batch: int, sequence: int | None) -> PlannedFunction | None:
        """The model's own forward pass (`what="forward"`) or loss (`"train"`), if the framework provides one."""
        return None

    def tensors(self) -> Mapping[str, Any]:
        """The tensors of the checkpoint that the model was built with, by name."""
        return {}

    def lora_pairs(self, variables: Mapping[str, AbstractVariable]) -> list[LoraPair]:
        """The LoRA pairs among the model's variables."""
        return named_pairs({path: variable.shape for path, variable in variables.items()})

    def counts(self) -> Mapping[str, int]:
        """Path → the parameters that a variable counts as, where these are not its own elements."""
        return {}

    def fix_names(self, names: Sequence[str]) -> str:
        """What to do with a checkpoint whose names are not those of the variables."""
        return "Rename them (lm.WeightMap.suggest proposes how)"

    def computed(self, model: ModelSpec, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """The checkpoint with what is computed from its weights in place of them, lazily; unless it has that itself."""
        return checkpoint

    def unquantized(self, model: ModelSpec, given: Container[str]) -> ModelSpec:
        """The model with weights in place of what is computed from them, as `as_read`, and with their `conversions`."""
        return model.as_read(given)

    def quantize(self, model: Any, how: Any, filters: Any, inputs: Any) -> Any:
        """The quantized model; see `AbstractModel.quantize`."""
        _refuse(model, "quantized", "quantize='int8'")

    def lora(self, model: Any, rank: Any, targets: str | None, inputs: Any) -> Any:
        """The model with LoRA pairs; see `AbstractModel.lora`."""
        _refuse(model, "given LoRA pairs", "lora_rank=8")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for a variable, or a number, in the model's tree."""

    path: str


def _refuse(model: Any, what: str, stated: str) -> NoReturn:
    raise LazyModelError(
        f"only Keras models and NNX modules are {what} as a step, and {model.name} is neither: build it with what is "
        f"{what} already. plan(what_if=lazymodel.WhatIf({stated})) shows their memory"
    )


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
        notes: What differs on purpose from what the framework's own loader would make, likewise.
        sharding_notes: Notes of `shard` on the rules.
        derived: How to compute variables that depend on the values of others, once these exist.
        optimized: The variables that the model's optimizer trains; None without one.
        spent: Time spent on making it: building, sharding.
        conversions: How to compute variables from values that are read or initialized and not kept; the sources and
            recipes are of these values.
        equal: Paths of variables that begin as the array of another one → the path of the first of these.
        numbers: Path → number of Python or NumPy in the user's object; a checkpoint may have another value for it.
    """

    variables: Mapping[str, AbstractVariable]
    recipes: tuple[InitRecipe, ...]
    sources: Mapping[str, Any]
    framework: Framework
    programs: ProgramCache = dataclasses.field(default_factory=ProgramCache)
    name: str = "model"
    unused: tuple[StoredTensor, ...] = ()
    mismatched: tuple[MismatchedTensor, ...] = ()
    notes: tuple[str, ...] = ()
    sharding_notes: tuple[str, ...] = ()
    derived: Derived | None = None
    optimized: Optimized | None = None
    spent: tuple[Span, ...] = ()
    equal: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    conversions: tuple[Conversion, ...] = ()
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", MappingProxyType(dict(self.variables)))
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "equal", MappingProxyType(dict(self.equal)))
        known = {path for recipe in self.recipes for path in recipe.paths} | set(self.sources)
        known.update(() if self.derived is None else self.derived.paths)
        known.update(path for conversion in self.conversions for path in conversion.paths)
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

    def __contains__(self, path: object) -> bool:
        return path in self.variables  # without the closest names that an error would have

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
        """Number of elements of the model's own floating-point or complex variables: without counters, masks, keys.

        Quantized kernels count as what they are computed from.
        """
        counts = self.framework.counts()
        own = [variable for variable in self.as_read().values() if variable.follows is None]
        sizes = {v.path: v.size for v in own if jax.numpy.issubdtype(v.dtype, np.inexact)}
        return sum(counts.get(variable.path, sizes.get(variable.path, 0)) for variable in own)

    def alike(self) -> dict[str, list[str]]:
        """Path → all variables that begin as the same array, itself included, where there are several."""
        groups: dict[str, list[str]] = {}
        for path in self if self.equal else ():
            groups.setdefault(self.equal.get(path, path), []).append(path)
        return {path: group for group in groups.values() if len(group) > 1 for path in group}

    def as_read(self, given: Container[str] = ()) -> Self:
        """The model with the values in place of what is computed from them, unless all of that is among `given`."""
        left = [each for each in self.conversions if not all(path in given for path in each.paths)]
        value = {path: each.variable for each in left for path in each.paths}
        read = (value.get(path, variable) for path, variable in self.items())
        return self.with_variables({variable.path: variable for variable in read}) if left else self

    def with_variables(self, variables: Mapping[str, AbstractVariable]) -> Self:
        """The same model with other variables (same paths), such as resharded ones."""
        return dataclasses.replace(self, variables=variables)


AnyModel = TypeVar("AnyModel", bound=ModelSpec)  # a step returns a model of the same class
