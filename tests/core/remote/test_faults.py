"""Stores that fail: faults that pass are not noticed, those that stay are one error, and whoever stops it is heard."""

from __future__ import annotations

import datetime
import email.utils
import gc
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save, save_file

import lazymodel as lm
from tests.conftest import ROOT, child_environment
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, only, part, scripted
from tests.servers.secrets import SECRET, everything_of
from tests.small import make_small

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

SOON: dict[str, Any] = {"max_retries": 3, "backoff": {"init_backoff": 0.001, "max_backoff": 0.001}}
QUICK: dict[str, Any] = {"client_options": {"read_timeout": "200ms", "allow_http": True}, "retry_config": SOON}
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}
WORKER = Path(__file__).with_name("_worker.py")
WEIGHTS = {f"w{n}": np.random.default_rng(n).integers(0, 1 << 30, (1024, 768), np.int32) for n in range(8)}
NBYTES = 24 << 20
W = "/w.safetensors"  # of servers that have nothing else
SMALL = save({"w": (VALUES := np.arange(100_000, dtype=np.float32))})


@pytest.fixture(scope="module")
def files(_object_server: ObjectServer) -> ObjectServer:
    folder = _object_server.root / "faults"
    folder.mkdir(exist_ok=True)
    save_file(WEIGHTS, folder / "w.safetensors")
    save_file({"w": WEIGHTS["w0"]}, folder / "one.safetensors")
    np.savez_compressed(folder / "one.npz", w=WEIGHTS["w0"])
    shards = {f"w{number or ''}": f"one-{number:05}-of-00040.safetensors" for number in range(40)}
    for name, shard in shards.items():
        save_file({name: WEIGHTS["w0"]}, folder / shard)
    (folder / "all.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return _object_server


@pytest.fixture
def server(files: ObjectServer) -> ObjectServer:
    files.reset()
    return files


def load(
    checkpoint: lm.Checkpoint, mesh: Mesh, spec: tuple[str | None, ...] = ("model",), **options: Any
) -> dict[str, jax.Array]:
    shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
    abstract = lm.build_abstract(lambda: {name: jax.numpy.zeros(shape, np.int32) for name, shape in shapes.items()})
    return abstract.shard(mesh, {".*": PartitionSpec(*spec)}).materialize(checkpoint, **options)


def assert_loaded(arrays: dict[str, jax.Array]) -> None:
    for name, values in WEIGHTS.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), values)


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread is left after the block but those that there were."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # of what was in flight when nobody waited for it any more
        assert not thread.is_alive(), thread


# Faults that pass -----------------------------------------------------------------------------------------------------

KINDS = ["503", "429", "500", "408", "reset", "reset-body", "truncate", "stall"]


@pytest.mark.parametrize(
    ("dialect", "kind"),
    mostly_large(
        [*itertools.product(["http", "gs", "az"], KINDS)],
        [*(("http", kind) for kind in KINDS), ("gs", "503"), ("gs", "truncate"), ("az", "429")],
    ),
)
def test_a_fault_that_passes_is_not_noticed(server: ObjectServer, dialect: str, kind: str) -> None:
    url = server.url("faults/one.safetensors") if dialect == "http" else f"{dialect}://faults/one.safetensors"
    options = {"http": {}, "gs": server.gcs(), "az": server.azure()}[dialect]
    with lm.open_checkpoint(url, options | QUICK) as checkpoint:
        server.faults([kind], requests=[1], retry_after=0)
        server.reset_counters()
        np.testing.assert_array_equal(checkpoint["w"].read(), WEIGHTS["w0"])
    counted = server.counters()
    assert counted["faults"] == {kind: 1}
    # What arrived before a body broke off is kept; how much of it had reached us is the system's matter.
    assert counted["bytes"] <= 1.55 * WEIGHTS["w0"].nbytes


@pytest.mark.parametrize(
    "spec", [(None, "model"), *(pytest.param(spec, marks=pytest.mark.large) for spec in (("model",), ()))]
)
def test_one_request_in_twenty_fails(
    server: ObjectServer, mesh8: Mesh, spec: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch, read_request=256 << 10)
    checkpoint = lm.open_checkpoint(server.url("faults/w.safetensors"), QUICK)
    server.reset_counters()
    server.faults(["503", "reset", "truncate", "stall"], every=20, retry_after=0)
    with nothing_left():
        assert_loaded(load(checkpoint, mesh8, spec))
    counted = server.counters()
    assert sum(counted["faults"].values()) >= 4
    assert counted["bytes"] <= 1.15 * NBYTES


@pytest.mark.parametrize(("status", "written"), mostly_large([(429, "seconds"), (503, "date")], [(429, "seconds")]))
def test_retry_after_is_honoured(status: int, written: str) -> None:
    """By all threads: nobody asks for bytes before the time that the server asked for is over."""
    opened = threading.Event()
    busy_until: list[float] = []
    early: list[float] = []

    def reply(asked: Asked) -> Reply:
        now = time.monotonic()
        if opened.is_set() and not busy_until:
            busy_until.append(now + 0.9)
        if opened.is_set() and now < busy_until[0]:
            if now > busy_until[0] - 0.7:  # after the first ones, which were on their way
                early.append(busy_until[0] - now)
            date = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2))
            return status, {"Retry-After": date if written == "date" else "1"}, b""
        return part(SMALL, asked)

    with scripted(only(W, reply)) as origin, lm.open_checkpoint(origin + W, QUICK) as checkpoint:
        opened.set()
        threads = [threading.Thread(target=checkpoint["w"][n : n + 10].read) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert busy_until and not early


@pytest.mark.parametrize("value", ["", "-1", "soon", "1e99", "\xb2", "Thu, 99 Foo 2026", SECRET])
def test_retry_after_that_means_nothing(value: str) -> None:
    answers: list[int] = []

    def reply(asked: Asked) -> Reply:
        answers.append(1)
        return (503, {"Retry-After": value}, b"") if len(answers) < 3 else part(SMALL, asked)

    with scripted(only(W, reply)) as origin, lm.open_checkpoint(origin + W, QUICK) as checkpoint:
        assert checkpoint["w"].shape == VALUES.shape


def test_connections_are_used_again(server: ObjectServer) -> None:
    with lm.open_checkpoint(server.url("faults/one.safetensors"), ONCE) as checkpoint:  # and asks for what is not there
        for row in range(20):
            assert (checkpoint["w"][row].read() == WEIGHTS["w0"][row]).all()
    assert server.counters()["connections"] <= 3  # one is the counters' own


@pytest.mark.parametrize("then", ["closed", "more"])
def test_what_comes_on_a_connection_after_an_answer_is_no_error_of_the_next(then: str) -> None:
    def pieces(body: bytes) -> Iterator[bytes]:
        yield body
        if then == "closed":
            raise ConnectionError  # the handler closes it
        threading.Event().wait(0.2)  # until the next request was made
        yield b"x" * 70_000

    def reply(asked: Asked) -> Reply:
        status, headers, body = part(SMALL, asked, ETag='"1"')
        assert isinstance(body, bytes)
        if len(body) == 1000:
            return status, headers | {"Content-Length": "1000"}, pieces(body)
        return status, headers, body

    with scripted(only(W, reply)) as origin, lm.open_checkpoint(origin + W, ONCE) as checkpoint:
        for _ in range(4):
            assert (checkpoint["w"][:250].read() == VALUES[:250]).all()


# Faults that stay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *(("503", "503"), ("429", "429"), ("500", "500"), ("reset", "broke off|cannot be reached")),
        *(("truncate", "broke off"), ("403", ""), ("404", "")),
        pytest.param("stall", "stopped answering", marks=pytest.mark.large),
    ],
)
def test_what_stays_broken_is_one_error(server: ObjectServer, mesh8: Mesh, kind: str, said: str) -> None:
    checkpoint = lm.open_checkpoint(f"{server.url('faults/w.safetensors')}?sig={SECRET}", QUICK)
    server.faults([kind], every=1)
    for call in (lambda: load(checkpoint, mesh8), checkpoint["w0"].read):
        with nothing_left(), pytest.raises(lm.CheckpointError, match="/faults/w.safetensors") as found:
            call()
        told = str(found.value)
        assert told.count("faults/w.safetensors") <= 2 and "\n" not in told, told
        assert ("after 4 attempts" in told) is not kind.startswith("40"), told
        assert re.search(said, told)
        assert SECRET not in everything_of(found.value)
    server.faults()
    np.testing.assert_array_equal(checkpoint["w7"].read(), WEIGHTS["w7"])  # nothing of it stays with the checkpoint


@pytest.mark.timeout(30)
@pytest.mark.parametrize("asked_for", ["86400", "9" * 400])
def test_who_asks_for_too_much_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, asked_for: str) -> None:
    make_small(monkeypatch, longest_retry_after=0.01)
    said = pytest.raises(lm.CheckpointError, match="503 Service Unavailable, after 4 attempts")
    with scripted(lambda _: (503, {"Retry-After": asked_for}, b"")) as origin, said:
        lm.open_checkpoint(origin + W, QUICK)


@pytest.mark.parametrize(
    "seconds",
    [float, pytest.param(lambda seconds: datetime.timedelta(seconds=seconds), marks=pytest.mark.large)],
)
def test_waits_grow_up_to_a_limit(seconds: Any) -> None:
    asked: list[float] = []
    backoff = {"init_backoff": seconds(0.02), "max_backoff": seconds(0.18), "base": 3}

    def reply(_: Asked) -> Reply:
        asked.append(time.monotonic())
        return 500, {}, b""

    with scripted(reply) as origin, pytest.raises(lm.CheckpointError, match="after 7 attempts"):
        lm.open_checkpoint(origin + W, {"retry_config": {"max_retries": 6, "backoff": backoff}})
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert all(wait >= least for wait, least in zip(waits, (0.01, 0.03, 0.09, 0.09, 0.09, 0.09), strict=True))
    assert sum(waits) < 4, "without a limit it would be seven seconds"


@pytest.mark.parametrize(
    ("timeout", "long"),
    mostly_large(
        [
            ("100ms", False),
            ("0.1 seconds", False),
            ("5us", False),
            ("1m 30s", True),
            ("2h37min", True),
            ("1month", True),
        ],
        [("0.1 seconds", False), ("1m 30s", True)],
    ),
)
def test_durations_are_those_of_obstore(timeout: str, long: bool) -> None:
    """A server that is silent for a while is given up, or not."""
    release = threading.Event()

    def reply(asked: Asked) -> Reply:
        release.wait(0.3)
        return part(SMALL, asked)

    options = {"client_options": {"read_timeout": timeout}} | ONCE
    with scripted(only(W, reply)) as origin:
        if long:
            lm.open_checkpoint(origin + W, options).close()
        else:
            with pytest.raises(lm.CheckpointError, match="stopped answering"):
                lm.open_checkpoint(origin + W, options)
        release.set()


@pytest.mark.parametrize("name", ["w", "header", "certificate", "content-range", "tokenizer", "a status code: 404"])
@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("http://127.0.0.1:9", "cannot be reached"),
        ("https://no-such-host.invalid", "name cannot be found"),
        ("gs://bucket", "cannot be reached"),
    ],
)
def test_servers_that_are_not_there(root: str, said: str, name: str) -> None:
    """Whatever the file is called: its name is in what obstore says."""
    options = {"base_url": "http://127.0.0.1:9", "bearer_token": "x"} if root.startswith("gs") else {}
    with pytest.raises(lm.CheckpointError, match=f"{said}, after 4 attempts"):
        lm.open_checkpoint(f"{root}/{name}.safetensors", QUICK | options)


# What changes meanwhile, and other loads ------------------------------------------------------------------------------


def test_an_object_that_is_replaced_is_one_error(server: ObjectServer, mesh8: Mesh) -> None:
    checkpoint = lm.open_checkpoint(server.url("faults/w.safetensors"), QUICK)
    server.replace("faults/w.safetensors", after=3)
    with nothing_left(), pytest.raises(lm.CheckpointError, match=r"w\.safetensors changed while it was being read"):
        load(checkpoint, mesh8)
    assert server.counters()["statuses"].get("412", 0) >= 1


def test_an_object_that_is_replaced_is_an_error_in_every_process(server: ObjectServer, tmp_path: Path) -> None:
    """It is replaced once both have opened it, and one has read a part."""
    server.replace("faults/w.safetensors", after=3)
    address, url = free_address(), server.url("faults/w.safetensors")
    arguments = [("changed", process, address, url) for process in range(2)]
    assert None not in run_workers(WORKER, arguments, tmp_path, patience=40), printed(tmp_path, 2)
    for process in range(2):
        assert "w.safetensors changed while it was being read" in (tmp_path / f"log-{process}.txt").read_text()


def test_memory_is_given_back_after_a_failure(server: ObjectServer, mesh8: Mesh) -> None:
    checkpoint = lm.open_checkpoint(server.url("faults/w.safetensors"), QUICK)
    gc.collect()
    server.faults(["403"], requests=[3])
    with pytest.raises(lm.CheckpointError):
        load(checkpoint, mesh8)
    gc.collect()
    held = [found for found in gc.get_objects() if isinstance(found, np.ndarray) and found.nbytes > 1 << 20]
    assert sum(found.nbytes for found in held if found.base is None) <= 2 * NBYTES + (1 << 20)


def test_one_load_that_ends_does_not_stop_another(server: ObjectServer, mesh8: Mesh) -> None:
    """Of the same checkpoint: one is over, or fails, while the other one reads."""
    checkpoint = lm.open_checkpoint(server.url("faults/w.safetensors"), QUICK)
    results: list[Any] = []

    def again() -> None:
        try:
            results.append(load(checkpoint, mesh8))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=again) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert isinstance(result, dict), result
        assert_loaded(result)


# Ctrl-C ---------------------------------------------------------------------------------------------------------------

PATIENT = {"client_options": {"read_timeout": "60s", "timeout": "60s"}}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("what", "file"),
    mostly_large(
        [
            *itertools.product(
                ("open", "read", "materialize"), ("one.safetensors", "one.npz", "all.safetensors.index.json")
            )
        ],
        [("open", "one.safetensors"), ("read", "one.npz"), ("materialize", "all.safetensors.index.json")],
    ),
)
def test_ctrl_c_ends_what_hangs(server: ObjectServer, mesh8: Mesh, what: str, file: str) -> None:
    """The server stalls for a minute."""
    url, sent = server.url(f"faults/{file}"), list[float]()
    checkpoint = lm.open_checkpoint(url, PATIENT)
    calls: dict[str, Any] = {
        "open": lambda: lm.open_checkpoint(url, PATIENT),
        "read": lambda: checkpoint["w"].read(),
        "materialize": lambda: load(checkpoint, mesh8),
    }

    def press() -> None:
        while not server.counters()["faults"]:
            pass
        sent.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    server.faults(["stall"], every=1, path="*/one*")
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        calls[what]()
    assert time.monotonic() - sent[0] < 20, "it waited for the server"
    pressing.join()
    server.reset()  # lets the answers end


def test_what_hangs_in_a_thread_does_not_keep_a_program_from_ending(server: ObjectServer) -> None:
    script = (
        "import sys, threading, lazymodel as lm; ckpt = lm.open_checkpoint(sys.argv[1]); print('opened', flush=True); "
        "sys.stdin.readline(); threading.Thread(target=ckpt['w'].read, daemon=True).start(); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", script, server.url("faults/one.safetensors")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=child_environment(), **pipes) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "opened\n"
        server.faults(["stall"], every=1)
        print(file=child.stdin, flush=True)
        while not server.counters()["faults"]:
            pass
        print(file=child.stdin, flush=True)
        assert child.wait(20) == 0
