"""Which security a ZeroMQ socket wants, read from its greeting before either side can hang up.

Of two sides that differ, whoever sees it first ends the connection: the other may learn no more than that.
Source of the format: ZMTP 3.1 (RFC 37), section "Greeting".
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final

from cascadia_p2p.transport.curve import Knock
from cascadia_p2p.types import Endpoint

GREETING_S: Final = 1.0
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_VERSION: Final = b"\x03\x01"
_MECHANISM: Final = slice(12, 32)


def read_mechanism(endpoint: Endpoint, timeout_s: float = GREETING_S) -> str | None:
    """The mechanism that a socket of ZeroMQ wants, as "NULL" or "CURVE"; None where none tells.

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
        while len(greeting) < _MECHANISM.stop:
            made.settimeout(max(deadline - time.monotonic(), 0.001))
            part = made.recv(_MECHANISM.stop - len(greeting))
            if not part:
                break
            greeting += part
    if len(greeting) < _MECHANISM.stop or (greeting[0], greeting[9]) != (_SIGNATURE[0], _SIGNATURE[9]):
        return None
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def why_hung_up(endpoint: Endpoint, *, keyed: bool) -> Knock:
    """Why a handshake was ended by the other side, as far as its greeting tells; waits up to `GREETING_S`.

    Args:
        endpoint: where it is bound.
        keyed: whether this side has a key.
    """
    mechanism = read_mechanism(endpoint)
    differs = mechanism in ("NULL", "CURVE") and (mechanism == "CURVE") is not keyed
    return Knock.MECHANISM if differs else Knock.HUNG_UP
