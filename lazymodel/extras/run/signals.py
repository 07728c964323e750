"""`signals`: sizes of activations and gradients, layer by layer, of a model that is never whole.

The traced function is rewritten, then runs like any other (`extras/run/run`). Taps measure the output of each layer. To
measure gradients, a tap has a second input, zeros, whose gradient is defined as the statistics of the gradient that
passes the tap: no gradient exists longer than it takes to measure it.

Layers are named by name scopes, which Keras and Linen set. Without scopes they are named by the variables that are
used: the last operation with a variable of a module is the module's output. That of a block, a module in a list, is
the first value after its variables that alone leads from the model's variables to the rest: the residual stream.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import CALLS, JIT, inner_jaxpr, is_key, one_equation, run_jaxpr, scanned_from, walk
from lazymodel._show.depth import drawn_over_depth, measured, values_over_depth
from lazymodel._show.progress import ProgressTo, ReportTo
from lazymodel._show.table import Column, Report, Table, plain
from lazymodel._show.text import plural
from lazymodel._transform import rekey
from lazymodel.extras.run.run import RunOptions, run_rewritten

# Calls that taps can be in. What has derivatives of its own (`jax.custom_vjp`, `jax.custom_jvp`) is one operation.
_ENTERED = JIT | frozenset(name for name in CALLS if not name.startswith("custom"))
_REMAT = frozenset({"remat", "remat2", "checkpoint"})
_TRANSFORM = re.compile(r"\b(?:vmap|jvp|transpose|remat|checkpoint|rematted_computation)\(([^()]*)\)")
_IN_LIST = re.compile(r"/(\d+)(?=/|$)")  # the number of a module in a list
_MEASURES = ("rms", "mean", "min", "max", "zeros")
_KINDS = ("activations", "gradients", "variables")
_FAR = 100.0  # a layer's root mean square by the first one's; normalized models stay within about 20

# A place in the traced function: numbers of equations, from the outermost jaxpr inwards, and the number of the result.
# Results -1, -2, … are what a scan goes over, within its body. ((), n) is the function's input n.
_Key: TypeAlias = "tuple[tuple[int, ...], int]"
_Scope: TypeAlias = "tuple[str, ...]"


@dataclasses.dataclass(frozen=True)
class Signal:
    """Statistics of an activation or a gradient: numbers, or with `seeds` arrays of one number for each seed.

    Attributes:
        shape: Its shape, without the axis of a scan.
        dtype: Its dtype; statistics are computed in float32.
        rms: Root mean square of its elements.
        mean: Mean of its elements.
        min: Smallest element.
        max: Largest element.
        zeros: Fraction of elements that are zero.
    """

    shape: tuple[int, ...]
    dtype: str
    rms: Any
    mean: Any
    min: Any
    max: Any
    zeros: Any


@dataclasses.dataclass(frozen=True, repr=False)
class Signals(Report):
    """Sizes of activations and gradients; prints as a table, folded over layers. Made by `signals`.

    Attributes:
        name: The model's name.
        activations: Layer → statistics of its output. Layers in a scan have `[i]` at the end.
        gradients: Layer → statistics of the gradient with respect to its output; empty without `gradients=True`.
        variables: Path → statistics of the gradient with respect to a variable, likewise.
        value: What the function returned, with `gradients=True`: a number, or one for each seed.
    """

    name: str
    activations: Mapping[str, Signal]
    gradients: Mapping[str, Signal]
    variables: Mapping[str, Signal]
    value: Any = None

    def over_depth(self, measure: str = "rms", kind: str = "activations") -> dict[str, dict[int, Any]]:
        """One statistic over depth: folded name → layer → value, for names that occur in two layers or more.

        Args:
            measure: `"rms"`, `"mean"`, `"min"`, `"max"` or `"zeros"`.
            kind: `"activations"`, `"gradients"` or `"variables"`.

        Raises:
            LazyModelError: `measure` or `kind` is another word.
        """
        if measure not in _MEASURES or kind not in _KINDS:
            raise LazyModelError(
                f"expected a measure of {', '.join(_MEASURES)} and a kind of {', '.join(_KINDS)}; found {measure!r} "
                f"and {kind!r}"
            )
        return values_over_depth({name: getattr(each, measure) for name, each in getattr(self, kind).items()})

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws root mean squares over depth, a line for each kind of layer or variable; needs matplotlib.

        Args:
            path: File to save the figure to, such as `"signals.png"`; None does not save it.

        Returns:
            The `matplotlib.figure.Figure`. With `seeds`, lines are medians.

        Raises:
            LazyModelError: No name has a layer's number in it, or matplotlib is not installed.
        """
        titles = dict(zip(_KINDS, ("activations", "gradients of activations", "gradients of variables"), strict=True))
        panels = {f"{title}, rms": self.over_depth("rms", kind) for kind, title in titles.items()}
        return drawn_over_depth({title: lines for title, lines in panels.items() if lines}, path)

    def compare(self, other: Signals) -> SignalComparison:
        """The root mean squares of both side by side, for names that both have, such as of two initializations.

        Raises:
            LazyModelError: They have no name in common.
        """
        rows = {
            (kind, name): (float(np.median(mine.rms)), float(np.median(theirs.rms)))
            for kind in _KINDS
            for name, mine in getattr(self, kind).items()
            if (theirs := getattr(other, kind).get(name)) is not None
        }
        if not rows:
            raise LazyModelError(f"the signals of {self.name} and of {other.name} have no name in common")
        return SignalComparison(rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, strings and numbers, in types of JSON (except NaN and infinity)."""
        found: dict[str, Any] = {kind: {n: vars(each) for n, each in getattr(self, kind).items()} for kind in _KINDS}
        return plain(jax.tree.map(_listed, {"name": self.name, "value": self.value, **found}))

    def table(self) -> Table:
        """A row for layers that differ only in numbers of their names."""
        labels = ("activation", "gradient", "weight gradient")
        rows = [
            (name, label, each.rms, each.min, each.max, each.zeros, each.mean, f"{each.dtype}{list(each.shape)}")
            for kind, label in zip(_KINDS, labels, strict=True)
            for name, each in getattr(self, kind).items()
        ]
        measures = map(measured, ("rms", "min", "max", "zeros"))
        more = dataclasses.replace(measured("mean"), page=True), Column.in_pages("shape")
        columns = (Column.names("layer"), Column("signal"), *measures, *more)
        count = len(self.activations)
        return Table(f"signals of {self.name}: {plural(count, 'layer')}", columns, rows, [*self._marked()])

    def drawing(self) -> str:
        """Root mean squares over depth, as SVG, where matplotlib is installed and names have layers."""
        text = io.StringIO()
        try:
            self.plot().savefig(text, format="svg")
        except LazyModelError:
            return ""
        return text.getvalue()[text.getvalue().index("<svg") :]

    def _marked(self) -> Iterator[str]:
        """Layers whose root mean square is far from that of the layer in which the signal, or its gradient, begins."""
        for kind in _KINDS:
            for name, values in self.over_depth("rms", kind).items():
                rms = {layer: float(np.median(value)) for layer, value in values.items()}
                first, *others = rms if kind == "activations" else reversed(rms)
                size = rms[first]
                far = next((at for at in others if size and not size / _FAR <= rms[at] <= size * _FAR), None)
                if not math.isfinite(size):
                    yield f"{kind} of {name} explode: {size} in layer {first}"
                elif far is not None:
                    word = "vanish" if rms[far] < size else "explode"
                    yield f"{kind} of {name} {word}: {size:.2g} in layer {first}, {rms[far]:.2g} in layer {far}"


@dataclasses.dataclass(frozen=True, repr=False)
class SignalComparison(Report):
    """Root mean squares of two `Signals`: (kind, name) → the first's and the second's."""

    rows: Mapping[tuple[str, str], tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """Kind → name → both values."""
        return {kind: {n: list(pair) for (k, n), pair in self.rows.items() if k == kind} for kind in _KINDS}

    def table(self) -> Table:
        """A row for layers that differ only in numbers of their names."""
        numbers = map(measured, ("rms", "other's rms", "other / this"))
        rows = [
            (name, kind, mine, theirs, theirs / mine if mine else np.nan)
            for (kind, name), (mine, theirs) in self.rows.items()
        ]
        return Table("two signals", (Column.names("layer"), Column("kind"), *numbers), rows, [])


def _listed(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, np.ndarray) else leaf


def signals(
    model: Any,
    function: Callable[..., Any],
    /,
    *inputs: Any,
    checkpoint: Any = None,
    gradients: bool = False,
    seeds: int | None = None,
    max_device_memory: int | str | None = None,
    max_host_memory: int | str | None = None,
    progress: ProgressTo = None,
    report: ReportTo = None,
) -> Signals:
    """Measures activations and gradients layer by layer, at initialization or of a checkpoint.

    The model is never whole, see `AbstractModel.run`. Root mean squares over depth show whether the signal of an
    initialization survives the depth of the real model, forward and backward.

    Args:
        model: An abstract model, also after `reinitialize`, `rekey` or with `lm.mup`.
        function: Takes the model and the inputs, like that of `AbstractModel.run`. With `gradients=True` it returns a
            scalar, the loss.
        *inputs: As for `AbstractModel.run`.
        checkpoint: As for `materialize`; None measures the model at initialization.
        gradients: True also measures the gradient with respect to each layer's output, and to each variable.
        seeds: A number of seeds: the model's initial values are drawn again (`rekey`) for each of 0, 1, …, and every
            statistic is an array of one number for each seed.
        max_device_memory: As for `AbstractModel.run`.
        max_host_memory: As for `AbstractModel.run`.
        progress: As for `AbstractModel.run`.
        report: As for `AbstractModel.run`; with `seeds`, one report for each.

    Raises:
        LazyModelError: The function returns no scalar although `gradients=True`, or no layer was found in it.
        TraceError: As for `AbstractModel.run`.

    Example:
        >>> forward = lambda model, x: x @ model["up"]["kernel"] @ model["down"]["kernel"]
        >>> found = lm.signals(abstract, forward, np.ones((8, 64), "float32"))
        >>> sorted(found.activations)
        ['down', 'up']
    """
    if not isinstance(model, ModelSpec):
        raise LazyModelError(f"signals takes an abstract model, as build_abstract returns; got {type(model).__name__}")
    options = RunOptions(checkpoint, max_device_memory, max_host_memory, progress, report)
    models = [model] if seeds is None else [rekey(model, seed) for seed in range(seeds)]
    rewritten = _Rewritten(gradients)
    found = [run_rewritten(each, function, inputs, options, rewritten) for each in models]
    stacked = {key: [run[key] for run in found] for key in found[0]}
    numbers = {key: np.asarray(values[0] if seeds is None else np.stack(values, -1)) for key, values in stacked.items()}
    kinds = {kind: dict(_signals(rewritten.layers, kind, numbers)) for kind in _KINDS}
    value = _number(numbers["value"]) if gradients else None
    return Signals(model.name, **kinds, value=value)


def _signals(layers: _LayerPlaces, kind: str, numbers: Mapping[Any, np.ndarray]) -> Iterator[tuple[str, Signal]]:
    """The signals of one kind by name: one for each layer of a scan."""
    for name, key in (layers.variables if kind == "variables" else layers.names).items():
        if (kind, key) not in numbers:
            continue
        aval, lengths = layers.places[key]
        values = numbers[kind, key]
        for index in np.ndindex(lengths):
            square, *rest = map(_number, values[index])
            suffix = "".join(f"[{each}]" for each in index)
            yield f"{name}{suffix}", Signal(tuple(aval.shape), aval.dtype.name, square**0.5, *rest)


def _number(value: Any) -> Any:
    """A number; with seeds, the array of them."""
    return np.asarray(value, np.float64) if np.ndim(value) else float(value)


def _measured(value: jax.Array) -> jax.Array:
    """Mean square, mean, smallest and largest element, and the fraction of zeros."""

    def wide() -> jax.Array:
        # Cast for each statistic alone: `extras/run/stretches` does chains of operations early, each with one user.
        return value.astype(np.float32)

    numbers = (jnp.mean(jnp.square(wide())), jnp.mean(wide()), jnp.min(wide()), jnp.max(wide()))
    return jnp.stack([*numbers, jnp.mean((value == 0).astype(np.float32))])


@jax.custom_vjp
def _tap(value: jax.Array, sink: jax.Array) -> jax.Array:
    """The value; the gradient with respect to `sink` is the statistics of the value's gradient."""
    return value


def _tap_forward(value: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return value, None


def _tap_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, _measured(gradient)


_tap.defvjp(_tap_forward, _tap_backward)


class _Rewritten:
    """Makes a function of the same inputs that returns the statistics, by (kind, place)."""

    layers: _LayerPlaces

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients

    def __call__(
        self, closed: Any, paths: Sequence[str | None], inputs: Sequence[Any]
    ) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        outs = closed.out_avals
        scalar = len(outs) == 1 and not outs[0].shape and jnp.issubdtype(outs[0].dtype, np.floating)
        if self._gradients and not scalar:
            found = ", ".join(str(each) for each in outs[:3]) or "no array"
            raise LazyModelError(
                f"signals: gradients=True expected a function that returns a scalar loss, found {found}"
            )
        self.layers = layers = _LayerPlaces(closed, paths)
        if not layers.names:
            raise LazyModelError(
                "signals: no layer was found: the function has no name scope and uses no variable of the model with "
                "another float array"
            )
        sinks = {
            key: np.zeros((*layers.places[key][1], len(_MEASURES)), np.float32)
            for key in {*layers.names.values(), *layers.variables.values()}
        }
        trees: list[Any] = []

        def measured(*operands: Any) -> list[Any]:
            def loss(sinks: Mapping[_Key, Any]) -> tuple[Any, Any]:
                results, found = _tapped(closed, operands, (), layers, sinks)
                return results[0] if results else (), found

            if self._gradients:
                (value, found), sunk = jax.value_and_grad(loss, has_aux=True)(sinks)
                own = {*layers.variables.values()}
                kinds = {("variables" if key in own else "gradients", key): array for key, array in sunk.items()}
                all_found = {**{("activations", key): array for key, array in found.items()}, **kinds, "value": value}
            else:
                all_found = {("activations", key): array for key, array in loss({})[1].items()}
            trees[:] = [list(all_found)]
            return list(all_found.values())

        rewritten = jax.make_jaxpr(measured)(*inputs)
        return rewritten, lambda results: dict(zip(trees[0], map(np.asarray, results), strict=True))


def _tapped(
    closed: Any, operands: Sequence[Any], outer: tuple[int, ...], layers: _LayerPlaces, sinks: Mapping[_Key, Any]
) -> tuple[list[Any], dict[_Key, jax.Array]]:
    """Evaluates a jaxpr with its taps; returns its results, and statistics by place.

    With `sinks`, gradients with respect to them are statistics, too.
    """
    found: dict[_Key, jax.Array] = {}
    numbers = itertools.count()

    def tap(value: Any, key: _Key) -> Any:
        return _tap(value, sinks[key]) if key in sinks else value

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        place, name = (*outer, next(numbers)), eqn.primitive.name
        own = {key: sink for key, sink in sinks.items() if key[0][: len(place)] == place}
        if place not in layers.entered:
            literals = [atom if isinstance(atom, jex.Literal) else None for atom in eqn.invars]
            free = [each for each, literal in zip(operands, literals, strict=True) if literal is None]
            results: Sequence[Any] = run_jaxpr(one_equation(eqn, literals), free)
        elif name == "scan":
            results, inner = _scanned(eqn, operands, place, layers, own)
            found.update(inner)
        else:

            def call(operands: Sequence[Any], own: Mapping[_Key, Any]) -> Any:
                return _tapped(inner_jaxpr(eqn), operands, place, layers, own)

            if name in _REMAT:
                call = jax.checkpoint(call, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
            results, inner = call(operands, own)
            found.update(inner)
        for number, value in enumerate(results):
            if (place, number) in layers.taps:
                found[place, number] = _measured(jax.lax.stop_gradient(value))
        return [tap(value, (place, number)) for number, value in enumerate(results)]

    if not outer:
        operands = [tap(value, ((), number)) for number, value in enumerate(operands)]
    return walk(closed, operands, lambda _, value: value, equation), found


def _scanned(
    eqn: Any, operands: Sequence[Any], place: tuple[int, ...], layers: _LayerPlaces, sinks: Mapping[_Key, Any]
) -> tuple[list[Any], dict[_Key, jax.Array]]:
    """The results of a scan with taps in its body, and their statistics, stacked."""
    first, carried = scanned_from(eqn)
    constants, carry, over = operands[: first - carried], operands[first - carried : first], operands[first:]

    def body(carry: Any, row: Any) -> Any:
        arrays, own = row
        for number in range(len(arrays)):
            if (key := (place, -1 - number)) in own:
                arrays[number] = _tap(arrays[number], own[key])
        results, found = _tapped(eqn.params["jaxpr"], [*constants, *carry, *arrays], place, layers, own)
        return results[:carried], (results[carried:], found)

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    # Taps on the scan's own results have its place, too: they are outside.
    inner = {key: sink for key, sink in sinks.items() if key[0] != place or key[1] < 0}
    carry, (stacked, found) = jax.lax.scan(body, list(carry), (list(over), inner), **options)
    return [*carry, *stacked], found


@dataclasses.dataclass(eq=False)
class _Seen:
    """A value of the function. `modules` are those of the variables that it is computed from, if from these alone."""

    aval: Any
    key: _Key | None = None
    lengths: tuple[int, ...] = ()
    scope: _Scope = ()
    modules: frozenset[str] | None = None
    users: set[_Scope] = dataclasses.field(default_factory=set[_Scope])
    rows: list[_Key] = dataclasses.field(default_factory=list[_Key])  # places in bodies of scans that go over it
    mixed: bool = False  # computed from inputs and variables
    made: int = 0  # number of the operation that made it
    read: int = 0  # number of the last one that reads it


class _LayerPlaces:
    """The places of the outputs of layers.

    Attributes:
        names: Layer → place of its output.
        variables: Path → place of a float variable, or of its rows in the only scan that goes over it.
        taps: The places in `names`.
        places: Type of what is there, and the lengths of the scans that it is in.
        entered: Equations with places inside.
    """

    def __init__(self, closed: Any, paths: Sequence[str | None]) -> None:
        self._seen: list[_Seen] = []
        self._used: dict[str, _Seen] = {}  # module → the last value that was computed with a variable of it
        self._time = 0  # operations so far
        self._flow: list[_Seen] = []  # values that are not of variables alone, outside of scans
        self._blocks: dict[tuple[str, str], list[int]] = {}  # (list, number) → operations with variables of the block
        self.places: dict[_Key, tuple[Any, tuple[int, ...]]] = {}
        inputs = [_Seen(aval, modules=_modules(path, aval)) for path, aval in zip(paths, closed.in_avals, strict=True)]
        self._flow += (each for each in inputs if each.modules is None)
        for result in self._walk(closed, inputs, (), (), ()):
            result.users.add(())
            result.read = sys.maxsize
        scoped: dict[_Scope, _Seen] = {}
        for seen in self._seen:
            for depth in range(1, len(seen.scope) + 1):
                if any(user[:depth] != seen.scope[:depth] for user in seen.users):
                    scoped[seen.scope[:depth]] = seen
        # The scope of the model itself, whose children are named like modules, is left out. One output has one name,
        # the shortest.
        modules = {part for path in paths if path for part in path.split("/")}
        around = {scope[:1] for scope in scoped if scope[0] not in modules and scope[1:2] and scope[1] in modules}
        named: dict[_Seen, str] = {}
        for scope, seen in sorted(scoped.items(), key=lambda each: -len(each[0])):
            if inside := scope[1:] if scope[:1] in around else scope:
                named[seen] = "/".join(inside)
        outputs = {named[seen]: seen for seen in self._seen if seen in named} if scoped else self._unscoped()
        self.names = {name: self._placed(seen) for name, seen in outputs.items()}
        self.taps = frozenset(self.names.values())
        self.variables: dict[str, _Key] = {}
        for number, (path, seen) in enumerate(zip(paths, inputs, strict=True)):
            if path is not None and jnp.issubdtype(seen.aval.dtype, np.floating):
                only = len(seen.rows) == 1 and not seen.users
                self.variables[path] = seen.rows[0] if only else ((), number)
                if not only:
                    self.places[(), number] = (seen.aval, ())
        keys = (*self.taps, *self.variables.values())
        # The place of a scan's own result is outside of it, that of what it goes over is inside.
        ends = ((place, len(place) + (number < 0)) for place, number in keys)
        self.entered = frozenset(place[:depth] for place, end in ends for depth in range(1, end))

    def _unscoped(self) -> dict[str, _Seen]:
        """The outputs of modules, and of the blocks of lists where all have one shape, in the order of operations."""
        if not self._blocks:
            return self._used
        made, read, mixed = np.array([(e.made, min(e.read, self._time + 1), e.mixed) for e in self._flow]).T
        counts = (np.bincount(times[mixed == 1], minlength=self._time + 2) for times in (made, read))
        alive, found = np.cumsum(np.subtract(*counts)), dict[str, dict[str, _Seen]]()
        for last, (name, number) in sorted((max(times), block) for block, times in self._blocks.items()):
            begun = (times[0] for (other, _), times in self._blocks.items() if other == name and times[0] > last)
            for time in np.flatnonzero(alive[last : min(begun, default=None)] == 1) + last:
                here = [self._flow[at] for at in np.flatnonzero((made <= time) & (time < read))]
                (stream,) = (each for each in here if each.mixed)
                if all(each is stream or each.aval.shape != stream.aval.shape for each in here):
                    found.setdefault(name, {})[f"{name}/{number}"] = stream
                    break
        alike = (
            each for each in found.values() if len(each) > 1 and len({one.aval.shape for one in each.values()}) == 1
        )
        outputs = {name: seen for each in alike for name, seen in each.items()} | self._used
        return dict(sorted(outputs.items(), key=lambda each: each[1].made))

    def _placed(self, seen: _Seen) -> _Key:
        assert seen.key is not None
        self.places[seen.key] = (seen.aval, seen.lengths)
        return seen.key

    def _walk(
        self, closed: Any, operands: Sequence[_Seen], outer: tuple[int, ...], scope: _Scope, lengths: tuple[int, ...]
    ) -> list[_Seen]:
        numbers = itertools.count()

        def equation(eqn: Any, operands: list[_Seen]) -> Sequence[_Seen]:
            place, name = (*outer, next(numbers)), eqn.primitive.name
            own = (*scope, *_scope_of(eqn))
            if name in _ENTERED:
                return self._walk(inner_jaxpr(eqn), operands, place, own, lengths)
            if name == "scan":
                return self._scan(eqn, operands, place, own, lengths)
            self._time += 1
            for each in operands:
                each.users.add(own)
                each.read = self._time
            computed = {each.modules for each in operands}
            every = frozenset[str]().union(*(each for each in computed if each))
            modules = None if None in computed or not operands else every
            results = [
                _Seen(var.aval, (place, number), lengths, own, modules) for number, var in enumerate(eqn.outvars)
            ]
            self._mix(operands, results)
            for module in every if None in computed and not lengths else ():
                for match in _IN_LIST.finditer(module):
                    self._blocks.setdefault((module[: match.start()], match[1]), []).append(self._time)
            if None in computed and len(every) == 1 and (first := results[:1]) and _is_activation(first[0].aval):
                self._used[next(iter(every))] = first[0]
            self._seen += (each for each in results if modules is None and _is_activation(each.aval))
            return results

        def constant(atom: Any, value: Any) -> _Seen:
            seen = _Seen(atom.aval, modules=None if atom.aval.shape else frozenset())  # NumPy inputs are constants
            self._flow += [seen] if seen.modules is None else []
            return seen

        return walk(closed, operands, constant, equation)

    def _mix(self, operands: Sequence[_Seen], results: Sequence[_Seen]) -> None:
        for each in results:
            each.made, each.mixed = self._time, any(one.mixed or one.modules for one in operands)
            self._flow += [each] if each.modules is None and not each.lengths else []

    def _scan(
        self, eqn: Any, operands: Sequence[_Seen], place: tuple[int, ...], scope: _Scope, lengths: tuple[int, ...]
    ) -> list[_Seen]:
        first, carried = scanned_from(eqn)
        body, inside = eqn.params["jaxpr"], (*lengths, int(eqn.params["length"]))
        avals = [var.aval for var in getattr(body, "jaxpr", body).invars]
        inner = list(operands[: first - carried])
        for each, aval in zip(operands[first - carried : first], avals[first - carried :], strict=False):
            each.users.add(scope)
            inner.append(_Seen(aval))
        for number, (each, aval) in enumerate(zip(operands[first:], avals[first:], strict=True)):
            key = (place, -1 - number)
            each.rows.append(key)
            self.places[key] = (aval, inside)
            inner.append(_Seen(aval, modules=each.modules))
        for result in self._walk(body, inner, place, scope, inside):
            result.users.add(scope)
        self._time += 1
        results = [_Seen(var.aval, (place, number), lengths, scope) for number, var in enumerate(eqn.outvars)]
        for each in operands:
            each.read = self._time
        self._mix(operands, results)
        self._seen += (each for each in results if _is_activation(each.aval))
        return results


def _is_activation(aval: Any) -> bool:
    return bool(aval.shape) and jnp.issubdtype(aval.dtype, np.floating)


def _scope_of(eqn: Any) -> _Scope:
    """The name scopes of an equation, without JAX' transformations."""
    text = str(eqn.source_info.name_stack)
    while (plain_text := _TRANSFORM.sub(r"\1", text)) != text:
        text = plain_text
    return tuple(part for part in text.split("/") if part and "->" not in part)  # `jnp.einsum` names its equation


def _modules(path: str | None, aval: Any) -> frozenset[str] | None:
    """The module of a variable, the path without its last name; none for keys and counters; None for an input."""
    if path is None:
        return None
    is_state = is_key(aval.dtype) or (not aval.shape and not jnp.issubdtype(aval.dtype, np.floating))
    return frozenset() if is_state else frozenset({path.rpartition("/")[0] or path})
