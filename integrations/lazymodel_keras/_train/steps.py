"""Steps of training in a bucket: a checkpointer for Keras' callback that saves with `lazymodel.save`.

Each step is a folder of safetensors, named by its number, whose tensors have the names that they have in Orbax
checkpoints of the same callback: `trainable_variables/model/dense/kernel`. Orbax itself reaches no bucket but Google's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

import jax

from lazymodel import CheckpointError, LazyModelError, save
from lazymodel._abstract.paths import flatten_paths
from lazymodel._errors import warn
from lazymodel._remote.path import RemotePath, remote_path
from lazymodel._remote.upload import delete
from lazymodel._save.remote import check_writable
from lazymodel._show.text import listed
from lazymodel.checkpoints._orbax_folder import find_item
from lazymodel.checkpoints._steps import DECIDING, is_complete, step_folders


class RemoteSteps:
    """What `keras.callbacks.OrbaxCheckpoint` asks of its checkpointer, for a folder in a bucket.

    Args:
        url: The folder.
        storage_options: As of `lazymodel.save`.

    Attributes:
        max_to_keep: How many steps stay, the newest; None for all.

    Raises:
        LazyModelError: Nothing can be saved there.
    """

    max_to_keep: int | None = None

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self._url, self._options = url.rstrip("/"), storage_options
        self._looked = False
        check_writable(remote_path(url, storage_options))

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], *, custom_metadata: Mapping[str, Any]
    ) -> bool:
        """Saves the tree of variables as a step, and removes steps that are too many then."""
        if not self._looked:
            folder = remote_path(self._url, self._options)
            if find_item(folder) is not None:
                raise LazyModelError(
                    f"{folder} has a checkpoint of Orbax, which would hide the step; use another folder"
                )
            self._looked = True
        arrays = flatten_paths(checkpointables["pytree"])
        first: dict[int, str] = {}  # variables may share an array, which `save` would write under one name only
        for name, array in arrays.items():
            first.setdefault(id(array), name)
        save(
            arrays,
            f"{self._url}/{step}",
            mapping=lambda tensors: {name: tensors[first[id(array)]] for name, array in arrays.items()},
            metadata={key: json.dumps(value) for key, value in custom_metadata.items()},
            progress=False,
            storage_options=self._options,
        )
        if self.max_to_keep is not None and jax.process_index() == 0:
            try:
                failures = self._remove_old(step, self.max_to_keep)
            except CheckpointError as error:
                failures = [str(error)]
            if failures:
                warn(
                    f"step {step} is saved, but not all of older ones could be removed: {listed(failures)}. The next "
                    "save tries again"
                )
        return True

    def save_checkpointables_async(self, *args: Any, **options: Any) -> Future[bool]:
        """The same, done when it returns: the next batch's update may donate the arrays that are read."""
        saved: Future[bool] = Future()
        saved.set_result(self.save_checkpointables(*args, **options))
        return saved

    def wait(self) -> None:
        """Nothing is saved in the background."""

    def close(self) -> None:
        """Nothing is open."""

    def _remove_old(self, saved: int, most: int) -> list[str]:
        """Removes what is complete beyond the newest, and what savers left in older steps that were killed.

        Returns what could not be removed, in words.
        """
        failures: list[str] = []
        kept = 0
        for number, place in step_folders(remote_path(self._url, self._options)):
            folder = cast(RemotePath, place)
            complete = is_complete(folder)
            kept += complete
            if number != saved and (kept > most if complete else number < saved):
                # What makes it count goes first, so that a step is never there without its shards.
                shards = [*folder.glob("model-*.safetensors")]
                failures += delete([folder / name for name in DECIDING]) or delete(shards)
        return failures
