"""From recorded Keras variables to an `AbstractModel`, and from finished arrays back to Keras variables."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from lazymodel import (
    AbstractModel,
    AbstractVariable,
    CheckpointError,
    InitRecipe,
    LazyModelWarning,
    LazyTensor,
    ProgramCache,
    StoredTensor,
)
from lazymodel._abstract import unique_paths
from lazymodel._bytes import format_bytes
from lazymodel._optimizer import Optimized, follow
from lazymodel._sharding import check_spec, follow_weights, rule_path
from lazymodel_keras import _initializers, _upstream
from lazymodel_keras._recording import RecordedVariable, Recording
from lazymodel_keras._training import automatic, optimizer_variables, slot_references, trained_variables

if TYPE_CHECKING:
    from lazymodel._plan_compiled import PlannedFunction

# Abstract variables that the returned object does not hold, such as a discarded layer's, are swept up above this.
_SWEEP_NBYTES = 1 << 20
_REPLICATED_NBYTES = 1 << 20


class Skeleton:
    """A Keras object whose variables are abstract, and how to make another one like it.

    Attributes:
        recording: What was recorded while it was built.
        used: Whether its object has been filled.
        result: What the user's build function returned.
        variables: Path to variable and what was recorded about it.
    """

    def __init__(
        self, build: Callable[[], Any] | None, recording: Recording, result: Any, *, only_own: bool = False
    ) -> None:
        self._build = build
        self.recording = recording
        self.used = False
        self.result = result
        self.variables = _collect(recording, result, only_own=only_own)

    def unused(self) -> tuple[StoredTensor, ...]:
        """What the weight files that are open now hold and nothing asked for."""
        return self.recording.unused_tensors()

    def fill(self, arrays: Mapping[str, jax.Array]) -> Any:
        """Gives every variable its array and returns the object; each call returns an object of its own."""
        skeleton = self if not self.used else self._another()
        skeleton.used = True
        for path, (variable, _) in skeleton.variables.items():
            finish(skeleton.recording, variable, arrays[path])
        return skeleton.result

    def plan_function(self, what: str, *, batch: int, sequence: int | None) -> PlannedFunction:
        """See `lazymodel._plan_compiled`, which looks for this method."""
        from lazymodel_keras._planning import plan_function

        return plan_function(self, what, batch=batch, sequence=sequence)

    def _another(self) -> Skeleton:
        """The same object built anew; the seeds it draws are given back, since its own values are not used."""
        if self._build is None:
            raise AssertionError("only models built by a function are filled more than once")
        with _upstream.undone_draws():
            recording, result = record(self._build)
        another = Skeleton(self._build, recording, result)
        # Keras numbers names across the process (dense, dense_1), so the order is what identifies a variable.
        another.variables = dict(zip(self.variables, another.variables.values(), strict=True))
        return another


def record(build: Callable[[], Any]) -> tuple[Recording, Any]:
    """Runs a build function abstractly."""
    recording = Recording()
    with recording:
        result = build()
    return recording, result


def abstract_model(build: Callable[[], Any], recording: Recording, result: Any) -> AbstractModel:
    """The abstract model of what a recording built."""
    return from_skeleton(Skeleton(build, recording, result))


def from_skeleton(skeleton: Skeleton) -> AbstractModel:
    """Variables, recipes and sources of a skeleton; shardings come from the active `keras.distribution`.

    Raises:
        CheckpointError: A tensor can lose what it means in its variable's dtype.
    """
    variables: dict[str, AbstractVariable] = {}
    recipes: list[InitRecipe] = []
    sources: dict[str, Any] = {}
    distribution = keras.distribution.distribution()
    slots: dict[str, AbstractVariable] = {}
    references = slot_references(skeleton.recording)
    state = optimizer_variables(skeleton.recording, skeleton.result)
    paths = {id(variable): path for path, (variable, _) in skeleton.variables.items()}
    refused: list[str] = []
    for path, (variable, recorded) in skeleton.variables.items():
        value = recorded.value
        if value is None:
            value = _initializers.initial_value(path, variable, recorded)
        if isinstance(value, InitRecipe):
            recipes.append(value)
            origin = value.origin
        else:
            sources[path] = value if isinstance(value, LazyTensor) else np.asarray(value)
            origin = "constant"
            if isinstance(value, LazyTensor):
                origin = f"{value.file}:{value.name}" if value.file else "computed"
        abstract = AbstractVariable(
            path=path,
            shape=tuple(variable.shape),
            dtype=np.dtype(jax.dtypes.canonicalize_dtype(_jax_dtype(variable._dtype))),
            origin=origin,
            trainable=bool(variable.trainable),
        )
        if why := skeleton.recording.refused_cast(path, value, abstract.dtype):
            refused.append(why)
        if variable._value is not None:  # another value for a variable that has its place, whatever rules say
            slots[path] = dataclasses.replace(abstract, follows="", sharding=variable._value.sharding)
            variables[path] = slots[path]
            continue
        reference = references.get(id(variable))
        if reference is None and id(variable) not in state:
            variables[path] = _with_layout(abstract, variable, distribution)
            continue
        # Placed like the variable that it belongs to, even if that has its values already; step counts have none.
        placed = None if reference is None else reference._value
        follows = "" if placed is not None else paths.get(id(reference), "")
        sharding = None if placed is None else placed.sharding
        slots[path] = variables[path] = dataclasses.replace(abstract, follows=follows, sharding=sharding)
    if refused:
        more = f" ({len(refused)} tensors are refused)" if len(refused) > 1 else ""
        raise CheckpointError(f"{refused[0]}{more}.")
    if distribution is not None:
        # Published layout maps know no LoRA pairs and no quantization scales.
        without_layout = [path for path in variables if path not in slots and not has_layout(path, distribution)]
        variables |= follow_weights(variables, without_layout)
        related = {path: slot for path, slot in slots.items() if slot.sharding is None}
        related = follow(related, {path: v for path, v in variables.items() if path not in slots})
        variables |= {
            # An optimizer alone has no variable whose mesh it could take.
            path: v if v.sharding is not None else _with_layout(v, skeleton.variables[path][0], distribution)
            for path, v in related.items()
        }
        _warn_replicated(list(variables.values()))
    trained = trained_variables(skeleton.recording, paths)
    return AbstractModel(
        variables=variables,
        recipes=tuple(recipes),
        sources=sources,
        rebuild=skeleton.fill,
        structure=dict,
        programs=ProgramCache(),
        name=getattr(skeleton.result, "name", None) or "model",
        unused=skeleton.unused(),
        mismatched=skeleton.recording.mismatched_tensors(variable for variable, _ in skeleton.variables.values()),
        optimized=None if trained is None else Optimized(trained),
    )


def finish(recording: Recording, variable: Any, array: jax.Array) -> None:
    """Makes an abstract variable an ordinary Keras variable that holds this array and keeps its sharding."""
    recording.forget(variable)
    array = automatic(array)
    distribution = keras.distribution.distribution()
    if isinstance(array.sharding, jax.sharding.NamedSharding):
        layout: Any = array.sharding
        if distribution is not None:
            stock = distribution.get_variable_layout(variable)
            if getattr(stock, "backend_layout", stock) == array.sharding:
                layout = stock
        # Without a layout the next `assign` would put the whole value on the first device.
        variable._layout = layout
    variable._value = array
    variable._initializer = None


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
    recorded = {id(variable): (variable, entry) for variable, entry in recording.variables()}
    own: dict[int, tuple[Any, RecordedVariable]] = {}
    for variable in model_variables(result):
        if id(variable) in recorded:
            own[id(variable)] = recorded[id(variable)]
    others = [] if only_own else [entry for key, entry in recorded.items() if key not in own]
    if sum(_nbytes(variable) for variable, _ in others) > _SWEEP_NBYTES:
        del others, recorded
        variable = None
        gc.collect()
        recorded = {id(variable): (variable, entry) for variable, entry in recording.variables()}
        others = [entry for key, entry in recorded.items() if key not in own]
    entries = [*own.values(), *others]
    return dict(zip(unique_paths([variable.path for variable, _ in entries]), entries, strict=True))


def _nbytes(variable: Any) -> int:
    return int(np.prod(variable.shape)) * _jax_dtype(variable._dtype).itemsize


def _jax_dtype(name: str) -> np.dtype[Any]:
    return jax.numpy.dtype(name)


def _with_layout(abstract: AbstractVariable, variable: Any, distribution: Any) -> AbstractVariable:
    """The variable with the sharding that the active distribution gives it."""
    if distribution is None:
        return abstract
    layout = distribution.get_variable_layout(variable)
    sharding = getattr(layout, "backend_layout", layout)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
        check_spec(abstract, sharding.spec, sharding.mesh)
    return dataclasses.replace(abstract, sharding=sharding)


def has_layout(path: str, distribution: Any) -> bool:
    """Whether the layout map of a distribution has an entry for a variable."""
    return distribution is not None and distribution.get_tensor_layout(rule_path(path)) is not None


def _warn_replicated(variables: list[AbstractVariable]) -> None:
    large = [
        variable
        for variable in variables
        if variable.nbytes >= _REPLICATED_NBYTES
        and variable.sharding is not None
        and len(variable.sharding.device_set) > 1
        and variable.sharding.is_fully_replicated
    ]
    if large:
        listed = ", ".join(f"{v.path} {v.shape} {format_bytes(v.nbytes)}" for v in large[:8])
        warnings.warn(
            f"the active keras.distribution replicates {len(large)} variables of at least "
            f"{format_bytes(_REPLICATED_NBYTES)} on every device: {listed}{', …' if len(large) > 8 else ''}. "
            "Add them to its LayoutMap.",
            LazyModelWarning,
            stacklevel=4,
        )
