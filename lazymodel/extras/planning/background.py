"""Compiling while weights are read.

`Compiling` holds the threads that compile, reports failures at once, and raises if programs cannot run on the existing
devices, if possible before compiling. Devices that do not report their memory (CPUs) never raise. A compilation cannot
be stopped: if something else has failed, nobody waits for it, but the process only ends after it, since the end of
Python would abort a thread that returns from XLA.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import AnyModel, LoweredFunction, ModelSpec
from lazymodel._abstract.variable import Placement, resident_nbytes
from lazymodel._devices.hardware import compile_lowered, device_memory
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._materialize.background import Background, CompiledProgram
from lazymodel._show.progress import Timeline
from lazymodel._show.text import format_bytes
from lazymodel.extras.planning.compile import FORWARD, INIT, Compile, call_options, lower
from lazymodel.extras.planning.compiled import memory_of

# XLA compiles one program mostly on one thread; init programs and reading need threads as well.
_THREADS = 2
_CONFIG: Any = jax.config  # its attributes are made at run time
_BETWEEN_CHECKS = 0.1  # seconds between checks that waiting still makes sense
_HELD_FROM = 0.2  # share of the bytes that may be read before it is known that programs fit
_HINT = "Use more devices, shard more, donate what is replaced, or a smaller batch, sequence or dtype."


class Compiling(Background):
    """Programs that are compiled in threads.

    Raises:
        DoesNotFitError: A program cannot run with the model on the devices, whatever the compiler does.
        Exception: Any exception from tracing and lowering.
    """

    def __init__(
        self, model: ModelSpec, compiles: Sequence[Compile], shardings: Mapping[str, Sharding], timeline: Timeline
    ):
        self._timeline, self._programs = timeline, list[LoweredFunction]()
        self._futures: list[Future[CompiledProgram]] = []
        self._cached: set[int] = set()  # the threads whose program was in the persistent cache
        self._limit, self._tight = None, False
        with timeline.span("lower"):
            for compile in compiles:
                self._programs += lower(model, compile, shardings)
        placement = Placement(shardings)
        devices = [device for device in placement.devices if device.process_index == jax.process_index()]
        # Bytes of the smallest device of this process, if known.
        self._limit = min((size for size in map(device_memory, devices) if size is not None), default=None)
        if self._limit is not None:
            nbytes = placement.most_loaded({path: resident_nbytes(model[path]) for path in placement.group})[1]
            count = max(len(placement.devices), 1)
            may_not_fit = [self._may_not_fit(program, nbytes, count, self._limit) for program in self._programs]
            self._tight = any(may_not_fit)

    @staticmethod
    def _may_not_fit(program: LoweredFunction, model_nbytes: int, num_devices: int, limit: int) -> bool:
        """Returns True if the program may be too large, so that reading should wait for the compiler."""

        def total(infos: Any) -> int:
            return sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)

        donated = total(info for info in jax.tree.leaves(program.lowered.args_info) if info.donated)
        returned = total(jax.tree.leaves(program.lowered.out_info))
        # The compiler places results: every device gets at least an equal part of them.
        held = model_nbytes + max(returned - donated, 0) // num_devices
        if held > limit:
            raise DoesNotFitError(
                f"{program.description} cannot run beside this model: a device would hold "
                f"{format_bytes(model_nbytes)} of the model, and {format_bytes(held)} with no more than results, "
                f"and programs can use {format_bytes(limit)}. Nothing was read. {_HINT}",
                needed_nbytes=held,
                limit_nbytes=limit,
            )
        return 2 * held > limit

    @property
    def names(self) -> list[str]:
        return [program.description for program in self._programs]

    @property
    def details(self) -> Iterator[str]:
        return (str(jax.tree.leaves(program.lowered.in_avals)) for program in self._programs)

    @contextlib.contextmanager
    def in_background(self) -> Generator[None]:
        jax.monitoring.register_event_listener(self._listen)
        pool = ThreadPoolExecutor(_THREADS, "lazymodel-compile")
        self._futures = [pool.submit(self._compiled, program) for program in self._programs]
        pool.shutdown(wait=False)
        try:
            yield
        finally:
            for future in self._futures:
                future.cancel()
            with contextlib.suppress(AssertionError, ValueError):  # other code has cleared all listeners
                jax.monitoring.unregister_event_listener(self._listen)

    @property
    def unfinished(self) -> list[str]:
        return [name for name, future in zip(self.names, self._futures, strict=True) if not future.done()]

    def check(self) -> None:
        for future in self._futures:
            if future.done() and not future.cancelled():
                future.result()

    def hold(self, share: float, unless: Callable[[], bool]) -> None:
        if self._tight and share > _HELD_FROM:
            self._wait(unless)

    def finished(self, check: Callable[[], object]) -> tuple[CompiledProgram, ...]:
        start = time.perf_counter()
        self._wait(lambda: bool(check()))
        self.wait_seconds = time.perf_counter() - start
        return tuple(future.result() for future in self._futures)

    def _wait(self, unless: Callable[[], bool]) -> None:
        while wait(self._futures, _BETWEEN_CHECKS, FIRST_EXCEPTION).not_done:
            self.check()
            if unless():
                return
        self.check()

    def _compiled(self, program: LoweredFunction) -> CompiledProgram:
        start = time.perf_counter()
        self._cached.discard(threading.get_ident())
        with self._timeline.span("compile", program.description):
            compiled = compile_lowered(program.lowered, program.description)
            hit = threading.get_ident() in self._cached
            if program.besides is not None:
                program.besides(compiled)
        seconds = time.perf_counter() - start
        memory = None if compiled.memory_analysis() is None else memory_of(compiled, seconds)
        if self._limit is not None and memory is not None and memory.peak_nbytes > self._limit:
            raise DoesNotFitError(
                f"{program.description} needs {format_bytes(memory.peak_nbytes)} on a device, "
                f"{format_bytes(memory.temporary_nbytes)} of them temporaries, according to the compiler, and "
                f"programs can use {format_bytes(self._limit)}. {_HINT}",
                needed_nbytes=memory.peak_nbytes,
                limit_nbytes=self._limit,
            )
        cache = ("hit" if hit else "miss") if _CONFIG.jax_compilation_cache_dir is not None else ""
        return CompiledProgram(program.description, seconds, cache, memory)

    def _listen(self, event: str, **_: str | int) -> None:
        """Counts hits of JAX' cache, which reports them in the thread that compiles."""
        if event == "/jax/compilation_cache/cache_hits":
            self._cached.add(threading.get_ident())


def prepared(
    model: AnyModel, compile: Compile | Sequence[Compile], timeline: Timeline
) -> tuple[AnyModel, tuple[Compile, ...]]:
    """Returns the functions to compile in the background, and the model with the variables that its own functions would
    create on their first call, such as an optimizer's state. Raises LazyModelError for functions that are for plans.
    """
    compiles: Any = compile if isinstance(compile, list | tuple) else (compile,)
    for each in compiles:
        if not isinstance(each, Compile):
            raise LazyModelError(f"expected compile=lazymodel.Compile(step, batch) or a list of them, got {each!r}")
        if not each.is_step and (each.function is not None or each.what in (INIT, FORWARD)):
            raise LazyModelError(
                f"{each} is for a plan, which builds its own program from it. To compile alongside the stream, pass "
                "the jitted function that will be called with the model, Compile(step, batch), or a Keras model's own "
                "'predict', 'train' or 'generate'"
            )
        if each.is_step and not callable(getattr(each.function, "lower", None)):
            raise LazyModelError(
                f"{each.name} is not jitted: pass a jitted function, the same that will be called, as jax.jit, nnx.jit "
                "or equinox.filter_jit returned it"
            )
        if not each.is_step:
            with timeline.span("lower", "preparing"):
                model = model.framework.prepared(model, each.what, **call_options(each))
    return model, (*compiles,)
