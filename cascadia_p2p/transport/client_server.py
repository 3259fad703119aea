"""The head's client socket: one ROUTER on several addresses that notices when a client vanishes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import zmq

from cascadia_p2p.transport.curve import Domain, failed_handshake
from cascadia_p2p.transport.looping import Delivery, LoopSocket, Monitor, Signal, SocketEvent, connection_of
from cascadia_p2p.transport.meter import Meter, hang_up, source_of
from cascadia_p2p.transport.network import Network, allow_many_descriptors, bind, most_connections
from cascadia_p2p.transport.ports import EVENTS, no_knocks
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import MAX_REQUEST_BYTES

LINGER_MS: Final = 1000
MAX_ENVELOPE_PARTS: Final = 8
MAX_ENVELOPE_BYTES: Final = 512
REPLIES_IN_SOCKET: Final = 256
"""Replies to one client that ZeroMQ holds; the many requests of one connection may end together."""

OTHER_DESCRIPTORS: Final = 256
"""That everything but connections to a node may need: those to other nodes, files, discovery."""

SURPLUS: Final = 64
"""Clients beyond the limit that are told so; with more, the newest are cut off, so that descriptors last."""

ENVELOPE_BYTES: Final = 1 << 16
"""Around a request, at most."""

SEND_BUFFER: Final = 1 << 16
"""Bytes to one client that the system holds: its own choice would grow to megabytes."""

HEARTBEAT_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 3000

WAITING_BYTES: Final = 1 << 27
"""Of requests that one connection may send ahead."""

UNACKNOWLEDGED_MS: Final = 5000
"""Until a client is gone whose machine takes nothing: no heartbeat leaves while answers fill the way."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way back to a client.

    Args:
        identity: the ROUTER's name for it.
        envelope: the parts that came before the first empty one; None where there was no empty part.
        connection: a number of our own for its connection, never used again.
    """

    identity: bytes
    envelope: tuple[bytes, ...] | None
    connection: int

    @property
    def peer(self) -> tuple[int, bytes]:
        """Whom a reply reaches: of two that were taken for one connection, each is its own."""
        return self.connection, self.identity


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A request's bytes.

    Args:
        route: the way back.
        data: the request.
        one_reply: it came straight from a REQ socket, which takes one reply a request.
        surplus: its connection is one more than the limit.
        client: the public key that its connection was admitted with; empty for one in the clear.
    """

    route: Route
    data: bytes
    one_reply: bool = False
    surplus: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class ClientFault:
    """A message that has not the shape of a request, and why, in a sentence."""

    route: Route
    reason: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A connection ended; nothing sent to its routes arrives any more."""

    connection: int


ClientEvent: TypeAlias = ClientCall | ClientFault | ClientGone


class ClientServer:
    """Serves clients that send one JSON part behind an empty one: REQ, or DEALER with the same envelope.

    Args:
        network: makes its sockets.
        limit: connections at a time; by default what this process may open descriptors for.
    """

    def __init__(self, network: Network, limit: int | None = None) -> None:
        descriptors = allow_many_descriptors()
        others = OTHER_DESCRIPTORS + 2 * most_connections() + SURPLUS
        self.limit = max(1, descriptors - others) if limit is None else limit
        made = network.socket(zmq.ROUTER, linger_ms=LINGER_MS, max_part=MAX_REQUEST_BYTES)
        try:
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
            made.setsockopt(zmq.SNDHWM, REPLIES_IN_SOCKET)
            made.setsockopt(zmq.SNDBUF, SEND_BUFFER)
            made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            made.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
            made.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
            self._signal = Signal()
            self._monitor = Monitor(made, EVENTS, self._signal)
            self._socket = LoopSocket(made, self._signal, self._end_source)
        except BaseException:
            made.close(linger=0)
            raise
        self._network = network
        self.endpoints: list[Endpoint] = []
        self.expelled = 0
        """Connections that were ended because their key was withdrawn."""
        self.faults = 0
        """Messages without the shape of a request."""
        self.failed = no_knocks()
        """Handshakes that came to nothing, by why."""
        self.meter = Meter(WAITING_BYTES, whole=MAX_REQUEST_BYTES + ENVELOPE_BYTES)
        """Of its connections."""
        self._open: dict[int, int] = {}
        self._surplus: set[int] = set()
        self._ended: dict[int, bool] = {}
        self._guarded: set[tuple[str, int]] = set()
        self._locked: set[int] = set()
        """Descriptors whose last connection was to a guarded address."""
        self._keys: dict[int, bytes] = {}
        self._serial = 0
        self._waiting: deque[ClientEvent] = deque()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._open)

    def bind(self, host: str, port: int, *, flag: str = "--client-port", guarded: bool = False) -> Endpoint:
        """Serve at one more address; port 0 takes any free one.

        Args:
            host: see `network.bind`.
            port: see `network.bind`.
            flag: see `network.bind`.
            guarded: let in only clients with a key, if the network has one.

        Raises:
            PortError: see `network.bind`.
            CascadiaError: nobody could authenticate clients.
            ValueError: an address in the clear comes behind a guarded one, whose lock it would get too.
        """
        made = self._socket.zmq
        if guarded:
            self._network.guard(made, Domain.CLIENTS)
        elif self._guarded:
            raise ValueError("addresses in the clear are bound before those that are guarded")
        endpoint = bind(made, host, port, flag)
        self.endpoints.append(endpoint)
        if guarded and self._network.keys is not None:
            self._guarded.add((_host(endpoint.host), endpoint.port))
        return endpoint

    def expel(self) -> None:
        """End the connections of clients that are not admitted any more.

        Who has asked nothing yet is not known by name: such connections end too, and whoever is still
        admitted connects again by itself.
        """
        self._follow_connections()
        for descriptor in list(self._open):
            if not self._admitted(self._keys.get(descriptor)):
                self._expel(descriptor)

    def hang_up(self, connection: int) -> None:
        """End a connection; its end is told like any other."""
        for descriptor, number in list(self._open.items()):
            if number == connection:
                hang_up(descriptor, self._is_client)

    def _end_source(self, part: zmq.Frame) -> None:
        """End the connection that a part came over."""
        if (descriptor := source_of(part)) is not None:
            hang_up(descriptor, self._is_client)

    async def receive(self) -> ClientEvent:
        """The next request, misshapen message or end of a connection; safe to cancel."""
        while True:
            await self._signal.turn()
            self._signal.clear()
            self._follow_connections()
            if self._waiting:
                return self._waiting.popleft()
            if (parts := self._socket.take()) is not None:
                # A descriptor may be in use again: its history up to now decides whose message this is.
                self._follow_connections()
                self._accept(parts)
                continue
            await self._signal.wait()

    def look(self) -> None:
        """End connections that send more than is taken; to be called often."""
        if self._socket.empty:
            self.meter.emptied()
        self.meter.enforce(lambda descriptor: hang_up(descriptor, self._is_client))

    def reply(self, route: Route, data: bytes) -> Delivery:
        """Send to a client without waiting; FULL means that it does not take what it got before."""
        if route.envelope is None:
            return self._socket.give([route.identity, data])
        return self._socket.give([route.identity, *route.envelope, b"", data])

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Unbind; what is queued still has `linger_ms` to leave."""
        self._signal.close()
        self._monitor.close()
        self._socket.close(linger_ms)

    def _follow_connections(self) -> None:
        while (event := self._monitor.take()) is not None:
            if (knock := failed_handshake(event.event, event.value)) is not None:
                self.failed[knock] += 1
                continue
            self._keys.pop(event.value, None)
            if event.event == zmq.Event.ACCEPTED:
                self._end(event)
                self._locked.discard(event.value)
                if self._is_guarded(event.value):
                    self._locked.add(event.value)
                self.meter.opened(event.value, time.monotonic())
                self._ended.pop(event.value, None)
                self._open[event.value] = self._next()
                if len(self._open) > self.limit:
                    self._surplus.add(self._open[event.value])
                if len(self._open) > self.limit + SURPLUS:
                    hang_up(event.value, self._is_client)
            else:
                self._end(event)

    def _end(self, event: SocketEvent) -> None:
        """Report the connection that had this descriptor."""
        connection = self._open.pop(event.value, None)
        self.meter.closed(event.value)
        if connection is not None:
            self._ended[event.value] = connection in self._surplus
            self._surplus.discard(connection)
            if self._surplus and len(self._open) - len(self._surplus) < self.limit:
                self._surplus.discard(min(self._surplus))
            self._waiting.append(ClientGone(connection))

    def _admitted(self, key: bytes | None) -> bool:
        keys = self._network.keys
        return keys is None or (key is not None and keys.admit(Domain.CLIENTS, key))

    def _expel(self, descriptor: int | None) -> None:
        """End a connection at one of the guarded addresses."""
        if descriptor is not None and hang_up(descriptor, lambda at: (_host(at[0]), at[1]) in self._guarded):
            self.expelled += 1

    def _is_guarded(self, descriptor: int) -> bool:
        if not self._guarded:
            return False
        with connection_of(descriptor) as made, contextlib.suppress(OSError):
            if made is not None:
                host, port = made.getsockname()[:2]
                return (_host(host), port) in self._guarded
        return False

    def _is_client(self, at: tuple[str, int]) -> bool:
        return any(endpoint.port == at[1] for endpoint in self.endpoints)

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _accept(self, parts: list[zmq.Frame]) -> None:
        """Queue what a message is, and behind it the end of its connection if that came first."""
        descriptor = source_of(parts[-1])
        # In the clear a client may name any key as its own.
        key = _key(parts[-1]) if descriptor in self._locked else None
        self.meter.took(descriptor, sum(map(len, parts)), len(parts))
        if key is not None and not self._admitted(key):
            if descriptor in self._open:
                self._expel(descriptor)
            return
        if key is not None and descriptor in self._open:
            self._keys[descriptor] = key
        ended = descriptor in self._ended
        if ended or descriptor is None:
            connection = self._next()
            surplus = descriptor is not None and self._ended.get(descriptor, False)
        else:
            connection = self._open.setdefault(descriptor, self._serial + 1)
            self._serial = max(self._serial, connection)
            surplus = connection in self._surplus
        event = read_request(parts, connection)
        if isinstance(event, ClientCall) and (surplus or key is not None):
            client = "" if key is None else key.decode()
            event = replace(event, surplus=surplus, client=client)
        self.faults += isinstance(event, ClientFault)
        self._waiting.append(event)
        if ended:
            self._waiting.append(ClientGone(connection))


def _key(part: zmq.Frame) -> bytes | None:
    """The key that was admitted on a part's connection; None on one in the clear."""
    try:
        return str(part.get("User-Id")).encode()
    except (zmq.ZMQError, UnicodeError):
        return None


def _host(text: str) -> str:
    """An address without its scope."""
    return text.partition("%")[0]


def read_request(parts: list[zmq.Frame], connection: int) -> ClientCall | ClientFault:
    """Split a message into the way back (all up to the first empty part) and the request."""
    identity = parts[0].bytes
    empty = next((at for at in range(1, len(parts)) if not len(parts[at])), None)
    if empty is None:
        route = Route(identity, None, connection)
        return ClientFault(route, "a request needs an empty part before it, as a REQ socket sends")
    envelope = parts[1:empty]
    if len(envelope) > MAX_ENVELOPE_PARTS or sum(map(len, envelope)) > MAX_ENVELOPE_BYTES:
        route = Route(identity, (), connection)
        return ClientFault(
            route,
            f"the envelope is too long: {MAX_ENVELOPE_PARTS} parts and {MAX_ENVELOPE_BYTES} bytes are taken",
        )
    route = Route(identity, tuple(part.bytes for part in envelope), connection)
    if len(parts) != empty + 2:
        return ClientFault(route, "a request is exactly one part behind the empty one")
    return ClientCall(route, parts[-1].bytes, one_reply=_peer_type(parts[-1]) == "REQ")


def _peer_type(part: zmq.Frame) -> str:
    """The kind of the socket at the other end of the connection, as it said itself; may be empty."""
    try:
        return str(part.get("Socket-Type"))
    except (zmq.ZMQError, UnicodeError):
        return ""
