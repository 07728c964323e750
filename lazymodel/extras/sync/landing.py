"""Where on the sampler's devices lands what its trainer sends, and the programs that put it into place.

Elements that several devices need, or several variables, land on one device each, in arrays that all devices share
evenly; a second program moves them on, as in one process. All others land in their places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lazymodel.extras.sync.pieces import Copy, Exchange, Region, device_order
from lazymodel.extras.sync.transfer import (
    Bodies,
    CompiledMoves,
    Group,
    Landing,
    Move,
    Struct,
    held_nbytes,
    sole_mesh,
)


@dataclasses.dataclass(frozen=True)
class Land:
    """Elements of a trainer's variable, as they move, and the sampler's devices on which they may land."""

    name: str
    copy: Copy
    there: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.copy.extents) * self.copy.moving()[1].itemsize

    def crossing(self, name: str) -> Move:
        """The move to an array of this name, of which each device of the sampler has a part."""
        devices = NamedSharding(Mesh(np.array(self.there), ("device",)), PartitionSpec(*[None] * self._axis, "device"))
        struct = jax.ShapeDtypeStruct(self.copy.to.shape, self.copy.moving()[1], sharding=devices)
        return Move(name, struct, (self.name,), (self.copy,))

    @functools.cached_property
    def _axis(self) -> int:
        return _divided(self.copy.extents, len(self.there))


def _divided(extents: Sequence[int], parts: int) -> int:
    """The axis that is divided: the first that can be evenly, or the longest."""
    even = [axis for axis, extent in enumerate(extents) if extent % parts == 0]
    return even[0] if even else max(range(len(extents)), key=lambda axis: extents[axis], default=0)


def landings(move: Move) -> dict[Land, None]:
    """What a variable is made of, each once."""
    there = device_order(cast(Any, move.target.sharding))
    found: dict[Land, None] = {}
    for copy in move.copies:
        if copy.of is None:
            continue
        order = copy.source_order()
        extents = tuple(copy.extents[k] for k in order)
        shape = list(extents) or [1]
        axis = _divided(extents, len(there))
        shape[axis] = -(-shape[axis] // len(there)) * len(there)
        of = dataclasses.replace(copy.of, axes=tuple(copy.of.axes[k] for k in order))
        to = Region(tuple(shape), (0,) * len(shape), tuple((n, 1) for n in range(len(order))))
        steps = copy.steps[: copy.moving()[0]]
        found[Land(move.names[int(cast(Any, copy.source))], Copy(0, extents, of, to, copy.dtype, steps), there)] = None
    return found


def local_move(move: Move, lands: Mapping[Land, None], names: Mapping[Land, str]) -> Move:
    """The move from where its parts have landed."""
    places, copies = {land: n for n, land in enumerate(lands)}, list[Copy]()
    for copy in move.copies:
        if copy.of is None:
            copies.append(copy)
            continue
        (land,) = landings(dataclasses.replace(move, copies=(copy,)))
        order, shape = copy.source_order(), land.copy.to.shape
        axes = tuple((order.index(k), 1) if k in order else (-1, 0) for k in range(len(copy.extents)))
        after, dtype = copy.moving()
        of = Region(shape, (0,) * len(shape), axes)
        copies.append(Copy(places[land], copy.extents, of, copy.to, dtype, copy.steps[after:]))
    return Move(move.path, move.target, tuple(names[land] for land in lands), tuple(copies))


class PulledMoves(CompiledMoves):
    """A program that joins what the trainer sends; the sources are the pieces for this process, in order."""

    landing: Landing | None = None

    def _to_others(self, bodies: Bodies, here: Any, there: Any, given: Any, wanted: Any, structs: Any) -> list[Any]:
        self.landing, self.exchanges = Landing(bodies, there, sole_mesh(there, wanted)), bodies.exchanges
        return [self.landing.compiled_join(wanted, structs[1])]

    def _run(self, sources: list[jax.Array], old: list[jax.Array]) -> Sequence[jax.Array]:
        return self._calls[0](sources if self.landing is None else self.landing.landed(sources), old)


class Landed:
    """A program that joins what the trainer sends, and one that moves it on; as `CompiledMoves`."""

    def __init__(self, pulled: Group, local: Group) -> None:
        self.pulled, self._local = pulled.program, local.program
        self.compiled = (*self.pulled.compiled, *self._local.compiled)
        self.nbytes = self.pulled.nbytes + sum(map(held_nbytes, pulled.wanted)) + self._local.nbytes

    def __call__(self, sources: Sequence[jax.Array], old: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return self._local(self.pulled(sources, []), old)


@dataclasses.dataclass(frozen=True)
class Pull:
    """How the pieces for a program of this process come from the trainer's."""

    number: int
    program: PulledMoves
    senders: Sequence[int]  # the process of each device of the trainer
    sources: tuple[str, ...]

    def cut_by(self, process: int) -> list[Exchange]:
        """What a process of the trainer sends to this one."""
        there = cast(Landing, self.program.landing).there
        own = [n for n, device in enumerate(there) if device.process_index == jax.process_index()]
        parts = [
            each.only(lambda s, r: s >= 0 and self.senders[s] == process and r in own)
            for each in self.program.exchanges
        ]
        return [each for each in parts if each.pairs]

    def sent_by(self, process: int) -> list[int]:
        """The places of its pieces among those of this process."""
        mine = cast(Landing, self.program.landing).mine()
        return [place for place, (_, sender, _) in enumerate(mine) if self.senders[sender] == process]

    def struct(self, place: int) -> Struct:
        """The array that a piece becomes."""
        landing = cast(Landing, self.program.landing)
        n, _, receiver = landing.mine()[place]
        buffer = landing.buffers[n]
        return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, sharding=SingleDeviceSharding(landing.there[receiver]))
