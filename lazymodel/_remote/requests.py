"""Asking a store for something until it answers: which failures are worth another try, when, and how they are told of.

The transport to buckets is obstore, whose errors repeat URLs with their signatures, and bodies of answers. None of that
is shown: a message has what went wrong in our words, and the original error is not chained to it.

A store that says that it is busy (429, 503) is left alone by all threads, for as long as it asks for in `Retry-After`
(RFC 9110, section 10.2.3). obstore does not hand headers out, so one request for a single byte asks for it.
"""

from __future__ import annotations

import email.utils
import http.client
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lazymodel._errors import CheckpointError

Result = TypeVar("Result")

ATTEMPTS = 8  # of one request: with the waits below about half a minute, which outlasts a failover
FIRST_WAIT = 0.2  # seconds before the second attempt; each later wait is twice as long, less up to half by chance
LONGEST_WAIT = 10.0  # seconds
LONGEST_RETRY_AFTER = 120.0  # seconds; who asks for more is not waited for
_LOOK = 0.1  # seconds between two looks at whether an answer is still waited for
_MOST_TEXT = 8 << 10  # characters of an error that are looked at: it repeats the body that a server sent
_STATUS = re.compile(r"status code: (\d{3})")
_BUSY = (429, 503)
_AGAIN = (408, 425, 429)  # statuses below 500 that are worth another try


class Counter:
    """What was asked of stores by this process, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = self.retries = self.nbytes = 0

    def so_far(self) -> tuple[int, int, int]:
        """Bytes that arrived, requests, and how many of them repeated another."""
        with self._lock:
            return self.nbytes, self.requests, self.retries

    def add(self, *, requests: int = 0, retries: int = 0, nbytes: int = 0) -> None:
        """Counts; `nbytes` are those of bodies that arrived whole."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.nbytes += nbytes


REQUESTS = Counter()


class Failure(Exception):
    """Why one attempt failed, in words that may be shown; `again` says whether another can succeed."""

    def __init__(self, text: str, again: bool = False, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.again, self.status = again, status
        self.retry_after = retry_after  # seconds for which the server asks to be left alone, if it was heard


class Changed(Failure):
    """The object is no longer the one that was opened."""

    def __init__(self) -> None:
        super().__init__("it is another object than before")


class Missing(Failure):
    """There is no such object."""

    def __init__(self) -> None:
        super().__init__("there is nothing")


class Unavailable(CheckpointError):
    """The store did not answer, or said that it cannot now; what it would say another time is open."""


class Retries:
    """How often and how soon a request is tried again: what obstore's `retry_config` says, for our own attempts."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        config = config or {}
        backoff: Mapping[str, Any] = config.get("backoff") or {}
        self.attempts = max(int(config.get("max_retries", ATTEMPTS - 1)), 0) + 1
        self.timeout = _seconds(config.get("retry_timeout"), 180.0)
        self.first = _seconds(backoff.get("init_backoff"), FIRST_WAIT)
        self.longest = _seconds(backoff.get("max_backoff"), LONGEST_WAIT)
        self.base = float(backoff.get("base", 2))

    def wait(self, attempt: int) -> float:
        """Seconds to wait after an attempt, the first being 0."""
        return min(self.first * self.base**attempt, self.longest) * random.uniform(0.5, 1.0)


def _seconds(value: Any, default: float) -> float:
    return default if value is None else float(value.total_seconds() if hasattr(value, "total_seconds") else value)


class Gate:
    """Keeps all threads from a store that said that it is busy."""

    def __init__(self, retry_after: Callable[[str], float | None]) -> None:
        self._retry_after = retry_after  # seconds that a store asks for, if it is still busy
        self._asking = threading.Lock()
        self._until = 0.0

    def wait(self, stopped: threading.Event) -> None:
        """Returns when the store may be asked again, or all stops."""
        while (seconds := self._until - time.monotonic()) > 0 and not stopped.wait(seconds):
            pass

    def busy(self, key: str, seconds: float, stopped: threading.Event, retry_after: float | None = None) -> None:
        """An attempt found it busy: waits these seconds, and as long as it asks for, which may be known already."""
        self._until = max(self._until, time.monotonic() + seconds)
        if not self._asking.acquire(blocking=False):  # somebody asks already, and what comes of it holds for all
            while not stopped.is_set():
                if self._asking.acquire(timeout=_LOOK):
                    self._asking.release()
                    break
            self.wait(stopped)
            return
        try:
            if retry_after is None:
                self.wait(stopped)
                retry_after = None if stopped.is_set() else self._retry_after(key)
            if retry_after is not None:
                self._until = max(self._until, time.monotonic() + min(retry_after, LONGEST_RETRY_AFTER))
        finally:
            self._asking.release()
        self.wait(stopped)


def attempt(
    what: str,
    key: str,
    function: Callable[[], Result],
    retries: Retries,
    gate: Gate,
    stopped: threading.Event,
    *,
    verb: str = "read",
    conditional: bool = False,
) -> Result:
    """Calls a function that asks a store for something until it succeeds; messages say that they cannot `verb` `what`.

    Raises:
        CheckpointError: It failed for good, or too often; the message has the number of attempts and the last cause.
        Missing: As the function, or because that is what its error means.
        Changed: Likewise, where what is asked for is `conditional`; a server can say so where it is not.
    """
    started = time.monotonic()
    number = 0
    while True:
        gate.wait(stopped)
        if stopped.is_set():
            raise CheckpointError(f"{what}: stopped")
        REQUESTS.add(requests=1, retries=int(number > 0))
        failure: Failure
        try:
            return function()
        except CheckpointError:  # about what was asked of us
            raise
        except Exception as error:
            failure = explained(error)
        # Outside of the handlers: what obstore raised must not be chained to what is shown.
        failure = failure.with_traceback(None)
        number += 1
        if isinstance(failure, Missing) or (conditional and isinstance(failure, Changed)):
            raise failure
        if not failure.again or number >= retries.attempts or time.monotonic() - started > retries.timeout:
            attempts = f", after {number} attempts" if number > 1 else ""
            kind = Unavailable if failure.again else CheckpointError
            raise kind(f"cannot {verb} {what}: {failure}{attempts}")
        if failure.status in _BUSY:
            gate.busy(key, retries.wait(number - 1), stopped, failure.retry_after)
        else:
            stopped.wait(retries.wait(number - 1))


def apart(function: Callable[[threading.Event], Result], given_up: Callable[[], bool]) -> Result:
    """Calls a function that asks a store in a thread of its own, which nobody waits for after Ctrl-C, or once it is
    given up: obstore's calls end by themselves or not at all. What the function is given tells it that it was left.
    """
    done, left = threading.Event(), threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(left))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="lazymodel-ask", daemon=True).start()
    try:
        while not done.wait(_LOOK):
            if given_up():
                raise CheckpointError("reading was stopped")
    finally:
        left.set()
    if errors:
        raise errors.pop().with_traceback(None)
    return results.pop()


def explained(error: Exception) -> Failure:
    """What an error of obstore is, without any text that a server wrote."""
    if isinstance(error, Failure):
        return error
    # Without URLs: a file's name can be anything, such as a status.
    words = (word for word in str(error)[:_MOST_TEXT].split() if "://" not in word and "%3a" not in word.lower())
    kind, text = type(error).__name__, " ".join(words)
    if isinstance(error, FileNotFoundError):
        return Missing()
    if kind in ("PreconditionError", "AlreadyExistsError"):
        return Changed()
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        status = status or 403
    if kind == "ValueError":
        return Failure("no object can have this name")
    if kind == "InvalidPathError":
        return Failure("the store has names of objects that cannot be paths, such as those with '..' or '//' in them")
    if kind == "NotSupportedError":
        return Failure("the server does not serve ranges of files", False)
    if status:
        return failure_of_status(status)
    lowered = text.lower()
    for sign, words, again in _SIGNS:
        if sign in lowered:
            return Failure(words, again)
    return Failure(f"the request failed ({kind})")


def failure_of_status(status: int, retry_after: str | None = None) -> Failure:
    """What it means that a server answers with a status that is no success, and perhaps with `Retry-After`."""
    if status in (404, 405):
        return Missing()
    if status == 412:
        return Changed()
    text = f"the server answered {status} {http.client.responses.get(status, '')}".rstrip()
    if status in (401, 403):
        text = "the store refuses access; check the credentials and what they allow"
    elif 300 <= status < 400:
        text = f"the server redirects to where nothing may be read from (status {status})"
    return Failure(text, status >= 500 or status in _AGAIN, status, _parsed(retry_after))


# What is told apart by obstore's wording alone, the first that fits; the debugging text after the message included.
_SIGNS = (
    ("error following redirect", "the server redirects in a circle, or to where nothing may be read from", False),
    ("url scheme is not allowed", "the server redirects to plain http", False),
    ("unexpectedrange", "the server answered with another range than was asked for", False),
    ("content-range", "the server answered with a Content-Range that means nothing", False),
    ("missingcontentlength", "the server does not say how long its answer is", False),
    ("header", "the server's answer has headers that mean nothing", False),
    ("certificate", "the server's certificate is not trusted", False),
    ("message head is too large", "the server's answer has too many or too large headers", False),
    ("toolarge", "the server's answer has too many or too large headers", False),
    ("kind: timeout", "the server stopped answering", True),
    ("dns error", "the server's name cannot be found", True),
    ("kind: connect", "the server cannot be reached", True),
    ("connect error", "the server cannot be reached", True),
    ("kind: interrupted", "the connection broke off", True),
    ("incompletemessage", "the connection broke off", True),
    ("connection reset", "the connection broke off", True),
    ("credential", "no credentials were found, or they cannot be used", False),
    ("token", "no credentials were found, or they cannot be used", False),
)


def _parsed(value: str | None) -> float | None:
    """The seconds that `Retry-After` says; None if it says nothing of the kind."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return None
