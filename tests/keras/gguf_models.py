"""Tiny models in Hugging Face's names, and the GGUF files that llama.cpp's converter makes of them.

What it changes is done here as `convert_hf_to_gguf.py` does it, forwards; nothing is shared with what undoes it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import keras_hub
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

LAYERS, WIDTH, INNER, HEADS, PAIRS, VOCABULARY, EXPERTS = 2, 64, 96, 8, 4, 96, 4
_BASE: Config = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": PAIRS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "architectures": ["ForCausalLM"],
}  # fmt: skip
_QWEN: Config = {"use_sliding_window": False, "sliding_window": None, "rope_theta": 1e6}
_EXPERTS: Config = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64, "norm_topk_prob": False, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "mlp_only_layers": [],
}  # fmt: skip
_GEMMA: Config = {"head_dim": 16, "tie_word_embeddings": True}
_CAPPED: Config = {
    **_GEMMA, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "sliding_window": 128,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model: KerasHub's class, llama.cpp's name, and what its `config.json` has besides."""

    cls: Any
    name: str
    config: Config
    bias: bool = False

    @property
    def settings(self) -> Config:
        return {**_BASE, **self.config}


_MODELS = keras_hub.models
KINDS = {
    "llama": Kind(_MODELS.Llama3Backbone, "llama", {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": ROPE}),
    "mistral": Kind(
        _MODELS.MistralBackbone, "llama", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
    ),
    "mixtral": Kind(
        _MODELS.MixtralBackbone, "llama",
        {
            "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None,
            "output_router_logits": False,
        },
    ),
    "qwen2": Kind(
        _MODELS.QwenBackbone, "qwen2", {"model_type": "qwen2", **_QWEN, "tie_word_embeddings": True}, bias=True
    ),
    "qwen2_moe": Kind(_MODELS.QwenMoeBackbone, "qwen2moe", {"model_type": "qwen2_moe", **_QWEN, **_EXPERTS}, bias=True),
    "qwen3": Kind(_MODELS.Qwen3Backbone, "qwen3", {"model_type": "qwen3", **_QWEN, "head_dim": 16}),
    "qwen3_moe": Kind(
        _MODELS.Qwen3MoeBackbone, "qwen3moe",
        {"model_type": "qwen3_moe", **_QWEN, **_EXPERTS, "norm_topk_prob": True, "head_dim": 16},
    ),
    "phi3": Kind(
        _MODELS.Phi3Backbone, "phi3",
        {
            "model_type": "phi3", "max_position_embeddings": 1024,
            "rope_scaling": {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.25, 2.0, 4.0, 8.0]},
        },
    ),
    "gemma": Kind(_MODELS.GemmaBackbone, "gemma", {"model_type": "gemma", **_GEMMA}),
    "gemma2": Kind(_MODELS.GemmaBackbone, "gemma2", {"model_type": "gemma2", **_CAPPED}),
    "gemma3": Kind(
        _MODELS.Gemma3Backbone, "gemma3",
        {
            "model_type": "gemma3_text", **_CAPPED, "attn_logit_softcapping": None, "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}  # fmt: skip


def tensors_of(kind: Kind) -> Tensors:
    """Random weights in Hugging Face's names; scales have few digits, as those of models in bfloat16 do."""
    config = kind.settings
    model, head_dim = config["model_type"], config.get("head_dim", WIDTH // HEADS)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        shapes |= {at + name: (WIDTH,) for name in norms}
        for name, heads in (("q", HEADS), ("k", PAIRS), ("v", PAIRS)):
            shapes[f"{at}self_attn.{name}_proj"] = (heads * head_dim, WIDTH)
        shapes[f"{at}self_attn.o_proj"] = (WIDTH, HEADS * head_dim)
        if model in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes |= {f"{at}self_attn.{name}_norm": (head_dim,) for name in "qk"}
        parts = {"mlp.": INNER}
        if model == "mixtral":
            shapes[f"{at}block_sparse_moe.gate"] = (EXPERTS, WIDTH)
            parts = {f"block_sparse_moe.experts.{expert}.": INNER for expert in range(EXPERTS)}
        elif model.endswith("moe"):
            shapes[f"{at}mlp.gate"] = (EXPERTS, WIDTH)
            parts = {f"mlp.experts.{expert}.": 32 for expert in range(EXPERTS)}
        if model == "qwen2_moe":
            shapes[f"{at}mlp.shared_expert_gate"] = (1, WIDTH)
            parts["mlp.shared_expert."] = 64
        gate, up, down = ("w1", "w3", "w2") if model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for part, inner in parts.items():
            shapes |= {f"{at}{part}{gate}": (inner, WIDTH), f"{at}{part}{up}": (inner, WIDTH)}
            shapes[f"{at}{part}{down}"] = (WIDTH, inner)
    rng = np.random.default_rng(1)
    made = {f"model.{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    made |= {name: np.round(value * 64) / 64 + 0 for name, value in made.items() if value.ndim == 1}
    if kind.bias:
        for name in [name for name in made if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            made[name.replace(".weight", ".bias")] = rng.standard_normal(made[name].shape[0]).astype(np.float32)
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    return made


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
    config = kind.settings
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
    config = kind.settings
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
    for key, name in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attention.sliding_window", "sliding_window"),
    ):
        if config.get(name) is not None:
            entries[key] = config[name]
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
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
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
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kind.settings))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder
