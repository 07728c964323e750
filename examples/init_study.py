"""How should a deep model be initialized? Three schemes, measured over depth.

    python examples/init_study.py [figure.png] [--full [SIZE]]

One abstract decoder of 24 layers without norms, three initializations of it by rules. For each: statistics of the
weights, computed where their shards are, and how the residual stream and its gradient grow from layer to layer. With
`--full` the decoder is 5376 wide, 21 GiB, or of the size that is given, and it is never there: each variable is
initialized, measured and dropped.
"""

import argparse
import os
from pathlib import Path

if not any(Path("/dev").glob("accel*")) and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import lazymodel as lm

LAYERS, SIZE = 24, 256
KERNELS, RESIDUAL = r"layers/{layer}/(up|down)", r"layers/{layer}/down"

lecun = jax.nn.initializers.lecun_normal()
SCHEMES = {
    "the same in every layer": {KERNELS: lecun},
    "residual outputs / √(layers)": {RESIDUAL: lm.initializers.depth_scaled(lecun, LAYERS, branches=1), KERNELS: lecun},
    "zero residual outputs (Fixup)": lm.initializers.fixup(LAYERS, weights=KERNELS, residual=RESIDUAL),
}


def init(key: jax.Array, size: int = SIZE) -> dict:
    """Residual blocks; every kernel is initialized alike, which the schemes then change."""
    keys = jax.random.split(key, (LAYERS, 2))
    shapes = {"up": (size, 4 * size), "down": (4 * size, size)}
    return {
        "layers": [
            {name: lecun(key, shape) for key, (name, shape) in zip(row, shapes.items(), strict=True)} for row in keys
        ]
    }


def apply(model: dict, x: jax.Array, nudges: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loss and the stream's deviation after each layer; nudges, zeros, are added to the stream before each."""
    deviations = []
    for layer, nudge in zip(model["layers"], nudges, strict=True):
        x = x + nudge
        x = x + jnp.sqrt(2.0) * jax.nn.relu(x @ layer["up"]) @ layer["down"]
        deviations.append(x.std())
    return jnp.mean(x * jnp.cos(jnp.arange(x.size).reshape(x.shape))), jnp.stack(deviations)


def full(size: int) -> None:
    """The same question of a model that may be larger than the machine, of its weights alone."""
    abstract = lm.build_abstract(init, jax.random.key(0), size)
    for name, scheme in SCHEMES.items():
        found = lm.statistics(abstract.reinitialize(scheme, key=jax.random.key(0)))
        norms = found.over_depth("spectral_norm")["layers/{layer}/down"]
        print(f"\n{name}: the norm of down kernels is {norms[0]:.3g} to {norms[LAYERS - 1]:.3g}\n{found}")


def main(figure_path: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("model",))
    rules = {r".*/up": P(None, "model"), r".*/down": P("model")}
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh, rules)
    x, nudges = jax.random.normal(jax.random.key(1), (64, SIZE)), jnp.zeros((LAYERS, 64, SIZE))
    measure = jax.jit(jax.value_and_grad(apply, argnums=2, has_aux=True))

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    titles = ("std of down kernels", "std of the stream", "gradient at a layer")
    panels = dict(zip(titles, figure.subplots(1, 3), strict=True))
    for name, scheme in SCHEMES.items():
        model = abstract.reinitialize(scheme, key=jax.random.key(0)).materialize()
        found = lm.statistics(model)
        (_, deviations), gradient = measure(model, x, nudges)
        sizes = jnp.linalg.norm(gradient, axis=(1, 2))
        print(f"\n{name}: the stream's deviation grows from 1 to {deviations[-1]:.3g}, ", end="")
        print(f"the gradient by {sizes[0] / sizes[-1]:.3g} on its way back\n{found}")
        lines = (list(found.over_depth("std")["layers/{layer}/down"].values()), deviations, sizes / sizes[-1])
        for axes, line in zip(panels.values(), lines, strict=True):
            axes.plot(np.arange(LAYERS), np.asarray(line), label=name)
    for title, axes in panels.items():
        axes.set_title(title)
        axes.set_xlabel("layer")
        if title != titles[0]:
            axes.set_yscale("log")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SCHEMES))
    figure.savefig(figure_path, dpi=80)
    print(f"\nThe figure is in {figure_path}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("figure", nargs="?", default=str(Path(__file__).with_suffix(".png")))
    parser.add_argument("--full", nargs="?", type=int, const=5376, metavar="SIZE")
    arguments = parser.parse_args()
    main(arguments.figure) if arguments.full is None else full(arguments.full)
