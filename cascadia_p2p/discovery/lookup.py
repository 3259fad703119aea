"""Finds nodes for the client commands, which belong to no ring themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container
from typing import Final

from cascadia_p2p.discovery.interfaces import Address, choose_address, list_interfaces, nearest
from cascadia_p2p.discovery.mdns import Found, Mdns
from cascadia_p2p.discovery.tasks import note_failure
from cascadia_p2p.errors import UnreachableError
from cascadia_p2p.types import Endpoint

__all__ = ["find_head", "find_nodes", "find_nodes_sync"]

_QUIET = 0.7
"""Seconds after the last newcomer when all are taken to have answered."""

_KNOCK_S: Final = 2.0
"""For how long a connection to an announced head is tried, in seconds."""

_KNOCKS: Final = 64
_MAX_KNOCKS: Final = 2048
"""Announced heads that are tried at a time, and in all."""


async def find_nodes(fleet: str, *, timeout: float = 3.0, bind: str | None = None) -> list[Found]:
    """The nodes of a fleet that answer by mDNS, by shard; empty when none does.

    Args:
        fleet: its name.
        timeout: seconds to wait for the first answer; the rest may take a little longer.
        bind: as in the configuration; without it the usual address is asked and 127.0.0.1 too.

    Raises:
        UnreachableError: mDNS can not be used here.
    """
    found = await _search(fleet, timeout, bind, quiet=_QUIET)
    return sorted(
        found, key=lambda each: (each.announcement.shard is None, each.announcement.shard or 0, each.name)
    )


async def find_head(
    fleet: str, *, timeout: float = 5.0, bind: str | None = None, besides: Container[Endpoint] = ()
) -> Endpoint:
    """Where a fleet's serving head takes requests, as soon as it answers.

    What is announced is a hint: addresses that accept no connection are passed over.

    Args:
        fleet: its name.
        timeout: seconds to wait.
        bind: as in the configuration; without it the usual address is asked and 127.0.0.1 too.
        besides: addresses that turned out to be no head.

    Raises:
        UnreachableError: mDNS can not be used here, nobody answers, or no ring is open.
    """
    listening: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
    knocking: dict[Endpoint, asyncio.Task[None]] = {}
    slots = asyncio.Semaphore(_KNOCKS)

    async def knock(announced: Endpoint) -> None:
        async with slots:
            endpoint = nearest(announced)
            if endpoint not in besides and await _listens(endpoint) and not listening.done():
                listening.set_result(endpoint)

    def take(found: Found) -> None:
        for announced in found.clients[:1]:
            if announced not in knocking and len(knocking) < _MAX_KNOCKS:
                task = knocking[announced] = asyncio.create_task(knock(announced), name=f"knock-{announced}")
                task.add_done_callback(note_failure)

    search = asyncio.create_task(_search(fleet, timeout, bind, tell=take))
    try:
        await asyncio.wait((search, listening), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            return listening.result()
        found = await search
    finally:
        for task in (search, *knocking.values()):
            task.cancel()
        await asyncio.gather(search, *knocking.values(), return_exceptions=True)
    if knocking:
        where = ", ".join(map(str, list(knocking)[:3]))
        raise UnreachableError(
            f"a head of fleet '{fleet}' is announced at {where}, but nothing answers there: is it that "
            "machine's firewall? 'cascadia-p2p doctor --peer HOST:7600' looks for the reason"
        )
    if found:
        raise UnreachableError(
            f"{len(found)} {'node' if len(found) == 1 else 'nodes'} of fleet '{fleet}' answered, but none of "
            "them takes clients yet: the ring is still incomplete. 'cascadia-p2p status' says what is missing"
        )
    raise UnreachableError(
        f"no node of fleet '{fleet}' answered by mDNS within {timeout:g} s: start nodes with "
        "'cascadia-p2p join', check --fleet, or give the head's address with --endpoint tcp://HOST:PORT"
    )


async def _listens(endpoint: Endpoint) -> bool:
    try:
        async with asyncio.timeout(_KNOCK_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def find_nodes_sync(fleet: str, *, timeout: float = 3.0, bind: str | None = None) -> list[Found]:
    """`find_nodes` outside of an event loop."""
    return asyncio.run(find_nodes(fleet, timeout=timeout, bind=bind))


async def _search(
    fleet: str,
    timeout: float,
    bind: str | None,
    *,
    tell: Callable[[Found], None] = lambda _: None,
    quiet: float | None = None,
) -> list[Found]:
    news: asyncio.Queue[Found] = asyncio.Queue()
    mdns = Mdns(_addresses(bind), fleet, None, news.put_nowait)
    mdns.start()
    found: dict[str, Found] = {}
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    try:
        while True:
            async with asyncio.timeout_at(end):
                each = await news.get()
            if quiet is not None and each.name not in found:
                end = loop.time() + quiet
            found[each.name] = each
            tell(each)
    except TimeoutError:
        if not found and mdns.problem:
            raise UnreachableError(
                f"nodes can not be looked for: mDNS does not work here ({mdns.problem}); "
                "give the head's address with --endpoint tcp://HOST:PORT"
            ) from None
    finally:
        await mdns.stop()
    return list(found.values())


def _addresses(bind: str | None) -> list[Address]:
    usual = choose_address(bind, list_interfaces())
    if bind is not None or usual.loopback:
        return [usual]
    return [usual, Address("127.0.0.1", "loopback")]
