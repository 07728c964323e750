"""Saves that are killed, interrupted or run out of disk at their n-th file operation, and what must be there then.

Used by the tests of this folder. `python _accidents.py kill FOLDER STEP WORLD` ends processes with SIGKILL at every
STEP-th operation, `python _accidents.py race FOLDER TIMES WORLD WORLD` lets two savers begin at once; both print, as
JSON, how often which checkpoint was there.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import ctypes
import dataclasses
import errno
import functools
import gc
import io
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import lazymodel as lm
from tests.command import problems
from tests.core.save import _places

OLD, NEW, NEXT = 1, 2, 3
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

    def __hash__(self) -> int:
        return hash(repr(self))

    def create(self, root: Path) -> None:
        """Makes the world in an empty folder."""
        root.mkdir(parents=True)
        if self.old is not None:
            self.save(root, OLD, self.old)
            if self.loose:
                (root / self.path / "model.safetensors.index.json").unlink()
        if self.others:
            folder = root / self.path if self.path == "saved" else root
            for name, text in OTHERS.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)

    def save(self, root: Path, fill: int, options: dict[str, Any] | None = None) -> None:
        lm.save(arrays(fill), root / self.path, overwrite=True, **(self.new if options is None else options))

    @property
    def replaced(self) -> int | None:
        """Which checkpoint is there before."""
        return None if self.old is None else OLD


ORBAX = {"format": "orbax"}
_ORBAX_WORLD = World("saved", ORBAX, ORBAX, others=False)
_HDF5_SHARDS = {"max_shard_size": 1000}
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
    "hdf5 shards over hdf5 shards": World("x.weights.json", _HDF5_SHARDS, _HDF5_SHARDS),
    "orbax": dataclasses.replace(_ORBAX_WORLD, old=None),
    "orbax over orbax": _ORBAX_WORLD,
    "orbax over orbax without exchange": dataclasses.replace(_ORBAX_WORLD, exchanges=False),
}


def arrays(fill: int) -> dict[str, np.ndarray]:
    """A checkpoint of which every element says which one it is."""
    made = {name: np.full(shape, fill, "float32") for name, shape in SHAPES.items()}
    return made | {f"only {fill}": np.full(3, fill, "float32"), "nothing": np.empty((0, fill), "float32")}


def found(path: Path) -> int | None:
    """Which checkpoint is there, complete; None where there is none."""
    return _places.found(path, arrays)


def found_by_others(folder: Path) -> int | None:
    """The same for programs that ask for `model.safetensors` before the index."""
    first = folder / "model.safetensors"
    return found(first if first.exists() else folder / "model.safetensors.index.json")


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
    assert state is None or not problems(root / world.path)
    if world.path == "saved" and "format" not in world.new and not world.loose:
        others = found_by_others(root / world.path)
        assert others in {world.replaced, NEW}, f"other programs find {others}"
    now = everything(root)
    ours = [name for name in before if name.partition("/")[2] in OTHERS or name in OTHERS]
    assert {name: now.get(name) for name in ours} == {name: before[name] for name in ours}
    if state is not None and list(root.rglob("*lazymodel-saving")):  # a saver that is refused tidies up, and no more
        with pytest.raises(lm.LazyModelError, match="already"):
            lm.save(arrays(NEXT), root / world.path, **world.new)
        assert found(root / world.path) == state
    world.save(root, NEXT)
    assert found(root / world.path) == NEXT
    assert sorted(everything(root)) == names_without_accident(world, root.parent), "leftovers"
    return state


@functools.cache
def names_without_accident(world: World, folder: Path) -> list[str]:
    """What there is after a save where none was before; found out once for all accidents in a world."""
    fresh, world = folder / "fresh", dataclasses.replace(world, old=None)
    world.create(fresh)
    world.save(fresh, NEXT)
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


def require(work: Callable[[], Any]) -> Any:
    """What a function says in a child, which has to end well."""
    status, said = forked(work)
    assert status == 0, said
    return json.loads(said)


def kills(folder: Path, step: str, name: str) -> dict[str, int]:
    """Kills a save into a world at every `step`-th operation; how often which checkpoint was there."""
    world, template = WORLDS[name], folder / name
    require(lambda: world.create(template))
    counts: collections.Counter[str] = collections.Counter()
    for at in itertools.count(1, int(step)):
        root = folder / f"{name} {at}"
        shutil.copytree(template, root)
        before, save = everything(root), functools.partial(world.save, root, NEW)
        status, said = forked(lambda save=save, at=at: run(save, at, kill_really, exchanges=world.exchanges)[0])
        if status == 0:
            assert at > 1 and not json.loads(said), said
            return counts
        assert status == -signal.SIGKILL, said
        state = require(lambda root=root, before=before: check(world, root, before, {world.replaced, NEW}))
        counts[str(state)] += 1
        shutil.rmtree(root)
    raise AssertionError


def race(folder: Path, times: str, *names: str) -> dict[str, int]:
    """Lets two savers begin at the same moment, many times; how often each one's was there, or one was refused."""
    counts: collections.Counter[str] = collections.Counter()
    for attempt in range(int(times)):
        root = folder / str(attempt)
        require(lambda root=root: WORLDS[names[0]].create(root))
        ready, go = os.pipe()

        def saver(fill: int, name: str, root: Path = root, ready: int = ready, go: int = go) -> str:
            lm.save(arrays(fill), root / "warm" / f"{fill}.safetensors")  # JAX looks for its devices only once
            os.close(go)
            os.read(ready, 1)  # returns when the last that could write is closed
            try:
                WORLDS[name].save(root, fill)
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

        require(look)
        counts["refused" if "refused" in outcomes else "both"] += 1
        shutil.rmtree(root)
    return counts


def main() -> None:
    warnings.filterwarnings("ignore", message=".*fork")
    print(json.dumps({"kill": kills, "race": race}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))


if __name__ == "__main__":
    main()
