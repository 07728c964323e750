"""Bytes that a compiled program sends from each device, as ring algorithms send them: to compare shardings."""

import math
import re
from typing import Any

_BITS = {"f32": 32, "bf16": 16, "s32": 32, "u32": 32, "pred": 8}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(rf" = (.*?) ({_KINDS})(-start)?\((.*)")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|branch_computations)=\{?(%[^,}]+(?:, %[^,}]+)*)"
)
_LOOP = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
_TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def sent_nbytes(compiled: Any) -> int:
    """The formulas are those of nccl-tests' bus bandwidth; collectives of a loop count once for each of its turns."""
    return sum(nbytes for nbytes, _ in collectives(compiled))


def collectives(compiled: Any) -> list[tuple[int, str]]:
    """Bytes and, for people, kind, number of devices, arrays and operation of each collective."""
    computations: dict[str, list[str]] = {}
    name = entry = ""
    for line in compiled.as_text().splitlines():
        if header := _HEADER.match(line):
            name = header[1]
            entry = name if line.startswith("ENTRY") else entry
        computations.setdefault(name, []).append(line)
    found: dict[str, tuple[int, str]] = {}  # by channel: TPUs fuse one collective into several computations
    _collect(computations, entry, 1, found)
    return list(found.values())


def _collect(computations: dict[str, list[str]], name: str, turns: int, found: dict[str, tuple[int, str]]) -> None:
    for line in computations.get(name, ()):
        if loop := _LOOP.search(line):
            _collect(computations, loop[2], turns * _turns(line, computations[loop[1]]), found)
        for called in _CALLED.findall(line):
            for other in called.split(", "):
                _collect(computations, other.removeprefix("%"), turns, found)
        if match := _LINE.search(line):
            result, kind, start, rest = match.groups()
            operation = re.search(r'op_name="([^"]*)"', rest)
            devices = "" if kind == "collective-permute" else f" over {_group_size(rest)}"
            arrays = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", result)
            text = f"{kind}{devices} {arrays} {operation[1] if operation else ''}"
            channel = re.search(r"channel_id=(\d+)", rest)
            # The TPU compiler keeps a reduce-scatter as a fusion of this name around an all-reduce.
            nbytes = _sent(result, kind, start, rest) // (2 if name.startswith("all-reduce-scatter") else 1)
            key = channel[1] if channel else f"{name} {line}"
            found[key] = max(found.get(key, (0, "")), (turns * nbytes, text))


def _turns(loop: str, condition: list[str]) -> int:
    """How often a loop runs: as it says or, on TPUs, by the number to which its condition compares."""
    if said := _TURNS.search(loop):
        return int(said[1])
    return max((int(number) for line in condition for number in re.findall(r"constant\((\d+)\)", line)), default=1)


def _sent(result: str, kind: str, start: str, rest: str) -> int:
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
    if start and kind in ("all-gather", "collective-permute"):
        arrays = arrays[len(arrays) // 2 :] if kind == "all-gather" else arrays[1:2]  # operands come first
    nbytes = sum(_BITS[dtype] * math.prod(map(int, shape.split(","))) // 8 for dtype, shape in arrays if shape)
    if kind == "collective-permute":
        return nbytes
    group = _group_size(rest)
    if kind == "reduce-scatter":
        return nbytes * (group - 1)
    return nbytes * (group - 1) * (2 if kind == "all-reduce" else 1) // group


def _group_size(rest: str) -> int:
    """How many devices take part together, from each of the ways in which XLA prints groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return listed[1].count(",") + 1
    if tiled := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]", rest):
        return int(tiled[1])
    over_mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]+)\}", rest)
    assert over_mesh, rest
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", over_mesh[1]))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", over_mesh[2])
    return math.prod(int(part or sizes[axis]) for axis, part in parts)
