"""The data plane's sockets: a bound PULL that a wake can interrupt, and a PUSH to one successor."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq

from cascadia_p2p.transport.curve import Domain
from cascadia_p2p.transport.looping import parse_event, unwatch, watch
from cascadia_p2p.transport.meter import LOOK_S, Meter, hang_up, source_of
from cascadia_p2p.transport.network import NOTHING, Network, bind, connect, end_silent, most_connections
from cascadia_p2p.transport.ports import PortWatch
from cascadia_p2p.types import Endpoint

COPY_THRESHOLD: Final = 262_144
"""Bytes below which ZeroMQ copies a payload; above, it sends from the array's own memory."""

WAIT_MS: Final = 250
SEND_MS: Final = 300
HEARTBEAT_MS: Final = 100
HEARTBEAT_TIMEOUT_MS: Final = 3000
MAX_HEADER: Final = 1 << 20
SKIPPED_PARTS: Final = 1000
"""Of a message with more parts than it may have, those that are dropped at a time."""

WAITING_PARTS: Final = 128
"""Of the largest size that one connection may send ahead: twice the frames that a head has in flight."""

# Plain numbers: combining ZeroMQ's flags takes longer than handing over a small message.
_NOW: Final = int(zmq.NOBLOCK)
_NOW_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)

_serial = itertools.count(1)


class DataReceiver:
    """A PULL socket, bound over TCP, and in the same socket the process's own wakes.

    The wake travels through an in-process pipe into the PULL itself, so that one blocking receive watches
    both: no poller stands between a frame and its computation.
    """

    def __init__(
        self, network: Network, host: str, port: int, *, max_part: int, flag: str = "--port"
    ) -> None:
        most = max(max_part, MAX_HEADER)
        self._pull = network.socket(zmq.PULL, linger_ms=0, max_part=most)
        self.meter = Meter(WAITING_PARTS * most, most=most_connections())
        """Of its connections."""
        self._source: int | None = None
        self._wake = network.socket(zmq.PUSH, linger_ms=0, max_part=NOTHING)
        self._lock = threading.Lock()
        self._woken = False
        self._closed = False
        self._unread = False
        try:
            self._pull.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            end_silent(self._pull)
            network.guard(self._pull, Domain.NODES)
            self._endpoint = bind(self._pull, host, port, flag)
            name = f"inproc://wake-{next(_serial)}"
            self._pull.bind(name)
            self._wake.connect(name)
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> Endpoint:
        """The address that predecessors connect to."""
        return self._endpoint

    @property
    def more(self) -> bool:
        """Whether the message has another part."""
        return bool(self._pull.getsockopt(_RCVMORE))

    def recv_header(self, wait: bool) -> bytearray | None:
        """The next message's first part in memory of its own; see `FrameReceiver.recv_header`."""
        # Looked for only now, when the message before has gone on its way already.
        if self._unread and not self._skip():
            return None
        try:
            part = self._pull.recv(0 if wait else _NOW, copy=False)
        except zmq.Again:
            return None
        self._unread = True
        if not len(part):
            with self._lock:
                self._woken = False
            return None
        self._source = source_of(part)
        self.meter.took(self._source, len(part))
        return bytearray(part.buffer)

    def recv_payload(self, out: npt.NDArray[np.float32]) -> bool:
        """Fill `out` with the second part, without a copy of ours; see `FrameReceiver.recv_payload`."""
        # A part larger than the buffer is cut without an error: its true size is what is returned.
        try:
            size = self._pull.recv_into(out.data, flags=_NOW)
        except zmq.Again:
            return False
        self.meter.took(self._source, size)
        return size == out.nbytes

    def watch(self) -> PortWatch:
        """Follow, in the running loop, who connects; to be closed after this receiver."""
        return PortWatch(self._pull, self._endpoint.port, self.meter)

    def wake(self) -> None:
        """Make a waiting `recv_header` return; from any thread, before and after `close` too."""
        with self._lock:
            if self._woken or self._closed:
                return
            self._woken = True
            # A full pipe means that the receiver has plenty to wake it.
            with contextlib.suppress(zmq.Again):
                self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Unbind and drop what has not been received."""
        with self._lock:
            self._closed = True
            self._wake.close(linger=0)
        self._pull.close(linger=0)

    def _skip(self) -> bool:
        """Drop some of what is left of a message; whether that was all."""
        more = self.more
        for _ in range(SKIPPED_PARTS):
            if not more:
                self._unread = False
                return True
            part = self._pull.recv(_NOW, copy=False)
            self.meter.took(self._source, len(part))
            more = part.more
        if self._source is not None:
            # No node sends so many parts.
            hang_up(self._source, lambda at: at[1] == self._endpoint.port)
            self._source = None
        return False


class DataSender:
    """A PUSH socket, connected once to one receiver; each epoch takes a new one.

    What a receiver sends back is never read: `Network.dialled` ends a connection over which too much comes.
    """

    def __init__(self, network: Network, endpoint: Endpoint) -> None:
        self._dialled = network.dialled
        self._endpoint = endpoint
        self._descriptor: int | None = None
        self._due = 0.0
        self._push = network.socket(zmq.PUSH, linger_ms=0, max_part=NOTHING)
        self._push.copy_threshold = COPY_THRESHOLD
        self._push.setsockopt(zmq.SNDTIMEO, SEND_MS)
        # Keeps TCP out of slow start after a pause. A full queue would make it reset the link: the head's
        # credits keep queues short.
        self._push.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._push.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._push.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        with contextlib.ExitStack() as undone:
            undone.callback(self._push.close, linger=0)
            network.present(self._push)
            self._events = watch(self._push, zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            undone.callback(self._events.close, linger=0)
            undone.callback(unwatch, self._push)
            connect(self._push, endpoint)
            undone.pop_all()

    def send(self, header: bytes | bytearray, payload: npt.NDArray[np.float32] | None) -> bool:
        """Hand over one message; False when that would block.

        The payload may still be read after this returns, and is kept alive until then: never write to it.

        Raises:
            ValueError: the payload is not C-contiguous (it would be sent in memory order).
        """
        if payload is not None and not payload.flags.c_contiguous:
            raise ValueError("a payload must be C-contiguous")
        try:
            self._push.send(header, _NOW if payload is None else _NOW_MORE)
        except zmq.Again:
            return False
        if payload is not None:
            try:
                self._push.send(payload.data, _NOW, copy=payload.nbytes < COPY_THRESHOLD)
            except zmq.Again:
                # The connection ended in between, and with it what it had of this message.
                return False
        return True

    def wait(self, timeout_ms: int) -> None:
        """Return when a `send` may work again, or after the timeout."""
        self._push.poll(timeout_ms, zmq.POLLOUT)
        self.look()

    def look(self) -> None:
        """Follow the connection; to be called often, which costs little."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_S
        while self._events.poll(0):
            event = parse_event(self._events.recv_multipart())
            if event.event is zmq.Event.CONNECTED:
                self._descriptor = event.value
                self._dialled.opened(event.value, self._endpoint)
            else:
                self._forget()
        # Only a socket that is used lets go of what came over a connection that has ended.
        self._push.getsockopt(_EVENTS)

    def close(self) -> None:
        """Disconnect and drop what has not been sent."""
        self._forget()
        unwatch(self._push)
        self._events.close(linger=0)
        self._push.close(linger=0)

    def _forget(self) -> None:
        self._dialled.closed(self._descriptor, self._endpoint)
        self._descriptor = None


class DataTransport:
    """Frames over ZeroMQ."""

    def __init__(self, network: Network, *, flag: str = "--port") -> None:
        self._network = network
        self._flag = flag

    def bind(self, host: str, port: int, *, max_part: int) -> DataReceiver:
        """A receiver at this address (port 0: any free one) that takes parts of at most `max_part` bytes."""
        return DataReceiver(self._network, host, port, max_part=max_part, flag=self._flag)

    def connect(self, endpoint: Endpoint) -> DataSender:
        """A new sender to one receiver."""
        return DataSender(self._network, endpoint)
