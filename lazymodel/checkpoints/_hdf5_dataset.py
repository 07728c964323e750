"""Datasets of HDF5 files as tensors, each checked against the bytes that are there before it is believed.

What lies in the file as it lies in memory (contiguous datasets, which is what Keras writes, and unfiltered chunks) is
read straight from the file at the offset that the HDF5 library reports. Chunks with the usual filters (deflate,
shuffle, Fletcher-32) are decoded here, each into no more memory than its shape needs; the library would inflate
whatever a chunk claims to be. Everything else is read through h5py, which is imported on first use, chunk by chunk.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import threading
import zlib
from collections.abc import Generator
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._remote.source import source_of
from lazymodel._tensors.boxes import Box, Geometry, box_shape, c_strides, intersect, normalize, shift, slabs
from lazymodel._tensors.buffers import Convert, Workspace, assign
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import ArrayLeaf, FileLeaf, Leaf
from lazymodel._tensors.source import Source
from lazymodel.checkpoints._untrusted import MAX_RATIO

_LIBRARY = 1 << 20  # bytes; the HDF5 library's own buffer for conversions (H5Pset_buffer's default)
_METADATA = 256 << 10  # bytes of B-trees and headers that it keeps of a file
_INFLATE_IN = 64 << 10  # bytes handed to zlib at a time: what it does not take at once, it copies
_INFLATE_OUT = 256 << 10  # bytes taken from zlib at a time
_CHECKSUM = 32 << 10  # words summed at a time; their weighted sum stays far below 2**64
_PLACE = np.dtype([("offset", np.int64), ("size", np.int64), ("mask", np.int64)])  # of a chunk
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BYTE = np.dtype(np.uint8)


def import_h5py() -> Any:
    try:
        import h5py  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise CheckpointError("HDF5 weights need h5py, which is not installed: pip install h5py") from error
    return h5py


@contextlib.contextmanager
def corrupt(message: str) -> Generator[None]:
    """Raises CheckpointError for whatever goes wrong inside: h5py turns a corrupt file into nearly any exception."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{message} ({error or type(error).__name__})") from error


class Window(io.RawIOBase):
    """A range of a file as a file of its own: a member of an uncompressed archive."""

    def __init__(self, source: Source, base: int, size: int) -> None:
        super().__init__()
        self._file = source.open_file()
        self._base, self._size, self._position = base, size, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._size - self._position), 0)
        self._file.seek(self._base + self._position)
        count = cast(Any, self._file).readinto(view[:count])
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class H5File:
    """An HDF5 file, or a member of an archive, that is opened when needed."""

    def __init__(self, path: Location, base: int = 0, size: int | None = None) -> None:
        self.source = source_of(path, base=base)  # for direct reads
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
                mend = "found one that is truncated or corrupt. Download or copy it again."
                with corrupt(f"{path}: expected an HDF5 file of {self.size} bytes, {mend}"):
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


class _Target(NamedTuple):
    """An array to fill, the conversions on the way, and memory for what that takes."""

    out: np.ndarray
    steps: tuple[Convert, ...]
    workspace: Workspace

    def part(self, box: Box) -> _Target:
        return self._replace(out=self.out[(*box, ...)])


class DatasetLeaf(Leaf):
    """A dataset that is not one range of the file: chunked, compressed, converted, or in the header."""

    def __init__(self, file: H5File, name: str, dataset: Any, dtype: np.dtype[Any]) -> None:
        self._h5, self.name, self.file, self.shape, self.dtype = file, name, file.source.path, dataset.shape, dtype
        self.offset, self.origin = 0, file.source
        self._chunks: tuple[int, ...] | None = dataset.chunks
        self._bits: np.dtype[Any] = dataset.dtype
        self._filters = _Filters(dataset)
        self._places: np.ndarray | None = None
        self.unit_nbytes = 0 if _is_exact(dataset) and not self._filters.any else _LIBRARY
        if self._chunks:
            self._chunk_nbytes = math.prod(self._chunks) * self._bits.itemsize
            places = math.prod(-(-extent // n) for extent, n in zip(self.shape, self._chunks, strict=True))
            self.unit_nbytes += places * _PLACE.itemsize
            if self._filters.any:
                # Encoded, decoded and rearranged, by us or by the library.
                self.unit_nbytes += 3 * self._chunk_nbytes
                self.row_step = self._chunks[0]

    def sources(self) -> tuple[Source, ...]:
        return (self._h5.source,)

    def release(self) -> None:
        self._places = None

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        target = _Target(out, steps, workspace)
        try:
            self._h5.source.check_unchanged()
            dataset = self._h5.open()[self.name]
            if self._chunks is None:
                self._read(dataset, box, target)
                self._h5.source.count(math.prod(box_shape(box)) * self._bits.itemsize)
            else:
                self._read_chunks(dataset, self._chunks, box, target)
            self._h5.source.check_unchanged()
        except Exception as error:
            raise CheckpointError(
                f"cannot read dataset {self.name!r} of {self.file}: {error or type(error).__name__}"
            ) from error

    def _read(self, dataset: Any, box: Box, target: _Target) -> None:
        """Fills a target with a box of the dataset through the HDF5 library."""
        h5s = import_h5py().h5s
        steps, workspace = target.steps, target.workspace
        space = dataset.id.get_space()
        limit = max(workspace.room, self.unit_nbytes, self._bits.itemsize) // self._bits.itemsize
        for piece in slabs(box_shape(box), limit):
            out = target.out[(*piece, ...)]
            in_place = not steps and out.flags.c_contiguous
            with contextlib.nullcontext(out) if in_place else workspace.array(out.shape, self.dtype) as values:
                if box:
                    start = tuple(whole.start + part.start for whole, part in zip(box, piece, strict=True))
                    space.select_hyperslab(start, values.shape)
                memory = h5s.create_simple(values.shape) if box else h5s.create(h5s.SCALAR)
                dataset.id.read(memory, space, values.view(self._bits))
                if not in_place:
                    assign(out, values, steps)

    def _read_chunks(self, dataset: Any, chunks: tuple[int, ...], box: Box, target: _Target) -> None:
        """Fills a target with a box, one chunk after the other."""
        if (places := self._places) is None:
            places = self._places = _chunk_places(dataset)
        rows = (range(part.start // n, -(-part.stop // n)) for part, n in zip(box, chunks, strict=True))
        for place in itertools.product(*rows):
            chunk: Box = tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, chunks, strict=True))
            piece = cast(Box, intersect(chunk, box))
            part = target.part(shift(piece, box))
            offset, size, mask = (int(value) for value in places[place])
            if offset < 0:
                if not _has_fill_value(dataset):
                    ranges = ", ".join(f"{part.start}:{part.stop}" for part in chunk)
                    raise CheckpointError(
                        f"expected values in [{ranges}], found a chunk that was never written, and no fill value"
                    )
            elif offset + size > self._h5.size:
                raise CheckpointError(
                    f"expected a chunk up to byte {offset + size}, found {self._h5.size} bytes; it is "
                    "truncated. Download or copy it again."
                )
            elif self._filters.known:
                partial = any(part.stop > extent for part, extent in zip(chunk, self.shape, strict=True))
                if self._read_chunk(offset, size, self._filters.applied(mask), partial, shift(piece, chunk), part):
                    continue
            self._read(dataset, piece, part)
            self._h5.source.count(size)

    def _read_chunk(
        self, offset: int, size: int, filters: tuple[bool, ...], partial: bool, box: Box, target: _Target
    ) -> bool:
        """Fills a target with a box of a chunk, without the library; False where only that can tell what it is."""
        # A dataset can be told to leave chunks that reach over its edge unfiltered (H5Pset_chunk_opts), which h5py does
        # not show. Such a chunk is as long as its values are.
        chunks = cast("tuple[int, ...]", self._chunks)
        shuffle = filters[0]
        out, steps, workspace = target
        if not any(filters):
            self._check_length(size)
            place = Geometry(offset, chunks, tuple(c_strides(chunks, self._bits.itemsize))).box(box)
            place, ordered, _ = normalize(place, out)
            self._h5.source.read_strided(place, self.dtype, ordered, steps, workspace)
            return True
        if size > self._chunk_nbytes + self._chunk_nbytes // 8 + 1024:  # more than zlib ever adds
            self._check_length(size)
        with workspace.array((self._chunk_nbytes,), _BYTE) as decoded:
            if not self._decode(offset, size, filters, partial and size == self._chunk_nbytes, decoded, workspace):
                return False
            if not shuffle:
                assign(out, decoded.view(self.dtype).reshape(chunks)[box], steps)
                return True
            # Shuffled: the first byte of every value, then the second of every value, and so on.
            planes = decoded.reshape(self._bits.itemsize, *chunks)[(slice(None), *box)]
            with workspace.array(out.shape, self.dtype) as values:
                bytes_of = values.view(_BYTE).reshape(*out.shape, self._bits.itemsize)
                bytes_of[...] = np.moveaxis(planes, 0, -1)
                assign(out, values, steps)
        return True

    def _decode(
        self, offset: int, size: int, filters: tuple[bool, ...], unfiltered: bool, out: np.ndarray, workspace: Workspace
    ) -> bool:
        """Fills `out` with a chunk, checked and inflated; False where the chunk is one that may be `unfiltered`."""
        _, deflate, checksum = filters
        if unfiltered and not deflate:
            return False
        with workspace.array((size,), _BYTE) as encoded:
            self._h5.source.read_into(offset, encoded)
            if checksum:
                encoded, stored = encoded[:-4], encoded[-4:].tobytes()
                if not _is_checksum(stored, encoded):
                    if unfiltered:
                        return False
                    raise CheckpointError(f"expected a chunk of checksum {stored.hex()}, found another; it is corrupt")
            if deflate:
                try:
                    self._check_length(_inflate(encoded, out))
                except zlib.error:
                    if unfiltered:
                        return False
                    raise
            else:
                self._check_length(encoded.size)
                out[:] = encoded
        return True

    def _check_length(self, length: int) -> None:
        if length != self._chunk_nbytes:
            raise CheckpointError(f"expected a chunk of {self._chunk_nbytes} bytes, found {length}; it is corrupt")


class _Filters:
    """How the chunks of a dataset are encoded."""

    def __init__(self, dataset: Any) -> None:
        h5z = import_h5py().h5z
        plist = dataset.id.get_create_plist()
        filters = [plist.get_filter(index) for index in range(plist.get_nfilters())]
        codes = [code for code, *_ in filters]
        allowed: dict[int, list[tuple[int, ...]]] = {
            h5z.FILTER_SHUFFLE: [(dataset.dtype.itemsize,)],
            h5z.FILTER_DEFLATE: [(level,) for level in range(10)],
            h5z.FILTER_FLETCHER32: [()],
        }
        self._bits = [1 << codes.index(code) if code in codes else 0 for code in allowed]
        self.any = bool(codes)
        # Whether they may be shorter than their values.
        self.compressing = any(code not in (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32) for code in codes)
        # Whether `DatasetLeaf` can decode them: of the filters shuffle, deflate and Fletcher-32 each at most once, in
        # this order, on values that are stored as they are in memory.
        self.known = (
            codes == [code for code in allowed if code in codes]
            and all(tuple(values) in allowed[code] for code, _, values, _ in filters)
            and _is_exact(dataset)
            # Versions of the library differ in whether a chunk's offset counts from the end of the user block.
            and not dataset.file.userblock_size
        )

    def applied(self, mask: int) -> tuple[bool, ...]:
        """Whether a chunk is shuffled, deflated and checksummed; `mask` has a bit for every filter left out."""
        return tuple(bool(bit & ~mask) for bit in self._bits)


def _is_exact(dataset: Any) -> bool:
    """Whether values are stored with the bits that they have in memory."""
    return dataset.dtype.kind == "V" or import_h5py().h5t.py_create(dataset.dtype, logical=True).equal(
        dataset.id.get_type()
    )


def _has_fill_value(dataset: Any) -> bool:
    """Whether the library says what a chunk holds that was never written."""
    h5d = import_h5py().h5d
    plist = dataset.id.get_create_plist()
    return plist.fill_value_defined() != h5d.FILL_VALUE_UNDEFINED and plist.get_fill_time() != h5d.FILL_TIME_NEVER


def _inflate(encoded: np.ndarray, out: np.ndarray) -> int:
    """Inflates a zlib stream into `out`; returns its length, or one more than there is room for and stops there."""
    decoder = zlib.decompressobj()
    done = 0
    for start in range(0, encoded.size, _INFLATE_IN):
        rest: Any = cast(Any, encoded[start : start + _INFLATE_IN])
        while True:
            # One byte more than there is room for, to notice that there is one.
            limit = min(_INFLATE_OUT, out.size + 1 - done)
            piece = decoder.decompress(rest, limit)
            if done + len(piece) > out.size:
                return out.size + 1
            out[done : done + len(piece)] = np.frombuffer(piece, _BYTE)
            done += len(piece)
            rest = decoder.unconsumed_tail
            if decoder.eof:
                return done
            if not rest and len(piece) < limit:
                break
    raise zlib.error("the stream ends early")


def _fletcher32(data: np.ndarray) -> int:
    """The checksum that HDF5 appends to chunks: Fletcher's, of big-endian 16-bit words (`H5_checksum_fletcher32`)."""
    words = data[: data.size // 2 * 2].view(">u2")
    first = second = 0
    for start in range(0, words.size, _CHECKSUM):
        block = words[start : start + _CHECKSUM].astype(np.uint64)
        second += block.size * first + int((block * np.arange(block.size, 0, -1, dtype=np.uint64)).sum())
        first += int(block.sum())
    if data.size % 2:
        first += int(data[-1]) << 8
        second += first
    return second % 65535 << 16 | first % 65535  # for which both 0 and 65535 stand


def _is_checksum(stored: bytes, data: np.ndarray) -> bool:
    """Whether the four bytes after a chunk are its checksum; before HDF5 1.6.3 its halves were byte-swapped."""
    checksum = _fletcher32(data)
    halves = [(int.from_bytes(stored[2:], order), int.from_bytes(stored[:2], order)) for order in ("little", "big")]
    return len(stored) == 4 and any(high % 65535 << 16 | low % 65535 == checksum for high, low in halves)


def _chunk_places(dataset: Any) -> np.ndarray:
    """Where every chunk lies, by its place in the grid: byte offset or -1, bytes, mask of filters left out."""
    # All at once: the library looks a single one up by going through all of them.
    chunks: tuple[int, ...] = dataset.chunks
    grid = tuple(-(-extent // n) for extent, n in zip(dataset.shape, chunks, strict=True))
    places = np.full(grid, -1, _PLACE)
    places["size"] = 0

    def note(info: Any) -> None:
        place = tuple(start // n for start, n in zip(info.chunk_offset, chunks, strict=True))
        if any(index >= count for index, count in zip(place, grid, strict=True)):
            return  # left over from when the dataset was larger
        if places["offset"][place] >= 0:
            raise CheckpointError(f"expected one chunk at {list(info.chunk_offset)}, found two; it is corrupt")
        places[place] = (info.byte_offset, info.size, info.filter_mask)

    dataset.id.chunk_iter(note)
    return places


def dataset_tensor(file: H5File, name: str) -> LazyTensor:
    """A dataset as a tensor. Keras stores bfloat16 as two opaque bytes, marked by an attribute `dtype`."""
    path = file.source.path
    with corrupt(f"{path}: dataset {name!r} is corrupt"):
        dataset = file.open()[name]
        dtype, shape = _checked(file, f"{path}: dataset {name!r}", dataset)
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return LazyTensor(ArrayLeaf(np.empty(shape, dtype), name))
        if dataset.id.get_create_plist().get_layout() == import_h5py().h5d.CONTIGUOUS:
            offset = dataset.id.get_offset()
            if offset is None:
                if not _has_fill_value(dataset):
                    raise CheckpointError(
                        f"{path}: dataset {name!r}: expected {nbytes} bytes, found none written, and no fill value"
                    )
            elif offset + math.prod(shape) * dataset.id.get_type().get_size() > file.size:
                raise CheckpointError(
                    f"{path} is truncated: expected dataset {name!r} up to byte {offset + nbytes}, found a file of "
                    f"{file.size} bytes. Download or copy it again."
                )
            elif _is_exact(dataset):
                return LazyTensor(FileLeaf(name, file.source, int(offset), shape, dtype))
        return LazyTensor(DatasetLeaf(file, name, dataset, dtype))


def _checked(file: H5File, what: str, dataset: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of a dataset that can hold what it declares."""
    if dataset.external:
        other = os.fsdecode(dataset.external[0][0])
        raise CheckpointError(
            f"{what}: expected the values in this file, found them in {other!r}; do not trust this checkpoint"
        )
    stored: np.dtype[Any] = dataset.dtype
    dtype = stored
    marked = stored.itemsize == 2 and stored.kind in "uV" and _has_text(dataset, b"dtype")
    if marked and stored.kind == "V" and not stored.names and dataset.shape is not None:
        dtype = _BFLOAT16
    elif marked or stored.kind not in "biufc" or dataset.shape is None:
        raise CheckpointError(
            f"{what}: expected numbers, or bfloat16 as Keras stores it, found {stored}"
            f"{' with a dtype' if marked else ''}; strings, records and other opaque data cannot be weights"
        )
    shape = tuple(int(extent) for extent in dataset.shape)
    count = math.prod(shape)
    if not count:
        return dtype, shape
    chunks = cast("tuple[int, ...] | None", dataset.chunks)
    held = int(dataset.id.get_storage_size())
    # Compressed values may exceed the file, and ones never written take no room: both within reason.
    most = max(held * (MAX_RATIO if _Filters(dataset).compressing else 1), file.size)
    width = dataset.id.get_type().get_size()
    places = math.prod(-(-extent // n) for extent, n in zip(shape, chunks or shape, strict=True))
    if max(count, math.prod(chunks or ())) * width > most or max(held, places) > file.size:
        raise CheckpointError(
            f"{what}: expected {count * stored.itemsize} bytes for {stored}{list(shape)}"
            f"{f' in {places} chunks of {list(chunks)}' if chunks else ''}, found {held} stored in a file of "
            f"{file.size}; it is truncated or corrupt"
        )
    return dtype, shape


def _has_text(dataset: Any, name: bytes) -> bool:
    """Whether a dataset has an attribute of this name that is a string."""
    # The string itself, which for Keras is always "bfloat16", is not read: it lies in a heap of the file, and where
    # that is damaged the library reads on for ever, or takes gigabytes.
    h5py = import_h5py()
    if not h5py.h5a.exists(dataset.id, name):
        return False
    attribute = h5py.h5a.open(dataset.id, name)
    return attribute.shape == () and isinstance(attribute.get_type(), h5py.h5t.TypeStringID)
