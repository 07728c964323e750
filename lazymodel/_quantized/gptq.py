"""GPTQ and AWQ: integers of a few bits in words of 32, zero points packed alike, and a scale for each group of rows.

Both store the transposed weight: `qweight` int32, and `scales` and `qzeros` with a row for each group of input
features. The value is `scale * (code - zero)`. The difference of integers is exact. The product is rounded to the
scales' dtype, usually float16, and then to the model's, as in GPTQModel's `dequantize_weight` and AutoAWQ's
`dequantize_gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazymodel._quantized.config import Contents
from lazymodel._quantized.scaled import WORD, integers, integers_down, scaled_integers
from lazymodel._tensors.decoded import Stored, Unpack
from lazymodel._tensors.lazy import LazyTensor

_GPTQ_BITS = (2, 4, 8)
_AWQ_BITS, _AWQ_ORDER = 4, (0, 2, 4, 6, 1, 3, 5, 7)
_WORDS = ("int32", "uint32")
_SCALES = ("float16", "bfloat16", "float32")


def decode_gptq(contents: Contents) -> None:
    """Decodes the modules of `gptq`: codes packed along the input, and groups that `g_idx` may reorder.

    `checkpoint_format: gptq` stores zero points less 1, modulo 2 to the number of bits; `gptq_v2` stores them as is.
    """
    config = contents.config
    bits, form = config.count("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    if bits not in _GPTQ_BITS:
        config.reject(f"one of {_GPTQ_BITS} as bits", str(bits))
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        config.reject("gptq or gptq_v2 as checkpoint_format", repr(form))
    zeros = integers_down(bits, plus=1 if form == "gptq" else 0)
    for module in _modules(contents):
        words, columns = contents.matrix(f"{module}.qweight", *_WORDS)
        rows, order = words * (WORD // bits), f"{module}.g_idx"
        if contents.has(order):
            contents.expect(order, (rows,), *_WORDS)
        elif config.get("desc_act"):
            contents.require(f"{module}.qweight", order)
        _add(contents, module, (columns, rows), integers(bits), (1, WORD // bits), zeros, bits)


def decode_awq(contents: Contents) -> None:
    """Decodes the modules of `awq` in its `gemm` version: codes packed along the output, interleaved."""
    config = contents.config
    bits = config.count("bits", config.get("w_bit"))
    version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm").lower()
    if bits != _AWQ_BITS or version != "gemm":
        config.reject("4 bits in version gemm", f"{bits} bits in version {version}")
    for module in _modules(contents):
        rows, words = contents.matrix(f"{module}.qweight", *_WORDS)
        shape, codes = (words * (WORD // bits), rows), integers_down(bits, order=_AWQ_ORDER)
        _add(contents, module, shape, codes, (WORD // bits, 1), codes, bits)


def _modules(contents: Contents) -> list[str]:
    """The modules with packed weights. Scales without a weight would be of activations, as AWQ has for some models."""
    for module in contents.names(".scales"):
        contents.require(f"{module}.scales", f"{module}.qweight")
    return list(contents.names(".qweight"))


def _add(
    contents: Contents, module: str, shape: tuple[int, int], codes: Unpack, packing: Sequence[int], zeros: Unpack,
    bits: int,
) -> None:  # fmt: skip
    """Adds a module whose weight has this shape.

    Stored tensors are transposed while they are packed, when they are smallest.
    """
    columns, rows = shape
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    contents.require(names[0], *names[1:])
    size = contents.config.get("group_size", contents.config.get("q_group_size", -1))
    group = rows if size in (-1, None) else min(contents.config.count("group_size", size), rows)
    groups = -(-rows // group)
    contents.expect(names[1], (groups, -(-columns * bits // WORD)), *_WORDS)
    contents.expect(names[2], (groups, columns), *_SCALES)
    order = [f"{module}.g_idx"] if contents.has(f"{module}.g_idx") else []

    def make() -> LazyTensor:
        weight, zero, scale = (contents.tensor(name).T for name in names)
        return scaled_integers(
            shape,
            Stored(weight, (1, 1), codes, packing),
            Stored(scale, (1, group)),
            Stored(zero, (1, group), zeros, (WORD // bits, 1)),
            order=(1, contents.tensor(order[0])) if order else None,
            scattered=bool(contents.config.get("desc_act")),
        )

    contents.add(f"{module}.weight", names + order, shape, make)
