"""GGUF files (llama.cpp), whole or split into several: tensors under the file's own names, quantized ones as float32.

A split model is files `NAME-00001-of-00003.gguf`, of which each says in its metadata which one it is, of how many files
and tensors (`split.no`, `split.count`, `split.tensors.count`). Whichever is opened, all of them are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._quantized.ggml import tensor_leaf
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._remote.source import source_of
from lazymodel._show.text import plural
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint, TensorHeader
from lazymodel.checkpoints._gguf_header import read_header
from lazymodel.checkpoints._untrusted import check_pointer, require_shards, shard_path

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_FLOAT32 = np.dtype(np.float32)


class GgufFile(Checkpoint):
    """One GGUF file: tensor name → `LazyTensor`, in the file's order. Opening reads and checks the header.

    Shapes are in NumPy's order, rows first, the reverse of how the file lists dimensions.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, or its header is malformed. Of a tensor that
            is looked up: its type cannot be decoded, or a scale of its own is beside it.
    """

    format = "gguf"

    def __init__(self, path: Location) -> None:
        check_pointer(path)
        self.source = source_of(path)
        self.whole: Checkpoint = self  # all files of the model
        self.metadata, self._tensors_there = read_header(self.source)
        super().__init__(path, list(self._tensors_there), [self.source])

    def _tensor(self, name: str) -> LazyTensor:
        shape, kind, begin = self._tensors_there[name]
        # llama.cpp multiplies results by it: the second scale of NVFP4. Beside other types it belongs to the model.
        if kind.name == "NVFP4" and (scale := f"{name.removesuffix('weight')}scale") in self.whole:
            raise CheckpointError(
                f"tensor {name!r} of {self.path} is NVFP4 with another scale, tensor {scale!r}, which is not decoded; "
                "take a file of another type"
            )
        return LazyTensor(tensor_leaf(name, self.source, begin, shape, kind))

    def describe(self, name: str) -> TensorHeader:
        info = self._tensors_there[name]
        dtype = info.type.dtype or _FLOAT32
        stored = None if info.type.dtype else (info.type.name, info.nbytes)
        return TensorHeader(dtype, info.shape, math.prod(info.shape) * dtype.itemsize, self.path, stored, info.begin)


def split_names(name: str) -> list[str]:
    """The names of all files of the model of which a file of this name is one, by its name."""
    if (match := _SPLIT.fullmatch(name)) is None:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def model_files(folder: Location) -> Sequence[Location]:
    """The GGUF files of a folder, which must be of one model."""
    files = sorted(folder.glob("*.gguf"))
    models = {split_names(file.name)[0]: None for file in files}
    if len(models) > 1:
        raise CheckpointError(f"{folder} has {len(models)} GGUF models; open one of {list(models)}")
    return files


def open_gguf(path: Location) -> Checkpoint:
    """Opens a GGUF file and, where it is one of several, the others."""
    opened = GgufFile(path)
    count = _integer(opened, "split.count") if "split.count" in (opened.metadata or {}) else 1
    names = split_names(path.name)
    if len(names) != max(count, 1):
        expected = f"a name that ends like -00001-of-{count:05}.gguf" if count > 1 else "a name without numbers"
        raise CheckpointError(
            f"{path} is one of {plural(count, 'file')} as its metadata says: expected {expected}, found {path.name}; "
            "give each of them its name back"
        )
    if count < 2:
        return opened
    paths = [shard_path(path, name) for name in names]
    fetch_heads(paths)
    require_shards(path, paths)
    parts = [opened if each.name == path.name else GgufFile(each) for each in paths]
    tensors = _integer(opened, "split.tensors.count")
    for number, part in enumerate(parts):
        stated = [_integer(part, key) for key in ("split.no", "split.count", "split.tensors.count")]
        if stated != [number, count, tensors]:
            raise CheckpointError(
                f"{part.path}: expected file {number} of {count} with the others' number of tensors, found (split.no, "
                f"split.count, split.tensors.count) = {tuple(stated)}; the files are not of one model"
            )
    if (found := sum(map(len, parts))) != tensors:
        raise CheckpointError(
            f"{path}: expected {tensors} tensors in {count} files as their metadata says, found {found}; download them "
            "again"
        )
    joined = JoinedCheckpoint(path, [(part, part.keys()) for part in parts])
    for part in parts:
        part.whole = joined
    joined.metadata = parts[0].metadata  # the others have only what says which ones they are
    return joined


def _integer(checkpoint: Checkpoint, key: str) -> int:
    value: Any = (checkpoint.metadata or {}).get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise CheckpointError(f"{checkpoint.path}: expected {key!r} to be a count, found {value!r}; it is corrupt")
    return value
