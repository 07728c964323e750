"""One of the two processes of `test_save`: saves arrays that both hold parts of, and writes down what came of it.

Run as `python _save_worker.py PROCESS ADDRESS FOLDER`.
"""

from __future__ import annotations

import errno
import json
import os
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


def finish(process: int, folder: Path, values: dict[str, Any], outcomes: dict[str, Any]) -> None:
    """Writes down what came of it, and what should be in the checkpoints `plain` and `mapped`."""
    if process == 0:
        expected = {f"plain:{name}": value for name, value in values.items()}
        expected |= {f"mapped:{name}": np.asarray(value) for name, value in back(values).items()}
        np.savez(folder / "expected.npz", **expected)
    (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


def main() -> None:
    process, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    values, arrays = joined(process, address)
    outcomes: dict[str, Any] = {}

    written = 0
    pwrite = os.pwrite

    def counted(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        return pwrite(fd, data, offset)

    os.pwrite = counted
    lm.save(arrays, folder / "plain", max_shard_size="1KB")
    outcomes["wrote"] = written

    lm.save(arrays, folder / "mapped", mapping=back)

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if process == 1:
        os.pwrite = full
    outcomes["failed"] = outcome(arrays, folder / "failed")
    os.pwrite = pwrite
    differing = arrays if process == 0 else {name: array for name, array in arrays.items() if name != "rows"}
    outcomes["differ"] = outcome(differing, folder / "differ")

    finish(process, folder, values, outcomes)


def outcome(arrays: Any, path: Path) -> str:
    try:
        lm.save(arrays, path)
    except lm.LazyModelError as error:
        return str(error)
    return "saved"


if __name__ == "__main__":
    main()
