"""The connections that this process made itself: how much may come over them that nobody takes."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from typing import Final

from cascadia_p2p.transport.looping import connection_of
from cascadia_p2p.transport.meter import Meter, hang_up
from cascadia_p2p.types import Endpoint

WAITING_BYTES: Final = 1 << 20
"""That may wait of one connection: a message of nothing takes two bytes to send, and sixty-four to keep."""


class Dialled:
    """Watches all of them, of sockets in any thread.

    What a socket tells of may be long past, and its descriptor another socket's by now: hence the endpoints.
    """

    def __init__(self) -> None:
        self.meter = Meter(WAITING_BYTES)
        self._ends: dict[int, Endpoint] = {}

    def opened(self, descriptor: int, endpoint: Endpoint) -> None:
        """A connection to an endpoint begins, unless the descriptor is of something else by now."""
        with connection_of(descriptor) as made, contextlib.suppress(OSError):
            where = None if made is None else made.getpeername()
            if isinstance(where, tuple) and _leads_to(endpoint, where[:2]):
                self._ends[descriptor] = endpoint
                self.meter.opened(descriptor, time.monotonic(), untouched=True)

    def closed(self, descriptor: int | None, endpoint: Endpoint) -> None:
        """A connection to an endpoint has ended, or its socket is to be closed."""
        if descriptor is not None and self._ends.get(descriptor) == endpoint:
            self.meter.closed(descriptor)
            del self._ends[descriptor]

    def look(self) -> None:
        """End those over which more has come than is taken; to be called often, in one thread."""
        self.meter.enforce(self._end)

    def _end(self, descriptor: int) -> bool:
        endpoint = self._ends.get(descriptor)
        if endpoint is None:
            return False
        return hang_up(descriptor, lambda at: _leads_to(endpoint, at), socket.socket.getpeername)


def _leads_to(endpoint: Endpoint, at: tuple[str, int]) -> bool:
    """Whether a connection whose other end has this address is one to the endpoint."""
    if at[1] != endpoint.port or not endpoint.numeric:
        return bool(at[1] == endpoint.port)
    return _address(at[0]) == _address(endpoint.host)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host.partition("%")[0])
