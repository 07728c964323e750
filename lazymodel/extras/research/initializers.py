"""Initializations that research compares, for `AbstractModel.reinitialize`, each with its source.

Initializers: `glorot`, `he`, `lecun` and `orthogonal`, which are those of `jax.nn.initializers`, and `identity`.
Building blocks take or make one: `depth_scaled`, `width_scaled`, `stacked`. Schemes are rules, path patterns to
initializers: `gpt2`, `small_init`, `deepnet`, `t_fixup`, `fixup`, `zero_residual`, `mup`. The user gives patterns for
residual outputs and readouts: this module knows no names of variables. An initializer is any callable of
(key, shape, dtype).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from lazymodel._errors import LazyModelError

Initializer: TypeAlias = "Callable[..., Any]"
Axes: TypeAlias = "int | Sequence[int]"

__all__ = [
    "deepnet",
    "depth_scaled",
    "fixup",
    "glorot",
    "gpt2",
    "he",
    "identity",
    "lecun",
    "mup",
    "orthogonal",
    "small_init",
    "stacked",
    "t_fixup",
    "width_scaled",
    "zero_residual",
]


def glorot(gain: float = 1.0, *, uniform: bool = False, in_axis: Axes = -2, out_axis: Axes = -1) -> Initializer:
    """Variance `gain² · 2 / (fan_in + fan_out)`: keeps sizes in the forward and backward pass, on average.

    Source: Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, 2010, eq. 16.

    Args:
        gain: Factor of the values.
        uniform: True draws uniform numbers, False truncated normal ones.
        in_axis: Axes that are summed over.
        out_axis: Axes of the outputs; all others, such as a convolution's window, count on both sides.

    Example:
        >>> round(float(lm.initializers.glorot()(jax.random.key(0), (100, 300), "float32").std()), 2)
        0.07
    """
    return _variance(gain**2, "fan_avg", uniform, in_axis, out_axis)


def he(*, uniform: bool = False, in_axis: Axes = -2, out_axis: Axes = -1) -> Initializer:
    """Variance `2 / fan_in`, which keeps sizes through ReLU. Arguments are as for `glorot`.

    Source: He et al., Delving Deep into Rectifiers, 2015, eq. 10.

    Example:
        >>> kernel = lm.initializers.he(in_axis=(0, 1), out_axis=2)(jax.random.key(0), (8, 25, 300), "float32")
        >>> round(float(kernel.std()), 2)
        0.1
    """
    return _variance(2.0, "fan_in", uniform, in_axis, out_axis)


def lecun(*, uniform: bool = False, in_axis: Axes = -2, out_axis: Axes = -1) -> Initializer:
    """Variance `1 / fan_in`. Arguments are as for `glorot`.

    Source: LeCun, Bottou, Orr and Müller, Efficient BackProp, 1998, section 4.6.

    Example:
        >>> round(float(lm.initializers.lecun()(jax.random.key(0), (100, 300), "float32").std()), 2)
        0.1
    """
    return _variance(1.0, "fan_in", uniform, in_axis, out_axis)


def _variance(scale: float, mode: Any, uniform: bool, in_axis: Axes, out_axis: Axes) -> Initializer:
    distribution = "uniform" if uniform else "truncated_normal"
    return jax.nn.initializers.variance_scaling(scale, mode, distribution, in_axis, out_axis)


def orthogonal(gain: float = 1.0, *, out_axis: int = -1) -> Initializer:
    """A random matrix whose singular values are all `gain`.

    Source: Saxe, McClelland and Ganguli, Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks, 2014.

    Args:
        gain: The singular values.
        out_axis: The axis of outputs; all others together are inputs.

    Example:
        >>> kernel = lm.initializers.orthogonal()(jax.random.key(0), (4, 4), "float32")
        >>> bool(jax.numpy.allclose(kernel @ kernel.T, jax.numpy.eye(4), atol=1e-5))
        True
    """
    return jax.nn.initializers.orthogonal(gain, out_axis)


def identity(gain: float = 1.0) -> Initializer:
    """`gain` times the identity, in the last two axes; the rest of a rectangle is 0.

    Source: Le, Jaitly and Hinton, A Simple Way to Initialize Recurrent Networks of Rectified Linear Units, 2015.

    Example:
        >>> lm.initializers.identity(2)(None, (2, 3), "float32").tolist()
        [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    """

    def initialize(key: jax.Array | None, shape: Sequence[int], dtype: Any) -> jax.Array:
        if len(shape) < 2:
            raise LazyModelError(f"identity needs a matrix; got shape {tuple(shape)}")
        return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype) * _scalar(gain, dtype), tuple(shape))

    return initialize


def depth_scaled(initializer: Initializer, layers: int | None = None, *, branches: int = 2) -> Initializer:
    """An initializer whose values are divided by the square root of the number of residual branches that are summed.

    Args:
        initializer: The initializer for a single branch.
        layers: Layers of the model: all are divided by `sqrt(branches * layers)`, as in GPT-2 (Radford et al. 2019,
            section 2.3). None divides by `sqrt(branches * (layer + 1))`, which grows with the depth of the layer
            (depth-scaled initialization, Zhang, Titov and Sennrich 2019); the pattern must capture `{layer}`, counted
            from 0.
        branches: Residual branches of one layer: 2 in a transformer, attention and feed-forward.

    Example:
        >>> quarter = lm.initializers.depth_scaled(jax.nn.initializers.ones, layers=8)
        >>> quarter(jax.random.key(0), (1,), "float32").tolist()
        [0.25]
    """
    if branches < 1 or (layers is not None and layers < 1):
        raise LazyModelError(f"depth_scaled needs at least one layer and branch; got {layers} and {branches}")

    def by_depth(key: jax.Array, shape: Sequence[int], dtype: Any, layer: int | str) -> jax.Array:
        if isinstance(layer, str):  # captured, but not a number
            raise LazyModelError(f"depth_scaled needs the number of the layer; {{layer}} captured {layer!r}")
        return initializer(key, shape, dtype) * _scalar(1 / math.sqrt(branches * (layer + 1)), dtype)

    return by_depth if layers is None else _scaled(initializer, 1 / math.sqrt(branches * layers))


def width_scaled(std: float = 0.02, base: int | None = None, *, power: float = 0.5, in_axis: Axes = -2) -> Initializer:
    """A normal distribution whose standard deviation shrinks with the fan-in: `std * (base / fan_in) ** power`.

    Args:
        std: Standard deviation of a layer whose fan-in is `base`.
        base: The fan-in of the model that `std` was chosen for; None is 1, so `std` is that of a single input.
        power: 1/2 keeps the variance of a sum over the inputs (hidden layers), 1 makes it shrink with the width
            (readouts in muP).
        in_axis: The axis, or axes, summed over; the fan-in is their size.

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
    """Initializes every layer of a scanned model separately, as if they were not stacked.

    Without it, an initializer that uses the shape would count the axis of layers in the fan-in. Layer `i` is
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
    """Rules of GPT-2: normal weights; those of residual outputs are scaled by `1 / sqrt(branches * layers)`.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3, with N, the number
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


def small_init(
    width: int, *, weights: str, residual: str | None = None, layers: int | None = None
) -> dict[str, Initializer]:
    """Rules of small init: normal weights of standard deviation `sqrt(2 / (5 width))`.

    Source: Nguyen and Salazar, Transformers without Tears, 2019, section 2.2. Residual outputs of standard deviation
    `2 / (layers sqrt(width))` are from Black et al., GPT-NeoX-20B, 2022, section 2.1.

    Args:
        width: Width of the residual stream.
        weights: Pattern of all kernels.
        residual: Pattern of the kernels that write into the residual stream; None treats all alike.
        layers: Layers of the model; needed with `residual`.

    Example:
        >>> rules = lm.initializers.small_init(1000, weights=".*/kernel")
        >>> round(float(abstract.reinitialize(rules, key=0).materialize()["up"]["kernel"].std()), 2)
        0.02
    """
    small = {weights: jax.nn.initializers.normal(math.sqrt(2 / (5 * width)))}
    if residual is None:
        return small
    if layers is None or layers < 1:
        raise LazyModelError(f"small_init with residual needs the number of layers; got {layers}")
    return {residual: jax.nn.initializers.normal(2 / (layers * math.sqrt(width))), **small}


def deepnet(
    layers: int, *, weights: str, residual: str, in_axis: Axes = -2, out_axis: Axes = -1
) -> tuple[dict[str, Initializer], float]:
    """Rules of DeepNet for a decoder or an encoder, and the alpha by which its code multiplies the skip connection.

    Glorot's initializer; `residual` has a gain of `(8 layers) ** (-1/4)`; alpha is `(2 layers) ** (1/4)`, in
    `norm(alpha * x + branch(x))`. Source: Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, 2022, figure 2.

    Args:
        layers: Layers of the model.
        weights: Pattern of the other kernels, queries and keys.
        residual: Pattern of the kernels of values, of attention's output and of feed-forward layers.
        in_axis: As for `glorot`.
        out_axis: As for `glorot`.

    Example:
        >>> rules, alpha = lm.initializers.deepnet(8, weights="up/kernel", residual="down/kernel")
        >>> alpha, round(float(abstract.reinitialize(rules, key=0).materialize()["down"]["kernel"].std()), 3)
        (2.0, 0.028)
    """
    if layers < 1:
        raise LazyModelError(f"deepnet needs at least one layer; got {layers}")
    scaled = glorot((8 * layers) ** -0.25, in_axis=in_axis, out_axis=out_axis)
    return {residual: scaled, weights: glorot(in_axis=in_axis, out_axis=out_axis)}, (2 * layers) ** 0.25


def t_fixup(
    layers: int, *, weights: str, residual: str, embeddings: str, width: int, decoder: bool = True
) -> dict[str, Initializer]:
    """Rules of T-Fixup, with which a transformer trains without norms and without warm-up.

    Glorot's initializer; `residual` is multiplied by `(9 layers) ** (-1/4)` in a decoder and `0.67 layers ** (-1/4)` in
    an encoder; embeddings have the standard deviation `width ** (-1/2)` times the same. Source: Huang et al., Improving
    Transformer Optimization Through Better Initialization, 2020, section 3.

    Args:
        layers: Layers of the decoder or encoder.
        weights: Pattern of the other kernels, queries and keys.
        residual: Pattern of the kernels of values, of attention's output and of feed-forward layers.
        embeddings: Pattern of the embeddings.
        width: Width of the residual stream.
        decoder: True for a decoder, False for an encoder.

    Example:
        >>> rules = lm.initializers.t_fixup(9, weights="b", residual="down/kernel", embeddings="a", width=64)
        >>> round(float(rules["a"](jax.random.key(0), (1000, 64), "float32").std()), 3)
        0.042
    """
    if layers < 1:
        raise LazyModelError(f"t_fixup needs at least one layer; got {layers}")
    factor = (9 * layers) ** -0.25 if decoder else 0.67 * layers**-0.25
    normal = jax.nn.initializers.normal(factor * width**-0.5)
    return {residual: glorot(factor), weights: glorot(), embeddings: normal}


def zero_residual(residual: str) -> dict[str, Initializer]:
    """Rules with which every residual branch begins as zero, so the network begins as its skip connections.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1, for the last norm's scale of each branch;
    for branches without norms, De and Smith, Batch Normalization Biases Residual Blocks, 2020.

    Args:
        residual: Pattern of the last kernel, norm's scale or scalar of every branch.

    Example:
        >>> rules = lm.initializers.zero_residual("down/kernel")
        >>> abstract.reinitialize(rules).materialize()["down"]["kernel"].std().item()
        0.0
    """
    return {residual: jax.nn.initializers.zeros}


def mup(*, hidden: str, readout: str, base: int, std: float = 0.02, in_axis: Axes = -2) -> dict[str, Initializer]:
    """Rules of the maximal update parametrization's initialization: variance `1 / fan_in`, for readouts `1 / fan_in²`.

    Source: Yang et al., Tensor Programs V, 2022, table 3. At width `base` all standard deviations are `std`, so
    hyperparameters found there carry over; embeddings and biases do not change with the width and need no rule.
    This is the initialization only; `lazymodel.mup` is the whole method, and infers hidden kernels and readouts.

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
    without norms begins as its skip connections. The scalar multipliers and biases that Fixup adds are up to the model.

    Args:
        branches: Residual branches of the model: 2 per layer in a transformer.
        weights: Pattern of the kernels inside of branches.
        residual: Pattern of the last kernel of every branch, and of the readout; it takes precedence over `weights`.
        initializer: The initializer to scale; None is `jax.nn.initializers.he_normal()`.
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
