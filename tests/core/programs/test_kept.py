"""Programs that are kept in a folder: loaded if nothing differs, and compiled again, with the reason, if anything does.

`jax.clear_caches()` and a new function of `jax.jit` make this process as new; one test has another process.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events
from tests.conftest import child_environment

X = np.linspace(-1, 1, 8 * 16, dtype="float32").reshape(8, 16)
VALUES = {"kernel": np.linspace(-2, 2, 16 * 8, dtype="float32").reshape(16, 8)}


def init(key: Any) -> dict[str, Any]:
    return {"kernel": jnp.ones((16, 8))}


def make(factor: float = 2.0) -> Any:
    """A step of its own each time, as in another process."""

    def step(params: Any, x: Any, scale: float = 1.0) -> Any:
        up = jax.nn.silu(x @ params["kernel"]) * factor * scale
        return {"kernel": params["kernel"] - up.mean()}, up

    return jax.jit(step, donate_argnums=0, static_argnames="scale")


def start(keep: Any, step: Any = None, x: Any = X, mesh: Mesh | None = None, **options: Any) -> tuple[Any, Any, str]:
    """The compiled function, the model and the report's word of a first load in a new process."""
    jax.clear_caches()
    compiled = lm.Compile(step or make(), x, keep=keep, **options)
    abstract = lm.build_abstract(init, jax.random.key(0))
    abstract = abstract if mesh is None else abstract.shard(mesh, {"kernel": P(None, "model")})
    reports: list[lm.LoadReport] = []
    model = abstract.materialize(VALUES, compile=compiled, report=reports.append)
    assert reports[0].compiled[0].cache in " ".join(str(reports[0]).split())
    return compiled, model, reports[0].compiled[0].cache


def of_step(events: list[str]) -> list[str]:
    return [event for event in events if "step" in event]


@pytest.mark.parametrize("order", [None, (5, 2, 7, 3)])
def test_a_later_process_traces_it_and_calls_what_was_kept(tmp_path: Path, order: tuple[int, ...] | None) -> None:
    mesh = None if order is None else Mesh(np.array(jax.devices())[list(order)], ("model",))
    first, model, cache = start(tmp_path, mesh=mesh)
    expected = [first(model, X)]
    expected += [first({"kernel": jnp.array(expected[0][0]["kernel"])}, X)]
    assert cache == "kept: no program yet"
    with compile_events() as events:
        again, model, cache = start(tmp_path, mesh=mesh)
        assert cache == "kept: hit"
        assert of_step(events) == ["trace step"]
        before, given = len(events), model
        for values, up in expected:  # the results are the next arguments
            found, found_up = again(given, X)
            assert given["kernel"].is_deleted()
            given = found
            np.testing.assert_array_equal(found_up, up)
            np.testing.assert_array_equal(found["kernel"], values["kernel"])
        assert found["kernel"].sharding == values["kernel"].sharding
        assert not of_step(events[before:])


@pytest.mark.parametrize(
    ("x", "options"),
    [(X[:4], {}), (X.astype("float16"), {}), (jnp.asarray(X), {}), (X, {"scale": 3.0}), (2.0 * np.ones(16, "f"), {})],
    ids=["shape", "dtype", "uncommitted", "static", "rank"],
)
def test_other_arguments_are_the_functions_own(tmp_path: Path, x: Any, options: Any) -> None:
    start(tmp_path)
    compiled, model, cache = start(tmp_path)
    assert cache == "kept: hit"
    found, up = compiled(model, x, **options)
    expected, expected_up = make()({"kernel": jnp.asarray(VALUES["kernel"])}, x, **options)
    np.testing.assert_array_equal(up, expected_up)
    assert (up.dtype, up.weak_type) == (expected_up.dtype, expected_up.weak_type)
    np.testing.assert_array_equal(found["kernel"], expected["kernel"])


def test_weak_types_contexts_and_placement_are_told_apart(tmp_path: Path) -> None:
    def make() -> Any:
        return jax.jit(lambda params, x: params["kernel"].astype("bfloat16") * x)

    start(tmp_path, make(), np.float32(2))
    compiled, model, cache = start(tmp_path, make(), np.float32(2))
    assert cache == "kept: hit"
    with compile_events() as events:
        assert compiled(model, np.float32(2)).dtype == jnp.float32
        assert not events
        assert compiled(model, 2.0).dtype == jnp.bfloat16
        assert "compile jit(<lambda>)" in events
        events.clear()
        with jax.default_matmul_precision("highest"):
            compiled(model, np.float32(2))
        assert "compile jit(<lambda>)" in events
        events.clear()
        moved = jax.device_put(model, jax.devices()[1])
        assert compiled(moved, np.float32(2)).devices() == {jax.devices()[1]}
        assert jax.grad(lambda x: compiled(model, x).astype("float32").sum())(np.float32(2)).shape == ()


def test_layouts_are_told_apart(tmp_path: Path) -> None:
    plain, transposed = (
        jax.device_put(X, Format(Layout(order), SingleDeviceSharding(jax.devices()[0]))) for order in ((0, 1), (1, 0))
    )
    start(tmp_path, x=plain)
    assert start(tmp_path, x=transposed)[2] == "kept: arguments changed"
    compiled, model, cache = start(tmp_path, x=transposed)
    assert cache == "kept: hit"
    with compile_events() as events:
        found, up = compiled(model, transposed)
        assert not of_step(events)
        _, other = compiled(found, plain)
        assert "compile jit(step)" in events
    assert up.shape == other.shape


def named(version: str) -> Callable[[str], str]:
    own = importlib.metadata.version
    return lambda name: version if name == "jaxlib" else own(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr("importlib.metadata.version", named("0.0.1")), r"jaxlib [\d.]+ -> 0\.0\.1"),
        (lambda patch: patch.setenv("LIBTPU_INIT_ARGS", "--a"), "LIBTPU_INIT_ARGS none -> --a"),
        (lambda patch: patch.setenv("XLA_FLAGS", "--xla_b=" + 40 * "c"), "XLA_FLAGS changed"),
        (lambda patch: {"settings": jax.numpy_rank_promotion("warn")}, "jax.config changed"),
        (lambda patch: {"step": make(3.0)}, "the function changed"),
        (lambda patch: {"x": X[:4]}, "arguments changed"),
        (lambda patch: {"x": jax.device_put(X, jax.devices()[0])}, "arguments changed"),
        (lambda patch: {"mesh": Mesh(np.array(jax.devices()[:2]), ("model",))}, "arguments changed"),
        (lambda patch: {"scale": 2.0}, "arguments changed"),
    ],
)
def test_what_differs_is_compiled_and_named(tmp_path: Path, change: Any, reason: str) -> None:
    start(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        options = change(patch) or {}
        with options.pop("settings", patch.context()):
            _, _, cache = start(tmp_path, **options)
    assert re.fullmatch(f"kept: {reason}", cache)
    assert start(tmp_path)[2] == "kept: hit", "both are kept"


def test_constants_are_part_of_the_function(tmp_path: Path) -> None:
    def make(constant: Any) -> Any:
        return jax.jit(lambda params, x: x + constant)

    one = np.arange(16, dtype="float32")
    start(tmp_path, make(one))
    assert start(tmp_path, make(one))[2] == "kept: hit"
    other = np.where(one == 7, np.nextafter(one, 8), one)  # prints the same
    compiled, model, cache = start(tmp_path, make(other))
    assert cache == "kept: the function changed"
    np.testing.assert_array_equal(compiled(model, X), X + other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-100],
        lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        lambda content: b"",
        lambda content: content.replace(b"jaxlib", b"jaxlip"),
    ],
    ids=["truncated", "flipped", "empty", "header"],
)
def test_a_damaged_program_is_compiled_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    start(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    compiled, model, cache = start(tmp_path)
    assert "damaged" in cache
    compiled(model, X)
    assert start(tmp_path)[2] == "kept: hit"
    assert len(list(tmp_path.iterdir())) == 1, "no temporary file is left"


def test_a_folder_that_others_may_write_to_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    start(folder)
    assert folder.stat().st_mode & 0o77 == 0
    (path,) = folder.iterdir()
    for each in (folder, path):
        mode = each.stat().st_mode
        each.chmod(mode | 0o020)
        with pytest.raises(lm.LazyModelError, match=rf"{each} can be written by other users .*chmod -R go-w"):
            start(folder)
        each.chmod(mode)
        assert start(folder)[2] == "kept: hit"
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(lm.LazyModelError, match="belongs to user 12345"):
            start(folder)


def test_functions_that_cannot_be_kept_say_why(tmp_path: Path) -> None:
    def calls(params: Any, x: Any) -> Any:
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    compiled, model, cache = start(tmp_path, jax.jit(calls))
    assert cache == "not kept: it calls back into Python"
    np.testing.assert_array_equal(compiled(model, X), X)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(lm.LazyModelError, match="cannot make or open this folder"):
        start(tmp_path / "file")
    with pytest.raises(lm.LazyModelError, match="expected a folder on a disk, found a URL"):
        start("s3://bucket/folder")
    with pytest.raises(lm.LazyModelError, match="call that method"):
        lm.Compile("predict")(model)
    assert lm.Compile(make())(VALUES, X)[1].shape == (8, 8), "without a folder, it is the function"


def test_other_processes_and_the_persistent_cache(tmp_path: Path) -> None:
    code = """if True:
        import sys, jax
        from tests.core.programs import test_kept as kept
        jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        found = [kept.start(sys.argv[1] + folder) for folder in ("/one", "/one", "/other")]
        print("; ".join([each[2] for each in found]), {float(each[0](each[1], kept.X)[1].sum()) for each in found})
    """
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    for first in ("no program yet", "hit"):
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert re.fullmatch(rf"kept: {first}; kept: hit; not kept: JAX' persistent .* \{{[-.\d]+\}}\n", printed)
    assert not list((tmp_path / "other").iterdir()), "XLA:CPU serializes a cached program without its functions"
