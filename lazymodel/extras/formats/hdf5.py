"""HDF5 files as Keras writes them: `.weights.h5`, sharded `.weights.json`, and `.keras` archives read in place.

Values that the file stores as they are in memory (contiguous datasets, as Keras writes them) are read straight from
the file at the offset that the HDF5 library reports. Everything else is read through h5py, which is imported on first
use. Each dataset is checked against the bytes that are there before it is believed, and whatever leads out of the file
(external links, virtual datasets) is rejected. The library would inflate whatever a chunk claims to be, so deflated
chunks are inflated here before, with a limit.

Object headers are read without the library as far as must be known before it opens a dataset: it crashes on damaged
descriptions of virtual datasets, before anyone can ask it whether a dataset is virtual. At URLs the parts of a file
that list its datasets are fetched many at a time, before the library reads one after the other. Format: HDF5 File
Format Specification 3.0, sections III.A.1 (B-trees), III.C (symbol tables), III.D (local heaps), IV.A.1 (object
headers) and IV.A.2.i (the data layout message).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import reprlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError, required
from lazymodel._remote.path import Location, RemoteFile
from lazymodel._show.text import listed
from lazymodel._tensors.boxes import Box, box_shape, intersect, shift, slabs
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.convert import Steps, assign
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import ArrayTensor, FileTensor, TensorSource
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._safetensors import Contents, Index
from lazymodel.checkpoints._untrusted import (
    HOSTILE,
    MAX_JSON,
    TRUNCATED,
    check_pointer,
    corrupt,
    mismatch,
    read_json_object,
    truncated,
    weight_map,
)
from lazymodel.extras.formats.archive import MAX_RATIO, Window, stored_start, zip_directory

VIRTUAL = 3  # the layout class of a dataset whose values are stored in other datasets
_LAYOUT, _CONTINUATION = 0x08, 0x10  # types of messages
_MAX_HEADER = 16 << 20  # bytes of one object's header; a message has at most 64 KiB, and a dataset some ten of them


def layout_classes(read: Callable[[int, int], bytes], address: int, widths: tuple[int, int]) -> set[int]:
    """The classes of storage that the object header at an address names: none for a group, one for a sound dataset.

    `read` gives the bytes at an address, as many as requested or as the file has; `widths` are the bytes of an address
    and of a length. Raises ValueError if there is no object header, or one that ends early.
    """
    classes: set[int] = set()
    for kind, body in messages(read, address, widths):
        if kind == _LAYOUT:
            # Versions 1 and 2, in which there are no virtual datasets, put the number of dimensions first.
            version = body[0] if body else 0
            if len(body) < 3 or not 1 <= version <= 5:
                raise ValueError(f"the data layout message at {address} has version {version}")
            classes.add(body[2] if version < 3 else body[1])
    return classes


def messages(read: Callable[[int, int], bytes], address: int, widths: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
    """Type and content of every message of the header at an address, those of its continuations among them."""
    head = read(address, 64)
    tracked = False  # whether every message has a number
    if head.startswith(b"OHDR\x02"):
        flags = head[5] if len(head) > 5 else 0
        tracked = bool(flags & 0x04)
        start = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 0x03)
        blocks = [(address + start + width, int.from_bytes(head[start : start + width], "little"))]
        prefix = 4 + (2 if tracked else 0)
    elif head.startswith(b"\x01") and len(head) >= 16:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
        prefix = 8
    else:
        raise ValueError(f"there is no object header at {address}")
    new = prefix != 8
    seen: set[int] = set()
    left = _MAX_HEADER
    while blocks:
        start, size = blocks.pop()
        left -= size
        if start in seen or left < 0:
            raise ValueError(f"the object header at {address} does not end")
        seen.add(start)
        data = read(start, size)
        if len(data) < size:
            raise ValueError(f"the object header at {address} is cut off")
        at = 0
        while at + prefix <= size:
            kind = data[at] if new else int.from_bytes(data[at : at + 2], "little")
            length = int.from_bytes(data[at + 1 : at + 3] if new else data[at + 2 : at + 4], "little")
            body = data[at + prefix : at + prefix + length]
            if len(body) < length:
                raise ValueError(f"a message of the object header at {address} is cut off")
            if kind == _CONTINUATION:
                offset = int.from_bytes(body[: widths[0]], "little")
                count = int.from_bytes(body[widths[0] : sum(widths)], "little")
                # Newer ones begin with a signature and end with a checksum.
                blocks.append((offset + 4, max(count - 8, 0)) if new else (offset, count))
            yield kind, body
            at += prefix + length


_LIBRARY = 1 << 20  # bytes; the HDF5 library's own buffer for conversions (H5Pset_buffer's default)
_METADATA = 256 << 10  # bytes of B-trees and headers that it keeps of a file
_SIZE = np.dtype(np.int64)  # of the number of bytes of a chunk
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def import_h5py() -> Any:
    return required("h5py", "a file of HDF5 weights", "h5py", CheckpointError)


class H5File:
    """An HDF5 file, or a member of an archive, that is opened when needed."""

    def __init__(self, path: Location, base: int = 0, size: int | None = None) -> None:
        self.source = path.reader(base=base)  # for direct reads
        self.size = self.source.size - base if size is None else size
        self._handle: Any = None
        self._lock = threading.Lock()

    def open(self) -> Any:
        """An `h5py.File`, kept open until `close`."""
        h5py = import_h5py()
        with self._lock:
            if not self._handle:
                path, base = self.source.path, self.source.base
                whole = base == 0 and self.size == self.source.size and not self.source.remote
                fix = f"found {self.size} bytes, truncated or corrupt. Download or copy it again."
                with corrupt(f"{path}: expected a whole HDF5 file, {fix}"):
                    # No chunk cache: chunks are read once, and what a reading needs would come on top.
                    target = path if whole else Window(self.source, base, self.size)
                    handle = h5py.File(target, "r", rdcc_nbytes=0)
                    metadata = handle.id.get_mdc_config()  # by default it grows to 32 MiB
                    metadata.initial_size, metadata.min_size, metadata.max_size = (_METADATA,) * 3
                    metadata.set_initial_size = True
                    handle.id.set_mdc_config(metadata)
                    self._handle = handle
            return self._handle

    def close(self) -> None:
        """Closes the handle; `open` opens it again."""
        with self._lock:
            if self._handle:
                self._handle.close()
            self._handle = None
        self.source.close()


class DatasetTensor(TensorSource):
    """A dataset that is not one range of the file: chunked, compressed, converted, or in the header."""

    def __init__(self, file: H5File, name: str, dataset: Any, dtype: np.dtype[Any]) -> None:
        self._h5, self.name, self.file, self.shape, self.dtype = file, name, file.source.path, dataset.shape, dtype
        self.offset, self.origin = 0, file.source
        self._chunks: tuple[int, ...] | None = dataset.chunks
        self._bits: np.dtype[Any] = dataset.dtype
        self._filters = _filters(dataset, f"{self.file}: dataset {name!r}")
        self._sizes: np.ndarray | None = None
        self.min_scratch_nbytes = 0 if _is_exact(dataset) and not self._filters else _LIBRARY
        if self._chunks and self._filters:
            width = dataset.id.get_type().get_size()
            self._chunk_nbytes = math.prod(self._chunks) * width  # decoded, as it is stored
            # The sizes of all chunks; of one, the bytes encoded, decoded and rearranged.
            self.min_scratch_nbytes += _places(self.shape, self._chunks) * _SIZE.itemsize
            self.min_scratch_nbytes += 3 * self._chunk_nbytes * max(self._bits.itemsize // width, 1)
            self.row_step = self._chunks[0]

    def readers(self) -> tuple[ByteReader, ...]:
        return (self._h5.source,)

    def release(self) -> None:
        self._sizes = None

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        try:
            self._h5.source.check_unchanged()
            dataset = self._h5.open()[self.name]
            if self._chunks and self._filters:
                self._read_chunks(dataset, self._chunks, box, out, steps, workspace)
            else:
                self._read(dataset, box, out, steps, workspace)
                self._h5.source.count(math.prod(box_shape(box)) * self._bits.itemsize)
            self._h5.source.check_unchanged()
        except Exception as error:
            raise CheckpointError(
                f"cannot read dataset {self.name!r} of {self.file}: {error or type(error).__name__}"
            ) from error

    def _read(self, dataset: Any, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out` with a box of the dataset through the HDF5 library."""
        h5s = import_h5py().h5s
        space = dataset.id.get_space()
        limit = max(workspace.available, self.min_scratch_nbytes, self._bits.itemsize) // self._bits.itemsize
        for piece in slabs(box_shape(box), limit):
            target = out[(*piece, ...)]
            in_place = not steps and target.flags.c_contiguous
            with contextlib.nullcontext(target) if in_place else workspace.array(target.shape, self.dtype) as values:
                if box:
                    start = tuple(whole.start + part.start for whole, part in zip(box, piece, strict=True))
                    space.select_hyperslab(start, values.shape)
                memory = h5s.create_simple(values.shape) if box else h5s.create(h5s.SCALAR)
                dataset.id.read(memory, space, values.view(self._bits))
                if not in_place:
                    assign(target, values, steps)

    def _read_chunks(
        self, dataset: Any, chunks: tuple[int, ...], box: Box, out: np.ndarray, steps: Steps, workspace: Workspace
    ) -> None:
        """Fills `out` with a box, encoded chunks one after the other, each once it is known what it decodes to."""
        if (sizes := self._sizes) is None:
            # -1 for a chunk that was never written
            sizes = np.full([-(-extent // n) for extent, n in zip(self.shape, chunks, strict=True)], -1, _SIZE)

            def note(info: Any) -> None:
                place = tuple(start // n for start, n in zip(info.chunk_offset, chunks, strict=True))
                if all(index < count for index, count in zip(place, sizes.shape, strict=True)):
                    sizes[place] = info.size  # others are left over from when the dataset was larger

            # All at once: the library looks a single one up by going through all of them.
            dataset.id.chunk_iter(note)
            self._sizes = sizes
        rows = tuple(slice(part.start // n, -(-part.stop // n)) for part, n in zip(box, chunks, strict=True))
        for place in itertools.product(*(range(part.start, part.stop) for part in rows)):
            chunk: Box = tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, chunks, strict=True))
            if sizes[place] >= 0:
                self._check_chunk(dataset, tuple(part.start for part in chunk), int(sizes[place]))
            piece = cast(Box, intersect(chunk, box))
            self._read(dataset, piece, out[(*shift(piece, box), ...)], steps, workspace)
        self._h5.source.count(int(sizes[rows].clip(0).sum()))

    def _check_chunk(self, dataset: Any, start: tuple[int, ...], size: int) -> None:
        """Raises CheckpointError if a chunk would decode to anything but its values: the library has no limit."""
        h5z, nbytes, found = import_h5py().h5z, self._chunk_nbytes, size
        if not _compresses(self._filters):  # then it has its values, and a checksum perhaps
            found = nbytes if h5z.FILTER_FLETCHER32 in self._filters and size == nbytes + 4 else size
        elif h5z.FILTER_DEFLATE not in self._filters:
            return
        elif size <= nbytes + nbytes // 8 + 1024:  # more than zlib ever adds
            # The only call of h5py that does not take its lock itself, which nothing public hands out: without it,
            # threads would be in the HDF5 library at the same time.
            with import_h5py()._objects.phil:
                mask, encoded = dataset.id.read_direct_chunk(start)
            if mask & 1 << self._filters.index(h5z.FILTER_DEFLATE):
                return
            try:
                found = len(zlib.decompressobj().decompress(encoded, nbytes + 1))
            except zlib.error:
                # Chunks that reach over the edge may be stored as they are (H5Pset_chunk_opts); the library knows.
                return
        if found != nbytes:
            raise CheckpointError(f"expected a chunk of {nbytes} bytes, found {found}; it is corrupt")


def _places(shape: Sequence[int], chunks: Sequence[int]) -> int:
    """The number of chunks that a dataset has room for."""
    return math.prod(-(-extent // n) for extent, n in zip(shape, chunks, strict=True))


def _filters(dataset: Any, what: str) -> list[int]:
    """The codes of the filters that encode the chunks of a dataset, in the order in which writing applies them."""
    h5z = import_h5py().h5z
    plist = dataset.id.get_create_plist()
    codes = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    if h5z.FILTER_DEFLATE in codes and set(codes[codes.index(h5z.FILTER_DEFLATE) + 1 :]) - {h5z.FILTER_FLETCHER32}:
        raise mismatch(what, "gzip as the last filter but for a checksum", "another after it", "save it with gzip")
    return codes


def _compresses(filters: list[int]) -> bool:
    """Returns True if filters may make chunks shorter than their values."""
    h5z = import_h5py().h5z
    return any(code not in (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32) for code in filters)


def _is_exact(dataset: Any) -> bool:
    """Returns True if values are stored with the bits that they have in memory."""
    return dataset.dtype.kind == "V" or import_h5py().h5t.py_create(dataset.dtype, logical=True).equal(
        dataset.id.get_type()
    )


def _has_fill_value(dataset: Any) -> bool:
    """Returns True if the library knows what a chunk holds that was never written."""
    h5d = import_h5py().h5d
    plist = dataset.id.get_create_plist()
    return plist.fill_value_defined() != h5d.FILL_VALUE_UNDEFINED and plist.get_fill_time() != h5d.FILL_TIME_NEVER


def dataset_tensor(file: H5File, name: str) -> LazyTensor:
    """A dataset as a tensor. Keras stores bfloat16 as two opaque bytes, marked by an attribute `dtype`."""
    path = file.source.path
    with corrupt(f"{path}: dataset {name!r} is corrupt"):
        dataset = file.open()[name]
        dtype, shape = _checked(file, f"{path}: dataset {name!r}", dataset)
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return LazyTensor(ArrayTensor(np.empty(shape, dtype), name))
        if dataset.id.get_create_plist().get_layout() == import_h5py().h5d.CONTIGUOUS:
            offset = dataset.id.get_offset()
            if offset is None:
                if not _has_fill_value(dataset):
                    raise mismatch(f"{path}: dataset {name!r}", f"{nbytes} bytes", "none written, and no fill value")
            elif offset + math.prod(shape) * dataset.id.get_type().get_size() > file.size:
                raise truncated(path, f"dataset {name!r} up to byte {offset + nbytes}", f"a file of {file.size} bytes")
            elif _is_exact(dataset):
                return LazyTensor(FileTensor(name, file.source, int(offset), shape, dtype))
        return LazyTensor(DatasetTensor(file, name, dataset, dtype))


def _checked(file: H5File, what: str, dataset: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of a dataset that can hold what it declares."""
    if dataset.external:
        other = os.fsdecode(dataset.external[0][0])
        raise mismatch(what, "the values in this file", f"them in {other!r}", HOSTILE)
    stored: np.dtype[Any] = dataset.dtype
    dtype = stored
    marked = stored.itemsize == 2 and stored.kind in "uV" and _has_text(dataset, b"dtype")
    if marked and stored.kind == "V" and not stored.names and dataset.shape is not None:
        dtype = _BFLOAT16
    elif marked or stored.kind not in "biufc" or dataset.shape is None:
        found = f"{stored}{' with a dtype' if marked else ''}"
        fix = "strings, records and other opaque data cannot be weights"
        raise mismatch(what, "numbers, or bfloat16 as Keras stores it", found, fix)
    shape = tuple(int(extent) for extent in dataset.shape)
    count = math.prod(shape)
    if not count:
        return dtype, shape
    chunks = cast("tuple[int, ...] | None", dataset.chunks)
    held = int(dataset.id.get_storage_size())
    # Compressed values may exceed the file, and values never written take no bytes: both within reason.
    most = max(held * (MAX_RATIO if _compresses(_filters(dataset, what)) else 1), file.size)
    width = dataset.id.get_type().get_size()
    places = _places(shape, chunks or shape)
    if max(count, math.prod(chunks or ())) * width > most or max(held, places) > file.size:
        expected = f"{count * stored.itemsize} bytes for {stored}{list(shape)}"
        expected += f" in {places} chunks of {list(chunks)}" if chunks else ""
        raise mismatch(what, expected, f"{held} stored in a file of {file.size}", TRUNCATED)
    if chunks and (there := dataset.id.get_num_chunks()) < places and not _has_fill_value(dataset):
        raise mismatch(what, f"{places} chunks", f"{there} written, and no fill value")
    if chunks and not _filters(dataset, what):
        nbytes = math.prod(chunks) * width

        def wrong(info: Any) -> int | None:
            return None if info.size == nbytes else info.size

        if (size := dataset.id.chunk_iter(wrong)) is not None:
            raise mismatch(what, f"chunks of {nbytes} bytes", f"one of {size}")
    return dtype, shape


def _has_text(dataset: Any, name: bytes) -> bool:
    """Returns True if a dataset has an attribute of this name that is a string."""
    # The string itself, which for Keras is always "bfloat16", is not read: it is in a heap of the file, and where that
    # is damaged the library reads on for ever, or takes gigabytes.
    h5py = import_h5py()
    if not h5py.h5a.exists(dataset.id, name):
        return False
    attribute = h5py.h5a.open(dataset.id, name)
    return attribute.shape == () and isinstance(attribute.get_type(), h5py.h5t.TypeStringID)


_GROUP = 0x11  # the type of the message that says where a group's B-tree and heap are
_MOST = 8 << 20  # bytes that are fetched for this, at most: what is kept of a file
_PIECE = 512  # bytes of the first look at a piece; nearly all are shorter

_Piece = tuple[str, int, int]  # what kind it is, its address, how many bytes are known to belong to it


class _NotHere(Exception):
    """Bytes that would have to be fetched."""

    def __init__(self, start: int, stop: int) -> None:
        self.span = start, stop


def _fetch_groups(file: RemoteFile, base: int, root: int, widths: tuple[int, int]) -> None:
    """Fetches the groups of an HDF5 file, and the headers of their datasets.

    Args:
        file: The object.
        base: Where in it addresses count from.
        root: The address of the root group's header.
        widths: Bytes of an address and of a length.
    """

    def read(address: int, count: int) -> bytes:
        start, stop = base + address, min(base + address + count, file.size)
        if not 0 <= start < stop:
            raise ValueError(f"there is nothing at {address}")
        if (data := file.kept(start, stop)) is None:
            raise _NotHere(start, stop)
        return data

    pieces: list[_Piece] = [("header", root, _PIECE)]
    seen = set(pieces)
    fetched = 0
    while pieces and fetched < _MOST:
        wanted: list[tuple[int, int]] = []
        later: list[_Piece] = []
        while pieces:
            piece = pieces.pop()
            try:
                new = set(_following(read, piece, widths)) - seen
            except _NotHere as absent:
                wanted.append(absent.span)
                later.append(piece)
            except (ValueError, IndexError):
                pass  # the library will say what is wrong with it
            else:
                seen |= new
                pieces += new
        pieces = later
        if wanted:
            fetched += file.fetch_ahead(wanted)


def _following(read: Callable[[int, int], bytes], piece: _Piece, widths: tuple[int, int]) -> list[_Piece]:
    """The pieces that one leads to."""
    kind, address, count = piece
    offset, length = widths
    data = read(address, count)

    def number(at: int, width: int = offset) -> int:
        return int.from_bytes(data[at : at + width], "little")

    if kind == "header":
        found = [body for kind, body in messages(read, address, widths) if kind == _GROUP and len(body) >= 2 * offset]
        return [group for body in found for group in _group(body, offset)]
    if kind == "heap" and data.startswith(b"HEAP"):
        return [("names", number(8 + 2 * length), number(8, length))]
    if kind == "tree" and data.startswith(b"TREE"):
        first, step, entries = 8 + 2 * offset + length, offset + length, number(6, 2)
        data = read(address, first + entries * step)
        below = "tree" if data[5] else "symbols"
        return [(below, number(first + entry * step), _PIECE) for entry in range(entries)]
    if kind == "symbols" and data.startswith(b"SNOD"):
        step, entries = 2 * offset + 24, number(6, 2)
        data = read(address, 8 + entries * step)
        places = [8 + entry * step for entry in range(entries)]
        inner: list[_Piece] = [("header", number(place + offset), _PIECE) for place in places]
        for place in places:
            if number(place + 2 * offset, 4) == 1:  # of a group, whose B-tree and heap are noted here as well
                inner += _group(data[place + 2 * offset + 8 : place + step], offset)
        return inner
    return []


def _group(addresses: bytes, offset: int) -> list[_Piece]:
    tree, heap = (int.from_bytes(addresses[at : at + offset], "little") for at in (0, offset))
    return [("tree", tree, _PIECE), ("heap", heap, _PIECE)]


_MAX_NAME = 4096  # characters of a dataset's path; deeper than any model, and what keeps a list of paths small


class Hdf5Checkpoint(Checkpoint):
    """An HDF5 file as a mapping from a dataset's path, such as `layers/dense/vars/0`, to its tensor."""

    format = "hdf5"

    def __init__(self, path: str | Location, file: H5File) -> None:
        super().__init__(path, _dataset_names(file), [file.source])
        self._file = file

    def _tensor(self, name: str) -> LazyTensor:
        return dataset_tensor(self._file, name)

    def close(self) -> None:
        self._file.close()


def open_hdf5(path: Location) -> Hdf5Checkpoint:
    """Opens a single HDF5 file."""
    check_pointer(path)
    return Hdf5Checkpoint(path, H5File(path))


def open_archive(path: Location) -> Checkpoint:
    """Opens the weights in a `.keras` archive, in place, where they are stored without compression."""
    members = {info.filename: info for info in zip_directory(path.reader(), path, ".keras")}

    def start(name: str) -> int:
        return stored_start(path, members[name], "Keras", "unpack the archive and open the file inside")

    def weights(name: str, shown: str) -> Hdf5Checkpoint:
        return Hdf5Checkpoint(shown, H5File(path, start(name), members[name].file_size))

    if "model.weights.h5" in members:
        return weights("model.weights.h5", str(path))
    there, name = listed(map(repr, sorted(members))), "model.weights.json"
    if name not in members:
        raise mismatch(path, "model.weights.h5 in the archive", there)
    begin, size = start(name), members[name].file_size
    if size > MAX_JSON:
        raise mismatch(path, f"at most {MAX_JSON} bytes of {name}", size)
    with Window(path.reader(), begin, size) as window:
        shown = f"{path}:{name}"
        index = Index(shown, name, weight_map(read_json_object(window.read(), shown), shown), grouped=True)
    contents = Contents(path)
    groups = contents.by_shard(index)
    if missing := [shard for shard in groups if shard not in members]:
        raise mismatch(path, f"shards {listed(map(repr, missing))} in the archive", there)
    for shard, keys in groups.items():
        contents.add_shard(index, path, weights(shard, f"{path}:{shard}"), keys)
    return contents.checkpoint()


def _dataset_names(file: H5File) -> list[str]:
    """Paths of all datasets, following links inside the file only. The file is closed if this raises."""
    path = file.source.path
    try:
        with (
            corrupt(f"{path}: expected an HDF5 file, found {file.size} bytes that are corrupt"),
            Window(file.source, file.source.base, file.size) as window,
        ):
            root = file.open()
            widths = root.id.get_create_plist().get_sizes()
            if file.source.remote:
                address = import_h5py().h5o.get_info(root.id).addr
                with cast(RemoteFile, file.source.open_file()) as remote:
                    _fetch_groups(remote, file.source.base + root.userblock_size, address, widths)

            def read(place: int, count: int) -> bytes:  # addresses count from the user block on
                window.seek(root.userblock_size + place)
                return window.read(min(count, file.size)) or b""

            names, soft = _walk(path, root, lambda address: layout_classes(read, address, widths))
            known = set(names)
            for name, target in soft.items():
                if target.strip("/") not in known:
                    raise CheckpointError(f"{path}: {name!r} is a link to {target!r}, where this file has no dataset")
            return [*names, *soft]
    except CheckpointError:
        file.close()
        raise


def _walk(path: str, root: Any, classes: Callable[[int], set[int]]) -> tuple[list[str], dict[str, str]]:
    """Paths of the datasets below a root; paths of soft links, with what they link to."""
    h5py = import_h5py()
    names: list[str] = []
    soft: dict[str, str] = {}
    # With the group that each is in, rather than opened: every open one takes memory of the library's.
    groups: list[tuple[str, Any, str, int]] = [("", root, "/", h5py.h5o.get_info(root.id).addr)]
    visited: set[int] = set()
    while groups:
        prefix, parent, own, address = groups.pop()
        if address in visited:
            continue  # hard links can form a circle
        visited.add(address)
        group = parent[own]
        inner: list[tuple[str, Any, str, int]] = []
        for key in group:
            # A name that is not UTF-8 comes as bytes.
            if isinstance(key, bytes) or key in ("", ".") or "/" in key or len(prefix + key) > _MAX_NAME:
                found = f"{reprlib.repr(key)} in {reprlib.repr(prefix)}"
                raise mismatch(path, f"names of UTF-8, paths of at most {_MAX_NAME} characters", found)
            name = prefix + key
            link = group.get(key, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise CheckpointError(
                    f"{path}: {name!r} links to {link.filename!r}: expected values in this file; do not trust it"
                )
            if isinstance(link, h5py.SoftLink):
                soft[name] = link.path if link.path.startswith("/") else f"{prefix}{link.path}"
                continue
            address = group.id.links.get_info(key.encode()).u
            found = classes(address)
            if VIRTUAL in found:
                raise CheckpointError(
                    f"{path}: dataset {name!r} is virtual: expected the values in this file, found references to "
                    "other datasets; copy the values"
                )
            if found:
                names.append(name)
            elif isinstance(group[key], h5py.Group):
                inner.append((f"{name}/", group, key, address))
        groups += reversed(inner)
    return names, soft
