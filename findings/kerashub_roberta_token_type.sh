#!/usr/bin/env bash
# KerasHub's converter drops RoBERTa's token type embedding, which every fine-tuning trains.
#
# Versions: keras-hub 0.32.0, keras 3.15.1, jax 0.10.2 (CPU), transformers 5.23.0, torch 2.13.0 (the build for CPU is
# enough), safetensors 0.8.0, numpy 2.4.6. The model is a RoBERTa with random weights, made and trained here for one
# step.
#
# One would guess: `RobertaBackbone.from_preset(folder)` computes what transformers computes. RoBERTa has one token
# type; its embedding is added to all tokens, so the position embedding could take it in, as KerasHub's converter of
# XLM-RoBERTa does.
#
# Seen: the row is zero in models as they were published, and outputs agree. One step of training moves it, since it is
# a parameter like any other; outputs of the model that was saved then differ in KerasHub, in silence. With the row added
# to the position embeddings of the folder they agree again.
#   the row as published, zeros             largest difference < 1e-5
#   the row after one step of SGD           largest difference > 1e-2
#   the row in the position embeddings      largest difference < 1e-5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 HF_HOME="$folder/home" CUDA_VISIBLE_DEVICES=
export KERAS_HOME="$folder/keras" KERAS_BACKEND=jax JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q keras-hub==0.32.0 keras==3.15.1 jax==0.10.2 transformers==5.23.0 \
    torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import RobertaConfig, RobertaForMaskedLM

torch.manual_seed(0)
config = RobertaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=18, type_vocab_size=1, layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, initializer_range=0.2,
)
model = RobertaForMaskedLM(config)
tokens = torch.arange(5, 15)[None]
row = model.roberta.embeddings.token_type_embeddings.weight
with torch.no_grad():
    row.zero_()


def save(name):
    model.save_pretrained(name)
    with torch.no_grad():
        np.save(f"{name}/outputs.npy", model.eval().roberta(tokens).last_hidden_state.numpy())


save("published")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()(tokens, labels=tokens.flip(1)).loss.backward()
optimizer.step()
assert row.abs().max() > 1e-3, row
save("trained")
save("folded")
path = pathlib.Path("folded/model.safetensors")
tensors = load_file(path)
tensors["roberta.embeddings.position_embeddings.weight"] += tensors["roberta.embeddings.token_type_embeddings.weight"]
save_file(tensors, path, {"format": "pt"})
PY
"$folder/env/bin/python" - <<'PY' 2> /dev/null
import jax
import keras_hub
import numpy as np

jax.config.update("jax_default_matmul_precision", "highest")
tokens = np.arange(5, 15, dtype="int32")[None]
found = {}
for name in ("published", "trained", "folded"):
    model = keras_hub.models.RobertaBackbone.from_preset(name)
    outputs = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    found[name] = np.abs(np.asarray(outputs) - np.load(f"{name}/outputs.npy")).max()
    print(f"{name:10s} largest difference {found[name]:.1e}", flush=True)
assert found["published"] < 1e-5 and found["folded"] < 1e-5 and found["trained"] > 1e-2, found
PY
echo "as written"
