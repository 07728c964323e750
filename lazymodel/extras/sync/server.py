"""`SyncServer`: the trainer's side of `Sync` between two programs; `extras/sync/client` is the sampler's.

The sampler plans, and says what to cut. Each of the trainer's processes cuts its own shards, on its devices, without
another process, and `jax.experimental.transfer` moves what is cut. `extras/sync/messages` has the messages.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._abstract.variable import AbstractVariable, is_offloaded
from lazymodel._errors import LazyModelError, SyncError
from lazymodel._programs.jaxprs import PROGRAMS, is_key, stored_as, without_mesh
from lazymodel.extras.sync.digest import digest_arrays
from lazymodel.extras.sync.messages import (
    Channel,
    Message,
    described,
    host_and_port,
    is_loopback,
    transfers,
    unpacked,
)
from lazymodel.extras.sync.pieces import Exchange, device_order
from lazymodel.extras.sync.reshard import live_arrays
from lazymodel.extras.sync.sync import as_planned, placed_variables
from lazymodel.extras.sync.transfer import Bodies, Struct, computing

_Arrays = Mapping[str, jax.Array]


class SyncServer:
    """Offers a trainer's weights to samplers that are other programs, each with an `lm.SyncClient`.

    Threads of this process answer the samplers while training goes on. If the trainer has several processes, each has
    a server of its own, for its own shards, and publishes the same versions.

    Args:
        trainer: The model, abstract with shardings, or live. It is only looked at. PRNG keys are not offered.
        address: `"host:port"` at which to listen; port 0 for any free one.
        token: A secret that samplers must know. It may be None only where no other machine reaches the address. Arrays
            travel unencrypted, and the ports that they use know no token.
        timeout: Seconds that a sampler may be silent while it takes a version.

    Attributes:
        address: Where it listens, `"host:port"`.
        version: How often `publish` was called.

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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
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
        self._open: dict[Channel, threading.Thread] = {}
        atexit.register(self.close)  # no thread may run programs while the process ends
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
        with self._lock:
            self.version += 1
            number = self.version
            if not wait and self._crowded():
                return None
            if not self._changed.wait_for(lambda: not self._crowded(), self.timeout):
                raise SyncError(f"samplers have taken two older versions for {self.timeout:g} seconds")
            self._versions[number] = {path: jnp.copy(array) for path, array in found.items()} if copy else found
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
        for channel, thread in list(self._open.items()):
            channel.hang_up()
            thread.join(self.timeout)
        atexit.unregister(self.close)

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
            thread = threading.Thread(target=self._serve, args=[channel], name="lazymodel-sync", daemon=True)
            self._open[channel] = thread
            thread.start()

    def _serve(self, channel: Channel) -> None:
        """Answers one sampler until it is gone."""
        sampler = None
        try:
            channel.admit(self._token)
            processes = {
                device.process_index for each in self._own.values() for device in device_order(cast(Any, each.sharding))
            }
            where = {"process": jax.process_index(), "processes": sorted(processes)}
            sampler = _Sampler(self, channel)
            channel.send(self._description | where | {"transfers": sampler.address})
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
            self._open.pop(channel, None)
            channel.close()

    def take(self, after: int, exactly: int | None, seconds: float) -> int | None:
        """Keeps the newest version after this one, or exactly one, for a sampler; None if none comes in time."""

        def found() -> int | None:
            number = max(self._versions, default=0) if exactly is None else exactly
            return number if number > after and number in self._versions else None

        with self._lock:
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
        with self._lock:
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
        self.address = self._transfers.address()
        self._cuts: list[_Cut | None] = []
        self.version: int | None = None

    def answer(self, request: Message) -> Message:
        """Does what a sampler asks for."""
        match request["do"]:
            case "plan":
                self._cuts.append(self._cut(request["exchanges"], request["sources"]))
                return {}
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
        return {"number": number, "digests": digests_of(pieces) if verify else None}

    def release(self) -> None:
        """Lets the version go that was taken, if any."""
        if self.version is not None:
            self._server.release(self.version)
            self.version = None


def digests_of(pieces: Sequence[jax.Array]) -> list[str]:
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
