"""What is to be written, and the protocol of the places that it goes to.

A format's module (`safetensors`, or one of an extra) lays tensors out in files: bytes that are known, and where in them
the bytes of tensors will be. A `Destination` takes them: on a disk (`disk`), or in a bucket (`store`).
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lazymodel._devices.collective import CollectiveScope
from lazymodel._errors import LazyModelError
from lazymodel._remote.path import Location
from lazymodel._show.progress import Progress, ProgressTo, progress_for
from lazymodel._show.text import format_bytes, parse_budget
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor
from lazymodel._tensors.shards import DeviceTensor
from lazymodel._tensors.tensor_source import TensorSource
from lazymodel.checkpoints._safetensors import FLOAT4

DEFAULT_BUDGET = 256 << 20  # bytes; all threads with all they take, beyond which nothing gets faster


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """How files are saved, wherever they go."""

    budget: int  # bytes of the host's memory
    bar: Progress
    shard_size: int | None = None  # bytes of tensors in a file, at most; None for one file
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for the header of every safetensors file
    # Distinguishes this save's shards from others'; 16 hexadecimal digits.
    save_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8), compare=False)

    @classmethod
    def given(
        cls, tensors: Mapping[str, LazyTensor], memory: int | str | None, bar: ProgressTo, **more: Any
    ) -> SaveOptions:
        """Options as users give them; the default budget is enough for tensors that have to be computed whole."""
        whole = max((tensor.source.min_scratch_nbytes for tensor in tensors.values()), default=0)
        return cls(parse_budget(memory, DEFAULT_BUDGET + 2 * whole), progress_for(bar), **more)


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """One file to write."""

    name: str
    header: bytes  # everything before the tensors
    tensors: tuple[tuple[str, LazyTensor, int], ...]  # name, tensor, and byte in the file
    nbytes: int  # of all of it
    rest: tuple[tuple[int, bytes], ...] = ()  # other bytes, and where in the file they are


class Destination:
    """A place that files go to, which is as it was until `commit`, and if anything fails before that.

    Every process makes one with the same files, and calls `stage`, and within it `write`; then the leading process
    calls `commit`, or where any process failed to write, every one calls `abort`.
    """

    files: Sequence[SavedFile]

    def stage(self, *, leads: bool, overwrite: bool) -> AbstractContextManager[None]:
        """Within the block files may come. Raises LazyModelError where they must not, or another saver is at work."""
        raise NotImplementedError

    def write(self, scope: CollectiveScope) -> None:
        """Writes what is this process's part, until any process fails."""
        raise NotImplementedError

    def commit(self) -> None:
        """Makes the complete files count; where that cannot be done, what was there is as it was."""
        raise NotImplementedError

    def abort(self) -> None:
        """Removes what this process has written, where leaving `stage` does not."""


def grouped(
    tensors: Mapping[str, LazyTensor], shard_size: int | None, nbytes_of: Callable[[str, LazyTensor], int]
) -> list[dict[str, LazyTensor]]:
    """Divides tensors among files, in their order; one file where there is no limit."""
    groups: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = nbytes_of(name, tensor)
        if shard_size is not None and groups[-1] and size + nbytes > shard_size:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += nbytes
    return groups


def complete(source: TensorSource) -> bool:
    """Returns True if this process can read all of it."""
    if isinstance(source, ConcatenatedTensor):
        return all(complete(piece.source) for piece in source.pieces)
    return not isinstance(source, DeviceTensor) or source.complete


def divided(files: Sequence[SavedFile], budget: int, available: int | None = None) -> tuple[int, int]:
    """Takes a quarter of the available part of a budget for bytes that are fetched ahead from stores, or less where a
    tensor needs it. Returns these bytes, and the largest number that reading any of a tensor takes at once.

    Raises:
        LazyModelError: A tensor cannot be written, or not read within the available part.
    """
    available, largest = budget if available is None else available, 0
    for name, tensor, _ in (placed for file in files for placed in file.tensors):
        if tensor.dtype == FLOAT4 and not complete(tensor.source):
            raise LazyModelError(
                f"{name!r}: 4-bit floats that several processes share cannot be written, because two are one byte"
            )
        scratch = tensor.source.min_scratch_nbytes
        if scratch + 8 * tensor.itemsize > available:
            part = "" if available == budget else f", of which {format_bytes(available)} are left alongside uploads"
            raise LazyModelError(
                f"{name!r}: reading any of it takes {format_bytes(scratch)} at once, more than "
                f"max_host_memory={format_bytes(budget)}{part}"
            )
        largest = max(largest, scratch)
    return min(available // 4, (available - largest) // 2), largest


def in_threads(nbytes: int, unit: int, most: int, chunk: int, copies: int) -> tuple[int, int]:
    """Divides memory among threads, each of which takes `unit` bytes at once and `copies` of a chunk.

    Returns the number of threads, at most `most`, and bytes of a chunk, at most `chunk`.
    """
    threads = max(min(most, nbytes // (unit + copies * chunk)), 1)
    return threads, max(min(chunk, (nbytes // threads - unit) // copies), 1)


def check_overwrite(there: Location | None, overwrite: bool) -> None:
    """Raises LazyModelError where there is something that may not be replaced."""
    if there is not None and not overwrite:
        raise LazyModelError(f"there is a checkpoint already: {there}. Pass overwrite=True (--overwrite) to replace it")
