"""Which saved path belongs to which path of a model, up to what Keras names otherwise in another program.

Keras numbers automatic names over the whole process (`dense_4`), and a model made from its configuration has variables
without the name of the model in front. Paths are matched up to such differences where that is possible in one way only.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


def match_paths(paths: list[str], saved: list[str], automatic: set[str]) -> dict[str, str]:
    """The saved path of each of a model's paths, as far as there is one.

    Equal paths are matched first, if that leaves none of the model's over. Otherwise all are compared without the
    numbers of `automatic` names but with their order, and then one may lack leading parts of the other, where it fits
    no other path.
    """
    exact = set(saved)
    if all(path in exact for path in paths):
        return {path: path for path in paths}
    ours, theirs = _renumbered(paths, automatic), _renumbered(saved, automatic)
    by_name = {name: original for original, name in theirs.items()}
    matched = {path: by_name.pop(name) for path, name in ours.items() if name in by_name}
    # (suffix → paths that end with it) of those that are left, in both directions.
    left = {path: name for path, name in ours.items() if path not in matched}
    endings = _endings(left), _endings({original: name for name, original in by_name.items()})
    candidates = {path: set(endings[1].get(name, ())) for path, name in left.items()}
    for name, original in by_name.items():
        for path in endings[0].get(name, ()):
            candidates[path].add(original)
    claims = collections.Counter(original for originals in candidates.values() for original in originals)
    alone = {path: next(iter(originals)) for path, originals in candidates.items() if len(originals) == 1}
    return matched | {path: original for path, original in alone.items() if claims[original] == 1}


def _endings(names: Mapping[str, str]) -> dict[str, list[str]]:
    """What ends with some parts, by these; a name ends with all of itself too."""
    endings: dict[str, list[str]] = {}
    for original, name in names.items():
        parts = name.split("/")
        for start in range(len(parts)):
            endings.setdefault("/".join(parts[start:]), []).append(original)
    return endings


def _renumbered(paths: list[str], automatic: set[str]) -> dict[str, str]:
    """Path → the path with automatic names counted from 0 in their own order: `dense_4`, `dense_7` → `dense#0`, …"""
    split: dict[str, list[tuple[str, int | None]]] = {}
    numbers: dict[str, set[int]] = {}
    for path in paths:
        split[path] = []
        for part in path.split("/"):
            match = _NUMBERED.fullmatch(part)
            assert match is not None
            base, number = match.groups()
            split[path].append((base, int(number or 0)) if base in automatic else (part, None))
            if base in automatic:
                numbers.setdefault(base, set()).add(int(number or 0))
    ranks = {(base, number): rank for base, found in numbers.items() for rank, number in enumerate(sorted(found))}
    return {
        path: "/".join(base if number is None else f"{base}#{ranks[base, number]}" for base, number in parts)
        for path, parts in split.items()
    }


def match_slots(
    slots: Mapping[str, Any], names: Mapping[str, str], saved_as: Mapping[str, str], automatic: set[str]
) -> dict[str, str]:
    """The name in the checkpoint of each optimizer variable, as far as there is one.

    The state that an optimizer keeps of a variable is called after it, `adam/net_dense_kernel_momentum`.
    """
    prefixes = {path.replace("/", "_") + "_": saved.replace("/", "_") + "_" for path, saved in saved_as.items()}
    expected: dict[str, str] = {}
    for path in slots:
        scope, _, leaf = path.rpartition("/")
        owner = max((prefix for prefix in prefixes if leaf.startswith(prefix)), key=len, default="")
        expected[path] = (f"{scope}/" if scope else "") + prefixes.get(owner, "") + leaf[len(owner) :]
    matched = match_paths(list(expected.values()), list(names), automatic)
    return {path: names[matched[name]] for path, name in expected.items() if name in matched}
