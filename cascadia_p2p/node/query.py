"""Asks any node what it knows of the ring, over its control port; the asker need not be a node."""

from __future__ import annotations

import asyncio
import contextlib

from pydantic import JsonValue

from cascadia_p2p.errors import UnreachableError, WireError
from cascadia_p2p.transport.control import ControlDialer, Dial
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.messages import StatusQuery, StatusReport, decode_control, encode


async def ask_node(endpoint: Endpoint, timeout_s: float = 3.0) -> dict[str, JsonValue]:
    """The status of the node whose control port this is.

    Raises:
        UnreachableError: no node answers there within `timeout_s` seconds.
    """
    with Network() as network:
        dialer = ControlDialer(network, endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(dialer)
        except TimeoutError:
            raise UnreachableError(
                f"no node answers at {endpoint} within {timeout_s:g} s: check the address, "
                "and that 'cascadia-p2p join' runs there"
            ) from None
        finally:
            dialer.close(0)


async def _answer(dialer: ControlDialer) -> dict[str, JsonValue]:
    while True:
        happened = await dialer.receive()
        if happened is Dial.CONNECTED:
            dialer.send(encode(StatusQuery()))
        elif isinstance(happened, bytes):
            with contextlib.suppress(WireError):
                message = decode_control(happened)
                if isinstance(message, StatusReport):
                    return message.body
