"""What one process alone can show of the store that processes share: how JAX is asked for it, and its times."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import pytest

import lazymodel as lm
from lazymodel._devices import agreement, coordination
from lazymodel._devices.coordination import Store, Watch, troubles


class Client:
    """What JAX's client does, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: it is there")
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: it is not there")
        return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder: str) -> None:
        self.values = {key: value for key, value in self.values.items() if not key.startswith(folder)}


@pytest.fixture
def client() -> Client:
    return Client()


def test_jax_has_what_is_asked_of_it():
    """Fails where upstream moves what `_devices/coordination` takes from `jax._src`, which no public name gives."""
    state = coordination._state()
    assert {"client", "service", "preemption_sync_manager", "process_id", "num_processes"} <= set(dir(state))
    from jax._src.lib import _jax

    for name in ("key_value_set", "key_value_try_get", "key_value_dir_get", "key_value_delete"):
        assert hasattr(_jax.DistributedRuntimeClient, name)
    assert "allow_overwrite" in (_jax.DistributedRuntimeClient.key_value_set.__doc__ or "")
    assert "self.client.shutdown()" in inspect.getsource(type(state).shutdown), "what `_detach` keeps from happening"


def test_one_process_has_no_store():
    assert coordination.run_store() is None


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1 minute"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("LAZYMODEL_WAIT_SECONDS", text)
    with pytest.raises(lm.LazyModelError, match="LAZYMODEL_WAIT_SECONDS is a positive number of seconds; got"):
        coordination.wait_seconds()


def test_times(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LAZYMODEL_WAIT_SECONDS", raising=False)
    assert (coordination.wait_seconds(), coordination.silence_seconds()) == (1800, 60)
    monkeypatch.setenv("LAZYMODEL_WAIT_SECONDS", "2.5")
    assert (coordination.wait_seconds(), coordination.silence_seconds()) == (2.5, 2.5)


def test_the_first_text_holds(client: Client):
    first, second = Store(client, 0, 2), Store(client, 1, 2)
    assert first.put_first("a/b", "mine") == "mine"
    assert second.put_first("a/b", "other") == "mine"
    assert second.get("a/b") == "mine"
    assert second.get("a/c") is None
    assert second.folder("a/") == {"b": "mine"}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(coordination.time, "monotonic", lambda: clock[0])
    return clock


@pytest.mark.parametrize("watched", [{1}, {1, 2}])
def test_only_those_who_were_at_work_fall_silent(client: Client, now: list[float], watched: set[int]):
    store, watch = Store(client, 0, 3), Watch()
    store.put("lazymodel/alive/1", "a")
    assert watch.silent(store, watched, 10) == set()
    now[0] = 9
    store.put("lazymodel/alive/1", "b")
    assert watch.silent(store, watched, 10) == set()
    now[0] = 19
    assert watch.silent(store, watched, 10) == set()
    now[0] = 20
    assert watch.silent(store, watched, 10) == {1}, "process 2, which never was at work, is not"
    store.put("lazymodel/alive/1", "")
    now[0] = math.inf
    assert watch.silent(store, watched, 10) == set(), "it went to do something else"


def test_troubles_are_the_first_opening_that_failed_and_ends(client: Client):
    store = Store(client, 1, 2)
    store.put(f"{coordination.TROUBLE}{store.process}/1", "one")
    store.put(f"{coordination.TROUBLE}{store.process}/2", "two")
    other = Store(client, 0, 2)
    assert {process: (t.what, t.why, t.opening) for process, t in troubles(other, 0).items()} == {
        1: ("failed", "one", 1)
    }
    assert {process: (t.what, t.why, t.opening) for process, t in troubles(other, 1).items()} == {
        1: ("failed", "two", 2)
    }
    assert troubles(other, 2) == {}
    assert troubles(store, 0) == {}, "it knows its own"
    store.put("lazymodel/trouble/1/left", '{"why": "", "alone": false}')
    assert troubles(other, 2)[1].what == "has ended"
    assert troubles(other, 1)[1].what == "failed", "which says more"


def test_processes_without_a_store_are_told_to_initialize(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agreement, "_sharing_processes", lambda shardings: (0, 1))
    with (
        pytest.raises(lm.LazyModelError, match=r"call jax\.distributed\.initialize\(\)"),
        agreement.agreement(()),
    ):
        pass


def meeting(client: Any, process: int, processes: int) -> agreement._Meeting:
    members = tuple(range(processes))
    return agreement._Meeting(Store(client, process, processes), members, "saved", "tensors differ", "Save the same")


def test_a_verdict_that_others_gave_before_this_one_saw_trouble_holds(client: Client, monkeypatch: pytest.MonkeyPatch):
    """Process 1 ends at once after the stage, while process 0 has not looked for the verdict yet."""
    monkeypatch.setattr(agreement._count, "stage", lambda members: 7)
    first, second = meeting(client, 0, 2), meeting(client, 1, 2)
    for each in (first, second):
        each.report(agreement.Stage("write"))
    second._settle(agreement._Verdict())
    second._store.put("lazymodel/trouble/1/left", '{"why": "", "alone": false}')
    trouble = first._trouble()
    assert trouble is not None
    assert first._settle(trouble) == agreement._Verdict()


def test_what_differs_is_quoted(client: Client):
    reports = {n: {"outcome": f"write {n + 1}", "checksum": f"{n}", "files": []} for n in range(2)}
    assert meeting(client, 0, 2)._compare(reports).error == (
        "the processes' tensors differ: process 0 would write 1, process 1 would write 2. Save the same."
    )
