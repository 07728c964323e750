"""GGUF: every type as the `gguf` package decodes it, whole and in boxes; metadata, split files, what is refused."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests import gguf_files
from tests.command import problems
from tests.core.checkpoints._formats import refused
from tests.gguf_files import PLAIN, QUANTIZED, Stored, columns, fields, gguf_file, random_tensor, split_files
from tests.large import examples
from tests.quantized import same
from tests.small import buffer_sizes

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "eps": 0.5,
    "flag": True,
    "tokens": ["<s>", "é", ""],
    "scores": [0.5, -1.0],
    "flags": [True, False],
    "none": [],
    "nested": [[1, 2], [], ["a"]],
    "wide": struct.pack("<Id", 12, 0.1),
    "long": struct.pack("<Iq", 11, -(2**40)),
}
READ = {**METADATA, "wide": 0.1, "long": -(2**40)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[lm.Checkpoint, dict[str, Stored]]:
    """A file with a matrix of every type, and some others."""
    rng = np.random.default_rng(0)
    tensors = {name: random_tensor(rng, name, 70, columns(name)) for name in [*QUANTIZED, *PLAIN]}
    tensors |= {"experts": random_tensor(rng, "Q4_K", 3, 5, 512), "vector": random_tensor(rng, "Q8_0", 96)}
    tensors |= {"scalar": random_tensor(rng, "F32"), "empty": random_tensor(rng, "Q4_0", 0, 32)}
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(gguf_file(METADATA, tensors))
    return lm.open_checkpoint(path), tensors


def test_every_type_is_what_the_package_decodes(model: Any) -> None:
    checkpoint, tensors = model
    assert list(checkpoint) == list(tensors) and checkpoint.format == "gguf"
    for name, stored in tensors.items():
        expected, header = stored.decoded(), checkpoint.describe(name)
        assert (header.dtype, header.shape, header.nbytes) == (expected.dtype, expected.shape, expected.nbytes)
        assert header.stored == (None if stored.type in PLAIN else (stored.type, len(stored.data)))
        same(checkpoint[name].read(), expected)


@examples(15, 80, data=st.data())
def test_any_box(model: Any, data: st.DataObject) -> None:
    """Transposed and converted or not: read alone, in little memory or much, and as shards that are read together."""
    checkpoint, tensors = model
    name = data.draw(st.sampled_from([name for name, stored in tensors.items() if len(stored.shape) > 1]))
    array, tensor = tensors[name].decoded(), checkpoint[name]
    if data.draw(st.booleans()):
        array, tensor = array.T, tensor.T
    if array.dtype == np.float32 and data.draw(st.booleans()):
        with np.errstate(all="ignore"):
            array, tensor = array.astype(ml_dtypes.bfloat16), tensor.astype(ml_dtypes.bfloat16)
    box = tuple(slice(*sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))) for n in array.shape)
    with buffer_sizes(workspace=data.draw(st.sampled_from([1 << 12, 1 << 18, 1 << 24]))):
        same(tensor.read(box), array[box])
    axis = data.draw(st.integers(0, array.ndim - 1))
    box = (
        *box[:axis],
        slice(box[axis].start, box[axis].stop - (box[axis].stop - box[axis].start) % 8),
        *box[axis + 1 :],
    )
    part, expected = tensor[box], array[box]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    with jax.enable_x64(True):
        abstract = lm.build_abstract(lambda: {"w": jnp.zeros(expected.shape, expected.dtype)})
        abstract = abstract.shard(mesh, {"w": P(*[None] * axis, "x")})
        same(np.asarray(abstract.materialize({"w": part})["w"]), expected)


def test_reads_the_blocks_that_a_box_needs(model: Any) -> None:
    checkpoint, tensors = model
    row = len(tensors["Q4_K"].data) // 70
    for box, nbytes in [((slice(3, 9), slice(None)), 6 * row), ((slice(3, 9), slice(200, 300)), 6 * row * 2 // 3)]:
        before = checkpoint.bytes_read
        same(checkpoint["Q4_K"][box].read(), tensors["Q4_K"].decoded()[box])
        assert checkpoint.bytes_read - before == nbytes


def test_metadata(model: Any) -> None:
    checkpoint, _ = model
    assert dict(checkpoint.metadata) == READ
    assert type(checkpoint.metadata["flag"]) is bool and type(checkpoint.metadata["llama.block_count"]) is int


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 64])
def test_versions_and_alignments(version: int, alignment: int, tmp_path: Path) -> None:
    stored = {name: random_tensor(np.random.default_rng(0), "F16", 3) for name in "ab"}
    (tmp_path / "m").write_bytes(gguf_file({"general.alignment": alignment}, stored, version=version))
    with lm.open_checkpoint(tmp_path / "m") as checkpoint:  # known by its first bytes
        for name in stored:
            same(checkpoint[name].read(), stored[name].decoded())


def test_without_the_package(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only types with a grid ask for it."""
    checkpoint, tensors = lm.open_checkpoint(model[0].path), model[1]
    gguf_files.forget_grids()
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in set(QUANTIZED) - set(gguf_files.WITH_GRIDS):
        same(checkpoint[name][:1].read(), tensors[name].decoded()[:1])
    for name in gguf_files.WITH_GRIDS:
        with pytest.raises(lm.CheckpointError, match=rf"tensor '{name}' of .*m.gguf.*install 'lazymodel\[gguf\]'"):
            checkpoint[name]


def test_with_an_old_package(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_files.forget_grids()
    monkeypatch.delattr("gguf.quants.IQ1_M")
    with pytest.raises(lm.CheckpointError, match="tensor 'IQ1_M' of .*IQ1_M cannot be decoded.* pip install -U gguf"):
        lm.open_checkpoint(model[0].path)["IQ1_M"]


@pytest.mark.parametrize("type", ["Q8_1", "Q1_0"])
def test_what_is_not_decoded(type: str, tmp_path: Path) -> None:
    tensors = {"w": random_tensor(np.random.default_rng(0), type, 2, 256), "b": Stored("F32", (1,), bytes(4))}
    (tmp_path / "m.gguf").write_bytes(gguf_file({}, tensors))
    with lm.open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint["b"].read() == 0
        with pytest.raises(lm.CheckpointError, match=f"{type} cannot be decoded"):
            checkpoint["w"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_weight_is_not_given_without_its_scale(count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"w.weight": random_tensor(rng, "NVFP4", 2, 64), "w.scale": Stored("F32", (1,), bytes(4))}
    files = split_files({}, tensors, 3) if count > 1 else {"m.gguf": gguf_file({}, tensors)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with lm.open_checkpoint(tmp_path) as checkpoint:
        checkpoint["w.scale"].read()
        with pytest.raises(lm.CheckpointError, match=r"'w.weight' of .* another scale, tensor 'w.scale'"):
            checkpoint["w.weight"]


# Split files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> tuple[Path, dict[str, Stored]]:
    rng = np.random.default_rng(0)
    tensors = {name: random_tensor(rng, "Q8_0", 4, 32) for name in "abcde"}
    for name, content in split_files(METADATA, tensors, 3).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path, tensors


@pytest.mark.parametrize("name", ["", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"])
def test_any_of_split_files_opens_all(name: str, split: Any) -> None:
    folder, tensors = split
    with lm.open_checkpoint(folder / name) as checkpoint:
        assert sorted(checkpoint) == sorted(tensors) and len(checkpoint.files) == 3
        assert checkpoint.metadata is not None and checkpoint.metadata["tokens"] == READ["tokens"]
        for tensor, stored in tensors.items():
            same(checkpoint[tensor].read(), stored.decoded())


def rename(folder: Path) -> None:
    (folder / "m-00001-of-00003.gguf").rename(folder / "model.gguf")


def exchange(folder: Path) -> None:
    paths = [folder / f"m-{number:05}-of-00003.gguf" for number in (2, 3)]
    for path, content in zip(paths, [path.read_bytes() for path in paths][::-1], strict=True):
        path.write_bytes(content)


def lessen(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes().replace(*(b"tensors.count\x04\0\0\0" + bytes([n, 0, 0, 0]) for n in (5, 6))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "m-00002-of-00003.gguf").unlink(), "found 2 without m-00002-of-00003"),
        (rename, "2 GGUF models"),
        (exchange, "expected file 1 of 3"),
        (lessen, "expected 6 tensors in 3 files.*found 5"),
        (lambda folder: (folder / "other.gguf").write_bytes(b""), "2 GGUF models; open one of"),
    ],
)
def test_incomplete_split_files(change: Any, message: str, split: Any) -> None:
    change(split[0])
    refused(split[0], message)
    for path in split[0].glob("m-*"):  # says that it is one of three, and is not
        if path.name.endswith("00001-of-00003.gguf"):
            path.write_bytes(gguf_file({}, {}))
            refused(path, "expected a name without numbers, found .*one of 1 file")
    if (renamed := split[0] / "model.gguf").exists():
        refused(renamed, "expected a name that ends like -00001-of-00003.gguf")


# What is refused ------------------------------------------------------------------------------------------------------

HUGE = 2**60
TENSORS = {"a": Stored("F32", (2, 4), bytes(32)), "b": Stored("Q8_0", (32,), bytes(34))}


def changed(number: int, piece: int | bytes) -> bytes:
    """A file of which one field is another."""
    pieces = fields({"k": "v"}, TENSORS)
    pieces[number] = piece if isinstance(piece, bytes) else piece.to_bytes(len(pieces[number]), "little")
    return b"".join(pieces)


def changed_alignment() -> bytes:
    return gguf_file({"general.alignmenT": "x"}, {}).replace(b"T", b"t")


def nested(depth: int) -> bytes:
    return struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


HOSTILE = {
    "magic": (changed(0, b"GGUX"), "is not a GGUF file"),
    "empty": (b"", "is not a GGUF file"),
    "version 1": (changed(1, 1), "expected GGUF version 2 or 3, found 1"),
    "big-endian": (changed(1, b"\0\0\0\3"), "big-endian.*gguf-convert-endian"),
    "tensors": (changed(2, HUGE), "expected 1152921504606846976 tensors"),
    "keys": (changed(3, HUGE), "expected 1152921504606846976 metadata"),
    "key": (changed(4, HUGE), "is truncated: .* it is corrupt"),
    "key in UTF-8": (changed(5, b"\xff"), "a key in UTF-8"),
    "value": (changed(7, HUGE), "is truncated: .* it is corrupt"),
    "type of a value": (changed(6, 13), "a number, text or an array of these, found type 13"),
    "array": (gguf_file({"k": struct.pack("<IIQ", 9, 4, HUGE)}, {}), "expected 1152921504606846976 elements of 'k'"),
    "strings": (gguf_file({"k": struct.pack("<IIQ", 9, 8, HUGE)}, {}), "expected 1152921504606846976 elements of 'k'"),
    "a string of them": (
        gguf_file({"k": struct.pack("<IIQQ", 9, 8, 1, HUGE)}, {}),
        "is truncated: .* it is corrupt",
    ),
    "arrays": (gguf_file({"k": struct.pack("<IIQ", 9, 9, HUGE)}, {}), "expected 1152921504606846976 elements of 'k'"),
    "nesting": (gguf_file({"k": nested(1000)}, {}), "at most 8 arrays in each other"),
    "alignment": (gguf_file({"general.alignment": 33}, {}), "to be a power of two, found 33"),
    "no alignment": (changed_alignment(), "to be of type 4, found type 8"),
    "twice": (gguf_file({}, TENSORS).replace(b"b", b"a"), "each tensor once, found tensor 'a' twice"),
    "a key twice": (gguf_file({"k": 1, "l": 1}, {}).replace(b"l", b"k"), "each key once, found 'k' twice"),
    "dimensions": (changed(11, 33), "less than 32 dimensions"),
    "extent": (changed(12, HUGE), "expected a shape of less than"),
    "unknown type": (changed(14, 5), "is of type 5, which is not known; known are 0 F32"),
    "blocks": (changed(14, 2), "rows of whole blocks of 32 numbers"),
    "offset": (changed(15, HUGE), "is truncated: expected tensor 'a' up to byte"),
    "unaligned": (changed(15, 1), "at a multiple of 32 bytes"),
    "overlap": (changed(21, 0), "overlap at byte"),
    "cut": (gguf_file({}, TENSORS)[:-1], "is truncated: expected tensor 'b' up to byte"),
    "cut header": (gguf_file({"k": "v" * 99}, {})[:90], "is truncated: .* it is corrupt"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str, tmp_path: Path) -> None:
    content, message = HOSTILE[kind]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, message)
    assert problems(path)


@pytest.mark.parametrize("value", ["abc", ["abc"]], ids=["a text", "one of a list"])
def test_a_text_that_is_not_utf_8_is_an_error_when_it_is_looked_up(value: Any, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_file({"k": value, "other": 1}, TENSORS).replace(b"abc", b"a\xffc"))
    with lm.open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        checkpoint["a"].read()
        assert checkpoint.metadata and checkpoint.metadata["other"] == 1 and "k" in checkpoint.metadata
        with pytest.raises(lm.CheckpointError, match="'k' in UTF-8, found"):
            assert checkpoint.metadata["k"]
    assert "'k' in UTF-8, found" in problems(tmp_path / "m.gguf")[0]
