"""Small checkpoints of the same values in every format, and how those are refused that are damaged or lie."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import struct
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


class Opcodes(bytes):
    """A value that is pickled already."""


def pickled(value: Any) -> bytes:
    """A value as instructions of protocol 2, as torch.save writes them but without a memo."""
    match value:
        case Opcodes():
            return value
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(text := value.encode())) + text
        case tuple():
            return b"(" + b"".join(map(pickled, value)) + b"t"
        case list():
            return b"](" + b"".join(map(pickled, value)) + b"e"
        case _:
            return b"}(" + b"".join(pickled(each) for item in value.items() for each in item) + b"u"


def named(name: str) -> Opcodes:
    """What `import` makes of a name, pickled."""
    module, _, own = name.rpartition(".")
    return Opcodes(f"c{module}\n{own}\n".encode())


def called(name: str, *arguments: Any) -> Opcodes:
    """What a function makes of arguments, pickled."""
    return Opcodes(named(name) + pickled(arguments) + b"R")


STORAGES = {"float32": "Float", "float16": "Half", "int32": "Int", "int64": "Long", "uint8": "Byte"}


def torch_tensor(key: Any, dtype: str, count: int, offset: Any, shape: Any, strides: Any) -> Opcodes:
    """A tensor of a storage, pickled; offset, shape and strides count elements."""
    storage = Opcodes(pickled(("storage", named(f"torch.{STORAGES[dtype]}Storage"), key, "cpu", count)) + b"Q")
    hooks = called("collections.OrderedDict")
    return called("torch._utils._rebuild_tensor_v2", storage, offset, shape, strides, False, hooks)


def torch_archive(content: Any, storages: dict[str, bytes]) -> bytes:
    """A file of torch.save, from what is pickled in it and the bytes of its storages."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled(content) + b".")
        archive.writestr("archive/byteorder", b"little")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return stream.getvalue()


def torch_file(values: dict[str, np.ndarray]) -> bytes:
    """A file of torch.save, without torch."""
    tensors: dict[str, Any] = {}
    for key, (name, value) in enumerate(values.items()):
        strides = tuple(math.prod(value.shape[axis + 1 :]) for axis in range(value.ndim))
        tensors[name] = torch_tensor(str(key), value.dtype.name, value.size, 0, value.shape, strides)
    storages = {str(key): value.tobytes() for key, value in enumerate(values.values())}
    return torch_archive(tensors, storages)


def msgpack_file(values: dict[str, np.ndarray]) -> bytes:
    """A file of Flax' msgpack: maps by the parts of names; an array is an extension with shape, dtype and bytes."""

    def text(value: str) -> bytes:
        return b"\xd9" + bytes([len(value)]) + value.encode()

    def packed(value: Any) -> bytes:
        if isinstance(value, dict):
            items = b"".join(text(key) + packed(each) for key, each in value.items())
            return b"\xde" + struct.pack(">H", len(value)) + items
        shape = b"".join(b"\xcd" + struct.pack(">H", extent) for extent in value.shape)
        inner = b"\x93" + bytes([0x90 + value.ndim]) + shape + text(value.dtype.name)
        inner += b"\xc6" + struct.pack(">I", value.nbytes) + value.tobytes()
        return b"\xc9" + struct.pack(">Ib", len(inner), 1) + inner

    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = name.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    return packed(tree)


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
    with zipfile.ZipFile(folder / "sharded keras" / "m.keras", "w") as archive:
        for file in sorted((folder / "sharded").iterdir()):
            archive.write(file, file.name)
    flat = {name.replace("/", "_"): value for name, value in WEIGHTS.items()}
    np.savez(folder / "npz" / "w.npz", **flat)
    np.savez_compressed(folder / "packed" / "w.npz", **flat)
    np.save(folder / "npy" / "w.npy", WEIGHTS["a/vars/0"])
    (folder / "npy" / "inner").mkdir()
    np.save(folder / "npy" / "inner" / "w.npy", WEIGHTS["a/vars/0"])
    (folder / "bin" / "pytorch_model.bin").write_bytes(torch_file(WEIGHTS))
    for kind in ("bins", "numbered bins"):
        for number, half in enumerate(HALF, 1):
            (folder / kind / f"pytorch_model-{number:05}-of-00002.bin").write_bytes(torch_file(half))
    shards = {name: f"pytorch_model-{n:05}-of-00002.bin" for n, half in enumerate(HALF, 1) for name in half}
    (folder / "bins" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "pt" / "m.pt").write_bytes(torch_file(WEIGHTS))
    (folder / "msgpack" / "flax_model.msgpack").write_bytes(msgpack_file(WEIGHTS))
    for number, half in enumerate(HALF, 1):
        (folder / "msgpacks" / f"flax_model-{number:05}-of-00002.msgpack").write_bytes(msgpack_file(half))
    shards = {name: f"flax_model-{n:05}-of-00002.msgpack" for n, half in enumerate(HALF, 1) for name in half}
    (folder / "msgpacks" / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "steps" / "checkpoint_9").write_bytes(msgpack_file({}))
    (folder / "steps" / "checkpoint_10").write_bytes(msgpack_file(WEIGHTS))
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
    "sharded keras": "sharded keras/m.keras",
    "npz": "npz/w.npz",
    "packed": "packed/w.npz",
    "npy": "npy/w.npy",
    "npy folder": "npy",
    "bin": "bin/pytorch_model.bin",
    "bin folder": "bin",
    "bins": "bins/pytorch_model.bin.index.json",
    "bins folder": "bins",
    "numbered bins": "numbered bins",
    "pt folder": "pt",
    "msgpack": "msgpack/flax_model.msgpack",
    "msgpack folder": "msgpack",
    "msgpacks folder": "msgpacks",
    "checkpoints of flax": "steps",
    "gguf": "gguf/w.gguf",
    "split gguf": "split/m-00002-of-00003.gguf",
    "split gguf folder": "split",
    "odd": "odd names é/w #1%20+ü.safetensors",
    **{kind: kind for kind in ORBAX},
}
