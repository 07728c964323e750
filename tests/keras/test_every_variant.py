"""Every backbone of KerasHub with LoRA and with int8 weights while it is loaded: what stock KerasHub makes afterwards.

The default suite does this for a few, `-m large -k every_variant` for all.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import Mesh

import lazymodel as lm
import lazymodel_keras as lk

from .hub_configs import BACKBONES
from .models import assert_same, randomize, seeded
from .versions import mostly_large

_LOADED = [name for name, model in BACKBONES.items() if not (model.build_error or model.load_error)]


def _adapt(model: Any) -> None:
    model.enable_lora(2)


def _quantize(model: Any) -> None:
    model.quantize("int8")


_VARIANTS: list[tuple[Callable[[Any], None], Callable[[lm.AbstractModel], lm.AbstractModel]]] = [
    (_adapt, lambda abstract: abstract.lora(2)),
    (_quantize, lambda abstract: abstract.quantize("int8")),
]


@pytest.mark.parametrize("name", mostly_large(_LOADED, ["ViTBackbone"]))
def test_variants(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    """Both are equal to stock's bit for bit, or refused where stock fails or has nothing to change."""
    model, folder = BACKBONES[name], tmp_path / "preset"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the backbones, and of layers that Keras does not quantize
        randomize(seeded(model.build, seed=1)).save_to_preset(str(folder))
        for variant, step in _VARIANTS:
            stock, error = _stock(lambda: model.cls.from_preset(str(folder), **model.load), variant)

            def ours(step: Callable[[Any], Any] = step) -> Any:
                abstract = lk.abstract_from_preset(model.cls, str(folder), **model.load)
                return step(abstract).shard(mesh8, lm.auto()).materialize()

            if error is not None or not _changed(stock):
                with pytest.raises((lm.LazyModelError, *([type(error)] if error else []))):
                    seeded(ours)
            else:
                assert_same(stock, seeded(ours), outputs=False)


def _stock(load: Callable[[], Any], variant: Callable[[Any], None]) -> tuple[Any, Exception | None]:
    """What stock KerasHub makes of the loaded model, or how it fails."""

    def build() -> Any:
        loaded = load()
        gc.freeze()  # Keras collects garbage after every layer that it quantizes: all of this process' without it
        variant(loaded)
        return loaded

    try:
        return seeded(build), None
    except Exception as error:  # whatever KerasHub raises
        return None, error


def _changed(model: Any) -> bool:
    layers = model._flatten_layers(include_self=False)  # public names list only the outermost ones
    return any(getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None) for layer in layers)
