"""Creates an `AbstractModel` from a Keras object whose variables are abstract."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymodel import AbstractModel, AbstractVariable, CheckpointError, LazyTensor
from lazymodel._abstract.paths import rule_path
from lazymodel._abstract.spec import ModelSpec, Optimized
from lazymodel._abstract.variable import Reason
from lazymodel._errors import warn
from lazymodel._programs.programs import InitRecipe
from lazymodel._sharding.follow import follow, follow_weights
from lazymodel._sharding.shard import check_spec
from lazymodel._show.text import first_of, format_bytes, listed
from lazymodel._show.timeline import Span
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import AbstractKerasObject
from lazymodel_keras._model.training import optimizer_variables, slot_references, trained_variables
from lazymodel_keras._record.initializers import LARGE, GivenValue

_REPLICATED_NBYTES = 1 << 20


def from_skeleton(
    skeleton: AbstractKerasObject, *, quiet: bool = False, spent: Sequence[Span] = ()
) -> AbstractModel[Any]:
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
    trained = trained_variables(skeleton.recording, paths)
    model = AbstractModel(
        variables=variables,
        recipes=tuple(recipes),
        sources=sources,
        framework=skeleton,
        name=getattr(skeleton.result, "name", None) or "model",
        unused=skeleton.recording.unused_tensors(),
        mismatched=skeleton.recording.mismatched_tensors(variable for variable, _ in skeleton.variables.values()),
        optimized=None if trained is None else Optimized(trained),
        spent=(*spent, Span.since(skeleton.recording.began, "build")),
    )
    skeleton.spec = model
    return model


def extended(abstract: ModelSpec, skeleton: AbstractKerasObject) -> AbstractModel[Any]:
    """The model of a skeleton that got more variables since `abstract` was created from it and perhaps placed.

    New variables have values from checkpoints if the skeleton does, and are placed like their owners, or on every
    device of the mesh.
    """
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
    skeleton: AbstractKerasObject, abstract: Mapping[str, AbstractVariable], paths: Mapping[int, str]
) -> dict[str, AbstractVariable]:
    """The variables with the shardings of the distribution; optimizer state has those of its owners."""
    distribution = skeleton.distribution
    references = slot_references(skeleton.recording)
    state = optimizer_variables(skeleton.recording, skeleton.result)
    variables = dict(abstract)
    slots: dict[str, AbstractVariable] = {}
    for path, (variable, _) in skeleton.variables.items():
        reference = references.get(id(variable))
        # Placed variables stay where they are, whatever the rules; a slot is placed like the variable that it belongs
        # to, even if that has its values already. Step counts belong to no variable.
        placed = _upstream.value(variable)
        if placed is None and reference is None and id(variable) not in state:
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
    twice = [path for path, found in large.items() if found.twice]
    warn(
        f"{len(large)} variables of more than {format_bytes(LARGE)} are kept whole on the host, as their initializers "
        f"make them of NumPy arrays: {described}. What keras.random, keras.ops and JAX make is made on devices"
        + (f"; called twice, as they need values: {listed(twice)}" if twice else "")
        + "."
    )
