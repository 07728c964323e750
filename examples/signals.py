"""Does the signal of an initialization survive the depth of the real model? Four schemes, forward and backward.

    python examples/signals.py [figure.png] [--full] [--layers N] [--seeds N] [--memory 6GiB]

A decoder of Gemma 2's form, from KerasHub, on random tokens; its loss is the cross-entropy of the next token. For each
scheme: root mean square of the residual stream after each block, of the loss's gradient with respect to it, and of the
gradients of the weights. Without options the model is small. With `--full` it has the size of Gemma 2 9B, 17 GiB in
bfloat16, and it is never there: a block's weights are drawn when they are needed, and again in the backward pass.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

import lazymodel as lm

SMALL = {
    "vocabulary_size": 512, "num_layers": 8, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 64,
    "intermediate_dim": 512, "head_dim": 16,
}  # fmt: skip
FULL = {
    "vocabulary_size": 256000, "num_layers": 42, "num_query_heads": 16, "num_key_value_heads": 8, "hidden_dim": 3584,
    "intermediate_dim": 28672, "head_dim": 256,
}  # fmt: skip
GEMMA2 = {
    "query_head_dim_normalize": True, "use_post_ffw_norm": True, "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50, "final_logit_soft_cap": 30, "use_sliding_window_attention": True,
    "sliding_window_size": 4096,
}  # fmt: skip
KERNELS, RESIDUAL = r"decoder_block_{layer}/.*kernel", r"decoder_block_{layer}/.*(attention_output|ffw_linear)/kernel"
BLOCK, LINEAR = "decoder_block_{layer}", "decoder_block_{layer}/ffw_linear/kernel"


def schemes(layers: int, width: int) -> dict:
    small = lm.initializers.small_init(width, weights=KERNELS, residual=RESIDUAL, layers=layers)
    return {
        "Keras' own, Glorot uniform": None,
        "GPT-2, std 0.02": lm.initializers.gpt2(layers, weights=KERNELS, residual=RESIDUAL),
        "small init": small,
        "zero residual outputs": lm.initializers.zero_residual(RESIDUAL),
    }


def loss(model: keras.Model, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of the next token, from the embedding's transpose as Gemma computes it."""
    hidden = model({"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)})
    logits = model.token_embedding(hidden, reverse=True).astype("float32")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("figure", nargs="?", default="")
    parser.add_argument("--full", action="store_true", help="the size of Gemma 2 9B, in bfloat16")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    parser.add_argument("--seeds", type=int, help="draw the initial values so many times")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", help="limit of memory for the model, such as 6GiB")
    given = parser.parse_args()
    config = (FULL if given.full else SMALL) | GEMMA2
    layers = given.layers or config["num_layers"]
    config["num_layers"] = layers
    dtype = "bfloat16" if given.full else "float32"
    abstract = lm.build_abstract(keras_hub.models.GemmaBackbone, **config, dtype=dtype)
    print(f"{abstract.num_parameters:,} parameters, {layers} blocks")
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config["vocabulary_size"], (1, given.tokens)), "int32")

    found = {}
    for name, scheme in schemes(layers, config["hidden_dim"]).items():
        model = abstract if scheme is None else abstract.reinitialize(scheme, key=0)
        found[name] = lm.signals(
            model, loss, tokens, gradients=True, seeds=given.seeds, max_device_memory=given.memory, progress=given.full
        )
        print(f"\n{name}: loss {np.median(found[name].value):.2f}")
        rows = {"stream": ("activations", BLOCK), "gradient": ("gradients", BLOCK), "weights": ("variables", LINEAR)}
        for label, (kind, line) in rows.items():
            depth = {layer: np.median(each) for layer, each in found[name].over_depth("rms", kind)[line].items()}
            chosen = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
            print(f"  {label:10}", *(f"block {layer}: {depth[layer]:.2e}" for layer in chosen), sep="  ")
    if given.figure:
        draw({name: each.over_depth for name, each in found.items()}, given.figure)


def draw(found: dict, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = {
        "residual stream, rms": ("activations", BLOCK),
        "its gradient, rms": ("gradients", BLOCK),
        "gradient of ffw_linear, rms": ("variables", LINEAR),
    }
    for axes, (title, (kind, line)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name, over_depth in found.items():
            depth = over_depth("rms", kind)[line]
            axes.plot(list(depth), [np.median(each) for each in depth.values()], label=name)
        axes.set(title=title, xlabel="block", yscale="log")
    figure.axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
