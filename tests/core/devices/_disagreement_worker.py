"""One of the two processes of `test_disagreement`: each gives the same call something else, which fails in both.

Run as `python _disagreement_worker.py PROCESS ADDRESS FOLDER`. Writes down what each case raised, and what was found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join

VALUES = {"w": np.arange(64.0, dtype="float32").reshape(8, 8) + 1, "b": np.arange(8.0, dtype="float32")}


def init() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}


def array(name: str, mesh: Mesh, spec: Any) -> jax.Array:
    return jax.make_array_from_callback(VALUES[name].shape, NamedSharding(mesh, spec), lambda at: VALUES[name][at])


class Cases:
    """Calls of which each gets something else in process 1; `agree_…` have to succeed."""

    def __init__(self, process: int, folder: Path) -> None:
        self.process, self.folder = process, folder
        devices = np.array(jax.devices())
        self.mesh = Mesh(devices, ("model",))
        self.here = Mesh(np.array(jax.local_devices()), ("model",))
        self.other = self.mesh if process == 0 else Mesh(devices[::-1], ("model",))
        self.spec = P("model") if process == 0 else P(None, "model")
        self.abstract = lm.build_abstract(init)
        self.checkpoint = folder / "model.safetensors"
        self.same = {"w": array("w", self.mesh, P("model")), "b": array("b", self.mesh, P())}
        self.shared = self.abstract.shard(self.mesh, {"w": P("model"), "b": P()})

    def by_rules(self) -> Any:
        return self.abstract.shard(self.mesh, {"w": self.spec, "b": P()})

    def by_devices(self) -> Any:
        return self.abstract.shard(self.other, {"w": P("model"), "b": P()})

    def materialize_rules(self) -> None:
        self.by_rules().materialize(lm.open_checkpoint(self.checkpoint))

    def materialize_devices(self) -> None:
        self.by_devices().materialize()

    def stream_rules(self) -> None:
        dict(self.by_rules().stream())

    def run_devices(self) -> None:
        def total(model: dict[str, jax.Array]) -> jax.Array:
            return model["w"].sum()

        self.by_devices().run(total)

    def restore_rules(self) -> None:
        lm.restore(self.by_rules(), self.folder / "steps")

    def save_rules(self) -> None:
        lm.save(self.same | {"w": array("w", self.mesh, self.spec)}, self.folder / "rules")

    def save_names(self) -> None:
        lm.save(self.same | ({"more": self.same["b"]} if self.process else {}), self.folder / "names")

    def save_devices(self) -> None:
        lm.save(self.same | {"w": array("w", self.other, P("model"))}, self.folder / "devices.safetensors")

    def save_shapes(self) -> None:
        own = jax.device_put(jnp.zeros((8, 8 + self.process)), NamedSharding(self.here, P()))
        lm.save(self.same | {"own": own}, self.folder / "shapes")

    def reshard_devices(self) -> None:
        lm.reshard(self.same, NamedSharding(self.other, P()))

    def sync_plan(self) -> None:
        lm.Sync(self.same, {name: array(name, self.other, P()) for name in VALUES})

    def sync_rules(self) -> None:
        lm.Sync(self.same, {"w": array("w", self.mesh, self.spec), "b": self.same["b"]})

    def save_unwritten(self) -> None:
        """Process 0 leads, and has nothing of `there`; process 1, which has it, does not lead."""
        there = [device for device in jax.devices() if device.process_index == 1]
        sharding = NamedSharding(Mesh(np.array(there), ("model",)), P("model"))
        shards = [jax.device_put(np.ones(4, "float32"), d) for d in there] if self.process else []
        alone: Any = jax.make_array_from_single_device_arrays((8,), sharding, shards, dtype=jnp.float32)
        if self.process:
            lm.save({"there": alone}, self.folder / "there.safetensors")  # as the error advises
        lm.save(self.same | {"there": alone}, self.folder / "unwritten.safetensors")

    def save_mapping_differs(self) -> None:
        def mapping(tensors: Any) -> Any:
            return dict(tensors) | ({"w": tensors["w"][::-1]} if self.process else {})

        lm.save(self.same, self.folder / "differs.safetensors", mapping=mapping)

    def save_mapping_raises(self) -> None:
        def mapping(tensors: Any) -> Any:
            return {"w": tensors["v" if self.process else "w"]}

        lm.save(self.same, self.folder / "raises.safetensors", mapping=mapping)

    def save_step_data_raises(self) -> None:
        lm.save_step(self.same, self.folder / "data", 1, data={1, 2} if self.process else [1, 2])

    def restore_step_raises(self) -> None:
        lm.restore(self.shared, self.folder / "steps", step=4 - self.process)

    def save_adapter_raises(self) -> None:
        pair = {"w_lora_a": array("w", self.mesh, P("model")), "w_lora_b": array("w", self.mesh, P()), "w": VALUES["w"]}
        name = "w.weight" if self.process == 0 else "w"
        mapping = lm.WeightMap({"w": lm.From(name).T})
        lm.save_adapter(pair, self.folder / "adapter", mapping=mapping, scale=1.0)

    def save_interrupted(self) -> None:
        """Process 0 gets a Ctrl-C when the new file has replaced the old one."""
        replace = os.replace

        def interrupted(source: Any, destination: Any) -> None:
            replace(source, destination)
            raise KeyboardInterrupt("enough")

        if self.process == 0:
            os.replace = interrupted
        try:
            lm.save(self.same, self.folder / "interrupted.safetensors")
        finally:
            os.replace = replace

    def agree_on_all(self) -> list[Any]:
        """Among arrays of all, each process has some of its own, on other devices than the others have."""
        own = {"here": jax.device_put(jnp.ones(2), NamedSharding(self.here, P("model"))), "count": jnp.int32(3)}
        lm.save(self.same | own, self.folder / "agree.safetensors")
        moved = jax.tree.map(jnp.copy, lm.reshard(self.same, NamedSharding(self.mesh, P())))
        synced = lm.Sync(self.same, moved)(self.same, into=moved)
        loaded = self.shared.materialize(lm.open_checkpoint(self.checkpoint))
        return [np.asarray(each["w"].addressable_data(0)).tolist() for each in (synced, loaded)]


CASES = [name for name in vars(Cases) if not name.startswith(("_", "by_"))]


def main() -> None:
    process, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    join(process, 2, address, 2)
    cases, outcomes = Cases(process, folder), dict[str, Any]()
    for name in CASES:
        case: Callable[[], Any] = getattr(cases, name)
        start, error, found = time.monotonic(), "", None
        try:
            found = case()
        except (lm.LazyModelError, TypeError, KeyboardInterrupt) as raised:
            error = f"{type(raised).__name__}: {raised}"
        outcomes[name] = {"error": error, "found": found, "seconds": time.monotonic() - start}
    (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
