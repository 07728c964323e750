"""Reads from a server that stalls, until it is interrupted; says what came of it and how long that took, in seconds."""

from __future__ import annotations

import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import lazymodel as lm

PATIENT = {"client_options": {"read_timeout": "60s", "timeout": "60s"}}


def materialize(checkpoint: lm.Checkpoint) -> object:
    abstract = lm.build_abstract(
        lambda key: {name: jax.random.normal(key, tensor.shape) for name, tensor in checkpoint.items()},
        jax.random.key(0),
    )
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return abstract.shard(mesh, {".*": PartitionSpec("x")}).materialize(checkpoint)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
    what, url, go = sys.argv[1:]
    checkpoint = lm.open_checkpoint(url, PATIENT) if what != "open" else None
    print("opened", flush=True)
    if go == "wait":  # for the server to be told to stall
        sys.stdin.readline()
    result = "finished"
    try:
        if checkpoint is None:
            lm.open_checkpoint(url, PATIENT)
        elif what == "read":
            np.asarray(checkpoint["w"])
        else:
            materialize(checkpoint)
    except KeyboardInterrupt:
        result = "interrupted"
    except lm.CheckpointError as error:
        result = str(error)
    print(result, time.time(), flush=True)
    if what == "leave":
        threading.Thread(target=lambda: np.asarray(lm.open_checkpoint(url, PATIENT)["w"]), daemon=True).start()


main()
