"""Leaves come back as eager execution makes them: weak types, NumPy arrays of every dtype, and whatever else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lazymodel as lm
from tests.core.trace._eager import assert_same
from tests.large import examples

KEY = jax.random.key(0)

# --- weak types -----------------------------------------------------------------------------------------------------


def weak(key: Any) -> Any:
    return {
        "scalar": jnp.asarray(2.0),
        "count": jnp.asarray(3),
        "full": jnp.full((4,), 2.0),
        "full_int": jnp.full((16, 2), 7),
        "complex": jnp.asarray(1j),
        "computed": jnp.full((8, 32), 0.5) * 3.0 + 1,
        "normal": jax.random.normal(key, (8, 32)),
        "strong": jnp.full((4,), 2.0, jnp.float32),
        "sum": jnp.asarray(2.0) * jnp.ones(4, jnp.bfloat16),
        "like": jnp.zeros_like(jnp.full((3,), 2.0)),
        "range": jnp.arange(3) * 2.0,
        "loop": jax.lax.fori_loop(0, 2, lambda i, x: x * 0.5, jnp.full((8,), 2.0)),
        "jit": jax.jit(lambda: (jnp.full((8,), 2.0), jnp.ones(8)))(),
    }


def test_weak_types_are_those_of_eager_execution(mesh8: Any) -> None:
    expected = weak(KEY)
    abstract = lm.build_abstract(weak, KEY)
    assert_same(abstract.materialize(), expected)
    sharded = abstract.shard(mesh8, lambda variable: jax.P("model") if variable.path == "computed" else jax.P())
    assert_same(sharded.materialize(), expected)
    for path, array in expected.items():
        if path != "jit":
            assert abstract[path].weak_type == array.weak_type, path
            assert abstract.tree[path].weak_type == array.weak_type, path
    assert expected["full"].weak_type
    assert not expected["strong"].weak_type


def test_a_weak_constant_and_a_weak_argument() -> None:
    constant = jnp.full((4,), 2.0)

    def init(given: Any) -> Any:
        return {"constant": constant, "given": given, "twice": given * 2}

    given = jnp.full((64,), 1.5)
    assert_same(lm.build_abstract(init, given).materialize(), init(given))
    with pytest.raises(lm.LazyModelError, match="'given' needs the value of an argument"):
        lm.build_abstract(init, jax.ShapeDtypeStruct((64,), jnp.float32, weak_type=True))


def test_weak_variables_are_loaded_where_they_lie(mesh8: Any, tmp_path: Path) -> None:
    def init() -> Any:
        return {"w": jnp.full((64, 16), 2.0), "v": jnp.ones((64, 16))}

    values = {"w": np.arange(1024, dtype=np.float32).reshape(64, 16), "v": np.ones((64, 16), np.float32)}
    lm.save(values, tmp_path / "model.safetensors")
    abstract = lm.build_abstract(init).shard(mesh8, {".*": jax.P("model")})
    model = abstract.materialize(lm.open_checkpoint(tmp_path / "model.safetensors"))
    assert model["w"].weak_type and not model["v"].weak_type
    assert model["w"].sharding == abstract["w"].sharding
    assert np.array_equal(model["w"], values["w"])


def test_optimizer_state_is_as_weak_as_its_parameters() -> None:
    optax = pytest.importorskip("optax")

    def init() -> Any:
        return {"w": jnp.full((4, 4), 2.0), "v": jnp.ones(4)}

    optimizer = optax.adam(1e-3)
    _, state = lm.build_abstract(init).with_optimizer(optimizer).materialize()
    assert_same(state, optimizer.init(init()))
    assert state[0].mu["w"].weak_type


# --- NumPy arrays ---------------------------------------------------------------------------------------------------


def numpy_leaves(key: Any) -> Any:
    return {
        "wide": np.array([2**40, -1]),
        "large": np.array([1e300, 0.1]),
        "float32": np.linspace(0, 1, 5, dtype=np.float32),
        "bfloat16": np.ones(3, ml_dtypes.bfloat16),
        "int4": np.ones(3, ml_dtypes.int4),
        "bool": np.array([True, False]),
        "complex": np.array([1e300 + 1j]),
        "zero_d": np.array(2**40),
        "empty": np.zeros((0, 3)),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.float64(1e300),
        "integer": np.int64(2**40),
        "strings": np.array(["a", "bc"]),
        "object": np.array({"a": 3}, dtype=object),
        "record": np.array([(1, 2.0)], dtype=[("a", "i8"), ("b", "f8")]),
        "date": np.array(["2026-01-01"], dtype="datetime64[D]"),
        "long": np.array([1], np.longdouble),
        "swapped": np.array([1.5], ">f8"),
        "float0": np.zeros(3, jax.dtypes.float0),
        "masked": np.ma.masked_array([1, 2], [False, True]),
        "traced": jax.random.normal(key, (3,)),
    }


STATIC = {"scalar", "integer", "strings", "object", "record", "date", "long", "swapped", "float0", "masked"}


def test_numpy_leaves_come_back_as_they_are() -> None:
    abstract = lm.build_abstract(numpy_leaves, KEY)
    assert set(numpy_leaves(KEY)) - set(abstract) == STATIC
    made, expected = abstract.materialize(), numpy_leaves(KEY)
    mask = made.pop("masked")
    assert mask.mask.tolist() == expected.pop("masked").mask.tolist()
    assert made.pop("object").item() == expected.pop("object").item()
    assert_same(made, expected)
    assert abstract["wide"].on_host and abstract["wide"].dtype == np.int64
    assert not abstract["traced"].on_host
    assert jax.eval_shape(lambda tree: tree["wide"] + 1, {"wide": abstract.tree["wide"]}).shape == (2,)


def test_two_models_do_not_share_a_numpy_array() -> None:
    table = np.arange(3)
    abstract = lm.build_abstract(lambda: {"a": table, "again": table, "w": jnp.ones(2)})
    assert list(abstract) == ["a", "again", "w"]
    first, second = abstract.materialize(), abstract.materialize()
    first["a"][0] = 7
    assert second["a"][0] == table[0] == 0


def test_a_memory_map_stays_one(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.arange(6.0))
    model = lm.build_abstract(lambda: {"t": np.load(tmp_path / "table.npy", mmap_mode="r"), "w": jnp.ones(2)})
    assert isinstance(model.materialize()["t"], np.memmap)


def test_numpy_leaves_on_a_mesh(mesh8: Any) -> None:
    def init(key: Any) -> Any:
        narrow = np.arange(64, dtype=np.float32).reshape(16, 4)
        return {
            "narrow": narrow,
            "other": narrow + 1,
            "wide": np.arange(64) + 2**40,
            "w": jax.random.normal(key, (16,)),
        }

    abstract = lm.build_abstract(init, KEY).shard(mesh8, {"narrow|wide|w": jax.P("model"), "other": jax.P()})
    model = abstract.materialize()
    # A rule that splits one puts it on the devices, except where they would narrow it.
    assert isinstance(model["narrow"], jax.Array)
    assert model["narrow"].sharding.spec == jax.P("model")
    assert np.array_equal(model["narrow"], init(KEY)["narrow"])
    del model["narrow"]
    expected = init(KEY)
    del expected["narrow"]
    assert_same(model, expected)
    assert "jax_enable_x64" in str(abstract.explain("wide"))
    assert abstract.plan().check("1GiB") is not None
    with jax.enable_x64(True):
        split = lm.build_abstract(init, KEY).shard(mesh8, {"narrow|wide|w": jax.P("model")}).materialize()["wide"]
        assert isinstance(split, jax.Array)
        assert np.array_equal(split, init(KEY)["wide"])


def test_a_checkpoint_has_numpy_leaves_too(mesh8: Any, tmp_path: Path) -> None:
    def init() -> Any:
        return {"wide": np.array([1, 2]), "narrow": np.zeros((16, 2), np.float32), "w": jnp.ones(16)}

    values = {"wide": np.array([2**40, 5]), "narrow": np.ones((16, 2), np.float32), "w": np.zeros(16, np.float32)}
    lm.save(values, tmp_path / "model.safetensors")
    checkpoint = lm.open_checkpoint(tmp_path / "model.safetensors")
    reports: list[lm.LoadReport] = []
    model = lm.build_abstract(init).materialize(checkpoint, report=reports.append)
    assert type(model["wide"]) is np.ndarray and type(model["narrow"]) is np.ndarray
    assert_same({**model, "w": None}, {**values, "w": None})
    assert "wide" in str(reports[0])
    sharded = lm.build_abstract(init).shard(mesh8, {"narrow": jax.P("model"), ".*": jax.P()}).materialize(checkpoint)
    assert np.array_equal(sharded["narrow"], values["narrow"])
    lm.save(model, tmp_path / "again.safetensors")
    assert lm.open_checkpoint(tmp_path / "again.safetensors")["wide"].dtype == np.int64
    with pytest.raises(lm.CheckpointError, match=r"'wide'.*shape \(2,\)"):
        lm.build_abstract(init).materialize({**values, "wide": np.array([1, 2, 3])})


def test_numpy_arguments_are_used_as_eager_execution_uses_them() -> None:
    def init(key: Any, table: Any, scale: Any, names: Any) -> Any:
        assert isinstance(table, np.ndarray)
        return {
            "returned": table,
            "in_numpy": table // 2**39,
            "norm": jnp.asarray(np.linalg.norm(table)),
            "converted": jnp.asarray(table % 97),
            "scaled": jax.random.normal(key, (4,)) * scale,
            "names": names,
        }

    arguments = (KEY, np.array([2**40, 3]), np.array(0.3), np.array(["a"]))
    assert_same(lm.build_abstract(init, *arguments).materialize(), init(*arguments))


def test_numpy_arrays_are_not_trained_unless_asked_for() -> None:
    optax = pytest.importorskip("optax")

    def init() -> Any:
        return {"table": np.ones(4, np.float32), "w": jnp.ones(4)}

    abstract = lm.build_abstract(init)
    assert not abstract["table"].trainable
    (_, state) = abstract.with_optimizer(optax.sgd(0.1, momentum=0.9)).materialize()
    assert state[0].trace["table"] is None
    (_, state) = abstract.with_optimizer(optax.sgd(0.1, momentum=0.9), trained=".*").materialize()
    assert state[0].trace["table"].shape == (4,)


# --- at random ------------------------------------------------------------------------------------------------------

LEAVES: list[Any] = [
    lambda key: jnp.full((4,), 2.0),
    lambda key: jnp.asarray(1) + 1,
    lambda key: jax.random.normal(key, (16, 4)),
    lambda key: jax.random.normal(key, (16,)) * 0.3 + 1,
    lambda key: jnp.ones((16,), jnp.bfloat16) * 2.0,
    lambda key: np.full(3, 2**40),
    lambda key: np.full((2, 2), 1e300),
    lambda key: np.float32(0.1),
    lambda key: np.array("text"),
    lambda key: np.asarray(True),
    lambda key: jnp.zeros((0, 2)),
    lambda key: 3.5,
    lambda key: None,
    lambda key: "text",
]


@examples(6, 25, tree=st.recursive(st.sampled_from(LEAVES), lambda t: st.lists(t, max_size=3) | st.tuples(t, t)))
def test_any_leaves_are_those_of_eager_execution(tree: Any) -> None:
    def init(key: Any) -> Any:
        return {"tree": jax.tree.map(lambda leaf: leaf(key), tree), "w": jnp.ones(3)}

    assert_same(lm.build_abstract(init, KEY).materialize(), init(KEY))
