"""Hugging Face checkpoints in Levanter's models: its own conversion, on lazy tensors."""

from __future__ import annotations

from pathlib import Path

import equinox as eqx
import haliax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.models.llama import LlamaConfig
from levanter.models.mixtral import MixtralConfig

import lazymodel as lm

from . import folders

pytestmark = pytest.mark.large
AXES = {"embed": "data", "mlp": "model", "heads": "model", "vocab": "model"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(LlamaConfig, transformers.LlamaConfig), (MixtralConfig, transformers.MixtralConfig)],
    ids=["llama", "mixtral"],
)
def test_equals_load_pretrained(ours: type, theirs: type, tmp_path: Path) -> None:
    folder = folders.write(tmp_path, theirs.model_type)
    converter = HFCheckpointConverter(ours, folder, HfConfigClass=theirs, tokenizer=folder)
    config, vocab = converter.config_from_hf_checkpoint(folder), converter.Vocab
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with jax.set_mesh(mesh), haliax.axis_mapping(AXES):
        expected = converter.load_pretrained(
            config.model_type, folder, config=config, axis_mapping=AXES, dtype=jnp.bfloat16
        )
        template = eqx.filter_eval_shape(config.model_type.init, vocab, config, key=jax.random.key(0))
        shardings = haliax.partitioning.infer_resource_partitions(template, AXES, mesh=mesh)

    abstract = lm.build_abstract(lambda: jax.tree.map(lambda each: jnp.zeros(each.shape, jnp.bfloat16), template))
    specs = {path: sharding.spec for path, sharding in zip(abstract, jax.tree.leaves(shardings), strict=True)}
    convert = jax.jit(lambda tensors: from_torch_compatible_state_dict(template, tensors))
    with lm.open_checkpoint(folder) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, convert)
        model = abstract.shard(mesh, specs).materialize(mapped, initialize="nothing")
        assert not mapped.unused and checkpoint.bytes_read == checkpoint.nbytes

    assert jax.tree.structure(model) == jax.tree.structure(expected)
    for own, other in zip(*map(jax.tree.leaves, (model, expected)), strict=True):
        assert own.dtype == other.dtype and own.sharding.is_equivalent_to(other.sharding, own.ndim)
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes()
