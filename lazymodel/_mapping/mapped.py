"""A checkpoint under a model's own paths: applying a `WeightMap` or a function to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax

from lazymodel._abstract.paths import flatten_paths
from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._mapping.table import WeightMap
from lazymodel._show.text import closest
from lazymodel._tensors.lazy import LazyTensor, lazy

ReadFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Any]"


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


class _Watched(Mapping[str, LazyTensor]):
    """A checkpoint that notes which tensors are looked at."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> LazyTensor:
        try:
            tensor = self._checkpoint[name]
        except KeyError:
            what = f"{described(self._checkpoint)} has no tensor {name!r}"
            raise CheckpointError(f"{what}{closest(name, self._checkpoint)}") from None
        self.seen.add(name)
        return lazy(tensor, name)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)

    def get(self, name: str, default: Any = None) -> Any:
        return default if name not in self._checkpoint else self[name]  # Mapping's own expects a KeyError


def map_checkpoint(
    checkpoint: Mapping[str, Any],
    mapping: WeightMap | ReadFunction,
    abstract: ModelSpec | None = None,
    *,
    strict: bool = True,
) -> MappedCheckpoint:
    """A checkpoint under a model's own paths; nothing is read before a device asks for it.

    Args:
        checkpoint: Tensor name → lazy tensor or array, such as `open_checkpoint` returns.
        mapping: A `WeightMap`; or a function of the checkpoint that returns the model's structure, or a flat dict of
            paths, made of its tensors with NumPy: `w.T`, `w.reshape`, slices, `np.split`, `np.stack`,
            `np.concatenate`, `astype` and arithmetic with a scalar are carried out while shards are read. What else
            NumPy offers works too, and reads that one tensor whole. None in its result leaves a variable out.
        abstract: The model. A table needs it; with a function it is not used.
        strict: Whether anything that `WeightMap.check` finds wrong is an error. If not, what is wrong is left out with
            a warning. A variable without an entry is neither: `materialize` says what becomes of it.

    Returns:
        A mapping for `plan` and `materialize`.

    Raises:
        CheckpointError: The table does not fit, or the function asks for a tensor that is not there.
        LazyModelError: A table without a model.

    Example:
        >>> weights = {"up.weight": np.zeros((256, 64), "float32")}
        >>> lm.map_checkpoint(weights, lambda w: {"up": {"kernel": w["up.weight"].T}})["up/kernel"].shape
        (64, 256)
    """
    if not isinstance(mapping, WeightMap):
        watched = _Watched(checkpoint)
        flat = flatten_paths(mapping(watched))
        unused = [name for name in checkpoint if name not in watched.seen]
        return MappedCheckpoint({name: lazy(value, name) for name, value in flat.items()}, checkpoint, unused)
    if abstract is None:
        raise LazyModelError("a WeightMap is applied for a model: pass map_checkpoint the abstract model too")
    mapped, report = mapping.apply(checkpoint, abstract)
    if not report.ok:
        text = f"{described(checkpoint)} does not fit {abstract.name} as mapped.\n" + "\n".join(report.problems())
        if strict:
            raise CheckpointError(
                f"{text}\nMend the table (its `ignore` names tensors that no variable needs), or pass "
                "strict=False to leave these out."
            )
        warn(text)
    return MappedCheckpoint(mapped, checkpoint, list(report.unused))


def flat_checkpoint(checkpoint: Any) -> Mapping[str, Any] | None:
    """What a model is given to load, by path: dicts, lists and other pytrees are flattened, checkpoints are flat."""
    if isinstance(checkpoint, str | os.PathLike):
        name = os.fspath(cast("str | os.PathLike[str]", checkpoint)).partition("?")[0]  # a signed URL has a credential
        raise CheckpointError(f"{name!r} is a path, not a checkpoint; open it first: lm.open_checkpoint({name!r})")
    flat = checkpoint is None or (isinstance(checkpoint, Mapping) and not isinstance(checkpoint, dict))
    leaf = not flat and jax.tree_util.all_leaves([checkpoint])
    if leaf and not hasattr(checkpoint, "dtype"):
        raise CheckpointError(f"a checkpoint is a mapping of path to tensor, or a pytree; got {checkpoint!r}")
    return cast(Any, checkpoint) if flat else flatten_paths(checkpoint)


def described(checkpoint: Mapping[str, Any]) -> str:
    """What an error calls a checkpoint."""
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"
