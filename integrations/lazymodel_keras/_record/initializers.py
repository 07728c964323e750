"""Initial values of variables: Keras' own initializers become init programs; all others run when Keras runs them.

An initializer of a class of Keras is a function of its attributes, a seed, the shape and the dtype. Its state at its
turn is recorded; variables that differ only in their seeds share one program. An integer seed `s` means `uint32[2]`
`[s, 0]` to Keras on JAX, and passing that array instead gives the same values bit for bit.

Any other initializer may read or change anything, so it is called once, with the arguments that Keras would pass. Up to
`LARGE` bytes it computes its value at once. Larger values are traced, so that each device computes its own shard; if
tracing is not possible, the value is kept whole on the host.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import inspect
import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lazymodel import LazyModelError, LazyTensor
from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._programs.jaxprs import CONFIG, uses_x64
from lazymodel._programs.programs import InitRecipe, given_recipe
from lazymodel._tensors.shards import DeviceTensor
from lazymodel._trace.errors import on_host
from lazymodel._trace.function import trace_function
from lazymodel_keras import _upstream

LARGE = 1 << 20  # bytes; a decoder's hundreds of smaller variables fit on any host
_TEMPLATES = 512  # kept for later models; a decoder needs about ten
_TEMPLATE_SEED = np.asarray([0x5BD1E995, 0x9E3779B9], np.uint32)  # identifies the seed among a program's inputs

_KERAS = frozenset(
    cls
    for cls in vars(keras.initializers).values()
    if isinstance(cls, type) and issubclass(cls, keras.initializers.Initializer)
)

Source: TypeAlias = "InitRecipe | LazyTensor | np.ndarray[Any, Any]"


@dataclasses.dataclass(frozen=True)
class GivenValue:
    """An array that is the initial value of a variable.

    Attributes:
        value: The array.
        origin: The name of the initializer that made it, or `constant`.
        computed: True if an initializer made it, False if the code that created the variable did.
    """

    value: Any
    origin: str = "constant"
    computed: bool = False

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        with contextlib.nullcontext() if self.whole_nbytes > LARGE else jax.ensure_compile_time_eval():
            return keras.ops.convert_to_tensor(self.value, dtype=None if self.computed else dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def whole_nbytes(self) -> int:
        """Bytes that it takes on the host."""
        return 0 if isinstance(self.value, LazyTensor) else self.value.nbytes

    def source(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Source, np.dtype[Any]]:
        """The source of the variable's value, and the dtype of the value."""
        array = self.value if isinstance(self.value, LazyTensor) else np.asarray(self.value)
        if not self.computed:
            return array, dtype
        # Such as the state of a generator, which no checkpoint holds.
        is_state = not jnp.issubdtype(array.dtype, jnp.inexact)
        if isinstance(array, LazyTensor) or array.nbytes > LARGE or is_state:
            return array, array.dtype
        return given_recipe(path, array, self.origin), array.dtype


@dataclasses.dataclass(frozen=True)
class TracedInitializer:
    """An initializer that was called once, under a trace."""

    variable: AbstractVariable
    recipe: InitRecipe
    origin: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variable.shape

    def source(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Source, np.dtype[Any]]:
        return dataclasses.replace(self.recipe, paths=(path,), origin=self.origin), self.variable.dtype

    def __call__(self, shape: Any, dtype: Any = None) -> jax.Array:
        return self.recipe.function(*self.recipe.inputs)[0]


@dataclasses.dataclass(frozen=True)
class KerasInitializer:
    """One of Keras' own initializers in its state at its turn: a function of the seed, the shape and the dtype."""

    kind: type[Any]
    attributes: Mapping[str, Any]  # all except the seed: numbers and strings, also in tuples and lists
    seed: np.ndarray[Any, Any] | None

    shape: ClassVar[None] = None  # the variable's own
    _templates: ClassVar[collections.OrderedDict[Hashable, tuple[ModelSpec, int | None]]] = collections.OrderedDict()

    @property
    def origin(self) -> str:
        return self.kind.__name__

    def source(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Source, np.dtype[Any]]:
        model, seed_input = self._template(shape, dtype.name)
        (variable,) = model.values()
        if not model.recipes:
            return model.sources[variable.path], variable.dtype
        (recipe,) = model.recipes
        inputs = [self.seed if index == seed_input else value for index, value in enumerate(recipe.inputs)]
        recipe = dataclasses.replace(recipe, paths=(path,), inputs=tuple(inputs), origin=self.origin)
        return recipe, variable.dtype

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> jax.Array:
        return self._run(shape, dtype, self.seed)

    def _run(self, shape: tuple[int, ...], dtype: str, seed: Any = None) -> jax.Array:
        initializer = object.__new__(self.kind)
        vars(initializer).update(self.attributes)
        if seed is not None:
            initializer.seed = jnp.asarray(seed)
        return jnp.asarray(initializer(shape, dtype=dtype))

    def _template(self, shape: tuple[int, ...], dtype: str) -> tuple[ModelSpec, int | None]:
        """The initializer traced with a placeholder seed, and the index of the seed among the program's inputs."""
        # `repr` also distinguishes equal numbers: -0.0 and 0.0, 1 and True.
        config = (uses_x64(), CONFIG.jax_threefry_partitionable, CONFIG.jax_default_prng_impl)
        key = (self.kind, repr(self.attributes), self.seed is None, shape, dtype, *config)
        if (template := self._templates.get(key)) is None:
            model = self._traced(shape, dtype, _TEMPLATE_SEED)
            inputs = model.recipes[0].inputs if model.recipes else ()
            found = [index for index, value in enumerate(inputs) if value.tobytes() == _TEMPLATE_SEED.tobytes()]
            if self.seed is not None and len(found) != 1:
                return self._traced(shape, dtype, self.seed), None
            template = self._templates[key] = model, found[0] if found else None
            while len(self._templates) > _TEMPLATES:
                self._templates.popitem(last=False)
        return template

    def _traced(self, shape: tuple[int, ...], dtype: str, seed: np.ndarray[Any, Any]) -> ModelSpec:
        # A NumPy array would be a constant of the function, rather than an input.
        seeds = () if self.seed is None else (jnp.asarray(seed),)
        return trace_function(lambda *seed: self._run(shape, dtype, *seed), seeds, {})


# Each of these is also an initializer, which can be called any number of times without side effects.
InitialValue: TypeAlias = "GivenValue | TracedInitializer | KerasInitializer"


def value_on_host(initial: InitialValue, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """The whole initial value, bit for bit as the devices of a variable would compute it."""
    if isinstance(initial, GivenValue):
        return np.asarray(initial.value, None if initial.computed else jnp.dtype(dtype))
    with on_host(), jax.ensure_compile_time_eval():
        return np.asarray(initial(shape, dtype))


def initial_value(variable: Any, initializer: Any) -> InitialValue:
    """The initial value of a variable; call it once for each variable, at its turn."""
    if isinstance(initializer, GivenValue):
        return initializer
    if (own := _keras_initializer(initializer)) is not None:
        return own
    origin = getattr(initializer, "__name__", type(initializer).__name__)
    shape, dtype = tuple(variable.shape), _upstream.own_dtype(variable)
    placed = _upstream.layout(variable) is not None or keras.distribution.distribution() is not None
    if placed and "layout" in inspect.signature(initializer).parameters:  # Keras 3.14 and newer pass it
        array = _upstream.initialized(variable, initializer)
        return GivenValue(LazyTensor(DeviceTensor(variable.path, array)), origin, computed=True)

    def run() -> Any:
        return _upstream.as_tensor(variable, initializer(shape, dtype=dtype), None)

    if math.prod(shape) * jnp.dtype(dtype).itemsize > LARGE:
        # It may need the values of arrays; any other error occurs again below.
        with contextlib.suppress(Exception), _undone_if_not_traced():
            return _computed(trace_function(run, (), {}, once=True), origin)
    error: Exception | None = None
    try:
        with jax.ensure_compile_time_eval():  # even inside another trace
            values = run()
            if not isinstance(values, jax.core.Tracer):
                return GivenValue(np.array(values), origin, computed=True)
    except jax.errors.UnexpectedTracerError as unexpected:
        error = unexpected
    raise LazyModelError(
        f"{variable.path} {shape}: its initializer {origin} keeps an array of JAX from when it was traced for a "
        f"variable of more than {LARGE >> 20} MiB. Have it keep a NumPy array, or compute it before the model is built"
    ) from error


def _computed(model: ModelSpec, origin: str) -> InitialValue:
    """The traced initializer, or its value if its inputs are large NumPy arrays, which every device would hold."""
    (variable,) = model.values()
    if not model.recipes:
        return GivenValue(np.array(model.sources[variable.path]), origin, computed=True)
    traced = TracedInitializer(variable, model.recipes[0], origin)
    if any(value.nbytes > LARGE for value in traced.recipe.inputs):
        values = value_on_host(traced, variable.shape, variable.dtype.name)
        return GivenValue(values, origin, computed=True)
    return traced


def _keras_initializer(initializer: Any) -> KerasInitializer | None:
    """The record of one of Keras' own initializers, for which a seed generator draws; None for any other."""
    kind, seed = type(initializer), getattr(initializer, "seed", None)
    if kind not in _KERAS or not isinstance(seed, int | keras.random.SeedGenerator | None):
        return None
    attributes = {name: value for name, value in vars(initializer).items() if name not in ("seed", "_init_seed")}
    if not all(map(_is_plain, attributes.values())):
        return None
    if isinstance(seed, keras.random.SeedGenerator):
        seed = np.asarray(seed.next())
    elif seed is not None:
        seed = np.asarray([seed, 0], np.uint32)
    return KerasInitializer(kind, copy.deepcopy(attributes), seed)


def _is_plain(value: Any) -> bool:
    """Returns True if equal representations mean equal values."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str) or isinstance(value, np.number)


@contextlib.contextmanager
def _undone_if_not_traced() -> Generator[None]:
    """Undoes the draws of an initializer inside the block if it fails."""
    undo = _upstream.remembered_draws()
    recording = _upstream.active()
    recording.draws = []
    try:
        yield
    except Exception:
        undo()
        for state, value in reversed(recording.draws):
            state.assign(value)
        raise
    finally:
        recording.draws = None


def _seeds_are_known(recording: Any) -> contextlib.AbstractContextManager[Any]:
    """Computes concrete values inside an initializer that is traced."""
    return contextlib.nullcontext() if recording.draws is None else jax.ensure_compile_time_eval()


@_upstream.while_recording(keras.random.SeedGenerator, "next")
def _next(recording: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with _seeds_are_known(recording):
        if recording.draws is not None:
            recording.draws.append((self.state, self.state.value))
        return original(self, *args, **kwargs)


@_upstream.while_recording(_upstream.SEED_GENERATORS, "global_seed_generator")
def _global_generator(recording: Any, original: Any) -> Any:
    with _seeds_are_known(recording):
        return original()
