"""A table proposed for a checkpoint and a model, from names and shapes alone: for a person to correct.

Families of names that differ in indexes alone are matched by the words they share, where one's shape can be made of
the other's: stacked, transposed, split into heads, cut from a fused tensor, joined. Whatever had a choice is said to
be unsure, and why.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from lazymodel._mapping.arrangements import Arrangement, Shape, Way, arrangements, ways
from lazymodel._mapping.entry import From
from lazymodel._mapping.names import Family, families

_ALIKE = 0.5  # of the words of two names shared: less is said to be little
_CLOSE = 0.08  # of a score: another that is no further off is named
_LEAST = 0.25  # of a score, below which names have nothing in common, unless nothing else has such a shape
# Buffers that a model computes, which checkpoints of PyTorch hold as well.
_BUFFERS = ("inv_freq", "position_ids", "masked_bias", "num_batches_tracked")


@dataclasses.dataclass
class Suggestion:
    """Entries of a `WeightMap`, and what is to be said of them."""

    entries: dict[str, From | None] = dataclasses.field(default_factory=dict[str, "From | None"])
    unsure: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # path → why
    ignore: list[str] = dataclasses.field(default_factory=list[str])
    lacking: list[str] = dataclasses.field(default_factory=list[str])  # variables that nothing was found for
    unused: list[str] = dataclasses.field(default_factory=list[str])  # tensors likewise


def suggest(tensors: Mapping[str, Shape], variables: Mapping[str, Shape], computed: Iterable[str]) -> Suggestion:
    """Proposes a table from names and shapes; `computed` are paths of variables that no checkpoint has, as keys are."""
    result = Suggestion()
    # Braces would be captures.
    tensors, variables = ({n: s for n, s in some.items() if not set(n) & set("{}")} for some in (tensors, variables))
    if tensors and all(variables.get(name) == shape for name, shape in tensors.items()):  # a checkpoint of the model
        result.entries = {family.template(): From(family.template()) for family in families(tensors)}
        missing = {path: shape for path, shape in variables.items() if path not in tensors}
        result.lacking = [f"{family.template()!r} {list(family.shape)}" for family in families(missing)]
        return result
    buffers = {name: shape for name, shape in tensors.items() if name.endswith(_BUFFERS)}
    result.ignore = [family.template() for family in families(buffers)]
    left_out = set(computed)
    keys, ours = (
        families({path: shape for path, shape in variables.items() if (path in left_out) == out})
        for out in (True, False)
    )
    result.entries = {family.template(): None for family in keys}
    matcher = _Matcher(ours, families({name: shape for name, shape in tensors.items() if name not in buffers}), result)
    matcher.match_one_to_one({"weight"})
    matcher.match_one_to_one({"bias", "mean", "variance"})
    matcher.cut_fused()
    matcher.join_separate()
    matcher.reuse_tied()
    result.lacking, result.unused = (
        [f"{family.template()!r} {list(family.shape)}" for family in left] for left in (matcher.ours, matcher.theirs)
    )
    order = {family.template(): place for place, family in enumerate(ours)}
    result.entries = dict(sorted(result.entries.items(), key=lambda item: order.get(item[0], len(order))))
    return result


class _Matcher:
    """What is left to match, and what was."""

    def __init__(self, ours: list[Family], theirs: list[Family], result: Suggestion) -> None:
        self.ours, self.theirs, self._result = list(ours), theirs, result
        # A word that many names have says little; one that a single kind of weight has says all.
        counts = Counter(word for family in (*ours, *theirs) for word in family.words)
        self._weight = {word: 1 / (1 + math.log(count)) for word, count in counts.items()}
        self._tables = [t for t in theirs if {"token", "embed"} <= t.words]
        self._layers: dict[str, str] = {}  # of variables whose weight was matched → of its tensor
        self._out_first = any(t.text[-1].endswith(".weight") for t in theirs)  # whether kernels are (out, in),
        self._certain = False  # and whether any kernel here says so

    def match_one_to_one(self, kinds: set[str]) -> None:
        """A family for a family, so that they are alike all in all; biases go with their kernels, matched before."""
        ours, theirs = ([f for f in some if f.kind in kinds] for some in (self.ours, self.theirs))
        scores, pairs = self._assigned(ours, theirs)
        if "weight" in kinds and (voted := self._voted([(ours[row], theirs[column]) for row, column in pairs])):
            self._out_first = voted[True] >= voted[False]
            self._certain = True
            scores, pairs = self._assigned(ours, theirs)
        columns = range(len(theirs))
        for row, column in pairs:
            v, t, least = ours[row], theirs[column], scores[row][column] - _CLOSE
            near = [repr(theirs[c].template()) for c in columns if c != column and scores[row][c] >= least]
            why = f"{' and '.join(near[:2])} would fit as well" if near else ""
            if not near and self._shared(v, t) < _ALIKE and self._layers.get(v.layer) != t.layer:
                why = "the names have little in common"
            self._layers.setdefault(v.layer, t.layer)
            self._add(v, [t], t.shape, why)
            self.ours.remove(v)
            self.theirs.remove(t)

    def _assigned(self, ours: list[Family], theirs: list[Family]) -> tuple[list[list[float]], list[tuple[int, int]]]:
        """All scores, and which pairs are taken: rows are variables, columns tensors."""
        # It comes with JAX, and importing it takes long for the little that is used.
        from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

        if not ours or not theirs:
            return [], []
        scores = [[self._score(v, t) for t in theirs] for v in ours]
        found = cast(Any, optimize).linear_sum_assignment(scores, maximize=True)
        pairs: list[tuple[int, int]] = []
        for row, column in zip(*(map(int, numbers) for numbers in found), strict=True):
            others = [scores[row][c] for c in range(len(theirs)) if c != column]
            others += [scores[r][column] for r in range(len(ours)) if r != row]
            if scores[row][column] >= _LEAST or (scores[row][column] and not any(others)):
                pairs.append((row, column))
        return scores, pairs

    def cut_fused(self) -> None:
        """Several variables from parts of one tensor: queries, keys and values, or a gate and what it gates."""
        for t in [t for t in self.theirs if len(t.roles) > 1]:
            members = self._of_roles(t, [(v, ways(v, t)) for v in self.ours])
            if members is None:
                continue
            sizes = [math.prod(found[0].wanted) for _, found in members]
            for axis in range(len(t.shape)) if self._out_first else reversed(range(len(t.shape))):
                rest = max(math.prod(t.shape) // max(t.shape[axis], 1), 1)
                extents = [size // rest for size in sizes]
                parts = [(*t.shape[:axis], extent, *t.shape[axis + 1 :]) for extent in extents]
                fit = all(arrangements(part, w[0].wanted) for part, (_, w) in zip(parts, members, strict=True))
                if sum(extents) == t.shape[axis] and fit:
                    of = len(extents) if len(set(extents)) == 1 else extents
                    why = f"taken to be {', '.join(t.roles)} one after the other; some models interleave them by head"
                    for index, (v, _) in enumerate(members):
                        self._add(v, [t], parts[index], why, part=(index, of, axis))
                    self.ours = [v for v in self.ours if all(v is not member for member, _ in members)]
                    self.theirs.remove(t)
                    break

    def join_separate(self) -> None:
        """One variable from several tensors, the other way round."""
        for v in [v for v in self.ours if len(v.roles) > 1]:
            members = self._of_roles(v, [(t, ways(v, t)) for t in self.theirs])
            tensors = [t for t, _ in members or ()]
            if not tensors or any(t.indexes != tensors[0].indexes for t in tensors):
                continue
            axis = self._joining_axis(tensors[0])
            shape = list(tensors[0].shape)
            shape[axis] = sum(t.shape[axis] for t in tensors)
            if any(arrangements(tuple(shape), way.wanted) for way in ways(v, tensors[0])):
                self._add(v, tensors, tuple(shape), f"joined in the order {', '.join(v.roles)}")
                self.ours.remove(v)
                self.theirs = [t for t in self.theirs if t not in tensors]

    def reuse_tied(self) -> None:
        """A head without a tensor of its own: many models use the table of words for it."""
        for v in [v for v in self.ours if "head" in v.words]:
            if t := next((t for t in self._tables if arrangements(t.shape, v.shape)), None):
                self._add(v, [t], t.shape, "there is no tensor of this name: tied to the words' table?", tied=True)
                self.ours.remove(v)

    def _of_roles(self, fused: Family, found: list[tuple[Family, list[Way]]]) -> list[tuple[Family, list[Way]]] | None:
        """For each role of a fused weight, what has it alone and shares most with it otherwise."""
        members: list[tuple[Family, list[Way]]] = []
        for role in fused.roles:
            fit = [(f, w) for f, w in found if f.roles == (role,) and f.kind == fused.kind and w]
            if not fit:
                return None
            members.append(max(fit, key=lambda one: self._shared(one[0], fused)))
        return members

    def _joining_axis(self, t: Family) -> int:
        return 0 if self._out_first else len(t.shape) - 1

    def _shared(self, v: Family, t: Family) -> float:
        """How much of what two names say both of them say."""
        total, common = (
            sum(self._weight[word] for words in some for word in words)
            for some in ((v.words, t.words), (v.words & t.words,) * 2)
        )
        return common / total if total else 0.0

    def _score(self, v: Family, t: Family) -> float:
        """How likely a variable is a tensor, from 0, where it cannot be, to 1, and more beside what was matched."""
        if v.kind != t.kind or math.prod(v.shape) * len(v.indexes) != math.prod(t.shape) * len(t.indexes):
            return 0.0
        found = [a for way in ways(v, t) for a in arrangements(t.shape, way.wanted)]
        if not found:
            return 0.0
        spelled = 2 * len(v.spelled & t.spelled) / max(len(v.spelled) + len(t.spelled), 1)
        beside = 0.5 * (self._layers.get(v.layer) == t.layer)
        kernel = self._certain and len(t.shape) == 2 and "embed" not in v.words
        turned = 0.3 * (kernel and all(a.out_first(v) != self._out_first for a in found))
        return 0.02 + max(0.78 * self._shared(v, t) + 0.2 * spelled + beside - turned, 0)

    def _voted(self, pairs: list[tuple[Family, Family]]) -> Counter[bool]:
        """How many kernels are (out, in), told from those whose shapes leave no choice."""
        votes = Counter[bool]()
        for v, t in pairs:
            found = [a for way in ways(v, t) for a in arrangements(t.shape, way.wanted)]
            if len(found) == 1 and len(t.shape) == 2 and "embed" not in v.words:
                votes[found[0].out_first(v)] += 1
        return votes

    def _add(
        self,
        v: Family,
        tensors: Sequence[Family],
        shape: Shape,
        why: str,
        *,
        part: tuple[int, int | list[int], int] | None = None,
        tied: bool = False,
    ) -> None:
        """An entry: the variable from these tensors, or a part of one, which then has this shape."""
        fitting = [(way, found) for way in ways(v, tensors[0]) if (found := arrangements(shape, way.wanted))]
        way, found = fitting[0]
        chosen, reasons = self._chosen(v, shape, way, found), [why] if why else []
        if len(found) > 1 and "embed" not in v.words:
            stored = ("(out, in)" if self._out_first else "(in, out)") if len(shape) == 2 else "as is usual"
            like = ", as others here are" if len(shape) == 2 and self._certain else ""
            ways_text = f"{list(shape)} can become {list(way.wanted)} in {len(found)} ways"
            reasons.append(f"{ways_text}; taken to be {stored}{like}")
        if len(fitting) > 1:
            reasons.append("its indexes could be exchanged")
        names = [tensor.template(way.captures) for tensor in tensors]
        source, axis = From(*names), self._joining_axis(tensors[0])
        if len(tensors) > 1:
            source = From(*names, axis=axis, sizes=[tensor.shape[axis] for tensor in tensors])
        source = chosen.add(source if part is None else source.part(*part), v, shape)
        for capture in reversed(way.stacked):
            source = source.stack(capture, way.axis)
        self._result.entries[v.template()] = source.unsaved() if tied else source
        if reasons:
            self._result.unsure[v.template()] = "; ".join(reasons)

    def _chosen(self, v: Family, shape: Shape, way: Way, found: list[Arrangement]) -> Arrangement:
        """The likeliest of them: tables of words as they are, kernels as most of this checkpoint are stored."""
        if "embed" in v.words or len(shape) != 2:
            return next((a for a in found if a.usual(v)), found[0])
        return next((a for a in found if a.out_first(v) == self._out_first), found[0])
