"""The logits of models of `transformers` with adapters, as PEFT computes them: `peft_logits.py FOLDER ADAPTER …`.

Writes `ADAPTER/logits.npy`. PyTorch and TensorFlow, which KerasHub imports, do not live in one process.
"""

import sys
from pathlib import Path

import numpy as np

TOKENS = np.arange(1, 13).reshape(2, 6)


def main(*arguments: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for folder, adapter in zip(arguments[::2], arguments[1::2], strict=True):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model = PeftModel.from_pretrained(base, adapter)
        with torch.no_grad():
            np.save(Path(adapter) / "logits.npy", model(torch.from_numpy(TOKENS)).logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
