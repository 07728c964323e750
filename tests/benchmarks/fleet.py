"""A fleet that reads once, and a live model that moves: what is read, exchanged, held, and how long it takes.

Run as `python tests/benchmarks/fleet.py [GIB]`, of the model; it needs nine times as much memory for the first figure.

1. Four processes of two CPU devices, mesh (data=4, model=2), from a file with and without an exchange, and from a
   server on this machine with one: bytes that all of them read
   together against the file, private memory of the most loaded beyond its arrays, in units of a group, and seconds.
2. `reshard` between (8, 1), (2, 4) and four of eight devices, with and without donation: peak of private memory against
   the model, and seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure

from tests.private_memory import Peak, private_nbytes
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
    """One process of the first figure."""
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
    """Prints the first figure."""
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


PLACES = {"(8, 1)": ((8, 1), ("data",)), "(2, 4)": ((2, 4), ("data", "model")), "4 devices": ((1, 4), (None, "model"))}
MOVES = (("(8, 1)", "(2, 4)"), ("(2, 4)", "(8, 1)"), ("(8, 1)", "4 devices"), ("4 devices", "(8, 1)"))


def move(gib: float, before: str, after: str, donate: bool) -> None:
    """One move of the second figure."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import lazymodel as lm

    models: dict[str, Any] = {}
    for name in (before, after):
        shape, spec = PLACES[name]
        mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "model"))
        models[name] = abstract(gib).shard(mesh, {".*": P(*spec)})
    nbytes = models[before].nbytes
    values = np.random.default_rng(0).standard_normal(next(iter(models[before].values())).shape, np.float32)
    base = private_nbytes()
    model = jax.block_until_ready(models[before].materialize(dict.fromkeys(models[before], values), progress=False))
    reports: list[lm.ReshardReport] = []
    with Peak() as peak:
        start = time.perf_counter()
        moved = lm.reshard(
            model, models[after], donate=donate, max_device_memory=GROUP, report=reports.append, progress=False
        )
        seconds = time.perf_counter() - start
    for array in moved.values():
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data).view(np.int32), values[shard.index].view(np.int32))
    most = max(reports[0].held_nbytes)
    print(
        f"  {before:>9} → {after:9} {'donated' if donate else 'kept':7}: peak {(peak.most - base) / nbytes:.2f} × the "
        f"model in this process; most loaded device {reports[0].peak_nbytes / most:.2f} × the more it holds before or "
        f"after; {reports[0].num_groups} groups, {seconds:.2f} s"
    )


def moves(gib: float) -> None:
    """Prints the second figure."""
    print(f"reshard of {gib:.2f} GiB, {VARIABLES} variables, groups of at most {GROUP >> 20} MiB a device")
    for donate in ("", "donate"):
        for before, after in MOVES:
            command = [sys.executable, __file__, "move", str(gib), before, after, donate]
            subprocess.run(command, check=True, env=environment(DEVICES))


def main() -> None:
    if len(sys.argv) > 2:
        what, *rest = sys.argv[1:]
        if what == "write":
            write(float(rest[0]), Path(rest[1]))
        elif what == "load":
            load(int(rest[4]), rest[0], rest[1], float(rest[2]), rest[3])
        else:
            move(float(rest[0]), rest[1], rest[2], bool(rest[3]))
        return
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as folder:
        fleet(gib, Path(folder))
    moves(gib)


if __name__ == "__main__":
    main()
