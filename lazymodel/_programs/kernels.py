"""Recipes that run one kernel at a time, as eager execution does: the programs of what adds up or factorizes floats.

A sum, a matrix product or a factorization gives other bits once the compiler fuses into it what computes its operands,
lays them out in another way, or splits it over devices; no barrier inside a program keeps XLA:CPU from all of these.
So such a recipe is cut where eager execution ends one compiled kernel and begins the next. Each kernel is a program of
its own, compiled once for the process, on one device of it, from operands that lie in memory as they would there; the
results are then cut into shards. That device holds such a variable whole while it is computed, with its operands, which
`KernelProgram.temp_nbytes` counts. Which recipes run this way is decided in `_trace/graph`.

What names devices itself (`shard_map`) runs on these, and what follows from it where eager execution would run it: such
a recipe is executed eagerly.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, ClassVar, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._programs.jaxprs import Interned
from lazymodel._programs.keys import as_keys, is_key, stored_as

# Where a value comes from: ("input", number) or ("kernel", number, which of its results).
Reference = tuple[Any, ...]
# Kernels kept for the process, each some 50 KiB of machine code.
_SHARED_KERNELS = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """What eager execution compiles as one program."""

    form: Hashable  # equal for kernels that compute the same function of operands of the same types
    function: Callable[..., list[Any]]  # traceable; of its operands, to a list of results
    operands: tuple[Reference, ...]  # the raw data for keys that are inputs of the recipe
    alone: bool = False  # whether it is one equation, which eager execution runs by itself


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """A recipe as kernels, in the order in which they run; each uses inputs of the recipe and earlier results."""

    kernels: tuple[Kernel, ...]
    outputs: tuple[Reference, ...]
    devices: frozenset[tuple[Any, ...]] = frozenset()  # those that the recipe names, in order
    partitionable: bool = False  # whether one program of it all gives the same values, over these devices

    def restricted_to(self, keep: Sequence[int]) -> Kernels:
        """Those of some outputs; kernels that are not needed are not run."""
        return dataclasses.replace(self, outputs=tuple(self.outputs[index] for index in keep))

    def followed_by(self, function: Callable[..., list[Any]], form: Hashable, *inputs: int) -> Kernels:
        """These, and a last one that takes their outputs and some of the recipe's inputs, and gives as many outputs."""
        kernel = Kernel(form, function, (*self.outputs, *(("input", number) for number in inputs)))
        outputs = tuple(("kernel", len(self.kernels), index) for index in range(len(self.outputs)))
        return dataclasses.replace(self, kernels=(*self.kernels, kernel), outputs=outputs)

    def needed(self) -> list[int]:
        """The numbers of the kernels that the outputs depend on."""
        needed = {reference[1] for reference in self.outputs if reference[0] == "kernel"}
        for number in reversed(range(len(self.kernels))):
            if number in needed:
                needed.update(place[1] for place in self.kernels[number].operands if place[0] == "kernel")
        return sorted(needed)


@dataclasses.dataclass(frozen=True)
class Line:
    """One equation of a recipe, for `kernels_of`."""

    unit: int | None  # the compiled function that it belongs to; None if eager execution runs it by itself
    form: Hashable  # what it computes, without its operands
    function: Callable[..., list[Any]] | None  # of operands that are no constants; None if it only hands them on
    operands: tuple[tuple[Any, ...], ...]  # ("input", number), ("step", number of the line, which result), ("fixed", …)
    results: int  # how many it has


def kernels_of(
    lines: Sequence[Line],
    outputs: Sequence[tuple[Any, ...]],
    kept: Set[tuple[Any, ...]],
    kinds: Sequence[Any],
    devices: frozenset[tuple[Any, ...]],
    *,
    partitionable: bool,
) -> Kernels:
    """Cuts a recipe into kernels.

    Args:
        lines: Its equations in order; those of one unit follow one another.
        outputs: Where each of its outputs comes from.
        kept: Results that eager execution keeps, and so do the kernels that compute them, even if nothing uses them.
        kinds: For each of its inputs, the dtype of the keys that it is the data of, or None.
        devices: As `Kernels` has them.
        partitionable: As `Kernels` has it.
    """
    used = set(outputs) | kept
    for line in lines:  # what only its own function uses is no result of a kernel
        steps = (place for place in line.operands if place[0] == "step")
        used.update(place for place in steps if line.unit is None or lines[place[1]].unit != line.unit)
    where: dict[tuple[Any, ...], Reference] = {}  # of lines' results outside their kernel

    def outside(place: tuple[Any, ...]) -> Reference:
        return where.get(place, place)

    kernels: list[Kernel] = []
    for _, group in itertools.groupby(enumerate(lines), lambda pair: (pair[1].unit, pair[1].unit is None and pair[0])):
        part = list(group)
        first = part[0][1]
        if len(part) == 1 and first.function is None:
            where.update((("step", part[0][0], i), outside(place)) for i, place in enumerate(first.operands))
            continue
        within = {("step", number, i) for number, line in part for i in range(line.results)}
        # All that an equation computes, as eager execution does; of a compiled function what is used.
        results = [place for place in sorted(within) if first.unit is None or place in used]
        kernels.append(_kernel(part, within, results, outside, kinds))
        where.update((place, ("kernel", len(kernels) - 1, index)) for index, place in enumerate(results))
    return Kernels(tuple(kernels), tuple(outside(place) for place in outputs), devices, partitionable)


def _kernel(
    part: Sequence[tuple[int, Line]],
    within: set[tuple[Any, ...]],
    results: Sequence[tuple[Any, ...]],
    outside: Callable[[tuple[Any, ...]], Reference],
    kinds: Sequence[Any],
) -> Kernel:
    operands: dict[tuple[Any, ...], int] = {}  # two that hand on one value are two, as they are eagerly
    first = part[0][0]

    def local(place: tuple[Any, ...]) -> tuple[Any, ...]:
        if place[0] == "fixed":
            return place
        if place in within:
            return ("own", place[1] - first, place[2])
        return ("operand", operands.setdefault(place, len(operands)))

    body = [(line, tuple(local(place) for place in line.operands)) for _, line in part]
    outputs = tuple(local(place) for place in results)
    references = tuple(map(outside, operands))
    wrapped = tuple(kinds[place[1]] if place[0] == "input" else None for place in references)
    form = Interned((tuple((line.form, places) for line, places in body), outputs, wrapped))

    def function(*values: Any) -> list[Any]:
        given = [as_keys(value, kind) for value, kind in zip(values, wrapped, strict=True)]
        own: list[list[Any]] = []

        def read(place: tuple[Any, ...]) -> Any:
            return given[place[1]] if place[0] == "operand" else own[place[1]][place[2]]

        for line, places in body:
            values_read = [read(place) for place in places if place[0] != "fixed"]
            own.append(values_read if line.function is None else line.function(*values_read))
        return [read(place) for place in outputs]

    return Kernel(form, function, references, alone=part[0][1].unit is None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Compiled:
    """A kernel to run, the types of its results, and its temporaries in bytes."""

    run: Callable[..., Sequence[jax.Array]]
    results: tuple[jax.ShapeDtypeStruct, ...]
    temp_nbytes: int


# A kernel, where its operands come from, its number, and the kernels whose results nothing needs after it.
_RunStep = tuple[_Compiled, tuple[Reference, ...], int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class KernelProgram:
    """Compiled kernels that together compute a recipe; called as an `InitProgram` is."""

    sharding_dependent: ClassVar[bool] = False  # values are made whole and then cut

    steps: tuple[_RunStep, ...]
    outputs: tuple[Reference, ...]
    shardings: tuple[Sharding, ...]
    output_nbytes: int  # left on each device
    temp_nbytes: int  # beyond these held by its first device at most; others hold none
    x64: bool  # whether it was compiled with 64-bit types, and so must be called with them

    def __call__(self, inputs: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Runs it; returns when what it computes has been cut into shards."""
        with jax.enable_x64(self.x64):
            values: dict[int, Sequence[jax.Array]] = {}
            for compiled, operands, number, last_used in self.steps:
                values[number] = compiled.run(*(_operand(_read(place, inputs, values)) for place in operands))
                for gone in last_used:
                    del values[gone]
            pairs = zip(self.outputs, self.shardings, strict=True)
            return tuple(placed(_read(place, inputs, values), sharding) for place, sharding in pairs)


def compile_kernels(
    kernels: Kernels,
    inputs: Sequence[jax.ShapeDtypeStruct],
    shardings: Sequence[Sharding],
    settings: Hashable,
    *,
    x64: bool,
) -> KernelProgram:
    """Compiles the kernels of a recipe that are not compiled yet, under the current settings.

    `settings` is what else changes the meaning of a trace; `x64` whether 64-bit types are on, as they are now.
    """
    # Where to compute: a device of this process, if the sharding has one.
    mine: dict[int, Any] = {device.id: device for device in shardings[0].addressable_devices or shardings[0].device_set}
    device = mine[min(mine)]
    types: dict[int, tuple[jax.ShapeDtypeStruct, ...]] = {}
    needed = kernels.needed()
    last = _last_used(kernels, needed)
    steps: list[_RunStep] = []
    for number in needed:
        kernel = kernels.kernels[number]
        operands = [_read(place, inputs, types) for place in kernel.operands]
        compiled = _eager(kernel, operands) if kernels.devices else _shared(kernel, operands, device, settings)
        types[number] = compiled.results
        steps.append((compiled, kernel.operands, number, last[number]))
    whole = [_read(place, inputs, types) for place in kernels.outputs]
    pairs = list(zip(whole, shardings, strict=True))
    left = sum(math.prod(sharding.shard_shape(struct.shape)) * struct.dtype.itemsize for struct, sharding in pairs)
    here = SingleDeviceSharding(device)
    copied = any(not sharding.is_equivalent_to(here, len(struct.shape)) for struct, sharding in pairs)
    peak = max(_peak(steps, types), sum(map(_nbytes, whole)) + (left if copied else 0))
    return KernelProgram(tuple(steps), kernels.outputs, tuple(shardings), left, peak - left, x64)


def clear_kernels() -> None:
    """Forgets the compiled kernels; programs keep theirs."""
    with _lock:
        _compiled_kernels.clear()


# The compiled kernels of the process, the last used last.
_compiled_kernels: collections.OrderedDict[Hashable, _Compiled] = collections.OrderedDict()
_lock = threading.Lock()


def _eager(kernel: Kernel, operands: Sequence[jax.ShapeDtypeStruct]) -> _Compiled:
    function = kernel.function if kernel.alone else jax.jit(kernel.function)
    return _Compiled(function, tuple(jax.eval_shape(kernel.function, *operands)), 0)


def _shared(kernel: Kernel, operands: Sequence[jax.ShapeDtypeStruct], device: Any, settings: Hashable) -> _Compiled:
    key = (kernel.form, tuple((struct.shape, struct.dtype) for struct in operands), device, settings)
    with _lock:
        if (known := _compiled_kernels.get(key)) is not None:
            _compiled_kernels.move_to_end(key)
            return known
    # Two threads may compile the same one, which is rare and costs milliseconds.
    lowered = jax.jit(kernel.function, out_shardings=SingleDeviceSharding(device)).lower(*operands)
    results = tuple(jax.ShapeDtypeStruct(info.shape, info.dtype) for info in cast(Any, lowered.out_info))
    run = lowered.compile()
    memory = run.memory_analysis()
    compiled = _Compiled(run, results, 0 if memory is None else int(memory.temp_size_in_bytes))
    with _lock:
        _compiled_kernels[key] = compiled
        while len(_compiled_kernels) > _SHARED_KERNELS:
            _compiled_kernels.popitem(last=False)
    return compiled


def _last_used(kernels: Kernels, needed: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each kernel, those whose results nothing needs once it has run."""
    kept = {place[1] for place in kernels.outputs if place[0] == "kernel"}
    last: dict[int, int] = {}
    for number in needed:
        last[number] = number
        last.update((place[1], number) for place in kernels.kernels[number].operands if place[0] == "kernel")
    gone: dict[int, list[int]] = {number: [] for number in needed}
    for number, after in last.items():
        if number not in kept:
            gone[after].append(number)
    return {number: tuple(numbers) for number, numbers in gone.items()}


def _peak(steps: Sequence[_RunStep], types: Mapping[int, Sequence[jax.ShapeDtypeStruct]]) -> int:
    held = peak = 0
    for compiled, _, number, last_used in steps:
        held += sum(map(_nbytes, types[number]))
        peak = max(peak, held + compiled.temp_nbytes)
        held -= sum(_nbytes(struct) for gone in last_used for struct in types[gone])
    return peak


def _nbytes(struct: Any) -> int:
    return math.prod(struct.shape) * struct.dtype.itemsize


def _read(place: Reference, inputs: Sequence[Any], values: Mapping[int, Sequence[Any]]) -> Any:
    return inputs[place[1]] if place[0] == "input" else values[place[1]][place[2]]


def _operand(value: Any) -> Any:
    """A value as a compiled kernel takes it: JAX refuses arrays of less than a byte an element from another one."""
    narrow = not is_key(value.dtype) and jax.dtypes.itemsize_bits(value.dtype) < 8
    return np.asarray(value) if narrow else value


def with_shards(array: jax.Array) -> jax.Array:
    """The array as its sharding says: compiled programs return shards of other shapes if it has no elements."""
    if array.size:
        return array
    shape, dtype = stored_as(array.shape, array.dtype)
    return placed(as_keys(jax.numpy.empty(shape, dtype), array.dtype), array.sharding)


def placed(value: Any, sharding: Sharding) -> jax.Array:
    """A whole array of this process, cut into the shards of its devices."""
    if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    if sharding.is_fully_addressable:
        # Not aliased: a shard must not keep the whole array.
        return jax.device_put(value, sharding, may_alias=False)
    if is_key(value.dtype):
        data = placed(jax.random.key_data(value), sharding)  # of one more dimension, which no sharding names
        return as_keys(data, value.dtype)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))
