"""lazymodel for Keras and KerasHub: build models abstractly, materialize them sharded, stream their weights.

    >>> import jax, keras, keras_hub, numpy as np, lazymodel as lm, lazymodel_keras as lk
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> config = {"vocabulary_size": 64, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
    >>> config |= {"hidden_dim": 16, "intermediate_dim": 32, "head_dim": 8}
    >>> keras_hub.models.GemmaBackbone(**config).save_to_preset("preset")
    >>> mesh = Mesh(np.array(jax.devices()), ("model",))
    >>> model = lk.from_preset(keras_hub.models.GemmaBackbone, "preset", mesh=mesh, rules=lm.auto())
    >>> abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset")  # reads no weights
    >>> with lk.deferred():  # the same for unchanged code
    ...     model = keras_hub.models.GemmaBackbone.from_preset("preset")
    >>> def make_model():
    ...     model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
    ...     model.compile("adam", "mse")
    ...     return model

Examples in docstrings continue from here.
`lazymodel.build_abstract` takes Keras classes, factories and bound `from_preset` methods.
"""

from lazymodel_keras._began import BEGAN as _BEGAN  # before slow imports

# isort: split
from lazymodel_keras import _versions as _versions  # first: with older versions, later imports fail with unclear errors

# isort: split
from lazymodel._show import clock as _clock
from lazymodel_keras._adapter import adapter
from lazymodel_keras._build import enable_lora
from lazymodel_keras._model.distribution import distribution
from lazymodel_keras._model.lora import merge_lora
from lazymodel_keras._tensorflow import leave_out_tensorflow
from lazymodel_keras._train.callbacks import TrainingCheckpoint, training_state
from lazymodel_keras._train.restore import restore
from lazymodel_keras._train.saving import save_preset, streamed_saving
from lazymodel_keras.hub import abstract_from_preset, deferred, from_preset, load_model

__all__ = [
    "TrainingCheckpoint",
    "abstract_from_preset",
    "adapter",
    "deferred",
    "distribution",
    "enable_lora",
    "from_preset",
    "leave_out_tensorflow",
    "load_model",
    "merge_lora",
    "restore",
    "save_preset",
    "streamed_saving",
    "training_state",
]

_clock.imported("lazymodel_keras", _BEGAN)
