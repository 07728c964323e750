"""`lazymodel convert` between all formats under a budget: seconds, and private memory, beside `cp` and `sync`.

    python tests/benchmarks/convert.py [--gib 1] [--budget 128MiB] [--runs 3] [--folder DIR]

A float32 checkpoint of that many GiB, a quarter of it one tensor, is converted to bfloat16 safetensors, as `cp` and
`sync` of the same file take turns with it; then from safetensors to each format, and from that back to safetensors.
Memory is the peak of the process's private memory (RssAnon) beyond what it holds once its modules are imported.
Sources are in the page cache. Every conversion is removed once it was measured; there is room for twice the checkpoint
needed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import _measure
import numpy as np

import lazymodel as lm

FORMATS = {
    "safetensors": ["out.safetensors"],
    "safetensors, shards": ["out", "--shard-size", "200MB"],
    "hdf5": ["out.weights.h5"],
    "hdf5, shards": ["out.weights.json", "--shard-size", "200MB"],
    "orbax": ["out", "--to", "orbax"],
}


def checkpoint(gib: float) -> dict[str, lm.LazyTensor]:
    """Random float32, the same 64 MiB again and again: values do not matter here."""
    block = np.random.default_rng(0).normal(size=(4096, 4096)).astype(np.float32)
    count = max(round(16 * gib), 4)
    large = count // 4

    def parts(tensors: Mapping[str, lm.LazyTensor]) -> dict[str, lm.LazyTensor]:
        whole = tensors["whole"]
        layers = {f"layers.{n}.kernel": whole[n] for n in range(large, count)}
        return {"embedding": whole[:large].reshape(-1, 4096), **layers}

    return dict(lm.map_checkpoint({"whole": np.broadcast_to(block, (count, 4096, 4096))}, parts))


def converted(*arguments: str | Path) -> _measure.Measurement:
    """Converts in a process of its own, which is measured from its imports on."""
    return _measure.child(*arguments, devices=1)


def child(*given: str) -> dict[str, Any]:
    import h5py  # noqa: F401  # what only some formats need counts as imported for all
    import tensorstore  # noqa: F401

    from lazymodel.__main__ import main as command

    with _measure.measured() as report:
        assert command(["convert", "--quiet", *given]) == 0
    return report


def emptied(folder: Path) -> None:
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def in_turns(source: Path, folder: Path, runs: int, budget: str) -> Iterator[tuple[float, float, float]]:
    """Seconds of `cp` and `sync`, of the command that converts to bfloat16, and of that once all is imported."""
    for _ in range(runs):
        emptied(folder)
        start = time.perf_counter()
        subprocess.run(["cp", source, folder / "out.copy"], check=True)
        subprocess.run(["sync", folder / "out.copy"], check=True)
        copying = time.perf_counter() - start
        emptied(folder)
        arguments = [source, folder / "out.safetensors", "--dtype", "bfloat16", "--max-host-memory", budget]
        start = time.perf_counter()
        command = [sys.executable, "-m", "lazymodel", "convert", "--quiet", *arguments]
        subprocess.run(
            command, check=True, env=os.environ | _measure.BYTECODE | _measure.repository(), stderr=subprocess.DEVNULL
        )
        converting = time.perf_counter() - start
        emptied(folder)
        yield copying, converting, converted(*arguments).seconds


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3, json=False)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--budget", default="128MiB")
    parser.add_argument("--folder", help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        folder = Path(made)
        source = folder / "in.safetensors"
        lm.save(checkpoint(arguments.gib), source)
        subprocess.run(["cat", source], stdout=subprocess.DEVNULL, check=True)
        turns = list(in_turns(source, folder, arguments.runs, arguments.budget))
        copying, converting, itself = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{arguments.gib:g} GiB float32 → bfloat16: {converting:.2f} s, {itself:.2f} s without imports; cp and "
            f"sync of it {copying:.2f} s: {copying / converting:.2f} × its speed "
            f"(each: {', '.join(f'{a / b:.2f}' for a, b, _ in turns)})"
        )
        for name, options in FORMATS.items():
            emptied(folder)
            target = folder / options[0]
            budget = ["--max-host-memory", arguments.budget]
            both = [converted(source, target, *options[1:], *budget)]
            both.append(converted(target, folder / "out.back.safetensors", *budget))
            there, back = (f"{each.seconds:6.2f} s, imports + {each.peak_nbytes / 2**20:4.0f} MiB" for each in both)
            print(f"safetensors → {name:20} {there};  back {back}")


if __name__ == "__main__":
    main()
