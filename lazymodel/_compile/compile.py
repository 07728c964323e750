"""Functions to compile for a model: defined once, for a plan and for materializing.

Responsible for the object and for checking it by itself. `_compile/lower` lowers it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self, cast

import jax

from lazymodel._errors import LazyModelError

INIT, FORWARD, PREDICT, TRAIN, GENERATE = "init", "forward", "predict", "train", "generate"
_NAMED = (INIT, FORWARD, PREDICT, TRAIN, GENERATE)
_OWN = (PREDICT, TRAIN, GENERATE)  # a model's own functions, whose arguments are given as examples or sizes
_SIZES = ("batch", "sequence")


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
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

    what: str
    function: Callable[..., Any] | None
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    batch: int | None
    sequence: int | None
    split: Callable[[Any], tuple[Any, ...]] | None

    def __init__(self, what: str | Callable[..., Any], /, *inputs: Any, **options: Any) -> None:
        function: Callable[..., Any] | None = None
        keywords: dict[str, Any] = {}
        if not (what in _NAMED if isinstance(what, str) else callable(what)):
            raise LazyModelError(
                f"what is compiled is a jitted function or one of {', '.join(map(repr, _NAMED))}; got {what!r}"
            )
        if not isinstance(what, str):
            what, function, keywords, options = "step", what, options, {}
        elif inputs and (what not in _OWN or callable(inputs[0])):
            function, inputs = inputs[0], inputs[1:]
        values = {
            "what": what,
            "function": function,
            "inputs": tuple(inputs),
            "keywords": MappingProxyType(keywords),
            **{name: options.pop(name, None) for name in _SIZES},
            "split": None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check(options)

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
        if self.what != "step":
            raise LazyModelError(f"only a jitted function is called with parts of the model; got {self.what!r}")
        if not callable(split):
            raise LazyModelError(f"of() takes a function of the model that returns a tuple; got {split!r}")
        other = object.__new__(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(other, field.name, split if field.name == "split" else getattr(self, field.name))
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
        sizes = {name: size for name in _SIZES if (size := getattr(self, name)) is not None}
        given = [self.name if self.is_step else repr(self.what), *map(_text, self.inputs)]
        given += [f"{name}={_text(value)}" for name, value in (*self.keywords.items(), *sizes.items())]
        return f"Compile({', '.join(given)})"

    def _check(self, options: Mapping[str, Any]) -> None:
        if options:
            raise LazyModelError(f"a keyword of {self.what!r} is batch or sequence; got {', '.join(options)}")
        own = self.function is None and self.what in _OWN
        if wrong_inputs := [each for each in self.inputs if not (self.is_step or own or _is_input(each))]:
            got = wrong_inputs[0]
            raise LazyModelError(
                "inputs are what the function takes after the model, one by one: pytrees of arrays or "
                "jax.ShapeDtypeStruct(shape, dtype); got "
                + (repr(got) if isinstance(got, str | list | tuple) else type(got).__name__)
            )
        sizes = {name: size for name in _SIZES if (size := getattr(self, name)) is not None}
        if self.what == INIT:
            given = {"a function": self.function is not None, **sizes}
            if named := [name for name, value in given.items() if value]:
                raise LazyModelError(f"'init' takes neither a function nor sizes; got {' and '.join(named)}")
        if wrong := {name: size for name, size in sizes.items() if type(size) is not int or size < 1}:
            raise LazyModelError(f"batch and sequence are positive numbers; got {wrong}")
        if self.function is not None and not callable(self.function):
            raise LazyModelError(f"a function is called with the model, then the inputs; got {self.function!r}")
        if self.function is not None and self.what in (PREDICT, GENERATE):
            raise LazyModelError(f"{self.what!r} is the model's own; pass a jitted function without a name")
        if self.function is not None and sizes:
            raise LazyModelError("batch and sequence are for a model's own functions; give inputs of that shape")
        if self.inputs and self.batch is not None:
            raise LazyModelError(f"the batch size of {self.what!r} is that of the inputs; leave batch out")


def _text(given: Any) -> str:
    """An input as text, without its values."""

    def short(leaf: Any) -> Any:
        return jax.typeof(leaf) if hasattr(leaf, "dtype") else leaf

    return repr(jax.tree.map(short, given))


def _is_input(given: Any) -> bool:
    """Returns True for a pytree of arrays, structs and numbers that is not a shape."""
    leaves: list[Any] = jax.tree.leaves(given)
    shape = isinstance(given, list | tuple) and given and all(type(size) is int for size in cast("list[Any]", given))
    return not shape and all(hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves)
