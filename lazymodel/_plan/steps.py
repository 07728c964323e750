"""The steps of materializing a model, and what devices hold after each.

The order is that of `_materialize/materialize`. Temporary memory of a step comes from the init programs' own memory
analysis, or is estimated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from lazymodel._abstract.placement import Placement, Signature, offloaded_nbytes, resident_nbytes, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._mapping.match import LoadPlan
from lazymodel._plan.fleet import Traffic
from lazymodel._plan.plan import PlanStep
from lazymodel._programs.kernels import InitProgram
from lazymodel._programs.programs import by_devices
from lazymodel._show.text import grouped_by
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.stored import is_initial

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
    choice: LoadPlan,
    placement: Placement,
    traffic: Traffic,
    platform: str,
    *,
    compile_programs: bool,
) -> tuple[list[Step], int]:
    """The steps of materializing on devices, in order, and the number of compiled programs."""
    shard = {path: resident_nbytes(variable) for path, variable in model.items() if not stays_on_host(variable)}
    offloaded = {path: offloaded_nbytes(model[path]) for path in shard}
    group = placement.group
    computed: list[Step] = []
    programs: list[InitProgram] = []
    if compile_programs and choice.recipes:
        recipes = [part for recipe in choice.recipes for part in by_devices(recipe, placement.shardings)]
        requests = [(recipe, [placement.shardings[path] for path in recipe.paths]) for recipe in recipes]
        programs = model.programs.get_all(requests)
        for recipe, program in zip(recipes, programs, strict=True):
            away = sum(offloaded[path] for path in recipe.paths)
            # On CPUs, results in either memory count as results.
            nbytes = max(program.output_nbytes - away, sum(shard[path] for path in recipe.paths))
            where = group[recipe.paths[0]]
            whole = sum(model[path].nbytes for path in recipe.paths) if program.by_kernel else 0
            computed.append(Step("initialize", recipe.paths, where, nbytes, program.temp_nbytes, away, whole))
    else:
        for recipe in choice.recipes:
            for paths in map(tuple, grouped_by(recipe.paths, group.__getitem__).values()):
                nbytes, away = (sum(amounts[path] for path in paths) for amounts in (shard, offloaded))
                temporaries = (_cpu_temporaries(model[path].shard_nbytes, model[path].dtype.itemsize) for path in paths)
                temporary = sum(temporaries) if platform == "cpu" else away  # created on the device, then moved
                computed.append(Step("initialize", paths, group[paths[0]], nbytes, temporary, away))
    computed.sort(key=lambda step: -step.temporary_nbytes)  # the order of `run_recipes`
    loaded = sorted((path for path in choice.sources if path in shard), key=lambda p: _file_order(choice.sources[p]))
    known = {path for step in computed for path in step.paths}.union(loaded)
    rest = [path for path in shard if path not in known]
    exchanging = traffic.group_nbytes(loaded)
    steps = [
        Step(action(choice, path), (path,), group[path], shard[path], exchanging.get(path, 0), offloaded[path])
        for path in (*loaded, *rest)
    ]
    return computed + steps, len({id(program) for program in programs})


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
