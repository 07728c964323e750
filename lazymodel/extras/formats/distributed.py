"""Checkpoints of torch.distributed.checkpoint in safetensors, of which every rank wrote its parts: joined lazily.

`HuggingFaceStorageWriter(path, save_distributed=True)` (torch 2.13) has rank r write `shard-0000r-model-…safetensors`:
its parts, each under the name of the whole tensor, and in the metadata as JSON name → `saved_offsets`, where in the
whole it begins. The whole shape is written nowhere: it is where the parts end, so they must fill it from 0 on. Parts of
a device mesh are a grid, which is joined along one axis after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._show.text import grouped_by
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._safetensors import SHARDING
from lazymodel.checkpoints._untrusted import corrupt, mismatch, read_json_object

_FIX = "copy the shards of all ranks of one save, and no others"


class _Part(NamedTuple):
    file: Checkpoint
    header: TensorHeader
    start: tuple[int, ...]

    def end(self, axis: int) -> int:
        return self.start[axis] + self.header.shape[axis]


class DistributedCheckpoint(Checkpoint):
    """The shards of all ranks as one checkpoint of whole tensors.

    Raises:
        CheckpointError: The parts of a tensor leave a gap, overlap, are no grid, or differ in dtype.
    """

    format = "safetensors"

    def __init__(self, path: Location, files: Sequence[Checkpoint]) -> None:
        self._files = files
        self._parts: dict[str, list[_Part]] = {}
        for file in files:
            starts = _starts(file)
            for name in file:
                header = file.describe(name)
                start = starts.get(name, (0,) * len(header.shape))
                if len(start) != len(header.shape):
                    raise mismatch(file.path, f"{len(header.shape)} saved_offsets of {name!r}", str(list(start)))
                self._parts.setdefault(name, []).append(_Part(file, header, start))
        self._headers = {name: self._header(name, path) for name in self._parts}
        self.metadata = {key: value for key, value in (files[0].metadata or {}).items() if key != SHARDING}
        super().__init__(path, self._parts, [source for file in files for source in file._sources])

    def _header(self, name: str, path: Location) -> TensorHeader:
        """The header of a whole tensor; its parts are checked."""
        # Ranks beyond the last row have a part without elements.
        self._parts[name] = parts = [each for each in self._parts[name] if each.header.nbytes] or self._parts[name][:1]
        dtypes = {each.header.dtype.name for each in parts}
        if len(dtypes) > 1:
            raise mismatch(path, f"parts of {name!r} of one dtype", ", ".join(sorted(dtypes)), _FIX)
        first = parts[0].header
        shape = tuple(max(part.end(axis) for part in parts) for axis in range(len(first.shape)))
        if not _fill(parts, shape, 0):
            found = [f"{list(part.header.shape)} at {list(part.start)} in {part.file.path}" for part in parts[:4]]
            more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
            raise mismatch(path, f"parts of {name!r} that fill {list(shape)}", ", ".join(found) + more, _FIX)
        nbytes = sum(part.header.nbytes for part in parts)
        return TensorHeader(first.dtype, shape, nbytes, first.file, None, first.offset if len(parts) == 1 else None)

    def _tensor(self, name: str) -> LazyTensor:
        return _joined(name, self._parts[name], 0)

    def describe(self, name: str) -> TensorHeader:
        return self._headers[name]

    def close(self) -> None:
        for file in self._files:
            file.close()


def _starts(file: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Name → where a file's part of the tensor begins."""
    text = (file.metadata or {}).get(SHARDING, "{}")
    with corrupt(f"{file.path}: expected a JSON object of saved_offsets in {SHARDING!r}, found another"):
        info = read_json_object(text.encode(), file.path)
        starts = {name: tuple(each["saved_offsets"]) for name, each in info.items()}
    for name, start in starts.items():
        if not all(type(place) is int and place >= 0 for place in start):
            raise CheckpointError(f"{file.path}: expected saved_offsets of {name!r} from 0 on, found {list(start)}")
    return starts


def _slices(parts: Sequence[_Part], axis: int) -> list[list[_Part]]:
    """The parts by where they begin along an axis, in order."""
    return list(grouped_by(sorted(parts, key=lambda part: part.start), lambda part: part.start[axis]).values())


def _fill(parts: Sequence[_Part], shape: tuple[int, ...], axis: int) -> bool:
    """Returns True if parts are a grid, from an axis on, that fills the shape."""
    if axis == len(shape):
        return len(parts) == 1
    at = 0
    for own in _slices(parts, axis):
        ends = {part.end(axis) for part in own}
        if own[0].start[axis] != at or len(ends) > 1 or not _fill(own, shape, axis + 1):
            return False
        at = ends.pop()
    return at == shape[axis]


def _joined(name: str, parts: Sequence[_Part], axis: int) -> LazyTensor:
    if axis == len(parts[0].start):
        return parts[0].file[name]
    joined = [_joined(name, own, axis + 1) for own in _slices(parts, axis)]
    return joined[0] if len(joined) == 1 else LazyTensor(ConcatenatedTensor(joined, axis))
