"""Nothing depends on the mesh of `jax.set_mesh`: the main paths under another one, of Auto and of Explicit axes."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh(first: int, sizes: tuple[int, int], kind: str) -> Mesh:
    devices = np.array(jax.devices()[first : first + sizes[0] * sizes[1]]).reshape(sizes)
    return Mesh(devices, ("data", "model"), axis_types=(KINDS[kind],) * 2)


def init(key: jax.Array) -> dict[str, jax.Array]:
    ones, steps = jnp.ones((8, 16)), jnp.int32(3)
    return {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8), "v": 0.1 * ones, "step": steps}


def forward(model: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x * model["b"].sum() + model["v"].sum(0)) * model["w"].mean()


def results(own: Mesh, folder: Path) -> dict[str, Any]:
    """What the main paths give."""
    folder.mkdir()
    rules, x = {"w": P("data"), "v": P(None, "model"), ".*": P()}, np.ones((4, 16), np.float32)
    alone = lm.build_abstract(init, jax.random.key(0))
    abstract, elsewhere = alone.shard(own, rules), alone.shard(mesh(4, (2, 2), "auto"), rules)
    model = abstract.materialize()
    host = {path: np.asarray(array) for path, array in model.items()}
    lm.save(model, folder / "model.safetensors")
    lm.save_step(model, folder / "run", 1)
    moved = lm.reshard(model, {path: NamedSharding(elsewhere[path].sharding.mesh, P()) for path in model})
    trained = abstract.with_optimizer(optax.adam(1e-3))
    return {
        "initialized": [model, alone.materialize(), elsewhere.materialize(), dict(abstract.stream())],
        "loaded": [
            abstract.materialize(host),
            alone.materialize(host),
            abstract.materialize(lm.open_checkpoint(folder / "model.safetensors")),
        ],
        "restored": lm.restore(abstract, folder / "run"),
        "trained": [trained.materialize(), alone.with_optimizer(optax.adam(1e-3)).materialize()],
        "ran": [abstract.run(forward, x), alone.run(forward, x, checkpoint=host)],
        "moved": [moved, lm.Sync(abstract, elsewhere)(model, into=elsewhere.materialize())],
        "statistics": [lm.statistics(each).to_dict() for each in (model, alone)],
        "signals": lm.signals(abstract, lambda model, x: forward(model, x).sum(), x).to_dict(),
    }


@functools.cache
def without(own: str) -> dict[str, Any]:
    """The same outside any mesh's context."""
    with tempfile.TemporaryDirectory() as folder:
        return results(mesh(0, (2, 4), own), Path(folder) / "without")


CASES = [*itertools.product(KINDS, KINDS, ("same", "other", "fewer"))]
SOME = [("auto", "explicit", "other"), ("explicit", "auto", "fewer")]


@pytest.mark.parametrize(("own", "axes", "current"), mostly_large(CASES, SOME))
def test_main_paths(tmp_path: Path, own: str, axes: str, current: str) -> None:
    model_mesh, expected = mesh(0, (2, 4), own), without(own)
    with jax.set_mesh(
        {"same": mesh(0, (2, 4), axes), "other": mesh(0, (4, 2), axes), "fewer": mesh(2, (2, 1), axes)}[current]
    ):
        found = results(model_mesh, tmp_path / "with")
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, right in jax.tree_util.tree_leaves_with_path(expected):
        mine = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert np.array_equal(mine, right) if hasattr(right, "dtype") else mine == right, path
        assert getattr(mine, "sharding", None) == getattr(right, "sharding", None), path


def test_a_function_may_name_axes_of_the_models_mesh() -> None:
    own = mesh(0, (2, 4), "auto")
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(own, {".*": P()})

    def split(model: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(model["w"] * 2, P("data"))

    with jax.set_mesh(own):
        found = abstract.run(split)
        inside = lm.build_abstract(lambda: {"w": split({"w": jnp.ones((8, 8))})}).shard(own, {"w": P("model")})
        made = inside.materialize()["w"]
    assert found.sharding.spec == P("data") and np.array_equal(found, 2 * np.asarray(abstract.materialize()["w"]))
    assert made.sharding.spec == P("model") and (np.asarray(made) == 2).all()


@pytest.mark.parametrize("axes", KINDS)
@pytest.mark.parametrize("own", KINDS)
def test_inputs_that_are_made_under_another_mesh(own: str, axes: str) -> None:
    """Whole on the model's devices, they are what they are; on others, the error says what to do, and it works."""
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh(0, (2, 4), own), {"w": P("data"), ".*": P()})
    expected = abstract.run(forward, np.ones((4, 16), np.float32))
    with jax.set_mesh(mesh(0, (4, 2), axes)):
        assert np.array_equal(abstract.run(forward, jnp.ones((4, 16))), expected)
    with jax.set_mesh(mesh(2, (2, 1), axes)):
        x = jnp.ones((4, 16))
        with pytest.raises(lm.LazyModelError, match=r"than the model. Put it on the model's, with jax.device_put"):
            abstract.run(forward, x)
        moved = jax.device_put(x, NamedSharding(abstract["w"].sharding.mesh, P()))
        assert np.array_equal(abstract.run(forward, moved), expected)
