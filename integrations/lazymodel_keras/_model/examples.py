"""What a Keras model's own functions will be called with: from what the user gives, or from what the model itself says.

Responsible for one batch, in the structure, shapes, dtypes and placement in which Keras hands it to what it compiles.
Preprocessors run on examples, since what they make of these (masks of bool, weights) is said nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from lazymodel import LazyModelError

_SEQUENCE = 1024  # tokens, where nothing is said and the model takes as many
_IMAGE = 224  # pixels a side, where a model takes images of any size


def inputs_of(model: Any, batch: int, sequence: int | None, described: dict[str, None] | None = None) -> Any:
    """Structs of what a functional model takes, its unknown sizes filled in; `described` gets them as text.

    Raises:
        LazyModelError: It does not say.
    """
    tensors = getattr(model, "input", None) if isinstance(model, keras.Model) else None
    if tensors is None and isinstance(model, keras.Sequential) and model.built:
        (tensors,) = model.inputs
    if tensors is None:
        raise LazyModelError(
            f"{getattr(model, 'name', type(model).__name__)} does not say what inputs it takes (it is no functional "
            "Keras model); give them: Compile('predict', x) or Compile('train', x, y), and for a plan a function and "
            "its inputs"
        )
    if sequence is None:
        longest = (getattr(owner, "max_sequence_length", None) for owner in (model, getattr(model, "backbone", None)))
        sequence = min([_SEQUENCE, *(length for length in longest if isinstance(length, int) and length > 0)])

    def struct(tensor: Any) -> jax.ShapeDtypeStruct:
        unknown = _IMAGE if len(tensor.shape) > 3 else sequence
        shape = (batch, *(unknown if size is None else size for size in tensor.shape[1:]))
        if described is not None:
            described[f"{' × '.join(map(str, shape))} {tensor.dtype}"] = None
        return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(tensor.dtype))

    return keras.tree.map_structure(struct, tensors)


def first_batch(model: Any, what: str, inputs: Sequence[Any], batch: int | None, sequence: int | None) -> Any:
    """One batch as `fit` (`what="train"`) or `predict` hands it to the function that it compiles, as structs.

    `inputs` are what they are called with: `x`, `y`, `sample_weight`. With all three the batch is that of
    `train_on_batch`, which has a place for weights even if they are None.

    Raises:
        LazyModelError: The model does not say what it takes, or its preprocessor does not take this.
    """
    x, y, weights = (*map(_values, inputs), None, None, None)[:3]
    if getattr(model, "preprocessor", None) is None:
        x = _values(inputs_of(model, batch or 1, sequence)) if x is None else x
        if what == "train" and y is None:
            y = _labels(model, x)
        return _placed((x, y, weights) if len(inputs) > 2 else keras.utils.pack_x_y_sample_weight(x, y, weights))
    x = _example(model, batch or 1) if x is None else x

    def preprocess(y: Any) -> Any:
        return model.preprocess_samples(x, y, weights)

    packed = _preprocessed(model, what, sequence, lambda: preprocess(y))
    made, labels, _ = keras.utils.unpack_x_y_sample_weight(packed)
    if what == "train" and labels is None:
        y = _labels(model, jax.tree.map(np.asarray, made))
        packed = _preprocessed(model, what, sequence, lambda: preprocess(y))
    return _placed(packed)


def generated(model: Any, inputs: Sequence[Any], batch: int | None, sequence: int | None) -> tuple[Any, dict[str, Any]]:
    """What `generate` will be called with: what is given, or empty texts, or without a preprocessor rows of tokens."""
    if getattr(model, "preprocessor", None) is None:
        tokens = inputs[0] if inputs else inputs_of(model, batch or 1, sequence)
        return _values(tokens), {"stop_token_ids": None}  # 'auto', the default, needs a tokenizer
    return _values(inputs[0]) if inputs else _example(model, batch or 1), {"max_length": sequence}


def _example(model: Any, batch: int) -> Any:
    """What a task's preprocessor takes: texts, or images of its own size."""
    preprocessor = model.preprocessor
    size = getattr(preprocessor, "image_size", None)
    if getattr(preprocessor, "tokenizer", None) is None and size is not None:
        return np.zeros((batch, *size, 3), "float32")
    return [""] * batch


def _preprocessed(model: Any, what: str, sequence: int | None, preprocess: Callable[[], Any]) -> Any:
    try:
        with _padded(model.preprocessor, sequence):
            return jax.tree.map(np.asarray, preprocess())
    except Exception as error:
        raise refused_example(model, what, error) from error


def refused_example(model: Any, what: str, error: Exception) -> LazyModelError:
    """The error for what a task or its preprocessor does not take."""
    return LazyModelError(
        f"{model.name!r} cannot be called with what Compile({what!r}) gives it ({type(error).__name__}: {error}). "
        f"Give another batch size, or an example of what it will be called with: Compile({what!r}, x)"
    )


@contextlib.contextmanager
def _padded(preprocessor: Any, sequence: int | None) -> Generator[None]:
    """Has a preprocessor pad to a length for a while."""
    if sequence is None:
        yield
        return
    own = preprocessor.sequence_length
    preprocessor.sequence_length = sequence
    try:
        yield
    finally:
        preprocessor.sequence_length = own


def _labels(model: Any, x: Any) -> np.ndarray:
    """Labels as a loss of Keras takes them: class numbers for a sparse one, else values like the outputs."""
    loss = getattr(model, "loss", None)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None) or type(loss).__name__

    def symbolic(array: Any) -> Any:
        return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))

    output = model.compute_output_spec(jax.tree.map(symbolic, x))
    if loss is None or isinstance(loss, list | tuple | dict) or not hasattr(output, "shape"):
        raise LazyModelError(
            f"{model.name!r} does not say what labels its loss takes (it has {name} and outputs {output}); give them: "
            "Compile('train', x, y)"
        )
    if name.lower().startswith("sparse"):
        return np.zeros(output.shape[:-1], "int32")
    return np.zeros(output.shape, "float32")


def _values(given: Any) -> Any:
    """Arrays of zeros in the place of structs."""

    def value(leaf: Any) -> Any:
        return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(value, given)


def _placed(batch: Any) -> Any:
    """A batch as structs, split over processes and devices as the active distribution does."""
    distribution = keras.distribution.distribution()

    def struct(value: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(value)
        if distribution is None:
            return described(array)
        layout = distribution.get_data_layout(array.shape).backend_layout
        return described(jax.make_array_from_process_local_data(layout, array))

    return jax.tree.map(struct, batch)


def described(array: Any) -> jax.ShapeDtypeStruct:
    """The struct that a jitted function takes for an array: with its sharding, if it is committed to that."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    sharding = array.sharding if isinstance(array, jax.Array) and array.committed else None
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
