"""The function `restore`: reads a step of training into the object of an abstract model; also the state of training.

`save_step` writes steps, and `materialize` reads them; this module only chooses the step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

from lazymodel._abstract.framework import ModelSpec
from lazymodel._devices.collective import agreement
from lazymodel._devices.hardware import require_live
from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._mapping.source import respelled
from lazymodel._remote.path import location
from lazymodel.checkpoints._checkpoint import KEY, TrainingState, find_step, read_described
from lazymodel.checkpoints._open import open_checkpoint
from lazymodel.checkpoints._untrusted import read_json_object

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class _Abstract(Protocol[T_co]):
    """An abstract model that materializes to a `T_co`."""

    def materialize(self, checkpoint: Any = None, *, initialize: str | None = None) -> T_co: ...


def restore(
    model: _Abstract[T],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> T:
    """Restores a step of training exactly: weights, optimizer state, counts and PRNG keys, bit for bit.

    The mesh may differ from the one that saved, and the memory may be that of devices or hosts: `model` defines where
    each variable is placed, and a process reads only what its devices need.

    Args:
        model: The abstract model of the saved object, with its optimizer: `build_abstract(…).with_optimizer(…)`, or
            that of a function that returns both.
        path: The folder that was passed to `save_step`, from which the newest complete step is used; the folder of a
            step; or any checkpoint with the model's paths. Or the URL of one.
        step: The number of the step to restore.
        storage_options: For a URL: as for `open_checkpoint`.
        **options: Options of `materialize`, such as `max_host_memory` (bytes, or `"4GiB"`), `compile` and `report`;
            `initialize="missing"` initializes what was not saved, such as the state of another optimizer.

    Returns:
        The result of `model.materialize`.

    Raises:
        CheckpointError: There is no complete step, or none with this number; or it does not match: a variable has no
            tensor, a tensor has no variable, or shapes differ. Then nothing was restored.
        LazyModelError: `model` is not an abstract model.

    Example:
        >>> trained = sharded.with_optimizer(optax.adamw(1e-3))
        >>> lm.save_step(trained.materialize(), "training", 5, metadata={"loss": 0.5})
        >>> model, state = lm.restore(trained, "training")
        >>> lm.training_state("training").step
        5
    """
    if not isinstance(model, ModelSpec):
        got = type(model).__name__
        raise LazyModelError(f"restore takes the abstract model of what was saved, of build_abstract; got {got}")
    require_live(model.variables)
    with contextlib.ExitStack() as stack:
        with agreement(model.variables, done="restored"):
            if step is not None:
                path, storage_options = cast(Any, find_step(location(path, storage_options), step)), None
            checkpoint = stack.enter_context(open_checkpoint(path, storage_options))
            tensors = respelled(model, checkpoint)
            if missing := [name for name in model.numbers if name not in tensors]:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path} has no tensor for the number {missing[0]!r} of the model; numbers "
                    "are saved by lm.save and lm.save_step, or load it with materialize, which keeps the model's own"
                )
        return model.materialize(tensors, **{"initialize": "nothing", **options})


def training_state(
    path: str | os.PathLike[str], *, step: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> TrainingState | None:
    """The state of training when a step was saved; None if there is no complete step yet, so that training begins.

    Args:
        path: As for `restore`: a folder of steps, from which the newest complete one is used, or that of a step; or a
            URL.
        step: The number of the step.
        storage_options: For a URL: as for `open_checkpoint`.

    Raises:
        CheckpointError: There is no complete step of the given number, or it cannot be read.

    Example:
        >>> lm.training_state("nothing yet") is None
        True
    """
    where = location(path, storage_options)
    if (found := find_step(where, step)) is None:
        return None
    # The newest is looked for again as it is opened: it may have been removed for newer ones.
    with open_checkpoint(cast(Any, where if step is None else found)) as checkpoint:
        folder, text = checkpoint.path, (checkpoint.metadata or {}).get(KEY)
    folder = os.path.dirname(folder) if folder.endswith(".json") else folder
    if not (number := os.path.basename(folder)).isdecimal():
        raise CheckpointError(f"{folder}: expected a folder of steps, or a step, whose name is a number")
    if text is None:
        return TrainingState(folder, int(number), {}, None)
    return read_described(read_json_object(text.encode(), folder), folder, int(number))
