"""Steps divided into stretches: each is one program call, and equal stretches, such as layers, are one program.

Responsible for the order of the steps, for where they are cut, and for what a stretch takes and returns. Steps that
make memory free are done as soon as they can be, so that a gradient becomes its norm at once. Cuts are at the same
place of every repetition of a sequence of steps, where the fewest bytes pass from one to the next.
`extras/run/flatten` makes the steps; `extras/run/run` decides how small stretches have to be, and runs them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import Sharding

from lazymodel._devices.hardware import compile_lowered
from lazymodel._programs.jaxprs import (
    CONFIG,
    PROGRAMS,
    Canonical,
    Interned,
    Programs,
    calls_back,
    is_weak,
    run_jaxpr,
    uses_x64,
)
from lazymodel.extras.run.flatten import Flattened, Operation, RunValue, nbytes_of

_CHAIN = 8  # steps that are looked ahead for one that makes memory free: a cast, a square, a sum
_SMALL = 16  # a result that is this many times smaller than its operands is computed as soon as it can be
_CANDIDATES = 64  # periods that are tried


def ordered(flat: Flattened) -> list[Operation]:
    """The steps, each that makes memory free as early as possible, the others in the order of the trace."""
    users: dict[RunValue, list[Operation]] = collections.defaultdict(list)
    for step in flat.steps:
        for value in {*step.values}:
            users[value].append(step)
    left = {value: len(found) for value, found in users.items()}
    for value in flat.values:
        left[value] = len(flat.steps) + left.get(value, 0)
    waiting = {step: len(_computed(step)) for step in flat.steps}
    numbers = {step: number for number, step in enumerate(flat.steps)}
    done: dict[Operation, None] = {}
    seen: set[RunValue] = set()  # variables that a step has used

    def chain(step: Operation) -> list[Operation]:
        """The steps from this one on that together make memory free; empty if they do not."""
        taken, dying, stays = list[Operation](), 0, False
        while len(taken) < _CHAIN and not step.eqn.effects and not variables_of(step) - seen:
            operands = {value for value in step.values if value.step is not None and not value.step.cheap}
            dying += sum(nbytes_of(value.aval) for value in operands if left[value] == 1 and value.step not in taken)
            stays |= any(left[value] > 1 for value in operands if value.step not in taken)
            made = sum(nbytes_of(value.aval) for value in step.results)
            taken.append(step)
            # As many bytes as die are no gain if something else that is read must wait for a later step.
            frees = made < dying or (made == dying and not stays)
            if frees or made * _SMALL <= sum(nbytes_of(value.aval) for value in operands):
                return taken
            if len(step.results) != 1 or len(found := users[step.results[0]]) != 1 or left[step.results[0]] != 1:
                break
            if waiting[found[0]] != 1:
                break
            step = found[0]
        return []

    for first in flat.steps:
        queue = collections.deque([first] if first not in done else [])
        while queue:
            step = queue.popleft()
            if step in done:
                continue
            done[step] = None
            seen |= variables_of(step)
            ready: dict[Operation, None] = {}
            for value in {*step.values}:
                left[value] -= 1
                if left[value] == 1 and value.step is not None and not value.step.cheap:
                    ready.update((user, None) for user in users[value] if user not in done and not waiting[user])
            for user in (user for value in step.results for user in users[value]):
                waiting[user] = sum(each not in done for each in _computed(user))
                if not waiting[user]:
                    ready[user] = None
            order = sorted((user for user in ready if user not in done), key=numbers.__getitem__)
            queue.extendleft(reversed([each for user in order for each in chain(user)]))
    return list(done)


def _computed(step: Operation) -> set[Operation]:
    return {value.step for value in step.values if value.step is not None and not value.step.cheap}


def variables_of(step: Operation) -> set[RunValue]:
    """The variables, or parts of them, that a step needs."""
    found = {value for value in step.values if value.part is not None}
    return found | {v.step.root for v in step.values if v.step is not None and v.step.cheap and v.step.root is not None}


class Cutter:
    """The places at which steps can be cut.

    Args:
        flat: The function.
        nbytes: Returns the bytes of a variable, or of a part of one, on a device.
    """

    def __init__(self, flat: Flattened, nbytes: Callable[[RunValue], int]) -> None:
        self.canonical, self.steps, self._nbytes = Canonical(), ordered(flat), nbytes
        self.flat = flat
        self._equations: dict[int, Any] = {}
        self._variables = [variables_of(step) for step in self.steps]
        self._crossing = self._crossing_nbytes()
        labels: dict[Hashable, int] = {}
        numbers = [labels.setdefault(self._label(step), len(labels)) for step in self.steps]
        self._regions = sorted(self._repeats(np.array(numbers, np.int64), 0, len(numbers)))

    @property
    def largest(self) -> int:
        """Bytes of the variables of the largest step."""
        return max((sum(map(self._nbytes, found)) for found in self._variables), default=0)

    def equation(self, step: Operation) -> Interned:
        """The canonical form of a step's equation."""
        if id(step.eqn) not in self._equations:  # iterations share equations, and `flat` keeps them
            self._equations[id(step.eqn)] = Interned(self.canonical.equation(step.eqn))
        return self._equations[id(step.eqn)]

    def _label(self, step: Operation) -> Hashable:
        def kind(operand: Any) -> Hashable:
            aval = self.canonical.aval(operand.aval)
            if isinstance(operand, jex.Literal):
                return ("literal", aval)
            cheap = operand.step is not None and bool(operand.step.cheap)
            return ("variable" if operand.part is not None else "cheap" if cheap else "value", aval)

        return (self.equation(step), tuple(map(kind, step.operands)))

    def _crossing_nbytes(self) -> np.ndarray:
        """Bytes that exist before each step, without variables and what is given."""
        last: dict[RunValue, int] = dict.fromkeys(self.flat.values, len(self.steps))
        for number, step in enumerate(self.steps):
            last.update((value, max(number, last.get(value, 0))) for value in step.values)
        change = np.zeros(len(self.steps) + 2, np.int64)
        for number, step in enumerate(self.steps):
            for value in step.results:
                if value in last:
                    change[number + 1] += nbytes_of(value.aval)
                    change[last[value] + 1] -= nbytes_of(value.aval)
        return np.cumsum(change)

    def _repeats(self, labels: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Ranges (start, stop, period) of steps that repeat, without overlaps."""
        if stop - start < 2:
            return
        window = labels[start:stop]
        order = np.argsort(window, kind="stable")
        same = np.diff(window[order]) == 0
        gaps = collections.Counter(np.diff(order)[same].tolist())
        weights = np.array([sum(map(self._nbytes, found)) for found in self._variables[start:stop]], np.float64)
        total = np.concatenate(([0.0], np.cumsum(weights / max(weights.sum(), 1) + 0.01 / len(weights))))
        best: tuple[float, list[tuple[int, int]], int] = (0.0, [], 0)
        for period, _ in sorted(gaps.most_common(_CANDIDATES)):
            runs = _runs(window[:-period] == window[period:], period)
            score = sum(total[last] - total[first] for first, last in runs)
            if score > best[0] * 1.02 + 1e-9:
                best = (score, runs, period)
        _, runs, period = best
        position = start
        for first, last in runs:
            yield from self._repeats(labels, position, start + first)
            part = window[first:last]  # it may repeat more often than what gave the period
            shorter = (each for each in range(1, period) if not period % each and (part[:-each] == part[each:]).all())
            yield (start + first, start + last, next(shorter, period))
            position = start + last
        if runs:
            yield from self._repeats(labels, position, stop)

    def cuts(self, limit: int | None) -> list[int]:
        """The first step of every stretch but the first.

        Args:
            limit: Bytes of variables that a stretch should not exceed; None is one stretch for each repetition.
        """
        places: list[tuple[int, int]] = []  # (step, number of the region it begins a repetition of)
        one = max([1, *(self._sum(start, start + period) for start, _, period in self._regions)])
        for number, (start, stop, period) in enumerate(self._regions):
            if self._sum(start, stop) < one:  # all of it is less than one repetition of another region
                continue
            middle = start + period * ((stop - start) // period // 2)
            phase = int(np.argmin(self._crossing[middle : middle + period]))
            places += [(place, number) for place in range(start + phase, stop + 1, period)]
        known: dict[int, list[int]] = {}
        bounds = [(0, -1), *places, (len(self.steps), -1)]
        sizes = [self._sum(a, b) for (a, here), (b, there) in itertools.pairwise(bounds) if here == there != -1]
        most = max([self.largest, *sizes])
        cuts: list[int] = []
        for (start, here), (stop, there) in itertools.pairwise(bounds):
            cuts.append(start)
            if here == there != -1:
                if limit is not None and here not in known:
                    known[here] = [place - start for place in self._split(start, stop, limit)]
                cuts += [start + place for place in known.get(here, ())]
            else:
                cuts += self._split(start, stop, most if limit is None else min(most, limit))
        return sorted({*cuts} - {0, len(self.steps)})

    def _sum(self, start: int, stop: int) -> int:
        return sum(map(self._nbytes, {value for found in self._variables[start:stop] for value in found}))

    def _split(self, start: int, stop: int, limit: int) -> Iterator[int]:
        held, nbytes, after = set[RunValue](), 0, start
        for number in range(start, stop):
            more = self._variables[number] - held
            added = sum(map(self._nbytes, more))
            if added and held and nbytes + added > limit:
                place = after + int(np.argmin(self._crossing[after : number + 1]))
                yield place
                held = {value for found in self._variables[place:number] for value in found}
                more = self._variables[number] - held
                nbytes, added = sum(map(self._nbytes, held)), sum(map(self._nbytes, more))
            held |= more
            nbytes += added
            if more:
                after = number + 1


def _runs(equal: np.ndarray, period: int) -> list[tuple[int, int]]:
    """Ranges in which a sequence repeats with a period, at least twice, without overlaps."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    found: list[tuple[int, int]] = []
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        first = max(first, found[-1][1] if found else 0)
        if last - first >= period:
            found.append((first, last + period))
    return found


@dataclasses.dataclass(eq=False)
class Stretch:
    """Steps that are one program call.

    Attributes:
        steps: All steps of the program in order, cheap ones included.
        inputs: The values that it takes, in order of their first use.
        outputs: The values that it returns.
        form: Its canonical form without the values of literals.
        literals: These values.
        hoisted: The positions of literals that are inputs of the program, as they differ among equal stretches.
    """

    steps: list[Operation] = dataclasses.field(default_factory=list[Operation])
    inputs: list[RunValue] = dataclasses.field(default_factory=list[RunValue])
    outputs: list[RunValue] = dataclasses.field(default_factory=list[RunValue])
    form: Hashable = None
    literals: list[Any] = dataclasses.field(default_factory=list[Any])
    hoisted: tuple[int, ...] = ()

    @property
    def scalars(self) -> list[np.ndarray]:
        """The literals that are inputs, after all values."""
        return [np.asarray(self.literals[place].val, self.literals[place].aval.dtype) for place in self.hoisted]


def stretches(cutter: Cutter, limit: int | None) -> list[Stretch]:
    """All stretches, in order; those of equal programs have equal forms and the same literals hoisted."""
    bounds = [0, *cutter.cuts(limit), len(cutter.steps)]
    groups = [cutter.steps[start:stop] for start, stop in itertools.pairwise(bounds)]
    last: dict[RunValue, int] = {}
    for number, steps in enumerate(groups):
        last.update((value, number) for step in steps for value in step.values)
    last.update(dict.fromkeys(cutter.flat.values, len(groups)))
    found: list[Stretch] = []
    for number, steps in enumerate(groups):
        used = {value for step in steps for value in step.results if last.get(value, -1) > number}
        cheap = [value for value in cutter.flat.values if value.step is not None and value.step.cheap]
        found.append(_stretch(cutter, steps, used, cheap if number == len(groups) - 1 else []))
    by_form: dict[Hashable, list[Stretch]] = collections.defaultdict(list)
    for stretch in found:
        by_form[stretch.form].append(stretch)
    for group in by_form.values():
        columns = zip(*([_literal(each) for each in stretch.literals] for stretch in group), strict=True)
        hoisted = tuple(place for place, column in enumerate(columns) if len({*column}) > 1)
        for stretch in group:
            stretch.hoisted = hoisted
    return found


def _literal(literal: Any) -> Hashable:
    return (np.asarray(literal.val, literal.aval.dtype).tobytes(), str(literal.aval.dtype))


def _stretch(cutter: Cutter, steps: Sequence[Operation], used: set[RunValue], more: Sequence[RunValue]) -> Stretch:
    stretch, numbers, form = Stretch(), dict[RunValue, Any](), list[Hashable]()

    def refer(operand: Any) -> Hashable:
        if isinstance(operand, jex.Literal):
            stretch.literals.append(operand)
            return ("literal", cutter.canonical.aval(operand.aval))
        if operand not in numbers and operand.step is not None and operand.step.cheap:
            add(operand.step)
        if operand not in numbers:
            numbers[operand] = ("input", len(stretch.inputs), cutter.canonical.aval(operand.aval))
            stretch.inputs.append(operand)
        return numbers[operand]

    def add(step: Operation) -> None:
        for value in step.values:  # cheap steps first, so that literals are in the order of steps
            refer(value)
        operands = tuple(refer(operand) for operand in step.operands)
        form.append((cutter.equation(step), operands))
        numbers.update((value, ("step", len(stretch.steps), place)) for place, value in enumerate(step.results))
        stretch.steps.append(step)

    for step in steps:
        add(step)
    for value in more:
        refer(value)
    stretch.outputs = [value for step in steps for value in step.results if value in used] + [*more]
    stretch.form = Interned((tuple(form), tuple(numbers[value] for value in stretch.outputs)))
    return stretch


@dataclasses.dataclass(frozen=True)
class StretchProgram:
    """A compiled stretch."""

    run: Callable[..., Sequence[jax.Array]]
    shardings: tuple[Sharding, ...]  # of its outputs
    temp_nbytes: int  # of temporaries on each device


def program(
    stretch: Stretch, shardings: Sequence[Sharding], default: Sharding, own: Programs[StretchProgram]
) -> tuple[Hashable, StretchProgram]:
    """The program of a stretch, compiled once for the process, and its key.

    Args:
        stretch: The stretch.
        shardings: Those of its inputs.
        default: The sharding of the results of a stretch without inputs, and of scalars.
        own: Where programs that call Python are kept: these keep the objects that they call.
    """
    fixed = tuple(_literal(each) for place, each in enumerate(stretch.literals) if place not in stretch.hoisted)
    settings = (uses_x64(), CONFIG.jax_threefry_partitionable, CONFIG.jax_default_matmul_precision)
    key = ("stretch", stretch.form, stretch.hoisted, fixed, tuple(shardings), default, settings)
    known = own if any(step.eqn.effects or calls_back(step.eqn) for step in stretch.steps) else PROGRAMS
    return key, known.get(key, lambda: _compiled(stretch, shardings, default))


def _compiled(stretch: Stretch, shardings: Sequence[Sharding], default: Sharding) -> StretchProgram:
    atoms: dict[Any, Any] = {value: jex.Var(value.aval) for value in stretch.inputs}
    scalars = {place: jex.Var(stretch.literals[place].aval) for place in stretch.hoisted}
    literals, equations = itertools.count(), list[Any]()

    def atom(operand: Any) -> Any:
        return scalars.get(next(literals), operand) if isinstance(operand, jex.Literal) else atoms[operand]

    for step in stretch.steps:
        invars = [atom(operand) for operand in step.operands]
        outvars = [jex.Var(var.aval) for var in step.eqn.outvars]
        atoms.update(zip(step.results, outvars, strict=True))
        equations.append(step.eqn.replace(invars=invars, outvars=outvars))
    invars = [*(atoms[value] for value in stretch.inputs), *scalars.values()]
    effects = frozenset(effect for equation in equations for effect in equation.effects)
    info = jex.DebugInfo("lazymodel", "stretch", ("",) * len(invars), None)
    jaxpr = jex.Jaxpr((), invars, [atoms[value] for value in stretch.outputs], equations, effects, info)

    def stretch_program(*values: Any) -> list[Any]:
        return run_jaxpr(jaxpr, values)

    placed = [*shardings, *(default for _ in scalars)]
    avals: list[Any] = [var.aval for var in invars]
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=is_weak(aval))
        for aval, sharding in zip(avals, placed, strict=True)
    ]
    options: Any = {} if structs else {"out_shardings": default}
    lowered = jax.jit(stretch_program, keep_unused=True, **options).lower(*structs)
    compiled = compile_lowered(lowered, "a stretch of the function")
    memory = compiled.memory_analysis()
    outputs = tuple(jax.tree.leaves(compiled.output_shardings))
    return StretchProgram(compiled, outputs, 0 if memory is None else int(memory.temp_size_in_bytes))
