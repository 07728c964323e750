"""What lists the datasets of an HDF5 file at a URL, fetched many pieces at a time before the HDF5 library asks for it.

The library follows one address after the other, and Keras' files have a few small pieces between any two tensors: from
afar, each would be a round trip of its own. Here the groups are followed a level at a time, all their pieces at once.
Nothing comes of it but blocks that are there when the library reads them, so whatever is not understood is left to it.
Format: HDF5 File Format Specification 3.0, sections III.A.1 (B-trees), III.C (symbol tables), III.D (local heaps).
"""

from __future__ import annotations

from collections.abc import Callable

from lazymodel._remote.file import RemoteFile
from lazymodel.checkpoints._hdf5_header import messages

_GROUP = 0x11  # the type of the message that says where a group's B-tree and heap are
_MOST = 8 << 20  # bytes that are fetched for this, at most: what is kept of a file
_PIECE = 512  # bytes of the first look at a piece; nearly all are shorter

Piece = tuple[str, int, int]  # what kind it is, its address, how many bytes are known to belong to it


class _NotHere(Exception):
    """Bytes that would have to be fetched."""

    def __init__(self, start: int, stop: int) -> None:
        self.span = start, stop


def fetch_groups(file: RemoteFile, base: int, root: int, widths: tuple[int, int]) -> None:
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

    pieces: list[Piece] = [("header", root, _PIECE)]
    seen = set(pieces)
    fetched = 0
    while pieces and fetched < _MOST:
        wanted: list[tuple[int, int]] = []
        later: list[Piece] = []
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


def _following(read: Callable[[int, int], bytes], piece: Piece, widths: tuple[int, int]) -> list[Piece]:
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
        inner: list[Piece] = [("header", number(place + offset), _PIECE) for place in places]
        for place in places:
            if number(place + 2 * offset, 4) == 1:  # of a group, whose B-tree and heap are noted here as well
                inner += _group(data[place + 2 * offset + 8 : place + step], offset)
        return inner
    return []


def _group(addresses: bytes, offset: int) -> list[Piece]:
    tree, heap = (int.from_bytes(addresses[at : at + offset], "little") for at in (0, offset))
    return [("tree", tree, _PIECE), ("heap", heap, _PIECE)]
