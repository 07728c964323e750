"""Loading Qwen 3 into Tunix' model, dense and with experts: Tunix' own loader, and with lazymodel's in its place.

    python tests/benchmarks/tunix_loading.py [--runs 5] [--json]        # needs google-tunix 0.1.7

Hugging Face folders of about 500 MiB in bfloat16, onto a mesh of 4 x 2 devices (fsdp x tp) by
`create_model_from_safe_tensors`. Each way runs in its own process, in turns, with the page cache warm; values and
dtypes are compared.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import _measure
import numpy as np

VOCAB, WIDTH, HEADS, GROUPS, DIM = 32_768, 1536, 16, 8, 128
KINDS = {"dense": {"layers": 5, "hidden": 6144, "experts": 0}, "experts": {"layers": 5, "hidden": 384, "experts": 16}}


def tensors(layers: int, hidden: int, experts: int) -> Any:
    """Files of tensors under Hugging Face's names: the embedding, then each layer."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    places = [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]
    for layer in ["", *(f"layers.{number}." for number in range(layers))]:
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB, WIDTH), "norm": (WIDTH,)}
        if layer:
            shapes = {f"self_attn.{n}_proj": (h * DIM, WIDTH) for n, h in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))}
            shapes |= {"self_attn.o_proj": (WIDTH, HEADS * DIM)}
            shapes |= {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
            shapes |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
            shapes |= {f"{place}.{n}_proj": (hidden, WIDTH) for place in places for n in ("gate", "up")}
            shapes |= {f"{place}.down_proj": (WIDTH, hidden) for place in places}
            shapes |= {"mlp.gate": (experts, WIDTH)} if experts else {}
        yield {
            f"model.{layer}{name}.weight": rng.integers(0, 2**14, shape, np.uint16).view(ml_dtypes.bfloat16)
            for name, shape in shapes.items()
        }


def child(how: str, folder: str) -> dict[str, Any]:
    import jax
    from flax import nnx
    from tunix.models import safetensors_loader
    from tunix.models.qwen3 import model, params

    from lazymodel_flax import tunix

    kind = KINDS[Path(folder).name]
    config = model.ModelConfig(
        num_layers=kind["layers"], vocab_size=VOCAB, embed_dim=WIDTH, hidden_dim=kind["hidden"], num_heads=HEADS,
        head_dim=DIM, num_kv_heads=GROUPS, norm_eps=1e-6, rope_theta=10_000, use_tied_embedding=True,
        num_experts=kind["experts"] or None, num_experts_per_tok=2,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    if how == "ours":
        safetensors_loader.load_and_create_model = tunix.load_and_create_model
    _measure.backend()
    _measure.back_memory(5 << 28)
    with _measure.measured() as report:
        state = nnx.state(params.create_model_from_safe_tensors(folder, config, mesh))
        jax.block_until_ready(state)
    leaves = jax.tree.leaves(state)
    return report | {"nbytes": sum(leaf.nbytes for leaf in leaves), "digest": _measure.digest(leaves)}


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__, runs=5).parse_args()
    with tempfile.TemporaryDirectory() as parent:
        for name, kind in KINDS.items():
            _measure.write_shards(Path(parent) / name, list(tensors(**kind)))
            results = _measure.stock_and_ours(str(Path(parent) / name), options.runs)
            if not options.json:
                print(f"Qwen 3, {name}:")
            _measure.show_loads(results, "bfloat16", as_json=options.json)


if __name__ == "__main__":
    main()
