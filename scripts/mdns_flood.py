"""Floods a network with forged mDNS records of a fleet, for tests of what takes them.

    python scripts/mdns_flood.py --fleet NAME --address OWN [--seconds 10] [--rate 1000] [--victim ADDRESS]...

What it sends, in turns: nodes that do not exist, at addresses where nobody is or at a port of a victim;
records under the names of real nodes that point nowhere; goodbyes for real nodes; names without an address;
TXT records that are too long or are no text; and noise. It prints how many packets it sent.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import time
from collections.abc import Sequence

from zeroconf import ServiceBrowser, ServiceStateChange, Zeroconf

from cascadia_p2p.discovery.txt import SERVICE_TYPE, Announcement, encode_txt
from cascadia_p2p.types import Instance, NodeId
from cascadia_p2p.wire import PROTOCOL

GROUP, PORT = "224.0.0.251", 5353
LISTEN_S = 1.5
PTR, TXT, SRV, A = 12, 16, 33, 1
FLUSH = 0x8000
TTL = 120


def _name(text: str) -> bytes:
    labels = [part.encode()[:63] for part in text.rstrip(".").split(".")]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _record(name: str, kind: int, data: bytes, ttl: int = TTL, flush: bool = True) -> bytes:
    rest = struct.pack(">HHIH", kind, 1 | (FLUSH if flush else 0), ttl, len(data))
    return _name(name) + rest + data


def packet(records: Sequence[bytes]) -> bytes:
    """A response with these records."""
    return struct.pack(">HHHHHH", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


class Forger:
    """Makes one forged packet after the other.

    Args:
        fleet: whose nodes are imitated.
        names: instance names of real nodes.
        victims: addresses of hosts that forged records point to.
        seed: of everything drawn.
    """

    def __init__(self, fleet: str, names: Sequence[str], victims: Sequence[str], seed: int) -> None:
        self._fleet, self._names, self._victims = fleet, list(names), list(victims)
        self._random = random.Random(seed)
        self._turn = 0

    def next(self) -> bytes:
        """The next packet."""
        self._turn += 1
        kinds = (self._stranger, self._pointer, self._impostor, self._goodbye, self._nameless, self._long)
        return (*kinds, self._noise)[self._turn % 7]()

    def _hex(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    def _nowhere(self) -> str:
        return f"10.77.{self._random.randrange(1, 250)}.{self._random.randrange(1, 250)}"

    def _node(self, name: str, host: str, port: int, ttl: int = TTL) -> bytes:
        words = Announcement(
            protocol=PROTOCOL, fleet=self._fleet, node_id=NodeId(self._hex()), instance=Instance(self._hex()),
            model="0123abcd", shard=1, shards=3, control=port, data=port, client=port,
        )  # fmt: skip
        pairs = [f"{key}={value}".encode() for key, value in encode_txt(words).items()]
        text = b"".join(bytes([len(pair)]) + pair for pair in pairs)
        server = f"forged-{self._hex()}.local."
        where = struct.pack(">HHH", 0, 0, port) + _name(server)
        return packet(
            [
                _record(SERVICE_TYPE, PTR, _name(name), ttl, flush=False),
                _record(name, SRV, where, ttl),
                _record(name, TXT, text, ttl),
                _record(server, A, socket.inet_aton(host), ttl),
            ]
        )

    def _stranger(self) -> bytes:
        return self._node(f"{self._hex()}.{SERVICE_TYPE}", self._nowhere(), 7600)

    def _pointer(self) -> bytes:
        host = self._random.choice(self._victims) if self._victims else self._nowhere()
        port = self._random.choice((22, 7601, 7700, self._random.randrange(1, 65536)))
        return self._node(f"{self._hex()}.{SERVICE_TYPE}", host, port)

    def _impostor(self) -> bytes:
        return self._node(self._real(), self._nowhere(), 7600)

    def _goodbye(self) -> bytes:
        return packet([_record(SERVICE_TYPE, PTR, _name(self._real()), 0, flush=False)])

    def _nameless(self) -> bytes:
        return packet([_record(SERVICE_TYPE, PTR, _name(f"{self._hex()}.{SERVICE_TYPE}"), flush=False)])

    def _long(self) -> bytes:
        name = f"{self._hex()}.{SERVICE_TYPE}"
        part = b"\xff" + self._random.randbytes(255)
        return packet(
            [
                _record(SERVICE_TYPE, PTR, _name(name), flush=False),
                _record(name, SRV, struct.pack(">HHH", 0, 0, 7600) + _name("forged.local.")),
                _record(name, TXT, part * 20),
            ]
        )

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(1, 1400))

    def _real(self) -> str:
        return self._random.choice(self._names) if self._names else f"{self._hex()}.{SERVICE_TYPE}"


def real_names(address: str) -> list[str]:
    """Instance names that are announced now."""
    names: set[str] = set()

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        names.add(name)

    zeroconf = Zeroconf(interfaces=[address])
    try:
        ServiceBrowser(zeroconf, SERVICE_TYPE, handlers=[changed])
        time.sleep(LISTEN_S)
    finally:
        zeroconf.close()
    return sorted(names)


def flood(address: str, forger: Forger, seconds: float, rate: float) -> int:
    """Send for so long; the packets that left."""
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        out.bind((address, PORT))
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            while sent < passed * rate:
                out.sendto(forger.next(), (GROUP, PORT))
                sent += 1
            time.sleep(0.005)
    return sent


def main() -> None:
    """Flood as told."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--address", required=True, help="of the interface to send from")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1000.0, help="packets a second")
    parser.add_argument("--victim", action="append", default=[], help="a host that records point to")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    names = real_names(args.address)
    print(f"{len(names)} real nodes are imitated", flush=True)
    sent = flood(args.address, Forger(args.fleet, names, args.victim, args.seed), args.seconds, args.rate)
    print(f"{sent} packets", flush=True)


if __name__ == "__main__":
    main()
