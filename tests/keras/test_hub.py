"""`lk.from_preset` against stock `from_preset`: the same model, bit for bit, and only shards on the devices."""

from __future__ import annotations

import gc
import json
import os
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
from tests.sentence_piece import gemma_vocabulary

from .models import (
    BACKBONES,
    assert_same,
    assert_same_in_distribution,
    bits,
    randomize,
    save_hugging_face,
    save_preset,
    seeded,
)
from .versions import needs_keras_hub

BENCHMARK = ROOT / "tests" / "benchmarks" / "load_preset.py"


# Every large axis of these small models divides by 8 somewhere.
def first_that_divides(variable: lm.AbstractVariable) -> P:
    """Rules for any model: the last axis that 8 divides."""
    for axis in reversed(range(len(variable.shape))):
        if variable.shape[axis] % 8 == 0:
            return P(*([None] * axis), "model")
    return P()


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


@pytest.mark.parametrize("number", range(len(SOURCES)), ids=lambda number: f"{SOURCES[number][0]}-{number}")
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


def test_active_distribution_is_used_and_kept(tmp_path: Path) -> None:
    folder = str(save_preset(tmp_path / "gemma", "gemma"))
    cls, _ = BACKBONES["gemma"]
    assert_same_in_distribution(cls, folder)


def test_mesh_and_rules_override_an_active_distribution(tmp_path: Path, mesh42: Mesh) -> None:
    folder = str(save_preset(tmp_path / "bert", "bert"))
    with keras.distribution.DataParallel().scope():
        ours = lk.from_preset(
            BACKBONES["bert"][0], folder, mesh=mesh42, rules={".*embeddings": P(None, "batch"), ".*": P()}
        )
        assert ours.token_embedding.embeddings.value.sharding.spec == P(None, "batch")
        replicated = lk.from_preset(BACKBONES["bert"][0], folder)
    assert all(len(v.value.sharding.device_set) == 8 for v in replicated.weights)


@needs_keras_hub("0.30", "BERT checkpoints whose tensors have no prefix 'bert.'")
def test_text_classifier_with_tokenizer_and_a_new_head(minilm: str, mesh8: Mesh) -> None:
    cls = keras_hub.models.TextClassifier
    stock = seeded(lambda: cls.from_preset(minilm, num_classes=3))
    abstract = seeded(lambda: lk.abstract_from_preset(cls, minilm, num_classes=3).shard(mesh8, first_that_divides))
    actions = {row.path: row.action for row in abstract.plan().rows}
    assert actions["logits/kernel"] == "initialize"
    assert actions["pooled_dense/kernel"] == "load"
    ours = abstract.materialize()
    assert_same(stock, ours, outputs=False)
    for found, expected in zip(*(sorted(m.preprocessor(["a", "b c"]).items()) for m in (ours, stock)), strict=True):
        assert found[0] == expected[0]
        np.testing.assert_array_equal(*(np.asarray(tensor) for _, tensor in (found, expected)))


def causal_lm(folder: Path, **changes: Any) -> str:
    """A Gemma CausalLM preset with a word-piece-like tokenizer of its own."""
    tokenizer = keras_hub.models.GemmaTokenizer(proto=gemma_vocabulary())
    backbone = randomize(keras_hub.models.GemmaBackbone(**{**BACKBONES["gemma"][1], **changes}))
    preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
    keras_hub.models.GemmaCausalLM(backbone, preprocessor).save_to_preset(str(folder))
    return str(folder)


@pytest.mark.filterwarnings("ignore:unclosed file .*vocabulary.spm:ResourceWarning")  # KerasHub leaves it open
def test_causal_lm_generates_the_same(tmp_path: Path, mesh8: Mesh) -> None:
    folder = causal_lm(tmp_path / "gemma_lm")
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


@pytest.mark.parametrize("save", [save_preset, save_hugging_face])
def test_a_table_has_a_row_for_all_layers(save: Callable[..., Path], tmp_path: Path) -> None:
    abstract = lk.abstract_from_preset(keras_hub.models.Backbone, str(save(tmp_path / "llama3", "llama3")))
    layers = [path for path in abstract if "layer_" in path]
    counts = [row[1] for row in abstract.table().rows if "layer_" in row[0]]
    assert counts == ["2"] * (len(layers) // 2) != []


def test_a_report_on_a_preset(tmp_path: Path, mesh8: Mesh) -> None:
    cls, _ = BACKBONES["bert"]
    folder = save_preset(tmp_path / "bert", "bert")
    reports: list[lm.LoadReport] = []
    model = lk.from_preset(cls, str(folder), mesh=mesh8, rules=first_that_divides, report=reports.append)
    (report,) = reports
    file = folder / "model.weights.h5"
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


def test_no_full_garbage_collection_holds_up_a_load(tmp_path: Path) -> None:
    before, during = gc.get_threshold(), set[tuple[int, int, int]]()
    cls, _ = BACKBONES["gemma"]
    folder = str(save_preset(tmp_path / "gemma", "gemma"))

    def stop(*_: Any) -> None:
        during.add(gc.get_threshold())
        raise InterruptedError

    with pytest.raises(InterruptedError):
        lk.from_preset(cls, folder, progress=stop)
    assert {old for *_, old in during} == {1 << 20}
    assert {tuple(young) for *young, _ in during} == {before[:2]}
    assert gc.get_threshold() == before


def test_one_descriptor_serves_a_whole_file(tmp_path: Path) -> None:
    folder = str(save_preset(tmp_path / "gemma", "gemma"))
    before = len(os.listdir("/proc/self/fd"))
    abstract = lk.abstract_from_preset(BACKBONES["gemma"][0], folder)
    assert len(abstract.sources) > 20
    model = abstract.materialize()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the stream's, and the HDF5 library's
    del abstract, model


def test_no_device_holds_more_than_its_shard_and_nothing_is_drawn_in_vain(
    tmp_path: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches every array that is made while loading, and every random draw."""
    folder = str(save_preset(tmp_path / "gemma", "gemma"))
    cls, _ = BACKBONES["gemma"]
    largest: dict[jax.Device, int] = {}
    before = {id(array): array for array in jax.live_arrays()}  # kept, so that no id is used again

    def watch(*_: Any) -> None:
        for array in jax.live_arrays():
            if id(array) in before:
                continue
            for shard in array.addressable_shards:
                largest[shard.device] = max(largest.get(shard.device, 0), shard.data.nbytes)

    draws: list[Any] = []
    for name in ("normal", "uniform", "truncated_normal"):
        original = getattr(jax.random, name)
        monkeypatch.setattr(
            jax.random, name, lambda *a, _original=original, **k: (draws.append(a), _original(*a, **k))[1]
        )

    abstract = lk.abstract_from_preset(cls, folder).shard(mesh8, first_that_divides)
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
@pytest.mark.parametrize("max_shard_size", [None, 0.3], ids=["one_file", "shards"])  # GB
def test_gemma_of_267_million_parameters(
    max_shard_size: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    from load_preset import CONFIG

    cls = keras_hub.models.GemmaBackbone
    folder = str(tmp_path / "gemma")
    randomize(cls(**CONFIG)).save_to_preset(folder, max_shard_size=max_shard_size)
    assert len(list(Path(folder).glob("*.weights.h5"))) == (1 if max_shard_size is None else 4)
    assert_same_in_distribution(cls, folder)


@pytest.mark.large
@pytest.mark.timeout(900)
def test_peak_private_memory() -> None:
    """Each way in a process of its own, watched from outside; the benchmark also compares every value."""
    command = [sys.executable, str(BENCHMARK), "--runs", "1", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=child_environment())
    assert json.loads(done.stdout)["ours"]["peak"] <= 1.10
