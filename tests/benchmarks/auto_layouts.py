"""Bytes that devices send each other with `lm.auto()`, against the rules that the models' authors published.

    python tests/benchmarks/auto_layouts.py [--json] [--only NAME] [--mesh 2x4] [--tokens 8x128] [--pins]
        [--programs forward,training,decoding] [--rules auto,largest] [--tpu] [--collectives]

Forward pass, a step of training and one of decoding (one token a row, without a cache) of small models of real
proportions are compiled for 8 virtual CPU devices, with --tpu for 8 chips of v5e, which need not be here. Printed of
the compiled programs: bytes that each device sends, bytes of its memory that it accesses (XLA's cost analysis), bytes
of temporaries, and with --tpu an estimate of the time: sent at 100 GB/s, half of the links of a v5e, then accessed at
819 GB/s. --collectives lists the largest collectives on standard error. Nothing is run. Models of other packages
(`tests/others/requirements.txt`) are left out where one is missing.

`auto` reads the axis names that a model carries; `unnamed` is the same model without them, by names and shapes alone.
`largest` is the rule of https://github.com/keras-team/keras-hub/issues/2806 for each axis in turn, tensor axes first:
the largest dimension that divides, the last of equal ones; vectors are whole. With --pins each also with
`lm.pin_batch`. RecurrentGemma, Haiku and the models of `tests/layers.py` have no published rules: for them the
reference is Megatron's split, written out beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAXTYPING_DISABLE", "1")  # RecurrentGemma's annotations are not of abstract arrays
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests import layers
from tests.collectives import collectives
from tests.small import shard_small

WIDTH, VOCABULARY = 512, 4096
_LINKS, _MEMORY = 100e9, 819e9  # bytes per second of a v5e


@dataclasses.dataclass
class Case:
    """One model: how it is built, what it computes of (values, inputs), and the published rules."""

    abstract: lm.AbstractModel
    forward: Callable[[Any, Any], Any]  # of a pytree like `abstract.tree`, and the input
    inputs: Callable[[int, int], Any]  # of rows and length
    rules: Callable[[lm.AbstractModel, Mesh], lm.AbstractModel]
    axes: tuple[str, str] = ("fsdp", "tp")


# --- Tunix -----------------------------------------------------------------------------------------------------------


def _tunix(cls: Any, config: Any) -> Case:
    from flax import nnx

    abstract = lm.build_abstract(cls, config, rngs=nnx.Rngs(0))
    graph = nnx.graphdef(nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0))))

    def forward(state: Any, tokens: Any) -> Any:
        rows, length = tokens.shape
        mask = jnp.tril(jnp.ones((length, length), bool))[None].repeat(rows, 0)
        return nnx.merge(graph, state)(tokens, _positions(tokens), None, mask)[0]

    return Case(abstract, forward, _tokens, lambda model, mesh: shard_small(model, mesh, on_unmatched="ignore"))


_LAYERS = {"num_layers": 2, "embed_dim": WIDTH, "num_heads": 16, "head_dim": 64, "num_kv_heads": 8}
_QWEN = {**_LAYERS, "vocab_size": VOCABULARY, "rope_theta": 10_000, "norm_eps": 1e-6}


def _tunix_case(name: str) -> Case:
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3

    experts = {"hidden_dim": WIDTH // 2, "num_experts": 8, "num_experts_per_tok": 2}
    if name == "Gemma3":
        config = dataclasses.replace(
            gemma3.ModelConfig.gemma3_4b_it(), **_LAYERS, num_embed=VOCABULARY, hidden_dim=4 * WIDTH,
            vision_config=None, param_dtype=jnp.float32,
        )  # fmt: skip
        return _tunix(gemma3.Gemma3, config)
    if name == "Llama3":
        return _tunix(llama3.Llama3, llama3.ModelConfig(**_QWEN, hidden_dim=3 * WIDTH, weight_tying=False))
    return _tunix(qwen3.Qwen3, qwen3.ModelConfig(**_QWEN, **experts if "MoE" in name else {"hidden_dim": 3 * WIDTH}))


# --- without published rules -----------------------------------------------------------------------------------------


def recurrentgemma() -> Case:
    import recurrentgemma.jax as griffin
    from recurrentgemma import common

    kinds = (common.TemporalBlockType.RECURRENT, common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION)
    module = griffin.Griffin(
        common.GriffinConfig(
            vocab_size=VOCABULARY,
            width=WIDTH,
            mlp_expanded_width=3 * WIDTH,
            num_heads=8,
            lru_width=WIDTH,
            block_types=kinds,
            embeddings_scale_by_sqrt_dim=True,
            attention_window_size=2048,
            logits_soft_cap=30.0,
            scan_type=common.ScanType.ASSOCIATIVE_NATIVE,  # no loop, whose turns the text of a program does not count
        ),
    )
    tokens = _tokens(8, 128)
    abstract = lm.build_abstract(module, jax.random.key(0), tokens, tokens)
    rules = {
        ".*input_embedding": P("tp", "fsdp"),
        ".*(ffw_up/w)": P(None, "fsdp", "tp"),
        ".*(linear_[xy]|proj_q)/kernel": P("fsdp", "tp"),
        ".*proj_[kv]/kernel": P("fsdp"),  # one head, which every device needs
        ".*(ffw_down|linear_out|proj_final)/kernel": P("tp", "fsdp"),
        ".*_gate/w": P("tp"),
        ".*_gate/b": P("tp"),
        ".*conv_1d/w": P(None, "tp"),
        ".*(conv_1d/b|a_param|linear_[xy]/bias)": P("tp"),
        ".*ffw_up/b": P(None, None, None, "tp"),
        ".*": P(),
    }
    return Case(
        abstract,
        lambda variables, tokens: module.apply(variables, tokens, _positions(tokens))[0],
        _tokens,
        lambda model, mesh: model.shard(mesh, rules),
    )


def haiku_attention() -> Case:
    import haiku

    def apply(x: Any) -> Any:
        for _ in range(2):
            scale = haiku.initializers.VarianceScaling(1.0)
            x += haiku.MultiHeadAttention(8, WIDTH // 8, model_size=WIDTH, w_init=scale)(x, x, x)
            widened = jax.nn.gelu(haiku.Linear(4 * WIDTH)(x))  # linear, and linear_2 in the second layer
            x += haiku.Linear(WIDTH)(widened)
        return x

    transformed = haiku.without_apply_rng(haiku.transform(apply))

    def inputs(rows: int, length: int) -> Any:
        return jax.ShapeDtypeStruct((rows, length, WIDTH), "float32")

    rules = {
        ".*(query|key|value)/w|linear(_2)?/w": P("fsdp", "tp"),
        ".*(query|key|value)/b|linear(_2)?/b": P("tp"),
        ".*attention(_1)?/linear/w|linear_[13]/w": P("tp", "fsdp"),
        ".*": P(),
    }
    abstract = lm.build_abstract(transformed.init, jax.random.key(0), inputs(8, 128))
    return Case(abstract, transformed.apply, inputs, lambda model, mesh: model.shard(mesh, rules))


# --- KerasHub's six --------------------------------------------------------------------------------------------------

_DECODER = _measure.decoder(VOCABULARY, 2, 8, 8, WIDTH, 3 * WIDTH)
_MOE = {"moe_intermediate_dim": WIDTH // 2, "num_experts": 8, "top_k": 2}
_KERAS: dict[str, dict[str, Any]] = {
    "GemmaBackbone": {**_DECODER, "head_dim": 64},
    "LlamaBackbone": _DECODER,
    "Llama3Backbone": _DECODER,
    "QwenBackbone": _DECODER,
    "QwenMoeBackbone": {**_DECODER, **_MOE, "shared_expert_intermediate_dim": WIDTH},
    "Qwen3MoeBackbone": {**_DECODER, **_MOE, "head_dim": 64},
}


def _keras_hub(name: str) -> Case:
    import keras
    import keras_hub

    cls = getattr(keras_hub.models, name)
    abstract, model = lm.build_abstract(cls, **_KERAS[name]), cls(**_KERAS[name])
    order = jax.tree.leaves(abstract.framework.structure({path: path for path in abstract}))

    def forward(values: Any, tokens: Any) -> Any:
        by_path = dict(zip(order, jax.tree.leaves(values), strict=True))
        pairs = list(zip(model.variables, map(by_path.__getitem__, abstract), strict=True))
        trainable = [value for variable, value in pairs if variable.trainable]
        rest = [value for variable, value in pairs if not variable.trainable]
        return model.stateless_call(trainable, rest, {"token_ids": tokens, "padding_mask": tokens})[0]

    def rules(abstract: lm.AbstractModel, mesh: Mesh) -> lm.AbstractModel:
        shape = tuple(mesh.shape.values())
        devices = keras.distribution.DeviceMesh(shape, list(mesh.axis_names), keras.distribution.list_devices())
        return shard_small(abstract, mesh, cls.get_layout_map(devices), on_unmatched="ignore")

    return Case(abstract, forward, _tokens, rules, ("batch", "model"))


# --- functions -------------------------------------------------------------------------------------------------------


def _function(make: Callable[[int], layers.Layer]) -> Case:
    shapes, apply, rules = layers.whole(make(WIDTH), VOCABULARY, 2)

    def published(model: lm.AbstractModel, mesh: Mesh) -> lm.AbstractModel:
        return shard_small(model, mesh, {**rules, ".*": P()}, on_unmatched="ignore")

    return Case(layers.built(shapes), apply, _tokens, published, ("data", "model"))


CASES: dict[str, Callable[[], Case]] = {
    "decoder": lambda: _function(layers.decoder),
    "PEER": lambda: _function(layers.peer),
    "latent attention": lambda: _function(layers.latent_attention),
    "Mamba": lambda: _function(layers.mamba),
    "RWKV": lambda: _function(layers.rwkv),
    **{f"Tunix {name}": functools.partial(_tunix_case, name) for name in ("Gemma3", "Qwen3", "Qwen3 MoE", "Llama3")},
    "RecurrentGemma": recurrentgemma,
    "Haiku attention": haiku_attention,
    **{f"KerasHub {name}": functools.partial(_keras_hub, name) for name in _KERAS},
}


def largest(mesh: Mesh, axes: tuple[str, str]) -> Callable[[Any], P]:
    """Rules by shape alone, for the axes of a mesh that is (data, tensor)."""

    def spec(variable: Any) -> P:
        entries: list[str | None] = [None] * len(variable.shape)
        for axis in reversed(axes) if len(entries) > 1 and mesh.size > 1 else ():
            parts = mesh.shape[axis]
            fit = [(n, dim) for dim, n in enumerate(variable.shape) if n % parts == 0 and entries[dim] is None]
            if fit and parts > 1:
                entries[max(fit)[1]] = axis
        return P(*entries)

    return spec


# --- counting --------------------------------------------------------------------------------------------------------


def _tokens(rows: int, length: int) -> Any:
    return jax.ShapeDtypeStruct((rows, length), "int32")


def _positions(tokens: Any) -> Any:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def _training(case: Case) -> Callable[[Any, Any], Any]:
    """A step of gradient descent; counters and tables of integers stay."""

    def loss(values: Any, x: Any) -> Any:
        return jnp.square(case.forward(values, x).astype("float32")).mean()

    def step(values: Any, x: Any) -> Any:
        gradients = jax.grad(loss, allow_int=True)(values, x)
        return jax.tree.map(
            lambda value, gradient: value if gradient.dtype == jax.dtypes.float0 else value - gradient,
            values,
            gradients,
        )

    return step


def compiled(case: Case, model: lm.AbstractModel, mesh: Mesh, part: str, rows: int, length: int, pins: bool) -> Any:
    """One of the programs; a step of training gives weights that are split as they were, and takes their memory."""
    x = case.inputs(rows, 1 if part == "decoding" else length)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(case.axes[0])))
    step = _training(case) if part == "training" else case.forward
    step = lm.pin_batch(step, model) if pins else step
    if part == "training":
        placed = jax.tree.map(lambda struct: struct.sharding, model.tree)
        return jax.jit(step, donate_argnums=0, out_shardings=placed).lower(model.tree, x).compile()
    return jax.jit(step).lower(model.tree, x).compile()


def list_collectives(title: str, program: Any) -> None:
    """Prints those that send most, summed over layers, with what each sends in all."""
    total: dict[str, int] = {}
    for nbytes, text in collectives(program):
        text = re.sub(r"(?<=[a-z])_?\d+(?=[/)])", "", text)  # of a layer
        total[text] = total.get(text, 0) + nbytes
    print(title, file=sys.stderr)
    for text, nbytes in sorted(total.items(), key=lambda item: -item[1])[:8]:
        print(f"  {nbytes / 1e6:6.2f} MB  {text}", file=sys.stderr)


def figures(program: Any, *, tpu: bool) -> dict[str, float]:
    sent, accessed = sum(nbytes for nbytes, _ in collectives(program)), program.cost_analysis()["bytes accessed"]
    found = {"sent": sent, "accessed": accessed, "temp": program.memory_analysis().temp_size_in_bytes}
    return found | ({"seconds": sent / _LINKS + accessed / _MEMORY} if tpu else {})


def sharded(case: Case, mesh: Mesh) -> dict[str, Callable[[], lm.AbstractModel]]:
    named = any(variable.logical_axes for variable in case.abstract.values())
    unnamed = case.abstract.with_variables(
        {path: dataclasses.replace(variable, logical_axes=None) for path, variable in case.abstract.items()}
    )
    return {
        "published": lambda: case.rules(case.abstract, mesh),
        **({"auto": lambda: case.abstract.shard(mesh, lm.auto())} if named else {}),
        "unnamed": lambda: unnamed.shard(mesh, lm.auto()),
        "largest": lambda: unnamed.shard(mesh, largest(mesh, case.axes)),
    }


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--mesh", action="append")
    parser.add_argument("--tokens", action="append")
    parser.add_argument("--programs", default="forward,training")
    parser.add_argument("--rules", default="published,auto,unnamed,largest")
    for flag in ("--pins", "--tpu", "--collectives"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if not options.json:
        print("| model | mesh | tokens | program | rules | sent, MB | accessed, MB | temporaries, MB | estimate, ms |")
        print("|---" * 9 + "|")
    for name in (name for name in CASES if options.only in name):
        try:
            case = CASES[name]()
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
            continue
        for mesh_text in options.mesh or ["2x4", "1x8", "8x1"]:
            sizes = dict(zip(case.axes, map(int, mesh_text.split("x")), strict=True))
            devices = np.array(jax.devices("cpu")[:8]).reshape(*sizes.values())
            mesh = lm.topology("v5e:2x4", sizes) if options.tpu else Mesh(devices, case.axes)
            ways = {kind: make for kind, make in sharded(case, mesh).items() if kind in options.rules.split(",")}
            for tokens in options.tokens or ["8x128"]:
                for part in options.programs.split(","):
                    for kind, pins in ((kind, pins) for kind in ways for pins in (False, True)[: 1 + options.pins]):
                        row = {"model": name, "mesh": mesh_text, "tokens": tokens, "program": part}
                        row["rules"] = f"{kind}, pinned" if pins else kind
                        measure(row, case, ways[kind](), mesh, pins=pins, options=options)


def measure(row: dict[str, Any], case: Case, model: lm.AbstractModel, mesh: Mesh, *, pins: bool, options: Any) -> None:
    rows, length = map(int, row["tokens"].split("x"))
    try:
        program = compiled(case, model, mesh, row["program"], rows, length, pins)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = {}
    else:
        found = figures(program, tpu=options.tpu)
        if options.collectives:
            list_collectives(", ".join(row.values()), program)
    if options.json:
        print(json.dumps({**row, **found}), flush=True)
        return
    cells = [f"{found[part] / 1e6:.2f}" for part in ("sent", "accessed", "temp") if found]
    cells += [f"{found['seconds'] * 1e3:.2f}"] if "seconds" in found else [""]
    print(f"| {' | '.join([*row.values(), *(cells if found else ['out of memory', '', '', ''])])} |", flush=True)


if __name__ == "__main__":
    main()
