"""Requests that take long to be read: so many at a time, and the rest is refused at once."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import zmq.asyncio
from test_coming_back import dealer, run, send
from test_head_service import DEADLINE_S, Ring, door, heard, until

from cascadia_p2p.errors import ErrorCode
from cascadia_p2p.node import reading as reading_module
from cascadia_p2p.node.answers import Answer, AnswerDesk, memory_of
from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.reading import LARGE_BYTES, READERS, READING_BYTES, RETRY_S, Reading
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, StreamRequest
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.client import GenerateRequest, decode_request

QUEUE = 6


class Desk:
    """All requests are long, and none is read before the test says so."""

    def __init__(self) -> None:
        self.read: list[str | None] = []
        self.go_on = threading.Event()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    made, accept = Desk(), AnswerDesk.accept

    def slowly(desk: AnswerDesk, request: GenerateRequest, stream: StreamId) -> tuple[StreamRequest, Answer]:
        made.read.append(request.id)
        assert made.go_on.wait(DEADLINE_S)
        return accept(desk, request, stream)

    monkeypatch.setattr(AnswerDesk, "is_long", lambda *_: True)
    monkeypatch.setattr(AnswerDesk, "accept", slowly)
    yield made
    made.go_on.set()


def test_what_is_still_read_counts_as_queued(desk: Desk) -> None:
    async def scenario() -> None:
        ring = Ring()
        ring.overload = HeadConductor(Scheduler(Policy(queue_limit=QUEUE)), lambda _: None).overload
        async with door(ring=ring) as (_, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                for number in range(QUEUE + 3):
                    await send(socket, id=str(number), key=None)
                for number in range(QUEUE, QUEUE + 3):
                    told = await heard(socket)
                    assert (told["id"], told["error"]["code"]) == (str(number), "overloaded")
                    assert told["error"]["retry_after_s"] > 0
                assert ring.service.pending == QUEUE
                desk.go_on.set()
                await until(lambda: len(ring.streams) == QUEUE)
                await until(lambda: not ring.service._reading)
                await send(socket, id="later", key=None)
                await until(lambda: len(ring.streams) == QUEUE + 1)

    run(scenario())


def test_nobody_reads_the_request_of_a_client_that_has_gone(desk: Desk) -> None:
    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with zmq.asyncio.Context() as context:
                with dealer(context, endpoint) as socket:
                    for number in range(READERS + 3):
                        await send(socket, id=str(number), key=None)
                    await until(lambda: ring.service.pending == READERS + 3)
                    await until(lambda: len(desk.read) == READERS)
                await until(lambda: not ring.service.pending)
                desk.go_on.set()
                await until(lambda: not ring.service._reading)
                assert len(desk.read) == READERS
                assert not ring.streams

    run(scenario())


def test_what_a_prompt_was_read_from_is_not_kept_while_it_is_answered(desk: Desk) -> None:
    desk.go_on.set()

    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, token_ids=None, prompt="much", id="a", held=[2, 3])
                stream = await ring.stream()
                ((_, pending),) = ring.service._pending
                assert (pending.request.prompt, pending.request.held, pending.request.id) == (None, (), "a")
                assert pending.answer is not None
                assert pending.answer.request is pending.request
                assert ring.streams[stream].request.held == (2, 3)

    run(scenario())


def test_a_request_that_is_read_counts_by_the_memory_that_it_takes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"a": [{"b": 1}] * 3000}]
    text = "x" * len(json.dumps(tools))
    monkeypatch.setattr(reading_module, "READING_BYTES", 10 * len(text))

    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                asked = {"token_ids": None, "key": None}
                chat = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
                await send(socket, **asked, prompt=text, id="first")
                await send(socket, **asked, **chat, id="objects")
                await send(socket, **asked, prompt=text, id="as long")
                told = await heard(socket)
                assert (told["id"], told["error"]["code"]) == ("objects", "overloaded")
                await until(lambda: len(desk.read) == 2)
                assert sorted(map(str, desk.read)) == ["as long", "first"]
                assert ring.service.pending == 2

    run(scenario())


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [*range(300, 200_300)], "held": [*range(300, 100_300)]},
        {"prompt": "long " * 200_000},
        {"prompt": "漢" * 200_000},
        {"messages": [{"role": "user", "content": "x" * 300}] * 3000},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": [{}] * 60_000}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": [{"name": "b"}] * 30_000}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [["x" * 20]]}}]}
            ]
            * 4000
        },
    ],
)
def test_the_memory_of_a_request_is_told_nearly(fields: dict[str, object]) -> None:
    data = json.dumps(fields).encode()
    tracemalloc.start()
    try:
        decode_request(data)  # what is made once
        before, _ = tracemalloc.get_traced_memory()
        request = decode_request(data)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert isinstance(request, GenerateRequest)
    assert taken / 2 < memory_of(request) < taken * 2


def test_the_bytes_of_what_is_read_are_bounded() -> None:
    async def scenario() -> None:
        reading, ended = Reading(lambda _: None), asyncio.Event()

        async def read() -> None:
            await ended.wait()

        assert reading.refusal(2 * READING_BYTES) is None, "one is read, whatever its size"
        reading.start(read(), READING_BYTES - 9)
        assert reading.refusal(9) is None
        refusal = reading.refusal(10)
        assert refusal is not None
        assert (refusal.code, refusal.retry_after_s) == (ErrorCode.OVERLOADED, RETRY_S)
        ended.set()
        await until(lambda: not reading)
        assert reading.refusal(10) is None
        await reading.close()

    run(scenario())


def test_large_requests_are_read_one_at_a_time_and_small_ones_beside_them() -> None:
    async def scenario() -> None:
        reading = Reading(lambda _: None)
        go_on, at_once, most, done = threading.Event(), 0, 0, list[str]()

        def slowly() -> bool:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            assert go_on.wait(DEADLINE_S)
            at_once -= 1
            return True

        async def read(name: str, work: Callable[[], bool]) -> None:
            assert await reading.read(work, lambda: True)
            done.append(name)

        for number in range(READERS + 1):
            reading.start(read(f"large {number}", slowly), LARGE_BYTES + 1)
        reading.start(read("small", lambda: True), LARGE_BYTES)
        await until(lambda: done == ["small"])
        go_on.set()
        await until(lambda: len(done) == READERS + 2)
        assert most == 1
        await reading.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
