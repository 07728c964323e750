"""Byte counts: reading what a person types (`"16GiB"`) and printing what a person reads."""

from __future__ import annotations

import re

from lazymodel._errors import LazyModelError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power  # SI, as disk vendors and JEDEC-free tools print it
    _UNITS[f"{_letter}IB"] = 1024**_power  # IEC 80000-13


def parse_bytes(value: int | str) -> int:
    """Bytes as an int, from an int or a string such as `"16GiB"`, `"64 MB"` or `"512"`.

    Raises:
        LazyModelError: The string has no known unit, or the count is negative.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise LazyModelError(f"cannot read {value!r} as bytes; write an int or a string such as '16GiB' or '512MB'")
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(value, bool) or int(value) != value or value < 0:
        raise LazyModelError(f"a byte count is a non-negative int or a string such as '16GiB'; got {value!r}")
    return int(value)


def format_bytes(count: int | float) -> str:
    """`17179869184` → `16.00 GiB`; whole bytes below 1 KiB."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(amount) < 1024 or unit == "PiB":
            return f"{int(amount)} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    raise AssertionError  # unreachable: the last unit always returns
