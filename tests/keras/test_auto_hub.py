"""`auto` on every KerasHub backbone: specs that fit, the same outputs of some, published layouts equalled."""

from __future__ import annotations

from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import sent_nbytes
from tests.large import mostly_large
from tests.small import shard_small

from .hub_configs import BACKBONES
from .models import device_mesh, outputs_of

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*:UserWarning")  # of the backbones themselves

SHAPES = [(1, 8), (2, 4), (8, 1), (1, 3), (1, 6)]
# A few of different kinds in every test run; `test_every_model` has all of them.
SOME = ("GemmaBackbone", "MixtralBackbone", "BertBackbone", "GPTNeoXBackbone", "ViTBackbone", "VGGBackbone")
WORKING = {name: model for name, model in BACKBONES.items() if not model.build_error}


def hub_mesh(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("batch", "model"))


def check_specs(abstract: lm.AbstractModel, shape: tuple[int, int]) -> lm.AbstractModel:
    """Shards, and checks that every variable has a spec and that nothing is whole which could be split, if large."""
    sharded = shard_small(abstract, hub_mesh(shape), lm.auto(), large=4 << 10)
    for path, variable in sharded.items():
        assert variable.reason is not None, path
        assert variable.reason.text, path
        whole = variable.shard_nbytes == variable.nbytes
        sizes = [size for size in shape if size > 1]
        if whole and variable.nbytes >= 4096:
            assert not any(length % size == 0 for length in variable.shape for size in sizes), sharded.explain(path)
    return sharded


@pytest.mark.parametrize("name", mostly_large(SOME, SOME[:1]))
def test_forward_equals_one_device(name: str) -> None:
    """The sharded model computes what the same model on one device computes."""
    keras.utils.set_random_seed(3)
    abstract = lm.build_abstract(WORKING[name].build)
    alone = abstract.materialize()
    for shape in SHAPES[1:2] if name == SOME[0] else SHAPES:
        found = outputs_of(check_specs(abstract, shape).materialize())
        for one, other in zip(outputs_of(alone), found, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4, err_msg=f"{name} {shape}")


# --- published layouts ---

_LLAMA = {
    "vocabulary_size": 256, "num_layers": 1, "num_query_heads": 8, "num_key_value_heads": 8, "hidden_dim": 64,
    "intermediate_dim": 256,
}  # fmt: skip
_GEMMA = {**_LLAMA, "head_dim": 16}
_QWEN3_MOE = {**_GEMMA, "moe_intermediate_dim": 32, "num_experts": 8, "top_k": 2}


def sent(abstract: lm.AbstractModel, model: Any, mesh: Mesh) -> int:
    """Bytes that each device sends in a forward pass of 8 sequences of 32 tokens, split over `batch`."""

    def forward(values: list[Any], tokens: Any) -> Any:
        pairs = list(zip(model.variables, values, strict=True))
        trainable = [value for variable, value in pairs if variable.trainable]
        rest = [value for variable, value in pairs if not variable.trainable]
        return model.stateless_call(trainable, rest, {"token_ids": tokens, "padding_mask": tokens})[0]

    tokens = jax.ShapeDtypeStruct((8, 32), "int32", sharding=NamedSharding(mesh, P("batch")))
    structs = [variable.struct for variable in abstract.values()]
    return sent_nbytes(jax.jit(forward).lower(structs, tokens).compile())


@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.large) for shape in SHAPES[1:3])], ids=str
)
@pytest.mark.parametrize(
    ("cls", "config"),
    [(keras_hub.models.GemmaBackbone, _GEMMA), (keras_hub.models.LlamaBackbone, _LLAMA)],
    ids=["gemma", "llama"],
)
def test_published_layouts_are_equalled_or_bettered(cls: Any, config: dict[str, int], shape: tuple[int, int]) -> None:
    abstract, model = lm.build_abstract(cls, **config), cls(**config)
    mesh = hub_mesh(shape)
    published = shard_small(abstract, mesh, cls.get_layout_map(device_mesh(*shape)), on_unmatched="ignore")
    proposed = abstract.shard(mesh, lm.auto())
    assert proposed.explain().fullest_nbytes <= published.explain().fullest_nbytes
    assert sent(proposed, model, mesh) <= sent(published, model, mesh)


@pytest.mark.large
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_experts_in_pieces_send_no_more_than_whole_ones(shape: tuple[int, int]) -> None:
    """The published layout keeps every expert on every device. Over eight of `batch` alone, that sends less."""
    test_published_layouts_are_equalled_or_bettered(keras_hub.models.Qwen3MoeBackbone, _QWEN3_MOE, shape)


def test_repair_of_a_published_layout_that_does_not_fit() -> None:
    """Gemma with one key-value head: the published layout splits that head into eight."""
    mesh = device_mesh(1, 8)
    cls = keras_hub.models.GemmaBackbone
    abstract = lm.build_abstract(cls, **{**_GEMMA, "num_key_value_heads": 1})
    layout_map = cls.get_layout_map(mesh)
    layout_map["gone"] = ("model",)
    sharded = abstract.shard(mesh, layout_map, on_unmatched="auto")
    report = sharded.explain()
    assert list(report.repaired) == [f"decoder_block_0/attention/{name}/kernel" for name in ("key", "value")]
    assert sharded["decoder_block_0/attention/key/kernel"].spec == P()  # small, and each device needs the whole head
    assert report.notes == ("rule 'gone' matches no variable",)


# --- real sizes, by arithmetic ---

_LLAMA3_8B = {
    "vocabulary_size": 128256, "num_layers": 32, "num_query_heads": 32, "num_key_value_heads": 8, "hidden_dim": 4096,
    "intermediate_dim": 14336,
}  # fmt: skip
_GEMMA2_9B = {
    "vocabulary_size": 256000, "num_layers": 42, "num_query_heads": 16, "num_key_value_heads": 8, "hidden_dim": 3584,
    "intermediate_dim": 28672, "head_dim": 256, "use_post_ffw_norm": True, "use_post_attention_norm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (keras_hub.models.GemmaBackbone, _GEMMA2_9B),
        (keras_hub.models.Llama3Backbone, _LLAMA3_8B),
        (keras_hub.models.MixtralBackbone, {**_LLAMA3_8B, "vocabulary_size": 32000, "num_experts": 8, "top_k": 2}),
    ],
    ids=["gemma2-9b", "llama3-8b", "mixtral-8x7b"],
)
def test_real_sizes_are_split_evenly(cls: Any, config: dict[str, Any]) -> None:
    abstract = lm.build_abstract(cls, **config, dtype="bfloat16")
    for shape in ((1, 8), (4, 2)):
        report = abstract.shard(hub_mesh(shape), lm.auto()).explain()
        assert report.imbalance < 1.001
        assert report.fullest_nbytes == report.emptiest_nbytes
        assert report.replicated_nbytes < 3 << 20  # norms and routers
        tensor = abstract.shard(hub_mesh(shape), lm.auto(fsdp=())).explain()
        assert tensor.fullest_nbytes / abstract.nbytes == pytest.approx(1 / shape[1], rel=0.001)


def test_adapters() -> None:
    """What `enable_lora` adds is split like the weights that it belongs to."""

    def build() -> Any:
        model = keras_hub.models.GemmaBackbone(**_GEMMA)
        model.enable_lora(rank=4)
        return model

    sharded = lm.build_abstract(build).shard(hub_mesh((1, 8)), lm.auto())
    query = "decoder_block_0/attention/query"
    assert sharded[f"{query}/kernel"].spec == P("model")
    assert sharded[f"{query}/lora_kernel_a"].spec == P("model")
    assert sharded[f"{query}/lora_kernel_b"].spec == P()
