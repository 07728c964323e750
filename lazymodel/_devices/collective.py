"""Agreement between processes: a failure in one of them is a failure in all.

Every process that shares a model's devices learns whether the others completed a stage, and with the same result. What
a stage does is not decided here.

Without it, if a file is truncated in one process, that process raises, and the others continue to the next collective
operation of the user's program, where they wait for it.

This computes nothing on devices: a collective operation would wait for missing processes as long as its backend decides
(Gloo: 30 seconds), and could not name them. Instead, every process reports to a store. The first process reads all
reports and decides whether all continue; the others wait for its verdict. A process that fails reports this at once.
The first verdict is final.

The store is that of JAX's coordination service, which process 0 runs. There is no public access to it, so this module,
and no other, takes it from `jax._src`. Its barriers cannot be left early, and its `get_live_nodes` finds a killed
process only after `heartbeat_timeout_seconds` (of `jax.distributed.initialize`, 100 by default), when JAX aborts all
others as well. Hence our own heartbeats. When process 0 dies, JAX at once aborts every process that was connected.

Opening a checkpoint is included: if an opening fails in some but not all processes, the next stage of the others fails.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._show.text import listed

WAIT = "LAZYMODEL_WAIT_SECONDS"
_DEFAULT_WAIT = 1800.0  # seconds: some hosts download files that others have; a job's own limits are similar
SILENCE = 60.0  # limit in seconds: well below JAX's 100, and longer than anything that blocks Python's threads
_BEATS = 12  # heartbeats in that time
_BETWEEN_CHECKS = 1.0  # seconds
_FILES = 64  # limit of a stage's files that an error can name
_TEXT = 1024  # characters of an outcome that are quoted: enough for a message with paths in it
_MAX_TEXT = 8192  # characters of a message that is passed on

_ALIVE = "lazymodel/alive/"  # …/process: a number that changes while the process is in a stage; else empty
_TROUBLE = "lazymodel/trouble/"  # …/process/left: why the process ended; …/process/number: why that opening failed


class Store:
    """Texts by key, the same in all processes. `process` is the number of this one."""

    def __init__(self, client: Any, process: int) -> None:
        self._client, self.process = client, process

    def put(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> str:
        """Returns the text of the first process that put one there."""
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
        """All texts below a folder, whose name ends with a slash, by the rest of their keys."""
        return {key.removeprefix(folder): text for key, text in self._client.key_value_dir_get(folder)}

    def delete(self, folder: str) -> None:
        self._client.key_value_delete(folder)


def run_store() -> Store | None:
    """Returns the store of this run, or None if there is only one process."""
    if not jax.distributed.is_initialized():
        return None
    # Imported here, so that a single process does not depend on where JAX keeps it.
    state = importlib.import_module("jax._src.distributed").global_state
    return None if state.num_processes == 1 else Store(state.client, state.process_id)


def wait_seconds() -> float:
    """Seconds that a process waits for another one: `LAZYMODEL_WAIT_SECONDS`, or 1800."""
    text = os.environ.get(WAIT)
    if text is None:
        return _DEFAULT_WAIT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LazyModelError(f"expected {WAIT} to be a positive number of seconds, got {text!r}")
    return seconds


class _Counts:
    """Numbers of stages, by processes, and of failed openings. Processes that do the same give a stage the same number.

    A failed opening counts as a stage, since it fails the next stage of the others. If it fails in all, all count it.
    """

    stages: ClassVar[collections.Counter[tuple[int, ...]]] = collections.Counter()
    openings = 0


_within = threading.local()  # `stage`: True while this thread is in one


@dataclasses.dataclass
class CollectiveScope:
    """A stage that several processes execute together. Without a store, this process is alone in it."""

    outcome: str = ""  # result that all processes must share; they compare all of it, and an error quotes its beginning
    details: str = ""  # more that must be the same in all processes, but is not shown
    # Files that are read: names, which may differ, and identities of the content, which must not.
    files: Sequence[tuple[str, str]] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # which must be the same in all processes
    # Name → a number of what this process does of it, and the number that those of all processes must add up to.
    shares: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    consequence: str = ""  # of a failure, for its message
    _store: Store | None = None
    _members: tuple[int, ...] = ()
    _given: str = ""
    _hint: str = ""

    def __post_init__(self) -> None:
        self._checked = time.monotonic()
        self._limit = wait_seconds() if self._store else 0.0
        self._silence = min(self._limit, SILENCE)
        self._points = 0  # points of the stage that this process has reached
        self._seen: dict[int, tuple[str, float]] = {}  # the last heartbeat of others, and when it was first seen
        if self._store:
            _Counts.stages[self._members] += 1
        self._count, self._openings = _Counts.stages[self._members], _Counts.openings
        self._leads = self._store is not None and self._store.process == self._members[0]

    def check(self, *, at_once: bool = False) -> None:
        """Raises CheckpointError if the stage has failed in any process, or another process sends no heartbeat.

        For work that takes long: processes that have failed wait for the others at their exit, but not for ever. Reads
        the store at most once a second, unless `at_once`, so it may be called for every part of the work, from any
        thread.
        """
        if self._store and ((now := time.monotonic()) - self._checked >= _BETWEEN_CHECKS or at_once):
            self._checked = now
            error, opening = self._failure(self._store, self._members)
            if error:
                raise CheckpointError(self.fail(error, opening))

    def meet(self) -> None:
        """Waits until all processes have reached this point of the stage. Must be called equally often in all of them.

        A collective operation may follow, in which a single process would wait for ever: so either all processes raise
        CheckpointError, or none does.
        """
        self._points += 1
        self.come(str(self._points), reports=self._points == 1)

    @property
    def leads(self) -> bool:
        """True in the first of the processes."""
        return self._store is None or self._leads

    def first(self, say: Callable[[], str]) -> str:
        """What the first of the processes says; the others wait for it. Once a stage."""
        if self._store is None:
            return say()
        key, start = f"{self.folder()}said", time.monotonic()
        if self._leads:
            self._store.put(key, say())
        while (said := self._store.get(key)) is None:
            self.check()
            _pause(time.monotonic() - start)
        return said

    def come(self, point: str, *, reports: bool) -> None:
        """Waits at a point. Raises CheckpointError in all processes if their reports differ or some do not arrive."""
        store, folder = self._store, f"{self.folder()}{point}/"
        if store is None:
            return
        store.put(f"{folder}reports/{store.process}", self.report() if reports else "")
        start = time.monotonic()
        while (verdict := store.get(f"{folder}verdict")) is None:
            waited, missing = time.monotonic() - start, set(self._members[:1])
            found: dict[str, str] = {}
            # Only the first process watches all others, and they watch the first: otherwise thousands of processes
            # would read thousands of reports each.
            if self._leads or waited > self._limit:
                found = store.folder(f"{folder}reports/")
                missing = set(self._members) - set(map(int, found))
            error, opening = self._failure(store, missing)
            if not error and not missing:
                error = self._difference(found)
            elif not error and waited > self._limit:
                why = f"killed earlier, hanging, or in another operation ({WAIT} sets how long to wait)"
                error = self._lost(missing, f"did not come within {self._limit:g} seconds", why)
            elif not error:
                _pause(waited)
                continue
            if error:
                self.fail(error, opening)
            # One verdict for all, whoever decides first: processes that continue would wait for those that stop.
            verdict = store.put_first(f"{folder}verdict", "stop" if error else "go")
            break
        if verdict == "stop":
            raise CheckpointError(self.fail(""))

    def together(self, operation: Callable[[], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """Returns the arrays of a collective operation when they are ready. All processes have met for it.

        If a process is killed, the others may wait in the operation for ever, or it may fail. Both raise
        CheckpointError after a minute without a heartbeat of that process.
        """
        started = time.monotonic()
        try:
            arrays = operation()
            while self._store and not all(cast(Any, array).is_ready() for array in arrays):
                self.check()
                _pause(time.monotonic() - started)
            return jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError:
            failed = time.monotonic()
            while time.monotonic() - failed < self._silence * 1.25:  # the end of another process may be the cause
                self.check(at_once=True)
                _pause(self._silence)
            raise

    def added(self, numbers: Sequence[int]) -> Sequence[int]:
        """The sums of the numbers of all processes, each of which gives as many; the processes meet for it."""
        store, folder = self._store, f"{self.folder()}numbers/"
        if store is None:
            return numbers
        store.put(f"{folder}{store.process}", json.dumps(list(numbers)))
        self.meet()
        if self._leads:
            every = [json.loads(store.get(f"{folder}{process}") or "") for process in self._members]
            store.put(f"{folder}sums", json.dumps([sum(each) for each in zip(*every, strict=True)]))
        self.meet()
        return json.loads(store.get(f"{folder}sums") or "")

    def report(self) -> str:
        """The outcome of this process, which the others compare with theirs."""
        whole = "\0".join((self.outcome, self.details, *(content for _, content in self.files)))
        checksum = f"{zlib.crc32(whole.encode(errors='backslashreplace')):08x}"
        done = _sums((name, done) for name, (done, _) in self.shares.items())
        report = {"outcome": self.outcome[:_TEXT], "checksum": checksum, "files": self.files[:_FILES]}
        return json.dumps(report | {"layouts": self._layouts, "shares": done})

    @functools.cached_property
    def _layouts(self) -> list[int]:
        return _sums((path, layout_of(each)[1]) for path, each in self.variables.items())

    def fail(self, error: str, opening: int = 0) -> str:
        """Records that the stage failed. Returns the first error of any process, which may be a different one.

        Args:
            error: The message for all processes.
            opening: Number of the failed opening that the others treat as this stage, or 0.
        """
        assert self._store is not None
        error, opening = json.loads(self._store.put_first(f"{self.folder()}failed", json.dumps([error, opening])))
        if opening:
            _Counts.openings = max(_Counts.openings, opening)
            _Counts.stages[self._members] = self._count - 1
        return error

    def nothing(self, what: str, why: str) -> str:
        return f"{what}, {self.consequence}{why and ': ' + why}"

    def folder(self, before: int = 0) -> str:
        """Folder in the store for this stage, or for an earlier one: `before` stages ago."""
        group = f"{zlib.crc32(repr(self._members).encode()):08x}"
        return f"lazymodel/stages/{group}/{self._count + self._openings - before}/"

    def _failure(self, store: Store, watched: Iterable[int]) -> tuple[str, int]:
        """The error of the stage, or one that another process causes; and the number of its opening or 0.

        The error is empty if there is none. Of `watched` processes, heartbeats count, by this process's own clock;
        processes other than the first look at that of the first only.
        """
        if (text := store.get(f"{self.folder()}failed")) is not None:
            error, opening = json.loads(text)
            return error, opening
        for key, text in sorted(store.folder(_TROUBLE).items()):
            process, _, what = key.partition("/")
            if int(process) in self._members and int(process) != store.process:
                if what == str(self._openings + 1):  # the first failure that this process has not seen
                    return self.nothing(f"process {process} failed", text), int(what)
                if what == "left":
                    return self.nothing(f"process {process} has ended", text), 0
        leader = self._members[0]
        signs = store.folder(_ALIVE) if self._leads else {str(leader): store.get(f"{_ALIVE}{leader}") or ""}
        now, silent = time.monotonic(), set[int]()
        for process, sign in ((process, signs.get(str(process), "")) for process in watched):
            seen, since = self._seen.get(process, ("", now))
            if sign != seen:
                self._seen[process] = (sign, now)
            elif sign and now - since > self._silence:
                silent.add(process)
        what = f"sent no heartbeat for {self._silence:g} seconds"
        return self._lost(silent, what, "killed, or its machine cannot be reached") if silent else "", 0

    def _lost(self, processes: set[int], what: str, why: str) -> str:
        who = f"process{'' if len(processes) == 1 else 'es'} {', '.join(map(str, sorted(processes)))}"
        return self.nothing(f"{who} {what}", why)

    def _difference(self, found: dict[str, str]) -> str:
        """The error if reports differ; else empty."""
        reports = {int(process): json.loads(text) for process, text in found.items() if text}
        first, own = min(reports, default=0), self._layouts
        for process, report in sorted(reports.items()):
            if report["layouts"] != own:
                return self._unequal(process, _differing(self.variables, own, report["layouts"]))
        for process, report in sorted(reports.items()):
            if report["checksum"] == reports[first]["checksum"]:
                continue
            both = (reports[first], report)
            texts = [each["outcome"] for each in both]
            files = zip(*(each["files"] for each in both), strict=False)
            if texts[0] == texts[1] and (other := next((pair for pair in files if pair[0][1] != pair[1][1]), None)):
                texts = [f"read {name} ({content})" for name, content in other]
            if texts[0] == texts[1]:
                texts = [f"{each['outcome']} (checksum {each['checksum']})" for each in both]
            would = f"process {first} would {texts[0]}, process {process} would {texts[1]}"
            return f"the processes' {self._given}: {would}. {self._hint}."
        done = [sum(each) % _PRIME for each in zip(*(report["shares"] for report in reports.values()), strict=True)]
        due = _sums((name, whole) for name, (_, whole) in self.shares.items())
        if reports and done != due:
            wrong = listed(map(repr, _differing(self.shares, done, due)))
            return (
                f"not every element of {wrong} has exactly one process that would write it, {self.consequence}: it is "
                "on devices of one process alone, or the mappings differ. Give all processes the same mapping, and "
                "save what only one of them has in that process, to a path of its own"
            )
        return ""

    def _unequal(self, other: int, ours: Sequence[str]) -> str:
        """The error if variables differ from those of another process; `ours` are among them."""
        own = cast(Store, self._store).process
        found = f"process {other} has some that process {own} has not"
        if ours:
            texts = [f"{path!r} as {layout_of(self.variables[path])[0]}" for path in ours]
            found = f"process {own} has {listed(texts, most=1)}, process {other} has not"
        return (
            f"the processes' variables differ in name, dtype, shape or sharding: {found}. Give all processes the same "
            "model, rules and mesh, with devices in the same order, which is that of jax.devices()"
        )


_GROUPS = 64  # of names, so that an error can say which differ: one process reads the reports of a thousand
_PRIME = (1 << 61) - 1


def _code(name: str) -> int:
    return zlib.crc32(name.encode(errors="backslashreplace"))


def _sums(numbers: Iterable[tuple[str, int]]) -> list[int]:
    """The sums of numbers by groups of their names, weighted by name."""
    sums = [0] * _GROUPS
    for name, number in numbers:
        code = _code(name)
        sums[code % _GROUPS] += (code | 1) * number
    return [each % _PRIME for each in sums]


def _differing(names: Iterable[str], one: Sequence[int], other: Sequence[int]) -> list[str]:
    """The names in groups whose sums differ."""
    return [name for name in names if one[(group := _code(name) % _GROUPS)] != other[group]]


def layout_of(array: Any) -> tuple[str, int]:
    """dtype, shape, and which device has which part of an array: for messages, and as a checksum.

    Of an array that is on devices of one process only, no device: each process may have its own.
    """
    return _layout(array.dtype, tuple(array.shape), array.sharding)


@functools.lru_cache(maxsize=4096)
def _layout(dtype: Any, shape: tuple[int, ...], sharding: Sharding | None) -> tuple[str, int]:
    text, devices = f"{dtype}{list(shape)}", list[Any]()
    if sharding is not None and len({device.process_index for device in sharding.device_set}) > 1:
        devices, how = sorted(device.id for device in sharding.device_set), str(sharding)
        if isinstance(sharding, NamedSharding):
            devices = [device.id for device in cast(Any, sharding.mesh.devices).flat]
            how = f"{sharding.spec} of {dict(sharding.mesh.shape)} in memory {sharding.memory_kind!r}"
        text += f" {how} on devices {listed(map(str, devices))}"
    return text, zlib.crc32(f"{text} {devices}".encode())


def _pause(waited: float) -> None:
    """Sleeps between two polls, longer the longer the wait has been so far."""
    time.sleep(min(max(waited / 8, 0.001), 0.5))


@contextlib.contextmanager
def agreement(
    variables: Mapping[str, Any],
    *,
    done: str = "materialized",
    given: str = "checkpoints, keys or seeds differ",
    hint: str = "Give all processes the same files and the same key or seed (of Keras: keras.utils.set_random_seed)",
) -> Generator[CollectiveScope]:
    """Runs its body as a stage. At its end, all processes that hold devices of these variables wait for each other.

    If the body fails in a process, that process raises its error at once. All others raise a `CheckpointError` that
    names the process and quotes its message, at the latest at the end of their own stage. They also raise if a process
    has other variables, gets another outcome, ends, is killed or does not arrive in time. If all devices belong to this
    process, nothing is exchanged, so one process may still load a model of its own.

    A process waits for `LAZYMODEL_WAIT_SECONDS` (1800), but at most a minute after the last heartbeat of a process that
    was active, for example because it was killed.

    Args:
        variables: Path → what has a dtype, a shape and a sharding, or None as one: on a device of this process.
        done: What the stage does, for the message that it was not done here either.
        given: What differing outcomes mean, in a message that begins with "the processes'".
        hint: How to fix that.
    """
    members = _sharing_processes(each.sharding for each in variables.values())
    if not members:
        yield CollectiveScope()
        return
    store = run_store()
    if store is None:
        raise LazyModelError(
            f"processes {members} share the model's devices but cannot report failures to each other; call "
            "jax.distributed.initialize() in each of them before anything else"
        )
    stage = CollectiveScope(variables=variables, _store=store, _members=members, _given=given, _hint=hint)
    stage.consequence = f"so nothing was {done} here either"
    _heartbeat.start(store)
    try:
        try:
            _within.stage = True
            try:
                yield stage
            finally:
                _within.stage = False
            stage.come("end", reports=True)
        except BaseException as error:  # also KeyboardInterrupt: nothing here waits for others
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the body's error has more information
                stage.fail(stage.nothing(f"process {store.process} failed", _excerpt(error)))
            raise
        if store.process == members[0]:  # all processes have reached this stage, so nothing reads the last verdict
            store.delete(stage.folder(1))
    finally:
        _heartbeat.stop()


@contextlib.contextmanager
def opening() -> Generator[None]:
    """Runs the opening of a checkpoint: if it fails, the processes that wait for this one are notified."""
    store = run_store()
    if store is None or getattr(_within, "stage", False):  # a failure within a stage is published at its end
        yield
        return
    _heartbeat.start(store)  # from here on the others may be waiting
    try:
        yield
    except Exception as error:
        _Counts.openings += 1
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store.put(f"{_TROUBLE}{store.process}/{_Counts.openings}", _excerpt(error))
        raise


class _Heartbeat:
    """Shows the others that this process is active, from a thread: from an opening until the end of a stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[threading.Thread, threading.Event] | None = None

    def start(self, store: Store) -> None:
        interval = min(wait_seconds(), SILENCE) / _BEATS
        with self._lock:
            if self._running is None:
                stop = threading.Event()
                arguments = (store, stop, interval)
                thread = threading.Thread(target=self._show, args=arguments, name="lazymodel-alive", daemon=True)
                self._running = thread, stop
                # The first heartbeat is sent here: a process may be killed before its thread runs.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    store.put(f"{_ALIVE}{store.process}", repr(time.monotonic()))
                thread.start()

    def stop(self) -> None:
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running[1].set()
            running[0].join()  # if an interpreter ends while a thread is in a JAX call, the process aborts

    def _show(self, store: Store, stop: threading.Event, interval: float) -> None:
        key = f"{_ALIVE}{store.process}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service ended, and with it all that read this
            while not stop.wait(interval):
                store.put(key, repr(time.monotonic()))
            store.put(key, "")


_heartbeat = _Heartbeat()


def _sharing_processes(shardings: Iterable[Sharding | None]) -> tuple[int, ...]:
    """The processes that hold devices of the shardings; empty if this one does not, or is the only one."""
    if jax.process_count() == 1:
        return ()
    # Many variables share few meshes, and the device set of a large pod is large.
    holders = {s.mesh if isinstance(s, NamedSharding) else s for s in shardings if s is not None}
    devices: set[Any] = set()
    for holder in holders:
        devices.update(cast(Any, holder.devices).flat if isinstance(holder, Mesh) else cast(Any, holder).device_set)
    processes = {device.process_index for device in devices}
    if jax.process_index() not in processes or len(processes) == 1:
        return ()
    return tuple(sorted(processes))


def _excerpt(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_MAX_TEXT]


_PID = os.getpid()


def _leave() -> None:
    """At exit: notifies the processes that would wait for this one, with the error that ends it, if any."""
    if os.getpid() != _PID:  # a forked child
        return
    _heartbeat.stop()
    if (store := run_store()) is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    why = f"{type(error).__name__}: {_excerpt(error)}" if isinstance(error, BaseException) else ""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # must not keep a program from ending
        store.put(f"{_TROUBLE}{store.process}/left", why)


atexit.register(_leave)  # registered last, so called first: before JAX's own, as lazymodel imports JAX earlier
