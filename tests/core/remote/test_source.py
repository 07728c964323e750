"""Tensors of objects are read as those of files are, whatever fails meanwhile, and whoever stops it."""

from __future__ import annotations

import gc
import json
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._remote.path import remote_path
from lazymodel._remote.source import RemoteSource, reading_ahead
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import FileLeaf
from lazymodel._tensors.wanted import wanted
from tests.conftest import ROOT, child_environment
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

SOON = {"max_retries": 5, "backoff": {"init_backoff": 0.001, "max_backoff": 0.01}}
QUICK: dict[str, Any] = {"client_options": {"read_timeout": "250ms"}, "retry_config": SOON}
CHANGED_WORKER = Path(__file__).with_name("_changed_worker.py")
NBYTES = 48 << 20


@pytest.fixture(scope="module")
def stored(_object_server: ObjectServer) -> tuple[ObjectServer, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    folder = _object_server.root / "source"
    folder.mkdir(exist_ok=True)
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


# The same as from a file.


@pytest.fixture(scope="module")
def places(_object_server: ObjectServer) -> tuple[str, Path]:
    _object_server.reset()  # of the faults of the test before
    folder = _object_server.root / "boxes"
    folder.mkdir(exist_ok=True)
    (folder / "w").write_bytes(np.random.default_rng(1).integers(0, 100, 1 << 13, np.uint8).tobytes())
    return _object_server.url("boxes/w"), folder / "w"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_view_is_that_of_the_file(places: tuple[str, Path], data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from([np.uint8, np.int16, np.int32])))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    offset = data.draw(st.integers(0, 500))
    index = tuple(slice(None, None, data.draw(st.sampled_from([1, 1, 2, -1, -3]))) for _ in shape)
    order = data.draw(st.permutations(range(len(shape))))
    url, path = places
    sources = RemoteSource(remote_path(url)), FileSource(path)
    sources[0].row_gap = data.draw(st.sampled_from([1, 16, 1 << 17]))
    boxes: list[tuple[slice, ...]] = []
    found: list[list[np.ndarray]] = []
    for source in sources:
        view = LazyTensor(FileLeaf("w", source, offset, shape, dtype))[index].transpose(order)
        if not boxes:
            for _ in range(data.draw(st.integers(1, 3))):
                cuts = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in view.shape]
                boxes.append(tuple(slice(*cut) for cut in cuts))
        announced = wanted(view, boxes) if data.draw(st.booleans()) else ()
        with reading_ahead(list(announced), data.draw(st.sampled_from([0, 100, 1 << 20]))):
            found.append([view[box].astype(np.float64).read() for box in boxes])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("max_host_memory", ["200KiB", "1MiB", "64MiB"])
@pytest.mark.parametrize("spec", [("model",), (None, "model"), ("model", None), ()])
def test_tied_tensors_and_little_memory(
    stored: tuple[ObjectServer, dict[str, np.ndarray]], mesh8: Mesh, spec: tuple[str | None, ...], max_host_memory: str
) -> None:
    """One tensor for three variables, one of them of another dtype, one transposed."""
    server, weights = stored
    server.reset()
    with lm.open_checkpoint(server.url("source/one.safetensors")) as checkpoint:
        tensor, expected = checkpoint["w"], weights["w0"]
        mapping = {"a": tensor, "b": tensor.astype(np.float32), "c": tensor.T}
        abstract = lm.build_abstract(
            lambda key: {
                "a": jax.numpy.zeros((1024, 1536), np.int32),
                "b": jax.numpy.zeros((1024, 1536), np.float32),
                "c": jax.numpy.zeros((1536, 1024), np.int32),
            },
            jax.random.key(0),
        )
        sharded = abstract.shard(mesh8, {".*": PartitionSpec(*spec)})
        arrays = sharded.materialize(mapping, max_host_memory=max_host_memory)
    for name, values in {"a": expected, "b": expected.astype(np.float32), "c": expected.T}.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), values)


def test_an_object_that_is_replaced_is_an_error_in_every_process(
    stored: tuple[ObjectServer, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """It is replaced once both have opened it, and one has read a part."""
    server, weights = stored
    server.reset()
    save_file(weights, server.root / "source" / "replaced.safetensors")
    server.replace("source/replaced.safetensors", after=3)
    address, url = free_address(), server.url("source/replaced.safetensors")
    codes = run_workers(CHANGED_WORKER, [(process, address, url) for process in range(2)], tmp_path, patience=40)
    assert None not in codes, printed(tmp_path, 2)
    found = [json.loads((tmp_path / f"log-{process}.txt").read_text().splitlines()[-1]) for process in range(2)]
    for error, _ in found:
        assert "replaced.safetensors changed while it was being read" in error
    print(f"{abs(found[0][1] - found[1][1]):.2f} s between the errors of the two processes")
