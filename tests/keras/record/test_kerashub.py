"""GPT-OSS' experts of four bits: equal bit for bit to what KerasHub's converter decodes, and never whole in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras_hub
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.internals import nbytes_read
from tests.keras.models import assert_same, bits, seeded, write_safetensors_folder

# KerasHub decodes the largest scale, which stands for no number, with these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

GptOssBackbone: Any = keras_hub.models.GptOssBackbone
HIDDEN, INNER, EXPERTS = 64, 96, 8
CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": HIDDEN,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def _tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (64, HIDDEN),
    }
    layer = "model.layers.0"
    projections = {"q": (64, HIDDEN), "k": (32, HIDDEN), "v": (32, HIDDEN), "o": (HIDDEN, 64)}
    for name, shape in projections.items():
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = shape
        shapes[f"{layer}.self_attn.{name}_proj.bias"] = shape[:1]
    shapes |= {
        f"{layer}.self_attn.sinks": (8,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.mlp.router.weight": (EXPERTS, HIDDEN),
        f"{layer}.mlp.router.bias": (EXPERTS,),
    }
    for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
        experts = f"{layer}.mlp.experts.{name}_proj"
        shapes[f"{experts}_blocks"] = (EXPERTS, rows, columns // 32, 16)
        shapes[f"{experts}_scales"] = (EXPERTS, rows, columns // 32)
        shapes[f"{experts}_bias"] = (EXPERTS, rows)
    rng = np.random.default_rng(0)
    return {
        # Every byte there is, and every scale, infinite ones and those that lead below the normal numbers as well.
        name: rng.integers(0, 256, shape, np.uint8)
        if name.endswith(("_blocks", "_scales"))
        else rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_safetensors_folder(tmp_path_factory.mktemp("mxfp4") / "gpt_oss", CONFIG, _tensors(), shards=2))


@pytest.fixture(scope="module")
def stock(folder: str) -> Any:
    return seeded(lambda: GptOssBackbone.from_preset(folder))


# Experts; whole blocks of some rows; and an axis on which shards begin within blocks.
@pytest.mark.parametrize("spec", [P("model"), P(None, None, "model"), P(None, "model")], ids=str)
def test_equal_to_stock_and_read_once(folder: str, stock: Any, mesh8: Mesh, spec: P) -> None:
    rules = {".*/experts/(gate_up|down)_proj": spec}
    before = nbytes_read()
    abstract = seeded(
        lambda: lk.abstract_from_preset(GptOssBackbone, folder).shard(mesh8, rules, on_unmatched="ignore")
    )
    assert nbytes_read() == before, "nothing is read while it is converted"
    experts = [path for path in abstract if path.endswith(("/gate_up_proj", "/down_proj"))]
    assert len(experts) == 2
    for path in experts:
        assert isinstance(abstract.sources[path], lm.LazyTensor)
        assert abstract[path].shard_nbytes * 8 == abstract[path].nbytes
    reports: list[lm.LoadReport] = []
    ours = abstract.materialize(report=reports.append, max_host_memory=1 << 20)
    assert reports[0].read_nbytes == reports[0].needed_nbytes == sum(tensor.nbytes for tensor in _tensors().values())
    assert_same(stock, ours, outputs=False)


def test_narrower_and_in_a_block(folder: str, stock: Any) -> None:
    """Decoded straight to bfloat16, which is not stored anywhere."""

    def load() -> Any:
        with lk.deferred():
            return GptOssBackbone.from_preset(folder, dtype="bfloat16")

    before = nbytes_read()
    ours = seeded(load)
    assert nbytes_read() - before == sum(tensor.nbytes for tensor in _tensors().values())
    for expected, found in zip(stock.weights, ours.weights, strict=True):
        values = np.asarray(found.value)
        assert values.dtype == ml_dtypes.bfloat16
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(
                bits(found), np.frombuffer(np.asarray(expected.value).astype(values.dtype).tobytes(), np.uint8)
            )


def test_experts_whose_scales_do_not_fit(tmp_path: Path) -> None:
    tensors = _tensors()
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :-1].copy()
    folder = write_safetensors_folder(tmp_path / "short", CONFIG, tensors)
    with pytest.raises(lm.CheckpointError, match=r"down_proj_blocks: expected uint8 of shape \(8, 64, 2, 16\)"):
        lk.abstract_from_preset(GptOssBackbone, str(folder))
