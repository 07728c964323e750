"""Places that are saved to, a disk and buckets, by the same words; what is there before; and a checkpoint that says
which one it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lazymodel as lm
from tests.servers.object_server import ObjectServer

OLD, NEW, NEXT = 1, 2, 3  # checkpoints, by their values
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDED: dict[str, Any] = {"max_shard_size": 6 << 10}
QUICK = {"backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}}


def values(fill: int) -> dict[str, np.ndarray]:
    """A checkpoint of 14 KiB of which every element says which one it is; one file, or three shards of 6 KiB."""
    return {name: np.full((32, 32), fill, "float32") for name in ("a/w", "b", "c")} | {
        "d": np.array(fill, "float32"),
        f"only {fill}": np.full(3, fill, "float32"),
        "nothing": np.zeros((0, fill), "float32"),
    }


def found(path: str | Path, options: dict[str, Any] | None = None) -> int | None:
    """Which of such checkpoints is there, complete; None where there is none."""
    try:
        ckpt = lm.open_checkpoint(path, options)
    except lm.CheckpointError:
        return None
    with ckpt:
        read = {name: tensor.read() for name, tensor in ckpt.items()}
    fills = {float(element) for value in read.values() for element in value.flat}
    assert len(fills) == 1, f"a mixture: {fills}"
    fill = int(fills.pop())
    assert {name: (value.shape, value.tobytes()) for name, value in read.items()} == {
        name: (value.shape, value.tobytes()) for name, value in values(fill).items()
    }
    return fill


class Disk:
    """A folder on a disk, whose files are looked at directly."""

    options: dict[str, Any] | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def url(self, path: str = "saved") -> str:
        return str(self.folder / path)

    def save(self, fill: int, path: str = "saved", **options: Any) -> None:
        options = {"overwrite": True, "storage_options": self.options} | options
        lm.save(values(fill), self.url(path), **options)

    def put(self, path: str, content: bytes = b"x") -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content)

    def objects(self) -> dict[str, bytes]:
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def found(self, path: str = "saved") -> int | None:
        return found(self.url(path), self.options)

    def empty(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()


@dataclasses.dataclass(frozen=True)
class World:
    """A checkpoint that is there, or none, and how one is saved that is to replace it."""

    old: dict[str, Any] | None
    new: dict[str, Any]
    loose: bool = False  # the old shards are named as those of Hugging Face's tools, and have lost their index
    path: str = "saved"
    exchanges: bool = True  # the file system can exchange folders

    def __hash__(self) -> int:
        return hash(repr(self))

    def make(self, place: Disk) -> None:
        """Makes what is there before, and nothing else, in a place."""
        place.empty()
        if self.loose:
            lm.save(values(OLD), place.folder / self.path, **SHARDED)
            (place.folder / self.path / INDEX).unlink()
        elif self.old is not None:
            place.save(OLD, self.path, **self.old)


FOLDERS = {
    "single": World(None, {}),
    "sharded": World(None, SHARDED),
    "single over single": World({}, {}),
    "sharded over single": World({}, SHARDED),
    "single over sharded": World(SHARDED, {}),
    "sharded over sharded": World(SHARDED, SHARDED),
    "single over loose": World(SHARDED, {}, loose=True),
    "sharded over loose": World(SHARDED, SHARDED, loose=True),
}


class Bucket(Disk):
    """A bucket of the object server, by one of its dialects."""

    def __init__(self, server: ObjectServer, scheme: str = "gs") -> None:
        super().__init__(server.root / "uploads")
        given = {"gs": server.gcs, "az": server.azure}[scheme]()
        self.server, self.scheme, self.options = server, scheme, given | {"retry_config": QUICK}
        self.once = given | {"retry_config": QUICK | {"max_retries": 0}}  # with which nothing is tried again

    def url(self, path: str = "saved") -> str:
        return f"{self.scheme}://uploads/{path}"


def placed(array: np.ndarray, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    """An array on the devices of a mesh."""
    return jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))


def once(work: Callable[[], Any]) -> Callable[[int, int], None]:
    """A function of progress that does something the first time that a part is saved."""
    left = [work]

    def progress(done: int, total: int) -> None:
        if done and left:
            left.pop()()

    return progress
