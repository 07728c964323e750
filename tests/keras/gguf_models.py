"""Tiny models in Hugging Face's names, and the GGUF files that llama.cpp's converter makes of them.

What it changes is done here as `convert_hf_to_gguf.py` does it, forwards; nothing is shared with what undoes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import keras_hub
import numpy as np
from gguf import GGMLQuantizationType as Type

from . import models

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

LAYERS, WIDTH, INNER, HEADS, PAIRS, VOCABULARY, EXPERTS = 2, 64, 96, 8, 4, 96, 4
_QWEN: Config = {"use_sliding_window": False, "sliding_window": None, "rope_theta": 1e6}
_EXPERTS: Config = {**models.EXPERTS, "moe_intermediate_size": 32, "output_router_logits": False}
_GEMMA: Config = {"head_dim": 16, "tie_word_embeddings": True}
_CAPPED: Config = {
    **_GEMMA, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "sliding_window": 128,
}  # fmt: skip
_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.25, 2.0, 4.0, 8.0]}
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of model: KerasHub's class, llama.cpp's name, and its `config.json`."""

    cls: Any
    name: str
    config: Config


def _kind(cls: str, name: str, model_type: str, **entries: Any) -> Kind:
    sizes: Config = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "rms_norm_eps": 1e-6}
    config = models.decoder(model_type, **sizes | {"max_position_embeddings": 512} | entries)
    return Kind(getattr(keras_hub.models, f"{cls}Backbone"), name, config)


KINDS = {
    "llama": _kind("Llama3", "llama", "llama", rope_theta=5e5, rope_scaling=ROPE),
    "mistral": _kind("Mistral", "llama", "mistral", head_dim=16, sliding_window=None),
    "mixtral": _kind("Mixtral", "llama", "mixtral", sliding_window=None, **models.LOCAL_EXPERTS),
    "qwen2": _kind("Qwen", "qwen2", "qwen2", **_QWEN, tie_word_embeddings=True),
    "qwen2_moe": _kind(
        "QwenMoe", "qwen2moe", "qwen2_moe", **_QWEN | _EXPERTS | {"norm_topk_prob": False},
        shared_expert_intermediate_size=64,
    ),
    "qwen3": _kind("Qwen3", "qwen3", "qwen3", **_QWEN, head_dim=16),
    "qwen3_moe": _kind("Qwen3Moe", "qwen3moe", "qwen3_moe", **_QWEN, **_EXPERTS, head_dim=16),
    "phi3": _kind("Phi3", "phi3", "phi3", max_position_embeddings=1024, rope_scaling=_FACTORS),
    "gemma": _kind("Gemma", "gemma", "gemma", **_GEMMA),
    "gemma2": _kind("Gemma", "gemma2", "gemma2", **_CAPPED),
    "gemma3": _kind(
        "Gemma3", "gemma3", "gemma3_text", **_CAPPED | {"attn_logit_softcapping": None}, rope_theta=1e6,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}  # fmt: skip


def tensors_of(kind: Kind) -> Tensors:
    """Random weights in Hugging Face's names; scales have few digits, as those of models in bfloat16 do."""
    made = models.random_tensors(models.decoder_shapes(kind.config))
    return {name: np.round(x * 64) / 64 + 0 if "norm" in name else x for name, x in made.items()}


def fused(tensors: Tensors) -> Tensors:
    """Phi-3's own names: of queries, keys and values in one matrix, and of both that go in."""
    made = dict(tensors)
    for layer in range(LAYERS):
        for part, whole, names in (("self_attn", "qkv", "qkv"), ("mlp", "gate_up", ("gate", "up"))):
            at = f"model.layers.{layer}.{part}."
            made[f"{at}{whole}_proj.weight"] = np.concatenate([made.pop(f"{at}{name}_proj.weight") for name in names])
    return made


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As `LlamaModel.permute`."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def stored_tensors(kind: Kind, tensors: Tensors) -> Tensors:
    """What llama.cpp stores of a model, by its names (`gguf.TensorNameMap`)."""
    config = kind.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    stacks: dict[str, list[np.ndarray]] = {}
    stored: Tensors = {}
    for name, value in (fused(tensors) if kind.name == "phi3" else tensors).items():
        if kind.name == "llama" and "q_proj" in name:
            value = permute(value, HEADS)
        if kind.name == "llama" and "k_proj" in name:
            value = permute(value, PAIRS)
        if kind.name.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            stacks.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(value)
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        stored[found] = value
    for name, values in stacks.items():
        merged = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        found = names.get_name(merged if "feed_forward" in merged else name, try_suffixes=(".weight",))
        assert found is not None, name
        stored[found] = np.stack(values)
    if kind.name == "phi3":
        for name in ("long", "short"):
            stored[f"rope_factors_{name}.weight"] = np.float32(config["rope_scaling"][f"{name}_factor"])
    if config.get("rope_scaling") is ROPE:
        stored["rope_freqs.weight"] = _rope_factors(config)
    return stored


def _rope_factors(config: Config) -> np.ndarray:
    """As `LlamaModel.generate_extra_tensors`."""
    scaling, head_dim = config["rope_scaling"], WIDTH // HEADS
    frequencies = 1.0 / (config["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim))
    low, high = (8192 / scaling[f"{name}_freq_factor"] for name in ("low", "high"))
    factors: list[float] = []
    for length in 2 * np.pi / frequencies:
        if length < high:
            factors.append(1)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            smooth = (8192 / length - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def metadata_of(kind: Kind) -> dict[str, Any]:
    """The entries that `set_gguf_parameters` writes."""
    config = kind.config
    entries = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": PAIRS,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if kind.name not in ("gemma", "gemma2"):
        entries["rope.freq_base"] = config["rope_theta"]
    if "head_dim" in config:
        entries |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if kind.name == "llama":
        entries |= {"vocab_size": VOCABULARY, "rope.dimension_count": config.get("head_dim", WIDTH // HEADS)}
    if config["model_type"] == "mixtral" or "num_experts" in config:
        entries |= {"expert_count": EXPERTS, "expert_used_count": config["num_experts_per_tok"]}
    if "num_experts" in config:
        entries["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind.name == "qwen2moe":
        entries["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        if config.get(name) is not None:
            entries[name.replace("sliding", "attention.sliding")] = config[name]
    if kind.name == "phi3":
        entries["rope.scaling.original_context_length"] = 512
    if kind.name == "gemma3":
        entries |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return {f"{kind.name}.{key}": value for key, value in entries.items()}


def write_gguf(
    path: Path, name: str, metadata: dict[str, Any], stored: Tensors, quantized: Type | None = None, **split: int
) -> Path:
    """A GGUF file; with `quantized`, of matrices whose rows are whole blocks."""
    writer = gguf.GGUFWriter(path, name, **split)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for key, value in stored.items():
        if quantized is not None and value.ndim > 1 and value.shape[-1] % 32 == 0:
            writer.add_tensor(key, gguf.quants.quantize(value, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level(folder: Path, pre: str, special: list[str], boundaries: dict[str, str]) -> dict[str, Any]:
    """Writes the vocabulary files of a byte-level BPE that is trained on this file, and returns what GGUF has of it."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({f"{name}_token": boundaries[name] for name in boundaries})
    )
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    tokens = {index: token for token, index in content["model"]["vocab"].items()} | added
    padded = [tokens.get(index, f"[PAD{index}]") for index in range(len(tokens) + 3)]
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    types = [3 if token in added.values() else 1 if token in tokens.values() else 5 for token in padded]
    ids = {name: padded.index(token) for name, token in boundaries.items()}
    return _entries("gpt2", padded, types, ids, pre=pre, merges=merges)


def add_sentence_piece(folder: Path, boundaries: dict[str, str], user_defined: list[str], **options: Any) -> Any:
    """As `add_byte_level`, for SentencePiece; what is special in text is marked so as `added_tokens_decoder` has it."""
    import sentencepiece

    prefix = folder / "tokenizer"
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()), model_prefix=str(prefix), vocab_size=600,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=user_defined, minloglevel=2,
        **{f"{name}_piece": piece for name, piece in boundaries.items()}, **options,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    tokens, types, scores = [], [], []
    for index in range(model.vocab_size()):
        piece = model.IdToPiece(index)
        tests = (model.IsUnknown(index), model.IsControl(index), model.IsByte(index))
        kind = next((number for number, holds in zip((2, 3, 6), tests, strict=True) if holds), 1)
        score = model.GetScore(index)
        if piece in user_defined or piece in boundaries.values():
            looks_special = piece.startswith("<")
            kind, score = (3 if looks_special else 4), -1000.0
            piece = piece if looks_special else piece.replace("▁", " ")
        tokens.append(piece), types.append(kind), scores.append(score)
    ids = {
        {"unk": "unknown", "pad": "padding"}.get(name, name): model.PieceToId(boundaries[name]) for name in boundaries
    }
    entries = _entries("llama", tokens, types, ids, pre="default", scores=scores)
    return entries | {"tokenizer.ggml.add_space_prefix": options.get("add_dummy_prefix", True)}


def _entries(
    model: str, tokens: list[str], types: list[int], boundaries: dict[str, int], **more: Any
) -> dict[str, Any]:
    found = {"model": model, "tokens": tokens, "token_type": types, **more}
    found |= {f"{name}_token_id": index for name, index in boundaries.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def dequantized(value: np.ndarray, kind: Type) -> np.ndarray:
    """What a tensor is once it was stored so; rows that are moved or stacked whole are the same before and after."""
    if value.ndim < 2 or value.shape[-1] % 32:
        return value
    return gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)


def write_folder(folder: Path, kind: Kind, tensors: Tensors) -> Path:
    """The Hugging Face folder of a model."""
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    return models.write_safetensors_folder(folder, kind.config, contiguous)
