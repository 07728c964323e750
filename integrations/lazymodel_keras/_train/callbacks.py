"""A checkpoint callback that also saves the state of training, on disks and in buckets, and a function that reads it.

Everything else is `keras.callbacks.OrbaxCheckpoint`. It cannot save an epoch, a data iterator or the user's metadata,
and its steps do not show if they count epochs or batches.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, cast

import jax
import keras

from lazymodel import CheckpointError, LazyModelError, TrainingState, open_checkpoint, save_step
from lazymodel._remote.path import RemotePath, location
from lazymodel._remote.upload import check_writable
from lazymodel._remote.url import is_url, shown
from lazymodel._show.text import listed
from lazymodel.checkpoints._checkpoint import KEY, described, is_nothing, read_described
from lazymodel.checkpoints._open import located
from lazymodel.checkpoints._untrusted import read_json_file, read_json_object
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import by_path
from lazymodel_keras._record.files import has_obstore
from lazymodel_keras._train.restore import SAVE_ALL, other_optimizers, step_folder

_Stock: Any = getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.Callback)


class TrainingCheckpoint(_Stock):
    """`keras.callbacks.OrbaxCheckpoint` that saves the epoch, the state of a data iterator and metadata with each step.

    On disks the checkpoints are those of the stock callback, and are restored with `restore` or by Keras itself;
    `training_state` reads the additions.

    In buckets a step is a folder of safetensors, `s3://bucket/run/12/`, which `restore`, `training_state` and
    `lazymodel.open_checkpoint` read; Keras itself does not, and it has no configuration of the model. All processes
    upload it as `lazymodel.save` does, directly from the devices and with no more than 256 MiB of host memory; training
    continues when the upload is complete. Only complete steps are visible. After a failure nothing of the step remains,
    and a later save removes what a killed program left, unless `max_to_keep=None`.

    Args:
        directory: A folder to save to. It may be relative to the current folder at this time, or begin with `~`; the
            stock callback never commits a step to such a folder. Or a URL that begins with `s3://`, `gs://` or `az://`,
            which needs obstore; without it Orbax saves, and only to `gs://`.
        metadata: Further values to save, in types of JSON: a mapping, or a function that is called at each save.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.
        **options: Options of the stock callback, such as `save_freq`, `max_to_keep`, `monitor` and `save_best_only`.

    Raises:
        LazyModelError: This version of Keras has no such callback, or the URL is not writable.
        CheckpointError: From `fit`: a step could not be saved. A failure in the background is raised when the next
            step is saved, or at the end of training, where the stock callback may not report it. Earlier steps stay.

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
        place = where if is_url(where) and not has_obstore() else location(where, storage_options)
        if isinstance(place, RemotePath):
            check_writable(place)
            # The stock callback creates an Orbax checkpointer at once, which only takes a folder on a disk. Nothing is
            # saved in the background: the next batch's update may donate the arrays that are read.
            with tempfile.TemporaryDirectory() as unused:
                super().__init__(unused, **options | {"save_on_background": False})
                self.checkpointer.close()
            self.directory = where
            self.checkpointer = _RemoteSteps(where, max_to_keep=self.max_to_keep, storage_options=storage_options)
        elif isinstance(place, str):
            self._save_with_orbax(where, options)
        else:
            super().__init__(os.path.abspath(where), **options)  # Orbax fails to write to a relative folder
        self.checkpointer = _Describing(self.checkpointer, self._describe, shown(self.directory))
        self._metadata = metadata
        self._epoch = self._batch = self._trained = 0
        # (batches taken from the data, its state then), from the last batch trained on to the last batch taken.
        self._states: collections.deque[tuple[int, Any]] = collections.deque()

    def _save_with_orbax(self, url: str, options: dict[str, Any]) -> None:
        try:
            super().__init__(url, **options)
        except Exception as error:  # of many types: Orbax' own, and those of the libraries that access buckets
            reason = str(error).replace(url, shown(url)).partition("\n")[0]
            raise LazyModelError(
                f"Orbax, which saves the steps without obstore, cannot save to {shown(url)}: {reason}. Install "
                "obstore, with which s3://, gs:// and az:// are saved to: pip install 'lazymodel[remote]'"
            ) from None  # it may show a signing query

    def data(self, iterator: Any) -> Iterator[Any]:
        """The batches of an iterator, for `fit`; its state is recorded after each.

        `fit` takes batches before it trains on them; a step is saved with the state after the last batch that was
        trained on. Pass `steps_per_epoch` to `fit`, since it treats this as data without an end, and `shuffle=False`.
        The `fit` of KerasHub's tasks takes datasets only: `keras.Model.fit(task, …)` takes this, with batches that are
        preprocessed already.

        Args:
            iterator: An iterator with `get_state()`, and `set_state(state)` to resume from a state, like those of
                Grain. A state is bytes or a value in types of JSON.

        Raises:
            LazyModelError: It has no `get_state`, or there are several processes, whose iterators have separate
                states.
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
            # A generator, since Keras treats one as a stream of batches; `data` is not one, so that it raises at once.
            for count, batch in enumerate(iterator, 1):
                states.append((count, iterator.get_state()))
                yield batch

        return noted()

    def set_model(self, model: Any) -> None:
        self._all = _upstream.callbacks_of_caller()
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises LazyModelError for what a step would not hold, before anything is trained."""
        if self.save_weights_only:
            return
        if others := other_optimizers(self.model):
            raise LazyModelError(
                f"TrainingCheckpoint saves the state of `model.optimizer` only, and {self.model.name!r} also has "
                f"{listed(others)}. {SAVE_ALL}; or pass save_weights_only=True"
            )
        before = self._all[: self._all.index(self)] if self in self._all else []
        swaps = (each for each in before if isinstance(each, keras.callbacks.SwapEMAWeights))
        if self.save_freq == "epoch" and any(swap.swap_on_epoch for swap in swaps):
            raise LazyModelError(
                "SwapEMAWeights(swap_on_epoch=True) comes before TrainingCheckpoint in callbacks, so averages would be "
                "saved as weights, and weights as averages: give TrainingCheckpoint first"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch, 0
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._trained += batch + 1 - self._batch
        self._batch = batch + 1
        while len(self._states) > 1 and self._states[1][0] <= self._trained:
            self._states.popleft()
        with _unique_paths(self.model):
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch + 1, 0
        with _unique_paths(self.model):
            super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        try:
            self.checkpointer.settle()
        finally:
            super().on_train_end(logs)  # closes the checkpointer, and drops its errors

    def wait_until_finished(self) -> None:
        """Waits until everything is saved to disk; raises CheckpointError if a step could not be saved."""
        self.checkpointer.settle()
        super().wait_until_finished()

    def _describe(self) -> dict[str, Any]:
        """Custom metadata of a step: the arguments of `lazymodel.save_step` other than the model."""
        given = self._metadata() if callable(self._metadata) else self._metadata
        where = {"epoch": self._epoch, "batch": self._batch, "metadata": dict(given or {})}
        return {KEY: described(where, self._states[0][1] if self._states else None)}


@contextlib.contextmanager
def _unique_paths(model: Any) -> Generator[None]:
    """Within the block, a model whose variables have equal paths gives its state with the names of `build_abstract`.

    Keras' own `get_state_tree` raises for such a model.
    """
    groups = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }
    if all(len({variable.path for variable in group}) == len(group) for group in groups.values()):
        yield
        return

    def state_tree() -> dict[str, Any]:
        tree: dict[str, Any] = {name: {} for name in groups}
        for name, group in groups.items():
            for path, variable in by_path(group).items():
                *parts, last = path.split("/")
                functools.reduce(lambda inner, part: inner.setdefault(part, {}), parts, tree[name])[last] = (
                    variable.value
                )
        return tree

    object.__setattr__(model, "get_state_tree", state_tree)  # Keras would keep it as a part of the model
    try:
        yield
    finally:
        object.__delattr__(model, "get_state_tree")


class _RemoteSteps:
    """A checkpointer that saves with `lazymodel.save_step`, since Orbax itself can only access Google's buckets.

    Tensors have the same names as in Orbax checkpoints: `trainable_variables/model/dense/kernel`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url, self._options = url.rstrip("/"), options

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], *, custom_metadata: Mapping[str, Any]
    ) -> None:
        save_step(checkpointables["pytree"], self._url, step, **custom_metadata[KEY], **self._options, progress=False)

    def wait(self) -> None:
        pass

    close = wait


class _Describing:
    """A checkpointer that adds custom metadata to every step, and raises for every step that was not saved."""

    def __init__(self, checkpointer: Any, describe: Callable[[], dict[str, Any]], directory: str) -> None:
        self._checkpointer, self._describe, self._directory = checkpointer, describe, directory
        self._saving: tuple[int, Any] | None = None  # the step that is being saved in the background

    def save_checkpointables(self, step: int, *args: Any, **options: Any) -> Any:
        options["custom_metadata"] = self._describe()
        with self._naming(step):
            return self._checkpointer.save_checkpointables(step, *args, **options)

    def save_checkpointables_async(self, step: int, *args: Any, **options: Any) -> Any:
        self.settle()  # Orbax also waits for the previous step
        options["custom_metadata"] = self._describe()
        with self._naming(step):
            saving = self._checkpointer.save_checkpointables_async(step, *args, **options)
        self._saving = None if saving is None else (step, saving)  # None if it was skipped
        return saving

    def settle(self) -> None:
        """Waits for the step that is being saved in the background; raises CheckpointError if it was not saved."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._naming(saving[0]):
                saving[1].result()

    @contextlib.contextmanager
    def _naming(self, step: int) -> Generator[None]:
        try:
            yield
        except Exception as error:  # Orbax' own, tensorstore's, the system's
            reason = error or type(error).__name__
            raise CheckpointError(f"step {step} was not saved to {self._directory}: {reason}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)


def training_state(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> TrainingState | None:
    """What `lazymodel.training_state` returns, also for steps of `TrainingCheckpoint` on disks and the stock callback.

    The stock callback's `step` counts epochs from 0, or batches if `save_freq` is a number. It saves no epoch: `epoch`
    is None if the number of updates does not show it.

    Args:
        path: The folder of a step, or a folder of steps, from which the newest complete one is used; `~` is the home
            folder. Or the URL of one.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.

    Raises:
        CheckpointError: It is not such a checkpoint, or the saved state cannot be read.

    Example:
        >>> state = lk.training_state("checkpoints")  # saved as in the example of `TrainingCheckpoint`
        >>> state.epoch, state.step, state.metadata
        (2, 1, {'run': 3})
    """
    text = os.path.expanduser(os.fspath(path))
    if is_nothing(location(text, storage_options)):
        return None
    where = located(text, storage_options)
    with open_checkpoint(cast(Any, where)) as checkpoint:
        about = (checkpoint.metadata or {}).get(KEY)
        inside = getattr(checkpoint, "item", None) if about is None else checkpoint.files[0]
        folder = None if inside is None else step_folder(where, str(inside))
        number = "" if folder is None else folder.name.rpartition("_")[2]
        if folder is None or not number.isdecimal():
            raise CheckpointError(
                f"{shown(text)}: expected a step that a callback for training saved, found {checkpoint.format}"
            )
        counts = [name for name in checkpoint if re.fullmatch("optimizer_variables/.*/iteration", name)]
        updates = max((int(checkpoint[name].read()) for name in counts if checkpoint[name].shape == ()), default=0)
    step, file = int(number), folder / "_CHECKPOINT_METADATA"
    if about is not None:
        ours = read_json_object(about.encode(), str(folder))
    else:
        custom: Any = read_json_file(file).get("custom_metadata") if file.exists() else None
        ours = custom.get(KEY) if isinstance(custom, dict) else None
    if ours is None:
        # The stock callback's step is an epoch's number from 0, or a number of batches. All epochs have the same number
        # of updates, at least one.
        by_epochs = updates > step and updates % (step + 1) == 0
        return TrainingState(str(folder), step, {}, None, step + 1 if by_epochs else None)
    return read_described(ours, str(folder), step)
