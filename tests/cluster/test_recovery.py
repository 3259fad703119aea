"""A ring that loses a node and goes on: the answers are those of an undisturbed run, no token twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from cluster.conftest import Shards
from cluster.fleet import Member, ask, fleet, slowed
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.config import Limits
from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.local import HOST, free_ports
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
LENGTH = 300


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await scenario

    asyncio.run(bounded())


async def waited(asked: Coroutine[Any, Any, object]) -> tuple[float, Exception | None]:
    """How long a request took, in seconds, and how it failed."""
    started, error = time.monotonic(), None
    try:
        await asked
    except RequestError as failure:
        error = failure
    return time.monotonic() - started, error


async def die(member: Member) -> None:
    """End a node without a goodbye, as a lost cable or a kill would."""
    member.task.cancel()
    await asyncio.gather(member.task, return_exceptions=True)


def test_pet_01_a_reader_sees_a_notice_and_the_same_tokens_wherever_the_node_dies(
    shards: Shards, tmp_path: Path
) -> None:
    """At the first token, at the second, and later; each time another node takes the shard."""

    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (4, 4, 4))
            head = await ring.start(model, shard=0)
            holder = await ring.start(model, shard=1)
            await ring.start(model, shard=2)
            await ring.open()
            whole = (await ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
            async with AsyncClient(head.client, timeout_s=60.0) as client:
                for at in (1, 2, 50):
                    standby = await ring.start(model, shard=1)
                    await ring.until(lambda: standby.state == "standby", "a standby")  # noqa: B023
                    ids: list[int] = []
                    notices: list[str] = []
                    # Most of it is still to come when the node dies, however late that is seen to.
                    slow = contextlib.ExitStack()
                    slow.enter_context(slowed(head))
                    answer = client.stream(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                    async for piece in answer:
                        ids += piece.token_ids
                        notices += [piece.notice] if piece.notice is not None else []
                        if len(ids) >= at and not holder.task.done():
                            await die(holder)
                            slow.close()
                    assert tuple(ids) == answer.reply.token_ids == whole
                    assert len(notices) == 1
                    assert "the answer goes on as soon as the ring does" in notices[0]
                    holder = standby
            assert head.node.status()["requests"]["failed"] == 0
            counted = head.node.measure()
            assert (counted.ring.opened, counted.ring.lost, counted.ring.recovered) == (4, 3, 3)
            assert counted.ring.outage_s > 0
            assert counted.head is not None
            assert counted.head.meter.generated_tokens == 4 * len(whole), "each is counted once"
            assert counted.head.meter.first_token.buckets()[-1] == ("+Inf", 4)

    run(scenario())


def test_dll_02_a_ring_that_stays_incomplete_tells_its_clients_in_the_end(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (6, 6))
            head = await ring.start(model, shard=0, limits=Limits(recovery_s=1.0))
            tail = await ring.start(model, shard=1)
            await ring.open()
            with slowed(head):
                running = [asyncio.create_task(ask(head, PROMPT.ids, max_tokens=490)) for _ in range(6)]
                await ring.until(lambda: head.node.status()["requests"]["pending"] == 6, "six wait")
                await die(tail)
            await ring.until(lambda: head.node.status()["missing"] == [1], "the loss is noticed")
            await asyncio.sleep(0.6)
            late = asyncio.create_task(waited(ask(head, PROMPT.ids, max_tokens=CASE.new_tokens)))
            for error in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(error, RequestError)
                assert error.code is ErrorCode.RING_INCOMPLETE
                assert "missing: shard 1" in error.message
                assert "nothing took its place within 1 s" in error.message
            await ring.start(model, shard=1)
            seconds, error = await late
            assert error is None or seconds >= 1.0, "its own wait began when it came"
            await ring.open()
            reply = await ask(head, PROMPT.ids, max_tokens=CASE.new_tokens)
            assert reply.token_ids == PROMPT.generated

    run(scenario())


@pytest.mark.parametrize("settings", [{"slots": 1}, {"context": 256}])
def test_a_standby_that_holds_less_than_is_in_use_does_not_take_over(
    shards: Shards, tmp_path: Path, settings: dict[str, int]
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (6, 6))
            head = await ring.start(model, shard=0)
            holder = await ring.start(model, shard=1)
            await ring.open()
            whole = (await ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
            small = await ring.start(model, shard=1, **settings)
            await ring.until(lambda: small.state == "standby", "a standby")
            # Enough that some still run when the node has ended.
            asked = [ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True) for _ in range(16)]
            with slowed(head):
                waiting = [asyncio.create_task(each) for each in asked]
                await ring.until(lambda: head.node.status()["requests"]["pending"] == 16, "all are there")
                await ring.until(lambda: head.node.status()["requests"]["running"] == 4, "four run")
                await die(holder)
            await ring.until(lambda: head.node.status()["missing"] == [1], "the loss is noticed")
            await asyncio.sleep(0.5)
            await ring.until(lambda: "are in use" in str(head.node.status()["waiting_for"]), "said why")
            await ring.start(model, shard=1)
            assert [reply.token_ids for reply in await asyncio.gather(*waiting)] == [whole] * 16

    run(scenario())


def four_run(head: Member) -> bool:
    """Whether of six requests those that find a slot have started."""
    requests: Any = head.node.status()["requests"]
    return (requests["running"], requests["queued"]) == (4, 2)


def test_a_node_that_is_asked_to_end_hands_its_streams_to_its_standby(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (6, 6))
            head = await ring.start(model, shard=0)
            holder = await ring.start(model, shard=1)
            await ring.open()
            whole = (await ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
            standby = await ring.start(model, shard=1)
            await ring.until(lambda: standby.state == "standby", "a standby")
            asked = [ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True) for _ in range(6)]
            with slowed(head):
                waiting = [asyncio.create_task(each) for each in asked]
                await ring.until(lambda: four_run(head), "four run and two wait")
                holder.node.drain("the test asks it")
                await asyncio.wait_for(holder.task, 60.0)
                assert not any(each.done() for each in waiting), "nobody had to be waited for"
            assert [reply.token_ids for reply in await asyncio.gather(*waiting)] == [whole] * 6

    run(scenario())


def test_a_node_without_a_standby_finishes_what_runs_and_the_rest_waits_for_its_return(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (6, 6))
            head = await ring.start(model, shard=0)
            holder = await ring.start(model, shard=1)
            await ring.open()
            asked = [ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True) for _ in range(6)]
            with slowed(head):
                waiting = [asyncio.create_task(each) for each in asked]
                await ring.until(lambda: four_run(head), "four run and two wait")
                holder.node.drain("the test asks it")
            await asyncio.wait_for(holder.task, 60.0)
            # Four ran in the slots; their last words may still be on their way.
            await ring.until(lambda: sum(each.done() for each in waiting) >= 4, "four answers")
            assert sum(each.done() for each in waiting) == 4
            await ring.start(model, shard=1)
            assert len({reply.token_ids for reply in await asyncio.gather(*waiting)}) == 1
            # The head takes nothing more, and goes when what runs is answered.
            slow = contextlib.ExitStack()
            slow.enter_context(slowed(head))
            last = [asyncio.create_task(ask(head, PROMPT.ids, max_tokens=LENGTH)) for _ in range(6)]
            await ring.until(lambda: head.node.status()["requests"]["pending"] == 6, "six wait")
            await ring.open()
            # Connected before, so that the head can not be gone by the time it is asked.
            async with AsyncClient(head.client, retry=False) as early:
                await early.status()
                await ring.until(lambda: head.node.status()["requests"]["queued"] == 2, "four run")
                head.node.drain("the test asks it")
                with pytest.raises(RequestError, match="its head takes nothing new") as told:
                    await early.generate(PROMPT.ids)
                slow.close()
            assert told.value.code is ErrorCode.RING_INCOMPLETE
            await asyncio.wait_for(head.task, 60.0)
            ends = await asyncio.gather(*last, return_exceptions=True)
            assert sum(isinstance(end, RequestError) for end in ends) == 2, ends

    run(scenario())


def test_a_head_that_is_asked_to_end_answers_what_it_has_just_taken(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            head = await ring.start(shards(CASE, (12,)), shard=0)
            await ring.open()
            whole = (await ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
            await asyncio.sleep(0.2)
            with slowed(head, 0.005):
                asked = asyncio.create_task(ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True))
                # Not by ticks of the node: the last one knew of nothing that runs.
                while head.node.status()["requests"]["running"] != 1:  # type: ignore[index,call-overload]  # noqa: ASYNC110
                    await asyncio.sleep(0)
                head.node.drain("the test asks it")
            assert (await asked).token_ids == whole

    run(scenario())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}])
def test_when_the_head_dies_its_standby_goes_on_with_the_answers(
    shards: Shards, tmp_path: Path, options: dict[str, float]
) -> None:
    """The library comes back by itself, with what it has: the reader sees nothing but a pause."""

    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model, port = shards(CASE, (6, 6)), free_ports()
            head = await ring.start(model, shard=0, client_port=port)
            await ring.start(model, shard=1, client_port=port)
            await ring.open()
            spare = await ring.start(model, shard=0, client_port=port)
            await ring.until(lambda: spare.state == "standby", "a standby of the head")
            ids: list[int] = []
            numbers: list[int] = []
            async with AsyncClient(head.client, timeout_s=60.0) as client:
                whole = client.generate(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                answer = client.stream(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True, **options)  # type: ignore[arg-type]
                waiting = asyncio.create_task(whole)
                async for piece in answer:
                    ids += piece.token_ids
                    numbers.append(piece.seq)
                    if len(ids) >= 20 and not head.task.done():
                        await die(head)
                assert answer.reply.token_ids == tuple(ids)
                assert len(ids) == LENGTH
                assert numbers == list(range(1, len(numbers) + 1))
                seed = {"seed": answer.reply.seed} if options else {}
                again = await ask(spare, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True, **options, **seed)
                assert again.token_ids == tuple(ids)
                greedy = await ask(spare, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                assert (await waiting).token_ids == greedy.token_ids

    run(scenario())


def test_a_client_port_that_the_head_before_is_about_to_leave_is_waited_for(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            with socket.socket() as before:
                before.bind((HOST, 0))
                before.listen()
                port = before.getsockname()[1]
                head = await ring.start(shards(CASE, (12,)), shard=0, client_port=port)
                await ring.until(lambda: bool(ring.sentences("ring_open")), "an open ring")
                await asyncio.sleep(0.3)
                assert not head.task.done()
            await ring.until(lambda: bool(ring.sentences("clients_served")), "an open door")
            assert (await ask(Endpoint(HOST, port), PROMPT.ids, max_tokens=4)).token_ids

    run(scenario())


def test_without_a_standby_the_head_itself_goes_on_when_it_is_back(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model, port = shards(CASE, (6, 6)), free_ports()
            head = await ring.start(model, shard=0, client_port=port)
            await ring.start(model, shard=1, client_port=port)
            await ring.open()
            whole = (await ask(head, PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
            ids: list[int] = []
            async with AsyncClient(head.client, timeout_s=60.0) as client:
                answer = client.stream(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
                async for piece in answer:
                    ids += piece.token_ids
                    if len(ids) >= 20 and not head.task.done():
                        await die(head)
                        await ring.start(model, shard=0, client_port=port)
                assert answer.reply.token_ids == tuple(ids) == whole

    run(scenario())
