"""Loading Hugging Face folders into models of Levanter or EasyDeL: by their own loaders, and lazily.

    python tests/benchmarks/others_loading.py [--runs 5] [--json]     # in an environment of integrations/JAX_MODELS.md

Folders of about 300 MiB in bfloat16, a dense model and one with experts, onto 8 devices. Each way runs in its own
process, in turns, with the page cache warm; values are compared.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import _measure

SIZES = {"vocab_size": 16_384, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "head_dim": 64}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 8}
EXPERTS = {"intermediate_size": 768, "num_hidden_layers": 6}
PACKAGE = next((name for name in ("levanter", "easydel") if importlib.util.find_spec(name)), "levanter")
OFFLINE = {"EASYDEL_AUTO": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def child(how: str, folder: str) -> dict[str, Any]:
    import jax

    os.environ.update(OFFLINE)
    load = importlib.import_module(f"tests.others.{PACKAGE}_loading").load
    _measure.backend()
    _measure.back_memory(5 << 28)
    with _measure.measured() as report:
        values = load(folder, Path(folder).name, lazily=how == "ours")
        jax.block_until_ready(values)
    arrays = [values[path] for path in sorted(values)]
    return report | {"nbytes": sum(array.nbytes for array in arrays), "digest": _measure.digest(arrays)}


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__, runs=5).parse_args()
    from tests.others import folders

    kinds = importlib.import_module(f"tests.others.{PACKAGE}_loading").KINDS
    with tempfile.TemporaryDirectory() as parent:
        for kind in kinds:
            (folder := Path(parent) / kind).mkdir()
            folders.write(folder, kind, **SIZES | ({} if kind == "llama" else EXPERTS))
            results = _measure.stock_and_ours(str(folder), options.runs)
            if not options.json:
                print(f"{PACKAGE}, {kind}:")
            _measure.show_loads(results, "bfloat16", as_json=options.json)


if __name__ == "__main__":
    os.environ.update(OFFLINE)
    main()
