"""What using a model adds to its parameters: LoRA pairs, gradients, optimizer slots, or quantization taking away.

Responsible for the arithmetic on shapes, dtypes and shardings, variable by variable, and for the structs that a
training step takes besides the parameters. Whether it fits is said by `_plan`; what the compiler says by
`_plan_programs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lazymodel._errors import LazyModelError
from lazymodel._report import closest

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractModel

PARAMETERS, LORA, OPTIMIZER, GRADIENTS = "parameters", "LoRA", "optimizer state", "gradients"
ACTIVATIONS = "activations"

# Arrays of a parameter's shape that an optimizer keeps for each: moments, accumulators, velocities.
_SLOTS = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "amsgrad": 3,
    "ftrl": 2,
    "lamb": 2,
    "lion": 1,
    "momentum": 1,
    "nadam": 2,
    "rmsprop": 1,
    "sgd": 0,
}
# What `enable_lora` of a KerasHub backbone takes (the layers query, value, query_dense, value_dense), and the names of
# the same projections elsewhere.
_LORA_TARGETS = r"(?:.*/)?(?:query|value|q_proj|v_proj)(?:_dense)?/kernel"
_QUANTIZED_BITS = {"int8": 8, "int4": 4}
_SMALLEST_QUANTIZED = 4096  # elements; smaller matrices are biases of attention heads and the like
_SCALE_NBYTES = 4  # a float32 for each column

Optimizer: TypeAlias = "str | int | Sequence[Any] | None"
Pair: TypeAlias = "tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]"


class Use:
    """What a model holds while it is used.

    Args:
        model: The model.
        shardings: Path to sharding.
        optimizer: An optimizer's name, the number of slots that it keeps of each trainable parameter, or their dtypes;
            None plans no training.
        lora_rank: Rank of the pairs that are trained instead of the parameters.
        lora_targets: Regex of the paths that get a pair.
        quantize: `"int8"` or `"int4"`.

    Attributes:
        shard_nbytes: Path to the bytes of its shard, as materialized.
        parts: Kind to path to bytes on a device.
        pairs: Path to its LoRA pair.
        slots: The dtypes of the optimizer's slots, None for the parameter's own; None without training.
        trained: Path to what the optimizer updates: its own struct, or its pair.
        notes: How the numbers came to be.

    Raises:
        LazyModelError: The optimizer, the quantization or the rank is none, or no path is a target.
    """

    def __init__(
        self,
        model: AbstractModel,
        shardings: Mapping[str, Sharding],
        *,
        optimizer: Optimizer = None,
        lora_rank: int | None = None,
        lora_targets: str | None = None,
        quantize: str | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.shard_nbytes = {
            path: math.prod(shardings[path].shard_shape(variable.shape)) * variable.dtype.itemsize
            for path, variable in model.items()
        }
        self.pairs: dict[str, Pair] = {}
        if lora_rank is not None:
            self.pairs = _pairs(model, shardings, lora_rank, lora_targets or _LORA_TARGETS)
            self.notes.append(f"LoRA of rank {lora_rank} on {len(self.pairs)} variables; all others are frozen")
        elif lora_targets is not None:
            raise LazyModelError("lora_targets was given without lora_rank; say both")
        self.slots = None if optimizer is None else _slot_dtypes(optimizer)
        self.trained: dict[str, tuple[jax.ShapeDtypeStruct, ...]] = {}
        if self.slots is not None:
            self.trained = dict(self.pairs) or {
                path: (jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=shardings[path]),)
                for path, variable in model.items()
                if variable.trainable and jax.numpy.issubdtype(variable.dtype, np.inexact)
            }
            self.notes.append(
                f"training: {len(self.slots)} optimizer {'slot' if len(self.slots) == 1 else 'slots'} for each of "
                f"{sum(map(len, self.trained.values())):,} trainable variables"
            )
        slots = self.slots or ()
        self.parts: dict[str, dict[str, int]] = {
            PARAMETERS: dict(self.shard_nbytes),
            LORA: {path: sum(map(_struct_nbytes, pair)) for path, pair in self.pairs.items()},
            OPTIMIZER: {
                path: sum(_struct_nbytes(struct, dtype) for struct in structs for dtype in slots)
                for path, structs in self.trained.items()
                if slots
            },
            GRADIENTS: {path: sum(map(_struct_nbytes, structs)) for path, structs in self.trained.items()},
        }
        if quantize is not None:
            self._quantize(model, shardings, quantize)

    def _quantize(self, model: AbstractModel, shardings: Mapping[str, Sharding], mode: str) -> None:
        if mode not in _QUANTIZED_BITS:
            raise LazyModelError(f"quantize is {' or '.join(map(repr, _QUANTIZED_BITS))}; got {mode!r}")
        if self.slots is not None and not self.pairs:
            raise LazyModelError("quantized parameters cannot be trained; add lora_rank, or leave out the optimizer")
        count = 0
        for path, variable in model.items():
            floating = jax.numpy.issubdtype(variable.dtype, np.floating) and variable.dtype.itemsize > 1
            if not floating or len(variable.shape) < 2 or variable.size < _SMALLEST_QUANTIZED:
                continue
            shard = shardings[path].shard_shape(variable.shape)
            columns = math.prod(shard) // max(shard[-2], 1)
            self.parts[PARAMETERS][path] = -(-math.prod(shard) * _QUANTIZED_BITS[mode] // 8) + columns * _SCALE_NBYTES
            count += 1
        self.notes.append(
            f"{mode}: {count} matrices are quantized after they are materialized, one by one, with a scale a column"
        )


def slot_structs(use: Use) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]:
    """Path to the optimizer's slots for each of what is trained there."""
    return {
        path: tuple(
            tuple(jax.ShapeDtypeStruct(s.shape, dtype or s.dtype, sharding=s.sharding) for dtype in use.slots or ())
            for s in structs
        )
        for path, structs in use.trained.items()
    }


def _slot_dtypes(optimizer: Any) -> tuple[Any, ...]:
    if isinstance(optimizer, str):
        slots = _SLOTS.get(optimizer.lower())
        if slots is None:
            raise LazyModelError(
                f"optimizer {optimizer!r} is not known{closest(optimizer, _SLOTS)}; give the number of slots that it "
                f"keeps of each parameter, or one of {', '.join(_SLOTS)}"
            )
        return (None,) * slots
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return (None,) * optimizer
    try:
        return tuple(jax.numpy.dtype(dtype) for dtype in cast("Sequence[Any]", optimizer))
    except TypeError:
        raise LazyModelError(f"optimizer is a name, a number of slots or their dtypes; got {optimizer!r}") from None


def _pairs(model: AbstractModel, shardings: Mapping[str, Sharding], rank: int, targets: str) -> dict[str, Pair]:
    """For each target of shape (…, n) a pair of shapes (…, rank) and (rank, n), as Keras makes them."""
    if rank < 1:
        raise LazyModelError(f"lora_rank is a positive number; got {rank}")
    try:
        regex = re.compile(targets)
    except re.error as error:
        raise LazyModelError(f"lora_targets {targets!r} is not a regular expression: {error}") from error
    pairs: dict[str, Pair] = {}
    for path, variable in model.items():
        if len(variable.shape) < 2 or not regex.fullmatch(path):
            continue
        sharding: Any = shardings[path]
        first = last = sharding
        if isinstance(sharding, NamedSharding):
            entries = (*sharding.spec, *(None,) * (len(variable.shape) - len(sharding.spec)))
            first = NamedSharding(sharding.mesh, PartitionSpec(*entries[:-1], None))
            last = NamedSharding(sharding.mesh, PartitionSpec(None, entries[-1]))
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


def _struct_nbytes(struct: Any, dtype: Any = None) -> int:
    """Bytes of it on a device."""
    shape = struct.shape if struct.sharding is None else struct.sharding.shard_shape(struct.shape)
    return math.prod(shape) * (dtype or struct.dtype).itemsize
