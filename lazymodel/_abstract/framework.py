"""What a framework does for an abstract model, and the types in which it says so.

Responsible for the interface and for how plain pytrees answer it; Flax and Keras derive their own from `Framework`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jax
from jax.sharding import Sharding

from lazymodel._abstract.memory import on_device
from lazymodel._abstract.outline import Outline
from lazymodel._abstract.paths import path_text
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError


class Optimizer(Protocol):
    """What `with_optimizer` takes: an Optax `GradientTransformation`, or another object with its `init`."""

    @property
    def init(self) -> Callable[[Any], Any]:
        """Takes the parameters and returns the state."""
        ...


@dataclasses.dataclass(frozen=True)
class Training:
    """The start of an optimizer, in the form that a framework gives it."""

    state: Any  # the optimizer's state, any pytree
    finish: Callable[[Any, Any], Any]  # of the finished model and state, to what `materialize` is to return
    path_of: Callable[[Sequence[Any]], str]  # names a leaf of the state from its `jax.tree_util` key path
    parameters: Mapping[str, str]  # where in a tree of parameters each is, as `path_of` says, to its variable's path


@dataclasses.dataclass(frozen=True)
class Derived:
    """State that is computed from the values of parameters, and so after them, whether loaded or initialized."""

    paths: tuple[str, ...]
    parameters: tuple[str, ...]  # the paths of those that it takes
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # path → parameter to path → state; traceable

    def compute(
        self, wanted: Sequence[str], arrays: Mapping[str, jax.Array], shardings: Mapping[str, Sharding]
    ) -> dict[str, jax.Array]:
        """Some of it, each shard directly on its device, in buffers of its own."""

        def some(parameters: Mapping[str, Any]) -> dict[str, Any]:
            found = self.function({path: on_device(each, shardings[path]) for path, each in parameters.items()})
            # A parameter that is returned as it is would be the parameter's own buffer, which training gives away.
            return {path: jax.numpy.copy(found[path]) for path in wanted}

        placed = {path: shardings[path] for path in wanted}
        return jax.jit(some, out_shardings=placed)({path: arrays[path] for path in self.parameters})


@dataclasses.dataclass(frozen=True)
class PlannedFunction:
    """A forward pass or loss that a framework knows of."""

    function: Callable[..., Any]  # of the model's own pytree and the inputs; a training step's returns the scalar loss
    inputs: tuple[Any, ...]  # pytrees of `jax.ShapeDtypeStruct`; the first dimension of each is the batch
    description: str  # what it computes, for people


@dataclasses.dataclass(frozen=True)
class LoweredFunction:
    """A program that will be run, not compiled yet."""

    description: str  # what it computes, for people, such as "predict: gemma of 1 × 128 int32"
    lowered: jax.stages.Lowered
    # Given the compiled program, compiles small ones that are run with it, such as by running them on zeros.
    besides: Callable[[jax.stages.Compiled], object] | None = None


class Framework:
    """What the framework of a model does with it; as it is, for a model that is a plain pytree.

    `unflatten` takes a mapping of path to anything and returns it in the user's own pytree structure.
    """

    def __init__(self, unflatten: Callable[[Mapping[str, Any]], Any]) -> None:
        self._unflatten = unflatten

    def structure(self, leaves: Mapping[str, Any]) -> Any:
        """Path → anything, in the user's own pytree structure."""
        return self._unflatten(leaves)

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        """Raises ShardingError, before anything is made, where the user's object could not work with its variables."""

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The user's object, of path → finished array."""
        return self.structure(arrays)

    def outline(self, struct: jax.ShapeDtypeStruct) -> Any:
        """What stands for an array in what a jitted function is lowered with."""
        return Outline(struct)

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        """What `rebuild` returns, with an `outline` in the place of each array: what a jitted function is lowered with.

        `structs` say of every path what the finished array will be: its sharding (None for a NumPy array), layout and
        weak type. The object holds the outlines for as long as the context lasts.
        """
        yield self.structure({path: self.outline(struct) for path, struct in structs.items()})

    def prepared(
        self, model: Any, what: str, *, inputs: Sequence[Any] = (), batch: int | None, sequence: int | None
    ) -> Any:
        """The abstract model with the variables that one of its own functions makes on its first call, such as an
        optimizer's state; arguments are as for `lowered`, before which this is called.
        """
        return model

    def lowered(
        self,
        what: str,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        *,
        inputs: Sequence[Any] = (),
        batch: int | None,
        sequence: int | None,
    ) -> Sequence[LoweredFunction]:
        """What the model's own functions will run, traced and lowered, so that compiling it leaves their first call
        nothing to compile.

        Args:
            what: `"predict"`, `"train"` or `"generate"`.
            structs: As for `outlined`.
            inputs: What it will be called with; empty where the framework is to tell.
            batch: Batch size; None is what the framework takes for usual.
            sequence: Sequence length; None likewise.

        Raises:
            LazyModelError: The model has no such function, or does not say what it takes.
        """
        raise LazyModelError(
            f"only Keras models have functions of their own to compile, and {what!r} is one of those: pass the jitted "
            "function that will be called with the model, and its inputs: Compile(step, batch)"
        )

    def start_training(
        self, variables: Mapping[str, AbstractVariable], optimizer: Optimizer, leaves: Mapping[str, Any]
    ) -> Training:
        """Starts an optimizer on the model's own tree, with None in place of everything that is not trained.

        `leaves` is path → array of the parameters that are trained; called while tracing.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(self.structure({path: _Place(path) for path in variables}))
        places = {path_text(keys) if keys else "": leaf.path for keys, leaf in flat if isinstance(leaf, _Place)}
        kept = [leaves.get(leaf.path) if isinstance(leaf, _Place) else None for _, leaf in flat]
        state = optimizer.init(jax.tree.unflatten(treedef, kept))
        return Training(state, lambda model, state: (model, state), path_text, places)

    def forward(self, what: str, *, batch: int, sequence: int | None) -> PlannedFunction | None:
        """The model's own forward pass (`what="forward"`) or loss (`"train"`), where the framework knows one."""
        return None

    def quantize(self, model: Any, how: Any, filters: Any) -> Any:
        """The quantized model; see `AbstractModel.quantize`."""
        _refuse(model, "quantized", "quantize='int8'")

    def lora(self, model: Any, rank: int, targets: str | None) -> Any:
        """The model with LoRA pairs; see `AbstractModel.lora`."""
        _refuse(model, "given LoRA pairs", "lora_rank=8")


@dataclasses.dataclass(frozen=True)
class _Place:
    """A variable's place in the model's tree."""

    path: str


def _refuse(model: Any, what: str, stated: str) -> NoReturn:
    raise LazyModelError(
        f"only Keras models are {what} as a step, and {model.name} is not one: build it with layers that are {what} "
        f"already. plan(what_if=lazymodel.WhatIf({stated})) says what they would take"
    )
