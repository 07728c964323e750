"""The contents of a quantized checkpoint. Each family takes the tensors that it knows, and makes plain tensors of them.

Keeps track of the stored tensors that no family has taken yet and of the plain tensors that were made, and raises for
contradictions. The families interpret the formats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, KeysView, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._quantized.config import Config
from lazymodel._tensors.lazy import LazyTensor


class StoredTensors(Protocol):
    """A checkpoint as it is stored; `describe` gives the dtype, shape and file of a tensor before it is read."""

    def keys(self) -> KeysView[str]: ...
    def __getitem__(self, name: str, /) -> LazyTensor: ...
    def describe(self, name: str) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tensor of the plain checkpoint.

    Attributes:
        make: Makes the tensor, as a lazy tensor.
        file: The file that has most of it.
        dtype: Its dtype; None if the headers do not contain its dtype and shape.
        shape: Its shape.
    """

    make: Callable[[], LazyTensor]
    file: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()


class Contents:
    """A quantized checkpoint, while families take the tensors that they know.

    Attributes:
        config: Its quantization.
        left: The names of tensors that no family has taken.
        plain: The tensors made of the others; a name that is also in `left` belongs to a tensor that is plain already.
    """

    def __init__(self, stored: StoredTensors, config: Config) -> None:
        self.config, self._stored = config, stored
        self.left = dict.fromkeys(stored.keys())
        self.plain: dict[str, Plain] = {}

    def names(self, ending: str) -> list[str]:
        """The names in `left` that end in this, without the ending."""
        return [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def has(self, name: str) -> bool:
        return name in self.left

    def header(self, name: str) -> Any:
        return self._stored.describe(name)

    def tensor(self, name: str) -> LazyTensor:
        return self._stored[name]

    def require(self, name: str, *names: str) -> None:
        """Raises CheckpointError if tensors that belong to this one are missing."""
        if missing := [other for other in names if other not in self.left]:
            self.reject(name, f"{', '.join(map(repr, missing))} alongside", "none; open all shards of the checkpoint")

    def expect(self, name: str, shape: Sequence[int], *kinds: str) -> None:
        """Raises CheckpointError if a stored tensor has another shape, or a dtype that is not one of these."""
        header = self.header(name)
        if kinds and header.dtype.name not in kinds:
            self.reject(name, " or ".join(kinds), header.dtype.name)
        if tuple(header.shape) != tuple(shape):
            self.reject(name, f"shape {tuple(shape)}", str(tuple(header.shape)))

    def matrix(self, name: str, *kinds: str) -> tuple[int, int]:
        """Returns the shape of a stored matrix. Raises CheckpointError if it is not a matrix, is empty, or has a dtype
        that is not one of these.
        """
        shape = self.header(name).shape
        if len(shape) != 2 or 0 in shape:
            self.reject(name, "a matrix that is not empty", f"shape {tuple(shape)}")
        self.expect(name, shape, *kinds)
        return shape[0], shape[1]

    def add(
        self, name: str, parts: Sequence[str], shape: Sequence[int], make: Callable[[], Any],
        dtype: np.dtype[Any] | None = None,
    ) -> None:  # fmt: skip
        """Records a plain tensor that is made of stored ones, the first of which is the largest. `make` returns it in
        float32, or in a narrower dtype to which it is rounded first.
        """
        module = name.rpartition(".")[0]
        if self.config.ignores(module):
            self.reject(parts[0], "a plain tensor, as the configuration lists the module as not converted", "parts")
        if name in self.plain or (name in self._stored.keys() and name not in parts):  # noqa: SIM118
            self.reject(parts[0], f"parts of {name!r}, or the tensor itself", "both")
        if not math.prod(shape):
            self.reject(parts[0], "elements", f"a tensor of shape {tuple(shape)}")
        file, target = self.header(parts[0]).file, dtype or self.config.dtype
        self.plain[name] = Plain(lambda: make().astype(target), file, target, tuple(shape))
        self.drop(*parts)

    def add_unread(self, name: str, parts: Sequence[str], make: Callable[[], LazyTensor]) -> None:
        """Records a plain tensor whose dtype and shape are known only after reading."""
        self.add(name, parts, (1,), make)
        self.plain[name] = Plain(make, self.plain[name].file)

    def drop(self, *names: str) -> None:
        """Removes the names of tensors that were interpreted."""
        for name in names:
            self.left.pop(name, None)

    def reject(self, name: str, expected: str, found: str) -> NoReturn:
        file = self._stored.describe(name).file if name in self._stored.keys() else self.config.file  # noqa: SIM118
        raise CheckpointError(
            f"tensor {name!r} of {file}: expected {expected}, found {found}; {self.config.file} states that the "
            f"weights are quantized with {self.config.method!r}"
        )
