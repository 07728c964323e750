"""Tensors of objects are read as those of files are, whatever fails meanwhile, and whoever stops it."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save_file

import lazymodel as lm
from tests.conftest import ROOT, child_environment
from tests.servers.object_server import ObjectServer

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

SOON = {"max_retries": 5, "backoff": {"init_backoff": 0.001, "max_backoff": 0.01}}
QUICK: dict[str, Any] = {"client_options": {"read_timeout": "250ms"}, "retry_config": SOON}
NBYTES = 48 << 20


@pytest.fixture(scope="module")
def stored(_object_server: ObjectServer) -> tuple[ObjectServer, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    folder = _object_server.root / "source"
    folder.mkdir()
    weights = {f"w{n}": rng.integers(0, 1 << 30, (1024, 1536), np.int32) for n in range(8)}
    save_file(weights, folder / "w.safetensors")
    save_file({"w": weights["w0"]}, folder / "one.safetensors")
    np.savez_compressed(folder / "one.npz", w=weights["w0"])
    return _object_server, weights


def load(
    checkpoint: lm.Checkpoint, mesh: Mesh, spec: tuple[str | None, ...] = ("model",), **options: Any
) -> dict[str, jax.Array]:
    names = list(checkpoint)
    abstract = lm.build_abstract(
        lambda key: {name: jax.random.randint(key, checkpoint[name].shape, 0, 9, np.int32) for name in names},
        jax.random.key(0),
    )
    return abstract.shard(mesh, {".*": PartitionSpec(*spec)}).materialize(checkpoint, **options)


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread is left after the block but those that there were."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # of what was in flight when nobody waited for it any more
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("spec", [("model",), (None, "model"), ()])
def test_one_request_in_twenty_fails(
    stored: tuple[ObjectServer, dict[str, np.ndarray]], mesh8: Mesh, spec: tuple[str | None, ...], monkeypatch: Any
) -> None:
    monkeypatch.setattr("lazymodel._remote.ahead.REQUEST", 512 << 10)
    server, weights = stored
    server.reset()
    checkpoint = lm.open_checkpoint(server.url("source/w.safetensors"), QUICK)
    server.reset_counters()
    server.faults(["503", "reset", "truncate", "stall"], every=20, retry_after=0)
    with nothing_left():
        arrays = load(checkpoint, mesh8, spec)
    for name, values in weights.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), values)
    counted = server.counters()
    assert sum(counted["faults"].values()) >= 4
    assert counted["bytes"] <= 1.15 * NBYTES


@pytest.mark.parametrize("kind", ["503", "truncate", "stall", "403", "404"])
def test_what_stays_broken_is_one_error(
    stored: tuple[ObjectServer, dict[str, np.ndarray]], mesh8: Mesh, kind: str
) -> None:
    server, _ = stored
    server.reset()
    checkpoint = lm.open_checkpoint(server.url("source/w.safetensors"), QUICK)
    server.faults([kind], every=1)
    with nothing_left(), pytest.raises(lm.CheckpointError) as found:
        load(checkpoint, mesh8)
    told = str(found.value)
    assert told.count("source/w.safetensors") <= 2 and "\n" not in told, told
    assert ("after 6 attempts" in told) is not kind.startswith("40"), told
    server.faults()
    arrays = load(checkpoint, mesh8)  # nothing of it stays with the checkpoint
    np.testing.assert_array_equal(np.asarray(arrays["w7"]), stored[1]["w7"])


def test_an_object_that_is_replaced_is_one_error(
    stored: tuple[ObjectServer, dict[str, np.ndarray]], mesh8: Mesh
) -> None:
    server, _ = stored
    server.reset()
    checkpoint = lm.open_checkpoint(server.url("source/w.safetensors"), QUICK)
    server.replace("source/w.safetensors", after=3)
    with nothing_left(), pytest.raises(lm.CheckpointError, match=r"w\.safetensors changed while it was being read"):
        load(checkpoint, mesh8)
    assert server.counters()["statuses"].get("412", 0) >= 1


def test_memory_is_given_back_after_a_failure(stored: tuple[ObjectServer, dict[str, np.ndarray]], mesh8: Mesh) -> None:
    server, _ = stored
    server.reset()
    checkpoint = lm.open_checkpoint(server.url("source/w.safetensors"), QUICK)
    gc.collect()
    server.faults(["403"], requests=[3])
    with pytest.raises(lm.CheckpointError):
        load(checkpoint, mesh8)
    gc.collect()
    held = [found for found in gc.get_objects() if isinstance(found, np.ndarray) and found.nbytes > 1 << 20]
    assert sum(found.nbytes for found in held if found.base is None) <= 2 * NBYTES + (1 << 20)


def test_one_load_that_ends_does_not_stop_another(
    stored: tuple[ObjectServer, dict[str, np.ndarray]], mesh8: Mesh
) -> None:
    """Of the same checkpoint: one is over, or fails, while the other one reads."""
    server, weights = stored
    server.reset()
    checkpoint = lm.open_checkpoint(server.url("source/w.safetensors"), QUICK)
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
        for name, values in weights.items():
            np.testing.assert_array_equal(np.asarray(result[name]), values)


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("open", "one.safetensors"),
        ("read", "one.safetensors"),
        ("read", "one.npz"),
        ("materialize", "one.safetensors"),
        ("materialize", "one.npz"),
        ("leave", "one.safetensors"),
    ],
)
def test_ctrl_c_ends_what_hangs(stored: tuple[ObjectServer, dict[str, np.ndarray]], what: str, file: str) -> None:
    """The server stalls for a minute; without an end, the wait for the process fails."""
    server, _ = stored
    server.reset()
    command = [
        sys.executable,
        "-m",
        "tests.core.remote._interrupted_worker",
        what,
        server.url(f"source/{file}"),
        "wait",
    ]
    child = subprocess.Popen(
        command, cwd=ROOT, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "opened\n"
        server.faults(["stall"], every=1)
        child.stdin.write("\n")
        child.stdin.flush()
        while not server.counters()["faults"]:
            pass
        sent = time.time()
        child.send_signal(signal.SIGINT)
        result, at = child.stdout.readline().rsplit(maxsplit=1)
        code = child.wait(20)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
    assert result == "interrupted"
    assert code == 0
    assert float(at) - sent < 20, "it waited for the server"
    print(f"{what} {file}: {float(at) - sent:.2f} s to the exception, {time.time() - sent:.2f} s to the end")
