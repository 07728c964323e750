"""A process of `test_remote_save`.

`python _remote_save_worker.py killed ORIGIN` saves over what is in a bucket and is killed at the last of three shards.
`python _remote_save_worker.py PROCESS ADDRESS ORIGIN FOLDER` is one of two that save arrays of which both hold parts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

sys.path.insert(0, str(Path(__file__).parents[3]))

import lazymodel as lm
from lazymodel._remote import upload
from tests.core.save._save_worker import DEVICES, MAPPING, SHARDINGS


def options(origin: str) -> dict[str, Any]:
    return {"base_url": f"{origin}/gcs", "bearer_token": "a-token", "client_options": {"allow_http": True}}


def killed(origin: str) -> None:
    def kill(done: int, total: int) -> None:
        if done > 0.9 * total:
            os.kill(os.getpid(), signal.SIGKILL)

    arrays = {name: np.ones((32, 32), "float32") for name in "abc"}
    url, given = "gs://uploads/saved", options(origin)
    lm.save(arrays, url, storage_options=given, overwrite=True, max_shard_size=6 << 10, progress=kill)


def main() -> None:
    if sys.argv[1] == "killed":
        killed(sys.argv[2])
        return
    process, address, origin, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        2,
        process,
        initialization_timeout=30,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )
    warnings.simplefilter("error")
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

    def back(tensors: Any) -> dict[str, Any]:
        mapped: dict[str, Any] = MAPPING.write({name: tensors[name] for name in SHARDINGS})
        mapped["half"] = np.concatenate([tensors["rows"][::2, 1:3], tensors["rows"][1::2, 4:]])
        mapped["wide"] = np.broadcast_to(tensors["everywhere"], (2, 5))
        return mapped

    given = {"storage_options": options(origin), "max_shard_size": "1KB", "overwrite": True}
    outcomes: dict[str, Any] = {}

    def failing(who: int) -> Any:
        def fail(done: int, total: int) -> None:
            if process == who and done:
                raise ValueError("no more")

        return fail

    def outcome(name: str, arrays: Any, **more: Any) -> None:
        try:
            lm.save(arrays, f"gs://uploads/{name}", **{**given, **more})
        except (lm.LazyModelError, ValueError) as error:
            outcomes[name] = str(error)

    sent: list[int] = []
    lm.save(arrays, "gs://uploads/plain", progress=lambda done, total: sent.append(total), **given)
    outcomes["sent"] = sent[0]
    upload.LEAST_PART = upload.PART = 64  # so that a tensor comes in several bands, and rounds
    lm.save(arrays, "gs://uploads/mapped", mapping=back, max_host_memory=1 << 14, **given)
    lm.save(arrays, "gs://uploads/one.safetensors", **given)
    outcome("plain", arrays, progress=failing(1))
    outcome("one.safetensors", arrays, progress=failing(0))
    outcome("differ", arrays if process == 0 else {name: array for name, array in arrays.items() if name != "rows"})
    if process == 0:
        expected = {f"plain:{name}": value for name, value in values.items()}
        expected |= {f"mapped:{name}": np.asarray(value) for name, value in back(values).items()}
        np.savez(folder / "expected.npz", **expected)
    (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
