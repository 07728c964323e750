"""Patches of Keras and KerasHub that stay while some thread needs them, and act in the threads that record."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

Install = Callable[[contextlib.ExitStack], None]

_thread = threading.local()  # like Keras' own global state
_registered: list[Install] = []


def active() -> Any:
    """The `Recording` that is running in this thread, or None."""
    return getattr(_thread, "recording", None)


@contextlib.contextmanager
def activated(recording: Any) -> Generator[None]:
    """Makes a recording this thread's."""
    _thread.recording = recording
    try:
        yield
    finally:
        _thread.recording = None


def register(install: Install) -> Install:
    """Has a function install its patches, until the stack that it is given closes, while any thread records.

    They have to act where `active()` is a recording only.
    """
    _registered.append(install)
    return install


class SharedPatches:
    """Patches that are installed while at least one thread needs them; each has to act in those threads only."""

    def __init__(self, install: Install) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()
        self._thread = threading.local()

    @property
    def here(self) -> bool:
        """Whether this thread needs them."""
        return getattr(self._thread, "needs", False)

    @contextlib.contextmanager
    def needed(self) -> Generator[None]:
        """Keeps the patches installed for a while."""
        with self._lock:
            if self._users == 0:
                with contextlib.ExitStack() as undo:
                    self._install(undo)
                    self._undo = undo.pop_all()
            self._users += 1
        before, self._thread.needs = self.here, True
        try:
            yield
        finally:
            self._thread.needs = before
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until `undo` closes."""
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def while_recording(owner: Any, name: str) -> Callable[[Any], Any]:
    """Has the decorated function called in place of `owner.name` in threads that record.

    Args:
        owner: A class or module, or a function that returns one, or None where there is nothing to replace.
        name: The attribute; what it is otherwise comes after the recording, before the arguments.
    """

    def decorate(ours: Any) -> Any:
        @register
        def install(undo: contextlib.ExitStack) -> None:
            found = owner() if inspect.isfunction(owner) else owner
            if found is None:
                return
            original = vars(found)[name]

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                recording = active()
                return original(*args, **kwargs) if recording is None else ours(recording, original, *args, **kwargs)

            replace(undo, found, name, call)

        return ours

    return decorate


def _install_registered(undo: contextlib.ExitStack) -> None:
    for install in _registered:
        install(undo)


recording_patches = SharedPatches(_install_registered)
