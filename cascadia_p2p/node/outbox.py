"""What clients have not taken yet: replies wait here in order, without ever waiting for a client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cascadia_p2p.transport.client_server import Route
from cascadia_p2p.transport.looping import Delivery
from cascadia_p2p.types import StreamId

RETRY_S: Final = 0.05
MAX_WAITING: Final = 4096
"""Replies that wait for one client, pieces of answers aside; one more ends its connection."""

MAX_WAITING_BYTES: Final = 1 << 24
"""Bytes of all that waits for one client; with more, only pieces of answers are still taken: any other
reply ends its connection."""


class ReplySocket(Protocol):
    """Sends to clients; see `transport.client_server.ClientServer`."""

    def reply(self, route: Route, data: bytes) -> Delivery:
        """Send without waiting, or say why not."""
        ...

    def hang_up(self, connection: int) -> None:
        """End a connection."""
        ...


@dataclass(slots=True)
class _Queue:
    """What waits for one client."""

    messages: deque[tuple[StreamId | None, Route, bytes]] = field(default_factory=deque)
    pieces: Counter[StreamId] = field(default_factory=Counter)
    size: int = 0

    def full(self) -> bool:
        """Whether no further reply has room."""
        return len(self.messages) - self.pieces.total() >= MAX_WAITING or self.size >= MAX_WAITING_BYTES


class Outbox:
    """Sends replies, keeping those that a client does not take yet.

    Args:
        server: where they leave.
        gone: told the way to a client that is not there any more.
    """

    def __init__(self, server: ReplySocket, gone: Callable[[Route], None]) -> None:
        self._server = server
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._queues: dict[tuple[int, bytes], _Queue] = {}
        self._timer: asyncio.TimerHandle | None = None

    def send(self, route: Route, data: bytes, piece_of: StreamId | None = None) -> None:
        """Send a reply, or a piece of a stream's answer, behind all that waits for the same client."""
        queue = self._queues.get(route.peer)
        if queue is None:
            match self._server.reply(route, data):
                case Delivery.SENT:
                    return
                case Delivery.GONE:
                    self._gone(route)
                    return
            queue = self._queues[route.peer] = _Queue()
        elif piece_of is None and queue.full():
            # A reply that is left out would be waited for without end.
            self._server.hang_up(route.connection)
            return
        queue.messages.append((piece_of, route, data))
        queue.size += len(data)
        if piece_of is not None:
            queue.pieces[piece_of] += 1
        self._arm()

    def blocked(self, route: Route) -> bool:
        """Whether the client does not take what it was sent before."""
        return route.peer in self._queues

    def waiting(self, route: Route, stream: StreamId) -> int:
        """Pieces of a stream's answer that its client has not taken."""
        queue = self._queues.get(route.peer)
        return 0 if queue is None else queue.pieces[stream]

    def discard(self, route: Route, stream: StreamId) -> None:
        """Forget the pieces of a stream's answer that wait."""
        queue = self._queues.get(route.peer)
        if queue is not None:
            queue.messages = deque(message for message in queue.messages if message[0] != stream)
            queue.size = sum(len(data) for _, _, data in queue.messages)
            del queue.pieces[stream]

    def forget(self, connection: int) -> None:
        """Drop all that waits for a connection that has ended."""
        for peer in [peer for peer in self._queues if peer[0] == connection]:
            del self._queues[peer]

    def close(self) -> None:
        """Try once more, and give up what waits."""
        self._retry()
        if self._timer is not None:
            self._timer.cancel()
        self._queues.clear()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._timer = None
        for peer, queue in list(self._queues.items()):
            while queue.messages:
                stream, route, data = queue.messages[0]
                delivery = self._server.reply(route, data)
                if delivery is Delivery.FULL:
                    break
                if delivery is Delivery.GONE:
                    queue.messages.clear()
                    self._gone(route)
                    break
                queue.messages.popleft()
                queue.size -= len(data)
                if stream is not None:
                    queue.pieces[stream] -= 1
            if not queue.messages:
                self._queues.pop(peer, None)
        if self._queues:
            self._arm()
