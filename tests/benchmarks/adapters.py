"""Checkpoints of PyTorch's format, and with a LoRA adapter merged, onto 8 devices: 1 GiB of Llama's linear layers.

    python tests/benchmarks/adapters.py [--runs 3] [--layers 10] [--only safetensors bin merged peft] [--json]

The same bfloat16 tensors are loaded from safetensors, from `pytorch_model.bin`, and from safetensors with an adapter of
rank 16 on every matrix merged into them, split along the first axis. Where PEFT is installed, its `merge_and_unload`
of PyTorch's model is measured as well, from the file to merged weights. Each way runs in its own process, in turns,
with the page cache warm. Memory is the peak of private memory over what the process held before.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import _measure
import numpy as np

WIDTH, INTERMEDIATE, RANK = 2048, 5632, 16
SHAPES = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
SHAPES |= {"mlp.gate_proj": (INTERMEDIATE, WIDTH), "mlp.up_proj": (INTERMEDIATE, WIDTH)}
SHAPES |= {"mlp.down_proj": (WIDTH, INTERMEDIATE)}


def write(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    base: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    for layer in range(layers):
        for name, (rows, columns) in SHAPES.items():
            module = f"model.layers.{layer}.{name}"
            base[f"{module}.weight"] = (torch.randn(rows, columns) / 50).to(torch.bfloat16)
            pairs[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, columns) / 50
            pairs[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, RANK) / 50
    save_file(base, folder / "model.safetensors")
    torch.save(base, folder / "pytorch_model.bin")
    (folder / "adapter").mkdir()
    save_file(pairs, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": [n.partition(".")[2] for n in SHAPES]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def by_peft(folder: Path) -> dict[str, Any]:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    def module(children: dict[str, Any]) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, child in children.items():
            made.add_module(name, child)
        return made

    stored = load_file(folder / "model.safetensors")
    layers: dict[str, Any] = {}
    for number in range(len(stored) // len(SHAPES)):
        parts: dict[str, dict[str, Any]] = {}
        for name, (rows, columns) in SHAPES.items():
            part, _, leaf = name.partition(".")
            parts.setdefault(part, {})[leaf] = torch.nn.Linear(columns, rows, bias=False, device="meta")
        layers[str(number)] = module({part: module(leaves) for part, leaves in parts.items()})
    model = module({"model": module({"layers": module(layers)})})
    model.load_state_dict({name: value.clone() for name, value in stored.items()}, assign=True)
    merged = PeftModel.from_pretrained(model, str(folder / "adapter")).merge_and_unload()
    return {"nbytes": sum(value.nbytes for value in merged.state_dict().values())}


def child(how: str, given: str) -> dict[str, Any]:
    folder = Path(given)
    nbytes = (folder / "model.safetensors").stat().st_size
    if how == "peft":
        import peft  # noqa: F401

        _measure.back_memory(nbytes * 9 // 4)
        with _measure.measured() as report:
            found = by_peft(folder)
        return report | found
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import lazymodel as lm

    mesh = Mesh(np.array(jax.devices()), ("model",))
    with lm.open_checkpoint(folder / "model.safetensors") as checkpoint:
        structs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in checkpoint.items()}
    abstract = _measure.zeros(structs).shard(mesh, {".*": P("model")})
    _measure.back_memory(nbytes * 5 // 4)
    with _measure.measured() as report:
        checkpoint = lm.open_checkpoint(folder / ("pytorch_model.bin" if how == "bin" else "model.safetensors"))
        if how == "merged":
            checkpoint = lm.merge(checkpoint, lm.open_adapter(folder / "adapter"))
        arrays = abstract.materialize(checkpoint, progress=False)
        jax.block_until_ready(arrays)
    shards = [shard.data for path in sorted(structs) for shard in arrays[path].addressable_shards]
    return report | {"digest": _measure.digest(shards), "nbytes": sum(shard.nbytes for shard in shards)}


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--layers", type=int, default=10)
    ways = ["safetensors", "bin", "merged", *(["peft"] if importlib.util.find_spec("peft") else [])]
    parser.add_argument("--only", nargs="+", choices=ways, default=ways)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.layers)
        results = _measure.in_turns(options.only, options.runs, lambda how: _measure.child(how, folder))
    _measure.require_equal(results, ("safetensors", "bin"))
    figures = {how: _measure.medians(runs) for how, runs in results.items()}
    if options.json:
        print(json.dumps(figures))
        return
    for how, found in figures.items():
        ratio = found["seconds"] / next(iter(figures.values()))["seconds"]
        print(
            f"{how:12} {found['seconds']:5.2f} s, {ratio:5.2f} × the first; {found['cpu']:5.2f} s of CPU; "
            f"peak {found['peak']:.2f} ×, {found['peak_over_nbytes'] / 2**20:+.0f} MiB over the weights"
        )


if __name__ == "__main__":
    main()
