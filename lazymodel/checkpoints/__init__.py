"""Checkpoint files as mappings from tensor name to `LazyTensor`; `open_checkpoint` finds out the format."""

from lazymodel.checkpoints._checkpoint import Checkpoint, open_checkpoint
from lazymodel.checkpoints._hdf5 import Hdf5Checkpoint
from lazymodel.checkpoints._numpy import NumpyCheckpoint
from lazymodel.checkpoints._orbax import OrbaxCheckpoint
from lazymodel.checkpoints._safetensors import SafetensorsCheckpoint, SafetensorsFile

__all__ = [
    "Checkpoint",
    "Hdf5Checkpoint",
    "NumpyCheckpoint",
    "OrbaxCheckpoint",
    "SafetensorsCheckpoint",
    "SafetensorsFile",
    "open_checkpoint",
]
