"""Running one piece of work in a process of its own, and watching its private memory from outside.

Private memory is `RssAnon`: mapped file pages are the kernel's cache, not the program's. The parent samples, so a
child that holds the interpreter lock cannot hide a peak. The child marks the stretch that counts with `measured()`
and hands over what it found with `emit()`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_INTERVAL = 0.002  # seconds between two samples
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # as installed packages have it: without, imports take seconds more


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one process did between its marks.

    Attributes:
        seconds: Wall time.
        peak_nbytes: Peak of private memory, over what the process had at its first mark, in bytes.
        samples: Pairs of seconds since the first mark and private bytes over the first mark's.
        result: What the child reported.
    """

    seconds: float
    peak_nbytes: int
    samples: list[tuple[float, int]]
    result: dict[str, Any]


def run(command: Sequence[str], *, env: dict[str, str] | None = None) -> Measurement:
    """Runs a Python script (a path and its arguments) in a fresh process and measures it."""
    child = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=os.environ | BYTECODE | (env or {})
    )
    samples: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        # One descriptor, one call a sample: the watcher shares the cores with what it watches.
        with contextlib.suppress(OSError), open(f"/proc/{child.pid}/status", "rb", buffering=0) as status:
            while not done.is_set():
                found = re.search(rb"RssAnon:\s*(\d+)", os.pread(status.fileno(), 4096, 0))
                if found:
                    samples.append((time.monotonic(), int(found[1]) * 1024))
                time.sleep(_INTERVAL)

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    output, _ = child.communicate()
    done.set()
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit status {child.returncode}:\n{output}")
    report = json.loads(output.strip().splitlines()[-1])
    begin, end, base = report.pop("begin"), report.pop("end"), report.pop("base")
    inside = [(moment - begin, nbytes - base) for moment, nbytes in samples if begin <= moment <= end]
    peak = max([nbytes for _, nbytes in inside] + [report.pop("final") - base])
    return Measurement(end - begin, peak, inside, report)


def arguments(doc: str | None, *, runs: int | None = None, child: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of a script: --json, --runs where it has a default, and the arguments of --child, which is our own."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs)
    if child:
        parser.add_argument("--child", nargs=len(child), metavar=tuple(child), help=argparse.SUPPRESS)
    return parser


def in_turns(ways: Iterable[str], runs: int, measure: Callable[[str], Measurement]) -> dict[str, list[Measurement]]:
    """Measures each way, one after the other, so many times."""
    results: dict[str, list[Measurement]] = {way: [] for way in ways}
    for _ in range(runs):
        for way, found in results.items():
            found.append(measure(way))
    return results


def speedup(slow: Sequence[Measurement], fast: Sequence[Measurement]) -> float:
    """How many times as fast: the median of pairs."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(slow, fast, strict=True))


def stock_and_ours(script: str, folder: str, runs: int) -> dict[str, list[Measurement]]:
    """Runs `script --child stock FOLDER` and `script --child ours FOLDER` in turn; each reports its values' digest."""
    command = [script, "--child"]
    results = in_turns(("stock", "ours"), runs, lambda how: run([*command, how, folder], env=virtual_devices()))
    digests = {m.result["digest"] for measurements in results.values() for m in measurements}
    if len(digests) != 1:
        raise SystemExit(f"stock and ours differ: {digests}")
    return results


def show_loads(results: dict[str, list[Measurement]], dtype: str, *, as_json: bool) -> None:
    """Prints what `stock_and_ours` found of two ways to load a model, whose bytes they report."""
    nbytes, runs = results["ours"][0].result["nbytes"], len(results["ours"])
    seconds = {how: statistics.median(m.seconds for m in found) for how, found in results.items()}
    peaks = {how: statistics.median(m.peak_nbytes for m in found) / nbytes for how, found in results.items()}
    ratio = speedup(results["stock"], results["ours"])
    if as_json:
        summary = {how: {"seconds": seconds[how], "peak": peaks[how]} for how in results}
        print(json.dumps({**summary, "ratio": {"seconds": ratio}}))
        return
    print(f"{nbytes / 2**30:.2f} GiB in {dtype} onto 8 devices, {runs} runs each, medians")
    for how in results:
        print(f"  {how:6} {seconds[how]:6.2f} s   peak private memory {peaks[how]:.2f} × the model")
    print("  every value equal bit for bit")
    print(f"  ours is {ratio:.1f} × as fast (median of pairs)")


def back_memory(nbytes: int) -> None:
    """In the child, before its first mark: touches and gives back memory, so that the kernel has that much ready.

    In a virtual machine that hands free memory back to its host, the first touch of a page can take longer than
    everything that is to be measured, and how long depends on what ran before.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        block = b"\1" * (2 << 20)
        for start in range(0, nbytes, len(block)):
            memory[start : start + len(block)] = block[: nbytes - start]


@contextlib.contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """In the child: marks what counts; the yielded dict is to be given to `emit`."""
    report: dict[str, Any] = {}
    base, begin, cpu = private_nbytes(), time.monotonic(), time.process_time()
    yield report
    report.update(begin=begin, end=time.monotonic(), base=base, final=private_nbytes())
    report["cpu"] = time.process_time() - cpu  # seconds of all threads: what a loaded machine does not change


def digest(arrays: Iterable[Any]) -> str:
    """In the child: what all values, in this order, hash to."""
    import numpy as np

    found = hashlib.sha256()
    for array in arrays:
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()


def emit_measured(function: Callable[..., object], *given: Any) -> None:
    """In the child: does something, and reports what it took."""
    with measured() as report:
        function(*given)
    emit(report)


def emit(report: dict[str, Any]) -> None:
    """In the child: hands a report to the parent, as `Measurement.result`."""
    print(json.dumps(report), flush=True)


def private_nbytes() -> int:
    """Private memory of this process in bytes (`RssAnon`; Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no RssAnon; is this Linux?")


def virtual_devices(count: int = 8) -> dict[str, str]:
    """The environment that gives a process this many CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
