"""What `run` refuses, what goes wrong while it runs, and effects: one error, in time, and nothing left running."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import lazymodel as lm
from tests.extras.run.models import assert_equal, decoder, forward, rows, tokens
from tests.extras.run.test_run import ran

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
LAYERS = 3


@pytest.fixture(scope="module")
def abstract() -> Any:
    return lm.build_abstract(decoder(LAYERS), jax.random.key(0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, abstract: Any) -> Path:
    path = tmp_path_factory.mktemp("run") / "model.safetensors"
    lm.save(abstract, path)
    return path


@pytest.mark.parametrize(
    "function",
    [
        lambda model, tokens: float(model["norm"].sum()),
        lambda model, tokens: model["norm"] if model["norm"][0] > 0 else None,
        lambda model, tokens: np.asarray(model["norm"]) * 2,
        lambda model, tokens: jnp.zeros(int(tokens[0])),
        lambda model, tokens: model["layers"][tokens[0]]["up"],
    ],
    ids=["float", "if", "numpy", "shape", "index"],
)
def test_values_in_python_are_refused(abstract: Any, function: Any) -> None:
    with pytest.raises(lm.TraceError, match=r"test_errors.py:\d+ .* needs the value of an array"):
        abstract.run(function, tokens())


def test_other_errors_are_the_user_s_own(abstract: Any) -> None:
    with pytest.raises(KeyError, match="nothing"):
        abstract.run(lambda model: model["nothing"])
    with pytest.raises(lm.LazyModelError, match="run takes a function"):
        abstract.run(3)
    with pytest.raises(lm.LazyModelError, match="max_device_memory"):
        abstract.run(forward, tokens(), max_device_memory="much")


def test_tracers_that_leak_are_named(abstract: Any) -> None:
    kept: list[Any] = []
    with pytest.warns(lm.LazyModelWarning, match="kept"):
        abstract.run(lambda model: kept.append(model["norm"]) or model["norm"] * 2)
    with pytest.raises(lm.TraceError, match="does not look into"):
        abstract.run(lambda model: {"f": lambda: model["norm"]})


def test_mutable_arrays_are_refused(abstract: Any) -> None:
    def function(model: Any) -> jax.Array:
        reference = jax.new_ref(jnp.zeros(3))
        reference[0] = model["norm"][0]
        return reference[...]

    with pytest.raises(lm.LazyModelError, match="mutable array"):
        abstract.run(function)


def test_state_of_other_variables_values_is_refused(abstract: Any) -> None:
    both = abstract.with_optimizer(optax.adam(1e-3))
    found, _ = ran(both, lambda pair, tokens: forward(pair[0], tokens) + pair[1][0].count, tokens())
    assert_equal(found, jax.jit(forward)(abstract.materialize(), tokens()))
    lookahead = optax.lookahead(optax.sgd(1e-3), 5, 0.5)
    trained = lm.build_abstract(lambda key: jax.random.normal(key, (4,)), jax.random.key(0)).with_optimizer(
        optax.GradientTransformation(lambda params: params * 2, lambda g, s, p=None: (g, s))
    )
    assert lookahead
    with pytest.raises(lm.LazyModelError, match="computed from the values of other variables"):
        trained.run(lambda pair: pair[0])


def test_variables_on_other_devices_are_refused(mesh8: Any) -> None:
    one, other = jax.devices()[:2]
    abstract = lm.build_abstract(lambda key: {"a": jnp.ones(3), "b": jnp.ones(3)}, jax.random.key(0))
    placed = {"a": jax.sharding.SingleDeviceSharding(one), "b": jax.sharding.SingleDeviceSharding(other)}
    apart = abstract.shard(mesh8, lambda variable: placed[variable.path])
    with pytest.raises(lm.LazyModelError, match="different sets of devices"):
        apart.run(lambda model: model["a"])
    with pytest.raises(lm.LazyModelError, match="on other devices"):
        abstract.run(lambda model, x: model["a"] + x, jax.device_put(jnp.ones(3), other))


# Effects


def test_callbacks_run_once_and_in_order(abstract: Any) -> None:
    def function(model: Any, tokens: Any, note: Any) -> jax.Array:
        x = model["embedding"][tokens]
        for number, layer in enumerate(model["layers"]):
            x = jnp.tanh(x @ layer["out"])
            io_callback(lambda x, number=number: note(("ordered", number, x.shape)), None, x, ordered=True)
            jax.debug.callback(lambda x, number=number: note(("debug", number, x.dtype.name)), x.sum())
            x = x + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x

    notes: list[list[Any]] = [[], []]
    found, _ = ran(abstract, lambda model, tokens: function(model, tokens, notes[0].append), tokens())
    whole = jax.jit(lambda model, tokens: function(model, tokens, notes[1].append))(abstract.materialize(), tokens())
    jax.effects_barrier()
    assert_equal(found, whole)
    ordered = [[each for each in every if each[0] == "ordered"] for every in notes]
    assert ordered[0] == ordered[1] == [("ordered", number, (12, 32)) for number in range(LAYERS)]
    assert sorted(notes[0]) == sorted(notes[1])


def test_callbacks_of_scans_keep_their_order() -> None:
    stacked, seen = lm.build_abstract(decoder(LAYERS, stacked=True), jax.random.key(0)), list[int]()

    def step(x: jax.Array, row: Any) -> tuple[jax.Array, None]:
        io_callback(lambda number: seen.append(int(number)), None, row[1], ordered=True)
        return jnp.tanh(x @ row[0]["out"]), None

    rows = jnp.arange(LAYERS)
    stacked.run(lambda model, x: jax.lax.scan(step, x, (model["layers"], rows), reverse=True)[0], jnp.ones((2, 32)))
    assert seen == [2, 1, 0]


@pytest.mark.parametrize("kind", ["debug", "io", "pure"])
def test_a_callback_that_fails(abstract: Any, path: Path, kind: str) -> None:
    def fail(x: Any) -> Any:
        raise RuntimeError("no more paper")

    def function(model: Any, tokens: Any) -> Any:
        x = model["embedding"][tokens] @ model["layers"][0]["out"]
        if kind == "debug":
            jax.debug.callback(fail, x)
        elif kind == "io":
            io_callback(fail, None, x, ordered=True)
        else:
            x = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x @ model["layers"][1]["out"]

    with pytest.raises(Exception, match="no more paper"):
        abstract.run(function, tokens(), checkpoint=lm.open_checkpoint(path))
    ran(abstract, forward, tokens())  # and nothing of it is left


# What goes wrong while it runs


def test_a_file_that_cannot_be_read(abstract: Any, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes())
    checkpoint = lm.open_checkpoint(broken)
    with broken.open("r+b") as file:
        file.truncate(broken.stat().st_size // 2)
    with pytest.raises(lm.CheckpointError, match=r"broken.safetensors"):
        abstract.run(forward, tokens(), checkpoint=checkpoint)
    np.testing.assert_array_equal(
        abstract.run(forward, tokens(), checkpoint=path),
        abstract.run(forward, tokens(), checkpoint=lm.open_checkpoint(path)),
    )


def _no_paper() -> None:
    raise ValueError("no paper")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("fails", "raised"),
    [(_no_paper, ValueError), (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt)],
    ids=["error", "Ctrl-C"],
)
@pytest.mark.parametrize("when", [1, 5])
def test_progress_that_fails(
    abstract: Any, path: Path, fails: Callable[[], None], raised: type[BaseException], when: int
) -> None:
    calls: list[str] = []

    class Failing:
        def start(self, total_nbytes: int, description: str) -> None:
            calls.append("start")

        def advance(self, nbytes: int, description: str | None = None) -> None:
            calls.append("advance")
            if calls.count("advance") == when:
                fails()

        def finish(self) -> None:
            calls.append("finish")

    with pytest.raises(raised):
        abstract.run(forward, tokens(), checkpoint=lm.open_checkpoint(path), progress=Failing())
    assert calls == ["start", *["advance"] * when, "finish"]
    found, _ = ran(abstract, forward, tokens())
    assert_equal(found, jax.jit(forward)(abstract.materialize(), tokens()))


def test_a_report_that_fails(abstract: Any) -> None:
    with pytest.raises(ValueError, match="no paper"):
        abstract.run(forward, tokens(), report=lambda _: _no_paper())


# Sources


def test_what_a_checkpoint_lacks_is_initialized(abstract: Any, path: Path) -> None:
    some = {name: tensor for name, tensor in lm.open_checkpoint(path).items() if "up" not in name}
    with pytest.warns(lm.LazyModelWarning, match="no tensor for 3 of"):
        found, report = ran(abstract, forward, tokens(), checkpoint=some)
    assert report.made_nbytes == 3 * abstract["layers/0/up"].nbytes
    assert_equal(found, jax.jit(forward)(abstract.materialize(), tokens()))


def test_from_a_server(abstract: Any, path: Path, object_server: Any) -> None:
    (object_server.root / "run").mkdir(exist_ok=True)
    (object_server.root / "run" / "model.safetensors").write_bytes(path.read_bytes())
    checkpoint = lm.open_checkpoint(object_server.url("run/model.safetensors"))
    found, report = ran(abstract, forward, tokens(), checkpoint=checkpoint)
    assert_equal(found, jax.jit(forward)(abstract.materialize(), tokens()))
    assert report.again_nbytes == 0 and report.loaded_nbytes == abstract.nbytes + rows(abstract)


def test_quantized(tmp_path: Path) -> None:
    from tests import quantized

    form = quantized.FORMS["fp8-block"]
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(3)]
    tensors = {name: np.zeros((128, 128), np.float32) for name in names}
    stored, plain = quantized.quantized(form, tensors, lambda module: True)
    folder = quantized.write_folder(tmp_path / "folder", quantized.settings(form), stored)
    abstract = lm.build_abstract(lambda: {name: jnp.zeros((128, 128)) for name in names})
    mapped = {name: tensor.astype("float32") for name, tensor in lm.open_checkpoint(folder).items()}

    def function(model: Any, x: Any) -> Any:
        for name in names:
            x = jnp.tanh(x @ model[name])
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, report = ran(abstract, function, jnp.ones((2, 128)), checkpoint=mapped)
    expected = function({name: plain[name].astype("float32") for name in names}, jnp.ones((2, 128)))
    assert_equal(found, expected)
    assert len(report.rows) <= 2
