"""Saves that are killed, interrupted or run out of disk at their n-th file operation, and what must be there then.

Used by the tests of this folder. `python _accidents.py FOLDER WORLD NUMBER` ends with SIGKILL at an operation.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dataclasses
import errno
import functools
import gc
import io
import itertools
import os
import shutil
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lazymodel as lm
from tests.command import problems
from tests.core.save._places import FOLDERS, INDEX, NEW, NEXT, OLD, SHARDED, SINGLE, Disk, World

OTHERS = {"config.json": "{}", "notes/today.txt": "read me", "model-00009-of-00099.bin": "x"}
ORBAX = {"format": "orbax"}
_ORBAX = World(ORBAX, ORBAX)
_HDF5_SHARDS = {"max_shard_size": 1000}
WORLDS = FOLDERS | {
    "file": World(None, {}, path="x.safetensors"),
    "file over file": World({}, {}, path="x.safetensors"),
    "sharded into nothing": World(None, SHARDED, path="deep/saved"),
    "sharded over more shards": World({"max_shard_size": 50}, SHARDED),
    "hdf5 over hdf5": World({}, {}, path="x.weights.h5"),
    "hdf5 shards over hdf5 shards": World(_HDF5_SHARDS, _HDF5_SHARDS, path="x.weights.json"),
    "orbax": dataclasses.replace(_ORBAX, old=None),
    "orbax over orbax": _ORBAX,
    "orbax over orbax without exchange": dataclasses.replace(_ORBAX, exchanges=False),
}


def create(world: World, root: Path) -> None:
    """Makes a world in an empty folder, and other files next to the checkpoint, or in its folder."""
    world.make(Disk(root))
    folder = root / world.path if world.path == "saved" and "format" not in world.new else root
    for name, text in OTHERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def save(world: World, root: Path, fill: int) -> None:
    Disk(root).save(fill, world.path, **world.new)


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
    place, old = Disk(root), None if world.old is None else OLD
    state = place.found(world.path)
    assert state in allowed, f"{state} is there, allowed were {allowed}"
    assert state is None or not problems(root / world.path)
    if world.path == "saved" and "format" not in world.new and not world.loose:
        # Other programs ask for `model.safetensors` before the index.
        first = next((f"saved/{name}" for name in (SINGLE, INDEX) if (root / "saved" / name).exists()), "absent")
        assert place.found(first) in {old, NEW}, f"other programs find {place.found(first)}"
    now = everything(root)
    ours = [name for name in before if name.partition("/")[2] in OTHERS or name in OTHERS]
    assert {name: now.get(name) for name in ours} == {name: before[name] for name in ours}
    if state is not None and list(root.rglob("*lazymodel-saving")):  # a saver that is refused tidies up, and no more
        with pytest.raises(lm.LazyModelError, match="already"):
            place.save(NEXT, world.path, overwrite=False, **world.new)
        assert place.found(world.path) == state
    save(world, root, NEXT)
    assert place.found(world.path) == NEXT
    assert sorted(everything(root)) == names_without_accident(world, root.parent), "leftovers"
    return state


@functools.cache
def names_without_accident(world: World, folder: Path) -> list[str]:
    """What there is after a save where none was before; found out once for all accidents in a world."""
    fresh, world = folder / "fresh", dataclasses.replace(world, old=None, loose=False)
    create(world, fresh)
    save(world, fresh, NEXT)
    names = sorted(everything(fresh))
    shutil.rmtree(fresh)
    return names


# Accidents ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a signal: from here on nothing happens to any file."""


Accident = Callable[["Accidents", str], None]


class Accidents:
    """Counts file operations and lets something happen at the n-th, and perhaps at all that follow."""

    def __init__(self, at: int, accident: Accident) -> None:
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
        patch(ctypes, "CDLL", lambda *names, original=ctypes.CDLL, **_: self._library(original, exchanges))
        gc.disable()  # an interrupt in a callback of the collector, such as hypothesis', is lost
        try:
            yield
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # where `Condition.wait` takes its lock again
                raise error.__context__ from None
            raise
        finally:
            gc.enable()
            for module, name, original in patches:
                setattr(module, name, original)

    def _library(self, original: Any, exchanges: bool) -> Any:
        """The C library, whose one function of two folders is counted, or missing."""
        if not exchanges:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        exchange = self._counted("exchange", original(None, use_errno=True).renameat2)
        return types.SimpleNamespace(renameat2=exchange)

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


def kill_really(accidents: Accidents, name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(save: Callable[[], None], at: int, accident: Accident, *, exchanges: bool = True) -> tuple[bool, Any]:
    """Saves with an accident at the n-th operation: whether there was one, and the exception that came out."""
    accidents = Accidents(at, accident)
    raised: Any = None
    with warnings.catch_warnings(), accidents.possible(exchanges=exchanges):
        warnings.simplefilter("ignore")  # of what could not be removed
        try:
            save()
        except (Killed, KeyboardInterrupt, lm.LazyModelError) as error:
            raised = error
    return accidents.count >= at, raised


def kinds(template: Path, save: Callable[[Path], None], *, exchanges: bool = True) -> list[str]:
    """The operations of a save into a copy of a folder, by name."""
    root, found = template.parent / "kinds", list[str]()
    shutil.copytree(template, root)
    run(functools.partial(save, root), 1, lambda _, name: found.append(name), exchanges=exchanges)
    shutil.rmtree(root)
    return found


def turns(kinds: list[str]) -> list[int]:
    """Numbers of those that give names, and of each kind that follows a kind the first and last."""
    pairs: dict[Any, list[int]] = {}
    for at, pair in enumerate(itertools.pairwise(["", *kinds]), 1):
        pairs.setdefault(pair, []).append(at)
    naming = [at for at, kind in enumerate(kinds, 1) if kind in ("replace", "rename", "exchange", "link")]
    return sorted({*naming, *(at for found in pairs.values() for at in (found[0], found[-1]))})


class Outcome(NamedTuple):
    """What came of a save into a folder: whether there was an accident, what was raised, what had been there."""

    root: Path
    happened: bool
    raised: Any
    before: dict[str, Any]


def at_each_operation(
    template: Path, save: Callable[[Path], None], accident: Accident, *, at: Iterable[int] = (), exchanges: bool = True
) -> Iterator[Outcome]:
    """Yields what came of saving into a copy of a folder, with an accident at each operation or those in `at`, up to a
    save without an accident. The copies go when they were looked at.
    """
    for number in at or itertools.count(1):
        root = template.parent / str(number)
        shutil.copytree(template, root)
        before = everything(root)
        happened, raised = run(functools.partial(save, root), number, accident, exchanges=exchanges)
        yield Outcome(root, happened, raised, before)
        shutil.rmtree(root)
        if not happened:
            return


def main() -> None:
    """Saves into a folder, and is killed with SIGKILL at an operation of that number."""
    root, name, at = sys.argv[1:]
    world = WORLDS[name]
    run(lambda: save(world, Path(root), NEW), int(at), kill_really, exchanges=world.exchanges)


if __name__ == "__main__":
    main()
