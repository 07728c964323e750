"""Meshes of devices that are not here: slices of TPU generations, and GPUs, for plans and for the TPU compiler.

Parses the names of slices, and gets compile-only devices from libtpu on a machine without a TPU. Nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import math
import os
import re
from collections.abc import Generator, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from lazymodel._devices.hardware import GENERATIONS, GPUS, Generation, Shape, device_memory, tpu_generation
from lazymodel._errors import LazyModelError
from lazymodel._show.text import closest

_CUBE = 4


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
    sizes = _axis_sizes(axes, _num_devices(generation, shape), _slice_name(generation, shape))
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
        sizes = _axis_sizes(axes, _num_devices(generation, shape), _slice_name(generation, shape))
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


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
            f"{_slice_name(examples, shape)!r} or {_rented_name(examples, shape)!r}"
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
        chips, rest = divmod(number, _cores_per_chip(generation))
        found = [] if rest else [s for s in _candidates(generation) if math.prod(s) == chips]
        shape = found[0] if found else ()
    if not shape or not _exists(generation, shape):
        sizes = _candidates(generation)
        nearest = (*[s for s in sizes if math.prod(s) <= chips][-1:], *[s for s in sizes if math.prod(s) > chips][:1])
        names = " and ".join(f"{_slice_name(generation, s)} ({_rented_name(generation, s)})" for s in nearest)
        counted = "cores, two per chip" if _cores_per_chip(generation) == 2 else "chips"
        raise LazyModelError(
            f"there is no TPU slice {name.strip()[:40]!r}; nearest: {names}. {generation.name}-N counts {counted}."
        )
    return generation, shape


def _check_axes(axes: Any) -> None:
    named = isinstance(axes, Mapping) and all(isinstance(axis, str) for axis in cast("Mapping[Any, Any]", axes))
    if axes is not None and not named:
        raise LazyModelError(f"expected axes as a mapping of axis name to size, such as {{'model': 8}}, got {axes!r}")


def _axis_sizes(axes: Mapping[str, int] | None, num_devices: int, name: str) -> dict[str, int]:
    """Axis sizes whose product is the number of devices."""
    if axes is None:
        return {"model": num_devices}
    _check_axes(axes)
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


def _cores_per_chip(generation: Generation) -> int:
    """Cores per chip as counted by the number in a name such as `v4-8`."""
    return generation.devices_per_chip * generation.num_cores


def _exists(generation: Generation, shape: Shape) -> bool:
    if shape in generation.shapes:
        return True
    return math.prod(shape) <= generation.max_chips and all(size and size % _CUBE == 0 for size in shape)


@functools.cache
def _candidates(generation: Generation) -> tuple[Shape, ...]:
    """One shape for each number of chips, the most cubic one, smallest first."""
    best = {math.prod(shape): shape for shape in generation.shapes}
    units = generation.max_chips // _CUBE**3
    for a in range(1, math.isqrt(units) + 1):
        for b in range(a, units // a + 1):
            for c in range(b, units // (a * b) + 1):
                shape = (_CUBE * a, _CUBE * b, _CUBE * c)
                chips = math.prod(shape)
                # No generation offers rings longer than 24 hops.
                if shape[-1] <= 24 and sum(shape) < sum(best.get(chips, (chips,) * 3)):
                    best[chips] = shape
    return tuple(best[chips] for chips in sorted(best))


def _slice_name(generation: Generation, shape: Shape) -> str:
    return f"{generation.name}:{'x'.join(map(str, shape))}"


def _rented_name(generation: Generation, shape: Shape) -> str:
    return f"{generation.name}-{math.prod(shape) * _cores_per_chip(generation)}"


def _num_devices(generation: Generation, shape: Shape) -> int:
    return math.prod(shape) * generation.devices_per_chip


def _host_bounds(generation: Generation, shape: Shape) -> Shape:
    """Chips of one host. Hosts have four; v5e and v6e also exist with one chip, and with eight in one host."""
    if len(shape) == 2 and math.prod(shape) <= 8:
        return (*shape, 1)
    return (1, 1, 1) if math.prod(shape) == 1 else (2, 2, 1)


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
    name = _slice_name(generation, shape)
    if not has_libtpu():
        raise LazyModelError(f'devices of {name} need libtpu, which is not installed: pip install "lazymodel[tpu]"')
    try:
        with libtpu_environment():
            description = topologies.get_topology_desc(
                f"{generation.libtpu or generation.name}:{'x'.join(map(str, shape))}",
                "tpu",
                chips_per_host_bounds=list(_host_bounds(generation, shape)),
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
