"""GGUF files as KerasHub models: what loading the Hugging Face folder gives that they were made of."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from keras_hub.src.utils.preset_utils import list_subclasses

import lazymodel as lm
import lazymodel_keras as lk
from tests.servers.object_server import ObjectServer

from .gguf_models import (
    KINDS,
    WIDTH,
    Kind,
    add_byte_level,
    add_sentence_piece,
    dequantized,
    metadata_of,
    stored_tensors,
    tensors_of,
    write_folder,
    write_gguf,
)
from .models import assert_same_values, in_block
from .models import refused as refused_load


def file_of(folder: Path, kind: Kind, quantized: Type | None = None, **change: Any) -> str:
    stored = stored_tensors(kind, tensors_of(kind))
    name = change.pop("general.architecture", kind.name)
    metadata = {key: value for key, value in (metadata_of(kind) | change).items() if value is not None}
    return str(write_gguf(folder / "model.gguf", name, metadata, stored, quantized))


def loaded(cls: Any, preset: Any, **given: Any) -> Any:
    return lk.abstract_from_preset(cls, str(preset), **given).materialize(initialize="nothing")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "phi3"])
def test_is_what_the_hugging_face_folder_gives(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    quantized = None if name in ("llama", "gemma") else Type.Q8_0
    tensors = tensors_of(kind)
    if quantized is not None:
        tensors = {key: dequantized(value, quantized) for key, value in tensors.items()}
    expected = loaded(kind.cls, write_folder(tmp_path / "folder", kind, tensors))
    found = loaded(kind.cls, file_of(tmp_path, kind, quantized))
    assert type(found) is type(expected)
    assert found.get_config() | {"name": expected.name} == expected.get_config()
    assert_same_values(expected.variables, found.variables)


TEXTS = [
    "def quantized(self): return 1234567 + 0.5  # as `LlamaModel.permute` does it\n\n\tstored = {}",
    "  two  spaces   three, naïve café 東京 🙂\u00a0\u2009x",
    "<|begin_of_text|>Hello<|eot_id|> <start_of_turn>user\nHi<end_of_turn>\n<bos>",
    "",
]
BYTE_LEVEL = {
    "llama": ("llama-bpe", {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}, ["<|eot_id|>"]),
    "qwen2": ("qwen2", {"eos": "<|endoftext|>"}, ["<|im_start|>", "<|im_end|>"]),
    "qwen3": ("deepseek-r1-qwen", {"eos": "<|im_end|>"}, ["<|im_start|>", "<|endoftext|>"]),
}
GEMMA = ({"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"}, False)
MISTRAL = ({"bos": "<s>", "eos": "</s>", "unk": "<unk>"}, True)
SENTENCE_PIECE = {"gemma2": GEMMA, "gemma3": GEMMA, "mistral": MISTRAL, "mixtral": MISTRAL}


def with_vocabulary(folder: Path, name: str) -> tuple[Path, str]:
    """A Hugging Face folder with a vocabulary, and the GGUF file of the same model."""
    kind = KINDS[name]
    made = write_folder(folder / "folder", kind, tensors_of(kind))
    if name in BYTE_LEVEL:
        pre, boundaries, special = BYTE_LEVEL[name]
        entries = add_byte_level(made, pre, [*boundaries.values(), *special], boundaries)
    else:
        boundaries, prefix = SENTENCE_PIECE[name]
        symbols = [] if prefix else ["<start_of_turn>", "<end_of_turn>", "\n", "▁▁", "▁▁▁"]
        pads = {} if prefix else {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
        entries = add_sentence_piece(made, boundaries, symbols, add_dummy_prefix=prefix, **pads)
    return made, file_of(folder, kind, **entries)


def tokenizer_class(name: str) -> Any:
    known = [cls for cls in list_subclasses(keras_hub.models.Tokenizer) if cls.backbone_cls is KINDS[name].cls]
    return min(known, key=lambda cls: len(cls.__name__))  # Mistral has two


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # KerasHub's
@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCE_PIECE])
def test_splits_text_as_the_folder_s_vocabulary_does(name: str, tmp_path: Path) -> None:
    cls = tokenizer_class(name)
    folder, file = with_vocabulary(tmp_path, name)
    expected = cls.from_preset(str(folder))
    found = in_block(lambda: cls.from_preset(file))
    assert type(found) is type(expected)
    for text in TEXTS:
        np.testing.assert_array_equal(found(text), expected(text))
        assert found.detokenize(found(text)) == expected.detokenize(expected(text))
    for token in ("start_token_id", "end_token_id", "pad_token_id"):
        assert getattr(found, token) == getattr(expected, token)


ATTENTION = ("query", "key", "value", "output")
FEEDFORWARD = {"gate": "gate", "up": "intermediate", "down": "output"}


def test_phi_3_has_its_fused_projections_apart(tmp_path: Path) -> None:
    kind = KINDS["phi3"]
    tensors = tensors_of(kind)
    found = loaded(kind.cls, file_of(tmp_path, kind))
    config = found.get_config()
    assert (config["rope_scaling_type"], config["pretraining_sequence_length"]) == ("su", 512)
    assert config["rope_scaling_long_factor"] == [1.25, 2.0, 4.0, 8.0]
    for index, layer in enumerate(found.transformer_layers):
        dense = {f"self_attn.{name[0]}": getattr(layer.attention, f"{name}_dense") for name in ATTENTION}
        dense |= {f"mlp.{key}": getattr(layer, f"feedforward_{name}_dense") for key, name in FEEDFORWARD.items()}
        for name, part in dense.items():
            stored = tensors[f"model.layers.{index}.{name}_proj.weight"]
            np.testing.assert_array_equal(part.kernel, stored.T.reshape(part.kernel.shape))


def test_llama_2_and_mistral_are_what_the_class_says(tmp_path: Path) -> None:
    """Their files differ in nothing; a byte-level vocabulary is Llama 3's, or Mistral's Tekken."""
    kind, models = KINDS["llama"], keras_hub.models
    eps = {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    made = {
        "piece": {"tokenizer.ggml.model": "llama"},
        "llama": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"},
        "tekken": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"},
    }
    files: dict[str, str] = {}
    for name, entries in made.items():
        (folder := tmp_path / name).mkdir()
        stored = stored_tensors(kind, tensors_of(kind))
        del stored["rope_freqs.weight"]
        files[name] = str(write_gguf(folder / "m.gguf", "llama", metadata_of(kind) | eps | entries, stored))
    for name, cls, expected in (
        ("piece", models.Backbone, models.LlamaBackbone),
        ("piece", models.Llama3Backbone, models.Llama3Backbone),
        ("piece", models.MistralCausalLM, models.MistralCausalLM),
        ("llama", models.LlamaBackbone, models.Llama3Backbone),
        ("tekken", models.CausalLM, models.MistralCausalLM),
    ):
        given = {} if issubclass(cls, models.Backbone) else {"preprocessor": None}
        found = loaded(cls, files[name], **given)
        assert type(found) is expected
        assert getattr(found, "backbone", found).layer_norm_epsilon == 1e-5


def test_a_device_reads_its_own_blocks(mesh8: Mesh, tmp_path: Path) -> None:
    """Each block once, of queries whose rows llama.cpp has in another order as well."""
    file = file_of(tmp_path, KINDS["mixtral"], Type.Q8_0)
    reports: list[lm.LoadReport] = []
    abstract = lk.abstract_from_preset(KINDS["mixtral"].cls, file)
    assert abstract.plan().read_nbytes > abstract.nbytes / 4  # a Q8_0 is 34 bytes for 32 numbers
    rules = {".*query/kernel": P(None, "model"), ".*(gate|intermediate)_dense": P(None, None, "model"), ".*": P()}
    placed = abstract.shard(mesh8, rules).materialize(initialize="nothing", report=reports.append)
    with lm.open_checkpoint(file) as stored:
        assert reports[0].read_nbytes <= 1.02 * sum(Path(name).stat().st_size for name in stored.files)
    assert_same_values(loaded(KINDS["mixtral"].cls, file).variables, placed.variables)


def test_in_parts_verified_and_at_a_url(tmp_path: Path, object_server: ObjectServer) -> None:
    kind = KINDS["qwen2"]
    whole = loaded(kind.cls, file_of(tmp_path, kind))
    folder = object_server.root / "bucket" / "gguf"
    folder.mkdir(parents=True)
    stored = stored_tensors(kind, tensors_of(kind))
    write_gguf(folder / "m.gguf", kind.name, metadata_of(kind), stored, split_max_tensors=10)
    parts = sorted(folder.iterdir())
    assert len(parts) == 3
    hashes = {part.name: f"sha256:{hashlib.sha256(part.read_bytes()).hexdigest()}" for part in parts}
    for preset, given in (
        (parts[0], {"verify": hashes}),
        (parts[2], {}),
        (folder, {}),
        (f"gs://bucket/gguf/{parts[1].name}", {"storage_options": object_server.gcs()}),
    ):
        assert_same_values(whole.variables, loaded(kind.cls, preset, **given).variables)
    with pytest.raises(lm.CheckpointError, match=parts[1].name):
        loaded(kind.cls, parts[0], verify=hashes | {parts[1].name: "sha256:" + "0" * 64})
    shutil.rmtree(folder.parent)


def test_a_task_and_a_plan_on_the_command_line(tmp_path: Path, command: Callable[..., Any]) -> None:
    _, file = with_vocabulary(tmp_path, "qwen2")
    model = in_block(lambda: keras_hub.models.CausalLM.from_preset(file, dtype="bfloat16"))
    assert type(model) is keras_hub.models.QwenCausalLM
    assert model.backbone.token_embedding.embeddings.dtype == "bfloat16"
    assert model.preprocessor.tokenizer("Hello").shape[0] > 0
    planned = command("plan", file, "--json")
    assert planned.status == 0 and "read_nbytes" in planned.out


def refused(cls: Any, file: Any, **given: Any) -> str:
    return refused_load(lk.abstract_from_preset, cls, str(file), **given)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3", {"general.architecture": "mamba"}, "one of llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma, gemma2"),
        ("llama", {"general.type": "adapter"}, "from_preset(cls, base, adapter=folder)"),
        ("qwen3", {"qwen3.block_count": 3}, "the number of layers in the file (blk.0, blk.1), found 3"),
        ("qwen3", {"qwen3.attention.head_count_kv": [8, 8]}, "to be a whole number, found a list of 2"),
        ("qwen3", {"qwen3.embedding_length": None}, "qwen3.embedding_length of its metadata to be a whole number"),
        ("qwen3", {"qwen3.rope.dimension_count": 8}, "to be 16, the size of a head"),
        ("qwen3", {"qwen3.rope.scaling.type": "yarn"}, "to be none, all that KerasHub's Qwen3Backbone knows"),
        (
            "qwen3_moe",
            {"qwen3moe.expert_count": 8},
            "expected 8 experts, as in its metadata, found shape (4, 32, 64)",
        ),
        ("qwen2", {"qwen2.attention.key_length": 16}, "to be 8, as in KerasHub's QwenBackbone, found 16"),
        ("phi3", {"phi3.attention.head_count_kv": 2}, "expected 96 rows, found 128"),
        ("gemma", {"gemma.feed_forward_length": 2**31}, "intermediate_size from 0 to 2,147,483,647, found"),
        ("gemma", {"gemma.rope.freq_base": 1e6}, "expected rope_theta of 10000.0, the only one"),
        ("qwen3", {"qwen3.rope.freq_base": math.inf}, "qwen3.rope.freq_base of its metadata to be a finite number"),
        ("qwen3", {"qwen3.rope.freq_base": -1.0}, "expected rope_theta above 0, found -1.0"),
        ("gemma2", {"gemma2.attn_logit_softcapping": math.nan}, "to be a finite number, found nan"),
        ("gemma3", {"gemma3.rope.scaling.factor": -math.inf}, "scaling.factor of its metadata to be a finite number"),
        ("gemma3", {"gemma3.rope.scaling.factor": -8.0}, "scaling.factor of its metadata to be above 0, found -8.0"),
    ],
)
def test_what_metadata_must_say(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    text = refused(kind.cls, file_of(tmp_path, kind, **change), strict=False)
    assert words in text and "model.gguf" in text


def test_tensors_that_have_no_place(tmp_path: Path) -> None:
    kind = KINDS["qwen3"]
    stored = stored_tensors(kind, tensors_of(kind))
    path, metadata = tmp_path / "model.gguf", metadata_of(kind)
    write_gguf(path, kind.name, metadata, stored | {"blk.0.ffn_norm.bias": np.zeros(WIDTH, np.float32)})
    assert f"{path} holds 1 tensor that KerasHub's converter did not request: model.layers.0" in refused(kind.cls, path)
    write_gguf(path, kind.name, metadata, stored | {"rope_freqs.weight": np.full(8, 2, np.float32)})
    assert "expected ones, or for Llama those of Llama 3" in refused(kind.cls, path)
    write_gguf(path, kind.name, metadata, stored | {"rope_freqs.weight": np.full(8, np.inf, np.float32)})
    assert f"'rope_freqs.weight' of {path}: expected finite factors above 0, found inf" in refused(kind.cls, path)
    write_gguf(path, kind.name, metadata, {key: value for key, value in stored.items() if "attn_q_norm" not in key})
    assert "has no tensor 'layers.0.self_attn.q_norm.weight'" in refused(kind.cls, path)
    assert "Saved preset has type `Qwen3Backbone`" in refused(keras_hub.models.GemmaBackbone, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "gpt-4o"}, "'gpt2' with tokenizer.ggml.pre one of 'qwen2', 'deepseek-r1-qwen'"),
        ({"model": "llama"}, "which KerasHub's tokenizer for a qwen2 reads, found 'llama'"),
        ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens of its metadata to be different ones, found 1 among 2"),
        ({"token_type": [1]}, "numbers, one a token, found 1 among 1"),
        ({"merges": ["a b c"]}, "to be pairs, found ('a', 'b', 'c')"),
    ],
)
def test_vocabularies_that_are_not_read(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (folder := tmp_path / "vocabulary").mkdir()
    entries = add_byte_level(folder, "qwen2", ["<|endoftext|>"], {"eos": "<|endoftext|>"})
    entries |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    file = file_of(tmp_path, KINDS["qwen2"], **entries)
    assert words in refused(keras_hub.models.QwenCausalLM, file)
    lk.abstract_from_preset(KINDS["qwen2"].cls, file)  # which needs none
