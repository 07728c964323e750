"""`WeightMap`: a table that maps tensors to variables, usable in both directions.

All values are `LazyTensor`s, so nothing is read here. A table has an entry for each variable path, or for a pattern of
paths:

    WeightMap({
        "embed/embedding": "model.embed_tokens.weight",
        "layers/{layer}/up/kernel": From("model.layers.{layer}.mlp.up_proj.weight").T,
        "blocks/query/kernel": From("h.{layer}.qkv.weight").T.part(0, of=3, axis=1).stack("layer"),
    })
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import AbstractVariable, Captures, Template, flatten_paths, named_leaves
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._extras import extra
from lazymodel._mapping.entry import (
    From,
    MissingTensor,
    Tensors,
    TensorWriter,
    check_captures,
    filled_names,
    read_entry,
    unstacked,
    write_entry,
)
from lazymodel._mapping.resolve import given_checkpoint, given_tensors
from lazymodel._mapping.source import MappedCheckpoint, described, refuse_adapter
from lazymodel._show.text import LISTED, closest, first_lines, fold, grouped_names, unnumbered
from lazymodel._tensors.lazy import LazyTensor, lazy, left_over


@dataclasses.dataclass(frozen=True)
class MappingReport:
    """The mapping that a table gives for a checkpoint and a model, found without reading a tensor.

    Each field maps names or paths to further text.
    """

    unused: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # tensors that no entry uses
    missing: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths whose tensors are missing
    ambiguous: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths that several entries match
    misshapen: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths that get another shape
    unmatched: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # entries that match no path
    unmapped: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths without an entry: initialized
    left_out: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # paths whose entry is None: likewise
    ignored: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # tensors that the table ignores
    one_way: str = ""  # why `save` cannot invert a table that matches; empty if it can

    @property
    def ok(self) -> bool:
        """Returns True without problems; variables without an entry, or left out on purpose, are not problems."""
        return not self.problems()

    def problems(self) -> list[str]:
        """One text for each kind of finding, except unmapped variables."""
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
    """A line for each group of names that differ only in numbers, with the text of the first."""
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
            captures takes precedence over patterns; a variable that two patterns match raises.
        ignore: Names of tensors, with captures or without, that may be left unused.

    Raises:
        LazyModelError: An entry has a capture in its names that is neither in its path nor stacked.

    Example:
        >>> weights = lm.WeightMap({"{layer}/kernel": lm.From("{layer}.weight").T})
        >>> weights.check({"up.weight": np.zeros((256, 64)), "down.weight": np.zeros((64, 256))}, abstract).ok
        True
    """

    def __init__(self, entries: Mapping[str, From | str | None], *, ignore: Iterable[str] = ()) -> None:
        self.unsure: dict[str, str] = {}  # ambiguous entries of `suggest`: path → why
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
    def suggest(checkpoint: Any, abstract: Any) -> WeightMap:
        """A table proposed from names and shapes, for you to correct; nothing is read.

        Both may be models, such as a trainer's and a sampler's: what has the same name and shape in both is the same.

        Names are matched by the words they share (`q_proj` and `wq` are a query), if the tensor's shape can be turned
        into the variable's: transposed, split into heads, stacked over layers or experts, taken out of a stack, cut
        from a fused tensor or joined. `str` of it is Python source to paste, with a comment above each ambiguous entry,
        followed by tensors and variables without a match; `unsure` has the comments by path.

        Args:
            checkpoint: As for `map_checkpoint`. An optimizer's state is ignored unless the model has one.
            abstract: The abstract model, or a live one.

        Returns:
            A table that may not match: `check` shows mismatches, but only you know if it is right.

        Raises:
            CheckpointError: `checkpoint` is not one, or is a LoRA adapter, whose tensors do not contain its scale.
            LazyModelError: `abstract` is not a model.

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
        checkpoint, model = given_checkpoint(checkpoint), _variables(abstract)
        refuse_adapter((name for name in checkpoint if name not in model), described(checkpoint))
        variables = {path: variable.stored[0] for path, variable in model.items()}
        computed = [path for path, variable in model.items() if variable.is_key]
        found = extra("suggest")({name: np.shape(tensor) for name, tensor in checkpoint.items()}, variables, computed)
        mapping = WeightMap(found.entries, ignore=found.ignore)
        _, wrong = mapping.apply(checkpoint, model)
        for path, text in (wrong.misshapen | wrong.missing | wrong.ambiguous).items():
            found.unsure.setdefault(mapping.entries_of(path)[0][0], f"does not fit:{text}")
        mapping.unsure = found.unsure
        mapping._notes = (("No tensor was found for", found.missing), ("No variable was found for", found.unused))
        return mapping

    @staticmethod
    def recorded(abstract: Mapping[str, AbstractVariable]) -> WeightMap:
        """The table of what an abstract model loads its variables from, as its loader read them; nothing is read.

        `lazymodel_keras.abstract_from_preset` returns such a model: of a Hugging Face folder, this is the table of
        KerasHub's converter, one entry for layers that are alike. `str` of it ends with the variables for which there
        is no entry, such as sums of tensors.

        Args:
            abstract: The abstract model.

        Raises:
            LazyModelError: It is not one, or it loads no variables.
        """
        values = {path: _abstract(abstract).sources.get(path) for path in abstract}
        entries, left = extra("recorded")(values, _abstract(abstract).framework.tensors(), values)
        if not any(entries.values()):
            raise LazyModelError(
                f"{_abstract(abstract).name} loads no variables by itself; lm.WeightMap.suggest(checkpoint, abstract) "
                "proposes a table"
            )
        unused = [tensor.name for tensor in _abstract(abstract).unused]
        mapping = WeightMap(entries, ignore=unused)
        mapping._notes = (("No entry makes", left),)
        return mapping

    def check(self, checkpoint: Any, abstract: Any) -> MappingReport:
        """Compares the table with a checkpoint and a model, given as to `suggest`; reads headers only.

        `one_way` of the report is the reason why a model cannot be saved with the table, if it cannot.
        """
        checkpoint, model = given_checkpoint(checkpoint), _variables(abstract)
        report = self.apply(checkpoint, model)[1]
        if not report.ok:
            return report
        stored = {path: variable.stored for path, variable in model.items()}
        empty = {path: np.broadcast_to(np.zeros((), dtype), shape) for path, (shape, dtype) in stored.items()}
        try:
            written = self.write({path: lazy(array, path) for path, array in empty.items()})
        except LazyModelError as error:
            return dataclasses.replace(report, one_way=str(error))
        for name, tensor in written.items():  # such as a stack of which the model has only some layers
            if name in checkpoint and (shape := np.shape(checkpoint[name])) != tensor.shape:
                one_way = f"{name!r} would be written as {list(tensor.shape)}, the checkpoint has {list(shape)}"
                return dataclasses.replace(report, one_way=one_way)
        return report

    def write(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by name from arrays by variable path: the inverse direction. Lazy tensors stay lazy.

        Raises:
            LazyModelError: A variable has no entry or several, or its entry cannot be inverted; names it.
        """
        parts = TensorWriter()
        for path, array in arrays.items():
            if not (found := self.entries_of(path)):
                hint = f"{closest(path, self._entries)}; give it one, None to leave it out"
                raise LazyModelError(f"variable {path!r} has no entry in the table{hint}")
            if len(found) > 1:
                both = " and ".join(repr(entry) for entry, _, _ in found)
                raise LazyModelError(f"variable {path!r} matches {both}; leave one of them out")
            ((_, source, captures),) = found
            if source is None or source.read_only:
                continue
            with parts.writing(path, source, np.shape(array)):
                write_entry(source, array, captures, parts)
        parts.complete()
        return parts.finished

    def adapters(
        self, checkpoint: Any, adapter: Any, abstract: ModelSpec, *, scale: float | None = None
    ) -> MappedCheckpoint:
        """A checkpoint and a LoRA adapter under a model's own paths: the adapter's pairs become those of the model.

        The table is that of the base. A pair goes where its base goes: transposed, stacked, split into heads. Pairs of
        the model that the adapter does not have are initialized, as are those that the table does not know.

        Args:
            checkpoint: That of the base, as for `merge`.
            adapter: What `open_adapter` returned. What it replaces, and biases, become values of the base.
            abstract: The model, with pairs: of Flax NNX (`nnx.LoRA`, `nnx.LoRALinear`), Qwix, or of other layers with
                variables `lora_a` and `lora_b` next to their kernel, or `kernel_lora_a`, `kernel_lora_b`.
            scale: The factor with which the model multiplies `a @ b`, such as `alpha / rank`. It is known of NNX, 1,
                and of NNX modules of Qwix; otherwise it must be given. The rest of the adapter's `alpha / r` is
                multiplied into `b`, which is exact for a power of two and else rounds each number once.

        Returns:
            A mapping for `plan` and `materialize`.

        Raises:
            CheckpointError: The adapter is of another base, or is more than products (DoRA, experts); the model has no
                pair for a tensor that it changes, or one in which the product cannot be kept: merge it then. As for
                `map_checkpoint`.
            LazyModelError: The model has no pairs, or their scale is unknown.

        Example:
            >>> zeros = jax.numpy.zeros
            >>> pair = {"lora_a": zeros((64, 4)), "lora_b": zeros((4, 256))}
            >>> tuned = lm.build_abstract(lambda: {"up": {"kernel": zeros((64, 256)), **pair}})
            >>> weights = lm.WeightMap({"up/kernel": lm.From("up.weight").T})
            >>> base = {"up.weight": np.zeros((256, 64), "float32")}
            >>> pairs = weights.adapters(base, lm.open_adapter("adapter"), tuned, scale=1.0)
            >>> tuned.materialize(pairs)["up"]["lora_b"].max()  # lora_alpha / r is 2
            Array(2., dtype=float32)
        """
        return extra("kept_pairs")(self, checkpoint, adapter, abstract, scale)

    def tensor_names(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The names of the tensors that variables of these shapes are made of, as far as the table has entries."""
        names: set[str] = set()
        for path, shape in shapes.items():
            for _, source, captures in self.entries_of(path):
                if source is not None:
                    places = unstacked(source, captures, shape)
                    names.update(name for _, one, known in places for name in filled_names(one, known))
        return names

    @property
    def paths(self) -> list[str]:
        """The paths of its entries, some of them patterns."""
        return list(self._entries)

    def entries_of(self, path: str) -> list[tuple[str, From | None, Captures]]:
        """The entries that match a path: pattern, source, captures."""
        if path in self._entries and path not in self._patterns:
            return [(path, self._entries[path][1], {})]
        matches = ((pattern, source, template.match(path)) for pattern, (template, source) in self._patterns.items())
        return [(pattern, source, captures) for pattern, source, captures in matches if captures is not None]

    def apply(
        self, checkpoint: Mapping[str, Any], abstract: Mapping[str, AbstractVariable]
    ) -> tuple[dict[str, LazyTensor], MappingReport]:
        """The values of variables without problems, as lazy tensors, and a report."""
        ignored = {name for name in checkpoint if any(each.match(name) is not None for each in self._ignore)}
        left = [name for name in checkpoint if name not in abstract and name not in ignored]
        refuse_adapter(left, described(checkpoint))
        tensors, mapped, report = Tensors(checkpoint), dict[str, LazyTensor](), MappingReport()
        matched: set[str] = set()
        hinted: dict[str, set[tuple[str, ...]]] = {}

        def hint(kind: str, name: str, names: Iterable[str]) -> str:
            """The closest names, for findings that are listed: comparing all of many thousand takes long."""
            groups, group = hinted.setdefault(kind, set()), unnumbered(name)
            if group in groups or len(groups) >= LISTED:
                return ""
            groups.add(group)
            return closest(name, names)

        for path, variable in abstract.items():
            found = self.entries_of(path)
            matched.update(pattern for pattern, _, _ in found)
            if not found:
                report.unmapped[path] = hint("unmapped", path, self._entries)
            elif len(found) > 1:
                report.ambiguous[path] = f" matches {' and '.join(repr(pattern) for pattern, _, _ in found)}"
            elif (source := found[0][1]) is None:
                report.left_out[path] = ""
            else:
                expected = variable.stored[0]
                try:
                    value = read_entry(source, found[0][2], tensors, expected)
                    if (shape := tuple(value.shape)) != expected:
                        padded = extra("resized")(shape, expected, source)
                        fix = "use .rearrange or .part" if padded is None else f"if it is padding, use {padded}"
                        fix = "add .T or remove the existing one" if shape[::-1] == expected else fix
                        raise ValueError(f"expects {list(expected)}, found {list(shape)}; {fix}")
                    mapped[path] = value
                except MissingTensor as error:
                    report.missing[path] = f" takes {error.name!r}{hint('missing', error.name, checkpoint)}"
                except ValueError as error:
                    report.misshapen[path] = f" from {source}: {error}"
        for group in abstract.alike().values() if isinstance(abstract, ModelSpec) else ():
            if any(path in mapped for path in group):  # then the others get the same values
                for path in group:
                    report.missing.pop(path, None)
        names = [name for _, source in self._entries.values() if source is not None for name in source.names]
        for name in left_over(checkpoint, tensors.taken):
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
        """Python source of the table; `lm` is this package."""
        lines = ["lm.WeightMap(", "    {"]
        for path, (_, source) in self._entries.items():
            lines += [f"        # unsure: {self.unsure[path]}"] if path in self.unsure else []
            lines.append(f"        {_quoted(repr(path))}: {'None' if source is None else _source(source)},")
        ignored = ", ".join(_quoted(repr(name.text)) for name in self._ignore)
        lines += ["    },", f"    ignore=[{ignored}],", ")"] if ignored else ["    }", ")"]
        for what, names in self._notes:
            lines += [f"# {what}:", *(f"#   {name}" for name in names)] if names else []
        return "\n".join(lines)


def _abstract(given: Any) -> ModelSpec:
    if not isinstance(given, ModelSpec):
        raise LazyModelError(
            f"a table is for an abstract model here, as lm.build_abstract returns it; got {type(given).__name__}"
        )
    return given


def _variables(given: Any) -> Mapping[str, AbstractVariable]:
    """The variables of an abstract or a live model."""
    if isinstance(given, ModelSpec):
        return given.as_read()
    arrays = named_leaves(given, (jax.Array, np.ndarray))
    if not arrays:
        raise LazyModelError(
            f"a table is for a model, abstract as lm.build_abstract returns it, or live; got {type(given).__name__}"
        )
    return {path: AbstractVariable(path, tuple(array.shape), array.dtype) for path, array in arrays.items()}


def _quoted(text: str) -> str:
    """A name or a source as Python, in double quotes if no escapes are needed."""
    plain = '"' not in text and "\\" not in text
    return text.replace("'", '"') if plain else text


def _source(source: From) -> str:
    text = f"lm.{source!r}"
    return _quoted(text.removeprefix("lm.From(")[:-1] if text == f"lm.From({source.names[0]!r})" else text)


_ReadFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Any]"


def map_checkpoint(
    checkpoint: Any,
    mapping: WeightMap | _ReadFunction,
    abstract: Any = None,
    *,
    strict: bool = True,
) -> MappedCheckpoint:
    """A checkpoint under a model's own paths; nothing is read before a device requests it.

    Args:
        checkpoint: Tensor name → lazy tensor or array, such as `open_checkpoint` returns; or a model, live or abstract,
            or another pytree of arrays, with the names that `save` gives.
        mapping: A `WeightMap`; or a function of the checkpoint that returns the model's structure, or a flat dict of
            paths, built from its tensors with NumPy: `w.T`, `w.reshape`, slices, `np.split`, `np.stack`,
            `np.concatenate`, `astype` and arithmetic with a scalar are computed while shards are read. Other functions
            of NumPy work too, and read that one tensor whole. None in its result leaves a variable out. A function
            under `jax.jit` is written with JAX instead, such as the converter of another library: it is traced, and
            must only move or cast elements.
        abstract: The abstract model, or a live one. A table requires it; a function does not use it.
        strict: True raises for anything that `WeightMap.check` finds wrong. False leaves it out with
            a warning. A variable without an entry is neither: `materialize` decides how it gets a value.

    Returns:
        A mapping for `plan` and `materialize`.

    Raises:
        CheckpointError: The table does not match, the function uses a missing tensor, or `checkpoint` is not a
            checkpoint.
        LazyModelError: A table without an abstract model; `mapping` is neither a table nor a function, or is jitted
            and cannot be traced or computes values.

    Example:
        >>> weights = {"up.weight": np.zeros((256, 64), "float32")}
        >>> lm.map_checkpoint(weights, lambda w: {"up": {"kernel": w["up.weight"].T}})["up/kernel"].shape
        (64, 256)
        >>> lm.map_checkpoint(weights, jax.jit(lambda w: {"up": {"kernel": jax.numpy.transpose(w["up.weight"])}}))
        MappedCheckpoint(1 variables)
    """
    checkpoint = given_checkpoint(checkpoint)
    if not isinstance(mapping, WeightMap):
        if not callable(cast(Any, mapping)):
            raise LazyModelError(f"a mapping is a WeightMap or a function of the checkpoint; got {mapping!r}")
        if hasattr(mapping, "trace"):
            result, taken = extra("traced_result")(mapping, given_tensors(checkpoint), _described(mapping))
        else:
            tensors = Tensors(checkpoint)
            result, taken = mapping(tensors), tensors.taken
        flat = flatten_paths(result)
        unused = left_over(checkpoint, taken)
        return MappedCheckpoint({name: lazy(value, name) for name, value in flat.items()}, checkpoint, unused)
    if abstract is None:
        raise LazyModelError("a WeightMap is applied for a model: pass map_checkpoint the abstract model too")
    mapped, report = mapping.apply(checkpoint, _variables(abstract))
    if not report.ok:
        name = abstract.name if isinstance(abstract, ModelSpec) else f"the {type(abstract).__name__}"
        text = f"{described(checkpoint)} does not fit {name} as mapped.\n" + "\n".join(report.problems())
        if strict:
            raise CheckpointError(
                f"{text}\nFix the table (its `ignore` names tensors that no variable needs), or pass "
                "strict=False to leave these out."
            )
        warn(text)
    return MappedCheckpoint(mapped, checkpoint, list(report.unused))


def _described(jitted: Any) -> str:
    return f"the jitted function {getattr(jitted, '__name__', '')}".rstrip()
