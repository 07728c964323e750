"""Activations of a transformer by arithmetic, from the shapes, roles and shardings of its variables.

Responsible for dense transformers: a table of tokens, attention and an MLP. `_plan/make` gets the compiler's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import LazyModelError
from lazymodel._sharding.describe import describe
from lazymodel._sharding.roles import HEADS
from lazymodel._show.text import grouped_by

# Names of mesh axes over which a batch is split; all other axes split dimensions inside the model.
DATA_AXES = ("data", "batch", "dp", "fsdp", "replica")
REMATS = ("attention", "full")

# Layers whose activations cannot be inferred from shapes, such as the number of experts for each token.
_OTHERS = ("expert_up", "expert_down", "router", "recurrent", "state_space", "convolution", "block_diagonal")
_FLOAT32 = 4  # bytes; softmax is computed in float32


def estimate_activations(
    model: ModelSpec,
    shardings: Mapping[str, Sharding],
    *,
    batch: int,
    sequence: int,
    remat: str | None,
    training: bool,
) -> tuple[int, str]:
    """Bytes of activations on one device, of a forward pass or at the end of that of a training step; and a note.

    For its backward pass, a training step keeps for each token and layer what V. Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4.1) count: the inputs of the two
    norms, queries, keys and values, the input of the output projection, the outputs of the projections into the MLP,
    and each head's softmax over the sequence, in float32. Not counted are dropout, and what compilers fuse into its
    consumers: outputs of norms and of activation functions. Added are the logits and their gradient in float32.
    `remat="attention"` omits the softmax, as kernels of flash attention do; `"full"` keeps the input of one norm per
    layer, and all of one layer while it is computed again. A forward pass keeps one layer's attention, with the
    softmax's input, or its MLP, and the logits. XLA for TPUs takes 0.8 to 1.2 times as much.

    Tensor parallelism splits heads, the inside of the MLP and the vocabulary as their weights are split; the batch is
    split over the mesh's data axes. Sequences are not split.

    Raises:
        LazyModelError: The model is not such a transformer.
    """
    roles = {path: each for path, each in describe(model.variables).items() if model[path].follows is None}
    paths = grouped_by(roles, lambda path: roles[path].role)
    outputs, downs, words = (paths.get(role, []) for role in ("attention_output", "mlp_down", "embedding"))
    other = next((path for role in _OTHERS for path in paths.get(role, ())), None)
    if not (outputs and downs and words) or other is not None:
        why = f"{other!r} has the role {roles[other].role!r}" if other is not None else "one of these is missing"
        raise LazyModelError(
            "activations are estimated for dense transformers, with a table of tokens, attention and MLPs; in "
            f"{model.name} {why}: pass compile=Compile('train' or 'forward', …) to count them with the compiler"
        )

    shapes = {path: _inner_shape(model[path].shape, shardings[path]) for path in roles}

    def find(label: str, path: str, sizes: Sequence[int]) -> int:
        """The size of the dimension with a label; 1 if there is none."""
        return dict(zip(roles[path].labels, sizes, strict=True)).get(label, 1)

    def layers(some: Iterable[str]) -> int:
        return sum(find("layers", path, shapes[path]) for path in some)

    def total(role: str, without: str) -> int:
        """Elements per token, on one device, of the inputs or outputs of the weights of a role."""
        shapes_of = (zip(roles[path].labels, shapes[path], strict=True) for path in paths.get(role, ()))
        return sum(math.prod(size for label, size in some if label != without) for some in shapes_of)

    def heads(path: str) -> int:
        """Heads of an output projection, in all layers, on one device."""
        units, whole = find(HEADS, path, roles[path].units), find(HEADS, path, model[path].shape)
        return layers([path]) * max(units * find(HEADS, path, shapes[path]) // whole, 1)

    first = outputs[0]
    dtype = model[first].dtype if jnp.issubdtype(model[first].dtype, jnp.floating) else jnp.dtype("bfloat16")
    width, n = find("out", first, model[first].shape), dtype.itemsize
    attentions, mlps = layers(outputs), layers(downs)
    projected = total("query_key_value", "in") + total("fused_query_key_value", "in") + total("attention_output", "out")
    attention = n * (attentions * width + projected)
    mlp = n * (mlps * width + total("mlp_up", "in"))
    softmax = _FLOAT32 * sequence * sum(map(heads, outputs))
    head = (paths.get("output_head") or words)[0]
    vocabulary = find("vocabulary", head, shapes[head])
    tokens = -(-batch // _batch_parts(shardings)) * sequence
    if training:
        kept = attention + mlp + (softmax if remat is None else 0)
        if remat == "full":
            kept = n * attentions * width + (attention + softmax) // attentions + mlp // mlps
        nbytes = tokens * (kept + 2 * _FLOAT32 * vocabulary)
    else:
        layer = max((attention + 2 * softmax) // attentions, mlp // mlps)
        nbytes = tokens * (layer + n * vocabulary)
    how = "a forward pass" if not training else f"training, remat={remat!r}" if remat else "training without remat"
    return nbytes, (
        f"activations of {how} on {batch} × {sequence} tokens are estimated: {attentions} layers of width {width}, "
        f"{find(HEADS, first, roles[first].units)} heads, in {dtype.name}"
    )


def _inner_shape(shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
    """The shard of a shape that is split over the mesh axes that do not split the batch."""
    if not isinstance(sharding, NamedSharding):
        return shape
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in some if axis not in DATA_AXES) for some in axes]
    return tuple(-(-size // part) for size, part in zip(shape, parts, strict=True))


def _batch_parts(shardings: Mapping[str, Sharding]) -> int:
    mesh = next((each.mesh for each in shardings.values() if isinstance(each, NamedSharding)), None)
    return math.prod(size for axis, size in (mesh.shape if mesh else {}).items() if axis in DATA_AXES)
