"""Recipes that run one kernel at a time, like eager execution: for programs that add up or factorize floats.

A sum, a matrix product or a factorization gives other bits if the compiler fuses the computation of its operands into
it, changes their layout, or splits it over devices; no barrier inside a program prevents XLA:CPU from all of these. So
such a recipe is divided where eager execution ends one compiled kernel and begins the next. Each kernel is a separate
program, compiled once for the process, which runs on one of its devices, with operands in memory as in eager execution;
the results are then divided into shards. While such a variable is computed, that device holds all of it and its
operands, which `InitProgram.temp_nbytes` counts. `_trace/graph` decides which recipes run this way.

A recipe that names devices itself (`shard_map`) runs eagerly: on these devices, and what depends on it where eager
execution would run it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._programs.keys import as_keys, is_key, stored_as

# The source of a value: ("input", number) or ("kernel", number, number of the result).
Reference = tuple[Any, ...]
Compiled = TypeVar("Compiled")


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that eager execution compiles as one program."""

    form: Hashable  # equal for kernels that compute the same function of operands of the same types
    function: Callable[..., Sequence[Any]]  # traceable; takes its operands, returns its results
    operands: tuple[Reference, ...]  # raw data for keys that are inputs of the recipe
    alone: bool = False  # True if it is one equation, which eager execution runs by itself


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """A recipe as kernels, in the order in which they run; each uses inputs of the recipe and earlier results."""

    kernels: tuple[Kernel, ...]
    outputs: tuple[Reference, ...]
    devices: frozenset[tuple[Any, ...]] = frozenset()  # the devices that the recipe names, in order
    partitionable: bool = False  # True if one program of everything gives the same values, over these devices

    def restricted_to(self, keep: Sequence[int]) -> Kernels:
        """The kernels of some outputs; others do not run."""
        return dataclasses.replace(self, outputs=tuple(self.outputs[index] for index in keep))

    def followed_by(self, function: Callable[..., list[Any]], form: Hashable, *inputs: int) -> Kernels:
        """Adds a last kernel, which takes the outputs and some of the recipe's inputs, and has as many outputs."""
        kernel = Kernel(form, function, (*self.outputs, *(("input", number) for number in inputs)))
        outputs = tuple(("kernel", len(self.kernels), index) for index in range(len(self.outputs)))
        return dataclasses.replace(self, kernels=(*self.kernels, kernel), outputs=outputs)

    def order(self) -> list[tuple[int, tuple[int, ...]]]:
        """Numbers of the kernels that the outputs need; with each, numbers of those whose results are then unused."""
        alive = {place[1] for place in self.outputs if place[0] == "kernel"}
        found: list[tuple[int, tuple[int, ...]]] = []
        for number in reversed(range(len(self.kernels))):
            if number in alive:
                used = {place[1] for place in self.kernels[number].operands if place[0] == "kernel"}
                found.append((number, tuple(used - alive)))
                alive |= used
        return found[::-1]


class Programs(Generic[Compiled]):
    """Compiled programs by what they compute, each compiled once; keeps the most recently used ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: collections.OrderedDict[Hashable, Compiled] = collections.OrderedDict()
        self._pending: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Drops all programs."""
        with self._lock:
            self._known.clear()

    def get(self, key: Hashable, compile_it: Callable[[], Compiled]) -> Compiled:
        """The program for this key, compiled by the first thread that needs it."""
        with self._lock:
            pending = self._pending.setdefault(key, threading.Lock())
        with pending:
            with self._lock:
                if key in self._known:
                    self._known.move_to_end(key)
                    self._pending.pop(key, None)
                    return self._known[key]
            program = compile_it()
            with self._lock:
                self._known[key] = program
                self._pending.pop(key, None)
                while len(self._known) > self.most:
                    self._known.popitem(last=False)
        return program


@dataclasses.dataclass(frozen=True, eq=False)
class InitProgram:
    """A compiled recipe."""

    run: Callable[..., Iterable[jax.Array]]  # takes the recipe's inputs
    output_nbytes: int  # of results on each device
    temp_nbytes: int  # of temporaries on each device while it runs, according to the compiler
    x64: bool = False  # True if it was compiled with 64-bit types, and so must be called with them
    sharding_dependent: bool = False  # True if its values depend on the sharding, since its random bits do
    by_kernel: bool = False  # True if its first device computes whole values; other devices have no temporaries

    def __call__(self, inputs: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Runs it. Arrays of one program may still be computing; those of kernels have been divided into shards."""
        with jax.enable_x64(self.x64):
            return tuple(self.run(*inputs))


# The compiled kernels of the process, with some 50 KiB of machine code each: the function to run, the types of its
# results, and the bytes of its temporaries.
_Kernel: TypeAlias = "tuple[Callable[..., Sequence[jax.Array]], tuple[jax.ShapeDtypeStruct, ...], int]"
COMPILED_KERNELS: Programs[_Kernel] = Programs(1024)


def compile_kernels(
    kernels: Kernels,
    inputs: Sequence[jax.ShapeDtypeStruct],
    shardings: Sequence[Sharding],
    settings: Hashable,
    *,
    x64: bool,
) -> InitProgram:
    """Compiles the kernels of a recipe that are not compiled yet, under the current settings.

    `settings` are other settings that change the meaning of a trace; `x64` is True if 64-bit types are on now.
    """
    # Compute on a device of this process, if the sharding has one.
    mine: dict[int, Any] = {device.id: device for device in shardings[0].addressable_devices or shardings[0].device_set}
    here = SingleDeviceSharding(mine[min(mine)])
    types: dict[int, tuple[jax.ShapeDtypeStruct, ...]] = {}
    steps: list[tuple[Callable[..., Sequence[jax.Array]], tuple[Reference, ...], int, tuple[int, ...]]] = []
    held = peak = 0
    for number, gone in kernels.order():
        kernel = kernels.kernels[number]
        operands = [_read(place, inputs, types) for place in kernel.operands]
        if kernels.devices:  # run on these, like eager execution
            run = kernel.function if kernel.alone else jax.jit(kernel.function)
            types[number], temporaries = tuple(jax.eval_shape(kernel.function, *operands)), 0
        else:
            key = (kernel.form, tuple((struct.shape, struct.dtype) for struct in operands), here, settings)
            compiled = COMPILED_KERNELS.get(key, functools.partial(_compiled, kernel.function, operands, here))
            run, types[number], temporaries = compiled
        steps.append((run, kernel.operands, number, gone))
        held += sum(map(_nbytes, types[number]))
        peak = max(peak, held + temporaries)
        held -= sum(_nbytes(struct) for each in gone for struct in types[each])
    whole = [_read(place, inputs, types) for place in kernels.outputs]
    pairs = list(zip(whole, shardings, strict=True))
    left = sum(math.prod(sharding.shard_shape(struct.shape)) * struct.dtype.itemsize for struct, sharding in pairs)
    copied = any(not sharding.is_equivalent_to(here, len(struct.shape)) for struct, sharding in pairs)
    peak = max(peak, sum(map(_nbytes, whole)) + (left if copied else 0))

    def run_all(*given: np.ndarray) -> Iterator[jax.Array]:
        values: dict[int, Sequence[jax.Array]] = {}
        for run, operands, number, gone in steps:
            values[number] = run(*(_operand(_read(place, given, values)) for place in operands))
            for each in gone:
                del values[each]
        for place, sharding in zip(kernels.outputs, shardings, strict=True):
            yield placed(_read(place, given, values), sharding)

    return InitProgram(run_all, left, peak - left, x64, by_kernel=True)


def _compiled(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct], here: Sharding) -> _Kernel:
    lowered = jax.jit(function, out_shardings=here).lower(*operands)
    results = tuple(jax.ShapeDtypeStruct(info.shape, info.dtype) for info in cast(Any, lowered.out_info))
    run = lowered.compile()
    memory = run.memory_analysis()
    return run, results, 0 if memory is None else int(memory.temp_size_in_bytes)


def _nbytes(struct: Any) -> int:
    return math.prod(struct.shape) * struct.dtype.itemsize


def _read(place: Reference, inputs: Sequence[Any], values: Mapping[int, Sequence[Any]]) -> Any:
    return inputs[place[1]] if place[0] == "input" else values[place[1]][place[2]]


def _operand(value: Any) -> Any:
    """A value as argument of a compiled kernel: JAX does not pass on arrays with elements of less than a byte."""
    narrow = not is_key(value.dtype) and jax.dtypes.itemsize_bits(value.dtype) < 8
    return np.asarray(value) if narrow else value


def with_shards(array: jax.Array) -> jax.Array:
    """The array with the shards of its sharding: compiled programs return other shapes if it has no elements."""
    if array.size:
        return array
    shape, dtype = stored_as(array.shape, array.dtype)
    return placed(as_keys(jax.numpy.empty(shape, dtype), array.dtype), array.sharding)


def placed(value: Any, sharding: Sharding) -> jax.Array:
    """A whole array of this process, divided into the shards of its devices."""
    if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    if sharding.is_fully_addressable:
        # Not aliased: a shard must not keep the whole array.
        return jax.device_put(value, sharding, may_alias=False)
    if is_key(value.dtype):
        data = placed(jax.random.key_data(value), sharding)  # has one more dimension, which shardings do not name
        return as_keys(data, value.dtype)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))
