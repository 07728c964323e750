"""Safetensors files to write: which tensors are in which file, where in it, and what their headers say.

Files are laid out as Hugging Face does (https://github.com/huggingface/safetensors#format): one `model.safetensors`, or
`model-00001-of-0000N.safetensors` with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from lazymodel._errors import LazyModelError
from lazymodel._save.destination import SINGLE, SavedFile, grouped
from lazymodel._show.text import format_bytes
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._safetensors import DTYPES, FLOAT4, MAX_HEADER, SAVE_KEY

_ALIGNMENT = 8  # bytes that the header is padded to, as the reference implementation pads it
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


def layout(
    tensors: Mapping[str, LazyTensor], shard_size: int | None, metadata: Mapping[str, str], save_id: str
) -> list[SavedFile]:
    """Divides tensors among files, in their order; a single file where `shard_size` is None.

    `save_id` distinguishes this save's shards from others': 16 hexadecimal digits.
    """
    if bad := [key for key, value in metadata.items() if not isinstance(cast(Any, value), str)]:
        raise LazyModelError(f"metadata maps strings to strings; found {bad[0]!r}: {metadata[bad[0]]!r}")
    groups = grouped(tensors, shard_size, _stored_nbytes)
    metadata = {key: value for key, value in metadata.items() if key != SAVE_KEY}  # copied from another checkpoint
    names = [SINGLE]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        metadata[SAVE_KEY] = save_id
    return [_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _stored_nbytes(name: str, tensor: LazyTensor) -> int:
    tag = _TAGS.get(tensor.dtype)
    if tag is None:
        raise LazyModelError(
            f"{name!r}: safetensors has no dtype {tensor.dtype.name}, only {', '.join(sorted(_TAGS.values()))}; "
            "cast it with a mapping, or save with format='orbax'"
        )
    if name == "__metadata__":
        raise LazyModelError("a tensor cannot be called '__metadata__' in safetensors; rename it with a mapping")
    if tensor.dtype != FLOAT4:
        return tensor.nbytes
    if tensor.size % 2:
        raise LazyModelError(f"{name!r}: safetensors packs 4-bit floats in pairs, and {list(tensor.shape)} is odd")
    return tensor.size // 2


def _file(name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> SavedFile:
    # Larger dtypes first, as the reference implementation has it: then every tensor is aligned to its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins: list[int] = []
    end = 0
    for tensor_name, tensor in ordered:
        begins.append(end)
        end += _stored_nbytes(tensor_name, tensor)
        offsets = [begins[-1], end]
        header[tensor_name] = {"dtype": _TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise LazyModelError(f"the name of a tensor has {bad!r} in it, which cannot be written as UTF-8") from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise LazyModelError(f"names and shapes take {format_bytes(len(text))}; safetensors allows {MAX_HEADER} bytes")
    data = len(text) + 8
    placed = [(n, tensor, data + begin) for (n, tensor), begin in zip(ordered, begins, strict=True)]
    return SavedFile(name, len(text).to_bytes(8, "little") + text, tuple(placed), data + end)
