"""A client of the library that is closed while it looks for the head."""

from __future__ import annotations

import asyncio

import pytest
from test_head_service import END, Ring, answered, run, words

import cascadia_p2p.client as client_module
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import HeadLostError
from cascadia_p2p.types import Endpoint


def test_calls_fail_that_wait_for_the_head_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked in their name afterwards, and a later call finds the head anew."""

    async def scenario(ring: Ring, endpoint: Endpoint) -> None:
        looking, may_find = asyncio.Event(), asyncio.Event()

        async def find(*_: object, **__: object) -> Endpoint:
            looking.set()
            await may_find.wait()
            return endpoint

        monkeypatch.setattr(client_module, "find_head", find)
        client = AsyncClient()

        async def read() -> None:
            async for _ in client.stream("a"):
                pass

        calls = [
            asyncio.create_task(client.generate("a")),
            asyncio.create_task(read()),
            asyncio.create_task(client.status()),
        ]
        await looking.wait()
        await client.close()
        later = asyncio.create_task(client.generate("b"))
        may_find.set()
        for call in calls:
            with pytest.raises(HeadLostError, match="closed"):
                await call
        await answered(ring, [*words("x"), END])
        assert (await later).text == "x"
        assert ring.service.counts.accepted == 1
        await client.close()

    run(scenario)
