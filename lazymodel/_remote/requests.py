"""Requests to stores, repeated until they are answered: which failures are worth a retry, when, and how they are
explained.

The transport to buckets is obstore. Its errors repeat URLs with their signatures, and bodies of answers. None of it is
shown: a message states the cause in our words, and the original error is not chained to it. Attempts are counted here
rather than by obstore, since an attempt continues where the body of the previous one ended.

If a store answers that it is busy (429, 503), all threads stop sending requests to it; to a web server for as long as
its `Retry-After` requests (RFC 9110, section 10.2.3), which obstore does not return.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import email.utils
import http.client
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lazymodel._errors import CheckpointError
from lazymodel._tensors.buffers import start_thread

Result = TypeVar("Result")

ATTEMPTS = 8  # of one request: with the waits below about half a minute, which is longer than a failover
FIRST_WAIT = 0.2  # seconds before the second attempt; each later wait is twice as long, minus a random part up to half
LONGEST_WAIT = 10.0  # seconds
LONGEST_RETRY_AFTER = 120.0  # seconds; a longer request to wait is cut to this
_LOOK = 0.1  # seconds between two checks if an answer is still needed
_MOST_TEXT = 8 << 10  # characters of an error that are examined: it repeats the body that a server sent
_STATUS = re.compile(r"status code: (\d{3})")
_BUSY = (429, 503)
_AGAIN = (408, 425, 429)  # statuses below 500 that are worth a retry


class Counter:
    """Requests that this process made to stores, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = self.retries = self.nbytes = 0

    def so_far(self) -> tuple[int, int, int]:
        """Bytes that arrived, requests, and how many requests were retries."""
        with self._lock:
            return self.nbytes, self.requests, self.retries

    def add(self, *, requests: int = 0, retries: int = 0, nbytes: int = 0) -> None:
        """Adds to the counts; `nbytes` are those of bodies that arrived completely."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.nbytes += nbytes


REQUESTS = Counter()


class Failure(Exception):
    """The reason why an attempt failed, in text that may be shown; `again` is True if a retry can succeed."""

    def __init__(self, text: str, again: bool = False, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.again, self.status = again, status
        self.retry_after = retry_after  # seconds for which the server requests no further requests, else 0


class Changed(Failure):
    """The object is no longer the one that was opened."""

    def __init__(self) -> None:
        super().__init__("it is not the object that was there before")


class Missing(Failure):
    """There is no such object."""

    def __init__(self) -> None:
        super().__init__("it does not exist")


class Unavailable(CheckpointError):
    """The store did not answer, or cannot do so now; a later request may succeed."""


class Retries:
    """How often and when requests to a store are retried, from obstore's `retry_config`, and until when the store gets
    no requests. For any number of threads.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        config = config or {}
        backoff: Mapping[str, Any] = config.get("backoff") or {}
        self.attempts = max(int(config.get("max_retries", ATTEMPTS - 1)), 0) + 1
        self.timeout = _seconds(config.get("retry_timeout"), 180.0)
        self.first = _seconds(backoff.get("init_backoff"), FIRST_WAIT)
        self.longest = _seconds(backoff.get("max_backoff"), LONGEST_WAIT)
        self.base = float(backoff.get("base", 2))
        self._busy_until = 0.0

    def config(self) -> dict[str, Any]:
        """The same for obstore."""
        seconds = {"init_backoff": self.first, "max_backoff": self.longest}
        backoff = {name: datetime.timedelta(seconds=value) for name, value in seconds.items()}
        timeout = datetime.timedelta(seconds=self.timeout)
        return {
            "max_retries": self.attempts - 1, "retry_timeout": timeout, "backoff": {**backoff, "base": self.base}
        }  # fmt: skip

    def wait(self, attempt: int) -> float:
        """Seconds to wait after an attempt, the first being 0."""
        return min(self.first * self.base**attempt, self.longest) * random.uniform(0.5, 1.0)

    def wait_while_busy(self, stopped: threading.Event) -> None:
        """Returns when the store may get requests again, or all stops."""
        while (seconds := self._busy_until - time.monotonic()) > 0 and not stopped.wait(seconds):
            pass

    def busy(self, seconds: float) -> None:
        """Keeps all threads from sending requests for so long."""
        self._busy_until = max(self._busy_until, time.monotonic() + min(seconds, LONGEST_RETRY_AFTER))


def _seconds(value: Any, default: float) -> float:
    return default if value is None else float(value.total_seconds() if hasattr(value, "total_seconds") else value)


def attempt(
    what: str,
    function: Callable[[], Result],
    retries: Retries,
    stopped: threading.Event,
    *,
    action: str = "read",
    conditional: bool = False,
) -> Result:
    """Calls a function that makes a request until it succeeds. Messages start with "cannot `action` `what`".

    Raises:
        CheckpointError: It failed for good, or too often; the message has the number of attempts and the last cause.
        Missing: Raised by the function, or inferred from its error.
        Changed: Likewise, if the request is `conditional`; a server may send this status for other requests, too.
    """
    started = time.monotonic()
    number = 0
    while True:
        retries.wait_while_busy(stopped)
        if stopped.is_set():
            raise CheckpointError(f"{what}: stopped")
        REQUESTS.add(requests=1, retries=int(number > 0))
        try:
            return function()
        except CheckpointError:  # raised before the request
            raise
        except Exception as error:
            failure = explained(error)
        # Outside of the handlers: obstore's error must not be chained to the one that is shown.
        failure = failure.with_traceback(None)
        number += 1
        if isinstance(failure, Missing) or (conditional and isinstance(failure, Changed)):
            raise failure
        if not failure.again or number >= retries.attempts or time.monotonic() - started > retries.timeout:
            attempts = f", after {number} attempts" if number > 1 else ""
            kind = Unavailable if failure.again else CheckpointError
            raise kind(f"cannot {action} {what}: {failure}{attempts}")
        pause = retries.wait(number - 1)
        if failure.status in _BUSY:
            retries.busy(max(pause, failure.retry_after))
        else:
            stopped.wait(pause)


def apart(function: Callable[[threading.Event], Result], given_up: Callable[[], bool]) -> Result:
    """Calls a function that makes a request in a thread of its own. After Ctrl-C, or once it is given up, nothing waits
    for that thread: obstore's calls end by themselves or not at all. The function gets an event that is set then.
    """
    left, future = threading.Event(), concurrent.futures.Future[Result]()

    def run() -> None:
        try:
            future.set_result(function(left))
        except BaseException as error:
            future.set_exception(error)

    start_thread(run, "request")
    try:
        while not concurrent.futures.wait([future], _LOOK).done:
            if given_up():
                raise CheckpointError("reading was stopped")
    finally:
        left.set()
    if (error := future.exception()) is not None:
        raise error.with_traceback(None)
    return future.result()


def explained(error: Exception) -> Failure:
    """Explains an error of obstore, without any text from a server."""
    if isinstance(error, Failure):
        return error
    # Without URLs: a file's name can contain anything, such as a status.
    words = (word for word in str(error)[:_MOST_TEXT].split() if "://" not in word and "%3a" not in word.lower())
    kind, text = type(error).__name__, " ".join(words)
    if isinstance(error, FileNotFoundError):
        return Missing()
    if kind in ("PreconditionError", "AlreadyExistsError"):
        return Changed()
    if kind in _KINDS:
        return Failure(_KINDS[kind])
    found = _STATUS.search(text)
    if found or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return failure_of_status(int(found[1]) if found else 403)
    lowered = text.lower()
    for signs, words, again in _SIGNS:
        if any(sign in lowered for sign in signs):
            return Failure(words, again)
    return Failure(f"the request failed ({kind})")


def failure_of_status(status: int, retry_after: str = "") -> Failure:
    """Explains a status that is not a success, optionally with `Retry-After`."""
    if status in (404, 405):
        return Missing()
    if status == 412:
        return Changed()
    text = f"the server answered {status} {http.client.responses.get(status, '')}".rstrip()
    if status in (401, 403):
        text = "the store refuses access; check the credentials and their permissions"
    elif 300 <= status < 400:
        text = f"the server redirects to an address that may not be read (status {status})"
    return Failure(text, status >= 500 or status in _AGAIN, status, _parsed(retry_after))


# By the name of obstore's class; ValueError if a request is rejected before it is made.
_KINDS = {
    "ValueError": "an object cannot have this name",
    "InvalidPathError": "the store has names of objects that cannot be paths, such as those with '..' or '//' in them",
    "NotSupportedError": "the server does not serve ranges of files",
}
# Distinguished only by obstore's wording, debugging text after the message included. The first match is used.
_SIGNS = (
    (("error following redirect", "url scheme is not allowed"),
      "the server redirects to an address that may not be read", False),
    (("certificate",), "the server's certificate is not trusted", False),
    (("unexpectedrange", "content-range", "missingcontentlength", "header", "message head is too large", "toolarge"),
      "the server's answer has invalid headers, or too many or too long ones", False),
    (("kind: timeout",), "the server stopped answering", True),
    (("dns error",), "the server's name cannot be found", True),
    (("kind: connect", "connect error"), "the server cannot be reached", True),
    (("kind: interrupted", "incompletemessage", "connection reset"), "the connection broke off", True),
    (("credential", "token"), "no credentials were found, or they cannot be used", False),
)  # fmt: skip


def _parsed(value: str) -> float:
    """Returns the seconds of a `Retry-After`, 0 if it has none."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return 0.0
