"""The abstract model: every variable's path, shape, dtype and sharding, and nothing allocated.

`AbstractModel` is what `build_abstract` returns and every later step takes. It knows no framework: an adapter
hands it the variables, how each is computed (`InitRecipe`) and a function that turns finished arrays back into
the user's object. It decides nothing itself: sharding lives in `_sharding`, planning in `_plan`, the work in
`_materialize`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, overload

import jax
import numpy as np
from jax.experimental.layout import Format

from lazymodel._errors import LazyModelError

if TYPE_CHECKING:
    from jax.experimental.layout import Layout

    from lazymodel._auto import Auto
    from lazymodel._init_programs import InitRecipe, ProgramCache
    from lazymodel._lazy_tensor import LazyTensor
    from lazymodel._load_report import MismatchedTensor, StoredTensor
    from lazymodel._materialize import ReportTo
    from lazymodel._optimizer import Derived, Optimized, Optimizer, StartTraining
    from lazymodel._plan import MemoryPlan
    from lazymodel._plan_compiled import Compile
    from lazymodel._plan_what_if import WhatIf
    from lazymodel._reinitialize import Initializer, InitRules
    from lazymodel._report import Progress
    from lazymodel._sharding import Reason, Rules
    from lazymodel._sharding_report import Explanation, ShardingReport


@dataclasses.dataclass(frozen=True)
class AbstractVariable:
    """One variable of an abstract model.

    Attributes:
        path: Its stable, unique name, parts joined by `/`, such as `decoder/attention/query/kernel`.
        shape: The global shape.
        dtype: A NumPy dtype, or an extended JAX dtype such as `key<fry>` for PRNG keys.
        sharding: Where its shards go, or None while none was assigned (one device is used then).
        origin: How its value comes to be, for people: an initializer's name, `constant`, or a file and tensor.
        trainable: Whether an optimizer would update it.
        logical_axes: Names for its dimensions that the framework keeps with it, as Flax' partitioning metadata does:
            logical axes or mesh axes, None for a dimension without one. None if it keeps none.
        layout: The order of its bytes on a device, or None for what the compiler prefers.
        reason: Why it has its sharding; `AbstractModel.explain` tells it.
        follows: For optimizer state, the path of the parameter that it belongs to and is sharded like, or an empty
            string where it belongs to none, as a step count; None for the model's own variables.
        weak_type: Whether its array is weakly typed, as JAX makes those of Python scalars (`jnp.full((4,), 2.0)`): with
            another array of lower precision the result has that precision. Loaded or initialized, it is of this type,
            as an array is after `parameter[...] = loaded`.
        on_host: Whether it is a NumPy array, which comes back as one unless its sharding splits it over devices.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None = None
    origin: str = "init"
    trainable: bool = True
    logical_axes: tuple[Any, ...] | None = None
    layout: Layout | None = None
    reason: Reason | None = None
    follows: str | None = None
    weak_type: bool = False
    on_host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable, over all devices, counted once."""
        return self.size * self.dtype.itemsize

    @property
    def spec(self) -> jax.sharding.PartitionSpec | None:
        """The partition spec, or None where the sharding is not a NamedSharding."""
        return self.sharding.spec if isinstance(self.sharding, jax.sharding.NamedSharding) else None

    @property
    def shard_nbytes(self) -> int:
        """Bytes that one device holds (all shards of a JAX array have equal shapes)."""
        if self.sharding is None:
            return self.nbytes
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The variable as a `jax.ShapeDtypeStruct`, with its sharding, layout and the dtype that JAX traces."""
        placed: Any = self.sharding if self.layout is None else Format(self.layout, self.sharding)
        # What stays a NumPy array is traced with the dtype that JAX has for it; newer ones warn of another.
        dtype = cast(Any, jax).dtypes.canonicalize_dtype(self.dtype) if self.on_host else self.dtype
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=placed, weak_type=self.weak_type)

    def __repr__(self) -> str:
        spec = "" if self.sharding is None else f", {self.spec if self.spec is not None else self.sharding}"
        return f"AbstractVariable({self.path!r}, {self.dtype.name}{list(self.shape)}{spec}, {self.origin})"


# A source of values: a tensor still on disk, or an array that is already here.
Source = Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AbstractModel(Mapping[str, AbstractVariable]):
    """A model of shapes and dtypes, an immutable mapping of paths to `AbstractVariable`.

    Made by `lazymodel.build_abstract`, or by an integration's own functions.

    Attributes:
        variables: Path to variable, in the model's own order.
        recipes: How to compute the variables that come from an initializer; each path in at most one recipe.
        sources: Path to the value of variables that were given one while building: a constant, or a tensor of the
            checkpoint that the model was built with.
        rebuild: Takes a mapping of path to array and returns the user's object.
        structure: Takes a mapping of path to anything and returns it in the user's own pytree structure.
        programs: Compiled init programs, shared by every model derived from the same `build_abstract`.
        name: What the model calls itself, for tables.
        unused: Tensors of the checkpoint that the model was built with which no variable takes, for the load report.
        mismatched: Those that were left out for their shapes, likewise.
        sharding_notes: What `shard` had to say of the rules besides what it says of each variable.
        start_training: How the framework starts an optimizer; None for the way of plain pytrees.
        derived: How to compute the variables that depend on the values of others, once these are there.
        optimized: What the optimizer that the model has trains; None without one.
    """

    variables: Mapping[str, AbstractVariable]
    recipes: tuple[InitRecipe, ...]
    sources: Mapping[str, Source]
    rebuild: Callable[[Mapping[str, jax.Array]], Any]
    structure: Callable[[Mapping[str, Any]], Any]
    programs: ProgramCache
    name: str = "model"
    unused: tuple[StoredTensor, ...] = ()
    mismatched: tuple[MismatchedTensor, ...] = ()
    sharding_notes: tuple[str, ...] = ()
    start_training: StartTraining | None = None
    derived: Derived | None = None
    optimized: Optimized | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", MappingProxyType(dict(self.variables)))
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        known = {path for recipe in self.recipes for path in recipe.paths} | set(self.sources)
        known.update(() if self.derived is None else self.derived.paths)
        if unknown := [path for path in self.variables if path not in known]:
            raise LazyModelError(f"no way to initialize {unknown[0]!r} ({len(unknown)} such variables); this is a bug")

    def __getitem__(self, path: str) -> AbstractVariable:
        try:
            return self.variables[path]
        except KeyError:
            from lazymodel._report import closest

            raise KeyError(f"{path!r} is not a variable of {self.name}{closest(str(path), self.variables)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    @property
    def tree(self) -> Any:
        """The model as a pytree of `jax.ShapeDtypeStruct` with shardings, for `jax.jit(...).lower(tree)`."""
        return self.structure({path: variable.struct for path, variable in self.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all variables, each counted once however many devices hold it."""
        return sum(variable.nbytes for variable in self.values())

    @property
    def num_parameters(self) -> int:
        """Number of elements of all floating-point or complex variables.

        Counters, masks, keys and optimizer state do not count.
        """
        own = (variable for variable in self.values() if variable.follows is None)
        return sum(variable.size for variable in own if jax.numpy.issubdtype(variable.dtype, np.inexact))

    def with_variables(self, variables: Mapping[str, AbstractVariable]) -> AbstractModel:
        """The same model with other variables (same paths), such as resharded ones."""
        return dataclasses.replace(self, variables=variables)

    def shard(
        self,
        mesh: jax.sharding.Mesh,
        rules: Rules | None = None,
        *,
        on_unmatched: str = "warn",
        large: int | str = "1MiB",
        repair: bool | Auto = False,
    ) -> AbstractModel:
        """Assigns a sharding to every variable; see `lazymodel._sharding.assign` for the rules' forms.

        Args:
            mesh: The devices. A `keras.distribution.DeviceMesh` is taken too.
            rules: `lazymodel.auto()`, or `"auto"`; path regex (`re.fullmatch`) or `lazymodel.role` to `PartitionSpec`,
                a tuple of axis names or None; a callable of a variable; a Keras `LayoutMap`; or Flax logical-axis
                rules, pairs of logical and mesh axis. None uses the mesh axes that the variables themselves name, as
                Flax' partitioning metadata does. What nothing matches is replicated.
            on_unmatched: `"warn"`, `"error"` or `"ignore"`, for variables of at least `large` bytes that no rule
                matches, and so would be replicated.
            large: That threshold, in bytes or as `"16MiB"`. `lazymodel.auto()` replicates nothing of this size that can
                be split.
            repair: True gives what does not fit, and what of at least `large` bytes no rule matches, the sharding that
                `lazymodel.auto()` proposes, in silence; `explain()` lists what was mended. An `auto(...)` of your own
                says which axes are for what.

        Optimizer state (`with_optimizer`) is sharded like the parameters that it belongs to, whatever the rules say of
        its own paths; only the patterns of a mapping that match no parameter are rules for it.

        Raises:
            ShardingError: A rule matches nothing, names an unknown axis, uses one twice, does not divide a dimension
                or has more dimensions than the variable.
        """
        from lazymodel._optimizer import shard

        variables, notes = shard(self.variables, mesh, rules, on_unmatched=on_unmatched, large=large, repair=repair)
        return dataclasses.replace(self, variables=variables, sharding_notes=notes)

    def with_optimizer(
        self, optimizer: Optimizer, *, trained: Callable[[AbstractVariable], bool] | str | None = None
    ) -> AbstractModel:
        """The model with the state that an optimizer starts with, as further variables.

        The state's variables are called `optimizer/` and their place in it, such as `optimizer/0/mu/layers/0/kernel`.
        What has its parameter's shape is sharded like its parameter, whether `shard` was or will be called; what is
        factored, as in Adafactor, by what is left of its parameter's spec; step counts and the like are replicated.
        Nothing is allocated until `materialize`, which then returns

        - for a JAX function, an Equinox module or a Keras model, (model, state), with `state` what
          `optimizer.init(params)` returns. `params` is the model's tree with None for all that is not trained, as
          `equinox.filter(model, equinox.is_inexact_array)` has it.
        - for Linen, (variables, state), where `params` is `variables["params"]`.
        - for NNX, (module, optimizer), an `nnx.Optimizer` of what is trained.

        State that is a function of the parameters' values, such as a copy of them, is computed from the materialized
        parameters, loaded or initialized. `materialize(checkpoint)` takes state from a checkpoint that has it.

        Args:
            optimizer: An Optax gradient transformation.
            trained: Which variables it gets: a path regex (`re.fullmatch`) or a function of a variable; None is every
                trainable one. Integers, masks and keys are never trained.

        Raises:
            LazyModelError: There is an optimizer already, or nothing to train.
            TraceError: The optimizer's `init` needs values that tracing does not have.
        """
        from lazymodel._optimizer import with_optimizer

        return with_optimizer(self, optimizer, trained)

    def reinitialize(
        self,
        rules: str | InitRules,
        initializer: Initializer | None = None,
        *,
        key: jax.Array | int | None = None,
    ) -> AbstractModel:
        """Gives variables another initializer, run as any other: sharded, one program for each kind.

        A variable's key is `lazymodel.path_key(key, path)`, so its values do not change when others come, go or are
        renamed, and are bit for bit those of `initializer(path_key(key, path), shape, dtype)`. Variables that no rule
        matches keep their initializers and keys. One that the model was built with a weight for is initialized from
        now on; a checkpoint given to `materialize` still goes before any initializer. Optimizer state stays as its
        optimizer starts it, for the new values where it depends on them.

        Args:
            rules: A path regex (`re.fullmatch`) and an initializer; or a mapping of them, of which the first that
                matches is taken; or a callable of a variable that returns an initializer or None. In a pattern,
                `{layer}` captures text without `/` and `.`.
            initializer: Any of `jax.nn.initializers`, of `lazymodel.initializers`, or a callable of key, shape and
                dtype that JAX can trace. If it has further parameters named `path`, or as the pattern's captures, it is
                given these, captured numbers as ints.
            key: A typed key, or its seed; needed if an initializer draws random values.

        Raises:
            LazyModelError: A pattern matches nothing, an initializer returns another shape or dtype, or a key is
                lacking.

        Example:
            >>> import lazymodel as lm
            >>> abstract = lm.build_abstract(lambda: {"w": jax.numpy.ones((8, 4))})
            >>> abstract.reinitialize("w", jax.nn.initializers.normal(0.02), key=jax.random.key(0))["w"].origin
            'normal'
        """
        from lazymodel._reinitialize import reinitialize

        return reinitialize(self, rules, initializer, key=key)

    def rekey(self, key: jax.Array | int, pattern: str = ".*") -> AbstractModel:
        """Draws the values of the model's own initializers from keys by path, `lazymodel.path_key(key, path)`.

        By default a model's keys come from the order in which it creates its variables, so adding one changes all that
        follow. By path they do not. A variable whose initializer takes several keys has them folded from its own by
        0, 1, …; variables that are cut from one random array have the key of the first. Keys that the model holds, such
        as dropout's, stay as they are.

        Args:
            key: A typed key, or its seed.
            pattern: Path regex (`re.fullmatch`) of the variables.

        Raises:
            LazyModelError: The pattern matches nothing, or the key is of another generator than the model's.
        """
        from lazymodel._reinitialize import rekey

        return rekey(self, key, pattern)

    @overload
    def explain(self, path: str) -> Explanation: ...
    @overload
    def explain(self, path: None = None) -> ShardingReport: ...
    def explain(self, path: str | None = None) -> Explanation | ShardingReport:
        """Why a variable has its sharding, or without a path how the whole model spreads over its devices.

        Args:
            path: A variable's path.

        Returns:
            Both print as text. For a variable: its spec, shard bytes, the rule or role that decided, and what else was
            considered. For the model: bytes on the fullest and emptiest device, what is replicated and why, what
            `repair` mended, and rules that matched nothing.

        Raises:
            KeyError: There is no such variable.
        """
        from lazymodel._sharding_report import explain_model, explain_variable

        return explain_model(self) if path is None else explain_variable(self[path])

    def plan(
        self,
        checkpoint: Mapping[str, LazyTensor | np.ndarray] | None = None,
        *,
        initialize: str | None = None,
        device_memory: int | str | None = None,
        what_if: WhatIf | None = None,
        compile: Compile | None = None,
    ) -> MemoryPlan:
        """Predicts bytes per device and host before any is spent; see `lazymodel._plan_make.plan`."""
        from lazymodel._plan_make import plan

        return plan(
            self,
            checkpoint,
            initialize=initialize,
            device_memory=device_memory,
            what_if=what_if,
            compile=compile,
        )

    def materialize(
        self,
        checkpoint: Mapping[str, LazyTensor | np.ndarray] | None = None,
        *,
        initialize: str | None = None,
        strict: bool = True,
        cast: str = "safe",
        max_host_memory: int | str | None = None,
        progress: bool | Progress | Callable[[int, int], object] | None = None,
        report: ReportTo = None,
    ) -> Any:
        """Makes every variable on its own devices and returns the user's object; see `_materialize.materialize`.

        Args:
            checkpoint: Path to tensor, such as `open_checkpoint` returns; None uses what the model was built with.
            initialize: `"missing"` initializes what the checkpoint lacks, `"nothing"` makes that an error, `"all"`
                ignores the checkpoint. None is `"missing"` with a warning that lists what a given checkpoint lacked.
            strict: Whether a checkpoint tensor that the model has no variable for, or that has another shape than its
                variable, is an error. If not, such tensors are left out with a warning that lists them, and a
                variable whose tensor was left out is treated like one that the checkpoint lacks. With
                `initialize="nothing"` another shape is an error all the same.
            cast: `"safe"` makes it an error where a tensor's values could lose what they mean in its variable's dtype:
                floats into integers, numbers into bool, complex into real, quantized numbers (integers or eight-bit
                floats with a scale beside them) into floats. Floats become other floats, narrower ones too, and beyond
                their range infinite; integers anything that has all values of their dtype, and if they are few enough
                (16 MiB) anything that has all their values. `"unsafe"` casts as `ndarray.astype` does. What a mapping
                casts with `astype` was asked for.
            max_host_memory: Ceiling for the host's staging memory in bytes, or `"4GiB"`.
            progress: True or False for a bar, None for a bar when a person is watching, a callable
                `f(done_nbytes, total_nbytes)` or a `Progress` for your own. Bytes are those of the distinct shards of
                this process; they are told of from several threads, one call at a time.
            report: True prints a `LoadReport` once the model is complete; a callable, such as `reports.append`, is
                given it instead. A failure reports nothing but its error.
        """
        from lazymodel._materialize import materialize

        return materialize(
            self,
            checkpoint,
            initialize=initialize,
            strict=strict,
            cast=cast,
            max_host_memory=max_host_memory,
            progress=progress,
            report=report,
        )

    def __repr__(self) -> str:
        from lazymodel._report import model_text

        return model_text(self)

    def _repr_html_(self) -> str:
        from lazymodel._report import model_html

        return model_html(self)


def unique_paths(paths: Sequence[str]) -> list[str]:
    """Makes repeated paths unique, in order: `a`, `a` → `a`, `a#2`."""
    seen: dict[str, int] = {}
    unique: list[str] = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        unique.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return unique
