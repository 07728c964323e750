"""A traced function as a flat list of steps: calls are inlined, and scans over stacked layers run layer by layer.

A step is one equation. Values that cost almost nothing to compute from one variable or from nothing (casts, transposes,
masks) are `cheap`: every user computes them again, so none of them is kept. A slice along the first dimension of a
variable, and rows of it at indices that only depend on inputs, are variables of their own, so that only these parts are
read. The results of a scan over layers remain separate
arrays, one for each layer, as long as everything that uses them works on one layer at a time.

`extras/run/stretches` divides the steps into programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import (
    CALLS,
    ELEMENTWISE,
    JIT,
    inner_jaxpr,
    is_cheap,
    is_weak,
    scanned_from,
    stored_as,
    walk,
)

_MOST_CHEAP = 16  # steps that are repeated for a value: more cost more than they save
_MOST_ROWS = 1 << 14  # rows of a table that are read one by one
_MOST_LAYERS = 1024  # iterations of a scan that runs layer by layer: each is a program call
# Reductions that can be done for each layer, and then for the results.
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})


@dataclasses.dataclass(frozen=True)
class VariablePart:
    """A variable, or its part at some indices of its first dimensions, of which the last may be a range or several."""

    path: str
    key: tuple[int | range | tuple[int, ...], ...] = ()

    def at(self, index: int | range | tuple[int, ...]) -> VariablePart:
        """The part at an index, at a range of them, or at several, of its first dimension."""
        *done, rows = self.key or (None,)
        if not isinstance(rows, range):
            return VariablePart(self.path, (*self.key, index))
        if isinstance(index, range):
            return VariablePart(self.path, (*done, rows[index.start : index.stop]))
        picked = rows[index] if isinstance(index, int) else tuple(rows[each] for each in index)
        return VariablePart(self.path, (*done, picked))

    def of(self, tensor: Any) -> Any:
        """The part of the variable's tensor."""
        for index in self.key:
            if isinstance(index, range):
                tensor = tensor[index.start : index.stop]
            else:
                tensor = tensor[index] if isinstance(index, int) else np.stack([tensor[each] for each in index])
        return tensor

    @property
    def is_rows(self) -> bool:
        """Returns True for several rows, wherever they are."""
        return bool(self.key) and isinstance(self.key[-1], tuple)

    @property
    def depth(self) -> int:
        """The dimension of the variable that is the part's first."""
        return sum(isinstance(each, int) for each in self.key)


@dataclasses.dataclass(eq=False, repr=False, slots=True)  # a `repr` of values that share steps would have no end
class RunValue:
    """One value of the function: of a step, of a variable, or given."""

    aval: Any
    step: Operation | None = None
    part: VariablePart | None = None
    data: Any = None  # an input or constant
    pieces: Sequence[Any] | None = None  # its parts along the first dimension, if it exists only as these

    @property
    def source(self) -> VariablePart:
        """The part of a variable that it is."""
        assert self.part is not None
        return self.part


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Operation:
    """One equation; its operands are values and literals."""

    eqn: Any
    operands: tuple[Any, ...]
    results: tuple[RunValue, ...] = ()
    cheap: int = 0  # number of steps to compute it, if every user does so; 0 if it is computed once
    root: RunValue | None = None  # the variable that a cheap step depends on
    known: bool = False  # True if it depends on nothing but inputs and constants

    @property
    def values(self) -> list[RunValue]:
        """The operands that are not literals."""
        return [operand for operand in self.operands if isinstance(operand, RunValue)]


def nbytes_of(aval: Any) -> int:
    """Bytes of all elements."""
    shape, dtype = stored_as(tuple(aval.shape), aval.dtype)
    return math.prod(shape) * dtype.itemsize


class Flattened:
    """The steps of a traced function that its results need, in the order of the trace.

    Args:
        closed: The function's jaxpr.
        inputs: The values of its inputs.
        is_sliceable: Returns True for a variable, by path, and a dimension if parts along it can be read.
        least_nbytes: Bytes from which on variables that a scan goes through are its layers, and not its inputs.

    Attributes:
        steps: The steps; cheap ones are not among them.
        results: The function's results, values and literals.
        values: Each value among them, once.
    """

    def __init__(
        self, closed: Any, inputs: Sequence[RunValue], is_sliceable: Callable[[str, int], bool], least_nbytes: int = 0
    ) -> None:
        self._is_sliceable, self._least = is_sliceable, least_nbytes
        self._all: list[Operation] = []
        self._parts = {value.part: value for value in inputs if value.part is not None}
        self._constants: dict[int, RunValue] = {}
        self._wholes: dict[RunValue, RunValue] = {}
        self._known: dict[RunValue, Any] = {}
        self.results: list[Any] = [self._whole(result) for result in self._inlined(closed, inputs)]
        self.values = list(dict.fromkeys(each for each in self.results if isinstance(each, RunValue)))
        needed, kept = {*self.values}, list[Operation]()
        for step in reversed(self._all):
            if step.eqn.effects or any(result in needed for result in step.results):
                needed.update(step.values)
                if not step.cheap:
                    kept.append(step)
        self.steps = kept[::-1]

    def _inlined(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        return walk(closed, operands, self._constant, self._equation)

    def _constant(self, atom: Any, data: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return atom
        return self._constants.setdefault(id(data), RunValue(atom.aval, data=data))

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in CALLS or (name in JIT and not _is_placed(eqn)):
            return self._inlined(inner_jaxpr(eqn), operands)
        if name == "name":  # only marks a value, for `jax.checkpoint`
            return operands
        found = self._layers(eqn, operands) if name == "scan" else None
        if found is None and name in ("slice", "squeeze"):
            found = self._sliced(eqn, operands[0])
        if found is None and name == "gather":
            found = self._rows(eqn, *operands)
        if found is None and not eqn.effects:
            found = self._piecewise(eqn, operands)
        return self._step(eqn, [self._whole(each) for each in operands]) if found is None else found

    def _step(self, eqn: Any, operands: Sequence[Any]) -> Sequence[RunValue]:
        if any("Ref" in type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars)):
            raise LazyModelError(
                f"run: the function uses a mutable array (jax.new_ref, {eqn.primitive.name}), which no program of "
                "several can share. Pass and return values, or materialize the model"
            )
        step = Operation(eqn, tuple(operands))
        step.results = tuple(RunValue(var.aval, step) for var in eqn.outvars)
        step.known = not eqn.effects and all(map(_is_known, step.values))
        if not eqn.effects and is_cheap(eqn):
            computed = {value.step for value in step.values if value.step is not None}
            roots = {value for value in step.values if value.part is not None}
            roots |= {each.root for each in computed if each.root is not None}
            count = 1 + sum(each.cheap for each in computed)
            given = any(value.step is None and value.part is None for value in step.values)
            if not given and all(each.cheap for each in computed) and len(roots) <= 1 and count <= _MOST_CHEAP:
                step.cheap, step.root = count, next(iter(roots), None)
        self._all.append(step)
        return step.results

    def _emit(self, function: Callable[..., Any], *operands: Any) -> Any:
        """The result of a traceable function of values and literals."""
        closed = jax.make_jaxpr(function)(*(_struct(operand.aval) for operand in operands))
        (result,) = self._inlined(closed, operands)
        return result

    def _whole(self, value: Any) -> Any:
        """The value as one array."""
        if isinstance(value, jex.Literal):
            return value if not cast(Any, value).aval.shape else self._emit(lambda: jnp.asarray(value.val))
        if value.pieces is None:
            return value
        if value not in self._wholes:
            self._wholes[value] = self._emit(lambda *pieces: jnp.stack(pieces), *value.pieces)
        return self._wholes[value]

    def _part(self, value: RunValue, index: int | range | tuple[int, ...], aval: Any) -> RunValue:
        assert value.part is not None
        part = value.part.at(index)
        return self._parts.setdefault(part, RunValue(aval, part=part))

    def _can_slice(self, value: RunValue) -> bool:
        if value.part is None or value.part.is_rows:
            return False
        return self._is_sliceable(value.part.path, value.part.depth)

    def _sliced(self, eqn: Any, value: Any) -> Sequence[Any] | None:
        """A slice of a variable, or of what exists in pieces, along the first dimension."""
        params, (out,) = eqn.params, eqn.outvars
        if not isinstance(value, RunValue) or not value.aval.shape or not (value.pieces or self._can_slice(value)):
            return None
        if eqn.primitive.name == "squeeze":
            if tuple(params["dimensions"]) != (0,):
                return None
            return [value.pieces[0] if value.pieces else self._part(value, 0, out.aval)]
        starts, limits = params["start_indices"], params["limit_indices"]
        others = zip(starts[1:], limits[1:], value.aval.shape[1:], strict=True)
        if params["strides"] or any((start, limit) != (0, size) for start, limit, size in others):
            return None
        rows = range(int(starts[0]), int(limits[0]))
        if value.pieces:  # an empty slice of them is one of the whole
            return [RunValue(out.aval, pieces=value.pieces[rows.start : rows.stop])] if rows else None
        return [self._part(value, rows, out.aval)]

    def _rows(self, eqn: Any, table: Any, where: Any) -> Sequence[Any] | None:
        """Rows of a variable at indices that only depend on inputs, such as embeddings of tokens."""
        (out,), numbers, batch = eqn.outvars, eqn.params["dimension_numbers"], len(where.aval.shape) - 1
        if not isinstance(table, RunValue) or not table.aval.shape or not self._can_slice(table):
            return None
        count, (length, *rest) = math.prod(where.aval.shape), table.aval.shape
        offsets = tuple(range(batch, batch + len(rest)))
        of_rows = (numbers.collapsed_slice_dims, numbers.start_index_map, numbers.offset_dims) == ((0,), (0,), offsets)
        of_rows &= tuple(eqn.params["slice_sizes"]) == (1, *rest) and 0 < count <= min(length // 2, _MOST_ROWS)
        if not of_rows or (isinstance(where, RunValue) and not _is_known(where)):
            return None
        found = np.asarray(self._computed(where)).reshape(-1)
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            found = found.clip(0, length - 1)
        if found.min() < 0 or found.max() >= length:
            return None
        first_rows = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=count)
        aval = jax.make_jaxpr(first_rows)(_struct(table.aval)).out_avals[0]
        part = self._part(table, tuple(found.tolist()), aval)
        return [self._emit(functools.partial(jnp.reshape, shape=out.aval.shape), part)]

    def _computed(self, value: Any) -> Any:
        """The numbers of a value that is known."""
        if isinstance(value, jex.Literal):
            return np.asarray(value.val, cast(Any, value).aval.dtype)
        if (step := value.step) is None:
            return value.data
        if value not in self._known:
            found = step.eqn.primitive.bind(*map(self._computed, step.operands), **step.eqn.params)
            results = found if step.eqn.primitive.multiple_results else [found]
            self._known.update(zip(step.results, results, strict=True))
        return self._known[value]

    def _pieces(self, value: Any, length: int) -> Sequence[Any] | None:
        """A value's parts along its first dimension; None if they would be cut from the whole."""
        if isinstance(value, jex.Literal) or tuple(value.aval.shape[:1]) != (length,):
            return None
        if value.pieces is not None:
            return value.pieces
        if self._can_slice(value):
            return [self._part(value, index, _row_aval(value.aval)) for index in range(length)]
        step = value.step
        if step is None or not step.cheap or step.root is None or step.eqn.primitive.name not in ELEMENTWISE:
            return None
        return self._mapped(step.eqn, step.operands, length)

    def _mapped(self, eqn: Any, operands: Sequence[Any], length: int) -> Sequence[Any] | None:
        """The pieces of the result of an elementwise equation; None if it is about the array as a whole."""
        named = [item for value in eqn.params.values() for item in (value if isinstance(value, tuple) else (value,))]
        if any(isinstance(item, Sharding) for item in named):
            return None
        rows: list[Sequence[Any]] = []
        for operand in operands:
            scalar = not operand.aval.shape
            pieces = [operand] * length if scalar else self._pieces(operand, length)
            if pieces is None:
                return None
            rows.append(pieces)
        function = functools.partial(eqn.primitive.bind, **eqn.params)
        return [self._emit(function, *each) for each in zip(*rows, strict=True)]

    def _piecewise(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any] | None:
        """The results of an equation that works on one layer at a time, if an operand exists in pieces."""
        found = [each.pieces for each in operands if isinstance(each, RunValue) and each.pieces]
        if not found or len(eqn.outvars) != 1:
            return None
        name, pieces = eqn.primitive.name, None
        if name in ELEMENTWISE:
            pieces = self._mapped(eqn, operands, len(found[0]))
        elif name in _REDUCTIONS and (axes := [axis - 1 for axis in eqn.params["axes"] if axis]):
            joins = len(axes) < len(eqn.params["axes"])
            function = functools.partial(_reduced, eqn, tuple(axes), wide=joins and name == "reduce_sum")
            pieces = [self._emit(function, piece) for piece in found[0]]
            if joins:
                return [self._emit(functools.partial(_joined, eqn), *pieces)]
        return None if pieces is None else [RunValue(eqn.outvars[0].aval, pieces=pieces)]

    def _layers(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any] | None:
        """The results of a scan over parts of variables, or over the results of such a scan; None for another one."""
        body, length = eqn.params["jaxpr"], int(eqn.params["length"])
        first, carried = scanned_from(eqn)
        over = operands[first:]
        in_pieces = any(isinstance(each, RunValue) and each.pieces for each in over)
        nbytes = sum(nbytes_of(each.aval) for each in over if _is_of_variable(each))
        if not (in_pieces or nbytes > self._least) or not 0 < length <= _MOST_LAYERS:
            return None
        pieces = [self._pieces(each, length) for each in over]
        constants, carry = operands[: first - carried], operands[first - carried : first]
        rows: dict[int, Sequence[Any]] = {}
        for index in reversed(range(length)) if eqn.params["reverse"] else range(length):
            pairs = zip(over, pieces, strict=True)
            row = [self._row(each, index) if parts is None else parts[index] for each, parts in pairs]
            found = self._inlined(body, [*constants, *carry, *row])
            carry, rows[index] = found[:carried], found[carried:]
        results = (
            RunValue(var.aval, pieces=[rows[index][number] for index in range(length)])
            for number, var in enumerate(eqn.outvars[carried:])
        )
        return [*carry, *results]

    def _row(self, value: Any, index: int) -> Any:
        """An index of a value that exists as a whole; the index is a literal, which may be an input of a program."""

        def cut(array: jax.Array) -> jax.Array:
            first = (np.int32(index), *(np.int32(0) for _ in array.shape[1:]))
            return jax.lax.squeeze(jax.lax.dynamic_slice(array, first, (1, *array.shape[1:])), (0,))

        return self._emit(cut, self._whole(value))


def _reduced(eqn: Any, axes: tuple[int, ...], piece: jax.Array, *, wide: bool = False) -> jax.Array:
    """The reduction of a piece; `wide` keeps sums of small floats in float32, so that only the whole sum is rounded."""
    if wide and jnp.issubdtype(piece.dtype, jnp.floating) and piece.dtype.itemsize < 4:
        piece = piece.astype(np.float32)
    return eqn.primitive.bind(piece, **{**eqn.params, "axes": axes})


def _joined(eqn: Any, *pieces: jax.Array) -> jax.Array:
    return _reduced(eqn, (0,), jnp.stack(pieces)).astype(eqn.outvars[0].aval.dtype)


def _is_of_variable(value: Any) -> bool:
    """Returns True for a variable, and for a cheap function of one."""
    return isinstance(value, RunValue) and (
        value.part is not None or (value.step is not None and value.step.root is not None)
    )


def _is_known(value: RunValue) -> bool:
    """Returns True if a value is an input or constant that every process has, or depends on nothing else."""
    if value.step is not None or value.part is not None or value.pieces is not None:
        return value.step is not None and value.step.known
    return not isinstance(value.data, jax.Array) or value.data.is_fully_replicated


def _is_placed(eqn: Any) -> bool:
    """Returns True for a compiled function that states shardings or options of the compiler."""
    stated = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(type(each).__name__ != "UnspecifiedValue" for each in stated) or bool(
        eqn.params.get("compiler_options_kvs")
    )


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    mesh = aval.sharding.mesh
    explicit = not mesh.empty and any(kind.name == "Explicit" for kind in mesh.axis_types)
    placed = aval.sharding if explicit else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval), sharding=placed)


def _first_row(array: jax.Array) -> jax.Array:
    return jax.lax.index_in_dim(array, 0, 0, False)


@functools.lru_cache(maxsize=256)
def _row_aval(aval: Any) -> Any:
    return jax.make_jaxpr(_first_row)(_struct(aval)).out_avals[0]
