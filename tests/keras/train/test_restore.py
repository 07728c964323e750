"""What Keras' own callbacks and savers, and `lm.save`, wrote of a trained model, restored wherever one is placed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import Words, assert_same_values, bits, seeded, state_of
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
            keras.layers.BatchNormalization(dtype="bfloat16"),
            Words(),
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


@needs_orbax_callback
def test_names_and_values_are_the_variables(saved: tuple[Path, keras.Model], tmp_path: Path) -> None:
    """In what the stock callback saves, and in what `lm.save` does of the model and its optimizer."""
    folder, model = saved
    lm.save(model, tmp_path / "net")
    collections = {
        "trainable_variables": model.trainable_variables, "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables, "metrics_variables": model.metrics_variables,
    }  # fmt: skip
    expected = {f"{name}/{v.path}": v for name, variables in collections.items() for v in variables}
    assert "trainable_variables/net/up/kernel" in expected
    with lm.open_checkpoint(folder / "orbax") as orbax, lm.open_checkpoint(tmp_path / "net") as plain:
        assert orbax.item == str(folder / "orbax" / "1" / "pytree") and (folder / "orbax" / "1" / "assets").is_dir()
        assert set(orbax) == set(expected)
        assert set(plain) == {v.path for v in variables(model)} | {v.path for v in model.metrics_variables}
        for name, variable in expected.items():
            for tensor in (orbax[name], plain[variable.path]):
                assert (tensor.shape, tensor.dtype.name) == (tuple(variable.shape), variable.dtype)
                assert tensor.read().tobytes() == np.asarray(variable.value).tobytes()
        abstract = seeded(lambda: lm.build_abstract(net))
        again = abstract.materialize({path: plain[path] for path in abstract}, initialize="nothing")
    assert_same_values(model.variables, again.variables)


def variables(model: keras.Model, *, random: bool = True) -> list[keras.Variable]:
    """The model's, with or without its random states, which only Orbax checkpoints have; and its optimizer's."""
    own = [variable for variable in model.variables if random or "seed_generator" not in variable.path]
    return [*own, *model.optimizer.variables]


def assert_restored(expected: keras.Model, model: keras.Model, *, random: bool = True) -> None:
    assert_same_values(variables(expected, random=random), variables(model, random=random))


def into_abstract(path: Path, mesh: Mesh, **options: Any) -> keras.Model:
    return lk.restore(lm.build_abstract(net).shard(mesh, RULES), path, **options)


def in_place(path: Path, mesh: Mesh, **options: Any) -> keras.Model:
    return lk.restore(lm.build_abstract(net).shard(mesh, RULES).materialize(), path, **options)


def restored_net(path: Path, **options: Any) -> keras.Model:
    model = net()
    assert lk.restore(model, path, **options) is model
    return model


def in_a_block(path: Path, mesh: Mesh, report: Any = None, **options: Any) -> keras.Model:
    with lk.deferred(mesh=mesh, rules=RULES, report=report):
        model = restored_net(path, **options)
        assert all(variable._value is not None for variable in state_of(model)), "restored when it returns"
    return model


def in_build_function(path: Path, mesh: Mesh, report: Any = None, **options: Any) -> keras.Model:
    return lm.build_abstract(restored_net, path, **options).shard(mesh, RULES).materialize(report=report)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((into_abstract, name) for name in FORMATS if "orbax" not in name),
        *(pytest.param(into_abstract, name, marks=needs_orbax_callback) for name in ("orbax", "orbax step")),
        pytest.param(in_place, "orbax", marks=needs_orbax_callback),
        pytest.param(in_a_block, "orbax", marks=needs_orbax_callback),
        (in_place, "weights"),
        (in_a_block, "keras"),
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


@pytest.mark.parametrize("name", [ORBAX, "keras", "weights"])
def test_weights_only_into_another_instance(name: str, saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    model = lm.build_abstract(net, optimizer="sgd").shard(mesh42, RULES).materialize()
    random = [bits(variable) for variable in model.variables if "seed_generator" in variable.path]
    lk.restore(model, folder / FORMATS[name], weights_only=True)
    assert_same_values(source.weights, model.weights)
    assert int(model.optimizer.iterations.value) == 0
    assert [bits(v).tolist() for v in model.variables if "seed_generator" in v.path] == [r.tolist() for r in random]


@pytest.mark.parametrize(
    "name",
    [
        ORBAX,
        pytest.param(
            "keras",
            marks=pytest.mark.skipif(
                (3, 13) <= sys.version_info < (3, 13, 2), reason="zipfile of 3.13.0 loses its place (cpython gh-127847)"
            ),
        ),
    ],
)
def test_load_model(name: str, saved: tuple[Path, keras.Model], mesh42: Mesh) -> None:
    folder, source = saved
    reports: list[lm.LoadReport] = []
    model = lk.load_model(folder / FORMATS[name], mesh=mesh42, rules=RULES, report=reports.append)
    assert_restored(source, model, random=name == "orbax")
    assert model.get_layer("down").kernel.value.sharding.spec == P("model", None)
    assert sum(len(report.loaded) for report in reports) >= len(variables(model, random=False))
    assert model.layers[3].words == "d e f"
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


NAMES = {
    # Automatic numbers count in their order only; equal paths are what they are, and names that someone chose as well.
    "order": (["dense", "dense_1"], ["net/dense_9", "net/dense_10"], True),
    "many": (["dense_3", "dense_4", "dense_11"], ["net/dense", "net/dense_2", "net/dense_10"], True),
    "equal": (["dense_1", "dense_2"], ["net/dense_1", "net/dense_2"], True),
    "chosen": (["layer_1"], ["net/layer_2"], False),
    # A name in front may be missing or be another one, unless something else would fit as well.
    "in front": (["up", "dense_5"], ["up", "dense_2"], True),
    "longer": (["up", "dense_5"], ["outer/net/up", "outer/net/dense_2"], True),
    "two fit": (["up"], ["a/net/up", "b/net/up"], False),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_that_differ_from_those_that_were_saved(case: str, tmp_path: Path) -> None:
    ours, saved, fits = NAMES[case]
    layers = [keras.layers.Dense(4, use_bias=False, name=name) for name in ours]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    kernels = {name: np.full((4, 4), number, "f") for number, name in enumerate(saved)}
    lm.save({f"trainable_variables/{name}/kernel": kernel for name, kernel in kernels.items()}, tmp_path)
    with contextlib.nullcontext() if fits else pytest.raises(lm.CheckpointError, match="has no tensor for 1 variables"):
        lk.restore(model, tmp_path)
        for layer, kernel in zip(layers, kernels.values(), strict=True):
            np.testing.assert_array_equal(layer.kernel, kernel)


# What does not fit ----------------------------------------------------------------------------------------------------


def longer() -> keras.Model:
    model = net()
    model.add(keras.layers.Dense(8, name="last"))
    return model


def shorter() -> keras.Model:
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, name="up")], name="net")


OTHER_SHAPE = r"(?s)(?=.*net/down/kernel)(?=.*\(32, 4\))(?=.*\(32, 8\))"
OTHER_OPTIMIZER = "(?i:sgd).*weights_only=True"
MISFITS: dict[str, tuple[str, Any, str]] = {
    "another shape in a file": ("net.weights.h5", lambda: net(4), OTHER_SHAPE),
    "another shape": ("orbax", lambda: net(4), OTHER_SHAPE),
    "another optimizer in a file": ("net.weights.h5", lambda: net(optimizer="sgd"), f"2 variables.*{OTHER_OPTIMIZER}"),
    "another optimizer": ("orbax", lambda: net(optimizer="sgd"), f"no tensor for .*{OTHER_OPTIMIZER}"),
    "a layer more": ("orbax", longer, "6 variables of 'net': net/last/kernel"),
    "layers less": ("orbax", shorter, "7 tensors that 'net'.*non_trainable"),
    "no file": ("nothing", net, "nothing does not exist"),
    "a broken file": ("broken.weights.h5", net, "broken.weights.h5"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_orbax_callback if MISFITS[case][0] == "orbax" else ()) for case in MISFITS]
)
def test_what_does_not_fit_is_an_error_and_changes_nothing(
    case: str, saved: tuple[Path, keras.Model], mesh42: Mesh
) -> None:
    folder, _ = saved
    name, make, message = MISFITS[case]
    (folder / "broken.weights.h5").write_bytes((folder / "net.weights.h5").read_bytes()[:3000])
    model = lm.build_abstract(make).shard(mesh42, lambda variable: P()).materialize()
    before = [bits(variable).tolist() for variable in model.variables]
    with pytest.raises(lm.CheckpointError, match=message) as raised:
        lk.restore(model, folder / name)
    assert str(folder / name) in str(raised.value)
    assert [bits(variable).tolist() for variable in model.variables] == before
    slots = getattr(getattr(model, "optimizer", None), "variables", ())  # it may have been built meanwhile
    for variable in (*model.variables, *slots):
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


def test_models_that_nothing_is_restored_into(saved: tuple[Path, keras.Model]) -> None:
    file = saved[0] / "net.weights.h5"
    with pytest.raises(lm.LazyModelError, match="'unbuilt': it has no variables yet. Build it first"):
        lk.restore(Subclassed(name="unbuilt"), file)
    abstract = lm.build_abstract(net)
    abstract.materialize()
    with pytest.raises(lm.LazyModelError, match="not materialized yet"):
        lk.restore(abstract, file)


@needs_orbax_callback
def test_a_checkpoint_of_weights_only(tmp_path: Path) -> None:
    weights = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "weights"), save_weights_only=True)
    net().fit(*data(), verbose=0, callbacks=[weights])
    with lm.open_checkpoint(tmp_path / "weights") as checkpoint:
        assert {name.partition("/")[0] for name in checkpoint} == {"trainable_variables", "non_trainable_variables"}
    with pytest.raises(lm.CheckpointError, match=r"expected the configuration of a model.*save_weights_only"):
        lk.load_model(tmp_path / "weights")
    model = lk.restore(net(), tmp_path / "weights")
    assert not model.optimizer.built, "there is nothing to restore it from"


def test_keras_own_file_as_a_checkpoint(tmp_path: Path) -> None:
    """Its names are positions, so the error names the function that reads it, rather than renaming."""
    file = tmp_path / "model.weights.h5"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="a")], name="m")
    model.save_weights(file)
    abstract = lm.build_abstract(lambda: keras.models.clone_model(model))
    with pytest.raises(lm.CheckpointError, match="load it with lazymodel_keras.restore") as caught:
        abstract.materialize(lm.open_checkpoint(file))
    assert "suggest" not in str(caught.value)
    assert_same_values(model.variables, lk.restore(abstract, file).variables)


def test_parameters_are_those_of_the_model() -> None:
    """Metrics and optimizers are none."""

    def trained() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
        model.compile("adam", "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
        return model

    assert lm.build_abstract(trained).num_parameters == trained().count_params() == 4 * 2 + 2 + 4 * 2
