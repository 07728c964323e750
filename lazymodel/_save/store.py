"""Where safetensors files go in a bucket: what is there already, and the one step after which the new ones count.

Objects cannot be renamed, and there are no locks. Shards come under names that no other save has, `model-ID-…`, and
count when the index names them, which is replaced in one request, on the condition that it is still the one that was
there at the beginning: of two savers one succeeds. Only then are other saves' shards removed, the old ones and what
savers left that were killed. One file alone is uploaded in parts and appears, or replaces another, when the upload is
completed; where an index says what counts, it is a shard with an index, too.

Each file is a stream of bytes, sent by one process from beginning to end. It reads what it can; tensors that are spread
over the devices of several processes come to it by `ReduceScatter`, a chunk in each round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lazymodel._devices.collective import CollectiveScope
from lazymodel._devices.hardware import process_mesh
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._remote.path import RemotePath, reading_ahead
from lazymodel._remote.requests import Changed, Failure
from lazymodel._remote.upload import (
    Upload,
    arrived,
    check_writable,
    delete,
    one_thread,
    parts_of,
    read_whole,
    replace,
    version_of,
)
from lazymodel._save.files import Destination, SavedFile, SaveOptions, check_overwrite, complete, divided, in_threads
from lazymodel._save.safetensors import INDEX, SINGLE, check_file, check_folder, index_of, index_of_loose, old_files
from lazymodel._save.write import chunks_of, owned, packed
from lazymodel._show.progress import reported
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.boxes import Box, box_shape, fresh_view, geometry_of, strided, whole_box
from lazymodel._tensors.buffers import Scratch, Workspace, empty_aligned, parallel
from lazymodel._tensors.convert import assign
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import fill, required_ranges
from lazymodel.checkpoints._safetensors import FLOAT4

_CHUNK = 8 << 20  # bytes that are read at a time: no more than a part
_THREADS = 4  # that read chunks ahead of what is sent; they overlap transfers and transposing
# Uploads of an object, at most. Parts are sent again by themselves; what begins and completes an upload is not, where
# the connection breaks off, since it may have been done.
_UPLOADS = 4
_COPIES = 4  # of a chunk at a time for each thread: being read and made, made, and sent
_OURS = re.compile(r"model-[0-9a-f]{16}-\d{5,9}-of-\d{5,9}\.safetensors")


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Bytes of a file that follow each other."""

    name: str  # of the tensor that they belong to
    tensor: LazyTensor
    box: Box
    nbytes: int
    last: bool

    @property
    def shared(self) -> bool:
        return not complete(self.tensor.source)

    def read(self, workspace: Workspace) -> np.ndarray:
        """All of it, of a tensor that is not shared."""
        values = empty_aligned(box_shape(self.box), self.tensor.dtype)
        fill(self.tensor, [self.box], [values], workspace)
        return packed(values) if values.dtype == FLOAT4 else values.reshape(-1).view(np.uint8)

    def contribute(self, row: np.ndarray, workspace: Workspace, *, leads: bool) -> None:
        """Fills in what this process is to give of a shared tensor's."""
        part = self.tensor.box(self.box)
        for own, target in owned(part, fresh_view(part.shape, part.itemsize), leads=leads):
            values = empty_aligned(own.shape, own.dtype)
            fill(own, [whole_box(own.shape)], [values], workspace)
            assign(strided(row, geometry_of(target), own.dtype), values)


def _chunks(file: SavedFile, chunk: int, row: int) -> Iterator[_Chunk]:
    """A file's tensors in chunks, in order; `row` is the limit for what is shared."""
    for name, tensor, _ in file.tensors:
        if tensor.size:
            half = tensor.dtype == FLOAT4
            tensor = tensor.reshape(-1) if half else tensor
            boxes = chunks_of(tensor, chunk if complete(tensor.source) else row)
            for box in boxes:
                nbytes = math.prod(box_shape(box)) * tensor.itemsize // (2 if half else 1)
                yield _Chunk(name, tensor, box, nbytes, box is boxes[-1])


# Bytes from process to process, over the devices' own network: each process sends some to each, and gets what it owns.
#
# An object in a store is written by one process, and the tensors in it are spread over the devices of several. Every
# process fills in what it holds of the bytes that each other one needs next, with zeros for what it does not hold, and
# the sum of all, of which each process takes its own row, is what they hold together. One program serves all of it,
# whatever the arrays' shapes, types and shardings.


_WORD = np.dtype(np.uint32)  # what is summed: no byte is carried over to another, since all but one are zero


class ReduceScatter:
    """A collective between processes that share devices; all of them make it and call it alike.

    Attributes:
        processes: Their numbers, in order; a row of what is given for each.
        nbytes: Bytes of a row.
    """

    def __init__(self, devices: Sequence[Any], nbytes: int) -> None:
        mesh = process_mesh(devices)
        each, self.processes = mesh.shape["device"], [row[0].process_index for row in mesh.devices]
        self._local = list(mesh.devices[self.processes.index(jax.process_index())])
        # A device has as many words of each row, and one more for the number of processes that have failed.
        self._words = -(-nbytes // (each * _WORD.itemsize))
        self.nbytes = each * self._words * _WORD.itemsize
        self._given = NamedSharding(mesh, P("process", None, "device", None))
        summed = NamedSharding(mesh, P("process", "device", None))
        self._sum = jax.jit(_sum, out_shardings=summed)

    def __call__(self, rows: np.ndarray, *, failed: bool = False) -> np.ndarray | None:
        """Gives the rows of all processes (`uint8[processes, nbytes]`) and takes this one's, `uint8[nbytes]`.

        None where any process has failed: it is the last time then, for all of them.
        """
        count, each = len(self.processes), len(self._local)
        words = rows.view(_WORD).reshape(count, each, self._words)
        shape = (count, count, each, self._words + 1)
        shards: list[Any] = []
        for number, device in enumerate(self._local):
            shard = np.empty((1, count, 1, self._words + 1), _WORD)
            shard[0, :, 0, :-1], shard[0, :, 0, -1] = words[:, number], failed
            shards.append(jax.device_put(shard, device))
        given: Any = jax.make_array_from_single_device_arrays(shape, self._given, shards)
        summed: Any = self._sum(given)
        own = {shard.device: np.asarray(shard.data)[0, 0] for shard in summed.addressable_shards}
        pieces = [own[device] for device in self._local]
        if any(piece[-1] for piece in pieces):
            return None
        return np.concatenate([piece[:-1] for piece in pieces]).view(np.uint8)

    def first(self, text: bytes) -> bytes:
        """Returns the first process's value in all processes."""
        rows = np.zeros((len(self.processes), self.nbytes), np.uint8)
        if jax.process_index() == self.processes[0]:
            rows[:, : len(text)] = np.frombuffer(text, np.uint8)
        row = self(rows)
        assert row is not None
        return row[: len(text)].tobytes()


def _sum(rows: jax.Array) -> jax.Array:
    return jnp.sum(rows, 0, dtype=rows.dtype)


class _OtherFailed(Exception):
    """Another process has failed, and the caller learns why at the end of the stage."""


class _Rounds:
    """Rounds in each of which every process gets the next chunk that it sends of the tensors that several hold."""

    def __init__(
        self, collective: ReduceScatter, shares: dict[int, list[SavedFile]], chunk: int, *, leads: bool
    ) -> None:
        self._collective, self._leads, self._workspace = collective, leads, Workspace(chunk)
        self._own = collective.processes.index(jax.process_index())
        turns = [
            [each for file in shares[process] for each in _chunks(file, chunk, collective.nbytes) if each.shared]
            for process in collective.processes
        ]
        self._rounds = itertools.zip_longest(*turns)
        self._over = False  # True if no process waits for another round

    def next(self, *, failed: bool = False) -> np.ndarray | None:
        """Returns the bytes of this process's next chunk, or None if no process has another one.

        A process that fails, by a Ctrl-C as well, says so in one more round: none waits for it in vain.
        """
        if self._over or (chunks := next(self._rounds, None)) is None:
            return None
        rows = np.zeros((len(chunks), self._collective.nbytes), np.uint8)
        failure: BaseException | None = None
        try:
            for row, chunk in zip(rows, () if failed else chunks, strict=False):
                if chunk is not None:
                    chunk.contribute(row, self._workspace, leads=self._leads)
        except BaseException as error:
            failure = error
        self._over = True
        row = self._collective(rows, failed=failed or failure is not None)
        self._over = row is None
        if failure is not None:
            raise failure
        if row is None:
            raise _OtherFailed
        own = chunks[self._own]
        return row[: own.nbytes if own is not None else 0]


class StoreDestination(Destination):
    """A file, `x.safetensors`, or a folder in a bucket, as it was when this was made.

    `files` have the names that they get there once they are written.

    Args:
        held: The arrays whose processes save together.
    """

    def __init__(
        self, where: RemotePath, files: Sequence[SavedFile], options: SaveOptions, held: Mapping[str, Any]
    ) -> None:
        check_writable(where)
        self.files, self._where, self._folder, self._options = files, where, where, options
        shared = [each.sharding for each in held.values() if not each.sharding.is_fully_addressable]
        self._devices = sorted({device for each in shared for device in each.device_set}, key=lambda each: each.id)
        self._processes = sorted({device.process_index for device in self._devices}) or [jax.process_index()]
        self._divide()
        self._own: Sequence[SavedFile] = ()  # the files that this process sends
        self._sent = Counter[str]()  # chunks of each file
        self._last: Upload | None = None  # of the one file that counts itself
        self._named = self._begins_commit = self._indexed = False
        self._find_old(alone=options.shard_size is None)

    def _divide(self) -> None:
        """Divides the budget; raises LazyModelError where it is too small for these files."""
        budget, count = self._options.budget, len(self._processes)
        self._parts, quarter = budget // 2, budget // 4  # bytes on their way to the store
        reading = budget - self._parts - (quarter if count > 1 else 0)
        self._ahead, unit = divided(self.files, budget, reading)
        sizes = [parts.nbytes for file in self.files if (parts := parts_of(file.nbytes, self._parts)) is not None]
        if len(sizes) < len(self.files):
            longest = max(file.nbytes for file in self.files)
            raise LazyModelError(
                f"max_host_memory={format_bytes(budget)} is too little for a file of {format_bytes(longest)}, which is "
                "sent in parts; give more, or save in smaller shards"
            )
        largest = min(_CHUNK, *sizes)
        self._threads, self._chunk = in_threads(reading - self._ahead, unit, _THREADS, largest, _COPIES)
        # Bytes that a process gets in a round: each holds two rows for each, and its own.
        self._row = max(min(_CHUNK, quarter // (2 * count + 2)), 1)

    def _find_old(self, *, alone: bool) -> None:
        """Finds what is there: files, and the version of the one that decides what counts."""
        leftovers: list[str] = []
        if alone:
            check_file(self._where)
            self._folder, self._decides = self._where.parent, self._where
            old = [self._where.name] if self._where.is_file() else []
        else:
            check_folder(self._where)
            self._decides = self._where / INDEX
            self._version = version_of(self._decides)  # before it is read: if it changes between them, it is noticed
            old = old_files(self._where, _OURS)
            leftovers = [path.name for path in self._where.glob("model-*.safetensors") if _OURS.fullmatch(path.name)]
            alone = len(self.files) == 1 and INDEX not in old
            if alone:
                self._decides = self._where / SINGLE
        self._there = self._folder / old[0] if old else None
        self._alone = alone  # the one file is itself what counts, once its upload is completed
        if alone:
            self._version = version_of(self._decides)
        self._index_of_old = "" if alone else index_of_loose(self._folder, old)
        self._old = [name for name in dict.fromkeys([*old, *leftovers]) if name != self._decides.name]

    @contextlib.contextmanager
    def stage(self, *, leads: bool, overwrite: bool) -> Generator[None]:
        self._leads = leads
        with one_thread() as self._calls:
            try:
                if leads:
                    check_overwrite(self._there, overwrite)
                    if self._index_of_old:
                        replace(self._decides, self._index_of_old.encode(), None)
                        self._version, self._indexed = version_of(self._decides), True
                yield
            except BaseException:
                if self._last is not None:
                    self._last.abort()
                if leads:
                    self._delete(self.files if self._named else ())
                raise

    def write(self, scope: CollectiveScope) -> None:
        """Sends this process's files, and gives the others what they need of its tensors, until any process fails."""
        collective, save_id = None, self._options.save_id
        if self._devices:
            collective = ReduceScatter(self._devices, self._row)
            save_id = collective.first(save_id.encode()).decode()  # all name the files alike
        ids = self._options.save_id.encode(), save_id.encode()
        count = len(self.files)
        names = [f"model-{save_id}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        self.files = [
            dataclasses.replace(file, name=name, header=file.header.replace(*ids))
            for file, name in zip(self.files, [self._decides.name] if self._alone else names, strict=True)
        ]
        self._named = True  # as no other file is
        ordered = sorted(self.files, key=lambda file: -file.nbytes)  # so that all send about as many bytes
        shares = {process: ordered[number :: len(self._processes)] for number, process in enumerate(self._processes)}
        self._own = own = shares[jax.process_index()]
        self._rounds = collective and _Rounds(collective, shares, self._chunk, leads=self._leads)
        self._store = self._where.store.open_for_parts()
        total = sum(file.nbytes - len(file.header) for file in own)
        try:
            with reported(self._options.bar, total, f"{self._where.name}: saving"):
                for file in own:
                    self._last = self._send(file, scope.check, hold=self._alone)
                while self._rounds is not None and self._rounds.next() is not None:
                    scope.check()
        except _OtherFailed:
            pass
        except BaseException:
            with contextlib.suppress(_OtherFailed):
                if self._rounds is not None:
                    self._rounds.next(failed=True)
            raise

    def abort(self) -> None:
        self._delete(self._own)

    def _send(
        self, file: SavedFile, check: Callable[[], None], *, hold: bool = False, begun: Upload | None = None
    ) -> Upload | None:
        """Uploads a file; with `hold`, returns the upload before the step that makes it visible."""
        path, parts = self._folder / file.name, parts_of(file.nbytes, self._parts)
        assert parts is not None
        # What came from other processes is not sent again by them.
        alone = all(complete(tensor.source) for _, tensor, _ in file.tensors)
        attempts = min(_UPLOADS, path.store.retries.attempts) if alone else 1
        for attempt in range(attempts):
            upload = begun or Upload(self._store, path, parts, check, self._calls)
            try:
                if begun is None:
                    with contextlib.closing(self._pieces(file)) as pieces:
                        for piece in pieces:
                            upload.write(piece)
                if hold:
                    return upload
                return upload.complete()
            except BaseException as error:
                upload.abort()
                if not isinstance(error, Failure):
                    raise
                failure, begun = error, None
            if arrived(path, file.nbytes, self._version if self._alone else None):
                return None
            if attempt == attempts - 1 or not failure.again:
                tried = f", after {attempts} uploads" if failure.again and attempts > 1 else ""
                raise LazyModelError(f"cannot write {path}: {failure}{tried}. What was there before is as it was")
            time.sleep(path.store.retries.wait(attempt))
        return None

    def _pieces(self, file: SavedFile) -> Generator[np.ndarray]:
        """A file's bytes, from its header on."""
        header, size = np.frombuffer(file.header, np.uint8), self._chunk
        for start in range(0, header.size, size):
            yield header[start : start + size]
        chunks = list(_chunks(file, size, self._row))
        wants = [want for chunk in chunks if not chunk.shared for want in required_ranges(chunk.tensor, [chunk.box])]
        threads, scratch = self._threads, Scratch(size)

        def read(chunk: _Chunk) -> np.ndarray | None:
            return None if chunk.shared else chunk.read(scratch.workspace)

        reading = parallel(read, chunks, threads, "read", ahead=threads)
        with reading as contents, reading_ahead(wants, self._ahead):
            for number, (chunk, content) in enumerate(zip(chunks, contents, strict=True), 1):
                if content is None:
                    assert self._rounds is not None
                    content = self._rounds.next()
                    assert content is not None
                yield content
                if number > self._sent[file.name]:  # and not sent again
                    self._sent[file.name] = number
                    self._options.bar.advance(chunk.nbytes, chunk.name)
                if chunk.last:
                    chunk.tensor.source.release()

    def _delete(self, files: Sequence[SavedFile]) -> None:
        """Removes files that do not count, and an index of old shards; what cannot be, the next save removes."""
        if (not self._alone or self._indexed) and not self._committed():
            index = [self._decides] if self._indexed else []
            delete([self._folder / file.name for file in files if not self._alone] + index)

    def commit(self) -> None:
        """Makes complete files count instead of the old ones, which are removed."""
        self._begins_commit = True
        try:
            if not self._alone:
                replace(self._decides, index_of(self.files).encode(), self._version)
            elif version_of(self._decides) != self._version:
                raise Changed
            else:
                self._send(self.files[0], lambda: None, begun=self._last)
        except Changed:
            raise LazyModelError(
                f"{self._where} was saved to by another saver meanwhile, whose checkpoint is there now. Save to "
                "another place, or once more to replace it"
            ) from None
        names = {file.name for file in self.files}
        if failures := delete([self._folder / name for name in self._old if name not in names]):
            warn(
                f"{self._where} is saved, but not all that it replaces could be removed: {listed(failures)}. The next "
                "save removes what has names of this library; remove others yourself"
            )

    def _committed(self) -> bool:
        """Returns True if the files count by what the store has: an answer may have been lost, or a Ctrl-C come."""
        if not self._begins_commit:
            return False
        try:
            return read_whole(self._decides) == index_of(self.files).encode()
        except CheckpointError:
            return True  # nobody knows, so nothing is removed
