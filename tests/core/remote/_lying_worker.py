"""Loads from a lying server, again and again; prints the most memory that took, in bytes, and what came of each time.

Run as `python -m tests.core.remote._lying_worker URL TIMES`. It has 2 GiB of address space beyond what it begins with.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import lazymodel as lm
from tests.private_memory import Peak

OPTIONS: dict[str, Any] = {
    "client_options": {"timeout": "2s", "read_timeout": "250ms"},
    "retry_config": {"max_retries": 3, "backoff": {"init_backoff": 0.001, "max_backoff": 0.01}},
}


def load(url: str) -> str:
    try:
        with lm.open_checkpoint(url, OPTIONS) as checkpoint:
            for name in checkpoint:
                values = np.asarray(checkpoint[name])
                assert (values == np.arange(values.size).reshape(values.shape) + int(name[1:])).all(), name
            assert len(checkpoint) == 6
    except lm.LazyModelError as error:
        return str(error)
    return "right"


def main() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with Peak() as peak:
        found = [load(sys.argv[1]) for _ in range(int(sys.argv[2]))]
    print(json.dumps((peak.nbytes, found, threading.active_count())))


if __name__ == "__main__":
    main()
