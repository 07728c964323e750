"""What `lazymodel plan` needs of Keras: models from a bare configuration, and their own forward pass and loss.

Responsible for finding out what a preset, a folder or a `config.json` describes, without weights where there are none,
and for turning an abstract Keras model into functions of its variables that a compiler takes. What they cost is said by
`lazymodel._plan`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lazymodel import AbstractModel, CheckpointError, LazyModelError
from lazymodel._plan_compiled import PlannedFunction
from lazymodel._quiet import quiet_tensorflow
from lazymodel._report import closest
from lazymodel_keras.hub import abstract_from_preset

_WEIGHTS = ("*.weights.h5", "*.weights.json", "*.safetensors", "*.safetensors.index.json")
_SEQUENCE = 1024  # tokens, where nothing is said and the model takes as many
_IMAGE = 224  # pixels a side, where a model takes images of any size


def plan_model(
    source: str,
    *,
    cls: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    lora_rank: int | None = None,
) -> AbstractModel:
    """The abstract model that a preset or a configuration describes.

    Args:
        source: A preset's name or URI, the folder of a KerasHub preset or of a Hugging Face model, or a JSON file like
            their `config.json`. Weights that are in the folder are what would be loaded; none are needed. Of a preset
            that is not on this machine KerasHub fetches the configuration only.
        cls: The name of a KerasHub class, such as `Gemma3CausalLM`; None is the backbone that the configuration names.
        dtype: The dtype policy, such as `bfloat16`; None is what `from_preset` would take.
        quantize: The mode to quantize to, as in `from_preset`.
        lora_rank: The rank of LoRA pairs that the model is to have, as in `from_preset`.

    Raises:
        CheckpointError: There is no such preset, file or folder, or KerasHub cannot read it.
        LazyModelError: KerasHub has no such class.
    """
    try:
        with quiet_tensorflow():
            import keras_hub
    except ModuleNotFoundError as error:
        raise LazyModelError(
            f"presets and configurations are read by KerasHub, and {error.name} is not installed: "
            "pip install 'lazymodel[keras]'"
        ) from error
    models: Any = keras_hub.models
    target = models.Backbone
    # A task's preprocessor needs vocabularies, and a plan no texts.
    options: dict[str, Any] = {"quantize": quantize, "lora_rank": lora_rank}
    if dtype is not None:
        options["dtype"] = dtype
    if cls is not None:
        target = getattr(models, cls, None)
        if target is None:
            raise LazyModelError(f"keras_hub.models has no class {cls!r}{closest(cls, vars(models))}")
        if not issubclass(target, models.Backbone):
            options["preprocessor"] = None
    if dtype is not None:
        try:
            keras.dtype_policies.get(dtype)
        except (TypeError, ValueError) as error:
            raise LazyModelError(f"{dtype!r} is not a dtype policy of Keras: {error}") from error
    if os.path.isfile(source):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(source, os.path.join(folder, "config.json"))
            return _from_folder(target, folder, source, False, options)
    if os.path.isdir(source):
        has_weights = any(next(Path(source).glob(pattern), None) for pattern in _WEIGHTS)
        return _from_folder(target, source, source, has_weights, options)
    try:
        return _abstract(target, source, False, options)
    except (CheckpointError, LazyModelError):
        raise
    except Exception as error:  # each of the hubs that KerasHub asks has errors of its own
        raise CheckpointError(
            f"cannot get the configuration of preset {source!r} ({type(error).__name__}: {error}). It is fetched from "
            "the network unless it was before; give a folder or a config.json instead"
        ) from error


def _abstract(target: Any, preset: str, load: bool, options: Mapping[str, Any]) -> AbstractModel:
    with warnings.catch_warnings():
        # Keras has one for every normalization layer, and a plan shows what is quantized.
        warnings.filterwarnings("ignore", message="Layer .* does not have a `quantize`")
        return abstract_from_preset(target, preset, load_weights=load, **options)


def _from_folder(target: Any, folder: str, source: str, load: bool, options: Mapping[str, Any]) -> AbstractModel:
    path = os.path.join(folder, "config.json")
    if os.path.exists(path):
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{source} is not JSON: {error}") from error
        if not isinstance(config, dict) or not {"registered_name", "model_type", "architecture"} & set(config):
            raise CheckpointError(
                f"{source} is not a model's configuration: it has none of the keys registered_name (KerasHub), "
                "model_type (Hugging Face) and architecture (timm)"
            )
    try:
        return _abstract(target, folder, load, options)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(folder, source)) from error
    except (TypeError, AttributeError, IndexError) as error:  # a configuration with values of other types
        raise CheckpointError(f"KerasHub cannot build a model from {source}: {error}") from error


def plan_function(skeleton: Any, what: str, *, batch: int, sequence: int | None) -> PlannedFunction:
    """A Keras model's own forward pass or loss, of its variables by path.

    The loss of a language model is the cross-entropy of its logits, in float32, with tokens of the same shape; that of
    any other model is the mean of its outputs' squares, which has the same shapes to differentiate.

    Args:
        skeleton: The `Skeleton` of one Keras model.
        what: `"forward"` or `"train"`.
        batch: The batch size.
        sequence: Tokens of a sequence, where the model takes any number; None is 1024 or the most that it takes.

    Raises:
        LazyModelError: The model does not say what it takes.
    """
    model = skeleton.result
    tensors = getattr(model, "input", None) if isinstance(model, keras.Model) else None
    if tensors is None and isinstance(model, keras.Sequential) and model.built:
        (tensors,) = model.inputs
    if tensors is None:
        raise LazyModelError(
            f"{getattr(model, 'name', type(model).__name__)} does not say what inputs it takes (it is no functional "
            "Keras model); give a function and its inputs"
        )
    if sequence is None:
        sequence = min([_SEQUENCE, *_longest(model)])
    described: dict[str, None] = {}

    def struct(tensor: Any) -> jax.ShapeDtypeStruct:
        unknown = _IMAGE if len(tensor.shape) > 3 else sequence
        shape = (batch, *(unknown if size is None else size for size in tensor.shape[1:]))
        described[f"{' × '.join(map(str, shape))} {tensor.dtype}"] = None
        return jax.ShapeDtypeStruct(shape, jnp.dtype(tensor.dtype))

    inputs = keras.tree.map_structure(struct, tensors)
    training = what == "train"

    def function(values: Mapping[str, Any], inputs: Any) -> Any:
        mapping = [(variable, values[path]) for path, (variable, _) in skeleton.variables.items()]
        with keras.StatelessScope(state_mapping=mapping):
            outputs = model(inputs, training=training)
        return loss(outputs, inputs) if training else outputs

    # A backbone's outputs have the shape of logits, too; only a task knows that they are.
    is_task = getattr(model, "backbone", None) is not None
    loss = _cross_entropy if is_task and isinstance(inputs, Mapping) and "token_ids" in inputs else _mean_square
    return PlannedFunction(function, (inputs,), f"{model.name} of {', '.join(described)}")


def _cross_entropy(outputs: Any, inputs: Any) -> Any:
    tokens = inputs["token_ids"]
    if getattr(outputs, "ndim", 0) != 3 or outputs.shape[:2] != tokens.shape:
        return _mean_square(outputs, inputs)
    logits = jax.nn.log_softmax(outputs.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None].astype(jnp.int32), axis=-1))


def _mean_square(outputs: Any, inputs: Any) -> Any:
    arrays = [array for array in jax.tree.leaves(outputs) if jnp.issubdtype(array.dtype, jnp.floating)]
    return sum(jnp.mean(jnp.square(array.astype(jnp.float32))) for array in arrays)


def _longest(model: Any) -> Iterator[int]:
    """The longest sequence that a model takes, where it says so."""
    for owner in (model, getattr(model, "backbone", None)):
        length = getattr(owner, "max_sequence_length", None)
        if isinstance(length, int) and length > 0:
            yield length


__all__ = ["plan_function", "plan_model"]
