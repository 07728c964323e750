"""Where the core finds what is loaded at first use: the extras, by name.

The core imports no extra. It asks for a name of `EXTRAS`, and the module is loaded when somebody needs it.
"""

from __future__ import annotations

import importlib
from typing import Any

EXTRAS = {
    "Auto": "lazymodel.extras.auto.auto",
    "Compiling": "lazymodel.extras.planning.background",
    "DistributedCheckpoint": "lazymodel.extras.formats.distributed",
    "MsgpackFile": "lazymodel.extras.formats.msgpack",
    "OrbaxDestination": "lazymodel.extras.formats.save_orbax",
    "PyTorchFile": "lazymodel.extras.formats.pytorch",
    "auto": "lazymodel.extras.auto.auto",
    "by_keys": "lazymodel.extras.formats.save_orbax",
    "copied": "lazymodel.extras.sync.reshard",
    "described_use": "lazymodel.extras.planning.what_if",
    "device_moves": "lazymodel.extras.sync.reshard",
    "find_items": "lazymodel.extras.formats.orbax",
    "hdf5_destination": "lazymodel.extras.formats.save_hdf5",
    "inspect_checkpoint": "lazymodel.extras.inspection.inspect",
    "is_adapter": "lazymodel.extras.lora.merge",
    "kept_pairs": "lazymodel.extras.lora.pairs",
    "libtpu_environment": "lazymodel.extras.planning.topologies",
    "merge": "lazymodel.extras.lora.merge",
    "open_archive": "lazymodel.extras.formats.hdf5",
    "open_gguf": "lazymodel.extras.quantized.gguf",
    "open_hdf5": "lazymodel.extras.formats.hdf5",
    "open_npy": "lazymodel.extras.formats.numpy",
    "open_npy_folder": "lazymodel.extras.formats.numpy",
    "open_npz": "lazymodel.extras.formats.numpy",
    "open_orbax": "lazymodel.extras.formats.orbax",
    "plain_tensors": "lazymodel.extras.quantized.methods",
    "open_checkpoint": "lazymodel.checkpoints",  # no extra, but above those who take a path in place of it
    "prepared": "lazymodel.extras.planning.background",
    "run": "lazymodel.extras.run.run",
    "recorded": "lazymodel.extras.tables.recorded",
    "resized": "lazymodel.extras.tables.suggest",
    "suggest": "lazymodel.extras.tables.suggest",
    "traced_result": "lazymodel.extras.tables.traced",
    "verify_files": "lazymodel.extras.inspection.verify",
}


def extra(name: str) -> Any:
    """The object of this name, from its extra."""
    return getattr(importlib.import_module(EXTRAS[name]), name)


class ExtraMethod:
    """A method that is a function of an extra: the function itself takes its place at the first use."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        setattr(self._owner, self._name, extra(self._name))
        return getattr(owner if instance is None else instance, self._name)
