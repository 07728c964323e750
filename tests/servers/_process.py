"""The object server's own process: connections, bytes onto the wire, the admin endpoint. `object_server.py` starts it.

    python -m tests.servers._process --root FOLDER [--port 0] [--tls CERTIFICATE KEY]

Prints its ports as a line of JSON, and ends with its standard input. Every kind of port stands twice: the second is the
CDN's, another origin to any client.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import ssl
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.servers._answers import Answer, Span, as_json, fault, hostile, refusal
from tests.servers._controls import Controls
from tests.servers._dialects import Dialects, Request
from tests.servers._objects import Objects

_ADMIN = {"configure", "faults", "hostile", "replace", "repository", "reset", "reset_counters", "counters"}
_KEYED_BY_OBJECT = {"http", "gcs", "azure", "cdn"}  # counters name the object, not the URL's path
_LOOK = 0.1  # seconds between two looks at whether a stalled answer's client is still there
_TLS_PIECE = 1 << 18  # bytes: without sendfile, they go through memory
_ZEROS = bytes(1 << 16)


class Incoming:
    """A request's body: `length` bytes of the connection."""

    def __init__(self, file: Any, length: int) -> None:
        self._file, self._left = file, length

    def read(self, nbytes: int, /) -> bytes:
        piece = self._file.read(min(nbytes, self._left))
        self._left -= len(piece)
        return piece

    def drain(self) -> None:
        while self._left and self.read(1 << 20):
            pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    counting = 0  # of the request under way; the admin endpoint's are not counted
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self.server.controls.count("connections")

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ssl.SSLError):  # the client went away
            self.close_connection = True

    def answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        dialect, _, rest = path.lstrip("/").partition("/")
        body = Incoming(self.rfile, int(self.headers.get("Content-Length", 0)))
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        if dialect == "-":
            self.send(self.administer(rest, body), "")
            return
        origin, cdn = self.server.origins(self.headers.get("Host", ""))
        request = Request(self.command, rest, query, self.headers, body, origin, cdn)  # pyright: ignore[reportArgumentType]
        controls, span = self.server.controls, self.headers.get("Range", self.headers.get("x-ms-range", ""))
        key = rest if dialect in _KEYED_BY_OBJECT else path
        if "Authorization" in self.headers:
            controls.count("authorization")
        with controls.request(self.command, key, span) as self.counting:
            answer = self.decide(dialect, path, request)
            body.drain()
            controls.answered(0 if answer.sent == -1 else answer.status)
            if controls.latency:
                time.sleep(controls.latency)
            try:
                self.send(answer, key)
            finally:
                answer.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PROPFIND = answer

    def decide(self, dialect: str, path: str, request: Request) -> Answer:
        """The dialect's answer, with what the test asked for done to it. What fails does not happen."""
        controls = self.server.controls
        if dialect == "cdn" and not self.server.is_cdn:
            return refusal(HTTPStatus.NOT_FOUND)
        writes = request.method not in ("GET", "HEAD")
        kind = controls.next_fault(request.method, path, carries_object=writes)
        if writes and kind is not None and kind != "lost":
            return fault(Answer(HTTPStatus.OK, body=b"<done/>"), kind, controls.plan.retry_after)
        answer = self.server.dialects.answer(dialect, request)
        if kind is None and answer.path and not writes and controls.plan.path is None:
            kind = controls.next_fault(request.method, path, carries_object=True)
        if kind is not None:
            return fault(answer, kind, controls.plan.retry_after)
        if (found := controls.next_hostility(answer.path or path)) is not None:
            if answer.path:
                found["size"] = self.server.dialects.objects.meta(answer.path).size
            return hostile(answer, found)
        return answer

    def administer(self, name: str, body: Incoming) -> Answer:
        if name not in _ADMIN:
            return refusal(HTTPStatus.NOT_FOUND)
        objects, controls = self.server.dialects.objects, self.server.controls
        arguments = json.loads(b"".join(iter(lambda: body.read(1 << 16), b"")) or b"{}")
        try:
            result = getattr(controls, name)(**arguments)
        except (TypeError, ValueError) as error:
            return refusal(HTTPStatus.BAD_REQUEST, str(error))
        if name == "reset":
            objects.forget_uploads()
        if name == "counters":
            result["open_uploads"] = objects.open_uploads()
        return as_json(result)

    # Onto the wire.

    def send(self, answer: Answer, key: str) -> None:
        if answer.sent == -1:
            self.end(answer.then)
            return
        length = answer.size if answer.length is None else answer.length
        framing = ("Transfer-Encoding", "chunked") if length == -1 else ("Content-Length", str(length))
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        bodiless = answer.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        lines += [f"{name}: {value}" for name, value in answer.headers + ([] if bodiless else [framing])]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if self.command == "HEAD" or bodiless:
            return
        if answer.then == "endless":
            self.send_without_end(chunked=length == -1, key=key)
            return
        nbytes = answer.size if answer.sent is None else answer.sent
        self.send_body(answer, nbytes, key)
        if answer.extra:
            self.connection.sendall(answer.extra)
        self.end(answer.then)

    def send_body(self, answer: Answer, nbytes: int, key: str) -> None:
        body, at, controls = answer.body, 0, self.server.controls
        while at < nbytes:
            piece = min(nbytes - at, controls.link.piece)
            if answer.pace is not None:
                piece = min(piece, 16)
                time.sleep(piece / answer.pace)
            controls.link.wait(piece)
            stop = at + piece
            while at < stop:
                done = self.send_piece(body, at, stop - at)
                if not done:  # the file is shorter than it was
                    raise ConnectionAbortedError
                at += done
                if key:
                    controls.sent(key, done, self.counting)

    def send_piece(self, body: bytes | Span, at: int, nbytes: int) -> int:
        if isinstance(body, bytes):
            self.connection.sendall(memoryview(body)[at : at + nbytes])
            return nbytes
        if isinstance(self.connection, ssl.SSLSocket):
            piece = os.pread(body.file.fileno(), min(nbytes, _TLS_PIECE), body.start + at)
            self.connection.sendall(piece)
            return len(piece)
        return os.sendfile(self.connection.fileno(), body.file.fileno(), body.start + at, nbytes)

    def send_without_end(self, *, chunked: bool, key: str) -> None:
        piece = b"%x\r\n%s\r\n" % (len(_ZEROS), _ZEROS) if chunked else _ZEROS
        generation = self.server.controls.generation
        self.close_connection = True
        while self.server.controls.generation == generation:
            self.server.controls.link.wait(len(_ZEROS))
            self.connection.sendall(piece)
            self.server.controls.sent(key, len(_ZEROS), self.counting)

    def end(self, how: str) -> None:
        if how == "keep":
            return
        self.close_connection = True
        if how == "stall":
            poll, controls = select.poll(), self.server.controls
            poll.register(self.connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
            generation = controls.generation
            while controls.generation == generation and not poll.poll(_LOOK * 1000):
                pass
        elif how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


class Server(ThreadingHTTPServer):
    """One port. All of them share the objects, the controls and the counters."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, dialects: Dialects, context: ssl.SSLContext | None, cdn: Server | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.dialects, self.controls, self.context, self.cdn = dialects, dialects.controls, context, cdn
        self.is_cdn = cdn is None

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self.context is not None:  # hands are shaken in the connection's own thread
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        if any(request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)):
            self.close_request(request)  # a shutdown would say goodbye before the reset
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def origins(self, host: str) -> tuple[str, str]:
        """This origin as the client named it, and the CDN's, which has another host name."""
        scheme = "http" if self.context is None else "https"
        name = "127.0.0.1" if host.startswith("localhost") else "localhost"
        return f"{scheme}://{host}", f"{scheme}://{name}:{(self.cdn or self).server_port}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"))
    arguments = parser.parse_args()
    controls = Controls()
    dialects = Dialects(Objects(arguments.root, controls), controls)
    contexts: dict[str, ssl.SSLContext | None] = {"http": None}
    if arguments.tls:
        contexts["https"] = context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*arguments.tls)
    ports: dict[str, int] = {}
    for scheme, context in contexts.items():
        cdn = Server(0, dialects, context, None)
        server = Server(arguments.port if scheme == "http" else 0, dialects, context, cdn)
        ports[scheme] = server.server_port
        for one in (cdn, server):
            threading.Thread(target=one.serve_forever, daemon=True).start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()
    os._exit(0)  # answers that are stalled have threads


if __name__ == "__main__":
    main()
