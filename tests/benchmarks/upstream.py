"""Small changes to Keras and KerasHub, made from outside: peak memory, programs and time before and after.

    python tests/benchmarks/upstream.py [--runs 3] [--json]

Each way runs in its own process, on 8 devices, with `keras.distribution.ModelParallel`. The peak is of private memory
over what the process held before, as a multiple of the variable's bytes (of all variables' for `initialize`): the
highest of all runs, since samples can miss a short peak, but never show one that was not there.
integrations/UPSTREAM.md describes the changes. Values must be equal bit for bit.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import _measure

ROWS, COLUMNS = 4096, 8192  # of the variable that is assigned or loaded: 128 MiB in float32
VARIABLES, SMALLER = 12, 1024  # number and rows of those that are initialized: from 32 MiB on Keras 3.15 jits it

CHANGES = {
    "assign": "Variable.assign of a NumPy array, float32",
    "assign-bf16": "the same into a bfloat16 variable",
    "initialize": f"{VARIABLES} variables by RandomNormal",
    "load": "KerasHub's SafetensorLoader.port_weight",
}


def variable(rows: int, dtype: str = "float32", initializer: Any = "zeros") -> Any:
    import keras

    distribution: Any = keras.distribution.distribution()
    layout = keras.distribution.TensorLayout((None, "model"), distribution.device_mesh)
    return keras.Variable(initializer, shape=(rows, COLUMNS), dtype=dtype, layout=layout)


def assign(dtype: str, changed: bool) -> dict[str, Any]:
    import jax
    import keras
    import ml_dtypes
    import numpy as np

    stock = keras.Variable.assign

    def directly(self: Any, value: Any) -> Any:
        """Host arrays straight to the layout."""
        if not isinstance(value, np.ndarray) or self._layout is None:
            return stock(self, value)
        self._direct_assign(value.astype(getattr(ml_dtypes, dtype, dtype), copy=False))
        return self.value

    target, values = variable(ROWS, dtype), host_values()
    jax.block_until_ready(target.value)
    with mock.patch.object(keras.Variable, "assign", directly if changed else stock), _measure.measured() as report:
        target.assign(values)
        jax.block_until_ready(target.value)
    return {**report, "nbytes": target.value.nbytes, "digest": _measure.digest([target.value])}


def initialize(changed: bool) -> dict[str, Any]:
    import jax
    import keras
    import numpy as np

    @functools.partial(jax.jit, static_argnames=("shape", "dtype", "layout"))
    def drawn(key: Any, mean: float, stddev: float, shape: Any, dtype: Any, layout: Any) -> Any:
        return mean + stddev * jax.random.normal(key, shape, dtype, out_sharding=layout)

    class Normal(keras.initializers.RandomNormal):
        """Takes `layout`; one program for all variables of a shape."""

        def __call__(self, shape: Any, dtype: Any = None, layout: Any = None) -> Any:
            return drawn(np.array([self.seed, 0], np.uint32), self.mean, self.stddev, tuple(shape), dtype, layout)

    kind = Normal if changed else keras.initializers.RandomNormal
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    with _measure.measured() as report:
        made = [variable(SMALLER, initializer=kind(seed=seed)).value for seed in range(VARIABLES)]
        jax.block_until_ready(made)
    nbytes = sum(each.nbytes for each in made)
    return {**report, "nbytes": nbytes, "programs": len(compiled), "digest": _measure.digest(made)}


def load(folder: str, changed: bool) -> dict[str, Any]:
    import jax
    import safetensors
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader  # no public name

    stock = SafetensorLoader.port_weight

    def lazily(self: Any, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Each device's part from a slice of the file."""
        assert hook_fn is None
        file = self.enter_context(safetensors.safe_open(f"{self.preset}/model.safetensors", framework="np"))
        tensor, layout = file.get_slice(hf_weight_key), keras_variable._layout.backend_layout
        value = jax.make_array_from_callback(
            tuple(keras_variable.shape), layout, lambda index: tensor[index].astype(keras_variable.dtype, copy=False)
        )
        keras_variable._direct_assign(value)

    target = variable(ROWS)
    jax.block_until_ready(target.value)
    ported = mock.patch.object(SafetensorLoader, "port_weight", lazily if changed else stock)
    with ported, SafetensorLoader(folder) as loader, _measure.measured() as report:
        loader.port_weight(target, "weight")
        jax.block_until_ready(target.value)
    return {**report, "nbytes": target.value.nbytes, "digest": _measure.digest([target.value])}


def host_values() -> Any:
    """Not aligned: the memory of an aligned array would become the first device's, which only CPU devices can do."""
    import numpy as np

    values = np.empty(ROWS * COLUMNS + 1, np.float32)[1:].reshape(ROWS, COLUMNS)
    np.random.default_rng(0).standard_normal(dtype=np.float32, out=(made := np.empty_like(values)))
    values[...] = made
    return values


def child(change: str, how: str, folder: str) -> dict[str, Any]:
    _measure.distribute(_layouts, batch=1, model=8)
    _measure.back_memory(1 << 30)
    changed = how == "changed"
    if change == "initialize":
        return initialize(changed)
    return (
        load(folder, changed) if change == "load" else assign("float32" if change == "assign" else "bfloat16", changed)
    )


def _layouts(mesh: Any) -> Any:
    import keras

    return keras.distribution.LayoutMap(mesh)


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__, runs=3).parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import save_file

        save_file({"weight": host_values()}, Path(folder, "model.safetensors"))
        for change, what in CHANGES.items():
            ways = ("stock", "changed")
            results = _measure.in_turns(
                ways, options.runs, lambda how, change=change: _measure.child(change, how, folder)
            )
            _measure.require_equal(results)
            found[change] = {way: _measure.medians(runs) for way, runs in results.items()}
            for way, runs in results.items():
                found[change][way]["peak"] = max(run.peak_nbytes / run.result["nbytes"] for run in runs)
                found[change][way]["programs"] = statistics.median(run.result.get("programs", 0) for run in runs)
            if not options.json:
                print(what)
                for way, figures in found[change].items():
                    programs = f"   {figures['programs']:.0f} programs" if figures["programs"] else ""
                    print(f"  {way:8} peak {figures['peak']:.2f} ×   {figures['seconds']:.2f} s{programs}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
