"""One of the processes of `test_multi_process`: runs every scenario, and writes down what came of each.

Responsible for doing and measuring; what is right is asserted by the test module, which also writes the files. Run as
`python _multi_process_worker.py PROCESS ADDRESS FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import lazymodel as lm
from lazymodel._devices import agreement, coordination
from lazymodel._tensors.source import BYTES_READ
from tests.processes import join

PROCESSES = 2
DEVICES = 4  # of each process
COLUMNS = P(None, "model")
RULES = {"embedding|head/kernel": P("model"), "up/kernel": COLUMNS, "new/kernel": lm.Host(COLUMNS), ".*bias": P()}


def init(key: jax.Array) -> dict[str, Any]:
    """Variables sharded on the first axis, on the last, and replicated; a checkpoint has all but `new`."""
    keys = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(keys[0], (1024, 256)),
        "up": {"kernel": jax.random.normal(keys[1], (32, 16384)), "bias": jnp.ones((24,))},
        "head": {"kernel": jax.random.normal(keys[2], (256, 1024), jnp.bfloat16)},
        "new": {"kernel": jax.random.normal(keys[3], (64, 512)), "bias": jnp.zeros((7,))},
    }


def columns() -> dict[str, Any]:
    return {"narrow": jnp.zeros((8192, 64), jnp.bfloat16), "wide": jnp.zeros((512, 2048)), "rows": jnp.zeros((8, 256))}


class Scenarios:
    """What one process does; every method returns something that JSON can hold."""

    def __init__(self, process: int, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.key = jax.random.key(3)
        self.local = lm.build_abstract(init, self.key)
        self.shared = self.local.shard(Mesh(np.array(jax.devices()), ("model",)), RULES)

    def copy(self, scenario: str) -> Path:
        """This process's own copy of the checkpoint."""
        return self.folder / f"{scenario}-{self.process}.safetensors"

    def outcome(self, materialize: Callable[[], Any]) -> str:
        """The message of the CheckpointError; what else is raised ends the process."""
        try:
            materialize()
        except lm.CheckpointError as error:
            return str(error)
        return "materialized"

    def load(self) -> dict[str, Any]:
        """Everything goes well."""
        path = self.copy("load")
        ckpt = lm.open_checkpoint(path)
        before = BYTES_READ.count
        model = self.shared.materialize(ckpt, initialize="missing")
        read = BYTES_READ.count - before
        return {
            "read": read,
            "planned": self.shared.plan(ckpt).read_nbytes,
            "shards": self.check(model, path, shards=DEVICES),
            "sum": float(jax.jit(lambda tree: tree["up"]["kernel"].sum())(model)),
            "streamed": self.streamed(ckpt, model),
        }

    def streamed(self, ckpt: lm.Checkpoint, model: Any) -> list[str]:
        """The paths in the order in which `stream` yields them, with the shards of the materialized model."""
        order: list[str] = []
        for path, array in self.shared.stream(ckpt, initialize="missing"):
            group, _, name = path.partition("/")
            whole = model[group][name] if name else model[group]
            assert array.sharding == whole.sharding
            for shard, other in zip(array.addressable_shards, whole.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(other.data))
            order.append(path)
        return order

    def columns(self) -> dict[str, Any]:
        """Matrices of which every device needs a few bytes of every row."""
        path = self.folder / "columns.safetensors"
        rules = {".*": P(None, "model")}
        model = lm.build_abstract(columns).shard(Mesh(np.array(jax.devices()), ("model",)), rules)
        ckpt = lm.open_checkpoint(path)
        reports: list[lm.LoadReport] = []
        before = BYTES_READ.count
        arrays = model.materialize(ckpt, report=reports.append)
        read = BYTES_READ.count - before
        expected = load_file(path)
        for name, array in arrays.items():
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[name][shard.index])
        with ckpt["narrow"].leaf.source.mapped() as memory:
            mapped = memory is not None
        return {"read": read, "mapped": mapped, "report": reports[0].to_dict()}

    def truncated(self) -> str:
        """The file of process 1 loses its end after it was opened; found while streaming."""
        path = self.copy("truncated")
        ckpt = lm.open_checkpoint(path)
        if self.process == 1:
            os.truncate(path, path.stat().st_size // 2)
        return self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing"))

    def missing(self) -> str:
        """The file of process 0 is deleted after it was opened."""
        path = self.copy("missing")
        ckpt = lm.open_checkpoint(path)
        if self.process == 0:
            path.unlink()
        return self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing"))

    def both_missing(self) -> str:
        """Every process fails: each for itself."""
        ckpt = lm.open_checkpoint(self.copy("both_missing"))
        self.copy("both_missing").unlink()
        return self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing"))

    def misshapen(self) -> str:
        """The file of process 1 is that of another configuration; found before anything is read."""
        ckpt = lm.open_checkpoint(self.copy("misshapen"))
        before = BYTES_READ.count
        message = self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing"))
        assert BYTES_READ.count == before
        return message

    def lacking(self) -> str:
        """The file of process 1 lacks a tensor: fine for itself, but a model of two halves."""
        ckpt = lm.open_checkpoint(self.copy("lacking"))
        return self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing"))

    def corrupt(self) -> str:
        """The file of process 1 is no checkpoint; it never comes to materialize."""
        return self.outcome(lambda: self.shared.materialize(self.open("corrupt"), initialize="missing"))

    def open(self, scenario: str) -> lm.Checkpoint:
        return lm.open_checkpoint(self.copy(scenario))

    def all_corrupt(self) -> list[str]:
        """No process can open its file; all of them fall back on another one."""
        first = self.outcome(lambda: self.shared.materialize(self.open("all_corrupt"), initialize="missing"))
        return [first, self.outcome(lambda: self.shared.materialize(self.open("load"), initialize="missing"))]

    def fallback(self) -> list[str]:
        """Process 1 alone falls back on another file, and process 0 has loaded its half of the first one."""
        try:
            ckpt = self.open("corrupt")
        except lm.CheckpointError:
            ckpt = self.open("load")
        first = self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing")) if self.process == 0 else ""
        return [first, self.outcome(lambda: self.shared.materialize(self.open("load"), initialize="missing"))]

    def other_dtype(self) -> str:
        """The file of process 1 has the same tensors in another dtype."""
        return self.outcome(lambda: self.shared.materialize(self.open("other_dtype"), initialize="missing"))

    def other_key(self) -> list[str]:
        """The processes draw initial values from keys, and hold a small array, of their own."""
        mesh, table = Mesh(np.array(jax.devices()), ("model",)), np.full(8, self.process)
        keyed = lm.build_abstract(init, jax.random.key(self.process)).shard(mesh, RULES)
        constant = lm.build_abstract(lambda: {"table": table}).shard(mesh, {"table": P("model")})
        return [self.outcome(keyed.materialize), self.outcome(constant.materialize)]

    def late(self) -> int:
        """Process 1 comes when process 0 has been seen waiting for it."""
        path = self.copy("load")
        ckpt = lm.open_checkpoint(path)
        if self.process == 1:
            until(self.is_waiting)
        return self.check(self.shared.materialize(ckpt, initialize="missing"), path, shards=DEVICES)

    def stops(self) -> list[Any]:
        """Process 1 cannot read its file; process 0, which has begun, is given time to hear of it."""
        ckpt = self.open("stops")
        if self.process == 1:
            self.copy("stops").unlink()

        def report(done: int, total: int) -> None:
            if self.process == 0 and done:
                until(lambda: self.is_said("stops-1.safetensors"))

        before = BYTES_READ.count
        with mock.patch.object(agreement, "_BETWEEN_CHECKS", 0.0):
            error = self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing", progress=report))
        return [error, BYTES_READ.count - before]

    def is_said(self, text: str) -> bool:
        """Whether the verdict on a stage has this text in it."""
        store = coordination.run_store()
        assert store is not None
        return any(text in value for key, value in store.folder("lazymodel/stages/").items() if key.endswith("verdict"))

    def is_waiting(self) -> bool:
        """Whether process 0 is at the end of a stage to which nobody else has come."""
        store = coordination.run_store()
        assert store is not None
        keys = store.folder("lazymodel/stages/")
        stages = {key.split("reports/")[0] for key in keys if key.endswith("reports/0")}
        return any(f"{stage}reports/1" not in keys and f"{stage}verdict" not in keys for stage in stages)

    def progress(self) -> str:
        """An error that is not about the checkpoint, in process 0."""
        ckpt = lm.open_checkpoint(self.copy("load"))

        def report(done: int, total: int) -> None:
            if self.process == 0 and done:
                raise ValueError("no room on the screen")

        try:
            return self.outcome(lambda: self.shared.materialize(ckpt, initialize="missing", progress=report))
        except ValueError as error:
            return f"ValueError: {error}"

    def compiled(self) -> list[Any]:
        """What is called with the model is compiled beside the stream, in all processes."""
        step = jax.jit(lambda tree, x: (x @ tree["up"]["kernel"]).sum())
        x = np.ones((4, 32), "f")
        ckpt = lm.open_checkpoint(self.copy("load"))
        model = self.shared.materialize(ckpt, initialize="missing", compile=lm.Compile(step, x))
        events: list[str] = []

        def listen(event: str, _: float, **details: Any) -> None:
            events.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        result = float(step(model, x))
        jax.monitoring.unregister_event_duration_listener(listen)
        return [result, [event for event in events if "compile" in event]]

    def refused(self) -> str:
        """The compiler of process 1 refuses."""
        step = Refused() if self.process == 1 else jax.jit(lambda tree: tree["up"]["bias"].sum())
        ckpt = lm.open_checkpoint(self.copy("load"))
        try:
            return self.outcome(
                lambda: self.shared.materialize(ckpt, initialize="missing", compile=lm.Compile(step).of(lambda m: (m,)))
            )
        except lm.DoesNotFitError as error:
            return f"DoesNotFitError: {error}"

    def unsharded(self) -> int:
        """Every process has a model to itself."""
        path = self.copy("load")
        return self.check(self.local.materialize(lm.open_checkpoint(path), initialize="missing"), path, shards=1)

    def alone(self) -> str:
        """Only process 0 materializes, and fails; nobody else needs to know."""
        if self.process != 0:
            return "did something else"
        ckpt = lm.open_checkpoint(self.copy("alone"))
        self.copy("alone").unlink()
        return self.outcome(lambda: self.local.materialize(ckpt, initialize="missing"))

    def under_a_mesh(self) -> int:
        """The caller has set another mesh, and forbids transfers that nobody asked for."""
        path = self.copy("load")
        mesh = jax.make_mesh((PROCESSES, DEVICES), ("a", "b"))
        with jax.set_mesh(mesh), jax.transfer_guard_device_to_host("disallow"):
            model = self.shared.materialize(lm.open_checkpoint(path), initialize="missing")
        return self.check(model, path, shards=DEVICES)

    def check(self, model: Any, path: Path, *, shards: int) -> int:
        """Compares every shard on this process's devices with the file, or with eager initialization; counts them."""
        expected = jax.tree.map(np.asarray, init(self.key))
        for name, value in load_file(path).items():
            outer, _, inner = name.rpartition("/")
            (expected[outer] if outer else expected)[inner] = value

        def compare(array: jax.Array, value: np.ndarray) -> int:
            assert array.dtype == value.dtype and array.shape == value.shape
            assert len(array.addressable_shards) == shards
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
            return shards

        return sum(jax.tree.leaves(jax.tree.map(compare, model, expected)))


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
    join(process, PROCESSES, address, DEVICES)
    agreement._BETWEEN_CHECKS = 1000.0  # scenarios are about one thing each; `stops` is about this
    assert jax.device_count() == PROCESSES * DEVICES and jax.local_device_count() == DEVICES
    scenarios = Scenarios(process, folder)
    outcomes = {
        scenario.__name__: scenario()
        for scenario in (
            scenarios.load,
            scenarios.columns,
            scenarios.truncated,
            scenarios.missing,
            scenarios.both_missing,
            scenarios.misshapen,
            scenarios.lacking,
            scenarios.corrupt,
            scenarios.all_corrupt,
            scenarios.fallback,
            scenarios.other_dtype,
            scenarios.other_key,
            scenarios.late,
            scenarios.stops,
            scenarios.progress,
            scenarios.compiled,
            scenarios.refused,
            scenarios.unsharded,
            scenarios.alone,
            scenarios.under_a_mesh,
        )
    }
    # No process was left behind or ran ahead: the next collective operation is the same one everywhere. It is one over
    # all devices, and waited for on all of them: with one still in flight in a process that ends, another one hangs.
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), P("model"))
    ones = jax.make_array_from_callback((jax.device_count(),), sharding, lambda index: np.ones(1))
    assert jax.block_until_ready(jax.jit(jnp.sum)(ones)) == jax.device_count()
    (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
