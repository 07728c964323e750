"""Where safetensors files go in a bucket: what is there already, and the one step after which the new ones count.

Objects cannot be renamed, and there are no locks. Shards come under names that no other save has, `model-ID-…`, and
count when the index names them, which is replaced in one request, on the condition that it is still the one that was
there at the beginning: of two savers one succeeds. Only then are other saves' shards removed, the old ones and what
savers left that were killed. One file alone is uploaded in parts and appears, or replaces another, when the upload is
completed; where an index says what counts, it is a shard with an index, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from lazymodel._devices.agreement import agreement
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._remote.path import RemotePath
from lazymodel._remote.requests import Changed
from lazymodel._remote.upload import Version, delete, read_whole, replace, version_of
from lazymodel._save.destination import INDEX, SINGLE, TERMS, SavedFile, SaveOptions, check_file, index_text, old_files
from lazymodel._save.exchange import Exchange
from lazymodel._save.safetensors import layout, new_save_id
from lazymodel._save.stream import Sending, by_process, divided, row_nbytes
from lazymodel._show.progress import progress_for
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import JoinedCheckpoint
from lazymodel.checkpoints._safetensors import SafetensorsFile
from lazymodel.checkpoints._shards import open_loose

_OURS = re.compile(r"model-[0-9a-f]{16}-\d{5,9}-of-\d{5,9}\.safetensors")
_READ_ONLY = {
    "hf": "a repository on a hub takes commits: save to a folder, and upload that with `hf upload`",
    "https": "few web servers take files, and none of them in parts",
}
_READ_ONLY["http"] = _READ_ONLY["https"]


def save_remote(
    tensors: Mapping[str, LazyTensor],
    where: RemotePath,
    shardings: Sequence[Any],
    options: SaveOptions,
) -> None:
    """Saves tensors to a bucket. Where processes share them all of these call it, and each uploads files of its own."""
    exchange, save_id, processes = None, new_save_id(), [jax.process_index()]
    spread = [sharding for sharding in shardings if not sharding.is_fully_addressable]
    if spread:
        # All must be there before the first exchange, and do it alike.
        with agreement(shardings, **TERMS) as stage:
            check_writable(where)
            stage.outcome = f"use {options.budget} bytes of memory"
        devices = {device for sharding in spread for device in sharding.device_set}
        processes = sorted({device.process_index for device in devices})
        exchange = Exchange([*devices], row_nbytes(options.budget, len(processes)))
        save_id = exchange.first(save_id.encode()).decode()  # all name the files alike
    process = jax.process_index()
    leads = process == processes[0]
    with contextlib.ExitStack() as stack:
        with agreement(shardings, **TERMS) as stage:
            check_writable(where)
            files, checksum = layout(tensors, options.shard_size, options.metadata, save_id)
            memory = divided(options.budget, files, len(processes))
            target = RemoteDestination(where, files, save_id, options)
            shares = by_process(target.files, processes)
            if leads:
                stack.enter_context(target.begun())
            bar = progress_for(options.progress)
            stack.callback(bar.finish)
            bar.start(sum(file.nbytes - len(file.header) for file in shares[process]), f"{where.name}: saving")
            sending = Sending(
                shares, process, target.place, memory, bar, exchange, held=target.held, old=target.replaced
            )
            stack.callback(sending.abort)
            names = f"{target.files[0].name} (of {len(files)})"
            stage.outcome = f"write {len(tensors)} tensors (checksum {checksum}) to {names}"
        with target.deleted_if_failed(shares[process]), agreement(shardings, **TERMS) as stage:
            sending.run(stage.check)
        with agreement(shardings, **TERMS):
            if leads:
                target.commit(sending)


def check_writable(where: RemotePath) -> None:
    """Raises LazyModelError for a place that cannot be saved to."""
    if (reason := _READ_ONLY.get(where.store.url.kind)) is not None:
        raise LazyModelError(f"cannot save to {where}: {reason}. Expected s3://, gs:// or az://")


class RemoteDestination:
    """A file, `x.safetensors`, or a folder in a bucket, as it was when this was made.

    Attributes:
        files: With the names that they get there.
        held: Whether the one file is itself what counts, once its upload is completed.
    """

    def __init__(self, where: RemotePath, files: Sequence[SavedFile], save_id: str, options: SaveOptions) -> None:
        self._where, self._folder, self.files = where, where, list(files)
        if options.shard_size is None:
            check_file(where)
            self._folder, self.held = where.parent, True
            self._decides, old = where, [where.name] if where.is_file() else []
            leftovers: list[str] = []
        else:
            if where.is_file():
                raise LazyModelError(f"{where} is a file; give a folder, or a name that ends with .safetensors")
            self._decides = where / INDEX
            self._version = version_of(self._decides)  # before it is read: if it changes between them, it is noticed
            old = old_files(where, _OURS)
            self.held = len(files) == 1 and INDEX not in old
            leftovers = [path.name for path in where.glob("model-*.safetensors") if _OURS.fullmatch(path.name)]
            if self.held:
                self._decides = where / SINGLE
        if old and not options.overwrite:
            raise LazyModelError(
                f"there is a checkpoint already: {self._folder / old[0]}. "
                "Pass overwrite=True (--overwrite) to replace it"
            )
        if self.held:
            self._version = version_of(self._decides)
            names = [self._decides.name]
        else:
            names = [f"model-{save_id}-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
        self.files = [dataclasses.replace(file, name=name) for file, name in zip(files, names, strict=True)]
        # Each name of a loose shard is one of a checkpoint that a reader would mix with what is coming.
        self._loose = old if old and not self.held and not {INDEX, SINGLE} & set(old) else []
        kept = {self._decides.name, *names}
        self._old = [name for name in dict.fromkeys([*old, *leftovers]) if name not in kept]
        weights = {tensor: file.name for file in self.files for tensor, _, _ in file.tensors}
        self._index = index_text(sum(file.nbytes - len(file.header) for file in files), weights).encode()
        self._begins_commit = False

    @property
    def replaced(self) -> Version | None:
        """What is now where files go."""
        return self._version if self.held else None

    def place(self, file: SavedFile) -> RemotePath:
        """Where a file goes."""
        return self._folder / file.name

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        """Within the block files may come; where it fails all is as it was."""
        indexed = False
        try:
            if self._loose:
                indexed = self._index_old()
            with self.deleted_if_failed(self.files):
                yield
        except BaseException:
            if indexed and not self._committed():
                delete([self._decides])
            raise

    @contextlib.contextmanager
    def deleted_if_failed(self, files: Sequence[SavedFile]) -> Generator[None]:
        """Removes files where the block fails, but those that count by then."""
        try:
            yield
        except BaseException:
            if not self.held and not self._committed():
                delete([self.place(file) for file in files])  # what cannot be, the next save removes
            raise

    def commit(self, sending: Sending) -> None:
        """Makes complete files count instead of the old ones, which are removed."""
        self._begins_commit = True
        try:
            if self.held:
                if version_of(self._decides) != self._version:
                    raise Changed
                sending.complete()
            else:
                replace(self._decides, self._index, self._version)
        except Changed:
            raise LazyModelError(
                f"{self._where} was saved to by another saver meanwhile, whose checkpoint is there now. Save to "
                "another place, or once more to replace it"
            ) from None
        if failures := delete([self._folder / name for name in self._old]):
            warn(
                f"{self._where} is saved, but not all that it replaces could be removed: {listed(failures)}. The next "
                "save removes what has names of this library; remove others yourself"
            )

    def _committed(self) -> bool:
        """Whether the files count, which is read from the store: an answer may have been lost, or a Ctrl-C come."""
        if not self._begins_commit:
            return False
        try:
            return read_whole(self._decides) == self._index
        except CheckpointError:
            return True  # nobody knows, so nothing is removed

    def _index_old(self) -> bool:
        """Gives old shards without an index one, so that new ones can come beside them; whether it did."""
        try:
            parts = open_loose(self._folder, [self._folder / name for name in self._loose], SafetensorsFile)
            with JoinedCheckpoint(self._folder, parts) as old:
                weights = {name: tensor.leaf.file.rpartition("/")[2] for name, tensor in old.items()}
                total = sum(tensor.nbytes for tensor in old.values())
        except LazyModelError:  # they are not complete, or no checkpoint for another reason
            return False
        replace(self._decides, index_text(total, weights).encode(), None)
        self._version = version_of(self._decides)
        return True
