"""Content hashes of objects: who states them, and reading what is hashed. `_verify` does the same for files on disks.

An object is read in ranges that carry the ETag of its first answer, and by the store that the checkpoint is opened
with: what was hashed is what will be read.

Source of the hub's hashes: https://huggingface.co/docs/hub/api, `/api/models/{repo}/revision/{revision}?blobs=true`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import RemotePath
from lazymodel._remote.source import RemoteSource, reading_ahead
from lazymodel._show.text import first_lines
from lazymodel.checkpoints._verify import (
    Hash,
    Verify,
    given_hashes,
    is_manifest,
    mismatches,
    named,
    no_hash,
    note_verified,
    read_manifest,
)

_PIECE = 4 << 20  # bytes hashed at a time
_MANIFESTS = ("SHA256SUMS", "sha256sums.txt", "checksums.txt")  # that are asked for where nothing can be listed
_TOP = "/"  # what the checkpoint's folder is called in names of files


def verify_objects(files: Sequence[str], verify: Verify, root: RemotePath) -> None:
    """Compares objects with the hashes stated for them; `verify` as `open_checkpoint`, files as they are shown."""
    hashes = known_object_hashes(files, verify, root)
    if lacking := [file for file in files if not hashes[file]]:
        raise CheckpointError(no_hash(lacking, verify))
    if problems := list(object_mismatches(hashes, root).values()):
        raise CheckpointError("\n".join(first_lines(problems)))
    note_verified((RemoteSource(root / _name(file, root)) for file in files), hashes)


def object_mismatches(hashes: Mapping[str, Sequence[Hash]], root: RemotePath) -> dict[str, str]:
    """Reads the objects; for each that has another hash than stated, a message that says so."""
    sources = {file: RemoteSource(root / _name(file, root)) for file, stated in hashes.items() if stated}
    wants = [(source, np.array([(0, source.size)], np.int64)) for source in sources.values()]
    with reading_ahead(wants) as ahead:
        return mismatches(hashes, lambda file: _content(sources[file]), ahead.close)


def known_object_hashes(files: Sequence[str], verify: Verify, root: RemotePath) -> dict[str, list[Hash]]:
    """The hashes stated for each object, none where nobody states one."""
    if verify is True:
        stated = _stated_by_hub(root)
        for folder in dict.fromkeys([root, *((root / _name(file, root)).parent for file in files)]):
            for manifest in _manifests(folder, files):
                for name, hashes in read_manifest(manifest, _inside(folder, root)).items():
                    stated[name] = [*stated.get(name, []), *hashes]
    else:
        stated = given_hashes(verify, [_TOP])
    return {file: stated.get(named(_TOP, _name(file, root)), []) for file in files}


def _name(file: str, root: RemotePath) -> str:
    return file.removeprefix(f"{root}/")


def _inside(folder: RemotePath, root: RemotePath) -> str:
    return named(_TOP, folder.relative_to(root) if folder.key != root.key else "")


def _manifests(folder: RemotePath, files: Sequence[str]) -> Iterator[RemotePath]:
    if folder.store.lists:
        yield from (path for path in folder.iterdir() if is_manifest(path.name) and path.is_file())
        return
    of_one = (f"{os.path.basename(file)}.sha256" for file in files)
    yield from (path for name in (*_MANIFESTS, *of_one) if (path := folder / name).is_file())


def _stated_by_hub(root: RemotePath) -> dict[str, list[Hash]]:
    """Of large files the hash of their content, of others the id that git gives them."""
    stated: dict[str, list[Hash]] = {}
    for path, (algorithm, digest) in root.store.hashes().items():
        if root.key and not path.startswith(f"{root.key}/"):
            continue
        inside = path.removeprefix(f"{root.key}/") if root.key else path
        stated[named(_TOP, inside)] = [Hash(algorithm, digest, "the hub")]
    return stated


def _content(source: RemoteSource) -> tuple[int, Iterator[Any]]:
    def pieces() -> Iterator[Any]:
        buffer = np.empty(min(_PIECE, source.size), np.uint8)
        for start in range(0, source.size, _PIECE):
            piece = buffer[: source.size - start]
            source.read_into(start, piece)
            yield piece

    return source.size, pieces()
