"""Does the best learning rate of a small model stay the best as the model grows? Standard parametrization and muP.

    python examples/mup.py [figure.svg]

Two small transformers, one in Flax NNX with tied embeddings and heads that grow, one in Keras with as many more heads,
at five widths. For each: a coordinate check, then a sweep of learning rates. Nothing in the models knows of muP but the
two scalars of the first, which its code multiplies attention and logits by. About four minutes of processor time.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import lazymodel as lm

BASE, WIDTHS, RATES = 32, (32, 64, 128, 256, 512), [2.0**power for power in range(-10, -3)]
LAYERS, HEADS, VOCABULARY, LENGTH, BATCH, STEPS = 2, 4, 32, 16, 8, 40


# Two models, which return their activations by name -------------------------------------------------------------------


class Block(nnx.Module):
    """Attention with `HEADS` heads of any size, then a feed-forward layer."""

    def __init__(self, width: int, attention_scale: float, rngs: nnx.Rngs) -> None:
        self.attention_scale = attention_scale
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.query, self.key, self.value, self.out = (
            nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(4)
        )
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        q, k, v = (part(y).reshape(*y.shape[:2], HEADS, -1) for part in (self.query, self.key, self.value))
        x = x + self.out(
            jax.nn.dot_product_attention(q, k, v, scale=self.attention_scale, is_causal=True).reshape(x.shape)
        )
        return x + self.down(jax.nn.relu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """A decoder whose embedding is its readout too."""

    def __init__(self, width: int, attention_scale: float, output_multiplier: float, rngs: nnx.Rngs) -> None:
        self.output_multiplier = output_multiplier
        normal = jax.nn.initializers.normal(0.1)
        self.embed = nnx.Embed(VOCABULARY, width, embedding_init=normal, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List([Block(width, attention_scale, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> dict[str, jax.Array]:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        found = {"embedding": x}
        for number, block in enumerate(self.blocks):
            x = found[f"block {number}"] = block(x)
        return found | {"logits": self.embed.attend(self.norm(x)) * self.output_multiplier}


def keras_transformer(width: int) -> keras.Model:
    """A decoder with its own readout and heads of one size, so that its code has nothing to multiply."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    normal = keras.initializers.RandomNormal(stddev=0.1, seed=0)
    x = keras.layers.Embedding(VOCABULARY, width, embeddings_initializer=normal, name="token_embedding")(tokens)
    found = {}
    for number in range(LAYERS):
        y = keras.layers.RMSNormalization(name=f"block_{number}_norm")(x)
        attention = keras.layers.MultiHeadAttention(width // 8, 8, name=f"block_{number}_attention")
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.RMSNormalization(name=f"block_{number}_mlp_norm")(x)
        y = keras.layers.Dense(2 * width, activation="relu", name=f"block_{number}_up")(y)
        x = found[f"block {number}"] = x + keras.layers.Dense(width, name=f"block_{number}_down")(y)
    x = keras.layers.RMSNormalization(name="final_norm")(x)
    logits = keras.layers.Dense(VOCABULARY, use_bias=False, name="logits")(x)
    return keras.Model(tokens, found | {"logits": logits}, name="decoder")


def with_nnx(width: int, use_mup: bool) -> tuple[Any, Callable, lm.Mup | None]:
    """Parameters, what is called with them and tokens, and the muP that they follow."""

    def abstract(width: int, *scalars: float) -> lm.AbstractModel:
        return lm.build_abstract(Transformer, width, *scalars, rngs=nnx.Rngs(0))

    model, scheme = abstract(width, (width // HEADS) ** -0.5, 1.0), None
    if use_mup:
        scheme = lm.mup(abstract(BASE, 1.0, 1.0), model, head_dim=(BASE // HEADS, width // HEADS))
        model = abstract(width, scheme.attention_scale, scheme.output_multiplier).reinitialize(scheme)
    graph, parameters = nnx.split(model.materialize())
    return parameters, lambda parameters, tokens: nnx.merge(graph, parameters)(tokens), scheme


def with_keras(width: int, use_mup: bool) -> tuple[Any, Callable, lm.Mup | None]:
    abstract = lm.build_abstract(keras_transformer, width)
    scheme = lm.mup(lm.build_abstract(keras_transformer, BASE), abstract) if use_mup else None
    model = (abstract.reinitialize(scheme) if scheme else abstract).materialize()
    paths = [variable.path for variable in model.trainable_variables]

    def call(parameters: Any, tokens: jax.Array) -> Any:
        others = [variable.value for variable in model.non_trainable_variables]
        return model.stateless_call([parameters[path] for path in paths], others, tokens)[0]

    return {variable.path: variable.value for variable in model.trainable_variables}, call, scheme


# What they are trained for --------------------------------------------------------------------------------------------


def batches(seed: int, count: int) -> jax.Array:
    """Sequences in which each token follows from the two before it, by a table: (count, batch, length)."""
    random = np.random.default_rng(7)
    table = random.integers(VOCABULARY, size=(4, VOCABULARY))
    tokens = np.random.default_rng(seed).integers(VOCABULARY, size=(count, BATCH, LENGTH + 1))
    for place in range(2, LENGTH + 1):
        tokens[..., place] = table[tokens[..., place - 2] % 4, tokens[..., place - 1]]
    return jnp.asarray(tokens)


class Trainer:
    """Adam on a model of one width; its step is compiled once."""

    def __init__(self, parameters: Any, call: Callable, scheme: lm.Mup | None) -> None:
        adam = optax.scale_by_adam()
        self.tx = scheme.optimizer(adam) if scheme else adam
        self.call, self.start = call, (parameters, self.tx.init(parameters))
        self.step = jax.jit(self._step)

    def _step(self, parameters: Any, state: Any, rate: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array, Any]:
        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            found = self.call(parameters, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(found["logits"], tokens[:, 1:]).mean(), found

        (value, found), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, state = self.tx.update(gradients, state, parameters)
        return jax.tree.map(lambda p, u: p - rate * u, parameters, updates), state, value, found

    def loss(self, rate: float) -> float:
        """What it ends with: the mean of the last quarter of the steps."""
        (parameters, state), losses = self.start, []
        for tokens in batches(2, STEPS):
            parameters, state, value, _ = self.step(parameters, state, rate, tokens)
            losses.append(value)
        return float(np.nan_to_num(np.mean(losses[-max(STEPS // 4, 1) :]), nan=np.inf))


def check(trainers: dict[int, Trainer]) -> lm.CoordinateCheck:
    """The sizes of activations on one batch."""
    (tokens,) = batches(1, 1)

    def step(model: tuple) -> tuple:
        trainer, parameters, state = model
        parameters, state, _, found = trainer.step(parameters, state, 2.0**-7, tokens)
        return (trainer, parameters, state), found

    return lm.coordinate_check(lambda width: (trainers[width], *trainers[width].start), WIDTHS, step, steps=3)


def main(figure_path: str) -> None:
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    panels = figure.subplots(2, 4, sharey="row").T
    kinds = [(name, make, use_mup) for name, make in MODELS.items() for use_mup in (False, True)]
    for (name, make, use_mup), (above, below) in zip(kinds, panels, strict=True):
        title = f"{name}, {'muP' if use_mup else 'standard'}"
        trainers = {width: Trainer(*make(width, use_mup)) for width in WIDTHS}
        checked = check(trainers)
        found = {width: [trainer.loss(rate) for rate in RATES] for width, trainer in trainers.items()}
        best = [RATES[int(np.argmin(losses))] for losses in found.values()]
        print(f"\n{title}: the best learning rates are {', '.join(f'2^{np.log2(rate):g}' for rate in best)}; ", end="")
        print(f"the largest is {max(best) / min(best):g} times the smallest\n{checked}")
        for label, rows in checked.changes.items():
            above.loglog(WIDTHS, [rows[width][-1] for width in WIDTHS], ".-", label=label)
        for number, (width, losses) in enumerate(found.items()):
            below.semilogx(RATES, losses, ".-", base=2, color=(0.1, 0.35, 0.9 - 0.18 * number), label=f"{width} wide")
        above.set_title(title)
        above.set_xlabel("width")
        below.set_xlabel("learning rate")
    panels[0][0].set_ylabel("change in 3 steps")
    panels[0][1].set_ylabel("loss")
    for axes in panels[0]:
        axes.legend(fontsize="small")
    figure.savefig(figure_path)
    print(f"\nThe figure is in {figure_path}.")


MODELS = {"NNX": with_nnx, "Keras": with_keras}

if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_suffix(".svg")))
