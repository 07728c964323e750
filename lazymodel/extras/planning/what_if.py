"""`WhatIf`: what the use of a model adds to it, by arithmetic: optimizers, LoRA, quantization, activations.

State that the model has (`with_optimizer`, a compiled Keras model) consists of variables, which `_plan/use` counts. All
else is arithmetic on shapes, dtypes, roles and shardings; `compiled` gets the compiler's numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import (
    Placement,
    in_memory,
    is_offloaded,
    matched_paths,
    planned_device,
    stays_on_host,
)
from lazymodel._devices.hardware import is_arithmetic
from lazymodel._devices.tiles import tiled_shape
from lazymodel._errors import LazyModelError
from lazymodel._plan.use import LORA, OPTIMIZER, Activations, Held, Use, gradients, own_trained, own_use, struct_nbytes
from lazymodel._sharding.describe import describe
from lazymodel._sharding.follow import lora_shardings
from lazymodel._sharding.roles import DATA_AXES, HEADS
from lazymodel._show.text import closest, grouped_by, plural
from lazymodel._tensors.shards import mesh_size, spec_axes
from lazymodel.extras.planning.compile import Compile
from lazymodel.extras.planning.compiled import Pair, Training, count_compiled

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
    inside = ([axis for axis in axes if axis not in DATA_AXES] for axes in spec_axes(sharding.spec, len(shape)))
    return tuple(-(-size // mesh_size(sharding.mesh, axes)) for size, axes in zip(shape, inside, strict=True))


def _batch_parts(shardings: Mapping[str, Sharding]) -> int:
    mesh = next((each.mesh for each in shardings.values() if isinstance(each, NamedSharding)), None)
    return math.prod(size for axis, size in (mesh.shape if mesh else {}).items() if axis in DATA_AXES)


# Arrays of a parameter's shape that an optimizer keeps for each: moments, accumulators, velocities.
_SLOTS = {
    "sgd": 0,
    "amsgrad": 3,
    **dict.fromkeys(("adagrad", "lion", "momentum", "rmsprop"), 1),
    **dict.fromkeys(("adadelta", "adam", "adamax", "adamw", "ftrl", "lamb", "nadam"), 2),
}
# The layers that `enable_lora` of a KerasHub backbone uses (query, value, query_dense, value_dense), and the names of
# the same projections elsewhere.
_LORA_TARGETS = r"(?:.*/)?(?:query|value|q_proj|v_proj)(?:_dense)?/kernel"
_QUANTIZED_BITS = {"int8": 8, "int4": 4}
_SMALLEST_QUANTIZED = 4096  # elements; smaller matrices are biases of attention heads and the like
_SCALE_NBYTES = 4  # a float32 for each column

StatedOptimizer: TypeAlias = "str | int | Sequence[Any]"


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """Changes to a model that a plan counts by arithmetic.

    A plan always counts what the model has.

    Attributes:
        optimizer: Adds training, for a model without an optimizer: gradients, and optimizer slots for every trainable
            parameter. A name such as `"adamw"`, the number of slots, or their dtypes.
        lora_rank: Rank of LoRA pairs; only these are then trained.
        lora_targets: Regex of the paths that get a pair; None is the query and value projections, as in KerasHub.
        quantize: `"int8"` or `"int4"`: counts the model as if it were quantized after materializing.
        memory_kind: Memory of the optimizer's slots, as for `with_optimizer`: `"pinned_host"`, or None for devices.
        moments: Dtype of the slots of a named optimizer, such as `"float32"`; None is each parameter's own, as in Optax
            and Keras.
        master_weights: Dtype of a copy that the optimizer updates for each trained parameter of another dtype, such as
            `"float32"`; it counts as optimizer state. None means no copy.
        batch: Batch size; `sequence` is the number of tokens of each sequence. Estimates activations of a dense
            transformer, of a training step with an optimizer, otherwise of a forward pass.
        remat: What a training step computes again: `"attention"` the scores of attention, which flash attention does
            not keep either, `"full"` whole layers; None means nothing.

    Raises:
        LazyModelError: A value is invalid, or there are targets and no rank.

    Example:
        >>> sharded.plan(what_if=lm.WhatIf(optimizer="adamw")).parts
        {'parameters': 16384, 'optimizer state': 32768, 'gradients': 16384}
    """

    optimizer: StatedOptimizer | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    quantize: str | None = None
    memory_kind: str | None = None
    moments: str | None = None
    master_weights: str | None = None
    batch: int | None = None
    sequence: int | None = None
    remat: str | None = None

    def __post_init__(self) -> None:
        needed = {"memory_kind": "optimizer", "moments": "optimizer", "master_weights": "optimizer"}
        needed |= {"lora_targets": "lora_rank", "batch": "sequence", "sequence": "batch", "remat": "batch"}
        for name, other in needed.items():
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise LazyModelError(f"{name} was given without {other}; pass both")
        if self.optimizer is not None:
            slot_dtypes(self.optimizer)
        for name in ("moments", "master_weights"):
            _float_dtype(name, getattr(self, name))
        if self.moments is not None and not isinstance(self.optimizer, str | int):
            raise LazyModelError(
                f"moments={self.moments!r} and the slots' dtypes {self.optimizer!r} conflict; pass one"
            )
        for name in ("batch", "sequence", "lora_rank"):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise LazyModelError(f"{name} is a positive number; got {given!r}")
        for name, known in (("remat", REMATS), ("quantize", tuple(_QUANTIZED_BITS))):
            if (given := getattr(self, name)) is not None and given not in known:
                raise LazyModelError(f"{name} is {' or '.join(map(repr, known))}; got {given!r}")
        if self.remat is not None and self.optimizer is None:
            raise LazyModelError(f"remat={self.remat!r} is for training; pass optimizer, too")
        matched_paths(self.targets, (), LazyModelError, "lora_targets")

    @property
    def targets(self) -> str:
        """The regex of the paths that get a LoRA pair."""
        return _LORA_TARGETS if self.lora_targets is None else self.lora_targets


def described_use(model: ModelSpec, placement: Placement, what_if: WhatIf | None, compile: Compile | None) -> Use:
    """What a model holds in use with the additions of a `WhatIf`, and with the compiler's numbers for a `Compile`."""
    what_if = _checked(model, what_if, compile)
    shardings = placement.shardings
    use, training = own_use(model, shardings), _training(model, shardings, what_if)
    if what_if.lora_rank is not None:
        use.notes.append(f"LoRA of rank {what_if.lora_rank} on {len(training.pairs)} variables; all others are frozen")
    for path, pair in training.pairs.items():
        use.held += (Held(LORA, path, struct.dtype.name, *struct_nbytes(struct)) for struct in pair)
    if what_if.optimizer is not None:
        use.notes.append(_training_text(what_if, training))
        for path, slots in training.slots.items():
            for struct in itertools.chain(*slots):
                nbytes, shard = struct_nbytes(struct)
                away = is_offloaded(struct.sharding)
                use.held.append(Held(OPTIMIZER, path, struct.dtype.name, nbytes, shard * (not away), shard * away))
        use.held += gradients(training.trained)
    if what_if.quantize is not None:
        _quantize(use, model, shardings, what_if.quantize, training)
    if what_if.batch is not None and what_if.sequence is not None:
        nbytes, note = estimate_activations(
            model,
            shardings,
            batch=what_if.batch,
            sequence=what_if.sequence,
            remat=what_if.remat,
            training=bool(training.trained),
        )
        use.activations = Activations(nbytes, "estimated")
        use.notes.append(note)
    if compile is not None and compile.is_use:
        count_compiled(model, use, training, compile)
    return use


def stated(what_if: WhatIf | None) -> WhatIf:
    """The user's `WhatIf`, or one without additions; raises LazyModelError for anything else."""
    given: Any = WhatIf() if what_if is None else what_if
    if not isinstance(given, WhatIf):
        raise LazyModelError(f'what_if is a lazymodel.WhatIf, such as WhatIf(optimizer="adamw"); got {given!r}')
    return given


def _checked(model: ModelSpec, what_if: WhatIf | None, compile: Compile | None) -> WhatIf:
    """Completes the user's `WhatIf` with the optimizer of a compiled training step; raises if they conflict."""
    if not isinstance(cast("Any", compile), Compile | None):
        raise LazyModelError(f'compile is a lazymodel.Compile, such as Compile("forward"); got {compile!r}')
    what_if = stated(what_if)
    for name in ("optimizer", "lora_rank"):
        if model.optimized is not None and (given := getattr(what_if, name)) is not None:
            state = [path for path, variable in model.items() if variable.follows is not None]
            text = f"{len(state)} variables of state, such as {state[0]!r}" if state else "no state"
            raise LazyModelError(
                f"{name}={given!r} adds training, and {model.name} has an optimizer already ({text}), which is "
                f"counted; leave {name} out, or plan the model without its own optimizer"
            )
    if compile is None:
        return what_if
    what = f"compiling {compile.name if compile.is_step else repr(compile.what)}"
    for name, conflicts, why in (
        ("quantize", compile.is_use, "is arithmetic, and the program is of the model as it is; build it quantized"),
        ("batch", compile.is_use, "estimates them; leave one out"),
        ("lora_rank", compile.is_called, "adds pairs, and the program is of the model as it is; build it with LoRA"),
    ):
        if conflicts and (given := getattr(what_if, name)) is not None:
            raise LazyModelError(f"{what} counts activations, and {name}={given!r} {why}")
    if any(is_arithmetic(variable.sharding) for variable in model.values()):
        hint = "make it with lazymodel.topology, or plan without compile"
        raise LazyModelError(f"{what} needs devices to compile for, and this mesh is only for arithmetic; {hint}")
    if compile.what == "train" and what_if.optimizer is None and model.optimized is None:
        return dataclasses.replace(what_if, optimizer="sgd")
    return what_if


def _training(model: ModelSpec, shardings: Mapping[str, Sharding], what_if: WhatIf) -> Training:
    pairs = _pairs(model, shardings, what_if.lora_rank, what_if.targets) if what_if.lora_rank is not None else {}
    trained: dict[str, tuple[jax.ShapeDtypeStruct, ...]] = {}
    if what_if.optimizer is not None or model.optimized is not None:
        trained = {**pairs} or own_trained(model, shardings)
    stated = () if what_if.optimizer is None else slot_dtypes(what_if.optimizer)
    moments = _float_dtype("moments", what_if.moments)
    master = _float_dtype("master_weights", what_if.master_weights)

    def slots(s: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
        dtypes = [dtype or moments or s.dtype for dtype in stated]
        if master not in (None, s.dtype):
            dtypes.append(master)
        sharding = in_memory(s.sharding, what_if.memory_kind, "optimizer state")
        return tuple(jax.ShapeDtypeStruct(s.shape, dtype, sharding=sharding) for dtype in dtypes)

    return Training(pairs, trained, {path: tuple(map(slots, structs)) for path, structs in trained.items()})


def _training_text(what_if: WhatIf, training: Training) -> str:
    count = plural(len(slot_dtypes(what_if.optimizer)), "optimizer slot")
    copies = _float_dtype("master_weights", what_if.master_weights)
    master = "" if copies is None else f", and master weights in {copies.name}"
    return f"training: {count} each for {sum(map(len, training.trained.values())):,} trainable variables{master}"


def _quantize(use: Use, model: ModelSpec, shardings: Mapping[str, Sharding], mode: str, training: Training) -> None:
    roles = describe(model.variables)
    count = 0
    for place, row in enumerate(use.held[: len(model)]):
        path, variable = row.path, model[row.path]
        floating = jax.numpy.issubdtype(variable.dtype, np.floating) and variable.dtype.itemsize > 1
        matrix = floating and len(variable.shape) >= 2 and variable.size >= _SMALLEST_QUANTIZED
        other = variable.follows is not None or roles[path].role == "lora" or stays_on_host(variable)
        if other or not matrix:
            continue
        if path in training.trained and path not in training.pairs:
            raise LazyModelError(
                f"quantize={mode!r} takes {path!r} too, which is trained, and quantized parameters cannot be "
                "trained; add lora_rank, or plan the model without optimizer"
            )
        shard = shardings[path].shard_shape(variable.shape)
        columns = math.prod(shard) // max(shard[-2], 1)
        # Keras packs two int4 in a byte itself, where the compiler does not.
        filled = tiled_shape(tuple(shard), np.dtype(mode), planned_device(shardings[path]))
        nbytes = -(-math.prod(filled) * _QUANTIZED_BITS[mode] // 8) + columns * _SCALE_NBYTES
        where = "host_nbytes" if row.host_nbytes else "device_nbytes"
        use.held[place] = row._replace(**{where: nbytes})
        count += 1
    use.quantized = mode if count else ""
    use.notes.append(
        f"{mode}: {count} matrices are quantized after they are materialized, one by one, with a scale a column"
    )


def slot_dtypes(optimizer: Any) -> tuple[Any, ...]:
    """The dtypes of the slots that a `WhatIf`'s optimizer keeps for each parameter, None for the parameter's own."""
    if isinstance(optimizer, str):
        if optimizer.lower() not in _SLOTS:
            raise LazyModelError(
                f"optimizer {optimizer!r} is not known{closest(optimizer, _SLOTS)}; give the number of slots that it "
                f"keeps for each parameter, or one of {', '.join(sorted(_SLOTS))}"
            )
        optimizer = _SLOTS[optimizer.lower()]
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return (None,) * optimizer
    try:
        return tuple(jax.numpy.dtype(dtype) for dtype in cast("Sequence[Any]", optimizer))
    except TypeError:
        own = "; with_optimizer() takes an optimizer itself, and a plan then counts its state"
        own = own if callable(optimizer) or hasattr(optimizer, "init") or hasattr(optimizer, "variables") else ""
        raise LazyModelError(
            f"optimizer is a name, a number of slots or their dtypes; got {optimizer!r}{own}"
        ) from None


def _pairs(model: ModelSpec, shardings: Mapping[str, Sharding], rank: int, targets: str) -> dict[str, Pair]:
    """A pair of shapes (…, rank) and (rank, n) for each target of shape (…, n), as in Keras."""
    pairs: dict[str, Pair] = {}
    for path in matched_paths(targets, model, LazyModelError, "lora_targets"):
        if (variable := model[path]).follows is not None or len(variable.shape) < 2:
            continue
        first, last = lora_shardings(shardings[path], variable.shape, rank)
        pairs[path] = (
            jax.ShapeDtypeStruct((*variable.shape[:-1], rank), variable.dtype, sharding=first),
            jax.ShapeDtypeStruct((rank, variable.shape[-1]), variable.dtype, sharding=last),
        )
    if not pairs:
        raise LazyModelError(
            f"no variable of {model.name} is a LoRA target {targets!r}{closest(targets, model)}; "
            "set lora_targets to a regex of whole paths"
        )
    return pairs


def _float_dtype(name: str, given: Any) -> Any:
    if given is None:
        return None
    try:
        dtype = jax.numpy.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jax.numpy.issubdtype(dtype, np.floating):
        raise LazyModelError(f"{name} is a floating-point dtype such as 'float32' or 'bfloat16'; got {given!r}")
    return dtype
