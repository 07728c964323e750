"""The other processes of this run: a store of texts that all of them see, signs of life, and how a process leaves.

Responsible for the little that processes must know of each other: who is at work, who has ended and why, whom nobody
waits for any more. What they agree on is in `_devices/agreement`.

JAX has a store of its own, the coordination service of `jax.distributed`, which process 0 runs. There is no public way
to it: `jax.distributed` only starts and ends it, and the barriers of `jax.experimental.multihost_utils` are over all
processes and can neither be left early nor say who is missing. So this module, and no other, asks `jax._src` for it.

What a library cannot do: when process 0 dies, its service dies with it, and JAX at once aborts every process that was
connected. And JAX aborts all of them `heartbeat_timeout_seconds` (of `jax.distributed.initialize`, 100 by default)
after a process was killed, whoever has noticed by then. Hence `SILENCE`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import math
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import jax

from lazymodel._errors import LazyModelError

WAIT = "LAZYMODEL_WAIT_SECONDS"
_DEFAULT_WAIT = 1800.0  # seconds: some hosts download what others have; a job's own limits are about as long
SILENCE = 60.0  # seconds, at most: well below JAX's 100, and longer than anything that keeps Python's threads waiting
_SIGNS = 12  # signs of life in that time
_FAREWELL = 60.0  # seconds, at most, that process 0 stays for the others where one was given up
_QUIET = 3.0  # seconds that a process needs, at most, from its last word to its end
_MAX_TEXT = 8192  # characters of a message that is passed on

_FOLDER = "lazymodel/"
_ALIVE = _FOLDER + "alive/"  # …/process: a count that grows while it is at work, or nothing
TROUBLE = _FOLDER + "trouble/"  # …/process/left: how it ended; …/process/number: which opening failed


def wait_seconds() -> float:
    """How long a process waits for another one: `LAZYMODEL_WAIT_SECONDS`, or 1800 seconds."""
    text = os.environ.get(WAIT)
    if text is None:
        return _DEFAULT_WAIT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LazyModelError(f"{WAIT} is a positive number of seconds; got {text!r}")
    return seconds


def silence_seconds() -> float:
    """For how long a process that was at work may be silent before it counts as dead."""
    return min(wait_seconds(), SILENCE)


class Store:
    """Texts by key, the same in all processes: this one is number `process` of `processes`."""

    def __init__(self, client: Any, process: int, processes: int) -> None:
        self._client, self.process, self.processes = client, process, processes

    def put(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> str:
        """The text that the first of all processes put there."""
        try:
            self._client.key_value_set(key, text, allow_overwrite=False)
        except jax.errors.JaxRuntimeError:
            if (earlier := self.get(key)) is None:
                raise
            return earlier
        return text

    def get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def folder(self, folder: str) -> dict[str, str]:
        """Everything below a folder, whose name ends with a slash, by the rest of its key."""
        return {key.removeprefix(folder): text for key, text in self._client.key_value_dir_get(folder)}

    def delete(self, folder: str) -> None:
        self._client.key_value_delete(folder)


def run_store() -> Store | None:
    """The store of this run, or None where this process is alone."""
    if not jax.distributed.is_initialized():
        return None
    state = _state()
    return None if state.num_processes == 1 else Store(state.client, state.process_id, state.num_processes)


def _state() -> Any:
    # Imported here, so that one process alone does not depend on where upstream keeps it.
    return importlib.import_module("jax._src.distributed").global_state


def excerpt(error: BaseException) -> str:
    """What others are told of an error."""
    return (str(error) or type(error).__name__)[:_MAX_TEXT]


# --- signs of life ---------------------------------------------------------------------------------------------------


class _Signs:
    """A thread that lets the others see that this process is at work, from `start` to `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, store: Store) -> None:
        with self._lock:
            if self._stop is None:
                self._stop = threading.Event()
                arguments = (store, self._stop, silence_seconds() / _SIGNS)
                self._thread = threading.Thread(target=self._show, args=arguments, name="lazymodel-alive", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._lock:
            if self._stop is not None:
                self._stop.set()
                self._stop = None

    def end(self) -> None:
        """Stops for good: an interpreter that ends while a thread is in a call of JAX's aborts the process."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_QUIET)

    def _show(self, store: Store, stop: threading.Event, interval: float) -> None:
        key = f"{_ALIVE}{store.process}"
        try:
            while True:
                store.put(key, repr(time.monotonic()))
                if stop.wait(interval):
                    break
            with self._lock:
                if self._stop is None:  # or the next thread is at it already
                    store.put(key, "")
        except jax.errors.JaxRuntimeError:  # the service ended, and with it whoever would look
            with self._lock:
                if self._stop is stop:
                    self._stop = None


SIGNS = _Signs()


class Watch:
    """Finds out which processes that were at work have fallen silent."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, float]] = {}

    def silent(self, store: Store, processes: set[int], limit: float) -> set[int]:
        """Those whose last sign of life is older than `limit` seconds, by this process's own clock."""
        if len(processes) == 1:  # as in most processes, which watch the first one only
            (only,) = processes
            signs = {str(only): store.get(f"{_ALIVE}{only}") or ""}
        else:
            signs = store.folder(_ALIVE)
        now = time.monotonic()
        silent: set[int] = set()
        for process in processes:
            sign = signs.get(str(process), "")
            seen, since = self._seen.get(process, ("", now))
            if sign != seen:
                self._seen[process] = (sign, now)
            elif sign and now - since > limit:
                silent.add(process)
        return silent


# --- trouble ---------------------------------------------------------------------------------------------------------


class Trouble(NamedTuple):
    """Why a process will not come."""

    what: str  # a verb phrase
    why: str  # what it said, or nothing
    opening: int = 0  # which of its failed openings it was, or 0


def troubles(store: Store, openings: int) -> dict[int, Trouble]:
    """By process, those others that have ended, or failed once more to open a checkpoint than `openings` times."""
    found: dict[int, Trouble] = {}
    for key, text in store.folder(TROUBLE).items():
        process, _, what = key.partition("/")
        if what == "left":
            found.setdefault(int(process), Trouble("has ended", json.loads(text)["why"]))
        elif int(what) == openings + 1:  # the first that this process has not seen; says more than that it ended then
            found[int(process)] = Trouble("failed", text, int(what))
    found.pop(store.process, None)
    return found


# --- leaving ---------------------------------------------------------------------------------------------------------

_PID = os.getpid()
GIVEN_UP: set[int] = set()  # processes for which nobody waits any more, not even at the end of the program


def _leave() -> None:
    """At exit: tells the others, and does not wait for those who are gone."""
    # JAX's own farewell, which comes after this, is a barrier over all processes. Where one was killed that barrier
    # fails after minutes, and JAX then aborts those who wait at it.
    try:
        if os.getpid() != _PID or (here := run_store()) is None:  # a child that was forked is not this process
            return
        SIGNS.end()
        alone = bool(GIVEN_UP) or any(json.loads(text)["alone"] for text in _left(here).values())
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # what ends this process, if it does
        why = f"{type(error).__name__}: {excerpt(error)}" if isinstance(error, BaseException) else ""
        here.put(f"{TROUBLE}{here.process}/left", json.dumps({"why": why, "alone": alone}))
        if alone:
            if _state().service is not None:  # process 0, whose end would abort those who are still connected
                deadline = time.monotonic() + min(wait_seconds(), _FAREWELL)
                expected = set(range(here.processes)) - GIVEN_UP
                while time.monotonic() < deadline and not expected <= _left(here).keys():
                    time.sleep(0.05)
                time.sleep(_QUIET)
            _detach()
    except Exception as error:  # a program that ends must not be kept from it
        print(f"lazymodel: the other processes could not be told that this one ends: {error}", file=sys.stderr)


def _left(store: Store) -> dict[int, str]:
    """What the processes said that have ended."""
    texts = store.folder(TROUBLE).items()
    return {int(key.partition("/")[0]): text for key, text in texts if key.endswith("/left")}


def keep_client() -> None:
    """For a process that leaves a program behind which will never end: JAX's farewell would wait for it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(jax.local_devices()[0].client))


def _detach() -> None:
    """Takes JAX's connection out of its hands, so that it neither waits at its barrier nor ends the service."""
    # The objects must never be destroyed, because their destructors do just that; so each gets a reference that nobody
    # gives back. Their sockets close with the process.
    state = _state()
    for name in ("preemption_sync_manager", "client", "service"):
        held = getattr(state, name)
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
            setattr(state, name, None)


atexit.register(_leave)  # last registered, first called: before JAX's own, which lazymodel imported earlier
