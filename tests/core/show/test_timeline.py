"""Timelines: when the process started, what was imported, what a model took, and how it is shown."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._show import clock
from lazymodel._show.progress import Span, Timeline
from tests.markup import Page

HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n$&amp;"
START_IS_KNOWN = Path("/proc/self/stat").exists()  # elsewhere the system does not say when a process started


def loaded() -> lm.LoadReport:
    reports: list[lm.LoadReport] = []
    lm.build_abstract(lambda: {"w": jax.numpy.zeros(2)}).materialize(report=reports.append)
    return reports[0]


def bars(timeline: Timeline) -> dict[str, str]:
    """Label → bar, as a terminal shows them."""
    rows = timeline.table().rows
    return {row[0]: row[-1] for row in rows}


SLEEPER = """
import json, time
time.sleep(0.5)
import jax, lazymodel as lm
abstract = lm.build_abstract(lambda: {"w": jax.numpy.zeros(2)})
abstract.materialize(report=lambda report: print(json.dumps(report.to_dict()["timeline"])))
"""


@pytest.mark.skipif(not START_IS_KNOWN, reason="the system does not say when a process started")
def test_the_zero_is_when_the_process_started() -> None:
    """Of a process that sleeps half a second before it imports anything."""
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", SLEEPER], capture_output=True, text=True, check=True, timeout=120)
    lasted = time.perf_counter() - before
    first, ours = [Span(**each) for each in json.loads(done.stdout) if each["name"] == "import"]
    assert ours.detail == "lazymodel" and first.stop == ours.start
    assert -0.02 < first.start < 0.02, "the system counts in hundredths of a second"
    assert 0.49 < first.stop < ours.stop < lasted + 0.02


def test_packages_that_a_package_imports_count_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "IMPORTS", [("lazymodel", 2.0, 3.0)])
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    clock.imported("lazymodel_keras", 1.5)
    clock.imported("another", 4.0)
    assert clock.IMPORTS[1:] == [("lazymodel_keras", 3.0, 5.0), ("another", 5.0, 5.0)]


def test_of_a_load_and_what_came_before(mesh8: Any, tmp_path: Path) -> None:
    """Parts of one thread come one after the other, and the seconds of a report are theirs."""
    save_file({"w": np.ones((8, 8), "float32")}, tmp_path / "m.safetensors")
    earlier = loaded().timeline
    abstract = lm.build_abstract(
        lambda key: {"w": jax.numpy.zeros((8, 8)), "v": jax.random.normal(key, (8, 8))}, jax.random.key(0)
    )
    reports: list[lm.LoadReport] = []
    sharded = abstract.shard(mesh8, {"w": P("model"), "v": P()})
    model = sharded.materialize(
        lm.open_checkpoint(tmp_path / "m.safetensors"), initialize="missing", report=reports.append
    )
    (report,) = reports
    with report.timeline.span("first step"):
        jax.block_until_ready(model["w"] + 1)
    imports = [span.detail for span in report.timeline if span.name == "import"]
    assert "lazymodel" in imports and imports.index("lazymodel") == START_IS_KNOWN
    parts = [span for span in report.timeline if span.start >= max(span.stop for span in earlier)]
    names = [span.label for span in parts]
    assert names == [
        *("build", "shard", "match", "initialize: compiling", "initialize: running", "stream"),
        *("initialize: running", "rebuild", "first step"),
    ]
    edges = [edge for span in parts for edge in (span.start, span.stop)]
    assert edges == sorted(edges)
    assert parts[-2].stop - parts[2].start <= report.seconds
    assert report.stream_seconds == report.timeline.seconds("stream") == parts[5].seconds
    assert report.initialize_seconds == sum(parts[place].seconds for place in (3, 4, 6))
    # Plain values, which outlive everything.
    assert pickle.loads(pickle.dumps(report)) == report
    values = report.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert [Span(**each) for each in values["timeline"]] == list(report.timeline)
    assert (*abstract.spent, sharded.spent[-1]) == sharded.spent, "a model is not changed by its next step"


def test_of_what_is_compiled_beside() -> None:
    step = jax.jit(lambda tree: tree["w"] + 2.5)
    reports: list[lm.LoadReport] = []
    abstract = lm.build_abstract(lambda: {"w": jax.numpy.zeros(8)})
    abstract.materialize(compile=lm.Compile(step), report=reports.append)
    spans = {span.label: span for span in reports[0].timeline}
    (compiled,) = (span for label, span in spans.items() if label.startswith("compile: "))
    assert spans["match"].stop <= spans["lower"].start < spans["lower"].stop <= compiled.start
    assert compiled.start < compiled.stop <= spans["rebuild"].start, "the first call waits for nothing"
    assert reports[0].lower_seconds == reports[0].timeline.seconds("lower")


def test_what_fails_took_its_time_too() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("first step"):
        raise KeyError
    assert [span.name for span in timeline] == ["first step"]


def test_bars_are_where_spans_are() -> None:
    spans = [Span("build", 0, 12), Span("compile", 12, 48, "step"), Span("stream", 24, 36), Span("stream", 42, 48)]
    assert bars(Timeline(spans)) == {
        "build": "█" * 12 + "·" * 36,
        "compile: step": "·" * 12 + "█" * 36,
        "stream": "·" * 24 + "█" * 12 + "·" * 6 + "█" * 6,
    }
    assert Timeline(spans).table().rows[-1][1:4] == ("24.00", "48.00", "18.00")
    short = [Span("stream", 0, 480), Span("rebuild", 479.99, 480), Span("match", 10, 10.001)]
    assert bars(Timeline(short)) == {"stream": "█" * 48, "rebuild": "·" * 47 + "█"}
    # An hour between imports and the load, as in a notebook; the numbers are there.
    wait = Timeline([Span("import", 0, 4), Span("build", 3600, 3601), Span("stream", 3602, 3624)])
    assert bars(wait) == {"import": "◂".ljust(48, "·"), "build": "█" * 2 + "·" * 46, "stream": "·" * 4 + "█" * 44}
    assert wait.table().rows[0][1:4] == ("0.00", "4.00", "4.00")


def test_a_page_has_nothing_of_what_names_hold() -> None:
    timeline = Timeline([Span(HOSTILE, 0, 1, HOSTILE), Span("stream", 1, 2)])
    assert "script" not in Page(timeline._repr_html_()).tags and "\x1b" not in repr(timeline)


def test_a_figure(tmp_path: Path) -> None:
    spans = (Span("import", 0, 2), Span("stream", 2, 3), Span("stream", 5, 6), Span(HOSTILE, 6, 7))
    (axes,) = Timeline(spans).plot(HOSTILE, tmp_path / "timeline.svg").axes
    assert (tmp_path / "timeline.svg").read_text().startswith("<?xml")
    extents = [[path.get_extents().intervalx.tolist() for path in bar.get_paths()] for bar in axes.collections]
    assert extents == [[[0, 2]], [[2, 3], [5, 6]], [[6, 7]]]
    with pytest.raises(lm.LazyModelError, match="cannot write"):
        Timeline(spans).plot("model", tmp_path / "missing" / "timeline.svg")


def test_without_spans() -> None:
    assert bars(Timeline()) == {}
    Timeline().plot("model")
