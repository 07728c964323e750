#!/usr/bin/env bash
# PEFT's `modules_to_save=["shared"]` for T5 makes a trainable embedding that no part of the model reads.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0 (the build for CPU is enough), accelerate 1.15.0,
# safetensors 0.8.0, numpy 2.4.6. The model is a T5 with random weights, made here.
#
# One would guess: `shared` is T5's embedding, which `model.get_input_embeddings()` returns and which the encoder, the
# decoder and (if tied) the head use. With `modules_to_save=["shared"]` PEFT trains a copy of it and saves the copy; the
# running model and the reloaded one compute with that copy.
#
# Seen: the copy is counted among the trainable parameters and is saved as `shared.weight`, but it gets no gradient, is
# the same after training as before, and the logits do not change when it is set to zero. So the loss falls by the
# low-rank pairs alone. With `ensure_weight_tying=True` it is the same; PEFT then warns that there is nothing to tie.
# After `merge_and_unload()` of the model with the zeroed copy, `shared` is zero and the encoder's embedding is not.
# With `modules_to_save=["embed_tokens"]` there are two copies, the encoder's and the decoder's, and both get gradients:
#   ['shared'], tying False:       trainable 800  gradients None        change 0.0  logits change by 0.0
#   ['shared'], tying True:        trainable 800  gradients None        change 0.0  logits change by 0.0
#   ['embed_tokens']:              trainable 1600 gradients both
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 HF_HOME="$folder/home" CUDA_VISIBLE_DEVICES=
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q peft==0.21.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 \
    safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
shape = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, pad_token_id=0)).save_pretrained("base")
batch = dict(input_ids=torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[5, 6, 7]]))


def load():
    return T5ForConditionalGeneration.from_pretrained("base")


def logits(model):
    with torch.no_grad():
        return model.eval()(**batch).logits


def train(names, tying):
    """The trained model, the copies of embeddings that it holds, and the warnings of PEFT."""
    config = LoraConfig(r=2, target_modules=["q", "v"], modules_to_save=names, ensure_weight_tying=tying)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(load(), config)
    said = [str(one.message) for one in caught if "ensure_weight_tying" in str(one.message)]
    copies = [one.modules_to_save["default"] for one in model.modules() if isinstance(one, ModulesToSaveWrapper)]
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return model, copies, said


before = load()
assert before.get_input_embeddings() is before.shared and before.config.tie_word_embeddings
for tying in (False, True):
    model, (copy,), said = train(["shared"], tying)
    change = (copy.weight - before.shared.weight).abs().max().item()
    trainable = sum(one.numel() for one in copy.parameters() if one.requires_grad)
    model.save_pretrained("adapter")
    saved = load_file("adapter/adapter_model.safetensors")["base_model.model.shared.weight"]
    assert torch.equal(saved, before.shared.weight)
    computed = logits(model)
    reloaded = PeftModel.from_pretrained(load(), "adapter")
    assert torch.equal(logits(reloaded), computed)
    with torch.no_grad():
        copy.weight.zero_()
    effect = (logits(model) - computed).abs().max().item()
    print(f"['shared'], tying {tying}: trainable {trainable} gradients {copy.weight.grad} change {change}", end=" ")
    print(f"logits change by {effect}; warnings about tying: {said}")
    assert (trainable, copy.weight.grad, change, effect) == (800, None, 0.0, 0.0)
    assert len(said) == tying
    merged = model.merge_and_unload()
    print("    after merging, shared is", merged.shared.weight.abs().max().item(), "and the encoder's is", end=" ")
    print(merged.encoder.embed_tokens.weight.abs().max().item())
    assert not merged.shared.weight.any() and merged.encoder.embed_tokens.weight.any()

_, copies, _ = train(["embed_tokens"], False)
trainable = sum(copy.weight.numel() for copy in copies)
print("['embed_tokens']: trainable", trainable, "gradients", [bool(copy.weight.grad.any()) for copy in copies])
assert trainable == 1600 and all(copy.weight.grad.any() for copy in copies)
PY
echo "as written"
