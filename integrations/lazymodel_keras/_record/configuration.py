"""A model is what its configuration says: what KerasHub's converters leave out of a Hugging Face `config.json`.

A converter reads some keys of a configuration and ignores the others, so that a model can compute another function
than its weights were trained for. While a model is recorded, the converter gets the configuration as a mapping that
notes which keys it reads. What it ignores, and the class of KerasHub has an argument for, is passed on: epsilons, and
Llama's and linear rotary scaling. The built model is then compared with the configuration: epsilons, rotary embeddings
and windows are read off its layers; what no layer tells stands in the tables here. A key that is not in them, or that
the converter reads and that no layer tells, counts as obeyed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras

from lazymodel._show.text import listed
from lazymodel_keras import _upstream

Config = Mapping[str, Any]

# Activations by any of their names; the tanh in place of "gelu" changes them by 5e-4 at most.
_TANH = "gelu_pytorch_tanh"
_NAMES = {"swish": "silu", "gelu_python": "gelu", **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_approximate"), _TANH)}
_EITHER_GELU = (_TANH, "gelu")


def _from_width(config: Config) -> int:
    return config.get("hidden_size", 0) // config.get("num_attention_heads", 1)


_GATED: Config = {"hidden_act": ("silu",), "head_dim": (_from_width,)}
_GEMMA: Config = {"hidden_activation": (_TANH,), "attention_bias": (False,), "tie_word_embeddings": (True,)}
_ENCODER: Config = {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)}
_VISION: Config = {"hidden_act": ("gelu",), "qkv_bias": (True,)}

# `model_type` of a configuration, or of one nested in it → key → the values for which KerasHub's class is right, the
# one that it computes with first; a function of the configuration gives it. Keys that a converter reads do not count.
_ASSUMED: Mapping[str, Config] = {
    "albert": {**_ENCODER, "hidden_act": (_TANH,)},
    "bart": {
        "activation_function": ("gelu",),
        "scale_embedding": (False,),
        **{
            f"decoder_{name}": (lambda config, name=name: config.get(f"encoder_{name}"),)
            for name in ("layers", "ffn_dim", "attention_heads")
        },
    },
    "bert": {**_ENCODER, "hidden_act": _EITHER_GELU},  # all are trained with "gelu", and KerasHub takes the other
    "deit": _VISION,
    "dinov2": _VISION,
    "dinov2_with_registers": _VISION,
    "distilbert": {"activation": ("gelu",)},
    "esm": {"token_dropout": (False,), "position_embedding_type": ("absolute, begun a row early", "rotary")},
    # `transformers` takes the tanh whichever of the two a configuration of the first Gemma has.
    "gemma": {
        **_GEMMA, "hidden_act": _EITHER_GELU, "hidden_activation": _EITHER_GELU,
        "use_bidirectional_attention": (lambda config: "num_image_tokens" in config,),  # PaliGemma's
    },
    "gemma2": {**_GEMMA, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
    "gemma3_text": _GEMMA,
    "gemma4_text": {"hidden_activation": (_TANH,)},
    "gpt2": {
        "activation_function": (_TANH,), "n_inner": (lambda config: 4 * config.get("n_embd", 0),),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "tie_word_embeddings": (True,),
    },
    "llama": {**_GATED, "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": _GATED,
    "mixtral": _GATED,
    "phi3": _GATED,
    "qwen2": _GATED,
    "qwen2_moe": {**_GATED, "qkv_bias": (True,), "mlp_only_layers": ([],)},
    "qwen3": {**_GATED, "attention_bias": (False,)},
    "qwen3_moe": {**_GATED, "attention_bias": (False,), "mlp_only_layers": ([],)},
    "roberta": _ENCODER,
    "siglip_vision_model": {"hidden_act": (_TANH,)},
    "smollm3": _GATED,
    "swin": {"hidden_act": ("gelu",), "use_absolute_embeddings": (False,)},
    "vit": _VISION,
    "xlm-roberta": _ENCODER,
}  # fmt: skip

# Keys that converters read, for a class that computes something else.
_MISREAD = {"esm": ("position_embedding_type",)}

_WINDOW, _WHOLE = "sliding_attention", "full_attention"  # kinds of layers
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")  # names of keys and of arguments
_NEAR = 1e-5  # apart; nearer epsilons give the same outputs up to rounding, as XLM-RoBERTa's 1e-5 in place of 1e-12
# A type of rotary scaling → its keys, and the arguments of KerasHub's classes with the same meaning.
_LLAMA3 = {
    "factor": "rope_frequency_adjustment_factor", "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor", "original_max_position_embeddings": "rope_pretraining_sequence_length",
}  # fmt: skip
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # what `transformers` takes for absent keys
# Types that only some classes have and their converters read in full.
_READ_IN_FULL = ("proportional", "mrope")


class Noting(dict[str, Any]):
    """A configuration that notes the keys that are read of it, with dots for those of nested ones."""

    def __init__(self, config: Config, read: set[str], path: str = "") -> None:
        super().__init__({k: Noting(v, read, f"{path}{k}.") if isinstance(v, dict) else v for k, v in config.items()})
        self._read, self._path = read, path

    def __getitem__(self, key: str) -> Any:
        self._read.add(f"{self._path}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._path}{key}")
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # with a method of its own, `{**config}` asks for one item after the other

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}


def passed_on(config: Config, read: Collection[str], found: Config, arguments: Collection[str]) -> dict[str, Any]:
    """The arguments of a class for keys that its converter did not read, besides those that it `found`."""
    path, text = _text(config)
    more: dict[str, Any] = {}
    for key in _EPSILONS:
        if text.get(key) is not None and f"{path}{key}" not in read:
            more |= {name: text[key] for name in _EPSILONS if name in arguments}
    rope = _stated_rope(text, _WHOLE)
    kind = rope.get("rope_type")
    if kind == "llama3" and set(_LLAMA3) <= set(rope):
        more |= {name: rope[key] for key, name in _LLAMA3.items() if name in arguments}
    elif kind == ("yarn" if text.get("model_type") == "gpt_oss" else "linear") and "factor" in rope:
        more |= {name: rope["factor"] for name in ("rope_scaling_factor",) if name in arguments}
    return {name: value for name, value in more.items() if name not in found}


def differences(config: Config, read: Collection[str], backbone: Any, given: Collection[str] = ()) -> list[str]:
    """What a built model computes in another way than its configuration says, each as a text.

    Args:
        config: The configuration.
        read: The keys that its converter read.
        backbone: The model.
        given: The user's own arguments of the class; what they decide is not compared.
    """
    path, text = _text(config)
    found = dict[str, tuple[Any, Any]](_assumed(config, read))
    if not set(_EPSILONS) & set(given):
        found |= _epsilons(config, backbone)
    layers = getattr(backbone, "transformer_layers", None) or getattr(backbone, "decoder_layers", None) or []
    layers = [layer for layer in layers if isinstance(layer, keras.layers.Layer)]  # ALBERT has lists of them
    partial = any(key.endswith("partial_rotary_factor") for key in read)
    if not any("rope" in name for name in given):
        found |= {f"{path}{key}": pair for key, pair in _ropes(text, layers, partial)}
    if not any("sliding" in name for name in given):
        found |= {f"{path}{key}": pair for key, pair in _windows(text, layers)}
    found |= {f"{path}{key}": pair for key, pair in _query_scales(text, layers)}
    return [f"{key} is {stated!r}, the model has {computed!r}" for key, (stated, computed) in found.items()]


def _text(config: Config) -> tuple[str, Config]:
    """The configuration of the decoder, and the path to it."""
    nested = _mapping(config.get("text_config"))
    return ("text_config.", nested) if nested else ("", config)


def _mapping(value: Any) -> Config:
    return value if isinstance(value, dict) else {}


def _sections(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """A configuration and all that are nested in it, with their paths."""
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _sections(value, f"{path}{key}.")


def _assumed(config: Config, read: Collection[str]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for path, section in _sections(config):
        kind = str(section.get("model_type"))
        for key, values in _ASSUMED.get(kind, {}).items():
            stated, obeyed = section.get(key), f"{path}{key}" in read and key not in _MISREAD.get(kind, ())
            right = [value(section) if callable(value) else value for value in values]
            if stated is not None and not obeyed and _NAMES.get(str(stated), stated) not in right:
                yield f"{path}{key}", (stated, right[0])


def _epsilons(config: Config, backbone: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    built = {
        layer.epsilon for layer in _upstream.flat_layers(backbone) if isinstance(getattr(layer, "epsilon", 0), float)
    }
    sections = [(path, section) for path, section in _sections(config) if set(_EPSILONS) & set(section)]
    for path, section in sections:
        for key in _EPSILONS:
            stated = section.get(key)
            if not built or not isinstance(stated, float):
                continue
            others = [value for value in built if abs(value - stated) > _NEAR]
            if others and (len(sections) == 1 or len(others) == len(built)):
                yield f"{path}{key}", (stated, others[0] if len(others) == 1 else sorted(built))


def _stated_rope(config: Config, kind: str) -> dict[str, Any]:
    """What a configuration, of transformers 5 or before, says of the rotary embeddings in layers of a kind."""
    parameters = _mapping(config.get("rope_parameters"))
    if any(isinstance(value, dict) for value in parameters.values()):
        found = _mapping(parameters.get(kind))
    elif kind == _WINDOW and str(config.get("model_type")).startswith("gemma3"):  # its scaling is for the others
        return {"rope_theta": config.get("rope_local_base_freq", 10_000.0), "rope_type": "default"}
    else:
        found = {"rope_theta": config.get("rope_theta"), **_mapping(config.get("rope_scaling")), **parameters}
    found = {key: value for key, value in found.items() if value is not None}
    found["rope_type"] = found.pop("rope_type", found.pop("type", "default"))
    if found["rope_type"] == "su":  # an older name
        found["rope_type"] = "longrope"
    if found["rope_type"] == "yarn":
        found = {**_YARN, **found}
    if found["rope_type"] in _READ_IN_FULL or (found["rope_type"] in ("linear", "yarn") and found.get("factor") == 1):
        found["rope_type"] = "default"
    return found


def _computed_rope(rotary: Any) -> dict[str, Any]:
    """The same of a layer of KerasHub."""
    theta = getattr(rotary, "max_wavelength", None) or getattr(rotary, "rope_theta", None)
    found, factor = {"rope_theta": theta, "rope_type": "default"}, getattr(rotary, "scaling_factor", 1.0)
    if getattr(rotary, "low_freq_factor", None) is not None:
        names = {
            "factor": "frequency_adjustment_factor",
            "original_max_position_embeddings": "pretraining_sequence_length",
        }
        return {**found, "rope_type": "llama3", **{key: getattr(rotary, names.get(key, key)) for key in _LLAMA3}}
    if (factors := getattr(rotary, "inverese_freq_long_factor", None)) is not None:  # Phi-3's
        short, before = rotary.inverese_freq_short_factor, rotary.pretraining_sequence_length
        more = {"long_factor": factors, "short_factor": short, "original_max_position_embeddings": before}
        return {**found, "rope_type": "longrope", **more}
    if factor == 1 or hasattr(rotary, "low_freq_factor"):  # Llama's computes its frequencies without the factor
        return found
    kind = getattr(rotary, "rope_type", "linear")
    more = {key: getattr(rotary, key) for key in (*_YARN, "original_max_position_embeddings")} if kind == "yarn" else {}
    return {**found, "rope_type": kind, "factor": factor, **more}


def _ropes(config: Config, layers: Sequence[Any], partial: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    kinds = _kinds(config, len(layers))
    for index, layer in enumerate(layers):
        rotary = [each for each in _upstream.flat_layers(layer) if "otaryEmbedding" in type(each).__name__]
        if not rotary:
            continue
        kind = kinds[index]
        stated, computed = _stated_rope(config, kind), _computed_rope(rotary[0])
        parameters = _mapping(config.get("rope_parameters"))
        under = "rope_parameters." if parameters else "rope_scaling."
        under += f"{kind}." if isinstance(parameters.get(kind), dict) else ""
        if stated["rope_type"] != computed["rope_type"]:
            yield f"{under}rope_type", (stated["rope_type"], computed["rope_type"])
            computed = {"rope_theta": computed["rope_theta"]}
        for key, value in computed.items():
            if key in stated and stated[key] != value:
                own = key == "rope_theta" and not parameters
                yield (key if own else f"{under}{key}"), (stated[key], value)
        rotated = config.get("partial_rotary_factor", stated.get("partial_rotary_factor", 1.0))
        # Classes that rotate only a part have the argument, and their converters read it.
        if not partial and rotated not in (1.0, getattr(rotary[0], "partial_rotary_factor", 1.0)):
            yield "partial_rotary_factor", (rotated, 1.0)


def _query_scales(config: Config, layers: Sequence[Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    stated = config.get("query_pre_attn_scalar")
    attentions: list[Any] = [getattr(layer, "attention", None) for layer in layers]
    for attention in attentions if stated is not None else ():
        if (by_head := getattr(attention, "query_head_dim_normalize", None)) is not None:
            computed = attention.head_dim if by_head else attention.hidden_dim // attention.num_query_heads
            if stated != computed:
                yield "query_pre_attn_scalar", (stated, computed)


# For configurations without `layer_types`: the layers that see only a window, by their number.
_WINDOWED: Mapping[str, Callable[[Config, int], bool]] = {
    "mistral": lambda config, index: True,
    "mixtral": lambda config, index: True,
    "qwen2": lambda config, index: index >= config.get("max_window_layers", 0),
    "qwen2_moe": lambda config, index: index % 2 == 0 and index < config.get("max_window_layers", 0),
    "qwen3": lambda config, index: index >= config.get("max_window_layers", 0),
    "qwen3_moe": lambda config, index: True,
    "gemma2": lambda config, index: index % 2 == 0,
    "gemma3_text": lambda config, index: (index + 1) % (config.get("sliding_window_pattern") or 6) > 0,
    "gpt_oss": lambda config, index: index % 2 == 0,
    "phi3": lambda config, index: True,
}
# KerasHub's Qwen masks its window only where Keras has no fused attention, and Keras has it.
_WITHOUT_WINDOW = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def _kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer."""
    windowed = _WINDOWED.get(str(config.get("model_type")), lambda *_: False)
    found: Sequence[str] = config.get("layer_types") or ()
    return [*found, *(_WINDOW if windowed(config, index) else _WHOLE for index in range(len(found), count))]


def _windows(config: Config, layers: Sequence[Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The number of tokens that each layer sees."""
    size, model = config.get("sliding_window"), str(config.get("model_type"))
    if not {"sliding_window", "layer_types"} & set(config):
        return
    longest = config.get("max_position_embeddings") or float("inf")
    if config.get("use_sliding_window") is False or not isinstance(size, int) or not 0 < size < longest:
        size = None
    stated = [size if kind == _WINDOW else None for kind in _kinds(config, len(layers))[: len(layers)]]
    computed = list[Any]()
    for layer in layers:
        found = getattr(layer, "sliding_window_size", None) or getattr(layer, "sliding_window", None)
        found = found + 1 if found and model == "gpt_oss" else found  # it compares with "at least"
        used = getattr(layer, "use_sliding_window_attention", True) and model not in _WITHOUT_WINDOW
        computed.append(found if used and found and found < longest else None)
    if stated != computed:
        keys = ("layer_types", "use_sliding_window", "sliding_window")
        yield next((key for key in keys if config.get(key)), "sliding_window"), (_shown(stated), _shown(computed))


def _shown(windows: Sequence[int | None]) -> str:
    return listed([str(window or "full") for window in windows], most=12)
