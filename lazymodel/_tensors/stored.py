"""Where values lie: which tensors of which files they are read from, and how many bytes of these a process needs.

In plain values that outlive the checkpoint: what is here holds no tensor, array or device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.sharding import Sharding

from lazymodel._errors import CheckpointError
from lazymodel._tensors.computed import ComputedLeaf
from lazymodel._tensors.leaves import DividedLeaf, FileLeaf, Leaf, View
from lazymodel._tensors.shards import boxes_for


def misshapen(path: str, expected: Sequence[int], found: Sequence[int], where: str = "") -> str:
    """What is wrong with a tensor of another shape than its variable's."""
    return f"{path!r}: expected shape {tuple(expected)}, found {tuple(found)}" + (f" in {where}" if where else "")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as a checkpoint has it.

    Attributes:
        name: Its name in the checkpoint.
        file: The path of its file; empty for an array in memory.
        dtype: The name of its dtype as stored; empty where `nbytes` is None.
        nbytes: Bytes of all its elements as stored, before any compression; None where its header is not readable,
            which fails a load only if the tensor is needed.
    """

    name: str
    file: str
    dtype: str
    nbytes: int | None


@dataclasses.dataclass(frozen=True)
class MismatchedTensor:
    """A tensor that was left out because its shape is not its variable's.

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
    """What values are read from, a view, an array or a `StoredTensor`, for messages: a tensor and its file."""
    if file := getattr(source, "file", ""):
        return f"tensor {source.name!r} of {file}"
    return f"tensor {source.name!r}" if isinstance(source, StoredTensor) else "an array in memory"


def needed_nbytes(source: Any, sharding: Sharding) -> int:
    """Bytes, as stored in files, of the distinct shards of a tensor in this process; 0 for an array in memory."""
    if not isinstance(source, View):
        return 0
    boxes = boxes_for(sharding, source.shape).boxes
    # What is broadcast is in the file once.
    elements = sum(math.prod(source.geometry(box).normalized().shape) for box in boxes)
    return int(elements * stored_itemsize(source.leaf))


def stored_tensors(source: Any, name: str) -> tuple[StoredTensor, ...]:
    """The tensors that a source of values reads from; `name` is what an array in memory is called."""
    if not isinstance(source, View):
        array = np.asarray(source)
        return (StoredTensor(name, "", array.dtype.name, array.nbytes),)
    found = ((leaf, math.prod(leaf.shape) * leaf.dtype.itemsize) for leaf in _leaves(source.leaf))
    return tuple(dict.fromkeys(StoredTensor(leaf.name, leaf.file, leaf.dtype.name, n) for leaf, n in found))


def remote_sizes(sources: Iterable[Any]) -> dict[str, int]:
    """Bytes of the files that lie far away, as far as sources of values are read from such files: path to size."""
    leaves = (leaf for source in sources if isinstance(source, View) for leaf in _leaves(source.leaf))
    files = (leaf.source for leaf in leaves if isinstance(leaf, FileLeaf))
    return {file.path: file.size for file in files if file.remote}


def is_initial(source: Any) -> bool:
    """Whether a source is computed from an initial value rather than from what a file has."""
    return isinstance(source, View) and isinstance(source.leaf, ComputedLeaf) and not source.file


def unused_tensors(checkpoint: Mapping[str, Any], names: Iterable[str]) -> tuple[StoredTensor, ...]:
    """Describes tensors of a checkpoint that nothing takes; one that cannot be read is no error."""
    unused: list[StoredTensor] = []
    for name in names:
        try:
            source = checkpoint[name]
        except CheckpointError:
            unused.append(StoredTensor(name, getattr(checkpoint, "path", ""), "", None))
            continue
        tensor = stored_tensors(source, name)[0]
        if isinstance(source, View) and source.file:
            tensor = dataclasses.replace(tensor, nbytes=int(source.size * stored_itemsize(source.leaf)))
        unused.append(dataclasses.replace(tensor, name=name))
    return tuple(unused)


def _leaves(leaf: Leaf) -> Iterator[Leaf]:
    """What a leaf is made of, down to what is in a file or in memory."""
    if isinstance(leaf, DividedLeaf):
        for piece in leaf.pieces:
            yield from _leaves(piece.leaf)
    else:
        yield leaf


def stored_itemsize(leaf: Leaf) -> Fraction:
    """Bytes of files that are read for one element: the average where tensors of several dtypes were joined."""
    if not isinstance(leaf, DividedLeaf):
        return Fraction(leaf.dtype.itemsize if leaf.file else 0)
    nbytes = sum((piece.size * stored_itemsize(piece.leaf) for piece in leaf.pieces), Fraction(0))
    return nbytes / max(math.prod(leaf.shape), 1) if leaf.reads_pieces else Fraction(0)
