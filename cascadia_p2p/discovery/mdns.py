"""Announces this node by mDNS and listens for others of its fleet; what it finds are hints, never facts."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from zeroconf import DNSQuestionType, ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.discovery.tasks import note_failure
from cascadia_p2p.discovery.traffic import CountedZeroconf, Traffic
from cascadia_p2p.discovery.txt import SERVICE_TYPE, Announcement, OtherVersionError, decode_txt, encode_txt
from cascadia_p2p.errors import WireError
from cascadia_p2p.types import Endpoint, Instance
from cascadia_p2p.wire import PROTOCOL

__all__ = ["Found", "Mdns", "Sightings"]

_OFTEN, _SELDOM = 5.0, 60.0
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0
_RESOLVE_LIMIT_MS = 3000
_RESOLVERS = 4
_MAX_UNRESOLVED = 1024
_MAX_NODES = 512
_MAX_NAMES = 16
_MAX_HOSTS = 4

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Found:
    """A node of this fleet that announces itself.

    Args:
        name: its service instance name.
        hosts: its addresses, at most 4; usually one.
        announcement: its own words.
    """

    name: str
    hosts: tuple[str, ...]
    announcement: Announcement

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where it says that it takes greetings."""
        return tuple(Endpoint(host, self.announcement.control) for host in self.hosts)

    @property
    def clients(self) -> tuple[Endpoint, ...]:
        """Where it says that it takes clients; empty unless it is the serving head."""
        port = self.announcement.client
        return () if port is None else tuple(Endpoint(host, port) for host in self.hosts)


@dataclass(slots=True)
class Sightings:
    """What was seen beside nodes of this fleet.

    Args:
        fleets: names of other fleets, at most 16.
        other_fleets: their announcements.
        versions: other protocol versions, at most 16.
        other_versions: announcements of another protocol version.
        malformed: announcements that could not be read.
        forgotten: nodes forgotten because too many announced themselves.
    """

    fleets: set[str] = field(default_factory=set)
    other_fleets: int = 0
    versions: set[str] = field(default_factory=set)
    other_versions: int = 0
    malformed: int = 0
    forgotten: int = 0


class Mdns:
    """Keeps one announcement and one browser alive, whatever happens to the sockets.

    Failures are warnings: the sockets are opened again after 1 s, later after up to 30 s.

    Args:
        addresses: the addresses to speak at; the first is announced.
        fleet: only its nodes are reported.
        own: the instance not to report.
        found: called in the event loop for each new, changed or repeated announcement.
        gone: called with the name of a node that said goodbye.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        fleet: str,
        own: Instance | None,
        found: Callable[[Found], None],
        gone: Callable[[str], None] | None = None,
    ) -> None:
        self.addresses = tuple(addresses)
        self.traffic = Traffic()
        self.sightings = Sightings()
        self.problem = ""
        """Why the sockets could not be opened; empty while they are."""
        self._fleet, self._own = fleet, own
        self._found, self._gone = found, gone
        self._wanted: Announcement | None = None
        self._incomplete = True
        self._wake = asyncio.Event()
        self._reopen = False
        self._task: asyncio.Task[None] | None = None
        self._known: dict[str, Found] = {}

    def start(self, announcement: Announcement | None = None) -> None:
        """Begin in the background; without an announcement only listen."""
        self._wanted = announcement
        self._task = asyncio.create_task(self._run(), name="mdns")
        self._task.add_done_callback(note_failure)

    async def stop(self) -> None:
        """Say goodbye and close the sockets; may be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def announce(self, announcement: Announcement) -> None:
        """Announce something else from now on."""
        self._wanted = announcement
        self._wake.set()

    def expect_more(self, incomplete: bool) -> None:
        """Ask again every 5 s while nodes are missing, every 60 s otherwise."""
        if incomplete != self._incomplete:
            self._incomplete = incomplete
            self._wake.set()

    def reopen(self, addresses: Sequence[Address] | None = None) -> None:
        """Open the sockets anew, on other addresses if given, announce again and ask again."""
        self.addresses = tuple(addresses or self.addresses)
        self._reopen = True
        self._wake.set()

    @property
    def known(self) -> list[Found]:
        """The nodes of this fleet heard since the sockets were opened."""
        return list(self._known.values())

    async def _run(self) -> None:
        wait = _FIRST_RETRY
        while True:
            self._reopen = False
            try:
                await self._serve()
                wait = _FIRST_RETRY
                continue
            except Exception as error:  # whatever it is, nodes can still be named by hand
                self._fail(error, wait)
            await self._pause(wait)
            wait = min(wait * 2, _LONGEST_RETRY)

    def _fail(self, error: Exception, wait: float) -> None:
        reason = (
            (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        )
        where = ", ".join(map(str, self.addresses))
        if reason != self.problem:
            _log.warning(
                "mdns_unavailable",
                message=f"mDNS does not work on {where}: {reason}. It is tried again; until then nodes "
                "are found only by --peer HOST:PORT",
                retry_s=wait,
            )
        self.problem = reason

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self._reopen:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            pass

    async def _serve(self) -> None:
        """Open, announce and browse until told to reopen."""
        self.traffic = Traffic(own=frozenset(address.ip.partition("%")[0] for address in self.addresses))
        self._known.clear()
        session = _Session(self.addresses, self.traffic, self._take, self._drop)
        try:
            await session.open()
            if self.problem:
                _log.info(
                    "mdns_available", message=f"mDNS works on {', '.join(map(str, self.addresses))} now"
                )
            self.problem = ""
            await self._attend(session)
        finally:
            await session.close()

    async def _attend(self, session: _Session) -> None:
        loop = asyncio.get_running_loop()
        announced: Announcement | None = None
        asked = loop.time()
        await session.browse()
        while not self._reopen:
            self._wake.clear()
            if self._wanted is not None and self._wanted != announced:
                announced = self._wanted
                await session.announce(announced)
                continue
            left = asked + (_OFTEN if self._incomplete else _SELDOM) - loop.time()
            if left <= 0:
                await session.browse()
                asked = loop.time()
                continue
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _take(self, info: ServiceInfo) -> None:
        try:
            announcement = decode_txt(info.properties, PROTOCOL)
        except OtherVersionError as error:
            self._note_version(error.version, info)
            return
        except WireError:
            self.sightings.malformed += 1
            return
        if announcement.fleet != self._fleet:
            self._note_fleet(announcement.fleet)
            return
        if announcement.instance == self._own:
            return
        hosts = tuple(host for host in info.parsed_scoped_addresses() if self._reachable(host))[:_MAX_HOSTS]
        if not hosts:
            self.sightings.malformed += 1
            return
        if info.name not in self._known and len(self._known) >= _MAX_NODES:
            self._known.pop(next(iter(self._known)))
            self.sightings.forgotten += 1
        self._known[info.name] = found = Found(info.name, hosts, announcement)
        self._found(found)

    def _drop(self, name: str) -> None:
        if self._known.pop(name, None) is not None and self._gone is not None:
            self._gone(name)

    def _reachable(self, host: str) -> bool:
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            return any(own.loopback for own in self.addresses)
        # A link-local IPv6 address means nothing without the interface it was heard on.
        return not (address.version == 6 and address.is_link_local and "%" not in host)

    def _note_fleet(self, fleet: str) -> None:
        self.sightings.other_fleets += 1
        if fleet not in self.sightings.fleets and len(self.sightings.fleets) < _MAX_NAMES:
            self.sightings.fleets.add(fleet)
            _log.info(
                "other_fleet_seen",
                message=f"fleet '{fleet}' is on this network too; this node keeps to '{self._fleet}'",
            )

    def _note_version(self, version: str, info: ServiceInfo) -> None:
        self.sightings.other_versions += 1
        if version not in self.sightings.versions and len(self.sightings.versions) < _MAX_NAMES:
            self.sightings.versions.add(version)
            where = ", ".join(info.parsed_scoped_addresses()[:_MAX_HOSTS])
            _log.warning(
                "other_version_seen",
                message=f"a node at {where} speaks protocol version {version}, this one {PROTOCOL}: "
                "install the same release on both",
            )


class _Session:
    """One opening of the mDNS sockets."""

    def __init__(
        self,
        addresses: Sequence[Address],
        traffic: Traffic,
        take: Callable[[ServiceInfo], None],
        drop: Callable[[str], None],
    ) -> None:
        self._addresses = addresses
        self._traffic = traffic
        self._take, self._drop = take, drop
        self._zeroconf: AsyncZeroconf | None = None
        self._starting: asyncio.Task[None] | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: ServiceInfo | None = None
        self._unresolved: asyncio.Queue[str] = asyncio.Queue(_MAX_UNRESOLVED)
        self._resolvers: list[asyncio.Task[None]] = []
        self._broadcasts: set[asyncio.Future[None]] = set()

    async def open(self) -> None:
        for address in self._addresses:
            _require(address)
        inner = CountedZeroconf([_socket_choice(address) for address in self._addresses], self._traffic)
        self._zeroconf = AsyncZeroconf(zc=inner)
        # Shielded: a cancelled wait would cancel zeroconf's own future, and then it can not be closed.
        self._starting = asyncio.create_task(inner.async_wait_for_start())
        await asyncio.shield(self._starting)
        if not inner.engine.senders:
            raise OSError("the address is gone, or its interface has no multicast")
        inner.observe()
        self._resolvers = [asyncio.create_task(self._resolve()) for _ in range(_RESOLVERS)]

    async def close(self) -> None:
        for task in self._resolvers:
            task.cancel()
        await asyncio.gather(*self._resolvers, return_exceptions=True)
        for broadcast in self._broadcasts:
            broadcast.cancel()
        await asyncio.gather(*self._broadcasts, return_exceptions=True)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            try:
                await self._zeroconf.async_close()
            finally:
                for reader in self._zeroconf.zeroconf.engine.readers:
                    reader.transport.close()

    async def browse(self) -> None:
        """Ask who is there; everything already known is reported once more."""
        assert self._zeroconf is not None
        if self._browser is not None:
            await self._browser.async_cancel()
        # QM: with several nodes on one machine the answer to a unicast question reaches only one of them.
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf,
            SERVICE_TYPE,
            handlers=[self._changed],
            question_type=DNSQuestionType.QM,
        )

    async def announce(self, announcement: Announcement) -> None:
        assert self._zeroconf is not None
        first = self._info is None
        name = f"{announcement.node_id}.{SERVICE_TYPE}" if self._info is None else self._info.name
        self._info = ServiceInfo(
            SERVICE_TYPE,
            name,
            port=announcement.control,
            properties=encode_txt(announcement),
            server=f"cascadia-{announcement.node_id}.local.",
            parsed_addresses=[self._addresses[0].ip.partition("%")[0]],
        )
        if first:
            sent = await self._zeroconf.async_register_service(self._info, allow_name_change=True)
        else:
            sent = await self._zeroconf.async_update_service(self._info)
        broadcast = asyncio.ensure_future(sent)
        self._broadcasts.add(broadcast)
        broadcast.add_done_callback(self._broadcasts.discard)
        broadcast.add_done_callback(note_failure)

    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        # An exception here would end delivery to all browsers.
        try:
            if state_change is ServiceStateChange.Removed:
                self._drop(name)
                return
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            if info.load_from_cache(zeroconf):
                self._take(info)
            else:
                self._unresolved.put_nowait(name)
        except asyncio.QueueFull:
            self._traffic.dropped += 1
        except Exception:
            self._traffic.damaged += 1

    async def _resolve(self) -> None:
        assert self._zeroconf is not None
        while True:
            name = await self._unresolved.get()
            try:
                info = AsyncServiceInfo(SERVICE_TYPE, name)
                if await info.async_request(self._zeroconf.zeroconf, _RESOLVE_LIMIT_MS, DNSQuestionType.QM):
                    self._take(info)
            except Exception:
                self._traffic.damaged += 1


def _require(address: Address) -> None:
    """Fail with a clear reason where zeroconf would fail half-way, or open no socket without a word.

    Raises:
        OSError: this machine does not have the address now.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address.ip, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(where)


def _socket_choice(address: Address) -> str | int:
    ip, _, scope = address.ip.partition("%")
    # The same link-local address may exist on several interfaces: there the index says which is meant.
    return socket.if_nametoindex(scope) if scope and not scope.isdigit() else int(scope) if scope else ip
