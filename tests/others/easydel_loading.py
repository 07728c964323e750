"""A Hugging Face folder in a model of EasyDeL: by its own loader, and by a table that `WeightMap.suggest` proposes."""

from __future__ import annotations

import re
from typing import Any

import easydel as ed
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import lazymodel as lm

KINDS = ("llama", "qwen3_moe")
_DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
_DEVICES = {"sharding_axis_dims": (1, 4, 1, 2, 1)}  # dp, fsdp, ep, tp, sp


def load(folder: str, kind: str, *, lazily: bool) -> dict[str, jax.Array]:
    """The parameters by path, in bfloat16 on eight devices."""
    if not lazily:  # its default mode loads through float16, which has other values
        options = {"from_torch": True, "torch_load_mode": "streaming", **_DTYPES, **_DEVICES}
        return _parameters(ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder, **options))
    name = {"llama": "Llama", "qwen3_moe": "Qwen3Moe"}[kind]
    config = getattr(ed, f"{name}Config").from_pretrained(folder)
    config.add_basic_configurations(**_DEVICES)
    options = {"config": config, "rngs": nnx.Rngs(0), **_DTYPES}
    cls = getattr(ed, f"{name}ForCausalLM")
    abstract, rules = lm.build_abstract(cls, **options), cls.lazy_init(**options)._get_partition_rules(None)

    def rule(variable: lm.AbstractVariable) -> P:
        found = [spec for regex, spec in rules if re.search(regex, variable.path)]
        return found[0] if found and len(found[0]) <= len(variable.shape) else P()

    with lm.open_checkpoint(folder) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, lm.WeightMap.suggest(checkpoint, abstract), abstract)
        return _parameters(abstract.shard(config.mesh, rule).materialize(mapped, initialize="missing"))


def _parameters(model: Any) -> dict[str, jax.Array]:
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
