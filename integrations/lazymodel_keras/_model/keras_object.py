"""A Keras object whose variables are abstract: its parts, how it is filled, and how another one is built.

Creates an `AbstractModel` from such an object, and finds the model variable that an optimizer variable belongs to, as
it is placed like that.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import os
import re
import time
from collections import ChainMap
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import SingleDeviceSharding

from lazymodel import AbstractModel, CheckpointError, LazyModelError, LazyTensor
from lazymodel._abstract.framework import Framework, LoweredFunction, ModelSpec, Optimized, PlannedFunction
from lazymodel._abstract.pairs import LoraPair
from lazymodel._abstract.variable import (
    AbstractVariable,
    Reason,
    automatic,
    automatic_sharding,
    rule_path,
    unique_paths,
)
from lazymodel._errors import ShardingError, warn
from lazymodel._mapping.resolve import lazy_values
from lazymodel._programs.programs import InitRecipe
from lazymodel._sharding.follow import follow, follow_weights
from lazymodel._sharding.shard import check_spec
from lazymodel._show.progress import Span
from lazymodel._show.text import first_of, format_bytes, listed
from lazymodel_keras import _upstream
from lazymodel_keras._model.compiled import check, first_batch, holding, inputs_of, lower
from lazymodel_keras._model.layers import (
    Filters,
    add_lora,
    check_lora,
    check_quantization,
    conversions,
    lora_pairs,
    quantize,
    quantized_checkpoint,
    quantized_counts,
)
from lazymodel_keras._record.initializers import LARGE, GivenValue
from lazymodel_keras._record.recording import RecordedVariable, Recording, record, session


def _optimizers(recording: Recording) -> Iterator[tuple[Any, list[Any]]]:
    """The built optimizers and the variables they were built for; None for a variable that no longer exists."""
    for reference, variables in recording.optimizers:
        if (optimizer := reference()) is not None:
            yield optimizer, [variable() for variable in variables]


def _optimizer_state(recording: Recording, result: Any) -> dict[int, Any]:
    """`id` of each variable of the optimizers, built or compiled with → the model variable that it belongs to, or None.

    Optimizers keep state in lists that run parallel to the variables they were built for. That is true for all of
    Keras' optimizers and for others that follow its guide. Names are not enough: Adafactor's moments have the name of
    their variable.
    """
    objects = result if isinstance(result, list | tuple) else (result,)
    compiled = [item if isinstance(item, keras.Optimizer) else getattr(item, "optimizer", None) for item in objects]
    built = list(_optimizers(recording))
    every = [*(optimizer for optimizer, _ in built), *compiled]
    state = {id(variable): None for optimizer in every for variable in getattr(optimizer, "variables", None) or ()}
    for optimizer, owners in built:
        own = [id(variable) for variable in optimizer.variables]
        for slots in vars(optimizer).values():
            if not isinstance(slots, list | tuple) or len(slots) != len(owners):
                continue
            if [id(slot) for slot in slots] == own:
                continue  # the list of all its variables, which has the same length by chance
            pairs = [pair for pair in zip(slots, owners, strict=True) if isinstance(pair[0], keras.Variable)]
            state |= {id(slot): owner for slot, owner in pairs if owner is not None and slot is not owner}
    return state


def _trained_variables(recording: Recording, paths: Mapping[int, str]) -> tuple[str, ...] | None:
    """Paths, by `id`, of what the optimizers among these variables were built for; None without an optimizer."""
    found = [owners for optimizer, owners in _optimizers(recording) if any(id(v) in paths for v in optimizer.variables)]
    trained = (variable for owners in found for variable in owners if variable is not None and variable.trainable)
    return tuple(dict.fromkeys(paths[id(v)] for v in trained if id(v) in paths)) if found else None


def kept_sharding(sharding: Any) -> Any:
    """The sharding of a variable's array in the finished model; None if it is committed to no device.

    Keras' own arrays on its one device are not committed. Committed ones would differ from fresh arrays, which metrics
    get with every epoch, so JAX would compile the step twice.
    """
    default = jax.local_devices()[0]
    if sharding == SingleDeviceSharding(default) and jax.config.jax_default_device in (None, default):
        return None
    return automatic_sharding(sharding)


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


_POSITION = re.compile(r"(^|/)vars/\d+$")  # in Keras' own files

Variables: TypeAlias = "dict[str, tuple[Any, RecordedVariable]]"


class KerasModel(Framework):
    """Keras objects whose variables are abstract, built one after the other as they are needed.

    One object is kept until it is taken, to be filled or changed. Then the next one is built like it.

    Attributes:
        build: Builds such an object; None if only one is needed.
        recording: The record of building the object.
        result: The object, as the build function returned it.
        only_own: True to include only variables that the object holds.
        variables: Path → variable and its record; without the variable once the object was taken.
        filled: True once an object was taken to be filled.
        functions: The functions that the object has created for compiling, and their shardings by path.
        distribution: The `keras.distribution` that was active when it was built.
        before: The model before it was quantized, and what it got then; None if it was not.
        changes: What was done to the object since it was built.
    """

    spec: ModelSpec  # the abstract model, as it was created from this

    def __init__(
        self, build: Callable[[], Any] | None, recording: Recording, result: Any, *, only_own: bool = False
    ) -> None:
        super().__init__(dict)
        self.result: Any = result
        self.build, self.recording, self.only_own = build, recording, only_own
        self.variables: Variables = _collect(recording, result, only_own=only_own)
        counts = dict.fromkeys(map(id, getattr(result, "metrics_variables", None) or ()), 0) | quantized_counts(result)
        self._counts = {path: counts[id(v)] for path, (v, _) in self.variables.items() if id(v) in counts}
        self.distribution = keras.distribution.distribution()
        self.functions: dict[str, dict[str, Any]] = {}
        self.before: tuple[ModelSpec, frozenset[str]] | None = None
        self.changes: tuple[Callable[[Any], None], ...] = ()
        self.filled = self._taken = False

    def unfilled(self) -> KerasModel:
        """Itself, with an object. Another one has the names and initial values of the first, without new draws."""
        if self._taken:
            assert self.build is not None, "only models built by a function are built more than once"
            with _upstream.undone_draws():
                self.recording.restart()
                self.recording, self.result = record(self.build, self.recording)
            entries = _collect(self.recording, self.result).values()
            # The order identifies a variable: names that the user's code creates may differ.
            for (_, new), (_, first) in zip(entries, self.variables.values(), strict=True):
                new.initial, new.value = first.initial, first.value
            self.variables = dict(zip(self.variables, entries, strict=True))
            self.functions, self._taken = {}, False
        return self

    def take(self, *, change: bool = False) -> tuple[Recording, Any, Variables]:
        """The record, the object and its variables, to fill them, or to change them; keeps no reference to them."""
        taken = self.unfilled().recording, self.result, self.variables
        self.result, self._taken, self.filled = None, True, self.filled or not change
        self.variables = {path: (None, copy.copy(recorded)) for path, (_, recorded) in self.variables.items()}
        return taken

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
        recording, result, variables = self.take()
        for what, shardings in self.functions.items():
            if any(arrays[path].sharding != sharding for path, sharding in shardings.items()):
                setattr(result, f"{what}_function", None)  # created again on the next call
        for path, (variable, _) in variables.items():
            recording.forget(variable)
            replace(variable, arrays[path])
        return result

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        with holding(self.unfilled()._described(structs)):
            yield self.result

    def traceable(self) -> Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]:
        result, variables = self.unfilled().result, self.variables

        @contextlib.contextmanager
        def holding_traced(arrays: Mapping[str, Any]) -> Generator[Any]:
            """What a function assigns to the variables ends with the context."""
            mapping = [(variable, arrays[path]) for path, (variable, _) in variables.items()]
            with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
                yield result

        return holding_traced

    def usable_sharding(self, sharding: Any) -> Any:
        return automatic_sharding(sharding)

    def lowered(
        self,
        what: str,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        *,
        inputs: Sequence[Any] = (),
        batch: int | None,
        sequence: int | None,
    ) -> Sequence[LoweredFunction]:
        described = self.unfilled()._described(structs)
        shardings = {path: struct.sharding for path, struct in structs.items()}
        anew = self.functions.get(what) != shardings
        lowered = lower(self.result, described, what, inputs, batch=batch, sequence=sequence, anew=anew)
        self.functions[what] = shardings
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
        model, variables = self.unfilled().result, self.variables
        described: dict[str, None] = {}
        inputs = inputs_of(model, batch, sequence, described)
        training = what == "train"
        # A backbone's outputs also have the shape of logits; only a task knows that they are logits.
        is_task = getattr(model, "backbone", None) is not None
        loss = _cross_entropy if is_task and isinstance(inputs, Mapping) and "token_ids" in inputs else _mean_square

        def function(values: Mapping[str, Any], inputs: Any) -> Any:
            mapping = [(variable, values[path]) for path, (variable, _) in variables.items()]
            with keras.StatelessScope(state_mapping=mapping):
                outputs = model(inputs, training=training)
            return loss(outputs, inputs) if training else outputs

        return PlannedFunction(function, (inputs,), f"{model.name} of {', '.join(described)}")

    def prepared(
        self, model: Any, what: str, *, inputs: Sequence[Any] = (), batch: int | None, sequence: int | None
    ) -> Any:
        if what != "train":
            return model
        check(self.unfilled().result, what)
        if _upstream.is_built(self.result):
            return model
        data = first_batch(self.result, what, inputs, batch, sequence)
        recording, result, variables = self.take()
        built = self._with(recording, result, lambda result: _upstream.build_for(result, data))
        return extended(model, built, variables)

    def quantize(self, model: Any, how: Any, filters: Filters, inputs: Any) -> AbstractModel[Any]:
        check_quantization(how, inputs)
        changed = self._changed(model, "quantize", lambda built: quantize(built, how, filters))
        changed.framework.before = model, frozenset(changed) - frozenset(model)
        return changed

    def counts(self) -> Mapping[str, int]:
        return self._counts

    def fix_names(self, names: Sequence[str]) -> str:
        if any(_POSITION.search(name) for name in names):
            return "Keras' own files name variables by position: load it with lazymodel_keras.restore(abstract, path)"
        return super().fix_names(names)

    def computed(self, model: ModelSpec, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.before is None:
            return checkpoint
        before, added = self.before
        return quantized_checkpoint(model, lazy_values(before), added, checkpoint)

    def unquantized(self, model: ModelSpec, given: Container[str]) -> ModelSpec:
        if self.before is None:
            return model
        before, added = self.before
        found = conversions(model, lazy_values(before))
        left = tuple(each for each in found if not all(path in given for path in each.paths))
        read = dataclasses.replace(model, conversions=left).as_read()
        # Not computed from weights: the places of groups, and the histories of float8.
        return read.with_variables({path: v for path, v in read.items() if path in given or path not in added})

    def lora(self, model: Any, rank: Any, targets: str | None, inputs: Any) -> AbstractModel[Any]:
        check_lora(rank, targets, inputs)
        return self._changed(model, "lora", lambda built: add_lora(built, rank, targets))

    def tensors(self) -> Mapping[str, Any]:
        return ChainMap(*(file.tensors for file in self.recording.files.values()))

    def lora_pairs(self, variables: Mapping[str, AbstractVariable]) -> list[LoraPair]:
        own = self.unfilled().variables
        return lora_pairs(self.result, {id(variable): path for path, (variable, _) in own.items()})

    def _changed(self, model: ModelSpec, step: str, change: Callable[[Any], None]) -> AbstractModel[Any]:
        changes = {
            "an optimizer": model.optimized is not None,
            "other initializers": model.recipes is not self.spec.recipes,
            "shardings": dict(model) != dict(self.spec),
        }
        if before := [change for change, is_there in changes.items() if is_there]:
            raise LazyModelError(
                f"{model.name} has {before[0]} already, which are for its variables as they were built: {step} comes "
                "before shard, with_optimizer, reinitialize and rekey"
            )
        if not isinstance(self.unfilled().result, keras.Model):
            raise LazyModelError(f"{step} changes one keras.Model; this is {type(self.result).__name__}")
        recording, result = self.take(change=True)[:2]  # a change may drop variables
        recording.began = time.perf_counter()
        return from_skeleton(self._with(recording, result, change), quiet=True, spent=model.spent)

    def _with(self, recording: Recording, result: Any, change: Callable[[Any], None]) -> KerasModel:
        """The model of a taken object after a change, which is made to each other object of it as well."""
        build = self.build

        def rebuild() -> Any:
            assert build is not None
            built = build()
            change(built)
            return built

        with contextlib.nullcontext() if _upstream.active() is recording else session(recording):
            change(result)
        changed = KerasModel(build and rebuild, recording, result, only_own=self.only_own)
        changed.distribution, changed.before, changed.changes = self.distribution, self.before, (*self.changes, change)
        return changed


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


def by_path(variables: Iterable[Any]) -> dict[str, Any]:
    """Path → variable, with the names of `build_abstract`: Adafactor's own paths, for example, are not unique."""
    found = list(variables)
    return dict(zip(unique_paths([variable.path for variable in found]), found, strict=True))


def _collect(recording: Recording, result: Any, *, only_own: bool = False) -> Variables:
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
    return _by_path({}, [*own.values(), *(() if only_own else recorded.values())])


def _by_path(known: Variables, entries: Iterable[tuple[Any, RecordedVariable]]) -> Variables:
    """Known variables under their paths, and the others after them."""
    ids = {id(variable) for variable, _ in known.values()}
    more = [entry for entry in entries if id(entry[0]) not in ids]
    paths = unique_paths([*known, *(variable.path for variable, _ in more)])
    return dict(zip(paths, [*known.values(), *more], strict=True))


_REPLICATED_NBYTES = 1 << 20


def from_skeleton(skeleton: KerasModel, *, quiet: bool = False, spent: Sequence[Span] = ()) -> AbstractModel[Any]:
    """The model of a skeleton, which is stored as its `spec`; shardings are those of its `keras.distribution`.

    Raises CheckpointError if a tensor could lose its meaning in its variable's dtype. With `quiet`, there are no
    warnings about what the distribution replicates.
    """
    recipes: list[InitRecipe] = []
    sources: dict[str, Any] = {}
    computed: dict[str, GivenValue] = {}
    abstract: dict[str, AbstractVariable] = {}
    refused: list[str] = []
    for path, (variable, recorded) in skeleton.variables.items():
        value, origin = recorded.value, "constant"
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(jax.numpy.dtype(_upstream.own_dtype(variable))))
        if value is None:
            assert recorded.initial is not None
            value, dtype = recorded.initial.source(path, tuple(variable.shape), dtype)
            origin = recorded.initial.origin
            if isinstance(recorded.initial, GivenValue) and recorded.initial.computed:
                computed[path] = recorded.initial
        elif isinstance(value, LazyTensor):
            origin = f"{value.name} of {os.path.basename(value.file)}" if value.file else "computed"
        if isinstance(value, InitRecipe):
            recipes.append(value)
        else:
            sources[path] = value if isinstance(value, LazyTensor) else np.asarray(value)
        abstract[path] = AbstractVariable(
            path, tuple(variable.shape), dtype, origin=origin, trainable=bool(variable.trainable)
        )
        if why := skeleton.recording.refused_cast(path, value, dtype):
            refused.append(why)
    if refused:
        raise CheckpointError(f"{first_of(refused, 'tensors are rejected')}.")
    paths = {id(variable): path for path, (variable, _) in skeleton.variables.items()}
    variables = _placed(skeleton, abstract, paths)
    if skeleton.distribution is not None and not quiet:
        _warn_replicated(variables.values())
    if not quiet:
        _warn_computed(computed)
    trained = _trained_variables(skeleton.recording, paths)
    model = AbstractModel(
        variables=variables,
        recipes=tuple(recipes),
        sources=sources,
        framework=skeleton,
        name=getattr(skeleton.result, "name", None) or "model",
        unused=skeleton.recording.unused_tensors(),
        mismatched=skeleton.recording.mismatched_tensors(variable for variable, _ in skeleton.variables.values()),
        notes=tuple(skeleton.recording.notes),
        optimized=None if trained is None else Optimized(trained),
        spent=(*spent, Span.since(skeleton.recording.began, "build")),
    )
    skeleton.spec = model
    return model


def extended(abstract: ModelSpec, skeleton: KerasModel, known: Variables) -> AbstractModel[Any]:
    """The model of a skeleton that got more than its `known` variables since `abstract` was created and perhaps placed.

    New variables have values from checkpoints if the skeleton does, and are placed like their owners, or on every
    device of the mesh.
    """
    skeleton.variables = _by_path(known, skeleton.variables.values())
    new = from_skeleton(skeleton, quiet=True)
    own = {path: dataclasses.replace(abstract[path], origin=new[path].origin) for path in abstract}
    added = {path: variable for path, variable in new.items() if path not in own}
    return dataclasses.replace(
        new,
        variables={**own, **follow(added, own)},
        # The abstract model's initial values, which may have been changed since it was built.
        recipes=(*abstract.recipes, *(r for r in new.recipes if not set(r.paths).intersection(own))),
        sources={**abstract.sources, **new.sources},
        programs=abstract.programs,
        spent=abstract.spent,
    )


def _placed(
    skeleton: KerasModel, abstract: Mapping[str, AbstractVariable], paths: Mapping[int, str]
) -> dict[str, AbstractVariable]:
    """The variables with the shardings of the distribution; optimizer state has those of its owners."""
    distribution = skeleton.distribution
    state = _optimizer_state(skeleton.recording, skeleton.result)
    variables = dict(abstract)
    slots: dict[str, AbstractVariable] = {}
    for path, (variable, _) in skeleton.variables.items():
        reference = state.get(id(variable))
        # Placed variables stay where they are, whatever the rules; a slot is placed like the variable that it belongs
        # to, even if that has its values already. Step counts belong to no variable.
        placed = _upstream.value(variable)
        if placed is None and id(variable) not in state:
            variables[path] = _with_layout(abstract[path], variable, distribution)
            continue
        if placed is None and reference is not None:
            placed = _upstream.value(reference)
        follows = "" if placed is not None else paths.get(id(reference), "")
        slot = _with_layout(abstract[path], variable, None)
        slots[path] = dataclasses.replace(slot, follows=follows, sharding=getattr(placed, "sharding", slot.sharding))
    variables |= slots
    if distribution is not None:
        # Published layout maps do not contain LoRA pairs and quantization scales.
        without_layout = [path for path in variables if path not in slots and not has_layout(path, distribution)]
        variables |= follow_weights(variables, without_layout)
        related = {path: slot for path, slot in slots.items() if slot.sharding is None}
        related = follow(related, {path: v for path, v in variables.items() if path not in slots})
        # An optimizer alone has no variable whose mesh it could use.
        alone = {path: v for path, v in related.items() if v.sharding is None}
        variables |= related
        variables |= {p: _with_layout(v, skeleton.variables[p][0], distribution) for p, v in alone.items()}
    return variables


def _with_layout(abstract: AbstractVariable, variable: Any, distribution: Any) -> AbstractVariable:
    """The variable with the sharding that it was created with, or that the active distribution gives it."""
    layout = own = _upstream.layout(variable)
    if own is None and distribution is not None:
        layout = distribution.get_variable_layout(variable)
    sharding = getattr(layout, "backend_layout", layout)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
        check_spec(abstract, sharding.spec, sharding.mesh)
    reason = None if own is None else Reason("metadata", "the layout that it was created with")
    return dataclasses.replace(abstract, sharding=sharding, reason=reason)


def has_layout(path: str, distribution: Any) -> bool:
    """Returns True if the layout map of a distribution has an entry for a variable."""
    return distribution is not None and distribution.get_tensor_layout(rule_path(path)) is not None


def _warn_replicated(variables: Iterable[AbstractVariable]) -> None:
    placed = [(v, v.sharding) for v in variables if v.nbytes >= _REPLICATED_NBYTES and v.sharding is not None]
    large = [v for v, sharding in placed if len(sharding.device_set) > 1 and sharding.is_fully_replicated]
    if large:
        described = listed(f"{v.path} {v.shape} {format_bytes(v.nbytes)}" for v in large)
        warn(
            f"the active keras.distribution replicates {len(large)} variables of at least "
            f"{format_bytes(_REPLICATED_NBYTES)} on every device: {described}. Add them to its LayoutMap."
        )


def _warn_computed(computed: Mapping[str, GivenValue]) -> None:
    """Warns about large values that could not be split over devices when they were initialized."""
    large = {path: found for path, found in computed.items() if found.whole_nbytes > LARGE}
    if not large:
        return
    described = listed(f"{path} {found.shape} {format_bytes(found.whole_nbytes)}" for path, found in large.items())
    warn(
        f"{len(large)} variables of more than {format_bytes(LARGE)} are kept whole on the host, as their initializers "
        f"make them of NumPy arrays: {described}. What keras.random, keras.ops and JAX make is made on devices."
    )
