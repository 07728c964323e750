"""A sampler follows a trainer that is another program: equal to `lm.Sync`, whole versions only, whatever dies."""

from __future__ import annotations

import importlib
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events
from tests.conftest import ROOT, child_environment
from tests.extras.sync.test_sync import FLOAT, HALF, MAPPING, SAMPLER, TRAINER, mesh, model, numbers
from tests.processes import free_address, printed, run_workers

WORKER = Path(__file__).with_name("_job_worker.py")
RULES = {"embed": P("model"), "head": P(None, "model"), "up": P(None, None, "model"), "layers/.*": P("model")}


@pytest.fixture
def trainer() -> Any:
    return model(TRAINER, FLOAT, mesh(jax.devices()[:4], 4, 1), {".*": P("data")})


@pytest.fixture
def server(trainer: Any) -> Iterator[lm.SyncServer]:
    with lm.SyncServer(trainer, timeout=5) as server:
        yield server


@pytest.fixture(autouse=True)
def _clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every client is closed at the end of a test."""
    connect, made = lm.SyncClient._connect, list[lm.SyncClient]()

    def noted(self: lm.SyncClient, *args: Any) -> Any:
        made.append(self)
        return connect(self, *args)

    monkeypatch.setattr(lm.SyncClient, "_connect", noted)
    yield
    for client in made:
        client.close()


def crossed(sync: lm.SyncClient, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what a client fetches from now on, added up."""
    fetch, total = sync._fetch, [0]

    def counted(group: Any) -> Any:
        found = fetch(group)
        total[0] += sum(piece.nbytes for piece in found[0])
        return found

    monkeypatch.setattr(sync, "_fetch", counted)
    return total


def same(one: Any, other: Any) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (8, 1)])
def test_equal_to_sync(shape: Any, trainer: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = model(SAMPLER, HALF, mesh(jax.devices()[:8], *shape), RULES)
    sync = lm.SyncClient(server.address, sampler, MAPPING, verify=True)
    training = trainer.materialize(numbers(trainer))
    server.publish(training)
    expected = lm.Sync(trainer, sampler, MAPPING)(training, into=sampler.materialize())
    total = crossed(sync, monkeypatch)
    sampling = sync.pull(into=sampler.materialize())
    assert same(sampling, expected) and sync.version == 1
    # Every element of the trainer once, in the dtype with the fewest bytes: the head is the embedding.
    fewest = sum(2 * np.prod(shape) for shape in TRAINER.values())
    assert total[0] == sync.moved_nbytes == fewest
    training = jax.tree.map(lambda array: array * 3, training)
    server.publish(training)
    sampling = sync.pull(into=sampling, donate=False)
    server.publish(training)
    with compile_events() as events:
        before, sampling = sampling, sync.pull(into=sampling, donate=False)
    assert not events
    assert same(sampling, lm.Sync(trainer, sampler, MAPPING)(training, into=sampler.materialize()))
    assert same(before, sampling)


def test_the_fewest_bytes(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicated, repeated, cut and padded: each element of the trainer that is needed crosses once."""
    here, there = mesh(jax.devices()[:4], 2, 2), mesh(jax.devices()[:8], 2, 4)
    own = model(
        {"kv": (4, 6, 16), "vocab": (100, 8), "rest": (7,)}, FLOAT, here, {"kv": P("data"), "vocab": P("model")}
    )
    wanted = model(
        {"kv": (8, 6, 16), "vocab": (96, 8), "rest": (7,)}, HALF, there, {"kv": P("model"), "vocab": P("data")}
    )

    def table(w: Any) -> dict[str, Any]:
        twice = np.broadcast_to((w["kv"] * 0.5)[:, None], (4, 2, 6, 16)).reshape(8, 6, 16)
        return {"kv": twice, "vocab": w["vocab"][:96], "rest": w["rest"]}

    with lm.SyncServer(own) as server:
        sync = lm.SyncClient(server.address, wanted, table)
        live = own.materialize(numbers(own))
        server.publish(live)
        total = crossed(sync, monkeypatch)
        sampling = sync.pull(into=wanted.materialize())
    assert same(sampling, lm.Sync(own, wanted, table)(live, into=wanted.materialize()))
    assert total[0] == sync.moved_nbytes == 2 * (4 * 6 * 16 + 96 * 8 + 7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_and_in_place() -> None:
    devices = Mesh(np.array(jax.devices()[:8]), ("data",))
    abstract = lm.build_abstract(nnx.Linear, 64, 256, rngs=nnx.Rngs(0))
    own = abstract.shard(Mesh(np.array(jax.devices()[:4]), ("data",)), {"kernel": P("data"), "bias": P()})
    quantized = abstract.quantize("int8", inputs=(jnp.ones((1, 64)),)).shard(devices, {".*": P()})
    live = own.materialize()
    with lm.SyncServer(live) as server:
        sync = lm.SyncClient(server.address, quantized)
        server.publish(live)
        sampling = sync.pull(into=quantized.materialize())
        expected = lm.Sync(own, quantized)(live, into=quantized.materialize())
        assert same(nnx.state(sampling), nnx.state(expected))
        floats = own.shard(devices, {".*": P()})
        into = floats.materialize()
        assert lm.SyncClient(server.address, floats).pull(into=into) is into
        assert same(nnx.state(into), nnx.state(live))


def test_versions(trainer: Any, server: Any) -> None:
    """A pull takes one version, the newest; what is taken stays until it is there."""
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    sync = lm.SyncClient(server.address, sampler, max_device_memory=2)  # a group for each variable
    assert sync.num_groups > 3
    with pytest.raises(lm.SyncError, match="has published no version within 0.1 seconds; the sampler is as it was"):
        sync.pull(into=sampler.materialize(), wait=0.1)

    def constant(value: float) -> Any:
        return jax.tree.map(lambda array: jnp.full_like(array, value), trainer.materialize())

    done = threading.Event()

    def publish() -> None:
        for version in range(1, 31):
            assert server.publish(constant(version)) == version
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    sampling, seen = sampler.materialize(), list[int]()
    while not done.is_set() or not seen:
        sampling = sync.pull(into=sampling, after=seen[-1] if seen and not done.is_set() else 0)
        seen.append(sync.version)
        assert {float(each) for leaf in jax.tree.leaves(sampling) for each in np.unique(leaf)} == {float(seen[-1])}
    thread.join()
    assert seen == sorted(seen)
    assert sync.pull(into=sampling) is not None and sync.version == 30
    assert list(server._versions) == [30] and not server._taken


def test_two_older_versions(trainer: Any, server: Any) -> None:
    """At most one version is kept beside the newest; then publishing waits, or skips."""
    training = trainer.materialize()
    for version in (1, 2):
        server.publish(training)
        assert server.take(0, None, 1) == version
    assert server.publish(training, wait=False) is None
    threading.Timer(0.3, server.release, [1]).start()
    began = time.monotonic()
    assert server.publish(training) == 4 and time.monotonic() - began > 0.25
    assert sorted(server._versions) == [2, 4]


def test_donated(trainer: Any, server: Any) -> None:
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    training = trainer.materialize()
    server.publish(training)
    step = jax.jit(lambda tree: jax.tree.map(lambda array: array + 1, tree), donate_argnums=0)
    training = step(training)
    with pytest.raises(lm.SyncError, match=r"of version 1 was donated.*copy=True.*the sampler is as it was"):
        lm.SyncClient(server.address, sampler).pull(into=sampler.materialize())
    server.publish(training, copy=True)
    kept = jax.tree.map(np.asarray, training)
    training = step(training)
    assert same(lm.SyncClient(server.address, sampler).pull(into=sampler.materialize()), kept)


def test_who_may_talk(trainer: Any) -> None:
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    with pytest.raises(lm.LazyModelError, match="other machines reach '0.0.0.0:0': pass token="):
        lm.SyncServer(trainer, "0.0.0.0:0")
    with pytest.raises(lm.LazyModelError, match='expected an address as "host:7000", found'):
        lm.SyncServer(trainer, "7000")
    with pytest.raises(lm.SyncError, match="cannot reach a trainer at"):
        lm.SyncClient(free_address(), sampler)
    with lm.SyncServer(trainer, "0.0.0.0:0", token="secret", timeout=0.5) as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(lm.SyncError, match="cannot listen at"):
            lm.SyncServer(trainer, server.address, token="secret")
        for wrong in (None, "other"):
            with pytest.raises(lm.SyncError, match="the token is not the trainer's"):
                lm.SyncClient(address, sampler, token=wrong)
        host, port = address.split(":")
        for line in (b"\n", b"[]\n", b'{"proof": 3}\n', b"x" * 100 + b"\n", b""):  # others get nothing but an error
            with socket.create_connection((host, int(port)), 5) as other:
                other.sendall(line)
                other.shutdown(socket.SHUT_WR)
                said = b"".join(iter(lambda: other.recv(1 << 16), b"")).decode().splitlines()
                assert "variables" not in "".join(said) and set(json.loads(said[0])) == {"nonce"}
        server.publish(trainer.materialize())
        lm.SyncClient(address, sampler, token="secret").pull(into=sampler.materialize())


def test_silence(trainer: Any) -> None:
    """A peer that says nothing is an error in time, on both sides."""
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    silent = pytest.raises(lm.SyncError, match=r"has not answered for 0\.3 seconds")
    with socket.create_server(("127.0.0.1", 0)) as mute, silent:
        lm.SyncClient(f"127.0.0.1:{mute.getsockname()[1]}", sampler, timeout=0.3)
    with lm.SyncServer(trainer, timeout=0.3) as server:
        sync = lm.SyncClient(server.address, sampler)
        server.publish(trainer.materialize())
        assert sync._trainers[0].ask({"do": "take", "after": 0, "exactly": None, "seconds": 1})["version"] == 1
        assert server._taken[1] == 1
        time.sleep(0.6)  # takes a version, and fetches nothing
        assert not server._taken


def test_models_that_do_not_match(trainer: Any, server: Any) -> None:
    with pytest.raises(lm.LazyModelError, match="the trainer has no variable 'head'"):
        lm.SyncClient(server.address, model(SAMPLER, HALF, mesh(jax.devices()[:8], 1, 8), RULES))
    with pytest.raises(lm.LazyModelError, match="expected shape"):
        lm.SyncClient(server.address, model({"norm": (5,)}, FLOAT, mesh(jax.devices()[:8], 1, 8), {}))
    other = model(TRAINER, FLOAT, mesh(jax.devices()[:4], 1, 4), {".*": P(None)})
    with pytest.raises(lm.LazyModelError, match="of the trainer: expected .* as planned, found"):
        server.publish(other.materialize())
    with pytest.raises(lm.LazyModelError, match="the trainer has no array 'embed', which was planned"):
        server.publish({"norm": jnp.zeros(48)})
    assert server.version == 0


def test_requests_that_no_client_makes(trainer: Any, server: Any) -> None:
    """An error answers them, and the trainer goes on."""
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    for request in (
        {"do": "nothing"},
        {},
        {"do": "send", "program": 7, "sources": [], "verify": False},
        {"do": "plan", "exchanges": [[[[0, 0]], [[0, [[], [], "x", []], [], [], []]]]], "sources": ["up"]},
    ):
        sync = lm.SyncClient(server.address, sampler)
        with pytest.raises(lm.SyncError):
            sync._trainers[0].ask(request)
    server.publish(trainer.materialize())
    lm.SyncClient(server.address, sampler).pull(into=sampler.materialize())


def test_a_trainer_that_is_gone(trainer: Any, server: Any) -> None:
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    sync = lm.SyncClient(server.address, sampler)
    server.publish(trainer.materialize())
    sampling = sync.pull(into=sampler.materialize())
    server.close()
    with pytest.raises(lm.SyncError, match="is gone.*the sampler is as it was"):
        sync.pull(into=sampling)
    assert np.asarray(sampling["norm"]).size


def test_without_transfers(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = importlib.import_module("jax.experimental.transfer")
    monkeypatch.delattr(transfer, "start_transfer_server")
    text = (
        f"jax.experimental.transfer, which moves arrays between jobs, does not work with JAX {jax.__version__} on cpu"
    )
    with pytest.raises(lm.SyncError, match=re.escape(text)):
        lm.SyncServer(trainer)


@pytest.mark.parametrize(("trainers", "samplers"), [(1, (1,)), pytest.param(2, (2, 1), marks=pytest.mark.large)])
def test_independent_processes(trainers: int, samplers: tuple[int, ...], tmp_path: Path) -> None:
    """Jobs that share nothing, each of one or more processes."""
    arguments: list[Any] = []
    for job, processes in enumerate((trainers, *samplers)):
        address = free_address()
        role = "sampler" if job else "trainer"
        arguments += [(role, n, processes, address, tmp_path, trainers, len(samplers), job) for n in range(processes)]
    codes = run_workers(WORKER, arguments, tmp_path, patience=100)
    assert codes == [0] * len(arguments), printed(tmp_path, len(arguments))


@pytest.fixture
def started() -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    """Starts a worker; none outlives the test."""
    children: list[subprocess.Popen[str]] = []

    def start(role: str, folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(WORKER), role, "0", "1", "-", str(folder), "1", "1", "1"]
        environment = child_environment() | {"JAX_PLATFORMS": "cpu"}
        children.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def values_of(sampling: Any) -> set[float]:
    return {float(each) for leaf in jax.tree.leaves(sampling) for each in np.unique(leaf)}


@pytest.mark.large
def test_a_trainer_that_is_killed(trainer: Any, started: Any, tmp_path: Path) -> None:
    """The sampler has one version, whole, or an error in time that says that it is to be made again."""
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    lost = 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        child = started("publish", folder)
        while not (folder / "trainer-0").exists():
            time.sleep(0.02)
        donate, sampling, version = bool(number % 2), sampler.materialize(), 0
        with lm.SyncClient((folder / "trainer-0").read_text(), sampler, max_device_memory=2, timeout=5) as sync:
            killer = threading.Timer(random.Random(number).uniform(0, 0.2), child.kill)
            killer.start()
            with pytest.raises(lm.SyncError) as caught:  # noqa: PT012
                while True:
                    sampling = sync.pull(into=sampling, donate=donate)
                    version = sync.version
            child.wait()
        if "materialize it again" in str(caught.value):
            assert donate and any(leaf.is_deleted() for leaf in jax.tree.leaves(sampling))
            lost += 1
        elif version:
            assert values_of(sampling) == {float(version)}
    assert lost < 20


@pytest.mark.large
def test_samplers_that_are_killed(trainer: Any, server: Any, started: Any, tmp_path: Path) -> None:
    """The trainer goes on, keeps nothing for them, and others get what they ask for."""
    (tmp_path / "trainer-0").write_text(server.address)
    live = trainer.materialize()
    for number in range(20):
        child = started("pull", tmp_path)
        began, wait = time.monotonic(), random.Random(number).uniform(2, 6)
        while time.monotonic() - began < wait:
            version = server.publish(jax.tree.map(lambda array: jnp.full_like(array, server.version + 1), live))
        child.kill()
        child.wait()
    sampler = model(TRAINER, FLOAT, mesh(jax.devices()[:8], 1, 8), {})
    with lm.SyncClient(server.address, sampler) as sync:
        assert values_of(sync.pull(into=sampler.materialize())) == {float(version)}
    time.sleep(0.5)
    assert list(server._versions) == [version] and not server._taken and not server._open
