"""`auto` on layouts of other packages: axis names that a model carries, and shapes and neighbours where it has none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._sharding.axis_names import are_mesh_axes, role_of_names
from lazymodel._sharding.describe import Described, describe

Names = dict[str, tuple[Any, ...]]
NORM = {"layers/0/pre_attention_norm/scale": (64,)}


def mesh(**axes: int) -> Mesh:
    sizes = tuple(axes.values())
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), tuple(axes))


def variables(shapes: dict[str, tuple[int, ...]], names: Names | None = None) -> dict[str, lm.AbstractVariable]:
    made = {path: lm.AbstractVariable(path, shape, np.dtype("float32")) for path, shape in shapes.items()}
    for path, axes in (names or {}).items():
        made[path] = dataclasses.replace(made[path], logical_axes=axes)
    return made


def specs(shapes: dict[str, tuple[int, ...]], names: Names | None, mesh: Mesh, **options: Any) -> dict[str, P]:
    proposals = lm.auto(**options).propose(variables(shapes, names), mesh, large=1 << 20)
    return {path: spec for path, (spec, _) in proposals.items()}


def labels(shapes: dict[str, tuple[int, ...]], path: str) -> tuple[str, tuple[str, ...]]:
    found: Described = describe(variables(shapes))[path]
    return found.role, found.labels


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
    ],
)
def test_what_shapes_and_neighbours_tell(name: str, shape: tuple[int, ...], role: str, expected: str) -> None:
    path = f"layers/0/{name}"
    assert labels({**NORM, path: shape}, path) == (role, tuple(expected.split()))


def test_a_head_is_never_split_where_the_order_of_dimensions_is_anothers() -> None:
    gemma = {
        **NORM,
        "layers/0/attn/q_einsum/w": (8, 64, 16),
        "layers/0/attn/kv_einsum/w": (2, 4, 64, 16),
        "layers/0/attn/attn_vec_einsum/w": (8, 16, 64),
    }
    assert specs(gemma, None, mesh(fsdp=2, tp=4)) == {
        "layers/0/pre_attention_norm/scale": P(),
        "layers/0/attn/q_einsum/w": P("tp", "fsdp"),
        "layers/0/attn/kv_einsum/w": P(None, "tp", "fsdp"),
        "layers/0/attn/attn_vec_einsum/w": P("tp", None, "fsdp"),
    }


@pytest.mark.parametrize(("up", "down"), [("gate_proj", "down_proj"), ("w_in", "w_back"), ("gating_einsum", "linear")])
def test_experts_under_any_name(up: str, down: str) -> None:
    shapes = {
        **NORM,
        "layers/0/mlp/router/kernel": (64, 8),
        f"layers/0/mlp/{up}": (8, 64, 96),
        f"layers/0/mlp/{down}": (8, 96, 64),
    }
    assert labels(shapes, f"layers/0/mlp/{up}") == ("expert_up", ("experts", "in", "out"))
    assert labels(shapes, f"layers/0/mlp/{down}") == ("expert_down", ("experts", "in", "out"))
    # Beside their router they are used one by one, and split as any MLP where parameters are stored in pieces too.
    found = specs(shapes, None, mesh(data=2, model=4))
    assert [found[f"layers/0/mlp/{name}"] for name in (up, down)] == [
        P(None, "data", "model"),
        P(None, "model", "data"),
    ]
    assert specs(shapes, None, mesh(model=8))[f"layers/0/mlp/{up}"] == P("model")
    # Gemma 4 keeps a gate and what it multiplies together, and both the other way round.
    turned = {**shapes, "layers/0/mlp/gating_einsum": (8, 2, 96, 64)}
    assert labels(turned, "layers/0/mlp/gating_einsum") == ("expert_up", ("experts", "parts", "out", "in"))


def test_blocks_of_a_diagonal_gate_are_no_experts() -> None:
    shapes = {"rg_lru/a_gate/w": (8, 16, 16), "rg_lru/a_gate/b": (8, 16), "rg_lru/a_param": (128,)}
    assert labels(shapes, "rg_lru/a_gate/w") == ("block_diagonal", ("blocks", "in", "out"))
    found = specs(shapes, None, mesh(model=8))
    assert (found["rg_lru/a_gate/w"], found["rg_lru/a_gate/b"]) == (P("model"), P("model"))


def test_one_key_head_tells_how_wide_heads_are() -> None:
    attention = {"attention_block/proj_q/kernel": (64, 80), "attention_block/proj_k/kernel": (64, 10)}
    assert specs(attention, None, mesh(model=8)) == {
        "attention_block/proj_q/kernel": P(None, "model"),
        "attention_block/proj_k/kernel": P(),
    }


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
    assert role_of_names(names, None) == (role, tuple(expected.split()))


def test_names_come_before_paths_and_shapes() -> None:
    shapes = {"a/kernel": (256, 64), "b/kernel": (64, 256), "layers/c": (4, 64, 16, 8), "d": (64, 4, 64)}
    names = {
        "a/kernel": ("embed", "mlp"),
        "b/kernel": ("one", "two"),  # nothing known
        "layers/c": ("layers", "embed", "heads", "kv"),
        "d": ("embed", "layers", "mlp"),
    }
    assert specs(shapes, names, mesh(data=2, model=4)) == {
        "a/kernel": P("data", "model"),
        "b/kernel": P("data", "model"),
        "layers/c": P(None, "data", "model"),
        "d": P("data", None, "model"),
    }
    described = describe(variables(shapes, names))
    assert described["a/kernel"].told_from == "axis names ('embed', 'mlp'), which the model gives"
    assert described["b/kernel"].told_from == "its shape, which does not narrow"


def test_mesh_axes_that_the_model_names_are_followed() -> None:
    shapes = {"q/w": (8, 64, 16), "experts": (8, 64, 32), "norm/w": (64,), "odd/kernel": (6, 64)}
    names: Names = {
        "q/w": ("tp", "fsdp", None),
        "experts": ("fsdp", None, "tp"),
        "norm/w": ("tp",),
        "odd/kernel": ("tp", "fsdp"),
    }
    assert specs(shapes, names, mesh(fsdp=2, tp=4)) == {
        "q/w": P("tp", "fsdp"),
        "experts": P("fsdp", None, "tp"),
        "norm/w": P(),  # a small vector
        "odd/kernel": P(None, "fsdp"),
    }
    # A mesh whose axes are called otherwise: what they serve for counts.
    assert specs(shapes, names, mesh(data=2, model=4))["q/w"] == P("model", "data")
    assert specs(shapes, names, mesh(data=2, model=4), fsdp=())["q/w"] == P("model")
    assert are_mesh_axes((("data", "fsdp"), None), ()) and not are_mesh_axes((None, None), ("x",))
    large = {"w/kernel": (1024, 512)}  # an axis that the model does not use is used all the same
    assert specs(large, {"w/kernel": (None, "tp")}, mesh(fsdp=2, tp=4)) == {"w/kernel": P("fsdp", "tp")}


def test_explain_tells_what_it_was_told_from() -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        attention = {"q_einsum": {"w": jnp.zeros((8, 64, 16))}, "mystery": {"kernel": jnp.zeros((64, 8, 16))}}
        return {"attn": attention, "norm": {"scale": jax.random.normal(key, (64,))}, "what": jnp.zeros((2, 3))}

    model = lm.build_abstract(init, jax.random.key(0)).shard(mesh(model=8), lm.auto())
    known, guessed, nothing = (str(model.explain(path)) for path in ("attn/q_einsum/w", "attn/mystery/kernel", "what"))
    assert "dimensions: heads, in, head_dim; told from: its name" in known
    assert "the order of its dimensions is told by the model width, 64" in known
    assert "told from: a guess: it is in attention, and its name says nothing known" in guessed
    assert "told from" not in nothing


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
    by_name = {path.split("/")[0]: variable for path, variable in model.items()}
    assert {name: variable.logical_axes for name, variable in by_name.items()} == {
        "w": ("layers", "heads", "head_size", "embed"),
        "b": ("layers", "mlp"),
        "p": (None, "embedding", "neurons"),
        "x": None,
    }
    sharded = model.shard(mesh(data=2, model=4), lm.auto(), large=1024)
    specs = {path.split("/")[0]: variable.spec for path, variable in sharded.items()}
    assert specs == {
        "w": P(None, "model", None, "data"),
        "b": P(None, ("model", "data")),
        "p": P(None, "data", "model"),
        "x": P(),
    }
    logical = model.shard(mesh(data=2, model=4), [("heads", "model"), ("embed", None), ("neurons", "data")])
    assert [variable.spec for variable in logical.values()] == [
        P(),
        P(None, None, "data"),
        P(None, "model", None, None),
        P(),
    ]
