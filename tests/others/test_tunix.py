"""Hugging Face checkpoints in Tunix' models: `load_and_create_model`, tables, and suggestions do what Tunix does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tunix.models import safetensors_loader
from tunix.models.gemma import model as gemma
from tunix.models.gemma import params_safetensors as gemma_params
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_params
from tunix.models.gemma3 import vision
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4 import params_safetensors as gemma4_params
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

import lazymodel as lm
from lazymodel_flax import tunix

pytestmark = pytest.mark.large

LAYERS, VOCAB, SIZE, HIDDEN, HEADS, GROUPS, DIM = 12, 128, 32, 48, 4, 2, 16
_TINY: dict[str, Any] = {
    "num_layers": LAYERS, "embed_dim": SIZE, "hidden_dim": HIDDEN, "num_heads": HEADS, "head_dim": DIM,
    "num_kv_heads": GROUPS,
}  # fmt: skip


def huggingface(
    *, groups: int = GROUPS, norms: tuple[str, ...] = (), experts: int = 0, bias: bool = False, head: bool = True
) -> dict[str, np.ndarray]:
    """A checkpoint of the Llama family, under Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, SIZE), "model.norm.weight": (SIZE,)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name, heads in (("q", HEADS), ("k", groups), ("v", groups)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (heads * DIM, SIZE)
            shapes |= {f"{layer}.self_attn.{name}_proj.bias": (heads * DIM,)} if bias else {}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (SIZE, HEADS * DIM)
        for norm in ("input_layernorm", "post_attention_layernorm", *norms):
            shapes[f"{layer}.{norm}.weight"] = (DIM if "self_attn" in norm else SIZE,)
        for place in [f"experts.{expert}." for expert in range(experts)] or [""]:
            shapes |= {f"{layer}.mlp.{place}{name}_proj.weight": (HIDDEN, SIZE) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.{place}down_proj.weight"] = (SIZE, HIDDEN)
        shapes |= {f"{layer}.mlp.gate.weight": (experts, SIZE)} if experts else {}
    return random(shapes | ({"lm_head.weight": (VOCAB, SIZE)} if head else {}))


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


def huggingface_gemma4(config: gemma4.ModelConfig) -> dict[str, np.ndarray]:
    """A checkpoint of Gemma 4: every sixth layer is global, with experts or inputs for each layer if it has them."""
    small, experts, hidden = config.per_layer_input_dim, config.num_experts, config.expert_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, SIZE), "norm.weight": (SIZE,)}
    if small:
        shapes["embed_tokens_per_layer.weight"] = (VOCAB, LAYERS * small)
        shapes["per_layer_model_projection.weight"] = (LAYERS * small, SIZE)
        shapes["per_layer_projection_norm.weight"] = (small,)
    for number in range(LAYERS):
        whole = number % 6 == 5
        dim = config.global_key_size if whole else DIM
        groups = (config.num_global_kv_heads or GROUPS) if whole else GROUPS
        layer = {"layer_scalar": (1,), "self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        layer |= {"self_attn.q_proj.weight": (HEADS * dim, SIZE), "self_attn.k_proj.weight": (groups * dim, SIZE)}
        layer |= {} if whole and config.k_eq_v_global else {"self_attn.v_proj.weight": (groups * dim, SIZE)}
        layer |= {"self_attn.o_proj.weight": (SIZE, HEADS * dim), "mlp.down_proj.weight": (SIZE, HIDDEN)}
        layer |= {f"mlp.{name}_proj.weight": (HIDDEN, SIZE) for name in ("gate", "up")}
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        layer |= {f"{norm}_layernorm.weight": (SIZE,) for norm in norms}
        if experts:
            norms = ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
            layer |= {f"{norm}.weight": (SIZE,) for norm in norms}
            layer |= {"router.proj.weight": (experts, SIZE), "router.per_expert_scale": (experts,)}
            layer |= {"router.scale": (SIZE,), "experts.gate_up_proj": (experts, 2 * hidden, SIZE)}
            layer |= {"experts.down_proj": (experts, SIZE, hidden)}
        if small:
            layer |= {"per_layer_input_gate.weight": (small, SIZE), "per_layer_projection.weight": (SIZE, small)}
            layer |= {"post_per_layer_input_norm.weight": (SIZE,)}
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return random({f"model.language_model.{name}": shape for name, shape in shapes.items()})


def huggingface_vision() -> dict[str, np.ndarray]:
    """A checkpoint of Gemma 3 with its vision encoder."""
    tower, width, hidden, blocks = "vision_tower.vision_model", 32, 48, 2
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.embeddings.patch_embedding.weight": (width, 3, 14, 14),
        f"{tower}.embeddings.patch_embedding.bias": (width,),
        f"{tower}.embeddings.position_embedding.weight": (1, 16, width),  # Tunix' loader rejects (16, width)
        "multi_modal_projector.mm_input_projection_weight": (width, SIZE),
        "multi_modal_projector.mm_soft_emb_norm.weight": (width,),
    }
    modules = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
    modules |= {"mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden), "layer_norm1": (width,)}
    modules |= {"layer_norm2": (width,)}
    for number in range(blocks):
        for name, shape in modules.items():
            shapes[f"{tower}.encoder.layers.{number}.{name}.weight"] = shape
            shapes[f"{tower}.encoder.layers.{number}.{name}.bias"] = shape[:1]
    shapes |= {f"{tower}.post_layernorm.{part}": (width,) for part in ("weight", "bias")}
    text = huggingface(norms=QK + FFW, head=False)
    return random(shapes) | {f"language_model.{name}": tensor for name, tensor in text.items()}


QK = ("self_attn.q_norm", "self_attn.k_norm")
FFW = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
LLAMA = dataclasses.replace(llama3.ModelConfig.llama3p1_8b(), vocab_size=VOCAB, **_TINY)
QWEN2 = dataclasses.replace(qwen2.ModelConfig.qwen2p5_7b(), vocab_size=VOCAB, **_TINY)
QWEN3 = dataclasses.replace(qwen3.ModelConfig.qwen3_8b(), vocab_size=VOCAB, **_TINY)
GEMMA2 = dataclasses.replace(gemma.ModelConfig.gemma2_9b(), num_embed=VOCAB, **_TINY)
GEMMA3 = dataclasses.replace(gemma3.ModelConfig.gemma3_1b_it(), num_embed=VOCAB, **_TINY)
VISION = vision.SigLIPConfig(width=32, depth=2, mlp_dim=48, num_heads=2, image_height=56, image_width=56)
_GEMMA4: dict[str, Any] = {**_TINY, "num_embed": VOCAB, "global_key_size": 24}
_MOE4: dict[str, Any] = {"num_global_kv_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "expert_dim": 40}
GEMMA4 = {
    "gemma4 e4b": dataclasses.replace(gemma4.ModelConfig.gemma4_e4b(), **_GEMMA4, per_layer_input_dim=8),
    "gemma4 31b": dataclasses.replace(gemma4.ModelConfig.gemma4_31b(), **_GEMMA4, num_global_kv_heads=4),
    "gemma4 experts": dataclasses.replace(
        gemma4.ModelConfig.gemma4_26b_a4b(), **_GEMMA4, **_MOE4, moe_dense_hidden_dim=HIDDEN
    ),
}
Case = tuple[Any, Any, Any, Any, dict[str, np.ndarray]]  # class, Tunix' loader, our table, config, tensors
CASES: dict[str, Case] = {
    "llama": (llama3.Llama3, llama3_params, tunix.llama3, LLAMA, huggingface()),
    "tied llama": (llama3.Llama3, llama3_params, tunix.llama3, dataclasses.replace(LLAMA, weight_tying=True),
                   huggingface(head=False)),
    "qwen2": (qwen2.Qwen2, qwen2_params, tunix.qwen2, QWEN2, huggingface(bias=True)),
    "qwen3": (qwen3.Qwen3, qwen3_params, tunix.qwen3, QWEN3, huggingface(norms=QK)),
    "tied qwen3": (qwen3.Qwen3, qwen3_params, tunix.qwen3, dataclasses.replace(QWEN3, use_tied_embedding=True),
                   huggingface(norms=QK)),
    "qwen3 experts": (qwen3.Qwen3, qwen3_params, tunix.qwen3,
                      dataclasses.replace(QWEN3, num_experts=12, num_experts_per_tok=2),
                      huggingface(norms=QK, experts=12)),
    "gemma2": (gemma.Gemma, gemma_params, tunix.gemma, GEMMA2, huggingface(norms=FFW, head=False)),
    "gemma3": (gemma3.Gemma3, gemma3_params, tunix.gemma3, GEMMA3, huggingface(norms=QK + FFW, head=False)),
    "fused gemma3": (gemma3.Gemma3, gemma3_params, tunix.gemma3, dataclasses.replace(GEMMA3, num_kv_heads=HEADS),
                     huggingface(groups=HEADS, norms=QK + FFW, head=False)),
    "gemma3 with vision": (gemma3.Gemma3, gemma3_params, tunix.gemma3,
                           dataclasses.replace(GEMMA3, vision_config=VISION), huggingface_vision()),
    **{name: (gemma4.Gemma4, gemma4_params, tunix.gemma4, config, huggingface_gemma4(config))
       for name, config in GEMMA4.items()},
}  # fmt: skip
SUGGESTED = [case for case in CASES if "gemma4" not in case and "vision" not in case]


def assert_same(model: Any, reference: Any, *, exactly: bool) -> None:
    """Asserts equal leaves; with `exactly`, also their dtypes and shardings."""
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(each))) for each in (model, reference))
    assert ours.keys() == theirs.keys()
    for path, variable in theirs.items():
        expected, found = variable[...], ours[path][...]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected.astype(found.dtype)), str(path))
        assert not exactly or found.dtype == expected.dtype, path
        assert not exactly or found.sharding.is_equivalent_to(expected.sharding, found.ndim), path


@pytest.mark.parametrize(("sharded", "dtype"), [(False, None), (True, None), (True, jnp.bfloat16)])
@pytest.mark.parametrize("case", CASES)
def test_models_are_those_of_tunix(
    case: str, sharded: bool, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, params, _, config, tensors = CASES[case]
    save_file(tensors, tmp_path / "model.safetensors")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp")) if sharded else None
    expected = params.create_model_from_safe_tensors(str(tmp_path), config, mesh, dtype)
    monkeypatch.setattr(safetensors_loader, "load_and_create_model", tunix.load_and_create_model)
    assert_same(params.create_model_from_safe_tensors(str(tmp_path), config, mesh, dtype), expected, exactly=True)


@pytest.mark.parametrize("case", CASES)
def test_a_table_loads_and_saves(case: str, tmp_path: Path, mesh8: jax.sharding.Mesh) -> None:
    cls, params, table, config, tensors = CASES[case]
    save_file(tensors, tmp_path / "model.safetensors")
    abstract = lm.build_abstract(cls, config, rngs=nnx.Rngs(params=0)).shard(mesh8, lm.auto())
    with lm.open_checkpoint(tmp_path) as checkpoint:
        mapping = table(config, checkpoint)
        model = abstract.materialize(lm.map_checkpoint(checkpoint, mapping, abstract), initialize="nothing")
    assert_same(model, params.create_model_from_safe_tensors(str(tmp_path), config), exactly=False)
    lm.save(model, tmp_path / "again", mapping=mapping)
    with lm.open_checkpoint(tmp_path / "again") as again:
        assert again.keys() == tensors.keys() - ({"lm_head.weight"} if case.startswith("tied") else set())
        assert all(np.array_equal(again[name].read(), tensors[name].astype(again[name].dtype)) for name in again)


@pytest.mark.parametrize("case", SUGGESTED)
def test_a_suggested_table(case: str, tmp_path: Path) -> None:
    cls, params, _, config, tensors = CASES[case]
    save_file(tensors, tmp_path / "model.safetensors")
    abstract = lm.build_abstract(cls, config, rngs=nnx.Rngs(params=0))
    with lm.open_checkpoint(tmp_path) as checkpoint:
        mapping = lm.WeightMap.suggest(checkpoint, abstract)
        # A head that a tied model has no variable for is for the user to ignore.
        mapped = lm.map_checkpoint(checkpoint, mapping, abstract, strict=case != "tied qwen3")
        model = abstract.materialize(mapped, initialize="nothing")
    assert_same(model, params.create_model_from_safe_tensors(str(tmp_path), config), exactly=False)
