"""GPT-OSS' experts of four bits: equal bit for bit to what KerasHub's converter decodes, and never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.keras.models import (
    assert_same,
    bits,
    decoder,
    decoder_shapes,
    in_block,
    refused,
    seeded,
    write_safetensors_folder,
)
from tests.small import shard_small

# KerasHub decodes the largest scale, which stands for no number, with these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

GptOssBackbone: Any = keras_hub.models.GptOssBackbone
CONFIG = decoder(
    "gpt_oss", hidden_size=64, num_hidden_layers=1, head_dim=8, intermediate_size=96, num_local_experts=8,
    num_experts_per_tok=2, sliding_window=8, layer_types=["full_attention"],
)  # fmt: skip


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        # Every byte there is, and every scale, infinite ones and those that lead below the normal numbers as well.
        name: rng.integers(0, 256, shape, np.uint8)
        if name.endswith(("_blocks", "_scales"))
        else rng.standard_normal(shape, dtype=np.float32)
        for name, shape in decoder_shapes(CONFIG).items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_safetensors_folder(tmp_path_factory.mktemp("mxfp4") / "gpt_oss", CONFIG, _tensors(), shards=2))


@pytest.fixture(scope="module")
def stock(folder: str) -> Any:
    return seeded(lambda: GptOssBackbone.from_preset(folder))


# Experts; whole blocks of some rows; and an axis on which shards begin within blocks.
@pytest.mark.parametrize("spec", [P("model"), P(None, None, "model"), P(None, "model")], ids=str)
def test_equal_to_stock_and_read_once(
    folder: str, stock: Any, mesh8: Mesh, spec: P, nbytes_read: Callable[[], int]
) -> None:
    rules = {".*/experts/(gate_up|down)_proj": spec}
    before = nbytes_read()
    abstract = seeded(
        lambda: shard_small(lk.abstract_from_preset(GptOssBackbone, folder), mesh8, rules, on_unmatched="ignore")
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


def test_narrower_and_in_a_block(folder: str, stock: Any, nbytes_read: Callable[[], int]) -> None:
    """Decoded straight to bfloat16, which is not stored anywhere."""
    before = nbytes_read()
    ours = seeded(lambda: in_block(lambda: GptOssBackbone.from_preset(folder, dtype="bfloat16")))
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
    message = refused(lk.abstract_from_preset, GptOssBackbone, str(folder))
    assert "down_proj_blocks" in message and "(8, 64, 2, 16)" in message
