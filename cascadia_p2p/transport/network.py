"""The process's one ZeroMQ context: it makes every socket, binds ports in words, and is closed by hand."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Final

import psutil
import zmq

from cascadia_p2p.errors import PortError, UnreachableError
from cascadia_p2p.transport.curve import Authenticator, Domain, Keys, close_door, present
from cascadia_p2p.transport.dialled import Dialled
from cascadia_p2p.transport.greeting import Greetings
from cascadia_p2p.transport.looping import make_socket
from cascadia_p2p.types import Endpoint

HANDSHAKE_MS: Final = 3000
CONNECT_TIMEOUT_MS: Final = 500
RECONNECT_MS: Final = 20
"""Until a lost connection is dialled again, at first: a port that refuses tells that a process has ended."""

RECONNECT_MAX_MS: Final = 1000
PING_MS: Final = 10_000
SILENCE_MS: Final = 60_000
"""Until a connection to a bound socket ends over which not even an answer to a ping comes; longer than the
largest message takes over a slow link."""

HIGH_WATER: Final = 1000
MAX_SOCKETS: Final = 4096
MAX_DESCRIPTORS: Final = 65_536
NODE_CONNECTIONS: Final = 2048
"""Of other nodes, to one port, at most."""

SEALED: Final = 64
"""Bytes that CURVE adds to a part, at most."""

NOTHING: Final = 1 << 13
"""Bytes of a part for a socket that receives no messages: the handshake of ZeroMQ itself needs some."""


def end_silent(made: zmq.Socket[bytes]) -> None:
    """Let a socket end connections over which nothing comes any more; before it binds.

    Where a part can not be decrypted ZeroMQ stops to read the connection, and if the socket is watched by a
    monitor it takes that for a pause: it would hold the descriptor for ever, even when the peer has gone.
    """
    made.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def _draw_names() -> None:
    """Let the names that ROUTER sockets give to peers begin where nobody can guess.

    They count up from a number of C's `rand`, which always begins with the same one. A peer may call itself
    by such a name, and ZeroMQ ends the process when it would give it to the next one.
    """
    # Where there is no such library, as on Windows, the names stay as they are.
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), sys.byteorder))


class Network:
    """A ZeroMQ context and the sockets made from it; close it in the thread that made it.

    A context that the garbage collector finds still open hangs the process, hence the explicit `close`.

    Args:
        keys: what its sockets prove themselves with; without any, all of them speak in the clear.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        _draw_names()
        self.context = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.keys = keys
        self.greetings = Greetings()
        """Asked by its sockets that are in an event loop."""
        self.dialled = Dialled()
        """Of nodes' connections to one another, those that this process made."""
        self._authenticator: Authenticator | None = None
        # Held here so that none is left to the garbage collector before `close`.
        self._sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int, *, linger_ms: int, max_part: int) -> zmq.Socket[bytes]:
        """A socket with the options that all of ours share; what has come may wait without limit.

        Args:
            kind: a ZeroMQ socket type.
            linger_ms: how long closing may wait for what is unsent.
            max_part: bytes of a received part, at most; a peer that sends more is disconnected.

        Raises:
            NoSocketError: no descriptor is left for it.
        """
        made = make_socket(self.context, kind)
        made.setsockopt(zmq.LINGER, linger_ms)
        made.setsockopt(zmq.SNDHWM, HIGH_WATER)
        # With a limit ZeroMQ stops reading there, and ends the process if the connection breaks then.
        # A `Meter` bounds what may wait.
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.IMMEDIATE, 1)
        # ZeroMQ counts what encryption adds.
        made.setsockopt(zmq.MAXMSGSIZE, max_part if self.keys is None else max_part + SEALED)
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._sockets = [one for one in self._sockets if not one.closed]
        self._sockets.append(made)
        return made

    @property
    def guarded(self) -> bool:
        """Whether the authenticator still answers, where there is one."""
        return self._authenticator is None or self._authenticator.alive

    @property
    def turned_away(self) -> int:
        """Keys that the authenticator has refused."""
        return 0 if self._authenticator is None else self._authenticator.refused

    def guard(self, made: zmq.Socket[bytes], domain: Domain) -> None:
        """Close a socket to strangers at every address that it binds from now on, if there is a key.

        Raises:
            CascadiaError: nobody could authenticate peers.
        """
        if self.keys is None:
            return
        # It has to answer before the first address is bound.
        if self._authenticator is None:
            self._authenticator = Authenticator(self.context, self.keys.admit)
        close_door(made, self.keys, domain)

    def present(self, made: zmq.Socket[bytes]) -> None:
        """Let a socket prove itself to what it connects to from now on, if there is a key."""
        if self.keys is not None:
            present(made, self.keys)

    def close(self) -> None:
        """Close whatever is still open, then the context; a second call does nothing."""
        with uninterrupted():
            if self._authenticator is not None:
                self._authenticator.stop()
            if not self.context.closed:
                self.context.destroy(linger=0)
                self._sockets.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block is over, in the main thread, which alone is interrupted.

    A socket that is lost between its making and its first reference keeps the context from closing for ever.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


def bind(made: zmq.Socket[bytes], host: str, port: int, flag: str, address_flag: str = "--bind") -> Endpoint:
    """Bind a socket; port 0 takes any free one.

    Args:
        made: the socket.
        host: an address of this machine, or a name of one.
        port: 0 to 65535.
        flag: the flag that moves the port, for the error.
        address_flag: the flag that moves the address, for the error.

    Raises:
        PortError: the port is taken or forbidden, or the address is not of this machine.
    """
    address = _resolve(host, address_flag)
    if ":" in address:
        made.setsockopt(zmq.IPV6, 1)
    target = f"tcp://[{address}]:{port or '*'}" if ":" in address else f"tcp://{address}:{port or '*'}"
    try:
        made.bind(target)
    except zmq.ZMQError as error:
        words = error.strerror or str(error)
        raise PortError(_reason(error.errno or 0, words, address, port, flag, address_flag)) from None
    return Endpoint.parse(made.getsockopt_string(zmq.LAST_ENDPOINT))


def require_free(host: str, port: int, flag: str) -> None:
    """See that an address can be bound now, and let go of it before returning, as ZeroMQ would not.

    Raises:
        PortError: as `bind`.
    """
    listen(host, port, flag).close()


def listen(host: str, port: int, flag: str, address_flag: str = "--bind") -> socket.socket:
    """A plain TCP socket that listens, for what does not speak ZeroMQ; port 0 takes any free one.

    Args:
        host: see `bind`.
        port: see `bind`.
        flag: see `bind`.
        address_flag: see `bind`.

    Raises:
        PortError: as `bind`.
    """
    address = _resolve(host, address_flag)
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen()
    except OSError as error:
        made.close()
        words = error.strerror or str(error)
        raise PortError(_reason(error.errno or 0, words, address, port, flag, address_flag)) from None
    return made


def connect(made: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    """Start connecting a socket; ZeroMQ goes on trying until the socket is closed.

    Raises:
        UnreachableError: ZeroMQ does not take the address.
    """
    if ":" in endpoint.host:
        made.setsockopt(zmq.IPV6, 1)
    try:
        made.connect(endpoint.tcp)
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or 0)
        raise UnreachableError(f"'{endpoint}' is not an address to connect to ({reason})") from None


def allow_many_descriptors() -> int:
    """Raise this process's limit of open descriptors as far as it may, and return what it is then.

    Where the system has no such limit, the most that is ever used. At the limit ZeroMQ's I/O thread spins
    without being able to take or to end a connection.
    """
    try:
        import resource
    except ImportError:
        return MAX_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_DESCRIPTORS:
        return MAX_DESCRIPTORS
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    while wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        # macOS names no limit and refuses what is beyond another one.
        wanted //= 2
    return soft


def most_connections() -> int:
    """Connections that one port for nodes takes; those that come then are ended."""
    return min(NODE_CONNECTIONS, allow_many_descriptors() // 16)


def _resolve(host: str, address_flag: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise PortError(
            f"'{host}' is not an address of this machine: choose another with {address_flag}"
        ) from None
    return str(found[0][4][0])


def _reason(number: int, words: str, address: str, port: int, flag: str, address_flag: str) -> str:
    """The sentence for a failed bind, of the error's number and words."""
    place = f"port {port} on {address}"
    if number in (zmq.EADDRINUSE, errno.EADDRINUSE):
        return f"{place} is in use{_owner(port)}: choose another with {flag}, or 0 for any free one"
    if number in (zmq.EADDRNOTAVAIL, errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is not an address of this machine: choose another with {address_flag}"
    if number == errno.EACCES:
        return f"{place} needs more rights than this process has: choose 1024 or more with {flag}"
    return f"{place} can not be bound ({words}): choose another with {flag}"


def _owner(port: int) -> str:
    """Who listens on a local port, as far as this process may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr
            if connection.status == psutil.CONN_LISTEN and here and here.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""
