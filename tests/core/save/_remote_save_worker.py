"""A process of `test_remote_save`.

`python _remote_save_worker.py killed ORIGIN` saves over what is in a bucket and is killed at the last of three shards.
`python _remote_save_worker.py PROCESS ADDRESS ORIGIN FOLDER` is one of two that save arrays of which both hold parts.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import lazymodel as lm
from lazymodel._remote import upload
from tests.core.save._save_worker import back, finish, joined


def options(origin: str) -> dict[str, Any]:
    return {"base_url": f"{origin}/gcs", "bearer_token": "a-token", "client_options": {"allow_http": True}}


def killed(origin: str) -> None:
    def kill(done: int, total: int) -> None:
        if done > 0.9 * total:
            os.kill(os.getpid(), signal.SIGKILL)

    arrays = {name: np.ones((32, 32), "float32") for name in "abc"}
    url, given = "gs://uploads/saved", options(origin)
    lm.save(arrays, url, storage_options=given, overwrite=True, max_shard_size=6 << 10, progress=kill)


def main() -> None:
    if sys.argv[1] == "killed":
        killed(sys.argv[2])
        return
    process, address, origin, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    values, arrays = joined(process, address)
    given = {"storage_options": options(origin), "max_shard_size": "1KB", "overwrite": True}
    outcomes: dict[str, Any] = {}

    def failing(who: int) -> Any:
        def fail(done: int, total: int) -> None:
            if process == who and done:
                raise ValueError("no more")

        return fail

    def outcome(name: str, arrays: Any, **more: Any) -> None:
        try:
            lm.save(arrays, f"gs://uploads/{name}", **{**given, **more})
        except (lm.LazyModelError, ValueError) as error:
            outcomes[name] = str(error)

    sent: list[int] = []
    lm.save(arrays, "gs://uploads/plain", progress=lambda done, total: sent.append(total), **given)
    outcomes["sent"] = sent[0]
    upload.LEAST_PART = upload.PART = 64  # so that a tensor comes in several bands, and rounds
    lm.save(arrays, "gs://uploads/mapped", mapping=back, max_host_memory=1 << 14, **given)
    lm.save(arrays, "gs://uploads/one.safetensors", **given)
    outcome("plain", arrays, progress=failing(1))
    outcome("one.safetensors", arrays, progress=failing(0))
    outcome("differ", arrays if process == 0 else {name: array for name, array in arrays.items() if name != "rows"})
    finish(process, folder, values, outcomes)


if __name__ == "__main__":
    main()
