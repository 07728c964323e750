"""Keras initializers as init recipes, or as constants where running one is cheaper than compiling it.

The seed is an input of the program, so that variables which differ in nothing else share one. An integer seed `s`
means `uint32[2]` `[s, 0]` to Keras on JAX, and passing that array instead gives the same values bit for bit.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lazymodel._programs.programs import InitRecipe
from lazymodel._trace.function import trace_function
from lazymodel._trace.small import on_host
from lazymodel_keras import _upstream
from lazymodel_keras._record.recording import GivenValue, RecordedVariable

# Callables that are not Keras initializers (such as the one that sets a SeedGenerator's state) are run at once up to
# this size; a compiled program for each would take longer than the values do.
_EAGER_SIZE = 4096
_TEMPLATES = 512  # kept for later models; a decoder has about ten

_SEED_ATTRIBUTES = ("seed", "_init_seed")


# An init recipe and which of its inputs is the seed (None if it is not found among them), or a constant: what an
# initializer comes down to for one shape and dtype.
_Template: TypeAlias = "tuple[InitRecipe, int | None] | np.ndarray"

_templates: collections.OrderedDict[Hashable, _Template] = collections.OrderedDict()


def initial_value(path: str, variable: Any, recorded: RecordedVariable) -> InitRecipe | np.ndarray:
    """How the variable's initial value is computed on its devices, or the value itself where it needs no program."""
    initializer = recorded.initializer
    shape, dtype = tuple(variable.shape), _upstream.own_dtype(variable)
    if isinstance(initializer, GivenValue):
        return np.asarray(initializer.value)
    is_keras = isinstance(initializer, keras.initializers.Initializer)
    if not is_keras and int(np.prod(shape)) <= _EAGER_SIZE:
        with on_host():
            return np.asarray(initializer(shape, dtype=dtype))
    seed = recorded.seed if recorded.seed is not None else getattr(initializer, "seed", None)
    if isinstance(seed, int):
        seed = np.asarray([seed, 0], dtype=np.uint32)
    if not is_keras or not isinstance(seed, np.ndarray):
        seed = None
    key = _key(initializer, shape, dtype, seeded=seed is not None)
    template = None if key is None else _templates.get(key)
    if template is None or (seed is not None and not (isinstance(template, tuple) and template[1] is not None)):
        template = _make_template(initializer, shape, dtype, seed)
        if key is not None:
            _templates[key] = template
            while len(_templates) > _TEMPLATES:
                _templates.popitem(last=False)
    if not isinstance(template, tuple):
        return template
    recipe, seed_input = template
    inputs = [seed if index == seed_input else value for index, value in enumerate(recipe.inputs)]
    origin = getattr(initializer, "__name__", type(initializer).__name__)
    return dataclasses.replace(recipe, paths=(path,), inputs=tuple(inputs), origin=origin)


def host_value(variable: Any, recorded: RecordedVariable) -> Callable[[], np.ndarray]:
    """A function that computes the variable's whole initial value on the host, bit for bit as its devices would."""
    initializer, shape, dtype = recorded.initializer, tuple(variable.shape), _upstream.own_dtype(variable)
    seed = () if recorded.seed is None else (recorded.seed,)

    def make() -> np.ndarray:
        with on_host():
            return np.asarray(_function(initializer, shape, dtype)(*seed))

    return make


def _make_template(initializer: Any, shape: tuple[int, ...], dtype: str, seed: np.ndarray | None) -> _Template:
    """Traces the initializer; a second time with another seed, to see which inputs the seed decides."""

    def traced(seed: np.ndarray | None) -> InitRecipe | np.ndarray:
        # A NumPy array would be a constant of the function, rather than an input.
        seeds = () if seed is None else (jnp.asarray(seed),)
        model = trace_function(_function(initializer, shape, dtype), seeds, {})
        (path,) = model
        return model.sources[path] if path in model.sources else model.recipes[0]

    recipe = traced(seed)
    if not isinstance(recipe, InitRecipe):
        return recipe
    if seed is None:
        return recipe, None
    other = seed ^ np.uint32(0x5BD1E995)
    again = traced(other)
    assert isinstance(again, InitRecipe)
    pairs = list(zip(recipe.inputs, again.inputs, strict=True))
    differing = [index for index, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()]
    if len(differing) != 1:
        return recipe, None
    found = pairs[differing[0]]
    is_seed = all(a.dtype == np.uint32 and np.array_equal(a, s) for a, s in zip(found, (seed, other), strict=True))
    return recipe, differing[0] if is_seed else None


def _function(initializer: Any, shape: tuple[int, ...], dtype: str) -> Callable[..., jax.Array]:
    def initialize(*seed: jax.Array) -> jax.Array:
        seeded = initializer
        if seed:
            seeded = copy.copy(initializer)
            seeded.seed = seed[0]
        return jnp.asarray(seeded(shape, dtype=dtype))

    return initialize


def _key(initializer: Any, shape: tuple[int, ...], dtype: str, *, seeded: bool) -> Hashable | None:
    """Equal keys surely mean the same function of the seed. None where that cannot be told from the outside."""
    if not isinstance(initializer, keras.initializers.Initializer):
        return None
    left_out = _SEED_ATTRIBUTES if seeded else ()
    try:
        attributes = _frozen({name: value for name, value in vars(initializer).items() if name not in left_out})
    except TypeError:
        return None
    return (type(initializer), attributes, shape, dtype, bool(jax.config.read("jax_enable_x64")))


def _frozen(value: Any) -> Hashable:
    """A hashable form of an initializer's attributes; two forms are equal only if the attributes surely are.

    Raises:
        TypeError: An attribute is an object that only its own class could compare.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value), value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(_frozen(item) for item in value))
    if isinstance(value, dict):
        return (dict, tuple((str(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return (np.ndarray, array.dtype.str, array.shape, array.tobytes())
    raise TypeError(f"{type(value).__name__} cannot be compared")
