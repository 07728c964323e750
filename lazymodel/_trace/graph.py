"""Turns a jaxpr into init recipes: small equations are evaluated, the rest is divided into a slice per variable.

Small equations (keys, counters, scalars) are data, evaluated at once on the host. The rest is divided into one backward
slice for each output leaf; structurally equal slices are one init program. Leaves that share a large random or
contracted intermediate (one matrix split into q, k and v) are one slice with several outputs.

Values are those of *eager* execution, bit for bit, where every top-level equation is a separate kernel with scalars as
run-time values; `jax.jit` of the whole function would fuse multiplications into additions, fold constants and
reassociate. So a program takes top-level scalars as inputs, and hides values that pass from one kernel to the next
behind the addition of a run-time zero to their bits, which no compiler can remove and every compiler can fuse. If a
kernel gets a value twice, it is copied, and the copy is hidden again. This is sufficient if each element is computed by
itself. Operations that add up, multiply or factorize computed floats are divided into eager execution's own kernels
(`_programs/jaxprs`), which one device runs, as are the results of one compiled function that share floats.

Most functions of `jax.numpy` are compiled functions that JAX inlines when it traces them, and one kernel in eager
execution: in `x.mean(0)` the compiler divides by a constant. No public API shows which equations came from one
function, so a trace is made in `keep_inlined`. If one kernel and several give the same bits, as for most elementwise
functions, `comes_apart` returns True.

Not guaranteed: what depends on more than the equations. A scan with only some of its results used, and a compiled
function whose results share no floats, are compiled without the rest; derivatives are those of the trace; and programs
for other kinds of devices than CPUs are not compared.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core.primitives import copy_p
from jax.ref import AbstractRef

from lazymodel._errors import TraceError
from lazymodel._programs.jax_private import INLINED
from lazymodel._programs.jaxprs import (
    CALLS,
    CONTROL,
    ELEMENTWISE,
    JIT,
    STRUCTURAL,
    Canonical,
    Interned,
    Kernel,
    Kernels,
    as_keys,
    calls_back,
    equations,
    inner_jaxpr,
    inner_jaxprs,
    is_cheap,
    is_dropped,
    is_floating,
    is_key,
    is_partitionable,
    is_weak,
    live_part,
    named_devices,
    one_equation,
    rounds,
    run_jaxpr,
    unpack_keys,
    uses_x64,
    walk,
    with_weak_type,
)
from lazymodel._programs.programs import InitRecipe
from lazymodel._trace.errors import evaluate, reference_error, to_host


def comes_apart(eqn: Any) -> bool:
    """True if an equation is a function that JAX would have inlined, and its equations one by one give the same bits.

    This is the case if at most one of them rounds, so the compiler has nothing to fuse or reassociate, and that one
    is elementwise, without a constant for which it might be rewritten. A bool converted to float also counts as
    rounding: its product with a number is compiled as a choice between the number and zero.
    """
    if eqn.primitive.name not in JIT or not eqn.params["name"].startswith(INLINED):
        return False
    return _is_separable(eqn.params["jaxpr"])


@functools.lru_cache(maxsize=512)  # layers share them
def _is_separable(closed: Any) -> bool:
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) == 1 and not _has_constant(jaxpr.eqns[0]):
        return jaxpr.eqns[0].primitive.name not in JIT
    rounding = list(_rounding(jaxpr))
    converted = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "convert_element_type")
    if rounding and any(eqn.invars[0].aval.dtype == np.bool_ for eqn in converted):
        return False
    return is_partitionable(jaxpr.eqns) and len(rounding) <= 1 and not any(map(_has_constant, rounding))


def _rounding(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in JIT or eqn.primitive.name in CALLS:
            for inner in inner_jaxprs(eqn):
                yield from _rounding(inner)
        elif rounds(eqn):
            yield eqn


def _has_constant(eqn: Any) -> bool:
    """Returns True if an equation contains a floating-point constant."""
    return any(hasattr(atom, "val") and jax.numpy.issubdtype(atom.aval.dtype, np.inexact) for atom in eqn.invars)


# Operations that only place a value: shardings are assigned later.
_PLACEMENT = frozenset({"device_put", "sharding_constraint", "copy", "copy_p"})
# On CPUs these operations process matrices column by column.
_BY_COLUMNS = frozenset({"qr", "geqrf", "geqp3", "householder_product", "lu", "cholesky", "eigh", "svd"})
_VECTOR = 16  # elements of the widest vector register in use, 512 bits of float32
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# The source of a value, such as ("input", number) or ("step", number of the step, number of the result).
_Place = tuple[Any, ...]


# No generated `repr` in a graph: of values that share steps it would have no end.
@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Value:
    """One value of the traced function."""

    aval: Any  # its shape and dtype
    data: Any = None  # its value on the host, when it is known
    step: _Step | None = None  # the step that computes it; None for arguments, constants and known values
    index: int = 0  # number of the step's result
    evaluated: bool = False  # True if its data is the result of an equation, and not a constant or an argument
    literal: Any = None  # its literal, if it is one inside a compiled function, and so a constant of the program
    heavy: bool = False  # True if it is, or derives from, a large result that is costly to compute
    parent: Value | None = None  # in the union-find forest that groups leaves; None for a root

    def root(self) -> Value:
        """The value that represents its group."""
        while self.parent is not None:
            self.parent = self.parent.parent or self.parent
            self = self.parent
        return self

    def needs_struct(self) -> bool:
        """Returns True if it may depend on an argument that was given as a `jax.ShapeDtypeStruct`."""
        operands = (value for step in _needed_steps([self]) for value in step.operands)
        return any(value.step is None and value.data is None for value in (self, *operands))

    def join(self, other: Value) -> None:
        """Merges two groups."""
        own, root = self.root(), other.root()
        own.parent = None if own is root else root


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class _Step:
    """An equation to be computed by a program."""

    eqn: Any
    operands: Sequence[Value]
    unit: int | None  # the compiled function it belongs to; None for an equation that eager execution runs by itself
    order: int  # its place in the function
    results: tuple[Value, ...] = ()
    part: Any = None  # the reduced equation if only some of its results are needed, as a jaxpr of `operands`

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def free(self) -> list[Value]:
        """Its operands without the constants."""
        return [value for value in self.operands if value.literal is None]

    def hides(self, value: Value) -> bool:
        """Returns True if it gets a float from another eager kernel, with which the compiler might fuse it."""
        passes = self.name in STRUCTURAL or (self.name in _PLACEMENT and self.name != "copy")
        if value.step is None or passes or not is_floating(value.aval):
            return False
        return self.unit is None or value.step.unit != self.unit

    @property
    def eqns(self) -> Sequence[Any]:
        """What it computes."""
        return [self.eqn] if self.part is None else self.part.eqns

    def jaxpr(self) -> Any:
        """The equation as a jaxpr of its `free` operands."""
        return self.part if self.part is not None else one_equation(self.eqn, [v.literal for v in self.operands])

    def run(self, *operands: Any) -> list[Any]:
        """Its results for its `free` operands."""
        return list(operands) if self.moves else run_jaxpr(self.jaxpr(), operands)

    @property
    def moves(self) -> bool:
        """Returns True if it only passes its operands on."""
        return self.name in _PLACEMENT and len(self.free) == len(self.results)


def _needed_steps(values: Sequence[Value]) -> list[_Step]:
    """The steps that some values depend on, in order."""
    found: dict[_Step, None] = {}
    stack = [value.step for value in values if value.step is not None]
    while stack:
        step = stack.pop()
        if step not in found:
            found[step] = None
            stack.extend(value.step for value in step.operands if value.step is not None)
    return sorted(found, key=lambda step: step.order)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # JAX takes the `repr` of every function that it compiles
class Program:
    """The function of a recipe: its steps, run in order on its inputs."""

    __name__ = "init_program"  # for the compiler

    # Each step with, for each operand that is not fixed, its place, and True if it is hidden.
    plan: Sequence[tuple[_Step, Sequence[tuple[_Place, bool]]]]
    outputs: Sequence[_Place]  # the places of the results
    kinds: Sequence[Any]  # for each input, the dtype of the keys that it is the data of, or None
    uses_zero: bool = False  # True if the last input is a zero to hide values with
    weak: Sequence[bool] | None = None  # for each output, True if it is weakly typed; None leaves them unchanged

    def __call__(self, *inputs: Any) -> tuple[jax.Array, ...]:
        given = [as_keys(value, kind) for value, kind in zip(inputs, self.kinds, strict=False)]
        zero = inputs[-1] if self.uses_zero else None
        results: list[list[Any]] = []
        hidden: dict[_Place, Any] = {}

        def read(place: _Place) -> Any:
            return given[place[1]] if place[0] == "input" else results[place[1]][place[2]]

        for step, references in self.plan:
            operands: list[Any] = []
            for place, crosses in references:
                if not crosses:
                    operands.append(read(place))
                    continue
                if place not in hidden:
                    hidden[place] = _hide(read(place), zero)
                value = hidden[place]
                if step.name in _BY_COLUMNS:
                    # Without it XLA would also compute the value in that order, vectorized differently than by rows.
                    value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
                operands.append(value)
            results.append(step.run(*operands))
        found = {place: read(place) for place in self.outputs}
        if self.weak is not None:  # values computed from inputs, which are strongly typed, have lost their weak type
            weak = dict(zip(self.outputs, self.weak, strict=True))
            found = {place: with_weak_type(value, weak[place]) for place, value in found.items()}
        return tuple(found[place] for place in self.outputs)


def _hide(value: Any, zero: Any) -> Any:
    """The same value, hidden so that the compiler does not know how it was computed."""
    bits = _BITS.get(value.dtype.itemsize)
    # Four-bit floats are stored in bytes, and complex numbers consist of two floats.
    if bits is None or value.dtype.itemsize * 8 != int(jax.numpy.finfo(value.dtype).bits):
        return jax.lax.optimization_barrier(value)
    if value.shape and value.shape[-1] % _VECTOR:
        # A loop over such rows is vectorized differently once more is fused into it, for which jax 0.12's XLA:CPU
        # contracts other multiplications and additions.
        value = jax.lax.optimization_barrier(value)
    raw = jax.lax.bitcast_convert_type(value, bits)
    return jax.lax.bitcast_convert_type(raw + jax.lax.convert_element_type(zero, bits), value.dtype)


# Results of at most this many keys or integers are data: a split for every layer of a deep stack, 32 KiB at most.
_SMALL_INTEGERS = 4096
# Integers from compiled functions and generators are data up to a few raw keys, and floats only as scalars. Larger
# ones would each compile a kernel for their shape; in a program, equal ones are compiled once.
_SMALL_RESULTS = 16
_SMALL_FLOATS = 1
# A shared intermediate with fewer elements is recomputed by each leaf that needs it, and does not join them.
_LARGE = 4096
_NO_EVALUATION = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "pure_callback"})
_ORIGINS = ("truncated_normal", "normal", "uniform", "orthogonal", "permutation", "bernoulli", "randint", "gamma")


class Graph:
    """The traced function as values and steps: calls are inlined, small equations evaluated."""

    def __init__(self, closed: Any, inputs: Sequence[Any]):  # a `jax.ShapeDtypeStruct` has no value
        self.steps: list[_Step] = []
        self._compiled: list[list[Value]] = []  # the results of each compiled function with several
        self._parts: dict[int, list[tuple[set[_Step], list[Value]]]] = {}
        self._canonical = Canonical()
        self._equations: dict[int, Any] = {}
        values = [_host_value(var, value) for var, value in zip(closed.jaxpr.invars, inputs, strict=True)]
        self.results = self._walk(closed, values, None)

    def _walk(self, jaxpr: Any, inputs: Sequence[Value], unit: int | None) -> list[Value]:
        def constant(atom: Any, data: Any) -> Value:
            value = _host_value(atom, data)
            # Only scalars were constants in an eager kernel's code; larger literals are inputs of the program.
            if hasattr(atom, "val") and not atom.aval.shape and (unit is not None or not is_floating(atom.aval)):
                value.literal = atom
            return value

        return walk(jaxpr, inputs, constant, lambda eqn, operands: self._results(eqn, operands, unit))

    def _results(self, eqn: Any, operands: list[Value], unit: int | None) -> Sequence[Value]:
        """Results of an equation: known values, the results of its inner equations, or those of a new step."""
        name = eqn.primitive.name
        if comes_apart(eqn):
            return self._walk(inner_jaxpr(eqn), operands, unit)
        if all(value.data is not None for value in operands) and _is_small(eqn, unit):
            results = evaluate(eqn, [value.data for value in operands])
            return [Value(var.aval, data, evaluated=True) for var, data in zip(eqn.outvars, results, strict=True)]
        if unit is None and name not in ELEMENTWISE:
            if name in JIT or name in CALLS or name in CONTROL:
                # In eager execution, literals are run-time inputs of these.
                operands = [value if value.literal is None else Value(value.aval, value.data) for value in operands]
            operands = self._distinct(operands)
        if name in CALLS or (name in JIT and sum(not is_dropped(var) for var in eqn.outvars) > 1):
            if name not in JIT or unit is not None:
                return self._walk(inner_jaxpr(eqn), operands, unit)
            within = len(self._compiled)
            self._compiled.append([])
            self._compiled[within] = self._walk(inner_jaxpr(eqn), operands, within)
            return self._compiled[within]
        return self._step(eqn, operands, unit)

    def _step(self, eqn: Any, operands: Sequence[Value], unit: int | None) -> Sequence[Value]:
        """The results of a new step."""
        if any(isinstance(var.aval, AbstractRef) for var in eqn.outvars):
            raise reference_error(f"to {eqn.outvars[0].aval}")
        step = _Step(eqn, operands, unit, len(self.steps))
        step.results = tuple(Value(var.aval, step=step, index=index) for index, var in enumerate(eqn.outvars))
        self.steps.append(step)
        return step.results

    def _distinct(self, operands: Sequence[Value]) -> list[Value]:
        """The operands of an eager kernel: a value that is passed twice is two parameters."""
        latest: dict[Value, Value] = {}

        def distinct(value: Value) -> Value:
            copied = latest.get(value) if is_floating(value.aval) else None
            if copied is None:
                copied = value
            elif value.step is None:
                copied = Value(value.aval, value.data)
            else:
                eqn = jex.new_jaxpr_eqn([jex.Var(value.aval)], [jex.Var(value.aval)], copy_p, {}, jex.no_effects)
                (copied,) = self._step(eqn, [copied], None)
            latest[value] = copied
            return copied

        return list(map(distinct, operands))

    # Results of a compiled function that eager execution computes together, in one kernel.
    #
    # A compiled function with several results is traced equation by equation, so that each variable can be computed
    # alone. If floats are added up in it, the compiler's choices depend on everything that it computes from the same
    # floats, so a kernel that needs some of these computes all of them. Parts of the function that share no floats,
    # computed by it or before it, stay separate: a whole model initialized by one compiled function still has a kernel
    # for each variable.

    def _completed(self, values: Sequence[Value]) -> list[Value]:
        """Some values, and those that eager execution computes in the same kernels as their dependencies."""
        found, before = dict.fromkeys(values), 0
        while len(found) > before:
            before, steps = len(found), set(_needed_steps(list(found)))
            for unit in {step.unit for step in steps if step.unit is not None}:
                for part, outputs in self._connected(unit):
                    found.update(dict.fromkeys(outputs if not part.isdisjoint(steps) else ()))
        return list(found)

    def _connected(self, unit: int) -> list[tuple[set[_Step], list[Value]]]:
        """The parts of a function that add up floats: their steps, and the results that they compute."""
        if unit not in self._parts:
            steps = [step for step in _needed_steps(self._compiled[unit]) if step.unit == unit]
            part_of: dict[_Step, set[_Step]] = {step: {step} for step in steps}
            first_use: dict[Value, _Step] = {}  # of the function's arguments
            for step in steps:
                for value in step.operands:
                    if value.step is None or not is_floating(value.aval):
                        continue
                    other = value.step if value.step in part_of else first_use.setdefault(value, step)
                    if part_of[other] is not part_of[step]:
                        smaller, larger = sorted((part_of[other], part_of[step]), key=len)
                        larger |= smaller
                        part_of.update(dict.fromkeys(smaller, larger))
            self._parts[unit] = [
                (part, [value for value in self._compiled[unit] if value.step in part])
                for part in {id(part): part for part in part_of.values()}.values()
                if not all(is_partitionable(step.eqns) for step in part)
            ]
        return self._parts[unit]

    def recipes(self, computed: Sequence[tuple[str, Value]]) -> tuple[InitRecipe, ...]:
        """The init recipes of some results, in order of their first path."""
        for step in self._live({value for _, value in computed}):
            _join(step)
        groups: dict[Value, list[tuple[str, Value]]] = {}
        for path, value in computed:
            # A light value is recomputed wherever it is needed, even for two leaves with the same value.
            groups.setdefault(value.root() if value.heavy else Value(value.aval), []).append((path, value))
        return tuple(self._recipe(group) for group in groups.values())

    def _live(self, live: set[Value]) -> list[_Step]:
        """The steps that some results need, in order; scans divided into one for each result."""
        kept: list[_Step] = []
        for step in reversed(self.steps):
            needed = [value for value in step.results if value in live]
            if not needed:
                continue
            # A scan stays whole if all of it is needed and it adds up floats; otherwise unused results are dropped.
            cut = step.name == "scan" and len(step.results) > 1
            cut = cut and (len(needed) < len(step.results) or is_partitionable(step.eqns))
            parts = [_cut(step, value) for value in needed] if cut else [step]
            for part in parts:
                live.update(part.operands)
            kept.extend(reversed(parts))
        kept.reverse()
        return kept

    def _recipe(self, group: Sequence[tuple[str, Value]]) -> InitRecipe:
        values = [value for _, value in group]
        steps = _needed_steps(values)
        devices = frozenset[Any]().union(*(named_devices(step.eqns) for step in steps if not step.moves))
        partitionable = all(is_partitionable(step.eqns) for step in steps)
        by_kernel = bool(devices) or not partitionable
        if by_kernel:
            values = self._completed(values)
            steps = _needed_steps(values)
        where: dict[Value, _Place] = {}
        given: list[Value] = []

        def refer(value: Value) -> _Place:
            if value not in where:
                if value.data is None:
                    what = f"an argument that was given as a ShapeDtypeStruct ({value.aval})"
                    raise TraceError(f"{group[0][0]!r} needs the value of {what}; pass an array")
                where[value] = ("input", len(given))
                given.append(value)
            return where[value]

        def constant(value: Value) -> _Place:
            return ("fixed", self._canonical.parameter(value.data), self._canonical.aval(value.aval))

        lines: list[_Line] = []
        for number, step in enumerate(steps):
            references = [
                (constant(value), False) if value.literal is not None else (refer(value), step.hides(value))
                for value in step.operands
            ]
            where.update((value, ("step", number, index)) for index, value in enumerate(step.results))
            lines.append((step, self._step_form(step), tuple(references)))
        outputs = tuple(refer(value) for _, value in group)
        types = tuple(self._canonical.aval(value.aval) for value in given)
        weak = tuple(is_weak(value.aval) for _, value in group)
        kinds = [value.aval.dtype if is_key(value.aval.dtype) else None for value in given]
        inputs = [_input(value) for value in given]
        uses_zero = any(hidden for _, _, references in lines for _, hidden in references)
        if uses_zero:
            inputs.append(np.zeros((), np.uint32))
        kernels = None
        if by_kernel:
            kept = {*outputs, *(where[value] for value in values if value in where)}
            cut, ends = _kernels(lines, outputs, kept, kinds)
            kernels = Kernels(cut, ends, devices, partitionable)
        form, program = _program(lines, outputs, kinds, uses_zero, weak)
        return InitRecipe(
            paths=tuple(path for path, _ in group),
            signature=Interned((form, types)),
            function=program,
            inputs=tuple(inputs),
            origin=_origin(steps),
            x64=uses_x64(),
            keys=(*kinds, *(None,) * uses_zero),
            kernels=kernels,
        )

    def _step_form(self, step: _Step) -> Any:
        if step.part is not None:
            return (self._canonical.jaxpr(step.part), self._canonical.context(step.eqn))
        if id(step.eqn) not in self._equations:
            self._equations[id(step.eqn)] = Interned(self._canonical.equation(step.eqn))
        return self._equations[id(step.eqn)]


# A step, its form in the program's signature, and the places of its operands, constants included; True if hidden.
_Line: TypeAlias = "tuple[_Step, Any, Sequence[tuple[_Place, bool]]]"


def _program(
    lines: Sequence[_Line],
    outputs: Sequence[_Place],
    kinds: Sequence[Any],
    uses_zero: bool = False,
    weak: Sequence[bool] | None = None,
) -> tuple[Any, Program]:
    """A form that is equal for programs that compute the same, and the program."""
    form = (tuple((form, places) for _, form, places in lines), tuple(outputs), tuple(kinds), uses_zero, weak)
    plan = [(step, [each for each in places if each[0][0] != "fixed"]) for step, _, places in lines]
    return form, Program(plan, outputs, kinds, uses_zero, weak)


def _kernels(
    lines: Sequence[_Line], outputs: Sequence[_Place], kept: Set[_Place], kinds: Sequence[Any]
) -> tuple[tuple[Kernel, ...], tuple[_Place, ...]]:
    """The kernels of a recipe, and the places of its outputs.

    Args:
        lines: Its steps in order; those of one unit follow one another.
        outputs: The places of its outputs.
        kept: Results that eager execution keeps; the kernels that compute them keep them too, even if unused.
        kinds: For each of its inputs, the dtype of the keys that it is the data of, or None.
    """
    used = set(kept)
    for step, _, places in lines:  # values that only their own function uses are not results of a kernel
        steps = (place for place, _ in places if place[0] == "step")
        used.update(place for place in steps if step.unit is None or lines[place[1]][0].unit != step.unit)
    where: dict[_Place, _Place] = {}  # places of steps' results outside of their kernel
    kernels: list[Kernel] = []
    units = [(step.unit, step.unit is None and number) for number, (step, _, _) in enumerate(lines)]
    for _, group in itertools.groupby(range(len(lines)), units.__getitem__):
        numbers = list(group)
        step, _, places = lines[numbers[0]]
        if len(numbers) == 1 and step.moves:
            where.update((("step", numbers[0], i), where.get(place, place)) for i, (place, _) in enumerate(places))
            continue
        within = [("step", number, i) for number in numbers for i in range(len(lines[number][0].results))]
        # All results of an equation, as in eager execution; for a compiled function the used ones.
        results = [place for place in within if step.unit is None or place in used]
        kernels.append(_kernel([lines[number] for number in numbers], numbers[0], set(within), results, where, kinds))
        where.update((place, ("kernel", len(kernels) - 1, index)) for index, place in enumerate(results))
    return tuple(kernels), tuple(where.get(place, place) for place in outputs)


def _kernel(
    lines: Sequence[_Line],
    first: int,
    within: Set[_Place],
    results: Sequence[_Place],
    where: Mapping[_Place, _Place],
    kinds: Sequence[Any],
) -> Kernel:
    taken: dict[_Place, int] = {}  # two operands with the same value are two, as in eager execution

    def local(place: _Place) -> _Place:
        if place in within:
            return ("step", place[1] - first, place[2])
        return place if place[0] == "fixed" else ("input", taken.setdefault(place, len(taken)))

    body = [(step, form, tuple((local(place), False) for place, _ in places)) for step, form, places in lines]
    ends = tuple(map(local, results))
    operands = tuple(where.get(place, place) for place in taken)
    wrapped = tuple(kinds[place[1]] if place[0] == "input" else None for place in operands)
    form, program = _program(body, ends, wrapped)
    return Kernel(Interned(form), program, operands, alone=lines[0][0].unit is None)


def _host_value(var: Any, value: Any) -> Value:
    """An argument, constant or literal, with its data unless it is abstract."""
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    return Value(var.aval, None if abstract else to_host(value, var.aval.dtype))


def _input(value: Value) -> np.ndarray[Any, Any]:
    """The input of a program for a known value."""
    if is_key(value.aval.dtype):
        return unpack_keys(value.data)
    return np.ascontiguousarray(value.data).reshape(value.aval.shape)  # ascontiguousarray makes 0-d arrays 1-d


def _is_small(eqn: Any, unit: int | None) -> bool:
    """Returns True if an equation with known operands is evaluated on the host."""
    name = eqn.primitive.name
    few = name in JIT or name in _NO_EVALUATION or name in CONTROL
    for var in eqn.outvars:
        size, dtype = var.aval.size, var.aval.dtype
        if is_key(dtype):
            allowed = _SMALL_INTEGERS
        elif np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_):
            allowed = _SMALL_RESULTS if few else _SMALL_INTEGERS
        else:
            # Inside a compiled function XLA fuses floats, so evaluating equations one by one might change a bit.
            allowed = _SMALL_FLOATS if unit is None and is_floating(var.aval) else -1
        if size > allowed:
            return False
    return name not in CALLS and not eqn.effects and bool(eqn.outvars) and not calls_back(eqn)


def _join(step: _Step) -> None:
    """Marks heavy results, and joins them with the results that are computed from them."""
    from_heavy = [value for value in step.operands if value.heavy]
    costly = not is_cheap(step.eqn)
    for value in step.results:
        value.heavy = bool(from_heavy) or (costly and value.aval.size > _LARGE)
    together = [*from_heavy, *(value for value in step.results if value.heavy)]
    for value in together[1:]:
        value.join(together[0])


def _cut(step: _Step, value: Value) -> _Step:
    """The part of a scan that computes one of its results."""
    whole = one_equation(step.eqn, [operand.literal for operand in step.operands])
    jaxpr, used = live_part(whole, value.index)
    operands = [operand for operand, use in zip(step.free, used, strict=True) if use]
    part = _Step(step.eqn, operands, step.unit, step.order)
    part.part = jaxpr
    part.results = (value,)
    value.step, value.index = part, 0
    return part


def _origin(steps: Sequence[_Step]) -> str:
    """The origin of a recipe as one word, from the names of the functions that it calls."""
    names = {step.name for step in steps}
    called = {str(step.eqn.params.get("name", "")).lstrip("_") for step in steps if step.name in JIT}
    if {"qr", "householder_product"} & names or "qr" in called:
        return "orthogonal"
    for origin in _ORIGINS:
        if origin in called:
            return origin
    if any(name.startswith("random_") for name in names):
        return "random"
    if not names:
        return "value"
    return "fill" if names <= {"broadcast_in_dim", "convert_element_type"} else "init"
