#!/usr/bin/env bash
# transformers' Gemma 3 ignores `attn_logit_softcapping` of its configuration.
#
# Versions: transformers 5.23.0, torch 2.13.0 (the build for CPU is enough), numpy 2.4.6. The models have random
# weights, made here.
#
# One would guess: `attn_logit_softcapping`, an argument of `Gemma3TextConfig` that is "the scaling factor when applying
# tanh soft-capping on the attention scores", changes the logits of Gemma 3 as it does those of Gemma 2.
#
# Seen: with a cap of 0.1 the logits of Gemma 3 are those without a cap, bit for bit, with the attention "sdpa" and
# "eager"; `config.json` keeps the value. Those of Gemma 2 change. `final_logit_softcapping` works in both.
#   Gemma2  eager  attention cap changes logits: True    final cap changes logits: True
#   Gemma3  eager  attention cap changes logits: False   final cap changes logits: True
#   Gemma3  sdpa   attention cap changes logits: False   final cap changes logits: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 HF_HOME="$folder/home" CUDA_VISIBLE_DEVICES=
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, query_pre_attn_scalar=8, initializer_range=0.5,
)
TOKENS = torch.arange(1, 11)[None]


def logits(model, config, attention, **caps):
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, **caps}
    torch.manual_seed(0)
    made = model(config(**SHAPE, **caps, attn_implementation=attention)).eval()
    assert all(getattr(made.config, name) == value for name, value in caps.items())
    with torch.no_grad():
        return made(TOKENS).logits


for model, config, attention, expected in (
    (Gemma2ForCausalLM, Gemma2Config, "eager", True),
    (Gemma3ForCausalLM, Gemma3TextConfig, "eager", False),
    (Gemma3ForCausalLM, Gemma3TextConfig, "sdpa", False),
):
    plain = logits(model, config, attention)
    capped = not torch.equal(logits(model, config, attention, attn_logit_softcapping=0.1), plain)
    final = not torch.equal(logits(model, config, attention, final_logit_softcapping=0.1), plain)
    name = model.__name__[:6]
    print(f"{name}  {attention:5s}  attention cap changes logits: {capped!s:6}  final cap changes logits: {final}")
    assert (capped, final) == (expected, True)
PY
echo "as written"
