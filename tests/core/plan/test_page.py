"""A plan as a page: what it shows, that names are never markup, and how it behaves in a browser."""

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._show.page import Bars, Grid, Lines, Spans, Text, Treemap, Verdict, page
from tests.command import main

pytest.importorskip("plotly")

ATTACKS = (
    "</script><script>window.attacked=1</script>",
    "<img src=x onerror='window.attacked=1'>",
    "<b>bold</b>",
    "<a href='javascript:window.attacked=1'>link</a>",
    "__proto__",
    "${window.attacked=1}",
    "&lt;i&gt;",
)


WOULD_FIT = "What would fit, split evenly over so many devices"


def plan_of(count, widths=None):
    def init():
        shapes = {"up": (64, 128), "down": (128, 64), "scale": (64,)}
        layers = {f"layers_{i}": {name: jnp.zeros(shape) for name, shape in shapes.items()} for i in range(count)}
        for i, width in enumerate(widths or ()):
            layers[f"layers_{i}"]["scale"] = jnp.zeros(width)
        return {"embed": jnp.zeros((512, 64)), **layers}

    mesh = lm.arithmetic_mesh("v5e:2x4", {"data": 2, "model": 4})
    return lm.build_abstract(init).shard(mesh, lm.auto(), large=1).plan(what_if=lm.WhatIf(optimizer="adamw"))


def data_of(text):
    (found,) = re.findall(r'<script id="data" type="text/plain">(.*?)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(found)))


def sections_of(text):
    return {section["title"]: section for section in data_of(text)["sections"]}


def test_it_shows_the_plan(tmp_path):
    plan = plan_of(3)
    plan.save(tmp_path / "plan.html")
    sections = sections_of((tmp_path / "plan.html").read_text())
    assert sections["In use, on the most loaded device"]["bars"] == {"in use": plan.parts}
    assert sections["In use, on the most loaded device"]["limit"] == plan.device_memory
    held = sections["While materializing, on the most loaded device"]["lines"]
    assert held == {
        "held": [step.held_nbytes for step in plan.timeline],
        "with temporaries": [step.peak_nbytes for step in plan.timeline],
    }
    used = {row.path: row.used_nbytes for row in plan.rows}
    folded = {f"layers_{{0..2}} × 3/{name}": 3 * used[f"layers_0/{name}"] for name in ("up", "down", "scale")}
    assert sections["Modules by bytes on a device"]["sizes"] == {"embed": used["embed"], **folded}
    grid = sections["Variables"]
    by_path = {row[0]: row for row in grid["rows"]}
    assert list(by_path) == [row.path for row in plan.rows]
    found = dict(zip(grid["columns"], by_path["layers_1/up"], strict=True))
    assert (found["shape"], found["dtype"]) == ("(64, 128)", "float32")
    drawn = found["sharding"]["placed"]
    assert (drawn["shape"], drawn["mesh"]) == ([64, 128], {"data": 2, "model": 4})
    row = next(row for row in plan.rows if row.path == "layers_1/up")
    assert drawn["axes"] == [[entry] if entry else [] for entry in row.spec]
    assert found["bytes on a device"] == {"nbytes": row.used_nbytes}
    assert found["why"] == row.why != ""


@pytest.mark.parametrize(
    ("memory", "answer"),
    [("1GiB", "Fits without activations, 1023"), ("32KiB", "Does not fit, "), (None, "Does it fit? ")],
)
def test_it_begins_with_the_answer(tmp_path, memory, answer):
    mesh = jax.sharding.AbstractMesh((8,), ("model",))
    plan = lm.build_abstract(lambda: jnp.zeros((512, 512))).shard(mesh, lm.auto()).plan(device_memory=memory)
    plan.save(tmp_path / "plan.html")
    first, second, *_ = data_of((tmp_path / "plan.html").read_text())["sections"]
    assert (first["kind"], first["good"], second["kind"]) == ("verdict", plan.fits, "bars")
    assert first["answer"].startswith(answer)
    assert ("Not counted: activations" in first["lines"][2]) and first["lines"][0].startswith("128.00 KiB")
    assert first["lines"][3:] == ([plan.hint(plan.device_memory)] if plan.fits is False else [])


def test_parts_of_any_depth_fold_if_they_are_equal():
    sizes = {"a" + "/a" * 5000: 1, "a": 2, **{f"b/{i}/{j}": 1 + (i == 2) for i in range(4) for j in range(2)}}
    (section,) = data_of(page("", [Treemap("", sizes)]))["sections"]
    found = section["sizes"]
    assert sum(found.values()) == sum(sizes.values())
    assert {path: found[path] for path in found if path[0] == "b"} == {
        "b/{0,1,3} × 3/{0..1} × 2": 6,
        "b/2/{0..1} × 2": 4,
    }


def test_a_comparison_has_all_of_them(tmp_path):
    plans = {"here": plan_of(1), "there": plan_of(2)}
    lm.compare_plans(plans).save(tmp_path / "plans.html")
    text = (tmp_path / "plans.html").read_text()
    assert [row[0] for row in sections_of(text)["What would fit"]["rows"]] == ["here", "there"]
    assert sum(section["kind"] == "treemap" for section in data_of(text)["sections"]) == 2


def test_modules_stand_for_what_is_too_many(tmp_path):
    plan = plan_of(1000, widths=range(8, 8008, 8))
    plan.save(tmp_path / "plan.html")
    sections = sections_of((tmp_path / "plan.html").read_text())
    sizes = sections["Modules by bytes on a device"]["sizes"]
    assert len(sizes) == 1001
    assert sizes["layers_7"] == sum(row.used_nbytes for row in plan.rows if row.path.startswith("layers_7/"))
    assert sum(sizes.values()) == sum(row.used_nbytes for row in plan.rows)


def test_nothing_is_markup_and_nothing_is_fetched():
    text = page(ATTACKS[0], [Text(ATTACKS), Grid(ATTACKS[0], ["name"], [[name] for name in ATTACKS])])
    assert data_of(text)["title"] == ATTACKS[0]
    for name in ATTACKS:
        assert name not in text
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_it_says_what_would_fit(tmp_path):
    plan = plan_of(3)
    plan.save(tmp_path / "plan.html")
    columns, rows = (sections_of((tmp_path / "plan.html").read_text())[WOULD_FIT][key] for key in ("columns", "rows"))
    by_device = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert by_device["v5e"]["8"]["share"] == pytest.approx(plan.needed_nbytes / plan.device_memory, rel=1e-3)
    assert by_device["v5e"]["512"] == by_device["v2"]["4"] == ""  # no such slices
    shares = [by_device["H100"][column]["share"] for column in columns[2:]]
    assert shares == sorted(shares, reverse=True)


def test_a_report_has_its_timeline_and_where_values_came_from(tmp_path):
    arrays = {"a": np.ones((8, 4), np.float32), "b": np.ones(3, np.float32), "left": np.ones(2, np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    reports = []
    abstract = lm.build_abstract(lambda: {"a": jnp.zeros((8, 4)), "new": jnp.zeros(2), "b": jnp.zeros(3)})
    checkpoint = lm.open_checkpoint(tmp_path / "model.safetensors")
    with checkpoint, pytest.warns(lm.LazyModelWarning, match="'left'"):
        abstract.materialize(checkpoint, initialize="missing", strict=False, report=reports.append)
    with reports[0].timeline.span("mine"):
        sum(range(1_000_000))
    reports[0].save(tmp_path / "load.html")
    sections = sections_of((tmp_path / "load.html").read_text())
    assert "mine" in [label for label, _ in sections["What took how long"]["spans"]]
    rows = {row[0]: row[1:] for row in sections["Variables"]["rows"]}
    file = str(tmp_path / "model.safetensors")
    value = "loaded: a of model.safetensors"
    assert rows["a"] == ["(8, 4)", "float32", {"nbytes": 128}, value, file, {"nbytes": 128}]
    assert rows["new"][3].startswith("initialized: ")
    assert sections["Unused tensors"]["rows"] == [["left", "float32", {"nbytes": 8}, file]]


def test_a_checkpoint_is_inspected_in_one(tmp_path, capsys):
    save_file({"x.y": np.ones(5, np.float32), ATTACKS[0]: np.ones((2, 3), np.float16)}, tmp_path / "m.safetensors")
    page = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--html", str(page)]) == 0
    assert "no problems found" in capsys.readouterr().out
    sections = sections_of(page.read_text())
    assert sections["Names by bytes"]["sizes"]["x/y"] == 20
    rows = {row[0]: row[1:] for row in sections["Tensors"]["rows"]}
    *row, offset = rows["x.y"]
    assert row == ["(5)", "float32", {"nbytes": 20}, "m.safetensors"]
    start = int(offset.replace(",", ""))
    assert (tmp_path / "m.safetensors").read_bytes()[start : start + 20] == np.ones(5, np.float32).tobytes()
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--html", str(tmp_path / "absent" / "p.html")]) == 2


def test_it_cannot_be_written(tmp_path):
    with pytest.raises(lm.LazyModelError, match=r"cannot write .*absent/plan.html: No such file"):
        plan_of(1).save(tmp_path / "absent" / "plan.html")
    (tmp_path / "plan.html").mkdir()
    with pytest.raises(lm.LazyModelError, match=r"cannot write .*plan.html: Is a directory"):
        plan_of(1).save(tmp_path / "plan.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


# In a browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'lazymodel[browser]'")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"],
        )
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens a page's text offline; fails with what the console said."""
    said = []
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})

    def open_page(text, **options):
        path = Path(tmp_path / "page.html")
        path.write_text(text)
        if options:
            context.close()
        opened = (browser.new_context(offline=True, **options) if options else context).new_page()
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.goto(path.as_uri())
        opened.locator("html[data-ready]").wait_for(state="attached")
        return opened

    yield open_page
    assert said == []


def test_it_is_drawn_filtered_sorted_and_zoomed(open_page, tmp_path):
    plan = plan_of(5, widths=range(8, 48, 8))
    plan.save(tmp_path / "plan.html")
    opened = open_page((tmp_path / "plan.html").read_text())
    assert opened.title().startswith("init: plan for 16 variables")
    assert opened.locator(".chart .main-svg").count() >= 2
    assert opened.locator(".chart").nth(0).bounding_box()["height"] > 100
    bar = opened.locator(".bar").first
    share = bar.locator("span").nth(0).bounding_box()["width"] / bar.bounding_box()["width"]
    assert share == pytest.approx(plan.parts["parameters"] / plan.device_memory, abs=0.01)
    variables = opened.get_by_role("region", name="Variables").last
    rows = variables.locator("tbody tr")
    filter = opened.get_by_role("searchbox", name="Filter: Variables")
    filter.fill("layers_2/")
    assert rows.count() == 3
    filter.fill("layers_[01]/up$")
    assert rows.count() == 2
    filter.fill("")
    opened.get_by_role("button", name="bytes on a device").focus()
    opened.keyboard.press("Enter")
    opened.keyboard.press("Enter")
    assert opened.locator("th[aria-sort=descending]").inner_text() == "bytes on a device"
    assert rows.first.get_by_role("rowheader").inner_text() == "embed"
    opened.locator(".slice", has_text="layers_3").first.click(position={"x": 8, "y": 8})
    opened.locator(".slice", has_text="layers_2").first.wait_for(state="detached")
    opened.locator(".slice", has_text="down").first.hover()
    opened.locator(".hovertext", has_text="layers_3/down").wait_for(state="attached")
    assert opened.locator("svg.placed").first.get_attribute("aria-label").startswith("split (")


def test_names_do_nothing(open_page):
    sections = [
        Verdict(ATTACKS[1], True, ATTACKS),
        Text(ATTACKS),
        Bars(ATTACKS[1], {name: {ATTACKS[2]: 1} for name in ATTACKS}, 2),
        Lines(ATTACKS[1], ATTACKS, {name: list(range(len(ATTACKS))) for name in ATTACKS}),
        Spans(ATTACKS[1], [(name, [(0.0, 1.0)]) for name in ATTACKS], ATTACKS[2]),
        Treemap(ATTACKS[1], {f"{name}/{name}": 1 for name in ATTACKS}),
        Grid(
            ATTACKS[1],
            ATTACKS,
            [
                [
                    *ATTACKS[:4],
                    {"share": 0.5},
                    {"nbytes": 1},
                    {"placed": {"shape": (8,), "axes": ((ATTACKS[0],),), "mesh": {ATTACKS[0]: 2}}},
                ]
            ],
        ),
    ]
    opened = open_page(page(ATTACKS[0], sections))
    assert opened.title() == ATTACKS[0]
    assert opened.evaluate("window.attacked") is None
    assert opened.locator("main img, main script, main b, main a[href^='javascript']").count() == 0
    assert opened.locator("tbody td", has_text="<img src=x").count() > 0


def test_it_is_used_by_keyboard_and_read_aloud(open_page):
    rows = [[f"layers_{i}/kernel", {"nbytes": i}] for i in range(250)]
    sections = [
        Verdict("Fits", True),
        Bars("In use", {"in use": {"parameters": 1}}),
        Grid("Variables", ("variable", "bytes"), rows),
    ]
    opened = open_page(page("A plan", sections))
    stops = []
    for _ in range(7):
        opened.keyboard.press("Tab")
        stops.append(opened.evaluate("(e => e.getAttribute('aria-label') ?? e.textContent)(document.activeElement)"))
    assert stops == [
        "In use",
        "Variables",
        "Filter: Variables",
        "Variables",
        "variable",
        "bytes",
        "Show 200 more",
    ]
    opened.keyboard.press("Enter")
    assert opened.get_by_role("status").inner_text() == "250 of 250 rows"
    assert opened.get_by_role("table", name="Variables").get_by_role("row").count() == 251
    said = opened.locator("main").aria_snapshot()
    for part in (
        'heading "A plan" [level=1]',
        'navigation "Contents"',
        'img "in use: 1 B"',
        'rowheader "layers_0/kernel"',
    ):
        assert part in said
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not opened.get_by_role("searchbox").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(open_page, tmp_path, scheme):
    lm.compare_plans({"first": plan_of(2), "second": plan_of(30)}).save(tmp_path / "plans.html")
    text = (tmp_path / "plans.html").read_text()
    opened = open_page(text, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    boxes = [opened.locator(kind).first.bounding_box() for kind in (".verdict", ".bar", ".legend", ".chart")]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
