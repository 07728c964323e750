"""Fails loudly when one of the private parts of Keras or KerasHub that `_upstream` names has moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import jax
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


def test_a_layers_output_is_known_where_its_layout_is_asked_for() -> None:
    found: list[Any] = []

    class Asked(keras.distribution.ModelParallel):
        def get_tensor_layout(self, path: str) -> None:
            found.append((path, _upstream.output_of_caller()))

    mesh = keras.distribution.DeviceMesh((8,), ["batch"], keras.distribution.list_devices())
    layer = keras.layers.Dense(2, name="own")
    with Asked(layout_map=keras.distribution.LayoutMap(mesh)).scope():
        output = layer(np.ones((3, 4)))
    assert [(path, each is output) for path, each in found if path.endswith("/output")] == [("own/output", True)]


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
    for name in ("abs_max_quantize", *BLOCKS, "pack_int4", "unpack_int4"):
        found = [vars(module)[name] for module in _upstream.QUANTIZERS if name in vars(module)]
        assert len(found) > 1 and {*found} == {getattr(keras.quantizers, name)}
    for name in ("reshape", "transpose", "squeeze", "expand_dims"):
        assert vars(_upstream.OPS)[name] is getattr(keras.ops, name)


def test_weights_are_read_through_the_store_that_is_patched(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.save_weights(tmp_path / "m.weights.h5")
    store = saving_lib.H5IOStore(tmp_path / "m.weights.h5", mode="r")
    store.get("layers/dense")
    assert store._h5_entry_group["0"].name == "/layers/dense/vars/0"
    store.close()


def test_undone_draws() -> None:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with _upstream.undone_draws():
        first = keras.layers.Dense(2)
    second = keras.layers.Dense(2)
    assert first.name == second.name == "dense"
    assert first.kernel_initializer.seed == second.kernel_initializer.seed
    keras.utils.clear_session()
    assert _upstream.automatic_name(keras.layers.BatchNormalization) == keras.layers.BatchNormalization().name


def test_every_optimizer_is_built_through_the_method_that_is_patched() -> None:
    assert issubclass(keras.optimizers.Optimizer, _upstream.OptimizerBase)
    variable = keras.Variable(np.zeros(3))
    for name in ("Adam", "Adafactor", "SGD", "Muon"):
        optimizer = getattr(keras.optimizers, name)()
        optimizer.build([variable])
        slots = [slots for slots in vars(optimizer).values() if isinstance(slots, list) and len(slots) == 1]
        assert name == "SGD" or any(slot.shape == (3,) and slot is not variable for (slot,) in slots)


def test_what_is_compiled_is_closed_over_by_the_functions_that_models_keep() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2)
    assert not _upstream.is_built(model)
    _upstream.build_for(model, (np.zeros((1, 2), "float32"), np.zeros((1, 2), "float32")))
    assert _upstream.is_built(model)
    assert len(model.metrics_variables) == 4
    model.make_train_function()
    model.make_predict_function()
    jitted = [_upstream.jitted_functions(function) for function in (model.train_function, model.predict_function)]
    names = [sorted(each.__name__ for each in functions) for functions in jitted]
    joins = [name for found in names for name in found if name in _upstream.JOINS_OUTPUTS]
    assert joins
    steps = [[name for name in found if name not in joins] for found in names]
    scans = ["multi_step_scan"] if "multi_step_scan" in steps[0] else []  # from Keras 3.16 on
    assert steps == [[*scans, "train_step"], [*scans, "predict_step"]]


def test_a_call_of_a_jitted_function_is_seen_and_not_made() -> None:
    state = keras.Variable(np.ones(2, "float32"))
    jitted = jax.jit(lambda inputs, state: 1 / 0)

    def function(inputs: Any) -> Any:
        return jitted(inputs, state=state.value)

    found, args, kwargs = _upstream.call_of_jitted(function, (3,), {})
    assert found is jitted
    assert args == (3,)
    assert kwargs["state"] is state.value
    with pytest.raises(ZeroDivisionError):
        function(3)


def test_values_of_abstract_variables_are_those_of_the_scope_or_of_their_initializer() -> None:
    class Scope(keras.StatelessScope):
        def get_current_value(self, variable: Any) -> Any:
            return "described" if variable is known else None

    with _upstream.no_pending_variables(), keras.StatelessScope(initialize_variables=False):
        known, other = (keras.Variable("ones", shape=(2,)) for _ in range(2))
        _upstream.not_pending(known)
        _upstream.not_pending(other)
    with _upstream.initialized_by([(known, mock.Mock()), (other, mock.Mock(side_effect=LookupError))]), Scope():
        assert known.value == "described"
        with pytest.raises(LookupError):
            _ = other.value
    np.testing.assert_array_equal(other.value, np.ones(2))


def test_arrays_that_are_committed_to_no_device() -> None:
    array = jax.device_put(np.arange(4.0), jax.devices()[0])
    assert array.committed
    found = _upstream.uncommitted(array)
    assert not found.committed
    assert found.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1, donate_argnums=0)(found), np.arange(1.0, 5.0))


def test_kerashub_forgets_the_dtype_of_quantized_backbones() -> None:
    """Once it does not, `_record/weight_files`'s saved policies are not needed."""
    loader = _upstream.preset_loader_class()
    assert loader({}, {}).get_backbone_kwargs(trainable=True) == ({"dtype": None}, {"trainable": True})


def test_what_gpt_oss_is_decoded_with_is_all_that_its_converter_makes_of_samples() -> None:
    """KerasHub's converter assigns what it decodes, transposed, and asks for nothing else of the experts' numbers."""
    layer, backbone, loader = mock.MagicMock(), mock.MagicMock(num_layers=1), mock.MagicMock()
    backbone.transformer_layers = [layer]
    blocks, scales = np.full((1, 3, 1, 16), 0x42, np.uint8), np.full((1, 3, 1), 128, np.uint8)
    loader.get_tensor = lambda name: {"blocks": blocks, "scales": scales}.get(name.rpartition("_")[2])
    _upstream.gpt_oss_converter().convert_weights(backbone, loader, {})
    for variable in (layer.sparse_moe_block.experts.gate_up_proj, layer.sparse_moe_block.experts.down_proj):
        ((assigned,), _) = variable.assign.call_args
        np.testing.assert_array_equal(assigned, np.tile(np.float32([2, 4] * 16)[:, None], (1, 1, 3)))


def test_the_writer_of_hugging_face_folders_makes_arrays_with_the_function_that_is_replaced() -> None:
    assert hasattr(_upstream.exporter(), _upstream.EXPORTED)


def test_keyword_arguments_that_nobody_took_end_in_a_functional_model() -> None:
    cls, config = keras_hub.models.BertBackbone, {"vocabulary_size": 8, "num_layers": 1, "num_heads": 1}
    cls(**config, hidden_dim=2, intermediate_dim=2, mseh=3)
    stop = mock.patch.object(_upstream.Functional, "__init__", side_effect=LookupError)
    with stop as end, pytest.raises(LookupError):
        cls(**config, hidden_dim=2, intermediate_dim=2, mseh=3)
    assert end.call_args.kwargs["mseh"] == 3


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


def test_the_loader_asks_its_converter_with_its_configuration() -> None:
    """Both are its attributes, which are replaced while `load_backbone` runs."""
    loader = _upstream.transformers_loader()("preset", {"model_type": "llama"})
    assert callable(vars(type(loader)).get("load_backbone"))
    loader.config = config = {"model_type": "other"}
    loader.converter = mock.MagicMock()
    loader.converter.convert_backbone_config = lambda found: {"found": found}
    assert loader.load_backbone(dict, False, more=1) == {"found": config, "more": 1}


LORA_LAYERS: dict[str, Any] = {
    "dense": lambda: keras.layers.Dense(4, name="layer"),
    "einsum": lambda: keras.layers.EinsumDense("ab,bcd->acd", (2, 4), bias_axes="d", name="layer"),
    "embedding": lambda: keras.layers.Embedding(3, 4, name="layer"),
    "reversible": lambda: keras.layers.ReversibleEmbedding(3, 4, name="layer"),
    "convolution": lambda: keras.layers.Conv1D(4, 2, name="layer"),
}


@pytest.mark.parametrize("name", [*LORA_LAYERS, "dense int8", "einsum int8", "reversible int8"])
def test_a_layer_without_its_lora_pair_is_as_before(name: str) -> None:
    kind, _, quantize = name.partition(" ")
    layer = LORA_LAYERS[kind]()
    layer.build((2, 5, 3) if kind == "convolution" else (2, 3))
    if quantize:
        layer.quantize(quantize)
    before = {**vars(layer)}
    variables = [(id(v), v.trainable) for v in layer.variables]
    assert _upstream.lora_variables(layer) is None
    layer.enable_lora(2, lora_alpha=3)
    weight, *pair = found = _upstream.lora_variables(layer) or []
    assert len(found) == 3 and weight.name in ("kernel", "embeddings")
    assert [v.path for v in pair] == [f"layer/lora_{weight.name}_{side}" for side in "ab"]
    if quantize:
        (kernel, value), (scale, new) = _upstream.requantized(layer)
        assert kernel is weight and scale.path == f"{weight.path}_scale"
        np.testing.assert_array_equal(value, kernel)  # b is zero
        np.testing.assert_allclose(new, scale, rtol=1e-5)
    _upstream.drop_lora(layer)
    assert [(id(v), v.trainable) for v in layer.variables] == variables
    assert all(value is before.get(name) for name, value in vars(layer).items() if name != "lora_alpha")
    layer.enable_lora(1)


def test_a_backbone_forgets_its_lora_layers() -> None:
    config = {"vocabulary_size": 8, "num_layers": 1, "num_heads": 1, "hidden_dim": 2, "intermediate_dim": 2}
    backbone = keras_hub.models.BertBackbone(**config)
    before = set(vars(backbone))
    backbone.enable_lora(1)
    assert len(backbone._lora_enabled_layers) == 2 and backbone._lora_rank == 1
    _upstream.drop_lora_layers(backbone)
    assert set(vars(backbone)) == before
