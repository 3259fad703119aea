"""Drawn tokens and scores over real sockets: the same on one node as on a ring of several."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster.conftest import Shards
from cluster.fleet import fleet
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient, Options
from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.wire.client import StreamPiece, TokenScore

CASE = load_case("tiny12-noeos")
PROMPTS = [prompt.ids for prompt in CASE.prompts[:4]]
TOKENS = 24
OPTIONS: tuple[Options, ...] = (
    {},
    {"temperature": 1.0, "seed": 2**64 - 1, "logprobs": 20},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 11},
    {"temperature": 5.0, "seed": 11, "logprobs": True},
    {"logprobs": 3},
)

Outcome = tuple[tuple[int, ...], int | None, tuple[TokenScore, ...] | None]


async def ask_all(client: AsyncClient) -> list[Outcome]:
    """Every prompt with all options, all at once, so that frames hold rows of several."""
    asked = [
        client.generate(ids, max_tokens=TOKENS, ignore_eos=True, **options)
        for ids in PROMPTS
        for options in OPTIONS
    ]
    return [(reply.token_ids, reply.seed, reply.logprobs) for reply in await asyncio.gather(*asked)]


async def on_nodes(root: Path, model: Path, nodes: int) -> list[Outcome]:
    async with fleet(root) as ring:
        for shard in range(nodes):
            await ring.start(model, shard=shard, slots=6)
        head = await ring.open()
        async with AsyncClient(head.client, timeout_s=120.0) as client:
            outcome = await ask_all(client)
            if nodes > 1:
                await again_by_the_seed_that_was_told(client)
                await pieces_hold_the_scores_of_the_reply(client)
                await refused(client)
    return outcome


async def again_by_the_seed_that_was_told(client: AsyncClient) -> None:
    first = await client.generate(PROMPTS[0], max_tokens=TOKENS, temperature=3.0)
    other = await client.generate(PROMPTS[0], max_tokens=TOKENS, temperature=3.0)
    assert first.seed is not None
    assert other.token_ids != first.token_ids
    again = await client.generate(PROMPTS[0], max_tokens=TOKENS, temperature=3.0, seed=first.seed)
    assert (again.token_ids, again.seed) == (first.token_ids, first.seed)


async def pieces_hold_the_scores_of_the_reply(client: AsyncClient) -> None:
    whole = await client.generate(PROMPTS[1], max_tokens=TOKENS, temperature=1.0, seed=5, logprobs=2)
    stream = client.stream(PROMPTS[1], max_tokens=TOKENS, temperature=1.0, seed=5, logprobs=2)
    async with stream:
        pieces: list[StreamPiece] = [piece async for piece in stream]
    scores = [score for piece in pieces for score in piece.logprobs or ()]
    assert tuple(scores) == whole.logprobs == stream.reply.logprobs
    assert tuple(score.token_id for score in scores) == whole.token_ids == stream.reply.token_ids
    assert stream.reply.seed == 5


async def refused(client: AsyncClient) -> None:
    with pytest.raises(RequestError, match="field 'top_p' goes with 'temperature' only") as caught:
        await client.generate(PROMPTS[0], top_p=0.5)
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_a_ring_of_four_draws_the_tokens_of_a_single_node(shards: Shards, tmp_path: Path) -> None:
    one = asyncio.run(on_nodes(tmp_path / "one", shards(CASE, (12,)), 1))
    four = asyncio.run(on_nodes(tmp_path / "four", shards(CASE, (3, 4, 4, 1)), 4))
    assert one == four
    for place, ids in enumerate(PROMPTS):
        mine = dict(enumerate(four[place * len(OPTIONS) : (place + 1) * len(OPTIONS)]))
        greedy = CASE.prompts[place].generated[:TOKENS]
        assert len(ids) > 0
        assert mine[0] == (greedy, None, None)
        assert mine[4][0] == greedy
        assert len({mine[i][0] for i in range(4)}) == 4
        assert [mine[i][1] for i in range(5)] == [None, 2**64 - 1, 11, 11, None]
        check_scores(mine[1], 20)
        check_scores(mine[3], 0)
        check_scores(mine[4], 3)
        for score in mine[4][2] or ():
            # The greedy token is the likeliest.
            assert score.top_logprobs is not None
            assert score.top_logprobs[0].token_id == score.token_id
            assert score.top_logprobs[0].logprob == score.logprob


def check_scores(outcome: Outcome, alternatives: int) -> None:
    ids, _, scores = outcome
    assert scores is not None
    assert tuple(score.token_id for score in scores) == ids
    for score in scores:
        named = score.top_logprobs or ()
        assert len(named) == alternatives
        assert [each.logprob for each in named] == sorted((each.logprob for each in named), reverse=True)
        assert all(each.logprob <= 0 for each in (score, *named))
        if named and score.logprob >= named[-1].logprob:
            assert (score.token_id, score.logprob) in [(each.token_id, each.logprob) for each in named]
