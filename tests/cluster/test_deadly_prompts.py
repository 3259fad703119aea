"""A request that kills whatever process computes it ends alone, where such processes are started again."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster.conftest import Shards
from cluster.fleet import Fleet, Member, ask, fleet
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.local import HOST, LocalNode, LocalRing, free_ports
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
LENGTH = 300
SEED = 666
CRASHING = (sys.executable, str(Path(__file__).with_name("crashing.py")), str(SEED))

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes end otherwise there")


class Loop:
    """`while true; do join; done` for one shard: a process that can be killed by what it computes.

    Args:
        ring: starts the processes.
        flags: of the node.
    """

    def __init__(self, ring: LocalRing, *flags: str) -> None:
        self._ring, self._flags = ring, flags
        self.started: list[LocalNode] = []

    async def run(self) -> None:
        port = None
        while True:
            node = self._ring.start_node(*self._flags, port=port, program=CRASHING)
            self.started.append(node)
            port = node.port
            while node.process.poll() is None:  # noqa: ASYNC110 - processes have no event
                await asyncio.sleep(0.02)


def claims(member: Member) -> list[str]:
    """Where the nodes that a member knows stand with their shards."""
    return [str(node["claim"]) for node in member.node.status()["nodes"]]  # type: ignore[union-attr,index,call-overload]


@contextlib.asynccontextmanager
async def looping(made: Fleet, model: Path, *flags: str, loops: int = 1) -> AsyncIterator[list[Loop]]:
    """Loops that go on until the block ends, beside the fleet's nodes."""
    common = ("--threads", "1", "--slots", "4", "--context", "512", "--no-mdns")
    peers = [flag for member in made.members for flag in ("--peer", str(member.control))]
    with LocalRing(model, made.root / "loops", fleet=made.name, flags=(*common, *peers, *flags)) as ring:
        found = [Loop(ring) for _ in range(loops)]
        tasks: list[asyncio.Task[None]] = []
        try:
            for loop in found:
                if tasks:
                    # They serve clients at the same port: the second is to meet the first as a head.
                    await made.until(lambda: "serving" in claims(made.members[0]), "the first has its place")
                tasks.append(asyncio.create_task(loop.run()))
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def read(client: AsyncClient, begun: asyncio.Event) -> tuple[int, ...]:
    """An innocent reader's ids."""
    ids: list[int] = []
    async for piece in client.stream(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True):
        ids += piece.token_ids
        if len(ids) > 5:
            begun.set()
    return tuple(ids)


async def deadly(client: AsyncClient) -> RequestError:
    """What becomes of the request that kills."""
    with pytest.raises(RequestError) as ended:
        await client.generate([5, 6], max_tokens=9, ignore_eos=True, temperature=0.5, seed=SEED)
    assert ended.value.code is ErrorCode.INTERNAL
    return ended.value


def test_a_request_that_kills_the_stage_that_computes_it_ends_alone(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (4, 4, 4))
            head = await ring.start(model, shard=0)
            await ring.start(model, shard=2)
            async with looping(ring, model, "--shard", "1") as (loop,):
                await ring.open()
                whole = (await ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
                begun = asyncio.Event()
                async with AsyncClient(head.client, timeout_s=200.0) as client:
                    readers = [asyncio.create_task(read(client, begun)) for _ in range(2)]
                    await begun.wait()
                    error = await deadly(client)
                    assert "a node was lost twice while it computed this request" in error.message
                    assert await asyncio.gather(*readers) == [whole] * 2
                    # What comes later waits for the node as well.
                    late = await client.generate(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                    assert late.token_ids == whole
                    # Where it lay there with another, a third loss decides.
                    assert 3 <= len(loop.started) <= 4

    asyncio.run(asyncio.wait_for(scenario(), 250))


def test_a_request_that_kills_the_heads_ends_alone_behind_the_second(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client comes back with it; the others, who come back as well, are not given up with it."""
    # However long a busy machine takes to start a process again.
    monkeypatch.setattr("cascadia_p2p.asking.RETURN_S", 90.0)

    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model, port = shards(CASE, (6, 6)), free_ports()
            tail = await ring.start(model, shard=1)
            flags = ("--shard", "0", "--client-port", str(port))
            async with looping(ring, model, *flags, loops=2) as loops:
                whole = ["loaded", "serving", "serving"]
                await ring.until(lambda: sorted(claims(tail)) == whole, "a head and its standby")
                async with AsyncClient(Endpoint(HOST, port), timeout_s=200.0) as client:
                    asked = await client.generate(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                    begun = asyncio.Event()
                    readers = [asyncio.create_task(read(client, begun)) for _ in range(2)]
                    waiting = client.generate(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                    readers.append(asyncio.ensure_future(_ids(waiting)))
                    await begun.wait()
                    error = await deadly(client)
                    assert "2 heads were lost while they had this request" in error.message
                    assert await asyncio.gather(*readers) == [asked.token_ids] * 3
                # Both heads were lost once, and neither again.
                while (starts := [len(loop.started) for loop in loops]) != [2, 2]:
                    assert max(starts) <= 2
                    await asyncio.sleep(0.05)
                assert not tail.task.done()

    asyncio.run(asyncio.wait_for(scenario(), 250))


async def _ids(asked: object) -> tuple[int, ...]:
    reply = await asked  # type: ignore[misc]
    return tuple(reply.token_ids)
