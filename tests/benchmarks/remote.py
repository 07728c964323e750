"""A preset from a server onto 8 devices: ours from its URL, stock KerasHub's from a folder that is downloaded first.

    python tests/benchmarks/remote.py [--runs 5] [--json]

The preset of `stream.py`, 2.2 GiB in f32, is served by `tests/servers/object_server.py` on this machine, in a process
of its own, over a link of 200 MB/s for all connections together and 20 ms before each answer. Both take turns, each in
its own process. Seconds are from the opening of the checkpoint until every array is ready; memory is private memory
over what the process held before, as a multiple of the checkpoint's bytes. What either leaves on the disk is what is in
its temporary folder and in the download's at the end.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import _measure
import load_preset
from stream import PRESET

from tests.servers.object_server import ObjectServer

BANDWIDTH, LATENCY = 200e6, 0.02  # bytes/s, seconds
WAYS = {"preset": "lazymodel_keras.from_preset(url)", "stock": "download, then keras_hub from_preset"}
FILES = ("config.json", "metadata.json", "model.weights.h5")  # what `save_to_preset` writes of a backbone


def child(way: str, where: str) -> dict[str, Any] | None:
    """Saves the preset, or loads it by ours or, once it is downloaded, by KerasHub."""
    if way == "save":
        return _measure.save_gemma(Path(where), load_preset.CONFIG | PRESET)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tempfile.tempdir = temporary
        fetch = (lambda: _measure.download(where, FILES, folder)) if way == "stock" else None
        report = load_preset.load(way, folder if fetch else where, fetch)
        return report | {"written": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())}


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__, runs=5).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        _measure.child("save", Path(temporary) / "preset", devices=1)
        with ObjectServer(Path(temporary)) as server:
            server.configure(bandwidth=BANDWIDTH, latency=LATENCY)
            results = _measure.in_turns(WAYS, options.runs, lambda way: _measure.child(way, server.url("preset")))
    _measure.require_equal(results)
    found = {way: _measure.medians(runs) | {"written": runs[0].result["written"]} for way, runs in results.items()}
    ratio = _measure.speedup(results["stock"], results["preset"])
    if options.json:
        print(json.dumps({"ways": found, "ratio": ratio}))
        return
    print(f"{options.runs} runs each, alternating; medians")
    for way, line in found.items():
        print(
            f"  {WAYS[way]:40} {line['seconds']:7.2f} s {1e3 * line['gigabytes_per_second']:7.0f} MB/s   peak "
            f"{line['peak']:.3f} ×   {line['written']:,} bytes on the disk"
        )
    print(f"  {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
