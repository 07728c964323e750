"""Text for people: byte counts, closest names, names that fold into one, shortened lists, colours of figures.

Names come from files of any origin: `printable` keeps their control characters from a terminal. `quiet_tensorflow`
keeps the log of TensorFlow, which KerasHub imports, off the standard error of our commands.
"""

from __future__ import annotations

import contextlib
import difflib
import heapq
import itertools
import numbers
import os
import re
import reprlib
import sys
import tempfile
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from lazymodel._errors import LazyModelError, required

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_MAX_VALUES = 4  # numbers, or ranges of them, that a fold lists; with more, it shows only some
_CANDIDATES = 50  # names that `closest` compares in full
_SUGGESTIONS = 3
LISTED = 8  # names or findings of one kind that a message lists; the rest is counted

# Byte counts ----------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):  # SI, as disk vendors use, and IEC 80000-13
    _UNITS.update({f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power})

_MOST = (1 << 63) - 1  # bytes; the maximum that operating systems can count
_LEAST_BUDGET = 512  # bytes: a sector of a disk. With less, tensors would be read one element at a time


def parse_bytes(value: int | str, *, name: str = "a byte count", at_least: int = 0) -> int:
    """Bytes as an int, from an int or a string such as `"16GiB"`, `"64 MB"` or `"512"`.

    A whole float such as `16e9` is also accepted. `name` is used in messages.

    Raises:
        LazyModelError: It is not a count of bytes, has an unknown unit, or is less than `at_least` or more than 8 EiB.
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


def parse_budget(size: int | str | None, default: int) -> int:
    """Bytes of host memory that work may take, like `parse_bytes`; raises for less than a minimum."""
    return default if size is None else parse_bytes(size, name="max_host_memory", at_least=_LEAST_BUDGET)


def format_bytes(count: int | float) -> str:
    """`17179869184` → `16.00 GiB`; whole bytes below 1 KiB."""
    if abs(count) < 1024:
        return f"{int(count)} B"
    power = next((power for power in range(1, 5) if abs(count) / 1024**power < 1024), 5)
    return f"{count / 1024**power:.2f} {'KMGTP'[power - 1]}iB"


# Names ----------------------------------------------------------------------------------------------------------------


def closest(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: `; closest: 'a', 'b'`, or an empty string if none is close.

    Names are ranked by the letter pairs they share before the best few are compared in full, so thousands of names
    take milliseconds. Names that begin with `name` come first. Case is ignored.
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


# Folding --------------------------------------------------------------------------------------------------------------

# Longer runs of digits are text: Python may reject them as an int, and a hostile name may contain them.
_NUMBER = re.compile(rf"(?<!\d)(\d{{1,{sys.int_info.str_digits_check_threshold}}})(?!\d)")


def unnumbered(path: str) -> tuple[str, ...]:
    """The text between the numbers, which is equal for paths that fold together."""
    return tuple(_NUMBER.split(path)[::2])


def numbers_in(path: str) -> tuple[int, ...]:
    """The numbers themselves, by which paths are in their natural order."""
    return tuple(map(int, _NUMBER.split(path)[1::2]))


def fold(paths: Sequence[str]) -> str:
    """One name for paths that differ only in numbers: `block_0/w`, `block_1/w` → `block_{0..1}/w`.

    Numbers that are equal in all paths stay as they are. If several numbers differ, the name stands for combinations
    of them, not necessarily for all: the count shown with it is exact.
    """
    columns = zip(*map(_NUMBER.split, paths), strict=True)
    return "".join(_fold_numbers(column) if place % 2 else column[0] for place, column in enumerate(columns))


def _fold_numbers(column: Sequence[str]) -> str:
    runs = list[list[str]]()
    for digits in sorted(dict.fromkeys(column), key=lambda digits: (int(digits), digits)):
        if runs and int(digits) == int(runs[-1][-1]) + 1:
            runs[-1].append(digits)
        else:
            runs.append([digits])
    texts = [run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    if len(texts) > _MAX_VALUES:
        texts[2:-1] = ["…"]
    return column[0] if len(set(column)) == 1 else f"{{{','.join(texts)}}}"


def grouped_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in the order in which each key first appears."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def grouped_names(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that differ only in numbers."""
    return list(grouped_by(names, unnumbered).values())


def folded_names(names: Iterable[str]) -> list[str]:
    """One name for each group of names that differ only in numbers."""
    return [fold(group) for group in grouped_names(names)]


# Lists ----------------------------------------------------------------------------------------------------------------


def listed(texts: Iterable[str], *, count: int | None = None, most: int = LISTED, separator: str = ", ") -> str:
    """`a, b, c and 12 more`: the first of many; `count` is their number if `texts` contains only the first ones."""
    first = list(texts)
    left = (len(first) if count is None else count) - most
    return separator.join(first[:most]) + (f" and {left:,} more" if left > 0 else "")


def first_lines(lines: Sequence[str], *, most: int = LISTED, indent: str = "") -> list[str]:
    """The first of many lines, and one that counts the others."""
    return [*lines[:most], *([f"{indent}… and {len(lines) - most:,} more"] if len(lines) > most else [])]


def first_of(texts: Sequence[object], what: str) -> str:
    """The first of several findings, and their number: `… (12 tensors do not match)`."""
    return str(texts[0]) + (f" ({len(texts):,} {what})" if len(texts) > 1 else "")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 also shows lines of the level INFO; JAX sets 1 if the user set nothing

# TensorFlow 2.21 logs these at any level: lines of the level INFO, and one that these come too early.
_NOISE = re.compile(
    rb"I\d{4} [\d:.]+ +\d+ [\w./-]+\.cc:\d+\] .*|WARNING: All log messages before absl::InitializeLog.*"
)


@contextlib.contextmanager
def quiet_tensorflow() -> Generator[None, None, None]:
    """Within the block, TensorFlow's import log is not shown; all other output is shown at the end."""
    if os.environ.setdefault(_LEVEL, "1") == "0":
        yield
        return
    with tempfile.TemporaryFile() as caught:
        sys.stderr.flush()
        shown = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            caught.seek(0)
            rest = b"".join(line for line in caught if not _NOISE.fullmatch(line.rstrip(b"\r\n")))
            with contextlib.suppress(OSError):  # the reader has gone
                os.write(shown, rest)
            os.close(shown)


# Okabe and Ito's colours, distinguishable with any kind of colour vision; without black and yellow, used for lines.
PALETTE = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8A8A8A")


def empty_figure(inches: tuple[float, float]) -> Any:
    """A `matplotlib.figure.Figure` of a size."""
    return required("matplotlib.figure", "plot", "matplotlib").Figure(figsize=inches, layout="constrained")


def finished_figure(figure: Any, title: str, path: Any = None) -> Any:
    """The figure with its title, written to `path` unless that is None."""
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(printable(title).replace("$", r"\$"), fontsize=10)
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:  # no such folder, or an unknown suffix
            raise LazyModelError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return figure
