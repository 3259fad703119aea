"""How many connections a port has, and how much of what they sent nobody has taken yet.

ZeroMQ has no bound for a message of many parts: it delivers a message when its last part is there and holds
the others meanwhile, however many come. What has arrived is asked of the system (Linux only), what was taken
is counted where it is taken.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq

from cascadia_p2p.transport.looping import connection_of

if sys.platform == "linux":
    import fcntl
    import termios

PART_BYTES: Final = 80
"""That a part takes on the wire beside its content, at most, when it is encrypted."""

IDLE_BYTES_S: Final = 1024
"""Of ZeroMQ's own heartbeats, a second."""

LOOK_S: Final = 0.25
"""Between two looks at what waits, at least."""

LOOK_SHARE: Final = 20.0
"""Times what a look took, until the next."""

ROUNDS: Final = 2
"""Of turns, after which surely everybody has had one: who has a message whole is served in a circle."""

_TCP_INFO: Final = 11
_RECEIVED_AT: Final = 128
"""Of tcpi_bytes_received in Linux's struct tcp_info."""

# Combining or looking up names of ZeroMQ's takes longer than the question.
_SRCFD: Final = int(zmq.SRCFD)
_SIZE: Final = struct.Struct("=Q")
_COUNT: Final = struct.Struct("=i")


@dataclass(slots=True)
class _Flow:
    """One connection: what had come and was taken at the last look, and what waits."""

    came: int
    at: float
    taken: int = 0
    counted: int = 0
    waiting: float = 0.0
    over: bool = False
    judged: tuple[int, int] | None = None
    """Of the socket's turns, the one by which a message that is whole would have been taken, and how often
    the socket had been found empty, when more waited first than one message may have."""


class Meter:
    """Watches the connections of one socket.

    `took` may be called in another thread than the rest.

    Args:
        limit: bytes of one connection that may wait to be taken, from one look to the next: before a look
            the taker may have been held up, as by a process that stood still.
        whole: bytes of the largest message. If more waits and none of it is taken while everybody who has
            a message whole is served, that is a message without end.
        most: connections at a time; those that begin then are ended.
        came: bytes that ZeroMQ has read of the connection with a descriptor; None when that can not be told.
    """

    def __init__(
        self,
        limit: int,
        came: Callable[[int], int | None] | None = None,
        *,
        whole: int | None = None,
        most: int | None = None,
    ) -> None:
        self.limit = limit
        self.whole = whole
        self.most = most
        self.cut = 0
        """Connections that were ended for what they did not finish."""
        self.surplus = 0
        """Connections that were ended because there were too many."""
        self._came = came or bytes_came
        self._open: dict[int, None] = {}
        self._flows: dict[int, _Flow] = {}
        self._due = 0.0
        self._turns = 0
        self._emptied = 0

    def __len__(self) -> int:
        return len(self._flows)

    def opened(self, descriptor: int, now: float, *, untouched: bool = False) -> None:
        """A connection begins.

        Args:
            descriptor: of the connection.
            now: of the monotonic clock, in seconds.
            untouched: nothing was taken of it up to now, so that all that came waits.
        """
        self._open.pop(descriptor, None)
        self._open[descriptor] = None
        came = self._came(descriptor)
        if came is not None:
            self._flows[descriptor] = _Flow(0 if untouched else came, now)

    def closed(self, descriptor: int) -> None:
        """A connection has ended."""
        self._open.pop(descriptor, None)
        self._flows.pop(descriptor, None)

    def took(self, descriptor: int | None, size: int, parts: int = 1) -> None:
        """A message, or a part of one, was taken."""
        self._turns += 1
        flow = None if descriptor is None else self._flows.get(descriptor)
        if flow is not None:
            flow.taken += size + PART_BYTES * parts

    def emptied(self) -> None:
        """The socket was found with nothing to take: no message is whole and waits."""
        self._emptied += 1

    def overfull(self, now: float) -> list[int]:
        """The connections of which more waits than may."""
        found = []
        for descriptor, flow in list(self._flows.items()):
            came = self._came(descriptor)
            if came is None:
                continue
            taken = flow.taken
            spent = taken - flow.counted + IDLE_BYTES_S * (now - flow.at)
            flow.waiting = max(0.0, flow.waiting + came - flow.came - spent)
            idle = taken == flow.counted
            flow.came, flow.counted, flow.at = came, taken, now
            before, flow.over = flow.over, flow.waiting > self.limit
            if (before and flow.over) or self._endless(flow, idle):
                found.append(descriptor)
        return found

    def _endless(self, flow: _Flow, idle: bool) -> bool:
        """Whether what waits can only be one message: all others were taken, and nothing of this."""
        if self.whole is None or flow.waiting <= self.whole:
            flow.judged = None
        elif flow.judged is None or not idle:
            flow.judged = (self._turns + ROUNDS * len(self._open), self._emptied)
        else:
            turn, emptied = flow.judged
            return self._turns > turn or self._emptied > emptied
        return False

    def enforce(self, end: Callable[[int], bool]) -> None:
        """End the connections of which more waits than may, and those that are too many; to be called often.

        Args:
            end: ends the connection with a descriptor, and tells whether it did.
        """
        now = time.monotonic()
        if now < self._due:
            return
        for descriptor in self.overfull(now):
            self.cut += end(descriptor)
        if self.most is not None:
            for descriptor in list(self._open)[self.most :]:
                self.surplus += end(descriptor)
        # Thousands of connections take a while to look at.
        self._due = now + max(LOOK_S, LOOK_SHARE * (time.monotonic() - now))


def source_of(part: zmq.Frame) -> int | None:
    """The descriptor that a part came over; None for what came from this process.

    The oldest protocol has none either, and noise can look like it.
    """
    try:
        return int(part.get(_SRCFD))
    except zmq.ZMQError:
        return None


def bytes_came(descriptor: int) -> int | None:
    """Bytes that have been read of a TCP connection of this process.

    What the system still holds of it is bounded by the system, and may be megabytes when many send at once.
    """
    if sys.platform != "linux":
        return None
    with connection_of(descriptor) as made:
        try:
            if made is None:
                return None
            info = made.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            # In this order: what comes in between must not count as read.
            unread = _COUNT.unpack(fcntl.ioctl(made, termios.FIONREAD, bytes(_COUNT.size)))[0]
        except OSError:
            return None
    if len(info) < _RECEIVED_AT + _SIZE.size:
        return None
    return max(0, int(_SIZE.unpack_from(info, _RECEIVED_AT)[0]) - int(unread))


def hang_up(
    descriptor: int,
    ours: Callable[[tuple[str, int]], bool],
    end: Callable[[socket.socket], Any] = socket.socket.getsockname,
) -> bool:
    """End a connection that ZeroMQ itself offers no way to end: it then finds its peer gone.

    Args:
        descriptor: of the connection, or of something else by now.
        ours: tells by an address whether it is still that connection.
        end: which end's address that is: this one's, or the other's.
    """
    with connection_of(descriptor) as made:
        try:
            where = None if made is None else end(made)
            # A pipe or a local socket that has the descriptor by now has no such address.
            if made is None or not isinstance(where, tuple) or not ours(where[:2]):
                return False
            made.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
