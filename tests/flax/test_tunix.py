"""Tables for Tunix' models, on names and shapes as Tunix has them; `tests/others` loads them with Tunix itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from lazymodel_flax import tunix

LAYERS, VOCAB, SIZE, HIDDEN, HEADS, GROUPS, DIM, EXPERTS = 3, 20, 12, 20, 4, 2, 6, 5
CONFIG = SimpleNamespace(
    num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM, num_experts=EXPERTS, vision_config=None,
    weight_tying=False, use_tied_embedding=True,
)  # fmt: skip


def llama_like(mlp: dict[str, tuple[int, ...]], *norms: str, head: bool) -> dict[str, tuple[int, ...]]:
    layer = {f"attn/{name}_proj/w": (SIZE, n, DIM) for name, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))}
    layer |= {"attn/o_proj/w": (HEADS, DIM, SIZE), "input_layernorm/w": (SIZE,), "post_attention_layernorm/w": (SIZE,)}
    layer |= mlp | {f"attn/{name}/w": (DIM,) for name in norms}
    top: dict[str, tuple[int, ...]] = {"embedder/input_embedding": (VOCAB, SIZE), "final_norm/w": (SIZE,)}
    top |= {"lm_head/w": (SIZE, VOCAB)} if head else {}
    return top | {f"layers/{n}/{name}": shape for n in range(LAYERS) for name, shape in layer.items()}


DENSE = {f"mlp/{name}_proj/kernel": (SIZE, HIDDEN) for name in ("gate", "up")} | {
    "mlp/down_proj/kernel": (HIDDEN, SIZE)
}
SPARSE = {f"mlp/{name}_proj": (EXPERTS, SIZE, HIDDEN) for name in ("gate", "up")}
SPARSE |= {"mlp/down_proj": (EXPERTS, HIDDEN, SIZE), "mlp/router/kernel": (SIZE, EXPERTS)}
GEMMA = {f"{place}_{what}_norm/scale": (SIZE,) for place in ("pre", "post") for what in ("attention", "ffw")}
GEMMA |= {
    "attn/_query_norm/scale": (DIM,),
    "attn/_key_norm/scale": (DIM,),
    "attn/attn_vec_einsum/w": (HEADS, DIM, SIZE),
}
GEMMA |= DENSE | {"attn/q_einsum/w": (HEADS, SIZE, DIM), "attn/kv_einsum/w": (2, GROUPS, SIZE, DIM)}
GEMMA = {f"layers/{n}/{name}": shape for n in range(LAYERS) for name, shape in GEMMA.items()}
GEMMA |= {"embedder/input_embedding": (VOCAB, SIZE), "final_norm/scale": (SIZE,)}


@pytest.mark.parametrize(
    ("mapping", "shapes", "tensors"),
    [
        (tunix.llama3(CONFIG), llama_like(DENSE, head=True), 3 + 9 * LAYERS),
        (tunix.qwen3(CONFIG), llama_like(SPARSE, "q_norm", "k_norm", head=False), 2 + (9 + 3 * EXPERTS) * LAYERS),
        (tunix.gemma3(CONFIG), GEMMA, 2 + 13 * LAYERS),
    ],
    ids=["llama3", "qwen3", "gemma3"],
)
def test_a_table_goes_both_ways(mapping: lm.WeightMap, shapes: dict[str, tuple[int, ...]], tensors: int) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {path: rng.random(shape).astype("float32") for path, shape in shapes.items()}
    checkpoint = {name: np.asarray(array) for name, array in mapping.write(arrays).items()}
    assert len(checkpoint) == tensors
    assert checkpoint["model.layers.1.self_attn.q_proj.weight"].shape == (HEADS * DIM, SIZE)
    assert checkpoint["model.layers.1.self_attn.v_proj.weight"].shape == (GROUPS * DIM, SIZE)
    assert checkpoint["model.layers.2.self_attn.o_proj.weight"].shape == (SIZE, HEADS * DIM)
    abstract = lm.build_abstract(lambda: {path: jnp.zeros(shape) for path, shape in shapes.items()})
    checkpoint["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, "float32")
    mapped = lm.map_checkpoint(checkpoint, mapping, abstract)
    for path, array in arrays.items():
        np.testing.assert_array_equal(mapped[path].read(), array, path)
    # And what would be proposed without it is the same.
    suggested = lm.map_checkpoint(checkpoint, lm.WeightMap.suggest(checkpoint, abstract), abstract)
    assert all(np.array_equal(suggested[path].read(), array) for path, array in arrays.items())


# The axes of kernels that Tunix' einsums contract, of which Qwix makes `w_lora_a`; it makes `w_lora_b` of the others.
CONTRACTED = {
    "q_proj/w": (0,), "k_proj/w": (0,), "v_proj/w": (0,), "o_proj/w": (0, 1), "kernel": (0,),
    "q_einsum/w": (1,), "kv_einsum/w": (2,), "attn_vec_einsum/w": (0, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mapping", "shapes"), [(tunix.llama3(CONFIG), llama_like(DENSE, head=True)), (tunix.gemma3(CONFIG), GEMMA)]
)
def test_adapters_are_kept_in_the_pairs_that_qwix_adds(
    mapping: lm.WeightMap, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    rng, rank = np.random.default_rng(0), 6
    arrays: dict[str, Any] = {path: rng.random(shape).astype("float32") for path, shape in shapes.items()}
    checkpoint = {name: np.asarray(array) for name, array in mapping.write(arrays).items()}
    pairs: dict[str, Any] = {}
    for name, weight in checkpoint.items():
        if "_proj" in name:  # keys and values are one variable of Gemma, with the rank of both
            module, part = f"base_model.model.{name.removesuffix('.weight')}", rank // 2
            pairs[f"{module}.lora_A.weight"] = rng.random((part, weight.shape[1])).astype("float32")
            pairs[f"{module}.lora_B.weight"] = rng.random((weight.shape[0], part)).astype("float32")
    lm.save(pairs, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 3}')
    adapter, tuned = lm.open_adapter(tmp_path), dict(shapes)
    contracted = {path: axes for path in shapes for end, axes in CONTRACTED.items() if path.endswith(f"/{end}")}
    for path, axes in contracted.items():
        tuned[f"{path}_lora_a"] = (*(shapes[path][axis] for axis in axes), rank)
        tuned[f"{path}_lora_b"] = (rank, *(size for axis, size in enumerate(shapes[path]) if axis not in axes))
    abstract, base = (
        lm.build_abstract(lambda each=each: {path: jnp.zeros(shape) for path, shape in each.items()})
        for each in (tuned, shapes)
    )
    merged = base.materialize(lm.map_checkpoint(lm.merge(checkpoint, adapter), mapping, base))
    model = abstract.materialize(mapping.adapters(checkpoint, adapter, abstract, scale=1.0), initialize="missing")
    assert len(contracted) > 6 * LAYERS - 1
    for path, axes in contracted.items():
        product = jnp.tensordot(model[f"{path}_lora_a"], model[f"{path}_lora_b"], 1)
        others = [axis for axis in range(len(shapes[path])) if axis not in axes]
        update = product.transpose(np.argsort([*axes, *others]))
        np.testing.assert_allclose(model[path] + update, merged[path], rtol=1e-5, err_msg=path)
    lm.save_adapter(model, tmp_path / "out", mapping=mapping, scale=1.0)
    again = lm.merge(checkpoint, lm.open_adapter(tmp_path / "out"))
    for name, tensor in lm.merge(checkpoint, adapter).items():
        np.testing.assert_allclose(np.asarray(tensor), np.asarray(again[name]), rtol=1e-5)
