"""What a test asks of the object server while it runs, and what the server counted. Knows no dialect and no file."""

from __future__ import annotations

import dataclasses
import fnmatch
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

# An idle link may catch up this much: it evens out that sleeping takes a little longer than asked for.
_SLACK = 0.005  # seconds
# What a connection asks of the link at once, in seconds of it: other connections get their turn in between.
_TURN = 0.002
_LARGEST_PIECE = 16 << 20  # bytes a call of sendfile where nothing caps it


class Link:
    """Bytes a second that all connections share: bytes are sent when the link would have carried them."""

    def __init__(self) -> None:
        self.bandwidth: float | None = None  # bytes/s
        self._lock = threading.Lock()
        self._due = 0.0

    @property
    def piece(self) -> int:
        return _LARGEST_PIECE if self.bandwidth is None else max(int(self.bandwidth * _TURN), 1 << 12)

    def wait(self, nbytes: int) -> None:
        if (bandwidth := self.bandwidth) is None:
            return
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - _SLACK) + nbytes / bandwidth
            seconds = self._due - now
        if seconds > 0:
            time.sleep(seconds)


@dataclasses.dataclass
class Faults:
    """Which requests fail and how: every nth, or those numbered (from 1), with the kinds in turn."""

    kinds: list[str] = dataclasses.field(default_factory=list[str])
    every: int = 0
    requests: list[int] = dataclasses.field(default_factory=list[int])
    methods: list[str] = dataclasses.field(default_factory=lambda: ["GET"])
    path: str | None = None  # a pattern of URL paths; None: answers that carry an object's bytes, and uploads
    retry_after: float | str | None = None
    seen: int = 0
    made: int = 0

    def next(self, method: str, path: str, carries_object: bool) -> str | None:
        if method not in self.methods or not self.kinds:
            return None
        if not (carries_object if self.path is None else fnmatch.fnmatchcase(path, self.path)):
            return None
        self.seen += 1
        if self.seen not in self.requests and not (self.every and self.seen % self.every == 0):
            return None
        self.made += 1
        return self.kinds[(self.made - 1) % len(self.kinds)]


class Controls:
    """Settings and counters, behind one lock. Its public methods are what the admin endpoint offers by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.link = Link()
        self.generation = self._counting = 0
        self.reset()

    def reset(self) -> None:
        """Everything as it was at the start; uploads that are open stay so."""
        with self._lock:
            self.link.bandwidth = None
            self.latency = 0.0  # seconds before the first byte of an answer
            self.page_size = 1000  # entries of a listing's page
            self.plan = Faults()
            self.hostile_modes: dict[str, dict[str, Any]] = {}
            self.replacements: dict[str, dict[str, Any]] = {}
            self.repositories: dict[str, dict[str, Any]] = {}
            self.generation += 1  # answers that stall or have no end, end
            self._clear()

    def _clear(self) -> None:
        self._counting += 1  # requests that are under way belong to what was counted before
        self._totals: Counter[str] = Counter()
        self._by: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._ranges: defaultdict[str, list[list[int | None] | None]] = defaultdict(list)
        self._in_flight = self._most_in_flight = 0

    def reset_counters(self) -> None:
        with self._lock:
            self._clear()

    def configure(self, **settings: Any) -> None:
        for name, value in settings.items():
            if name == "bandwidth":
                self.link.bandwidth = value
            elif name in ("latency", "page_size"):
                setattr(self, name, value)
            else:
                raise ValueError(f"no setting {name!r}")

    def faults(self, **settings: Any) -> None:
        plan = Faults(**settings)
        with self._lock:
            self.plan = plan

    def hostile(self, path: str, mode: str | None, **options: Any) -> None:
        with self._lock:
            if mode is None:
                self.hostile_modes.pop(path, None)
            else:
                self.hostile_modes[path] = {"mode": mode, "answers": 0, **options}

    def replace(self, path: str, after: int, source: str | None = None) -> None:
        """After this many answers with its bytes, `path` is another object: `source`'s bytes, or its own again."""
        with self._lock:
            self.replacements[path] = {"after": after, "source": source}

    def repository(self, name: str, **settings: Any) -> None:
        """`token`: who may read it; `gated`: known, but closed; `revisions`: name → commit."""
        with self._lock:
            self.repositories[name] = settings

    def counters(self) -> dict[str, Any]:
        with self._lock:
            counted = {name: self._totals[name] for name in ("requests", "bytes", "connections", "authorization")}
            return counted | {
                "cdn_authorization": self._totals["cdn_authorization"],
                "most_in_flight": self._most_in_flight,
                "ranges": dict(self._ranges),
                **{name: dict(self._by[name]) for name in ("methods", "statuses", "faults", "uploads")},
                "paths": dict(self._by["paths"]),
                "path_bytes": dict(self._by["path_bytes"]),
            }

    def count(self, name: str, of: str | None = None, by: int = 1) -> None:
        with self._lock:
            if of is None:
                self._totals[name] += by
            else:
                self._by[name][of] += by

    def sent(self, path: str, nbytes: int, counting: int) -> None:
        """`counting` is what `request` gave when these bytes were asked for."""
        with self._lock:
            if counting != self._counting:
                return
            self._totals["bytes"] += nbytes
            self._by["path_bytes"][path] += nbytes

    @contextmanager
    def request(self, method: str, path: str, span: str) -> Generator[int]:
        """Counts a request of `path`, with the text of its Range header, while it is answered."""
        with self._lock:
            self._totals["requests"] += 1
            self._by["methods"][method] += 1
            self._by["paths"][path] += 1
            if method == "GET":
                self._ranges[path].append(_bounds(span))
            self._in_flight += 1
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
            counting = self._counting
        try:
            yield counting
        finally:
            with self._lock:
                if counting == self._counting:
                    self._in_flight -= 1

    def answered(self, status: int) -> None:
        self.count("statuses", str(status))

    def next_fault(self, method: str, path: str, carries_object: bool) -> str | None:
        with self._lock:
            kind = self.plan.next(method, path, carries_object)
            if kind is not None:
                self._by["faults"][kind] += 1
            return kind

    def next_hostility(self, path: str) -> dict[str, Any] | None:
        with self._lock:
            if (found := self.hostile_modes.get(path)) is None:
                return None
            found["answers"] += 1
            return dict(found)

    def next_replacement(self, path: str) -> dict[str, Any] | None:
        """What `path` is replaced by before this answer; None: it stays."""
        with self._lock:
            if (found := self.replacements.get(path)) is None:
                return None
            found["after"] -= 1
            return self.replacements.pop(path) if found["after"] < 0 else None


def _bounds(span: str) -> list[int | None] | None:
    """`bytes=3-7` → [3, 8], `bytes=3-` → [3, None], `bytes=-7` → [None, 7], no range → None."""
    if not span:
        return None
    first, _, last = span.removeprefix("bytes=").partition("-")
    if not first:
        return [None, int(last)]
    return [int(first), int(last) + 1 if last else None]
