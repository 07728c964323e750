"""Members of zip archives, which Keras', NumPy's and PyTorch's files are: where they are, after every check.

Format: APPNOTE.TXT 6.3.10 (zip), sections 4.3.7 and 4.4. Everything raises `CheckpointError` for what is corrupt,
hostile or cannot be read.
"""

from __future__ import annotations

import zipfile
from typing import Any, cast

from lazymodel._remote.path import Location
from lazymodel._tensors.byte_reader import ByteReader, Seekable
from lazymodel.checkpoints._untrusted import check_pointer, corrupt, mismatch, truncated

MAX_RATIO = 1100  # deflate cannot compress further than 1032 : 1 (https://zlib.net/zlib_tech.html)
LOCAL_HEADER = 30  # bytes of a member's local file header, before its name


class Window(Seekable):
    """A range of a file as a file of its own, such as a member of an uncompressed archive. It opens nothing itself."""

    def __init__(self, source: ByteReader, base: int, size: int) -> None:
        super().__init__()
        self._source, self._base, self.size = source, base, size
        self._file = source.open_file() if source.remote else None  # which keeps what was fetched

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count, position = max(min(len(view), self.size - self.position), 0), self._base + self.position
        if self._file is None:
            data = self._source.peek(position, count)
            count = len(data)
            view[:count] = data
        else:
            self._file.seek(position)
            count = cast(Any, self._file).readinto(view[:count])
        self.position += count
        return count


def zip_directory(source: ByteReader, path: Location, kind: str) -> list[zipfile.ZipInfo]:
    """The members of the archive that a file is; nothing of what it lists is checked yet."""
    check_pointer(path)
    with corrupt(f"{path}: expected a {kind} archive, found a truncated or corrupt one. Download or copy it again"):
        return zipfile.ZipFile(cast(Any, Window(source, 0, source.size))).infolist()


def member_start(path: Location, info: zipfile.ZipInfo) -> int:
    """The byte at which a member of an archive starts, after every check that needs none of its bytes."""
    what = f"{path}: member {info.filename!r}"
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if info.flag_bits & 1:
        raise mismatch(what, "it as Keras, NumPy and PyTorch write it", "it encrypted", "save it without a password")
    if info.compress_type != zipfile.ZIP_STORED and not deflated:
        fix = "unpack the archive, or load and save it again with what wrote it"
        raise mismatch(what, "no compression, or deflate", f"method {info.compress_type}", fix)
    size, header = path.stat().st_size, b""
    if 0 <= info.header_offset < size:
        with path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(LOCAL_HEADER) or b""
    if len(header) < LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise mismatch(what, f"it at byte {info.header_offset}", "something else")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + LOCAL_HEADER + names
    if start + info.compress_size > size:
        raise truncated(path, f"{info.filename} up to byte {start + info.compress_size}", f"{size} bytes")
    if info.file_size > info.compress_size * MAX_RATIO if deflated else info.file_size != info.compress_size:
        found = f"{info.compress_size} stored, which cannot be as many"
        raise mismatch(what, f"{info.file_size} bytes", found)
    return start


def stored_start(path: Location, info: zipfile.ZipInfo, by: str, fix: str) -> int:
    """As `member_start`, of a member that must not be compressed, so that it is read in place."""
    start = member_start(path, info)
    if info.compress_type != zipfile.ZIP_STORED:
        expected = f"{info.filename} to be stored without compression, as {by} does"
        raise mismatch(path, expected, "it compressed", fix)
    return start
