"""Adapters of frameworks: what they have, and how they are found.

The module of an adapter is imported only if its framework is in `sys.modules`. Adapters elsewhere register in the
entry-point group `lazymodel.adapters` under their framework's top-level module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lazymodel._errors import LazyModelError, required

# Framework module → the module that exposes `adapter`; the extra by the framework's name installs what it needs.
_ADAPTERS = {"keras": "lazymodel_keras", "flax": "lazymodel_flax"}


class FrameworkAdapter(Protocol):
    """The module-level `adapter` of a framework's integration.

    It may also have, with None for objects of other frameworks, `lora_pairs(model)`, the LoRA pairs of a built model,
    and `opened(args, kwargs)`, the `OpenedArguments` of a call that may change its objects. And `states(model)`, a tree
    with the states of the framework's objects in their places; `places(model)`, where `Sync` replaces arrays in place.
    """

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if `build` belongs to this framework, or returns an object of it."""
        ...

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Builds abstractly what `build(*args, **kwargs)` would build."""
        ...

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """A built model's arrays, under the paths that `build_abstract` gives; None for objects of other frameworks."""
        ...

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        """The model with some of its arrays replaced; these are identified by their `id`."""
        ...


def adapter_of(framework: str) -> Any:
    """The adapter of a framework, which is imported; raises LazyModelError if the adapter or a requirement is missing.

    That of Keras also has `from_config` and `convert`.
    """
    modules = _modules()
    if framework not in modules:
        raise LazyModelError(f"there is no adapter for {framework!r}; known are {', '.join(modules)}")
    return required(modules[framework], f"a model of {framework}", f"'lazymodel[{framework}]'").adapter


def adapters() -> Iterator[FrameworkAdapter]:
    """The adapters whose framework has been imported."""
    return (importlib.import_module(module).adapter for name, module in _modules().items() if name in sys.modules)


@functools.cache
def _modules() -> dict[str, str]:
    entries = importlib.metadata.entry_points(group="lazymodel.adapters")
    return {**_ADAPTERS, **{entry.name: entry.value for entry in entries}, **_ADAPTERS}
