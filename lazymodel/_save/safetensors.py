"""Safetensors to write: their layout in files, their index, and which files of a place are a checkpoint already.

The files that count in a folder are those that `open_checkpoint` opens: an index before `model.safetensors`, and that
before numbered shards without an index. It is the same on disks (`disk`) and in buckets (`store`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import LazyModelError
from lazymodel._remote.path import Location, matching
from lazymodel._save.files import SavedFile, SaveOptions, grouped
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import newest_step
from lazymodel.checkpoints._open import orbax_in, weight_files
from lazymodel.checkpoints._safetensors import (
    DTYPES,
    DTYPES_KEY,
    FLOAT4,
    MAX_HEADER,
    OWN_DTYPES,
    SAVE_KEY,
    is_numbered,
    open_loose,
)
from lazymodel.checkpoints._untrusted import indexed_shards

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8  # bytes that the header is padded to, as the reference implementation pads it
_STORED = {dtype: (tag, ()) for tag, dtype in DTYPES.items()} | OWN_DTYPES


def layout(tensors: Mapping[str, LazyTensor], options: SaveOptions) -> list[SavedFile]:
    """Divides tensors among files, in their order; a single file where there is no size of shards."""
    metadata = options.metadata
    if bad := [key for key, value in metadata.items() if not isinstance(cast(Any, value), str)]:
        raise LazyModelError(f"metadata maps strings to strings; found {bad[0]!r}: {metadata[bad[0]]!r}")
    groups = grouped(tensors, options.shard_size, _stored_nbytes)
    copied = (SAVE_KEY, DTYPES_KEY)  # from another checkpoint
    metadata = {key: value for key, value in metadata.items() if key not in copied}
    names = [SINGLE]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        metadata[SAVE_KEY] = options.save_id
    return [_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _stored_nbytes(name: str, tensor: LazyTensor) -> int:
    if tensor.dtype not in _STORED:
        raise LazyModelError(
            f"{name!r}: safetensors has no dtype {tensor.dtype.name}, only those of JAX; cast it with a mapping"
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
    own = {name: tensor.dtype.name for name, tensor in tensors.items() if tensor.dtype in OWN_DTYPES}
    header: dict[str, Any] = {"__metadata__": {**metadata, **({DTYPES_KEY: json.dumps(own)} if own else {})}}
    begins: list[int] = []
    end = 0
    for tensor_name, tensor in ordered:
        begins.append(end)
        end += _stored_nbytes(tensor_name, tensor)
        offsets = [begins[-1], end]
        tag, inner = _STORED[tensor.dtype]
        header[tensor_name] = {"dtype": tag, "shape": [*tensor.shape, *inner], "data_offsets": offsets}
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


def index_text(total: int, weights: dict[str, str]) -> str:
    """An index: bytes of tensors in all, and the name of each tensor's shard."""
    content: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weights}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def index_of(files: Sequence[SavedFile]) -> str:
    """The index of files to write."""
    weights = {tensor: file.name for file in files for tensor, _, _ in file.tensors}
    return index_text(sum(file.nbytes - len(file.header) for file in files), weights)


# What is there already ------------------------------------------------------------------------------------------------


def old_files(folder: Location, ignored: re.Pattern[str] | None = None) -> list[str]:
    """Names of the files in a folder that are a checkpoint of ours to replace, the one that decides first.

    Files without an index whose names fit `ignored` are none.
    """
    names = [path.name for path in weight_files(folder)]
    if ignored is not None and INDEX not in names:
        names = [name for name in names if not ignored.fullmatch(name)]
    if not names:
        if orbax_in(folder):
            raise _other(folder, "Orbax")
        if (step := newest_step(folder)) is not None:
            raise _other(folder, f"steps, of which {step.name} is the newest")
        return []
    if names == [INDEX]:
        shards = [name for name in listed_shards(folder / INDEX) if is_there(folder / name)]
        return [INDEX, *shards, *([SINGLE] if (folder / SINGLE).exists() and SINGLE not in shards else [])]
    if names == [SINGLE] or all(is_numbered(name) and name.startswith("model-") for name in names):
        return names
    raise _other(folder, listed(names))


def is_there(path: Location) -> bool:
    """Returns True if the name exists, even as a broken link."""
    return os.path.lexists(path) if isinstance(path, Path) else path.exists()


def listed_shards(index: Location) -> list[str]:
    """Names of the shards that an index lists in its own folder; none where it cannot be read."""
    try:
        return [shard.name for shard in indexed_shards(index) if shard.parent == index.parent]
    except LazyModelError:  # whose checkpoint cannot be opened
        return []


def _other(folder: Location, what: str) -> LazyModelError:
    return LazyModelError(
        f"there is a checkpoint already in {folder}, of another format or other names: {what}. Files of this one would "
        "hide it, or be hidden by it: save to another folder, or remove it first"
    )


def check_folder(path: Location) -> None:
    """Raises LazyModelError where there is a file in the place of a folder."""
    if path.exists() and not path.is_dir():
        raise LazyModelError(f"{path} is a file; give a folder, or a name that ends with .safetensors")


def check_file(path: Location) -> None:
    """Raises LazyModelError where a file of this name cannot be saved by itself."""
    folder = path.parent
    if path.is_dir():
        raise LazyModelError(f"{path} is a folder; give the name of a file, or of a folder without a suffix of files")
    for index in matching(folder, "*.safetensors.index.json"):
        if path.name in listed_shards(index) or (path.name, index.name) == (SINGLE, INDEX):
            raise LazyModelError(
                f"{path} would change the sharded checkpoint of {index}, or be hidden by it; save to the "
                f"folder, {folder}, or to another name"
            )


def index_of_loose(folder: Location, old: Sequence[str]) -> str:
    """An index for old shards that have none, so that new ones can come alongside; empty if it needs none, or if they
    are not a complete checkpoint.
    """
    if not old or {INDEX, SINGLE} & set(old):
        return ""
    try:
        with open_loose(folder, [folder / name for name in old]) as shards:
            weights = {name: os.path.basename(tensor.source.file) for name, tensor in shards.items()}
            return index_text(sum(tensor.nbytes for tensor in shards.values()), weights)
    except LazyModelError:
        return ""
