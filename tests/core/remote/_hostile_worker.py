"""Reads from a hostile server, mode by mode; prints the most memory that each took, in bytes, and its error."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import lazymodel as lm
from lazymodel._remote.path import remote_path

LOOK = 0.002  # seconds between two looks at the memory
QUICK = {"client_options": {"timeout": "1s"}, "retry_config": {"max_retries": 0}}


def anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def most_while(function: Callable[[], object]) -> int:
    """The most memory at any time, over what there was before, in bytes."""
    ended = threading.Event()
    peak = before = anonymous()

    def look() -> None:
        nonlocal peak
        while not ended.wait(LOOK):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        function()
    finally:
        ended.set()
        thread.join()
    return peak - before


def main() -> None:
    found: dict[str, tuple[int, str]] = {}
    for what, url in json.loads(sys.argv[1]).items():
        errors = ["none"]

        def ask(what: str = what, url: str = url, errors: list[str] = errors) -> None:
            try:
                if what.startswith("read"):
                    place = remote_path(url, QUICK)
                    place.store.get(place.key, 0, np.zeros(1 << 20, np.uint8))
                else:
                    lm.open_checkpoint(url, QUICK)
            except lm.CheckpointError as error:
                errors[0] = str(error)

        found[what] = (most_while(ask), errors[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
