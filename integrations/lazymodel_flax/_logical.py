"""Axis names that Flax keeps with variables, for the abstract model's sharding rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lazymodel._abstract.spec import ModelSpec
from lazymodel._sharding.rules import resolve_logical


def with_logical_axes(model: ModelSpec, names: Mapping[str, tuple[Any, Any]]) -> ModelSpec:
    """The model with `logical_axes` on its variables.

    Args:
        model: An abstract model.
        names: Path to axis names (a sequence, a PartitionSpec or a NamedSharding) and the variable's own rules for
            them, or None. Own rules are applied at once; names that they do not know stay.
    """
    variables = dict(model.variables)
    for path, (axes, rules) in names.items():
        if path in variables:
            axes = tuple(getattr(axes, "spec", axes))
            if rules:
                resolved, unknown = resolve_logical(axes, rules)
                axes = tuple(name if name in unknown else axis for name, axis in zip(axes, resolved, strict=True))
            variables[path] = dataclasses.replace(variables[path], logical_axes=axes)
    return model.with_variables(variables)
