"""Folders as `save_pretrained` of transformers 5 writes them, nothing changed back, and what is loaded from each.

    python -m tests.keras.transformers_folders            # minutes; writes the table into `integrations/MODELS.md`
    python -m tests.keras.transformers_folders NAME ...   # prints the rows of these folders

Folders are written by a child process (`--write DIRECTORY NAME ...`): PyTorch and TensorFlow, which KerasHub imports,
do not live in one process.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .hugging_face_models import HUGGING_FACE, Config

PAGE = Path(__file__).parent.parent.parent / "integrations" / "MODELS.md"
NEAR = 1e-4  # of a standard deviation


@dataclasses.dataclass(frozen=True)
class Folder:
    """A tiny model.

    Attributes:
        of: Its `model_type`, and the name in `HUGGING_FACE` if it is there.
        architecture: The class of transformers.
        cls: The class of KerasHub that loads it.
        changes: What its configuration has besides, or all of it.
        output: The output of transformers that is compared.
        said: What our error says; empty if it is loaded and right.
        near: How far outputs may be apart, in standard deviations.
    """

    of: str
    architecture: str
    cls: str
    changes: Config = dataclasses.field(default_factory=dict)
    output: str = "last_hidden_state"
    said: str = ""
    near: float = NEAR

    @property
    def load(self) -> Config:
        """What `from_preset` needs besides the folder."""
        return {} if self.cls.endswith("Backbone") else {"preprocessor": None}


def _causal(of: str, architecture: str, cls: str, said: str = "", near: float = NEAR, **changes: Any) -> Folder:
    return Folder(of, f"{architecture}ForCausalLM", f"{cls}CausalLM", changes, "logits", said, near)


_QWEN3_5: Config = HUGGING_FACE["qwen3_5"].config["text_config"]
_QWEN3_5_MOE: Config = HUGGING_FACE["qwen3_5_moe"].config["text_config"]
_DECODER: Config = HUGGING_FACE["llama"].config
_PHI3: Config = {**_DECODER, "original_max_position_embeddings": 64}
_LONG: Config = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 8,
}  # fmt: skip
_PHI3_LONG: Config = {**_PHI3, "rope_parameters": _LONG, "original_max_position_embeddings": 8}
_LLAMA3: Config = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_PLAIN: Config = {"rope_type": "default", "rope_theta": 10000.0}
_FULL, _WINDOW = "full_attention", "sliding_attention"
_IMAGES: Config = {"image_token_index": 63}

FOLDERS: dict[str, Folder] = {
    "Llama": _causal("llama", "Llama", "Llama3"),
    "Llama, tied": _causal("llama", "Llama", "Llama3", tie_word_embeddings=True),
    "Llama, rope_type llama3": _causal("llama", "Llama", "Llama3", rope_parameters=_LLAMA3),
    "Llama, head_dim of its own": _causal("llama", "Llama", "Llama3", "head_dim is 8, the model has 4", head_dim=8),
    "Mistral": _causal("mistral", "Mistral", "Mistral", near=2e-2),  # KerasHub goes through float16
    "Mixtral": _causal("mixtral", "Mixtral", "Mixtral"),
    "Qwen2": _causal("qwen2", "Qwen2", "Qwen"),
    "Qwen2-MoE": _causal("qwen2_moe", "Qwen2Moe", "QwenMoe"),
    "Qwen3": _causal("qwen3", "Qwen3", "Qwen3"),
    "Qwen3, tied, headless": Folder("qwen3", "Qwen3Model", "Qwen3Backbone", {"tie_word_embeddings": True}),
    "Qwen3-MoE": _causal("qwen3_moe", "Qwen3Moe", "Qwen3Moe"),
    "Qwen3.5, text": _causal("qwen3_5_text", "Qwen3_5", "Qwen3_5", **_QWEN3_5),
    "Qwen3.5-MoE, text": _causal("qwen3_5_moe_text", "Qwen3_5Moe", "Qwen3_5Moe", **_QWEN3_5_MOE),
    "Gemma": _causal("gemma", "Gemma", "Gemma"),
    "Gemma 2": _causal("gemma2", "Gemma2", "Gemma"),
    "Gemma 3, text": _causal("gemma3_text", "Gemma3", "Gemma3", num_hidden_layers=6),
    "Gemma 3 with vision": Folder("gemma3", "Gemma3ForConditionalGeneration", "Gemma3Backbone", _IMAGES),
    "Gemma 4, text": _causal("gemma4_text", "Gemma4", "Gemma4"),
    "PaliGemma": Folder("paligemma", "PaliGemmaForConditionalGeneration", "PaliGemmaBackbone"),
    "Phi-3": _causal("phi3", "Phi3", "Phi3", **_PHI3),
    "Phi-3, longrope": _causal("phi3", "Phi3", "Phi3", **_PHI3_LONG),
    "Phi-3, tied": _causal("phi3", "Phi3", "Phi3", **_PHI3, tie_word_embeddings=True),
    "GPT-OSS, not quantized": _causal(
        "gpt_oss", "GptOss", "GptOss", rope_parameters=_PLAIN, layer_types=[_FULL, _WINDOW]
    ),
    "GPT-OSS, windows": _causal(
        "gpt_oss", "GptOss", "GptOss", "layer_types is '8, full'", sliding_window=8, layer_types=[_WINDOW, _FULL]
    ),
    "SmolLM3": _causal("smollm3", "SmolLM3", "SmolLM3"),
    "GPT-2": Folder("gpt2", "GPT2LMHeadModel", "GPT2CausalLM", output="logits"),
    "BART": Folder("bart", "BartForConditionalGeneration", "BartSeq2SeqLM", output="logits"),
    "BART, headless": Folder("bart", "BartModel", "BartBackbone"),
    "T5Gemma": Folder("t5gemma", "T5GemmaForConditionalGeneration", "T5GemmaBackbone"),
    "T5Gemma 2 with vision": Folder("t5gemma2", "T5Gemma2ForConditionalGeneration", "T5Gemma2Backbone", _IMAGES),
    "BERT": Folder("bert", "BertForPreTraining", "BertBackbone", near=2e-3),  # KerasHub takes the tanh for GELU
    "BERT, headless": Folder("bert", "BertModel", "BertBackbone", near=2e-3),
    "RoBERTa": Folder("roberta", "RobertaForMaskedLM", "RobertaBackbone", near=3e-4),
    "RoBERTa, headless": Folder("roberta", "RobertaModel", "RobertaBackbone", near=3e-4),
    "XLM-RoBERTa": Folder("xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaBackbone", near=3e-4),
    "XLM-RoBERTa, headless": Folder("xlm-roberta", "XLMRobertaModel", "XLMRobertaBackbone", near=3e-4),
    "DistilBERT": Folder("distilbert", "DistilBertForMaskedLM", "DistilBertBackbone"),
    "DistilBERT, headless": Folder("distilbert", "DistilBertModel", "DistilBertBackbone"),
    "ALBERT": Folder("albert", "AlbertForPreTraining", "AlbertBackbone"),
    "ALBERT, headless": Folder("albert", "AlbertModel", "AlbertBackbone"),
    "ESM": Folder("esm", "EsmForMaskedLM", "ESMBackbone"),
    "ESM, headless": Folder("esm", "EsmModel", "ESMBackbone"),
    "ESM, token_dropout": Folder(
        "esm", "EsmForMaskedLM", "ESMBackbone", {"token_dropout": True}, said="token_dropout is True"
    ),
    "ESM, absolute positions": Folder(
        "esm", "EsmForMaskedLM", "ESMBackbone",
        {"position_embedding_type": "absolute", "max_position_embeddings": 32},
        said="position_embedding_type is 'absolute'",
    ),
    "ViT": Folder("vit", "ViTForImageClassification", "ViTImageClassifier", output="logits"),
    "ViT, two labels": Folder("vit", "ViTForImageClassification", "ViTImageClassifier", {"num_labels": 2}, "logits"),
    "ViT, headless": Folder("vit", "ViTModel", "ViTBackbone"),
    "DeiT": Folder("deit", "DeiTForImageClassificationWithTeacher", "DeiTImageClassifier", output="cls_logits"),
    "DeiT, two labels": Folder(
        "deit", "DeiTForImageClassification", "DeiTImageClassifier", {"num_labels": 2}, "logits"
    ),
    "DeiT, headless": Folder("deit", "DeiTModel", "DeiTBackbone"),
    "Swin, two labels": Folder(
        "swin", "SwinForImageClassification", "SwinTransformerImageClassifier", {"num_labels": 2}, "logits"
    ),
    "DINOv2": Folder("dinov2", "Dinov2Model", "DINOV2Backbone"),
    "DINOv3": Folder("dinov3_vit", "DINOv3ViTModel", "DINOV3Backbone"),
}  # fmt: skip


def write(folder: Folder, out: Path) -> None:
    """Writes one, with inputs and outputs."""
    import torch
    import transformers

    own = HUGGING_FACE[folder.of].config if folder.of in HUGGING_FACE else {}
    config = transformers.AutoConfig.for_model(folder.of, **copy.deepcopy({**own, **folder.changes}))
    model: Any = getattr(transformers, folder.architecture)(config).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            value = np.asarray(rng.standard_normal(tuple(tensor.shape)) * (0.1 if tensor.ndim == 1 else 0.3))
            value += bool(re.search(r"norm\w*\.(weight|gamma)$|ln_\w+\.weight$", name, re.IGNORECASE))
            tensor.copy_(torch.from_numpy(value.astype("float32")))
        model.save_pretrained(out)
        whole = "logits" in folder.output or folder.architecture.endswith("Model")
        base = model if whole else getattr(model, model.base_model_prefix or "model")
        tokens, images = rng.integers(5, 60, (2, 14)), None
        seen = own.get("encoder", own).get("vision_config")
        if (size := (seen or own).get("image_size")) is not None:
            images = rng.standard_normal((2, size, size, 3)).astype("float32")
        if folder.of in ("gemma3", "t5gemma2"):
            tokens[:, 3] = 63
        elif folder.of == "paligemma":
            tokens = np.concatenate([np.full((2, 16), config.image_token_id), tokens], 1)
        given = {} if images is None else {"pixel_values": torch.from_numpy(images.transpose(0, 3, 1, 2).copy())}
        if images is None or seen:
            given["input_ids"] = torch.from_numpy(tokens)
        if folder.of in ("bart", "t5gemma", "t5gemma2"):
            given["decoder_input_ids"] = given["input_ids"]
        output = base(**given)[folder.output].numpy()
    arrays: dict[str, Any] = {"tokens": tokens, "output": output, "images": np.zeros(()) if images is None else images}
    np.savez(out / "outputs.npz", **arrays)


def write_all(out: Path, names: Sequence[str]) -> None:
    """Writes them in a child process."""
    command = [sys.executable, "-m", __spec__.name, "--write", str(out), *names]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    subprocess.run(command, check=True, cwd=root, env={**os.environ, **quiet})


def cells(line: str) -> list[str]:
    """What our way and stock's have in a line of the table."""
    return line.strip("| ").split(" | ")[-2:]


def apart(model: Any, folder: Path) -> float:
    """How far outputs are from those of transformers, in standard deviations."""
    stored = np.load(folder / "outputs.npz")
    tokens, expected = stored["tokens"].astype("int32"), stored["output"]
    if expected.ndim == 3 and tokens.shape[1] > 14:
        tokens = tokens[:, 16:]  # KerasHub puts the image in front
    zeros, ones = np.zeros_like(tokens), np.ones_like(tokens)

    def given(name: str) -> Any:
        if name in ("images", "pixel_values"):
            return stored["images"][:, None] if "vision_indices" in model.input else stored["images"]
        if name == "vision_indices":
            return np.full((2, 1), 3, "int32")
        if name == "vision_mask":
            return np.eye(14, dtype="int32")[[3, 3]]
        if name == "position_ids":
            return np.broadcast_to(np.arange(tokens.shape[1], dtype="int32"), tokens.shape)
        return zeros if "segment" in name or "response" in name else ones if "mask" in name else tokens

    inputs = {name: given(name) for name in model.input} if isinstance(model.input, dict) else stored["images"]
    found = model(inputs)
    if isinstance(found, dict):
        found = found.get("sequence_output", found.get("decoder_sequence_output"))
    return float(np.abs(np.asarray(found).reshape(expected.shape) - expected).max() / expected.std())


def cell(load: Callable[[], Any], folder: Path) -> str:
    """What a table says of one way to load a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return f"{apart(load(), folder):.0e}"
        except Exception as error:  # whatever is raised belongs into the table
            text = str(error).splitlines()[0].replace(f"{folder}/", "").replace(str(folder), "")
            text = re.sub(r".*says: (.*?)\. Pass.*", r"error: \1", text)
            text = re.sub(r".*tensor '?([\w.*]+).*", r"error: no tensor `\1`", text)
            text = re.sub(r".*model type `'(\w+)'`.*", r"error: no converter of `\1`", text)
            text = f"error: no key {text}" if isinstance(error, KeyError) else text
            return text if text.startswith("error: ") else f"error: {text}"


def row(name: str, out: Path) -> str:
    """The line of one folder, which is written below `out`."""
    import keras_hub

    import lazymodel_keras as lk

    folder, path = FOLDERS[name], out / name
    cls = getattr(keras_hub.models, folder.cls)
    ours = cell(lambda: lk.from_preset(cls, str(path), progress=False, **folder.load), path)
    stock = cell(lambda: cls.from_preset(str(path), **folder.load), path)
    return f"| {name} | {folder.architecture} | {folder.cls} | {ours} | {stock} |"


SECTION = "## Folders that transformers 5.23 writes"
_TABLE = f"""{SECTION}

A tiny model of each is saved by `save_pretrained`, and loaded as it is: the largest difference of its logits, or of its
last hidden states, from those of transformers, in standard deviations; or the error. DeiT's are of its first head.

| model | class of transformers | class of KerasHub | `lk.from_preset` | `from_preset` |
|---|---|---|---|---|
"""
_FOOTER = "Written by `python -m tests.keras.transformers_folders`.\n"


def section(rows: Sequence[str]) -> str:
    """The part of the page."""
    return "\n".join([_TABLE.rstrip(), *rows, "", _FOOTER])


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--write"]:
        for name in arguments[2:]:
            write(FOLDERS[name], Path(arguments[1]) / name)
        return
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    with tempfile.TemporaryDirectory() as out:
        names = list(arguments) or list(FOLDERS)
        write_all(Path(out), names)
        rows = [row(name, Path(out)) for name in names]
    if arguments:
        print("\n".join(rows))
        return
    page = PAGE.read_text()
    PAGE.write_text(page.partition(SECTION)[0].rstrip() + "\n\n" + section(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
