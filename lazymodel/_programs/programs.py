"""Init programs: one small compiled program per signature, run once per variable.

An `InitRecipe` says how to compute one variable (or a few that share a large intermediate). Recipes whose signatures
and shardings are equal are one program: compiled once, run once each with their own inputs (seeds, keys, scalars),
writing every shard directly on its device. A function's recipes come from `_trace/function`, others from an adapter.

A program's values do not depend on the sharding. Elementwise computations and counter-based random bits are split over
the devices. Floating-point sums (a norm, a matrix product, a factorization) would be added up in another order: if the
recipe says how eager execution cuts them into kernels, one device of each process runs these and the result is cut into
shards (`_programs/kernels`); else all runs whole on every device, which then keeps its own shard. Either takes the
memory of the whole variable, which the program's `temp_nbytes` shows.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lazymodel._errors import warn
from lazymodel._programs.jaxprs import CONFIG, depends_on_sharding, is_approximate, is_partitionable, uses_x64
from lazymodel._programs.kernels import KernelProgram, Kernels, clear_kernels, compile_kernels, with_shards

# Programs kept for other models of the same process. A decoder has about ten; CPU executables are some 100 KiB each.
_SHARED_PROGRAMS = 512
# Temporaries that may be in flight beside the largest program's own: small programs should not wait for each other.
_IN_FLIGHT_NBYTES = 64 * 2**20
# Shards with rows of a multiple of this are computed alike however an array is split: sixteen 32-bit lanes of AVX-512.
VECTOR_LANES = 16
# Variables with other rows run whole on CPUs up to this size, beyond which memory matters more than a last bit.
_WHOLE_NBYTES = 64 * 2**20
# XLA compiles one program mostly on one thread.
_COMPILE_THREADS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class InitRecipe:
    """How to compute one group of variables.

    Attributes:
        paths: The variables it computes, in the order of the function's outputs.
        signature: Two recipes with equal signatures compute the same function of their inputs.
        function: A traceable function, `function(*inputs) -> tuple of arrays`, one for each path.
        inputs: Its run-time inputs: small NumPy arrays, such as a seed or key data.
        origin: What it does, for people, such as `normal` or `GlorotUniform`.
        x64: Whether it computes with 64-bit types; None follows `jax.config.jax_enable_x64` when it is compiled.
        keys: For each input, the dtype of the PRNG keys that it is the data of, or None; empty where that is not known.
        kernels: The same computation cut into the kernels of eager execution, if its values depend on the cuts.
    """

    paths: tuple[str, ...]
    signature: Hashable
    function: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[np.ndarray, ...]
    origin: str = "init"
    x64: bool | None = None
    keys: tuple[Any, ...] = ()
    kernels: Kernels | None = None

    def restricted_to(self, paths: Sequence[str]) -> InitRecipe:
        """The same recipe computing only some of its variables; what is unused is never computed."""
        wanted = set(paths)
        keep = tuple(index for index, path in enumerate(self.paths) if path in wanted)
        if len(keep) == len(self.paths):
            return self

        def function(*inputs: Any) -> tuple[jax.Array, ...]:
            outputs = self.function(*inputs)
            return tuple(outputs[index] for index in keep)

        return dataclasses.replace(
            self,
            paths=tuple(self.paths[index] for index in keep),
            signature=(self.signature, "outputs", keep),
            function=function,
            kernels=None if self.kernels is None else self.kernels.restricted_to(keep),
        )


def given_values(values: jax.Array) -> tuple[jax.Array, ...]:
    """The function of `given_recipe`."""
    return (values,)


def given_recipe(path: str, values: np.ndarray, origin: str) -> InitRecipe:
    """A recipe of values that are known already: a checkpoint that lacks the variable lacks something."""
    uniform = bool(values.size) and bool((values == values.flat[0]).all())
    return InitRecipe((path,), ("given", uniform), given_values, (values,), origin)


def scaled_recipe(recipe: InitRecipe, factors: Mapping[str, float]) -> InitRecipe:
    """The recipe with some of its variables multiplied, as `value * factor` would be eagerly; `factors` is by path.

    The factors are run-time inputs, so that variables which differ in nothing else share a program.
    """
    scaled = tuple(path in factors for path in recipe.paths)
    count = len(recipe.inputs)

    def multiply(*values: Any) -> list[Any]:
        *outputs, by = values
        pairs = zip(outputs, scaled, range(len(outputs)), strict=True)
        return [output * by[index].astype(output.dtype) if wanted else output for output, wanted, index in pairs]

    def function(*inputs: Any) -> tuple[jax.Array, ...]:
        return tuple(multiply(*recipe.function(*inputs[:count]), inputs[count]))

    return dataclasses.replace(
        recipe,
        signature=(recipe.signature, "scaled", scaled),
        function=function,
        inputs=(*recipe.inputs, np.asarray([factors.get(path, 1.0) for path in recipe.paths], np.float32)),
        keys=(*recipe.keys, None) if recipe.keys else (),
        kernels=None if recipe.kernels is None else recipe.kernels.followed_by(multiply, ("scaled", scaled), count),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class InitProgram:
    """A compiled recipe."""

    compiled: jax.stages.Compiled  # called with the recipe's inputs
    output_nbytes: int  # left on each device
    temp_nbytes: int  # of temporaries on each device while it runs, as the compiler says
    x64: bool = False  # whether it was compiled with 64-bit types, and so must be called with them
    sharding_dependent: bool = False  # whether its values depend on the sharding, since its random bits do

    def __call__(self, inputs: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Runs it; returns at once, the arrays being computed in the background."""
        with _x64(self.x64):
            return tuple(map(with_shards, self.compiled(*inputs)))


AnyProgram: TypeAlias = "InitProgram | KernelProgram"


class ProgramCache:
    """Compiled init programs by signature and sharding; one for all models derived from one `build_abstract`.

    Programs are also kept for the whole process (the last few hundred used), so building the same init function
    again, with another seed say, compiles nothing. `len` counts the programs that this cache has handed out,
    `compiled` those of them that it compiled; the others came from another model.
    """

    _shared: ClassVar[collections.OrderedDict[Hashable, AnyProgram]] = collections.OrderedDict()
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._programs: dict[Hashable, AnyProgram] = {}
        self._lock = threading.Lock()
        self._pending: dict[Hashable, threading.Lock] = {}
        self.compiled = 0

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, recipe: InitRecipe, shardings: Sequence[Sharding]) -> AnyProgram:
        """The program for a recipe whose outputs get these shardings, all over the same devices; compiled once."""
        key = _key(recipe, shardings)
        with self._lock:
            if (program := self._programs.get(key)) is not None:
                return program
            pending = self._pending.setdefault(key, threading.Lock())
        with pending:  # another thread may be compiling this one
            if (program := self._programs.get(key)) is None:
                program = self._shared_or_compiled(key, recipe, shardings)
            with self._lock:
                self._programs[key] = program
                self._pending.pop(key, None)
        return program

    def get_all(self, wanted: Sequence[tuple[InitRecipe, Sequence[Sharding]]]) -> list[AnyProgram]:
        """`get` for many, distinct programs compiled in parallel; in the order asked for."""
        distinct = {_key(recipe, shardings): (recipe, shardings) for recipe, shardings in wanted}
        with self._lock:
            missing = [item for key, item in distinct.items() if key not in self._programs]
        if len(missing) > 1:
            with ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="lazymodel-compile") as pool:
                list(pool.map(self.get, *zip(*missing, strict=True)))
        return [self.get(recipe, shardings) for recipe, shardings in wanted]

    @classmethod
    def clear_shared(cls) -> None:
        """Forgets the programs kept for the process; caches keep what they have handed out."""
        with cls._shared_lock:
            cls._shared.clear()
        clear_kernels()

    def _shared_or_compiled(self, key: Hashable, recipe: InitRecipe, shardings: Sequence[Sharding]) -> AnyProgram:
        with self._shared_lock:
            if (program := self._shared.get(key)) is not None:
                self._shared.move_to_end(key)
                return program
        program = _compile(recipe, tuple(shardings))
        with self._lock:
            self.compiled += 1
        with self._shared_lock:
            self._shared[key] = program
            while len(self._shared) > _SHARED_PROGRAMS:
                self._shared.popitem(last=False)
        return program


def run_recipes(
    recipes: Sequence[InitRecipe], shardings: Mapping[str, Sharding], cache: ProgramCache
) -> Iterator[tuple[str, jax.Array]]:
    """Computes every variable of some recipes, each shard directly on its device; yields path and array as computed.

    Programs are compiled before this returns. They run as arrays are asked for, in order of descending temporaries,
    while the devices are emptiest, and the next one is dispatched only when the temporaries in flight allow it, so the
    peak is that of one large variable. The arrays may still be computing; `jax.block_until_ready` waits.

    Warns:
        LazyModelWarning: Once: values depend on the sharding, for keys of a generator other than threefry, or because
            `jax_threefry_partitionable` is off.
    """
    split = [part for recipe in recipes for part in by_devices(recipe, shardings)]
    wanted = [(recipe, [shardings[path] for path in recipe.paths]) for recipe in split]
    programs = cache.get_all(wanted)
    _warn_of_dependence(split, programs)
    return _running(split, programs)


def _running(recipes: Sequence[InitRecipe], programs: Sequence[AnyProgram]) -> Iterator[tuple[str, jax.Array]]:
    order = sorted(range(len(recipes)), key=lambda index: -programs[index].temp_nbytes)
    in_flight: collections.deque[tuple[int, tuple[jax.Array, ...]]] = collections.deque()
    held, allowed = 0, max([_IN_FLIGHT_NBYTES, *(program.temp_nbytes for program in programs)])
    for index in order:
        recipe, program = recipes[index], programs[index]
        while in_flight and held + program.temp_nbytes > allowed:
            nbytes, earlier = in_flight.popleft()
            jax.block_until_ready(earlier)
            held -= nbytes
        arrays = program(recipe.inputs)
        held += program.temp_nbytes
        in_flight.append((program.temp_nbytes, arrays))
        yield from zip(recipe.paths, arrays, strict=True)


def _warn_of_dependence(recipes: Sequence[InitRecipe], programs: Sequence[AnyProgram]) -> None:
    pairs = zip(recipes, programs, strict=True)
    if paths := [path for recipe, program in pairs if program.sharding_dependent for path in recipe.paths]:
        others = f" and {len(paths) - 1} more variables are" if len(paths) > 1 else " is"
        warn(
            f"{paths[0]!r}{others} initialized sharded from random bits whose values depend on the sharding. Use "
            "threefry keys, jax.random.key(seed, impl='threefry2x32'), with jax_threefry_partitionable on (both are "
            "JAX's defaults) for values that do not."
        )


def by_devices(recipe: InitRecipe, shardings: Mapping[str, Sharding]) -> Iterator[InitRecipe]:
    """One recipe for each set of devices: a program runs on one set only."""
    groups: dict[Hashable, list[str]] = {}
    for path in recipe.paths:
        sharding = shardings[path]
        devices: Hashable = frozenset(sharding.device_set)
        if isinstance(sharding, NamedSharding):
            devices = tuple(cast(Any, sharding.mesh.devices).flat)
        groups.setdefault(devices, []).append(path)
    for paths in groups.values():
        yield recipe.restricted_to(paths)


def _key(recipe: InitRecipe, shardings: Sequence[Sharding]) -> Hashable:
    inputs = tuple((value.shape, value.dtype) for value in recipe.inputs)
    return (recipe.signature, inputs, settings(recipe), tuple(shardings))


def settings(recipe: InitRecipe) -> Hashable:
    """What changes the meaning of a trace but is not in it."""
    return (_wants_x64(recipe), CONFIG.jax_threefry_partitionable, CONFIG.jax_default_matmul_precision)


def _wants_x64(recipe: InitRecipe) -> bool:
    return uses_x64() if recipe.x64 is None else recipe.x64


def x64_context(recipe: InitRecipe) -> contextlib.AbstractContextManager[Any]:
    """With 64-bit types as the recipe wants them."""
    return _x64(_wants_x64(recipe))


def _x64(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if enabled == uses_x64() else jax.enable_x64(enabled)


def _compile(recipe: InitRecipe, shardings: tuple[Sharding, ...]) -> AnyProgram:
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in recipe.inputs]
    x64, dependent = _wants_x64(recipe), False
    kernels = recipe.kernels
    with _x64(x64):
        if kernels is not None and not _is_one_program(kernels, shardings):
            return compile_kernels(kernels, structs, shardings, settings(recipe), x64=x64)
        traced = jax.jit(recipe.function, out_shardings=shardings).trace(*structs)
        if any(len(sharding.device_set) > 1 for sharding in shardings):
            partitionable = is_partitionable(traced.jaxpr)
            if partitionable and _has_ragged_rows(traced, shardings):
                partitionable = not is_approximate(traced.jaxpr)
            if not partitionable and kernels is not None:
                return compile_kernels(kernels, structs, shardings, settings(recipe), x64=x64)
            if not partitionable:
                whole = _run_whole(recipe.function, shardings)
                traced = jax.jit(whole, out_shardings=shardings).trace(*structs)
            elif not all(sharding.is_fully_replicated for sharding in shardings):
                dependent = depends_on_sharding(traced.jaxpr)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    left, temporaries = (0, 0) if memory is None else (memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return InitProgram(compiled, int(left), int(temporaries), x64, dependent)


def _is_one_program(kernels: Kernels, shardings: Sequence[Sharding]) -> bool:
    """Whether all of it can be split over the devices that it names."""
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    here = frozenset(tuple(cast(Any, mesh.devices).flat) for mesh in meshes)
    return kernels.partitionable and kernels.devices == here


def _has_ragged_rows(traced: Any, shardings: tuple[Sharding, ...]) -> bool:
    """Whether splitting leaves some CPU device with rows that do not fill its vector registers."""

    def ragged(aval: Any, sharding: Sharding) -> bool:
        local = sharding.shard_shape(aval.shape)
        small = aval.size * aval.dtype.itemsize <= _WHOLE_NBYTES
        on_cpu = next(iter(sharding.device_set)).platform == "cpu"
        return on_cpu and small and local != tuple(aval.shape) and local[-1] % VECTOR_LANES != 0

    return any(map(ragged, traced.jaxpr.out_avals, shardings))


def _run_whole(
    function: Callable[..., tuple[jax.Array, ...]], shardings: tuple[Sharding, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The same function, run whole on every device of the mesh, so that XLA cannot split its sums."""
    first = next((sharding for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    if first is None:
        return function  # a sharding without a mesh, such as GSPMDSharding: nothing to map over

    def whole(*inputs: Any) -> tuple[jax.Array, ...]:
        # Without the barrier XLA may compute no more than the shard that is kept, and so other rows.
        return tuple(jax.lax.optimization_barrier(output) for output in function(*inputs))

    everywhere = PartitionSpec()
    return jax.shard_map(whole, mesh=first.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
