"""HDF5 files as Keras writes them: `.weights.h5`, sharded `.weights.json`, and `.keras` archives read in place.

What could lead out of a file (external links, virtual datasets) is refused while the names of its datasets are listed;
`_hdf5_dataset` checks and reads the datasets themselves.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from lazymodel._errors import CheckpointError
from lazymodel._remote.file import RemoteFile
from lazymodel._remote.path import Location
from lazymodel._remote.source import RemoteSource, source_of
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint
from lazymodel.checkpoints._hdf5_ahead import fetch_groups
from lazymodel.checkpoints._hdf5_dataset import H5File, Window, corrupt, dataset_tensor, import_h5py
from lazymodel.checkpoints._hdf5_header import VIRTUAL, layout_classes
from lazymodel.checkpoints._shards import by_shard, indexed_names
from lazymodel.checkpoints._untrusted import (
    MAX_JSON,
    Member,
    check_pointer,
    read_json_object,
    weight_map,
    zip_directory,
    zip_member,
)

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
    members = {info.filename: info for info in zip_directory(path, ".keras")}

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
        groups = by_shard(weight_map(read_json_object(window.read(), index), index), index, grouped=True)
    if missing := [shard for shard in groups if shard not in members]:
        raise CheckpointError(f"{path}: expected shards {listed(map(repr, missing))} in the archive, found {there}")
    shards = [weights(name, f"{path}:{name}") for name in groups]
    names = [
        indexed_names(shard, found.name, groups[name], grouped=True) for name, shard in zip(groups, shards, strict=True)
    ]
    return JoinedCheckpoint(path, list(zip(shards, names, strict=True)))


def _dataset_names(file: H5File) -> list[str]:
    """Paths of all datasets, following links inside the file only. A file that is refused is closed again."""
    path = file.source.path
    try:
        with (
            corrupt(f"{path}: expected {file.size} bytes of HDF5, found a corrupt file"),
            Window(file.source, file.source.base, file.size) as window,
        ):
            root = file.open()
            widths = root.id.get_create_plist().get_sizes()
            if isinstance(source := file.source, RemoteSource):
                address = import_h5py().h5o.get_info(root.id).addr
                with RemoteFile(source.store, source.key) as remote:
                    fetch_groups(remote, source.base + root.userblock_size, address, widths)

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
