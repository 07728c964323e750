"""`WeightMap`: a table of which tensors become which variables, usable in both directions.

Values are `LazyTensor`s throughout, so nothing here reads one. A table has an entry for each variable path, or for a
pattern of paths:

    WeightMap({
        "embed/embedding": "model.embed_tokens.weight",
        "layers/{layer}/up/kernel": From("model.layers.{layer}.mlp.up_proj.weight").T,
        "blocks/query/kernel": From("h.{layer}.qkv.weight").T.part(0, of=3, axis=1).stack("layer"),
    })
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from lazymodel._abstract.paths import Captures, Template
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._mapping.entry import From, Missing, Parts, Tensors, check_captures, read_entry, write_entry
from lazymodel._mapping.given import given_checkpoint
from lazymodel._mapping.lora import refuse_adapter
from lazymodel._mapping.mapped import described
from lazymodel._mapping.suggest import suggest
from lazymodel._show.text import LISTED, closest, first_lines, fold, grouped_names, unnumbered
from lazymodel._tensors.lazy import LazyTensor, lazy

_PERMUTED = 5  # dimensions up to which permutations are tried for a suggestion: 120 of them


@dataclasses.dataclass(frozen=True)
class MappingReport:
    """What a table makes of a checkpoint and a model, found without reading a tensor.

    Each maps the names or paths that were found to what is to be said of them.
    """

    unused: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # tensors that no entry takes
    missing: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths whose tensors are lacking
    ambiguous: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths that several entries match
    misshapen: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths that get another shape
    unmatched: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # entries that match no path
    unmapped: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths without an entry: initialized
    left_out: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths whose entry is None: likewise
    ignored: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # tensors that the table ignores
    one_way: str = ""  # why `save` cannot undo a table that fits; empty where it can

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; what has no entry, or is left out on purpose, is not counted."""
        return not self.problems()

    def problems(self) -> list[str]:
        """One text a kind of finding, unmapped variables left out."""
        kinds = (
            ("variables that several entries match", self.ambiguous),
            ("variables whose tensors the checkpoint lacks", self.missing),
            ("variables that would get another shape", self.misshapen),
            ("entries that match no variable", self.unmatched),
            ("tensors that no entry takes", self.unused),
        )
        return [_findings(kind, found) for kind, found in kinds if found]

    def __str__(self) -> str:
        kinds = (
            ("variables without an entry, which are initialized", self.unmapped),
            ("variables that the table leaves out, which are initialized", self.left_out),
            ("tensors that the table ignores", self.ignored),
        )
        texts = self.problems() or ["every entry fits, and every tensor is taken or ignored"]
        texts += [f"a model cannot be saved with this table: {self.one_way}"] if self.one_way else []
        return "\n".join(texts + [_findings(kind, found) for kind, found in kinds if found])


def _findings(kind: str, found: Mapping[str, str]) -> str:
    """A line for all that differ in numbers only, with what is to be said of the first."""
    lines: list[str] = []
    for names in grouped_names(found):
        text = found[names[0]]
        if len(names) > 1:
            text = f" ({len(names):,})" + (", the first" if text and text[0] != ";" else "") + text
        lines.append(f"  {fold(names)!r}{text}")
    return "\n".join([f"{len(found):,} {kind}:", *first_lines(lines, indent="  ")])


class WeightMap:
    """A table from variable paths to the tensors of a checkpoint, usable in both directions.

    Args:
        entries: Variable path → `From`, or just a tensor's name, or None for a variable that checkpoints do not have.
            Paths may have captures: `{layer}` matches text without `/` and `.`, `{rest...}` any text. A path without
            captures goes before patterns; a variable that two patterns match is an error.
        ignore: Names of tensors, with captures or without, that may be left unused.

    Raises:
        LazyModelError: An entry has a capture in its names that is neither in its path nor stacked.

    Example:
        >>> weights = lm.WeightMap({"{layer}/kernel": lm.From("{layer}.weight").T})
        >>> weights.check({"up.weight": np.zeros((256, 64)), "down.weight": np.zeros((64, 256))}, abstract).ok
        True
    """

    def __init__(self, entries: Mapping[str, From | str | None], *, ignore: Iterable[str] = ()) -> None:
        self.unsure: dict[str, str] = {}  # entries that `suggest` had a choice for: path → why
        self._ignore = tuple(Template(name) for name in ([ignore] if isinstance(ignore, str) else ignore))
        self._entries: dict[str, tuple[Template, From | None]] = {}
        for path, entry in entries.items():
            template = Template(path)
            source = From(entry) if isinstance(entry, str) else entry
            if source is not None and not isinstance(cast(Any, source), From):
                raise LazyModelError(f"entry {path!r}: expected a From, a name or None, found {source!r}")
            if source is not None:
                check_captures(source, template)
            self._entries[path] = (template, source)
        self._patterns = {path: entry for path, entry in self._entries.items() if entry[0].captures}
        self._notes: tuple[tuple[str, list[str]], ...] = ()

    @staticmethod
    def suggest(checkpoint: Any, abstract: Mapping[str, AbstractVariable]) -> WeightMap:
        """A table proposed from names and shapes, for you to correct; nothing is read.

        Names are matched by the words they share (`q_proj` and `wq` are a query), where the variable's shape can be
        made of the tensor's: transposed, split into heads, stacked over layers or experts, cut from a fused tensor or
        joined. `str` of it is Python source to paste, with a comment above each entry that had a choice, and after it
        what nothing was found for; `unsure` has the former by path.

        Args:
            checkpoint: As of `map_checkpoint`.
            abstract: The abstract model.

        Returns:
            A table that may not fit: `check` says whether it does, and only you whether it is right.

        Raises:
            CheckpointError: `checkpoint` is none, or a LoRA adapter, whose tensors do not say how it is scaled.
            LazyModelError: `abstract` is no abstract model.

        Example:
            >>> weights = {"fc_up.weight": np.zeros((256, 64)), "fc_down.weight": np.zeros((64, 256))}
            >>> print(lm.WeightMap.suggest(weights, abstract))
            lm.WeightMap(
                {
                    "down/kernel": lm.From("fc_down.weight").T,
                    "up/kernel": lm.From("fc_up.weight").T,
                }
            )
        """
        checkpoint, abstract = given_checkpoint(checkpoint), _abstract(abstract)
        refuse_adapter((name for name in checkpoint if name not in abstract), described(checkpoint))
        variables = {path: variable.stored[0] for path, variable in abstract.items()}
        computed = [path for path, variable in abstract.items() if variable.is_key]
        found = suggest({name: np.shape(tensor) for name, tensor in checkpoint.items()}, variables, computed)
        mapping = WeightMap(found.entries, ignore=found.ignore)
        _, wrong = mapping.apply(checkpoint, abstract)
        for path, text in (wrong.misshapen | wrong.missing | wrong.ambiguous).items():
            found.unsure.setdefault(mapping._find(path)[0][0], f"does not fit:{text}")
        mapping.unsure = found.unsure
        mapping._notes = (("No tensor was found for", found.lacking), ("No variable was found for", found.unused))
        return mapping

    def check(self, checkpoint: Any, abstract: Mapping[str, AbstractVariable]) -> MappingReport:
        """Compares the table with a checkpoint and an abstract model, given as to `suggest`; reads headers only.

        `one_way` of the report says why a model cannot be saved with the table, where it cannot.
        """
        report = self.apply(given_checkpoint(checkpoint), _abstract(abstract))[1]
        if not report.ok:
            return report
        stored = {path: variable.stored for path, variable in abstract.items()}
        empty = {path: np.broadcast_to(np.zeros((), dtype), shape) for path, (shape, dtype) in stored.items()}
        try:
            self.write({path: lazy(array, path) for path, array in empty.items()})
        except LazyModelError as error:
            return dataclasses.replace(report, one_way=str(error))
        return report

    def write(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by name from arrays by variable path: the way back. Lazy tensors stay lazy.

        Raises:
            LazyModelError: A variable has no entry or several, or its entry cannot be undone; names it.
        """
        parts = Parts()
        for path, array in arrays.items():
            found = self._find(path)
            if len(found) != 1:
                what = f"has no entry in the table{closest(path, self._entries)}; give it one, None to leave it out"
                if found:
                    what = f"matches {' and '.join(repr(entry) for entry, _, _ in found)}; leave one of them out"
                raise LazyModelError(f"variable {path!r} {what}")
            ((_, source, captures),) = found
            if source is None or source.read_only:
                continue
            parts.path = path
            try:
                write_entry(source, array, captures, parts)
            except (ValueError, IndexError) as error:
                shape = list(np.shape(array))
                raise LazyModelError(f"{path!r}, shape {shape}, cannot be written as {source}: {error}") from error
        parts.check_complete()
        return parts.finished

    def _find(self, path: str) -> list[tuple[str, From | None, Captures]]:
        """The entries that match a path: pattern, source, captures."""
        if path in self._entries and path not in self._patterns:
            return [(path, self._entries[path][1], {})]
        matches = ((pattern, source, template.match(path)) for pattern, (template, source) in self._patterns.items())
        return [(pattern, source, captures) for pattern, source, captures in matches if captures is not None]

    def apply(
        self, checkpoint: Mapping[str, Any], abstract: Mapping[str, AbstractVariable]
    ) -> tuple[dict[str, LazyTensor], MappingReport]:
        """The variables' values, lazy, as far as nothing is wrong with them, and what is wrong."""
        ignored = {name for name in checkpoint if any(each.match(name) is not None for each in self._ignore)}
        left = [name for name in checkpoint if name not in abstract and name not in ignored]
        refuse_adapter(left, described(checkpoint))
        tensors, mapped, report = Tensors(checkpoint), dict[str, LazyTensor](), MappingReport()
        matched: set[str] = set()
        hint = _Hints()
        for path, variable in abstract.items():
            found = self._find(path)
            matched.update(pattern for pattern, _, _ in found)
            if not found:
                report.unmapped[path] = hint("unmapped", path, self._entries)
            elif len(found) > 1:
                report.ambiguous[path] = f" matches {' and '.join(repr(pattern) for pattern, _, _ in found)}"
            elif (source := found[0][1]) is None:
                report.left_out[path] = ""
            else:
                try:
                    mapped[path] = _value(variable, source, found[0][2], tensors)
                except Missing as error:
                    (name,) = error.args
                    report.missing[path] = f" takes {name!r}{hint('missing', name, checkpoint)}"
                except ValueError as error:
                    report.misshapen[path] = str(error)
        names = [name for _, source in self._entries.values() if source is not None for name in source.names]
        for name in checkpoint:
            if name in tensors.taken:
                continue
            if name in ignored:
                report.ignored[name] = ""
            else:
                report.unused[name] = hint("unused", name, names)
        for pattern, (_, source) in self._entries.items():
            if pattern not in matched and source is not None:
                report.unmatched[pattern] = hint("unmatched", pattern, abstract)
        return mapped, report

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"WeightMap({len(self)} entries)"

    def __str__(self) -> str:
        """Python source of the table, `lm` being this package."""
        lines = ["lm.WeightMap(", "    {"]
        for path, (_, source) in self._entries.items():
            if path in self.unsure:
                lines.append(f"        # unsure: {self.unsure[path]}")
            lines.append(f"        {_quoted(repr(path))}: {'None' if source is None else _source(source)},")
        lines.append("    }," if self._ignore else "    }")
        if self._ignore:
            lines.append(f"    ignore=[{', '.join(_quoted(repr(name.text)) for name in self._ignore)}],")
        lines.append(")")
        for what, names in self._notes:
            lines += [f"# {what}:", *(f"#   {name}" for name in names)] if names else []
        return "\n".join(lines)


def _abstract(given: Any) -> ModelSpec:
    if not isinstance(given, ModelSpec):
        raise LazyModelError(
            f"a table is for an abstract model, which lm.build_abstract returns; got {type(given).__name__}"
        )
    return given


def _quoted(text: str) -> str:
    """A name or a source as Python, in double quotes where that is all there is to it."""
    plain = '"' not in text and "\\" not in text
    return text.replace("'", '"') if plain else text


def _source(source: From) -> str:
    text = f"lm.{source!r}"
    return _quoted(text.removeprefix("lm.From(")[:-1] if text == f"lm.From({source.names[0]!r})" else text)


def _value(variable: AbstractVariable, source: From, captures: Captures, tensors: Tensors) -> LazyTensor:
    """One variable's value; ValueError says what is wrong with its shape."""
    expected, _ = variable.stored
    try:
        value = read_entry(source, captures, tensors, expected)
    except ValueError as error:
        raise ValueError(f" from {source}: {error}") from error
    found = tuple(value.shape)
    if found != expected:
        hint = _shape_hint(found, expected)
        raise ValueError(f" expects {list(expected)}, found {list(found)} from {source}{hint}")
    return value


class _Hints:
    """The closest names, for those findings that are listed: comparing all of many thousand takes long."""

    def __init__(self) -> None:
        self._seen: dict[str, set[tuple[str, ...]]] = {}

    def __call__(self, kind: str, name: str, names: Iterable[str]) -> str:
        seen, group = self._seen.setdefault(kind, set()), unnumbered(name)
        if group in seen or len(seen) >= LISTED:
            return ""
        seen.add(group)
        return closest(name, names)


def _shape_hint(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if found[::-1] == expected:
        return "; the shape matches if transposed: add .T, or remove the one that is there"
    if len(found) == len(expected) <= _PERMUTED and sorted(found) == sorted(expected):
        orders = itertools.permutations(range(len(found)))
        order = next(order for order in orders if tuple(found[axis] for axis in order) == expected)
        return f"; the shape matches with .transpose{order}"
    if math.prod(found) == math.prod(expected):
        return "; the number of elements is the same: split or merge axes with .rearrange"
    other = [axis for axis, (f, e) in enumerate(zip(found, expected, strict=False)) if f != e]
    if len(found) != len(expected) or len(other) != 1 or not expected[other[0]] or found[other[0]] % expected[other[0]]:
        return ""
    return f"; is it fused? Take .part(…, of={found[other[0]] // expected[other[0]]}, axis={other[0]})"
