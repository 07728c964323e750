"""From a JAX init function to an `AbstractModel`: trace once, slice per variable.

The function is traced to a jaxpr with its array arguments as run-time inputs. Small equations (keys, counters,
scalars) are evaluated at once on the host: they are data. What is left is cut into one backward slice for each
output leaf; slices that are structurally equal are one init program. Leaves that share a large random or contracted
intermediate (one matrix split into q, k and v) are one slice with several outputs, so that it is computed once.

Values are those of *eager* execution, bit for bit. Executed eagerly, every top-level equation is a kernel of its own,
whose scalars are run-time values; `jax.jit` of the whole function would fuse multiplications into additions, fold
constants and reassociate, each of which may change the last bit. So a slice takes top-level scalars as inputs (which
also lets layers with different scales share one program) and hides what flows from one kernel to the next behind
an exclusive or with a run-time zero, which no compiler can see through and every compiler can fuse. That is enough
where each element is computed by itself. A slice that adds up, multiplies or factorizes computed floats is cut into
eager execution's own kernels (`_kernels`), which one device runs; functions that JAX would inline are kept together for
that (`_inlined`), as are the results of one compiled function that share floats (`_units`).

Not held: what depends on more than the equations. A scan of which only some results are used, and a compiled function
whose results share no floats, are compiled without the rest; derivatives are those of the trace; and programs for
other kinds of devices than CPUs are not compared.

Compiling and running is in `_init_programs`; nothing here allocates more than keys and scalars.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from lazymodel._abstract import AbstractModel, AbstractVariable
from lazymodel._errors import TraceError
from lazymodel._escaped import is_iterator, refuse_empty, refuse_escaped
from lazymodel._framework import Framework
from lazymodel._host_arrays import is_host_variable
from lazymodel._init_programs import InitRecipe, ProgramCache
from lazymodel._inlined import comes_apart, keep_inlined
from lazymodel._jaxprs import (
    CALLS,
    CONTROL,
    JIT,
    STRUCTURAL,
    Canonical,
    Interned,
    inner_jaxpr,
    inner_jaxprs,
    is_cheap,
    is_dropped,
    is_floating,
    is_key,
    is_partitionable,
    is_weak,
    key_impl,
    live_part,
    names_devices,
    one_equation,
    opened,
    run_jaxpr,
    with_weak_type,
)
from lazymodel._kernels import Line, kernels_of
from lazymodel._paths import path_text, unique_paths
from lazymodel._small import evaluate, on_host, to_host, unpack_keys
from lazymodel._trace_errors import explain
from lazymodel._units import Units

# A result of at most this many keys or integers is data: a split for every layer of a deep stack, and 32 KiB at most.
_SMALL_INTEGERS = 4096
# Integers that compiled functions and generators return are data up to a few raw keys, and floats as scalars. Larger
# ones would each compile a kernel for their shape; in a program, equal ones are compiled once.
_SMALL_RESULTS = 16
_SMALL_FLOATS = 1
# A shared intermediate of fewer elements is recomputed by each leaf that needs it, rather than joining them.
_LARGE = 4096
_NO_EVALUATION = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "pure_callback"})
# What only says where a value should be: the shardings that are assigned later decide that.
_PLACEMENT = frozenset({"device_put", "sharding_constraint", "copy", "copy_p"})
# On CPUs these take matrices column by column.
_BY_COLUMNS = frozenset({"qr", "geqrf", "geqp3", "householder_product", "lu", "cholesky", "eigh", "svd"})
_VECTOR = 16  # elements of the widest vector register in use, 512 bits of float32
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
    path_of: Callable[[Sequence[Any]], str] | None = None,
) -> AbstractModel:
    """Builds abstractly what `function(*args, **kwargs)` would return.

    Args:
        function: Any function that JAX can trace. Outputs that are no arrays (strings, Python numbers, objects) are
            handed back as they are.
        args: Its arguments. `jax.Array`s and typed PRNG keys in them are run-time inputs of the init programs; a
            `jax.ShapeDtypeStruct` stands for an array whose values no variable needs; the rest is static, and NumPy
            arrays are the function's to use as they are.
        kwargs: Its keyword arguments, likewise.
        name: What to call the model; the function's name by default.
        path_of: Names a leaf of the result from its `jax.tree_util` key path; by default the keys joined by `/`.

    Returns:
        An abstract model with a variable for every distinct array of the result. An array that occurs twice is one
        variable under its first path, and the same array in both places once rebuilt. Arrays are weakly typed where
        the function's own are. NumPy arrays stay such (see `_host_arrays`), and are not trained by default.

    Raises:
        TraceError: The function needs a value that tracing does not have; names the line of code. Or its result has
            arrays where JAX does not look for them, or has none at all; names the place and the mend.
    """
    called: str = name or getattr(function, "__name__", type(function).__name__)
    outputs = _trace(function, args, kwargs, path_of or path_text, called)
    with on_host():
        graph = _Graph(outputs.jaxpr, outputs.inputs)
    variables: dict[str, AbstractVariable] = {}
    sources: dict[str, np.ndarray[Any, Any]] = {}
    computed: list[tuple[str, _Value]] = []
    results = dict(zip(outputs.traced, graph.results, strict=True))
    for path in outputs.paths:
        if path in outputs.on_host:
            array = sources[path] = outputs.on_host[path]
            variables[path] = AbstractVariable(
                path, array.shape, array.dtype, origin="constant", trainable=False, on_host=True
            )
            continue
        value = results[path]
        origin = "init"
        if value.step is None and value.data is None:
            raise TraceError(
                f"{path!r} is an argument that was given as a ShapeDtypeStruct, so it has no value; pass an array"
            )
        # What was computed is initialized, even if it is known already: a checkpoint that lacks it lacks something.
        if value.data is not None and not value.evaluated and not is_key(value.aval.dtype):
            sources[path] = value.data
            origin = "constant"
        else:
            computed.append((path, value))
        shape, weak = tuple(value.aval.shape), is_weak(value.aval)
        variables[path] = AbstractVariable(path, shape, value.aval.dtype, origin=origin, weak_type=weak)
    recipes = graph.recipes(computed)
    for recipe in recipes:
        for path in recipe.paths:
            variables[path] = dataclasses.replace(variables[path], origin=recipe.origin)

    def structure(mapping: Mapping[str, Any]) -> Any:
        leaves = [mapping[leaf.path] if isinstance(leaf, _Slot) else leaf for leaf in outputs.leaves]
        return jax.tree.unflatten(outputs.treedef, leaves)

    return AbstractModel(
        variables=variables,
        recipes=recipes,
        sources=sources,
        framework=Framework(structure),
        programs=ProgramCache(),
        name=called,
    )


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where in the result an array goes."""

    path: str


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """A traced function.

    Attributes:
        jaxpr: Of the array arguments, in order, to the distinct `jax.Array`s of the result.
        inputs: The array arguments.
        paths: A path for each distinct array.
        on_host: Those of NumPy arrays, with the arrays.
        leaves: The result's leaves: a slot for each array, everything else as it is.
        treedef: The result's structure.
    """

    jaxpr: Any
    inputs: list[Any]
    paths: list[str]
    on_host: dict[str, np.ndarray[Any, Any]]
    leaves: list[Any]
    treedef: Any

    @property
    def traced(self) -> list[str]:
        """A path for each output of the jaxpr."""
        return [path for path in self.paths if path not in self.on_host]


def known_value(model: AbstractModel, path: str) -> np.ndarray[Any, Any] | None:
    """The value of a traced variable, if it is known without running a program; key data for PRNG keys."""
    if path in model.sources:
        return model.sources[path]
    for recipe in model.recipes:
        if recipe.paths == (path,) and isinstance(recipe.function, _Program) and recipe.function.is_copy:
            return recipe.inputs[0]
    return None


def _trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    path_of: Callable[[Sequence[Any]], str],
    name: str,
) -> _Outputs:
    arguments, in_tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    where = [index for index, leaf in enumerate(arguments) if _is_input(leaf)]
    inputs = [arguments[index] for index in where]
    paths: list[str] = []
    on_host: dict[str, np.ndarray[Any, Any]] = {}
    leaves: list[Any] = []
    treedefs: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        filled = list(arguments)
        for index, array in zip(where, arrays, strict=True):
            filled[index] = array
        positional, named = jax.tree.unflatten(in_tree, filled)
        result = function(*positional, **named)
        found, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_iterator)
        names = _unique([path_of(path) for path, _ in found])
        slots: dict[int, _Slot] = {}
        results: list[Any] = []
        for path, (_, leaf) in zip(names, found, strict=True):
            if id(leaf) not in slots:  # `found` keeps every leaf alive, so ids are not used twice
                if is_host_variable(leaf):
                    on_host[path] = leaf
                elif isinstance(leaf, jax.Array):
                    results.append(leaf)
                else:
                    leaves.append(leaf)
                    continue
                slots[id(leaf)] = _Slot(path)
                paths.append(path)
            leaves.append(slots[id(leaf)])
        named_leaves = [(path, leaf) for path, (_, leaf) in zip(names, found, strict=True) if id(leaf) not in slots]
        refuse_escaped(named_leaves, treedef)
        if not slots:
            refuse_empty(result, named_leaves, name)
        treedefs.append(treedef)
        return results

    try:
        with keep_inlined():
            jaxpr = jax.make_jaxpr(flat)(*inputs)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error
    return _Outputs(jaxpr, inputs, paths, on_host, leaves, treedefs[-1])


def _is_input(leaf: Any) -> bool:
    # NumPy arrays are not: eager execution computes with them in NumPy, and in 64 bits, until JAX is given them.
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _unique(paths: list[str]) -> list[str]:
    while len(set(paths)) != len(paths):  # once is not enough where "a#2" is someone's own name
        paths = unique_paths(paths)
    return paths


class _Value:
    """One value of the traced function.

    Attributes:
        aval: Its shape and dtype.
        data: Its value on the host, when it is known.
        evaluated: Whether that is the result of an equation, rather than a constant or an argument.
        step: What computes it; None for arguments, constants and what is known.
        index: Which result of the step it is.
        fixed: Whether it is a literal inside a compiled function, and so a constant of the program.
        heavy: Whether it holds, or derives from, a large result that is costly to compute.
        parent: Of the union-find forest that groups leaves.
    """

    __slots__ = ("aval", "data", "evaluated", "fixed", "heavy", "index", "parent", "step")

    def __init__(self, aval: Any, data: Any = None, *, step: _Step | None = None, index: int = 0, fixed: bool = False):
        self.aval = aval
        self.data = data
        self.evaluated = False
        self.step = step
        self.index = index
        self.fixed = fixed
        self.heavy = False
        self.parent: _Value = self

    def root(self) -> _Value:
        while self.parent is not self:
            self.parent = self.parent.parent
            self = self.parent
        return self


def _run_time(value: _Value) -> _Value:
    """An operand of a compiled function or a loop: eagerly a run-time input of it, even if it is a literal."""
    return _Value(value.aval, value.data) if value.fixed else value


class _Step:
    """An equation to be computed by a program.

    Attributes:
        eqn: The equation.
        operands: Its operands.
        results: Its results.
        unit: The compiled function it belongs to; None for an equation that eager execution runs by itself.
        order: Its place in the function.
        part: What is left of the equation when only some of its results are needed, as a jaxpr of `operands`.
    """

    __slots__ = ("eqn", "operands", "order", "part", "results", "unit")

    def __init__(self, eqn: Any, operands: Sequence[_Value], unit: int | None, order: int):
        self.eqn = eqn
        self.operands = tuple(operands)
        self.unit = unit
        self.order = order
        self.part: Any = None
        self.results: tuple[_Value, ...] = ()

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def computes(self) -> bool:
        """Whether it does more than move values, so that the compiler might fuse it with what came before."""
        return self.name not in STRUCTURAL and self.name not in _PLACEMENT

    def jaxpr(self) -> Any:
        """Itself as a jaxpr of the operands that are not fixed."""
        return self.part if self.part is not None else one_equation(self.eqn, [v.fixed for v in self.operands])


class _Graph:
    """The traced function as values and steps: calls seen through, small equations evaluated."""

    def __init__(self, closed: Any, inputs: Sequence[Any]):
        self.steps: list[_Step] = []
        self._units = itertools.count()
        self._compiled = Units(_needed)
        self._x64 = bool(cast(Any, jax.config).jax_enable_x64)
        self._canonical = Canonical()
        self._equations: dict[int, Any] = {}
        self._apart: dict[int, tuple[Any, bool]] = {}
        jaxpr, consts = opened(closed)
        values = [
            _Value(var.aval, _host_value(value, var.aval)) for var, value in zip(jaxpr.invars, inputs, strict=True)
        ]
        self.results = self._walk(jaxpr, consts, values, None)

    def _walk(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value], unit: int | None) -> list[_Value]:
        env: dict[Any, _Value] = {}
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = _Value(var.aval, _host_value(const, var.aval))

        def read(atom: Any) -> _Value:
            if hasattr(atom, "val"):  # a literal
                # Only scalars were fixed in an eager kernel's own code; larger literals are inputs of the program.
                fixed = not atom.aval.shape and (unit is not None or not is_floating(atom.aval))
                return _Value(atom.aval, _host_value(atom.val, atom.aval), fixed=fixed)
            return env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if self._comes_apart(eqn):
                inner, inner_consts = opened(inner_jaxpr(eqn))
                env.update(zip(eqn.outvars, self._walk(inner, inner_consts, operands, unit), strict=True))
                continue
            if all(value.data is not None for value in operands) and _is_small(eqn, unit):
                results = evaluate(eqn, [value.data for value in operands])
                for var, data in zip(eqn.outvars, results, strict=True):
                    env[var] = _Value(var.aval, data)
                    env[var].evaluated = True
                continue
            if name in CALLS or (name in JIT and sum(not is_dropped(var) for var in eqn.outvars) > 1):
                inner, inner_consts = opened(inner_jaxpr(eqn))
                within = next(self._units) if name in JIT and unit is None else unit
                passed = [_run_time(value) if unit is None else value for value in operands]
                returned = self._walk(inner, inner_consts, passed, within)
                if within is not None and unit is None:
                    self._compiled.add(within, returned)
                env.update(zip(eqn.outvars, returned, strict=True))
                continue
            if unit is None and (name in JIT or name in CONTROL):
                operands = [_run_time(value) for value in operands]
            step = _Step(eqn, operands, unit, len(self.steps))
            step.results = tuple(_Value(var.aval, step=step, index=index) for index, var in enumerate(eqn.outvars))
            self.steps.append(step)
            env.update(zip(eqn.outvars, step.results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _comes_apart(self, eqn: Any) -> bool:
        if eqn.primitive.name not in JIT:
            return False
        inner = inner_jaxpr(eqn)
        if id(inner) not in self._apart:  # the jaxpr is kept, so its id stays its own
            self._apart[id(inner)] = (inner, comes_apart(eqn))
        return self._apart[id(inner)][1]

    def recipes(self, computed: Sequence[tuple[str, _Value]]) -> tuple[InitRecipe, ...]:
        """The init recipes of some results, in order of their first path."""
        for step in self._live({value for _, value in computed}):
            _join(step)
        groups: dict[_Value, list[tuple[str, _Value]]] = {}
        for path, value in computed:
            # A light value is recomputed wherever it is needed, even by two leaves that are the same value.
            groups.setdefault(value.root() if value.heavy else _Value(value.aval), []).append((path, value))
        return tuple(self._recipe(group) for group in groups.values())

    def _live(self, live: set[_Value]) -> list[_Step]:
        """The steps that some results need, in order; scans cut into one for each result."""
        kept: list[_Step] = []
        for step in reversed(self.steps):
            needed = [value for value in step.results if value in live]
            if not needed:
                continue
            # A scan that is all needed and adds up floats stays whole; else what nobody needs is not computed.
            cut = step.name == "scan" and len(step.results) > 1
            cut = cut and (len(needed) < len(step.results) or is_partitionable(step.jaxpr()))
            parts = [_cut(step, value) for value in needed] if cut else [step]
            for part in parts:
                live.update(part.operands)
            kept.extend(reversed(parts))
        kept.reverse()
        return kept

    def _recipe(self, group: Sequence[tuple[str, _Value]]) -> InitRecipe:
        values = [value for _, value in group]
        steps = _needed(values)
        by_kernel = not all(is_partitionable(step.jaxpr()) or names_devices(step.jaxpr()) for step in steps)
        if by_kernel:
            values = self._compiled.completed(values)
            steps = _needed(values)
        inputs: list[np.ndarray[Any, Any]] = []
        kinds: list[Any] = []  # key dtype or None, for each input
        where: dict[_Value, tuple[Any, ...]] = {}
        uses_zero = False

        def refer(value: _Value) -> tuple[Any, ...]:
            if value not in where:
                if value.data is None:
                    raise TraceError(
                        f"{group[0][0]!r} needs the value of an argument that was given as a ShapeDtypeStruct "
                        f"({value.aval}); pass an array"
                    )
                where[value] = ("input", len(inputs))
                key = is_key(value.aval.dtype)
                inputs.append(unpack_keys(value.data) if key else np.ascontiguousarray(value.data))
                kinds.append(value.aval.dtype if key else None)
                if not key:
                    inputs[-1] = inputs[-1].reshape(value.aval.shape)  # ascontiguousarray makes 0-d arrays 1-d
            return where[value]

        plan: list[tuple[_Step, tuple[tuple[Any, ...], ...]]] = []
        form: list[Any] = []
        for number, step in enumerate(steps):
            references: list[tuple[Any, ...]] = []
            canonical: list[Any] = []
            for value in step.operands:
                if value.fixed:
                    canonical.append(("fixed", self._canonical.parameter(value.data), self._canonical.aval(value.aval)))
                    continue
                hidden = _crosses_kernels(value, step)
                uses_zero = uses_zero or hidden
                references.append((*refer(value), hidden))
                canonical.append(references[-1])
            where.update((value, ("step", number, index)) for index, value in enumerate(step.results))
            plan.append((step, tuple(references)))
            form.append((self._step_form(step), tuple(canonical)))
        outputs = tuple(refer(value) for _, value in group)
        types = tuple((self._canonical.aval(value.aval)) for value in where if where[value][0] == "input")
        weak = tuple(is_weak(value.aval) for _, value in group)
        signature = Interned((tuple(form), outputs, types, uses_zero, weak))
        if uses_zero:
            inputs.append(np.zeros((), np.uint32))
        kernels = None
        if by_kernel:
            lines = [_line(step, *known) for step, known in zip(steps, form, strict=True)]
            kernels = kernels_of(lines, outputs, {where[value] for value in values if value in where}, kinds)
        return InitRecipe(
            paths=tuple(path for path, _ in group),
            signature=signature,
            function=_Program(plan, outputs, kinds, uses_zero, weak),
            inputs=tuple(inputs),
            origin=_origin(steps),
            x64=self._x64,
            keys=(*kinds, *(None,) * uses_zero),
            kernels=kernels,
        )

    def _step_form(self, step: _Step) -> Any:
        if step.part is not None:
            return (self._canonical.jaxpr(step.part), self._canonical.context(step.eqn))
        if id(step.eqn) not in self._equations:
            self._equations[id(step.eqn)] = Interned(self._canonical.equation(step.eqn))
        return self._equations[id(step.eqn)]


class _Program:
    """The function of a recipe: its steps, run in order on its inputs."""

    def __init__(
        self,
        plan: Sequence[tuple[_Step, tuple[tuple[Any, ...], ...]]],
        outputs: Sequence[tuple[Any, ...]],
        kinds: Sequence[Any],
        uses_zero: bool,
        weak: Sequence[bool],
    ):
        self._weak = weak
        self._plan = plan
        self._outputs = outputs
        self._kinds = kinds
        self._uses_zero = uses_zero
        self.__name__ = "init_program"
        self.is_copy = not plan

    def __call__(self, *inputs: Any) -> tuple[jax.Array, ...]:
        given = [
            value if kind is None else jax.random.wrap_key_data(value, impl=key_impl(kind))
            for value, kind in zip(inputs, self._kinds, strict=False)
        ]
        zero = inputs[-1] if self._uses_zero else None
        results: list[list[Any]] = []
        hidden: dict[tuple[Any, ...], Any] = {}

        def read(reference: tuple[Any, ...]) -> Any:
            return given[reference[1]] if reference[0] == "input" else results[reference[1]][reference[2]]

        for step, references in self._plan:
            operands: list[Any] = []
            for *reference, crosses in references:
                place = tuple(reference)
                if not crosses:
                    operands.append(read(place))
                    continue
                if place not in hidden:
                    hidden[place] = _hide(read(place), zero)
                value = hidden[place]
                if step.name in _BY_COLUMNS:
                    # Without it XLA computes the value in that order too, vectorized in another way than row by row.
                    value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
                operands.append(value)
            moved = step.name in _PLACEMENT and len(operands) == len(step.results)
            results.append(operands if moved else run_jaxpr(step.jaxpr(), operands))
        # What is computed from inputs, which are strongly typed, lost its weak type on the way.
        return tuple(with_weak_type(read(output), weak) for output, weak in zip(self._outputs, self._weak, strict=True))


def _line(step: _Step, form: Hashable, operands: Sequence[tuple[Any, ...]]) -> Line:
    """A step for `kernels_of`, with the form that the program's signature has of it."""
    places = tuple(place if place[0] == "fixed" else place[:-1] for place in operands)  # without whether it is hidden
    moved = step.name in _PLACEMENT and len(places) == len(step.results)
    run = None if moved else functools.partial(_run_step, step)
    return Line(step.unit, form, run, places, len(step.results))


def _run_step(step: _Step, *operands: Any) -> list[Any]:
    return run_jaxpr(step.jaxpr(), operands)


def _hide(value: Any, zero: Any) -> Any:
    """The same value, of which the compiler cannot know how it was computed."""
    bits = _BITS.get(value.dtype.itemsize)
    if (
        np.issubdtype(value.dtype, np.complexfloating)
        or bits is None
        or value.dtype.itemsize * 8 != _width(value.dtype)
    ):
        return jax.lax.optimization_barrier(value)
    if value.shape and value.shape[-1] % _VECTOR:
        # A loop over such rows is vectorized in another way once more is fused into it, for which jax 0.12's XLA:CPU
        # contracts other multiplications and additions.
        value = jax.lax.optimization_barrier(value)
    raw = jax.lax.bitcast_convert_type(value, bits)
    return jax.lax.bitcast_convert_type(raw ^ jax.lax.convert_element_type(zero, bits), value.dtype)


def _width(dtype: Any) -> int:
    """Bits of a floating-point type; four-bit floats are stored in bytes."""
    return int(jax.numpy.finfo(dtype).bits)


def _crosses_kernels(value: _Value, step: _Step) -> bool:
    """Whether a float goes from one eager kernel to another that computes with it."""
    if value.step is None or not step.computes() or not is_floating(value.aval):
        return False
    return step.unit is None or value.step.unit != step.unit


def _host_value(value: Any, aval: Any) -> Any:
    """An argument, constant or literal on the host; None when it is abstract."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return None
    return to_host(value) if is_key(aval.dtype) else np.asarray(value, aval.dtype)


def _is_small(eqn: Any, unit: int | None) -> bool:
    """Whether an equation whose operands are all known is evaluated on the host."""
    name = eqn.primitive.name
    few = name in JIT or name in _NO_EVALUATION or name in ("scan", "while", "cond")
    for var in eqn.outvars:
        size, dtype = var.aval.size, var.aval.dtype
        if is_key(dtype):
            allowed = _SMALL_INTEGERS
        elif np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_):
            allowed = _SMALL_RESULTS if few else _SMALL_INTEGERS
        else:
            # Inside a compiled function XLA fuses floats, so evaluating them one by one might change a bit.
            allowed = _SMALL_FLOATS if unit is None and is_floating(var.aval) else -1
        if size > allowed:
            return False
    return name not in CALLS and not eqn.effects and bool(eqn.outvars) and not _calls_back(eqn)


def _calls_back(eqn: Any) -> bool:
    if eqn.primitive.name == "pure_callback":
        return True
    return any(_calls_back(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)


def _join(step: _Step) -> None:
    """Marks what is heavy, and joins it with the results that are computed from it."""
    from_heavy = [value for value in step.operands if value.heavy]
    costly = not is_cheap(step.eqn)
    for value in step.results:
        value.heavy = bool(from_heavy) or (costly and value.aval.size > _LARGE)
    together = [*from_heavy, *(value for value in step.results if value.heavy)]
    for value in together[1:]:
        value.root().parent = together[0].root()


def _cut(step: _Step, value: _Value) -> _Step:
    """The part of a scan that computes one of its results."""
    whole = one_equation(step.eqn, [operand.fixed for operand in step.operands])
    jaxpr, used = live_part(whole, value.index)
    free = [operand for operand in step.operands if not operand.fixed]
    part = _Step(step.eqn, [operand for operand, use in zip(free, used, strict=True) if use], step.unit, step.order)
    part.part = jaxpr
    part.results = (value,)
    value.step, value.index = part, 0
    return part


def _needed(values: Sequence[_Value]) -> list[_Step]:
    """The steps that some values depend on, in order."""
    found: dict[_Step, None] = {}
    stack = [value.step for value in values if value.step is not None]
    while stack:
        step = stack.pop()
        if step not in found:
            found[step] = None
            stack.extend(value.step for value in step.operands if value.step is not None)
    return sorted(found, key=lambda step: step.order)


_ORIGINS = ("truncated_normal", "normal", "uniform", "orthogonal", "permutation", "bernoulli", "randint", "gamma")


def _origin(steps: Sequence[_Step]) -> str:
    """What a recipe does, in a word, from the names of the functions it calls."""
    names = {step.name for step in steps}
    called = {str(step.eqn.params.get("name", "")).lstrip("_") for step in steps if step.name in JIT}
    if {"qr", "householder_product"} & names or "qr" in called:
        return "orthogonal"
    for origin in _ORIGINS:
        if origin in called:
            return origin
    if any(name.startswith("random_") for name in names):
        return "random"
    if not names:
        return "value"
    return "fill" if names <= {"broadcast_in_dim", "convert_element_type"} else "init"
