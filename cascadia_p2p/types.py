"""Small values that several packages share; no behaviour beyond their own form."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Final, NewType

from cascadia_p2p.errors import UsageError

NodeId = NewType("NodeId", str)
"""16 lower-case hex digits, kept in the state directory: the same over restarts."""

Instance = NewType("Instance", str)
"""16 lower-case hex digits, drawn anew at each start of a process."""

StreamId = NewType("StreamId", int)
"""An unsigned 64-bit number that the head gives a request; never used twice by one head instance."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address: host (name, IPv4, or IPv6 without brackets) and port (1 to 65535)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def numeric(self) -> bool:
        """Whether the host is an address, with a scope that ZeroMQ takes if with any, and not a name."""
        address, mark, scope = self.host.partition("%")
        try:
            version = ipaddress.ip_address(address).version
        except ValueError:
            return False
        return not mark or (version == 6 and _SCOPE.fullmatch(scope) is not None)

    @property
    def loopback(self) -> bool:
        """Whether only programs on the same machine can be reached there."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    @property
    def tcp(self) -> str:
        """The address as ZeroMQ spells it."""
        return f"tcp://{self}"

    @classmethod
    def of(cls, where: tuple[Any, ...]) -> Endpoint:
        """An address as the system spells it for sockets; a link-local one keeps its scope."""
        host, port = str(where[0]), int(where[1])
        if len(where) == 4 and where[3] and "%" not in host:
            host = f"{host}%{where[3]}"
        return cls(host, port)

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `HOST:PORT`, `[IPV6]:PORT` or the same behind `tcp://`.

        Raises:
            UsageError: the text has another form, or the port is not 1 to 65535.
        """
        match = _ENDPOINT.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"'{text}' is not an address: expected HOST:PORT or [IPV6]:PORT, as in 192.168.1.20:7600"
            )
        port = int(match["port"])
        if not 1 <= port <= 65535:
            raise UsageError(f"'{text}' has port {port}: expected 1 to 65535")
        return cls(match["v6"] or match["host"], port)


_SCOPE = re.compile(r"[\w.-]+", re.ASCII)
_ENDPOINT = re.compile(
    r"(?:tcp://)?(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[A-Za-z0-9](?:[\w.-]*[\w])?)):(?P<port>\d{1,5})"
)


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """One formation of the ring: the counter decides which is newer, the head's instance makes it unique."""

    counter: int
    head: Instance

    def __str__(self) -> str:
        return f"{self.counter}@{self.head}"


@dataclass(frozen=True, slots=True)
class Promise:
    """What a node, or the ring as the least of its nodes, can hold.

    Args:
        slots: streams at once.
        context: positions a stream (prompt and answer together).
        rows: rows a frame.
        kept: prefixes that are kept for later streams; 0 for none.
    """

    slots: int
    context: int
    rows: int
    kept: int = 0

    def least(self, other: Promise) -> Promise:
        """The promise that both can keep."""
        return Promise(
            min(self.slots, other.slots),
            min(self.context, other.context),
            min(self.rows, other.rows),
            min(self.kept, other.kept),
        )


MAX_TEMPERATURE: Final = 100.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a stream's tokens are chosen.

    The logits are divided by the temperature; of the `top_k` likeliest tokens those stay that are needed to
    reach the probability `top_p`, the likeliest first; one of them is drawn by a number that depends on
    nothing but `seed` and the position that the token takes.

    Args:
        temperature: 0 takes the likeliest token and needs none of the others; at most `MAX_TEMPERATURE`.
        top_k: 0 for all tokens.
        top_p: more than 0, at most 1.
        seed: an unsigned 64-bit number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY: Final = Sampling()
"""The likeliest token, always."""
