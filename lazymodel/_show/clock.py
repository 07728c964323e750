"""When this process started, and what was imported since: the zero of every timeline.

Responsible for the moments that are over once anything else runs, so this imports nothing that takes time, and is
itself the first that `lazymodel/__init__` imports. Moments are those of `time.perf_counter`.
"""

from __future__ import annotations

import os
import time

_FIRST = time.perf_counter()  # lazymodel begins to be imported


def _process_start() -> float | None:
    """When this process started, to a hundredth of a second; None where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # After the name, which may have spaces and brackets; proc(5) counts this one as the 22nd.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        elapsed = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.perf_counter() - elapsed if elapsed >= 0 else None


_START = _process_start()
START_IS_KNOWN = _START is not None
ZERO: float = _FIRST if _START is None else min(_START, _FIRST)  # a tick of the system's clock is coarse
IMPORTS: list[tuple[str, float, float]] = []  # package, from, to
if START_IS_KNOWN:
    IMPORTS.append(("before lazymodel", ZERO, _FIRST))


def imported(package: str, start: float = _FIRST) -> None:
    """Called at the end of a package's `__init__`, which began at `start`; packages that it imported count alone."""
    IMPORTS.append((package, max([start, *(stop for _, _, stop in IMPORTS)]), time.perf_counter()))
