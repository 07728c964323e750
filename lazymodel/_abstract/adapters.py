"""Finding the adapter for what a user builds: a table, looked at only once its framework is imported.

An adapter turns one framework's way of building into an abstract model. An entry of the table is loaded only when its
framework is already in `sys.modules`, since nobody can hand over a Keras class without having imported Keras. Adapters
that live elsewhere register in the entry-point group `lazymodel.adapters` under their framework's top-level module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lazymodel._errors import LazyModelError

# Framework module → the module that exposes `adapter`; the extra by the framework's name installs what it needs.
_KNOWN = {"keras": "lazymodel_keras", "flax": "lazymodel_flax"}


class Adapter(Protocol):
    """What a framework's integration provides as its module-level `adapter`."""

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this framework builds what `build` is or returns."""
        ...

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Builds abstractly what `build(*args, **kwargs)` would build."""
        ...

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """A built model's arrays, under the paths that `build_abstract` gives; None for what is not the framework's."""
        ...

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        """The model with other arrays in the places of some of its own, which are known by their `id`."""
        ...


def named(framework: str) -> Any:
    """The adapter of a framework, which is imported for it; LazyModelError where there is none, or not what it needs.

    That of Keras has a `from_config` and a `convert` besides.
    """
    modules = _modules()
    if framework not in modules:
        raise LazyModelError(f"there is no adapter for {framework!r}; known are {', '.join(modules)}")
    try:
        return importlib.import_module(modules[framework]).adapter
    except ModuleNotFoundError as error:
        raise LazyModelError(
            f"models of {framework} need {error.name}, which is not installed: pip install 'lazymodel[{framework}]'"
        ) from error


def adapters() -> Iterator[Adapter]:
    """The adapters whose framework has been imported."""
    return (importlib.import_module(module).adapter for name, module in _modules().items() if name in sys.modules)


def _modules() -> dict[str, str]:
    return _KNOWN | _registered()


@functools.cache
def _registered() -> dict[str, str]:
    found = importlib.metadata.entry_points(group="lazymodel.adapters")
    return {entry.name: entry.value for entry in found if entry.name not in _KNOWN}
