"""Quantized weights of every form that is decoded, made up, with what they stand for in plain NumPy.

Each form chooses codes and scales at random, says what these mean as the form's reference implementation computes it,
and packs them number by number: nothing here is shared with what decodes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E2M1[8] = -0.0
E2M3 = np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e2m3fn).astype(np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to quantize.

    Attributes:
        config: The `quantization_config`.
        make: Of a random generator and a matrix' shape: its parts by the end of their names, and what it stands for.
        dtype: The model's.
    """

    config: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]
    dtype: np.dtype[Any] = BF16


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal in dtype, shape and every bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bits = f"u{found.itemsize}"
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(bits), np.ascontiguousarray(expected).view(bits))


def spread(values: np.ndarray, rows: int, columns: int, block: tuple[int, int]) -> np.ndarray:
    """Each value for a block, the last ones cut off."""
    return np.kron(values, np.ones(block, values.dtype))[:rows, :columns]


def pack(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Unsigned codes in words of 32 along an axis, the first in the lowest bits, or in another order."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint64)
    count = 32 // bits
    codes = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, -codes.shape[-1] % count)])
    words = codes.reshape(*codes.shape[:-1], -1, count)
    total = np.zeros(words.shape[:-1], np.uint64)
    for position, place in enumerate(order or range(count)):
        total |= words[..., place] << np.uint64(bits * position)
    return np.ascontiguousarray(np.moveaxis(total.astype(np.uint32).view(np.int32), -1, axis))


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return rng.uniform(0.001, 0.01, shape).astype(dtype)


def finite8(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where((codes := rng.integers(0, 256, shape, np.uint8)) & 0x7F == 0x7F, 0, codes).astype(np.uint8).view(F8)


def float8(block: tuple[int, int] | None, ending: str, kind: Any = F32, dtype: Any = BF16) -> Any:
    """FP8 with a scale for each block; of the tensor's own extents where these are 0."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        size = (block[0] or rows, block[1] or columns) if block else (rows, columns)
        shape = (-(-rows // size[0]), -(-columns // size[1]))
        weight, scale = finite8(rng, (rows, columns)), scales(rng, shape, kind)
        value = weight.astype(F32) * spread(scale, rows, columns, size).astype(F32)
        return {"weight": weight, ending: scale if block else scale.reshape(())}, value.astype(dtype)

    return make


def mxfp8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors' FP8 with a power of two for each 32."""
    weight, scale = finite8(rng, (rows, columns)), rng.integers(100, 125, (rows, columns // 32)).astype(np.uint8)
    value = weight.astype(F32) * np.repeat(np.exp2(scale.astype(F32) - 127), 32, axis=1)
    return {"weight": weight, "weight_scale": scale}, value.astype(BF16)


def integers(
    bits: int, group: int | None, *, zero: bool, packed: bool, order: bool = False, kind: Any = BF16
) -> Any:  # fmt: skip
    """compressed-tensors' integers; a group of 0 is a row, and None is the tensor."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        half, size = 1 << (bits - 1), group or columns
        groups = columns // size
        codes = rng.integers(-half, half, (rows, columns))
        scale, zeros = scales(rng, (rows, groups), kind), rng.integers(-half, half, (rows, groups)) * zero
        if group is None:
            scale[:], zeros[:] = scale[0], zeros[0]
        index = np.arange(columns) // size
        index = rng.permutation(index) if order else index
        exact = (codes - zeros[:, index]).astype(F32) * scale[:, index].astype(F32)
        parts: Tensors = {"weight_scale": scale}
        if packed:
            parts["weight_packed"] = pack(codes + half, bits, 1)
            parts["weight_shape"] = np.array([rows, columns], np.int64)
        else:
            parts["weight"] = codes.astype(np.int8)
        if zero:
            in_words = packed and group is not None
            parts["weight_zero_point"] = pack(zeros + half, bits, 0) if in_words else zeros.astype(np.int8)
        if group is None:
            parts |= {name: parts[name][0] for name in ("weight_scale", "weight_zero_point") if name in parts}
        if order:
            parts["weight_g_idx"] = index.astype(np.int32)
        return parts, exact.astype(kind).astype(BF16)

    return make


def planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes down the first axis, 32 in as many words as bits: their lowest bits first."""
    blocks, below, words = codes.reshape(-1, 32, codes.shape[1]).astype(np.uint64), 0, []
    for width in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]:
        for first in range(0, 32, 32 // width):
            some = blocks[:, first : first + 32 // width] >> np.uint64(below) & np.uint64((1 << width) - 1)
            words.append(sum(some[:, place] << np.uint64(width * place) for place in range(32 // width)))
        below += width
    return np.stack(words, axis=1).reshape(-1, codes.shape[1]).astype(np.uint32).view(np.int32)


def packed_down(codes: np.ndarray, bits: int, planar: bool) -> np.ndarray:
    """Codes of GPTQ down the first axis."""
    if planar:
        return planes(codes, bits)
    return pack(codes, bits, 0) if 32 % bits == 0 else np.ascontiguousarray(stream(codes.T, bits).T).view(np.int32)


def gptq(
    bits: int, group: int, *, version: int = 1, order: bool = False, dtype: Any = F16, planar: bool = False
) -> Any:
    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        size, most = group if group > 0 else columns, 1 << bits
        groups = columns // size
        codes, zeros = rng.integers(0, most, (columns, rows)), rng.integers(0, most, (groups, rows))
        scale = scales(rng, (groups, rows), F16)
        index = np.arange(columns) // size
        index = rng.permutation(index) if order else index
        value = (codes - zeros[index]).astype(F32) * scale[index].astype(F32)
        parts = {
            "qweight": packed_down(codes, bits, planar),
            "qzeros": np.ascontiguousarray(packed_down((zeros - (version == 1)).T % most, bits, planar).T),
            "scales": scale,
            "g_idx": index.astype(np.int32),
        }
        return parts, np.ascontiguousarray(value.astype(F16).astype(dtype).T)

    return make


def awq(group: int) -> Any:
    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        groups = columns // group
        codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (groups, rows))
        scale = scales(rng, (groups, rows), F16)
        index = np.arange(columns) // group
        value = (codes - zeros[index]).astype(F32) * scale[index].astype(F32)
        parts = {"qweight": pack(codes, 4, 1, AWQ_ORDER), "qzeros": pack(zeros, 4, 1, AWQ_ORDER), "scales": scale}
        return parts, np.ascontiguousarray(value.astype(F16).T)

    return make


def four_bits(kind: str, *, nested: bool, dtype: str = "bfloat16", block: int = 64) -> Any:
    """bitsandbytes' NF4 and FP4. The values of codes are as good as any: they are stored."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        size = rows * columns
        codes = rng.integers(0, 16, size + size % 2)
        table = np.sort(rng.uniform(-1, 1, 16)).astype(F32)
        blocks = -(-size // block)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": dtype, "shape": [rows, columns]
        }  # fmt: skip
        parts: Tensors = {
            "weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
            "weight.quant_map": table,
        }
        absmax = scales(rng, (blocks,))
        if nested:
            parts["weight.absmax"] = rng.integers(0, 256, blocks).astype(np.uint8)
            parts["weight.nested_absmax"] = scales(rng, (-(-blocks // 256),))
            parts["weight.nested_quant_map"] = np.sort(rng.uniform(-1, 1, 256)).astype(F32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0361}
            absmax = parts["weight.nested_quant_map"][parts["weight.absmax"]]
            absmax = absmax * np.repeat(parts["weight.nested_absmax"], 256)[:blocks] + np.float32(0.0361)
        else:
            parts["weight.absmax"] = absmax
        said = json.dumps(state).encode()
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(said, np.uint8).copy()
        value = table[codes[:size]] * np.repeat(absmax, block)[:size]
        return parts, value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(rows, columns)

    return make


def eight_bits(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    codes, scale = rng.integers(-127, 128, (rows, columns)).astype(np.int8), rng.uniform(0.1, 2, rows).astype(F32)
    value = codes.astype(F32) * scale[:, None] * np.float32(7.874015718698502e-3)
    return {"weight": codes, "SCB": scale, "weight_format": np.zeros((), np.uint8)}, value.astype(BF16)


def float4(block: int, *, style: str) -> Any:
    """MXFP4, MXFP6 and NVFP4 of compressed-tensors, NVFP4 of ModelOpt, and MXFP4 of Quark."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes, table = rng.integers(0, 64 if style == "mxfp6" else 16, (rows, columns)), E2M1
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        if style == "mxfp6":
            packed, table = stream(codes, 6).view(np.uint8), E2M3
        if style.startswith("mx"):
            scale = rng.integers(110, 125, (rows, columns // block)).astype(np.uint8)
            effective = np.exp2(scale.astype(F32) - 127)
            parts: Tensors = {"weight" if style == "mx" else "weight_packed": packed, "weight_scale": scale}
        else:
            scale = finite8(rng, (rows, columns // block))
            of_all = np.float32(rng.uniform(500, 2000))
            if style == "nvfp4":
                effective = scale.astype(F32) / of_all
                parts = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": of_all.reshape(1)}
            else:
                effective = scale.astype(F32) * (1 / of_all)
                parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": (1 / of_all).reshape(())}
                parts["input_scale"] = np.float32(1).reshape(())
        value = table[codes] * np.repeat(effective, block, axis=1)
        return parts, value.astype(BF16)

    return make


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes of each row after each other, from the lowest bit on, in words of 32."""
    each = codes[..., None] >> np.arange(bits) & 1
    return np.packbits(each.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.uint32)


def mlx(bits: int, group: int, kind: Any = BF16, *, zeros: bool = False) -> Any:
    """MLX' affine codes; scales may be negative. With zeros, products are tiny, and -0 counts."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes, shape = rng.integers(0, 1 << bits, (rows, columns)), (rows, columns // group)
        scale = (scales(rng, shape) * rng.choice([-1, 1], shape)).astype(kind)
        bias = rng.standard_normal(shape).astype(kind)
        if zeros:
            bias[::7] = scale[::11] = 0
            scale[::13] = 1e-6
        product = (codes.astype(F32) * np.repeat(scale.astype(F32), group, 1)).astype(kind)
        value = product.astype(F32) + np.repeat(bias.astype(F32), group, 1)
        return {"weight": stream(codes, bits), "scales": scale, "biases": bias}, value.astype(kind).astype(BF16)

    return make


def mlx_floats(mode: str) -> Any:
    group, kind = (16, F8) if mode == "nvfp4" else (32, np.dtype(ml_dtypes.float8_e8m0fnu))

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        scale = rng.integers(100, 120, (rows, columns // group)).astype(np.uint8)
        if mode == "mxfp8":
            weight = finite8(rng, (rows, columns))
            codes, numbers = weight.view(np.uint8).view(np.uint32), weight.astype(F32)
        else:
            fours = rng.integers(0, 16, (rows, columns))
            codes, numbers = stream(fours, 4), E2M1[fours]
        value = numbers * np.repeat(scale.view(kind).astype(F32), group, 1)
        return {"weight": codes, "scales": scale}, value.astype(BF16)

    return make


def torchao(group: int, *, zero: bool = False, kind: Any = np.int8, scale_kind: Any = F32) -> Any:
    """torchao's codes of 8 bits; a group of 0 is a row."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        size = group or columns
        shape = rows, columns // size
        codes = finite8(rng, (rows, columns)) if kind == F8 else rng.integers(-128, 128, (rows, columns)).astype(kind)
        scale, zeros = scales(rng, shape, scale_kind), rng.integers(-128, 128, shape).astype(np.int8)
        parts: Tensors = {"_weight_qdata": codes, "_weight_scale": scale}
        numbers = codes.astype(F32)
        if zero:
            parts["_weight_zero_point"] = zeros
            numbers = numbers - np.repeat(zeros, size, 1).astype(F32)
        return parts, (numbers * np.repeat(scale.astype(F32), size, 1)).astype(BF16)

    return make


def modelopt_awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    """ModelOpt's W4A16_AWQ: two rows in one of bytes, and what belongs to the inputs."""
    codes, scale = rng.integers(-8, 8, (rows, columns)), scales(rng, (rows, columns // 32))
    inputs = rng.uniform(0.5, 2, columns).astype(BF16)
    value = codes.astype(F32) * np.repeat(scale, 32, 1) * inputs.astype(F32)
    packed = (codes[0::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8)
    return {"weight": packed, "weight_scale": scale, "pre_quant_scale": inputs}, value.astype(BF16)


def hqq(bits: int, axis: int, group: int, kind: Any = BF16) -> Any:
    """HQQ's codes: those of a word are as many ranges of rows apart, the first in the highest bits."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        many = rows * columns // group
        codes = rng.integers(0, 1 << bits, (many, group) if axis else (group, many))
        shape = (many, 1) if axis else (1, many)
        scale, zero = scales(rng, shape, kind), rng.uniform(0, (1 << bits) - 1, shape).astype(kind)
        difference = (codes.astype(F32) - zero.astype(F32)).astype(kind)
        value = (difference.astype(F32) * scale.astype(F32)).astype(kind).reshape(rows, columns)
        count = 10 if bits == 3 else 8 // bits
        apart = np.pad(codes, [(0, -len(codes) % count), (0, 0)]).reshape(count, -1, codes.shape[1])
        words = sum(apart[place] << bits * (count - 1 - place) for place in range(count))
        parts: Tensors = {"W_q": np.asarray(words, np.int32 if bits == 3 else np.uint8), "scale": scale, "zero": zero}
        parts |= {"shape": np.array([rows, columns]), "axis": np.array(axis, np.int32)}
        said = {"packing": "3bit_32" if bits == 3 else f"{bits}bit_u8", "compute_dtype": "torch.bfloat16"}
        parts |= {name: np.frombuffer(text.encode(), np.uint8) for name, text in said.items()}
        return parts, value.astype(BF16)

    return make


def of_torchao(config: dict[str, Any], tensors: Tensors) -> dict[str, str]:
    """What torchao writes of its tensors into the metadata of each file."""
    found: dict[str, str] = {}
    for codes in [name for name in tensors if name.endswith("._weight_qdata")]:
        prefix = codes.removesuffix("_qdata")
        shape, scale = tensors[codes].shape, tensors.get(f"{prefix}_scale", np.ones((1, 1))).shape
        data = {
            "block_size": [n // max(1, m) for n, m in zip(shape, scale, strict=False)],
            "dtype": {"_type": "torch.dtype", "_data": config.get("torch_dtype", "bfloat16")},
        }
        names = [end for end in ("zero_point", "qdata", "scale") if f"{prefix}_{end}" in tensors]
        kind = "Float8Tensor" if tensors[codes].dtype == F8 else "Int8Tensor"
        said = {"_type": kind, "_data": data, "_tensor_data_names": names}
        found[codes.removesuffix("_weight_qdata") + "weight"] = json.dumps(said)
    return found


def quark(**weight: Any) -> dict[str, Any]:
    """A configuration of Quark."""
    kinds = {"weight": weight, "input_tensors": None}
    return {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": kinds, "layer_quant_config": {}}


def groups(form: str, **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


_CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_GROUP = {"type": "int", "strategy": "group", "group_size": 32}
FORMS: dict[str, Form] = {
    "fp8-block": Form(
        {"quant_method": "fp8", "weight_block_size": [24, 16], "modules_to_not_convert": ["lm_head"]},
        float8((24, 16), "weight_scale_inv"),
    ),
    "fp8-block-bf16": Form(
        {"quant_method": "fp8", "weight_block_size": [16, 16]}, float8((16, 16), "weight_scale_inv", BF16)
    ),
    "fp8-tensor": Form({"quant_method": "fp8", "activation_scheme": "static"}, float8(None, "weight_scale")),
    "fbgemm": Form({"quant_method": "fbgemm_fp8"}, float8((1, 0), "weight_scale")),
    "modelopt-fp8": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, float8(None, "weight_scale")),
    "float-quantized": Form(
        groups("float-quantized", type="float", **_CHANNEL), float8((1, 0), "weight_scale", BF16)
    ),
    "int-quantized": Form(
        groups("int-quantized", type="int", **_CHANNEL), integers(8, 0, zero=False, packed=False)
    ),
    "int-quantized-zero": Form(
        groups("int-quantized", num_bits=8, symmetric=False, **_GROUP), integers(8, 32, zero=True, packed=False)
    ),
    "int-quantized-tensor": Form(
        groups("int-quantized", num_bits=8, symmetric=False, strategy="tensor"),
        integers(8, None, zero=True, packed=False),
    ),
    "pack-4-tensor": Form(
        groups("pack-quantized", num_bits=4, symmetric=False, strategy="tensor"),
        integers(4, None, zero=True, packed=True),
    ),
    "pack-4": Form(
        groups("pack-quantized", num_bits=4, symmetric=True, **_GROUP), integers(4, 32, zero=False, packed=True)
    ),
    "pack-4-zero": Form(
        groups("pack-quantized", num_bits=4, symmetric=False, **_GROUP), integers(4, 32, zero=True, packed=True)
    ),
    "pack-4-order": Form(
        groups("pack-quantized", num_bits=4, symmetric=True, actorder="group", **_GROUP),
        integers(4, 32, zero=False, packed=True, order=True, kind=F16),
    ),
    "pack-8": Form(
        groups("pack-quantized", type="int", **_CHANNEL), integers(8, 0, zero=False, packed=True)
    ),
    "gptq": Form({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, gptq(4, 32), F16),
    "gptq-bf16": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, gptq(4, 32, dtype=BF16)
    ),
    "gptq-order": Form(
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True}, gptq(8, 32, order=True), F16
    ),
    "gptq-v2": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
        gptq(4, -1, version=2), F16,
    ),
    "gptq-3": Form({"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": False}, gptq(3, 32), F16),
    "gptq-3-order": Form(
        {"quant_method": "gptq", "bits": 3, "group_size": 64, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(3, 64, version=2, order=True), F16,
    ),
    **{
        f"gptq-planes-{bits}": Form(
            {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq_p"},
            gptq(bits, 32, version=2, planar=True), F16,
        )
        for bits in (3, 5, 6, 7)
    },
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32), F16),
    "gptq-dynamic": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False,
         "dynamic": {r"-:.*\.down_proj": {}, r"+:.*\.up_proj$": {"bits": 8, "group_size": 64}, ".*": {"bits": 2}}},
        gptq(8, 64), F16,
    ),
    "gptq-dynamic-order": Form(
        {"quant_method": "gptq", "bits": 2, "group_size": 32, "desc_act": False,
         "dynamic": {r"model\.layers\.\d+\.mlp": {"bits": 4, "desc_act": True}}},
        gptq(4, 32, order=True), F16,
    ),
    "auto-round": Form(
        {"quant_method": "auto-round", "bits": 2, "group_size": 128, "packing_format": "auto_round:auto_gptq",
         "extra_config": {".*up_proj.*": {"bits": 4, "group_size": 32}, "mlp": {"bits": 16}}}, gptq(4, 32), F16,
    ),
    "auto-round-v2": Form(
        {"quant_method": "auto-round", "bits": 8, "group_size": 32, "packing_format": "auto_round",
         "extra_config": {"mlp": {"bits": 16}, "model.layers.0.mlp.up_proj": {"bits": 2}}}, gptq(2, 32, version=2), F16,
    ),
    **{
        f"auto-round-{bits}": Form(
            {"quant_method": "auto-round", "bits": bits, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
            gptq(bits, 32), F16,
        )
        for bits in (3, 5, 6, 7)
    },
    "auto-round-awq": Form(
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        awq(32), F16,
    ),
    "nf4": Form({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits("nf4", nested=False)),
    "nf4-nested": Form({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits("nf4", nested=True)),
    "fp4": Form({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits("fp4", nested=True)),
    "int8": Form({"quant_method": "bitsandbytes", "load_in_8bit": True}, eight_bits),
    "mxfp4": Form(
        groups("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        float4(32, style="mxfp4"),
    ),
    "mxfp6": Form(
        groups("mxfp6-pack-quantized", num_bits=6, type="float", strategy="group", group_size=32),
        float4(32, style="mxfp6"),
    ),
    "mxfp8": Form(groups("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32), mxfp8),
    "nvfp4": Form(
        groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        float4(16, style="nvfp4"),
    ),
    **{
        f"mlx-{bits}": Form({"group_size": 32, "bits": bits}, mlx(bits, 32)) for bits in (1, 2, 3, 4, 5, 6, 8)
    },
    "mlx-f16": Form({"group_size": 64, "bits": 8, "mode": "affine"}, mlx(8, 64, F16)),
    "mlx-f16-small": Form({"group_size": 64, "bits": 4, "mode": "affine"}, mlx(4, 64, F16, zeros=True)),
    "mlx-zeros": Form({"group_size": 32, "bits": 3}, mlx(3, 32, zeros=True)),
    "mlx-f32": Form({"group_size": 64, "bits": 6, "mode": "affine"}, mlx(6, 64, F32)),
    **{
        f"mlx-{mode}": Form({"group_size": 16 if mode == "nvfp4" else 32, "bits": bits, "mode": mode}, mlx_floats(mode))
        for mode, bits in (("mxfp4", 4), ("nvfp4", 4), ("mxfp8", 8))
    },
    "torchao-int8": Form({"quant_method": "torchao"}, torchao(0, zero=True)),
    "torchao-int8-group": Form({"quant_method": "torchao"}, torchao(32, scale_kind=BF16)),
    "torchao-float8": Form({"quant_method": "torchao"}, torchao(0, kind=F8)),
    **{
        name: Form({"quant_method": "hqq", "skip_modules": ["lm_head"]}, make)
        for name, make in {
            "hqq-8": hqq(8, 1, 8), "hqq-8-down": hqq(8, 0, 64, F32),
            "hqq-4": hqq(4, 1, 64), "hqq-4-down": hqq(4, 0, 8, F16),
            "hqq-3": hqq(3, 1, 8), "hqq-3-down": hqq(3, 0, 64, F16),
            "hqq-2": hqq(2, 1, 32, F16), "hqq-2-down": hqq(2, 0, 16),
            "hqq-1": hqq(1, 1, 128, F32), "hqq-1-down": hqq(1, 0, 32),
        }.items()
    },
    "quark-fp8": Form(quark(dtype="fp8_e4m3", qscheme="per_channel"), float8((1, 0), "weight_scale", BF16)),
    "quark-mxfp4": Form(quark(dtype="fp4", group_size=32, scale_format="e8m0"), float4(32, style="mx")),
    "modelopt-awq": Form({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, modelopt_awq),
    "modelopt-nvfp4": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, float4(16, style="modelopt")),
}  # fmt: skip


def quantized(form: Form, tensors: Tensors, modules: Callable[[str], bool], seed: int = 0) -> tuple[Tensors, Tensors]:
    """A checkpoint with the weights of some modules quantized, and the plain one with what they stand for then."""
    rng = np.random.default_rng(seed)
    stored, plain = {}, {}
    for name, array in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and array.ndim == 2 and modules(module):
            parts, plain[name] = form.make(rng, *array.shape)
            stored |= {f"{module}.{ending}": part for ending, part in parts.items()}
        else:
            stored[name] = plain[name] = array.astype(form.dtype)
    return stored, plain


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, *, shards: int = 1) -> Path:
    """A Hugging Face folder; with several shards the parts of a weight are in different ones."""
    folder.mkdir(parents=True)
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt", **of_torchao(config, tensors)})
        return folder
    weights: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = dict(list(tensors.items())[shard::shards])
        save_file(own, folder / name, {"format": "pt", **of_torchao(config, tensors)})
        weights |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def settings(form: Form, **config: Any) -> dict[str, Any]:
    """A configuration of a model in this form."""
    return {"model_type": "llama", "torch_dtype": form.dtype.name, "quantization_config": form.config, **config}
