"""A policy is trained on one mesh and sampled on another: policy gradients on eight virtual devices.

    python examples/trainer_and_sampler.py [--steps 30]

The trainer is float32 with a list of layers, on four devices; the sampler is bfloat16 with stacked layers and fused
names, on the other four. After every step `lm.Sync` moves the weights. The task: write tokens of one half of the
vocabulary; the mean reward is their share, and rises from about a half to almost 1.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, where there is no accelerator
VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 32, 64, 2, 8, 64


def init_trainer(key: jax.Array) -> dict:
    normal = jax.nn.initializers.normal(0.1)
    tokens, *layers = jax.random.split(key, 1 + LAYERS)

    def layer(key: jax.Array) -> dict:
        up, down = jax.random.split(key)
        return {"up": normal(up, (WIDTH, 4 * WIDTH)), "down": normal(down, (4 * WIDTH, WIDTH))}

    return {"tokens": normal(tokens, (VOCABULARY, WIDTH)), "layers": [layer(key) for key in layers]}


def init_sampler() -> dict:
    shapes = {"embed": (VOCABULARY, WIDTH), "w_in": (LAYERS, WIDTH, 4 * WIDTH), "w_out": (LAYERS, 4 * WIDTH, WIDTH)}
    return {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in shapes.items()}


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ up) @ down


def log_probabilities(model: dict, tokens: jax.Array) -> jax.Array:
    x = model["tokens"][tokens]
    for layer in model["layers"]:
        x = block(x, layer["up"], layer["down"])
    return jax.nn.log_softmax(x @ model["tokens"].T)


@jax.jit
def sample(model: dict, key: jax.Array) -> jax.Array:
    """Tokens, each from the one before it."""

    def step(token: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = model["embed"][token]
        x, _ = jax.lax.scan(lambda x, pair: (block(x, *pair), None), x, (model["w_in"], model["w_out"]))
        token = jax.random.categorical(key, (x @ model["embed"].T).astype(jnp.float32))
        return token, token

    start = jnp.zeros(BATCH, jnp.int32)
    return jnp.concatenate([start[None], jax.lax.scan(step, start, jax.random.split(key, LENGTH))[1]]).T


@jax.jit
def train(model: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
    rewards = (tokens[:, 1:] < VOCABULARY // 2).astype(jnp.float32)  # of each token

    def loss(model: dict) -> jax.Array:
        chosen = jnp.take_along_axis(log_probabilities(model, tokens[:, :-1]), tokens[:, 1:, None], -1)[..., 0]
        return -((rewards - rewards.mean()) * chosen).mean()

    gradients = jax.grad(loss)(model)
    return jax.tree.map(lambda w, g: w - 0.5 * g, model, gradients), rewards.mean()


def main(steps: int) -> None:
    devices = np.array(jax.devices())
    half = len(devices) // 2
    training = Mesh(devices[:half].reshape(2, -1), ("data", "model"))
    sampling = Mesh(devices[half:], ("model",))
    rules = {"tokens": P("data", "model"), ".*/up": P("data", "model"), ".*/down": P("model", "data")}
    trainer = lm.build_abstract(init_trainer, jax.random.key(0)).shard(training, rules)
    rules = {"embed": P("model"), "w_in": P(None, None, "model"), "w_out": P(None, "model")}
    sampler = lm.build_abstract(init_sampler).shard(sampling, rules)
    names = lm.WeightMap(
        {
            "embed": "tokens",
            "w_in": lm.From("layers/{layer}/up").stack("layer"),
            "w_out": lm.From("layers/{layer}/down").stack("layer"),
        }
    )
    sync = lm.Sync(trainer, sampler, names)
    print(sync)
    policy, actor = trainer.materialize(), sampler.materialize()
    for step in range(steps):
        actor = sync(policy, into=actor)
        tokens = np.asarray(sample(actor, jax.random.key(step)))
        policy, reward = train(policy, tokens)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: mean reward {reward:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    main(parser.parse_args().steps)
