"""A compressed export on several processes gives the tokens that one node gives, alone and beside others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.fleet import fleet
from fixtures.compressed import export_sample, load_compressed

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.config import Config
from cascadia_p2p.local import LocalRing
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import GenerateReply

NODES = 5
NEW_TOKENS = 48
PROMPTS = [prompt.ids for prompt in load_compressed("inkling").prompts]
OTHERS = [tuple(reversed(ids[:19])) for ids in PROMPTS]
"""Company whose prompts nobody else asks."""

Answers = list[tuple[tuple[int, ...], str]]


def texts(replies: list[GenerateReply]) -> Answers:
    return [(tuple(reply.token_ids), reply.text) for reply in replies]


async def ask_alone(client: AsyncClient) -> Answers:
    """One prompt behind the other."""
    return texts([await client.generate(ids, max_tokens=NEW_TOKENS) for ids in PROMPTS])


async def ask_together(client: AsyncClient) -> Answers:
    """All prompts at once, among others."""
    asked = [client.generate(ids, max_tokens=NEW_TOKENS) for ids in (*PROMPTS, *OTHERS)]
    return texts(list(await asyncio.gather(*asked)))[: len(PROMPTS)]


async def ask_both(endpoint: Endpoint) -> tuple[Answers, Answers]:
    async with AsyncClient(endpoint, timeout_s=120.0) as client:
        return await ask_alone(client), await ask_together(client)


async def one_node(model: Path, state: Path) -> Answers:
    async with fleet(state) as ring:
        await ring.start(model, shard=0)
        head = await ring.open()
        async with AsyncClient(head.client, timeout_s=120.0) as client:
            return await ask_alone(client)


def test_processes_give_the_tokens_of_one_node(tmp_path: Path) -> None:
    """In the precision that is usual; its answers to these prompts are the reference's, too."""
    assert Config().precision == "fine"
    one = asyncio.run(one_node(export_sample("inkling", tmp_path / "one", (12,)), tmp_path / "one"))
    model = export_sample("inkling", tmp_path / "several", (2, 3, 1, 3, 3))
    with LocalRing(model, tmp_path, flags=("--threads", "1", "--slots", "8", "--context", "512")) as ring:
        for shard in range(NODES):
            ring.start_node("--shard", str(shard))
        served = ring.wait_for("clients_served", 240.0)
        endpoint = Endpoint.parse(str(served.fields["endpoint"]))
        alone, together = asyncio.run(ask_both(endpoint))
    assert alone == one
    assert together == one
    assert [ids for ids, _ in one] == [
        prompt.generated[:NEW_TOKENS] for prompt in load_compressed("inkling").prompts
    ]
    assert all(node.process.returncode == 0 for node in ring.nodes), ring.tail()
