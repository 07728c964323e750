"""GET and HEAD requests to web servers, of whose answers no more is read than is wanted.

obstore, which asks buckets, reads the body of an error to its end before it says anything, and a web server that means
harm can send for as long as it likes. Here the body of an error is not read, but for a few KiB that free a connection
for the next request. `Web` stands where a store of obstore would: `get` and `head` return what obstore's do.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import importlib
import io
import ipaddress
import itertools
import re
import select
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from lazymodel._remote.requests import Failure, failure_of_status
from lazymodel._remote.url import quoted

_MOST_ERROR = 4 << 10  # bytes of an error's body that are read, and thrown away, so that the connection can be reused
_MOST_REDIRECTS = 10  # as browsers have it, about
_IDLE = 64  # connections that are kept for each server: more than there are requests at a time
_PRIVATE = ("authorization", "cookie", "proxy-authorization")  # headers that no other server than the first one gets
_REDIRECTS = (301, 302, 303, 307, 308)
_SPAN = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_DURATION = re.compile(r"(?<![0-9.])([0-9.]++) ?([a-zA-Z]++)")
# What the names of units begin with in the crate humantime, by which obstore reads durations, and their seconds.
_UNITS = (
    *(("ms", 1e-3), ("n", 1e-9), ("u", 1e-6), ("month", 2_629_800.0), ("M", 2_629_800.0)),
    *(("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0), ("w", 604_800.0), ("y", 31_557_600.0)),
)
_BROKE_OFF = "the connection broke off"


class Answer:
    """An answer whose body was not read yet; attributes and methods are those of obstore's `GetResult`."""

    def __init__(self, response: http.client.HTTPResponse, meta: Mapping[str, Any]) -> None:
        self._response, self.meta = response, meta
        self.attributes = {"Content-Type": response.headers.get("Content-Type", "")}

    def stream(self, min_chunk_size: int) -> Iterator[memoryview]:
        """The body in pieces of this many bytes; each is good until the next one is taken."""
        piece = memoryview(bytearray(min_chunk_size))
        with _explained():
            while count := self._response.readinto(piece):
                yield piece[:count]
            if self._response.length:
                raise Failure(_BROKE_OFF, True)


class Web:
    """What lies below an address.

    Args:
        root: The address; a query is sent with every request.
        headers: For the server of that address alone, such as credentials.
        options: obstore's `client_options`, as a store of obstore that took them gives them back.
    """

    def __init__(self, root: str, headers: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self._root, _, query = root.partition("?")
        self._query = f"?{quote(query, safe='%/:?#[]@!$&()*+,;=~')}" if query else ""
        given = {name: _text(value) for name, value in options.get("default_headers", {}).items()}
        self._headers = {"User-Agent": options.get("user_agent", "lazymodel"), "Accept": "*/*", **given, **headers}
        self._allow_http = _is_true(options.get("allow_http"))
        self._connect_seconds = _seconds(options.get("connect_timeout"), 10.0)
        self._read_seconds = _seconds(options.get("read_timeout"), 10.0)
        self._seconds = _seconds(options.get("timeout"), 30.0)
        self._proxies = {"all": options["proxy_url"]} if options.get("proxy_url") else urllib.request.getproxies()
        self._excludes = options.get("proxy_excludes", "") if options.get("proxy_url") else self._proxies.get("no", "")
        invalid = _is_true(options.get("allow_invalid_certificates"))
        self._certificates = _text(options.get("root_certificate", "")), invalid
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}  # by scheme and host
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._idle)

    @contextlib.contextmanager
    def get(self, key: str, *, options: Mapping[str, Any] | None = None) -> Generator[Answer]:
        """The answer to a GET request; `options` are `range`, first byte and the one behind the last, and `if_match`.

        Raises:
            Failure: There is none that was asked for.
        """
        options = options or {}
        headers = {"If-Match": options["if_match"]} if "if_match" in options else {}
        if "range" in options:
            headers["Range"] = f"bytes={options['range'][0]}-{options['range'][1] - 1}"
        with self._answer("GET", key, headers) as response:
            yield Answer(response, _meta(response, options.get("range")))

    def head(self, key: str) -> Mapping[str, Any]:
        """Size, ETag and time of what is there; raises as `get`."""
        with self._answer("HEAD", key, {}) as response:
            if (meta := _meta(response, None))["size"] < 0:
                raise Failure("the server does not say how long the file is")
            return meta

    @contextlib.contextmanager
    def _answer(self, method: str, key: str, more: Mapping[str, str]) -> Generator[http.client.HTTPResponse]:
        url = f"{self._root.rstrip('/')}/{quoted(key)}{self._query}" if key else f"{self._root}{self._query}"
        headers, until = {**self._headers, **more}, time.monotonic() + self._seconds
        for _ in range(_MOST_REDIRECTS):
            parts = urlsplit(url)
            with self._response(method, parts, headers, until) as response:
                location = response.headers.get("Location", "") if response.status in _REDIRECTS else ""
                failure = None if location else _failure(response)
                if not location and failure is None:
                    yield response
                    return
            if failure is not None:
                raise failure
            url = self._redirected(url, location)
            if (there := urlsplit(url)).netloc != parts.netloc or there.scheme != parts.scheme:
                headers = {name: value for name, value in headers.items() if name.lower() not in _PRIVATE}
        raise Failure("the server redirects in a circle, or to where nothing may be read from")

    def _redirected(self, url: str, location: str) -> str:
        with contextlib.suppress(ValueError):
            there = urlsplit(urljoin(url, quote(location, safe="%/:?#[]@!$&'()*+,;=~")))
            if there.scheme == "http" and not self._allow_http:
                raise Failure("the server redirects to plain http")
            if there.scheme in ("http", "https") and there.hostname and there.port != 0:
                return there.geturl()
        raise Failure("the server redirects in a circle, or to where nothing may be read from")

    @contextlib.contextmanager
    def _response(
        self, method: str, parts: SplitResult, headers: Mapping[str, str], until: float
    ) -> Generator[http.client.HTTPResponse]:
        """An answer, a redirection as well. Its connection serves again if all of its body was read, or what is left
        of it is short.
        """
        proxy = self._proxy(parts)
        target = parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="").geturl()
        if proxy is not None and parts.scheme == "http":
            target, headers = parts._replace(fragment="").geturl(), {**headers, **_proxy_headers(proxy)}
        connection, reusable = self._idle_connection(parts), False
        try:
            with _explained():
                response = connection and self._asked(connection, method, target, headers, until, used=True)
                if response is None:
                    connection = self._new(parts, proxy, until)
                    response = self._asked(connection, method, target, headers, until)
            assert response is not None
            yield response
            if (response.length or 0) <= _MOST_ERROR and not response.chunked:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    response.read(_MOST_ERROR)
            reusable = response.isclosed() and not response.will_close
        finally:
            with self._lock:
                idle = self._idle.setdefault((parts.scheme, parts.netloc), [])
                if connection is not None and reusable and len(idle) < _IDLE:
                    idle.append(connection)
                    connection = None
            if connection is not None:
                connection.close()

    def _asked(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        until: float,
        *,
        used: bool = False,
    ) -> http.client.HTTPResponse | None:
        """The answer; None if the connection was used before and the server has closed it since."""
        sock = _Timed(connection.sock, self._read_seconds, until)
        connection.response_class = lambda _, **given: http.client.HTTPResponse(sock, **given)  # pyright: ignore
        try:
            connection.request(method, target, headers=headers)
            return connection.getresponse()
        except ConnectionError:
            connection.close()
            if used:
                return None
            raise

    def _idle_connection(self, parts: SplitResult) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get((parts.scheme, parts.netloc))
                connection = idle.pop() if idle else None
            if connection is None or not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()  # the server did, or says what nobody asked for

    def _new(self, parts: SplitResult, proxy: SplitResult | None, until: float) -> http.client.HTTPConnection:
        where = proxy or parts
        seconds = max(min(self._connect_seconds, until - time.monotonic()), 0.001)
        host, port = where.hostname or "", where.port or (443 if where.scheme == "https" else 80)
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=_context(*self._certificates))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        if proxy is not None and parts.scheme == "https":
            connection.set_tunnel(parts.hostname or "", parts.port, _proxy_headers(proxy))
        try:
            connection.connect()
        except BaseException as error:
            connection.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise Failure("the server's certificate is not trusted") from None
            if isinstance(error, socket.gaierror):
                raise Failure("the server's name cannot be found", True) from None
            if isinstance(error, TimeoutError):
                raise Failure("the server stopped answering", True) from None
            if isinstance(error, OSError):
                raise Failure("the server cannot be reached", True) from None
            raise
        return connection

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        address = self._proxies.get(parts.scheme) or self._proxies.get("all")
        if not address or _is_excluded(parts.hostname or "", self._excludes):
            return None
        proxy = urlsplit(address if "://" in address else f"http://{address}")
        if proxy.scheme != "http" or not proxy.hostname:
            raise Failure("the proxy's address has to begin with http://, over which https is tunnelled")
        return proxy


class _Timed:
    """A socket as `HTTPResponse` reads from it: every read ends in time, and so do all of them together."""

    def __init__(self, sock: Any, seconds: float, until: float) -> None:
        self._sock, self._seconds, self._until = sock, seconds, until
        sock.settimeout(max(min(seconds, until - time.monotonic()), 0.001))

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._seconds, self._until))


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: Any, seconds: float, until: float) -> None:
        super().__init__()
        self._sock, self._file = sock, sock.makefile("rb", buffering=0)
        self._seconds, self._until = seconds, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(min(self._seconds, left))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def _explained() -> Generator[None]:
    """Raises what goes wrong with a connection as a Failure."""
    try:
        yield
    except TimeoutError:
        raise Failure("the server stopped answering", True) from None
    except (http.client.RemoteDisconnected, http.client.IncompleteRead):
        raise Failure(_BROKE_OFF, True) from None
    except http.client.HTTPException:
        raise Failure("the server's answer has headers that mean nothing, too many, or too large ones") from None
    except OSError:
        raise Failure(_BROKE_OFF, True) from None


def _failure(response: http.client.HTTPResponse) -> Failure | None:
    if response.status not in (200, 206):
        return failure_of_status(response.status, response.headers.get("Retry-After"))
    if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        return Failure("the server sends files compressed, of which no ranges can be read")
    return None


def _meta(response: http.client.HTTPResponse, wanted: tuple[int, int] | None) -> dict[str, Any]:
    """What an answer says of its object, after a look at whether it is the range that was wanted."""
    length = response.headers.get("Content-Length", "")  # which `HTTPResponse` forgets where there is no body
    size = int(length) if length.isdecimal() and len(length) < 20 else -1
    if wanted is not None:
        if response.status != 206:
            raise Failure("the server does not serve ranges of files")
        span = _SPAN.fullmatch(response.headers.get("Content-Range", ""))
        if span is None:
            raise Failure("the server answered with a Content-Range that means nothing")
        first, last, size = map(int, span.groups())
        if first != wanted[0] or last != min(wanted[1], size) - 1:
            raise Failure("the server answered with another range than was asked for")
        if response.length is None:
            raise Failure("the server does not say how long its answer is")
    headers = response.headers
    return {"size": size, "e_tag": headers.get("ETag"), "last_modified": headers.get("Last-Modified")}


@functools.lru_cache(maxsize=8)
def _context(root_certificate: str, invalid: bool) -> ssl.SSLContext:
    context, paths = ssl.create_default_context(), ssl.get_default_verify_paths()
    if not (paths.cafile or paths.capath):  # a Python that does not find the system's certificates
        with contextlib.suppress(ImportError):
            context.load_verify_locations(importlib.import_module("certifi").where())
    if root_certificate:
        context.load_verify_locations(cadata=root_certificate)
    if invalid:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _is_excluded(host: str, excludes: str) -> bool:
    """Whether a host is asked without a proxy: it, a domain that it is in, or a network is among the excluded ones."""
    for entry in excludes.replace(",", " ").split():
        name = entry.lstrip("*.").lower()
        if not name or host == name or host.endswith(f".{name}"):
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _close(idle: Mapping[Any, list[http.client.HTTPConnection]]) -> None:
    for connection in itertools.chain.from_iterable(idle.values()):
        connection.close()


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "on", "yes", "t", "y")


def _seconds(text: str | None, default: float) -> float:
    """A duration as obstore writes it: `"1m 30s"`, `"250ms"`."""
    if not text:
        return default
    return sum(
        float(amount) * next(seconds for name, seconds in _UNITS if unit.startswith(name))
        for amount, unit in _DURATION.findall(text)
    )
