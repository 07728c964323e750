"""What a checkpoint is to a model: tensors by name, which may be spelled otherwise than the model's paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import OPTIMIZER, trained_path
from lazymodel._errors import CheckpointError
from lazymodel._show.text import listed, plural
from lazymodel._tensors.lazy import LazyTensor

_ADAPTER = re.compile(r"(?:.*[./])?lora_(?:embedding_)?[AB](?:[./].*)?", re.DOTALL)  # PEFT's names


def refuse_adapter(names: Iterable[str], what: str) -> None:
    """Raises CheckpointError if names of tensors, which no variable has, are those of a LoRA adapter."""
    if found := [name for name in names if _ADAPTER.fullmatch(name)]:
        raise CheckpointError(
            f"{what} has {plural(len(found), 'tensor')} of a LoRA adapter: {listed(map(repr, found))}. They add to a "
            "weight lora_alpha / r times their product, and neither number is among the tensors. Merge the adapter "
            "into the base model's checkpoint first: lm.merge(checkpoint, lm.open_adapter(folder)); or keep its pairs, "
            "if the model has some: WeightMap.adapters"
        )


class MappedCheckpoint(dict[str, LazyTensor]):
    """A checkpoint by variable path: variable path → lazy tensor. Made by `map_checkpoint`."""

    def __init__(self, tensors: Mapping[str, LazyTensor], source: Any, unused: Sequence[str] = ()) -> None:
        path = getattr(source, "path", None)
        super().__init__(tensors)
        self.path: str | None = path if isinstance(path, str) else None  # of the original checkpoint
        self.source = source  # the original checkpoint
        self.unused = tuple(unused)  # names of the source's tensors that were not used

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        return f"MappedCheckpoint({len(self)} variables{where})"


def described(checkpoint: Mapping[str, Any]) -> str:
    """The name of a checkpoint in errors."""
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"


def respelled(model: ModelSpec, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint with the model's names for tensors that have other spellings of them: those of places in a pair of
    model and optimizer, `0/w` for `w`, and those of Flax' states, `w/value` and `opt_state/…`.
    """
    known = {*model, *model.numbers, *(each.variable.path for each in model.conversions)}
    if known.issuperset(checkpoint):
        return checkpoint
    pair = {name.partition("/")[0] for name in checkpoint} <= {"0", "1"}
    own = {path: path for path in known}
    if {path.partition("/")[0] for path in known} <= {"0", "1"}:
        own |= {trained_path(path): path for path in known}

    def spelled(name: str) -> str:
        plain = name.removesuffix("/value")
        paired = trained_path(plain).replace(f"{OPTIMIZER}opt_state/", OPTIMIZER, 1)
        spellings = (plain, trained_path(name), paired) if pair else (plain,)
        return next((own[each] for each in (name, *spellings) if each in own), name)

    names = {name: spelled(name) for name in checkpoint}
    if len({*names.values()}) < len(names) or all(found == name for name, found in names.items()):
        return checkpoint
    return MappedCheckpoint({found: checkpoint[name] for name, found in names.items()}, checkpoint)
