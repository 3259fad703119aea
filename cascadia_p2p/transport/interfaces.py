"""What the data thread needs of the network: the interfaces that ZeroMQ, memory and faults all fill."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from cascadia_p2p.types import Endpoint


class FrameReceiver(Protocol):
    """Where frames arrive. Except `wake`, only one thread uses it."""

    @property
    def endpoint(self) -> Endpoint:
        """The address that predecessors connect to."""
        ...

    def recv_header(self, wait: bool) -> bytearray | None:
        """The next message's first part, in memory of its own.

        None after a wake, after a quarter of a second, or at once without `wait`. What the message before
        this one had left unread is dropped.
        """
        ...

    def recv_payload(self, out: npt.NDArray[np.float32]) -> bool:
        """Fill `out` with the second part; False when it has another size, or when there is none.

        To be called only when there should be one: without it, a message behind this one may be lost.
        """
        ...

    @property
    def more(self) -> bool:
        """Whether the message has another part."""
        ...

    def wake(self) -> None:
        """Make a waiting `recv_header` return; from any thread, as often as one likes."""
        ...

    def close(self) -> None:
        """Unbind and drop what has not been received."""
        ...


class FrameSender(Protocol):
    """Where frames leave to one successor, in order. One thread uses it."""

    def send(self, header: bytes | bytearray, payload: npt.NDArray[np.float32] | None) -> bool:
        """Hand over one message; False when that would block. Never write to the payload afterwards."""
        ...

    def wait(self, timeout_ms: int) -> None:
        """Return when a `send` may work again, or after the timeout."""
        ...

    def look(self) -> None:
        """Follow the connection; to be called often, which costs little."""
        ...

    def close(self) -> None:
        """Disconnect and drop what has not been sent."""
        ...


class FrameTransport(Protocol):
    """Makes receivers and senders of one kind."""

    def bind(self, host: str, port: int, *, max_part: int) -> FrameReceiver:
        """A receiver at this address (port 0: any free one) that takes parts of at most `max_part` bytes."""
        ...

    def connect(self, endpoint: Endpoint) -> FrameSender:
        """A new sender to one receiver."""
        ...
