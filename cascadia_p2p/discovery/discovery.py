"""Joins mDNS and static peers into one stream of control addresses worth greeting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import structlog

from cascadia_p2p.discovery.interfaces import Address, Interface, list_interfaces
from cascadia_p2p.discovery.mdns import Found, Mdns
from cascadia_p2p.discovery.peers import StaticPeers
from cascadia_p2p.discovery.tasks import note_failure
from cascadia_p2p.discovery.txt import Announcement
from cascadia_p2p.discovery.watch import Change, NetworkWatch
from cascadia_p2p.discovery.words import alone_sentence
from cascadia_p2p.types import Endpoint, Instance

__all__ = ["Candidate", "Discovery"]

_LOOK = 3.0
_MAX_PENDING = 1024
_MAX_REACHED = 1024

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A control address that may belong to a node of this fleet.

    Args:
        endpoint: numeric host and control port.
        announcement: what the node said by mDNS; None for a static peer. The greeting must confirm it.
        peer: the static peer as the user named it; None for mDNS.
    """

    endpoint: Endpoint
    announcement: Announcement | None = None
    peer: Endpoint | None = None

    @property
    def instance(self) -> Instance | None:
        """The instance that announced itself, if any."""
        return self.announcement.instance if self.announcement else None


class Discovery:
    """Finds nodes for as long as it runs, and never fails for want of a network.

    Iterate over it to get candidates. The same candidate comes again and again (static peers after 0.2 to
    5 s, mDNS ones with each round of questions) until `reached` is called for it; `lost` starts it anew.

    Args:
        fleet: only its nodes are reported.
        address: the address to speak at and to announce, from `choose_address`.
        instance: this node's own, which is not reported.
        peers: static peers.
        mdns: whether to use mDNS.
        bind: what the user asked to bind, for following changes of the network.
        moved: called in the event loop with the new address after the old one is gone.
        alone_s: seconds without any node of the fleet after which a warning is logged, once each time.
    """

    def __init__(
        self,
        fleet: str,
        address: Address,
        *,
        instance: Instance | None = None,
        peers: Sequence[Endpoint] = (),
        mdns: bool = True,
        bind: str | None = None,
        moved: Callable[[Address], None] | None = None,
        alone_s: float = 10.0,
    ) -> None:
        self._fleet = fleet
        self._watch = NetworkWatch(bind, address)
        self._moved = moved
        self._alone_s = alone_s
        self._started = time.monotonic()
        self._accompanied = False
        self._peers = StaticPeers(peers, self._offer_peer)
        self._mdns = Mdns([address], fleet, instance, self._offer_found) if mdns else None
        self._pending: dict[tuple[Endpoint, Instance | None], Candidate] = {}
        self._more = asyncio.Event()
        self._reached: dict[Endpoint, Instance | None] = {}
        """The instance last reached at each address, the longest known first."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> Address:
        """The address in use."""
        return self._watch.address

    @property
    def mdns(self) -> Mdns | None:
        """The mDNS side, for its counts; None when it is off."""
        return self._mdns

    async def start(self, announcement: Announcement | None = None) -> None:
        """Begin; a failing mDNS is a warning in the log."""
        self._started = time.monotonic()
        if self._mdns is not None:
            self._mdns.start(announcement)
        self._peers.start()
        self._tasks = [
            asyncio.create_task(self._watch_network(), name="network"),
            asyncio.create_task(self._watch_loneliness(), name="loneliness"),
        ]
        for task in self._tasks:
            task.add_done_callback(note_failure)

    async def stop(self) -> None:
        """Say goodbye and end; may be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._peers.stop()
        if self._mdns is not None:
            await self._mdns.stop()

    def announce(self, announcement: Announcement) -> None:
        """Announce something else from now on."""
        if self._mdns is not None:
            self._mdns.announce(announcement)

    def expect_more(self, incomplete: bool) -> None:
        """Whether nodes are missing: decides how often to ask."""
        if self._mdns is not None:
            self._mdns.expect_more(incomplete)

    def reached(self, candidate: Candidate) -> None:
        """The greeting succeeded: offer it no longer."""
        self._reached.pop(candidate.endpoint, None)
        self._reached[candidate.endpoint] = candidate.instance
        if len(self._reached) > _MAX_REACHED:
            # It is offered again, if it is still announced.
            del self._reached[next(iter(self._reached))]
        if candidate.peer is not None:
            self._peers.reached(candidate.peer)

    def own(self, candidate: Candidate) -> None:
        """The address is this node's own: nobody is reached there, and as a static peer it is done with."""
        if candidate.peer is not None:
            self._peers.reached(candidate.peer)

    def accompanied(self, others: bool) -> None:
        """Whether this node knows others of its fleet now, whoever found whom."""
        self._accompanied = others

    def lost(self, candidate: Candidate) -> None:
        """The connection is gone: offer it again."""
        if _key(candidate) in self._reached.items():
            del self._reached[candidate.endpoint]
        if candidate.peer is not None:
            self._peers.lost(candidate.peer)
        elif self._mdns is not None:
            for found in self._mdns.known:
                if candidate.endpoint in found.endpoints:
                    self._offer_found(found)

    def __aiter__(self) -> AsyncIterator[Candidate]:
        return self

    async def __anext__(self) -> Candidate:
        """The next candidate; waits for one."""
        while not self._pending:
            self._more.clear()
            await self._more.wait()
        return self._pending.pop(next(iter(self._pending)))

    def dropped(self) -> dict[str, int]:
        """Announcements of no use and packets not read, by reason, since mDNS was opened; empty without."""
        if self._mdns is None:
            return {}
        seen, traffic = self._mdns.sightings, self._mdns.traffic
        return {
            "other_fleets": seen.other_fleets,
            "other_versions": seen.other_versions,
            "malformed": seen.malformed,
            "forgotten": seen.forgotten,
            "damaged": traffic.damaged,
            "flooded": traffic.flooded,
            "unresolved": traffic.dropped,
        }

    def explain_alone(self) -> str:
        """Why this node may see no other, with counts and what to do next."""
        return alone_sentence(
            self._fleet,
            self._watch.address,
            time.monotonic() - self._started,
            self._mdns,
            self._peers.problems,
        )

    def _offer_found(self, found: Found) -> None:
        for endpoint in found.endpoints:
            self._offer(Candidate(endpoint, found.announcement))

    def _offer_peer(self, peer: Endpoint, endpoint: Endpoint) -> None:
        self._offer(Candidate(endpoint, peer=peer))

    def _offer(self, candidate: Candidate) -> None:
        key = _key(candidate)
        if key in self._reached.items() or len(self._pending) >= _MAX_PENDING:
            return
        self._pending[key] = candidate
        self._more.set()

    async def _watch_network(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(_LOOK)
            try:
                interfaces = await asyncio.to_thread(list_interfaces)
            except Exception as error:  # whatever it is, the next look may go well
                if not failing:
                    _log.warning(
                        "network_unseen",
                        message=f"this machine's addresses can not be listed ({error}): changes are not "
                        "noticed until they can; it is tried again",
                    )
                failing = True
                continue
            failing = False
            self._judge(interfaces)

    def _judge(self, interfaces: Sequence[Interface]) -> None:
        """Follow what has changed since the last look."""
        change = self._watch.look(interfaces, time.monotonic(), time.time())
        if change is Change.NONE:
            return
        address = self._watch.address
        if change is Change.MOVED:
            _log.warning("address_changed", message=f"this node's address is {address} now")
        if self._mdns is not None:
            self._mdns.reopen([address])
        if change is Change.MOVED and self._moved is not None:
            self._moved(address)

    async def _watch_loneliness(self) -> None:
        since = time.monotonic()
        told = False
        while True:
            await asyncio.sleep(min(1.0, self._alone_s / 4))
            found = self._accompanied or self._reached or (self._mdns is not None and self._mdns.known)
            if found:
                since, told = time.monotonic(), False
            elif not told and time.monotonic() - since >= self._alone_s:
                told = True
                _log.warning("alone", message=self.explain_alone())


def _key(candidate: Candidate) -> tuple[Endpoint, Instance | None]:
    return candidate.endpoint, candidate.instance
