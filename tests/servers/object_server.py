"""A store of objects in a process of its own, for tests and benchmarks of remote checkpoints.

    with ObjectServer(root) as server:
        server.configure(bandwidth=200e6, latency=0.02)
        store = GCSStore("bucket", **server.gcs())       # root/bucket/… is what lies in it
        …
        server.counters()["bytes"]

It serves the files below `root` over plain HTTP, as Google Cloud Storage, as Azure Blob Storage and as Hugging Face
(`_dialects.py`), all at the same time, and can be told to be slow, faulty or hostile (`_answers.py`, `_controls.py`).
S3 is moto's: `s3.py`.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

_ROOT = Path(__file__).parents[2]
_WAIT = 30  # seconds for the process to start, to answer and to end


class ObjectServer:
    """A running server and its controls. Paths of objects are relative to `root`, in every dialect."""

    def __init__(self, root: Path, *, tls: bool = False) -> None:
        self.root = Path(root)
        self._keys = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "tests.servers._process", "--root", str(self.root)]
        if tls:
            command += ["--tls", *self._certificate()]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._ports: dict[str, int] = json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.communicate(timeout=_WAIT)  # its standard input ends, and so does it
        self._keys.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    # Where things are.

    def origin(self, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self._ports[scheme]}"

    def url(self, path: str, dialect: str = "http", scheme: str = "http") -> str:
        return f"{self.origin(scheme)}/{dialect}/{quote(path)}"

    @property
    def hub(self) -> str:
        """What `HF_ENDPOINT` has to be."""
        return f"{self.origin()}/hf"

    @property
    def certificate(self) -> bytes:
        """PEM, for `client_options={"root_certificate": …}`; only with `tls`."""
        return (Path(self._keys.name) / "certificate.pem").read_bytes()

    def gcs(self) -> dict[str, Any]:
        """Arguments of obstore's `GCSStore` besides the bucket, which is a folder below `root`."""
        base = f"{self.origin()}/gcs"
        return {"base_url": base, "bearer_token": "a-token", "client_options": {"allow_http": True}}

    def azure(self) -> dict[str, Any]:
        """Arguments of obstore's `AzureStore` besides the container, which is a folder below `root`."""
        endpoint = f"{self.origin()}/azure"
        return {
            "endpoint": endpoint,
            "account_name": "account",
            "bearer_token": "a-token",
            "client_options": {"allow_http": True},
        }

    # What it does.

    def configure(self, **settings: float | None) -> None:
        """`bandwidth`: bytes/s of all connections together; `latency`: seconds before the first byte of each answer;
        `page_size`: entries of a listing's page."""
        self._ask("configure", **settings)

    def faults(
        self,
        kinds: Sequence[str] = (),
        *,
        every: int = 0,
        requests: Sequence[int] = (),
        methods: Sequence[str] = ("GET",),
        path: str | None = None,
        retry_after: float | str | None = None,
    ) -> None:
        """Every nth request fails, or those numbered from 1 on, with the kinds in turn; none: no more faults.

        Kinds: a status ("503", "429", …, with `retry_after`), "reset" (before the first byte), "reset-body" and
        "truncate" (half of the body, then a reset or the end of the connection), "stall" (half of the body, then
        nothing until the client goes), "lost" (what was asked is done, the answer is a reset). Requests are those whose
        answers carry an object's bytes, and with `methods` such as "PUT" those that write; with `path`, those whose
        URL's path matches the pattern.
        """
        chosen = {"kinds": [*kinds], "every": every, "requests": [*requests], "methods": [*methods]}
        self._ask("faults", **chosen, path=path, retry_after=retry_after)

    def hostile(self, path: str, mode: str | None, **options: Any) -> None:
        """Answers with `path`'s bytes, or of a URL's path that begins with "/", are made hostile; None: no longer.

        Modes: "endless", "endless-length", "wrong-range", "wrong-size", "changing-length",
        "ignores-range", "redirect" (with `location`; of itself: a loop), "many-headers", "large-header", "longer",
        "shorter", "less-than-range", "more-than-range", "no-etag", "drip" (with `pace`, bytes/s).
        """
        self._ask("hostile", path=path, mode=mode, **options)

    def replace(self, path: str, *, after: int, source: str | None = None) -> None:
        """After `after` answers with `path`'s bytes it is another object: a copy of `source`, or its own bytes anew."""
        self._ask("replace", path=path, after=after, source=source)

    def repository(self, name: str, **settings: Any) -> None:
        """Of Hugging Face: `token` that it wants, whether it is `gated`, `revisions` by name besides `main`."""
        self._ask("repository", name=name, **settings)

    def reset(self) -> None:
        """Counters, controls and uploads as at the start. The files stay."""
        self._ask("reset")

    def reset_counters(self) -> None:
        self._ask("reset_counters")

    def counters(self) -> dict[str, Any]:
        """What was asked and sent since the last reset.

        `requests`, `connections`, `most_in_flight`; `bytes` of bodies, as given to the kernel: what a client that went
        away never read is among them; `authorization`, `cdn_authorization`: requests that came with the header; by
        name: `methods`, `statuses` ("0": a reset), `faults`, `paths` (requests), `path_bytes`, `ranges` ([start, stop]
        or None each), `uploads` (begun, completed, aborted), `open_uploads`. Requests from before a reset are no part
        of it.
        """
        return self._ask("counters")

    def _ask(self, command: str, /, **arguments: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._ports["http"], timeout=_WAIT)
        try:
            connection.request("POST", f"/-/{command}", json.dumps(arguments))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(text.decode())
        return json.loads(text)

    def _certificate(self) -> list[str]:
        """Made by the openssl command for the two names of this machine; good for a day."""
        if shutil.which("openssl") is None:
            raise RuntimeError("TLS needs the openssl command")
        certificate, key = (str(Path(self._keys.name) / name) for name in ("certificate.pem", "key.pem"))
        extensions = ["subjectAltName=DNS:localhost,IP:127.0.0.1", "basicConstraints=critical,CA:FALSE"]
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "1", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
        for extension in extensions:
            command += ["-addext", extension]
        subprocess.run(command, check=True, capture_output=True)
        return [certificate, key]
