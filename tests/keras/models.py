"""Small models of the kinds that people load, as KerasHub presets and as Hugging Face folders, and how to compare."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
import lazymodel_keras as lk
from tests.sentence_piece import gemma_vocabulary

_SIZES = {"vocabulary_size": 64, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
BERT = {**_SIZES, "num_heads": 4}
LLAMA3 = {**_SIZES, "num_query_heads": 8, "num_key_value_heads": 4}
MIXTRAL = {**LLAMA3, "num_experts": 4, "top_k": 2}
GEMMA = {
    **LLAMA3, "num_key_value_heads": 8, "head_dim": 4, "use_post_ffw_norm": True, "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0,
}  # fmt: skip
VIT = {"image_shape": (16, 16, 3), "patch_size": (4, 4), "num_layers": 2, "num_heads": 4, "hidden_dim": 32}
VIT |= {"mlp_dim": 64}

BACKBONES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma": (keras_hub.models.GemmaBackbone, GEMMA),
    "llama3": (keras_hub.models.Llama3Backbone, LLAMA3),
    "bert": (keras_hub.models.BertBackbone, BERT),
    "vit": (keras_hub.models.ViTBackbone, VIT),
    "mixtral": (keras_hub.models.MixtralBackbone, MIXTRAL),
}


def functional() -> keras.Model:
    """Two inputs, a shared layer, a nested model."""
    shared = keras.layers.Dense(16, activation="gelu")
    inner = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16), keras.layers.BatchNormalization()])
    one, two = keras.Input((8,)), keras.Input((8,))
    return keras.Model([one, two], keras.layers.add([inner(shared(one)), shared(two)]))


def preprocessing() -> keras.Model:
    statistics = keras.layers.Normalization(mean=np.arange(8.0), variance=np.ones(8))
    return keras.Sequential([keras.Input((8,)), statistics, keras.layers.Dense(4)])


def columns(variable: lm.AbstractVariable) -> P:
    """Rules for any model: the last axis, if it divides by 2."""
    fits = variable.shape and variable.shape[-1] % 2 == 0
    return P(*[None] * (len(variable.shape) - 1), "model") if fits else P()


def first_that_divides(variable: lm.AbstractVariable) -> P:
    """Rules for any model: the last axis that 8 divides."""
    for axis in reversed(range(len(variable.shape))):
        if variable.shape[axis] % 8 == 0:
            return P(*([None] * axis), "model")
    return P()


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


def preset_of(name: str, **save: Any) -> str:
    """A KerasHub preset of one of `BACKBONES`, to be read only: this process has saved it once with these options."""
    saved = Path(_presets().name) / json.dumps([name, save])
    if not saved.exists():
        cls, config = BACKBONES[name]
        randomize(cls(**config)).save_to_preset(str(saved), **save)
    return str(saved)


def save_preset(folder: Path, name: str, **save: Any) -> Path:
    """A copy of that, which a test may change."""
    return shutil.copytree(preset_of(name, **save), folder, dirs_exist_ok=True)


@functools.cache
def causal_lm(num_layers: int = 2) -> str:
    """A preset of a Gemma CausalLM with a tokenizer of its own, to be read only."""
    tokenizer = keras_hub.models.GemmaTokenizer(proto=gemma_vocabulary())
    backbone = randomize(keras_hub.models.GemmaBackbone(**{**GEMMA, "num_layers": num_layers}))
    preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
    folder = str(Path(_presets().name) / f"causal_lm_{num_layers}")
    keras_hub.models.GemmaCausalLM(backbone, preprocessor).save_to_preset(folder)
    return folder


@keras.saving.register_keras_serializable("tests")
class Words(keras.layers.Layer):
    """A layer with a file of its own."""

    words = "a b c"

    def call(self, inputs: Any) -> Any:
        return inputs

    def save_assets(self, folder: str) -> None:
        Path(folder, "words.txt").write_text("d e f")

    def load_assets(self, folder: str) -> None:
        self.words = Path(folder, "words.txt").read_text()


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
    assert_same_values(stock.variables, ours.variables)
    if outputs:
        for expected, found in zip(outputs_of(stock), outputs_of(ours), strict=True):
            if all(e.value.sharding == f.value.sharding for e, f in zip(stock.variables, ours.variables, strict=True)):
                np.testing.assert_array_equal(expected, found)
            else:  # sums are split over devices
                np.testing.assert_allclose(expected, found, rtol=2e-4, atol=2e-4)


def assert_same_values(stock: Iterable[Any], ours: Iterable[Any]) -> None:
    """Ordinary variables that are equal bit for bit."""
    for expected, found in zip(stock, ours, strict=True):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape), expected.path
        assert "assign" not in vars(found), found.path
        np.testing.assert_array_equal(bits(expected), bits(found), err_msg=expected.path)


def state_of(model: Any) -> list[Any]:
    """The variables of a model and of its optimizer."""
    return [*model.variables, *model.optimizer.variables]


def device_mesh(*shape: int, axes: tuple[str, ...] = ("batch", "model")) -> Any:
    """Keras' mesh of all devices."""
    return keras.distribution.DeviceMesh(shape, list(axes[-len(shape) :]), keras.distribution.list_devices())


def layouts(mesh: Any, **specs: Any) -> Any:
    """A layout map of Keras with these keys."""
    found = keras.distribution.LayoutMap(mesh)
    for key, spec in specs.items():
        found[key] = spec
    return found


def distribution(layout: Any) -> Any:
    """Keras' own distribution of models by a layout map; its scope is entered with `with`."""
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch").scope()


def in_block(build: Callable[[], Any], **options: Any) -> Any:
    """What a function returns that is called in a block of `lk.deferred` with these options.

    It looks up the methods that it calls, which are others inside.
    """
    with lk.deferred(**options):
        return build()


def refused(load: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message of the checkpoint error that a load ends with."""
    with pytest.raises(lm.CheckpointError) as caught:
        load(*arguments, **options)
    return str(caught.value)


def assert_same_in_distribution(cls: Any, folder: str) -> None:
    """A preset is equal to stock's, and placed alike, by the class's own layout over eight devices."""
    with distribution(cls.get_layout_map(device_mesh(1, 8))):
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
    keras.backend.clear_session(free_memory=False)  # else Keras collects garbage, of all that the process holds
    keras.utils.set_random_seed(seed)
    return build()


# Hugging Face folders: the original projects' names and shapes.


def save_hugging_face(folder: Path, name: str, *, dtype: Any = np.float32, shards: int = 1) -> Path:
    """Writes a Hugging Face folder of one of the models above."""
    config, shapes = hugging_face(name)
    return write_safetensors_folder(folder, config, random_tensors(shapes, dtype), shards=shards)


def hugging_face(name: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The configuration of one of the models above, and the shapes of its tensors."""
    if name in ("bert", "vit"):
        return _bert() if name == "bert" else _vit()
    return _DECODERS[name], decoder_shapes(_DECODERS[name])


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


def decoder(model_type: str, **entries: Any) -> dict[str, Any]:
    """The configuration of a tiny decoder."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    known = {"model_type": model_type, "architectures": ["ForCausalLM"], "tie_word_embeddings": False}
    return {**sizes, **heads, **known, **entries}


def decoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that a decoder of this configuration has."""
    model, width, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim", width // heads)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], width), "norm": (width,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {at + name: (width,) for name in norms}
        for name, count in (("q", heads), ("k", config["num_key_value_heads"]), ("v", config["num_key_value_heads"])):
            shapes[f"{at}self_attn.{name}_proj"] = (count * head, width)
        shapes[f"{at}self_attn.o_proj"] = (width, heads * head)
        if model in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes |= {f"{at}self_attn.{name}_norm": (head,) for name in "qk"}
        if model == "gpt_oss":
            shapes |= _mxfp4_layer(at, config)
            continue
        inner, experts, names = {f"{at}mlp.": config["intermediate_size"]}, 0, ("gate_proj", "up_proj", "down_proj")
        if model == "mixtral":
            part, experts, size = "block_sparse_moe", config["num_local_experts"], config["intermediate_size"]
            names = ("w1", "w3", "w2")
        elif model.endswith("moe"):
            part, experts, size = "mlp", config["num_experts"], config["moe_intermediate_size"]
        if experts:
            shapes[f"{at}{part}.gate"] = (experts, width)
            inner = {f"{at}{part}.experts.{expert}.": size for expert in range(experts)}
        if model == "qwen2_moe":
            shapes[f"{at}mlp.shared_expert_gate"] = (1, width)
            inner[f"{at}mlp.shared_expert."] = config["shared_expert_intermediate_size"]
        for each, size in inner.items():
            shapes |= {f"{each}{name}": (size, width) for name in names[:2]} | {f"{each}{names[2]}": (width, size)}
    whole = ("bias", "sinks", "_blocks", "_scales", "_bias")
    found = {f"model.{name}" + (".weight" if not name.endswith(whole) else ""): s for name, s in shapes.items()}
    if model in ("qwen2", "qwen2_moe", "gpt_oss"):
        found |= {re.sub("weight$", "bias", n): s[:1] for n, s in found.items() if re.search("[qkv]_proj.weight", n)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], width)
    return found


def _mxfp4_layer(at: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The experts of a layer of GPT-OSS: blocks of 32 numbers of four bits, and a scale for each."""
    width, inner, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    router = f"{at}mlp.router"
    shapes: dict[str, tuple[int, ...]] = {router: (experts, width), f"{router}.bias": (experts,)}
    shapes |= {f"{at}self_attn.sinks": (config["num_attention_heads"],), f"{at}self_attn.o_proj.bias": (width,)}
    for name, rows, columns in (("gate_up", 2 * inner, width), ("down", width, inner)):
        each = f"{at}mlp.experts.{name}_proj"
        shapes[f"{each}_blocks"] = (experts, rows, columns // 32, 16)
        shapes |= {f"{each}_scales": (experts, rows, columns // 32), f"{each}_bias": (experts, rows)}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def _encoder_layer(at: str, attention: str, norms: tuple[str, str]) -> dict[str, tuple[int, ...]]:
    kernels = {f"{attention}{part}": (32, 32) for part in ("query", "key", "value")}
    kernels |= {"attention.output.dense": (32, 32), "intermediate.dense": (64, 32), "output.dense": (32, 64)}
    biases = {f"{at}{name}.bias": shape[:1] for name, shape in kernels.items()}
    scales = {f"{at}{norm}.{part}": (32,) for norm in norms for part in ("weight", "bias")}
    return {f"{at}{name}.weight": shape for name, shape in kernels.items()} | biases | scales


_ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}


def _bert() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = {
        **_ENCODER, "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 64,
        "max_position_embeddings": 512,  # KerasHub before 0.31 takes it for granted
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (64, 32),
        "embeddings.position_embeddings.weight": (512, 32),
        "embeddings.token_type_embeddings.weight": (2, 32),
        "embeddings.LayerNorm.weight": (32,),
        "embeddings.LayerNorm.bias": (32,),
        "pooler.dense.weight": (32, 32),
        "pooler.dense.bias": (32,),
    }
    for i in range(2):
        at = f"encoder.layer.{i}."
        shapes |= _encoder_layer(at, "attention.self.", ("attention.output.LayerNorm", "output.LayerNorm"))
    # As in the checkpoints that Google published; newer ones have `weight` and `bias`.
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return config, {
        "bert." + re.sub("|".join(older), lambda found: older[found[0]], key): shape for key, shape in shapes.items()
    }


def _vit() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = {
        **_ENCODER, "architectures": ["ViTForImageClassification"], "model_type": "vit", "image_size": 16,
        "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "qkv_bias": True,
        "id2label": {str(i): f"label {i}" for i in range(5)},
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.patch_embeddings.projection.weight": (32, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (32,),
        "vit.embeddings.cls_token": (1, 1, 32),
        "vit.embeddings.position_embeddings": (1, 17, 32),
        "vit.layernorm.weight": (32,),
        "vit.layernorm.bias": (32,),
        "classifier.weight": (5, 32),
        "classifier.bias": (5,),
    }
    for i in range(2):
        at = f"vit.encoder.layer.{i}."
        shapes |= _encoder_layer(at, "attention.attention.", ("layernorm_before", "layernorm_after"))
    return config, shapes


# Some of a decoder's entries that KerasHub's converters ask for.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
EXPERTS |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.001, "mlp_only_layers": []}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
_DECODERS = {
    "llama3": decoder("llama"),
    "mixtral": decoder("mixtral", sliding_window=512, **LOCAL_EXPERTS),
    "mistral": decoder("mistral", sliding_window=512),
    "qwen3_moe": decoder("qwen3_moe", head_dim=4, sliding_window=None, **EXPERTS),
    # An embedding model: its last two projections are in files of their own.
    "gemma3_text": decoder(
        "gemma3_text", head_dim=4, sliding_window=512, use_bidirectional_attention=True, tie_word_embeddings=True
    ),
}
