"""NumPy files: read in place, decompressed in small pieces, and refused where they are not the numbers they claim."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import pickle
import struct
import threading
import warnings
import weakref
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.command import inspected
from tests.core.checkpoints._formats import numbers, refused, unreadable
from tests.small import buffer_sizes, read_within

SAVE = {"stored": np.savez, "deflated": np.savez_compressed}


def arrays() -> dict[str, np.ndarray]:
    return {
        "layers/0/kernel": numbers((16, 32)),
        "fortran": np.asfortranarray(numbers((4, 5, 6), np.int16)),
        "big_endian": numbers((3, 4), ">f8"),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 3), np.int8),
        "flags": np.array([True, False]),
        "complex": numbers((2, 2), np.complex64),
    }


@pytest.mark.parametrize("saved", SAVE)
def test_archives(tmp_path, saved):
    path = tmp_path / "model.npz"
    SAVE[saved](path, **arrays())
    with lm.open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "numpy"
        assert set(checkpoint) == set(arrays())
        assert checkpoint.files == [str(path)]
        for name, array in arrays().items():
            before = checkpoint.bytes_read
            tensor = checkpoint[name]
            values = tensor.read()
            assert (tensor.name, values.shape, values.dtype) == (name, array.shape, array.dtype.newbyteorder("="))
            np.testing.assert_array_equal(values, array)
            assert checkpoint.bytes_read - before == array.nbytes
        assert checkpoint.bytes_read == checkpoint.nbytes
        tensor, array = checkpoint["fortran"], arrays()["fortran"]
        np.testing.assert_array_equal(tensor[1:3, ::2, 4].astype(np.float32).read(), array[1:3, ::2, 4])
        np.testing.assert_array_equal(tensor.T[::-1].read(), array.T[::-1])
        offsets = [checkpoint[name].offset for name in checkpoint if checkpoint[name].size]
        assert offsets == sorted(offsets), "tensors are read in the order of the file"
    np.testing.assert_array_equal(tensor.read(), array)  # usable after close


def test_the_second_version_of_a_header(tmp_path):
    with open(tmp_path / "w.npy", "wb") as file:
        np.lib.format.write_array(file, numbers((3, 4)), (2, 0))
    np.testing.assert_array_equal(lm.open_checkpoint(tmp_path / "w.npy")["w"].read(), numbers((3, 4)))


def test_members_that_are_no_arrays_are_left_out(tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, w=numbers((2,)))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.txt", "weights")
        archive.writestr("empty", "")
    assert list(lm.open_checkpoint(path)) == ["w"]


# Compressed members ---------------------------------------------------------------------------------------------------


@pytest.fixture
def inflated(monkeypatch):
    """The streams that are decompressed from now on, as long as they live, and the sizes of what came of them."""
    streams, sizes, original = weakref.WeakSet(), [], zlib.decompressobj

    class Stream:
        def __init__(self, *arguments):
            self._stream = original(*arguments)
            streams.add(self)

        def decompress(self, *arguments):
            piece = self._stream.decompress(*arguments)
            sizes.append(len(piece))
            return piece

        def __getattr__(self, name):
            return getattr(self._stream, name)

    monkeypatch.setattr(zlib, "decompressobj", Stream)
    return streams, sizes


def test_decompressing_holds_little_and_resumes_where_it_stopped(tmp_path, mesh8, inflated):
    streams, sizes = inflated
    array = np.random.default_rng(0).integers(0, 99, (256, 64), np.int16)
    np.savez_compressed(tmp_path / "model.npz", w=array)
    checkpoint = lm.open_checkpoint(tmp_path / "model.npz")
    tensor = checkpoint["w"]
    sizes.clear()
    with buffer_sizes(deflated=256):
        for start in range(0, 256, 32):
            np.testing.assert_array_equal(tensor[start : start + 32].read(), array[start : start + 32])
        assert sum(sizes) <= array.nbytes + 4096, "each byte about once: zipfile inflates at least 4 KiB at a time"
        np.testing.assert_array_equal(tensor[200:202].read(), array[200:202])
        gc.collect()
        assert len(streams) > 0
        model = lm.build_abstract(lambda: {"w": jnp.zeros((256, 64), jnp.int16)}).shard(mesh8, {"w": P("model")})
        np.testing.assert_array_equal(model.materialize(checkpoint)["w"], array)
    gc.collect()
    assert len(streams) == 0, "nothing is kept of a tensor that was loaded"


def test_decompressing_takes_little_memory(tmp_path):
    np.savez_compressed(tmp_path / "model.npz", w=numbers((200_000,)))
    with buffer_sizes(deflated=4096):
        found, extra = read_within(lm.open_checkpoint(tmp_path / "model.npz")["w"], 64 << 10)
    np.testing.assert_array_equal(found, numbers((200_000,)))
    assert extra < 160 << 10


def test_a_read_that_fails_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "model.npz", w=numbers((100,)))
    tensor = lm.open_checkpoint(tmp_path / "model.npz")["w"]

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(lm.CheckpointError, match=r"cannot read .*model\.npz: Input/output error"):
        tensor.read()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_of_a_compressed_member(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    array = np.random.default_rng(len(shape)).integers(0, 9, shape, np.int16)
    path = tmp_path_factory.mktemp("npz") / "model.npz"
    np.savez_compressed(path, w=np.asfortranarray(array) if data.draw(st.booleans()) else array)
    with buffer_sizes(deflated=data.draw(st.integers(1, 200))):
        tensor = lm.open_checkpoint(path)["w"]
        for _ in range(3):
            index = tuple(
                slice(*sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2))), data.draw(st.sampled_from([1, 2])))
                for extent in shape
            )
            np.testing.assert_array_equal(tensor[index].read(), array[index])


def test_threads_share_a_compressed_member(tmp_path):
    array = np.random.default_rng(0).integers(0, 99, (64, 64), np.int16)
    np.savez_compressed(tmp_path / "model.npz", w=array)
    tensor = lm.open_checkpoint(tmp_path / "model.npz")["w"]
    wrong: list[int] = []

    def work(first: int) -> None:
        for row in (*range(first, 64, 8), *range(first, 64, 8)):
            if not np.array_equal(tensor[row].read(), array[row]):
                wrong.append(row)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    with buffer_sizes(deflated=256):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def deflated(tmp_path: Path, array: np.ndarray) -> tuple[Path, bytearray, int, int]:
    """A compressed archive, its bytes, and where the member's own begin and end."""
    path = tmp_path / "model.npz"
    np.savez_compressed(path, w=array)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("w.npy")
    content = bytearray(path.read_bytes())
    start = info.header_offset + 30 + sum(struct.unpack("<HH", content[info.header_offset + 26 :][:4]))
    return path, content, start, start + info.compress_size


def test_damaged_compressed_members(tmp_path):
    array = np.random.default_rng(0).standard_normal(4096)
    path, content, start, end = deflated(tmp_path, array)
    for position in (start + 600, (start + end) // 2, end - 100):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        unreadable(path, r"'w': .*model\.npz: expected \d+ bytes of member 'w.npy', found")


def test_a_checksum_that_does_not_match(tmp_path):
    path, content, _, _ = deflated(tmp_path, np.zeros(10_000))
    with zipfile.ZipFile(path) as archive:
        crc = struct.pack("<I", archive.getinfo("w.npy").CRC)
    at = content.rindex(crc)
    content[at : at + 4] = b"\0\0\0\0"
    path.write_bytes(content)
    tensor = lm.open_checkpoint(path)["w"]
    np.testing.assert_array_equal(tensor[:900].read(), np.zeros(900))
    with pytest.raises(lm.CheckpointError, match="Bad CRC-32"):
        tensor.read()


def damage(path: Path, value: float) -> None:
    """Changes a bit of a number that is stored as it is, and nothing else."""
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", value))] ^= 1
    path.write_bytes(content)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stored_members_are_compared_once_all_was_read(tmp_path_factory, data):
    """In whichever pieces and order, some of it twice; what was not all read is not compared."""
    array = numbers((40, 3))
    path = tmp_path_factory.mktemp("npz") / "model.npz"
    np.savez(path, a=array, w=array + 1000, z=array)
    if damaged := data.draw(st.booleans()):
        damage(path, 1000.0 + data.draw(st.integers(0, array.size - 1)))
    cuts = sorted({0, 40, *data.draw(st.lists(st.integers(1, 39), max_size=6))})
    rows = data.draw(st.permutations([slice(*pair) for pair in itertools.pairwise(cuts)]))
    tensor = lm.open_checkpoint(path)["w"]
    assert tensor[rows[0].start].read().shape == (3,)
    with pytest.raises(lm.CheckpointError, match="'w': .*checksum") if damaged else contextlib.nullcontext():
        for part in rows:
            found = tensor[part].read()
            assert damaged or (found == array[part] + 1000).all()
    assert len(tensor[:39].read()) == 39


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P()])
def test_a_damaged_member_is_not_materialized(tmp_path, mesh8, spec):
    path = tmp_path / "model.npz"
    np.savez(path, w=numbers((64, 64)), other=numbers((3,)))
    damage(path, 1234.0)
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((64, 64), jnp.bfloat16)}).shard(mesh8, {"w": spec})
    with pytest.raises(lm.CheckpointError, match="'w'.*checksum"):
        abstract.materialize({"w": lm.open_checkpoint(path)["w"]})


def archive(path: Path, name: str, content: bytes, size: int | None = None, **fields: Any) -> Path:
    """An archive with one member, whose directory says what `fields` say."""
    with zipfile.ZipFile(path, "w", fields.pop("method", zipfile.ZIP_DEFLATED)) as file:
        file.writestr(name, content)
        info = file.filelist[0]
        if size is not None:
            info.file_size = size
        for field, value in fields.items():
            setattr(info, field, value)
    return path


def header(shape: str, descr: str = "'<f4'", fortran: str = "False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize("saved", SAVE)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("(1099511627776,)") + b"1234", "expected 4398046511104 bytes for float32"),
        (header("(2,)") + b"1234", "expected 8 bytes for float32.2., found 4; it is truncated"),
        (header("(1,)") + b"12345678", "expected 4 bytes for float32.1., found 8"),
        (header("(-1,)"), "expected a shape of non-negative ints"),
        (header("(True,)") + b"1234", "expected a shape of non-negative ints"),
        (header("(0, 18446744073709551616)"), "expected a shape of non-negative ints"),
        (header("(" + "1, " * 40 + ")") + b"1234", "expected a shape of non-negative ints"),
        (header("1"), "expected the header of an array"),
        (header("__import__('os').getpid()"), "expected the header of an array"),
        (header("(" * 400 + ")" * 400), "expected the header of an array"),
        (header("()", "'|O'") + pickle.dumps([1]), "found pickled Python objects"),
        (header("(1,)", "[('a', '<f4'), ('b', '|O')]") + b"1234", "found pickled Python objects"),
        (header("(1,)", "[('a', '<f4')]") + b"1234", "records, text and dates cannot be weights"),
        (header("(1,)", "'<U1'") + b"1234", "records, text and dates"),
        (header("(1,)", "'<M8[s]'") + b"12345678", "records, text and dates"),
        (header("(1,)", "('<f4', (2,))") + b"12345678", "records, text|expected the header"),
        (header("(4,)", "'|V1'") + b"1234", r"1-byte values of an unknown type .*float8.*safetensors"),
        (b"\x93NUMPY\x03\x00" + header("(1,)")[8:], "it has version .3, 0."),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "expected the header of an array"),
        (b"\x93NUMPY\x01\x00", "expected the header of an array"),
    ],
)
def test_hostile_headers(tmp_path, saved, content, message):
    method = zipfile.ZIP_DEFLATED if saved == "deflated" else zipfile.ZIP_STORED
    path = archive(tmp_path / "model.npz", "w.npy", content, method=method)
    refused(path, message, "model.npz: array 'w'")
    (tmp_path / "w.npy").write_bytes(content)
    refused(tmp_path / "w.npy", message)


@pytest.mark.parametrize("saved", SAVE)
def test_bfloat16_and_what_numpy_does_not_know_either(tmp_path, saved, mesh8):
    """NumPy writes of bfloat16 that it has two bytes."""
    array = numbers((16, 8), ml_dtypes.bfloat16)
    SAVE[saved](tmp_path / "model.npz", w=array)
    np.save(tmp_path / "w.npy", np.asfortranarray(array))
    model = lm.build_abstract(lambda: {"w": jnp.zeros((16, 8), jnp.bfloat16)}).shard(mesh8, {"w": P("model")})
    for name in ("model.npz", "w.npy"):
        found = model.materialize(tmp_path / name)["w"]
        assert found.dtype == jnp.bfloat16 and np.asarray(found).tobytes() == array.tobytes()
    array = array.astype(ml_dtypes.float8_e4m3fn)
    SAVE[saved](tmp_path / "model.npz", w=array)
    refused(tmp_path / "model.npz", r"array 'w': expected numbers, found 1-byte values .*array\.view\('uint8'\)")
    SAVE[saved](tmp_path / "model.npz", w=array.view("uint8"))
    tensor = lm.open_checkpoint(tmp_path / "model.npz")["w"].view(ml_dtypes.float8_e4m3fn)
    assert tensor.read().tobytes() == array.tobytes()


def test_names_of_haiku(tmp_path):
    """AlphaFold's parameters are saved as `scope//name`."""
    scope, array = "alphafold/evoformer/~/left", numbers((3,))
    np.savez(tmp_path / "params.npz", **{f"{scope}//weights": array})
    model = lm.build_abstract(lambda: {scope: {"weights": jnp.zeros(3)}})
    np.testing.assert_array_equal(model.materialize(tmp_path / "params.npz")[scope]["weights"], array)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


CONTENT = npy(np.zeros(100_000))


def written(*members: tuple[str, bytes], overlap: bool = False) -> Any:
    """What writes an archive of some members, whatever they are called."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Duplicate name
            for member in members:
                file.writestr(*member)
            if overlap:
                file.filelist[1].header_offset = file.filelist[0].header_offset

    return write


def claims(**fields: Any) -> Any:
    return lambda path: archive(path, "w.npy", CONTENT, **fields)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (claims(size=1 << 40), "which cannot be as many"),
        (claims(size=1 << 20, method=zipfile.ZIP_STORED), "which cannot be as many"),
        (claims(method=zipfile.ZIP_BZIP2), "found method 12; unpack the archive, or load and save it again"),
        (claims(flag_bits=1), "encrypted"),
        (claims(compress_size=1 << 30), "truncated"),
        (claims(header_offset=7), "corrupt"),
        (claims(size=len(CONTENT) - 8), "expected 800000 bytes for float64.100000., found 799992"),
        (lambda path: path.write_bytes(claims()(path).read_bytes()[:-30]), "found a truncated or corrupt one"),
        (lambda path: path.write_bytes(b"nothing"), "found a truncated or corrupt one"),
        (written(("w.npy", CONTENT), ("w.npy", CONTENT)), "found two named 'w'"),
        (written(("w.npy", CONTENT), ("w", CONTENT)), "found two named 'w'"),
        (written(("v.npy", CONTENT), ("w.npy", CONTENT), overlap=True), "overlaps another"),
        (written(("w.npy", CONTENT), ("v.npy", b"\x92NUMPY\x01\x00")), "member 'v.npy', found b'.x92NUMPY'"),
    ],
)
def test_hostile_archives(tmp_path, write, message):
    write(tmp_path / "model.npz")
    refused(tmp_path / "model.npz", message)


# Folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_of_files(tmp_path):
    for name, array in arrays().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / name, array)
    (tmp_path / "config.json").touch()
    (tmp_path / ".hidden").mkdir()
    np.save(tmp_path / ".hidden" / "x.npy", np.zeros(1))
    with lm.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "numpy" and set(checkpoint) == set(arrays())
        for name, array in arrays().items():
            assert (checkpoint[name].read() == array).all()
            opened = [os.path.realpath(f"/dev/fd/{number}") for number in os.listdir("/dev/fd")]
            assert not any(path.startswith(str(tmp_path)) for path in opened), "more arrays than files may be open"
    found = inspected(tmp_path)
    assert (found["format"], len(found["tensors"]), found["problems"]) == ("numpy", len(arrays()), [])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: np.save(file, np.array([{}]), allow_pickle=True), "pickled Python objects"),
        (lambda file: file.write_bytes(b"nothing"), "expected the header of an array"),
        (lambda file: file.symlink_to("/etc/hostname"), "is a symbolic link to /etc/hostname"),
        (os.mkfifo, "found a folder, a pipe or a device"),
    ],
)
def test_what_is_wrong_in_a_folder(tmp_path, spoil, message):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "b").mkdir()
    spoil(tmp_path / "b" / "w.npy")
    refused(tmp_path, message)
