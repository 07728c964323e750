"""MLX: codes of 1 to 8 bits and 4- and 8-bit floats, as `mlx.core.quantize` packs them (mlx 0.32.4).

A module has `weight`, words of 32 bits in which the codes of a row follow each other from the lowest bit on, across
words too, and `scales`, one for each group of a row. In the mode `affine` it also has `biases`: the value is `code *
scale + bias`, where the product and the sum are each rounded to the scales' dtype. `mxfp4`, `mxfp8` (groups of 32,
powers of two) and `nvfp4` (groups of 16, E4M3) store scales as bytes; the value is the product in float32. All is
rounded to the model's dtype at last.

`config.json` has bits, group size and mode as `quantization`, often again as `quantization_config`, with an entry for
each module that differs. mlx-lm joins the experts of a layer in one tensor, `switch_mlp`; here they have the names of
the original model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._tensors.boxes import Box, shift
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import DType, Steps
from lazymodel._tensors.decoded import Stored
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._hugging_face import Plain
from lazymodel.extras.quantized.config import DTYPES, Contents
from lazymodel.extras.quantized.scaled import (
    E4M3,
    E8M0,
    WORD,
    Float4Tensor,
    ScaledTensor,
    floats,
    integers,
    scaled_pairs,
    straddling,
)

_BITS = {"affine": (1, 2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # whose experts are matrices of their own in the original
# 24 less the digits of a dtype; smallest and largest scale whose products with codes are normal numbers.
_ROUNDING = {"float16": (13, 2.0**-14, 2.0**7), "bfloat16": (16, 2.0**-120, 2.0**100)}
_OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class AffineTensor(ScaledTensor):
    """A float32 array `code * scale + bias`, product and sum each rounded to the dtype of scales and biases; the sum
    by the cast that follows.
    """

    def operations(self) -> tuple[tuple[int, str, DType], ...]:
        return (1, "multiply", self.stored[1].view.dtype), (2, "add", self.dtype)

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        with np.errstate(all="ignore"), contextlib.ExitStack() as stack:
            (covered, codes), scale, bias = (
                stack.enter_context(stored.numbers(box, array, self.dtype, workspace))
                for stored, box, array in zip(self.stored, needed, arrays, strict=True)
            )
            values, kind = codes[shift(tile, covered)], self.stored[1].view.dtype
            digits, least, most = _ROUNDING.get(kind.name, (0, 0.0, 0.0))
            sizes = np.abs(scale[1])
            # A scale that is 0 or tiny may give products that are not normal numbers, and -0 would become 0.
            exact = bool(digits and sizes.size and sizes.min() >= least and sizes.max() <= most and bias[1].all())
            if exact:
                np.multiply(scale[1], np.float32(2.0**digits), out=scale[1])
            self._apply(np.multiply, values, tile, self.stored[1], *scale, workspace)
            if exact:
                # x + x * 2 ** n, rounded to 24 digits, minus x * 2 ** n, is x rounded to 24 - n digits, ties to even.
                with workspace.array(values.shape, values.dtype) as sums:
                    np.multiply(values, np.float32(1 + 2.0**-digits), out=sums)
                    np.subtract(sums, values, out=values)
            elif digits:
                np.copyto(values, values.astype(kind))
            self._apply(np.add, values, tile, self.stored[2], *bias, workspace)
            yield values, steps


def decode_mlx(contents: Contents) -> None:
    """Decodes the modules of MLX."""
    for module in contents.names(".scales"):
        contents.require(f"{module}.scales", f"{module}.weight")
        _add(contents, module)


def _add(contents: Contents, module: str) -> None:
    config = contents.config
    own: Any = config.get(module)
    options = {**config.options, **(cast("dict[str, Any]", own) if isinstance(own, dict) else {})}
    mode, bits = options.get("mode") or "affine", options.get("bits")
    if not isinstance(mode, str) or type(bits) is not int or bits not in _BITS.get(mode, ()):
        modes = ", ".join(f"{mode} of {' or '.join(map(str, each))}" for mode, each in _BITS.items())
        config.reject(f"for {module!r} one of {modes} bits", f"{mode!r} of {bits!r}")
    weight, scale, bias = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
    parts = [weight, scale, bias][: 3 if mode == "affine" else 2]
    contents.require(weight, *parts)
    stored, scales = (tuple(contents.header(name).shape) for name in (weight, scale))
    contents.expect(weight, stored, "uint32")
    size = options.get("group_size")
    columns = (stored[-1] if stored else 0) * WORD // bits
    group = columns // scales[-1] if scales and scales[-1] else 0
    if len(stored) not in (2, 3) or not group or size not in (None, group) or group * scales[-1] != columns:
        contents.reject(scale, f"a scale for each group of {size} of {columns} numbers", f"shape {scales}")
    contents.expect(scale, (*stored[:-1], columns // group), *(DTYPES if mode == "affine" else ("uint8",)))
    if mode == "affine":
        contents.expect(bias, scales, contents.header(scale).dtype.name)
    make = functools.partial(_decoded, mode, bits, group)
    contents.add(weight, parts, (*stored[:-1], columns), lambda: make(*map(contents.tensor, parts)))


def _decoded(mode: str, bits: int, group: int, weight: LazyTensor, scale: LazyTensor, *bias: LazyTensor) -> LazyTensor:
    """A matrix, or one for each expert."""
    *rows, words = weight.shape
    shape, ones = (*rows, words * WORD // bits), (1,) * len(rows)
    if bits == 4 and not bias:
        blocks = weight.reshape(-1, rows[-1], shape[-1] // group, group * bits // WORD)
        table = functools.partial(scaled_pairs, E8M0 if mode == "mxfp4" else E4M3)
        return LazyTensor(Float4Tensor(blocks, scale.reshape(blocks.shape[:-1]), table)).reshape(shape)
    if not bias:
        codes = Stored(weight, (*ones, 1), floats(np.dtype(ml_dtypes.float8_e4m3fn)), (*ones, WORD // bits))
        powers = Stored(scale, (*ones, group), floats(np.dtype(ml_dtypes.float8_e8m0fnu)))
        return LazyTensor(ScaledTensor(shape, codes, powers))
    together = math.lcm(bits, WORD) // WORD  # words after which codes begin at a word again
    if together > 1:
        packed, unpack = weight.reshape(*rows, -1, together), straddling(bits)
    else:
        packed, unpack = weight, integers(bits)
        if scale.dtype == np.float32:  # a program may add a product to a bias without rounding it
            unpack = unpack.unpack
    codes = Stored(packed, (*ones, 1), unpack, (*ones, together * WORD // bits))
    affine = AffineTensor(shape, codes, Stored(scale, (*ones, group)), Stored(bias[0], (*ones, group)))
    return LazyTensor(affine).astype(scale.dtype)


def split_experts(contents: Contents, model_type: str) -> None:
    """Gives the experts that mlx-lm joined in `switch_mlp`, quantized or not, their names in the original model."""
    if model_type not in EXPERTS:
        return
    for name in [*contents.left, *contents.plain]:
        layer, found, kind = name.removesuffix(".weight").rpartition(".switch_mlp.")
        if not found:
            continue
        header = contents.header(name)
        joined = contents.plain.pop(name, None) or Plain(
            functools.partial(contents.tensor, name), header.file, header.dtype, tuple(header.shape)
        )
        contents.drop(name)
        kind = _OF_MIXTRAL.get(kind, kind) if model_type == "mixtral" else kind
        for index in range(joined.shape[0]):
            part = Plain(functools.partial(_expert, joined, index), joined.file, joined.dtype, joined.shape[1:])
            contents.plain[f"{layer}.experts.{index}.{kind}.weight"] = part


def _expert(joined: Plain, index: int) -> LazyTensor:
    return joined.make()[index]
