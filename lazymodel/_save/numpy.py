"""NumPy's files to write: `.npz`, zip archives of `.npy` members, stored as they are, as `np.savez` writes them; and
folders of `.npy` files.

In an archive the checksum of a member comes before its bytes, which are written in any order. So it is computed once
they are there, from the page cache, and put in its places before the file counts. Formats: APPNOTE.TXT 6.3.10 (zip)
sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3 (zip64); `numpy.lib.format`.
"""

from __future__ import annotations

import dataclasses
import io
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._save.atomic import writing
from lazymodel._save.destination import FileDestination, SavedFile, WholeFolder
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._numpy import npy_names
from lazymodel.checkpoints._untrusted import files_inside, is_numpys

_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_VERSION, _UTF8, _STORED, _LARGE = 45, 1 << 11, 0, 0xFFFFFFFF  # zip64; names in UTF-8; sizes are in the extra field
_DATE = 33  # 1980-01-01, the first day that zip has
# Version, flags, method, time, date and checksum, still unknown, of a member, in both of its headers.
_ABOUT = (_VERSION, _UTF8, _STORED, 0, _DATE, 0)
_READ = 1 << 20  # bytes read at a time
_UNFIT = re.compile(r"(^|/)([./]|$)|[\0\\\ud800-\udfff]")  # what leads out of a folder, is hidden in it, or no name
_LONGEST = 255 - len(".npy")  # bytes of a file's name on all usual file systems


@dataclasses.dataclass(frozen=True)
class _Member:
    """A member: its first byte, the one after its last, and where its checksum goes."""

    start: int
    end: int
    places: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Archive(SavedFile):
    members: tuple[_Member, ...] = ()


def layout(tensors: Mapping[str, LazyTensor], name: str) -> SavedFile:
    """An archive of this name."""
    rest: list[tuple[int, bytes]] = []
    placed: list[tuple[str, LazyTensor, int]] = []
    spans: list[tuple[int, int, int]] = []  # local header, first byte of the member, the one after its last
    position = 0
    for key, tensor in tensors.items():
        member = f"{key}.npy".encode(errors="replace")
        npy = _described(key, tensor)
        if member.decode() != f"{key}.npy" or len(member) > 0xFFFF or "\0" in key:
            raise LazyModelError(f"{key[:80]!r} cannot be the name of an array in an archive; rename it with a mapping")
        size = len(npy) + tensor.nbytes
        extra = struct.pack("<HHQQ", 1, 16, size, size)
        header = _LOCAL + struct.pack("<5H3L2H", *_ABOUT, _LARGE, _LARGE, len(member), len(extra)) + member + extra
        start = position + len(header)
        rest.append((position, header + npy))
        placed.append((key, tensor, start + len(npy)))
        spans.append((position, start, start + size))
        position = start + size
    directory = bytearray()
    members: list[_Member] = []
    for key, (local, start, end) in zip(tensors, spans, strict=True):
        member, size = f"{key}.npy".encode(), end - start
        members.append(_Member(start, end, (local + 14, position + len(directory) + 16)))
        extra = struct.pack("<HHQQQ", 1, 24, size, size, local)
        sizes = struct.pack("<2L5H2L", _LARGE, _LARGE, len(member), len(extra), 0, 0, 0, 0, _LARGE)
        directory += _CENTRAL + struct.pack("<6HL", _VERSION, *_ABOUT) + sizes + member + extra
    count, end = len(members), position + len(directory)
    directory += b"PK\x06\x06" + struct.pack(
        "<Q2H2L4Q", 44, _VERSION, _VERSION, 0, 0, count, count, end - position, position
    )
    directory += b"PK\x06\x07" + struct.pack("<LQL", 0, end, 1)
    directory += b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, *[min(count, 0xFFFF)] * 2, _LARGE, _LARGE, 0)
    rest.append((position, bytes(directory)))
    return _Archive(name, b"", tuple(placed), position + len(directory), tuple(rest), tuple(members))


def _described(key: str, tensor: LazyTensor) -> bytes:
    """The header of a `.npy` file."""
    if not is_numpys(tensor.dtype):
        raise LazyModelError(
            f"{key!r}: NumPy writes {tensor.dtype.name}, which is not its own, without its name; cast it, or save "
            "as safetensors"
        )
    npy = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(tensor.dtype), "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(npy, described)
    return npy.getvalue()


class NpzDestination(FileDestination):
    """A `.npz` file."""

    direct = False

    def commit(self) -> None:
        for archive in self.files:
            assert isinstance(archive, _Archive)
            with writing(self.path), open(self.place(archive), "r+b") as file:
                for member in archive.members:
                    file.seek(member.start)
                    checksum, left = 0, member.end - member.start
                    while left:
                        data = file.read(min(left, _READ))
                        checksum, left = zlib.crc32(data, checksum), left - len(data)
                    for place in member.places:
                        file.seek(place)
                        file.write(struct.pack("<L", checksum))
        super().commit()


def folder_layout(tensors: Mapping[str, LazyTensor]) -> list[SavedFile]:
    """A `.npy` file for each tensor; the slashes of its name are folders."""
    files: list[SavedFile] = []
    for key, tensor in tensors.items():
        if _UNFIT.search(key) or any(len(part.encode()) > _LONGEST for part in key.split("/")):
            raise LazyModelError(
                f"{key[:80]!r} cannot be the path of a file: expected parts of 1 to {_LONGEST} bytes between slashes, "
                "none of which begins with a dot, of UTF-8 without NUL or backslash; rename it with a mapping"
            )
        header = _described(key, tensor)
        files.append(SavedFile(f"{key}.npy", header, ((key, tensor, len(header)),), len(header) + tensor.nbytes))
    return files


class NpyDestination(WholeFolder):
    """A folder of `.npy` files."""

    def _there(self) -> Path | None:
        files = set(files_inside(self.path)) if self.path.exists() else set()
        if foreign := files.difference(f"{name}.npy" for name in npy_names(self.path)):
            raise LazyModelError(
                f"{self.path} holds files that are not .npy files and would be removed with the folder: "
                f"{listed(sorted(foreign))}. Save to another folder, or move these away"
            )
        return self.path if files else None
