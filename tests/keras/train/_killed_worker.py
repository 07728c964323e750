"""Trains in a process of its own and kills it in the middle of an epoch; `test_killed.py` starts it.

Usage: _killed_worker.py FOLDER MODEL STEPS_PER_EPOCH KILLED_AFTER_STEPS
The checkpoints go to FOLDER/killed; the preset of `gemma` is in FOLDER/preset, where the test saved it.
"""

import os
import sys

if __name__ == "__main__":
    # Before anything imports JAX: this process is not started by pytest's conftest.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["KERAS_BACKEND"] = "jax"

import signal
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk


class Batches:
    """Batches of tokens to be told from those before them, by their position in the data."""

    def __init__(self, *, masked: bool) -> None:
        self.position = 0
        self._masked = masked

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(self.position)
        self.position += 1
        starts = rng.integers(0, 32, (8, 1))
        tokens = ((starts + 3 * np.arange(17)) % 32).astype("int32")
        inputs: Any = tokens[:, :-1]
        if self._masked:
            inputs = {"token_ids": inputs, "padding_mask": np.ones_like(inputs)}
        return inputs, tokens[:, 1:]

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def small(folder: Path) -> keras.Model:
    """A token model with dropout, whose random state matters."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((16,), dtype="int32"),
            layers.Embedding(32, 16, name="embedding"),
            layers.Dense(32, activation="relu", name="up"),
            layers.Dropout(0.1),
            layers.Dense(32, name="down"),
        ],
        name="small",
    )
    return compiled(model)


def gemma(folder: Path) -> keras.Model:
    """A KerasHub task whose weights are loaded from a saved preset."""
    import keras_hub

    return compiled(keras_hub.models.GemmaCausalLM.from_preset(str(folder / "preset"), preprocessor=None))


def save_preset(folder: Path) -> None:
    """Saves the preset that `gemma` loads, with stock KerasHub."""
    import keras_hub

    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=32, num_layers=2, num_query_heads=4, num_key_value_heads=4, hidden_dim=32,
        intermediate_dim=64, head_dim=8, dropout=0.1,
    )  # fmt: skip
    backbone.save_to_preset(str(folder / "preset"))


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


MODELS = {"small": small, "gemma": gemma}


def abstract(name: str, shape: tuple[int, int], folder: Path) -> lm.AbstractModel:
    """The model, sharded over a mesh of this shape."""
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("batch", "model"))

    def rules(variable: lm.AbstractVariable) -> P:
        fits = variable.shape and variable.shape[-1] % shape[1] == 0
        return P(*[None] * (len(variable.shape) - 1), "model") if fits else P()

    keras.utils.set_random_seed(0)
    return lm.build_abstract(MODELS[name], folder).shard(mesh, rules)


class Losses(keras.callbacks.Callback):
    """Notes the loss of each epoch, and kills the process after so many steps."""

    def __init__(self, killed_after: int | None = None) -> None:
        super().__init__()
        self.losses: dict[int, float] = {}
        self._killed_after, self._steps = killed_after, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == self._killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses[epoch] = logs["loss"]


def train(model: keras.Model, folder: Path, steps: int, epochs: int, watch: Losses, **start: Any) -> dict[int, float]:
    """Trains, saving after each epoch; returns the losses."""
    checkpoint = lk.TrainingCheckpoint(folder, max_to_keep=2)
    batches = Batches(masked=not isinstance(model, keras.Sequential))
    if "data" in start:
        batches.set_state(start.pop("data"))
    # KerasHub's tasks have a `fit` of their own, which takes no stream of batches.
    keras.Model.fit(
        model, checkpoint.data(batches), steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[checkpoint, watch], **start,
    )  # fmt: skip
    return watch.losses


if __name__ == "__main__":
    folder, name, steps, killed_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    model = abstract(name, (1, 8), folder).materialize()
    train(model, folder / "killed", steps, 10**6, Losses(killed_after))
