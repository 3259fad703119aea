"""RING-10: each stage in turn stops without ending, while many streams run on node processes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster.conftest import Shards
from fixtures.reference import Prompt, load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import ErrorCode, RequestError, UnreachableError
from cascadia_p2p.local import LocalRing

CASE = load_case("tiny12")
STREAMS = 40
TOKENS = 24
PATIENCE_S = 120.0


async def one(client: AsyncClient, prompt: Prompt, begun: asyncio.Event, notices: set[str]) -> str:
    """How one request ended; whatever came of its answer must be right."""
    ids: list[int] = []
    try:
        async with client.stream(prompt.ids, max_tokens=TOKENS) as answer:
            async for piece in answer:
                ids += piece.token_ids
                begun.set()
                notices |= {piece.notice} if piece.notice is not None else set()
                assert tuple(ids) == prompt.generated[: len(ids)]
    except RequestError as error:
        return "told" if error.code is ErrorCode.RING_INCOMPLETE else str(error)
    except UnreachableError:
        return "lost"
    assert tuple(ids) == prompt.generated
    return "finished"


async def all_at_once(
    endpoint: str,
    prompts: Sequence[Prompt],
    begun: asyncio.Event,
    stopped: asyncio.Event,
    notices: set[str],
) -> Counter[str]:
    """Streams that are asked one after another, again and again, until the stage has stopped and they end."""
    endings: Counter[str] = Counter()

    async def visitor(number: int) -> None:
        async with AsyncClient(endpoint, timeout_s=PATIENCE_S) as client:
            while True:
                ending = await one(client, prompts[number % len(prompts)], begun, notices)
                endings[ending] += 1
                if stopped.is_set() or ending != "finished":
                    return

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*map(visitor, range(STREAMS)))
    return endings


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_ring_10_a_stage_that_stops_ends_or_delays_every_stream_and_is_named(
    shards: Shards, tmp_path: Path
) -> None:
    model = shards(CASE, (4, 4, 4))
    with LocalRing(model, tmp_path, flags=("--threads", "1", "--slots", "16", "--queue", "64")) as ring:
        for shard in range(3):
            ring.start_node("--shard", str(shard))
        endpoint = str(ring.wait_for("clients_served", PATIENCE_S).fields["endpoint"])
        for stage in range(3):
            asyncio.run(stall(ring, endpoint, stage))
        # After all of it the ring answers as before.
        asyncio.run(settled(endpoint))


async def stall(ring: LocalRing, endpoint: str, stage: int) -> None:
    """Stop one stage for as long as makes it gone."""
    await settled(endpoint)
    async with AsyncClient(endpoint) as client:
        name = (await client.status())["stages"][stage]["node"][:8]
    for _ in ring.events(0.01):
        # What was said before is not about this.
        pass
    begun, stopped, notices = asyncio.Event(), asyncio.Event(), set[str]()
    crowd = asyncio.create_task(all_at_once(endpoint, CASE.prompts[:3], begun, stopped, notices))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.sleep(0.5)
    process = ring.nodes[stage].process
    process.send_signal(signal.SIGSTOP)
    stopped.set()
    try:
        # A silent node is gone after 2 s; who looks may be kept from it for longer.
        words = f"/{name} has sent no heartbeat for" if stage else f"/{name} has"
        lines = await asyncio.to_thread(closings, ring, [0] if stage else [1, 2], words)
        await asyncio.sleep(1.5)
    finally:
        process.send_signal(signal.SIGCONT)
    endings = await crowd
    assert endings.total() >= STREAMS
    assert set(endings) <= {"finished", "told", "lost"}
    # The head itself can tell nobody while it is stopped.
    assert stage == 0 or not endings["lost"]
    if stage:
        # The head blames it, and so do the clients whose answers paused.
        assert any(f"; shard {stage} is missing" in line for line in lines), lines
        assert any(f"/{name} has sent no heartbeat for" in notice for notice in notices), (notices, endings)
    else:
        assert all("the head is lost: " in line for line in lines), lines


def closings(ring: LocalRing, nodes: Sequence[int], words: str) -> list[str]:
    """Wait until each of these nodes has said with these words that its ring is closed: what they said."""
    found: dict[int, str] = {}
    for event in ring.events(PATIENCE_S):
        if event.event == "ring_closed" and event.node in nodes and words in event.message:
            found[event.node] = event.message
        if set(found) == set(nodes):
            return list(found.values())
    raise AssertionError(f"{words}: {found}; {ring.tail()}")


async def settled(endpoint: str) -> None:
    """The ring gives the right answer, within a while."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with AsyncClient(endpoint, timeout_s=PATIENCE_S) as client:
                reply = await client.generate(CASE.prompts[1].ids, max_tokens=TOKENS)
            assert reply.token_ids == CASE.prompts[1].generated
            return
        except (RequestError, UnreachableError):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.3)
