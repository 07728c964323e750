"""moto's S3 in a process of its own, with a bucket: for tests of remote checkpoints and of saving to a bucket.

    with S3Server() as s3:
        store = S3Store("bucket", **s3.options())

Objects lie in moto's memory. It cannot be told to be slow or faulty; `object_server.py` can.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).parents[2]
_WAIT = 30  # seconds for an answer and for the process to end


class S3Server:
    """A running server with one empty bucket."""

    bucket = "bucket"

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.servers.s3"]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.origin = f"http://127.0.0.1:{json.loads(self._process.stdout.readline())}"
        self._ask("PUT", self.bucket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.communicate(timeout=_WAIT)  # its standard input ends, and so does it

    def options(self) -> dict[str, Any]:
        """Arguments of obstore's `S3Store` besides the bucket. moto takes any credentials."""
        return {
            "endpoint": self.origin,
            "region": "us-east-1",
            "access_key_id": "anybody",
            "secret_access_key": "a-secret",
            "virtual_hosted_style_request": False,  # the bucket in the path: there is no name to put it into
            "client_options": {"allow_http": True},
        }

    def reset(self) -> None:
        """The bucket is empty again."""
        self._ask("POST", "moto-api/reset")
        self._ask("PUT", self.bucket)

    def open_uploads(self) -> list[str]:
        """The keys of multipart uploads that were begun and neither completed nor aborted."""
        return sorted(re.findall(r"<Upload>.*?<Key>(.*?)</Key>", self._ask("GET", f"{self.bucket}?uploads")))

    def _ask(self, method: str, path: str) -> str:
        request = urllib.request.Request(f"{self.origin}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=_WAIT) as answer:
            return answer.read().decode()


def main() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
