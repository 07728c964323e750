"""What the compiler says that a forward pass or a training step takes, on the model's devices.

Responsible for the program: parameters in their shardings, LoRA pairs merged as they are in use, gradients and an
optimizer's update around the user's loss, inputs split over the mesh's data axes. What lies in hosts' memory is moved
to the devices first, and what is updated back. Nothing runs.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._abstract.framework import PlannedFunction
from lazymodel._abstract.memory import is_offloaded, on_device
from lazymodel._abstract.placement import device_shardings
from lazymodel._abstract.spec import ModelSpec
from lazymodel._compile.compile import Compile
from lazymodel._compile.lower import lower
from lazymodel._devices.compiler import CompiledMemory, compile_lowered, compile_memory, memory_of
from lazymodel._errors import LazyModelError
from lazymodel._plan.activations import DATA_AXES
from lazymodel._plan.what_if import Use


def compile_use(model: ModelSpec, use: Use, compile: Compile) -> tuple[CompiledMemory, str]:
    """Compiles a forward pass or a training step; returns its memory on one device, and what was compiled."""
    if compile.is_called:
        return _compile_called(model, compile)
    function, inputs = compile.function, compile.inputs
    if function is None:
        planned = _own(model, compile)
        function, inputs, description = planned.function, planned.inputs, planned.description
    else:
        description = getattr(function, "__name__", "the given function")
    values = {path: variable.struct for path, variable in model.items()}
    own = _without_optimizer(model)

    def structure(mapping: Mapping[str, Any]) -> Any:
        return own.framework.structure({path: mapping[path] for path in own})

    if compile.what == "forward":

        def forward(values: Mapping[str, Any], pairs: Mapping[str, Any], *inputs: Any) -> Any:
            values = _on_devices(values, model)
            merged = {**values, **{path: _merge(values[path], pair) for path, pair in pairs.items()}}
            return function(structure(merged), *inputs)

        return compile_memory(forward, values, use.pairs, *inputs), f"compiled forward pass: {description}"

    def loss(trained: Mapping[str, Any], rest: Mapping[str, Any], inputs: Any) -> Any:
        pairs = {path: _merge(rest[path], trained[path]) for path in use.pairs}
        merged = {**rest, **{path: arrays[0] for path, arrays in trained.items()}, **pairs}
        value = function(structure(merged), *inputs)
        value = value[0] if isinstance(value, tuple) else value
        if getattr(value, "shape", ()) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise LazyModelError(
                "a training step needs the loss, a floating-point scalar (or a tuple that begins with it); "
                f"{description} returns {jax.typeof(value)}"
            )
        return value

    step = _training_step(model, use, loss)
    state = {path: values[path] for path in use.state}
    frozen = {p: value for p, value in values.items() if p not in state and (p in use.pairs or p not in use.trained)}
    memory = compile_memory(step, dict(use.trained), use.slot_structs(), state, frozen, *inputs, donate=(0, 1, 2))
    return memory, f"compiled training step: {description}"


def _compile_called(model: ModelSpec, compile: Compile) -> tuple[CompiledMemory, str]:
    """Of the programs of a call, the one that takes most."""
    start = time.perf_counter()
    found: list[tuple[CompiledMemory, str]] = []
    for program in lower(model, compile, device_shardings(model.variables)):
        compiled = compile_lowered(program.lowered, program.description)
        found.append((memory_of(compiled, time.perf_counter() - start), f"compiled {program.description}"))
        start = time.perf_counter()
    return max(found, key=lambda each: each[0].peak_nbytes)


def _training_step(model: ModelSpec, use: Use, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of a loss and an optimizer's update, of what is trained, stated slots, own state, all else, inputs."""
    stated = use.slot_structs()
    moments: dict[str, list[str]] = {path: [] for path in use.trained}  # own state that is updated by a gradient
    for path in use.state:
        parameter = model.get(cast("str", model[path].follows))
        numbers = jnp.issubdtype(model[path].dtype, jnp.inexact)
        if parameter is not None and parameter.path in moments and numbers and parameter.shape == model[path].shape:
            moments[parameter.path].append(path)

    def step(trained: Any, slots: Any, state: Any, frozen: Any, *inputs: Any) -> Any:
        trained = {
            path: tuple(map(on_device, arrays, (struct.sharding for struct in use.trained[path])))
            for path, arrays in trained.items()
        }
        state, frozen = _on_devices(state, model), _on_devices(frozen, model)
        value, gradients = jax.value_and_grad(loss)(trained, {**frozen, **state}, inputs)
        new_trained: dict[str, list[Any]] = {path: [] for path in trained}
        new_slots: dict[str, list[Any]] = {path: [] for path in trained}
        new_state = {path: _placed(value, model[path].struct) for path, value in state.items()}
        for path, structs in use.trained.items():
            own = moments[path]
            for p, g, s, struct, places in zip(
                trained[path], gradients[path], slots[path], structs, stated[path], strict=True
            ):
                slots_here = (on_device(slot, place.sharding) for slot, place in zip(s, places, strict=True))
                held = (*slots_here, *(state[name] for name in own))
                where = (*places, *(model[name].struct for name in own))
                parameter, updated = _update(p, g, held, (struct, *where))
                new_trained[path].append(parameter)
                new_slots[path].append(updated[: len(s)])
                new_state.update(zip(own, updated[len(s) :], strict=True))
        return value, new_trained, new_slots, new_state

    return step


def _on_devices(values: Mapping[str, Any], model: ModelSpec) -> dict[str, Any]:
    return {path: on_device(value, model[path].sharding) for path, value in values.items()}


def _without_optimizer(model: ModelSpec) -> ModelSpec:
    """The model whose tree a forward pass or loss takes."""
    return model if model.optimized is None else model.optimized.model or model


def _own(model: ModelSpec, compile: Compile) -> PlannedFunction:
    """The model's own forward pass or loss, its inputs split over the mesh's data axes."""
    if compile.inputs:
        raise LazyModelError(
            "a plan makes a training step of its own around the model's loss, which takes batch and sequence, or a "
            "function before the inputs; what fit itself runs is for materialize"
        )
    meshes = (v.sharding.mesh for v in model.values() if isinstance(v.sharding, NamedSharding))
    mesh = cast("Mesh | None", next(meshes, None))
    axes = [axis for axis in ([] if mesh is None else mesh.shape) if axis in DATA_AXES]
    parts = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)
    size = parts if compile.batch is None else compile.batch
    planned = _without_optimizer(model).framework.forward(compile.what, batch=size, sequence=compile.sequence)
    if planned is None:
        expected = "the loss, a scalar" if compile.what == "train" else "the outputs"
        raise LazyModelError(
            f"compiling {compile.what!r} needs a function and its inputs: Compile({compile.what!r}, f, x), where "
            f"f(tree, *inputs) returns {expected} and tree is a pytree like AbstractModel.tree. Only Keras models "
            "bring their own."
        )
    if mesh is None:
        return planned
    if size % parts:
        raise LazyModelError(
            f"a batch of {size} does not divide over {parts} parts of the mesh (axis {', '.join(map(repr, axes))}); "
            f"the nearest that does is {max(round(size / parts), 1) * parts}"
        )
    over = NamedSharding(mesh, PartitionSpec(tuple(axes) or None))

    def spread(struct: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=over)

    return dataclasses.replace(planned, inputs=jax.tree.map(spread, planned.inputs))


def _merge(kernel: Any, pair: Any) -> Any:
    """What a layer with LoRA computes with: Keras, too, adds the product to the kernel."""
    return kernel + jnp.matmul(*pair).astype(kernel.dtype)


def _update(parameter: Any, gradient: Any, slots: Sequence[Any], structs: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Takes the memory of an optimizer's step: every slot and the parameter are read once and written once.

    Results lie where what they replace does (`structs`, of the parameter and of the slots), or they could not take its
    memory.
    """
    new = tuple((0.9 * slot + 0.1 * gradient).astype(slot.dtype) for slot in slots)
    change = sum(new, gradient) if new else gradient
    updated = (parameter - 1e-3 * change).astype(parameter.dtype)
    return _placed(updated, structs[0]), tuple(map(_placed, new, structs[1:]))


def _placed(value: Any, struct: Any) -> Any:
    """A value where what it replaces lies."""
    if is_offloaded(struct.sharding):
        return jax.device_put(value, struct.sharding)  # a constraint would leave it on the device
    named = isinstance(struct.sharding, NamedSharding)
    return jax.lax.with_sharding_constraint(value, struct.sharding) if named else value
