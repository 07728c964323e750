"""One of the processes of `test_exchange`: runs every scenario, and writes down what came of each.

Responsible for doing and measuring; what is right is asserted by the test module, which also saves `tensors`. Run as
`python _exchange_worker.py PROCESS PROCESSES ADDRESS FOLDER SCENARIO,SCENARIO`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._devices import coordination
from lazymodel._materialize import exchange
from lazymodel._tensors import division
from lazymodel._tensors.source import BYTES_READ
from tests.processes import join

DEVICES = 8  # of all processes together

# Path → shape and dtype of the variable, its partition spec over (data, model), and its tensor in the file, if that is
# another array than the variable.
VARIABLES: dict[str, tuple[tuple[int, ...], Any, P]] = {
    "embedding": ((1000, 512), np.float32, P("model")),  # rows that do not divide by all devices
    "columns": ((999, 512), np.float32, P(None, "model")),  # short rows, so whole rows are read
    "both": ((512, 256), ml_dtypes.bfloat16, P("data", "model")),  # no two devices hold the same
    "replicated": ((777, 111), ml_dtypes.bfloat16, P()),
    "torch": ((300, 400), np.float32, P(None, "model")),  # stored transposed
    "heads": ((3, 256, 128), np.float16, P(None, "model")),  # fewer rows than devices
    "scattered": ((4, 64, 600), np.float32, P(None, "data", "model")),
    "experts": ((4, 128, 96), np.float32, P("data", None, "model")),  # joined from four tensors
    "eight": ((512, 512), ml_dtypes.float8_e4m3fn, P("model")),
    "mask": ((512, 256), np.bool_, P(None, "model")),
    "four": ((512, 256), ml_dtypes.uint4, P("model")),  # stored as bytes
    "alike_0": ((128, 256), np.float32, P("model")),
    **{f"alike_{n}": ((128, 256), np.float32, P("model")) for n in range(1, 9)},
    "small": ((24,), np.float32, P()),
}


def tensors() -> dict[str, np.ndarray]:
    """Random bits, with NaNs of every kind among them, so that values which were not merely moved would show."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for path, (shape, dtype, _) in VARIABLES.items():
        stored = {"torch": shape[::-1]}.get(path, shape)
        if path == "experts":
            for expert in range(shape[0]):
                found[f"experts.{expert}"] = rng.standard_normal(shape[1:]).astype(dtype)
        elif path == "mask":
            found[path] = rng.integers(0, 2, stored).astype(bool)
        elif path == "four":
            found[path] = rng.integers(0, 16, stored).astype(np.uint8)
        else:
            nbytes = int(np.prod(stored)) * np.dtype(dtype).itemsize
            found[path] = rng.integers(0, 256, nbytes, np.uint8).view(dtype).reshape(stored)
    found["keys"] = rng.integers(0, 2**32, (16384, 2), np.uint32)
    return found


def init() -> dict[str, Any]:
    variables = {path: jnp.zeros(shape, dtype) for path, (shape, dtype, _) in VARIABLES.items()}
    return {**variables, "keys": jax.random.split(jax.random.key(0), 16384)}


class Mapped(Mapping[str, Any]):
    """The checkpoint with its tensors named and shaped as the model's variables."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def __getitem__(self, path: str) -> Any:
        if path == "torch":
            return np.transpose(self.tensors[path])
        if path == "four":
            return self.tensors[path].view(ml_dtypes.uint4)
        if path == "experts":
            return np.stack([self.tensors[f"experts.{n}"] for n in range(4)])
        return self.tensors[path]

    def __iter__(self) -> Iterator[str]:
        return iter((*VARIABLES, "keys"))

    def __len__(self) -> int:
        return len(VARIABLES) + 1


class Scenarios:
    """What one process does; every method returns something that JSON can hold."""

    def __init__(self, process: int, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.devices = np.array(jax.devices())
        self.abstract = lm.build_abstract(init)
        self.rules = {path: spec for path, (_, _, spec) in VARIABLES.items()} | {"keys": P("data")}
        self.mesh = Mesh(self.devices.reshape(4, 2), ("data", "model"))

    def load(self, mesh: Mesh, where: str | Path = "", **options: Any) -> dict[str, Any]:
        """Materializes on a mesh, and compares every shard."""
        ckpt = Mapped(lm.open_checkpoint(where or self.folder / "model.safetensors"))
        expected: Any = Mapped(tensors())
        reports: list[lm.LoadReport] = []
        told: list[tuple[int, int]] = []
        before, programs = BYTES_READ.count, exchange._program.cache_info().misses
        model = self.abstract.shard(mesh, self.rules).materialize(
            ckpt, report=reports.append, progress=lambda *pair: told.append(pair), **options
        )
        read, programs = BYTES_READ.count - before, exchange._program.cache_info().misses - programs
        for path, array in model.items():
            if path == "keys":
                array = jax.random.key_data(array)
            assert array.sharding.mesh == mesh
            for shard in array.addressable_shards:
                got, wanted = np.asarray(shard.data), np.asarray(expected[path])[shard.index]
                assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), path
        assert told[-1][0] == told[-1][1]
        exchanged = reports[0].exchanged_nbytes
        (streaming,) = [span for span in reports[0].timeline if span.name == "stream"]
        rounds = [span for span in reports[0].timeline if span.name == "exchange"]
        assert all(streaming.start <= span.start <= span.stop <= streaming.stop for span in rounds)
        found = {"exchanged": exchanged, "programs": programs, "rounds": len(rounds), "text": str(reports[0])}
        return {"read": read, **found}

    def exchanged(self) -> dict[str, Any]:
        return self.load(self.mesh, replicas="exchange")

    def remote(self) -> dict[str, Any]:
        """What comes from a server is exchanged without being asked for."""
        return self.load(self.mesh, os.environ["MODEL_URL"])

    def in_groups(self) -> dict[str, Any]:
        """Groups of a few variables, and little memory on the host."""
        with mock.patch.object(division, "GROUP", 300 << 10):
            return self.load(self.mesh, replicas="exchange", max_host_memory="16MiB")

    def across(self) -> dict[str, Any]:
        """The devices of a process hold different columns of the same rows as those of others."""
        return self.load(Mesh(self.devices.reshape(2, 4).T, ("data", "model")), replicas="exchange")

    def explicit(self) -> dict[str, Any]:
        """A mesh whose axes are for typed programs, while the caller has set another one."""
        mesh = jax.make_mesh((2, 2, 2), ("x", "data", "model"))
        with jax.set_mesh(self.mesh):
            return self.load(mesh, replicas="exchange")

    def read(self) -> dict[str, Any]:
        return self.load(self.mesh)

    def outcome(self, name: str) -> str:
        try:
            self.load_from(name)
        except lm.CheckpointError as error:
            return str(error)
        return "materialized"

    def load_from(self, name: str) -> Any:
        model = lm.build_abstract(lambda: {"w": jnp.zeros((2048, 256))}).shard(self.mesh, {"w": P()})
        ckpt = lm.open_checkpoint(self.folder / name)
        if name.startswith("truncated") and self.process == 1:
            os.truncate(ckpt.files[0], 2000)
        return model.materialize(ckpt, replicas="exchange")

    def truncated(self) -> str:
        """The file of process 1 loses its end after it was opened."""
        return self.outcome(f"truncated-{self.process}.safetensors")

    def choices(self) -> str:
        """Process 1 would exchange, and the others read."""
        model = lm.build_abstract(lambda: {"w": jnp.zeros((2048, 256))}).shard(self.mesh, {"w": P()})
        ckpt = lm.open_checkpoint(self.folder / "right.safetensors")
        try:
            model.materialize(ckpt, replicas="exchange" if self.process == 1 else "read")
        except lm.CheckpointError as error:
            return str(error)
        return "materialized"

    def killed(self) -> str:
        """The last process is killed when it comes to the first exchange."""
        if self.process == jax.process_count() - 1:
            (self.folder / f"outcomes-{self.process}.json").write_text("{}")

            def die(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            exchange._exchange = die
        return self.outcome("right.safetensors")


def main() -> None:
    process, processes, address, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    join(process, processes, address, DEVICES // processes, heartbeat=60)
    coordination.SILENCE = 3.0
    scenarios = Scenarios(process, folder)
    outcomes: dict[str, Any] = {}
    for name in sys.argv[5].split(","):
        outcomes[name] = getattr(scenarios, name)()
        (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
