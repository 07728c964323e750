"""The load report: what was loaded from where, what was not, and bytes needed and read, exactly."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import pickle
import re
import sys
import time
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.core.materialize._variables import Recorder
from tests.servers.object_server import ObjectServer

Model = lm.AbstractModel[Any]

RULES = {"kernel": P(None, "model"), "bias": P("model"), "head": P(), "mask": P()}


def init(key: jax.Array) -> dict[str, Any]:
    kernel_key, head_key = jax.random.split(key)
    return {
        "kernel": jax.random.normal(kernel_key, (16, 32)),
        "bias": jnp.zeros((32,)),
        "head": jax.random.uniform(head_key, (32, 8)),
        "mask": np.ones(4, "int32"),
    }


@pytest.fixture(scope="module")
def abstract() -> Model:
    return lm.build_abstract(init, jax.random.key(0))


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    """A tensor for every variable of `init`, but for the changes; None leaves one out."""
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {
        "kernel": rng.standard_normal((16, 32)).astype("float32"),
        "bias": rng.standard_normal(32).astype("float32"),
        "head": rng.standard_normal((32, 8)).astype("float32"),
        "mask": np.arange(4, dtype="int32"),
    } | changes
    return {name: value for name, value in values.items() if value is not None}


def saved(folder: Path, values: dict[str, np.ndarray]) -> tuple[Path, lm.Checkpoint]:
    path = folder / "model.safetensors"
    save_file(values, path)
    return path, lm.open_checkpoint(path)


def reported(abstract: Model, checkpoint: Any = None, **arguments: Any) -> lm.LoadReport:
    """The report of a load, whose count of bytes is that of the files' readers."""
    reports: list[lm.LoadReport] = []
    values = [] if checkpoint is None else [value for value in checkpoint.values() if isinstance(value, lm.LazyTensor)]
    readers = list(dict.fromkeys(reader for value in values for reader in value.source.readers()))
    before = sum(reader.bytes_read for reader in readers)
    abstract.materialize(checkpoint, report=reports.append, **arguments)
    assert reports[0].read_nbytes == sum(reader.bytes_read for reader in readers) - before
    return reports[0]


def test_a_load_is_one_line(
    tmp_path: Path, abstract: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ckpt = saved(tmp_path, tensors(head=None))
    with caplog.at_level(logging.INFO, "lazymodel"):
        abstract.materialize(initialize="all", progress=False)
        assert not caplog.messages  # nothing was loaded
        report = reported(abstract, ckpt, initialize="missing")
        (line,) = caplog.messages
    pattern = (
        r"init: loaded ([\d.e-]+) GB in [\d.]+ s, [\d.]+ GB/s(, .*)*, this process held at most [\d.]+ [MG]iB so far"
    )
    match = re.fullmatch(pattern, line)
    assert match is not None and float(match[1]) == pytest.approx(report.read_nbytes / 1e9, rel=1e-2)
    assert report.wait_seconds is not None and report.convert_seconds is not None
    assert report.wait_seconds + report.convert_seconds <= report.stream_seconds and report.wait_seconds > 0

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    abstract.materialize(path, initialize="missing")
    abstract.materialize(path, initialize="missing", progress=False)
    assert len(re.findall(pattern, terminal.getvalue())) == 1


def test_what_took_time_is_not_guessed(tmp_path: Path) -> None:
    """HDF5's library reads and decompresses at once, so the time of either is not known."""
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.create_dataset("w", data=np.ones((64, 64), "float32"), chunks=(16, 16), compression="lzf")
    report = reported(one((64, 64)), lm.open_checkpoint(tmp_path / "w.h5"))
    assert report.read_nbytes and report.wait_seconds is None and report.convert_seconds is None
    assert "waiting" not in str(report)


def one(shape: tuple[int, ...], dtype: Any = "float32") -> Model:
    """A model of a single variable, `w`."""
    return lm.build_abstract(lambda key: {"w": jax.random.normal(key, shape).astype(dtype)}, jax.random.key(0))


def stored(tensor: Any) -> tuple[str, str, str, int | None]:
    return (tensor.name, tensor.file, tensor.dtype, tensor.nbytes)


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_sharded_load(tmp_path: Path, mesh8: Mesh, abstract: Model) -> None:
    path, ckpt = saved(tmp_path, tensors())
    report = reported(abstract.shard(mesh8, RULES), ckpt)
    nbytes = {name: tensor.nbytes for name, tensor in tensors().items()}
    assert [row.path for row in report.rows] == [row.path for row in report.loaded] == sorted(nbytes)
    assert dataclasses.asdict(report.rows[2]) == {
        "path": "kernel",
        "shape": (16, 32),
        "dtype": "float32",
        "nbytes": 16 * 32 * 4,
        "action": "load",
        "initializer": "",
        "tensors": ({"name": "kernel", "file": str(path), "dtype": "float32", "nbytes": 16 * 32 * 4},),
        "needed_nbytes": 16 * 32 * 4,
    }
    assert {row.path: row.needed_nbytes for row in report.rows} == nbytes, "what all eight hold alike counts once"
    assert report.needed_nbytes == report.read_nbytes == sum(nbytes.values())
    assert report.files == {str(path): path.stat().st_size}
    assert (report.name, report.process_index, report.process_count) == ("init", 0, 1)
    assert report.initialized == report.constants == report.unused == report.mismatched == ()
    assert 0 < report.stream_seconds <= report.seconds
    assert report.gb_per_second == report.read_nbytes / 1e9 / report.stream_seconds


def test_waiting_for_init_programs_is_not_streaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: Model
) -> None:
    """By a clock that only waiting for arrays moves: 1 s where they were loaded, 10 s where they were computed too."""
    clock = [0.0]

    def slowly(arrays: Any, wait: Any = jax.block_until_ready) -> Any:
        clock[0] += 10.0 if len(arrays) == 4 else 1.0
        return wait(arrays)

    _, ckpt = saved(tmp_path, tensors(head=None))
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock[0])
        patch.setattr(jax, "block_until_ready", slowly)
        report = reported(abstract, ckpt, initialize="missing")
    assert (report.initialize_seconds, report.stream_seconds, report.seconds) == (10.0, 1.0, 11.0)


def test_needed_are_the_shards_of_the_devices_in_use(tmp_path: Path, mesh8: Mesh) -> None:
    """A mesh of two of the eight devices, and a variable on one of them."""
    _, ckpt = saved(tmp_path, {"w": np.ones((8, 8), "float32"), "v": np.ones(8, "float32")})
    mesh = Mesh(mesh8.devices.flat[:2], ("model",))
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((8, 8)), "v": jnp.zeros(8)})
    report = reported(abstract.shard(mesh, {"w": P("model"), "v": P()}), ckpt)
    assert {row.path: row.needed_nbytes for row in report.rows} == {"w": 256, "v": 32}
    assert report.needed_nbytes == report.read_nbytes == 288


@pytest.mark.parametrize(("columns", "part"), [(8192, 2048), (64, 16)])
def test_a_column_slice_needs_and_reads_its_columns(tmp_path: Path, columns: int, part: int) -> None:
    _, ckpt = saved(tmp_path, {"wide": np.ones((4, columns), "float32")})
    report = reported(one((4, part)), {"w": ckpt["wide"][:, :part]})
    assert report.needed_nbytes == 4 * part * 4
    # Without a map of the file, short gaps between rows are read as well.
    assert report.needed_nbytes <= report.read_nbytes <= 4 * columns * 4


def test_needed_is_counted_as_stored(tmp_path: Path, mesh8: Mesh) -> None:
    _, ckpt = saved(tmp_path, {"w": np.ones((16, 32), ml_dtypes.bfloat16)})
    report = reported(one((16, 32)).shard(mesh8, {"w": P("model")}), ckpt)
    (row,) = report.loaded
    assert (row.dtype, row.tensors[0].dtype, row.nbytes) == ("float32", "bfloat16", 16 * 32 * 4)
    assert row.needed_nbytes == report.needed_nbytes == report.read_nbytes == 16 * 32 * 2
    assert "bfloat16 → float32" in repr(report)


def test_joined_tensors_are_all_named(tmp_path: Path) -> None:
    for name, dtype in (("a", "float32"), ("b", "float16")):
        save_file({name: np.ones((4, 8), dtype)}, tmp_path / f"{name}.safetensors")
    a, b = (lm.open_checkpoint(tmp_path / f"{name}.safetensors")[name] for name in "ab")
    report = reported(one((8, 8)), {"w": np.concatenate([a, b])})
    (row,) = report.loaded
    assert [*map(stored, row.tensors)] == [("a", a.file, "float32", 128), ("b", b.file, "float16", 64)]
    assert row.needed_nbytes == report.read_nbytes == 128 + 64
    assert list(report.files) == [a.file, b.file]
    assert "loaded: a of a.safetensors and 1 more" in repr(report)
    twice = reported(one((2, 4, 8)), {"w": np.stack([a, a])})
    assert [tensor.name for tensor in twice.rows[0].tensors] == ["a"]
    assert twice.needed_nbytes == 256
    halves = reported(one((4, 8)), {"w": np.concatenate([a[:, 4:], np.zeros((4, 4), "float32")], axis=1)})
    assert halves.needed_nbytes == 64, "an array in memory is in no file"
    assert list(halves.files) == [a.file]


def test_what_is_broadcast_is_needed_once_and_a_tensor_for_two_variables_twice(tmp_path: Path) -> None:
    path, ckpt = saved(tmp_path, tensors())
    report = reported(one((5, 32)), {"w": np.broadcast_to(ckpt["bias"], (5, 32))})
    assert report.needed_nbytes == report.read_nbytes == 32 * 4
    tied = lm.build_abstract(lambda: {"embedding": jnp.zeros((16, 32)), "output": jnp.zeros((32, 16))})
    report = reported(tied, {"embedding": ckpt["kernel"], "output": ckpt["kernel"].T})
    assert report.needed_nbytes == report.read_nbytes == 2 * 16 * 32 * 4
    assert report.files == {str(path): path.stat().st_size}


def test_keys_are_counted_as_key_data(tmp_path: Path, mesh8: Mesh) -> None:
    _, ckpt = saved(tmp_path, {"key": np.arange(16, dtype="uint32").reshape(8, 2)})
    abstract = lm.build_abstract(lambda key: {"key": jax.random.split(key, 8)}, jax.random.key(0))
    report = reported(abstract.shard(mesh8, {"key": P("model")}), ckpt)
    (row,) = report.loaded
    assert (row.dtype, row.shape, row.tensors[0].dtype) == ("key<fry>", (8,), "uint32")
    assert row.nbytes == row.needed_nbytes == report.read_nbytes == 64


def test_arrays_in_memory_are_loaded_from_no_file(abstract: Model) -> None:
    report = reported(abstract, tensors(mask=None), initialize="missing")
    assert [row.path for row in report.loaded] == ["bias", "head", "kernel"]
    assert [*map(stored, report.loaded[0].tensors)] == [("bias", "", "float32", 128)]
    assert [row.path for row in report.constants] == ["mask"]
    assert report.needed_nbytes == report.read_nbytes == 0
    assert report.gb_per_second is None
    assert report.files == {}


def test_everything_that_can_become_of_a_tensor(tmp_path: Path, mesh8: Mesh, abstract: Model) -> None:
    changes = {"mask": None, "kernel": np.zeros((8, 32), "float32"), "head": None, "extra": np.zeros((3, 5), "float16")}
    path, ckpt = saved(tmp_path, tensors(**changes))
    sharded = abstract.shard(mesh8, RULES)
    with pytest.warns(lm.LazyModelWarning, match="strict=False leaves out"):
        report = reported(sharded, ckpt, initialize="missing", strict=False)
    assert [row.path for row in report.loaded] == ["bias"]
    assert [(row.path, row.initializer) for row in report.initialized] == [("head", "uniform"), ("kernel", "normal")]
    assert [row.path for row in report.constants] == ["mask"]
    assert [*map(stored, report.unused)] == [("extra", str(path), "float16", 30)]
    (mismatch,) = report.mismatched
    assert (mismatch.path, mismatch.expected, mismatch.found) == ("kernel", (16, 32), (8, 32))
    assert stored(mismatch.tensor) == ("kernel", str(path), "float32", 8 * 32 * 4)
    assert report.needed_nbytes == report.read_nbytes == 32 * 4
    everything = reported(sharded, ckpt, initialize="all")
    assert [tensor.name for tensor in everything.unused] == list(ckpt), "the checkpoint is ignored"
    assert len(everything.initialized) == 3

    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["rows"][0]["tensors"] == [{"name": "bias", "file": str(path), "dtype": "float32", "nbytes": 128}]
    assert data["mismatched"][0]["expected"] == [16, 32]
    assert data["files"] == {str(path): path.stat().st_size}
    assert data["gb_per_second"] == report.gb_per_second
    assert everything.to_dict()["gb_per_second"] is None
    assert pickle.loads(pickle.dumps(report)) == report, "it holds no tensor, array or device"


def test_unused_tensors_need_not_be_readable(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["w"] = np.ones((4, 8), "float32")
        file["vocabulary"] = "not numbers"
    ckpt = lm.open_checkpoint(tmp_path / "model.weights.h5")
    reports: list[lm.LoadReport] = []
    with pytest.warns(lm.LazyModelWarning, match="'vocabulary'"):
        one((4, 8)).materialize(ckpt, strict=False, report=reports.append)
    assert [*map(stored, reports[0].unused)] == [("vocabulary", str(tmp_path / "model.weights.h5"), "", None)]
    assert "unused: 1 tensor, 0 B: vocabulary" in repr(reports[0])


def test_unused_views_and_what_a_mapping_leaves_count_their_own_bytes(tmp_path: Path) -> None:
    path, ckpt = saved(tmp_path, tensors() | {"rope": np.zeros(3, np.float16)})
    left, right = np.split(ckpt["kernel"], [8], axis=1)
    with pytest.warns(lm.LazyModelWarning, match="'right'"):
        report = reported(one((16, 8)), {"w": left, "right": right}, strict=False)
    assert [(tensor.name, tensor.nbytes) for tensor in report.unused] == [("right", 16 * 24 * 4)]
    mapped = lm.map_checkpoint(ckpt, lambda tensors: {"w": tensors["kernel"].T})
    report = reported(one((32, 16)), mapped)
    unused = {tensor.name: stored(tensor) for tensor in report.unused}
    assert set(unused) == {"bias", "head", "mask", "rope"} and unused["rope"] == ("rope", str(path), "float16", 6)


def test_what_was_fetched_from_a_server_is_counted(mesh8: Mesh, object_server: ObjectServer, abstract: Model) -> None:
    path, local = saved(object_server.root, tensors())
    object_server.faults(["503"], requests=[2])  # the first asks for the header
    reports: list[lm.LoadReport] = []
    url = object_server.url(path.name)
    checkpoint, sharded, recorder = lm.open_checkpoint(url), abstract.shard(mesh8, RULES), Recorder()
    model = sharded.materialize(checkpoint, progress=recorder, report=reports.append)
    assert all((np.asarray(model[name]) == local[name].read()).all() for name in local)
    (report,) = reports
    counted = object_server.counters()
    # Besides: the header, and whether a config.json calls it quantized.
    assert report.retries == 1 and report.requests == counted["requests"] - 2
    assert report.fetched_nbytes == report.needed_nbytes == report.read_nbytes
    assert report.files == {url: path.stat().st_size}
    fetched = f"{report.fetched_nbytes / 1024:.2f} KiB in {report.requests} requests, 1 of them again"
    assert f"fetched: {fetched}" in str(report)
    assert recorder.calls[0][2] == f"init: materializing 4 variables from {url.rpartition('/')[0]}"
    path.unlink()


# --- how it is asked for ----------------------------------------------------------------------------------------------


def test_true_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], abstract: Model) -> None:
    _, ckpt = saved(tmp_path, tensors())
    for silent in (None, False):
        abstract.materialize(ckpt, report=silent)
    assert capsys.readouterr().out == ""
    abstract.materialize(ckpt, report=True)
    assert capsys.readouterr().out.startswith("init: materialized 4 variables, 3.14 KiB, in ")
    with pytest.raises(lm.LazyModelError, match=r"report is .*got 'yes'"):
        abstract.materialize(report="yes")  # pyright: ignore[reportArgumentType]


def test_a_failing_load_reports_only_its_error(tmp_path: Path, abstract: Model) -> None:
    path, ckpt = saved(tmp_path, tensors())
    path.write_bytes(b"")
    reports: list[lm.LoadReport] = []
    with pytest.raises(lm.CheckpointError):
        abstract.materialize(ckpt, report=reports.append)
    assert reports == []


# --- as a table -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


class Example:
    """Reports of any rows, made of a real one that has one of each kind."""

    def __init__(self) -> None:
        model = lm.build_abstract(lambda: {"a": jnp.zeros((512, 512)), "head": jnp.zeros(8), "mask": np.ones(4, "i4")})
        given = {"a": np.ones((512, 512), "f4"), "head": np.ones(16, "f4"), "extra": np.ones(1, "f4")}
        reports: list[lm.LoadReport] = []
        with pytest.warns(lm.LazyModelWarning):
            model.materialize(given, strict=False, initialize="missing", report=reports.append)
        ((self.row, *self.rest), (self.tensor,)) = reports[0].rows, reports[0].unused
        seconds = {"seconds": 2.5, "initialize_seconds": 0.5, "stream_seconds": 2.0}
        self.report = dataclasses.replace(reports[0], name="model", timeline=type(reports[0].timeline)(), **seconds)

    def stored(self, name: str, file: str, nbytes: int = 2**20) -> Any:
        return dataclasses.replace(self.tensor, name=name, file=file, nbytes=nbytes)

    def loaded(self, path: str, file: str = "/models/model.safetensors", tensor: str | None = None) -> Any:
        source = self.stored(path if tensor is None else tensor, file)
        return dataclasses.replace(self.row, path=path, tensors=(source,), needed_nbytes=2**20)

    def of(self, rows: list[Any], **changes: Any) -> lm.LoadReport:
        nbytes = sum(row.needed_nbytes for row in rows)
        values = {"unused": (), "mismatched": (), "needed_nbytes": nbytes, "read_nbytes": nbytes} | changes
        return dataclasses.replace(self.report, rows=tuple(rows), **values)


@pytest.fixture(scope="module")
def example() -> Example:
    return Example()


def test_the_table_folds_layers_and_sums_up(example: Example) -> None:
    files = [f"/models/model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    rows = [example.loaded(f"block_{i}/kernel", files[i // 6], f"layers.{i}.weight") for i in range(12)]
    unused = [example.stored(f"layers.{i}.rotary", files[0], 2**19) for i in range(12)]
    unused += [example.stored(name, files[0], 2**10) for name in "abcdefgh"]
    (mismatch,) = example.report.mismatched
    report = example.of(
        [*rows, *example.rest],
        unused=tuple(unused),
        mismatched=(dataclasses.replace(mismatch, tensor=example.stored("lm_head", files[0], 64)),),
        files={files[0]: 6 * 2**20, files[1]: None},
        read_nbytes=13 * 2**20,
        process_index=1,
        process_count=4,
    )
    lines = repr(report).splitlines()
    assert lines[0] == "model: materialized 14 variables, 12.00 MiB, in 2.50 s, by process 1 of 4"
    (blocks,) = [line for line in lines if line.startswith("block")]
    assert re.split(r"\s{2,}", blocks.strip()) == [
        "block_{0..11}/kernel", "12", "(512, 512)", "float32", "12.00 MiB",
        "loaded: layers.{0..11}.weight of model-{00001..00002}-of-00002.safetensors",
    ]  # fmt: skip
    (head,) = [line for line in lines if line.startswith("head")]
    assert head.endswith("initialized: fill")
    assert lines[-8:] == [
        "loaded: 12 variables, 12.00 MiB",
        "initialized: 1 variable, 32 B",
        "constant: 1 variable, 16 B",
        "read: 13.00 MiB of files, 12.00 MiB needed, 0.01 GB/s",
        "time: 0.50 s initializing, 2.00 s streaming",
        "unused: 20 tensors, 6.01 MiB: layers.{0..11}.rotary, a, b, c, d, e, f, g and 1 more",
        f"did not match: 1 tensor: 'head': expected shape (8,), found (16,) in tensor 'lm_head' of {files[0]}",
        f"files: {files[0]} (6.00 MiB), {files[1]} (size unknown)",
    ]


def test_hostile_names_are_shown_as_text(example: Example) -> None:
    name = "a[red]\x1b[31m<script>alert('x')</script>&amp;"
    tensor = example.stored(name, f"/models/{name}", 4)
    mismatch = dataclasses.replace(example.report.mismatched[0], path=name, tensor=tensor)
    row = example.loaded(name, f"/models/{name}")
    report = example.of([row], name=name, unused=(tensor,), mismatched=(mismatch,), files={name: 4})
    page, text = report._repr_html_(), repr(report)
    assert "<script" not in page
    assert page.count("a[red]\\x1b[31m&lt;script&gt;alert(") >= 5
    assert page.count("<tr>") == 2
    assert "\x1b" not in page + text
    assert "a[red]\\x1b[31m<script>" in text
