"""LoRA pairs merged into the weights of finished models: values, placement, and a model as if it never had pairs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.compile_events import compile_events
from tests.keras.models import bits, device_mesh, distribution, inputs_of, outputs_of, preset_of
from tests.large import mostly_large

pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Invalid quantization mode. Expected one of:UserWarning"),
]

GemmaCausalLM = keras_hub.models.GemmaCausalLM
ALL = ".*/(kernel|embeddings)"
RULES = {r".*attention/(query|key|value)/kernel": P("model"), "token_embedding/embeddings": P("model")}


def randomize_pairs(model: Any, alpha: int | None = None) -> Any:
    """Gives every pair values as after training, and with `alpha` another scale than 1."""
    rng = np.random.default_rng(5)
    for variable in model.variables:
        if "lora" in variable.path:
            variable.assign(rng.standard_normal(variable.shape) / 3)
    for layer in model._flatten_layers():
        if alpha is not None and getattr(layer, "lora_enabled", False):
            layer.lora_alpha = alpha
    return model


def described(model: Any) -> list[Any]:
    return [(v.path, v.shape, v.dtype, v.trainable) for v in model.variables]


def every_kind() -> Any:
    """All layers of Keras that have LoRA; one is used twice."""
    tokens = keras.Input((8,), dtype="int32")
    embedded = keras.layers.Embedding(64, 16, name="embedding")(tokens)
    reversible = keras.layers.ReversibleEmbedding(64, 16, name="reversible")
    x = keras.layers.add([embedded, reversible(tokens)])
    x = keras.layers.Conv1D(16, 3, padding="same", name="conv")(x)
    x = keras.layers.EinsumDense("btd,dnh->btnh", (None, 4, 8), bias_axes="nh", name="heads")(x)
    x = keras.layers.Reshape((8, 32))(x)
    shared = keras.layers.Dense(32, name="shared")
    x = keras.layers.Dense(16, use_bias=False, name="dense")(shared(shared(x)))
    return keras.Model(tokens, reversible(x, reverse=True))


@pytest.mark.parametrize("dtype", mostly_large(["float32", "bfloat16"], ["float32"]))
def test_values_and_outputs(dtype: str) -> None:
    keras.config.set_dtype_policy(dtype)
    try:
        model = every_kind()
    finally:
        keras.config.set_dtype_policy("float32")
    never = described(model)
    lk.enable_lora(model, 3, ALL)
    randomize_pairs(model, alpha=5)
    assert sum("lora" in v.path for v in model.variables) == 12
    before, kernels = outputs_of(model), {v.path: np.asarray(v.value, "float32") for v in model.variables}
    expected: dict[str, np.ndarray] = {}
    for path in [path for path in kernels if re.fullmatch(ALL, path)]:
        a, b = (kernels[f"{path.rpartition('/')[0]}/lora_{path.rpartition('/')[2]}_{side}"] for side in "ab")
        update = np.float32(5 / 3) * np.tensordot(a, b, 1)
        expected[path] = (kernels[path] + update).astype(jax.numpy.dtype(dtype))
    lk.merge_lora(model)

    assert [entry[:3] for entry in described(model)] == [entry[:3] for entry in never]
    found = {v.path: np.asarray(v.value) for v in model.variables}
    assert len(expected) == 6
    for path, values in expected.items():
        # Sums of three products in another order, of numbers up to 4; bfloat16 is equal unless that is at a tie.
        one, two, rtol = found[path].astype("f"), values.astype("f"), 1e-6 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(one, two, rtol=rtol, atol=5e-7)
        assert dtype == "float32" or (found[path] == values).mean() > 0.99
    (one,), (two,) = (np.asarray(outputs, "float32") for outputs in (before, outputs_of(model)))
    assert np.isfinite(one).all()
    np.testing.assert_allclose(two, one, rtol=0, atol=abs(one).max() * (1e-5 if dtype == "float32" else 0.03))


@pytest.mark.parametrize("part", mostly_large(["backbone", ""], ["backbone"]))
def test_a_model_is_as_if_it_never_had_pairs(part: str, mesh8: Mesh, tmp_path: Path) -> None:
    preset = preset_of("gemma")
    options = {"preprocessor": None, "mesh": mesh8, "rules": RULES}
    never = lk.from_preset(GemmaCausalLM, preset, **options)
    model = lk.from_preset(GemmaCausalLM, preset, **options)
    lk.enable_lora(model, 2)
    randomize_pairs(model)
    shardings = {v.path: v.value.sharding for v in model.variables}
    old = [v.value for v in model.variables if re.search("(query|value)/kernel", v.path)]
    inputs = inputs_of(model)
    before = model.predict(inputs, verbose=0)
    with compile_events() as events:
        lk.merge_lora(model.backbone if part else model)
    assert sum(event.startswith("compile") for event in events) <= 1, events  # four kernels of one shape and sharding
    assert len(old) == 4 and all(array.is_deleted() for array in old), "their memory is used for the sums"
    assert model.backbone.predict_function is None
    assert part or model.predict_function is None
    np.testing.assert_allclose(model.predict(inputs, verbose=0), before, rtol=1e-4, atol=1e-4)
    assert {v.path: v.value.sharding for v in model.variables}.items() <= shardings.items()
    assert model.get_config() == never.get_config() | {"name": model.name}
    # KerasHub froze all that has no pair.
    assert [v.path.split("/")[-2] for v in model.trainable_variables] == ["query", "value"] * 2
    model.trainable = True
    assert described(model) == described(never)
    with pytest.raises(ValueError, match="no lora-enabled layers"):
        model.backbone.save_lora_weights(str(tmp_path / "x.lora.h5"))

    model.save_weights(tmp_path / "m.weights.h5")
    never.load_weights(tmp_path / "m.weights.h5")
    assert all(np.array_equal(bits(one), bits(two)) for one, two in zip(model.variables, never.variables, strict=True))
    lm.save(model, tmp_path / "m.safetensors")
    saved = set(lm.open_checkpoint(tmp_path / "m.safetensors"))
    assert saved >= {v.path for v in model.variables} and not [path for path in saved if "lora" in path]


def test_training_goes_on_and_pairs_can_be_made_again(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    inputs, targets = np.ones((4, 8)), np.zeros((4, 4))
    for _ in range(2):
        lk.enable_lora(model, 2, ".*/kernel")
        model.compile("adam", "mse")
        model.fit(inputs, targets, verbose=0)
        before = model.predict(inputs, verbose=0)
        lk.merge_lora(model)
        np.testing.assert_allclose(model.predict(inputs, verbose=0), before, rtol=1e-5, atol=1e-6)
    assert model.layers[0].get_config()["units"] == 16 and "lora_rank" not in model.layers[0].get_config()
    kernel = bits(model.layers[0].kernel)
    model.trainable = True
    model.fit(inputs, targets, verbose=0)
    assert not np.array_equal(kernel, bits(model.layers[0].kernel))
    assert len(model.optimizer.variables) == 2 + 2 * 4
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert [bits(v).tolist() for v in loaded.optimizer.variables] == [
        bits(v).tolist() for v in model.optimizer.variables
    ]


@pytest.mark.parametrize("mode", mostly_large(["int8", "int4"], ["int8"]))
def test_quantized_weights_are_those_that_keras_saves(mode: str, tmp_path: Path, mesh8: Mesh) -> None:
    abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, preset_of("gemma")).quantize(mode)
    model = abstract.lora(2).shard(mesh8, lm.auto()).materialize()
    never = abstract.materialize()
    randomize_pairs(model)
    shardings = {v.path: v.value.sharding for v in model.variables}
    model.save_weights(tmp_path / "keras.weights.h5")
    kernel = bits(model.get_layer("decoder_block_0").attention.query_dense._kernel)
    lk.merge_lora(model)
    assert not np.array_equal(kernel, bits(model.get_layer("decoder_block_0").attention.query_dense._kernel))
    assert {v.path: v.value.sharding for v in model.variables}.items() <= shardings.items()
    model.save_weights(tmp_path / "ours.weights.h5")
    with h5py.File(tmp_path / "keras.weights.h5") as one, h5py.File(tmp_path / "ours.weights.h5") as two:
        names: list[str] = []
        one.visit(names.append)
        arrays = [name for name in names if isinstance(one[name], h5py.Dataset)]
        assert arrays and all(np.array_equal(one[name][()], two[name][()]) for name in arrays)
    model.trainable = True
    assert described(model) == described(never)


def test_pairs_that_keras_left_elsewhere(mesh8: Mesh) -> None:
    """KerasHub's own method leaves pairs on the first device, or whole on all of a distribution."""
    preset, cls = preset_of("gemma"), keras_hub.models.GemmaBackbone
    with distribution(cls.get_layout_map(device_mesh(1, 8))):
        model = lk.from_preset(cls, preset)
        model.enable_lora(2)
        before = outputs_of(randomize_pairs(model))
        lk.merge_lora(model)
    np.testing.assert_allclose(before[0], outputs_of(model)[0], rtol=1e-4, atol=1e-4)
    model = lk.from_preset(cls, preset, mesh=mesh8, rules=RULES)
    model.enable_lora(2)
    for variable in model.trainable_variables:
        variable._value = jax.device_put(variable.value, jax.devices()[0])
    kernel = model.get_layer("decoder_block_0").attention.query_dense._kernel
    lk.merge_lora(model)
    assert kernel.value.sharding.spec == P("model")


def test_errors() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    abstract = lm.build_abstract(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16)]))

    class Own(keras.layers.Layer):
        lora_enabled = True

        def call(self, inputs: Any) -> Any:
            return inputs

    own = keras.Sequential([keras.Input((8,)), Own(name="own"), keras.layers.Dense(4, lora_rank=2)])
    for bad, message in (
        (model, "has no LoRA pairs to merge; lazymodel_keras.enable_lora adds them"),
        (abstract, "expected a Keras model with LoRA pairs, got AbstractModel; materialize it first"),
        (own, "own: expected a pair of Keras' own layers, found one of class Own"),
    ):
        with pytest.raises(lm.LazyModelError, match=message):
            lk.merge_lora(bad)
    assert own.layers[1].lora_enabled
