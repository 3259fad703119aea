"""Which security a ZeroMQ socket wants, read from its greeting before either side can hang up.

Of two sides that differ, whoever sees it first ends the connection: the other may learn no more than that.
Source of the format: ZMTP 3.1 (RFC 37), section "Greeting".
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Final

from cascadia_p2p.transport.curve import Knock
from cascadia_p2p.transport.naming import open_plain
from cascadia_p2p.types import Endpoint

GREETING_S: Final = 1.0
LOOKS: Final = 16
"""Looks of one `Greetings` at a time."""
REST: Final = 10
"""Times as long as the last look at an address took, its finding stands for the next."""
KNOWN: Final = 256
"""Findings that are kept, at most."""
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_VERSION: Final = b"\x03\x01"
_MECHANISM: Final = slice(12, 32)


def read_mechanism(endpoint: Endpoint, timeout_s: float = GREETING_S) -> str | None:
    """The mechanism that a socket of ZeroMQ wants, as "NULL" or "CURVE"; None where none tells. Blocks.

    This side does not say its own, so that the other has nothing to refuse.

    Args:
        endpoint: where it is bound.
        timeout_s: how long all of it may take, in seconds.
    """
    deadline = time.monotonic() + timeout_s
    greeting = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((endpoint.host, endpoint.port), timeout_s) as made,
    ):
        made.sendall(_SIGNATURE + _VERSION)
        while missing := _MECHANISM.stop - len(greeting):
            made.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (part := made.recv(missing)):
                break
            greeting += part
    return _mechanism_in(greeting)


def why_hung_up(endpoint: Endpoint, *, keyed: bool) -> Knock:
    """Why a handshake was ended by the other side, as far as its greeting tells; blocks up to `GREETING_S`.

    Args:
        endpoint: where it is bound.
        keyed: whether this side has a key.
    """
    return _why(read_mechanism(endpoint), keyed=keyed)


class Greetings:
    """The same in an event loop, without its threads, which look up names and do all else that blocks.

    What takes connections and says nothing holds up a look for `GREETING_S`, and there may be many such
    addresses, each dialled again and again: so looks are few at a time, and each address is left alone in
    proportion to the time that its last look took.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(LOOKS)
        self._known: dict[Endpoint, tuple[float, str | None]] = {}

    async def why_hung_up(self, endpoint: Endpoint, *, keyed: bool) -> Knock:
        """As the function of that name; takes up to `GREETING_S`, the wait for other looks included.

        Args:
            endpoint: a numeric address.
            keyed: whether this side has a key.
        """
        until, mechanism = self._known.get(endpoint, (0.0, None))
        if time.monotonic() >= until:
            mechanism = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GREETING_S), self._free:
                    mechanism = await self._look(endpoint)
        return _why(mechanism, keyed=keyed)

    async def _look(self, endpoint: Endpoint) -> str | None:
        start, mechanism = time.monotonic(), None
        try:
            mechanism = _mechanism_in(await _greeting_of(endpoint))
        finally:
            # Silence, too, is a finding, and the one that costs most.
            now = time.monotonic()
            self._known.pop(endpoint, None)
            self._known[endpoint] = (now + REST * (now - start), mechanism)
            if len(self._known) > KNOWN:
                self._known.pop(next(iter(self._known)))
        return mechanism


async def _greeting_of(endpoint: Endpoint) -> bytes:
    """What a greeting begins with, as far as it was said before the connection ended."""
    loop, greeting = asyncio.get_running_loop(), b""
    with contextlib.suppress(OSError), await open_plain(endpoint) as made:
        await loop.sock_sendall(made, _SIGNATURE + _VERSION)
        while missing := _MECHANISM.stop - len(greeting):
            if not (part := await loop.sock_recv(made, missing)):
                break
            greeting += part
    return greeting


def _mechanism_in(greeting: bytes) -> str | None:
    if len(greeting) < _MECHANISM.stop or (greeting[0], greeting[9]) != (_SIGNATURE[0], _SIGNATURE[9]):
        return None
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _why(mechanism: str | None, *, keyed: bool) -> Knock:
    differs = mechanism in ("NULL", "CURVE") and (mechanism == "CURVE") is not keyed
    return Knock.MECHANISM if differs else Knock.HUNG_UP
