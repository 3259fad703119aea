"""Sends multicast at one address and listens for it: whether mDNS can work there, both ways."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.discovery.txt import SERVICE_TYPE
from cascadia_p2p.doctor.finding import Finding, Level

_PORT: Final = 5353
_GROUP: Final = {socket.AF_INET: "224.0.0.251", socket.AF_INET6: "ff02::fb"}
_EVERYTHING: Final = "_services._dns-sd._udp.local."
"""Asked for this, whatever speaks mDNS answers: printers, televisions, other systems."""

_WAIT_S: Final = 1.6
_EVERY_S: Final = 0.4
_ENOUGH_S: Final = 0.5
_MOST_HOSTS: Final = 64
_MULTICAST_ALL: Final = {socket.AF_INET: (socket.IPPROTO_IP, 49), socket.AF_INET6: (socket.IPPROTO_IPV6, 29)}


@dataclass(slots=True)
class Heard:
    """What came of the probe.

    Args:
        sent: packets that left.
        echoed: own packets that came back, as multicast does.
        local: packets of other programs on this machine.
        hosts: addresses of other machines that were heard, at most 64.
        problem: why nothing could be sent or received; else empty.
    """

    sent: int = 0
    echoed: int = 0
    local: int = 0
    hosts: set[str] = field(default_factory=set)
    problem: str = ""


def probe_multicast(address: Address, wait_s: float = _WAIT_S) -> Heard:
    """Ask everybody at this address for a while, and count who is heard.

    Ends early once both the own packets and another machine were heard.
    """
    heard = Heard()
    try:
        with _opened(address) as (made, target):
            _talk(made, target, address, heard, wait_s)
    except OSError as error:
        heard.problem = error.strerror or str(error)
    return heard


def check_multicast(address: Address, wanted: bool, heard: Heard) -> Finding:
    """What the probe means.

    Args:
        address: where it was sent.
        wanted: whether nodes are to be found by mDNS alone, so that it has to work.
        heard: what came of it.
    """
    facts: dict[str, JsonValue] = {
        "sent": heard.sent,
        "echoed": heard.echoed,
        "local": heard.local,
        "hosts": [*sorted(heard.hosts)],
    }
    bad = Level.FAIL if wanted else Level.WARN
    by_hand = "name one other node with --peer HOST:PORT"
    if heard.problem:
        return Finding(
            "multicast",
            bad,
            f"multicast does not work at {address}: {heard.problem}",
            f"see that the interface has a multicast route, or {by_hand}",
            facts,
        )
    if not heard.echoed:
        return Finding(
            "multicast",
            bad,
            f"{heard.sent} multicast packets were sent at {address} and not even this PC heard them",
            f"open UDP port 5353 in this PC's firewall, or {by_hand}",
            facts,
        )
    if heard.hosts:
        machines = "1 other machine" if len(heard.hosts) == 1 else f"{len(heard.hosts)} other machines"
        return Finding(
            "multicast",
            Level.OK,
            f"sent and heard at {address}: {machines} answered",
            facts=facts,
        )
    if address.loopback:
        return Finding("multicast", Level.OK, f"sent and heard at {address}, within this PC", facts=facts)
    return Finding(
        "multicast",
        Level.WARN,
        f"own packets were heard at {address}, but no other machine answered",
        "normal for the first PC of a fleet. If others are on: open UDP port 5353 there, switch client "
        f"isolation off on Wi-Fi and IGMP snooping on the switch, or {by_hand}",
        facts,
    )


class _opened:  # noqa: N801
    """A socket that sends to and receives from the mDNS group on one interface only."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def __enter__(self) -> tuple[socket.socket, tuple[object, ...]]:
        ip, _, scope = self._address.ip.partition("%")
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                with contextlib.suppress(OSError):
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if sys.platform == "linux":
                with contextlib.suppress(OSError):
                    self._socket.setsockopt(*_MULTICAST_ALL[family], 0)
            target = self._join4(ip) if family == socket.AF_INET else self._join6(scope)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        return self._socket, target

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def _join4(self, ip: str) -> tuple[object, ...]:
        group = _GROUP[socket.AF_INET]
        self._socket.bind(("", _PORT))
        own, joined = socket.inet_aton(ip), socket.inet_aton(group)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined + own)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        return group, _PORT

    def _join6(self, scope: str) -> tuple[object, ...]:
        group = _GROUP[socket.AF_INET6]
        index = _interface_index(self._address, scope)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self._socket.bind(("::", _PORT))
        joined = socket.inet_pton(socket.AF_INET6, group) + struct.pack("@I", index)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, joined)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
        return group, _PORT, 0, index


def _interface_index(address: Address, scope: str) -> int:
    if scope.isdigit():
        return int(scope)
    name = scope or ("lo" if address.loopback else address.interface)
    return socket.if_nametoindex(name)


def _talk(
    made: socket.socket, target: tuple[object, ...], address: Address, heard: Heard, wait_s: float
) -> None:
    own = {str(ipaddress.ip_address(address.ip.partition("%")[0]))}
    packets: set[bytes] = set()
    start = time.monotonic()
    send_at = start
    while (now := time.monotonic()) < start + wait_s:
        if heard.echoed and heard.hosts and now > start + _ENOUGH_S:
            return
        if now >= send_at:
            packet = _question()
            packets.add(packet)
            made.sendto(packet, target)
            heard.sent += 1
            send_at = now + _EVERY_S
        ready, _, _ = select.select([made], [], [], max(min(send_at, start + wait_s) - now, 0.0))
        while ready and _take(made, own, packets, heard):
            pass


def _take(made: socket.socket, own: set[str], packets: set[bytes], heard: Heard) -> bool:
    """Count one packet; False when none waits."""
    try:
        data, source = made.recvfrom(9000)
    except BlockingIOError:
        return False
    host = str(source[0]).partition("%")[0]
    if data in packets:
        heard.echoed += 1
    elif host in own:
        heard.local += 1
    elif len(heard.hosts) < _MOST_HOSTS:
        heard.hosts.add(host)
    return True


def _question() -> bytes:
    """An mDNS query for all services and for ours, told apart from all others by its number."""
    names = (_EVERYTHING, SERVICE_TYPE)
    header = struct.pack("!6H", secrets.randbelow(0xFFFF) + 1, 0, len(names), 0, 0, 0)
    return header + b"".join(_encoded(name) + struct.pack("!2H", 12, 1) for name in names)


def _encoded(name: str) -> bytes:
    labels = [label.encode() for label in name.rstrip(".").split(".")]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
