"""Errors about an init function that cannot be traced, or from which traced arrays leak; each with a hint.

The result of an init function is flattened as a pytree. An object that is not registered as a pytree is a leaf, and
arrays in its attributes are not found: the model would not have these variables, and would contain tracers instead,
which are invalid after tracing. So every such object is searched, and raises with the place of the tracer and how to
make the object a pytree. Tracers stored in an argument, a global or a closure instead of being returned are searched
for afterwards, and warned about. Concrete arrays may be stored anywhere.

Small equations, evaluated on the host while tracing: keys, counters and scalars are data, not program.

An init function derives a key for every variable: thousands of tiny equations, each with its own parameters, which
JAX would compile one by one. Data movement, integer arithmetic and the correctly rounded float operations give the same
bits in NumPy, so NumPy runs them; JAX runs everything else on the CPU, like eager execution. `_trace/graph` decides
which equations are small. PRNG keys are stored as packed by `pack_keys`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import inspect
import math
import os
import sys
import traceback
import types
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, cast

import jax
import numpy as np
from jax import core

from lazymodel._errors import TraceError, warn
from lazymodel._programs.jaxprs import as_keys, is_key, key_data, one_equation, pack_keys, run_jaxpr, unpack_keys

# Limit of objects that a search visits; some µs each, so about a second at most.
_LIMIT = 100_000
_TRACER = core.Tracer
_DATA = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), enum.Enum, np.generic, np.dtype),
    *(jax.Array, jax.ShapeDtypeStruct, jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec),
    *(type, types.ModuleType, types.CodeType, types.BuiltinFunctionType),
)
_ONCE = (Iterator, Coroutine, AsyncIterator)
_CONTAINERS = (tuple, list, dict, type(None), None, collections.OrderedDict)
_KEPT = {
    types.MethodType: ("__self__", "__func__"),
    types.FunctionType: ("__defaults__", "__kwdefaults__"),
    functools.partial: ("func", "args", "keywords"),
}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
# Packages whose objects and functions are not searched: their internal state contains traces.
_OWN = ("jax", "jaxlib", "numpy")
# A cache keeps its results in links of this type, which only the garbage collector can see.
_CACHED = type(functools.cache(len))  # its name is private
_LINK = "_lru_list_elem"
# How to make a pytree of an object, by its package.
_PYTREE_HINTS = {
    "penzai": "call `pz.unbind_params(model, freeze=True)` in the function and return its result: the model without "
    "its parameters, and these; `pz.bind_variables` combines them again",
    "flax": "return the modules themselves in tuples, lists or dicts, or `nnx.split(module)`",
}


class _Escaped(NamedTuple):
    """A traced array in a place where it cannot be followed."""

    place: str  # the path to it from the start of the search, such as `.layers[0].w`
    kind: str  # its dtype and shape
    holder: Any  # the innermost object on the path with a type that is not built in


def _find(root: Any, known: Collection[type] = ()) -> _Escaped | None:
    """The first traced array in an object, nearest first; None if there is none in the first 100,000 objects.

    Objects of the types `known` are not searched.
    """
    for place, value, holder in _searched(root, known):
        if isinstance(value, _TRACER):
            return _Escaped(place, _kind(value), holder)
    return None


def cells_with_tracers(root: Any, known: Collection[type] = ()) -> list[types.CellType]:
    """The cells of functions in an object that hold a traced array; searches like `_find`."""
    found = [value for _, value, _ in _searched(root, known) if isinstance(value, types.FunctionType)]
    cells = [cell for function in found if _package(function) not in _OWN for cell in function.__closure__ or ()]
    return [cell for cell in cells if any(isinstance(value, _TRACER) for _, value in _children(cell))]


def _searched(root: Any, known: Collection[type]) -> Iterator[tuple[str, Any, Any]]:
    """Yields place, value and holder of everything that an object holds, nearest first."""
    seen = {id(root)}
    kept: list[Any] = []  # objects created by the search, whose ids must not be reused
    queue: collections.deque[tuple[str, Any, Any]] = collections.deque([("", root, root)])
    while queue and len(seen) < _LIMIT:
        place, value, holder = queue.popleft()
        yield place, value, holder
        if isinstance(value, _TRACER):
            continue
        owner = value if hasattr(type(value), "__module__") and type(value).__module__ != "builtins" else holder
        for suffix, child in _children(value):
            data = type(child) in known or isinstance(child, _DATA)
            if id(child) not in seen and (isinstance(child, _TRACER) or not data):
                seen.add(id(child))
                kept.append(child)
                queue.append((place + suffix, child, owner))


def refuse_escaped(leaves: Iterable[tuple[str, Any]], treedef: Any = None, known: Collection[type] = ()) -> None:
    """Raises TraceError if leaves that are not arrays, or static parts of the result, hold traced arrays.

    Also if a leaf is an iterator, which has not run yet. `known` is as in `_find`.
    """
    for path, leaf in leaves:
        if _runs_once(leaf):
            raise TraceError(
                f"the result has a {type(leaf).__name__} at {path!r}, which makes its values when it is gone through: "
                "return a list or a tuple of them"
            )
        if not isinstance(leaf, _DATA) and (found := _find(leaf, known)) is not None:
            raise TraceError(
                f"the result has {_article(leaf)} at {path!r}, which JAX does not look into, with a traced "
                f"{found.kind} at {path}{found.place}, whose value would be lost. {_hint(leaf, found.holder)}"
            )
    for kind, static in _static_parts(treedef):
        if (found := _find(static)) is not None:
            where = f"among its static parts (at {found.place or 'the part itself'})"
            raise TraceError(
                f"a {kind.__name__} of the result has a traced {found.kind} {where}: static fields are for what is no "
                "array; make it a field that JAX flattens"
            )


def refuse_empty(result: Any, leaves: Sequence[tuple[str, Any]], name: str) -> None:
    """Raises TraceError for a result without arrays, unless it is plain data: a model without variables."""
    for path, leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TraceError(
                f"{name} returned shapes instead of arrays ({path!r} is {leaf}), as `jax.eval_shape` and "
                "`nnx.eval_shape` do: pass the class or the init function itself, which is not run but traced"
            )
    if result is None:
        raise TraceError(f"{name} returned None: it has to return its arrays, in any pytree")
    # A class that defines its own flattening may validly have no arrays.
    container = isinstance(result, (tuple, list, dict)) or any(leaf is result for _, leaf in leaves)
    for path, leaf in leaves:
        if container and not isinstance(leaf, (*_DATA, np.ndarray)):
            raise TraceError(f"{name} returned no arrays, but at {path!r} {_article(leaf)}: {_hint_for_empty(leaf)}")


@contextlib.contextmanager
def watched(build: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Generator[None]:
    """Warns afterwards about a traced array that tracing left in objects that a function can reach.

    Searched are its arguments, the object of a method, its closure, the globals used by it and by the functions of its
    own package that it calls, and caches among them.
    """
    yield
    arguments = ((f"argument {index!r}", value) for index, value in (*enumerate(args), *kwargs.items()))
    for place, value in (*arguments, *_surroundings(build)):
        plain = (isinstance(value, _DATA) or _runs_once(value)) and not isinstance(value, _TRACER)
        if not plain and (found := _find(value)) is not None:
            called = getattr(build, "__name__", type(build).__name__)
            warn(
                f"{called} left a traced {found.kind} in {place}{found.place}. It has no value, so what is kept there "
                "fails when it is used; return arrays, or keep them once they are materialized"
            )
            return


def is_iterator(leaf: Any) -> bool:
    """Returns True for iterators and views; JAX itself warns about these unless they are leaves."""
    return isinstance(leaf, _VIEWS) or _runs_once(leaf)


def _runs_once(leaf: Any) -> bool:
    """Returns True for Python's own iterators and generators."""
    return isinstance(leaf, _ONCE) and type(leaf).__module__ in ("builtins", "itertools")


def _kind(tracer: Any) -> str:
    aval = jax.typeof(tracer)
    return f"{getattr(aval.dtype, 'name', aval.dtype)}{list(aval.shape)}" if hasattr(aval, "dtype") else str(aval)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with its path; runs no code of the user."""
    if isinstance(value, (dict, types.MappingProxyType)):
        items = dict.items(value) if isinstance(value, dict) else value.items()
        yield from ((_key_text(key), item) for key, item in list(cast("Iterable[tuple[Any, Any]]", items)))
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque, *_VIEWS)):
        base = next(kind for kind in type(value).__mro__ if kind.__module__ in ("builtins", "collections"))
        yield from ((f"[{index}]", item) for index, item in enumerate(list(cast(Any, base).__iter__(value))))
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from ((f".flat[{index}]", item) for index, item in enumerate(value.ravel().tolist()))
    elif isinstance(value, types.CellType):
        with contextlib.suppress(ValueError):  # an empty cell
            yield "", value.cell_contents
    elif isinstance(value, types.FunctionType) and _package(value) in _OWN:
        return
    elif kept := next((names for kind, names in _KEPT.items() if isinstance(value, kind)), ()):
        yield from _closure(value) if isinstance(value, types.FunctionType) else ()
        yield from (("", getattr(value, name)) for name in kept)
    elif isinstance(value, _CACHED) or type(value).__name__ == _LINK:
        yield from (("'s cache", item) for item in gc.get_referents(value))
        return
    elif _package(type(value)) in _OWN and not callable(value):
        return
    yield from _attributes(value)


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _key_text(key: Any) -> str:
    return f"[{key!r}]" if type(key) in (str, int, bool, float, tuple) else f"[a {type(key).__name__}]"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = None
    yield from ((f".{name}", item) for name, item in (list(own.items()) if isinstance(own, dict) else ()))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            mangled = f"_{base.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name
            member = base.__dict__.get(mangled)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot that is not filled
                    yield f".{name}", member.__get__(value)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" ({name} of {function.__name__})", cell.cell_contents


def _surroundings(build: Any) -> Iterator[tuple[str, Any]]:
    """Place and value of the closure and global values that a function uses."""
    build = inspect.unwrap(build) if isinstance(build, types.FunctionType) else build
    while isinstance(build, functools.partial):
        yield "the partial's arguments", (build.args, build.keywords)
        build = cast("functools.partial[Any]", build).func
    if isinstance(build, types.MethodType) and not isinstance(build.__self__, type):
        yield "the object that it is a method of", build.__self__
    function = build.__init__ if isinstance(build, type) else build
    function = getattr(function, "__func__", inspect.unwrap(function))
    if not isinstance(function, types.FunctionType):
        return
    package = _package(function)
    seen: set[types.FunctionType] = set()
    waiting = [function]
    while waiting and len(seen) < _LIMIT:
        if (function := waiting.pop()) in seen:
            continue
        seen.add(function)
        known = [(f"the closure of {function.__name__}{place}", value) for place, value in _closure(function)]
        names = [name for name in _names(function.__code__) if name in function.__globals__]
        known += [(f"the global {name!r}", function.__globals__[name]) for name in names]
        for place, value in known:
            inner = getattr(value, "__init__", None) if isinstance(value, type) else value
            if isinstance(inner, types.FunctionType):
                waiting += [inner] if _package(inner) == package else []
            elif not isinstance(value, type):
                yield place, value


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function, and the functions inside of it, look up."""
    yield from code.co_names
    for inner in code.co_consts:
        yield from _names(inner) if isinstance(inner, types.CodeType) else ()


def _static_parts(treedef: Any) -> Iterator[tuple[type, Any]]:
    """The static data of every node of a structure, except nodes of Python's own containers."""
    waiting = [] if treedef is None else [treedef]
    while waiting:
        node = waiting.pop()
        kind, static = node.node_data() or (None, None)
        if kind not in _CONTAINERS and not isinstance(static, _DATA):
            yield kind, static
        waiting.extend(node.children())


def _article(leaf: Any) -> str:
    if isinstance(leaf, (types.FunctionType, types.MethodType)):
        return f"the function {leaf.__qualname__}"
    kind = type(leaf)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {module}{kind.__qualname__}"


def _hint(leaf: Any, holder: Any) -> str:
    """A hint for making a pytree of an object."""
    if hint := _PYTREE_HINTS.get(_package(type(leaf))) or _PYTREE_HINTS.get(_package(type(holder))):
        return f"To make it a pytree, {hint}."
    if isinstance(leaf, (types.FunctionType, types.MethodType, functools.partial)):
        return "Return the arrays themselves, or `jax.tree_util.Partial(function, *arrays)`, which is a pytree."
    if isinstance(leaf, (set, frozenset, *_VIEWS)):
        return "Return a list or a tuple instead."
    if dataclasses.is_dataclass(leaf):
        how = f"Register it: `jax.tree_util.register_dataclass({type(leaf).__name__})`"
        return f"{how}, or return its arrays in a dict."
    return (
        f"Make it a pytree: a dataclass with `jax.tree_util.register_dataclass`, or "
        f"`jax.tree_util.register_pytree_node({type(leaf).__name__}, …)`; or return its arrays in a tuple or a dict."
    )


def _hint_for_empty(leaf: Any) -> str:
    if callable(getattr(leaf, "init", None)):
        return "pass that object itself, then the arguments of its init"
    if callable(leaf):
        return "if one of the functions makes the arrays, as `init` of an (init, apply) pair does, pass that one"
    return _PYTREE_HINTS.get(_package(type(leaf))) or "return its arrays, in any pytree"


_NEED_VALUES = (
    jax.errors.ConcretizationTypeError,  # TracerBoolConversionError among others
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)
_LIBRARIES = ("lazymodel", "jax", "jaxlib", "numpy", "flax", "lazymodel_flax", "lazymodel_keras")
_HINTS = (
    (jax.errors.TracerArrayConversionError, "use jax.numpy instead of NumPy on arrays that depend on the arguments"),
    (jax.errors.TracerBoolConversionError, "branch on static values, or use jax.lax.cond or jnp.where"),
    (jax.errors.TracerIntegerConversionError, "pass what is used as an index or a shape as a Python int"),
    (jax.errors.NonConcreteBooleanIndexError, "use jnp.where instead of a boolean mask that depends on the arguments"),
    (jax.errors.UnexpectedTracerError, "return arrays instead of storing them in globals or outer objects"),
)


def raise_explained(error: Exception) -> NoReturn:
    """Raises a TraceError that explains an error of tracing; the error itself if it is about something else."""
    # JAX reports a traced shape as a plain TypeError.
    about_shapes = isinstance(error, TypeError) and ("concrete values" in str(error) or "Tracer" in str(error))
    if not about_shapes and not isinstance(error, _NEED_VALUES):
        raise error
    otherwise = "pass values that determine shapes or branches as Python values, which stay static, not as arrays"
    hint = next((text for kind, text in _HINTS if isinstance(error, kind)), otherwise)
    reason = str(error).strip().splitlines()[0]
    raise TraceError(
        f"{_user_line(error.__traceback__)} needs the value of an array, and tracing has only its shape and dtype: "
        f"{hint}. JAX says: {type(error).__name__}: {reason}"
    ) from error


def refuse_negative(jaxpr: Any, paths: Sequence[str]) -> None:
    """Raises TraceError if a function makes an array with a negative dimension, which JAX accepts in a trace."""
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            if min(getattr(var.aval, "shape", ()), default=0) >= 0:
                continue
            path = next((repr(path) for out, path in zip(jaxpr.outvars, paths, strict=True) if out is var), "an array")
            source = eqn.source_info.traceback
            line = _user_line(source and source.as_python_traceback())
            raise TraceError(f"{line} makes {path} of shape {var.aval.shape}: expected dimensions from 0 on")


def _user_line(trace: TracebackType | None) -> str:
    """The innermost line outside libraries, as `file.py:12 in init: 'source'`."""
    libraries = map(sys.modules.get, _LIBRARIES)
    files = [file for library in libraries if (file := getattr(library, "__file__", None))]
    roots = [os.path.dirname(os.path.abspath(file)) + os.sep for file in files]
    standard = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    for frame in reversed(traceback.extract_tb(trace)):
        path = os.path.abspath(frame.filename)
        standard_module = path.startswith(standard) and "site-packages" not in path
        if not path.startswith(tuple(roots)) and not standard_module and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()!r}"
    return "the init function"


# pyright: reportUnknownLambdaType=false


Array = np.ndarray[Any, Any]


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Runs JAX' evaluations on the host's CPU, if there is a CPU backend."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return contextlib.nullcontext()
    return jax.default_device(cpu)


def to_host(value: Any, dtype: Any) -> Array:
    """An array, or an array of typed keys, as host data."""
    return pack_keys(key_data(value)) if is_key(dtype) else np.asarray(value, dtype)


def evaluate(eqn: Any, values: Sequence[Array]) -> list[Array]:
    """The results of an equation, bit for bit those of eager JAX."""
    fast = _FAST.get(eqn.primitive.name)
    if fast is not None:
        with np.errstate(all="ignore"):
            results = fast(eqn, *values)
        if results is not None:
            return results
    operands = [
        as_keys(unpack_keys(value), atom.aval.dtype) if is_key(atom.aval.dtype) else value
        for atom, value in zip(eqn.invars, values, strict=True)
    ]
    results = run_jaxpr(one_equation(eqn), operands)
    return [to_host(result, result.dtype) for result in results]


def _slice(eqn: Any, value: Array) -> list[Array]:
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    steps = strides or (1,) * value.ndim
    return [value[tuple(slice(*bounds) for bounds in zip(starts, limits, steps, strict=True))]]


def _dynamic_slice(eqn: Any, value: Array, *starts: Array) -> list[Array] | None:
    sizes = eqn.params["slice_sizes"]
    if len(starts) != value.ndim:
        return None
    # XLA clamps, so that the slice stays inside.
    first = [min(max(int(start), 0), full - size) for start, full, size in zip(starts, value.shape, sizes, strict=True)]
    return [value[tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))]]


def _broadcast_in_dim(eqn: Any, value: Array, *_: Array) -> list[Array]:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    expanded = [1] * len(shape)
    for position, size in zip(dims, value.shape, strict=True):
        expanded[position] = size
    return [np.broadcast_to(value.reshape(expanded), shape)]


def _reshape(eqn: Any, value: Array, *_: Array) -> list[Array] | None:
    return None if eqn.params.get("dimensions") is not None else [value.reshape(eqn.params["new_sizes"])]


def _unstack(eqn: Any, value: Array) -> list[Array]:
    axis = eqn.params["axis"]
    return [np.take(value, index, axis) for index in range(value.shape[axis])]


def _iota(eqn: Any, *_: Array) -> list[Array] | None:
    if np.dtype(eqn.params["dtype"]).kind not in "iu":
        return None
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    line = np.arange(shape[axis], dtype=eqn.params["dtype"])
    return [np.broadcast_to(line.reshape([-1 if position == axis else 1 for position in range(len(shape))]), shape)]


def _convert(eqn: Any, value: Array) -> list[Array] | None:
    target = eqn.params["new_dtype"]
    exact = not is_key(target) and value.dtype.kind in "iub" and np.dtype(target).kind in "iu"
    if exact or value.dtype == target:
        return [value.astype(target)]
    # NumPy and XLA both round to nearest, ties to even.
    return [value.astype(target)] if value.dtype.kind in "iu" and target in (np.float32, np.float64) else None


def _arithmetic(operation: Callable[..., Any], kinds: str) -> Callable[..., list[Array] | None]:
    """Operations that IEEE 754 rounds correctly, and integer operations, which wrap."""

    def fast(eqn: Any, *values: Array) -> list[Array] | None:
        dtype = values[0].dtype
        if dtype.kind not in kinds or any(value.dtype != dtype for value in values):
            return None
        result = np.asarray(operation(*values), dtype)
        if dtype.kind == "f":
            # XLA may flush subnormals to zero, so JAX computes these, and values that are not finite.
            tiny = np.finfo(dtype).tiny if dtype in (np.float32, np.float64) else math.inf
            for array in (*values, result):
                if not np.all(np.isfinite(array) & ((array == 0) | (np.abs(array) >= tiny))):
                    return None
        return [result]

    return fast


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., jax.Array], dtype: Any, *last: Any) -> Callable[..., jax.Array]:
    """A function on keys as a compiled function on key data."""
    return jax.jit(lambda data, *rest: jax.random.key_data(function(as_keys(data, dtype), *rest, *last)))


def _derive(eqn: Any, keys: Array, *counts: Array) -> list[Array] | None:
    """Keys derived by `split` or `fold_in`."""
    if keys.ndim or any(count.ndim for count in counts) or not (counts or eqn.ctx.threefry_partitionable):
        return None
    function, last = (jax.random.fold_in, ()) if counts else (jax.random.split, (tuple(eqn.params["shape"]),))
    derive = _compiled(function, eqn.invars[0].aval.dtype, *last)
    return [pack_keys(np.asarray(derive(unpack_keys(keys), *counts)))]


_IDENTITIES = (
    *("copy", "copy_p", "stop_gradient", "random_clone", "device_put", "sharding_constraint"),
    *("optimization_barrier", "name"),
)
# NumPy's results, or None if NumPy would not give the same bits.
_FAST: dict[str, Callable[..., list[Array] | None]] = {
    **dict.fromkeys(_IDENTITIES, lambda eqn, *values: list(values)),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda eqn, value: [np.squeeze(value, tuple(eqn.params["dimensions"]))],
    "transpose": lambda eqn, value: [np.transpose(value, eqn.params["permutation"])],
    "concatenate": lambda eqn, *values: [np.concatenate(values, eqn.params["dimension"])],
    "unstack": _unstack,
    "iota": _iota,
    "convert_element_type": _convert,
    "random_wrap": lambda eqn, data: [pack_keys(data)],
    "random_unwrap": lambda eqn, keys: [unpack_keys(keys)],
    **dict.fromkeys(("random_split", "random_fold_in"), _derive),
    "add": _arithmetic(np.add, "iuf"),
    "sub": _arithmetic(np.subtract, "iuf"),
    "mul": _arithmetic(np.multiply, "iuf"),
    "div": _arithmetic(np.divide, "f"),
    "sqrt": _arithmetic(np.sqrt, "f"),
    "neg": _arithmetic(np.negative, "iuf"),
}
