"""Steps of training in a bucket: a checkpointer for Keras' callback that saves with `lazymodel.save_step`.

The tensors of a step have the names that they have in Orbax checkpoints of the same callback:
`trainable_variables/model/dense/kernel`. Orbax itself reaches no bucket but Google's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from lazymodel import save_step
from lazymodel._remote.path import remote_path
from lazymodel._save.remote import check_writable


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
        check_writable(remote_path(url, storage_options))

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], *, custom_metadata: Mapping[str, Any]
    ) -> bool:
        """Saves the tree of variables as a step, and removes steps that are too many then."""
        (described,) = custom_metadata.values()  # the metadata and the data
        save_step(
            checkpointables["pytree"],
            self._url,
            step,
            max_to_keep=self.max_to_keep,
            **described,
            progress=False,
            storage_options=self._options,
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
