#!/usr/bin/env bash
# Five backbones of KerasHub take an argument that changes nothing, and GPT-OSS puts its windows into the wrong layers.
#
# Versions: keras-hub 0.32.0, keras 3.15.1, jax 0.10.2 (CPU), numpy 2.4.6. The models have random weights, made here.
#
# One would guess: an argument of a backbone that its converter from Hugging Face sets changes what the backbone
# computes. Qwen's `sliding_window_size=2` lets a token see one token before it. Llama's
# `rope_position_scaling_factor=4` divides positions by 4. Gemma's `query_head_dim_normalize=False` divides queries by
# the root of hidden_dim / num_query_heads, as Gemma 2 27B (144) and Gemma 3 27B (168) were trained, in place of the
# root of head_dim (128).
#
# Seen: outputs are the same bit for bit. Qwen's attention returns what Keras' fused attention computes before it
# masks its window, which it does without fused attention only. Llama's rotary embedding computes its frequencies
# without the factor. Gemma's and Gemma 3's decoder blocks take the argument and give `True` to their attention.
# GPT-OSS gives its window to layers 1, 3, 5, …; configurations of gpt-oss-20b and gpt-oss-120b begin with
# "sliding_attention", so that layer 0 has it; and with a window of 2 a token sees 2 tokens before it, not 1.
#   QwenBackbone use_sliding_window_attention          changes outputs: False
#   Qwen3Backbone sliding_window_size                  changes outputs: False
#   LlamaBackbone rope_position_scaling_factor         changes outputs: False
#   GemmaBackbone query_head_dim_normalize             changes outputs: False
#   Gemma3Backbone query_head_dim_normalize            changes outputs: False
#   MistralBackbone sliding_window                     changes outputs: True
#   MistralBackbone rope_scaling_factor                changes outputs: True
#   GptOssBackbone, window 2, 1 layer: the last of 10 tokens sees 10
#   GptOssBackbone, window 2, layer 1: the last token sees 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export PYTHONWARNINGS=ignore KERAS_HOME="$folder/keras" KERAS_BACKEND=jax JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q keras-hub==0.32.0 keras==3.15.1 jax==0.10.2 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import keras
import keras_hub
import numpy as np

M = keras_hub.models
SIZES = dict(vocabulary_size=64, num_layers=1, hidden_dim=32, intermediate_dim=64)
SIZES |= dict(num_query_heads=4, num_key_value_heads=4)
TOKENS = np.arange(1, 11, dtype="int32")[None]


def outputs(cls, tokens=TOKENS, **config):
    keras.utils.set_random_seed(0)
    model = cls(**{**SIZES, **config})
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.standard_normal(weight.shape) * 0.3)
    return np.asarray(model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))


CASES = [
    (M.QwenBackbone, "use_sliding_window_attention", False, True, dict(sliding_window_size=2), False),
    (M.Qwen3Backbone, "sliding_window_size", None, 2, dict(head_dim=8), False),
    (M.LlamaBackbone, "rope_position_scaling_factor", 1.0, 4.0, {}, False),
    (M.GemmaBackbone, "query_head_dim_normalize", True, False, dict(head_dim=16), False),
    (M.Gemma3Backbone, "query_head_dim_normalize", True, False, dict(head_dim=16, image_size=None), False),
    (M.MistralBackbone, "sliding_window", None, 2, {}, True),
    (M.MistralBackbone, "rope_scaling_factor", 1.0, 4.0, {}, True),
]
for cls, name, one, two, config, expected in CASES:
    changed = not np.array_equal(outputs(cls, **config, **{name: one}), outputs(cls, **config, **{name: two}))
    print(f"{cls.__name__ + ' ' + name:50s} changes outputs: {changed}")
    assert changed == expected


def seen(**config):
    """How many tokens change the output of the last one, when they are changed one by one."""
    config = dict(num_experts=4, top_k=4, sliding_window=2, head_dim=8, **config)
    before = outputs(M.GptOssBackbone, **config)[0, -1]
    count = 0
    for index in range(10):
        tokens = TOKENS.copy()
        tokens[0, index] = 60
        count += not np.allclose(outputs(M.GptOssBackbone, tokens, **config)[0, -1], before, atol=1e-6)
    return count


first = seen()
print(f"GptOssBackbone, window 2, 1 layer: the last of 10 tokens sees {first}")
assert first == 10

# The attention of the second layer alone, which has no causal mask here: the last token looks back only.
keras.utils.set_random_seed(0)
model = M.GptOssBackbone(**{**SIZES, "num_layers": 2}, num_experts=4, top_k=4, sliding_window=2, head_dim=8)
layers = model.transformer_layers
assert [layer.sliding_window for layer in layers] == [None, 2]
attention, states = layers[1].self_attention_layer, np.random.default_rng(0).standard_normal((1, 10, 32))


def last(states):
    found = attention(states.astype("float32"))
    return np.asarray(found[0] if isinstance(found, tuple) else found)[0, -1]


before, second = last(states), 0
for index in range(10):
    other = states.copy()
    other[0, index] += 1
    second += not np.allclose(last(other), before, atol=1e-6)
print(f"GptOssBackbone, window 2, layer 1: the last token sees {second}")
assert second == 3
PY
echo "as written"
