"""Counts of mDNS packets, taken at zeroconf's own sockets, to tell a blocked network from an empty one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from zeroconf import Zeroconf
from zeroconf._protocol.outgoing import DNSOutgoing

__all__ = ["Allowance", "CountedZeroconf", "Traffic"]

_MULTICAST_ALL = {socket.AF_INET: (socket.IPPROTO_IP, 49), socket.AF_INET6: (socket.IPPROTO_IPV6, 29)}
"""Linux's IP_MULTICAST_ALL and IPV6_MULTICAST_ALL, which Python does not name."""
_MAX_HOSTS = 64

RATE: Final = 32_768
BURST: Final = 131_072
"""Bytes a second, and at once, that are taken from one other machine: more than a dozen nodes on it say."""

ALL_RATE: Final = 8 * RATE
ALL_BURST: Final = 8 * BURST
"""The same from all of them together: sources can be forged too."""

LEAST: Final = 300
"""Bytes that a packet counts at least: what it costs is not only its length."""

_MAX_SOURCES = 256


class Allowance:
    """How much is taken from whom: a flood must not keep this node from its own work.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = (float(ALL_BURST), clock())
        self._sources: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, source: str, size: int) -> bool:
        """Whether a packet of `size` bytes is taken."""
        now, cost = self._clock(), max(size, LEAST)
        left, at = self._sources.get(source, (float(BURST), now))
        own = min(BURST, left + RATE * (now - at)) - cost
        total = min(ALL_BURST, self._all[0] + ALL_RATE * (now - self._all[1])) - cost
        if own < 0 or total < 0:
            return False
        self._all = (total, now)
        self._sources[source] = (own, now)
        self._sources.move_to_end(source)
        if len(self._sources) > _MAX_SOURCES:
            self._sources.popitem(last=False)
        return True


@dataclass(slots=True)
class Traffic:
    """Packets at the mDNS sockets since they were opened.

    Args:
        sent: packets handed to the system.
        failed: packets that the system refused, and the last reason.
        echoed: own packets that came back, as multicast does.
        local: packets from other programs on this machine.
        others: packets from other machines.
        damaged: packets that zeroconf failed at.
        flooded: packets from other machines that were not read, since there were too many.
        dropped: names not looked up because too many came at once.
        hosts: addresses of other machines, at most 64.
    """

    sent: int = 0
    failed: int = 0
    failure: str = ""
    echoed: int = 0
    local: int = 0
    others: int = 0
    damaged: int = 0
    flooded: int = 0
    dropped: int = 0
    hosts: set[str] = field(default_factory=set)
    own: frozenset[str] = frozenset()
    _recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=128))

    def count_sent(self, packets: list[bytes]) -> None:
        """Note packets on their way out."""
        self.sent += len(packets)
        self._recent.extend(packets)

    def count_received(self, data: bytes, host: str) -> None:
        """Note a packet that came in."""
        if host not in self.own:
            self.others += 1
            if len(self.hosts) < _MAX_HOSTS:
                self.hosts.add(host)
        elif data in self._recent:
            self.echoed += 1
        else:
            self.local += 1

    def count_failure(self, error: Exception) -> None:
        """Note a packet that the system refused."""
        self.failed += 1
        self.failure = (error.strerror if isinstance(error, OSError) else None) or str(error)


class CountedZeroconf(Zeroconf):
    """zeroconf that counts its packets, and hears only the interfaces that it was given."""

    def __init__(self, interfaces: list[str | int], traffic: Traffic) -> None:
        self._traffic = traffic
        super().__init__(interfaces=list(interfaces), use_asyncio=True)

    def async_send(self, out: DNSOutgoing, *args: Any, **kwargs: Any) -> None:
        """Count and send."""
        if not self.done:
            self._traffic.count_sent(out.packets())
        super().async_send(out, *args, **kwargs)

    def observe(self) -> None:
        """Count at the sockets from now on; call once after the start."""
        for reader in self.engine.readers:
            transport = reader.transport
            transport.set_protocol(_Observer(cast(_Listener, transport.get_protocol()), self._traffic))
            _hear_given_interfaces_only(reader.sock)


class _Listener(Protocol):
    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class _Observer(asyncio.DatagramProtocol):
    """Stands between a socket and zeroconf."""

    def __init__(self, inner: _Listener, traffic: Traffic) -> None:
        self._inner = inner
        self._traffic = traffic
        self._allowance = Allowance(time.monotonic)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        host = str(addr[0]).partition("%")[0]
        self._traffic.count_received(data, host)
        if host not in self._traffic.own and not self._allowance.take(host, len(data)):
            self._traffic.flooded += 1
            return
        try:
            self._inner.datagram_received(data, addr)
        except Exception:
            self._traffic.damaged += 1

    def error_received(self, exc: Exception) -> None:
        self._traffic.count_failure(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)


def _hear_given_interfaces_only(sock: socket.socket) -> None:
    # Otherwise Linux also delivers what any other program on this machine has joined, on any interface.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            sock.setsockopt(*_MULTICAST_ALL[sock.family], 0)
            # Linux hands a packet that one socket alone wants to any one of those that share the port by
            # this option: a node on 127.0.0.1 would get what is meant for one on the network. SO_REUSEADDR
            # is enough.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
