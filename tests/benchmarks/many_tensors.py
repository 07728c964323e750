"""Many small things: what a load costs where tensors are tiny and there are thousands or a million of them.

    python tests/benchmarks/many_tensors.py [--runs 3] [--only CASE ...] [--json]

Every run of a case is a process of its own with 8 virtual devices and the page cache warm; medians are printed, of
wall-clock seconds and of the process's CPU seconds, which other work on the machine disturbs less. To compare two
commits run this on both in turn.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _measure

TENSORS = 10_000  # each of 2 KiB or 64 bytes
SHAPES = ((16, 32), (32, 16), (16,), (8, 64))
HEADER = 1_400_000  # tensors in one header: just below the 100 MB that the format's reference implementation takes
NAMES = 100_000
RULES = 50

Steps = dict[str, tuple[float, float]]


class Clock:
    """Wall-clock and CPU seconds of named steps."""

    def __init__(self) -> None:
        self.steps: Steps = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.steps[name] = time.perf_counter() - wall, time.process_time() - cpu


def shape_of(index: int) -> tuple[int, ...]:
    return SHAPES[index % len(SHAPES)]


def path_of(index: int) -> str:
    return f"layers_{index // 100}/unit_{index % 100}/{'kernel' if index % 2 else 'bias'}"


# Files ----------------------------------------------------------------------------------------------------------------


def write_header(file: Path, count: int) -> None:
    """A safetensors file of `count` single bytes; almost all of it is header."""
    entries = ",".join(
        f'"{index:07x}":{{"dtype":"U8","shape":[1],"data_offsets":[{index},{index + 1}]}}' for index in range(count)
    )
    header = ("{" + entries + "}").encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(count))


def write_files(folder: Path) -> None:
    import h5py
    import numpy as np
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {path_of(i): rng.standard_normal(shape_of(i)).astype(np.float32) for i in range(TENSORS)}
    save_file(arrays, folder / "tiny.safetensors")
    np.savez(folder / "tiny.npz", **arrays)
    with h5py.File(folder / "tiny.weights.h5", "w") as file:
        for name, array in arrays.items():
            file[f"{name}/vars/0"] = array
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder / "orbax", arrays)
    write_header(folder / "header.safetensors", HEADER)
    many = {f"layers.{i // 10}.part_{i % 10}.weight": np.zeros(1, np.uint8) for i in range(NAMES)}
    save_file(many, folder / "names.safetensors")


# Cases ----------------------------------------------------------------------------------------------------------------


def tiny_model(clock: Clock, *, replicated: bool = False) -> Any:
    """Builds and shards a model of 10,000 tiny variables, each from a random initializer."""
    import jax

    import lazymodel as lm

    def init(key: Any) -> dict[str, Any]:
        return {path_of(i): jax.random.normal(jax.random.fold_in(key, i), shape_of(i)) for i in range(TENSORS)}

    with clock("build_abstract"):
        abstract = lm.build_abstract(init, jax.random.key(0))
    mesh = jax.sharding.Mesh(jax.devices(), ("model",))
    with clock("shard"):
        return abstract.shard(mesh, {".*": jax.sharding.PartitionSpec(*(() if replicated else ("model",)))})


def load(clock: Clock, folder: Path, file: str, *, replicated: bool = False, keep: int = 1, **options: Any) -> None:
    """Loads every `keep`-th of the tensors from a file, and initializes the others."""
    import jax

    import lazymodel as lm

    abstract = tiny_model(clock, replicated=replicated)
    checkpoint: Any = None
    if file:
        with clock("open_checkpoint"):
            checkpoint = lm.open_checkpoint(folder / file)
        if file.endswith(".weights.h5"):
            with clock("map_checkpoint"):
                table = lm.WeightMap({"{path...}": "{path...}/vars/0"})
                checkpoint = lm.map_checkpoint(checkpoint, table, abstract)
        if keep > 1:
            kept = list(checkpoint)[::keep]
            checkpoint = {name: checkpoint[name] for name in kept}
    with clock("plan"):
        plan = abstract.plan(checkpoint)
    with clock("print plan"):
        str(plan)
    with clock("materialize"):
        arrays = abstract.materialize(checkpoint, initialize="missing", **options)
        jax.block_until_ready(arrays)
    if not options:
        del arrays
        reports: list[Any] = []
        abstract.materialize(checkpoint, initialize="missing", report=reports.append)
        with clock("print report"):
            str(reports[0])


LOADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sharded": ("10,000 tiny tensors of a safetensors file, each split over 8 devices", "tiny.safetensors", {}),
    "replicated": ("the same, each on all 8 devices", "tiny.safetensors", {"replicated": True}),
    "budget": ("split, with max_host_memory=64KiB", "tiny.safetensors", {"max_host_memory": "64KiB"}),
    "initialized": ("10,000 tiny variables initialized by programs, split", "", {}),
    "both": ("every other one loaded, the rest initialized", "tiny.safetensors", {"keep": 2}),
    "npz": ("10,000 members of an npz file, split", "tiny.npz", {}),
    "h5": ("10,000 datasets of an h5 file, split", "tiny.weights.h5", {}),
    "orbax": ("10,000 arrays of an Orbax checkpoint, split", "orbax", {}),
}


def case_header(clock: Clock, folder: Path) -> None:
    """one header of 1.4 million tensors"""
    import lazymodel as lm

    with clock("open_checkpoint"):
        checkpoint = lm.open_checkpoint(folder / "header.safetensors")
    with clock("names"):
        names = list(checkpoint)
    with clock("1000 tensors"):
        for name in names[:1000]:
            checkpoint[name]
    with clock("repr"):
        repr(checkpoint)


def case_mapping(clock: Clock, folder: Path) -> None:
    """a mapping of 100,000 names, and a mapping by 10 patterns"""
    import numpy as np

    import lazymodel as lm

    abstract = lm.build_abstract(
        lambda: {f"layers/{i // 10}/part_{i % 10}": np.zeros(1, np.uint8) for i in range(NAMES)}
    )
    with clock("open_checkpoint"):
        checkpoint = lm.open_checkpoint(folder / "names.safetensors")
    with clock("100,000 names"):
        table = {f"layers/{i // 10}/part_{i % 10}": f"layers.{i // 10}.part_{i % 10}.weight" for i in range(NAMES)}
        lm.map_checkpoint(checkpoint, lm.WeightMap(table), abstract)
    with clock("10 patterns"):
        table = {f"layers/{{i}}/part_{part}": f"layers.{{i}}.part_{part}.weight" for part in range(10)}
        lm.map_checkpoint(checkpoint, lm.WeightMap(table), abstract)


def case_rules(clock: Clock, folder: Path) -> None:
    """10,000 variables and 50 regexes, auto() and explain()"""
    import jax

    import lazymodel as lm

    abstract = tiny_model(clock)
    mesh = jax.sharding.Mesh(jax.devices(), ("model",))
    rules = {rf"layers_\d*{index}\d?/.*": jax.sharding.PartitionSpec("model") for index in range(RULES)}
    with clock("50 regexes"):
        abstract.shard(mesh, rules)
    with clock("auto"):
        sharded = abstract.shard(mesh, lm.auto())
    with clock("explain"):
        str(sharded.explain())
    with clock("repr"):
        repr(sharded)


CASES: dict[str, tuple[str, Callable[[Clock, Path], None]]] = {
    name: (what, functools.partial(load, file=file, **options)) for name, (what, file, options) in LOADS.items()
} | {
    function.__name__.removeprefix("case_"): (function.__doc__, function)
    for function in (case_header, case_mapping, case_rules)
}


def child(case: str, folder: str) -> dict[str, Any]:
    clock = Clock()
    CASES[case][1](clock, Path(folder))
    return {"steps": clock.steps}


def _run(case: str, folder: Path) -> Steps:
    """One run of a case in a process of its own."""
    given = [__file__, "--child", case, folder]
    return _measure.script(given, env=_measure.virtual_devices())["steps"]


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help="where the files are kept, instead of a temporary folder")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        if not (folder / "names.safetensors").exists():
            write_files(folder)
        results: dict[str, Steps] = {}
        for case in options.only:
            runs = [_run(case, folder) for _ in range(options.runs)]
            results[case] = {
                step: (statistics.median(r[step][0] for r in runs), statistics.median(r[step][1] for r in runs))
                for step in runs[0]
            }
            if not options.json:
                print(f"{case}: {CASES[case][0]}")
                for step, (wall, cpu) in results[case].items():
                    print(f"  {step:16} {wall:8.3f} s   {cpu:8.3f} CPU s", flush=True)
        if options.json:
            print(json.dumps(results))


if __name__ == "__main__":
    main()
