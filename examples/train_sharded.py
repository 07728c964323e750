"""Train a model whose parameters and Adam state are born sharded: never whole on one device, and nothing copied twice.

    python examples/train_sharded.py

A small decoder in Flax NNX learns to continue counting sequences. Where there is no accelerator, eight virtual CPU
devices stand in for one. `build_abstract` → `with_optimizer` → `shard` → `materialize` gives a module and an
`nnx.Optimizer` that are ready for an ordinary training step; every moment lies where its parameter does.
"""

import os
from pathlib import Path

if not any(Path("/dev").glob("accel*")) and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH, STEPS = 64, 64, 4, 16, 32, 30


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, WIDTH, decode=False, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.tokens.attend(self.norm(x))


# Heads and feed-forward units are split over `model`. Moments follow their parameters, so no rule is about them.
RULES = {
    r"(tokens|positions)/embedding": P(None, "model"),
    r".*/attention/(query|key|value)/kernel": P(None, "model"),
    r".*/attention/out/kernel": P("model"),
    r".*/up/kernel": P(None, "model"),
    r".*/down/kernel": P("model"),
}


def batches(seed: int):
    """Sequences that count up in steps of 1 to 3, modulo the vocabulary."""
    random = np.random.default_rng(seed)
    while True:
        start, step = random.integers(0, VOCABULARY, (BATCH, 1)), random.integers(1, 4, (BATCH, 1))
        yield (start + step * np.arange(LENGTH + 1)) % VOCABULARY


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, -1) if len(devices) % 2 == 0 else devices.reshape(1, -1), ("batch", "model"))
    print(f"{len(devices)} × {devices[0].device_kind}, mesh {dict(mesh.shape)}\n")

    abstract = lm.build_abstract(Decoder, rngs=nnx.Rngs(0)).with_optimizer(optax.adamw(3e-3))
    abstract = abstract.shard(mesh, RULES)
    print(abstract.plan().check())

    model, optimizer = abstract.materialize(progress=False)
    kernel = model.layers[0].up.kernel.get_value()
    moment = optimizer.opt_state[0].mu["layers"][0]["up"]["kernel"].get_value()
    print(f"\nlayers/0/up/kernel {kernel.sharding.spec}, its first moment {moment.sharding.spec}\n")

    losses = []
    for step, tokens in zip(range(STEPS), batches(0), strict=False):
        loss = train_step(model, optimizer, jax.device_put(tokens, NamedSharding(mesh, P("batch"))))
        losses.append(float(loss))
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    moment = optimizer.opt_state[0].mu["layers"][0]["up"]["kernel"].get_value()
    print(f"\nThe first moment is still {moment.sharding.spec} after {int(optimizer.step[...])} steps.")


if __name__ == "__main__":
    main()
