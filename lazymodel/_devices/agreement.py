"""Agreement between processes: what fails in one of them fails in all.

Responsible for telling every process that shares a model's devices whether the others got through a stage, and to the
same result. Not responsible for what a stage does; what processes know of each other is in `_devices/coordination`.

Without it the process whose copy of a file is truncated raises, and the others go on to the next collective operation
of the user's program, where they wait for it.

Nothing is computed on devices for this: a collective operation before all processes are known to be there would wait
for as long as its backend likes (Gloo: 30 seconds), and could not say for whom. Every process reports to the store
instead; the first of them reads all reports and writes the verdict, which the others wait for. Whoever fails writes
the verdict at once. The first verdict holds.

Opening a checkpoint takes part: an opening that fails in one process, and not in all, is the failure of the stage that
the others come to next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._devices.coordination import (
    GIVEN_UP,
    SIGNS,
    TROUBLE,
    WAIT,
    Store,
    Watch,
    excerpt,
    keep_client,
    run_store,
    silence_seconds,
    troubles,
    wait_seconds,
)
from lazymodel._errors import CheckpointError, LazyModelError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two looks; it grows with the time waited so far
_BETWEEN_CHECKS = 1.0  # seconds
_FILES = 64  # of a stage's, at most, that an error can name
_TEXT = 1024  # characters of an outcome that are quoted: enough for a message with paths in it


@dataclasses.dataclass
class Stage:
    """What a process says about a stage that it got through."""

    outcome: str = ""  # what all processes must have come to; they compare all of it, an error quotes its beginning
    details: str = ""  # more that must be the same everywhere, and that nobody needs to read
    # What is read: names, which may differ, and what tells the content from any other, which must not.
    files: Sequence[tuple[str, str]] = ()
    _meeting: _Meeting | None = None
    _checked: float = dataclasses.field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raises the CheckpointError that waits at the end of the stage if there is one already.

        For work that takes long: the processes that have failed wait at their exit for the others, and not for ever.
        Asks the others at most once a second, so it may be called for every piece of the work, from any thread.
        """
        if self._meeting is not None and (now := time.monotonic()) - self._checked >= _BETWEEN_CHECKS:
            self._checked = now
            self._meeting.check()

    def meet(self) -> None:
        """Waits until all processes have come to this point of the stage; called equally often in all of them.

        What follows may be a collective operation, in which a process that comes alone would wait for ever: it raises a
        CheckpointError in all of them, or in none.
        """
        if self._meeting is not None:
            self._meeting.meet()

    def together(self, operation: Callable[[], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """The arrays that a collective operation returns, complete; all processes have met for it.

        One that was killed can leave the others in it for ever, or fail it; a CheckpointError says so either way, after
        a minute of its silence.
        """
        return jax.block_until_ready(operation()) if self._meeting is None else self._meeting.together(operation)


@contextlib.contextmanager
def agreement(
    shardings: Iterable[Sharding | None],
    *,
    done: str = "materialized",
    given: str = "checkpoints, keys or seeds differ",
    mend: str = "Give all processes the same files and the same key or seed (of Keras: keras.utils.set_random_seed)",
) -> Generator[Stage]:
    """Runs its body as a stage at whose end all processes that hold devices of these shardings wait for each other.

    A process in which the body fails raises that error, at once; all others raise a `CheckpointError` that names the
    process and quotes its message, at the latest when they come to the end of their own, as they do where a process
    comes to another outcome, ends, is killed or does not come in time. Nothing is exchanged where all devices belong to
    this process, so one process may still load a model of its own.

    A process waits for `LAZYMODEL_WAIT_SECONDS` (1800), and for one that was at work and then gave no sign of life, as
    one that was killed, no longer than a minute.

    Args:
        shardings: Those of the model; None is a variable on a device of this process.
        done: What the stage does, for the message that it was not done here either.
        given: What it means that outcomes differ, for a message that begins with "the processes'".
        mend: What to do about that.
    """
    members = _sharing_processes(shardings)
    if not members:
        yield Stage()
        return
    store = run_store()
    if store is None:
        raise LazyModelError(
            f"processes {members} share the model's devices and have no way to tell each other what fails; call "
            "jax.distributed.initialize() in each of them before anything else"
        )
    meeting = _Meeting(store, members, done, given, mend)
    stage = Stage(_meeting=meeting)
    SIGNS.start(store)
    try:
        try:
            _within.stage = True
            try:
                yield stage
            finally:
                _within.stage = False
            meeting.report(stage)
            verdict = meeting.wait()
        except BaseException as error:  # KeyboardInterrupt as well: nothing here waits for others
            try:
                meeting.fail(error)
            except Exception as unreachable:  # the body's error says more
                error.add_note(f"The other processes could not be told: {unreachable}")
            raise
        meeting.close(verdict)
    finally:
        SIGNS.stop()


@contextlib.contextmanager
def opening() -> Generator[None]:
    """Runs the opening of a checkpoint: where it fails, the processes that wait for this one get to know."""
    store = run_store()
    if store is None or getattr(_within, "stage", False):  # what fails in a stage is said at its end
        yield
        return
    SIGNS.start(store)  # from here on the others may be waiting
    try:
        yield
    except Exception as error:
        try:
            store.put(f"{TROUBLE}{store.process}/{_count.failed_opening()}", excerpt(error))
        except Exception as unreachable:
            error.add_note(f"The other processes could not be told: {unreachable}")
        raise


def _sharing_processes(shardings: Iterable[Sharding | None]) -> tuple[int, ...]:
    """The processes that hold devices of the shardings; none if this one does not, or is the only one."""
    if jax.process_count() == 1:
        return ()
    # Few meshes serve many variables, and on a large pod a device set is not small.
    holders = {s.mesh if isinstance(s, NamedSharding) else s for s in shardings if s is not None}
    devices: set[Any] = set()
    for holder in holders:
        devices.update(cast(Any, holder.devices).flat if isinstance(holder, Mesh) else cast(Any, holder).device_set)
    processes = {device.process_index for device in devices}
    if jax.process_index() not in processes or len(processes) == 1:
        return ()
    return tuple(sorted(processes))


# --- which stage this is ---------------------------------------------------------------------------------------------


class _Count:
    """Counts stages and failed openings, so that processes that do the same give the same stage the same number.

    An opening that fails counts as a stage, since the others take it for one; where it fails in all, it counts in all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[tuple[int, ...], int] = {}
        self.openings = 0

    def stage(self, members: tuple[int, ...]) -> int:
        with self._lock:
            self._stages[members] = self._stages.get(members, 0) + 1
            return self._stages[members] + self.openings

    def failed_opening(self) -> int:
        with self._lock:
            self.openings += 1
            return self.openings

    def was_failed_opening(self, members: tuple[int, ...], openings: int) -> None:
        """What this process took for a stage of theirs was the failed opening of another process."""
        with self._lock:
            self._stages[members] -= 1
            self.openings = max(self.openings, openings)


_count = _Count()


_within = threading.local()  # `stage`: whether this thread is in one


# --- the end of a stage ----------------------------------------------------------------------------------------------


class _Verdict(NamedTuple):
    """What is true of a stage for all processes; a list in JSON."""

    error: str = ""  # what went wrong, or nothing
    opening: int = 0  # which failed opening it was, or 0
    lost: tuple[int, ...] = ()  # processes that nobody waits for any more

    @classmethod
    def read(cls, text: str) -> _Verdict:
        error, opening, lost = json.loads(text)
        return cls(error, opening, tuple(lost))


class _Meeting:
    """The end of one stage, as one process sees it."""

    def __init__(self, store: Store, members: tuple[int, ...], done: str, given: str, mend: str) -> None:
        self._store, self._members = store, members
        self._done, self._given, self._mend = done, given, mend
        self._limit, self._silence = wait_seconds(), silence_seconds()
        self._openings = _count.openings
        self._number = _count.stage(members)
        self._watch = Watch()
        self._points = 0  # of the stage that this process has come to
        self._leads = store.process == members[0]

    def report(self, stage: Stage) -> None:
        """Says that this process got through."""
        whole = "\0".join((stage.outcome, stage.details, *(content for _, content in stage.files)))
        checksum = f"{zlib.crc32(whole.encode(errors='backslashreplace')):08x}"
        report = {"outcome": stage.outcome[:_TEXT], "checksum": checksum, "files": stage.files[:_FILES]}
        self._store.put(f"{self._folder()}reports/{self._store.process}", json.dumps(report))

    def fail(self, error: BaseException) -> None:
        """Says that this process did not."""
        said = self._nothing(f"process {self._store.process} failed", excerpt(error))
        self._heed(self._settle(_Verdict(said)))

    def check(self) -> None:
        """Raises CheckpointError if the stage has failed elsewhere."""
        verdict = self._said()
        if verdict is not None and verdict.error:
            self._heed(verdict := self._settle(verdict))
            raise CheckpointError(verdict.error)

    def _said(self) -> _Verdict | None:
        """The verdict if there is one, or what it will be for trouble that a process has."""
        text = self._store.get(f"{self._folder()}verdict")
        return self._trouble() if text is None else _Verdict.read(text)

    def meet(self) -> None:
        """Goes on once all are here; where the stage has failed, or some will not come, raises in all."""
        self._points += 1
        point = f"{self._folder()}points/{self._points}/"
        self._store.put(f"{point}reports/{self._store.process}", "")
        start = time.monotonic()
        while (said := self._store.get(f"{point}said")) is None:
            waited = time.monotonic() - start
            verdict = self._said() or self._look(waited, f"{point}reports/")
            if verdict is None:
                time.sleep(min(max(waited / 8, _FIRST_PAUSE), _LONGEST_PAUSE))
                continue
            if verdict.error:
                self._settle(verdict)
            # One word for all, whichever of them looked first: those that went on would wait for those that did not.
            said = self._store.put_first(f"{point}said", "stop" if verdict.error else "go")
            break
        if said == "stop":
            raise CheckpointError(self.wait().error)

    def together(self, operation: Callable[[], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """Runs a collective operation for as long as nobody falls silent."""
        try:
            arrays = operation()
            started = time.monotonic()
            while not all(cast(Any, array).is_ready() for array in arrays):
                waited = time.monotonic() - started
                if waited > _BETWEEN_CHECKS:
                    self._check_silence()
                time.sleep(min(waited / 8, _LONGEST_PAUSE))
            return jax.block_until_ready(arrays)
        except CheckpointError:
            keep_client()
            raise
        except jax.errors.JaxRuntimeError:
            # Somebody's end may be the cause. Without knowing whose, this process would wait for it at JAX's farewell.
            failed = time.monotonic()
            while time.monotonic() - failed < self._silence * 1.25:
                self._check_silence()
                time.sleep(min(_LONGEST_PAUSE, self._silence / 4))
            raise

    def _check_silence(self) -> None:
        """Raises if the stage has failed elsewhere, or somebody is silent."""
        self.check()
        if self._leads and (silent := self._watch.silent(self._store, set(self._members), self._silence)):
            self._settle(self._lost_by_silence(silent))
            self.check()

    def wait(self) -> _Verdict:
        """The verdict, as soon as there is one."""
        start = time.monotonic()
        while (text := self._store.get(f"{self._folder()}verdict")) is None:
            waited = time.monotonic() - start
            if (verdict := self._trouble() or self._look(waited, f"{self._folder()}reports/")) is not None:
                return self._settle(verdict)
            time.sleep(min(max(waited / 8, _FIRST_PAUSE), _LONGEST_PAUSE))
        return _Verdict.read(text)

    def close(self, verdict: _Verdict) -> None:
        """Does as the verdict says: raises CheckpointError where something went wrong."""
        self._heed(verdict)
        if verdict.error:
            raise CheckpointError(verdict.error)
        GIVEN_UP.difference_update(self._members)
        if self._leads:  # all have come to this stage, so nobody needs what was said at the end of the last one
            self._store.delete(self._folder(self._number - 1))

    def _heed(self, verdict: _Verdict) -> None:
        """Notes what the verdict says of processes and openings; all processes do, however they come to it."""
        GIVEN_UP.update(set(verdict.lost) - {self._store.process})
        if verdict.opening:
            _count.was_failed_opening(self._members, verdict.opening)

    def _folder(self, number: int | None = None) -> str:
        group = f"{zlib.crc32(repr(self._members).encode()):08x}"
        return f"lazymodel/stages/{group}/{self._number if number is None else number}/"

    def _settle(self, verdict: _Verdict) -> _Verdict:
        """The first verdict of any process, which may be another one."""
        return _Verdict.read(self._store.put_first(f"{self._folder()}verdict", json.dumps(verdict)))

    def _trouble(self) -> _Verdict | None:
        for process, trouble in troubles(self._store, self._openings).items():
            if process in self._members:
                return _Verdict(self._nothing(f"process {process} {trouble.what}", trouble.why), trouble.opening)
        return None

    def _look(self, waited: float, folder: str) -> _Verdict | None:
        """A verdict if all are here, whose reports are in a folder of the store, or some will not come."""
        # Only the first process looks at all others, which look at the first: were it otherwise, thousands of processes
        # would read thousands of reports each.
        missing = set(self._members[:1])
        if self._leads or waited > self._limit:
            reports = self._store.folder(folder)
            missing = set(self._members) - set(map(int, reports))
            if not missing:
                told = {int(process): json.loads(text) for process, text in reports.items() if text}
                return self._compare(told) if told else _Verdict()
        if waited > self._limit:
            return self._lost(
                missing,
                f"did not come within {self._limit:g} seconds",
                f"killed before, hanging, or at something else ({WAIT} sets how long to wait)",
            )
        if silent := self._watch.silent(self._store, missing, self._silence):
            return self._lost_by_silence(silent)
        return None

    def _lost_by_silence(self, silent: set[int]) -> _Verdict:
        what = f"gave no sign of life for {self._silence:g} seconds"
        return self._lost(silent, what, "killed, or its machine is out of reach")

    def _lost(self, processes: set[int], what: str, why: str) -> _Verdict:
        lost = tuple(sorted(processes))
        who = f"process{'' if len(lost) == 1 else 'es'} {', '.join(map(str, lost))}"
        return _Verdict(self._nothing(f"{who} {what}", why), lost=lost)

    def _nothing(self, what: str, why: str) -> str:
        return f"{what}, so nothing was {self._done} here either{why and ': ' + why}"

    def _compare(self, reports: dict[int, dict[str, Any]]) -> _Verdict:
        first = min(reports)
        for process, report in sorted(reports.items()):
            if report["checksum"] != reports[first]["checksum"]:
                said = [reports[first]["outcome"], report["outcome"]]
                files = zip(reports[first]["files"], report["files"], strict=False)
                if said[0] == said[1] and (other := next((pair for pair in files if pair[0][1] != pair[1][1]), None)):
                    said = [f"read {name} ({content})" for name, content in other]
                if said[0] == said[1]:
                    said = [f"{each['outcome']} (checksum {each['checksum']})" for each in (reports[first], report)]
                return _Verdict(
                    f"the processes' {self._given}: process {first} would {said[0]}, "
                    f"process {process} would {said[1]}. {self._mend}."
                )
        return _Verdict()
