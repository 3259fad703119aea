"""A client's connection to the head: a DEALER that sends what a REQ would, and knows when the head is gone.

Each request travels behind a tag of its own, which the head returns with every reply: a late reply to an
earlier request can not be taken for the next one's. After any failure the next request gets a new socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Final

import zmq

from cascadia_p2p.transport.curve import Keys, Knock, failed_handshake
from cascadia_p2p.transport.greeting import why_hung_up
from cascadia_p2p.transport.head_errors import failure_in, late, located, lost, require_fits, unreachable
from cascadia_p2p.transport.looping import (
    Delivery,
    LoopSocket,
    Monitor,
    Signal,
    SocketClosedError,
    SocketEvent,
    parse_event,
    unwatch,
    watch,
)
from cascadia_p2p.transport.network import CONNECT_TIMEOUT_MS, Network, connect, uninterrupted
from cascadia_p2p.types import Endpoint

CONNECT_TIMEOUT_S: Final = 3.0
HEARTBEAT_MS: Final = 500
HEARTBEAT_TIMEOUT_MS: Final = 3000
MAX_REPLY_PART: Final = 1 << 23
TAG_BYTES: Final = 8
WAIT_S: Final = 0.2
"""Longest single wait: a Ctrl-C just before one is noticed only behind it."""

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _dealer(network: Network) -> zmq.Socket[bytes]:
    made = network.socket(zmq.DEALER, linger_ms=0, max_part=MAX_REPLY_PART)
    # With it, what the head said last before it hung up would be thrown away unread.
    made.setsockopt(zmq.IMMEDIATE, 0)
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    made.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    network.present(made)
    return made


def _reply_of(parts: list[bytes]) -> tuple[bytes, bytes] | None:
    """Tag and body of a reply, None for another shape."""
    if len(parts) != 3 or parts[1] or len(parts[0]) != TAG_BYTES:
        return None
    return parts[0], parts[2]


class _Line:
    """One DEALER and the events of its connection, without a loop.

    Messages are copied out of ZeroMQ: a Ctrl-C that arrives while one of its frames is freed would be lost.
    """

    def __init__(self, network: Network, address: Endpoint) -> None:
        self.address = address
        self.dealer = _dealer(network)
        self.monitor = watch(self.dealer, _EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self.dealer, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)
        connect(self.dealer, address)

    def wait(self, deadline: float | None) -> bool:
        """Wait a little for a message or an event; False when the time is over."""
        left = WAIT_S if deadline is None else min(WAIT_S, deadline - time.monotonic())
        if left <= 0:
            return False
        self._poller.poll(int(left * 1000) + 1)
        return True

    def event(self) -> SocketEvent | None:
        """The next event, or None."""
        try:
            return parse_event(self.monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def lost(self) -> bool:
        """Whether the connection has ended."""
        while (event := self.event()) is not None:
            if event.event == zmq.Event.DISCONNECTED:
                return True
        return False

    def message(self) -> list[bytes] | None:
        """The next message, or None."""
        try:
            return self.dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Hang up."""
        unwatch(self.dealer)
        self.monitor.close(linger=0)
        self.dealer.close(linger=0)


class ClientConnection:
    """The blocking connection; one request at a time, in one thread.

    Args:
        endpoint: the head's client address.
        connect_timeout_s: how long connecting may take, in seconds.
        keys: to prove oneself with; None speaks in the clear.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keys: Keys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.late = 0
        """Replies to earlier requests that came and were dropped."""
        self._connect_timeout_s = connect_timeout_s
        self._network = Network(keys)
        self._line: _Line | None = None

    def request(self, data: bytes, timeout_s: float | None = None) -> bytes:
        """The reply to one request.

        Args:
            data: the request's JSON.
            timeout_s: how long the reply may take, in seconds; None for as long as the head lives.

        Raises:
            UnreachableError: nobody answers, the head went away, or the time is over.
        """
        return self.receive(self.send(data), timeout_s)

    def open(self) -> None:
        """Connect, where that was not done.

        Raises:
            UnreachableError: nobody answers.
        """
        try:
            self._connected()
        except BaseException:
            self._drop()
            raise

    def send(self, data: bytes) -> bytes:
        """Send a request that gets several replies; the tag to `receive` them with, until the next `send`.

        Raises:
            UnreachableError: nobody answers, or the head went away.
            RequestError: it is larger than a head takes.
        """
        require_fits(data)
        try:
            line = self._connected()
            tag = os.urandom(TAG_BYTES)
            line.dealer.send_multipart([tag, b"", data], zmq.NOBLOCK)
        except zmq.Again:
            self._drop()
            raise lost(self.endpoint) from None
        except BaseException:
            self._drop()
            raise
        return tag

    def post(self, data: bytes) -> None:
        """Send a request that gets no reply, beside the one that is being answered; lost with the line."""
        if self._line is not None:
            with contextlib.suppress(zmq.Again):
                self._line.dealer.send_multipart([os.urandom(TAG_BYTES), b"", data], zmq.NOBLOCK)

    def receive(self, tag: bytes, timeout_s: float | None = None, limit_s: float | None = None) -> bytes:
        """The next reply to a request.

        Args:
            tag: of the request.
            timeout_s: how long it may take, in seconds; None for ever.
            limit_s: what that is the rest of; said when it is over.

        Raises:
            UnreachableError: the head went away, or the time is over.
        """
        try:
            if self._line is None:
                raise lost(self.endpoint)
            return self._await_reply(self._line, tag, timeout_s, limit_s)
        except BaseException:
            self._drop()
            raise

    def hang_up(self) -> None:
        """End the connection, so that the head cancels what it does for it; the next has a new one."""
        self._drop()

    def close(self) -> None:
        """Hang up; the head cancels what it still does for this connection."""
        self._drop()
        self._network.close()

    def __enter__(self) -> ClientConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connected(self) -> _Line:
        """The open line, or a new one."""
        if self._line is not None and self._line.lost():
            self._drop()
        if self._line is None:
            address = located(self.endpoint)
            with uninterrupted():
                self._line = _Line(self._network, address)
            keyed = self._network.keys is not None
            _await_handshake(self._line, self.endpoint, self._connect_timeout_s, keyed=keyed)
        return self._line

    def _await_reply(
        self, line: _Line, tag: bytes, timeout_s: float | None, limit_s: float | None = None
    ) -> bytes:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ended = line.lost()
            while (parts := line.message()) is not None:
                reply = _reply_of(parts)
                if reply is not None and reply[0] == tag:
                    return reply[1]
                self.late += 1
            if ended:
                raise lost(self.endpoint)
            if not line.wait(deadline):
                raise late(self.endpoint, limit_s or timeout_s or 0.0)

    def _drop(self) -> None:
        with uninterrupted():
            line, self._line = self._line, None
            if line is not None:
                line.close()


def _await_handshake(line: _Line, endpoint: Endpoint, timeout_s: float, *, keyed: bool) -> None:
    deadline = time.monotonic() + timeout_s
    reason = "nothing came back"
    waiting = True
    while waiting:
        # At the end once more: what came in time counts, though this process was held up.
        waiting = line.wait(deadline)
        while (event := line.event()) is not None:
            why = failed_handshake(event.event, event.value)
            if why is Knock.HUNG_UP:
                why = why_hung_up(line.address, keyed=keyed)
            failure = failure_in(event, why, endpoint, keyed=keyed)
            # The handshake's event runs ahead of the connection's readiness.
            if failure == "" and line.dealer.poll(CONNECT_TIMEOUT_MS, zmq.POLLOUT):
                return
            reason = failure or reason
    raise unreachable(endpoint, reason)


class AsyncClientConnection:
    """The connection in an event loop; any number of requests at a time.

    Args:
        endpoint: the head's client address.
        connect_timeout_s: how long connecting may take, in seconds.
        keys: to prove oneself with; None speaks in the clear.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keys: Keys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.late = 0
        """Replies that came when nobody waited for them any more."""
        self._connect_timeout_s = connect_timeout_s
        self._network = Network(keys)
        self._connecting = asyncio.Lock()
        self._line: _LoopLine | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a request waits for a reply."""
        return self._line is not None and self._line.busy

    async def request(
        self, data: bytes, timeout_s: float | None = None, *, cancel: bytes | None = None
    ) -> bytes:
        """The reply to one request; see `ClientConnection.request`. Cancelling it gives the reply up.

        Args:
            data: see there.
            timeout_s: see there.
            cancel: see `Exchange.end`; sent if the reply is given up.
        """
        exchange = await self.exchange(data)
        try:
            reply = await exchange.receive(timeout_s)
            cancel = None
        finally:
            exchange.end(cancel)
        return reply

    async def open(self) -> None:
        """Connect, where that was not done.

        Raises:
            UnreachableError: nobody answers.
        """
        async with self._connecting:
            await self._connected()

    async def exchange(self, data: bytes) -> Exchange:
        """Send a request that gets several replies; to be ended with `Exchange.end`.

        Raises:
            UnreachableError: nobody answers, or the head went away.
            RequestError: it is larger than a head takes.
        """
        require_fits(data)
        async with self._connecting:
            line = await self._connected()
        self.late += line.late
        line.late = 0
        return Exchange(line, data)

    async def close(self) -> None:
        """Hang up; the head cancels what it still does for this connection, and calls that wait fail."""
        self._closed = True
        if self._line is not None:
            self._line.close()
            self._line = None
        self._network.close()

    async def __aenter__(self) -> AsyncClientConnection:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _connected(self) -> _LoopLine:
        """The open line, or a new one."""
        if self._closed:
            # One of those that share the connection found that the head is lost, and hung up.
            raise lost(self.endpoint, hung_up=True)
        if self._line is not None and self._line.over:
            self._line.close()
            self._line = None
        if self._line is None:
            numeric = self.endpoint.numeric
            address = self.endpoint if numeric else await asyncio.to_thread(located, self.endpoint)
            if self._closed:
                raise lost(self.endpoint, hung_up=True)
            # Known before it is open, so that `close` ends the wait for it.
            line = self._line = _LoopLine(self._network, self.endpoint, address)
            try:
                await line.open(self._connect_timeout_s)
            except BaseException as error:
                line.close()
                self._line = None
                if isinstance(error, SocketClosedError):
                    raise lost(self.endpoint, hung_up=True) from None
                raise
            return line
        return self._line


class Exchange:
    """One request on a shared connection, and the replies to it.

    Args:
        line: the connection.
        data: the request's JSON.

    Raises:
        UnreachableError: the head went away.
    """

    def __init__(self, line: _LoopLine, data: bytes) -> None:
        self._line = line
        self._tag = os.urandom(TAG_BYTES)
        self._answered = False
        self._replies = line.send(self._tag, data)

    async def receive(self, timeout_s: float | None = None, limit_s: float | None = None) -> bytes:
        """The next reply.

        Args:
            timeout_s: how long it may take, in seconds; None for ever.
            limit_s: what that is the rest of; said when it is over.

        Raises:
            UnreachableError: the head went away, or the time is over.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._replies.get()
        except TimeoutError:
            raise late(self._line.endpoint, limit_s or timeout_s or 0.0) from None
        if reply is None:
            # Every further call finds the same.
            self._replies.put_nowait(None)
            raise lost(self._line.endpoint, hung_up=not self._line.ended)
        self._answered = True
        return reply

    def post(self, data: bytes) -> None:
        """Send a request whose reply, if it gets one, nobody waits for."""
        self._line.post(data)

    def end(self, cancel: bytes | None = None) -> None:
        """Wait for no more replies; those that still come are dropped.

        Args:
            cancel: a request to send that ends this one at the head.
        """
        self._line.forget(self._tag, given_up=cancel is None and not self._answered)
        if cancel is not None:
            self._line.post(cancel)


class _LoopLine:
    """One DEALER in the loop, and a task that hands each reply to whoever waits for it."""

    def __init__(self, network: Network, endpoint: Endpoint, address: Endpoint) -> None:
        self.late = 0
        self.ended = False
        """The other side has ended the connection."""
        self.over = False
        """The connection ended, or its only request was given up: the next request takes a new line."""
        self.endpoint = endpoint
        self._address = address
        self._reason, self._shaken = "nothing came back", False
        self._keyed = network.keys is not None
        self._greetings = network.greetings
        self._waiting: dict[bytes, asyncio.Queue[bytes | None]] = {}
        dealer = _dealer(network)
        self._signal = Signal()
        self._monitor = Monitor(dealer, _EVENTS, self._signal)
        self._socket = LoopSocket(dealer, self._signal)
        connect(dealer, address)
        self._reader: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request waits for a reply."""
        return bool(self._waiting)

    async def open(self, timeout_s: float) -> None:
        """Wait until the head is there, then start reading."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._is_open():
                    await self._signal.wait()
        # Looked at once more: what came in time counts, though the loop was held up.
        if not await self._is_open():
            raise unreachable(self.endpoint, self._reason)
        self._reader = asyncio.create_task(self._read())

    async def _is_open(self) -> bool:
        """Follow what happened to the connection; whether it can be written to."""
        self._signal.clear()
        while (event := self._monitor.take()) is not None:
            why = failed_handshake(event.event, event.value)
            if why is Knock.HUNG_UP:
                why = await self._greetings.why_hung_up(self._address, keyed=self._keyed)
                self._signal.require_open()
            failure = failure_in(event, why, self.endpoint, keyed=self._keyed)
            self._shaken = self._shaken or failure == ""
            self._reason = failure or self._reason
        # The handshake's event runs ahead of the connection's readiness.
        return self._shaken and self._socket.writable()

    def send(self, tag: bytes, data: bytes) -> asyncio.Queue[bytes | None]:
        """Send a request: the queue of its replies, None for the end of the connection."""
        if self._socket.give([tag, b"", data]) is not Delivery.SENT:
            self.over = True
            raise lost(self.endpoint)
        replies = self._waiting[tag] = asyncio.Queue()
        return replies

    def post(self, data: bytes) -> None:
        """Send a request whose reply nobody waits for."""
        if self._socket.give([os.urandom(TAG_BYTES), b"", data]) is not Delivery.SENT:
            self.over = True

    def forget(self, tag: bytes, *, given_up: bool) -> None:
        """Drop further replies to a request; `given_up` when there was none."""
        self._waiting.pop(tag, None)
        if given_up and not self._waiting:
            self.over = True

    def close(self) -> None:
        """Hang up; requests that still wait fail, the reading task ends. Nothing here can be cancelled."""
        self.over = True
        self._signal.close()
        self._fail()
        self._monitor.close()
        self._socket.close(0)

    async def _read(self) -> None:
        """Hand out replies until the connection ends or is closed."""
        with contextlib.suppress(SocketClosedError):
            while True:
                self._signal.clear()
                while (event := self._monitor.take()) is not None:
                    self.ended = self.ended or event.event == zmq.Event.DISCONNECTED
                while (parts := self._socket.take()) is not None:
                    self._deliver(parts)
                    await self._signal.turn()
                if self.ended:
                    self.over = True
                    self._fail()
                    return
                await self._signal.wait()

    def _deliver(self, parts: list[zmq.Frame]) -> None:
        reply = _reply_of([part.bytes for part in parts])
        replies = self._waiting.get(reply[0]) if reply else None
        if reply is None or replies is None:
            self.late += 1
        else:
            replies.put_nowait(reply[1])

    def _fail(self) -> None:
        for replies in self._waiting.values():
            replies.put_nowait(None)
