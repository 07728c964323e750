"""HDF5 files as Keras writes them: `.weights.h5`, sharded `.weights.json`, and `.keras` archives read in place.

Listing the names of datasets raises for anything that leads out of the file (external links, virtual datasets);
`_hdf5_dataset` checks and reads the datasets themselves.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from lazymodel._errors import CheckpointError
from lazymodel._remote.file import RemoteFile
from lazymodel._remote.path import Location
from lazymodel._remote.reader import RemoteReader, source_of
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._hdf5_dataset import (
    VIRTUAL,
    H5File,
    dataset_tensor,
    import_h5py,
    layout_classes,
    messages,
)
from lazymodel.checkpoints._shards import Contents
from lazymodel.checkpoints._untrusted import (
    MAX_JSON,
    Member,
    Window,
    check_pointer,
    corrupt,
    read_json_object,
    weight_map,
    zip_directory,
    zip_member,
)

# The parts of an HDF5 file at a URL that list its datasets, many fetched at a time before the HDF5 library reads them.
#
# The library follows one address after the other, and Keras' files have a few small pieces between any two tensors:
# from afar, each would be a round trip of its own. Here the groups are followed a level at a time, all their pieces
# at once. Nothing comes of it but blocks that are there when the library reads them, so whatever is not understood is
# left to it. Format: HDF5 File Format Specification 3.0, sections III.A.1 (B-trees), III.C (symbol tables), III.D
# (local heaps).


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
    members = {info.filename: info for info in zip_directory(source_of(path), path, ".keras").infolist()}

    def member(name: str) -> Member:
        found = zip_member(path, members[name])
        if found.deflated:
            raise CheckpointError(
                f"{path}: expected {name} to be stored without compression, as Keras does, found it compressed; unpack "
                "the archive and open the file inside"
            )
        return found

    def weights(name: str, shown: str) -> Hdf5Checkpoint:
        found = member(name)
        return Hdf5Checkpoint(shown, H5File(found.path, found.start, found.size))

    if "model.weights.h5" in members:
        return weights("model.weights.h5", str(path))
    there = listed(map(repr, sorted(members)))
    if "model.weights.json" not in members:
        raise CheckpointError(f"{path}: expected model.weights.h5 in the archive, found {there}")
    found = member("model.weights.json")
    if found.size > MAX_JSON:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON} bytes of model.weights.json, found {found.size}")
    with Window(source_of(path), found.start, found.size) as window:
        index = f"{path}:{found.name}"
        listing = weight_map(read_json_object(window.read(), index), index)
    contents = Contents(path)
    groups = contents.by_shard(index, listing, grouped=True)
    if missing := [shard for shard in groups if shard not in members]:
        raise CheckpointError(f"{path}: expected shards {listed(map(repr, missing))} in the archive, found {there}")
    for name, keys in groups.items():
        contents.add_shard(path, weights(name, f"{path}:{name}"), found.name, keys, listing, grouped=True)
    return contents.checkpoint()


def _dataset_names(file: H5File) -> list[str]:
    """Paths of all datasets, following links inside the file only. The file is closed if this raises."""
    path = file.source.path
    try:
        with (
            corrupt(f"{path}: expected {file.size} bytes of HDF5, found a corrupt file"),
            Window(file.source, file.source.base, file.size) as window,
        ):
            root = file.open()
            widths = root.id.get_create_plist().get_sizes()
            if isinstance(source := file.source, RemoteReader):
                address = import_h5py().h5o.get_info(root.id).addr
                with RemoteFile(source.store, source.key) as remote:
                    _fetch_groups(remote, source.base + root.userblock_size, address, widths)

            def classes(address: int) -> set[int]:
                """How the header at an address says that values are stored; addresses count from the user block on."""

                def read(place: int, count: int) -> bytes:
                    window.seek(root.userblock_size + place)
                    return window.read(min(count, file.size)) or b""

                return layout_classes(read, address, widths)

            names, soft = _walk(path, root, classes)
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
                raise CheckpointError(
                    f"{path}: expected names of UTF-8, paths of at most {_MAX_NAME} characters, found "
                    f"{reprlib.repr(key)} in {reprlib.repr(prefix)}; it is corrupt"
                )
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
                    "other datasets; copy the values into a dataset of their own"
                )
            if found:
                names.append(name)
            elif isinstance(group[key], h5py.Group):
                inner.append((f"{name}/", group, key, address))
        groups += reversed(inner)
    return names, soft
