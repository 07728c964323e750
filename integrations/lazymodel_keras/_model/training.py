"""Training state of a model: optimizer state that is placed like the variables it belongs to.

Responsible for finding the model variable that an optimizer variable belongs to, and for meshes and distributions that
Keras can train on. Not responsible for the training itself, which is Keras' own `fit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from lazymodel import ShardingError
from lazymodel_keras._record.recording import Recording


def slot_references(recording: Recording) -> dict[int, Any]:
    """`id` of each optimizer variable that belongs to a model variable → that variable.

    Optimizers keep state in lists that run parallel to the variables they were built for. That is true for all of
    Keras' optimizers and for others that follow its guide. Names are not enough: Adafactor's moments have the name of
    their variable.
    """
    references: dict[int, Any] = {}
    for optimizer, owners in _optimizers(recording):
        own = [id(variable) for variable in optimizer.variables]
        for slots in vars(optimizer).values():
            if not isinstance(slots, list | tuple) or len(slots) != len(owners):
                continue
            if [id(slot) for slot in slots] == own:
                continue  # the list of all its variables, which has the same length by chance
            for slot, owner in zip(slots, owners, strict=True):
                if isinstance(slot, keras.Variable) and owner is not None and slot is not owner:
                    references[id(slot)] = owner
    return references


def _optimizers(recording: Recording) -> Iterator[tuple[Any, list[Any]]]:
    """The built optimizers and the variables they were built for; None for a variable that no longer exists."""
    for reference, variables in recording.optimizers:
        if (optimizer := reference()) is not None:
            yield optimizer, [variable() for variable in variables]


def optimizer_variables(recording: Recording, result: Any) -> set[int]:
    """`id` of every variable of the built optimizers, and of those that an object was compiled with."""
    objects = result if isinstance(result, list | tuple) else (result,)
    optimizers = [optimizer for optimizer, _ in _optimizers(recording)]
    optimizers += [item if isinstance(item, keras.Optimizer) else getattr(item, "optimizer", None) for item in objects]
    return {id(variable) for optimizer in optimizers for variable in getattr(optimizer, "variables", None) or ()}


def trained_variables(recording: Recording, paths: Mapping[int, str]) -> tuple[str, ...] | None:
    """Paths, by `id`, of what the optimizers among these variables were built for; None without an optimizer."""
    found = [owners for optimizer, owners in _optimizers(recording) if any(id(v) in paths for v in optimizer.variables)]
    trained = (variable for owners in found for variable in owners if variable is not None and variable.trainable)
    return tuple(dict.fromkeys(paths[id(v)] for v in trained if id(v) in paths)) if found else None


def automatic(array: jax.Array) -> jax.Array:
    """The array on a mesh of Auto axes, in the same buffers.

    `jax.make_mesh` gives Explicit axes since JAX 0.7: then every operation whose result sharding is ambiguous has to
    state it, which Keras' layers do not (Dropout fails, for example). Under Auto axes XLA decides.
    """
    placed = _automatic(array.sharding)
    if placed is array.sharding:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, placed, shards, dtype=array.dtype)


def kept_sharding(sharding: Any) -> Any:
    """The sharding of a variable's array in the finished model; None if it is committed to no device.

    Keras' own arrays on its one device are not committed. Committed ones would differ from fresh arrays, which metrics
    get with every epoch, so JAX would compile the step twice.
    """
    default = jax.local_devices()[0]
    if sharding == SingleDeviceSharding(default) and jax.config.jax_default_device in (None, default):
        return None
    return _automatic(sharding)


def _automatic(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    if all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return sharding
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def distribution(mesh: Mesh, batch_axis: str | None = None) -> Any:
    """The `keras.distribution` under which `fit` splits batches over an axis of the mesh that a model was placed on.

    Without one, `fit` works as well, but every device along the batch axis computes the same whole batch, and the
    compiler chooses where updated variables are until the end of an epoch. Variables keep their shardings; new ones,
    such as metrics, are replicated.

    Args:
        mesh: The mesh that the model was placed on.
        batch_axis: The mesh axis over which batches are split; None is the mesh's first axis.

    Raises:
        ShardingError: The mesh has no such axis.

    Example:
        >>> model = lm.build_abstract(make_model).shard(mesh, {".*/kernel": P("model"), ".*": P()}).materialize()
        >>> with lk.distribution(mesh).scope():
        ...     history = model.fit(np.ones((16, 16)), np.zeros((16, 8)), verbose=0)
    """
    names = list(mesh.axis_names)
    if batch_axis is not None and batch_axis not in names:
        raise ShardingError(f"the mesh has no axis {batch_axis!r} to split batches over; its axes are {names}")
    devices = [f"{device.platform}:{device.id}" for device in mesh.devices.flat]
    device_mesh = keras.distribution.DeviceMesh(mesh.devices.shape, names, devices)
    layouts = keras.distribution.LayoutMap(device_mesh)
    # With one process or several, each process brings its own batches, as without a distribution.
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name=batch_axis or names[0], auto_shard_dataset=False
    )
