"""Models quantized while they are read: equal to quantizing the loaded model, one kernel's slab at a time."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel import _computed
from tests.keras.models import GEMMA, assert_same, randomize, save_hugging_face, save_preset, seeded
from tests.keras.versions import needs_keras, needs_saved_tasks

# Keras warns of every layer that it passes over, and so do we.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Invalid quantization mode. Expected one of:UserWarning"),
]

Backbone = keras_hub.models.Backbone
GemmaCausalLM = keras_hub.models.GemmaCausalLM
quantizers = keras.quantizers


class Halves(keras.quantizers.AbsMaxQuantizer):
    """A quantizer that Keras does not know."""

    def __call__(self, x: Any, axis: Any = None, to_numpy: bool = False) -> Any:
        values = np.asarray(x)
        scale = np.full_like(np.max(values, axis=self.axis, keepdims=True), 0.5)
        return np.clip(np.round(values * scale), -127, 127).astype("int8"), scale


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_preset(tmp_path_factory.mktemp("quantize") / "gemma", "gemma")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_preset(tmp_path_factory.mktemp("quantize") / "llama3", "llama3")


def quantized(model: Any, how: Any, filters: Any = None) -> Any:
    """What stock Keras makes of a loaded model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.freeze()  # Keras collects garbage after every layer: all of this process' without it
        model.quantize(**({"mode": how} if isinstance(how, str) else {"config": how}), filters=filters)
        gc.unfreeze()
    return model


HOW: dict[str, Callable[[], Any]] = {
    "int8": lambda: "int8",
    "int4": lambda: "int4",
    "float8": lambda: "float8",
    "int4 of columns": lambda: quantizers.Int4QuantizationConfig(block_size=None),
    "int4 of odd blocks": lambda: quantizers.Int4QuantizationConfig(block_size=24),
    "int8 weights only": lambda: quantizers.Int8QuantizationConfig(activation_quantizer=None),
    "int8 of its own range": lambda: quantizers.Int8QuantizationConfig(
        weight_quantizer=quantizers.AbsMaxQuantizer(axis=0, value_range=(-100, 90))
    ),
}


blocks = needs_keras("3.14", "int4 in blocks")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=blocks if name in ("int4 of columns", "int4 of odd blocks") else (), id=name)
        for name, how in HOW.items()
    ],
)
def test_equals_quantizing_the_loaded_model(llama: Path, mesh8: Mesh, how: Callable[[], Any]) -> None:
    filters = "feedforward" if how is HOW["int8 of its own range"] else None  # its axis is a matrix' only
    stock = quantized(Backbone.from_preset(str(llama)), how(), filters)
    ours = lk.from_preset(
        *(Backbone, str(llama)), quantize=how(), quantize_filters=filters, mesh=mesh8, rules=lm.auto()
    )
    assert_same(stock, ours, outputs=False)
    assert [v.path for v in stock.trainable_variables] == [v.path for v in ours.trainable_variables]
    for one, other in zip(stock._flatten_layers(), ours._flatten_layers(), strict=True):
        assert one.dtype_policy.name == other.dtype_policy.name
        assert getattr(one, "_is_quantized", False) == getattr(other, "_is_quantized", False)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [("bfloat16", "int8"), ("bfloat16", "int4"), pytest.param("mixed_bfloat16", "int8", marks=pytest.mark.large)],
)
def test_narrow_weights(preset: Path, dtype: str, how: str) -> None:
    stock = quantized(GemmaCausalLM.from_preset(str(preset), dtype=dtype, preprocessor=None), how)
    ours = lk.from_preset(GemmaCausalLM, str(preset), dtype=dtype, preprocessor=None, quantize=how)
    assert_same(stock, ours, outputs=False)


@pytest.mark.large
def test_runs_like_stock(preset: Path) -> None:
    stock = quantized(Backbone.from_preset(str(preset)), "int8")
    assert_same(stock, lk.from_preset(Backbone, str(preset), quantize="int8"), outputs=True)


@pytest.mark.parametrize("how", ["int4", pytest.param("int8", marks=pytest.mark.large)])
def test_hugging_face(tmp_path: Path, mesh8: Mesh, how: str) -> None:
    """Kernels that are transposed and reshaped views of what is in the files."""
    folder = str(save_hugging_face(tmp_path / "llama3", "llama3", shards=2))
    stock = quantized(Backbone.from_preset(folder), how)
    ours = lk.from_preset(Backbone, folder, quantize=how, mesh=mesh8, rules=lm.auto())
    assert_same(stock, ours, outputs=False)


@pytest.mark.parametrize("filters", ["query|value", ["^token_embedding$"], lambda layer: layer.name == "key"])
def test_filters(preset: Path, filters: Any) -> None:
    stock = quantized(Backbone.from_preset(str(preset)), "int8", filters)
    assert 0 < sum(variable.dtype == "int8" for variable in stock.variables) < 10
    assert_same(stock, lk.from_preset(Backbone, str(preset), quantize="int8", quantize_filters=filters), outputs=False)


def test_a_quantizer_of_ones_own(preset: Path) -> None:
    def how() -> Any:
        return quantizers.Int8QuantizationConfig(weight_quantizer=Halves(axis=-1))

    stock = quantized(Backbone.from_preset(str(preset)), how(), "token_embedding")
    ours = lk.from_preset(Backbone, str(preset), quantize=how(), quantize_filters="token_embedding")
    assert_same(stock, ours, outputs=False)


@pytest.mark.large
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_without_weights(preset: Path, how: str) -> None:
    stock = quantized(seeded(lambda: Backbone.from_preset(str(preset), load_weights=False)), how)
    ours = seeded(lambda: lk.from_preset(Backbone, str(preset), load_weights=False, quantize=how))
    assert_same(stock, ours, outputs=False)


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_reads_every_weight_once_in_slabs(preset: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    slabs: list[int] = []
    init = _computed.Computation.__init__

    def watched(self: Any, source: Any, function: Any, steps: Any) -> None:
        def watching(values: np.ndarray) -> Any:
            slabs.append(values.nbytes)
            return function(values)

        init(self, source, watching, steps)

    monkeypatch.setattr(_computed.Computation, "__init__", watched)
    monkeypatch.setattr(_computed, "SLAB", 1024)
    reports: list[lm.LoadReport] = []
    abstract = lk.abstract_from_preset(Backbone, str(preset), quantize=how, mesh=mesh8, rules=lm.auto())
    assert not slabs, "nothing is computed before it is wanted"
    plan = abstract.plan()
    model = abstract.materialize(report=reports.append)
    stored = Backbone.from_preset(str(preset))
    floats = sum(variable.value.nbytes for variable in stored.variables)
    kernels = sum(v.value.nbytes for v in stored.variables if len(v.shape) > 1)
    (report,) = reports
    assert report.read_nbytes == report.needed_nbytes == plan.read_nbytes == floats
    assert sum(slabs) == kernels
    assert max(slabs) <= 32 * 64 * 4, "a column group of one layer, never a whole embedding"
    assert abstract.nbytes == sum(variable.value.nbytes for variable in model.variables)
    assert {row.action for row in report.rows} <= {"load", "constant"}


def test_the_plan_is_what_is_materialized(preset: Path, mesh8: Mesh) -> None:
    abstract = lk.abstract_from_preset(Backbone, str(preset), quantize="int8", mesh=mesh8, rules=lm.auto())
    kernel = abstract["decoder_block_0/attention/query/kernel"]
    assert (kernel.dtype, kernel.shape, kernel.trainable) == (np.int8, (8, 32, 4), False)
    assert kernel.origin.startswith(str(preset))
    model = abstract.materialize()
    rows = {row.path: row for row in abstract.plan().rows}
    for variable in model.variables:
        assert rows[variable.path].shard_nbytes == variable.value.addressable_shards[0].data.nbytes
    again = abstract.materialize()
    assert again is not model
    assert_same(model, again, outputs=False)


def test_a_scale_is_split_like_its_weight(preset: Path, mesh8: Mesh) -> None:
    """Rules and layout maps that were written for float models."""
    rules = {r".*attention/(query|key|value)/kernel": P("model"), "token_embedding/embeddings": P("model")}
    abstract = lk.abstract_from_preset(Backbone, str(preset), quantize="int8", mesh=mesh8, rules=rules)
    assert abstract["token_embedding/embeddings_scale"].spec == P("model")
    assert abstract["decoder_block_1/attention/query/kernel_scale"].spec == P(None, None, "model")
    assert abstract["decoder_block_1/ffw_linear/kernel_scale"].spec == P()
    assert "token_embedding/embeddings" in str(abstract.explain("token_embedding/embeddings_scale"))
    replicated = {**rules, ".*_scale": P()}
    abstract = lk.abstract_from_preset(Backbone, str(preset), quantize="int8", mesh=mesh8, rules=replicated)
    assert abstract["token_embedding/embeddings_scale"].spec == P(), "a rule goes before"


@blocks
def test_scales_of_blocks_are_split_like_their_weight(preset: Path, mesh8: Mesh) -> None:
    config = quantizers.Int4QuantizationConfig(block_size=16)
    rules = {"token_embedding/embeddings": P("model"), r".*ffw_gating/kernel": P(None, "model")}
    abstract = lk.abstract_from_preset(Backbone, str(preset), quantize=config, mesh=mesh8, rules=rules)
    assert abstract["decoder_block_0/ffw_gating/kernel"].shape == (32, 16)
    assert abstract["decoder_block_0/ffw_gating/kernel_scale"].shape == (2, 32)
    assert abstract["decoder_block_0/ffw_gating/kernel_scale"].spec == P(None, "model")
    assert abstract["decoder_block_0/ffw_gating/kernel_zero"].spec == P(None, "model")


@needs_keras("3.14", "layout maps whose keys match whole paths")
def test_a_scale_is_split_like_its_weight_in_a_layout_map(preset: Path, mesh8: Mesh) -> None:
    devices = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), list(mesh8.devices.flat))
    layout = keras_hub.models.GemmaBackbone.get_layout_map(devices)
    with keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch").scope():
        abstract = lk.abstract_from_preset(Backbone, str(preset), quantize="int8")
    assert abstract["token_embedding/embeddings"].spec == P("model", "batch")
    assert abstract["token_embedding/embeddings_scale"].spec == P("model")


@pytest.mark.parametrize(
    "cls",
    ["Backbone", pytest.param("CausalLM", marks=needs_saved_tasks)],
)
@pytest.mark.parametrize("how", ["int4", *(pytest.param(how, marks=pytest.mark.large) for how in ("int8", "float8"))])
def test_presets_saved_quantized(tmp_path: Path, preset: Path, mesh8: Mesh, how: str, cls: str) -> None:
    """Stock loads these into tasks; for backbones it builds float layers and fails."""
    folder = str(tmp_path / "saved")
    if cls == "Backbone":
        saved = quantized(Backbone.from_preset(str(preset)), how)
        saved.save_to_preset(folder)
        with pytest.raises(Exception, match="."):  # what it is depends on the layer that comes first
            assert_same(saved, Backbone.from_preset(folder), outputs=False)
        stock = type(saved).from_config(saved.get_config())
        stock.load_weights(f"{folder}/model.weights.h5")
        assert_same(stock, lk.from_preset(Backbone, folder, mesh=mesh8, rules=lm.auto()), outputs=False)
        with lk.deferred():
            later = Backbone.from_preset(folder)
        assert_same(stock, later, outputs=False)
    else:
        saved = quantized(GemmaCausalLM.from_preset(str(preset), preprocessor=None), how)
        saved.save_to_preset(folder)
        stock = GemmaCausalLM.from_preset(folder, preprocessor=None)
        ours = lk.from_preset(GemmaCausalLM, folder, preprocessor=None, mesh=mesh8, rules=lm.auto())
        assert_same(stock, ours, outputs=False)


def test_errors(tmp_path: Path, preset: Path) -> None:
    def load(**options: Any) -> Any:
        return lk.abstract_from_preset(Backbone, str(preset), **options)

    with pytest.raises(lm.LazyModelError, match="calibrates with data .* then call model.quantize"):
        load(quantize="gptq")
    with pytest.raises(lm.LazyModelError, match="'int8', 'int4', 'float8' or a keras.*got 'int3'"):
        load(quantize="int3")
    with pytest.raises(lm.LazyModelError, match="quantize_filters was given without quantize"):
        load(quantize_filters="query")
    with pytest.raises(lm.LazyModelError, match="no LoRA for layers quantized with 'float8'"):
        load(quantize="float8", lora_rank=2)
    with pytest.raises(lm.LazyModelError, match="'int8' changes nothing: none of the layers .* that the filters let"):
        load(quantize="int8", quantize_filters="nothing")
    with pytest.raises(lm.LazyModelError, match="Keras cannot quantize .* with 'int8': .*float16"):
        load(quantize="int8", dtype="float16")
    saved = lk.from_preset(Backbone, str(preset), quantize="int8")
    saved.save_to_preset(str(tmp_path / "saved"))
    with pytest.raises(lm.LazyModelError, match=re.escape("is quantized already: layer token_embedding is int8")):
        lk.abstract_from_preset(Backbone, str(tmp_path / "saved"), quantize="int4")


@pytest.mark.large
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_tied_or_not(tmp_path: Path, how: str) -> None:
    for config in (GEMMA, {**GEMMA, "vocabulary_size": 67}):
        model = randomize(keras_hub.models.GemmaBackbone(**config))
        model.save_to_preset(str(tmp_path / f"{config['vocabulary_size']}"))
        folder = str(tmp_path / f"{config['vocabulary_size']}")
        assert_same(quantized(model, how), lk.from_preset(Backbone, folder, quantize=how), outputs=False)
