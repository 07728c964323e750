"""A fleet that reads once: what is read, exchanged and held, and how long it takes.

Run as `python tests/benchmarks/fleet.py [GIB | small] [PROCESSES]`; it needs nine times the model's memory. `small` has
the shapes of SmolLM2-135M in bfloat16.

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

DEVICES = 2  # of a process
VARIABLES = 32
SMALL = {
    "q": (576, 576),
    "k": (192, 576),
    "v": (192, 576),
    "o": (576, 576),
    "gate": (1536, 576),
    "up": (1536, 576),
    "down": (576, 1536),
    "norm_1": (576,),
    "norm_2": (576,),
}
GROUP = 64 << 20  # bytes of a device: a few groups even for a small model


def environment(devices: int) -> dict[str, str]:
    # What is freed goes back at once: malloc's pools would keep XLA's buffers, which says nothing of what is in use.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    return os.environ | _measure.repository() | _measure.virtual_devices(devices) | malloc


def abstract(size: str) -> Any:
    """Kernels for first- and last-axis shards, and replicated ones."""
    import jax.numpy as jnp

    import lazymodel as lm

    if size == "small":
        shapes = {"embedding": (49152, 576)}
        shapes |= {f"layer_{n}/{name}": shape for n in range(30) for name, shape in SMALL.items()}
        return lm.build_abstract(lambda: {path: jnp.zeros(shape, jnp.bfloat16) for path, shape in shapes.items()})
    columns = 4096
    rows = int(float(size) * 2**30) // VARIABLES // (4 * columns) // 64 * 64
    return lm.build_abstract(lambda: {f"layer_{n}/kernel": jnp.zeros((rows, columns)) for n in range(VARIABLES)})


def rules() -> dict[str, Any]:
    from jax.sharding import PartitionSpec as P

    rows, columns = r"layer_\d*[02468]/kernel|embedding|.*/(q|k|v|gate|up)", r"layer_\d*[13579]/kernel|.*/(o|down)"
    return {rows: P("model"), columns: P(None, "model"), ".*": P()}


def write(gib: str, path: Path) -> None:
    import lazymodel as lm

    lm.save(abstract(gib).materialize(), path)


def load(process: int, processes: int, address: str, path: str, gib: str, replicas: str) -> None:
    """One process."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import lazymodel as lm
    from lazymodel._tensors import shards

    shards.GROUP = GROUP
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, process)
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
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


def fleet(gib: str, processes: int, folder: Path) -> None:
    """Prints the figures."""
    path = folder / "model.safetensors"
    subprocess.run([sys.executable, __file__, "write", gib, str(path)], check=True, env=environment(1))
    size = path.stat().st_size
    print(f"{processes} processes × {DEVICES} devices, mesh (data={processes}, model=2), file {size / 2**30:.2f} GiB")
    with ObjectServer(folder) as server:
        run_fleet(gib, processes, str(path), size, "read")
        run_fleet(gib, processes, str(path), size, "exchange")
        run_fleet(gib, processes, server.url(path.name), size, "exchange")
        print(f"  the server sent {server.counters()['bytes'] / size:.3f} × the file")


def run_fleet(gib: str, processes: int, path: str, size: int, replicas: str) -> None:
    """One way of it, of a file or a URL."""
    command = [sys.executable, __file__, "load", str(processes), free_address(), path, gib, replicas]
    started = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, env=environment(DEVICES)) for n in range(processes)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    read = sum(each["read"] for each in found) / size
    group = GROUP * DEVICES
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
            write(gib, Path(path))
        case ["load", processes, address, path, gib, replicas, process]:
            load(int(process), int(processes), address, path, gib, replicas)
        case given:
            with tempfile.TemporaryDirectory() as folder:
                fleet(given[0] if given else "1", int(given[1]) if given[1:] else 4, Path(folder))


if __name__ == "__main__":
    main()
