"""ZeroMQ sockets in an event loop: readiness by the socket's descriptor, transfers that never wait.

A task that is cancelled between a finished receive and its resumption would lose the message. Here nothing is
received before the task that takes it runs, so there is nothing to lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from cascadia_p2p.errors import CascadiaError, UsageError

MAX_PARTS: Final = 16
TURN_S: Final = 0.005
"""A task that finds one message after the other lets the loop do all else so often."""
SKIPPED_PARTS: Final = 1000
"""Of a message that is too long, parts that are dropped at a time; each takes a few microseconds."""

# Plain numbers: an operation on an enumeration's flags costs more than the question that they are for.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)

_serial = itertools.count(1)


class SocketClosedError(CascadiaError):
    """The socket was closed while a task waited for its next message."""


class NoSocketError(CascadiaError):
    """The system has no descriptors left for another socket."""


class Delivery(Enum):
    """What became of a message that was to be sent without waiting."""

    SENT = "sent"
    GONE = "gone"
    """There is no such peer any more."""
    FULL = "full"
    """The peer does not take what it was sent before, or is not connected."""


@dataclass(frozen=True, slots=True)
class SocketEvent:
    """Something that happened to one of a socket's connections: ZeroMQ's event code, and its value."""

    event: zmq.Event
    value: int


class Signal:
    """One task waits here for any of several sockets."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._closed = False
        self._since = time.monotonic()

    def set(self) -> None:
        """Let the task look at its sockets again."""
        self._event.set()

    def clear(self) -> None:
        """Before looking at the sockets.

        Raises:
            SocketClosedError: they are closed.
        """
        self.require_open()
        self._event.clear()

    async def wait(self) -> None:
        """Return after the next `set`, or the last one since `clear`."""
        if not self._event.is_set():
            await self._event.wait()
            self._since = time.monotonic()

    async def turn(self) -> None:
        """Let the loop do all else, if it did not for `TURN_S`; to be called before each message is taken.

        Messages that come as fast as they are taken would keep every timer and other task from running.

        Raises:
            SocketClosedError: the sockets were closed meanwhile.
        """
        if time.monotonic() - self._since >= TURN_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()
            self.require_open()

    def close(self) -> None:
        """Let the task go."""
        self._closed = True
        self._event.set()

    def require_open(self) -> None:
        """After a wait for something else.

        Raises:
            SocketClosedError: the sockets were closed meanwhile.
        """
        if self._closed:
            raise SocketClosedError("the socket is closed")


class LoopSocket:
    """One ZeroMQ socket in the running loop: it sets the signal when something may have come.

    Args:
        made: the socket.
        signal: to be set.
        endless: told the first part of a message of more parts than can be dropped at once.
    """

    def __init__(
        self,
        made: zmq.Socket[bytes],
        signal: Signal,
        endless: Callable[[zmq.Frame], object] = lambda _: None,
    ) -> None:
        self.zmq = made
        self._signal = signal
        self._endless = endless
        self._loop = asyncio.get_running_loop()
        self._descriptor = made.fileno()
        self._skipping: zmq.Frame | None = None
        self._told = False
        try:
            self._loop.add_reader(self._descriptor, signal.set)
        except NotImplementedError:
            raise UsageError(
                "this event loop can not watch sockets: on Windows use asyncio.SelectorEventLoop"
            ) from None

    @property
    def skipping(self) -> bool:
        """Whether what is left of a message is in the way of all others."""
        return self._skipping is not None

    @property
    def empty(self) -> bool:
        """Whether no message is whole and waits, nor the rest of one."""
        if self.zmq.closed:
            return True
        ready = self._ready() & _POLLIN
        if ready:
            # To ask may swallow the news of a message, as sending may.
            self._signal.set()
        return not ready

    def take_one(self) -> zmq.Frame | None:
        """The first part of the next message, or None.

        A DEALER whose connection ends inside a message must not be read again: ZeroMQ would end the process.
        Where the part has `more`, close the socket.
        """
        if not self._ready() & _POLLIN:
            return None
        try:
            return self.zmq.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def take(self, max_parts: int = MAX_PARTS) -> list[zmq.Frame] | None:
        """The parts of the next message; None when there is none, or the rest of the last one is in its way.

        Parts beyond `max_parts` are dropped but for one, so that the receiver can tell. They are dropped by
        the next calls, some at each, and the signal is set in the loop's next turn until none is left.
        """
        # To ask costs a tenth of the exception by which an empty socket answers a receive.
        if not self._ready() & _POLLIN:
            self._skipping = None
            return None
        try:
            if self._skipping is not None and not self._skip(self._skipping):
                return None
            part = self.zmq.recv(zmq.NOBLOCK, copy=False)
            parts = [part]
            while part.more:
                if len(parts) > max_parts:
                    self._skipping, self._told = parts[0], False
                    break
                part = self.zmq.recv(zmq.NOBLOCK, copy=False)
                parts.append(part)
        except zmq.Again:
            # With its connection goes a message that nobody has read: between the question and this, too.
            self._skipping = None
            return None
        return parts

    def _skip(self, first: zmq.Frame) -> bool:
        """Drop some of what is left of a message; whether that was all."""
        for _ in range(SKIPPED_PARTS):
            if not self.zmq.recv(zmq.NOBLOCK, copy=False).more:
                self._skipping = None
                return True
        if not self._told:
            self._told = True
            self._endless(first)
        # Not at once: whoever waits for a signal that is set goes on without a turn for others.
        self._loop.call_soon(self._signal.set)
        return False

    def writable(self) -> bool:
        """Whether a send would work now, to some peer."""
        return bool(self._ready() & _POLLOUT)

    def give(self, parts: list[bytes], *, again: bool = True) -> Delivery:
        """Send a message at once, or say why not."""
        if self.zmq.closed:
            return Delivery.GONE
        try:
            self.zmq.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            # Without waiting, a send may not know yet of room made within the last millisecond.
            if not again or not self.writable():
                return Delivery.FULL
            return self.give(parts, again=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        finally:
            # The descriptor tells of a change only once, and sending may swallow the news of a message.
            if self._ready() & _POLLIN:
                self._signal.set()
        return Delivery.SENT

    def _ready(self) -> int:
        ready: int = self.zmq.getsockopt(_EVENTS)  # type: ignore[assignment]
        return ready

    def close(self, linger_ms: int) -> None:
        """Close, after the descriptor has left the loop; a second call does nothing."""
        if self.zmq.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self.zmq.close(linger=linger_ms)


class Monitor:
    """The events of one socket's connections, in the running loop."""

    def __init__(self, watched: zmq.Socket[bytes], events: int, signal: Signal) -> None:
        self._watched = watched
        self._pair = LoopSocket(watch(watched, events), signal)

    def take(self) -> SocketEvent | None:
        """The next event, or None."""
        parts = self._pair.take()
        return None if parts is None else parse_event([part.bytes for part in parts])

    def close(self) -> None:
        """Stop watching; to be called before the watched socket is closed."""
        unwatch(self._watched)
        self._pair.close(0)


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A new socket of a type of ZeroMQ's.

    Raises:
        NoSocketError: that can not be.
    """
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise _no_socket(error) from None


def _no_socket(error: zmq.ZMQError) -> NoSocketError:
    return NoSocketError(
        f"no socket can be made ({error.strerror}): end connections, or let this process open more files "
        "('ulimit -n' shows how many)"
    )


def watch(watched: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that receives the events of another's connections.

    ZeroMQ's own thread delivers them and waits when they are not taken, hence no bound on their number.

    Raises:
        NoSocketError: no descriptor is left for it.
    """
    name = f"inproc://events-{next(_serial)}"
    pair = make_socket(watched.context, zmq.PAIR)
    try:
        watched.monitor(name, events)
    except zmq.ZMQError as error:
        pair.close()
        raise _no_socket(error) from None
    pair.setsockopt(zmq.LINGER, 0)
    pair.setsockopt(zmq.RCVHWM, 0)
    pair.connect(name)
    return pair


def unwatch(watched: zmq.Socket[bytes]) -> None:
    """End the events of a socket; before their receiver is closed, for whom ZeroMQ's thread would wait."""
    if not watched.closed:
        watched.disable_monitor()


def parse_event(parts: list[bytes]) -> SocketEvent:
    """The event in a monitor's message."""
    message = parse_monitor_message(parts)
    return SocketEvent(zmq.Event(message["event"]), int(message["value"]))


@contextlib.contextmanager
def connection_of(descriptor: int) -> Iterator[socket.socket | None]:
    """A second handle of a connection that ZeroMQ holds, for the block; None when it is gone."""
    try:
        made = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        with contextlib.ExitStack() as borrowed:
            # Where none is left for a second handle the first must do: it is then that some are to be ended.
            yield _borrow(descriptor, borrowed) if error.errno in (errno.EMFILE, errno.ENFILE) else None
        return
    with made:
        yield made


def _borrow(descriptor: int, until: contextlib.ExitStack) -> socket.socket | None:
    """A handle by the descriptor itself, which it does not close."""
    try:
        made = socket.socket(fileno=descriptor)
    except OSError:
        return None
    until.callback(made.detach)
    return made


def peer_address(descriptor: int) -> str:
    """The host at the other end of a connection that ZeroMQ holds; empty when that can not be told."""
    with connection_of(descriptor) as made, contextlib.suppress(OSError):
        if made is not None:
            return str(made.getpeername()[0])
    return ""
