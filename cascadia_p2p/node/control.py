"""The node's control connections: links by number, kept up, routed to the nodes behind them.

A link is one connection over which control messages come: one that this node dialled, or one that a peer
dialled and this node's ROUTER knows by its identity. What the messages mean is the ring machine's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from cascadia_p2p.errors import UnreachableError, WireError
from cascadia_p2p.node.door import Door
from cascadia_p2p.ring.events import ConnectionLost, ConnectionRefused, Event, Heard, Undecodable
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial, Stranger, knock
from cascadia_p2p.transport.looping import Delivery, NoSocketError, SocketClosedError
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Instance, NodeId
from cascadia_p2p.wire.messages import ControlMessage, Greeting, decode_control, encode

MAX_DIALLED: Final = 1024
MAX_UNANSWERED: Final = 128
"""Of them such where nobody has answered yet; the one that has waited longest makes room for another hint."""

MAX_ACCEPTED: Final = 4096
FORGET_AFTER_S: Final = 60.0
"""An address that was only hinted at and never answered is dropped; a new hint dials it again."""

GREET_AGAIN_S: Final = 1.0
KNOCK_AGAIN_S: Final = 5.0
"""Between two attempts at a door that another key closes, at most."""

MAX_UNREAD: Final = 3
"""Messages that can not be read, from a dialled address that has not greeted, until it is let be."""

REMIND_S: Final = 60.0
"""Until the same thing is said of the same door again."""

NAMELESS: Final = 8
"""Of so many who had hung up before their address could be read, one is spoken of."""

MAX_REMINDERS: Final = 256

_log = structlog.get_logger()


@dataclass(slots=True)
class _Dialled:
    """A connection that this node keeps up."""

    link: int
    endpoint: Endpoint
    lasting: bool
    task: asyncio.Task[None] | None = None
    dialer: ControlDialer | None = None
    owner: tuple[NodeId, Instance] | None = None
    answered: bool = False
    retry_s: float = 0.0
    idle_since: float = 0.0
    shut: int = 0
    unread: int = 0


@dataclass(slots=True)
class _Accepted:
    """A connection that a peer keeps up."""

    link: int
    identity: bytes
    owner: tuple[NodeId, Instance] | None = None


@dataclass(slots=True)
class _Routes:
    """The links that lead to one node."""

    instance: Instance
    links: list[int] = field(default_factory=list)


class ControlPlane:
    """Keeps the connections; hands every message and every loss to `emit`, in order.

    Args:
        network: makes the sockets.
        server: this node's bound ROUTER; closed by `close`.
        door: words about those who have another key.
        greeting: the message that a fresh connection begins with.
        emit: takes events of the ring machine.
        watch: told of every task that has ended, by its failure too.
    """

    def __init__(
        self,
        network: Network,
        server: ControlServer,
        door: Door,
        greeting: Callable[[], Greeting],
        emit: Callable[[Event], None],
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._network = network
        self._server = server
        self._door = door
        self._reminders: OrderedDict[str, float] = OrderedDict()
        self._nameless = 0
        self.strangers = 0
        """Connections that were turned away at this node's door."""
        self._greeting = greeting
        self._emit = emit
        self._watch = watch
        self._numbers = itertools.count(1)
        self._dialled: dict[int, _Dialled] = {}
        self._accepted: OrderedDict[bytes, _Accepted] = OrderedDict()
        self._accepted_by_link: dict[int, _Accepted] = {}
        self._routes: dict[NodeId, _Routes] = {}
        self._serving: asyncio.Task[None] | None = None
        self._closed = False

    # --- what the machine asks ----------------------------------------------------------------------------

    def start(self) -> None:
        """Take messages from now on."""
        self._server.turned_away = self._turned_away
        self._serving = asyncio.create_task(self._serve(), name="control-server")
        self._serving.add_done_callback(self._watch)

    def dial(self, endpoint: Endpoint, *, lasting: bool = False) -> None:
        """Keep a connection to this address, unless there is one; a lasting one is never given up."""
        for known in self._dialled.values():
            if known.endpoint == endpoint:
                known.lasting |= lasting
                return
        if self._closed or not (lasting or self._has_room()):
            return
        dialled = _Dialled(next(self._numbers), endpoint, lasting)
        self._dialled[dialled.link] = dialled
        dialled.task = asyncio.create_task(self._keep(dialled), name=f"dial-{endpoint}")
        dialled.task.add_done_callback(self._watch)

    def _has_room(self) -> bool:
        """Whether one more hint may be followed; made by forgetting one that has led nowhere."""
        unanswered = [each for each in self._dialled.values() if not (each.answered or each.lasting)]
        if len(unanswered) >= MAX_UNANSWERED:
            self.abandon(unanswered[0].link)
        return len(self._dialled) < MAX_DIALLED

    def route(self, link: int, node: NodeId, instance: Instance) -> None:
        """From now on `link` leads to this node."""
        found: _Dialled | _Accepted | None = self._dialled.get(link) or self._accepted_by_link.get(link)
        if found is None:
            return
        found.owner = (node, instance)
        routes = self._routes.get(node)
        if routes is None or routes.instance != instance:
            routes = self._routes[node] = _Routes(instance)
        if link not in routes.links:
            # First the way on which nothing that was sent is lost when this process dies: see `Node`.
            routes.links.insert(0 if link in self._dialled else len(routes.links), link)

    def dialled_address(self, link: int) -> Endpoint | None:
        """The address that a link was dialled at; None for one that a peer dialled."""
        dialled = self._dialled.get(link)
        return None if dialled is None else dialled.endpoint

    def addresses_of(self, node: NodeId) -> list[Endpoint]:
        """The addresses that were dialled and lead to a node."""
        links = self._routes[node].links if node in self._routes else []
        return [self._dialled[link].endpoint for link in links if link in self._dialled]

    def send(self, node: NodeId, message: ControlMessage) -> bool:
        """Send over the first of the node's links that takes it; False when none does."""
        return self.post(node, encode(message))

    def send_all(self, nodes: Iterable[NodeId], message: ControlMessage) -> None:
        """Send the same to several nodes."""
        data = encode(message)
        for node in nodes:
            self.post(node, data)

    def post(self, node: NodeId, data: bytes) -> bool:
        """What `send` does, for a message that is encoded already."""
        routes = self._routes.get(node)
        return routes is not None and any(self._give(link, data) for link in routes.links)

    def broadcast(self, message: ControlMessage) -> None:
        """Send to every node that is known."""
        self.send_all(list(self._routes), message)

    def answer(self, link: int, message: ControlMessage) -> None:
        """Send back over one link."""
        self._give(link, encode(message))

    def retry(self, link: int, after_s: float) -> None:
        """End a link; if this node dialled it, dial again after a while."""
        dialled = self._dialled.get(link)
        if dialled is None:
            self._forget_accepted(link)
            return
        dialled.retry_s = after_s
        self._unroute(link)
        if dialled.dialer is not None:
            dialled.dialer.close()

    def abandon(self, link: int) -> None:
        """End a link for good."""
        self._unroute(link)
        self._forget_accepted(link)
        dialled = self._dialled.pop(link, None)
        if dialled is not None and dialled.task is not None:
            dialled.task.cancel()

    def drop_peer(self, node: NodeId, instance: Instance) -> None:
        """Forget this instance's links; what is queued for it may be lost."""
        routes = self._routes.get(node)
        if routes is None or routes.instance != instance:
            return
        for link in list(routes.links):
            dialled = self._dialled.get(link)
            if dialled is not None and dialled.lasting:
                self.retry(link, 0.0)
            else:
                self.abandon(link)
        self._routes.pop(node, None)

    async def close(self) -> None:
        """Hang up everywhere; goodbyes already sent still have a second to leave."""
        self._closed = True
        tasks = [dialled.task for dialled in self._dialled.values() if dialled.task is not None]
        if self._serving is not None:
            tasks.append(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _give(self, link: int, data: bytes) -> bool:
        dialled = self._dialled.get(link)
        if dialled is not None:
            return dialled.dialer is not None and dialled.dialer.send(data) is Delivery.SENT
        accepted = self._accepted_by_link.get(link)
        return accepted is not None and self._server.reply(accepted.identity, data) is Delivery.SENT

    def _reaches(self, node: NodeId) -> bool:
        """Whether a connection that this node dialled leads there now: it may have several addresses."""
        links = self._routes[node].links if node in self._routes else []
        dialers = [self._dialled[link].dialer for link in links if link in self._dialled]
        return any(dialer is not None and dialer.connected for dialer in dialers)

    def _unroute(self, link: int) -> None:
        for node, routes in list(self._routes.items()):
            if link in routes.links:
                routes.links.remove(link)
                if not routes.links:
                    del self._routes[node]

    def _forget_accepted(self, link: int) -> None:
        accepted = self._accepted_by_link.pop(link, None)
        if accepted is not None:
            self._accepted.pop(accepted.identity, None)
            self._unroute(link)

    @property
    def deaf(self) -> bool:
        """Whether what others say waits behind a message of very many parts."""
        return self._server.deaf

    async def _serve(self) -> None:
        with contextlib.suppress(SocketClosedError):
            while True:
                call = await self._server.receive()
                accepted = self._accepted.get(call.identity)
                if accepted is None:
                    accepted = _Accepted(next(self._numbers), call.identity)
                    self._accepted[call.identity] = accepted
                    self._accepted_by_link[accepted.link] = accepted
                self._accepted.move_to_end(call.identity)
                if len(self._accepted) > MAX_ACCEPTED:
                    self._forget_accepted(next(iter(self._accepted.values())).link)
                self._take(call.data, accepted.link, _who(accepted.owner, call.host))

    def _turned_away(self, stranger: Stranger) -> None:
        self.strangers += 1
        sentence = self._door.turned_away(stranger)
        if sentence is not None and not stranger.host:
            # Who knocks again and again is caught in the act sooner or later.
            self._nameless += 1
            if self._nameless % NAMELESS:
                return
        if sentence is not None:
            self._say_seldom(f"{stranger.host} {stranger.why}", sentence)

    def _say_seldom(self, key: str, sentence: str, *, event: str = "other_key") -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reminders.get(key, float("-inf")) < REMIND_S:
            return
        self._reminders[key] = now
        self._reminders.move_to_end(key)
        if len(self._reminders) > MAX_REMINDERS:
            self._reminders.popitem(last=False)
        _log.warning(event, message=sentence)

    def _knock_again(self, dialled: _Dialled, why: Dial) -> None:
        """Let a closed door be, and try it with a new socket later: a refused one never tries again."""
        # A node that ends in the middle of a handshake looks like one with another key, once.
        dialled.shut += 1
        dialled.retry_s = min(KNOCK_AGAIN_S, 0.1 * 2**dialled.shut)
        if why is not Dial.OTHER_KEY or dialled.shut > 1:
            sentence = self._door.dial_failed(dialled.endpoint, why)
            self._say_seldom(f"{dialled.endpoint} {why}", sentence)
        if dialled.dialer is not None:
            dialled.dialer.close(0)

    def _take(self, data: bytes, link: int, source: str) -> bool:
        """Hand on what came; False when it is no message of a node."""
        try:
            message = decode_control(data)
        except WireError as error:
            self._emit(Undecodable(link, source, str(error)))
            return False
        self._emit(Heard(message, link, source))
        return True

    async def _keep(self, dialled: _Dialled) -> None:
        """Dial, listen, and dial again for as long as the link is wanted."""
        loop = asyncio.get_running_loop()
        dialled.idle_since = loop.time()
        try:
            while True:
                try:
                    dialled.dialer = ControlDialer(self._network, dialled.endpoint)
                except UnreachableError as error:
                    # Others tell addresses: one that is of no use must not end this node.
                    self._say_seldom(f"{dialled.endpoint}", f"{error}; it is forgotten", event="not_dialled")
                    return
                except NoSocketError as error:
                    self._say_seldom("", str(error), event="no_socket")
                    await asyncio.sleep(GREET_AGAIN_S)
                    continue
                with contextlib.suppress(SocketClosedError):
                    if not await self._listen(dialled, dialled.dialer):
                        return
                await asyncio.sleep(dialled.retry_s)
        finally:
            if dialled.dialer is not None:
                dialled.dialer.close()
            self._unroute(dialled.link)
            self._dialled.pop(dialled.link, None)

    async def _next(self, dialled: _Dialled, dialer: ControlDialer) -> bytes | Dial:
        """What comes next; the greeting is repeated until the peer has answered it."""
        while dialer.connected and dialled.owner is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GREET_AGAIN_S):
                    return await dialer.receive()
            dialer.send(encode(self._greeting()))
        return await dialer.receive()

    async def _listen(self, dialled: _Dialled, dialer: ControlDialer) -> bool:
        """Take what comes over one socket; False when the address is to be forgotten."""
        loop = asyncio.get_running_loop()
        while True:
            happened = await self._next(dialled, dialer)
            if isinstance(happened, bytes):
                dialled.answered = True
                if self._take(happened, dialled.link, str(dialled.endpoint)) or dialled.owner is not None:
                    continue
                dialled.unread += 1
                if dialled.unread < MAX_UNREAD:
                    continue
                # Something of the fleet, as a head's client port, that is no node and never will be.
                dialer.close(0)
                happened = Dial.MALFORMED
            owner = dialled.owner
            if happened.about_keys:
                self._knock_again(dialled, happened)
                return dialled.lasting or loop.time() - dialled.idle_since <= FORGET_AFTER_S
            if happened is Dial.CONNECTED:
                dialled.shut = 0
                dialled.idle_since = loop.time()
                dialled.owner = None
                dialer.send(encode(self._greeting()))
                continue
            if happened is Dial.MALFORMED:
                dialled.retry_s, dialled.unread = KNOCK_AGAIN_S, 0
                if owner is not None:
                    self._emit(ConnectionLost(*owner))
                return dialled.lasting
            if happened is Dial.HANDSHAKE_FAILED:
                _log.debug("not_a_node", message=f"what listens at {dialled.endpoint} is not a node of ours")
            if owner is not None and happened is Dial.DISCONNECTED:
                self._emit(ConnectionLost(*owner))
            elif owner is not None and happened is Dial.REFUSED and not self._reaches(owner[0]):
                await self._tell_refused(dialled.endpoint, *owner)
            if not dialer.connected and not dialled.lasting:
                if happened is Dial.DISCONNECTED:
                    dialled.idle_since = loop.time()
                if loop.time() - dialled.idle_since > FORGET_AFTER_S:
                    return False

    async def _tell_refused(self, endpoint: Endpoint, node: NodeId, instance: Instance) -> None:
        """Nobody listens any more where this instance did, nor a later one that has dialled this node."""
        routes = self._routes.get(node)
        if routes is None or routes.instance == instance:
            self._emit(ConnectionRefused(node, instance))
            return
        # The later one listens before it dials. So the port is asked once more: it may have refused before.
        refused = await knock(endpoint) is Dial.REFUSED
        if refused and self._routes.get(node) is routes and not self._reaches(node):
            self._emit(ConnectionRefused(node, routes.instance, endpoint))


def _who(owner: tuple[NodeId, Instance] | None, host: str) -> str:
    return (host or "an unknown address") if owner is None else f"node {owner[0]}"
