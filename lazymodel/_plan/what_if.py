"""What a model holds in use: parameters, optimizer state and gradients, and what would be added or taken away.

State that the model has (`with_optimizer`, a compiled Keras model) are variables of its own; gradients are of what
that optimizer trains. What is only stated (`WhatIf`) is arithmetic on shapes, dtypes and shardings. What the compiler
says is `_plan/compiled`'s matter.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._abstract.memory import in_memory, is_offloaded
from lazymodel._abstract.placement import offloaded_nbytes, resident_nbytes, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import LazyModelError
from lazymodel._plan.activations import REMATS
from lazymodel._sharding.describe import describe
from lazymodel._sharding.follow import lora_shardings
from lazymodel._show.text import closest, plural

PARAMETERS, LORA, OPTIMIZER, GRADIENTS = "parameters", "LoRA", "optimizer state", "gradients"
ACTIVATIONS = "activations"

# Arrays of a parameter's shape that an optimizer keeps for each: moments, accumulators, velocities.
_SLOTS = {
    "sgd": 0,
    "amsgrad": 3,
    **dict.fromkeys(("adagrad", "lion", "momentum", "rmsprop"), 1),
    **dict.fromkeys(("adadelta", "adam", "adamax", "adamw", "ftrl", "lamb", "nadam"), 2),
}
# What `enable_lora` of a KerasHub backbone takes (the layers query, value, query_dense, value_dense), and the names of
# the same projections elsewhere.
_LORA_TARGETS = r"(?:.*/)?(?:query|value|q_proj|v_proj)(?:_dense)?/kernel"
_QUANTIZED_BITS = {"int8": 8, "int4": 4}
_SMALLEST_QUANTIZED = 4096  # elements; smaller matrices are biases of attention heads and the like
_SCALE_NBYTES = 4  # a float32 for each column

StatedOptimizer: TypeAlias = "str | int | Sequence[Any]"
Pair: TypeAlias = "tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]"


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """What a plan adds to a model that does not have it, or takes away, by arithmetic.

    What the model has, a plan counts without being told.

    Attributes:
        optimizer: Training, of a model that has no optimizer: gradients, and an optimizer's slots for every trainable
            parameter. A name such as `"adamw"`, the number of slots, or their dtypes.
        lora_rank: Rank of LoRA pairs, which are then all that is trained.
        lora_targets: Regex of the paths that get a pair; None is the query and value projections, as in KerasHub.
        quantize: `"int8"` or `"int4"`: what quantizing the materialized model leaves.
        memory_kind: Where the optimizer's slots lie, as for `with_optimizer`: `"pinned_host"`, or None for devices.
        moments: Dtype of the slots of an optimizer that is named, such as `"float32"`; None is each parameter's own,
            as Optax and Keras make them.
        master_weights: Dtype of a copy of each trained parameter that the optimizer updates, such as `"float32"`, for
            those that have another one; they are among the optimizer's state. None is no copy.
        batch: Batch size, and `sequence` the tokens of each: activations of a dense transformer are estimated, of a
            training step if there is an optimizer, or else of a forward pass. See `lazymodel._plan.activations`.
        remat: What a training step computes again: `"attention"` the scores of attention, which flash attention does
            not keep either, `"full"` whole layers; None is nothing.

    Raises:
        LazyModelError: One is none of these, or there are targets and no rank.

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
        if self.optimizer is not None:
            slot_dtypes(self.optimizer)
        for name in ("memory_kind", "moments", "master_weights"):
            if (given := getattr(self, name)) is not None:
                if self.optimizer is None:
                    raise LazyModelError(f"{name} was given without optimizer, whose state it is of; say both")
                if name != "memory_kind":
                    _float_dtype(name, given)
        if self.moments is not None and not isinstance(self.optimizer, str | int):
            raise LazyModelError(
                f"moments={self.moments!r} and the slots' dtypes {self.optimizer!r} were given; say one"
            )
        for name in ("batch", "sequence"):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise LazyModelError(f"{name} is a positive number; got {given!r}")
        if (self.batch is None) != (self.sequence is None):
            raise LazyModelError("activations are estimated for a batch and a sequence; say both")
        if self.remat is not None and (self.remat not in REMATS or self.batch is None or self.optimizer is None):
            raise LazyModelError(
                f"remat is {' or '.join(map(repr, REMATS))}, with optimizer, batch and sequence; got {self.remat!r}"
            )
        if self.lora_rank is not None and (type(self.lora_rank) is not int or self.lora_rank < 1):
            raise LazyModelError(f"lora_rank is a positive number; got {self.lora_rank!r}")
        if self.lora_targets is not None and self.lora_rank is None:
            raise LazyModelError("lora_targets was given without lora_rank; say both")
        try:
            re.compile(self.targets)
        except (re.error, TypeError) as error:
            raise LazyModelError(f"lora_targets {self.lora_targets!r} is not a regular expression: {error}") from error
        if self.quantize is not None and self.quantize not in tuple(_QUANTIZED_BITS):
            raise LazyModelError(f"quantize is {' or '.join(map(repr, _QUANTIZED_BITS))}; got {self.quantize!r}")

    @property
    def targets(self) -> str:
        """The regex of the paths that get a LoRA pair."""
        return _LORA_TARGETS if self.lora_targets is None else self.lora_targets


class Use:
    """What a model holds while it is used: shards as materialized, pairs, slots, state and gradients, by path."""

    def __init__(self, model: ModelSpec, shardings: Mapping[str, Sharding], what_if: WhatIf) -> None:
        self.notes: list[str] = []  # how the numbers came to be
        self.shard_nbytes = {path: resident_nbytes(variable) for path, variable in model.items()}
        # Bytes that a host keeps for each device.
        self.offloaded = {path: nbytes for path, each in model.items() if (nbytes := offloaded_nbytes(each))}
        self.state = tuple(path for path, variable in model.items() if variable.follows is not None)
        self._check_one_optimizer(model, what_if)
        self.pairs: dict[str, Pair] = {}
        if what_if.lora_rank is not None:
            self.pairs = _pairs(model, shardings, what_if.lora_rank, what_if.targets)
            self.notes.append(f"LoRA of rank {what_if.lora_rank} on {len(self.pairs)} variables; all others are frozen")
        # The dtypes of a stated optimizer's slots, None for the parameter's own; None without one.
        self.slots = None if what_if.optimizer is None else slot_dtypes(what_if.optimizer)
        self._slots_memory = what_if.memory_kind
        self._moments = None if what_if.moments is None else _float_dtype("moments", what_if.moments)
        self._master = None if what_if.master_weights is None else _float_dtype("master", what_if.master_weights)
        self.trained = self._trained(
            model, shardings
        )  # path to what the optimizer updates: its own struct, or its pair
        stated = {path: tuple(itertools.chain(*slots)) for path, slots in self.slot_structs().items()}
        stated = {path: slots for path, slots in stated.items() if slots}
        own = {path: model[path].dtype.name for path in model}
        self.dtypes = {  # of each kind, largest first; of activations how they are counted
            PARAMETERS: _dtypes((own[path], model[path].nbytes) for path in model if model[path].follows is None),
            LORA: _dtypes(map(_dtype_of, itertools.chain(*self.pairs.values()))),
            OPTIMIZER: _dtypes(
                itertools.chain(
                    ((own[path], model[path].nbytes) for path in self.state),
                    map(_dtype_of, itertools.chain(*stated.values())),
                )
            ),
            GRADIENTS: _dtypes(map(_dtype_of, itertools.chain(*self.trained.values()))),
        }
        away = {path: [slot for slot in slots if is_offloaded(slot.sharding)] for path, slots in stated.items()}
        for path, nbytes in _nbytes({path: slots for path, slots in away.items() if slots}).items():
            self.offloaded[path] = self.offloaded.get(path, 0) + nbytes
            stated[path] = tuple(slot for slot in stated[path] if not is_offloaded(slot.sharding))
        self.parts = {
            PARAMETERS: {path: self.shard_nbytes[path] for path in model if model[path].follows is None},
            LORA: _nbytes(self.pairs),
            OPTIMIZER: {path: self.shard_nbytes[path] for path in self.state} | _nbytes(stated),
            GRADIENTS: _nbytes(self.trained),
        }
        if what_if.quantize is not None:
            self._quantize(model, shardings, what_if.quantize)

    def slot_structs(self) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]:
        """Path to a stated optimizer's slots for each of what is trained there."""

        def slots(s: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
            dtypes = [dtype or self._moments or s.dtype for dtype in self.slots or ()]
            if self._master not in (None, s.dtype):
                dtypes.append(self._master)
            sharding = in_memory(s.sharding, self._slots_memory, "optimizer state")
            return tuple(jax.ShapeDtypeStruct(s.shape, dtype, sharding=sharding) for dtype in dtypes)

        return {path: tuple(map(slots, structs)) for path, structs in self.trained.items()}

    def argument_nbytes(self, what: str) -> int:
        """Bytes on a device that a compiled `"forward"` or `"train"` is given: a forward pass no slots only stated."""
        kinds = (PARAMETERS, LORA, OPTIMIZER) if what == "train" else (PARAMETERS, LORA)
        held = sum(sum(self.parts[kind].values()) for kind in kinds)
        return held if what == "train" else held + sum(self.shard_nbytes[path] for path in self.state)

    def _check_one_optimizer(self, model: ModelSpec, what_if: WhatIf) -> None:
        if model.optimized is None or (what_if.optimizer is None and what_if.lora_rank is None):
            return
        state = f"{len(self.state)} variables of state, such as {self.state[0]!r}" if self.state else "no state"
        has = f"{model.name} has an optimizer already ({state})"
        second = (
            f"optimizer={what_if.optimizer!r} would be a second one: {has}, which a plan counts; leave optimizer out"
        )
        pairs = f"lora_rank={what_if.lora_rank} plans pairs that are trained in place of the parameters, and {has}"
        if what_if.optimizer is not None:
            raise LazyModelError(f"{second}, or plan the model without its own")
        raise LazyModelError(f"{pairs} for these; plan the model without it")

    def _trained(
        self, model: ModelSpec, shardings: Mapping[str, Sharding]
    ) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        if self.slots is None and model.optimized is None:
            return {}
        trained: dict[str, tuple[jax.ShapeDtypeStruct, ...]] = {**self.pairs}
        if not trained:
            for path in model.optimized.paths if model.optimized is not None else _trainable(model):
                variable = model[path]
                trained[path] = (jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=shardings[path]),)
        if self.slots is not None:
            self.notes.append(
                f"training: {plural(len(self.slots), 'optimizer slot')} for each of "
                f"{sum(map(len, trained.values())):,} trainable variables"
                f"{'' if self._master is None else f', and master weights in {self._master.name}'}"
            )
        else:
            self.notes.append(
                f"training with the model's own optimizer: {len(self.state):,} variables of state for "
                f"{len(trained):,} trainable variables"
            )
        return trained

    def _quantize(self, model: ModelSpec, shardings: Mapping[str, Sharding], mode: str) -> None:
        roles = describe(model.variables)
        count = 0
        for path, variable in model.items():
            floating = jax.numpy.issubdtype(variable.dtype, np.floating) and variable.dtype.itemsize > 1
            matrix = floating and len(variable.shape) >= 2 and variable.size >= _SMALLEST_QUANTIZED
            other = variable.follows is not None or roles[path].role == "lora" or stays_on_host(variable)
            if other or not matrix:
                continue
            if path in self.trained and path not in self.pairs:
                mend = "add lora_rank, or leave out the optimizer"
                mend = mend if model.optimized is None else "plan the model without its optimizer"
                raise LazyModelError(
                    f"quantize={mode!r} takes {path!r} too, which is trained, and quantized parameters cannot be "
                    f"trained; {mend}"
                )
            shard = shardings[path].shard_shape(variable.shape)
            columns = math.prod(shard) // max(shard[-2], 1)
            held = self.offloaded if path in self.offloaded else self.parts[PARAMETERS]
            held[path] = -(-math.prod(shard) * _QUANTIZED_BITS[mode] // 8) + columns * _SCALE_NBYTES
            count += 1
        self.dtypes[PARAMETERS] = f"{mode}, {self.dtypes[PARAMETERS]}" if count else self.dtypes[PARAMETERS]
        self.notes.append(
            f"{mode}: {count} matrices are quantized after they are materialized, one by one, with a scale a column"
        )


def _trainable(model: ModelSpec) -> list[str]:
    own = (variable for variable in model.values() if variable.trainable and variable.follows is None)
    return [variable.path for variable in own if jax.numpy.issubdtype(variable.dtype, np.inexact)]


def slot_dtypes(optimizer: Any) -> tuple[Any, ...]:
    """The dtypes of the slots that a stated optimizer keeps of each parameter, None for the parameter's own."""
    if isinstance(optimizer, str):
        if optimizer.lower() not in _SLOTS:
            raise LazyModelError(
                f"optimizer {optimizer!r} is not known{closest(optimizer, _SLOTS)}; give the number of slots that it "
                f"keeps of each parameter, or one of {', '.join(sorted(_SLOTS))}"
            )
        optimizer = _SLOTS[optimizer.lower()]
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return (None,) * optimizer
    try:
        return tuple(jax.numpy.dtype(dtype) for dtype in cast("Sequence[Any]", optimizer))
    except TypeError:
        own = "; with_optimizer() takes an optimizer itself, and a plan then counts its state"
        mend = own if callable(optimizer) or hasattr(optimizer, "init") or hasattr(optimizer, "variables") else ""
        raise LazyModelError(
            f"optimizer is a name, a number of slots or their dtypes; got {optimizer!r}{mend}"
        ) from None


def _pairs(model: ModelSpec, shardings: Mapping[str, Sharding], rank: int, targets: str) -> dict[str, Pair]:
    """For each target of shape (…, n) a pair of shapes (…, rank) and (rank, n), as Keras makes them."""
    regex = re.compile(targets)
    pairs: dict[str, Pair] = {}
    for path, variable in model.items():
        if variable.follows is not None or len(variable.shape) < 2 or not regex.fullmatch(path):
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
    try:
        dtype = jax.numpy.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jax.numpy.issubdtype(dtype, np.floating):
        raise LazyModelError(f"{name} is a floating-point dtype such as 'float32' or 'bfloat16'; got {given!r}")
    return dtype


def _dtype_of(struct: Any) -> tuple[str, int]:
    return struct.dtype.name, struct.size * struct.dtype.itemsize


def _dtypes(sizes: Iterable[tuple[str, int]]) -> str:
    """The dtypes, of these and bytes, that have a hundredth of the bytes or more, largest first."""
    totals: collections.Counter[str] = collections.Counter()
    for name, nbytes in sizes:
        totals[name] += nbytes
    return ", ".join(name for name, nbytes in totals.most_common() if 100 * nbytes >= totals.total())


def _nbytes(structs: Mapping[str, Sequence[jax.ShapeDtypeStruct]]) -> dict[str, int]:
    """Path → bytes on a device."""

    def nbytes(struct: Any) -> int:
        shape = struct.shape if struct.sharding is None else struct.sharding.shard_shape(struct.shape)
        return math.prod(shape) * struct.dtype.itemsize

    return {path: sum(map(nbytes, some)) for path, some in structs.items()}
