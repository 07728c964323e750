"""The load report: what was loaded from where, what was not, and bytes needed and read, exactly."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._materialize import materialize
from lazymodel._materialize.report import LoadRow
from lazymodel._show.text import format_bytes
from lazymodel._tensors.source import BYTES_READ
from lazymodel._tensors.stored import MismatchedTensor, StoredTensor
from tests.servers.object_server import ObjectServer

F32 = np.dtype("float32")


def init(key: jax.Array) -> dict[str, Any]:
    kernel_key, head_key = jax.random.split(key)
    return {
        "kernel": jax.random.normal(kernel_key, (16, 32)),
        "bias": jnp.zeros((32,)),
        "head": jax.random.uniform(head_key, (32, 8)),
        "mask": np.ones(4, "int32"),
    }


RULES = {"kernel": P(None, "model"), "bias": P("model"), "head": P(), "mask": P()}


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {
        "kernel": rng.standard_normal((16, 32)).astype("float32"),
        "bias": rng.standard_normal(32).astype("float32"),
        "head": rng.standard_normal((32, 8)).astype("float32"),
        "mask": np.arange(4, dtype="int32"),
    } | changes
    return {name: value for name, value in values.items() if value is not None}


def saved(folder: Path, **changes: Any) -> tuple[Path, lm.Checkpoint]:
    """A checkpoint with a tensor for every variable of `init`, but for the changes; None leaves one out."""
    path = folder / "model.safetensors"
    save_file(tensors(**changes), path)
    return path, lm.open_checkpoint(path)


def reported(abstract: lm.AbstractModel, checkpoint: Any = None, **arguments: Any) -> lm.LoadReport:
    reports: list[lm.LoadReport] = []
    before = BYTES_READ.count
    abstract.materialize(checkpoint, report=reports.append, **arguments)
    (report,) = reports
    assert report.read_nbytes == BYTES_READ.count - before
    return report


def one(shape: tuple[int, ...], dtype: Any = "float32", name: str = "w") -> lm.AbstractModel:
    """A model of a single variable."""
    return lm.build_abstract(lambda key: {name: jax.random.normal(key, shape).astype(dtype)}, jax.random.key(0))


# --- values ---


def test_a_sharded_load(tmp_path: Path, mesh8: Mesh) -> None:
    path, ckpt = saved(tmp_path)
    report = reported(lm.build_abstract(init, jax.random.key(0)).shard(mesh8, RULES), ckpt)
    nbytes = {name: tensor.nbytes for name, tensor in tensors().items()}
    assert (
        [row.path for row in report.rows] == [row.path for row in report.loaded] == ["bias", "head", "kernel", "mask"]
    )
    assert report.rows[2] == LoadRow(
        path="kernel",
        shape=(16, 32),
        dtype="float32",
        nbytes=16 * 32 * 4,
        action="load",
        tensors=(StoredTensor("kernel", str(path), "float32", 16 * 32 * 4),),
        needed_nbytes=16 * 32 * 4,
    )
    assert {row.path: row.needed_nbytes for row in report.rows} == nbytes, "what all eight hold alike counts once"
    assert report.needed_nbytes == report.read_nbytes == sum(nbytes.values())
    assert report.files == {str(path): path.stat().st_size}
    assert (report.name, report.process_index, report.process_count) == ("init", 0, 1)
    assert report.initialized == report.constants == report.unused == report.mismatched == ()
    assert 0 < report.stream_seconds <= report.seconds
    assert report.gb_per_second == report.read_nbytes / 1e9 / report.stream_seconds


def test_waiting_for_init_programs_is_not_streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only waiting for arrays moves: 1 s where they were loaded, 10 s where they were computed too."""
    clock = [0.0]
    wait = jax.block_until_ready

    def slowly(arrays: Any) -> Any:
        clock[0] += 10.0 if len(arrays) == 4 else 1.0
        return wait(arrays)

    _, checkpoint = saved(tmp_path, head=None)
    monkeypatch.setattr(materialize.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(materialize.jax, "block_until_ready", slowly)
    monkeypatch.setattr(materialize, "stream", stream_without_waiting)
    report = reported(lm.build_abstract(init, jax.random.key(0)), checkpoint, initialize="missing")
    assert (report.initialize_seconds, report.stream_seconds, report.seconds) == (10.0, 1.0, 11.0)


def stream_without_waiting(items: Any, **_: Any) -> Any:
    for item in items:
        yield item.path, jnp.asarray(np.asarray(item.tensor))


def test_needed_are_the_shards_of_the_devices_in_use(tmp_path: Path, mesh8: Mesh) -> None:
    """A mesh of two of the eight devices, and a variable on one of them."""
    save_file({"w": np.ones((8, 8), "float32"), "v": np.ones(8, "float32")}, tmp_path / "m.safetensors")
    mesh = Mesh(mesh8.devices.flat[:2], ("model",))
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((8, 8)), "v": jnp.zeros(8)})
    report = reported(abstract.shard(mesh, {"w": P("model"), "v": P()}), lm.open_checkpoint(tmp_path / "m.safetensors"))
    assert {row.path: row.needed_nbytes for row in report.rows} == {"w": 256, "v": 32}
    assert report.needed_nbytes == report.read_nbytes == 288


@pytest.mark.parametrize(("columns", "part"), [(8192, 2048), (64, 16)])
def test_a_column_slice_needs_and_reads_its_columns(tmp_path: Path, columns: int, part: int) -> None:
    save_file({"wide": np.ones((4, columns), "float32")}, tmp_path / "m.safetensors")
    wide = lm.open_checkpoint(tmp_path / "m.safetensors")["wide"]
    report = reported(one((4, part)), {"w": wide[:, :part]})
    assert report.needed_nbytes == 4 * part * 4
    # Without a map of the file, short gaps between rows are read as well.
    assert report.needed_nbytes <= report.read_nbytes <= 4 * columns * 4


def test_needed_is_counted_as_stored(tmp_path: Path, mesh8: Mesh) -> None:
    save_file({"w": np.ones((16, 32), ml_dtypes.bfloat16)}, tmp_path / "m.safetensors")
    report = reported(one((16, 32)).shard(mesh8, {"w": P("model")}), lm.open_checkpoint(tmp_path / "m.safetensors"))
    (row,) = report.loaded
    assert (row.dtype, row.tensors[0].dtype, row.nbytes) == ("float32", "bfloat16", 16 * 32 * 4)
    assert row.needed_nbytes == report.needed_nbytes == report.read_nbytes == 16 * 32 * 2
    assert "bfloat16 → float32" in repr(report)


def test_joined_tensors_are_all_named(tmp_path: Path) -> None:
    for name, dtype in (("a", F32), ("b", np.dtype("float16"))):
        save_file({name: np.ones((4, 8), dtype)}, tmp_path / f"{name}.safetensors")
    a = lm.open_checkpoint(tmp_path / "a.safetensors")["a"]
    b = lm.open_checkpoint(tmp_path / "b.safetensors")["b"]
    report = reported(one((8, 8)), {"w": np.concatenate([a, b])})
    (row,) = report.loaded
    assert [(tensor.name, tensor.dtype, tensor.nbytes) for tensor in row.tensors] == [
        ("a", "float32", 128),
        ("b", "float16", 64),
    ]
    assert row.needed_nbytes == report.read_nbytes == 128 + 64
    assert list(report.files) == [a.file, b.file]
    assert "loaded: a of a.safetensors and 1 more" in repr(report)
    twice = reported(one((2, 4, 8)), {"w": np.stack([a, a])})
    assert [tensor.name for tensor in twice.rows[0].tensors] == ["a"]
    assert twice.needed_nbytes == 256
    halves = reported(one((4, 8)), {"w": np.concatenate([a[:, 4:], np.zeros((4, 4), "float32")], axis=1)})
    assert halves.needed_nbytes == 64, "an array in memory is in no file"
    assert list(halves.files) == [a.file]


def test_what_is_broadcast_is_needed_once(tmp_path: Path) -> None:
    _, ckpt = saved(tmp_path)
    report = reported(one((5, 32)), {"w": np.broadcast_to(ckpt["bias"], (5, 32))})
    assert report.needed_nbytes == report.read_nbytes == 32 * 4


def test_a_tensor_for_two_variables_counts_twice(tmp_path: Path) -> None:
    path, ckpt = saved(tmp_path)
    tied = lm.build_abstract(lambda: {"embedding": jnp.zeros((16, 32)), "output": jnp.zeros((32, 16))})
    report = reported(tied, {"embedding": ckpt["kernel"], "output": ckpt["kernel"].T})
    assert report.needed_nbytes == report.read_nbytes == 2 * 16 * 32 * 4
    assert report.files == {str(path): path.stat().st_size}


def test_keys_are_counted_as_key_data(tmp_path: Path, mesh8: Mesh) -> None:
    save_file({"key": np.arange(16, dtype="uint32").reshape(8, 2)}, tmp_path / "m.safetensors")
    abstract = lm.build_abstract(lambda key: {"key": jax.random.split(key, 8)}, jax.random.key(0))
    report = reported(abstract.shard(mesh8, {"key": P("model")}), lm.open_checkpoint(tmp_path / "m.safetensors"))
    (row,) = report.loaded
    assert (row.dtype, row.shape, row.tensors[0].dtype) == ("key<fry>", (8,), "uint32")
    assert row.nbytes == row.needed_nbytes == report.read_nbytes == 64


def test_arrays_in_memory_are_loaded_from_no_file() -> None:
    report = reported(lm.build_abstract(init, jax.random.key(0)), tensors(mask=None), initialize="missing")
    assert [row.path for row in report.loaded] == ["bias", "head", "kernel"]
    assert report.loaded[0].tensors == (StoredTensor("bias", "", "float32", 128),)
    assert [row.path for row in report.constants] == ["mask"]
    assert report.needed_nbytes == report.read_nbytes == 0
    assert report.gb_per_second is None
    assert report.files == {}


def test_everything_that_can_become_of_a_tensor(tmp_path: Path, mesh8: Mesh) -> None:
    path, ckpt = saved(
        tmp_path, mask=None, kernel=np.zeros((8, 32), "float32"), head=None, extra=np.zeros((3, 5), "float16")
    )
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh8, RULES)
    with pytest.warns(lm.LazyModelWarning, match="strict=False leaves out"):
        report = reported(abstract, ckpt, initialize="missing", strict=False)
    assert [row.path for row in report.loaded] == ["bias"]
    assert [(row.path, row.initializer) for row in report.initialized] == [("head", "uniform"), ("kernel", "normal")]
    assert [row.path for row in report.constants] == ["mask"]
    assert report.unused == (StoredTensor("extra", str(path), "float16", 30),)
    kernel = StoredTensor("kernel", str(path), "float32", 8 * 32 * 4)
    assert report.mismatched == (MismatchedTensor("kernel", kernel, (16, 32), (8, 32)),)
    assert report.needed_nbytes == report.read_nbytes == 32 * 4
    everything = reported(abstract, ckpt, initialize="all")
    assert [tensor.name for tensor in everything.unused] == list(ckpt), "the checkpoint is ignored"
    assert len(everything.initialized) == 3


def test_unused_tensors_need_not_be_readable(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["w"] = np.ones((4, 8), "float32")
        file["vocabulary"] = "not numbers"
    with pytest.warns(lm.LazyModelWarning, match="'vocabulary'"):
        report = reported(one((4, 8)), lm.open_checkpoint(tmp_path / "model.weights.h5"), strict=False)
    assert report.unused == (StoredTensor("vocabulary", str(tmp_path / "model.weights.h5"), "", None),)
    assert "unused: 1 tensor, 0 B: vocabulary" in repr(report)


def test_unused_views_count_their_own_bytes(tmp_path: Path) -> None:
    _, ckpt = saved(tmp_path)
    left, right = np.split(ckpt["kernel"], [8], axis=1)
    with pytest.warns(lm.LazyModelWarning, match="'right'"):
        report = reported(one((16, 8)), {"w": left, "right": right}, strict=False)
    assert [(tensor.name, tensor.nbytes) for tensor in report.unused] == [("right", 16 * 24 * 4)]


# --- how it is asked for ---


def test_true_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, ckpt = saved(tmp_path)
    abstract = lm.build_abstract(init, jax.random.key(0))
    for silent in (None, False):
        abstract.materialize(ckpt, report=silent)
    assert capsys.readouterr().out == ""
    abstract.materialize(ckpt, report=True)
    assert capsys.readouterr().out.startswith("init: materialized 4 variables, 3.14 KiB, in ")


def test_a_failing_load_reports_only_its_error(tmp_path: Path) -> None:
    path, ckpt = saved(tmp_path)
    path.write_bytes(b"")
    reports: list[lm.LoadReport] = []
    with pytest.raises(lm.CheckpointError):
        lm.build_abstract(init, jax.random.key(0)).materialize(ckpt, report=reports.append)
    assert reports == []


def test_anything_else_is_refused_before_work_starts() -> None:
    with pytest.raises(lm.LazyModelError, match="report is True, None or a callable.*got 'yes'"):
        one((4,)).materialize(report="yes")  # pyright: ignore[reportArgumentType]


# --- as data and as a table ---


def report_of(rows: list[LoadRow], **changes: Any) -> lm.LoadReport:
    values: dict[str, Any] = {
        "name": "model",
        "process_index": 0,
        "process_count": 1,
        "rows": tuple(rows),
        "unused": (),
        "mismatched": (),
        "files": {},
        "needed_nbytes": sum(row.needed_nbytes for row in rows),
        "read_nbytes": sum(row.needed_nbytes for row in rows),
        "fetched_nbytes": 0,
        "requests": 0,
        "retries": 0,
        "seconds": 2.5,
        "initialize_seconds": 0.5,
        "stream_seconds": 2.0,
    }
    return lm.LoadReport(**(values | changes))


def loaded_row(path: str, file: str = "/models/model.safetensors", tensor: str | None = None) -> LoadRow:
    stored = StoredTensor(path if tensor is None else tensor, file, "float32", 2**20)
    return LoadRow(path, (512, 512), "float32", 2**20, "load", tensors=(stored,), needed_nbytes=2**20)


def test_json_round_trip(tmp_path: Path, mesh8: Mesh) -> None:
    path, ckpt = saved(tmp_path, kernel=np.zeros((8, 32), "float32"), extra=np.zeros(3, "float16"))
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh8, RULES)
    with pytest.warns(lm.LazyModelWarning):
        report = reported(abstract, ckpt, strict=False)
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["rows"][0]["tensors"] == [{"name": "bias", "file": str(path), "dtype": "float32", "nbytes": 128}]
    assert data["mismatched"][0]["expected"] == [16, 32]
    assert data["files"] == {str(path): path.stat().st_size}
    assert data["gb_per_second"] == report.gb_per_second
    assert json.loads(json.dumps(report_of([]).to_dict()))["gb_per_second"] is None
    assert pickle.loads(pickle.dumps(report)) == report, "it holds no tensor, array or device"


def test_the_table_folds_layers_and_sums_up() -> None:
    files = [f"/models/model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    rows = [loaded_row(f"block_{i}/kernel", files[i // 6], f"layers.{i}.weight") for i in range(12)]
    rows.append(LoadRow("head", (8,), "float32", 32, "initialize", initializer="zeros"))
    rows.append(LoadRow("mask", (4,), "int32", 16, "constant"))
    unused = [StoredTensor(f"layers.{i}.rotary", files[0], "float32", 2**19) for i in range(12)]
    unused += [StoredTensor(name, files[0], "float32", 2**10) for name in "abcdefgh"]
    mismatch = MismatchedTensor("head", StoredTensor("lm_head", files[0], "float32", 64), (8,), (16,))
    report = report_of(
        rows,
        unused=tuple(unused),
        mismatched=(mismatch,),
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
    assert head.endswith("initialized: zeros")
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


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_thousands_of_variables_fit_a_page() -> None:
    rows = [
        loaded_row(f"layer_{i}/expert_{j}/kernel", f"model-{i:05}.safetensors") for i in range(100) for j in range(100)
    ]
    rows += [loaded_row(f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}") for i in range(5000)]
    names = [f"unused_{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)]
    report = report_of(
        rows,
        unused=tuple(StoredTensor(name, "f", "float32", 4) for name in names),
        files={f"model-{i:05}.safetensors": 2**30 for i in range(100)},
    )
    lines = repr(report).splitlines()
    assert len(lines) < 60
    assert any(line.startswith("layer_{0..99}/expert_{0..99}/kernel") for line in lines)
    assert any(line.endswith(" and 592 more") for line in lines)
    assert any(line.endswith(" and 92 more") for line in lines)
    assert len(report.to_dict()["rows"]) == 15_000


HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>&amp;"


def hostile() -> lm.LoadReport:
    stored = StoredTensor(HOSTILE, f"/models/{HOSTILE}", "float32", 4)
    mismatch = MismatchedTensor(HOSTILE, stored, (1,), (2,))
    files: Mapping[str, int | None] = {HOSTILE: 4}
    row = loaded_row(HOSTILE, f"/models/{HOSTILE}")
    return report_of([row], name=HOSTILE, unused=(stored,), mismatched=(mismatch,), files=files)


def test_html_escapes_names() -> None:
    page = hostile()._repr_html_()
    assert "<script" not in page
    assert "\x1b" not in page
    assert page.count("a[red]\\x1b[31m&lt;script&gt;alert(") >= 5
    assert page.count("<tr>") == 2


def test_text_shows_names_as_they_are_without_control_characters() -> None:
    text = repr(hostile())
    assert "\x1b" not in text
    assert "a[red]\\x1b[31m<script>" in text


def test_a_report_on_nothing() -> None:
    report = report_of([])
    assert repr(report).splitlines() == [
        "model: materialized 0 variables, 0 B, in 2.50 s",
        "time: 0.50 s initializing, 2.00 s streaming",
    ]
    assert "<table" not in report._repr_html_()


def test_what_a_mapping_leaves_is_unused(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 2), np.float32), "rope": np.zeros(3, np.float16)}, tmp_path / "a.safetensors")
    mapped = lm.map_checkpoint(lm.open_checkpoint(tmp_path / "a.safetensors"), lambda w: {"kernel": w["w"].T})
    reports: list[lm.LoadReport] = []
    lm.build_abstract(lambda: {"kernel": jnp.zeros((2, 4))}).materialize(mapped, report=reports.append)
    assert [(tensor.name, tensor.nbytes) for tensor in reports[0].unused] == [("rope", 6)]
    assert reports[0].unused[0].file.endswith("a.safetensors")


def test_what_was_fetched_from_a_server_is_counted(mesh8: Mesh, object_server: ObjectServer, tmp_path: Path) -> None:
    path, local = saved(object_server.root)
    object_server.faults(["503"], requests=[2])  # the first asks for the header
    reports: list[lm.LoadReport] = []
    told: list[str] = []

    class Told:
        def start(self, total_nbytes: int, description: str) -> None:
            told.append(description)

        def advance(self, nbytes: int, description: str | None = None) -> None: ...

        def finish(self) -> None: ...

    url = object_server.url(path.name)
    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh8, RULES)
    model = abstract.materialize(lm.open_checkpoint(url), progress=Told(), report=reports.append)
    assert all((np.asarray(model[name]) == local[name].read()).all() for name in local)
    (report,) = reports
    counted = object_server.counters()
    # Besides: the header, and whether a config.json calls it quantized.
    assert report.retries == 1 and report.requests == counted["requests"] - 2
    assert report.fetched_nbytes == report.needed_nbytes == report.read_nbytes
    assert report.files == {url: path.stat().st_size}
    fetched = format_bytes(report.fetched_nbytes)
    assert f"fetched: {fetched} in {report.requests} requests, 1 of them again" in str(report)
    assert told == [f"init: materializing 4 variables from {url.rpartition('/')[0]}"]
    path.unlink()
