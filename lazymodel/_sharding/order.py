"""Whether a weight is stored as (in, out) or (out, in), and whether that is known.

Responsible for what tells the order of two dimensions: the bias that belongs to the weight, its name, other weights of
its name. What a weight is for is told in `_sharding/describe`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_WEIGHT_WORD = re.compile(r"(^|_)(kernel|weights?|w)(?=_?\d*$)|^(kernel|weights?|w)_")
_BIAS_WORD = re.compile(r"(^|_)(bias|b)(?=_?\d*$)|^(bias|b)_")
_CONVENTIONAL = ("weight", "weights", "w")  # (out, in) in PyTorch and Equinox, (in, out) elsewhere: one way in a model


def biases(names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Path of a weight → shape of its bias, which is beside it and called as it is: `dt_bias` is of no `in_proj`."""
    beside: dict[tuple[str, str], str] = {}
    for path, name in names.items():
        parent, _, leaf = name.rpartition("/")
        if (stem := _BIAS_WORD.sub("", leaf)) != leaf:
            beside[parent, stem] = path
    found: dict[str, tuple[int, ...]] = {}
    for path, name in names.items():
        parent, _, leaf = name.rpartition("/")
        bias = beside.get((parent, _WEIGHT_WORD.sub("", leaf)))
        if bias not in (None, path) and len(shapes[path]) > 1:
            found[path] = shapes[bias]
    return found


def orders(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], biases: Mapping[str, tuple[int, ...]]
) -> dict[str, bool]:
    """Path of a weight → whether it is stored as (out, in); without those of which nothing tells it.

    A bias tells it, unless both ends are of one size. Without, `kernel` is (in, out), but for transposed convolutions,
    and another name means what it does elsewhere in the model.
    """
    found: dict[str, bool] = {}
    for path, bias in biases.items():
        if (told := _told_by(bias, shapes[path])) is not None:
            found[path] = told
    conventions: dict[str, set[bool]] = {}
    for path, out_first in found.items():
        conventions.setdefault(_leaf(names[path]), set()).add(out_first)
    for path, shape in shapes.items():
        if len(shape) < 2 or path in found:
            continue
        leaf = _leaf(names[path])
        convention = conventions.get(leaf, set()) if leaf in _CONVENTIONAL else set()
        if name_tells(names[path]):
            found[path] = False
        elif len(convention) == 1:
            found[path] = next(iter(convention))
    return found


def name_tells(name: str) -> bool:
    """Whether the order is known from the weight's name: what is called `kernel` is summed over all but the last."""
    return _leaf(name) in ("kernel", "_kernel") and "transpose" not in name


def _told_by(bias: Sequence[int], shape: Sequence[int]) -> bool | None:
    if len(bias) != 1 or shape[0] == shape[-1] or bias[0] not in (shape[0], shape[-1]):
        return None
    return bias[0] == shape[0]


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]
