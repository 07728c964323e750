"""Damaged and hostile checkpoints: every one is refused with a CheckpointError, or read as another reader reads it.

Inputs are made from small valid checkpoints of every kind by flips, splices, cuts and, for JSON, by headers that lie;
each is determined by its kind and number. For each, in bounded memory and time, either opening or reading raises
CheckpointError and nothing else, or all tensors equal those of an independent reader: the one below for safetensors,
the package's for GGUF, h5py for HDF5. All of this is in processes of their own, where a crash or a hang of the HDF5
library can be told apart: this file, run as a script, forks them.
"""

import collections
import io
import itertools
import json
import math
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import gguf
import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors

from lazymodel import CheckpointError, open_checkpoint
from tests import gguf_files

ROOT = Path(__file__).parents[3]

SECONDS = 20  # for one input; it takes milliseconds
MEMORY = (4 << 20, 64)  # bytes that one input may take: a constant, and a multiple of its size
MEMORY_OF_PROCESS = 48 << 20  # bytes; of a child, whose modules are still being loaded with its first inputs
LARGE = 1 << 24  # bytes; declared sizes up to this are read, and no input holds so much
# Why h5py refuses what is read without it: bookkeeping on which values do not depend.
LENIENT = ("invalid combination of fill-value info", "addr overflow")
MAGIC = b"what lies outside"  # content of a file next to the checkpoint that nothing may read


class Wrong(Exception):
    """An input was neither refused nor read right."""


# Inputs ---------------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A copy with one to four random edits."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(8):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                data[at] = (data[at] + rng.choice((-1, 1))) % 256
            case 3:  # an integer of 2, 4 or 8 bytes
                width = rng.choice((2, 4, 8))
                value = rng.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), len(data), rng.getrandbits(16)))
                at -= at % width
                data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
            case 4:  # a piece of itself or of another file
                source = rng.choice([bytes(data), *others])
                start = rng.randrange(len(source))
                piece = source[start : start + rng.choice((4, 8, 16, 64))]
                data[at : at + len(piece)] = piece
            case 5:
                del data[at : at + rng.choice((1, 4, 8, 64))]
            case 6:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
            case 7:
                del data[rng.choice((at, len(data) - 1)) :]
    return bytes(data)


# What a JSON value of a header may be replaced by.
ODD = (
    *(0, 1, -1, 2, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 1.0, 1e300, float("nan"), True, False, None),
    *("", "F32", "F4", "F6_E2M3", "F128", "a\0b", "\ud800", "ß", [], {}, [0], [0, 8], [8, 0], [-1, 1], [0, 2**62]),
    *([0, 2**62, 2**62], [2**40, 2**40], [1] * 33, [True], [1.0], [[1]], ["1"], {"dtype": "U8"}),
)
WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
}


def safetensors_parts(rng: random.Random) -> tuple[dict, bytes]:
    """A valid header and its data."""
    header, data = {}, b""
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": "np"}
    for name in rng.sample(["a", "b", "layers.0.weight", "ß", "", "x/y"], rng.randrange(4)):
        dtype, shape = rng.choice(list(WIDTHS)), [rng.randrange(5) for _ in range(rng.randrange(4))]
        bits = math.prod(shape) * WIDTHS[dtype]
        if bits % 8:
            dtype, bits = "U8", math.prod(shape) * 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + bits // 8]}
        data += rng.randbytes(bits // 8)
    return header, data


def odd_json(value: dict, rng: random.Random) -> str:
    """JSON of an object with one of its values replaced, dropped, or there twice."""
    copy = json.loads(json.dumps(value))
    place: object = copy
    while True:  # walk down to a container
        items = list(place.items()) if isinstance(place, dict) else list(enumerate(place)) if place else []
        inner = [item for _, item in items if isinstance(item, (dict, list)) and item]
        if not inner or rng.random() < 0.2:
            break
        place = rng.choice(inner)
    if items:
        key, item = rng.choice(items)
        number = type(item) is int
        match rng.randrange(8):
            case 0 | 1 if number:
                place[key] = item + rng.choice((-8, -4, -1, 1, 4, 8))
            case 2 if isinstance(place, dict):
                place[key + rng.choice(("", "x", "\u2028"))] = place.pop(key)
            case 3 if isinstance(place, dict):
                del place[key]
            case 4:
                place[key] = "@"  # nested too deeply, put in below: json.dumps could not write it
            case _:
                place[key] = rng.choice(ODD)
    text = json.dumps(copy, ensure_ascii=rng.random() < 0.8)
    depth = rng.choice((3, 100, 900, 5000))
    text = text.replace('"@"', "[" * depth + "]" * depth)
    match rng.randrange(12):
        case 0:  # every key of one object twice
            text = text[:-1] + ("," if copy else "") + text[1:]
        case 1:
            text = text.replace("0", rng.choice(("-0", "0e0", "00", "1" * 5000, "NaN")), 1)
        case 2:
            text = rng.choice((" ", "\ufeff", "\n")) + text + rng.choice((" ", "\n", "x", "\0"))
    return text


def safetensors_file(rng: random.Random) -> bytes:
    header, data = safetensors_parts(rng)
    plain = json.dumps(header).encode()
    match rng.randrange(5):
        case 0:
            return len(plain).to_bytes(8, "little") + plain + data
        case 1:
            return damaged(len(plain).to_bytes(8, "little") + plain + data, rng, [b"{}[]\"',:"])
        case 2:
            text = damaged(plain, rng, [plain])
        case _:
            encoding = rng.choice(("utf-8",) * 9 + ("utf-16",))
            text = odd_json(header, rng).encode(encoding, "surrogatepass")
    data = data[: len(data) - rng.choice((0, 0, 0, 1))] + b"\0" * rng.choice((0, 0, 0, 1))
    return len(text).to_bytes(8, "little") + text + data


def safetensors_folder(folder: Path, rng: random.Random) -> Path:
    """Two shards and an index, one of which is odd."""
    weights: dict[str, object] = {}
    for shard in ("one.safetensors", "two.safetensors"):
        header, data = safetensors_parts(rng)
        text = json.dumps(header).encode()
        weights |= {name: shard for name in header if name != "__metadata__"}
        (folder / shard).write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "model.safetensors.index.json").write_bytes(odd_index(weights, rng))
    return folder


def odd_index(weights: dict[str, object], rng: random.Random) -> bytes:
    if weights and rng.random() < 0.5:
        shard = rng.choice(
            ("", ".", "..", "/", "a\0b", "x" * 300, "\ud800", "../one.safetensors", "one.safetensors/x", 1)
        )
        weights = {**weights, rng.choice(list(weights)): shard}
        return json.dumps({"weight_map": weights}).encode()
    text = odd_json({"metadata": {"total_size": 8}, "weight_map": weights}, rng).encode("utf-8", "surrogatepass")
    return damaged(text, rng, [text]) if rng.random() < 0.3 else text


def gguf_model(folder: Path, rng: random.Random, count: int) -> Path:
    """A model in one file or several, of which one is odd."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    tensors = {}
    for name in rng.sample(["a", "b", "blk.0.weight", "ß", "c"], rng.randrange(1, 5)):
        type = rng.choice(gguf_files.QUANTIZED + gguf_files.PLAIN)
        rows = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
        size = gguf_files.TYPES[gguf_files.NUMBERS[type]].size
        tensors[name] = gguf_files.random_tensor(numbers, type, *rows, size * rng.randrange(1, 3))
    every = {
        "general.architecture": "llama",
        "n": 3,
        "x": 0.5,
        "flag": True,
        "tokens": ["<s>", "é", ""],
        "scores": [0.5, -1.0],
        "flags": [True, False],
        "none": [],
        "general.alignment": rng.choice((8, 32)),
    }
    metadata = {key: every[key] for key in rng.sample(list(every), rng.randrange(len(every)))}
    files = gguf_files.split_pieces(metadata, tensors, count) if count > 1 else {}
    files = files or {"m.gguf": gguf_files.fields(metadata, tensors)}
    odd = rng.choice(list(files))
    for name, pieces in files.items():
        content = b"".join(pieces)
        if name == odd and not overlong(other := odd_gguf(pieces, rng)):
            content = other
        (folder / name).write_bytes(content)
    return folder if count > 1 else folder / "m.gguf"


def overlong(content: bytes) -> bool:
    """Returns True if an array or text in the metadata says that it is longer than the file, or is one of arrays.

    The package gguf 0.19.0 reads past the end of a file, and goes on for as long as an array says. `HOSTILE` of
    test_gguf.py has such files that it refuses.
    """
    at, fixed = 24, {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(width: int) -> int:
        nonlocal at
        at += width
        return int.from_bytes(content[at - width : at], "little")

    def skip(kind: int) -> bool:
        """Goes on to what follows a value."""
        nonlocal at
        if kind == 9:
            kind, length = number(4), number(8)
            return kind != 9 and length <= len(content) - at and all(skip(kind) for _ in range(length))
        length = number(8) if kind == 8 else fixed.get(kind, 0)
        at += length
        return length <= len(content)

    for _ in range(int.from_bytes(content[16:24], "little")):
        if not skip(8) or not skip(number(4)):
            return True
        if at >= len(content):
            return False
    return False


def odd_gguf(pieces: list[bytes], rng: random.Random) -> bytes:
    """A file with one of its fields replaced, or there twice, or damaged anywhere before its values."""
    match rng.randrange(8):
        case 0 | 1 | 2:
            at = rng.choice([index for index, piece in enumerate(pieces[:-1]) if len(piece) in (4, 8)])
            width, number = len(pieces[at]), int.from_bytes(pieces[at], "little")
            odd = (0, 1, 2, 31, 2**31, 2**60, 2**63, 2**64 - 1, number + 1, number - 1, number * 8, rng.randrange(64))
            pieces[at] = (rng.choice(odd) % 2 ** (8 * width)).to_bytes(width, "little")
        case 3:
            at = rng.randrange(len(pieces))
            pieces[at] *= rng.choice((0, 2))
        case 4 | 5:
            head = b"".join(pieces[:-1])
            return damaged(head, rng, [head]) + pieces[-1]
        case 6:
            return damaged(b"".join(pieces), rng, [])
    return b"".join(pieces)


def h5_seeds() -> dict[str, bytes]:
    """A small valid file of every kind."""
    numbers = np.arange(60, dtype=np.float32).reshape(10, 6)

    def external(file):
        file["w"] = numbers
        file["link"] = h5py.ExternalLink("outside.h5", "w")

    def virtual(file):
        layout = h5py.VirtualLayout((3,), "V17")
        layout[:] = h5py.VirtualSource("outside.h5", "w", (3,))
        file.create_virtual_dataset("w", layout)

    def links(file):
        file["g/w"] = numbers
        file["soft"] = h5py.SoftLink("/g/w")
        file["g/circle"] = file["/"]
        file["hard"] = file["g/w"]

    def keras(file):
        for layer in ("dense", "dense_1"):
            file[f"layers/{layer}/vars/0"] = numbers
            file[f"layers/{layer}/vars/1"] = numbers[0].astype(np.float16)
        data = numbers.astype(ml_dtypes.bfloat16).view("V2")
        file.create_dataset("layers/half/vars/0", data=data).attrs["dtype"] = "bfloat16"

    def kinds(file):
        file["scalar"] = np.float64(2.5)
        file["bool"] = np.array([True, False])
        file["complex"] = np.array([1 + 2j])
        file["big"] = numbers.astype(">f8")
        file["empty"] = np.zeros((0, 3), np.float32)
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, space, compact).write(
            h5py.h5s.ALL, h5py.h5s.ALL, numbers[0, :3].copy()
        )
        packed = h5py.h5t.STD_I16LE.copy()
        packed.set_precision(12)
        h5py.h5d.create(file.id, b"precision", packed, space).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.arange(3, dtype=np.int16)
        )

    def chunked(**options):
        def write(file):
            file.create_dataset("w", data=numbers, chunks=(4, 4), **options)
            sparse = file.create_dataset("sparse", (8,), np.int32, chunks=(2,), fillvalue=7, **options)
            sparse[2:5] = 1

        return write

    makers = {
        "keras": keras,
        "kinds": kinds,
        "links": links,
        "external": external,
        "virtual": virtual,
        "chunked": chunked(),
        "gzip": chunked(compression="gzip"),
        "shuffle": chunked(shuffle=True, compression="gzip", fletcher32=True),
        "lzf": chunked(compression="lzf", shuffle=True),
    }
    seeds = {}
    for (name, make), version in itertools.product(makers.items(), ("earliest", "latest")):
        memory = io.BytesIO()
        with h5py.File(memory, "w", libver=version) as file:
            make(file)
        seeds[f"{name} {version}"] = memory.getvalue()
    return seeds


def h5_outside() -> bytes:
    """What external links and virtual datasets of the seeds point to."""
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["w"] = np.array([MAGIC] * 3, "V17")
    return memory.getvalue()


def h5_file(rng: random.Random, seeds: dict[str, bytes]) -> bytes:
    return damaged(seeds[rng.choice(list(seeds))], rng, list(seeds.values()))


def h5_folder(folder: Path, rng: random.Random, seeds: dict[str, bytes]) -> Path:
    """Two shards and an index; one of the three is odd."""
    contents = {"one.weights.h5": seeds["keras earliest"], "two.weights.h5": seeds["gzip earliest"]}
    weights: dict[str, object] = {f"/layers/{layer}/vars": "one.weights.h5" for layer in ("dense", "dense_1", "half")}
    weights |= {"": "two.weights.h5"} if rng.random() < 0.5 else {}
    index = json.dumps({"weight_map": weights}).encode()
    if rng.random() < 0.3:
        name = rng.choice(list(contents))
        contents[name] = damaged(contents[name], rng, list(seeds.values()))
    else:
        index = odd_index(weights, rng)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    path = folder / "model.weights.json"
    path.write_bytes(index)
    return path


def keras_archive(rng: random.Random, seeds: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    inner = seeds[rng.choice(("keras earliest", "chunked earliest", "gzip latest"))]
    with zipfile.ZipFile(memory, "w", rng.choice((zipfile.ZIP_STORED,) * 5 + (zipfile.ZIP_DEFLATED,))) as archive:
        archive.writestr("config.json", "{}")
        if rng.random() < 0.3:
            weights: dict[str, object] = {"/layers/dense/vars": "model_00000.weights.h5"}
            index = json.dumps({"weight_map": weights}).encode() if rng.random() < 0.5 else odd_index(weights, rng)
            archive.writestr("model.weights.json", index)
            archive.writestr("model_00000.weights.h5", seeds["keras earliest"])
        else:
            archive.writestr("model.weights.h5", inner)
    content = memory.getvalue()
    if rng.random() < 0.5:  # in what describes the members rather than in them
        at = rng.choice([index for index in range(len(content)) if content[index : index + 2] == b"PK"])
        return content[:at] + damaged(content[at : at + 60], rng, [content[-80:]]) + content[at + 60 :]
    return damaged(content, rng, [inner])


def make(kind: str, number: int, folder: Path, seeds: dict[str, bytes]) -> Path:
    """Writes an input into an empty folder; returns what to open."""
    rng = random.Random(f"{kind} {number}")
    match kind:
        case "safetensors":
            path, content = folder / "m.safetensors", safetensors_file(rng)
        case "safetensors index":
            return safetensors_folder(folder, rng)
        case "gguf" | "gguf split":
            return gguf_model(folder, rng, 1 if kind == "gguf" else 3)
        case "h5":
            path, content = folder / "m.weights.h5", h5_file(rng, seeds)
        case "h5 shards":
            return h5_folder(folder, rng, seeds)
        case _:
            path, content = folder / "m.keras", keras_archive(rng, seeds)
    path.write_bytes(content)
    return path


# Readers to compare with ----------------------------------------------------------------------------------------------


def plain_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor of a file that is taken to be right."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start].decode())
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = content[start + begin : start + end]
            if math.prod(entry["shape"]) * WIDTHS[entry["dtype"]] != 8 * (end - begin) or len(data) != end - begin:
                raise Wrong(f"{path}: {name!r} is not its bytes, and was not refused")
            if entry["dtype"] == "F4":
                data = bytes(half for byte in data for half in (byte & 15, byte >> 4))
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), data)
    aliases = {other: name for other, name in (header.get("__metadata__") or {}).items() if name in tensors}
    return {**{other: tensors[name] for other, name in aliases.items()}, **tensors}


def compare_safetensors(path: Path, found: dict[str, np.ndarray]) -> None:
    if path.is_dir():
        weights = json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"]
        expected = {name: plain_safetensors(path / shard)[name] for name, shard in weights.items()}
    else:
        expected = plain_safetensors(path)
        try:
            safetensors.deserialize(path.read_bytes())
        except safetensors.SafetensorError as error:
            # Nesting that Rust's parser gives up on earlier is in fields that no reader looks at.
            if "recursion limit" not in str(error):
                raise Wrong(f"{path}: the reference implementation refuses it: {error}") from None
    actual = {name: (values.shape, values.tobytes()) for name, values in found.items()}
    if actual != {name: (shape, data) for name, (_, shape, data) in expected.items()}:
        raise Wrong(f"{path}: expected {expected}, found {actual}")


def compare_gguf(path: Path, found: dict[str, np.ndarray]) -> None:
    expected = {}
    for file in sorted(path.glob("*.gguf")) if path.is_dir() else [path]:
        try:
            tensors = gguf.GGUFReader(file).tensors
        except Exception as error:
            raise Wrong(f"{file}: the reference implementation refuses it: {error!r}") from error
        for tensor in tensors:
            data = tensor.data
            if data.dtype == np.uint8 and data.size:
                with np.errstate(all="ignore"):
                    data = gguf.dequantize(data, tensor.tensor_type)
            expected[tensor.name] = (tuple(tensor.shape.tolist()[::-1]), data)
    for name, values in found.items():
        shape, data = expected.pop(name)
        if values.dtype == ml_dtypes.bfloat16:  # which the package gives as float32
            values = values.astype(np.float32)
        if (values.shape, values.tobytes()) != (shape, data.tobytes()):
            raise Wrong(f"{path}: {name!r}: expected {data}, found {values}")
    if expected:
        raise Wrong(f"{path}: expected {list(expected)} as well")


def compare_h5(path: Path, found: dict[str, np.ndarray]) -> None:
    """Compares with what h5py reads. A tensor is in whichever file has it; names are unique over shards."""
    files: list[Path | io.BytesIO] = [path]
    if path.suffix == ".json":
        files = [*path.parent.glob("*.weights.h5")]
    elif path.suffix == ".keras":
        files = []
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():  # taken from where they are: `read` would refuse a wrong checksum
                lengths = data[member.header_offset + 26 :][:4]
                start = member.header_offset + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
                files.append(io.BytesIO(data[start : start + member.file_size]))
    missing = dict(found)
    for place in files:
        try:
            file = h5py.File(place, "r")
        except Exception:  # h5py has nearly any of them for a corrupt file; what it cannot open proves nothing
            continue
        with file:
            for name, values in found.items():
                try:
                    expected = np.asarray(file[name][()])
                except KeyError:
                    continue
                except Exception as error:
                    if any(reason in str(error) for reason in LENIENT):
                        missing.pop(name, None)
                        continue
                    raise Wrong(f"{path}: {name!r}: h5py refuses it: {error}") from error
                if expected.dtype.byteorder == ">":
                    expected = expected.astype(expected.dtype.newbyteorder("="))
                same = (expected.shape, expected.tobytes()) == (values.shape, values.tobytes())
                if not same and expected.shape == values.shape and file[name].chunks:
                    # Where a key in the index of chunks is damaged, h5py may not find a chunk that is there.
                    bits = np.dtype(f"V{expected.itemsize}")
                    lost = expected.reshape(-1).view(bits) != values.reshape(-1).view(bits)
                    same = bool((expected.reshape(-1)[lost] == file[name].fillvalue).all())
                if not same:
                    raise Wrong(f"{path}: {name!r}: expected {expected!r}, found {values!r}")
                missing.pop(name, None)
    if missing:
        raise Wrong(f"{path}: h5py finds no {sorted(missing)}")
    if any(MAGIC in values.tobytes() for values in found.values()):
        raise Wrong(f"{path}: values of another file were read")


# Checks ---------------------------------------------------------------------------------------------------------------


def read_all(path: Path) -> dict[str, np.ndarray] | None:
    """Every tensor of a checkpoint, or None where it is refused; Wrong for any other error."""
    try:
        with open_checkpoint(path) as checkpoint:
            dict(checkpoint.metadata or {})
            for name, tensor in checkpoint.items():
                str(name).encode()
                if tensor.nbytes > LARGE:
                    raise Wrong(f"{path}: a declared size of {tensor.nbytes} bytes for {name!r} was accepted")
            return {name: tensor.read() for name, tensor in checkpoint.items()}
    except CheckpointError as error:
        if str(path.parent) not in str(error):
            raise Wrong(f"{path}: the message names no file: {error}") from error
        str(error).encode()
        return None
    except Wrong:
        raise
    except BaseException as error:
        raise Wrong(f"{path}: {type(error).__name__}: {error}") from error


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def check(kind: str, number: int, folder: Path, seeds: dict[str, bytes], outside: bytes, at_hand: mmap.mmap) -> str:
    """`refused` or `read`; raises Wrong, with the input left in the folder."""
    empty(folder)
    path = make(kind, number, folder, seeds)
    size, hdf5 = size_of(folder), kind in HDF5
    if hdf5:
        (folder / "outside.h5").write_bytes(outside)
    # An input that takes too much takes it again; a table of the interpreter, such as that of its strings, grows once.
    for last in (False, True):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        tracemalloc.start()
        found = read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        if grown > MEMORY_OF_PROCESS + MEMORY[1] * size or (peak > MEMORY[0] + MEMORY[1] * size and last):
            raise Wrong(f"{path}: {peak} bytes of Python's memory, {grown} of the process, for {size} bytes of files")
        if peak <= MEMORY[0] + MEMORY[1] * size:
            break
    at_hand[8] = 1
    if found is None:
        return "refused"
    compare = compare_h5 if hdf5 else compare_gguf if kind.startswith("gguf") else compare_safetensors
    compare(path, found)
    return "read"


def say(*words: object) -> None:
    print(*words, sep=";", flush=True)


def check_forked(kind: str, stop: int, folder: Path) -> None:
    """Checks inputs in forks, and prints kind, number and result of each as soon as it is known."""
    seeds, outside = h5_seeds(), h5_outside()
    for type in gguf_files.QUANTIZED:  # the package makes tables, which are no input's memory
        gguf_files.random_tensor(np.random.default_rng(0), type, 256).decoded()
    at_hand = mmap.mmap(-1, 16)  # shared: the number of the input at hand, and whether we are done with it
    number = 0
    while number < stop:
        if (pid := os.fork()) == 0:
            for each in range(number, stop):
                at_hand[:9] = each.to_bytes(8, "little") + b"\0"
                signal.alarm(SECONDS)  # the default action ends the process, inside the library too
                try:
                    say(kind, each, check(kind, each, folder, seeds, outside, at_hand))
                except Wrong as error:
                    say(kind, each, "wrong", ascii(str(error)))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        number = int.from_bytes(at_hand[:8], "little") + 1
        if status > 0:
            sys.exit(status)
        if status < 0 and at_hand[8]:
            # After we were done, while h5py alone read the same values, through code of the library that we never call.
            say(kind, number - 1, "crashed")
        elif status < 0:
            reason = "took too long" if status == -signal.SIGALRM else "crashed"
            say(kind, number - 1, "wrong", f"{reason} ({status})")


HDF5 = ("h5", "h5 shards", "keras")
# Inputs of each kind, always and with `-m large`. No more of HDF5: the library itself, which gets what we read, is to
# survive each of them, as it does these.
FEW = {"safetensors": 120, "safetensors index": 60, "gguf": 120, "gguf split": 40, "h5": 60, "h5 shards": 40}
FEW |= {"keras": 40}
MANY = {kind: 20_000 if count > 100 and "index" not in kind else 5_000 for kind, count in FEW.items()}
MANY |= {"h5": 150, "h5 shards": 40, "keras": 60}


@pytest.mark.parametrize("sizes", [FEW, pytest.param(MANY, marks=pytest.mark.large)], ids=["few", "many"])
@pytest.mark.timeout(3600)
def test_every_input_is_refused_or_read_right(sizes, tmp_path):
    command = [sys.executable, "-m", "tests.core.checkpoints.test_fuzz", json.dumps(sizes), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line.split(";", 3) for line in done.stdout.splitlines()]
    wrong = [" ".join(line) for line in lines if line[2] == "wrong"]
    assert not wrong, "\n".join(wrong)
    assert len(lines) == sum(sizes.values())
    for kind, count in sizes.items():
        found = collections.Counter(result for other, _, result in lines if other == kind)
        print(f"\n{kind}: {count} inputs, {dict(found)}")
        assert min(found["refused"], found["read"]) > count // 20
        assert not found["crashed"]


if __name__ == "__main__":
    for kind, count in json.loads(sys.argv[1]).items():
        check_forked(kind, count, Path(sys.argv[2]))
