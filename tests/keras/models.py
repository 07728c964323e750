"""Small models of the kinds that people load, as KerasHub presets and as Hugging Face folders, and how to compare."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
from safetensors.numpy import save_file

import lazymodel_keras as lk

GEMMA = {
    "vocabulary_size": 64,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 8,
    "hidden_dim": 32,
    "intermediate_dim": 64,
    "head_dim": 4,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50.0,
    "final_logit_soft_cap": 30.0,
}
LLAMA3 = {
    "vocabulary_size": 64,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
BERT = {"vocabulary_size": 64, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 64}
VIT = {
    "image_shape": (16, 16, 3),
    "patch_size": (4, 4),
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 32,
    "mlp_dim": 64,
}
MIXTRAL = {**LLAMA3, "num_experts": 4, "top_k": 2}

BACKBONES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma": (keras_hub.models.GemmaBackbone, GEMMA),
    "llama3": (keras_hub.models.Llama3Backbone, LLAMA3),
    "bert": (keras_hub.models.BertBackbone, BERT),
    "vit": (keras_hub.models.ViTBackbone, VIT),
    "mixtral": (keras_hub.models.MixtralBackbone, MIXTRAL),
}


def randomize(model: Any, seed: int = 0) -> Any:
    """Gives every floating-point weight a value that no initializer gives."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if keras.backend.is_float_dtype(variable.dtype):
            variable.assign(rng.standard_normal(variable.shape).astype("float32"))
    return model


@functools.cache
def _presets() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="presets-")


def save_preset(folder: Path, name: str, **save: Any) -> Path:
    """A KerasHub preset of one of `BACKBONES`: a copy of the one that this process has saved with these options."""
    saved = Path(_presets().name) / json.dumps([name, save])
    if not saved.exists():
        cls, config = BACKBONES[name]
        randomize(cls(**config)).save_to_preset(str(saved), **save)
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    return folder


def inputs_of(model: Any) -> Any:
    """Some input for a functional backbone."""
    rng = np.random.default_rng(0)

    def some(tensor: Any) -> np.ndarray:
        shape = tuple(2 if size is None else size for size in tensor.shape[:1]) + tuple(
            6 if size is None else size for size in tensor.shape[1:]
        )
        if keras.backend.is_int_dtype(tensor.dtype):
            return rng.integers(0, 2 if "segment" in tensor.name else 60, shape).astype("int32")
        return rng.standard_normal(shape).astype("float32")

    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    if not isinstance(inputs, dict):
        return some(inputs)
    return {name: np.ones_like(some(t)) if "mask" in name else some(t) for name, t in inputs.items()}


def assert_same(stock: Any, ours: Any, *, outputs: bool = True) -> None:
    """Every variable equal bit for bit, in the same order, and equal outputs."""
    assert [v.path.split("/")[-1] for v in stock.variables] == [v.path.split("/")[-1] for v in ours.variables]
    for expected, found in zip(stock.variables, ours.variables, strict=True):
        assert expected.dtype == found.dtype, expected.path
        assert expected.shape == found.shape, expected.path
        assert "assign" not in vars(found), found.path
        np.testing.assert_array_equal(bits(expected), bits(found), err_msg=expected.path)
    if outputs:
        for expected, found in zip(outputs_of(stock), outputs_of(ours), strict=True):
            if all(e.value.sharding == f.value.sharding for e, f in zip(stock.variables, ours.variables, strict=True)):
                np.testing.assert_array_equal(expected, found)
            else:  # sums are split over devices
                np.testing.assert_allclose(expected, found, rtol=2e-4, atol=2e-4)


def assert_same_in_distribution(cls: Any, folder: str) -> None:
    """A preset is equal to stock's, and placed alike, by the class's own layout over eight devices."""
    mesh = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], keras.distribution.list_devices())
    layout = cls.get_layout_map(mesh)
    with keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch").scope():
        stock = seeded(lambda: cls.from_preset(folder))
        ours = seeded(lambda: lk.from_preset(cls, folder))
        assert_same(stock, ours, outputs=False)
        for expected, found in zip(stock.weights, ours.weights, strict=True):
            assert found.value.sharding == expected.value.sharding, found.path
            assert type(found._layout) is type(expected._layout)


_programs: dict[str, Any] = {}


def outputs_of(model: Any) -> list[np.ndarray]:
    """What a model computes. Models whose programs are the same, constants and shardings included, share one."""
    inputs = inputs_of(model)
    if isinstance(model, keras.Sequential):
        return keras.tree.flatten(model.predict(inputs, verbose=0))

    def values(variables: list[Any]) -> list[Any]:
        # On one device they may be committed to it or not, which the program would say.
        arrays = [variable.value for variable in variables]
        return [array if len(array.sharding.device_set) > 1 else np.asarray(array) for array in arrays]

    arguments = values(model.trainable_variables), values(model.non_trainable_variables), inputs
    lowered = jax.jit(lambda *arguments: model.stateless_call(*arguments, training=False)[0]).lower(*arguments)
    program = lowered.as_text()
    if program not in _programs:
        _programs[program] = lowered.compile()
    return [np.asarray(output) for output in keras.tree.flatten(_programs[program](*arguments))]


def bits(variable: Any) -> np.ndarray:
    """A variable's bytes: equal bits, not only equal numbers."""
    array = np.asarray(variable.value)
    return np.frombuffer(array.tobytes(), np.uint8)


def seeded(build: Callable[[], Any], seed: int = 0) -> Any:
    """Builds with Keras' seeds and automatic names starting afresh."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    return build()


# Hugging Face folders: the original projects' names and shapes.


def save_hugging_face(folder: Path, name: str, *, dtype: Any = np.float32, shards: int = 1) -> Path:
    """Writes a Hugging Face folder of one of the models above."""
    config, shapes = _HUGGING_FACE[name]()
    rng = np.random.default_rng(1)
    tensors = {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}
    return write_safetensors_folder(folder, config, tensors, shards=shards)


def write_safetensors_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, shards: int = 1
) -> Path:
    """Writes a configuration and tensors as Hugging Face and timm do: one file, or several and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    keys = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = keys[index::shards]
        save_file({key: tensors[key] for key in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _decoder(model_type: str, extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    hidden, heads, kv_heads, inner, vocabulary, layers = 32, 8, 4, 64, 64, 2
    head = hidden // heads
    config = {
        "architectures": ["ForCausalLM"],
        "model_type": model_type,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **extra,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * head),
        }
        if model_type in ("qwen3_moe", "gemma3_text"):
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
        if model_type == "gemma3_text":
            shapes |= {f"{layer}.{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
        if model_type == "mixtral":
            shapes[f"{layer}.block_sparse_moe.gate.weight"] = (4, hidden)
            for expert in range(4):
                prefix = f"{layer}.block_sparse_moe.experts.{expert}"
                shapes |= {
                    f"{prefix}.w1.weight": (inner, hidden),
                    f"{prefix}.w2.weight": (hidden, inner),
                    f"{prefix}.w3.weight": (inner, hidden),
                }
        elif model_type == "qwen3_moe":
            shapes[f"{layer}.mlp.gate.weight"] = (4, hidden)
            for expert in range(4):
                prefix = f"{layer}.mlp.experts.{expert}"
                shapes |= {
                    f"{prefix}.gate_proj.weight": (inner, hidden),
                    f"{prefix}.up_proj.weight": (inner, hidden),
                    f"{prefix}.down_proj.weight": (hidden, inner),
                }
        else:
            shapes |= {
                f"{layer}.mlp.gate_proj.weight": (inner, hidden),
                f"{layer}.mlp.up_proj.weight": (inner, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, inner),
            }
    return config, shapes


def _encoder_layer(names: dict[str, str], prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("query", "key", "value"):
        shapes[f"{prefix}.attention.{names['attention']}{part}.weight"] = (hidden, hidden)
        shapes[f"{prefix}.attention.{names['attention']}{part}.bias"] = (hidden,)
    for norm in (names["norm_1"], names["norm_2"]):
        shapes[f"{prefix}.{norm}.weight"] = shapes[f"{prefix}.{norm}.bias"] = (hidden,)
    for part, shape in (
        ("attention.output.dense", (hidden, hidden)),
        ("intermediate.dense", (inner, hidden)),
        ("output.dense", (hidden, inner)),
    ):
        shapes[f"{prefix}.{part}.weight"], shapes[f"{prefix}.{part}.bias"] = shape, shape[:1]
    return shapes


def _bert() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    hidden, inner, layers = 32, 64, 2
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 512,  # KerasHub before 0.31 takes it for granted
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (64, hidden),
        "embeddings.position_embeddings.weight": (512, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
        "pooler.dense.weight": (hidden, hidden),
        "pooler.dense.bias": (hidden,),
    }
    names = {"attention": "self.", "norm_1": "attention.output.LayerNorm", "norm_2": "output.LayerNorm"}
    for i in range(layers):
        shapes |= _encoder_layer(names, f"encoder.layer.{i}", hidden, inner)
    # As in the checkpoints that Google published; newer ones have `weight` and `bias`.
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return config, {
        "bert." + re.sub("|".join(older), lambda found: older[found[0]], key): shape for key, shape in shapes.items()
    }


def _vit() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    hidden, inner, layers = 32, 64, 2
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": 16,
        "patch_size": 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": True,
        "id2label": {str(i): f"label {i}" for i in range(5)},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.patch_embeddings.projection.weight": (hidden, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (hidden,),
        "vit.embeddings.cls_token": (1, 1, hidden),
        "vit.embeddings.position_embeddings": (1, 17, hidden),
        "vit.layernorm.weight": (hidden,),
        "vit.layernorm.bias": (hidden,),
        "classifier.weight": (5, hidden),
        "classifier.bias": (5,),
    }
    names = {"attention": "attention.", "norm_1": "layernorm_before", "norm_2": "layernorm_after"}
    for i in range(layers):
        shapes |= _encoder_layer(names, f"vit.encoder.layer.{i}", hidden, inner)
    return config, shapes


_HUGGING_FACE: dict[str, Callable[[], tuple[dict[str, Any], dict[str, tuple[int, ...]]]]] = {
    "llama3": lambda: _decoder("llama", {}),
    "mixtral": lambda: _decoder(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 512, "output_router_logits": False},
    ),
    "mistral": lambda: _decoder("mistral", {"sliding_window": 512}),
    "qwen3_moe": lambda: _decoder(
        "qwen3_moe",
        {
            "head_dim": 4, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "sliding_window": None, "router_aux_loss_coef": 0.001,
        },
    ),
    # An embedding model: its last two projections are in files of their own.
    "gemma3_text": lambda: _decoder(
        "gemma3_text", {"head_dim": 4, "use_bidirectional_attention": True, "tie_word_embeddings": True}
    ),
    "bert": _bert,
    "vit": _vit,
}  # fmt: skip
