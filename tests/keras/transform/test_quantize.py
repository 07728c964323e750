"""Models quantized while they are read: equal to quantizing the loaded model, one kernel's slab at a time."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel_keras import _upstream
from tests.keras.models import (
    GEMMA,
    assert_same,
    device_mesh,
    in_block,
    preset_of,
    randomize,
    save_hugging_face,
    seeded,
)
from tests.keras.versions import needs_keras, needs_saved_tasks
from tests.large import mostly_large
from tests.small import make_small

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
def preset() -> Path:
    return Path(preset_of("gemma"))


def quantized(model: Any, how: Any, filters: Any = None) -> Any:
    """What stock Keras makes of a loaded model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.freeze()  # Keras collects garbage after every layer: all of this process' without it
        model.quantize(**({"mode": how} if isinstance(how, str) else {"config": how}), filters=filters)
    return model


Int4, Int8 = quantizers.Int4QuantizationConfig, quantizers.Int8QuantizationConfig
BF16 = {"dtype": "bfloat16"}
# A source of weights, how it is quantized, with which filters, and other arguments of `from_preset`.
Case = tuple[str, Callable[[], Any], Any, dict[str, Any]]
CASES: dict[str, Case] = {
    "int8": ("llama3", lambda: "int8", None, {}),
    "float8": ("llama3", lambda: "float8", None, {}),
    "int4 of odd blocks": ("llama3", lambda: Int4(block_size=24), None, {}),
    "weights only": ("llama3", lambda: Int8(activation_quantizer=None), lambda layer: layer.name != "key", {}),
    "its own range": (  # its axis is a matrix' only
        "llama3",
        lambda: Int8(weight_quantizer=quantizers.AbsMaxQuantizer(axis=0, value_range=(-100, 90))),
        "feedforward",
        {},
    ),
    "an unknown quantizer": ("gemma", lambda: Int8(weight_quantizer=Halves(axis=-1)), ["^token_embedding$"], {}),
    "bfloat16 to int4": ("gemma task", lambda: "int4", None, BF16),
    "views of files": ("hugging face", lambda: "int4", None, {}),  # transposed and reshaped
}
LARGE: dict[str, Case] = {
    "int4": ("llama3", lambda: "int4", None, {}),
    "int4 of columns": ("llama3", lambda: Int4(block_size=None), None, {}),
    "bfloat16 to int8": ("gemma", lambda: "int8", None, BF16),
    "mixed_bfloat16": ("gemma task", lambda: "int8", None, {"dtype": "mixed_bfloat16"}),
    "views of files to int8": ("hugging face", lambda: "int8", None, {}),
    **{
        f"{source}, {options} to {how}": (source, lambda how=how: how, None, options)
        for source, options in (("gemma", {"load_weights": False}), ("gemma", {}), ("odd gemma", {}))
        for how in ("int8", "int4")
    },
}
blocks = needs_keras("3.14", "int4 in blocks")


def of_blocks(name: str) -> list[pytest.MarkDecorator]:
    return [blocks] if name.startswith("int4 of") else []


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=of_blocks(name)) for name in CASES),
        *(pytest.param(name, marks=[pytest.mark.large, *of_blocks(name)]) for name in LARGE),
    ],
)
def test_equals_quantizing_the_loaded_model(preset: Path, mesh8: Mesh, name: str, tmp_path: Path) -> None:
    source, how, filters, options = (CASES | LARGE)[name]
    cls = GemmaCausalLM if source == "gemma task" else Backbone
    options = options | ({"preprocessor": None} if source == "gemma task" else {})
    folder = str(preset)
    if source == "llama3":
        folder = preset_of(source)
    elif source == "hugging face":
        folder = str(save_hugging_face(tmp_path / source, "llama3", shards=2))
    elif source == "odd gemma":
        folder = str(tmp_path / source)
        randomize(keras_hub.models.GemmaBackbone(**{**GEMMA, "vocabulary_size": 67})).save_to_preset(folder)

    def load() -> Any:
        abstract = lk.abstract_from_preset(cls, folder, **options).quantize(how(), filters)
        return abstract.shard(mesh8, lm.auto()).materialize()

    stock = seeded(lambda: quantized(cls.from_preset(folder, **options), how(), filters))
    ours = seeded(load)
    assert_same(stock, ours, outputs=name == "gemma, {} to int8")
    assert [v.path for v in stock.trainable_variables] == [v.path for v in ours.trainable_variables]
    for one, other in zip(stock._flatten_layers(), ours._flatten_layers(), strict=True):
        assert one.dtype_policy.name == other.dtype_policy.name
        assert getattr(one, "_is_quantized", False) == getattr(other, "_is_quantized", False)


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_reads_every_weight_once_in_slabs(preset: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    slabs: list[int] = []  # bytes of what Keras' own functions are called with

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watching(values: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(values, np.ndarray):
                slabs.append(values.nbytes)
            return original(values, *args, **kwargs)

        return watching

    for name in ("abs_max_quantize", "abs_max_quantize_grouped_with_zero_point"):
        for module in _upstream.QUANTIZERS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(getattr(module, name)))
    make_small(monkeypatch, slab=1024)
    reports: list[lm.LoadReport] = []
    abstract = lk.abstract_from_preset(Backbone, str(preset)).quantize(how).shard(mesh8, lm.auto())
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
    places = {row.path for row in report.rows if row.action == "initialize"}  # Keras 3.16 initializes those of groups
    assert all(path.endswith("g_idx") for path in places)


def test_the_plan_is_what_is_materialized(preset: Path, mesh8: Mesh) -> None:
    abstract = lk.abstract_from_preset(Backbone, str(preset)).quantize("int8").shard(mesh8, lm.auto())
    kernel = abstract["decoder_block_0/attention/query/kernel"]
    assert (kernel.dtype, kernel.shape, kernel.trainable) == (np.int8, (8, 32, 4), False)
    assert kernel.origin == "layers/gemma_decoder_block/attention/query_dense/vars/0 of model.weights.h5"
    model = abstract.materialize()
    rows = {row.path: row for row in abstract.plan().rows}
    for variable in model.variables:
        assert rows[variable.path].shard_nbytes == variable.value.addressable_shards[0].data.nbytes
    again = abstract.materialize()
    assert again is not model
    assert_same(model, again, outputs=False)


ZERO = "kernel_zero" if hasattr(keras.layers.Dense, "_get_kernel_with_merged_lora") else "zero_point"  # Keras 3.16
QUERY_RULES = {r".*attention/(query|key|value)/kernel": P("model"), "token_embedding/embeddings": P("model")}
GATING_RULES = {"token_embedding/embeddings": P("model"), r".*ffw_gating/kernel": P(None, "model")}


@pytest.mark.parametrize(
    ("block_size", "rules", "specs"),
    [
        (
            None,
            QUERY_RULES,
            {
                "token_embedding/embeddings_scale": P("model"),
                "decoder_block_1/attention/query/kernel_scale": P(None, None, "model"),
                "decoder_block_1/ffw_linear/kernel_scale": P(),
            },
        ),
        (None, {**QUERY_RULES, ".*_scale": P()}, {"token_embedding/embeddings_scale": P()}),  # a rule goes before
        pytest.param(
            16,
            GATING_RULES,
            {
                "decoder_block_0/ffw_gating/kernel_scale": P(None, "model"),
                f"decoder_block_0/ffw_gating/{ZERO}": P(None, "model"),
            },
            marks=blocks,
        ),
    ],
)
def test_a_scale_is_split_like_its_weight(
    preset: Path, mesh8: Mesh, block_size: int | None, rules: Any, specs: dict[str, P]
) -> None:
    """By rules that were written for float models."""
    how = "int8" if block_size is None else quantizers.Int4QuantizationConfig(block_size=block_size)
    abstract = lk.abstract_from_preset(Backbone, str(preset)).quantize(how).shard(mesh8, rules)
    assert {path: abstract[path].spec for path in specs} == specs
    if block_size is not None:
        assert abstract["decoder_block_0/ffw_gating/kernel"].shape == (32, 16)
        assert abstract["decoder_block_0/ffw_gating/kernel_scale"].shape == (2, 32)
    elif len(specs) == 3:
        assert "token_embedding/embeddings" in str(abstract.explain("token_embedding/embeddings_scale"))


@needs_keras("3.14", "layout maps whose keys match whole paths")
def test_a_scale_is_split_like_its_weight_in_a_layout_map(preset: Path, mesh8: Mesh) -> None:
    devices = device_mesh(1, 8)
    layout = keras_hub.models.GemmaBackbone.get_layout_map(devices)
    with keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch").scope():
        floats = lk.abstract_from_preset(Backbone, str(preset))
    abstract = floats.quantize("int8")  # under the distribution that it was built in
    assert abstract["token_embedding/embeddings"].spec == P("model", "batch")
    assert abstract["token_embedding/embeddings_scale"].spec == P("model")


@pytest.mark.parametrize("cls", ["Backbone", pytest.param("CausalLM", marks=needs_saved_tasks)])
@pytest.mark.parametrize("how", ["int4", *(pytest.param(how, marks=pytest.mark.large) for how in ("int8", "float8"))])
def test_presets_saved_quantized(tmp_path: Path, preset: Path, mesh8: Mesh, how: str, cls: str) -> None:
    """Stock loads these into tasks; for backbones it builds float layers and fails."""
    folder, options = str(tmp_path / "saved"), {} if cls == "Backbone" else {"preprocessor": None}
    own = Backbone if cls == "Backbone" else GemmaCausalLM
    saved = quantized(own.from_preset(str(preset), **options), how)
    saved.save_to_preset(folder)
    if cls == "Backbone":
        with pytest.raises(Exception, match="."):  # what it is depends on the layer that comes first
            assert_same(saved, Backbone.from_preset(folder), outputs=False)
        stock = type(saved).from_config(saved.get_config())
        stock.load_weights(f"{folder}/model.weights.h5")
        later = in_block(lambda: Backbone.from_preset(folder))
        assert_same(stock, later, outputs=False)
    else:
        stock = own.from_preset(folder, **options)
    ours = lk.from_preset(own, folder, mesh=mesh8, rules=lm.auto(), **options)
    assert_same(stock, ours, outputs=False)


def test_errors(tmp_path: Path, preset: Path) -> None:
    abstract = lk.abstract_from_preset(Backbone, str(preset))
    half = lk.abstract_from_preset(Backbone, str(preset), dtype="float16")
    lk.abstract_from_preset(Backbone, str(preset)).quantize("int8").materialize().save_to_preset(
        str(tmp_path / "saved")
    )
    saved = lk.abstract_from_preset(Backbone, str(tmp_path / "saved"))
    for model, how, filters, message in (
        (abstract, "gptq", None, "calibrates with data"),
        (abstract, "int3", None, "got 'int3'"),
        (abstract, "int8", "nothing", "'int8'.* changes nothing"),
        (half, "int8", None, "'int8': .*float16"),
        (saved, "int4", None, "token_embedding is int8"),
    ):
        with pytest.raises(lm.LazyModelError, match=message):
            model.quantize(how, filters)
    # After a step that failed half-way the model is what it was.
    assert_same(Backbone.from_preset(str(preset)), abstract.materialize(), outputs=False)


def layers(dtype: str) -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(50, 64, dtype=dtype, name="embed")(tokens)
    x = keras.layers.EinsumDense("btd,dnh->btnh", (None, 8, 12), dtype=dtype, name="query")(x)
    x = keras.layers.EinsumDense("btnh,nhd->btd", (None, 63), dtype=dtype, name="output")(x)
    return keras.Model(tokens, keras.layers.Dense(31, dtype=dtype, name="odd")(x))


def quantized_on_devices(model: keras.Model, how: Any, monkeypatch: pytest.MonkeyPatch) -> keras.Model:
    """Stock Keras, with its function of groups for devices in place of the one for NumPy: compiled, in float32."""
    in_groups = quantizers.abs_max_quantize_grouped_with_zero_point

    def on_device(values: Any, *args: Any, to_numpy: bool, **options: Any) -> Any:
        assert to_numpy and values.dtype == model.layers[-1].compute_dtype
        function = jax.jit(lambda wide: in_groups(wide, *args, to_numpy=False, **options))
        numbers, scale, zero = function(np.asarray(values, "float32"))
        return numbers, scale.astype(values.dtype), zero

    with monkeypatch.context() as patch:
        patch.setattr("keras.src.quantizers.abs_max_quantize_grouped_with_zero_point", on_device)
        return quantized(model, how)


WAYS: dict[str, Any] = {"int8": "int8", "float8": "float8", "int4": "int4", "int4 of odd blocks": Int4(block_size=24)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_large(
        [*itertools.product(WAYS, ("float32", "bfloat16"))],
        [("int8", "bfloat16"), ("int4 of odd blocks", "float32")],
        lambda case: [blocks] if "int4" in case[0] else [],
    ),
)
def test_a_sampler_is_quantized_on_the_way(mesh8: Mesh, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = WAYS[name]
    here, there = (Mesh(half, ("model",)) for half in np.split(mesh8.devices.ravel(), 2))
    trainer = lm.build_abstract(layers, "float32").shard(here, {".*": P()}).materialize()
    rules = {"(query|output)/kernel": P("model"), ".*": P()}
    abstract = lm.build_abstract(layers, dtype).quantize(how).shard(there, rules)
    sampler = lm.Sync(trainer, abstract)(trainer, into=abstract.materialize())
    stock = layers(dtype)
    for own, variable in zip(stock.variables, trainer.variables, strict=True):
        own.assign(np.asarray(variable.value).astype(own.value.dtype))
    if "4" in str(how):
        quantized_on_devices(stock, how, monkeypatch)
    else:
        quantized(stock, how)
    assert_same(stock, sampler, outputs=False)
    assert {v.path: v.value.sharding.spec for v in sampler.variables} == {p: v.spec for p, v in abstract.items()}
    assert lm.Sync(abstract, abstract).computed_nbytes == 0  # numbers and scales move as they are
    if how == "int8":
        for mapping, text in (
            (None, "has no variable 'embed/emb"),
            (lambda w: dict(w), "'embed/embeddings': expected"),
        ):
            with pytest.raises(lm.LazyModelError, match=f"{text}.*the abstract model that `quantize` made"):
                lm.Sync(trainer, sampler, mapping)


@pytest.mark.parametrize(
    "name",
    mostly_large(WAYS, ["int8"], lambda name: [blocks] if "int4" in name else []),
)
def test_a_model_that_a_function_builds_is_quantized_from_floats(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    """From any checkpoint of it before it was quantized, as it is read; from its own, as it is."""
    how = WAYS[name]
    own = randomize(layers("float32"))
    file, weights = str(tmp_path / "model.safetensors"), str(tmp_path / "model.weights.h5")
    lm.save(own, file)
    own.save_weights(weights)
    abstract = lm.build_abstract(layers, "bfloat16").quantize(how)
    stock = layers("bfloat16")
    stock.load_weights(weights)
    quantized(stock, how)
    sharded = abstract.shard(mesh8, {"(query|output)/kernel": P("model"), ".*": P()})
    checkpoint = lm.open_checkpoint(file)
    model = sharded.materialize(checkpoint, initialize="nothing")
    assert_same(stock, model, outputs=False)
    assert sharded.plan(checkpoint).read_nbytes == checkpoint.nbytes
    assert_same(stock, abstract.materialize(own, initialize="nothing"), outputs=False)
    restored = lk.restore(lm.build_abstract(layers, "bfloat16").quantize(how).shard(mesh8, {".*": P()}), weights)
    assert_same(stock, restored, outputs=False)
    if how == "int8":
        tuned = lk.restore(lm.build_abstract(layers, "bfloat16").quantize(how).lora(2, ".*query/kernel"), weights)
        values = {variable.path: variable.value for variable in tuned.variables}
        assert len(values) == len(stock.variables) + 2
        for variable in stock.variables:
            np.testing.assert_array_equal(values[variable.path], variable.value)
    for path, array in sharded.stream(checkpoint, initialize="nothing"):
        np.testing.assert_array_equal(array, next(v for v in model.variables if v.path == path).value)
    model.save_weights(weights)
    again = lk.restore(lm.build_abstract(layers, "bfloat16").quantize(how), weights)
    assert_same(stock, again, outputs=False)
    lm.save(model, tmp_path / "quantized.safetensors")
    assert_same(stock, abstract.materialize(lm.open_checkpoint(tmp_path / "quantized.safetensors")), outputs=False)


def all_kinds(**dtype: Any) -> keras.Model:
    """Layers that Keras quantizes, of odd sizes: with `dtype`, the dense ones in a form that needs calibration."""
    tokens = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(9, 5)(tokens)
    both = keras.layers.ReversibleEmbedding(11, 5, tie_weights=False)
    x = keras.layers.Dense(7, **dtype)(keras.layers.BatchNormalization()(embedded + both(tokens)))
    x = keras.layers.EinsumDense("abc,cde->abde", (None, 3, 5), bias_axes="e", **dtype)(x)
    x = keras.layers.EinsumDense("abde,dec->abc", (None, 5), **dtype)(x)
    return keras.Model(tokens, both(x, reverse=True))


@pytest.mark.parametrize(
    "how",
    [
        *("int8", "gptq", "awq"),
        *(pytest.param(how, marks=pytest.mark.large) for how in ("float8", "int4")),
        pytest.param(Int4(block_size=None), marks=blocks, id="columns"),
    ],
)
def test_parameters_are_those_before_quantization(how: Any) -> None:
    expected = all_kinds().count_params()
    floats = lm.build_abstract(all_kinds)
    assert floats.num_parameters == expected
    if how in ("gptq", "awq"):
        abstract = lm.build_abstract(all_kinds, dtype=f"{how}/4/-1_from_float32")
        assert any(variable.dtype == "uint8" for variable in abstract.values())
    else:
        abstract = floats.quantize(how)
        if how != "float8":  # for which Keras has no LoRA
            pairs = lm.build_abstract(all_kinds).quantize(how).lora(2, ".*kernel")
            added = sum(variable.size for path, variable in pairs.items() if "lora" in path)
            assert added and pairs.num_parameters == expected + added
        abstract.materialize()  # which takes the object
        assert abstract.shard(jax.make_mesh((8,), ("model",)), {".*": P()}).num_parameters == expected
    assert abstract.num_parameters == expected


class Unfinished(keras.Model):
    """A layer that was not built has no parameters yet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(3, dtype="int8_from_float32")
        self.first.build((None, 4))


def test_parameters_of_layers_that_were_not_built() -> None:
    assert lm.build_abstract(Unfinished).num_parameters == 4 * 3 + 3


def test_numbers_without_their_scales(capsys: pytest.CaptureFixture[str]) -> None:
    abstract = lm.build_abstract(layers, "float32").quantize("int8")
    assert not capsys.readouterr().out
    values = {path: np.zeros(variable.shape, variable.dtype) for path, variable in abstract.items()}
    without = {path: value for path, value in values.items() if path != "odd/kernel_scale"}
    for given in (without, {path: value for path, value in values.items() if path != "odd/kernel"}):
        with pytest.raises(lm.CheckpointError, match="'odd/kernel.*without which quantized numbers mean nothing"):
            abstract.materialize(given, strict=False)
    floats = {variable.path: np.zeros(variable.shape, "float32") for variable in layers("float32").variables}
    wrong = floats | {"odd/kernel": np.zeros((3, 3), "float32")}
    with pytest.raises(lm.CheckpointError, match=r"'odd/kernel': expected shape \(63, 31\), found \(3, 3\)"):
        abstract.materialize(wrong)
    del floats["odd/kernel"]
    with pytest.raises(lm.CheckpointError, match="has no tensor for 2 .*odd/kernel"):
        abstract.materialize(floats, initialize="nothing")
    with pytest.warns(lm.LazyModelWarning, match="has no tensor for 2 .*odd/kernel"):
        assert np.asarray(abstract.materialize(floats).get_layer("odd").kernel).any()


QUANTIZE, LORA = (lambda a: a.quantize("int8")), (lambda a: a.lora(2, ".*kernel"))
ORDERS: list[tuple[Any, Any, str]] = [
    (lambda a, mesh: a.shard(mesh, {".*": P()}), QUANTIZE, "has shardings already.*quantize comes before shard"),
    (lambda a, mesh: a.shard(mesh, {".*": P()}), LORA, "has shardings already.*lora comes before shard"),
    (lambda a, mesh: a.with_optimizer(optax.sgd(1.0, 0.9)), QUANTIZE, "optimizer already; quantize comes before"),
    (lambda a, mesh: a.with_optimizer(optax.sgd(1.0, 0.9)), LORA, "optimizer already; lora comes before"),
    (lambda a, mesh: a.rekey(0, ".*kernel"), QUANTIZE, "has other initializers already.*quantize comes before"),
    (lambda a, mesh: QUANTIZE(a), QUANTIZE, "is quantized already"),
    (lambda a, mesh: LORA(a), LORA, "lora is already enabled"),
    (lambda a, mesh: a, lambda a: a.quantize("int8", inputs=()), "inputs are for NNX modules"),
    (lambda a, mesh: a, lambda a: a.lora(2, inputs=()), "inputs are for NNX modules"),
    (lambda a, mesh: LORA(a), QUANTIZE, "has LoRA pairs already.*quantize comes before lora"),
]


@pytest.mark.parametrize(("before", "step", "text"), ORDERS)
def test_steps_in_another_order(mesh8: Mesh, before: Any, step: Any, text: str) -> None:
    changed = before(lm.build_abstract(dense), mesh8)
    with pytest.raises(lm.LazyModelError, match=text):
        step(changed)
    changed.materialize()


def dense() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)])


def test_an_abstract_model_stays_as_it_is() -> None:
    """The first step takes its object; whatever else is made of it gets another with the same values and names."""
    keras.backend.clear_session()
    floats = lm.build_abstract(dense)
    paths = list(floats)
    first, second, pairs = floats.quantize("int8"), floats.quantize("int8"), floats.quantize("int8").lora(2, ".*kernel")
    assert list(first) == list(second)
    assert list(floats) == paths
    planned = floats.framework.forward("forward", batch=2, sequence=None)
    assert planned is not None
    values = {path: np.ones(variable.shape, variable.dtype) for path, variable in floats.items()}
    assert planned.function(values, np.ones((2, 8), "float32")).tolist() == [[144 + 1] * 8] * 2, "of the float model"
    assert_same(first.materialize(), second.materialize(), outputs=False)
    loaded = floats.materialize()
    assert [variable.path for variable in loaded.variables] == paths
    assert_same(quantized(loaded, "int8"), second.materialize(), outputs=False)
    kept = {path: variable for path, variable in pairs.items() if "lora" not in path}
    assert {v.path: v.shape for v in kept.values()} == {v.path: v.shape for v in first.values()}


def test_what_no_layers_has() -> None:
    def make() -> Any:
        return {"w": jax.numpy.ones((8, 4))}

    for step in (lambda a: a.quantize("int8"), lambda a: a.lora(8)):
        with pytest.raises(lm.LazyModelError, match="only Keras models .*, and make is neither.*WhatIf"):
            step(lm.build_abstract(make))
        with pytest.raises(lm.LazyModelError, match=r"changes one keras\.Model; this is Dense"):
            step(lm.build_abstract(keras.layers.Dense, 4))
