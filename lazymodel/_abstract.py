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
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lazymodel._errors import LazyModelError

if TYPE_CHECKING:
    from lazymodel._init_programs import InitRecipe, ProgramCache
    from lazymodel._lazy_tensor import LazyTensor
    from lazymodel._load_report import StoredTensor
    from lazymodel._materialize import ReportTo
    from lazymodel._plan import MemoryPlan
    from lazymodel._report import Progress
    from lazymodel._sharding import Rules


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
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None = None
    origin: str = "init"
    trainable: bool = True

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
        """The variable as a `jax.ShapeDtypeStruct`, its sharding included."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

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
        default_rules: Sharding rules used by `shard` when it is given none.
        programs: Compiled init programs, shared by every model derived from the same `build_abstract`.
        name: What the model calls itself, for tables.
        unused: Tensors of the checkpoint that the model was built with which no variable takes, for the load report.
    """

    variables: Mapping[str, AbstractVariable]
    recipes: tuple[InitRecipe, ...]
    sources: Mapping[str, Source]
    rebuild: Callable[[Mapping[str, jax.Array]], Any]
    structure: Callable[[Mapping[str, Any]], Any]
    programs: ProgramCache
    name: str = "model"
    unused: tuple[StoredTensor, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", MappingProxyType(dict(self.variables)))
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        known = {path for recipe in self.recipes for path in recipe.paths} | set(self.sources)
        if unknown := [path for path in self.variables if path not in known]:
            raise LazyModelError(f"no way to initialize {unknown[0]!r} ({len(unknown)} such variables); this is a bug")

    def __getitem__(self, path: str) -> AbstractVariable:
        try:
            return self.variables[path]
        except KeyError:
            from lazymodel._report import closest

            raise KeyError(f"{path!r} is not a variable of {self.name}{closest(path, self.variables)}") from None

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
        """Number of elements of all floating-point or complex variables; counters, masks and keys do not count."""
        return sum(v.size for v in self.values() if jax.numpy.issubdtype(v.dtype, np.inexact))

    def with_variables(self, variables: Mapping[str, AbstractVariable]) -> AbstractModel:
        """The same model with other variables (same paths), such as resharded ones."""
        return dataclasses.replace(self, variables=variables)

    def shard(
        self,
        mesh: jax.sharding.Mesh,
        rules: Rules,
        *,
        on_unmatched: str = "warn",
        large: int | str = "1MiB",
    ) -> AbstractModel:
        """Assigns a sharding to every variable; see `lazymodel._sharding.assign` for the rules' forms.

        Args:
            mesh: The devices. A `keras.distribution.DeviceMesh` is taken too.
            rules: Path regex (`re.fullmatch`) to `PartitionSpec`, a callable `variable -> PartitionSpec | None`, or a
                Keras `LayoutMap`. What nothing matches is replicated.
            on_unmatched: `"warn"`, `"error"` or `"ignore"`, for variables of at least `large` bytes that no rule
                matches, and so would be replicated.
            large: That threshold, in bytes or as `"16MiB"`.

        Raises:
            ShardingError: A rule matches nothing, names an unknown axis, uses one twice, does not divide a dimension
                or has more dimensions than the variable.
        """
        from lazymodel._sharding import assign

        return self.with_variables(assign(self.variables, mesh, rules, on_unmatched=on_unmatched, large=large))

    def plan(
        self,
        checkpoint: Mapping[str, LazyTensor | np.ndarray] | None = None,
        *,
        initialize: str | None = None,
        device_memory: int | str | None = None,
    ) -> MemoryPlan:
        """Predicts bytes per device before any is spent; compiles the init programs of what is initialized.

        Args:
            checkpoint: What `materialize` would be given. A tensor of another shape than its variable is no error here;
                the variable's row says so.
            initialize: As for `materialize`.
            device_memory: Bytes of one device, or `"16GiB"`; None asks the devices, and CPUs have no limit.
        """
        from lazymodel._plan import make_plan

        return make_plan(self, checkpoint, initialize=initialize, device_memory=device_memory)

    def materialize(
        self,
        checkpoint: Mapping[str, LazyTensor | np.ndarray] | None = None,
        *,
        initialize: str | None = None,
        strict: bool = True,
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
