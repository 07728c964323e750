"""Whether programs fit the devices that are here: what is certain before a compiler was asked, and after.

Responsible for refusing what cannot run, and for saying what is near enough to it that reading should wait for the
compiler. Devices that do not say what memory they have (CPUs) refuse nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import LoweredFunction
from lazymodel._abstract.placement import Placement, resident_nbytes
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.compiler import CompiledMemory
from lazymodel._devices.hardware import device_memory
from lazymodel._errors import DoesNotFitError
from lazymodel._show.text import format_bytes

_MEND = "Use more devices, shard more, donate what is replaced, or a smaller batch, sequence or dtype."


class Room:
    """The memory of the model's devices.

    Attributes:
        limit: Bytes of the smallest device of this process, or None where that is not known.
    """

    def __init__(self, model: ModelSpec, shardings: Mapping[str, Sharding]) -> None:
        placement = Placement(shardings)
        devices = [device for device in placement.devices if device.process_index == jax.process_index()]
        self.limit = min((size for size in map(device_memory, devices) if size is not None), default=None)
        self._count = max(len(placement.devices), 1)
        self._model_nbytes = 0
        if self.limit is not None:
            self._model_nbytes = placement.fullest({path: resident_nbytes(model[path]) for path in placement.group})[1]

    def check_before(self, program: LoweredFunction) -> bool:
        """Whether the program may be too large, so that nothing should be taken for granted until it is compiled.

        Raises:
            DoesNotFitError: The model, and what the program returns and cannot put in its place, are too large alone.
        """
        if self.limit is None:
            return False
        donated = sum(_nbytes(info) for info in jax.tree.leaves(program.lowered.args_info) if info.donated)
        returned = sum(map(_nbytes, jax.tree.leaves(program.lowered.out_info)))
        # Where results go is the compiler's choice: at least an equal part of them to every device.
        held = self._model_nbytes + max(returned - donated, 0) // self._count
        if held > self.limit:
            raise DoesNotFitError(
                f"{program.description} cannot run beside this model: a device would hold "
                f"{format_bytes(self._model_nbytes)} of the model, and {format_bytes(held)} with no more than results, "
                f"and programs can use {format_bytes(self.limit)}. Nothing was read. {_MEND}",
                needed_nbytes=held,
                limit_nbytes=self.limit,
            )
        return 2 * held > self.limit

    def check_after(self, description: str, memory: CompiledMemory) -> None:
        """Raises DoesNotFitError where a compiled program needs more than a device has."""
        if self.limit is not None and memory.peak_nbytes > self.limit:
            raise DoesNotFitError(
                f"{description} needs {format_bytes(memory.peak_nbytes)} on a device, "
                f"{format_bytes(memory.temporary_nbytes)} of them temporaries, says the compiler, and programs can use "
                f"{format_bytes(self.limit)}. {_MEND}",
                needed_nbytes=memory.peak_nbytes,
                limit_nbytes=self.limit,
            )


def _nbytes(info: Any) -> int:
    return math.prod(info.shape) * info.dtype.itemsize
