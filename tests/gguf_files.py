"""GGUF files for tests, written field by field, so that any of them can be made to lie."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import gguf
import numpy as np

from lazymodel.extras.quantized.ggml import GRIDS, TYPES, grid

NUMBERS = {type.name: number for number, type in TYPES.items()}
# Those that the package decodes.
QUANTIZED = [name for name in NUMBERS if name not in ("Q8_1", "Q8_K", "Q1_0") and TYPES[NUMBERS[name]].dtype is None]
WITH_GRIDS = list(GRIDS)  # for which the package is asked
PLAIN = [type.name for type in TYPES.values() if type.dtype is not None]


def columns(type: str, blocks: int = 3) -> int:
    """Numbers in so many blocks."""
    return blocks * TYPES[NUMBERS[type]].size


def forget_grids() -> None:
    """The next tensor of a type with a grid asks the package for it."""
    grid.cache_clear()


class Stored(NamedTuple):
    """A tensor in a file: its type, shape in NumPy's order, and bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes

    def decoded(self) -> np.ndarray:
        """What it stands for, by the package alone; of plain types, what it is."""
        plain = TYPES[NUMBERS[self.type]].dtype
        if plain is not None:
            return np.frombuffer(self.data, plain).reshape(self.shape)
        if not self.data:
            return np.empty(self.shape, np.float32)
        with np.errstate(all="ignore"):
            flat = gguf.dequantize(np.frombuffer(self.data, np.uint8), gguf.GGMLQuantizationType[self.type])
        return flat.reshape(self.shape)


def random_tensor(rng: np.random.Generator, type: str, *shape: int) -> Stored:
    """Any bytes are blocks; those of infinities and of what is no number are among them."""
    _, size, nbytes, *_ = TYPES[NUMBERS[type]]
    return Stored(type, shape, rng.bytes(math.prod(shape) // size * nbytes))


def string(text: str | bytes) -> list[bytes]:
    data = text.encode() if isinstance(text, str) else text
    return [struct.pack("<Q", len(data)), data]


def value(content: Any) -> list[bytes]:
    """The number of a value's type, and the value."""
    match content:
        case bool():
            return [struct.pack("<I", 7), bytes([content])]
        case int():
            return [struct.pack("<I", 4), struct.pack("<I", content)]
        case float():
            return [struct.pack("<I", 6), struct.pack("<f", content)]
        case str():
            return [struct.pack("<I", 8), *string(content)]
        case bytes():  # as it stands: a type and a value
            return [content]
        case _:
            items = [value(item) for item in content]
            kind = items[0][0] if items else struct.pack("<I", 4)
            return [struct.pack("<I", 9), kind, struct.pack("<Q", len(items)), *(p for item in items for p in item[1:])]


def fields(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, version: int = 3) -> list[bytes]:
    """A file as a list of its fields; the last one is the tensors' bytes."""
    alignment = metadata.get("general.alignment", 32)
    pieces = [b"GGUF", struct.pack("<I", version), struct.pack("<Q", len(tensors)), struct.pack("<Q", len(metadata))]
    for key, content in metadata.items():
        pieces += [*string(key), *value(content)]
    data = b""
    for name, (type, shape, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        pieces += [*string(name), struct.pack("<I", len(shape))]
        pieces += [struct.pack("<Q", extent) for extent in reversed(shape)]
        pieces += [struct.pack("<I", NUMBERS[type]), struct.pack("<Q", len(data))]
        data += content
    return [*pieces, bytes(-sum(map(len, pieces)) % alignment) + data]


def gguf_file(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], **options: Any) -> bytes:
    """A file, little-endian, as llama.cpp writes it."""
    return b"".join(fields(metadata, tensors, **options))


def split_pieces(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], count: int) -> dict[str, list[bytes]]:
    """Name → fields of the files of a model, of which the first has the metadata and, as llama.cpp can, no tensors."""
    names = list(tensors)
    files: dict[str, list[bytes]] = {}
    for number in range(count):
        own = {name: tensors[name] for name in (names[number - 1 :: count - 1] if number else [])}
        says = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        pieces = fields({**(metadata if number == 0 else {}), **says}, own)
        files[f"m-{number + 1:05}-of-{count:05}.gguf"] = pieces
    return files


def split_files(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], count: int) -> dict[str, bytes]:
    """Name → file of them."""
    return {name: b"".join(pieces) for name, pieces in split_pieces(metadata, tensors, count).items()}
