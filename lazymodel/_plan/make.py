"""The method `plan`: predicts the cost of materializing and using a model, before any data is read.

Responsible for the steps of materializing (in the order of `_materialize/materialize`), their temporaries, and what
hosts read and keep. The devices need not exist. `_plan/use` counts what the model holds in use; `extras/planning` adds
a `WhatIf` or the compiler's numbers, on request.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import (
    AbstractVariable,
    Placement,
    Signature,
    device_shardings,
    offloaded_nbytes,
    planned_device,
    resident_nbytes,
    shard_stored,
    stays_on_host,
)
from lazymodel._devices.hardware import device_memory as known_memory
from lazymodel._devices.hardware import devices_per_host, host_memory, is_arithmetic, is_live
from lazymodel._devices.tiles import array_nbytes, tiled_shape
from lazymodel._errors import LazyModelError
from lazymodel._extras import extra
from lazymodel._mapping.resolve import LoadPlan, prepare_load, refused_casts
from lazymodel._plan.plan import HostPlan, MemoryPlan, PlanRow, PlanStep
from lazymodel._plan.use import ACTIVATIONS, Use, own_use
from lazymodel._programs.jaxprs import InitProgram
from lazymodel._programs.programs import by_devices
from lazymodel._sharding.roles import DATA_AXES
from lazymodel._show.text import format_bytes, grouped_by, parse_bytes
from lazymodel._tensors import shards
from lazymodel._tensors.buffers import DEFAULT_BUDGET, available_memory
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import (
    ReadPartition,
    check_replicas,
    divide,
    grouped,
    is_exchanged,
    is_shared,
    mesh_processes,
)
from lazymodel._tensors.stored import is_initial, stored_itemsize, where

if TYPE_CHECKING:
    from lazymodel.extras.planning.compile import Compile
    from lazymodel.extras.planning.what_if import WhatIf

# Temporaries of an init program that was not compiled. XLA:CPU keeps the 32-bit random bits, their two counters and,
# for narrower dtypes, the result in 32 bits at once, for each element; on TPUs and GPUs all of it is one fused loop.
_CPU_TEMPORARIES = 3 * 4  # bytes per element
_CPU_NARROW_TEMPORARIES = 4 * 4


@dataclasses.dataclass(frozen=True)
class Step:
    """One program or one loaded variable: what it leaves on each device of its group, and its temporary memory.

    `offloaded_nbytes` is what it leaves in host memory for each device. If a single device computes it whole,
    `whole_nbytes` is its full size in bytes.
    """

    action: str
    paths: tuple[str, ...]
    group: Hashable
    nbytes: int
    temporary_nbytes: int = 0
    offloaded_nbytes: int = 0
    whole_nbytes: int = 0

    def taken_nbytes(self, devices: int) -> int:
        """Bytes of its temporary memory on `devices` devices of a host, beyond what it leaves on them."""
        if not self.whole_nbytes or devices == 1:
            return self.temporary_nbytes * devices
        left = self.nbytes * devices
        return max(self.nbytes + self.temporary_nbytes - left, self.whole_nbytes)


def make_steps(
    model: ModelSpec,
    read: ModelSpec,
    choice: LoadPlan,
    placement: Placement,
    exchanges: Mapping[str, Exchanged],
    platform: str,
    *,
    compile_programs: bool,
) -> tuple[list[Step], int]:
    """The steps of materializing on devices, in order, and the number of compiled programs.

    `read` is the model as it is read. Values that are not kept are temporary.
    """
    made = {each.variable.path: each.paths for each in read.conversions if each.variable.path in read}
    kept = {path: [model[p] for p in made[path]] if path in made else [read[path]] for path in read}
    shard = {path: sum(map(resident_nbytes, kept[path])) for path in read if not stays_on_host(read[path])}
    offloaded = {path: sum(map(offloaded_nbytes, kept[path])) for path in shard}
    passing = {path: resident_nbytes(read[path]) if path in made else 0 for path in shard}
    group = placement.group
    groups = [paths for recipe in choice.recipes for paths in grouped_by(recipe.paths, group.__getitem__).values()]
    programs: Sequence[InitProgram | None] = [None] * len(groups)
    if compile_programs and choice.recipes:
        recipes = [part for recipe in choice.recipes for part in by_devices(recipe, placement.shardings)]
        groups = [list(recipe.paths) for recipe in recipes]
        programs = read.programs.get_all(
            [(recipe, [placement.shardings[path] for path in recipe.paths]) for recipe in recipes]
        )
    kernels = [recipe for recipe in choice.recipes if recipe.kernels is not None]
    whole_values = {path for each in kernels for path in each.paths if not cast(Any, each.kernels).partitionable}
    computed: list[Step] = []
    for paths, program in zip(groups, programs, strict=True):
        nbytes, away, passed = (sum(amounts[path] for path in paths) for amounts in (shard, offloaded, passing))
        whole = 0
        if program is None:
            temporaries = (_cpu_temporaries(read[path].shard_nbytes, read[path].dtype.itemsize) for path in paths)
            temporary = sum(temporaries) if platform == "cpu" else away  # created on the device, then moved
            if platform != "cpu" and not whole_values.isdisjoint(paths):
                # Computed whole, from an array of the same size, and then split.
                sizes = [array_nbytes(*read[path].stored, planned_device(read[path].sharding)) for path in paths]
                temporary = max(sum(sizes) + max(sizes) - nbytes, away)
        else:
            # On CPUs, results in either memory count as results.
            nbytes, temporary = max(program.output_nbytes - away - passed, nbytes), program.temp_nbytes
            whole = sum(read[path].nbytes for path in paths) if program.by_kernel else 0
        computed.append(Step("initialize", tuple(paths), group[paths[0]], nbytes, temporary + passed, away, whole))
    computed.sort(key=lambda step: -step.temporary_nbytes)  # the order of `run_recipes`
    loaded = sorted((path for path in choice.sources if path in shard), key=lambda p: _file_order(choice.sources[p]))
    known = {path for step in computed for path in step.paths}.union(loaded)
    exchanging = _group_nbytes(read, exchanges, loaded)
    steps = [
        Step(
            action(choice, path),
            (path,),
            group[path],
            shard[path],
            exchanging.get(path, 0) + passing[path],
            offloaded[path],
        )
        for path in (*loaded, *(path for path in shard if path not in known))
    ]
    return computed + steps, len({id(program) for program in programs if program is not None})


def _cpu_temporaries(shard_nbytes: int, itemsize: int) -> int:
    return shard_nbytes // max(itemsize, 1) * (_CPU_NARROW_TEMPORARIES if itemsize < 4 else _CPU_TEMPORARIES)


def make_timeline(steps: Sequence[Step], signature: Signature) -> Iterator[PlanStep]:
    """The steps from the view of one kind of device: bytes after each, and the peak during it.

    Programs are started before earlier ones have ended, but a device runs one after the other, so it holds the
    temporaries of one at a time.
    """
    held = offloaded = 0
    for step in steps:
        if step.group in signature:
            held += step.nbytes
            offloaded += step.offloaded_nbytes
            yield PlanStep(step.paths[0], step.action, held, held + step.temporary_nbytes, offloaded)


def action(choice: LoadPlan, path: str) -> str:
    """The source of a variable's value, as in `PlanRow`."""
    if path not in choice.sources or is_initial(choice.sources[path]):
        return "initialize"
    return "load" if isinstance(choice.sources[path], LazyTensor) else "constant"


def _file_order(source: Any) -> tuple[str, int]:
    return (source.file, source.offset) if isinstance(source, LazyTensor) else ("", 0)


class Exchanged(NamedTuple):
    """A variable that hosts read once and exchange."""

    partition: ReadPartition
    processes: np.ndarray  # the process of each device of its mesh
    stored_itemsize: float  # bytes of an element in the file

    def read_nbytes(self, process: int) -> int:
        """Bytes that a process reads of it."""
        own = self.partition.own_elements()[self.processes.ravel() == process]
        return int(own.sum() * self.stored_itemsize)


def _exchanges(
    model: ModelSpec, choice: LoadPlan, placement: Placement, hosts: int | None, replicas: str | None
) -> dict[str, Exchanged]:
    """The variables that `materialize` would exchange between processes, by path."""
    check_replicas(replicas)
    _check_hosts(hosts, placement)
    find = functools.cache(functools.partial(_processes, hosts=hosts))
    found: dict[str, Exchanged] = {}
    for path, tensor in choice.sources.items():
        sharding = placement.shardings[path]
        if not isinstance(sharding, NamedSharding) or not isinstance(tensor, LazyTensor) or stays_on_host(model[path]):
            continue
        processes = find(sharding.mesh)
        if not is_exchanged(tensor, replicas) or is_shared(tensor, sharding, processes, "exchange"):
            continue
        if (partition := divide(tensor, sharding, processes)) is not None:
            found[path] = Exchanged(partition, processes, float(stored_itemsize(tensor.source)))
    return found


def _processes(mesh: Any, hosts: int | None) -> np.ndarray:
    """The process of each device of a mesh; of devices that are only numbers, equally many in each of the hosts."""
    if isinstance(mesh, Mesh):
        return mesh_processes(mesh)
    return (np.arange(mesh.size) * (hosts or 1) // mesh.size).reshape(tuple(mesh.shape.values()))


def _group_nbytes(model: ModelSpec, exchanges: Mapping[str, Exchanged], order: Sequence[str]) -> dict[str, int]:
    """Bytes of a device that exchanging takes temporarily, for each exchanged variable, in load order."""
    spent = {
        path: exchanges[path].partition.spent_elements * model[path].stored[1].itemsize
        for path in order
        if path in exchanges
    }
    return {path: sum(spent[each] for each in group) for group in grouped(spent, shards.GROUP) for path in group}


# Memory of hosts: what they read and stage while a model is materialized, and what they keep for their devices. How the
# devices of a TPU slice share hosts is known, and for others `hosts` gives it.


def _make_hosts(
    model: ModelSpec,
    choice: LoadPlan,
    placement: Placement,
    exchanges: Mapping[str, Exchanged],
    steps: Sequence[Step],
    offloaded: Mapping[str, int],
    *,
    on_cpu: bool,
) -> tuple[HostPlan, ...]:
    """One plan for each process whose devices hold anything; none if devices are only numbers.

    `offloaded` is path → bytes that a host keeps for each device while the model is used.
    """
    by_process: dict[int, collections.Counter[Signature]] = {}
    for device, signature in placement.devices.items():
        if not isinstance(device, int):
            by_process.setdefault(device.process_index, collections.Counter())[signature] += 1
    read, distinct = _read(model, choice, placement, exchanges)
    # Each process has NumPy arrays of its own.
    on_host = sum(variable.nbytes for variable in model.values() if stays_on_host(variable))
    kept = placement.held(offloaded)
    hosts: list[HostPlan] = []
    for process, signatures in sorted(by_process.items()):
        held = resident = peak = away = 0
        for step in steps:
            devices = sum(count for signature, count in signatures.items() if step.group in signature)
            resident += step.nbytes * devices
            away += step.offloaded_nbytes * devices
            # On CPUs, devices that hold the same loaded values share one buffer.
            shared = distinct.get((process, step.paths[0]), 0)
            computed = step.action == "initialize" or step.offloaded_nbytes
            held += step.nbytes * devices if computed else shared
            peak = max(peak, held + away + step.taken_nbytes(devices))
        staging = 0 if on_cpu else min(DEFAULT_BUDGET, sum(n for (p, _), n in distinct.items() if p == process))
        peak = (peak if on_cpu else staging + away) + on_host
        in_use = sum(kept[signature] * count for signature, count in signatures.items())
        peak = max(peak, in_use + on_host + (resident if on_cpu else 0))
        hosts.append(HostPlan(process, signatures.total(), resident, read[process], staging, peak, in_use))
    return tuple(hosts)


def _offloaded_to(
    hosts: Sequence[HostPlan],
    placement: Placement,
    offloaded: Mapping[str, int],
    count: int | None,
    kind: str,
    *,
    live: bool,
) -> tuple[int, int | None, list[str]]:
    """Bytes that the most loaded host keeps, its memory if known, and notes on the numbers.

    `offloaded` is path → bytes for each device; `kind` is the kind of the devices, `count` the given number of hosts.
    """
    if not any(offloaded.values()):
        return 0, None, []
    notes = ["offloaded values pass through devices while in use; a compiled plan counts that"]
    size = -(-len(placement.devices) // (count or 1))
    if (per_host := devices_per_host(kind, size)) is None:
        per_host = size
        if not hosts and count is None:
            notes.append("number of hosts unknown, one assumed; set hosts=…")
    each = placement.most_loaded(offloaded)[1] * per_host
    memory = available_memory() if live else host_memory(kind, size)
    return max((host.offloaded_nbytes for host in hosts), default=each), memory, notes


def _read(
    model: ModelSpec, choice: LoadPlan, placement: Placement, exchanges: Mapping[str, Exchanged]
) -> tuple[collections.Counter[int], dict[tuple[int, str], int]]:
    """Bytes that each process reads, and bytes of the distinct shards of its variables that are not computed."""
    counts = functools.cache(_distinct_shards)  # many variables have the same shape and sharding
    read: collections.Counter[int] = collections.Counter()
    distinct: dict[tuple[int, str], int] = {}
    for path, source in choice.sources.items():
        variable, sharding = model[path], placement.shardings[path]
        for process, count in ({} if is_arithmetic(sharding) else counts(sharding, variable.shape)).items():
            if not stays_on_host(variable):
                distinct[process, path] = count * _numpy_nbytes(variable)
            if isinstance(source, LazyTensor):
                nbytes = count * math.prod(sharding.shard_shape(tuple(source.shape))) * stored_itemsize(source.source)
                read[process] += exchanges[path].read_nbytes(process) if path in exchanges else int(nbytes)
    return read, distinct


def _numpy_nbytes(variable: AbstractVariable) -> int:
    """Bytes of a shard in a host's buffers, where an element takes a byte or more and nothing is padded."""
    shape, dtype = shard_stored(variable, variable.sharding)
    return math.prod(shape) * dtype.itemsize


def _distinct_shards(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[int, int]:
    """Number of distinct shards in each process."""
    found: dict[int, set[Any]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        box = tuple((part.start, part.stop) for part in index or ())
        found.setdefault(device.process_index, set()).add(box)
    return {process: len(boxes) for process, boxes in found.items()}


def plan(
    model: ModelSpec,
    checkpoint: Any = None,
    *,
    initialize: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    what_if: WhatIf | None = None,
    compile: Compile | None = None,
    replicas: str | None = None,
    hosts: int | None = None,
) -> MemoryPlan:
    """Predicts bytes per device and host, while materializing and in use, before any memory is spent.

    Everything that the model has is counted once: its parameters, the state of its optimizer (`with_optimizer`, or the
    built optimizer of a Keras model), and then the gradients of what that optimizer trains. NumPy arrays that stay on
    the host do not count for any device.

    Init programs are compiled if their devices exist, or with `Compile("init")`; otherwise their temporaries are
    estimated, and a plan takes a second or two, whatever the model's size.

    Args:
        checkpoint: As for `materialize`. A tensor of another shape than its variable does not raise here; the
            variable's row shows it.
        initialize: As for `materialize`.
        device_memory: Bytes of one device, or `"16GiB"`; None is the reported or known memory (CPU: no limit).
        host_memory: Bytes of one host, likewise; it counts if something is offloaded to it (`lazymodel.Host`).
        what_if: Additions to the model, by arithmetic: `lazymodel.WhatIf(optimizer="adamw", lora_rank=8)`.
        compile: What to compile, for devices that need not exist: `lazymodel.Compile("train", batch=8)`.
        replicas: As for `materialize`.
        hosts: Number of hosts, each with equally many of the devices, for a mesh of devices that are only numbers.

    Raises:
        LazyModelError: An argument is invalid; there is no function or device to compile for; an optimizer or LoRA was
            given for a model that has an optimizer; or activations were requested for a model other than a transformer.

    Example:
        >>> sharded.plan(lm.open_checkpoint("model.safetensors"), device_memory="16GiB").read_nbytes
        131072
    """
    limit, host_limit = _nbytes("device_memory", device_memory), _nbytes("host_memory", host_memory)
    # A checkpoint that `materialize` rejects still has a plan, with a note.
    initialize = initialize or "missing"
    model = _placed(model)
    choice = prepare_load(model, checkpoint, initialize=initialize, strict=False, cast="unsafe", warns=False)
    read, placement = choice.model, Placement(choice.shardings)
    devices, use = _devices(placement), own_use(model, placement.shardings)
    if what_if is not None or compile is not None:
        use = extra("described_use")(model, placement, what_if, compile)
    exchanges = _exchanges(read, choice, placement, hosts, replicas)
    live = devices.live or (compile is not None and not compile.is_use)
    steps, programs = make_steps(model, read, choice, placement, exchanges, devices.platform, compile_programs=live)
    signature, resident = placement.most_loaded({path: resident_nbytes(variable) for path, variable in model.items()})
    timeline = tuple(make_timeline(steps, signature))
    parts, offloaded, in_use = _parts(use, placement), use.offloaded(), use.activations
    planned = _make_hosts(read, choice, placement, exchanges, steps, offloaded, on_cpu=devices.platform == "cpu")
    kept, memory, offloading = _offloaded_to(planned, placement, offloaded, hosts, devices.kind, live=devices.live)
    notes = [*_padding(model, placement, signature), *_notes(refused_casts(choice), steps, programs, devices.platform)]
    notes += _whole_batches(model, placement, what_if)
    return MemoryPlan(
        name=model.name,
        rows=_rows(model, choice, use),
        device_nbytes=resident,
        peak_nbytes=max((step.peak_nbytes for step in timeline), default=0),
        read_nbytes=_read_here(choice, planned, live=devices.live),
        host_nbytes=max((_numpy_nbytes(read[p]) for p in choice.sources if not stays_on_host(read[p])), default=0),
        num_devices=len(placement.devices),
        device_memory=limit or (in_use.limit if in_use else None) or devices.memory,
        programs=programs,
        parts=parts,
        counted={kind: in_use.how if in_use and kind == ACTIVATIONS else use.dtypes(kind) for kind in parts},
        timeline=timeline,
        hosts=planned,
        device_kind=devices.kind,
        mesh=dict(placement.meshes[0].shape) if placement.meshes else {},
        compiled=None if in_use is None else in_use.compiled,
        offloaded_nbytes=kept,
        host_memory=host_limit or memory,
        notes=(*use.notes, *notes, *offloading),
    )


def _placed(model: ModelSpec) -> ModelSpec:
    """The model with the default device where no sharding was assigned, whose tiles count as well."""
    without = {path: variable for path, variable in model.items() if variable.sharding is None}
    placed = device_shardings(without)
    changed = {path: dataclasses.replace(each, sharding=placed[path]) for path, each in without.items()}
    return model.with_variables({**model, **changed}) if changed else model


def _nbytes(name: str, given: int | str | None) -> int | None:
    return None if given is None else parse_bytes(given, name=name, at_least=1)


def _check_hosts(hosts: int | None, placement: Placement) -> None:
    if hosts is not None and (type(hosts) is not int or hosts < 1):
        raise LazyModelError(f"hosts is a number of hosts, from 1; got {hosts!r}")
    if hosts is not None and len(placement.devices) % hosts:
        raise LazyModelError(f"hosts={hosts} do not divide the {len(placement.devices)} devices of the mesh")


def _parts(use: Use, placement: Placement) -> dict[str, int]:
    """Bytes in use on the most loaded device, by kind."""
    parts = use.parts()
    most_loaded, _ = placement.most_loaded(sum(parts.values(), collections.Counter[str]()))
    held = {kind: placement.held(amounts).get(most_loaded, 0) for kind, amounts in parts.items()}
    return held if use.activations is None else held | {ACTIVATIONS: use.activations.nbytes}


def _whole_batches(model: ModelSpec, placement: Placement, what_if: WhatIf | None) -> Iterator[str]:
    """A note if every device of a mesh would compute the whole batch of a training step."""
    trains = model.optimized is not None or (what_if is not None and what_if.optimizer is not None)
    mesh = next((mesh for mesh in placement.meshes if mesh.size > 1), None)
    if trains and mesh is not None and not any(axis in DATA_AXES for axis in mesh.shape):
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        yield f"the mesh {axes} does not split the batch; an axis named fsdp or data would (lazymodel.plans tries it)"


class _Devices(NamedTuple):
    live: bool  # True if they run
    platform: str
    kind: str
    memory: int | None  # bytes of the smallest


def _devices(placement: Placement) -> _Devices:
    real = [device for device in placement.devices if not isinstance(device, int)]
    # Compile-only devices belong to a client that can only compile.
    live = bool(real) and len(real) == len(placement.devices) and all(map(is_live, real))
    described = [mesh.abstract_device for mesh in placement.meshes if isinstance(mesh, AbstractMesh)]
    kinds = {(device.platform, device.device_kind) for device in (*real, *filter(None, described))}
    known: list[Any] = [kind for _, kind in kinds]
    if live:  # devices of this process report their memory
        known = [device for device in real if device.process_index == jax.process_index()]
    limits = [limit for limit in map(known_memory, known) if limit is not None]
    kind = ", ".join(sorted(kind for _, kind in kinds))
    return _Devices(live, min(kinds, default=("", ""))[0], kind, min(limits, default=None))


def _read_here(choice: LoadPlan, hosts: Sequence[HostPlan], *, live: bool) -> int:
    """Bytes that this process reads; for devices that do not exist, those of the process that reads most.

    If the processes are unknown, the bytes that all of them read at least.
    """
    if not hosts:
        tensors = [source for source in choice.sources.values() if isinstance(source, LazyTensor)]
        return sum(int(math.prod(tensor.shape) * stored_itemsize(tensor.source)) for tensor in tensors)
    here = [host.read_nbytes for host in hosts if not live or host.index == jax.process_index()]
    return max(here or [host.read_nbytes for host in hosts])


def _notes(refused: Sequence[str], steps: Sequence[Step], programs: int, platform: str) -> Iterator[str]:
    """Notes: variables that count as loaded, tensors that `materialize` rejects, and the platform of an estimate."""
    if refused:
        more = f" ({len(refused)} tensors)" if len(refused) > 1 else ""
        yield f"materialize rejects this checkpoint: {refused[0]}{more}"
    if not programs and any(step.action == "initialize" for step in steps):
        each = "12 to 16 bytes an element" if platform == "cpu" else "next to none where values can be split"
        yield f"temporaries of init programs are estimated: {each}"


def _padding(model: ModelSpec, placement: Placement, signature: Signature) -> Iterator[str]:
    """A note if a hundredth of what a device holds, or more, fills up its tiles."""
    held = {path: resident_nbytes(variable) for path, variable in model.items()}
    padding = {path: model[path].padding_nbytes if nbytes else 0 for path, nbytes in held.items()}
    total, whole = (placement.held(amounts).get(signature, 0) for amounts in (padding, held))
    if total * 100 < whole or not total:
        return
    path = max(padding, key=lambda path: padding[path])
    shape, dtype = shard_stored(model[path], model[path].sharding)
    filled = tiled_shape(shape, dtype, planned_device(model[path].sharding))
    yield f"{format_bytes(total)} of a device are padding of tiles: {path!r}, {shape}, takes as much as {filled}"


def _rows(model: ModelSpec, choice: LoadPlan, use: Use) -> tuple[PlanRow, ...]:
    of = {path: each.variable.path for each in model.conversions for path in each.paths}
    of = {path: value for path, value in of.items() if path not in choice.sources}
    origins = {path: recipe.origin for recipe in choice.recipes for path in recipe.paths}
    for left_out in choice.mismatched:
        if left_out.path in origins:
            origins[left_out.path] += f"; shape {left_out.found} of the checkpoint does not match"
    origins |= {path: where(source) for path, source in choice.sources.items() if not is_initial(source)}
    used, offloaded = sum(use.parts().values(), collections.Counter[str]()), use.offloaded()
    return tuple(
        PlanRow(
            path=path,
            shape=variable.shape,
            dtype=variable.dtype,
            spec=variable.spec,
            shard_nbytes=resident_nbytes(variable),
            nbytes=variable.nbytes,
            action=action(choice, of.get(path, path)),
            source=origins.get(of.get(path, path)) or variable.origin,
            used_nbytes=used[path],
            memory_kind=variable.memory_kind,
            offloaded_nbytes=offloaded.get(path, 0),
            why="" if variable.reason is None else variable.reason.text,
            padding_nbytes=variable.padding_nbytes if resident_nbytes(variable) else 0,
        )
        for path, variable in model.items()
    )
