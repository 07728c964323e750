"""Loading Llama 3.1 into MaxText's parameters: MaxText's own loader of safetensors, and with lazymodel's in its place.

    python tests/benchmarks/maxtext_loading.py [--runs 5] [--json]        # needs maxtext 0.2.5

A Hugging Face folder of 0.9 GB in bfloat16, onto 8 devices (fsdp), layers scanned. Each way runs in its own process, in
turns, with the page cache warm; values and dtypes are compared.
"""

from __future__ import annotations

import logging
import tempfile
import types
from pathlib import Path
from typing import Any

import _measure

NAME, VOCAB, WIDTH, HIDDEN, HEADS, GROUPS, DIM, LAYERS = "llama3.1-8b", 32_768, 2048, 7168, 16, 4, 128, 6


def tensors() -> Any:
    """Files of tensors under Hugging Face's names: the embeddings, then each layer."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)  # numbers from 3e-5 to 2: MaxText's way flushes subnormal ones to zero
    for layer in ["", *(f"layers.{number}." for number in range(LAYERS))]:
        shapes: dict[str, tuple[int, ...]] = {"model.norm": (WIDTH,)}
        shapes |= {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
        if layer:
            shapes = {"self_attn.q_proj": (HEADS * DIM, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * DIM)}
            shapes |= {f"self_attn.{name}_proj": (GROUPS * DIM, WIDTH) for name in "kv"}
            shapes |= {f"mlp.{name}_proj": (HIDDEN, WIDTH) for name in ("gate", "up")}
            shapes |= {"mlp.down_proj": (WIDTH, HIDDEN), "input_layernorm": (WIDTH,)}
            shapes |= {"post_attention_layernorm": (WIDTH,)}
        yield {
            (f"model.{layer}{name}" if layer else name) + ".weight": rng.integers(
                0x3800, 0x4000, shape, np.uint16
            ).view(ml_dtypes.bfloat16)
            for name, shape in shapes.items()
        }


def child(how: str, folder: str) -> dict[str, Any]:
    import jax
    from flax import nnx
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from maxtext.common import checkpointing
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    from lazymodel_flax import maxtext

    logging.disable(logging.WARNING)
    small = {"num_hidden_layers": LAYERS, "head_dim": DIM}
    hf_config: dict[str, Any] = HF_MODEL_CONFIGS[NAME].to_dict() | small  # the rest decides nothing in the table
    HF_MODEL_CONFIGS[NAME] = types.SimpleNamespace(to_dict=lambda: hf_config)
    config = pyconfig.initialize(
        ["", str(Path(pyconfig.__file__).with_name("base.yml"))], model_name=NAME, override_model_config=True,
        run_name="none", hardware="cpu", skip_jax_distributed_system=True, enable_checkpointing=False, log_config=False,
        weight_dtype="bfloat16", vocab_size=VOCAB, base_emb_dim=WIDTH, base_mlp_dim=HIDDEN, head_dim=DIM,
        base_num_query_heads=HEADS, base_num_kv_heads=GROUPS, base_num_decoder_layers=LAYERS,
    )  # fmt: skip
    mesh = maxtext_utils.get_mesh_from_config(config)
    _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    params = nnx.state(model, nnx.Param)
    load = maxtext if how == "ours" else checkpointing
    _measure.backend()
    _measure.back_memory(5 << 29)
    with _measure.measured() as report:
        _, loaded = load.load_safetensors_dynamic_state(folder, params, config)
        jax.block_until_ready(loaded)
    leaves = jax.tree.leaves(loaded)
    return report | {"nbytes": sum(leaf.nbytes for leaf in leaves), "digest": _measure.digest(leaves)}


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__, runs=5).parse_args()
    with tempfile.TemporaryDirectory() as parent:
        _measure.write_shards(Path(parent) / "hf", list(tensors()))
        results = _measure.stock_and_ours(str(Path(parent) / "hf"), options.runs)
        _measure.show_loads(results, "bfloat16", as_json=options.json)


if __name__ == "__main__":
    main()
