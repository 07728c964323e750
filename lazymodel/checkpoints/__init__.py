"""Checkpoint files as mappings from tensor name to `LazyTensor`; `open_checkpoint` finds out the format."""

from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._open import open_checkpoint
from lazymodel.checkpoints._safetensors import SafetensorsFile

__all__ = ["Checkpoint", "SafetensorsFile", "open_checkpoint"]
