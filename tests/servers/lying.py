"""Servers that lie at random: what a seed decides, of answers that would be right.

Each seed has a few ways to lie, and lies in some of its answers; the bytes that it sends as those of a range are the
right ones, since nothing could tell others. Answers are those of `scripted.py`.
"""

from __future__ import annotations

import gzip
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from tests.servers.scripted import Asked, Reply, part

Lie = Callable[[random.Random, Asked, Reply], Reply]
_STATUSES = (100, 103, 200, 204, 300, 302, 304, 400, 401, 403, 404, 408, 412, 416, 429, 500, 502, 503, 599)


def _endless(piece: bytes = bytes(1 << 16)) -> Iterator[bytes]:
    while True:
        yield piece


def _body(reply: Reply) -> bytes:
    assert isinstance(reply[2], bytes)
    return reply[2]


def _other_status(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    headers = {"Retry-After": rng.choice(["0", "-1", "soon", "0.001"])}
    huge = rng.random() < 0.5
    return rng.choice(_STATUSES), headers | ({"Content-Length": str(8 << 30)} if huge else {}), _endless()


def _other_range(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    first, last, size = (rng.choice([0, 1, 7, 1 << 20, 1 << 62, -5]) for _ in range(3))
    said = rng.choice([f"bytes {first}-{last}/{size}", f"bytes {first}-{last}/*", "bytes", "", "\xff", "x" * 60_000])
    return reply[0], {**reply[1], "Content-Range": said}, reply[2]


def _cut(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    body = _body(reply)
    return reply[0], {**reply[1], "Content-Length": str(len(body))}, iter([body[: rng.randrange(len(body) + 1)], b""])


def _other_length(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    length = rng.choice([0, 1, len(_body(reply)) - 1, len(_body(reply)) + 100, 1 << 50, -1, "x", ""])
    more = _endless() if rng.random() < 0.5 else iter([_body(reply)])
    return reply[0], {**reply[1], "Content-Length": str(length)}, more


def _other_etag(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    etag = rng.choice(['"1"', '"2"', 'W/"1"', "", "\xe9", "x" * 50_000, f'"{rng.random()}"'])
    return reply[0], {**reply[1], "ETag": etag}, reply[2]


def _redirect(rng: random.Random, asked: Asked, _: Reply) -> Reply:
    where = rng.choice(
        [asked.path, f"{asked.path}?again", "//", "http://[", "file:///etc/passwd", "http://127.0.0.1:9/", ""]
    )
    return rng.choice([301, 302, 303, 307, 308]), {"Location": where}, _endless() if rng.random() < 0.3 else b""


def _compressed(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    return reply[0], {**reply[1], "Content-Encoding": rng.choice(["gzip", "br"])}, gzip.compress(_body(reply))


def _whole(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    return 200, {"Content-Type": rng.choice(["text/html", "multipart/byteranges"])}, _body(reply)


def _slow(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    def pieces() -> Iterator[bytes]:
        pause, body = rng.choice([0.001, 0.05, 1.0]), _body(reply)
        for start in range(0, len(body), max(len(body) // 8, 1)):
            time.sleep(pause)
            yield body[start : start + max(len(body) // 8, 1)]

    return reply[0], {**reply[1], "Content-Length": str(len(_body(reply)))}, pieces()


def _chunked(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    head = rng.choice([b"%x\r\n" % len(_body(reply)), b"zz\r\n", b"-1\r\n", b"f" * 70_000])
    return reply[0], {**reply[1], "Transfer-Encoding": "chunked"}, iter([head, _body(reply), b"\r\n0\r\n\r\n"])


def _headers(rng: random.Random, _: Asked, reply: Reply) -> Reply:
    many = {f"X-{number}": "x" * rng.choice([1, 1000]) for number in range(rng.choice([50, 500]))}
    return reply[0], {**reply[1], **many}, reply[2]


_LIES: tuple[Lie, ...] = (
    *(_other_status, _other_range, _cut, _other_length, _other_etag, _redirect, _compressed, _whole, _slow, _chunked),
    _headers,
)


def lying(seed: int, files: Mapping[str, bytes]) -> Callable[[Asked], Reply]:
    """A server of files by path, for `scripted`."""
    rng, lock = random.Random(seed), threading.Lock()
    lies, share = rng.sample(_LIES, rng.randint(1, 3)), rng.choice([0.02, 0.2, 0.5, 1.0])
    etag = rng.choice([{"ETag": '"1"'}, {}])

    def reply(asked: Asked) -> Reply:
        if asked.path not in files:
            return 404, {}, b""
        right = part(files[asked.path], asked, **etag)
        with lock:
            return rng.choice(lies)(rng, asked, right) if rng.random() < share else right

    return reply
