"""The figures and pictures of docs/benchmarks.md, from what benchmarks found; and running these benchmarks.

    python tests/benchmarks/report.py                         # writes the page and pictures from results.json
    python tests/benchmarks/report.py --run [NAME ...]        # runs all or some before, one after the other

A run is some 20 minutes on two idle cores. What each found stays in `results.json` beside this file, with its command,
the machine and the versions, until it is run again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _drawing import COLOURS, pyplot, save_svg

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE, PICTURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "drawings"
BEGIN, END = "<!-- written by tests/benchmarks/report.py -->", "<!-- end -->"

COMMANDS = {
    "preset": "load_preset.py --runs 3 --json --plot tests/benchmarks/load_preset.svg",
    "stream": "stream.py --runs 3 --json",
    "int8": "quantize_preset.py --runs 1 --json",
    "qwen3_moe": "moe_converter.py --runs 3 --json",
    "gpt_oss": "moe_converter.py --model gpt_oss --runs 1 --json",
    "formats": "quantized.py --runs 1 --json",
    "cold_start": "cold_start.py --runs 1 --json",
    "init": "init_compile.py --runs 1 --json",
    "abstract": "build_abstract.py --json",
}
VERSIONS = ("lazymodel", "jax", "flax", "keras", "keras-hub", "numpy")
Results = dict[str, dict[str, Any]]


def run(name: str) -> dict[str, Any]:
    """Runs a benchmark: what it printed as JSON, one document or one a line, and where."""
    begin = time.monotonic()
    script, *arguments = COMMANDS[name].split()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: {COMMANDS[name]} ended with status {done.returncode}")
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in done.stdout.splitlines()]
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "command": COMMANDS[name],
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - begin),
        "machine": f"{os.cpu_count()} cores{f' ({cpu[1].strip()})' if cpu else ''}, {memory:.0f} GiB",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{package} {importlib.metadata.version(package)}" for package in VERSIONS),
        "found": found,
    }


def loads(results: Results) -> Iterator[tuple[str, str, dict[str, float], dict[str, float], str]]:
    """What was loaded, its short name, stock's and our seconds and peak, and the seconds of reading alone."""
    found = {name: each["found"] for name, each in results.items()}
    of, ways = found["preset"], found["stream"]["ways"]
    yield "a Gemma preset, 267 million parameters in float32", "Gemma, 1.0 GiB", of["stock"], of["ours"], ""
    limit = f"{ways['limit-preset']['seconds']:.1f} s"
    yield "the same with 601 million, in wider layers", "Gemma, 2.2 GiB", ways["stock"], ways["preset"], limit
    for name, what, short in (
        ("int8", "the wider one, quantized to int8 (574 MiB) on the way", "… to int8"),
        ("qwen3_moe", "Qwen3-MoE's names and shapes, 1.1 GiB in bfloat16", "Qwen3-MoE"),
        ("gpt_oss", "GPT-OSS', 4-bit experts, 1.1 GiB in bfloat16", "GPT-OSS"),
    ):
        yield what, short, found[name]["stock"], found[name]["ours"], ""


def cold_starts(of: dict[str, Any]) -> dict[str, str]:
    """Tasks and places that were measured, as keys begin, and what they are called."""
    tasks = {"generate": "first token", "train": "first step of fit"}
    found: dict[str, str] = {}
    for key, each in of.items():
        task, place, _ = key.split()
        link = f"link of {each[task] / 1e6:.0f} MB/s" if place == "bucket" else place
        found[f"{task} {place}"] = f"{tasks[task]}, {link}"
    return found


def table(head: str, rows: list[list[str]]) -> str:
    lines = [head.split(" | "), ["---"] * len(head.split(" | ")), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(results: Results) -> str:
    """What figures were made on, by name if they differ."""
    made: dict[str, list[str]] = {}
    for name, each in results.items():
        made.setdefault(f"{each['machine']}; {each['versions']}; {each['date']}", []).append(name)
    return "\n\n".join(f"{', '.join(names) if len(made) > 1 else 'All'} on {what}." for what, names in made.items())


def speed(of: dict[str, Any]) -> str:
    return f"{of['gigabytes_per_second']:.2f} GB/s, {of['peak']:.2f} ×"


def page(results: Results) -> str:
    """All that is generated, as Markdown."""
    found = {name: each["found"] for name, each in results.items()}
    ways, starts = found["stream"]["ways"], found["cold_start"]
    of = found["init"]
    whole, ours = of["whole_seconds"][0], of["lazymodel_seconds"][0]
    loaded = [
        [
            what,
            f"{stock['seconds']:.1f} s, {stock['peak']:.2f} ×",
            f"**{ours['seconds']:.1f} s, {ours['peak']:.2f} ×**",
            limit,
        ]
        for what, _, stock, ours, limit in loads(results)
    ]
    by_axis = [
        [label, speed(ways[first]), speed(ways[last])]
        for label, first, last in (
            ("lazymodel", "first", "last"), ("Orbax", "orbax", "orbax-last"), ("reading alone", "limit", "limit"),
        )
    ]  # fmt: skip
    forms = [
        [form, *(f"{of[way]['gigabytes_per_second']:.2f}" for way in ("numpy", "ours"))]
        for form, of in found["formats"].items()
    ]
    peaks = [
        "{:.2f} to {:.2f} ×".format(*(most(of[way]["peak"] for of in found["formats"].values()) for most in (min, max)))
        for way in ("numpy", "ours")
    ]
    cold = [
        [label, *(f"{starts[f'{place} {way}']['done']:.1f} s" for way in COLOURS)]
        for place, label in cold_starts(starts).items()
    ]
    built = [
        [
            each["model"],
            f"{each['parameters'] / 1e9:,.1f}",
            f"{each['seconds']:.1f} s",
            f"{each['peak_nbytes'] / 2**20:.0f} MiB",
        ]
        for each in found["abstract"]
    ]
    parts = [
        where(results),
        "## Loading onto 8 devices",
        "![Seconds and peaks of loading](drawings/measured_loads.svg)",
        table("loaded | KerasHub: seconds, peak | lazymodel | reading alone", loaded),
        "## Safetensors, 1.1 GiB in three files",
        "The page cache is warm.",
        table("by | split on the first axis | on the last", by_axis),
        "## Quantized forms, decoded: 1 GiB of result",
        "![GB/s by form](drawings/measured_formats.svg)",
        "GB of result a second. Those in small letters are of [folders](quantized.md#load-quantized-checkpoints), the "
        "others [types of GGUF](quantized.md#gguf), decoded by the package `gguf` in the first column. "
        f"Peaks are {peaks[0]}, of lazymodel {peaks[1]}.",
        table("form | plain NumPy | lazymodel", forms),
        "## From the start of the process",
        "![Seconds by way](drawings/measured_cold_start.svg)",
        table("until, files | KerasHub alone | `lk.from_preset` | with `compile=`", cold),
        "On one device, a Gemma of 138 million parameters. Over the link, reading takes as long as compiling.",
        "## Building and compiling",
        f"The init of a {of['layers']}-layer NNX decoder: one `jax.jit` {whole:.1f} s; lazymodel "
        f"**{ours:.1f} s, {of['programs']} programs**.",
        table("built abstractly | billion parameters | seconds | memory", built),
    ]
    return "\n\n".join(parts)


def bars(axes: Any, labels: list[str], values: dict[str, list[float]], form: str) -> None:
    """Horizontal bars, a group a label; the first label is on top."""
    height = 0.8 / len(values)
    for number, (way, lengths) in enumerate(values.items()):
        places = [index + (number - (len(values) - 1) / 2) * height for index in range(len(labels))]
        drawn = axes.barh(places, lengths, height * 0.9, color=COLOURS[way])
        axes.bar_label(drawn, [format(length, form) for length in lengths], padding=3, fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def pictures(results: Results) -> None:
    plt = pyplot()

    def save(figure: Any, name: str, ways: dict[str, str]) -> None:
        handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[way], label=label) for way, label in ways.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(ways), frameon=False)
        file = PICTURES / f"measured_{name}.svg"
        save_svg(figure, file)
        plt.close(figure)

    rows = list(loads(results))
    figure, sides = plt.subplots(1, 2, figsize=(8, 0.6 + 0.5 * len(rows)), sharey=True, layout="constrained")
    labels = [short for _, short, *_ in rows]
    for axes, what, form in zip(sides, ("seconds", "peak"), (".1f", ".2f"), strict=True):
        bars(axes, labels, {"stock": [row[2][what] for row in rows], "ours": [row[3][what] for row in rows]}, form)
    sides[0].invert_yaxis()  # shared, so turned twice
    sides[0].set_xscale("log")
    sides[0].set_xlabel("seconds, on a logarithmic scale")
    sides[1].set_xlabel("peak of private memory / what is loaded")
    save(figure, "loads", {"stock": "KerasHub", "ours": "lazymodel"})
    of = results["formats"]["found"]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.35 * len(of)), layout="constrained")
    speeds = {
        colour: [each[how]["gigabytes_per_second"] for each in of.values()]
        for colour, how in (("stock", "numpy"), ("ours", "ours"))
    }
    bars(axes, list(of), speeds, ".2f")
    axes.set_xlabel("GB of result a second")
    save(figure, "formats", {"stock": "plain NumPy, gguf", "ours": "lazymodel"})
    of = results["cold_start"]["found"]
    places = cold_starts(of)
    figure, axes = plt.subplots(figsize=(8, 0.7 + 0.6 * len(places)), layout="constrained")
    seconds = {way: [of[f"{place} {way}"]["done"] for place in places] for way in COLOURS}
    bars(axes, list(places.values()), seconds, ".1f")
    axes.set_xlabel("seconds from the start of the process")
    save(figure, "cold_start", {"stock": "KerasHub", "ours": "lk.from_preset", "compile": "with compile="})


def written(text: str, results: Results) -> str:
    """The page with its generated part made of these results."""
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{page(results)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=COMMANDS, metavar="NAME", help=f"of {', '.join(COMMANDS)}")
    options = parser.parse_args()
    results: Results = json.loads(RESULTS.read_text())
    for name in () if options.run is None else options.run or COMMANDS:
        results[name] = run(name)
        print(f"{name}: {results[name]['seconds']} s", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), results))
    pictures(results)


if __name__ == "__main__":
    main()
