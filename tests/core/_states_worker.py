"""A process of the tests of states: `python _states_worker.py PROCESS ADDRESS FOLDER` is one of two, which train leaves
that begin equal apart, save them, and restore them on another mesh.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join


def networks(key: jax.Array) -> Any:
    q = jax.nn.initializers.orthogonal()(key, (16, 16))
    params = {"w": jax.random.normal(key, (128, 64)), "q": q, "b": jnp.zeros(64)}
    return {"online": params, "target": params, "step": 0}


def moments(params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"m": zeros, "v": zeros, "first": params}


@jax.jit
def moved_apart(state: Any) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [leaf * 2 + number for number, leaf in enumerate(leaves)])


def worker(process: int, address: str, folder: str) -> None:
    join(process, 2, address, 2)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    abstract = lm.build_abstract(networks, jax.random.key(0)).with_optimizer(SimpleNamespace(init=moments))
    model, state = abstract.shard(mesh, {".*/w": P("model"), ".*": P()}).materialize()
    step = model.pop("step")
    shards = [shard for leaf in jax.tree.leaves((model, state)) for shard in leaf.addressable_shards]
    assert len({(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards}) == len(shards)
    model, state = moved_apart((model, state))
    lm.save_step(({**model, "step": step + 3}, state), folder, 1)
    other = Mesh(mesh.devices.reshape(2, 2), ("a", "b"))
    again, restored = lm.restore(abstract.shard(other, {".*/w": P("b", "a"), ".*": P()}), folder)
    assert again.pop("step") == 3
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (again, restored))
    expected = jax.jit(lambda tree: tree, out_shardings=shardings)((model, state))
    for one, two in zip(jax.tree.leaves((again, restored)), jax.tree.leaves(expected), strict=True):
        for a, b in zip(one.addressable_shards, two.addressable_shards, strict=True):
            np.testing.assert_array_equal(a.data, b.data)


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:4])
