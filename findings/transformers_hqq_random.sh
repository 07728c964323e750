#!/usr/bin/env bash
# transformers 5 loads an HQQ folder of transformers 4 with random weights in every quantized layer.
#
# Versions: transformers 4.57.6 to write the folder and 5.23.0 to load it, hqq 0.2.8.post1, torch 2.13.0 (the build for
# CPU is enough), accelerate 1.15.0, numpy 2.2.6. The model is a Llama with random weights, made here.
#
# One would guess: `from_pretrained` of a folder whose configuration says `quant_method: hqq` gives the saved model, as it
# did before, or an error that this form is not read any more. Quantizing with `HqqConfig` is such an error in 5.23.
#
# Seen: loading succeeds. The report that is logged lists the stored parts as unexpected and the layers' weights as
# missing; these are then initialized at random: twice loaded, they differ, and they are nothing like the saved ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 HF_HOME="$folder/home" CUDA_VISIBLE_DEVICES= USE_TF=0
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q transformers==4.57.6 hqq==0.2.8.post1 torch==2.13.0 accelerate==1.15.0 \
    numpy==2.2.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
from transformers import AutoModelForCausalLM, HqqConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained("plain")
config = HqqConfig(nbits=4, group_size=32, axis=1)
model = AutoModelForCausalLM.from_pretrained("plain", quantization_config=config)
model.save_pretrained("hqq")
again = AutoModelForCausalLM.from_pretrained("hqq")
weights = [each.model.layers[0].mlp.up_proj.dequantize() for each in (model, again)]
print("transformers 4 loads what it saved:", torch.equal(*weights))
assert torch.equal(*weights)
torch.save(weights[0], "saved.pt")
PY
"$folder/env/bin/python" -m pip install -q transformers==5.23.0
"$folder/env/bin/python" - <<'PY' 2>/dev/null
import torch
from transformers import AutoModelForCausalLM

saved = torch.load("saved.pt")
models = [AutoModelForCausalLM.from_pretrained("hqq") for _ in range(2)]
one, other = (each.model.layers[0].mlp.up_proj.weight.detach().float() for each in models)
alike = torch.corrcoef(torch.stack([one.flatten(), saved.float().flatten()]))[0, 1].item()
print("transformers 5: twice loaded, the weights are equal:", torch.equal(one, other))
print("correlation with the saved weights:", alike)
assert not torch.equal(one, other) and abs(alike) < 0.1
PY
echo "as written"
