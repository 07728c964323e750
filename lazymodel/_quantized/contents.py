"""What a quantized checkpoint stores, as families take from it what they understand, and make plain tensors of it.

Responsible for keeping count: which stored tensors are still nobody's, which plain ones came to be, and the errors for
what contradicts itself. What a format means is its family's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, KeysView, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._quantized.config import Config
from lazymodel._tensors.lazy import LazyTensor


class Header(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> str: ...


class StoredTensors(Protocol):
    """The checkpoint as it is stored."""

    def keys(self) -> KeysView[str]: ...
    def __getitem__(self, name: str, /) -> LazyTensor: ...
    def describe(self, name: str) -> Header: ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tensor of the plain checkpoint.

    Attributes:
        make: Makes it, as a lazy tensor.
        file: The file that has most of it.
        dtype: Its dtype; None where its headers do not say that or its shape.
        shape: Its shape.
    """

    make: Callable[[], LazyTensor]
    file: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()


class Contents:
    """A quantized checkpoint, while families take what they know.

    Attributes:
        config: What its configuration says.
        left: The names of what nobody took.
        plain: What came of the others; names that stand in `left` as well are tensors that are what they seem.
    """

    def __init__(self, stored: StoredTensors, config: Config) -> None:
        self.config, self._stored = config, stored
        self.left = dict.fromkeys(stored.keys())
        self.plain: dict[str, Plain] = {}

    def names(self, *endings: str) -> Iterator[str]:
        """The names of what is left and ends in one of these, without that ending."""
        for ending in endings:
            yield from [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def has(self, name: str) -> bool:
        return name in self.left

    def header(self, name: str) -> Header:
        return self._stored.describe(name)

    def tensor(self, name: str) -> LazyTensor:
        return self._stored[name]

    def require(self, name: str, *names: str) -> None:
        """Raises CheckpointError where a tensor lacks what belongs to it."""
        if missing := [other for other in names if other not in self.left]:
            self.refuse(name, f"{', '.join(map(repr, missing))} beside it", "none; open all shards of the checkpoint")

    def expect(self, name: str, shape: Sequence[int], *kinds: str) -> None:
        """Raises CheckpointError where a stored tensor has another shape, or a dtype that is none of these."""
        header = self.header(name)
        if kinds and header.dtype.name not in kinds:
            self.refuse(name, " or ".join(kinds), header.dtype.name)
        if tuple(header.shape) != tuple(shape):
            self.refuse(name, f"shape {tuple(shape)}", str(tuple(header.shape)))

    def matrix(self, name: str, *kinds: str) -> tuple[int, int]:
        """The shape of a stored matrix; CheckpointError where it is none, is empty, or its dtype is none of these."""
        shape = self.header(name).shape
        if len(shape) != 2 or 0 in shape:
            self.refuse(name, "a matrix that is not empty", f"shape {tuple(shape)}")
        self.expect(name, shape, *kinds)
        return shape[0], shape[1]

    def add(
        self, name: str, parts: Sequence[str], shape: Sequence[int], make: Callable[[], Any],
        dtype: np.dtype[Any] | None = None,
    ) -> None:  # fmt: skip
        """Notes a plain tensor that is made of stored ones, the first of them the largest; `make` gives it in float32,
        or in a narrower dtype that it is rounded to first.
        """
        module = name.rpartition(".")[0]
        if self.config.ignores(module):
            self.refuse(parts[0], "a plain tensor, as the configuration's list of what is not converted says", "parts")
        if name in self.plain or (name in self._stored.keys() and name not in parts):  # noqa: SIM118
            self.refuse(parts[0], f"parts of {name!r}, or the tensor itself", "both")
        if not math.prod(shape):
            self.refuse(parts[0], "elements", f"a tensor of shape {tuple(shape)}")
        file, target = self.header(parts[0]).file, dtype or self.config.dtype
        self.plain[name] = Plain(lambda: make().astype(target), file, target, tuple(shape))
        self.drop(*parts)

    def add_unread(self, name: str, parts: Sequence[str], make: Callable[[], LazyTensor]) -> None:
        """Notes one of which only reading tells the dtype and shape."""
        self.add(name, parts, (1,), make)
        self.plain[name] = Plain(make, self.plain[name].file)

    def drop(self, *names: str) -> None:
        """Takes what has been understood."""
        for name in names:
            self.left.pop(name, None)

    def refuse(self, name: str, expected: str, found: str) -> NoReturn:
        file = self._stored.describe(name).file if name in self._stored.keys() else self.config.file  # noqa: SIM118
        raise CheckpointError(
            f"tensor {name!r} of {file}: expected {expected}, found {found}; {self.config.file} says that the weights "
            f"are quantized with {self.config.method!r}"
        )
