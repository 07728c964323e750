"""The start of this process, and the imports since then: the zero of every timeline.

Responsible for times that cannot be measured later, so this imports nothing slow, and `lazymodel/__init__` imports it
first. All times are those of `time.perf_counter`.
"""

from __future__ import annotations

import os
import time

_FIRST = time.perf_counter()  # start of the import of lazymodel


def _process_start() -> float | None:
    """The start of this process, to a hundredth of a second; None if the system does not provide it."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # After the name, which may contain spaces and brackets; field 22 of proc(5), which counts from 1.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        elapsed = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.perf_counter() - elapsed if elapsed >= 0 else None


_START = _process_start()
START_IS_KNOWN = _START is not None
ZERO: float = _FIRST if _START is None else min(_START, _FIRST)  # the system's clock has coarse ticks
IMPORTS: list[tuple[str, float, float]] = []  # package, from, to
if START_IS_KNOWN:
    IMPORTS.append(("before lazymodel", ZERO, _FIRST))


def imported(package: str, start: float = _FIRST) -> None:
    """Called at the end of a package's `__init__`, which began at `start`; packages that it imported count alone."""
    IMPORTS.append((package, max([start, *(stop for _, _, stop in IMPORTS)]), time.perf_counter()))
