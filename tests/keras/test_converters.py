"""Every model type that KerasHub converts, loaded lazily from a folder in its own names: bit for bit as stock does it.

The default suite does this for a few kinds of converters, `-m large -k converters` for all.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras_hub
import ml_dtypes
import numpy as np
import obstore
import pytest
from jax.sharding import Mesh
from keras_hub.src.utils.preset_utils import get_preset_loader  # which class a folder is for; not exported
from keras_hub.src.utils.timm import convert_mobilenetv5  # its table of architectures
from keras_hub.src.utils.timm.preset_loader import TimmPresetLoader
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
from obstore.store import S3Store
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk
from tests.conftest import child_environment
from tests.core.checkpoints._formats import torch_file
from tests.servers.s3 import S3Server
from tests.small import shard_small

from . import hugging_face_models
from .converter_folders import ASKED_FOR, asked_for, write_asked_for, write_hugging_face
from .hub_configs import MOBILENET_V5
from .hugging_face_models import HUGGING_FACE
from .models import assert_same, random_tensors, save_hugging_face, seeded, write_safetensors_folder
from .versions import KERAS_HUB, needs_keras_hub, parts

# KerasHub's own layers cause these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*:UserWarning:keras"),
    pytest.mark.filterwarnings("ignore:(?s).*:UserWarning:keras_hub"),
]

_TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
# Dtype of the file, files, and dtype of the model.
_WAYS = [
    (np.float32, 1, None), (ml_dtypes.bfloat16, 3, "bfloat16"), (np.float32, 3, "bfloat16"),
    (ml_dtypes.bfloat16, 1, None),
]  # fmt: skip


def _check(cls: Any, write: Callable[..., Path], what: Any, tmp_path: Path, mesh: Mesh, ways: Any, **load: Any) -> None:
    """Loads the same folders in both ways."""
    for index, (dtype, shards, model_dtype) in enumerate(ways):
        folder = str(write(tmp_path / str(index), what, dtype=dtype, shards=shards))
        cls = cls or get_preset_loader(folder).check_backbone_class()
        given = {**load, "dtype": model_dtype} if model_dtype else dict(load)
        stock = seeded(lambda cls=cls, folder=folder, given=given: cls.from_preset(folder, **given))
        if getattr(what, "name", what) == "roberta":  # stock leaves out its token type, which is added at all positions
            positions = stock.embeddings.position_embedding.position_embeddings
            positions.assign(positions + lm.open_checkpoint(folder)[_TOKEN_TYPES].read()[0])
        abstract = seeded(lambda cls=cls, folder=folder, given=given: lk.abstract_from_preset(cls, folder, **given))
        eager = [path for path, value in abstract.sources.items() if not isinstance(value, lm.LazyTensor)]
        # Buffers that models make while they are built are small.
        assert [path for path in eager if abstract[path].nbytes > 4096] == []
        if not index and getattr(what, "name", what) != "gpt_oss":  # whose 4-bit blocks no configuration declares here
            _check_recorded(abstract, folder)
        placed = shard_small(abstract, mesh, lm.auto(), on_unmatched="ignore") if index % 2 else abstract
        assert_same(stock, placed.materialize(), outputs=False)


def _check_recorded(abstract: Any, folder: str) -> None:
    """The table of the converter gives the values that the converter gives."""
    table = lm.WeightMap.recorded(abstract)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LazyModelWarning)  # tensors of stacked experts, for example
        found = lm.map_checkpoint(lm.open_checkpoint(folder), table, abstract, strict=False)
    assert found
    for path in found:
        expected = np.asarray(abstract.sources[path])
        np.testing.assert_array_equal(np.asarray(found[path]).astype(expected.dtype), expected, err_msg=path)


@needs_keras_hub("0.32", "the model types in the tables")
def test_every_model_type_is_in_the_tables() -> None:
    """KerasHub's loaders name what they convert only in their source."""
    source = inspect.getsource(TransformersPresetLoader.__init__)
    here = {
        name.partition(" ")[0] for name, original in HUGGING_FACE.items() if parts(original.since) <= parts(KERAS_HUB)
    }
    assert set(re.findall(r'"([a-z][a-z0-9_-]+)"', source)) - {"model_type"} == {*here, "gemma3n"}
    prefixes = set(re.findall(r'"([a-z][a-z0-9]+)"', inspect.getsource(TimmPresetLoader.__init__))) - {"architecture"}
    assert len(prefixes) > 8
    assert [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in ASKED_FOR)] == []


def test_experts_stay_on_disk_until_they_are_streamed(tmp_path: Path, mesh8: Mesh) -> None:
    """The converter transposes, joins and stacks them; every byte is read once, for the device that it goes to."""
    folder = str(save_hugging_face(tmp_path / "moe", "qwen3_moe", dtype=ml_dtypes.bfloat16, shards=3))
    cls = keras_hub.models.Qwen3MoeBackbone
    stock = seeded(lambda: cls.from_preset(folder, dtype="bfloat16"))
    abstract = seeded(lambda: lk.abstract_from_preset(cls, folder, dtype="bfloat16").shard(mesh8, lm.auto()))
    experts = [path for path in abstract if "/experts/" in path]
    assert len(experts) == 4
    for path in experts:
        assert isinstance(abstract.sources[path], lm.LazyTensor)
        assert abstract[path].shard_nbytes * 8 == abstract[path].nbytes
    reports: list[lm.LoadReport] = []
    ours = abstract.materialize(report=reports.append)
    assert reports[0].read_nbytes == reports[0].needed_nbytes == abstract.nbytes
    assert_same(stock, ours, outputs=False)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("place", ["disk", "url"])
def test_a_folder_of_pytorchs_files(
    shards: int, place: str, tmp_path: Path, request: pytest.FixtureRequest, mesh8: Mesh
) -> None:
    """KerasHub's converters read it as if it were safetensors, also what they leave out, and hashes."""
    cls = keras_hub.models.Llama3Backbone
    folder = save_hugging_face(tmp_path / "llama3", "llama3", shards=shards)
    expected = seeded(lambda: lk.from_preset(cls, str(folder)))
    for file in folder.glob("*.safetensors*"):
        name = f"pytorch_{file.name}".replace("safetensors", "bin")
        if file.suffix == ".json":
            text = file.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            (folder / name).write_text(text)
        else:
            (folder / name).write_bytes(torch_file(load_file(file)))
        file.unlink()
    where = str(folder)
    if place == "url":
        server = request.getfixturevalue("object_server")
        shutil.copytree(folder, server.root / "torch" / str(shards))
        where = server.url(f"torch/{shards}")
    loaded = seeded(lambda: lk.from_preset(cls, where, mesh=mesh8, rules=lm.auto()))
    assert_same(expected, loaded, outputs=False)
    if place == "url":
        return
    hashes = {file.name: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in folder.iterdir()}
    assert_same(expected, seeded(lambda: lk.from_preset(cls, where, verify=hashes)), outputs=False)
    file = sorted(folder.glob("*.bin"))[-1]
    with pytest.raises(lm.CheckpointError, match=rf"{file.name}.*expected sha256 {'0' * 64}"):
        lk.from_preset(cls, where, verify={**hashes, file.name: "0" * 64})
    if shards == 1:
        tensors = {name: tensor.read() for name, tensor in lm.open_checkpoint(file).items()}
        file.write_bytes(torch_file({**tensors, "model.layers.7.w": np.ones(3, np.float32)}))
        with pytest.raises(lm.CheckpointError, match=r"did not request: model\.layers\.7\.w"):
            lk.from_preset(cls, where)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_numbered_files_without_an_index(kind: str, tmp_path: Path) -> None:
    """They are one checkpoint, as for `open_checkpoint`, also for hashes; Mistral's own copy next to them is not."""
    cls = keras_hub.models.Llama3Backbone
    folder = save_hugging_face(tmp_path / "llama3", "llama3", shards=2)
    expected = seeded(lambda: lk.from_preset(cls, str(folder)))
    (folder / "model.safetensors.index.json").unlink()
    if kind == "bin":
        for file in folder.glob("*.safetensors"):
            (folder / f"pytorch_{file.stem}.bin").write_bytes(torch_file(load_file(file)))
            file.unlink()
    else:
        save_file({"tok_embeddings.weight": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    files = sorted(folder.glob(f"*-of-*.{kind}"))
    hashes = {file.name: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files}
    assert_same(expected, seeded(lambda: lk.from_preset(cls, str(folder), verify=hashes)), outputs=False)
    with pytest.raises(lm.CheckpointError, match=rf"{files[1].name}.*expected sha256 {'0' * 64}"):
        lk.from_preset(cls, str(folder), verify={**hashes, files[1].name: "0" * 64})
    files[1].unlink()
    with pytest.raises(lm.CheckpointError, match=f"missing {files[1].name}"):
        lk.from_preset(cls, str(folder))


def test_parts_of_ranks_of_torch_distributed(s3: S3Server, tmp_path: Path) -> None:
    """Joined before the converter asks for them, also for hashes."""
    cls = keras_hub.models.Llama3Backbone
    folder = save_hugging_face(tmp_path / "llama3", "llama3")
    expected = seeded(lambda: lk.from_preset(cls, str(folder)))
    tensors, files = load_file(folder / "model.safetensors"), list[Path]()
    for rank in range(2):
        parts = {name: np.split(array, 2)[rank] for name, array in tensors.items()}
        starts = {name: {"saved_offsets": [rank * len(part)] + [0] * (part.ndim - 1)} for name, part in parts.items()}
        files.append(folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors")
        save_file(parts, files[-1], {"DCP_SHARDING_INFO": json.dumps(starts)})
    (folder / "model.safetensors").unlink()
    hashes = {file.name: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files}
    assert_same(expected, seeded(lambda: lk.from_preset(cls, str(folder), verify=hashes)), outputs=False)
    with pytest.raises(lm.CheckpointError, match=rf"{files[1].name}.*expected sha256 {'0' * 64}"):
        lk.from_preset(cls, str(folder), verify={**hashes, files[1].name: "0" * 64})
    store = S3Store("bucket", **s3.options())
    for file in folder.iterdir():
        obstore.put(store, f"ranks/{file.name}", file.read_bytes())
    ours = seeded(lambda: lk.from_preset(cls, "s3://bucket/ranks", storage_options=s3.options()))
    assert_same(expected, ours, outputs=False)


def test_aliases_in_the_metadata_are_names(tmp_path: Path) -> None:
    """What two parameters share is stored once, by either name: by the one that the converter asks for, or not."""
    cls = keras_hub.models.Llama3Backbone
    folder = save_hugging_face(tmp_path / "llama3", "llama3")
    expected = seeded(lambda: lk.from_preset(cls, str(folder)))
    tensors, name, other = load_file(folder / "model.safetensors"), "model.embed_tokens.weight", "model.shared.weight"
    save_file(tensors, folder / "model.safetensors", {"format": "pt", other: name})
    assert_same(expected, seeded(lambda: lk.from_preset(cls, str(folder))), outputs=False)
    tensors[other] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt", name: other})
    assert_same(expected, seeded(lambda: lk.from_preset(cls, str(folder))), outputs=False)
    # As an index, which need not have it, does not either.
    shards = {"a.safetensors": {other: tensors.pop(other)}, "b.safetensors": tensors}
    for file, part in shards.items():
        save_file(part, folder / file, {"format": "pt", name: other} if other in part else {"format": "pt"})
    index = {"weight_map": {key: file for file, part in shards.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert_same(expected, seeded(lambda: lk.from_preset(cls, str(folder))), outputs=False)


def test_a_converter_that_goes_through_a_narrower_dtype(tmp_path: Path) -> None:
    """Mistral's casts to float16 whatever the file holds: what it loses is lost with us too."""
    folder = save_hugging_face(tmp_path / "mistral", "mistral")
    cls = keras_hub.models.MistralBackbone
    ours = seeded(lambda: lk.from_preset(cls, str(folder)))
    assert_same(seeded(lambda: cls.from_preset(str(folder))), ours, outputs=False)
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    found = np.asarray(ours.get_layer("token_embedding").embeddings.value)
    assert found.dtype == np.float32
    assert not np.array_equal(found, stored)
    np.testing.assert_array_equal(found, stored.astype("float16").astype("float32"))


@needs_keras_hub("0.28", "Gemma 3's embedding models")
def test_a_converter_that_opens_files_itself(tmp_path: Path, mesh8: Mesh) -> None:
    """Gemma 3's embedding models have two projections in folders of their own."""
    folder = save_hugging_face(tmp_path / "gemma3", "gemma3_text")
    projections = random_tensors({"2_Dense": (3072, 32), "3_Dense": (32, 3072)})
    for name, values in projections.items():
        write_safetensors_folder(folder / name, {}, {"linear.weight": values})
    cls = keras_hub.models.Gemma3Backbone
    ours = seeded(lambda: lk.from_preset(cls, str(folder), mesh=mesh8, rules=lm.auto()))
    assert_same(seeded(lambda: cls.from_preset(str(folder))), ours, outputs=False)
    for layer, values in zip(("pooling_dense_1", "embedding_projection"), projections.values(), strict=True):
        kernel = ours.get_layer(layer).kernel.value
        np.testing.assert_array_equal(kernel, values.T)
        assert not kernel.is_fully_replicated


def test_timm(tmp_path: Path, mesh8: Mesh) -> None:
    """Against the tensors themselves: stock takes its time to build and assign a whole ResNet."""
    made = asked_for("resnet18")
    folder = str(write_asked_for(tmp_path / "resnet18", "resnet18", dtype=ml_dtypes.bfloat16, shards=2))
    ours = lk.from_preset(made.cls, folder, mesh=mesh8, rules=lm.auto(), **made.load)
    found = {tuple(v.shape): np.asarray(v.value) for v in ours.weights if v.path.endswith("kernel")}
    for name, axes in (("conv1.weight", (2, 3, 1, 0)), ("fc.weight", (1, 0))):
        stored = made.tensors[name].transpose(axes).astype(ml_dtypes.bfloat16).astype("float32")
        np.testing.assert_array_equal(found[stored.shape], stored)


@pytest.fixture
def tiny_mobilenet_v5(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only architecture of its converter has 294 million parameters."""
    from keras_hub.src.utils.transformers import convert_gemma3n  # its table of architectures; from 0.28 on

    tiny = {**MOBILENET_V5, "layer_scale_init_value": 1e-5}
    monkeypatch.setitem(convert_mobilenetv5.MODEL_CONFIGS, "mobilenetv5_300m", {"backbone": tiny})
    monkeypatch.setitem(convert_gemma3n.MODEL_CONFIGS, "mobilenetv5_300m_enc", tiny)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of `HUGGING_FACE`."""
    pytest.importorskip("transformers", reason="needs transformers and torch, which make the original models")
    out = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, hugging_face_models.__file__, str(out)], check=True, env=child_environment())
    return out


_OF_HUGGING_FACE = [
    pytest.param(name, task, ways, id=task or name, marks=needs_keras_hub(original.since, f"model type {name}"))
    for name, original in HUGGING_FACE.items()
    for task, ways in (("", _WAYS), (original.task, _WAYS[:2]))
    if ways is _WAYS or task
]


@pytest.mark.large
@pytest.mark.parametrize(("name", "task", "ways"), _OF_HUGGING_FACE)
def test_all_of_hugging_face(name: str, task: str, ways: Any, made: Path, tmp_path: Path, mesh8: Mesh) -> None:
    cls, load = (getattr(keras_hub.models, task), {"preprocessor": None}) if task else (None, {})
    _check(cls, write_hugging_face, made / name, tmp_path, mesh8, ways, **load)


# What KerasHub itself fails at, and with which error.
_UPSTREAM = {"hgnetv2_b0": r"variable.shape=\(\), Received: value.shape=\(1,\)"}  # timm's scales have one axis


@pytest.mark.large
@pytest.mark.parametrize("name", ASKED_FOR)
@pytest.mark.usefixtures("tiny_mobilenet_v5")
def test_all_of_timm(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    made = asked_for(name)
    if name in _UPSTREAM:
        with pytest.raises(ValueError, match=_UPSTREAM[name]):
            made.cls.from_preset(str(write_asked_for(tmp_path / name, name)), **made.load)
        return
    # KerasHub's converter of Gemma 3n finds out which tensors there are by errors that only an index gives.
    ways = _WAYS[1:3] if name == "gemma3n" else _WAYS[:2]
    _check(made.cls, write_asked_for, name, tmp_path, mesh8, ways, **made.load)
