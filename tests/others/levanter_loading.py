"""A Hugging Face folder in a model of Levanter: by its own loader, and by its own conversion of lazy tensors."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax
import jax
import jax.numpy as jnp
import numpy as np
import transformers
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.models.llama import LlamaConfig
from levanter.models.mixtral import MixtralConfig

import lazymodel as lm

KINDS = ("llama", "mixtral")
_AXES = {"embed": "data", "mlp": "model", "heads": "model", "vocab": "model"}


def load(folder: str, kind: str, *, lazily: bool) -> dict[str, jax.Array]:
    """The parameters by path, in bfloat16 on eight devices."""
    ours, theirs = {
        "llama": (LlamaConfig, transformers.LlamaConfig),
        "mixtral": (MixtralConfig, transformers.MixtralConfig),
    }[kind]
    converter = HFCheckpointConverter(ours, folder, HfConfigClass=theirs, tokenizer=folder)
    config: Any = converter.config_from_hf_checkpoint(folder)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    if not lazily:
        with jax.set_mesh(mesh), haliax.axis_mapping(_AXES):
            return _named(
                converter.load_pretrained(
                    config.model_type, folder, config=config, axis_mapping=_AXES, dtype=jnp.bfloat16
                )
            )
    template = eqx.filter_eval_shape(config.model_type.init, converter.Vocab, config, key=jax.random.key(0))
    abstract = lm.build_abstract(lambda: jax.tree.map(lambda each: jnp.zeros(each.shape, jnp.bfloat16), template))
    shardings = jax.tree.leaves(haliax.partitioning.infer_resource_partitions(template, _AXES, mesh=mesh))
    rules = {path: sharding.spec for path, sharding in zip(abstract, shardings, strict=True)}
    convert = jax.jit(lambda tensors: from_torch_compatible_state_dict(template, tensors))
    with lm.open_checkpoint(folder) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, convert)
        return _named(abstract.shard(mesh, rules).materialize(mapped, initialize="nothing"))


def _named(model: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
