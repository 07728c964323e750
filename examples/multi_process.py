"""Several processes, one model: each reads only its own shards, and they save it together.

    python examples/multi_process.py                                    # two processes of four CPU devices each, here
    python examples/multi_process.py --folder /shared/f --address host0:1234 --processes 2 --process 0    # one of two
    python examples/multi_process.py --folder /shared/f --cluster                        # where JAX finds the others
    python examples/multi_process.py --folder s3://bucket/folder --cluster               # or gs://, az://

The code of `work` is the same in every process, and the same as with one: `materialize` and `save` touch only devices
of their own process, and where one fails, all do. The folder is one that every process sees, or a bucket's: what comes
from there is read once, and exchanged between the devices.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

PROCESSES, DEVICES = 2, 4  # of the run on one machine
VOCABULARY, WIDTH, LAYERS = 8192, 256, 8

# A pattern for every variable: columns of what widens, rows of what narrows. Norms are whole on every device.
RULES = {"tokens": P("model"), "layers/.*/up": P(None, "model"), "layers/.*/down": P("model"), ".*/norm": P()}


def init(key: jax.Array) -> dict:
    normal = jax.nn.initializers.normal(0.02)
    tokens, *layers = jax.random.split(key, 1 + 2 * LAYERS)
    return {
        "tokens": normal(tokens, (VOCABULARY, WIDTH)),
        "layers": [
            {
                "norm": jnp.ones((WIDTH,)),
                "up": normal(up, (WIDTH, 4 * WIDTH)),
                "down": normal(down, (4 * WIDTH, WIDTH)),
            }
            for up, down in zip(layers[::2], layers[1::2], strict=True)
        ],
    }


@jax.jit
def logits(model: dict, tokens: jax.Array) -> jax.Array:
    x = model["tokens"][tokens]
    for layer in model["layers"]:
        normed = layer["norm"] * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(normed @ layer["up"]) @ layer["down"]
    return x @ model["tokens"].T


def work(folder: str) -> None:
    process, processes = jax.process_index(), jax.process_count()

    def say(text: str) -> None:
        sys.stdout.write(f"[process {process}] {text}\n")  # at once, so that lines of several processes do not mix
        sys.stdout.flush()

    abstract = lm.build_abstract(init, jax.random.key(0))
    along_model = abstract.shard(Mesh(np.array(jax.devices()), ("model",)), RULES)

    # The first time there is no checkpoint: every process makes its part of the values, and writes it.
    first = along_model.materialize(progress=False)
    lm.save(first, f"{folder}/checkpoint", max_shard_size="10MB", overwrite=True, progress=False)

    # From now on it is read. The report of each process is about its own devices.
    reports: list[lm.LoadReport] = []
    model = along_model.materialize(lm.open_checkpoint(f"{folder}/checkpoint"), progress=False, report=reports.append)
    say(f"read {reports[0].read_nbytes / 2**20:.1f} MiB of {abstract.nbytes / 2**20:.1f} MiB for its own shards")

    # Where processes hold the same, one of them can read it for all: here all devices hold all of it.
    everywhere = abstract.shard(Mesh(np.array(jax.devices()), ("data",)), {".*": P()})
    everywhere.materialize(
        lm.open_checkpoint(f"{folder}/checkpoint"), replicas="exchange", progress=False, report=reports.append
    )
    say(f"read {reports[1].read_nbytes / 2**20:.1f} MiB and exchanged {reports[1].exchanged_nbytes / 2**20:.1f} MiB")

    # Another arrangement of the same devices: the values come from the same files, and give the same answer.
    mesh = Mesh(np.array(jax.devices()).reshape(processes, -1), ("data", "model"))
    arranged = abstract.shard(mesh, RULES).materialize(lm.open_checkpoint(f"{folder}/checkpoint"), progress=False)
    tokens = np.arange(16) * 31 % VOCABULARY
    answers = [multihost_utils.process_allgather(logits(each, tokens), tiled=True) for each in (model, arranged)]
    np.testing.assert_allclose(*answers, atol=1e-5)
    say(f"two meshes agree on {answers[0].shape[0]} × {answers[0].shape[1]} logits")

    # A file that one process cannot read is an error in all of them, and nobody waits for ever.
    checkpoint = lm.open_checkpoint(f"{folder}/checkpoint")
    damaged = {**checkpoint, "tokens": checkpoint["tokens"][:-1]} if process == processes - 1 else checkpoint
    try:
        along_model.materialize(damaged, progress=False)
    except lm.CheckpointError as error:
        say(f"refused, as everywhere: {str(error).splitlines()[0]}")


def launch(folder: str) -> int:
    """Starts the processes on this machine; in real life, a scheduler does, one for each host."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--folder", folder, "--address", address, "--processes", str(PROCESSES)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    started = [subprocess.Popen([*command, "--process", str(process)], env=environment) for process in range(PROCESSES)]
    return max(abs(process.wait()) for process in started)


def main() -> int:
    parser = argparse.ArgumentParser(description="Load one model in several processes.")
    parser.add_argument("--folder", help="a folder that all processes see, or a bucket's")
    parser.add_argument("--address", help="host and port of process 0")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which of them this is")
    parser.add_argument("--cluster", action="store_true", help="let JAX find the others (TPU slices, Slurm, …)")
    arguments = parser.parse_args()
    if not arguments.cluster and arguments.address is None:
        with tempfile.TemporaryDirectory() as temporary:
            return launch(arguments.folder or temporary)
    if arguments.folder is None:
        parser.error("--folder is needed where several processes are started by hand")
    if arguments.cluster:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(arguments.address, arguments.processes, arguments.process)
    work(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
