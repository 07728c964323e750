"""`lk.from_preset` against stock `from_preset`: the same model, bit for bit, and only shards on the devices."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.conftest import ROOT, child_environment

from .models import (
    BACKBONES,
    assert_same,
    assert_same_in_distribution,
    bits,
    causal_lm,
    decoder,
    decoder_shapes,
    device_mesh,
    distribution,
    first_that_divides,
    layouts,
    preset_of,
    random_tensors,
    randomize,
    save_hugging_face,
    save_preset,
    seeded,
    write_safetensors_folder,
)
from .versions import needs_keras_hub

BENCHMARK = ROOT / "tests" / "benchmarks" / "load_preset.py"


BERT, (GEMMA, CONFIG) = BACKBONES["bert"][0], BACKBONES["gemma"]
Backbone, GemmaCausalLM = keras_hub.models.Backbone, keras_hub.models.GemmaCausalLM
BF16 = ml_dtypes.bfloat16
# Which model, how its folder is written, and what `from_preset` takes besides.
SOURCES: list[tuple[str, Callable[..., Path], dict[str, Any], dict[str, Any]]] = [
    *((name, save_preset, {}, {}) for name in BACKBONES),
    ("gemma", save_preset, {"max_shard_size": 2e-5}, {}),  # GB
    ("mixtral", save_preset, {"max_shard_size": 4e-5}, {}),
    ("gemma", save_preset, {}, {"load_weights": False}),
    ("bert", save_hugging_face, {}, {}),
    ("llama3", save_preset, {}, {"dtype": "mixed_bfloat16"}),
    ("llama3", save_preset, {}, {"dtype": "float16"}),
    ("llama3", save_hugging_face, {}, {"dtype": "bfloat16"}),
    ("llama3", save_hugging_face, {"dtype": BF16, "shards": 3}, {}),
    ("mixtral", save_hugging_face, {"dtype": BF16, "shards": 3}, {}),
    ("vit", save_hugging_face, {"dtype": BF16, "shards": 3}, {}),
]
COMPUTED = 9  # the outputs of the first ones are compared as well


# Shards of a preset, half precision and shards of a folder are in one more each; other models are in the shards too.
LARGE = (1, 3, 4, 6, 8, 9, 10, 12, 14)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.large] * (number in LARGE), id=f"{name}-{number}")
        for number, (name, *_) in enumerate(SOURCES)
    ],
)
def test_a_folder(number: int, tmp_path: Path, mesh8: Mesh) -> None:
    """The same variables, and outputs, on one device and on eight."""
    name, save, written, given = SOURCES[number]
    (cls, _), folder = BACKBONES[name], save(tmp_path / name, name, **written)
    files = [file for file in folder.iterdir() if file.name.endswith((".weights.h5", ".safetensors"))]
    assert len(files) > 2 or not {"shards", "max_shard_size"} & {*written}
    stock = seeded(lambda: cls.from_preset(str(folder), **given))
    alone = seeded(lambda: lk.from_preset(cls, str(folder), **given))
    assert alone.dtype_policy.name == stock.dtype_policy.name
    assert_same(stock, alone, outputs=False)
    if "dtype" in given:
        return
    sharded = seeded(lambda: lk.from_preset(cls, str(folder), mesh=mesh8, rules=first_that_divides, **given))
    assert_same(stock, sharded, outputs=number < COMPUTED)
    split = [v for v in sharded.weights if not v.value.is_fully_replicated]
    assert len(split) > len(sharded.weights) / 2


def mixed_map() -> Any:
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["token_embedding"] = "bfloat16"
    policies["decoder_block_0/attention/.*"] = "mixed_bfloat16"
    policies["decoder_block_1/ffw_.*"] = "float16"
    return policies


@pytest.mark.parametrize(
    ("cls", "dtype", "everywhere"),
    [(Backbone, mixed_map, None), (Backbone, None, "mixed_bfloat16"), (GemmaCausalLM, mixed_map, None)],
)
def test_in_another_dtype(cls: Any, dtype: Any, everywhere: str | None, mesh8: Mesh) -> None:
    def options() -> dict[str, Any]:
        return ({} if cls is Backbone else {"preprocessor": None}) | ({"dtype": dtype()} if dtype else {})

    before, preset = keras.config.dtype_policy(), preset_of("gemma")
    keras.config.set_dtype_policy(everywhere or before)
    try:
        stock = cls.from_preset(preset, **options())
        ours = lk.from_preset(cls, preset, mesh=mesh8, rules=lm.auto(), **options())
    finally:
        keras.config.set_dtype_policy(before)
    assert_same(stock, ours, outputs=False)
    for one, other in zip(stock._flatten_layers(), ours._flatten_layers(), strict=True):
        assert (one.variable_dtype, one.compute_dtype) == (other.variable_dtype, other.compute_dtype), one.path
    assert everywhere is None or ours.compute_dtype == "bfloat16"


def test_active_distribution_is_used_and_kept_unless_rules_are_given(mesh42: Mesh) -> None:
    assert_same_in_distribution(GEMMA, preset_of("gemma"))
    with keras.distribution.DataParallel().scope():
        rules = {".*embeddings": P(None, "batch"), ".*": P()}
        ours = lk.from_preset(BERT, preset_of("bert"), mesh=mesh42, rules=rules)
        assert ours.token_embedding.embeddings.value.sharding.spec == P(None, "batch")
        replicated = lk.from_preset(BERT, preset_of("bert"))
    assert all(len(v.value.sharding.device_set) == 8 for v in replicated.weights)


def test_layout_maps_as_rules() -> None:
    mesh = device_mesh(1, 8)
    published, abstract = GEMMA.get_layout_map(mesh), lm.build_abstract(GEMMA, **CONFIG)
    sharded = abstract.shard(mesh, published)
    for path, variable in sharded.items():
        assert tuple(variable.spec) == tuple(P(*published[path].axes) if published[path] is not None else P()), path
    model = lk.from_preset(GEMMA, preset_of("gemma"), mesh=mesh, rules=published)
    assert model.token_embedding.embeddings.value.sharding == sharded["token_embedding/embeddings"].sharding
    with pytest.warns(lm.LazyModelWarning, match="rule '.*/no_such_kernel' matches no variable"):
        abstract.shard(mesh, layouts(mesh, **{".*/no_such_kernel": ("model", None)}))
    twice = layouts(mesh, **{".*embeddings": ("model", None), "token_embedding/.*": (None, "model")})
    with pytest.raises(lm.ShardingError, match=r"'token_embedding/embeddings' .*more than one key"):
        abstract.shard(mesh, twice)
    with distribution(published), pytest.raises(lm.ShardingError, match=r"key/kernel.*size 1 .* 8"):
        lm.build_abstract(GEMMA, **{**CONFIG, "num_key_value_heads": 1})


def test_what_an_active_distribution_replicates_is_named() -> None:
    def build() -> keras.Model:
        dense = keras.layers.Dense(1024, name="dense"), keras.layers.Dense(512, name="head")
        return keras.Sequential([keras.layers.Input((512,)), *dense])

    scope = distribution(layouts(device_mesh(1, 8), **{".*dense/kernel": (None, "model")}))
    with scope, pytest.warns(lm.LazyModelWarning, match=r"1 variables.*head/kernel \(1024, 512\)"):
        model = lm.build_abstract(build).materialize()
    assert model.weights[0].value.sharding.spec == P(None, "model")
    assert model.weights[2].value.is_fully_replicated


def test_a_mesh_of_fewer_devices() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    model = lk.from_preset(GEMMA, preset_of("gemma"), mesh=mesh, rules={".*embeddings": P("model"), ".*": P()})
    assert all(len(v.value.sharding.device_set) == 2 for v in model.weights)
    assert model.token_embedding.embeddings.value.sharding.spec == P("model")


@needs_keras_hub("0.30", "BERT checkpoints whose tensors have no prefix 'bert.'")
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.large)])
def test_text_classifier_with_tokenizer_and_a_new_head(real: bool, minilm: str, tmp_path: Path, mesh8: Mesh) -> None:
    """A real checkpoint, or its vocabulary and tiny weights."""
    folder = minilm
    if not real:
        folder = str(save_hugging_face(tmp_path / "bert", "bert"))
        for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
            if (Path(minilm) / name).exists():
                shutil.copy(Path(minilm) / name, folder)
    cls = keras_hub.models.TextClassifier
    stock = seeded(lambda: cls.from_preset(folder, num_classes=3))
    abstract = seeded(lambda: lk.abstract_from_preset(cls, folder, num_classes=3).shard(mesh8, first_that_divides))
    actions = {row.path: row.action for row in abstract.plan().rows}
    assert actions["logits/kernel"] == "initialize"
    assert actions["pooled_dense/kernel"] == "load"
    ours = abstract.materialize()
    assert_same(stock, ours, outputs=False)
    for found, expected in zip(*(sorted(m.preprocessor(["a", "b c"]).items()) for m in (ours, stock)), strict=True):
        assert found[0] == expected[0]
        np.testing.assert_array_equal(*(np.asarray(tensor) for _, tensor in (found, expected)))


@pytest.mark.filterwarnings("ignore:unclosed file .*vocabulary.spm:ResourceWarning")  # KerasHub leaves it open
def test_causal_lm_generates_the_same(mesh8: Mesh) -> None:
    folder = causal_lm()
    cls = keras_hub.models.CausalLM
    stock = seeded(lambda: cls.from_preset(folder))
    stock.compile(sampler="greedy")
    # Before TensorFlow's seed is set again, which breaks the tokenizers of older versions of KerasHub.
    expected = stock.generate("the quick", max_length=10)
    ours = seeded(lambda: lk.from_preset(cls, folder, mesh=mesh8, rules=first_that_divides))
    assert_same(stock, ours, outputs=False)
    ours.compile(sampler="greedy")
    assert ours.generate("the quick", max_length=10) == expected
    assert int(ours.optimizer.iterations.value) == 0


def test_a_report_on_a_preset(mesh8: Mesh) -> None:
    reports: list[lm.LoadReport] = []
    model = lk.from_preset(BERT, preset_of("bert"), mesh=mesh8, rules=first_that_divides, report=reports.append)
    (report,) = reports
    file = Path(preset_of("bert"), "model.weights.h5")
    assert report.name == model.name
    assert {row.path for row in report.loaded} == {weight.path for weight in model.weights}
    assert report.files == {str(file): file.stat().st_size}
    assert report.needed_nbytes == report.read_nbytes == sum(weight.value.nbytes for weight in model.weights)
    assert report.unused == report.mismatched == ()
    (kernel,) = [row for row in report.loaded if row.path == "pooled_dense/kernel"]
    (tensor,) = kernel.tensors
    assert (tensor.name, tensor.file, tensor.nbytes) == ("layers/dense/vars/0", str(file), 32 * 32 * 4)


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # Keras' own, for every fit of a KerasHub task
def test_the_result_is_an_ordinary_model(tmp_path: Path, mesh8: Mesh) -> None:
    cls, config = BACKBONES["bert"]
    randomize(cls(**{**config, "num_layers": 1})).save_to_preset(str(tmp_path / "bert"))
    given: dict[str, Any] = {"num_classes": 2, "preprocessor": None, "mesh": mesh8, "rules": first_that_divides}
    model = lk.from_preset(keras_hub.models.BertTextClassifier, tmp_path / "bert", **given)
    kernel = model.backbone.get_layer("pooled_dense").kernel
    sharding = kernel.value.sharding
    kernel.assign(np.ones(kernel.shape, "float32"))
    assert kernel.value.sharding == sharding
    x = {name: np.ones((8, 6), "int32") for name in ("token_ids", "segment_ids", "padding_mask")}
    before = bits(kernel)
    model.fit(x, np.arange(8, dtype="int32") % 2, batch_size=8, verbose=0)
    assert not np.array_equal(before, bits(kernel))
    assert kernel.value.sharding.is_equivalent_to(sharding, 2)
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    assert slots
    assert any(not slot.value.is_fully_replicated for slot in slots)
    model.backbone.save_to_preset(str(tmp_path / "again"))
    again = lk.from_preset(keras_hub.models.BertBackbone, str(tmp_path / "again"))
    np.testing.assert_array_equal(bits(again.get_layer("pooled_dense").kernel), bits(kernel))
    model.backbone.load_weights(str(tmp_path / "bert" / "model.weights.h5"))
    assert kernel.value.sharding.is_equivalent_to(sharding, 2)


def test_no_full_garbage_collection_holds_up_a_load() -> None:
    before, during = gc.get_threshold(), set[tuple[int, int, int]]()

    def stop(*_: Any) -> None:
        during.add(gc.get_threshold())
        raise InterruptedError

    with pytest.raises(InterruptedError):
        lk.from_preset(GEMMA, preset_of("gemma"), progress=stop)
    assert {old for *_, old in during} == {1 << 20}
    assert {tuple(young) for *young, _ in during} == {before[:2]}
    assert gc.get_threshold() == before


def test_one_descriptor_serves_a_whole_file() -> None:
    folder = preset_of("gemma")
    before = len(os.listdir("/proc/self/fd"))
    abstract = lk.abstract_from_preset(GEMMA, folder)
    assert len(abstract.sources) > 20
    model = abstract.materialize()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the stream's, and the HDF5 library's
    del abstract, model


def test_no_device_holds_more_than_its_shard_and_nothing_is_drawn_in_vain(
    mesh8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches every array that is made while loading, and every random draw."""
    folder = preset_of("gemma")
    largest: dict[jax.Device, int] = {}
    before = {id(array): array for array in jax.live_arrays()}  # kept, so that no id is used again

    def watch(*_: Any) -> None:
        arrays = (array for array in jax.live_arrays() if id(array) not in before)
        for shard in (shard for array in arrays for shard in array.addressable_shards):
            largest[shard.device] = max(largest.get(shard.device, 0), shard.data.nbytes)

    draws: list[Any] = []
    for name in ("normal", "uniform", "truncated_normal"):
        original = getattr(jax.random, name)
        monkeypatch.setattr(
            jax.random, name, lambda *a, _original=original, **k: (draws.append(a), _original(*a, **k))[1]
        )

    abstract = lk.abstract_from_preset(GEMMA, folder).shard(mesh8, first_that_divides)
    watch()
    assert max(largest.values(), default=0) <= 8, "an abstract model holds no arrays, but for scalars of KerasHub's"
    model = abstract.materialize(progress=watch)
    watch()
    del model
    assert largest
    assert max(largest.values()) == max(v.shard_nbytes for v in abstract.values())
    assert draws == []


@pytest.mark.large
@pytest.mark.timeout(900)
def test_peak_private_memory() -> None:
    """Each way in a process of its own, watched from outside; the benchmark also compares every value."""
    command = [sys.executable, str(BENCHMARK), "--runs", "1", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=child_environment())
    assert json.loads(done.stdout)["ours"]["peak"] <= 1.10


@pytest.mark.parametrize("shards", [1, 3])
def test_an_adapter_is_merged_while_the_model_is_loaded(tmp_path: Path, mesh8: Mesh, shards: int) -> None:
    """The same as loading a folder into which it was merged before."""
    cls = keras_hub.models.Llama3Backbone
    folder = save_hugging_face(tmp_path / "base", "llama3", dtype=BF16, shards=shards)
    base = lm.open_checkpoint(folder)
    adapted = [name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))]
    tensors: dict[str, np.ndarray] = {}
    for name in adapted:
        out, inner = base[name].shape
        for side, shape in (("A", (4, inner)), ("B", (out, 4))):
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"
            tensors[key] = np.random.default_rng(len(tensors)).standard_normal(shape).astype(np.float32)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    lm.save(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_bytes((folder / "config.json").read_bytes())
    # The model is in float32, in which the sum is kept.
    sums = {name: tensor.astype(np.float32) for name, tensor in lm.merge(base, lm.open_adapter(adapter)).items()}
    lm.save(sums, merged / "model.safetensors")
    expected = seeded(lambda: lk.from_preset(cls, str(merged)))
    found = seeded(lambda: lk.from_preset(cls, str(folder), adapter=adapter, mesh=mesh8, rules=lm.auto()))
    assert_same(expected, found, outputs=False)
    assert len(adapted) >= 2
    plain = lk.from_preset(cls, str(folder))
    changed = [a for a, b in zip(plain.weights, found.weights, strict=True) if (bits(a) != bits(b)).any()]
    assert len(changed) == len(adapted)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    with pytest.raises(lm.CheckpointError, match="expected rank 8"):
        lk.from_preset(cls, str(folder), adapter=adapter)


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "projector"])
def test_what_an_adapter_changes_is_not_lost(tmp_path: Path, saved: str) -> None:
    """A head of a model whose embeddings are tied, on either side, and what the model does not have."""
    cls, config = keras_hub.models.Llama3Backbone, decoder("llama", tie_word_embeddings=True)
    base = random_tensors(decoder_shapes(config))
    folder = write_safetensors_folder(tmp_path / "base", config, base)
    name = {"embed_tokens": "model.embed_tokens"}.get(saved, saved)
    head = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    (tmp_path / "adapter").mkdir()
    lm.save({f"base_model.model.{name}.weight": head}, tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "modules_to_save": [saved], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))

    def load() -> Any:
        tied = saved != "projector"
        with pytest.warns(lm.LazyModelWarning, match="changes them apart") if tied else contextlib.nullcontext():
            return lk.from_preset(cls, str(folder), adapter=tmp_path / "adapter")

    if saved == "projector":
        with pytest.raises(lm.CheckpointError, match="adapter changes projector.weight, which the model does not have"):
            load()
        return
    with pytest.raises(lm.CheckpointError, match='lm_head.weight.*set "tie_word_embeddings" to false in config.json'):
        load()
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    embedding = load().token_embedding
    old = base["model.embed_tokens.weight"]
    expected = (old, head) if saved == "lm_head" else (head, old)
    np.testing.assert_array_equal(embedding.embeddings.value, expected[0])
    np.testing.assert_array_equal(embedding.reverse_embeddings.value, expected[1].T)


def test_an_adapter_that_nothing_would_be_merged_into_is_refused(tmp_path: Path) -> None:
    cls, folder = BACKBONES["llama3"][0], save_preset(tmp_path / "preset", "llama3")
    tensors = {
        "base_model.model.layers.0.q_proj.lora_A.weight": np.ones((4, 8), np.float32),
        "base_model.model.layers.0.q_proj.lora_B.weight": np.ones((8, 4), np.float32),
    }
    (tmp_path / "adapter").mkdir()
    lm.save(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    with pytest.raises(lm.LazyModelError, match="expected weights of a Hugging Face folder to merge it into"):
        lk.from_preset(cls, str(folder), adapter=tmp_path / "adapter")
    hub = save_hugging_face(tmp_path / "base", "llama3")
    with pytest.raises(lm.CheckpointError, match=r"'layers\.0\.q_proj\.weight': expected this tensor"):
        lk.from_preset(cls, str(hub), adapter=tmp_path / "adapter")
