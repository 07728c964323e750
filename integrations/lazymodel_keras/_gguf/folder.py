"""A GGUF file as the Hugging Face folder of its model: everything that KerasHub's loaders and converters request.

Configuration and vocabulary are written into a temporary folder on request. Weights are never written: their path in
that folder is a placeholder without a file, and `tensors` are returned for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np

from lazymodel import Checkpoint, CheckpointError, open_checkpoint
from lazymodel._quantized.config import Plain
from lazymodel._remote.path import Location, RemotePath
from lazymodel._remote.url import is_url
from lazymodel.checkpoints._checkpoint import CONFIG, DecodedCheckpoint
from lazymodel_keras import _upstream
from lazymodel_keras._gguf.architectures import (
    LLAMA2,
    LLAMA3,
    PHI3,
    TEKKEN,
    Architecture,
    Metadata,
    Settings,
    architecture,
    plain_tensors,
    settings,
)

# Tekken's regex that splits text: `config.pattern` of Mistral's `tekken.json`.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Converter:
    """The parts that KerasHub's loader uses of a module that converts a type of model."""

    backbone_cls: Any
    convert_backbone_config: Callable[[Settings], Settings]
    convert_weights: Callable[[Any, Any, Settings], Any]
    convert_tokenizer: Callable[..., Any]


def converter(row: Architecture) -> _Converter | None:
    """The converter for a type of model; None if KerasHub's own converter is sufficient."""
    models = _upstream.hub_models()
    if row in (LLAMA2, LLAMA3):
        own = _upstream.converter("llama3")
        cls = models.LlamaBackbone if row is LLAMA2 else own.backbone_cls
        tokenizer = _load_sentence_piece if row is LLAMA2 else own.convert_tokenizer
        return _Converter(cls, lambda config: _llama(own, config), own.convert_weights, tokenizer)
    if row is TEKKEN:
        own = _upstream.converter("mistral")
        return _Converter(own.backbone_cls, own.convert_backbone_config, own.convert_weights, _tekken)
    if row is PHI3:
        return _Converter(models.Phi3Backbone, _phi3_config, _phi3_weights, _load_sentence_piece)
    return None


def _llama(own: Any, config: Settings) -> Settings:
    return {**own.convert_backbone_config(config), "layer_norm_epsilon": config["rms_norm_eps"]}


def _load_sentence_piece(cls: Any, preset: str, **kwargs: Any) -> Any:
    return cls(_upstream.preset_file(preset, "tokenizer.model"), **kwargs)


def _tekken(_: Any, preset: str, **kwargs: Any) -> Any:
    with open(_upstream.preset_file(preset, "tokenizer.json"), encoding="utf-8") as file:
        content = json.load(file)
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    cls = _upstream.hub_models().MistralTekkenTokenizer
    return cls(vocabulary=vocabulary, merges=merges, split_pattern=_TEKKEN, **kwargs)


def _phi3_config(config: Settings) -> Settings:
    scaling = config.get("rope_scaling", {})
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "num_query_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "max_sequence_length": config["max_position_embeddings"],
        "pretraining_sequence_length": config["original_max_position_embeddings"],
        "rope_max_wavelength": config["rope_theta"],
        "rope_scaling_type": "su" if scaling else None,
        "rope_scaling_short_factor": scaling.get("short_factor"),
        "rope_scaling_long_factor": scaling.get("long_factor"),
    }


def _phi3_weights(backbone: Any, loader: Any, config: Settings) -> None:
    def port(variable: Any, name: str, change: Callable[[Any], Any] = lambda tensor: tensor) -> None:
        loader.port_weight(variable, f"model.{name}", lambda tensor, shape: np.reshape(change(tensor), shape))

    def part(index: int, sizes: Sequence[int]) -> Callable[[Any], Any]:
        def rows(tensor: Any) -> Any:
            if tensor.shape[0] != sum(sizes):
                where = f"tensor {tensor.name!r} of {tensor.file}"
                raise CheckpointError(f"{where}: expected {sum(sizes)} rows, found {tensor.shape[0]}")
            return np.transpose(tensor[sum(sizes[:index]) : sum(sizes[: index + 1])])

        return rows

    heads, pairs = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    attention_rows, inner_rows = (heads, pairs, pairs), [config["intermediate_size"]] * 2
    port(backbone.token_embedding.embeddings, "embed_tokens.weight")
    loader.port_weight(
        backbone.token_embedding.reverse_embeddings, "lm_head.weight", lambda tensor, _: np.transpose(tensor)
    )
    for index, layer in enumerate(backbone.transformer_layers):
        at = f"layers.{index}"
        port(layer.pre_attention_layernorm.scale, f"{at}.input_layernorm.weight")
        port(layer.post_attention_layernorm.scale, f"{at}.post_attention_layernorm.weight")
        attention, fused = layer.attention, f"{at}.self_attn.qkv_proj.weight"
        port(attention.query_dense.kernel, fused, part(0, attention_rows))
        port(attention.key_dense.kernel, fused, part(1, attention_rows))
        port(attention.value_dense.kernel, fused, part(2, attention_rows))
        port(attention.output_dense.kernel, f"{at}.self_attn.o_proj.weight", np.transpose)
        fused = f"{at}.mlp.gate_up_proj.weight"
        port(layer.feedforward_gate_dense.kernel, fused, part(0, inner_rows))
        port(layer.feedforward_intermediate_dense.kernel, fused, part(1, inner_rows))
        port(layer.feedforward_output_dense.kernel, f"{at}.mlp.down_proj.weight", np.transpose)
    port(backbone.layer_norm.scale, "norm.weight")


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # the numbers of SentencePiece
_TYPES = range(1, 7)
_BOUNDARIES = ("<bos>", "<eos>", "<pad>")  # of Gemma; their numbers may be missing
_WORD = "▁"  # SentencePiece's character for a space


def _vocabulary_files(row: Architecture) -> Mapping[str, Callable[[Metadata, Architecture], bytes]]:
    """For each file of the vocabulary of such a model, a function that creates its content."""
    if row.vocabularies:
        return {"tokenizer.json": _byte_level, "tokenizer_config.json": _boundaries}
    return {"tokenizer.model": _sentence_piece}


def byte_level(metadata: Metadata, row: Architecture) -> tuple[dict[str, int], list[tuple[str, str]], dict[str, int]]:
    """A byte-level BPE: its tokens, its merges, and the tokens that no merge creates.

    Raises CheckpointError if the file has none, or one that splits text differently than KerasHub's class.
    """
    kind, splits = metadata.of_tokenizer("model", str), metadata.of_tokenizer("pre", str, "default")
    if kind != "gpt2" or splits not in row.vocabularies:
        known = f"'gpt2' with tokenizer.ggml.pre one of {', '.join(map(repr, row.vocabularies))}"
        metadata.refuse(
            "tokenizer.ggml.model", f"{known}, which KerasHub's tokenizer for a {row.model_type} reads",
            f"{kind!r} with {splits!r}",
        )  # fmt: skip
    tokens, types = _tokens(metadata)
    merges = [tuple(str(merge).split(" ")) for merge in metadata.of_tokenizer("merges", list)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        metadata.refuse("tokenizer.ggml.merges", "pairs", repr(wrong))
    ids: dict[int, dict[str, int]] = {_NORMAL: {}, _CONTROL: {}, _USER_DEFINED: {}}
    for index, (token, of_type) in enumerate(zip(tokens, types, strict=True)):
        ids.get(of_type, {})[token] = index  # padding has no other type, and is dropped
    return ids[_NORMAL], cast("list[tuple[str, str]]", merges), {**ids[_CONTROL], **ids[_USER_DEFINED]}


def _byte_level(metadata: Metadata, row: Architecture) -> bytes:
    vocabulary, merges, added = byte_level(metadata, row)
    entries = [{"id": index, "content": token, "special": True} for token, index in added.items()]
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
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
    if wrong := next((of_type for of_type in types if of_type not in _TYPES), None):
        metadata.refuse("tokenizer.ggml.token_type", "numbers from 1 to 6", wrong)
    return tokens, types


def _numbers(metadata: Metadata, key: str, kind: type, count: int) -> list[Any]:
    values = metadata.of_tokenizer(key, list)
    numbers = [value for value in values if isinstance(value, int | kind) and not isinstance(value, bool)]
    if len(numbers) != count or len(values) != count:
        metadata.refuse(f"tokenizer.ggml.{key}", f"{count} numbers, one a token", f"{len(numbers)} among {len(values)}")
    return numbers


_SUFFIX = ".gguf"
_WEIGHTS = "model.safetensors"


def is_gguf(preset: Any) -> bool:
    """Returns True if a preset is a GGUF file, its URL, or a folder of such files without a configuration."""
    if not isinstance(preset, str):
        return False
    if (urlsplit(preset).path if is_url(preset) else preset).endswith(_SUFFIX):
        return True
    return os.path.isdir(preset) and not (Path(preset) / CONFIG).exists() and any(Path(preset).glob(f"*{_SUFFIX}"))


class GgufModel(DecodedCheckpoint):
    """The tensors of a GGUF file by their names on Hugging Face; tensors without such a name by their own.

    Attributes:
        settings: The model's configuration.
    """

    def __init__(self, stored: Checkpoint, plain: dict[str, Plain], left: dict[str, None], settings: Settings) -> None:
        super().__init__(stored, plain, left, stored.path)
        self.settings = settings


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
        if name == CONFIG:
            path.write_text(json.dumps(self._settings()))
        elif name in (files := _vocabulary_files(self.row)):
            path.write_bytes(files[name](self._metadata, self.row))
        elif name != _WEIGHTS:
            raise FileNotFoundError(f"there is no {name} in {self.where}")
        return str(path)

    def location(self, _: str) -> str | RemotePath:
        """Returns the file for a path in the folder."""
        return self._given if isinstance(self._given, RemotePath) else self.where

    def tensors(self, *, fresh: bool) -> GgufModel:
        """The weights; `fresh` opens the file again."""
        stored = open_checkpoint(cast(Any, self._given)) if fresh else self._stored
        found = self._settings()
        return GgufModel(stored, *plain_tensors(self.row, found, stored), found)

    def _settings(self) -> Settings:
        return settings(self.row, self._metadata, self._stored)
