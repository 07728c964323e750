"""Functions that will be called with a model: the object `Compile`, and lowering.

A function is lowered like its later call, so that this call finds the compiled program: with the future shardings,
layouts and weak types of arrays, in the thread and the context (mesh, default precision) of the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, cast

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import LoweredFunction, ModelSpec
from lazymodel._abstract.variable import stays_on_host
from lazymodel._errors import LazyModelError

INIT, FORWARD, PREDICT, TRAIN, GENERATE = "init", "forward", "predict", "train", "generate"
_OWN = (PREDICT, TRAIN, GENERATE)  # a model's own functions, whose arguments are given as examples or sizes
_NAMED = (INIT, FORWARD, *_OWN)


class Compile:
    """A function that will be called: `materialize` compiles it while weights are read, a plan shows its memory.

    `Compile(step, *inputs, **keywords)` is a jitted function that will be called as `step(model, *inputs, **keywords)`,
    where `model` is the result of `materialize`. It is traced and lowered before any data is read, and compiled
    alongside the stream; its first call then compiles nothing. `Compile(step, …).of(split)` is one that will be called
    as `step(*split(model), *inputs, **keywords)`.

    `Compile("predict")`, `"train"` and `"generate"` are the programs of `predict`, `fit` and `generate` of a Keras or
    KerasHub model. Their arguments are described by `batch` and `sequence`, or by an example, in the form of the
    model's own methods: `Compile("train", x, y)`, `Compile("generate", ["Once upon"], sequence=64)`.

    The following are for plans only, which need no devices (`lazymodel.topology`) and jit by themselves:
    `Compile("init")`, the init programs; and `Compile("forward", function, *inputs)` or
    `Compile("train", function, *inputs)`, where `function(tree, *inputs)` returns the outputs, or the loss. The loss
    becomes a training step with the model's own optimizer, that of `WhatIf`, or without both plain gradient descent.

    Args:
        what: A jitted function (of `jax.jit`, `nnx.jit`, `equinox.filter_jit`: any object with a method `lower`), or
            one of the names.
        *inputs: The further arguments of the call: arrays, or `jax.ShapeDtypeStruct`s. An input that will be committed
            to devices (by `jax.device_put` to a sharding, or as another function's result) must be so now, as an array
            or by the struct's sharding; NumPy arrays, and results of `jnp.asarray` or `jax.random.key`, are not.
        **options: Keywords of the call, also static ones. For a name without a function
            `batch` and `sequence`: the sizes of the arguments of the model's own functions. In a plan None is
            one for each part of the mesh's data axes, and 1024 or the most that the model takes.

    Attributes:
        what: The name; `"step"` for a jitted function.
        function: The function; None for the model's own.
        inputs: A tuple of pytrees.
        keywords: The keywords of a jitted function.
        batch: Batch size for the model's own functions, or None.
        sequence: Their sequence length, or None.
        split: Returns the arguments of a step from the model, as a tuple; None is the model itself.

    Raises:
        LazyModelError: An argument is invalid, or does not fit the others.

    Example:
        >>> step = jax.jit(lambda tree, x: x @ tree["up"]["kernel"] @ tree["down"]["kernel"])
        >>> batch = np.ones((8, 64), "float32")
        >>> sharded.plan(compile=lm.Compile(step, batch)).parts["activations"] > 0
        True
        >>> model = sharded.materialize(compile=lm.Compile(step, batch))  # `step(model, batch)` compiles nothing now
        >>> forward = lm.Compile("forward", lambda tree, x: x @ tree["up"]["kernel"], batch)
        >>> list(sharded.plan(compile=forward).parts)
        ['parameters', 'activations']
    """

    def __init__(self, what: str | Callable[..., Any], /, *inputs: Any, **options: Any) -> None:
        if not (what in _NAMED if isinstance(what, str) else callable(what)):
            raise LazyModelError(f"expected a jitted function or one of {', '.join(map(repr, _NAMED))}, got {what!r}")
        self.what, self.inputs = "step", inputs
        self.function: Callable[..., Any] | None = None if isinstance(what, str) else what
        self.keywords: Mapping[str, Any] = MappingProxyType({} if isinstance(what, str) else options)
        self.batch: int | None = None
        self.sequence: int | None = None
        self.split: Callable[[Any], tuple[Any, ...]] | None = None
        if isinstance(what, str):
            own = what in _OWN and not (inputs and callable(inputs[0]))
            self.what = what
            if inputs and not own:
                self.function, self.inputs = inputs[0], inputs[1:]
            self.batch, self.sequence = options.pop("batch", None), options.pop("sequence", None)
            self._check(own, options)

    def of(self, split: Callable[[Any], tuple[Any, ...]]) -> Self:
        """The same for a function that takes parts of the model: `step(*split(model), *inputs, **keywords)`.

        Args:
            split: Takes the result of `materialize`, with `jax.ShapeDtypeStruct`s in place of arrays, and returns a
                tuple of pytrees: `nnx.split`, `lambda model: (model["params"],)`, or `lambda both: both` for a model
                and an optimizer's state.

        Raises:
            LazyModelError: It is not a function, or the compiled function is not called with the model.

        Example:
            >>> step = jax.jit(lambda kernel, x: x @ kernel)
            >>> x = np.ones((8, 64), "float32")
            >>> of_kernel = lm.Compile(step, x).of(lambda model: (model["up"]["kernel"],))
            >>> model = sharded.materialize(compile=of_kernel)  # `step(model["up"]["kernel"], x)` compiles nothing now
        """
        if not self.is_step or not callable(split):
            raise LazyModelError(
                f"of() takes a function of the model that returns a tuple, for a jitted function; got {split!r} for "
                f"{self.what!r}"
            )
        other = copy.copy(self)
        other.split = split
        return other

    @property
    def is_use(self) -> bool:
        """Returns True if it is the model in use, and not an init program."""
        return self.what != INIT

    @property
    def is_called(self) -> bool:
        """Returns True if a call of a function runs it; False if a plan builds it from a forward pass or a loss."""
        return self.is_step or (self.function is None and self.what in (PREDICT, GENERATE))

    @property
    def is_step(self) -> bool:
        """Returns True if it is a function that is called with the model."""
        return self.what == "step"

    @property
    def name(self) -> str:
        """Its name, as text."""
        if self.function is None:
            return self.what
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def __repr__(self) -> str:
        def text(given: Any) -> str:  # without values
            leaves, tree = jax.tree.flatten(given)
            return repr(tree.unflatten(jax.typeof(leaf) if hasattr(leaf, "dtype") else leaf for leaf in leaves))

        given = [self.name if self.is_step else repr(self.what), *map(text, self.inputs)]
        given += [f"{name}={text(value)}" for name, value in (*self.keywords.items(), *self._sizes.items())]
        return f"Compile({', '.join(given)})"

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"batch": self.batch, "sequence": self.sequence}
        return {name: size for name, size in sizes.items() if size is not None}

    def _check(self, own: bool, options: Mapping[str, Any]) -> None:
        function, sizes = self.function, self._sizes
        wrong = next((each for each in self.inputs if not (own or _is_input(each))), None)
        wrong_sizes = [size for size in sizes.values() if type(size) is not int or size < 1]
        rules = (
            (options, f"a keyword of {self.what!r} is batch or sequence; got {', '.join(options)}"),
            (
                wrong is not None,
                "inputs are what the function takes after the model, one by one: pytrees of arrays or "
                f"jax.ShapeDtypeStruct(shape, dtype); got {wrong!r}",
            ),
            (
                self.what == INIT and (function is not None or sizes),
                f"'init' takes neither a function nor sizes; got {function} and {sizes}",
            ),
            (wrong_sizes, f"batch and sequence are positive numbers; got {sizes}"),
            (
                function is not None and not callable(function),
                f"a function is called with the model, then the inputs; got {function!r}",
            ),
            (
                function is not None and self.what in (PREDICT, GENERATE),
                f"{self.what!r} is the model's own; pass a jitted function without a name",
            ),
            (
                function is not None and sizes,
                "batch and sequence are for a model's own functions; give inputs of that shape",
            ),
            (
                self.inputs and self.batch is not None,
                f"the batch size of {self.what!r} is that of the inputs; leave batch out",
            ),
        )
        for is_wrong, message in rules:
            if is_wrong:
                raise LazyModelError(message)


def _is_input(given: Any) -> bool:
    """Returns True for a pytree of arrays, structs and numbers that is not a shape."""
    leaves: list[Any] = jax.tree.leaves(given)
    shape = isinstance(given, list | tuple) and given and all(type(size) is int for size in cast("list[Any]", given))
    return not shape and all(hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves)


def lower(model: ModelSpec, compile: Compile, shardings: Mapping[str, Sharding]) -> Sequence[LoweredFunction]:
    """The programs that a call will run, traced and lowered; nothing is compiled.

    A function that is not jitted is jitted here, for a plan.

    Raises:
        LazyModelError: The model has no such function of its own, or cannot be outlined.
        Exception: Any exception from tracing the function, with a note on its origin.
    """
    structs: dict[str, jax.ShapeDtypeStruct] = {}  # of the finished arrays
    for path, variable in model.items():
        struct = variable.struct
        if stays_on_host(variable):
            struct = struct.update(sharding=None)
        elif variable.sharding is None and variable.layout is None:
            struct = struct.update(sharding=shardings[path])
        structs[path] = struct
    if not compile.is_step:
        return model.framework.lowered(compile.what, structs, **call_options(compile))
    function: Any = compile.function
    if not callable(getattr(function, "lower", None)):
        function = jax.jit(function)

    def outline(leaf: Any) -> Any:
        return model.framework.outline(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    given = compile.inputs, dict(compile.keywords)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)):
        given = jax.tree.map(outline, given)
    with model.framework.outlined(structs) as whole:
        try:
            parts: Any = (whole,) if compile.split is None else compile.split(whole)
            if not isinstance(parts, list | tuple):
                raise LazyModelError(f"of() takes a function that returns a tuple; it returned {type(parts).__name__}")
            args = (*parts, *given[0])
            lowered = function.lower(*args, **given[1])
        except LazyModelError:
            raise
        except Exception as error:
            error.add_note(
                f"lazymodel: {compile.name} was called with {model.name} as it will be, to compile it beforehand "
                "(compile=); no weights were read. Its first call would fail like this."
            )
            raise
    # Results of Flax and Equinox are wrappers of JAX' own.
    return [LoweredFunction(compile.name, getattr(lowered, "lowered", lowered))]


def call_options(compile: Compile) -> dict[str, Any]:
    """Keywords that describe the call of a model's own function."""
    return {"inputs": compile.inputs, "batch": compile.batch, "sequence": compile.sequence}
