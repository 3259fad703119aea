"""Which of a name's addresses to connect to: all are tried at once, and the first that answers is taken.

And a plain connection to an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Final

from cascadia_p2p.errors import UnreachableError
from cascadia_p2p.types import Endpoint

LIMIT_S: Final = 0.5
"""How long an address may take to answer, in seconds, before it is taken for one that does not."""

_MOST: Final = 8
"""Addresses of a name that are tried, at most."""


def locate(endpoint: Endpoint, limit_s: float = LIMIT_S) -> Endpoint:
    """The address that a name stands for; of several the one that takes a connection first.

    ZeroMQ would take the first of one family. Blocks while the name is looked up, then for `limit_s` at most.

    Args:
        endpoint: returned as it is when its host is an address already.
        limit_s: see `LIMIT_S`.

    Raises:
        UnreachableError: nobody knows the name; the sentence is the reason only.
    """
    if endpoint.numeric:
        return endpoint
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise UnreachableError(f"the name '{endpoint.host}' can not be looked up: {reason}") from None
    families = {Endpoint.of(where): family for family, _, _, _, where in found[:_MOST]}
    if len(families) == 1:
        return next(iter(families))
    return _first(families, limit_s) or next(iter(families))


def _first(families: Mapping[Endpoint, int], limit_s: float) -> Endpoint | None:
    """The address that a connection can be made to first; None when there is none in time."""
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for endpoint, family in families.items():
            with contextlib.suppress(OSError):
                probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    probe.connect((endpoint.host, endpoint.port))
                selector.register(probe, selectors.EVENT_WRITE, endpoint)
        left = limit_s
        while selector.get_map() and left > 0:
            # At the end once more: what answered in time counts, though this process was held up.
            left = max(deadline - time.monotonic(), 0.0)
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    chosen: Endpoint = key.data
                    return chosen
                selector.unregister(key.fileobj)
    return None


async def open_plain(endpoint: Endpoint) -> socket.socket:
    """A TCP connection without ZeroMQ, made in the running loop and none of its threads; does not block.

    Args:
        endpoint: a numeric address.

    Raises:
        OSError: there is no way to it, or it refuses.
    """
    # Of an address this asks nobody. The loop would let a thread spell one that has a scope.
    family, kind, protocol, _, where = socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, where)
    except BaseException:
        made.close()
        raise
    return made
