"""Functions that `predict`, `fit` and `generate` compile on their first call, lowered while variables have no values.

Responsible for lowering the same functions that the model keeps, with the arguments that it will pass, so that their
first call finds them compiled. The arguments are one batch, in the structure, shapes, dtypes and placement that Keras
passes to compiled functions: from the user's inputs, or from the model itself. Preprocessors run on examples, since
their outputs (bool masks, weights) are not described anywhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from lazymodel import LazyModelError
from lazymodel._abstract.framework import LoweredFunction
from lazymodel._errors import warn
from lazymodel_keras import _upstream

_SEQUENCE = 1024  # tokens, by default, if the model takes as many
_IMAGE = 224  # pixels per side, if a model takes images of any size


class _Described(keras.StatelessScope):
    """A scope in which the value of a variable is the struct that describes it, except in programs being traced."""

    def __init__(self, structs: Mapping[int, jax.ShapeDtypeStruct]) -> None:
        super().__init__(initialize_variables=False)
        self._structs = structs

    def get_current_value(self, variable: Any) -> Any:
        traced = isinstance(jax.numpy.zeros(()), jax.core.Tracer)
        return None if traced else self._structs.get(id(variable))


@contextlib.contextmanager
def holding(structs: Sequence[tuple[Any, jax.ShapeDtypeStruct]]) -> Generator[None]:
    """Within the block, some abstract variables have structs as values.

    A program that reads a variable other than through its arguments would keep its value, so this raises
    LazyModelError.
    """

    def reject(variable: Any) -> Any:
        def initializer(*args: Any, **kwargs: Any) -> Any:
            raise LazyModelError(
                f"what is compiled reads variable {variable.path}, which is none of its arguments, and which has no "
                "value yet. Pass it as an argument, or load the model without compile"
            )

        return initializer

    with (
        _upstream.initialized_by([(variable, reject(variable)) for variable, _ in structs]),
        _Described({id(variable): struct for variable, struct in structs}),
    ):
        yield


def lower(
    model: Any,
    structs: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    what: str,
    inputs: Sequence[Any],
    *,
    batch: int | None,
    sequence: int | None,
    anew: bool,
) -> list[LoweredFunction]:
    """Lowers the programs that one of a model's own functions will run.

    `structs` are its abstract variables with their future arrays. With `anew` the model gets a new function in place of
    the one that it keeps, for other shardings for example.

    Raises:
        LazyModelError: The model has no such function, compiles none, or does not define its inputs.
    """
    check(model, what)
    if what == "train" and not _upstream.is_built(model):
        raise LazyModelError(f"fit would build the optimizer of {model.name!r} first; fit uses none of with_optimizer")
    several = any(len(struct.sharding.device_set) > 1 for _, struct in structs if struct.sharding)
    if what == "train" and several and keras.distribution.distribution() is None:
        warn(
            f"fit of {model.name!r} without a keras.distribution leaves variables where the compiler likes, and "
            "compiles its second step for that. Load and train it within lazymodel_keras.distribution(mesh).scope()"
        )
    if what == "generate":
        return _lower_generate(model, structs, inputs, batch, sequence, anew)
    data = first_batch(model, what, inputs, batch, sequence)
    groups = [model.trainable_variables, model.non_trainable_variables]
    if what == "train":
        groups += [model.optimizer.variables, model.metrics_variables]
    with holding(structs):
        make = model.make_train_function if what == "train" else model.make_predict_function
        make(force=anew)
        state = tuple([_struct(variable.value) for variable in group] for group in groups)
        function = model.train_function if what == "train" else model.predict_function
        jitted = {each.__name__: each for each in _upstream.jitted_functions(function)}
        together = next((jitted.pop(name) for name in _upstream.JOINS_OUTPUTS if name in jitted), None)
        step, *_ = jitted.values()
        if "multi_step_scan" in jitted:  # from Keras 3.16 on
            step = jitted["multi_step_scan"]
            data = jax.tree.map(lambda batch: _stacked(batch, model.steps_per_execution), data)
        lowered = step.lower(state, data)

    def concatenate(compiled: jax.stages.Compiled) -> None:
        # Program by which `predict`, with several steps per execution, joins their outputs.
        assert together is not None
        outputs, _ = _results(lowered, compiled, (state, data))
        together.lower([outputs] * model.steps_per_execution).compile()

    besides = functools.partial(_run_epoch, model, state[-1]) if what == "train" else concatenate if together else None
    return [LoweredFunction(f"{what}: {model.name} of {_text(data)}", lowered, besides)]


def _stacked(batch: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    """So many batches, along a new first axis that no mesh axis divides."""
    sharding = batch.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((count, *batch.shape), batch.dtype, sharding=sharding)


def _run_epoch(model: Any, structs: Sequence[jax.ShapeDtypeStruct], compiled: jax.stages.Compiled) -> None:
    """Runs the small programs by which `fit` begins and ends an epoch: reset metrics, and get their results."""
    states = iter(structs)
    for metric in model.metrics:
        metric.stateless_reset_state()
        metric.stateless_result([_zeros(next(states)) for _ in metric.variables])


def _results(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, args: Any) -> Any:
    """Results of a program, as structs; committed to devices only if some of its arguments are."""
    if all(getattr(argument, "sharding", None) is None for argument in jax.tree.leaves(args)):
        return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info)

    def placed(info: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)

    return jax.tree.map(placed, lowered.out_info, compiled.output_shardings)


def _zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    values = np.zeros(struct.shape, struct.dtype)
    if struct.sharding is None:
        return jax.device_put(values)
    return jax.make_array_from_callback(struct.shape, struct.sharding, values.__getitem__)


def check(model: Any, what: str) -> None:
    """Raises LazyModelError if a model has no such function, or does not compile it."""
    name = repr(getattr(model, "name", type(model).__name__))
    if not isinstance(model, keras.Model):
        raise LazyModelError(f"{what!r} is a function of a keras.Model; this is {type(model).__name__}")
    if what == "generate" and not hasattr(model, "make_generate_function"):
        raise LazyModelError(f"{name} ({type(model).__name__}) has no generate; only generative tasks of KerasHub have")
    if what != "predict" and not model.compiled:
        raise LazyModelError(
            f"{name} is not compiled, so {'generate has no sampler' if what == 'generate' else 'fit has no loss'} yet: "
            "build it with compile=True, or call its compile() in the function that is built abstractly"
        )
    if what == "train" and model.optimizer is None:
        raise LazyModelError(f"{name} has no optimizer, so fit cannot train it: call its compile(optimizer, loss)")
    if model.run_eagerly or (what != "generate" and not model.jit_compile):
        how = "run_eagerly=True" if model.run_eagerly else "jit_compile=False (or a layer cannot be jitted)"
        raise LazyModelError(f"{name} has {how}: {what} compiles nothing that could be compiled before")


def _lower_generate(
    task: Any,
    structs: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    inputs: Sequence[Any],
    batch: int | None,
    sequence: int | None,
    anew: bool,
) -> list[LoweredFunction]:
    """Runs `generate` up to the call that would compile, which provides the arguments."""
    given, keywords = _generate_call(task, inputs, batch, sequence)
    kept, task.generate_function = None if anew else task.generate_function, _upstream.called
    try:
        task.generate(given, **keywords)
        raise AssertionError("generate did not call its generate_function")
    except _upstream.Called as call:
        args, kwargs = call.arguments
    except Exception as error:
        raise _rejected_example(task, "generate", error) from error
    finally:
        task.generate_function = kept
    function = task.make_generate_function()
    with holding(structs):
        jitted, args, kwargs = _upstream.call_of_jitted(function, args, kwargs)
        args, kwargs = jax.tree.map(_struct, (args, kwargs))
        lowered = jitted.lower(*args, **kwargs)

    def make_texts(compiled: jax.stages.Compiled) -> None:
        # Some versions of KerasHub run small programs for this.
        tokens, _ = _results(lowered, compiled, args)
        task.preprocessor.generate_postprocess(jax.tree.map(_zeros, tokens))

    besides = make_texts if hasattr(task.preprocessor, "generate_postprocess") else None
    return [LoweredFunction(f"generate: {task.name} of {_text(args[0])}", lowered, besides)]


def _struct(value: Any) -> Any:
    """The struct of an array for a jitted function, with its sharding if it is committed to that.

    Anything else, such as a static argument's number, is returned unchanged.
    """
    if isinstance(value, jax.ShapeDtypeStruct) or not hasattr(value, "dtype"):
        return value
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    sharding = value.sharding if isinstance(value, jax.Array) and value.committed else None
    return jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding)


def _text(data: Any) -> str:
    shapes = (f"{' × '.join(map(str, leaf.shape))} {leaf.dtype.name}" for leaf in jax.tree.leaves(data))
    return ", ".join(dict.fromkeys(shapes))


# Their arguments ------------------------------------------------------------------------------------------------------


def inputs_of(model: Any, batch: int, sequence: int | None, described: dict[str, None] | None = None) -> Any:
    """Structs of the inputs of a functional model, with unknown sizes filled in; `described` gets them as text.

    Raises:
        LazyModelError: The model does not define its inputs.
    """
    tensors = getattr(model, "input", None) if isinstance(model, keras.Model) else None
    if tensors is None and isinstance(model, keras.Sequential) and model.built:
        (tensors,) = model.inputs
    if tensors is None:
        raise LazyModelError(
            f"{getattr(model, 'name', type(model).__name__)} does not say what inputs it takes (it is not a functional "
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
    """One batch as `fit` (`what="train"`) or `predict` passes it to the compiled function, as structs.

    `inputs` are the arguments of the call: `x`, `y`, `sample_weight`. With all three the batch is that of
    `train_on_batch`, which includes weights even if they are None.

    Raises:
        LazyModelError: The model does not define its inputs, or its preprocessor rejects these.
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


def _generate_call(
    model: Any, inputs: Sequence[Any], batch: int | None, sequence: int | None
) -> tuple[Any, dict[str, Any]]:
    """Arguments of `generate`: the given ones, or empty texts, or rows of tokens without a preprocessor."""
    if getattr(model, "preprocessor", None) is None:
        tokens = inputs[0] if inputs else inputs_of(model, batch or 1, sequence)
        return _values(tokens), {"stop_token_ids": None}  # 'auto', the default, needs a tokenizer
    return _values(inputs[0]) if inputs else _example(model, batch or 1), {"max_length": sequence}


def _example(model: Any, batch: int) -> Any:
    """An input of a task's preprocessor: texts, or images of its size."""
    preprocessor = model.preprocessor
    size = getattr(preprocessor, "image_size", None)
    if getattr(preprocessor, "tokenizer", None) is None and size is not None:
        return np.zeros((batch, *size, 3), "float32")
    return [""] * batch


def _preprocessed(model: Any, what: str, sequence: int | None, preprocess: Callable[[], Any]) -> Any:
    """The result of preprocessing, padded to a length."""
    own = model.preprocessor.sequence_length if sequence is not None else None
    try:
        if sequence is not None:
            model.preprocessor.sequence_length = sequence
        return jax.tree.map(np.asarray, preprocess())
    except Exception as error:
        raise _rejected_example(model, what, error) from error
    finally:
        if sequence is not None:
            model.preprocessor.sequence_length = own


def _rejected_example(model: Any, what: str, error: Exception) -> LazyModelError:
    """The error for inputs that a task or its preprocessor rejects."""
    return LazyModelError(
        f"{model.name!r} cannot be called with what Compile({what!r}) gives it ({type(error).__name__}: {error}). "
        f"Pass another batch size, or an example of its inputs: Compile({what!r}, x)"
    )


def _labels(model: Any, x: Any) -> np.ndarray:
    """Labels for a loss of Keras: class numbers for a sparse loss, otherwise values like the outputs."""
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
    """Replaces structs by arrays of zeros."""

    def value(leaf: Any) -> Any:
        return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(value, given)


def _placed(batch: Any) -> Any:
    """A batch as structs, split over processes and devices like the active distribution does."""
    distribution = keras.distribution.distribution()

    def struct(value: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(value)
        if distribution is None:
            return _struct(array)
        layout = distribution.get_data_layout(array.shape).backend_layout
        return _struct(jax.make_array_from_process_local_data(layout, array))

    return jax.tree.map(struct, batch)
