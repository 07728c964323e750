"""Reads from a hostile server, mode by mode; prints the most memory that each took, in bytes, and its error.

Of address space it has no more than 2 GiB beyond what it begins with: what is read without end ends it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np

import lazymodel as lm
from lazymodel._remote.path import remote_path
from tests.private_memory import Peak

QUICK = {"client_options": {"timeout": "1s"}, "retry_config": {"max_retries": 0}}


def main() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found: dict[str, tuple[int, str]] = {}
    for what, url in json.loads(sys.argv[1]).items():
        error = "none"
        with Peak() as peak:
            try:
                if what.startswith("read"):
                    place = remote_path(url, QUICK)
                    place.store.get(place.key, 0, np.zeros(1 << 20, np.uint8))
                else:
                    np.asarray(lm.open_checkpoint(url, QUICK)["w"])
            except lm.CheckpointError as raised:
                error = str(raised)
        found[what] = (peak.nbytes, error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
