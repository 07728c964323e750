"""GGUF files as KerasHub models: what loading the Hugging Face folder gives that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from keras_hub.src.utils.preset_utils import list_subclasses

import lazymodel as lm
import lazymodel_keras as lk

from .gguf_models import (
    KINDS,
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
from .models import bits


def file_of(folder: Path, kind: Kind, quantized: Type | None = None, **change: Any) -> str:
    stored = stored_tensors(kind, tensors_of(kind))
    return str(write_gguf(folder / "model.gguf", kind.name, metadata_of(kind) | change, stored, quantized))


def loaded(cls: Any, preset: Any) -> Any:
    return lk.abstract_from_preset(cls, str(preset)).materialize(initialize="nothing")


@pytest.mark.parametrize("name", KINDS)
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
    for ours, theirs in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=ours.path)


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


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # KerasHub's
@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCE_PIECE])
def test_splits_text_as_the_folder_s_vocabulary_does(name: str, tmp_path: Path) -> None:
    cls = next(c for c in list_subclasses(keras_hub.models.Tokenizer) if c.backbone_cls is KINDS[name].cls)
    folder, file = with_vocabulary(tmp_path, name)
    expected = cls.from_preset(str(folder))
    with lk.deferred():
        found = cls.from_preset(file)
    assert type(found) is type(expected)
    for text in TEXTS:
        np.testing.assert_array_equal(found(text), expected(text))
        assert found.detokenize(found(text)) == expected.detokenize(expected(text))
    for token in ("start_token_id", "end_token_id", "pad_token_id"):
        assert getattr(found, token) == getattr(expected, token)
