"""Calls of one asyncio client that share a connection to a head which was found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from test_head_service import END, Ring, answered, run, until, words

import cascadia_p2p.client as client_module
from cascadia_p2p.asking import Patience
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import LateReplyError
from cascadia_p2p.types import Endpoint

SHORT_S = 0.3


def limit(monkeypatch: pytest.MonkeyPatch, times: Sequence[float | None]) -> None:
    """How long the client's next calls may take, in seconds, one after the other."""
    left = iter(times)
    monkeypatch.setattr(
        client_module,
        "Patience",
        lambda _, *, retry, whole: Patience(next(left), retry=retry, whole=whole),
    )


def found(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> list[Endpoint]:
    """Let the head be found there: what was found so far."""
    finds: list[Endpoint] = []

    async def find(*_: object, **__: object) -> Endpoint:
        finds.append(endpoint)
        return endpoint

    monkeypatch.setattr(client_module, "find_head", find)
    return finds


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_call_whose_time_is_over_ends_alone(monkeypatch: pytest.MonkeyPatch, logprobs: int | None) -> None:
    """Its sibling keeps its place at the head and is blamed for nothing; without logprobs it is a stream."""
    limit(monkeypatch, [None, SHORT_S, SHORT_S])
    options = {} if logprobs is None else {"logprobs": logprobs}

    async def scenario(ring: Ring, endpoint: Endpoint) -> None:
        finds = found(monkeypatch, endpoint)
        async with AsyncClient() as client, asyncio.TaskGroup() as tasks:
            sibling = tasks.create_task(client.generate("a"))
            stream = await ring.stream()
            for count in (1, 2):
                with pytest.raises(LateReplyError):
                    await client.generate("b", **options)  # type: ignore[arg-type]
                await until(lambda count=count: len(ring.ended) >= count)  # type: ignore[misc]
            assert list(ring.streams) == [stream]
            await answered(ring, [*words("x"), END])
            assert (await sibling).text == "x"
        assert (ring.service.counts.accepted, len(finds)) == (3, 1)

    run(scenario)


def test_behind_a_call_that_was_alone_the_head_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, [SHORT_S])

    async def scenario(_: Ring, endpoint: Endpoint) -> None:
        finds = found(monkeypatch, endpoint)
        async with AsyncClient() as client:
            with pytest.raises(LateReplyError):
                await client.generate("a")
            await client.status()
        assert len(finds) == 2

    run(scenario)
