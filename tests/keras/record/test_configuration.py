"""What KerasHub's converters ignore of a configuration: passed on, or an error that names the key.

By configurations alone, without weights; `test_outputs_of_transformers`, which is large, compares outputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import pytest
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader  # which converter; not exported

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel_keras._record.configuration import Noting
from tests.conftest import child_environment
from tests.keras import configurations
from tests.keras.configurations import CASES
from tests.keras.models import EXPERTS, LOCAL_EXPERTS, decoder, save_hugging_face
from tests.keras.versions import needs_keras_hub

M: Any = keras_hub.models
Config = dict[str, Any]

pytestmark = [
    needs_keras_hub("0.32", "the converters whose omissions are in the tables"),
    pytest.mark.filterwarnings("ignore:(?s).*:UserWarning:keras"),
]

_HEADS = {"head_dim": 8, "max_position_embeddings": 64}
_WINDOWS = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
_ENCODER = {
    "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64,
    "max_position_embeddings": 18, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.0,
    "architectures": ["Model"],
}  # fmt: skip
_VISION = {
    **_ENCODER, "image_size": 16, "patch_size": 4, "attention_probs_dropout_prob": 0.0, "qkv_bias": True,
    "layer_norm_eps": 1e-6,
}  # fmt: skip
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
_GLOBAL = {"rope_type": "default", "rope_theta": 1000000.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip


def _now(model_type: str, **entries: Any) -> Config:
    """A decoder as transformers 5 writes it."""
    config = decoder(model_type, **{"rms_norm_eps": 1e-6, "max_position_embeddings": 64, **entries})
    theta = config.pop("rope_theta")
    return {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": theta}, **config}


_GEMMA2 = _now(
    "gemma2", **_HEADS, query_pre_attn_scalar=8, sliding_window=8, final_logit_softcapping=30.0,
    hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0, tie_word_embeddings=True,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
_GEMMA3 = {
    **_GEMMA2, "model_type": "gemma3_text", "num_hidden_layers": 6, "attn_logit_softcapping": None,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {"sliding_attention": _LOCAL, "full_attention": {**_GLOBAL, "rope_type": "linear", "factor": 8}},
}  # fmt: skip
_OLD_GEMMA3 = {
    **{key: value for key, value in _GEMMA3.items() if key not in ("rope_parameters", "layer_types")},
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 6,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_positions": 16, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip
# Configurations of models that KerasHub computes as they say.
RIGHT: dict[str, tuple[Any, Config]] = {
    "llama": (M.Llama3Backbone, _now("llama", head_dim=4, attention_bias=False, mlp_bias=False)),
    "llama (transformers 4)": (M.Llama3Backbone, decoder("llama", rope_scaling=None, rms_norm_eps=1e-6)),
    "mistral": (M.MistralBackbone, _now("mistral", sliding_window=8)),
    "mixtral": (M.MixtralBackbone, _now("mixtral", sliding_window=None, **LOCAL_EXPERTS)),
    "qwen2": (M.QwenBackbone, _now("qwen2", **_WINDOWS, layer_types=["full_attention"] * 2)),
    "qwen2 (transformers 4)": (M.QwenBackbone, decoder("qwen2", **{**_WINDOWS, "sliding_window": 32768})),
    "qwen3": (M.Qwen3Backbone, _now("qwen3", **_HEADS, **_WINDOWS)),
    "qwen3_moe": (M.Qwen3MoeBackbone, _now("qwen3_moe", **_HEADS, **_WINDOWS, **EXPERTS)),
    "gemma": (
        M.GemmaBackbone, _now("gemma", **_HEADS, hidden_act="gelu", hidden_activation=None, tie_word_embeddings=True)
    ),
    "gemma2": (M.GemmaBackbone, _GEMMA2),
    "gemma3_text": (M.Gemma3Backbone, _GEMMA3),
    "gemma3_text (transformers 4)": (M.Gemma3Backbone, _OLD_GEMMA3),
    "gpt2": (M.GPT2Backbone, _GPT2),
    "bert": (M.BertBackbone, {**_ENCODER, "model_type": "bert", "layer_norm_eps": 1e-12}),
    "xlm-roberta": (M.XLMRobertaBackbone, {**_ENCODER, "model_type": "xlm-roberta"}),
    "vit": (M.ViTBackbone, {**_VISION, "model_type": "vit"}),
    "deit": (M.DeiTBackbone, {**_VISION, "model_type": "deit"}),
}  # fmt: skip


def _folder(tmp_path: Path, config: Config) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def _built(cls: Any, folder: str, **given: Any) -> Any:
    framework: Any = lk.abstract_from_preset(cls, folder, load_weights=False, **given).framework
    return framework.result


def _plainly(cls: Any, config: Config, **more: Any) -> Config:
    """The arguments of the model that KerasHub's own converter makes of a configuration, with some others."""
    loader: Any = TransformersPresetLoader("", config)
    arguments = loader.converter.convert_backbone_config(config)
    framework: Any = lm.build_abstract(lambda: cls(**{**arguments, **more})).framework
    return _arguments(framework.result)


def _arguments(model: Any) -> Config:
    return {key: value for key, value in model.get_config().items() if key != "name"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_is_right(name: str, tmp_path: Path) -> None:
    """Nothing is said, and stock builds the same model."""
    cls, config = RIGHT[name]
    assert _arguments(_built(cls, _folder(tmp_path, config))) == _plainly(cls, config)


_ROPE = "rope_parameters"
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
# Model → keys with another value, which KerasHub does not compute, and the key and values that the error names.
ODD: list[tuple[str, Config, str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu', the model has 'silu'"),
    ("llama", {"attention_bias": True}, "attention_bias is True, the model has False"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True, the model has False"),
    ("llama", {"head_dim": 8}, "head_dim is 8, the model has 4"),
    ("llama", {_ROPE: _YARN}, "rope_parameters.rope_type is 'yarn', the model has 'default'"),
    ("llama", {_ROPE: {**_YARN, "rope_type": "linear"}}, "rope_type is 'linear', the model has 'default'"),
    ("llama", {_ROPE: {**_YARN, "rope_type": "dynamic"}}, "rope_type is 'dynamic', the model has 'default'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, the model has 1.0"),
    ("mistral", {_ROPE: _LLAMA3}, "rope_parameters.rope_type is 'llama3', the model has 'default'"),
    ("qwen2 (transformers 4)", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is 'full, 8', the model has 'full, full'",
    ),
    (
        "qwen2 (transformers 4)", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "use_sliding_window is 'full, 8', the model has 'full, full'",
    ),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "is '8, 8', the model has"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True, the model has False"),
    ("qwen3", {"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1, the model has 1e-05"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is [0], the model has []"),
    ("gemma", {_ROPE: {"rope_theta": 100.0}}, "rope_parameters.rope_theta is 100.0, the model has 10000.0"),
    ("gemma", {"hidden_act": "relu"}, "hidden_act is 'relu', the model has 'gelu_pytorch_tanh'"),
    ("gemma", {"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1, the model has 1e-06"),
    ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings is False, the model has True"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, the model has False"),
    ("gemma2", {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar is 4, the model has 8"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types is 'full, full', the model has '8, full'"),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types is 'full, 8, full, 8"),
    (
        "gemma3_text", {_ROPE: {"sliding_attention": {**_LOCAL, "rope_theta": 5.0}, "full_attention": _GLOBAL}},
        "rope_parameters.sliding_attention.rope_theta is 5.0, the model has 10000.0",
    ),
    ("gemma3_text (transformers 4)", {"rope_local_base_freq": 5.0}, "rope_theta is 5.0, the model has 10000.0"),
    ("gemma3_text (transformers 4)", {"sliding_window_pattern": 3}, "is '8, 8, full, 8, 8, full', the model has '8, 8"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"n_inner": 48}, "n_inner is 48, the model has 128"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu', the model has 'gelu_pytorch_tanh'"),
    ("gpt2", {"layer_norm_epsilon": 0.1}, "layer_norm_epsilon is 0.1, the model has 1e-05"),
    ("bert", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("bert", {"is_decoder": True}, "is_decoder is True, the model has False"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ("xlm-roberta", {"layer_norm_eps": 0.1}, "layer_norm_eps is 0.1, the model has 1e-05"),
    ("vit", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', the model has 'gelu'"),
    ("deit", {"qkv_bias": False}, "qkv_bias is False, the model has True"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "said"), ODD, ids=[f"{n}-{'-'.join(c)}" for n, c, _ in ODD])
def test_a_key_that_is_ignored(name: str, changes: Config, said: str, tmp_path: Path) -> None:
    cls, config = RIGHT[name]
    folder = _folder(tmp_path, {**config, **changes})
    with pytest.raises(lm.CheckpointError, match=re.escape(said)) as error:
        lk.abstract_from_preset(cls, folder, load_weights=False)
    assert str(error.value).startswith(f"{folder}: KerasHub's {cls.__name__} computes otherwise than config.json says")


# What is passed on to KerasHub's class, and the arguments that it then has.
PASSED: list[tuple[str, Config, Config]] = [
    ("llama", {"rms_norm_eps": 0.1}, {"layer_norm_epsilon": 0.1}),
    (
        "llama", {_ROPE: _LLAMA3},
        {
            "rope_max_wavelength": 500000.0, "rope_frequency_adjustment_factor": 8.0, "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0, "rope_pretraining_sequence_length": 32,
        },
    ),
    ("mistral", {_ROPE: {**_YARN, "rope_type": "linear"}}, {"rope_scaling_factor": 4.0}),
    ("qwen3", {_ROPE: {**_YARN, "rope_type": "linear"}}, {"rope_scaling_factor": 4.0}),
    ("vit", {"layer_norm_eps": 0.1}, {"layer_norm_epsilon": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "arguments"), PASSED, ids=[f"{n}-{'-'.join(c)}" for n, c, _ in PASSED])
def test_a_key_that_is_passed_on(name: str, changes: Config, arguments: Config, tmp_path: Path) -> None:
    """The model equals the one that is built with these arguments."""
    cls, config = RIGHT[name]
    config = {**config, **changes}
    assert _arguments(_built(cls, _folder(tmp_path, config))) == _plainly(cls, config, **arguments)


def test_the_advice(tmp_path: Path) -> None:
    """`strict=False` loads the weights as stock does, with a warning that names the key."""
    folder = save_hugging_face(tmp_path / "llama", "llama3")
    config = json.loads((folder / "config.json").read_text())
    _folder(folder, {**config, "hidden_act": "relu"})
    cls = M.Llama3Backbone
    with pytest.raises(lm.CheckpointError, match=r"hidden_act is 'relu'.*Pass strict=False to lazymodel_keras"):
        lk.from_preset(cls, str(folder))
    with pytest.warns(lm.LazyModelWarning, match=r"hidden_act is 'relu'.*outputs differ"):
        model = lk.from_preset(cls, str(folder), strict=False)
    stock = cls.from_preset(str(folder))
    for ours, theirs in zip(model.variables, stock.variables, strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)


def test_the_load_report_says_what_stock_leaves_out(tmp_path: Path) -> None:
    folder, cls = save_hugging_face(tmp_path / "llama", "llama3"), M.Llama3Backbone
    config = json.loads((folder / "config.json").read_text())
    reports: list[lm.LoadReport] = []

    def notes(**given: Any) -> tuple[str, ...]:
        lk.from_preset(cls, str(folder), report=reports.append, **given)
        return reports[-1].notes

    _folder(folder, {**config, "rms_norm_eps": 1e-6})
    assert notes() == ()
    _folder(folder, {**config, "rms_norm_eps": 0.1})
    (note,) = notes()
    assert note == "layer_norm_epsilon=0.1 from config.json, which from_preset of KerasHub leaves out"
    assert f"note: {note}" in str(reports[-1])
    assert notes(layer_norm_epsilon=0.5) == ()
    with lk.deferred(report=reports.append):
        cls.from_preset(str(folder))
        _folder(folder, {**config, "rms_norm_eps": 1e-6})
        cls.from_preset(str(folder))
    assert [report.notes for report in reports[-2:]] == [(note,), ()]


def test_an_argument_of_the_user_decides(tmp_path: Path) -> None:
    cls, config = RIGHT["llama"]
    folder = _folder(tmp_path, {**config, "rms_norm_eps": 0.1, _ROPE: _YARN})
    model = _built(cls, folder, layer_norm_epsilon=1e-3, rope_max_wavelength=5.0)
    assert (model.layer_norm_epsilon, model.rope_max_wavelength) == (1e-3, 5.0)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    cls, config = RIGHT["llama"]
    folder = _folder(tmp_path, {**config, "rms_norm_eps": 0.1})
    assert _built(cls, folder).layer_norm_epsilon == 0.1
    assert cls.from_preset(folder, load_weights=False).layer_norm_epsilon == 1e-6


def test_a_plan_is_only_warned(tmp_path: Path, command: Any) -> None:
    """Memory is the same whatever an activation is."""
    _folder(tmp_path, {**RIGHT["llama"][1], "hidden_act": "relu"})
    status, out, err = command("plan", str(tmp_path / "config.json"), "--json")
    assert status == 0 and json.loads(out)["variables"]
    assert err.startswith(f"lazymodel: {tmp_path / 'config.json'}: KerasHub's Llama3Backbone computes otherwise")
    assert err.count("\n") == 1 and "hidden_act is 'relu'" in err


def test_what_is_noted() -> None:
    read = set[str]()
    config = Noting({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {"g": 4}, "h": 5}, read)
    assert "a" in config and list(config) == ["a", "b", "f", "h"] and not read
    assert (config["a"], config.get("x", 7), config["b"].get("d")["e"]) == (1, 7, 3)
    assert read == {"a", "x", "b", "b.d", "b.d.e"}
    read.clear()
    assert {**config["f"]} == {"g": 4} and read == {"f", "f.g"}
    assert json.loads(json.dumps(config)) == {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {"g": 4}, "h": 5}
    assert "b.c" in read and "h" in read


# What KerasHub's classes do not do, although they have an argument for it. If one of these fails, KerasHub does it now,
# and `configuration` can leave it out.


def _outputs(cls: Any, tokens: np.ndarray, **config: Any) -> np.ndarray:
    keras.utils.set_random_seed(0)
    sizes = {"vocabulary_size": 64, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 16, "num_query_heads": 2}
    model = cls(**sizes, num_key_value_heads=2, **config)
    return np.asarray(model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))


TOKENS = np.arange(1, 11, dtype="int32")[None]


@pytest.mark.parametrize(
    ("cls", "plain", "changed"),
    [
        (M.QwenBackbone, {"use_sliding_window_attention": False}, {"use_sliding_window_attention": True}),
        (M.Qwen3Backbone, {"sliding_window_size": None}, {"sliding_window_size": 2}),
        (M.Llama3Backbone, {}, {"rope_position_scaling_factor": 4.0}),
        (M.GemmaBackbone, {}, {"query_head_dim_normalize": False}),
        (M.Gemma3Backbone, {}, {"query_head_dim_normalize": False}),
    ],
)
def test_arguments_without_effect(cls: Any, plain: Config, changed: Config) -> None:
    own = {
        M.QwenBackbone: {"sliding_window_size": 2},
        M.Qwen3Backbone: {"head_dim": 8},
        M.GemmaBackbone: {"head_dim": 16},
        M.Gemma3Backbone: {"head_dim": 16, "image_size": None},
    }.get(cls, {})
    one, two = (_outputs(cls, TOKENS, **own, **more) for more in (plain, changed))
    np.testing.assert_array_equal(one, two)


def test_the_layers_of_gpt_oss_that_see_a_window(tmp_path: Path) -> None:
    """Published configurations begin with a layer that sees a window, KerasHub with one that sees all; and its windows
    are a token longer."""
    config = _now("gpt_oss", head_dim=8, sliding_window=8, **LOCAL_EXPERTS)
    kinds = ["sliding_attention", "full_attention"]
    said = "layer_types is '8, full', the model has 'full, 9'"
    with pytest.raises(lm.CheckpointError, match=said):
        _built(M.GptOssBackbone, _folder(tmp_path, {**config, "layer_types": kinds}))
    yarn = {**_YARN, "truncate": False, "original_max_position_embeddings": 4096}
    config |= {"layer_types": kinds[::-1], "sliding_window": 64, _ROPE: yarn}
    assert _built(M.GptOssBackbone, _folder(tmp_path, config)).rope_scaling_factor == 4.0


@pytest.mark.large
@pytest.mark.parametrize("name", CASES)
def test_outputs_of_transformers(name: str, folders: Path) -> None:
    """The model computes what transformers computes, or there is an error."""
    case, folder = CASES[name], folders / name
    if case.said:
        with pytest.raises(lm.CheckpointError, match=re.escape(case.said)):
            lk.from_preset(getattr(M, case.cls), str(folder), **case.load)
        return
    with jax.default_matmul_precision("highest"):
        model = lk.from_preset(getattr(M, case.cls), str(folder), **case.load)
        given = np.load(folder / "inputs.npy")
        inputs: Any = given
        if given.ndim == 2:
            zeros, ones = np.zeros_like(given), np.ones_like(given)
            inputs = {key: zeros if "segment" in key else ones if "mask" in key else given for key in model.input}
        found = model(inputs)
    found = np.asarray(found.get("sequence_output") if isinstance(found, dict) else found)
    expected = np.load(folder / "outputs.npy")
    assert np.abs(found.reshape(expected.shape) - expected).max() < case.apart * expected.std()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers for each case, with inputs and outputs."""
    pytest.importorskip("transformers", reason="needs transformers and torch, which make the original models")
    out = tmp_path_factory.mktemp("configurations")
    command = [sys.executable, "-m", configurations.__name__, str(out)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3], env=child_environment())
    return out
