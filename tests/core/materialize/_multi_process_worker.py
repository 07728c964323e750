"""One of the processes of `test_multi_process`: goes through every scenario and asserts what comes of it here.

Run as `python _multi_process_worker.py PROCESS ADDRESS FOLDER`. Writes down for each scenario the traceback of what was
raised, and what the processes are compared by.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.compile_events import compile_events
from tests.core.materialize._variables import assert_shards_equal, bytes_read
from tests.processes import checking_always, join, published

PROCESSES = 2
DEVICES = 4  # of each process
BY_COLUMNS = P(None, "model")
RULES = {"embedding|head/kernel": P("model"), "up/kernel": BY_COLUMNS, "new/kernel": lm.Host(BY_COLUMNS), ".*bias": P()}
DRAWN = r"\(of keys and seeds ([0-9a-f]{8})\)"


def init(key: jax.Array) -> dict[str, Any]:
    """Variables sharded on the first axis, on the last, and replicated; a checkpoint has all but `new`."""
    keys = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(keys[0], (1024, 256)),
        "up": {"kernel": jax.random.normal(keys[1], (32, 16384)), "bias": jnp.ones((24,))},
        "head": {"kernel": jax.random.normal(keys[2], (256, 1024), jnp.bfloat16)},
        "new": {"kernel": jax.random.normal(keys[3], (64, 512)), "bias": jnp.zeros((7,))},
    }


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "embedding": rng.standard_normal((1024, 256)).astype("float32"),
        "up/kernel": rng.standard_normal((32, 16384)).astype("float32"),
        "up/bias": rng.standard_normal(24).astype("float32"),
        "head/kernel": rng.standard_normal((256, 1024)).astype(ml_dtypes.bfloat16),
    }


def matrices() -> dict[str, np.ndarray]:
    """For column slices: of 16 bytes and 1 KiB a row and device, and of rows shorter than a call is worth."""
    rng = np.random.default_rng(1)
    return {
        "narrow": rng.standard_normal((8192, 64)).astype(ml_dtypes.bfloat16),
        "wide": rng.standard_normal((512, 2048)).astype("float32"),
        "rows": rng.standard_normal((8, 256)).astype("float32"),
    }


def write_copies(folder: Path) -> None:
    """A copy of the checkpoint for each scenario and process, some with something wrong."""
    right = tensors()
    save_file(right, folder / "right.safetensors")
    for scenario in SCENARIOS:
        for process in range(PROCESSES):
            shutil.copy(folder / "right.safetensors", folder / f"{scenario}-{process}.safetensors")
    save_file(matrices(), folder / "columns.safetensors")
    save_file(right | {"up/bias": np.zeros(23, "float32")}, folder / "misshapen-1.safetensors")
    lacking = {name: value for name, value in right.items() if name != "head/kernel"}
    save_file(lacking, folder / "lacking-1.safetensors")
    save_file(right | {"up/bias": right["up/bias"].astype("float16")}, folder / "other_dtype-1.safetensors")
    for name in ("corrupt-1", "all_corrupt-0", "all_corrupt-1"):
        (folder / f"{name}.safetensors").write_bytes(b"\xff" * 1000)


class Scenarios:
    """What one process does, and what has to come of it; some return what JSON can hold."""

    def __init__(self, process: int, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.key = jax.random.key(3)
        self.local = lm.build_abstract(init, self.key)
        self.mesh = Mesh(np.array(jax.devices()), ("model",))
        self.shared = self.local.shard(self.mesh, RULES)

    def load(self) -> dict[str, Any]:
        """Everything goes well."""
        ckpt, right = self._open("load"), tensors()
        reports: list[lm.LoadReport] = []
        model = self._materialize(ckpt, report=reports.append)
        self._check(model)
        read, nbytes = reports[0].read_nbytes, sum(tensor.nbytes for tensor in right.values())
        assert read == self.shared.plan(ckpt).read_nbytes <= 0.55 * nbytes
        total = float(jax.jit(lambda tree: tree["up"]["kernel"].sum())(model))
        assert total == pytest.approx(right["up/kernel"].sum(dtype="float64"), abs=0.1)
        order: list[str] = []
        for path, array in self.shared.stream(ckpt, initialize="missing"):
            group, _, name = path.partition("/")
            whole = model[group][name] if name else model[group]
            assert array.sharding == whole.sharding
            for shard, other in zip(array.addressable_shards, whole.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(other.data))
            order.append(path)
        assert len(order) == 6
        return {"read": read, "order": order}

    def columns(self) -> dict[str, Any]:
        """Matrices of which every device needs a few bytes of every row."""
        values, path = matrices(), self.folder / "columns.safetensors"
        empty = lm.build_abstract(lambda: {name: jnp.zeros(v.shape, v.dtype) for name, v in values.items()})
        ckpt = lm.open_checkpoint(path)
        reports: list[lm.LoadReport] = []
        arrays = empty.shard(self.mesh, {".*": BY_COLUMNS}).materialize(ckpt, report=reports.append)
        for name, array in arrays.items():
            assert_shards_equal(array, values[name])
        (report,) = reports
        assert (report.process_index, report.process_count) == (self.process, PROCESSES)
        needed = {name: value.nbytes // PROCESSES for name, value in values.items()}
        assert {row.path: row.needed_nbytes for row in report.rows} == needed
        assert report.needed_nbytes == sum(needed.values())
        assert report.read_nbytes == bytes_read(ckpt)
        assert report.files == {str(path): path.stat().st_size}
        with ckpt["narrow"].source.reader.mapped() as memory:
            mapped = memory is not None
        # Of everything but the process itself all reports say the same.
        own = {"process_index", "read_nbytes", "timeline", "gb_per_second", "seconds"}
        own |= {"initialize_seconds", "stream_seconds"}
        same = {name: value for name, value in report.to_dict().items() if name not in own}
        return {"read": report.read_nbytes, "mapped": mapped, "report": same}

    def live(self) -> None:
        """A live model that both processes hold goes to other shardings."""
        values = matrices()
        empty = lm.build_abstract(lambda: {name: jnp.zeros(v.shape, v.dtype) for name, v in values.items()})
        rows, columns = (empty.shard(self.mesh, {".*": spec}) for spec in (P("model"), BY_COLUMNS))
        model = columns.materialize(rows.materialize(values))
        for name, array in model.items():
            assert array.sharding.spec == BY_COLUMNS
            assert_shards_equal(array, values[name])

    def truncated(self) -> None:
        """The file of process 1 loses its end after it was opened; found while streaming."""
        ckpt = self._open("truncated")
        if self.process == 1:
            os.truncate(self._copy("truncated"), self._copy("truncated").stat().st_size // 2)
        with self._failure_of(1, r"truncated-1\.safetensors changed while it was being read"):
            self._materialize(ckpt)

    def missing(self) -> None:
        """The file of process 0 is deleted after it was opened."""
        ckpt = self._open("missing")
        if self.process == 0:
            self._copy("missing").unlink()
        with self._failure_of(0, rf"cannot open {self.folder}/missing-0\.safetensors: No such file or directory"):
            self._materialize(ckpt)

    def both_missing(self) -> None:
        """Every process fails: each for itself."""
        ckpt = self._open("both_missing")
        self._copy("both_missing").unlink()
        with self._failure_of(self.process, rf"both_missing-{self.process}\.safetensors: No such file"):
            self._materialize(ckpt)

    def misshapen(self) -> None:
        """The file of process 1 is that of another configuration; found before anything is read."""
        ckpt = self._open("misshapen")
        with self._failure_of(1, r"'up/bias': expected shape \(24,\), found \(23,\) in tensor 'up/bias' of"):
            self._materialize(ckpt)
        assert bytes_read(ckpt) == 0

    def corrupt(self) -> None:
        """The file of process 1 is no checkpoint; it never comes to materialize."""
        with self._failure_of(1, r"corrupt-1\.safetensors"):
            self._materialize("corrupt")

    def all_corrupt(self) -> None:
        """No process can open its file, which concerns nobody else; all of them fall back on another one."""
        with self._failure_of(self.process, rf"all_corrupt-{self.process}\.safetensors"):
            self._materialize("all_corrupt")
        self._materialize("load")

    def fallback(self) -> None:
        """Process 1 alone falls back on another file: process 0 is told, and then all go on in step."""
        with self._failure_of(1, r"corrupt-1\.safetensors"):
            ckpt = self._open("corrupt")
            self._materialize(ckpt)
        self._materialize("load")

    def lacking(self) -> None:
        """The file of process 1 lacks a tensor: fine for itself, but a model of two halves."""
        first = rf"process 0 would load 4 variables and initialize 2 {DRAWN}: new/bias, new/kernel, "
        second = rf"process 1 would load 3 variables and initialize 3 {DRAWN}: head/kernel, new/bias, new/kernel\."
        self._refused(lambda: self._materialize("lacking"), first + second)

    def other_dtype(self) -> None:
        """The file of process 1 has the same tensors in another dtype."""
        each = r"process %d would read \S*/other_dtype-%d\.safetensors \([\d,]+ bytes, "
        self._refused(lambda: self._materialize("other_dtype"), f"{each % (0, 0)}.*{each % (1, 1)}")

    def other_key(self) -> None:
        """The processes draw initial values from keys of their own."""
        model = lm.build_abstract(init, jax.random.key(self.process)).shard(self.mesh, RULES)
        message = self._refused(
            model.materialize, rf"initialize 6 {DRAWN}: embedding, .*initialize 6 {DRAWN}: embedding"
        )
        assert len(set(re.findall(DRAWN, message))) == 2

    def other_table(self) -> None:
        """They hold a small array of their own."""
        table = np.full(8, self.process)
        model = lm.build_abstract(lambda: {"table": table}).shard(self.mesh, {"table": P("model")})
        self._refused(model.materialize, "process 0 would load 1 variables")

    def late(self) -> None:
        """Process 1 comes when process 0 has been seen waiting for it."""

        def is_waiting() -> bool:
            keys = published()
            points = {key.split("reports/")[0] for key in keys if key.endswith("reports/0")}
            return any(f"{point}reports/1" not in keys and f"{point}said" not in keys for point in points)

        if self.process == 1:
            until(is_waiting)
        self._check(self._materialize("load"))

    def stops(self) -> None:
        """Process 1 cannot read its file; process 0, which has begun, is given time to hear of it."""
        ckpt = self._open("stops")
        if self.process == 1:
            self._copy("stops").unlink()

        def is_known() -> bool:
            return any("stops-1.safetensors" in text for key, text in published().items() if key.endswith("failed"))

        def report(done: int, total: int) -> None:
            if self.process == 0 and done:
                until(is_known)

        with checking_always(), self._failure_of(1, r"stops-1\.safetensors"):
            self._materialize(ckpt, progress=report)
        # It was told after the first of what is initialized, which comes before what is read.
        assert bytes_read(ckpt) == 0

    def progress(self) -> None:
        """An error that is not about the checkpoint, in process 0."""

        def report(done: int, total: int) -> None:
            if self.process == 0 and done:
                raise ValueError("no room on the screen")

        with self._failure_of(0, "no room on the screen", ValueError):
            self._materialize("load", progress=report)

    def compiled(self) -> None:
        """What is called with the model is compiled beside the stream, in all processes."""
        step = jax.jit(lambda tree, x: (x @ tree["up"]["kernel"]).sum())
        x = np.ones((4, 32), "f")
        model = self._materialize("load", compile=lm.Compile(step, x))
        with compile_events() as events:
            result = float(step(model, x))
        assert result == pytest.approx(4 * tensors()["up/kernel"].sum(dtype="float64"), abs=0.5)
        assert events == []

    def uncompilable(self) -> None:
        """The compiler of process 1 refuses."""
        step = Refused() if self.process == 1 else jax.jit(lambda tree: tree["up"]["bias"].sum())
        compile = lm.Compile(step).of(lambda model: (model,))
        with self._failure_of(1, r"needs 20\.00 GiB on a device, according to the compiler", lm.DoesNotFitError):
            self._materialize("load", compile=compile)

    def unsharded(self) -> None:
        """Every process has a model to itself."""
        self._check(self.local.materialize(self._open("load"), initialize="missing"), shards=1)

    def alone(self) -> None:
        """Only process 0 materializes, and fails; nobody else needs to know."""
        if self.process == 0:
            ckpt = self._open("alone")
            self._copy("alone").unlink()
            with self._failure_of(0, "No such file or directory"):
                self.local.materialize(ckpt, initialize="missing")

    def under_a_mesh(self) -> None:
        """The caller has set another mesh, and forbids transfers that nobody asked for."""
        mesh = jax.make_mesh((PROCESSES, DEVICES), ("a", "b"))
        with jax.set_mesh(mesh), jax.transfer_guard_device_to_host("disallow"):
            model = self._materialize("load")
        self._check(model)

    # What they share

    def _copy(self, scenario: str) -> Path:
        """This process's own copy of the checkpoint."""
        return self.folder / f"{scenario}-{self.process}.safetensors"

    def _open(self, scenario: str) -> lm.Checkpoint:
        return lm.open_checkpoint(self._copy(scenario))

    def _materialize(self, checkpoint: str | lm.Checkpoint, **options: Any) -> Any:
        """The shared model of a checkpoint, or of this process's copy of one, and of initial values."""
        given = self._open(checkpoint) if isinstance(checkpoint, str) else checkpoint
        return self.shared.materialize(given, initialize="missing", **options)

    @contextlib.contextmanager
    def _failure_of(self, failing: int, message: str, error: type[Exception] = lm.CheckpointError) -> Iterator[None]:
        """One process raises its own error, and the others a report of it."""
        own = self.process == failing
        with pytest.raises(error if own else lm.CheckpointError, match=message) as raised:
            yield
        report = f"process {failing} failed, so nothing was materialized here either: "
        assert str(raised.value).startswith("process" if own else report) != own

    def _refused(self, materialize: Callable[[], Any], message: str) -> str:
        """All processes find that they would not make the same model."""
        with pytest.raises(lm.CheckpointError, match=message) as raised:
            materialize()
        return str(raised.value)

    def _check(self, model: Any, shards: int = DEVICES) -> None:
        """Compares every shard on this process's devices with the file, or with eager initialization."""
        expected = jax.tree.map(np.asarray, init(self.key))
        for name, value in tensors().items():
            outer, _, inner = name.rpartition("/")
            (expected[outer] if outer else expected)[inner] = value
        arrays = jax.tree.leaves(model)
        assert [len(array.addressable_shards) for array in arrays] == [shards] * 6
        for array, value in zip(arrays, jax.tree.leaves(expected), strict=True):
            assert_shards_equal(array, value)


SCENARIOS = [name for name in vars(Scenarios) if not name.startswith("_")]


class Refused:
    """A jitted function that this process cannot compile."""

    __name__ = "<lambda>"

    def __call__(self, tree: Any) -> None: ...

    def lower(self, tree: Any) -> Any:
        lowered = jax.jit(lambda tree: tree["up"]["bias"].sum()).lower(tree)
        self.args_info, self.out_info, self.in_avals = lowered.args_info, lowered.out_info, lowered.in_avals
        return self

    def compile(self) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20.00G of 15.75G hbm.")


def until(condition: Callable[[], bool], patience: float = 30) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "what this process waits for does not happen"
        time.sleep(0.02)


def main() -> None:
    process, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    join(process, PROCESSES, address, DEVICES, between_checks=1000.0)  # what checks find is what `stops` is about
    assert jax.device_count() == PROCESSES * DEVICES and jax.local_device_count() == DEVICES
    scenarios = Scenarios(process, folder)
    outcomes: dict[str, dict[str, Any]] = {}
    for name in SCENARIOS:
        try:
            outcomes[name] = {"wrong": "", "found": getattr(scenarios, name)()}
        except BaseException:
            outcomes[name] = {"wrong": traceback.format_exc()}
    # No process was left behind or ran ahead: the next collective operation is the same one everywhere. It is one over
    # all devices, and waited for on all of them: with one still in flight in a process that ends, another one hangs.
    sharding = NamedSharding(scenarios.mesh, P("model"))
    ones = jax.make_array_from_callback((jax.device_count(),), sharding, lambda index: np.ones(1))
    assert jax.block_until_ready(jax.jit(jnp.sum)(ones)) == jax.device_count()
    (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
