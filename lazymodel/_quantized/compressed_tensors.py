"""compressed-tensors: what llm-compressor writes, `config_groups` of modules with a format each.

`float-quantized`, `int-quantized` and `naive-quantized` store 8-bit weights with `weight_scale`, and perhaps
`weight_zero_point`; `mxfp8-quantized` has scales that are powers of two, as bytes; `pack-quantized` stores integers of
a few bits plus half of their range in words of 32, `weight_packed`, with zero points packed alike along the rows, and
perhaps `weight_g_idx`, the group of each column; `nvfp4-pack-quantized` and `mxfp4-pack-quantized` store blocks of
4-bit floats. As `_dequantize` has it, the difference of code and zero point and its product with the scale are in the
scale's dtype; then they are cast to the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._quantized.codes import WORD, integers, integers_down
from lazymodel._quantized.config import matches
from lazymodel._quantized.contents import Contents
from lazymodel._quantized.float4 import add_mxfp4, add_nvfp4
from lazymodel._quantized.float8 import block_of, drop_activations, is_float8, take_one
from lazymodel._quantized.scales import arranged, blocks_of, scaled_integers
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.scaled import Stored, stored

_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_BITS = (1, 2, 4, 8)
_SCALES = ("float16", "bfloat16", "float32")

_Scheme = Mapping[str, Any]


def decode(contents: Contents) -> None:
    """Takes the modules of `compressed-tensors`."""
    config = contents.config
    if config.get("transform_config"):
        config.refuse("no transform_config", "one, by which weights are rotated")
    sparsity = config.get("sparsity_config") or {}
    form = cast("dict[str, Any]", sparsity).get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if form not in (None, "dense"):
        config.refuse("dense weights", f"sparsity_config with {form!r}")
    groups = _groups(contents)
    for packed in [f"{name}_packed" for name in contents.names("_packed")]:
        name = packed.removesuffix("_packed")
        scheme, scale = _scheme(contents, groups, name), f"{name}_scale"
        contents.require(packed, scale)
        if f"{name}_shape" in contents.left:
            _pack_quantized(contents, name, scheme)
        elif contents.has(f"{name}_global_scale"):
            add_nvfp4(contents, name, packed, scale, f"{name}_global_scale", divides=True)
        else:
            add_mxfp4(contents, name, packed, scale)
    for scale in [f"{name}_scale" for name in contents.names("_scale")]:
        name = scale.removesuffix("_scale")
        if not contents.has(name) or not contents.has(scale):
            continue
        if is_float8(contents.header(name).dtype):
            take_one(contents, name, scale, _block(contents, _scheme(contents, groups, name)), of_scale=True)
            contents.drop(f"{name}_zero_point")  # of floats, always 0
        elif contents.header(name).dtype == np.int8:
            _int_quantized(contents, name, _scheme(contents, groups, name))
    drop_activations(contents)


def _groups(contents: Contents) -> list[tuple[list[str], _Scheme]]:
    """The targets and schemes of all groups."""
    config, groups = contents.config, contents.config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        config.refuse("config_groups", repr(groups))
    found: list[tuple[list[str], _Scheme]] = []
    for group in cast("dict[str, Any]", groups).values():
        group = cast("dict[str, Any]", group) if isinstance(group, dict) else {}
        targets, weights = group.get("targets"), group.get("weights")
        if weights is None and "weights" in group:  # it is of activations, such as attention's, alone
            continue
        form = group.get("format") or config.get("format")
        if form not in _FORMATS:
            config.refuse(f"one of {', '.join(_FORMATS)} as format", repr(form))
        if not isinstance(targets, list) or not isinstance(weights, dict):
            config.refuse("groups with targets and weights", repr(sorted(group)))
        found.append((list(map(str, cast("list[Any]", targets))), cast("dict[str, Any]", weights)))
    return found


def _scheme(contents: Contents, groups: list[tuple[list[str], _Scheme]], name: str) -> _Scheme:
    """How the weights of a module are quantized: by its name, else by its class, which is not known here."""
    module = name.rpartition(".")[0]
    named = [
        scheme for targets, scheme in groups if any(_names(target) and matches(target, module) for target in targets)
    ]
    schemes = named or [scheme for targets, scheme in groups if not all(map(_names, targets))]
    if not schemes or any(scheme != schemes[0] for scheme in schemes[1:]):
        contents.refuse(name, "one group of config_groups for it", str(len(schemes)))
    return schemes[0]


def _names(target: str) -> bool:
    """Whether a target names modules rather than a class of them."""
    return target.startswith("re:") or not target[:1].isupper()


def _block(contents: Contents, scheme: _Scheme) -> list[int] | None:
    """The block that a scale is for, where it is none of a tensor or a channel."""
    strategy, size = scheme.get("strategy"), scheme.get("group_size")
    if strategy in ("tensor", "channel", None):
        return None
    if strategy == "block":
        block = scheme.get("block_structure")
        if isinstance(block, str):  # as older versions have it, "128x128"
            block = [int(part) if part.isdecimal() else part for part in block.split("x")]
        return list(block_of(contents, block) or ())
    if strategy not in ("group", "tensor_group") or type(size) is not int or size < 1:
        contents.config.refuse("a strategy for weights that is known", f"{strategy!r} with group_size {size!r}")
    return [1, size]


def _int_quantized(contents: Contents, name: str, scheme: _Scheme) -> None:
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    shape = tuple(contents.header(name).shape)
    contents.expect(scale, contents.header(scale).shape, *_SCALES)
    arrangement, blocks = blocks_of(contents, scale, shape, _block(contents, scheme))
    if zeros := _zeros(contents, zero, scheme):
        _expect_each(contents, zero, arrangement)

    def make() -> LazyTensor:
        return scaled_integers(
            shape,
            stored(contents.tensor(name), (1,) * len(shape)),
            stored(arranged(contents.tensor(scale), arrangement), blocks),
            stored(arranged(contents.tensor(zero), arrangement), blocks) if zeros else None,
        )

    contents.add(name, [name, scale, *zeros], shape, make)


def _zeros(contents: Contents, zero: str, scheme: _Scheme) -> list[str]:
    """The name of the zero points; none where there are none."""
    if contents.has(zero):
        return [zero]
    if not scheme.get("symmetric", True):
        contents.require(zero.removesuffix("zero_point") + "scale", zero)
    return []


def _expect_each(contents: Contents, zero: str, arrangement: Sequence[int]) -> None:
    """Raises CheckpointError unless there is an 8-bit zero point for each scale, in whichever shape."""
    found = contents.header(zero).shape
    contents.expect(zero, found, "int8")
    if [n for n in found if n != 1] != [n for n in arrangement if n != 1]:
        contents.refuse(zero, f"shape {tuple(arrangement)}, one for each scale", str(tuple(found)))


def _pack_quantized(contents: Contents, name: str, scheme: _Scheme) -> None:
    """Takes a packed matrix. Its last word may be partly used: `weight_shape` has the number of its columns."""
    packed, scale, zero, order, told = (
        f"{name}_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")
    )
    bits = scheme.get("num_bits")
    if bits not in _BITS or scheme.get("type", "int") != "int":
        contents.config.refuse(f"integers of one of {_BITS} bits", f"{scheme.get('type')!r} of {bits!r}")
    rows, words = contents.matrix(packed, "int32")
    contents.expect(told, (2,), "int64", "int32")
    contents.expect(scale, contents.header(scale).shape, *_SCALES)
    per_word, block, half = WORD // bits, _block(contents, scheme), 1 << (bits - 1)
    zeros = _zeros(contents, zero, scheme)
    orders = [order] if contents.has(order) else []
    is_packed = bool(zeros) and contents.header(zero).dtype == np.int32

    def decoded(columns: int) -> LazyTensor:
        """The matrix, if it has so many columns."""
        shape = rows, columns
        if not 0 <= words * per_word - columns < per_word:
            contents.refuse(packed, f"{-(-columns // per_word)} words a row for {columns} columns", str(words))
        arrangement, blocks = blocks_of(contents, scale, shape, block)
        zero_points: Stored | None = None
        if is_packed:
            contents.expect(zero, (-(-arrangement[0] * bits // WORD), arrangement[1]))
            zero_points = stored(contents.tensor(zero), blocks, integers_down(bits, -half), (per_word, 1))
        elif zeros:
            _expect_each(contents, zero, arrangement)
            zero_points = stored(arranged(contents.tensor(zero), arrangement), blocks)
        if orders:
            contents.expect(order, shape[1:], "int32")
        return scaled_integers(
            shape,
            stored(contents.tensor(packed), (1, 1), integers(bits, -half), (1, per_word)),
            stored(arranged(contents.tensor(scale), arrangement), blocks),
            zero_points,
            order=(1, contents.tensor(order)) if orders else None,
            scattered=bool(orders),
            may_be_unordered=True,
        )

    def make() -> LazyTensor:
        found = contents.tensor(told).read().tolist()
        if found[0] != rows or (grouped and found[1] != known):
            contents.refuse(told, str([rows, known] if grouped else f"{rows} rows"), repr(found))
        return decoded(found[1])

    groups = contents.header(scale).shape[-1:]
    known = groups[0] * block[-1] if block and block[0] == 1 and groups else 0  # groups divide rows, blocks need not
    grouped = 0 <= words * per_word - known < per_word
    parts = [packed, scale, *zeros, *orders, told]
    if grouped:
        decoded(known)
        contents.add(name, parts, (rows, known), make)
    else:  # only reading tells how many columns there are
        contents.add_unread(name, parts, lambda: make().astype(contents.config.dtype))
