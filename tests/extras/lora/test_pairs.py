"""LoRA pairs through a table: an adapter into a model's pairs and out again, against merging."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import examples, mostly_large

RNG = np.random.default_rng(5)
LAYERS, MODEL, HEADS, DIM, RANK = 3, 16, 4, 8, 4
Shapes = dict[str, tuple[int, ...]]


def random(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def write(folder: Path, shapes: Mapping[str, tuple[int, int]], dtype: Any = np.float32, **config: Any) -> lm.Adapter:
    """An adapter of modules with these shapes `(out, in)`, opened."""
    tensors: dict[str, np.ndarray] = {}
    for module, (outs, ins) in shapes.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = random(RANK, ins, dtype=dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = random(outs, RANK, dtype=dtype)
    return write_tensors(folder, tensors, **config)


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> lm.Adapter:
    folder.mkdir()
    lm.save(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8} | config))
    return lm.open_adapter(folder)


def build(shapes: Shapes, dtype: Any = jnp.float32) -> lm.AbstractModel:
    """A plain tree; `b` of pairs are zeros, as training begins."""

    def init() -> dict[str, Any]:
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
        made = {path: jax.random.normal(keys[path], shape, dtype) for path, shape in shapes.items()}
        return {path: jnp.zeros_like(array) if path.endswith("_b") else array for path, array in made.items()}

    return lm.build_abstract(init)


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, "float64"), np.asarray(expected, "float64"), rtol=1e-5, atol=1e-5)


def effective(model: Mapping[str, Any], path: str, product: str, scale: float) -> Any:
    """A kernel with its pair merged; `product` is the einsum of both factors."""
    a, b = model[f"{path}_lora_a"], model[f"{path}_lora_b"]
    return model[path] + scale * jnp.einsum(product, a, b).reshape(model[path].shape)


STACKED = {f"l.{i}.q": (HEADS * DIM, MODEL) for i in range(LAYERS)}
OUT = {f"l.{i}.o": (MODEL, HEADS * DIM) for i in range(LAYERS)}
# base (out, in), adapted, entry, kernel, a, b, einsum of the model's factors
CASES: dict[str, tuple[dict[str, tuple[int, int]], list[str], lm.From, Shapes, str]] = {
    "transposed": (
        {"q": (24, MODEL)}, ["q"], lm.From("q.weight").T,
        {"w": (MODEL, 24), "w_lora_a": (MODEL, RANK), "w_lora_b": (RANK, 24)}, "ir,ro->io",
    ),
    "as it is": (
        {"q": (24, MODEL)}, ["q"], lm.From("q.weight"),
        {"w": (24, MODEL), "w_lora_a": (MODEL, RANK), "w_lora_b": (RANK, 24)}, "ir,ro->oi",
    ),
    "of PEFT's shapes, multiplied": (
        {"q": (24, MODEL)}, ["q"], lm.From("q.weight").scale(0.25),
        {"w": (24, MODEL), "w_lora_a": (RANK, MODEL), "w_lora_b": (24, RANK)}, "ri,or->oi",
    ),
    "more rank": (
        {"q": (24, MODEL)}, ["q"], lm.From("q.weight").T,
        {"w": (MODEL, 24), "w_lora_a": (MODEL, 7), "w_lora_b": (7, 24)}, "ir,ro->io",
    ),
    "heads of stacked layers, not all adapted": (
        STACKED, ["l.0.q", "l.2.q"], lm.From("l.{i}.q.weight").rearrange("(h d) m -> h m d").stack("i"),
        {"w": (LAYERS, HEADS, MODEL, DIM), "w_lora_a": (LAYERS, MODEL, RANK),
         "w_lora_b": (LAYERS, RANK, HEADS, DIM)}, "lmr,lrhd->lhmd",
    ),
    "inputs in heads": (
        OUT, [*OUT], lm.From("l.{i}.o.weight").rearrange("m (h d) -> h d m").stack("i", axis=1),
        {"w": (HEADS, LAYERS, DIM, MODEL), "w_lora_a": (LAYERS, HEADS, DIM, RANK),
         "w_lora_b": (LAYERS, RANK, MODEL)}, "lhdr,lrm->hldm",
    ),
    "inputs in one axis": (
        OUT, [*OUT], lm.From("l.{i}.o.weight").rearrange("m (h d) -> h d m").stack("i"),
        {"w": (LAYERS, HEADS, DIM, MODEL), "w_lora_a": (LAYERS, HEADS * DIM, RANK),
         "w_lora_b": (LAYERS, RANK, MODEL)}, "lir,lrm->lim",
    ),
    "halves of heads interleaved": (
        {"q": (HEADS * DIM, MODEL)}, ["q"],
        lm.From("q.weight").rearrange("(h two d) m -> m h (d two)", two=2, d=DIM // 2),
        {"w": (MODEL, HEADS, DIM), "w_lora_a": (MODEL, RANK), "w_lora_b": (RANK, HEADS, DIM)}, "mr,rhd->mhd",
    ),
    "halves of inputs interleaved": (
        OUT, [*OUT], lm.From("l.{i}.o.weight").rearrange("m (two d) -> (d two) m", two=2).stack("i"),
        {"w": (LAYERS, HEADS * DIM, MODEL), "w_lora_a": (LAYERS, HEADS * DIM, RANK),
         "w_lora_b": (LAYERS, RANK, MODEL)}, "lir,lrm->lim",
    ),
    "joined, one adapted": (
        {"k": (MODEL, 24), "v": (8, 24)}, ["v"], lm.From("k.weight", "v.weight", sizes=[MODEL, 8]).T,
        {"w": (24, MODEL + 8), "w_lora_a": (24, RANK), "w_lora_b": (RANK, MODEL + 8)}, "ir,ro->io",
    ),
    "joined, with the rank of both": (
        {"k": (MODEL, 24), "v": (8, 24)}, ["k", "v"], lm.From("k.weight", "v.weight", sizes=[MODEL, 8]).T,
        {"w": (24, MODEL + 8), "w_lora_a": (24, 2 * RANK), "w_lora_b": (2 * RANK, MODEL + 8)}, "ir,ro->io",
    ),
}  # fmt: skip
SOME = ("transposed", "heads of stacked layers, not all adapted", "inputs in heads", "joined, with the rank of both")


@pytest.mark.parametrize("name", mostly_large(CASES, SOME))
def test_a_pair_goes_where_its_base_goes_and_comes_back(name: str, tmp_path: Path, mesh8: Any) -> None:
    shapes, adapted, entry, variables, product = CASES[name]
    base = {f"{module}.weight": random(*shape) for module, shape in shapes.items()}
    adapter = write(tmp_path / "a", {module: shapes[module] for module in adapted})
    table, abstract = lm.WeightMap({"w": entry}), build(variables)
    merged = lm.merge(base, adapter)
    kernel = build({"w": variables["w"]})
    expected = kernel.materialize(lm.map_checkpoint(merged, table, kernel))["w"]
    pairs = table.adapters(base, adapter, abstract, scale=0.5)
    model = abstract.materialize(pairs)
    near(effective(model, "w", product, 0.5), expected)
    initial = abstract.materialize()
    if name == "more rank":  # what is not the adapter's is as the model initializes it
        np.testing.assert_array_equal(model["w_lora_a"][:, RANK:], initial["w_lora_a"][:, RANK:])
        assert not np.any(model["w_lora_b"][RANK:])
    if len(adapted) < len(STACKED) and shapes is STACKED:
        np.testing.assert_array_equal(model["w_lora_a"][1], initial["w_lora_a"][1])
    last = {path: P(*[None] * (v.ndim - 1), "model" if v.shape[-1] % 8 == 0 else None) for path, v in model.items()}
    sharded = abstract.shard(mesh8, last)
    for path, array in sharded.materialize(pairs).items():
        np.testing.assert_array_equal(array, model[path])
    lm.save_adapter(model, tmp_path / "b", mapping=table, scale=0.5)
    again = lm.open_adapter(tmp_path / "b")
    for module, tensor in lm.merge(base, again).items():
        near(tensor, merged[module])


def test_factors_keep_their_bits_if_scales_are_powers_of_two(tmp_path: Path) -> None:
    adapter = write(tmp_path / "a", {"q": (24, MODEL)}, dtype=ml_dtypes.bfloat16)
    base, table = {"q.weight": random(24, MODEL)}, lm.WeightMap({"w": lm.From("q.weight").T})
    abstract = build(CASES["transposed"][3], jnp.bfloat16)
    model = abstract.materialize(table.adapters(base, adapter, abstract, scale=8.0))
    stored = lm.open_checkpoint(tmp_path / "a" / "adapter_model.safetensors")
    a, b = (stored[f"base_model.model.q.lora_{side}.weight"] for side in "AB")
    np.testing.assert_array_equal(np.asarray(model["w_lora_a"]), np.asarray(a.T))
    np.testing.assert_array_equal(np.asarray(model["w_lora_b"]), np.asarray(b.T) * 0.25)
    lm.save_adapter(model, tmp_path / "b", mapping=table, scale=8.0)
    written = lm.open_adapter(tmp_path / "b")
    assert (written.rank, written.scales) == (RANK, {"q": 8.0})
    tensors = lm.open_checkpoint(tmp_path / "b" / "adapter_model.safetensors")
    for path, side in (("a", "A"), ("b", "B")):
        found = np.asarray(tensors[f"base_model.model.q.lora_{side}.weight"])
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found, np.asarray(model[f"w_lora_{path}"]).T)


def test_nothing_is_read_before_a_device_requests_it(tmp_path: Path) -> None:
    shapes = {f"l.{i}.q": (256, 512) for i in range(LAYERS)}
    adapter = write(tmp_path / "a", shapes)
    lm.save({f"{module}.weight": random(*shape) for module, shape in shapes.items()}, tmp_path / "base.safetensors")
    base = lm.open_checkpoint(tmp_path / "base.safetensors")
    table = lm.WeightMap({"w": lm.From("l.{i}.q.weight").T.stack("i")})
    sizes = {"w": (LAYERS, 512, 256), "w_lora_a": (LAYERS, 512, RANK), "w_lora_b": (LAYERS, RANK, 256)}
    abstract = build(sizes)
    pairs = table.adapters(base, adapter, abstract, scale=1.0)
    assert (base.bytes_read, adapter.source.bytes_read) == (0, 0)
    abstract.materialize(pairs)
    assert adapter.source.bytes_read == LAYERS * RANK * (512 + 256) * 4
    assert base.bytes_read == LAYERS * 512 * 256 * 4


def test_fused_tensors_and_matrices_stored_as_inputs_by_outputs(tmp_path: Path) -> None:
    base = {"c_attn.weight": random(MODEL, 3 * MODEL), "wte.weight": random(40, MODEL)}
    parts = {name: lm.From("c_attn.weight").part(n, of=3, axis=1) for n, name in enumerate("qkv")}
    table = lm.WeightMap({**parts, "embed": "wte.weight"})
    pair = {"_lora_a": (MODEL, RANK), "_lora_b": (RANK, MODEL)}
    shapes: Shapes = {"embed": (40, MODEL), "embed_lora_a": (40, RANK), "embed_lora_b": (RANK, MODEL)}
    for name in "qkv":
        shapes |= {name: (MODEL, MODEL), **{f"{name}{factor}": shape for factor, shape in pair.items()}}
    tensors = {
        "base_model.model.c_attn.lora_A.weight": random(RANK, MODEL),
        "base_model.model.c_attn.lora_B.weight": random(3 * MODEL, RANK),
        "base_model.model.wte.lora_embedding_A": random(RANK, 40),
        "base_model.model.wte.lora_embedding_B": random(MODEL, RANK),
    }
    adapter, abstract = write_tensors(tmp_path / "a", tensors, fan_in_fan_out=True), build(shapes)
    merged = lm.merge(base, adapter)
    model = abstract.materialize(table.adapters(base, adapter, abstract, scale=2.0))
    for n, name in enumerate("qkv"):
        expected = np.asarray(merged["c_attn.weight"])[:, n * MODEL : (n + 1) * MODEL]
        near(effective(model, name, "ir,ro->io", 2.0), expected)
    near(effective(model, "embed", "ir,ro->io", 2.0), merged["wte.weight"])
    # Each part has factors of its own by now: together they are of three times the rank.
    lm.save_adapter(model, tmp_path / "b", mapping=table, scale=2.0, base="gpt2")
    written = lm.open_adapter(tmp_path / "b")
    assert written.ranks == {"c_attn": 3 * RANK, "wte": RANK}
    assert (written.config["fan_in_fan_out"], written.base) == (True, "gpt2")
    for name, tensor in lm.merge(base, written).items():
        near(tensor, merged[name])
    trained = {path: array for path, array in model.items() if not path.startswith(("q_lora", "k_lora"))}
    lm.save_adapter(trained, tmp_path / "v", mapping=table, scale=2.0)
    near(
        np.asarray(lm.merge(base, lm.open_adapter(tmp_path / "v"))["c_attn.weight"])[:, :MODEL],
        base["c_attn.weight"][:, :MODEL],
    )


def test_factors_that_share_the_heads_are_written_with_a_rank_for_each(tmp_path: Path) -> None:
    table = lm.WeightMap({"w": lm.From("q.weight").rearrange("(h d) m -> m h d")})
    model = {"w": random(MODEL, HEADS, DIM), "w_lora_a": random(MODEL, HEADS, RANK), "w_lora_b": random(RANK, DIM)}
    base = {"q.weight": np.zeros((HEADS * DIM, MODEL), "float32")}
    lm.save_adapter(model, tmp_path / "a", mapping=table, scale=0.75)
    adapter = lm.open_adapter(tmp_path / "a")
    assert (adapter.rank, adapter.scales) == (HEADS * RANK, {"q": 0.75})
    product = np.einsum("mhr,rd->hdm", model["w_lora_a"], model["w_lora_b"]).reshape(-1, MODEL)
    near(lm.merge(base, adapter)["q.weight"], 0.75 * product)
    abstract = build({path: array.shape for path, array in model.items()})
    with pytest.raises(lm.CheckpointError, match=r"inputs and outputs.*lm.merge\(checkpoint, adapter\)"):
        table.adapters(base, write(tmp_path / "b", {"q": (HEADS * DIM, MODEL)}), abstract, scale=1.0)


def test_names_of_hugging_face_need_no_table(tmp_path: Path) -> None:
    shapes = {"q": (24, MODEL, 4), "v": (8, MODEL, 2)}
    tree: dict[str, Any] = {"norm": {"weight": random(MODEL)}, "other.q": {"weight": random(8, MODEL)}}
    for i in range(2):
        for name, (outs, ins, rank) in shapes.items():
            pair = {"lora_A": {"weight": random(rank, ins)}, "lora_B": {"weight": random(outs, rank)}}
            tree[f"model.layers.{i}.{name}"] = {"weight": random(outs, ins), **pair}
    lm.save_adapter(tree, tmp_path / "a", scale=2)
    adapter = lm.open_adapter(tmp_path / "a")
    assert adapter.ranks == {"model.layers.0.q": 4, "model.layers.0.v": 2, "model.layers.1.q": 4, "model.layers.1.v": 2}
    assert set(adapter.scales.values()) == {2.0}
    # `other.q` is not adapted, so `q` alone would be too many.
    assert adapter.config["target_modules"] == ["model.layers.0.q", "model.layers.1.q", "v"]
    abstract = lm.build_abstract(lambda: jax.tree.map(jnp.zeros_like, tree))
    weights = {f"{name}.weight": each["weight"] for name, each in tree.items()}
    table = lm.WeightMap({"{module...}/weight": "{module}.weight"})  # whose pattern has the factors' paths, too
    model = abstract.materialize(table.adapters(weights, adapter, abstract, scale=2.0))
    assert jax.tree.all(jax.tree.map(np.array_equal, model, tree))
    stored = lm.open_checkpoint(tmp_path / "a" / "adapter_model.safetensors")
    assert stored.metadata["format"] == "pt"
    expected = tree["model.layers.1.v"]
    np.testing.assert_array_equal(
        stored["base_model.model.model.layers.1.v.lora_A.weight"], expected["lora_A"]["weight"]
    )


def test_what_replaces_tensors_of_the_base_and_biases_become_values_of_it(tmp_path: Path) -> None:
    base = {"q.weight": random(24, MODEL), "q.bias": random(24), "head.weight": random(8, MODEL)}
    names = {
        "q.lora_A.weight": (RANK, MODEL),
        "q.lora_B.weight": (24, RANK),
        "q.lora_B.bias": (24,),
        "head.weight": (8, MODEL),
    }
    tensors = {f"base_model.model.{name}": random(*shape) for name, shape in names.items()}
    adapter = write_tensors(tmp_path / "a", tensors, lora_bias=True, modules_to_save=["head"])
    table = lm.WeightMap({"w": lm.From("q.weight").T, "bias": "q.bias", "head": "head.weight"})
    abstract = build({**CASES["transposed"][3], "bias": (24,), "head": (8, MODEL)})
    model = abstract.materialize(table.adapters(base, adapter, abstract, scale=2.0))
    np.testing.assert_array_equal(model["head"], tensors["base_model.model.head.weight"])
    near(model["bias"], base["q.bias"] + 2.0 * tensors["base_model.model.q.lora_B.bias"])
    np.testing.assert_array_equal(model["w"], base["q.weight"].T)


SIZES = {"a": 2, "b": 3, "c": 2, "d": 4, "e": 3}  # outputs are a, b and c, inputs are d and e


@st.composite
def groupings(draw: Any) -> list[list[str]]:
    """The axes of a kernel: each is some of the outputs or some of the inputs, in any order."""
    kernel: list[list[str]] = []
    for side in ("abc", "de"):
        names = draw(st.permutations(list(side)))
        cuts = draw(st.sets(st.integers(1, len(names) - 1)))
        kernel += [list(part) for part in np.split(np.array(names), sorted(cuts))]
    return draw(st.permutations(kernel))


@examples(3, 25, kernel=groupings(), layers=st.integers(0, 2), axis=st.integers(0, 5), data=st.data())
def test_any_order_of_axes(
    kernel: list[list[str]], layers: int, axis: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, axis = tmp_path_factory.mktemp("adapter"), axis % (len(kernel) + 1)
    entry = lm.From("l.{i}.weight" if layers else "l.0.weight")
    after = " ".join("(" + " ".join(group) + ")" for group in kernel)
    entry = entry.rearrange(f"(a b c) (d e) -> {after}", **SIZES)
    entry = entry.stack("i", axis) if layers else entry
    shape = [math.prod(SIZES[name] for name in group) for group in kernel]
    inputs = [extent for extent, group in zip(shape, kernel, strict=True) if group[0] in "de"]
    outputs = [extent for extent, group in zip(shape, kernel, strict=True) if group[0] in "abc"]
    if data.draw(st.booleans()):  # as `dot_general` has them
        inputs, outputs = [math.prod(inputs)], [math.prod(outputs)]
    stack = [layers] if layers else []
    shapes: Shapes = {
        "w": (*shape[:axis], *stack, *shape[axis:]),
        "w_lora_a": (*stack, *inputs, RANK),
        "w_lora_b": (*stack, RANK, *outputs),
    }
    adapter = write(folder / "a", {f"l.{i}": (12, 12) for i in range(layers or 1)})
    base = {f"l.{i}.weight": random(12, 12) for i in range(layers or 1)}
    table, abstract = lm.WeightMap({"w": entry}), build(shapes)
    found = {path: np.asarray(tensor) for path, tensor in table.adapters(base, adapter, abstract, scale=2.0).items()}
    lm.save_adapter(found, folder / "b", mapping=table, scale=2.0)
    merged, again = lm.merge(base, adapter), lm.merge(base, lm.open_adapter(folder / "b"))
    for name, tensor in merged.items():
        near(again[name], tensor)
    # The product of the factors, with its axes in the kernel's order: batch, inputs, outputs.
    a, b = found["w_lora_a"].reshape(layers or 1, -1, RANK), found["w_lora_b"].reshape(layers or 1, RANK, -1)
    product = a @ b
    order = [n for side in ("de", "abc") for n, group in enumerate(kernel) if group[0] in side]
    product = product.reshape(layers or 1, *(shape[n] for n in order)).transpose(0, *(1 + np.argsort(order)))
    product = np.moveaxis(product, 0, axis) if layers else product[0]
    expected = lm.map_checkpoint(merged, lm.WeightMap({"w": entry}), build({"w": shapes["w"]}))["w"]
    near(found["w"] + 2.0 * product, expected)


# Files


def test_an_adapter_is_replaced_completely_and_other_files_stay(tmp_path: Path) -> None:
    model = {path: random(*shape) for path, shape in CASES["transposed"][3].items()}
    table, folder = lm.WeightMap({"w": lm.From("q.weight").T}), tmp_path / "a"
    lm.save_adapter(model, folder, mapping=table, scale=1.0)
    (folder / "README.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(lm.LazyModelError, match="there is a checkpoint already.*overwrite=True"):
        lm.save_adapter(model, folder, mapping=table, scale=2.0)
    broken = model | {"w_lora_b": model["w_lora_b"].astype(np.complex128)}
    with pytest.raises(lm.LazyModelError, match="complex128"):
        lm.save_adapter(broken, folder, mapping=table, scale=2.0, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    lm.save_adapter(model, folder, mapping=table, scale=2.0, overwrite=True)
    assert lm.open_adapter(folder).scales == {"q": 2.0} and (folder / "README.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"] and len(list(folder.iterdir())) == 3


# Errors

PLAIN = CASES["transposed"][3]
BASE = {"q.weight": np.zeros((24, MODEL), "float32"), "k.weight": np.zeros((8, MODEL), "float32")}
TABLE = lm.WeightMap({"w": lm.From("q.weight").T}, ignore=["k.weight"])


@pytest.mark.parametrize(
    ("modules", "variables", "entry", "scale", "text"),
    [
        (["q"], PLAIN, lm.From("q.weight").T, None, "'w_lora_a': expected the factor .* pass scale="),
        (["q"], PLAIN, lm.From("q.weight").T, float("nan"), "finite scale"),
        (["q"], {"w": (MODEL, 24)}, lm.From("q.weight").T, None, "no LoRA pairs"),
        (["q", "k"], PLAIN, lm.From("q.weight").T, 1.0, "found none for 1 of 2: 'k.weight'; build the model with"),
        (["q"], PLAIN | {"w_lora_a": (MODEL, 2), "w_lora_b": (2, 24)}, lm.From("q.weight").T, 1.0,
         "rank is 4, that of the model 2"),
        (["q"], PLAIN | {"w": (24 * MODEL // 4, 4), "w_lora_a": (96, RANK), "w_lora_b": (RANK, 4)},
         lm.From("q.weight").rearrange("(a b) m -> (m a) b", a=6, b=4), 1.0, "runs over inputs and outputs"),
        (["q"], {name: shape for name, shape in PLAIN.items() if name != "w_lora_b"}, lm.From("q.weight").T, 1.0,
         "expected 'w_lora_b' next to 'w_lora_a', found none"),
        (["q"], PLAIN | {"w_lora_b": (RANK, 23)}, lm.From("q.weight").T, 1.0,
         r"expected one variable .*'w' \[16, 24\]"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_fit_are_errors(
    modules: list[str], variables: Shapes, entry: lm.From, scale: float | None, text: str, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "a", {name: BASE[f"{name}.weight"].shape for name in modules})
    table = lm.WeightMap({"w": entry}, ignore=["k.weight"])
    with pytest.raises(lm.LazyModelError, match=text):
        table.adapters(BASE, adapter, build(variables), scale=scale)


def test_adapters_that_are_more_than_products_are_merged_instead(tmp_path: Path) -> None:
    tensors = {
        "q.lora_A.weight": random(RANK, MODEL),
        "q.lora_B.weight": random(24, RANK),
        "q.lora_magnitude_vector": random(24),
    }
    dora = write_tensors(
        tmp_path / "a", {f"base_model.model.{name}": array for name, array in tensors.items()}, use_dora=True
    )
    with pytest.raises(lm.CheckpointError, match=r"'q.weight': .* found DoRA; merge it instead: lm.merge"):
        TABLE.adapters(BASE, dora, build(PLAIN), scale=1.0)
    with pytest.raises(lm.CheckpointError, match="lm.open_adapter"):
        TABLE.adapters(BASE, "a", build(PLAIN), scale=1.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("model", "table", "text"),
    [
        ({"w": (MODEL, 24)}, TABLE, "dict has no LoRA pairs"),
        (PLAIN, lm.WeightMap({"v": lm.From("q.weight").T}), "'w', to which .* no entry in the table"),
        (PLAIN, lm.WeightMap({"w": lm.From("q.weight").T.unsaved()}), "ends with .unsaved"),
        (PLAIN, lm.WeightMap({"w": lm.From("a", "b").T}), "nothing says where 'a' ends"),
        (PLAIN, lm.WeightMap({"w": lm.From("q").T}), "expected the weight of a module.*found 'q'"),
        (PLAIN, None, "expected the weight of a module.*found 'w'; pass the WeightMap"),
        (PLAIN, lambda tensors: tensors, "mapping is the WeightMap"),
    ],
)
def test_pairs_that_cannot_be_written_are_errors(model: Shapes, table: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match=text):
        lm.save_adapter(
            {path: random(*shape) for path, shape in model.items()}, tmp_path / "a", mapping=table, scale=1.0
        )
    assert not (tmp_path / "a").exists()
    with pytest.raises(lm.LazyModelError, match="found a URL"):
        lm.save_adapter({}, "s3://bucket/a")


@pytest.mark.parametrize(("outs", "rank", "written"), [(24, 2, 2), (24, 6, 6), (24, 9, 6), (3, 4, 3)])
def test_products_of_a_lower_rank(tmp_path: Path, outs: int, rank: int, written: int) -> None:
    model = {"w": random(MODEL, outs), "w_lora_a": random(MODEL, 6), "w_lora_b": random(6, outs)}
    table = lm.WeightMap({"w": lm.From("q.weight").T})
    update = 0.5 * (model["w_lora_a"] @ model["w_lora_b"]).T.astype("float64")
    left, sizes, right = np.linalg.svd(update, full_matrices=False)
    lost = np.linalg.norm(sizes[rank:]) / np.linalg.norm(sizes)
    with pytest.warns(lm.LazyModelWarning, match="norms") if lost >= 0.1 else nullcontext():
        errors = lm.save_adapter(model, tmp_path / "a", mapping=table, scale=0.5, rank=rank)
    base = {"q.weight": np.zeros((outs, MODEL), "float32")}
    adapter = lm.open_adapter(tmp_path / "a")
    assert adapter.rank == written
    near(lm.merge(base, adapter)["q.weight"], left[:, :rank] * sizes[:rank] @ right[:rank])
    assert errors.keys() == ({"q"} if rank < 6 else set())
    assert errors.get("q", 0.0) == pytest.approx(lost, abs=1e-6)
    nothing = lm.save_adapter(
        model | {"w_lora_b": np.zeros((6, outs))}, tmp_path / "0", mapping=table, scale=1.0, rank=2
    )
    assert nothing == {"q": 0.0}
