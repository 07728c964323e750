"""A fleet that reads once: what is read, exchanged and held, and how long it takes.

Run as `python tests/benchmarks/fleet.py [GIB]`, of the model; it needs nine times as much memory.

Four processes of two CPU devices, mesh (data=4, model=2), from a file with and without an exchange, and from a server
on this machine with one: bytes that all of them read together against the file, private memory of the most loaded
beyond its arrays, in units of a group, and seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _measure

from tests.private_memory import Peak
from tests.processes import free_address
from tests.servers.object_server import ObjectServer

PROCESSES, DEVICES = 4, 8
VARIABLES = 32
GROUP = 64 << 20  # bytes of a device: a few groups even for a small model


def environment(devices: int) -> dict[str, str]:
    # What is freed goes back at once: malloc's pools would keep XLA's buffers, which says nothing of what is in use.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    return os.environ | _measure.repository() | _measure.virtual_devices(devices) | malloc


def abstract(gib: float) -> Any:
    """Kernels for first- and last-axis shards, and replicated ones."""
    import jax.numpy as jnp

    import lazymodel as lm

    columns = 4096
    rows = int(gib * 2**30) // VARIABLES // (4 * columns) // 64 * 64
    return lm.build_abstract(lambda: {f"layer_{n}/kernel": jnp.zeros((rows, columns)) for n in range(VARIABLES)})


def rules() -> dict[str, Any]:
    from jax.sharding import PartitionSpec as P

    return {r"layer_\d*[02468]/kernel": P("model"), r"layer_\d*[13579]/kernel": P(None, "model")}


def write(gib: float, path: Path) -> None:
    import lazymodel as lm

    lm.save(abstract(gib).materialize(), path)


def load(process: int, address: str, path: str, gib: float, replicas: str) -> None:
    """One process."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import lazymodel as lm
    from lazymodel._tensors import shards

    shards.GROUP = GROUP
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharded = abstract(gib).shard(mesh, rules())
    reports: list[lm.LoadReport] = []
    with Peak() as peak:
        model = sharded.materialize(
            lm.open_checkpoint(path), replicas=replicas, max_host_memory="64MiB", report=reports.append
        )
    shards = [shard.data for array in model.values() for shard in array.addressable_shards]
    held = sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())
    report = reports[0]
    found = {"read": report.read_nbytes, "exchanged": report.exchanged_nbytes, "held": held}
    print(json.dumps(found | {"peak": peak.nbytes, "seconds": report.seconds}))


def fleet(gib: float, folder: Path) -> None:
    """Prints the figures."""
    path = folder / "model.safetensors"
    subprocess.run([sys.executable, __file__, "write", str(gib), str(path)], check=True, env=environment(1))
    size = path.stat().st_size
    print(
        f"{PROCESSES} processes × {DEVICES // PROCESSES} devices, mesh (data=4, model=2), file {size / 2**30:.2f} GiB"
    )
    with ObjectServer(folder) as server:
        run_fleet(gib, str(path), size, "read")
        run_fleet(gib, str(path), size, "exchange")
        run_fleet(gib, server.url(path.name), size, "exchange")
        print(f"  the server sent {server.counters()['bytes'] / size:.3f} × the file")


def run_fleet(gib: float, path: str, size: int, replicas: str) -> None:
    """One way of it, of a file or a URL."""
    command = [sys.executable, __file__, "load", free_address(), path, str(gib), replicas]
    started = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, env=environment(DEVICES // PROCESSES))
        for n in range(PROCESSES)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    read = sum(each["read"] for each in found) / size
    group = GROUP * DEVICES // PROCESSES
    held, peak = found[0]["held"], max(each["peak"] for each in found)
    way = f"{'URL' if '://' in path else 'file'}, {replicas}"
    print(
        f"  {way:14}: {read:.3f} × the file read, {found[0]['exchanged'] / 2**20:,.0f} MiB exchanged each; "
        f"arrays {held / 2**20:,.0f} MiB and a group {group / 2**20:.0f} MiB a process, peak {peak / 2**20:,.0f} "
        f"MiB, {peak / (held + group):.3f} × both; {max(each['seconds'] for each in found):.2f} s"
    )


def main() -> None:
    match sys.argv[1:]:
        case ["write", gib, path]:
            write(float(gib), Path(path))
        case ["load", address, path, gib, replicas, process]:
            load(int(process), address, path, float(gib), replicas)
        case given:
            with tempfile.TemporaryDirectory() as folder:
                fleet(float(given[0]) if given else 1.0, Path(folder))


if __name__ == "__main__":
    main()
