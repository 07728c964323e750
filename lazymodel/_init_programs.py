"""Init programs: one small compiled program per signature, run once per variable.

An `InitRecipe` says how to compute one variable (or a few that share a large intermediate). Recipes whose
signatures and shardings are equal are one program: compiled once, run once each with their own inputs (seeds,
keys, scalars), writing every shard directly on its device. Where recipes come from is not decided here: `_trace`
makes them from a JAX function, an adapter from whatever its framework keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class InitRecipe:
    """How to compute one group of variables.

    Attributes:
        paths: The variables it computes, in the order of the function's outputs.
        signature: Two recipes with equal signatures compute the same function of their inputs.
        function: A traceable function, `function(*inputs) -> tuple of arrays`, one for each path.
        inputs: Its run-time inputs: small NumPy arrays, such as a seed or key data.
        origin: What it does, for people, such as `normal` or `GlorotUniform`.
    """

    paths: tuple[str, ...]
    signature: Hashable
    function: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[np.ndarray, ...]
    origin: str = "init"

    def restricted_to(self, paths: Sequence[str]) -> InitRecipe:
        """The same recipe computing only some of its variables; what is unused is never computed."""
        keep = tuple(index for index, path in enumerate(self.paths) if path in set(paths))
        if len(keep) == len(self.paths):
            return self

        def function(*inputs: Any) -> tuple[jax.Array, ...]:
            outputs = self.function(*inputs)
            return tuple(outputs[index] for index in keep)

        return dataclasses.replace(
            self,
            paths=tuple(self.paths[index] for index in keep),
            signature=(self.signature, "outputs", keep),
            function=function,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class InitProgram:
    """A compiled recipe.

    Attributes:
        compiled: The executable; called with the recipe's inputs.
        output_nbytes: Bytes it leaves on each device.
        temp_nbytes: Bytes of temporaries on each device while it runs, as the compiler says.
    """

    compiled: jax.stages.Compiled
    output_nbytes: int
    temp_nbytes: int


class ProgramCache:
    """Compiled init programs by signature and sharding; one for all models derived from one `build_abstract`.

    Attributes:
        compile_seconds: Time spent lowering and compiling so far.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, InitProgram] = {}
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, recipe: InitRecipe, shardings: Sequence[jax.sharding.Sharding]) -> InitProgram:
        """The program for a recipe whose outputs get these shardings, compiled on first use."""
        import time

        key = (recipe.signature, tuple(shardings))
        if key not in self._programs:
            start = time.perf_counter()
            structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in recipe.inputs]
            compiled = jax.jit(recipe.function, out_shardings=tuple(shardings)).lower(*structs).compile()
            memory = compiled.memory_analysis()
            self._programs[key] = InitProgram(
                compiled,
                output_nbytes=0 if memory is None else int(memory.output_size_in_bytes),
                temp_nbytes=0 if memory is None else int(memory.temp_size_in_bytes),
            )
            self.compile_seconds += time.perf_counter() - start
        return self._programs[key]
