"""Functions that will be called with a model: the object `Compile`, lowering, and compiling while weights are read.

A function is lowered like its later call, so that this call finds the compiled program: with the future shardings,
layouts and weak types of arrays, in the thread and the context (mesh, default precision) of the caller.

`Compiling` holds the threads that compile, reports failures at once, and raises if programs cannot run on the existing
devices, if possible before compiling. Devices that do not report their memory (CPUs) never raise. A compilation cannot
be stopped: if something else has failed, nobody waits for it, but the process only ends after it, since the end of
Python would abort a thread that returns from XLA.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, Self, cast

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import AnyModel, LoweredFunction, ModelSpec
from lazymodel._abstract.variable import Placement, resident_nbytes, stays_on_host
from lazymodel._devices.hardware import CompiledMemory, compile_lowered, device_memory, memory_of
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._show.progress import Timeline
from lazymodel._show.text import format_bytes

INIT, FORWARD, PREDICT, TRAIN, GENERATE = "init", "forward", "predict", "train", "generate"
_OWN = (PREDICT, TRAIN, GENERATE)  # a model's own functions, whose arguments are given as examples or sizes
_NAMED = (INIT, FORWARD, *_OWN)


class Compile:
    """A function that will be called: `materialize` compiles it while weights are read, a plan shows its memory.

    `Compile(step, *inputs, **keywords)` is a jitted function that will be called as `step(model, *inputs, **keywords)`,
    where `model` is the result of `materialize`. It is traced and lowered before any data is read, and compiled
    alongside the stream; its first call then compiles nothing. `Compile(step, …).of(split)` is one that will be called
    as `step(*split(model), *inputs, **keywords)`.

    `Compile("predict")`, `"train"` and `"generate"` are the programs of `predict`, `fit` and `generate` of a Keras or
    KerasHub model. Their arguments are described by `batch` and `sequence`, or by an example, in the form of the
    model's own methods: `Compile("train", x, y)`, `Compile("generate", ["Once upon"], sequence=64)`.

    The following are for plans only, which need no devices (`lazymodel.topology`) and jit by themselves:
    `Compile("init")`, the init programs; and `Compile("forward", function, *inputs)` or
    `Compile("train", function, *inputs)`, where `function(tree, *inputs)` returns the outputs, or the loss. The loss
    becomes a training step with the model's own optimizer, that of `WhatIf`, or without both plain gradient descent.

    Args:
        what: A jitted function (of `jax.jit`, `nnx.jit`, `equinox.filter_jit`: any object with a method `lower`), or
            one of the names.
        *inputs: The further arguments of the call: arrays, or `jax.ShapeDtypeStruct`s. An input that will be committed
            to devices (by `jax.device_put` to a sharding, or as another function's result) must be so now, as an array
            or by the struct's sharding; NumPy arrays, and results of `jnp.asarray` or `jax.random.key`, are not.
        **options: Keywords of the call, also static ones. For a name without a function
            `batch` and `sequence`: the sizes of the arguments of the model's own functions. In a plan None is
            one for each part of the mesh's data axes, and 1024 or the most that the model takes.

    Attributes:
        what: The name; `"step"` for a jitted function.
        function: The function; None for the model's own.
        inputs: A tuple of pytrees.
        keywords: The keywords of a jitted function.
        batch: Batch size for the model's own functions, or None.
        sequence: Their sequence length, or None.
        split: Returns the arguments of a step from the model, as a tuple; None is the model itself.

    Raises:
        LazyModelError: An argument is invalid, or does not fit the others.

    Example:
        >>> step = jax.jit(lambda tree, x: x @ tree["up"]["kernel"] @ tree["down"]["kernel"])
        >>> batch = np.ones((8, 64), "float32")
        >>> sharded.plan(compile=lm.Compile(step, batch)).parts["activations"] > 0
        True
        >>> model = sharded.materialize(compile=lm.Compile(step, batch))  # `step(model, batch)` compiles nothing now
        >>> forward = lm.Compile("forward", lambda tree, x: x @ tree["up"]["kernel"], batch)
        >>> list(sharded.plan(compile=forward).parts)
        ['parameters', 'activations']
    """

    def __init__(self, what: str | Callable[..., Any], /, *inputs: Any, **options: Any) -> None:
        if not (what in _NAMED if isinstance(what, str) else callable(what)):
            raise LazyModelError(f"expected a jitted function or one of {', '.join(map(repr, _NAMED))}, got {what!r}")
        self.what, self.inputs = "step", inputs
        self.function: Callable[..., Any] | None = None if isinstance(what, str) else what
        self.keywords: Mapping[str, Any] = MappingProxyType({} if isinstance(what, str) else options)
        self.batch: int | None = None
        self.sequence: int | None = None
        self.split: Callable[[Any], tuple[Any, ...]] | None = None
        if isinstance(what, str):
            own = what in _OWN and not (inputs and callable(inputs[0]))
            self.what = what
            if inputs and not own:
                self.function, self.inputs = inputs[0], inputs[1:]
            self.batch, self.sequence = options.pop("batch", None), options.pop("sequence", None)
            self._check(own, options)

    def of(self, split: Callable[[Any], tuple[Any, ...]]) -> Self:
        """The same for a function that takes parts of the model: `step(*split(model), *inputs, **keywords)`.

        Args:
            split: Takes the result of `materialize`, with `jax.ShapeDtypeStruct`s in place of arrays, and returns a
                tuple of pytrees: `nnx.split`, `lambda model: (model["params"],)`, or `lambda both: both` for a model
                and an optimizer's state.

        Raises:
            LazyModelError: It is not a function, or the compiled function is not called with the model.

        Example:
            >>> step = jax.jit(lambda kernel, x: x @ kernel)
            >>> x = np.ones((8, 64), "float32")
            >>> of_kernel = lm.Compile(step, x).of(lambda model: (model["up"]["kernel"],))
            >>> model = sharded.materialize(compile=of_kernel)  # `step(model["up"]["kernel"], x)` compiles nothing now
        """
        if not self.is_step or not callable(split):
            raise LazyModelError(
                f"of() takes a function of the model that returns a tuple, for a jitted function; got {split!r} for "
                f"{self.what!r}"
            )
        other = copy.copy(self)
        other.split = split
        return other

    @property
    def is_use(self) -> bool:
        """Returns True if it is the model in use, and not an init program."""
        return self.what != INIT

    @property
    def is_called(self) -> bool:
        """Returns True if a call of a function runs it; False if a plan builds it from a forward pass or a loss."""
        return self.is_step or (self.function is None and self.what in (PREDICT, GENERATE))

    @property
    def is_step(self) -> bool:
        """Returns True if it is a function that is called with the model."""
        return self.what == "step"

    @property
    def name(self) -> str:
        """Its name, as text."""
        if self.function is None:
            return self.what
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def __repr__(self) -> str:
        def text(given: Any) -> str:  # without values
            leaves, tree = jax.tree.flatten(given)
            return repr(tree.unflatten(jax.typeof(leaf) if hasattr(leaf, "dtype") else leaf for leaf in leaves))

        given = [self.name if self.is_step else repr(self.what), *map(text, self.inputs)]
        given += [f"{name}={text(value)}" for name, value in (*self.keywords.items(), *self._sizes.items())]
        return f"Compile({', '.join(given)})"

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"batch": self.batch, "sequence": self.sequence}
        return {name: size for name, size in sizes.items() if size is not None}

    def _check(self, own: bool, options: Mapping[str, Any]) -> None:
        function, sizes = self.function, self._sizes
        wrong = next((each for each in self.inputs if not (own or _is_input(each))), None)
        wrong_sizes = [size for size in sizes.values() if type(size) is not int or size < 1]
        rules = (
            (options, f"a keyword of {self.what!r} is batch or sequence; got {', '.join(options)}"),
            (
                wrong is not None,
                "inputs are what the function takes after the model, one by one: pytrees of arrays or "
                f"jax.ShapeDtypeStruct(shape, dtype); got {wrong!r}",
            ),
            (
                self.what == INIT and (function is not None or sizes),
                f"'init' takes neither a function nor sizes; got {function} and {sizes}",
            ),
            (wrong_sizes, f"batch and sequence are positive numbers; got {sizes}"),
            (
                function is not None and not callable(function),
                f"a function is called with the model, then the inputs; got {function!r}",
            ),
            (
                function is not None and self.what in (PREDICT, GENERATE),
                f"{self.what!r} is the model's own; pass a jitted function without a name",
            ),
            (
                function is not None and sizes,
                "batch and sequence are for a model's own functions; give inputs of that shape",
            ),
            (
                self.inputs and self.batch is not None,
                f"the batch size of {self.what!r} is that of the inputs; leave batch out",
            ),
        )
        for is_wrong, message in rules:
            if is_wrong:
                raise LazyModelError(message)


def _is_input(given: Any) -> bool:
    """Returns True for a pytree of arrays, structs and numbers that is not a shape."""
    leaves: list[Any] = jax.tree.leaves(given)
    shape = isinstance(given, list | tuple) and given and all(type(size) is int for size in cast("list[Any]", given))
    return not shape and all(hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves)


def prepared(
    model: AnyModel, compile: Compile | Sequence[Compile] | None, timeline: Timeline
) -> tuple[AnyModel, tuple[Compile, ...]]:
    """Returns the functions to compile in the background, and the model with the variables that its own functions would
    create on their first call, such as an optimizer's state. Raises LazyModelError for functions that are for plans.
    """
    compiles: Any = () if compile is None else compile if isinstance(compile, list | tuple) else (compile,)
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
                model = model.framework.prepared(model, each.what, **_call_options(each))
    return model, (*compiles,)


def lower(model: ModelSpec, compile: Compile, shardings: Mapping[str, Sharding]) -> Sequence[LoweredFunction]:
    """The programs that a call will run, traced and lowered; nothing is compiled.

    A function that is not jitted is jitted here, for a plan.

    Raises:
        LazyModelError: The model has no such function of its own, or cannot be outlined.
        Exception: Any exception from tracing the function, with a note on its origin.
    """
    structs: dict[str, jax.ShapeDtypeStruct] = {}  # of the finished arrays
    for path, variable in model.items():
        struct = variable.struct
        if stays_on_host(variable):
            struct = struct.update(sharding=None)
        elif variable.sharding is None and variable.layout is None:
            struct = struct.update(sharding=shardings[path])
        structs[path] = struct
    if not compile.is_step:
        return model.framework.lowered(compile.what, structs, **_call_options(compile))
    function: Any = compile.function
    if not callable(getattr(function, "lower", None)):
        function = jax.jit(function)

    def outline(leaf: Any) -> Any:
        return model.framework.outline(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    given = compile.inputs, dict(compile.keywords)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)):
        given = jax.tree.map(outline, given)
    with model.framework.outlined(structs) as whole:
        try:
            parts: Any = (whole,) if compile.split is None else compile.split(whole)
            if not isinstance(parts, list | tuple):
                raise LazyModelError(f"of() takes a function that returns a tuple; it returned {type(parts).__name__}")
            args = (*parts, *given[0])
            lowered = function.lower(*args, **given[1])
        except LazyModelError:
            raise
        except Exception as error:
            error.add_note(
                f"lazymodel: {compile.name} was called with {model.name} as it will be, to compile it beforehand "
                "(compile=); no weights were read. Its first call would fail like this."
            )
            raise
    # Results of Flax and Equinox are wrappers of JAX' own.
    return [LoweredFunction(compile.name, getattr(lowered, "lowered", lowered))]


def _call_options(compile: Compile) -> dict[str, Any]:
    """Keywords that describe the call of a model's own function."""
    return {"inputs": compile.inputs, "batch": compile.batch, "sequence": compile.sequence}


# XLA compiles one program mostly on one thread; init programs and reading need threads as well.
_THREADS = 2
_CONFIG: Any = jax.config  # its attributes are made at run time
_BETWEEN_CHECKS = 0.1  # seconds between checks that waiting still makes sense
_HELD_FROM = 0.2  # share of the bytes that may be read before it is known that programs fit
_HINT = "Use more devices, shard more, donate what is replaced, or a smaller batch, sequence or dtype."


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled while weights were read.

    Attributes:
        description: What it computes.
        seconds: Wall-clock seconds that compiling took, while other work was running.
        cache: `"hit"` if JAX' persistent compilation cache had it, `"miss"` if not, `""` without such a
            cache.
        memory: The compiler's numbers for its memory on each device; None if there are none.
    """

    description: str
    seconds: float
    cache: str
    memory: CompiledMemory | None


class Compiling:
    """Programs that are compiled in threads.

    Attributes:
        details: The arguments of each program as text: the same in all processes that do the same.
        wait_seconds: Seconds that `finished` waited.

    Raises:
        DoesNotFitError: A program cannot run with the model on the devices, whatever the compiler does.
        Exception: Any exception from tracing and lowering.
    """

    wait_seconds = 0.0

    def __init__(
        self, model: ModelSpec, compiles: Sequence[Compile], shardings: Mapping[str, Sharding], timeline: Timeline
    ):
        self._timeline, self._programs = timeline, list[LoweredFunction]()
        self._futures: list[Future[CompiledProgram]] = []
        self._cached: set[int] = set()  # the threads whose program was in the persistent cache
        self._limit, self._tight = None, False
        if not compiles:
            return
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
        """Descriptions of the programs."""
        return [program.description for program in self._programs]

    @property
    def details(self) -> Iterator[str]:
        return (str(jax.tree.leaves(program.lowered.in_avals)) for program in self._programs)

    @contextlib.contextmanager
    def in_background(self) -> Generator[None]:
        """Compiles while the body runs; after a failure, compilations that have not started are cancelled."""
        if not self._programs:
            yield
            return
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
        """Descriptions of the programs that are not compiled yet."""
        return [name for name, future in zip(self.names, self._futures, strict=True) if not future.done()]

    def check(self) -> None:
        """Raises the errors of programs that have failed so far."""
        for future in self._futures:
            if future.done() and not future.cancelled():
                future.result()

    def hold(self, share: float, unless: Callable[[], bool]) -> None:
        """If a share of the bytes is read already and programs may not fit, waits until it is known that they do.

        Args:
            share: Share of all bytes, from 0 to 1.
            unless: Returns True if waiting does not make sense any more; called several times a second. Its exceptions
                are raised.
        """
        if self._tight and share > _HELD_FROM:
            self._wait(unless)

    def finished(self, check: Callable[[], object]) -> tuple[CompiledProgram, ...]:
        """All compiled programs, in their order.

        Args:
            check: Called several times a second; its exceptions are raised.
        """
        start = time.perf_counter()
        self._wait(lambda: bool(check()))
        self.wait_seconds = time.perf_counter() - start if self._programs else 0.0
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
