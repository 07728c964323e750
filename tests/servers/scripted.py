"""A web server whose every answer a test writes itself, in a thread of the test's own process.

For what no real store does and `object_server.py` cannot be told. An answer is a status, headers and a body; a body
that is an iterator is sent piece by piece, for as long as the client listens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Asked(NamedTuple):
    """A request: its URL's path and query, both as they came, and its headers."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]

    @property
    def range(self) -> tuple[int, int]:
        """First byte and the one after the last."""
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1


Reply = tuple[int, dict[str, str], "bytes | Iterator[bytes]"]


def part(data: bytes, asked: Asked, **headers: str) -> Reply:
    """What a server answers that has an object and is asked for a range of it; `headers` with `_` for `-`."""
    start, stop = asked.range if "Range" in asked.headers else (0, len(data))
    body = data[start:stop]
    span = {"Content-Range": f"bytes {start}-{start + len(body) - 1}/{len(data)}"}
    return 206, span | {name.replace("_", "-"): value for name, value in headers.items()}, body


def only(path: str, reply: Callable[[Asked], Reply]) -> Callable[[Asked], Reply]:
    """A server that has one file, and nothing else of which readers of checkpoints ask whether it is there."""
    return lambda asked: reply(asked) if asked.path == path else (404, {}, b"")


@contextmanager
def scripted(reply: Callable[[Asked], Reply]) -> Generator[str]:
    """The origin of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            status, headers, body = reply(Asked(self.command, url.path, url.query, self.headers))  # pyright: ignore[reportArgumentType]
            self.send_response(status)
            if isinstance(body, bytes):
                headers = {"Content-Length": str(len(body)), **headers}
            for name, value in headers.items():
                self.send_header(name, value)
            try:
                self.end_headers()
                for piece in [body] if isinstance(body, bytes) else body:
                    if self.command != "HEAD":
                        self.wfile.write(piece)
            except OSError:  # the client went away
                self.close_connection = True

        do_HEAD = do_GET

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], OSError):  # the client went away
                super().handle_error(request, client_address)

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
