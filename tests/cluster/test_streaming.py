"""Answers in pieces, stop strings and conversations, through real rings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import zmq
from cluster.conftest import Shards
from cluster.fleet import fleet, slowed
from cluster.sockets import ask, plain
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient, AsyncStream, Client, Messages
from cascadia_p2p.config import Limits
from cascadia_p2p.errors import ErrorCode, RequestError, UnreachableError, UsageError
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export

CASE = load_case("tiny12")
PROMPT = CASE.prompts[0]
IDS = PROMPT.generated[:24]
CONTEXT = 500

SPELLED: dict[int, bytes] = {
    **dict(zip((41, 96, 116, 85), ("😀".encode()[at : at + 1] for at in range(4)), strict=True)),
    51: b"G",
    62: "ü".encode(),
    65: "ж".encode()[:1],
    55: "ж".encode()[1:],
    99: b" = ",
    89: "世界".encode()[:1],
    113: "世界".encode()[1:5],
    101: "世界".encode()[5:],
    48: "한".encode(),
    37: b"def ",
    119: "👩‍🚀".encode()[:6],
    63: "👩‍🚀".encode()[6:],
    69: b"\n",
    75: "e\u0301".encode(),
    79: "🙂".encode()[:3],
}
"""What the answer's tokens stand for in this test's vocabulary; the last one's character stays unfinished."""

TEXT = b"".join(SPELLED[id_] for id_ in IDS)[:-3].decode("utf-8", "replace")


def tokenizer() -> dict[str, Any]:
    """The sample's, with other pieces for the ids of the answer."""
    content: dict[str, Any] = dict(tokenizer_json(CASE.recipe.vocab_valid))
    letters = {id_: letter for letter, id_ in content["model"]["vocab"].items()}
    vocab = {id_: "".join(letters[byte] for byte in piece) for id_, piece in SPELLED.items()}
    taken = set(vocab.values())
    for id_, letter in letters.items():
        vocab.setdefault(id_, letter if letter not in taken else f"~{id_}")
    content["model"]["vocab"] = {piece: id_ for id_, piece in sorted(vocab.items())}
    return content


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model in two shards, its answer to the first prompt in many scripts."""
    root = tmp_path_factory.mktemp("many-scripts")
    checkpoint = CASE.build(root / "checkpoint")
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer()))
    export(checkpoint, root / "model", split=(5, 7), encodings=EXACT)
    return root / "model"


@pytest.fixture(scope="module")
def ring(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    with standing_ring(tmp_path_factory.mktemp("streaming"), model, 2, context=CONTEXT, slots=4) as made:
        yield made


def body(**more: Any) -> dict[str, Any]:
    return {"token_ids": list(PROMPT.ids), "max_tokens": len(IDS), "stream": True, "id": "a"} | more


def raw_stream(socket: zmq.Socket[bytes], request: dict[str, Any]) -> list[dict[str, Any]]:
    """All replies to a streamed request, over a DEALER."""
    socket.send_multipart([b"", json.dumps(request).encode()])
    replies: list[dict[str, Any]] = []
    while not replies or not (replies[-1].keys() & {"error", "final"}):
        empty, data = socket.recv_multipart()
        assert empty == b""
        replies.append(json.loads(data))
    return replies


def test_exo_17_a_plain_dealer_gets_numbered_pieces_and_one_final_message(ring: StandingRing) -> None:
    with plain(zmq.DEALER, ring.endpoint) as socket:
        *pieces, final = raw_stream(socket, body())
    assert [piece["seq"] for piece in pieces] == list(range(1, len(pieces) + 1))
    assert all(set(piece) == {"id", "seq", "text", "token_ids"} and piece["id"] == "a" for piece in pieces)
    assert final["seq"] == len(pieces) + 1
    assert final["final"] is True
    assert final["text"] == TEXT
    assert "".join(piece["text"] for piece in pieces) == TEXT
    assert [id_ for piece in pieces for id_ in piece["token_ids"]] == final["token_ids"] == list(IDS)
    assert "\ufffd" not in TEXT
    assert len(pieces) > 1
    assert final["finish_reason"] == "length"
    usage = final["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT.ids), len(IDS))


def test_cas_07_pieces_add_up_to_the_answer_of_a_plain_request(ring: StandingRing) -> None:
    """Text, ids and usage are the same streamed and at once, whatever ends the answer."""
    endings: list[dict[str, Any]] = [
        {},
        {"max_tokens": 1},
        {"max_tokens": 6},
        {"stop": ["界"]},
        {"stop": [" = 世界 ="]},
        {"stop": ["nowhere", "def def"]},
        {"stop_token_ids": [IDS[11]]},
        {"stop": ["😀"]},
    ]
    with plain(zmq.DEALER, ring.endpoint) as dealer, plain(zmq.REQ, ring.endpoint) as request:
        for ending in endings:
            whole = ask(request, body(stream=False, **ending))
            *pieces, final = raw_stream(dealer, body(**ending))
            for name in ("text", "token_ids", "finish_reason", "usage"):
                assert final[name] == whole[name], ending
            assert "".join(piece["text"] for piece in pieces) == whole["text"]
            assert [id_ for piece in pieces for id_ in piece["token_ids"]] == whole["token_ids"]
            assert whole["usage"]["completion_tokens"] == len(whole["token_ids"])


@pytest.mark.parametrize(
    ("stops", "met"),
    [
        (["界"], "界"),
        (["= 世"], "= 世"),
        (["nothing"], None),
        (["한def def 한", "def"], "def"),
        (["ü", "Gü"], "Gü"),
        (["😀G"], "😀G"),
    ],
)
def test_stk_24_a_stop_string_ends_the_answer_and_is_never_shown(
    stops: list[str], met: str | None, ring: StandingRing
) -> None:
    with Client(ring.endpoint) as client:
        reply = client.generate(PROMPT.ids, max_tokens=24, stop=stops)
    expected = TEXT if met is None else TEXT[: TEXT.index(met)]
    assert reply.text == expected
    assert reply.finish_reason == ("length" if met is None else "stop")
    # Not one token behind the stop counts, however many were already on their way.
    assert reply.token_ids == IDS[: len(reply.token_ids)]
    if met is not None:
        spelled = b"".join(SPELLED[id_] for id_ in reply.token_ids).decode("utf-8", "replace")
        assert met in spelled
        assert met not in b"".join(SPELLED[id_] for id_ in reply.token_ids[:-1]).decode("utf-8", "replace")
    idle(ring)


def long_answers(ring: StandingRing) -> AbstractContextManager[None]:
    """For a block: answers of hundreds of tokens outlast what a test does meanwhile."""
    return slowed(ring.fleet.members[1])


def idle(ring: StandingRing) -> None:
    """Wait until nothing is being computed for anybody: a slot is released behind its last row."""

    def still() -> bool:
        bodies = [each.node.status() for each in ring.fleet.members]
        free = all(body["data_thread"]["slots_taken"] == 0 for body in bodies)
        return free and bodies[0]["requests"]["pending"] == 0

    ring.until(still, "no request pending and no slot taken")


def test_the_library_streams_text_ids_and_conversations(ring: StandingRing) -> None:
    with Client(ring.endpoint) as client:
        with client.stream(PROMPT.ids, max_tokens=24) as answer:
            with pytest.raises(UsageError, match="not complete"):
                _ = answer.reply
            assert "".join(piece.text or "" for piece in answer) == TEXT
            assert answer.reply.token_ids == IDS
            assert list(answer) == []
        with client.stream("G", max_tokens=5) as answer:
            text = "".join(piece.text or "" for piece in answer)
            assert answer.reply.text == text == client.generate("G", max_tokens=5).text
        conversation: Messages = [{"role": "user", "content": "G"}]
        with client.stream(messages=conversation, max_tokens=20, reasoning_effort="low") as answer:
            pieces = list(answer)
        whole = client.chat(conversation, max_tokens=20, reasoning_effort="low")
        assert "".join(piece.text or "" for piece in pieces) == whole.text
        assert answer.reply.token_ids == whole.token_ids

    async def scenario() -> None:
        async with AsyncClient(ring.endpoint) as client:

            async def one(count: int) -> str:
                async with client.stream(PROMPT.ids, max_tokens=count) as answer:
                    text = "".join([piece.text or "" async for piece in answer])
                    assert answer.reply.text == text
                    return text

            texts = await asyncio.gather(*(one(count) for count in range(1, 24)), client.generate([1]))
            assert texts[22 - 1] == TEXT[: len(texts[22 - 1])]
            with pytest.raises(RequestError, match="both 'prompt' and 'messages'"):
                await anext(client.stream("a", messages=conversation))

    asyncio.run(scenario())


def test_what_can_not_be_sent_or_taken_is_said(ring: StandingRing) -> None:
    with Client(ring.endpoint) as client:
        with pytest.raises(RequestError, match="field 'stop' should be a list"):
            client.generate("a", stop="END")
        with pytest.raises(RequestError, match=r"'messages\[0\].role'"):
            client.chat([{"role": "me", "content": "a"}])
        with pytest.raises(RequestError, match="this ring holds 500"):
            next(client.stream([1] * (CONTEXT + 1)))
        answer = client.stream(PROMPT.ids)
        next(answer)
        with pytest.raises(UsageError, match="an answer is still coming"):
            client.status()
        answer.close()
        assert client.status()["state"] == "open"


def test_exo_15_closing_a_stream_early_cancels_the_request(ring: StandingRing) -> None:
    long = CONTEXT - 10
    with Client(ring.endpoint) as client:
        with long_answers(ring):
            answer = client.stream(PROMPT.ids, max_tokens=long)
            next(answer)
            answer.close()
            idle(ring)
        before = ring.rows()
        # The connection serves on, and what went into the ring since is the next answer's.
        assert client.generate(PROMPT.ids, max_tokens=4).token_ids == IDS[:4]
        assert ring.rows() - before == 2 * 4

    async def scenario() -> None:
        async with AsyncClient(ring.endpoint) as client:
            others = asyncio.create_task(client.generate(PROMPT.ids, max_tokens=60))
            async with client.stream(PROMPT.ids, max_tokens=long) as answer:
                async for _ in answer:
                    break
            taken = int(ring.status()[0]["requests"]["accepted"])
            reading = asyncio.create_task(collect(client.stream(PROMPT.ids, max_tokens=long)))
            while ring.status()[0]["requests"]["accepted"] == taken:  # noqa: ASYNC110 - counters have no event
                await asyncio.sleep(0.01)
            reading.cancel()
            assert (await others).token_ids[:24] == IDS
            assert (await client.generate(PROMPT.ids, max_tokens=4)).token_ids == IDS[:4]

    async def collect(answer: AsyncStream) -> None:
        async for _ in answer:
            pass

    before = ring.call(lambda: ring.head.node.status()["requests"]["cancelled"])
    with long_answers(ring):
        asyncio.run(scenario())
        idle(ring)
    assert ring.call(lambda: ring.head.node.status()["requests"]["cancelled"]) >= before + 2


def test_a_cancel_request_ends_a_stream_with_one_message(ring: StandingRing) -> None:
    with plain(zmq.DEALER, ring.endpoint) as socket, long_answers(ring):
        socket.send_multipart([b"", json.dumps(body(max_tokens=CONTEXT - 10)).encode()])
        while "queued" in (first := json.loads(socket.recv_multipart()[1])):
            pass
        assert first["seq"] == 1
        socket.send_multipart([b"", json.dumps({"op": "cancel", "id": "a"}).encode()])
        replies: list[dict[str, Any]] = []
        while not replies or "error" not in replies[-1]:
            replies.append(json.loads(socket.recv_multipart()[1]))
        assert replies[-1]["error"]["code"] == "cancelled"
        assert [reply["cancelled"] for reply in replies if "cancelled" in reply] == [True]
        # No piece behind the promise to cancel.
        kinds = [
            "cancelled" if "cancelled" in reply else "error" if "error" in reply else "piece"
            for reply in replies
        ]
        assert kinds[-2:] == ["cancelled", "error"]
        assert not socket.poll(200)


def test_exo_15_a_client_that_vanishes_is_generated_for_no_more(ring: StandingRing) -> None:
    idle(ring)
    with long_answers(ring):
        with plain(zmq.DEALER, ring.endpoint) as socket:
            socket.send_multipart([b"", json.dumps(body(max_tokens=CONTEXT - 10)).encode()])
            socket.recv_multipart()
            before = ring.rows()
        idle(ring)
    assert ring.rows() - before < 2 * (CONTEXT - 50)


def test_stk_28_a_prompt_that_is_too_long_ends_a_stream_at_once(ring: StandingRing) -> None:
    with plain(zmq.DEALER, ring.endpoint) as socket:
        (error,) = raw_stream(socket, body(token_ids=[7] * (CONTEXT + 1)))
        assert error["error"]["code"] == "context_overflow"
        # Long enough to be read beside the event loop.
        (error,) = raw_stream(socket, {"prompt": "G" * 50_000, "stream": True, "id": "long"})
        assert (error["id"], error["error"]["code"]) == ("long", "context_overflow")
        assert "50000" in error["error"]["message"]
        socket.send_multipart([b"", json.dumps({"prompt": "G" * 3_000_000, "id": "longer"}).encode()])
        socket.send_multipart([b"", json.dumps({"op": "cancel", "id": "longer"}).encode()])
        ends = [json.loads(socket.recv_multipart()[1]) for _ in range(2)]
        assert {"cancelled" in end for end in ends} == {True, False}
        assert not socket.poll(200)


def test_exo_13_a_stream_ends_when_a_stage_is_lost(shards: Shards, tmp_path: Path) -> None:
    """Resumed or ended by one error: never silence."""

    async def scenario() -> None:
        async with fleet(tmp_path) as ring:
            model = shards(CASE, (6, 6))
            for shard in range(2):
                await ring.start(model, shard=shard, limits=Limits(recovery_s=1.0))
            head = await ring.open()
            async with AsyncClient(head.client, timeout_s=60.0) as client:
                answer = client.stream(PROMPT.ids, max_tokens=CONTEXT)
                ids: list[int] = []
                lost: Exception | None = None
                try:
                    async for piece in answer:
                        ids += piece.token_ids
                        if len(ids) > 5 and not ring.members[1].task.done():
                            await ring.members[1].stop()
                except (RequestError, UnreachableError) as error:
                    lost = error
                assert tuple(ids[: len(PROMPT.generated)]) == PROMPT.generated[: len(ids)]
                assert lost is not None
                if isinstance(lost, RequestError):
                    assert lost.code is ErrorCode.RING_INCOMPLETE

    asyncio.run(scenario())
