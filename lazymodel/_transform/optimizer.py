"""The method `with_optimizer`: adds the initial state of an optimizer, from shapes alone, as variables of the model.

Responsible for finding the state and the parameter that each part of it belongs to, and is sharded like
(`_sharding/follow`). `_trace` computes it, with the same init programs as parameters. An optimizer is any object with
an `init` function that takes a pytree of parameters; nothing here imports Optax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.framework import Derived, Framework, LoweredFunction, Optimizer, Training
from lazymodel._abstract.paths import OPTIMIZER, matched_paths, rule_path
from lazymodel._abstract.spec import AnyModel, ModelSpec, Optimized
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import walk
from lazymodel._programs.programs import given_recipe
from lazymodel._sharding.follow import follow
from lazymodel._show.text import closest
from lazymodel._trace.errors import raise_explained
from lazymodel._trace.function import Flat, flattened, trace_function


def with_optimizer(
    model: AnyModel,
    optimizer: Optimizer,
    trained: Callable[[AbstractVariable], bool] | str | None = None,
    *,
    memory_kind: str | None = None,
) -> AnyModel:
    """The model with the initial state of an optimizer, as further variables.

    The paths of the state's variables are `optimizer/` and the place in the state, such as
    `optimizer/0/mu/layers/0/kernel`. State with its parameter's shape is sharded like its parameter, whether `shard`
    was or will be called; factored state, as in Adafactor, by the rest of its parameter's spec; step counts and the
    like are replicated. Nothing is allocated until `materialize`, which then returns

    - for a JAX function, an Equinox module or a Keras model, (model, state), where `state` is the result of
      `optimizer.init(params)`. `params` is the model's tree with None for everything that is not trained, as in
      `equinox.filter(model, equinox.is_inexact_array)`.
    - for Linen, (variables, state), where `params` is `variables["params"]`.
    - for NNX, (module, optimizer), an `nnx.Optimizer` of the trained variables.

    State that is a function of the parameters' values, such as a copy of them, is computed from the materialized
    parameters, loaded or initialized. `materialize(checkpoint)` takes state from a checkpoint that contains it.

    Args:
        optimizer: An Optax gradient transformation.
        trained: The variables that it gets: a path regex (`re.fullmatch`) or a function of a variable; None is every
            trainable one. Integers, masks and keys are never trained.
        memory_kind: The memory of the parameters' state: `"pinned_host"` keeps it in the hosts' memory, from which a
            training step moves it (`docs/host_memory.md`). None is the devices' own, even if parameters are elsewhere.

    Raises:
        LazyModelError: There is an optimizer already, or nothing to train.
        ShardingError: The devices have no memory of this kind.
        TraceError: The optimizer's `init` needs values that tracing does not have.

    Example:
        >>> trained = sharded.with_optimizer(optax.adamw(1e-3))
        >>> trained["optimizer/0/mu/up/kernel"].spec
        P(None, 'model')
        >>> model, state = trained.materialize()
    """
    if not callable(getattr(optimizer, "init", None)):
        takes = "with_optimizer takes an Optax gradient transformation, or an object with init(params)"
        raise LazyModelError(f"{takes}; got {optimizer!r}")
    if model.optimized is not None:
        raise LazyModelError(f"{model.name} has an optimizer already; chain transformations, or start from the model")
    paths = _trained(model, trained)
    structs = {path: dataclasses.replace(model[path], sharding=None, layout=None).struct for path in paths}
    found = _WithState(model, optimizer, structs)
    if taken := [path for path in found.structs if path in model.variables]:
        raise LazyModelError(f"{model.name} has a variable of its own at {taken[0]!r}, where optimizer state would go")

    def constant_part(leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {path: leaf for path, leaf in found.leaves(leaves).items() if path not in found.derived}

    traced = trace_function(constant_part, (structs,), {}, name=model.name)
    state: dict[str, AbstractVariable] = {}
    for path, struct in found.structs.items():
        shape, weak = tuple(struct.shape), bool(getattr(struct, "weak_type", False))
        derived = AbstractVariable(path, shape, struct.dtype, origin="of parameters", weak_type=weak)
        variable = traced.variables.get(path, derived)
        origin = "value" if variable.origin == "constant" else variable.origin
        follows = _parameter(rule_path(path.removeprefix(OPTIMIZER)), found.training.parameters)
        state[path] = dataclasses.replace(variable, origin=origin, trainable=False, follows=follows)
    on_host = {path: source for path, source in traced.sources.items() if traced[path].on_host}
    constants = ((path, np.asarray(source)) for path, source in traced.sources.items() if path not in on_host)
    starts = (given_recipe(path, value, "value") for path, value in constants)
    return dataclasses.replace(
        model,
        variables={**model.variables, **follow(state, model.variables, memory_kind=memory_kind)},
        recipes=(*model.recipes, *traced.recipes, *starts),
        sources={**model.sources, **on_host},
        framework=found,
        derived=Derived(tuple(found.derived), paths, found.leaves) if found.derived else None,
        optimized=Optimized(paths, model, memory_kind),
    )


class _WithState(Framework):
    """The framework of a model and of its optimizer's state, which is created abstractly.

    Attributes:
        flat: The state.
        training: Its abstract start.
        structs: Path → shape and dtype of the state.
        derived: The paths of state that depends on the values of parameters, in order.
    """

    def __init__(self, model: ModelSpec, optimizer: Optimizer, parameters: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Raises TraceError if the optimizer's `init` needs the values of parameters on the host."""
        self._model = model
        self._start = functools.partial(model.framework.start_training, model.variables, optimizer)
        started: list[tuple[Training, Flat]] = []

        def flat(leaves: Mapping[str, Any]) -> list[Any]:
            training = self._start(leaves)
            found = flattened(training.state, lambda keys: OPTIMIZER + training.path_of(keys))
            started.append((training, found.traced()))
            return list(found.arrays.values())

        try:
            closed = jax.make_jaxpr(flat)(dict(parameters))
        except Exception as error:
            raise_explained(error)
        ((self.training, self.flat),) = started

        def results(eqn: Any, operands: list[bool]) -> list[bool]:
            return [any(operands)] * len(eqn.outvars)

        # For each value, True if it may depend on that of a parameter.
        depend = walk(closed, [True] * len(closed.jaxpr.invars), lambda atom, value: False, results)
        self.derived = [path for path, depends in zip(self.flat.arrays, depend, strict=True) if depends]
        self.structs: dict[str, Any] = dict(zip(self.flat.arrays, closed.out_avals, strict=True))

    def leaves(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Path → array of the state, from arrays of the parameters."""
        return self.flat.named(jax.tree.leaves(self._start(parameters).state))

    def structure(self, leaves: Mapping[str, Any]) -> Any:
        return self._model.framework.structure(leaves), self.flat.unflatten(leaves)

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        self._model.framework.check_placed({path: variables[path] for path in self._model})

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        own = {path: arrays[path] for path in self._model}
        return self.training.finish(self._model.framework.rebuild(own), self.flat.unflatten(arrays))

    def outline(self, struct: jax.ShapeDtypeStruct) -> Any:
        return self._model.framework.outline(struct)

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        state = self.flat.unflatten({path: self.outline(struct) for path, struct in structs.items()})
        with self._model.framework.outlined({path: structs[path] for path in self._model}) as model:
            yield self.training.finish(model, state)

    def lowered(
        self,
        what: str,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        *,
        inputs: Sequence[Any] = (),
        batch: int | None,
        sequence: int | None,
    ) -> Sequence[LoweredFunction]:
        own = {path: structs[path] for path in self._model}
        return self._model.framework.lowered(what, own, inputs=inputs, batch=batch, sequence=sequence)

    def quantize(self, model: Any, how: Any, filters: Any) -> Any:
        raise LazyModelError(f"{model.name} has an optimizer already; quantize comes before with_optimizer")

    def lora(self, model: Any, rank: int, targets: str | None) -> Any:
        raise LazyModelError(f"{model.name} has an optimizer already; lora comes before with_optimizer")


def _parameter(name: str, parameters: Mapping[str, str]) -> str:
    """The parameter whose place in the tree ends a leaf's name, such as `0/mu/layers/0/kernel`; or an empty string."""
    while name not in parameters:
        _, slash, name = name.partition("/")
        if not slash:
            return parameters.get("", "")  # the tree is a single array
    return parameters[name]


def _trained(model: ModelSpec, trained: Callable[[AbstractVariable], bool] | str | None) -> tuple[str, ...]:
    """The paths of the parameters that the optimizer gets."""
    candidates = [variable for variable in model.values() if jax.numpy.issubdtype(variable.dtype, np.inexact)]
    if trained is None:
        selected = [variable for variable in candidates if variable.trainable]
        what = "that is trainable"
    elif isinstance(trained, str):
        matched = matched_paths(trained, (variable.path for variable in candidates), LazyModelError, "trained")
        selected = [model[path] for path in matched]
        what = f"that {trained!r} matches{closest(trained, [variable.path for variable in candidates])}"
    elif callable(trained):
        selected = list(filter(trained, candidates))
        what = "that the given function chooses"
    else:
        raise LazyModelError(f"trained is a path regex or a function of a variable; got {trained!r}")
    if not selected:
        raise LazyModelError(f"{model.name} has no floating-point variable {what}, so there is nothing to optimize")
    return tuple(variable.path for variable in selected)
