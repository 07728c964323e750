"""Build large models abstractly, shard them, and materialize every variable directly on its devices.

    abstract = lazymodel.build_abstract(init_fn, jax.random.key(0))   # shapes only
    abstract = abstract.shard(mesh, {r".*/kernel": P(None, "model")})  # a sharding for every variable
    print(abstract.plan(checkpoint))                                    # bytes per device, before any is spent
    model = abstract.materialize(checkpoint)                            # initialize what is missing, stream the rest

The core knows JAX only. Flax and Keras have their own packages, `lazymodel_flax` and `lazymodel_keras`, which
`build_abstract` finds by itself once their framework is imported.
"""

from lazymodel._abstract import AbstractModel, AbstractVariable
from lazymodel._adapters import Adapter, build_abstract
from lazymodel._auto import Auto, Proposal, auto
from lazymodel._errors import (
    CheckpointError,
    DoesNotFitError,
    LazyModelError,
    LazyModelWarning,
    ShardingError,
    TraceError,
)
from lazymodel._init_programs import InitRecipe, ProgramCache
from lazymodel._lazy_tensor import LazyTensor
from lazymodel._load_report import LoadReport, LoadRow, MismatchedTensor, StoredTensor
from lazymodel._mapping import From, MappedCheckpoint, MappingReport, WeightMap, flatten_paths, map_checkpoint
from lazymodel._plan import MemoryPlan, PlanComparison, PlanRow, compare_plans
from lazymodel._report import Progress
from lazymodel._save import save
from lazymodel._roles import role
from lazymodel._sharding import Reason
from lazymodel._sharding_report import Explanation, ShardingReport
from lazymodel.checkpoints import Checkpoint, open_checkpoint

__version__ = "0.1.0"

__all__ = [
    "ShardingReport",
    "Reason",
    "Proposal",
    "Explanation",
    "Auto",
    "AbstractModel",
    "AbstractVariable",
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "DoesNotFitError",
    "From",
    "InitRecipe",
    "LazyModelError",
    "LazyModelWarning",
    "LazyTensor",
    "LoadReport",
    "LoadRow",
    "MappedCheckpoint",
    "MappingReport",
    "MemoryPlan",
    "MismatchedTensor",
    "PlanComparison",
    "PlanRow",
    "ProgramCache",
    "Progress",
    "ShardingError",
    "StoredTensor",
    "TraceError",
    "WeightMap",
    "auto",
    "build_abstract",
    "compare_plans",
    "flatten_paths",
    "map_checkpoint",
    "open_checkpoint",
    "save",
    "role",
]
