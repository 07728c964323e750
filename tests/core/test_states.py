"""States that people train: leaves that begin equal and move apart, optimizers of every form, numbers in a tree."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.core import _states_worker
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers
from tests.resuming import assert_same_values

optax = pytest.importorskip("optax")


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {
        "w": jax.random.normal(key, (128, 64)),
        "q": jax.nn.initializers.orthogonal()(key, (16, 16)),
        "b": jnp.zeros(64),
    }


def buffers(tree: Any) -> list[int]:
    shards = (shard for array in jax.tree.leaves(tree) for shard in getattr(array, "addressable_shards", ()))
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


# --- leaves that begin as one array -----------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Averaged:
    params: Any
    ema: Any


def networks(key: jax.Array) -> Any:
    params = init(key)
    return {"online": params, "target": params}


def averaged(key: jax.Array) -> Any:
    params = init(key)
    return Averaged(params, params)


def lookahead(key: jax.Array) -> Any:
    return optax.LookaheadParams.init_synced(init(key))


@jax.jit
def moved_apart(state: Any) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [(leaf * 2 + number).astype(leaf.dtype) for number, leaf in enumerate(leaves)])


@pytest.mark.parametrize(
    ("build", "form"),
    mostly_large(
        [*itertools.product([networks, averaged, lookahead], ["safetensors", "orbax"])],
        [(networks, "orbax"), (averaged, "safetensors"), (lookahead, "orbax")],
    ),
)
def test_leaves_move_apart_and_come_back(
    tmp_path: Path, mesh8: Mesh, mesh42: Mesh, build: Callable[..., Any], form: str
) -> None:
    abstract = lm.build_abstract(build, jax.random.key(0)).shard(mesh8, {".*/w": P("model"), ".*": P()})
    assert abstract.plan().device_nbytes == 2 * 4 * (128 * 64 // 8 + 256 + 64), "a device has each of the two"
    state = abstract.materialize()
    assert_same_values(state, build(jax.random.key(0)))
    assert len(set(buffers(state))) == len(buffers(state)), "a training step donates each"
    moved = moved_apart(state)
    lm.save(moved, tmp_path / "x", format=form)
    with lm.open_checkpoint(tmp_path / "x") as checkpoint:
        assert set(checkpoint) == set(abstract) and not lm.diff(moved, checkpoint)
    elsewhere = abstract.shard(mesh42, {".*/w": P("batch", "model"), ".*": P()})
    assert_same_values(lm.restore(elsewhere, tmp_path / "x"), moved)
    synced = lm.Sync(abstract, elsewhere)(moved, into=elsewhere.materialize())
    assert_same_values(synced, moved)


def test_an_older_checkpoint_without_averages_fills_both(tmp_path: Path) -> None:
    abstract, reports = lm.build_abstract(averaged, jax.random.key(0)), list[lm.LoadReport]()
    params = moved_apart(init(jax.random.key(1)))
    lm.save_step({"params": params}, tmp_path, 1)
    restored = lm.restore(abstract, tmp_path, report=reports.append)
    assert_same_values(restored, Averaged(params, params))
    assert reports[0].filled == {f"ema/{name}": f"params/{name}" for name in ("b", "q", "w")}


@pytest.mark.large
def test_two_processes(tmp_path: Path) -> None:
    address = free_address()
    arguments = [(process, address, tmp_path / "steps") for process in range(2)]
    assert run_workers(Path(_states_worker.__file__), arguments, tmp_path, patience=80) == [0, 0], printed(tmp_path, 2)


# --- optimizers -------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    m: Any
    v: Any


class Moments(NamedTuple):
    m: Any
    v: Any


def own(make: Callable[[Any], Any]) -> Any:
    """An optimizer whose state is made of zeros like the parameters, one tree for all of it."""
    return optax.GradientTransformation(lambda params: make(jax.tree.map(jnp.zeros_like, params)), lambda *_: _)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(1e-3))),
    "named_chain without moments": lambda: optax.named_chain(("sgd", optax.sgd(optax.linear_schedule(1.0, 0.0, 9)))),
    "lbfgs": optax.lbfgs,
    "cocob": optax.contrib.cocob,
    "prodigy": optax.contrib.prodigy,
    "dog": optax.contrib.dog,
    "monitor": lambda: optax.chain(optax.adam(1e-3), optax.monitor({"norm": lambda u, *_: optax.tree.norm(u)})),
    "dict": lambda: own(lambda zeros: {"m": zeros, "v": zeros, "count": jnp.zeros((), "int32")}),
    "dataclass": lambda: own(lambda zeros: Fields(zeros, zeros)),
    "named tuple": lambda: own(lambda zeros: Moments(zeros, zeros)),
    "list": lambda: own(lambda zeros: [zeros, zeros]),
}


@pytest.mark.parametrize("name", mostly_large(OPTIMIZERS, ["named_chain", "lbfgs", "dict", "dataclass", "monitor"]))
def test_optimizers(tmp_path: Path, mesh8: Mesh, mesh42: Mesh, name: str) -> None:
    abstract = lm.build_abstract(init, jax.random.key(0)).with_optimizer(OPTIMIZERS[name]())
    trained = abstract.shard(mesh8, lm.auto()).materialize()
    assert len(set(buffers(trained))) == len(buffers(trained))
    trained = moved_apart(trained)
    lm.save_step(trained, tmp_path / "new", 1)
    with lm.open_checkpoint(tmp_path / "new") as checkpoint:
        assert set(checkpoint) == set(abstract)
    assert_same_values(lm.restore(abstract.shard(mesh42, lm.auto()), tmp_path / "new"), trained)
    # As older versions wrote those that they did not know.
    leaves = jax.tree_util.tree_flatten_with_path(trained)[0]
    lm.save({jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}, tmp_path / "old")
    assert_same_values(lm.restore(abstract, tmp_path / "old"), trained)


def test_a_state_that_is_a_tree_of_the_parameters(tmp_path: Path) -> None:
    """Which cannot be told from a second model: it is saved under the places of a pair, and restored."""
    abstract = lm.build_abstract(init, jax.random.key(0)).with_optimizer(own(lambda zeros: zeros))
    trained = moved_apart(abstract.materialize())
    lm.save_step(trained, tmp_path, 1)
    assert_same_values(lm.restore(abstract, tmp_path), trained)


# --- numbers ----------------------------------------------------------------------------------------------------------


def numbered(key: jax.Array) -> dict[str, Any]:
    numbers = {"step": 7, "lr": 0.5, "done": True, "z": 1j, "scale": np.float32(3), "half": ml_dtypes.bfloat16(2)}
    return {"w": jax.random.normal(key, (4,)), "name": "x", **numbers}


@pytest.mark.parametrize("form", ["safetensors", "orbax", "hdf5"])
def test_numbers(tmp_path: Path, form: str) -> None:
    abstract = lm.build_abstract(numbered, jax.random.key(0))
    state = {name: not leaf if leaf is True else leaf * 3 for name, leaf in numbered(jax.random.key(1)).items()}
    state["name"] = "x"
    if form == "hdf5":  # which have no such number
        abstract = lm.build_abstract(lambda key: {**numbered(key), "half": None}, jax.random.key(0))
        state["half"] = None
    path = tmp_path / ("x.h5" if form == "hdf5" else "x")
    lm.save(state, path, format=form)
    with lm.open_checkpoint(path) as checkpoint:
        assert_same_values(abstract.materialize(checkpoint, initialize="nothing"), state)
        assert_same_values(abstract.materialize({"w": checkpoint["w"]})["step"], 7)
    assert_same_values(lm.restore(abstract, path), state)
    assert_same_values(abstract.materialize({name: state[name] for name in state if name != "name"}), state)
    lm.save(abstract, tmp_path / "abstract", format="safetensors")
    assert_same_values(lm.restore(abstract, tmp_path / "abstract"), abstract.materialize())
    with pytest.raises(lm.CheckpointError, match=r"'step': expected a number, int64\[\], found float32\[4\]"):
        abstract.materialize({"w": state["w"], "step": state["w"]})


# --- dtypes -----------------------------------------------------------------------------------------------------------


ORBAX_LACKS = ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"]


def jax_dtypes() -> list[str]:
    numbers = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64))]
    return [*numbers, *(f"float{bits}" for bits in (16, 32, 64)), "complex64", "complex128", "bfloat16"] + [
        name for name in dir(ml_dtypes) if name.startswith("float") and hasattr(jnp, name)
    ]


@pytest.mark.parametrize("form", ["safetensors", "orbax", "hdf5"])
def test_every_dtype_is_read_back_or_refused_by_name(tmp_path: Path, form: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    suffix, refused = {"numpy": ".npz", "hdf5": ".h5"}.get(form, ""), list[str]()
    for name in jax_dtypes():
        dtype = jnp.dtype(name)
        array = (bits % 2).astype(bool) if name == "bool" else bits[:4].astype(dtype)
        path = tmp_path / f"{name}{suffix}"
        try:
            lm.save({"a": array, "none": array[:0]}, path, format=form)
        except lm.LazyModelError as error:
            refused += [name] if re.search(f"'a'.* {name}[;,].*save as safetensors", str(error)) else [str(error)]
            assert not path.exists()
            continue
        with lm.open_checkpoint(path) as checkpoint:
            for key, expected in {"a": array, "none": array[:0]}.items():
                found = checkpoint[key].read()
                assert (found.dtype, found.shape, found.tobytes()) == (dtype, expected.shape, expected.tobytes())
    others = [name for name in jax_dtypes() if jnp.dtype(name).isbuiltin == 2 and (form, name) != ("hdf5", "bfloat16")]
    lacking = {"safetensors": [], "orbax": ["uint2", "uint4", *ORBAX_LACKS]}
    assert refused == lacking.get(form, others)


def test_complex128_resumes(tmp_path: Path, mesh8: Mesh) -> None:
    with jax.enable_x64(True):
        abstract = lm.build_abstract(lambda key: jax.random.normal(key, (16, 3), "complex128"), jax.random.key(0))
        abstract = abstract.shard(mesh8, {".*": P("model")}).with_optimizer(optax.adam(1e-3))
        trained = moved_apart(abstract.materialize())
        lm.save_step(trained, tmp_path, 1)
        assert_same_values(lm.restore(abstract, tmp_path), trained)


@pytest.mark.parametrize("said", ['{"b": "complex128"}', '{"a": "complex128"}', '{"a": "int64"}', '{"a": 3}', "[]"])
def test_what_a_file_says_of_its_dtypes_is_checked(tmp_path: Path, said: str) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((3, 3))}, tmp_path / "x.safetensors", metadata={"lazymodel.dtypes": said})
    with pytest.raises(lm.CheckpointError):
        lm.open_checkpoint(tmp_path / "x.safetensors")
