"""What a folder holds and nothing asked for: layers, adapters, scales. And casts of what was asked for."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_hub
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel_keras._record.hugging_face import _on_purpose

from .models import BACKBONES, assert_same, bits, save_hugging_face, seeded, write_safetensors_folder

LLAMA3 = BACKBONES["llama3"][0]
F8 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]


def rewritten(
    folder: Path, name: str, change: Callable[[Tensors], Any] | None = None, *, shards: int = 1, **config: Any
) -> str:
    """A Hugging Face folder with some tensors and entries of its configuration changed."""
    made = save_hugging_face(folder / "made", name)
    tensors = load_file(made / "model.safetensors")
    if change is not None:
        change(tensors)
    given = json.loads((made / "config.json").read_text()) | config
    return str(write_safetensors_folder(folder / "changed", given, tensors, shards=shards))


def refused(folder: str, cls: Any = LLAMA3, **given: Any) -> str:
    with pytest.raises(lm.CheckpointError) as caught:
        (lk.abstract_from_preset if "cast" in given else lk.from_preset)(cls, folder, **given)
    return str(caught.value)


# Tensors that nothing asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a_configuration_with_more_layers(shards: int, tmp_path: Path) -> None:
    text = refused(rewritten(tmp_path, "llama3", shards=shards, num_hidden_layers=4))
    assert "model.layers.2." in text
    assert "nor any like it from number 2 on: it has those of 0 to 1. Does the configuration have more layers" in text


@pytest.mark.parametrize("shards", [1, 2, 30])
def test_a_configuration_with_fewer_layers(shards: int, tmp_path: Path) -> None:
    """With 30 shards, most of the second layer's are never opened."""
    folder = rewritten(tmp_path, "llama3", shards=shards, num_hidden_layers=1)
    text = refused(folder)
    assert f"{folder} holds 9 tensors that KerasHub's converter did not ask for: model.layers.1." in text
    assert "Is its config.json that of another model?" in text
    assert text.endswith("Pass strict=False to leave them out.")
    stock = seeded(lambda: LLAMA3.from_preset(folder))
    reports: list[lm.LoadReport] = []
    with pytest.warns(lm.LazyModelWarning, match=r"holds 9 tensors .* They are left out") as caught:
        ours = seeded(lambda: lk.from_preset(LLAMA3, folder, strict=False, report=reports.append))
    assert [warning.filename for warning in caught] == [__file__]
    assert_same(stock, ours, outputs=False)
    unused = {tensor.name: tensor for tensor in reports[0].unused}
    assert len(unused) == 9
    assert unused["model.layers.1.mlp.up_proj.weight"].nbytes == 64 * 32 * 4


def test_a_shard_that_was_not_downloaded(tmp_path: Path) -> None:
    """KerasHub downloads only the shards that it needs; what the others hold is known from the index."""
    folder = rewritten(tmp_path, "llama3", shards=40, num_hidden_layers=1)
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    (Path(folder) / index["model.layers.1.mlp.up_proj.weight"]).unlink()
    assert "holds 9 tensors" in refused(folder)
    with pytest.warns(lm.LazyModelWarning, match="holds 9 tensors"):
        abstract = lk.abstract_from_preset(LLAMA3, folder, strict=False)
    assert [tensor.name for tensor in abstract.unused if tensor.nbytes is None] == ["model.layers.1.mlp.up_proj.weight"]


def test_an_adapter(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = np.ones((4, 32), np.float32)

    text = refused(rewritten(tmp_path, "llama3", add))
    assert "holds 1 tensors" in text
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in text


def test_within_a_block(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, "llama3", num_hidden_layers=1)
    with pytest.raises(lm.CheckpointError, match="holds 9 tensors"), lk.deferred():
        LLAMA3.from_preset(folder)
    with pytest.warns(lm.LazyModelWarning, match="holds 9 tensors"), lk.deferred(strict=False):
        LLAMA3.from_preset(folder)
    with pytest.raises(lm.CheckpointError, match="holds 9 tensors"):
        lm.build_abstract(LLAMA3.from_preset, folder)


def test_a_projection_of_its_own_where_the_model_ties_it(tmp_path: Path) -> None:
    """The same tensor stored twice is left out; one that the configuration says is another is not."""
    tied = rewritten(tmp_path / "tied", "llama3", tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = seeded(lambda: lk.from_preset(LLAMA3, tied))
    assert_same(seeded(lambda: LLAMA3.from_preset(tied)), ours, outputs=False)

    def untie(tensors: Tensors) -> None:
        tensors["language_model.lm_head.weight"] = tensors["lm_head.weight"] * 2

    assert "language_model.lm_head.weight" in refused(rewritten(tmp_path / "untied", "llama3", untie))


def test_a_file_that_ones_own_code_reads(tmp_path: Path) -> None:
    """It takes what it wants, unless that needs what it leaves."""
    import safetensors

    def build() -> keras.Model:
        model = counting(("int32", "bool"))
        with safetensors.safe_open(str(tmp_path / "own.safetensors"), framework="np") as file:
            model.layers[0].table.assign(file.get_tensor("table"))
        return model

    table = np.arange(4, dtype=np.int32)
    save_file({"table": table, "other": np.ones(2, np.float32)}, tmp_path / "own.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        abstract = lm.build_abstract(build)
    np.testing.assert_array_equal(abstract.materialize().layers[0].table.value, table)
    assert [tensor.name for tensor in abstract.unused] == ["other"]


PURPOSE = {
    "llama": "model.layers.3.self_attn.rotary_emb.inv_freq model.rotary_emb.inv_freq score.weight",
    "gpt2": "h.0.attn.bias transformer.h.11.attn.masked_bias h.1.crossattention.bias lm_head.weight",
    "bert": "bert.embeddings.position_ids cls.predictions.decoder.weight cls.seq_relationship.bias classifier.weight "
    "qa_outputs.bias bert.pooler.dense.weight pooler.dense.bias embeddings.position_ids",
    "roberta": "lm_head.dense.weight lm_head.decoder.bias lm_head.bias roberta.pooler.dense.bias "
    "classifier.dense.weight classifier.out_proj.bias roberta.embeddings.position_ids "
    "roberta.embeddings.token_type_ids roberta.embeddings.token_type_embeddings.weight",
    "xlm-roberta": "lm_head.layer_norm.weight roberta.pooler.dense.bias",
    "distilbert": "vocab_transform.weight vocab_layer_norm.bias vocab_projector.bias pre_classifier.weight",
    "albert": "predictions.dense.weight sop_classifier.classifier.bias albert.pooler.weight albert.pooler.bias",
    "esm": "esm.contact_head.regression.weight esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq "
    "esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq lm_head.decoder.weight "
    "esm.embeddings.position_embeddings.weight esm.embeddings.position_ids",
    "bart": "final_logits_bias encoder.version model.decoder.embed_tokens.weight lm_head.weight "
    "classification_head.dense.weight",
    "swin": "swin.encoder.layers.0.blocks.1.attention.self.relative_position_index swin.embeddings.mask_token "
    "decoder.0.weight",
    "vit": "classifier.bias vit.pooler.dense.weight vit.embeddings.mask_token decoder.0.bias",
    "deit": "cls_classifier.weight distillation_classifier.bias deit.embeddings.mask_token",
    "gemma": "lm_head.weight",
    "gemma3": "language_model.lm_head.weight vision_tower.vision_model.head.probe "
    "vision_tower.vision_model.embeddings.position_ids",
    "qwen3_5": "mtp.layers.0.self_attn.q_proj.weight mtp.fc.weight",
    "sam3_video": "tracker_model.mask_downsample.weight tracker_neck.fpn_layers.0.proj1.bias "
    "detector_model.mask_decoder.pixel_decoder.conv_layers.2.bias",
    "": "layer1.0.bn1.num_batches_tracked fc.weight head.fc.bias classifier.bias conv_head.weight "
    "pre_logits.fc1.weight",
}


@pytest.mark.parametrize("kind", PURPOSE)
def test_what_converters_leave_out_on_purpose(kind: str) -> None:
    pattern = _on_purpose({"model_type": kind})
    assert [name for name in PURPOSE[kind].split() if not pattern.fullmatch(name)] == []


@pytest.mark.parametrize("kind", ["", "llama", "bert", "gpt2", "gemma3", "swin", "esm", "sam3_video"])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.30.mlp.up_proj.weight", "bert.encoder.layer.11.attention.self.query.bias", "h.3.attn.c_attn.bias",
        "h.3.attn.c_proj.weight", "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.visual.patch_embed.proj.weight",
        "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", "encoder.layer.0.mlp.fc.weight",
        "model.embed_tokens.weight", "bert.embeddings.LayerNorm.weight", "extra.weight",
    ],
)  # fmt: skip
def test_what_they_do_not(kind: str, name: str) -> None:
    assert not _on_purpose({"model_type": kind}).fullmatch(name)


def test_layers_that_share_keys() -> None:
    """As many of the last layers as the configuration says have no keys of their own, though files store some."""
    pattern = _on_purpose(
        {"model_type": "gemma3n", "text_config": {"num_hidden_layers": 30, "num_kv_shared_layers": 2}}
    )
    name = "model.language_model.layers.{}.self_attn.k_proj.weight"
    assert [layer for layer in range(32) if pattern.fullmatch(name.format(layer))] == [28, 29]


# Quantized folders ----------------------------------------------------------------------------------------------------

METHODS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},  # these two are known, and no weight is stored so
    "bitsandbytes": {"load_in_8bit": True, "load_in_4bit": False},
    "hqq": {"quant_method": "hqq", "nbits": 4},
    "an unknown method": {"bits": 4},
}


@pytest.mark.parametrize(
    ("method", "where"),
    [*((method, "quantization_config") for method in METHODS), ("fp8", "compression_config"), ("fp8", "text_config")],
)
def test_a_configuration_that_says_how_it_is_quantized(method: str, where: str, tmp_path: Path) -> None:
    found: Any = METHODS[method]
    found = {"quantization_config": found} if where == "text_config" else found
    folder = rewritten(tmp_path, "llama3", **{where: found})
    key = "quantization_config" if where == "text_config" else where
    text = refused(folder, strict=False, cast="unsafe")
    assert f"{Path(folder) / 'config.json'}: {key} says that the weights are quantized with {method!r}" in text
    assert ("none of them is stored so" if method in ("fp8", "bitsandbytes") else "load a dequantized copy") in text


def test_before_anything_is_opened(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, "llama3", quantization_config=METHODS["hqq"])
    (Path(folder) / "model.safetensors").write_bytes(b"no tensors at all")
    assert "quantized with 'hqq'" in refused(folder)
    good = str(Path(folder).parent / "made")
    with lk.deferred():
        with pytest.raises(lm.CheckpointError, match="quantized with 'hqq'"):
            LLAMA3.from_preset(folder)
        ours = seeded(lambda: LLAMA3.from_preset(good))  # another file is another matter
    assert_same(seeded(lambda: LLAMA3.from_preset(good)), ours, outputs=False)


@pytest.mark.parametrize(
    "found", [None, {}, {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False}]
)
def test_a_configuration_that_says_it_is_not_quantized(found: Any, tmp_path: Path) -> None:
    folder = rewritten(tmp_path, "llama3", quantization_config=found)
    assert_same(
        seeded(lambda: LLAMA3.from_preset(folder)), seeded(lambda: lk.from_preset(LLAMA3, folder)), outputs=False
    )


UP = "model.layers.0.mlp.up_proj"


def _fp8(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].astype(F8)
    tensors[f"{UP}.weight_scale_inv"] = np.full((1, 1), 0.01, np.float32)


def _bare_fp8(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].astype(F8)


def _int8(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = (tensors[f"{UP}.weight"] * 20).astype(np.int8)
    tensors[f"{UP}.SCB"] = np.ones(64, np.float32)


def _per_channel(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = (tensors[f"{UP}.weight"] * 20).astype(np.int8)
    tensors[f"{UP}.scales"] = np.ones(64, np.float32)


def _scale_alone(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_scale"] = np.ones((), np.float32)


def _gptq(tensors: Tensors) -> None:
    tensors[f"{UP}.g_idx"] = np.zeros(32, np.int32)
    tensors[f"{UP}.qzeros"] = np.zeros((1, 8), np.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_fp8, f"'{UP}.weight_scale_inv', which nothing takes"),
        (_bare_fp8, f"'{UP}.weight' (float8_e4m3fn)"),
        (_int8, f"'{UP}.weight' (int8) beside '{UP}.SCB', which nothing takes"),
        (_per_channel, f"'{UP}.weight' (int8) beside '{UP}.scales', which nothing takes"),
        (_scale_alone, f"'{UP}.weight_scale', which nothing takes"),
        (_gptq, f"'{UP}.g_idx', which nothing takes, '{UP}.qzeros', which nothing takes"),
    ],
)
def test_quantized_weights_that_no_configuration_tells_of(
    change: Callable[[Tensors], Any], words: str, tmp_path: Path
) -> None:
    folder = rewritten(tmp_path, "llama3", change, shards=2)
    for given in ({}, {"strict": False}, {"strict": False, "cast": "unsafe"}):
        text = refused(folder, **given)
        assert f"{folder} holds quantized weights: " in text
        assert words in text
        assert "load a dequantized copy" in text


# Casts ----------------------------------------------------------------------------------------------------------------


def test_integers_as_weights_of_a_folder(tmp_path: Path) -> None:
    """What every bfloat16 and float32 has is cast; what they need not have, by value."""
    name = "model.norm.weight"

    def change(dtype: Any, value: int) -> Callable[[Tensors], Any]:
        return lambda tensors: tensors.update({name: np.full(32, value, dtype)})

    exact = rewritten(tmp_path / "exact", "llama3", change(np.int64, 3))
    assert_same(seeded(lambda: LLAMA3.from_preset(exact)), seeded(lambda: lk.from_preset(LLAMA3, exact)), outputs=False)
    inexact = rewritten(tmp_path / "inexact", "llama3", change(np.int64, 2**24 + 1))
    assert "expected numbers that float32 has, found 16777217 (int64)" in refused(inexact)
    stock = seeded(lambda: LLAMA3.from_preset(inexact))
    assert_same(
        stock, seeded(lambda: lk.abstract_from_preset(LLAMA3, inexact, cast="unsafe").materialize()), outputs=False
    )
    complex_ = rewritten(
        tmp_path / "complex", "llama3", lambda tensors: tensors.update({name: np.ones(32, np.complex64)})
    )
    with pytest.raises(lm.CheckpointError, match="expected float32, found complex64 .*: the cast can lose imaginary"):
        lk.abstract_from_preset(LLAMA3, complex_)


class Counting(keras.layers.Layer):
    """A layer with an integer and a boolean variable, as tables and masks are."""

    def __init__(self, dtypes: tuple[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dtypes = dtypes
        self.table = self.add_weight(shape=(4,), dtype=dtypes[0], initializer="ones", trainable=False, name="table")
        self.mask = self.add_weight(shape=(4,), dtype=dtypes[1], initializer="ones", trainable=False, name="mask")

    def call(self, x: Any) -> Any:
        return x

    def get_config(self) -> Any:
        return {**super().get_config(), "dtypes": list(self.dtypes)}


def counting(dtypes: tuple[str, str]) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Counting(dtypes, name="counting")])


@pytest.mark.parametrize("own", [("int32", "bool"), ("int8", "uint8"), ("uint32", "bool")])
def test_tables_and_masks_of_keras_files(own: tuple[str, str], tmp_path: Path) -> None:
    saved = counting(own)
    saved.layers[0].table.assign([1, 2, 3, 100])
    saved.layers[0].mask.assign([1, 0, 1, 0])
    file = tmp_path / "model.weights.h5"
    saved.save_weights(file)
    for wanted in (own, ("int32", "bool"), ("int8", "int32"), ("float32", "float32")):
        stock, restored = counting(wanted), counting(wanted)
        stock.load_weights(file)
        lk.restore(restored, file)
        assert_same(stock, restored, outputs=False)
        with lk.deferred():
            built = counting(wanted)
            built.load_weights(file)
        assert_same(stock, built, outputs=False)


@pytest.mark.parametrize(
    ("own", "wanted", "words"),
    [
        (("float32", "bool"), ("int32", "bool"), "'counting/table': expected int32, found float32 in tensor"),
        (("int32", "bool"), ("int8", "bool"), "expected numbers that int8 has, found 300 (int32)"),
        (("int32", "int32"), ("int32", "bool"), "expected numbers that bool has, found 2 (int32)"),
        (("int32", "float32"), ("int32", "bool"), "'counting/mask': expected bool, found float32 in tensor"),
    ],
)
def test_casts_that_stock_keras_makes_in_silence(
    own: tuple[str, str], wanted: tuple[str, str], words: str, tmp_path: Path
) -> None:
    saved = counting(own)
    saved.layers[0].table.assign([1, 2, 3, 300])
    saved.layers[0].mask.assign([1, 0, 1, 0] if own[1] == "bool" else [2, 0, 1, 0])
    file = tmp_path / "model.weights.h5"
    saved.save_weights(file)
    model = counting(wanted)
    before = [bits(variable).tolist() for variable in model.variables]
    with pytest.raises(lm.CheckpointError, match=re.escape(words)):
        lk.restore(model, file)
    assert [bits(variable).tolist() for variable in model.variables] == before
    with pytest.raises(lm.CheckpointError, match=re.escape(words)), lk.deferred():
        counting(wanted).load_weights(file)
    stock = counting(wanted)
    stock.load_weights(file)
    lk.restore(model, file, cast="unsafe")
    assert_same(stock, model, outputs=False)
    with lk.deferred(cast="unsafe"):
        built = counting(wanted)
        built.load_weights(file)
    assert_same(stock, built, outputs=False)
    with lk.deferred():
        built = counting(wanted)
        lk.restore(built, file, cast="unsafe")
    assert_same(stock, built, outputs=False)
    abstract = lm.build_abstract(counting, wanted)
    assert_same(stock, lk.restore(abstract, file, cast="unsafe"), outputs=False)


def test_load_model(tmp_path: Path) -> None:
    saved = counting(("int32", "bool"))
    saved.save(tmp_path / "model.keras")
    saved.layers[0].table.assign([1, 2, 3, 4])
    saved.save(tmp_path / "other.keras")

    class Narrow(Counting):
        @classmethod
        def from_config(cls, config: Any) -> Any:
            return cls(**{**config, "dtypes": ("bool", "bool")})

    Narrow.__name__ = "Counting"  # files name a layer's place after its class
    objects = {"Counting": Narrow}
    model = lk.load_model(tmp_path / "model.keras", objects)
    assert model.layers[0].table.dtype == "bool"
    with pytest.raises(lm.CheckpointError, match="expected numbers that bool has, found 2"):
        lk.load_model(tmp_path / "other.keras", objects)
    assert lk.load_model(tmp_path / "other.keras", objects, cast="unsafe").layers[0].table.value.all()


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_quantizing_does_not_take_quantized_numbers(tmp_path: Path) -> None:
    """What is quantized while it is read is cast to the kernel's dtype first."""
    change = lambda tensors: tensors.update({f"{UP}.weight": np.ones((64, 32), np.complex64)})  # noqa: E731
    folder = rewritten(tmp_path, "llama3", change)
    with pytest.raises(lm.CheckpointError, match="found complex64"):
        lk.abstract_from_preset(keras_hub.models.Llama3Backbone, folder).quantize("int8")


def test_no_other_word(tmp_path: Path) -> None:
    folder = str(save_hugging_face(tmp_path / "llama3", "llama3"))
    with pytest.raises(lm.LazyModelError, match="cast is 'safe'"):
        lk.abstract_from_preset(LLAMA3, folder, cast="no")
    with pytest.raises(lm.LazyModelError, match="cast is 'safe'"), lk.deferred(cast="no"):
        pass
