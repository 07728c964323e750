"""The method `plan`: predicts the cost of materializing and using a model, before any data is read.

Responsible for the steps of materializing (in the order of `_materialize/materialize`), their temporaries, what hosts
read and keep, and the compiler's numbers for a forward pass or a training step, on request. The devices need not exist.
`_plan/what_if` counts what use of the model adds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.framework import ModelSpec, PlannedFunction
from lazymodel._abstract.variable import (
    Placement,
    Signature,
    device_shardings,
    is_offloaded,
    offloaded_nbytes,
    on_device,
    resident_nbytes,
    stays_on_host,
)
from lazymodel._compile import Compile, lower
from lazymodel._devices.hardware import (
    CompiledMemory,
    compile_lowered,
    compile_memory,
    devices_per_host,
    host_memory,
    is_arithmetic,
    is_live,
    memory_of,
)
from lazymodel._devices.hardware import device_memory as known_memory
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._mapping.resolve import LoadPlan, prepare_load, refused_casts
from lazymodel._plan.fleet import Fleet, Traffic
from lazymodel._plan.plan import HostPlan, MemoryPlan, PlanRow, PlanStep
from lazymodel._plan.what_if import ACTIVATIONS, GRADIENTS, PARAMETERS, Use, WhatIf, estimate_activations
from lazymodel._programs.jaxprs import InitProgram
from lazymodel._programs.programs import by_devices
from lazymodel._sharding.roles import DATA_AXES
from lazymodel._show.text import grouped_by, parse_bytes
from lazymodel._tensors.buffers import DEFAULT_BUDGET, available_memory
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import is_initial, stored_itemsize, where

# Temporaries of an init program that was not compiled. XLA:CPU keeps the 32-bit random bits, their two counters and,
# for narrower dtypes, the result in 32 bits at once, for each element; on TPUs and GPUs all of it is one fused loop.
_CPU_TEMPORARIES = 3 * 4  # bytes per element
_CPU_NARROW_TEMPORARIES = 4 * 4


@dataclasses.dataclass(frozen=True)
class Step:
    """One program or one loaded variable: what it leaves on each device of its group, and its temporary memory.

    `offloaded_nbytes` is what it leaves in host memory for each device. If a single device computes it whole,
    `whole_nbytes` is its full size in bytes.
    """

    action: str
    paths: tuple[str, ...]
    group: Hashable
    nbytes: int
    temporary_nbytes: int = 0
    offloaded_nbytes: int = 0
    whole_nbytes: int = 0

    def taken_nbytes(self, devices: int) -> int:
        """Bytes of its temporary memory on `devices` devices of a host, beyond what it leaves on them."""
        if not self.whole_nbytes or devices == 1:
            return self.temporary_nbytes * devices
        left = self.nbytes * devices
        return max(self.nbytes + self.temporary_nbytes - left, self.whole_nbytes)


def make_steps(
    model: ModelSpec,
    read: ModelSpec,
    choice: LoadPlan,
    placement: Placement,
    traffic: Traffic,
    platform: str,
    *,
    compile_programs: bool,
) -> tuple[list[Step], int]:
    """The steps of materializing on devices, in order, and the number of compiled programs.

    `read` is the model as it is read. Values that are not kept are temporary.
    """
    made = {each.variable.path: each.paths for each in read.conversions if each.variable.path in read}
    kept = {path: [model[p] for p in made[path]] if path in made else [read[path]] for path in read}
    shard = {path: sum(map(resident_nbytes, kept[path])) for path in read if not stays_on_host(read[path])}
    offloaded = {path: sum(map(offloaded_nbytes, kept[path])) for path in shard}
    passing = {path: resident_nbytes(read[path]) if path in made else 0 for path in shard}
    group = placement.group
    groups = [paths for recipe in choice.recipes for paths in grouped_by(recipe.paths, group.__getitem__).values()]
    programs: Sequence[InitProgram | None] = [None] * len(groups)
    if compile_programs and choice.recipes:
        recipes = [part for recipe in choice.recipes for part in by_devices(recipe, placement.shardings)]
        groups = [list(recipe.paths) for recipe in recipes]
        programs = read.programs.get_all(
            [(recipe, [placement.shardings[path] for path in recipe.paths]) for recipe in recipes]
        )
    computed: list[Step] = []
    for paths, program in zip(groups, programs, strict=True):
        nbytes, away, passed = (sum(amounts[path] for path in paths) for amounts in (shard, offloaded, passing))
        whole = 0
        if program is None:
            temporaries = (_cpu_temporaries(read[path].shard_nbytes, read[path].dtype.itemsize) for path in paths)
            temporary = sum(temporaries) if platform == "cpu" else away  # created on the device, then moved
        else:
            # On CPUs, results in either memory count as results.
            nbytes, temporary = max(program.output_nbytes - away - passed, nbytes), program.temp_nbytes
            whole = sum(read[path].nbytes for path in paths) if program.by_kernel else 0
        computed.append(Step("initialize", tuple(paths), group[paths[0]], nbytes, temporary + passed, away, whole))
    computed.sort(key=lambda step: -step.temporary_nbytes)  # the order of `run_recipes`
    loaded = sorted((path for path in choice.sources if path in shard), key=lambda p: _file_order(choice.sources[p]))
    known = {path for step in computed for path in step.paths}.union(loaded)
    exchanging = traffic.group_nbytes(loaded)
    steps = [
        Step(
            action(choice, path),
            (path,),
            group[path],
            shard[path],
            exchanging.get(path, 0) + passing[path],
            offloaded[path],
        )
        for path in (*loaded, *(path for path in shard if path not in known))
    ]
    return computed + steps, len({id(program) for program in programs if program is not None})


def _cpu_temporaries(shard_nbytes: int, itemsize: int) -> int:
    return shard_nbytes // max(itemsize, 1) * (_CPU_NARROW_TEMPORARIES if itemsize < 4 else _CPU_TEMPORARIES)


def make_timeline(steps: Sequence[Step], signature: Signature) -> Iterator[PlanStep]:
    """The steps from the view of one kind of device: bytes after each, and the peak during it.

    Programs are started before earlier ones have ended, but a device runs one after the other, so it holds the
    temporaries of one at a time.
    """
    held = offloaded = 0
    for step in steps:
        if step.group in signature:
            held += step.nbytes
            offloaded += step.offloaded_nbytes
            yield PlanStep(step.paths[0], step.action, held, held + step.temporary_nbytes, offloaded)


def action(choice: LoadPlan, path: str) -> str:
    """The source of a variable's value, as in `PlanRow`."""
    if path not in choice.sources or is_initial(choice.sources[path]):
        return "initialize"
    return "load" if isinstance(choice.sources[path], LazyTensor) else "constant"


def _file_order(source: Any) -> tuple[str, int]:
    return (source.file, source.offset) if isinstance(source, LazyTensor) else ("", 0)


# The compiler's numbers for a forward pass or a training step: parameters in their shardings, LoRA pairs merged as in
# use, gradients and an optimizer's update around the user's loss, inputs split over the mesh's data axes. Values in
# host memory are moved to the devices first, and updated values are moved back. Nothing runs.


def _compile_use(model: ModelSpec, use: Use, compile: Compile) -> tuple[CompiledMemory, str]:
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

    def run(values: Mapping[str, Any], pairs: Mapping[str, Any], inputs: Any) -> Any:
        merged = {
            **values,
            **{path: values[path] + jnp.matmul(*pair).astype(values[path].dtype) for path, pair in pairs.items()},
        }
        return function(own.framework.structure({path: merged[path] for path in own}), *inputs)

    if compile.what == "forward":

        def forward(values: Mapping[str, Any], pairs: Mapping[str, Any], *inputs: Any) -> Any:
            return run(jax.tree.map(_on_device, values, structs), pairs, inputs)

        return compile_memory(forward, structs, use.pairs, *inputs), f"compiled forward pass: {description}"

    def loss(trained: Mapping[str, Any], rest: Mapping[str, Any], inputs: Any) -> Any:
        pairs = {path: trained[path] for path in use.pairs}
        whole = {path: arrays[0] for path, arrays in trained.items() if path not in use.pairs}
        value = run({**rest, **whole}, pairs, inputs)
        value = value[0] if isinstance(value, tuple) else value
        if getattr(value, "shape", ()) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise LazyModelError(
                "a training step needs the loss, a floating-point scalar (or a tuple that begins with it); "
                f"{description} returns {jax.typeof(value)}"
            )
        return value

    state = {path: structs[path] for path in use.state}
    frozen = {p: each for p, each in structs.items() if p not in state and (p in use.pairs or p not in use.trained)}
    arguments = dict(use.trained), use.slot_structs(), state, frozen
    step = _training_step(_moments(model, use), arguments, loss)
    memory = compile_memory(step, *arguments, *inputs, donate=(0, 1, 2))
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


def _moments(model: ModelSpec, use: Use) -> dict[str, list[str]]:
    """Path of a trained parameter → the model's own state that its gradient updates."""
    moments: dict[str, list[str]] = {path: [] for path in use.trained}
    for path in use.state:
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


# Memory of hosts: what they read and stage while a model is materialized, and what they keep for their devices. How the
# devices of a TPU slice share hosts is known, and for others a `Fleet` gives it.


def _make_hosts(
    model: ModelSpec,
    choice: LoadPlan,
    placement: Placement,
    traffic: Traffic,
    steps: Sequence[Step],
    offloaded: Mapping[str, int],
    *,
    on_cpu: bool,
) -> tuple[HostPlan, ...]:
    """One plan for each process whose devices hold anything; none if devices are only numbers.

    `offloaded` is path → bytes that a host keeps for each device while the model is used.
    """
    by_process: dict[int, collections.Counter[Signature]] = {}
    for device, signature in placement.devices.items():
        if not isinstance(device, int):
            by_process.setdefault(device.process_index, collections.Counter())[signature] += 1
    read, distinct = _read(model, choice, placement, traffic)
    # Each process has NumPy arrays of its own.
    on_host = sum(variable.nbytes for variable in model.values() if stays_on_host(variable))
    kept = placement.held(offloaded)
    hosts: list[HostPlan] = []
    for process, signatures in sorted(by_process.items()):
        held = resident = peak = away = 0
        for step in steps:
            devices = sum(count for signature, count in signatures.items() if step.group in signature)
            resident += step.nbytes * devices
            away += step.offloaded_nbytes * devices
            # On CPUs, devices that hold the same loaded values share one buffer.
            shared = distinct.get((process, step.paths[0]), 0)
            computed = step.action == "initialize" or step.offloaded_nbytes
            held += step.nbytes * devices if computed else shared
            peak = max(peak, held + away + step.taken_nbytes(devices))
        staging = 0 if on_cpu else min(DEFAULT_BUDGET, sum(n for (p, _), n in distinct.items() if p == process))
        peak = (peak if on_cpu else staging + away) + on_host
        in_use = sum(kept[signature] * count for signature, count in signatures.items())
        peak = max(peak, in_use + on_host + (resident if on_cpu else 0))
        hosts.append(HostPlan(process, signatures.total(), resident, read[process], staging, peak, in_use))
    return tuple(hosts)


def _offloaded_to(
    hosts: Sequence[HostPlan],
    placement: Placement,
    offloaded: Mapping[str, int],
    fleet: Fleet | None,
    kind: str,
    *,
    live: bool,
) -> tuple[int, int | None, list[str]]:
    """Bytes that the most loaded host keeps, its memory if known, and notes on the numbers.

    `offloaded` is path → bytes for each device; `kind` is the kind of the devices.
    """
    if not any(offloaded.values()):
        return 0, None, []
    notes = ["offloaded values pass through devices while in use; a compiled plan counts that"]
    size = len(placement.devices)
    if fleet is not None and fleet.hosts is not None:
        size = -(-size // fleet.hosts)
    if (count := devices_per_host(kind, size)) is None:
        count = size
        if not hosts and (fleet is None or fleet.hosts is None):
            notes.append("the hosts of these devices are unknown: one counts for all; Fleet(hosts=…) sets them")
    each = placement.most_loaded(offloaded)[1] * count
    memory = available_memory() if live else host_memory(kind, size)
    return max((host.offloaded_nbytes for host in hosts), default=each), memory, notes


def _read(
    model: ModelSpec, choice: LoadPlan, placement: Placement, traffic: Traffic
) -> tuple[collections.Counter[int], dict[tuple[int, str], int]]:
    """Bytes that each process reads, and bytes of the distinct shards of its variables that are not computed."""
    counts = functools.cache(_distinct_shards)  # many variables have the same shape and sharding
    read: collections.Counter[int] = collections.Counter()
    distinct: dict[tuple[int, str], int] = {}
    for path, source in choice.sources.items():
        variable, sharding = model[path], placement.shardings[path]
        for process, count in ({} if is_arithmetic(sharding) else counts(sharding, variable.shape)).items():
            if not stays_on_host(variable):
                distinct[process, path] = count * variable.shard_nbytes
            if isinstance(source, LazyTensor):
                share, elements = traffic.share_nbytes(path), math.prod(sharding.shard_shape(tuple(source.shape)))
                nbytes = count * elements * stored_itemsize(source.source)
                read[process] += int(nbytes if share is None else share[process])
    return read, distinct


def _distinct_shards(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[int, int]:
    """Number of distinct shards in each process."""
    found: dict[int, set[Any]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        box = tuple((part.start, part.stop) for part in index or ())
        found.setdefault(device.process_index, set()).add(box)
    return {process: len(boxes) for process, boxes in found.items()}


def plan(
    model: ModelSpec,
    checkpoint: Any = None,
    *,
    initialize: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    what_if: WhatIf | None = None,
    compile: Compile | None = None,
    replicas: str | None = None,
    fleet: Fleet | None = None,
) -> MemoryPlan:
    """Predicts bytes per device and host, while materializing and in use, before any memory is spent.

    Everything that the model has is counted once: its parameters, the state of its optimizer (`with_optimizer`, or the
    built optimizer of a Keras model), and then the gradients of what that optimizer trains. NumPy arrays that stay on
    the host do not count for any device.

    Init programs are compiled if their devices exist, or with `Compile("init")`; otherwise their temporaries are
    estimated, and a plan takes a second or two, whatever the model's size.

    Args:
        checkpoint: As for `materialize`. A tensor of another shape than its variable does not raise here; the
            variable's row shows it.
        initialize: As for `materialize`.
        device_memory: Bytes of one device, or `"16GiB"`; None is the reported or known memory (CPU: no limit).
        host_memory: Bytes of one host, likewise; it counts if something is offloaded to it (`lazymodel.Host`).
        what_if: Additions to the model, by arithmetic: `lazymodel.WhatIf(optimizer="adamw", lora_rank=8)`.
        compile: What to compile, for devices that need not exist: `lazymodel.Compile("train", batch=8)`.
        replicas: As for `materialize`: the way whose bytes and peak count. `MemoryPlan.ways` has both ways.
        fleet: Number of hosts and bandwidths of each. Without a checkpoint, variables count as if stored in one.

    Raises:
        LazyModelError: An argument is invalid; there is no function or device to compile for; an optimizer or LoRA was
            given for a model that has an optimizer; or activations were requested for a model other than a transformer.

    Example:
        >>> sharded.plan(lm.open_checkpoint("model.safetensors"), device_memory="16GiB").read_nbytes
        131072
    """
    what_if = _checked(model, what_if, compile, fleet)
    given = (("device_memory", device_memory), ("host_memory", host_memory))
    limit, host_limit = (None if n is None else parse_bytes(n, name=name, at_least=1) for name, n in given)
    # A checkpoint that `materialize` rejects still has a plan, with a note.
    initialize = initialize or "missing"
    choice = prepare_load(model, checkpoint, initialize=initialize, strict=False, cast="unsafe", warns=False)
    read, placement = choice.model, Placement(choice.shardings)
    devices, use = _devices(placement), Use(model, placement.shardings, what_if)
    traffic = Traffic(read, choice, placement, fleet, replicas)
    live = devices.live or (compile is not None and not compile.is_use)
    steps, programs = make_steps(model, read, choice, placement, traffic, devices.platform, compile_programs=live)
    signature, resident = placement.most_loaded(use.shard_nbytes)
    timeline = tuple(make_timeline(steps, signature))
    in_use = _in_use(model, use, placement, compile, what_if)
    estimated = devices.platform if not programs and any(step.action == "initialize" for step in steps) else None
    notes = [*use.notes, *_notes(refused_casts(choice), estimated, imagined=traffic.imagined)]
    hosts = _make_hosts(read, choice, placement, traffic, steps, use.offloaded, on_cpu=devices.platform == "cpu")
    kept, memory, offloading = _offloaded_to(hosts, placement, use.offloaded, fleet, devices.kind, live=devices.live)
    return MemoryPlan(
        name=model.name,
        rows=_rows(model, choice, use),
        device_nbytes=resident,
        peak_nbytes=max((step.peak_nbytes for step in timeline), default=0),
        read_nbytes=_read_here(choice, hosts, live=devices.live),
        host_nbytes=max((resident_nbytes(read[p]) + offloaded_nbytes(read[p]) for p in choice.sources), default=0),
        num_devices=len(placement.devices),
        device_memory=next((each for each in (limit, in_use.limit, devices.memory) if each is not None), None),
        programs=programs,
        parts=in_use.parts,
        counted={kind: in_use.how if kind == ACTIVATIONS else use.dtypes(kind) for kind in in_use.parts},
        timeline=timeline,
        hosts=hosts,
        ways=traffic.ways(),
        device_kind=devices.kind,
        mesh=dict(placement.meshes[0].shape) if placement.meshes else {},
        compiled=in_use.compiled,
        offloaded_nbytes=kept,
        host_memory=host_limit or memory,
        notes=(*notes, *offloading),
    )


def _checked(model: ModelSpec, what_if: WhatIf | None, compile: Compile | None, fleet: Fleet | None) -> WhatIf:
    """Completes the user's `WhatIf` with the optimizer of a compiled training step; raises if they conflict."""
    for name, given, cls, such in (  # pyright checks the types, this raises readable errors
        ("what_if", cast("Any", what_if), WhatIf, 'WhatIf(optimizer="adamw")'),
        ("compile", cast("Any", compile), Compile, 'Compile("forward")'),
        ("fleet", cast("Any", fleet), Fleet, "Fleet(hosts=1024)"),
    ):
        if not isinstance(given, cls | None):
            raise LazyModelError(f"{name} is a lazymodel.{cls.__name__}, such as {such}; got {given!r}")
    what_if = what_if or WhatIf()
    if compile is None:
        return what_if
    what = f"compiling {compile.name if compile.is_step else repr(compile.what)}"
    for name, conflicts, why in (
        ("quantize", compile.is_use, "is arithmetic, and the program is of the model as it is; build it quantized"),
        ("batch", compile.is_use, "estimates them; leave one out"),
        ("lora_rank", compile.is_called, "adds pairs, and the program is of the model as it is; build it with LoRA"),
    ):
        if conflicts and (given := getattr(what_if, name)) is not None:
            raise LazyModelError(f"{what} counts activations, and {name}={given!r} {why}")
    if any(is_arithmetic(variable.sharding) for variable in model.values()):
        hint = "make it with lazymodel.topology, or plan without compile"
        raise LazyModelError(f"{what} needs devices to compile for, and this mesh is only for arithmetic; {hint}")
    if compile.what == "train" and what_if.optimizer is None and model.optimized is None:
        return dataclasses.replace(what_if, optimizer="sgd")
    return what_if


class _Devices(NamedTuple):
    live: bool  # True if they run
    platform: str
    kind: str
    memory: int | None  # bytes of the smallest


def _devices(placement: Placement) -> _Devices:
    real = [device for device in placement.devices if not isinstance(device, int)]
    # Compile-only devices belong to a client that can only compile.
    live = bool(real) and len(real) == len(placement.devices) and all(map(is_live, real))
    described = [mesh.abstract_device for mesh in placement.meshes if isinstance(mesh, AbstractMesh)]
    kinds = {(device.platform, device.device_kind) for device in (*real, *filter(None, described))}
    known: list[Any] = [kind for _, kind in kinds]
    if live:  # devices of this process report their memory
        known = [device for device in real if device.process_index == jax.process_index()]
    limits = [limit for limit in map(known_memory, known) if limit is not None]
    kind = ", ".join(sorted(kind for _, kind in kinds))
    return _Devices(live, min(kinds, default=("", ""))[0], kind, min(limits, default=None))


@dataclasses.dataclass
class _InUse:
    """Bytes in use on the most loaded device."""

    parts: dict[str, int]  # by kind
    how: str = ""  # how activations were counted, if they were
    compiled: CompiledMemory | None = None  # the compiler's numbers, if anything was compiled
    limit: int | None = None  # bytes of a device that is too small, as the compiler reports


def _in_use(model: ModelSpec, use: Use, placement: Placement, compile: Compile | None, what_if: WhatIf) -> _InUse:
    most_loaded, _ = placement.most_loaded(sum(use.parts.values(), collections.Counter[str]()))
    kept = (kind for kind, amounts in use.parts.items() if kind == PARAMETERS or amounts)
    found = _InUse({kind: placement.held(use.parts[kind]).get(most_loaded, 0) for kind in kept})
    if what_if.batch is not None:
        sizes = {"batch": what_if.batch, "sequence": cast(int, what_if.sequence), "remat": what_if.remat}
        estimate = estimate_activations(model, placement.shardings, training=bool(use.trained), **cast(Any, sizes))
        found.how, (found.parts[ACTIVATIONS], note) = "estimated", estimate
        use.notes.append(note)
    if compile is None or not compile.is_use:
        return found
    held = use.argument_nbytes(compile.what)
    try:
        found.compiled, note = _compile_use(model, use, compile)
        # A step that takes only a part of the model, or leaves some of it unused, still holds the rest.
        # CPUs use the memory of their host, so offloaded values count with it.
        held += 0 if found.compiled.host_nbytes else sum(use.offloaded.values())
        total, held = found.compiled.peak_nbytes, min(held, found.compiled.argument_nbytes)
    except DoesNotFitError as error:
        if error.needed_nbytes is None:
            raise
        total, found.limit, note = error.needed_nbytes, error.limit_nbytes, str(error)
    use.notes.append(note)
    # The compiler pads arguments and keeps results; all of that counts as activations.
    found.how, found.parts[ACTIVATIONS] = "compiled", max(total - held, 0)
    found.parts.pop(GRADIENTS if compile.is_step or compile.what == "train" else "", None)  # among its temporaries
    return found


def _read_here(choice: LoadPlan, hosts: Sequence[HostPlan], *, live: bool) -> int:
    """Bytes that this process reads; for devices that do not exist, those of the process that reads most.

    If the processes are unknown, the bytes that all of them read at least.
    """
    if not hosts:
        tensors = [source for source in choice.sources.values() if isinstance(source, LazyTensor)]
        return sum(int(math.prod(tensor.shape) * stored_itemsize(tensor.source)) for tensor in tensors)
    here = [host.read_nbytes for host in hosts if not live or host.index == jax.process_index()]
    return max(here or [host.read_nbytes for host in hosts])


def _notes(refused: Sequence[str], estimated: str | None, *, imagined: bool) -> Iterator[str]:
    """Notes: variables that count as loaded, tensors that `materialize` rejects, and the platform of an estimate."""
    if imagined:
        yield "without a checkpoint, hosts count as reading every variable as it is"
    if refused:
        more = f" ({len(refused)} tensors)" if len(refused) > 1 else ""
        yield f"materialize rejects this checkpoint: {refused[0]}{more}"
    if estimated is not None:
        each = "12 to 16 bytes an element" if estimated == "cpu" else "next to none on TPUs and GPUs"
        yield f"temporaries of init programs are estimated: {each}"


def _rows(model: ModelSpec, choice: LoadPlan, use: Use) -> tuple[PlanRow, ...]:
    of = {path: each.variable.path for each in model.conversions for path in each.paths}
    of = {path: value for path, value in of.items() if path not in choice.sources}
    origins = {path: recipe.origin for recipe in choice.recipes for path in recipe.paths}
    for left_out in choice.mismatched:
        if left_out.path in origins:
            origins[left_out.path] += f"; shape {left_out.found} of the checkpoint does not match"
    origins |= {path: where(source) for path, source in choice.sources.items() if not is_initial(source)}
    return tuple(
        PlanRow(
            path=path,
            shape=variable.shape,
            dtype=variable.dtype,
            spec=variable.spec,
            shard_nbytes=use.shard_nbytes[path],
            nbytes=variable.nbytes,
            action=action(choice, of.get(path, path)),
            source=origins.get(of.get(path, path)) or variable.origin,
            used_nbytes=sum(amounts.get(path, 0) for amounts in use.parts.values()),
            memory_kind=variable.memory_kind,
            offloaded_nbytes=use.offloaded.get(path, 0),
            why="" if variable.reason is None else variable.reason.text,
        )
        for path, variable in model.items()
    )
