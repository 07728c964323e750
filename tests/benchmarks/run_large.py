"""Running Gemma 2 9B on a machine that does not hold it: from a disk, beside transformers, and at initialization.

    python tests/benchmarks/run_large.py FOLDER [WAY ...] [--runs 1] [--layers 42] [--tokens 128] [--memory 4GiB]

FOLDER gets a checkpoint of Gemma 2 9B's shapes as transformers names them, 17.2 GiB of random bfloat16, if it is not
there. Every way is a process of its own, by turns; peaks are of private memory over what it held before:

- `ours`: opening the folder, and `abstract.run` to the last hidden state of 128 tokens, with `--memory` as the limit.
- `reading`: only what the run reads, in its order, with nothing to compute.
- `saved`, `saved-reading`: the same from FOLDER-saved, which `lazymodel.save` wrote: there is nothing to transpose.
- `transformers`: `device_map={"": "disk"}` with an `offload_folder`; needs torch, transformers and accelerate.
- `initial`: `run` without a checkpoint.
- `statistics`: `lazymodel.statistics` of the initial values.
- `norms`: the norm of the gradient of every variable, from the folder.

The machine should be idle. What was read before stays in the page cache as far as there is memory.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import _measure

WAYS = ("ours", "reading", "saved", "saved-reading", "transformers", "initial", "statistics", "norms")
CONFIG = {
    "vocab_size": 256000, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 3584,
    "intermediate_size": 14336, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def write(folder: Path, layers: int) -> None:
    """Writes the checkpoint. All tensors are parts of one random block: values make no difference to the time."""
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**CONFIG, num_hidden_layers=layers, dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in Gemma2ForCausalLM(config).named_parameters()}
    block = torch.randn(max(shape.numel() for shape in shapes.values()), dtype=torch.float32).mul_(0.02).bfloat16()
    folder.mkdir(parents=True)
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(folder)
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    where: dict[str, str] = {}
    for group, names in groups.items():
        file = f"model-{group}.safetensors"
        where |= dict.fromkeys(names, file)
        tensors = {name: block[: shapes[name].numel()].clone().reshape(shapes[name]) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
    nbytes = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forward(model: Any, tokens: Any) -> Any:
    """The hidden state of the last token."""
    import jax.numpy as jnp

    return model({"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)})[:, -1]


def norms(model: Any, tokens: Any) -> list[Any]:
    """The norm of the gradient of every variable; the loss is the mean square of the last hidden state."""
    import jax
    import jax.numpy as jnp

    def loss(values: list[Any]) -> Any:
        inputs = {"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)}
        return jnp.mean(jnp.square(model.stateless_call(values, [], inputs)[0][:, -1].astype("float32")))

    gradients = jax.grad(loss)([variable.value for variable in model.trainable_variables])
    return [jnp.sqrt(jnp.sum(jnp.square(each.astype("float32")))) for each in gradients]


def only_read() -> list[float]:
    """Variables are read and dropped, and nothing runs; the list gets the seconds."""
    from lazymodel.extras.run import run

    seconds: list[float] = []

    def read(calls: Sequence[Any], flat: Any, variables: Any, budget: int, *_: Any) -> list[Any]:
        start, items = time.perf_counter(), [variables.item(value, call.turn) for call in calls for value in call.fetch]
        for _ in run.read_items(items, budget):
            pass
        seconds.append(time.perf_counter() - start)
        return [jax.numpy.zeros(())]

    import jax

    run._run = read  # pyright: ignore
    return seconds


def work(way: str, folder: str, layers: str, tokens: str, memory: str) -> dict[str, Any]:
    """What a process does."""
    if way == "write":
        write(Path(folder), int(layers))
        return {}
    if way == "transformers":
        return by_transformers(folder, int(tokens))
    import jax
    import keras_hub

    import lazymodel as lm
    import lazymodel_keras as lk

    ids = jax.block_until_ready(jax.random.randint(jax.random.key(1), (1, int(tokens)), 0, CONFIG["vocab_size"]))
    reports: list[lm.RunReport] = []
    options: dict[str, Any] = {"max_device_memory": memory, "report": reports.append}
    seconds = only_read() if way.endswith("reading") else []
    loads = way in ("write-saved", "ours", "reading", "norms")
    with _measure.measured() as found:
        abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, folder, loads, dtype="bfloat16")
        if way.startswith("saved"):
            options["checkpoint"] = lm.open_checkpoint(f"{folder}-saved")
        if way == "write-saved":
            lm.save(abstract, f"{folder}-saved")
        elif way == "statistics":
            lm.statistics(abstract, spectral=False)
        elif way == "norms":
            values = abstract.run(norms, ids, report=reports.append)
            found["norms"] = [float(each) for each in values]
        else:
            found["state"] = jax.device_get(abstract.run(forward, ids, **options)).astype("float32").tolist()
    for report in reports:
        found |= {"programs": len(report.rows), "calls": report.calls, "predicted": report.peak_nbytes}
        found |= {"read": report.read_nbytes, "plan_seconds": report.plan_seconds, "run_seconds": report.seconds}
    return found | ({"run_seconds": seconds[0]} if seconds else {})


def by_transformers(folder: str, tokens: int) -> dict[str, Any]:
    """Disk offload: accelerate's hooks read each module's weights before its call, and drop them after it."""
    import tempfile

    import torch
    from transformers import AutoModel

    ids = torch.randint(0, CONFIG["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    offloaded = tempfile.TemporaryDirectory(dir=os.path.dirname(folder))
    with offloaded as offload, torch.inference_mode(), _measure.measured() as found:
        placed = {"device_map": {"": "disk"}, "offload_folder": offload}
        model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, **placed)
        start = time.perf_counter()
        state = model(input_ids=ids).last_hidden_state[:, -1]
        found["run_seconds"] = time.perf_counter() - start
        found["state"] = state.float().tolist()
    return found


def main() -> None:
    parser = _measure.arguments(__doc__, runs=1)
    parser.add_argument("folder")
    parser.add_argument("ways", nargs="*", default=WAYS)
    parser.add_argument("--layers", type=int, default=42)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--memory", default="4GiB", help="limit of the forward passes on the device")
    options = parser.parse_args()
    folder, given = os.path.abspath(options.folder), (options.layers, options.tokens, options.memory)
    if not os.path.exists(folder):
        _child("write", folder, *given)
        _child("write-saved", folder, *given)
    runs = _measure.in_turns(options.ways, options.runs, lambda way: _child(way, folder, *given))
    found = {
        way: {
            "seconds": statistics.median(each.seconds for each in measured),
            "peak_nbytes": max(each.peak_nbytes for each in measured),
            **measured[-1].result,
        }
        for way, measured in runs.items()
    }
    print(json.dumps(found, indent=2) if options.json else "\n".join(starmap(_line, found.items())))


def _child(*given: object) -> _measure.Measurement:
    return _measure.child(*given, devices=None, env={"KERAS_BACKEND": "jax"})


def _line(way: str, found: dict[str, Any]) -> str:
    line = f"{way:18} {found['seconds']:7.1f} s, peak {found['peak_nbytes'] / 2**30:5.2f} GiB"
    if "run_seconds" in found:
        line += f"; alone {found['run_seconds']:.1f} s"
    if "programs" in found:
        line += f" ({found['plan_seconds']:.1f} until reading), {found['calls']} calls of {found['programs']} programs"
        line += f", {found['read'] / 2**30:.1f} GiB read, {found['predicted'] / 2**30:.2f} GiB predicted"
    return line


if __name__ == "__main__":
    _measure.in_child(work)
    main()
