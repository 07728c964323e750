"""`auto`: what each role is given on each kind of mesh, of any package's layout, and that a proposal always fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import sent_nbytes
from tests.large import examples
from tests.small import shard_small

Shapes = Mapping[str, tuple[int, ...]]
NORM = {"layers/0/pre_attention_norm/scale": (64,)}


def mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def placed(
    shapes: Shapes, mesh: Any, rules: Any = None, *, names: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """The variables of a model of these shapes, and perhaps axis names, by path in this order."""
    model = lm.build_abstract(lambda: {path: jnp.zeros(shape) for path, shape in shapes.items()})
    named = {path: dataclasses.replace(model[path], logical_axes=axes) for path, axes in (names or {}).items()}
    found = shard_small(
        model.with_variables({**model, **named}), mesh, rules or lm.auto(), on_unmatched="ignore", **options
    )
    return {path: found[path] for path in shapes}


def specs(shapes: Shapes, mesh: Any, rules: Any = None, **options: Any) -> dict[str, P]:
    return {path: variable.spec for path, variable in placed(shapes, mesh, rules, **options).items()}


def described(shapes: Shapes, path: str, names: Mapping[str, Any] | None = None) -> tuple[str, tuple[str, ...]]:
    """The role of a variable and what its dimensions are."""
    reason = placed(shapes, mesh(model=2), names=names)[path].reason
    return reason.role, reason.labels


Table = Mapping[str, tuple[tuple[int, ...], P]]  # path → shape and expected spec


def expect(table: Table, mesh: Any, rules: Any = None, **options: Any) -> None:
    found = specs({path: shape for path, (shape, _) in table.items()}, mesh, rules, **options)
    assert found == {path: spec for path, (_, spec) in table.items()}


TRANSFORMER: Table = {
    "token_embedding/embeddings": ((64, 32), P("model")),
    "layer_0/attention/query/kernel": ((32, 8, 4), P(None, "model")),
    "layer_0/attention/query/bias": ((8, 4), P("model")),
    "layer_0/attention/key/kernel": ((32, 2, 4), P()),  # two heads are not split into eight
    "layer_0/attention/attention_output/kernel": ((8, 4, 32), P("model")),
    "layer_0/attention/attention_output/bias": ((32,), P()),
    "layer_0/layer_norm/gamma": ((32,), P()),
    "layer_0/mlp/gate/kernel": ((32, 128), P(None, "model")),
    "layer_0/mlp/gate/bias": ((128,), P("model")),
    "layer_0/mlp/down/kernel": ((128, 32), P("model")),
    "layer_0/mlp/down/bias": ((32,), P()),
    "seed_generator_state": ((2,), P()),
}
LAYER = {path: shape for path, (shape, _) in TRANSFORMER.items()}


def test_a_transformer_layer_by_tensor_parallelism() -> None:
    expect(TRANSFORMER, mesh(model=8))


def test_layers_may_be_arrays_of_their_own() -> None:
    layer = {path: shape for path, shape in LAYER.items() if not path.endswith("bias")}
    bare = {path.removesuffix("/kernel").replace("attention_output", "out"): shape for path, shape in layer.items()}
    assert list(specs(bare, mesh(model=8)).values()) == list(specs(layer, mesh(model=8)).values())


def test_a_transformer_layer_by_both() -> None:
    found = specs(LAYER, mesh(batch=2, model=4))
    assert found["token_embedding/embeddings"] == P(("model", "batch"))
    assert found["layer_0/attention/query/kernel"] == P("batch", "model")
    assert found["layer_0/attention/attention_output/kernel"] == P("model", None, "batch")
    assert found["layer_0/mlp/gate/kernel"] == P("batch", "model")
    assert found["layer_0/mlp/down/kernel"] == P("model", "batch")
    assert found["layer_0/mlp/gate/bias"] == P("model")
    assert found["layer_0/mlp/down/bias"] == P()


def test_a_transformer_layer_by_fully_sharded_data_parallelism() -> None:
    found = specs(LAYER, mesh(fsdp=4, model=1))
    assert all(spec != P() for path, spec in found.items() if len(LAYER[path]) > 1 and "bias" not in path)
    assert all("model" not in spec for spec in found.values())  # axes of size 1 are left out
    assert specs(LAYER, mesh(fsdp=4, model=1), lm.auto(fsdp=())) == dict.fromkeys(LAYER, P())


def test_axes_by_name_and_as_told() -> None:
    kernel = {"mlp/up/kernel": (16, 32)}
    both = mesh(data=2, fsdp=2, tensor=2)
    assert specs(kernel, both) == {"mlp/up/kernel": P("fsdp", "tensor")}  # data is for data where there is an fsdp axis
    assert specs(kernel, both, lm.auto(fsdp=("data", "fsdp"))) == {"mlp/up/kernel": P(("data", "fsdp"), "tensor")}
    assert specs(kernel, mesh(x=4)) == {"mlp/up/kernel": P(None, "x")}
    assert specs(kernel, mesh(x=2, y=2), lm.auto(tensor="x")) == {"mlp/up/kernel": P(None, "x")}
    with pytest.raises(lm.ShardingError, match="no axis 'z'; its axes are 'x', 'y'"):
        specs(kernel, mesh(x=2, y=2), lm.auto(tensor="z"))
    with pytest.raises(lm.ShardingError, match="axis 'x' is named twice"):
        specs(kernel, mesh(x=2, y=2), lm.auto(tensor="x", fsdp="x"))
    with pytest.raises(lm.ShardingError, match="nothing is known of mesh axes 'x', 'y'"):
        specs(kernel, mesh(x=2, y=2))


def test_heads_stay_whole_in_matrices() -> None:
    attention = {
        "attn/q_proj/kernel": (48, 96),
        "attn/k_proj/kernel": (48, 24),
        "attn/o_proj/kernel": (96, 48),
        "attn/q_norm/scale": (12,),
    }
    found = specs(attention, mesh(model=4))  # 8 query heads, 2 key heads of 12
    assert found["attn/q_proj/kernel"] == P(None, "model")
    assert (
        found["attn/k_proj/kernel"] == P()
    )  # a small one, which every device needs; a large one is split all the same
    assert specs(attention, mesh(model=4), large=1)["attn/k_proj/kernel"] == P("model")
    assert found["attn/o_proj/kernel"] == P("model")
    assert placed(attention, mesh(model=4))["attn/k_proj/kernel"].reason.tried == (
        "dimension 1 (heads, 24) is not split into 4 parts over 'model': its 2 heads do not divide",
    )
    del attention["attn/q_norm/scale"]  # no head is wider than 24 columns, the common divisor of queries and keys
    assert specs(attention, mesh(model=4))["attn/q_proj/kernel"] == P(None, "model")
    del attention["attn/k_proj/kernel"]
    query = placed(attention, mesh(model=4), large=1)["attn/q_proj/kernel"]
    assert query.spec == P("model") and "its number of heads is unknown" in query.reason.text
    # Queries, keys and values of one width up to 1024 have heads of 64 or less; a narrower key tells of wider ones.
    equal = {"attn/q_proj/kernel": (256, 512), "attn/k_proj/kernel": (256, 512)}
    assert set(specs(equal, mesh(model=8)).values()) == {P(None, "model")}
    assert specs({**equal, "attn/k_proj/kernel": (256, 256)}, mesh(model=8))["attn/q_proj/kernel"] == P()
    # Eight pieces of 128 columns hold whole heads of 16 to 128.
    assert specs({"attn/q_proj/kernel": (48, 1024)}, mesh(model=8)) == {"attn/q_proj/kernel": P(None, "model")}
    assert specs({"attn/qkv/kernel": (48, 1536)}, mesh(model=8)) == {"attn/qkv/kernel": P("model")}


def test_pytorch_order() -> None:
    expect(
        {
            "mlp/up_proj/weight": ((64, 16), P("model")),
            "mlp/up_proj/bias": ((64,), P("model")),
            "mlp/down_proj/weight": ((16, 64), P(None, "model")),
        },
        mesh(model=8),
    )


@pytest.mark.parametrize(
    ("axes", "large", "gate", "down"),
    [
        ({"model": 4}, 1 << 20, P("model"), P("model")),
        ({"expert": 2, "model": 4}, 1 << 20, P("expert", None, "model"), P("expert", "model")),
        # Whole experts on all devices, whose sum is sent once; too few for that, on those along one axis.
        ({"data": 2, "model": 2}, 1 << 20, P(("model", "data")), P(("model", "data"))),
        ({"data": 2, "model": 4}, 1, P("model", "data"), P("model", None, "data")),
        # Four experts do not go on eight devices: what is inside them does.
        ({"model": 8}, 1 << 20, P(None, None, "model"), P(None, "model")),
    ],
)
def test_experts(axes: dict[str, int], large: int, gate: P, down: P) -> None:
    moe = {"moe/experts/gate_proj": (4, 16, 32), "moe/experts/down_proj": (4, 32, 16), "moe/router/kernel": (16, 4)}
    found = specs(moe, mesh(**axes), large=large)
    assert (found["moe/experts/gate_proj"], found["moe/experts/down_proj"]) == (gate, down)
    assert large == 1 or found["moe/router/kernel"] == P()


def test_convolutions_tables_and_heads_of_models() -> None:
    table = {
        "conv/kernel": ((3, 3, 8, 16), P(None, None, None, "model")),
        "stem_conv/kernel": ((3, 3, 16, 3), P(None, None, "model")),
        "block/depthwise_kernel": ((3, 3, 16, 1), P(None, None, "model")),
        "token_embedding/embeddings": ((50257, 64), P(None, "model")),
        "token_embedding/reverse_embeddings": ((64, 4096), P(None, "model")),
        "lm_head/kernel": ((64, 4096), P(None, "model")),
    }
    expect({**table, "position_embedding/embeddings": ((128, 16), P())}, mesh(model=8))
    expect({"position_embedding/embeddings": ((128, 16), P("model"))}, mesh(model=8), large=0)


def test_what_belongs_to_a_weight_is_split_like_it() -> None:
    expect(
        {
            "attention/query/kernel": ((32, 8, 4), P("data", "model")),
            "attention/query/lora_kernel_a": ((32, 8, 2), P(None, "model")),
            "attention/query/lora_kernel_b": ((2, 4), P()),
            "attention/query/kernel_scale": ((1, 8, 4), P(None, "model")),
            "up/_kernel": ((32, 64), P("data", "model")),
            "up/kernel_scale": ((64,), P("model")),
            "up/lora_kernel_a": ((32, 2), P()),
            "up/lora_kernel_b": ((2, 64), P(None, "model")),
            "embedding/embeddings": ((64, 16), P(("model", "data"))),
            "embedding/embeddings_scale": ((64,), P("model")),
            "embedding/lora_embeddings_a": ((64, 2), P("model")),
            "embedding/lora_embeddings_b": ((2, 16), P()),
            "adam/up__kernel_momentum": ((32, 64), P("data", "model")),
            "adafactor/embedding_embeddings_row": ((64,), P(("model", "data"))),
            "adafactor/embedding_embeddings_column": ((16,), P()),
            "adafactor/up__kernel_column": ((64,), P("model")),
            "adafactor/up__kernel_row": ((32,), P("data")),
            "opt_state/0/mu/attention/query/kernel": ((32, 8, 4), P("data", "model")),
            "opt_state/0/count": ((), P()),
        },
        mesh(data=2, model=4),
    )


def test_the_slots_of_a_real_optimizer() -> None:
    optax = pytest.importorskip("optax")

    def init(key: jax.Array) -> tuple[dict[str, dict[str, jax.Array]], object]:
        params = {"up": {"kernel": jax.random.normal(key, (16, 64)), "bias": jax.numpy.zeros(64)}}
        return params, optax.adam(1e-3).init(params)

    model = lm.build_abstract(init, jax.random.key(0)).shard(mesh(model=8), lm.auto())
    kernels = [variable.spec for path, variable in model.items() if path.endswith("up/kernel")]
    biases = [variable.spec for path, variable in model.items() if path.endswith("up/bias")]
    assert (kernels, biases) == ([P(None, "model")] * 3, [P("model")] * 3)


def test_the_layer_axis_of_a_stack_is_never_split() -> None:
    table = {
        "layers/norm/scale": ((8, 32), P()),
        "layers/attn/query/kernel": ((8, 32, 8, 4), P(None, "data", "model")),
        "layers/mlp/up/kernel": ((8, 32, 64), P(None, "data", "model")),
        "layers/mlp/up/bias": ((8, 64), P(None, "model")),
        "layers/mlp/down/kernel": ((8, 64, 32), P(None, "model", "data")),
    }
    expect(table, mesh(data=2, model=4))
    shapes = {path: shape for path, (shape, _) in table.items()}
    assert described(shapes, "layers/mlp/up/kernel")[1] == ("layers", "in", "out")
    assert specs(shapes, mesh(model=8), large=0)["layers/norm/scale"] == P(None, "model")


@pytest.mark.parametrize("size", [3, 6])
def test_odd_meshes_fall_to_what_divides(size: int) -> None:
    odd = mesh(batch=1, model=size)
    shapes = {"a/up/kernel": (12, 32), "b/up/kernel": (16, 32), "attention/query/kernel": (24, 4, 8)}
    found = placed(shapes, odd, large=0)
    assert [variable.spec for variable in found.values()] == [P("model"), P(), P("model")]
    assert found["a/up/kernel"].reason.tried == (
        f"dimension 1 (out, 32) does not divide into {size} parts over 'model'",
    )
    assert found["b/up/kernel"].reason.text == "replicated: no dimension divides by any axis of the mesh"


def test_what_one_axis_of_several_got_is_not_given_it_again() -> None:
    assert specs({"token_embedding/embeddings": (2, 2)}, mesh(fsdp=2, expert=4), large=0) == {
        "token_embedding/embeddings": P("fsdp")
    }


def test_no_activation_gets_its_features_from_a_data_axis() -> None:
    """Tables are looked up and channels multiplied: the compiler would gather the batch to keep such a split."""
    both = mesh(data=2, model=4)
    table = {
        "token_embedding/embeddings": ((64, 32), P(("model", "data"))),
        "odd/token_embedding/embeddings": ((36, 32), P("model")),  # 36 divides by 4, not by 8
        "gpt2/token_embedding/embeddings": ((25, 32), P(None, "model")),
        "position_embedding/embeddings": ((16, 32), P(("model", "data"))),
        "odd/position_embedding/embeddings": ((20, 32), P("model")),
        "block/depthwise_kernel": ((3, 3, 16, 1), P(None, None, "model")),
        "peer/down_embed/embedding": ((64, 32), P("data", "model")),  # many entries a token: combined where they are
        "peer/up_embed/embedding": ((64, 32), P("data", "model")),
    }
    expect(table, both, large=1)
    expect({"position_embedding/embeddings": ((16, 32), P("fsdp"))}, mesh(fsdp=8), large=1)
    expect({"block/depthwise_kernel": ((3, 3, 16, 1), P())}, mesh(fsdp=8))
    # Nothing large is replicated, and a model's own names are followed.
    expect({"token_embedding/embeddings": ((25, 32), P(None, "fsdp"))}, mesh(fsdp=8), large=1)
    names = {"token_embedding/embeddings": ("model", "data")}
    expect({"token_embedding/embeddings": ((64, 32), P("model", "data"))}, both, names=names, large=1)


@examples(
    12,
    60,
    paths=st.lists(
        st.tuples(
            st.sampled_from([*LAYER, "x", "moe/experts/up", "conv/kernel", "attn/qkv/kernel", "lm_head/weight"]),
            st.lists(st.integers(0, 96), max_size=5),
        ),
        max_size=8,
    ),
    axes=st.sampled_from([(1, 8), (2, 4), (8, 1), (1, 3), (1, 6), (3, 2)]),
    names=st.sampled_from([("batch", "model"), ("fsdp", "expert"), ("expert", "model")]),
    large=st.sampled_from([0, 1 << 10, 1 << 20]),
)
def test_every_proposal_fits_and_nothing_large_is_replicated(
    paths: list[tuple[str, list[int]]], axes: tuple[int, int], names: tuple[str, str], large: int
) -> None:
    shapes = {path: tuple(shape) for path, shape in paths}
    found_mesh = mesh(**dict(zip(names, axes, strict=True)))
    found = placed(shapes, found_mesh, large=large)  # which checks that each fits
    assert specs(shapes, found_mesh, large=large) == {path: variable.spec for path, variable in found.items()}
    for path, variable in found.items():
        sizes = [size for size in axes if size > 1]
        splittable = any(length and length % size == 0 for length in shapes[path] for size in sizes)
        if 4 * math.prod(shapes[path]) >= max(large, 1) and splittable:
            assert any(variable.spec), (path, shapes[path], variable.reason)


def test_columns_then_rows_send_less_than_rows_then_columns() -> None:
    mesh8 = Mesh(np.array(jax.devices()[:8]), ("model",))

    def sent(*specs: P) -> int:
        shapes = ((16, 64), (64, 256), (256, 64))
        places = [NamedSharding(mesh8, spec) for spec in (P(), *specs)]
        structs = [jax.ShapeDtypeStruct(s, "float32", sharding=p) for s, p in zip(shapes, places, strict=True)]
        mlp = jax.jit(lambda x, up, down: jnp.tanh(x @ up) @ down, out_shardings=NamedSharding(mesh8, P()))
        return sent_nbytes(mlp.lower(*structs).compile())

    proposed = specs({"layer_0/up/kernel": (64, 256), "layer_0/down/kernel": (256, 64)}, mesh8, large=1)
    one_all_reduce = 2 * 16 * 64 * 4 * 7 // 8
    assert sent(*proposed.values()) == one_all_reduce < sent(P("model"), P(None, "model"))


# --- without names ---


@pytest.mark.parametrize(
    ("name", "shape", "role", "expected"),
    [
        ("attn/q_einsum/w", (8, 64, 16), "query_key_value", "heads in head_dim"),  # Gemma, Tunix Gemma
        ("attn/kv_einsum/w", (2, 4, 64, 16), "fused_query_key_value", "parts heads in head_dim"),
        ("attn/qkv_einsum/w", (3, 8, 64, 16), "fused_query_key_value", "parts heads in head_dim"),
        ("attn/attn_vec_einsum/w", (8, 16, 64), "attention_output", "heads head_dim out"),
        ("attn/q_proj/w", (64, 8, 16), "query_key_value", "in heads head_dim"),  # Tunix Llama, Qwen; Flax
        ("attn/o_proj/w", (8, 16, 64), "attention_output", "heads head_dim out"),
        ("attn/qkv/kernel", (64, 3, 8, 16), "fused_query_key_value", "in parts heads head_dim"),
        ("attn/qkv/kernel", (64, 3, 128), "fused_query_key_value", "in parts heads"),
        ("attn/c_attn/kernel", (3, 64, 128), "fused_query_key_value", "parts in heads"),
        ("attn/mixer/kernel", (8, 16, 64), "attention_output", "heads head_dim out"),  # by shape, under any name
        ("attention_block/proj_final/kernel", (128, 64), "attention_output", "heads out"),  # RecurrentGemma
        ("multi_head_attention/linear/w", (128, 64), "attention_output", "heads out"),  # Haiku
        ("attn/c_proj/kernel", (128, 64), "attention_output", "heads out"),
        ("mlp_block/ffw_up/w", (2, 64, 256), "mlp_up", "parts in out"),
        ("mlp/gating_einsum", (2, 256, 64), "mlp_up", "parts out in"),
        ("mlp/linear", (256, 64), "mlp_down", "in out"),
        ("recurrent_block/conv_1d/w", (4, 64), "depthwise_convolution", "space out"),
        ("conv/w", (3, 3, 8, 64), "convolution", "space space in out"),
        ("mixer/A_log", (128, 16), "state_space", "channels state"),
        ("lstm/linear/w", (128, 256), "recurrent", "dimension dimension"),
        ("blocks/linear_1/w", (256, 64), "mlp_down", "in out"),  # Haiku counts from nought
        ("input_layernorm/w", (64,), "norm", "dimension"),
        ("conv/weight", (64, 8, 3, 3), "convolution", "out in space space"),  # as PyTorch stores it
    ],
)
def test_what_shapes_and_neighbours_tell(name: str, shape: tuple[int, ...], role: str, expected: str) -> None:
    path = f"layers/0/{name}"
    assert described({**NORM, path: shape}, path) == (role, tuple(expected.split()))


def test_every_order_of_a_role_is_over_labels_that_it_has() -> None:
    with pytest.raises(lm.ShardingError, match="closest: 'embedding'|there is no role") as raised:
        lm.role("embeding")
    with pytest.raises(lm.ShardingError, match="roles are ") as raised:
        lm.role("")
    roles = [lm.role(name) for name in str(raised.value).partition("roles are ")[2].split(", ")]
    assert len(roles) > 20 and lm.role("mlp_up") in roles and repr(lm.role("mlp_up")) == "Role(name='mlp_up')"
    for role in roles:
        assert set(role.fsdp) - {"parts"} <= set(role.tensor) and bool(role.tensor) == bool(role.why)
        for ndim in role.ndims:
            assert len(role.label(ndim)) == ndim
            # What is within attention has labels that depend on the neighbours.
            assert role.within == "attention" or set(role.tensor) <= set(role.label(ndim)), (role, ndim)


def test_a_head_is_never_split_where_the_order_of_dimensions_is_anothers() -> None:
    expect(
        {
            "layers/0/pre_attention_norm/scale": ((64,), P()),
            "layers/0/attn/q_einsum/w": ((8, 64, 16), P("tp", "fsdp")),
            "layers/0/attn/kv_einsum/w": ((2, 4, 64, 16), P(None, "tp", "fsdp")),
            "layers/0/attn/attn_vec_einsum/w": ((8, 16, 64), P("tp", None, "fsdp")),
        },
        mesh(fsdp=2, tp=4),
    )


@pytest.mark.parametrize(("up", "down"), [("gate_proj", "down_proj"), ("w_in", "w_back"), ("gating_einsum", "linear")])
def test_experts_under_any_name(up: str, down: str) -> None:
    shapes = {
        **NORM,
        "layers/0/mlp/router/kernel": (64, 8),
        f"layers/0/mlp/{up}": (8, 64, 96),
        f"layers/0/mlp/{down}": (8, 96, 64),
    }
    assert described(shapes, f"layers/0/mlp/{up}") == ("expert_up", ("experts", "in", "out"))
    assert described(shapes, f"layers/0/mlp/{down}") == ("expert_down", ("experts", "in", "out"))
    # Beside their router they are used one by one, and split as any MLP where parameters are stored in pieces too.
    found = specs(shapes, mesh(data=2, model=4))
    assert [found[f"layers/0/mlp/{name}"] for name in (up, down)] == [
        P(None, "data", "model"),
        P(None, "model", "data"),
    ]
    assert specs(shapes, mesh(model=8))[f"layers/0/mlp/{up}"] == P("model")
    # Gemma 4 keeps a gate and what it multiplies together, and both the other way round.
    turned = {**shapes, "layers/0/mlp/gating_einsum": (8, 2, 96, 64)}
    assert described(turned, "layers/0/mlp/gating_einsum") == ("expert_up", ("experts", "parts", "out", "in"))


def test_blocks_of_a_diagonal_gate_are_no_experts() -> None:
    shapes = {"rg_lru/a_gate/w": (8, 16, 16), "rg_lru/a_gate/b": (8, 16), "rg_lru/a_param": (128,)}
    assert described(shapes, "rg_lru/a_gate/w") == ("block_diagonal", ("blocks", "in", "out"))
    found = specs(shapes, mesh(model=8))
    assert (found["rg_lru/a_gate/w"], found["rg_lru/a_gate/b"]) == (P("model"), P("model"))


def test_one_key_head_tells_how_wide_heads_are() -> None:
    attention = {
        "attention_block/proj_q/kernel": ((64, 80), P(None, "model")),
        "attention_block/proj_k/kernel": ((64, 10), P()),
    }
    expect(attention, mesh(model=8))


# --- with names ---


@pytest.mark.parametrize(
    ("names", "role", "expected"),
    [
        (("vocab", "embed"), "embedding", "vocabulary features"),
        (("embed", "vocab"), "output_head", "in vocabulary"),
        (("embed", "heads", "kv"), "query_key_value", "in heads head_dim"),
        (("embed", "kv_heads", "head_dim"), "query_key_value", "in heads head_dim"),
        (("heads", "kv", "embed"), "attention_output", "heads head_dim out"),
        (("embed", "joined_kv"), "query_key_value", "in heads"),
        (("joined_kv", "embed"), "attention_output", "heads out"),
        (("embed", "layers", "mlp"), "mlp_up", "in layers out"),  # MaxText stacks layers on the second
        (("layers", "mlp", "embed"), "mlp_down", "layers in out"),
        (("embed", None, "mlp"), "mlp_up", "in parts out"),
        (("experts", "embed", "mlp"), "expert_up", "experts in out"),
        (("exp", "mlp", "embed_no_exp"), "expert_down", "experts in out"),
        (("height", "width", "conv_in", "conv_out"), "convolution", "space space in out"),
    ],
)
def test_usual_names(names: tuple[str | None, ...], role: str, expected: str) -> None:
    assert described({"w": (8,) * len(names)}, "w", {"w": names}) == (role, tuple(expected.split()))


def test_names_come_before_paths_and_shapes() -> None:
    table = {
        "a/kernel": ((256, 64), P("data", "model")),
        "b/kernel": ((64, 256), P("data", "model")),
        "layers/c": ((4, 64, 16, 8), P(None, "data", "model")),
        "d": ((64, 4, 64), P("data", None, "model")),
    }
    known = (("embed", "mlp"), ("one", "two"), ("layers", "embed", "heads", "kv"), ("embed", "layers", "mlp"))
    names = dict(zip(table, known, strict=True))
    expect(table, mesh(data=2, model=4), names=names)
    shapes = {path: shape for path, (shape, _) in table.items()}
    reasons = {path: each.reason for path, each in placed(shapes, mesh(model=4), names=names).items()}
    assert reasons["a/kernel"].told_from == "axis names ('embed', 'mlp'), which the model gives"
    assert reasons["b/kernel"].told_from == "its shape, which does not narrow"


def test_mesh_axes_that_the_model_names_are_followed() -> None:
    table = {
        "q/w": ((8, 64, 16), P("tp", "fsdp")),
        "experts": ((8, 64, 32), P("fsdp", None, "tp")),
        "norm/w": ((64,), P()),  # a small vector
        "odd/kernel": ((6, 64), P(None, "fsdp")),
    }
    known = (("tp", "fsdp", None), ("fsdp", None, "tp"), ("tp",), ("tp", "fsdp"))
    names, shapes = dict(zip(table, known, strict=True)), {path: shape for path, (shape, _) in table.items()}
    expect(table, mesh(fsdp=2, tp=4), names=names)
    # A mesh whose axes are called otherwise: what they serve for counts.
    assert specs(shapes, mesh(data=2, model=4), names=names)["q/w"] == P("model", "data")
    assert specs(shapes, mesh(data=2, model=4), lm.auto(fsdp=()), names=names)["q/w"] == P("model")
    several = {"w": (None, ("data", "fsdp"))}  # of which this mesh has one
    assert specs({"w": (8, 8)}, mesh(fsdp=2, tp=4), names=several, large=0) == {"w": P("tp", "fsdp")}
    large = {"w/kernel": (1024, 512)}  # an axis that the model does not use is used all the same
    assert specs(large, mesh(fsdp=2, tp=4), names={"w/kernel": (None, "tp")}) == {"w/kernel": P("fsdp", "tp")}


def test_explain_tells_the_reason_and_what_it_was_told_from() -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        attention = {"q_einsum": {"w": jnp.zeros((8, 64, 16))}, "mystery": {"kernel": jnp.zeros((64, 8, 16))}}
        attention["query"] = {"kernel": jnp.zeros((64, 6, 4))}
        return {"attn": attention, "norm": {"scale": jax.random.normal(key, (64,))}, "what": jnp.zeros((2, 3))}

    model = shard_small(lm.build_abstract(init, jax.random.key(0)), mesh(model=8), lm.auto(), large=1024)
    paths = ("attn/q_einsum/w", "attn/mystery/kernel", "what", "attn/query/kernel")
    known, guessed, nothing, odd = (str(model.explain(path)) for path in paths)
    assert "dimensions: heads, in, head_dim; inferred from: its name" in known
    assert "the order of its dimensions is inferred from the model width, 64" in known
    assert "inferred from: a guess: it is in attention, and its name says nothing known" in guessed
    assert "inferred from" not in nothing
    assert "why (proposed): in (64) in 8 parts over 'model'; since dimension 1 (heads, 6) does not divide" in odd
    assert "each of 8 devices holds (8, 6, 4), 768 B" in odd


# --- arrays with names ---


@jax.tree_util.register_pytree_node_class
class _Haliax:
    """As Haliax' class, of that name, lays its array and axes out."""

    def __init__(self, array: Any, axes: tuple[Any, ...]) -> None:
        self.array, self.axes = array, axes

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Any, children: Any) -> Any:
        return cls(*children, axes)


@jax.tree_util.register_pytree_node_class
class _Penzai(_Haliax):
    """The same of Penzai's, whose names are an ordered mapping, after dimensions that have none."""

    data_array = property(lambda self: self.array)
    named_axes = property(lambda self: dict(self.axes))


def test_names_of_named_arrays() -> None:
    _Haliax.__name__ = _Penzai.__name__ = "NamedArray"

    def build(key: jax.Array) -> Any:
        axes = [SimpleNamespace(name=name) for name in ("layers", "heads", "head_size", "embed")]
        bias = _Haliax(jnp.zeros((4, 64)), (axes[0], SimpleNamespace(name="mlp")))
        wide = _Penzai(jax.random.normal(key, (64, 8, 32)), (("embedding", 8), ("neurons", 32)))
        return {
            "w": _Haliax(jax.random.normal(key, (4, 8, 16, 64)), tuple(axes)),
            "b": bias,
            "p": wide,
            "x": jnp.ones(2),
        }

    model = lm.build_abstract(build, jax.random.key(0))
    sharded = shard_small(model, mesh(data=2, model=4), lm.auto(), large=1024)
    assert {path.split("/")[0]: (variable.logical_axes, variable.spec) for path, variable in sharded.items()} == {
        "w": (("layers", "heads", "head_size", "embed"), P(None, "model", None, "data")),
        "b": (("layers", "mlp"), P(None, ("model", "data"))),
        "p": ((None, "embedding", "neurons"), P(None, "data", "model")),
        "x": (None, P()),
    }
    logical = model.shard(mesh(data=2, model=4), [("heads", "model"), ("embed", None), ("neurons", "data")])
    expected = {P(), P(None, None, "data"), P(None, "model", None, None)}
    assert {variable.spec for variable in logical.values()} == expected


def test_what_stays_whole_on_a_mesh_of_data_alone_has_a_reason() -> None:
    def init() -> dict[str, Any]:
        return {
            "depthwise_conv": {"kernel": jnp.zeros((5, 16, 1))},
            "norm": {"scale": jnp.zeros(16)},
            "n": jnp.zeros(()),
        }

    model = shard_small(lm.build_abstract(init), mesh(data=8, model=1), lm.auto(), large=4 << 10)
    reasons = {path: variable.reason.text for path, variable in model.items() if variable.reason is not None}
    assert all(reasons.values()) and list(reasons) == list(model)
    assert reasons["depthwise_conv/kernel"].startswith("replicated: a depthwise_convolution of this size")
