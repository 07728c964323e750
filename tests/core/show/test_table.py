"""Tables fold thousands of variables into a readable page; names cannot break a terminal or a page; progress ends."""

import io
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel import AbstractModel
from lazymodel._abstract.spec import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._show import progress as progress_module
from lazymodel._show.progress import Progress, progress_for
from lazymodel._show.text import closest, fold
from tests.markup import Page

BF16 = np.dtype("bfloat16")
HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n&amp;/kernel"


class FakeModel(dict[str, AbstractVariable]):
    """What the tables read of an AbstractModel."""

    def __init__(self, variables: list[AbstractVariable], name: str = "GemmaBackbone"):
        super().__init__({variable.path: variable for variable in variables})
        self.name = name
        self.nbytes = sum(variable.nbytes for variable in variables)
        self.num_parameters = sum(variable.size for variable in variables)


def decoder(layers: int, sharding: Any = None) -> FakeModel:
    variables = [AbstractVariable("token_embedding/embeddings", (256, 64), BF16, sharding, "Normal")]
    for layer in range(layers):
        prefix = f"decoder_block_{layer}"
        variables += [
            AbstractVariable(f"{prefix}/attention/query/kernel", (64, 64), BF16, sharding, "GlorotUniform"),
            AbstractVariable(f"{prefix}/norm/scale", (64,), np.dtype("float32"), sharding, "Ones"),
        ]
    return FakeModel(variables)


def text_of(model: Any) -> str:
    return AbstractModel.table(model).text()


def html_of(model: Any) -> str:
    return AbstractModel.table(model).html()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


# --- names ---


def test_closest_suggests_typos():
    names = ["decoder/attention/query/kernel", "decoder/attention/key/kernel", "bias"]
    assert closest("decoder/atention/query/kernel", names).startswith("; closest: 'decoder/attention/query/kernel'")
    assert closest("Bais", ["bias", "kernel"]) == "; closest: 'bias'"


@pytest.mark.parametrize("names", [[], ["entirely/other"], {"entirely/other": 1}])
def test_closest_is_empty_where_nothing_is_close(names: Any):
    assert closest("kernel", names) == ""


def test_closest_is_quick_for_thousands_of_names():
    names = [f"model/layers/{i}/mlp/{part}/kernel" for i in range(4000) for part in ("gate", "up", "down")]
    start = time.perf_counter()
    assert "'model/layers/3999/mlp/gate/kernel'" in closest("model/layers/3999/mlp/gates/kernel", names)
    assert time.perf_counter() - start < 3  # comparing all of them in full takes over ten times as long


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        (["a/b"], "a/b"),
        (["block_7/w2"], "block_7/w2"),
        (["block_0/w", "block_1/w", "block_2/w"], "block_{0..2}/w"),
        (["block_2/w", "block_0/w", "block_1/w"], "block_{0..2}/w"),
        (["l3/w0", "l3/w1"], "l3/w{0..1}"),
        (["x5", "x1", "x3"], "x{1,3,5}"),
        ([f"x{i}" for i in range(0, 40, 4)], "x{0,4,…,36}"),
        (["00001-of-00003", "00002-of-00003", "00003-of-00003"], "{00001..00003}-of-00003"),
        (["a0/b1", "a1/b0"], "a{0..1}/b{0..1}"),
        (["x1", "x01"], "x{01,1}"),
        (["x٣", "x٤"], "x{٣..٤}"),
    ],
)
def test_fold(paths: list[str], folded: str):
    assert fold(paths) == folded


@given(st.lists(st.integers(0, 10**30), min_size=1, max_size=20))
def test_fold_of_any_numbers(numbers: list[int]):
    folded = fold([f"block_{number}/w" for number in numbers])
    assert folded.startswith("block_")
    assert folded.endswith("/w")
    assert str(min(numbers)) in folded
    assert str(max(numbers)) in folded


def test_very_long_runs_of_digits_are_text():
    digits = "1" * 5000  # more than Python reads as an int by default
    model = FakeModel([AbstractVariable(f"w{digits}", (8,), BF16), AbstractVariable(f"w{digits}1/v0", (8,), BF16)])
    assert digits in Page(html_of(model)).text


# --- models ---


def test_model_text_folds_layers_into_rows():
    text = text_of(decoder(26))
    lines = text.splitlines()
    assert lines[0] == "GemmaBackbone: 53 variables, 124,544 parameters, 246.50 KiB"
    (query,) = [line for line in lines if "query" in line]
    assert re.split(r"\s{2,}", query.strip()) == [
        "decoder_block_{0..25}/attention/query/kernel", "26", "(64, 64)", "bfloat16", "208.00 KiB", "GlorotUniform",
    ]  # fmt: skip
    assert "spec" not in text
    assert len(lines) == 6


def test_model_text_of_a_sharded_model(mesh8: Mesh):
    sharding = NamedSharding(mesh8, PartitionSpec("model"))
    text = text_of(decoder(2, sharding))
    assert text.splitlines()[0].endswith("48.50 KiB, 6.06 KiB per device on 8 devices")
    (embedding,) = [line for line in text.splitlines() if line.startswith("token")]
    assert re.split(r"\s{2,}", embedding)[4:] == ["P('model')", "4.00 KiB", "Normal"]
    assert "replicated" in text_of(decoder(2, NamedSharding(mesh8, PartitionSpec(None))))


def test_model_text_names_other_shardings(mesh8: Mesh):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    model = FakeModel(
        [
            AbstractVariable("a", (8,), BF16, NamedSharding(mesh8, PartitionSpec("model"))),
            AbstractVariable("b", (8,), BF16, device),
            AbstractVariable("c", (8,), BF16),
        ]
    )
    text = text_of(model)
    assert "SingleDeviceSharding" in text
    assert "34 B per device on 8 devices" in text.splitlines()[0]


def test_model_text_with_an_abstract_mesh():
    mesh = jax.sharding.AbstractMesh((4,), ("model",))
    text = text_of(decoder(1, NamedSharding(mesh, PartitionSpec("model"))))
    assert "per device on 4 devices" in text.splitlines()[0]


def test_equal_paths_of_other_shapes_are_other_rows():
    shapes = [(8,), (8,), (16,)]
    model = FakeModel([AbstractVariable(f"l{i}/w", shape, BF16) for i, shape in enumerate(shapes)])
    text = text_of(model)
    assert "l{0..1}/w" in text
    assert "l2/w" in text


def test_origins_that_differ_in_numbers_are_one_row():
    """Keras calls layers `block`, `block_1`, `block_2` where variables are of block_0, block_1, block_2."""
    names = [f"layers/block{f'_{i}' * (i > 0)}/vars/0 of model.weights.h5" for i in range(3)]
    variables = [AbstractVariable(f"block_{i}/kernel", (8,), BF16, None, name) for i, name in enumerate(names)]
    other = AbstractVariable("block_3/kernel", (8,), BF16, None, "Zeros")
    (folded, zeros) = AbstractModel.table(FakeModel([*variables, other])).rows
    assert (folded[0], folded[1]) == ("block_{0..2}/kernel", "3")
    assert folded[-1] == "layers/block_{1..2}/vars/0 of model.weights.h5 and 1 more"
    assert (zeros[0], zeros[-1]) == ("block_3/kernel", "Zeros")


def test_thousands_of_unfoldable_variables_end_in_a_count():
    letters = "abcdefghijklmnopqrstuvwxyz"
    variables = [AbstractVariable(f"{a}{b}{c}", (2,), BF16) for a in letters for b in letters for c in letters[:8]]
    variables.append(AbstractVariable("largest", (4096,), BF16))
    start = time.perf_counter()
    lines = text_of(FakeModel(variables)).splitlines()
    assert time.perf_counter() - start < 5
    assert len(lines) < 50
    assert "largest" in lines[-2]
    assert re.split(r"\s{2,}", lines[-1].strip())[:2] == ["… and 5,369 more", "5,369"]


def test_a_hundred_thousand_variables_of_a_mixture_of_experts():
    variables = [
        AbstractVariable(f"layer_{layer}/expert_{expert}/kernel", (8, 8), BF16, None, "normal")
        for layer in range(100)
        for expert in range(1000)
    ]
    start = time.perf_counter()
    text = text_of(FakeModel(variables))
    assert time.perf_counter() - start < 10
    assert "layer_{0..99}/expert_{0..999}/kernel" in text
    assert "100,000" in text


def test_an_empty_model_is_only_its_title():
    assert text_of(FakeModel([])) == "GemmaBackbone: 0 variables, 0 parameters, 0 B"
    assert "table" not in Page(html_of(FakeModel([]))).tags


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_text_keeps_to_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str):
    monkeypatch.setenv("COLUMNS", columns)
    text = text_of(decoder(4))
    assert "Ones" in text  # the last column is narrow then, but there
    assert max(map(len, text.splitlines())) <= max(int(columns), 60)
    assert "\x1b" not in text


def test_hostile_names_reach_neither_terminal_nor_page():
    model = FakeModel([AbstractVariable(HOSTILE, (8,), BF16, None, HOSTILE)], name=HOSTILE)
    text = text_of(model)
    assert "\x1b" not in text
    assert "a[red]\\x1b[31m<script>" in text
    page = Page(html_of(model))
    assert "script" not in page.tags
    assert "a[red]\\x1b[31m<script>alert('x')</script>\\n&amp;/kernel" in page.text


def test_model_html_has_the_same_rows_as_the_text():
    page = Page(html_of(decoder(26)))
    assert page.text.startswith("GemmaBackbone: 53 variables")
    assert page.rows[0] == ["variable", "count", "shape", "dtype", "bytes", "origin"]
    assert page.rows[2] == [
        "decoder_block_{0..25}/attention/query/kernel", "26", "(64, 64)", "bfloat16", "208.00 KiB", "GlorotUniform",
    ]  # fmt: skip
    assert len(page.rows) == 4


def test_html_brings_no_colours_and_loads_nothing():
    text = html_of(decoder(2))
    assert not re.search(r"color|background|http|src=|<script|<style", text)


def test_prng_keys_have_a_dtype_name():
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert "key<fry>" in text_of(FakeModel([AbstractVariable("rngs/key", (), key.dtype)]))


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard error a terminal; called in the test itself, because pytest sets it anew after fixtures."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def run(progress: Progress) -> None:
    progress.start(1000, "materializing")
    for step in range(10):
        progress.advance(100, f"variable_{step}")
    progress.finish()


def test_false_is_silent_everywhere(monkeypatch: pytest.MonkeyPatch):
    terminal = use_terminal(monkeypatch)
    run(progress_for(False))
    assert terminal.getvalue() == ""


def test_none_is_silent_where_nobody_watches(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run(progress_for(None))
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    run(progress_for(None))
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    run(progress_for(None))


@pytest.mark.parametrize("progress", [None, True])
def test_a_terminal_gets_a_bar_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch, progress: bool | None):
    terminal = use_terminal(monkeypatch)
    run(progress_for(progress))
    text = terminal.getvalue()
    assert "variable_9" in text
    assert "1000 B of 1000 B" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_the_terminal_is_whole_after_an_exception(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    terminal = use_terminal(monkeypatch)
    progress = progress_for(True)
    before = sys.stderr, sys.stdout
    with pytest.raises(RuntimeError):  # noqa: PT012
        progress.start(1000, "materializing")
        try:
            print("for standard output")
            raise RuntimeError
        finally:
            progress.finish()
    progress.finish()  # harmless
    assert (sys.stderr, sys.stdout) == before
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
    assert "for standard output" not in terminal.getvalue()
    assert capsys.readouterr().out == "for standard output\n"


def test_a_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch):
    terminal = use_terminal(monkeypatch)
    progress = progress_for(True)
    progress.start(10, HOSTILE)
    progress.advance(10, "[/nonsense]")
    progress.finish()
    assert "[/nonsense]" in terminal.getvalue()
    assert "\x1b[31m<script>" not in terminal.getvalue()


def test_a_bar_inside_the_program_s_own_display(monkeypatch: pytest.MonkeyPatch):
    terminal = use_terminal(monkeypatch)
    from rich.console import Console
    from rich.live import Live

    with Live("own display", console=Console(file=terminal)):
        run(progress_for(True))


def test_a_callable_is_told_bytes_done_and_in_all():
    calls: list[tuple[int, int]] = []
    progress = progress_for(lambda done, total: calls.append((done, total)))
    progress.start(30, "x")
    progress.advance(10)
    progress.advance(20, "y")
    progress.advance(0, "z")  # a name, and nothing new to count
    progress.finish()
    assert calls == [(0, 30), (10, 30), (30, 30)]


@pytest.mark.parametrize("kind", ["callable", "bar", "notebook"])
def test_advance_counts_right_from_many_threads(
    kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    done: list[int] = []
    if kind == "callable":
        progress = progress_for(lambda count, total: done.append(count))
    elif kind == "bar":
        use_terminal(monkeypatch)
        progress = progress_for(True)
    else:
        request.getfixturevalue("notebook")
        progress = progress_for(None)
    progress.start(8 * 500, "x")
    threads = [threading.Thread(target=lambda: [progress.advance(1) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if kind == "callable":
        assert done == list(range(8 * 500 + 1))
    elif kind == "bar":
        assert isinstance(progress, progress_module._TerminalBar)
        assert progress._bar is not None
        assert progress._bar.tasks[0].completed == 8 * 500
    else:
        assert isinstance(progress, progress_module._NotebookBar)
        assert progress._done == 8 * 500
    progress.finish()


def test_bars_show_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, notebook: list[str]):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    cell = progress_for(None)
    cell.start(4096, "x")
    now += 2
    cell.advance(1024, "half a variable")
    assert "1.00 KiB of 4.00 KiB, 512 B/s, 0:06 left" in Page(notebook[-1]).text
    cell.finish()
    monkeypatch.delitem(sys.modules, "IPython")
    terminal = use_terminal(monkeypatch)
    bar = progress_for(None)
    bar.start(4096, "x")
    assert isinstance(bar, progress_module._TerminalBar)
    assert bar._bar is not None
    bar._bar.get_time = lambda: now
    now += 2
    bar.advance(1024)
    now += 2
    bar.advance(1024)
    bar._bar.refresh()
    bar.finish()
    assert "2.00 KiB of 4.00 KiB, 512 B/s" in terminal.getvalue()
    assert "0:00:04" in terminal.getvalue()


def test_an_object_is_used_as_it_is():
    class Mine:
        def start(self, total_nbytes: int, description: str) -> None: ...
        def advance(self, nbytes: int, description: str | None = None) -> None: ...
        def finish(self) -> None: ...

    mine = Mine()
    assert progress_for(mine) is mine


def test_anything_else_is_refused():
    with pytest.raises(LazyModelError, match="got 'yes'"):
        progress_for("yes")  # pyright: ignore


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for IPython under a kernel; returns what its one output cell shows, oldest first."""
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)

    def display(text: str, display_id: bool) -> Any:
        assert display_id
        shown.append(text)
        return handle

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    return shown


def test_a_notebook_gets_a_bar_of_its_own(notebook: list[str]):
    progress = progress_for(None)
    progress.start(2048, "<b>materializing")
    progress.advance(2048, "w<script>")
    progress.finish()
    progress.finish()
    assert len(notebook) == 2  # the first and the last: all else came faster than people see
    assert "0 B of 2.00 KiB" in notebook[0]
    assert "2.00 KiB of 2.00 KiB" in notebook[-1]
    assert "script" not in Page(notebook[-1]).tags
