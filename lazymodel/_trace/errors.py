"""Errors about an init function that cannot be traced, or from which traced arrays leak; each with a hint.

JAX does not look into an object that is not registered as a pytree, so traced arrays in its attributes would be lost.
Every such object in a result is searched, and raises with the place of the array and how to make the object a pytree.
What the function can reach is searched afterwards: an array kept there has no value, which is warned about.

Also evaluates small equations on the host while tracing, such as the thousands that derive a key for every variable,
which JAX would compile one by one. NumPy runs those for which it gives the same bits, and JAX on the CPU the rest.
PRNG keys are stored as packed by `pack_keys`.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import inspect
import linecache
import math
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
from typing import Any, cast

import jax
import numpy as np
from jax import core

from lazymodel._errors import TraceError, is_library, warn
from lazymodel._programs.jaxprs import as_keys, is_key, key_data, one_equation, pack_keys, run_jaxpr, unpack_keys

# Limit of objects that a search visits; some µs each, so about a second at most.
_LIMIT = 100_000
_DATA = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), enum.Enum, np.generic, np.dtype),
    *(jax.Array, jax.ShapeDtypeStruct, jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec),
    *(type, types.ModuleType, types.CodeType, types.BuiltinFunctionType),
)
_ONCE = (Iterator, Coroutine, AsyncIterator)
_CONTAINERS = (tuple, list, dict, type(None), None, collections.OrderedDict)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
# Packages whose objects and functions are not searched: their internal state contains traces.
_OWN = ("jax", "jaxlib", "numpy")
# How to make a pytree of an object, by its package.
_PYTREE_HINTS = {
    "penzai": "call `pz.unbind_params(model, freeze=True)` in the function and return its result: the model without "
    "its parameters, and these; `pz.bind_variables` combines them again",
    "flax": "return the modules themselves in tuples, lists or dicts, or `nnx.split(module)`",
}


def _find(root: Any, known: Collection[type] = (), package: str | None = None) -> tuple[str, str, Any] | None:
    """The first traced array in an object, nearest first; None if there is none in the first 100,000 objects.

    Returns:
        The place of the array, such as `.layers[0].w`; its dtype and shape; and the innermost object that holds it
        and has a type that is not built in. `known` and `package` are as in `_searched`.
    """
    for place, value, holder in _searched(root, known, package):
        if isinstance(value, core.Tracer):
            aval: Any = jax.typeof(value)
            dtype = getattr(aval, "dtype", None)
            return place, str(aval) if dtype is None else f"{dtype.name}{list(aval.shape)}", holder
    return None


def cells_with_tracers(root: Any, known: Collection[type] = ()) -> list[types.CellType]:
    """The cells of functions in an object that hold a traced array; searches like `_find`."""
    found = [value for _, value, _ in _searched(root, known) if isinstance(value, types.FunctionType)]
    cells = [cell for function in found if _package(function) not in _OWN for cell in function.__closure__ or ()]
    return [cell for cell in cells if any(isinstance(item, core.Tracer) for item in gc.get_referents(cell))]


def _searched(root: Any, known: Collection[type], package: str | None = None) -> Iterator[tuple[str, Any, Any]]:
    """Yields place, value and holder of everything that an object holds, nearest first.

    Objects of the types `known` are not searched. With `package`, the globals that functions of this package use are.
    """
    seen = {id(root)}
    kept: list[Any] = []  # objects created by the search, whose ids must not be reused
    queue: collections.deque[tuple[str, Any, Any]] = collections.deque([("", root, root)])
    while queue and len(seen) < _LIMIT:
        place, value, holder = queue.popleft()
        yield place, value, holder
        if isinstance(value, core.Tracer):
            continue
        owner = value if type(value).__module__ != "builtins" else holder
        for suffix, child in _children(value, package):
            data = type(child) in known or isinstance(child, _DATA)
            if id(child) not in seen and (isinstance(child, core.Tracer) or not data):
                seen.add(id(child))
                kept.append(child)
                queue.append((place + suffix, child, owner))


def _children(value: Any, package: str | None) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with its path; runs no code of the user."""
    if isinstance(value, dict):
        items = list(dict.items(cast("dict[Any, Any]", value)))
        plain = (str, int, bool, float, tuple)
        yield from ((f"[{key!r}]" if type(key) in plain else f"[a {type(key).__name__}]", item) for key, item in items)
    elif isinstance(value, (list, tuple)):
        base: Any = list if isinstance(value, list) else tuple
        yield from ((f"[{index}]", item) for index, item in enumerate(list(base.__iter__(value))))
    elif isinstance(value, jax.tree_util.PyTreeDef):
        yield from ((" (static)", item) for item in (value.node_data() or (None, None))[1:])
        yield from ((f" (child {index})", item) for index, item in enumerate(value.children()))
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from ((f".flat[{index}]", item) for index, item in enumerate(value.ravel().tolist()))
    own = _package(value if isinstance(value, types.FunctionType) else type(value)) in _OWN
    if own and (isinstance(value, types.FunctionType) or not callable(value)):
        return
    with contextlib.suppress(AttributeError):
        yield from ((f".{name}", item) for name, item in list(object.__getattribute__(value, "__dict__").items()))
    if isinstance(value, types.FunctionType):
        yield from _variables(value, package)
    elif not own:  # slots, sets, partials, methods, cells, caches
        yield from (("", item) for item in gc.get_referents(value))


def _variables(function: types.FunctionType, package: str | None) -> Iterator[tuple[str, Any]]:
    """The closure, the defaults and, for a function of the package, the globals that a function uses."""
    name = function.__name__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f" ({variable} of {name})", cell
    yield f" (defaults of {name})", (function.__defaults__, function.__kwdefaults__)
    if package is not None and _package(function) == package:
        codes = [function.__code__]
        for code in codes:  # the function's own, and those of the functions inside of it
            codes += (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
        for variable in dict.fromkeys(variable for code in codes for variable in code.co_names):
            if variable in function.__globals__:
                value = function.__globals__[variable]
                yield f" (the global {variable!r})", value.__init__ if isinstance(value, type) else value


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def refuse_escaped(leaves: Iterable[tuple[str, Any]], treedef: Any = None, known: Collection[type] = ()) -> None:
    """Raises TraceError if leaves that are not arrays, or static parts of the result, hold traced arrays.

    Also if a leaf is an iterator, which has not run yet. Objects of the types `known` are not searched.
    """
    for path, leaf in leaves:
        if isinstance(leaf, core.Tracer):  # arrays are no such leaves
            raise reference_error(f"at {path!r}")
        if _runs_once(leaf):
            raise TraceError(
                f"the result has a {type(leaf).__name__} at {path!r}, which makes its values when it is gone through: "
                "return a list or a tuple of them"
            )
        if not isinstance(leaf, _DATA) and (found := _find(leaf, known)) is not None:
            place, kind, holder = found
            raise TraceError(
                f"the result has {_article(leaf)} at {path!r}, which JAX does not look into, with a traced "
                f"{kind} at {path}{place}, whose value would be lost. {_hint(leaf, holder)}"
            )
    waiting = [] if treedef is None else [treedef]
    while waiting:
        node = waiting.pop()
        kind, static = node.node_data() or (None, None)
        waiting.extend(node.children())
        if kind not in _CONTAINERS and not isinstance(static, _DATA) and (found := _find(static)) is not None:
            where = f"among its static parts (at {found[0] or 'the part itself'})"
            raise TraceError(
                f"a {kind.__name__} of the result has a traced {found[1]} {where}: static fields are for what is no "
                "array; make it a field that JAX flattens"
            )


def reference_error(where: str) -> TraceError:
    """The error about a reference, which an equation makes and others change."""
    return TraceError(
        f"the init function makes a reference (jax.new_ref) {where}, which changes in place, so variables could not be "
        "computed one by one: return arrays, and make references of them once they are materialized"
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
            hint = _PYTREE_HINTS.get(_package(type(leaf)), "return its arrays, in any pytree")
            if callable(getattr(leaf, "init", None)):
                hint = "pass that object itself, then the arguments of its init"
            elif callable(leaf):
                hint = "if one of the functions makes the arrays, as `init` of an (init, apply) pair, pass that one"
            raise TraceError(f"{name} returned no arrays, but at {path!r} {_article(leaf)}: {hint}")


@contextlib.contextmanager
def watched(build: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Generator[None]:
    """Warns afterwards about a traced array that tracing left in objects that a function can reach.

    Searched are its arguments, the object of a method, its closure, the globals used by it and by the functions of its
    own package that it calls, and caches among them.
    """
    yield
    build = inspect.unwrap(build) if isinstance(build, types.FunctionType) else build
    function = build
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    called = getattr(function, "__name__", type(function).__name__)
    function = inspect.unwrap(function.__init__ if isinstance(function, type) else function)
    places = [(f"argument {index!r}", value) for index, value in (*enumerate(args), *kwargs.items())]
    for place, value in (*places, (called, build.__init__ if isinstance(build, type) else build)):
        found = None if isinstance(value, _DATA) else _find(value, package=_package(function))
        if found is not None:
            warn(
                f"{called} left a traced {found[1]} in {place}{found[0]}. It has no value, so what is kept there "
                "fails when it is used; return arrays, or keep them once they are materialized"
            )
            return


def is_iterator(leaf: Any) -> bool:
    """Returns True for iterators and views; JAX itself warns about these unless they are leaves."""
    return isinstance(leaf, _VIEWS) or _runs_once(leaf)


def _runs_once(leaf: Any) -> bool:
    """Returns True for Python's own iterators and generators."""
    return isinstance(leaf, _ONCE) and type(leaf).__module__ in ("builtins", "itertools")


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
    if isinstance(leaf, _FUNCTIONS) or _package(type(leaf)) in _OWN:
        return "Return the arrays themselves, or `jax.tree_util.Partial(function, *arrays)`, which is a pytree."
    how = f"`jax.tree_util.register_dataclass({type(leaf).__name__})`"
    return f"Make it a pytree, {how}, or return its arrays in a list, a tuple or a dict."


# Errors of JAX about a missing value, and the hint for each; the last is the base class of some.
_NEED_VALUES: dict[type[Exception], str] = {
    jax.errors.TracerArrayConversionError: "use jax.numpy instead of NumPy on arrays that depend on the arguments",
    jax.errors.TracerBoolConversionError: "branch on static values, or use jax.lax.cond or jnp.where",
    jax.errors.TracerIntegerConversionError: "pass what is used as an index or a shape as a Python int",
    jax.errors.NonConcreteBooleanIndexError: "use jnp.where instead of a boolean mask that depends on the arguments",
    jax.errors.UnexpectedTracerError: "return arrays instead of storing them in globals or outer objects",
    jax.errors.ConcretizationTypeError: "pass values that determine shapes or branches as Python values, not as arrays",
}


def explained(error: Exception, left_nbytes: int = 0) -> TraceError | None:
    """The error of tracing, explained; None for an error about something else.

    `left_nbytes` is what a trace that computes constants was to compute and did not, beyond its limit.
    """
    hint = next((text for kind, text in _NEED_VALUES.items() if isinstance(error, kind)), None)
    if isinstance(error, TypeError) and ("concrete values" in str(error) or "Tracer" in str(error)):
        hint = hint or _NEED_VALUES[jax.errors.ConcretizationTypeError]  # JAX reports traced shapes as a TypeError
    if hint is None:
        return error if isinstance(error, TraceError) else None
    if left_nbytes:
        hint += f". Or compute constants with NumPy: JAX was to compute {left_nbytes:,} bytes of them, too many"
    reason = str(error).strip().splitlines()[0]
    found = TraceError(
        f"{_user_line(error.__traceback__)} needs the value of an array, and tracing has only its shape and dtype: "
        f"{hint}. JAX says: {type(error).__name__}: {reason}"
    )
    found.__cause__ = error
    return found


def refuse_stale(jaxpr: Any, function: Any) -> None:
    """Raises TraceError if a trace uses traced arrays of an earlier one."""
    if any(isinstance(const, core.Tracer) for const in jaxpr.consts):
        where = f" (at {found[0].strip()})" if (found := _find(function, package=_package(function))) else ""
        raise TraceError(
            f"the init function uses a traced array that an earlier build left in an object{where}. It has no value: "
            "create such objects anew for each build, inside of the init function"
        )


def _user_line(trace: TracebackType | None) -> str:
    """The innermost line outside libraries, as `file.py:12 in init: 'source'`."""
    found = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace) if not is_library(frame)]
    code, line = found[-1] if found else (None, 0)
    if code is None or code.co_filename.startswith("<"):
        return "the init function"
    return f"{code.co_filename}:{line} in {code.co_name}: {linecache.getline(code.co_filename, line).strip()!r}"


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
    "unstack": lambda eqn, value: list(np.moveaxis(value, eqn.params["axis"], 0)),
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
