"""The table of what works with every backbone and task class of KerasHub, written into `integrations/MODELS.md`.

    python -m tests.keras.support_table            # minutes; writes the page
    python -m tests.keras.support_table NAME ...   # prints the rows of these classes

The columns are what `test_every_model` asserts, the last two of what is adapted while it is loaded. For their counts
the tiny model is built without its initializers, given zeros, and asked.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import keras
import keras_hub
import numpy as np

import lazymodel as lm

from .hub_configs import BACKBONES, TASKS, HubModel
from .transformers_folders import SECTION

PAGE = Path(__file__).parent.parent.parent / "integrations" / "MODELS.md"

_INTRODUCTION = """# KerasHub models

This page lists which models of KerasHub {version} work with lazymodel: {backbones} backbones and {tasks} tasks.
[Keras and KerasHub](../docs/keras.md) describes how to load one. The tests build a tiny model of each class;
if a class has several configurations that differ in kind, each has a row.

- **build**: `lm.build_abstract` defers every variable; materialized values equal KerasHub's initial values bit for bit.
- **shard**: `lm.auto()` has a sharding for every variable, and the model loads onto 8 devices.
- **load**: `lk.from_preset` gives the same as `from_preset`, bit for bit.
- **LoRA**: how many layers of the tiny backbone `enable_lora` adapts by default, and `.lora(2)` of the abstract model,
  with the same values bit for bit; – if KerasHub has none to adapt.
- **int8**: how many of its layers `quantize("int8")` changes, and `.quantize("int8")` of the abstract model, with the
  same values; – if none can be changed.

If KerasHub itself fails, the cell has its error; a test fails when the error is gone.
"""
_FOOTER = "Written by `python -m tests.keras.support_table`.\n"
_COLUMNS = ("build", "shard", "load", "LoRA", "int8")


def models() -> dict[str, HubModel]:
    """All rows, in order."""
    return {**BACKBONES, **TASKS}


def row(model: HubModel) -> str:
    """The line of one class."""
    reason = _cell(f"KerasHub: {model.reason}")
    if model.build_error:
        return f"| {model.name} | {reason} | | | | |"
    load = reason if model.load_error else "✓"
    if model.name in TASKS:
        return f"| {model.name} | ✓ | ✓ | {load} | as its backbone | as its backbone |"
    return f"| {model.name} | ✓ | ✓ | {load} | {_adapted(model)} | {_quantized(model)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _zeros(model: HubModel) -> Any:
    """The model with zeros for all variables: compiling its initializers is what would take time."""
    keras.backend.clear_session()
    abstract = lm.build_abstract(model.build)
    return abstract.framework.rebuild({p: jax.device_put(np.zeros(v.shape, v.dtype)) for p, v in abstract.items()})


def _adapted(model: HubModel) -> str:
    def adapt(built: Any) -> int:
        built.enable_lora(2)
        return sum(bool(getattr(layer, "lora_enabled", False)) for layer in _layers(built))

    return _counted(model, adapt)


def _quantized(model: HubModel) -> str:
    def quantize(built: Any) -> int:
        gc.freeze()  # Keras collects garbage with every kernel, and a process may have built hundreds of models before
        try:
            built.quantize("int8")
        finally:
            gc.unfreeze()
        return sum(getattr(layer, "quantization_mode", None) == "int8" for layer in _layers(built))

    return _counted(model, quantize)


def _layers(built: Any) -> list[Any]:
    return built._flatten_layers(include_self=False)  # public names list only the outermost ones


def _counted(model: HubModel, action: Callable[[Any], int]) -> str:
    """What to put into a cell: a count, a dash for none, or KerasHub's error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(action(_zeros(model)) or "–")
        except Exception as error:  # whatever KerasHub raises belongs into the table
            return _cell(f"KerasHub: {type(error).__name__}: {str(error).splitlines()[0].partition('. ')[0]}")


def page(rows: list[str]) -> str:
    """The whole page around the rows."""
    count = {name: len({model.cls for model in table.values()}) for name, table in _TABLES.items()}
    introduction = _INTRODUCTION.format(version=keras_hub.__version__, **count)
    header = f"| class | {' | '.join(_COLUMNS)} |\n|---|{'---|' * len(_COLUMNS)}"
    return "\n".join([introduction, header, *rows, "", _FOOTER])


_TABLES = {"backbones": BACKBONES, "tasks": TASKS}


def main(names: list[str]) -> None:
    if names:
        print("\n".join(row(models()[name]) for name in names))
        return
    rows: list[str] = []
    for model in models().values():
        rows.append(row(model))
        print(f"{len(rows)} of {len(models())}: {rows[-1]}", file=sys.stderr, flush=True)
        if len(rows) % 20 == 0:
            jax.clear_caches()
    _, mark, rest = PAGE.read_text().partition(SECTION)
    PAGE.write_text(page(rows) + f"\n{mark}{rest}")


if __name__ == "__main__":
    main(sys.argv[1:])
