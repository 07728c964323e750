"""From a jaxpr to init recipes: small equations are evaluated, what is left is cut into a slice for each variable.

Small equations (keys, counters, scalars) are data, evaluated at once on the host. What is left is cut into one backward
slice for each output leaf; structurally equal ones are one init program. Leaves that share a large random or contracted
intermediate (one matrix split into q, k and v) are one slice with several outputs, so that it is computed once. What a
slice does when it runs is `_trace/program`'s matter; nothing here allocates more than keys and scalars.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend.core.primitives import copy_p

from lazymodel._errors import TraceError
from lazymodel._programs.jaxprs import (
    CALLS,
    CONTROL,
    ELEMENTWISE,
    JIT,
    Canonical,
    Interned,
    calls_back,
    inner_jaxpr,
    is_cheap,
    is_dropped,
    is_floating,
    is_partitionable,
    is_weak,
    live_part,
    named_devices,
    one_equation,
    opened,
    uses_x64,
)
from lazymodel._programs.kernels import kernels_of
from lazymodel._programs.keys import is_key, unpack_keys
from lazymodel._programs.programs import InitRecipe
from lazymodel._trace.inlined import comes_apart
from lazymodel._trace.program import Place, Program, Step, Value, needed_steps
from lazymodel._trace.small import evaluate, to_host
from lazymodel._trace.units import Units

# A result of at most this many keys or integers is data: a split for every layer of a deep stack, and 32 KiB at most.
_SMALL_INTEGERS = 4096
# Integers that compiled functions and generators return are data up to a few raw keys, and floats as scalars. Larger
# ones would each compile a kernel for their shape; in a program, equal ones are compiled once.
_SMALL_RESULTS = 16
_SMALL_FLOATS = 1
# A shared intermediate of fewer elements is recomputed by each leaf that needs it, rather than joining them.
_LARGE = 4096
_NO_EVALUATION = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "pure_callback"})
_ORIGINS = ("truncated_normal", "normal", "uniform", "orthogonal", "permutation", "bernoulli", "randint", "gamma")


class Graph:
    """The traced function as values and steps: calls seen through, small equations evaluated."""

    def __init__(self, closed: Any, inputs: Sequence[Any]):  # of which a `jax.ShapeDtypeStruct` has no value
        self.steps: list[Step] = []
        self._units = itertools.count()
        self._compiled = Units(needed_steps)
        self._canonical = Canonical()
        self._equations: dict[int, Any] = {}
        self._apart: dict[int, tuple[Any, bool]] = {}
        jaxpr, consts = opened(closed)
        values = [_host_value(var, value) for var, value in zip(jaxpr.invars, inputs, strict=True)]
        self.results = self._walk(jaxpr, consts, values, None)

    def _walk(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], unit: int | None) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((var, _host_value(var, const)) for var, const in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Value:
            if hasattr(atom, "val"):  # a literal
                value = _host_value(atom, atom.val)
                # Only scalars were fixed in an eager kernel's own code; larger literals are inputs of the program.
                if not atom.aval.shape and (unit is not None or not is_floating(atom.aval)):
                    value.literal = atom
                return value
            return env[atom]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [read(atom) for atom in eqn.invars], unit)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[Value], unit: int | None) -> Sequence[Value]:
        """What an equation gives: known values, the results of its inner equations, or those of a new step."""
        name = eqn.primitive.name
        if self._comes_apart(eqn):
            return self._walk(*opened(inner_jaxpr(eqn)), operands, unit)
        if all(value.data is not None for value in operands) and _is_small(eqn, unit):
            results = evaluate(eqn, [value.data for value in operands])
            return [Value(var.aval, data, evaluated=True) for var, data in zip(eqn.outvars, results, strict=True)]
        if unit is None and name not in ELEMENTWISE:
            if name in JIT or name in CALLS or name in CONTROL:
                operands = [value.at_run_time() for value in operands]
            operands = self._distinct(operands)
        if name in CALLS or (name in JIT and sum(not is_dropped(var) for var in eqn.outvars) > 1):
            inner = opened(inner_jaxpr(eqn))
            if name not in JIT or unit is not None:
                return self._walk(*inner, operands, unit)
            within = next(self._units)
            returned = self._walk(*inner, operands, within)
            self._compiled.add(within, returned)
            return returned
        step = Step(eqn, operands, unit, len(self.steps))
        step.results = tuple(Value(var.aval, step=step, index=index) for index, var in enumerate(eqn.outvars))
        self.steps.append(step)
        return step.results

    def _distinct(self, operands: Sequence[Value]) -> list[Value]:
        """The operands of an eager kernel: one that is given twice is two of its parameters."""
        found: list[Value] = []
        latest: dict[Value, Value] = {}
        for value in operands:
            again = is_floating(value.aval) and value in latest
            latest[value] = self._copy(latest[value]) if again else value
            found.append(latest[value])
        return found

    def _copy(self, value: Value) -> Value:
        if value.step is None:
            return Value(value.aval, value.data)
        eqn = jex.new_jaxpr_eqn([jex.Var(value.aval)], [jex.Var(value.aval)], copy_p, {}, jex.no_effects)
        step = Step(eqn, [value], None, len(self.steps))
        step.results = (Value(value.aval, step=step),)
        self.steps.append(step)
        return step.results[0]

    def _comes_apart(self, eqn: Any) -> bool:
        if eqn.primitive.name not in JIT:
            return False
        inner = inner_jaxpr(eqn)
        if id(inner) not in self._apart:  # the jaxpr is kept, so its id stays its own
            self._apart[id(inner)] = (inner, comes_apart(eqn))
        return self._apart[id(inner)][1]

    def recipes(self, computed: Sequence[tuple[str, Value]]) -> tuple[InitRecipe, ...]:
        """The init recipes of some results, in order of their first path."""
        for step in self._live({value for _, value in computed}):
            _join(step)
        groups: dict[Value, list[tuple[str, Value]]] = {}
        for path, value in computed:
            # A light value is recomputed wherever it is needed, even by two leaves that are the same value.
            groups.setdefault(value.root() if value.heavy else Value(value.aval), []).append((path, value))
        return tuple(self._recipe(group) for group in groups.values())

    def _live(self, live: set[Value]) -> list[Step]:
        """The steps that some results need, in order; scans cut into one for each result."""
        kept: list[Step] = []
        for step in reversed(self.steps):
            needed = [value for value in step.results if value in live]
            if not needed:
                continue
            # A scan that is all needed and adds up floats stays whole; else what nobody needs is not computed.
            cut = step.name == "scan" and len(step.results) > 1
            cut = cut and (len(needed) < len(step.results) or is_partitionable(step.jaxpr()))
            parts = [_cut(step, value) for value in needed] if cut else [step]
            for part in parts:
                live.update(part.operands)
            kept.extend(reversed(parts))
        kept.reverse()
        return kept

    def _recipe(self, group: Sequence[tuple[str, Value]]) -> InitRecipe:
        values = [value for _, value in group]
        steps = needed_steps(values)
        devices = frozenset[Any]().union(*(named_devices(step.jaxpr()) for step in steps if not step.moves))
        partitionable = all(is_partitionable(step.jaxpr()) for step in steps)
        by_kernel = bool(devices) or not partitionable
        if by_kernel:
            values = self._compiled.completed(values)
            steps = needed_steps(values)
        where: dict[Value, Place] = {}
        given: list[Value] = []

        def refer(value: Value) -> Place:
            if value not in where:
                if value.data is None:
                    what = f"an argument that was given as a ShapeDtypeStruct ({value.aval})"
                    raise TraceError(f"{group[0][0]!r} needs the value of {what}; pass an array")
                where[value] = ("input", len(given))
                given.append(value)
            return where[value]

        plan: list[tuple[Step, list[tuple[Place, bool]]]] = []
        form: list[tuple[Any, tuple[tuple[Place, bool], ...]]] = []
        for number, step in enumerate(steps):
            references = [
                (self._constant(value), False) if value.literal is not None else (refer(value), step.hides(value))
                for value in step.operands
            ]
            where.update((value, ("step", number, index)) for index, value in enumerate(step.results))
            plan.append((step, [(place, hidden) for place, hidden in references if place[0] != "fixed"]))
            form.append((self._step_form(step), tuple(references)))
        outputs = tuple(refer(value) for _, value in group)
        types = tuple(self._canonical.aval(value.aval) for value in given)
        weak = tuple(is_weak(value.aval) for _, value in group)
        kinds = [value.aval.dtype if is_key(value.aval.dtype) else None for value in given]
        inputs = [_input(value) for value in given]
        uses_zero = any(hidden for _, references in plan for _, hidden in references)
        if uses_zero:
            inputs.append(np.zeros((), np.uint32))
        kernels = None
        if by_kernel:
            pairs = zip(steps, form, strict=True)
            lines = [step.line(own, [place for place, _ in references]) for step, (own, references) in pairs]
            kept = {where[value] for value in values if value in where}
            kernels = kernels_of(lines, outputs, kept, kinds, devices, partitionable=partitionable)
        return InitRecipe(
            paths=tuple(path for path, _ in group),
            signature=Interned((tuple(form), outputs, types, uses_zero, weak)),
            function=Program(plan, outputs, kinds, uses_zero, weak),
            inputs=tuple(inputs),
            origin=_origin(steps),
            x64=uses_x64(),
            keys=(*kinds, *(None,) * uses_zero),
            kernels=kernels,
        )

    def _constant(self, value: Value) -> Place:
        return ("fixed", self._canonical.parameter(value.data), self._canonical.aval(value.aval))

    def _step_form(self, step: Step) -> Any:
        if step.part is not None:
            return (self._canonical.jaxpr(step.part), self._canonical.context(step.eqn))
        if id(step.eqn) not in self._equations:
            self._equations[id(step.eqn)] = Interned(self._canonical.equation(step.eqn))
        return self._equations[id(step.eqn)]


def _host_value(var: Any, value: Any) -> Value:
    """An argument, constant or literal, with its data unless it is abstract."""
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    return Value(var.aval, None if abstract else to_host(value, var.aval.dtype))


def _input(value: Value) -> np.ndarray[Any, Any]:
    """What a program is given for a known value."""
    if is_key(value.aval.dtype):
        return unpack_keys(value.data)
    return np.ascontiguousarray(value.data).reshape(value.aval.shape)  # ascontiguousarray makes 0-d arrays 1-d


def _is_small(eqn: Any, unit: int | None) -> bool:
    """Whether an equation whose operands are all known is evaluated on the host."""
    name = eqn.primitive.name
    few = name in JIT or name in _NO_EVALUATION or name in CONTROL
    for var in eqn.outvars:
        size, dtype = var.aval.size, var.aval.dtype
        if is_key(dtype):
            allowed = _SMALL_INTEGERS
        elif np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_):
            allowed = _SMALL_RESULTS if few else _SMALL_INTEGERS
        else:
            # Inside a compiled function XLA fuses floats, so evaluating them one by one might change a bit.
            allowed = _SMALL_FLOATS if unit is None and is_floating(var.aval) else -1
        if size > allowed:
            return False
    return name not in CALLS and not eqn.effects and bool(eqn.outvars) and not calls_back(eqn)


def _join(step: Step) -> None:
    """Marks what is heavy, and joins it with the results that are computed from it."""
    from_heavy = [value for value in step.operands if value.heavy]
    costly = not is_cheap(step.eqn)
    for value in step.results:
        value.heavy = bool(from_heavy) or (costly and value.aval.size > _LARGE)
    together = [*from_heavy, *(value for value in step.results if value.heavy)]
    for value in together[1:]:
        value.join(together[0])


def _cut(step: Step, value: Value) -> Step:
    """The part of a scan that computes one of its results."""
    whole = one_equation(step.eqn, [operand.literal for operand in step.operands])
    jaxpr, used = live_part(whole, value.index)
    operands = [operand for operand, use in zip(step.free, used, strict=True) if use]
    part = Step(step.eqn, operands, step.unit, step.order)
    part.part = jaxpr
    part.results = (value,)
    value.step, value.index = part, 0
    return part


def _origin(steps: Sequence[Step]) -> str:
    """What a recipe does, in a word, from the names of the functions it calls."""
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
