"""Init programs: one small compiled program per signature, run once per variable.

An `InitRecipe` computes one variable (or a few that share a large intermediate). Recipes with equal signatures and
shardings are one program: compiled once, run once each with their own inputs (seeds, keys, scalars), and writing every
shard directly on its device. A function's recipes come from `_trace/function`, others from an adapter.

A program's values do not depend on the sharding. Elementwise computations and counter-based random bits are split over
the devices. Floating-point sums (a norm, a matrix product, a factorization) would be added up in another order. If the
recipe contains the kernels of eager execution, one device of each process runs these, and the result is divided into
shards (`_programs/jaxprs`); otherwise every device computes the whole variable and keeps its own shard. Both need the
memory of the whole variable, which the program's `temp_nbytes` shows.

Where every element depends only on its own counter-based random bits, `chunked_init` computes any range of a variable's
elements with the bits of the whole, in the memory of a chunk: the recipe is interpreted for a range as one small
program, with the first element as a run-time input.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lazymodel._errors import warn
from lazymodel._programs.jaxprs import (
    CALLS,
    CONFIG,
    ELEMENTWISE,
    JIT,
    PROGRAMS,
    InitProgram,
    Kernels,
    compile_kernels,
    depends_on_sharding,
    inner_jaxpr,
    is_approximate,
    is_key,
    is_partitionable,
    uses_x64,
    walk,
    with_shards,
    without_mesh,
)

# Temporaries in flight in addition to those of the largest program: small programs should not wait for each other.
_IN_FLIGHT_NBYTES = 64 * 2**20
# Shards whose rows are a multiple of this are equal however an array is split: sixteen 32-bit lanes of AVX-512.
VECTOR_LANES = 16
# Variables with other rows run whole on CPUs up to this size; for larger ones memory matters more than a last bit.
_WHOLE_NBYTES = 64 * 2**20
_SLOW_QR = 1024  # width of an orthogonal matrix: a TPU compiler takes 2, 8 and 64 s at 256, 512 and 1024
# XLA compiles one program mostly on one thread.
_COMPILE_THREADS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class InitRecipe:
    """The computation of one group of variables.

    Attributes:
        paths: The variables it computes, in the order of the function's outputs.
        signature: Two recipes with equal signatures compute the same function of their inputs.
        function: A traceable function, `function(*inputs) -> tuple of arrays`, one for each path.
        inputs: Its run-time inputs: small NumPy arrays, such as a seed or key data.
        origin: What it does, as text, such as `normal` or `GlorotUniform`.
        x64: True if it computes with 64-bit types; None follows `jax.config.jax_enable_x64` when it is compiled.
        keys: For each input, the dtype of the PRNG keys that it is the data of, or None; empty if unknown.
        kernels: The same computation divided into the kernels of eager execution, if its values depend on the division.
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
        """The same recipe for only some of its variables; unused values are never computed."""
        kept = set(paths)
        keep = tuple(index for index, path in enumerate(self.paths) if path in kept)
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
    """A recipe of known values; unlike a constant, a checkpoint should contain the variable."""
    uniform = bool(values.size) and bool((values == values.flat[0]).all())
    return InitRecipe((path,), ("given", uniform), given_values, (values,), origin)


class ProgramCache:
    """Compiled init programs by signature and sharding; one for all models derived from one `build_abstract`.

    Programs are also kept for the whole process (the last few hundred used), so building the same init function
    again, with another seed for example, compiles nothing. `len` counts the programs that this cache has returned,
    `compiled` those that it compiled; the others came from another model.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, InitProgram] = {}
        self._lock = threading.Lock()
        self.compiled = 0

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, recipe: InitRecipe, shardings: Sequence[Sharding]) -> InitProgram:
        """The program for a recipe whose outputs get these shardings, all over the same devices; compiled once."""
        key = _key(recipe, shardings)
        if (program := self._programs.get(key)) is None:
            program = PROGRAMS.get(key, lambda: self._compile(recipe, tuple(shardings)))
            with self._lock:
                self._programs[key] = program
        return program

    def _compile(self, recipe: InitRecipe, shardings: tuple[Sharding, ...]) -> InitProgram:
        program = _compile(recipe, shardings)
        with self._lock:
            self.compiled += 1
        return program

    def get_all(self, requests: Sequence[tuple[InitRecipe, Sequence[Sharding]]]) -> list[InitProgram]:
        """`get` for many, in the requested order; distinct programs are compiled in parallel.

        Warns:
            LazyModelWarning: A TPU compiler takes minutes for one of them.
        """
        distinct = {_key(recipe, shardings): (recipe, shardings) for recipe, shardings in requests}
        missing = [item for key, item in distinct.items() if key not in self._programs]
        _warn_of_slow_compiles(missing)
        if len(missing) > 1:
            with ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="lazymodel-compile") as pool:
                list(pool.map(self.get, *zip(*missing, strict=True)))
        return [self.get(recipe, shardings) for recipe, shardings in requests]


def run_recipes(
    recipes: Sequence[InitRecipe], shardings: Mapping[str, Sharding], cache: ProgramCache
) -> Iterator[tuple[str, jax.Array]]:
    """Computes every variable of some recipes, each shard directly on its device; yields path and array as computed.

    Programs are compiled before this returns. They run as arrays are requested, in order of descending temporaries,
    while the devices have most free memory, and the next one is dispatched only when the temporaries in flight allow
    it, so the peak is that of one large variable. The arrays may still be computing; `jax.block_until_ready` waits.

    Warns:
        LazyModelWarning: Once: values depend on the sharding, for keys of a generator other than threefry, or because
            `jax_threefry_partitionable` is off.
    """
    split = [part for recipe in recipes for part in by_devices(recipe, shardings)]
    requests = [(recipe, [shardings[path] for path in recipe.paths]) for recipe in split]
    programs = cache.get_all(requests)
    _warn_of_dependence(split, programs)
    return _running(split, programs)


def _running(recipes: Sequence[InitRecipe], programs: Sequence[InitProgram]) -> Iterator[tuple[str, jax.Array]]:
    order = sorted(range(len(recipes)), key=lambda index: -programs[index].temp_nbytes)
    in_flight: collections.deque[tuple[int, tuple[jax.Array, ...]]] = collections.deque()
    held, allowed = 0, max([_IN_FLIGHT_NBYTES, *(program.temp_nbytes for program in programs)])
    for index in order:
        recipe, program = recipes[index], programs[index]
        while in_flight and held + program.temp_nbytes > allowed:
            nbytes, earlier = in_flight.popleft()
            jax.block_until_ready([array for array in earlier if not array.is_deleted()])
            held -= nbytes
        arrays = program(recipe.inputs)
        held += program.temp_nbytes
        in_flight.append((program.temp_nbytes, arrays))
        yield from zip(recipe.paths, arrays, strict=True)


def _warn_of_dependence(recipes: Sequence[InitRecipe], programs: Sequence[InitProgram]) -> None:
    pairs = zip(recipes, programs, strict=True)
    if paths := [path for recipe, program in pairs if program.sharding_dependent for path in recipe.paths]:
        others = f" and {len(paths) - 1} more variables are" if len(paths) > 1 else " is"
        warn(
            f"{paths[0]!r}{others} initialized sharded from random bits whose values depend on the sharding. Use "
            "threefry keys, jax.random.key(seed, impl='threefry2x32'), with jax_threefry_partitionable on (both are "
            "JAX's defaults) for values that do not."
        )


def _warn_of_slow_compiles(requests: Iterable[tuple[InitRecipe, Sequence[Sharding]]]) -> None:
    for recipe, shardings in requests:
        if not recipe.origin.startswith(("orthogonal", "Orthogonal")) or not shardings:
            continue
        if all(device.platform != "tpu" for device in shardings[0].device_set):
            continue
        with x64_context(recipe):
            results = jax.eval_shape(recipe.function, *recipe.inputs)
        for path, made in zip(recipe.paths, results, strict=True):
            width = min(made.size // max(made.shape[-1], 1), made.shape[-1]) if made.shape else 0
            if width >= _SLOW_QR:
                warn(
                    f"{path!r} is orthogonal, {made.shape}, and TPU compilers unroll its QR decomposition: about 1 "
                    "minute of compiling at a width of 1024, and no end was seen at 2048. Make such values on CPUs, "
                    "save them with lazymodel.save, and load them here"
                )
                return


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
    return ("init", recipe.signature, inputs, settings(recipe), tuple(shardings))


def settings(recipe: InitRecipe) -> Hashable:
    """Settings that change the meaning of a trace but are not part of it."""
    x64 = uses_x64() if recipe.x64 is None else recipe.x64
    return (x64, CONFIG.jax_threefry_partitionable, CONFIG.jax_default_matmul_precision)


@contextlib.contextmanager
def x64_context(recipe: InitRecipe) -> Generator[None]:
    """A context with 64-bit types as the recipe needs them, and without a mesh."""
    with without_mesh(), jax.enable_x64(uses_x64() if recipe.x64 is None else recipe.x64):
        yield


def _compile(recipe: InitRecipe, shardings: tuple[Sharding, ...]) -> InitProgram:
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in recipe.inputs]
    dependent, kernels = False, recipe.kernels
    with x64_context(recipe):
        x64 = uses_x64()
        meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
        here = frozenset(tuple(cast(Any, mesh.devices).flat) for mesh in meshes)
        # One program is possible only if all of it can be split over the devices that it names.
        if kernels is not None and not (kernels.partitionable and kernels.devices == here):
            return compile_kernels(kernels, structs, shardings, settings(recipe))
        traced = jax.jit(recipe.function, out_shardings=shardings).trace(*structs)
        if any(len(sharding.device_set) > 1 for sharding in shardings):
            partitionable = is_partitionable(traced.jaxpr.eqns)
            if partitionable and _has_ragged_rows(traced, shardings):
                partitionable = not is_approximate(traced.jaxpr)
            if not partitionable and kernels is not None:
                return compile_kernels(kernels, structs, shardings, settings(recipe))
            if not partitionable:
                whole = _run_whole(recipe.function, shardings)
                traced = jax.jit(whole, out_shardings=shardings).trace(*structs)
            elif not all(sharding.is_fully_replicated for sharding in shardings):
                dependent = depends_on_sharding(traced.jaxpr)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    left, temporaries = (0, 0) if memory is None else (memory.output_size_in_bytes, memory.temp_size_in_bytes)

    def run(*inputs: Any) -> Iterator[jax.Array]:
        return map(with_shards, compiled(*inputs))

    return InitProgram(run, int(left), int(temporaries), x64, dependent)


def _has_ragged_rows(traced: Any, shardings: tuple[Sharding, ...]) -> bool:
    """Returns True if splitting leaves some CPU device with rows that do not fill its vector registers."""

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
        return function  # a sharding without a mesh, such as GSPMDSharding

    def whole(*inputs: Any) -> tuple[jax.Array, ...]:
        # Without the barrier XLA may compute only the shard that is kept, and so with other rows.
        return tuple(jax.lax.optimization_barrier(output) for output in function(*inputs))

    everywhere = PartitionSpec()
    return jax.shard_map(whole, mesh=first.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


CHUNK = 1 << 18  # maximum of elements in a chunk; intermediates of a chunk stay in the caches
_SHAPE_ONLY = frozenset({"reshape", "expand_dims", "squeeze", "copy", "copy_p"})  # keep the order of elements


class ChunkedInit:
    """A variable's elements, in C order, by ranges; programs are compiled on first use and kept for the process."""

    def __init__(self, recipe: InitRecipe, size: int, length: int, run: Callable[..., Any]) -> None:
        self._recipe, self._size, self._length, self._run = recipe, size, length, run

    def compute(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """`count` elements from `start` on: one of the `slabs` of at most `CHUNK` elements of the variable's shape.

        Each begins at the start of a row, or at a multiple of `CHUNK` in one, and so at that of a vector register.
        """
        first = min(start, self._size - self._length)
        with x64_context(self._recipe):
            high, low = (np.uint32(part) for part in divmod(first, 2**32))
            return np.asarray(self._run(high, low, *self._recipe.inputs))[start - first :][:count]


def chunked_init(recipe: InitRecipe) -> ChunkedInit | None:
    """A recipe of one value, of one variable or several that begin equal, in chunks; None if its elements cannot be
    computed separately, bit for bit.
    """
    if recipe.kernels is not None:
        return None
    structs = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in recipe.inputs)
    key = ("chunks", recipe.signature, structs, settings(recipe))
    with x64_context(recipe):
        size, length, run = PROGRAMS.get(key, lambda: _in_chunks(recipe, structs, key))
    return None if run is None else ChunkedInit(recipe, size, length, run)


def _in_chunks(recipe: InitRecipe, structs: Sequence[Any], key: Hashable) -> tuple[int, int, Callable[..., Any] | None]:
    """Size, elements of a chunk, and the function of the first element and the inputs; None if there is none."""
    jaxpr = jax.make_jaxpr(recipe.function)(*structs)
    out = jaxpr.out_avals[0]
    if len(set(jaxpr.jaxpr.outvars)) > 1:
        return out.size, 0, None
    size, length = out.size, _longest(out.shape)
    given = any(value.size == size for value in recipe.inputs)  # data, which is not computed in chunks
    if size <= 1 or given or is_key(out.dtype) or depends_on_sharding(jaxpr):
        return size, length, None
    # The last elements of a row that does not fill a vector register may be computed with other instructions.
    if is_approximate(jaxpr) and (out.shape[-1] % VECTOR_LANES or size < VECTOR_LANES):
        return size, length, None
    run = functools.partial(_run_chunk, jaxpr, size, length)
    word = jax.ShapeDtypeStruct((), np.uint32)
    try:
        jax.eval_shape(run, word, word, *structs)
    except _NoChunks:
        return size, length, None
    lowered = jax.jit(run).lower

    def compiled(*values: Any) -> Any:  # by the first thread that calls it
        return PROGRAMS.get(("chunk", key), lambda: lowered(word, word, *structs).compile())(*values)

    return size, length, compiled


def _longest(shape: tuple[int, ...]) -> int:
    """Elements of the largest of the `slabs` of a shape."""
    size, inner = math.prod(shape), math.prod(shape[1:])
    if size <= CHUNK:
        return size
    return _longest(shape[1:]) if inner > CHUNK else inner * (CHUNK // inner)


class _NoChunks(Exception):
    """An equation mixes elements."""


def _run_chunk(jaxpr: Any, size: int, length: int, high: Any, low: Any, *inputs: Any) -> jax.Array:
    def draw(key: Any, width: int) -> jax.Array:
        """Draws random bits as JAX does with `jax_threefry_partitionable`."""
        words = jax.random.key_data(key)
        low_words = low + jax.lax.iota(np.uint32, length)
        high_words = high + (low_words < low).astype(np.uint32)
        first, second = threefry2x32_p.bind(words[0], words[1], high_words, low_words)
        if width == 64:
            return (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
        return (first ^ second).astype(f"uint{width}")

    result = _evaluate(jaxpr, inputs, size, length, draw)[0]
    return jnp.broadcast_to(result, (length,))


def _bound(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _evaluate(jaxpr: Any, inputs: Sequence[Any], size: int, length: int, draw: Callable[..., Any]) -> list[Any]:
    """Evaluates a jaxpr in which every value of `size` elements is replaced by a chunk of it, the others unchanged."""

    def constant(atom: Any, value: Any) -> Any:
        if np.size(value) == size and not hasattr(atom, "val"):
            raise _NoChunks
        return value

    def results(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name, whole = eqn.primitive.name, [atom.aval.size == size for atom in eqn.invars]
        if name in JIT or name in CALLS:
            return _evaluate(inner_jaxpr(eqn), operands, size, length, draw)
        if all(var.aval.size != size for var in eqn.outvars) and not any(whole):
            return _bound(eqn, operands)
        if name == "random_bits" and eqn.invars[0].aval.size == 1:
            return [draw(operands[0].reshape(()), eqn.params["bit_width"])]
        if name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
            return [jnp.broadcast_to(jnp.reshape(operands[0], ()), (length,))]
        if name in _SHAPE_ONLY and whole[0]:
            return operands[:1]
        pairs = list(zip(operands, whole, strict=True))
        if name in ELEMENTWISE and all(chunked or np.size(each) == 1 for each, chunked in pairs):
            return _bound(eqn, [each if ok or not np.ndim(each) else jnp.reshape(each, ()) for each, ok in pairs])
        raise _NoChunks

    return walk(jaxpr, inputs, constant, results)
