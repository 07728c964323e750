"""Devices, here or not: their memory, the slices of TPU generations, and how much memory programs need on them.

Contains the only table of TPU generations and GPUs. Parses the names of slices, gets compile-only devices from libtpu
on a machine without a TPU, and compiles functions of shapes. Nothing is run.
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
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._show.text import closest, format_bytes, grouped_by

Shape = tuple[int, ...]

_MIB = 2**20
_SQUARES = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_SMALL_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Smaller than a cube of 4×4×4 chips, the unit of which the optical switches compose all larger slices.
_PART_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 4


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation.

    Sizes and names: https://cloud.google.com/tpu/docs/v2 and its siblings v3, v4, v5e, v5p, v6e and tpu7x. A device of
    v2, v3 or v7x is one of the chip's two cores and has half of the chip's memory. A device of v4 or v5p is the chip,
    whose two cores act as one ("megacore"). Data sheets: https://cloud.google.com/tpu/docs/system-architecture
    """

    name: str  # as clouds use it, and libtpu unless `libtpu` is set
    kind: str  # as in `jax.Device.device_kind`
    # The largest array, in MiB, for which libtpu 0.0.52 compiles an update in place on one device, found by bisection.
    # The available memory that the compiler prints is about 3 MiB more, which the program itself needs. The data sheet
    # has a larger number, because the runtime reserves some memory.
    mib: int
    devices_per_chip: int
    num_cores: int  # of one JAX device
    # GiB of memory of a host of four chips; machines with one or eight chips have as much for each chip, or more.
    # https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and the pages of each generation
    host_gib: int
    shapes: tuple[Shape, ...]  # slices that exist, in chips, by size, if they are few; else those below a cube
    max_chips: int = 0  # of the largest slice if shapes are composed of cubes; 0 if all are listed
    aliases: tuple[str, ...] = ()  # other names, lower-case and without the prefix "tpu"
    libtpu: str = ""  # name for `get_topology_desc`, if different
    chip_config: str = "default"  # how libtpu presents the chip's cores

    @property
    def cores_per_chip(self) -> int:
        """Cores per chip as counted by the number in a name such as `v4-8`."""
        return self.devices_per_chip * self.num_cores

    def exists(self, shape: Shape) -> bool:
        if shape in self.shapes:
            return True
        return math.prod(shape) <= self.max_chips and all(size and size % _CUBE == 0 for size in shape)

    @functools.cached_property
    def candidates(self) -> tuple[Shape, ...]:
        """One shape for each number of chips, the most cubic one, smallest first."""
        best = {math.prod(shape): shape for shape in self.shapes}
        units = self.max_chips // _CUBE**3
        for a in range(1, math.isqrt(units) + 1):
            for b in range(a, units // a + 1):
                for c in range(b, units // (a * b) + 1):
                    shape = (_CUBE * a, _CUBE * b, _CUBE * c)
                    chips = math.prod(shape)
                    # No generation offers rings longer than 24 hops.
                    if shape[-1] <= 24 and sum(shape) < sum(best.get(chips, (chips,) * 3)):
                        best[chips] = shape
        return tuple(best[chips] for chips in sorted(best))

    @property
    def sizes(self) -> frozenset[int]:
        """Numbers of devices of the slices."""
        return frozenset(map(self.num_devices, self.candidates))

    def slice_name(self, shape: Shape) -> str:
        return f"{self.name}:{'x'.join(map(str, shape))}"

    def rented_name(self, shape: Shape) -> str:
        return f"{self.name}-{math.prod(shape) * self.cores_per_chip}"

    def num_devices(self, shape: Shape) -> int:
        return math.prod(shape) * self.devices_per_chip

    def host_bounds(self, shape: Shape) -> Shape:
        """Chips of one host. Hosts have four; v5e and v6e also exist with one chip, and with eight in one host."""
        if len(shape) == 2 and math.prod(shape) <= 8:
            return (*shape, 1)
        return (1, 1, 1) if math.prod(shape) == 1 else (2, 2, 1)


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v2", "TPU v2", 7660, 2, 1, 334, _SQUARES),  # of 8 GiB
        Generation("v3", "TPU v3", 15852, 2, 1, 334, (*_SQUARES, (16, 32), (32, 32))),  # of 16 GiB
        Generation("v4", "TPU v4", 31482, 1, 2, 407, _PART_CUBES, 4096, chip_config="megacore"),  # of 32 GiB
        Generation(
            "v5e", "TPU v5 lite", 16124, 1, 1, 192, _SMALL_SQUARES, aliases=("v5lite", "v5litepod")
        ),  # of 16 GiB
        Generation("v5p", "TPU v5", 98022, 1, 2, 448, _PART_CUBES, 6144),  # of 96 GiB, sold as 95
        Generation("v6e", "TPU v6 lite", 31990, 1, 1, 704, _SMALL_SQUARES, aliases=("v6lite", "trillium")),  # of 32 GiB
        Generation(
            "v7x", "TPU7x", 97010, 2, 1, 960, ((1, 1, 1), *_PART_CUBES), 9216, ("v7", "ironwood"), libtpu="tpu7x"
        ),  # of 96 GiB: half of a chip's 192
    )
}
# TPU v4 without megacore, the default of `get_topology_desc`.
_TPU_V4_CORE = 15613


def _bare(name: str) -> str:
    return re.sub(r"^tpu[ -]?", "", name.strip().lower())


_TPU_NAMES = {
    alias: generation
    for generation in GENERATIONS.values()
    for alias in (generation.name, _bare(generation.kind), *generation.aliases)
}

# GPUs: common name, a pattern of their names, and total memory in MiB as `nvidia-smi` and `rocm-smi` report it, with
# error correction on if there is any. The first pattern that is found in the lower-cased name counts. If a GPU is sold
# in two sizes and the name does not contain one, the smaller is taken. A device of MI250 is one of the GPU's two dies.
# AMD's totals are 16 MiB less than the GPU has: MI300X reports this, and it is assumed for the others.
_GPUS = (
    ("B300", r"\bb300\b", 275040),
    ("GB200", r"\bgb200\b", 189471),
    ("B200", r"\bb200\b", 183359),
    ("H200", r"\bh200\b", 143771),
    ("GH200", r"\bgh200\b", 97871),
    ("H20", r"\bh20\b", 97871),
    ("H100-NVL", r"\bh100[ -]nvl\b", 95830),
    ("H100", r"\bh100\b", 81559),
    ("A100-80GB", r"\ba100\b.*\b80 ?gb\b", 81920),
    ("A100", r"\ba100\b", 40960),
    ("L40S", r"\bl40s?\b", 46068),
    ("A40", r"\ba40\b", 46068),
    ("A10", r"\ba10g?\b", 23028),
    ("L4", r"\bl4\b", 23034),
    ("T4", r"\bt4\b", 15360),
    ("V100-32GB", r"\bv100\b.*\b32 ?gb\b", 32768),
    ("V100", r"\bv100\b", 16384),
    ("RTX PRO 6000", r"\brtx pro 6000\b", 97887),
    ("RTX 6000 Ada", r"\brtx 6000 ada\b", 49140),
    ("RTX A6000", r"\b(?:rtx )?a6000\b", 49140),
    ("RTX 5090", r"\brtx 5090\b", 32607),
    ("RTX 4090", r"\brtx 4090\b", 24564),
    ("RTX 3090", r"\brtx 3090\b", 24576),
    ("MI210", r"\bmi210\b", 65520),
    ("MI250X", r"\bmi250x?\b", 65520),
    ("MI300X", r"\bmi300x\b", 196592),
    ("MI325X", r"\bmi325x\b", 262128),
    ("MI355X", r"\bmi35[05]x\b", 294896),
)

GPUS = tuple(name for name, _, _ in _GPUS)


def device_memory(device: Any) -> int | None:
    """Bytes of memory that programs can use on one device, or None if nothing is known (CPUs, unknown names).

    Args:
        device: A `jax.Device`, or a name: a device kind as in JAX (`"TPU v5 lite"`, `"NVIDIA H100 80GB HBM3"`), a
            TPU generation (`"v5e"`), a slice of one (`"v5e:2x4"`, `"v5e-8"`), or a GPU (`"A100-80GB"`).

    A live device reports how much its allocator may use, which on GPUs is a fraction of the memory
    (`XLA_PYTHON_CLIENT_MEM_FRACTION`, three quarters by default). For a name, it is the whole memory.

    Raises:
        LazyModelError: It is neither.

    Example:
        >>> lm.device_memory("v5e")
        16907239424
    """
    if isinstance(device, str):
        return _known(device)
    if not hasattr(device, "memory_stats"):
        raise LazyModelError(f"expected a jax.Device or a name such as 'v5e' or 'H100', got {device!r}")
    try:
        stats = device.memory_stats()
    except RuntimeError:  # raised by JAX for a device of another process or a compile-only device
        stats = None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if tpu_generation(device.device_kind) is GENERATIONS["v4"] and getattr(device, "num_cores", 2) == 1:
        return _TPU_V4_CORE * _MIB
    return _known(device.device_kind)


def devices_per_host(kind: str, num_devices: int) -> int | None:
    """Devices of a TPU slice of so many devices that share a host; None if it is not a TPU."""
    if (generation := tpu_generation(kind)) is None:
        return None
    chips = max(num_devices // generation.devices_per_chip, 1)
    per_host = chips if len(generation.shapes[0]) == 2 and chips <= 8 else min(chips, 4)
    return min(per_host * generation.devices_per_chip, num_devices)


def host_memory(kind: str, num_devices: int) -> int | None:
    """Bytes of memory of one host of a TPU slice of so many devices, as it is rented; None if it is not a TPU."""
    generation, count = tpu_generation(kind), devices_per_host(kind, num_devices)
    if generation is None or count is None:
        return None
    return (generation.host_gib << 30) * count // (4 * generation.devices_per_chip)


def tpu_generation(name: str) -> Generation | None:
    """The generation that belongs to a TPU's device kind, generation or slice; None for any other name."""
    return _TPU_NAMES.get(re.sub(r"(?::[\dx]+|-\d+)$", "", _bare(name)))


def _known(name: str) -> int | None:
    if (generation := tpu_generation(name)) is not None:
        return generation.mib * _MIB
    # `A100-80GB`, `NVIDIA_H100` and `rtx4090` are other spellings of `A100 80GB` …
    text = re.sub(r"\brtx(?=\d)", "rtx ", re.sub(r"[_\-]+", " ", name[:200].lower()))
    return next((size * _MIB for _, pattern, size in _GPUS if re.search(pattern, text)), None)


def is_live(device: Any) -> bool:
    """Returns True if a device can run programs; False if it is a compile-only device."""
    return "CompileOnly" not in type(device.client).__name__


def is_arithmetic(sharding: Any) -> bool:
    """Returns True if a sharding is over a mesh without devices, for which nothing can be compiled."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def process_mesh(devices: Iterable[Any]) -> Mesh:
    """The mesh of processes and their devices, of every process as many."""
    by_process = grouped_by(sorted(devices, key=lambda device: device.id), lambda device: device.process_index)
    count = min(map(len, by_process.values()))
    return Mesh([by_process[process][:count] for process in sorted(by_process)], ("process", "device"))


def require_live(variables: Mapping[str, Any]) -> None:
    """Raises LazyModelError unless every variable's devices are here, or in another process of this program."""
    known: set[Any] = set()  # many variables share few meshes
    for path, variable in variables.items():
        sharding: Sharding | None = variable.sharding
        holder: Any = sharding.mesh if isinstance(sharding, NamedSharding) else sharding
        if sharding is None or holder in known:
            continue
        if is_arithmetic(sharding):
            what = "a mesh without devices (as lazymodel.arithmetic_mesh makes), for planning only"
        elif not is_live(next(iter(sharding.device_set))):
            what = "devices that are not here (as lazymodel.topology has), for planning and compiling only"
        else:
            known.add(holder)
            continue
        raise LazyModelError(
            f"{path!r} is sharded over {what}; shard the model over a jax.sharding.Mesh of jax.devices() before it is "
            "materialized"
        )


def topology(name: str, axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of TPU devices that need not be here: for sharding, planning and compiling, not for running.

    Args:
        name: Generation and chips, `"v5e:2x4"`, `"v5p:4x4x4"`, or the name under which clouds rent it: `"v5e-8"` and
            `"v6e-8"` count chips; `"v2-8"`, `"v4-8"`, `"v5p-8"` and `"v7x-8"` count cores, two per chip. Generations
            are v2, v3, v4, v5e, v5p, v6e and v7x.
        axes: Axis name to size. Their product is the number of devices; one size may be -1. None is one axis,
            `"model"`, over all devices. A v2, v3 or v7x chip is two devices, any other chip is one.

    Returns:
        A mesh with Auto axes. Repeated calls for a slice return the same device objects.

    Raises:
        LazyModelError: There is no such slice, the axes have another product, or libtpu is not installed.

    Example:
        >>> mesh = lm.topology("v5e:2x4", {"batch": 2, "model": 4})
        >>> abstract.shard(mesh, lm.auto()).plan(compile=lm.Compile("init")).programs
        2
    """
    if _is_gpus(name):
        raise LazyModelError(
            f"{name!r} are GPUs, and programs can be compiled only for GPUs that are here; plan for them by "
            f"arithmetic, on lazymodel.arithmetic_mesh({name!r})"
        )
    generation, shape = _parse(name)
    sizes = _axis_sizes(axes, generation.num_devices(shape), generation.slice_name(shape))
    devices = list(_devices(generation, shape))
    try:
        # In the order of jax.make_mesh on live devices: neighbours along an axis are neighbours on the torus.
        grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError):  # a size that the torus has no factor for
        grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes))


def arithmetic_mesh(name: str, axes: Mapping[str, int] | None = None) -> AbstractMesh:
    """The same mesh without devices: shardings and plans can be computed on it, nothing can be compiled.

    Needs no libtpu, and accepts a number of GPUs, too.

    Args:
        name: As for `topology`, or a GPU and their number, `"H100:8"`.
        axes: As for `topology`.

    Raises:
        LazyModelError: There is no such slice or GPU, or the axes have another product.

    Example:
        >>> abstract.shard(lm.arithmetic_mesh("H100:8"), lm.auto()).plan().device_nbytes
        16384
    """
    if _is_gpus(name):
        gpu, _, count = name.strip().partition(":")
        num_devices, device = int(count), AbstractDevice(gpu, None, "gpu")
        if num_devices < 1:
            raise LazyModelError(f"{name!r} has no devices; write {gpu}:1 or more")
        sizes = _axis_sizes(axes, num_devices, name)
    else:
        generation, shape = _parse(name)
        device = AbstractDevice(generation.kind, generation.num_cores, "tpu")
        sizes = _axis_sizes(axes, generation.num_devices(shape), generation.slice_name(shape))
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


def topology_names(device: str) -> list[str]:
    """Names of the slices of a generation, smallest first, one for each number of chips."""
    generation = _generation(device)
    return [generation.slice_name(shape) for shape in generation.candidates]


# --- names -----------------------------------------------------------------------------------------------------------


def _is_gpus(name: Any) -> bool:
    """Returns True for a GPU and their number, such as `H100:8`."""
    if not isinstance(name, str):
        raise LazyModelError(f"expected the name of a slice, such as 'v5e:2x4' or 'v5e-8', got {name!r}")
    gpu, _, count = name.strip().partition(":")
    known = tpu_generation(gpu) is None and device_memory(gpu) is not None
    if known and not count:
        raise LazyModelError(f"{name!r} is a GPU without a number; write how many after a colon, such as 'H100:8'")
    return known and count.isdecimal() and len(count) < 7


def _generation(name: str) -> Generation:
    found = tpu_generation(name)
    if found is None:
        near = closest(name[:40], (*GENERATIONS, *GPUS))
        raise LazyModelError(f"{name[:40]!r} is not a TPU generation{near}; known are {', '.join(GENERATIONS)}")
    return found


def _parse(name: str) -> tuple[Generation, Shape]:
    """Generation and shape in chips of `v5e:2x4` or `v5e-8`."""
    match = re.fullmatch(r"\s*([A-Za-z0-9 -]{1,20}?)(?::(\d{1,4}(?:x\d{1,4}){1,2})|-(\d{1,6}))\s*", name)
    if match is None:
        generation = tpu_generation(name)
        examples = generation or GENERATIONS["v5e"]
        shape = examples.shapes[min(2, len(examples.shapes) - 1)]
        near = "" if generation else closest(re.split("[:-]", name[:40])[0], (*GENERATIONS, *GPUS))
        raise LazyModelError(
            f"{name[:40]!r} is not a TPU slice{near}; write a generation and its chips, such as "
            f"{examples.slice_name(shape)!r} or {examples.rented_name(shape)!r}"
        )
    generation = _generation(match[1])
    if match[2]:
        dimensions = len(generation.shapes[0])
        shape = tuple(sorted(int(size) for size in match[2].split("x")))
        if len(shape) > dimensions and shape[0] == 1:
            shape = shape[1:]  # 2x4x1 of a generation with two dimensions
        elif len(shape) < dimensions:
            shape = (1, *shape)
        # The sizes in a slice's name are ascending, except if the slice is one chip thick.
        shape = (*shape[1:], 1) if dimensions == 3 and shape[0] == 1 else shape
        chips = math.prod(shape)
    else:
        number = int(match[3])
        chips, rest = divmod(number, generation.cores_per_chip)
        found = [] if rest else [s for s in generation.candidates if math.prod(s) == chips]
        shape = found[0] if found else ()
    if not shape or not generation.exists(shape):
        sizes = generation.candidates
        nearest = (*[s for s in sizes if math.prod(s) <= chips][-1:], *[s for s in sizes if math.prod(s) > chips][:1])
        names = " and ".join(f"{generation.slice_name(s)} ({generation.rented_name(s)})" for s in nearest)
        counted = "cores, two per chip" if generation.cores_per_chip == 2 else "chips"
        raise LazyModelError(
            f"there is no TPU slice {name.strip()[:40]!r}; nearest: {names}. {generation.name}-N counts {counted}."
        )
    return generation, shape


def check_axes(axes: Any) -> None:
    named = isinstance(axes, Mapping) and all(isinstance(axis, str) for axis in cast("Mapping[Any, Any]", axes))
    if axes is not None and not named:
        raise LazyModelError(f"expected axes as a mapping of axis name to size, such as {{'model': 8}}, got {axes!r}")


def _axis_sizes(axes: Mapping[str, int] | None, num_devices: int, name: str) -> dict[str, int]:
    """Axis sizes whose product is the number of devices."""
    if axes is None:
        return {"model": num_devices}
    check_axes(axes)
    sizes = dict(axes)
    wrong = {axis: size for axis, size in sizes.items() if type(size) is not int or (size < 1 and size != -1)}
    if wrong or not sizes or list(sizes.values()).count(-1) > 1:
        raise LazyModelError(f"expected axes with positive sizes, one of which may be -1, got {sizes}")
    # The last axis, or the axis of size -1, takes the devices that remain after divisors of the requested sizes.
    taker = next((axis for axis, size in sizes.items() if size == -1), list(sizes)[-1])
    nearest, left = dict(sizes), num_devices
    for axis in [axis for axis in sizes if axis != taker]:
        nearest[axis] = math.gcd(left, sizes[axis])
        left //= nearest[axis]
    nearest[taker] = left
    if any(size not in (-1, nearest[axis]) for axis, size in sizes.items()):
        raise LazyModelError(f"axes {sizes} do not make the {num_devices} devices of {name}; {nearest} would")
    return nearest


# --- libtpu ----------------------------------------------------------------------------------------------------------

# Read by libtpu when it is loaded. Without a TPU and these variables it would query the cloud's metadata server, take a
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
    """Sets these variables if they are not set: JAX loads libtpu too, and there is no TPU here that it could use."""
    here = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    added = {} if here else {name: value for name, value in _LIBTPU_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def has_libtpu() -> bool:
    """Returns True if TPU programs can be compiled here."""
    return bool(os.environ.get("TPU_LIBRARY_PATH")) or importlib.util.find_spec("libtpu") is not None


@functools.cache
def _devices(generation: Generation, shape: Shape) -> tuple[Any, ...]:
    """The devices of a slice. Each call of libtpu makes new ones, unequal to the last, so they are cached."""
    name = generation.slice_name(shape)
    if not has_libtpu():
        raise LazyModelError(f'devices of {name} need libtpu, which is not installed: pip install "lazymodel[tpu]"')
    try:
        with libtpu_environment():
            description = topologies.get_topology_desc(
                f"{generation.libtpu or generation.name}:{'x'.join(map(str, shape))}",
                "tpu",
                chips_per_host_bounds=list(generation.host_bounds(shape)),
                chip_config_name=generation.chip_config,
            )
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if "lockfile" in message:
            message = (
                "another process holds libtpu, such as one that uses this machine's TPU; wait for it, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1 to compile at the same time"
            )
        raise LazyModelError(f"libtpu provides no devices for {name}: {message}") from error
    return tuple(description.devices)


_LISTED = 5  # allocations that an error names


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of one compiled program, in bytes on each device; for devices without own memory, on their hosts too.

    Attributes:
        argument_nbytes: Shards of its arguments.
        output_nbytes: Shards of its results, including those that reuse a donated argument's memory.
        temporary_nbytes: Additional memory while it runs.
        alias_nbytes: Results that reuse a donated argument's memory.
        code_nbytes: The program itself.
        seconds: Time for tracing, lowering and compiling.
        host_nbytes: Arguments, results and temporaries in the host's memory per device, if counted separately.
    """

    argument_nbytes: int
    output_nbytes: int
    temporary_nbytes: int
    alias_nbytes: int
    code_nbytes: int
    seconds: float
    host_nbytes: int = 0

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that a device holds: XLA reserves arguments, results and temporaries for the whole run."""
        held = self.argument_nbytes + self.output_nbytes - self.alias_nbytes
        return held + self.temporary_nbytes + self.code_nbytes


def compile_memory(function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> CompiledMemory:
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


def compile_lowered(lowered: jax.stages.Lowered | jax.stages.Compiled, name: str) -> jax.stages.Compiled:
    """The compiled program. Raises the errors of `compile_memory` if the compiler rejects it."""
    if isinstance(lowered, jax.stages.Compiled):  # loaded
        return lowered
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise out_of_memory(str(error), name) from error
        raise LazyModelError(f"the compiler rejects {name}: {str(error).splitlines()[0]}") from error


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


# --- errors ----------------------------------------------------------------------------------------------------------

_AMOUNT = r"(\d+(?:\.\d+)?)([KMGT]?)i?B?\b"
# libtpu 0.0.52 writes the first if sizes alone do not fit; the other comes from its allocator.
_OUT_OF_MEMORY = (
    re.compile(rf"total memory required for [\w ]+ \({_AMOUNT}\) exceeds available \w+ \({_AMOUNT}\)"),
    re.compile(rf"Used {_AMOUNT} of {_AMOUNT}"),
)
_ALLOCATION = re.compile(rf"Size: {_AMOUNT}\s*\n((?:[ \t]+[^\n]+\n?)*)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(message: str, name: str) -> DoesNotFitError:
    """The error for a compiler's message about memory of the program `name`, with the numbers parsed from it."""
    found = next((match for pattern in _OUT_OF_MEMORY if (match := pattern.search(message))), None)
    if found is None:
        return DoesNotFitError(f"{name} does not fit, according to the compiler: {message.splitlines()[0]}")
    needed, limit = _amount(found[1], found[2]), _amount(found[3], found[4])
    text = f"{name} needs {format_bytes(needed)} on a device, according to the compiler, and programs can use "
    text += format_bytes(limit) + (f", {format_bytes(needed - limit)} less." if needed > limit else ".")
    largest: list[str] = []
    for match in list(_ALLOCATION.finditer(message))[:_LISTED]:
        shape = re.search(r"Shape: (\S+?)(?:\{|\s|$)", match[3])
        operator = re.search(r'op_name="([^"]{1,200})"', match[3])
        parts = [format_bytes(_amount(match[1], match[2])), shape and shape[1], operator and operator[1]]
        largest.append(" ".join(part for part in parts if part))
    if largest:
        text += f" Largest allocations: {'; '.join(largest)}."
    text += " Use more devices, shard more, or a smaller batch, sequence or dtype."
    return DoesNotFitError(text, needed_nbytes=needed, limit_nbytes=limit)


def _amount(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
