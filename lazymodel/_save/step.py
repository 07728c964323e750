"""A step of training into a folder of its own: `save_step`, which also removes older ones."""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lazymodel._abstract.adapters import adapters
from lazymodel._devices.collective import agreement
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._remote.path import Location, RemotePath, location, matching
from lazymodel._remote.upload import delete
from lazymodel._save.atomic import staging, writing
from lazymodel._save.save import TERMS, roles, save, values_of
from lazymodel._show.text import listed
from lazymodel.checkpoints._checkpoint import DECIDING, KEY, described, is_complete, step_folders
from lazymodel.checkpoints._open import orbax_in, staging_folder, weight_files


def save_step(
    model: Any,
    folder: str | os.PathLike[str],
    step: int,
    *,
    metadata: Mapping[str, Any] | None = None,
    data: Any = None,
    max_to_keep: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Saves a step of training, completely or not at all, for `restore` to resume from.

    A step is a folder of safetensors, `folder/100/`, written as by `save`, with all that it promises of failures, kills
    and several processes. It counts when it is complete; earlier steps stay as they are until then.

    Args:
        model: As of `save`: what an abstract model materialized, as training left it.
        folder: A folder of steps, and of no other checkpoint. Or a URL that begins with `s3://`, `gs://` or `az://`.
        step: The number of the step, from 0.
        metadata: Anything else to save, of types that JSON has; `training_state` returns it.
        data: The state of a data iterator, `iterator.get_state()`: bytes, or of types that JSON has. Where several
            processes save, it is the same in all of them.
        max_to_keep: Number of steps that stay, those of the highest numbers and this one; None for all. Leftovers of
            killed savers in earlier steps are removed, too.
        storage_options: For URLs, as of `open_checkpoint`.
        **options: Those of `save`, such as `max_host_memory` (bytes, or `"1GiB"`), `overwrite` and `progress`.

    Raises:
        LazyModelError: As `save`; there is another checkpoint in the folder, which would hide the step; or `metadata`
            or `data` has other types.
        CheckpointError: Another process failed.

    Example:
        >>> trained = sharded.with_optimizer(optax.adamw(1e-3))
        >>> model, state = trained.materialize()
        >>> lm.save_step((model, state), "steps", 5, metadata={"loss": 0.5}, max_to_keep=3)
        >>> model, state = lm.restore(trained, "steps")
    """
    if unknown := [name for name in options if name in ("mapping", "format")]:
        raise LazyModelError(f"save_step takes no argument {unknown[0]}: steps are safetensors under the model's paths")
    held = values_of(model)[1]
    with agreement(held, **TERMS):
        if max_to_keep is not None and (not isinstance(cast(Any, max_to_keep), int) or max_to_keep < 1):
            raise LazyModelError(f"max_to_keep is a number of steps, from 1, or None for all; got {max_to_keep!r}")
        for adapter in adapters():
            advise = getattr(adapter, "step_advice", None)  # adapters elsewhere may not have it
            if advise is not None and (advice := advise(model)):
                raise LazyModelError(f"save_step: {advice}")
        number = _number(step)
        about = {KEY: json.dumps(described(metadata, data))}
        _check_folder(location(folder, storage_options))
        where = os.fspath(folder).rstrip("/")
    save(model, f"{where}/{number}", metadata=about, storage_options=storage_options, **options)
    if max_to_keep is not None and roles(held)[1]:
        try:
            failures = _remove_old(location(where, storage_options), number, max_to_keep)
        except CheckpointError as error:
            failures = [str(error)]
        if failures:
            warn(
                f"step {number} is saved, but not all of older ones could be removed: {listed(failures)}. The next "
                "save tries again"
            )


def _number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise LazyModelError(f"step is a number from 0; got {step!r}")
    return number


def _check_folder(folder: Location) -> None:
    """Raises LazyModelError where what is in a folder would hide a step."""
    if folder.suffix == ".safetensors" or not (folder.is_dir() or not folder.exists()):
        raise LazyModelError(f"{folder} is the name of a file; give the folder of steps")
    if folder.is_dir() and (found := next((file.name for file in weight_files(folder)), "") or orbax_in(folder)):
        raise LazyModelError(f"{folder} has a checkpoint, {found}, which would hide the step; use another folder")


def _remove_old(folder: Location, saved: int, most: int) -> list[str]:
    """Removes complete steps beyond the newest, and what killed savers left in earlier ones.

    Returns what could not be removed, in words.
    """
    failures: list[str] = []
    kept = 0
    for number, step in step_folders(folder):
        complete = is_complete(step)
        kept += complete
        goes = number != saved and (kept > most if complete else number < saved)
        # What makes it count goes first, so that a step is never there without its shards.
        names = [*DECIDING, *(path.name for path in matching(step, "model-*.safetensors"))] if goes else []
        if isinstance(step, RemotePath):
            deciding, shards = names[: len(DECIDING)], names[len(DECIDING) :]
            failures += delete([step / name for name in deciding]) or delete([step / name for name in shards])
        elif goes or (complete and staging_folder(step, inside=True).exists()):
            failures += _removed(step, names)
    return failures


def _removed(step: Path, names: Sequence[str]) -> list[str]:
    """Removes files of a step, and what a killed saver left there."""
    try:
        with writing(step):
            with staging(step, inside=True):  # so that nobody saves there meanwhile
                for name in names:
                    (step / name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another saver removed it as well
                if not os.listdir(step):  # there may be files of others
                    step.rmdir()
    except LazyModelError as error:
        return [str(error)]
    return []
