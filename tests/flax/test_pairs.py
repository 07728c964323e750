"""LoRA pairs of NNX and Qwix: adapters of PEFT into them and out of them, against transformers' Llama and PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large

HIDDEN, HEADS, KV, DIM, MLP, VOCAB, LAYERS = 32, 4, 2, 8, 48, 64, 2


def near(one: Any, other: Any) -> None:
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-4, atol=2e-5)


# Llama of transformers, in NNX


def rms(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotated(x: Any) -> Any:
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(0, DIM, 2) / DIM)
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1)[:, None] for f in (jnp.cos, jnp.sin))
    one, two = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-two, one], -1) * sin


class Block(nnx.Module):
    def __init__(self, linear: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.q, self.o = linear(HIDDEN, HEADS * DIM, rngs=rngs), linear(HEADS * DIM, HIDDEN, rngs=rngs)
        self.k, self.v = linear(HIDDEN, KV * DIM, rngs=rngs), linear(HIDDEN, KV * DIM, rngs=rngs)
        self.gate, self.up = linear(HIDDEN, MLP, rngs=rngs), linear(HIDDEN, MLP, rngs=rngs)
        self.down = linear(MLP, HIDDEN, rngs=rngs)
        self.before, self.after = nnx.Param(jnp.ones(HIDDEN)), nnx.Param(jnp.ones(HIDDEN))

    def __call__(self, x: Any) -> Any:
        batch, length, _ = x.shape
        normed = rms(x, self.before[...])
        q = rotated(self.q(normed).reshape(batch, length, HEADS, DIM))
        k = rotated(self.k(normed).reshape(batch, length, KV, DIM))
        v = self.v(normed).reshape(batch, length, KV, DIM)
        x = x + self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, -1))
        normed = rms(x, self.after[...])
        return x + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))


class Llama(nnx.Module):
    def __init__(self, linear: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.embed = nnx.Param(jnp.zeros((VOCAB, HIDDEN)))
        self.layers = nnx.List([Block(linear, rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.Param(jnp.ones(HIDDEN)), nnx.Linear(HIDDEN, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return self.head(rms(x, self.norm[...]))


PLACES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def table(kernel: str = "kernel") -> lm.WeightMap:
    """The table of the base."""
    inner = {f"layers/{{i}}/{ours}/{kernel}": f"{theirs}.weight" for ours, theirs in PLACES.items()}
    return lm.WeightMap(
        {
            "embed": "model.embed_tokens.weight",
            "norm": "model.norm.weight",
            "head/kernel": lm.From("lm_head.weight").T,
            "layers/{i}/before": "model.layers.{i}.input_layernorm.weight",
            "layers/{i}/after": "model.layers.{i}.post_attention_layernorm.weight",
            **{path: lm.From(f"model.layers.{{i}}.{name}").T for path, name in inner.items()},
        }
    )


def plain(*sizes: int, rngs: nnx.Rngs) -> Any:
    return nnx.Linear(*sizes, use_bias=False, rngs=rngs)


def with_lora(*sizes: int, rngs: nnx.Rngs) -> Any:
    return nnx.LoRALinear(*sizes, lora_rank=4, use_bias=False, rngs=rngs)


def wrapped(ins: int, outs: int, rngs: nnx.Rngs) -> Any:
    return nnx.LoRA(ins, 4, outs, base_module=plain(ins, outs, rngs=rngs), rngs=rngs)


def of_qwix() -> Any:
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path=".*layers.*", rank=4, alpha=6.0)
    tokens = jnp.zeros((1, 3), jnp.int32)
    return qwix.apply_lora_to_model(Llama(plain, nnx.Rngs(0)), provider, tokens, rngs=nnx.Rngs(1))


MODELS: dict[str, Callable[[], Any]] = {
    "LoRALinear": lambda: Llama(with_lora, nnx.Rngs(0)),
    "LoRA": lambda: Llama(wrapped, nnx.Rngs(0)),
    "Qwix": of_qwix,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": [*(name.rpartition(".")[2] for name in PLACES.values())]},
    "patterns": {
        "r": 4,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 7},
        "layers_to_transform": None,
        "modules_to_save": ["lm_head"],
    },
    "rslora": {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_rslora": True, "layers_to_transform": [1]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "configuration"),
    mostly_large(
        [("Qwix", "all"), ("LoRALinear", "patterns"), ("LoRA", "rslora"), ("Qwix", "patterns")],
        [("Qwix", "patterns"), ("LoRA", "rslora")],
    ),
)
def test_adapters_of_peft_go_into_pairs_and_out_again(
    model: str, configuration: str, tmp_path: Path, mesh8: Any
) -> None:
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=KV)

    def base() -> Any:
        theirs = transformers.LlamaForCausalLM(config)
        theirs.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
        return theirs

    weights = {name: array.numpy().copy() for name, array in transformers.LlamaForCausalLM(config).state_dict().items()}
    tuned = peft.get_peft_model(base(), peft.LoraConfig(**CONFIGURATIONS[configuration]))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(tmp_path / "theirs")
    tokens = np.arange(12).reshape(2, 6) % VOCAB

    def logits(theirs: Any) -> Any:
        with torch.no_grad():
            return theirs.eval()(torch.from_numpy(tokens)).logits.numpy()

    abstract = lm.build_abstract(MODELS[model])
    weights_of = table("base_module/kernel" if model == "LoRA" else "kernel")
    adapter = lm.open_adapter(tmp_path / "theirs")
    rules = {".*up/.*kernel": P(None, "model"), ".*lora_b": P(None, "model"), ".*": P()}
    ours = abstract.shard(mesh8, rules).materialize(
        weights_of.adapters(weights, adapter, abstract), initialize="missing"
    )
    # One program: on a busy machine, XLA's CPU devices may wait for each other in vain if many are in flight at once.
    call = nnx.jit(lambda model: model(tokens))
    near(call(ours), logits(tuned))
    merged = lm.build_abstract(Llama, plain, nnx.Rngs(0))
    near(call(ours), call(merged.materialize(lm.map_checkpoint(lm.merge(weights, adapter), table(), merged))))
    lm.save_adapter(ours, tmp_path / "ours", mapping=weights_of, base="example/base")
    weights["lm_head.weight"] = np.asarray(ours.head.kernel[...]).T
    near(logits(peft.PeftModel.from_pretrained(base(), tmp_path / "ours")), call(ours))
    written = lm.open_adapter(tmp_path / "ours")
    assert written.base == "example/base" and set(written.ranks.values()) == {4}
    assert set(written.config["target_modules"]) == {name.rpartition(".")[2] for name in PLACES.values()}


# Einsums of Qwix


class Attention(nnx.Module):
    """Kernels as Tunix has them, some with heads before the inputs and some fused."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = nnx.Param(jax.random.normal(rngs.params(), (HEADS, HIDDEN, DIM)))
        self.kv = nnx.Param(jax.random.normal(rngs.params(), (2, KV, HIDDEN, DIM)))
        self.o = nnx.LinearGeneral((HEADS, DIM), HIDDEN, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        q = jnp.einsum("BTD,NDH->BTNH", x, self.q[...])
        k, v = jnp.einsum("BTD,CKDH->CBTKH", x, self.kv[...])
        return self.o(q * jnp.tile(k + v, (HEADS // KV, 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Qwix uses what Flax deprecated
def test_pairs_of_einsums_have_the_heads_of_their_kernels(tmp_path: Path) -> None:
    qwix = pytest.importorskip("qwix")
    x = jax.random.normal(jax.random.key(3), (1, 3, HIDDEN))

    def build() -> Any:
        provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)
        return qwix.apply_lora_to_model(Attention(nnx.Rngs(0)), provider, x, rngs=nnx.Rngs(1))

    heads = "(heads dim) model -> heads model dim"
    fused = lm.From("k.weight", "v.weight", sizes=[KV * DIM] * 2)
    weights = lm.WeightMap(
        {
            "q": lm.From("q.weight").rearrange(heads),
            "kv": fused.rearrange("(parts heads dim) model -> parts heads model dim", parts=2),
            "o/kernel": lm.From("o.weight").rearrange("model (heads dim) -> heads dim model"),
        }
    )
    abstract = lm.build_abstract(build)
    draw = np.random.default_rng(0).standard_normal
    sizes = {"q": (HEADS * DIM, HIDDEN), "k": (KV * DIM, HIDDEN), "v": (KV * DIM, HIDDEN), "o": (HIDDEN, HEADS * DIM)}
    base = {f"{name}.weight": draw(shape).astype("float32") for name, shape in sizes.items()}
    pairs: dict[str, Any] = {}
    for name, rank in {"q": 4, "k": 1, "v": 3, "o": 4}.items():  # the fused pair has the ranks of both
        pairs[f"base_model.model.{name}.lora_A.weight"] = draw((rank, sizes[name][1])).astype("float32")
        pairs[f"base_model.model.{name}.lora_B.weight"] = draw((sizes[name][0], rank)).astype("float32")
    (tmp_path / "a").mkdir()
    lm.save(pairs, tmp_path / "a" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "rank_pattern": {"k": 1, "v": 3}}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    adapter = lm.open_adapter(tmp_path / "a")
    model = abstract.materialize(weights.adapters(base, adapter, abstract), initialize="missing")
    plain = lm.build_abstract(Attention, nnx.Rngs(0))
    merged = plain.materialize(lm.map_checkpoint(lm.merge(base, adapter), weights, plain))
    np.testing.assert_allclose(model(x), merged(x), rtol=1e-4, atol=1e-2)
    lm.save_adapter(model, tmp_path / "b", mapping=weights)
    again = lm.merge(base, lm.open_adapter(tmp_path / "b"))
    for name, tensor in lm.merge(base, adapter).items():
        near(tensor, again[name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_bases_linen_and_trained_models(tmp_path: Path) -> None:
    qwix, x = pytest.importorskip("qwix"), jnp.ones((1, HIDDEN))
    # The base of Qwix' QLoRA is quantized; its pairs are written all the same.
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=6.0, weight_qtype="int8")
    model = qwix.apply_lora_to_model(plain(HIDDEN, 64, rngs=nnx.Rngs(0)), provider, x, rngs=nnx.Rngs(1))
    lm.save_adapter(model, tmp_path / "a", mapping=lm.WeightMap({"kernel": lm.From("up.weight").T}))
    adapter = lm.open_adapter(tmp_path / "a")
    assert (adapter.ranks, adapter.scales) == ({"up": 4}, {"up": 1.5})
    np.testing.assert_array_equal(adapter.source["base_model.model.up.lora_A.weight"], model.kernel_lora_a[...].T)
    # Variables of Linen do not know the factor of their layers.
    dense = qwix.apply_lora_to_model(linen.Dense(64, use_bias=False), qwix.LoraProvider(rank=4, alpha=6.0))
    abstract = lm.build_abstract(dense, jax.random.key(0), x)
    base = {"up.weight": np.ones((64, HIDDEN), "float32")}
    weights = lm.WeightMap({"params/kernel": lm.From("up.weight").T})
    with pytest.raises(lm.LazyModelError, match="pass scale="):
        weights.adapters(base, adapter, abstract)
    variables = abstract.materialize(weights.adapters(base, adapter, abstract, scale=1.5))
    np.testing.assert_array_equal(variables["params"]["kernel_lora_a"], model.kernel_lora_a[...])
    lm.save_adapter(variables, tmp_path / "b", mapping=weights, scale=1.5)
    assert lm.open_adapter(tmp_path / "b").scales == {"up": 1.5}


def test_a_model_with_its_optimizer_and_an_abstract_one(tmp_path: Path) -> None:
    weights = lm.WeightMap({"kernel": lm.From("up.weight").T})
    abstract = lm.build_abstract(with_lora, HIDDEN, 64, rngs=nnx.Rngs(0)).with_optimizer(optax.adam(1e-3))
    lm.save_adapter(abstract, tmp_path / "initial", mapping=weights)
    initial = lm.open_adapter(tmp_path / "initial")
    assert initial.scales == {"up": 1.0} and not np.any(initial.source["base_model.model.up.lora_B.weight"])
    base = {"up.weight": np.ones((64, HIDDEN), "float32")}
    pairs = weights.adapters(base, initial, abstract)
    trained = abstract.materialize(pairs, initialize="missing")
    module, optimizer = trained
    gradients = nnx.grad(lambda module: jnp.sum(module(jnp.ones((2, HIDDEN)))))(module)
    optimizer.update(module, gradients)
    lm.save_adapter(trained, tmp_path / "trained", mapping=weights)
    found = lm.open_adapter(tmp_path / "trained").source["base_model.model.up.lora_B.weight"]
    np.testing.assert_array_equal(found, module.lora.lora_b[...].T)
    assert np.any(found)
