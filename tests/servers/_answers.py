"""Answers as data, and how a fault or a hostile mode changes one before it is sent. Sends nothing itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, BinaryIO

MANY_HEADERS = 20_000
LARGE_HEADER = 16 << 20  # bytes
EXTRA = 64 << 10  # bytes behind the body that were not announced
DRIP = 64  # bytes a second


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes of an open file, which is closed when they were sent."""

    file: BinaryIO
    start: int
    stop: int


@dataclasses.dataclass
class Answer:
    """What goes over the wire. `sent` and `then` say how much of the body, and what comes after it."""

    status: int = HTTPStatus.OK
    headers: list[tuple[str, str]] = dataclasses.field(default_factory=list[tuple[str, str]])
    body: bytes | Span = b""
    path: str = ""  # of the object below the root; empty: no object's bytes
    length: int | None = None  # Content-Length where it is not the body's; -1: chunked
    sent: int | None = None  # bytes of the body; None: all; -1: not even the headers
    extra: bytes = b""  # behind the body
    then: str = "keep"  # the connection: "keep", "close", "reset", "stall"; "endless": zeros until the client goes
    pace: float | None = None  # bytes a second of this answer

    @property
    def size(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.body.stop - self.body.start

    def header(self, name: str, value: str) -> None:
        """Sets a header that may be there already."""
        self.headers = [(other, held) for other, held in self.headers if other != name] + [(name, value)]

    def close(self) -> None:
        if isinstance(self.body, Span):
            self.body.file.close()


def as_json(value: Any, status: int = HTTPStatus.OK) -> Answer:
    return Answer(status, [("Content-Type", "application/json")], json.dumps(value).encode())


def as_xml(text: str, status: int = HTTPStatus.OK) -> Answer:
    return Answer(status, [("Content-Type", "application/xml")], f'<?xml version="1.0"?>\n{text}'.encode())


def refusal(status: int, text: str = "") -> Answer:
    return Answer(status, [("Content-Type", "text/plain")], (text or HTTPStatus(status).phrase).encode())


def fault(answer: Answer, kind: str, retry_after: float | str | None) -> Answer:
    """A status ("503"), "reset" or "lost" before the headers, "reset-body", "truncate" or "stall" after half a body."""
    if kind.isdigit():
        answer.close()
        headers = [("Retry-After", str(retry_after))] if retry_after is not None else []
        return Answer(int(kind), [*headers, ("Content-Type", "text/plain")], b"a fault that was asked for")
    if kind in ("reset", "lost"):
        answer.sent, answer.then = -1, "reset"
        return answer
    answer.sent = answer.size // 2
    answer.then = {"reset-body": "reset", "truncate": "close", "stall": "stall"}[kind]
    return answer


def hostile(answer: Answer, found: Mapping[str, Any]) -> Answer:
    """What a server sends that means harm, or is badly broken. `found`: the mode, its options, the answers so far."""
    mode, answers = found["mode"], found["answers"]
    if mode == "redirect":
        answer.close()
        return Answer(HTTPStatus.FOUND, [("Location", found["location"])])
    if mode in ("endless", "endless-length"):  # without a Content-Length, or with one that nobody has room for
        answer.close()
        return Answer(answer.status, answer.headers, length=-1 if mode == "endless" else 1 << 60, then="endless")
    match mode:
        case "wrong-range":  # bytes that lie one behind those asked for
            answer.header("Content-Range", _content_range(answer, by=1))
        case "wrong-size":  # the object is said to be larger than it is
            answer.header("Content-Range", _content_range(answer, larger=1 << 40))
        case "changing-length":
            answer.header("Content-Range", _content_range(answer, larger=answers))
        case "ignores-range":
            answer.status = HTTPStatus.OK
            answer.headers = [header for header in answer.headers if header[0] != "Content-Range"]
            if isinstance(span := answer.body, Span):
                answer.body = Span(span.file, 0, int(found["size"]))
        case "many-headers":
            answer.headers = [*answer.headers, *((f"X-Bomb-{number}", "boom") for number in range(MANY_HEADERS))]
        case "large-header":
            answer.header("X-Bomb", "b" * LARGE_HEADER)
        case "longer":  # than Content-Length
            answer.extra = b"x" * EXTRA
        case "shorter":  # than Content-Length
            answer.sent, answer.then = max(answer.size - 1, 0), "close"
        case "less-than-range":  # Content-Length fits the body, and Content-Range the request; they do not agree
            answer.sent = answer.length = answer.size // 2
        case "more-than-range":
            answer.length, answer.extra = answer.size + EXTRA, b"x" * EXTRA
        case "no-etag":
            answer.headers = [header for header in answer.headers if header[0] != "ETag"]
        case "drip":
            answer.pace = float(found.get("pace", DRIP))
        case _:
            raise ValueError(f"no hostile mode {mode!r}")
    return answer


def _content_range(answer: Answer, *, by: int = 0, larger: int = 0) -> str:
    if (text := dict(answer.headers).get("Content-Range")) is None:
        return f"bytes {by}-{answer.size - 1 + by}/{answer.size + larger}"
    span, _, size = text.removeprefix("bytes ").partition("/")
    first, _, last = span.partition("-")
    return f"bytes {int(first) + by}-{int(last) + by}/{int(size) + larger}"
