"""A checkpoint as a model sees it, and what messages call a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lazymodel._tensors.lazy import LazyTensor


class MappedCheckpoint(Mapping[str, LazyTensor]):
    """A checkpoint as a model sees it: variable path → lazy tensor. Made by `map_checkpoint`."""

    def __init__(self, tensors: Mapping[str, LazyTensor], source: Any, unused: Sequence[str] = ()) -> None:
        path = getattr(source, "path", None)
        self._tensors = dict(tensors)
        self.path: str | None = path if isinstance(path, str) else None  # of the checkpoint that it was made of
        self.source = source  # that checkpoint
        self.unused = tuple(unused)  # names of the source's tensors that were not looked at

    def __getitem__(self, path: str) -> LazyTensor:
        return self._tensors[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        return f"MappedCheckpoint({len(self)} variables{where})"


def described(checkpoint: Mapping[str, Any]) -> str:
    """What an error calls a checkpoint."""
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"
