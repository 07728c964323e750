"""What `predict`, `fit` and `generate` compile on their first call, lowered while a model's variables have no values.

Responsible for lowering the very functions that the model keeps, with the arguments that it will give them, so that
their first call finds them compiled. What they will be called with is `_model/examples`' matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import keras
import numpy as np

from lazymodel import LazyModelError
from lazymodel._abstract.framework import LoweredFunction
from lazymodel._errors import warn
from lazymodel_keras import _upstream
from lazymodel_keras._model.examples import described, first_batch, generated, refused_example

Besides: TypeAlias = "Callable[[jax.stages.Compiled], None]"


class _Described(keras.StatelessScope):
    """A scope in which the value of a variable is the struct that describes it, but to programs that are traced."""

    def __init__(self, structs: Mapping[int, jax.ShapeDtypeStruct]) -> None:
        super().__init__(initialize_variables=False)
        self._structs = structs

    def get_current_value(self, variable: Any) -> Any:
        traced = isinstance(jax.numpy.zeros(()), jax.core.Tracer)
        return None if traced else self._structs.get(id(variable))


@contextlib.contextmanager
def holding(structs: Sequence[tuple[Any, jax.ShapeDtypeStruct]]) -> Generator[None]:
    """Within the block, some abstract variables have structs for values.

    A program that reads one other than through its arguments would keep what it finds, so that raises LazyModelError.
    """

    def refuse(variable: Any) -> Any:
        def initializer(*args: Any, **kwargs: Any) -> Any:
            raise LazyModelError(
                f"what is compiled reads variable {variable.path}, which is none of its arguments, and which has no "
                "value yet. Pass it as an argument, or load the model without compile"
            )

        return initializer

    abstract = [variable for variable, _ in structs]
    with (
        _upstream.initialized_by(abstract, [refuse(variable) for variable in abstract]),
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
    """What one of a model's own functions will run; `structs` are its abstract variables and their arrays to be.

    With `anew` the model gets another function in place of the one that it keeps, which can be for other shardings.

    Raises:
        LazyModelError: The model has no such function, compiles none, or does not say what it takes.
    """
    check(model, what)
    if what == "train" and not _upstream.is_built(model):
        raise LazyModelError(f"fit would build the optimizer of {model.name!r} first; fit uses none of with_optimizer")
    if what == "train":
        _check_placement(model, structs)
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
        jitted = {cell.cell_contents.__name__: cell.cell_contents for cell in _upstream.jitted_cells(function)}
        together = jitted.pop("concatenate", None)
        (step,) = jitted.values()
        lowered = step.lower(state, data)
        besides = (
            _epoch(model, state[-1])
            if what == "train"
            else together and _together(model, together, lowered, (state, data))
        )
    return [LoweredFunction(f"{what}: {model.name} of {_text(data)}", lowered, besides)]


def _epoch(model: Any, structs: Sequence[jax.ShapeDtypeStruct]) -> Besides:
    """Runs the small programs by which `fit` begins and ends an epoch: metrics are reset, and give their results."""

    def run(_: jax.stages.Compiled) -> None:
        states = iter(structs)
        for metric in model.metrics:
            metric.stateless_reset_state()
            metric.stateless_result([_zeros(next(states)) for _ in metric.variables])

    return run


def _together(model: Any, concatenate: Any, lowered: jax.stages.Lowered, args: Any) -> Besides:
    """Compiles how `predict` with several steps an execution puts their outputs together."""

    def run(compiled: jax.stages.Compiled) -> None:
        outputs, _ = _results(lowered, compiled, args)
        concatenate.lower([outputs] * model.steps_per_execution).compile()

    return run


def _texts(task: Any, lowered: jax.stages.Lowered, args: Any) -> Besides:
    """Makes texts of tokens, for which some versions of KerasHub run small programs."""

    def run(compiled: jax.stages.Compiled) -> None:
        tokens, _ = _results(lowered, compiled, args)
        task.preprocessor.generate_postprocess(jax.tree.map(_zeros, tokens))

    return run


def _results(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, args: Any) -> Any:
    """What a program returns, as structs; committed to devices only if some of its arguments are."""
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


def forget(model: Any, what: str) -> None:
    """Has a model make one of its functions anew when it is next called."""
    setattr(model, f"{what}_function", None)


def check(model: Any, what: str) -> None:
    """Raises LazyModelError where a model has no such function, or compiles none."""
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


def _check_placement(model: Any, structs: Sequence[tuple[Any, jax.ShapeDtypeStruct]]) -> None:
    """Warns where `fit` compiles its step once more than can be known before."""
    if keras.distribution.distribution() is None and any(
        len(s.sharding.device_set) > 1 for _, s in structs if s.sharding
    ):
        warn(
            f"fit of {model.name!r} without a keras.distribution leaves variables where the compiler likes, and "
            "compiles its second step for that. Load and train it within lazymodel_keras.distribution(mesh).scope()"
        )


def _lower_generate(
    task: Any,
    structs: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    inputs: Sequence[Any],
    batch: int | None,
    sequence: int | None,
    anew: bool,
) -> list[LoweredFunction]:
    """Runs `generate` up to what it would compile, which says what that is called with."""
    given, keywords = generated(task, inputs, batch, sequence)
    kept, task.generate_function = None if anew else task.generate_function, _upstream.called
    try:
        task.generate(given, **keywords)
        raise AssertionError("generate did not call its generate_function")
    except _upstream.Called as call:
        args, kwargs = call.arguments
    except Exception as error:
        raise refused_example(task, "generate", error) from error
    finally:
        task.generate_function = kept
    function = task.make_generate_function()
    with holding(structs):
        jitted, args, kwargs = _upstream.call_of_jitted(function, args, kwargs)
        args, kwargs = jax.tree.map(_struct, (args, kwargs))
        lowered = jitted.lower(*args, **kwargs)
    makes_texts = hasattr(task.preprocessor, "generate_postprocess")
    besides = _texts(task, lowered, args) if makes_texts else None
    return [LoweredFunction(f"generate: {task.name} of {_text(args[0])}", lowered, besides)]


def _struct(value: Any) -> Any:
    """The struct of an array; anything else, such as a static argument's number, as it is."""
    if isinstance(value, jax.ShapeDtypeStruct) or not hasattr(value, "dtype"):
        return value
    return described(value) if isinstance(value, jax.Array) else jax.ShapeDtypeStruct(value.shape, value.dtype)


def _text(data: Any) -> str:
    shapes = (f"{' × '.join(map(str, leaf.shape))} {leaf.dtype.name}" for leaf in jax.tree.leaves(data))
    return ", ".join(dict.fromkeys(shapes))
