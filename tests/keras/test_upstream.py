"""Fails loudly when one of the private parts of Keras or KerasHub that `_upstream` names has moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import keras
import keras_hub
import numpy as np
import pytest
from keras.src.backend.common import global_state
from keras.src.saving import saving_lib

from lazymodel_keras import _upstream

from .versions import KERAS, parts


def test_variables_made_in_a_stateless_scope_are_pending() -> None:
    with _upstream.no_pending_variables():
        with keras.StatelessScope(initialize_variables=False) as scope:
            assert _upstream.current_scope() is scope
            variable = keras.Variable("ones", shape=(2,))
            assert _upstream.value(variable) is None
            assert _upstream.initializer(variable) is not None
            pending = global_state.get_global_attribute("uninitialized_variables")
            assert any(other is variable for other in pending)
            _upstream.not_pending(variable)
        with keras.StatelessScope():
            pass
    assert variable._value is None, "a variable taken off the list is not initialized"


BLOCKS = ["abs_max_quantize_grouped_with_zero_point"] if parts(KERAS) >= (3, 14) else []
CHECKED = ["safe_get_h5_dataset", "safe_get_h5_group"] if parts(KERAS) >= (3, 15) else []
WHOLE = ["_load_model_from_orbax_checkpoint"] if parts(KERAS) >= (3, 14) else []
# What is patched stands in the owner's own dictionary.
OWN: list[tuple[Any, list[str]]] = [
    (_upstream.VariableBase, ["__init__"]),
    (_upstream.WeightsStore, ["__getitem__", "_get_h5_file", "__setitem__"]),
    (_upstream.SAVING_LIB.ShardedH5IOStore, ["__setitem__"]),
    (_upstream.SAVING_LIB, ["is_memory_sufficient"]),
    (_upstream.SAVING_API, WHOLE),
    (_upstream.LEGACY_H5, ["load_subset_weights_from_hdf5_group", "load_optimizer_weights_from_hdf5_group", *CHECKED]),
]


def test_what_is_patched_is_there() -> None:
    for owner, names in OWN:
        assert all(callable(vars(owner).get(name)) for name in names), owner
    assert issubclass(keras.Variable, _upstream.VariableBase)
    assert callable(keras.Variable._direct_assign) and callable(keras.Variable._convert_to_tensor)
    assert keras.Variable(np.zeros(2))._layout is None
    assert issubclass(saving_lib.ShardedH5IOStore, saving_lib.H5IOStore)
    assert _upstream.WeightsStore is saving_lib.H5IOStore is _upstream.SAVING_LIB.H5IOStore
    for cls in (keras_hub.models.Backbone, keras_hub.models.Task):
        assert isinstance(vars(cls)["from_preset"], classmethod)
    for module in _upstream.QUANTIZERS:
        for name in ("abs_max_quantize", *BLOCKS, "pack_int4", "unpack_int4"):
            assert vars(module)[name] is getattr(keras.quantizers, name)
    for name in ("reshape", "transpose", "squeeze", "expand_dims"):
        assert vars(_upstream.OPS)[name] is getattr(keras.ops, name)


def test_kerashub_forgets_the_dtype_of_quantized_backbones() -> None:
    """Once it does not, `_record/weight_files`'s saved policies are not needed."""
    loader = _upstream.preset_loader_class()
    assert loader({}, {}).get_backbone_kwargs(trainable=True) == ({"dtype": None}, {"trainable": True})


def test_the_writer_of_hugging_face_folders_makes_arrays_with_the_function_that_is_replaced() -> None:
    assert hasattr(_upstream.exporter(), _upstream.EXPORTED)


def test_shards_are_found_through_the_index_that_is_replaced(tmp_path) -> None:
    """Of a folder whose tensors are stored under other names than converters ask for."""
    loader = _upstream.safetensors_loader()
    assert loader is not None
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with loader(str(tmp_path)) as opened:
        assert opened.safetensor_config == {"weight_map": {"a": "b.safetensors"}}
        assert Path(_upstream.index_of(opened)) == tmp_path / "model.safetensors.index.json"


def test_a_converter_is_what_the_loader_of_hugging_face_folders_asks_for() -> None:
    """One of ours takes its place for GGUF files of what KerasHub has none for; once it has, ours is not needed."""
    loader = _upstream.transformers_loader()
    made = loader("preset", {"model_type": "llama"})
    assert made.converter is _upstream.converter("llama3")
    made.converter = mock.MagicMock(backbone_cls=keras_hub.models.Phi3Backbone)
    assert made.check_backbone_class() is keras_hub.models.Phi3Backbone
    with pytest.raises(ValueError, match="no converter"):
        loader("preset", {"model_type": "phi3"})
    config = {"rms_norm_eps": 1e-5} | dict.fromkeys(
        ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"), 8
    )
    config |= {"num_key_value_heads": 8, "tie_word_embeddings": False, "rope_theta": 1e4}
    assert "layer_norm_epsilon" not in _upstream.converter("llama3").convert_backbone_config(config)
