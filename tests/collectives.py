"""Bytes that a compiled program sends from each device, as ring algorithms send them: to compare shardings."""

import math
import re
from typing import Any

_BITS = {"f32": 32, "bf16": 16, "s32": 32, "u32": 32, "pred": 8}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(rf" = (.*?) ({_KINDS})(-start)?\((.*)")


def sent_nbytes(compiled: Any, *, silent_loops: bool = False) -> int:
    """The formulas are those of nccl-tests' bus bandwidth. Loops are refused, unless they are said to send nothing."""
    return sum(nbytes for nbytes, _ in collectives(compiled, silent_loops=silent_loops))


def collectives(compiled: Any, *, silent_loops: bool = False) -> list[tuple[int, str]]:
    """Bytes and, for people, kind, number of devices, arrays and operation of each collective."""
    text = compiled.as_text()
    assert silent_loops or (" while(" not in text and " conditional(" not in text)
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _LINE.search(line):
            result, kind, start, rest = match.groups()
            operation = re.search(r'op_name="([^"]*)"', rest)
            devices = "" if kind == "collective-permute" else f" over {_group_size(rest)}"
            arrays = re.sub(r"\{[\d,]*\}|/\*.*?\*/", "", result)
            found.append(
                (_sent(result, kind, start, rest), f"{kind}{devices} {arrays} {operation[1] if operation else ''}")
            )
    return found


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
