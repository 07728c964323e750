"""`Checkpoint`: what every format looks like from outside.

Folders of steps in safetensors: `9/`, `10/`, …, each a folder as `lazymodel.save` writes it, and what it says of
where training was.

A step counts once it has its one file, or its index and all shards; before that there are some of them at most.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location
from lazymodel._show.text import format_bytes, listed, plural
from lazymodel._tensors.byte_reader import ByteReader, reading
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._untrusted import read_json_file, weight_map

Verify = bool | str | os.PathLike[str] | Mapping[str, str]
"""Values of `verify=`: True for the hashes that the folder states, a manifest's path, or name → hash."""


class TensorHeader(NamedTuple):
    """The header of one tensor: its dtype in memory, shape, bytes in memory, and its file.

    `stored` is the name of its type in the file and its bytes there, where NumPy has no dtype for it;
    `offset` its first byte there, if it is stored in one piece and the headers say so.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    file: str
    stored: tuple[str, int] | None = None
    offset: int | None = None


class Checkpoint(Mapping[str, LazyTensor], contextlib.AbstractContextManager["Checkpoint"]):
    """An open checkpoint: tensor name → `LazyTensor`. Opening and looking up read headers only.

    Subclasses provide `_tensor` and pass the names they have, as a list or as the keys of a dict of theirs. Usable in
    a `with` statement; closing releases file descriptors, and tensors that are still around open them again when read.

    Attributes:
        path: The path that was opened.
        format: The format of its files, for reports.
        metadata: Their metadata, if the format has any: strings (safetensors'
            `__metadata__`), or also numbers, bools and lists (GGUF).
        aliases: Names of tensors that are stored under another one → that name, as safetensors' metadata says; they
            are names like any other.

    Example:
        >>> with lm.open_checkpoint("model.safetensors") as checkpoint:
        ...     print(list(checkpoint), checkpoint.nbytes, checkpoint.bytes_read)
        ['down/kernel', 'up/kernel'] 131072 0
    """

    format: str = "unknown"
    metadata: Mapping[str, Any] | None = None
    aliases: Mapping[str, str] = {}

    def __init__(self, path: str | Location, names: list[str] | dict[str, Any], sources: Sequence[ByteReader]) -> None:
        self.path = str(path)
        self._names: dict[str, Any] = names if isinstance(names, dict) else dict.fromkeys(names)
        self._sources = sources
        self._tensors: dict[str, LazyTensor] = {}

    def _tensor(self, name: str) -> LazyTensor:
        raise NotImplementedError

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._names:
            raise KeyError(f"{name!r} is not a tensor of {self.path}")
        if name not in self._tensors:
            self._tensors[name] = self._tensor(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would make the tensor

    def describe(self, name: str) -> TensorHeader:
        """The header of an existing tensor; formats that can read it alone make no tensor for it."""
        tensor = self[name]
        return TensorHeader(tensor.dtype, tensor.shape, tensor.nbytes, tensor.file)

    def keys(self) -> KeysView[str]:
        """The names; not the general view, which would ask for each name in Python."""
        return self._names.keys()

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold its tensors."""
        return sorted({source.path for source in self._sources})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._nbytes_of(self._names)

    def _nbytes_of(self, names: Collection[str]) -> int:
        return sum(self.describe(name).nbytes for name in names)

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read from its files so far."""
        return sum(source.bytes_read for source in self._sources)

    def close(self) -> None:
        """Releases file descriptors."""
        for source in self._sources:
            source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = f"{format_bytes(self.nbytes)} in {plural(len(self.files), 'file')}"
        return f"{type(self).__name__}({self.path!r}: {plural(len(self), 'tensor')}, {size})"


class JoinedCheckpoint(Checkpoint):
    """Several files as one mapping; of each the tensors whose names are given, and no name twice."""

    def __init__(self, path: str | Location, parts: Sequence[tuple[Checkpoint, Collection[str]]]) -> None:
        owners: dict[str, Checkpoint] = {}
        for part, names in parts:
            if not owners.keys().isdisjoint(names):
                name = next(name for name in names if name in owners)
                raise CheckpointError(
                    f"tensor {name!r} is in both {owners[name].path} and {part.path}; open one of the files, or add "
                    "the index file that says which one counts"
                )
            owners |= dict.fromkeys(names, part)
            self.format = part.format
            self.aliases = {**self.aliases, **part.aliases}
            if isinstance(part.metadata, dict):  # others decode what is looked up
                self.metadata = {**(self.metadata or {}), **part.metadata}
        super().__init__(path, owners, [source for part, _ in parts for source in part._sources])
        self._parts = parts

    def _tensor(self, name: str) -> LazyTensor:
        return self._names[name]._tensor(name)

    def describe(self, name: str) -> TensorHeader:
        return self._names[name].describe(name)

    @property
    def nbytes(self) -> int:
        return sum(part._nbytes_of(names) for part, names in self._parts)

    def close(self) -> None:
        for part, _ in self._parts:
            part.close()


DECIDING = ("model.safetensors.index.json", "model.safetensors")  # files of which one makes a step count
KEY = "lazymodel"  # in a checkpoint's metadata: the description of the step, as JSON
_BYTES = "base64"


def is_nothing(place: Location) -> bool:
    """Returns True if nothing was saved yet: there is nothing, or an empty folder. Web servers cannot say."""
    return place.lists and (not place.exists() or (place.is_dir() and not any(place.iterdir())))


def step_folders(folder: Location) -> list[tuple[int, Location]]:
    """(number, folder) of every folder in a folder that has a number for a name, the newest first."""
    numbered: list[Location] = []
    with reading(folder, "list"), contextlib.suppress(FileNotFoundError):  # a saver may have removed it meanwhile
        numbered = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted(((int(child.name), child) for child in numbered), reverse=True)


def is_complete(step: Location) -> bool:
    """Returns True if all of a step is there."""
    index, single = (step / name for name in DECIDING)
    if not index.exists():
        return single.exists()
    if step.remote:
        return True  # savers write it last
    try:
        shards = set(weight_map(read_json_file(index), index).values())
    except CheckpointError:
        return index.exists()  # opening it says what is wrong, but not if a saver has removed it meanwhile
    return all((step / str(shard)).exists() for shard in shards)


def newest_step(folder: Location) -> Location | None:
    """The newest complete step in a folder; None where there is none."""
    seen, steps = list[Any](), step_folders(folder)
    while steps != seen:  # all that were listed may have been removed since, for newer ones
        for _, step in steps:
            if is_complete(step):
                return step
        seen, steps = steps, step_folders(folder)
    return None


def find_step(where: Location, step: int | None) -> Location | None:
    """The folder of a step: of that number, or what `where` is itself, or the newest; None where there is none yet.

    Raises:
        CheckpointError: There is no complete step of the given number.
    """
    if step is None:
        return where if is_complete(where) else newest_step(where) if where.is_dir() else None
    if is_complete(found := where / str(step)):
        return found
    complete = [str(number) for number, folder in step_folders(where) if is_complete(folder)] if where.is_dir() else []
    raise CheckpointError(f"{where} has no complete step {step}; found {listed(complete) if complete else 'none'}")


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """Where training was when a step was saved.

    Attributes:
        path: The folder of the step.
        step: The step's number.
        metadata: What `save_step`, or a callback of Keras, was given.
        data: The state of a data iterator that it was given, for its `set_state`; None if there was none.
        epoch: The number of completed epochs, Keras' `initial_epoch`; None if it was not saved.
        batch: Batches of the next epoch that were trained on already.

    Example:
        >>> lm.save_step(model, "run", 100, metadata={"loss": 0.25})
        >>> lm.training_state("run")
        TrainingState(path='run/100', step=100, metadata={'loss': 0.25}, data=None, epoch=None, batch=0)
    """

    path: str
    step: int
    metadata: dict[str, Any]
    data: Any
    epoch: int | None = None
    batch: int = 0


def described(metadata: Mapping[str, Any] | None, data: Any) -> dict[str, Any]:
    """The description of a step, of types that JSON has.

    Raises:
        LazyModelError: Something in it is of another type; `data` may be bytes as well.
    """
    found: dict[str, Any] = {"metadata": dict(metadata or {})}
    if data is not None:
        is_bytes = isinstance(data, bytes | bytearray)
        found["data"] = {_BYTES: base64.b64encode(data).decode()} if is_bytes else data
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise LazyModelError(f"metadata and data states are of types that JSON has, or bytes: {error}") from None
    return found


_WITH_EPOCH = {"epoch", "batch", "metadata"}  # the metadata of a callback, with the user's inside


def read_described(found: Any, folder: str, step: int) -> TrainingState:
    """The state of training from what `described` returned."""
    try:
        state = found.get("data")
        if isinstance(state, dict) and list(cast("dict[str, Any]", state)) == [_BYTES]:
            state = base64.b64decode(cast("dict[str, str]", state)[_BYTES], validate=True)
        metadata = dict(found["metadata"])
        if set(metadata) != _WITH_EPOCH:
            return TrainingState(folder, step, metadata, state)
        epoch, batch, own = int(metadata["epoch"]), int(metadata["batch"]), dict(metadata["metadata"])
        return TrainingState(folder, step, own, state, epoch, batch)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: expected metadata of a step under {KEY!r}, found {error!r}") from error
