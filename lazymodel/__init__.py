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

from lazymodel._show import clock as _clock  # first: it records when the import began

# isort: split
from lazymodel import research
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._adapters import Adapter, merge, open_adapter
from lazymodel._compile import Compile
from lazymodel._devices.hardware import arithmetic_mesh, device_memory, topology
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
from lazymodel._mapping.match import OPENERS as _OPENERS
from lazymodel._mapping.table import WeightMap, map_checkpoint
from lazymodel._materialize.report import LoadReport
from lazymodel._materialize.reshard import ReshardReport, reshard
from lazymodel._materialize.sync import Sync
from lazymodel._model import AbstractModel, build_abstract
from lazymodel._plan.fleet import Fleet
from lazymodel._plan.plan import MemoryPlan, compare_plans
from lazymodel._plan.search import smallest_topology
from lazymodel._plan.what_if import WhatIf
from lazymodel._restore import restore, training_state
from lazymodel._run.report import RunReport
from lazymodel._save.adapter import save_adapter
from lazymodel._save.save import save, save_step
from lazymodel._sharding.auto import auto
from lazymodel._sharding.roles import Host, role
from lazymodel._show.progress import Progress
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._transform import path_key
from lazymodel._version import VERSION as _VERSION
from lazymodel.checkpoints import Checkpoint, open_checkpoint
from lazymodel.checkpoints._checkpoint import TrainingState
from lazymodel.research import (
    CoordinateCheck,
    Mup,
    coordinate_check,
    diff,
    grow,
    initializers,
    mup,
    signals,
    statistics,
)

__version__ = _VERSION

__all__ = [
    "AbstractModel",
    "AbstractVariable",
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "Compile",
    "CoordinateCheck",
    "DoesNotFitError",
    "Fleet",
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
    "SyncError",
    "TraceError",
    "TrainingState",
    "WeightMap",
    "WhatIf",
    "arithmetic_mesh",
    "auto",
    "build_abstract",
    "compare_plans",
    "coordinate_check",
    "device_memory",
    "diff",
    "grow",
    "initializers",
    "map_checkpoint",
    "merge",
    "mup",
    "open_adapter",
    "open_checkpoint",
    "path_key",
    "research",
    "reshard",
    "restore",
    "role",
    "save",
    "save_adapter",
    "save_step",
    "signals",
    "smallest_topology",
    "statistics",
    "topology",
    "training_state",
]

_OPENERS.append(open_checkpoint)
_clock.imported("lazymodel")
