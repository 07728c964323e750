"""`auto`: what each role is given on each kind of mesh, and that a proposal always fits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._abstract.variable import Reason
from lazymodel._sharding.auto import Auto
from lazymodel._sharding.describe import describe
from lazymodel._sharding.shard import check_spec
from tests.collectives import sent_nbytes


def mesh(**axes: int) -> Mesh:
    size = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:size]).reshape(tuple(axes.values())), tuple(axes))


def variables(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, lm.AbstractVariable]:
    return {path: lm.AbstractVariable(path, shape, np.dtype(dtype)) for path, shape in shapes.items()}


def propose(
    shapes: dict[str, tuple[int, ...]], mesh: Mesh, rules: Auto | None = None, *, large: int = 1 << 20
) -> dict[str, tuple[P, Reason]]:
    model = variables(shapes)
    proposals = (rules or lm.auto()).propose(model, mesh, large=large)
    for path, (spec, _) in proposals.items():
        check_spec(model[path], spec, mesh)
    return proposals


def specs(shapes: dict[str, tuple[int, ...]], mesh: Mesh, rules: Auto | None = None, **options: int) -> dict[str, P]:
    return {path: spec for path, (spec, _) in propose(shapes, mesh, rules, **options).items()}


LAYER = {
    "token_embedding/embeddings": (64, 32),
    "layer_0/attention/query/kernel": (32, 8, 4),
    "layer_0/attention/query/bias": (8, 4),
    "layer_0/attention/key/kernel": (32, 2, 4),
    "layer_0/attention/attention_output/kernel": (8, 4, 32),
    "layer_0/attention/attention_output/bias": (32,),
    "layer_0/layer_norm/gamma": (32,),
    "layer_0/mlp/gate/kernel": (32, 128),
    "layer_0/mlp/gate/bias": (128,),
    "layer_0/mlp/down/kernel": (128, 32),
    "layer_0/mlp/down/bias": (32,),
    "seed_generator_state": (2,),
}


def test_a_transformer_layer_by_tensor_parallelism() -> None:
    assert specs(LAYER, mesh(model=8)) == {
        "token_embedding/embeddings": P("model"),
        "layer_0/attention/query/kernel": P(None, "model"),
        "layer_0/attention/query/bias": P("model"),
        "layer_0/attention/key/kernel": P(),  # two heads are not split into eight
        "layer_0/attention/attention_output/kernel": P("model"),
        "layer_0/attention/attention_output/bias": P(),
        "layer_0/layer_norm/gamma": P(),
        "layer_0/mlp/gate/kernel": P(None, "model"),
        "layer_0/mlp/gate/bias": P("model"),
        "layer_0/mlp/down/kernel": P("model"),
        "layer_0/mlp/down/bias": P(),
        "seed_generator_state": P(),
    }


def test_layers_may_be_arrays_of_their_own() -> None:
    layer = {path: shape for path, shape in LAYER.items() if not path.endswith("bias")}
    bare = {path.removesuffix("/kernel").replace("attention_output", "out"): shape for path, shape in layer.items()}
    assert list(specs(bare, mesh(model=8)).values()) == list(specs(layer, mesh(model=8)).values())


def test_a_transformer_layer_by_both() -> None:
    found = specs(LAYER, mesh(batch=2, model=4))
    assert found["token_embedding/embeddings"] == P("model", "batch")
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
    _, reason = propose(attention, mesh(model=4))["attn/k_proj/kernel"]
    assert reason.tried == (
        "dimension 1 (heads, 24) is not split into 4 parts over 'model': its 2 heads do not divide",
    )
    del attention["attn/q_norm/scale"]  # no head is wider than 24 columns, the common divisor of queries and keys
    assert specs(attention, mesh(model=4))["attn/q_proj/kernel"] == P(None, "model")
    del attention["attn/k_proj/kernel"]
    spec, reason = propose(attention, mesh(model=4), large=1)["attn/q_proj/kernel"]
    assert (spec, "whole heads in it are not known" in reason.text) == (P("model"), True)
    # Queries, keys and values of one width up to 1024 have heads of 64 or less; a narrower key tells of wider ones.
    equal = {"attn/q_proj/kernel": (256, 512), "attn/k_proj/kernel": (256, 512)}
    assert set(specs(equal, mesh(model=8)).values()) == {P(None, "model")}
    assert specs({**equal, "attn/k_proj/kernel": (256, 256)}, mesh(model=8))["attn/q_proj/kernel"] == P()
    # Eight pieces of 128 columns hold whole heads of 16 to 128.
    assert specs({"attn/q_proj/kernel": (48, 1024)}, mesh(model=8)) == {"attn/q_proj/kernel": P(None, "model")}
    assert specs({"attn/qkv/kernel": (48, 1536)}, mesh(model=8)) == {"attn/qkv/kernel": P("model")}


def test_pytorch_order() -> None:
    shapes = {"mlp/up_proj/weight": (64, 16), "mlp/up_proj/bias": (64,), "mlp/down_proj/weight": (16, 64)}
    assert specs(shapes, mesh(model=8)) == {
        "mlp/up_proj/weight": P("model"),
        "mlp/up_proj/bias": P("model"),
        "mlp/down_proj/weight": P(None, "model"),
    }


def test_experts() -> None:
    moe = {
        "moe/router/kernel": (16, 4),
        "moe/experts/gate_proj": (4, 16, 32),
        "moe/experts/down_proj": (4, 32, 16),
        "dense/up/kernel": (16, 32),
    }
    assert specs(moe, mesh(model=4)) == {
        "moe/router/kernel": P(),
        "moe/experts/gate_proj": P("model"),
        "moe/experts/down_proj": P("model"),
        "dense/up/kernel": P(None, "model"),
    }
    assert specs(moe, mesh(expert=2, model=4)) == {
        "moe/router/kernel": P(),
        "moe/experts/gate_proj": P("expert", None, "model"),
        "moe/experts/down_proj": P("expert", "model"),
        "dense/up/kernel": P("expert", "model"),
    }
    # Whole experts on all devices, whose sum is sent once; too few for that, on those along one axis.
    assert specs(moe, mesh(data=2, model=2))["moe/experts/gate_proj"] == P(("model", "data"))
    assert specs(moe, mesh(data=2, model=4), large=1)["moe/experts/gate_proj"] == P("model", "data")
    # Four experts do not go on eight devices: what is inside them does.
    assert specs(moe, mesh(model=8))["moe/experts/gate_proj"] == P(None, None, "model")
    assert specs(moe, mesh(model=8))["moe/experts/down_proj"] == P(None, "model")


def test_convolutions_tables_and_heads_of_models() -> None:
    shapes = {
        "conv/kernel": (3, 3, 8, 16),
        "stem_conv/kernel": (3, 3, 16, 3),
        "block/depthwise_kernel": (3, 3, 16, 1),
        "position_embedding/embeddings": (128, 16),
        "token_embedding/embeddings": (50257, 64),
        "token_embedding/reverse_embeddings": (64, 4096),
        "lm_head/kernel": (64, 4096),
    }
    found = specs(shapes, mesh(model=8))
    assert found == {
        "conv/kernel": P(None, None, None, "model"),
        "stem_conv/kernel": P(None, None, "model"),
        "block/depthwise_kernel": P(None, None, "model"),
        "position_embedding/embeddings": P(),
        "token_embedding/embeddings": P(None, "model"),
        "token_embedding/reverse_embeddings": P(None, "model"),
        "lm_head/kernel": P(None, "model"),
    }
    assert specs(shapes, mesh(model=8), large=0)["position_embedding/embeddings"] == P("model")


def test_what_belongs_to_a_weight_is_split_like_it() -> None:
    shapes = {
        "attention/query/kernel": (32, 8, 4),
        "attention/query/lora_kernel_a": (32, 8, 2),
        "attention/query/lora_kernel_b": (2, 4),
        "attention/query/kernel_scale": (1, 8, 4),
        "up/_kernel": (32, 64),
        "up/kernel_scale": (64,),
        "up/lora_kernel_a": (32, 2),
        "up/lora_kernel_b": (2, 64),
        "embedding/embeddings": (64, 16),
        "embedding/embeddings_scale": (64,),
        "embedding/lora_embeddings_a": (64, 2),
        "embedding/lora_embeddings_b": (2, 16),
        "adam/up__kernel_momentum": (32, 64),
        "adam/up__kernel_velocity": (32, 64),
        "adafactor/embedding_embeddings_row": (64,),
        "adafactor/embedding_embeddings_column": (16,),
        "opt_state/0/mu/attention/query/kernel": (32, 8, 4),
        "opt_state/0/count": (),
    }
    assert specs(shapes, mesh(data=2, model=4)) == {
        "attention/query/kernel": P("data", "model"),
        "attention/query/lora_kernel_a": P(None, "model"),
        "attention/query/lora_kernel_b": P(),
        "attention/query/kernel_scale": P(None, "model"),
        "up/_kernel": P("data", "model"),
        "up/kernel_scale": P("model"),
        "up/lora_kernel_a": P(),
        "up/lora_kernel_b": P(None, "model"),
        "embedding/embeddings": P("model", "data"),
        "embedding/embeddings_scale": P("model"),
        "embedding/lora_embeddings_a": P("model"),
        "embedding/lora_embeddings_b": P(),
        "adam/up__kernel_momentum": P("data", "model"),
        "adam/up__kernel_velocity": P("data", "model"),
        "adafactor/embedding_embeddings_row": P("model"),
        "adafactor/embedding_embeddings_column": P("data"),
        "opt_state/0/mu/attention/query/kernel": P("data", "model"),
        "opt_state/0/count": P(),
    }


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
    shapes = {
        "layers/norm/scale": (8, 32),
        "layers/attn/query/kernel": (8, 32, 8, 4),
        "layers/mlp/up/kernel": (8, 32, 64),
        "layers/mlp/up/bias": (8, 64),
        "layers/mlp/down/kernel": (8, 64, 32),
    }
    assert specs(shapes, mesh(data=2, model=4)) == {
        "layers/norm/scale": P(),
        "layers/attn/query/kernel": P(None, "data", "model"),
        "layers/mlp/up/kernel": P(None, "data", "model"),
        "layers/mlp/up/bias": P(None, "model"),
        "layers/mlp/down/kernel": P(None, "model", "data"),
    }
    assert describe(variables(shapes))["layers/mlp/up/kernel"].labels == ("layers", "in", "out")
    assert specs(shapes, mesh(model=8), large=0)["layers/norm/scale"] == P(None, "model")


@pytest.mark.parametrize("size", [3, 6])
def test_odd_meshes_fall_to_what_divides(size: int) -> None:
    odd = mesh(batch=1, model=size)
    shapes = {"a/up/kernel": (12, 32), "b/up/kernel": (16, 32), "attention/query/kernel": (24, 4, 8)}
    found = propose(shapes, odd, large=0)
    assert found["a/up/kernel"][0] == P("model")
    assert found["a/up/kernel"][1].tried == (f"dimension 1 (out, 32) does not divide into {size} parts over 'model'",)
    assert found["b/up/kernel"][0] == P()
    assert found["b/up/kernel"][1].text == "replicated: no dimension divides by any axis of the mesh"
    assert found["attention/query/kernel"][0] == P("model")


def test_what_one_axis_of_several_got_is_not_given_it_again() -> None:
    assert specs({"token_embedding/embeddings": (2, 2)}, mesh(fsdp=2, expert=4), large=0) == {
        "token_embedding/embeddings": P(None, "fsdp")
    }


@settings(max_examples=60, deadline=None)
@given(
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
    found = propose(shapes, found_mesh, large=large)  # which checks that each fits
    assert found == propose(shapes, found_mesh, large=large)
    for path, (spec, reason) in found.items():
        sizes = [size for size in axes if size > 1]
        splittable = any(length and length % size == 0 for length in shapes[path] for size in sizes)
        if 4 * math.prod(shapes[path]) >= max(large, 1) and splittable:
            assert any(spec), (path, shapes[path], reason)


def test_the_reason_is_told() -> None:
    def init(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
        return {"attention/query": {"kernel": jax.random.normal(key, (32, 6, 4))}}

    abstract = lm.build_abstract(init, jax.random.key(0))
    small = abstract.shard(mesh(model=4), lm.auto()).explain("attention/query/kernel")
    assert "why (proposed): replicated, since dimension 1 (heads, 6) does not divide" in str(small)
    model = abstract.shard(mesh(model=4), lm.auto(), large=1024)
    text = str(model.explain("attention/query/kernel"))
    assert "role: query_key_value; dimensions: in, heads, head_dim" in text
    assert "why (proposed): in (32) in 4 parts over 'model'; since dimension 1 (heads, 6) does not divide" in text
    assert "each of 4 devices holds (8, 6, 4), 768 B" in text


def test_columns_then_rows_send_less_than_rows_then_columns() -> None:
    mesh8 = mesh(model=8)

    def sent(*specs: P) -> int:
        shapes = ((16, 64), (64, 256), (256, 64))
        places = [NamedSharding(mesh8, spec) for spec in (P(), *specs)]
        structs = [jax.ShapeDtypeStruct(s, "float32", sharding=p) for s, p in zip(shapes, places, strict=True)]
        mlp = jax.jit(lambda x, up, down: jnp.tanh(x @ up) @ down, out_shardings=NamedSharding(mesh8, P()))
        return sent_nbytes(mlp.lower(*structs).compile())

    proposed = specs({"layer_0/up/kernel": (64, 256), "layer_0/down/kernel": (256, 64)}, mesh8, large=1)
    one_all_reduce = 2 * 16 * 64 * 4 * 7 // 8
    assert sent(*proposed.values()) == one_all_reduce < sent(P("model"), P(None, "model"))
