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

Model = lm.AbstractModel[Any]

pytestmark = pytest.mark.timeout(60)

COUNT, EACH = 64, 256 << 10  # tensors, and bytes of each
TOTAL = COUNT * EACH
X = np.ones((EACH // 4 // 64, 64), "f")


@pytest.fixture(scope="module")
def abstract() -> Model:
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
    return [thread for thread in threading.enumerate() if thread.name.startswith("lazymodel-compile")]


class Seen:
    """Progress that notes how many bytes were loaded, and does something at each call."""

    def __init__(self, act: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.nbytes, self.act = 0, act

    def __call__(self, done: int, total: int) -> None:
        self.nbytes = done
        self.act(done, total)


def test_what_the_compiler_refuses_stops_the_stream(abstract: Model, path: Path, slow: Callable[..., Slow]) -> None:
    refusal = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm."
    step = slow(jax.errors.JaxRuntimeError(refusal))

    def release(done: int, total: int) -> None:
        if done > 0 and not step.release.is_set():
            step.release.set()
            for thread in _threads():
                thread.join()

    seen = Seen(release)
    with pytest.raises(lm.DoesNotFitError, match=r"slow needs 20\.00 GiB .* can use 15\.75 GiB, 4\.25 GiB less"):
        abstract.materialize(lm.open_checkpoint(path), compile=lm.Compile(step, X), progress=seen)
    assert 0 < seen.nbytes < TOTAL / 4


def test_a_step_that_cannot_fit_is_refused_before_a_quarter_was_read(
    abstract: Model, path: Path, compilers_see: Callable[[int], None]
) -> None:
    def step(tree: Any, x: Any) -> Any:  # temporaries of 64 MiB
        return sum(jnp.sort(jnp.outer(w[:4].ravel(), w[:4].ravel()), axis=0).sum() for w in [tree["w00"], tree["w01"]])

    checkpoint, seen = lm.open_checkpoint(path), Seen()
    compilers_see(int(1.5 * TOTAL))
    with pytest.raises(lm.DoesNotFitError, match=r"step needs \d+\.\d+ MiB .* of them temporaries, .* 24\.00 MiB"):
        abstract.materialize(checkpoint, compile=lm.Compile(jax.jit(step), X), progress=seen)
    assert seen.nbytes < TOTAL / 4

    def add(tree: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w + 1, tree)

    compilers_see(TOTAL + EACH)
    path.rename(path.with_suffix(".away"))  # which reading would find
    with pytest.raises(lm.DoesNotFitError, match=r"add cannot run beside this model: .* 16\.00 MiB .* 32\.00 MiB"):
        abstract.materialize(checkpoint, compile=lm.Compile(jax.jit(add), X))
    path.with_suffix(".away").rename(path)
    model = abstract.materialize(checkpoint, compile=lm.Compile(jax.jit(add, donate_argnums=0), X))
    np.testing.assert_array_equal(model["w07"], 7)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_what_fails_while_reading_is_held_does_not_wait_for_the_compiler(
    abstract: Model, path: Path, slow: Callable[..., Slow], compilers_see: Callable[[int], None], how: str
) -> None:
    compilers_see(int(1.5 * TOTAL))
    step, interrupted = slow(), list[int]()

    def end(done: int, total: int) -> None:
        if done > total / 5:
            if how == "failed":
                raise RuntimeError("no room on the screen")
            if not interrupted:
                interrupted.append(done)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    error, message = (KeyboardInterrupt, "^$") if how == "interrupted" else (RuntimeError, "no room on the screen")
    seen = Seen(end)
    with pytest.raises(error, match=message):
        abstract.materialize(lm.open_checkpoint(path), compile=lm.Compile(step, X), progress=seen)
    assert seen.nbytes < TOTAL / 2 and not step.release.is_set()
    # Python ends threads that come back from XLA at its own end by ending the process: it has to wait for them.
    assert all(not thread.daemon for thread in _threads())


def test_what_is_complete_waits_for_the_compiler(abstract: Model, path: Path, slow: Callable[..., Slow]) -> None:
    step = slow()

    def told(done: int, total: int) -> None:
        if done == total:
            step.release.set()

    reports: list[lm.LoadReport] = []
    abstract.materialize(lm.open_checkpoint(path), compile=lm.Compile(step, X), progress=told, report=reports.append)
    (report,) = reports
    assert report.compiled[0].description == "slow" and report.compiled[0].memory is not None
    assert report.compile_seconds > 0


def test_the_report_says_what_the_persistent_cache_had(abstract: Model, tmp_path: Path) -> None:
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
