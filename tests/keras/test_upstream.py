"""Fails loudly when one of the private parts of Keras or KerasHub that `_upstream` names has moved."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
from keras.src.saving import saving_lib

from lazymodel_keras import _upstream


def test_variables_made_in_a_stateless_scope_are_pending() -> None:
    _upstream.set_pending_variables([])
    with keras.StatelessScope(initialize_variables=False) as scope:
        assert _upstream.current_scope() is scope
        variable = keras.Variable("ones", shape=(2,))
        assert variable._value is None
        assert variable._initializer is not None
        pending = _upstream.pending_variables()
        assert pending is not None
        assert any(other is variable for other in pending)
        _upstream.set_pending_variables([])
    with keras.StatelessScope():
        pass
    assert variable._value is None, "a variable taken off the list is not initialized"


def test_keras_variable_is_made_by_the_class_that_is_patched() -> None:
    assert "__init__" in vars(_upstream.VariableBase)
    assert issubclass(keras.Variable, _upstream.VariableBase)
    assert callable(keras.Variable._direct_assign)
    assert callable(keras.Variable._convert_to_tensor)
    assert keras.Variable(np.zeros(2))._layout is None


def test_weights_are_read_through_the_store_that_is_patched(tmp_path) -> None:
    assert _upstream.WeightsStore is saving_lib.H5IOStore
    assert issubclass(saving_lib.ShardedH5IOStore, saving_lib.H5IOStore)
    for name in ("__getitem__", "_get_h5_file"):
        assert name in vars(_upstream.WeightsStore)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.save_weights(tmp_path / "m.weights.h5")
    store = saving_lib.H5IOStore(tmp_path / "m.weights.h5", mode="r")
    store.get("layers/dense")
    assert store._h5_entry_group["0"].name == "/layers/dense/vars/0"
    store.close()


def test_from_preset_is_a_classmethod_of_two_classes() -> None:
    for cls in (keras_hub.models.Backbone, keras_hub.models.Task):
        assert isinstance(vars(cls)["from_preset"], classmethod)


def test_undone_draws() -> None:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with _upstream.undone_draws():
        first = keras.layers.Dense(2)
    second = keras.layers.Dense(2)
    assert first.name == second.name == "dense"
    assert first.kernel_initializer.seed == second.kernel_initializer.seed
