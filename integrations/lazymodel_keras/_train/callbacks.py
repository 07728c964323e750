"""A checkpoint callback that also saves where training was, also in buckets, and how to read that back.

Everything else is `keras.callbacks.OrbaxCheckpoint`. It has no place for epoch, data iterator or metadata of one's own,
and its steps do not say whether they count epochs or batches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import keras

import lazymodel
from lazymodel import CheckpointError, LazyModelError, open_checkpoint
from lazymodel._remote.path import remote_path
from lazymodel._remote.url import is_url, shown
from lazymodel.checkpoints._steps import KEY, described, is_nothing, read_described
from lazymodel.checkpoints._untrusted import read_json_file, read_json_object
from lazymodel_keras._record.remote import RemoteFiles, check_storage_options, has_obstore
from lazymodel_keras._train.restore import step_folder
from lazymodel_keras._train.steps import RemoteSteps

_Stock: Any = getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.Callback)


class TrainingCheckpoint(_Stock):
    """`keras.callbacks.OrbaxCheckpoint` that saves the epoch, the state of a data iterator and metadata with each step.

    On disks the checkpoints are those of the stock callback, and are restored with `restore` or by Keras itself; what
    is added is read with `training_state`.

    In buckets a step is a folder of safetensors, `s3://bucket/run/12/`, which `restore`, `training_state` and
    `lazymodel.open_checkpoint` read; Keras itself does not, and it has no configuration of the model. It is uploaded as
    `lazymodel.save` does it, by all processes, straight from the devices and with no more than 256 MiB of a host's
    memory; training goes on when it is there. Only a complete step is ever seen. A failure leaves nothing of it, and
    what a killed program left, a later save removes, unless `max_to_keep=None`.

    Args:
        directory: A folder to save to. It may be relative to the folder that is current when this is made, or begin
            with `~`; the stock callback never commits a step to such a one. Or a URL that begins with `s3://`, `gs://`
            or `az://`, which needs obstore; without it Orbax is asked, which reaches `gs://` only.
        metadata: What else to save, of types that JSON has: a mapping, or a function that is called at each save.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.
        **options: Those of the stock callback, such as `save_freq`, `max_to_keep`, `monitor` and `save_best_only`.

    Raises:
        LazyModelError: This version of Keras has no such callback, or nothing can be saved to the URL.
        CheckpointError: From `fit`: a step could not be saved. What fails in the background is raised when the next
            step is saved, or at the end of training, where the stock callback may say nothing. Earlier steps stay.

    Example:
        >>> checkpoint = lk.TrainingCheckpoint("checkpoints", metadata={"run": 3})
        >>> inputs, targets = np.ones((16, 16)), np.zeros((16, 8))
        >>> history = make_model().fit(inputs, targets, epochs=2, callbacks=[checkpoint], verbose=0)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if _Stock is keras.callbacks.Callback:
            raise LazyModelError(
                f"Keras {keras.__version__} has no keras.callbacks.OrbaxCheckpoint; upgrade it: pip install -U keras"
            )
        where = os.path.expanduser(os.fspath(directory))
        check_storage_options(where, storage_options)
        if is_url(where) and has_obstore():
            steps = RemoteSteps(where, storage_options)
            # The stock callback makes a checkpointer of Orbax' at once, which takes a folder on a disk only.
            with tempfile.TemporaryDirectory() as unused:
                super().__init__(unused, **options)
                self.checkpointer.close()
            self.directory, steps.max_to_keep = where, self.max_to_keep
            self.checkpointer = _Describing(steps, self._describe, shown(where))
        else:
            self._save_with_orbax(where, options)
        self._metadata = metadata
        self._epoch = self._batch = self._trained = 0
        # (batches taken from the data, its state then), from what was trained on last to what was taken last.
        self._states: collections.deque[tuple[int, Any]] = collections.deque()

    def _save_with_orbax(self, where: str, options: dict[str, Any]) -> None:
        # Orbax takes a relative folder, and then fails to write to it.
        where = where if is_url(where) else os.path.abspath(where)
        try:
            super().__init__(where, **options)
        except Exception as error:  # of many types: Orbax's own, those of the libraries that it reaches buckets with
            if not is_url(where):
                raise
            reason = str(error).replace(where, shown(where)).partition("\n")[0]
            raise LazyModelError(
                f"Orbax, which saves the steps without obstore, cannot save to {shown(where)}: {reason}. Install "
                "obstore, with which s3://, gs:// and az:// are saved to: pip install 'lazymodel[remote]'"
            ) from None  # which may show a query that signs
        self.checkpointer = _Describing(self.checkpointer, self._describe, where)

    def data(self, iterator: Any) -> Iterator[Any]:
        """The batches of an iterator, for `fit`, with its state noted after each.

        `fit` takes batches before it trains on them; what is saved with a step is the state after the last batch that
        was trained on. Give `fit` `steps_per_epoch`, since it takes this for data without an end, and `shuffle=False`.
        The `fit` of KerasHub's tasks takes datasets only: `keras.Model.fit(task, …)` takes this, of batches that are
        preprocessed already.

        Args:
            iterator: An iterator with `get_state()`, and `set_state(state)` to go on with, as Grain's have. A state is
                bytes or of types that JSON has.

        Raises:
            LazyModelError: It has no `get_state`, or there are several processes, whose iterators have states of their
                own.
        """
        if not callable(getattr(iterator, "get_state", None)):
            raise LazyModelError(
                f"expected an iterator with get_state() and set_state(), as Grain's have; got {type(iterator)}"
            )
        if jax.process_count() > 1:
            raise LazyModelError(
                "a checkpoint keeps the data state of one process only; save each process's own, in files named after "
                "jax.process_index(), and give fit the iterator itself"
            )
        self._trained = 0
        self._states = states = collections.deque([(0, iterator.get_state())])

        def noted() -> Iterator[Any]:
            # A generator, which `data` is not so that it complains at once: what Keras takes for a stream of batches.
            for count, batch in enumerate(iterator, 1):
                states.append((count, iterator.get_state()))
                yield batch

        return noted()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch, 0
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._trained += batch + 1 - self._batch
        self._batch = batch + 1
        while len(self._states) > 1 and self._states[1][0] <= self._trained:
            self._states.popleft()
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch + 1, 0
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        try:
            self.checkpointer.settle()
        finally:
            super().on_train_end(logs)  # which closes the checkpointer, and drops what that raises

    def wait_until_finished(self) -> None:
        """Waits until what was saved is on disk; raises CheckpointError where a step could not be saved."""
        self.checkpointer.settle()
        super().wait_until_finished()

    def _describe(self) -> dict[str, Any]:
        """What is saved besides the model: a step's metadata and data, as `lazymodel.save` has them."""
        given = self._metadata() if callable(self._metadata) else self._metadata
        where = {"epoch": self._epoch, "batch": self._batch, "metadata": dict(given or {})}
        return {KEY: described(where, self._states[0][1] if self._states else None)}


class _Describing:
    """An Orbax checkpointer that adds custom metadata to every step, and tells of every step that was not saved."""

    def __init__(self, checkpointer: Any, describe: Callable[[], dict[str, Any]], directory: str) -> None:
        self._checkpointer, self._describe, self._directory = checkpointer, describe, directory
        self._saving: list[tuple[int, Any]] = []

    def save_checkpointables(self, step: int, *args: Any, **options: Any) -> Any:
        options["custom_metadata"] = self._describe()
        with self._naming(step):
            return self._checkpointer.save_checkpointables(step, *args, **options)

    def save_checkpointables_async(self, step: int, *args: Any, **options: Any) -> Any:
        self.settle()  # Orbax waits for the step before, too
        options["custom_metadata"] = self._describe()
        with self._naming(step):
            saving = self._checkpointer.save_checkpointables_async(step, *args, **options)
        if saving is not None:  # it was not skipped
            self._saving.append((step, saving))
        return saving

    def settle(self) -> None:
        """Waits for what is saved in the background; raises CheckpointError where it was not."""
        while self._saving:
            step, saving = self._saving.pop()
            with self._naming(step):
                saving.result()

    @contextlib.contextmanager
    def _naming(self, step: int) -> Generator[None]:
        try:
            yield
        except Exception as error:  # Orbax' own, tensorstore's, the system's
            raise CheckpointError(
                f"step {step} was not saved to {self._directory}: {error or type(error).__name__}"
            ) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)


@dataclasses.dataclass(frozen=True)
class TrainingState(lazymodel.TrainingState):
    """Where training was when a checkpoint was saved, as `lazymodel.TrainingState`, and by epochs.

    The stock callback's `step` counts epochs from 0, or batches where `save_freq` is a number.

    Attributes:
        epoch: What to give `fit` as `initial_epoch`: the epochs that were completed. None where the stock callback
            saved it, and the number of updates does not tell.
        batch: Batches of the next epoch that were trained on already; 0 where epochs were saved.

    Example:
        >>> state = lk.training_state("checkpoints")  # saved as in the example of `TrainingCheckpoint`
        >>> state.epoch, state.step, state.metadata
        (2, 1, {'run': 3})
    """

    epoch: int | None
    batch: int


def training_state(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> TrainingState | None:
    """Where training was when a checkpoint was saved, by `TrainingCheckpoint` or the stock callback; None where nothing
    was saved yet, so that training begins.

    Args:
        path: The folder of a step, or one of steps, of which the newest complete one is taken; `~` is the home folder.
            Or the URL of one.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.

    Raises:
        CheckpointError: It is no such checkpoint, or what was saved with it cannot be read.

    Example:
        >>> lk.training_state("checkpoints").epoch  # saved as in the example of `TrainingCheckpoint`
        2
    """
    text = os.path.expanduser(os.fspath(path))
    check_storage_options(text, storage_options)
    files = RemoteFiles(storage_options)
    if files.serves(text) or not is_url(text):
        place = remote_path(text, storage_options) if is_url(text) else Path(text)
        if is_nothing(place):
            return None
    where = files.located(text)
    with open_checkpoint(where) as checkpoint:
        text_of_step = (checkpoint.metadata or {}).get(KEY)
        item = checkpoint.files[0] if text_of_step is not None else getattr(checkpoint, "item", None)
        folder = None if item is None else step_folder(where, str(item))
        number = "" if folder is None else folder.name.rpartition("_")[2]
        if folder is None or not number.isdecimal():
            raise CheckpointError(
                f"{shown(text)}: expected a step that a callback for training saved, found {checkpoint.format}"
            )
        updates = [
            int(checkpoint[name].read())
            for name in checkpoint
            if name.startswith("optimizer_variables/") and name.endswith("/iteration") and checkpoint[name].shape == ()
        ]
    step, file = int(number), folder / "_CHECKPOINT_METADATA"
    if text_of_step is not None:
        ours = read_json_object(text_of_step.encode(), str(folder))
    else:
        custom = read_json_file(file).get("custom_metadata") if file.exists() else None
        ours = cast("dict[str, Any]", custom).get(KEY) if isinstance(custom, dict) else None
    if ours is None:
        return TrainingState(str(folder), step, {}, None, _stock_epoch(step, max(updates, default=0)), 0)
    found, data = read_described(ours, folder)
    try:
        return TrainingState(str(folder), step, dict(found["metadata"]), data, int(found["epoch"]), int(found["batch"]))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: expected epoch, batch and metadata under {KEY!r}, found {error!r}") from error


def _stock_epoch(step: int, updates: int) -> int | None:
    """The epochs that were completed, where the stock callback's step is an epoch's number from 0, not batches."""
    # Epochs have the same number of updates each, at least one.
    return step + 1 if updates > step and updates % (step + 1) == 0 else None
