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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]  # a clone's own packages and tests
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


def script(arguments: Sequence[object], *, env: dict[str, str]) -> Any:
    """Runs a Python script in a process of its own that sees this repository; the JSON of the last line it prints."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | repository() | env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def child(*given: object, devices: int | None = 8, env: dict[str, str] | None = None) -> Measurement:
    """Measures `script --child GIVEN ...` of the script that runs, on so many virtual devices or on what there is."""
    return run(
        [sys.argv[0], "--child", *map(str, given)], env=(virtual_devices(devices) if devices else {}) | (env or {})
    )


def in_child(work: Callable[..., dict[str, Any] | None]) -> None:
    """In the process that `child` has started: does the work of the words given, hands over what it took, and ends."""
    if sys.argv[1:2] != ["--child"]:
        return
    with measured() as report:
        found = work(*sys.argv[2:])
    emit(report | (found or {}))  # all of it counts, unless it marks something itself
    raise SystemExit


def repository() -> dict[str, str]:
    """The environment that gives a process this repository's packages."""
    paths = [str(ROOT), str(ROOT / "integrations"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def arguments(doc: str | None, *, runs: int | None = None, json: bool = True) -> argparse.ArgumentParser:
    """The parser of a script: --json where there is such, and --runs where it has a default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs)
    return parser


def in_turns(ways: Iterable[str], runs: int, measure: Callable[[str], Measurement]) -> dict[str, list[Measurement]]:
    """Measures each way, one after the other, so many times. A process is slower after some than after others, so every
    round begins with another way, and every second one goes backwards.
    """
    results: dict[str, list[Measurement]] = {way: [] for way in ways}
    order = [*results]
    for number in range(runs):
        for way in order[:: -1 if number % 2 else 1]:
            results[way].append(measure(way))
        order = [*order[1:], order[0]]
    return results


def speedup(slow: Sequence[Measurement], fast: Sequence[Measurement]) -> float:
    """How many times as fast: the median of pairs."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(slow, fast, strict=True))


def medians(runs: Sequence[Measurement]) -> dict[str, float]:
    """Of one way's runs: seconds, of the processor too, GB/s of the bytes that it reports, and peaks against these."""
    nbytes = runs[0].result["nbytes"]
    seconds, peak = (
        statistics.median(values) for values in zip(*((m.seconds, m.peak_nbytes) for m in runs), strict=True)
    )
    found = {"seconds": seconds, "gigabytes_per_second": nbytes / seconds / 1e9, "peak": peak / nbytes}
    return found | {"peak_over_nbytes": peak - nbytes, "cpu": statistics.median(m.result["cpu"] for m in runs)}


def require_equal(results: dict[str, list[Measurement]], *groups: Iterable[str]) -> None:
    """Ends the script if ways of a group, by default all, report other values than others of it."""
    for group in groups or (results,):
        digests = {m.result["digest"] for way in {*group} & {*results} for m in results[way] if "digest" in m.result}
        if len(digests) > 1:
            raise SystemExit(f"{sorted(group)} differ: {digests}")


def stock_and_ours(folder: str, runs: int) -> dict[str, list[Measurement]]:
    """Runs the children `stock FOLDER` and `ours FOLDER` in turn; each reports its values' digest."""
    results = in_turns(("stock", "ours"), runs, lambda how: child(how, folder))
    require_equal(results)
    return results


def show_loads(results: dict[str, list[Measurement]], dtype: str, *, as_json: bool) -> None:
    """Prints what `stock_and_ours` found of two ways to load a model, whose bytes they report."""
    nbytes, runs = results["ours"][0].result["nbytes"], len(results["ours"])
    ratio = speedup(results["stock"], results["ours"])
    summary = {how: medians(found) for how, found in results.items()}
    if as_json:
        print(json.dumps({**summary, "ratio": {"seconds": ratio}}))
        return
    print(f"{nbytes / 2**30:.2f} GiB in {dtype} onto 8 devices, {runs} runs each, medians")
    for how, figures in summary.items():
        print(f"  {how:6} {figures['seconds']:6.2f} s   peak private memory {figures['peak']:.2f} × the model")
    print("  every value equal bit for bit")
    print(f"  ours is {ratio:.1f} × as fast (median of pairs)")


def backend() -> None:
    """In the child: what JAX starts with is there, which is not what is measured."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(()) + 1)


def distribute(layout: Any, **axes: int) -> None:
    """In the child: Keras' models are split by a layout map, a function of the mesh, and the backend is there."""
    import keras

    mesh = keras.distribution.DeviceMesh(tuple(axes.values()), list(axes), keras.distribution.list_devices())
    distribution = keras.distribution.ModelParallel(layout_map=layout(mesh), batch_dim_name=mesh.axis_names[0])
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    backend()


def load_keras(load: Callable[[], Any], backed: int) -> dict[str, Any]:
    """In the child: one load of a Keras model, its bytes and what its values hash to."""
    import jax

    back_memory(backed)
    with measured() as report:
        model = load()
        jax.block_until_ready([variable.value for variable in model.weights])
    values = [variable.value for variable in sorted(model.weights, key=lambda variable: variable.path)]
    return report | {"nbytes": sum(value.nbytes for value in values), "digest": digest(values)}


def decoder(
    vocabulary: int, layers: int, heads: int, pairs: int, hidden: int, intermediate: int, **more: Any
) -> dict[str, Any]:
    """What KerasHub's decoders are made with."""
    names = [
        "vocabulary_size",
        "num_layers",
        "num_query_heads",
        "num_key_value_heads",
        "hidden_dim",
        "intermediate_dim",
    ]
    return dict(zip(names, (vocabulary, layers, heads, pairs, hidden, intermediate), strict=True)) | more


def save_gemma(folder: Path, config: dict[str, Any]) -> None:
    """Writes a preset of a Gemma with values that no initializer gives."""
    import keras
    import keras_hub
    import numpy as np

    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GemmaBackbone(**config)
    rng = np.random.default_rng(0)
    for variable in backbone.weights:
        variable.assign(rng.standard_normal(variable.shape, dtype=np.float32))
    backbone.save_to_preset(str(folder))


def by_orbax(folder: Path | str, structs: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """In the child: a load by Orbax v1's safetensors layout, imported before it is called."""
    import logging

    import orbax.checkpoint.experimental.v1 as ocp

    logging.disable(logging.WARNING)

    def load() -> dict[str, Any]:
        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            return ocp.load(folder, structs)

    return load


def zeros(structs: dict[str, Any]) -> Any:
    """In the child: the abstract model of arrays of these shapes and dtypes."""
    import jax

    import lazymodel as lm

    return lm.build_abstract(lambda: {name: jax.numpy.zeros(each.shape, each.dtype) for name, each in structs.items()})


def download(url: str, names: Iterable[str], folder: Path) -> Path:
    """In the child: files of a preset, as a user of stock gets them who has no bucket mounted."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore(url, client_options={"allow_http": True, "timeout": "10m"})
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            for piece in obstore.get(store, name).stream(min_chunk_size=1 << 20):
                file.write(piece)
    return folder


def torch_decoder(vocabulary: int, hidden: int, intermediate: int, layers: int) -> Iterator[dict[str, Any]]:
    """In the child: a decoder in bfloat16 with PyTorch's shapes, random: its embedding, then each layer."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = dict.fromkeys("qkvo", (hidden, hidden)) | dict.fromkeys(("gate", "up"), (intermediate, hidden))
    shapes |= {"down": (hidden, intermediate), "norm": (hidden,)}
    parts = [{"embed": (vocabulary, hidden)}]
    parts += [{f"layers.{layer}.{name}": shape for name, shape in shapes.items()} for layer in range(layers)]
    for part in parts:
        yield {n: rng.integers(0, 2**14, s, np.uint16).view(ml_dtypes.bfloat16) for n, s in part.items()}


def write_shards(folder: Path, files: Sequence[dict[str, Any]]) -> None:
    """Writes arrays as a safetensors folder with an index, of a file for each mapping."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


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
