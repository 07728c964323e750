"""What a trainer's and a sampler's processes tell each other: one JSON text a line, over one TCP connection.

Nothing is unpickled, and no line is longer than 64 MiB. Arrays travel apart, by `jax.experimental.transfer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import importlib
import ipaddress
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError, SyncError
from lazymodel._tensors.convert import Arithmetic, Convert
from lazymodel._tensors.lazy import SCALAR_UFUNCS
from lazymodel._tensors.shards import spec_axes
from lazymodel.extras.sync.pieces import Copy, Exchange, Part, Region, Slot, device_order

PROTOCOL = 1
_LONGEST = 64 << 20  # bytes of a line
Message: TypeAlias = "dict[str, Any]"


# Connections ----------------------------------------------------------------------------------------------------------


class Channel:
    """Messages over a connected socket. A peer that is gone, or silent for so many seconds, is a `SyncError`."""

    def __init__(self, connected: socket.socket, seconds: float, peer: str) -> None:
        connected.settimeout(seconds)
        self.host, self._peer, self._seconds = connected.getsockname()[0], peer, seconds
        self._socket, self._lines = connected, connected.makefile("rb")

    @classmethod
    def to(cls, address: str, token: str | None, seconds: float) -> Self:
        """A channel to the server at an address."""
        try:
            connected = socket.create_connection(host_and_port(address), seconds)
        except OSError as error:
            raise SyncError(
                f"cannot reach a trainer at {address}: {error}. Start lm.SyncServer there first, and check the address"
            ) from error
        channel = cls(connected, seconds, f"the trainer at {address}")
        try:
            nonce = str(channel.receive().get("nonce"))
            channel.send({"proof": _proof(token or "", nonce), "protocol": PROTOCOL, "jax": jax.__version__})
        except BaseException:
            channel.close()
            raise
        return channel

    def admit(self, token: str | None) -> None:
        """Lets the sampler in that has connected, if it has the token."""
        nonce = secrets.token_hex(16)
        self.send({"nonce": nonce})
        found = self.receive()
        if not hmac.compare_digest(str(found.get("proof")), _proof(token or "", nonce)):
            raise SyncError("the token is not the trainer's: pass the same `token` to SyncServer and SyncClient")
        if found.get("protocol") != PROTOCOL:
            raise SyncError(
                f"trainer and sampler cannot talk: the trainer has protocol {PROTOCOL} and JAX {jax.__version__}, the "
                f"sampler {found.get('protocol')} and {found.get('jax')}. Install one version of lazymodel for both"
            )

    def send(self, message: Message) -> None:
        """Sends one message."""
        self._socket.settimeout(self._seconds)  # also after a patient `receive`
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise SyncError(f"{self._peer} is gone: {error}") from error

    def receive(self, *, patient: bool = False) -> Message:
        """The next message. If patient, it may come as late as it likes."""
        self._socket.settimeout(None if patient else self._seconds)
        try:
            line = self._lines.readline(_LONGEST)
        except TimeoutError as error:
            raise SyncError(f"{self._peer} has not answered for {self._seconds:g} seconds") from error
        except OSError as error:
            raise SyncError(f"{self._peer} is gone: {error}") from error
        if not line.endswith(b"\n"):
            raise SyncError(f"{self._peer} is gone: it has closed the connection")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise SyncError(f"{self._peer} does not speak as lm.SyncServer and lm.SyncClient do")
        return message

    def ask(self, message: Message) -> Message:
        """The answer to a message; one that is an error is raised."""
        self.send(message)
        return self.answer()

    def answer(self) -> Message:
        """The next message; one that is an error is raised."""
        found = self.receive()
        if "error" in found:
            raise SyncError(f"{self._peer}: {found['error']}")
        return found

    def hang_up(self) -> None:
        """Ends the connection; whoever waits for a message gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection. Another thread must not be waiting for a message."""
        self.hang_up()
        self._lines.close()
        self._socket.close()

    def __del__(self) -> None:  # with a client that nobody needs any more, or whose making failed
        self._lines.close()
        self._socket.close()


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `"host:port"`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise LazyModelError(f'expected an address as "host:7000", found {address!r}')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a host of this name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def transfers(host: str) -> Any:
    """A new server of arrays, of JAX, at any port of a host.

    Raises:
        SyncError: This JAX, or this platform, has none.
    """
    try:
        module = importlib.import_module("jax.experimental.transfer")
        there = f"[{host}]:0" if ":" in host else f"{host}:0"
        return module.start_transfer_server(jax.local_devices()[0].client, there, [there])
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:  # a JaxRuntimeError is a RuntimeError
        raise SyncError(
            f"jax.experimental.transfer, which moves arrays between jobs, does not work with JAX {jax.__version__} on "
            f"{jax.default_backend()}: {error}. Use JAX 0.10.2 or newer; or lm.save in the trainer, and load that "
            "in the sampler"
        ) from error


# Models ---------------------------------------------------------------------------------------------------------------


class _Client:
    process_index = 0


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A device of the trainer, which this process knows by name only."""

    id: int
    process_index: int
    client: Any = _Client
    platform: str = "elsewhere"
    device_kind: str = "elsewhere"


def described(variables: Mapping[str, AbstractVariable]) -> Message:
    """Variables as JSON: their shapes, dtypes, and which device has which part."""
    shardings: dict[Sharding, int] = {}
    found: Message = {}
    for path, variable in variables.items():
        number = shardings.setdefault(cast(Sharding, variable.sharding), len(shardings))
        found[path] = [variable.shape, jnp.dtype(variable.dtype).name, number]
    return {"variables": found, "shardings": list(map(_described, shardings))}


def _described(sharding: Sharding) -> Message:
    devices = [(device.id, device.process_index) for device in device_order(sharding)]
    if not isinstance(sharding, NamedSharding):
        return {"axes": [["device", 1]], "spec": [], "devices": devices}
    spec = spec_axes(sharding.spec, len(sharding.spec))
    return {"axes": list(sharding.mesh.shape.items()), "spec": spec, "devices": devices}


def variables_of(description: Message) -> dict[str, AbstractVariable]:
    """The variables that a trainer has described."""
    with understood("a description of a model"):
        shardings: list[Sharding] = []
        for each in description["shardings"]:
            names, sizes = zip(*each["axes"], strict=True)
            devices = np.empty(len(each["devices"]), object)
            devices[:] = [Elsewhere(int(number), int(process)) for number, process in each["devices"]]
            spec = PartitionSpec(*(tuple(axes) or None for axes in each["spec"]))
            shardings.append(NamedSharding(Mesh(devices.reshape(sizes), names), spec))
        return {
            path: AbstractVariable(path, tuple(shape), jnp.dtype(dtype), shardings[number], "live")
            for path, (shape, dtype, number) in description["variables"].items()
        }


# Exchanges ------------------------------------------------------------------------------------------------------------


def packed(exchanges: Sequence[Exchange]) -> list[Any]:
    """What devices exchange, as JSON: only what the sending side needs."""
    return [
        [list(each.pairs), [[part.source, _copy(part.copy), *_cuts(part)] for part in each.parts]] for each in exchanges
    ]


def _cuts(part: Part) -> Any:
    return part.slot.lens, part.slot.cut, [cut for cut, _ in part.starts]


def _copy(copy: Copy) -> Any:
    steps = copy.steps[: copy.moving()[0]]
    places = [[place.shape, place.origin, place.axes] for place in (copy.of, copy.to) if place is not None]
    return [copy.extents, places, copy.dtype.name, [_step(step) for step in steps]]


def _step(step: Convert) -> Any:
    name, operands = None, []
    if isinstance(step.function, Arithmetic):
        name = step.function.function.__name__
        numbers = [None if each is None else np.asarray(each) for each in step.function.operands]
        operands = [None if each is None else [each.dtype.name, each.tobytes().hex()] for each in numbers]
    return [step.dtype.name, step.bitcast, name, operands]


def unpacked(packed: Any) -> list[Exchange]:
    """The exchanges of a message."""
    with understood("what to send"):
        found: list[Exchange] = []
        for pairs, parts in packed:
            own = [
                Part(0, int(source), _copy_of(copy), _slot(lens, cut), [(_tuples(start), ()) for start in starts])
                for source, copy, lens, cut, starts in parts
            ]
            found.append(Exchange([(int(sender), int(receiver)) for sender, receiver in pairs], False, own))
        return found


def _slot(lens: Any, cut: Any) -> Slot:
    return Slot(0, _tuples(lens), _tuples(cut), ((), ()))


def _copy_of(found: Any) -> Copy:
    extents, places, dtype, steps = found
    of, to = (Region(*map(_tuples, place)) for place in places)
    return Copy(0, _tuples(extents), of, to, jnp.dtype(dtype), tuple(map(_step_of, steps)))


def _step_of(found: Any) -> Convert:
    dtype, bitcast, name, operands = found
    if name is None:
        return Convert(jnp.dtype(dtype), bool(bitcast))
    function = next(each for each in SCALAR_UFUNCS if each.__name__ == name)
    numbers = [
        None if each is None else np.frombuffer(bytes.fromhex(each[1]), jnp.dtype(each[0]))[0] for each in operands
    ]
    return Convert(jnp.dtype(dtype), function=Arithmetic(function, tuple(numbers)))


def _tuples(found: Any) -> Any:
    return tuple(map(_tuples, found)) if isinstance(found, list) else int(found)


@contextlib.contextmanager
def understood(what: str) -> Any:
    """A message that is not as expected is a `SyncError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, StopIteration) as error:
        raise SyncError(f"expected {what} from another lazymodel of protocol {PROTOCOL}, found {error!r}") from error
