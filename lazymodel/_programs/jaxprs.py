"""Jaxprs: run one equation, name it, classify it; recipes that run kernel by kernel; PRNG keys as data.

All code that depends on JAX' own representation is here, through `jax.extend.core` and `jax.core.eval_jaxpr`, so a new
JAX release only changes this module. Callers decide how to use the answers.

A sum, a matrix product or a factorization gives other bits if the compiler fuses the computation of its operands into
it, changes their layout, or splits it over devices; no barrier inside a program prevents XLA:CPU from all of these. So
such a recipe is divided where eager execution ends one compiled kernel and begins the next. Each kernel is a separate
program, compiled once for the process, which runs on one of its devices, with operands in memory as in eager execution;
the results are then divided into shards. While such a variable is computed, that device holds all of it and its
operands, which `InitProgram.temp_nbytes` counts. `_trace/graph` decides which recipes run this way. A recipe that names
devices itself (`shard_map`) runs eagerly: on these devices, and what depends on it where eager execution would run it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeAlias, TypeVar, cast

import jax
import jax.extend.core as jex
import numpy as np
from jax import core
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import partial_eval
from jax.sharding import Sharding, SingleDeviceSharding


@contextlib.contextmanager
def without_mesh() -> Generator[None]:
    """Without the mesh of `jax.set_mesh`, whose devices JAX would expect in our programs as well; also a decorator."""
    with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None):
        yield


def is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


@functools.lru_cache(maxsize=64)
def key_impl(dtype: Any) -> Any:
    """The PRNG implementation of a key dtype, as `jax.random.wrap_key_data` takes it."""
    found: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        # `key_impl` only takes arrays and tracers, so it is called while tracing.
        found.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return found[0]


def key_data(keys: Any) -> np.ndarray:
    """The raw `uint32` data of a typed key array: one more, trailing, dimension."""
    return np.asarray(jax.random.key_data(keys))


def as_keys(data: Any, dtype: Any) -> Any:
    """The inverse of `key_data`, eagerly or under a trace; the data itself if `dtype` is None or not a key dtype."""
    return jax.random.wrap_key_data(data, impl=key_impl(dtype)) if dtype is not None and is_key(dtype) else data


def stored_as(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype in which values are stored: their own, or those of key data for PRNG keys."""
    if not is_key(dtype):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def pack_keys(data: np.ndarray) -> np.ndarray[Any, Any]:
    """Key data as opaque (void) elements in the keys' own shape, which NumPy moves like any other."""
    opaque = np.dtype((np.void, data.shape[-1] * data.itemsize))
    return np.ascontiguousarray(data).view(opaque).reshape(data.shape[:-1])


def unpack_keys(keys: np.ndarray) -> np.ndarray[Any, Any]:
    """The inverse of `pack_keys`."""
    return np.frombuffer(keys.tobytes(), np.uint32).reshape((*keys.shape, keys.itemsize // 4))


CONFIG: Any = jax.config  # its settings are not annotated


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that CPUs compute by polynomials or estimates, which XLA may do differently in the last few elements of an
# array: those that do not fill a vector register.
_APPROXIMATE = _names(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1
    igamma igammac lgamma log log1p logistic polygamma pow regularized_incomplete_beta rsqrt sin sinh tan tanh zeta
    """
)
# Operations that choose among values, or change signs, elementwise or not: nothing is rounded.
_CHOOSING = _names(
    """
    abs bitcast_convert_type clamp complex conj copy copy_p device_put imag max min name neg nextafter
    optimization_barrier real select_n sharding_constraint sign stop_gradient
    """
)
_EXTREMES = _names("argmax argmin cummax cummin reduce_max reduce_min sort")
_EXACT = _CHOOSING | _EXTREMES
# Elementwise, exact or not: every element depends only on the same element of the operands.
ELEMENTWISE = (
    _APPROXIMATE
    | _CHOOSING
    | _names(
        """
        add add_any and ceil clz convert_element_type div eq eq_to floor ge gt integer_pow is_finite le le_to lt lt_to
        mul ne not or population_count reduce_precision rem round shift_left shift_right_arithmetic shift_right_logical
        sqrt square sub xor
        """
    )
)
# Data movement: values are only moved or repeated.
STRUCTURAL = _names(
    """
    broadcast broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty empty2 expand_dims full gather iota
    pad random_clone random_unwrap random_wrap reshape rev scatter select_and_gather slice split squeeze stack tile
    transpose unstack
    """
)
# Not elementwise, but exact in any order, so a partitioned run gives the same bits.
_ORDERLESS = _EXTREMES | _names(
    """
    reduce_and reduce_or reduce_xor top_k scatter_max scatter_min random_bits random_seed random_split random_fold_in
    threefry2x32 rng_bit_generator
    """
)
# Sums are exact, and so independent of the order, for integers only.
_INTEGER_ORDERLESS = _names("reduce_sum reduce_prod cumsum cumprod scatter_add scatter_mul dot_general")
# Equations that only run an inner jaxpr. In eager execution, the first kind is compiled as a unit; the second runs step
# by step.
JIT = _names("jit pjit")
CALLS = _names("closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat checkpoint remat2")
CONTROL = _names("scan while cond")
# Parameters that only differentiation uses, or that describe a place in the source.
_IGNORED_PARAMS = _names(
    "jvp_jaxpr_fun jvp_jaxpr_thunk fwd_jaxpr_thunk bwd out_trees symbolic_zeros debug_info debug num_consts_bwd"
)


def uses_x64() -> bool:
    """Returns True if 64-bit types are on, in this thread and context."""
    return bool(CONFIG.jax_enable_x64)


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or open, as (jaxpr, constants)."""
    consts = getattr(jaxpr, "consts", ())
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def inner_jaxpr(eqn: Any) -> Any:
    """The jaxpr that a call equation runs."""
    return eqn.params["call_jaxpr"] if "call_jaxpr" in eqn.params else eqn.params["jaxpr"]


def scanned_from(eqn: Any) -> tuple[int, int]:
    """The number of the first operand that a scan goes over, and how many before it are carried."""
    # What is scanned over has one more dimension than in the body. JAX' versions count in other parameters.
    jaxpr = opened(eqn.params["jaxpr"])[0]
    scanned = [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(eqn.invars, jaxpr.invars, strict=True)]
    stacked = [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(eqn.outvars, jaxpr.outvars, strict=True)]
    return len(scanned) - sum(scanned), len(stacked) - sum(stacked)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Every jaxpr among an equation's parameters, opened, except those that only differentiation uses."""
    for name, value in eqn.params.items():
        if name in _IGNORED_PARAMS:
            continue
        for item in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (jex.Jaxpr, jex.ClosedJaxpr)):
                yield opened(item)[0]


def is_dropped(var: Any) -> bool:
    return isinstance(var, jex.DropVar)


def one_equation(eqn: Any, literals: Sequence[Any] | None = None) -> Any:
    """An equation as a separate jaxpr: takes its operands in order, except those replaced by a literal."""
    pairs = zip(eqn.invars, literals or [None] * len(eqn.invars), strict=True)
    invars = [jex.Var(atom.aval) if literal is None else literal for atom, literal in pairs]
    outvars = [jex.Var(var.aval) for var in eqn.outvars]
    free = [atom for atom in invars if isinstance(atom, jex.Var)]
    info = jex.DebugInfo("lazymodel", eqn.primitive.name, ("",) * len(free), None)
    return jex.Jaxpr((), free, outvars, [eqn.replace(invars=invars, outvars=outvars)], eqn.effects, info)


def live_part(jaxpr: Any, index: int) -> tuple[Any, list[bool]]:
    """A jaxpr reduced to what one of its outputs needs (also inside scans), and which inputs it still uses."""
    used = [position == index for position in range(len(jaxpr.outvars))]
    cut, inputs = partial_eval.dce_jaxpr(jaxpr, used)
    return cut, list(inputs)


def without_dead_code(closed: Any) -> tuple[Any, list[bool]]:
    """A closed jaxpr reduced to what its outputs need, and which inputs it still uses."""
    jaxpr, consts = opened(closed)
    cut, inputs = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return jex.ClosedJaxpr(cut, consts), list(inputs)


def walk(
    closed: Any,
    inputs: Sequence[Any],
    constant: Callable[[Any, Any], Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluates a jaxpr in another arithmetic; returns its results.

    Args:
        closed: The jaxpr, closed or open.
        inputs: The values of its inputs.
        constant: Takes the variable or literal of a constant, and its value; returns the value to use.
        equation: Takes an equation and the values of its operands; returns those of its results.
    """
    jaxpr, consts = opened(closed)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update((var, constant(var, value)) for var, value in zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> Any:
        return constant(atom, atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def run_jaxpr(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates an open jaxpr without constants, eagerly or under a trace."""
    return core.eval_jaxpr(jaxpr, (), *values)


def is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def with_weak_type(value: Any, weak: bool) -> Any:
    """The same array, weakly typed like arrays of Python scalars, or not; eagerly or under a trace."""
    if is_key(value.dtype) or is_weak(jax.typeof(value)) == weak:
        return value
    # No public function of JAX makes an array weak, but jitted functions and this primitive keep it so.
    return convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=weak, sharding=None)


class _Identity:
    """An object compared by identity; holding it prevents reuse of its id."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Interned:
    """A canonical form whose hash is computed once, and whose equality is that of the form itself."""

    __slots__ = ("_hash", "form")

    def __init__(self, form: Hashable) -> None:
        self.form = form
        self._hash = hash(form)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Interned) and self._hash == other._hash and self.form == other.form

    def __hash__(self) -> int:
        return self._hash


class Canonical:
    """Canonical forms of jaxprs: equal only for equal computations.

    Two computations that differ in anything that may change a value never share a form. Equal ones may have
    different forms (an unknown object in a parameter counts by identity), which only costs a compilation.
    """

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Any, Interned]] = {}

    def aval(self, aval: Any) -> Hashable:
        """Shape, dtype, weak type and, on explicit meshes, sharding."""
        return (aval.shape, aval.dtype, is_weak(aval), getattr(aval, "sharding", None))

    def context(self, eqn: Any) -> Hashable:
        """Settings that JAX keeps with an equation: compute type, threefry variant, metadata."""
        names = ("compute_type", "threefry_partitionable", "cur_abstract_mesh", "xla_metadata")
        return tuple(self.parameter(getattr(eqn.ctx, name, None)) for name in names)

    def equation(self, eqn: Any) -> Hashable:
        """An equation without its operands: primitive, parameters, result types."""
        params = tuple(
            (name, self.parameter(value)) for name, value in sorted(eqn.params.items()) if name not in _IGNORED_PARAMS
        )
        outs = tuple(self.aval(var.aval) for var in eqn.outvars)
        # Primitives have names, but two libraries may use the same one.
        return (eqn.primitive.name, self.identity(eqn.primitive), params, outs, self.context(eqn))

    def jaxpr(self, closed: Any) -> Interned:
        """A whole jaxpr, its variables numbered in order of appearance."""
        if (known := self._jaxprs.get(id(closed))) is not None:
            return known[1]
        jaxpr, consts = opened(closed)
        numbers: dict[Any, int] = {}

        def number(var: Any) -> int:
            return numbers.setdefault(var, len(numbers))

        def atom(value: Any) -> Hashable:
            if isinstance(value, jex.Literal):
                return ("literal", self.parameter(value.val), self.aval(value.aval))
            return number(value)

        form: list[Hashable] = [tuple(self.parameter(const) for const in consts)]
        form.append(tuple((number(var), self.aval(var.aval)) for var in (*jaxpr.constvars, *jaxpr.invars)))
        for eqn in jaxpr.eqns:
            operands = tuple(atom(value) for value in eqn.invars)
            form.append((self.equation(eqn), operands, tuple(number(var) for var in eqn.outvars)))
        form.append(tuple(atom(value) for value in jaxpr.outvars))
        interned = Interned(tuple(form))
        self._jaxprs[id(closed)] = (closed, interned)  # the jaxpr is kept, so its id is not reused
        return interned

    def parameter(self, value: Any) -> Hashable:
        """Any equation parameter."""
        if value is None or isinstance(value, (str, bytes, np.dtype)):
            return cast("Hashable", value)
        if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
            return self.jaxpr(value)
        if isinstance(value, enum.Enum):
            return (self.identity(type(value)), value.name)
        if type(value) in (bool, int, float, complex):
            return (type(value).__name__, repr(value))  # `repr` distinguishes 0.0 and -0.0, and nan equals itself
        if isinstance(value, (tuple, list)):
            items = cast("Sequence[Any]", value)
            return (self.identity(type(items)), *(self.parameter(item) for item in items))
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return ("mapping", *((self.parameter(key), self.parameter(item)) for key, item in pairs))
        if isinstance(value, (set, frozenset)):
            members = cast("frozenset[Any]", value)
            return ("set", frozenset(self.parameter(item) for item in members))
        if isinstance(value, (np.ndarray, np.generic, jax.Array)) or hasattr(value, "__array__"):
            return self._array(value)
        # JAX' own value objects (shardings, PRNG implementations, dimension numbers) compare by value. The equality of
        # other classes may ignore something that matters here, so their objects count by identity.
        if type(value).__module__.split(".")[0] in ("jax", "jaxlib") and not callable(value):
            try:
                hash(value)
            except TypeError:
                return self.identity(value)
            return (self.identity(type(value)), value)
        return self.identity(value)

    def identity(self, value: object) -> Hashable:
        """The form of a type, a primitive, and anything unknown."""
        return _Identity(value)

    def _array(self, value: Any) -> Hashable:
        if is_key(value.dtype):
            return ("key", value.dtype, self._array(key_data(value)))
        array = np.asarray(value)
        digest = hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).tobytes()).digest() if array.size else b""
        return ("array", type(value).__name__, array.shape, str(array.dtype), is_weak(value), digest)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, each before those inside it."""
    return each_equation(opened(jaxpr)[0].eqns)


def each_equation(eqns: Iterable[Any]) -> Iterator[Any]:
    """Equations, each before those inside it."""
    for eqn in eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from each_equation(inner.eqns)


def is_partitionable(eqns: Iterable[Any]) -> bool:
    """Returns True if XLA may split a computation over devices without changing a bit of its result.

    True for elementwise operations, data movement, counter-based random bits and operations that are exact in any
    order. False for floating-point sums, contractions and factorizations: partial sums would be added in another order.
    """
    for eqn in each_equation(eqns):
        name = eqn.primitive.name
        if name in JIT or name in CALLS or name in CONTROL:
            continue
        if name in _INTEGER_ORDERLESS:
            if not all(np.issubdtype(var.aval.dtype, np.integer) or var.aval.dtype == bool for var in eqn.outvars):
                return False
        elif name not in ELEMENTWISE and name not in STRUCTURAL and name not in _ORDERLESS:
            return False
    return True


def rounds(eqn: Any) -> bool:
    """True if an equation without inner calls computes floating-point numbers, not just chooses or moves them."""
    name = eqn.primitive.name
    if name in STRUCTURAL or name in _EXACT:
        return False
    if name == "convert_element_type" and (
        not is_floating(eqn.invars[0].aval) or eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    ):
        return False
    return any(is_floating(var.aval) for var in eqn.outvars)


def is_floating(aval: Any) -> bool:
    return not is_key(aval.dtype) and bool(jax.numpy.issubdtype(aval.dtype, np.inexact))


def named_devices(eqns: Iterable[Any]) -> frozenset[tuple[Any, ...]]:
    """The devices, in order, that a computation names itself: in `shard_map`, or in shardings of compiled functions."""
    params = [value for eqn in each_equation(eqns) for value in eqn.params.values()]
    each = [item for value in params for item in (cast(Any, value) if isinstance(value, tuple) else (value,))]
    held = [item for item in each if isinstance(item, (jax.sharding.Mesh, jax.sharding.NamedSharding))]
    named = [item if isinstance(item, jax.sharding.Mesh) else item.mesh for item in held]
    meshes = [mesh for mesh in named if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty]
    return frozenset(tuple(cast(Any, mesh.devices).flat) for mesh in meshes)


def is_approximate(jaxpr: Any) -> bool:
    """Returns True if a computation contains functions that are not correctly rounded."""
    return any(eqn.primitive.name in _APPROXIMATE for eqn in equations(jaxpr))


def calls_back(eqn: Any) -> bool:
    """Returns True if an equation, or one inside it, calls Python."""
    inside = (inner for jaxpr in inner_jaxprs(eqn) for inner in equations(jaxpr))
    return any(each.primitive.name == "pure_callback" for each in (eqn, *inside))


def depends_on_sharding(jaxpr: Any) -> bool:
    """Returns True if random bits are drawn by a generator whose values change with the sharding: not counter-based."""
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if name in ("rng_bit_generator", "rng_uniform"):
            return True
        if name == "random_bits":
            partitionable = getattr(eqn.ctx, "threefry_partitionable", None)
            if partitionable is None:
                partitionable = CONFIG.jax_threefry_partitionable
            if "fry" not in eqn.invars[0].aval.dtype.name or not partitionable:
                return True
        elif name == "threefry2x32" and not CONFIG.jax_threefry_partitionable:
            return True
    return False


def is_cheap(eqn: Any) -> bool:
    """Returns True if computing a result twice costs almost nothing: no random bits, no contraction, no loop."""
    name = eqn.primitive.name
    if name in JIT or name in CALLS:
        return all(is_cheap(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)
    return name in ELEMENTWISE or name in STRUCTURAL


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
        self._known: collections.OrderedDict[Hashable, Future[Compiled]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Drops all programs."""
        with self._lock:
            self._known.clear()

    def get(self, key: Hashable, compile_it: Callable[[], Compiled]) -> Compiled:
        """The program for this key, compiled by the first thread that needs it; an error is raised in all of them."""
        future = Future[Compiled]()
        with self._lock:
            found = self._known.setdefault(key, future)
            self._known.move_to_end(key)
            while len(self._known) > self.most:
                self._known.popitem(last=False)
        if found is future:
            try:
                future.set_result(compile_it())
            except BaseException as error:
                with self._lock:
                    self._known.pop(key, None)
                future.set_exception(error)
        return found.result()


# The programs of the process: init programs, their kernels and chunks, conversions, stretches of `run`, exchanges,
# moves of `Sync`, statistics. A decoder has some tens, of 50 to 100 KiB of machine code each on CPUs. Keys begin with
# the kind of program.
PROGRAMS: Programs[Any] = Programs(2048)


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
        with without_mesh(), jax.enable_x64(self.x64):
            return tuple(self.run(*inputs))


# A compiled kernel: the function to run, the types of its results, and the bytes of its temporaries.
_RunKernel: TypeAlias = "tuple[Callable[..., Sequence[jax.Array]], tuple[jax.ShapeDtypeStruct, ...], int]"


def compile_kernels(
    kernels: Kernels,
    inputs: Sequence[jax.ShapeDtypeStruct],
    shardings: Sequence[Sharding],
    settings: Hashable,
) -> InitProgram:
    """Compiles the kernels of a recipe that are not compiled yet, under the current settings.

    `settings` are other settings that change the meaning of a trace.
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
            key = ("kernel", kernel.form, tuple((struct.shape, struct.dtype) for struct in operands), here, settings)
            compiled = PROGRAMS.get(key, functools.partial(_compiled, kernel.function, operands, here))
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
            values[number] = run(*(as_operand(_read(place, given, values)) for place in operands))
            for each in gone:
                del values[each]
        for index, (place, sharding) in enumerate(zip(kernels.outputs, shardings, strict=True)):
            value = _read(place, given, values)
            # Variables that begin equal have buffers of their own, which a training step donates.
            yield placed(jax.numpy.copy(value) if place in kernels.outputs[:index] else value, sharding)

    return InitProgram(run_all, left, peak - left, uses_x64(), by_kernel=True)


def _compiled(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct], here: Sharding) -> _RunKernel:
    lowered = jax.jit(function, out_shardings=here).lower(*operands)
    results = tuple(jax.ShapeDtypeStruct(info.shape, info.dtype) for info in cast(Any, lowered.out_info))
    run = lowered.compile()
    memory = run.memory_analysis()
    return run, results, 0 if memory is None else int(memory.temp_size_in_bytes)


def _nbytes(struct: Any) -> int:
    return math.prod(struct.shape) * struct.dtype.itemsize


def _read(place: Reference, inputs: Sequence[Any], values: Mapping[int, Sequence[Any]]) -> Any:
    return inputs[place[1]] if place[0] == "input" else values[place[1]][place[2]]


def as_operand(value: Any) -> Any:
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
