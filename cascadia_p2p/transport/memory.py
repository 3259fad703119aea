"""The in-memory twin of the data plane: the same interfaces, no socket, for tests and simulation."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import PortError
from cascadia_p2p.types import Endpoint

CAPACITY: Final = 1000
WAIT_S: Final = 0.25
_FIRST_PORT: Final = 49152

_Message = tuple[bytes, bytes | None]


class MemoryTransport:
    """A network of its own: receivers are found by address, senders to an absent one would block."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._receivers: dict[Endpoint, MemoryReceiver] = {}
        self._lock = threading.Lock()
        self._next_port = _FIRST_PORT

    def bind(self, host: str, port: int, *, max_part: int) -> MemoryReceiver:
        """A receiver at this address; port 0 takes any free one.

        Raises:
            PortError: the address is taken.
        """
        with self._lock:
            if not port:
                port, self._next_port = self._next_port, self._next_port + 1
            endpoint = Endpoint(host, port)
            if endpoint in self._receivers:
                raise PortError(f"port {port} on {host} is in use: choose another with --port")
            receiver = MemoryReceiver(self, endpoint, max_part)
            self._receivers[endpoint] = receiver
            return receiver

    def connect(self, endpoint: Endpoint) -> MemorySender:
        """A sender to whatever is bound at this address when it sends."""
        return MemorySender(self, endpoint)

    def find(self, endpoint: Endpoint) -> MemoryReceiver | None:
        """The receiver at this address."""
        with self._lock:
            return self._receivers.get(endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        """Free the address."""
        with self._lock:
            self._receivers.pop(endpoint, None)


class MemoryReceiver:
    """A bounded queue of messages; see `FrameReceiver`."""

    def __init__(self, transport: MemoryTransport, endpoint: Endpoint, max_part: int) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._max_part = max_part
        self._ready = threading.Condition()
        self._queue: deque[_Message] = deque()
        self._woken = False
        self._payload: bytes | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The address that predecessors connect to."""
        return self._endpoint

    @property
    def more(self) -> bool:
        """Whether the message has another part."""
        return self._payload is not None

    def recv_header(self, wait: bool) -> bytearray | None:
        """The next message's first part; see `FrameReceiver.recv_header`."""
        self._payload = None
        with self._ready:
            if wait and not self._queue and not self._woken:
                self._ready.wait(WAIT_S)
            if self._woken:
                self._woken = False
                return None
            if not self._queue:
                return None
            header, self._payload = self._queue.popleft()
            return bytearray(header)

    def recv_payload(self, out: npt.NDArray[np.float32]) -> bool:
        """Fill `out` with the second part; see `FrameReceiver.recv_payload`."""
        payload, self._payload = self._payload, None
        if payload is None or len(payload) != out.nbytes:
            return False
        out[...] = np.frombuffer(payload, np.float32).reshape(out.shape)
        return True

    def wake(self) -> None:
        """Make a waiting `recv_header` return; from any thread."""
        with self._ready:
            self._woken = True
            self._ready.notify()

    def close(self) -> None:
        """Free the address and drop what has not been received."""
        self._transport.forget(self._endpoint)
        with self._ready:
            self._queue.clear()

    def put(self, header: bytes, payload: bytes | None) -> bool:
        """Take a message from any thread; False when the queue is full. Too large a part is lost."""
        with self._ready:
            if len(self._queue) >= self._transport.capacity:
                return False
            if payload is None or len(payload) <= self._max_part:
                self._queue.append((header, payload))
                self._ready.notify()
            return True


class MemorySender:
    """Puts messages into one receiver's queue; see `FrameSender`."""

    def __init__(self, transport: MemoryTransport, endpoint: Endpoint) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._closed = threading.Event()

    def send(self, header: bytes | bytearray, payload: npt.NDArray[np.float32] | None) -> bool:
        """Hand over a copy of one message; False when nobody is bound there or its queue is full."""
        if payload is not None and not payload.flags.c_contiguous:
            raise ValueError("a payload must be C-contiguous")
        receiver = self._transport.find(self._endpoint)
        if receiver is None or self._closed.is_set():
            return False
        return receiver.put(bytes(header), None if payload is None else payload.tobytes())

    def wait(self, timeout_ms: int) -> None:
        """Let a little time pass, at most the timeout."""
        self._closed.wait(min(timeout_ms, 1) / 1000)

    def look(self) -> None:
        """There is no connection to follow."""

    def close(self) -> None:
        """Send nothing more."""
        self._closed.set()
