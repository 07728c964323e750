"""Processes of the tests of saving.

`python _save_worker.py PROCESS ADDRESS ORIGIN FOLDER` is one of two that save arrays of which both hold parts, to a
folder and to a bucket. `python _save_worker.py killed ORIGIN` saves over what is in the bucket, and is killed at the
last of three shards.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel import From
from tests.processes import join
from tests.small import make_small

DEVICES = 4  # of each process
SHARDINGS: dict[str, tuple[tuple[int, ...], Any]] = {
    "rows": ((16, 6), P("x")),
    "columns": ((6, 16), P(None, "y")),
    "both": ((8, 4, 8), P("y", None, "x")),
    "everywhere": ((5,), P()),
    "heads": ((3, 8, 2, 16), P(None, "x", None, "y")),
}
MAPPING = lm.WeightMap(
    {
        "rows": From("fused").part(0, of=(6, 6)).T,
        "columns": From("fused").part(1, of=(6, 6)),
        "both": From("both").rearrange("(a b) c -> b a c", a=4).scale(2),
        "everywhere": "everywhere",
        "heads": From("h.{n}").rearrange("(heads dim) model -> model heads dim", heads=2).stack("n"),
    }
)


def joined(process: int, address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of what is saved, and the arrays, of which each of two processes holds parts."""
    join(process, 2, address, DEVICES)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype("float32") for name, (shape, _) in SHARDINGS.items()}
    arrays: dict[str, Any] = {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, SHARDINGS[name][1]), lambda index, value=value: value[index]
        )
        for name, value in values.items()
    }
    arrays["local"] = values["local"] = np.arange(4.0)
    return values, arrays


def back(tensors: Any) -> dict[str, Any]:
    mapped: dict[str, Any] = MAPPING.write({name: tensors[name] for name in SHARDINGS})
    mapped["half"] = np.concatenate([tensors["rows"][::2, 1:3], tensors["rows"][1::2, 4:]])
    mapped["wide"] = np.broadcast_to(tensors["everywhere"], (2, 5))
    return mapped


class Worker:
    """One of two processes, which saves to a disk and to a bucket, and notes what came of it."""

    def __init__(self, process: int, address: str, origin: str, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.values, self.arrays = joined(process, address)
        self.outcomes: dict[str, Any] = {}
        self.wrote = 0
        self.pwrite, os.pwrite = os.pwrite, self.counted  # what is written to a disk
        for name, where, options in (("disk", folder / "disk", {}), ("gs", "gs://uploads", bucket_options(origin))):
            self.place, self.where, self.given = name, where, options | {"overwrite": True, "max_shard_size": "1KB"}
            self.run()
        self.finish()

    def counted(self, fd: int, data: Any, offset: int) -> int:
        self.wrote += len(data)
        return self.pwrite(fd, data, offset)

    def save(self, name: str, arrays: Any = None, **more: Any) -> None:
        lm.save(self.arrays if arrays is None else arrays, f"{self.where}/{name}", **{**self.given, **more})

    def fails(self, case: str, name: str, arrays: Any = None, **more: Any) -> None:
        try:
            self.save(name, arrays, **more)
        except (lm.LazyModelError, ValueError) as error:
            self.outcomes[f"{self.place} {case}"] = str(error)

    def failing(self, who: int) -> Any:
        def fail(done: int, total: int) -> None:
            if self.process == who and done:
                raise ValueError("no more")

        return fail

    def run(self) -> None:
        sent: list[int] = []
        self.save("plain", progress=lambda done, total: sent.append(total))
        self.outcomes[f"{self.place} wrote"] = self.wrote if self.place == "disk" else sent[0]
        make_small(least_upload_part=64, upload_part=64)  # so that a tensor comes in several bands, and rounds
        self.save("mapped", mapping=back, **({"max_host_memory": 1 << 14} if self.place == "gs" else {}))
        self.save("one.safetensors")
        self.fails("1 failed", "plain", progress=self.failing(1))
        self.fails("0 failed", "one.safetensors", progress=self.failing(0))
        fewer = {name: array for name, array in self.arrays.items() if name != "rows" or self.process == 0}
        self.fails("differ", "differ", fewer)
        if self.place == "disk":
            if self.process == 1:
                os.pwrite = full
            self.fails("1 full", "full")
            os.pwrite = self.pwrite

    def finish(self) -> None:
        """Saves an adapter; writes down what came of it, and what should be in checkpoints `plain` and `mapped`."""
        pair = {"w_lora_a": self.arrays["rows"], "w_lora_b": self.arrays["columns"], "w": np.zeros((16, 16))}
        lm.save_adapter(pair, self.folder / "adapter", mapping=lm.WeightMap({"w": From("w.weight").T}), scale=1.0)
        if self.process == 0:
            expected = {f"plain:{name}": value for name, value in self.values.items()}
            expected |= {f"mapped:{name}": np.asarray(value) for name, value in back(self.values).items()}
            np.savez(self.folder / "expected.npz", **expected)
        (self.folder / f"outcomes-{self.process}.json").write_text(json.dumps(self.outcomes))


def full(fd: int, data: Any, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def bucket_options(origin: str) -> dict[str, Any]:
    options = {"base_url": f"{origin}/gcs", "bearer_token": "a-token", "client_options": {"allow_http": True}}
    return {"storage_options": options}


def killed(origin: str) -> None:
    def kill(done: int, total: int) -> None:
        if done > 0.9 * total:
            os.kill(os.getpid(), signal.SIGKILL)

    arrays = {name: np.ones((32, 32), "float32") for name in "abc"}
    given = bucket_options(origin) | {"overwrite": True, "max_shard_size": 6 << 10}
    lm.save(arrays, "gs://uploads/saved", progress=kill, **given)


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        killed(sys.argv[2])
    else:
        Worker(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
