"""`SyncServer` and `SyncClient`: `Sync` between a trainer and a sampler that are two programs.

The sampler plans, from what the trainer describes, and says what to cut; `extras/sync/messages` has the messages. Each
of the trainer's processes cuts its own shards, and `jax.experimental.transfer` moves what is cut. Every element crosses
once: where several devices of the sampler need it, it lands on one of them, and goes on from there as in `Sync`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lazymodel._abstract.variable import AbstractVariable, is_offloaded
from lazymodel._devices.collective import CollectiveScope, agreement
from lazymodel._errors import LazyModelError, SyncError
from lazymodel._mapping.table import WeightMap
from lazymodel._programs.jaxprs import PROGRAMS, is_key, stored_as, without_mesh
from lazymodel._show.text import grouped_by, listed, parse_bytes
from lazymodel.extras.sync.digest import digest_arrays
from lazymodel.extras.sync.messages import (
    Channel,
    Message,
    described,
    host_and_port,
    is_loopback,
    packed,
    transfers,
    understood,
    unpacked,
    variables_of,
)
from lazymodel.extras.sync.pieces import Copy, Region, device_order
from lazymodel.extras.sync.reshard import live_arrays
from lazymodel.extras.sync.sync import Sync, as_planned, check_apart, placed_variables
from lazymodel.extras.sync.transfer import (
    Bodies,
    CompiledMoves,
    Exchange,
    Group,
    Landing,
    Move,
    Struct,
    computing,
    group_of,
    grouped_moves,
    held_nbytes,
    routed,
    sole_mesh,
)

_Arrays = Mapping[str, jax.Array]


# The trainer's side ---------------------------------------------------------------------------------------------------


class SyncServer:
    """Offers a trainer's weights to samplers that are other programs, each with an `lm.SyncClient`.

    Threads of this process answer the samplers while training goes on. If the trainer has several processes, each has
    a server of its own, for its own shards, and publishes the same versions.

    Args:
        trainer: The model, abstract with shardings, or live. It is only looked at.
        address: `"host:port"` at which to listen; port 0 for any free one.
        token: A secret that samplers must know. It may be None only where no other machine reaches the address. Arrays
            travel unencrypted, and the ports that they use know no token.
        timeout: Seconds that a sampler may be silent while it takes a version.

    Attributes:
        address: Where it listens, `"host:port"`.
        version: How many versions were published.

    Raises:
        LazyModelError: The address, or a missing token.
        SyncError: It cannot listen there, or `jax.experimental.transfer` does not work here.

    Example:
        >>> server = lm.SyncServer(sharded)
        >>> server.publish(model)
        1
        >>> sync = lm.SyncClient(server.address, sharded)  # in another program
        >>> sampler = sync.pull(into=sharded.materialize())
        >>> sync.version
        1
        >>> server.close()
    """

    def __init__(
        self, trainer: Any, address: str = "127.0.0.1:0", *, token: str | None = None, timeout: float = 60
    ) -> None:
        host, port = host_and_port(address)
        if token is None and not is_loopback(host):
            raise LazyModelError(
                f"other machines reach {address!r}: pass token=, a secret that SyncClient is given as well"
            )
        variables = placed_variables(trainer, "trainer")
        self._own = {path: each for path, each in variables.items() if not is_key(each.dtype)}
        self._description = described(self._own)
        self._token, self.timeout = token, timeout
        self._changed = threading.Condition()
        self._versions: dict[int, _Arrays] = {}
        self._taken: collections.Counter[int] = collections.Counter()  # how many samplers take a version now
        self.version = 0
        transfers("127.0.0.1")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise SyncError(f"cannot listen at {address}: {error}. Choose another host or port") from error
        self.address = f"{address.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._open = set[Channel]()
        threading.Thread(target=self._accept, name="lazymodel-sync", daemon=True).start()

    def publish(self, trainer: Any, *, copy: bool = False, wait: bool = True) -> int | None:
        """Offers the trainer's present weights as the newest version.

        A sampler that is taking the version before keeps it until it has all of it; none takes parts of two.

        Args:
            trainer: The live trainer, with the shapes, dtypes and shardings that were planned.
            copy: True to copy the arrays, if the next step of training donates them. Otherwise they must not be donated
                before the next version; a sampler that takes one that was donated gets an error.
            wait: What to do if samplers still take two older versions: wait for one of them, or skip this version.

        Returns:
            The number of the version, from 1; None if it was skipped.

        Raises:
            LazyModelError: An array is not as planned, or is deleted.
            SyncError: Samplers have taken older versions for longer than `timeout`.
        """
        arrays, same, _ = live_arrays(trainer)
        if absent := [path for path in self._own if path not in same]:
            raise LazyModelError(f"the trainer has no array {absent[0]!r}, which was planned")
        found = {path: as_planned(arrays[same[path]], each, "trainer") for path, each in self._own.items()}
        if copy:
            found = {path: jnp.copy(array) for path, array in found.items()}
        with self._changed:
            self.version += 1
            number = self.version
            if not wait and self._crowded():
                return None
            if not self._changed.wait_for(lambda: not self._crowded(), self.timeout):
                raise SyncError(f"samplers have taken two older versions for {self.timeout:g} seconds")
            self._versions[number] = found
            self._drop()
        return number

    def _crowded(self) -> bool:
        return sum(count > 0 for count in self._taken.values()) > 1

    def _drop(self) -> None:
        """Forgets versions that are neither taken nor the newest."""
        newest = max(self._versions, default=0)
        self._versions = {n: each for n, each in self._versions.items() if n == newest or self._taken[n]}
        self._changed.notify_all()

    def close(self) -> None:
        """Stops listening. Samplers that take a version get an error."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not end a call of `accept`
        self._listener.close()
        for channel in list(self._open):
            channel.hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, peer = self._listener.accept()
            except OSError:  # closed
                return
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel = Channel(connected, self.timeout, f"the sampler at {peer[0]}")
            threading.Thread(target=self._serve, args=[channel], name="lazymodel-sync", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        """Answers one sampler until it is gone."""
        self._open.add(channel)
        sampler = None
        try:
            channel.admit(self._token)
            processes = {
                device.process_index for each in self._own.values() for device in device_order(cast(Any, each.sharding))
            }
            where = {"process": jax.process_index(), "processes": sorted(processes)}
            channel.send(self._description | where)
            sampler = _Sampler(self, channel)
            while True:
                # Between two versions a sampler may be silent as long as it likes.
                request = channel.receive(patient=sampler.version is None)
                channel.send(sampler.answer(request))
        except Exception as error:  # whatever is wrong with one sampler, the trainer goes on
            with contextlib.suppress(SyncError):
                channel.send({"error": str(error)})
        finally:
            if sampler is not None:
                sampler.release()
            self._open.discard(channel)
            channel.close()

    def take(self, after: int, exactly: int | None, seconds: float) -> int | None:
        """Keeps the newest version after this one, or exactly one, for a sampler; None if none comes in time."""

        def found() -> int | None:
            number = max(self._versions, default=0) if exactly is None else exactly
            return number if number > after and number in self._versions else None

        with self._changed:
            if exactly is None or exactly > self.version:
                self._changed.wait_for(lambda: found() is not None, seconds)
            if (number := found()) is not None:
                self._taken[number] += 1
            return number

    def arrays(self, version: int) -> _Arrays:
        """The arrays of a version that is taken."""
        return self._versions[version]

    def release(self, version: int) -> None:
        """A sampler has all of a version, or is gone."""
        with self._changed:
            self._taken[version] -= 1
            self._taken += collections.Counter()  # without those that are at zero
            self._drop()

    def variable(self, path: str) -> AbstractVariable:
        """A variable of the trainer."""
        if path not in self._own:
            raise SyncError(f"the trainer has no variable {path!r}")
        return self._own[path]


class _Sampler:
    """What a server knows of one sampler. Its server of arrays goes with it, and so what it did not fetch."""

    def __init__(self, server: SyncServer, channel: Channel) -> None:
        self._server, self._transfers = server, transfers(channel.host)
        self._cuts: list[_Cut | None] = []
        self.version: int | None = None

    def answer(self, request: Message) -> Message:
        """Does what a sampler asks for."""
        match request["do"]:
            case "plan":
                self._cuts = [self._cut(each["exchanges"], each["sources"]) for each in request["programs"]]
                return {"transfers": self._transfers.address()}
            case "take":
                self.release()
                seconds = min(float(request["seconds"]), self._server.timeout)
                self.version = self._server.take(int(request["after"]), request["exactly"], seconds)
                return {"version": self.version}
            case "send":
                return self._send(self._cuts[request["program"]], list(request["sources"]), request["verify"])
            case "done":
                self.release()
                return {}
            case other:
                raise ValueError(f"a request {other!r}")

    def _cut(self, exchanges: Any, paths: Sequence[str]) -> _Cut | None:
        variables = [self._server.variable(path) for path in paths]
        kinds = tuple((each.shape, each.dtype, each.sharding) for each in variables)
        if not exchanges:  # another process of the trainer has all of it
            return None
        return PROGRAMS.get((_Cut, str(exchanges), kinds), lambda: _Cut(unpacked(exchanges), variables))

    def _send(self, cut: Any, paths: Sequence[str], verify: bool) -> Message:
        if self.version is None:
            raise SyncError("no version was taken")
        arrays = [self._server.arrays(self.version)[path] for path in paths]
        if gone := [path for path, array in zip(paths, arrays, strict=True) if array.is_deleted()]:
            raise SyncError(
                f"{gone[0]!r} of version {self.version} was donated by the trainer before a sampler had it: "
                "publish(trainer, copy=True), or do not donate what was published"
            )
        number, pieces = secrets.randbits(62), cut(arrays)
        self._transfers.await_pull(number, pieces)
        return {"number": number, "digests": _digests(pieces) if verify else None}

    def release(self) -> None:
        """Lets the version go that was taken, if any."""
        if self.version is not None:
            self._server.release(self.version)
            self.version = None


def _digests(pieces: Sequence[jax.Array]) -> list[str]:
    found = digest_arrays({str(n): piece for n, piece in enumerate(pieces)}, agreed=False)
    return [row.digest for row in found.rows.values()]


class _Cut:
    """A program that cuts what samplers need from this process's shards of some variables."""

    def __init__(self, exchanges: Sequence[Exchange], variables: Sequence[AbstractVariable]) -> None:
        order = device_order(cast(Any, variables[0].sharding))
        self._places = [n for n, device in enumerate(order) if device.process_index == jax.process_index()]
        where = {n: place for place, n in enumerate(self._places)}
        own = [dataclasses.replace(each, pairs=[(where[s], r) for s, r in each.pairs]) for each in exchanges]
        self._mesh = Mesh(np.array([order[n] for n in self._places]), ("device",))
        self._structs = list(map(self._struct, variables))
        there = 1 + max((receiver for each in own for _, receiver in each.pairs), default=0)
        bodies = Bodies(own, self._structs, (), len(self._places), there)
        self._context, self._sent = computing(part.copy for each in own for part in each.parts), bodies.sent
        with without_mesh(), self._context():
            _, self._call = bodies.compiled_cut(self._mesh, self._structs)

    def _struct(self, variable: AbstractVariable) -> Struct:
        """The shards of this process, as one array: side by side along the first axis."""
        sharding = cast(Any, variable.sharding)
        shape, dtype = stored_as(variable.shape, variable.dtype)
        shard = sharding.shard_shape(shape)
        kind = sharding.memory_kind if is_offloaded(sharding) else None
        spec = PartitionSpec("device") if shard else PartitionSpec()
        whole = (len(self._places) * shard[0], *shard[1:]) if shard else ()
        return jax.ShapeDtypeStruct(whole, dtype, sharding=NamedSharding(self._mesh, spec, memory_kind=kind))

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """What to send, each an array of one device."""
        sources: list[jax.Array] = []
        for array, struct in zip(arrays, self._structs, strict=True):
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            found = [shards[device] for device in self._mesh.devices.flat]
            sources.append(jax.make_array_from_single_device_arrays(struct.shape, cast(Any, struct.sharding), found))
        with without_mesh(), self._context():
            cut = self._call(sources)
        return [cut[n].addressable_data(sender) for n, sender, _ in self._sent]


# The sampler's side ---------------------------------------------------------------------------------------------------


class SyncClient(Sync):
    """Moves the weights of a trainer, which is another program, into a sampler: `Sync` from an `lm.SyncServer`.

    It plans from the trainer's description and compiles once. Every pull takes one whole version. With several
    processes of the sampler, all of them make one and pull; a process fetches what its own devices need.

    Args:
        address: `"host:port"` of the trainer's server, or those of all its processes.
        sampler: The sampler, abstract with shardings, or live. One that `quantize` made is abstract here.
        mapping, only: As for `lm.Sync`.
        max_device_memory: Bytes of a device for buffers, on both sides; otherwise as for `lm.Sync`.
        token: The server's secret.
        timeout: Seconds that the trainer may be silent.
        verify: True to compare digests of what was sent with those of what has arrived, on the devices of both.

    Attributes:
        version: The version that was pulled last, 0 before the first.
        moved_nbytes: Bytes that cross to the sampler in a pull.
        kept_nbytes: Bytes of these that go on to other devices of the sampler.

    Raises:
        LazyModelError: As for `lm.Sync`.
        SyncError: The trainer cannot be reached, wants another token, or cannot talk with this JAX.

    Example:
        >>> with lm.SyncServer(sharded) as server:
        ...     sync = lm.SyncClient(server.address, sharded)
        ...     _ = server.publish(model)
        ...     sampler = sync.pull(into=sharded.materialize())
        >>> bool((sampler["up"]["kernel"] == model["up"]["kernel"]).all())
        True
    """

    @without_mesh()
    def __init__(
        self,
        address: str | Sequence[str],
        sampler: Any,
        mapping: WeightMap | Callable[..., Any] | None = None,
        *,
        only: str | Callable[[str], bool] | None = None,
        max_device_memory: int | str = "1GiB",
        token: str | None = None,
        timeout: float = 60,
        verify: bool = False,
    ) -> None:
        limit = parse_bytes(max_device_memory, name="max_device_memory", at_least=2) // 2  # two groups are under way
        self._wanted = placed_variables(sampler, "sampler")
        self._timeout, self._verify, self.version, self._closed = timeout, verify, 0, False
        self._trainers: list[Channel] = []
        try:
            with agreement(self._wanted, done="planned", given="models differ", hint="Give all the same model"):
                own = self._connect([address] if isinstance(address, str) else list(address), token)
                self._plan(own, sampler, mapping, only, limit)
                self._tell(own)
        except BaseException:
            self.close()
            raise

    def _connect(self, addresses: Sequence[str], token: str | None) -> dict[str, AbstractVariable]:
        """Connects to the trainer's processes. Returns its variables."""
        found: dict[int, Message] = {}
        channels: dict[int, Channel] = {}
        for address in addresses:
            channel = Channel.to(address, token, self._timeout)
            self._trainers.append(channel)
            description = channel.answer()
            with understood("a description of a model"):
                channels[description["process"]], found[description["process"]] = channel, description
        first = next(iter(found.values()))
        if sorted(found) != first["processes"]:
            raise SyncError(
                f"the trainer has processes {listed(map(str, first['processes']))}: expected the addresses of their "
                f"servers, found those of {listed(map(str, sorted(found)))}"
            )
        self._trainers = [channels[process] for process in sorted(channels)]
        self._processes = sorted(channels)
        return variables_of(first)

    def _grouped(self, moves: Sequence[Move], placed: Mapping[str, Struct], limit: int, *, reuse: bool) -> list[Group]:
        """Groups of variables that come straight into their places, and of those that land elsewhere first."""
        routes, lands = routed(moves, placed), {move.path: _lands(move) for move in moves}
        used = collections.Counter(land for each in lands.values() for land in each)
        shared, counted = {land for land, count in used.items() if count > 1}, set[_Land]()
        straight, landing = list[Move](), list[Move]()
        for move in moves:
            own = lands[move.path]
            once = routes[move.path].sent_nbytes() <= sum(land.nbytes for land in own) and not own.keys() & shared
            self._travels[move.path] = sum(land.nbytes for land in own.keys() - counted), 0
            counted |= own.keys()
            (straight if once else landing).append(move)
        groups = grouped_moves(straight, placed, limit, reuse=reuse, compile=_PulledMoves)
        names = {land: f"{n}" for n, land in enumerate(used)}
        crossing = {name: land.crossing(name) for land, name in names.items()}
        structs = {name: each.target for name, each in crossing.items()}
        local = {move.path: _local(move, lands[move.path], names) for move in landing}
        for path, route in routed(local.values(), structs).items():
            self._travels[path] = self._travels[path][0], route.sent_nbytes()
        found = list[Group]()
        for alike in grouped_by(landing, lambda move: routes[move.path].order).values():
            alone = [local[move.path] for move in alike if not lands[move.path].keys() & shared]
            found += grouped_moves(alone, structs, max(limit // 2, 1), reuse=reuse)
            several = [local[move.path] for move in alike if lands[move.path].keys() & shared]
            if several:  # what they have in common crosses once, for all of them
                found.append(group_of(several, routed(several, structs), structs, reuse=reuse))
        for group in found:
            first = [crossing[name] for name in group.sources]
            pulled = group_of(first, routed(first, placed), placed, reuse=False, compile=_PulledMoves)
            program = cast(Any, _Landed(pulled, group))
            groups.append(dataclasses.replace(group, sources=pulled.sources, program=program))
        return groups

    def _tell(self, placed: Mapping[str, AbstractVariable]) -> None:
        """Tells each of the trainer's processes what to cut, for which programs."""
        self._pulls: dict[int, _Pull] = {}
        for group in self._groups:
            program = cast(Any, group.program)
            program = getattr(program, "pulled", program)
            if isinstance(program, _PulledMoves) and id(program) not in self._pulls:
                order = device_order(cast(Any, placed[group.sources[0]].sharding))
                senders = [device.process_index for device in order]
                self._pulls[id(program)] = _Pull(len(self._pulls), program, senders, group.sources)
        self._links: list[Any] = []
        if not self._pulls:
            return
        self._transfers = transfers(self._trainers[0].host)
        for process, channel in zip(self._processes, self._trainers, strict=True):
            programs = [
                {"exchanges": packed(pull.cut_by(process)), "sources": pull.sources} for pull in self._pulls.values()
            ]
            self._links.append(self._transfers.connect(channel.ask({"do": "plan", "programs": programs})["transfers"]))

    @without_mesh()
    def pull(self, *, into: Any, donate: bool = True, after: int = 0, wait: float | None = None) -> Any:
        """Moves the newest version of the trainer's weights into a sampler.

        Args:
            into: The live sampler.
            donate: Its values that are replaced are donated: use the result instead. If False, the new values get
                memory of their own, and the sampler can go on until this returns.
            after: Waits for a version that is newer than this one.
            wait: Seconds to wait for it; None for `timeout`.

        Returns:
            The sampler with the new values; a Keras model or an NNX module is changed in place, and returned.

        Raises:
            LazyModelError: An array is deleted or not as planned; the sampler is as it was.
            SyncError: There is no such version yet, the trainer is gone, or a value was donated by it. Where values of
                the sampler were already replaced, it cannot be used any more: materialize it again.
        """
        old, rebuild = self._arrays(into, [part for parts in self._parts.values() for part in parts], "sampler")
        check_apart({}, old)
        if self._closed:
            raise SyncError("this SyncClient was closed, or an earlier pull failed: make a new one")
        version, coming, left = 0, list[Any](), iter(self._groups)

        def fetched(stage: CollectiveScope, group: Group) -> list[jax.Array]:
            nonlocal version
            if not version:
                version = self._take(stage, after, self._timeout if wait is None else wait)
                coming.append(self._fetch(next(left)))
            if (following := next(left, None)) is not None:
                coming.append(self._fetch(following))
            pieces, digests = coming.pop(0)
            self._ready(pieces)
            if digests and digests != _digests(pieces):
                names = listed(map(repr, group.targets))
                raise SyncError(f"version {version} of {names} has not arrived as it was sent: digests differ")
            return pieces

        try:
            result = self._move(fetched, old, rebuild, old, donate=donate)
            for channel in self._trainers:
                channel.ask({"do": "done"})
        except BaseException:
            if version:  # what is under way would be mistaken for the next version
                self.close()
            raise
        self.version = version
        return result

    def _take(self, stage: CollectiveScope, after: int, wait: float) -> int:
        """The version that all processes of the trainer keep now for all processes of the sampler."""
        until, exactly = time.monotonic() + wait, None

        def asked(channel: Channel, exactly: int | None) -> int | None:
            seconds = min(max(until - time.monotonic(), 0), self._timeout / 2)
            return channel.ask({"do": "take", "after": after, "exactly": exactly, "seconds": seconds})["version"]

        def first() -> str:
            while True:
                version = asked(self._trainers[0], None)
                if version is not None and all(asked(each, version) == version for each in self._trainers[1:]):
                    return str(version)
                if time.monotonic() > until:
                    newer = f" newer than {after}" if after else ""
                    raise SyncError(f"the trainer has published no version{newer} within {wait:g} seconds")

        exactly = int(stage.first(first))
        if not stage.leads and any(asked(each, exactly) != exactly for each in self._trainers):
            raise SyncError(f"version {exactly}, which another process of the sampler takes, is gone")
        return exactly

    def _fetch(self, group: Group) -> tuple[list[jax.Array], list[str]]:
        """Has a group's pieces sent. Returns the arrays that they will be in, and digests of what was sent, if any."""
        program = cast(Any, group.program)
        pull = self._pulls.get(id(getattr(program, "pulled", program)))
        if pull is None:
            return [], []
        pieces: dict[int, tuple[jax.Array, str]] = {}
        request = {"do": "send", "program": pull.number, "sources": group.sources, "verify": self._verify}
        own = [(pull.sent_by(process), n) for n, process in enumerate(self._processes)]
        for sent, n in own:
            if sent:
                self._trainers[n].send(request)
        for sent, n in own:
            if sent:
                answer = self._trainers[n].answer()
                found = self._links[n].pull(answer["number"], [pull.struct(place) for place in sent])
                digests = answer["digests"] or [""] * len(sent)
                pieces.update(zip(sent, zip(found, digests, strict=True), strict=True))
        ordered = [pieces[place] for place in sorted(pieces)]
        return [piece for piece, _ in ordered], [each for _, each in ordered if each]

    def _ready(self, pieces: Sequence[jax.Array]) -> None:
        """Waits until the pieces have arrived."""
        began = time.monotonic()
        while not all(cast(Any, piece).is_ready() for piece in pieces):
            waited = time.monotonic() - began
            if waited > self._timeout:
                raise SyncError(f"the trainer's arrays have not come for {self._timeout:g} seconds")
            time.sleep(min(0.0002 + waited / 50, 0.01))
        jax.block_until_ready(pieces)

    def _failure(self, error: Exception, targets: Any, old: Any, moved: Any, rebuild: Any) -> Exception:
        """The error for a pull that failed: nothing is left of two versions."""
        if any(array.is_deleted() for array in old.values()):
            left = "values of the sampler were already replaced, so it cannot be used: materialize it again"
        else:
            left = "the sampler is as it was"
        return SyncError(f"{error}; {left}. After the trainer has published a version, make a new SyncClient")

    def close(self) -> None:
        """Closes the connections."""
        self._closed = True
        for channel in self._trainers:
            channel.close()
        self._transfers, self._links = None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class _Land:
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


def _lands(move: Move) -> dict[_Land, None]:
    """What a variable is made of, each once."""
    there = device_order(cast(Any, move.target.sharding))
    found: dict[_Land, None] = {}
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
        found[_Land(move.names[int(cast(Any, copy.source))], Copy(0, extents, of, to, copy.dtype, steps), there)] = None
    return found


def _local(move: Move, lands: Mapping[_Land, None], names: Mapping[_Land, str]) -> Move:
    """The move from where its parts have landed."""
    places, copies = {land: n for n, land in enumerate(lands)}, list[Copy]()
    for copy in move.copies:
        if copy.of is None:
            copies.append(copy)
            continue
        (land,) = _lands(dataclasses.replace(move, copies=(copy,)))
        order, shape = copy.source_order(), land.copy.to.shape
        axes = tuple((order.index(k), 1) if k in order else (-1, 0) for k in range(len(copy.extents)))
        after, dtype = copy.moving()
        of = Region(shape, (0,) * len(shape), axes)
        copies.append(Copy(places[land], copy.extents, of, copy.to, dtype, copy.steps[after:]))
    return Move(move.path, move.target, tuple(names[land] for land in lands), tuple(copies))


class _PulledMoves(CompiledMoves):
    """A program that joins what the trainer sends; the sources are the pieces for this process, in order."""

    landing: Landing | None = None

    def _to_others(self, bodies: Bodies, here: Any, there: Any, given: Any, wanted: Any, structs: Any) -> list[Any]:
        self.landing, self.exchanges = Landing(bodies, there, sole_mesh(there, wanted)), bodies.exchanges
        return [self.landing.compiled_join(wanted, structs[1])]

    def _run(self, sources: list[jax.Array], old: list[jax.Array]) -> Sequence[jax.Array]:
        return self._calls[0](sources if self.landing is None else self.landing.landed(sources), old)


class _Landed:
    """A program that joins what the trainer sends, and one that moves it on; as `CompiledMoves`."""

    def __init__(self, pulled: Group, local: Group) -> None:
        self.pulled, self._local = pulled.program, local.program
        self.compiled = (*self.pulled.compiled, *self._local.compiled)
        self.nbytes = self.pulled.nbytes + sum(map(held_nbytes, pulled.wanted)) + self._local.nbytes

    def __call__(self, sources: Sequence[jax.Array], old: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return self._local(self.pulled(sources, []), old)


@dataclasses.dataclass(frozen=True)
class _Pull:
    """How the pieces for a program of this process come from the trainer's."""

    number: int
    program: _PulledMoves
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
