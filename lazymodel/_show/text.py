"""What people read and type, as text: byte counts, closest names, names that fold into one, lists cut short.

Names come from files that anyone may have written: `printable` keeps their control characters from a terminal.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import numbers
import re
import reprlib
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

from lazymodel._errors import LazyModelError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_MAX_VALUES = 4  # numbers that a fold lists one by one before it gives the first and the last only
_CANDIDATES = 50  # names that `closest` compares in full
_SUGGESTIONS = 3
LISTED = 8  # names or findings of one kind that a message lists before it only counts

# Byte counts ----------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):  # of SI, as disk vendors print it, and of IEC 80000-13
    _UNITS.update({f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power})

_MOST = (1 << 63) - 1  # bytes; what operating systems can count
_LEAST_BUDGET = 512  # bytes: a sector of a disk. With less, tensors go one element at a time


def parse_bytes(value: int | str, *, name: str = "a byte count", at_least: int = 0) -> int:
    """Bytes as an int, from an int or a string such as `"16GiB"`, `"64 MB"` or `"512"`.

    A float that is whole is taken as well, as `16e9`. `name` is what it is called where it was written.

    Raises:
        LazyModelError: It is no count of bytes, has no known unit, or is less than `at_least` or more than 8 EiB.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise LazyModelError(
                f"{name}: cannot read {value!r} as bytes; write an int or a string such as '16GiB' or '512MB'"
            )
        count = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real) or value % 1 != 0:  # nan, inf too
        raise LazyModelError(f"{name} is an int or a string such as '16GiB', in bytes; got {value!r}")
    else:
        count = int(value)
    if not at_least <= count <= _MOST:
        bound = f"at least {at_least}" if count < at_least else "at most 8 EiB"
        raise LazyModelError(f"{name} is {bound} bytes; got {reprlib.repr(value)}")
    return count


def parse_budget(max_host_memory: int | str) -> int:
    """Bytes of host memory that work may take, as `parse_bytes`, and not so few that it would never end."""
    return parse_bytes(max_host_memory, name="max_host_memory", at_least=_LEAST_BUDGET)


def format_bytes(count: int | float) -> str:
    """`17179869184` → `16.00 GiB`; whole bytes below 1 KiB."""
    if abs(count) < 1024:
        return f"{int(count)} B"
    power = next((power for power in range(1, 5) if abs(count) / 1024**power < 1024), 5)
    return f"{count / 1024**power:.2f} {'KMGTP'[power - 1]}iB"


# Names ----------------------------------------------------------------------------------------------------------------


def closest(name: str, names: Iterable[str]) -> str:
    """What to add to an error about an unknown name: `; closest: 'a', 'b'`, or nothing where none is close.

    Names are ranked by the letter pairs they share before the few best are compared in full, so thousands of names
    take milliseconds. Those that begin with it are first. Case is ignored.
    """
    pairs = _letter_pairs(name)

    def shared(other: str) -> float:
        theirs = _letter_pairs(other)
        return len(pairs & theirs) / max(len(pairs) + len(theirs), 1)

    candidates = {other.lower(): other for other in heapq.nlargest(_CANDIDATES, dict.fromkeys(names), key=shared)}
    begin = [other for other in candidates if len(name) > 2 and other.startswith(name.lower())]
    near = dict.fromkeys([*begin, *difflib.get_close_matches(name.lower(), candidates, n=_SUGGESTIONS)])
    matches = [candidates[match] for match in itertools.islice(near, _SUGGESTIONS)]
    return f"; closest: {', '.join(map(repr, matches))}" if matches else ""


def _letter_pairs(name: str) -> set[tuple[str, str]]:
    return set(itertools.pairwise(f" {name.lower()} "))


def printable(text: str) -> str:
    """The text with control and other unprintable characters written as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


# Wrapping -------------------------------------------------------------------------------------------------------------

# Where a line may end, best first; never within a number, nor between it and its unit.
_BREAKS = (
    re.compile(r"(?<=\S\s)(?=\S)(?![KMGTP]?i?B\b)"),
    re.compile(r"(?<=[/_])|(?<=[.:,;=|-])(?![\d.…])"),
)


def wrapped(text: str, width: int, breaks: Sequence[re.Pattern[str]] = _BREAKS) -> list[str]:
    """Lines of at most so many columns: broken between words, long words at separators, and the rest where it must."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= width:
        return [text]
    if not breaks:
        return chop_cells(text, width)
    lines = [""]
    for piece in breaks[0].split(text):
        if cell_len(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            lines += wrapped(piece.rstrip(), width, breaks[1:])
            lines[-1] += piece[len(piece.rstrip()) :]
    return [line.rstrip() for line in lines if line]


def longest_piece(text: str) -> int:
    """Columns of the longest part that `wrapped` keeps whole if it can."""
    from rich.cells import cell_len

    return max(cell_len(piece.rstrip()) for word in _BREAKS[0].split(text) for piece in _BREAKS[1].split(word))


# Folding --------------------------------------------------------------------------------------------------------------

# Longer runs of digits are text: Python may refuse to read more of them as an int, and a hostile name may have them.
_NUMBER = re.compile(rf"(?<!\d)(\d{{1,{sys.int_info.str_digits_check_threshold}}})(?!\d)")


def unnumbered(path: str) -> tuple[str, ...]:
    """The text between the numbers: what paths that fold together have in common."""
    return tuple(_NUMBER.split(path)[::2])


def fold(paths: Sequence[str]) -> str:
    """One name for paths that differ only in numbers: `block_0/w`, `block_1/w` → `block_{0..1}/w`.

    Numbers that are equal in all paths stay as they are. Where several differ, the name stands for combinations of
    them, not necessarily for all: the count beside it is the exact one.
    """
    columns = zip(*map(_NUMBER.split, paths), strict=True)
    return "".join(_fold_numbers(column) if place % 2 else column[0] for place, column in enumerate(columns))


def _fold_numbers(column: Sequence[str]) -> str:
    numbers = sorted(dict.fromkeys(column), key=lambda digits: (int(digits), digits))
    if len(numbers) == 1:
        return numbers[0]
    if [int(digits) for digits in numbers] == list(range(int(numbers[0]), int(numbers[0]) + len(numbers))):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    if len(numbers) <= _MAX_VALUES:
        return f"{{{','.join(numbers)}}}"
    return f"{{{numbers[0]},{numbers[1]},…,{numbers[-1]}}}"


def grouped_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in the order in which the first of each appears."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def grouped_names(names: Iterable[str]) -> list[list[str]]:
    """Names that differ only in numbers together."""
    return list(grouped_by(names, unnumbered).values())


def folded_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers as one."""
    return [fold(group) for group in grouped_names(names)]


# Lists ----------------------------------------------------------------------------------------------------------------


def listed(texts: Iterable[str], *, count: int | None = None, most: int = LISTED, separator: str = ", ") -> str:
    """`a, b, c and 12 more`: the first of many; `count` is how many they are where `texts` has the first only."""
    first = list(texts)
    left = (len(first) if count is None else count) - most
    return separator.join(first[:most]) + (f" and {left:,} more" if left > 0 else "")


def first_lines(lines: Sequence[str], *, most: int = LISTED, indent: str = "") -> list[str]:
    """The first of many lines, and one that counts the others."""
    return [*lines[:most], *([f"{indent}… and {len(lines) - most:,} more"] if len(lines) > most else [])]


def first_of(texts: Sequence[object], what: str) -> str:
    """The first of several findings, and how many they are: `… (12 tensors do not match)`."""
    return str(texts[0]) + (f" ({len(texts):,} {what})" if len(texts) > 1 else "")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
