"""Content hashes of checkpoint files: who states one, and whether the file's bytes agree.

Names in a manifest are compared with the names of the checkpoint's files, which the caller knows, and never opened, so
a manifest cannot lead anywhere.

A hash that lies beside the files shows that they are what was downloaded or written. Only one that comes from
elsewhere, given by the caller, also shows that nobody replaced both.

Formats: https://huggingface.co/docs/hub/local-cache; `huggingface_hub/_local_folder.py` for the metadata of
`hf download --local-dir`; GNU coreutils' manual, "md5sum invocation", for manifests, with `--tag` for BSD's lines.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location
from lazymodel._show.text import first_lines, listed
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.source import VERIFIED, Source
from lazymodel.checkpoints._untrusted import read_at_most, reading

Verify = bool | str | os.PathLike[str] | Mapping[str, str]
"""What `verify=` takes: whether to use the hashes that the folder states, a manifest's path, or name → hash."""

Content = Callable[[str], tuple[int, Iterator[Any]]]  # of a file: its bytes in number, and in pieces
MAX_MANIFEST = 16 << 20  # bytes; a hundred thousand files are below this
_MAX_METADATA = 4 << 10  # bytes; three short lines
_MAX_THREADS = 8  # SHA-256 takes 1 to 2 GB/s a core, so that more would wait for the disk
_BUFFER = 256 << 10  # bytes read at a time

_HEX_DIGITS = {"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128, "git-sha1": 40}
_BY_LENGTH = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}  # as manifests mean it
_BY_ETAG_LENGTH = {40: "git-sha1", 64: "sha256"}  # as the hub means it: git's blob id, or the LFS object's hash

_GIVEN = re.compile(r"(?:([a-z0-9-]+):)?([0-9A-Fa-f]+)")
_MANIFEST = re.compile(r"(?:(md5|sha1|sha256|sha512)sums?|checksums?)(?:\.txt)?", re.IGNORECASE)
_SUFFIXES = (".sha256", ".sha512", ".sha1", ".md5")
_COREUTILS = re.compile(r"(\\?)([0-9A-Fa-f]+)[ \t]+\*?(.+)")
_BSD = re.compile(r"([A-Za-z0-9-]+) ?\((.+)\) ?= ?([0-9A-Fa-f]+)")
_ESCAPES = re.compile(r"\\([\\nr])")


class Hash(NamedTuple):
    """What a file's content should hash to, in lower-case hexadecimal digits, and who states it, for messages."""

    algorithm: str  # `md5`, `sha1`, `sha256`, `sha512`, or `git-sha1` for the id that git gives a file
    digest: str
    source: str


def verify_files(
    paths: Iterable[str | os.PathLike[str]], verify: Verify, root: str | os.PathLike[str]
) -> list[FileSource]:
    """Compares files with the hashes stated for them, each read once, several at a time; `verify` as `open_checkpoint`.

    All hashes that True finds must agree. A manifest's names are relative to its own folder or to `root`, the
    checkpoint's; a mapping's to `root`. Files without a hash are found before any is read.

    Returns:
        The files as they were when their hash was taken. Their `check_unchanged` tells, once other code has read
        them, whether that is what it read.
    """
    if verify is False:
        return []
    files = [os.fspath(path) for path in paths]
    hashes = known_hashes(files, verify, root)
    if lacking := [file for file in files if not hashes[file]]:
        raise CheckpointError(no_hash(lacking, verify))
    sources = [FileSource(file) for file in files]
    problems = list(mismatches(hashes).values())
    for source in sources:
        source.check_unchanged()
    if problems:
        raise CheckpointError("\n".join(first_lines(problems)))
    note_verified(sources, hashes)
    return sources


def note_verified(sources: Iterable[Source], hashes: Mapping[str, Sequence[Hash]]) -> None:
    """Notes that files have the hashes that were stated for them, by which processes compare what they read."""
    for source in sources:
        longest = max(hashes[source.path], key=lambda each: (len(each.digest), each.algorithm))
        if source.version is not None:
            VERIFIED[source.version] = f"verified {longest.algorithm} {longest.digest}"


def known_hashes(files: Sequence[str], verify: Verify, root: str | os.PathLike[str]) -> dict[str, list[Hash]]:
    """The hashes stated for each file, none where nobody states one; arguments as of `verify_files`."""
    folder = os.path.abspath(root)
    if verify is True:
        manifests: dict[str, dict[str, list[Hash]]] = {}
        return {file: _beside(file, folder, manifests) for file in files}
    # Relative to its own folder, or kept elsewhere with the names that the files have in their own folder.
    own = [os.path.abspath(Path(verify).parent)] if isinstance(verify, str | os.PathLike) else []
    stated = given_hashes(verify, [folder, *own])
    return {file: stated.get(os.path.abspath(file), []) for file in files}


def given_hashes(verify: Verify, folders: Sequence[str]) -> dict[str, list[Hash]]:
    """Path → the hashes that a mapping, or a manifest on disk, states for it; its names are relative to the folders, a
    mapping's to the first.
    """
    stated: dict[str, list[Hash]] = {}
    if isinstance(verify, Mapping):
        for name, text in verify.items():
            stated.setdefault(named(folders[0], name), []).append(_parse_given(name, text))
    elif isinstance(verify, str | os.PathLike):
        manifest = Path(verify)
        if not os.path.isfile(manifest):
            raise CheckpointError(
                f"expected a manifest of file hashes at {manifest}, found no such file; pass its path, or a mapping of "
                "file name to 'sha256:<hex>'"
            )
        for base in dict.fromkeys(folders):
            stated.update(read_manifest(manifest, base))
    else:
        raise LazyModelError(
            "verify is True, False, the path of a manifest, or a mapping of file name to 'sha256:<hex>'; got "
            f"{verify!r}"
        )
    return stated


def mismatches(
    hashes: Mapping[str, Sequence[Hash]], content: Content | None = None, stop_reading: Callable[[], None] | None = None
) -> dict[str, str]:
    """Reads the files and returns, for each that has another hash than stated, a message that says so.

    `content` is how they are read, from disks by default, and `stop_reading` ends that at once.
    """
    content = content or _content
    files = [file for file, expected in hashes.items() if expected]
    stop = threading.Event()
    threads = max(min(len(files), os.cpu_count() or 1, _MAX_THREADS), 1)
    problems: dict[str, str] = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="lazymodel-verify") as pool:
        try:
            running = [
                pool.submit(_digests, file, {hash.algorithm for hash in hashes[file]}, stop, content) for file in files
            ]
            for file, future in zip(files, running, strict=True):
                digests = future.result()
                for expected in hashes[file]:
                    if digests[expected.algorithm] != expected.digest:
                        problems[file] = (
                            f"{file}: expected {expected.algorithm} {expected.digest} as {expected.source} states, "
                            f"found {digests[expected.algorithm]}; the file is damaged or of another version. "
                            "Download or copy it again."
                        )
        except BaseException:
            stop.set()  # leaving the pool waits for its threads, and a file takes minutes
            if stop_reading is not None:
                stop_reading()
            raise
    return problems


def no_hash(files: Sequence[str], verify: Verify) -> str:
    """The message for files whose hash nobody states."""
    names = listed(files)
    every = "for every file of the checkpoint, its index included"
    if verify is True:
        said = (
            "one from a Hugging Face cache or download, or in SHA256SUMS, checksums.txt or <file>.sha256 beside the "
            "file, found none. Pass verify={file name: 'sha256:<hex>'} or the path of a manifest."
        )
    elif isinstance(verify, Mapping):
        given = listed([repr(name) for name in verify]) or "no file"
        said = f"one {every}, found them for {given}. Names are relative to the checkpoint's folder."
    else:
        said = (
            f"a line {every}, in {verify}, found none. Names are relative to the manifest's or the checkpoint's folder."
        )
    return f"no hash is known for {names}: expected {said}"


# --- who states a hash -----------------------------------------------------------------------------------------------


def _beside(file: str, root: str, manifests: dict[str, dict[str, list[Hash]]]) -> list[Hash]:
    """The hashes that a cache, a download's metadata and manifests state for a file; `manifests` by folder."""
    path = os.path.abspath(file)
    hashes = [hash for hash in (_from_cache(path), _from_download(path)) if hash is not None]
    parents = [os.fspath(parent) for parent in Path(path).parents]
    for folder in parents[: parents.index(root) + 1] if root in parents else parents[:1]:
        if folder not in manifests:
            manifests[folder] = _manifests_in(folder)
        hashes += manifests[folder].get(path, ())
    unique: dict[tuple[str, str], Hash] = {}
    for hash in hashes:
        unique.setdefault((hash.algorithm, hash.digest), hash)
    return list(unique.values())


def _from_cache(path: str) -> Hash | None:
    """From the name of the blob that a file in a cache's `snapshots/<revision>/` links to."""
    folder, name = os.path.split(os.path.realpath(path))
    if os.path.basename(folder) != "blobs" or not os.path.isdir(os.path.join(os.path.dirname(folder), "snapshots")):
        return None
    return _parse(name, _BY_ETAG_LENGTH.get(len(name)), f"the name of its Hugging Face blob, {folder}/{name},")


def _from_download(path: str) -> Hash | None:
    """From `<folder>/.cache/huggingface/download/<name>.metadata`: lines of commit, ETag and time."""
    for parent in Path(path).parents:
        metadata = parent / ".cache" / "huggingface" / "download" / f"{os.path.relpath(path, parent)}.metadata"
        if os.path.isfile(metadata):  # which, unlike pathlib's, is no error where the name gets too long
            with reading(metadata), open(metadata, "rb") as stream:
                lines = stream.read(_MAX_METADATA).decode(errors="replace").split("\n")
            etag = lines[1].strip() if len(lines) > 1 else ""
            return _parse(etag, _BY_ETAG_LENGTH.get(len(etag)), str(metadata))
    return None


def _manifests_in(folder: str) -> dict[str, list[Hash]]:
    """Absolute path → hashes, of all manifests in a folder that are named as such."""
    with reading(folder, "list"):
        names = sorted(os.listdir(folder))
    stated: dict[str, list[Hash]] = {}
    for name in names:
        manifest = Path(folder, name)
        if is_manifest(name) and manifest.is_file():
            for path, hashes in read_manifest(manifest, folder).items():
                stated.setdefault(path, []).extend(hashes)
    return stated


def is_manifest(name: str) -> bool:
    """Whether files of hashes are called so."""
    return _MANIFEST.fullmatch(name) is not None or name.endswith(_SUFFIXES)


def read_manifest(manifest: Location, folder: str) -> dict[str, list[Hash]]:
    """Path → hashes that a manifest states; its names are relative to `folder`."""
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
            hash = _parse(digits, label.lower().replace("sha2-", "sha"), str(manifest))
        elif match := _COREUTILS.fullmatch(line):
            escaped, digits, name = match.groups()
            if escaped:
                name = _ESCAPES.sub(lambda code: {"\\": "\\", "n": "\n", "r": "\r"}[code[1]], name)
            hash = _parse(digits, algorithm or _BY_LENGTH.get(len(digits)), str(manifest))
        else:
            name, hash = about, _parse(line, algorithm, str(manifest)) if about else None
        if about and os.path.basename(name) == about:
            name = about  # written where the file was made: `build/model.safetensors`
        if hash is not None:
            stated.setdefault(named(folder, name), []).append(hash)
    return stated


def named(folder: str, name: str) -> str:
    """The path of a name in a folder."""
    # Without the check, Python 3.11's normpath ends a name at its first NUL.
    return name if "\0" in name else os.path.normpath(os.path.join(folder, name))


def _parse(digits: str, algorithm: str | None, source: str) -> Hash | None:
    """A hash, or None where the algorithm is unknown or these are not its digits."""
    if algorithm is None or _HEX_DIGITS.get(algorithm) != len(digits) or not re.fullmatch("[0-9A-Fa-f]+", digits):
        return None
    return Hash(algorithm, digits.lower(), source)


def _parse_given(name: str, text: Any) -> Hash:
    hash = None
    if isinstance(text, str) and (match := _GIVEN.fullmatch(text)):
        hash = _parse(match[2], match[1] or _BY_LENGTH.get(len(match[2])), "verify")
    if hash is None:
        raise CheckpointError(
            f"verify: expected a hash for {name!r} such as 'sha256:<64 hex digits>' (also {', '.join(_HEX_DIGITS)}), "
            f"found {text!r}"
        )
    return hash


# --- hashing ---------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Another file failed, or the user did not want to wait."""


def _content(file: str) -> tuple[int, Iterator[Any]]:
    stream = open(file, "rb", buffering=0)  # noqa: SIM115  (closed when all of it was read, or nobody wants it)

    def pieces() -> Iterator[Any]:
        buffer = memoryview(bytearray(_BUFFER))
        with stream:
            while count := stream.readinto(buffer):
                yield buffer[:count]

    return os.fstat(stream.fileno()).st_size, pieces()


def _digests(file: str, algorithms: Iterable[str], stop: threading.Event, content: Content) -> dict[str, str]:
    """Algorithm → the digits that the file's content has."""
    # These compare, they do not sign: md5 is fine where a system's policy forbids it for security.
    hashers = {name: hashlib.new(name.removeprefix("git-"), usedforsecurity=False) for name in algorithms}
    with reading(file):
        size, pieces = content(file)
        if "git-sha1" in hashers:  # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            hashers["git-sha1"].update(b"blob %d\0" % size)
        for piece in pieces:
            if stop.is_set():
                raise _Stopped
            for hasher in hashers.values():
                hasher.update(piece)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}
