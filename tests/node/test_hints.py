"""Addresses that are only hinted at: how many are dialled, and that a true one is reached among them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster.conftest import shards as shards  # a fixture
from cluster.fleet import fleet

from cascadia_p2p.discovery.traffic import ALL_BURST, BURST, LEAST, RATE, Allowance
from cascadia_p2p.node.control import MAX_UNANSWERED
from cascadia_p2p.types import Endpoint


def dialled() -> int:
    """Addresses that nodes in this loop dial now."""
    return sum(task.get_name().startswith("dial-") for task in asyncio.all_tasks())


def test_a_true_address_is_reached_among_many_that_lead_nowhere(shards, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    async def run() -> None:
        async with fleet(tmp_path) as made:
            model = shards("tiny12", (6, 6))
            first = await made.start(model, shard=0)
            for port in range(1, 3 * MAX_UNANSWERED):
                first.node._plane.dial(Endpoint("127.0.0.1", port))
                await asyncio.sleep(0)
            assert dialled() <= MAX_UNANSWERED + 1
            second = await made.start(model, shard=1, peers=())
            first.node._plane.dial(second.control)
            for port in range(3 * MAX_UNANSWERED, 5 * MAX_UNANSWERED):
                first.node._plane.dial(Endpoint("127.0.0.1", port))
                await asyncio.sleep(0.005)
            await made.open()

    asyncio.run(run())


def test_one_machine_is_not_read_beyond_its_allowance_and_others_are() -> None:
    now = [100.0]
    allowance = Allowance(lambda: now[0])
    taken = sum(allowance.take("10.0.0.1", 100) for _ in range(10_000))
    assert taken == BURST // LEAST
    assert allowance.take("10.0.0.2", 1000)
    now[0] += 10.0
    later = sum(allowance.take("10.0.0.1", 1000) for _ in range(10_000))
    assert later == pytest.approx(min(BURST, 10 * RATE) // 1000, abs=1)


def test_forged_sources_share_what_is_taken_from_all() -> None:
    allowance = Allowance(lambda: 7.0)
    taken = sum(allowance.take(f"10.0.{each // 250}.{each % 250}", 1000) for each in range(100_000))
    assert taken == ALL_BURST // 1000
    assert len(allowance._sources) <= 256
