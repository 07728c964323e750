"""`mup`: compares two abstract builds, and sets a model's initial values and learning rates by what grows between them.

Responsible for pairing the variables of two builds, for the tables of Yang et al., Tensor Programs V: Tuning Large
Neural Networks via Zero-Shot Hyperparameter Transfer, 2022, as numbers, for an Optax optimizer with a learning rate
multiplier for each variable, found by its path, and for the result, `Mup`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.framework import AnyModel, ModelSpec
from lazymodel._abstract.variable import AbstractVariable, Template, path_text, rule_path
from lazymodel._errors import LazyModelError
from lazymodel._programs.programs import InitRecipe
from lazymodel._sharding.describe import Described, describe
from lazymodel._show.table import Column, Report, Table
from lazymodel._show.text import closest, first_lines, grouped_by, plural, unnumbered
from lazymodel.extras.research.fan_in_out import Grown, Moments, Side, Sides, find_sides, is_random, moments

_STEPS = 8  # counted steps of the trial, after as many others: schedules begin with a rate of 0, and RAdam as SGD
# Sizes of gradients and parameters. Gradients are large compared to Adam's epsilon, and small, since norms may be
# clipped; parameters are small compared to gradients, to which decay may be added.
_TRIALS = ((1e-2, 2e-3), (1e-1, 2e-3), (1e-2, 2e-2))
_TOLERANCE = 0.05


def _scaled_optimizer(tx: Any, multipliers: Callable[[Rule], Mapping[str, float]], rule: Rule | None, name: str) -> Any:
    """`tx` with its updates multiplied; `multipliers` gives path → multiplier for a rule."""
    import optax  # pyright: ignore[reportMissingTypeStubs]

    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise LazyModelError(f"optimizer takes an Optax gradient transformation; got {tx!r}")
    tx = optax.with_extra_args_support(tx)
    by_path = multipliers(rule or _infer_rule(tx))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(updates, state, params, **extra)
        return jax.tree_util.tree_map_with_path(scaled, updates), state

    def scaled(keys: Sequence[Any], update: Any) -> Any:
        factor = by_path[_path(keys, by_path, name)]
        return update if factor == 1 else update * jnp.asarray(factor, update.dtype)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _path(keys: Sequence[Any], known: Mapping[str, float], name: str) -> str:
    """The path of the variable at a place in a tree of parameters: NNX adds `value`, Linen may omit the collection."""
    path = path_text([key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")])
    for candidate in (path, f"params/{path}", path.removeprefix("params/")):
        if candidate in known:
            return candidate
    raise LazyModelError(
        f"the optimizer was given an array at {path!r}, which is not a variable that {name} trains"
        f"{closest(path, known)}. Pass a tree with the model's own paths, as materialize returns"
    )


def _infer_rule(tx: Any) -> Rule:
    """The rule that an optimizer follows, inferred from its updates of a matrix with a constant gradient.

    Adam's updates are equally large for all elements and gradients; SGD's are the gradient times a number. Neither
    changes with the size of the parameters, as those of LAMB and Adafactor do, nor depends on other elements, as Muon's
    do.
    """
    random = np.random.default_rng(0)
    gradient = random.uniform(0.5, 1, (4, 4)) * random.choice([-1, 1], (4, 4))
    params = random.uniform(0.5, 1, (4, 4))
    try:
        small, large, moved = (_update(tx, size * gradient, scale * params) for size, scale in _TRIALS)
    except Exception as error:
        raise LazyModelError(
            f'which learning rates has this optimizer? Trying it failed ({error}): pass rule="adam" or rule="sgd"'
        ) from error
    growth = _TRIALS[1][0] / _TRIALS[0][0]
    if _alike(moved, small) and np.any(small):
        if _alike(large, small) and _alike(abs(small), np.mean(abs(small))):
            return "adam"
        if _alike(large, growth * small) and _alike(small / gradient, np.mean(small / gradient)):
            return "sgd"
    raise LazyModelError(
        "updates of this optimizer are neither equally large for all gradients, as Adam's, nor the gradient times a "
        "number, as SGD's, for all parameters. There are no learning rates for it: LAMB, LARS, Muon and "
        "Adafactor scale by the size of a parameter or of a whole matrix. Adafactor without "
        'multiply_by_parameter_scale is like Adam. If it is like one of them, pass rule="adam" or rule="sgd"'
    )


def _update(tx: Any, gradient: Any, params: Any) -> Any:
    """The sum of later updates, without the part that does not depend on the gradient's sign: weight decay."""
    update, found = jax.jit(tx.update), []
    tree = {"trial": jnp.asarray(params, jnp.float32)}
    for sign in (1, -1):
        given = {"trial": jnp.asarray(sign * gradient, jnp.float32)}
        state, total = tx.init(tree), np.zeros(np.shape(gradient))
        for step in range(2 * _STEPS):
            updates, state = update(given, state, tree)
            total += np.asarray(updates["trial"]) * (step >= _STEPS)
        found.append(total)
    return (found[0] - found[1]) / 2


def _alike(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, expected, rtol=_TOLERANCE, atol=0))


_Kind: TypeAlias = Literal["input", "hidden", "output", "vector", "fixed"]
Rule: TypeAlias = Literal["adam", "sgd"]

_KINDS: dict[_Kind, str] = {
    "input": "fixed size to width",
    "hidden": "width to width",
    "output": "width to fixed size",
    "vector": "one number for each unit",
    "fixed": "does not grow",
}


@dataclasses.dataclass(frozen=True)
class MupVariable:
    """The parametrization of one variable under muP.

    Attributes:
        path: Its path in the model.
        base_shape: Its shape in the base model.
        shape: Its shape in the model.
        kind: `input` (fixed size to width), `hidden`, `output` (width to fixed size), `vector` or `fixed`.
        fan_in: Its fan-in divided by that of the base.
        fan_out: Its fan-out divided by that of the base.
        base_std: Standard deviation of its initial values in the base model; None if unknown, for example if they are
            not random.
        own_std: The same of the model's own initializer.
        std: Standard deviation under muP: that of the base, scaled by the width.
        adam: Multiplier of Adam's learning rate.
        sgd: Multiplier of SGD's learning rate.
        source: What its fan-in and fan-out were inferred from.
    """

    path: str
    base_shape: tuple[int, ...]
    shape: tuple[int, ...]
    kind: _Kind
    fan_in: float
    fan_out: float
    base_std: float | None
    own_std: float | None
    std: float | None
    adam: float
    sgd: float
    source: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mup(Report, Mapping[str, MupVariable]):
    """The maximal update parametrization of a model, relative to a smaller one: by path, a `MupVariable`.

    Attributes:
        variables: Path → its `MupVariable`.
        factors: Path → factor of the model's own initial values, for those that change.
        output_multiplier: Factor that the code multiplies logits by: 1, unless the embedding is also the readout.
        branch_multiplier: Factor that the code multiplies each residual branch by: 1, unless `depth` is given.
        head_dims: Size of an attention head in the base and in the model; None if unknown.
        name: The model's name.

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
            raise KeyError(f"there is no muP of {path!r}{closest(path, self.variables)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    @property
    def attention_scale(self) -> float:
        """The factor for attention's products of queries and keys: sqrt(base head size) / head size.

        At the base's head size it is the usual 1 / sqrt(head size) (Tensor Programs V, definition 4.1).

        Raises:
            LazyModelError: The size of a head cannot be inferred from shapes.
        """
        if self.head_dims is None:
            raise LazyModelError(
                f"the head size of {self.name} cannot be inferred from shapes; pass mup(…, head_dim=(base's, model's))"
            )
        return math.sqrt(self.head_dims[0]) / self.head_dims[1]

    def multipliers(self, rule: Rule) -> dict[str, float]:
        """Path → multiplier of the learning rate, for `"adam"` or `"sgd"`."""
        if rule not in ("adam", "sgd"):
            raise LazyModelError(f"a rule is 'adam' or 'sgd'; got {rule!r}")
        return {path: getattr(variable, rule) for path, variable in self.items()}

    def rescaled(self, model: AnyModel, /) -> AnyModel:
        """The model with its own initial values multiplied by `factors`; keys and distributions do not change.

        Raises:
            LazyModelError: The scheme was made for another model: a path or a shape differs.
        """
        if missing := [path for path, row in self.items() if path not in model or model[path].shape != row.shape]:
            found = f"of shape {model[missing[0]].shape}" if missing[0] in model else "absent"
            raise LazyModelError(
                f"this muP is of {self.name}, whose {missing[0]!r} has shape {self[missing[0]].shape}; in {model.name} "
                f"it is {found}. Compare the base with this model: lazymodel.mup(base, model)"
            )
        variables = dict(model.variables)
        for path, factor in self.factors.items():
            variables[path] = dataclasses.replace(variables[path], origin=f"{variables[path].origin} × {factor:.3g}")
        recipes = tuple(
            _scaled_recipe(recipe, self.factors) if any(path in self.factors for path in recipe.paths) else recipe
            for recipe in model.recipes
        )
        return dataclasses.replace(model, variables=variables, recipes=recipes)

    def optimizer(self, tx: Any, rule: Rule | None = None) -> Any:
        """The Optax optimizer with each variable's updates multiplied by its learning rate multiplier.

        Its state is that of `tx`, so both work with `with_optimizer` and with the same checkpoints. Weight decay within
        `tx` is multiplied as well. For decay that does not change with the width, chain it behind:
        `optax.chain(scheme.optimizer(optax.adam(rate)), optax.add_decayed_weights(-rate * decay))`.

        Args:
            tx: An Optax gradient transformation for parameters with the model's own paths.
            rule: `"adam"` for optimizers whose updates do not depend on the size of a gradient (Adam, AdamW, Lion,
                RMSProp), `"sgd"` for those whose updates are proportional to it. None infers it by trying a few
                numbers. Optimizers that scale updates by the size of a parameter or of a whole matrix (LAMB, LARS,
                Adafactor, Muon, Shampoo) are neither: Tensor Programs V has no table for them.

        Raises:
            LazyModelError: It is neither, or is given arrays that are not variables of the model.

        Example:
            >>> scheme = lm.mup(abstract, abstract)
            >>> trained = abstract.reinitialize(scheme).with_optimizer(scheme.optimizer(optax.adam(1e-2)))
        """
        return _scaled_optimizer(tx, self.multipliers, rule, self.name)

    def table(self) -> Table:
        """A row for variables that differ only in numbers of their paths."""
        cells = [
            (row.path, _growth(row), row.kind, *map(_number, (row.own_std, row.std, row.adam, row.sgd)), row.source)
            for row in self.values()
        ]
        lines = ["; ".join(f"{kind}: {_KINDS[kind]}" for kind in _KINDS if any(r.kind == kind for r in self.values()))]
        numbers = map(Column.number, ("std", "muP's", "Adam ×", "SGD ×"))
        columns = (Column.names("variable"), Column("base → model"), Column("kind"), *numbers, Column("inferred from"))
        title = f"muP of {self.name}: {plural(len(self), 'variable')}, relative to the base model"
        return Table(title, columns, cells, [*lines, *self.notes])


def mup(
    base: Any,
    model: Any,
    *,
    axes: Mapping[str, Sequence[Side]] | None = None,
    tied: bool | None = None,
    head_dim: tuple[int, int] | None = None,
    depth: float | None = None,
) -> Mup:
    """The maximal update parametrization of a model: compares two abstract builds, which differ in width.

    Hyperparameters that are best for the base model are then about best for the model (Yang et al., Tensor Programs V,
    2022, Table 3, and Table 8 for tied embeddings). `model.reinitialize(scheme)` sets the initial values,
    `scheme.optimizer(tx)` the learning rates; the code itself has to use `scheme.attention_scale` and
    `scheme.output_multiplier`. Nothing is allocated. At the base's own width, nothing changes.

    Variables are paired by path, or by their order among those whose paths differ only in numbers. The dimensions that
    are summed over are inferred from names or, if names are not enough, from what the initializers used as the fan-in;
    the table shows which.

    Args:
        base: An abstract model, such as `lazymodel.build_abstract` returns, of the size that was tuned.
        model: The same model at the size to train.
        axes: The purpose of dimensions for variables whose names are missing or misleading: path regex
            (`re.fullmatch`) to `"in"`, `"out"` or None (it counts layers or experts) for each dimension.
        tied: True if the embedding is also the readout. None assumes so for a model with an embedding and no readout,
            and not for one with a readout of as many words.
        head_dim: Sizes of an attention head in the base and in the model, if shapes do not show them.
        depth: For models that differ in depth, the power of depth by which residual branches shrink: 0.5 as in Tensor
            Programs VI, 1 as in CompleteP; the code then multiplies each branch by `scheme.branch_multiplier`. None
            ignores depth.

    Raises:
        LazyModelError: The builds do not belong together, or the purpose of dimensions is ambiguous; the message
            lists these and what to pass as `axes`.

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
            f"it is ambiguous what the growing dimensions of {plural(len(unknown), 'variable')} are for. Pass for each "
            'dimension "in" if it is summed over, "out" if it is an output, or None if it counts layers or experts:\n'
            + "\n".join(first_lines(list(dict.fromkeys(unknown))))
        )
    deeper = _deeper(base, model, grown, depth)
    rows: dict[str, MupVariable] = {}
    factors: dict[str, float] = {}
    for path, each in grown.items():
        row = rows[path] = _row(each, cast(Sides, found[path]), deeper.get(path, 1.0), depth)
        if row.kind != "fixed" and any(std is not None and math.isnan(std) for std in each.stds):
            raise LazyModelError(
                f"{path!r}: the standard deviation of its initial values cannot be inferred from its initializer "
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


# Pairs of two builds --------------------------------------------------------------------------------------------------


def _considered(model: ModelSpec) -> dict[str, AbstractVariable]:
    """The variables that are trained, without optimizer state."""
    floats = {path: v for path, v in model.items() if jax.numpy.issubdtype(v.dtype, np.inexact) and v.follows is None}
    return {path: variable for path, variable in floats.items() if variable.trainable}


def _template(path: str) -> Hashable:
    """A name that paths of both models share: Keras numbers layers over all models of a process."""
    return unnumbered(re.sub(r"_\d+(?=/|$)", "", rule_path(path)))


def _pairs(base: Mapping[str, AbstractVariable], model: Mapping[str, AbstractVariable]) -> Iterator[tuple[str, str]]:
    """Yields (path in the base, path in the model) for every variable of the model."""
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
                    f"{path!r} may be any of {', '.join(map(repr, others[:3]))} …, which differ in shape: there are "
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
                f"{path!r} has shape {shape}, and {other!r} of the base model {before[other].shape}: both builds of a "
                "model need variables with the same number of dimensions"
            )
        follows = described[path].follows
        weight: Described | None = described.get(follows) if follows else None
        pair = (known[0].get(other), known[1].get(path))
        narrow = after[path].dtype.itemsize < 4
        found[path] = Grown(path, before[other].shape, shape, described[path], weight, pair, narrow)
    return {path: found[path] for path in after}


def _moments(model: ModelSpec, paths: Mapping[str, Any]) -> dict[str, Moments | None]:
    """Path → moments of initial values; None if they are not random, NaN if they are unknown."""
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


# Multipliers ----------------------------------------------------------------------------------------------------------


def _row(variable: Grown, sides: Sides, layers: float, depth: float | None) -> MupVariable:
    """Applies Table 3 of Tensor Programs V to the ratios of fan-in and fan-out to the base model's.

    The table's SGD column assumes one width. If widths grow differently, a hidden variable's update is multiplied by
    fan-out / fan-in, which keeps its size proportional to its values. If one variable is both embedding and readout,
    it uses the row of the embedding, and the code applies Table 8's multiplier of the readout.

    Depth follows Yang et al., Tensor Programs VI, 2023: the code multiplies each residual branch by `layers ** -depth`,
    with `layers` relative to the base. All branches together then learn as one did: each changes by 1 / layers. Adam is
    not affected by the multiplier in the gradient, SGD is. A power of 1/2 is Tensor Programs VI's; 1 is CompleteP's
    (Dey et al. 2025).
    """
    fan_in, fan_out = sides.ratio(variable, "in"), sides.ratio(variable, "out")
    kinds: dict[tuple[bool, bool], _Kind] = {
        (True, True): "hidden",
        (True, False): "output",
        (False, True): "vector" if sides.vector else "input",
        (False, False): "fixed",
    }
    found = sides.sides.values()
    kind = kinds["in" in found, "out" in found]
    # A side without dimensions has a ratio of 1.
    std, adam, sgd = fan_in**-0.5 if kind == "hidden" else 1 / fan_in, 1 / fan_in, fan_out / fan_in
    if depth is not None and layers != 1:
        adam, sgd = adam * layers ** (depth - 1), sgd * layers ** (2 * depth - 1)
    before, own = variable.stds
    std = None if before is None else before * std
    shapes = variable.base, variable.shape
    return MupVariable(variable.path, *shapes, kind, fan_in, fan_out, before, own, std, adam, sgd, sides.source)


def _deeper(base: ModelSpec, model: ModelSpec, grown: Mapping[str, Grown], depth: float | None) -> dict[str, float]:
    """Path → number of layers relative to the base, for variables that are in layers."""
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
    """The multiplier of the logits: that of Table 8 if the embedding is the readout; Table 3 needs none."""
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


def _scaled_recipe(recipe: InitRecipe, factors: Mapping[str, float]) -> InitRecipe:
    """The recipe with some of its variables multiplied, like `value * factor` in eager execution; `factors` is by path.

    The factors are run-time inputs, so variables that differ only in them share a program.
    """
    scaled = tuple(path in factors for path in recipe.paths)
    count = len(recipe.inputs)

    def multiply(*values: Any) -> list[Any]:
        *outputs, by = values
        pairs = zip(outputs, scaled, range(len(outputs)), strict=True)
        return [output * by[index].astype(output.dtype) if is_scaled else output for output, is_scaled, index in pairs]

    def function(*inputs: Any) -> tuple[jax.Array, ...]:
        return tuple(multiply(*recipe.function(*inputs[:count]), inputs[count]))

    return dataclasses.replace(
        recipe,
        signature=(recipe.signature, "scaled", scaled),
        function=function,
        inputs=(*recipe.inputs, np.asarray([factors.get(path, 1.0) for path in recipe.paths], np.float32)),
        keys=(*recipe.keys, None) if recipe.keys else (),
        kernels=None if recipe.kernels is None else recipe.kernels.followed_by(multiply, ("scaled", scaled), count),
    )
