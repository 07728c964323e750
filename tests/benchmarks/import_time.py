"""What importing lazymodel takes beyond JAX, and lazymodel_keras beyond Keras.

    python tests/benchmarks/import_time.py [--runs 7] [--json]

Each import is a process of its own, with and without ours taking turns; a difference is one of medians. Modules are
compiled to bytecode first, as an installation has them. Beside wall time there is that of the processor, which other
work on the machine changes less.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys

from _measure import ROOT, arguments, repository

PAIRS = {"lazymodel": "jax", "lazymodel_keras": "keras"}
SCRIPT = """
import sys, time
wall, cpu = time.perf_counter(), time.process_time()
import {names}
print(time.perf_counter() - wall, time.process_time() - cpu, len(sys.modules))
"""


def measure(names: str) -> list[float]:
    """Seconds, processor seconds and modules of a new process that imports them."""
    environment = {**os.environ, "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    environment |= repository()
    command = [sys.executable, "-c", SCRIPT.format(names=names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [float(figure) for figure in done.stdout.split()[-3:]]


def main() -> None:
    options = arguments(__doc__, runs=7).parse_args()
    for folder in (ROOT / "lazymodel", *(ROOT / "integrations").glob("lazymodel_*")):
        compileall.compile_dir(folder, quiet=1)
    found: dict[str, dict[str, float]] = {}
    for ours, base in PAIRS.items():
        runs: dict[str, list[list[float]]] = {base: [], f"{base}, {ours}": []}
        for names in runs:
            measure(names)  # warms the page cache
        for _ in range(options.runs):
            for names, figures in runs.items():
                figures.append(measure(names))
        without, with_ours = ([statistics.median(each) for each in zip(*found, strict=True)] for found in runs.values())
        found[ours] = {
            "seconds_of_base": without[0],
            "seconds": with_ours[0] - without[0],
            "cpu": with_ours[1] - without[1],
            "modules": with_ours[2] - without[2],
        }
    if options.json:
        print(json.dumps(found))
        return
    print(f"{options.runs} runs each, alternating; differences of medians")
    for ours, figures in found.items():
        print(
            f"  {ours:16} {figures['seconds']:6.3f} s, {figures['cpu']:.3f} s of the processor and "
            f"{figures['modules']:.0f} modules beyond {PAIRS[ours]} ({figures['seconds_of_base']:.2f} s)"
        )


if __name__ == "__main__":
    main()
