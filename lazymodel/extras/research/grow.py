"""Growing: the weights of a deeper, wider or expert-split model, made of a smaller one's without reading them.

Each function takes tensors by name, such as `open_checkpoint` returns, and returns those of the larger model: views,
repetitions and concatenations of lazy tensors, whose bytes are read when a device requests its shard. Each docstring
states if the larger model computes the same function. No model is known here, so the user gives the roles of tensors,
as patterns of names. In a pattern `{layer}` stands for text without `/` and `.`, and `{rest...}` for any text, as in
`WeightMap`.

Tensors that only the larger model has, such as a router, are left to `materialize(…, initialize="missing")`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.variable import Template
from lazymodel._errors import LazyModelError
from lazymodel._mapping.resolve import given_tensors
from lazymodel._mapping.source import MappedCheckpoint
from lazymodel._show.text import closest
from lazymodel._tensors.lazy import LazyTensor, lazy

__all__ = ["depth", "experts", "width"]

_METHODS = ("stack", "interleave")


def depth(
    checkpoint: Any,
    pattern: str,
    layers: int,
    *,
    method: str | Sequence[int] = "stack",
    zero: str | Iterable[str] = (),
    axis: int | None = None,
) -> MappedCheckpoint:
    """Grows a model in depth: further layers are copies of the given ones.

    With `zero` the function is preserved, bit for bit if adding zero is exact: if every further layer only adds to a
    residual stream, and `zero` matches all tensors that it adds with (the last kernel of attention and of the
    feed-forward network, and their biases), each begins as the identity (as in Net2DeeperNet, Chen, Goodfellow and
    Shlens 2016, and in LLaMA Pro's block expansion, Wu et al. 2024). It is not preserved if layers are followed by a
    norm on the stream itself (post-norm, as in BERT). Without `zero` copies are full copies, which preserves nothing
    but trains fast.

    Args:
        checkpoint: Tensor name → lazy tensor or array, such as `open_checkpoint` returns; or a model, abstract or
            not, or a pytree of arrays.
        pattern: Names of the layers' tensors, with `{layer}` for their number, such as `"blocks/{layer}/{rest...}"`.
            For a scanned model, which stacks its layers: names without it, and `axis`.
        layers: Layers of the deeper model.
        method: The layer that each layer copies. `"stack"` puts whole stacks on top of each other, 0 1 2 0 1 2 (Gong et
            al., Efficient Training of BERT by Progressively Stacking, 2019); `"interleave"` repeats each layer in its
            place, 0 0 1 1 2 2 (Chang et al., Multi-level Residual Networks, 2018); or the numbers themselves.
        zero: Names, as in `pattern`, of tensors that are zero in every layer except the first copy of each.
        axis: The axis of layers, if they are stacked in one tensor.

    Returns:
        All tensors: those of the new layers, and the others unchanged.

    Raises:
        LazyModelError: No tensor matches, layers differ in their tensors, fewer layers are requested than there are, or
            `zero` is given and the first copies are not all layers in order, so that nothing would be preserved.

    Example:
        >>> small = {f"layers/{i}/{name}": np.ones((4, 4), "float32") for i in range(2) for name in ("in", "out")}
        >>> large = lm.grow.depth(small, "layers/{layer}/{rest...}", 4, zero="layers/{layer}/out")
        >>> [float(large[f"layers/{i}/out"][0, 0]) for i in range(4)]
        [1.0, 1.0, 0.0, 0.0]
    """
    tensors = given_tensors(checkpoint)
    template = Template(pattern)
    zeros = [Template(name) for name in ([zero] if isinstance(zero, str) else zero)]
    if ("layer" in template.captures) == (axis is not None):
        raise LazyModelError(
            f"depth: {pattern!r} has no {{layer}}; put it where the number is, or give the axis of stacked layers"
            if axis is None
            else f"depth: {pattern!r} has a {{layer}}, and axis={axis} is for layers that are stacked in one tensor"
        )
    matched = _matched(tensors, template)
    zero_names = {name for other in zeros for name in _matched({name: tensors[name] for name in matched}, other)}
    grown = {name: tensor for name, tensor in tensors.items() if name not in matched}
    if axis is None:
        by_layer = _by_layer(matched)
        order = _order(len(by_layer), layers, method, preserve=bool(zeros))
        for new, source in enumerate(order):
            for captures, name in by_layer[source].items():
                zeroed = source in order[:new] and name in zero_names
                target = template.fill(dict(captures) | {"layer": str(new)})
                grown[target] = _zeros(tensors[name]) if zeroed else tensors[name]
        return MappedCheckpoint(grown, checkpoint)
    axes = {name: _axis(tensors[name], name, axis) for name in matched}
    count = _one({name: tensors[name].shape[place] for name, place in axes.items()}, "layers")
    order = _order(count, layers, method, preserve=bool(zeros))
    for name, place in axes.items():
        parts: list[Any] = []
        for new, source in enumerate(order):
            part = tensors[name][(*(slice(None),) * place, slice(source, source + 1))]
            parts.append(_zeros(part) if source in order[:new] and name in zero_names else part)
        grown[name] = _joined(parts, place)
    return MappedCheckpoint({name: grown[name] for name in tensors}, checkpoint)


def width(
    checkpoint: Any, units: int, *, incoming: Mapping[str, int], outgoing: Mapping[str, int], uneven: float = 0.0
) -> MappedCheckpoint:
    """Grows a model in width: further hidden units are copies of the given ones (Net2WiderNet).

    Unit `j` of the wider layer is unit `j mod n` of the given `n`. Incoming tensors are copied; outgoing tensors are
    divided by the number of copies, so that the sum over copies is the output of the one. This preserves the function,
    up to the rounding of sums (source: Chen, Goodfellow and Shlens, Net2Net, 2016; copies in turn instead of at random,
    so that they are views of the file).

    Limits: between `incoming` and `outgoing` each unit must be computed separately, and in the same way, as with any
    activation function and with gates (a SwiGLU's two kernels are both incoming). A norm over the units is not, unless
    all have equally many copies and its own scale and offset are incoming; dropout is not either, since masks differ.
    Attention heads can be widened by the axis of heads of query, key, value and output. The residual stream cannot be
    widened: every norm of the model depends on it.

    Args:
        checkpoint: As for `depth`.
        units: Hidden units of the wider model.
        incoming: Names of tensors that units are computed from, kernels and biases, and the axis of units of each.
        outgoing: Names of tensors that units are inputs of, likewise.
        uneven: Equal copies get equal gradients, and stay copies forever. With a number between 0 and 1, a unit is
            divided into unequal shares, from `1 - uneven` to `1 + uneven` of the mean: gradients differ, and the sum
            is the same.

    Raises:
        LazyModelError: No tensor matches, a name is both, the sizes differ or exceed `units`, an outgoing tensor does
            not have floating-point numbers, or `uneven` is out of range.

    Example:
        >>> wider = lm.grow.width(model, 512, incoming={"up/kernel": 1}, outgoing={"down/kernel": 0})
        >>> wider["up/kernel"].shape, wider["down/kernel"].shape
        ((64, 512), (512, 64))
    """
    if not 0 <= uneven < 1:
        raise LazyModelError(f"uneven is a number from 0 to below 1; got {uneven!r}")
    tensors = given_tensors(checkpoint)
    axes: dict[str, tuple[int, bool]] = {}
    for table, is_outgoing in ((incoming, False), (outgoing, True)):
        if not table:
            raise LazyModelError("width needs incoming and outgoing tensors, pattern → axis of units")
        for pattern, axis in table.items():
            for name in _matched(tensors, Template(pattern)):
                if axes.get(name, (axis, is_outgoing)) != (axis, is_outgoing):
                    raise LazyModelError(f"{name!r} matches two patterns, with different axes or directions")
                axes[name] = axis, is_outgoing
    extents = {name: tensors[name].shape[_axis(tensors[name], name, axis)] for name, (axis, _) in axes.items()}
    count = _one(extents, "units")
    if units < count:
        raise LazyModelError(f"width: there are {count} units, more than the {units} requested; give as many or more")
    grown = dict(tensors)
    for name, (axis, is_outgoing) in axes.items():
        tensor = tensors[name]
        if is_outgoing and units > count and not jnp.issubdtype(tensor.dtype, jnp.inexact):
            raise LazyModelError(
                f"width: {name!r} has {tensor.dtype.name} numbers, which cannot be divided among copies"
            )
        index = (slice(None),) * _axis(tensor, name, axis)
        parts: list[Any] = []
        for start in range(0, units, count):
            size = min(count, units - start)
            # The first units have one copy more than the rest if `count` does not divide `units`.
            for low, high in ((0, units % count), (units % count, count)):
                high = min(high, size)
                if low >= high:
                    continue
                copies = units // count + (low < units % count)
                part = tensor[(*index, slice(low, high))]
                tilt = 2 * (start // count) / (copies - 1) - 1 if copies > 1 else 0.0
                share = (1 + uneven * tilt) / copies  # of the unit; the copies' shares sum to one
                parts.append(part * share if is_outgoing and share != 1 else part)
        grown[name] = _joined([lazy(part).astype(tensor.dtype) for part in parts], len(index))
    return MappedCheckpoint(grown, checkpoint)


def experts(checkpoint: Any, names: Mapping[str, str], experts: int, *, axis: int = 0) -> MappedCheckpoint:
    """Grows a dense model into a mixture of experts: each a copy of its feed-forward network (sparse upcycling).

    The function is preserved if the gates of the experts that a token goes to sum to one: a softmax over the chosen
    experts, for any router, or over all of them if all are used. With gates that sum to less, as a softmax taken before
    choosing the top k, the output shrinks accordingly (source: Komatsuzaki et al., Sparse Upcycling, 2023, and its
    section on normalizing combine weights). It is not preserved if a full expert drops tokens.

    The router is not in the result: the model's own initializer creates it, or one given with `reinitialize`. Equal
    experts diverge because the router sends them different tokens.

    Args:
        checkpoint: As for `depth`.
        names: Pattern of the dense network's tensors → name of the experts', with the same captures, such as
            `{"blocks/{layer}/mlp/{rest...}": "blocks/{layer}/experts/{rest...}"}`. A name with `{expert}` in it gives
            every expert its own tensors; without, all are stacked in one.
        experts: Number of experts.
        axis: The axis along which experts are stacked.

    Raises:
        LazyModelError: No tensor matches, a new name has a capture that its pattern does not have, or exists already.

    Example:
        >>> sparse = lm.grow.experts(model, {"{name}/kernel": "experts/{name}/kernel"}, experts=4)
        >>> sparse["experts/up/kernel"].shape
        (4, 64, 256)
    """
    if experts < 1:
        raise LazyModelError(f"experts: at least one is needed; got {experts}")
    tensors = given_tensors(checkpoint)
    grown = dict(tensors)
    for pattern, new in names.items():
        template, target = Template(pattern), Template(new)
        if unknown := set(target.captures) - set(template.captures) - {"expert"}:
            raise LazyModelError(f"experts: {{{sorted(unknown)[0]}}} of {new!r} is not in {pattern!r}")
        for name, captures in _matched(tensors, template).items():
            tensor = grown.pop(name, None)
            if tensor is None:
                raise LazyModelError(f"experts: {name!r} matches two patterns")
            if "expert" in target.captures:
                copies = {target.fill(captures | {"expert": str(number)}): tensor for number in range(experts)}
            else:
                place = _axis(tensor, name, axis, more=1)
                one = tensor[(*(slice(None),) * place, None)]
                shape = (*tensor.shape[:place], experts, *tensor.shape[place:])
                copies = {target.fill(captures): np.broadcast_to(one, shape)}
            for copy, value in copies.items():
                if copy in grown or (copy in tensors and copy != name):
                    raise LazyModelError(f"experts: {name!r} would become {copy!r}, which exists already")
                grown[copy] = cast(LazyTensor, value)
    return MappedCheckpoint(grown, checkpoint)


# ----------------------------------------------------------------------------------------------------------------------


def _matched(tensors: Mapping[str, LazyTensor], template: Template) -> dict[str, dict[str, str]]:
    """Names that match the template → their captures."""
    found = {name: captures for name in tensors if (captures := template.match(name)) is not None}
    if not found:
        raise LazyModelError(f"no tensor matches {template.text!r}{closest(template.text, tensors)}")
    return found


def _axis(tensor: LazyTensor, name: str, axis: int, *, more: int = 0) -> int:
    ndim = tensor.ndim + more
    if not -ndim <= axis < ndim:
        raise LazyModelError(f"{name!r}: there is no axis {axis} in shape {list(tensor.shape)}")
    return axis % ndim


def _one(counts: Mapping[str, int], what: str) -> int:
    """The number that all tensors share; raises if they differ."""
    (first, count), *_ = counts.items()
    for name, other in counts.items():
        if other != count:
            raise LazyModelError(f"{first!r} has {count} {what}, and {name!r} has {other}")
    return count


def _by_layer(matched: Mapping[str, Mapping[str, str]]) -> list[dict[tuple[tuple[str, str], ...], str]]:
    """For each layer, its tensors by the captures of their names other than the layer's number."""
    layers: dict[int, dict[tuple[tuple[str, str], ...], str]] = {}
    for name, captures in matched.items():
        if re.fullmatch(r"0|[1-9]\d{0,8}", captures["layer"]) is None:
            raise LazyModelError(f"{name!r}: {{layer}} is to be a number, found {captures['layer']!r}")
        rest = tuple(sorted((key, text) for key, text in captures.items() if key != "layer"))
        layers.setdefault(int(captures["layer"]), {})[rest] = name
    first = layers[min(layers)]
    for number in range(len(layers)):
        layer = layers.get(number, {})
        for rest in first.keys() ^ layer.keys():
            name, other = (first[rest], number) if rest in first else (layer[rest], min(layers))
            raise LazyModelError(
                f"layer {other} has nothing that corresponds to {name!r}; layers are numbered from 0 and all alike"
            )
    return [layers[number] for number in range(len(layers))]


def _order(count: int, layers: int, method: str | Sequence[int], *, preserve: bool) -> list[int]:
    """For each layer of the deeper model, the number of the layer that it copies."""
    if layers < count:
        raise LazyModelError(f"depth: there are {count} layers, more than the {layers} requested; give as many or more")
    if isinstance(method, str):
        if method not in _METHODS:
            raise LazyModelError(f"method is {' or '.join(map(repr, _METHODS))}, or numbers of layers; got {method!r}")
        return [new % count if method == "stack" else new * count // layers for new in range(layers)]
    order = [int(source) for source in method]
    if len(order) != layers or any(not 0 <= source < count for source in order):
        raise LazyModelError(f"method: expected {layers} numbers from 0 to {count - 1}, got {order}")
    if preserve and list(dict.fromkeys(order)) != list(range(count)):
        raise LazyModelError(
            f"method: with zero, the first copies have to be layers 0 to {count - 1} in order, since the others are "
            f"the identity; got {order}"
        )
    return order


def _joined(parts: Sequence[Any], axis: int) -> LazyTensor:
    return cast(Any, np.concatenate(parts, axis))  # lazy tensors stay lazy


def _zeros(tensor: LazyTensor) -> Any:
    """Zeros of the same shape; only one of them is in memory."""
    return np.broadcast_to(cast(Any, lazy(np.zeros((), tensor.dtype), f"zeros for {tensor.name}")), tensor.shape)
