"""Checkpoint files onto 8 devices: what the machine can do, the stream, Orbax, and stock KerasHub.

    python tests/benchmarks/stream.py [--runs 5] [--only NAME ...] [--json]

Two checkpoints are written once, each of more than 1 GiB: a bf16 safetensors folder in 3 shards, shaped like a decoder,
and a Keras preset in f32 (a Gemma2 saved with `save_to_preset`). The ways of reading take turns, each in its own
process, with the page cache warm. Seconds are from the call, of building the model as well, until every array is ready.
Memory is the peak of private memory over what the process held before the call, as a multiple of the checkpoint's
bytes.

`limit` is no loader: 2 threads read the same bytes with `preadv` into fresh 64-byte-aligned buffers (on huge pages,
which is what is fastest here) and do nothing else.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _measure
import load_preset

DECODER = (32000, 2048, 5632, 10)  # vocabulary, hidden and intermediate size, layers
PRESET = {"num_layers": 8, "hidden_dim": 2048, "intermediate_dim": 16384}  # of the Gemma2 of load_preset.py

BACKED = 5 << 29  # bytes that each process touches before it is measured, so that all find memory equally ready

WAYS = {
    "limit": "preadv, 2 threads, the safetensors files",
    "first": "lazymodel, sharded on the first axis",
    "last": "lazymodel, sharded on the last axis",
    "orbax": "Orbax v1's safetensors layout, first axis",
    "orbax-last": "Orbax v1's safetensors layout, last axis",
    "limit-preset": "preadv, 2 threads, the preset's file",
    "preset": "lazymodel_keras.from_preset",
    "stock": "keras_hub from_preset",
}
ON_PRESET = ("limit-preset", "preset", "stock")


def save_safetensors(folder: Path, vocabulary: int, hidden: int, intermediate: int, layers: int) -> None:
    """Writes a decoder in three files and an index."""
    shards: list[dict[str, Any]] = [{}, {}, {}]
    for number, part in enumerate(_measure.torch_decoder(vocabulary, hidden, intermediate, layers)):
        shards[3 * number // (layers + 1)] |= part
    _measure.write_shards(folder, shards)


def limit(files: list[Path]) -> dict[str, Any]:
    """Reads the files' bytes with two threads, 32 MiB a buffer."""
    size = 32 << 20
    chunks = [(file, start) for file in files for start in range(0, file.stat().st_size, size)]
    descriptors = {file: os.open(file, os.O_RDONLY) for file in files}

    def read(chunk: tuple[Path, int]) -> memoryview:
        file, start = chunk
        memory = mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        view, done = memoryview(memory)[: min(size, file.stat().st_size - start)], 0
        while done < len(view):
            done += os.preadv(descriptors[file], [view[done:]], start + done)
        return view

    _measure.back_memory(BACKED)
    with _measure.measured() as report, ThreadPoolExecutor(2) as pool:
        buffers = list(pool.map(read, chunks))
    return report | {"nbytes": sum(map(len, buffers))}


def load_safetensors(way: str, folder: Path | str) -> dict[str, Any]:
    """In the child: the decoder, from a folder or URL, onto 8 devices, by ours or by Orbax."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import lazymodel as lm

    mesh = Mesh(np.array(jax.devices()), ("model",))
    _measure.backend()
    checkpoint = lm.open_checkpoint(folder)
    axis = -1 if way.endswith("last") else 0

    def placed(tensor: lm.LazyTensor) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*(None,) * (axis % tensor.ndim), "model"))
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)

    structs = {name: placed(tensor) for name, tensor in checkpoint.items()}
    checkpoint.close()

    def ours() -> dict[str, Any]:
        nonlocal checkpoint
        abstract = _measure.zeros(structs).shard(mesh, lambda variable: structs[variable.path].sharding.spec)
        checkpoint = lm.open_checkpoint(folder)
        return abstract.materialize(checkpoint, progress=False)

    load = _measure.by_orbax(folder, structs) if way.startswith("orbax") else ours
    _measure.back_memory(BACKED)
    with _measure.measured() as report:
        arrays = jax.block_until_ready(load())
    if load is ours:
        report["read"] = checkpoint.bytes_read
    report["nbytes"] = sum(array.nbytes for array in arrays.values())
    return report | {"digest": _measure.digest(arrays[name] for name in sorted(arrays))}


def child(way: str, where: str) -> dict[str, Any] | None:
    """One piece of work in a process of its own."""
    folder = Path(where)
    match way:
        case "save":
            return save_safetensors(folder / "decoder", *DECODER)
        case "save-preset":
            return _measure.save_gemma(folder / "preset", load_preset.CONFIG | PRESET)
        case "limit":
            return limit(sorted((folder / "decoder").glob("*.safetensors")))
        case "limit-preset":
            return limit([folder / "preset" / "model.weights.h5"])
        case "preset" | "stock":
            return load_preset.load(way, folder / "preset")
    return load_safetensors(way, folder / "decoder")


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=5)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", metavar="FOLDER", help="keep the checkpoints here, and use those that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        for way, made in (("save", "decoder"), ("save-preset", "preset")):
            if not (folder / made).exists() and (made == "decoder" or {*ON_PRESET} & {*options.only}):
                folder.mkdir(exist_ok=True)
                _measure.child(way, folder, devices=1)
        for file in folder.rglob("*.*"):
            with file.open("rb") as stream:  # warm the page cache
                while stream.read(32 << 20):
                    pass
        results = _measure.in_turns(options.only, options.runs, lambda way: _measure.child(way, folder))
    report(results, as_json=options.json)


def report(results: dict[str, list[_measure.Measurement]], *, as_json: bool) -> None:
    """Prints medians, and ratios as medians over the rounds."""
    _measure.require_equal(results, ("first", "last", "orbax", "orbax-last"), ("preset", "stock"))

    def summary(way: str) -> dict[str, float]:
        found, of = _measure.medians(results[way]), results[way][0].result
        return found | ({"read": of["read"] / of["nbytes"]} if "read" in of else {})

    pairs = {
        "first axis, speed over the limit": ("limit", "first"),
        "last axis, speed over the limit": ("limit", "last"),
        "first axis, times as fast as Orbax": ("orbax", "first"),
        "last axis, times as fast as Orbax": ("orbax-last", "last"),
        "from_preset, times as fast as stock": ("stock", "preset"),
        "from_preset, speed over the limit": ("limit-preset", "preset"),
    }
    found = {
        name: _measure.speedup(*(results[way] for way in pair))
        for name, pair in pairs.items()
        if results.keys() >= {*pair}
    }
    if as_json:
        print(json.dumps({"ways": {way: summary(way) for way in results}, "ratios": found}))
        return
    print(f"{len(next(iter(results.values())))} runs each, alternating; medians")
    for way in results:
        line = summary(way)
        read = f"   read {line['read']:.3f} × the bytes" if "read" in line else ""
        print(
            f"  {WAYS[way]:52} {line['seconds']:7.3f} s {line['gigabytes_per_second']:6.2f} GB/s"
            f"   peak {line['peak']:.3f} × ({line['peak_over_nbytes'] / 2**20:+.0f} MiB){read}"
        )
    for name, value in found.items():
        print(f"  {name:52} {value:7.2f}")


if __name__ == "__main__":
    main()
