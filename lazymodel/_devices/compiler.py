"""Memory of a program on each device, as the compiler reports it.

Compiles a function of shapes, for devices that are here or for compile-only devices, and parses the compiler's errors.
Nothing is run. `_plan/` decides which programs to compile.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymodel._devices.hardware import is_arithmetic
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._show.text import format_bytes

_LISTED = 5  # allocations that an error names


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of one compiled program, in bytes on each device; for devices without own memory, on their hosts too.

    Attributes:
        argument_nbytes: Shards of its arguments.
        output_nbytes: Shards of its results, including those that reuse a donated argument's memory.
        temporary_nbytes: Additional memory while it runs.
        alias_nbytes: Results that reuse a donated argument's memory.
        code_nbytes: The program itself.
        seconds: Time for tracing, lowering and compiling.
        host_nbytes: Arguments, results and temporaries in the host's memory per device, if counted separately.
    """

    argument_nbytes: int
    output_nbytes: int
    temporary_nbytes: int
    alias_nbytes: int
    code_nbytes: int
    seconds: float
    host_nbytes: int = 0

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that a device holds: XLA reserves arguments, results and temporaries for the whole run."""
        held = self.argument_nbytes + self.output_nbytes - self.alias_nbytes
        return held + self.temporary_nbytes + self.code_nbytes


def compile_memory(function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> CompiledMemory:
    """Compiles `function(*args)` for the devices of its arguments and returns the memory that it needs on each.

    Args:
        function: A traceable function.
        *args: Pytrees of `jax.ShapeDtypeStruct` with shardings over one mesh, which may be one of `topology`. The
            compiler places structs without a sharding.
        donate: Numbers of the arguments whose memory the results may reuse.

    Raises:
        DoesNotFitError: The compiler finds that the program cannot fit a device. Its `needed_nbytes` and
            `limit_nbytes` are the compiler's numbers, which it rounds to hundredths of a unit.
        LazyModelError: The compiler rejects the program for another reason, or a mesh is one for arithmetic.
    """
    if any(is_arithmetic(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(args)):
        raise LazyModelError(
            "expected arguments that are sharded over devices, found one on a mesh without devices (as "
            "lazymodel.arithmetic_mesh makes); make the mesh with lazymodel.topology"
        )
    start = time.perf_counter()
    # Arguments that the function does not use are on the device nevertheless.
    lowered = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*args)
    compiled = compile_lowered(lowered, getattr(function, "__name__", "the program"))
    return memory_of(compiled, time.perf_counter() - start)


def compile_lowered(lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
    """The compiled program. Raises the errors of `compile_memory` if the compiler rejects it."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise out_of_memory(str(error), name) from error
        raise LazyModelError(f"the compiler rejects {name}: {str(error).splitlines()[0]}") from error


def memory_of(compiled: jax.stages.Compiled, seconds: float) -> CompiledMemory:
    """A program's memory. Raises LazyModelError if the backend does not report it."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise LazyModelError("this backend's compiler does not report how much memory a program needs; omit compile")
    return CompiledMemory(
        argument_nbytes=int(memory.argument_size_in_bytes),
        output_nbytes=int(memory.output_size_in_bytes),
        temporary_nbytes=int(memory.temp_size_in_bytes),
        alias_nbytes=int(memory.alias_size_in_bytes),
        code_nbytes=int(memory.generated_code_size_in_bytes),
        seconds=seconds,
        host_nbytes=int(
            memory.host_argument_size_in_bytes
            + memory.host_output_size_in_bytes
            - memory.host_alias_size_in_bytes
            + memory.host_temp_size_in_bytes
        ),
    )


# --- errors ----------------------------------------------------------------------------------------------------------

_AMOUNT = r"(\d+(?:\.\d+)?)([KMGT]?)i?B?\b"
# libtpu 0.0.52 writes the first if sizes alone do not fit; the others come from its allocator and from older versions.
_OUT_OF_MEMORY = (
    re.compile(rf"total memory required for [\w ]+ \({_AMOUNT}\) exceeds available \w+ \({_AMOUNT}\)"),
    re.compile(rf"Used {_AMOUNT} of {_AMOUNT}"),
    re.compile(rf"[Rr]equired {_AMOUNT}.{{0,80}}? (?:available|limit)\D{{0,20}}{_AMOUNT}"),
)
_ALLOCATION = re.compile(rf"Size: {_AMOUNT}\s*\n((?:[ \t]+[^\n]+\n?)*)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(message: str, name: str) -> DoesNotFitError:
    """The error for a compiler's message about memory of the program `name`, with the numbers parsed from it."""
    found = next((match for pattern in _OUT_OF_MEMORY if (match := pattern.search(message))), None)
    if found is None:
        return DoesNotFitError(f"{name} does not fit, according to the compiler: {message.splitlines()[0]}")
    needed, limit = _amount(found[1], found[2]), _amount(found[3], found[4])
    text = f"{name} needs {format_bytes(needed)} on a device, according to the compiler, and programs can use "
    text += format_bytes(limit) + (f", {format_bytes(needed - limit)} less." if needed > limit else ".")
    largest: list[str] = []
    for match in list(_ALLOCATION.finditer(message))[:_LISTED]:
        shape = re.search(r"Shape: (\S+?)(?:\{|\s|$)", match[3])
        operator = re.search(r'op_name="([^"]{1,200})"', match[3])
        parts = [format_bytes(_amount(match[1], match[2])), shape and shape[1], operator and operator[1]]
        largest.append(" ".join(part for part in parts if part))
    if largest:
        text += f" Largest allocations: {'; '.join(largest)}."
    text += " Use more devices, shard more, or a smaller batch, sequence or dtype."
    return DoesNotFitError(text, needed_nbytes=needed, limit_nbytes=limit)


def _amount(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
