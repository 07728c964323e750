"""What tracing makes of a function: values, the steps that compute them, and programs of some of the steps.

Values are those of *eager* execution, bit for bit. Executed eagerly, every top-level equation is a kernel of its own,
whose scalars are run-time values; `jax.jit` of the whole function would fuse multiplications into additions, fold
constants and reassociate, each of which may change the last bit. So a program takes top-level scalars as inputs (which
also lets layers with different scales share one program) and hides what flows from one kernel to the next behind the
addition of a run-time zero to its bits, which no compiler can see through and every compiler can fuse. What a kernel is
given twice is copied, and a copy is hidden once more, so that it is another value to the compiler. That is enough where
each element is computed by itself. What adds up, multiplies or factorizes computed floats is cut into eager execution's
own kernels (`_programs/kernels`), which one device runs; functions that JAX would inline are kept together for that
(`_trace/inlined`), as are the results of one compiled function that share floats (`_trace/units`).

Not held: what depends on more than the equations. A scan of which only some results are used, and a compiled function
whose results share no floats, are compiled without the rest; derivatives are those of the trace; and programs for
other kinds of devices than CPUs are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from lazymodel._programs.jaxprs import STRUCTURAL, is_floating, one_equation, run_jaxpr, with_weak_type
from lazymodel._programs.kernels import Line
from lazymodel._programs.keys import as_keys

# What only says where a value should be: the shardings that are assigned later decide that.
_PLACEMENT = frozenset({"device_put", "sharding_constraint", "copy", "copy_p"})
# On CPUs these take matrices column by column.
_BY_COLUMNS = frozenset({"qr", "geqrf", "geqp3", "householder_product", "lu", "cholesky", "eigh", "svd"})
_VECTOR = 16  # elements of the widest vector register in use, 512 bits of float32
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Where a value comes from, such as ("input", number) or ("step", number of the step, which result).
Place = tuple[Any, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One value of the traced function."""

    aval: Any  # its shape and dtype
    data: Any = None  # its value on the host, when it is known
    step: Step | None = None  # what computes it; None for arguments, constants and what is known
    index: int = 0  # which result of the step it is
    evaluated: bool = False  # whether its data is the result of an equation, rather than a constant or an argument
    literal: Any = None  # the literal that it is, inside a compiled function, and so a constant of the program
    heavy: bool = False  # whether it holds, or derives from, a large result that is costly to compute
    parent: Value | None = None  # of the union-find forest that groups leaves; None at a root

    def root(self) -> Value:
        """The value that stands for its group."""
        while self.parent is not None:
            self.parent = self.parent.parent or self.parent
            self = self.parent
        return self

    def join(self, other: Value) -> None:
        """Makes one group of two."""
        own, root = self.root(), other.root()
        own.parent = None if own is root else root

    def at_run_time(self) -> Value:
        """As an operand of a compiled function or a loop: eagerly a run-time input of it, even if it is a literal."""
        return self if self.literal is None else Value(self.aval, self.data)


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """An equation to be computed by a program."""

    eqn: Any
    operands: Sequence[Value]
    unit: int | None  # the compiled function it belongs to; None for an equation that eager execution runs by itself
    order: int  # its place in the function
    results: tuple[Value, ...] = ()
    part: Any = None  # what is left of it when only some of its results are needed, as a jaxpr of `operands`

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def free(self) -> list[Value]:
        """Its operands without the constants."""
        return [value for value in self.operands if value.literal is None]

    def hides(self, value: Value) -> bool:
        """Whether a float comes to it from another eager kernel, with which the compiler might fuse it."""
        passes = self.name in STRUCTURAL or (self.name in _PLACEMENT and self.name != "copy")
        if value.step is None or passes or not is_floating(value.aval):
            return False
        return self.unit is None or value.step.unit != self.unit

    def jaxpr(self) -> Any:
        """Itself as a jaxpr of its `free` operands."""
        return self.part if self.part is not None else one_equation(self.eqn, [v.literal for v in self.operands])

    def run(self, *operands: Any) -> list[Any]:
        """Its results, of its `free` operands."""
        return list(operands) if self.moves else run_jaxpr(self.jaxpr(), operands)

    def line(self, form: Hashable, places: Sequence[Place]) -> Line:
        """Itself for `kernels_of`, with the form that the program's signature has of it."""
        return Line(self.unit, form, None if self.moves else self.run, tuple(places), len(self.results))

    @property
    def moves(self) -> bool:
        """Whether it only hands its operands on."""
        return self.name in _PLACEMENT and len(self.free) == len(self.results)


def needed_steps(values: Sequence[Value]) -> list[Step]:
    """The steps that some values depend on, in order."""
    found: dict[Step, None] = {}
    stack = [value.step for value in values if value.step is not None]
    while stack:
        step = stack.pop()
        if step not in found:
            found[step] = None
            stack.extend(value.step for value in step.operands if value.step is not None)
    return sorted(found, key=lambda step: step.order)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The function of a recipe: its steps, run in order on its inputs."""

    __name__ = "init_program"  # for the compiler

    # Each step, and for each of its operands that is not fixed where it is, and whether it is hidden.
    plan: Sequence[tuple[Step, Sequence[tuple[Place, bool]]]]
    outputs: Sequence[Place]  # where the results are
    kinds: Sequence[Any]  # for each input, the dtype of the keys that it is the data of, or None
    uses_zero: bool  # whether the last input is a zero to hide values with
    weak: Sequence[bool]  # whether each output is weakly typed

    def __call__(self, *inputs: Any) -> tuple[jax.Array, ...]:
        given = [as_keys(value, kind) for value, kind in zip(inputs, self.kinds, strict=False)]
        zero = inputs[-1] if self.uses_zero else None
        results: list[list[Any]] = []
        hidden: dict[Place, Any] = {}

        def read(place: Place) -> Any:
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
                    # Without it XLA computes the value in that order too, vectorized in another way than row by row.
                    value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
                operands.append(value)
            results.append(step.run(*operands))
        # What is computed from inputs, which are strongly typed, lost its weak type on the way.
        return tuple(with_weak_type(read(output), weak) for output, weak in zip(self.outputs, self.weak, strict=True))


def _hide(value: Any, zero: Any) -> Any:
    """The same value, of which the compiler cannot know how it was computed."""
    bits = _BITS.get(value.dtype.itemsize)
    # Four-bit floats are stored in bytes, and complex numbers are two.
    if bits is None or value.dtype.itemsize * 8 != int(jax.numpy.finfo(value.dtype).bits):
        return jax.lax.optimization_barrier(value)
    if value.shape and value.shape[-1] % _VECTOR:
        # A loop over such rows is vectorized in another way once more is fused into it, for which jax 0.12's XLA:CPU
        # contracts other multiplications and additions.
        value = jax.lax.optimization_barrier(value)
    raw = jax.lax.bitcast_convert_type(value, bits)
    return jax.lax.bitcast_convert_type(raw + jax.lax.convert_element_type(zero, bits), value.dtype)
