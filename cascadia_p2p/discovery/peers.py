"""Static peers: addresses the user named, looked up and offered again and again until they are reached."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from cascadia_p2p.discovery.tasks import note_failure
from cascadia_p2p.types import Endpoint

__all__ = ["StaticPeers", "resolve"]

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_LOOKUP_LIMIT = 5.0
_MAX_ADDRESSES = 8

_log = structlog.get_logger()


async def resolve(peer: Endpoint, limit: float = _LOOKUP_LIMIT) -> list[Endpoint]:
    """The numeric addresses of a peer, IPv6 and IPv4 taking turns, at most 8.

    Raises:
        OSError: the name is unknown, or was not answered within `limit` seconds.
    """
    if peer.numeric:
        return [peer]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit):
            found = await loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
    except TimeoutError as error:
        raise OSError(f"no answer from name resolution within {limit:g} s") from error
    except UnicodeError as error:
        raise OSError("not a valid host name") from error
    families: dict[int, list[Endpoint]] = {}
    for family, _, _, _, where in found:
        families.setdefault(family, []).append(Endpoint.of(where))
    rounds = range(max(map(len, families.values()), default=0))
    turns = [each[turn] for turn in rounds for each in families.values() if turn < len(each)]
    return list(dict.fromkeys(turns))[:_MAX_ADDRESSES]


@dataclass(slots=True)
class _Peer:
    endpoint: Endpoint
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    reached: bool = False
    problem: str = ""


class StaticPeers:
    """Offers each named address, with all addresses of its name at once, until told that it was reached.

    Waits between two offers grow from 0.2 s to 5 s, with a random part, so that nodes do not ask in step.

    Args:
        peers: as the user named them.
        offer: called in the event loop with the peer and one numeric address.
    """

    def __init__(self, peers: Sequence[Endpoint], offer: Callable[[Endpoint, Endpoint], None]) -> None:
        self._offer = offer
        self._peers = {endpoint: _Peer(endpoint) for endpoint in peers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin offering; needs a running loop."""
        self._tasks = [
            asyncio.create_task(self._keep(peer), name=f"peer-{peer.endpoint}")
            for peer in self._peers.values()
        ]
        for task in self._tasks:
            task.add_done_callback(note_failure)

    async def stop(self) -> None:
        """End all lookups; may be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def reached(self, peer: Endpoint) -> None:
        """Offer this peer no longer."""
        if peer in self._peers:
            self._peers[peer].reached = True

    def lost(self, peer: Endpoint) -> None:
        """Offer this peer again, at once."""
        if peer in self._peers:
            self._peers[peer].reached = False
            self._peers[peer].wake.set()

    @property
    def problems(self) -> dict[Endpoint, str]:
        """Peers not reached, with what the last lookup failed at; empty when the name is known."""
        return {peer.endpoint: peer.problem for peer in self._peers.values() if not peer.reached}

    async def _keep(self, peer: _Peer) -> None:
        wait = _FIRST_WAIT
        while True:
            peer.wake.clear()
            if peer.reached:
                await peer.wake.wait()
                wait = _FIRST_WAIT
                continue
            await self._try(peer)
            try:
                async with asyncio.timeout(wait * random.uniform(0.5, 1.0)):
                    await peer.wake.wait()
                wait = _FIRST_WAIT
            except TimeoutError:
                wait = min(wait * 2, _LONGEST_WAIT)

    async def _try(self, peer: _Peer) -> None:
        try:
            addresses = await resolve(peer.endpoint)
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != peer.problem:
                _log.warning(
                    "peer_not_found",
                    message=f"--peer {peer.endpoint}: name lookup failed ({problem}); still trying",
                )
            peer.problem = problem
            return
        peer.problem = ""
        for address in addresses:
            self._offer(peer.endpoint, address)
