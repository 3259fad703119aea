"""The connections that this process made itself: how much may come over them that nobody takes."""

from __future__ import annotations

import socket
import time
from typing import Final

from cascadia_p2p.transport.meter import Meter, hang_up

WAITING_BYTES: Final = 1 << 20
"""That may wait of one connection: a message of nothing takes two bytes to send, and sixty-four to keep."""


class Dialled:
    """Watches all of them, of sockets in any thread."""

    def __init__(self) -> None:
        self.meter = Meter(WAITING_BYTES)
        self._ports: dict[int, int] = {}

    def opened(self, descriptor: int, port: int) -> None:
        """A connection to a port at the other end begins."""
        self._ports[descriptor] = port
        self.meter.opened(descriptor, time.monotonic())

    def closed(self, descriptor: int | None) -> None:
        """A connection has ended, or its socket is to be closed."""
        if descriptor is not None:
            self.meter.closed(descriptor)
            self._ports.pop(descriptor, None)

    def look(self) -> None:
        """End those over which more has come than is taken; to be called often, in one thread."""
        self.meter.enforce(self._end)

    def _end(self, descriptor: int) -> bool:
        port = self._ports.get(descriptor)
        return hang_up(descriptor, lambda at: at[1] == port, socket.socket.getpeername)
