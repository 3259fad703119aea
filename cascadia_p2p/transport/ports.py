"""Who came to a socket's port and did not get in, and who got in and sends more than is taken."""

from __future__ import annotations

import time
from typing import Final

import zmq

from cascadia_p2p.transport.curve import Knock, failed_handshake
from cascadia_p2p.transport.looping import Monitor, Signal
from cascadia_p2p.transport.meter import Meter, hang_up

EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def no_knocks() -> dict[Knock, int]:
    """A count for every reason of a failed handshake."""
    return dict.fromkeys(Knock, 0)


class PortWatch:
    """Follows a socket's connections in the running loop, for a socket that another thread reads.

    Args:
        watched: bound already; closed before this is.
        port: that it is bound to.
        meter: of its connections.
    """

    def __init__(self, watched: zmq.Socket[bytes], port: int, meter: Meter) -> None:
        self.failed = no_knocks()
        """Handshakes that came to nothing, by why."""
        self._port = port
        self._meter = meter
        self._monitor = Monitor(watched, EVENTS, Signal())

    def look(self) -> None:
        """Take what has happened; to be called often."""
        now = time.monotonic()
        while (event := self._monitor.take()) is not None:
            match event.event:
                case zmq.Event.ACCEPTED:
                    self._meter.opened(event.value, now)
                case zmq.Event.DISCONNECTED:
                    self._meter.closed(event.value)
                case _:
                    knock = failed_handshake(event.event, event.value)
                    if knock is not None:
                        self.failed[knock] += 1
        self._meter.enforce(lambda descriptor: hang_up(descriptor, lambda at: at[1] == self._port))

    def close(self) -> None:
        """Stop following."""
        self._monitor.close()
