"""Suggested tables: what a person would have written, and honest about what was a guess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel import From, WeightMap
from tests.large import examples

LAYERS, WORDS, SIZE, HIDDEN, HEADS, GROUPS, DIM, EXPERTS = 12, 64, 24, 40, 4, 2, 8, 3


def model_of(shapes: dict[str, tuple[int, ...]]) -> lm.AbstractModel:
    return lm.build_abstract(lambda: {path: jnp.zeros(shape) for path, shape in shapes.items()})


def in_layers(parts: dict[str, tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{layer}{name}": shape for layer in range(LAYERS) for name, shape in parts.items()}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, "float32") for name, shape in shapes.items()}


def huggingface(mlp: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    parts = {
        ".self_attn.q_proj.weight": (HEADS * DIM, SIZE),
        ".self_attn.k_proj.weight": (GROUPS * DIM, SIZE),
        ".self_attn.v_proj.weight": (GROUPS * DIM, SIZE),
        ".self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        ".input_layernorm.weight": (SIZE,),
        ".post_attention_layernorm.weight": (SIZE,),
        ".self_attn.rotary_emb.inv_freq": (DIM // 2,),
    }
    top = {"model.embed_tokens.weight": (WORDS, SIZE), "model.norm.weight": (SIZE,)}
    return tensors(top | in_layers(parts | mlp, "model.layers."))


def entries(mapping: WeightMap) -> dict[str, str]:
    return {path: repr(source) for path, (_, source) in mapping._entries.items()}


def test_a_mixture_of_experts_with_heads_and_other_names(tmp_path: Path) -> None:
    mlp = {".mlp.gate.weight": (EXPERTS, SIZE)}
    for expert in range(EXPERTS):
        mlp |= {f".mlp.experts.{expert}.{name}_proj.weight": (HIDDEN, SIZE) for name in ("gate", "up")}
        mlp |= {f".mlp.experts.{expert}.down_proj.weight": (SIZE, HIDDEN)}
    parts = {
        "/attention/wq": (HEADS, SIZE, DIM),
        "/attention/kv_einsum": (2, GROUPS, SIZE, DIM),
        "/attention/wo": (HEADS, DIM, SIZE),
        "/attention_norm/scale": (SIZE,),
        "/ffn_norm/scale": (SIZE,),
        "/moe/router/kernel": (SIZE, EXPERTS),
        "/moe/experts/gate": (EXPERTS, SIZE, HIDDEN),
        "/moe/experts/up": (EXPERTS, SIZE, HIDDEN),
        "/moe/experts/down": (EXPERTS, HIDDEN, SIZE),
    }
    top = {"embedder/embedding": (WORDS, SIZE), "final_norm/scale": (SIZE,), "lm_head/kernel": (SIZE, WORDS)}
    save_file(huggingface(mlp), tmp_path / "model.safetensors")
    abstract = model_of(in_layers(parts, "blocks/") | top)
    with lm.open_checkpoint(tmp_path) as checkpoint:
        found = WeightMap.suggest(checkpoint, abstract)
        assert found.check(checkpoint, abstract).ok
        assert checkpoint.bytes_read == 0
    layer = "model.layers.{block}"
    kv = From(f"{layer}.self_attn.k_proj.weight", f"{layer}.self_attn.v_proj.weight", sizes=(GROUPS * DIM,) * 2)
    experts = {
        f"blocks/{{block}}/moe/experts/{name}": From(f"{layer}.mlp.experts.{{expert}}.{name}_proj.weight")
        .T.stack("expert")
        for name in ("gate", "up", "down")
    }  # fmt: skip
    query = From(f"{layer}.self_attn.q_proj.weight").rearrange("(heads dim) model -> heads model dim")
    out = From(f"{layer}.self_attn.o_proj.weight").rearrange("model (heads dim) -> heads dim model")
    expected = WeightMap(
        {
            "embedder/embedding": "model.embed_tokens.weight",
            "final_norm/scale": "model.norm.weight",
            "lm_head/kernel": From("model.embed_tokens.weight").T.unsaved(),
            "blocks/{block}/attention/wq": query,
            "blocks/{block}/attention/wo": out,
            "blocks/{block}/attention/kv_einsum": kv.rearrange("(parts heads dim) model -> parts heads model dim"),
            "blocks/{block}/attention_norm/scale": f"{layer}.input_layernorm.weight",
            "blocks/{block}/ffn_norm/scale": f"{layer}.post_attention_layernorm.weight",
            "blocks/{block}/moe/router/kernel": From(f"{layer}.mlp.gate.weight").T,
            **experts,
        }
    )
    assert entries(found) == entries(expected)
    assert "tied" in found.unsure.pop("lm_head/kernel")
    assert "joined in the order key, value" in found.unsure.pop("blocks/{block}/attention/kv_einsum")
    assert not found.unsure
    # What it prints is its source.
    assert entries(eval(str(found), {"lm": lm})) == entries(found)
    assert 'ignore=["model.layers.{layer}.self_attn.rotary_emb.inv_freq"]' in str(found)


def test_fused_tensors_are_cut_for_a_model_with_stacked_layers() -> None:
    parts = {".attn.c_attn.weight": (SIZE, 3 * SIZE), ".attn.c_attn.bias": (3 * SIZE,), ".ln_1.weight": (SIZE,)}
    parts |= {".mlp.gate_up_proj.weight": (SIZE, 2 * HIDDEN), ".mlp.c_proj.weight": (HIDDEN, SIZE)}
    checkpoint = tensors(in_layers(parts, "h.") | {"wte.weight": (WORDS, SIZE), "pooler.weight": (7, 5)})
    shapes: dict[str, tuple[int, ...]] = {f"blocks/{name}/kernel": (LAYERS, SIZE, 3, 8) for name in ("q", "k", "v")}
    shapes |= {f"blocks/{name}/bias": (LAYERS, 3, 8) for name in ("q", "k", "v")}
    shapes |= {"blocks/gate/kernel": (LAYERS, SIZE, HIDDEN), "blocks/up/kernel": (LAYERS, SIZE, HIDDEN)}
    shapes |= {
        "blocks/down/kernel": (LAYERS, HIDDEN, SIZE),
        "blocks/ln_1/scale": (LAYERS, SIZE),
        "embed": (WORDS, SIZE),
    }
    shapes |= {"adapter/kernel": (3, 11)}
    abstract = model_of(shapes)
    found = WeightMap.suggest(checkpoint, abstract)
    report = found.check(checkpoint, abstract)
    assert not report.missing and not report.misshapen and list(report.unused) == ["pooler.weight"]
    kernel = From("h.{layer}.attn.c_attn.weight").part(1, of=3, axis=1)
    assert entries(found)["blocks/k/kernel"] == repr(
        kernel.rearrange("model (heads dim) -> model heads dim").stack("layer")
    )
    bias = From("h.{layer}.attn.c_attn.bias").part(2, of=3).rearrange("(heads dim) -> heads dim").stack("layer")
    assert entries(found)["blocks/v/bias"] == repr(bias)
    up = From("h.{layer}.mlp.gate_up_proj.weight").part(1, of=2, axis=1).stack("layer")
    assert entries(found)["blocks/up/kernel"] == repr(up)
    assert "query, key, value one after the other" in found.unsure["blocks/q/kernel"]
    left = "# No tensor was found for:\n#   'adapter/kernel' [3, 11]\n"
    assert str(found).endswith(f"{left}# No variable was found for:\n#   'pooler.weight' [7, 5]")


def fused(parts: list[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.transpose(np.stack(parts), axes).reshape(shape)


@pytest.mark.parametrize(
    ("path", "words", "shape", "axes"),
    [
        ("mlp/gate_up/kernel", ("gate", "up"), (24, 80), (2, 0, 1)),
        ("mlp/gating_einsum", ("gate", "up"), (2, 24, 40), (0, 2, 1)),
        ("mlp/gate_up/kernel", ("gate", "up"), (24, 2, 40), (2, 0, 1)),
        ("mlp/gate_up/kernel", ("gate", "up"), (24, 40, 2), (2, 1, 0)),
        ("attn/qkv/kernel", ("q", "k", "v"), (24, 3, 5, 8), (2, 0, 1)),
        ("attn/qkv_einsum/w", ("q", "k", "v"), (3, 24, 5, 8), (0, 2, 1)),
        ("attn/qkv/kernel", ("q", "k", "v"), (24, 120), (2, 0, 1)),
    ],
)
def test_parts_are_joined_and_cut(
    path: str, words: tuple[str, ...], shape: tuple[int, ...], axes: tuple[int, ...], tmp_path: Path
) -> None:
    """With an axis of the parts anywhere or without; both tables load bit for bit, and nothing is matched alone."""
    rng = np.random.default_rng(0)
    names = [f"{'mlp' if len(words) == 2 else 'self_attn'}.{word}_proj.weight" for word in words]
    apart = {
        f"layers.{layer}.{name}": rng.random((40, 24), "float32")
        for layer in range(2)
        for name in (*names, "mlp.down_proj.weight")
    }
    for layer in range(2):
        apart[f"layers.{layer}.mlp.down_proj.weight"] = rng.random((24, 40), "float32")
    save_file(apart, tmp_path / "apart.safetensors")
    joined = {
        f"layers/{layer}/{path}": fused([apart[f"layers.{layer}.{name}"] for name in names], axes, shape)
        for layer in range(2)
    }
    down = {f"layers/{layer}/mlp/linear": apart[f"layers.{layer}.mlp.down_proj.weight"].T for layer in range(2)}
    model = model_of({path: value.shape for path, value in (joined | down).items()})
    with lm.open_checkpoint(tmp_path / "apart.safetensors") as checkpoint:
        table = WeightMap.suggest(checkpoint, model)
        assert f"joined in the order {'gate, up' if len(words) == 2 else 'query, key, value'}" in str(table)
        assert ("some models interleave them" in str(table)) == (len(shape) == 2)
        loaded = model.materialize(lm.map_checkpoint(checkpoint, table, model))
        for name, value in (joined | down).items():
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
        lm.save(loaded, tmp_path / "again.safetensors", mapping=table)
        with lm.open_checkpoint(tmp_path / "again.safetensors") as again:
            assert set(again) == set(apart)
            assert all(np.array_equal(np.asarray(again[name]), apart[name]) for name in apart)
    parts = model_of(
        {name.replace(".", "/").replace("weight", "kernel"): value.shape[::-1] for name, value in apart.items()}
    )
    stored = {**joined, **{name.replace("linear", "down/kernel"): value for name, value in down.items()}}
    found = lm.map_checkpoint(stored, WeightMap.suggest(stored, parts), parts)
    for name, value in apart.items():
        at = name.replace(".", "/").replace("weight", "kernel")
        np.testing.assert_array_equal(np.asarray(found[at]), value.T, err_msg=at)


def test_unequal_parts_with_heads_are_joined_along_them() -> None:
    rng = np.random.default_rng(0)
    heads = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    stored = {
        f"layers/{n}/attn/{w}/kernel": rng.random((24, h, 8), "float32") for n in range(2) for w, h in heads.items()
    }
    model = model_of({f"blocks/{n}/attention/qkv/kernel": (24, 64) for n in range(2)})
    found = lm.map_checkpoint(stored, WeightMap.suggest(stored, model), model)
    for n in range(2):
        whole = np.concatenate([stored[f"layers/{n}/attn/{word}/kernel"] for word in heads], 1).reshape(24, 64)
        np.testing.assert_array_equal(np.asarray(found[f"blocks/{n}/attention/qkv/kernel"]), whole)


def test_a_table_between_two_models() -> None:
    def stacked() -> dict[str, Any]:
        attention = {"q_proj": jnp.ones((3, 24, 4, 8)), "kv_proj": jnp.ones((3, 24, 32)) * jnp.arange(32)}
        return {
            "embed": jnp.ones((64, 24)),
            "out": jnp.eye(24) + 1,
            "blocks": {"attn": attention, "mlp": jnp.ones((3, 9))},
        }

    def unstacked() -> dict[str, Any]:
        attention = {"query": jnp.zeros((24, 32)), "key": jnp.zeros((24, 16)), "value": jnp.zeros((24, 16))}
        layers = [{"attention": attention, "mlp": jnp.zeros(9)} for _ in range(3)]
        return {"embed": jnp.zeros((64, 24)), "out": jnp.zeros((24, 24)), "layers": layers}

    trainer, sampler = lm.build_abstract(stacked).with_optimizer(optax.sgd(0.1, momentum=0.9)), unstacked()
    table = WeightMap.suggest(trainer, sampler)
    assert entries(table) == {
        "embed": "From('embed')",
        "layers/{layer}/attention/key": "From('blocks/attn/kv_proj').part(0, of=2, axis=2).take('layer')",
        "layers/{layer}/attention/query": "From('blocks/attn/q_proj').take('layer')"
        ".rearrange('model heads dim -> model (heads dim)', heads=4)",
        "layers/{layer}/attention/value": "From('blocks/attn/kv_proj').part(1, of=2, axis=2).take('layer')",
        "layers/{layer}/mlp": "From('blocks/mlp').take('layer')",
        "out": "From('out')",  # square, and not turned: both models have it
    }
    report = table.check(trainer, sampler)
    assert report.ok and not report.one_way
    assert list(report.ignored) == [path for path in trainer if path.startswith("optimizer/")]
    live = lm.build_abstract(unstacked).materialize(lm.map_checkpoint(trainer, table, sampler))
    assert live["layers"][2]["attention"]["value"][0, 15] == 31
    back = WeightMap.suggest(live, trainer)
    assert '.stack("layer")' in str(back) and back.check(live, trainer).unmapped.keys() == report.ignored.keys()


def test_a_padded_vocabulary() -> None:
    """It is suggested as a guess, and what `check` advises loads; other sizes are no padding."""
    checkpoint = tensors({"wte.weight": (101, 8), "lm_head.weight": (101, 8), "up.weight": (24, 8)})
    checkpoint = {name: value + 1 for name, value in checkpoint.items()}
    model = model_of({"embed": (104, 8), "head/kernel": (8, 104), "up/kernel": (8, 32)})
    text = str(WeightMap.suggest(checkpoint, model))
    assert '"embed": lm.From("wte.weight").pad(0, 104, of=101),' in text
    assert '"head/kernel": lm.From("lm_head.weight").T.pad(1, 104, of=101),' in text
    assert text.count("# unsure: [101, 8] taken to be") == 2 and "'up/kernel' [8, 32]" in text
    larger, smaller = model_of({"embed": (104, 8)}), model_of({"embed": (101, 8)})
    assert '"embed": lm.From("wte.weight").slice(0, 0, 101, of=104)' in str(
        WeightMap.suggest(tensors({"wte.weight": (104, 8)}), smaller)
    )
    one = {"wte.weight": checkpoint["wte.weight"]}
    with pytest.raises(lm.CheckpointError, match="if it is padding, use .*pad\\(0, 104, of=101\\)"):
        lm.map_checkpoint(one, WeightMap({"embed": "wte.weight"}), larger)
    table = WeightMap({"embed": From("wte.weight").pad(0, 104, of=101)})
    loaded = larger.materialize(lm.map_checkpoint(one, table, larger))["embed"]
    np.testing.assert_array_equal(loaded, np.pad(one["wte.weight"], ((0, 3), (0, 0))))
    with pytest.raises(lm.CheckpointError, match="use .rearrange or .part"):
        lm.map_checkpoint(tensors({"w": (8, 24)}), WeightMap({"w": "w"}), model_of({"w": (8, 32)}))


def test_what_shapes_leave_open_is_told() -> None:
    square = {f"layers.{n}.{name}.weight": (8, 8) for n in range(2) for name in ("fc1", "fc2")}
    shapes = {f"layers/{n}/{name}/kernel": (8, 8) for n in range(2) for name in ("up", "down")}
    found = WeightMap.suggest(tensors(square), model_of(shapes))
    # Nothing tells how these are stored, so it is as PyTorch would.
    assert entries(found)["layers/{layer}/up/kernel"] == "From('layers.{layer}.fc1.weight').T"
    assert found.unsure["layers/{layer}/up/kernel"] == ("[8, 8] can become [8, 8] in 2 ways; taken to be (out, in)")
    # One kernel that is not square does.
    wide = square | {"head.weight": (8, 5)}
    found = WeightMap.suggest(tensors(wide), model_of(shapes | {"head/kernel": (8, 5)}))
    assert entries(found)["layers/{layer}/up/kernel"] == "From('layers.{layer}.fc1.weight')"
    assert found.unsure["layers/{layer}/up/kernel"].endswith("taken to be (in, out), as others here are")
    strange = WeightMap.suggest(tensors({"x.weight": (3, 5)}), model_of({"y/kernel": (5, 3)}))
    assert strange.unsure == {"y/kernel": "the names have little in common"}


def test_convolutions_keys_and_layers_that_differ() -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        stages = [{"conv": {"kernel": jnp.zeros((3, 3, n + 3, 8))}, "bn": {"mean": jnp.zeros(8)}} for n in range(2)]
        return {"stages": stages, "rng": key, "out{1}": jnp.zeros(3)}

    shapes = {f"stages.{n}.conv.weight": (8, n + 3, 3, 3) for n in range(2)}
    checkpoint = tensors(shapes | {f"stages.{n}.bn.running_mean": (8,) for n in range(2)} | {"out{1}": (3,)})
    found = WeightMap.suggest(checkpoint, lm.build_abstract(init, jax.random.key(0)))
    assert entries(found) == {
        "stages/0/conv/kernel": "From('stages.0.conv.weight').transpose(2, 3, 1, 0)",
        "stages/1/conv/kernel": "From('stages.1.conv.weight').transpose(2, 3, 1, 0)",
        "stages/{stage}/bn/mean": "From('stages.{stage}.bn.running_mean')",
        "rng": "None",
    }


ALIKE = """
import jax.numpy as jnp, numpy as np, lazymodel as lm
ours = [f"stack{i}_block{j}_{k}_bn/gamma" for i in (1, 2, 3, 4) for j in (1, 2) for k in (1, 2)]
theirs = ["ln.gamma", "deit_encoder.ln.gamma", *(f"block1_sepconv{j}_bn.gamma" for j in (1, 2, 3))]
abstract = lm.build_abstract(lambda: {path: jnp.zeros(8) for path in ours})
print(lm.WeightMap.suggest({name: np.zeros(8, "float32") for name in theirs}, abstract))
"""


def test_names_that_fit_equally_well_get_the_same_table_in_every_process() -> None:
    environments = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in range(2)]
    command = [sys.executable, "-c", ALIKE]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=each) for each in environments]
    tables = {process.communicate(timeout=120)[0] for process in running}
    assert len(tables) == 1 and "block1_sepconv1_bn.gamma" in tables.pop()


NAMES = st.text(st.sampled_from("qkv_/.013{}'\"h\\ gate"), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("stored", "own", "step"),
    [
        ((1, 16, 8), (16, 8), ".rearrange('1 a b -> a b')"),
        ((1, 8, 16), (16, 8), ".rearrange('1 a b -> b a')"),
        ((8, 16), (1, 16, 8), ".rearrange('a b -> 1 b a')"),
        ((1, 8, 8), (8, 8), ".rearrange('1 a b -> b a')"),  # square: as the other kernels
        ((1, 8, 16), (16, 2, 4), ".rearrange('1 (b c) a -> a b c')"),
        ((8, 8, 1, 1), (1, 1, 8, 8), ".transpose(2, 3, 1, 0)"),
        ((1, 1, 8, 8), (1, 1, 8, 8), ""),
    ],
)
def test_leading_axes_of_size_1(stored: tuple[int, ...], own: tuple[int, ...], step: str) -> None:
    shapes = {"up.weight": (8, 4), "up.bias": (1, 8), "mix.weight": stored}
    abstract = model_of({"up/kernel": (4, 8), "up/bias": (8,), "mix/kernel": own})
    rng = np.random.default_rng(0)
    checkpoint = {name: rng.random(shape, "float32") for name, shape in shapes.items()}
    found = WeightMap.suggest(checkpoint, abstract)
    assert entries(found)["mix/kernel"].endswith(f"From('mix.weight'){step}")
    made = lm.map_checkpoint(checkpoint, found, abstract)
    assert np.array_equal(np.asarray(made["up/kernel"]), checkpoint["up.weight"].T)
    assert np.array_equal(np.asarray(made["up/bias"]), checkpoint["up.bias"][0])


SHAPES = st.dictionaries(NAMES, st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=8)


@examples(8, 25, theirs=SHAPES, ours=SHAPES)
def test_any_names_make_a_table_or_none(theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]) -> None:
    checkpoint, abstract = tensors(theirs), model_of(ours)
    found = WeightMap.suggest(checkpoint, abstract)
    assert entries(eval(str(found), {"lm": lm})) == entries(found)
    report = found.check(checkpoint, abstract)
    assert not report.missing and not report.misshapen and not report.unmatched


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.layers.0.q_proj.lora_A.weight",
        "layers.0.q_proj.lora_B.default.weight",
        "lora_A",
        "embed/lora_embedding_A",
    ],
)
def test_a_lora_adapter_is_refused(name: str) -> None:
    abstract = lm.build_abstract(lambda: {"q": {"kernel": jnp.zeros((8, 8)), "lora_a": jnp.zeros((8, 2))}})
    checkpoint = {"q/kernel": np.zeros((8, 8), "float32"), name: np.zeros((2, 8), "float32")}
    table = lm.WeightMap({"q/kernel": "q/kernel", "q/lora_a": lm.From(name).T})
    for call in (
        lambda: lm.WeightMap.suggest(checkpoint, abstract),
        lambda: lm.map_checkpoint(checkpoint, table, abstract, strict=False),
        lambda: abstract.materialize(checkpoint, strict=False),
        lambda: abstract.plan(checkpoint),
    ):
        with pytest.raises(lm.CheckpointError, match=rf"1 tensor of a LoRA adapter: '{name}'.*lora_alpha / r"):
            call()
    ignoring = lm.WeightMap({"q/kernel": "q/kernel"}, ignore=name)
    assert ignoring.check(checkpoint, abstract).ok
    merged = lm.map_checkpoint(checkpoint, lambda w: {"q/kernel": w["q/kernel"], "q/lora_a": w[name].T * 2})
    abstract.materialize(merged, initialize="nothing")
    own = lm.build_abstract(lambda: {"q": jnp.zeros((8, 8)), name: jnp.zeros((2, 8))})  # a variable of the model's own
    own.materialize({"q": np.zeros((8, 8), "float32"), name: np.zeros((2, 8), "float32")}, initialize="nothing")
