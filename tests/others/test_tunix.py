"""Hugging Face checkpoints in Tunix' models: tables, given and suggested, load what Tunix' own loaders load."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tunix.models.gemma import model as gemma
from tunix.models.gemma import params_safetensors as gemma_params
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_params
from tunix.models.gemma3 import vision
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

import lazymodel as lm
from lazymodel_flax import tunix

from .support_table import leaves

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
    shapes |= {"lm_head.weight": (VOCAB, SIZE)} if head else {}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


QK = ("self_attn.q_norm", "self_attn.k_norm")
FFW = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
LLAMA = dataclasses.replace(llama3.ModelConfig.llama3p1_8b(), vocab_size=VOCAB, **_TINY)
QWEN3 = dataclasses.replace(qwen3.ModelConfig.qwen3_8b(), vocab_size=VOCAB, **_TINY)
GEMMA3 = dataclasses.replace(gemma3.ModelConfig.gemma3_1b_it(), num_embed=VOCAB, **_TINY)
CASES: dict[str, tuple[Any, Any, Any, Any, dict[str, np.ndarray]]] = {
    "llama": (llama3.Llama3, llama3_params, tunix.llama3, LLAMA, huggingface()),
    "tied llama": (llama3.Llama3, llama3_params, tunix.llama3, dataclasses.replace(LLAMA, weight_tying=True),
                   huggingface(head=False)),
    "qwen3": (qwen3.Qwen3, qwen3_params, tunix.qwen3, QWEN3, huggingface(norms=QK)),
    "tied qwen3": (qwen3.Qwen3, qwen3_params, tunix.qwen3, dataclasses.replace(QWEN3, use_tied_embedding=True),
                   huggingface(norms=QK)),
    "qwen3 experts": (qwen3.Qwen3, qwen3_params, tunix.qwen3,
                      dataclasses.replace(QWEN3, num_experts=12, num_experts_per_tok=2),
                      huggingface(norms=QK, experts=12)),
    "gemma3": (gemma3.Gemma3, gemma3_params, tunix.gemma3, GEMMA3, huggingface(norms=QK + FFW, head=False)),
    "fused gemma3": (gemma3.Gemma3, gemma3_params, tunix.gemma3, dataclasses.replace(GEMMA3, num_kv_heads=HEADS),
                     huggingface(groups=HEADS, norms=QK + FFW, head=False)),
    "qwen2": (qwen2.Qwen2, qwen2_params, None,
              dataclasses.replace(qwen2.ModelConfig.qwen2p5_7b(), vocab_size=VOCAB, **_TINY), huggingface(bias=True)),
    "gemma2": (gemma.Gemma, gemma_params, None,
               dataclasses.replace(gemma.ModelConfig.gemma2_9b(), num_embed=VOCAB, **_TINY),
               huggingface(norms=FFW, head=False)),
}  # fmt: skip


def same(model: Any, reference: Any) -> bool:
    ours, theirs = leaves(model), leaves(reference)  # theirs in the file's dtype
    return len(ours) == len(theirs) and all(
        np.array_equal(np.asarray(a), np.asarray(b.astype(a.dtype))) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suggested", [False, True], ids=["given", "suggested"])
def test_a_table_loads_what_tunix_loads(case: str, suggested: bool, tmp_path: Path, mesh8: jax.sharding.Mesh) -> None:
    cls, params, table, config, tensors = CASES[case]
    if table is None and not suggested:
        pytest.skip("there is no table for it")
    save_file(tensors, tmp_path / "model.safetensors")
    abstract = lm.build_abstract(cls, config, rngs=nnx.Rngs(params=0)).shard(mesh8, lm.auto())
    with lm.open_checkpoint(tmp_path) as checkpoint:
        mapping = lm.WeightMap.suggest(checkpoint, abstract) if suggested else table(config)
        # A head that a tied model has no variable for is for the user to ignore.
        mapped = lm.map_checkpoint(checkpoint, mapping, abstract, strict=not (suggested and case == "tied qwen3"))
        model = abstract.materialize(mapped, initialize="nothing")
    assert same(model, params.create_model_from_safe_tensors(str(tmp_path), config))
    if not suggested:
        lm.save(model, tmp_path / "again", mapping=mapping)
        with lm.open_checkpoint(tmp_path / "again") as again:
            kept = tensors.keys() - ({"lm_head.weight"} if case.startswith("tied") else set())
            assert again.keys() == kept
            assert all(np.array_equal(again[name].read(), tensors[name].astype(again[name].dtype)) for name in again)


def test_gemma3_with_its_vision_encoder(tmp_path: Path) -> None:
    seen = vision.SigLIPConfig(width=32, depth=2, mlp_dim=48, num_heads=2, image_height=56, image_width=56)
    config = dataclasses.replace(GEMMA3, vision_config=seen)
    abstract = lm.build_abstract(gemma3.Gemma3, config, rngs=nnx.Rngs(params=0))
    mapping = tunix.gemma3(config)
    # Under Hugging Face's names as the table writes them, which Tunix' loader then has to understand.
    rng = np.random.default_rng(0)
    arrays = {path: rng.standard_normal(variable.shape).astype("float32") for path, variable in abstract.items()}
    save_file(
        {name: np.ascontiguousarray(a) for name, a in mapping.write(arrays).items()}, tmp_path / "model.safetensors"
    )
    with lm.open_checkpoint(tmp_path) as checkpoint:
        model = abstract.materialize(lm.map_checkpoint(checkpoint, mapping, abstract), initialize="nothing")
    assert same(model, gemma3_params.create_model_from_safe_tensors(str(tmp_path), config))
    text = dataclasses.replace(config, vision_config=None)
    abstract = lm.build_abstract(gemma3.Gemma3, text, rngs=nnx.Rngs(params=0))
    with lm.open_checkpoint(tmp_path) as checkpoint:
        assert tunix.gemma3(text, prefix="language_model.model").check(checkpoint, abstract).ok
