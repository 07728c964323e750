"""Private memory of this process (Linux): `RssAnon`, since mapped pages of files are the kernel's."""

from __future__ import annotations

import threading
from pathlib import Path

_INTERVAL = 0.001  # seconds between two samples


def private_nbytes() -> int:
    """What it has now, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


class Peak:
    """What it had before a block, and the most that a thread saw while it ran, in bytes."""

    def __enter__(self) -> Peak:
        self.before = self.most = private_nbytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        """The most beyond what there was before."""
        return self.most - self.before

    def _sample(self) -> None:
        while not self._done.wait(_INTERVAL):
            self.most = max(self.most, private_nbytes())
