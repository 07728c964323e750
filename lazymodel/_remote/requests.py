"""Requests to stores: repeated until they are answered; and `Web`, which makes those to web servers.

The transport to buckets is obstore. Its errors repeat URLs with their signatures, and bodies of answers. None of it is
shown: a message states the cause in our words, and the original error is not chained to it. Attempts are counted here
rather than by obstore, since an attempt continues where the body of the previous one ended.

If a store answers that it is busy (429, 503), all threads stop sending requests to it; to a web server for as long as
its `Retry-After` requests (RFC 9110, section 10.2.3), which obstore does not return.

obstore reads the body of an error completely before it reports it, and a malicious web server can send a body of any
length. `Web` uses urllib3, and reads no body of an error, except for a few KiB that free a connection for the next
request. It follows redirections itself: urllib3 reads their bodies to the end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import http.client
import importlib
import ipaddress
import logging
import random
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from lazymodel._errors import CheckpointError
from lazymodel._remote.url import quoted
from lazymodel._tensors.buffers import start_thread
from lazymodel._tensors.byte_reader import REQUESTS

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


def _start(run: Callable[[], None]) -> None:
    start_thread(run, "request")


def apart(
    function: Callable[[threading.Event], Result],
    given_up: Callable[[], bool],
    start: Callable[[Callable[[], None]], object] = _start,
) -> Result:
    """Calls a function that makes a request in another thread, one of its own unless `start` has one. After Ctrl-C, or
    once it is given up, nothing waits for it: obstore's calls end by themselves or not at all. The function gets an
    event that is set then.
    """
    left, future = threading.Event(), concurrent.futures.Future[Result]()

    def run() -> None:
        try:
            future.set_result(function(left))
        except BaseException as error:
            future.set_exception(error)

    start(run)
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


def failure_of_status(status: int, retry_after: float = 0.0) -> Failure:
    """Explains a status that is not a success; `retry_after` is the seconds of a `Retry-After`."""
    if status in (404, 405):
        return Missing()
    if status == 412:
        return Changed()
    text = f"the server answered {status} {http.client.responses.get(status, '')}".rstrip()
    if status in (401, 403):
        text = "the store refuses access; check the credentials and their permissions"
    elif 300 <= status < 400:
        text = f"the server redirects to an address that may not be read (status {status})"
    return Failure(text, status >= 500 or status in _AGAIN, status, retry_after)


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
    (("badscheme",), "the endpoint is http, which is rejected unless storage_options={'client_options': "
      "{'allow_http': True}} allows it. Use https if the server has it", False),
    (("certificate",), "the server's certificate is not trusted", False),
    (("unexpectedrange", "content-range", "missingcontentlength", "header", "message head is too large", "toolarge"),
      "the server's answer has invalid headers, or too many or too long ones", False),
    (("kind: timeout",), "the server stopped answering", True),
    (("dns error",), "the server's name cannot be found", True),
    (("kind: connect", "connect error"), "the server cannot be reached", True),
    (("kind: interrupted", "incompletemessage", "connection reset"), "the connection broke off", True),
    (("credential", "token"), "no credentials were found, or they cannot be used", False),
)  # fmt: skip


_MOST_ERROR = 4 << 10  # bytes of an error's body that are read and discarded, so that the connection can be reused
_MOST_REDIRECTS = 10  # about as many as browsers allow
_IDLE = 64  # connections that are kept for each server: more than there are requests at a time
_PRIVATE = ("authorization", "cookie", "proxy-authorization")  # headers that are sent to the first server only
_REDIRECTS = (301, 302, 303, 307, 308)
_SPAN = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_AMOUNTS = re.compile(r"(?<![0-9.])([0-9.]++) ?([a-zA-Z]++)")
# Beginnings of the names of units in the crate humantime, with which obstore parses durations, and their seconds.
_UNITS = (
    *(("ms", 1e-3), ("n", 1e-9), ("u", 1e-6), ("month", 2_629_800.0), ("M", 2_629_800.0)),
    *(("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0), ("w", 604_800.0), ("y", 31_557_600.0)),
)
_ASKING = threading.local()  # `now` is True while this thread makes a request


def _is_not_ours(_: logging.LogRecord) -> bool:
    """Filters what urllib3 logs of our requests: it has URLs with their signatures."""
    return not getattr(_ASKING, "now", False)


class Answer:
    """An answer whose body was not read yet; attributes and methods are those of obstore's `GetResult`."""

    def __init__(self, response: Any, meta: Mapping[str, Any], until: float) -> None:
        self._response, self.meta, self._until = response, meta, until
        self.attributes = {"Content-Type": response.headers.get("Content-Type", "")}

    def stream(self, min_chunk_size: int) -> Iterator[bytes]:
        """The body in chunks of at most this many bytes."""
        while chunk := self._response.read1(min_chunk_size, decode_content=False):
            yield chunk
            if time.monotonic() > self._until:
                raise Failure("the server stopped answering", True)


class Web:
    """Files below an address, by urllib3.

    Args:
        root: The address; a query is sent with every request.
        headers: Headers for the server of that address only, such as credentials.
        options: obstore's `client_options`, in the form in which an obstore store returns them.
    """

    def __init__(self, root: str, headers: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self._urllib3: Any = importlib.import_module("urllib3")
        for name in ("urllib3.connection", "urllib3.connectionpool"):
            logging.getLogger(name).addFilter(_is_not_ours)
        self._root, _, query = root.partition("?")
        self._query = f"?{quote(query, safe='%/:?#[]@!$&()*+,;=~')}" if query else ""
        given = {name: _text(value) for name, value in options.get("default_headers", {}).items()}
        self._headers = {"User-Agent": options.get("user_agent", "lazymodel"), "Accept": "*/*", **given, **headers}
        self._allow_http = _is_true(options.get("allow_http"))
        self._seconds = [_duration(options.get(name), 10.0) for name in ("connect_timeout", "read_timeout")]
        self._total = _duration(options.get("timeout"), 30.0)
        self._proxies = {"all": options["proxy_url"]} if options.get("proxy_url") else urllib.request.getproxies()
        self._excludes = options.get("proxy_excludes", "") if options.get("proxy_url") else self._proxies.get("no", "")
        invalid = _is_true(options.get("allow_invalid_certificates"))
        self._certificates = _text(options.get("root_certificate", "")), invalid
        self._pools: dict[str, Any] = {}  # by the address of the proxy, which may be empty

    @contextlib.contextmanager
    def get(self, key: str, *, options: Mapping[str, Any] | None = None) -> Generator[Answer]:
        """The answer to a GET request; `options` are `range` (first byte, byte after the last) and `if_match`.

        Raises:
            Failure: There is no answer with the requested range.
        """
        options, until = options or {}, time.monotonic() + self._total
        headers = {"If-Match": options["if_match"]} if "if_match" in options else {}
        if "range" in options:
            headers["Range"] = f"bytes={options['range'][0]}-{options['range'][1] - 1}"
        with self._explained(), self._answer(key, headers, until) as response:
            yield Answer(response, _meta(response, options.get("range")), until)

    @contextlib.contextmanager
    def _answer(self, key: str, more: Mapping[str, str], until: float) -> Generator[Any]:
        url = f"{self._root.rstrip('/')}/{quoted(key)}{self._query}" if key else f"{self._root}{self._query}"
        headers = {**self._headers, **more}
        for _ in range(_MOST_REDIRECTS):
            parts = urlsplit(url)
            with self._response(parts, headers, until) as response:
                location = response.headers.get("Location", "") if response.status in _REDIRECTS else ""
                failure = None if location else self._failure(response)
                if not location and failure is None:
                    yield response
                    return
            if failure is not None:
                raise failure
            url = self._redirected(url, location)
            if (there := urlsplit(url)).netloc != parts.netloc or there.scheme != parts.scheme:
                headers = {name: value for name, value in headers.items() if name.lower() not in _PRIVATE}
        raise Failure("the server redirects in a circle, or to an address that may not be read")

    def _redirected(self, url: str, location: str) -> str:  # urllib3 would go from https to http
        with contextlib.suppress(ValueError):
            there = urlsplit(urljoin(url, quote(location, safe="%/:?#[]@!$&'()*+,;=~")))
            if there.scheme == "http" and not self._allow_http:
                raise Failure("the server redirects to plain http")
            if there.scheme in ("http", "https") and there.hostname and there.port != 0:
                return there.geturl()
        raise Failure("the server redirects in a circle, or to an address that may not be read")

    @contextlib.contextmanager
    def _response(self, parts: SplitResult, headers: Mapping[str, str], until: float) -> Generator[Any]:
        """Yields an answer, a redirection as well. Its connection is reused if its whole body was read, or if the rest
        of it is short.
        """
        how: dict[str, Any] = {"headers": headers, "retries": False, "redirect": False, "preload_content": False}
        response, again = None, True
        try:
            while response is None:
                timeout = self._urllib3.Timeout(max(until - time.monotonic(), 0.001), *self._seconds)
                try:
                    _ASKING.now = True
                    response = self._pool(parts).urlopen("GET", parts.geturl(), timeout=timeout, **how)
                except self._urllib3.exceptions.ProtocolError:
                    # The server may have closed the connection since its last use, or sent more than its last answer.
                    if not again:
                        raise
                    again = False
                finally:
                    _ASKING.now = False
            yield response
            if response.length_remaining is not None and response.length_remaining <= _MOST_ERROR:
                with contextlib.suppress(self._urllib3.exceptions.HTTPError):
                    response.read1(_MOST_ERROR, decode_content=False)
        finally:
            if response is not None:
                response.close()
                response.release_conn()

    def _pool(self, parts: SplitResult) -> Any:
        proxy = self._proxies.get(parts.scheme) or self._proxies.get("all") or ""
        proxy = "" if _is_excluded(parts.hostname or "", self._excludes) else proxy
        if proxy not in self._pools:
            how = {"maxsize": _IDLE, "ssl_context": _context(*self._certificates)}
            made = self._proxied(proxy, **how) if proxy else self._urllib3.PoolManager(**how)
            self._pools.setdefault(proxy, made)
        return self._pools[proxy]

    def _proxied(self, proxy: str, **how: Any) -> Any:
        address = proxy if "://" in proxy else f"http://{proxy}"
        try:
            user = self._urllib3.util.parse_url(address).auth
            headers = self._urllib3.util.make_headers(proxy_basic_auth=unquote(user)) if user else None
            return self._urllib3.ProxyManager(address, proxy_headers=headers, **how)
        except self._urllib3.exceptions.LocationValueError:
            raise Failure("the proxy's address has to begin with http:// or https://") from None

    def _failure(self, response: Any) -> Failure | None:
        if response.status not in (200, 206):
            after = 0.0
            with contextlib.suppress(self._urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
                after = self._urllib3.Retry().get_retry_after(response) or 0.0
            return failure_of_status(response.status, after)
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            return Failure("the server sends files compressed, so ranges of them cannot be read")
        return None

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Raises errors of a connection as a Failure."""
        kinds = self._urllib3.exceptions
        try:
            yield
        except (kinds.NameResolutionError, kinds.LocationValueError):
            raise Failure("the server's name cannot be found", True) from None
        except (kinds.NewConnectionError, kinds.ProxyError):
            raise Failure("the server cannot be reached", True) from None
        except kinds.TimeoutError:
            raise Failure("the server stopped answering", True) from None
        except kinds.HTTPError as error:
            cause = error.args[-1] if error.args else None
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise Failure("the server's certificate is not trusted") from None
            broken = http.client.IncompleteRead, http.client.RemoteDisconnected
            if isinstance(cause, http.client.HTTPException) and not isinstance(cause, broken):
                raise Failure("the server's answer has invalid headers, or too many or too long ones") from None
            raise Failure("the connection broke off", True) from None


def _meta(response: Any, wanted: tuple[int, int] | None) -> dict[str, Any]:
    """The size and version of an object, from the headers of an answer, after a check of the range."""
    length = response.headers.get("Content-Length", "")  # `HTTPResponse` drops it if there is no body
    size = int(length) if length.isdecimal() and len(length) < 20 else -1
    if wanted is not None:
        if response.status != 206:
            raise Failure("the server does not serve ranges of files")
        span = _SPAN.fullmatch(response.headers.get("Content-Range", ""))
        if span is None:
            raise Failure("the server answered with an invalid Content-Range")
        first, last, size = map(int, span.groups())
        if first != wanted[0] or last != min(wanted[1], size) - 1:
            raise Failure("the server answered with another range than the requested one")
        if response.length_remaining is None:
            raise Failure("the server does not state the length of its answer")
    headers = response.headers
    return {"size": size, "e_tag": headers.get("ETag"), "last_modified": headers.get("Last-Modified")}


@functools.lru_cache(maxsize=8)
def _context(root_certificate: str, invalid: bool) -> ssl.SSLContext:
    context, paths = ssl.create_default_context(), ssl.get_default_verify_paths()
    if not (paths.cafile or paths.capath):  # this Python does not find the system's certificates
        with contextlib.suppress(ImportError):
            context.load_verify_locations(importlib.import_module("certifi").where())
    if root_certificate:
        context.load_verify_locations(cadata=root_certificate)
    if invalid:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _is_excluded(host: str, excludes: str) -> bool:
    """Returns True if a host needs no proxy: the host, its domain or its network is excluded."""
    for entry in excludes.replace(",", " ").split():
        name = entry.lstrip("*.").lower()
        if not name or host == name or host.endswith(f".{name}"):
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "on", "yes", "t", "y")


def _duration(text: str | None, default: float) -> float:
    """Parses a duration in obstore's form: `"1m 30s"`, `"250ms"`."""
    if not text:
        return default
    return sum(
        float(amount) * next(seconds for name, seconds in _UNITS if unit.startswith(name))
        for amount, unit in _AMOUNTS.findall(text)
    )
