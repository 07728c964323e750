"""LoRA pairs of KerasHub models as adapters of PEFT and back: logits against PEFT's own, ranks, and errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh

import lazymodel as lm
import lazymodel_keras as lk
from tests.conftest import child_environment
from tests.keras.models import decoder, decoder_shapes, random_tensors, write_safetensors_folder
from tests.keras.transform import peft_logits

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning")

TASKS = {"llama": keras_hub.models.Llama3CausalLM, "gemma": keras_hub.models.GemmaCausalLM}
CONFIGS = {
    "llama": decoder("llama"),
    "gemma": decoder("gemma", head_dim=8, tie_word_embeddings=True, max_position_embeddings=64, rms_norm_eps=1e-6),
}
DENSE = r".*(feedforward_.*|attention_output)/kernel"  # whose pairs have PEFT's form


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of each."""
    out = tmp_path_factory.mktemp("folders")
    for name, config in CONFIGS.items():
        tensors = {name: tensor / 4 for name, tensor in random_tensors(decoder_shapes(config)).items()}
        write_safetensors_folder(out / name, config, tensors)
    return {name: out / name for name in CONFIGS}


def opened(name: str, folder: Path) -> tuple[lm.AbstractModel[Any], lm.WeightMap]:
    abstract = lk.abstract_from_preset(TASKS[name], str(folder), preprocessor=None)
    return abstract, lm.WeightMap.recorded(abstract)


def trained(model: Any, seed: int = 0) -> Any:
    """Gives every pair values as after training."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if "lora" in variable.path:
            variable.assign(rng.standard_normal(variable.shape) / 4)
    return model


def logits(model: Any) -> np.ndarray:
    tokens = peft_logits.TOKENS
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens, "bool")}
    return np.asarray(jax.jit(lambda inputs: model(inputs))(inputs))  # one by one, operations compile one by one


def update(folder: Path, adapter: Path, name: str) -> np.ndarray:
    base = lm.open_checkpoint(folder)
    return np.asarray(lm.merge(base, lm.open_adapter(adapter))[name]) - np.asarray(base[name])


@pytest.mark.large  # that a model is what `lm.merge` gives is below, and that this is what PEFT gives in extras/lora
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("peft", "transformers"))), reason="needs peft, transformers")
def test_peft_computes_the_same(folders: dict[str, Path], tmp_path: Path, mesh8: Mesh) -> None:
    cases: dict[Path, tuple[str, np.ndarray]] = {}
    for name, kind, targets in (
        ("llama", "usual", None),  # queries and values
        ("llama", "all", ".*/(kernel|embeddings)"),
        ("gemma", "kernels", ".*/kernel"),
        ("gemma", "tied", ".*/(query/kernel|embeddings)"),
    ):
        abstract, table = opened(name, folders[name])
        lora = abstract.lora(2, targets)
        model = trained((lora.shard(mesh8, lm.auto()) if kind == "usual" else lora).materialize())
        out = tmp_path / f"{name}-{kind}"
        if kind == "tied":
            with pytest.warns(lm.LazyModelWarning, match="'token_embedding/embeddings' is also the output projection"):
                lm.save_adapter(model, out, mapping=table, base=str(folders[name]))
        else:
            lm.save_adapter(model, out, mapping=table, base=str(folders[name]))
        cases[out] = name, logits(model)
    arguments = [str(path) for out, (name, _) in cases.items() for path in (folders[name], out)]
    subprocess.run([sys.executable, peft_logits.__file__, *arguments], check=True, env=child_environment())
    for out, (name, expected) in cases.items():
        # Sums in float32 in another order, through two layers with a softmax and norms each.
        np.testing.assert_allclose(np.load(out / "logits.npy"), expected, atol=1e-4 * abs(expected).max(), rtol=0)
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(folders[name])


def test_an_adapter_of_a_model_merges_into_what_the_merged_model_is(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, folder in folders.items():
        abstract, table = opened(name, folder)
        lora = abstract.lora(2, ".*/kernel")
        model = trained(lora.materialize())
        assert lm.save_adapter(model, tmp_path / name, mapping=table) == {}
        ranks = {module.rpartition(".")[2]: rank for module, rank in lm.open_adapter(tmp_path / name).ranks.items()}
        assert ranks["q_proj"] == 16 and ranks["v_proj"] == 8 and ranks["o_proj"] == ranks["up_proj"] == 2
        loaded = lk.from_preset(TASKS[name], str(folder), adapter=tmp_path / name, preprocessor=None)
        lk.merge_lora(model)
        for ours, other in zip(model.variables, loaded.variables, strict=True):
            # The sums over zeros of other heads are in another order.
            np.testing.assert_allclose(ours.value, other.value, atol=1e-6, rtol=1e-6, err_msg=ours.path)


def test_a_lower_rank_is_the_closest(folders: dict[str, Path], tmp_path: Path) -> None:
    abstract, table = opened("llama", folders["llama"])
    model = trained(abstract.lora(3).materialize())
    assert lm.save_adapter(model, tmp_path / "exact", mapping=table, rank=24) == {}
    with pytest.warns(lm.LazyModelWarning, match=r"rank 5 changes products by a tenth.*q_proj 0\.\d"):
        errors = lm.save_adapter(model, tmp_path / "close", mapping=table, rank=5)
    assert set(errors) == {f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qv"}
    for module, error in errors.items():
        exact, close = (update(folders["llama"], tmp_path / kind, f"{module}.weight") for kind in ("exact", "close"))
        sizes = np.linalg.svd(exact, compute_uv=False)
        best = np.sqrt((sizes[5:] ** 2).sum() / (sizes**2).sum())
        assert error == pytest.approx(best, rel=1e-4) and 0.1 < error < 0.9
        assert np.linalg.norm(exact - close) / np.linalg.norm(exact) == pytest.approx(best, rel=1e-4)
    assert lm.open_adapter(tmp_path / "close").rank == 5


def test_an_adapter_is_kept_where_pairs_have_its_form(folders: dict[str, Path], tmp_path: Path, mesh8: Mesh) -> None:
    abstract, table = opened("llama", folders["llama"])
    checkpoint = lm.open_checkpoint(folders["llama"])
    for targets in (DENSE, ".*/embeddings"):
        model = trained(abstract.lora(2, targets).materialize())
        lm.save_adapter(model, tmp_path / "a", mapping=table, overwrite=True)
        adapter = lm.open_adapter(tmp_path / "a")
        lora = opened("llama", folders["llama"])[0].lora(4, targets).shard(mesh8, lm.auto())
        kept = lora.materialize(table.adapters(checkpoint, adapter, lora))
        assert {v.shape[-1] for v in kept.variables if "_a" in v.name and "lora" in v.name} == {4}
        np.testing.assert_allclose(logits(kept), logits(model), rtol=1e-4, atol=1e-4)
        abstract = opened("llama", folders["llama"])[0]

    lora = abstract.lora(2)
    lm.save_adapter(trained(lora.materialize()), tmp_path / "heads", mapping=table)
    with pytest.raises(lm.CheckpointError, match=r"layer_0/\S*/query/lora_kernel_a.*merge it instead: lm\.merge"):
        table.adapters(checkpoint, lm.open_adapter(tmp_path / "heads"), lora)


def test_a_quantized_model_gives_the_adapter_of_its_base(folders: dict[str, Path], tmp_path: Path) -> None:
    abstract, table = opened("llama", folders["llama"])
    model = trained(abstract.quantize("int4").lora(2).materialize())
    lm.save_adapter(model, tmp_path / "a", mapping=table)
    layer = model.backbone.transformer_layers[0]._self_attention_layer._query_dense
    a, b = (np.asarray(each.value) for each in (layer.lora_kernel_a, layer.lora_kernel_b))
    found = update(folders["llama"], tmp_path / "a", "model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_allclose(found, (a @ b).reshape(32, 32).T, rtol=1e-5, atol=1e-6)


def test_errors(folders: dict[str, Path], tmp_path: Path) -> None:
    abstract, table = opened("llama", folders["llama"])
    plain = abstract.materialize()
    model = opened("llama", folders["llama"])[0].lora(2).materialize()
    with pytest.raises(lm.LazyModelError, match="Llama3CausalLM has no LoRA pairs"):
        lm.save_adapter(plain, tmp_path / "a", mapping=table)
    with pytest.raises(lm.LazyModelError, match="expected a positive integer as rank, found 0"):
        lm.save_adapter(model, tmp_path / "a", mapping=table, rank=0)
    with pytest.raises(lm.LazyModelError, match="has no entry in the table"):
        lm.save_adapter(model, tmp_path / "a", mapping=lm.WeightMap({"other": "other"}))
    assert not (tmp_path / "a").exists()
