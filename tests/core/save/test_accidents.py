"""Saves that are killed, interrupted, out of disk, or refused: there is the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazymodel as lm
from tests.command import problems
from tests.core.save import _accidents
from tests.core.save._accidents import ORBAX, WORLDS, Killed, everything
from tests.core.save._places import NEW, NEXT, OLD, SHARDED, found, values
from tests.large import mostly_large
from tests.processes import printed, run_workers

# What is killed, raised, refused by a full disk or by a broken one; and each way in which files are put in place.
KILL, INTERRUPT, FAIL, FILL_DISK = _accidents.kill, _accidents.interrupt, _accidents.fail, _accidents.fill_disk
SOME = [
    *((KILL, name) for name in ("file over file", "single over sharded", "sharded over loose")),
    *((accident, "sharded over sharded") for accident in (INTERRUPT, FAIL, FILL_DISK)),
    (INTERRUPT, "sharded into nothing"),
    (FILL_DISK, "orbax over orbax"),
]


def accidents(folder: Path, name: str, accident: Any, some: Any = None) -> int:
    """Saves with an accident at every operation, or at some; the number of accidents.

    An error leaves the old checkpoint; where the new one counts already there is none.
    """
    world, template, seen, count = WORLDS[name], folder / "template", set[int | None](), 0
    _accidents.create(world, template)
    old = None if world.old is None else OLD
    allowed = {Killed: {old, NEW}, KeyboardInterrupt: {old, NEW}, lm.LazyModelError: {old}}
    raised_by = {KILL: {Killed}, INTERRUPT: {KeyboardInterrupt}}.get(accident, {lm.LazyModelError, type(None)})

    def save(root: Path) -> None:
        _accidents.save(world, root, NEW)

    at = some(_accidents.kinds(template, save, exchanges=world.exchanges)) if some else ()
    for root, happened, raised, before in _accidents.at_each_operation(
        template, save, accident, at=at, exchanges=world.exchanges
    ):
        if happened:
            assert type(raised) in raised_by
            seen.add(_accidents.check(world, root, before, allowed.get(type(raised), {NEW})))
            assert accident is not INTERRUPT or not list(root.rglob("*lazymodel-saving*"))
            count += 1
        else:
            assert raised is None and found(root / world.path) == NEW
    assert accident is not KILL or seen == {old, NEW}
    return count


# Accidents ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("accident", "name"), SOME)
def test_an_accident_at_some_operations(folder: Path, name: str, accident: Any) -> None:
    """A kill at those that give names, and at the first and last of each kind; others at every fifth."""
    first = random.Random(name + accident.__name__).randrange(5)

    def fifth(kinds: list[str]) -> list[int]:
        return [at for at, kind in enumerate(kinds, 1) if at % 5 == first or kind in ("rename", "exchange")]

    least = {KILL: 12}.get(accident, 3)
    assert accidents(folder, name, accident, _accidents.turns if accident is KILL else fifth) >= least


@pytest.mark.large
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("accident", [KILL, INTERRUPT, FAIL, FILL_DISK])
@pytest.mark.parametrize("name", WORLDS)
def test_an_accident_at_any_operation(folder: Path, name: str, accident: Any) -> None:
    assert accidents(folder, name, accident) >= 15


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_thread_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes after the files are closed would write into others that have their descriptors."""
    start, write, names, running = threading.Thread.start, os.pwrite, list[str](), set[str]()
    begun, ended = threading.Event(), threading.Event()

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("lazymodel-write"):
            names.append(thread.name)
            if len(names) == 2:
                begun.wait(5)
                signal.raise_signal(signal.SIGINT)

    def written(*args: Any) -> int:
        running.add(name := threading.current_thread().name)
        try:
            if name.endswith("_0"):
                begun.wait(5)
            else:
                begun.set()
                ended.wait(0.3)
            return write(*args)
        finally:
            running.discard(name)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(os, "pwrite", written)
    with pytest.raises(KeyboardInterrupt):
        lm.save({str(number): np.zeros(1 << 18, "float32") for number in range(4)}, folder / "x.safetensors")
    try:
        assert len(names) >= 2 and not running
    finally:
        ended.set()


# Real ones ------------------------------------------------------------------------------------------------------------


def kill_really(folder: Path, name: str, step: int) -> int:
    """Kills a process that saves, at every `step`-th operation, with SIGKILL; returns how often."""
    world, template, killed = WORLDS[name], folder / name, 0
    _accidents.create(world, template)
    for first in itertools.count(1, 4 * step):
        roots = {at: folder / f"{name} {at}" for at in range(first, first + 4 * step, step)}
        for root in roots.values():
            shutil.copytree(template, root)
        before = {at: everything(root) for at, root in roots.items()}
        arguments = [(root, name, at) for at, root in roots.items()]
        codes = run_workers(Path(_accidents.__file__), arguments, folder, patience=250)
        for (at, root), code in zip(roots.items(), codes, strict=True):
            assert code in (0, -signal.SIGKILL), printed(folder, len(roots))
            old = {None if world.old is None else OLD} if code else set[int | None]()
            _accidents.check(world, root, before[at], {NEW} | old)
            shutil.rmtree(root)
        killed += sum(code != 0 for code in codes)
        if 0 in codes:
            return killed
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "step"),
    mostly_large([("sharded over sharded", 40), ("orbax over orbax", 50)], [("sharded over sharded", 40)]),
)
def test_a_real_kill(folder: Path, name: str, step: int) -> None:
    assert kill_really(folder, name, step) >= 3


@pytest.mark.large
@pytest.mark.parametrize("name", WORLDS)
def test_a_real_kill_at_any_operation(folder: Path, name: str) -> None:
    assert kill_really(folder, name, 1) >= 15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mounted)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if made.returncode:
        pytest.skip(f"mounting a file system is not allowed: {made.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "200KB"}, ORBAX], ids=["single", "sharded", "orbax"])
def test_a_full_disk(small_disk: Path, options: dict[str, Any]) -> None:
    values = {fill: {f"{n}/w": np.full(128 << 10, fill, "float32") for n in range(4)} for fill in (OLD, NEW)}
    path = small_disk / "saved"

    def save(fill: int) -> None:
        lm.save(values[fill], path, overwrite=True, **options)

    def state() -> list[int]:
        with lm.open_checkpoint(path) as ckpt:
            read = {name: tensor.read().tobytes() for name, tensor in ckpt.items()}
        assert not problems(path)
        return [fill for fill in values if read == {name: value.tobytes() for name, value in values[fill].items()}]

    save(OLD)
    failed = 0
    for level in range(10):  # from nothing free to more than what is needed
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(b"\1" * (free - level * 300 * 1024))
        try:
            save(NEW)
        except lm.LazyModelError as error:
            message = str(error)
            failed += 1
            assert state() == [OLD] and str(path) in message
            (small_disk / "filler").unlink()
        else:
            assert state() == [NEW]
            (small_disk / "filler").unlink()
            save(OLD)
        assert sorted(os.listdir(small_disk)) == ["saved"]
        assert not any("saving" in name for name in os.listdir(path))
    assert 5 <= failed <= 9
    save(NEW)
    assert state() == [NEW]


# Two savers -----------------------------------------------------------------------------------------------------------

# What is being saved, and what cannot be saved meanwhile.
FOLDER, FILE, INSIDE = ("saved", {}), ("x.safetensors", {}), ("saved/model.safetensors", {})
ORBAX_FOLDER = ("saved", ORBAX)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((FOLDER, FOLDER), (FILE, FILE), (ORBAX_FOLDER, ORBAX_FOLDER)),
        *((ORBAX_FOLDER, FOLDER), (INSIDE, FOLDER), (FOLDER, ORBAX_FOLDER), (FOLDER, INSIDE)),
    ],
)
def test_a_second_saver_is_refused(tmp_path: Path, first: Any, second: Any) -> None:
    path, other = tmp_path / first[0], tmp_path / second[0]
    for old in (False, True) if first == second else (False,):
        if old:
            lm.save(values(OLD), path, overwrite=True, **first[1])
        tried: list[bool] = []

        def meanwhile(done: int, total: int, old: bool = old, tried: list[bool] = tried) -> None:
            if done and not tried:
                tried.append(True)
                before = [*everything(tmp_path)]
                with pytest.raises(lm.LazyModelError, match=rf"{other} .*another saver.*Wait until"):
                    lm.save(values(NEXT), other, overwrite=True, **second[1])
                assert [*everything(tmp_path)] == before
                assert not old or found(path) == OLD

        lm.save(values(NEW), path, overwrite=old, progress=meanwhile, **first[1])
        assert tried and found(path) == NEW
        assert not any("saving" in name for name in everything(tmp_path))
    if first == second:
        lm.save(values(NEXT), other, overwrite=True, **second[1])
        assert found(other) == NEXT


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It closes what it inherits but for what it is given, as all programs do."""
    with contextlib.ExitStack() as stack:

        def start(done: int, total: int) -> None:
            command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
            if done == total:
                stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False))

        lm.save(values(OLD), tmp_path / "x.safetensors", progress=start)
        lm.save(values(NEW), tmp_path / "x.safetensors", overwrite=True)
    assert found(tmp_path / "x.safetensors") == NEW


@pytest.mark.parametrize("name", ["flock", "open"])
def test_a_lock_that_cannot_be_had_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl if name == "flock" else os, name, fail)
    with pytest.raises(lm.LazyModelError, match=r"x\.safetensors: Input/output error"):
        lm.save({"w": np.zeros(3)}, tmp_path / "deep" / "x.safetensors")
    monkeypatch.undo()
    assert not os.listdir(tmp_path)


def test_what_another_program_wrote_meanwhile_stays(folder: Path) -> None:
    """A killed saver's journal names files; one that somebody replaced since is not the one that it names."""
    world = WORLDS["sharded over more shards"]
    _accidents.create(world, folder / "x")
    root = folder / "x" / "saved"
    journal = root / ".lazymodel-saving" / "files.json"
    moved: list[str] = []
    for at in itertools.count(1):
        _accidents.run(lambda: _accidents.save(world, folder / "x", NEW), at, KILL)
        if journal.exists() and (moved := [n for n in json.loads(journal.read_text())["new"] if (root / n).exists()]):
            break
    name = moved[0]
    shutil.copy(root / name, root / "copy")
    os.replace(root / "copy", root / name)
    before = (root / name).stat().st_ino
    with pytest.raises(lm.LazyModelError, match="already"):
        lm.save(values(NEXT), root)  # removes what the killed one left
    assert not journal.parent.exists()
    assert (root / name).stat().st_ino == before


# What is there already ------------------------------------------------------------------------------------------------


def test_orbax_and_steps_are_not_hidden(tmp_path: Path) -> None:
    lm.save(values(OLD), tmp_path / "orbax", format="orbax")
    lm.save(values(OLD), tmp_path / "steps" / "12", format="orbax")
    before = everything(tmp_path)
    for folder in sorted(tmp_path.iterdir()):
        for overwrite in (False, True):
            with pytest.raises(lm.LazyModelError, match=f"already in {folder}, .*another format"):
                lm.save(values(NEW), folder, overwrite=overwrite)
    assert everything(tmp_path) == before


def test_orbax_replaces_nothing_but_orbax(tmp_path: Path) -> None:
    for name in ("with notes", "steps/12", "steps/13"):
        lm.save(values(OLD), tmp_path / name, format="orbax")
    (tmp_path / "with notes" / "notes.txt").write_text("mine")
    lm.save(values(OLD), tmp_path / "single")
    (tmp_path / "file").write_text("mine")
    before = everything(tmp_path)
    for name, what in (
        ("with notes", "notes.txt"), ("steps", "12, 13"), ("single", "model.safetensors"), ("file", "is a file")
    ):  # fmt: skip
        for overwrite in (False, True):
            with pytest.raises(lm.LazyModelError, match=what):
                lm.save(values(NEW), tmp_path / name, format="orbax", overwrite=overwrite)
    assert everything(tmp_path) == before


def test_names_that_are_taken(tmp_path: Path) -> None:
    """Shards have the usual names wherever these are free, also after the same model was saved before."""
    for fill in (OLD, NEW, NEXT):
        lm.save(values(fill), tmp_path, overwrite=True, **SHARDED)
        names = sorted(os.listdir(tmp_path))
        count = len(names) - 1
        assert names == [
            *(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)),
            "model.safetensors.index.json",
        ]
        assert found(tmp_path) == fill


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm.save(values(OLD), tmp_path, **SHARDED)

    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    lm.save(values(NEW), tmp_path, overwrite=True, **SHARDED)
    assert found(tmp_path) == NEW
    assert all(path.name.startswith("model-v2-") for path in tmp_path.glob("model-*"))
    lm.save(values(NEXT), tmp_path, overwrite=True, **SHARDED)
    assert found(tmp_path) == NEXT
    assert not any(path.name.startswith("model-v") for path in tmp_path.glob("model-*"))


def test_links_to_folders(tmp_path: Path) -> None:
    for name, options in (("a", {}), ("b", ORBAX)):
        lm.save(values(OLD), tmp_path / name, **options)
        (tmp_path / f"link-{name}").symlink_to(name)
        lm.save(values(NEW), tmp_path / f"link-{name}", overwrite=True, **options)
        assert found(tmp_path / name) == NEW and (tmp_path / f"link-{name}").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link-a", "link-b"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(path: Any, *_: object) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    lm.save(values(OLD), tmp_path)
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(lm.LazyModelError, match=f"cannot write {tmp_path} .*Permission denied. What was there before"):
        lm.save(values(NEW), tmp_path, overwrite=True)
    assert found(tmp_path) == OLD


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path in ("x.h5", "x", "/proc/self/x.h5", f"{tmp_path}/{'x' * 300}"):
        with pytest.raises(lm.LazyModelError, match=f"cannot write {path}"):
            lm.save({"a": np.zeros(3)}, path)


# Shards without an index ----------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> dict[int, list[Path]]:
    for fill in (OLD, NEW):
        lm.save(values(1) | {"a/w": values(fill)["a/w"]}, tmp_path / str(fill), **SHARDED)
    return {fill: sorted((tmp_path / str(fill)).glob("model-*")) for fill in (OLD, NEW)}


def refused(folder: Path, message: str) -> None:
    with pytest.raises(lm.CheckpointError, match=message):
        lm.open_checkpoint(folder)
    assert any(message in problem for problem in problems(folder))


def test_numbered_shards_without_an_index(tmp_path: Path, shards: dict[int, list[Path]]) -> None:
    index = shards[OLD][0].with_name("model.safetensors.index.json")
    text = index.read_text()
    index.unlink()
    folder = index.parent
    assert found(folder) == OLD
    shutil.copy(shards[NEW][0], folder)
    refused(folder, "expected shards of one save, found a mixture of 2")
    index.write_text(text)  # which cannot tell them apart either: names and shapes are the same
    refused(folder, "expected shards of one save, found a mixture of 2")
    index.unlink()
    (folder / shards[NEW][0].name).unlink()
    refused(folder, f"missing {shards[NEW][0].name}")


def test_numbered_shards_of_two_checkpoints(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    for name in ("a-00001-of-00001", "model-00001-of-00001"):
        save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors")
    refused(tmp_path, "expected the shards of one save, found those of 2")


def test_a_copied_note_of_a_save_is_not_believed(tmp_path: Path) -> None:
    lm.save(values(OLD), tmp_path / "a", **SHARDED)
    with lm.open_checkpoint(tmp_path / "a") as ckpt:
        lm.save(ckpt, tmp_path / "b", metadata=ckpt.metadata, **SHARDED)
        lm.save(ckpt, tmp_path / "c", metadata=ckpt.metadata)
    name = sorted((tmp_path / "a").glob("model-*"))[0].name
    shutil.copy(tmp_path / "a" / name, tmp_path / "b")
    refused(tmp_path / "b", "found a mixture of 2")
    with lm.open_checkpoint(tmp_path / "c") as ckpt:
        assert ckpt.metadata == {"format": "pt"}
