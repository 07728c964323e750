"""The recipes of docs/many_processes.md on real schedulers, with four processes of two CPU devices on this machine.

    python tests/clusters/run.py slurm|mpi|hand|ray [...]

Each runs `examples/multi_process.py`, which loads, exchanges and saves, and then `killed.py`, in which one process is
killed. It fails unless all processes of the first end well, and those that are left of the second report an error.

- slurm: a controller and two nodes on this host, as root. Debian: `apt-get install slurm-wlm munge`. Their names are
  written into /etc/hosts.
- mpi: `apt-get install openmpi-bin`.
- ray: `pip install ray`; four actors.
- hand: an address and numbers, without a scheduler.

They take minutes and change the machine, so they are no part of the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE, KILLED = ROOT / "examples/multi_process.py", Path(__file__).with_name("killed.py")
PROCESSES = 4
SECONDS = 400  # for one job; a process that was killed is noticed after a minute
NODES = "lazymodel-node1", "lazymodel-node2"

CONFIGURATION = """
ClusterName=lazymodel
SlurmctldHost={host}
SlurmctldPort=16817
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser=root
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={first} NodeHostname={host} NodeAddr=127.0.0.1 Port=17001 CPUs={cpus} State=UNKNOWN
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port=17002 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={first},{second} Default=YES OverSubscribe=FORCE:8 State=UP
"""


def environment() -> dict[str, str]:
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return {**os.environ, **devices, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run(command: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command, and what it printed, which is printed as well."""
    result = subprocess.run(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    sys.stdout.write(result.stdout)
    return result.returncode, result.stdout


def check(name: str, code: int, text: str, *, least: int = 1) -> None:
    """Raises if the example did not run, or too few reported the process that was killed."""
    reports = text.count("reported: ")
    if name == "killed":
        assert code and least <= reports < PROCESSES, f"exit code {code}, {reports} reports"
    else:
        assert not code and text.count("agree on") == PROCESSES, f"exit code {code}"


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[None]:
    """A controller and two nodes on this host, until the end of the block."""
    hosts = Path("/etc/hosts")
    if NODES[0] not in hosts.read_text():
        hosts.write_text(f"{hosts.read_text()}127.0.0.1 {' '.join(NODES)}\n")
    file = folder / "slurm.conf"
    given = {"host": socket.gethostname(), "folder": folder, "cpus": os.cpu_count(), "first": NODES[0]}
    file.write_text(CONFIGURATION.format(**given, second=NODES[1]))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    os.environ["SLURM_CONF"] = str(file)
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", "munged", "--force"], check=True)
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    with contextlib.ExitStack() as started:
        for number, command in enumerate(commands):
            log = started.enter_context((folder / f"log-{number}").open("w"))
            daemon = subprocess.Popen(command, stdout=log, stderr=log)
            started.callback(daemon.wait)
            started.callback(daemon.terminate)
        for _ in range(60):
            states = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True).stdout.split()
            if states == ["idle"] * len(NODES):
                break
            time.sleep(1)
        else:
            raise SystemExit("\n".join((folder / f"log-{number}").read_text() for number in range(len(commands))))
        yield


def slurm(folder: Path) -> None:
    with slurm_cluster(folder):
        start = ["srun", "--nodes=2", "--ntasks-per-node=2", "--overcommit", "--kill-on-bad-exit=0"]
        check("example", *run([*start, sys.executable, str(EXAMPLE), "--cluster", "--folder", str(folder / "data")]))
        check("killed", *run([*start, sys.executable, str(KILLED), str(folder / "data")]))


def mpi(folder: Path) -> None:
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(PROCESSES)]
    check("example", *run([*start, sys.executable, str(EXAMPLE), "--cluster", "--folder", str(folder / "data")]))
    # mpirun ends all processes at once if one is killed.
    check("killed", *run([*start, sys.executable, str(KILLED), str(folder / "data")]), least=0)


def hand(folder: Path) -> None:
    for name in ("example", "killed"):
        address, codes = free_address(), list[int]()
        given = [[str(folder), address, str(PROCESSES), str(number)] for number in range(PROCESSES)]
        if name == "example":
            names = ("--folder", "--address", "--processes", "--process")
            given = [[part for pair in zip(names, each, strict=True) for part in pair] for each in given]
        script = str(EXAMPLE if name == "example" else KILLED)
        log = folder / f"{name}.txt"
        with log.open("w") as file:
            started = [
                subprocess.Popen([sys.executable, script, *each], env=environment(), stdout=file, stderr=file)
                for each in given
            ]
            codes = [process.wait(SECONDS) for process in started]
        sys.stdout.write(log.read_text())
        check(name, max(map(abs, codes)), log.read_text())


def ray(folder: Path) -> None:
    import importlib

    package: Any = importlib.import_module("ray")
    package.init(
        num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment()}
    )

    class Host:
        def run(self, script: str, arguments: list[str]) -> tuple[int, str]:
            result = subprocess.run(
                [sys.executable, script, *arguments], capture_output=True, text=True, timeout=SECONDS
            )
            return result.returncode, result.stdout + result.stderr

        def load(self, address: str, process: int) -> int:
            """As the page has it: in the actor itself."""
            import jax

            jax.distributed.initialize(address, PROCESSES, process)
            import jax.numpy as jnp
            import numpy as np

            import lazymodel as lm

            mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
            spec = jax.sharding.PartitionSpec("model")
            abstract = lm.build_abstract(lambda: {"w": jnp.ones((1024, 256))}).shard(mesh, {"w": spec})
            lm.save(abstract.materialize(), f"{folder}/ray", overwrite=True)
            self.model = abstract.materialize(lm.open_checkpoint(f"{folder}/ray"))
            return sum(shard.data.nbytes for shard in self.model["w"].addressable_shards)

    make: Any = package.remote(num_cpus=1)(Host)
    hosts = [make.remote() for _ in range(PROCESSES)]
    address = free_address()
    held = package.get([host.load.remote(address, number) for number, host in enumerate(hosts)], timeout=SECONDS)
    sys.stdout.write(f"held bytes: {held}\n")
    assert held == [1024 * 256 * 4 // PROCESSES] * PROCESSES
    address = free_address()
    arguments = [[str(folder), address, str(PROCESSES), str(number)] for number in range(PROCESSES)]
    found = package.get([host.run.remote(str(KILLED), each) for host, each in zip(hosts, arguments, strict=True)])
    text = "".join(text for _, text in found)
    sys.stdout.write(text)
    check("killed", max(abs(code) for code, _ in found), text)
    package.shutdown()


def main() -> None:
    ways = {"slurm": slurm, "mpi": mpi, "hand": hand, "ray": ray}
    for name in sys.argv[1:] or ways:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            ways[name](Path(folder))
        sys.stdout.write(f"{name}: passed in {time.monotonic() - start:.0f} s\n")


if __name__ == "__main__":
    main()
