"""The control plane's sockets: every node binds a ROUTER and dials every peer's with a DEALER."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import zmq

from cascadia_p2p.transport.client_server import ClientCall, read_request
from cascadia_p2p.transport.curve import Domain, Knock, failed_handshake
from cascadia_p2p.transport.looping import Delivery, LoopSocket, Monitor, Signal, SocketEvent, peer_address
from cascadia_p2p.transport.meter import Meter, hang_up, source_of
from cascadia_p2p.transport.naming import open_plain
from cascadia_p2p.transport.network import (
    CONNECT_TIMEOUT_MS,
    Network,
    bind,
    connect,
    end_silent,
    most_connections,
)
from cascadia_p2p.transport.ports import EVENTS, no_knocks
from cascadia_p2p.types import Endpoint

LINGER_MS: Final = 1000
MAX_CONTROL_PART: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A message from a dialling peer, the identity for a reply, and its host, empty when not known."""

    identity: bytes
    data: bytes
    host: str = ""


@dataclass(frozen=True, slots=True)
class Stranger:
    """Somebody was turned away at the door: from where (empty when that is not known), and why."""

    host: str
    why: Knock


WAITING_BYTES: Final = 1 << 22
"""Of messages that one connection may send ahead."""


class ControlServer:
    """A ROUTER: receives from all who dial, replies to one of them.

    Args:
        network: makes the socket.
        host: address to bind.
        port: port to bind; 0 takes any free one.
        flag: the flag that moves the port, for the error.
        client_answer: sent back to whoever speaks the client protocol here, which is another socket's.
    """

    def __init__(
        self, network: Network, host: str, port: int, *, flag: str = "--port", client_answer: bytes = b""
    ) -> None:
        made = network.socket(zmq.ROUTER, linger_ms=LINGER_MS, max_part=MAX_CONTROL_PART)
        try:
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
            end_silent(made)
            network.guard(made, Domain.NODES)
            self.endpoint = bind(made, host, port, flag)
            self._signal = Signal()
            self._monitor = Monitor(made, EVENTS, self._signal)
            self._socket = LoopSocket(made, self._signal, self._end_source)
        except BaseException:
            made.close(linger=0)
            raise
        self.turned_away: Callable[[Stranger], None] = lambda _: None
        """Told, by `receive`, of everybody whose handshake failed."""
        self._client_answer = client_answer
        self._hosts: dict[int, str] = {}
        self._knock: Knock | None = None
        self.malformed = 0
        """Messages that were dropped because they had another shape than one part."""
        self.failed = no_knocks()
        """Handshakes that came to nothing, by why."""
        self.meter = Meter(WAITING_BYTES, whole=2 * MAX_CONTROL_PART, most=most_connections())
        """Of its connections."""

    @property
    def deaf(self) -> bool:
        """Whether messages that have come can not be taken yet, for one of very many parts before them."""
        return self._socket.skipping

    async def receive(self) -> ControlCall:
        """The next message; safe to cancel."""
        while True:
            await self._signal.turn()
            self._signal.clear()
            self._follow_strangers()
            while (parts := self._socket.take()) is not None:
                self.meter.took(source_of(parts[-1]), sum(map(len, parts)), len(parts))
                if len(parts) == 2:
                    return ControlCall(parts[0].bytes, parts[1].bytes, _host(parts[1]))
                self._turn_away(parts)
                await self._signal.turn()
            await self._signal.wait()

    def _follow_strangers(self) -> None:
        """Follow the connections: the end of one follows its failed handshake at once."""
        while (event := self._monitor.take()) is not None:
            if event.event == zmq.Event.ACCEPTED:
                self._hosts[event.value] = peer_address(event.value)
                self.meter.opened(event.value, time.monotonic())
            elif event.event == zmq.Event.DISCONNECTED:
                host = self._hosts.pop(event.value, "")
                self.meter.closed(event.value)
                knock, self._knock = self._knock, None
                if knock is not None:
                    self.turned_away(Stranger(host, knock))
            else:
                self._knock = failed_handshake(event.event, event.value)
                if self._knock is not None:
                    self.failed[self._knock] += 1

    def _turn_away(self, parts: list[zmq.Frame]) -> None:
        call = read_request(parts, 0)
        if not isinstance(call, ClientCall) or not self._client_answer:
            self.malformed += 1
        else:
            self._socket.give([call.route.identity, *(call.route.envelope or ()), b"", self._client_answer])

    def _end_source(self, part: zmq.Frame) -> None:
        """End the connection that a part came over."""
        if (descriptor := source_of(part)) is not None:
            self._hang_up(descriptor)

    def _hang_up(self, descriptor: int) -> bool:
        return hang_up(descriptor, lambda at: at[1] == self.endpoint.port)

    def look(self) -> None:
        """End connections that send more than is taken; to be called often."""
        if self._socket.empty:
            self.meter.emptied()
        self.meter.enforce(self._hang_up)

    def reply(self, identity: bytes, data: bytes) -> Delivery:
        """Send to the peer with this identity, without waiting."""
        return self._socket.give([identity, data])

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Unbind; what is queued still has `linger_ms` to leave."""
        self._signal.close()
        self._monitor.close()
        self._socket.close(linger_ms)


def _host(part: zmq.Frame) -> str:
    """Where a part came from, as ZeroMQ noted it when the connection was made."""
    try:
        return str(part.get("Peer-Address"))
    except (zmq.ZMQError, UnicodeError):
        return ""


class Dial(Enum):
    """What happened to the connection to a peer."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """It was there and is lost; it is being dialled again."""
    REFUSED = "refused"
    """The machine is there and nobody listens on the port."""
    UNANSWERED = "unanswered"
    """Nothing came back, or no way leads there."""
    HANDSHAKE_FAILED = "handshake_failed"
    """Something else than a node of ours listens there."""
    MALFORMED = "malformed"
    """A message came that no node sends: the dialer has closed itself."""
    IN_THE_CLEAR = "in_the_clear"
    """This side has a key, and what listens there has none."""
    CLOSED = "closed"
    """What listens there has a key, and this side has none."""
    OTHER_KEY = "other_key"
    """What listens there has not this side's key, or hung up for another reason."""

    @property
    def about_keys(self) -> bool:
        """Whether keys keep both apart."""
        return self in (Dial.IN_THE_CLEAR, Dial.CLOSED, Dial.OTHER_KEY)


_EVENTS: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ControlDialer:
    """A DEALER to one peer, dialled again for as long as it is open.

    Args:
        network: makes the socket.
        endpoint: a numeric address.

    Raises:
        UnreachableError: ZeroMQ does not take the address.
        NoSocketError: no descriptor is left for it.
    """

    def __init__(self, network: Network, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.connected = False
        self._keyed = network.keys is not None
        self._greetings = network.greetings
        self._dialled = network.dialled
        self._descriptor: int | None = None
        self._shaken = False
        made = network.socket(zmq.DEALER, linger_ms=LINGER_MS, max_part=MAX_CONTROL_PART)
        with contextlib.ExitStack() as undone:
            undone.callback(made.close, linger=0)
            network.present(made)
            self._signal = Signal()
            self._monitor = Monitor(made, _EVENTS, self._signal)
            undone.callback(self._monitor.close)
            self._socket = LoopSocket(made, self._signal)
            undone.callback(self._socket.close, 0)
            connect(made, endpoint)
            undone.pop_all()

    async def receive(self) -> bytes | Dial:
        """The next message, or what happened to the connection; safe to cancel, one task at a time."""
        while True:
            await self._signal.turn()
            self._signal.clear()
            # The handshake's event runs ahead of the connection's readiness.
            if self._shaken and not self.connected and self._socket.writable():
                self.connected = True
                return Dial.CONNECTED
            while (event := self._monitor.take()) is not None:
                if (dial := await self._dial(event)) is not None:
                    return dial
            if (part := self._socket.take_one()) is not None:
                self._dialled.meter.took(self._descriptor, len(part))
                if not part.more:
                    return part.bytes
                self.close(0)
                return Dial.MALFORMED
            await self._signal.wait()

    def send(self, data: bytes) -> Delivery:
        """Send without waiting; FULL while there is no connection."""
        return self._socket.give([data])

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Hang up; what is queued still has `linger_ms` to leave."""
        self._dialled.closed(self._descriptor, self.endpoint)
        self._descriptor = None
        self._signal.close()
        self._monitor.close()
        self._socket.close(linger_ms)

    async def _dial(self, happened: SocketEvent) -> Dial | None:
        """What an event of ZeroMQ means for the peer."""
        match happened.event:
            case zmq.Event.CONNECTED:
                self._descriptor = happened.value
                self._dialled.opened(happened.value, self.endpoint)
                return None
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self._shaken = True
                self._signal.set()
                return None
            case zmq.Event.DISCONNECTED:
                self._dialled.closed(happened.value, self.endpoint)
                self._descriptor = None
                was, self.connected, self._shaken = self.connected, False, False
                return Dial.DISCONNECTED if was else None
            case zmq.Event.CLOSED:
                dial = await knock(self.endpoint)
                self._signal.require_open()
                return dial
        why = failed_handshake(happened.event, happened.value)
        if why is Knock.HUNG_UP:
            why = await self._greetings.why_hung_up(self.endpoint, keyed=self._keyed)
            self._signal.require_open()
        return self._refused(why)

    def _refused(self, why: Knock | None) -> Dial:
        if why is Knock.MECHANISM:
            return Dial.IN_THE_CLEAR if self._keyed else Dial.CLOSED
        if self._keyed and why in (Knock.HUNG_UP, Knock.REFUSED):
            return Dial.OTHER_KEY
        return Dial.HANDSHAKE_FAILED


async def knock(endpoint: Endpoint, timeout_s: float = CONNECT_TIMEOUT_MS / 1000) -> Dial | None:
    """Why a connection attempt failed, found by one more; None when it works by now.

    ZeroMQ tells that an attempt failed and not why; a port that refuses means a dead process, where silence
    may mean a loose cable.

    Args:
        endpoint: a numeric address.
        timeout_s: how long silence is listened to, in seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            (await open_plain(endpoint)).close()
    except ConnectionRefusedError:
        return Dial.REFUSED
    except (OSError, TimeoutError):
        return Dial.UNANSWERED
    return None
