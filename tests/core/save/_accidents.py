"""Saves that are killed, interrupted or run out of disk at their n-th file operation, and what must be there then.

Used by `test_accidents`; `python _accidents.py kill FOLDER STEP WORLD…` ends real processes with SIGKILL at every
STEP-th operation, `python _accidents.py race FOLDER TIMES WORLD WORLD` lets two savers begin at once; both print, as
JSON, how often which checkpoint was there.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import errno
import gc
import importlib
import io
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import lazymodel as lm
from lazymodel._save import atomic
from lazymodel.checkpoints._inspect import inspect_checkpoint

SHAPES = {"a/w": (40, 5), "a/b": (7,), "c": (33, 3), "d": ()}
SHARDED = {"max_shard_size": 500}
OTHERS = {"config.json": "{}", "notes/today.txt": "read me", "model-00009-of-00099.bin": "x"}


@dataclasses.dataclass(frozen=True)
class World:
    """A checkpoint that is there, or none, and one that is to replace it."""

    path: str
    old: dict[str, Any] | None
    new: dict[str, Any]
    loose: bool = False  # the old shards have lost their index
    others: bool = True  # files that are not of the checkpoint lie in the folder
    exchanges: bool = True  # the file system can exchange folders


ORBAX = {"format": "orbax"}


def changed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors that are no arrays any more, which Orbax itself would save."""
    return {name: tensor.astype("float64").astype("float32") for name, tensor in tensors.items()}


WORLDS = {
    "file": World("x.safetensors", None, {}),
    "file over file": World("x.safetensors", {}, {}),
    "single": World("saved", None, {}),
    "sharded": World("saved", None, SHARDED),
    "sharded into nothing": World("deep/saved", None, SHARDED, others=False),
    "single over single": World("saved", {}, {}),
    "sharded over single": World("saved", {}, SHARDED),
    "single over sharded": World("saved", SHARDED, {}),
    "sharded over sharded": World("saved", SHARDED, SHARDED),
    "sharded over more shards": World("saved", {"max_shard_size": 50}, SHARDED),
    "single over loose": World("saved", SHARDED, {}, loose=True),
    "sharded over loose": World("saved", SHARDED, SHARDED, loose=True),
    "hdf5 over hdf5": World("x.weights.h5", {}, {}),
    "hdf5 shards over hdf5 shards": World("x.weights.json", {"max_shard_size": 1000}, {"max_shard_size": 1000}),
    "numpy over numpy": World("x.npz", {}, {}),
    "zarr over orbax": World("saved", ORBAX, ORBAX | {"mapping": changed}, others=False),
    "orbax": World("saved", None, ORBAX, others=False),
    "orbax over orbax": World("saved", ORBAX, ORBAX, others=False),
    "orbax over orbax without exchange": World("saved", ORBAX, ORBAX, others=False, exchanges=False),
}


def arrays(fill: int) -> dict[str, np.ndarray]:
    """A checkpoint of which every element says which one it is."""
    made = {name: np.full(shape, fill, "float32") for name, shape in SHAPES.items()}
    return made | {f"only {fill}": np.full(3, fill, "float32"), "nothing": np.empty((0, fill), "float32")}


OLD, NEW, NEXT = 1, 2, 3


def save(world: World, root: Path, fill: int, options: dict[str, Any]) -> None:
    lm.save(arrays(fill), root / world.path, overwrite=True, **options)


def create(world: World, root: Path) -> None:
    """Makes a world in an empty folder."""
    root.mkdir(parents=True)
    if world.old is not None:
        save(world, root, OLD, world.old)
        if world.loose:
            (root / world.path / "model.safetensors.index.json").unlink()
    if world.others:
        folder = root / world.path if world.path == "saved" else root
        for name, text in OTHERS.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def found(path: Path) -> int | None:
    """Which checkpoint is there, complete; None where there is none."""
    try:
        ckpt = lm.open_checkpoint(path)
    except lm.CheckpointError:
        return None
    with ckpt:
        values = {name: tensor.read() for name, tensor in ckpt.items()}
    fills = {float(element) for value in values.values() for element in value.flat}
    assert len(fills) == 1, f"a mixture: {fills}"
    fill = int(fills.pop())
    assert {name: value.shape for name, value in values.items()} == {n: v.shape for n, v in arrays(fill).items()}
    assert not inspect_checkpoint(path).problems
    return fill


def found_by_others(folder: Path) -> int | None:
    """The same for programs that ask for `model.safetensors` before the index."""
    if (folder / "model.safetensors").exists():
        return found(folder / "model.safetensors")
    return found(folder / "model.safetensors.index.json")


def everything(root: Path) -> dict[str, Any]:
    """Every file with its content and its identity, every folder."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_ino) if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def check(world: World, root: Path, before: dict[str, Any], allowed: set[int | None]) -> int | None:
    """What is there after an accident, which is then followed by a save.

    Raises:
        AssertionError: It is not one of what is allowed, something else was touched, or the next save left something.
    """
    state = found(root / world.path)
    assert state in allowed, f"{state} is there, allowed were {allowed}"
    if world.path == "saved" and "format" not in world.new and not world.loose:
        others = found_by_others(root / world.path)
        assert others in {OLD if world.old is not None else None, NEW}, f"other programs find {others}"
    now = everything(root)
    ours = [name for name in before if name.partition("/")[2] in OTHERS or name in OTHERS]
    assert {name: now.get(name) for name in ours} == {name: before[name] for name in ours}
    save(world, root, NEXT, world.new)
    assert found(root / world.path) == NEXT
    if world.new != ORBAX:  # whose names are random
        assert sorted(everything(root)) == names_without_accident(world, root.parent), "leftovers"
    else:
        assert [path.name for path in root.iterdir()] == [world.path], "leftovers"
        assert not any("saving" in name or "tmp" in name for name in everything(root)), "leftovers"
    return state


_names: dict[str, list[str]] = {}


def names_without_accident(world: World, folder: Path) -> list[str]:
    """What there is after a save where none was before; found out once for all accidents in a world."""
    if repr(world) not in _names:
        fresh = folder / "fresh"
        create(dataclasses.replace(world, old=None), fresh)
        save(world, fresh, NEXT, world.new)
        _names[repr(world)] = sorted(everything(fresh))
        shutil.rmtree(fresh)
    return _names[repr(world)]


# Accidents ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a signal: from here on nothing happens to any file."""


class Accidents:
    """Counts file operations and lets something happen at the n-th.

    Attributes:
        at: Which operation.
        count: How many there were.
    """

    def __init__(self, at: int, accident: Callable[[Accidents, str], None]) -> None:
        self.at, self.accident, self.count = at, accident, 0

    def step(self, name: str) -> None:
        self.count += 1
        if self.count >= self.at:
            self.accident(self, name)

    @contextlib.contextmanager
    def possible(self, *, exchanges: bool = True) -> Iterator[None]:
        patches: list[tuple[Any, str, Any]] = []

        def patch(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
            patches.append((module, name, getattr(module, name)))
            setattr(module, name, wrapper)

        for name in (
            *("replace", "rename", "renames", "unlink", "remove", "mkdir", "rmdir", "link", "symlink", "write"),
            *("pwrite", "fsync", "fdatasync", "truncate", "ftruncate", "chmod"),
        ):
            patch(os, name, self._counted(name, getattr(os, name)))
        patch(os, "open", self._os_open(os.open))
        for module in (builtins, io):
            patch(module, "open", self._open(module.open))
        patch(atomic, "exchange", self._counted("exchange", atomic.exchange) if exchanges else lambda *_: False)
        gc.disable()  # an interrupt in a callback of the collector, such as hypothesis', is lost
        try:
            yield
        finally:
            gc.enable()
            for module, name, original in patches:
                setattr(module, name, original)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.step(name)
            return original(*args, **options)

        return counted

    def _os_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, flags: int, *args: Any, **options: Any) -> Any:
            if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.step("open")
            return original(path, flags, *args, **options)

        return counted

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+") or str(file) == os.devnull:
                return original(file, mode, *args, **options)
            self.step("open")
            return _Stream(original(file, mode, *args, **options), self)

        return counted


class _Stream:
    """A file open for writing, whose writes are counted."""

    def __init__(self, stream: Any, accidents: Accidents) -> None:
        self._stream, self._accidents = stream, accidents

    def write(self, data: Any) -> Any:
        self._accidents.step("write")
        return self._stream.write(data)

    def truncate(self, *size: int) -> Any:
        self._accidents.step("truncate")
        return self._stream.truncate(*size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def kill(accidents: Accidents, name: str) -> None:
    raise Killed(name)


def kill_really(accidents: Accidents, name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(accidents: Accidents, name: str) -> None:
    """A Ctrl-C, which may come late."""
    if accidents.count == accidents.at:
        signal.raise_signal(signal.SIGINT)


def fail(accidents: Accidents, name: str) -> None:
    if accidents.count == accidents.at:
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)


def fill_disk(accidents: Accidents, name: str) -> None:
    """From the n-th operation on, nothing new can be written; what is there can be renamed and removed."""
    if name in ("mkdir", "open", "write", "pwrite", "truncate", "ftruncate", "fsync", "link"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def run(world: World, root: Path, at: int, accident: Callable[[Accidents, str], None]) -> tuple[bool, Any]:
    """Makes a world and saves into it with an accident at the n-th operation.

    Returns:
        Whether there was an accident, and the exception that came out of the save.
    """
    accidents = Accidents(at, accident)
    raised: Any = None
    with warnings.catch_warnings(), accidents.possible(exchanges=world.exchanges):
        warnings.simplefilter("ignore")  # of what could not be removed
        try:
            save(world, root, NEW, world.new)
        except (Killed, KeyboardInterrupt, lm.LazyModelError) as error:
            raised = error
    return accidents.count >= at, raised


# Real ones ------------------------------------------------------------------------------------------------------------


def begin(work: Callable[[], Any]) -> tuple[int, int]:
    """Runs a function in a child: its process, and where what it says can be read."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc()[-8000:].encode())
        finally:
            os._exit(status)
    os.close(writer)
    return child, reader


def end(child: int, reader: int) -> tuple[int, str]:
    """A child's exit status, or minus the signal that ended it, and what it said."""
    with open(reader, "rb") as stream:
        said = stream.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def forked(work: Callable[[], Any]) -> tuple[int, str]:
    """Runs a function in a child and waits for it."""
    return end(*begin(work))


def kills(folder: Path, step: str, *names: str) -> dict[str, Any]:
    """Kills a save into each world at every `step`-th operation; how often which checkpoint was there."""
    outcomes: dict[str, Any] = {}
    if any(name.startswith("orbax") for name in names):
        importlib.import_module("orbax.checkpoint")  # once, and not in every child
    for name in names:
        world, template = WORLDS[name], folder / name
        status, said = forked(lambda world=world, template=template: create(world, template))
        assert status == 0, said
        counts: collections.Counter[str] = collections.Counter()
        for at in itertools.count(1, int(step)):
            root = folder / f"{name} {at}"
            shutil.copytree(template, root)
            before = everything(root)
            status, said = forked(lambda world=world, root=root, at=at: run(world, root, at, kill_really)[0])
            if status == 0:
                assert at > 1 and not json.loads(said), said
                break
            assert status == -signal.SIGKILL, said
            allowed = {OLD if world.old is not None else None, NEW}
            status, said = forked(
                lambda world=world, root=root, before=before, allowed=allowed: check(world, root, before, allowed)
            )
            assert status == 0, f"{name}, killed at operation {at}: {said}"
            counts[str(json.loads(said))] += 1
            shutil.rmtree(root)
        outcomes[name] = counts
    return outcomes


def race(folder: Path, times: str, *names: str) -> dict[str, int]:
    """Lets two savers begin at the same moment, many times; how often each one's was there, or one was refused."""
    counts: collections.Counter[str] = collections.Counter()
    for attempt in range(int(times)):
        root = folder / str(attempt)
        status, said = forked(lambda root=root: create(WORLDS[names[0]], root))
        assert status == 0, said
        ready, go = os.pipe()

        def saver(fill: int, name: str, root: Path = root, ready: int = ready, go: int = go) -> str:
            lm.save(arrays(fill), root / "warm" / f"{fill}.safetensors")  # JAX looks for its devices only once
            os.close(go)
            os.read(ready, 1)  # returns when the last that could write is closed
            try:
                save(WORLDS[name], root, fill, WORLDS[name].new)
            except lm.LazyModelError as error:
                return "refused" if "is being saved to by another saver" in str(error) else str(error)
            return "saved"

        both = [begin(lambda fill=fill, name=name: saver(fill, name)) for fill, name in zip((2, 3), names, strict=True)]
        os.close(go)
        os.close(ready)
        ended = [end(*one) for one in both]
        assert all(status == 0 for status, _ in ended), ended
        outcomes = [json.loads(said) for _, said in ended]
        assert "saved" in outcomes and set(outcomes) <= {"saved", "refused"}, outcomes
        shutil.rmtree(root / "warm")
        allowed = {fill for fill, outcome in zip((2, 3), outcomes, strict=True) if outcome == "saved"}

        def look(root: Path = root, allowed: set[int] = allowed) -> None:
            assert found(root / WORLDS[names[0]].path) in allowed
            assert not any("saving" in name for name in everything(root)), everything(root)
            folder = root / "saved"
            if (folder / "model.safetensors.index.json").exists():
                assert not (folder / "model.safetensors").exists()

        status, said = forked(look)
        assert status == 0, f"attempt {attempt}: {said}"
        counts["refused" if "refused" in outcomes else "both"] += 1
        shutil.rmtree(root)
    return counts


def main() -> None:
    warnings.filterwarnings("ignore", message=".*fork")
    print(json.dumps({"kill": kills, "race": race}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))


if __name__ == "__main__":
    main()
