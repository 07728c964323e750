"""The main path without a framework: build, shard, plan, materialize, with and without a checkpoint."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.core.materialize._variables import Recorder

Model = lm.AbstractModel[Any]

KEY = jax.random.key(3)
RULES = {r"layers/\d+/kernel": P(None, "model"), "embedding": P("model"), ".*bias": P(), "steps": P()}


def init(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(keys[0], (64, 16)),
        "layers": [{"kernel": jax.random.normal(k, (16, 32)) * 0.1, "bias": jnp.zeros((32,))} for k in keys[1:]],
        "steps": jnp.zeros((), jnp.int32),
    }


def checkpoint(
    folder: Path, *, without: tuple[str, ...] = (), **extra: np.ndarray
) -> tuple[Path, dict[str, np.ndarray]]:
    """A safetensors file with a value for every variable of `init`."""
    rng = np.random.default_rng(0)
    tensors = {
        "embedding": rng.standard_normal((64, 16)).astype("float32"),
        "steps": np.array(7, "int32"),
        **{f"layers/{i}/kernel": rng.standard_normal((16, 32)).astype("float32") for i in range(3)},
        **{f"layers/{i}/bias": rng.standard_normal(32).astype("float32") for i in range(3)},
        **extra,
    }
    tensors = {name: value for name, value in tensors.items() if name not in without}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors", tensors


def assert_tree(expected: Any, found: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.fixture(scope="module")
def abstract() -> Model:
    return lm.build_abstract(init, KEY)


@pytest.fixture
def sharded(abstract: Model, mesh8: Mesh) -> Model:
    return abstract.shard(mesh8, RULES)


def test_initializing_equals_eager(abstract: Model, sharded: Model, mesh8: Mesh) -> None:
    assert abstract.num_parameters == 64 * 16 + 3 * (16 * 32 + 32)
    assert abstract.nbytes == abstract.num_parameters * 4 + 4
    assert_tree(init(KEY), abstract.materialize())
    model = sharded.materialize()
    assert_tree(init(KEY), model)
    assert model["embedding"].sharding == NamedSharding(mesh8, P("model"))
    assert model["layers"][1]["kernel"].sharding.spec == P(None, "model")


def test_the_model_is_an_immutable_mapping(abstract: Model, sharded: Model) -> None:
    assert list(abstract)[:2] == ["embedding", "layers/0/bias"]
    assert abstract["embedding"].shape == (64, 16)
    with pytest.raises(KeyError, match="closest: 'embedding'"):
        abstract["embeding"]
    with pytest.raises(TypeError):
        abstract.variables["x"] = abstract["embedding"]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(AttributeError):
        abstract.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert abstract["embedding"].sharding is None
    assert sharded["embedding"].shard_nbytes == abstract["embedding"].nbytes // 8
    lowered = jax.jit(lambda tree: tree["embedding"].sum()).lower(sharded.tree)
    assert "sdy.sharding" in lowered.as_text()


def test_streaming_reads_each_shard_once(tmp_path: Path, mesh8: Mesh) -> None:
    path, tensors = checkpoint(tmp_path)
    sharded = lm.build_abstract(init, KEY).shard(mesh8, RULES)
    ckpt = lm.open_checkpoint(path)
    reports: list[lm.LoadReport] = []
    model = sharded.materialize(ckpt, report=reports.append)
    assert reports[0].read_nbytes == sum(t.nbytes for t in tensors.values()) == sharded.plan(ckpt).read_nbytes
    np.testing.assert_array_equal(model["layers"][2]["kernel"], tensors["layers/2/kernel"])
    assert int(model["steps"]) == 7
    assert sharded.programs.compiled == len(sharded.programs) == 0, "nothing was drawn to be thrown away"
    path.write_bytes(b"\0" * path.stat().st_size)
    np.testing.assert_array_equal(model["embedding"], tensors["embedding"])
    path, _ = checkpoint(tmp_path)
    small = sharded.materialize(lm.open_checkpoint(path), max_host_memory="4KiB")
    np.testing.assert_array_equal(small["embedding"], tensors["embedding"])


def test_what_the_checkpoint_lacks_is_initialized(tmp_path: Path, sharded: Model) -> None:
    path, tensors = checkpoint(tmp_path, without=("layers/2/kernel", "layers/2/bias"))
    ckpt = lm.open_checkpoint(path)
    with pytest.warns(lm.LazyModelWarning, match=r"no tensor for 2 of 8 variables: layers/2/bias, layers/2/kernel"):
        model = sharded.materialize(ckpt)
    np.testing.assert_array_equal(model["layers"][2]["kernel"], init(KEY)["layers"][2]["kernel"])
    np.testing.assert_array_equal(model["layers"][1]["kernel"], tensors["layers/1/kernel"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded.materialize(ckpt, initialize="missing")
        assert_tree(init(KEY), sharded.materialize(ckpt, initialize="all"))
    with pytest.raises(lm.CheckpointError, match=r"model\.safetensors has no tensor for 2 of 8.*initialize='missing'"):
        sharded.materialize(ckpt, initialize="nothing")
    with pytest.raises(lm.CheckpointError, match="initialize='nothing' leaves 'embedding'"):
        sharded.materialize(initialize="nothing")
    with pytest.raises(lm.CheckpointError, match="initialize is 'missing'"):
        sharded.materialize(initialize="some")


def test_unexpected_tensors(tmp_path: Path, abstract: Model) -> None:
    path, _ = checkpoint(tmp_path, **{f"extra_{i}": np.zeros(2, "float32") for i in range(9)})
    ckpt = lm.open_checkpoint(path)
    with pytest.raises(lm.CheckpointError, match=r"9 tensors that init has no variable for: 'extra_0'"):
        abstract.materialize(ckpt)
    with pytest.warns(lm.LazyModelWarning, match=r"9 tensors .*: 'extra_0', .*'extra_7' and 1 more$") as caught:
        abstract.materialize(ckpt, strict=False)
    (warning,) = caught
    assert str(warning.message).startswith(f"checkpoint {path}: strict=False leaves out 9 tensors")
    assert warning.filename == __file__, "it points to the caller's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        abstract.plan(ckpt)
        abstract.materialize(ckpt, initialize="all", strict=False)
    path, _ = checkpoint(tmp_path, **{"layers/3/kernel": np.zeros((2, 2), "float32")})
    with pytest.raises(lm.CheckpointError, match=r"1 tensor .*: 'layers/3/kernel'; closest"):
        abstract.materialize(lm.open_checkpoint(path))


def test_another_shape_is_refused_before_anything_is_read(tmp_path: Path, abstract: Model) -> None:
    path, _ = checkpoint(tmp_path, embedding=np.zeros((60, 16), "float32"))
    ckpt = lm.open_checkpoint(path)
    (row,) = [row for row in abstract.plan(ckpt).rows if row.path == "embedding"]
    assert (row.action, row.source) == ("initialize", "normal; shape (60, 16) of the checkpoint does not match")
    path.unlink()  # which reading would find
    for options in ({}, {"strict": False, "initialize": "nothing"}):
        with pytest.raises(lm.CheckpointError, match=r"'embedding': expected shape \(64, 16\), found \(60, 16\) in"):
            abstract.materialize(ckpt, **options)


def test_another_shape_is_left_out_unless_strict(tmp_path: Path, mesh8: Mesh, sharded: Model) -> None:
    """One warning for all that is left out; the variable gets its initial value."""
    path, tensors = checkpoint(
        tmp_path, without=("layers/1/bias",), embedding=np.zeros((60, 16), "float32"), other=np.zeros(2, "float32")
    )
    ckpt = lm.open_checkpoint(path)
    with pytest.warns(lm.LazyModelWarning) as caught:
        model = sharded.materialize(ckpt, strict=False, initialize="missing")
    (left_out,) = [str(warning.message) for warning in caught]
    for part in ("1 tensor that init has no variable for: 'other'", "1 tensor of another shape", str(path)):
        assert part in left_out
    assert "'embedding': expected shape (64, 16), found (60, 16) in tensor 'embedding'" in left_out
    np.testing.assert_array_equal(model["embedding"], init(KEY)["embedding"])
    assert model["embedding"].sharding == NamedSharding(mesh8, P("model"))
    np.testing.assert_array_equal(model["layers"][0]["kernel"], tensors["layers/0/kernel"])
    with pytest.warns(lm.LazyModelWarning) as caught:
        sharded.materialize(ckpt, strict=False)
    first, second = [str(warning.message) for warning in caught]
    assert first == left_out and "no tensor for 1 of 8 variables: layers/1/bias." in second


def test_a_mapping_of_arrays_is_a_checkpoint(abstract: Model, mesh42: Mesh) -> None:
    values = jax.tree.map(np.asarray, init(jax.random.key(9)))
    flat = {"embedding": values["embedding"], "steps": values["steps"]}
    for i, layer in enumerate(values["layers"]):
        flat |= {f"layers/{i}/{name}": value for name, value in layer.items()}
    assert_tree(values, abstract.shard(mesh42, RULES).materialize(flat))


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, None, 2.5], object),
        np.array(["1", "2", "3"]),
        np.array([b"1", b"2", b"3"]),
        np.array([1, 2, 3], "M8[s]"),
        np.zeros(3, [("a", "f4")]),
        np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False]),
    ],
    ids=lambda value: "masked" if np.ma.is_masked(value) else value.dtype.kind,
)
@pytest.mark.parametrize("cast", ["safe", "unsafe"])
def test_what_is_no_array_of_numbers_is_refused(value: np.ndarray, cast: str) -> None:
    abstract = lm.build_abstract(lambda key: {"b": jax.random.normal(key, (3,))}, jax.random.key(0))
    with pytest.raises(lm.CheckpointError, match="'b': expected numbers, found "):
        abstract.materialize({"b": value}, cast=cast)


def test_prng_keys_initialize_and_load(mesh8: Mesh) -> None:
    def keyed(key: jax.Array) -> dict[str, jax.Array]:
        return {"key": jax.random.split(key, 8), "w": jax.random.normal(key, (8, 8))}

    abstract = lm.build_abstract(keyed, jax.random.key(1)).shard(mesh8, {".*": P("model")})
    model = abstract.materialize()
    assert model["key"].dtype == jax.random.key(0).dtype
    assert jnp.array_equal(jax.random.key_data(model["key"]), jax.random.key_data(keyed(jax.random.key(1))["key"]))
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(2), 8)))
    loaded = abstract.materialize({"key": data}, initialize="missing")
    np.testing.assert_array_equal(jax.random.key_data(loaded["key"]), data)
    with pytest.raises(lm.CheckpointError, match=r"'key': expected shape \(8, 2\), found \(4, 2\) in tensor 'key'"):
        abstract.materialize({"key": data[:4]}, initialize="missing")
    with pytest.warns(lm.LazyModelWarning, match=r"'key': expected shape \(8, 2\), found \(4, 2\) in tensor 'key'$"):
        left_out = abstract.materialize({"key": data[:4]}, initialize="missing", strict=False)
    assert jnp.array_equal(jax.random.key_data(left_out["key"]), jax.random.key_data(model["key"]))


def test_plan_predicts_what_is_materialized(tmp_path: Path, mesh8: Mesh) -> None:
    path, _ = checkpoint(tmp_path, without=("layers/2/kernel",))
    sharded = lm.build_abstract(init, KEY).shard(mesh8, RULES)
    plan = sharded.plan(lm.open_checkpoint(path))
    actions = {row.path: row.action for row in plan.rows}
    assert (actions["layers/2/kernel"], actions["layers/1/kernel"]) == ("initialize", "load")
    model = sharded.materialize(lm.open_checkpoint(path), initialize="missing")
    held = dict.fromkeys(mesh8.devices.flat, 0)
    for array in jax.tree.leaves(model):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert plan.device_nbytes == max(held.values())
    assert plan.peak_nbytes >= plan.device_nbytes
    assert (plan.num_devices, plan.programs, plan.fits) == (8, 1, None)


def test_plan_counts_temporaries_of_init_programs(mesh8: Mesh) -> None:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (512, 512))}

    plan = lm.build_abstract(init, KEY).shard(mesh8, {"w": P("model")}).plan(device_memory="1GiB")
    memory = jax.jit(init, out_shardings=NamedSharding(mesh8, P("model"))).lower(KEY).compile().memory_analysis()
    assert plan.device_nbytes == 512 * 512 * 4 // 8
    assert plan.peak_nbytes == plan.device_nbytes + cast(Any, memory).temp_size_in_bytes > plan.device_nbytes
    assert plan.fits
    assert plan.check() is plan
    with pytest.raises(lm.DoesNotFitError, match=r"on a device.* 1\.00 KiB.*Largest on a device: w"):
        plan.check("1KiB")


def test_progress_moves_within_a_large_variable() -> None:
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (1024, 1024, 9))}, KEY)
    seen: list[int] = []
    abstract.materialize({"w": np.zeros((1024, 1024, 9), "float32")}, progress=lambda done, _: seen.append(done))
    assert len(seen) > 2 and seen == sorted({*seen}), "every call tells of more"
    assert (seen[0], seen[-1]) == (0, 1024 * 1024 * 9 * 4)


def test_a_progress_object_is_told_names_and_bytes(tmp_path: Path, sharded: Model) -> None:
    path, _ = checkpoint(tmp_path, without=("layers/2/kernel",))
    recorder = Recorder()
    sharded.materialize(lm.open_checkpoint(path), initialize="missing", progress=recorder)
    first, *middle, last = recorder.calls
    assert first == ("start", sharded.nbytes, "init: materializing 8 variables")
    assert last == ("finish", 0, None)
    assert {kind for kind, _, _ in middle} == {"advance"}
    assert sum(nbytes for _, nbytes, _ in middle) == sharded.nbytes
    assert sorted(name for _, _, name in middle if name) == sorted(sharded)


@pytest.mark.parametrize("fails_at", [1, 4])
def test_what_progress_raises_comes_out_as_it_is(tmp_path: Path, abstract: Model, fails_at: int) -> None:
    """Also from the threads of the stream, whose own failures are about tensors."""

    class Cancelled(Exception):
        pass

    class Impatient(Recorder):
        def advance(self, nbytes: int, description: str | None = None) -> None:
            super().advance(nbytes, description)
            if len(self.calls) > fails_at:
                raise Cancelled

    path, _ = checkpoint(tmp_path, without=("layers/2/kernel",))
    recorder = Impatient()
    with pytest.raises(Cancelled):
        abstract.materialize(lm.open_checkpoint(path), initialize="missing", progress=recorder)
    assert recorder.calls[-1] == ("finish", 0, None)


def test_layers_that_the_checkpoint_lacks_are_one_range() -> None:
    def layers(key: jax.Array) -> list[dict[str, jax.Array]]:
        return [{"kernel": jax.random.normal(k, (4, 4)), "bias": jax.numpy.zeros(4)} for k in jax.random.split(key, 40)]

    values = {f"{n}/{name}": np.zeros(s, "float32") for n in range(30) for name, s in (("kernel", (4, 4)), ("bias", 4))}
    with pytest.raises(
        lm.CheckpointError, match=r"no tensor for 20 of 80 variables: \{30\.\.39\}/bias, \{30\.\.39\}/kernel"
    ):
        lm.build_abstract(layers, jax.random.key(0)).materialize(values, initialize="nothing")


# --- garbage ----------------------------------------------------------------------------------------------------------


class Cycle:
    """Refers to itself, as a Keras model does: when it is deleted, its array lives until garbage is collected."""

    def __init__(self) -> None:
        self.array, self.own = jnp.zeros(8), self


@pytest.mark.parametrize("available", [1, 1 << 50])
def test_deleted_models_make_room_if_memory_is_short(
    sharded: Model, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr("lazymodel._materialize.materialize.available_memory", lambda: available)
    gc.collect()
    gc.disable()
    try:
        left = weakref.ref(Cycle())
        sharded.materialize()
        assert (left() is None) == (available == 1)
    finally:
        gc.enable()


def test_no_full_collection_while_a_model_is_built_and_loaded(tmp_path: Path, mesh8: Mesh) -> None:
    before, during = gc.get_threshold(), list[tuple[int, int, int]]()

    def watched(key: jax.Array) -> dict[str, Any]:
        during.append(gc.get_threshold())
        return init(key)

    abstract = lm.build_abstract(watched, KEY).shard(mesh8, RULES)
    assert gc.get_threshold() == before
    path, _ = checkpoint(tmp_path)
    abstract.materialize(lm.open_checkpoint(path), progress=lambda *_: during.append(gc.get_threshold()))
    assert len(during) > 1 and set(during) == {(*before[:2], 1 << 20)}
    assert gc.get_threshold() == before


def test_the_thresholds_of_garbage_come_back_after_loads_that_overlap(tmp_path: Path, abstract: Model) -> None:
    before = gc.get_threshold()
    first, second = threading.Event(), threading.Event()

    def outer(*_: int) -> None:
        first.set()
        assert second.wait(30)

    thread = threading.Thread(target=lambda: abstract.materialize(progress=outer))
    thread.start()
    assert first.wait(30)
    abstract.materialize()  # begins and ends while the other one is under way
    assert gc.get_threshold() != before
    second.set()
    thread.join()
    assert gc.get_threshold() == before
