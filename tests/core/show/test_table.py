"""Tables fold thousands of variables into a readable page; names cannot break it; no number is cut."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.cells import cell_len
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._show.text import format_bytes
from tests.command import main
from tests.markup import Page

BF16 = np.dtype("bfloat16")
HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n&amp;/kernel"


def model_of(shapes: dict[str, tuple[int, ...]], sharding: Any = None) -> Any:
    abstract = lm.build_abstract(lambda: {path: jnp.zeros(shape, BF16) for path, shape in shapes.items()})
    return abstract if sharding is None else abstract.shard(sharding.mesh, lambda variable: sharding)


def decoder(layers: int, sharding: Any = None) -> Any:
    shapes = {"token_embedding": (256, 64)}
    shapes |= {f"block_{layer}/query": (64, 64) for layer in range(layers)}
    return model_of(shapes | {f"block_{layer}/scale": (64,) for layer in range(layers)}, sharding)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


# --- names ---


@pytest.mark.parametrize(
    ("wrong", "names", "suggested"),
    [
        ("decoder/atention/key/kernel", ["decoder/attention/query/kernel", "decoder/attention/key/kernel"], 1),
        ("Bais", ["kernel", "bias"], 1),
        ("kernel", ["entirely/other"], None),
        ("kernel", [], None),
    ],
)
def test_typos_are_suggested(wrong: str, names: list[str], suggested: int | None) -> None:
    with pytest.raises(lm.CheckpointError) as raised:
        lm.map_checkpoint(dict.fromkeys(names, np.zeros(1)), lambda weights: {"w": weights[wrong]})
    expected = "" if suggested is None else f"; closest: {names[suggested]!r}"
    assert ("; closest: " in str(raised.value)) == bool(expected) and expected in str(raised.value)


def test_typos_are_found_quickly_in_thousands_of_names() -> None:
    names = [f"model/layers/{i}/mlp/{part}/kernel" for i in range(4000) for part in ("gate", "up", "down")]
    weights, start = dict.fromkeys(names, np.zeros(1)), time.process_time()
    with pytest.raises(lm.CheckpointError, match="closest: 'model/layers/3999/mlp/gate/kernel'"):
        lm.map_checkpoint(weights, lambda w: {"w": w["model/layers/3999/mlp/gates/kernel"]})
    assert time.process_time() - start < 4  # comparing all of them in full takes over ten times as long


def folded(paths: list[str]) -> list[str]:
    """Names of the rows of a model's table."""
    return [row[0] for row in model_of(dict.fromkeys(paths, (1,))).table().rows]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/b"], "a/b"),
        (["block_2/w", "block_0/w", "block_1/w"], "block_{0..2}/w"),
        (["l3/w0", "l3/w1"], "l3/w{0..1}"),
        (["x5", "x1", "x3"], "x{1,3,5}"),
        ([f"x{i}" for i in range(0, 40, 4)], "x{0,4,…,36}"),
        (["00001-of-00003", "00002-of-00003", "00003-of-00003"], "{00001..00003}-of-00003"),
        (["a0/b1", "a1/b0"], "a{0..1}/b{0..1}"),
        (["x1", "x01"], "x{01,1}"),
        ([f"x{i}" for i in (10, 11, 0, 1, 5)], "x{0..1,5,10..11}"),
        ([f"x{i}" for i in (0, 1, 3, 5, 7, 9)], "x{0..1,3,…,9}"),
        (["x٣", "x٤"], "x{٣..٤}"),
    ],
)
def test_numbers_in_names_fold(paths: list[str], expected: str) -> None:
    assert folded(paths) == [expected]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10**30), min_size=1, max_size=20))
def test_fold_of_any_numbers(numbers: list[int]) -> None:
    (row,) = folded([f"block_{number}/w" for number in numbers])
    assert row.startswith("block_") and row.endswith("/w")
    assert str(min(numbers)) in row and str(max(numbers)) in row


def test_names_that_fold_are_in_the_order_of_their_numbers() -> None:
    """JAX flattens a dict in the order of its keys as texts: 10 before 2."""
    lengths = [1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 3, 3]
    sizes = {f"block_{i}/w": (length,) for i, length in enumerate(lengths)}
    rows = model_of({**sizes, "a": (4,), "z": (5,)}).table().rows
    assert [(row[0], row[2]) for row in rows] == [
        ("a", "(4)"),
        ("block_{0..1,4..9}/w", "(1)"),
        ("block_{2..3}/w", "(2)"),
        ("block_{10..11}/w", "(3)"),
        ("z", "(5)"),
    ]


# --- models ---


def test_text_and_html_fold_layers_into_rows() -> None:
    model = decoder(26)
    lines, page = repr(model).splitlines(), Page(model._repr_html_())
    title = "<lambda>: 53 variables, 124,544 parameters, 243.25 KiB"
    assert lines[0] == title and page.text.startswith(title)
    assert page.rows[0] == ["variable", "count", "shape", "bytes"]
    (query,) = [line for line in lines if "query" in line]
    expected = ["block_{0..25}/query", "26", "(64, 64)", "208.00 KiB"]
    assert re.split(r"\s{2,}", query.strip()) == page.rows[1] == expected
    assert lines[1] == "in all rows: dtype: bfloat16; origin: fill" and lines[1] in page.text
    assert len(lines) == len(page.rows) + 3 == 7
    assert not re.search(r"color|background|http|src=|<script|<style", model._repr_html_())


def test_text_of_sharded_models(mesh8: Mesh) -> None:
    text = repr(decoder(2, NamedSharding(mesh8, PartitionSpec("model"))))
    assert text.splitlines()[0].endswith("48.25 KiB, 6.03 KiB per device on 8 devices")
    (embedding,) = [line for line in text.splitlines() if line.startswith("token")]
    assert re.split(r"\s{2,}", embedding)[2:] == ["(256, 64)", "4.00 KiB"]
    assert "spec: P('model')" in text.splitlines()[1]
    assert "replicated" in repr(decoder(2, NamedSharding(mesh8, PartitionSpec(None))))
    abstract = NamedSharding(jax.sharding.AbstractMesh((4,), ("model",)), PartitionSpec("model"))
    assert "per device on 4 devices" in repr(decoder(1, abstract)).splitlines()[0]


def test_what_folds(tmp_path: Path) -> None:
    """Keras calls layers `block`, `block_1`, `block_2` where variables are of block_0, block_1, block_2."""
    names = [f"layers/block{f'_{i}' * (i > 0)}/vars/0" for i in range(3)]
    save_file({name: np.zeros(8, "float32") for name in names}, tmp_path / "m.safetensors")
    shapes = {f"block_{i}/kernel": (9 if i == 4 else 8,) for i in range(5)}
    model = lm.build_abstract(lambda: {path: jnp.zeros(shape) for path, shape in shapes.items()})
    table = {f"block_{i}/kernel": name for i, name in enumerate(names)} | {"{rest...}": None}
    reports: list[lm.LoadReport] = []
    with lm.open_checkpoint(tmp_path) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, lm.WeightMap(table), model)
        model.materialize(mapped, initialize="missing", report=reports.append)
    rows = reports[0].table().rows
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("block_{0..2}/kernel", "3", "loaded: layers/block_{1..2}/vars/0 of m.safetensors and 1 more"),
        ("block_3/kernel", "1", "initialized: fill"),
        ("block_4/kernel", "1", "initialized: fill"),
    ]
    digits = "1" * 5000  # more than Python reads as an int by default
    assert digits in folded([f"w{digits}", f"w{digits}1/v0"])[0]


def write_names(names: list[str], file: Path) -> None:
    """A safetensors file of as many bytes."""
    entries = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(len(names)))


@pytest.mark.large
def test_a_hundred_thousand_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_names([f"layer_{i % 100}/expert_{i}/kernel" for i in range(100_000)], tmp_path / "a.safetensors")
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a}{b}{c}" for a in letters for b in letters for c in letters[:8]]
    write_names([*names, "largest"], tmp_path / "b.safetensors")
    start = time.process_time()
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert re.search(r"layer_\{0..99\}/expert_\{0..99999\}/kernel +100,000 ", capsys.readouterr().out)
    assert main(["inspect", str(tmp_path / "b.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "in all rows: shape: (1); dtype: uint8; bytes: 1 B; file: b.safetensors\n" in out
    assert re.search(r"\n… and 5,\d{3} more\n", out)
    assert time.process_time() - start < 15


def test_hostile_names_reach_neither_terminal_nor_page() -> None:
    model = model_of({HOSTILE: (8,)})
    assert "\x1b" not in repr(model) and "a[red]\\x1b[31m<script>" in repr(model)
    page = Page(model._repr_html_())
    assert "script" not in page.tags
    assert "a[red]\\x1b[31m<script>alert('x')</script>\\n&amp;/kernel" in page.text


def test_prng_keys_and_nothing() -> None:
    assert "key<fry>" in repr(lm.build_abstract(lambda: {"rngs": jax.random.key(0)}))
    nothing = lm.build_abstract(dict)
    assert repr(nothing).startswith("dict: 0 variables") and "\n" not in repr(nothing)
    assert "table" not in Page(nothing._repr_html_()).tags


# --- every report at every width ---


def init(key: jax.Array, width: int = 64) -> dict[str, Any]:
    def layer(key: jax.Array) -> dict[str, Any]:
        attention = {"query_projection_dense": {"kernel": jax.random.normal(key, (width, 4, width // 4))}}
        up = jax.random.normal(key, (width, 2 * width))
        return {"multi_head_self_attention_layer_with_rotary_positions": attention, "feed_forward": {"up": up}}

    return {
        "token_embedding": {"embeddings": jax.random.normal(key, (512, width), "bfloat16")},
        "decoder_block": [layer(key) for _ in range(3)],
        "final_normalization_with_a_long_name": {"scale": jnp.ones(width)},
    }


def reports(mesh: Mesh, folder: Path) -> dict[type, Any]:
    """One of each, of the same model."""
    abstract = lm.build_abstract(init, jax.random.key(0))
    sharded = abstract.shard(mesh, lm.auto())
    model = sharded.materialize()
    lm.save(model, folder / "model.safetensors")
    loads: list[lm.LoadReport] = []
    sharded.materialize(lm.open_checkpoint(folder / "model.safetensors"), report=loads.append)
    reshards: list[Any] = []
    lm.reshard(model, NamedSharding(mesh, PartitionSpec()), report=reshards.append)

    def forward(model: Any, x: jax.Array) -> jax.Array:
        for layer in model["decoder_block"]:
            x = x @ layer["feed_forward"]["up"] @ layer["feed_forward"]["up"].T
        return jnp.mean(jnp.square(x))

    runs: list[lm.RunReport] = []
    signals = lm.signals(sharded, forward, jnp.ones((8, 64)), gradients=True, report=runs.append)
    plan = sharded.plan(what_if=lm.WhatIf(optimizer="adamw"), device_memory="16KiB")
    sizes = {f"decoder_block_{i}/attention/output": {w: (1.25e-05 * w, 0.0125) for w in (64, 1024)} for i in (0, 1)}
    found = [
        sharded,
        sharded.explain(),
        plan,
        plan.by_module(3),
        lm.plans(abstract, "v5e-8", "v6e-8", device_memory="50KiB"),
        lm.diff(model, jax.tree.map(jnp.negative, model)),
        loads[0],
        loads[0].timeline,
        reshards[0],
        lm.Sync(sharded, model),
        lm.digest(model),
        lm.digest(model).diff(lm.digest(jax.tree.map(jnp.negative, model))),
        lm.statistics(model),
        runs[0],
        signals,
        signals.compare(signals),
        lm.mup(abstract, lm.build_abstract(init, jax.random.key(0), 32)),
        lm.CoordinateCheck(sizes, sizes),
    ]
    with lm.SyncServer(sharded) as server, lm.SyncClient(server.address, sharded) as client:
        found.append(client)
    return {type(each): each for each in found}


def every(cls: type) -> set[type]:
    return {each for sub in cls.__subclasses__() for each in {sub, *every(sub)}}


def check(table: Any, width: int) -> None:
    """No text is lost, no number of a column of numbers is cut, and no line of a wide terminal is too long."""
    text = table.text()
    numbers = [row[place] for place, column in enumerate(table.shown) if column.right for row in table.rows]
    assert all(number in text for number in numbers), (width, text)
    headings = (column.heading for column in table.shown * bool(table.rows))
    cells = [table.title, table.equal, *headings, *sum(table.rows, ())]
    assert Counter(squeezed(text)) == Counter(squeezed("".join([*cells, *table.lines]))), (width, text)
    assert all(squeezed(line) in squeezed(text) for line in (table.title, table.equal, *table.lines))
    assert width < 80 or max(map(cell_len, text.splitlines())) <= width


def squeezed(text: str) -> str:
    return re.sub(r"[\s─]", "", text)


def test_every_report(mesh8: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("lazymodel.extras.inspection.inspect")  # has one more
    found = reports(mesh8, tmp_path)
    (tabled,) = set.intersection(*(set(cls.__mro__) for cls in found)) - {object}  # what all of them are
    known = {cls for cls in every(tabled) if cls.__module__.startswith("lazymodel.")}
    assert {cls.__name__ for cls in known - set(found)} == {"Report", "CheckpointSummary"}
    for width in range(41, 121, 8):
        monkeypatch.setenv("COLUMNS", str(width))
        for report in found.values():
            check(report.table(), width)
            assert report.table().text() in str(report)


def test_paths_are_broken_at_their_parts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fits = "encoder/multi_head_self_attention_layer/query_projection_dense/kernel"
    long = f"decoder_with_cross_attention/{fits}"
    lines = repr(model_of({long: (4, 2), fits: (1 << 20, 4), "b": (3,)})).splitlines()
    assert lines[lines.index(fits) + 1].split() == ["(1048576,", "4)", "8.00", "MiB"]
    first = next(index for index, line in enumerate(lines) if line.startswith("decoder"))
    assert lines[first].endswith("/") and "".join(lines[first : first + 2]) == long
    assert next(line for line in lines if line.startswith("b ")).split() == ["b", "(3)", "6", "B"]


def test_columns_that_are_equal_in_all_rows_are_a_line_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]  # more than are shown
    shapes: dict[str, tuple[int, ...]] = {name: (8, place + 1) for place, name in enumerate(names)}
    table = model_of(shapes).table()
    assert table.equal == "in all rows: dtype: bfloat16; origin: fill"
    assert [column.heading for column in table.shown] == ["variable", "shape", "bytes"]
    assert table.rows[-1] == ("… and 24 more", "", format_bytes(sum(16 * (n + 1) for n in range(24))))
    # A row that is not shown differs.
    other = lm.build_abstract(lambda: {n: jnp.zeros(s, "float32" if n == "aa" else BF16) for n, s in shapes.items()})
    assert other.table().equal == "in all rows: origin: fill" and "aa" not in {row[0] for row in other.table().rows}
    two = model_of({"a": (8,), "b": (8,)}).table()
    assert two.equal == "in all rows: shape: (8); dtype: bfloat16; origin: fill"
    assert [column.heading for column in two.shown] == ["variable", "count", "bytes"]  # numbers of few rows stay
    assert model_of({"a": (8,)}).table().equal == ""
    page = Page(model_of(shapes)._repr_html_())
    assert table.equal in page.text and page.rows[0] == ["variable", "shape", "bytes"]


def test_wide_characters_take_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")

    def build() -> Any:
        return {"重み/" * 12: jnp.zeros(1 << 25), "a": jnp.zeros(1)}

    build.__name__ = "題" * 30
    lines = repr(lm.build_abstract(build)).splitlines()
    assert max(map(cell_len, lines)) <= 70
    assert "".join(lines).count("題") == 30 and "".join(lines).count("重") == 12
