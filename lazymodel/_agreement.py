"""Agreement between processes: what fails in one of them fails in all.

Responsible for telling every process that shares a model's devices whether the others got through a stage, and to the
same result. Not responsible for what a stage does, nor for a process that dies: `jax.distributed` notices that.

Without it the process whose copy of a file is truncated raises, and the others go on to the next collective operation
of the user's program, where they wait for it.

The means is an all-gather over the model's own devices, because that is public, needs no timeouts of its own and asks
nothing of processes that have no part in the model. A process that gets through its stage waits for the slowest one,
so a failure is known everywhere only when all have come to the end of the stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._errors import CheckpointError

_OK, _FAILED = 0, 1
_DIGEST = slice(1, 5)  # bytes of a report: after the status, the digest, then the text
_TEXT = slice(5, None)
_REPORT = 1024  # bytes a device: enough for a message with paths in it, and 4 MiB even on 4096 devices


@dataclasses.dataclass
class Stage:
    """What a process says about a stage that it got through.

    Attributes:
        outcome: What all processes must have come to. They compare all of it; an error quotes its beginning.
    """

    outcome: str = ""


@contextlib.contextmanager
def agreement(
    shardings: Iterable[Sharding | None],
    *,
    done: str = "materialized",
    given: str = "checkpoints differ",
    mend: str = "Give all processes the same files",
) -> Generator[Stage, None, None]:
    """Runs its body as a stage at whose end all processes that hold devices of these shardings wait for each other.

    A process in which the body fails raises that error; all others raise a `CheckpointError` that names the process
    and quotes its message. Nothing is exchanged where all devices belong to this process, as in one-process runs, so
    one process may still load a model of its own.

    Args:
        shardings: Those of the model; None is a variable on a device of this process.
        done: What the stage does, for the message that it was not done here either.
        given: What it means that outcomes differ, for a message that begins with "the processes'".
        mend: What to do about that.

    Yields:
        A `Stage`, in which the body may note an outcome that must be the same everywhere.

    Raises:
        CheckpointError: The body failed in another process, or came to another outcome there.
    """
    devices = _shared_devices(shardings)
    if not devices:
        yield Stage()
        return
    stage = Stage()
    try:
        yield stage
    # Not KeyboardInterrupt and the like: those end the process, and must not wait for others.
    except Exception as error:
        try:
            _exchange(devices, _FAILED, str(error) or type(error).__name__)
        except Exception as unreachable:  # the body's error says more
            error.add_note(f"The other processes could not be told: {unreachable}")
        raise
    reports = _exchange(devices, _OK, stage.outcome)
    failed = {process: _text(report) for process, report in reports.items() if report[0] == _FAILED}
    if failed:
        process, message = next(iter(failed.items()))
        others = f" (and {len(failed) - 1} other processes)" if len(failed) > 1 else ""
        raise CheckpointError(f"process {process}{others} failed, so nothing was {done} here either: {message}")
    first = min(reports)
    for process, report in reports.items():
        if (report[_DIGEST] != reports[first][_DIGEST]).any():
            raise CheckpointError(
                f"the processes' {given}: "
                f"process {first} would {_text(reports[first])}, process {process} would {_text(report)}. "
                f"{mend}."
            )


def _shared_devices(shardings: Iterable[Sharding | None]) -> list[Any]:
    """All devices of the shardings, in an order that every process finds; none if they are all this process's own."""
    if jax.process_count() == 1:
        return []
    # Few meshes serve many variables, and on a large pod a device set is not small.
    holders = {s.mesh if isinstance(s, NamedSharding) else s for s in shardings if s is not None}
    devices: set[Any] = set()
    for holder in holders:
        devices.update(cast(Any, holder.devices).flat if isinstance(holder, Mesh) else cast(Any, holder).device_set)
    processes = {device.process_index for device in devices}
    if jax.process_index() not in processes or len(processes) == 1:
        return []
    return sorted(devices, key=lambda device: device.id)


def _exchange(devices: Sequence[Any], status: int, text: str) -> dict[int, np.ndarray]:
    """Gives this process's report to all others and returns theirs by process index, in that order."""
    encoded = text.encode()
    report = np.zeros(_REPORT, np.uint8)
    report[0] = status
    report[_DIGEST] = np.frombuffer(zlib.crc32(encoded).to_bytes(4, "little"), np.uint8)
    beginning = encoded[: _REPORT - _TEXT.start]
    report[_TEXT.start : _TEXT.start + len(beginning)] = np.frombuffer(beginning, np.uint8)

    mesh = Mesh(np.array(devices), ("devices",))
    own = [device for device in devices if device.process_index == jax.process_index()]
    gathered = jax.make_array_from_single_device_arrays(
        (len(devices), _REPORT),
        NamedSharding(mesh, PartitionSpec("devices")),
        [jax.device_put(report[None], device) for device in own],
    )
    gathered = jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))(gathered)
    # On all own devices, not only on the one asked below: a process must not end while others still wait for it.
    jax.block_until_ready(gathered)
    rows = np.asarray(jax.device_get(gathered.addressable_data(0)))
    reports = {device.process_index: row for device, row in zip(devices, rows, strict=True)}
    return dict(sorted(reports.items()))


def _identity(array: jax.Array) -> jax.Array:
    """One function for all calls, so that `jax.jit` compiles it once."""
    return array


def _text(report: np.ndarray) -> str:
    # A character may have been cut in two.
    return report[_TEXT].tobytes().rstrip(b"\0").decode(errors="ignore")
