"""What the compiler says that a forward pass or a training step takes, on the model's devices.

Responsible for making the program that a plan compiles: parameters in their shardings, LoRA pairs merged as they are
in use, gradients and an optimizer's update around the user's loss, inputs split over the mesh's data axes. The numbers
come from `_compile`; nothing runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._compile import compile_memory
from lazymodel._errors import LazyModelError
from lazymodel._plan_use import Use, slot_structs

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractModel
    from lazymodel._compile import CompiledMemory

# Names of mesh axes over which a batch is split; any other axis splits what is inside the model.
_DATA_AXES = ("data", "batch", "dp", "fsdp", "replica")


@dataclasses.dataclass(frozen=True)
class PlannedFunction:
    """A forward pass or loss that an integration knows of.

    Attributes:
        function: `function(tree, *inputs)`, with the model's own pytree; the loss, a scalar, where a training step is
            planned.
        inputs: Its inputs, pytrees of `jax.ShapeDtypeStruct`; the first dimension of each is the batch.
        description: What it computes, for people.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    description: str


class _Plannable(Protocol):
    """What an integration's object whose method is `AbstractModel.rebuild` may offer."""

    def plan_function(self, what: str, *, batch: int, sequence: int | None) -> PlannedFunction: ...


def compile_use(
    model: AbstractModel,
    use: Use,
    what: str,
    function: Callable[..., Any] | None,
    inputs: Sequence[Any],
    *,
    batch: int | None,
    sequence: int | None,
) -> tuple[CompiledMemory, str]:
    """Compiles a forward pass or a training step; returns its memory on one device, and what was compiled.

    Args:
        model: The model; all its variables on one mesh, or none on any.
        use: What is trained, and the optimizer's slots.
        what: `"forward"` or `"train"`.
        function: `function(tree, *inputs)`; None takes the integration's own.
        inputs: Arrays or structs for it.
        batch: Batch size of the integration's own; None is one for each part of the data axes.
        sequence: Its sequence length.

    Raises:
        LazyModelError: There is no function, or the mesh has no devices to compile for.
    """
    meshes = [v.sharding.mesh for v in model.values() if isinstance(v.sharding, NamedSharding)]
    mesh = meshes[0] if meshes else None
    if mesh is not None and not isinstance(mesh, Mesh):
        raise LazyModelError(
            f"compile={what!r} needs devices to compile for, and this mesh is one for arithmetic; "
            "make it with lazymodel.topology, or plan without compile"
        )
    if function is None:
        planned = _own(model, what, mesh, batch, sequence)
        function, inputs, description = planned.function, planned.inputs, planned.description
    else:
        if batch is not None or sequence is not None:
            raise LazyModelError("batch and sequence are for a model's own forward pass; give inputs of that shape")
        description = getattr(function, "__name__", "the given function")
    values = {path: variable.struct for path, variable in model.items()}
    if what == "forward":
        pairs = {path: use.pairs[path] for path in use.pairs}

        def forward(values: Mapping[str, Any], pairs: Mapping[str, Any], *inputs: Any) -> Any:
            merged = {**values, **{path: _merge(values[path], pair) for path, pair in pairs.items()}}
            return function(model.structure(merged), *inputs)

        return compile_memory(forward, values, pairs, *inputs), f"compiled forward pass: {description}"

    frozen = values if use.pairs else {path: value for path, value in values.items() if path not in use.trained}

    def loss(trained: Mapping[str, Any], frozen: Mapping[str, Any], inputs: Any) -> Any:
        merged = {
            path: _merge(frozen[path], trained[path]) if path in use.pairs
            else trained[path][0] if path in trained
            else frozen[path]
            for path in values
        }  # fmt: skip
        value = function(model.structure(merged), *inputs)
        return value[0] if isinstance(value, tuple) else value

    def step(trained: Any, slots: Any, frozen: Any, *inputs: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(trained, frozen, inputs)
        updated = {
            path: [
                _update(p, g, s, struct)
                for p, g, s, struct in zip(trained[path], gradients[path], slots[path], use.trained[path], strict=True)
            ]
            for path in trained
        }
        return (
            value,
            {path: tuple(p for p, _ in pieces) for path, pieces in updated.items()},
            {path: tuple(s for _, s in pieces) for path, pieces in updated.items()},
        )

    memory = compile_memory(step, dict(use.trained), slot_structs(use), frozen, *inputs, donate=(0, 1))
    return memory, f"compiled training step: {description}"


def _own(
    model: AbstractModel, what: str, mesh: Mesh | None, batch: int | None, sequence: int | None
) -> PlannedFunction:
    owner: Any = getattr(model.rebuild, "__self__", None)
    if not hasattr(owner, "plan_function"):
        expected = "the loss, a scalar" if what == "train" else "the outputs"
        raise LazyModelError(
            f"compile={what!r} needs function=f and inputs=(…): f(tree, *inputs) returns {expected}, where tree is a "
            "pytree like AbstractModel.tree. Only Keras models bring their own."
        )
    axes = [axis for axis in ([] if mesh is None else mesh.shape) if axis in _DATA_AXES]
    parts = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)
    size = parts if batch is None else batch
    if size < 1 or (sequence is not None and sequence < 1):
        raise LazyModelError(f"batch and sequence are positive numbers; got batch={batch}, sequence={sequence}")
    planned = cast("_Plannable", owner).plan_function(what, batch=size, sequence=sequence)
    if mesh is None:
        return planned
    if size % parts:
        raise LazyModelError(
            f"a batch of {size} does not divide over {parts} parts of the mesh (axis {', '.join(map(repr, axes))}); "
            f"the nearest that does is {max(round(size / parts), 1) * parts}"
        )
    over_batch = NamedSharding(mesh, PartitionSpec(tuple(axes) or None))

    def spread(struct: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=over_batch)

    inputs = jax.tree.map(spread, planned.inputs)
    return dataclasses.replace(planned, inputs=inputs)


def _merge(kernel: Any, pair: Any) -> Any:
    """What a layer with LoRA computes with: Keras, too, adds the product to the kernel."""
    first, last = pair
    return kernel + jnp.matmul(first, last).astype(kernel.dtype)


def _update(parameter: Any, gradient: Any, slots: Sequence[Any], struct: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes the memory of an optimizer's step: every slot and the parameter are read once and written once."""
    new = tuple((0.9 * slot + 0.1 * gradient).astype(slot.dtype) for slot in slots)
    change = sum(new, gradient) if new else gradient
    updated = (parameter - 1e-3 * change).astype(parameter.dtype)
    if isinstance(struct.sharding, NamedSharding):
        # Results that lie elsewhere than what they replace could not take its memory.
        updated = jax.lax.with_sharding_constraint(updated, struct.sharding)
        new = tuple(jax.lax.with_sharding_constraint(slot, struct.sharding) for slot in new)
    return updated, new
