"""What Keras' own callbacks and savers wrote, restored into models that are placed elsewhere; and saving in pieces."""

from __future__ import annotations

import filecmp
import os
import tracemalloc
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel_keras._train import saving
from lazymodel_keras._train.callbacks import _stock_epoch
from lazymodel_keras._train.names import match_paths
from tests.keras.models import BACKBONES, bits, seeded
from tests.keras.versions import KERAS, needs_orbax_callback, parts

pytest.importorskip("orbax.checkpoint")

RULES = {".*up/kernel": P(None, "model"), ".*up/bias": P("model"), ".*down/kernel": P("model", None), ".*": P()}
FORMATS = {
    "orbax": "orbax",
    "orbax step": "orbax/1",
    "keras": "net.keras",
    "weights": "net.weights.h5",
    "sharded": "shards.weights.json",
    "folder": "folder",
}
ORBAX = pytest.param("orbax", marks=needs_orbax_callback)


def net(width: int = 8, optimizer: Any = "adam") -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu", name="up"),
            keras.layers.Dropout(0.1),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(width, name="down"),
        ],
        name="net",
    )
    model.compile(optimizer, "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((32, 16)).astype("f"), rng.standard_normal((32, 8)).astype("f")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, keras.Model]:
    """A trained model in every format that this version of Keras has."""
    folder = tmp_path_factory.mktemp("saved")
    model = seeded(net)
    callbacks = []
    if parts(KERAS) >= (3, 14):
        callbacks = [keras.callbacks.OrbaxCheckpoint(str(folder / "orbax"), max_to_keep=2)]
    model.fit(*data(), batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    model.save(folder / "net.keras")
    model.save(folder / "folder", zipped=False)
    model.save_weights(folder / "net.weights.h5")
    model.save_weights(folder / "shards.weights.json", max_shard_size=3e-6)
    assert len(list(folder.glob("shards*.h5"))) > 1
    return folder, model


def variables(model: keras.Model, *, random: bool = True) -> list[keras.Variable]:
    """The model's, with or without its random states, which only Orbax checkpoints have; and its optimizer's."""
    own = [variable for variable in model.variables if random or "seed_generator" not in variable.path]
    return [*own, *model.optimizer.variables]


def assert_restored(expected: keras.Model, model: keras.Model, *, random: bool = True) -> None:
    for one, other in zip(variables(expected, random=random), variables(model, random=random), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other), err_msg=other.path)
        assert "assign" not in vars(other), "an ordinary variable again"


def into_abstract(path: Path, mesh: Mesh, **options: Any) -> keras.Model:
    return lk.restore(lm.build_abstract(net).shard(mesh, RULES), path, **options)


def in_place(path: Path, mesh: Mesh, **options: Any) -> keras.Model:
    return lk.restore(lm.build_abstract(net).shard(mesh, RULES).materialize(), path, **options)


def in_block(path: Path, mesh: Mesh, report: Any = None, **options: Any) -> keras.Model:
    with lk.deferred(mesh=mesh, rules=RULES, report=report):
        model = net()
        assert lk.restore(model, path, **options) is model
        assert all(variable._value is not None for variable in variables(model)), "restored when it returns"
    return model


def in_build_function(path: Path, mesh: Mesh, report: Any = None, **options: Any) -> keras.Model:
    abstract = lm.build_abstract(lambda: lk.restore(net(), path, **options))
    return abstract.shard(mesh, RULES).materialize(report=report)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((into_abstract, name) for name in FORMATS if "orbax" not in name),
        *(pytest.param(into_abstract, name, marks=needs_orbax_callback) for name in ("orbax", "orbax step")),
        pytest.param(in_place, "orbax", marks=needs_orbax_callback),
        pytest.param(in_block, "orbax", marks=needs_orbax_callback),
        (in_place, "weights"),
        (in_block, "keras"),
        (in_build_function, "sharded"),
    ],
)
def test_everything_on_another_mesh(target: Any, name: str, saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    reports: list[lm.LoadReport] = []
    model = target(folder / FORMATS[name], mesh42, report=reports.append)
    if name == "orbax step":  # the newest of the two is what was saved in the other formats
        source = into_abstract(folder / "orbax", mesh42)
    assert_restored(source, model, random="orbax" in name)
    kernel = model.get_layer("up").kernel
    assert kernel.value.sharding.spec == P(None, "model")
    slot = next(variable for variable in model.optimizer.variables if "up_kernel_momentum" in variable.path)
    assert slot.value.sharding.spec == P(None, "model")
    report = max(reports, key=lambda report: len(report.loaded))
    assert {row.path for row in report.loaded} >= {variable.path for variable in variables(model, random=False)}
    assert report.read_nbytes == report.needed_nbytes == sum(row.nbytes for row in report.loaded)


@needs_orbax_callback
def test_a_step_is_not_the_newest(saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    earlier = into_abstract(folder / "orbax" / "0", mesh42)
    assert int(earlier.optimizer.iterations.value) * 2 == int(source.optimizer.iterations.value)


@pytest.mark.large  # `test_killed` shows the same
@needs_orbax_callback
def test_training_goes_on_as_if_nothing_had_happened(saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    """On another mesh, dropout's random state, the optimizer and its step count included."""
    folder, source = saved
    going_on = seeded(lambda: lk.load_model(folder / "orbax"))
    expected = going_on.fit(*data(), batch_size=16, shuffle=False, verbose=0).history["loss"]
    model = into_abstract(folder / "orbax", mesh42)
    found = model.fit(*data(), batch_size=16, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert int(model.optimizer.iterations.value) == int(source.optimizer.iterations.value) + 2


@pytest.mark.parametrize("name", [ORBAX, "keras", "weights"])
def test_weights_only_into_another_instance(name: str, saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    model = lm.build_abstract(net, optimizer="sgd").shard(mesh42, RULES).materialize()
    random = [bits(variable) for variable in model.variables if "seed_generator" in variable.path]
    lk.restore(model, folder / FORMATS[name], weights_only=True)
    for one, other in zip(source.weights, model.weights, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    assert int(model.optimizer.iterations.value) == 0
    assert [bits(v).tolist() for v in model.variables if "seed_generator" in v.path] == [r.tolist() for r in random]


@pytest.mark.parametrize("name", [ORBAX, "keras"])
def test_load_model(name: str, saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    reports: list[lm.LoadReport] = []
    model = lk.load_model(folder / FORMATS[name], mesh=mesh42, rules=RULES, report=reports.append)
    assert_restored(source, model, random=name == "orbax")
    assert model.get_layer("down").kernel.value.sharding.spec == P("model", None)
    assert sum(len(report.loaded) for report in reports) >= len(variables(model, random=False))
    weights = lk.load_model(folder / FORMATS[name], compile=False)
    np.testing.assert_array_equal(bits(weights.weights[0]), bits(source.weights[0]))
    assert getattr(weights, "optimizer", None) is None


@needs_orbax_callback
def test_unchanged_code_in_a_block(saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    """Stock Keras has Orbax read whole arrays, and leaves what has another path as it is, in silence."""
    folder, source = saved
    with lk.deferred(mesh=mesh42, rules=RULES):
        loaded = keras.saving.load_model(folder / "orbax")
        assert_restored(source, loaded)
        built = net()
        built.load_weights(folder / "orbax")
        assert_restored(source, built)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """Its variables' paths depend on whether it is built by a call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = keras.layers.Dense(16), keras.layers.Dense(8)

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))


@needs_orbax_callback
def test_paths_that_differ_from_those_that_were_saved(tmp_path: Path) -> None:
    keras.layers.Dense(1)  # numbers begin elsewhere in the next program
    model = Subclassed()
    model.compile("adam", "mse")
    model.fit(*data(), verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(str(tmp_path / "saved"))])
    loaded = lk.load_model(tmp_path / "saved")
    assert not {v.path for v in model.variables} & {v.path for v in loaded.variables}
    assert_restored(model, loaded)


def test_matching_paths() -> None:
    automatic = {"dense", "seed_generator"}
    # Equal paths are what they are, however they are numbered.
    assert match_paths(["a/dense_1/kernel"], ["a/dense_1/kernel", "a/dense/kernel"], automatic) == {
        "a/dense_1/kernel": "a/dense_1/kernel"
    }
    # Automatic numbers count in their order only; names that someone chose are left alone.
    assert match_paths(["dense/k", "dense_1/k"], ["dense_10/k", "dense_9/k"], automatic) == {
        "dense/k": "dense_9/k",
        "dense_1/k": "dense_10/k",
    }
    assert match_paths(["layer_1/k"], ["layer_2/k"], automatic) == {}
    # A name in front may be lacking, unless something else would fit as well.
    assert match_paths(["net/up/k", "inner/down/k"], ["up/k", "down/k"], automatic) == {
        "net/up/k": "up/k",
        "inner/down/k": "down/k",
    }
    assert match_paths(["up/k"], ["a/up/k", "b/up/k"], automatic) == {}
    assert match_paths(["a/up/k", "b/up/k"], ["up/k"], automatic) == {}


@given(st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=6), st.integers(0, 100), st.booleans())
def test_numbers_keep_their_order(numbers: list[int], start: int, prefixed: bool) -> None:
    def paths(numbers: list[int], prefix: str) -> list[str]:
        return [f"{prefix}dense_{number}/kernel" if number else f"{prefix}dense/kernel" for number in numbers]

    saved, ours = sorted(numbers), list(range(start, start + len(numbers)))
    found = match_paths(paths(ours, "net/" if prefixed else ""), paths(saved, ""), {"dense"})
    assert list(found.items()) == list(zip(paths(ours, "net/" if prefixed else ""), paths(saved, ""), strict=True))


# What does not fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ORBAX, "weights"])
def test_another_shape_is_an_error_and_changes_nothing(
    name: str, saved: tuple[Path, keras.Model], mesh42: Mesh
) -> None:
    folder, _ = saved
    model = lm.build_abstract(net, 4).shard(mesh42, RULES).materialize()
    before = [bits(variable) for variable in model.variables]
    with pytest.raises(lm.CheckpointError) as raised:
        lk.restore(model, folder / FORMATS[name])
    text = str(raised.value)
    assert "net/down/kernel" in text and "(32, 4)" in text and "(32, 8)" in text and str(folder) in text
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(bits(variable), value)
        assert "assign" not in vars(variable)
    for variable in model.optimizer.variables:  # it was built meanwhile, and can be used
        assert variable._value is not None and len(variable.value.sharding.device_set) == 8
        assert "assign" not in vars(variable)


@pytest.mark.parametrize("name", [ORBAX, "weights"])
def test_a_new_head_is_left_out(name: str, saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    abstract = lm.build_abstract(net, 4).shard(mesh42, RULES)
    with pytest.warns(UserWarning, match=r"net/down/kernel'?: expected shape \(32, 4\), found \(32, 8\)"):
        model = lk.restore(abstract, folder / FORMATS[name], weights_only=True, strict=False)
    np.testing.assert_array_equal(bits(source.get_layer("up").kernel), bits(model.get_layer("up").kernel))
    assert model.get_layer("down").kernel.shape == (32, 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("weights", r"net.weights.h5: expected the 2 variables of optimizer '(?i:sgd).*', found 14.*weights_only=True"),
        pytest.param("orbax", r"no tensor for .*(?i:sgd).*/iteration.*weights_only=True", marks=needs_orbax_callback),
    ],
    ids=["weights", "orbax"],
)
def test_another_optimizer_is_an_error(name: str, expected: str, saved: tuple[Path, keras.Model]) -> None:
    folder, _ = saved
    with pytest.raises(lm.CheckpointError, match=expected):
        lk.restore(net(optimizer="sgd"), folder / FORMATS[name])


@needs_orbax_callback
def test_another_model_is_an_error(saved: tuple[Path, keras.Model]) -> None:
    folder, _ = saved
    longer = net()
    longer.add(keras.layers.Dense(8, name="last"))
    with pytest.raises(lm.CheckpointError, match="has no tensor for 6 variables of 'net': net/last/kernel"):
        lk.restore(longer, folder / "orbax")
    shorter = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, name="up")], name="net")
    with pytest.raises(lm.CheckpointError, match="holds 7 tensors that 'net' has no variable for: non_trainable"):
        lk.restore(shorter, folder / "orbax")


def test_what_cannot_be_restored(tmp_path: Path, saved: tuple[Path, keras.Model]) -> None:
    folder, _ = saved
    with pytest.raises(lm.LazyModelError, match="'unbuilt': it has no variables yet. Build it first"):
        lk.restore(Subclassed(name="unbuilt"), folder / "net.weights.h5")
    with pytest.raises(lm.CheckpointError, match="nothing does not exist"):
        lk.restore(net(), tmp_path / "nothing")
    abstract = lm.build_abstract(net)
    abstract.materialize()
    with pytest.raises(lm.LazyModelError, match="not materialized yet"):
        lk.restore(abstract, folder / "net.weights.h5")
    (tmp_path / "broken.weights.h5").write_bytes((folder / "net.weights.h5").read_bytes()[:3000])
    with pytest.raises(lm.CheckpointError, match=r"broken.weights.h5"):
        lk.restore(net(), tmp_path / "broken.weights.h5")


@needs_orbax_callback
def test_a_checkpoint_of_weights_only(tmp_path: Path) -> None:
    weights = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "weights"), save_weights_only=True)
    net().fit(*data(), verbose=0, callbacks=[weights])
    with pytest.raises(lm.CheckpointError, match=r"expected the configuration of a model.*save_weights_only"):
        lk.load_model(tmp_path / "weights")
    model = lk.restore(net(), tmp_path / "weights")
    assert not model.optimizer.built, "there is nothing to restore it from"


# Where training was ---------------------------------------------------------------------------------------------------


class Batches:
    """A data iterator whose state can be taken and set, as Grain's."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.position)
        self.position += 1
        return rng.standard_normal((4, 16)).astype("f"), rng.standard_normal((4, 8)).astype("f")

    def get_state(self) -> bytes:
        return b"%d" % self.position

    def set_state(self, state: bytes) -> None:
        self.position = int(state)


@needs_orbax_callback
def test_epoch_data_and_metadata_are_saved_with_a_step(tmp_path: Path) -> None:
    model, batches = seeded(net), Batches()
    asked: list[int] = []

    def metadata() -> dict[str, Any]:
        asked.append(1)
        return {"run": "a", "saves": len(asked)}

    # Keras takes batches from a stream before it trains on them; what is saved is what was trained on.
    callback = lk.TrainingCheckpoint(tmp_path / "saved", metadata=metadata, save_freq=1, max_to_keep=None)
    model.fit(callback.data(batches), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    states = [lk.training_state(tmp_path / "saved" / str(step)) for step in range(1, 7)]
    assert [(s.epoch, s.batch) for s in states] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert [s.data for s in states] == [b"%d" % count for count in range(1, 7)]
    assert [s.metadata for s in states] == [{"run": "a", "saves": count} for count in range(1, 7)]
    assert lk.training_state(tmp_path / "saved") == states[-1]
    assert (states[-1].step, states[-1].path) == (6, str(tmp_path / "saved" / "6"))
    assert_restored(model, lk.restore(lm.build_abstract(net), tmp_path / "saved"))


@needs_orbax_callback
def test_where_the_stock_callback_was(saved: tuple[Path, keras.Model]) -> None:
    folder, _ = saved
    state = lk.training_state(folder / "orbax")
    assert (state.step, state.epoch, state.batch, state.metadata, state.data) == (1, 2, 0, {}, None)
    assert _stock_epoch(step=4, updates=4) is None, "batches, of nobody knows which epoch"
    assert _stock_epoch(step=4, updates=0) is None, "nothing was trained"
    assert _stock_epoch(step=4, updates=15) == 5


@needs_orbax_callback
def test_what_cannot_be_saved_with_a_step(tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match=r"expected an iterator with get_state\(\)"):
        lk.TrainingCheckpoint(tmp_path / "a").data(iter([]))
    callback = lk.TrainingCheckpoint(tmp_path / "b", metadata={"x": object()})
    callback.set_model(net())
    with pytest.raises(lm.LazyModelError, match="types that JSON has"):
        callback.on_epoch_end(0)
    lm.save({"a": np.ones(3)}, tmp_path / "c.safetensors")
    with pytest.raises(lm.CheckpointError, match="expected a step that a callback for training saved, found"):
        lk.training_state(tmp_path / "c.safetensors")


# Saving ---------------------------------------------------------------------------------------------------------------


def test_saving_copies_a_few_bytes_at_a_time(tmp_path: Path, mesh42: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_SLAB", 1 << 14)
    width, layers = 512, 8

    def wide() -> keras.Model:
        shape = keras.layers.Dense(width, use_bias=False)
        return keras.Sequential(
            [
                keras.Input((width,)),
                *(keras.layers.Dense(**shape.get_config() | {"name": f"d{i}"}) for i in range(layers)),
                keras.layers.Dense(width, use_bias=False, dtype="bfloat16", name="half"),
            ]
        )

    def save_and_measure(path: Path) -> tuple[int, int]:
        model = lm.build_abstract(wide).shard(mesh42, lambda variable: P(None, "model")).materialize()
        tracemalloc.start()
        save(model, path)
        current, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return current, peak

    def save(model: keras.Model, path: Path) -> None:
        model.save_weights(path, **({"max_shard_size": 2e-3} if path.suffix == ".json" else {}))

    one, whole = width * width * 4, (layers * 4 + 2) * width * width
    seeded(lambda: save_and_measure(tmp_path / "stock.weights.h5"))
    for name in ("ours.weights.h5", "ours.weights.json"):
        with lk.streamed_saving():
            current, peak = seeded(lambda name=name: save_and_measure(tmp_path / name))
        assert current < one and peak < one
    assert filecmp.cmp(tmp_path / "stock.weights.h5", tmp_path / "ours.weights.h5", shallow=False)
    assert seeded(lambda: save_and_measure(tmp_path / "again.weights.h5"))[0] > whole, "stock keeps one"


def test_presets_and_whole_models_are_saved_in_pieces(
    tmp_path: Path, saved: tuple[Path, keras.Model], mesh42: Mesh
) -> None:
    cls, config = BACKBONES["bert"]

    def rules(variable: lm.AbstractVariable) -> P:
        fits = variable.shape and variable.shape[-1] % 2 == 0
        return P(*[None] * (len(variable.shape) - 1), "model") if fits else P()

    model = lm.build_abstract(cls, **config).shard(mesh42, rules).materialize()
    _, trained = saved
    with lk.streamed_saving():
        model.save_to_preset(str(tmp_path / "ours"))
        trained.save(tmp_path / "net.keras")
    model.save_to_preset(str(tmp_path / "stock"))
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "stock"))
    for name in ("model.weights.h5", "config.json"):
        assert filecmp.cmp(tmp_path / "ours" / name, tmp_path / "stock" / name, shallow=False)
    assert_restored(trained, keras.saving.load_model(tmp_path / "net.keras"), random=False)
