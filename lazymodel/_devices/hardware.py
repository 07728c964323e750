"""Devices, here or not: their memory, the slices of TPU generations, and how much memory programs need on them.

Contains the only table of TPU generations and GPUs, and compiles functions of shapes. Nothing is run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._show.text import format_bytes, grouped_by

Shape = tuple[int, ...]

_MIB = 2**20
_SQUARES = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_SMALL_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Smaller than a cube of 4×4×4 chips, the unit of which the optical switches compose all larger slices.
_PART_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


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


def compile_lowered(lowered: jax.stages.Lowered | jax.stages.Compiled, name: str) -> jax.stages.Compiled:
    """The compiled program.

    Raises:
        DoesNotFitError: The compiler finds that the program cannot fit a device. Its `needed_nbytes` and
            `limit_nbytes` are the compiler's numbers, which it rounds to hundredths of a unit.
        LazyModelError: The compiler rejects the program for another reason.
    """
    if isinstance(lowered, jax.stages.Compiled):  # loaded
        return lowered
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise out_of_memory(str(error), name) from error
        raise LazyModelError(f"the compiler rejects {name}: {str(error).splitlines()[0]}") from error


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
