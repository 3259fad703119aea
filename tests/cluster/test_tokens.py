"""The same prompt gives the reference's tokens on any number of nodes, alone and beside others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from cluster.conftest import Shards
from cluster.fleet import fleet
from fixtures.reference import Case, load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.local import LocalRing
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import GenerateReply


async def ask_all(case: Case, endpoint: Endpoint) -> list[GenerateReply]:
    """All prompts of a case at once, each twice, over one connection."""
    async with AsyncClient(endpoint, timeout_s=120.0) as client:
        asked = [
            client.generate(prompt.ids, max_tokens=case.new_tokens)
            for prompt in case.prompts
            for _ in range(2)
        ]
        return list(await asyncio.gather(*asked))


def check(case: Case, replies: list[GenerateReply]) -> None:
    for index, reply in enumerate(replies):
        prompt = case.prompts[index // 2]
        assert reply.token_ids == prompt.generated
        assert reply.finish_reason == ("stop" if prompt.stopped else "length")
        assert reply.usage.prompt_tokens == len(prompt.ids)
        assert reply.usage.completion_tokens == len(prompt.generated)


@pytest.mark.parametrize(
    ("name", "split", "spelling"),
    [
        ("tiny12", (12,), "B"),
        ("tiny12-heads", (5, 1, 6), "A"),
        ("tiny12-log", (1, 7, 4), "B"),
        ("tiny12-noeos", (3, 9), "B"),
        ("tiny12-eos", (4, 4, 4), "A"),
        ("tiny12-bf16", (6, 6), "B"),
        ("tiny12", (1,) * 12, "A"),
    ],
)
def test_twelve_layers_give_the_reference_tokens(
    name: str, split: tuple[int, ...], spelling: str, shards: Shards, tmp_path: Path
) -> None:
    case = load_case(name)
    model = shards(case, split, spelling)

    async def run() -> list[GenerateReply]:
        async with fleet(tmp_path) as ring:
            for _ in split:
                await ring.start(model)
            head = await ring.open()
            return await ask_all(case, head.client)

    check(case, asyncio.run(run()))


def test_66_layers_on_eleven_processes_started_in_random_order(shards: Shards, tmp_path: Path) -> None:
    case = load_case("tiny66")
    model = shards(case, (6,) * 11)
    order = list(range(11))
    random.Random(7).shuffle(order)
    with LocalRing(model, tmp_path, flags=("--threads", "1")) as ring:
        for shard in order:
            ring.start_node("--shard", str(shard))
        loaded: dict[int, str] = {}
        endpoint = opened = ""
        for event in ring.events(240.0):
            if event.event == "shard_loaded":
                loaded[event.node] = str(event.fields["timestamp"])
            elif event.event == "clients_served":
                endpoint = str(event.fields["endpoint"])
            elif event.event == "ring_open":
                opened = opened or str(event.fields["timestamp"])
            # In whatever order their lines are read.
            if endpoint and opened and len(loaded) == 11:
                break
        assert len(loaded) == 11, ring.tail()
        assert seconds(opened) - max(map(seconds, loaded.values())) < 30.0
        check(case, asyncio.run(ask_all(case, Endpoint.parse(endpoint))))
    assert all(node.process.returncode == 0 for node in ring.nodes), ring.tail()


def seconds(timestamp: str) -> float:
    """Seconds within the day of an ISO timestamp."""
    hours, minutes, rest = timestamp.split("T")[1].rstrip("Z").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)
