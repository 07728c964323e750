"""Byte counts: reading what a person types (`"16GiB"`) and printing what a person reads."""

from __future__ import annotations

import numbers
import re
import reprlib
from fractions import Fraction

import numpy as np

from lazymodel._errors import LazyModelError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power  # SI, as disk vendors and JEDEC-free tools print it
    _UNITS[f"{_letter}IB"] = 1024**_power  # IEC 80000-13

_MOST = (1 << 63) - 1  # bytes; what operating systems can count
_LEAST_BUDGET = 512  # bytes: a sector of a disk. With less, tensors go one element at a time


def parse_bytes(value: int | str, *, name: str = "a byte count", at_least: int = 0) -> int:
    """Bytes as an int, from an int or a string such as `"16GiB"`, `"64 MB"` or `"512"`.

    Args:
        value: What a person wrote. A float that is whole is taken as well, as `16e9`.
        name: What it is called where it was written, for the message.
        at_least: The fewest bytes that make sense.

    Raises:
        LazyModelError: It is no count of bytes, has no known unit, or is out of bounds.
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
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(amount) < 1024 or unit == "PiB":
            return f"{int(amount)} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    raise AssertionError  # unreachable: the last unit always returns
