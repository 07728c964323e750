"""lazymodel for Keras and KerasHub: build models abstractly, materialize them sharded, stream their weights.

    import lazymodel_keras as lk

    model = lk.from_preset(keras_hub.models.GemmaCausalLM, "gemma2_9b_en")   # instead of cls.from_preset(preset)
    abstract = lk.abstract_from_preset(keras_hub.models.GemmaCausalLM, "gemma2_9b_en")  # stopped before any weight
    with lk.deferred():                                                       # unchanged code goes the same way
        model = keras_hub.models.GemmaCausalLM.from_preset("gemma2_9b_en")

`lazymodel.build_abstract` takes Keras classes, factories and bound `from_preset` methods.
"""

from lazymodel_keras import _versions as _versions  # first: what follows fails obscurely with versions that are too old

# isort: split
from lazymodel_keras._adapter import adapter
from lazymodel_keras._deferred import deferred, load_model
from lazymodel_keras._model.training import distribution
from lazymodel_keras._record import kerashub as kerashub
from lazymodel_keras._train.callbacks import TrainingCheckpoint, TrainingState, training_state
from lazymodel_keras._train.restore import restore
from lazymodel_keras._train.saving import streamed_saving
from lazymodel_keras._transform.lora import enable_lora
from lazymodel_keras.hub import abstract_from_preset, from_preset

__all__ = [
    "TrainingCheckpoint",
    "TrainingState",
    "abstract_from_preset",
    "adapter",
    "deferred",
    "distribution",
    "enable_lora",
    "from_preset",
    "load_model",
    "restore",
    "streamed_saving",
    "training_state",
]
