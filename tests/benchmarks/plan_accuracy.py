"""The peak that a plan predicts while materializing, against the measured one, for models of different kinds.

    python tests/benchmarks/plan_accuracy.py [--json] [--only NAME]

Each model in a process of its own, on 8 virtual CPU devices whose memory together is the process's private memory. The
prediction is the plan's for this host, made before anything is compiled or allocated; what is measured is the peak of
private memory over what the process held when `materialize` was called, its init programs compiled by then.

A program's temporaries are predicted as the compiler lays them out. Where these outweigh the model (a large vocabulary
in bfloat16 above a few layers, initialized) the prediction is an upper bound: eight virtual devices on fewer cores take
turns, and have not all touched the last of their pages at once.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import _measure

# glibc raises the size from which it gives freed memory back at once with every such block that is freed, up to 32 MiB,
# so that temporaries would stay with the process and be measured as in use.
PROMPT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
BACKED = 3 << 30  # bytes that each process touches before it is measured

DECODER = _measure.decoder(64000, 8, 8, 8, 1024, 8192, head_dim=128)
MOE = _measure.decoder(32000, 4, 8, 8, 1024, 2048, num_experts=8, top_k=2)
VOCABULARY, WIDTH, INNER, LAYERS = 64000, 1024, 4096, 16  # of the BERT


def decoder_initialized(folder: Path, num_layers: int = 40) -> Any:
    """A KerasHub decoder in bfloat16, all of it initialized."""
    import keras_hub

    import lazymodel as lm

    config = DECODER | {"num_layers": num_layers}
    return lm.build_abstract(keras_hub.models.GemmaBackbone, **config, dtype="bfloat16"), None


def vocabulary_initialized(folder: Path) -> Any:
    """The same with few layers: initializing its vocabulary takes more memory than all of the model."""
    return decoder_initialized(folder, num_layers=8)


def decoder_loaded(folder: Path) -> Any:
    """The same in float32 from a preset with HDF5 weights."""
    import keras_hub

    import lazymodel_keras as lk

    if not (folder / "config.json").exists():
        _measure.save_gemma(folder, DECODER)
        return None
    return lk.abstract_from_preset(keras_hub.models.GemmaBackbone, str(folder)), None


def mixture_of_experts(folder: Path) -> Any:
    """A Mixtral in float32, initialized: experts in one large variable a layer."""
    import keras_hub

    import lazymodel as lm

    return lm.build_abstract(keras_hub.models.MixtralBackbone, **MOE), None


def flax_nnx(folder: Path) -> Any:
    """A Flax NNX stack of blocks in float32, initialized."""
    from flax import nnx

    import lazymodel as lm

    class Block(nnx.Module):
        def __init__(self, width: int, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(64000, 1024, rngs=rngs)
            self.blocks = nnx.List([Block(1024, rngs) for _ in range(16)])

    return lm.build_abstract(Model, rngs=nnx.Rngs(0)), None


def bert_safetensors(folder: Path) -> Any:
    """A plain pytree of a BERT's shapes in bfloat16, from a safetensors file in float32."""
    import jax.numpy as jnp
    import numpy as np

    import lazymodel as lm

    shapes: dict[str, tuple[int, ...]] = {"embeddings/word": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"layer.{layer}/{name}/kernel": (WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
        shapes |= {f"layer.{layer}/up/kernel": (WIDTH, INNER), f"layer.{layer}/down/kernel": (INNER, WIDTH)}
    file = folder / "model.safetensors"
    if not file.exists():
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        save_file({name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}, file)
        return None
    abstract = lm.build_abstract(lambda: {n: jnp.zeros(s, jnp.bfloat16) for n, s in shapes.items()})
    return abstract, lm.open_checkpoint(file)


def orthogonal(folder: Path) -> Any:
    """Square matrices, each of which one device factorizes whole."""
    import jax

    import lazymodel as lm

    make = jax.nn.initializers.orthogonal()
    return lm.build_abstract(
        lambda key: {str(i): make(jax.random.fold_in(key, i), (2048, 2048)) for i in range(3)}, jax.random.key(0)
    ), None


def convolutions(folder: Path) -> Any:
    """Kernels of convolutions in float32, initialized."""
    import jax

    import lazymodel as lm

    make = jax.nn.initializers.lecun_normal()
    return lm.build_abstract(
        lambda key: {str(i): make(jax.random.fold_in(key, i), (3, 3, 512, 1024)) for i in range(16)}, jax.random.key(0)
    ), None


def rule(variable: Any) -> Any:
    """The first dimension that divides, over all devices: the plan is what is tested here, not the sharding."""
    from jax.sharding import PartitionSpec

    for dimension, size in enumerate(variable.shape):
        if size % 8 == 0 and variable.nbytes >= 1 << 16:
            return PartitionSpec(*(None,) * dimension, "model")
    return PartitionSpec()


MODELS = {
    "decoder, initialized": decoder_initialized,
    "mostly vocabulary": vocabulary_initialized,
    "decoder, HDF5 preset": decoder_loaded,
    "mixture of experts": mixture_of_experts,
    "Flax NNX": flax_nnx,
    "BERT, safetensors": bert_safetensors,
    "orthogonal": orthogonal,
    "convolutions": convolutions,
}


def child(name: str, folder: str) -> dict[str, Any] | None:
    import jax
    import numpy as np

    made = MODELS[name](Path(folder))
    if made is None:  # its files are written; another process reads them
        return None
    model, checkpoint = made
    abstract = model.shard(jax.sharding.Mesh(np.asarray(jax.devices()), ("model",)), rule)
    _measure.backend()
    plan = abstract.plan(checkpoint)
    (host,) = plan.hosts
    _measure.back_memory(BACKED)
    with _measure.measured() as report:
        abstract.materialize(checkpoint, progress=False)
    return report | {"predicted": host.peak_nbytes, "held": host.device_nbytes}


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__)
    parser.add_argument("--only", choices=MODELS)
    options = parser.parse_args()
    if not options.json:
        print(f"{'model':22} {'held':>9} {'predicted':>10} {'measured':>10} {'ratio':>6}   MiB on 8 devices together")
    for name in MODELS if options.only is None else [options.only]:
        with tempfile.TemporaryDirectory() as folder:
            if name in ("decoder, HDF5 preset", "BERT, safetensors"):
                _measure.child(name, folder, devices=1)
            m = _measure.child(name, folder, env=PROMPT_MALLOC)
        row = {"model": name, **m.result, "measured": m.peak_nbytes, "ratio": m.result["predicted"] / m.peak_nbytes}
        if options.json:
            print(json.dumps(row))
        else:
            held, predicted, found = (round(row[key] / 2**20) for key in ("held", "predicted", "measured"))
            print(f"{name:22} {held:9,} {predicted:10,} {found:10,} {row['ratio']:6.3f}", flush=True)


if __name__ == "__main__":
    main()
