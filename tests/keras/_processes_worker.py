"""One of two processes with half the devices of a mesh each; `test_processes.py` starts it.

Usage: _processes_worker.py PROCESS ADDRESS FOLDER
The weights are in FOLDER/model.weights.h5; what came of it goes to FOLDER/outcome-PROCESS.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

PROCESSES, DEVICES, WIDTH = 2, 4, 64


def make() -> Any:
    """A model with dropout, whose random state each process would draw for itself."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(WIDTH, activation="relu"), layers.Dropout(0.1), layers.Dense(8)]
    )
    model.compile("sgd", "mse")
    return model


def main() -> None:
    process, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    os.environ["KERAS_BACKEND"] = "jax"
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process, initialization_timeout=30, shutdown_timeout_seconds=10)
    import keras

    import lazymodel as lm
    import lazymodel_keras as lk

    mesh, rules = Mesh(np.array(jax.devices()).reshape(PROCESSES, DEVICES), ("data", "model")), lm.auto()
    outcome: dict[str, Any] = {}
    try:
        lm.build_abstract(make).shard(mesh, rules, on_unmatched="ignore").materialize()
    except lm.CheckpointError as error:
        outcome["unseeded"] = str(error)
    keras.utils.set_random_seed(0)
    abstract = lm.build_abstract(make).shard(mesh, rules, on_unmatched="ignore")
    model = lk.restore(abstract, folder / "model.weights.h5")
    for index, kernel in enumerate(layer.kernel.value for layer in model.layers if hasattr(layer, "kernel")):
        stored = np.load(folder / f"kernel-{index}.npy")
        assert not kernel.is_fully_replicated and len(kernel.addressable_shards) == DEVICES
        for shard in kernel.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), stored[shard.index])
    x, y = np.ones((8, WIDTH), "float32"), np.zeros((8, 8), "float32")
    with lk.distribution(mesh, "data").scope():
        outcome["losses"] = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    lm.save(model, folder / "trained.safetensors")
    (folder / f"outcome-{process}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
