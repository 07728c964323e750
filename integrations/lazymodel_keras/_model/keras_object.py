"""A Keras object whose variables are abstract: its parts, how it is filled, and how another one is built."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lazymodel._abstract.framework import Framework, LoweredFunction, PlannedFunction
from lazymodel._abstract.paths import unique_paths
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import ShardingError
from lazymodel._show.text import listed
from lazymodel_keras import _upstream
from lazymodel_keras._model.compiled import holding, inputs_of, lower
from lazymodel_keras._model.training import automatic, kept_sharding
from lazymodel_keras._record.recording import RecordedVariable, Recording, record


def _cross_entropy(outputs: Any, inputs: Any) -> Any:
    tokens = inputs["token_ids"]
    if getattr(outputs, "ndim", 0) != 3 or outputs.shape[:2] != tokens.shape:
        return _mean_square(outputs, inputs)
    logits = jax.nn.log_softmax(outputs.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None].astype(jnp.int32), axis=-1))


def _mean_square(outputs: Any, inputs: Any) -> Any:
    arrays = [array for array in jax.tree.leaves(outputs) if jnp.issubdtype(array.dtype, jnp.floating)]
    return sum(jnp.mean(jnp.square(array.astype(jnp.float32))) for array in arrays)


# Above this size, variables that the returned object does not hold, such as those of a discarded layer, are collected.
_SWEEP_NBYTES = 1 << 20


class AbstractKerasObject(Framework):
    """A Keras object whose variables are abstract, and a way to build another one like it.

    Attributes:
        build: Builds such an object; None if only one is needed.
        recording: The record of building this one.
        result: The result of the build function.
        only_own: True to include only variables that the object holds.
        used: True once its object has been filled.
        given_away: True once its object was taken to be changed, so that another has to be built.
        functions: The functions that its object has created for compiling, and their shardings by path.
        variables: Path → variable and its record; with `only_own`, only variables that the object holds.
        distribution: The `keras.distribution` that was active when it was built.
    """

    spec: ModelSpec  # the abstract model, as it was created from this

    def __init__(
        self, build: Callable[[], Any] | None, recording: Recording, result: Any, *, only_own: bool = False
    ) -> None:
        super().__init__(dict)
        self.build, self.recording, self.result = build, recording, result
        self.used = self.given_away = False
        self.functions: dict[str, dict[str, Any]] = {}
        self._reserved: AbstractKerasObject | None = None
        self.only_own = only_own
        self.variables: dict[str, tuple[Any, RecordedVariable]] = _collect(recording, result, only_own=only_own)
        self.distribution = keras.distribution.distribution()

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        offloaded = [path for path, variable in variables.items() if variable.memory_kind is not None]
        if offloaded:
            raise ShardingError(
                f"{listed(offloaded)}: in {variables[offloaded[0]].memory_kind}, and Keras' layers and optimizers "
                "compute with variables in place, which JAX refuses there. Keep a Keras model's own variables on "
                "devices; an Optax state can be there, with_optimizer(optimizer, memory_kind='pinned_host'), and a "
                "finished model between its uses (lazymodel.reshard)"
            )

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        """Gives every variable its array and returns the object; each call returns a separate object."""
        skeleton = self.upcoming()
        self.leave()
        for what, shardings in skeleton.functions.items():
            if any(arrays[path].sharding != sharding for path, sharding in shardings.items()):
                setattr(skeleton.result, f"{what}_function", None)  # created again on the next call
        for path, (variable, _) in skeleton.variables.items():
            skeleton.recording.forget(variable)
            replace(variable, arrays[path])
        return skeleton.result

    def upcoming(self) -> AbstractKerasObject:
        """The object that the next `rebuild` fills: this one, or another one like it, which is kept until then."""
        self._reserved = self._reserved or self.unfilled()
        return self._reserved

    def unfilled(self) -> AbstractKerasObject:
        """This object, or another one like it if this one has been filled."""
        skeleton = self.present()
        return skeleton._another() if skeleton.used else skeleton

    def leave(self) -> None:
        """Hands `upcoming` over to a caller that fills it instead."""
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
        """Each variable with the struct that its array will have in the object."""
        return [
            (variable, structs[path].update(sharding=kept_sharding(structs[path].sharding)))
            for path, (variable, _) in self.variables.items()
        ]

    def forward(self, what: str, *, batch: int, sequence: int | None) -> PlannedFunction:
        """A Keras model's own forward pass or loss (`what="train"`), as a function of its variables by path.

        The loss of a language model is the cross-entropy of its logits, in float32, with tokens of the same shape; the
        loss of any other model is the mean of its squared outputs, which has the same shapes to differentiate.
        `sequence` applies if the model takes any number of tokens; None is 1024 or the most that it takes.

        Raises:
            LazyModelError: The model does not define its inputs.
        """
        skeleton = self.present()
        model: Any = skeleton.result
        described: dict[str, None] = {}
        inputs = inputs_of(model, batch, sequence, described)
        training = what == "train"
        # A backbone's outputs also have the shape of logits; only a task knows that they are logits.
        is_task = getattr(model, "backbone", None) is not None
        loss = _cross_entropy if is_task and isinstance(inputs, Mapping) and "token_ids" in inputs else _mean_square

        def function(values: Mapping[str, Any], inputs: Any) -> Any:
            mapping = [(variable, values[path]) for path, (variable, _) in skeleton.variables.items()]
            with keras.StatelessScope(state_mapping=mapping):
                outputs = model(inputs, training=training)
            return loss(outputs, inputs) if training else outputs

        return PlannedFunction(function, (inputs,), f"{model.name} of {', '.join(described)}")

    def present(self) -> AbstractKerasObject:
        """This object, with a result; builds a new result if `give_away` took it."""
        if self.given_away:
            another = self._another()
            self.recording, self.result, self.variables = another.recording, another.result, another.variables
            self.given_away = False
        return self

    def add_variables(self, known: Mapping[str, tuple[Any, RecordedVariable]]) -> None:
        """Keeps the paths of known variables, and adds the other recorded ones after them."""
        ids = {id(variable) for variable, _ in known.values()}
        more = [entry for entry in self.variables.values() if id(entry[0]) not in ids]
        paths = unique_paths([*known, *(variable.path for variable, _ in more)])
        self.variables = dict(zip(paths, [*known.values(), *more], strict=True))

    def give_away(self) -> tuple[Recording, Any]:
        """An unfilled object to be changed, and its recording; keeps no references to it."""
        if self.given_away or self.used:
            another = self._another()
            return another.recording, another.result
        recording, result = self.recording, self.result
        self.result, self.given_away = None, True
        self.variables = {path: (None, copy.copy(recorded)) for path, (_, recorded) in self.variables.items()}
        return recording, result

    def _another(self) -> AbstractKerasObject:
        """The same object, built again with the names and initial values of the first, without new draws."""
        if self.build is None:
            raise AssertionError("only models built by a function are built more than once")
        with _upstream.undone_draws():
            self.recording.restart()
            another = AbstractKerasObject(self.build, *record(self.build, self.recording))
        # The order identifies a variable: names that the user's code creates may differ.
        for (_, new), (_, first) in zip(another.variables.values(), self.variables.values(), strict=True):
            new.initial, new.value = first.initial, first.value
        another.variables = dict(zip(self.variables, another.variables.values(), strict=True))
        return another


def replace(variable: Any, array: jax.Array) -> None:
    """Sets the value of a variable to an array; the variable keeps the array's sharding from then on."""
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
    """The variables that an object holds: a model's own, and those of its optimizer and metrics."""
    for attribute in ("variables", "metrics_variables"):
        yield from getattr(result, attribute, None) or ()
    yield from getattr(getattr(result, "optimizer", None), "variables", None) or ()
    if isinstance(result, tuple | list):
        for item in result:
            yield from model_variables(item)


def _collect(recording: Recording, result: Any, *, only_own: bool) -> dict[str, tuple[Any, RecordedVariable]]:
    """Abstract variables by path: the object's own in its order, then others that exist unless `only_own`."""

    def all_recorded() -> dict[int, tuple[Any, RecordedVariable]]:
        return {id(variable): (variable, entry) for variable, entry in recording.variables()}

    recorded = all_recorded()
    held = itertools.chain(model_variables(result), getattr(getattr(result, "sampler", None), "variables", None) or ())
    own = {id(v): recorded.pop(id(v)) for v in held if id(v) in recorded}
    left = ((variable, jax.numpy.dtype(_upstream.own_dtype(variable)).itemsize) for variable, _ in recorded.values())
    if not only_own and sum(math.prod(variable.shape) * size for variable, size in left) > _SWEEP_NBYTES:
        recorded.clear()
        gc.collect()
        recorded = {key: entry for key, entry in all_recorded().items() if key not in own}
    entries = [*own.values(), *(() if only_own else recorded.values())]
    return dict(zip(unique_paths([variable.path for variable, _ in entries]), entries, strict=True))
