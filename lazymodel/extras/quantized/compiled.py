"""Packed numbers decoded by programs that XLA compiles for the CPU: in one pass, where NumPy needs a dozen.

Knows words of 32 bits, and operands with one number for each group. `scaled` says which regions are whole groups, and
decodes them with NumPy if there is no program: for the first numbers of each kind, which would not repay compiling it,
and where JAX has no CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import DType
from lazymodel._tensors.decoded import Unpack

PAYS = 1 << 24  # numbers that NumPy decodes in the time in which a program is compiled
# Magnitudes of operands whose products and sums are 0 or normal numbers, others than which programs replace by 0.
_LEAST, _MOST = 2.0**-60, 2.0**60
_BF16 = np.dtype(ml_dtypes.bfloat16)

# What is done in turn: a function of NumPy with the next operand, or "", and the dtype to which numbers are rounded.
Operations: TypeAlias = "tuple[tuple[str, DType], ...]"

_guard = threading.Lock()
_asked: dict[Any, int] = {}  # how many numbers, for each program
_made: dict[Any, Any] = {}  # the programs; None while one is compiled


@dataclasses.dataclass(frozen=True)
class Words:
    """Numbers of a few bits in words of 32; called, NumPy unpacks them.

    Attributes:
        bits: Of each number.
        shifts: Where each number of a word begins.
        unpack: What is called.
        offset: Is added to each.
        down: True if numbers of a word are adjacent on the second-to-last axis, else on the last.
        table: `float32[2 ** bits]` in which numbers are looked up, if there is one.
    """

    bits: int
    shifts: tuple[int, ...]
    unpack: Unpack = dataclasses.field(compare=False)
    offset: int = 0
    down: bool = False
    table: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def places(self) -> np.ndarray:
        """The shifts, along the axis of the numbers of a word."""
        return np.array(self.shifts, np.uint32).reshape((1, -1, 1, 1) if self.down else (1, 1, -1))

    def __call__(self, stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        self.unpack(stored, out, workspace)


def decode(
    words: Words, codes: np.ndarray, operands: Sequence[np.ndarray], operations: Operations, workspace: Workspace
) -> np.ndarray | None:
    """The numbers in words after operations in float32, in their order. Valid until the next call with this workspace.
    None if there is no program (yet), or if it would change bits.

    Args:
        words: How numbers are packed.
        codes: `uint32[n, words of a group, 1]`; with `down`, `uint32[n, 1, groups, numbers of a group]`.
        operands: `float32[n, 1, 1]` each; with `down`, `float32[n, numbers of a word, groups, 1]`.
        operations: The last one has the dtype of the result.
        workspace: For copies.
    """
    number, dtype = len(codes), operations[-1][1]
    step = 1 << max((number - 1).bit_length() - 3, 0)
    count = -(-number // step) * step  # so that a model needs few programs
    shape, bits = np.broadcast_shapes((count, *codes.shape[1:]), words.places.shape), np.dtype(f"u{dtype.itemsize}")
    tables = [] if words.table is None else [words.table]
    sizes = map(np.abs, (*tables, *operands))
    if not all(((each == 0) | ((each >= _LEAST) & (each <= _MOST))).all() for each in sizes):
        return None
    # Of the shape of the numbers as they are computed: in a flat one, each place would be divided.
    before, workspace.result = workspace.result, None
    if before is None or (before.shape, before.dtype) != (shape, bits):
        before = np.empty(shape, bits)
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others only
        return None
    with contextlib.ExitStack() as stack:
        inputs: list[Any] = [codes, *operands]
        for index, array in enumerate(inputs if count > number else ()):
            inputs[index] = padded = stack.enter_context(workspace.array((count, *array.shape[1:]), array.dtype))
            padded[:number], padded[number:] = array, 0
        inputs = [before, jax.device_put(inputs[0], device), *tables, *inputs[1:]]  # without a copy
        stack.enter_context(jax.transfer_guard("allow"))  # of the others, which are small
        if before.nbytes > workspace.unallocated or (program := _program(device, words, operations, inputs)) is None:
            return None
        # Overwrites the result before: the page faults of fresh memory would take longer than everything else.
        workspace.result = program(*inputs).block_until_ready()
    return np.from_dlpack(workspace.result)[:number].view(dtype)


def _program(device: Any, words: Words, operations: Operations, inputs: Sequence[Any]) -> Any:
    """A program, once so many numbers were asked of it that it pays. Nobody waits for one that another compiles."""
    key = device, words, operations, *(each.shape for each in inputs)
    with _guard:
        _asked[key] = _asked.get(key, 0) + inputs[0].size
        if key in _made or _asked[key] < PAYS:
            return _made.get(key)
        _made[key] = None

    def program(out: jax.Array, codes: jax.Array, *operands: jax.Array) -> jax.Array:
        numbers = (codes >> words.places) & np.uint32((1 << words.bits) - 1)
        values = (numbers.astype(np.int32) + np.int32(words.offset)).astype(np.float32)
        left = iter(operands)
        if words.table is not None:
            values = next(left)[numbers]
        for name, rounded in operations:
            values = _rounded(getattr(jnp, name)(values, next(left)) if name else values, rounded)
        if (dtype := operations[-1][1]) == _BF16:
            return (_bits(values) >> np.uint32(16)).astype(out.dtype)
        return _bits(values.astype(dtype))

    lowered = jax.jit(program, donate_argnums=0, keep_unused=True).lower(*inputs)
    _made[key] = lowered.compile({"xla_allow_excess_precision": False})  # with it, XLA leaves roundings out
    return _made[key]


def _rounded(values: jax.Array, dtype: DType) -> jax.Array:
    """Float32, rounded to the digits of a dtype: finite numbers to bfloat16 in half of the time of XLA's casts."""
    if dtype != _BF16:
        return values.astype(dtype).astype(np.float32)
    bits = _bits(values)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), np.float32)


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, f"uint{8 * values.itemsize}")
