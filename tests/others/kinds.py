"""Models that others wrote, each tiny and as large as its authors publish it.

`large=False` has the same kinds of layers in widths that eight devices divide. What makes the models is in a module for
each environment, which knows nothing of lazymodel.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen

TOKENS = jnp.zeros((1, 8), jnp.int32)
KEY = jax.random.key(0)
# No two of these packages agree on versions of what is below them.
_ENVIRONMENTS = {
    "tunix": "models",
    "maxtext": "maxtext_models",
    "easydel": "easydel_models",
    "levanter": "levanter_models",
}


class Call(NamedTuple):
    """What `build_abstract` is given."""

    build: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def eager(self) -> Any:
        """What its authors' code makes of it."""
        build = self.build.init if isinstance(self.build, linen.Module) else self.build
        return build(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """A row of the table."""

    name: str
    package: str  # of the package index
    make: Callable[[bool], Call]
    load: str = "–"  # how Hugging Face weights get into it, as `test_tunix` does
    error: bool = False  # whether its own code cannot build it


def installed_models() -> dict[str, OtherModel]:
    """Those that this environment has the packages for, by name."""
    os.environ.setdefault("EASYDEL_AUTO", "0")  # else it sets flags that XLA ends the process at
    found = [module for package, module in _ENVIRONMENTS.items() if importlib.util.find_spec(package) is not None]
    return {
        model.name: model
        for module in found
        for model in importlib.import_module(f".{module}", __package__).MODELS.values()
    }
