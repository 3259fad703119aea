"""A head that took another's place, with what the journal told it: what clients that come back are sent."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio
from test_head_service import DEADLINE_S, END, Ring, door, heard, until, words

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node import head as head_module
from cascadia_p2p.node.answers import Answer, AnswerDesk
from cascadia_p2p.node.kept import AnswerName, Asked, Record
from cascadia_p2p.ring.scheduler import Score, StreamRequest, Update
from cascadia_p2p.transport.client_connection import AsyncClientConnection
from cascadia_p2p.transport.curve import Domain, KeyPair, Keys
from cascadia_p2p.types import GREEDY, Endpoint, Instance, NodeId, Sampling, StreamId
from cascadia_p2p.wire.client import FinishReason, GenerateRequest, decode_reply
from cascadia_p2p.wire.messages import Journal, decode_control

KEY = "0f" * 16
PROMPT = (5, 6)
KNOWN = words("hello, world")
DRAWN = Sampling(0.8, 0, 1.0, 77)
STANDBY = (NodeId("cc" * 8), Instance("cd" * 8))


def scores_of(ids: list[int]) -> list[Score]:
    return [Score(-token / 8, ((token, -token / 8),)) for token in ids]


def record(
    *,
    client: str = "",
    sampling: Sampling = GREEDY,
    logprobs: int | None = None,
    finish: FinishReason | None = None,
) -> Record:
    asked = Asked(PROMPT, 128, (), frozenset({END}), sampling, logprobs)
    scores = [] if logprobs is None else scores_of(KNOWN)
    return Record(9, AnswerName(client, KEY), asked, list(KNOWN), scores, finish, 1, time.monotonic())


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(bounded())


async def send(socket: zmq.asyncio.Socket, **fields: object) -> None:
    body = {"token_ids": list(PROMPT), "stream": True, "key": KEY} | fields
    await socket.send_multipart([b"", json.dumps(body).encode()])


async def rest(socket: zmq.asyncio.Socket) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The pieces and the reply."""
    pieces = [await heard(socket)]
    while "final" not in pieces[-1]:
        pieces.append(await heard(socket))
    return pieces, pieces.pop()


def dealer(context: zmq.asyncio.Context, endpoint: Endpoint) -> zmq.asyncio.Socket:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(endpoint.tcp)
    return made


@pytest.fixture(params=[False, True], ids=["at once", "in a thread"])
def replayed_in_a_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Answers of which a client lacks this much are replayed beside the event loop."""
    if request.param:
        monkeypatch.setattr(head_module, "LONG_ANSWER", 0)
    return bool(request.param)


class Replays:
    """Those of long answers: none goes on before the test says so."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.go_on = threading.Event()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    made, replay = Replays(), Answer.replay

    def slowly(answer: Answer, ids: list[int], scores: list[Score], held: int) -> Answer:
        if held < len(ids):
            made.threads.append(threading.current_thread().name)
            assert made.go_on.wait(DEADLINE_S)
        return replay(answer, ids, scores, held)

    monkeypatch.setattr(head_module, "LONG_ANSWER", 0)
    monkeypatch.setattr(Answer, "replay", slowly)
    yield made
    made.go_on.set()


def test_the_door_serves_while_a_long_answer_is_replayed(replays: Replays) -> None:
    async def scenario() -> None:
        async with door(kept=[record(finish=FinishReason.LENGTH)]) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, id="long")
                await until(lambda: bool(replays.threads))
                await send(socket, id="short", key=None)
                ring.give(await ring.stream(), [END])
                _, reply = await rest(socket)
                assert reply["id"] == "short"
                replays.go_on.set()
                pieces, reply = await rest(socket)
                assert (reply["id"], reply["token_ids"]) == ("long", KNOWN)
                assert [token for piece in pieces for token in piece["token_ids"]] == KNOWN
                assert replays.threads[0].startswith("reader")
                assert len(replays.threads) == 1
                assert ring.service.counts.accepted == 1, "only the short one was computed"

    run(scenario())


@pytest.mark.parametrize("logprobs", [None, 1])
def test_what_was_replayed_counts_though_it_is_kept_no_more(replays: Replays, logprobs: int | None) -> None:
    asked = {} if logprobs is None else {"logprobs": logprobs}

    async def scenario() -> None:
        async with door(kept=[record(logprobs=logprobs)]) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, **asked)
                await until(lambda: bool(replays.threads))
                ring.service._kept.forget(AnswerName("", KEY))
                replays.go_on.set()
                stream = await ring.stream()
                assert ring.streams[stream].request.held == tuple(KNOWN)
                assert (await heard(socket))["token_ids"] == KNOWN

    run(scenario())


def test_who_asks_again_while_an_answer_is_replayed_gets_it_whole(replays: Replays) -> None:
    async def scenario() -> None:
        async with door(kept=[record()]) as (ring, endpoint):
            with (
                zmq.asyncio.Context() as context,
                dealer(context, endpoint) as first,
                dealer(context, endpoint) as last,
            ):
                await send(first, id="first")
                await until(lambda: len(replays.threads) == 1)
                await send(last, id="last")
                await until(lambda: len(replays.threads) == 2)
                told = await heard(first)
                assert (told["id"], told["error"]["code"]) == ("first", "cancelled")
                replays.go_on.set()
                ring.give(await ring.stream(), [END])
                pieces, reply = await rest(last)
                assert [token for piece in pieces for token in piece["token_ids"]] == [*KNOWN, END]
                assert (reply["id"], reply["token_ids"]) == ("last", [*KNOWN, END])
                assert not await first.poll(50)

    run(scenario())


def test_a_replay_ends_when_it_is_cancelled_or_its_client_goes_and_loses_nothing(replays: Replays) -> None:
    async def scenario() -> None:
        async with door(kept=[record()]) as (ring, endpoint):
            with zmq.asyncio.Context() as context:
                with dealer(context, endpoint) as socket:
                    await send(socket, id="a")
                    await until(lambda: len(replays.threads) == 1)
                    await socket.send_multipart([b"", b'{"op":"cancel","id":"a"}'])
                    told = [await heard(socket), await heard(socket)]
                    assert {each.get("cancelled") or each["error"]["code"] for each in told} == {
                        True,
                        "cancelled",
                    }
                    await send(socket, id="b")
                    await until(lambda: len(replays.threads) == 2)
                await until(lambda: not ring.service.pending)
                replays.go_on.set()
                await until(lambda: not ring.service._reading)
                assert not ring.streams
                with dealer(context, endpoint) as socket:
                    await send(socket, id="c")
                    assert (await heard(socket))["token_ids"] == KNOWN

    run(scenario())


def test_a_replay_that_the_head_has_no_room_for_is_refused(replays: Replays) -> None:
    async def scenario() -> None:
        async with door(kept=[record()]) as (ring, endpoint):
            ring.service._reading._overload = lambda _: RequestError(ErrorCode.OVERLOADED, "enough")
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, id="a")
                told = await heard(socket)
                assert (told["id"], told["error"]["code"]) == ("a", "overloaded")
                assert ring.service.pending == 0
                assert not replays.threads

    run(scenario())


@pytest.mark.usefixtures("replayed_in_a_thread")
@pytest.mark.parametrize(
    ("held", "goes_on_behind"),
    [
        ([], KNOWN),
        (KNOWN[:3], KNOWN),
        (KNOWN, KNOWN),
        ([*KNOWN, *words("!")], [*KNOWN, *words("!")]),
        (words("her own"), words("her own")),
    ],
    ids=["nothing", "beginning", "all", "more", "other"],
)
def test_the_answer_goes_on_behind_what_both_know(held: list[int], goes_on_behind: list[int]) -> None:
    """What a client holds wins; what it has not is sent at once, what it has never again."""
    more = [*words("x"), END]

    async def scenario() -> None:
        async with door(kept=[record()]) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, held=held)
                stream = await ring.stream()
                assert ring.streams[stream].request.held == tuple(goes_on_behind)
                unseen = goes_on_behind[len(held) :]
                first = await heard(socket) if unseen else {"token_ids": []}
                assert first["token_ids"] == unseen, "before anything is computed"
                ring.give(stream, more)
                pieces, reply = await rest(socket)
                assert [token for piece in pieces for token in piece["token_ids"]] == more
                assert reply["token_ids"] == [*goes_on_behind, *more]
                assert reply["seq"] == len(pieces) + bool(unseen) + 1

    run(scenario())


@pytest.mark.usefixtures("replayed_in_a_thread")
def test_without_a_seed_in_the_request_it_is_the_one_of_before() -> None:
    async def scenario() -> None:
        async with door(kept=[record(sampling=DRAWN)]) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, temperature=0.8, stream=False)
                stream = await ring.stream()
                assert ring.streams[stream].request.sampling == DRAWN
                ring.give(stream, [END])
                reply = await heard(socket)
                assert (reply["seed"], reply["token_ids"]) == (77, [*KNOWN, END])
                # Another seed is another answer.
                await send(socket, temperature=0.8, seed=78, stream=False)
                ring.give(await ring.stream(), [END])
                assert (await heard(socket))["token_ids"] == [END]

    run(scenario())


@pytest.mark.usefixtures("replayed_in_a_thread")
@pytest.mark.parametrize("held", [[], KNOWN[:3], KNOWN], ids=["nothing", "beginning", "all"])
def test_logprobs_go_on_as_far_as_they_are_known(held: list[int]) -> None:
    more = [*words("xy"), END]

    async def scenario() -> None:
        async with door(kept=[record(logprobs=1)]) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, held=held, logprobs=1)
                stream = await ring.stream()
                found = ring.streams[stream]
                last = FinishReason.STOP
                ring.service.deliver([Update(found, tuple(more), last, scores=tuple(scores_of(more)))])
                pieces, reply = await rest(socket)
                scored = [score for piece in pieces for score in piece["logprobs"]]
                whole = [*KNOWN, *more]
                assert [score["logprob"] for score in reply["logprobs"]] == [-token / 8 for token in whole]
                assert scored == reply["logprobs"][len(held) :]
                assert reply["token_ids"] == whole

    run(scenario())


def test_what_holds_more_than_the_logprobs_that_are_known_is_refused() -> None:
    async def scenario() -> None:
        async with door(kept=[record(logprobs=1)]) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, held=[*KNOWN, 7], logprobs=1)
                error = (await heard(socket))["error"]
                assert error["code"] == "bad_request"
                assert f"knows logprobs of {len(KNOWN)} of these {len(KNOWN) + 1} ids" in error["message"]
                assert ring.service.pending == 0
                assert not ring.streams
                # Nothing was lost by that.
                await send(socket, logprobs=1)
                assert (await heard(socket))["token_ids"] == KNOWN

    run(scenario())


@pytest.mark.usefixtures("replayed_in_a_thread")
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_complete_answer_is_sent_again_and_nothing_is_computed(logprobs: int | None) -> None:
    async def scenario() -> None:
        kept = [record(finish=FinishReason.LENGTH, logprobs=logprobs)]
        asked = {} if logprobs is None else {"logprobs": logprobs}
        async with door(kept=kept) as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                for held in ([], KNOWN[:4], KNOWN):
                    await send(socket, held=held, **asked)
                    pieces, reply = await rest(socket)
                    assert [token for piece in pieces for token in piece["token_ids"]] == KNOWN[len(held) :]
                    assert reply["token_ids"] == KNOWN
                    assert reply["finish_reason"] == "length"
                    assert reply["usage"]["cached_tokens"] == 1
                    assert len(reply.get("logprobs", KNOWN)) == len(KNOWN)
                assert not ring.streams
                assert ring.service.counts.accepted == 0

    run(scenario())


def test_nobody_takes_up_the_answer_of_another_clients_key() -> None:
    fleet, alice, bob = KeyPair.new(), KeyPair.new(), KeyPair.new()
    clients = {alice.public, bob.public}
    node = Keys(fleet, fleet.public, lambda domain, key: domain is Domain.CLIENTS and key in clients)

    async def answer(ring: Ring, endpoint: Endpoint, who: KeyPair, computed: list[int] | None) -> list[int]:
        body = {"token_ids": list(PROMPT), "key": KEY}
        async with AsyncClientConnection(endpoint, keys=Keys(who, fleet.public)) as connection:
            asking = asyncio.create_task(connection.request(json.dumps(body).encode(), DEADLINE_S))
            if computed is not None:
                ring.give(await ring.stream(), computed)
            reply = decode_reply(await asking)
            return list(reply.token_ids)  # type: ignore[union-attr]

    async def scenario() -> None:
        kept = [record(client=alice.public.decode(), finish=FinishReason.LENGTH)]
        async with door(host="127.0.0.2", keys=node, kept=kept) as (ring, endpoint):
            assert await answer(ring, endpoint, bob, [8, END]) == [8, END]
            assert await answer(ring, endpoint, alice, None) == KNOWN
            assert await answer(ring, endpoint, bob, None) == [8, END]

    run(scenario())


def test_standbys_are_told_of_tokens_before_their_clients_and_once_a_frame() -> None:
    order: list[str] = []
    told: list[Journal] = []

    def post(_: NodeId, data: bytes) -> bool:
        message = decode_control(data)
        assert isinstance(message, Journal)
        told.append(message)
        order.append("standby")
        return True

    async def scenario() -> None:
        async with door(post=post) as (ring, endpoint):
            reply = ring.service.server.reply
            ring.service.server.reply = lambda *what: (order.append("client"), reply(*what))[1]  # type: ignore[func-returns-value, method-assign]
            ring.service.follow([STANDBY])
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                for number in range(3):
                    await send(socket, key=f"{number:032x}", id=str(number))
                await send(socket, key=None, id="without a key")
                await until(lambda: len(ring.streams) == 4)
                order.clear()
                told.clear()
                updates = [Update(stream, tuple(KNOWN[:1])) for stream in ring.streams.values()]
                ring.service.deliver(updates)
                assert order == ["standby"] + ["client"] * 4
                (message,) = told
                assert [begun.key for begun in message.begun] == [f"{number:032x}" for number in range(3)]
                assert [ids for _, ids, _ in message.grown] == [PROMPT, tuple(KNOWN[:1])] * 3
                # An answer is complete at the standby before its client has it.
                order.clear()
                ring.service.deliver([Update(updates[0].stream, (END,), FinishReason.STOP)])
                assert order[0] == "standby"
                assert [end[1] for end in told[-1].ended] == [FinishReason.STOP]
                # What its client does not want any more is forgotten.
                await socket.send_multipart([b"", b'{"op": "cancel", "id": "1"}'])
                await until(lambda: len(ring.streams) == 3)
                await until(lambda: ring.service.pending == 2)
                ring.service.follow([STANDBY])
                assert len(told[-1].gone) == 1

    run(scenario())


def test_who_loses_the_connection_only_goes_on_with_its_logprobs() -> None:
    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with zmq.asyncio.Context() as context:
                with dealer(context, endpoint) as socket:
                    await send(socket, logprobs=1)
                    stream = ring.streams[await ring.stream()]
                    ring.service.deliver([Update(stream, tuple(KNOWN), scores=tuple(scores_of(KNOWN)))])
                    assert (await heard(socket))["token_ids"] == KNOWN
                await until(lambda: not ring.streams)
                with dealer(context, endpoint) as socket:
                    await send(socket, logprobs=1, held=KNOWN)
                    stream = ring.streams[await ring.stream()]
                    assert stream.request.held == tuple(KNOWN)
                    last = Update(stream, (END,), FinishReason.STOP, scores=(Score(-1.0),))
                    ring.service.deliver([last])
                    _, reply = await rest(socket)
                    assert len(reply["logprobs"]) == len(KNOWN) + 1

    run(scenario())


def test_who_is_asked_again_by_another_connection_says_so_to_the_first() -> None:
    """Each request ends in one reply, also one whose answer another connection gets."""

    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with (
                zmq.asyncio.Context() as context,
                dealer(context, endpoint) as first,
                dealer(context, endpoint) as second,
            ):
                await send(first, id="a")
                before = await ring.stream()
                await send(second, id="b")
                await until(lambda: ring.ended == [before])
                ring.give(await ring.stream(), [END])
                told = await heard(first)
                assert (told["id"], told["error"]["code"]) == ("a", "cancelled")
                assert "asked again over another connection" in told["error"]["message"]
                assert (await rest(second))[1]["id"] == "b"
                assert not await first.poll(50)

    run(scenario())


def test_a_prompt_that_is_still_read_when_the_head_is_to_end_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = threading.Event()
    accept = AnswerDesk.accept

    def slowly(desk: AnswerDesk, request: GenerateRequest, stream: StreamId) -> tuple[StreamRequest, Answer]:
        assert read.wait(DEADLINE_S)
        return accept(desk, request, stream)

    monkeypatch.setattr(AnswerDesk, "is_long", lambda *_: True)
    monkeypatch.setattr(AnswerDesk, "accept", slowly)

    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, id="a")
                await until(lambda: bool(ring.service._reading))
                ring.service.drain("the test asks it")
                read.set()
                told = await heard(socket)
                assert (told["id"], told["error"]["code"]) == ("a", "ring_incomplete")
                assert told["error"]["retry_after_s"] > 0
                assert not ring.streams

    run(scenario())


def test_who_is_head_again_gives_no_number_twice() -> None:
    """Streams are known to the conductor, which outlives the door, by their numbers alone."""

    async def scenario() -> None:
        ring, given = Ring(), []
        for _ in range(2):
            async with door(ring=ring) as (_, endpoint):
                with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                    await send(socket, key=None)
                    given.append(await ring.stream())
                    ring.drop(given[-1], RequestError(ErrorCode.INTERNAL, "enough"))
                    assert "error" in await heard(socket)
        assert len(set(given)) == 2

    run(scenario())


def test_of_two_ids_with_one_key_on_one_connection_each_is_answered() -> None:
    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with zmq.asyncio.Context() as context, dealer(context, endpoint) as socket:
                await send(socket, id="first")
                first = await ring.stream()
                await send(socket, id="last")
                told = await heard(socket)
                assert (told["id"], told["error"]["code"]) == ("first", "cancelled")
                await until(lambda: first not in ring.streams)
                ring.give(await ring.stream(), [END])
                assert (await rest(socket))[1]["id"] == "last"

    run(scenario())


def test_who_asked_last_gets_the_answer_though_an_earlier_request_is_read_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = threading.Event()
    accept = AnswerDesk.accept

    def slowly(desk: AnswerDesk, request: GenerateRequest, stream: StreamId) -> tuple[StreamRequest, Answer]:
        assert request.id != "first" or read.wait(DEADLINE_S)
        return accept(desk, request, stream)

    monkeypatch.setattr(AnswerDesk, "is_long", lambda *_: True)
    monkeypatch.setattr(AnswerDesk, "accept", slowly)

    async def scenario() -> None:
        async with door() as (ring, endpoint):
            with (
                zmq.asyncio.Context() as context,
                dealer(context, endpoint) as first,
                dealer(context, endpoint) as last,
            ):
                await send(first, id="first")
                await until(lambda: ring.service.pending == 1)
                await send(last, id="last")
                stream = await ring.stream()
                read.set()
                told = await heard(first)
                assert (told["id"], told["error"]["code"]) == ("first", "cancelled")
                assert "asked again over another connection" in told["error"]["message"]
                assert list(ring.streams) == [stream]
                ring.give(stream, [END])
                assert (await rest(last))[1]["id"] == "last"

    run(scenario())
