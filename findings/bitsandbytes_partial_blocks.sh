#!/usr/bin/env bash
# On CPU, a matrix whose rows are not whole blocks is dequantized wrongly.
#
# Versions: bitsandbytes 0.50.2, torch 2.13.0 (the build for CPU is enough), numpy 2.4.6.
#
# One would guess: `dequantize_4bit(*quantize_4bit(w))` is `w` but for the rounding to 4 bits, whatever the shape; blocks
# of 64 numbers are counted across rows, so a row need not be whole blocks. And the same numbers in another shape are
# dequantized to the same values.
#
# Seen: rows of 96 numbers come back off by more than 1.5 (numbers are standard normal, rounding takes at most 0.6), with
# no error; the same numbers as rows of 64, or flat, come back as expected. The stored codes and scales are the same in
# both cases: only dequantizing differs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export PYTHONWARNINGS=ignore CUDA_VISIBLE_DEVICES=
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

torch.manual_seed(0)
numbers = torch.randn(64 * 96).bfloat16()
flat, flat_state = quantize_4bit(numbers, quant_type="nf4")
off = {}
for shape in ((6144,), (96, 64), (32, 192), (64, 96)):
    codes, state = quantize_4bit(numbers.reshape(shape), quant_type="nf4")
    assert torch.equal(codes.reshape(-1), flat.reshape(-1)) and torch.equal(state.absmax, flat_state.absmax)
    found = dequantize_4bit(codes, state)
    off[shape] = (found.reshape(-1).float() - numbers.float()).abs().max().item()
    print(f"numbers as {shape}: off by {off[shape]:.3f}")
assert off.pop((64, 96)) > 1.5 and max(off.values()) < 0.6
PY
echo "as written"
