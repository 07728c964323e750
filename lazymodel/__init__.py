"""Build large models abstractly, shard them, and materialize every variable directly on its devices.

    >>> import warnings, jax, optax, numpy as np, lazymodel as lm
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> def init(key):
    ...     up, down = jax.random.split(key)
    ...     return {
    ...         "up": {"kernel": jax.random.normal(up, (64, 256))},
    ...         "down": {"kernel": jax.random.normal(down, (256, 64))},
    ...     }
    >>> mesh = Mesh(np.array(jax.devices()), ("model",))
    >>> abstract = lm.build_abstract(init, jax.random.key(0))  # shapes only
    >>> sharded = abstract.shard(mesh, {"up/kernel": P(None, "model"), "down/kernel": P("model")})
    >>> sharded.plan().device_nbytes  # before any memory is spent
    16384
    >>> model = sharded.materialize()  # a checkpoint's tensors would be streamed in, and the rest initialized
    >>> lm.save(model, "model.safetensors")

Examples in docstrings continue from here, on eight devices. The core knows JAX only. Flax and Keras have their own
packages, `lazymodel_flax` and `lazymodel_keras`, which `build_abstract` finds by itself once their framework is
imported.
"""

import importlib as _importlib
import typing as _typing

from lazymodel._show import clock as _clock  # first: it records when the import began
from lazymodel._version import VERSION as _VERSION

if _typing.TYPE_CHECKING:
    from lazymodel import checkpoints as checkpoints
    from lazymodel import research
    from lazymodel._abstract.variable import AbstractVariable
    from lazymodel._devices.hardware import device_memory
    from lazymodel._errors import (
        CheckpointError,
        DoesNotFitError,
        LazyModelError,
        LazyModelWarning,
        ShardingError,
        SyncError,
        TraceError,
    )
    from lazymodel._mapping.entry import From
    from lazymodel._mapping.table import WeightMap, map_checkpoint
    from lazymodel._materialize.report import LoadReport
    from lazymodel._model import AbstractModel, build_abstract
    from lazymodel._plan.plan import MemoryPlan
    from lazymodel._restore import restore, training_state
    from lazymodel._save.save import save
    from lazymodel._save.step import save_step
    from lazymodel._sharding.roles import Host, role
    from lazymodel._show.progress import Progress
    from lazymodel._tensors.lazy import LazyTensor
    from lazymodel._transform import path_key
    from lazymodel.checkpoints import Checkpoint, open_checkpoint
    from lazymodel.checkpoints._checkpoint import TrainingState
    from lazymodel.extras.auto.auto import auto
    from lazymodel.extras.lora.merge import Adapter, merge, open_adapter
    from lazymodel.extras.lora.save_adapter import save_adapter
    from lazymodel.extras.planning.compile import Compile
    from lazymodel.extras.planning.pin_batch import pin_batch
    from lazymodel.extras.planning.plans import plans
    from lazymodel.extras.planning.topologies import arithmetic_mesh, topology
    from lazymodel.extras.planning.what_if import WhatIf
    from lazymodel.extras.research import grow, initializers
    from lazymodel.extras.research.coordinate_check import CoordinateCheck, coordinate_check
    from lazymodel.extras.research.diff import diff
    from lazymodel.extras.research.mup import Mup, mup
    from lazymodel.extras.research.statistics import statistics
    from lazymodel.extras.run.report import RunReport
    from lazymodel.extras.run.signals import signals
    from lazymodel.extras.sync.client import SyncClient
    from lazymodel.extras.sync.digest import Digest, digest
    from lazymodel.extras.sync.reshard import ReshardReport, reshard
    from lazymodel.extras.sync.server import SyncServer
    from lazymodel.extras.sync.sync import Sync

__version__ = _VERSION

_NAMES = {  # module: names that it has
    "lazymodel._abstract.variable": "AbstractVariable",
    "lazymodel.extras.lora.merge": "Adapter merge open_adapter",
    "lazymodel._devices.hardware": "device_memory",
    "lazymodel._errors": "CheckpointError DoesNotFitError LazyModelError LazyModelWarning ShardingError SyncError "
    "TraceError",
    "lazymodel._mapping.entry": "From",
    "lazymodel._mapping.table": "WeightMap map_checkpoint",
    "lazymodel._materialize.report": "LoadReport",
    "lazymodel.extras.sync.digest": "Digest digest",
    "lazymodel.extras.sync.reshard": "ReshardReport reshard",
    "lazymodel.extras.sync.client": "SyncClient",
    "lazymodel.extras.sync.server": "SyncServer",
    "lazymodel.extras.sync.sync": "Sync",
    "lazymodel._model": "AbstractModel build_abstract",
    "lazymodel.extras.planning.pin_batch": "pin_batch",
    "lazymodel._plan.plan": "MemoryPlan",
    "lazymodel._restore": "restore training_state",
    "lazymodel.extras.lora.save_adapter": "save_adapter",
    "lazymodel._save.save": "save",
    "lazymodel._save.step": "save_step",
    "lazymodel._sharding.roles": "Host role",
    "lazymodel._show.progress": "Progress",
    "lazymodel._tensors.lazy": "LazyTensor",
    "lazymodel._transform": "path_key",
    "lazymodel.checkpoints": "Checkpoint open_checkpoint",
    "lazymodel.checkpoints._checkpoint": "TrainingState",
    "lazymodel.extras.auto.auto": "auto",
    "lazymodel.extras.planning.compile": "Compile",
    "lazymodel.extras.planning.plans": "plans",
    "lazymodel.extras.planning.topologies": "arithmetic_mesh topology",
    "lazymodel.extras.planning.what_if": "WhatIf",
    "lazymodel.extras.research.coordinate_check": "CoordinateCheck coordinate_check",
    "lazymodel.extras.research.diff": "diff",
    "lazymodel.extras.research.mup": "Mup mup",
    "lazymodel.extras.research.statistics": "statistics",
    "lazymodel.extras.run.report": "RunReport",
    "lazymodel.extras.run.signals": "signals",
}
_MODULES = {
    "checkpoints": "lazymodel.checkpoints",
    "grow": "lazymodel.extras.research.grow",
    "initializers": "lazymodel.extras.research.initializers",
    "research": "lazymodel.research",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Loads a public name at its first use: `import lazymodel` alone loads next to nothing."""
    if name in _MODULES:
        value = _importlib.import_module(_MODULES[name])
    elif name in _MODULE_OF:
        value = getattr(_importlib.import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'lazymodel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MODULE_OF})


__all__ = [
    "AbstractModel",
    "AbstractVariable",
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "Compile",
    "CoordinateCheck",
    "Digest",
    "DoesNotFitError",
    "From",
    "Host",
    "LazyModelError",
    "LazyModelWarning",
    "LazyTensor",
    "LoadReport",
    "MemoryPlan",
    "Mup",
    "Progress",
    "ReshardReport",
    "RunReport",
    "ShardingError",
    "Sync",
    "SyncClient",
    "SyncError",
    "SyncServer",
    "TraceError",
    "TrainingState",
    "WeightMap",
    "WhatIf",
    "arithmetic_mesh",
    "auto",
    "build_abstract",
    "coordinate_check",
    "device_memory",
    "diff",
    "digest",
    "grow",
    "initializers",
    "map_checkpoint",
    "merge",
    "mup",
    "open_adapter",
    "open_checkpoint",
    "path_key",
    "pin_batch",
    "plans",
    "research",
    "reshard",
    "restore",
    "role",
    "save",
    "save_adapter",
    "save_step",
    "signals",
    "statistics",
    "topology",
    "training_state",
]

_clock.imported("lazymodel")
