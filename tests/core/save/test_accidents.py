"""Saves that are killed, interrupted, out of disk, or two at a time: there is the old checkpoint or the new one."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from lazymodel._save import atomic
from lazymodel.checkpoints._inspect import inspect_checkpoint
from tests.conftest import ROOT, child_environment
from tests.core.save import _accidents
from tests.core.save._accidents import NEW, NEXT, OLD, ORBAX, WORLDS, Killed, arrays, create, everything, found

FILES = [name for name in WORLDS if "orbax" not in name]
TREES = [name for name in WORLDS if "orbax" in name]
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where waiting for the disk takes no time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def accidents(
    folder: Path, name: str, accident: Any, *, step: int = 1, first: int = 1
) -> collections.Counter[tuple[int | None, str]]:
    """Saves with an accident at every operation; how often what was there, and what was raised."""
    if name in TREES:
        pytest.importorskip("orbax.checkpoint")
    world, template = WORLDS[name], folder / "template"
    create(world, template)
    counts: collections.Counter[tuple[int | None, str]] = collections.Counter()
    at = first
    while True:
        root = folder / str(at)
        shutil.copytree(template, root)
        before = everything(root)
        happened, raised = _accidents.run(world, root, at, accident)
        if not happened:
            assert raised is None and found(root / world.path) == NEW
            return counts
        old = OLD if world.old is not None else None
        allowed = {Killed: {old, NEW}, KeyboardInterrupt: {old, NEW}, lm.LazyModelError: {old}}
        state = _accidents.check(world, root, before, allowed.get(type(raised), {NEW}))
        counts[state, type(raised).__name__] += 1
        if accident is _accidents.interrupt:
            assert not list(root.rglob("*lazymodel-saving*")), at
        shutil.rmtree(root)
        at += step


@pytest.mark.parametrize("name", ["flock", "open"])
def test_a_lock_that_cannot_be_had_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl if name == "flock" else os, name, fail)
    with pytest.raises(lm.LazyModelError, match=r"x\.safetensors: Input/output error"):
        lm.save({"w": np.zeros(3)}, tmp_path / "deep" / "x.safetensors")
    monkeypatch.undo()
    assert not os.listdir(tmp_path)


# Accidents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in FILES if "shards over hdf5" not in name]
)  # it is among the large ones
def test_a_kill_at_any_operation(folder: Path, name: str) -> None:
    counts = accidents(folder, name, _accidents.kill)
    assert sum(counts.values()) >= 15
    assert {state for state, _ in counts} == {None if WORLDS[name].old is None else OLD, NEW}


def check_raised(counts: collections.Counter[tuple[int | None, str]], accident: Any, least: int) -> None:
    """An error leaves the old checkpoint, as `accidents` asserts; where the new one counts already there is none."""
    assert sum(counts.values()) >= least
    expected = {"KeyboardInterrupt"} if accident is _accidents.interrupt else {"LazyModelError", "NoneType"}
    assert {kind for _, kind in counts} <= expected


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("accident", [_accidents.interrupt, _accidents.fail, _accidents.fill_disk])
@pytest.mark.parametrize("name", FILES)
def test_what_is_raised_at_some_operations(folder: Path, name: str, accident: Any) -> None:
    first = random.Random(name + accident.__name__).randrange(1, 6)
    check_raised(accidents(folder, name, accident, step=5, first=first), accident, 3)


@pytest.mark.large
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("accident", [_accidents.interrupt, _accidents.fail, _accidents.fill_disk])
@pytest.mark.parametrize("name", FILES)
def test_what_is_raised_at_any_operation(folder: Path, name: str, accident: Any) -> None:
    check_raised(accidents(folder, name, accident), accident, 15)


@pytest.mark.filterwarnings("ignore")  # of what Orbax leaves in the middle of its work
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("accident", [_accidents.interrupt, _accidents.fail, _accidents.fill_disk])
@pytest.mark.parametrize("name", ["orbax over orbax", "orbax over orbax without exchange"])
def test_what_is_raised_while_orbax_saves(folder: Path, name: str, accident: Any) -> None:
    counts = accidents(folder, name, accident, step=6, first=random.Random(name + accident.__name__).randrange(1, 7))
    assert sum(counts.values()) >= 4


@pytest.mark.large
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accident", [_accidents.interrupt, _accidents.fail, _accidents.fill_disk])
@pytest.mark.parametrize("name", TREES)
def test_what_is_raised_at_any_operation_of_orbax(folder: Path, name: str, accident: Any) -> None:
    assert sum(accidents(folder, name, accident).values()) >= 20


def worker(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = child_environment() | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, _accidents.__file__, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(("name", "step"), [("sharded over sharded", 9), ("orbax over orbax", 12)])
def test_real_kills(folder: Path, name: str, step: int) -> None:
    if name in TREES:
        pytest.importorskip("orbax.checkpoint")
    done = worker("kill", folder, step, name, timeout=120)
    assert done.returncode == 0, done.stderr[-8000:]
    counts = json.loads(done.stdout.splitlines()[-1])[name]
    assert set(counts) <= {str(OLD), str(NEW)} and sum(counts.values()) >= 4


@pytest.mark.large
@pytest.mark.parametrize("name", WORLDS)
def test_a_real_kill_at_any_operation(folder: Path, name: str) -> None:
    if name in TREES:
        pytest.importorskip("orbax.checkpoint")
    done = worker("kill", folder, 1, name, timeout=280)
    assert done.returncode == 0, done.stderr[-8000:]
    counts = json.loads(done.stdout.splitlines()[-1])[name]
    print(f"{name}: killed at {sum(counts.values())} operations: {counts}")
    assert sum(counts.values()) >= 15


# Full disks -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's other writes
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "200KB"}, ORBAX], ids=["single", "sharded", "orbax"])
def test_a_full_disk(small_disk: Path, options: dict[str, Any]) -> None:
    if options == ORBAX:
        pytest.importorskip("orbax.checkpoint")
    rng = np.random.default_rng(0)  # Orbax compresses
    values = {
        fill: {f"{n}/w": rng.standard_normal(128 << 10, "float32") + fill for n in range(4)} for fill in (OLD, NEW)
    }
    path = small_disk / "saved"

    def state() -> list[int]:
        with lm.open_checkpoint(path) as ckpt:
            read = {name: tensor.read() for name, tensor in ckpt.items()}
        assert not inspect_checkpoint(path).problems
        return [
            fill
            for fill, wanted in values.items()
            if wanted.keys() == read.keys() and all((read[name] == wanted[name]).all() for name in wanted)
        ]

    lm.save(values[OLD], path, **options)
    failed = 0
    for level in range(10):  # from nothing free to more than what is needed
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(b"\1" * (free - level * 300 * 1024))
        try:
            lm.save(values[NEW], path, overwrite=True, **options)
        except lm.LazyModelError as error:
            message = str(error)
            failed += 1
            assert state() == [OLD] and str(path) in message
            (small_disk / "filler").unlink()
        else:
            assert state() == [NEW]
            (small_disk / "filler").unlink()
            lm.save(values[OLD], path, overwrite=True, **options)
        assert sorted(os.listdir(small_disk)) == ["saved"]
        assert not any("saving" in name for name in os.listdir(path))
    assert 5 <= failed <= 9
    lm.save(values[NEW], path, overwrite=True, **options)
    assert state() == [NEW]


def test_what_orbax_writes_late_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    late: list[threading.Timer] = []

    def save(_: Any, directory: Path, **options: Any) -> None:
        def write() -> None:  # as tensorstore does, which makes folders that are missing
            (directory.parent / f"{directory.name}.tmp" / "d").mkdir(parents=True)

        late.append(threading.Timer(0.1, write))
        late[0].start()
        raise ValueError("the disk is full")

    monkeypatch.setattr(orbax.Checkpointer, "save", save)
    with pytest.raises(lm.LazyModelError, match="the disk is full"):
        lm.save(arrays(NEW), tmp_path / "saved", format="orbax")
    late[0].join()
    assert os.listdir(tmp_path) == []


# Two savers -----------------------------------------------------------------------------------------------------------


def two_savers(folder: Path, times: int, names: list[str]) -> collections.Counter[str]:
    done = worker("race", folder, times, *names, timeout=280)
    assert done.returncode == 0, done.stderr[-8000:]
    return collections.Counter(json.loads(done.stdout.splitlines()[-1]))


RACES = [
    ["sharded over sharded", "sharded over more shards"],
    ["single over sharded", "sharded over single"],
    ["file over file", "file over file"],
]


@pytest.mark.parametrize("names", RACES, ids=" and ".join)
def test_two_savers(folder: Path, names: list[str]) -> None:
    counts = two_savers(folder, 6, names)
    assert counts.total() == 6


@pytest.mark.large
@pytest.mark.parametrize("names", [*RACES, ["orbax over orbax", "orbax over orbax"]], ids=" and ".join)
def test_two_savers_two_hundred_times(folder: Path, names: list[str]) -> None:
    counts = two_savers(folder, 200, names)
    print(names, dict(counts))
    assert counts.total() == 200 and counts["refused"] > 0


@pytest.mark.parametrize("options", [{}, {"path": "x.safetensors"}, ORBAX], ids=["folder", "file", "orbax"])
def test_a_second_saver_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    if options == ORBAX:
        pytest.importorskip("orbax.checkpoint")
    options = {"path": "saved"} | options
    path = tmp_path / options.pop("path")
    lm.save(arrays(OLD), path, **options)
    before = everything(tmp_path)
    inside = path.is_dir() and options != ORBAX
    with (
        atomic.staging(path, inside=inside),
        pytest.raises(lm.LazyModelError, match=rf"{path} is being saved to by another saver.*Wait until"),
    ):
        lm.save(arrays(NEW), path, overwrite=True, **options)
    assert everything(tmp_path) == before
    lm.save(arrays(NEW), path, overwrite=True, **options)
    assert found(path) == NEW


def test_savers_of_other_formats_and_names_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    path = tmp_path / "saved"
    lm.save(arrays(OLD), path)
    for rival, inside in ((path, False), (path / "model.safetensors", False)):
        with atomic.staging(rival, inside=inside), pytest.raises(lm.LazyModelError, match="by another saver"):
            lm.save(arrays(NEW), path, overwrite=True)
    with atomic.staging(path, inside=True):
        for other, options in ((path, ORBAX), (path / "model.safetensors", {})):
            with pytest.raises(lm.LazyModelError, match="by another saver"):
                lm.save(arrays(NEW), other, overwrite=True, **options)
    assert found(path) == OLD and os.listdir(path) == ["model.safetensors"]


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.enter_context(atomic.staging(tmp_path / "x"))
        script = "import os, sys; sys.stdin.read()"  # closes what it inherits but for what it is given, as all do
        child = stack.enter_context(subprocess.Popen([sys.executable, "-c", script], stdin=reader, close_fds=False))
        fd = next(iter(atomic._held))
        assert not os.get_inheritable(fd)
        os.close(writer)
    os.close(reader)
    assert child.returncode == 0
    with atomic.staging(tmp_path / "x"):
        pass


# What is there already ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_format_is_not_hidden(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    lm.save(arrays(OLD), tmp_path / "orbax", format="orbax")
    lm.save(arrays(OLD), tmp_path / "steps" / "12", format="orbax")
    for folder, name in (("h5", "model.weights.h5"), ("loose", "a.safetensors"), ("x", "x.safetensors.index.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    before = everything(tmp_path)
    for folder in sorted(tmp_path.iterdir()):
        for overwrite in (False, True):
            with pytest.raises(lm.LazyModelError, match="there is a checkpoint already.*another format or other names"):
                lm.save(arrays(NEW), folder, overwrite=overwrite)
    assert everything(tmp_path) == before


def test_orbax_replaces_nothing_but_orbax(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    for name in ("with notes", "steps/12", "steps/13"):
        lm.save(arrays(OLD), tmp_path / name, format="orbax")
    (tmp_path / "with notes" / "notes.txt").write_text("mine")
    lm.save(arrays(OLD), tmp_path / "single")
    (tmp_path / "file").write_text("mine")
    before = everything(tmp_path)
    for name, what in (
        ("with notes", "notes.txt"), ("steps", "12, 13"), ("single", "model.safetensors"), ("file", "is a file")
    ):  # fmt: skip
        with pytest.raises(lm.LazyModelError, match=what):
            lm.save(arrays(NEW), tmp_path / name, format="orbax", overwrite=True)
        with pytest.raises(lm.LazyModelError, match="there is something already"):
            lm.save(arrays(NEW), tmp_path / name, format="orbax")
    assert everything(tmp_path) == before


def test_a_file_of_a_sharded_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    lm.save(arrays(OLD), tmp_path, max_shard_size=500)
    before = everything(tmp_path)
    shard = next(path.name for path in sorted(tmp_path.glob("model-*")))
    for name in (shard, "model.safetensors"):
        with pytest.raises(lm.LazyModelError, match=r"would change the sharded checkpoint of .*index.json"):
            lm.save(arrays(NEW), tmp_path / name, overwrite=True)
    assert everything(tmp_path) == before
    lm.save(arrays(NEW), tmp_path / "other.safetensors")
    assert found(tmp_path) == OLD and found(tmp_path / "other.safetensors") == NEW


def test_files_that_no_index_lists_stay(tmp_path: Path) -> None:
    lm.save(arrays(OLD), tmp_path, max_shard_size=500)
    extra = {"adapter.safetensors", "model-00001-of-00009.safetensors"}
    for name in extra:
        (tmp_path / name).write_bytes(b"mine")
    lm.save(arrays(NEW), tmp_path, overwrite=True, max_shard_size=10)
    assert found(tmp_path) == NEW
    lm.save(arrays(NEXT), tmp_path, overwrite=True)
    assert found(tmp_path) == NEXT
    assert set(os.listdir(tmp_path)) == extra | {"model.safetensors"}


def test_names_that_are_taken(tmp_path: Path) -> None:
    """Shards have the usual names wherever these are free, also after the same model was saved before."""
    for fill in (OLD, NEW, NEXT):
        lm.save(arrays(fill), tmp_path, overwrite=True, max_shard_size=500)
        names = sorted(os.listdir(tmp_path))
        count = len(names) - 1
        assert names == [
            *(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)),
            "model.safetensors.index.json",
        ]
        assert found(tmp_path) == fill


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm.save(arrays(OLD), tmp_path, max_shard_size=500)

    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    lm.save(arrays(NEW), tmp_path, overwrite=True, max_shard_size=500)
    assert found(tmp_path) == NEW
    assert all(path.name.startswith("model-v2-") for path in tmp_path.glob("model-*"))
    lm.save(arrays(NEXT), tmp_path, overwrite=True, max_shard_size=500)
    assert found(tmp_path) == NEXT
    assert not any(path.name.startswith("model-v") for path in tmp_path.glob("model-*"))


def test_links_to_folders(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    for name, options in (("a", {}), ("b", ORBAX)):
        lm.save(arrays(OLD), tmp_path / name, **options)
        (tmp_path / f"link-{name}").symlink_to(name)
        lm.save(arrays(NEW), tmp_path / f"link-{name}", overwrite=True, **options)
        assert found(tmp_path / name) == NEW and (tmp_path / f"link-{name}").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link-a", "link-b"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(path: Any, *_: object) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    lm.save(arrays(OLD), tmp_path)
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(lm.LazyModelError, match=f"cannot write {tmp_path} .*Permission denied. What was there before"):
        lm.save(arrays(NEW), tmp_path, overwrite=True)
    assert found(tmp_path) == OLD


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path in ("x.npz", "x", "/proc/self/x.npz", f"{tmp_path}/{'x' * 300}"):
        with pytest.raises(lm.LazyModelError, match=f"cannot write {path}"):
            lm.save({"a": np.zeros(3)}, path)


def test_what_another_program_wrote_meanwhile_stays(folder: Path) -> None:
    """A killed saver's journal names files; one that somebody replaced since is not the one that it names."""
    world = WORLDS["sharded over more shards"]
    create(world, folder / "x")
    root = folder / "x" / "saved"
    for at in range(1, 60):
        if not (root / ".lazymodel-saving" / "files.json").exists():
            _accidents.run(world, folder / "x", at, _accidents.kill)
    journal = json.loads((root / ".lazymodel-saving" / "files.json").read_text())
    name = next(name for name in [*journal["new"], *journal["old"]] if (root / name).exists())
    shutil.copy(root / name, root / "copy")
    os.replace(root / "copy", root / name)
    before = (root / name).stat().st_ino
    with atomic.staging(root, inside=True):
        pass
    assert (root / name).stat().st_ino == before


# Shards without an index ----------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> dict[int, list[Path]]:
    for fill in (OLD, NEW):
        lm.save(arrays(1) | {"a/w": arrays(fill)["a/w"]}, tmp_path / str(fill), max_shard_size=500)
    return {fill: sorted((tmp_path / str(fill)).glob("model-*")) for fill in (OLD, NEW)}


def refused(folder: Path, message: str) -> None:
    with pytest.raises(lm.CheckpointError, match=message):
        lm.open_checkpoint(folder)
    assert any(message in problem.message for problem in inspect_checkpoint(folder).problems)


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
    lm.save(arrays(OLD), tmp_path / "a", max_shard_size=500)
    with lm.open_checkpoint(tmp_path / "a") as ckpt:
        lm.save(ckpt, tmp_path / "b", metadata=ckpt.metadata, max_shard_size=500)
        lm.save(ckpt, tmp_path / "c", metadata=ckpt.metadata)
    name = sorted((tmp_path / "a").glob("model-*"))[0].name
    shutil.copy(tmp_path / "a" / name, tmp_path / "b")
    refused(tmp_path / "b", "found a mixture of 2")
    with lm.open_checkpoint(tmp_path / "c") as ckpt:
        assert ckpt.metadata == {"format": "pt"}


# Arrays without elements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {
            "a": {"w": np.ones((2, 3), "float32"), "none": np.zeros((0, 4), "int8")},
            "b": [jnp.zeros((3, 0), "bfloat16")],
        },
        {"only": jnp.zeros((0,), "float32")},
    ],
    ids=["some", "all"],
)
def test_orbax_arrays_without_elements(tmp_path: Path, given: dict[str, Any]) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    lm.save(given, tmp_path / "saved", format="orbax")
    abstract = lm.build_abstract(lambda: given)
    with lm.open_checkpoint(tmp_path / "saved") as ckpt:
        assert set(ckpt) == set(abstract)
        for name, variable in abstract.items():
            assert (ckpt[name].shape, ckpt[name].dtype) == (variable.shape, variable.dtype)
            assert ckpt[name].read().shape == variable.shape
        abstract.materialize(ckpt, initialize="nothing")
        lm.save(ckpt, tmp_path / "again", format="orbax")
    with lm.open_checkpoint(tmp_path / "again") as ckpt:
        assert set(ckpt) == set(abstract)
    assert not inspect_checkpoint(tmp_path / "saved").problems
    if "a" in given:
        with orbax.StandardCheckpointer() as checkpointer:  # restores the others
            restored = checkpointer.restore(tmp_path / "saved")
        assert restored["a"]["none"] is None and (restored["a"]["w"] == 1).all()


@pytest.mark.parametrize("said", [["float32", [2]], ["object", [0]], ["x", [0]], ["int8", [-1, 0]], ["int8"], 3])
def test_what_orbax_says_of_arrays_without_elements_is_checked(tmp_path: Path, said: Any) -> None:
    pytest.importorskip("orbax.checkpoint")
    lm.save({"w": np.ones(2), "none": np.zeros(0)}, tmp_path / "saved", format="orbax")
    file = tmp_path / "saved" / "_METADATA"
    content = json.loads(file.read_text())
    content["custom_metadata"]["lazymodel_zero_size"] = {"none": said}
    file.write_text(json.dumps(content))
    with pytest.raises(lm.CheckpointError, match="_METADATA: expected dtypes and shapes of arrays without elements"):
        lm.open_checkpoint(tmp_path / "saved")
