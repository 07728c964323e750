"""HDF5 weights: read in place where possible, through h5py where not, and refused where they point elsewhere."""

import sys
import tracemalloc
import zipfile
import zlib
from types import SimpleNamespace

import h5py
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.core.checkpoints._formats import numbers, refused
from tests.private_memory import Peak
from tests.small import read_within


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.weights.h5"


@pytest.mark.parametrize("userblock", [0, 512])
def test_contiguous_datasets_are_read_in_place(path, userblock):
    arrays = {dtype: numbers((4, 6)).astype(dtype) for dtype in ("f4", "f2", "f8", "i1", "u8", "?", "c8", ">f4", ">i2")}
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for name, array in arrays.items():
            file[f"layers/{name}/vars/0"] = array
            file[f"layers/{name}/vars/1"] = array[0, 0]
        file["empty"] = np.zeros((0, 3), np.float32)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        dataset = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((3,)), dcpl=plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(3, dtype=np.float32))
    with lm.open_checkpoint(path) as checkpoint:
        assert len(checkpoint) == 2 * len(arrays) + 2
        for name, array in arrays.items():
            tensor, before = checkpoint[f"layers/{name}/vars/0"], checkpoint.bytes_read
            assert tensor.dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(tensor.T.read(), array.T)
            np.testing.assert_array_equal(tensor.read((slice(1, 3), slice(0, 6))), array[1:3])
            assert checkpoint.bytes_read - before == array.nbytes + array.nbytes // 2
            assert checkpoint[f"layers/{name}/vars/1"].read() == array[0, 0]
        assert checkpoint["empty"].read().shape == (0, 3)
        np.testing.assert_array_equal(checkpoint["compact"].read(), [0, 1, 2])


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
    version, block = data.draw(st.sampled_from(["earliest", "latest"])), data.draw(st.sampled_from([0, 512]))
    with h5py.File(path, "w", libver=version, userblock_size=block) as file:
        file["more"] = np.zeros(1 << 17, np.uint8)  # so that no dataset is larger than the file
        chunks = tuple(data.draw(st.integers(1, extent)) for extent in shape)
        dataset = file.create_dataset("w", shape, dtype, chunks=chunks, fillvalue=np.ones((), dtype)[()], **options)
        dataset[:written] = array[:written]
    with lm.open_checkpoint(path) as checkpoint:
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
        checkpoint = lm.open_checkpoint(path)
        np.testing.assert_array_equal(checkpoint[name].read(box), array[box])
        assert checkpoint.bytes_read == sum(size for _, size in chunks_of(path, name)[4:8])
    checkpoint = lm.open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint["plain"].read(box), array[box])
    assert checkpoint.bytes_read == array[box].nbytes  # not even whole chunks


@pytest.mark.parametrize("options", [{"compression": "gzip", "shuffle": True}, {}], ids=["gzip", "plain"])
def test_a_chunked_dataset_takes_the_memory_of_some_chunks(path, options):
    array = numbers((480, 512))  # 960 KiB
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, chunks=(64, 64), **options)
    tensor = lm.open_checkpoint(path)["w"]
    for view, expected in ((tensor, array), (tensor.T, array.T)):
        found, extra = read_within(view, 48 << 10)
        assert extra < 160 << 10
        assert (found == expected).all()


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_what_the_library_keeps_does_not_grow_with_the_file(path):
    with h5py.File(path, "w") as file:
        for index in range(300):
            file.create_dataset(f"layers/{index}/vars/0", data=numbers((8, 64)), chunks=(8, 16), compression="gzip")
    with Peak() as peak, lm.open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.values():
            tensor.read()
    assert peak.nbytes < 8 << 20


def test_chunks_go_to_devices_within_the_ceiling_of_host_memory(path, mesh8):
    array = numbers((512, 512))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, chunks=(64, 64), compression="gzip")
        file.create_dataset("whole", data=array, chunks=(512, 512), compression="gzip")
    checkpoint = lm.open_checkpoint(path)

    def load(name, max_host_memory):
        model = lm.build_abstract(lambda: {name: jnp.zeros((512, 512))}).shard(mesh8, {name: P(None, "model")})
        return np.asarray(model.materialize({name: checkpoint[name]}, max_host_memory=max_host_memory)[name])

    np.testing.assert_array_equal(load("w", 3 << 20), array)
    np.testing.assert_array_equal(load("whole", 64 << 20), array)
    with pytest.raises(lm.CheckpointError, match=r"'whole' from tensor .* takes 4\.00 MiB"):
        load("whole", 3 << 20)


class Claims:
    """A dataset as h5py's own functions see it, in which a chunk claims something else. Its values are never asked for:
    HDF5 1.14.6 believes what a file claims of its chunks, and returns memory that nobody wrote.
    """

    def __init__(self, dataset, size=None, content=b""):
        self.dataset, self.size, self.content = dataset, size, content

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def chunk_iter(self, note):
        def changed(info):
            return note(
                SimpleNamespace(chunk_offset=info.chunk_offset, size=info.size if self.size is None else self.size)
            )

        return self.dataset.chunk_iter(changed)

    def read_direct_chunk(self, start):
        return 0, self.content

    def read(self, *_):
        raise AssertionError("the library is asked for values")


@pytest.mark.parametrize(("options", "size"), [({}, 0), ({}, 12), ({"fletcher32": True}, 0), ({"fletcher32": True}, 8)])
def test_a_chunk_of_another_size_is_refused(path, options, size, monkeypatch):
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=np.ones(4, np.float32), chunks=(2,), **options)
    original = h5py.Dataset.id.fget
    monkeypatch.setattr(h5py.Dataset, "id", property(lambda self: Claims(original(self), size)))
    found = rf"chunks of 8 bytes, found one of {size}" if not options else f"a chunk of 8 bytes, found {size}"
    if (options, size) == ({"fletcher32": True}, 8):
        found = "the library is asked"  # it has its values, and the library finds that its checksum is missing
    with pytest.raises(lm.CheckpointError, match=found):
        lm.open_checkpoint(path)["w"].read()


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
    checkpoint = lm.open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint["filled"].read(), [2.5] * 4)
    np.testing.assert_array_equal(checkpoint["sparse"].read(), [1, 1, 2.5, 2.5])
    for name, found in (("undefined", "16 bytes, found none"), ("undefined chunk", "2 chunks, found 0")):
        with pytest.raises(lm.CheckpointError, match=f"'{name}': expected {found} written, and no fill value"):
            checkpoint[name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "gzip"}, "cannot read dataset .w. of .*filter"),
        ({"fletcher32": True}, "cannot read dataset 'w' of .*filter"),
        ({"compression": "gzip", "fletcher32": True}, "cannot read dataset .w. of .*filter"),
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
    tensor = lm.open_checkpoint(path)["w"]
    np.testing.assert_array_equal(tensor[:32].read(), array[:32])
    with pytest.raises(lm.CheckpointError, match=message):
        tensor[32:].read()


@pytest.mark.parametrize("claimed", [16 << 20, 100])
def test_a_chunk_that_inflates_to_anything_but_its_shape_is_refused_before_it_does(path, claimed, monkeypatch):
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=np.ones(4096, np.float32), chunks=(4096,), compression="gzip")
    original = h5py.Dataset.id.fget
    content = zlib.compress(bytes(claimed))
    monkeypatch.setattr(h5py.Dataset, "id", property(lambda self: Claims(original(self), None, content)))
    tensor = lm.open_checkpoint(path)["w"]
    found = min(claimed, 16385)
    tracemalloc.start()
    with pytest.raises(lm.CheckpointError, match=rf"expected a chunk of 16384 bytes, found {found}; it is corrupt"):
        tensor.read()
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
    for name, tensor in lm.open_checkpoint(path).items():
        assert tensor.dtype == (np.int16 if name.startswith("short") else np.float32)
        np.testing.assert_array_equal(tensor[1:].read(), [2, -3, 4])


def test_bfloat16_needs_no_string_of_the_file(path, monkeypatch):
    """The attribute is a string in a heap of the file. HDF5 1.14.6 does not return when it reads one
    from a heap that is damaged."""
    array = numbers((4, 6)).astype(ml_dtypes.bfloat16)
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array.view("V2")).attrs["dtype"] = "bfloat16"
        file.create_dataset("unmarked", data=array.view("V2"))
        file.create_dataset("short", data=array.view("u2")).attrs["dtype"] = "bfloat16"
    asked = []

    def open_attribute(*arguments):
        attribute = original(*arguments)
        asked.append(attribute.name)
        return SimpleNamespace(shape=attribute.shape, get_type=attribute.get_type)  # which cannot be read

    original = h5py.h5a.open
    monkeypatch.setattr(h5py.h5a, "open", open_attribute)
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", None)
    checkpoint = lm.open_checkpoint(path)
    assert checkpoint["w"].read().tobytes() == array.tobytes()
    with pytest.raises(lm.CheckpointError, match=r"'unmarked': expected numbers, or bfloat16.* found \|V2;"):
        checkpoint["unmarked"]
    with pytest.raises(lm.CheckpointError, match=r"'short': expected numbers, or bfloat16.* found uint16 with a dtype"):
        checkpoint["short"]
    assert asked == [b"dtype"] * 2


@pytest.mark.parametrize("name", [b"\xff", b"a/" * 2048 + b"a"])
def test_names_that_nobody_could_print_or_would_choose_are_refused(path, name):
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        plist.set_create_intermediate_group(True)
        h5py.h5d.create(file.id, name, h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), lcpl=plist)
    refused(path, r"model\.weights\.h5: expected names of UTF-8, paths of at most 4096")


def keras_archive(path, compression=zipfile.ZIP_STORED):
    inner = path.with_name("inner.h5")
    with h5py.File(inner, "w") as file:
        file["layers/dense/vars/0"] = numbers((4, 6))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("config.json", "{}")
        archive.write(inner, "model.weights.h5")


def test_compressed_and_broken_archives_are_refused(tmp_path):
    path = tmp_path / "model.keras"
    keras_archive(path, zipfile.ZIP_DEFLATED)
    refused(path, r"model\.keras: expected model\.weights\.h5 to be stored without")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.json", "{}" + " " * 10_000)
    refused(path, r"expected model\.weights\.json to be stored without")
    keras_archive(path)
    path.write_bytes(path.read_bytes()[:-200])
    refused(path, r"model\.keras: expected a \.keras archive, found a truncated or")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    refused(path, r"expected model\.weights\.h5 in the archive, found 'config\.json'")


def virtual(file, name, source):
    layout = h5py.VirtualLayout((4,), np.float32)
    layout[:] = h5py.VirtualSource(source, "w", (4,))
    file.create_virtual_dataset(name, layout)


ELSEWHERE = {
    "an external link": (
        "'a/w' links to 'secret.h5'",
        lambda file: file.create_group("a").__setitem__("w", h5py.ExternalLink("secret.h5", "w")),
    ),
    "a virtual dataset": ("'w' is virtual", lambda file: virtual(file, "w", "secret.h5")),
    "external storage": (
        r"found them in '.*raw\.bin'",
        lambda file: file.create_dataset("w", (4,), np.float32, external=[("raw.bin", 0, 64)]),
    ),
    "a broken link": ("'w' is a link to '/absent'", lambda file: file.__setitem__("w", h5py.SoftLink("/absent"))),
    "text": ("expected numbers, .*found object", lambda file: file.__setitem__("w", ["text"])),
    "a type of 3 bytes": ("expected numbers, .*found .*V3", lambda file: file.__setitem__("w", np.zeros(3, "V3"))),
    "chunks that are not there": (
        r"'w': expected 4398046511104 bytes .*found 0 stored",
        lambda file: file.create_dataset("w", (1 << 40,), np.float32, chunks=(1 << 16,), compression="gzip"),
    ),
    "bytes that are not there": (
        r"'w': expected 4398046511104 bytes .*found 0 stored",
        lambda file: file.create_dataset("w", (1 << 40,), np.float32),
    ),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_what_is_elsewhere_or_no_numbers_is_refused(path, kind, monkeypatch):
    monkeypatch.chdir(path.parent)
    with h5py.File(path.parent / "secret.h5", "w") as file:
        file["w"] = numbers((4,))
    (path.parent / "raw.bin").write_bytes(b"1" * 64)
    message, make = ELSEWHERE[kind]
    with h5py.File(path, "w") as file:
        make(file)
    refused(path, message)


@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_a_virtual_dataset_is_refused_before_the_library_opens_it(path, version, userblock, monkeypatch):
    """Opening one whose description is damaged has crashed the library, and kept it busy for ever."""
    with h5py.File(path, "w", libver=version, userblock_size=userblock) as file:
        file["plain"] = numbers((4,))
        virtual(file, "layers/virtual", "elsewhere.h5")
        file["soft"] = h5py.SoftLink("/layers/virtual")
    opened = []
    original = h5py.Group.__getitem__
    monkeypatch.setattr(h5py.Group, "__getitem__", lambda self, name: opened.append(name) or original(self, name))
    refused(path, r"'layers/virtual' is virtual: .*references to other datasets")
    assert "layers" in opened and not {"virtual", "layers/virtual", "soft"} & set(opened)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_layout_of_a_header_is_understood(tmp_path_factory, data):
    """Whatever else is in it: how values are stored is found in the header before the library may open the dataset."""
    path = tmp_path_factory.mktemp("header") / "x.h5"
    layouts = [h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED, h5py.h5d.VIRTUAL]
    layout = data.draw(st.sampled_from(layouts))
    version = data.draw(st.sampled_from(["earliest", "v108", "v110", "latest"]))
    values = numbers((4,))
    with h5py.File(path, "w", libver=version, track_order=data.draw(st.booleans())) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(layout)
        plist.set_obj_track_times(data.draw(st.booleans()))
        plist.set_attr_creation_order(data.draw(st.sampled_from([0, h5py.h5p.CRT_ORDER_TRACKED])))
        if layout == h5py.h5d.CHUNKED:
            plist.set_chunk((2,))
        space = h5py.h5s.create_simple((4,))
        if layout == h5py.h5d.VIRTUAL:
            plist.set_virtual(space, b"elsewhere.h5", b"w", space)
        dataset = h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, space, plist)
        if layout != h5py.h5d.VIRTUAL:
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        for index in range(data.draw(st.integers(0, 20))):  # which need blocks of their own
            file["w"].attrs[f"attribute {index}"] = "x" * data.draw(st.integers(0, 300))
        file.create_group("g").attrs["a"] = 1
    if layout == h5py.h5d.VIRTUAL:
        refused(path, "'w' is virtual")
    else:
        with lm.open_checkpoint(path) as checkpoint:
            assert list(checkpoint) == ["w"]
            np.testing.assert_array_equal(checkpoint["w"].read(), values)


def test_links_inside_the_file_are_followed(path):
    with h5py.File(path, "w") as file:
        file["g/w"] = numbers((4,))
        file["soft"] = h5py.SoftLink("/g/w")
        file["g/circle"] = file["/"]
    checkpoint = lm.open_checkpoint(path)
    assert list(checkpoint) == ["g/w", "soft"]
    np.testing.assert_array_equal(checkpoint["soft"].read(), numbers((4,)))


# At URLs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(object_server):
    """A file with 60 datasets of 20 kB, ten to a group, as Keras lays them out."""
    path = object_server.root / "ahead.weights.h5"
    with h5py.File(path, "w") as file:
        for layer in range(6):
            for number in range(10):
                file[f"layers/block_{layer}/part_{number}/vars/0"] = np.full(5_000, 10 * layer + number, "float32")
    yield path
    path.unlink()


def test_what_lists_the_datasets_is_fetched_many_pieces_at_a_time(served, object_server):
    object_server.configure(latency=0.01)
    with lm.open_checkpoint(object_server.url(served.name)) as checkpoint:
        names = list(checkpoint)
        sent = object_server.counters()
        assert sent["most_in_flight"] >= 8
        assert sent["requests"] < 90, "the library asked for nothing by itself, which takes 95"
        assert sent["bytes"] < served.stat().st_size / 2
        assert len(names) == 60
        for name in names[::7]:
            layer, number = (int(part.split("_")[1]) for part in name.split("/")[1:3])
            assert set(checkpoint[name].read().tolist()) == {10 * layer + number}


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_refused_as_on_a_disk(seed, served, object_server):
    """Whatever is followed of what is damaged, it ends."""
    content = bytearray(served.read_bytes())
    rng = np.random.default_rng(seed)
    for sign in (b"TREE", b"SNOD", b"HEAP"):
        at = content.find(sign) + 4
        content[at : at + 200] = rng.integers(0, 256, 200, np.uint8).tobytes()
    served.write_bytes(content)
    refused(served, "corrupt|cannot")
    refused(object_server.url(served.name), "corrupt|cannot", served.name)
    assert object_server.counters()["bytes"] < 2 * len(content)


def test_a_filter_after_gzip_is_an_error_that_names_file_and_dataset(tmp_path):
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_deflate(1)
        plist.set_shuffle()
        space = h5py.h5s.create_simple((4,))
        dataset = h5py.h5d.create(file.id, b"w", h5py.h5t.NATIVE_FLOAT, space, plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ones(4, "float32"))
    with pytest.raises(lm.CheckpointError, match=r"model\.weights\.h5: dataset 'w': .* gzip"):
        lm.open_checkpoint(path)["w"].read()
