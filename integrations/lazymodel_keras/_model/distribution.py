"""The `keras.distribution` under which a placed model is trained: batches are split, and stay split inside the step.

Where a parameter is split over the axis of the batch, XLA may gather the batch on every device instead of the
parameter. Keras lays out the output of a layer by an entry `PATH/output` of the distribution's `LayoutMap`. Here a
model's entries are those of the layers that own such a parameter, and are made from where its variables are. An entry
lays out the batch; how the compiler splits the other dimensions, such as the vocabulary of logits, is left to it.

Not responsible for where variables are, nor for the training itself, which is Keras' own `fit`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lazymodel._errors import ShardingError
from lazymodel._tensors.shards import spec_axes
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import model_variables, replace


def distribution(mesh: Mesh, batch_axis: str | None = None) -> Any:
    """The `keras.distribution` under which `fit` splits batches over an axis of the mesh that a model was placed on.

    The batch stays split in every layer, also where parameters are split over the same axis (FSDP): its `LayoutMap`
    gets an entry for the outputs of the layers that own such parameters. Losses are those without it.

    Without a distribution, `fit` works as well, but every device along the batch axis computes the same whole batch,
    and the compiler chooses where updated variables are until the end of an epoch. Variables keep their shardings; new
    ones, such as metrics, are replicated. What `compile` created outside of its scope, such as the optimizer's step
    count, is moved to the mesh when `fit` begins.

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
    return _Training(keras.distribution.LayoutMap(device_mesh), batch_axis or names[0])


class _Training(keras.distribution.ModelParallel):
    """The distribution of models that were placed before."""

    def __init__(self, layouts: keras.distribution.LayoutMap, batch_axis: str) -> None:
        # With one process or several, each process brings its own batches, as without a distribution.
        super().__init__(layout_map=layouts, batch_dim_name=batch_axis, auto_shard_dataset=False)
        self.mesh: Mesh = self.device_mesh.backend_mesh
        self._layouts, self._layers, self._batch = layouts, set[str](), 0

    @contextlib.contextmanager
    def scope(self) -> Generator[None]:
        with super().scope(), _training.needed(self):
            yield

    def get_data_layout(self, data_shape: Any) -> Any:
        self._batch = data_shape[0]
        return super().get_data_layout(data_shape)

    def get_tensor_layout(self, path: str) -> Any:
        """The layout of a layer's output, if it carries the batch; other programs, such as `generate`, have none."""
        if super().get_tensor_layout(path) is None:
            return None
        output, split = _upstream.output_of_caller(), self.mesh.shape[self.batch_dim_name]
        if not isinstance(output, jax.core.Tracer) or not output.ndim or not self._batch:
            return None
        if output.shape[0] % self._batch or output.shape[0] % split:
            return None
        open_dims = [PartitionSpec.UNCONSTRAINED] * (output.ndim - 1)
        return NamedSharding(self.mesh, PartitionSpec(self.batch_dim_name, *open_dims))

    def keep_split(self, model: Any) -> None:
        """Adds the layers of a model that own a parameter which is split over the axis of the batch."""
        arrays = ((variable.path, getattr(variable.value, "sharding", None)) for variable in model.variables)
        specs = ((path, sharding.spec) for path, sharding in arrays if isinstance(sharding, NamedSharding))
        split = (
            path for path, spec in specs if self.batch_dim_name in [a for e in spec_axes(spec, len(spec)) for a in e]
        )
        # Blocks differ in their numbers only. A path raises if two entries match it, so there is one.
        layers = {re.sub(r"\d+", r"\\d+", re.escape(path.rpartition("/")[0])) for path in split}
        if layers - self._layers:
            self._layouts.clear()
            self._layers |= layers
            self._layouts[rf"(?:.*/)?(?:{'|'.join(sorted(self._layers))})/output"] = (self.batch_dim_name,)


_training = _upstream.SharedPatches()


@_training.replacing(_upstream.Trainer, "make_train_function")
@_training.replacing(_upstream.Trainer, "make_test_function")
@_training.replacing(_upstream.Trainer, "make_predict_function")
def _on_one_mesh(training: _Training, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Moves variables on one device to the mesh of the others: Keras gives all of them to one program."""
    held = {id(variable): (variable, _upstream.value(variable)) for variable in model_variables(self)}
    arrays = [(variable, array) for variable, array in held.values() if isinstance(array, jax.Array)]
    if any(isinstance(array.sharding, NamedSharding) for _, array in arrays):
        replicated = NamedSharding(training.mesh, PartitionSpec())
        for variable, array in arrays:
            if isinstance(array.sharding, SingleDeviceSharding):
                replace(variable, jax.device_put(np.asarray(array), replicated))
    training.keep_split(self)
    return original(self, *args, **kwargs)
