"""Programs that are compiled while something else goes on, as reading weights does.

Responsible for the threads, for what they found, and for saying at once what fails. A compilation cannot be ended:
where something else has failed nobody waits for it, but the process ends after it, since Python's end would abort a
thread that comes back from XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import LoweredFunction
from lazymodel._abstract.spec import ModelSpec
from lazymodel._compile.compile import Compile
from lazymodel._compile.lower import lower
from lazymodel._compile.room import Room
from lazymodel._devices.compiler import CompiledMemory, compile_lowered, memory_of
from lazymodel._show.timeline import Timeline

# XLA compiles one program mostly on one thread, and init programs and reading want some as well.
_THREADS = 2
_CONFIG: Any = jax.config  # its attributes are made at run time
_BETWEEN_CHECKS = 0.1  # seconds between two looks at whether what is waited for makes sense still
_HELD_FROM = 0.2  # of the bytes to read: what may be read before it is known that programs fit


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled while weights were read.

    Attributes:
        description: What it computes.
        seconds: Wall-clock seconds that compiling it took, beside all else.
        cache: `"hit"` where JAX' persistent compilation cache had it, `"miss"` where it had not, `""` where there is no
            such cache.
        memory: What the compiler says that it takes on each device; None where it does not say.
    """

    description: str
    seconds: float
    cache: str
    memory: CompiledMemory | None


class Compiling:
    """Programs that are compiled in threads. `_changed` guards what these share.

    Attributes:
        names: What each program computes.
        details: What it computes it of: the same in all processes that do the same.
        wait_seconds: Those that `finished` waited.
    """

    wait_seconds = 0.0

    def __init__(self, programs: Sequence[LoweredFunction], room: Room | None, timeline: Timeline):
        self._programs, self._room, self._timeline = programs, room, timeline
        # Entered itself: a Ctrl-C within `Condition.__enter__`, which is Python's, would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._next = 0
        self._done: dict[int, CompiledProgram] = {}
        self._cached: set[int] = set()  # the threads whose program was in the persistent cache
        self._error: Exception | None = None
        self._stopped = False
        may_not_fit = [room is not None and room.check_before(program) for program in programs]
        self._tight = any(may_not_fit)  # all of them are asked: each may be refused

    @classmethod
    def of(
        cls, model: ModelSpec, compiles: Sequence[Compile], shardings: Mapping[str, Sharding], timeline: Timeline
    ) -> Compiling:
        """Traces and lowers what will be called with a model, and compiles nothing yet.

        Raises:
            DoesNotFitError: One cannot run beside the model, whatever the compiler does.
            Exception: Whatever lowering raises.
        """
        if not compiles:
            return cls((), None, timeline)
        with timeline.span("lower"):
            programs = [program for compile in compiles for program in lower(model, compile, shardings)]
        return cls(programs, Room(model, shardings), timeline)

    @property
    def names(self) -> list[str]:
        return [program.description for program in self._programs]

    @property
    def details(self) -> Iterator[str]:
        return (str(jax.tree.leaves(program.lowered.in_avals)) for program in self._programs)

    @contextlib.contextmanager
    def beside(self) -> Generator[None]:
        """Compiles while the body runs; where that fails, nothing that is not begun is compiled any more."""
        if not self._programs:
            yield
            return
        jax.monitoring.register_event_listener(self._listen)
        for index in range(min(_THREADS, len(self._programs))):
            threading.Thread(target=self._work, name=f"lazymodel-beside-{index}").start()
        try:
            yield
        finally:
            with self._lock:
                self._stopped = True
                self._changed.notify_all()
            with contextlib.suppress(AssertionError, ValueError):  # somebody has cleared all listeners
                jax.monitoring.unregister_event_listener(self._listen)

    @property
    def unfinished(self) -> list[str]:
        """What is not compiled yet."""
        return [name for index, name in enumerate(self.names) if index not in self._done]

    def check(self) -> None:
        """Raises what has failed so far."""
        if self._error is not None:
            raise self._error

    def hold(self, share: float, unless: Callable[[], bool]) -> None:
        """Waits, where a share of the bytes is read already and programs may not fit, until they are known to.

        Args:
            share: Of all bytes, from 0 to 1.
            unless: Whether waiting makes no sense any more; asked several times a second. What it raises is raised.
        """
        if self._tight and share > _HELD_FROM:
            self._wait(unless)

    def finished(self, check: Callable[[], None]) -> tuple[CompiledProgram, ...]:
        """All programs, compiled, in their order.

        Args:
            check: Called several times a second; what it raises is raised.
        """

        def unless() -> bool:
            check()
            return False

        start = time.perf_counter()
        self._wait(unless)
        self.wait_seconds = time.perf_counter() - start if self._programs else 0.0
        return tuple(self._done[index] for index in range(len(self._programs)))

    def _wait(self, unless: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                self.check()
                if self._stopped or len(self._done) == len(self._programs):
                    return
                self._changed.wait(_BETWEEN_CHECKS)
            if unless():
                return

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._stopped or self._error is not None or self._next == len(self._programs):
                    return
                index, self._next = self._next, self._next + 1
            try:
                found = self._compiled(self._programs[index])
            except Exception as error:
                with self._lock:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            with self._lock:
                self._done[index] = found
                self._changed.notify_all()

    def _compiled(self, program: LoweredFunction) -> CompiledProgram:
        start = time.perf_counter()
        self._cached.discard(threading.get_ident())
        with self._timeline.span("compile", program.description):
            compiled = compile_lowered(program.lowered, program.description)
            if program.besides is not None:
                program.besides(compiled)
        seconds = time.perf_counter() - start
        memory = None if compiled.memory_analysis() is None else memory_of(compiled, seconds)
        if self._room is not None and memory is not None:
            self._room.check_after(program.description, memory)
        hit = threading.get_ident() in self._cached
        cache = "hit" if hit else "miss" if _CONFIG.jax_compilation_cache_dir is not None else ""
        return CompiledProgram(program.description, seconds, cache, memory)

    def _listen(self, event: str, **_: str | int) -> None:
        """JAX tells of its cache in the thread that compiles."""
        if event == "/jax/compilation_cache/cache_hits":
            self._cached.add(threading.get_ident())
