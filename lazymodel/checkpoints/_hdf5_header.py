"""Object headers of HDF5 files, read without the HDF5 library, as far as must be known before it opens a dataset.

The library crashes on descriptions of virtual datasets that are damaged, before anyone can ask it whether a dataset is
virtual. So this is found out here: in which way a dataset says that its values are stored. Nothing is believed beyond
that; what a header means is the library's business. Format: HDF5 File Format Specification 3.0, sections IV.A.1
(object headers) and IV.A.2.i (the data layout message).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

VIRTUAL = 3  # the layout class of a dataset whose values lie in other datasets
_LAYOUT, _CONTINUATION = 0x08, 0x10  # types of messages
_MAX_HEADER = 16 << 20  # bytes of one object's header; a message has at most 64 KiB, and a dataset some ten of them


def layout_classes(read: Callable[[int, int], bytes], address: int, widths: tuple[int, int]) -> set[int]:
    """The classes of storage that the object header at an address names: none for a group, one for a sound dataset.

    `read` gives the bytes at an address, as many as asked for or as the file has; `widths` are the bytes of an address
    and of a length. ValueError where there is no object header, or one that ends early.
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
