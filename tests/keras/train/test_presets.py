"""Presets and Hugging Face folders of models that are never made are those that KerasHub writes of the loaded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import pytest

import lazymodel as lm
import lazymodel_keras as lk
from tests.command import main
from tests.keras.models import decoder, decoder_shapes, random_tensors, write_safetensors_folder

GPT2 = keras_hub.models.GPT2CausalLM
WORDS = ["!", "a", "b", "Ġ", "ab", "<|endoftext|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset of a language model with its tokenizer, and what else KerasHub itself makes of it."""
    made = tmp_path_factory.mktemp("presets")
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary={w: n for n, w in enumerate(WORDS)}, merges=["a b"])
    backbone = keras_hub.models.GPT2Backbone(6, 2, 2, 8, 32, max_sequence_length=12)
    model = GPT2(backbone=backbone, preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer))
    model.save_to_preset(made / "preset")
    model.export_to_transformers(made / "huggingface")
    return made


def check_alike(one: Path, other: Path) -> None:
    with lm.open_checkpoint(one) as found, lm.open_checkpoint(other) as expected:
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and np.array_equal(found[name].read(), tensor.read()), name
    skipped = ("safetensors", ".h5", "weights.json", "metadata.json")  # which has the date
    files = {str(path.relative_to(other)) for path in other.rglob("*") if not path.name.endswith(skipped)}
    for name in files:
        path, stock = one / name, other / name
        if path.suffix == ".json":
            assert json.loads(path.read_text()) == json.loads(stock.read_text()), name
        elif path.is_file():
            assert path.read_bytes() == stock.read_bytes(), name
    assert not any("saving" in path.name for path in one.parent.rglob("*"))


@pytest.mark.parametrize("to", ["preset", "huggingface"])
def test_as_kerashub_itself(folder: Path, tmp_path: Path, to: str) -> None:
    abstract = lk.abstract_from_preset(GPT2, str(folder / "preset"))
    read: list[int] = []
    lk.save_preset(abstract, tmp_path / to, to=to, max_host_memory="64KiB", progress=lambda done, _: read.append(done))
    check_alike(tmp_path / to, folder / to)
    assert read[-1] > 0.9 * abstract.nbytes, "all but seeds came through here"
    with pytest.raises(lm.LazyModelError, match="there is something already"):
        lk.save_preset(abstract, tmp_path / to, to=to)
    (tmp_path / to / "notes.txt").write_text("mine")
    lk.save_preset(abstract, tmp_path / to, to=to, max_shard_size="1KiB", overwrite=True)
    assert (tmp_path / to / "notes.txt").read_text() == "mine"
    assert sum("weights.h5" in path.name or ".safetensors" in path.name for path in (tmp_path / to).iterdir()) > 3
    backbone = keras_hub.models.GPT2Backbone  # KerasHub's exporter names no task
    again, loaded = lk.from_preset(backbone, str(tmp_path / to)), lk.from_preset(backbone, str(folder / "preset"))
    for one, other in zip(again.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_quantized(folder: Path, tmp_path: Path) -> None:
    stock = GPT2.from_preset(str(folder / "preset"))
    stock.quantize("int8", filters=lambda layer: layer.built)
    stock.save_to_preset(tmp_path / "stock")
    arguments = [str(folder / "preset"), str(tmp_path / "ours"), "--cls", "GPT2CausalLM", "--quantize", "int8"]
    assert main(["convert", "--quiet", "--verify", *arguments]) == 0
    check_alike(tmp_path / "ours", tmp_path / "stock")


def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    def convert(source: Path, target: str, *options: str) -> int:
        arguments = [str(source), str(tmp_path / target), "--cls", "GPT2CausalLM", *options]
        return main(["convert", "--quiet", "--verify", *arguments])

    source = tmp_path / "source"
    shutil.copytree(folder / "huggingface", source)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (source / "config.json").write_text(json.dumps(config))
    assert convert(source, "preset") == 0
    assert convert(tmp_path / "preset", "huggingface", "--to", "huggingface") == 0
    check_alike(tmp_path / "huggingface", folder / "huggingface")
    assert convert(folder / "preset", "half", "--dtype", "bfloat16") == 0
    with lm.open_checkpoint(tmp_path / "half") as half, lm.open_checkpoint(folder / "preset") as whole:
        assert half.nbytes * 2 == whole.nbytes


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    config = decoder("llama", tie_word_embeddings=True)
    source = write_safetensors_folder(tmp_path / "base", config, random_tensors(decoder_shapes(config)))
    name = "model.layers.0.self_attn.q_proj"
    pair = {f"{name}.lora_A.weight": np.ones((4, 32), "float32"), f"{name}.lora_B.weight": np.ones((32, 4), "float32")}
    base = {name: tensor.read() for name, tensor in lm.open_checkpoint(source).items()}
    lm.save_adapter(base | pair, tmp_path / "adapter", scale=2.0)
    arguments = ["--cls", "Llama3Backbone", "--to", "huggingface", "--adapter", str(tmp_path / "adapter")]
    assert main(["convert", "--quiet", str(source), str(tmp_path / "merged"), *arguments]) == 0
    assert not lm.diff(lm.merge(base, lm.open_adapter(tmp_path / "adapter")), lm.open_checkpoint(tmp_path / "merged"))


def test_a_head_that_is_not_exported_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_dim": 32, "intermediate_dim": 64, "num_query_heads": 8, "num_key_value_heads": 4}
    sizes |= {"vocabulary_size": 64, "num_layers": 1}
    backbone = keras_hub.models.Llama3Backbone
    with pytest.warns(lm.LazyModelWarning, match="Llama3Backbone is saved without its output projection"):
        lk.save_preset(lm.build_abstract(backbone, **sizes), tmp_path / "backbone", to="huggingface")
    task = lm.build_abstract(lambda: keras_hub.models.Llama3CausalLM(backbone=backbone(**sizes), preprocessor=None))
    lk.save_preset(task, tmp_path / "task", to="huggingface")
    assert "lm_head.weight" in lm.open_checkpoint(tmp_path / "task")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cls", "GPT3CausalLM"], "keras_hub.models has no class 'GPT3CausalLM'"),
        (["--cls", "GPT2CausalLM", "--include", "*"], "--include is for checkpoints"),
        (["--cls", "GPT2CausalLM", "--adapter", "a", "--adapter", "b"], "--cls takes one --adapter"),
        (["--cls", "GPT2CausalLM", "--to", "orbax"], "with --cls it is preset or huggingface"),
        (["--cls", "GPT2CausalLM", "--max-host-memory", "8"], "--max-host-memory"),
    ],
)
def test_what_is_refused(folder: Path, tmp_path: Path, capsys: Any, options: list[str], message: str) -> None:
    assert main(["convert", "--quiet", str(folder / "preset"), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_saved_so(folder: Path, tmp_path: Path) -> None:
    abstract = lk.abstract_from_preset(GPT2, str(folder / "preset"))
    with pytest.raises(lm.LazyModelError, match="to is 'preset' or 'huggingface'"):
        lk.save_preset(abstract, tmp_path / "x", to="torch")
    bert = lm.build_abstract(keras_hub.models.BertBackbone, 6, 1, 1, 4, 8)
    with pytest.raises(lm.LazyModelError, match="cannot export BertBackbone"):
        lk.save_preset(bert, tmp_path / "x", to="huggingface")
    assert not list(tmp_path.iterdir())


def test_files_removed_while_they_are_written(folder: Path, tmp_path: Path) -> None:
    abstract = lk.abstract_from_preset(GPT2, str(folder / "preset"))

    def remove(done: int, total: int) -> None:
        for staged in tmp_path.iterdir():
            shutil.rmtree(staged)

    with pytest.raises(lm.LazyModelError, match=rf"cannot write .*{tmp_path}"):
        lk.save_preset(abstract, tmp_path / "preset", progress=remove)
