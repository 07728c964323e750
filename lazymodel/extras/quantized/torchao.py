"""torchao's integers and floats of 8 bits, as `save_pretrained` of transformers writes them (torchao 0.18).

The weight `X.weight` is stored as `X._weight_qdata`, `X._weight_scale` and `X._weight_zero_point`; its type, the block
that shares a scale, and its dtype are JSON in the header's metadata, under its name. The value is the product `(code -
zero) * scale` in float32, rounded to that dtype and then to the model's. Activations, if they are quantized, are so
while the model runs: the weights are the same.
"""

from __future__ import annotations

import json
from typing import Any, cast

from lazymodel._tensors.decoded import Stored
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.extras.quantized.config import DTYPES, Contents
from lazymodel.extras.quantized.scaled import ScaledTensor, floats, scales_of

_TYPES = {
    "Int8Tensor": ("int8",),
    "IntxUnpackedToInt8Tensor": ("int8",),
    "Float8Tensor": ("float8_e4m3fn", "float8_e5m2"),
}
_PARTS = ("qdata", "scale", "zero_point")


def decode_torchao(contents: Contents) -> None:
    """Decodes the tensors of `torchao`."""
    for prefix in list(contents.names("_qdata")):
        module, _, own = prefix.rpartition(".")
        if own.startswith("_"):
            _add(contents, prefix, f"{module}.{own[1:]}" if module else own[1:])
    for prefix in contents.names("_scale"):
        if prefix.rpartition(".")[2].startswith("_"):
            contents.require(f"{prefix}_scale", f"{prefix}_qdata")


def _add(contents: Contents, prefix: str, name: str) -> None:
    codes, scale = f"{prefix}_qdata", f"{prefix}_scale"
    found = _described(contents, codes, name)
    kinds = _TYPES.get(str(found.get("_type")))
    names, data = found.get("_tensor_data_names"), found.get("_data")
    if kinds is None or not isinstance(names, list) or not isinstance(data, dict):
        contents.reject(codes, f"one of {', '.join(_TYPES)} as its type", repr(found.get("_type")))
    if other := [each for each in cast("list[Any]", names) if each not in _PARTS]:
        contents.reject(codes, f"no parts but {', '.join(_PARTS)}", repr(other))
    block, kind = (cast("dict[str, Any]", data).get(key) for key in ("block_size", "dtype"))
    of_dtype = cast("dict[str, Any]", kind).get("_data") if isinstance(kind, dict) else None
    shape = tuple(contents.header(codes).shape)
    sizes = cast("list[Any]", block) if isinstance(block, list) else []
    if len(sizes) != len(shape) or not all(type(n) is int and n > 0 for n in sizes) or str(of_dtype) not in DTYPES:
        expected = f"positive integers as block_size, and one of {', '.join(DTYPES)} as dtype"
        contents.reject(codes, expected, f"{block!r}, {kind!r}")
    contents.require(codes, scale)
    contents.expect(codes, shape, *kinds)
    contents.expect(scale, contents.header(scale).shape, *DTYPES)
    arrangement, blocks = scales_of(contents, scale, shape, sizes)
    zeros = [f"{prefix}_zero_point"] if "zero_point" in names else []
    contents.require(codes, *zeros)
    for zero in zeros:
        contents.expect(zero, contents.header(scale).shape, "int8")

    def make() -> LazyTensor:
        unpack = None if kinds == ("int8",) else floats(contents.header(codes).dtype)
        stored = Stored(contents.tensor(codes), (1,) * len(shape), unpack)
        operands = (Stored(contents.tensor(each).reshape(arrangement), blocks) for each in (scale, *zeros))
        return LazyTensor(ScaledTensor(shape, stored, *operands)).astype(DTYPES[str(of_dtype)])

    contents.add(name, [codes, scale, *zeros], shape, make)


def _described(contents: Contents, codes: str, name: str) -> dict[str, Any]:
    """What the metadata says of a tensor."""
    text = contents.metadata.get(name)
    try:
        found: Any = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        contents.reject(codes, f"JSON under {name!r} in the metadata of the file's header", repr(text)[:80])
    return cast("dict[str, Any]", found)
