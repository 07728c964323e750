#!/usr/bin/env bash
# KerasHub's ESM attends to padding, and its converter ignores `token_dropout` and begins absolute positions a row early.
#
# Versions: keras-hub 0.32.0, keras 3.15.1, jax 0.10.2 (CPU), transformers 5.23.0, torch 2.13.0 (the build for CPU is
# enough), safetensors 0.8.0, numpy 2.4.6. The models have random weights, made here; the names of their layer norms,
# which transformers 5 writes otherwise than KerasHub's converter expects, are changed back.
#
# One would guess: `ESMBackbone.from_preset(folder)` computes what transformers computes from the same folder, and
# tokens of padding, which the backbone finds by `pad_token_id`, change nothing for the others.
#
# Seen: with rotary positions and without `token_dropout`, outputs agree. The mask of padding is applied to queries, not
# to keys, so that a sequence has other outputs in a batch with a longer one. `token_dropout`, which configurations of
# ESM-2 set, scales the embeddings in transformers by 0.88 also where no token is masked, and not in KerasHub. Positions
# begin at row `pad_token_id` of the table, in transformers at the next.
#   rotary                                  largest difference < 1e-4
#   rotary, with padding                    largest difference > 0.01
#   rotary, token_dropout                   largest difference > 0.01
#   absolute                                largest difference > 0.01
#   absolute, the table moved by a row      largest difference < 1e-4
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
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmConfig, EsmModel

SHAPE = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, pad_token_id=1,
    mask_token_id=5, max_position_embeddings=32, initializer_range=0.3,
)
PADDED = torch.tensor([[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 1, 1]])
for name, changes in {
    "rotary": {"position_embedding_type": "rotary"},
    "token_dropout": {"position_embedding_type": "rotary", "token_dropout": True},
    "absolute": {"position_embedding_type": "absolute"},
}.items():
    torch.manual_seed(0)
    model = EsmModel(EsmConfig(**SHAPE, **changes)).eval()
    model.save_pretrained(name)
    with torch.no_grad():
        outputs = model(PADDED, attention_mask=(PADDED != 1).long()).last_hidden_state
    np.save(f"{name}/outputs.npy", outputs.numpy())
    path = pathlib.Path(name, "model.safetensors")
    tensors = {key.replace(".gamma", ".weight").replace(".beta", ".bias"): v for key, v in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    assert json.loads(pathlib.Path(name, "config.json").read_text()).get("token_dropout") == (name == "token_dropout")
PY
"$folder/env/bin/python" - <<'PY' 2> /dev/null
import jax
import keras_hub
import numpy as np

jax.config.update("jax_default_matmul_precision", "highest")
tokens = np.array([[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 1, 1]], "int32")
found = {}


def compare(what, model, name, row, count=6):
    expected = np.load(f"{name}/outputs.npy")[row, :count]
    found[what] = np.abs(np.asarray(model({"token_ids": tokens}))[row, :count] - expected).max()
    print(f"{what:38s}  largest difference {found[what]:.1e}", flush=True)


models = {name: keras_hub.models.ESMBackbone.from_preset(name) for name in ("rotary", "token_dropout", "absolute")}
compare("rotary", models["rotary"], "rotary", 0)
compare("rotary, with padding", models["rotary"], "rotary", 1, 4)
compare("rotary, token_dropout", models["token_dropout"], "token_dropout", 0)
compare("absolute", models["absolute"], "absolute", 0)
table = models["absolute"].position_embedding.position_embeddings
table.assign(np.roll(np.asarray(table), -1, axis=0))
compare("absolute, the table moved by a row", models["absolute"], "absolute", 0)
for what, difference in found.items():
    right = what in ("rotary", "absolute, the table moved by a row")
    assert difference < 1e-4 if right else difference > 0.01, found
PY
echo "as written"
