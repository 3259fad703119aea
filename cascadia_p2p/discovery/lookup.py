"""Finds nodes for the client commands, which belong to no ring themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cascadia_p2p.discovery.interfaces import Address, choose_address, list_interfaces
from cascadia_p2p.discovery.mdns import Found, Mdns
from cascadia_p2p.errors import UnreachableError

__all__ = ["find_head", "find_head_sync", "find_nodes", "find_nodes_sync"]

_QUIET = 0.7
"""Seconds after the last newcomer when all are taken to have answered."""


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


async def find_head(fleet: str, *, timeout: float = 5.0, bind: str | None = None) -> Found:
    """The serving head of a fleet, as soon as it answers; `clients` of it tells where it takes requests.

    Args:
        fleet: its name.
        timeout: seconds to wait.
        bind: as in the configuration; without it the usual address is asked and 127.0.0.1 too.

    Raises:
        UnreachableError: mDNS can not be used here, nobody answers, or no ring is open.
    """
    found = await _search(fleet, timeout, bind, enough=lambda each: bool(each.clients))
    for each in found:
        if each.clients:
            return each
    if found:
        raise UnreachableError(
            f"{len(found)} nodes of fleet '{fleet}' answered, but none of them takes clients yet: "
            "the ring is still incomplete. 'cascadia-p2p status' says what is missing"
        )
    raise UnreachableError(
        f"no node of fleet '{fleet}' answered by mDNS within {timeout:g} s: start nodes with "
        "'cascadia-p2p join', check --fleet, or give the head's address with --endpoint tcp://HOST:PORT"
    )


def find_nodes_sync(fleet: str, *, timeout: float = 3.0, bind: str | None = None) -> list[Found]:
    """`find_nodes` outside of an event loop."""
    return asyncio.run(find_nodes(fleet, timeout=timeout, bind=bind))


def find_head_sync(fleet: str, *, timeout: float = 5.0, bind: str | None = None) -> Found:
    """`find_head` outside of an event loop."""
    return asyncio.run(find_head(fleet, timeout=timeout, bind=bind))


async def _search(
    fleet: str,
    timeout: float,
    bind: str | None,
    *,
    enough: Callable[[Found], bool] = lambda _: False,
    quiet: float | None = None,
) -> list[Found]:
    news: asyncio.Queue[Found] = asyncio.Queue()
    mdns = Mdns(_addresses(bind), fleet, None, news.put_nowait)
    mdns.start()
    found: dict[str, Found] = {}
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    try:
        while not any(map(enough, found.values())):
            async with asyncio.timeout_at(end):
                each = await news.get()
            if quiet is not None and each.name not in found:
                end = loop.time() + quiet
            found[each.name] = each
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
