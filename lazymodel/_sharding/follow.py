"""The shardings of variables that belong to another one: LoRA pairs, quantized numbers and scales, optimizer state.

Responsible for which dimension of one variable is split like which dimension of the other. `describe` finds what
belongs to what where the variable does not know it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from lazymodel._abstract.framework import AnyModel
from lazymodel._abstract.variable import AbstractVariable, Reason, flat_axes, in_memory
from lazymodel._sharding.describe import describe


def trimmed(entries: Sequence[Any]) -> PartitionSpec:
    """A spec without trailing entries that split nothing."""
    count = max((index + 1 for index, entry in enumerate(entries) if entry is not None), default=0)
    return PartitionSpec(*entries[:count])


def along(sharding: Any, dims: Sequence[int | None], shape: Sequence[int]) -> Any:
    """The sharding of an array of this shape that belongs to one with this `sharding`; unchanged if that has no spec.

    `dims` gives for each dimension the corresponding one of the other array, or None. A dimension that does not divide
    is not split, such as one with fewer quantization scales than parts. The kind of memory is the same.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    of_other = dict(enumerate(sharding.spec))
    entries = [None if dim is None else of_other.get(dim) for dim in dims]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in flat_axes(entry)) for entry in entries]
    fitting = [None if size % count else entry for size, count, entry in zip(shape, parts, entries, strict=True)]
    return NamedSharding(sharding.mesh, trimmed(fitting), memory_kind=sharding.memory_kind)


def follow_weights(variables: Mapping[str, AbstractVariable], paths: Iterable[str]) -> dict[str, AbstractVariable]:
    """LoRA pairs and quantization scales among the paths, each split like the weight that it belongs to.

    Omits those whose weight is unknown, has no sharding, or is itself one of the paths.
    """
    described = describe(variables)
    left = set(paths)
    followed: dict[str, AbstractVariable] = {}
    for path, variable in variables.items():
        role = described[path]
        weight = variables.get(role.follows or "") if path in left and role.role in ("lora", "scale") else None
        if weight is None or weight.path in left or weight.sharding is None:
            continue
        followed[path] = _belonging(variable, weight, role.dims, trained=role.role == "lora")
    return followed


def _belonging(
    variable: AbstractVariable, weight: AbstractVariable, dims: Sequence[int | None], *, trained: bool
) -> AbstractVariable:
    sharding = along(weight.sharding, dims, variable.shape)
    sharding = in_memory(sharding, None, variable.path) if trained else sharding
    if sharding is None:
        return variable
    spec = f"{sharding.spec}, " if isinstance(sharding, NamedSharding) else ""
    reason = Reason("follows", f"{spec}with {weight.path!r}, which it belongs to")
    return dataclasses.replace(variable, sharding=sharding, reason=reason)


def from_read(model: AnyModel, read: Mapping[str, AbstractVariable]) -> AnyModel:
    """The model with shardings and origins of the variables that it is read as (`ModelSpec.as_read`)."""
    if not model.conversions:
        return model.with_variables(read)
    conversions = [dataclasses.replace(each, variable=read[each.variable.path]) for each in model.conversions]
    weights = {path: each.variable for each in conversions for path in each.paths}
    variables = {path: read.get(path, variable) for path, variable in model.items()}
    for path, weight in weights.items():
        part = dataclasses.replace(model[path], origin=weight.origin)
        variables[path] = part if part.weight is None else _belonging(part, weight, part.weight[1], trained=False)
    return dataclasses.replace(model, variables=variables, conversions=tuple(conversions))


def lora_shardings(sharding: Any, shape: tuple[int, ...], rank: int) -> tuple[Any, Any]:
    """The shardings of the LoRA pair of a weight of shape (…, n), which Keras makes (…, rank) and (rank, n).

    A pair is trained, so it is on devices even if its weight is in host memory.
    """
    *rest, last = range(len(shape))
    sharding = in_memory(sharding, None, "")
    return along(sharding, [*rest, None], (*shape[:-1], rank)), along(sharding, [None, last], (rank, shape[-1]))


def follow(
    state: Mapping[str, AbstractVariable],
    assigned: Mapping[str, AbstractVariable],
    mesh: Any = None,
    memory_kind: str | None = None,
) -> dict[str, AbstractVariable]:
    """Optimizer state, each variable placed like its parameter; without a parameter, on every device of the mesh.

    Its kind of memory does not depend on its parameter's. State without a parameter is small, and on devices.
    """
    if mesh is None:
        shardings = (variable.sharding for variable in assigned.values())
        mesh = next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    mesh = getattr(mesh, "backend_mesh", mesh)
    placed: dict[str, AbstractVariable] = {}
    for path, variable in state.items():
        parameter = assigned.get(variable.follows or "")
        sharding = layout = None
        text = "optimizer state of no parameter, replicated"
        if parameter is not None and parameter.shape == variable.shape:
            sharding = parameter.sharding
            layout = parameter.layout if parameter.dtype == variable.dtype else None
            text = f"as {parameter.path!r}, whose optimizer state it is"
        elif parameter is not None and isinstance(parameter.sharding, NamedSharding):
            sharding = _related(parameter.sharding, parameter.shape, variable.shape)
            text = f"{sharding.spec}, from the sharding of {parameter.path!r}, whose optimizer state it is"
        elif mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec())
        if parameter is not None:
            sharding = in_memory(sharding, memory_kind, path)
            layout = None if memory_kind else layout
        reason = None if sharding is None else Reason("optimizer", text)
        placed[path] = dataclasses.replace(variable, sharding=sharding, layout=layout, reason=reason)
    return placed


def _related(sharding: NamedSharding, parameter: tuple[int, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of state of another shape than its parameter's.

    A history, as L-BFGS keeps, has further leading dimensions. Factored second moments have one dimension less. If the
    missing one may be either of two that are split differently, as for square matrices, the state, which is small, is
    replicated.
    """
    own = list(range(len(parameter)))
    candidates = [[dim for dim in own if dim != left_out] for left_out in own]
    found = {along(sharding, dims, shape) for dims in candidates if tuple(parameter[dim] for dim in dims) == shape}
    if own and shape[-len(own) :] == parameter:
        found = {along(sharding, [None] * (len(shape) - len(own)) + own, shape)}
    return found.pop() if len(found) == 1 else NamedSharding(sharding.mesh, PartitionSpec())
