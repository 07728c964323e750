"""Every table of the library at every width: no number is cut, no name is lost, no line is too long."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh
from rich.cells import cell_len

import lazymodel as lm
from lazymodel._cli import doctor
from lazymodel._cli.main import main
from lazymodel._mup.coordinate_check import CoordinateCheck
from lazymodel._show.table import Table, Tabled

WIDTHS = range(40, 121)
_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?(?: [KMGTP]?i?B\b)?")


def missing(cell: str, lines: list[str]) -> bool:
    """Whether a cell is found neither in a line nor in pieces, each in a later line and ended by a separator."""
    if any(cell in line for line in lines):
        return False
    for start in range(len(lines)):
        rest = cell
        for line in lines[start:]:
            ends = [match.end() for match in re.finditer(r"[\s/_.:,;=|-]|$", rest)]
            fitting = [end for end in ends if rest[:end].strip() and rest[:end].rstrip() in line]
            rest = rest[max(fitting, default=0) :]
            if not rest.strip():
                return False
    return bool(cell.strip())


def check(text: str, cells: Iterable[str], width: int) -> None:
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    for cell in set(cells):
        assert not missing(cell, lines), f"{cell!r} is lost at {width} columns:\n{text}"
        for number in _NUMBER.findall(cell):
            number = number.rstrip(".,")
            assert any(number in line for line in lines), f"{number} of {cell!r} is cut at {width} columns:\n{text}"


def cells_of(table: Table) -> list[str]:
    return [table.title, *table.columns, *(cell for row in table.rows for cell in row), *table.lines]


# --- any table ---

word = st.text("abcdefgh", min_size=1, max_size=9)
number = st.one_of(
    st.integers(0, 10**12).map("{:,}".format),
    st.floats(0, 1023).map("{:.2f} GiB".format),
    st.floats(0, 1).map("{:.3g}".format),
)
part = st.one_of(word, number.filter(lambda text: " " not in text))
path = st.lists(part, min_size=1, max_size=12).flatmap(
    lambda parts: st.sampled_from("/._").map(lambda separator: separator.join(parts))
)
text = st.lists(st.one_of(path, number), max_size=8).map(" ".join)


@given(st.integers(40, 120), st.lists(st.tuples(path, number, number, word, text), min_size=1, max_size=4), text)
@example(66, [("model.layers/{0..31}/attention/query", "32", "125.25 MiB", "bfloat16", "initialized: normal")], "")
def test_any_table(width: int, rows: list[tuple[str, ...]], line: str) -> None:
    columns = ("variable", "count", "bytes/device", "dtype", "value")
    table = Table(line, columns, rows, frozenset(columns[1:3]), [line])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        check(table.text(), cells_of(table), width)


def test_wide_characters_take_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("題" * 30, ("name", "bytes"), [("重み/" * 12, "125.25 MiB"), ("a", "1 B")], frozenset(["bytes"]))
    lines = table.text().splitlines()
    assert max(map(cell_len, lines)) <= 40
    assert "".join(lines).count("題") == 30 and "".join(lines).count("重") == 12
    assert {cell_len(line) for line in lines if line.endswith((" B", "MiB"))} == {40}


def test_what_has_no_room_goes_to_a_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ("variable", "count", "shape", "bytes/device", "value")
    row = ("layers/{0..31}/attention/query", "32", "(4096, 32, 128)", "125.25 MiB", "initialized: normal")
    table = Table("", columns, [row], frozenset(("count", "bytes/device")))
    monkeypatch.setenv("COLUMNS", "60")
    assert table.text().splitlines()[1:] == [
        "variable                        count  shape",
        "  bytes/device  value",
        "──────────────────────────────────────────────────────",
        "layers/{0..31}/attention/query     32  (4096, 32, 128)",
        "    125.25 MiB  initialized: normal",
    ]


# --- every report ---


def init(key: jax.Array, width: int = 64) -> dict[str, Any]:
    def layer(key: jax.Array) -> dict[str, Any]:
        attention = {"query_projection": {"kernel": jax.random.normal(key, (width, 4, width // 4))}}
        return {"attention": attention, "feed_forward": {"up": jax.random.normal(key, (width, 2 * width))}}

    return {
        "token_embedding": {"embeddings": jax.random.normal(key, (512, width), "bfloat16")},
        "decoder_block": [layer(key) for _ in range(3)],
        "final_normalization_with_a_long_name": {"scale": jnp.ones(width)},
    }


def coordinate_check() -> CoordinateCheck:
    sizes = {f"decoder_block_{i}/attention/output": {w: (1.25e-05 * w, 0.0125) for w in (64, 1024)} for i in (0, 1)}
    return CoordinateCheck(sizes, sizes)


def reports(mesh: Mesh, folder: Path) -> dict[type, Any]:
    """One of each, of the same model."""
    abstract = lm.build_abstract(init, jax.random.key(0))
    sharded = abstract.shard(mesh, lm.auto())
    model = sharded.materialize()
    lm.save(model, folder / "model.safetensors")
    other = jax.tree.map(jnp.negative, model)
    loads: list[lm.LoadReport] = []
    sharded.materialize(lm.open_checkpoint(folder / "model.safetensors"), report=loads.append)
    reshards: list[Any] = []
    lm.reshard(model, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), report=reshards.append)
    plan = sharded.plan(what_if=lm.WhatIf(optimizer="adamw"), device_memory="16KiB")
    base = lm.build_abstract(init, jax.random.key(0), 32)
    found = [
        sharded,
        plan,
        plan.by_module(3),
        lm.compare_plans({f"{name}, bfloat16, data=2,model=4": plan for name in ("v5e-8", "v6e-8")}),
        lm.smallest_topology(abstract, "v5e", "auto", device_memory="50KiB", compile=None),
        lm.diff(model, other),
        loads[0],
        loads[0].timeline,
        reshards[0],
        lm.statistics(model),
        lm.mup(abstract, base),
        coordinate_check(),
    ]
    return {type(each): each for each in found}


def every(cls: type) -> set[type]:
    return {each for sub in cls.__subclasses__() for each in {sub, *every(sub)}}


def test_every_report(mesh8: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reports(mesh8, tmp_path)
    assert set(found) == {cls for cls in every(Tabled) if cls.__module__.startswith("lazymodel.")}
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        for report in found.values():
            table = report.table()
            check(table.text(), cells_of(table), width)
            assert table.text() in str(report)


def test_commands_that_print_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {f"model.layers.{i}.self_attn.q_proj.weight": np.zeros((128, 256), "float32") for i in range(3)}
    lm.save(names, tmp_path / "model-of-a-long-name.safetensors")
    texts = (
        "model.layers.{0..2}.self_attn.q_proj.weight",
        "(128, 256)",
        "384.00 KiB",
        "model-of-a-long-name.safetensors",
    )

    def printed(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    found = doctor._found()  # pyright: ignore[reportPrivateUsage]  # once: free memory changes
    monkeypatch.setattr(doctor, "_found", lambda: found)
    monkeypatch.setenv("COLUMNS", "1000")
    words = set(re.findall(r"\S*\d\S*", printed("doctor")))
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        check(printed("inspect", str(tmp_path)).partition("no problems")[0], texts, width)
        lines = printed("doctor").splitlines()
        assert not [word for word in words if missing(word, lines)]
