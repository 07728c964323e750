"""The tensors of a base by the names that an adapter gives them.

An adapter has the names of the model in memory. Files may have other prefixes, other words (older versions of
transformers), and experts one by one that the model has as one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from lazymodel._show.text import grouped_by, listed

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", re.DOTALL)
# Experts' matrices in transformers 5 → their parts in files, whose rows follow each other.
_FUSED = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
# Words in files → in transformers 5: of Mixtral and its like, and of ViT.
_MIXTRAL = ((r"\.block_sparse_moe\.", ".mlp."),)
_VIT = (
    (r"(^|\.)encoder\.layer\.", r"\1layers."),
    *((rf"\.attention\.attention\.{word}\.", f".attention.{word[0]}_proj.") for word in ("query", "key", "value")),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
)
_GENERIC = {"", "model", "base_model", "transformer"}  # words of prefixes that do not say which part is meant


class BaseNames:
    """Finds an adapter's tensors in a base.

    Attributes:
        names: Name with dots → name in the base; also names of transformers 5, and those of `fused`.
        fused: Name of fused experts → for each expert, the names of its parts.
    """

    def __init__(self, base: Iterable[str]) -> None:
        self.names = {name.replace("/", "."): name for name in base}
        is_vit = any(".attention.attention.query." in name for name in self.names)
        for name, stored in list(self.names.items()):
            other = name
            for pattern, word in _VIT if is_vit else _MIXTRAL:
                other = re.sub(pattern, word, other)
            self.names.setdefault(other, stored)
        self.fused: dict[str, list[list[str]]] = {}
        experts: dict[str, dict[tuple[int, str], str]] = {}
        for name, stored in self.names.items():
            if match := _EXPERT.fullmatch(name):
                experts.setdefault(match[1], {})[int(match[2]), match[3]] = stored
        for module, found in experts.items():
            count = len({number for number, _ in found})
            for parameter, forms in _FUSED.items():
                for parts in forms:
                    if all((number, part) in found for number in range(count) for part in parts):
                        whole = [[found[number, part] for part in parts] for number in range(count)]
                        self.fused[f"{module}.{parameter}"] = whole
        for name in self.fused:
            self.names.setdefault(name, name)

    def find(self, required: Iterable[str], others: Iterable[str], reject: Callable[..., NoReturn]) -> dict[str, str]:
        """An adapter's name → name in `names`, for all that are required, and for those of the others that are there.

        `reject` is called for names that are not there, and where several could be meant.
        """
        required, others = dict.fromkeys(required), dict.fromkeys(others)
        found = {name: name for name in (*required, *others) if name in self.names}
        prefixes: dict[str, tuple[str, str]] = {}
        for prefix, group in grouped_by([name for name in required if name not in found], _prefix).items():
            if (changed := self._changed(prefix, group, reject)) is None:
                reject(group[0])
            prefixes[prefix] = changed
            found |= {name: _renamed(name, changed) for name in group}
        for name in (name for name in others if name not in found):
            prefix = _prefix(name)
            changed = prefixes.get(prefix)
            if changed is None or _renamed(name, changed) not in self.names:
                changed = self._changed(prefix, [name], reject)
            if changed is not None:
                found[name] = _renamed(name, changed)
        seen: set[str] = set()
        for name, there in found.items():
            if there in seen:
                reject(name)
            seen.add(there)
        return found

    def _changed(self, prefix: str, group: list[str], reject: Callable[..., NoReturn]) -> tuple[str, str] | None:
        """What to remove from the beginning of names with one prefix, and to add there, so that all are found."""
        words = prefix.split(".") if prefix else []
        for count in range(len(words) + 1):
            removed = "".join(f"{word}." for word in words[:count])
            rest = group[0].removeprefix(removed)
            begins = [name.removesuffix(rest) for name in self.names if name == rest or name.endswith(f".{rest}")]
            fitting = [
                begin
                for begin in begins
                if not _NUMBER.search(begin) and all(_renamed(name, (removed, begin)) in self.names for name in group)
            ]
            said = [len(({*words[:count]} - _GENERIC).intersection(begin.split("."))) for begin in fitting]
            if len(fitting) > 1 and max(said):  # such as language_model. and vision_tower.
                fitting = [begin for begin, number in zip(fitting, said, strict=True) if number == max(said)]
            if len(fitting) > 1:
                found = listed(repr(begin + rest) for begin in fitting)
                fix = "merge into a checkpoint with the part that is meant"
                reject(group[0], "one tensor of this name", found, fix)
            if fitting:
                return removed, fitting[0]
        return None


def _prefix(name: str) -> str:
    """The part of a name that may change: neither a number, which states the layer, nor the word before it."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdecimal()), len(words) - 1)
    return ".".join(words[: max(number - 1, 0)])


def _renamed(name: str, changed: tuple[str, str]) -> str:
    removed, added = changed
    return added + name.removeprefix(removed)
