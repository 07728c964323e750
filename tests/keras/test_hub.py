"""`lk.from_preset` against stock `from_preset`: the same model, bit for bit, and only shards on the devices."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import keras
import keras_hub
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel._tensors.stored import StoredTensor
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


# Every large axis of these small models divides by 8 somewhere.
def first_that_divides(variable: lm.AbstractVariable) -> P:
    """Rules for any model: the last axis that 8 divides."""
    for axis in reversed(range(len(variable.shape))):
        if variable.shape[axis] % 8 == 0:
            return P(*([None] * axis), "model")
    return P()


@pytest.mark.parametrize("name", BACKBONES)
def test_preset_in_one_file(name: str, tmp_path: Path) -> None:
    cls, _ = BACKBONES[name]
    folder = str(save_preset(tmp_path / name, name))
    stock = seeded(lambda: cls.from_preset(folder))
    assert_same(stock, seeded(lambda: lk.from_preset(cls, folder)))


@pytest.mark.parametrize("name", BACKBONES)
def test_preset_onto_a_mesh(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    cls, _ = BACKBONES[name]
    folder = str(save_preset(tmp_path / name, name))
    stock = seeded(lambda: cls.from_preset(folder))
    ours = seeded(lambda: lk.from_preset(cls, folder, mesh=mesh8, rules=first_that_divides))
    assert_same(stock, ours)
    sharded = [v for v in ours.weights if not v.value.is_fully_replicated]
    assert len(sharded) > len(ours.weights) / 2


@pytest.mark.parametrize("name", ["gemma", "mixtral"])
def test_preset_in_shards(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    cls, _ = BACKBONES[name]
    folder = save_preset(tmp_path / name, name, max_shard_size=2e-5 if name == "gemma" else 4e-5)  # GB
    assert len(list(folder.glob("model_*.weights.h5"))) > 2
    stock = seeded(lambda: cls.from_preset(str(folder)))
    assert_same(stock, seeded(lambda: lk.from_preset(cls, str(folder), mesh=mesh8, rules=first_that_divides)))


@pytest.mark.parametrize("name", ["llama3", "bert", "vit", "mixtral"])
@pytest.mark.parametrize(("dtype", "shards"), [(np.float32, 1), (ml_dtypes.bfloat16, 3)])
def test_hugging_face_folder(name: str, dtype: Any, shards: int, tmp_path: Path, mesh8: Mesh) -> None:
    cls, _ = BACKBONES[name]
    folder = str(save_hugging_face(tmp_path / name, name, dtype=dtype, shards=shards))
    stock = seeded(lambda: cls.from_preset(folder))
    assert_same(stock, seeded(lambda: lk.from_preset(cls, folder)))
    assert_same(stock, seeded(lambda: lk.from_preset(cls, folder, mesh=mesh8, rules=first_that_divides)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed_bfloat16"])
@pytest.mark.parametrize("source", ["preset", "hugging_face"])
def test_dtype(dtype: str, source: str, tmp_path: Path) -> None:
    save = save_preset if source == "preset" else save_hugging_face
    folder = str(save(tmp_path / "llama3", "llama3"))
    cls, _ = BACKBONES["llama3"]
    stock = seeded(lambda: cls.from_preset(folder, dtype=dtype))
    ours = seeded(lambda: lk.from_preset(cls, folder, dtype=dtype))
    assert ours.dtype_policy.name == stock.dtype_policy.name == dtype
    assert_same(stock, ours, outputs=False)


def test_load_weights_false_initializes_as_stock_does(tmp_path: Path, mesh8: Mesh) -> None:
    folder = str(save_preset(tmp_path / "gemma", "gemma"))
    cls, _ = BACKBONES["gemma"]
    stock = seeded(lambda: cls.from_preset(folder, load_weights=False))
    assert_same(stock, seeded(lambda: lk.from_preset(cls, folder, load_weights=False)))
    assert_same(stock, seeded(lambda: lk.from_preset(cls, folder, False, mesh=mesh8, rules=first_that_divides)))


def test_the_base_class_finds_the_subclass(tmp_path: Path) -> None:
    folder = str(save_preset(tmp_path / "bert", "bert"))
    assert type(lk.from_preset(keras_hub.models.Backbone, folder)) is keras_hub.models.BertBackbone


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


@needs_keras_hub("0.30", "keras_hub.models.BertTextEmbedder")
def test_task_with_tokenizer_from_hugging_face(minilm: str, mesh8: Mesh) -> None:
    cls = keras_hub.models.BertTextEmbedder
    stock = seeded(lambda: cls.from_preset(minilm))
    ours = seeded(lambda: lk.from_preset(cls, minilm, mesh=mesh8, rules=first_that_divides))
    assert_same(stock, ours, outputs=False)
    sentences = ["A mesh of eight devices.", "Nothing is ever whole on one of them."]
    np.testing.assert_allclose(
        stock.predict(sentences, verbose=0), ours.predict(sentences, verbose=0), rtol=1e-5, atol=1e-5
    )


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
    np.testing.assert_allclose(stock.predict(["a", "b c"], verbose=0), ours.predict(["a", "b c"], verbose=0), atol=1e-5)


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
    assert kernel.tensors == (StoredTensor("layers/dense/vars/0", str(file), "float32", 32 * 32 * 4),)


def test_a_report_names_what_keras_did_not_ask_for(tmp_path: Path) -> None:
    cls, _ = BACKBONES["bert"]
    folder = save_preset(tmp_path / "bert", "bert")
    with h5py.File(folder / "model.weights.h5", "a") as file:
        file["layers/another/vars/0"] = np.zeros(3, "float32")
        file["optimizer/vars/0"] = np.zeros(2, "int32")
    reports: list[lm.LoadReport] = []
    holds = r"holds 1 tensors .*: layers/another/vars/0\. They are left out"
    with pytest.warns(lm.LazyModelWarning, match=holds) as caught:
        lk.from_preset(cls, str(folder), strict=False, report=reports.append)
    with pytest.warns(lm.LazyModelWarning, match=holds) as also_caught:
        lk.abstract_from_preset(cls, str(folder), strict=False)
    assert [w.filename for w in (*caught, *also_caught)] == [__file__] * 2, "they point to the caller's line"
    unused = {tensor.name: tensor.nbytes for tensor in reports[0].unused}
    assert unused == {"layers/another/vars/0": 12, "optimizer/vars/0": 8}


def test_a_report_names_what_a_converter_left_out(tmp_path: Path) -> None:
    """A converter takes what it wants; what that leaves is an error, a warning, and a line in the report."""
    cls, _ = BACKBONES["llama3"]
    folder = save_hugging_face(tmp_path / "llama3", "llama3", shards=2)
    shard = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(shard) | {"lm_head.extra": np.zeros((4, 4), "float16")}, shard)
    with pytest.raises(lm.CheckpointError, match=r"holds 1 tensors .*: lm_head\.extra\. .* Pass strict=False"):
        lk.abstract_from_preset(cls, str(folder))
    with pytest.raises(lm.CheckpointError, match="Use lazymodel_keras.abstract_from_preset with strict=False to leave"):
        lm.build_abstract(cls.from_preset, str(folder))
    with pytest.warns(lm.LazyModelWarning, match=r"holds 1 tensors .*: lm_head\.extra\."):
        abstract = lk.abstract_from_preset(cls, str(folder), strict=False)
    assert abstract.unused == (StoredTensor("lm_head.extra", str(shard), "float16", 32),)
    reports: list[lm.LoadReport] = []
    abstract.shard(Mesh(jax.devices()[:1], ("model",)), lambda _: P()).materialize(report=reports.append)
    assert reports[0].unused == abstract.unused
    assert len(reports[0].files) == 2


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # Keras' own, for every fit of a KerasHub task
def test_the_result_is_an_ordinary_model(tmp_path: Path, mesh8: Mesh) -> None:
    folder = str(save_preset(tmp_path / "bert", "bert"))
    model = lk.from_preset(
        keras_hub.models.BertTextClassifier,
        folder,
        num_classes=2,
        preprocessor=None,
        mesh=mesh8,
        rules=first_that_divides,
    )
    kernel = model.backbone.get_layer("pooled_dense").kernel
    sharding = kernel.value.sharding
    kernel.assign(np.ones(kernel.shape, "float32"))
    assert kernel.value.sharding == sharding
    x = {
        "token_ids": np.ones((8, 6), "int32"),
        "segment_ids": np.zeros((8, 6), "int32"),
        "padding_mask": np.ones((8, 6), "int32"),
    }
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
