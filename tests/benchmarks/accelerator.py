"""A checkpoint onto accelerators: lazymodel, a plain `jax.device_put`, safetensors' own loader, Orbax.

    python tests/benchmarks/accelerator.py [--gib 8] [--runs 3] [--only WAY ...] [--json]

A bf16 safetensors folder, shaped like a decoder, is written once and read from the page cache onto all devices that JAX
finds, sharded on the last axis that divides. The ways take turns, each in a process of its own; medians are printed.
Seconds are from the call until every array is ready. Device memory is the peak of the most loaded device, of
`memory_stats()`, over its part of the model; host memory the peak of private memory over the whole model. CPU devices
(`JAX_PLATFORMS=cpu`) tell nothing of the first, and show only that this works.

The first three ways are no loaders but what one cannot be faster than: arrays that are in the host's memory already go
to their devices. `pinned` copies from JAX's own pinned memory, `mapped` from NumPy arrays that the runtime was told to
pin (the client's `dma_map`): if these are far above `pageable` and `ours` is at `pageable`, pinning would pay.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure

WAYS = {
    "pageable": "jax.device_put of NumPy arrays",
    "pinned": "jax.device_put of arrays in pinned_host",
    "mapped": "jax.device_put of NumPy arrays, dma_map",
    "ours": "lazymodel",
    "ours-256MiB": "lazymodel, max_host_memory=256MiB",
    "safetensors": "safetensors.numpy.load_file, jax.device_put",
    "orbax": "Orbax v1's safetensors layout",
}
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 11008, 32000


def save(folder: Path, nbytes: int) -> None:
    """Writes a decoder of about so many bytes, a file a layer."""
    narrow = 1 if nbytes >= 1 << 30 else 8  # the same shapes, smaller
    vocabulary, hidden, intermediate = VOCABULARY // narrow, HIDDEN // narrow, INTERMEDIATE // narrow
    layers = max(nbytes // (2 * hidden * (4 * hidden + 3 * intermediate + 1)), 1)
    _measure.write_shards(folder, list(_measure.torch_decoder(vocabulary, hidden, intermediate, layers)))


def load(way: str, folder: Path) -> dict[str, Any]:
    """One way, in a process of its own."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import lazymodel as lm

    devices = jax.local_devices()
    mesh = Mesh(np.array(devices), ("model",))
    _measure.backend()

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        axis = max((axis for axis, extent in enumerate(shape) if extent % mesh.size == 0), default=None)
        return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "model") if axis is not None else PartitionSpec())

    with lm.open_checkpoint(folder) as checkpoint:
        structs = {
            name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding(tensor.shape))
            for name, tensor in checkpoint.items()
        }
        nbytes = sum(tensor.nbytes for tensor in checkpoint.values())
    loader = _loader(way, folder, structs)
    if devices[0].platform == "cpu":
        _measure.back_memory(2 * nbytes)
    held = [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in devices]
    with _measure.measured() as report:
        arrays = loader()
        jax.block_until_ready(arrays)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    report |= {"nbytes": nbytes, "devices": f"{len(devices)} × {devices[0].device_kind}"}
    report["device_peak"] = max(peak - start for peak, start in zip(peaks, held, strict=True)) * len(devices) / nbytes
    return report | {"digest": _measure.digest(arrays[name] for name in sorted(arrays))}


def _loader(way: str, folder: Path, structs: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """What is measured; what it needs is there when this returns."""
    import jax
    import numpy as np
    from safetensors.numpy import load_file

    import lazymodel as lm

    def from_files() -> dict[str, np.ndarray]:
        return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}

    if way.startswith("ours"):
        budget = way.partition("-")[2] or None

        def ours() -> dict[str, Any]:
            abstract = _measure.zeros(structs).shard(mesh, lambda variable: structs[variable.path].sharding)
            return abstract.materialize(lm.open_checkpoint(folder), max_host_memory=budget, progress=False)

        mesh = next(iter(structs.values())).sharding.mesh
        return ours
    if way == "orbax":
        return _measure.by_orbax(folder, structs)
    shardings = {name: struct.sharding for name, struct in structs.items()}
    if way == "safetensors":
        return lambda: {name: jax.device_put(array, shardings[name]) for name, array in from_files().items()}
    arrays: dict[str, Any] = from_files()
    if way == "pinned":
        places = {name: place.with_memory_kind("pinned_host") for name, place in shardings.items()}
        arrays = jax.block_until_ready({name: jax.device_put(arrays[name], places[name]) for name in arrays})
    if way == "mapped":
        client = jax.local_devices()[0].client
        for array in arrays.values():
            client.dma_map(array.ctypes.data, array.nbytes)
    return lambda: {name: jax.device_put(array, shardings[name]) for name, array in arrays.items()}


def child(way: str, folder: str, nbytes: str = "") -> dict[str, Any] | None:
    return save(Path(folder), int(nbytes)) if way == "save" else load(way, Path(folder))


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--gib", type=float, default=8.0, help="bytes of the checkpoint")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    results: dict[str, list[_measure.Measurement]] = {way: [] for way in args.only}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint")
        _measure.child("save", path, int(args.gib * 2**30), devices=None)
        for _ in range(args.runs):
            for way in list(results):
                try:
                    results[way].append(_measure.child(way, path, devices=None))
                except SystemExit as error:  # an accelerator without pinned memory, say
                    print(f"{WAYS[way]}: {error}", file=sys.stderr)
                    del results[way]
    found = {
        way: {
            "gigabytes_per_second": _measure.medians(runs)["gigabytes_per_second"],
            "device_peak": statistics.median(m.result["device_peak"] for m in runs),
            "host_peak": _measure.medians(runs)["peak"],
        }
        for way, runs in results.items()
    }
    _measure.require_equal(results)
    if args.json:
        print(json.dumps(found))
        return
    one = next(iter(results.values()))[0].result
    print(f"{one['nbytes'] / 2**30:.2f} GiB in bf16 onto {one['devices']}, {args.runs} runs each, medians")
    for way, line in found.items():
        device = f"{line['device_peak']:5.2f} ×" if line["device_peak"] else "unknown"
        print(
            f"  {WAYS[way]:46} {line['gigabytes_per_second']:7.2f} GB/s   peak of a device {device}"
            f"   of the host {line['host_peak']:.2f} ×"
        )


if __name__ == "__main__":
    main()
