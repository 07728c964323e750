"""`Checkpoint`: what every format looks like from outside."""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._show.text import format_bytes, plural
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor


class TensorHeader(NamedTuple):
    """The header of one tensor: its dtype in memory, shape, bytes in memory, and its file.

    `stored` is the name of its type in the file and its bytes there, where NumPy has no dtype for it;
    `offset` its first byte there, if it is stored in one piece and the headers say so.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    file: str
    stored: tuple[str, int] | None = None
    offset: int | None = None


class Checkpoint(Mapping[str, LazyTensor]):
    """An open checkpoint: tensor name → `LazyTensor`. Opening and looking up read headers only.

    Subclasses provide `_tensor` and pass the names they have, as a list or as the keys of a dict of theirs. Usable in
    a `with` statement; closing releases file descriptors, and tensors that are still around open them again when read.

    Attributes:
        path: The path that was opened.
        format: The format of its files, for reports.
        metadata: Their metadata, if the format has any: strings (safetensors'
            `__metadata__`), or also numbers, bools and lists (GGUF).

    Example:
        >>> with lm.open_checkpoint("model.safetensors") as checkpoint:
        ...     print(list(checkpoint), checkpoint.nbytes, checkpoint.bytes_read)
        ['down/kernel', 'up/kernel'] 131072 0
    """

    format: str = "unknown"
    metadata: Mapping[str, Any] | None = None

    def __init__(self, path: str | Location, names: list[str] | dict[str, Any], sources: Sequence[ByteReader]) -> None:
        self.path = str(path)
        self._names: dict[str, Any] = names if isinstance(names, dict) else dict.fromkeys(names)
        self._sources = sources
        self._tensors: dict[str, LazyTensor] = {}

    def _tensor(self, name: str) -> LazyTensor:
        raise NotImplementedError

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._names:
            raise KeyError(f"{name!r} is not a tensor of {self.path}")
        if name not in self._tensors:
            self._tensors[name] = self._tensor(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would make the tensor

    def describe(self, name: str) -> TensorHeader:
        """The header of an existing tensor; formats that can read it alone make no tensor for it."""
        tensor = self[name]
        return TensorHeader(tensor.dtype, tensor.shape, tensor.nbytes, tensor.file)

    def keys(self) -> KeysView[str]:
        """The names; not the general view, which would ask for each name in Python."""
        return self._names.keys()

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold its tensors."""
        return sorted({source.path for source in self._sources})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._nbytes_of(self._names)

    def _nbytes_of(self, names: Collection[str]) -> int:
        return sum(self.describe(name).nbytes for name in names)

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read from its files so far."""
        return sum(source.bytes_read for source in self._sources)

    def close(self) -> None:
        """Releases file descriptors."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = f"{format_bytes(self.nbytes)} in {plural(len(self.files), 'file')}"
        return f"{type(self).__name__}({self.path!r}: {plural(len(self), 'tensor')}, {size})"


class JoinedCheckpoint(Checkpoint):
    """Several files as one mapping; of each the tensors whose names are given, and no name twice."""

    def __init__(self, path: str | Location, parts: Sequence[tuple[Checkpoint, Collection[str]]]) -> None:
        owners: dict[str, Checkpoint] = {}
        for part, names in parts:
            if not owners.keys().isdisjoint(names):
                name = next(name for name in names if name in owners)
                raise CheckpointError(
                    f"tensor {name!r} is in both {owners[name].path} and {part.path}; open one of the files, or add "
                    "the index file that says which one counts"
                )
            owners |= dict.fromkeys(names, part)
            self.format = part.format
            if part.metadata is not None:
                self.metadata = {**(self.metadata or {}), **part.metadata}
        super().__init__(path, owners, [source for part, _ in parts for source in part._sources])
        self._parts = parts

    def _tensor(self, name: str) -> LazyTensor:
        return self._names[name]._tensor(name)

    def describe(self, name: str) -> TensorHeader:
        return self._names[name].describe(name)

    @property
    def nbytes(self) -> int:
        return sum(part._nbytes_of(names) for part, names in self._parts)

    def close(self) -> None:
        for part, _ in self._parts:
            part.close()
