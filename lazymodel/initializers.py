"""Depth- and width-scaled initialization, for `AbstractModel.reinitialize`.

Three building blocks take or make an initializer: `depth_scaled`, `width_scaled`, `stacked`. Three schemes are rules,
path patterns to initializers, made of them: `gpt2`, `mup`, `fixup`. Which variables are residual outputs or readouts
is the user's to say, as patterns: no name of a variable is known here. An initializer is any callable of
(key, shape, dtype), `jax.nn.initializers`' own first of all, whose names are not repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from lazymodel._errors import LazyModelError

Initializer: TypeAlias = "Callable[..., Any]"

__all__ = ["depth_scaled", "fixup", "gpt2", "mup", "stacked", "width_scaled"]


def depth_scaled(initializer: Initializer, layers: int | None = None, *, branches: int = 2) -> Initializer:
    """An initializer's values divided by the square root of how many residual branches are summed.

    Args:
        initializer: The initializer for a single branch.
        layers: Layers of the model: all are divided by `sqrt(branches * layers)`, as GPT-2 does (Radford et al. 2019,
            section 2.3). None divides by `sqrt(branches * (layer + 1))`, which grows with the depth at which a layer
            stands (depth-scaled initialization, Zhang, Titov and Sennrich 2019); the pattern must capture `{layer}`,
            counted from 0.
        branches: Residual branches of one layer: 2 in a transformer, attention and feed-forward.

    Example:
        >>> quarter = lm.initializers.depth_scaled(jax.nn.initializers.ones, layers=8)
        >>> quarter(jax.random.key(0), (1,), "float32").tolist()
        [0.25]
    """
    if branches < 1 or (layers is not None and layers < 1):
        raise LazyModelError(f"depth_scaled needs at least one layer and branch; got {layers} and {branches}")

    def by_depth(key: jax.Array, shape: Sequence[int], dtype: Any, layer: int | str) -> jax.Array:
        if isinstance(layer, str):  # captured, but no number
            raise LazyModelError(f"depth_scaled needs the number of the layer; {{layer}} captured {layer!r}")
        return initializer(key, shape, dtype) * _scalar(1 / math.sqrt(branches * (layer + 1)), dtype)

    return by_depth if layers is None else _scaled(initializer, 1 / math.sqrt(branches * layers))


def width_scaled(
    std: float = 0.02, base: int | None = None, *, power: float = 0.5, in_axis: int | Sequence[int] = -2
) -> Initializer:
    """A normal distribution whose standard deviation shrinks with the fan-in: `std * (base / fan_in) ** power`.

    Args:
        std: Standard deviation of a layer whose fan-in is `base`.
        base: The fan-in of the model that `std` was chosen for; None is 1, so `std` is that of a single input.
        power: 1/2 keeps the variance of a sum over the inputs (hidden layers), 1 makes it shrink with the width
            (readouts in muP).
        in_axis: The axis, or axes, summed over; the fan-in is their extent.

    Example:
        >>> hidden = lm.initializers.width_scaled(0.02, base=16)
        >>> round(float(hidden(jax.random.key(0), (64, 4096), "float32").std()), 3)
        0.01
    """

    def scaled(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        axes = (in_axis,) if isinstance(in_axis, int) else tuple(in_axis)
        if any(not -len(shape) <= axis < len(shape) for axis in axes):
            raise LazyModelError(f"width_scaled: in_axis={in_axis} is no axis of shape {tuple(shape)}")
        fan_in = math.prod(shape[axis] for axis in axes)
        return jax.random.normal(key, shape, dtype) * _scalar(std * ((base or 1) / max(fan_in, 1)) ** power, dtype)

    return scaled


def stacked(initializer: Initializer, axis: int = 0) -> Initializer:
    """Initializes every layer of a scanned model by itself, as if they were not stacked.

    An initializer that looks at the shape would take the axis of layers for a part of the fan-in. Layer `i` is
    `initializer(jax.random.split(key, layers)[i], shape without the axis, dtype)`.

    Args:
        initializer: The initializer of one layer.
        axis: The axis that counts layers.

    Example:
        >>> each = lm.initializers.stacked(jax.nn.initializers.lecun_normal())
        >>> each(jax.random.key(0), (12, 64, 256), "float32").shape
        (12, 64, 256)
    """

    def whole(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        if not -len(shape) <= axis < len(shape):
            raise LazyModelError(f"stacked: there is no axis {axis} in shape {tuple(shape)}")
        place = axis % len(shape)
        one = (*shape[:place], *shape[place + 1 :])

        def layer(key: jax.Array) -> jax.Array:
            return initializer(key, one, dtype)

        return jax.vmap(layer, out_axes=place)(jax.random.split(key, shape[place]))

    return whole


def gpt2(layers: int, *, weights: str, residual: str, std: float = 0.02, branches: int = 2) -> dict[str, Initializer]:
    """Rules of GPT-2: normal weights, those of residual outputs scaled by `1 / sqrt(branches * layers)`.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3, N being the number
    of residual branches. Biases and norms keep the model's own initializers.

    Args:
        layers: Layers of the model.
        weights: Pattern of all kernels and embeddings, such as `r".*/(kernel|embedding)"`.
        residual: Pattern of the kernels that write into the residual stream, such as `r".*/(out|down)/kernel"`.
        std: Standard deviation of `weights`.
        branches: Residual branches of one layer.

    Example:
        >>> rules = lm.initializers.gpt2(12, weights=".*/kernel", residual="down/kernel")
        >>> round(float(abstract.reinitialize(rules, key=0).materialize()["up"]["kernel"].std()), 2)
        0.02
    """
    normal = jax.nn.initializers.normal(std)
    return {residual: depth_scaled(normal, layers, branches=branches), weights: normal}


def mup(
    *, hidden: str, readout: str, base: int, std: float = 0.02, in_axis: int | Sequence[int] = -2
) -> dict[str, Initializer]:
    """Rules of the maximal update parametrization's initialization: variance `1 / fan_in`, for readouts `1 / fan_in²`.

    Source: Yang et al., Tensor Programs V, 2022, table 3. At width `base` all standard deviations are `std`, so
    hyperparameters found there carry over; embeddings and biases do not change with the width and need no rule.
    This is the initialization only: muP also wants learning rates that fall as `1 / fan_in` (Adam) and attention
    divided by the head size rather than its root.

    Args:
        hidden: Pattern of kernels from width to width.
        readout: Pattern of kernels from width to a fixed size, such as logits.
        base: Fan-in of the base model.
        std: Standard deviation there.
        in_axis: As for `width_scaled`.

    Example:
        >>> rules = lm.initializers.mup(hidden="up/kernel", readout="down/kernel", base=64)
        >>> round(float(abstract.reinitialize(rules, key=0).materialize()["down"]["kernel"].std()), 3)
        0.005
    """
    return {
        readout: width_scaled(std, base, power=1.0, in_axis=in_axis),
        hidden: width_scaled(std, base, power=0.5, in_axis=in_axis),
    }


def fixup(
    branches: int, *, weights: str, residual: str, initializer: Initializer | None = None, depth: int = 2
) -> dict[str, Initializer]:
    """Rules of Fixup: zero residual outputs, other weights of a branch scaled by `branches ** (-1 / (2 depth - 2))`.

    Source: Zhang, Dauphin and Ma, Fixup Initialization, 2019, section 4. Every branch begins as zero, so a network
    without norms begins as its skip connections. The scalar multipliers and biases that Fixup adds are the model's.

    Args:
        branches: Residual branches of the model: 2 a layer in a transformer.
        weights: Pattern of the kernels inside of branches.
        residual: Pattern of the last kernel of every branch, and of the readout; it goes before `weights`.
        initializer: What is scaled; None is `jax.nn.initializers.he_normal()`.
        depth: Kernels of one branch, at least 2.

    Example:
        >>> rules = lm.initializers.fixup(24, weights="up/kernel", residual="down/kernel")
        >>> abstract.reinitialize(rules, key=0).materialize()["down"]["kernel"].std().item()
        0.0
    """
    if depth < 2 or branches < 1:
        raise LazyModelError(f"fixup needs branches of at least 2 kernels; got depth={depth}, branches={branches}")
    inner = initializer or jax.nn.initializers.he_normal()
    return {residual: jax.nn.initializers.zeros, weights: _scaled(inner, branches ** (-1 / (2 * depth - 2)))}


def _scaled(initializer: Initializer, factor: float) -> Initializer:
    def scaled(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return initializer(key, shape, dtype) * _scalar(factor, dtype)

    return scaled


def _scalar(value: float, dtype: Any) -> jax.Array:
    return jnp.asarray(value, dtype)
