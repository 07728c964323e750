"""`SyncClient`: the sampler's side of `Sync` between two programs; `extras/sync/server` is the trainer's.

It plans from what the trainer describes, and tells each of its processes what to cut. Every element crosses once: where
several devices of the sampler need it, it lands on one of them (`extras/sync/landing`), and goes on as in `Sync`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import jax

from lazymodel._abstract.variable import AbstractVariable
from lazymodel._devices.collective import CollectiveScope, agreement
from lazymodel._errors import SyncError
from lazymodel._mapping.table import WeightMap
from lazymodel._programs.jaxprs import without_mesh
from lazymodel._show.text import grouped_by, listed, parse_bytes
from lazymodel.extras.sync.landing import Land, Landed, Pull, PulledMoves, landings, local_move
from lazymodel.extras.sync.messages import Channel, Message, packed, transfers, understood, variables_of
from lazymodel.extras.sync.pieces import device_order
from lazymodel.extras.sync.server import digests_of
from lazymodel.extras.sync.sync import Sync, check_apart, placed_variables
from lazymodel.extras.sync.transfer import Group, Move, Struct, group_of, grouped_moves, routed


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

    _words: ClassVar = ("crosses", "goes on")

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
        self._transfers = transfers(self._trainers[0].host)
        self._links = [self._transfers.connect(found[process]["transfers"]) for process in self._processes]
        return variables_of(first)

    def _grouped(self, moves: Sequence[Move], placed: Mapping[str, Struct], limit: int, *, reuse: bool) -> list[Group]:
        """Groups of variables that come straight into their places, and of those that land elsewhere first."""
        routes, lands = routed(moves, placed), {move.path: landings(move) for move in moves}
        used = collections.Counter(land for each in lands.values() for land in each)
        shared, counted = {land for land, count in used.items() if count > 1}, set[Land]()
        straight, landing = list[Move](), list[Move]()
        for move in moves:
            own = lands[move.path]
            once = routes[move.path].sent_nbytes() <= sum(land.nbytes for land in own) and not own.keys() & shared
            self._travels[move.path] = sum(land.nbytes for land in own.keys() - counted), 0
            counted |= own.keys()
            (straight if once else landing).append(move)
        groups = grouped_moves(straight, placed, limit, reuse=reuse, compile=PulledMoves)
        names = {land: f"{n}" for n, land in enumerate(used)}
        crossing = {name: land.crossing(name) for land, name in names.items()}
        structs = {name: each.target for name, each in crossing.items()}
        local = {move.path: local_move(move, lands[move.path], names) for move in landing}
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
            pulled = group_of(first, routed(first, placed), placed, reuse=False, compile=PulledMoves)
            program = cast(Any, Landed(pulled, group))
            groups.append(dataclasses.replace(group, sources=pulled.sources, program=program))
        return groups

    def _tell(self, placed: Mapping[str, AbstractVariable]) -> None:
        """Tells each of the trainer's processes what to cut, for which programs."""
        self._pulls: dict[int, Pull] = {}
        for group in self._groups:
            program = cast(Any, group.program)
            program = getattr(program, "pulled", program)
            if isinstance(program, PulledMoves) and id(program) not in self._pulls:
                order = device_order(cast(Any, placed[group.sources[0]].sharding))
                senders = [device.process_index for device in order]
                self._pulls[id(program)] = Pull(len(self._pulls), program, senders, group.sources)
        for process, channel in zip(self._processes, self._trainers, strict=True):
            for pull in self._pulls.values():  # one by one: each is compiled there
                channel.ask({"do": "plan", "exchanges": packed(pull.cut_by(process)), "sources": pull.sources})

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
            raise SyncError("this SyncClient was closed, the trainer is gone, or a pull failed: make a new one")
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
            if digests and digests != digests_of(pieces):
                names = listed(map(repr, group.targets))
                raise SyncError(f"version {version} of {names} has not arrived as it was sent: digests differ")
            return pieces

        try:
            result = self._move(fetched, old, rebuild, old, donate=donate)
        except BaseException:
            if version:  # what is under way would be mistaken for the next version
                self.close()
            raise
        self.version = version
        try:
            for channel in self._trainers:
                channel.ask({"do": "done"})
        except SyncError:  # it is gone, and the sampler has all of its version; the next pull says so
            self.close()
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
                    for each in self._trainers:  # which some may keep
                        each.ask({"do": "done"})
                    newer = f" newer than {after}" if after else ""
                    raise SyncError(f"the trainer has published no version{newer} within {wait:g} seconds")
                if version is not None:  # another process of the trainer has skipped it, or is behind
                    time.sleep(0.01)

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
        return SyncError(
            f"{error}; {left}. Pull again; if the trainer was gone, or this pull had begun, with a new SyncClient"
        )

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
