"""Tables of Tunix' form, without Tunix; `tests/others` loads its own models by its own tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel_flax import tunix

LAYERS, VOCAB, SIZE, HEADS, GROUPS, DIM, EXPERTS, HIDDEN = 3, 20, 12, 4, 2, 6, 5, 8
LAYER = r"(?:text\.)?layers\.([0-9]+)\."
TABLE: dict[str, Any] = {
    r"(?:text\.)?embed\.weight": ("embed.value", None),
    LAYER + r"q_proj\.weight": (r"tmp.\1.q", ((1, 0), (SIZE, HEADS, DIM))),
    LAYER + r"(k|v)_proj\.weight": (r"tmp.\1.\2", ((1, 0), (SIZE, GROUPS, DIM))),
    LAYER + r"o_proj\.weight": (r"layers.\1.out", ((1, 0), (HEADS, DIM, SIZE))),
    LAYER + r"experts\.([0-9]+)\.up\.weight": (r"tmp.\1.up.\2", ((1, 0), None)),
    LAYER + r"gate\.bias": (r"layers.\1.gate", (None, (2, EXPERTS))),
    r"lm_head\.weight": ("lm_head.w", ((1, 0), None)),
    LAYER + r"rotary\..*": (r"unused.rotary.\1", None),
}


def preprocess(tensors: dict[str, Any]) -> dict[str, Any]:
    """Joins keys with values, and experts."""
    found = {key: tensor for key, tensor in tensors.items() if not key.startswith("tmp.")}
    for layer in range(LAYERS):
        q, k, v = (jnp.transpose(tensors[f"tmp.{layer}.{name}"], (1, 0, 2)) for name in "qkv")
        found |= {f"layers.{layer}.q": q, f"layers.{layer}.kv": jnp.stack([k[:GROUPS], v])}
        found[f"layers.{layer}.up"] = jnp.stack([tensors[f"tmp.{layer}.up.{n}"] for n in range(EXPERTS)], 0)
    return found


class Layer(nnx.Module):
    def __init__(self) -> None:
        shapes = {"q": (HEADS, SIZE, DIM), "kv": (2, GROUPS, SIZE, DIM), "out": (HEADS, DIM, SIZE)}
        shapes |= {"up": (EXPERTS, SIZE, HIDDEN), "gate": (2, EXPERTS)}
        for name, shape in shapes.items():
            axes = ("tp", *(None,) * (len(shape) - 1)) if name in ("q", "out") else (None,) * len(shape)
            setattr(self, name, nnx.Param(jnp.zeros(shape, jnp.bfloat16), out_sharding=axes))


class Model(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Param(jnp.zeros((VOCAB, SIZE)))
        self.layers = nnx.List([Layer() for _ in range(config)])


def huggingface() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"text.embed.weight": (VOCAB, SIZE), "lm_head.weight": (VOCAB, SIZE)}
    for number in range(LAYERS):
        layer = {f"{name}_proj.weight": (n * DIM, SIZE) for name, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))}
        layer |= {"o_proj.weight": (SIZE, HEADS * DIM), "gate.bias": (2 * EXPERTS,), "rotary.inv_freq": (3,)}
        layer |= {f"experts.{expert}.up.weight": (HIDDEN, SIZE) for expert in range(EXPERTS)}
        shapes |= {f"text.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {name: rng.random(shape).astype("float32") for name, shape in shapes.items()}


def expected(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values by NumPy: the table, then the function, on whole arrays."""
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for regex, (key, moves) in TABLE.items():
            if re.match(regex, name):
                axes, shape = moves or (None, None)
                moved = tensor.transpose(axes) if axes else tensor
                named[re.sub(regex, key, name)] = moved.reshape(shape) if shape else moved
    kept = {key.removesuffix(".value").replace(".", "/"): array for key, array in preprocess(named).items()}
    return {key: np.asarray(array) for key, array in kept.items() if not key.startswith(("unused", "lm_head"))}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_load_and_create_model(sharded: bool, dtype: Any, tmp_path: Path) -> None:
    tensors = huggingface()
    lm.save(tensors, tmp_path, format="safetensors", max_shard_size=4096)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp")) if sharded else None
    with nnx.use_eager_sharding(False):  # as Tunix' models, which may be built without a mesh
        model = tunix.load_and_create_model(str(tmp_path), Model, LAYERS, lambda _: TABLE, mesh, preprocess, dtype)
    found = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    values = expected(tensors)
    assert found.keys() == values.keys()
    for path, array in values.items():
        assert found[path].dtype == np.dtype(dtype or "float32")
        np.testing.assert_array_equal(found[path], array.astype(found[path].dtype), path)
    if mesh is not None:
        assert found["layers/1/q"].sharding.is_equivalent_to(NamedSharding(mesh, P("tp")), 3)


def test_a_table_goes_both_ways(tmp_path: Path) -> None:
    tensors = huggingface()
    model = lm.build_abstract(Model, LAYERS, nnx.Rngs(0))
    table = tunix.from_key_mapping(TABLE, tensors, model, preprocess)
    assert (
        'lm.From("text.layers.{layer}.k_proj.weight", "text.layers.{layer}.v_proj.weight", axis=0, sizes=(12, 12))'
        in str(table)
    )
    report = table.check(tensors, model)
    assert report.ok and not report.one_way
    assert set(report.ignored) == {"lm_head.weight", *(f"text.layers.{n}.rotary.inv_freq" for n in range(LAYERS))}
    mapped = lm.map_checkpoint(tensors, table, model)
    for path, array in expected(tensors).items():
        np.testing.assert_array_equal(mapped[path].read(), array, path)
    written = table.write(expected(tensors))
    assert written.keys() == tensors.keys() - report.ignored.keys()
    assert all(np.array_equal(written[name], tensors[name]) for name in written)
    live = model.materialize(mapped, cast="unsafe")  # the same for a live model
    assert str(tunix.from_key_mapping(TABLE, tensors, live, preprocess)) == str(table)


def test_adapters_are_kept_in_the_pairs_that_qwix_adds(tmp_path: Path) -> None:
    """The axes that einsums contract are those of `w_lora_a`; `w_lora_b` has the others."""
    contracted = {"q": (1,), "kv": (2,), "out": (0, 1)}
    rng, tensors, rank = np.random.default_rng(0), huggingface(), 6
    pairs: dict[str, Any] = {}
    for name, weight in tensors.items():
        if "_proj" in name:  # keys and values are one variable, with the rank of both
            module, part = f"base_model.model.{name.removesuffix('.weight')}", rank // 2
            pairs[f"{module}.lora_A.weight"] = rng.random((part, weight.shape[1])).astype("float32")
            pairs[f"{module}.lora_B.weight"] = rng.random((weight.shape[0], part)).astype("float32")
    lm.save(pairs, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 3}')
    adapter, values = lm.open_adapter(tmp_path), expected(tensors)
    shapes = {path: array.shape for path, array in values.items()}
    tuned = dict(shapes)
    for path, shape in shapes.items():
        if axes := contracted.get(path.rpartition("/")[2]):
            tuned[f"{path}_lora_a"] = (*(shape[axis] for axis in axes), rank)
            tuned[f"{path}_lora_b"] = (rank, *(size for axis, size in enumerate(shape) if axis not in axes))
    abstract, base = (
        lm.build_abstract(lambda each=each: {path: jnp.zeros(shape) for path, shape in each.items()})
        for each in (tuned, shapes)
    )
    table = tunix.from_key_mapping(TABLE, tensors, base, preprocess)
    merged = base.materialize(lm.map_checkpoint(lm.merge(tensors, adapter), table, base))
    model = abstract.materialize(table.adapters(tensors, adapter, abstract, scale=1.0), initialize="missing")
    for path, shape in shapes.items():
        if axes := contracted.get(path.rpartition("/")[2]):
            product = jnp.tensordot(model[f"{path}_lora_a"], model[f"{path}_lora_b"], 1)
            update = product.transpose(np.argsort([*axes, *(axis for axis in range(len(shape)) if axis not in axes)]))
            np.testing.assert_allclose(model[path] + update, merged[path], rtol=1e-5, err_msg=path)
    lm.save_adapter(model, tmp_path / "out", mapping=table, scale=1.0)
    again = lm.merge(tensors, lm.open_adapter(tmp_path / "out"))
    for name, tensor in lm.merge(tensors, adapter).items():
        np.testing.assert_allclose(np.asarray(tensor), np.asarray(again[name]), rtol=1e-5)


TWICE = {r"up\.weight": ("kernel", ((1, 0), None)), r"gate\.weight": ("kernel", ((1, 0), None))}
RESHAPED = {r"up\.weight": ("kernel", ((1, 0), (8, 3)))}
PLAIN = {r"up\.weight": ("kernel", ((1, 0), None))}


@pytest.mark.parametrize(
    ("table", "change", "match"),
    [
        (TWICE, None, r"the table makes 'kernel' of 'gate.weight', 'up.weight'"),
        (RESHAPED, None, r"makes 'kernel' of 'up.weight', \[16, 8\], with axes \(1, 0\) and shape \(8, 3\)"),
        (PLAIN, lambda t: {"kernel": t["kernel"] * 2}, r"preprocess_fn computes 'mul'; it must only move elements"),
        (PLAIN, lambda t: {"kernel": t["other"]}, r"preprocess_fn cannot be traced: 'other'"),
        ({}, None, r"has no tensor for 1 of 1 variables"),
    ],
)
def test_errors(table: Any, change: Any, match: str, tmp_path: Path) -> None:
    lm.save({name: np.ones((16, 8)) for name in ("gate.weight", "up.weight")}, tmp_path / "model.safetensors")
    with pytest.raises(lm.LazyModelError, match=match):
        tunix.load_and_create_model(
            str(tmp_path), lambda _, rngs: nnx.Linear(8, 16, use_bias=False, rngs=rngs), None, lambda _: table,
            preprocess_fn=change,
        )  # fmt: skip


def test_what_no_entry_makes() -> None:
    tensors, model = {"up.weight": np.ones((16, 8))}, {"kernel": jnp.ones((8, 4))}
    with pytest.raises(lm.LazyModelError, match="no entry of a WeightMap makes 'kernel'"):
        tunix.from_key_mapping(PLAIN, tensors, model, lambda t: {"kernel": t["kernel"][:, :4]})


def test_without_tunix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(lm.LazyModelError, match="not installed: pip install google-tunix"):
        tunix.qwen3(None, {})
