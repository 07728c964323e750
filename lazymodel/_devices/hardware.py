"""Devices, here or not: how much memory each has, the slices of every TPU generation, and whether a device can run.

Contains the only table of TPU generations and GPUs, parses the names of devices, and distinguishes devices that run
from those of planning meshes. `_devices/topology` defines how slices are named and meshed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding, Sharding

from lazymodel._errors import LazyModelError

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

    def chips_per_host(self, chips: int) -> int:
        """Number of chips of one host, for a slice of so many chips."""
        return chips if len(self.shapes[0]) == 2 and chips <= 8 else min(chips, 4)


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
    return min(generation.chips_per_host(chips) * generation.devices_per_chip, num_devices)


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
