"""What a folder holds and nothing asked for: layers, adapters, scales. And casts of what was asked for."""

from __future__ import annotations

import json
import re
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
import safetensors
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk

from .models import (
    BACKBONES,
    assert_same,
    bits,
    decoder,
    decoder_shapes,
    in_block,
    random_tensors,
    save_hugging_face,
    save_preset,
    seeded,
    write_safetensors_folder,
)
from .models import (
    refused as refused_load,
)

LLAMA3 = BACKBONES["llama3"][0]
Tensors = dict[str, np.ndarray]


def rewritten(
    folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None, *, shards: int = 1, **config: Any
) -> str:
    """A Hugging Face folder of Llama with some tensors and entries of its configuration changed."""
    made = save_hugging_face(folder / "made", "llama3")
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    given = json.loads((made / "config.json").read_text()) | config
    return str(write_safetensors_folder(folder / "changed", given, tensors, shards=shards))


def refused(folder: str, **given: Any) -> str:
    return refused_load(lk.abstract_from_preset if "cast" in given else lk.from_preset, LLAMA3, folder, **given)


def assert_as_stock(folder: str, **given: Any) -> None:
    ours = seeded(lambda: lk.abstract_from_preset(LLAMA3, folder, **given).materialize())
    assert_same(seeded(lambda: LLAMA3.from_preset(folder)), ours, outputs=False)


# Tensors that nothing asked for ---------------------------------------------------------------------------------------


def test_a_configuration_with_more_layers(tmp_path: Path) -> None:
    text = refused(rewritten(tmp_path, shards=2, num_hidden_layers=4))
    assert "model.layers.2." in text and "0 to 1" in text


@pytest.mark.parametrize("shards", [1, 30])
def test_a_configuration_with_fewer_layers(shards: int, tmp_path: Path) -> None:
    """With 30 shards, most of the second layer's are never opened; one that was not downloaded is in the index."""
    folder = rewritten(tmp_path, shards=shards, num_hidden_layers=1)
    up = "model.layers.1.mlp.up_proj.weight"
    holds = f"{folder} holds 9 tensors .* model.layers.1."
    loads: list[Callable[..., Any]] = [lk.from_preset, lk.abstract_from_preset]
    loads += [lambda cls, folder, **options: in_block(lambda: cls.from_preset(folder), **options)]
    for load in loads:
        with pytest.raises(lm.CheckpointError, match=f"{holds}.*config.json.*strict=False"):
            load(LLAMA3, folder)
        with pytest.warns(lm.LazyModelWarning, match=f"{holds}.*left out"):
            load(LLAMA3, folder, strict=False)
    with pytest.raises(lm.CheckpointError, match=holds):
        lm.build_abstract(LLAMA3.from_preset, folder)
    reports: list[lm.LoadReport] = []
    with pytest.warns(lm.LazyModelWarning) as caught:
        ours = seeded(lambda: lk.from_preset(LLAMA3, folder, strict=False, report=reports.append))
    assert [warning.filename for warning in caught] == [__file__]
    assert_same(seeded(lambda: LLAMA3.from_preset(folder)), ours, outputs=False)
    unused = {tensor.name: tensor.nbytes for tensor in reports[0].unused}
    assert (len(unused), unused[up]) == (9, 64 * 32 * 4)
    if shards > 1:
        index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        lost = [name for name in unused if index[name] == index[up]]
        (Path(folder) / index[up]).unlink()
        with pytest.warns(lm.LazyModelWarning, match=holds):
            abstract = lk.abstract_from_preset(LLAMA3, folder, strict=False)
        assert [tensor.name for tensor in abstract.unused if tensor.nbytes is None] == lost == [up]


_GEMMA = decoder("gemma", head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6)
TIED = {
    "llama": (LLAMA3, decoder("llama")),
    "qwen2": (keras_hub.models.QwenBackbone, decoder("qwen2", use_sliding_window=False, sliding_window=None)),
    "gemma": (keras_hub.models.GemmaBackbone, _GEMMA),
}
UNTIE = 'set "tie_word_embeddings": false'


@pytest.mark.parametrize(("kind", "shards"), [("llama", 40), ("qwen2", 1), ("gemma", 1)])
def test_a_projection_of_its_own_where_the_model_ties_it(kind: str, shards: int, tmp_path: Path) -> None:
    """The same tensor stored twice is left out; another one is not, whether the configuration says so or not."""
    cls, config = TIED[kind]
    tensors = random_tensors(decoder_shapes(config))
    embedding = tensors["model.embed_tokens.weight"]
    other = embedding.copy()
    other[-1, -1] += 1

    def folder(name: str, head: np.ndarray, *, tied: bool = True) -> str:
        given = config | {"tie_word_embeddings": tied}
        return str(write_safetensors_folder(tmp_path / name, given, tensors | {"lm_head.weight": head}, shards=shards))

    equal = folder("equal", embedding)
    assert_same(cls.from_preset(equal), lk.from_preset(cls, equal), outputs=False)  # a warning would be an error
    for name, head in {"other": other, "shape": other[:3, :3], "dtype": embedding.astype("float16")}.items():
        text = refused_load(lk.from_preset, cls, folder(name, np.ascontiguousarray(head)))
        assert "1 tensor " in text and "'lm_head.weight' is tied to the embedding" in text and UNTIE in text
    with pytest.warns(lm.LazyModelWarning, match=re.escape(UNTIE)):
        lk.abstract_from_preset(cls, folder("other", other), strict=False)
    untied = folder("untied", other, tied=False)
    if kind == "gemma":  # KerasHub's is always tied
        assert "tie_word_embeddings is False, the model has True" in refused_load(lk.from_preset, cls, untied)
    else:
        head = lk.from_preset(cls, untied).token_embedding.reverse_embeddings
        np.testing.assert_array_equal(head.value, other.T)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "lm_head.weight"),
        ("bart", "lm_head.weight"),
        ("bart", "model.decoder.embed_tokens.weight"),
        ("blip-2", "language_model.encoder.embed_tokens.weight"),
        ("gemma3", "language_model.lm_head.weight"),
        ("t5gemma", "lm_head.out_proj.weight"),
        ("gpt_neox", "embed_out.weight"),
    ],
)
def test_what_is_tied_and_another_tensor(kind: str, name: str, tmp_path: Path) -> None:
    write_safetensors_folder(tmp_path, {"model_type": kind}, {"table": np.ones(2), name: np.ones(2)})
    assert {tensor.name for tensor in lm.build_abstract(takes_the_table(tmp_path)).unused} == {name}
    write_safetensors_folder(tmp_path, {"model_type": kind}, {"table": np.ones(2), name: -np.ones(2)})
    with pytest.raises(lm.CheckpointError, match=f"{name}' is tied to the embedding"):
        lm.build_abstract(takes_the_table(tmp_path))


def test_what_keras_or_a_converter_left_is_in_the_report(tmp_path: Path) -> None:
    preset, hugging_face = save_preset(tmp_path / "preset", "llama3"), save_hugging_face(tmp_path / "hf", "llama3")
    with h5py.File(preset / "model.weights.h5", "a") as file:
        file["layers/another/vars/0"] = np.zeros(3, "float32")
        file["optimizer/vars/0"] = np.zeros(2, "int32")
    file = hugging_face / "model.safetensors"
    save_file(load_file(file) | {"lm_head.extra": np.zeros((4, 4), "float16")}, file)
    for folder, extra, expected in (
        (preset, "layers/another/vars/0", {("layers/another/vars/0", 12), ("optimizer/vars/0", 8)}),
        (hugging_face, "lm_head.extra", {("lm_head.extra", 32)}),
    ):
        assert f": {extra}." in refused(str(folder))
        with pytest.warns(lm.LazyModelWarning, match=f"holds 1 tensor .*: {extra}"):
            abstract = lk.abstract_from_preset(LLAMA3, str(folder), strict=False)
        assert {(tensor.name, tensor.nbytes) for tensor in abstract.unused} == expected
        assert all(Path(tensor.file).parent == folder for tensor in abstract.unused)
        reports: list[lm.LoadReport] = []
        abstract.shard(Mesh(jax.devices()[:1], ("model",)), lambda _: P()).materialize(report=reports.append)
        assert reports[0].unused == abstract.unused
        assert len(reports[0].files) == 1


def takes_the_table(folder: Path) -> Callable[[], Any]:
    """In place of a converter."""

    def build() -> Any:
        layer = keras.layers.Layer()
        with safetensors.safe_open(str(folder / "model.safetensors"), framework="np") as file:
            layer.table = keras.Variable(file.get_tensor("table"))
        return layer

    return build


# A `model_type`, or an architecture of timm's → what converters leave out on purpose.
PURPOSE = {
    "llama": "model.layers.3.self_attn.rotary_emb.inv_freq model.rotary_emb.inv_freq score.weight",
    "gpt2": "h.0.attn.bias transformer.h.11.attn.masked_bias h.1.crossattention.bias lm_head.weight",
    "bert": "bert.embeddings.position_ids cls.predictions.decoder.weight cls.seq_relationship.bias classifier.weight "
    "qa_outputs.bias bert.pooler.dense.weight pooler.dense.bias embeddings.position_ids",
    "modernbert": "head.dense.weight head.norm.weight decoder.bias decoder.weight",
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
    # As many of the last layers as the configuration says have no keys of their own, though files store some.
    "gemma3n": "model.language_model.layers.28.self_attn.k_proj.weight model.layers.29.self_attn.v_norm.weight",
    "qwen3_5": "mtp.layers.0.self_attn.q_proj.weight mtp.fc.weight",
    "sam3_video": "tracker_model.mask_downsample.weight tracker_neck.fpn_layers.0.proj1.bias "
    "detector_model.mask_decoder.pixel_decoder.conv_layers.2.bias",
    "resnet18": "layer1.0.bn1.num_batches_tracked fc.weight head.fc.bias classifier.bias conv_head.weight "
    "pre_logits.fc1.weight",
}
MISTAKES = [
    "model.layers.30.mlp.up_proj.weight", "bert.encoder.layer.11.attention.self.query.bias", "h.3.attn.c_attn.bias",
    "h.3.attn.c_proj.weight", "model.layers.0.self_attn.q_proj.lora_A.weight", "model.visual.patch_embed.proj.weight",
    "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", "encoder.layer.0.mlp.fc.weight",
    "model.embed_tokens.weight", "bert.embeddings.LayerNorm.weight", "extra.weight",
    "model.language_model.layers.27.self_attn.k_proj.weight", "model.language_model.layers.30.self_attn.k_proj.weight",
]  # fmt: skip


@pytest.mark.parametrize("kind", PURPOSE)
def test_what_converters_leave_out_on_purpose(kind: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"architecture" if kind == "resnet18" else "model_type": kind}
    config |= {"text_config": {"num_hidden_layers": 30, "num_kv_shared_layers": 2}}
    build = takes_the_table(tmp_path)
    names, array = PURPOSE[kind].split(), np.ones(2, "float32")
    write_safetensors_folder(tmp_path, config, dict.fromkeys(["table", *names], array))
    assert {tensor.name for tensor in lm.build_abstract(build).unused} == {*names}
    write_safetensors_folder(tmp_path, config, dict.fromkeys(["table", *names, *MISTAKES], array))
    with pytest.raises(lm.CheckpointError, match=f"holds {len(MISTAKES)} tensors"):
        lm.build_abstract(build)
    write_safetensors_folder(tmp_path, {}, dict.fromkeys(["table", *MISTAKES], array))
    abstract = lm.build_abstract(build)  # a file of one's own, of which one takes what one wants
    np.testing.assert_array_equal(abstract.materialize().table.value, array)
    assert {tensor.name for tensor in abstract.unused} == {*MISTAKES}


# Quantized folders ----------------------------------------------------------------------------------------------------

METHODS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},  # it is known, and no weight is stored so
    "aqlm": {"quant_method": "aqlm", "nbits": 4},
    "an unknown method": {"bits": 4},
}


@pytest.mark.parametrize(
    ("method", "where"),
    [*((method, "quantization_config") for method in METHODS), ("fp8", "compression_config"), ("fp8", "text_config")],
)
def test_a_configuration_that_says_how_it_is_quantized(method: str, where: str, tmp_path: Path) -> None:
    found = {"quantization_config": METHODS[method]} if where == "text_config" else METHODS[method]
    folder = rewritten(tmp_path, **{where: found})
    key = "quantization_config" if where == "text_config" else where
    text = refused(folder, strict=False, cast="unsafe")
    assert f"{Path(folder) / 'config.json'}: {key} " in text and repr(method) in text
    assert ("none of them is. Remove the entry" if method == "fp8" else "load a dequantized copy") in text


def test_before_anything_is_opened(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, quantization_config=METHODS["aqlm"])
    (Path(folder) / "model.safetensors").write_bytes(b"no tensors at all")
    assert "quantized with 'aqlm'" in refused(folder)
    good = str(tmp_path / "made")
    with lk.deferred():
        assert "quantized with 'aqlm'" in refused_load(LLAMA3.from_preset, folder)
        ours = seeded(lambda: LLAMA3.from_preset(good))  # another file is another matter
    stock = seeded(lambda: LLAMA3.from_preset(good))
    assert_same(stock, ours, outputs=False)
    not_quantized = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False}
    for number, found in enumerate((None, {}, not_quantized)):
        same = rewritten(tmp_path / str(number), quantization_config=found)
        assert_same(stock, seeded(lambda same=same: lk.from_preset(LLAMA3, same)), outputs=False)


UP = "model.layers.0.mlp.up_proj"


def stored_as(dtype: Any, **beside: np.ndarray) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        up = tensors[f"{UP}.weight"]
        tensors[f"{UP}.weight"] = (up * 20 if dtype == np.int8 else up).astype(dtype)
        tensors.update({f"{UP}.{name}": value for name, value in beside.items()})

    return change


F8, ONES = ml_dtypes.float8_e4m3fn, np.ones(64, np.float32)
LEFT = "which nothing uses"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stored_as(F8, weight_scale_inv=np.full((1, 1), 0.01, np.float32)), f"'{UP}.weight_scale_inv', {LEFT}"),
        (stored_as(F8), f"'{UP}.weight' (float8_e4m3fn)"),
        (stored_as(np.int8, SCB=ONES), f"'{UP}.weight' (int8) with '{UP}.SCB', {LEFT}"),
        (
            stored_as(np.float32, g_idx=np.zeros(32, np.int32), qzeros=np.zeros((1, 8), np.int32)),
            f"'{UP}.g_idx', {LEFT}, '{UP}.qzeros', {LEFT}",
        ),
    ],
)
def test_quantized_weights_that_no_configuration_tells_of(
    change: Callable[[Tensors], Any], words: str, tmp_path: Path
) -> None:
    folder = rewritten(tmp_path, change, shards=2)
    for given in ({}, {"strict": False, "cast": "unsafe"}):
        assert f"{folder} holds quantized weights: " in (text := refused(folder, **given))
        assert words in text


# Casts ----------------------------------------------------------------------------------------------------------------


def test_weights_of_other_dtypes_in_a_folder(tmp_path: Path) -> None:
    """What every bfloat16 and float32 has is cast; what they need not have, by value."""

    def with_norm(name: str, value: int | complex, dtype: Any) -> str:
        norm = np.full(32, value, dtype)
        return rewritten(tmp_path / name, lambda tensors: tensors.update({"model.norm.weight": norm}))

    assert_as_stock(with_norm("exact", 3, np.int64))
    inexact = with_norm("inexact", 2**24 + 1, np.int64)
    assert "expected numbers that fit into float32, found 16777217 (int64)" in refused(inexact)
    assert_as_stock(inexact, cast="unsafe")
    with_imaginary = with_norm("complex", 1, np.complex64)
    assert "expected float32, found complex64" in refused(with_imaginary)
    with pytest.raises(lm.CheckpointError, match="found complex64"):  # cast before it is quantized
        lk.abstract_from_preset(LLAMA3, with_imaginary).quantize("int8")
    with pytest.raises(lm.LazyModelError, match="expected cast='safe'.*got 'no'"):
        lk.abstract_from_preset(LLAMA3, inexact, cast="no")
    with pytest.raises(lm.LazyModelError, match="expected cast='safe'.*got 'no'"), lk.deferred(cast="no"):
        pass


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


def saved_counting(dtypes: tuple[str, str], last: int, mask: list[int], file: Path) -> Path:
    saved = counting(dtypes)
    saved.layers[0].table.assign([1, 2, 3, last])
    saved.layers[0].mask.assign(mask)
    saved.save(file) if file.suffix == ".keras" else saved.save_weights(file)
    return file


def stock_counting(dtypes: tuple[str, str], file: Path) -> keras.Model:
    model = counting(dtypes)
    model.load_weights(file)
    return model


def restored(dtypes: tuple[str, str], file: Path, **options: Any) -> Any:
    return lk.restore(counting(dtypes), file, **options)


def load_deferred(dtypes: tuple[str, str], file: Path, **options: Any) -> Any:
    return in_block(lambda: stock_counting(dtypes, file), **options)


WAYS: list[Callable[..., Any]] = [
    restored,
    lambda dtypes, file, **options: lk.restore(lm.build_abstract(counting, dtypes), file, **options),
    load_deferred,
    lambda dtypes, file, **options: in_block(lambda: restored(dtypes, file, **options)),
]


@pytest.mark.parametrize("own", [("int32", "bool"), ("int8", "uint8"), ("uint32", "bool")])
def test_tables_and_masks_of_keras_files(own: tuple[str, str], tmp_path: Path) -> None:
    file = saved_counting(own, 100, [1, 0, 1, 0], tmp_path / "model.weights.h5")
    for wanted in (own, ("int32", "bool"), ("int8", "int32"), ("float32", "float32")):
        for load in (restored, load_deferred):
            assert_same(stock_counting(wanted, file), load(wanted, file), outputs=False)


@pytest.mark.parametrize(
    ("own", "wanted", "words"),
    [
        (("float32", "bool"), ("int32", "bool"), "'counting/table': expected int32, found float32 in tensor"),
        (("int32", "bool"), ("int8", "bool"), "expected numbers that fit into int8, found 300 (int32)"),
        (("int32", "int32"), ("int32", "bool"), "expected numbers that fit into bool, found 2 (int32)"),
        (("int32", "float32"), ("int32", "bool"), "'counting/mask': expected bool, found float32 in tensor"),
    ],
)
def test_casts_that_stock_keras_makes_in_silence(
    own: tuple[str, str], wanted: tuple[str, str], words: str, tmp_path: Path
) -> None:
    mask = [1, 0, 1, 0] if own[1] == "bool" else [2, 0, 1, 0]
    file = saved_counting(own, 300, mask, tmp_path / "model.weights.h5")
    model = counting(wanted)
    before = [bits(variable).tolist() for variable in model.variables]
    with pytest.raises(lm.CheckpointError, match=re.escape(words)):
        lk.restore(model, file)
    assert [bits(variable).tolist() for variable in model.variables] == before
    stock = stock_counting(wanted, file)
    for load in WAYS:
        with pytest.raises(lm.CheckpointError, match=re.escape(words)):
            load(wanted, file)
        assert_same(stock, load(wanted, file, cast="unsafe"), outputs=False)


def test_load_model(tmp_path: Path) -> None:
    class Narrow(Counting):
        @classmethod
        def from_config(cls, config: Any) -> Any:
            return cls(**{**config, "dtypes": ("bool", "bool")})

    Narrow.__name__ = "Counting"  # files name a layer's place after its class
    objects, dtypes = {"Counting": Narrow}, ("int32", "bool")
    file = saved_counting(dtypes, 4, [1, 0, 1, 0], tmp_path / "model.keras")
    with pytest.raises(lm.CheckpointError, match="expected numbers that fit into bool, found 2"):
        lk.load_model(file, objects)
    assert lk.load_model(file, objects, cast="unsafe").layers[0].table.value.all()
    counting(dtypes).save(file)
    assert lk.load_model(file, objects).layers[0].table.dtype == "bool"
