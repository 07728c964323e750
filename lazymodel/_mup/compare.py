"""`mup`: what grows from one abstract build to another, and so what the model's initial values and learning rates are.

Responsible for pairing the variables of two builds and for the result, `Mup`. The tables are `_mup/rules`, what a
dimension is for `_mup/sides`; initializers are changed by `_transform/reinitialize`, optimizers by `_mup/optimizer`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from lazymodel._abstract.paths import Template, rule_path
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._mup.optimizer import scaled_optimizer
from lazymodel._mup.rules import KINDS, Kind, Rule, Scaling, deepened, kind_of, scaling
from lazymodel._mup.sides import Grown, Side, Sides, find_sides
from lazymodel._programs.moments import Moments, is_random, moments
from lazymodel._sharding.describe import Described, describe
from lazymodel._show.table import Table, Tabled
from lazymodel._show.text import closest, first_lines, fold, grouped_by, plural, unnumbered

_MAX_ROWS = 60
_RULES: tuple[Rule, ...] = ("adam", "sgd")


@dataclasses.dataclass(frozen=True)
class MupVariable:
    """What muP says of one variable.

    Attributes:
        path: Its path in the model.
        base_shape: Its shape in the base model.
        shape: Its shape in the model.
        kind: `input` (fixed size to width), `hidden`, `output` (width to fixed size), `vector` or `fixed`.
        fan_in: How many times the base's its fan-in is.
        fan_out: How many times the base's its fan-out is.
        base_std: Standard deviation of its initial values in the base model; None where nothing says it, such as of
            what is not drawn at random.
        own_std: The same of the model's own initializer.
        std: What it is to be: the base's, scaled by the width.
        adam: What Adam's learning rate is multiplied by.
        sgd: What SGD's is.
        source: From what its fan-in and fan-out were inferred.
    """

    path: str
    base_shape: tuple[int, ...]
    shape: tuple[int, ...]
    kind: Kind
    fan_in: float
    fan_out: float
    base_std: float | None
    own_std: float | None
    std: float | None
    adam: float
    sgd: float
    source: str

    def multiplier(self, rule: Rule) -> float:
        return self.adam if rule == "adam" else self.sgd


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mup(Tabled, Mapping[str, MupVariable]):
    """The maximal update parametrization of a model, relative to a smaller one: by path, a `MupVariable`.

    Attributes:
        variables: Path to what is said of it.
        factors: Path to what the model's own initial values are multiplied by, of those that change.
        output_multiplier: What the code multiplies logits by: 1, unless the embedding is also the readout.
        branch_multiplier: What the code multiplies each residual branch by: 1, unless `depth` is given.
        head_dims: Size of an attention head in the base and in the model; None where that is not known.
        name: What the model calls itself.

    Example:
        >>> def narrow(key):
        ...     return jax.tree.map(lambda kernel: kernel[:64, :64], init(key))
        >>> scheme = lm.mup(lm.build_abstract(narrow, jax.random.key(0)), abstract)
        >>> scheme["down/kernel"].kind, scheme["down/kernel"].adam, round(scheme["down/kernel"].std, 4)
        ('output', 0.25, 0.25)
    """

    variables: Mapping[str, MupVariable]
    factors: Mapping[str, float]
    output_multiplier: float
    branch_multiplier: float
    head_dims: tuple[int, int] | None
    name: str
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> MupVariable:
        try:
            return self.variables[path]
        except KeyError:
            raise KeyError(f"muP says nothing of {path!r}{closest(path, self.variables)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    @property
    def attention_scale(self) -> float:
        """What the code multiplies attention's products of queries and keys by: sqrt(base head size) / head size.

        At the base's head size it is the usual 1 / sqrt(head size) (Tensor Programs V, definition 4.1).

        Raises:
            LazyModelError: The size of a head cannot be told from shapes.
        """
        if self.head_dims is None:
            raise LazyModelError(
                f"the head size of {self.name} cannot be told from its shapes; pass mup(…, head_dim=(base's, model's))"
            )
        return math.sqrt(self.head_dims[0]) / self.head_dims[1]

    def multipliers(self, rule: Rule) -> dict[str, float]:
        """Path to what the learning rate is multiplied by, of `"adam"` or `"sgd"`."""
        if rule not in _RULES:
            raise LazyModelError(f"a rule is {' or '.join(map(repr, _RULES))}; got {rule!r}")
        return {path: variable.multiplier(rule) for path, variable in self.items()}

    def optimizer(self, tx: Any, rule: Rule | None = None) -> Any:
        """The Optax optimizer with each variable's updates multiplied by its learning rate multiplier.

        Its state is that of `tx`, so `with_optimizer` and checkpoints take one as the other. Weight decay within `tx`
        is multiplied as well; for decay that does not change with the width chain it behind:
        `optax.chain(scheme.optimizer(optax.adam(rate)), optax.add_decayed_weights(-rate * decay))`.

        Args:
            tx: An Optax gradient transformation, which has its parameters by the model's own paths.
            rule: `"adam"` for optimizers that do not see how large a gradient is (Adam, AdamW, Lion, RMSProp),
                `"sgd"` for those whose updates are as large as it. None tries which, on a few numbers. Those that scale
                updates by the size of a parameter or of a whole matrix (LAMB, LARS, Adafactor, Muon, Shampoo) are
                neither: Tensor Programs V has no table for them.

        Raises:
            LazyModelError: It is neither, or is given arrays that are no variables of the model.

        Example:
            >>> scheme = lm.mup(abstract, abstract)
            >>> trained = abstract.reinitialize(scheme).with_optimizer(scheme.optimizer(optax.adam(1e-2)))
        """
        return scaled_optimizer(tx, self.multipliers, rule, self.name)

    def table(self) -> Table:
        """A row for variables that differ only in numbers."""
        groups = grouped_by(self.values(), lambda row: (unnumbered(row.path), dataclasses.replace(row, path="")))
        grid = [
            (
                fold([row.path for row in rows]),
                f"{len(rows):,}",
                _growth(rows[0]),
                rows[0].kind,
                _number(rows[0].own_std),
                _number(rows[0].std),
                _number(rows[0].adam),
                _number(rows[0].sgd),
                rows[0].source,
            )
            for rows in itertools.islice(groups.values(), _MAX_ROWS)
        ]
        lines = [f"{kind}: {KINDS[kind]}" for kind in KINDS if any(row.kind == kind for row in self.values())]
        lines = ["; ".join(lines), *self.notes]
        if len(groups) > _MAX_ROWS:
            lines.insert(0, f"… and {len(groups) - _MAX_ROWS:,} more rows")
        columns = ("variable", "count", "base → model", "kind", "std", "muP's", "Adam ×", "SGD ×", "inferred from")
        title = f"muP of {self.name}: {plural(len(self), 'variable')}, relative to the base model"
        return Table(title, columns, grid, frozenset({"count", "std", "muP's", "Adam ×", "SGD ×"}), lines)


def mup(
    base: Any,
    model: Any,
    *,
    axes: Mapping[str, Sequence[Side]] | None = None,
    tied: bool | None = None,
    head_dim: tuple[int, int] | None = None,
    depth: float | None = None,
) -> Mup:
    """The maximal update parametrization of a model, from two abstract builds: what differs between them is its width.

    Hyperparameters that are best for the base model are then about best for the model (Yang et al., Tensor Programs V,
    2022, Table 3, and Table 8 for tied embeddings). `model.reinitialize(scheme)` sets the initial values,
    `scheme.optimizer(tx)` the learning rates; what the code has to use itself are `scheme.attention_scale` and
    `scheme.output_multiplier`. Nothing is allocated. At the base's own width all of it changes nothing.

    Variables are paired by path, or by their order among those whose paths differ in numbers only. Which dimensions are
    summed over is told from names and, where these say nothing, from what the initializers took for the fan-in; the
    table says which.

    Args:
        base: An abstract model, such as `lazymodel.build_abstract` returns, of the size that was tuned.
        model: The same at the size that is to be trained.
        axes: What the dimensions of variables are for that the names do not tell, or wrongly: path regex
            (`re.fullmatch`) to `"in"`, `"out"` or None (it counts layers or experts) for each dimension.
        tied: Whether the embedding is the readout too. None says so of a model with an embedding and no readout, and
            not of one with a readout of as many words.
        head_dim: Sizes of an attention head in the base and in the model, where shapes do not tell.
        depth: For models that differ in depth, the power of depth by which residual branches shrink: 0.5 as in Tensor
            Programs VI, 1 as in CompleteP; the code then multiplies each branch by `scheme.branch_multiplier`. None
            leaves depth alone.

    Raises:
        LazyModelError: The builds do not belong together, or it is ambiguous what dimensions are for; the message
            lists these with what to pass as `axes`.

    Example:
        >>> def narrow(key):
        ...     return jax.tree.map(lambda kernel: kernel[:64, :64], init(key))
        >>> scheme = lm.mup(lm.build_abstract(narrow, jax.random.key(0)), abstract)
        >>> scheme.multipliers("adam")
        {'down/kernel': 0.25, 'up/kernel': 1.0}
        >>> model = abstract.reinitialize(scheme).materialize()
    """
    for what, given in {"base": base, "model": model}.items():
        if not isinstance(given, ModelSpec):
            raise LazyModelError(f"mup compares abstract models, of build_abstract; {what} is a {type(given).__name__}")
    grown = _grown(base, model)
    answers = _answers(grown, axes or {})
    found = {path: find_sides(each, answers.get(path)) for path, each in grown.items()}
    if unknown := [_question(grown[path]) for path, sides in found.items() if sides is None]:
        raise LazyModelError(
            f"it is ambiguous what the growing dimensions of {plural(len(unknown), 'variable')} are for. Say of each "
            'dimension whether it is summed over, "in", or given back, "out" (None: it counts layers or experts):\n'
            + "\n".join(first_lines(list(dict.fromkeys(unknown))))
        )
    deeper = _deeper(base, model, grown, depth)
    rows: dict[str, MupVariable] = {}
    factors: dict[str, float] = {}
    for path, each in grown.items():
        row = rows[path] = _row(each, cast(Sides, found[path]), deeper.get(path, 1.0), depth)
        if row.kind != "fixed" and any(std is not None and math.isnan(std) for std in each.stds):
            raise LazyModelError(
                f"{path!r}: the standard deviation of its initial values cannot be told from its initializer "
                f"({model[path].origin}); give it one that draws normal or uniform numbers, in both builds: "
                "reinitialize(pattern, initializer, key=0)"
            )
        exact = 4 * float(jax.numpy.finfo(model[path].dtype).eps)
        if row.std and row.own_std and not math.isclose(row.std, row.own_std, rel_tol=exact):
            factors[path] = row.std / row.own_std
    output, notes = _output_multiplier(grown, rows, tied)
    heads = head_dim or _head_dims(grown)
    if heads is not None:
        scale = math.sqrt(heads[0]) / heads[1]
        notes.append(f"attention_scale = {scale:.4g}: √{heads[0]} / {heads[1]}, for queries times keys")
    layers = max(deeper.values(), default=1.0)
    branch = 1.0 if depth is None else layers**-depth
    if depth is not None:
        notes.append(f"branch_multiplier = {branch:.4g}, of each residual branch: {layers:g} times the base's depth")
    return Mup(rows, factors, output, branch, heads, model.name, tuple(notes))


# Two builds, one list of variables ------------------------------------------------------------------------------------


def _considered(model: ModelSpec) -> dict[str, AbstractVariable]:
    """The variables that are trained, without optimizer state."""
    floats = {path: v for path, v in model.items() if jax.numpy.issubdtype(v.dtype, np.inexact) and v.follows is None}
    return {path: variable for path, variable in floats.items() if variable.trainable}


def _template(path: str) -> Hashable:
    """What paths of one model have in common with the other's: Keras numbers layers over all models of a process."""
    return unnumbered(re.sub(r"_\d+(?=/|$)", "", rule_path(path)))


def _pairs(base: Mapping[str, AbstractVariable], model: Mapping[str, AbstractVariable]) -> Iterator[tuple[str, str]]:
    """(path in the base, path in the model) of every variable of the model."""
    known = grouped_by(base, _template)
    for template, paths in grouped_by(model, _template).items():
        others = known.pop(template, [])
        if not others:
            raise LazyModelError(f"the base model has no variable like {paths[0]!r}{closest(paths[0], base)}")
        if len(others) == len(paths):
            yield from zip(others, paths, strict=True)
            continue
        alike = len({(base[path].shape, base[path].origin) for path in others}) == 1
        for path in paths:
            if not alike and path not in base:
                raise LazyModelError(
                    f"{path!r} may be any of {', '.join(map(repr, others[:3]))} …, which have other shapes: there are "
                    f"{len(others)} in the base model and {len(paths)} in the model. Compare builds of equal depth"
                )
            yield (path if path in base else others[-1]), path
    if known:
        (first, *_), *_ = known.values()
        raise LazyModelError(f"the model has no variable like the base's {first!r}{closest(first, model)}")


def _grown(base: ModelSpec, model: ModelSpec) -> dict[str, Grown]:
    before, after = _considered(base), _considered(model)
    if not after:
        raise LazyModelError(f"{model.name} has no floating-point variable that is trained")
    described = describe(after)
    known = [_moments(spec, paths) for spec, paths in ((base, before), (model, after))]
    found: dict[str, Grown] = {}
    for other, path in _pairs(before, after):
        if len(before[other].shape) != len(shape := after[path].shape):
            raise LazyModelError(
                f"{path!r} has shape {shape}, and {other!r} of the base model {before[other].shape}: builds of one "
                "model have variables of as many dimensions"
            )
        follows = described[path].follows
        weight: Described | None = described.get(follows) if follows else None
        pair = (known[0].get(other), known[1].get(path))
        narrow = after[path].dtype.itemsize < 4
        found[path] = Grown(path, before[other].shape, shape, described[path], weight, pair, narrow)
    return {path: found[path] for path in after}


def _moments(model: ModelSpec, paths: Mapping[str, Any]) -> dict[str, Moments | None]:
    """What initial values are drawn from; None where nothing is drawn at random, NaN where it is not known."""
    found: dict[str, Moments | None] = {}
    known: dict[Hashable, tuple[Moments | None, ...]] = {}
    for recipe in model.recipes:
        if not any(path in paths for path in recipe.paths):
            continue
        numbers = [each for each in recipe.inputs if each.dtype.kind in "fVi" and each.size == 1]
        key = (recipe.signature, *(each.tobytes() for each in numbers))
        if key not in known:
            known[key] = moments(recipe)
            if None in known[key] and is_random(recipe):
                known[key] = tuple(each or Moments(math.nan, math.nan) for each in known[key])
        found.update(zip(recipe.paths, known[key], strict=True))
    return found


def _answers(grown: Mapping[str, Grown], axes: Mapping[str, Sequence[Side]]) -> dict[str, Sequence[Side]]:
    answers: dict[str, Sequence[Side]] = {}
    for pattern, sides in axes.items():
        template = Template(pattern, regex=True)
        matched = [path for path in grown if template.match(rule_path(path)) is not None]
        if not matched:
            raise LazyModelError(f"axes: no variable matches {pattern!r}{closest(pattern, grown)}")
        for path in matched:
            fits = not isinstance(sides, str) and len(sides) == len(grown[path].shape)
            if not fits or any(side not in ("in", "out", None) for side in sides):
                raise LazyModelError(
                    f'axes[{pattern!r}] has "in", "out" or None for each dimension of {path!r}, whose shape is '
                    f"{grown[path].shape}; got {sides!r}"
                )
            answers.setdefault(path, sides)
    return answers


def _question(variable: Grown) -> str:
    sides = ("None",) * (len(variable.shape) - 2) + ('"in"', '"out"')
    example = ", ".join(sides) if len(variable.shape) > 1 else '"in",) of a readout, ("out",'
    path = re.sub(r"\d+", r"\\d+", re.escape(rule_path(variable.path)).replace(r"\-", "-"))
    return f"  {_growth(variable)}: axes={{r{path!r}: ({example})}}".replace("\\\\", "\\")


# What becomes of them -------------------------------------------------------------------------------------------------


def _row(variable: Grown, sides: Sides, layers: float, depth: float | None) -> MupVariable:
    fan_in, fan_out = sides.ratio(variable, "in"), sides.ratio(variable, "out")
    kind = kind_of("in" in sides.sides.values(), "out" in sides.sides.values(), vector=sides.vector)
    scaled: Scaling = scaling(kind, fan_in, fan_out)
    if depth is not None and layers != 1:
        scaled = deepened(scaled, layers, depth)
    before, own = variable.stds
    return MupVariable(
        path=variable.path,
        base_shape=variable.base,
        shape=variable.shape,
        kind=kind,
        fan_in=fan_in,
        fan_out=fan_out,
        base_std=before,
        own_std=own,
        std=None if before is None else before * scaled.std,
        adam=scaled.adam,
        sgd=scaled.sgd,
        source=sides.source,
    )


def _deeper(base: ModelSpec, model: ModelSpec, grown: Mapping[str, Grown], depth: float | None) -> dict[str, float]:
    """How many times as many layers there are, of variables that stand in layers."""
    if depth is None:
        return {}
    before, after = grouped_by(_considered(base), _template), grouped_by(grown, _template)
    found: dict[str, float] = {}
    for template, paths in after.items():
        for path in paths:
            stacked = [dim for dim, label in enumerate(grown[path].labels) if label == "layers"]
            ratio = math.prod(grown[path].shape[dim] / grown[path].base[dim] for dim in stacked)
            ratio *= len(paths) / len(before[template])
            if ratio != 1:
                found[path] = ratio
    if len(set(found.values())) > 1:
        raise LazyModelError(
            f"parts of {model.name} grow in depth by different factors, {sorted(set(found.values()))}: a residual "
            "branch has one multiplier. Let them grow alike"
        )
    return found


def _output_multiplier(
    grown: Mapping[str, Grown], rows: Mapping[str, MupVariable], tied: bool | None
) -> tuple[float, list[str]]:
    """Of the logits: that of Table 8, where the embedding is the readout; Table 3 needs none."""
    tables = [path for path, each in grown.items() if each.described.role == "embedding"]
    tables = [path for path in tables if rows[path].kind == "input"]
    readouts = [path for path, row in rows.items() if row.kind == "output" and grown[path].described.role != "router"]
    if tied is None:
        words = {grown[path].shape[0] for path in tables}
        if tables and readouts and not any(words.intersection(grown[path].shape) for path in readouts):
            raise LazyModelError(
                f"is the embedding {tables[0]!r} {_growth(grown[tables[0]])} the readout too? No other one has as many "
                f"words, and {readouts[0]!r} {_growth(grown[readouts[0]])} may be something else: pass tied=True or "
                "tied=False"
            )
        tied = bool(tables) and not readouts
    if not tied:
        return 1.0, []
    tables = tables or [path for path, row in rows.items() if row.kind == "input"]
    ratios = {rows[path].fan_out for path in tables}
    if len(ratios) > 1:
        raise LazyModelError(f"tied: which is the readout? {', '.join(map(repr, tables))} grow by {sorted(ratios)}")
    ratio = ratios.pop() if ratios else 1.0
    note = f"output_multiplier = {1 / ratio:.4g}, of the logits: the embedding is the readout too (Table 8)"
    return 1 / ratio, [note]


def _head_dims(grown: Mapping[str, Grown]) -> tuple[int, int] | None:
    sizes = {
        (each.base[dim], each.shape[dim])
        for each in grown.values()
        if "query_key_value" in each.described.role and not each.described.follows
        for dim, label in enumerate(each.labels)
        if label == "head_dim"
    }
    return sizes.pop() if len(sizes) == 1 else None


def _growth(variable: Grown | MupVariable) -> str:
    before = variable.base if isinstance(variable, Grown) else variable.base_shape
    pairs = zip(before, variable.shape, strict=True)
    return f"({', '.join(f'{a}→{b}' if a != b else str(a) for a, b in pairs)})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
