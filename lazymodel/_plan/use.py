"""What a model holds while it is used: parameters, the state of its optimizer, and gradients of what that trains.

`Use` is also the form of what `extras/planning` adds: a `WhatIf`, and the numbers of a compiler.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import (
    offloaded_nbytes,
    planned_device,
    resident_nbytes,
    shard_nbytes,
    shard_stored,
)
from lazymodel._devices.hardware import CompiledMemory
from lazymodel._devices.tiles import packed_nbytes

PARAMETERS, LORA, OPTIMIZER, GRADIENTS = "parameters", "LoRA", "optimizer state", "gradients"
ACTIVATIONS = "activations"


class Held(NamedTuple):
    """An array that a model holds for a variable while it is used."""

    kind: str  # such as `PARAMETERS`
    path: str  # of the variable
    dtype: str
    nbytes: int  # of the whole array
    device_nbytes: int  # on each of the variable's devices
    host_nbytes: int = 0  # on a host for each of these devices


class Activations(NamedTuple):
    """Activations and temporaries on the most loaded device."""

    nbytes: int
    how: str  # "estimated" or "compiled"
    compiled: CompiledMemory | None = None  # the compiler's numbers, if the program fits
    limit: int | None = None  # bytes of a device that is too small, as the compiler reports


@dataclasses.dataclass
class Use:
    """Memory of a model in use.

    Attributes:
        held: One row for each array that is held.
        notes: How the numbers were computed.
        quantized: The mode of quantization of a `WhatIf`, or an empty string.
        activations: Activations, if they were counted.
    """

    held: list[Held]
    notes: list[str]
    quantized: str = ""
    activations: Activations | None = None

    def parts(self) -> dict[str, collections.Counter[str]]:
        """Kind → path → bytes that each of its devices holds; kinds of which nothing is held are left out."""
        sums = {kind: collections.Counter[str]() for kind in (PARAMETERS, LORA, OPTIMIZER, GRADIENTS)}
        for row in self.held:
            sums[row.kind][row.path] += row.device_nbytes
        return {kind: amounts for kind, amounts in sums.items() if kind == PARAMETERS or amounts}

    def offloaded(self) -> dict[str, int]:
        """Path → bytes that a host keeps for each device."""
        sums = collections.Counter[str]()
        for row in self.held:
            sums[row.path] += row.host_nbytes
        return dict(+sums)

    def dtypes(self, kind: str) -> str:
        """The dtypes with at least a hundredth of the bytes of a kind, largest first."""
        totals: collections.Counter[str] = collections.Counter()
        for row in self.held:
            totals[row.dtype] += row.nbytes * (row.kind == kind)
        found = [name for name, nbytes in totals.most_common() if nbytes and 100 * nbytes >= totals.total()]
        return ", ".join([*([self.quantized] if self.quantized and kind == PARAMETERS else []), *found])


def own_use(model: ModelSpec, shardings: Mapping[str, Sharding]) -> Use:
    """What the model itself holds in use; without an optimizer, its variables."""
    use = Use([], [])
    for path, each in model.items():
        kind = PARAMETERS if each.follows is None else OPTIMIZER
        use.held.append(Held(kind, path, each.dtype.name, each.nbytes, resident_nbytes(each), offloaded_nbytes(each)))
    if model.optimized is not None:
        use.held += gradients(own_trained(model, shardings))
        state, trained = (sum(row.kind == kind for row in use.held) for kind in (OPTIMIZER, GRADIENTS))
        use.notes.append(
            f"training with the model's own optimizer: {state:,} variables of state for {trained:,} trainable variables"
        )
    return use


def own_trained(model: ModelSpec, shardings: Mapping[str, Sharding]) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """Path → what an optimizer trains there: the model's own optimizer, or one of all trainable parameters."""
    own = (each for each in model.values() if each.trainable and each.follows is None)
    floats = [each.path for each in own if jax.numpy.issubdtype(each.dtype, np.inexact)]
    return {
        path: (jax.ShapeDtypeStruct(model[path].shape, model[path].dtype, sharding=shardings[path]),)
        for path in (floats if model.optimized is None else model.optimized.paths)
    }


def gradients(trained: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]]) -> Iterator[Held]:
    """The gradients of what is trained, each split like it."""
    for path, structs in trained.items():
        for struct in structs:
            yield Held(GRADIENTS, path, struct.dtype.name, *struct_nbytes(struct))


def struct_nbytes(struct: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Bytes of an array, and of its shard on a device."""
    whole = packed_nbytes(*shard_stored(struct, None), planned_device(struct.sharding))
    return whole, shard_nbytes(struct, struct.sharding)
