"""Adapters of PEFT: what is read of a folder, values of merged tensors, and errors; also against PEFT itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._tensors.convert import Convert
from tests.command import command
from tests.core.checkpoints._formats import torch_file
from tests.large import mostly_large
from tests.private_memory import Peak
from tests.quantized import FORMS, quantized, settings, write_folder

PREFIX = "base_model.model."
RNG = np.random.default_rng(7)


def random(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A folder as PEFT's `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "example/base"} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def pair(module: str, out: int, inner: int, rank: int = 4) -> dict[str, np.ndarray]:
    return {
        f"{PREFIX}{module}.lora_A.weight": random(rank, inner),
        f"{PREFIX}{module}.lora_B.weight": random(out, rank),
    }


def product(tensors: dict[str, np.ndarray], module: str, scale: float) -> np.ndarray:
    a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"].astype(np.float32) for side in "AB")
    return (b @ a) * np.float32(scale)


def near(found: Any, expected: np.ndarray) -> None:
    """Equal up to the rounding of sums in float32, and of the result to its dtype."""
    values = np.asarray(found)
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    one, two = values.astype(np.float64), expected.astype(np.float64)
    step = 4e-6 if expected.dtype in (np.float32, np.float64) else float(ml_dtypes.finfo(expected.dtype).eps)
    np.testing.assert_allclose(one, two, rtol=step, atol=step)
    if expected.dtype.itemsize == 2:  # rounded once: the same, except where float32 falls on the other side of a tie
        assert (one == two).mean() > 0.995


def base_of(dtype: Any = np.float32, prefix: str = "model.layers.0.") -> dict[str, np.ndarray]:
    return {
        f"{prefix}q.weight": random(96, 64, dtype=dtype),
        f"{prefix}v.weight": random(32, 64, dtype=dtype),
        f"{prefix}q.bias": random(96, dtype=dtype),
        "norm.weight": random(64, dtype=dtype),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = pair("model.layers.0.q", 96, 64) | pair("model.layers.0.v", 32, 64)
    return write(tmp_path / "adapter", tensors)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(tensor) for name, tensor in lm.open_checkpoint(folder / "adapter_model.safetensors").items()
    }


# What is read of a folder


def test_an_adapter_says_what_it_adapts(folder: Path) -> None:
    adapter = lm.open_adapter(folder)
    assert (adapter.rank, adapter.alpha, adapter.base) == (4, 8.0, "example/base")
    assert adapter.targets == ("model.layers.0.q", "model.layers.0.v")
    assert adapter.scales == dict.fromkeys(adapter.targets, 2.0)
    assert adapter.ranks == dict.fromkeys(adapter.targets, 4)
    assert "LoRA of rank 4, alpha 8, 2 modules (q, v), for example/base" in repr(adapter)
    assert adapter.source.bytes_read == 0


def test_patterns_match_the_end_of_a_module_s_name(tmp_path: Path) -> None:
    tensors = pair("layers.0.q", 8, 8, 2) | pair("layers.10.q", 8, 8, 6) | pair("layers.0.xq", 8, 8)
    patterns = {"rank_pattern": {r"layers\.0\.q": 2, r"layers\.1\d\.q": 6}, "alpha_pattern": {"q": 3}}
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, **patterns))
    assert adapter.ranks == {"layers.0.q": 2, "layers.10.q": 6, "layers.0.xq": 4}
    assert adapter.scales == {"layers.0.q": 1.5, "layers.10.q": 0.5, "layers.0.xq": 2.0}
    assert "ranks 2 to 6" in repr(adapter)


def test_an_adapter_may_be_pytorch_s_file(folder: Path) -> None:
    tensors = tensors_of(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(torch_file(tensors))
    adapter = lm.open_adapter(folder)
    assert adapter.targets == ("model.layers.0.q", "model.layers.0.v")
    base = base_of()
    near(
        lm.merge(base, adapter)["model.layers.0.q.weight"],
        base["model.layers.0.q.weight"] + product(tensors, "model.layers.0.q", 2.0),
    )


# Values


def test_a_sum_is_rounded_once_to_the_dtype_of_what_reads_it(tmp_path: Path) -> None:
    """A base in bfloat16, and a model in float32: in bfloat16, 1.003 is 1."""
    tensors = {f"{PREFIX}{name}.lora_A.weight": np.full((4, 64), 0.003 / 8, np.float32) for name in "qk"}
    tensors |= {f"{PREFIX}{name}.lora_B.weight": np.ones((96, 4), np.float32) for name in "qk"}
    tensors |= {f"{PREFIX}norm.weight": np.full(64, 1.003, np.float32)}
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, modules_to_save=["norm"]))
    base = {f"{name}.weight": np.ones((96, 64), ml_dtypes.bfloat16) for name in "qkv"} | {
        "norm.weight": np.ones(64, ml_dtypes.bfloat16)
    }
    merged = lm.merge(base, adapter)

    def parts(t: Any) -> Any:
        each = [t[f"{name}.weight"] for name in "qkv"]
        stacked, heads = np.stack(each, 1), np.reshape(np.concatenate(each).T, (64 * 8, -1))
        return {"q": each[0].T, "stacked": stacked, "heads": heads, "norm": t["norm.weight"]}

    shapes = {"q": (64, 96), "stacked": (96, 3, 64), "heads": (512, 36), "norm": (64,)}
    for dtype, once in ((jnp.float32, 1.003), (jnp.bfloat16, 1.0)):
        abstract = lm.build_abstract(
            lambda dtype=dtype: {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
        )
        model = abstract.materialize(lm.map_checkpoint(merged, parts))
        for name, array in model.items():
            values = np.asarray(array, np.float32)
            np.testing.assert_allclose(values.max(), once, rtol=1e-6, err_msg=name)
            assert values.min() == (1.0 if name in ("stacked", "heads") else values.max())
    assert {tensor.dtype.name for tensor in merged.values()} == {"bfloat16"}  # as `save` writes it
    twice = lm.merge(merged, adapter)["q.weight"]
    np.testing.assert_allclose(np.asarray(twice.astype(np.float32)), 1.006, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_merged_values_are_the_sum_rounded_once(folder: Path, dtype: Any, scale: float) -> None:
    base, tensors = base_of(dtype), tensors_of(folder)
    merged = lm.merge(base, lm.open_adapter(folder), scale)
    assert list(merged) == list(base)
    for name in ("q", "v"):
        weight = base[f"model.layers.0.{name}.weight"]
        total = weight.astype(np.float32) + product(tensors, f"model.layers.0.{name}", 2.0 * scale)
        near(merged[f"model.layers.0.{name}.weight"], total.astype(dtype))
    np.testing.assert_array_equal(merged["norm.weight"], base["norm.weight"])


def test_a_part_that_is_released_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    base, tensors = {"w.weight": random(1024, 2048)}, pair("w", 1024, 2048)
    tensors[f"{PREFIX}w.lora_magnitude_vector"] = np.abs(random(1024))
    merged = lm.merge(base, lm.open_adapter(write(tmp_path / "a", tensors, use_dora=True)))["w.weight"]

    def release(values: np.ndarray) -> np.ndarray:
        for source in (merged.source, *(piece.source for piece in getattr(merged.source, "pieces", ()))):
            source.release()
        return values

    steps = (Convert(np.dtype(np.float32), function=release),)
    np.testing.assert_array_equal(merged.converted(steps).read(), merged.read())


@pytest.mark.parametrize("rank", [1, 16, 300])
def test_boxes_have_the_bits_of_the_whole(tmp_path: Path, rank: int) -> None:
    tensors = pair("w", 700, 1300, rank)
    base = {"w.weight": random(700, 1300)}
    config = {"r": rank, "lora_alpha": 2, "use_rslora": True}
    merged = lm.merge(base, lm.open_adapter(write(tmp_path / "a", tensors, **config)))["w.weight"]
    whole = merged.read()
    expected = base["w.weight"].astype(float) + product(tensors, "w", 2 / math.sqrt(rank))
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=3e-5)
    for _ in range(40):
        rows, columns = (slice(*sorted(RNG.integers(0, n + 1, 2))) for n in whole.shape)
        np.testing.assert_array_equal(merged[rows, columns], whole[rows, columns])
    np.testing.assert_array_equal(merged.T[5:900:3, 1::2], whole.T[5:900:3, 1::2])


def test_a_box_reads_its_part_and_both_factors(tmp_path: Path) -> None:
    base = {"w.weight": random(512, 1024)}
    save_file(base, tmp_path / "base.safetensors")
    folder = write(tmp_path / "a", pair("w", 512, 1024))
    with lm.merge(lm.open_checkpoint(tmp_path / "base.safetensors"), lm.open_adapter(folder)) as merged:
        assert merged.bytes_read == 0
        merged["w.weight"][:8].read()
        assert merged.bytes_read == (8 * 1024 + 4 * (512 + 1024)) * 4
        assert merged.files == [str(folder / "adapter_model.safetensors"), str(tmp_path / "base.safetensors")]


@pytest.mark.parametrize("name", ["fp8-block", "mxfp4", "gptq"])
def test_a_quantized_sharded_base_is_decoded_first(tmp_path: Path, name: str) -> None:
    form = FORMS[next(each for each in FORMS if each.startswith(name))]
    weights = {"model.layers.0.q.weight": random(96, 64), "norm.weight": random(64)}
    stored, plain = quantized(form, weights, lambda module: module != "norm")
    base = write_folder(tmp_path / "base", settings(form), stored, shards=2)
    tensors = pair("model.layers.0.q", 96, 64)
    merged = lm.merge(lm.open_checkpoint(base), lm.open_adapter(write(tmp_path / "a", tensors)))
    weight = plain["model.layers.0.q.weight"]
    total = weight.astype(np.float32) + product(tensors, "model.layers.0.q", 2.0)
    near(merged["model.layers.0.q.weight"], total.astype(weight.dtype))
    assert sorted(merged) == sorted(plain)


@pytest.mark.parametrize("dora", [False, True])
def test_base_and_adapter_may_be_remote(tmp_path: Path, object_server: Any, mesh8: Any, dora: bool) -> None:
    folder = object_server.root / f"adapters{dora}"
    base, tensors = {"w.weight": random(800, 640)}, pair("w", 800, 640)
    magnitude = {f"{PREFIX}w.lora_magnitude_vector": np.abs(random(800))} if dora else {}
    write(folder, tensors | magnitude, use_dora=dora)
    save_file(base, folder / "base.safetensors")
    local = lm.merge(base, lm.open_adapter(folder))["w.weight"].read()
    adapter = lm.open_adapter(object_server.url(f"adapters{dora}"))
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((800, 640))})
    checkpoint = lm.merge(lm.open_checkpoint(object_server.url(f"adapters{dora}/base.safetensors")), adapter)
    mapped = lm.map_checkpoint(checkpoint, lambda w: {"w": w["w.weight"]})
    model = abstract.shard(mesh8, {"w": P(None, "model")}).materialize(mapped)
    np.testing.assert_array_equal(np.asarray(model["w"]), local)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' own counts")
def test_a_load_stays_within_its_budget(tmp_path: Path) -> None:
    base = {f"w{n}.weight": random(2048, 2048, dtype=ml_dtypes.bfloat16) for n in range(4)}
    tensors = pair("w0", 2048, 2048, 16) | pair("w1", 2048, 2048, 16) | pair("w2", 2048, 2048, 16)
    magnitudes = {f"{PREFIX}w{n}.lora_magnitude_vector": np.abs(random(2048)) for n in range(3)}
    save_file(base, tmp_path / "base.safetensors")
    adapter = lm.open_adapter(write(tmp_path / "a", tensors | magnitudes, r=16, use_dora=True))
    merged = lm.merge(lm.open_checkpoint(tmp_path / "base.safetensors"), adapter)
    abstract = lm.build_abstract(lambda: {name: jnp.zeros((2048, 2048), jnp.bfloat16) for name in base})
    with Peak() as peak:
        model = abstract.materialize(merged, max_host_memory="16MiB")
    assert peak.nbytes < (4 * 8 << 20) + (32 << 20)  # the model, the budget, and the first products' libraries
    for name in base:
        np.testing.assert_array_equal(np.asarray(model[name]), merged[name].read())


def test_adapters_are_merged_one_after_another(tmp_path: Path) -> None:
    one, two = pair("w", 64, 32), pair("w", 64, 32)
    base = {"w.weight": random(64, 32, dtype=ml_dtypes.bfloat16)}
    adapters = [lm.open_adapter(write(tmp_path / name, each)) for name, each in (("1", one), ("2", two))]
    merged = lm.merge(lm.merge(base, adapters[0]), adapters[1], 0.25)["w.weight"]
    total = base["w.weight"].astype(np.float32) + product(one, "w", 2.0) + product(two, "w", 0.5)
    near(merged, total.astype(ml_dtypes.bfloat16))  # rounded once


@pytest.mark.parametrize("transposed", [False, True])
def test_dora_has_the_norms_of_the_magnitudes(tmp_path: Path, transposed: bool) -> None:
    tensors = pair("w", 96, 640)
    magnitude = np.abs(random(96))
    stored = tensors | {f"{PREFIX}w.lora_magnitude_vector": magnitude}
    base = random(96, 640)
    adapter = lm.open_adapter(write(tmp_path / "a", stored, use_dora=True))
    assert "DoRA" in repr(adapter)
    merged = lm.merge({"w.weight": base.T.copy() if transposed else base}, adapter)["w.weight"]
    total = base + product(tensors, "w", 2.0)
    expected = total * (magnitude / np.linalg.norm(total, axis=1))[:, None]
    near(merged.T if transposed else merged, expected)
    near(merged[3:5, 7:70], (expected.T if transposed else expected)[3:5, 7:70])


@pytest.mark.parametrize("given", [True, False])
def test_square_matrices_are_stored_as_the_others_are(tmp_path: Path, given: bool) -> None:
    """A model whose configuration was changed by another kind of layer, as PEFT does."""
    tensors = pair("square", 32, 32) | pair("wide", 96, 32)
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, fan_in_fan_out=given))
    base = {"square.weight": random(32, 32), "wide.weight": random(32, 96)}
    merged = lm.merge(base, adapter)
    for name in ("square", "wide"):
        near(merged[f"{name}.weight"], base[f"{name}.weight"] + product(tensors, name, 2.0).T)
    alone = lm.open_adapter(write(tmp_path / "b", pair("square", 32, 32), fan_in_fan_out=given))
    delta = product(tensors_of(tmp_path / "b"), "square", 2.0)
    near(lm.merge(base, alone)["square.weight"], base["square.weight"] + (delta.T if given else delta))
    # A base that shows how it is stored is right, not the adapter: GPT-2's adapters on quantized bases state False.
    layer = {"h.0.square.weight": random(32, 32), "h.0.wide.weight": random(32, 96), "h.0.wide.bias": random(96)}
    other = {"h.1.wide.weight": random(96, 32), "h.1.wide.bias": random(96)}
    alone = lm.open_adapter(write(tmp_path / "d", pair("h.0.square", 32, 32), fan_in_fan_out=given))
    delta = product(tensors_of(tmp_path / "d"), "h.0.square", 2.0)
    near(lm.merge(layer | other, alone)["h.0.square.weight"], layer["h.0.square.weight"] + delta.T)
    base["narrow.weight"] = random(16, 32)
    both = lm.open_adapter(write(tmp_path / "c", tensors | pair("narrow", 16, 32)))
    with pytest.raises(lm.CheckpointError, match=r"'square': expected all matrices as \(out, in\)"):
        lm.merge(base, both)


def test_whole_tensors_are_replaced_or_added_in_the_base_s_dtype(tmp_path: Path) -> None:
    head, score, bias = random(20, 64), random(2, 64), random(96)
    tensors = pair("model.layers.0.q", 96, 64) | {
        f"{PREFIX}norm.weight": head,
        f"{PREFIX}score.weight": score,
        f"{PREFIX}model.layers.0.q.base_layer.bias": bias,
    }
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, modules_to_save=["norm", "score"], bias="all"))
    assert "3 replaced tensors" in repr(adapter)
    base = base_of(ml_dtypes.bfloat16)
    merged = lm.merge(base, adapter)
    np.testing.assert_array_equal(merged["norm.weight"], head.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(merged["model.layers.0.q.bias"], bias.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(merged["score.weight"], score)
    assert list(merged) == [*base, "score.weight"]


@pytest.mark.parametrize(("base", "module"), [("model.", ""), ("", "model."), ("base_model.", "model.")])
def test_a_prefix_may_differ(tmp_path: Path, base: str, module: str) -> None:
    tensors = pair(f"{module}layers.0.q", 96, 64) | {f"{PREFIX}lm_head.weight": random(9, 64)}
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, modules_to_save=["lm_head"]))
    weights = base_of(prefix=f"{base}layers.0.") | {"lm_head.weight": random(9, 64)}
    merged = lm.merge(weights, adapter)
    name = f"{base}layers.0.q.weight"
    near(merged[name], weights[name] + product(tensors, f"{module}layers.0.q", 2.0))
    np.testing.assert_array_equal(merged["lm_head.weight"], tensors[f"{PREFIX}lm_head.weight"])
    assert len(merged) == len(weights)


def test_parts_are_told_apart_by_their_words(tmp_path: Path) -> None:
    tensors = pair("model.language_model.layers.0.q", 96, 64) | pair("model.vision_tower.layers.0.q", 96, 64)
    weights = base_of(prefix="vision_tower.vision_model.layers.0.") | base_of(prefix="language_model.model.layers.0.")
    merged = lm.merge(weights, lm.open_adapter(write(tmp_path / "a", tensors)))
    for ours, theirs in (("language_model", "language_model.model"), ("vision_tower", "vision_tower.vision_model")):
        name = f"{theirs}.layers.0.q.weight"
        near(merged[name], weights[name] + product(tensors, f"model.{ours}.layers.0.q", 2.0))
    text = lm.merge(weights, lm.open_adapter(write(tmp_path / "b", pair("model.language_model.layers.0.q", 96, 64))))
    assert np.array_equal(
        text["vision_tower.vision_model.layers.0.q.weight"], weights["vision_tower.vision_model.layers.0.q.weight"]
    )
    both = pair("model.layers.0.q", 96, 64) | pair("layers.0.q", 96, 64)
    with pytest.raises(lm.CheckpointError, match="found none"):  # two for one
        lm.merge(base_of(prefix="text.layers.0."), lm.open_adapter(write(tmp_path / "c", both)))


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    adapter = lm.open_adapter(write(tmp_path / "a", pair("layers.0.q", 96, 64)))
    weights = base_of(prefix="text.layers.0.") | base_of(prefix="vision.layers.0.")
    with pytest.raises(lm.CheckpointError, match=r"found 'text.layers.0.q.weight', 'vision.layers.0.q.weight'"):
        lm.merge(weights, adapter)


@pytest.mark.parametrize("module", ["layers.3.q", "blocks.0.q", "q"])
def test_a_layer_is_never_taken_for_another(tmp_path: Path, module: str) -> None:
    adapter = lm.open_adapter(write(tmp_path / "a", pair(module, 96, 64)))
    with pytest.raises(lm.CheckpointError, match="found none; "):
        lm.merge(base_of(), adapter)


def test_experts_of_one_parameter(tmp_path: Path) -> None:
    up, down = random(3, 24, 16), random(3, 16, 12)
    tensors = {
        f"{PREFIX}mlp.experts.base_layer.lora_A.weight": random(3 * 4, 16),
        f"{PREFIX}mlp.experts.base_layer.lora_B.weight": random(24, 3 * 4),
        f"{PREFIX}mlp.experts.lora_A.weight": random(3 * 4, 12),
        f"{PREFIX}mlp.experts.lora_B.weight": random(16, 3 * 4),
    }
    targets = ["experts.up_proj", "mlp.experts.down_proj"]
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, target_parameters=targets))
    merged = lm.merge({"mlp.experts.up_proj": up, "mlp.experts.down_proj": down}, adapter)
    for name, base, module in (("up_proj", up, "mlp.experts.base_layer"), ("down_proj", down, "mlp.experts")):
        a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
        a, b = a.reshape(3, 4, -1), b.reshape(b.shape[0], 4, 3)
        near(merged[f"mlp.experts.{name}"], base + 2 * np.einsum("ore,eri->eoi", b, a))
    swapped = lm.merge({"mlp.experts.up_proj": up.swapaxes(1, 2), "mlp.experts.down_proj": down}, adapter)
    near(swapped["mlp.experts.up_proj"].swapaxes(1, 2), merged["mlp.experts.up_proj"].read())


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj"), ("w1", "w3")])
def test_experts_one_by_one(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """The rows of fused matrices are merged into their parts; `2 * 8 == 16`, but the parts show how they are stored."""
    tensors = {
        f"{PREFIX}mlp.experts.lora_A.weight": random(12 * 4, 16),
        f"{PREFIX}mlp.experts.lora_B.weight": random(16, 12 * 4),
    }
    adapter = lm.open_adapter(write(tmp_path / "a", tensors, target_parameters=["gate_up_proj"]))
    base = {
        f"mlp.experts.{n}.{part}.weight": random(8, 16, dtype=ml_dtypes.bfloat16) for part in parts for n in range(12)
    }
    save_file(base, tmp_path / "base.safetensors")
    a, b = (tensors[f"{PREFIX}mlp.experts.lora_{side}.weight"] for side in "AB")
    delta = 2 * np.einsum("ore,eri->eoi", b.reshape(16, 4, 12), a.reshape(12, 4, 16))
    with lm.merge(lm.open_checkpoint(tmp_path / "base.safetensors"), adapter) as merged:
        assert list(merged) == sorted(base) and merged.bytes_read == 0
        merged["mlp.experts.3.w3.weight" if "w3" in parts else "mlp.experts.3.up_proj.weight"].read()
        assert merged.bytes_read <= 8 * 16 * 2 + adapter.source.nbytes  # of one part
        for part, rows in zip(parts, (slice(0, 8), slice(8, 16)), strict=True):
            for n in range(12):
                name = f"mlp.experts.{n}.{part}.weight"
                near(merged[name], (base[name].astype(np.float32) + delta[n, rows]).astype(ml_dtypes.bfloat16))
    with pytest.raises(lm.CheckpointError, match="'mlp.experts.gate_up_proj': expected this tensor"):
        lm.merge({name: array for name, array in base.items() if ".3." not in name}, adapter)


def test_rows_of_tokens_are_replaced(tmp_path: Path) -> None:
    base, values = {"model.embed_tokens.weight": random(20, 8, dtype=ml_dtypes.bfloat16)}, random(3, 8)
    tensors = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": values}
    merged = lm.merge(base, lm.open_adapter(write(tmp_path / "a", tensors, trainable_token_indices=[19, 0, 7])))
    expected = base["model.embed_tokens.weight"].copy()
    expected[[19, 0, 7]] = values
    np.testing.assert_array_equal(merged["model.embed_tokens.weight"], expected)
    for rows, text in (([0, 20, 1], "different rows below 20"), ([1, 1, 2], "different rows"), ([1], r"\[1, 8\]")):
        with pytest.raises(lm.CheckpointError, match=f"embed_tokens.weight.*{text}"):
            lm.merge(base, lm.open_adapter(write(tmp_path / "a", tensors, trainable_token_indices=rows)))
    with pytest.raises(lm.CheckpointError, match="of unknown meaning"):
        lm.open_adapter(write(tmp_path / "a", tensors, trainable_token_indices={"lm_head": [1, 2, 3]}))


def test_adapters_of_mlx(tmp_path: Path) -> None:
    """As mlx-lm writes them: factors (in, r) and (r, out), and `scale` is the factor of their product."""
    base = {"model.layers.0.q.weight": random(96, 64), "model.embed_tokens.weight": random(20, 64)}
    factors = {name: (random(array.shape[1], 4), random(4, array.shape[0])) for name, array in base.items()}
    factors["model.embed_tokens.weight"] = random(20, 4), random(4, 64)
    stored = {
        f"{name[:-7]}.lora_{side}": array
        for name, pair in factors.items()
        for side, array in zip("ab", pair, strict=True)
    }
    settings: dict[str, Any] = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": 4, "scale": 20.0},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(stored, tmp_path / "adapters.safetensors")
    adapter = lm.open_adapter(tmp_path)
    assert set(adapter.scales.values()) == {20.0}
    merged = lm.merge(base, adapter)
    assert list(merged) == list(base)  # tied, and mlx-lm's head follows
    (a, b), (rows, columns) = factors.values()
    near(merged["model.layers.0.q.weight"], base["model.layers.0.q.weight"] + (a @ b).T * 20)
    near(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"] + rows @ columns * 20)
    for wrong in ({"fine_tune_type": "dora"}, {"lora_parameters": {"rank": 4}}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | wrong))
        with pytest.raises(lm.CheckpointError, match="expected lora_parameters with rank and scale.*mlx_lm.fuse"):
            lm.open_adapter(tmp_path)


def test_a_merged_checkpoint_is_materialized_mapped_saved_and_compared(
    folder: Path, tmp_path: Path, mesh8: Any
) -> None:
    base = base_of(ml_dtypes.bfloat16)
    save_file(base, tmp_path / "base.safetensors")
    merged = lm.merge(lm.open_checkpoint(tmp_path / "base.safetensors"), lm.open_adapter(folder))
    expected = {name: tensor.read() for name, tensor in merged.items()}
    abstract = lm.build_abstract(lambda: {"q": jnp.zeros((64, 96), jnp.bfloat16), "norm": jnp.zeros(64, jnp.bfloat16)})
    table = lm.WeightMap(
        {"q": lm.From("model.layers.0.q.weight").T, "norm": "norm.weight"}, ignore=["model.layers.0.{rest...}"]
    )
    mapped = lm.map_checkpoint(merged, table, abstract)
    for spec in (P("model"), P(None, "model")):
        model = abstract.shard(mesh8, {"q": spec, "norm": P()}).materialize(mapped)
        np.testing.assert_array_equal(np.asarray(model["q"]), expected["model.layers.0.q.weight"].T)
    lm.save(merged, tmp_path / "merged.safetensors")
    saved = lm.open_checkpoint(tmp_path / "merged.safetensors")
    for name, values in expected.items():
        np.testing.assert_array_equal(saved[name], values)
    assert not lm.diff(merged, saved)
    assert lm.diff(lm.open_checkpoint(tmp_path / "base.safetensors"), saved)


def test_a_merged_checkpoint_is_planned_and_run(folder: Path, mesh8: Any) -> None:
    base = base_of()
    save_file(base, folder / "base.safetensors")
    merged = lm.merge(lm.open_checkpoint(folder / "base.safetensors"), lm.open_adapter(folder))
    abstract = lm.build_abstract(lambda: {name: jnp.zeros(array.shape) for name, array in base.items()})
    abstract = abstract.shard(mesh8, {r".*\.weight": P("model")})
    abstract.plan(merged).check("1MiB")
    x = random(5, 64)

    def f(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["model.layers.0.q.weight"].T) @ params["model.layers.0.q.weight"]

    found = abstract.run(f, x, checkpoint=merged)
    expected = np.asarray(f(abstract.materialize(merged), x))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(found - f(base, x)).max() > 1


def test_the_command_converts_and_inspects(folder: Path, tmp_path: Path) -> None:
    base = base_of()
    save_file(base, tmp_path / "base.safetensors")
    write(tmp_path / "two", tensors_of(folder), lora_alpha=4)
    ran = command(
        "convert", tmp_path / "base.safetensors", tmp_path / "out.safetensors", "--verify", "--adapter", folder
    )
    assert ran.status == 0
    merged = lm.merge(base, lm.open_adapter(folder))
    assert not lm.diff(merged, lm.open_checkpoint(tmp_path / "out.safetensors"))
    both = ("--adapter", folder, "--adapter", tmp_path / "two")
    assert command("convert", tmp_path / "base.safetensors", tmp_path / "both.safetensors", *both).status == 0
    merged = lm.merge(merged, lm.open_adapter(tmp_path / "two"))
    assert not lm.diff(merged, lm.open_checkpoint(tmp_path / "both.safetensors"))
    assert json.loads(command("inspect", folder, "--json").out)["metadata"]["adapter"] == repr(lm.open_adapter(folder))
    write(folder, tensors_of(folder), peft_type="IA3")
    ran = command("inspect", folder)
    assert ran.status == 1
    assert "found 'IA3'" in ran.out
    ran = command("convert", tmp_path / "base.safetensors", tmp_path / "no.safetensors", "--adapter", folder)
    assert ran.status == 2
    assert "found 'IA3'" in ran.err


# Errors


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "LOHA"}, "found 'LOHA'.*merge_and_unload"),
        ({"peft_type": "PROMPT_TUNING"}, "found 'PROMPT_TUNING'"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "them. Merge it into a checkpoint of the changed weights"),
        ({"layer_replication": [[0, 2]]}, "found layer_replication"),
        ({"r": 8}, r"expected rank 8 .*found lora_A \[4, 64\]"),
        ({"r": "4"}, "expected a finite number 'r', found '4'"),
        ({"r": math.inf}, "expected a finite number 'r', found inf"),
        ({"lora_alpha": math.nan}, "expected a finite number 'lora_alpha', found nan"),
        ({"lora_alpha": 10**400}, "expected a finite number 'lora_alpha', found 10"),
        ({"alpha_pattern": {"q": math.inf}}, "expected 'alpha_pattern' of regular expressions and numbers"),
        ({"rank_pattern": {"(": 4}}, "expected 'rank_pattern' of regular expressions and numbers"),
        ({"use_dora": True}, "expected lora_magnitude_vector of 'model.layers.0.q'"),
    ],
)
def test_other_adapters_are_refused(folder: Path, config: dict[str, Any], text: str) -> None:
    write(folder, tensors_of(folder), **config)
    with pytest.raises(lm.CheckpointError, match=f"(?s){re.escape(str(folder))}.*{text}"):
        lm.open_adapter(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t | {f"{PREFIX}x.weight": random(2)}, "1 tensor of unknown meaning: 'base_model.model.x.weight'"),
        (lambda t: t | {f"{PREFIX}x.bias": random(2)}, "of unknown meaning"),
        (lambda t: t | {f"{PREFIX}model.layers.0.q.lora_magnitude_vector": random(96)}, "found also lora_magnitude"),
        (lambda t: dict(list(t.items())[1:]), "it is incomplete"),
        (lambda t: {}, "found none"),
    ],
)
def test_tensors_that_no_rule_explains_are_refused(folder: Path, change: Callable[..., Any], text: str) -> None:
    write(folder, change(tensors_of(folder)))
    with pytest.raises(lm.CheckpointError, match=text):
        lm.open_adapter(folder)


def test_folders_without_one_adapter_are_refused(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", tensors_of(folder))
    with pytest.raises(lm.CheckpointError, match="2 adapters in 'adapter', 'other'; open one"):
        lm.open_adapter(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(lm.CheckpointError, match="expected adapter_model.safetensors next to adapter_config.json"):
        lm.open_adapter(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(lm.CheckpointError, match="expected adapter_config.json.*save_pretrained wrote"):
        lm.open_adapter(folder)
    with pytest.raises(lm.CheckpointError, match="there is no checkpoint at"):
        lm.open_adapter(tmp_path / "absent")


def test_another_base_is_refused(folder: Path) -> None:
    adapter, base = lm.open_adapter(folder), base_of()
    with pytest.raises(lm.CheckpointError, match=r"found none; closest.*base model \(example/base\)"):
        lm.merge({name.replace("0.q", "0.qq").replace("0.v", "0.vv"): a for name, a in base.items()}, adapter)
    wrong = base | {"model.layers.0.q.weight": random(96, 32)}
    with pytest.raises(lm.CheckpointError, match=r"expected shape \[96, 64\].*found \[96, 32\]; .*\(example/base\)"):
        lm.merge(wrong, adapter)
    integers = base | {"model.layers.0.q.weight": np.zeros((96, 64), np.int8)}
    with pytest.raises(lm.CheckpointError, match="expected floating-point numbers, found int8"):
        lm.merge(integers, adapter)
    with pytest.raises(lm.CheckpointError, match="lm.open_adapter"):
        lm.merge(base, str(folder))  # pyright: ignore[reportArgumentType]
    with pytest.raises(lm.CheckpointError, match="finite scale"):
        lm.merge(base, adapter, float("nan"))


def test_an_adapter_is_no_checkpoint_of_a_model(folder: Path) -> None:
    abstract = lm.build_abstract(lambda: {"q": jnp.zeros((96, 64))})
    checkpoint = lm.open_checkpoint(folder / "adapter_model.safetensors")
    with pytest.raises(lm.CheckpointError, match=r"lm.merge\(checkpoint, lm.open_adapter\(folder\)\)"):
        lm.WeightMap.suggest(checkpoint, abstract)


# PEFT itself


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, vocab_size=64, **options))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32))


def convolutions() -> Any:
    from torch import nn

    layers = {"one": nn.Conv1d(6, 8, 3), "two": nn.Conv2d(8, 10, 3), "flat": nn.Conv2d(8, 10, 1)}
    return nn.ModuleDict(layers)


def experts() -> Any:
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(3, 24, 16))
            self.down_proj = nn.Parameter(torch.randn(3, 16, 12))

    return nn.ModuleDict({"experts": Experts()})


QV, ALL = ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGURATIONS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "plain": (llama, "float32", {"r": 4, "target_modules": QV}),
    "all linear": (llama, "bfloat16", {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"}),
    "half": (llama, "float16", {"r": 2, "target_modules": ALL}),
    "rslora": (llama, "bfloat16", {"r": 8, "use_rslora": True, "target_modules": ALL}),
    "dora": (llama, "float32", {"r": 4, "use_dora": True, "target_modules": ALL}),
    "dora bfloat16": (llama, "bfloat16", {"r": 4, "use_dora": True, "use_rslora": True, "target_modules": QV}),
    "patterns": (
        llama,
        "float32",
        {
            "r": 4,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6},
            "alpha_pattern": {r"^model.layers.0.self_attn.v_proj": 3, "down_proj": 5},
        },
    ),
    "layers": (llama, "float32", {"r": 4, "target_modules": QV, "layers_to_transform": [1]}),
    "expression": (llama, "float32", {"r": 4, "target_modules": r".*\.0\..*(q|k)_proj"}),
    "embeddings": (llama, "float32", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "dora embeddings": (llama, "float32", {"r": 4, "use_dora": True, "target_modules": ["embed_tokens", "k_proj"]}),
    "head": (llama, "float32", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "modules to save": (llama, "bfloat16", {"r": 4, "target_modules": QV, "modules_to_save": ["lm_head", "norm"]}),
    "biases": (lambda: llama(attention_bias=True), "float32", {"r": 4, "target_modules": QV, "bias": "all"}),
    "lora biases": (lambda: llama(attention_bias=True), "bfloat16", {"r": 4, "target_modules": QV, "lora_bias": True}),
    "lora_only": (lambda: llama(attention_bias=True), "float32", {"r": 4, "target_modules": QV, "bias": "lora_only"}),
    "gpt2": (gpt2, "float32", {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2 unstated": (gpt2, "bfloat16", {"r": 4, "target_modules": ["c_attn", "c_proj"]}),
    "gpt2 dora": (gpt2, "float32", {"r": 4, "use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "convolutions": (convolutions, "float32", {"r": 4, "target_modules": ["one", "two", "flat"]}),
    "dora convolutions": (convolutions, "float32", {"r": 4, "use_dora": True, "target_modules": ["one", "two"]}),
    "experts": (experts, "float32", {"r": 4, "target_parameters": ["experts.up_proj", "experts.down_proj"]}),
}


def tuned_by_peft(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """An adapter that PEFT saves to a folder, with random numbers: its model, and the base's tensors."""
    peft, torch, _ = (pytest.importorskip(package) for package in ("peft", "torch", "transformers"))
    torch.manual_seed(0)
    build, dtype, options = CONFIGURATIONS[name]
    base = build().to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(torch.randn_like(parameter.float()) * 0.5)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter.float()) * 0.2 + 0.1)
    model.save_pretrained(folder)
    return model, before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_merged_values_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model, before = tuned_by_peft(name, tmp_path / "adapter")
    from safetensors.torch import save_file as save_torch

    save_torch(before, tmp_path / "base.safetensors")
    expected = model.merge_and_unload().state_dict()
    adapter = lm.open_adapter(tmp_path / "adapter")
    changed = 0
    with lm.merge(lm.open_checkpoint(tmp_path / "base.safetensors"), adapter) as merged:
        for key, tensor in merged.items():
            values = expected[key].float().numpy().astype(tensor.dtype)
            near(tensor, values)
            changed += not before[key].equal(expected[key])
    assert changed >= len(adapter.targets)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    mostly_large(
        ["all linear", "rslora", "patterns", "layers", "embeddings", "head", "gpt2", "gpt2 unstated", "convolutions"],
        ["rslora", "embeddings", "gpt2", "convolutions"],
    ),
)
def test_pairs_that_a_model_had_are_loaded_by_peft(name: str, tmp_path: Path) -> None:
    model, before = tuned_by_peft(name, tmp_path / "theirs")
    import peft

    weights = {key: value.float().numpy() for key, value in before.items()}
    adapter = lm.open_adapter(tmp_path / "theirs")
    tree = dict(weights)
    for module, rank in adapter.ranks.items():
        of = f"{module}.weight"
        first = "Conv1D" in type(model.base_model.model.get_submodule(module).base_layer).__name__ or "embed" in module
        outs = tree[of].shape[-1] if first else tree[of].shape[0]
        ins = tree[of].shape[:-1] if first else tree[of].shape[1:]
        tree |= {f"{of}_lora_a": np.zeros((*ins, rank), "float32"), f"{of}_lora_b": np.zeros((rank, outs), "float32")}
    abstract = lm.build_abstract(lambda: {path: jnp.asarray(array) for path, array in tree.items()})
    table = lm.WeightMap({path: path for path in weights})
    ours = abstract.materialize(table.adapters(weights, adapter, abstract, scale=1.0))
    lm.save_adapter(ours, tmp_path / "ours", scale=1.0)
    base = CONFIGURATIONS[name][0]()
    base.load_state_dict(before)
    found = peft.PeftModel.from_pretrained(base, tmp_path / "ours").merge_and_unload().state_dict()
    expected = model.float().merge_and_unload().state_dict()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key].numpy(), values.numpy(), rtol=1e-5, atol=1e-5)
