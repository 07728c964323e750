#!/usr/bin/env bash
# On some processors, running a 4-bit model once makes `dequantize()` return other weights.
#
# Versions: bitsandbytes 0.50.2, transformers 5.23.0, torch 2.13.0 (the build for CPU is enough), accelerate 1.15.0,
# safetensors 0.8.0, numpy 2.4.6; a processor with AVX512-BF16 (without it this script ends with status 2). The model is
# a Llama with random weights, made here. Its weights are at most 0.08.
#
# One would guess: computing logits changes no weight, so `model.dequantize()` gives the same weights before and after
# it: those that were quantized, but for the rounding to 4 bits, which is at most 0.01 here.
#
# Seen: the first forward pass on CPU stores the weights anew in an order of bytes that suits the processor.
# `dequantize()` afterwards reads them in the old order, without an error: the weights have the right shape and are off
# by more than the largest weight. The dequantized model then computes something else:
#   the quantized model:                                              logits off by 0.044 (the largest is 0.48)
#   dequantized at once:                     weights off by 0.0094    logits off by 0.044
#   dequantized after one forward pass:      weights off by 0.125     logits off by 0.60
#   saved after one forward pass, reloaded,
#   dequantized:                             weights off by 0.0095    logits off by 0.039
# So `save_pretrained()` takes the new order back, and `dequantize()` does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 HF_HOME="$folder/home" CUDA_VISIBLE_DEVICES=
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q bitsandbytes==0.50.2 transformers==5.23.0 torch==2.13.0 \
    accelerate==1.15.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import sys

import torch
from bitsandbytes.functional import has_avx512bf16
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

if not has_avx512bf16():
    print("this processor has no AVX512-BF16: nothing to show")
    sys.exit(2)

torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
plain = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=0, eos_token_id=0)).eval()
plain.save_pretrained("plain")
tokens = torch.arange(8)[None]
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def load(path, **options):
    return LlamaForCausalLM.from_pretrained(path, device_map="cpu", **options)


def weights(model):
    return model.model.layers[0].self_attn.q_proj.weight.detach().float()


def logits(model):
    with torch.no_grad():
        return model(tokens).logits.float()


def off(model):
    """By how much the weights and the logits of a dequantized model differ from the plain model's, at most."""
    return tuple((of(model) - of(plain)).abs().max().item() for of in (weights, logits))


fresh, used = load("plain", quantization_config=config), load("plain", quantization_config=config)
computed = logits(used)
used.save_pretrained("saved")
saved = load("saved")
again = load("plain", quantization_config=config)
logits(again)
for model in (fresh, again, saved):
    model.dequantize(dtype=torch.float32)
start = (computed - logits(plain)).abs().max().item()
at_once, after, by_file = off(fresh), off(again), off(saved)
print("largest weight", weights(plain).abs().max().item(), "largest logit", logits(plain).abs().max().item())
print("the quantized model: logits off by", start)
print("dequantized at once: weights and logits off by", at_once)
print("dequantized after one forward pass:", after)
print("saved after one forward pass, reloaded, dequantized:", by_file)
assert weights(plain).abs().max() < 0.08 and start < 0.06
assert at_once[0] < 0.0101 and at_once[1] < 0.06 and by_file[0] < 0.0101 and by_file[1] < 0.06
assert after[0] > 0.1 and after[1] > 0.3
PY
echo "as written"
