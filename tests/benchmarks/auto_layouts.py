"""Bytes that devices send each other with `lm.auto()`, against the rules that the models' authors published.

    python tests/benchmarks/auto_layouts.py [--json] [--only NAME] [--mesh 2x4] [--tpu] [--collectives]

Forward pass and gradient of small models of real proportions are compiled for 8 virtual CPU devices (with --tpu for
8 chips of v5e, which need not be here), and the collectives counted in the compiled programs; --collectives lists the
largest of these on standard error. Nothing is run. Models
come from other packages (`tests/others/requirements.txt`); where one is missing, its rows are left out.

`auto` reads the axis names that a model carries; `unnamed` is the same model without them, by names and shapes alone.
RecurrentGemma and Haiku publish no rules: for them the reference is Megatron's split, written out below.
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
os.environ.setdefault("JAXTYPING_DISABLE", "1")  # RecurrentGemma's annotations are not of abstract arrays
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import collectives, sent_nbytes
from tests.small import shard_small

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 128, 512, 4096


@dataclasses.dataclass
class Case:
    """One model: how it is built, what it computes of (values, inputs), and the published rules."""

    abstract: lm.AbstractModel
    forward: Callable[[Any, Any], Any]  # of a pytree like `abstract.tree`, and the input
    inputs: Callable[[], Any]
    rules: Callable[[lm.AbstractModel, Mesh], lm.AbstractModel]
    axes: tuple[str, str] = ("fsdp", "tp")


# --- Tunix -----------------------------------------------------------------------------------------------------------


def _tunix(cls: Any, config: Any) -> Case:
    from flax import nnx

    abstract = lm.build_abstract(cls, config, rngs=nnx.Rngs(0))
    positions, mask = jnp.arange(LENGTH)[None].repeat(BATCH, 0), jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]

    graph = nnx.graphdef(nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0))))

    def forward(state: Any, tokens: Any) -> Any:
        return nnx.merge(graph, state)(tokens, positions, None, mask.repeat(BATCH, 0))[0]

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
            attention_window_size=LENGTH,
            logits_soft_cap=30.0,
            scan_type=common.ScanType.ASSOCIATIVE_NATIVE,  # no loop, whose turns the text of a program does not count
        ),
    )
    tokens, positions = _tokens(), jnp.arange(LENGTH)[None].repeat(BATCH, 0)
    abstract = lm.build_abstract(module, jax.random.key(0), tokens, jax.ShapeDtypeStruct(positions.shape, "int32"))
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
        lambda variables, tokens: module.apply(variables, tokens, positions)[0],
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
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32")
    rules = {
        ".*(query|key|value)/w|linear(_2)?/w": P("fsdp", "tp"),
        ".*(query|key|value)/b|linear(_2)?/b": P("tp"),
        ".*attention(_1)?/linear/w|linear_[13]/w": P("tp", "fsdp"),
        ".*": P(),
    }
    abstract = lm.build_abstract(transformed.init, jax.random.key(0), x)
    return Case(abstract, transformed.apply, lambda: x, lambda model, mesh: model.shard(mesh, rules))


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

    def forward(values: Any, tokens: Any) -> Any:
        pairs = list(zip(model.variables, values, strict=True))
        trainable = [value for variable, value in pairs if variable.trainable]
        rest = [value for variable, value in pairs if not variable.trainable]
        return model.stateless_call(trainable, rest, {"token_ids": tokens, "padding_mask": tokens})[0]

    def rules(abstract: lm.AbstractModel, mesh: Mesh) -> lm.AbstractModel:
        shape = tuple(mesh.shape.values())
        devices = keras.distribution.DeviceMesh(shape, list(mesh.axis_names), keras.distribution.list_devices())
        return shard_small(abstract, mesh, cls.get_layout_map(devices), on_unmatched="ignore")

    return Case(abstract, forward, _tokens, rules, ("batch", "model"))


CASES: dict[str, Callable[[], Case]] = {
    **{f"Tunix {name}": functools.partial(_tunix_case, name) for name in ("Gemma3", "Qwen3", "Qwen3 MoE", "Llama3")},
    "RecurrentGemma": recurrentgemma,
    "Haiku attention": haiku_attention,
    **{f"KerasHub {name}": functools.partial(_keras_hub, name) for name in _KERAS},
}


# --- counting --------------------------------------------------------------------------------------------------------


def _tokens() -> Any:
    return jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")


def programs(case: Case, model: lm.AbstractModel, mesh: Mesh) -> tuple[Any, Any]:
    """The forward pass, and the gradient, which is split as the weights are; compiled."""
    x = case.inputs()
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(case.axes[0])))
    structs = [variable.struct for variable in model.values()] if case.axes[0] == "batch" else model.tree
    trained = jax.tree.map(lambda struct: jnp.issubdtype(struct.dtype, jnp.floating), structs)
    leaves, tree = jax.tree.flatten(structs)
    floating = [index for index, trains in enumerate(jax.tree.leaves(trained)) if trains]

    def loss(weights: list[Any], rest: list[Any], x: Any) -> Any:
        values = list(rest)
        for index, value in zip(floating, weights, strict=True):
            values[index] = value
        return jnp.square(case.forward(jax.tree.unflatten(tree, values), x)).mean()

    weights, rest = [leaves[index] for index in floating], leaves
    out = [struct.sharding for struct in weights]
    forward = jax.jit(lambda leaves, x: case.forward(jax.tree.unflatten(tree, leaves), x))
    gradient = jax.jit(jax.grad(loss), out_shardings=out)
    return forward.lower(leaves, x).compile(), gradient.lower(weights, rest, x).compile()


def list_collectives(title: str, program: Any) -> None:
    """Prints those that send most, summed over layers, with what each sends in all."""
    total: dict[str, int] = {}
    for nbytes, text in collectives(program):
        text = re.sub(r"(?<=[a-z])_?\d+(?=[/)])", "", text)  # of a layer
        total[text] = total.get(text, 0) + nbytes
    print(title, file=sys.stderr)
    for text, nbytes in sorted(total.items(), key=lambda item: -item[1])[:8]:
        print(f"  {nbytes / 1e6:6.2f} MB  {text}", file=sys.stderr)


def measure(name: str, shape: tuple[int, int], tpu: bool, listed: bool) -> dict[str, Any]:
    case = CASES[name]()
    if tpu:
        mesh = lm.topology("v5e:2x4", dict(zip(case.axes, shape, strict=True)))
    else:
        mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(shape), case.axes)
    row: dict[str, Any] = {"model": name, "mesh": dict(zip(case.axes, shape, strict=True)), "tpu": tpu}
    named = any(variable.logical_axes for variable in case.abstract.values())
    unnamed = case.abstract.with_variables(
        {path: dataclasses.replace(variable, logical_axes=None) for path, variable in case.abstract.items()}
    )
    sharded = {
        "published": case.rules(case.abstract, mesh),
        **({"auto": case.abstract.shard(mesh, lm.auto())} if named else {}),
        "unnamed": unnamed.shard(mesh, lm.auto()),
    }
    for kind, model in sharded.items():
        compiled = dict(zip(("forward", "gradient"), programs(case, model, mesh), strict=True))
        for part, program in compiled.items() if listed else ():
            list_collectives(f"{name}, {kind}, {part}:", program)
        sent = {part: sent_nbytes(program) for part, program in compiled.items()}
        row[kind] = {**sent, "device_nbytes": model.explain().fullest_nbytes}
    return row


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--mesh", action="append")
    parser.add_argument("--tpu", action="store_true")
    parser.add_argument("--collectives", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print("| model | mesh | rules | forward, MB | gradient, MB | × published | most loaded device, MB |")
        print("|---" * 7 + "|")
    for name in (name for name in CASES if options.only in name):
        for text in options.mesh or ["2x4", "1x8", "8x1"]:
            try:
                row = measure(name, tuple(map(int, text.split("x"))), options.tpu, options.collectives)
            except ImportError as error:
                print(f"{name}: left out, {error}", file=sys.stderr)
                break
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            for kind in ("published", "auto", "unnamed"):
                if kind in row:
                    found, base = row[kind], row["published"]
                    ratio = [f"{found[part] / max(base[part], 1):.2f}" for part in ("forward", "gradient")]
                    mb = [f"{found[part] / 1e6:.2f}" for part in ("forward", "gradient", "device_nbytes")]
                    cells = (name, text, kind, *mb[:2], " / ".join(ratio), mb[2])
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
