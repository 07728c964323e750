"""The way to a materialized model: its steps, what devices hold after each, and what passes through hosts.

The order is that in which `_materialize/materialize` works; what a step takes meanwhile is by the init programs' own
memory analysis, or a stated estimate of it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Sharding

from lazymodel._abstract.placement import Placement, Signature, resident_nbytes, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.hardware import is_arithmetic
from lazymodel._mapping.match import Choice
from lazymodel._plan.fleet import Traffic
from lazymodel._plan.plan import HostPlan, PlanStep
from lazymodel._programs.programs import AnyProgram, InitRecipe, by_devices
from lazymodel._tensors.buffers import DEFAULT_BUDGET
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.stored import is_initial, stored_itemsize

# Temporaries of an init program that was not compiled. XLA:CPU keeps the 32-bit random bits, their two counters and,
# for narrower dtypes, the result in 32 bits at once, for each element; on TPUs and GPUs all of it is one fused loop.
_CPU_TEMPORARIES = 3 * 4  # bytes an element
_CPU_NARROW_TEMPORARIES = 4 * 4


@dataclasses.dataclass(frozen=True)
class Step:
    """One program or one loaded variable: what it leaves on each device of its group, and takes meanwhile."""

    action: str
    paths: tuple[str, ...]
    group: Hashable
    nbytes: int
    temporary_nbytes: int = 0


def make_steps(
    model: ModelSpec,
    choice: Choice,
    placement: Placement,
    traffic: Traffic,
    platform: str,
    *,
    compile_programs: bool,
) -> tuple[list[Step], int]:
    """What materializing does on devices, in the order in which it does it; and how many programs were compiled."""
    shard = {path: resident_nbytes(variable) for path, variable in model.items() if not stays_on_host(variable)}
    group = placement.group
    computed: list[Step] = []
    programs: list[AnyProgram] = []
    if compile_programs and choice.recipes:
        recipes = [part for recipe in choice.recipes for part in by_devices(recipe, placement.shardings)]
        wanted = [(recipe, [placement.shardings[path] for path in recipe.paths]) for recipe in recipes]
        programs = model.programs.get_all(wanted)
        for recipe, program in zip(recipes, programs, strict=True):
            nbytes = max(program.output_nbytes, sum(shard[path] for path in recipe.paths))
            where = group[recipe.paths[0]]
            computed.append(Step("initialize", recipe.paths, where, nbytes, program.temp_nbytes))
    else:
        for recipe in choice.recipes:
            for paths in _by_group(recipe, group):
                nbytes = sum(shard[path] for path in paths)
                temporaries = (_cpu_temporaries(shard[path], model[path].dtype.itemsize) for path in paths)
                temporary = sum(temporaries) if platform == "cpu" else 0
                computed.append(Step("initialize", paths, group[paths[0]], nbytes, temporary))
    computed.sort(key=lambda step: -step.temporary_nbytes)  # as `run_recipes` runs them
    loaded = sorted((path for path in choice.sources if path in shard), key=lambda p: _file_order(choice.sources[p]))
    known = {path for step in computed for path in step.paths}.union(loaded)
    rest = [path for path in shard if path not in known]
    exchanging = traffic.group_nbytes(loaded)
    steps = [
        Step(action(choice, path), (path,), group[path], shard[path], exchanging.get(path, 0))
        for path in (*loaded, *rest)
    ]
    return computed + steps, len({id(program) for program in programs})


def _cpu_temporaries(shard_nbytes: int, itemsize: int) -> int:
    return shard_nbytes // max(itemsize, 1) * (_CPU_NARROW_TEMPORARIES if itemsize < 4 else _CPU_TEMPORARIES)


def _by_group(recipe: InitRecipe, group: Mapping[str, Hashable]) -> Iterator[tuple[str, ...]]:
    groups: dict[Hashable, list[str]] = {}
    for path in recipe.paths:
        groups.setdefault(group[path], []).append(path)
    return map(tuple, groups.values())


def make_timeline(steps: Sequence[Step], signature: Signature) -> Iterator[PlanStep]:
    """The steps as one kind of device sees them: what it holds after each, and at most during it.

    Programs are started before earlier ones have ended, but a device runs one after the other, and has the temporaries
    of one at a time.
    """
    held = 0
    for step in steps:
        if step.group in signature:
            held += step.nbytes
            yield PlanStep(step.paths[0], step.action, held, held + step.temporary_nbytes)


def action(choice: Choice, path: str) -> str:
    """What is done for a variable, as in `PlanRow`."""
    if path not in choice.sources or is_initial(choice.sources[path]):
        return "initialize"
    return "load" if isinstance(choice.sources[path], LazyTensor) else "constant"


def _file_order(source: Any) -> tuple[str, int]:
    return (source.file, source.offset) if isinstance(source, LazyTensor) else ("", 0)


def make_hosts(
    model: ModelSpec,
    choice: Choice,
    placement: Placement,
    traffic: Traffic,
    steps: Sequence[Step],
    *,
    on_cpu: bool,
) -> tuple[HostPlan, ...]:
    """One for each process whose devices hold anything; none where devices are mere numbers."""
    by_process: dict[int, collections.Counter[Signature]] = {}
    for device, signature in placement.devices.items():
        if not isinstance(device, int):
            by_process.setdefault(device.process_index, collections.Counter())[signature] += 1
    read, distinct = _read(model, choice, placement)
    # Each process has NumPy arrays of its own.
    on_host = sum(variable.nbytes for variable in model.values() if stays_on_host(variable))
    hosts: list[HostPlan] = []
    for process, signatures in sorted(by_process.items()):
        held = resident = peak = 0
        for step in steps:
            devices = sum(count for signature, count in signatures.items() if step.group in signature)
            resident += step.nbytes * devices
            # On CPUs, devices that hold the same loaded values share one buffer.
            shared = distinct.get((process, step.paths[0]), 0)
            held += step.nbytes * devices if step.action == "initialize" else shared
            peak = max(peak, held + step.temporary_nbytes * devices)
        staging = 0 if on_cpu else min(DEFAULT_BUDGET, sum(n for (p, _), n in distinct.items() if p == process))
        peak = (peak if on_cpu else staging) + on_host
        hosts.append(
            HostPlan(process, signatures.total(), resident, traffic.read_nbytes(process, read[process]), staging, peak)
        )
    return tuple(hosts)


def _read(
    model: ModelSpec, choice: Choice, placement: Placement
) -> tuple[collections.Counter[int], dict[tuple[int, str], int]]:
    """Bytes that each process reads, and those of the distinct shards of its variables that are not computed."""
    counts = functools.cache(_distinct_shards)  # many variables have the same shape and sharding
    read: collections.Counter[int] = collections.Counter()
    distinct: dict[tuple[int, str], int] = {}
    for path, source in choice.sources.items():
        variable, sharding = model[path], placement.shardings[path]
        if is_arithmetic(sharding):
            continue
        for process, count in counts(sharding, variable.shape).items():
            if not stays_on_host(variable):
                distinct[process, path] = count * resident_nbytes(variable)
            if isinstance(source, LazyTensor):
                elements = math.prod(sharding.shard_shape(tuple(source.shape)))
                read[process] += int(count * elements * stored_itemsize(source.leaf))
    return read, distinct


def _distinct_shards(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[int, int]:
    """How many there are in each process."""
    found: dict[int, set[Any]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        box = tuple((part.start, part.stop) for part in index or ())
        found.setdefault(device.process_index, set()).add(box)
    return {process: len(boxes) for process, boxes in found.items()}


def read_anywhere(choice: Choice, placement: Placement) -> int:
    """Bytes that all processes together read at least, where nothing is known of processes."""
    return sum(
        int(math.prod(source.shape) * stored_itemsize(source.leaf))
        for path, source in choice.sources.items()
        if isinstance(source, LazyTensor) and path in placement.shardings
    )
