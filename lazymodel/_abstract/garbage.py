"""Garbage collection while a model is built and loaded."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator

_NEVER = 1 << 20  # collections of the middle generation before a full one
_lock = threading.Lock()
_users = 0
_before = gc.get_threshold()


@contextlib.contextmanager
def no_full_collections() -> Generator[None]:
    """Delays full collections until the end of the block, in whichever thread; young objects are still collected.

    A model of thousands of variables makes full collections due again and again, each of all objects of the process:
    a third of the time of building it. Imports of Keras and KerasHub make one due that takes as long as a load.
    """
    global _users, _before
    with _lock:
        if not _users:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], max(_before[2], _NEVER))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                gc.set_threshold(*_before)
