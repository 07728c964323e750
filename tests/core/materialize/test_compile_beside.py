"""Compiling beside the stream: what is refused stops reading, and what fails does not wait for a compiler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._compile import room
from lazymodel._tensors.source import BYTES_READ

pytestmark = pytest.mark.timeout(60)

COUNT, EACH = 64, 256 << 10  # tensors, and bytes of each
TOTAL = COUNT * EACH
X = np.ones((EACH // 4 // 64, 64), "f")


@pytest.fixture(scope="module")
def abstract() -> lm.AbstractModel:
    return lm.build_abstract(lambda: {f"w{i:02}": jnp.zeros((64, EACH // 4 // 64)) for i in range(COUNT)})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file({f"w{i:02}": np.full((64, EACH // 4 // 64), i, "f") for i in range(COUNT)}, path)
    return path


class Slow:
    """A jitted function whose compilation waits to be released, and then fails or not."""

    __name__ = "slow"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> None: ...

    def lower(self, *args: Any) -> Any:
        self._lowered = jax.jit(lambda tree, x: x @ tree["w00"]).lower(*args)
        self.args_info, self.out_info = self._lowered.args_info, self._lowered.out_info
        return self

    def compile(self) -> Any:
        self.begun.set()
        assert self.release.wait(50)
        if self.error is not None:
            raise self.error
        return self._lowered.compile()


@pytest.fixture
def slow() -> Iterator[Callable[..., Slow]]:
    """Makes such functions, and lets them end."""
    made: list[Slow] = []

    def make(error: Exception | None = None) -> Slow:
        made.append(Slow(error))
        return made[-1]

    yield make
    for each in made:
        each.release.set()
    for thread in _threads():
        thread.join()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lazymodel-beside")]


def read_before(failing: Callable[[], Any], error: type[BaseException], message: str) -> int:
    """The bytes that were read of the file until something failed."""
    before = BYTES_READ.count
    with pytest.raises(error, match=message):
        failing()
    return BYTES_READ.count - before


def test_what_the_compiler_refuses_stops_the_stream(
    abstract: lm.AbstractModel, path: Path, slow: Callable[..., Slow]
) -> None:
    refusal = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm."
    step = slow(jax.errors.JaxRuntimeError(refusal))

    def told(done: int, total: int) -> None:
        if done > 0 and not step.release.is_set():
            step.release.set()
            for thread in _threads():
                thread.join()

    compile = lm.Compile(step, X)
    message = "slow needs 20.00 GiB on a device, says the compiler, and programs can use 15.75 GiB, 4.25 GiB too little"
    checkpoint = lm.open_checkpoint(path)
    read = read_before(
        lambda: abstract.materialize(checkpoint, compile=compile, progress=told), lm.DoesNotFitError, message
    )
    assert 0 < read < TOTAL / 4


def test_a_step_that_cannot_fit_is_refused_before_a_quarter_was_read(
    abstract: lm.AbstractModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "device_memory", lambda device: int(1.5 * TOTAL))

    def step(tree: Any, x: Any) -> Any:  # temporaries of 64 MiB
        return sum(jnp.sort(jnp.outer(w[:4].ravel(), w[:4].ravel()), axis=0).sum() for w in [tree["w00"], tree["w01"]])

    compile = lm.Compile(jax.jit(step), X)
    checkpoint = lm.open_checkpoint(path)
    message = r"step needs \d+\.\d+ MiB on a device, .* of them temporaries, .* programs can use 24\.00 MiB"
    assert (
        read_before(lambda: abstract.materialize(checkpoint, compile=compile), lm.DoesNotFitError, message) < TOTAL / 4
    )

    monkeypatch.setattr(room, "device_memory", lambda device: TOTAL + EACH)
    doubled = lm.Compile(jax.jit(lambda tree, x: jax.tree.map(lambda w: w + 1, tree)), X)
    message = (
        "<lambda> cannot run beside this model: .* 16.00 MiB of the model, and 32.00 MiB with no more than results"
    )
    assert read_before(lambda: abstract.materialize(checkpoint, compile=doubled), lm.DoesNotFitError, message) == 0
    in_place = lm.Compile(jax.jit(lambda tree, x: jax.tree.map(lambda w: w + 1, tree), donate_argnums=0), X)
    model = abstract.materialize(checkpoint, compile=in_place)
    np.testing.assert_array_equal(model["w07"], 7)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_what_fails_while_reading_is_held_does_not_wait_for_the_compiler(
    abstract: lm.AbstractModel, path: Path, slow: Callable[..., Slow], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(room, "device_memory", lambda device: int(1.5 * TOTAL))
    step, interrupted = slow(), list[int]()

    def told(done: int, total: int) -> None:
        if done > total / 5:
            if how == "failed":
                raise RuntimeError("no room on the screen")
            if not interrupted:
                interrupted.append(done)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    error, message = (KeyboardInterrupt, "^$") if how == "interrupted" else (RuntimeError, "no room on the screen")
    checkpoint, compile = lm.open_checkpoint(path), lm.Compile(step, X)
    read = read_before(lambda: abstract.materialize(checkpoint, compile=compile, progress=told), error, message)
    assert read < TOTAL / 2 and not step.release.is_set()
    # Python ends threads that come back from XLA at its own end by ending the process: it has to wait for them.
    assert all(not thread.daemon for thread in _threads())


def test_what_is_complete_waits_for_the_compiler(
    abstract: lm.AbstractModel, path: Path, slow: Callable[..., Slow]
) -> None:
    step = slow()

    def told(done: int, total: int) -> None:
        if done == total:
            step.release.set()

    reports: list[lm.LoadReport] = []
    abstract.materialize(lm.open_checkpoint(path), compile=lm.Compile(step, X), progress=told, report=reports.append)
    (report,) = reports
    assert report.compiled[0].description == "slow" and report.compiled[0].memory is not None
    assert report.compile_seconds > 0


def test_the_report_says_what_the_persistent_cache_had(abstract: lm.AbstractModel, tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    def compiled() -> str:
        reports: list[lm.LoadReport] = []
        step = jax.jit(lambda tree, x: x @ tree["w03"])
        abstract.materialize(compile=lm.Compile(step, X), report=reports.append)
        return reports[0].compiled[0].cache

    assert compiled() == ""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()  # JAX looks once whether there is one
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert [compiled(), compiled()] == ["miss", "hit"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
