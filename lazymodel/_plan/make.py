"""The verb `plan`: predicts what materializing a model will cost, and using it, before a byte moves.

Responsible for putting a plan together: what stays from the shardings, what is needed for a moment from `_plan/steps`,
what hosts read and keep from `_plan/hosts`, what using the model adds from `_plan/what_if`, and, where it is asked for,
what the compiler says from `_plan/compiled`. Devices need not be here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import AbstractMesh

from lazymodel._abstract.placement import Placement, device_shardings, offloaded_nbytes, resident_nbytes
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._compile.compile import Compile
from lazymodel._devices.compiler import CompiledMemory
from lazymodel._devices.hardware import device_memory as known_memory
from lazymodel._devices.hardware import is_arithmetic, is_live
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._mapping.mapped import flat_checkpoint
from lazymodel._mapping.match import Choice, choose, refused_casts
from lazymodel._plan.activations import estimate_activations
from lazymodel._plan.compiled import compile_use
from lazymodel._plan.fleet import Fleet, Traffic
from lazymodel._plan.hosts import make_hosts, offloaded_to, read_anywhere
from lazymodel._plan.plan import HostPlan, MemoryPlan, PlanRow
from lazymodel._plan.steps import action, make_steps, make_timeline
from lazymodel._plan.what_if import ACTIVATIONS, GRADIENTS, PARAMETERS, Use, WhatIf
from lazymodel._show.text import parse_bytes
from lazymodel._tensors.stored import is_initial, where


def plan(
    model: ModelSpec,
    checkpoint: Mapping[str, Any] | None = None,
    *,
    initialize: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    what_if: WhatIf | None = None,
    compile: Compile | None = None,
    replicas: str | None = None,
    fleet: Fleet | None = None,
) -> MemoryPlan:
    """Predicts bytes per device and host before any is spent, while materializing and in use.

    What the model has is counted, each once: its parameters, the state of its optimizer (`with_optimizer`, or a Keras
    model's own that was built), and then the gradients of what that trains. NumPy arrays that stay on the host are no
    device's.

    Init programs are compiled where their devices are here, or with `Compile("init")`; else their temporaries are
    estimated, and a plan takes a second or two whatever the model's size.

    Args:
        checkpoint: What `materialize` would be given. A tensor of another shape than its variable is no error here; the
            variable's row says so.
        initialize: As for `materialize`.
        device_memory: Bytes of one device, or `"16GiB"`; None is what devices say or are known to have (no limit: CPU).
        host_memory: Bytes of one host, likewise; they count where something is offloaded to it (`lazymodel.Host`).
        what_if: What the model does not have, by arithmetic: `lazymodel.WhatIf(optimizer="adamw", lora_rank=8)`.
        compile: What the compiler is asked, for devices that need not be here: `lazymodel.Compile("train", batch=8)`.
        replicas: As for `materialize`: whose bytes and peak count. `MemoryPlan.ways` has both ways.
        fleet: Hosts and what comes to each in a second. Without a checkpoint, variables count as if they lay in one.

    Raises:
        LazyModelError: An argument is none of these; there is no function or device to compile for; or an optimizer or
            LoRA was stated for a model that has an optimizer; or activations of no transformer were asked for.

    Example:
        >>> sharded.plan(lm.open_checkpoint("model.safetensors"), device_memory="16GiB").read_nbytes
        131072
    """
    what_if = _checked(model, what_if, compile, fleet)
    limit, host_limit = _limit(device_memory, "device_memory"), _limit(host_memory, "host_memory")
    # What is initialized needs no warning, and what is refused keeps it from being no plan: it says both itself.
    checkpoint = flat_checkpoint(checkpoint)
    choice = choose(model, checkpoint, initialize=initialize or "missing", strict=False, cast="unsafe")
    placement = Placement(device_shardings(model.variables))
    devices = _devices(placement)
    use = Use(model, placement.shardings, what_if)
    traffic = Traffic(model, choice, placement, fleet, replicas)
    compiles = devices.live or (compile is not None and not compile.is_use)
    steps, programs = make_steps(model, choice, placement, traffic, devices.platform, compile_programs=compiles)
    signature, resident = placement.fullest(use.shard_nbytes)
    timeline = tuple(make_timeline(steps, signature))
    parts, compiled, said, found = _in_use(model, use, placement, compile, what_if)
    estimated = devices.platform if not programs and any(step.action == "initialize" for step in steps) else None
    notes = [*use.notes, *_notes(refused_casts(model, checkpoint, choice), estimated, imagined=traffic.imagined)]
    hosts = make_hosts(model, choice, placement, traffic, steps, use.offloaded, on_cpu=devices.platform == "cpu")
    offloaded = offloaded_to(hosts, placement, use.offloaded, fleet, devices.kind, live=devices.live)
    return MemoryPlan(
        name=model.name,
        rows=_rows(model, choice, use),
        device_nbytes=resident,
        peak_nbytes=max((step.peak_nbytes for step in timeline), default=0),
        read_nbytes=_read_here(hosts, devices.live) if hosts else read_anywhere(choice, placement),
        host_nbytes=max((_passing_nbytes(model[path]) for path in choice.sources), default=0),
        num_devices=len(placement.devices),
        device_memory=next((each for each in (limit, found, devices.memory) if each is not None), None),
        programs=programs,
        parts=parts,
        counted={kind: use.dtypes[kind] for kind in parts},
        timeline=timeline,
        hosts=hosts,
        ways=traffic.ways(),
        device_kind=devices.kind,
        mesh=dict(placement.meshes[0].shape) if placement.meshes else {},
        compiled=compiled,
        offloaded_nbytes=offloaded.nbytes,
        host_memory=offloaded.memory if host_limit is None else host_limit,
        notes=(*notes, *said, *offloaded.notes),
    )


def _checked(model: ModelSpec, what_if: WhatIf | None, compile: Compile | None, fleet: Fleet | None) -> WhatIf:
    """What is stated, with the optimizer that a compiled training step has; refuses what does not go together."""
    for name, given, cls, such in (  # the types say this to pyright, and the errors to people
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
    if compile.is_use and what_if.quantize is not None:
        raise LazyModelError(
            f"{what} compiles the model as it is, and quantize={what_if.quantize!r} is arithmetic; plan them one by "
            "one, or build the quantized model"
        )
    if compile.is_use and what_if.batch is not None:
        raise LazyModelError(f"{what} counts activations, and batch={what_if.batch} estimates them; leave one out")
    if compile.is_called and what_if.lora_rank is not None:
        raise LazyModelError(
            f"{what} compiles the model as it is, and lora_rank={what_if.lora_rank} states pairs that it lacks; "
            "plan them one by one, or build the model with LoRA"
        )
    if any(is_arithmetic(variable.sharding) for variable in model.values()):
        mend = "make it with lazymodel.topology, or plan without compile"
        raise LazyModelError(f"{what} needs devices to compile for, and this mesh is one for arithmetic; {mend}")
    if compile.what == "train" and what_if.optimizer is None and model.optimized is None:
        return dataclasses.replace(what_if, optimizer="sgd")
    return what_if


def _limit(given: int | str | None, name: str) -> int | None:
    return None if given is None else parse_bytes(given, name=name, at_least=1)


class _Devices(NamedTuple):
    live: bool  # whether they run
    platform: str
    kind: str
    memory: int | None  # bytes of the smallest


def _devices(placement: Placement) -> _Devices:
    real = [device for device in placement.devices if not isinstance(device, int)]
    # Compile-only devices belong to a client that can compile and nothing else.
    live = bool(real) and len(real) == len(placement.devices) and all(map(is_live, real))
    described = [mesh.abstract_device for mesh in placement.meshes if isinstance(mesh, AbstractMesh)]
    kinds = {(device.platform, device.device_kind) for device in (*real, *filter(None, described))}
    known: list[Any] = [kind for _, kind in kinds]
    if live:  # they can say themselves, those of this process
        known = [device for device in real if device.process_index == jax.process_index()]
    limits = [limit for limit in map(known_memory, known) if limit is not None]
    kind = ", ".join(sorted(kind for _, kind in kinds))
    return _Devices(live, min(kinds, default=("", ""))[0], kind, min(limits, default=None))


def _in_use(
    model: ModelSpec, use: Use, placement: Placement, compile: Compile | None, what_if: WhatIf
) -> tuple[dict[str, int], CompiledMemory | None, Sequence[str], int | None]:
    """What the device holds that holds most while the model is used, by kind; and of what is compiled, if anything,
    what the compiler said, a note, and the limit of a device that it does not fit.
    """
    parts = _parts(use, placement)
    if what_if.batch is not None and what_if.sequence is not None:
        parts[ACTIVATIONS], note = estimate_activations(
            model,
            placement.shardings,
            batch=what_if.batch,
            sequence=what_if.sequence,
            remat=what_if.remat,
            training=bool(use.trained),
        )
        use.notes.append(note)
        use.dtypes[ACTIVATIONS] = "estimated"
    if compile is None or not compile.is_use:
        return parts, None, (), None
    compiled, parts[ACTIVATIONS], note, found = _compiled(model, use, compile)
    use.dtypes[ACTIVATIONS] = "compiled"
    parts.pop(GRADIENTS if compile.is_step or compile.what == "train" else "", None)  # among its temporaries
    return parts, compiled, (note,), found


def _passing_nbytes(variable: AbstractVariable) -> int:
    """Bytes of a shard, which pass through the host's memory."""
    return resident_nbytes(variable) + offloaded_nbytes(variable)


def _parts(use: Use, placement: Placement) -> dict[str, int]:
    """What the device holds that holds most while the model is used, by kind."""
    in_use = sum(map(collections.Counter[str], use.parts.values()), collections.Counter[str]())
    fullest, _ = placement.fullest(in_use)
    kept = (kind for kind, amounts in use.parts.items() if kind == PARAMETERS or amounts)
    return {kind: placement.held(use.parts[kind]).get(fullest, 0) for kind in kept}


def _read_here(hosts: Sequence[HostPlan], live: bool) -> int:
    """Bytes that this process reads; for devices that are not here, those of the process that reads most."""
    here = [host.read_nbytes for host in hosts if not live or host.index == jax.process_index()]
    return max(here or [host.read_nbytes for host in hosts])


def _notes(refused: Sequence[str], estimated: str | None, *, imagined: bool) -> Iterator[str]:
    """What `materialize` would refuse, for which platform temporaries are estimated, and what counts as loaded."""
    if imagined:
        yield "without a checkpoint, hosts count as reading every variable as it is"
    if refused:
        more = f" ({len(refused)} tensors)" if len(refused) > 1 else ""
        yield f"materialize refuses this checkpoint: {refused[0]}{more}"
    if estimated is not None:
        each = "12 to 16 bytes an element" if estimated == "cpu" else "next to none on TPUs and GPUs"
        yield f"temporaries of init programs are estimated: {each}"


def _compiled(model: ModelSpec, use: Use, compile: Compile) -> tuple[CompiledMemory | None, int, str, int | None]:
    """What the compiler said, the bytes that it adds, a note, and the limit of a device that it does not fit."""
    compiled = limit = None
    held = use.argument_nbytes(compile.what)
    try:
        compiled, note = compile_use(model, use, compile)
        # Of a step that takes a part of the model alone, or leaves some of it unused, all else is held beside it.
        # CPUs' memory is their host's, and what is offloaded counts with it.
        held += 0 if compiled.host_nbytes else sum(use.offloaded.values())
        total, held = compiled.peak_nbytes, min(held, compiled.argument_nbytes)
    except DoesNotFitError as error:
        if error.needed_nbytes is None:
            raise
        total, limit, note = error.needed_nbytes, error.limit_nbytes, str(error)
    # The compiler pads and keeps what it returns; all of that is its own part.
    return compiled, max(total - held, 0), note, limit


def _rows(model: ModelSpec, choice: Choice, use: Use) -> tuple[PlanRow, ...]:
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
            action=action(choice, path),
            source=origins.get(path) or variable.origin,
            used_nbytes=sum(amounts.get(path, 0) for amounts in use.parts.values()),
            memory_kind=variable.memory_kind,
            offloaded_nbytes=use.offloaded.get(path, 0),
            why="" if variable.reason is None else variable.reason.text,
        )
        for path, variable in model.items()
    )
