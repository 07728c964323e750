"""The memory plan: what every device and host will hold, and the peak on the way there, before a byte moves.

Responsible for predicting and for saying whether it fits. The numbers come from the shardings (what stays), from the
compiled init programs' own memory analysis or a stated estimate of it (what is needed for a moment), from the sizes of
the shards that are read (what passes through hosts), from `_plan_use` (what using the model adds), and, where it is
asked for, from the compiler (what a forward pass or a training step takes). `_plan_report` shows plans.

Devices need not be here. On a mesh without live devices, or without any (`jax.sharding.AbstractMesh`), nothing is
compiled unless asked for, and a plan is arithmetic: a second or two for a model of a thousand billion parameters.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract import AbstractModel
from lazymodel._device_memory import device_memory as known_memory
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._init_programs import AnyProgram, InitRecipe, _by_devices
from lazymodel._lazy_tensor import LazyTensor
from lazymodel._live import is_arithmetic, is_live
from lazymodel._load_report import is_initial, stored_itemsize
from lazymodel._mapped import flat_checkpoint
from lazymodel._match import Choice, choose, describe_sources, refused_casts
from lazymodel._plan_programs import check_function, compile_use
from lazymodel._plan_use import ACTIVATIONS, GRADIENTS, PARAMETERS, Optimizer, Use
from lazymodel._sharding import device_shardings
from lazymodel._stream import DEFAULT_BUDGET
from lazymodel._text import first_of, format_bytes, parse_bytes

if TYPE_CHECKING:
    from lazymodel._compile import CompiledMemory

_LISTED = 5  # how many offenders `check` names
# Temporaries of an init program that was not compiled. XLA:CPU keeps the 32-bit random bits, their two counters and,
# for narrower dtypes, the result in 32 bits at once, for each element; on TPUs and GPUs all of it is one fused loop.
_CPU_TEMPORARIES = 3 * 4  # bytes an element
_CPU_NARROW_TEMPORARIES = 4 * 4

Signature: TypeAlias = "frozenset[Hashable]"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One variable in a plan.

    Attributes:
        path: The variable's path.
        shape: Its global shape.
        dtype: Its dtype.
        spec: Its partition spec, or None where it lives on one device.
        shard_nbytes: Bytes that each of its devices holds.
        nbytes: Bytes of the whole variable.
        action: `"load"` from a checkpoint, `"initialize"` by a program, or `"constant"`.
        source: File and tensor, or the initializer, for people.
        used_nbytes: Bytes that each of its devices holds for it while the model is used: itself, quantized if that was
            asked for, its LoRA pair, its gradient and the slots of an optimizer that is only stated. Optimizer state
            that the model has is rows of its own.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | None
    shard_nbytes: int
    nbytes: int
    action: str
    source: str
    used_nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """One step of materializing, on the fullest device.

    Attributes:
        path: The variable that is made, or the first of those that one program makes.
        action: As in `PlanRow`.
        held_nbytes: Bytes held once it is made.
        peak_nbytes: Most bytes held while it is made, temporaries included.
    """

    path: str
    action: str
    held_nbytes: int
    peak_nbytes: int


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """What one process will hold and read.

    Attributes:
        index: Its `process_index`.
        num_devices: How many of the model's devices are its own.
        device_nbytes: Bytes that these hold together once everything is there.
        read_nbytes: Bytes that it reads from files, every distinct shard once.
        staging_nbytes: Ceiling of the host memory through which those pass; `max_host_memory` lowers it.
        peak_nbytes: Most host memory while materializing: the staging and, where the devices are CPUs, what they hold.
    """

    index: int
    num_devices: int
    device_nbytes: int
    read_nbytes: int
    staging_nbytes: int
    peak_nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What materializing a model will cost, and using it.

    Attributes:
        name: The model's name.
        rows: One a variable, in the model's order.
        device_nbytes: Bytes of the fullest device once everything is there.
        peak_nbytes: Most bytes that a device holds while materializing, temporaries of the init programs included.
        read_nbytes: Bytes that this process reads from files, every distinct shard once. For devices that are not here,
            those of the process that reads most.
        host_nbytes: Bytes of the largest single shard that passes through this process's host memory.
        num_devices: Number of devices that hold anything.
        device_memory: Bytes that one device has, or None where there is no limit to speak of (CPU).
        programs: Number of compiled init programs; 0 where their temporaries are estimated.
        parts: What a device holds while the model is used, on the fullest device, by kind: `"parameters"`, `"LoRA"`,
            `"optimizer state"`, `"gradients"`, `"activations"` (with all other temporaries of what was compiled, of a
            training step its gradients too).
        timeline: The steps of materializing, in order.
        hosts: One a process; empty for a mesh without devices.
        device_kind: What the devices are called, or an empty string.
        mesh: Axis names and sizes; empty without a mesh.
        compiled: What the compiler said about the forward pass or training step, if one was compiled.
        notes: What a reader has to know about how the numbers came to be.
    """

    name: str
    rows: tuple[PlanRow, ...]
    device_nbytes: int
    peak_nbytes: int
    read_nbytes: int
    host_nbytes: int
    num_devices: int
    device_memory: int | None
    programs: int
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    timeline: tuple[PlanStep, ...] = ()
    hosts: tuple[HostPlan, ...] = ()
    device_kind: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    compiled: CompiledMemory | None = None
    notes: tuple[str, ...] = ()

    @property
    def used_nbytes(self) -> int:
        """Bytes of the fullest device while the model is used: the sum of `parts`."""
        return sum(self.parts.values()) if self.parts else self.device_nbytes

    @property
    def needed_nbytes(self) -> int:
        """Bytes that a device must have, to materialize the model and to use it."""
        return max(self.peak_nbytes, self.used_nbytes)

    @property
    def fits(self) -> bool | None:
        """Whether what is needed fits the device memory; None where that is not known."""
        return None if self.device_memory is None else self.needed_nbytes <= self.device_memory

    def check(self, device_memory: int | str | None = None) -> MemoryPlan:
        """Returns the plan itself if it fits.

        Args:
            device_memory: Bytes of one device, or text such as `"16GiB"`; None takes the plan's own.

        Raises:
            DoesNotFitError: It does not; names the variables that take most of a device, and what would fit.
        """
        limit = (
            self.device_memory
            if device_memory is None
            else parse_bytes(device_memory, name="device_memory", at_least=1)
        )
        if limit is None or self.needed_nbytes <= limit:
            return self
        largest = sorted(self.rows, key=lambda row: -max(row.shard_nbytes, row.used_nbytes))[:_LISTED]
        offenders = ", ".join(
            f"{row.path} {format_bytes(max(row.shard_nbytes, row.used_nbytes))}"
            + (" (replicated)" if row.shard_nbytes == row.nbytes and self.num_devices > 1 else "")
            for row in largest
        )
        use = ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in self.parts.items())
        use = f"; in use {format_bytes(self.used_nbytes)}: {use}" if set(self.parts) - {PARAMETERS} else ""
        raise DoesNotFitError(
            f"{self.name} needs {format_bytes(self.needed_nbytes)} on a device ({format_bytes(self.device_nbytes)} "
            f"once materialized{use}) and a device has {format_bytes(limit)}, "
            f"{format_bytes(self.needed_nbytes - limit)} too little. "
            f"Largest on a device: {offenders}. {self.mend(limit)}"
        )

    def mend(self, device_memory: int) -> str:
        """What would make it fit devices of this many bytes, by arithmetic, as a sentence or two."""
        whole = [row for row in self.rows if row.shard_nbytes == row.nbytes and self.num_devices > 1]
        replicated = sum(max(row.shard_nbytes, row.used_nbytes) for row in whole)
        if replicated > device_memory // 2:
            return (
                f"{format_bytes(replicated)} are replicated on every device, which no number of devices mends: "
                "shard these further, or use a smaller dtype."
            )
        # What each device computes with stays as large; only what is split shrinks with more devices.
        fixed = self.parts.get(ACTIVATIONS, 0) + replicated
        if fixed >= device_memory:
            return (
                f"{format_bytes(fixed)} of a device do not shrink with more devices (activations, replicated "
                "variables): use a smaller batch or sequence."
            )
        split = (self.needed_nbytes - fixed) * self.num_devices
        devices = 1 << max(math.ceil(split / (device_memory - fixed)) - 1, 0).bit_length()
        wide = any(row.dtype.itemsize >= 4 and jax.numpy.issubdtype(row.dtype, jax.numpy.floating) for row in self.rows)
        return (
            f"With everything else split evenly it would fit {devices:,} such devices"
            f"{', or half as many in bfloat16' if wide else ''}. Shard these further, use more devices, or a smaller "
            "dtype."
        )

    def by_module(self, depth: int = 1) -> Modules:
        """The variables summed over the modules that their paths name, down to this many parts of a path.

        Example:
            >>> print(plan.by_module(depth=2))
        """
        if type(depth) is not int or depth < 1:
            raise LazyModelError(f"depth is a number of path parts, from 1; got {depth!r}")
        sums: dict[tuple[str, ...], list[int]] = {}
        for row in self.rows:
            parts = tuple(row.path.split("/"))
            for length in range(1, min(depth, max(len(parts) - 1, 1)) + 1):
                entry = sums.setdefault(parts[:length], [0, 0, 0, 0])
                for index, amount in enumerate((1, row.nbytes, row.shard_nbytes, row.used_nbytes)):
                    entry[index] += amount
        first = {prefix: position for position, prefix in enumerate(sums)}
        order = sorted(sums, key=lambda prefix: [first[prefix[: n + 1]] for n in range(len(prefix))])
        return Modules(self.name, tuple(ModuleRow("/".join(prefix), len(prefix), *sums[prefix]) for prefix in order))

    def plot(self, path: Any = None) -> Any:
        """Draws what a device holds against what it has, and the timeline while materializing.

        Args:
            path: A file to write (`.png`, `.svg`, …); None only returns the figure.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            LazyModelError: matplotlib is not installed, or the file cannot be written.
        """
        from lazymodel._plan_report import plan_figure

        return plan_figure(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers that `json.dumps` takes and gives back equal."""
        from lazymodel._plan_report import plan_dict

        return plan_dict(self)

    def __repr__(self) -> str:
        from lazymodel._plan_report import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from lazymodel._plan_report import plan_html

        return plan_html(self)


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """One module of a plan: the variables whose paths begin with its own.

    Attributes:
        path: The prefix.
        depth: Its number of parts.
        variables: How many variables it has.
        nbytes: Their bytes, each counted once.
        shard_nbytes: Bytes of them on a device that holds all.
        used_nbytes: The same while the model is used; see `PlanRow`.
    """

    path: str
    depth: int
    variables: int
    nbytes: int
    shard_nbytes: int
    used_nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Modules(Sequence[ModuleRow]):
    """A plan by module, outer modules before what they hold; prints as a table."""

    name: str
    rows: tuple[ModuleRow, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        from lazymodel._plan_report import modules_text

        return modules_text(self)

    def _repr_html_(self) -> str:
        from lazymodel._plan_report import modules_html

        return modules_html(self)


@dataclasses.dataclass(frozen=True, repr=False)
class PlanComparison:
    """Several plans side by side; prints as a table.

    Attributes:
        plans: Name to plan, in the order given.
    """

    plans: Mapping[str, MemoryPlan]

    @property
    def fitting(self) -> tuple[str, ...]:
        """Names of the plans that are known to fit."""
        return tuple(name for name, plan in self.plans.items() if plan.fits)

    def to_dict(self) -> dict[str, Any]:
        """Each plan's `to_dict`, by name."""
        return {name: plan.to_dict() for name, plan in self.plans.items()}

    def __repr__(self) -> str:
        from lazymodel._plan_report import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from lazymodel._plan_report import comparison_html

        return comparison_html(self)


def compare_plans(plans: Mapping[str, MemoryPlan]) -> PlanComparison:
    """Puts the plans of several meshes, dtypes or anything else into one table.

    Example:
        >>> lm.compare_plans({f"model={n}": abstract.shard(mesh(n), rules).plan() for n in (4, 8)})
    """
    given: Any = plans
    if isinstance(given, Mapping) and not given:
        raise LazyModelError("there is no plan to compare; pass a mapping of name to MemoryPlan")
    named = cast("Mapping[Any, Any]", given) if isinstance(given, Mapping) else {"": None}
    if not all(isinstance(plan, MemoryPlan) for plan in named.values()):
        raise LazyModelError(
            f"plans are a mapping of name to MemoryPlan, such as {{'v5e-8': model.plan()}}; got {type(given).__name__}"
        )
    return PlanComparison(dict(plans))


def make_plan(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None = None,
    *,
    initialize: str | None = None,
    device_memory: int | str | None = None,
    optimizer: Optimizer = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    quantize: str | None = None,
    compile: str | None = None,
    function: Callable[..., Any] | None = None,
    inputs: Sequence[Any] = (),
    batch: int | None = None,
    sequence: int | None = None,
) -> MemoryPlan:
    """See `AbstractModel.plan`."""
    if compile not in (None, "init", "forward", "train"):
        raise LazyModelError(f"compile is 'init', 'forward', 'train' or None; got {compile!r}")
    check_function(compile, function, inputs, batch, sequence)
    if compile in ("forward", "train") and quantize is not None:
        raise LazyModelError(
            f"compile={compile!r} compiles the model as it is, and quantize={quantize!r} is arithmetic; "
            "plan them one by one, or build the quantized model"
        )
    if compile == "train" and optimizer is None and model.optimized is None:
        optimizer = "sgd"
    if compile is not None and any(is_arithmetic(variable.sharding) for variable in model.values()):
        raise LazyModelError(
            f"compile={compile!r} needs devices to compile for, and this mesh is one for arithmetic; "
            "make it with lazymodel.topology, or plan without compile"
        )
    # A plan says in its table what is initialized, so lacking tensors need no warning here.
    # Nor does what is refused keep it from being a plan: it is noted.
    checkpoint = flat_checkpoint(checkpoint)
    choice = choose(model, checkpoint, initialize=initialize or "missing", strict=False, cast="unsafe")
    refused = refused_casts(model, checkpoint, choice)
    shardings = device_shardings(model.variables)
    use = Use(model, shardings, optimizer=optimizer, lora_rank=lora_rank, lora_targets=lora_targets, quantize=quantize)
    places = _Places(shardings)
    steps, programs = _steps(model, choice, shardings, places, compile_programs=compile == "init" or places.live)

    signature, resident = places.fullest({path: use.shard_nbytes[path] for path in model})
    timeline = tuple(_timeline(steps, signature))
    parts = {kind: sum(amounts.values()) for kind, amounts in use.parts.items() if kind == PARAMETERS or amounts}
    if len(places.signatures) > 1:  # variables on several meshes: what counts is the device that holds most
        in_use: collections.Counter[str] = collections.Counter()
        for amounts in use.parts.values():
            in_use.update(amounts)
        fullest, _ = places.fullest(in_use)
        parts = {kind: places.held(fullest, use.parts[kind]) for kind in parts}
    notes = list(use.notes)
    if refused:
        notes.append(f"materialize refuses this checkpoint: {first_of(refused, 'tensors')}")
    if any(step.action == "initialize" for step in steps) and not programs:
        notes.append(
            "temporaries of init programs are estimated: "
            + ("12 to 16 bytes an element" if places.platform == "cpu" else "next to none on TPUs and GPUs")
        )

    compiled = None
    if compile in ("forward", "train"):
        try:
            compiled, note = compile_use(model, use, compile, function, inputs, batch=batch, sequence=sequence)
            total, limit = compiled.peak_nbytes, None
        except DoesNotFitError as error:
            if error.needed_nbytes is None:
                raise
            total, limit, note = error.needed_nbytes, error.limit_nbytes, str(error)
        notes.append(note)
        # The compiler pads and keeps what it returns; all of that is its own part.
        if compile == "train":  # gradients are among its temporaries
            parts.pop(GRADIENTS, None)
        parts[ACTIVATIONS] = max(total - use.argument_nbytes(compile), 0)
        if limit is not None:
            device_memory = limit if device_memory is None else device_memory

    origins = describe_sources(choice.sources)
    recipe_origin = {path: recipe.origin for recipe in choice.recipes for path in recipe.paths}
    for left_out in choice.mismatched:
        if left_out.path in recipe_origin:
            recipe_origin[left_out.path] += f"; shape {left_out.found} of the checkpoint does not match"
    rows = tuple(
        PlanRow(
            path=path,
            shape=variable.shape,
            dtype=variable.dtype,
            spec=variable.spec,
            shard_nbytes=use.shard_nbytes[path],
            nbytes=variable.nbytes,
            action=_action(choice, path),
            source=origins.get(path) or recipe_origin.get(path, variable.origin),
            used_nbytes=sum(amounts.get(path, 0) for amounts in use.parts.values()),
        )
        for path, variable in model.items()
    )
    hosts = _hosts(model, choice, shardings, places, steps)
    here = {host.index: host for host in hosts}.get(jax.process_index()) if places.live else None
    return MemoryPlan(
        name=model.name,
        rows=rows,
        device_nbytes=resident,
        peak_nbytes=max((step.peak_nbytes for step in timeline), default=0),
        read_nbytes=(
            here.read_nbytes
            if here is not None
            else max((host.read_nbytes for host in hosts), default=_read_anywhere(choice, shardings))
        ),
        host_nbytes=max((row.shard_nbytes for row in rows if row.path in choice.sources), default=0),
        num_devices=places.num_devices,
        device_memory=places.device_memory
        if device_memory is None
        else parse_bytes(device_memory, name="device_memory", at_least=1),
        programs=programs,
        parts=parts,
        timeline=timeline,
        hosts=hosts,
        device_kind=places.device_kind,
        mesh=places.mesh,
        compiled=compiled,
        notes=tuple(notes),
    )


# --- where things are ------------------------------------------------------------------------------------------------


class _Places:
    """The devices of a model's shardings, told apart only where they differ in what they can hold.

    Every device of a mesh holds as many bytes of a variable as any other, so thousands of variables on thousands of
    devices come down to one group. `signatures` counts the devices that belong to the same groups.
    """

    def __init__(self, shardings: Mapping[str, Sharding]) -> None:
        self.group: dict[str, Hashable] = {path: _group(sharding) for path, sharding in shardings.items()}
        examples = {self.group[path]: sharding for path, sharding in shardings.items()}
        members: dict[Any, set[Hashable]] = {}
        for group, sharding in examples.items():
            for device in _devices(sharding):
                members.setdefault(device, set()).add(group)
        self.devices: dict[Any, Signature] = {device: frozenset(groups) for device, groups in members.items()}
        self.signatures = collections.Counter(self.devices.values())
        self.num_devices = len(members)
        self.real = [device for device in members if not isinstance(device, int)]
        # Compile-only devices belong to a client that can compile and nothing else.
        self.live = bool(members) and len(self.real) == len(members) and all(map(is_live, self.real))
        meshes = [s.mesh for s in examples.values() if isinstance(s, NamedSharding)]
        self.mesh: dict[str, int] = dict(meshes[0].shape) if meshes else {}
        kinds = {(device.platform, device.device_kind) for device in self.real}
        for mesh in meshes:
            described = getattr(mesh, "abstract_device", None) if isinstance(mesh, AbstractMesh) else None
            if described is not None:
                kinds.add((described.platform, described.device_kind))
        self.platform = min(kinds, default=("", ""))[0]
        self.device_kind = ", ".join(sorted(kind for _, kind in kinds))
        known: list[Any] = [kind for _, kind in kinds]
        if self.live:  # they can say themselves, those of this process
            known = [device for device in self.real if device.process_index == jax.process_index()]
        limits = [known_memory(device) for device in known]
        self.device_memory = min((limit for limit in limits if limit is not None), default=None)

    def fullest(self, amounts: Mapping[str, int]) -> tuple[Signature, int]:
        """The kind of device that holds most of these bytes, and how many."""
        by_group: dict[Hashable, int] = {}
        for path, nbytes in amounts.items():
            by_group[self.group[path]] = by_group.get(self.group[path], 0) + nbytes
        held = {signature: sum(by_group.get(group, 0) for group in signature) for signature in self.signatures}
        best = max(held, key=lambda signature: held[signature], default=frozenset[Hashable]())
        return best, held.get(best, 0)

    def held(self, signature: Signature, amounts: Mapping[str, int]) -> int:
        """How many of these bytes a kind of device holds."""
        return sum(nbytes for path, nbytes in amounts.items() if self.group[path] in signature)


def _group(sharding: Sharding) -> Hashable:
    return sharding.mesh if isinstance(sharding, NamedSharding) else frozenset(sharding.device_set)


def _devices(sharding: Sharding) -> Iterator[Any]:
    """The devices; numbers stand for those of a mesh that has none."""
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        yield from range(mesh.size) if isinstance(mesh, AbstractMesh) else mesh.devices.flat
    else:
        yield from sharding.device_set


# --- materializing ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """One program or one loaded variable: what it leaves on each device of its group, and takes meanwhile."""

    path: str
    action: str
    group: Hashable
    nbytes: int
    temporary_nbytes: int = 0
    paths: tuple[str, ...] = ()


def _steps(
    model: AbstractModel,
    choice: Choice,
    shardings: Mapping[str, Sharding],
    places: _Places,
    *,
    compile_programs: bool,
) -> tuple[list[_Step], int]:
    """What materializing does, in the order in which it does it; and the number of programs that were compiled."""
    shard = {path: _shard_nbytes(shardings[path], model[path].shape, model[path].dtype) for path in model}
    computed: list[_Step] = []
    programs: list[AnyProgram] = []
    if compile_programs and choice.recipes:
        recipes = [part for recipe in choice.recipes for part in _by_devices(recipe, shardings)]
        wanted = [(recipe, [shardings[path] for path in recipe.paths]) for recipe in recipes]
        programs = model.programs.get_all(wanted)
        for recipe, program in zip(recipes, programs, strict=True):
            first = recipe.paths[0]
            nbytes = max(program.output_nbytes, sum(shard[path] for path in recipe.paths))
            computed.append(_Step(first, "initialize", places.group[first], nbytes, program.temp_nbytes, recipe.paths))
    else:
        for recipe in choice.recipes:
            for paths in _by_group(recipe, places):
                nbytes = sum(shard[path] for path in paths)
                temporary = sum(_cpu_temporaries(shard[path], model[path].dtype.itemsize) for path in paths)
                temporary = temporary if places.platform == "cpu" else 0
                computed.append(_Step(paths[0], "initialize", places.group[paths[0]], nbytes, temporary, paths))
    computed.sort(key=lambda step: -step.temporary_nbytes)  # as `run_recipes` runs them
    loaded = sorted(choice.sources, key=lambda path: _file_order(choice.sources[path]))
    steps = [_Step(path, _action(choice, path), places.group[path], shard[path], paths=(path,)) for path in loaded]
    known = {path for step in (*computed, *steps) for path in step.paths}
    steps += [
        _Step(path, "initialize", places.group[path], shard[path], paths=(path,)) for path in model if path not in known
    ]
    return computed + steps, len({id(program) for program in programs})


def _cpu_temporaries(shard_nbytes: int, itemsize: int) -> int:
    each = _CPU_NARROW_TEMPORARIES if itemsize < 4 else _CPU_TEMPORARIES
    return shard_nbytes // max(itemsize, 1) * each


def _by_group(recipe: InitRecipe, places: _Places) -> Iterator[tuple[str, ...]]:
    groups: dict[Hashable, list[str]] = {}
    for path in recipe.paths:
        groups.setdefault(places.group[path], []).append(path)
    yield from map(tuple, groups.values())


def _timeline(steps: Sequence[_Step], signature: Signature) -> Iterator[PlanStep]:
    """The steps as one kind of device sees them: what it holds after each, and at most during it.

    Programs are started before earlier ones have ended, but a device runs one after the other, and has the temporaries
    of one at a time.
    """
    held = 0
    for step in steps:
        if step.group in signature:
            held += step.nbytes
            yield PlanStep(step.path, step.action, held, held + step.temporary_nbytes)


def _action(choice: Choice, path: str) -> str:
    if path not in choice.sources or is_initial(choice.sources[path]):
        return "initialize"
    return "load" if isinstance(choice.sources[path], LazyTensor) else "constant"


def _file_order(source: Any) -> tuple[str, int]:
    return (source.file, source.offset) if isinstance(source, LazyTensor) else ("", 0)


# --- hosts -----------------------------------------------------------------------------------------------------------


def _hosts(
    model: AbstractModel,
    choice: Choice,
    shardings: Mapping[str, Sharding],
    places: _Places,
    steps: Sequence[_Step],
) -> tuple[HostPlan, ...]:
    """One for each process whose devices hold anything."""
    if not places.real:
        return ()
    boxes = _Boxes()
    by_process: dict[int, collections.Counter[Signature]] = {}
    for device, signature in places.devices.items():
        by_process.setdefault(device.process_index, collections.Counter())[signature] += 1
    on_cpu = places.platform == "cpu"
    read: collections.Counter[int] = collections.Counter()
    distinct: dict[tuple[int, str], int] = {}  # bytes of a loaded variable's distinct shards in a process
    for path, source in choice.sources.items():
        shard = _shard_nbytes(shardings[path], model[path].shape, model[path].dtype)
        for process, count in boxes.counts(shardings[path], model[path].shape).items():
            distinct[process, path] = count * shard
            if isinstance(source, LazyTensor):
                elements = math.prod(shardings[path].shard_shape(tuple(source.shape)))
                read[process] += int(count * elements * stored_itemsize(source.leaf))
    hosts: list[HostPlan] = []
    for process, signatures in sorted(by_process.items()):
        held = 0
        peak = 0
        for step in steps:
            devices = sum(count for signature, count in signatures.items() if step.group in signature)
            if step.action == "initialize":
                held += step.nbytes * devices
            else:  # on CPUs, devices that hold the same values share one buffer
                held += distinct.get((process, step.path), 0)
            peak = max(peak, held + step.temporary_nbytes * devices)
        resident = sum(step.nbytes * sum(n for s, n in signatures.items() if step.group in s) for step in steps)
        staging = 0 if on_cpu else min(DEFAULT_BUDGET, sum(n for (p, _), n in distinct.items() if p == process))
        hosts.append(
            HostPlan(
                index=process,
                num_devices=sum(signatures.values()),
                device_nbytes=resident,
                read_nbytes=read[process],
                staging_nbytes=staging,
                peak_nbytes=peak if on_cpu else staging,
            )
        )
    return tuple(hosts)


class _Boxes:
    """Numbers of distinct shards by process, counted once for each shape and sharding."""

    def __init__(self) -> None:
        self._known: dict[Any, Mapping[int, int]] = {}

    def counts(self, sharding: Sharding, shape: tuple[int, ...]) -> Mapping[int, int]:
        key = (sharding, shape)
        if key not in self._known:
            found: dict[int, set[Any]] = {}
            indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in indices.items():
                box = tuple((part.start, part.stop) for part in index or ())
                found.setdefault(device.process_index, set()).add(box)
            self._known[key] = {process: len(boxes) for process, boxes in found.items()}
        return self._known[key]


def _read_anywhere(choice: Choice, shardings: Mapping[str, Sharding]) -> int:
    """Bytes that all processes together read at least, where nothing is known of processes."""
    return sum(
        int(math.prod(source.shape) * stored_itemsize(source.leaf))
        for path, source in choice.sources.items()
        if isinstance(source, LazyTensor) and path in shardings
    )


def _shard_nbytes(sharding: Sharding, shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(sharding.shard_shape(shape)) * dtype.itemsize


__all__: Sequence[str] = (
    "HostPlan",
    "MemoryPlan",
    "ModuleRow",
    "Modules",
    "PlanComparison",
    "PlanRow",
    "PlanStep",
    "compare_plans",
    "make_plan",
)
