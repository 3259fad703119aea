"""What earlier prompts and answers began with is not computed again, and nobody's tokens change by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.conftest import Shards
from cluster.fleet import fleet
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.wire.client import GenerateReply

CASE = load_case("tiny12")
LONG = CASE.prompts[3]
BLOCK = 64


async def converse(model: Path, root: Path, prefixes: int) -> tuple[list[GenerateReply], dict[str, int]]:
    """The same prompt three times, the third time beside itself; then the next turn of that conversation."""
    async with fleet(root) as ring:
        for _ in range(3):
            await ring.start(model, prefixes=prefixes)
        head = await ring.open()
        async with AsyncClient(head.client, timeout_s=120.0) as client:
            replies = [await client.generate(LONG.ids, max_tokens=CASE.new_tokens) for _ in range(2)]
            asked = [client.generate(LONG.ids, max_tokens=CASE.new_tokens) for _ in range(3)]
            replies += await asyncio.gather(*asked)
            turn = [*LONG.ids, *LONG.generated, 7, 8]
            replies += [await client.generate(turn, max_tokens=CASE.new_tokens, ignore_eos=True)]
        counted = head.node.status()["prefixes"]
        assert isinstance(counted, dict)
        return replies, {name: int(str(value)) for name, value in counted.items()}


def test_a_prompt_that_is_known_is_not_computed_again(shards: Shards, tmp_path: Path) -> None:
    model = shards(CASE, (5, 1, 6))
    kept, counts = asyncio.run(converse(model, tmp_path / "kept", 8))
    alone, none = asyncio.run(converse(model, tmp_path / "alone", 0))
    assert [reply.token_ids for reply in kept] == [reply.token_ids for reply in alone]
    assert all(reply.token_ids == LONG.generated for reply in kept[:5])
    whole = (len(LONG.ids) - 1) // BLOCK * BLOCK
    turn = (len(LONG.ids) + len(LONG.generated) - 1) // BLOCK * BLOCK
    assert whole > 0
    assert [reply.usage.cached_tokens for reply in kept] == [0, whole, whole, whole, whole, turn]
    assert all(reply.usage.cached_tokens == 0 for reply in alone)
    assert (counts["hits"], counts["misses"], counts["tokens_reused"]) == (5, 1, 4 * whole + turn)
    assert (none["hits"], none["keeps"], none["entries"]) == (0, 0, 0)
