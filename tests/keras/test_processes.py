"""Keras models over the devices of two processes: drawn alike, loaded, trained and saved.

As a script this is one of the two, with half the devices of a mesh: test_processes.py PROCESS ADDRESS FOLDER
The weights are in FOLDER/model.weights.h5; what came of it goes to FOLDER/outcome-PROCESS.json.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from tests.processes import free_address, printed, run_workers

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
    from tests.small import shard_small

    mesh, rules = Mesh(np.array(jax.devices()).reshape(PROCESSES, DEVICES), ("data", "model")), lm.auto()
    outcome: dict[str, Any] = {}
    try:
        shard_small(lm.build_abstract(make), mesh, rules, on_unmatched="ignore").materialize()
    except lm.CheckpointError as error:
        outcome["unseeded"] = str(error)
    keras.utils.set_random_seed(0)
    abstract = shard_small(lm.build_abstract(make), mesh, rules, on_unmatched="ignore")
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
    lk.enable_lora(model, 2, ".*/kernel")
    for variable in model.trainable_variables:
        if "lora" in variable.path:
            variable.assign(np.ones(variable.shape))
    lk.merge_lora(model)
    lm.save(model, folder / "merged.safetensors")
    (folder / f"outcome-{process}.json").write_text(json.dumps(outcome))


@pytest.mark.large  # what is of Keras in it, the seeds that differ, is a few lines
@pytest.mark.timeout(90)
def test_two_processes_load_train_and_save_one_model(tmp_path: Path) -> None:
    import keras

    keras.utils.set_random_seed(1)
    stock = make()
    stock.save_weights(tmp_path / "model.weights.h5")
    for index, kernel in enumerate(layer.kernel for layer in stock.layers if hasattr(layer, "kernel")):
        np.save(tmp_path / f"kernel-{index}.npy", np.asarray(kernel.value))
    address = free_address()
    arguments = [(process, address, tmp_path) for process in range(PROCESSES)]
    assert run_workers(Path(__file__), arguments, tmp_path, patience=80) == [0, 0], printed(tmp_path, PROCESSES)

    outcomes = [json.loads((tmp_path / f"outcome-{process}.json").read_text()) for process in range(PROCESSES)]
    for outcome in outcomes:
        assert re.search("seeds differ: process 0 .* process 1 .*set_random_seed", outcome["unseeded"])
        assert outcome["losses"] == outcomes[0]["losses"] and outcome["losses"][1] < outcome["losses"][0]
    saved = load_file(tmp_path / "trained.safetensors")
    kernel = next(value for value in saved.values() if value.shape == (WIDTH, WIDTH))
    assert not np.array_equal(kernel, np.load(tmp_path / "kernel-0.npy"))
    merged = load_file(tmp_path / "merged.safetensors")
    np.testing.assert_array_equal(next(value for value in merged.values() if value.shape == (WIDTH, WIDTH)), kernel + 2)


if __name__ == "__main__":
    main()
