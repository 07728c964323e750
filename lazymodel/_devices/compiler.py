"""What the compiler says of a program: its memory on each device, and the bytes that its collectives move.

Responsible for compiling a function of shapes, for devices that are here or only compiled for, for reading the
compiler's refusals, and for reading its optimized programs. Nothing is run. Which programs to compile is decided in
`_plan/plan`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lazymodel._devices.hardware import is_arithmetic
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._show.text import format_bytes

_LISTED = 5  # allocations that a refusal names


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of one compiled program, in bytes on each device.

    Attributes:
        argument_nbytes: Its arguments' shards.
        output_nbytes: Its results' shards, those that take a donated argument's place included.
        temporary_nbytes: What it needs besides while it runs.
        alias_nbytes: Results that take a donated argument's place.
        code_nbytes: The program itself.
        seconds: Time that tracing, lowering and compiling took.
    """

    argument_nbytes: int
    output_nbytes: int
    temporary_nbytes: int
    alias_nbytes: int
    code_nbytes: int
    seconds: float

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that a device holds: XLA sets aside arguments, results and temporaries for the whole run."""
        held = self.argument_nbytes + self.output_nbytes - self.alias_nbytes
        return held + self.temporary_nbytes + self.code_nbytes


def compile_memory(function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> CompiledMemory:
    """Compiles `function(*args)` for the devices of its arguments and returns what it needs on each.

    Args:
        function: A traceable function.
        *args: Pytrees of `jax.ShapeDtypeStruct` with shardings over one mesh, which may be one of `topology`. Structs
            without a sharding go where the compiler puts them.
        donate: Numbers of the arguments whose memory the results may take.

    Raises:
        DoesNotFitError: The compiler finds that the program cannot fit a device. Its `needed_nbytes` and
            `limit_nbytes` are the compiler's numbers, which it rounds to hundredths of a unit.
        LazyModelError: The compiler refuses the program for another reason, or a mesh is one for arithmetic.
    """
    if not callable(function):
        raise LazyModelError(f"compile_memory takes a function and its arguments; got {function!r}")
    if any(is_arithmetic(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(args)):
        raise LazyModelError(
            "a program is compiled for devices, and an argument is sharded over a mesh without any (as "
            "lazymodel.arithmetic_mesh makes); make the mesh with lazymodel.topology"
        )
    start = time.perf_counter()
    # What the function leaves unused is on the device all the same.
    lowered = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*args)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        name = getattr(function, "__name__", "the program")
        if "RESOURCE_EXHAUSTED" in str(error):
            raise out_of_memory(str(error), name) from error
        raise LazyModelError(f"the compiler refuses {name}: {str(error).splitlines()[0]}") from error
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    if memory is None:
        raise LazyModelError("this backend's compiler does not say how much memory a program needs")
    return CompiledMemory(
        argument_nbytes=int(memory.argument_size_in_bytes),
        output_nbytes=int(memory.output_size_in_bytes),
        temporary_nbytes=int(memory.temp_size_in_bytes),
        alias_nbytes=int(memory.alias_size_in_bytes),
        code_nbytes=int(memory.generated_code_size_in_bytes),
        seconds=seconds,
    )


# --- refusals --------------------------------------------------------------------------------------------------------

_AMOUNT = r"(\d+(?:\.\d+)?)([KMGT]?)i?B?\b"
# libtpu 0.0.52 writes the first, when sizes alone do not fit; the others come from its allocator and from older ones.
_REFUSALS = (
    re.compile(rf"total memory required for [\w ]+ \({_AMOUNT}\) exceeds available \w+ \({_AMOUNT}\)"),
    re.compile(rf"Used {_AMOUNT} of {_AMOUNT}"),
    re.compile(rf"[Rr]equired {_AMOUNT}.{{0,80}}? (?:available|limit)\D{{0,20}}{_AMOUNT}"),
)
_ALLOCATION = re.compile(rf"Size: {_AMOUNT}\s*\n((?:[ \t]+[^\n]+\n?)*)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(message: str, name: str) -> DoesNotFitError:
    """The error for what a compiler wrote about memory when it was given `name`, its numbers read."""
    found = next((match for pattern in _REFUSALS if (match := pattern.search(message))), None)
    if found is None:
        return DoesNotFitError(f"{name} does not fit, says the compiler: {message.splitlines()[0]}")
    needed, limit = _amount(found[1], found[2]), _amount(found[3], found[4])
    text = f"{name} needs {format_bytes(needed)} on a device, says the compiler, and programs can use "
    text += format_bytes(limit) + (f", {format_bytes(needed - limit)} too little." if needed > limit else ".")
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


# --- collectives -----------------------------------------------------------------------------------------------------

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Operations whose printed computations were counted where they started.
_FINISHING = ("async-done", "async-update")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_NAMES = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass
class _Instruction:
    """One line of a program: its name, result type, operation, and what follows the operation's name."""

    name: str
    result: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of its operands, where they are printed without their types."""
        # Long lists are interspersed with comments such as /*index=5*/.
        listed = re.sub(r"/\*[^*]*\*/", "", self.rest.split(")", 1)[0])
        return [name.strip().lstrip("%") for name in listed.split(",")]


def collective_bytes(compiled: jax.stages.Compiled | str) -> dict[str, int]:
    """Bytes that each device sends in a compiled program's collectives, by kind, as ring algorithms send them.

    With n devices in a group and b bytes of result on each: an all-gather sends b (n - 1) / n, an all-reduce twice
    that, a reduce-scatter b (n - 1), an all-to-all b (n - 1) / n and a collective-permute b. The formulas are those of
    nccl-tests' bus bandwidth (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). They serve to
    compare shardings of one model, not to predict time.

    A loop counts as often as it runs where the program says so or counts up to a constant, and once where neither is
    known; of a conditional's branches the most expensive counts.

    Args:
        compiled: `jax.jit(f).lower(…).compile()`, or its text.

    Returns:
        Kind, such as `"all-reduce"`, to bytes; kinds that do not occur are absent.

    Raises:
        LazyModelError: The program cannot be printed, or was not compiled.
    """
    if not isinstance(compiled, str) and not hasattr(compiled, "memory_analysis"):
        raise LazyModelError(f"collectives are read from what jit(f).lower(…).compile() returns; got {compiled!r:.200}")
    text = compiled if isinstance(compiled, str) else _text(compiled)
    computations, entry = _computations(text)
    partitions = re.search(r"\bnum_partitions=(\d+)", text[:100_000])
    replicas = re.search(r"\breplica_count=(\d+)", text[:100_000])
    everyone = math.prod(int(match[1]) for match in (partitions, replicas) if match)
    done: dict[str, collections.Counter[str]] = {}

    def count(name: str) -> collections.Counter[str]:
        if name in done:
            return done[name]
        done[name] = total = collections.Counter[str]()
        computation = computations.get(name, {})
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                total[kind] += _sent(instruction, kind, everyone)
                continue
            if instruction.opcode in _FINISHING:
                continue
            times = _trips(instruction, computation, computations) if instruction.opcode == "while" else 1
            branches = [count(called) for called in _CALLED.findall(instruction.rest)]
            if listed := _BRANCHES.search(instruction.rest):
                branches += [count(called) for called in _NAMES.findall(listed[1])]
            if instruction.opcode == "conditional":
                branches = sorted(branches, key=lambda branch: branch.total())[-1:]
            for branch in branches:
                for kind, nbytes in branch.items():
                    total[kind] += times * nbytes
        return total

    return {kind: nbytes for kind in _COLLECTIVES if (nbytes := count(entry)[kind])}


def _text(compiled: jax.stages.Compiled) -> str:
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # libtpu 0.0.52 makes programs for v7x that jaxlib 0.10.2 cannot read
        raise LazyModelError(
            f"jaxlib cannot print this compiled program ({str(error).splitlines()[0][:200]}); "
            "compile for another TPU generation to compare shardings"
        ) from error
    if text is None:
        raise LazyModelError("this backend does not print its compiled programs")
    return text


def _computations(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """The program's computations by name, each a mapping of its instructions, and the name of the first to run."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", dict[str, _Instruction]()
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.removeprefix("ENTRY ").split(maxsplit=1)[0].lstrip("%")
            computations[name] = current = {}
            entry = name if line.startswith("ENTRY ") else entry
        elif line.startswith(" ") and " = " in line:
            name, _, definition = line.strip().partition(" = ")
            if opcode := _OPCODE.search(f" {definition}"):
                name = name.removeprefix("ROOT ").lstrip("%")
                end = opcode.end() - 1
                current[name] = _Instruction(name, definition[: opcode.start()], opcode[1], definition[end:])
    return computations, entry


def _sent(instruction: _Instruction, kind: str, everyone: int) -> int:
    """Bytes that one device sends in one collective."""
    sizes = [_array_nbytes(*match) for match in _ARRAY.findall(instruction.result)]
    if instruction.opcode == "collective-permute-start":
        nbytes = sizes[1]  # operand, result, and two words of context
    elif instruction.opcode == "all-gather-start":
        nbytes = sum(sizes[len(sizes) // 2 :])  # operands, then results
    else:
        nbytes = sum(sizes)
    if kind in ("collective-permute", "collective-broadcast"):
        return nbytes
    group = _group_size(instruction.rest, everyone)
    if kind == "reduce-scatter":
        return nbytes * (group - 1)
    return nbytes * (group - 1) * (2 if kind == "all-reduce" else 1) // group


def _array_nbytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else re.match(r"[a-z]+(\d+)", dtype)
    width = bits if isinstance(bits, int) else int(bits[1]) if bits else 0
    if dtype in ("c64", "c128"):  # named after the whole number, as are all others
        width = int(dtype[1:])
    return -(-width * math.prod(int(size.strip("<=")) for size in shape.split(",") if size) // 8)


def _group_size(attributes: str, everyone: int) -> int:
    """How many devices take part together, from any of the ways in which XLA prints groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return listed[1].count(",") + 1
    if tiled := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]", attributes):
        return int(tiled[1])
    if over_mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", over_mesh[1])}
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", over_mesh[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in parts) or everyone
    return everyone


def _trips(
    loop: _Instruction, computation: Mapping[str, _Instruction], computations: Mapping[str, Mapping[str, _Instruction]]
) -> int:
    """How often a loop runs; 1 where that is not known."""
    if known := _TRIP_COUNT.search(loop.rest):
        return int(known[1])
    # XLA:TPU drops the count from its final text. JAX's loops compare a counter, increased by one, with a constant.
    named = _CONDITION.search(loop.rest)
    condition = computations.get(named[1], {}) if named else {}
    compare = next((i for i in condition.values() if i.opcode == "compare" and "direction=LT" in i.rest), None)
    if compare is None or len(compare.operands) != 2:
        return 1
    counter, bound = (condition.get(name) for name in compare.operands)
    end = _constant(bound, condition)
    if end is None or counter is None or (index := re.search(r"\bindex=(\d+)", counter.rest)) is None:
        return 1
    state = computation.get(loop.operands[0])
    start = None
    if state is not None and state.opcode == "tuple" and int(index[1]) < len(state.operands):
        start = _constant(computation.get(state.operands[int(index[1])]), computation)
    return max(end - (start or 0), 1)


def _constant(instruction: _Instruction | None, computation: Mapping[str, _Instruction]) -> int | None:
    """The value of a scalar constant, seen through copies."""
    for _ in range(8):
        if instruction is None or instruction.opcode not in ("copy", "bitcast", "convert"):
            break
        instruction = computation.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    value = re.match(r"(-?\d+)\)", instruction.rest)
    return int(value[1]) if value else None
