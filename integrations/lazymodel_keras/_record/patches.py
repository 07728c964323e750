"""Patches of Keras and KerasHub that are installed while a thread needs them, and act in that thread only."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

from lazymodel_keras import _upstream

Install = Callable[[contextlib.ExitStack], None]

_thread = threading.local()  # like Keras' own global state


def active() -> Any:
    """The `Recording` that is running in this thread, or None."""
    return getattr(_thread, "recording", None)


@contextlib.contextmanager
def activated(recording: Any) -> Generator[None]:
    """Makes a recording the active one of this thread."""
    _thread.recording = recording
    try:
        yield
    finally:
        _thread.recording = None


class SharedPatches:
    """Patches that are installed while at least one thread needs them."""

    def __init__(self) -> None:
        self._installs: list[Install] = []
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()
        self._thread = threading.local()

    @property
    def here(self) -> bool:
        """True if this thread needs them."""
        return getattr(self._thread, "needs", False)

    def register(self, install: Install) -> Install:
        """Registers a function that installs patches until its stack closes; they only act where `here` is True."""
        self._installs.append(install)
        return install

    def replace(self, undo: contextlib.ExitStack, owner: Any, name: str, ours: Any) -> None:
        """Calls `ours(original, …)` in place of `owner.name(…)` until `undo` closes, if `here`.

        For a module, also in the modules of KerasHub that have imported the name from there.
        """
        found = vars(owner)[name]
        original = getattr(found, "__func__", found)  # for a class method

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs) if self.here else original(*args, **kwargs)

        importers = _upstream.modules_with(name, found) if inspect.ismodule(owner) else ()
        for holder in (owner, *importers):
            replace(undo, holder, name, call if found is original else type(found)(call))

    def replacing(self, owner: Any, name: str) -> Callable[[Any], Any]:
        """Does so with the decorated function; `owner` may be a function that returns it, several, or None."""

        def decorate(ours: Any) -> Any:
            @self.register
            def install(undo: contextlib.ExitStack) -> None:
                found = owner() if inspect.isfunction(owner) else owner
                for holder in found if isinstance(found, list) else [found]:
                    if holder is not None:
                        self.replace(undo, holder, name, ours)

            return ours

        return decorate

    @contextlib.contextmanager
    def needed(self) -> Generator[None]:
        """Keeps the patches installed in the block."""
        with self._lock:
            if self._users == 0:
                with contextlib.ExitStack() as undo:
                    for install in self._installs:
                        install(undo)
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


recording_patches = SharedPatches()
collecting_patches = SharedPatches()


@collecting_patches.register
def _no_full_collections(undo: contextlib.ExitStack) -> None:
    # Importing Keras and KerasHub makes a full garbage collection due: a quarter of a second in which no other thread
    # reads or compiles, as long as a model takes to load. Young objects are still collected.
    young, middle, old = gc.get_threshold()
    undo.callback(gc.set_threshold, young, middle, old)
    gc.set_threshold(young, middle, max(old, 1 << 20))


def while_recording(owner: Any, name: str) -> Callable[[Any], Any]:
    """Like `SharedPatches.replacing`, in threads that record: the decorated function gets the recording first."""

    def decorate(ours: Any) -> Any:
        @recording_patches.replacing(owner, name)
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            recording = active()
            return original(*args, **kwargs) if recording is None else ours(recording, original, *args, **kwargs)

        return ours

    return decorate
