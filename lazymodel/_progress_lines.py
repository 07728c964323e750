"""Progress where no bar can be drawn: a line on standard error every few seconds, for logs and pipes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from lazymodel._bytes import format_bytes
from lazymodel._report import _printable

_INTERVAL = 5.0  # seconds between lines: a load of an hour leaves some hundred lines in a log


class LogLines:
    """Writes how far the work is: at most every `_INTERVAL` seconds, as it advances, and at its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._description = ""
        self._done = self._total = 0
        self._started: float | None = None
        self._written = 0.0

    def start(self, total_nbytes: int, description: str) -> None:
        with self._lock:
            self._description = _printable(description)
            self._done, self._total = 0, total_nbytes
            self._started = self._written = self._clock()

    def advance(self, nbytes: int, description: str | None = None) -> None:
        with self._lock:
            self._done += nbytes
            now = self._clock()
            if now - self._written >= _INTERVAL:
                self._write(now)

    def finish(self) -> None:
        with self._lock:
            self._write(self._clock())
            self._started = None

    def _write(self, now: float) -> None:
        if self._started is None:
            return
        self._written = now
        seconds = now - self._started
        rate = f", {format_bytes(self._done / seconds)}/s" if seconds > 0 and self._done else ""
        percent = 100 * self._done // self._total if self._total else 100
        line = (
            f"{self._description}: {percent}%, {format_bytes(self._done)} of {format_bytes(self._total)} "
            f"in {_duration(seconds)}{rate}\n"
        )
        stream = sys.stderr
        try:
            if stream is not None:  # programs without a console have none
                stream.write(line)  # in one piece, since other processes may write there as well
                stream.flush()
        except (OSError, ValueError):
            pass  # whoever read the pipe has gone, or the stream is closed: no reason to stop the work


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02d}:{int(seconds) % 60:02d}"
