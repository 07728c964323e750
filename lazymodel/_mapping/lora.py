"""LoRA adapters in the place of weights, which are refused: their tensors alone do not say what they add."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lazymodel._errors import CheckpointError
from lazymodel._show.text import listed

_ADAPTER = re.compile(r"(?:.*[./])?lora_(?:embedding_)?[AB](?:[./].*)?", re.DOTALL)  # as PEFT names them


def refuse_adapter(names: Iterable[str], what: str) -> None:
    """Raises CheckpointError where names of tensors, that no variable has, are those of a LoRA adapter."""
    if found := [name for name in names if _ADAPTER.fullmatch(name)]:
        raise CheckpointError(
            f"{what} has {len(found)} tensors of a LoRA adapter: {listed(map(repr, found))}. What they add to a weight "
            "is lora_alpha / r times their product, and neither number is among the tensors. Merge the adapter first "
            "(PEFT: merge_and_unload), or give lm.map_checkpoint a function that returns W + lora_alpha / r * B @ A"
        )
