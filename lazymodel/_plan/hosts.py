"""What hosts take: what they read and stage while a model is materialized, and what they keep for their devices.

Responsible for counting bytes by process, and for what memory a host has. Devices need not be here: how those of a TPU
slice share hosts is known, and of others a `Fleet` says it.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Sharding

from lazymodel._abstract.placement import Placement, Signature, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.hardware import devices_per_host, host_memory, is_arithmetic
from lazymodel._mapping.match import Choice
from lazymodel._plan.fleet import Fleet, Traffic
from lazymodel._plan.plan import HostPlan
from lazymodel._plan.steps import Step
from lazymodel._tensors.buffers import DEFAULT_BUDGET, available_memory
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.stored import stored_itemsize


def make_hosts(
    model: ModelSpec,
    choice: Choice,
    placement: Placement,
    traffic: Traffic,
    steps: Sequence[Step],
    offloaded: Mapping[str, int],
    *,
    on_cpu: bool,
) -> tuple[HostPlan, ...]:
    """One for each process whose devices hold anything; none where devices are mere numbers.

    `offloaded` is path → bytes that a host keeps for each device while the model is used.
    """
    by_process: dict[int, collections.Counter[Signature]] = {}
    for device, signature in placement.devices.items():
        if not isinstance(device, int):
            by_process.setdefault(device.process_index, collections.Counter())[signature] += 1
    read, distinct = _read(model, choice, placement)
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
        reads = traffic.read_nbytes(process, read[process])
        hosts.append(HostPlan(process, signatures.total(), resident, reads, staging, peak, in_use))
    return tuple(hosts)


class Offloaded(NamedTuple):
    """What hosts keep for their devices."""

    nbytes: int  # on the fullest host
    memory: int | None  # bytes that a host has, where it keeps anything; None where that is not known
    notes: tuple[str, ...]  # how the numbers came to be


def offloaded_to(
    hosts: Sequence[HostPlan],
    placement: Placement,
    offloaded: Mapping[str, int],
    fleet: Fleet | None,
    kind: str,
    *,
    live: bool,
) -> Offloaded:
    """What the fullest host keeps, of path → bytes for each device; `kind` is that of the devices."""
    if not any(offloaded.values()):
        return Offloaded(0, None, ())
    notes = ["what is offloaded passes through devices in use, which counts where that is compiled"]
    size = len(placement.devices)
    if fleet is not None and fleet.hosts is not None:
        size = -(-size // fleet.hosts)
    if (count := devices_per_host(kind, size)) is None:
        count = size
        if not hosts and (fleet is None or fleet.hosts is None):
            notes.append("the hosts of these devices are not known: one counts for all; Fleet(hosts=…) says otherwise")
    each = placement.fullest(offloaded)[1] * count
    memory = available_memory() if live else host_memory(kind, size)
    return Offloaded(max((host.offloaded_nbytes for host in hosts), default=each), memory, tuple(notes))


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
                distinct[process, path] = count * variable.shard_nbytes
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
