"""compressed-tensors, the output of llm-compressor: `config_groups` of modules, each with a format.

`float-quantized`, `int-quantized` and `naive-quantized` store 8-bit weights with `weight_scale`, and optionally
`weight_zero_point`. `mxfp8-quantized` has scales that are powers of two, as bytes. `pack-quantized` stores integers of
a few bits plus half of their range in words of 32 bits, `weight_packed`, with zero points packed alike along the rows,
and optionally `weight_g_idx`, the group of each column. `nvfp4-pack-quantized` and `mxfp4-pack-quantized` store blocks
of 4-bit floats. As in `_dequantize`, the difference of code and zero point and its product with the scale are computed
in the scale's dtype; then they are cast to the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._quantized.config import Contents, matches
from lazymodel._quantized.float4 import add_mxfp4, add_nvfp4
from lazymodel._quantized.float8 import block_of, drop_activations, is_float8, take_one
from lazymodel._quantized.scaled import WORD, integers, integers_down, scaled_integers, scales_of
from lazymodel._tensors.decoded import Stored
from lazymodel._tensors.lazy import LazyTensor

_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_BITS = (1, 2, 4, 8)
_SCALES = ("float16", "bfloat16", "float32")

_Scheme = Mapping[str, Any]


def decode(contents: Contents) -> None:
    """Decodes the modules of `compressed-tensors`."""
    config = contents.config
    if config.get("transform_config"):
        config.reject("no transform_config", "one, which rotates weights")
    sparsity = config.get("sparsity_config") or {}
    form = cast("dict[str, Any]", sparsity).get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if form not in (None, "dense"):
        config.reject("dense weights", f"sparsity_config with {form!r}")
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
            contents.drop(f"{name}_zero_point")  # always 0 for floats
        elif contents.header(name).dtype == np.int8:
            _int_quantized(contents, name, _scheme(contents, groups, name))
    drop_activations(contents)


def _groups(contents: Contents) -> list[tuple[list[str], _Scheme]]:
    """The targets and schemes of all groups."""
    config, groups = contents.config, contents.config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        config.reject("config_groups", repr(groups))
    found: list[tuple[list[str], _Scheme]] = []
    for group in cast("dict[str, Any]", groups).values():
        group = cast("dict[str, Any]", group) if isinstance(group, dict) else {}
        targets, weights = group.get("targets"), group.get("weights")
        if weights is None and "weights" in group:  # it is for activations only, such as attention's
            continue
        form = group.get("format") or config.get("format")
        if form not in _FORMATS:
            config.reject(f"one of {', '.join(_FORMATS)} as format", repr(form))
        if not isinstance(targets, list) or not isinstance(weights, dict):
            config.reject("groups with targets and weights", repr(sorted(group)))
        found.append((list(map(str, cast("list[Any]", targets))), cast("dict[str, Any]", weights)))
    return found


def _scheme(contents: Contents, groups: list[tuple[list[str], _Scheme]], name: str) -> _Scheme:
    """The scheme of a module's weights: found by its name, else by its class, which is not known here."""
    module = name.rpartition(".")[0]
    named = [
        scheme for targets, scheme in groups if any(_names(target) and matches(target, module) for target in targets)
    ]
    schemes = named or [scheme for targets, scheme in groups if not all(map(_names, targets))]
    if not schemes or any(scheme != schemes[0] for scheme in schemes[1:]):
        contents.reject(name, "one group of config_groups for it", str(len(schemes)))
    return schemes[0]


def _names(target: str) -> bool:
    """Returns True if a target names modules rather than a class of them."""
    return target.startswith("re:") or not target[:1].isupper()


def _block(contents: Contents, scheme: _Scheme) -> list[int] | None:
    """The declared block that shares a scale; None if a scale is for a whole tensor or channel."""
    strategy, size = scheme.get("strategy"), scheme.get("group_size")
    if strategy in ("tensor", "channel", None):
        return None
    if strategy == "block":
        block = scheme.get("block_structure")
        if isinstance(block, str):  # older versions write "128x128"
            block = [int(part) if part.isdecimal() else part for part in block.split("x")]
        return list(block_of(contents, block) or ())
    if strategy not in ("group", "tensor_group") or type(size) is not int or size < 1:
        contents.config.reject("a known strategy for weights", f"{strategy!r} with group_size {size!r}")
    return [1, size]


def _int_quantized(contents: Contents, name: str, scheme: _Scheme) -> None:
    scale, shape = f"{name}_scale", tuple(contents.header(name).shape)
    contents.expect(scale, contents.header(scale).shape, *_SCALES)
    arrangement, blocks = scales_of(contents, scale, shape, _block(contents, scheme))
    zeros = _zeros(contents, name, scheme)
    _expect_each(contents, zeros, arrangement)

    def make() -> LazyTensor:
        codes, *others = (contents.tensor(each) for each in (name, scale, *zeros))
        operands = (Stored(other.reshape(arrangement), blocks) for other in others)
        return scaled_integers(shape, Stored(codes, (1,) * len(shape)), *operands)

    contents.add(name, [name, scale, *zeros], shape, make)


def _zeros(contents: Contents, name: str, scheme: _Scheme) -> list[str]:
    """The name of the zero points; empty if there are none."""
    zero = f"{name}_zero_point"
    if not contents.has(zero) and not scheme.get("symmetric", True):
        contents.require(f"{name}_scale", zero)
    return [zero] if contents.has(zero) else []


def _expect_each(contents: Contents, zeros: Sequence[str], arrangement: Sequence[int]) -> None:
    """Raises CheckpointError unless there is an 8-bit zero point for each scale, in any shape."""
    for zero in zeros:
        found = contents.header(zero).shape
        contents.expect(zero, found, "int8")
        if [n for n in found if n != 1] != [n for n in arrangement if n != 1]:
            contents.reject(zero, f"shape {tuple(arrangement)}, one for each scale", str(tuple(found)))


def _pack_quantized(contents: Contents, name: str, scheme: _Scheme) -> None:
    """Adds a packed matrix. Its last word may be partly used: `weight_shape` has the number of its columns."""
    packed, scale, order, extents = (f"{name}_{part}" for part in ("packed", "scale", "g_idx", "shape"))
    bits = scheme.get("num_bits")
    if bits not in _BITS or scheme.get("type", "int") != "int":
        contents.config.reject(f"integers of one of {_BITS} bits", f"{scheme.get('type')!r} of {bits!r}")
    rows, words = contents.matrix(packed, "int32")
    contents.expect(extents, (2,), "int64", "int32")
    contents.expect(scale, contents.header(scale).shape, *_SCALES)
    per_word, block, half = WORD // bits, _block(contents, scheme), 1 << (bits - 1)
    zeros = _zeros(contents, name, scheme)
    orders = [order] if contents.has(order) else []

    def decoded(columns: int) -> LazyTensor:
        """The matrix, decoded with so many columns."""
        shape = rows, columns
        if not 0 <= words * per_word - columns < per_word:
            contents.reject(packed, f"{-(-columns // per_word)} words a row for {columns} columns", str(words))
        arrangement, blocks = scales_of(contents, scale, shape, block)
        operands = [Stored(contents.tensor(scale).reshape(arrangement), blocks)]
        if zeros and contents.header(zeros[0]).dtype == np.int32:
            contents.expect(zeros[0], (-(-arrangement[0] * bits // WORD), arrangement[1]))
            operands.append(Stored(contents.tensor(zeros[0]), blocks, integers_down(bits, -half), (per_word, 1)))
        elif zeros:
            _expect_each(contents, zeros, arrangement)
            operands.append(Stored(contents.tensor(zeros[0]).reshape(arrangement), blocks))
        if orders:
            contents.expect(order, shape[1:], "int32")
        return scaled_integers(
            shape,
            Stored(contents.tensor(packed), (1, 1), integers(bits, -half), (1, per_word)),
            *operands,
            order=(1, contents.tensor(order)) if orders else None,
            scattered=bool(orders),
            may_be_unordered=True,
        )

    def make() -> LazyTensor:
        found = contents.tensor(extents).read().tolist()
        if found[0] != rows or (grouped and found[1] != known):
            contents.reject(extents, str([rows, known] if grouped else f"{rows} rows"), repr(found))
        return decoded(found[1])

    groups = contents.header(scale).shape[-1:]
    known = groups[0] * block[-1] if block and block[0] == 1 and groups else 0  # groups divide rows; blocks may not
    grouped = 0 <= words * per_word - known < per_word
    parts = [packed, scale, *zeros, *orders, extents]
    if grouped:
        decoded(known)
        contents.add(name, parts, (rows, known), make)
    else:  # the number of columns is known only after reading
        contents.add_unread(name, parts, lambda: make().astype(contents.config.dtype))
