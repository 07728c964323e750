"""One of the processes of `test_exchange`: runs every scenario, and writes down what came of each.

Responsible for doing and measuring; what is right is asserted by the test module, which also saves `tensors`. Run as
`python _exchange_worker.py PROCESS PROCESSES ADDRESS FOLDER SCENARIO,SCENARIO`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
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
from tests.compile_events import compile_events
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
    "thirds": ((3, 256, 600), np.float32, P(None, None, "model")),
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
        seen: list[tuple[int, int]] = []
        with compile_events() as events:
            model = self.abstract.shard(mesh, self.rules).materialize(
                ckpt, report=reports.append, progress=lambda *pair: seen.append(pair), **options
            )
        for path, array in model.items():
            if path == "keys":
                array = jax.random.key_data(array)
            assert array.sharding.mesh == mesh
            for shard in array.addressable_shards:
                got, wanted = np.asarray(shard.data), np.asarray(expected[path])[shard.index]
                assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), path
        assert seen[-1][0] == seen[-1][1]
        (streaming,) = [span for span in reports[0].timeline if span.name == "stream"]
        rounds = [span for span in reports[0].timeline if span.name == "exchange"]
        assert all(streaming.start <= span.start <= span.stop <= streaming.stop for span in rounds)
        return {
            "read": reports[0].read_nbytes,
            "exchanged": reports[0].exchanged_nbytes,
            "programs": sum(event.startswith("compile") for event in events),
            "rounds": len(rounds),
            "text": str(reports[0]),
        }

    def exchanged(self) -> dict[str, Any]:
        return self.load(self.mesh, replicas="exchange")

    def remote(self) -> dict[str, Any]:
        """What comes from a server is exchanged without being asked for."""
        return self.load(self.mesh, os.environ["MODEL_URL"])

    def in_groups(self) -> dict[str, Any]:
        """Groups of a few variables, and little memory on the host."""
        with mock.patch("lazymodel._tensors.shards.GROUP", 300 << 10):
            return self.load(self.mesh, replicas="exchange", max_host_memory="16MiB")

    def across(self) -> dict[str, Any]:
        """The devices of a process hold different columns of the same rows as those of others."""
        return self.load(Mesh(self.devices.reshape(2, 4).T, ("data", "model")), replicas="exchange")

    def explicit(self) -> dict[str, Any]:
        """A mesh whose axes are for typed programs, while the caller has set another one."""
        mesh = jax.make_mesh((2, 2, 2), ("x", "data", "model"))
        with jax.set_mesh(self.mesh):
            return self.load(mesh, replicas="exchange")

    def many(self) -> str:
        """So many variables that their exchanges would wait for each other if they ran at once; then they move on."""
        with lm.open_checkpoint(self.folder / "many.safetensors") as ckpt:
            model = lm.build_abstract(lambda: {name: jnp.zeros(ckpt[name].shape) for name in ckpt})
            model = model.shard(self.mesh, {".*": P("model")}).materialize(ckpt, replicas="exchange")
            moved = lm.reshard(model, jax.sharding.NamedSharding(self.mesh, P(None, "data")))
            for path, array in (*model.items(), *moved.items()):
                for shard in array.addressable_shards:
                    assert (np.asarray(shard.data) == ckpt[path].read()[shard.index]).all(), path
        return "loaded and moved"

    def read(self) -> dict[str, Any]:
        return self.load(self.mesh)

    def outcome(self, name: str, replicas: str = "exchange") -> str:
        model = lm.build_abstract(lambda: {"w": jnp.zeros((2048, 256))}).shard(self.mesh, {"w": P()})
        ckpt = lm.open_checkpoint(self.folder / name)
        if name.startswith("truncated") and self.process == 1:
            os.truncate(ckpt.files[0], 2000)
        try:
            model.materialize(ckpt, replicas=replicas)
        except lm.CheckpointError as error:
            return str(error)
        return "materialized"

    def truncated(self) -> str:
        """The file of process 1 loses its end after it was opened."""
        return self.outcome(f"truncated-{self.process}.safetensors")

    def choices(self) -> str:
        """Process 1 would exchange, and the others read."""
        return self.outcome("right.safetensors", replicas="exchange" if self.process == 1 else "read")

    def tasks(self) -> dict[str, str]:
        """What `tasks.json` says: what every process opens, by its number, and options."""
        tasks = json.loads((self.folder / "tasks.json").read_text())
        return {name: self.task(wheres[self.process], options) for name, (wheres, options) in tasks.items()}

    def task(self, where: str | int, options: dict[str, Any]) -> str:
        shape = (1024, 1024)
        model = lm.build_abstract(lambda: {"w": jnp.zeros(shape), "b": jnp.zeros(shape[1])})
        model = model.shard(Mesh(self.devices, ("x",)), {"w": P(options.get("spec")), "b": P()})
        try:
            if isinstance(where, int):  # a seed of arrays in memory
                checkpoint: Any = {"w": np.full(shape, where, np.float32), "b": np.zeros(shape[1], np.float32)}
            else:
                checkpoint = lm.open_checkpoint(where, verify=options.get("verify", False))
            if options.get("mapped"):
                weights = lm.WeightMap({"w": lm.From("w").transpose(), "b": "b"})
                checkpoint = lm.map_checkpoint(checkpoint, weights, model)
            if options.get("stream"):
                dict(model.stream(checkpoint))
            else:
                model.materialize(checkpoint, replicas=options.get("replicas"))
        except lm.LazyModelError as error:
            return f"{type(error).__name__}: {error}"
        return "loaded"

    def killed(self) -> str:
        """The last process is killed when it comes to the first exchange."""
        if self.process == jax.process_count() - 1:

            def die(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            jax.set_mesh = die  # of the program that exchanges
        return self.outcome("right.safetensors")


def main() -> None:
    process, processes, address, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    join(process, processes, address, DEVICES // processes, heartbeat=60, silence=3.0)
    scenarios = Scenarios(process, folder)
    outcomes: dict[str, Any] = {}
    for name in sys.argv[5].split(","):
        outcomes[name] = getattr(scenarios, name)()
        new = folder / f"new-{process}.json"
        new.write_text(json.dumps(outcomes))
        new.replace(folder / f"outcomes-{process}.json")
    if "killed" in outcomes:  # JAX would wait for that process at the end, and abort this one
        others = [folder / f"outcomes-{number}.json" for number in range(processes - 1)]
        while process == 0 and not all("killed" in json.loads(other.read_text()) for other in others):
            time.sleep(0.1)  # its end aborts the others
        os._exit(0)


if __name__ == "__main__":
    main()
