"""Hugging Face checkpoints in EasyDeL's models: suggested tables have the values of its own loader."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import lazymodel as lm

os.environ.setdefault("EASYDEL_AUTO", "0")  # else it sets flags that XLA ends the process at
import easydel as ed

from . import folders

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
DEVICES = {"sharding_axis_dims": (1, 4, 1, 2, 1)}  # dp, fsdp, ep, tp, sp


def parameters(model: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize(("name", "kind"), [("Llama", "llama"), ("Qwen3Moe", "qwen3_moe")])
def test_equals_from_pretrained(name: str, kind: str, tmp_path: Path) -> None:
    folder = folders.write(tmp_path, kind)
    # Its other mode, the default, loads through float16, which has other values.
    stock = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
        folder, from_torch=True, torch_load_mode="streaming", **DTYPES, **DEVICES
    )
    expected = parameters(stock)

    config = getattr(ed, f"{name}Config").from_pretrained(folder)
    config.add_basic_configurations(**DEVICES)
    abstract = lm.build_abstract(getattr(ed, f"{name}ForCausalLM"), config=config, rngs=nnx.Rngs(0), **DTYPES)
    rules = stock._get_partition_rules(None)

    def rule(variable: lm.AbstractVariable) -> P:
        found = [spec for regex, spec in rules if re.search(regex, variable.path)]
        return found[0] if found and len(found[0]) <= len(variable.shape) else P()

    with lm.open_checkpoint(folder) as checkpoint:
        table = lm.WeightMap.suggest(checkpoint, abstract)
        mapped = lm.map_checkpoint(checkpoint, table, abstract)
        model = abstract.shard(config.mesh, rule).materialize(mapped, initialize="missing")
        assert not mapped.unused and checkpoint.bytes_read == checkpoint.nbytes
    found = parameters(model)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path].dtype == value.dtype and found[path].sharding.is_equivalent_to(value.sharding, value.ndim)
        assert np.asarray(found[path]).tobytes() == np.asarray(value).tobytes(), path
