"""What is tried again, how soon, and how often: by errors as obstore words them, and against servers that fail."""

from __future__ import annotations

import datetime
import email.utils
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lazymodel as lm
from lazymodel._remote import requests
from lazymodel._remote.path import remote_path
from lazymodel._remote.requests import Failure, Gate, Missing, Retries, apart, attempt
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, part, scripted
from tests.servers.secrets import SECRET, everything_of

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

DATA = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
SOON = {"max_retries": 3, "backoff": {"init_backoff": 0.001, "max_backoff": 0.001}}
QUICK: dict[str, Any] = {"client_options": {"read_timeout": "200ms"}, "retry_config": SOON}


@pytest.fixture(scope="module")
def stored(_object_server: ObjectServer) -> ObjectServer:
    (_object_server.root / "faults").mkdir(exist_ok=True)
    (_object_server.root / "faults" / "w.bin").write_bytes(DATA)
    return _object_server


@pytest.mark.parametrize("kind", ["503", "429", "500", "408", "reset", "reset-body", "truncate", "stall"])
@pytest.mark.parametrize("dialect", ["http", "gcs", "azure"])
def test_a_fault_that_passes_is_not_noticed(stored: ObjectServer, kind: str, dialect: str) -> None:
    stored.reset()
    url = {"http": stored.url("faults/w.bin"), "gcs": "gs://faults/w.bin", "azure": "az://faults/w.bin"}[dialect]
    options = {} if dialect == "http" else getattr(stored, dialect)()
    place = remote_path(url, {**options, **QUICK, "client_options": {"read_timeout": "200ms", "allow_http": True}})
    place.store.head(place.key)
    stored.faults([kind], requests=[1], retry_after=0)
    stored.reset_counters()
    out = np.zeros(900_000 - 5, np.uint8)
    place.store.get(place.key, 5, out)
    assert out.tobytes() == DATA[5:900_000]
    counted = stored.counters()
    assert counted["faults"] == {kind: 1}
    # What arrived before a body broke off is kept; how much of it had reached us is the system's matter.
    assert counted["bytes"] <= 1.55 * 900_000


@pytest.mark.parametrize("kind", ["503", "429", "500", "reset", "truncate", "stall"])
def test_a_fault_that_stays_is_one_error(stored: ObjectServer, kind: str) -> None:
    stored.reset()
    place = remote_path(f"{stored.url('faults/w.bin')}?sig={SECRET}", QUICK)
    place.store.head(place.key)
    stored.faults([kind], every=1)
    before = threading.active_count()
    with pytest.raises(lm.CheckpointError, match=r"/faults/w\.bin: .*, after \d attempts$") as found:
        place.store.get(place.key, 0, np.zeros(1 << 20, np.uint8))
    assert SECRET not in everything_of(found.value)
    said = {"reset": "broke off|cannot be reached", "truncate": "broke off", "stall": "stopped answering"}.get(
        kind, kind
    )
    assert re.search(said, str(found.value))
    assert threading.active_count() == before


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("written", ["seconds", "date"])
def test_retry_after_is_honoured(status: int, written: str) -> None:
    """By all threads: nobody asks for bytes before the time that the server asked for is over."""
    busy_until: list[float] = []
    early: list[float] = []

    def reply(asked: Asked) -> Reply:
        now = time.monotonic()
        if not busy_until:
            busy_until.append(now + 0.9)
        if now < busy_until[0]:
            if asked.range != (0, 1) and now > busy_until[0] - 0.7:  # after the first ones, which were on their way
                early.append(busy_until[0] - now)
            seconds = busy_until[0] - now
            date = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2))
            return status, {"Retry-After": date if written == "date" else f"{int(seconds) + 1}"}, b""
        return part(DATA, asked)

    with scripted(reply) as origin:
        place = remote_path(f"{origin}/w", QUICK)
        threads = [threading.Thread(target=place.store.get, args=("w", n, np.zeros(10, np.uint8))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not early


def test_who_asks_for_too_much_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LONGEST_RETRY_AFTER", 0.01)
    said = pytest.raises(lm.CheckpointError, match="503 Service Unavailable, after 4 attempts")
    with scripted(lambda _: (503, {"Retry-After": "86400"}, b"")) as origin, said:
        remote_path(f"{origin}/w", QUICK).store.head("w")


@pytest.mark.parametrize("value", ["", "-1", "soon", "1e99", "²", "9" * 400, "Thu, 99 Foo 2026", SECRET])
def test_retry_after_that_means_nothing(value: str) -> None:
    answers: list[int] = []

    def reply(asked: Asked) -> Reply:
        answers.append(1)
        return (503, {"Retry-After": value.replace("²", "\xb2")}, b"") if len(answers) < 3 else part(DATA, asked)

    with scripted(reply) as origin:
        if value.startswith("99"):
            assert requests._parsed(value) > requests.LONGEST_RETRY_AFTER
        else:
            place = remote_path(f"{origin}/w", QUICK)
            assert place.store.head("w")[1] == len(DATA)


def test_deadlines() -> None:
    """A server that sends a byte now and then, and one that is silent."""

    def reply(asked: Asked) -> Reply:
        release.wait(10)
        return 503, {}, b""

    release = threading.Event()
    options = {"client_options": {"timeout": "300ms"}, "retry_config": {"max_retries": 0}}
    with scripted(reply) as origin, pytest.raises(lm.CheckpointError, match="stopped answering"):
        remote_path(f"{origin}/w", options).store.head("w")
    release.set()


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:9/w", "cannot be reached"), ("https://no-such-host.invalid/w", "name cannot be found")],
)
def test_servers_that_are_not_there(url: str, said: str) -> None:
    with pytest.raises(lm.CheckpointError, match=f"{said}, after 4 attempts"):
        remote_path(url, QUICK).store.head("w")


def test_what_is_worth_another_try() -> None:
    def failing(*failures: Exception) -> Callable[[], str]:
        left = list(failures)

        def function() -> str:
            if left:
                raise left.pop(0)
            return "answer"

        return function

    retries, gate, stopped = Retries(SOON), Gate(lambda _: None), threading.Event()
    again, never = Failure("again", True), Failure("never")
    assert attempt("x", "x", failing(again, again, again), retries, gate, stopped) == "answer"
    for failures, said in (
        ((again,) * 4, "again, after 4 attempts"),
        ((never,), "never$"),
        ((ValueError(SECRET),), "x"),
    ):
        with pytest.raises(lm.CheckpointError, match=said) as found:
            attempt("x", "x", failing(*failures), retries, gate, stopped)
        assert SECRET not in everything_of(found.value)
    with pytest.raises(Missing):
        attempt("x", "x", failing(FileNotFoundError(SECRET)), retries, gate, stopped)
    stopped.set()
    with pytest.raises(lm.CheckpointError, match="stopped"):
        attempt("x", "x", failing(), retries, gate, stopped)


def test_waits_grow_up_to_a_limit() -> None:
    retries = Retries({"backoff": {"init_backoff": datetime.timedelta(seconds=1), "max_backoff": 4.0, "base": 3}})
    for number, longest in enumerate((1, 3, 4, 4)):
        assert longest / 2 <= retries.wait(number) <= longest


def test_whoever_gives_up_does_not_wait() -> None:
    hanging, left = threading.Event(), list[threading.Event]()

    def hang(stopped: threading.Event) -> None:
        left.append(stopped)
        hanging.wait(10)

    with pytest.raises(lm.CheckpointError, match="reading was stopped"):
        apart(hang, lambda: True)
    assert left[0].is_set()
    hanging.set()
    with pytest.raises(ZeroDivisionError):
        apart(lambda _: 1 // 0, bool)
