"""A trainer and a sampler as two programs: each on its own virtual devices, joined by `lm.SyncServer` and `SyncClient`.

    python examples/two_jobs.py                              # runs both
    python examples/two_jobs.py train 127.0.0.1:7000         # or each in a terminal of its own
    python examples/two_jobs.py sample 127.0.0.1:7000

The trainer fits a function on four devices, float32, a list of layers. The sampler, bfloat16 and stacked on two
devices, takes the newest weights whenever it has answered, and prints its error, which falls.
"""

import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

WIDTH, LAYERS, STEPS = 64, 3, 300


def init_trainer(key: jax.Array) -> dict:
    keys = jax.random.split(key, LAYERS)
    return {"layers": [jax.random.normal(each, (WIDTH, WIDTH)) / WIDTH**0.5 for each in keys]}


def init_sampler() -> dict:
    return {"stacked": jnp.zeros((LAYERS, WIDTH, WIDTH), jnp.bfloat16)}


def answer(layers: jax.Array | list[jax.Array], x: jax.Array) -> jax.Array:
    for weights in layers:
        x = x + jnp.tanh(x @ weights)
    return x


def wanted(x: jax.Array) -> jax.Array:
    return jnp.roll(x, 1, axis=-1) + x**2 / 4


def train(address: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    trainer = lm.build_abstract(init_trainer, jax.random.key(0))
    trainer = trainer.shard(Mesh(np.array(jax.devices()), ("data",)), {".*": P("data")})
    training = trainer.materialize()

    @jax.jit
    def step(training: dict, x: jax.Array) -> dict:
        def loss(model: dict) -> jax.Array:
            return ((answer(model["layers"], x) - wanted(x)) ** 2).mean()

        return jax.tree.map(lambda value, gradient: value - 0.3 * gradient, training, jax.grad(loss)(training))

    with lm.SyncServer(trainer, address) as server:
        for key in jax.random.split(jax.random.key(1), STEPS):
            training = step(training, jax.random.normal(key, (256, WIDTH)))
            server.publish(training, wait=False)
            time.sleep(0.01)  # real steps take longer
        server.publish(training)
        time.sleep(2)  # in which samplers take the last version


def sample(address: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    sampler = lm.build_abstract(init_sampler)
    sampler = sampler.shard(Mesh(np.array(jax.devices()), ("model",)), {".*": P(None, None, "model")})
    table = lm.WeightMap({"stacked": lm.From("layers/{layer}").stack("layer")})
    while True:
        try:
            sync = lm.SyncClient(address, sampler, table)
            break
        except lm.SyncError:  # the trainer has not started yet
            time.sleep(0.2)
    sampling, x, shown = sampler.materialize(), jax.random.normal(jax.random.key(2), (64, WIDTH)), -50
    while sync.version < STEPS + 1:
        sampling = sync.pull(into=sampling, after=sync.version)
        error = jnp.abs(answer(sampling["stacked"], x) - wanted(x)).mean()
        if sync.version >= shown + 50:
            shown = sync.version
            print(f"version {shown}: error {error:.3f}", flush=True)
        time.sleep(0.02)
    print(f"version {sync.version}, the last: error {error:.3f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        {"train": train, "sample": sample}[sys.argv[1]](sys.argv[2])
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        jobs = [subprocess.Popen([sys.executable, __file__, role, address]) for role in ("train", "sample")]
        sys.exit(max(job.wait() for job in jobs))
