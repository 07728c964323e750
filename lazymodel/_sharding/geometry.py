"""What the dimensions of a weight are, from its shape, the model's width, and the weight that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from lazymodel._sharding.roles import HEADS


def attention_labels(
    shape: Sequence[int], widths: Sequence[int], *, output: bool, fused: bool
) -> tuple[tuple[str, ...], int | None]:
    """Labels of an attention weight of three or four dimensions, and which of `widths` told them, or None.

    Packages differ in where the model's width stands, (width, heads, head_dim), (heads, width, head_dim) or
    (heads, head_dim, width), and some put queries, keys and values in a dimension of their own; all have a head's
    columns somewhere after the heads.
    """
    rest = list(range(len(shape)))
    if len(rest) == 4 or (fused and {2, 3} & set(shape[:2])):
        parts = next((dim for dim in rest[:-1] if shape[dim] in (2, 3)), rest[0])
        rest.remove(parts)
    order = (rest[-1], *rest[:-1]) if output else (*rest[:-1], rest[-1])
    told = next((width for width in widths if any(shape[dim] == width for dim in order)), None)
    if told is not None:
        wide = next(dim for dim in order if shape[dim] == told)
    else:  # the larger of the two places where most packages have it
        wide = max(order[:2], key=lambda dim: shape[dim])
    left = [dim for dim in rest if dim != wide]
    names = {wide: "out" if output else "in", left[0]: HEADS, **dict.fromkeys(left[1:], "head_dim")}
    return tuple(names.get(dim, "parts") for dim in range(len(shape))), told


def stacked_labels(
    shape: Sequence[int], widths: Sequence[int], stack: str, *, up: bool, out_first: bool
) -> tuple[tuple[str, ...], int | None]:
    """Labels of matrices stacked on the first dimension, and which of `widths` told them, or None.

    Of four dimensions, one is for parts that lie beside each other, as a gate and what it multiplies.
    """
    rest = list(range(1, len(shape)))
    if len(rest) > 2:
        rest.remove(next((dim for dim in rest if shape[dim] in (2, 3)), rest[1]))  # in the middle, if none is so small
    first, last = rest
    told = next((width for width in widths if (shape[first] == width) != (shape[last] == width)), None)
    turned = out_first if told is None else (shape[last] if up else shape[first]) == told
    names = {0: stack, first: "out" if turned else "in", last: "in" if turned else "out"}
    return tuple(names.get(dim, "parts") for dim in range(len(shape))), told


def aligned(shape: tuple[int, ...], weight: tuple[int, ...], *, from_left: bool) -> tuple[int | None, ...] | None:
    """For each dimension of `shape`, the one of `weight` that it runs along; None for those that are 1 or of its own.

    Both are walked from the right (or left), so a bias takes the last dimension of a square kernel.
    """
    step = 1 if from_left else -1
    free = list(range(len(weight)))[::step]
    dims: list[int | None] = []
    for size in shape[::step]:
        match = next((position for position, dim in enumerate(free) if weight[dim] == size != 1), None)
        dims.append(None if match is None else free[match])
        free = free[0 if match is None else match + 1 :]
    return tuple(dims[::step]) if any(dim is not None for dim in dims) else None


def told_by(width: int | None) -> str:
    """What people are told of the order of dimensions."""
    return f"the order of its dimensions is {'a guess' if width is None else f'told by the model width, {width}'}"
