"""The memory plan: what every device will hold, and the peak on the way there, before a byte moves.

Responsible for predicting and for saying whether it fits. The numbers come from the shardings (what stays), from the
compiled init programs' own memory analysis (what is needed for a moment), and from the sizes of the shards that are
read (what passes through the host).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from lazymodel._abstract import AbstractModel
from lazymodel._bytes import format_bytes, parse_bytes
from lazymodel._errors import DoesNotFitError
from lazymodel._lazy_tensor import LazyTensor
from lazymodel._materialize import choose, describe_sources
from lazymodel._sharding import device_shardings

_LISTED = 5  # how many offenders `check` names


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
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | None
    shard_nbytes: int
    nbytes: int
    action: str
    source: str


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What materializing a model will cost.

    Attributes:
        name: The model's name.
        rows: One a variable, in the model's order.
        device_nbytes: Bytes of the fullest device once everything is there.
        peak_nbytes: Most bytes that a device holds while materializing, temporaries of the init programs included.
        read_nbytes: Bytes that this process reads from files, every distinct shard once.
        host_nbytes: Bytes of the largest single shard that passes through this process's host memory.
        num_devices: Number of devices that hold anything.
        device_memory: Bytes that one device has, or None where there is no limit to speak of (CPU).
        programs: Number of compiled init programs.
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

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the device memory; None where that is not known."""
        return None if self.device_memory is None else self.peak_nbytes <= self.device_memory

    def check(self, device_memory: int | str | None = None) -> MemoryPlan:
        """Returns the plan itself if it fits.

        Args:
            device_memory: Bytes of one device, or text such as `"16GiB"`; None takes the plan's own.

        Raises:
            DoesNotFitError: The peak exceeds it; names the variables that take most of a device.
        """
        limit = self.device_memory if device_memory is None else parse_bytes(device_memory)
        if limit is None or self.peak_nbytes <= limit:
            return self
        largest = sorted(self.rows, key=lambda row: -row.shard_nbytes)[:_LISTED]
        offenders = ", ".join(
            f"{row.path} {format_bytes(row.shard_nbytes)}"
            + (" (replicated)" if row.shard_nbytes == row.nbytes and self.num_devices > 1 else "")
            for row in largest
        )
        raise DoesNotFitError(
            f"{self.name} needs {format_bytes(self.peak_nbytes)} on a device ({format_bytes(self.device_nbytes)} once "
            f"materialized) and a device has {format_bytes(limit)}, "
            f"{format_bytes(self.peak_nbytes - limit)} too little. "
            f"Largest on a device: {offenders}. Shard these further, use more devices, or a smaller dtype."
        )

    def __repr__(self) -> str:
        from lazymodel._report import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from lazymodel._report import plan_html

        return plan_html(self)


def make_plan(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None = None,
    *,
    initialize: str | None = None,
    device_memory: int | str | None = None,
) -> MemoryPlan:
    """See `AbstractModel.plan`."""
    # A plan says in its table what is initialized, so lacking tensors need no warning here.
    choice = choose(model, checkpoint, initialize=initialize or "missing", strict=False)
    shardings = device_shardings(model.variables)

    resident: dict[Any, int] = {}
    for path, variable in model.items():
        shard = math.prod(shardings[path].shard_shape(variable.shape)) * variable.dtype.itemsize
        for device in shardings[path].device_set:
            resident[device] = resident.get(device, 0) + shard

    programs = {
        recipe.paths: model.programs.get(recipe, [shardings[path] for path in recipe.paths])
        for recipe in choice.recipes
    }
    peak = max(resident.values(), default=0)
    held = 0
    # As `run_recipes` runs them: those with the largest temporaries first.
    for program in sorted(programs.values(), key=lambda program: -program.temp_nbytes):
        held += program.output_nbytes
        peak = max(peak, held + program.temp_nbytes)

    origins = describe_sources(choice.sources)
    recipe_origin = {path: recipe.origin for recipe in choice.recipes for path in recipe.paths}
    for left_out in choice.mismatched:
        if left_out.path in recipe_origin:
            recipe_origin[left_out.path] += f"; shape {left_out.found} of the checkpoint does not match"
    reads = {
        path: _shard_boxes(shardings[path], model[path].shape) * _shard_nbytes(source, shardings[path])
        for path, source in choice.sources.items()
        if isinstance(source, LazyTensor)
    }
    rows = tuple(
        PlanRow(
            path=path,
            shape=variable.shape,
            dtype=variable.dtype,
            spec=variable.spec,
            shard_nbytes=math.prod(shardings[path].shard_shape(variable.shape)) * variable.dtype.itemsize,
            nbytes=variable.nbytes,
            action="load" if path in reads else "constant" if path in choice.sources else "initialize",
            source=origins.get(path) or recipe_origin[path],
        )
        for path, variable in model.items()
    )
    return MemoryPlan(
        name=model.name,
        rows=rows,
        device_nbytes=max(resident.values(), default=0),
        peak_nbytes=peak,
        read_nbytes=sum(reads.values()),
        host_nbytes=max((row.shard_nbytes for row in rows if row.path in choice.sources), default=0),
        num_devices=len(resident),
        device_memory=_device_memory(resident) if device_memory is None else parse_bytes(device_memory),
        programs=len({id(program) for program in programs.values()}),
    )


def _shard_boxes(sharding: Sharding, shape: tuple[int, ...]) -> int:
    """Number of distinct shards that this process's devices hold."""
    boxes = sharding.addressable_devices_indices_map(shape).values()
    return len({tuple((s.start, s.stop) for s in box or ()) for box in boxes})


def _shard_nbytes(source: LazyTensor, sharding: Sharding) -> int:
    return math.prod(sharding.shard_shape(tuple(source.shape))) * source.dtype.itemsize


def _device_memory(devices: Mapping[Any, int]) -> int | None:
    """Bytes of the smallest device, as the devices themselves say; CPUs do not say."""
    limits: list[int] = []
    for device in devices:
        # Only this process's devices can be asked, and only live ones.
        stats = device.memory_stats() if device.process_index == jax.process_index() else None
        if stats and "bytes_limit" in stats:
            limits.append(int(stats["bytes_limit"]))
    return min(limits, default=None)
