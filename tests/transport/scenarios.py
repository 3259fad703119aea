"""What tests of sockets in an event loop share: bounded runs, plain sockets, waits, turns of the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import zmq

from cascadia_p2p.transport.client_server import (
    ClientServer,
    Route,
)
from cascadia_p2p.transport.looping import Delivery
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

DEADLINE_S = 60.0


def run(scenario: Callable[[Network], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        with Network() as network:
            await asyncio.wait_for(scenario(network), DEADLINE_S)

    asyncio.run(bounded())


def client(network: Network, kind: int, *endpoints: Endpoint, **options: int) -> zmq.Socket[bytes]:
    made = network.socket(kind, linger_ms=0, max_part=1 << 16)
    made.setsockopt(zmq.IMMEDIATE, 0)
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    for endpoint in endpoints:
        made.connect(endpoint.tcp)
    return made


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def turns() -> AsyncIterator[Callable[[], int]]:
    """Count, within the block, how often the loop came to everything else."""
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    try:
        yield lambda: count
    finally:
        ticking.cancel()


async def taken(server: ClientServer, route: Route, data: bytes) -> None:
    await until(lambda: server.reply(route, data) is not Delivery.FULL)


async def got(made: zmq.Socket[bytes]) -> list[bytes]:
    await until(lambda: bool(made.poll(0)))
    return made.recv_multipart()
