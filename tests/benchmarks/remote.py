"""Weights from a server onto 8 devices: what the transport can do, and the stream.

    python tests/benchmarks/remote.py [--runs 5] [--only NAME ...] [--json]

The safetensors decoder of `stream.py`, 1.1 GiB, is served by `tests/servers/object_server.py` on this machine, in a
process of its own, first as fast as it can, then over a link of 200 MB/s for all connections together and 20 ms before
each answer. The ways take turns, each in its own process. Seconds are from the opening of the checkpoint until every
array is ready; memory is private memory over what the process held before, as a multiple of the checkpoint's bytes.

`obstore` is no loader: 16 threads fetch the same bytes in ranges of 8 MiB (`obstore.get_range`) and keep them.

`preset` and `stock` load the preset of `stream.py`, 2.2 GiB in f32, over the same link of 200 MB/s: ours from the
URL, stock from a folder that is downloaded first. What either leaves on the disk is what is in its temporary folder and
in the download's at the end.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _measure
import load_preset
from stream import BACKED, DECODER, PRESET, load_safetensors, save_safetensors

from tests.servers.object_server import ObjectServer

BANDWIDTH, LATENCY = 200e6, 0.02  # bytes/s, seconds
FAULTS = ("503", "reset", "truncate", "stall")
EVERY = 20
ON_PRESET = ("preset", "stock")
WAYS = {
    "obstore": "obstore.get_range, 16 threads",
    "first": "lazymodel, sharded on the first axis",
    "last": "lazymodel, sharded on the last axis",
    "budget": "lazymodel, first axis, max_host_memory=64MiB",
    "first-capped": "first axis, 200 MB/s and 20 ms",
    "last-capped": "last axis, 200 MB/s and 20 ms",
    "preset": "lazymodel_keras.from_preset(url), 200 MB/s",
    "stock": "download, then keras_hub from_preset, 200 MB/s",
    "first-faulty": f"first axis, one request in {EVERY} failing",
}


def obstore_ranges(url: str) -> dict[str, Any]:
    """In the child: the bytes of the shards, in ranges of 8 MiB, with nothing made of them."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore(url, client_options={"allow_http": True, "pool_max_idle_per_host": "64"})
    size = 8 << 20

    def get(chunk: tuple[str, int, int]) -> Any:
        name, start, end = chunk
        return obstore.get_range(store, name, start=start, end=end)

    _measure.back_memory(BACKED)
    with _measure.measured() as report, ThreadPoolExecutor(16) as pool:
        chunks: list[tuple[str, int, int]] = []
        for name in (f"model-{index + 1:05}-of-00003.safetensors" for index in range(3)):
            nbytes = obstore.head(store, name)["size"]
            chunks += [(name, start, min(start + size, nbytes)) for start in range(0, nbytes, size)]
        kept = list(pool.map(get, chunks))
    return report | {"nbytes": sum(map(len, kept))}


def load_preset_from(way: str, url: str) -> dict[str, Any]:
    """In the child: the preset by ours or, once it is downloaded, by KerasHub."""
    names = ("config.json", "metadata.json", "model.weights.h5")  # what `save_to_preset` writes of a backbone
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tempfile.tempdir = temporary
        fetch = (lambda: _measure.download(url, names, folder)) if way == "stock" else None
        report = load_preset.load(way, folder if fetch else url, fetch)
        return report | {"written": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())}


def measure(way: str, server: ObjectServer) -> _measure.Measurement:
    """Runs one way; what the server counted comes along."""
    capped = way.endswith("-capped") or way in ON_PRESET
    server.configure(bandwidth=BANDWIDTH if capped else None, latency=LATENCY if capped else 0.0)
    server.faults(FAULTS if way.endswith("-faulty") else (), every=EVERY)
    server.reset_counters()
    url = server.url("preset" if way in ON_PRESET else "decoder")
    found = _measure.child(way, url)
    server.faults()
    counted = server.counters()
    found.result.update(sent=counted["bytes"], requests=counted["requests"])
    return found


def child(way: str, where: str) -> dict[str, Any] | None:
    if way == "save":
        return save_safetensors(Path(where), *DECODER)
    if way == "save-preset":
        return _measure.save_gemma(Path(where), load_preset.CONFIG | PRESET)
    if way in ON_PRESET:
        return load_preset_from(way, where)
    if way == "obstore":
        return obstore_ranges(where)
    return load_safetensors(way.partition("-")[0], f"{where}/model.safetensors.index.json")


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=5)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for way, name in (("save", "decoder"), ("save-preset", "preset")):
            if name == "decoder" or set(ON_PRESET) & set(options.only):
                _measure.child(way, Path(temporary) / name, devices=1)
        with ObjectServer(Path(temporary)) as server:
            results = _measure.in_turns(options.only, options.runs, lambda way: measure(way, server))
    report(results, as_json=options.json)


def report(results: dict[str, list[_measure.Measurement]], *, as_json: bool) -> None:
    """Prints medians, and ratios as medians over the rounds."""
    _measure.require_equal(results, set(results) & set(ON_PRESET), set(results) - set(ON_PRESET))

    def summary(way: str) -> dict[str, float]:
        runs, found = results[way], _measure.medians(results[way])
        sent = statistics.median(m.result["sent"] for m in runs) / runs[0].result["nbytes"]
        requests = statistics.median(m.result["requests"] for m in runs)
        return found | {"megabytes_per_second": 1e3 * found["gigabytes_per_second"], "sent": sent, "requests": requests}

    ratios: dict[str, float] = {}
    for way in ("first", "last", "budget"):
        if way in results and "obstore" in results:
            ratios[f"{WAYS[way]}, speed over obstore's"] = _measure.speedup(results["obstore"], results[way])
    for way in ("first-capped", "last-capped"):
        if way in results:
            ratios[f"{WAYS[way]}, share of the link"] = summary(way)["megabytes_per_second"] / (BANDWIDTH / 1e6)
    if results.keys() >= set(ON_PRESET):
        ratios["from_preset(url), times as fast"] = _measure.speedup(results["stock"], results["preset"])
    if as_json:
        print(json.dumps({"ways": {way: summary(way) for way in results}, "ratios": ratios}))
        return
    print(f"{len(next(iter(results.values())))} runs each, alternating; medians")
    for way in results:
        line = summary(way)
        disk = f"   {results[way][0].result['written']:,} bytes on the disk" if way in ON_PRESET else ""
        print(
            f"  {WAYS[way]:48} {line['seconds']:7.2f} s {line['megabytes_per_second']:7.0f} MB/s   peak "
            f"{line['peak']:.3f} ×   sent {line['sent']:.4f} × the bytes in {line['requests']:.0f} requests{disk}"
        )
    for name, value in ratios.items():
        print(f"  {name:66} {value:5.2f}")


if __name__ == "__main__":
    main()
