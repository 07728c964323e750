"""Devices that are not here: meshes of TPU slices to plan for and to compile for, and the search for the smallest.

Responsible for the names and shapes of slices, for getting compile-only devices from libtpu on a machine without a TPU,
and for meshes of bare numbers where arithmetic is enough. What is planned on them is decided in `_plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib.util
import math
import os
import re
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from lazymodel._device_memory import CARDS, tpu_generation
from lazymodel._device_memory import device_memory as known_memory
from lazymodel._errors import DoesNotFitError, LazyModelError, ShardingError
from lazymodel._specs import named_rules
from lazymodel._text import closest, format_bytes, parse_bytes

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractModel
    from lazymodel._plan import MemoryPlan
    from lazymodel._sharding import Rules

Shape = tuple[int, ...]

_SMALL_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Smaller than a cube of 4×4×4 chips, the unit from which the optical switches compose anything larger.
_PART_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 4
_CARD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# How many candidates that fit by arithmetic are given to the compiler before the search gives up.
_CONFIRMED = 6


@dataclasses.dataclass(frozen=True)
class _Generation:
    """One TPU generation.

    Sizes and names: https://cloud.google.com/tpu/docs/v2 and its siblings v3, v4, v5e, v5p, v6e and tpu7x.

    Attributes:
        name: As clouds call it.
        kind: As `jax.Device.device_kind` has it.
        libtpu: As `get_topology_desc` wants it.
        devices_per_chip: JAX devices of one chip.
        cores_per_name: What the number in a name such as `v4-8` counts, for each chip.
        num_cores: Cores of one JAX device.
        shapes: Slices that exist, in chips, by size, where they are few; else what is smaller than a cube.
        max_chips: Largest slice where shapes are composed of cubes; 0 where all are listed.
        chip_config: How libtpu is to see the chip's cores.
    """

    name: str
    kind: str
    libtpu: str
    devices_per_chip: int
    cores_per_name: int
    num_cores: int
    shapes: tuple[Shape, ...]
    max_chips: int = 0
    chip_config: str = "default"

    def exists(self, shape: Shape) -> bool:
        if shape in self.shapes:
            return True
        return math.prod(shape) <= self.max_chips and all(size and size % _CUBE == 0 for size in shape)

    def candidates(self) -> tuple[Shape, ...]:
        """One shape for each number of chips, the most cubic, smallest first."""
        return _candidates(self.shapes, self.max_chips)

    def slice_name(self, shape: Shape) -> str:
        return f"{self.name}:{'x'.join(map(str, shape))}"

    def num_devices(self, shape: Shape) -> int:
        return math.prod(shape) * self.devices_per_chip

    def host_bounds(self, shape: Shape) -> Shape:
        """Chips of one host. Hosts have four; v5e and v6e also come as one chip, and as eight in one host."""
        if len(shape) == 2 and math.prod(shape) <= 8:
            return (*shape, 1)
        return (1, 1, 1) if math.prod(shape) == 1 else (2, 2, 1)


@functools.cache
def _candidates(shapes: tuple[Shape, ...], max_chips: int) -> tuple[Shape, ...]:
    best = {math.prod(shape): shape for shape in shapes}
    units = max_chips // _CUBE**3
    for a in range(1, math.isqrt(units) + 1):
        for b in range(a, units // a + 1):
            for c in range(b, units // (a * b) + 1):
                shape = (_CUBE * a, _CUBE * b, _CUBE * c)
                chips = math.prod(shape)
                # Rings longer than 24 hops are offered by no generation.
                if shape[-1] <= 24 and sum(shape) < sum(best.get(chips, (chips,) * 3)):
                    best[chips] = shape
    return tuple(best[chips] for chips in sorted(best))


_GENERATIONS = {
    generation.name: generation
    for generation in (
        _Generation("v2", "TPU v2", "v2", 2, 2, 1, ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))),
        _Generation("v3", "TPU v3", "v3", 2, 2, 1, ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))),
        _Generation("v4", "TPU v4", "v4", 1, 2, 2, _PART_CUBES, 4096, "megacore"),
        _Generation("v5e", "TPU v5 lite", "v5e", 1, 1, 1, _SMALL_SQUARES),
        _Generation("v5p", "TPU v5", "v5p", 1, 2, 2, _PART_CUBES, 6144),
        _Generation("v6e", "TPU v6 lite", "v6e", 1, 1, 1, _SMALL_SQUARES),
        _Generation("v7x", "TPU7x", "tpu7x", 2, 2, 1, ((1, 1, 1), *_PART_CUBES), 9216),
    )
}


def topology(name: str, axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of TPU devices that need not be here: for sharding, planning and compiling, not for running.

    Args:
        name: Generation and chips, `"v5e:2x4"`, `"v5p:4x4x4"`, or the name under which clouds rent it: `"v5e-8"`
            counts chips, as does `v6e`; `"v2-8"`, `"v4-8"`, `"v5p-8"`, `"v7x-8"` count cores, two a chip. Generations
            are v2, v3, v4, v5e, v5p, v6e and v7x.
        axes: Axis name to size, whose product is the number of devices; one size may be -1. None is one axis,
            `"model"`, over all. A v2, v3 or v7x chip is two devices, any other is one.

    Returns:
        A mesh with Auto axes. Asked twice for a slice, its devices are the same objects.

    Raises:
        LazyModelError: No such slice, axes of another product, or libtpu is not installed.

    Example:
        `abstract.shard(lm.topology("v5e:2x4", {"batch": 2, "model": 4}), rules).plan(compile="init")`
    """
    if _is_cards(name):
        raise LazyModelError(
            f"{name!r} are cards, and no compiler is here for cards that are not; plan for them by arithmetic, on "
            f"lazymodel.arithmetic_mesh({name!r})"
        )
    generation, shape = _parse(name)
    sizes = _axis_sizes(axes, generation.num_devices(shape), generation.slice_name(shape))
    devices = list(_devices(generation.name, shape))
    try:
        # As jax.make_mesh orders them on live devices: neighbours along an axis are neighbours on the torus.
        grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError):  # a size that the torus has no factor for
        grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes))


def arithmetic_mesh(name: str, axes: Mapping[str, int] | None = None) -> AbstractMesh:
    """The same mesh without devices: shardings and plans can be computed on it, nothing can be compiled.

    Needs no libtpu, and takes a number of cards too.

    Args:
        name: As for `topology`, or a card and how many, `"H100:8"`.
        axes: As for `topology`.

    Raises:
        LazyModelError: No such slice or card, or axes of another product.
    """
    if _is_cards(name):
        card, _, count = name.strip().partition(":")
        num_devices, device = int(count), AbstractDevice(card, None, "gpu")
        if num_devices < 1:
            raise LazyModelError(f"{name!r} has no devices; write {card}:1 or more")
        sizes = _axis_sizes(axes, num_devices, name)
    else:
        generation, shape = _parse(name)
        device = AbstractDevice(generation.kind, generation.num_cores, "tpu")
        sizes = _axis_sizes(axes, generation.num_devices(shape), generation.slice_name(shape))
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


def topology_names(device: str) -> list[str]:
    """Names of the slices of a generation, smallest first, one for each number of chips.

    Raises:
        LazyModelError: No such generation.
    """
    generation = _generation(device)
    return [generation.slice_name(shape) for shape in generation.candidates()]


# --- names -----------------------------------------------------------------------------------------------------------


def _is_cards(name: Any) -> bool:
    """Whether it is a card and how many, such as `H100:8`."""
    if not isinstance(name, str):
        raise LazyModelError(f"a slice is named, such as 'v5e:2x4' or 'v5e-8'; got {name!r}")
    card, _, count = name.strip().partition(":")
    known = tpu_generation(card) is None and known_memory(card) is not None
    if known and not count:
        raise LazyModelError(f"{name!r} is a card; say how many, such as '{card}:8'")
    return known and count.isdecimal() and len(count) < 7


def _generation(name: str) -> _Generation:
    found = tpu_generation(name)
    if found is None:
        near = closest(name[:40], (*_GENERATIONS, *CARDS))
        raise LazyModelError(f"{name[:40]!r} is no TPU generation{near}; known are {', '.join(_GENERATIONS)}")
    return _GENERATIONS[found]


def _parse(name: str) -> tuple[_Generation, Shape]:
    """Generation and shape in chips of `v5e:2x4` or `v5e-8`."""
    match = re.fullmatch(r"\s*([A-Za-z0-9 -]{1,20}?)(?::(\d{1,4}(?:x\d{1,4}){1,2})|-(\d{1,6}))\s*", name)
    if match is None:
        generation = tpu_generation(name)
        examples = _GENERATIONS[generation] if generation else _GENERATIONS["v5e"]
        shape = examples.shapes[min(2, len(examples.shapes) - 1)]
        near = "" if generation else closest(re.split("[:-]", name[:40])[0], (*_GENERATIONS, *CARDS))
        raise LazyModelError(
            f"{name[:40]!r} is no TPU slice{near}; write a generation and its chips, such as "
            f"{examples.slice_name(shape)!r} or {_rented_name(examples, shape)!r}"
        )
    generation = _generation(match[1])
    if match[2]:
        dimensions = len(generation.shapes[0])
        shape = tuple(sorted(int(size) for size in match[2].split("x")))
        if len(shape) > dimensions and shape[0] == 1:
            shape = shape[1:]  # 2x4x1 of a generation with two dimensions
        elif len(shape) < dimensions:
            shape = (1, *shape)
        # Slices are named with sizes ascending, but for those one chip thick.
        shape = (*shape[1:], 1) if dimensions == 3 and shape[0] == 1 else shape
        chips = math.prod(shape)
    else:
        number = int(match[3])
        chips, rest = divmod(number, generation.cores_per_name)
        found = [] if rest else [s for s in generation.candidates() if math.prod(s) == chips]
        shape = found[0] if found else ()
    if not shape or not generation.exists(shape):
        raise LazyModelError(_no_such_slice(name, generation, chips))
    return generation, shape


def _rented_name(generation: _Generation, shape: Shape) -> str:
    return f"{generation.name}-{math.prod(shape) * generation.cores_per_name}"


def _no_such_slice(name: str, generation: _Generation, chips: int) -> str:
    sizes = generation.candidates()
    below = [shape for shape in sizes if math.prod(shape) <= chips][-1:]
    above = [shape for shape in sizes if math.prod(shape) > chips][:1]
    nearest = " and ".join(f"{generation.slice_name(s)} ({_rented_name(generation, s)})" for s in (*below, *above))
    counted = "cores, two a chip" if generation.cores_per_name == 2 else "chips"
    return f"there is no TPU slice {name.strip()[:40]!r}; nearest: {nearest}. {generation.name}-N counts {counted}."


def _check_axes(axes: Any) -> None:
    named = isinstance(axes, Mapping) and all(isinstance(axis, str) for axis in cast("Mapping[Any, Any]", axes))
    if axes is not None and not named:
        raise LazyModelError(f"axes is a mapping of axis name to size, such as {{'model': 8}}; got {axes!r}")


def _axis_sizes(axes: Mapping[str, int] | None, num_devices: int, name: str) -> dict[str, int]:
    """Axis sizes whose product is the number of devices."""
    if axes is None:
        return {"model": num_devices}
    _check_axes(axes)
    sizes = dict(axes)
    wrong = {axis: size for axis, size in sizes.items() if type(size) is not int or (size < 1 and size != -1)}
    if wrong or not sizes or list(sizes.values()).count(-1) > 1:
        raise LazyModelError(f"axes are names with positive sizes, one of which may be -1; got {sizes}")
    rest = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if num_devices % rest == 0:
            return {axis: num_devices // rest if size == -1 else size for axis, size in sizes.items()}
    elif rest == num_devices:
        return sizes
    # The last axis takes what divisors of the sizes asked for leave, or the one whose size was left open.
    taker = next((axis for axis, size in sizes.items() if size == -1), list(sizes)[-1])
    nearest, left = dict(sizes), num_devices
    for axis, size in sizes.items():
        if axis != taker:
            nearest[axis] = math.gcd(left, size)
            left //= nearest[axis]
    nearest[taker] = left
    raise LazyModelError(f"axes {sizes} do not make the {num_devices} devices of {name}; {nearest} would")


# --- libtpu ----------------------------------------------------------------------------------------------------------

# Read by libtpu when it is loaded. Without a TPU it would ask the cloud's metadata server for what is set here, take a
# lock file that allows one process on the machine, log to stderr and leave files under /tmp/tpu_logs.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@contextlib.contextmanager
def libtpu_environment() -> Generator[None]:
    """The variables above, where they are not set and no TPU is here that might be opened later.

    What libtpu does when it is loaded decides; JAX loads it, too, when it looks for devices.
    """
    here = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    added = {} if here else {name: value for name, value in _LIBTPU_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def has_libtpu() -> bool:
    """Whether TPU programs can be compiled here."""
    return bool(os.environ.get("TPU_LIBRARY_PATH")) or importlib.util.find_spec("libtpu") is not None


@functools.cache
def _devices(generation_name: str, shape: Shape) -> tuple[Any, ...]:
    """The devices of a slice. Each call of libtpu makes new ones, unequal to the last; so they are kept."""
    generation = _GENERATIONS[generation_name]
    name = generation.slice_name(shape)
    if not has_libtpu():
        raise LazyModelError(
            f'devices of {name} come from libtpu, which is not installed: pip install "lazymodel[tpu]"'
        )
    try:
        with libtpu_environment():
            description = topologies.get_topology_desc(
                f"{generation.libtpu}:{'x'.join(map(str, shape))}",
                "tpu",
                chips_per_host_bounds=list(generation.host_bounds(shape)),
                chip_config_name=generation.chip_config,
            )
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if "lockfile" in message:
            message = (
                "another process holds libtpu, as one that uses this machine's TPU does; wait for it, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1 to compile beside it"
            )
        raise LazyModelError(f"libtpu gives no devices for {name}: {message}") from error
    devices = tuple(description.devices)
    if len(devices) != generation.num_devices(shape):
        raise LazyModelError(
            f"libtpu gives {len(devices)} devices for {name}, expected {generation.num_devices(shape)}; "
            "this libtpu sees the chips otherwise than the one that lazymodel was tested with"
        )
    return devices


# --- the smallest ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TopologyRow:
    """One slice that was considered.

    Attributes:
        name: Its name, for `topology`.
        num_devices: Devices in it.
        axes: Axis name to size.
        device_nbytes: Bytes that a device must have by arithmetic, `MemoryPlan.needed_nbytes`; None where no plan was
            made because the variables alone, split evenly over all devices, are too large.
        compiled_nbytes: The same as the compiler says; None where it was not asked.
        fits: Whether it fits by the best knowledge there is.
        reason: Why not; empty where it fits.
    """

    name: str
    num_devices: int
    axes: Mapping[str, int]
    device_nbytes: int | None
    compiled_nbytes: int | None
    fits: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class TopologyTable:
    """What `smallest_topology` found, smallest slice first.

    Attributes:
        model: The model's name.
        device_memory: Bytes that one device has.
        rows: All slices considered; the last one fits.
    """

    model: str
    device_memory: int
    rows: tuple[TopologyRow, ...]

    @property
    def smallest(self) -> TopologyRow:
        """The smallest slice that fits."""
        return next(row for row in self.rows if row.fits)

    def __repr__(self) -> str:
        lines = [f"{self.model} on devices of {format_bytes(self.device_memory)}"]
        header = ("topology", "devices", "mesh", "arithmetic", "compiled", "fits")
        cells = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        for line in cells:
            lines.append("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
        return "\n".join(lines)


def _cells(row: TopologyRow) -> tuple[str, ...]:
    def size(nbytes: int | None) -> str:
        return "–" if nbytes is None else format_bytes(nbytes)

    mesh = ", ".join(f"{axis} {length}" for axis, length in row.axes.items())
    verdict = "yes" if row.fits else f"no: {row.reason}"
    return row.name, str(row.num_devices), mesh, size(row.device_nbytes), size(row.compiled_nbytes), verdict


def smallest_topology(
    abstract: AbstractModel,
    device: str,
    rules: Rules | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    max_devices: int = 1024,
    device_memory: int | str | None = None,
    confirm: bool = True,
    compile: str = "init",
    **options: Any,
) -> TopologyTable:
    """The smallest slice of one generation on which a model fits: found by arithmetic, confirmed by the compiler.

    Args:
        abstract: The model; shardings that it has are replaced.
        device: A TPU generation, `"v5e"`, or a card, `"H100"`, of which 1, 2, 4, … are tried by arithmetic alone.
        rules: As for `AbstractModel.shard`.
        axes: As for `topology`; a size of -1 takes what a slice has. None is one axis, `"model"`.
        max_devices: Largest slice to consider.
        device_memory: Bytes of one device, or `"14GiB"`, if less than the device has is to be used.
        confirm: Whether to compile; without, libtpu need not be installed.
        compile: What is compiled to confirm: `"init"`, `"forward"` or `"train"`, as for `AbstractModel.plan`.
        **options: What else `AbstractModel.plan` takes: `checkpoint`, `optimizer`, `function` and `inputs`, …

    Raises:
        DoesNotFitError: It fits on none; names the one that comes nearest, and by how much.
        ShardingError: The rules fit on none.
        LazyModelError: The device is unknown, or libtpu is not installed and `confirm` was not turned off.
    """
    given: Any = device
    if not isinstance(given, str):
        raise LazyModelError(f"a TPU generation or a card is named, such as 'v5e' or 'H100'; got {given!r}")
    known = known_memory(device)
    if tpu_generation(device) is None and known is not None:
        names, confirm = [f"{device}:{count}" for count in _CARD_COUNTS], False
    else:
        names = topology_names(device)
        known = known_memory(_generation(device).name)
        if confirm and not has_libtpu():
            raise LazyModelError(
                'confirming by the compiler needs libtpu: pip install "lazymodel[tpu]", or pass confirm=False'
            )
    assert known is not None  # every generation is in the table
    limit = known if device_memory is None else parse_bytes(device_memory, name="device_memory", at_least=1)
    _check_axes(axes)
    rules = named_rules(rules)
    rows: list[TopologyRow] = []
    misfits: list[ShardingError] = []
    for name in names:
        if arithmetic_mesh(name).size > max_devices:
            break
        row = _consider(abstract, name, rules, axes, limit, options, misfits)
        if row.fits and confirm:
            row = _confirm(abstract, row, rules, limit, {**options, "compile": compile})
        rows.append(row)
        if row.fits:
            return TopologyTable(abstract.name, limit, tuple(rows))
        if sum(row.compiled_nbytes is not None for row in rows) >= _CONFIRMED:
            break
    if misfits and len(misfits) == len(rows):  # no matter of memory
        raise ShardingError(f"the rules fit on no {device} slice. {rows[0].name}: {misfits[0]}") from misfits[0]
    raise DoesNotFitError(_nowhere(abstract, device, limit, max_devices, rows))


def _consider(
    abstract: AbstractModel,
    name: str,
    rules: Rules | None,
    axes: Mapping[str, int] | None,
    limit: int,
    options: Mapping[str, Any],
    misfits: list[ShardingError],
) -> TopologyRow:
    """One slice by arithmetic; an error of the rules there is appended to `misfits`."""
    size = arithmetic_mesh(name).size
    try:
        mesh = arithmetic_mesh(name, axes)
    except LazyModelError as error:
        return TopologyRow(name, size, dict(axes or {}), None, None, False, _first_line(error))
    lengths = dict(mesh.shape)
    if abstract.nbytes > limit * size:
        reason = f"{format_bytes(math.ceil(abstract.nbytes / size))} a device even if everything is split"
        return TopologyRow(name, size, lengths, None, None, False, reason)
    try:
        plan = _plan(abstract, mesh, rules, limit, _arithmetic(options))
    except ShardingError as error:
        misfits.append(error)
        return TopologyRow(name, size, lengths, None, None, False, _first_line(error))
    needed = plan.needed_nbytes
    return TopologyRow(name, size, lengths, needed, None, needed <= limit, _shortfall(needed, limit))


def _confirm(
    abstract: AbstractModel, row: TopologyRow, rules: Rules | None, limit: int, options: Mapping[str, Any]
) -> TopologyRow:
    """One slice by the compiler."""
    try:
        plan = _plan(abstract, topology(row.name, row.axes), rules, limit, options)
    except DoesNotFitError as error:
        needed = error.needed_nbytes or 0
        return dataclasses.replace(row, compiled_nbytes=needed, fits=False, reason=_first_line(error))
    needed = plan.needed_nbytes
    return dataclasses.replace(row, compiled_nbytes=needed, fits=needed <= limit, reason=_shortfall(needed, limit))


def _shortfall(needed: int, limit: int) -> str:
    return f"{format_bytes(needed - limit)} too little" if needed > limit else ""


def _plan(
    abstract: AbstractModel, mesh: Any, rules: Rules | None, limit: int, options: Mapping[str, Any]
) -> MemoryPlan:
    # What rules leave unmatched is the same on every mesh, and said when the chosen one is sharded.
    return abstract.shard(mesh, rules, on_unmatched="ignore").plan(device_memory=limit, **options)


def _arithmetic(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plan without those for what is compiled."""
    compiled = ("function", "inputs", "batch", "sequence")
    return {name: value for name, value in options.items() if name not in compiled}


def _nowhere(abstract: AbstractModel, device: str, limit: int, max_devices: int, rows: list[TopologyRow]) -> str:
    start = (
        f"{abstract.name} ({format_bytes(abstract.nbytes)}) fits on no {device} slice of at most {max_devices} devices"
    )
    known = [(row.compiled_nbytes or row.device_nbytes or 0, row) for row in rows]
    known = [(needed, row) for needed, row in known if needed]
    if known:
        needed, nearest = min(known, key=lambda pair: pair[0])
        return (
            f"{start} of {format_bytes(limit)}; nearest is {nearest.name} with {format_bytes(needed)} on a device. "
            "Rules that split more, more axes, a smaller dtype or a larger max_devices would help."
        )
    if not rows:
        return f"{start}: the smallest slice has more"
    return f"{start} of {format_bytes(limit)}; {rows[-1].name}: {rows[-1].reason}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
