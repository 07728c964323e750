"""From process start to the first token and to the first training step of a KerasHub model, and where the time goes.

    python tests/benchmarks/cold_start.py [--runs 3] [--layers 12] [--only WAY ...] [--json]

A Gemma `CausalLM` of 138 million parameters in float32, 0.55 GB, saved once with `save_to_preset`, on one CPU device.
Every run is a process of its own and the ways take turns: `stock` is `from_preset` of KerasHub, `ours` is
`lazymodel_keras.from_preset`, `compile` the same with `compile=`, `lean` that without TensorFlow, scikit-learn and
matplotlib (`train` needs grain for it), and `cached` the same with JAX's persistent compilation cache, which an earlier
process filled. `generate` is until one token is there, with the sampler that KerasHub takes by default, and `train`
until one step of `fit` is done, with its default optimizer. Files are local, with the page cache warm, or behind a link
of 20 ms and so many bytes a second that reading them takes as long as the first call of `ours` takes longer than its
second one, which is what compiling costs; stock downloads first.

Seconds are from the start of the process, as the parent sees it. Each timeline is that of the run with the median. What
is imported before either library is at work, KerasHub and TensorFlow with it, has a bar of its own; the last figures
are without it: load is `ours` until the model is there, and compile what its first call takes longer than its second.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # Python itself is there; what follows is imported for the parent or for all ways

import _measure  # noqa: E402

from tests.sentence_piece import WORDS, gemma_vocabulary  # noqa: E402

LATENCY = 0.02  # seconds
WAYS = ("stock", "ours", "compile", "lean", "cached")
LEAN = ("lean", "cached")
TASKS = ("generate", "train")
PLACES = ("local", "bucket")
MEASURED = ("begun", "loaded", "done", "again", "cpu")  # seconds
VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH = 32000, 768, 6144, 12, 128


def save(folder: Path, layers: int) -> dict[str, Any]:
    """In the child: writes the preset; returns the tokens of the prompt, and bytes."""
    import keras
    import keras_hub
    from sentencepiece import sentencepiece_model_pb2

    # The model may say any of its tokens, so each has a piece.
    pieces: Any = sentencepiece_model_pb2.ModelProto.FromString(gemma_vocabulary())
    for number in range(len(pieces.pieces), VOCABULARY):
        pieces.pieces.add(piece=f"▁word{number}", score=-1e6)
    keras.utils.set_random_seed(1)
    config = _measure.decoder(VOCABULARY, layers, HEADS, HEADS, WIDTH, HIDDEN, head_dim=WIDTH // HEADS)
    backbone = keras_hub.models.GemmaBackbone(**config)
    tokenizer = keras_hub.models.GemmaTokenizer(proto=pieces.SerializeToString())
    preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    keras_hub.models.GemmaCausalLM(backbone, preprocessor).save_to_preset(str(folder))
    return {"tokens": len(tokenizer(WORDS)) + 1, "nbytes": sum(weight.value.nbytes for weight in backbone.weights)}


def start(way: str, task: str, where: str, tokens: int) -> dict[str, Any]:
    """One cold start: spans in seconds of the system's monotonic clock, and what came out."""
    spans: list[tuple[str, float, float]] = []

    def timed(name: str, function: Any) -> Any:
        start = time.monotonic()
        result = function()
        spans.append((name, start, time.monotonic()))
        return result

    def imports() -> None:
        if way in LEAN:
            unused = ("sklearn", "matplotlib")  # Keras imports them if they are installed
            hidden: Any = dict.fromkeys(unused)  # name → None: an import of it raises ImportError
            sys.modules.update(hidden)
            import lazymodel_keras as lk

            for name in unused:
                del sys.modules[name]

            lk.leave_out_tensorflow()
        import keras_hub as keras_hub

    timed("import: keras_hub", imports)
    import jax
    import keras_hub

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    begun, cls = time.monotonic(), keras_hub.models.GemmaCausalLM
    if way == "stock":
        if "://" in where:
            names, downloads = json.loads(os.environ["NAMES"]), Path(os.environ["DOWNLOADS"])
            where = str(timed("download", lambda: _measure.download(where, names, downloads)))
        model = timed("from_preset", lambda: cls.from_preset(where))
    else:
        import lazymodel as lm
        import lazymodel_keras as lk
        from lazymodel._show import clock

        if way == "cached":
            jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"])
        wanted = {
            "generate": lm.Compile("generate", batch=1, sequence=tokens + 1),
            "train": lm.Compile("train", batch=1),
        }
        options = {} if way == "ours" else {"compile": wanted[task]}
        reports: list[lm.LoadReport] = []
        model = lk.from_preset(cls, where, progress=False, report=reports.append, **options)
        spans += [
            (span.label, span.start + clock.ZERO, span.stop + clock.ZERO)
            for span in reports[0].timeline
            if span.detail != "before lazymodel"
        ]
    loaded = time.monotonic()

    def call() -> Any:
        if task == "generate":
            return model.generate(WORDS, max_length=tokens + 1)
        return model.fit([WORDS], batch_size=1, verbose=0).history["loss"][0]

    before = len(compiled)
    result = timed("first token" if task == "generate" else "first step", call)
    done, cpu, compiles = time.monotonic(), time.process_time(), len(compiled) - before
    call()
    again = time.monotonic() - done
    times = {"begun": begun, "loaded": loaded, "done": done, "again": again, "cpu": cpu}
    return {"spans": spans, "started": STARTED, "result": result, "compiles": compiles, **times}


def runs_here(way: str, task: str) -> bool:
    """Returns True unless KerasHub needs grain, and it is not installed."""
    return way not in LEAN or task != "train" or find_spec("grain") is not None


def run(*given: object, **env: str) -> dict[str, Any]:
    """A child's answer, its moments in seconds since its process was started."""
    with tempfile.TemporaryDirectory() as downloads:
        env |= _measure.virtual_devices(1) | {"DOWNLOADS": downloads}
        begin = time.monotonic()
        found = _measure.script([__file__, "--child", *given], env=env)
    if "spans" in found:
        spans = [("start", begin, found["started"]), *found["spans"]]
        found["spans"] = [(label, start - begin, stop - begin) for label, start, stop in spans]
        for name in ("begun", "loaded", "done"):
            found[name] -= begin
    return found


def child(what: str, *rest: str) -> dict[str, Any]:
    if what == "save":
        return save(Path(rest[0]), int(rest[1]))
    return start(what, rest[0], rest[1], int(rest[2]))


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments((__doc__ or "").splitlines()[0], runs=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=(*WAYS, *TASKS, *PLACES), default=[])
    options = parser.parse_args()
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    from tests.servers.object_server import ObjectServer

    def chosen(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name in options.only] or list(names)

    with tempfile.TemporaryDirectory() as temporary, ObjectServer(Path(temporary)) as server:
        folder = Path(temporary) / "gemma"
        saved = run("save", folder, options.layers)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        bandwidths: dict[str, float] = {}
        for task in chosen(TASKS) if "bucket" in chosen(PLACES) else ():
            calibrating = run("ours", task, folder, saved["tokens"])
            bandwidths[task] = saved["nbytes"] / (calibrating["done"] - calibrating["loaded"] - calibrating["again"])
        os.environ["CACHE"] = str(Path(temporary) / "cache")
        for task in chosen(TASKS) if "cached" in chosen(WAYS) else ():
            if runs_here("cached", task):
                run("cached", task, folder, saved["tokens"])
        for _ in range(options.runs):
            for task in chosen(TASKS):
                server.configure(bandwidth=bandwidths.get(task), latency=LATENCY)
                for place in chosen(PLACES):
                    where = str(folder) if place == "local" else server.url("gemma")
                    for way in chosen(WAYS):
                        if not runs_here(way, task):
                            continue
                        found = run(way, task, where, saved["tokens"], NAMES=json.dumps(names))
                        runs.setdefault((task, place, way), []).append(found)
    show(runs, saved["nbytes"], bandwidths, as_json=options.json)


def show(
    runs: dict[tuple[str, str, str], list[dict[str, Any]]], nbytes: int, bandwidths: dict[str, float], *, as_json: bool
) -> None:
    from lazymodel._show.progress import Span, Timeline

    summary: dict[str, Any] = {}
    for (task, place, way), found in runs.items():
        values = {name: statistics.median(each[name] for each in found) for name in MEASURED}
        compiles = max(each["compiles"] for each in found)
        summary[f"{task} {place} {way}"] = values | {"compiles": compiles, "nbytes": nbytes, **bandwidths}
        median = sorted(found, key=lambda each: each["done"])[len(found) // 2]
        if as_json:
            continue
        link = "" if place == "local" else f" of {bandwidths[task] / 1e6:.0f} MB/s"
        print(f"\n{task}, {place}{link}, {way}: {values['done']:.1f} s from process start, ", end="")
        print(f"{values['done'] - values['begun']:.1f} s after imports; the first call compiled {compiles} programs")
        print(Timeline(Span(label, start, stop) for label, start, stop in median["spans"]))
    for task in TASKS:
        results = [each["result"] for key, found in runs.items() if key[0] == task for each in found]
        if any(result != results[0] for result in results):
            raise SystemExit(f"{task}: the ways differ: {set(map(str, results))}")
    if as_json:
        print(json.dumps(summary))
        return
    print(
        f"\n{nbytes / 1e9:.2f} GB in float32, {max(map(len, runs.values()))} runs each, medians; every result is equal"
    )
    for task, place in dict.fromkeys(key[:2] for key in runs):
        values = {way: summary[f"{task} {place} {way}"] for way in WAYS if (task, place, way) in runs}
        if not {"ours", "compile"} <= set(values):
            continue
        seconds = ", ".join(f"{way} {each['done']:.1f} s" for way, each in values.items())
        print(f"{task}, {place}: {seconds}", end="")
        after = {way: each["done"] - each["begun"] for way, each in values.items()}
        if "stock" in values:
            print(
                f": stock takes {values['stock']['done'] / values['compile']['done']:.2f} × as long as compile", end=""
            )
            print(f", {after['stock'] / after['compile']:.2f} × after imports", end="")
            for way in (way for way in LEAN if way in values):
                print(f", {values['stock']['done'] / values[way]['done']:.2f} × as long as {way}", end="")
        print()
        load = values["ours"]["loaded"] - values["ours"]["begun"]
        compiling = after["ours"] - load - values["ours"]["again"]
        larger = max(load, compiling)
        cpu = values["compile"]["cpu"] / values["ours"]["cpu"]
        serial, beside = after["ours"] / larger, after["compile"] / larger
        print(f"  load {load:.1f} s, compile {compiling:.1f} s: one after the other {serial:.2f} × the larger", end="")
        print(f", beside each other {beside:.2f} ×, {beside / serial:.2f} × the time and {cpu:.2f} × the CPU seconds")


if __name__ == "__main__":
    main()
