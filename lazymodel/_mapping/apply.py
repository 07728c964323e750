"""Putting a checkpoint under a model's own paths, by a `WeightMap` or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from lazymodel._abstract.paths import flatten_paths
from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._mapping.given import given_checkpoint
from lazymodel._mapping.mapped import MappedCheckpoint, described
from lazymodel._mapping.table import WeightMap
from lazymodel._show.text import closest
from lazymodel._tensors.lazy import LazyTensor, lazy

ReadFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Any]"


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
    checkpoint: Any,
    mapping: WeightMap | ReadFunction,
    abstract: ModelSpec | None = None,
    *,
    strict: bool = True,
) -> MappedCheckpoint:
    """A checkpoint under a model's own paths; nothing is read before a device asks for it.

    Args:
        checkpoint: Tensor name → lazy tensor or array, such as `open_checkpoint` returns; or a model, live or abstract,
            or another pytree of arrays, whose names are those that `save` gives.
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
        CheckpointError: The table does not fit, the function asks for a tensor that is not there, or `checkpoint` is
            none.
        LazyModelError: A table without an abstract model, or `mapping` is neither a table nor a function.

    Example:
        >>> weights = {"up.weight": np.zeros((256, 64), "float32")}
        >>> lm.map_checkpoint(weights, lambda w: {"up": {"kernel": w["up.weight"].T}})["up/kernel"].shape
        (64, 256)
    """
    checkpoint = given_checkpoint(checkpoint)
    if not isinstance(mapping, WeightMap):
        if not callable(cast(Any, mapping)):
            raise LazyModelError(f"a mapping is a WeightMap or a function of the checkpoint; got {mapping!r}")
        watched = _Watched(checkpoint)
        flat = flatten_paths(mapping(watched))
        unused = [name for name in checkpoint if name not in watched.seen]
        return MappedCheckpoint({name: lazy(value, name) for name, value in flat.items()}, checkpoint, unused)
    if not isinstance(abstract, ModelSpec):
        got = "" if abstract is None else f"; got {type(cast(Any, abstract)).__name__}"
        raise LazyModelError(f"a WeightMap is applied for a model: pass map_checkpoint the abstract model too{got}")
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
