"""The client library and impatient clients: finding the head, time limits, leaving in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from cluster.conftest import Shards
from cluster.fleet import fleet
from cluster.sockets import plain
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient, Client
from cascadia_p2p.errors import UnreachableError

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
SLOTS = 3


@pytest.fixture(scope="module")
def ring(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    made = shards(CASE, (7, 5))
    with standing_ring(tmp_path_factory.mktemp("library"), made, 2, slots=SLOTS, context=4096) as standing:
        yield standing


def requests(ring: StandingRing) -> dict[str, int]:
    return dict(ring.status()[0]["requests"])


def rest(ring: StandingRing) -> None:
    """Wait until nothing runs: every request is ended, every slot free, every frame back."""
    scheduler = ring.head.node._conductor._scheduler

    def resting() -> bool:
        pending = ring.head.node.status()["requests"]["pending"]
        return pending == scheduler.running == scheduler.waiting == scheduler.in_flight == 0

    ring.until(resting, "the ring rests")
    free = scheduler._ring.free if scheduler._ring else []
    assert sorted(free) == list(range(SLOTS))


def all_right(ring: StandingRing) -> None:
    """All slots answer rightly, at once."""

    async def scenario() -> None:
        async with AsyncClient(ring.endpoint, timeout_s=30) as client:
            asked = [client.generate(prompt.ids, max_tokens=CASE.new_tokens) for prompt in CASE.prompts]
            replies = await asyncio.gather(*asked)
            assert [reply.token_ids for reply in replies] == [prompt.generated for prompt in CASE.prompts]

    asyncio.run(scenario())


def test_exo_15_a_client_that_goes_stops_the_work_for_it(ring: StandingRing) -> None:
    before = requests(ring)
    for _ in range(3):
        with plain(zmq.DEALER, ring.endpoint) as dealer:
            for number in range(SLOTS + 2):
                body = {"token_ids": [5], "max_tokens": 4000, "ignore_eos": True, "id": str(number)}
                dealer.send_multipart([b"", json.dumps(body).encode()])
            ring.until(
                lambda: ring.head.node.status()["requests"]["pending"] == SLOTS + 2, "all requests are there"
            )
        rest(ring)
    after = requests(ring)
    assert after["cancelled"] - before["cancelled"] == 3 * (SLOTS + 2)
    assert after["completion_tokens"] == before["completion_tokens"]
    all_right(ring)


def test_cas_02_clients_that_leave_at_random_under_load_harm_nobody(ring: StandingRing) -> None:
    before = requests(ring)
    draw = random.Random(11)
    right = 0

    async def one(client: AsyncClient, prompt: Any) -> None:
        nonlocal right
        reply = await client.generate(prompt.ids, max_tokens=CASE.new_tokens)
        assert reply.token_ids == prompt.generated
        right += 1

    async def visit() -> None:
        async with AsyncClient(ring.endpoint, timeout_s=60) as client:
            asked = [asyncio.create_task(one(client, draw.choice(CASE.prompts))) for _ in range(4)]
            for task in asked:
                if draw.random() < 0.5:
                    await asyncio.sleep(draw.random() * 0.05)
                    task.cancel()
            if draw.random() < 0.3:
                # The rest is lost with the connection.
                return
            for result in await asyncio.gather(*asked, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError), result

    async def scenario() -> None:
        for _ in range(4):
            await asyncio.gather(*(visit() for _ in range(6)))

    asyncio.run(scenario())
    assert right > 10
    rest(ring)
    after = requests(ring)
    ended = sum(after[name] - before[name] for name in ("finished", "failed", "cancelled"))
    assert ended == after["accepted"] - before["accepted"]
    assert after["failed"] == before["failed"]
    all_right(ring)


def test_cas_01_a_reply_that_came_too_late_is_nobodys(ring: StandingRing) -> None:
    with Client(ring.endpoint, timeout_s=0.05) as client:
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(UnreachableError, match=r"no reply within 0\.05 s"):
                client.generate([5], max_tokens=400, ignore_eos=True)
            assert time.monotonic() - started < 20
            client._timeout_s = 30
            assert client.generate(PROMPT.ids, max_tokens=5).token_ids == PROMPT.generated[:5]
            client._timeout_s = 0.05

    async def scenario() -> None:
        async with AsyncClient(ring.endpoint, timeout_s=30) as client:
            for _ in range(5):
                late = asyncio.create_task(client.generate([5], max_tokens=400, ignore_eos=True))
                await asyncio.sleep(0.02)
                late.cancel()
                reply = await client.generate(PROMPT.ids, max_tokens=5)
                assert reply.token_ids == PROMPT.generated[:5]

    asyncio.run(scenario())
    rest(ring)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_ctrl_c_at_any_moment_ends_a_blocking_call(ring: StandingRing) -> None:
    """Also while sockets are being made or closed, and in the instant before a wait."""
    draw = random.Random(3)
    interrupted = 0
    for _ in range(150):
        timer = threading.Timer(draw.uniform(0.0, 0.008), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            with Client(ring.endpoint, timeout_s=60) as client:
                client.generate([5], max_tokens=4000, ignore_eos=True)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            timer.join()
    assert interrupted == 150
    rest(ring)
    all_right(ring)


def test_one_client_serves_many_requests_one_after_the_other(ring: StandingRing) -> None:
    before = requests(ring)
    with Client(ring.endpoint, timeout_s=30) as client:
        for prompt in CASE.prompts * 5:
            assert client.generate(prompt.ids, max_tokens=3).token_ids == prompt.generated[:3]
        assert client.status()["state"] == "open"
    after = requests(ring)
    assert after["finished"] - before["finished"] == 20
    assert after["completion_tokens"] - before["completion_tokens"] == 60


def test_the_library_finds_the_head_by_its_fleets_name(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (7, 5))
        async with fleet(tmp_path) as ring:
            # No node at all, and then none that serves.
            monkeypatch.setattr("cascadia_p2p.client.FIND_S", 1.5)
            async with AsyncClient(fleet=ring.name) as client:
                with pytest.raises(UnreachableError, match=f"no node of fleet '{ring.name}' answered by"):
                    await client.status()
            await ring.start(model, shard=1, mdns=True, peers=())
            await ring.until(lambda: bool(ring.sentences("ring_waits")), "the node waits for the other")
            # As long again as it takes a busy machine to hear of the node.
            deadline, said = time.monotonic() + 60, ""
            while "none of them takes clients yet" not in said:
                assert time.monotonic() < deadline, said
                async with AsyncClient(fleet=ring.name) as client:
                    with pytest.raises(UnreachableError) as caught:
                        await client.generate("hello")
                said = str(caught.value)
            monkeypatch.setattr("cascadia_p2p.client.FIND_S", 60.0)
            await ring.start(model, shard=0, mdns=True, peers=())
            head = await ring.open()

            def blocking() -> tuple[int, ...]:
                with Client(fleet=ring.name, timeout_s=30) as client:
                    return client.generate(PROMPT.ids, max_tokens=5).token_ids

            assert await asyncio.to_thread(blocking) == PROMPT.generated[:5]
            async with AsyncClient(fleet=ring.name, timeout_s=30, retry=False) as client:
                asked = [client.generate(PROMPT.ids, max_tokens=5) for _ in range(4)]
                assert {reply.token_ids for reply in await asyncio.gather(*asked)} == {PROMPT.generated[:5]}
                # A head that was found and is lost is looked for anew.
                port = head.client.port
                await head.stop()
                with monkeypatch.context() as patch:
                    patch.setattr("cascadia_p2p.client.CONNECT_S", 0.5)
                    with pytest.raises(UnreachableError):
                        await client.generate(PROMPT.ids)
                again = await ring.start(model, shard=0, mdns=True, peers=())
                await ring.open()
                assert again.client.port != port
                reply = await client.generate(PROMPT.ids, max_tokens=5)
                assert reply.token_ids == PROMPT.generated[:5]

    async def bounded() -> None:
        async with asyncio.timeout(90):
            await scenario()

    asyncio.run(bounded())
