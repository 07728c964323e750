"""Methods of quantization (`quant_method`): a function each, which takes the tensors that it knows, and the table.

**FP8** (`fp8`, `fbgemm_fp8`, NVIDIA's ModelOpt, AMD's Quark 0.13): a weight in F8_E4M3 (or another 8-bit float) has a
`weight_scale_inv` or `weight_scale`: one for all, one for each row, or one for each block of `weight_block_size`. The
value is `float32(weight) * float32(scale)`, rounded once to the model's dtype, as in `weight_dequant_kernel` of
DeepSeek-V3's `inference/kernel.py`, and in `Fp8Dequantize` of transformers. Scales of activations and of caches are
left out.

GPTQ, AWQ and what stores the same are in `packed`; `mlx`, `torchao` and `hqq` have these.

**bitsandbytes**: four bits are two codes in a byte, the first in its upper half. Each selects one of the 16 values of
`quant_map`, multiplied by the largest magnitude in its block (`absmax`), which may itself be stored in 8 bits, in
blocks, with an offset. The product is rounded from float32 to the dtype that `quant_state` names, as in
`kDequantizeBlockwise`. Eight bits: `code * SCB * float32(1 / 127)` as in `int8_vectorwise_dequant`, rounded to the
model's dtype. `quant_state` is JSON in a tensor of bytes (`QuantState.as_dict(packed=True)`).

**compressed-tensors**, the output of llm-compressor: `config_groups` of modules, each with a format.
`float-quantized`, `int-quantized` and `naive-quantized` store 8-bit weights with `weight_scale`, and optionally
`weight_zero_point`. `mxfp8-quantized` has scales that are powers of two, as bytes. `pack-quantized` stores integers of
a few bits plus half of their range in words of 32 bits, `weight_packed`, with zero points packed alike along the rows,
and optionally `weight_g_idx`, the group of each column. `nvfp4-pack-quantized`, `mxfp4-pack-quantized` and
`mxfp6-pack-quantized` store blocks of 4- and 6-bit floats. As in `_dequantize`, the difference of code and zero point
and its product with the scale are computed in the scale's dtype; then they are cast to the model's.

Raises for a form that no method knows, and for tensors that still look quantized after all methods took what they
know: a weight loaded without its scale would be silently wrong.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._show.text import listed
from lazymodel._tensors.boxes import Box
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.casting import is_marker, is_quantized, scales_beside
from lazymodel._tensors.convert import Steps
from lazymodel._tensors.decoded import DecodedTensor, Stored
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import View
from lazymodel.checkpoints._hugging_face import Plain
from lazymodel.checkpoints._untrusted import is_finite
from lazymodel.extras.quantized.compiled import Words
from lazymodel.extras.quantized.config import ADVICE, DTYPES, Config, Contents, StoredTensors, find_config, matches
from lazymodel.extras.quantized.hqq import CODES, decode_hqq
from lazymodel.extras.quantized.mlx import decode_mlx, split_experts
from lazymodel.extras.quantized.packed import decode_auto_round, decode_awq, decode_awq_of_modelopt, decode_gptq
from lazymodel.extras.quantized.scaled import (
    WORD,
    ScaledTensor,
    add_float4,
    decode_mxfp4,
    floats,
    integers,
    integers_down,
    lookup,
    mxfp6,
    scaled_integers,
    scales_of,
)
from lazymodel.extras.quantized.torchao import decode_torchao

_KINDS = ("float16", "bfloat16", "float32")  # of scales

# FP8 ------------------------------------------------------------------------------------------------------------------

_SCALE_ENDINGS = ("_scale_inv", "_scale")
_POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)
_ACTIVATIONS = re.compile(
    r"(?:.*\.)?(?:\w+_proj_)?(?:input|output|activation|k|v|q|kv|prob)_"  # and not `correct_output_scale` of Gemma 3n
    r"(?:global_)?(?:scale|scale_inv|scale_ub|zero_point)"
)
_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_AWQ", "MIXED_PRECISION")


def _decode_float8(contents: Contents) -> None:
    """Decodes the weights of `fp8`, `fbgemm_fp8` and `modelopt`."""
    config = contents.config
    algorithm = config.get("quant_algo")
    if config.method == "modelopt" and algorithm not in _ALGORITHMS:
        config.reject(f"one of {', '.join(_ALGORITHMS)} as quant_algo", repr(algorithm))
    block = _block_of(contents, config.get("weight_block_size"))
    for name in list(contents.left):
        if contents.has(name) and _is_float8(contents.header(name).dtype) and not name.endswith(_SCALE_ENDINGS):
            scale = next((name + ending for ending in _SCALE_ENDINGS if contents.has(name + ending)), None)
            if scale is not None:
                _take_one(contents, name, scale, block)
    _drop_activations(contents)


def _decode_quark(contents: Contents) -> None:
    """Decodes the modules of AMD's Quark: FP8, and MXFP4 whose parts have the same names."""
    config = contents.config
    layers = (config.get(key) or {} for key in ("layer_quant_config", "layer_type_quant_config"))
    each = (cast("dict[str, Any]", group).values() if isinstance(group, dict) else [group] for group in layers)
    for own in [config.get("global_quant_config"), *itertools.chain(*each)]:
        weight = cast("dict[str, Any]", own).get("weight") if isinstance(own, dict) else own
        said = cast("dict[str, Any]", weight) if isinstance(weight, dict) else {"dtype": weight}
        kind = tuple(said.get(key) for key in ("dtype", "group_size", "scale_format"))
        if weight is not None and kind != ("fp4", 32, "e8m0") and not str(kind[0]).startswith("fp8_e"):
            expected = "fp8_e4m3, or fp4 in groups of 32 with e8m0 as scale_format, as dtype of weights"
            config.reject(expected, ", ".join(map(repr, kind)))
    for name in contents.names("_scale"):
        if contents.has(name) and contents.header(name).dtype == np.uint8:
            add_float4(contents, name, name, f"{name}_scale")
    _decode_float8(contents)


def _block_of(contents: Contents, value: Any) -> Sequence[int] | None:
    """Returns a declared block, rows and columns; raises CheckpointError if it is not one."""
    if value is None:
        return None
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        contents.config.reject("two positive integers as the size of a block", repr(value))
    return sizes


def _is_float8(dtype: Any) -> bool:
    return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating) and dtype.name.startswith("float8_e")


def _take_one(
    contents: Contents, name: str, scale: str, declared: Sequence[int] | None, *, of_scale: bool = False
) -> None:
    """Adds a weight. With `of_scale`, its product is rounded to the scale's dtype before it is rounded to the model's,
    and scales that are bytes are powers of two (E8M0).
    """
    header, kind = contents.header(name), contents.header(scale).dtype
    shape = tuple(header.shape)
    contents.expect(scale, contents.header(scale).shape, *_KINDS, "float8_e8m0fnu", *(("uint8",) if of_scale else ()))
    arrangement, blocks = scales_of(contents, scale, shape, declared)

    def make() -> LazyTensor:
        weight = Stored(contents.tensor(name), (1,) * len(shape), floats(header.dtype))
        unpack = floats(_POWERS) if kind.itemsize == 1 else None
        scales = Stored(contents.tensor(scale).reshape(arrangement), blocks, unpack)
        decoded = LazyTensor(ScaledTensor(shape, weight, scales))
        return decoded.astype(kind) if of_scale and kind.itemsize > 1 else decoded

    contents.add(name, [name, scale], shape, make)


def _drop_activations(contents: Contents) -> None:
    """Drops the scales and zero points of activations."""
    contents.drop(*[name for name in contents.left if _ACTIVATIONS.fullmatch(name)])


# bitsandbytes ---------------------------------------------------------------------------------------------------------

_STATE = ".quant_state.bitsandbytes__"
_INT8 = 7.874015718698502e-3  # 1 / 127, the value that bitsandbytes uses
_WITH_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")
_NESTED_TILE = 1 << 16  # scales that are computed at once


def _decode_bitsandbytes(contents: Contents) -> None:
    """Decodes the modules of `bitsandbytes`."""
    for kind in ("nf4", "fp4"):
        for name in contents.names(_STATE + kind):
            _add_four_bits(contents, name, f"{name}{_STATE}{kind}")
    for module in contents.names(".SCB"):
        _add_int8(contents, f"{module}.weight", f"{module}.SCB", f"{module}.weight_format")


def _add_int8(contents: Contents, name: str, scale: str, form: str) -> None:
    contents.require(scale, name)
    shape = contents.matrix(name, "int8")
    contents.expect(scale, shape[:1], "float32")
    forms = [form] if contents.has(form) else []

    def make() -> LazyTensor:
        for each in forms:
            if (found := contents.tensor(each).read()).size != 1 or found.reshape(-1)[0] != 0:
                contents.reject(each, "0 (rows are not reordered)", repr(found.reshape(-1)[:4].tolist()))
        scales = Stored(contents.tensor(scale).reshape(-1, 1), (1, shape[1]))
        decoded = LazyTensor(ScaledTensor(shape, Stored(contents.tensor(name), (1, 1)), scales, factor=_INT8))
        return decoded.T if transposed else decoded

    transposed = _is_transposed(contents, name)
    contents.add(name, [name, scale, *forms], shape[::-1] if transposed else shape, make)


def _add_four_bits(contents: Contents, name: str, state: str) -> None:
    """Adds a tensor whose shape is only in its state."""
    absmax, table = f"{name}.absmax", f"{name}.quant_map"
    contents.require(state, name, absmax, table)
    contents.expect(table, (16,), "float32")
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    if contents.header(absmax).dtype == np.uint8:
        contents.require(absmax, *nested)
        contents.expect(nested[1], (256,), "float32")
    else:
        nested = []
        contents.expect(absmax, contents.header(absmax).shape, "float32")
    contents.expect(name, contents.header(name).shape, "uint8", *_KINDS)  # of `bnb_4bit_quant_storage`: the same bytes
    make = functools.partial(_four_bits, contents, name, state, nested)
    transposed = _is_transposed(contents, name)
    contents.add_unread(name, [name, absmax, table, *nested, state], lambda: make().T if transposed else make())


def _is_transposed(contents: Contents, name: str) -> bool:
    """Returns True for weights of Conv1D, which transformers has as (in, out), and bitsandbytes as (out, in)."""
    return contents.config.model_type in _WITH_CONV1D and name.split(".")[-2] in _CONV1D


def _four_bits(contents: Contents, name: str, state: str, nested: Sequence[str]) -> LazyTensor:
    found = _read_state(contents, state)
    size = math.prod(found.shape)
    packed, absmax = contents.tensor(name), contents.tensor(f"{name}.absmax")
    if packed.nbytes != -(-size // 2):
        contents.reject(name, f"{-(-size // 2)} bytes for shape {found.shape}", str(packed.nbytes))
    if absmax.size != -(-size // found.block):
        contents.reject(f"{name}.absmax", f"{-(-size // found.block)} blocks of {found.block}", str(absmax.size))
    # Blocks run across rows; if rows consist of whole blocks, a box needs only the blocks of its own rows.
    width = found.shape[-1] if len(found.shape) > 1 and found.shape[-1] % math.lcm(found.block, 2) == 0 else size
    rows = size // width
    of_blocks = absmax.reshape(rows, -1)
    if nested:
        scales = contents.tensor(nested[0])
        count = -(-absmax.size // found.nested_block)
        if scales.size != count or scales.dtype != np.float32:
            expected = f"{count} float32 for blocks of {found.nested_block}"
            contents.reject(nested[0], expected, f"{scales.dtype.name}{list(scales.shape)}")
        of_blocks = LazyTensor(_NestedTensor(of_blocks, scales.reshape(-1), contents.tensor(nested[1]).read(), found))
    values, byte = contents.tensor(f"{name}.quant_map").read(), np.arange(256)
    pairs = lookup(np.stack([values[byte >> 4], values[byte & 15]], axis=1))
    words = Words(4, (4, 0, 12, 8, 20, 16, 28, 24), pairs, table=values)
    codes = Stored(packed.reshape(rows, -1), (1, 1), words, (1, 2 * packed.itemsize))
    decoded = LazyTensor(ScaledTensor((rows, width), codes, Stored(of_blocks, (1, found.block))))
    decoded, model = decoded.reshape(found.shape).astype(found.dtype), contents.config.dtype
    return decoded.rounded(model) if model.itemsize < found.dtype.itemsize else decoded  # PEFT merges in float32


class _State(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int
    nested_block: int
    offset: float


def _read_state(contents: Contents, name: str) -> _State:
    tensor = contents.tensor(name)
    if tensor.dtype != np.uint8 or tensor.size > 1 << 16:
        contents.reject(name, "JSON as bytes", f"{tensor.dtype.name}{list(tensor.shape)}")
    try:
        found: Any = json.loads(tensor.read().tobytes())
    except (ValueError, RecursionError) as error:
        contents.reject(name, "JSON as bytes", str(error))
    if not isinstance(found, dict):
        contents.reject(name, "a JSON object", type(found).__name__)
    found = cast("dict[str, Any]", found)
    shape = cast("list[Any]", found.get("shape") if isinstance(found.get("shape"), list) else [None])
    sizes = [found.get("blocksize"), found.get("nested_blocksize", 256), *shape]
    for size in sizes:
        if type(size) is not int or not 0 < size < 1 << 48:
            contents.reject(name, "positive integers as blocksize and shape", repr(size))
    dtype, offset = found.get("dtype"), found.get("nested_offset", 0.0)
    if not isinstance(dtype, str) or dtype not in DTYPES or not is_finite(offset):
        expected = f"one of {', '.join(DTYPES)} as dtype and a finite number as nested_offset"
        contents.reject(name, expected, f"{dtype!r}, {offset!r}")
    return _State(tuple(shape), DTYPES[dtype], sizes[0], sizes[1], float(offset))


class _NestedTensor(DecodedTensor):
    """Scales `[rows, blocks]` in 8 bits: `table[code] * scale + offset`. Blocks are counted across rows."""

    tile = _NESTED_TILE

    def __init__(self, codes: View, scales: View, table: np.ndarray, state: _State) -> None:
        super().__init__(codes.shape, Stored(codes, (1, 1)), Stored(scales, (1, 1)), scratch=32)
        self._table, self._state = table, state

    def needs(self, box: Box) -> list[Box]:
        """The codes, and the scales from the scale of the first code to that of the last."""
        width, block = self.shape[1], self._state.nested_block
        first = box[0].start * width + box[1].start
        last = (box[0].stop - 1) * width + box[1].stop - 1
        return [box, (slice(first // block, last // block + 1),)]

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        codes, scales = arrays
        index = np.arange(tile[0].start, tile[0].stop)[:, None] * self.shape[1]
        index = (index + np.arange(tile[1].start, tile[1].stop)) // self._state.nested_block - needed[1][0].start
        with np.errstate(all="ignore"):
            values = self._table[codes] * scales[index] + np.float32(self._state.offset)
        yield values, steps


# compressed-tensors ---------------------------------------------------------------------------------------------------

_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"),
)
_BITS = (1, 2, 4, 8)

_Scheme = Mapping[str, Any]


def _decode_compressed_tensors(contents: Contents) -> None:
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
            add_float4(contents, name, packed, scale, f"{name}_global_scale", divides=True)
        elif scheme.get("num_bits") == 6:
            _float6(contents, name, packed, scale)
        else:
            add_float4(contents, name, packed, scale)
    for scale in [f"{name}_scale" for name in contents.names("_scale")]:
        name = scale.removesuffix("_scale")
        if not contents.has(name) or not contents.has(scale):
            continue
        if _is_float8(contents.header(name).dtype):
            _take_one(contents, name, scale, _block(contents, _scheme(contents, groups, name)), of_scale=True)
            contents.drop(f"{name}_zero_point")  # always 0 for floats
        elif contents.header(name).dtype == np.int8:
            _int_quantized(contents, name, _scheme(contents, groups, name))
    _drop_activations(contents)


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
        return list(_block_of(contents, block) or ())
    if strategy not in ("group", "tensor_group") or type(size) is not int or size < 1:
        contents.config.reject("a known strategy for weights", f"{strategy!r} with group_size {size!r}")
    return [1, size]


def _int_quantized(contents: Contents, name: str, scheme: _Scheme) -> None:
    scale, shape = f"{name}_scale", tuple(contents.header(name).shape)
    contents.expect(scale, contents.header(scale).shape, *_KINDS)
    arrangement, blocks = scales_of(contents, scale, shape, _block(contents, scheme))
    zeros = _zeros(contents, name, scheme)
    _expect_each(contents, zeros, arrangement)

    def make() -> LazyTensor:
        codes, *others = (contents.tensor(each) for each in (name, scale, *zeros))
        operands = (Stored(other.reshape(arrangement), blocks) for other in others)
        return scaled_integers(shape, Stored(codes, (1,) * len(shape)), *operands)

    contents.add(name, [name, scale, *zeros], shape, make)


def _float6(contents: Contents, name: str, packed: str, scale: str) -> None:
    """Adds a matrix in MXFP6 (E2M3): 32 codes in 24 bytes, the first in the lowest bits, share a power of two."""
    rows, size = contents.matrix(packed, "uint8")
    if size % 24:
        contents.reject(packed, "rows of whole blocks of 24 bytes", str(size))
    contents.expect(scale, (rows, size // 24), "uint8", "float8_e8m0fnu")

    def make() -> LazyTensor:
        codes = Stored(contents.tensor(packed).reshape(rows, -1, 6), (1, 1), mxfp6, (1, 8))
        powers = Stored(contents.tensor(scale), (1, 32), floats(_POWERS))
        return LazyTensor(ScaledTensor((rows, size // 6 * 8), codes, powers))

    contents.add(name, [packed, scale], (rows, size // 6 * 8), make)


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
    contents.expect(scale, contents.header(scale).shape, *_KINDS)
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


# The table ------------------------------------------------------------------------------------------------------------


def _decode_modelopt(contents: Contents) -> None:
    for name in list(contents.names("_scale_2")):
        if contents.has(name) and contents.has(f"{name}_scale") and contents.header(name).dtype.name == "uint8":
            add_float4(contents, name, name, f"{name}_scale", f"{name}_scale_2")
    decode_awq_of_modelopt(contents)
    _decode_float8(contents)


_METHODS: Mapping[str, Callable[[Contents], None]] = {
    "fp8": _decode_float8,
    "fbgemm_fp8": _decode_float8,
    "modelopt": _decode_modelopt,
    "modelopt_fp4": _decode_modelopt,
    "compressed-tensors": _decode_compressed_tensors,
    "gptq": decode_gptq,
    "awq": decode_awq,
    "auto-round": decode_auto_round,
    "intel/auto-round": decode_auto_round,
    "torchao": decode_torchao,
    "bitsandbytes": _decode_bitsandbytes,
    "mxfp4": decode_mxfp4,
    "mlx": decode_mlx,
    "quark": _decode_quark,
    "hqq": decode_hqq,
}


def plain_tensors(
    stored: StoredTensors, config: Mapping[str, Any], file: str
) -> tuple[dict[str, Plain], dict[str, None]]:
    """The plain tensors of a quantized checkpoint, by name, and the names of all tensors that are stored plain.

    `config` is its configuration, `file` the path of that. Raises CheckpointError for an unknown form, for parts that
    do not belong together, and for tensors that look quantized and that no method took.
    """
    found = find_config(config, file)
    contents = Contents(stored, found or Config("none", {}, jnp.dtype("bfloat16"), file))
    if found is not None:
        require_known(found)
        _METHODS[found.method](contents)
        if not contents.plain and found.get("format") != "dense":
            raise CheckpointError(
                f"{found.file} states that the weights are quantized with {found.method!r}, but none of them is. "
                "Remove the entry if they are plain."
            )
    elif contents.names(CODES):
        decode_hqq(contents)
    split_experts(contents, str(config.get("model_type")))
    _reject_rest(contents, found)
    return contents.plain, contents.left


def require_known(config: Config) -> None:
    """Raises CheckpointError for a form that no method knows."""
    if config.method not in _METHODS:
        raise CheckpointError(f"{config.file} states that the weights are quantized with {config.method!r}. {ADVICE}.")


def _reject_rest(contents: Contents, config: Config | None) -> None:
    """Raises CheckpointError if tensors look quantized and no method took them."""
    left = contents.left
    strange = [f"{name!r} ({dtype})" for name in left if (dtype := _strange(contents, name))]
    if strange:
        how = f"{config.file} has {config.method!r}" if config else f"{contents.config.file} does not state the method"
        raise CheckpointError(
            f"{contents.header(next(iter(left))).file} or another file of this checkpoint has quantized weights that "
            f"cannot be decoded: {listed(strange)}; {how}. {ADVICE}."
        )


def _strange(contents: Contents, name: str) -> str:
    """The dtype of a tensor that looks quantized; empty if it is plain."""
    header = contents.header(name)
    floats = jnp.issubdtype(header.dtype, jnp.floating)
    if is_marker(name) or (floats and header.dtype.itemsize == 1):
        return header.dtype.name
    small = is_quantized(header.dtype) and not floats and header.dtype.itemsize <= 4 and len(header.shape) > 1
    if small and (name.endswith("weight") or scales_beside(name, contents.left)):
        return header.dtype.name
    return ""
