"""Content hashes of checkpoint files: who states one, and whether the file's bytes agree, on a disk or at a URL.

Names in a manifest are compared with the names of the checkpoint's files, which the caller knows, and never opened, so
a manifest cannot lead anywhere. An object is read in ranges that carry the ETag of its first answer, and by the store
that the checkpoint is opened with: what was hashed is what will be read.

A hash that is stored alongside the files shows that they are what was downloaded or written. Only one that comes from
elsewhere, given by the caller, also shows that nobody replaced both.

Formats: https://huggingface.co/docs/hub/local-cache; `huggingface_hub/_local_folder.py` for the metadata of
`hf download --local-dir`; https://huggingface.co/docs/hub/api, `/api/models/{repo}/revision/{revision}?blobs=true`, for
the hub's hashes; GNU coreutils' manual, "md5sum invocation", for manifests, with `--tag` for BSD's lines.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import LocalPath, Location, location, reading_ahead
from lazymodel._show.text import first_lines, listed
from lazymodel._tensors.buffers import parallel
from lazymodel._tensors.byte_reader import VERIFIED, ByteReader, reading
from lazymodel.checkpoints._checkpoint import Verify
from lazymodel.checkpoints._untrusted import mismatch, read_at_most

MAX_MANIFEST = 16 << 20  # bytes; a hundred thousand files are below this
_MAX_THREADS = 8  # SHA-256 takes 1 to 2 GB/s a core, so that more would wait for the disk
_PIECE = 1 << 20  # bytes hashed at a time

_HEX_DIGITS = {"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128, "git-sha1": 40}
_BY_LENGTH = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}  # as manifests mean it

_GIVEN = re.compile(r"(?:([a-z0-9-]+):)?([0-9A-Fa-f]+)")
_MANIFEST = re.compile(r"(?:(md5|sha1|sha256|sha512)sums?|checksums?)(?:\.txt)?", re.IGNORECASE)
_MANIFESTS = ("SHA256SUMS", "sha256sums.txt", "checksums.txt")  # that are looked for where nothing can be listed
_SUFFIXES = (".sha256", ".sha512", ".sha1", ".md5")
_COREUTILS = re.compile(r"(\\?)([0-9A-Fa-f]+)[ \t]+\*?(.+)")
_BSD = re.compile(r"([A-Za-z0-9-]+) ?\((.+)\) ?= ?([0-9A-Fa-f]+)")
_ESCAPES = re.compile(r"\\([\\nr])")


class Hash(NamedTuple):
    """The expected hash of a file in lower-case hexadecimal digits, and its source, for messages."""

    algorithm: str  # `md5`, `sha1`, `sha256`, `sha512`, or `git-sha1` for the id that git gives a file
    digest: str
    source: str


def verify_files(paths: Iterable[str | os.PathLike[str]], against: Verify, root: Any) -> list[ByteReader]:
    """Compares files with the hashes stated for them, each read once; `against` is `verify` of `open_checkpoint`.

    All hashes that True finds must agree. A manifest's names are relative to its own folder or to `root`, the
    checkpoint's; a mapping's to `root`, a path or `RemotePath`. Files without a hash are found before any is read.

    Returns:
        The files as they were when their hash was taken. Their `check_unchanged` finds out, once other code has read
        them, whether that is what it read.
    """
    if against is False:
        return []
    files = [os.fspath(path) for path in paths]
    hashes = stated_hashes(files, against, root)
    if missing := [file for file in files if not hashes[file]]:
        raise CheckpointError(no_hash(missing, against))
    sources: dict[str, ByteReader] = {}
    problems = list(mismatches(hashes, root, sources).values())
    for file, source in sources.items():
        source.check_unchanged()
        # The longest one is what processes compare to know that they read the same.
        longest = max(hashes[file], key=lambda each: (len(each.digest), each.algorithm))
        if source.version is not None and not problems:
            VERIFIED[source.version] = f"verified {longest.algorithm} {longest.digest}"
    if problems:
        raise CheckpointError("\n".join(first_lines(problems)))
    return list(sources.values())


def mismatches(
    hashes: Mapping[str, Sequence[Hash]], root: Any, sources: dict[str, ByteReader] | None = None
) -> dict[str, str]:
    """Reads files, and adds them to `sources`; for each that has another hash than stated, a message that says so."""
    stop = threading.Event()
    sources = {} if sources is None else sources
    sources.update({file: location(root).named(file).reader() for file in hashes})
    threads = max(min(len(sources), os.cpu_count() or 1, _MAX_THREADS), 1)
    problems: dict[str, str] = {}
    ranges = [(source, np.array([(0, source.size)], np.int64)) for source in sources.values()]

    def digests_of(file: str) -> dict[str, str]:
        return _digests(sources[file], {hash.algorithm for hash in hashes[file]}, stop)

    # Prefetching ends first: leaving `parallel` waits for its threads.
    with parallel(digests_of, sources, threads, "verify", stopped=stop) as found, reading_ahead(ranges):
        for file, digests in zip(sources, found, strict=True):
            for expected in hashes[file]:
                if digests[expected.algorithm] != expected.digest:
                    what = f"{expected.algorithm} {expected.digest} as {expected.source} states"
                    fix = "the file is damaged or of another version. Download or copy it again."
                    problems[file] = str(mismatch(file, what, digests[expected.algorithm], fix))
    return problems


class _Stopped(Exception):
    """Another file failed, or the user did not want to wait."""


def _digests(source: ByteReader, algorithms: Iterable[str], stop: threading.Event) -> dict[str, str]:
    """Algorithm → the digits that a file's content has."""
    # These compare, they do not sign: md5 is fine where a system's policy forbids it for security.
    hashers = {name: hashlib.new(name.removeprefix("git-"), usedforsecurity=False) for name in algorithms}
    if "git-sha1" in hashers:  # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        hashers["git-sha1"].update(b"blob %d\0" % source.size)
    buffer = np.empty(min(_PIECE, source.size), np.uint8)
    for start in range(0, source.size, _PIECE):
        if stop.is_set():
            raise _Stopped
        piece = buffer[: source.size - start]
        source.read_into(start, piece)
        for hasher in hashers.values():
            hasher.update(piece.data)
    source.close()
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def no_hash(files: Sequence[str], against: Verify) -> str:
    """The message for files whose hash nobody states."""
    if against is True:
        where = "from a Hugging Face cache or download, or SHA256SUMS, checksums.txt or <file>.sha256 alongside"
        fix = "pass verify={file name: 'sha256:<hex>'} or the path of a manifest"
    else:
        given = listed([repr(name) for name in against]) or "no file" if isinstance(against, Mapping) else against
        where = f"for every file of the checkpoint, its index included, in {given}"
        fix = "names are relative to the checkpoint's or the manifest's folder"
    return str(mismatch(f"no hash is known for {listed(files)}", f"one {where}", "none", fix))


# --- who states a hash -----------------------------------------------------------------------------------------------


def stated_hashes(files: Sequence[str], against: Verify, root: Any) -> dict[str, list[Hash]]:
    """The hashes stated for each file, none where nobody states one; arguments as of `verify_files`."""
    root = location(root).absolute()
    places = {file: root.named(file).absolute() for file in files}
    if against is not True:
        stated = _given(against, root)
        return {file: stated.get(place.identity, []) for file, place in places.items()}
    hashes = {
        file: [hash for algorithm, digits, source in place.published() for hash in _parse(digits, algorithm, source)]
        for file, place in places.items()
    }
    manifests: dict[Location, dict[str, list[Hash]]] = {}
    for file, place in places.items():
        parents: list[Location] = list(place.parents)
        for folder in parents[: parents.index(root) + 1] if root in parents else parents[:1]:
            if folder not in manifests:
                manifests[folder] = stated = {}
                for manifest in _manifests_in(folder, files):
                    for key, found in _read_manifest(manifest, folder.identity).items():
                        stated.setdefault(key, []).extend(found)
            hashes[file] += manifests[folder].get(place.identity, [])
    return {file: list({hash[:2]: hash for hash in reversed(found)}.values())[::-1] for file, found in hashes.items()}


def _in(folder: str, name: str) -> str:
    """The identity of what has a name in a folder."""
    # Without the check, Python 3.11's normpath ends a name at its first NUL.
    return name if "\0" in name else os.path.normpath(os.path.join(folder, name))


def _given(against: Any, root: Location) -> dict[str, list[Hash]]:
    """Identity of a file → the hashes that a mapping, or a manifest on disk, states for it."""
    stated: dict[str, list[Hash]] = {}
    if isinstance(against, Mapping):
        for name, text in cast("Mapping[str, Any]", against).items():
            match = _GIVEN.fullmatch(text) if isinstance(text, str) else None
            found = _parse(match[2], match[1] or _BY_LENGTH.get(len(match[2])), "verify") if match else []
            if not found:
                expected = f"a hash for {name!r} such as 'sha256:<64 hex digits>' (also {', '.join(_HEX_DIGITS)})"
                raise mismatch("verify", expected, repr(text), "copy it from whoever published the file")
            stated.setdefault(_in(root.identity, name), []).extend(found)
    elif isinstance(against, str | os.PathLike):
        manifest = LocalPath(cast(str, against))
        if not os.path.isfile(manifest):
            raise CheckpointError(f"verify: expected a manifest of file hashes at {manifest}, found no such file")
        # Relative to its own folder, or kept elsewhere with the names that the files have in their own folder.
        for folder in dict.fromkeys((root.identity, manifest.parent.identity)):
            stated.update(_read_manifest(manifest, folder))
    else:
        raise LazyModelError(f"verify is True, False, the path of a manifest, or a mapping of hashes; got {against!r}")
    return stated


def _manifests_in(folder: Location, files: Sequence[str]) -> Iterator[Location]:
    """The manifests in a folder, as far as they are named as such."""
    if not folder.lists:
        names = [*_MANIFESTS, *(f"{os.path.basename(file)}.sha256" for file in files)]
    else:
        with reading(folder, "list"):
            names = sorted(path.name for path in folder.iterdir())
        names = [name for name in names if _MANIFEST.fullmatch(name) or name.endswith(_SUFFIXES)]
    return (path for name in names if (path := folder / name).is_file())


def _read_manifest(manifest: Location, folder: str) -> dict[str, list[Hash]]:
    """Identity of a file → hashes that a manifest states; its names are relative to the folder of an identity."""
    # Lines that state no hash (comments, signatures, other algorithms) are passed over, as `sha256sum --check` does.
    text = os.fsdecode(read_at_most(manifest, MAX_MANIFEST, "a manifest"))
    own = _MANIFEST.fullmatch(manifest.name)
    algorithm = own[1].lower() if own and own[1] else None
    about = ""  # the file that a manifest of one is about
    if manifest.suffix in _SUFFIXES:
        algorithm, about = manifest.suffix[1:], manifest.name.removesuffix(manifest.suffix)
    stated: dict[str, list[Hash]] = {}
    for line in map(str.strip, text.split("\n")):
        if match := _BSD.fullmatch(line):
            label, name, digits = match.groups()
            found = _parse(digits, label.lower().replace("sha2-", "sha"), str(manifest))
        elif match := _COREUTILS.fullmatch(line):
            escaped, digits, name = match.groups()
            if escaped:
                name = _ESCAPES.sub(lambda code: {"n": "\n", "r": "\r"}.get(code[1], code[1]), name)
            found = _parse(digits, algorithm or _BY_LENGTH.get(len(digits)), str(manifest))
        else:
            name, found = about, _parse(line, algorithm if about else None, str(manifest))
        if about and os.path.basename(name) == about:
            name = about  # written where the file was made: `build/model.safetensors`
        stated.setdefault(_in(folder, name), []).extend(found)
    return stated


def _parse(digits: str, algorithm: str | None, source: str) -> list[Hash]:
    """A hash; none where the algorithm is unknown or these are not its digits."""
    if algorithm is None or _HEX_DIGITS.get(algorithm) != len(digits) or not re.fullmatch("[0-9A-Fa-f]+", digits):
        return []
    return [Hash(algorithm, digits.lower(), source)]
