"""A GGUF file as the Hugging Face folder of its model: everything that KerasHub's loaders and converters request.

Lazily reverses what llama.cpp's `convert_hf_to_gguf.py` does to configuration and tensors; missing settings have its
defaults. Configuration and vocabulary are written on request; the weights' path is a placeholder for `tensors`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from lazymodel import Checkpoint, CheckpointError, LazyTensor, open_checkpoint
from lazymodel._remote.path import Location, RemotePath
from lazymodel._show.text import listed
from lazymodel.checkpoints._hugging_face import CONFIG, DecodedCheckpoint, Plain
from lazymodel.checkpoints._untrusted import is_finite
from lazymodel_keras import _upstream
from lazymodel_keras._record.phi3 import converter_module, phi3_converter, with_sentence_piece

_ARCHITECTURE = "general.architecture"
_REQUIRED: Any = object()
_KINDS = {int: "a whole number", float: "a finite number", str: "a text", list: "a list"}


class Metadata:
    """The metadata of a file, by keys without the architecture's name.

    Attributes:
        file: The path of the file, for messages.
        architecture: llama.cpp's name of the architecture.
        kind: `model`, or `adapter`.
    """

    def __init__(self, file: str, entries: Mapping[str, Any]) -> None:
        self.file, self._entries = file, entries
        self.architecture: str = self._checked(_ARCHITECTURE, str, _REQUIRED)
        self.kind: str = self._checked("general.type", str, "model")

    def of_model(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """An entry of the architecture: `block_count` for `llama.block_count`."""
        return self._checked(f"{self.architecture}.{key}", kind, default)

    def of_tokenizer(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """An entry of the tokenizer: `tokens` for `tokenizer.ggml.tokens`."""
        return self._checked(f"tokenizer.ggml.{key}", kind, default)

    def refuse(self, key: str, expected: str, found: Any) -> NoReturn:
        """Raises CheckpointError for an entry with a wrong value."""
        raise CheckpointError(f"{self.file}: expected {key} of its metadata to be {expected}, found {found}")

    def _checked(self, key: str, kind: type, default: Any) -> Any:
        value = self._entries.get(key, default)
        if value is _REQUIRED:
            self.refuse(key, _KINDS[kind], "no such entry")
        number = is_finite(value)
        if kind is float and number:
            # A number such as 1e-6 that was stored as a float32 becomes 1e-6 again.
            return float(str(np.float32(value)) if np.float32(value) == value else value)
        if value is default or (isinstance(value, kind) and (number or kind not in (int, float))):
            return value
        found = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        self.refuse(key, _KINDS.get(kind, "true or false"), found)


Settings: TypeAlias = dict[str, Any]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # Names for one expert; llama.cpp stacks experts.
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL_LAYER = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_EMBEDDINGS, _LAST_NORM = "token_embd.weight", "output_norm.weight"
_MOST = 2**31  # the limit of sizes in Keras
_POSITIVE = ("num_attention_heads", "num_key_value_heads", "hidden_size", "original_max_position_embeddings")
_LEAST = {**dict.fromkeys(_POSITIVE, 1), "head_dim": 2}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A type of model.

    Attributes:
        model_type: Its name on Hugging Face.
        backbone: Its class in KerasHub.
        more: Settings in addition to those that all models have; see `_MISTRAL`.
        layer: Names of tensors of a layer that differ from those of other models.
        fixed: Settings with only one possible value in KerasHub's class, or its converter.
        vocabularies: Known values of the setting that splits text into words, for a byte-level BPE; empty for
            SentencePiece.
        interleaved: True if the rows of each head's queries and keys are stored in the order of llama.cpp's rotation.
        offset_norms: True if scales are stored with the 1 that this model adds to them.
        wide_heads: True if the head size may differ from the width divided by the number of heads.
        scaled_rope: True if linearly scaled rotary embeddings are supported.
    """

    model_type: str
    backbone: str
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    layer: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    fixed: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    vocabularies: tuple[str, ...] = ()
    interleaved: bool = False
    offset_norms: bool = False
    wide_heads: bool = False
    scaled_rope: bool = False


def _query_scalar(largest: int) -> Callable[[Metadata], int]:
    """Returns the function that computes the scale of queries of Gemma 2 and 3; `largest`: layers of the 27B model.

    Only its queries are scaled by the width divided by the number of heads: llama.cpp also identifies it by its layers.
    """

    def scalar(metadata: Metadata) -> int:
        if metadata.of_model("block_count", int) != largest:
            return metadata.of_model("attention.key_length", int)
        return metadata.of_model("embedding_length", int) // metadata.of_model("attention.head_count", int)

    return scalar


def _original_context(metadata: Metadata) -> int:
    context = metadata.of_model("context_length", int)
    return metadata.of_model("rope.scaling.original_context_length", int, context)


# Settings in addition to those of all models: an entry of the metadata (key, kind, default if it may be missing), a
# function of the metadata, or a constant.
_MISTRAL: Settings = {"sliding_window": ("attention.sliding_window", int, None)}
_MIXTRAL: Settings = {
    **_MISTRAL,
    "num_local_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
    "output_router_logits": False,
}
_QWEN: Settings = {"use_sliding_window": False, "sliding_window": None}
_QWEN_EXPERTS: Settings = {
    **_QWEN,
    "num_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int, 0),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,  # only used in training; Hugging Face's default
}
_GEMMA2: Settings = {
    "query_pre_attn_scalar": _query_scalar(46),
    "attn_logit_softcapping": ("attn_logit_softcapping", float, 50.0),
    "final_logit_softcapping": ("final_logit_softcapping", float, 30.0),
    "sliding_window": ("attention.sliding_window", int, 4096),
}
_GEMMA3: Settings = {
    "query_pre_attn_scalar": _query_scalar(62),
    "attn_logit_softcapping": ("attn_logit_softcapping", float, None),
    "final_logit_softcapping": ("final_logit_softcapping", float, None),
    "sliding_window": ("attention.sliding_window", int, None),
}

_LLAMA_BPE = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
_QWEN_BPE = ("qwen2", "deepseek-r1-qwen")
_SPLITS: dict[str, Any] = {"interleaved": True}
_GEMMA: dict[str, Any] = {"offset_norms": True, "wide_heads": True}
_GEMMA_FIXED = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}

LLAMA3 = Architecture("llama", "LlamaBackbone", vocabularies=_LLAMA_BPE, **_SPLITS)
LLAMA2 = dataclasses.replace(LLAMA3, vocabularies=())
MISTRAL = Architecture("mistral", "MistralBackbone", _MISTRAL, wide_heads=True, **_SPLITS)
TEKKEN = dataclasses.replace(MISTRAL, vocabularies=("tekken",))
PHI3 = Architecture(
    "phi3",
    "Phi3Backbone",
    {"original_max_position_embeddings": _original_context},
    {"ffn_up": "mlp.gate_up_proj"},
)
_MIXTURE = Architecture("mixtral", "MixtralBackbone", _MIXTRAL, _MIXTRAL_LAYER, **_SPLITS)
_QWEN2 = Architecture("qwen2", "QwenBackbone", _QWEN, vocabularies=_QWEN_BPE)
# The file does not contain if the router's weights are normalized: llama.cpp does so for Qwen 3.
_QWEN2_MOE = Architecture(
    "qwen2_moe", "QwenMoeBackbone", {**_QWEN_EXPERTS, "norm_topk_prob": False}, vocabularies=_QWEN_BPE
)
_QWEN3 = dataclasses.replace(_QWEN2, model_type="qwen3", backbone="Qwen3Backbone", wide_heads=True)
_QWEN3_MOE = dataclasses.replace(
    _QWEN3, model_type="qwen3_moe", backbone="Qwen3MoeBackbone", more={**_QWEN_EXPERTS, "norm_topk_prob": True}
)
_GEMMA_3 = Architecture(
    "gemma3_text", "Gemma3Backbone", _GEMMA3, _FOUR_NORMS, {"rope_theta": 1e6}, scaled_rope=True, **_GEMMA
)

# llama.cpp's name → candidates.
ARCHITECTURES: Mapping[str, tuple[Architecture, ...]] = {
    "llama": (LLAMA3, LLAMA2, MISTRAL, TEKKEN, _MIXTURE),
    "qwen2": (_QWEN2,),
    "qwen2moe": (_QWEN2_MOE,),
    "qwen3": (_QWEN3,),
    "qwen3moe": (_QWEN3_MOE,),
    "gemma": (Architecture("gemma", "GemmaBackbone", fixed=_GEMMA_FIXED, **_GEMMA),),
    "gemma2": (Architecture("gemma2", "GemmaBackbone", _GEMMA2, _FOUR_NORMS, _GEMMA_FIXED, **_GEMMA),),
    "gemma3": (_GEMMA_3,),
    "phi3": (PHI3,),
}


def architecture(metadata: Metadata, cls: Any, models: Any) -> Architecture:
    """Returns the row of a file, for the KerasHub class (of `models`) that is built from it.

    llama.cpp has one name for Llama 2 and 3, Mistral and Mixtral. Experts and vocabularies distinguish them, except
    Llama 2 and Mistral, which compute the same: these are Mistral if the class is.
    """
    rows = ARCHITECTURES.get(metadata.architecture)
    if metadata.kind == "adapter":
        found = "'adapter', without the base model: give its preset, and the folder of PEFT that this was made of: "
        metadata.refuse("general.type", "'model'", f"{found}from_preset(cls, base, adapter=folder)")
    if rows is None:
        metadata.refuse("general.architecture", f"one of {', '.join(ARCHITECTURES)}", repr(metadata.architecture))
    if len(rows) == 1:
        return rows[0]
    if metadata.of_model("expert_count", int, 0):
        return _MIXTURE
    byte_level = metadata.of_tokenizer("model", str, "") == "gpt2"
    family = cls if issubclass(cls, models.Backbone) else getattr(cls, "backbone_cls", None) or models.Backbone
    tekken = byte_level and metadata.of_tokenizer("pre", str, "") in TEKKEN.vocabularies
    if family is models.MistralBackbone or (family is models.Backbone and tekken):
        return TEKKEN if byte_level else MISTRAL
    return LLAMA3 if byte_level or issubclass(family, models.Llama3Backbone) else LLAMA2


def settings(row: Architecture, metadata: Metadata, stored: Checkpoint) -> Settings:
    """The model's `config.json` on Hugging Face, as far as KerasHub reads it.

    Raises CheckpointError if an entry is missing, contradicts the tensors, or is not supported by KerasHub's class.
    """
    of = metadata.of_model

    def setting(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return of(*entry)
        return entry(metadata) if callable(entry) else entry

    heads, width = of("attention.head_count", int), of("embedding_length", int)
    head_dim = of("attention.key_length", int, width // max(heads, 1))
    embeddings = stored.describe(_EMBEDDINGS).shape if _EMBEDDINGS in stored else ()
    if len(embeddings) != 2:
        raise CheckpointError(f"{metadata.file}: expected a matrix {_EMBEDDINGS!r}, found shape {embeddings}")
    if _LAST_NORM not in stored:  # KerasHub would use another tensor with a similar name
        raise CheckpointError(f"{metadata.file}: expected a tensor {_LAST_NORM!r}, found none")
    found: Settings = {
        "model_type": row.model_type,
        "architectures": [f"{row.backbone.removesuffix('Backbone')}ForCausalLM"],
        "vocab_size": embeddings[0],
        "num_hidden_layers": of("block_count", int),
        "hidden_size": width,
        "intermediate_size": of("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon", float),
        "rope_theta": of("rope.freq_base", float, row.fixed.get("rope_theta", 10000.0)),
        "max_position_embeddings": of("context_length", int),
        "tie_word_embeddings": "output.weight" not in stored,
        **{name: setting(entry) for name, entry in row.more.items()},
    }
    _check(row, metadata, found, stored)
    if rope := _rope_scaling(row, metadata, found, stored):
        found["rope_scaling"] = rope
    return found


def _check(row: Architecture, metadata: Metadata, found: Settings, stored: Checkpoint) -> None:
    key = f"{metadata.architecture}.{{}}".format
    for name, value in found.items():
        least = _LEAST.get(name, 0)
        if isinstance(value, int) and not least <= value < _MOST:
            raise CheckpointError(f"{metadata.file}: expected {name} from {least} to {_MOST - 1:,}, found {value:,}")
        if isinstance(value, float) and name in ("rms_norm_eps", "rope_theta") and value <= 0:
            raise CheckpointError(f"{metadata.file}: expected {name} above 0, found {value}")
    head_dim = found["head_dim"]
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := metadata.of_model(name, int, head_dim)) != head_dim:
            metadata.refuse(key(name), f"{head_dim}, the size of a head, as in KerasHub's {row.backbone}", size)
    plain = found["hidden_size"] // found["num_attention_heads"]
    if not row.wide_heads and head_dim != plain:
        metadata.refuse(key("attention.key_length"), f"{plain}, as in KerasHub's {row.backbone}", head_dim)
    for name, value in row.fixed.items():
        if not math.isclose(found[name], value, rel_tol=1e-6):
            expected = f"expected {name} of {value}, the only one of KerasHub's {row.backbone}"
            raise CheckpointError(f"{metadata.file}: {expected}, found {found[name]}")
    numbers = {int(match[1]) for match in map(_IN_LAYER.match, stored) if match}
    if numbers != set(range(len(numbers))) or found["num_hidden_layers"] != len(numbers):
        layers = listed(f"blk.{number}" for number in sorted(numbers)) or "none"
        metadata.refuse(key("block_count"), f"the number of layers in the file ({layers})", found["num_hidden_layers"])


def _rope_scaling(row: Architecture, metadata: Metadata, found: Settings, stored: Checkpoint) -> Settings | None:
    """The scaling of rotary embeddings: factors of Llama 3 and Phi-3 are tensors, that of Gemma 3 is an entry."""
    kind = metadata.of_model("rope.scaling.type", str, "none")
    factor = metadata.of_model("rope.scaling.factor", float, 1.0)
    half = found["head_dim"] // 2
    if row is PHI3 and _LONG in stored:
        factors = {"long_factor": _values(stored, _LONG, half), "short_factor": _values(stored, _SHORT, half)}
        return {"rope_type": "longrope", **factors}
    if kind not in ("none", "linear") or (kind == "linear" and factor != 1 and not row.scaled_rope):
        known = "none or linear" if row.scaled_rope else "none"
        expected = f"{known}, all that KerasHub's {row.backbone} knows"
        metadata.refuse(f"{metadata.architecture}.rope.scaling.type", expected, kind)
    if kind == "linear" and factor != 1:
        if factor <= 0:
            metadata.refuse(f"{metadata.architecture}.rope.scaling.factor", "above 0", factor)
        return {"rope_type": "linear", "factor": factor}
    if _ROPE_FREQUENCIES not in stored or set(factors := _values(stored, _ROPE_FREQUENCIES, half)) == {1.0}:
        return None
    scaling = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    if row.backbone != "LlamaBackbone" or not np.allclose(factors, _llama3_factors(found, scaling), rtol=1e-4):
        expected = "expected ones, or for Llama those of Llama 3, found others"
        raise CheckpointError(f"tensor {_ROPE_FREQUENCIES!r} of {metadata.file}: {expected}")
    return scaling


def _values(stored: Checkpoint, name: str, count: int) -> list[float]:
    if name not in stored or stored[name].shape != (count,):
        found = f"shape {stored[name].shape}" if name in stored else "no such tensor"
        raise CheckpointError(f"tensor {name!r} of {stored.path}: expected shape ({count},), found {found}")
    values: list[float] = stored[name].astype(np.float32).read().tolist()
    if wrong := [value for value in values if not (is_finite(value) and value > 0)]:
        raise CheckpointError(f"tensor {name!r} of {stored.path}: expected finite factors above 0, found {wrong[0]}")
    return values


def _llama3_factors(found: Settings, scaling: Settings) -> np.ndarray:
    """The divisors of frequencies in Llama 3.1, as `transformers` and llama.cpp compute them."""
    head_dim, context = found["head_dim"], scaling["original_max_position_embeddings"]
    lengths = 2 * math.pi * found["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((context / lengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_PART = re.compile(r"(.+)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,6})")  # in files of early Mixtrals


def plain_tensors(row: Architecture, found: Settings, stored: Checkpoint) -> tuple[dict[str, Plain], dict[str, None]]:
    """Hugging Face's tensors by their names there, as lazy views of a file's tensors, and the file's unused tensors."""
    plain: dict[str, Plain] = {}
    left = dict.fromkeys(stored)
    for name in (_ROPE_FREQUENCIES, *((_LONG, _SHORT) if row is PHI3 else ())):
        left.pop(name, None)  # they are settings
    experts = found.get("num_local_experts", found.get("num_experts", 0))
    layer = {**_LAYER, **row.layer}

    def add(name: str, source: str, change: Callable[[LazyTensor], Any] | None = None) -> None:
        if name in plain:
            raise CheckpointError(f"tensor {source!r} of {stored.path}: expected one that is {name}, found two")
        if change is None and row.offset_norms and source.endswith("norm.weight"):
            change = _less_one
        make = (lambda: stored[source]) if change is None else lambda: change(stored[source])
        plain[name] = Plain(make, stored.describe(source).file)
        left.pop(source, None)

    for source in stored:
        if (part := _PART.fullmatch(source)) is None:
            continue
        if (match := _IN_LAYER.fullmatch(part[1])) is None:
            if part[1] in _TOP:
                add(f"{_TOP[part[1]]}.{part[2]}", source)
            continue
        name, one = match[2], _ONE_EXPERT.fullmatch(match[2])
        name = name if one is None else f"{one[1]}_exps"
        if name not in layer:
            continue
        plain_name = f"model.layers.{match[1]}.{layer[name]}.{part[2]}"
        if one is not None:
            add(plain_name.format(one[2]), source)
        elif name.endswith("_exps"):
            if (shape := stored.describe(source).shape)[:1] != (experts,):
                where = f"tensor {source!r} of {stored.path}"
                raise CheckpointError(f"{where}: expected {experts} experts, as in its metadata, found shape {shape}")
            for index in range(experts):
                add(plain_name.format(index), source, lambda tensor, index=index: tensor[index])
        elif name == "ffn_gate_inp_shexp":
            add(plain_name, source, lambda tensor: tensor.reshape(1, -1))  # it has one row, which llama.cpp drops
        elif row.interleaved and name in ("attn_q", "attn_k"):
            heads = found["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
            add(plain_name, source, lambda tensor, heads=heads: _in_halves(tensor, heads))
        else:
            add(plain_name, source)
    if found["tie_word_embeddings"] and "model.embed_tokens.weight" in plain:
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    return plain, left


def _less_one(tensor: LazyTensor) -> Any:
    return tensor.astype(np.float32) - 1


def _in_halves(tensor: LazyTensor, heads: int) -> Any:
    """The rows of each head, which llama.cpp rotates as neighbouring pairs, in the order of rotating halves."""
    apart = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return apart.swapaxes(1, 2).reshape(tensor.shape)


# Tekken's regex that splits text: `config.pattern` of Mistral's `tekken.json`.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tekken(_: Any, preset: str, **kwargs: Any) -> Any:
    with open(_upstream.preset_file(preset, "tokenizer.json"), encoding="utf-8") as file:
        content = json.load(file)
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    cls = _upstream.hub_models().MistralTekkenTokenizer
    return cls(vocabulary=vocabulary, merges=merges, split_pattern=_TEKKEN, **kwargs)


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # the numbers of SentencePiece
_BOUNDARIES = ("<bos>", "<eos>", "<pad>")  # of Gemma; their numbers may be missing
_WORD = "▁"  # SentencePiece's character for a space


def _byte_level(metadata: Metadata, row: Architecture) -> bytes:
    """A byte-level BPE. Raises CheckpointError for another kind, or if KerasHub's class splits text differently."""
    kind, splits = metadata.of_tokenizer("model", str), metadata.of_tokenizer("pre", str, "default")
    if kind != "gpt2" or splits not in row.vocabularies:
        known = f"'gpt2' with tokenizer.ggml.pre one of {', '.join(map(repr, row.vocabularies))}"
        expected = f"{known}, which KerasHub's tokenizer for a {row.model_type} reads"
        metadata.refuse("tokenizer.ggml.model", expected, f"{kind!r} with {splits!r}")
    tokens, types = _tokens(metadata)
    merges = [tuple(str(merge).split(" ")) for merge in metadata.of_tokenizer("merges", list)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        metadata.refuse("tokenizer.ggml.merges", "pairs", repr(wrong))

    def of(kind: int) -> dict[str, int]:  # padding has no kind of these, and is dropped
        return {token: index for index, (token, found) in enumerate(zip(tokens, types, strict=True)) if found == kind}

    added = {**of(_CONTROL), **of(_USER_DEFINED)}
    entries = [{"id": index, "content": token, "special": True} for token, index in added.items()]
    model = {"type": "BPE", "vocab": of(_NORMAL), "merges": merges}
    return json.dumps({"version": "1.0", "added_tokens": entries, "model": model}).encode()


def _boundaries(metadata: Metadata, _: Architecture) -> bytes:
    tokens, _types = _tokens(metadata)
    names = {name: metadata.of_tokenizer(f"{name}_token_id", int) for name in ("bos", "eos")}
    for name, index in names.items():
        if not 0 <= index < len(tokens):
            metadata.refuse(f"tokenizer.ggml.{name}_token_id", f"the number of one of {len(tokens)} tokens", index)
    return json.dumps({f"{name}_token": tokens[index] for name, index in names.items()}).encode()


def _sentence_piece(metadata: Metadata, row: Architecture) -> bytes:
    if (kind := metadata.of_tokenizer("model", str)) != "llama":
        expected = f"'llama', SentencePiece, which KerasHub's tokenizer for a {row.model_type} reads"
        metadata.refuse("tokenizer.ggml.model", expected, repr(kind))
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    tokens, types = _tokens(metadata)
    scores = _numbers(metadata, "scores", float, len(tokens))
    normal = {score for score, of_type in zip(scores, types, strict=True) if of_type == _NORMAL}
    if len(normal) == 1 and types.count(_NORMAL) > 1:
        metadata.refuse("tokenizer.ggml.scores", "scores that order the merges of pieces", "the same for all")
    boundaries = {name: metadata.of_tokenizer(f"{name}_token_id", int, -1) for name in ("bos", "eos", "padding")}
    # Exactly one, as in SentencePiece: files may name another token, or give padding the type "unknown".
    unknown = tokens.index("<unk>") if "<unk>" in tokens else metadata.of_tokenizer("unknown_token_id", int, -1)
    if not 0 <= unknown < len(tokens):
        metadata.refuse("tokenizer.ggml.unknown_token_id", f"the number of one of {len(tokens)} tokens", unknown)

    model = messages.ModelProto()
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = messages.TrainerSpec.BPE, len(tokens)
    trainer.byte_fallback = messages.ModelProto.SentencePiece.BYTE in types
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = metadata.of_tokenizer("add_space_prefix", bool, True)
    normalizer.remove_extra_whitespaces = metadata.of_tokenizer("remove_extra_whitespaces", bool, False)
    for index, (token, score, of_type) in enumerate(zip(tokens, scores, types, strict=True)):
        if index == unknown:
            of_type = _UNKNOWN
        elif of_type == _UNKNOWN:
            of_type = _UNUSED
        elif row.offset_norms and of_type == _CONTROL and token not in _BOUNDARIES and index not in boundaries.values():
            # Gemma's SentencePiece models take these from text, which llama.cpp's converter does not record.
            of_type = _USER_DEFINED
        token = token.replace(" ", _WORD) if of_type == _USER_DEFINED else token
        model.pieces.add(piece=token, score=score, type=of_type)
    for name, index in {"unk": unknown, **boundaries}.items():
        short = name[:3]
        setattr(trainer, f"{short}_id", index)
        if 0 <= index < len(tokens):
            setattr(trainer, f"{short}_piece", tokens[index])
    return model.SerializeToString()


def _tokens(metadata: Metadata) -> tuple[list[str], list[int]]:
    """All tokens and their types; raises CheckpointError for invalid values, or if a token occurs twice."""
    tokens = metadata.of_tokenizer("tokens", list)
    if wrong := next((token for token in tokens if not isinstance(token, str)), None):
        metadata.refuse("tokenizer.ggml.tokens", "texts", repr(wrong))
    if len(set(tokens)) != len(tokens):
        metadata.refuse("tokenizer.ggml.tokens", "different ones", f"{len(set(tokens))} among {len(tokens)}")
    types = _numbers(metadata, "token_type", int, len(tokens))
    if wrong := next((of_type for of_type in types if of_type not in range(1, 7)), None):
        metadata.refuse("tokenizer.ggml.token_type", "numbers from 1 to 6", wrong)
    return tokens, types


def _numbers(metadata: Metadata, key: str, kind: type, count: int) -> list[Any]:
    values = metadata.of_tokenizer(key, list)
    numbers = [value for value in values if isinstance(value, int | kind) and not isinstance(value, bool)]
    if len(numbers) != count or len(values) != count:
        metadata.refuse(f"tokenizer.ggml.{key}", f"{count} numbers, one a token", f"{len(numbers)} among {len(values)}")
    return numbers


class GgufModel(DecodedCheckpoint):
    """The tensors of a GGUF file by their names on Hugging Face; tensors without such a name by their own."""

    settings: Settings  # the model's configuration


class GgufFolder:
    """A GGUF file, in one part or several, and the local folder of its small files.

    Attributes:
        where: The file, or the first part.
        row: The type of model.
    """

    def __init__(self, where: Location, own: Path) -> None:
        self.own, self._given = own, where
        self._stored = open_checkpoint(cast(Any, where))
        self.where = self._stored.files[0]
        self._metadata = Metadata(self.where, self._stored.metadata or {})
        self.choose(_upstream.hub_models().Backbone)

    def choose(self, cls: Any) -> None:
        """Reads the file as the model of a KerasHub class, if the file may be of several."""
        self.row: Architecture = architecture(self._metadata, cls, _upstream.hub_models())

    def file(self, name: str) -> str:
        """The path of a file in the folder, which is written there; raises FileNotFoundError if there is none."""
        path = self.own / name
        makers = {"tokenizer.json": _byte_level, "tokenizer_config.json": _boundaries}
        if not self.row.vocabularies:
            makers = {"tokenizer.model": _sentence_piece}
        if name == CONFIG:
            path.write_text(json.dumps(self._settings()))
        elif name in makers:
            path.write_bytes(makers[name](self._metadata, self.row))
        elif name != "model.safetensors":
            raise FileNotFoundError(f"there is no {name} in {self.where}")
        return str(path)

    def location(self, _: str) -> str | RemotePath:
        """Returns the file for a path in the folder."""
        return self._given if isinstance(self._given, RemotePath) else self.where

    def converter(self) -> Any:
        """The converter for a type of model; None if KerasHub's own converter is sufficient."""
        row, models = self.row, _upstream.hub_models()
        if row in (LLAMA2, LLAMA3):
            own = _upstream.converter("llama3")
            cls = models.LlamaBackbone if row is LLAMA2 else own.backbone_cls
            tokenizer = with_sentence_piece if row is LLAMA2 else own.convert_tokenizer

            def config_of(config: Settings) -> Settings:
                return {**own.convert_backbone_config(config), "layer_norm_epsilon": config["rms_norm_eps"]}

            return converter_module(cls, config_of, own.convert_weights, tokenizer)
        if row is TEKKEN:
            own = _upstream.converter("mistral")
            return converter_module(own.backbone_cls, own.convert_backbone_config, own.convert_weights, _tekken)
        if row is PHI3:
            return phi3_converter()
        return None

    def tensors(self, *, fresh: bool) -> GgufModel:
        """The weights; `fresh` opens the file again."""
        stored = open_checkpoint(cast(Any, self._given)) if fresh else self._stored
        found = self._settings()
        model = GgufModel(stored, *plain_tensors(self.row, found, stored), stored.path)
        model.settings = found
        return model

    def _settings(self) -> Settings:
        return settings(self.row, self._metadata, self._stored)
