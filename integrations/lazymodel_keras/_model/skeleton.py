"""A Keras object whose variables are abstract: what it consists of, how it is filled, and how another is built."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from lazymodel._abstract.framework import Framework, LoweredFunction, PlannedFunction
from lazymodel._abstract.paths import unique_paths
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import ShardingError
from lazymodel._show.text import listed
from lazymodel_keras import _upstream
from lazymodel_keras._model.compiled import forget, holding, lower
from lazymodel_keras._model.forward import plan_function
from lazymodel_keras._model.training import automatic, kept_sharding
from lazymodel_keras._record.recording import RecordedVariable, Recording
from lazymodel_keras._record.session import record

# Abstract variables that the returned object does not hold, such as a discarded layer's, are swept up above this.
_SWEEP_NBYTES = 1 << 20


class Skeleton(Framework):
    """A Keras object whose variables are abstract, and how to make another one like it.

    Attributes:
        build: Makes such an object; None where one is all that is wanted.
        recording: What was recorded while this one was built.
        result: What the build function returned.
        only_own: Whether only variables are wanted that the object holds.
        used: Whether its object has been filled.
        given_away: Whether it was taken to be changed, so that another has to be built.
        functions: The functions that its object has made to be compiled, and for which shardings by path.
        variables: Path to variable and what was recorded about it; with `only_own`, of those that the object holds.
        distribution: The `keras.distribution` that was active when it was built.
    """

    spec: ModelSpec  # the abstract model as it was made of this

    def __init__(
        self, build: Callable[[], Any] | None, recording: Recording, result: Any, *, only_own: bool = False
    ) -> None:
        super().__init__(dict)
        self.build, self.recording, self.result = build, recording, result
        self.used = self.given_away = False
        self.functions: dict[str, dict[str, Any]] = {}
        self._reserved: Skeleton | None = None
        self.only_own = only_own
        self.variables: dict[str, tuple[Any, RecordedVariable]] = _collect(recording, result, only_own=only_own)
        self.distribution = keras.distribution.distribution()

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        offloaded = [path for path, variable in variables.items() if variable.memory_kind is not None]
        if offloaded:
            raise ShardingError(
                f"{listed(offloaded)}: in {variables[offloaded[0]].memory_kind}, and Keras' layers and optimizers "
                "compute with variables where they lie, which JAX refuses there. Keep a Keras model's own variables on "
                "devices; an Optax state can lie there, with_optimizer(optimizer, memory_kind='pinned_host'), and a "
                "finished model between its uses (lazymodel.reshard)"
            )

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        """Gives every variable its array and returns the object; each call returns an object of its own."""
        skeleton = self.upcoming()
        self.leave()
        for what, shardings in skeleton.functions.items():
            if any(arrays[path].sharding != sharding for path, sharding in shardings.items()):
                forget(skeleton.result, what)
        for path, (variable, _) in skeleton.variables.items():
            finish(skeleton.recording, variable, arrays[path])
        return skeleton.result

    def upcoming(self) -> Skeleton:
        """What the next `rebuild` fills: itself, or one more like it, which is kept until then."""
        self._reserved = self._reserved or self.unfilled()
        return self._reserved

    def unfilled(self) -> Skeleton:
        """Itself, or another one like it where its object has been filled."""
        skeleton = self.present()
        return skeleton._another() if skeleton.used else skeleton

    def leave(self) -> None:
        """Leaves what `upcoming` is to whoever fills it instead."""
        self.used, self._reserved = True, None

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        skeleton = self.upcoming()
        with holding(skeleton._described(structs)):
            yield skeleton.result

    def lowered(
        self,
        what: str,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        *,
        inputs: Sequence[Any] = (),
        batch: int | None,
        sequence: int | None,
    ) -> Sequence[LoweredFunction]:
        skeleton = self.upcoming()
        shardings = {path: struct.sharding for path, struct in structs.items()}
        anew = skeleton.functions.get(what) != shardings
        described = skeleton._described(structs)
        lowered = lower(skeleton.result, described, what, inputs, batch=batch, sequence=sequence, anew=anew)
        skeleton.functions[what] = shardings
        return lowered

    def _described(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> list[tuple[Any, jax.ShapeDtypeStruct]]:
        """Each variable with the struct that its array will have once it is in the object."""
        return [
            (variable, structs[path].update(sharding=kept_sharding(structs[path].sharding)))
            for path, (variable, _) in self.variables.items()
        ]

    def forward(self, what: str, *, batch: int, sequence: int | None) -> PlannedFunction:
        skeleton = self.present()
        variables = {path: variable for path, (variable, _) in skeleton.variables.items()}
        return plan_function(skeleton.result, variables, what, batch=batch, sequence=sequence)

    def present(self) -> Skeleton:
        """Itself, with an object; built anew where `give_away` took the one that it had."""
        if self.given_away:
            another = self._another()
            self.recording, self.result, self.variables = another.recording, another.result, another.variables
            self.given_away = False
        return self

    def add_variables(self, known: Mapping[str, tuple[Any, RecordedVariable]]) -> None:
        """Has those that are known keep their paths, and what was recorded besides come after them."""
        ids = {id(variable) for variable, _ in known.values()}
        more = [entry for entry in self.variables.values() if id(entry[0]) not in ids]
        paths = unique_paths([*known, *(variable.path for variable, _ in more)])
        self.variables = dict(zip(paths, [*known.values(), *more], strict=True))

    def give_away(self) -> tuple[Recording, Any]:
        """An object that is not filled, for whoever changes it, and its recording; this keeps nothing of it alive."""
        if self.given_away or self.used:
            another = self._another()
            return another.recording, another.result
        recording, result = self.recording, self.result
        self.result, self.given_away = None, True
        self.variables = {path: (None, copy.copy(recorded)) for path, (_, recorded) in self.variables.items()}
        return recording, result

    def _another(self) -> Skeleton:
        """The same object built anew, with the names and initial values of the first; nothing is drawn for it."""
        if self.build is None:
            raise AssertionError("only models built by a function are built more than once")
        with _upstream.undone_draws():
            self.recording.restart()
            another = Skeleton(self.build, *record(self.build, self.recording))
        # The order is what identifies a variable: names of the user's own making may differ.
        for (_, new), (_, first) in zip(another.variables.values(), self.variables.values(), strict=True):
            new.initial, new.value = first.initial, first.value
        another.variables = dict(zip(self.variables, another.variables.values(), strict=True))
        return another


def finish(recording: Recording, variable: Any, array: jax.Array) -> None:
    """Makes an abstract variable an ordinary Keras variable that holds this array and keeps its sharding."""
    recording.forget(variable)
    replace(variable, array)


def replace(variable: Any, array: jax.Array) -> None:
    """Makes an array the value of a variable, which keeps its sharding from then on."""
    array = automatic(array)
    if kept_sharding(array.sharding) is None and array.committed:
        array = _upstream.uncommitted(array)
    distribution = keras.distribution.distribution()
    # Without a layout the next `assign` would put the whole value on the first device.
    layout: Any = array.sharding if isinstance(array.sharding, jax.sharding.NamedSharding) else None
    if layout is not None:
        stock = _upstream.layout(variable)
        if stock is None and distribution is not None:
            stock = distribution.get_variable_layout(variable)
        layout = stock if getattr(stock, "backend_layout", stock) == layout else layout
    _upstream.give_value(variable, array, layout)


def model_variables(result: Any) -> Iterator[Any]:
    """The variables that an object holds: a model's own, its optimizer's and its metrics'."""
    for attribute in ("variables", "metrics_variables"):
        yield from getattr(result, attribute, None) or ()
    yield from getattr(getattr(result, "optimizer", None), "variables", None) or ()
    if isinstance(result, tuple | list):
        for item in result:
            yield from model_variables(item)


def _collect(recording: Recording, result: Any, *, only_own: bool) -> dict[str, tuple[Any, RecordedVariable]]:
    """The abstract variables by path: the object's own in its order, then what else is alive unless `only_own`."""

    def all_recorded() -> dict[int, tuple[Any, RecordedVariable]]:
        return {id(variable): (variable, entry) for variable, entry in recording.variables()}

    recorded = all_recorded()
    held = itertools.chain(model_variables(result), getattr(getattr(result, "sampler", None), "variables", None) or ())
    own = {id(v): recorded.pop(id(v)) for v in held if id(v) in recorded}
    if not only_own and sum(_nbytes(variable) for variable, _ in recorded.values()) > _SWEEP_NBYTES:
        recorded.clear()
        gc.collect()
        recorded = {key: entry for key, entry in all_recorded().items() if key not in own}
    entries = [*own.values(), *(() if only_own else recorded.values())]
    return dict(zip(unique_paths([variable.path for variable, _ in entries]), entries, strict=True))


def _nbytes(variable: Any) -> int:
    return int(np.prod(variable.shape)) * jax.numpy.dtype(_upstream.own_dtype(variable)).itemsize
