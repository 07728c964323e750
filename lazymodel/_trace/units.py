"""Which results of a compiled function eager execution computes together, in one kernel.

A compiled function with several results is traced equation by equation, so that each variable can be computed alone.
Where floats are added up in it, the compiler's choices depend on everything that it computes from the same floats, so
a kernel that needs some of these computes all of them. Parts of the function that share no floats, computed by it or
before it, stay apart: a whole model initialized by one compiled function still has a kernel for each variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazymodel._programs.jaxprs import is_floating, is_partitionable


class Units:
    """The compiled functions of a trace, by number; `needed` gives the steps that some values depend on, in order."""

    def __init__(self, needed: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._needed = needed
        self._outputs: dict[int, list[Any]] = {}
        self._parts: dict[int, list[tuple[set[Any], list[Any]]]] = {}

    def add(self, unit: int, outputs: Sequence[Any]) -> None:
        """Tells the results of a compiled function."""
        self._outputs[unit] = list(outputs)

    def completed(self, values: Sequence[Any]) -> list[Any]:
        """Some values, and those that eager execution computes in the same kernels as what they depend on."""
        found = dict.fromkeys(values)
        while True:
            before = len(found)
            steps = set(self._needed(list(found)))
            for unit in {step.unit for step in steps if step.unit in self._outputs}:
                for part, outputs in self._connected(unit):
                    if not part.isdisjoint(steps):
                        found.update(dict.fromkeys(outputs))
            if len(found) == before:
                return list(found)

    def _connected(self, unit: int) -> list[tuple[set[Any], list[Any]]]:
        """The parts of a function that add up floats: steps, and the results that they compute."""
        if unit not in self._parts:
            steps = [step for step in self._needed(self._outputs[unit]) if step.unit == unit]
            part_of: dict[Any, set[Any]] = {step: {step} for step in steps}
            first_use: dict[Any, Any] = {}  # of what the function is given
            for step in steps:
                for value in step.operands:
                    if value.step is None or not is_floating(value.aval):
                        continue
                    other = value.step if value.step in part_of else first_use.setdefault(value, step)
                    if part_of[other] is not part_of[step]:
                        smaller, larger = sorted((part_of[other], part_of[step]), key=len)
                        larger |= smaller
                        part_of.update(dict.fromkeys(smaller, larger))
            parts = {id(part): part for part in part_of.values()}.values()
            self._parts[unit] = [
                (part, [value for value in self._outputs[unit] if value.step in part])
                for part in parts
                if not all(is_partitionable(step.jaxpr()) for step in part)
            ]
        return self._parts[unit]
