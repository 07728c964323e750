"""Bytes from process to process, over the devices' own network: each process sends some to each, and gets what it owns.

An object in a store is written by one process, and the tensors in it are spread over the devices of several. Every
process fills in what it holds of the bytes that each other one needs next, with zeros for what it does not hold, and
the sum of all, of which each process takes its own row, is what they hold together. One program serves all of it,
whatever the arrays' shapes, types and shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_WORD = np.dtype(np.uint32)  # what is summed: no byte is carried over to another, since all but one are zero


class Exchange:
    """The exchange between processes that share devices; all of them make it and call it alike.

    Attributes:
        processes: Their numbers, in order; a row of what is exchanged for each.
        nbytes: Bytes of a row.
    """

    def __init__(self, devices: Sequence[Any], nbytes: int) -> None:
        held: dict[int, list[Any]] = {}
        for device in sorted(devices, key=lambda device: device.id):
            held.setdefault(device.process_index, []).append(device)
        self.processes = sorted(held)
        each = min(map(len, held.values()))  # of every process as many: it is an array of devices
        mesh = Mesh(np.array([held[process][:each] for process in self.processes]), ("process", "device"))
        self._local = held[jax.process_index()][:each]
        # A device has as many words of each row, and one more for the number of processes that have failed.
        self._words = -(-nbytes // (each * _WORD.itemsize))
        self.nbytes = each * self._words * _WORD.itemsize
        self._given = NamedSharding(mesh, P("process", None, "device", None))
        summed = NamedSharding(mesh, P("process", "device", None))
        self._sum = jax.jit(_sum, out_shardings=summed)

    def __call__(self, rows: np.ndarray, *, failed: bool = False) -> np.ndarray | None:
        """Gives the rows of all processes (`uint8[processes, nbytes]`) and takes this one's, `uint8[nbytes]`.

        None where any process has failed: it is the last time then, for all of them.
        """
        count, each = len(self.processes), len(self._local)
        words = rows.view(_WORD).reshape(count, each, self._words)
        shape = (count, count, each, self._words + 1)
        shards: list[Any] = []
        for number, device in enumerate(self._local):
            shard = np.empty((1, count, 1, self._words + 1), _WORD)
            shard[0, :, 0, :-1], shard[0, :, 0, -1] = words[:, number], failed
            shards.append(jax.device_put(shard, device))
        given: Any = jax.make_array_from_single_device_arrays(shape, self._given, shards)
        summed: Any = self._sum(given)
        own = {shard.device: np.asarray(shard.data)[0, 0] for shard in summed.addressable_shards}
        pieces = [own[device] for device in self._local]
        if any(piece[-1] for piece in pieces):
            return None
        return np.concatenate([piece[:-1] for piece in pieces]).view(np.uint8)

    def first(self, text: bytes) -> bytes:
        """What the first process gives."""
        rows = np.zeros((len(self.processes), self.nbytes), np.uint8)
        if jax.process_index() == self.processes[0]:
            rows[:, : len(text)] = np.frombuffer(text, np.uint8)
        row = self(rows)
        assert row is not None
        return row[: len(text)].tobytes()


def _sum(rows: jax.Array) -> jax.Array:
    return jnp.sum(rows, 0, dtype=rows.dtype)
