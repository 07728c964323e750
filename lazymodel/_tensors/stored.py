"""Descriptions of where values are stored, for messages and reports: tensors, their files and bytes. Reads nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.decoded import ComputedTensor
from lazymodel._tensors.tensor_source import CompositeSource, FileTensor, TensorSource, View


def misshapen(path: str, expected: Sequence[int], found: Sequence[int], where: str = "") -> str:
    """The message for a tensor whose shape differs from that of its variable."""
    return f"{path!r}: expected shape {tuple(expected)}, found {tuple(found)}" + (f" in {where}" if where else "")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as a checkpoint stores it.

    Attributes:
        name: Its name in the checkpoint.
        file: The path of its file; empty for an array in memory.
        dtype: The name of its dtype as stored; empty where `nbytes` is None.
        nbytes: Bytes of all its elements as stored, before any compression; None if its header is not readable, which
            fails a load only if the tensor is needed.
    """

    name: str
    file: str
    dtype: str
    nbytes: int | None


@dataclasses.dataclass(frozen=True)
class MismatchedTensor:
    """A tensor that was left out because its shape differs from that of its variable.

    Attributes:
        path: The variable's path.
        tensor: The tensor that was found for it.
        expected: The shape that the variable needs.
        found: The shape that the tensor has.
    """

    path: str
    tensor: StoredTensor
    expected: tuple[int, ...]
    found: tuple[int, ...]

    def __str__(self) -> str:
        return misshapen(self.path, self.expected, self.found, where(self.tensor))


def where(source: Any) -> str:
    """The origin of values, for messages: the tensor and file of a view, an array or a `StoredTensor`."""
    if file := getattr(source, "file", ""):
        return f"tensor {source.name!r} of {file}"
    return f"tensor {source.name!r}" if isinstance(source, StoredTensor) else "an array in memory"


def stored_tensors(source: Any, name: str) -> tuple[StoredTensor, ...]:
    """The tensors from which a source of values reads; `name` is the name for an array in memory."""
    if not isinstance(source, View):
        array = np.asarray(source)
        return (StoredTensor(name, "", array.dtype.name, array.nbytes),)
    return tuple(
        dict.fromkeys(
            StoredTensor(read.name, read.file, read.dtype.name, math.prod(read.shape) * read.dtype.itemsize)
            for read in _read_from(source.source)
        )
    )


def remote_sizes(sources: Iterable[Any]) -> dict[str, int]:
    """Bytes of the remote files from which sources of values are read: path to size."""
    read = (each for source in sources if isinstance(source, View) for each in _read_from(source.source))
    return {each.file: each.reader.size for each in read if isinstance(each, FileTensor) and each.reader.remote}


def is_initial(source: Any) -> bool:
    """Returns True if a source is computed from an initial value rather than from the values of a file."""
    return isinstance(source, View) and isinstance(source.source, ComputedTensor) and not source.file


def unused_tensors(checkpoint: Mapping[str, Any], names: Iterable[str]) -> tuple[StoredTensor, ...]:
    """Describes tensors of a checkpoint that nothing uses. A tensor that cannot be read is not an error."""
    unused: list[StoredTensor] = []
    for name in names:
        try:
            source = checkpoint[name]
        except CheckpointError:
            unused.append(StoredTensor(name, getattr(checkpoint, "path", ""), "", None))
            continue
        tensor = stored_tensors(source, name)[0]
        if isinstance(source, View) and source.file:
            tensor = dataclasses.replace(tensor, nbytes=int(source.size * stored_itemsize(source.source)))
        unused.append(dataclasses.replace(tensor, name=name))
    return tuple(unused)


def _read_from(source: TensorSource) -> Iterator[TensorSource]:
    """The sources, in a file or in memory, of which a source is made."""
    if isinstance(source, CompositeSource):
        for component in source.pieces:
            yield from _read_from(component.source)
    else:
        yield source


def stored_itemsize(source: TensorSource) -> Fraction:
    """Bytes of files that are read for one element: the average if tensors of several dtypes were joined."""
    if not isinstance(source, CompositeSource):
        return Fraction(source.dtype.itemsize if source.file else 0)
    nbytes = sum((component.size * stored_itemsize(component.source) for component in source.pieces), Fraction(0))
    return nbytes / max(math.prod(source.shape), 1) if source.reads_pieces else Fraction(0)
