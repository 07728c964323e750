"""Small checkpoints of the same values in every format, and how those are refused that are damaged or lie."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from tests.gguf_files import gguf_file, random_tensor, split_files

RNG = np.random.default_rng(0)
WEIGHTS = {
    "a/vars/0": RNG.standard_normal((256, 300)).astype(np.float32),
    "a/vars/1": RNG.standard_normal(300).astype(np.float16),
    "b/vars/0": RNG.integers(-99, 99, (64, 8, 128), np.int32),
    "b/vars/1": np.zeros((0, 3), np.float32),
}
HALF = {name: WEIGHTS[name] for name in list(WEIGHTS)[:2]}, {name: WEIGHTS[name] for name in list(WEIGHTS)[2:]}


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """An array that counts from 0."""
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def refused(path: Path, match: str, said: object = None) -> str:
    """The error of opening a checkpoint and finding its tensors. It matches, and names the path or what is `said`."""
    with pytest.raises(lm.CheckpointError, match=match) as error:  # noqa: SIM117
        with lm.open_checkpoint(path) as checkpoint:
            list(checkpoint.values())
    assert str(path if said is None else said) in str(error.value)
    return str(error.value)


def unreadable(path: Path, match: str) -> None:
    """Opens a checkpoint and finds its tensors. Reading them is an error that matches and names the path."""
    tensors = list(lm.open_checkpoint(path).values())
    with pytest.raises(lm.CheckpointError, match=match) as error:
        [tensor.read() for tensor in tensors]
    assert str(path) in str(error.value)


def read_nbytes() -> int:
    """Bytes that this process has read with system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def hdf5(values: dict[str, np.ndarray], **options: Any) -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        for name, value in values.items():
            file.create_dataset(name, data=value, **(options if value.size > 999 else {}))
    return stream.getvalue()


def write(folder: Path) -> None:
    """A folder a format."""
    for path in FORMATS.values():
        (folder / path.partition("/")[0]).mkdir(exist_ok=True)
    save_file(WEIGHTS, folder / "one" / "model.safetensors")
    save_file(WEIGHTS, folder / "odd names é" / "w #1%20+ü.safetensors")
    for kind in ("index", "numbered"):
        for number, half in enumerate(HALF, 1):
            save_file(half, folder / kind / f"model-{number:05}-of-00002.safetensors")
    shards = {name: f"model-{n:05}-of-00002.safetensors" for n, half in enumerate(HALF, 1) for name in half}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "h5" / "model.weights.h5").write_bytes(hdf5(WEIGHTS))
    packed = hdf5(WEIGHTS, chunks=True, compression="gzip", shuffle=True)
    (folder / "chunked" / "model.weights.h5").write_bytes(packed)
    for number, half in enumerate(HALF):
        (folder / "sharded" / f"model_{number:05}.weights.h5").write_bytes(hdf5(half))
    groups = {f"/{name.rpartition('/')[0]}": f"model_{n:05}.weights.h5" for n, half in enumerate(HALF) for name in half}
    (folder / "sharded" / "model.weights.json").write_text(json.dumps({"weight_map": groups}))
    with zipfile.ZipFile(folder / "keras" / "m.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", hdf5(WEIGHTS))
    flat = {name.replace("/", "_"): value for name, value in WEIGHTS.items()}
    np.savez(folder / "npz" / "w.npz", **flat)
    np.savez_compressed(folder / "packed" / "w.npz", **flat)
    np.save(folder / "npy" / "w.npy", WEIGHTS["a/vars/0"])
    (folder / "npy" / "inner").mkdir()
    np.save(folder / "npy" / "inner" / "w.npy", WEIGHTS["a/vars/0"])
    blocks = {name: random_tensor(RNG, "Q4_0", 64, 512) for name in "abc"}
    (folder / "gguf" / "w.gguf").write_bytes(gguf_file({"tokens": ["a"] * 9999}, blocks))
    for name, content in split_files({}, blocks, 3).items():
        (folder / "split" / name).write_bytes(content)
    for kind in ORBAX:
        import orbax.checkpoint as ocp

        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt")) as saver:
            saver.save(folder / kind, {name: value for name, value in WEIGHTS.items() if value.size}, force=True)


ORBAX = ("ocdbt", "zarr") if importlib.util.find_spec("orbax") is not None else ()


FORMATS = {
    "one": "one/model.safetensors",
    "one folder": "one",
    "index": "index/model.safetensors.index.json",
    "index folder": "index",
    "index folder/": "index/",
    "numbered": "numbered",
    "h5": "h5/model.weights.h5",
    "h5 folder": "h5",
    "chunked": "chunked/model.weights.h5",
    "sharded": "sharded/model.weights.json",
    "sharded folder": "sharded",
    "keras": "keras/m.keras",
    "npz": "npz/w.npz",
    "packed": "packed/w.npz",
    "npy": "npy/w.npy",
    "npy folder": "npy",
    "gguf": "gguf/w.gguf",
    "split gguf": "split/m-00002-of-00003.gguf",
    "split gguf folder": "split",
    "odd": "odd names é/w #1%20+ü.safetensors",
    **{kind: kind for kind in ORBAX},
}
