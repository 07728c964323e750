"""Bad presets: one clear error each, naming the file and the variable, with Keras left as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk

from .models import BACKBONES, preset_of, refused, save_hugging_face, save_preset

pytestmark = pytest.mark.filterwarnings("ignore:Skipping nested container")  # Keras', before it raises

BERT = BACKBONES["bert"][0]
LLAMA3 = BACKBONES["llama3"][0]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n"


@pytest.fixture(autouse=True)
def keras_is_left_alone():
    """Whatever fails inside, Keras afterwards makes ordinary variables."""
    yield
    variable = keras.Variable("zeros", shape=(2,))
    assert variable._value is not None
    assert "assign" not in vars(variable)


def test_names_of_no_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (
        (f"{tmp_path}/nowhere", "nowhere does not exist"),
        ("bert_bas_en", "closest: 'bert_base_en'"),
        ("google/gemma-2-2b", "'hf://google/gemma-2-2b'"),
    ):
        assert found in refused(lk.from_preset, BERT, name)
    # And a hub that does not answer.
    monkeypatch.setattr(BERT, "from_preset", mock.Mock(side_effect=OSError("failed to resolve")))
    message = refused(lk.from_preset, BERT, "bert_base_en")
    assert "failed to resolve" in message and "pass its folder" in message


def changed_h5(change: Callable[[h5py.File], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with h5py.File(folder / "model.weights.h5", "a") as file:
            change(file)

    return damage


def other_kernel(file: h5py.File) -> None:
    del file["layers/dense/vars/0"]
    file["layers/dense/vars/0"] = np.zeros((32, 16), "float32")


def cut(name: str, end: int | None = None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: end or len(data) // 2])

    return damage


def changed_tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            if UP in tensors:
                change(tensors)
            save_file(tensors, file)

    return damage


def pickled(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")


def of_unknown_dtype(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if UP in header:
            header[UP]["dtype"] = "Q4_K"
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


H5, SHARD, UP = "model.weights.h5", "model-00001-of-00002.safetensors", "model.layers.1.mlp.up_proj.weight"
PRESETS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
    "no weights": (lambda folder: (folder / H5).unlink(), ["model.weights"]),
    "truncated": (cut(H5), [H5, "truncated"]),
    "LFS pointer": (lambda folder: (folder / H5).write_text(LFS_POINTER), [H5, "LFS"]),
    "another shape": (changed_h5(other_kernel), ["pooled_dense/kernel", "(32, 32)", "(32, 16)", H5]),
    "no such tensor": (changed_h5(lambda file: file.pop("layers/dense/vars/1")), [H5, "pooled_dense"]),
    "no shard": (lambda folder: sorted(folder.glob("model_*.h5"))[1].unlink(), ["model_00001.weights.h5"]),
}
FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a pickle": (
        pickled,
        ["pytorch_model.bin: expected the zip archive", "found a pickle alone", "torch.save(torch.load("],
    ),
    "no shard": (lambda folder: (folder / SHARD).unlink(), [SHARD]),
    "truncated": (cut(SHARD, -100), [SHARD, "truncated"]),
    "LFS pointer": (lambda folder: (folder / SHARD).write_text(LFS_POINTER), [SHARD, "LFS"]),
    "no such tensor": (changed_tensors(lambda tensors: tensors.pop(UP)), ["of-00002.safetensors", UP]),
    "another shape": (
        changed_tensors(lambda tensors: tensors.update({UP: np.zeros((16, 32), "float32")})),
        ["of-00002.safetensors", UP, "feedforward_intermediate_dense/kernel", "(32, 64)", "(32, 16)"],
    ),
    "an unknown dtype": (of_unknown_dtype, ["of-00002.safetensors", UP, "Q4_K"]),
}


DAMAGES = {"preset": PRESETS, "hugging_face": FOLDERS}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in DAMAGES.items() for case in cases])
def test_a_damaged_folder(kind: str, case: str, tmp_path: Path) -> None:
    damage, found = DAMAGES[kind][case]
    if kind == "preset":
        shards = {"max_shard_size": 7e-5} if case == "no shard" else {}  # GB
        cls, folder = BERT, save_preset(tmp_path / "bert", "bert", **shards)
    else:
        cls, folder = LLAMA3, save_hugging_face(tmp_path / "llama3", "llama3", shards=2)
    damage(folder)
    message = refused(lk.from_preset, cls, str(folder))
    assert all(part in message for part in found), message


def test_a_task_without_its_tokenizer(tmp_path: Path) -> None:
    folder = save_hugging_face(tmp_path / "llama3", "llama3")
    message = refused(lk.from_preset, keras_hub.models.Llama3CausalLM, str(folder))
    assert "tokenizer.json" in message and "preprocessor=None" in message


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ({"pooled_dense/kernel": P("tensor"), ".*": P()}, r"pooled_dense/kernel.*'tensor'.*'model' \(8\)"),
        ({"segment.*": P("model"), ".*": P()}, "segment_embedding/embeddings.*size 2 .* 8"),
        (None, "mesh was given without rules"),
    ],
)
def test_rules_that_do_not_fit(rules: Any, found: str, mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError, match=found):
        lk.from_preset(BERT, preset_of("bert"), mesh=mesh8, rules=rules)


def test_plan_that_does_not_fit(mesh8: Mesh) -> None:
    abstract = lk.abstract_from_preset(BERT, preset_of("bert")).shard(mesh8, {".*": P()})
    with pytest.raises(lm.DoesNotFitError, match=r"10\.00 KiB.*position_embedding/embeddings 64\.00 KiB"):
        abstract.plan(device_memory="10KiB").check()


def test_a_failed_load_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The file breaks after the model was built: no model comes out, and the next load works."""
    preset = save_preset(tmp_path / "bert", "bert")
    abstract = lk.abstract_from_preset(BERT, str(preset))
    (preset / "model.weights.h5").write_bytes(b"")
    assert "model.weights.h5" in refused(abstract.materialize)
    assert lk.from_preset(BERT, preset_of("bert")).weights[0]._value is not None
