"""Build large models abstractly, shard them, and materialize every variable directly on its devices.

    abstract = lazymodel.build_abstract(init_fn, jax.random.key(0))   # shapes only
    abstract = abstract.shard(mesh, {r".*/kernel": P(None, "model")})  # a sharding for every variable
    print(abstract.plan(checkpoint))                                    # bytes per device, before any is spent
    model = abstract.materialize(checkpoint)                            # initialize what is missing, stream the rest

The core knows JAX only. Flax and Keras have their own packages, `lazymodel_flax` and `lazymodel_keras`, which
`build_abstract` finds by itself once their framework is imported.
"""

from lazymodel import grow, initializers
from lazymodel._adapters import Adapter
from lazymodel._auto import Auto, Proposal, auto
from lazymodel._compile import CompiledMemory, collective_bytes, compile_memory
from lazymodel._errors import (
    CheckpointError,
    DoesNotFitError,
    LazyModelError,
    LazyModelWarning,
    ShardingError,
    TraceError,
)
from lazymodel._explain import Explanation, ShardingReport
from lazymodel._hardware import device_memory
from lazymodel._init_programs import InitRecipe, ProgramCache
from lazymodel._lazy import LazyTensor
from lazymodel._load_report import LoadReport, LoadRow
from lazymodel._mapped import MappedCheckpoint, map_checkpoint
from lazymodel._mapping_entry import From
from lazymodel._mapping_table import MappingReport, WeightMap
from lazymodel._model import AbstractModel, build_abstract
from lazymodel._paths import flatten_paths
from lazymodel._plan import MemoryPlan, PlanComparison, PlanRow, compare_plans
from lazymodel._plan_compiled import Compile
from lazymodel._plan_search import TopologyRow, TopologyTable, smallest_topology
from lazymodel._plan_what_if import WhatIf
from lazymodel._progress import Progress
from lazymodel._reinitialize import path_key
from lazymodel._roles import role
from lazymodel._save import save
from lazymodel._statistics import Statistics, VariableStatistics, statistics
from lazymodel._stored import MismatchedTensor, StoredTensor
from lazymodel._topology import arithmetic_mesh, topology
from lazymodel._variable import AbstractVariable, Reason
from lazymodel.checkpoints import Checkpoint, open_checkpoint

__version__ = "0.1.0"

__all__ = [
    "AbstractModel",
    "AbstractVariable",
    "Adapter",
    "Auto",
    "Checkpoint",
    "CheckpointError",
    "Compile",
    "CompiledMemory",
    "DoesNotFitError",
    "Explanation",
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
    "Proposal",
    "Reason",
    "ShardingError",
    "ShardingReport",
    "Statistics",
    "StoredTensor",
    "TopologyRow",
    "TopologyTable",
    "TraceError",
    "VariableStatistics",
    "WeightMap",
    "WhatIf",
    "arithmetic_mesh",
    "auto",
    "build_abstract",
    "collective_bytes",
    "compare_plans",
    "compile_memory",
    "device_memory",
    "flatten_paths",
    "grow",
    "initializers",
    "map_checkpoint",
    "open_checkpoint",
    "path_key",
    "role",
    "save",
    "smallest_topology",
    "statistics",
    "topology",
]
