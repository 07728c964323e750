"""One of the processes of `test_process_trouble`: loads a model that all share, with one thing going wrong in it.

Run as `python _process_trouble_worker.py PROCESS PROCESSES ADDRESS FOLDER TROUBLE WAIT`. How it ends is what counts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join
from tests.small import make_small


def init(key: jax.Array) -> dict[str, Any]:
    return {"w": jnp.zeros((96, 256)), "new": jax.random.normal(key, (96, 64))}


def main() -> None:
    process, processes, address, folder, trouble, os.environ["LAZYMODEL_WAIT_SECONDS"] = sys.argv[1:]
    make_small(silence=3.0)  # seconds after which a process that was at work counts as dead here
    join(int(process), int(processes), address, 2, heartbeat=12)
    jax.devices()  # waits for all

    def die(when: str) -> None:
        if trouble == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def progress(done: int, total: int) -> None:
        if done:
            die("killed while streaming")
            if trouble == "interrupted":
                raise KeyboardInterrupt

    model = lm.build_abstract(init, jax.random.key(0))
    shared = model.shard(Mesh(np.array(jax.devices()), ("model",)), {".*": P("model")})
    file = Path(folder) / f"model-{process}.safetensors"
    if trouble == "corrupt":
        check_refused(shared, file)
    die("killed before")
    if trouble == "ends before":
        raise SystemExit("enough seen")
    ckpt = lm.open_checkpoint(file)
    die("killed after opening")
    if trouble == "far too late":
        while not list(Path(folder).glob("failed-*")):
            time.sleep(0.1)
    if trouble == "late":
        time.sleep(40)  # longer than Gloo waits
    try:
        arrays = shared.materialize(ckpt, initialize="missing", progress=progress)
    except lm.CheckpointError:
        (Path(folder) / f"failed-{process}").touch()
        if trouble == "leaves at once":
            traceback.print_exc()
            os._exit(1)
        raise
    die("killed after materializing")
    for array in arrays.values():
        assert all(np.isfinite(np.asarray(shard.data)).all() for shard in array.addressable_shards)
    arrays = shared.materialize(ckpt, initialize="missing")
    total = jax.jit(lambda tree: tree["w"].sum())(arrays)
    assert jax.block_until_ready(total) == 96 * 256
    print("all is well")


def check_refused(shared: lm.AbstractModel, file: Path) -> None:
    """What is wrong with this process alone is found before it asks the others."""
    with pytest.MonkeyPatch.context() as patch:
        for text in ("", "soon", "0", "-1", "nan", "inf", "1 minute"):
            patch.setenv("LAZYMODEL_WAIT_SECONDS", text)
            for call in (lambda: lm.open_checkpoint(file), shared.materialize):
                with pytest.raises(lm.LazyModelError, match=f"LAZYMODEL_WAIT_SECONDS .*{text!r}"):
                    call()
        patch.undo()
        patch.setattr(jax.distributed, "is_initialized", lambda: False)
        with pytest.raises(lm.LazyModelError, match=r"\(0, 1, 2\).* jax\.distributed\.initialize\(\)"):
            shared.materialize()
    print("all of it is refused")


if __name__ == "__main__":
    main()
