"""The vocabulary in a GGUF file, as the files of a Hugging Face folder that KerasHub's converters read it from.

A byte-level BPE as `tokenizer.json` and `tokenizer_config.json`, SentencePiece as `tokenizer.model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from lazymodel_keras._gguf.architectures import Architecture
from lazymodel_keras._gguf.metadata import Metadata

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # as SentencePiece numbers them
_TYPES = range(1, 7)
_BOUNDARIES = ("<bos>", "<eos>", "<pad>")  # Gemma's; their numbers may be missing
_WORD = "▁"  # what SentencePiece writes for a space


def vocabulary_files(row: Architecture) -> Mapping[str, Callable[[Metadata, Architecture], bytes]]:
    """What makes the content of each file that the vocabulary of such a model is in."""
    if row.vocabularies:
        return {"tokenizer.json": _byte_level, "tokenizer_config.json": _boundaries}
    return {"tokenizer.model": _sentence_piece}


def byte_level(metadata: Metadata, row: Architecture) -> tuple[dict[str, int], list[tuple[str, str]], dict[str, int]]:
    """A byte-level BPE: its tokens, its merges, and the tokens that no merge makes.

    Raises CheckpointError where the file has none, or one that splits text in a way that KerasHub's class does not.
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
        ids.get(of_type, {})[token] = index  # those that are padding are nobody's
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
        metadata.refuse("tokenizer.ggml.scores", "scores that say which pieces are joined first", "the same for all")
    boundaries = {name: metadata.of_tokenizer(f"{name}_token_id", int, -1) for name in ("bos", "eos", "padding")}
    # As SentencePiece has it, one: files may name another token, and say of what only pads that it is unknown.
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
            # Gemma's models of SentencePiece take these from text, which llama.cpp's converter does not write down.
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
    """All tokens and their types; CheckpointError where they are not texts and numbers, or a token comes twice."""
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
