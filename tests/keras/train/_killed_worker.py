"""Trains in a process of its own and kills it in the middle of an epoch; `test_training_checkpoint.py` starts it.

Usage: _killed_worker.py FOLDER KILLED_AFTER_STEPS
The checkpoints go to FOLDER/killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

STEPS = 2  # in an epoch


class Batches:
    """Batches of tokens, each of which depends on its position in the data only."""

    position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Any, Any]:
        starts = np.random.default_rng(self.position).integers(0, 32, (8, 1))
        self.position += 1
        tokens = ((starts + 3 * np.arange(17)) % 32).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}


def abstract(shape: tuple[int, int]) -> Any:
    """A token model with dropout, whose random state matters, sharded over a mesh of this shape."""
    import keras

    import lazymodel as lm

    def build() -> keras.Model:
        layers = keras.layers
        dense = layers.Dense(32, activation="relu", name="up"), layers.Dropout(0.1), layers.Dense(32, name="down")
        inputs = keras.Input((16,), dtype="int32"), layers.Embedding(32, 16, name="embedding")
        model = keras.Sequential([*inputs, *dense], name="small")
        model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("batch", "model"))
    keras.utils.set_random_seed(0)
    rules = {".*(kernel|embeddings)": P(None, "model"), ".*": P()}
    return lm.build_abstract(build).shard(mesh, rules)


def train(model: Any, folder: Path, epochs: int, *, state: Any = None, killed_after: int | None = None) -> Any:
    """Trains, saving after each epoch; returns the losses by epoch, or kills the process after so many steps."""
    import keras

    import lazymodel_keras as lk

    class Kill(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint, batches = lk.TrainingCheckpoint(folder, max_to_keep=2), Batches()
    start = 0
    if state is not None:
        start, batches.position = state.epoch, state.data["position"]
    history = model.fit(
        checkpoint.data(batches), steps_per_epoch=STEPS, initial_epoch=start, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[checkpoint, Kill()],
    )  # fmt: skip
    return dict(zip(history.epoch, history.history["loss"], strict=True))


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "jax"
    jax.config.update("jax_num_cpu_devices", 8)
    train(abstract((1, 8)).materialize(), Path(sys.argv[1]) / "killed", 10**6, killed_after=int(sys.argv[2]))
