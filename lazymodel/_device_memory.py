"""How much memory a device has: asked of live devices, looked up for those that are not here.

Responsible for the table and for reading the names under which devices go. TPU figures are what programs can use as
the TPU compiler says, less than the data sheet because the runtime reserves some.
"""

from __future__ import annotations

import re
from typing import Any

from lazymodel._errors import LazyModelError

_MIB = 2**20

# The largest array, in MiB, for which libtpu 0.0.52 compiles an update in place on one device of each generation, found
# by bisection. What the compiler prints as available is about 3 MiB more, which the program itself takes.
# A device of v2, v3 or v7x is one of the chip's two cores and has half of the chip's memory; one of v4 or v5p is the
# chip, its two cores acting as one ("megacore"). Data sheets: https://cloud.google.com/tpu/docs/system-architecture
_TPU = {
    "v2": 7660,  # of 8 GiB
    "v3": 15852,  # of 16 GiB
    "v4": 31482,  # of 32 GiB
    "v5e": 16124,  # of 16 GiB
    "v5p": 98022,  # of 96 GiB, sold as 95
    "v6e": 31990,  # of 32 GiB
    "v7x": 97010,  # of 96 GiB: half of a chip's 192
}
# TPU v4 without megacore, as `get_topology_desc` makes it unless told otherwise.
_TPU_V4_CORE = 15613

# How JAX's device_kind and clouds call the generations, once lower-cased and without "tpu" in front.
_TPU_ALIASES = {
    "v5 lite": "v5e",
    "v5lite": "v5e",
    "v5litepod": "v5e",
    "v5": "v5p",
    "v6 lite": "v6e",
    "v6lite": "v6e",
    "trillium": "v6e",
    "7x": "v7x",
    "v7": "v7x",
    "ironwood": "v7x",
}

# A card as people write it, a pattern of its names, and its whole memory in MiB as `nvidia-smi` and `rocm-smi` total
# it, with error correction on where it can be. The first pattern found in the lower-cased name counts. Where a card is
# sold in two sizes and the name does not say which, it is the smaller. A device of MI250 is one of the card's two dies.
# AMD's totals are 16 MiB less than the card has: so MI300X shows it, and so it is taken to be for the others.
_CARDS = (
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

CARDS = tuple(name for name, _, _ in _CARDS)


def device_memory(device: Any) -> int | None:
    """Bytes of memory that programs can use on one device, or None where nothing is known (CPUs, unknown names).

    Args:
        device: A `jax.Device`, or a name: a device kind as JAX has it (`"TPU v5 lite"`, `"NVIDIA H100 80GB HBM3"`), a
            TPU generation (`"v5e"`), a slice of one (`"v5e:2x4"`, `"v5e-8"`), or a card (`"A100-80GB"`).

    A live device says itself what its allocator may take, which on GPUs is a fraction of the card
    (`XLA_PYTHON_CLIENT_MEM_FRACTION`, three quarters unless set); names give the whole card.

    Raises:
        LazyModelError: It is neither.
    """
    if isinstance(device, str):
        return _known(device)
    if not hasattr(device, "memory_stats"):
        raise LazyModelError(f"a device is a jax.Device or a name such as 'v5e' or 'H100'; got {device!r}")
    try:
        stats = device.memory_stats()
    except RuntimeError:  # JAX's, for a device of another process or one that is only compiled for
        stats = None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if tpu_generation(device.device_kind) == "v4" and getattr(device, "num_cores", 2) == 1:
        return _TPU_V4_CORE * _MIB
    return _known(device.device_kind)


def tpu_generation(name: str) -> str | None:
    """`v2`, …, `v7x` for a device kind, generation or slice of a TPU; None for any other name."""
    name = re.sub(r"^tpu[ -]?", "", name.strip().lower())
    name = re.sub(r"(?::[\dx]+|-\d+)$", "", name)
    name = _TPU_ALIASES.get(name, name)
    return name if name in _TPU else None


def _known(name: str) -> int | None:
    if (generation := tpu_generation(name)) is not None:
        return _TPU[generation] * _MIB
    # `A100-80GB`, `NVIDIA_H100` and `rtx4090` are ways to write the same as `A100 80GB` …
    text = re.sub(r"\brtx(?=\d)", "rtx ", re.sub(r"[_\-]+", " ", name[:200].lower()))
    return next((size * _MIB for _, pattern, size in _CARDS if re.search(pattern, text)), None)
