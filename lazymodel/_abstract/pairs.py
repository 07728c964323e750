"""LoRA pairs among a model's variables: which variable each adapts, and how its two factors multiply to it.

`lora_pairs` finds those of a live model, `Framework.lora_pairs` those of an abstract one. An adapter of a framework
knows its own layers; all others are found by names, as Qwix, Flax and PEFT give them, and by shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.variable import OPTIMIZER, named_arrays
from lazymodel._errors import LazyModelError
from lazymodel._show.text import grouped_by, listed

RANK = -1  # in place of a number of an axis

Axes: TypeAlias = "tuple[int, ...]"
_Shape: TypeAlias = "tuple[int, ...]"

# `kernel_lora_a` is Qwix' name, `lora_a` NNX', `q_proj.lora_A.weight` PEFT's.
_A = re.compile(r"((?:.*[./_])?)(lora_(?:embedding_)?)([aA])((?:[./](?:default|weight|kernel))*)", re.DOTALL)
# Where a variable may be whose pair is in a module: in the module, in what it wraps, or around a module `lora`.
_WRAPPED = ("base_module", "base_layer")


@dataclasses.dataclass(frozen=True)
class LoraPair:
    """A pair of LoRA: its layer computes with `base + scale * (a · b)` in place of `base`.

    Attributes:
        base: Path of the adapted variable; with quantized numbers, of what stands for it in mappings.
        a: Path of the factor that is multiplied with the inputs.
        b: Path of the other factor.
        shape: Shape of the adapted variable.
        axes: The axes of `a` and those of `b`: for each the number of the base's axis, or `RANK` for the one over which
            both are summed. Axes of the base that both have are batch axes, such as that of stacked layers. If axes of
            the base are one axis of a factor, their numbers follow each other. There are several alternatives, the
            likeliest first, if only shapes are known.
        scale: The model's own factor, such as `alpha / rank`; None if it is not known.
        tied: True if the variable is an embedding that is also the output projection.
    """

    base: str
    a: str
    b: str
    shape: _Shape
    axes: tuple[tuple[Axes, Axes], ...]
    scale: float | None = None
    tied: bool = False


def lora_pairs(model: Any) -> list[LoraPair]:
    """The LoRA pairs of a live model, or of any pytree of arrays; see `named_pairs` for errors."""
    for adapter in adapters():
        find = getattr(adapter, "lora_pairs", None)  # adapters elsewhere may not know about pairs
        if find is not None and (found := find(model)) is not None:
            return found
    return named_pairs({path: np.shape(array) for path, array in named_arrays(model).items()})


def named_pairs(shapes: Mapping[str, _Shape]) -> list[LoraPair]:
    """The pairs that names and shapes show, by path → shape of all variables; their scale is unknown.

    State of an optimizer is left out.

    Raises:
        LazyModelError: A pair is incomplete, or does not fit exactly one variable next to it.
    """
    shapes = {path: shape for path, shape in shapes.items() if not path.startswith(OPTIMIZER)}
    matrices = (path for path, shape in shapes.items() if len(shape) > 1 and "lora_" not in path.lower())
    modules = grouped_by(matrices, lambda path: path[: _end(path)])
    pairs: list[LoraPair] = []
    for a, shape in shapes.items():
        if (match := _A.fullmatch(a)) is None:
            continue
        head, word, letter, tail = match.groups()
        b = f"{head}{word}{'b' if letter == 'a' else 'B'}{tail}"
        if b not in shapes:
            raise LazyModelError(f"LoRA pair: expected {b!r} next to {a!r}, found none; save or build both factors")
        found = {base: shapes[stored] for base, stored in _bases(head, shapes, modules)}
        fitting = {base: axes for base, of in found.items() if (axes := axes_by_shape(of, shape, shapes[b]))}
        if len(fitting) != 1:
            raise LazyModelError(
                f"LoRA pair {a!r} {list(shape)}, {b!r} {list(shapes[b])}: expected one variable next to it that their "
                f"product fits, found {listed(f'{base!r} {list(found[base])}' for base in fitting or found) or 'none'}"
            )
        ((base, axes),) = fitting.items()
        pairs.append(LoraPair(base, a, b, found[base], axes))
    return pairs


def _end(path: str) -> int:
    """The length of the module's part of a path, its separator included."""
    return max(path.rfind("/"), path.rfind(".")) + 1


def _bases(head: str, shapes: Mapping[str, _Shape], modules: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """The variables that a pair may adapt, by what is before `lora_a`: path, and path of the array that has its shape.

    A quantized one has its numbers below its path.
    """
    if head.endswith("_"):
        base = head[:-1]
        return [(base, path) for path in (base, f"{base}/array/qvalue", f"{base}/qvalue") if path in shapes][:1]
    places = [head, *(f"{head}{name}{sep}" for name in _WRAPPED for sep in "/.")]
    if re.fullmatch(r"(?:.*[./])?lora[./]", head):
        places.append(head[:-5])
    return [(path, path) for place in places for path in modules.get(place, [])]


def axes_by_shape(base: _Shape, a: _Shape, b: _Shape) -> tuple[tuple[Axes, Axes], ...]:
    """The alternatives for `LoraPair.axes` that shapes allow, the likeliest first.

    Likely is: no batch axes, rank last in `a` and first in `b`, and the first axes of the base in `a`.
    """
    found: list[tuple[Any, tuple[Axes, Axes]]] = []
    for sides in itertools.product("ab*", repeat=len(base)):
        batch, ins, outs = (tuple(axis for axis, side in enumerate(sides) if side == which) for which in "*ab")
        flipped = ((*batch, RANK, *ins), (*batch, *outs, RANK))
        for order, axes in enumerate([((*batch, *ins, RANK), (*batch, RANK, *outs)), flipped]):
            ranks = [_rank(shape, base, each, len(batch)) for shape, each in zip((a, b), axes, strict=True)]
            if ins and outs and ranks[0] is not None and ranks[0] == ranks[1]:
                found.append(((len(batch), order, sides), axes))
    return tuple(axes for _, axes in sorted(found))


def _rank(shape: _Shape, base: _Shape, axes: Axes, batch: int) -> int | None:
    """The rank of a factor with these axes; None if it has another shape.

    All axes of the base besides the batch axes may be one axis of the factor.
    """
    known = math.prod(base[axis] for axis in axes if axis != RANK)
    if not known or math.prod(shape) % known:
        return None
    rank = math.prod(shape) // known
    whole = tuple(rank if axis == RANK else base[axis] for axis in axes)
    sides = [batch, len(whole) - 1] if axes[-1] == RANK else [batch + 1, len(whole)]
    merged = (*whole[: sides[0]], math.prod(whole[slice(*sides)]), *whole[sides[1] :])
    return rank if shape in (whole, merged) else None
