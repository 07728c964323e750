"""GPTQ, AWQ, auto-round and ModelOpt's W4A16_AWQ: integers of a few bits, a scale and a zero point for each group.

GPTQ and AWQ have codes in words of 32 (those of 3 bits, and auto-round's of 5 to 7, follow each other across words),
zero points packed alike, and a scale for each group of rows. In the form `gptq_p`, 32 codes of 3, 5, 6 or 7 bits are in
as many words as bits, in planes of 1, 2 and 4 bits. Both store the transposed weight: `qweight` int32, and `scales` and
`qzeros` with a row for each group of input features. The value is `scale * (code - zero)`. The difference of integers
is exact. The product is rounded to the scales' dtype, usually float16, and then to the model's, as in GPTQModel's
`dequantize_weight` and AutoAWQ's `dequantize_gemm`.

Modules may have bits and groups of their own. GPTQ's `dynamic` has regular expressions for names of modules; the first
that matches counts, after `-:` it leaves the module out. The `extra_config` of auto-round has names of modules, and
regular expressions for all others, and 16 bits leave a module out. `auto-round` has the tensors of GPTQ or AWQ, which
`packing_format` says (auto-round 0.16.1).

ModelOpt (0.47) has two rows of `weight` in one of bytes, the first in the lower half, integers from -8 to 7, and a
`weight_scale` for each group of a row. `pre_quant_scale` is for the columns of inputs, where the norm before them did
not take it; the plain weight is `code * weight_scale * pre_quant_scale`, both products in float32, rounded to the
model's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.decoded import Stored, Unpack
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.extras.quantized.compiled import Words
from lazymodel.extras.quantized.config import DTYPES, Config, Contents, matches
from lazymodel.extras.quantized.scaled import (
    WORD,
    ScaledTensor,
    integers,
    integers_down,
    scaled_integers,
    straddling,
)

_GPTQ_BITS, _MORE_BITS = (2, 3, 4, 8), (2, 3, 4, 5, 6, 7, 8)  # more in planes, and of auto-round
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # bits of each plane, the lowest first
_AWQ_BITS, _AWQ_ORDER = 4, (0, 2, 4, 6, 1, 3, 5, 7)
_WORDS = ("int32", "uint32")
_PACKINGS = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "gemm", "auto_round:awq": "gemm",
}  # fmt: skip


def decode_gptq(contents: Contents) -> None:
    """Decodes the modules of `gptq`: codes packed along the input, and groups that `g_idx` may reorder.

    `checkpoint_format: gptq` stores zero points less 1, modulo 2 to the number of bits; `gptq_v2` stores them as is.
    """
    config = contents.config
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2", "gptq_p") or config.get("is_marlin_format"):
        config.reject("gptq, gptq_v2 or gptq_p as checkpoint_format", repr(form))
    for module in _packed_modules(contents):
        own, known = _dynamic(contents, module), _MORE_BITS if form == "gptq_p" else _GPTQ_BITS
        _add_gptq(contents, module, own, known, less=form == "gptq", planar=form == "gptq_p")


def decode_awq(contents: Contents) -> None:
    """Decodes the modules of `awq` in its `gemm` version: codes packed along the output, interleaved."""
    config = contents.config
    version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm").lower()
    for module in _packed_modules(contents):
        _add_awq(contents, module, config, version)


def decode_auto_round(contents: Contents) -> None:
    """Decodes the modules of `auto-round`."""
    config = contents.config
    packing = str(config.get("packing_format") or "auto_round:gptq")  # as transformers assumes
    kind, bits = config.get("data_type", "int"), config.get("act_bits")
    if packing not in _PACKINGS or kind != "int" or bits not in (None, 16, 32) or config.get("rotation_config"):
        expected = f"one of {', '.join(_PACKINGS)} as packing_format, and integers of weights alone"
        config.reject(expected, f"{packing!r}, data_type {kind!r}, act_bits {bits!r}")
    extra: Any = config.get("extra_config") or {}
    if not isinstance(extra, dict):
        config.reject("an object as extra_config", repr(extra))
    extra = cast("dict[str, Any]", extra)
    modules = dict.fromkeys(_packed_modules(contents))
    patterns = [key for key in extra if key not in modules and not contents.has(f"{key}.weight")]
    for module in modules:
        found = module if module in extra else next((k for k in patterns if matches(f"re:.*(?:{k})", module)), None)
        options = _own(contents, module, config, extra.get(found) if found else {}, "extra_config")
        if options.count("bits") >= 16:
            _left_out(contents, module, "extra_config")
        if _PACKINGS[packing] == "gemm":
            _add_awq(contents, module, options, "gemm")
        else:
            _add_gptq(contents, module, options, _MORE_BITS, less=_PACKINGS[packing] == "gptq")


def _dynamic(contents: Contents, module: str) -> Config:
    """The configuration of a module of GPTQ: the first pattern of `dynamic` that matches overrides what is for all."""
    config = contents.config
    patterns: Any = config.get("dynamic") or {}
    if not isinstance(patterns, dict):
        config.reject("an object as dynamic", repr(patterns))
    for key, own in cast("dict[str, Any]", patterns).items():
        pattern = key[2:] if key.startswith(("+:", "-:")) else key
        if matches(f"re:{pattern}", module):
            if key.startswith("-:"):
                _left_out(contents, module, "dynamic")
            return _own(contents, module, config, own, "dynamic")
    return config


def _own(contents: Contents, module: str, config: Config, own: Any, key: str) -> Config:
    if not isinstance(own, dict):
        contents.reject(f"{module}.qweight", f"an object for it in {key}", repr(own))
    return dataclasses.replace(config, options={**config.options, **cast("dict[str, Any]", own)})


def _left_out(contents: Contents, module: str, key: str) -> None:
    contents.reject(f"{module}.qweight", f"a plain tensor, as {key} leaves the module out", "parts")


def _packed_modules(contents: Contents) -> list[str]:
    """The modules with packed weights. Scales without a weight would be of activations, as AWQ has for some models."""
    for module in contents.names(".scales"):
        contents.require(f"{module}.scales", f"{module}.qweight")
    return list(contents.names(".qweight"))


def _add_gptq(
    contents: Contents, module: str, config: Config, known: Sequence[int], *, less: bool, planar: bool = False
) -> None:
    """Adds a module, in which zero points may be stored less 1."""
    bits = config.count("bits")
    if bits not in known:
        config.reject(f"one of {tuple(known)} as bits", str(bits))
    words, columns = contents.matrix(f"{module}.qweight", *_WORDS)
    rows, order = words * WORD // bits, f"{module}.g_idx"
    if WORD % bits and (rows % WORD or columns % WORD):
        contents.reject(f"{module}.qweight", f"blocks of {WORD} rows and columns", f"{rows} and {columns}")
    if contents.has(order):
        contents.expect(order, (rows,), *_WORDS)
    elif config.get("desc_act"):
        contents.require(f"{module}.qweight", order)
    if WORD % bits:
        codes, packing = _of_planes(bits) if planar else straddling(bits), (1, WORD)
        zeros = _turned(codes, (1 << bits) if less else 0)
    else:
        codes, packing, zeros = integers(bits), (1, WORD // bits), integers_down(bits, plus=1 if less else 0)
    _add_integers(contents, module, config, (columns, rows), codes, packing, zeros, bits)


def _of_planes(bits: int) -> Unpack:
    """Unsigned integers of 32 in as many words as bits: the lowest bits of all in the first words, and so on."""

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        words = stored.view(np.uint32)
        numbers = out.reshape(*words.shape[:-1], WORD)
        with workspace.array(words.shape[:-1], words.dtype) as code, workspace.array(code.shape, code.dtype) as part:
            for place in range(WORD):
                code[...] = first = below = 0
                for width in _PLANES[bits]:
                    word, shift = divmod(place * width, WORD)
                    np.right_shift(words[..., first + word], shift, out=part)
                    np.bitwise_and(part, (1 << width) - 1, out=part)
                    np.left_shift(part, below, out=part)
                    np.bitwise_or(code, part, out=code)
                    first, below = first + width, below + width
                np.copyto(numbers[..., place], code, casting="unsafe")

    return unpack


def _turned(along: Unpack, modulus: int) -> Unpack:
    """The numbers of blocks of 32 that are stored beside each other, below each other; 1 is added with a modulus."""

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        with workspace.array((*stored.shape[:2], WORD), out.dtype) as numbers:
            along(stored, numbers, workspace)
            if modulus:
                np.add(numbers, 1, out=numbers)
                np.fmod(numbers, modulus, out=numbers)
            np.copyto(out.reshape(len(stored), WORD, -1), numbers.swapaxes(1, 2))

    return unpack


def _add_awq(contents: Contents, module: str, config: Config, version: str) -> None:
    bits = config.count("bits", config.get("w_bit"))
    if bits != _AWQ_BITS or version != "gemm":
        config.reject("4 bits in version gemm", f"{bits} bits in version {version}")
    rows, words = contents.matrix(f"{module}.qweight", *_WORDS)
    shape, zeros = (words * (WORD // bits), rows), integers_down(bits, order=_AWQ_ORDER)
    codes = Words(bits, tuple(bits * _AWQ_ORDER.index(place) for place in range(WORD // bits)), zeros, down=True)
    _add_integers(contents, module, config, shape, codes, (WORD // bits, 1), zeros, bits)


def _add_integers(
    contents: Contents, module: str, config: Config, shape: tuple[int, int], codes: Unpack, packing: Sequence[int],
    zeros: Unpack, bits: int,
) -> None:  # fmt: skip
    """Adds a module whose weight has this shape.

    Stored tensors are transposed while they are packed, when they are smallest.
    """
    columns, rows = shape
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    contents.require(names[0], *names[1:])
    size = config.get("group_size", config.get("q_group_size", -1))
    group = rows if size in (-1, None) else min(config.count("group_size", size), rows)
    groups = -(-rows // group)
    contents.expect(names[1], (groups, -(-columns * bits // WORD)), *_WORDS)
    contents.expect(names[2], (groups, columns), *DTYPES)
    order = [f"{module}.g_idx"] if contents.has(f"{module}.g_idx") else []

    def make() -> LazyTensor:
        weight, zero, scale = (contents.tensor(name).T for name in names)
        if WORD % bits:  # blocks of as many words as bits
            weight = contents.tensor(names[0]).reshape(-1, bits, columns).transpose(2, 0, 1)
            zero = contents.tensor(names[1]).reshape(groups, -1, bits).swapaxes(0, 1)
        return scaled_integers(
            shape,
            Stored(weight, (1, 1), codes, packing),
            Stored(scale, (1, group)),
            Stored(zero, (1, group), zeros, (WORD if WORD % bits else WORD // bits, 1)),
            order=(1, contents.tensor(order[0])) if order else None,
            scattered=bool(config.get("desc_act")),
        )

    contents.add(f"{module}.weight", names + order, shape, make)


def decode_awq_of_modelopt(contents: Contents) -> None:
    """Decodes the modules of `modelopt` with W4A16_AWQ."""
    for name in contents.names("_scale"):
        scale = f"{name}_scale"
        packed = contents.has(name) and contents.header(name).dtype == np.uint8 and not contents.has(f"{scale}_2")
        if packed and contents.header(scale).dtype.name in DTYPES:
            _add_signed(contents, name, scale, f"{name.removesuffix('weight')}pre_quant_scale")


def _add_signed(contents: Contents, name: str, scale: str, factor: str) -> None:
    half, columns = contents.matrix(name)
    rows, groups = contents.matrix(scale)
    group = columns // groups
    if rows != 2 * half or group * groups != columns or contents.config.get("group_size") not in (None, group):
        contents.reject(scale, f"scales for groups of {2 * half} rows and {columns} columns", f"shape {(rows, groups)}")
    factors = [factor] if contents.has(factor) else []
    for each in factors:
        contents.expect(each, (columns,), *DTYPES)

    def make() -> LazyTensor:
        stored = [
            Stored(contents.tensor(name), (1, 1), _signed_down, (2, 1)),
            Stored(contents.tensor(scale), (1, group)),
            *(Stored(contents.tensor(each).reshape(1, columns), (rows, 1)) for each in factors),
        ]
        return LazyTensor(ScaledTensor((rows, columns), *stored, times=bool(factors)))

    contents.add(name, [name, scale, *factors], (rows, columns), make)


def _signed_down(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
    """Integers of 4 bits with a sign, two rows in one of bytes, the first in the lower half."""
    codes = stored.view(np.int8)
    with workspace.array(codes.shape, codes.dtype) as lower:
        np.left_shift(codes, 4, out=lower)
        np.right_shift(lower, 4, out=lower)  # keeps the sign
        np.copyto(out[0::2], lower)
        np.right_shift(codes, 4, out=lower)
        np.copyto(out[1::2], lower)
