"""`verify=` of what loads presets: the hashes of the weight files are compared before anything in them is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import BACKBONES, assert_same, in_block, refused, save_hugging_face, save_preset, seeded

BERT = BACKBONES["bert"][0]
GEMMA = BACKBONES["gemma"][0]


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, and their indexes."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "*.weights.h5", "*.weights.json", "*.keras")
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in weight_files(folder)}


def tamper(path: Path) -> None:
    """Changes one bit of the last tensor's values, which no format's own checks can notice."""
    content = bytearray(path.read_bytes())
    at = len(content) - 1
    if path.suffix == ".h5":
        with lm.open_checkpoint(path) as checkpoint:
            at = list(checkpoint.values())[-1].offset
    content[at] ^= 1
    path.write_bytes(content)


def in_a_block(cls: Any, folder: str, **arguments: Any) -> Any:
    return in_block(lambda: cls.from_preset(folder), **arguments)


def preset(folder: Path) -> tuple[Any, Path]:
    return BERT, save_preset(folder, "bert")


def sharded_preset(folder: Path) -> tuple[Any, Path]:
    return GEMMA, save_preset(folder, "gemma", max_shard_size=2e-5)  # GB


def hugging_face(folder: Path) -> tuple[Any, Path]:
    return BERT, save_hugging_face(folder, "bert", shards=3)


def manifest(folder: Path, path: Path | None = None) -> Any:
    """What `verify` is for a manifest that is written elsewhere, or in the folder."""
    lines = [f"{digest.removeprefix('sha256:')}  {name}" for name, digest in hashes(folder).items()]
    (path or folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    return path or True


@pytest.mark.parametrize(
    ("make", "load", "state"),
    [
        (preset, lk.from_preset, manifest),
        (sharded_preset, in_a_block, hashes),
        (hugging_face, lk.abstract_from_preset, lambda folder: manifest(folder, folder.parent / "elsewhere.txt")),
    ],
)
def test_good_and_tampered_presets(tmp_path: Path, make: Any, load: Any, state: Callable[[Path], Any]) -> None:
    cls, folder = make(tmp_path / "preset")
    stated, verify = hashes(folder), state(folder)
    ours = seeded(lambda: load(cls, str(folder), verify=verify))
    ours = ours.materialize() if isinstance(ours, lm.AbstractModel) else ours
    assert_same(seeded(lambda: cls.from_preset(str(folder))), ours, outputs=False)
    last = [path for path in weight_files(folder) if path.suffix != ".json"][-1]
    tamper(last)
    load(cls, str(folder))  # nothing but the hash can tell
    message = refused(load, cls, str(folder), verify=verify)
    for part in (last, stated[last.name].removeprefix("sha256:"), hashlib.sha256(last.read_bytes()).hexdigest()):
        assert str(part) in message
    tamper(last)  # back again
    for index in folder.glob("model.*.json"):
        index.write_bytes(index.read_bytes() + b"\n")
        with pytest.raises(lm.CheckpointError, match=rf"{index.name}: expected sha256 .* as verify states"):
            load(cls, str(folder), verify=stated)


def test_a_file_without_a_hash_is_refused(tmp_path: Path) -> None:
    cls, folder = preset(tmp_path / "preset")
    with pytest.raises(lm.CheckpointError, match=r"no hash is known for .*model\.weights\.h5"):
        lk.from_preset(cls, str(folder), verify=True)
    with pytest.raises(lm.CheckpointError, match=r"no hash is known for .*model\.weights\.h5"), lk.deferred(verify={}):
        cls.from_preset(str(folder))
    lk.from_preset(cls, str(folder), load_weights=False, verify=True)  # opens none


def test_a_file_that_changes_after_it_was_hashed(tmp_path: Path) -> None:
    cls, folder = preset(tmp_path / "preset")
    abstract = lk.abstract_from_preset(cls, str(folder), verify=hashes(folder))
    tamper(folder / "model.weights.h5")
    with pytest.raises(lm.CheckpointError, match=r"model\.weights\.h5 changed while it was being read"):
        abstract.materialize()


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8)])


@pytest.mark.parametrize(
    ("name", "skip_mismatch"),
    [("small.weights.h5", False), ("small.weights.h5", True), ("small.keras", True), ("small.h5", False)],
)
def test_load_weights_in_a_block(tmp_path: Path, name: str, skip_mismatch: bool) -> None:
    """Keras' loader passes over what fails with `skip_mismatch`, but not over this."""
    source, options = seeded(small), {"skip_mismatch": True} if skip_mismatch else {}
    (source.save_weights if "weights" in name else source.save)(tmp_path / name)
    stated = {name: f"sha256:{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}"}

    def load() -> keras.Model:
        model = small()
        model.load_weights(tmp_path / name, **options)
        return model

    model = in_block(load, verify=stated)
    np.testing.assert_array_equal(model.weights[0], source.weights[0])
    content = bytearray((tmp_path / name).read_bytes())
    content[content.index(np.asarray(source.weights[0].value).tobytes())] ^= 1
    (tmp_path / name).write_bytes(content)
    assert f"{name}: expected sha256" in refused(in_block, load, verify=stated)


def test_what_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    """Orbax checkpoints are many files, for which nobody states hashes."""
    lm.save({"w": np.zeros(2, np.float32)}, tmp_path / "0", format="orbax")
    with pytest.raises(lm.CheckpointError, match=r"cannot verify .*: expected weights in a file"):
        lk.load_model(tmp_path / "0", verify=True)
