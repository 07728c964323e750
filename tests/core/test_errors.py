"""Warnings point to the user's own line, whichever function gives them and however deep inside."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import stat
import types
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._errors import warn

KEPT = types.SimpleNamespace()


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (1024, 512)), "v": jax.random.normal(key, (1024, 256))}


def leaky(key: jax.Array) -> dict[str, jax.Array]:
    KEPT.last = jax.random.normal(key, (2,))
    return {"w": KEPT.last}


class LayoutMap(dict[str, Any]):
    """As Keras' own, in which a key that matches nothing is no error."""

    device_mesh = None


class World:
    """What the calls below are made with."""

    def __init__(self, folder: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.mesh, self._monkeypatch = folder, mesh, monkeypatch
        self.model = lm.build_abstract(init, jax.random.key(0))
        self.weights = {"w": np.ones((1024, 512), "float32"), "extra": np.ones(3, "float32")}

    def lost_chunk(self) -> lm.Checkpoint:
        ocp: Any = pytest.importorskip("orbax.checkpoint")
        path = self.folder / "orbax"
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(path, {"w": jnp.ones(8), "v": jnp.ones(8)})
        metadata = json.loads((path / "_METADATA").read_text())
        metadata["store_array_data_equal_to_fill_value"] = False
        (path / "_METADATA").write_text(json.dumps(metadata))
        (path / "w" / "0").unlink()
        return lm.open_checkpoint(path)

    def fill_disk(self) -> Path:
        fsync = os.fsync

        def full(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        self._monkeypatch.setattr(os, "fsync", full)
        return self.folder / "saved.safetensors"


# The line that a warning is to point to ends with `# here`.


def shard_without_a_rule_for_all(world: World) -> None:
    world.model.shard(world.mesh, {"w": P("model")})  # here


def shard_by_a_key_that_matches_nothing(world: World) -> None:
    world.model.shard(world.mesh, LayoutMap({"[vw]": P("model"), "nothing": P()}))  # here


def build_abstract_of_what_keeps_a_tracer(world: World) -> None:
    lm.build_abstract(leaky, jax.random.key(0))  # here


def materialize_what_the_checkpoint_lacks(world: World) -> None:
    world.model.materialize({})  # here


def materialize_less_than_the_checkpoint_has(world: World) -> None:
    world.model.materialize(  # here
        world.weights, initialize="missing", strict=False
    )


def materialize_random_bits_that_depend_on_the_sharding(world: World) -> None:
    abstract = lm.build_abstract(init, jax.random.key(0, impl="rbg")).shard(world.mesh, {".*": P("model")})
    abstract.materialize()  # here


def map_checkpoint_that_does_not_fit(world: World) -> None:
    lm.map_checkpoint(world.weights, lm.WeightMap({"w": "w"}), world.model, strict=False)  # here


def open_checkpoint_that_lost_chunks(world: World) -> None:
    checkpoint = world.lost_chunk()
    checkpoint["w"]  # here


def plan_for_a_checkpoint_that_lost_chunks(world: World) -> None:
    checkpoint, abstract = world.lost_chunk(), lm.build_abstract(lambda: {"w": jnp.ones(8), "v": jnp.ones(8)})
    abstract.plan(checkpoint)  # here


def save_on_a_disk_that_fills_up(world: World) -> None:
    path = world.fill_disk()
    lm.save({"w": np.ones(3)}, path)  # here


def of_the_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it stood in one of this library's modules."""
    return types.FunctionType(function.__code__, {"__name__": "lazymodel._module", "warn": warn})


@of_the_library
def warning(*given: Any) -> Any:
    warn("of something")
    return given[0]


@contextlib.contextmanager
@of_the_library
def block() -> Generator[None, None, None]:
    yield
    warn("of something")


def leave_a_block(world: World) -> None:
    with block():  # here
        pass


def have_a_framework_call_back(world: World) -> None:
    jax.jit(warning)(jnp.ones(2))  # here


CALLS = (
    shard_without_a_rule_for_all,
    shard_by_a_key_that_matches_nothing,
    build_abstract_of_what_keeps_a_tracer,
    materialize_what_the_checkpoint_lacks,
    materialize_less_than_the_checkpoint_has,
    materialize_random_bits_that_depend_on_the_sharding,
    map_checkpoint_that_does_not_fit,
    open_checkpoint_that_lost_chunks,
    plan_for_a_checkpoint_that_lost_chunks,
    save_on_a_disk_that_fills_up,
    leave_a_block,
    have_a_framework_call_back,
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_warning_points_to_the_user_s_line(
    call: Callable[[World], None], tmp_path: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, first = inspect.getsourcelines(call)
    world = World(tmp_path, mesh8, monkeypatch)
    with pytest.warns(lm.LazyModelWarning) as caught:
        call(world)
    (here,) = (first + index for index, line in enumerate(lines) if line.endswith("# here\n"))
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, here)]


def test_a_warning_is_given_once_a_line_and_can_be_filtered_by_module() -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setitem(globals(), "__warningregistry__", {})
        warnings.simplefilter("default")
        for _ in range(2):
            warning(None)
        assert len(caught) == 1
        warnings.filterwarnings("ignore", module=re.escape(__name__))
        warning(None)
        assert len(caught) == 1
