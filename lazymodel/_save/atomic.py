"""Replacing files and folders completely or not at all, and keeping a second saver out meanwhile.

Responsible for what every way of saving needs: a folder of the saver's own next to the destination, in which everything
is written first; the one step that puts it in place; and what a saver that was killed left there. Not responsible for
what is written, nor for which of several processes does this: one does, the others write into its folder.

    with staging(path) as stage:            # raises while another saver is at work
        write(stage.new / "weights.h5")
        stage.replace_file("weights.h5")    # or replace_folder(), or replace_files(…)

Everything temporary is in one folder, `.NAME.lazymodel-saving` next to the destination NAME, or `.lazymodel-saving` in
a destination folder that may be the root of a file system, from which files cannot be moved in otherwise:

    lock        held with `flock` while a saver is alive; the kernel releases it however the saver ends
    new         what is being written (and what Orbax writes next to it until it is complete, `new.*`)
    files.json  which files of the destination folder are about to come and to go (`replace_files`)
    old         an old folder, while it is being replaced where the file system cannot exchange two folders
    trash       what is being deleted

Each step that replaces something is one rename, or one removal, that takes effect completely or not at all. Before it,
a failure of any kind leaves the old state. After it the new one is in place, so what cannot be tidied up then is a
warning, and the next saver tidies it. Whether it happened is read from the disk and never from a variable, which a
Ctrl-C could come in front of.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from lazymodel._errors import LazyModelError, warn
from lazymodel._tensors.buffers import uninterrupted
from lazymodel.checkpoints._open import OLD, SAVING, staging_folder

_LOCK, _NEW, _TRASH, _JOURNAL = "lock", "new", "trash", "files.json"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}  # of some network file systems
_NO_EXCHANGE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}  # folders of file systems that have none
_TRIES = 1000  # to make a folder that other savers remove, or that cannot be made, as in /proc/self
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, renameat2(2)

_held: set[int] = set()  # descriptors of locks


def _after_fork() -> None:
    # A child that lives on must not keep a lock whose holder is gone.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


class Staging:
    """A saver's own folder; `staging` makes one."""

    def __init__(self, destination: Path, *, inside: bool) -> None:
        self.destination = destination  # what is replaced: a file or a folder
        self.folder = staging_folder(destination, inside=inside)
        self.new = self.folder / _NEW  # a folder, empty at first, for what is to be put in place

    def replace_file(self, name: str) -> None:
        """Moves a file from `new` to the destination, which is one; where it cannot be done that is what it was."""
        with writing(self.destination):
            sync(self.new / name)
            os.replace(self.new / name, self.destination)
        with _afterwards(self.destination):
            sync(self.destination.parent)

    def replace_folder(self) -> None:
        """Puts the folder `new` in the place of the destination, which is a folder or does not exist.

        Everything that was in it is gone afterwards; `carry_over` keeps what is to stay. Where the file system cannot
        exchange two folders, the destination does not exist for the time between two renames: `existing` says what to
        open then. Where it cannot be done the destination is what it was, at the latest once `staging` is left.
        """
        with writing(self.destination):
            sync_tree(self.new)
            exists = self.destination.is_dir()
            if exists:
                shutil.copymode(self.destination, self.new)
            if not exists or not exchange(self.new, self.destination):
                if exists:
                    os.rename(self.destination, self.folder / OLD)
                os.rename(self.new, self.destination)
        with _afterwards(self.destination):
            sync(self.destination.parent)

    def replace_files(self, first: Sequence[str], commit: str, old: Sequence[str]) -> None:
        """Replaces files of the destination, a folder whose other files stay; or it is what it was, as above.

        Args:
            first: Names of files in `new` that are moved first, in this order; nothing may depend on them yet.
            commit: Name of the file that decides what counts. It is moved from `new` to the destination; or removed
                from the destination where `new` has none.
            old: Names of files in the destination that are removed then.
        """
        moved = [*first, commit] if (self.new / commit).exists() else [*first]
        with writing(self.destination):
            for name in moved:
                sync(self.new / name)
            fresh = [name for name in first if not os.path.lexists(self.destination / name)]
            gone = [name for name in old if os.path.lexists(self.destination / name)]
            journal = {
                "commit": commit,
                "moves": commit in moved,
                "new": {name: _identity(self.new / name) for name in fresh},
                "old": {name: _identity(self.destination / name) for name in gone},
            }
            written = self.folder / f"{_NEW}.{_JOURNAL}"
            written.write_text(json.dumps(journal), encoding="utf-8")
            sync(written)
            os.replace(written, self.folder / _JOURNAL)
            sync(self.folder)
            for name in first:
                os.replace(self.new / name, self.destination / name)
            sync(self.destination)  # what the next step relies on is on the disk before it
            if commit in moved:
                os.replace(self.new / commit, self.destination / commit)
            else:
                os.unlink(self.destination / commit)
        with _afterwards(self.destination):
            sync(self.destination)  # only then may go what counted before
            self._tidy()

    @property
    def unfinished(self) -> bool:
        """True where `replace_files` could not remove all that it was to."""
        return (self.folder / _JOURNAL).exists()

    def _tidy(self) -> None:
        """Removes the files of whichever side of `replace_files` does not count, this saver's or a killed one's."""
        try:
            journal = json.loads((self.folder / _JOURNAL).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # nothing was begun
            return
        waits = (self.new if journal["moves"] else self.destination) / journal["commit"]
        for name, identity in journal["new" if waits.exists() else "old"].items():
            path = self.destination / name
            with contextlib.suppress(FileNotFoundError):
                if _identity(path) == identity:  # and no other file that somebody put there
                    os.unlink(path)
        os.unlink(self.folder / _JOURNAL)
        sync(self.folder)  # before `new` loses the file that decides which side counts

    def recover(self) -> None:
        """Finishes or undoes what was begun and not ended, by this saver or a killed one, and removes what it left."""
        old, trash = self.folder / OLD, self.folder / _TRASH
        if old.exists() and not os.path.lexists(self.destination):  # between the two renames of `replace_folder`
            os.rename(old, self.destination)
        self._tidy()
        if trash.exists():
            shutil.rmtree(trash)
        if old.exists():  # half deleted it must not be found by that name
            os.rename(old, trash)
        for child in sorted(os.listdir(self.folder)):
            if child.startswith(_NEW) or child in (_TRASH, _JOURNAL):
                path = self.folder / child
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


@contextlib.contextmanager
def staging(destination: Path, *, inside: bool = False, rivals: Iterable[Path] = ()) -> Generator[Staging]:
    """The saver's folder next to a destination, for this saver alone; it is gone afterwards.

    What killed savers of the same destination left is removed first. Parent folders of the destination are made, and
    removed again where nothing was put in place.

    Args:
        destination: A file, or a folder. `replace_folder` needs the folder itself and not a link to it.
        inside: Whether the destination is a folder that files are put into, rather than replaced itself.
        rivals: The staging folders of other destinations that have files in common with this one.
    """
    stage = Staging(destination, inside=inside)
    above = [stage.folder.parent, *stage.folder.parent.parents]
    made = list(itertools.takewhile(lambda folder: not os.path.lexists(folder), above))
    fd, done = None, False
    try:
        with uninterrupted():
            fd = _lock(stage.folder, destination)
            if rival := next(filter(_is_locked, rivals), None):
                raise _busy(destination, rival)
            with writing(destination):
                stage.recover()
                stage.new.mkdir()
        yield stage
        done = True
    finally:
        with uninterrupted():
            if fd is not None:
                try:
                    with _afterwards(destination) if done else contextlib.suppress(OSError):  # the next saver does it
                        _clear(stage)
                finally:
                    _release(fd)
            for folder in made:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(folder)


def _clear(stage: Staging) -> None:
    """Removes the saver's folder."""
    stage.recover()
    os.unlink(stage.folder / _LOCK)
    try:
        os.rmdir(stage.folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):  # the next saver is there already
            raise


@contextlib.contextmanager
def writing(destination: Path) -> Generator[None]:
    """Within the block, an error of the operating system becomes a LazyModelError that names the destination."""
    try:
        yield
    except OSError as error:
        at = f" ({error.filename})" if error.filename is not None else ""
        raise LazyModelError(
            f"cannot write {destination}{at}: {error.strerror or error}. What was there before is as it was"
        ) from error


@contextlib.contextmanager
def _afterwards(destination: Path) -> Generator[None]:
    """Cleans up once the new state is in place: this cannot fail any more, only be left for later."""
    try:
        yield
    except OSError as error:
        warn(
            f"{destination} is saved, but not all that it replaces could be removed, or the disk did not confirm it: "
            f"{error.strerror} ({error.filename}). The next save removes what is left"
        )


# Locks ----------------------------------------------------------------------------------------------------------------


def _busy(destination: Path, folder: Path) -> LazyModelError:
    return LazyModelError(
        f"{destination} is being saved to by another saver, which holds {folder / _LOCK}. Wait until it has finished, "
        "or save to another path"
    )


def _lock(folder: Path, destination: Path) -> int:
    """Makes a saver's folder; returns the descriptor of its lock, which is held."""
    with writing(destination):
        for _ in range(_TRIES):
            if (fd := _try_lock(folder, destination)) is not None:
                return fd
        raise OSError(errno.ENOENT, "no folder can be made there", str(folder))


def _try_lock(folder: Path, destination: Path) -> int | None:
    """The descriptor of the lock; None if the saver before this one removed its folder in between."""
    found = True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(folder)
        found = False
    except FileNotFoundError:
        return None
    except FileExistsError as error:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(error.filename).st_mode):
                raise
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        return None
    except OSError:
        if not found:
            os.rmdir(folder)
        raise
    _held.add(fd)
    kept = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = os.path.samestat(os.fstat(fd), os.stat(folder / _LOCK))
    except BlockingIOError:
        raise _busy(destination, folder) from None
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            if not found:
                os.unlink(folder / _LOCK)
                os.rmdir(folder)
            raise
        if found:
            raise LazyModelError(
                f"{folder} is there, of a saver that saves to {destination} or was killed, and the file system has no "
                "locks to tell which. Remove it if no saver is running"
            ) from None
        kept = True
    finally:
        if not kept:
            _release(fd)
    return fd if kept else None


def _release(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


def _is_locked(folder: Path) -> bool:
    """Returns True if a saver is at work in a folder."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(fd)
    return False


# Files ----------------------------------------------------------------------------------------------------------------


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two files or folders in one step; False where kernel or file system cannot, and nothing was done."""
    try:
        renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux, or a C library that has no such function
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def carry_over(old: Path, new: Path, *, leave: Iterable[str]) -> None:
    """Gives a new folder what an old one has and it has not, as links to the same files, subfolders included.

    `leave` are paths relative to `old`, with slashes, of files and folders that are not to be kept.
    """
    left = set(leave)
    for folder, folders, names in os.walk(old):
        within = os.path.relpath(folder, old)
        for name in [*folders, *names]:
            path = os.path.normpath(os.path.join(within, name))
            source, target = old / path, new / path
            if path.replace(os.sep, "/") in left or name.endswith(SAVING):
                if name in folders:
                    folders.remove(name)  # which `os.walk` then does not enter
            elif source.is_symlink():
                if not os.path.lexists(target):
                    os.symlink(os.readlink(source), target)
            elif source.is_dir():
                if not target.exists():
                    os.mkdir(target)
                    shutil.copystat(source, target)
            elif not os.path.lexists(target):
                try:
                    os.link(source, target)
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.EMLINK, *_NO_EXCHANGE):
                        raise
                    shutil.copy2(source, target)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk: without it a power failure may lose them."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """`sync` of a folder and all that is in it."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(inner, name)
            if not path.is_symlink():
                sync(path)
        sync(Path(inner))


def _identity(path: Path) -> list[int]:
    """Identity of a file, which another file of the same name does not have."""
    found = os.lstat(path)
    return [found.st_ino, found.st_size, found.st_mtime_ns]
