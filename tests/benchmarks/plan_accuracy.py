"""The peak that a plan predicts while materializing, against the measured one, for models of different kinds.

    python tests/benchmarks/plan_accuracy.py [--json] [--only NAME]
    python tests/benchmarks/plan_accuracy.py --topology v5e-8 [--json] [--only NAME]

Each model in a process of its own, on 8 virtual CPU devices whose memory together is the process's private memory. The
prediction is the plan's for this host, made before anything is compiled or allocated; what is measured is the peak of
private memory over what the process held when `materialize` was called, its init programs compiled by then.

A program's temporaries are predicted as the compiler lays them out. Where these outweigh the model (a large vocabulary
in bfloat16 above a few layers, initialized) the prediction is an upper bound: eight virtual devices on fewer cores take
turns, and have not all touched the last of their pages at once.

With a topology: the bytes of a device by arithmetic, against those of the TPU compiler (libtpu). The parameters are the
arguments of a program that takes them; the peak is that of the init programs. Of the parameters, `padding` fills up
tiles. `whole` is the part of the predicted peak beyond the parameters, for initial values that cannot be split. `load`
is the peak if a checkpoint has everything: the compiler's is the parameters and what its program that joins the chunks
of the largest variable needs, if that is larger than the stream's budget.
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


def mobilenet(folder: Path) -> Any:
    import keras

    import lazymodel as lm

    return lm.build_abstract(keras.applications.MobileNetV3Large, weights=None), None


def densenet(folder: Path) -> Any:
    import keras

    import lazymodel as lm

    return lm.build_abstract(keras.applications.DenseNet121, weights=None), None


def drawn(shapes: dict[str, tuple[tuple[int, ...], str]]) -> Any:
    """A pytree of random numbers."""
    import jax

    import lazymodel as lm

    def init(key: Any) -> Any:
        keys = {name: jax.random.fold_in(key, place) for place, name in enumerate(shapes)}
        made = {name: jax.random.normal(keys[name], shape) for name, (shape, _) in shapes.items()}
        return {name: value.astype(shapes[name][1]) for name, value in made.items()}

    return lm.build_abstract(init, jax.random.key(0)), None


def recommender(folder: Path) -> Any:
    tables = {f"table{place}": ((1_000_000, 10), "float32") for place in range(26)}
    return drawn(tables | {"top/0": ((512, 256), "float32"), "top/1": ((256, 1), "float32")})


def voxels(folder: Path) -> Any:
    widths = [1, 8, 16, 32, 64, 64, 32, 16, 8, 3]
    return drawn({f"{n}": ((3, 3, 3, *widths[n : n + 2]), "float32") for n in range(len(widths) - 1)})


def int4(folder: Path) -> Any:
    return drawn({"weights": ((48, 2048, 8192), "int4"), "scales": ((48, 2048, 64), "bfloat16")})


def vectors(folder: Path) -> Any:
    return drawn({f"{n}": ((64 + n % 33,), "float32") for n in range(400)} | {"head": ((96, 1000), "float32")})


def heads_of_80(folder: Path) -> Any:
    import keras_hub

    import lazymodel as lm

    config = DECODER | {"num_layers": 4, "head_dim": 80}
    return lm.build_abstract(keras_hub.models.GemmaBackbone, **config, dtype="bfloat16"), None


def three_key_value_heads(folder: Path) -> Any:
    import keras_hub

    import lazymodel as lm

    config = _measure.decoder(49152, 4, 9, 3, 576, 1536)
    return lm.build_abstract(keras_hub.models.LlamaBackbone, **config, dtype="bfloat16"), None


def divided_by_norms(folder: Path) -> Any:
    import jax
    import jax.numpy as jnp

    import lazymodel as lm

    def init(key: Any) -> Any:
        drawn = [jax.random.normal(jax.random.fold_in(key, layer), (4096, 8192)) for layer in range(4)]
        return [each / jnp.linalg.norm(each) for each in drawn]

    return lm.build_abstract(init, jax.random.key(0)), None


def large_tables(folder: Path) -> Any:
    """Each of its tables is larger than the stream's budget."""
    return drawn({f"table{place}": ((320_000, 8192), "bfloat16") for place in range(2)})


ON_TPUS = {
    "MobileNetV3": mobilenet,
    "DenseNet": densenet,
    "recommender": recommender,
    "voxels": voxels,
    "int4": int4,
    "vectors": vectors,
    "heads of 80": heads_of_80,
    "3 key/value heads": three_key_value_heads,
    "Flax NNX": flax_nnx,
    "mixture of experts": mixture_of_experts,
    "divided by norms": divided_by_norms,
    "large tables": large_tables,
}


def on_tpus(name: str, topology: str) -> dict[str, Any]:
    """Bytes of the most loaded device, by arithmetic and by the compiler."""
    import jax

    import lazymodel as lm
    from lazymodel._materialize import stream
    from lazymodel._tensors.buffers import DEFAULT_BUDGET

    (model, _), mesh = ON_TPUS[name](Path()), lm.topology(topology)
    abstract = model.shard(mesh, lm.auto() if mesh.size > 1 else lambda _: jax.sharding.PartitionSpec())
    structs = {path: variable.struct for path, variable in abstract.items()}
    taken = jax.jit(lambda tree: 0, keep_unused=True).lower(structs).compile().memory_analysis()
    plan, init = abstract.plan(), abstract.plan(compile=lm.Compile("init"))
    largest = max(abstract.values(), key=lambda variable: variable.shard_nbytes)
    joining = 0
    if (nbytes := largest.shard_nbytes) > DEFAULT_BUDGET:
        place = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
        shape = largest.sharding.shard_shape(largest.shape)
        buffer = jax.ShapeDtypeStruct(shape, largest.dtype, sharding=place)
        rows = max(stream.CHUNK * shape[0] // nbytes, 1)
        chunk = jax.ShapeDtypeStruct((rows, *shape[1:]), largest.dtype, sharding=place)
        corner = [jax.ShapeDtypeStruct((), "int32", sharding=place)] * len(shape)
        used = stream.update.lower(buffer, chunk, corner, stream.TILE).compile().memory_analysis()
        joining = used.argument_size_in_bytes - used.alias_size_in_bytes + used.temp_size_in_bytes
    return {
        "parameters": plan.device_nbytes,
        "padding": sum(row.padding_nbytes for row in plan.rows),
        "compiled": taken.argument_size_in_bytes,
        "peak": plan.peak_nbytes,
        "whole": plan.peak_nbytes - plan.device_nbytes,
        "compiled_peak": init.peak_nbytes,
        "load": plan.device_nbytes,
        "compiled_load": taken.argument_size_in_bytes + joining,
    }


def compare_on_tpus(topology: str, only: str | None, *, as_json: bool) -> None:
    if not as_json:
        print(
            "MiB of a device     parameters   padding  plan/compiler   peak   whole  plan/compiler  load  plan/compiler"
        )
    for name in ON_TPUS if only is None else [only]:
        row = _measure.child(name, topology, devices=1).result
        ratios = [row[mine] / row[its] for mine, its in PAIRS]
        if as_json:
            print(json.dumps({"model": name, **row, "ratios": ratios}), flush=True)
            continue
        mib = {key: row[key] / 2**20 for key in row}
        print(
            f"{name:19} {mib['parameters']:10.2f} {mib['padding']:9.2f} {ratios[0]:14.3f} {mib['peak']:8.1f} "
            f"{mib['whole']:7.1f} {ratios[1]:13.3f} {mib['load']:7.1f} {ratios[2]:13.3f}",
            flush=True,
        )


PAIRS = (("parameters", "compiled"), ("peak", "compiled_peak"), ("load", "compiled_load"))


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

    if name in ON_TPUS and not Path(folder).is_dir():
        return on_tpus(name, folder)
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
    parser.add_argument("--only", choices=MODELS | ON_TPUS)
    parser.add_argument("--topology", help="compare with the TPU compiler for it, such as v5e-8")
    options = parser.parse_args()
    if options.topology:
        compare_on_tpus(options.topology, options.only, as_json=options.json)
        return
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
