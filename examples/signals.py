"""Does the signal of an initialization survive the depth of the real model? Four schemes, forward and backward.

    python examples/signals.py [figure.png] [--model small] [--layers N] [--seeds N] [--memory 6GiB]

A decoder from KerasHub on random tokens; its loss is the cross-entropy of the next token. For each scheme: root mean
square of the residual stream after each block, of the loss's gradient with respect to it, and of the gradients of the
weights. `small` and `gemma2_9b` have the form of Gemma 2, which normalizes what a block adds to the stream, and
`llama3_70b` has the form of Llama 3, which does not. The large ones, 17 and 131 GiB in bfloat16, are never there: a
block's weights are drawn when they are needed, and again in the backward pass.
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

GEMMA2 = {
    "query_head_dim_normalize": True, "use_post_ffw_norm": True, "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50, "final_logit_soft_cap": 30, "use_sliding_window_attention": True,
    "sliding_window_size": 4096,
}  # fmt: skip
GEMMA = (keras_hub.models.GemmaBackbone, "decoder_block_{layer}", "(attention_output|ffw_linear)", "ffw_linear")
LLAMA = (
    keras_hub.models.Llama3Backbone, "transformer_layer_{layer}", "(attention_output|feedforward_output_dense)",
    "feedforward_output_dense",
)  # fmt: skip
# Class, name of a block, its kernels that add to the residual stream, and the kernel whose gradient is shown; sizes.
MODELS = {
    "small": (*GEMMA, GEMMA2 | {
        "vocabulary_size": 512, "num_layers": 8, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 64,
        "intermediate_dim": 512, "head_dim": 16,
    }),
    "gemma2_9b": (*GEMMA, GEMMA2 | {
        "vocabulary_size": 256000, "num_layers": 42, "num_query_heads": 16, "num_key_value_heads": 8,
        "hidden_dim": 3584, "intermediate_dim": 28672, "head_dim": 256,
    }),
    "llama3_70b": (*LLAMA, {
        "vocabulary_size": 128256, "num_layers": 80, "num_query_heads": 64, "num_key_value_heads": 8,
        "hidden_dim": 8192, "intermediate_dim": 28672, "rope_max_wavelength": 500000,
    }),
}  # fmt: skip


def schemes(kernels: str, residual: str, layers: int, width: int) -> dict:
    return {
        "Keras' own": None,
        "GPT-2, std 0.02": lm.initializers.gpt2(layers, weights=kernels, residual=residual),
        "small init": lm.initializers.small_init(width, weights=kernels, residual=residual, layers=layers),
        "zero residual outputs": lm.initializers.zero_residual(residual),
    }


def loss(model: keras.Model, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of the next token; logits are from the embedding's transpose."""
    hidden = model({"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)})
    logits = model.token_embedding(hidden, reverse=True).astype("float32")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("figure", nargs="?", default="")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layers", type=int, help="another number of blocks, such as the first ones of a large model")
    parser.add_argument("--seeds", type=int, help="draw the initial values so many times")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", help="limit of memory for the model, such as 6GiB")
    given = parser.parse_args()
    cls, block, residual, linear, config = MODELS[given.model]
    large = given.model != "small"
    depth = config["num_layers"]  # of the whole model, which scales its residual outputs
    layers = given.layers or depth
    abstract = lm.build_abstract(cls, **config | {"num_layers": layers}, dtype="bfloat16" if large else "float32")
    kernels, residual, linear = (f"{block}/{rest}/kernel" for rest in (".*", f".*{residual}", linear))
    lines = {
        "residual stream": ("activations", block),
        "its gradient": ("gradients", block),
        "gradient of weights": ("variables", linear),
    }
    print(f"{abstract.num_parameters:,} parameters, {layers} blocks")
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config["vocabulary_size"], (1, given.tokens)), "int32")

    found = {}
    for name, scheme in schemes(kernels, residual, depth, config["hidden_dim"]).items():
        model = abstract if scheme is None else abstract.reinitialize(scheme, key=0)
        measured = lm.signals(
            model, loss, tokens, gradients=True, seeds=given.seeds, max_device_memory=given.memory, progress=large
        )
        found[name] = {label: measured.over_depth("rms", kind)[line] for label, (kind, line) in lines.items()}
        print(f"\n{name}: loss {np.median(measured.value):.2f}")
        for label, values in found[name].items():
            chosen = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
            print(f"  {label:20}", *(f"block {layer}: {np.median(values[layer]):.2e}" for layer in chosen), sep="  ")
    if given.figure:
        draw(found, given.figure)


def draw(found: dict, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for number, axes in enumerate(figure.subplots(1, 3)):
        for name, lines in found.items():
            label, values = list(lines.items())[number]
            axes.plot(list(values), [np.median(each) for each in values.values()], label=name)
        axes.set(title=f"{label}, rms", xlabel="block", yscale="log")
    figure.axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
