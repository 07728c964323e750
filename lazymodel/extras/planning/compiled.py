"""The compiler's numbers for a forward pass or a training step, of devices that need not exist.

Parameters are in their shardings, LoRA pairs merged as in use, gradients and an optimizer's update around the user's
loss, inputs split over the mesh's data axes, where `lm.pin_batch` keeps the batch. Values in host memory are moved to
the devices first, and updated values are moved back. Nothing runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._abstract.framework import ModelSpec, PlannedFunction
from lazymodel._abstract.variable import device_shardings, is_offloaded, on_device, resident_nbytes
from lazymodel._devices.hardware import CompiledMemory, compile_lowered, is_arithmetic
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._plan.use import GRADIENTS, LORA, OPTIMIZER, PARAMETERS, Activations, Use
from lazymodel._sharding.roles import DATA_AXES
from lazymodel.extras.planning.compile import Compile, lower
from lazymodel.extras.planning.pin_batch import is_pinned, pin_batch, splits_parameters

Pair: TypeAlias = "tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]"


@dataclasses.dataclass
class Training:
    """What a training step updates, by path.

    Attributes:
        pairs: Path → its LoRA pair.
        trained: Path → what the optimizer updates there: its own struct, or its pair.
        slots: Path → slots of a `WhatIf`'s optimizer, for each array that is trained there.
    """

    pairs: dict[str, Pair]
    trained: dict[str, tuple[jax.ShapeDtypeStruct, ...]]
    slots: dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]


def count_compiled(model: ModelSpec, use: Use, training: Training, compile: Compile) -> None:
    """Adds the compiler's activations and temporaries to what the model holds."""
    # What lies on a device beside the program's temporaries; a forward pass has no slots of a `WhatIf`.
    kinds = (PARAMETERS, LORA, OPTIMIZER) if compile.what == "train" else (PARAMETERS, LORA)
    held = sum(row.device_nbytes for row in use.held if row.kind in kinds)
    held += 0 if compile.what == "train" else sum(resident_nbytes(model[path]) for path in _state(model))
    found: CompiledMemory | None = None
    limit: int | None = None
    try:
        found, note = _compile_use(model, training, compile)
        # A step that takes only a part of the model, or leaves some of it unused, still holds the rest.
        # CPUs use the memory of their host, so offloaded values count with it.
        held += 0 if found.host_nbytes else sum(row.host_nbytes for row in use.held)
        total, held = found.peak_nbytes, min(held, found.argument_nbytes)
    except DoesNotFitError as error:
        if error.needed_nbytes is None:
            raise
        total, limit, note = error.needed_nbytes, error.limit_nbytes, str(error)
    use.notes += [note, *_not_pinned(model, compile)]
    # Results that the program keeps count as activations.
    use.activations = Activations(max(total - held, 0), "compiled", found, limit)
    if compile.is_step or compile.what == "train":  # gradients are among its temporaries
        use.held = [row for row in use.held if row.kind != GRADIENTS]


def _takes_pins(model: ModelSpec, inputs: Any) -> bool:
    """Returns True if parameters are split over a data axis, and all inputs have one size of the batch."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(inputs) if np.ndim(leaf)}
    return len(sizes) == 1 and splits_parameters(model)


def _not_pinned(model: ModelSpec, compile: Compile) -> list[str]:
    """A note if the compiler was free to gather the batch."""
    given = compile.function
    if given is None or is_pinned(given) or not splits_parameters(model):
        return []
    if not compile.is_step and _takes_pins(model, compile.inputs):
        return []
    name = getattr(given, "__name__", "step")
    line = f"lm.pin_batch({name}, abstract)" if compile.is_step else f"lm.pin_batch({name}, abstract, batch={{…}})"
    return [f"{name} leaves it to the compiler whether devices split the batch or gather it: {line} keeps it split"]


def _state(model: ModelSpec) -> list[str]:
    """Paths of the state of the model's own optimizer."""
    return [path for path, variable in model.items() if variable.follows is not None]


def _compile_use(model: ModelSpec, training: Training, compile: Compile) -> tuple[CompiledMemory, str]:
    """Compiles a forward pass or a training step; returns its memory on one device, and a description."""
    if compile.is_called:
        return _compile_called(model, compile)
    function, inputs = compile.function, compile.inputs
    if function is None:
        planned = _own(model, compile)
        function, inputs, description = planned.function, planned.inputs, planned.description
    else:
        description = getattr(function, "__name__", "the given function")
    structs = {path: variable.struct for path, variable in model.items()}
    own = _without_optimizer(model)
    function = pin_batch(function, own) if _takes_pins(model, inputs) and not is_pinned(function) else function

    def run(values: Mapping[str, Any], pairs: Mapping[str, Any], inputs: Any) -> Any:
        merged = {
            **values,
            **{path: values[path] + jnp.matmul(*pair).astype(values[path].dtype) for path, pair in pairs.items()},
        }
        return function(own.framework.structure({path: merged[path] for path in own}), *inputs)

    if compile.what == "forward":

        def forward(values: Mapping[str, Any], pairs: Mapping[str, Any], *inputs: Any) -> Any:
            return run(jax.tree.map(_on_device, values, structs), pairs, inputs)

        return _compile_memory(forward, structs, training.pairs, *inputs), f"compiled forward pass: {description}"

    def loss(trained: Mapping[str, Any], rest: Mapping[str, Any], inputs: Any) -> Any:
        pairs = {path: trained[path] for path in training.pairs}
        whole = {path: arrays[0] for path, arrays in trained.items() if path not in training.pairs}
        value = run({**rest, **whole}, pairs, inputs)
        value = value[0] if isinstance(value, tuple) else value
        if getattr(value, "shape", ()) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise LazyModelError(
                "a training step needs the loss, a floating-point scalar (or a tuple that begins with it); "
                f"{description} returns {jax.typeof(value)}"
            )
        return value

    state = {path: structs[path] for path in _state(model)}
    frozen = {
        p: each for p, each in structs.items() if p not in state and (p in training.pairs or p not in training.trained)
    }
    arguments = dict(training.trained), training.slots, state, frozen
    step = _training_step(_moments(model, training), arguments, loss)
    memory = _compile_memory(step, *arguments, *inputs, donate=(0, 1, 2))
    return memory, f"compiled training step: {description}"


def _compile_called(model: ModelSpec, compile: Compile) -> tuple[CompiledMemory, str]:
    """Compiles the programs of a call; returns the memory and description of the one that needs most."""
    start = time.perf_counter()
    found: list[tuple[CompiledMemory, str]] = []
    for program in lower(model, compile, device_shardings(model.variables)):
        compiled = compile_lowered(program.lowered, program.description)
        found.append((memory_of(compiled, time.perf_counter() - start), f"compiled {program.description}"))
        start = time.perf_counter()
    return max(found, key=lambda each: each[0].peak_nbytes)


def _moments(model: ModelSpec, training: Training) -> dict[str, list[str]]:
    """Path of a trained parameter → the model's own state that its gradient updates."""
    moments: dict[str, list[str]] = {path: [] for path in training.trained}
    for path in _state(model):
        parameter = model.get(cast("str", model[path].follows))
        numbers = jnp.issubdtype(model[path].dtype, jnp.inexact)
        if parameter is not None and parameter.path in moments and numbers and parameter.shape == model[path].shape:
            moments[parameter.path].append(path)
    return moments


def _training_step(
    moments: Mapping[str, Sequence[str]], structs: tuple[Any, Any, Any, Any], loss: Callable[..., Any]
) -> Callable[..., Any]:
    """A training step that takes (trained parameters, stated slots, own state, frozen values, *inputs)."""

    def moved(gradient: Any, slots: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((0.9 * slot + 0.1 * gradient).astype(slot.dtype) for slot in slots)

    def step(trained: Any, slots: Any, state: Any, frozen: Any, *inputs: Any) -> Any:
        trained, slots, state, frozen = jax.tree.map(_on_device, (trained, slots, state, frozen), structs)
        value, gradients = jax.value_and_grad(loss)(trained, {**frozen, **state}, inputs)
        # As much memory as an optimizer's step takes: every slot and the parameter are read and written once.
        slots = jax.tree.map(moved, gradients, slots)
        own = {path: moved(gradients[path][0], [state[name] for name in names]) for path, names in moments.items()}

        def changed(path: str, parameter: Any, gradient: Any, stated: Sequence[Any]) -> Any:
            return (parameter - 1e-3 * sum((*stated, *own[path]), gradient)).astype(parameter.dtype)

        for path, each in trained.items():
            trained[path] = tuple(map(functools.partial(changed, path), each, gradients[path], slots[path]))
            state.update(zip(moments[path], own[path], strict=True))
        return value, *jax.tree.map(_placed, (trained, slots, state), structs[:3])

    return step


def _on_device(value: Any, struct: Any) -> Any:
    return on_device(value, struct.sharding)


def _without_optimizer(model: ModelSpec) -> ModelSpec:
    """The model whose tree a forward pass or loss takes, without an optimizer."""
    return model if model.optimized is None else model.optimized.model or model


def _own(model: ModelSpec, compile: Compile) -> PlannedFunction:
    """The model's own forward pass or loss, with inputs split over the mesh's data axes."""
    if compile.inputs:
        raise LazyModelError(
            "a plan builds its own training step around the model's loss, which takes batch and sequence, or a "
            "function before the inputs; only materialize can compile what fit runs"
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
            "have their own."
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


def _placed(value: Any, struct: Any) -> Any:
    """The value, placed where the value that it replaces is, whose memory it can then take over."""
    if is_offloaded(struct.sharding):
        return jax.device_put(value, struct.sharding)  # a constraint would leave it on the device
    named = isinstance(struct.sharding, NamedSharding)
    return jax.lax.with_sharding_constraint(value, struct.sharding) if named else value


def _compile_memory(function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> CompiledMemory:
    """Compiles `function(*args)` for the devices of its arguments and returns the memory that it needs on each.

    Args:
        function: A traceable function.
        *args: Pytrees of `jax.ShapeDtypeStruct` with shardings over one mesh, which may be one of `topology`. The
            compiler places structs without a sharding.
        donate: Numbers of the arguments whose memory the results may reuse.

    Raises:
        DoesNotFitError: The compiler finds that the program cannot fit a device. Its `needed_nbytes` and
            `limit_nbytes` are the compiler's numbers, which it rounds to hundredths of a unit.
        LazyModelError: The compiler rejects the program for another reason, or a mesh is one for arithmetic.
    """
    if any(is_arithmetic(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(args)):
        raise LazyModelError(
            "expected arguments that are sharded over devices, found one on a mesh without devices (as "
            "lazymodel.arithmetic_mesh makes); make the mesh with lazymodel.topology"
        )
    start = time.perf_counter()
    # Arguments that the function does not use are on the device nevertheless.
    lowered = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*args)
    compiled = compile_lowered(lowered, getattr(function, "__name__", "the program"))
    return memory_of(compiled, time.perf_counter() - start)


def memory_of(compiled: jax.stages.Compiled, seconds: float) -> CompiledMemory:
    """A program's memory. Raises LazyModelError if the backend does not report it."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise LazyModelError("this backend's compiler does not report how much memory a program needs; omit compile")
    return CompiledMemory(
        argument_nbytes=int(memory.argument_size_in_bytes),
        output_nbytes=int(memory.output_size_in_bytes),
        temporary_nbytes=int(memory.temp_size_in_bytes),
        alias_nbytes=int(memory.alias_size_in_bytes),
        code_nbytes=int(memory.generated_code_size_in_bytes),
        seconds=seconds,
        host_nbytes=int(
            memory.host_argument_size_in_bytes
            + memory.host_output_size_in_bytes
            - memory.host_alias_size_in_bytes
            + memory.host_temp_size_in_bytes
        ),
    )
