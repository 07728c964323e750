"""HDF5 weights: read in place where possible, through h5py where not, and refused where they point elsewhere."""

import ctypes
import json
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel._errors import CheckpointError
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.fill import fill_parts
from lazymodel._tensors.leaves import FileLeaf
from lazymodel.checkpoints import open_checkpoint
from lazymodel.checkpoints._hdf5_dataset import DatasetLeaf
from lazymodel.checkpoints._hdf5_header import layout_classes
from tests.private_memory import Peak

h5py = pytest.importorskip("h5py")


def numbers(shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.weights.h5"


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "u8", "?", "c8", ">f4", ">i2"])
def test_contiguous_datasets_are_read_in_place(path, dtype):
    array = numbers((4, 6)).astype(dtype)
    with h5py.File(path, "w") as file:
        file.create_dataset("layers/dense/vars/0", data=array)
        file.create_dataset("layers/dense/vars/1", data=array[0, 0])
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["layers/dense/vars/0", "layers/dense/vars/1"]
        tensor = checkpoint["layers/dense/vars/0"]
        assert isinstance(tensor.leaf, FileLeaf)
        assert tensor.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(tensor.T.read(), array.T)
        np.testing.assert_array_equal(tensor.read((slice(1, 3), slice(0, 6))), array[1:3])
        assert checkpoint.bytes_read == array.nbytes + array.nbytes // 2
        assert checkpoint["layers/dense/vars/1"].read() == array[0, 0]


def test_bfloat16_by_attribute(path):
    array = numbers((4, 6)).astype(ml_dtypes.bfloat16)
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array.view("V2")).attrs["dtype"] = "bfloat16"
        file.create_dataset("chunked", data=array.view("V2"), chunks=(2, 3)).attrs["dtype"] = "bfloat16"
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint["w"].leaf, FileLeaf)
    assert isinstance(checkpoint["chunked"].leaf, DatasetLeaf)
    for tensor in checkpoint.values():
        assert tensor.dtype == ml_dtypes.bfloat16
        assert tensor[:, ::2].read().tobytes() == array[:, ::2].tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (4, 5)},
        {"compression": "gzip"},
        {"chunks": (3, 20), "shuffle": True, "compression": "lzf"},
        {"fletcher32": True},
    ],
)
def test_other_datasets_are_read_chunk_by_chunk(path, options):
    array = numbers((16, 20))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, **options)
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint["w"]
        assert isinstance(tensor.leaf, DatasetLeaf)
        assert checkpoint.bytes_read == 0
        np.testing.assert_array_equal(tensor.read((slice(3, 9), slice(5, 10))), array[3:9, 5:10])
        stored = checkpoint.bytes_read  # of the chunks that the box touches, as stored
        assert 0 < stored <= array.nbytes + 64
        np.testing.assert_array_equal(tensor.T.reshape(4, 5, 16).read(), array.T.reshape(4, 5, 16))
        np.testing.assert_array_equal(tensor[::-3, 1::2].astype(np.float64).read(), array[::-3, 1::2])


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}])
def test_a_box_costs_the_chunks_it_touches_and_little_memory(path, filters):
    array = numbers((1024, 2048))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, chunks=(64, 128), **filters)
    checkpoint = open_checkpoint(path)
    tensor = checkpoint["w"]
    out = np.empty((1024, 128), np.float32)
    (part,) = fill_parts(tensor, [(slice(0, 1024), slice(128, 256))], [out])
    tracemalloc.start()
    part.run(Workspace(1 << 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(out, array[:, 128:256])
    assert checkpoint.bytes_read <= out.nbytes * 1.1
    assert peak <= tensor.leaf.unit_nbytes + (1 << 18)


FILTERS = ("shuffle", "gzip", "fletcher32", "lzf")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_box_of_every_chunked_dataset(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("chunked") / "model.weights.h5"
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = np.dtype(data.draw(st.sampled_from(["f4", ">f4", "f2", "i1", ">u8", "c8", "?"])))
    filters = data.draw(st.sets(st.sampled_from(FILTERS)))
    options = dict.fromkeys(filters & {"shuffle", "fletcher32"}, True)
    if filters & {"gzip", "lzf"}:
        options["compression"] = min(filters & {"gzip", "lzf"})
    written = data.draw(st.integers(0, shape[0]))  # rows; the rest is the fill value
    array = np.random.default_rng(0).integers(0, 9, shape).astype(dtype)
    array[written:] = 1
    with h5py.File(path, "w", libver=data.draw(st.sampled_from(["earliest", "latest"]))) as file:
        file["more"] = np.zeros(1 << 17, np.uint8)  # so that no dataset is larger than the file
        chunks = tuple(data.draw(st.integers(1, extent)) for extent in shape)
        dataset = file.create_dataset("w", shape, dtype, chunks=chunks, fillvalue=np.ones((), dtype)[()], **options)
        dataset[:written] = array[:written]
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint["w"]
        assert tensor.dtype == dtype.newbyteorder("=")
        np.testing.assert_array_equal(tensor.read(), array)
        index = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
        axes = data.draw(st.permutations(range(len(shape))))
        np.testing.assert_array_equal(tensor[index].transpose(axes).read(), array[index].transpose(axes))


def chunks_of(path, name="w"):
    """Byte offset and length of every stored chunk."""
    found = []
    with h5py.File(path) as file:
        file[name].id.chunk_iter(lambda info: found.append((info.byte_offset, info.size)))
    return found


def test_only_the_chunks_of_a_box_are_read_and_only_as_stored(path):
    array = np.random.default_rng(0).integers(0, 3, (64, 64)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, chunks=(16, 16), compression="gzip")
        file.create_dataset("lzf", data=array, chunks=(16, 16), compression="lzf")
        file.create_dataset("plain", data=array, chunks=(16, 16))
    box = (slice(20, 30), slice(0, 64))  # the second row of chunks
    for name in ("w", "lzf"):
        checkpoint = open_checkpoint(path)
        np.testing.assert_array_equal(checkpoint[name].read(box), array[box])
        assert checkpoint.bytes_read == sum(size for _, size in chunks_of(path, name)[4:8])
    checkpoint = open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint["plain"].read(box), array[box])
    assert checkpoint.bytes_read == array[box].nbytes  # not even whole chunks


def test_a_large_compressed_dataset_takes_the_memory_of_one_chunk(path):
    block = np.random.default_rng(0).integers(0, 50, (256, 4096)).astype(np.float32)
    with h5py.File(path, "w") as file:
        options = {"chunks": (128, 128), "compression": "gzip", "compression_opts": 1}
        dataset = file.create_dataset("w", (4096, 4096), np.float32, shuffle=True, **options)  # 64 MiB
        for row in range(0, 4096, 256):
            dataset[row : row + 256] = block + row
    leaf = open_checkpoint(path)["w"].leaf
    for out in (np.empty((4096, 4096), np.float32), np.empty((4096, 4096), np.float32).T):
        tracemalloc.start()
        leaf.fill_box((slice(0, 4096), slice(0, 4096)), out, (), Workspace(256 << 10))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
        for row in range(0, 4096, 256):
            assert (out[row : row + 256] == block + row).all()


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_what_the_library_keeps_does_not_grow_with_the_file(path):
    with h5py.File(path, "w") as file:
        for index in range(700):
            file.create_dataset(f"layers/{index}/vars/0", data=numbers((8, 64)), chunks=(8, 16), compression="gzip")
    with Peak() as peak, open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.values():
            tensor.read()
            tensor.leaf.release()
    assert peak.nbytes < 8 << 20


def test_chunks_go_to_devices_within_the_ceiling_of_host_memory(path, mesh8):
    array = numbers((512, 512))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, chunks=(64, 64), compression="gzip")
        file.create_dataset("whole", data=array, chunks=(512, 512), compression="gzip")
    checkpoint = open_checkpoint(path)
    sharding = NamedSharding(mesh8, PartitionSpec(None, "model"))

    def load(name, max_host_memory):
        item = StreamItem(name, checkpoint[name], (512, 512), np.dtype(np.float32), sharding)
        [(_, loaded)] = stream([item], max_host_memory=max_host_memory)
        return np.asarray(loaded)

    np.testing.assert_array_equal(load("w", 3 << 20), array)
    np.testing.assert_array_equal(load("whole", 64 << 20), array)
    with pytest.raises(CheckpointError, match=r"'whole' from tensor .*its chunks are that large"):
        load("whole", 3 << 20)


@pytest.mark.parametrize("filters", ["shuffle", "deflate", "shuffle deflate", "deflate fletcher32", "fletcher32"])
def test_unfiltered_chunks_at_the_edge_of_a_filtered_dataset(path, filters):
    """H5Pset_chunk_opts, which h5py does not offer: chunks that reach over the edge are stored as they are."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    library = next((line.split()[-1] for line in lines if "libhdf5" in line and "libhdf5_hl" not in line), None)
    if library is None:
        pytest.skip("cannot find the HDF5 library that h5py uses")
    set_chunk_opts = ctypes.CDLL(library).H5Pset_chunk_opts
    set_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    array = numbers((10, 7))
    with h5py.File(path, "w", libver="latest") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4, 4))
        for name in filters.split():
            getattr(plist, f"set_{name}")(*((4,) if name == "deflate" else ()))
        assert set_chunk_opts(plist.id, 2) == 0
        space = h5py.h5s.create_simple(array.shape)
        h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, space, plist).write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    np.testing.assert_array_equal(open_checkpoint(path)["w"].read(), array)


def test_chunks_behind_a_user_block(path):
    array = numbers((10, 7))
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("w", data=array, chunks=(4, 4))
        file.create_dataset("z", data=array, chunks=(4, 4), compression="gzip")
    for tensor in open_checkpoint(path).values():
        np.testing.assert_array_equal(tensor.read(), array)


def test_what_was_never_written_is_the_fill_value_or_refused(path):
    with h5py.File(path, "w") as file:
        file["more"] = np.zeros(1000, np.uint8)
        file.create_dataset("filled", (4,), np.float32, fillvalue=2.5)
        file.create_dataset("sparse", (4,), np.float32, chunks=(2,), fillvalue=2.5)[:2] = 1
        for name, chunks in (("undefined", None), ("undefined chunk", (2,))):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if chunks:
                plist.set_chunk(chunks)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), plist)
    checkpoint = open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint["filled"].read(), [2.5] * 4)
    np.testing.assert_array_equal(checkpoint["sparse"].read(), [1, 1, 2.5, 2.5])
    with pytest.raises(CheckpointError, match=r"'undefined': expected 16 bytes, found none written, and no fill value"):
        checkpoint["undefined"]
    with pytest.raises(
        CheckpointError, match=r"'undefined chunk' of .*expected values in \[0:2\], found a chunk that wa"
    ):
        checkpoint["undefined chunk"].read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "gzip"}, r"cannot read dataset 'w' of .*model\.weights\.h5: Error -3 while decompressing"),
        ({"fletcher32": True}, "cannot read dataset 'w' of .* expected a chunk of checksum .* found another"),
        ({"compression": "gzip", "fletcher32": True}, "expected a chunk of checksum"),
        ({"compression": "lzf"}, "cannot read dataset 'w' of "),
    ],
)
def test_damaged_chunks_are_refused(path, options, message):
    array = numbers((64, 64))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, chunks=(32, 64), **options)
    offset, size = chunks_of(path)[1]
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * (size - 4))
    tensor = open_checkpoint(path)["w"]
    np.testing.assert_array_equal(tensor[:32].read(), array[:32])
    with pytest.raises(CheckpointError, match=message):
        tensor[32:].read()


def test_a_chunk_that_inflates_to_more_than_its_shape_is_refused_before_it_does(path):
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("w", (8192,), np.float32, chunks=(4096,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(16 << 20)))
        dataset.id.write_direct_chunk((4096,), zlib.compress(bytes(100)))
    tensor = open_checkpoint(path)["w"]
    tracemalloc.start()
    for half, found in ((tensor[:4096], 16385), (tensor[4096:], 100)):
        with pytest.raises(CheckpointError, match=rf"expected a chunk of 16384 bytes, found {found}; it is corrupt"):
            half.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_types_that_need_conversion_are_converted_by_the_library(path):
    with h5py.File(path, "w") as file:
        short, half = h5py.h5t.STD_I16LE.copy(), h5py.h5t.IEEE_F32LE.copy()
        short.set_precision(12)
        half.set_fields(15, 7, 8, 0, 7)  # bfloat16 as a number: sign, exponent and mantissa
        half.set_size(2)
        for name, stored, dtype in (("short", short, np.int16), ("half", half, np.float32)):
            values = np.array([1, 2, -3, 4], dtype)
            for suffix, chunk in (("", None), (" chunked", (3,))):
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                if chunk:
                    plist.set_chunk(chunk)
                space = h5py.h5s.create_simple((4,))
                dataset = h5py.h5d.create(file.id, (name + suffix).encode(), stored, space, plist)
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    for name, tensor in open_checkpoint(path).items():
        assert isinstance(tensor.leaf, DatasetLeaf)
        assert tensor.dtype == (np.int16 if name.startswith("short") else np.float32)
        np.testing.assert_array_equal(tensor[1:].read(), [2, -3, 4])


def test_bfloat16_needs_nothing_from_a_damaged_heap(path):
    """The library loops for ever, or takes gigabytes, when it reads a string from a damaged heap."""
    array = numbers((4, 6)).astype(ml_dtypes.bfloat16)
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array.view("V2")).attrs["dtype"] = "bfloat16"
        file.create_dataset("unmarked", data=array.view("V2"))
        file.create_dataset("short", data=array.view("u2")).attrs["dtype"] = "bfloat16"
    content = bytearray(path.read_bytes())
    start = content.index(b"GCOL") + 16
    content[start : start + 64] = b"\xff" * 64
    path.write_bytes(content)
    checkpoint = open_checkpoint(path)
    assert checkpoint["w"].read().tobytes() == array.tobytes()
    with pytest.raises(CheckpointError, match=r"'unmarked': expected numbers, or bfloat16.* found \|V2;"):
        checkpoint["unmarked"]
    with pytest.raises(CheckpointError, match=r"'short': expected numbers, or bfloat16.* found uint16 with a dtype"):
        checkpoint["short"]


@pytest.mark.parametrize("name", [b"\xff", b"a/" * 2048 + b"a"])
def test_names_that_nobody_could_print_or_would_choose_are_refused(path, name):
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        plist.set_create_intermediate_group(True)
        h5py.h5d.create(file.id, name, h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), lcpl=plist)
    with pytest.raises(CheckpointError, match=r"model\.weights\.h5: expected names of UTF-8, paths of at most 4096"):
        open_checkpoint(path)


def test_scalars_empty_arrays_and_compact_datasets(path):
    with h5py.File(path, "w") as file:
        file["scalar"] = np.float32(2.5)
        file["empty"] = np.zeros((0, 3), np.float32)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3,))
        dataset = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, space, dcpl=plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(3, dtype=np.float32))
        dataset.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint["scalar"].read() == 2.5
    assert checkpoint["empty"].read().shape == (0, 3)
    np.testing.assert_array_equal(checkpoint["compact"].read(), [0, 1, 2])


def test_user_blocks_shift_offsets(path):
    array = numbers((4, 6))
    with h5py.File(path, "w", userblock_size=1024) as file:
        file["w"] = array
    tensor = open_checkpoint(path)["w"]
    np.testing.assert_array_equal(tensor.read(), array)


def test_tensors_outlive_their_checkpoint(path):
    array = numbers((4, 6))
    with h5py.File(path, "w") as file:
        file.create_dataset("g/w", data=array)
        file.create_dataset("g/c", data=array, chunks=(2, 3))
    with open_checkpoint(path) as checkpoint:
        tensors = list(checkpoint.values())
    del checkpoint
    for tensor in tensors:
        assert tensor.file == str(path)
        np.testing.assert_array_equal(tensor[1:3].read(), array[1:3])


def keras_archive(path, compression=zipfile.ZIP_STORED, before=b"{}"):
    array = numbers((4, 6))
    inner = path.with_name("inner.h5")
    with h5py.File(inner, "w") as file:
        file["layers/dense/vars/0"] = array
        file.create_dataset("layers/dense/vars/1", data=array, chunks=(2, 3))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("config.json", before)
        archive.write(inner, "model.weights.h5")
    return array


def test_archives_are_read_in_place(tmp_path):
    path = tmp_path / "model.keras"
    array = keras_archive(path)
    (tmp_path / "inner.h5").unlink()
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["layers/dense/vars/0", "layers/dense/vars/1"]
        for tensor in checkpoint.values():
            np.testing.assert_array_equal(tensor[:, 2].read(), array[:, 2])
        assert isinstance(checkpoint["layers/dense/vars/0"].leaf, FileLeaf)
        assert checkpoint.files == [str(path)]


def test_compressed_and_broken_archives_are_refused(tmp_path):
    path = tmp_path / "model.keras"
    keras_archive(path, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"model\.keras: expected model\.weights\.h5 to be stored without"):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.json", "{}" + " " * 10_000)
    with pytest.raises(CheckpointError, match=r"expected model\.weights\.json to be stored without"):
        open_checkpoint(path)
    keras_archive(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(
        CheckpointError, match=r"model\.keras: expected a \.keras archive, found one that is truncated or"
    ):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(CheckpointError, match=r"expected model\.weights\.h5 in the archive, found 'config\.json'"):
        open_checkpoint(path)


def sharded(folder, weight_map=None):
    one, two = numbers((4, 6)), numbers((3,))
    with h5py.File(folder / "model_00000.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = one
    with h5py.File(folder / "model_00001.weights.h5", "w") as file:
        file["layers/dense/vars/1"] = two
        file["vars/0"] = two + 1
    shards = weight_map or {
        "/layers/dense/vars": ["model_00000.weights.h5", "model_00001.weights.h5"],
        "/vars": "model_00001.weights.h5",
    }
    (folder / "model.weights.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
    return {"layers/dense/vars/0": one, "layers/dense/vars/1": two, "vars/0": two + 1}


@pytest.mark.parametrize("opened", [".", "model.weights.json"])
def test_sharded_weights(tmp_path, opened):
    expected = sharded(tmp_path)
    with open_checkpoint(tmp_path / opened) as checkpoint:
        assert set(checkpoint) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(checkpoint[name].read(), array)
        assert len(checkpoint.files) == 2


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"/layers/dense/vars": "absent.weights.h5"}, r"missing absent\.weights\.h5"),
        (
            {"/layers/other/vars": "model_00000.weights.h5"},
            r"model_00000\.weights\.h5: lacks 1 group \('layers/other/vars'\), which .* says it has",
        ),
        ({"/vars": "../model_00001.weights.h5"}, "inside its folder"),
        ({"/vars": [1]}, "expected a shard's file name, found 1"),
    ],
)
def test_hostile_shard_maps(tmp_path, weight_map, message):
    sharded(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message) as info:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(info.value)


def test_sharded_archive(tmp_path):
    expected = sharded(tmp_path)
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("model.weights.json", "model_00000.weights.h5", "model_00001.weights.h5"):
            archive.write(tmp_path / name, name)
    checkpoint = open_checkpoint(path)
    for name, array in expected.items():
        np.testing.assert_array_equal(checkpoint[name].read(), array)


def test_external_links_storage_and_virtual_datasets_are_refused(tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["w"] = numbers((4,))
    (tmp_path / "raw.bin").write_bytes(b"1" * 64)

    def refused(message, make):
        path = tmp_path / f"{make.__name__}{len(list(tmp_path.iterdir()))}.h5"
        with h5py.File(path, "w") as file:
            make(file)
        with pytest.raises(CheckpointError, match=message) as info:
            list(open_checkpoint(path).values())
        assert str(path) in str(info.value)

    def virtual(file):
        layout = h5py.VirtualLayout((4,), np.float32)
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "w", (4,))
        file.create_virtual_dataset("w", layout)

    refused(
        "'a/w' links to 'secret.h5'",
        lambda f: f.create_group("a").__setitem__("w", h5py.ExternalLink("secret.h5", "w")),
    )
    refused("'w' is virtual", virtual)
    refused(
        r"found them in '.*raw\.bin'",
        lambda f: f.create_dataset("w", (4,), np.float32, external=[(str(tmp_path / "raw.bin"), 0, 64)]),
    )
    refused("'w' is a link to '/absent'", lambda f: f.__setitem__("w", h5py.SoftLink("/absent")))
    refused("expected numbers, .*found object", lambda f: f.__setitem__("w", ["text"]))
    refused("expected numbers, .*found .*V3", lambda f: f.__setitem__("w", np.zeros(3, "V3")))


@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_a_virtual_dataset_is_refused_before_the_library_opens_it(path, version, userblock):
    """Opening one whose description is damaged can crash the library, or keep it busy for ever."""
    with h5py.File(path, "w", libver=version, userblock_size=userblock) as file:
        file["plain"] = numbers((4,))
        layout = h5py.VirtualLayout((4,), np.float32)
        layout[:] = h5py.VirtualSource("elsewhere.h5", "w", (4,))
        file.create_virtual_dataset("layers/virtual", layout)
        file["soft"] = h5py.SoftLink("/layers/virtual")
    content = path.read_bytes()
    heap = content.index(b"GCOL")  # the global heap, in which the description is
    path.write_bytes(content[:heap] + b"\xff" * (len(content) - heap))
    with pytest.raises(CheckpointError, match=r"'layers/virtual' is virtual: .*references to other datasets") as info:
        open_checkpoint(path)
    assert str(path) in str(info.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_class_of_storage_is_what_the_library_says(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("header") / "x.h5"
    layout = data.draw(st.sampled_from([h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED]))
    with h5py.File(
        path,
        "w",
        libver=data.draw(st.sampled_from(["earliest", "v108", "v110", "latest"])),
        track_order=data.draw(st.booleans()),
    ) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(layout)
        plist.set_obj_track_times(data.draw(st.booleans()))
        plist.set_attr_creation_order(data.draw(st.sampled_from([0, h5py.h5p.CRT_ORDER_TRACKED])))
        if layout == h5py.h5d.CHUNKED:
            plist.set_chunk((2,))
        h5py.h5d.create(file.id, b"w", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((4,)), plist)
        for index in range(data.draw(st.integers(0, 20))):  # which need blocks of their own
            file["w"].attrs[f"attribute {index}"] = "x" * data.draw(st.integers(0, 300))
        file.create_group("g").attrs["a"] = 1
    content = path.read_bytes()
    with h5py.File(path) as file:
        for name, expected in (("w", {layout}), ("g", set())):
            address = file.id.links.get_info(name.encode()).u
            found = layout_classes(lambda at, count: content[at : at + count], address, (8, 8))
            assert found == expected


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "no object header"),
        (b"\0" * 64, "no object header"),
        (b"OHDR\x03" + bytes(59), "no object header"),
        (b"\1\0\1\0" + bytes(4) + b"\xff\xff\xff\x7f" + bytes(20), "does not end"),
        (b"\1\0\1\0" + bytes(4) + b"\xff\xff\0\0" + bytes(20), "is cut off"),
        (b"\1\0\1\0" + bytes(4) + b"\x10\0\0\0" + bytes(4) + b"\1\0\xff\0" + bytes(12), "message .* is cut off"),
        (b"\1\0\1\0" + bytes(4) + b"\x18\0\0\0" + bytes(4) + b"\x10\0\x10\0" + bytes(4)
         + (16).to_bytes(8, "little") + (24).to_bytes(8, "little"), "does not end"),
        (b"\1\0\1\0" + bytes(4) + b"\x10\0\0\0" + bytes(4) + b"\x08\0\x08\0" + bytes(12), "has version 0"),
    ],
)  # fmt: skip
def test_headers_that_are_none(header, message):
    with pytest.raises(ValueError, match=message):
        layout_classes(lambda at, count: header[at : at + count], 0, (8, 8))


def test_links_inside_the_file_are_followed(path):
    with h5py.File(path, "w") as file:
        file["g/w"] = numbers((4,))
        file["soft"] = h5py.SoftLink("/g/w")
        file["g/circle"] = file["/"]
    checkpoint = open_checkpoint(path)
    assert list(checkpoint) == ["g/w", "soft"]
    np.testing.assert_array_equal(checkpoint["soft"].read(), numbers((4,)))


def test_declared_sizes_are_checked_against_the_file(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("bomb", (1 << 40,), np.float32, chunks=(1 << 16,), compression="gzip")
    with pytest.raises(CheckpointError, match=r"'bomb': expected 4398046511104 bytes .*found 0 stored"):
        open_checkpoint(path)["bomb"]
    path = path.with_name("contiguous.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("bomb", (1 << 40,), np.float32)
    with pytest.raises(CheckpointError, match=r"'bomb': expected 4398046511104 bytes .*found 0 stored"):
        open_checkpoint(path)["bomb"]


def test_truncated_files(path):
    with h5py.File(path, "w") as file:
        file["w"] = numbers((1000, 10))
    content = path.read_bytes()
    path.write_bytes(content[:-20_000])
    with pytest.raises(
        CheckpointError, match=r"model\.weights\.h5: expected an HDF5 file of \d+ bytes, found one that is truncated"
    ):
        open_checkpoint(path)
    path.write_bytes(b"not hdf5 at all")
    with pytest.raises(CheckpointError, match=r"model\.weights\.h5"):
        open_checkpoint(path)


def test_files_that_keras_writes(tmp_path):
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(2, dtype="bfloat16")])
    model.save_weights(tmp_path / "m.weights.h5")
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "s.weights.json", max_shard_size=1e-7)
    weights = [np.asarray(weight) for weight in model.get_weights()]
    for name in ("m.weights.h5", "m.keras", "s.weights.json"):
        checkpoint = open_checkpoint(tmp_path / name)
        found = {key: tensor for key, tensor in checkpoint.items() if key.startswith("layers/")}
        assert all(isinstance(tensor.leaf, FileLeaf) for tensor in found.values())
        values = [found[key].read() for key in sorted(found)]
        assert [value.dtype.name for value in values] == [weight.dtype.name for weight in weights]
        for value, weight in zip(values, weights, strict=True):
            np.testing.assert_array_equal(value, weight)
