"""One of the processes of `test_jobs`: of a trainer with 4 devices, or of a sampler with 8.

Run as `python _job_worker.py ROLE PROCESS PROCESSES ADDRESS FOLDER TRAINERS SAMPLERS JOB`. Its exit code is not 0 if
something is wrong.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join

RULES = {"embed": P("model"), "head": P(None, "model"), "up": P(None, None, "model"), "layers/.*": P("model")}
VERSIONS = 3


def said(path: Path, text: str | None = None) -> str:
    """Writes a file at once, or waits for one."""
    if text is not None:
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)
        return text
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


def train(folder: Path, process: int, samplers: int) -> None:
    from tests.extras.sync.test_sync import FLOAT, TRAINER, mesh, model, numbers  # which begins to use devices

    abstract = model(TRAINER, FLOAT, mesh(jax.devices(), 4, 1), {".*": P("data")})
    with lm.SyncServer(abstract, token="secret") as server:
        said(folder / f"trainer-{process}", server.address)
        for version in range(1, VERSIONS + 1):
            assert server.publish(abstract.materialize(numbers(abstract, version))) == version
            for sampler in range(1, samplers + 1):
                said(folder / f"pulled-{version}-{sampler}")


def sample(folder: Path, trainers: int, number: str, leads: bool) -> None:
    from tests.extras.sync.test_sync import FLOAT, HALF, MAPPING, SAMPLER, TRAINER, mesh, model, numbers

    devices = jax.devices()
    sampler = model(SAMPLER, HALF, mesh(devices, 2, len(devices) // 2), RULES)
    own = model(TRAINER, FLOAT, mesh(devices, len(devices), 1), {".*": P("data")})
    within = lm.Sync(own, sampler, MAPPING)
    addresses = [said(folder / f"trainer-{n}") for n in range(trainers)]
    sync = lm.SyncClient(addresses, sampler, MAPPING, token="secret", verify=True)
    sampling = sampler.materialize()
    for version in range(1, VERSIONS + 1):
        sampling = sync.pull(into=sampling, after=version - 1)
        assert sync.version == version
        expected = within(own.materialize(numbers(own, version)), into=sampler.materialize())
        for a, b in zip(jax.tree.leaves(sampling), jax.tree.leaves(expected), strict=True):
            for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
        if leads:
            said(folder / f"pulled-{version}-{number}", "")


def publish(folder: Path) -> None:
    """Publishes versions, all of whose values are their numbers, until it is killed."""
    from tests.extras.sync.test_sync import FLOAT, TRAINER, mesh, model

    abstract = model(TRAINER, FLOAT, mesh(jax.devices(), 4, 1), {".*": P("data")})
    live = abstract.materialize()
    server = lm.SyncServer(abstract, timeout=5)
    server.publish(jax.tree.map(lambda array: jax.numpy.full_like(array, 1), live))
    said(folder / "trainer-0", server.address)
    while True:
        server.publish(jax.tree.map(lambda array: jax.numpy.full_like(array, server.version + 1), live))


def pull(folder: Path) -> None:
    """Pulls until it is killed."""
    from tests.extras.sync.test_sync import FLOAT, TRAINER, mesh, model

    sampler = model(TRAINER, FLOAT, mesh(jax.devices(), 1, 8), {})
    sampling = sampler.materialize()
    sync = lm.SyncClient(said(folder / "trainer-0"), sampler, max_device_memory=2)
    while True:
        sampling = sync.pull(into=sampling)


if __name__ == "__main__":
    role, process, processes, address, folder, trainers, samplers, job = sys.argv[1:]
    devices = (4 if role in ("trainer", "publish") else 8) // int(processes)
    if int(processes) > 1:
        join(int(process), int(processes), address, devices)
    else:
        jax.config.update("jax_num_cpu_devices", devices)
    if role == "trainer":
        train(Path(folder), int(process), int(samplers))
    elif role in ("publish", "pull"):
        {"publish": publish, "pull": pull}[role](Path(folder))
    else:
        sample(Path(folder), int(trainers), job, process == "0")
