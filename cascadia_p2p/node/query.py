"""Asks any node what it knows of the ring, over its control port; the asker need not be a node."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from cascadia_p2p.errors import NotAdmittedError, UnreachableError, WireError
from cascadia_p2p.keys.clients import ClientList
from cascadia_p2p.keys.places import FLEET_KEY
from cascadia_p2p.transport.control import ControlDialer, Dial
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.transport.looping import Delivery
from cascadia_p2p.transport.naming import locate
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.messages import Clients, StatusQuery, StatusReport, decode_control, encode

_TRIPS: Final = 9
_BURSTS: Final = ((4, 1 << 12), (4, 1 << 15), (16, 1 << 17))
"""Messages and characters of padding in each: the next larger burst only where the last one was quick."""
_QUICK_S: Final = 0.05
_BURST_LIMIT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node said, and how long that took.

    Args:
        body: its status.
        rtt_s: median seconds from a question to its answer, the node's own work on it included.
        rate: bytes a second that arrived there and were read; None when that could not be measured. The node
            decodes what it gets, so this is a lower bound on links much faster than a gigabit.
    """

    body: dict[str, JsonValue]
    rtt_s: float
    rate: float | None


async def ask_node(
    endpoint: Endpoint, timeout_s: float = 3.0, keys: Keys | None = None
) -> dict[str, JsonValue]:
    """The status of the node whose control port this is.

    Args:
        endpoint: the control port.
        timeout_s: how long it may take, in seconds.
        keys: of the fleet; None speaks in the clear.

    Raises:
        NotAdmittedError: it has another key, or only one of both has a key.
        UnreachableError: no node answers there within `timeout_s` seconds.
    """
    with Network(keys) as network:
        dialer = await _dial(network, endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                while (dial := await _heard(dialer)) is not Dial.CONNECTED:
                    if isinstance(dial, Dial) and dial.about_keys:
                        raise NotAdmittedError(f"the node at {endpoint} {DOORS[dial]}")
                return await _asked(dialer)
        except TimeoutError:
            raise UnreachableError(
                f"no node answers at {endpoint} within {timeout_s:g} s: check the address, "
                "and that 'cascadia-p2p join' runs there"
            ) from None
        finally:
            dialer.close(0)


async def measure_node(endpoint: Endpoint, timeout_s: float = 3.0, keys: Keys | None = None) -> Answer:
    """The status of the node whose control port this is, and how fast the way there is.

    Takes a few seconds at most; a gigabit link is loaded for about 20 ms.

    Raises:
        NotAdmittedError: it has another key, or only one of both has a key.
        UnreachableError: no node answers there within `timeout_s` seconds.

    In both cases the sentence is the reason only.
    """
    with Network(keys) as network:
        dialer = await _dial(network, endpoint)
        reason = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while (dial := await _heard(dialer)) is not Dial.CONNECTED:
                    if isinstance(dial, Dial) and dial.about_keys:
                        dialer.close(0)
                        raise NotAdmittedError(DOORS[dial])
                    reason = _REASONS.get(dial, reason) if isinstance(dial, Dial) else reason
                reason = "connected, but nothing answers like a node"
                body = await _asked(dialer)
                trips = [await _timed(dialer) for _ in range(_TRIPS)]
        except TimeoutError:
            dialer.close(0)
            raise UnreachableError(reason) from None
        try:
            return Answer(body, statistics.median(trips), await _rate(dialer))
        finally:
            dialer.close(0)


_REASONS: Final = {
    Dial.REFUSED: "connection refused",
    Dial.UNANSWERED: "no answer",
    Dial.HANDSHAKE_FAILED: "something else than a node listens there",
    Dial.DISCONNECTED: "something else than a node listens there",
}


DOORS: Final = {
    Dial.CLOSED: "takes only who has the fleet's key, and none was found here: name it with --key FILE. "
    f"On a PC of the fleet that is {FLEET_KEY} beside its shards",
    Dial.IN_THE_CLEAR: "has no key, and this PC has one for this fleet: copy it there, beside its shards",
    Dial.OTHER_KEY: "has another key, or this one is a client's: copy fleet.key from one PC to the other",
}
"""What keeps a node and an asker apart, as the end of a sentence."""


async def _dial(network: Network, endpoint: Endpoint) -> ControlDialer:
    """Dial a node at the first of its name's addresses that answers.

    Raises:
        UnreachableError: nobody knows the name.
    """
    address = endpoint if endpoint.numeric else await asyncio.to_thread(locate, endpoint)
    return ControlDialer(network, address)


async def _heard(dialer: ControlDialer) -> bytes | Dial:
    """What comes next.

    Raises:
        UnreachableError: what no node sends.
    """
    happened = await dialer.receive()
    if happened is Dial.MALFORMED:
        raise UnreachableError(f"what listens at {dialer.endpoint} is no node of ours")
    return happened


async def _asked(dialer: ControlDialer) -> dict[str, JsonValue]:
    dialer.send(encode(StatusQuery()))
    return await _report(dialer)


async def _report(dialer: ControlDialer) -> dict[str, JsonValue]:
    """The next report; asks again over a connection that was made anew."""
    while True:
        happened = await _heard(dialer)
        if happened is Dial.CONNECTED:
            dialer.send(encode(StatusQuery()))
        elif isinstance(happened, bytes):
            with contextlib.suppress(WireError):
                message = decode_control(happened)
                if isinstance(message, StatusReport):
                    return message.body


async def _timed(dialer: ControlDialer) -> float:
    start = time.perf_counter()
    await _asked(dialer)
    return time.perf_counter() - start


async def _rate(dialer: ControlDialer) -> float | None:
    """Bytes a second, from the time between the answers to the first and the last of a burst."""
    found: float | None = None
    for count, padding in _BURSTS:
        query = encode(StatusQuery(padding="0" * padding))
        try:
            async with asyncio.timeout(_BURST_LIMIT_S):
                seconds = await _burst(dialer, query, count)
        except TimeoutError:
            return found
        if seconds is None:
            return found
        found = (count - 1) * len(query) / max(seconds, 1e-9)
        if seconds > _QUICK_S:
            return found
    return found


async def _burst(dialer: ControlDialer, query: bytes, count: int) -> float | None:
    for _ in range(count):
        if dialer.send(query) is not Delivery.SENT:
            return None
    await _report(dialer)
    start = time.perf_counter()
    for _ in range(count - 1):
        await _report(dialer)
    return time.perf_counter() - start


async def share_clients(endpoint: Endpoint, keys: Keys, clients: ClientList, timeout_s: float) -> ClientList:
    """Give a node a list of clients, and take what it has beyond it.

    Args:
        endpoint: the node's control port.
        keys: of the fleet.
        clients: what it should have.
        timeout_s: how long it may take, in seconds.

    Returns:
        Both lists in one, which the node has.

    Raises:
        NotAdmittedError: it has another key, or none.
        UnreachableError: no node answers there in time.
    """
    with Network(keys) as network:
        dialer = await _dial(network, endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    happened = await _heard(dialer)
                    if isinstance(happened, Dial) and happened.about_keys:
                        raise NotAdmittedError(f"the node at {endpoint} {DOORS[happened]}")
                    if happened is Dial.CONNECTED:
                        # A digest that no list has: the node answers with what it has then.
                        sealed = clients.seal(keys.pair).decode()
                        dialer.send(encode(Clients(digest=_NO_DIGEST, sealed=sealed)))
                    elif isinstance(happened, bytes):
                        with contextlib.suppress(WireError):
                            message = decode_control(happened)
                            if isinstance(message, Clients) and message.sealed is not None:
                                return clients.join(ClientList.open(message.sealed.encode(), keys.pair))
        except TimeoutError:
            raise UnreachableError(
                f"no node answers at {endpoint} within {timeout_s:g} s: it was not told of the clients"
            ) from None
        finally:
            dialer.close(0)


_NO_DIGEST: Final = "0" * 32
