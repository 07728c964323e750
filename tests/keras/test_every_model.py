"""Every backbone and task class of KerasHub: built abstractly, materialized and loaded, bit for bit as stock does it.

And every backbone with LoRA and with int8 weights while it is loaded: what stock makes of it afterwards. The default
suite does this for a few, `-m large -k every_model` for all. Classes that KerasHub itself cannot build or load carry
its error in `hub_configs`, and their test fails once that error is gone.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh

import lazymodel as lm
import lazymodel_keras as lk
from tests.large import mostly_large

from .hub_configs import BACKBONES, TASKS, HubModel, exported
from .models import assert_same, bits, randomize, seeded
from .support_table import PAGE, row
from .test_auto_hub import SHAPES, check_specs
from .versions import needs_saved_tasks

# KerasHub's own layers cause these; none of them concerns how variables are made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*:UserWarning:keras"),
    pytest.mark.filterwarnings("ignore:(?s).*:UserWarning:keras_hub"),
]

# Plain layers, buffers assigned while building, states of random generators, experts, and a task with its metrics.
_BUILT = ("VGGBackbone", "Gemma3Backbone", "DINOV2Backbone", "Qwen3MoeBackbone", "BertMaskedLM")
_LOADED = ("BertMaskedLM",)

_MODELS = {**BACKBONES, **TASKS}


@pytest.mark.parametrize(("base", "table"), [("Backbone", BACKBONES), ("Task", TASKS)])
def test_every_exported_class_is_in_the_table(base: str, table: dict[str, HubModel]) -> None:
    names = {model.cls.__name__ for model in table.values()}
    assert set(exported(getattr(keras_hub.models, base))) == names


@pytest.mark.parametrize("name", mostly_large(_MODELS, _BUILT))
def test_builds_abstractly(name: str) -> None:
    model = _MODELS[name]
    if model.build_error:
        with pytest.raises(Exception, match=model.build_error):
            model.build()
        return
    live = sum(array.nbytes for array in jax.live_arrays())
    abstract = lm.build_abstract(model.build)
    variables = _all_variables(abstract.framework.result)
    assert len(abstract) >= len(variables) > 0
    assert all(variable._value is None for variable in variables), "a variable has a value already"
    nbytes = sum(array.nbytes for array in jax.live_arrays()) - live
    assert nbytes < abstract.nbytes / 2  # tables and scalars that models keep
    if name in BACKBONES:
        for shape in SHAPES:
            check_specs(abstract, shape)


@pytest.mark.large  # a program is compiled for every shape; model/test_build.py has some
@pytest.mark.parametrize("name", _MODELS)
def test_values(name: str) -> None:
    """Materialized values are those that stock KerasHub initializes."""
    model = _MODELS[name]
    if model.build_error:
        return
    stock = seeded(model.build)
    abstract = seeded(lambda: lm.build_abstract(model.build))
    # Metrics that a compiled model has not used yet hold variables, but do not tell of them.
    assert len(abstract) >= len(_all_variables(stock))
    _assert_equal(stock, abstract.materialize())


@pytest.mark.parametrize(
    "name", mostly_large(_MODELS, _LOADED, lambda name: [needs_saved_tasks] if name in TASKS else [])
)
def test_round_trip(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    model, folder = _MODELS[name], tmp_path / "preset"
    if model.build_error:
        return
    if model.load_error:
        with pytest.raises(Exception, match=model.load_error):
            _stock_round_trip(model, folder)
        return
    stock = _stock_round_trip(model, folder)
    ours = seeded(lambda: lk.from_preset(model.cls, str(folder), mesh=mesh8, rules=lm.auto(), **model.load))
    _assert_equal(stock, ours)
    assert any(not v.value.is_fully_replicated for v in ours.weights)


def _stock_round_trip(model: HubModel, folder: Path) -> Any:
    randomize(seeded(model.build, seed=1)).save_to_preset(str(folder))
    return seeded(lambda: model.cls.from_preset(str(folder), **model.load))


def test_the_page_has_every_class() -> None:
    """The table in the documentation, where it is of the KerasHub that is installed."""
    text = PAGE.read_text()
    if f" KerasHub {keras_hub.__version__} " not in text:
        pytest.skip(f"the page is of another version than KerasHub {keras_hub.__version__}")
    table = text.partition("\n## ")[0]  # other tables follow
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [cells[0].removeprefix("| ") for cells in rows] == list(_MODELS)
    for cells, model in zip(rows, _MODELS.values(), strict=True):
        assert (cells[1] == "✓") == (not model.build_error), model.name
        assert (cells[3] == "✓") == (not model.build_error and not model.load_error), model.name
        assert bool(model.reason) == bool(model.build_error or model.load_error), model.name


@pytest.mark.large
@pytest.mark.parametrize("name", _MODELS)
def test_all_rows_of_the_page(name: str) -> None:
    assert row(_MODELS[name]) in PAGE.read_text().splitlines()


def _all_variables(model: Any) -> list[Any]:
    """What the model, its optimizer and its metrics hold, each variable once."""
    held = [*model.variables, *getattr(model, "metrics_variables", ())]
    held += getattr(getattr(model, "optimizer", None), "variables", ())
    return list({id(variable): variable for variable in held}.values())


def _assert_equal(stock: Any, ours: Any) -> None:
    assert_same(stock, ours, outputs=False)
    for expected, found in zip(_all_variables(stock), _all_variables(ours), strict=True):
        np.testing.assert_array_equal(bits(expected), bits(found), err_msg=expected.path)


_ADAPTABLE = [name for name, model in BACKBONES.items() if not (model.build_error or model.load_error)]


_VARIANTS: list[tuple[Callable[[Any], None], Callable[[lm.AbstractModel], lm.AbstractModel]]] = [
    (lambda model: model.enable_lora(2), lambda abstract: abstract.lora(2)),
    (lambda model: model.quantize("int8"), lambda abstract: abstract.quantize("int8")),
]


@pytest.mark.large
@pytest.mark.parametrize("name", _ADAPTABLE)
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
