"""Bad presets: one clear error each, naming the file and the variable, with Keras left as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk

from .models import BACKBONES, save_hugging_face, save_preset

pytestmark = pytest.mark.filterwarnings("ignore:Skipping nested container")  # Keras', before it raises

BERT = BACKBONES["bert"][0]
LLAMA3 = BACKBONES["llama3"][0]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n"


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    return save_preset(tmp_path / "bert", "bert")


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    return save_hugging_face(tmp_path / "llama3", "llama3", shards=2)


@pytest.fixture(autouse=True)
def keras_is_left_alone():
    """Whatever fails inside, Keras afterwards makes ordinary variables."""
    yield
    variable = keras.Variable("zeros", shape=(2,))
    assert variable._value is not None
    assert "assign" not in vars(variable)


def fails(cls: type, folder: Path, *patterns: str, **kwargs: object) -> None:
    with pytest.raises(lm.CheckpointError) as caught:
        lk.from_preset(cls, str(folder), **kwargs)
    for pattern in patterns:
        assert pattern in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    fails(BERT, tmp_path / "nowhere", "nowhere does not exist")


def test_unknown_name() -> None:
    with pytest.raises(lm.CheckpointError, match="'bert_bas_en' is neither .*closest: 'bert_base_en'"):
        lk.from_preset(BERT, "bert_bas_en")


def test_name_of_the_hugging_face_hub() -> None:
    with pytest.raises(lm.CheckpointError, match="'hf://google/gemma-2-2b'"):
        lk.from_preset(BERT, "google/gemma-2-2b")


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_preset(*_: object) -> None:
        raise OSError("failed to resolve")

    monkeypatch.setattr(BERT, "from_preset", from_preset)
    with pytest.raises(lm.CheckpointError, match="failed to resolve; if the hub cannot be reached .* pass its folder"):
        lk.from_preset(BERT, "bert_base_en")


def test_folder_with_a_pickle_in_place_of_safetensors(hugging_face: Path) -> None:
    for file in hugging_face.glob("*.safetensors*"):
        file.unlink()
    (hugging_face / "pytorch_model.bin").write_bytes(b"PK")
    fails(LLAMA3, hugging_face, "pytorch_model.bin looks like a pickle", "save_file(")


def test_folder_without_config(preset: Path) -> None:
    (preset / "config.json").unlink()
    fails(BERT, preset, "no config.json")


def test_missing_weight_file(preset: Path) -> None:
    (preset / "model.weights.h5").unlink()
    fails(BERT, preset, "model.weights")


def test_truncated_h5(preset: Path) -> None:
    file = preset / "model.weights.h5"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    fails(BERT, preset, "model.weights.h5", "truncated")


def test_lfs_pointer_h5(preset: Path) -> None:
    (preset / "model.weights.h5").write_text(LFS_POINTER)
    fails(BERT, preset, "model.weights.h5", "LFS")


def test_tensor_of_another_shape_h5(preset: Path) -> None:
    with h5py.File(preset / "model.weights.h5", "a") as file:
        del file["layers/dense/vars/0"]
        file["layers/dense/vars/0"] = np.zeros((32, 16), "float32")
    fails(BERT, preset, "pooled_dense/kernel", "(32, 32)", "(32, 16)", "model.weights.h5")


def test_missing_tensor_h5(preset: Path) -> None:
    with h5py.File(preset / "model.weights.h5", "a") as file:
        del file["layers/dense/vars/1"]
    fails(BERT, preset, "model.weights.h5", "pooled_dense")


def test_unexpected_tensor_h5(preset: Path) -> None:
    with h5py.File(preset / "model.weights.h5", "a") as file:
        file["layers/another/vars/0"] = np.zeros(3, "float32")
    fails(BERT, preset, "layers/another/vars/0", "strict=False")
    with pytest.warns(
        lm.LazyModelWarning, match=r"model\.weights\.h5 holds 1 tensors .*: layers/another/vars/0\. They are left out"
    ) as caught:
        lk.from_preset(BERT, str(preset), strict=False)
    assert [warning.filename for warning in caught] == [__file__], "it points to the caller's line"


def test_missing_shard_h5(tmp_path: Path) -> None:
    folder = save_preset(tmp_path / "gemma", "gemma", max_shard_size=2e-5)
    sorted(folder.glob("model_*.weights.h5"))[1].unlink()
    fails(BACKBONES["gemma"][0], folder, "model_00001.weights.h5")


def test_missing_shard_safetensors(hugging_face: Path) -> None:
    (hugging_face / "model-00002-of-00002.safetensors").unlink()
    fails(LLAMA3, hugging_face, "model-00002-of-00002.safetensors")


def test_truncated_safetensors(hugging_face: Path) -> None:
    file = hugging_face / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    fails(LLAMA3, hugging_face, file.name, "truncated")


def test_lfs_pointer_safetensors(hugging_face: Path) -> None:
    file = hugging_face / "model-00001-of-00002.safetensors"
    file.write_text(LFS_POINTER)
    fails(LLAMA3, hugging_face, file.name, "LFS")


def test_missing_tensor_safetensors(tmp_path: Path) -> None:
    folder = save_hugging_face(tmp_path / "llama3", "llama3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    fails(LLAMA3, folder, "model.safetensors", "model.layers.1.mlp.up_proj.weight")


def test_tensor_of_another_shape_safetensors(tmp_path: Path) -> None:
    folder = save_hugging_face(tmp_path / "llama3", "llama3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(16, "float32")
    save_file(tensors, folder / "model.safetensors")
    fails(LLAMA3, folder, "model.safetensors", "model.norm.weight", "(32,)", "(16,)")


def test_unsupported_dtype_safetensors(tmp_path: Path) -> None:
    folder = save_hugging_face(tmp_path / "llama3", "llama3")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "Q4_K"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    fails(LLAMA3, folder, "model.safetensors", "model.norm.weight", "Q4_K")


def test_mesh_without_the_rules_axis(preset: Path, mesh42: Mesh) -> None:
    with pytest.raises(lm.ShardingError, match=r"pooled_dense/kernel.*no axis 'tensor'; its axes are 'batch' \(4\)"):
        lk.from_preset(BERT, str(preset), mesh=mesh42, rules={"pooled_dense/kernel": P("tensor"), ".*": P()})


def test_indivisible_dimension(preset: Path, mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError, match="segment_embedding/embeddings.*size 2 does not divide into 8"):
        lk.from_preset(BERT, str(preset), mesh=mesh8, rules={"segment.*": P("model"), ".*": P()})


def test_mesh_without_rules(preset: Path, mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError, match="mesh was given without rules"):
        lk.from_preset(BERT, str(preset), mesh=mesh8)


def test_plan_that_does_not_fit(preset: Path, mesh8: Mesh) -> None:
    abstract = lk.abstract_from_preset(BERT, str(preset)).shard(mesh8, {".*": P()})
    with pytest.raises(
        lm.DoesNotFitError, match=r"needs .* a device has 10\.00 KiB.*position_embedding/embeddings 64\.00 KiB"
    ):
        abstract.plan(device_memory="10KiB").check()


def test_a_failed_load_leaves_nothing_half_written(preset: Path) -> None:
    """The file breaks after the model was built: no model comes out, and the next load works."""
    abstract = lk.abstract_from_preset(BERT, str(preset))
    good = preset.with_name("good")
    shutil.copytree(preset, good)
    (preset / "model.weights.h5").write_bytes(b"")
    with pytest.raises(lm.CheckpointError, match="model.weights.h5"):
        abstract.materialize()
    assert lk.from_preset(BERT, str(good)).weights[0]._value is not None
