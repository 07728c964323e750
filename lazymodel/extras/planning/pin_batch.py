"""`pin_batch`: a step in which the batch stays split over the data axes of the mesh.

A parameter that is split over a data axis is to be gathered where it is used. The compiler is free to do the opposite:
to keep the parameter's split, and to gather the batch on every device. So the step is traced, the dimension of each
value that carries the batch is followed, and where such a value meets a parameter that is split over a data axis the
result is constrained: the batch over the data axes, every other dimension as the compiler likes. The same holds for
what a scan carries and stacks. Nothing else of the step changes, and values stay the same up to the order of sums.

One table says what an operation does to the batch. What is not in it ends the batch's way, which the log says.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.framework import ModelSpec, OpenedArguments
from lazymodel._errors import LazyModelError, ShardingError
from lazymodel._programs.jaxprs import (
    CALLS,
    ELEMENTWISE,
    JIT,
    inner_jaxpr,
    is_key,
    one_equation,
    opened,
    run_jaxpr,
    scanned_from,
    walk,
)
from lazymodel._sharding.roles import DATA_AXES
from lazymodel._show.text import closest
from lazymodel._tensors.shards import spec_axes

Arguments = ParamSpec("Arguments")
T = TypeVar("T")

_MARK = "keeps_batch_split"  # an attribute of what `pin_batch` returns
_LOG = logging.getLogger("lazymodel")

# What is known of a value: the dimension that carries the batch; or that it is made of parameters alone, of which one
# is split over a data axis.
PARAMETER = "parameter"
Kind: TypeAlias = "int | str | None"


_REDUCTIONS = ["argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"]
_IN_PLACE = ["dynamic_slice", "dynamic_update_slice", "pad", "rev", "scatter", "scatter-add", "slice", "top_k"]


class Pins(NamedTuple):
    """Where batches are split: the mesh, and the names of its data axes."""

    mesh: Any
    axes: tuple[str, ...]

    def constrain(self, value: Any, kind: Kind) -> Any:
        """The value with its batch over the data axes, if these divide it."""
        size = math.prod(self.mesh.shape[axis] for axis in self.axes)
        if not isinstance(kind, int) or value.shape[kind] % size:
            return value
        spec = [PartitionSpec.UNCONSTRAINED] * value.ndim
        spec[kind] = self.axes
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, PartitionSpec(*spec)))


# --- what an operation does to the batch -----------------------------------------------------------------------------


def _dot_general(eqn: Any, kinds: Sequence[Kind]) -> Kind:
    (contracted, batched) = eqn.params["dimension_numbers"]
    ndims, before = [atom.aval.ndim for atom in eqn.invars], len(batched[0])
    for side, kind in enumerate(kinds[:2]):
        if not isinstance(kind, int) or kind in contracted[side]:
            continue
        if kind in batched[side]:
            return list(batched[side]).index(kind)
        free = [[d for d in range(ndims[i]) if d not in (*contracted[i], *batched[i])] for i in (0, 1)]
        return before + (len(free[0]) if side else 0) + free[side].index(kind)
    return None


def _gather(eqn: Any, kinds: Sequence[Kind]) -> Kind:
    numbers, ndim = eqn.params["dimension_numbers"], eqn.outvars[0].aval.ndim
    rows = [d for d in range(ndim) if d not in numbers.offset_dims]  # the dimensions of the indices
    if isinstance(kinds[1], int):
        return rows[kinds[1]]
    operand = kinds[0]
    if not isinstance(operand, int):
        return None
    if operand in numbers.operand_batching_dims:
        return rows[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand)]]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if operand in gone or eqn.params["slice_sizes"][operand] != eqn.invars[0].aval.shape[operand]:
        return None
    kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in gone]
    return numbers.offset_dims[kept.index(operand)]


def _elementwise(eqn: Any, kinds: Sequence[Kind]) -> Kind:
    shape = eqn.outvars[0].aval.shape
    alike = (k for k, atom in zip(kinds, eqn.invars, strict=True) if isinstance(k, int) and atom.aval.shape == shape)
    return next(alike, None)


def _concatenate(eqn: Any, kinds: Sequence[Kind]) -> Kind:
    kind = next(each for each in kinds if isinstance(each, int))
    return None if kind == eqn.params["dimension"] else kind


def _reshape(eqn: Any, kind: int) -> Kind:
    """The batch as the outer part of a dimension, or as a dimension whose outer part it was."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    outer, size = math.prod(before[:kind]), before[kind]
    for dimension, length in enumerate(after):
        if math.prod(after[:dimension]) == outer and length > 1 and max(length, size) % min(length, size) == 0:
            return dimension
    return None


def _convolution(eqn: Any, kind: int) -> Kind:
    numbers = eqn.params["dimension_numbers"]
    return numbers.out_spec[0] if kind == numbers.lhs_spec[0] else None


def _removed(name: str) -> Callable[[Any, int], Kind]:
    """Dimensions are removed."""

    def rule(eqn: Any, kind: int) -> Kind:
        gone = eqn.params[name]
        return None if kind in gone else kind - sum(each < kind for each in gone)

    return rule


def _along(name: str) -> Callable[[Any, int], Kind]:
    """Works along one dimension."""
    return lambda eqn, kind: None if eqn.params[name] == kind else kind


def _resized(eqn: Any, kind: int) -> Kind:
    """Dimensions keep their places, some of them not their lengths."""
    return kind if eqn.invars[0].aval.shape[kind] == eqn.outvars[0].aval.shape[kind] else None


_OF_ALL: Mapping[str, Callable[[Any, Sequence[Kind]], Kind]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "gather": _gather,
}
_OF_FIRST: Mapping[str, Callable[[Any, int], Kind]] = {  # what the first operand carries decides
    "broadcast_in_dim": lambda eqn, kind: eqn.params["broadcast_dimensions"][kind],
    "conv_general_dilated": _convolution,
    "reshape": _reshape,
    "squeeze": _removed("dimensions"),
    "transpose": lambda eqn, kind: eqn.params["permutation"].index(kind),
    **dict.fromkeys(_REDUCTIONS, _removed("axes")),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), _along("axis")),
    "sort": _along("dimension"),
    **dict.fromkeys(_IN_PLACE, _resized),
}


# --- the interpreter -------------------------------------------------------------------------------------------------


class _Pinning:
    """One jaxpr after the other, evaluated with pins; inner jaxprs are rewritten once for each kind of operands."""

    def __init__(self, pins: Pins) -> None:
        self.pins = pins
        self.lost: set[str] = set()  # operations behind which the batch is not followed
        self._inner: dict[Any, tuple[Any, Any, list[Kind]]] = {}

    def run(self, jaxpr: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        """The results of a jaxpr, and their kinds."""

        def equation(eqn: Any, operands: list[tuple[Any, Kind]]) -> list[tuple[Any, Kind]]:
            given, known = [value for value, _ in operands], [kind for _, kind in operands]
            return list(zip(*self._equation(eqn, given, known), strict=True))

        found = walk(jaxpr, list(zip(values, kinds, strict=True)), lambda _, value: (value, None), equation)
        return [value for value, _ in found], [kind for _, kind in found]

    def _equation(self, eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        name = eqn.primitive.name
        if all(kind is None for kind in kinds):
            return _as_it_is(eqn, values), [None] * len(eqn.outvars)
        if name in _INNER:
            return getattr(self, _INNER[name])(eqn, values, kinds)
        results = _as_it_is(eqn, values)
        batched = any(isinstance(kind, int) for kind in kinds)
        if not batched:
            return results, [PARAMETER] * len(results)
        if name in CALLS:
            found = self._rewritten(inner_jaxpr(eqn), kinds)[1]
        elif name == "optimization_barrier":
            found = list(kinds)
        else:
            found = [self._kind(eqn, kinds)] * len(results)
        if PARAMETER in kinds:
            results = [self.pins.constrain(value, kind) for value, kind in zip(results, found, strict=True)]
        return results, found

    def _kind(self, eqn: Any, kinds: Sequence[Kind]) -> Kind:
        name, first = eqn.primitive.name, kinds[0]
        if name in _OF_ALL:
            return _OF_ALL[name](eqn, kinds)
        if name in _OF_FIRST:
            return _OF_FIRST[name](eqn, first) if isinstance(first, int) else None
        self.lost.add(name)
        return None

    def _rewritten(self, jaxpr: Any, kinds: Sequence[Kind], want: Sequence[Kind] = ()) -> tuple[Any, list[Kind]]:
        """An inner jaxpr with pins, and the kinds of its results. `want` has those that are pinned at its end."""
        inner, _ = opened(jaxpr)
        key = id(inner), tuple(kinds), tuple(want)
        if key not in self._inner:
            found: list[Kind] = []

            def function(*values: Any) -> list[Any]:
                start = [self.pins.constrain(v, k) if want else v for v, k in zip(values, kinds, strict=True)]
                results, found[:] = self.run(jaxpr, start, kinds)
                ends = [*want, *[None] * (len(results) - len(want))]
                return [self.pins.constrain(value, kind) for value, kind in zip(results, ends, strict=True)]

            closed: Any = jax.make_jaxpr(function)(*[_struct(var.aval) for var in inner.invars])
            self._inner[key] = jaxpr, closed, found  # the first keeps `id` valid
        _, closed, found = self._inner[key]
        return closed, found

    def jit(self, eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        closed, found = self._rewritten(eqn.params["jaxpr"], kinds)
        return eqn.primitive.bind(*values, **{**eqn.params, "jaxpr": closed}), found

    def remat(self, eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        closed, found = self._rewritten(eqn.params["jaxpr"], kinds)
        return eqn.primitive.bind(*closed.consts, *values, **{**eqn.params, "jaxpr": _open(closed)}), found

    def scan(self, eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        params = eqn.params
        first, carry = scanned_from(eqn)
        consts = first - carry
        inner = [_sliced(kind) for kind in kinds[consts + carry :]]
        carried = list(kinds[consts : consts + carry])
        carried, found = self._settled(params["jaxpr"], kinds[:consts], carried, inner)
        ends = [*carried, *found[carry:]]
        closed, _ = self._rewritten(params["jaxpr"], [*kinds[:consts], *carried, *inner], ends)
        stacked = [kind + 1 if isinstance(kind, int) else kind for kind in found[carry:]]
        results = eqn.primitive.bind(*values, **{**params, "jaxpr": closed})
        pinned = [self.pins.constrain(value, kind) for value, kind in zip(results, [*carried, *stacked], strict=True)]
        return pinned, [*carried, *stacked]

    def loop(self, eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        carried, _ = self._settled(eqn.params["body_jaxpr"], kinds[first:second], list(kinds[second:]), ())
        return _as_it_is(eqn, values), carried

    def _settled(
        self, body: Any, consts: Sequence[Kind], carried: list[Kind], inner: Sequence[Kind]
    ) -> tuple[list[Kind], list[Kind]]:
        """The kinds of what a loop carries, such that a turn keeps them, and those of all that its body returns."""
        unclear: set[int] = set()  # other kinds in other turns
        while True:
            found = self._rewritten(body, [*consts, *carried, *inner])[1]
            after = [_agreed(one, other) for one, other in zip(carried, found, strict=False)]
            unclear |= {i for i, kind in enumerate(after) if kind is None and carried[i] is not None}
            after = [None if i in unclear else kind for i, kind in enumerate(after)]
            if after == carried:
                return carried, found
            carried = after

    def cond(self, eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        results = _as_it_is(eqn, values)
        branches = [self._rewritten(branch, kinds[1:])[1] for branch in eqn.params["branches"]]
        return results, [functools.reduce(_agreed, each) for each in zip(*branches, strict=True)]


_INNER = {
    **dict.fromkeys(JIT, "jit"),
    **dict.fromkeys(("remat", "remat2", "checkpoint"), "remat"),
    "scan": "scan",
    "while": "loop",
    "cond": "cond",
}


def _as_it_is(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation that is not changed."""
    literals = [atom if isinstance(atom, jex.Literal) else None for atom in eqn.invars]
    free = [value for value, literal in zip(values, literals, strict=True) if literal is None]
    return run_jaxpr(one_equation(eqn, literals), free)


def _open(closed: Any) -> Any:
    jaxpr, _ = opened(closed)
    return jex.Jaxpr((), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr.effects, jaxpr.debug_info)


def _sliced(kind: Kind) -> Kind:
    """The kind of a row of what a scan takes apart."""
    return (kind - 1 if kind else None) if isinstance(kind, int) else kind


def _agreed(one: Kind, other: Kind) -> Kind:
    """The kind of a value that is one of two: zeros at the start of a loop do not have the batch yet."""
    if one is None or one == other:
        return other
    return one if other is None else None


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# --- the function ----------------------------------------------------------------------------------------------------


def pin_batch(
    step: Callable[Arguments, T], abstract: ModelSpec, *, batch: int | Mapping[str, int | None] = 0
) -> Callable[Arguments, T]:
    """A function like `step` in which the batch stays split over the data axes of the mesh, for `jax.jit` or `nnx.jit`.

    Without it, the compiler may gather the batch on every device, since parameters are split over the same axes (FSDP).
    For training and for prefill that is slow and takes memory; for decoding a few tokens it can be right.

    Args:
        step: A function of the model, or of parts of it, and inputs: a loss, a training step, a forward pass. It is
            traced; gradients, scans, remat and custom derivatives may be inside.
        abstract: The model that was sharded. Arguments of `step` that have its structure, or that of one element if it
            is a tuple such as `(model, optimizer)`, are parameters, also inside other containers; NNX objects are not
            inputs either.
        batch: The dimension of all other arrays that carries the batch; or, by names of arguments of `step`, a
            dimension for each, and None for arrays without a batch. Scalars and PRNG keys have none.

    Returns:
        The function. Its results are those of `step` up to the order in which sums are computed. On a mesh without a
        data axis (`data`, `fsdp`, `batch`, `dp` or `replica`) nothing is pinned.

    Raises:
        ShardingError: `abstract` is not sharded over a mesh, or its axes are Explicit.
        LazyModelError: When called: inputs have different sizes of the batch.

    Example:
        >>> fsdp = abstract.shard(Mesh(np.array(jax.devices()), ("fsdp",)), {".*": P("fsdp")})
        >>> def loss(params, x):
        ...     return ((x @ params["up"]["kernel"] @ params["down"]["kernel"]) ** 2).mean()
        >>> step = jax.jit(lm.pin_batch(jax.value_and_grad(loss), fsdp))
        >>> loss_value, gradients = step(fsdp.materialize(), np.ones((32, 64), "float32"))
    """
    pins, known = _pins(abstract), _Known(abstract)

    @functools.wraps(step)
    def pinned(*args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
        kinds = {id(leaf): kind for leaf, kind in _kinds(step, args, kwargs, batch, pins, known)}
        hooks = (getattr(adapter, "opened", None) for adapter in adapters())
        opened_by = (hook(args, kwargs) for hook in hooks if hook is not None)
        given = next((each for each in opened_by if each is not None), None) or OpenedArguments((args, kwargs))
        leaves, structure = jax.tree.flatten(given.arrays)
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def flat(arrays: Sequence[Any]) -> Any:
            new = dict(zip(traced, arrays, strict=True))
            args, kwargs = given.closed(jax.tree.unflatten(structure, [new.get(i, x) for i, x in enumerate(leaves)]))
            return cast(Any, step)(*args, **kwargs), given.state((args, kwargs))

        arrays = [leaves[i] for i in traced]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(arrays)
        pinning = _Pinning(pins)
        results, _ = pinning.run(closed, arrays, [kinds.get(id(array)) for array in arrays])
        if pinning.lost:
            _LOG.info("pin_batch: %s, so the batch is not followed behind it", ", ".join(sorted(pinning.lost)))
        result, state = jax.tree.unflatten(jax.tree.structure(shapes), results)
        given.write(state)
        return result

    setattr(pinned, _MARK, True)
    return pinned if pins.axes else step


def is_pinned(function: Any) -> bool:
    """Returns True for what `pin_batch` returned, also inside `jax.jit`."""
    return hasattr(inspect.unwrap(function, stop=lambda each: hasattr(each, _MARK)), _MARK)


def splits_parameters(abstract: ModelSpec) -> bool:
    """Returns True if a parameter is split over a data axis, where the compiler may gather the batch."""
    return any(
        isinstance(sharding := variable.sharding, NamedSharding)
        and all(kind == AxisType.Auto for kind in sharding.mesh.axis_types)
        and any(axis in DATA_AXES for entry in spec_axes(sharding.spec, len(variable.shape)) for axis in entry)
        for variable in abstract.values()
    )


def _pins(abstract: ModelSpec) -> Pins:
    shardings = (variable.sharding for variable in abstract.values())
    mesh = next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    if mesh is None:
        raise ShardingError(f"{abstract.name} is not sharded over a mesh: call abstract.shard(mesh, rules) first")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ShardingError(
            f"pin_batch needs a mesh of Auto axes, and {mesh} has others, under which JAX itself keeps the batch "
            "split. jax.sharding.Mesh(devices, names) makes Auto axes"
        )
    return Pins(mesh, tuple(axis for axis in mesh.axis_names if axis in DATA_AXES))


def _kinds(
    step: Any, args: Any, kwargs: Any, batch: int | Mapping[str, int | None], pins: Pins, known: _Known
) -> Iterator[tuple[Any, Kind]]:
    """The arrays among the arguments of a call, and what they carry."""
    named = inspect.signature(step).bind(*args, **kwargs).arguments
    if isinstance(batch, Mapping) and (unknown := [name for name in batch if name not in named]):
        raise LazyModelError(
            f"{getattr(step, '__name__', step)} has no argument {unknown[0]!r}{closest(unknown[0], named)}"
        )
    sizes: dict[int, str] = {}
    for name, argument in named.items():
        stated = batch if isinstance(batch, int) else batch.get(name, 0)
        for leaf, sharding in known.leaves(argument):
            if sharding is not _INPUT:
                spec = getattr(sharding, "spec", ())
                axes = {axis for entry in spec_axes(cast(Any, spec), np.ndim(leaf)) for axis in entry}
                yield leaf, PARAMETER if axes & {*pins.axes} else None
            elif (
                stated is not None
                and isinstance(leaf, (jax.Array, np.ndarray))
                and leaf.ndim
                and not is_key(leaf.dtype)
            ):
                if not -leaf.ndim <= stated < leaf.ndim:
                    raise LazyModelError(f"{name!r} has an array of shape {leaf.shape}, without a dimension {stated}")
                sizes.setdefault(leaf.shape[stated], name)
                yield leaf, stated % leaf.ndim
    if len(sizes) > 1:
        (size, one), (another, other) = list(sizes.items())[:2]
        raise LazyModelError(
            f"arrays of {one!r} have {size} rows in the dimension of the batch, and those of {other!r} {another}: say "
            f"where the batch is, batch={{{other!r}: 1}}, or None for an argument without one. If it is the state of "
            "an optimizer, pass the abstract model that has it, abstract.with_optimizer(optimizer).shard(mesh, rules)"
        )


_INPUT = object()  # in place of a sharding: an array that is not of the model


class _Known:
    """Where arguments have the structure of the model, or of an element of a tuple that it is."""

    def __init__(self, abstract: ModelSpec) -> None:
        tree = abstract.tree
        parts = [tree, *(cast("Sequence[Any]", tree) if isinstance(tree, (tuple, list)) else ())]
        self._parts = [(jax.tree.structure(part), jax.tree.leaves(part)) for part in parts]
        self._abstract = abstract

    def leaves(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Each leaf, with the sharding of the variable that it is, or with `_INPUT`; None if it has no sharding."""
        leaves, structure = jax.tree.flatten(node)
        for known, variables in self._parts:
            pairs = list(zip(leaves, variables, strict=True)) if structure == known else []
            # Leaves may also be functions, such as the activation of an Equinox module.
            if pairs and all(getattr(one, "shape", None) == getattr(other, "shape", None) for one, other in pairs):
                yield from ((leaf, getattr(variable, "sharding", None)) for leaf, variable in pairs)
                return
        if not isinstance(node, (tuple, list, dict)):
            named = (adapter.arrays(node) for adapter in adapters())
            if (found := next((each for each in named if each is not None), None)) is not None:
                own = self._abstract.variables
                yield from ((leaf, own[path].sharding if path in own else None) for path, leaf in found.items())
                return
        inside = jax.tree_util.default_registry.flatten_one_level(node)
        if inside is None:
            yield node, _INPUT
        for child in () if inside is None else inside[0]:
            yield from self.leaves(child)
