"""Programs that move pieces of arrays between devices, for groups of variables; `extras/sync/pieces` plans the pieces.

Each device cuts what others need into a buffer for each round of exchange, and puts what it gets into its own shards.
If the devices stay the same, in one process or many, that is one program, which exchanges with `ppermute`. Otherwise it
is a program on the old devices, `jax.device_put` of the buffers, and a program on the new ones, all in one process.
Either way a byte moves once, and no device holds more of a variable than its shard.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.variable import automatic, automatic_sharding, is_offloaded, on_device, shard_nbytes, under
from lazymodel._devices.hardware import compile_lowered
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import PROGRAMS, as_keys, is_key, stored_as, uses_x64, with_shards, without_mesh
from lazymodel._show.text import grouped_by, listed
from lazymodel._tensors.shards import grouped, spec_axes
from lazymodel.extras.sync.pieces import (
    Copy,
    Exchange,
    Recipe,
    Route,
    Slot,
    by_receivers,
    device_order,
    exchanges,
    route,
)
from lazymodel.extras.sync.wire import bits, converted, of_bits, wire

Struct: TypeAlias = jax.ShapeDtypeStruct  # of an array with its sharding; keys have their own shapes and dtypes
_Start: TypeAlias = "tuple[bool, int]"  # True and a column of a table with a row for each device, or False and a number
_Starts: TypeAlias = "tuple[_Start, ...]"
Compile: TypeAlias = "Callable[[Recipe, Sequence[Struct], Sequence[Struct], bool], CompiledMoves]"


def struct_of(array: Any, sharding: Sharding | None = None) -> Struct:
    """The struct of an array or a variable, perhaps with another sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding or array.sharding)


def held_nbytes(struct: Struct) -> int:
    """Bytes of a device for its shard; 0 if it is in other memory."""
    return 0 if is_offloaded(struct.sharding) else shard_nbytes(struct, struct.sharding)


def device_nbytes(structs: Iterable[Struct]) -> collections.Counter[Any]:
    """Bytes of each device for its shards."""
    devices: collections.Counter[Any] = collections.Counter()
    for struct in structs:
        devices.update(dict.fromkeys(cast(Any, struct.sharding).device_set, held_nbytes(struct)))
    return devices


@dataclasses.dataclass(frozen=True)
class Move:
    """A variable that gets its value from others."""

    path: str
    target: Struct
    names: tuple[str, ...]  # the paths of its sources
    copies: tuple[Copy, ...]


def routed(moves: Iterable[Move], sources: Mapping[str, Struct]) -> dict[str, Route]:
    """The route of each target.

    Raises:
        LazyModelError: The sources of one are on several sets of devices.
    """
    routes: dict[str, Route] = {}
    for move in moves:
        given = [sources[name] for name in move.names]
        if len(orders := {device_order(each.sharding): each.sharding for each in given}) > 1:
            raise LazyModelError(
                f"{move.path!r} is made of variables on different devices ({listed(map(repr, move.names))}: "
                f"{listed(map(str, orders.values()))}): put them on one mesh"
            )
        routes[move.path] = route(move.copies, tuple(each.sharding for each in given), move.target.sharding)
    return routes


# Pieces of a program. Compiling takes some 8 ms for each, and a call of a program 0.1 ms: with as many, a model of 300
# variables on 8 devices has some 40 calls, and programs for some 80 variables.
_PIECES = 64


def grouped_moves(
    moves: Sequence[Move], sources: Mapping[str, Struct], limit: int, *, reuse: bool, compile: Compile | None = None
) -> list[Group]:
    """The groups in which variables move, each with at most `limit` bytes of a device in buffers, and in results if old
    ones are not reused, if possible. `compile` makes their programs, as `CompiledMoves` does.

    With `reuse`, the old values of the targets are given and overwritten, and programs are for many calls: each moves
    several variables. Without, they are for one call, and move one. The groups of variables of one kind share a
    program, as far as they can be divided evenly.
    """
    routes, groups = routed(moves, sources), list[Group]()

    def add(members: Sequence[Move]) -> None:
        groups.append(group_of(members, routes, sources, reuse=reuse, compile=compile))

    def buffered(move: Move) -> int:
        route, new = routes[move.path], 0 if reuse else held_nbytes(move.target)
        return max(2 * sum(map(route.round_nbytes, route.rounds)) + new, 1)

    def share(move: Move) -> float:
        """The part of a group that a variable is, by its bytes or the size of its program."""
        pieces = sum(len(each.slots) for each in routes[move.path].rounds)
        return max(buffered(move) / limit, pieces / _PIECES) if reuse else 1.0

    for alike in grouped_by(moves, lambda move: (routes[move.path].order, device_order(move.target.sharding))).values():
        few: list[Move] = []
        for kind in grouped_by(alike, lambda move: (routes[move.path], move.target)).values():
            most = max(int(1 / share(kind[0])), 1)
            if len(kind) < most:
                few += kind
                continue
            size = max(each for each in range(1, most + 1) if len(kind) % each == 0)
            if 2 * size < most:
                size = most
            for start in range(0, len(kind), size):
                add(kind[start : start + size])
        by_path = {move.path: move for move in few}
        for paths in grouped({move.path: share(move) for move in few}, 1):
            add([by_path[path] for path in paths])
    return groups


def group_of(
    members: Sequence[Move],
    routes: Mapping[str, Route],
    sources: Mapping[str, Struct],
    *,
    reuse: bool,
    compile: Compile | None = None,
) -> Group:
    """These variables as one group."""
    given = {name: sources[name] for move in members for name in move.names}
    places = {name: place for place, name in enumerate(given)}
    recipe = tuple((routes[move.path], tuple(places[name] for name in move.names)) for move in members)
    wanted = tuple(move.target for move in members)
    what = recipe, tuple(given.values()), wanted, reuse
    program = PROGRAMS.get((compile, *what), lambda: (compile or CompiledMoves)(*what))
    return Group(tuple(given), tuple(move.path for move in members), wanted, program)


@dataclasses.dataclass(frozen=True)
class Group:
    """Variables that move together."""

    sources: tuple[str, ...]  # the paths of the arrays that the program takes
    targets: tuple[str, ...]  # of those that it gives
    wanted: tuple[Struct, ...]  # descriptions of these
    program: CompiledMoves


class CompiledMoves:
    """Compiled programs of groups: from sources, and old targets, which are donated, or none, to new targets.

    Attributes:
        compiled: One program, or two.
        nbytes: Bytes of a device while it runs, in addition to its arguments and to results in memory of their own.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Struct], targets: Sequence[Struct], reuse: bool) -> None:
        self._x64 = computing(copy for own, _ in recipe for copy in own.copies)
        with without_mesh(), self._x64():
            self._compile(recipe, sources, targets, reuse)

    def _compile(self, recipe: Recipe, sources: Sequence[Struct], targets: Sequence[Struct], reuse: bool) -> None:
        # Programs for several meshes are traced with Auto axes.
        self._explicit = any(automatic_sharding(each.sharding) is not each.sharding for each in (*sources, *targets))
        self._wanted = [each.sharding for each in targets]
        self._empty = any(not math.prod(each.shape) for each in targets)
        here, there = recipe[0][0].order, device_order(targets[0].sharding)
        given = [automatic_sharding(each.sharding) for each in sources]
        wanted = [automatic_sharding(each.sharding) for each in targets]
        structs = list(map(struct_of, sources, given)), list(map(struct_of, targets, wanted)) if reuse else []
        both = _common_mesh(here, [*given, *wanted]) if here == there else None
        bodies = Bodies(
            exchanges(recipe), sources, targets, len(here), len(there), _ALONE if here == there else _ALONE_ELSEWHERE
        )
        if both is not None:
            programs = [compiled(functools.partial(bodies.all, both), structs, wanted, donated=True)]
        else:
            programs = self._to_others(bodies, here, there, given, wanted, structs)
        self.compiled, self._calls = zip(*programs, strict=True)
        memory = [compiled.memory_analysis() for compiled in self.compiled]
        buffers = 2 * sum(buffer.nbytes for buffer in bodies.buffers) if both is None else 0
        self.nbytes = buffers + sum(int(each.temp_size_in_bytes) for each in memory if each)

    def _to_others(self, bodies: Bodies, here: Any, there: Any, given: Any, wanted: Any, structs: Any) -> list[Any]:
        """The program on the old devices, and that on the new ones."""
        if alone := [device for device in (*here, *there) if device.process_index != jax.process_index()]:
            raise LazyModelError(
                f"{alone[0]} is of another process, and JAX moves arrays between processes only if the devices and "
                "their order stay the same. Use one mesh's devices in the same order for both models; or save the "
                "model, and load it there"
            )
        self._landing = Landing(bodies, there, sole_mesh(there, wanted))
        return [
            bodies.compiled_cut(sole_mesh(here, given), structs[0]),
            self._landing.compiled_join(wanted, structs[1]),
        ]

    def __call__(self, sources: Sequence[jax.Array], old: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if self._explicit:
            sources, old = ([automatic(array) for array in each] for each in (sources, old))
        with without_mesh(), self._x64():
            results = self._run(list(sources), list(old))
        if self._empty:
            results = [with_shards(array) for array in results]
        if self._explicit:
            results = [under(array, sharding) for array, sharding in zip(results, self._wanted, strict=True)]
        return results

    def _run(self, sources: list[jax.Array], old: list[jax.Array]) -> Sequence[jax.Array]:
        if len(self.compiled) == 1:
            return self._calls[0](sources, old)
        cut, landing = self._calls[0](sources), self._landing
        shards = [cut[n].addressable_data(sender) for n, sender, _ in landing.sent]
        del cut
        moved = jax.device_put(shards, [landing.there[receiver] for *_, receiver in landing.sent])
        del shards
        return self._calls[1](landing.landed(moved), old)


class Landing:
    """What arrives on the new devices, in order, and the program that joins it.

    Attributes:
        there: The devices.
        sent: Of each shard that moves, the number of its buffer, and the positions of the sender and of the receiver.
        buffers: The arrays that are sent, by these numbers.
    """

    def __init__(self, bodies: Bodies, there: Sequence[Any], mesh: Mesh) -> None:
        self._bodies, where = bodies.joining()
        self._mesh, self.there = mesh, there
        self._flat = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.buffers, self.sent = bodies.buffers, bodies.sent
        self._arrives = [where[each] for each in self.sent]  # the number of the buffer in which it is joined
        self._own = [n for n, device in enumerate(there) if device.process_index == jax.process_index()]

    def compiled_join(self, wanted: Sequence[Any], old: Sequence[Struct]) -> tuple[jax.stages.Compiled, Any]:
        """The program from buffers and old arrays, which are donated, to new ones."""
        count = len(self.there)
        buffers = [
            jax.ShapeDtypeStruct(buffer.over(count), buffer.dtype, sharding=self._flat)
            for buffer in self._bodies.buffers
        ]
        return compiled(functools.partial(self._bodies.join, self._mesh), (buffers, old), wanted, donated=True)

    def mine(self) -> list[tuple[int, int, int]]:
        """What of `sent` arrives on devices of this process."""
        return [each for each in self.sent if each[2] in self._own]

    def landed(self, moved: Sequence[jax.Array]) -> list[jax.Array]:
        """The buffers as arrays, from the shards of `mine`, in order."""
        sent = zip(self._arrives, self.sent, strict=True)
        arrived = [(n, receiver) for n, (_, _, receiver) in sent if receiver in self._own]
        places, buffers = {each: place for place, each in enumerate(arrived)}, self._bodies.buffers
        # For a device that gets nothing, anything of this form that it gets: it is not used.
        others = {(buffers[n].form, receiver): place for (n, receiver), place in places.items()}
        found: list[jax.Array] = []
        for n, buffer in enumerate(buffers):
            where = [places.get((n, k), others.get((buffer.form, k))) for k in self._own]
            shards = [
                jnp.zeros(buffer.shape, buffer.dtype, device=self.there[k]) if place is None else moved[place]
                for k, place in zip(self._own, where, strict=True)
            ]
            shape = buffer.over(len(self.there))
            found.append(jax.make_array_from_single_device_arrays(shape, self._flat, shards))
        return found


def computing(copies: Iterable[Copy]) -> Any:
    """A context in which the conversions of these copies are traced and run."""
    # NumPy computes in 64 bits with `np.float64(…)`, and where an integer meets a float.
    wide = any(step.dtype.itemsize >= 8 for copy in copies for step in copy.steps)
    return functools.partial(jax.enable_x64, wide or uses_x64())


def compiled(
    body: Callable[..., Any], structs: Sequence[Any], wanted: Any, *, donated: bool = False
) -> tuple[jax.stages.Compiled, Any]:
    """The compiled program, and what to call: JAX passes elements of less than a byte to jitted functions only."""
    more: Any = {"donate_argnums": 1, "keep_unused": True} if donated else {}
    function = jax.jit(body, out_shardings=wanted, **more)
    program = compile_lowered(function.lower(*structs), "the program that moves variables")
    narrow = any(
        not is_key(each.dtype) and jax.dtypes.itemsize_bits(each.dtype) < 8 for each in jax.tree.leaves(structs)
    )
    return program, function if narrow else program


# Tracing --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Item:
    """A piece that devices exchange: its form, and where each device cuts it, and puts it."""

    target: int
    source: int | None  # the number of the argument
    copy: Copy
    slot: Slot
    after: int  # the conversions before it moves
    dtype: np.dtype[Any]  # in which it moves
    cut: _Starts
    put: _Starts

    @property
    def shape(self) -> list[int]:
        """Its shape while it moves: in the target's order."""
        return [self.slot.lens[k] for k in self.copy.order()]

    def constant(self) -> Any:
        """The value of all its elements, if it is no part of a variable."""
        return bits(jnp.asarray(np.asarray(self.copy.source, self.dtype)))

    def taken(self, local: Any, row: Any) -> Any:
        """The piece of a source's shard, as it moves."""
        whole, extents = self.slot.cut
        # As bits, unless it is computed with: XLA may move small floats through wider ones, which changes NaNs.
        piece = (local if self.after else bits(local)).reshape(whole)
        if extents != whole:
            piece = lax.dynamic_slice(piece, _at(self.cut, row), extents)
        order = self.copy.source_order()
        piece = piece.reshape([self.slot.lens[k] for k in order])
        piece = piece.transpose([order.index(k) for k in self.copy.order()])
        return bits(converted(piece, self.copy.steps[: self.after])) if self.after else piece

    def arrived(self, piece: Any) -> Any:
        """The piece as bits of the target, with its extents there."""
        if steps := self.copy.steps[self.after :]:
            piece = bits(converted(of_bits(piece, self.dtype), steps))
        every = [self.slot.lens[k] for k in self.copy.order(every=True)]
        if len(every) > piece.ndim:
            piece = jnp.broadcast_to(jnp.expand_dims(piece, self.copy.repeated()), every)
        return piece.reshape(self.slot.put[1])

    def follows(self, first: _Item, number: int) -> int | None:
        """The axis along which it lies behind `number` pieces, of which this is the first; None if it does not."""
        if (first.target, first.slot.put) != (self.target, self.slot.put):
            return None
        other = [axis for axis, (one, two) in enumerate(zip(first.put, self.put, strict=True)) if one != two]
        if len(other) != 1 or first.put[other[0]][0] or self.put[other[0]][0]:
            return None
        behind = first.put[other[0]][1] + number * self.slot.put[1][other[0]]
        return other[0] if self.put[other[0]][1] == behind else None


def _placed(local: Any, first: _Item, piece: Any, row: Any, valid: Any) -> Any:
    """The bits of a target's shard with a piece in it, at the place of `first`; unchanged where it is not valid."""
    whole = first.slot.put[0]
    if piece.shape == whole and valid is None:
        return piece.reshape(local.shape)
    starts = _at(first.put, row)
    if valid is not None:
        piece = jnp.where(valid, piece, lax.dynamic_slice(local.reshape(whole), starts, piece.shape))
    return lax.dynamic_update_slice(local.reshape(whole), piece, starts).reshape(local.shape)


# Bytes of a piece from which it moves alone: packing and unpacking larger ones takes longer than one more transfer. To
# other devices each transfer also takes some 30 µs of Python.
_ALONE, _ALONE_ELSEWHERE = 64 << 10, 256 << 10


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """An array that a device sends: pieces, by their numbers; and its shape and dtype."""

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, numbers: Sequence[int], items: Sequence[_Item]) -> Self:
        """The buffer for pieces."""
        flat = (sum(math.prod(item.shape) for item in items),)
        return cls(tuple(numbers), (tuple(items[0].shape) or flat) if len(items) == 1 else flat, wire(items[0].dtype))

    def over(self, count: int) -> tuple[int, ...]:
        """The shape of the array that consists of those of several devices."""
        return (count * self.shape[0], *self.shape[1:])

    @property
    def form(self) -> Hashable:
        """Equal for buffers that may take each other's place."""
        return self.shape, self.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Permute:
    """Pieces that move at the same time: each device sends to one other at most."""

    pairs: tuple[tuple[int, int], ...]
    stays: bool
    items: tuple[_Item, ...]
    valid: _Start | None  # 1 on devices that get something; None if all do
    alone: int  # bytes of a piece from which it moves alone

    @functools.cached_property
    def buffers(self) -> tuple[_Buffer, ...]:
        """The buffers in which the pieces move."""
        together: dict[Hashable, list[int]] = {}
        for number, item in enumerate(self.items):
            if item.source is not None:
                alone = math.prod(item.shape) * item.dtype.itemsize >= self.alone
                together.setdefault(number if alone else wire(item.dtype).name, []).append(number)
        return tuple(_Buffer.of(numbers, [self.items[number] for number in numbers]) for numbers in together.values())

    def packed(self, pieces: Sequence[Any]) -> list[Any]:
        """The pieces as buffers."""
        found: list[Any] = []
        for buffer in self.buffers:
            parts = [pieces[number] for number in buffer.numbers]
            flat = parts[0] if len(parts) == 1 else jnp.concatenate([part.ravel() for part in parts])
            found.append(flat.reshape(buffer.shape))
        return found

    def unpacked(self, buffers: Sequence[Any]) -> list[Any]:
        """The pieces from buffers."""
        pieces: dict[int, Any] = {}
        for buffer, array in zip(self.buffers, buffers, strict=True):
            start = 0
            for number in buffer.numbers:
                shape = self.items[number].shape
                part = array if len(buffer.numbers) == 1 else array[start : start + math.prod(shape)]
                pieces[number] = part.reshape(shape)
                start += math.prod(shape)
        return [item.constant() if item.source is None else pieces[number] for number, item in enumerate(self.items)]


class Bodies:
    """What each device computes in a group's programs, to trace.

    Attributes:
        exchanges, permutes: What moves, in order.
        buffers: The arrays in which it moves.
        sent: Of each shard that moves, the number of its buffer, and the positions of the sender and of the receiver.
    """

    def __init__(
        self,
        exchanged: Iterable[Exchange],
        sources: Sequence[Struct],
        targets: Sequence[Struct],
        here: int,
        there: int,
        alone: int = _ALONE_ELSEWHERE,
    ) -> None:
        self._sources, self._targets, self.exchanges = sources, targets, tuple(exchanged)
        self._here, self._there, self._alone = here, there, alone
        # Column → number of the column, by sender and by receiver.
        self._tables: tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]] = ({}, {})
        self.permutes: list[_Permute] = []
        for exchange in self.exchanges:
            senders, receivers = zip(*exchange.pairs, strict=True)
            items: list[_Item] = []
            for part in exchange.parts:
                after, dtype = part.copy.moving()
                cut, put = [row[0] for row in part.starts], [row[1] for row in part.starts]
                begin = tuple(self._start(0, senders, column, here) for column in zip(*cut, strict=True))
                end = tuple(self._start(1, receivers, column, there) for column in zip(*put, strict=True))
                items.append(_Item(part.target, part.source, part.copy, part.slot, after, dtype, begin, end))
            some = np.bincount(receivers, minlength=there)
            valid = self._start(1, range(there), some.tolist(), there) if len(exchange.pairs) < there else None
            self.permutes.append(_Permute(tuple(exchange.pairs), exchange.stays, tuple(items), valid, alone))
        moving = [(each.pairs, buffer) for each in self.permutes for buffer in each.buffers]
        self.buffers = [buffer for _, buffer in moving]
        self.sent = [(n, *pair) for n, (pairs, _) in enumerate(moving) for pair in pairs]

    def joining(self) -> tuple[Bodies, dict[tuple[int, int, int], int]]:
        """For a program that only joins; and of each of `sent`, the number of the buffer in which it is there."""
        exchanged, became = by_receivers(self.exchanges)
        bodies = Bodies(exchanged, self._sources, self._targets, self._here, self._there, self._alone)
        first = list(itertools.accumulate((len(each.buffers) for each in bodies.permutes), initial=0))
        places = ((number, n) for number, each in enumerate(self.permutes) for n in range(len(each.buffers)))
        where = {
            (buffer, *pair): first[became[number, row]] + n
            for buffer, (number, n) in enumerate(places)
            for row, pair in enumerate(self.permutes[number].pairs)
        }
        return bodies, where

    def compiled_cut(self, mesh: Mesh, sources: Sequence[Struct]) -> tuple[jax.stages.Compiled, Any]:
        """The program from sources to buffers on their devices."""
        whole = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return compiled(functools.partial(self.cut, mesh), (sources,), whole)

    def _start(self, side: int, positions: Sequence[int], values: Sequence[int], count: int) -> _Start:
        """Numbers for devices: the number if all are equal, otherwise a column of a table."""
        if all(value == values[0] for value in values):
            return False, values[0]
        column = [0] * count
        for position, value in zip(positions, values, strict=True):
            column[position] = value
        return True, self._tables[side].setdefault(tuple(column), len(self._tables[side]))

    def _row(self, side: int, mesh: Mesh) -> list[Any]:
        """The values of the device that runs this."""
        if not self._tables[side]:
            return []
        table = np.array([*self._tables[side]], np.int32).T
        row = lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(mesh.axis_names), keepdims=False)
        return [row[column] for column in range(table.shape[1])]

    def all(self, mesh: Mesh, sources: Sequence[Any], old: Sequence[Any]) -> Any:
        """The whole exchange, in one program."""

        def body(sources: Sequence[Any], old: Sequence[Any]) -> Sequence[Any]:
            rows, results = (self._row(0, mesh), self._row(1, mesh)), self._before(old)
            for permute in self.permutes:
                pieces = [
                    item.constant() if item.source is None else item.taken(sources[item.source], rows[0])
                    for item in permute.items
                ]
                if not permute.stays:
                    moved = [lax.ppermute(each, mesh.axis_names, permute.pairs) for each in permute.packed(pieces)]
                    pieces = permute.unpacked(moved)
                self._put(permute, results, pieces, rows[1])
            return results

        return self._mapped(mesh, body, _stored(sources, self._sources), _specs(mesh, self._sources), old)

    def cut(self, mesh: Mesh, sources: Sequence[Any]) -> Any:
        """The buffers that move from the old devices."""

        def body(sources: Sequence[Any]) -> Sequence[Any]:
            row, buffers = self._row(0, mesh), list[Any]()
            for permute in self.permutes:
                pieces = [
                    None if item.source is None else item.taken(sources[item.source], row) for item in permute.items
                ]
                buffers += permute.packed(pieces)
            return buffers

        own, whole = _specs(mesh, self._sources), PartitionSpec(mesh.axis_names)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(own,), out_specs=whole, check_vma=False)
        return mapped(_stored(sources, self._sources))

    def join(self, mesh: Mesh, buffers: Sequence[Any], old: Sequence[Any]) -> Any:
        """The new arrays, from the buffers on the new devices."""

        def body(buffers: Sequence[Any], old: Sequence[Any]) -> Sequence[Any]:
            row, results, left = self._row(1, mesh), self._before(old), list(buffers)
            for permute in self.permutes:
                count = len(permute.buffers)
                self._put(permute, results, permute.unpacked(left[:count]), row)
                del left[:count]
            return results

        return self._mapped(mesh, body, buffers, PartitionSpec(mesh.axis_names), old)

    def _before(self, old: Sequence[Any]) -> list[Any]:
        """The bits of the shards before anything is put into them."""
        if old:
            return list(map(bits, old))
        kinds = [(each.sharding, *stored_as(each.shape, each.dtype)) for each in self._targets]
        return [jnp.zeros(sharding.shard_shape(shape), wire(dtype)) for sharding, shape, dtype in kinds]

    def _put(self, permute: _Permute, results: list[Any], pieces: Sequence[Any], row: Any) -> None:
        valid = None if permute.valid is None else _at([permute.valid], row)[0] > 0
        # Pieces side by side are one: XLA makes one loop of many updates, in which each element asks for each of them.
        runs: list[tuple[_Item, int | None, list[Any]]] = []
        for item, piece in zip(permute.items, pieces, strict=True):
            axis = item.follows(runs[-1][0], len(runs[-1][2])) if runs else None
            if axis is None or runs[-1][1] not in (None, axis):
                runs.append((item, None, [item.arrived(piece)]))
            else:
                runs[-1] = (runs[-1][0], axis, [*runs[-1][2], item.arrived(piece)])
        for first, axis, several in runs:
            piece = several[0] if axis is None else jnp.concatenate(several, axis)
            results[first.target] = _placed(results[first.target], first, piece, row, valid)

    def _mapped(self, mesh: Mesh, body: Any, given: Sequence[Any], own: Any, old: Sequence[Any]) -> Any:
        """Runs a body on every device; `own` are the specs of what is given."""
        specs = _specs(mesh, self._targets)
        in_specs = (own, specs if old else [])
        mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        results = mapped(given, _stored(old, self._targets) if old else [])
        kinds = [(each.dtype, stored_as(each.shape, each.dtype)[1]) for each in self._targets]
        return [as_keys(of_bits(bits, dtype), own) for bits, (own, dtype) in zip(results, kinds, strict=True)]


def _stored(arrays: Sequence[Any], structs: Sequence[Struct]) -> list[Any]:
    """While tracing: arrays in device memory; keys as their data."""
    here = [on_device(array, struct.sharding) for array, struct in zip(arrays, structs, strict=True)]
    return [jax.random.key_data(array) if is_key(array.dtype) else array for array in here]


def _at(starts: Iterable[_Start], row: Sequence[Any]) -> list[Any]:
    return [row[number] if varies else np.int32(number) for varies, number in starts]


# Meshes ---------------------------------------------------------------------------------------------------------------


def _common_mesh(devices: Sequence[Any], shardings: Iterable[Sharding]) -> Mesh | None:
    """A mesh of these devices, in order, whose axes are parts of those of all the shardings; None if there is none."""
    sizes = {1, len(devices)}
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            inner = 1
            for size in reversed(tuple(sharding.mesh.shape.values())):
                sizes.add(inner := inner * size)
    chain = sorted(sizes, reverse=True)
    if any(outer % inner for outer, inner in itertools.pairwise(chain)):
        return None
    shape = [outer // inner for outer, inner in itertools.pairwise(chain)] or [1]
    return Mesh(np.array(devices).reshape(shape), [f"axis{n}" for n in range(len(shape))])


def sole_mesh(devices: Sequence[Any], shardings: Sequence[Sharding]) -> Mesh:
    """The mesh of all these shardings, which are over these devices."""
    if (mesh := _common_mesh(devices, shardings)) is None:
        shapes = ", ".join(sorted({str(dict(cast(Any, each).mesh.shape)) for each in shardings}))
        raise LazyModelError(f"meshes of one model do not divide each other ({shapes}): use one mesh for the model")
    return mesh


def _specs(mesh: Mesh, structs: Iterable[Struct]) -> list[PartitionSpec]:
    """The specs of shardings on a mesh that `_common_mesh` made for them."""
    return [_spec(mesh, cast(Sharding, struct.sharding)) for struct in structs]


def _spec(mesh: Mesh, sharding: Sharding) -> PartitionSpec:
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    inner, names = 1, dict[str, tuple[str, ...]]()
    own: list[tuple[str, int, int]] = []
    for name, size in reversed(mesh.shape.items()):
        own.append((name, inner, inner := inner * size))
    inner = 1
    for name, size in reversed(sharding.mesh.shape.items()):
        outer = inner * size
        names[name] = tuple(axis for axis, low, high in reversed(own) if inner <= low and high <= outer and low < high)
        inner = outer
    entries = spec_axes(sharding.spec, len(sharding.spec))
    return PartitionSpec(*(tuple(axis for name in each for axis in names[name]) for each in entries))
