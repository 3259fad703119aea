"""What a client program meets at the head's door, over plain ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from cluster.conftest import Shards
from cluster.fleet import slowed
from cluster.sockets import ask, plain
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient, Client
from cascadia_p2p.errors import ErrorCode, RequestError

CASE = load_case("tiny12-eos")
LONGER = load_case("tiny12")
"""The same weights without the end-of-sequence id that ends an answer of CASE."""

CONTEXT = 300
SHORT = CASE.prompts[2]
STOPPED = CASE.prompts[1]


@pytest.fixture(scope="module")
def ring(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    model = shards(CASE, (5, 7))
    with standing_ring(tmp_path_factory.mktemp("requests"), model, 2, context=CONTEXT, slots=3) as made:
        yield made


@pytest.fixture
def request_socket(ring: StandingRing) -> Iterator[zmq.Socket[bytes]]:
    with plain(zmq.REQ, ring.endpoint) as made:
        yield made


def short(**more: Any) -> dict[str, Any]:
    return {"token_ids": list(SHORT.ids), "max_tokens": 4} | more


def test_a_plain_req_socket_gets_the_reference_tokens(request_socket: zmq.Socket[bytes]) -> None:
    for prompt in CASE.prompts:
        room = CONTEXT + 1 - len(prompt.ids)
        reply = ask(request_socket, {"token_ids": list(prompt.ids), "max_tokens": min(24, room)})
        assert reply["token_ids"] == list(prompt.generated)[:room]
        assert reply["finish_reason"] == ("stop" if prompt.stopped else "length")
        assert set(reply) == {"text", "token_ids", "finish_reason", "usage", "timings"}
        assert reply["timings"]["ttft_s"] >= reply["timings"]["queue_s"] >= 0


BAD = [
    (b"hello", "JSON"),
    (b"", "JSON"),
    (b'{"token_ids": [1, 2', "JSON"),
    (b'{"prompt": "\xff\xfe"}', "JSON"),
    (b"[1, 2, 3]", "object"),
    (b"null", "object"),
    ({}, "holds no prompt"),
    ({"prompt": ""}, "'prompt' is empty"),
    ({"token_ids": []}, "'token_ids' is empty"),
    ({"prompt": "a", "token_ids": [1]}, "both 'prompt' and 'token_ids'"),
    (short(promt="a"), "'promt' is unknown"),
    (short(temprature=1), "'temprature' is unknown"),
    (short(messages=[{"role": "user", "content": "a"}]), "both 'token_ids' and 'messages'"),
    ({"messages": [{"role": "user"}]}, "'messages[0].content' is missing"),
    (short(stop=["a", ""]), "'stop[1]'"),
    (short(stream=True), "'stream': a REQ socket takes one reply"),
    ({"token_ids": [1, 280]}, "holds 280: this model's ids are 0 to 279"),
    ({"token_ids": [-1]}, "token_ids[0]"),
    ({"token_ids": [1, 2**31]}, "token_ids[1]"),
    ({"token_ids": [1, "2"]}, "token_ids[1]"),
    ({"token_ids": [1.5]}, "token_ids[0]"),
    ({"token_ids": "1,2"}, "token_ids"),
    (short(stop_token_ids=[5000]), "'stop_token_ids' holds 5000"),
    (short(stop_token_ids=[1] * 65), "stop_token_ids"),
    (short(max_tokens=0), "'max_tokens'"),
    (short(max_tokens=-3), "'max_tokens'"),
    (short(max_tokens="4"), "'max_tokens'"),
    (short(max_tokens=True), "'max_tokens'"),
    (short(max_tokens=2.0), "'max_tokens'"),
    (short(ignore_eos=1), "'ignore_eos'"),
    ({"prompt": 7}, "'prompt'"),
    ({"prompt": "\ud800"}, ""),
    (short(id=7), "'id'"),
    (short(id="x" * 129), "'id'"),
    ({"op": "delete"}, "'op'"),
    ({"op": "cancel"}, "'id'"),
    ({"op": "status", "verbose": True}, "'verbose' is unknown"),
]


@pytest.mark.parametrize(("body", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_get_one_sentence_and_send_no_frame(
    body: object, words: str, ring: StandingRing, request_socket: zmq.Socket[bytes]
) -> None:
    before = ring.rows()
    reply = ask(request_socket, body)
    assert set(reply) <= {"error", "id"}
    assert reply["error"]["code"] == "bad_request"
    assert words in reply["error"]["message"]
    assert len(reply["error"]["message"]) < 400
    assert ring.rows() == before
    # The door stands as before, for this very socket.
    assert ask(request_socket, short())["token_ids"] == list(SHORT.generated[:4])


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers_before_any_frame(
    ring: StandingRing, request_socket: zmq.Socket[bytes]
) -> None:
    before = ring.rows()
    reply = ask(request_socket, {"token_ids": [7] * (CONTEXT + 1), "id": "long"})
    assert reply == {
        "id": "long",
        "error": {
            "code": "context_overflow",
            "message": "prompt is 301 tokens; this ring holds 300 a stream: shorten it, or start the nodes "
            "with a larger --context",
        },
    }
    text = ask(request_socket, {"prompt": "a" * 5000})
    assert text["error"]["code"] == "context_overflow"
    assert "5000 tokens" in text["error"]["message"]
    assert ring.rows() == before


def test_pet_08_prompts_about_as_long_as_the_context(request_socket: zmq.Socket[bytes]) -> None:
    full = CASE.prompts[3].ids
    assert len(full) == CONTEXT
    for missing, tokens in ((0, 1), (1, 2), (2, 3)):
        reply = ask(request_socket, {"token_ids": list(full[missing:]), "max_tokens": 24})
        assert reply["finish_reason"] == "length"
        assert len(reply["token_ids"]) == tokens
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (CONTEXT - missing, tokens)
    assert ask(request_socket, {"token_ids": list(full)})["token_ids"] == [CASE.prompts[3].generated[0]]
    assert "error" in ask(request_socket, {"token_ids": [*full, 1]})


def test_cas_07_usage_counts_every_token(request_socket: zmq.Socket[bytes]) -> None:
    for max_tokens in (1, 2, 24):
        reply = ask(request_socket, {"token_ids": list(STOPPED.ids), "max_tokens": max_tokens})
        # The reference stopped behind 7 tokens, the end-of-sequence id among them.
        count = min(7, max_tokens)
        assert reply["usage"] == {"prompt_tokens": 20, "completion_tokens": count, "cached_tokens": 0}
        assert reply["token_ids"] == list(STOPPED.generated[:count])


def test_text_goes_through_the_models_tokenizer(request_socket: zmq.Socket[bytes]) -> None:
    prompt = "Grüße, 世界 🙂"
    as_text = ask(request_socket, {"prompt": prompt, "max_tokens": 8})
    as_ids = ask(request_socket, {"token_ids": list(prompt.encode()), "max_tokens": 8})
    assert as_text["token_ids"] == as_ids["token_ids"]
    assert as_text["usage"]["prompt_tokens"] == len(prompt.encode())
    # One token a byte in this model, and its answers are ASCII.
    assert as_text["text"] == as_ids["text"] == bytes(as_ids["token_ids"]).decode()


def test_an_answer_ends_at_end_of_sequence_unless_told_otherwise(request_socket: zmq.Socket[bytes]) -> None:
    body = {"token_ids": list(STOPPED.ids), "max_tokens": 24}
    reply = ask(request_socket, body)
    assert (reply["finish_reason"], reply["token_ids"]) == ("stop", list(STOPPED.generated))
    # The id that ended the answer counts as a token and is not shown.
    assert reply["text"] == bytes(STOPPED.generated[:-1]).decode()
    reply = ask(request_socket, body | {"ignore_eos": True})
    assert (reply["finish_reason"], reply["token_ids"]) == ("length", list(LONGER.prompts[1].generated))


def test_stop_token_ids_end_an_answer(request_socket: zmq.Socket[bytes]) -> None:
    generated = SHORT.generated
    body = {"token_ids": list(SHORT.ids), "max_tokens": 24, "stop_token_ids": [279, generated[3]]}
    for ignore in (False, True):
        reply = ask(request_socket, body | {"ignore_eos": ignore})
        end = generated.index(generated[3]) + 1
        assert (reply["finish_reason"], reply["token_ids"]) == ("stop", list(generated[:end]))
        assert reply["text"] == bytes(generated[: end - 1]).decode()


def test_the_id_comes_back_with_answers_errors_and_status(request_socket: zmq.Socket[bytes]) -> None:
    odd = 'quotes " and 世界\n'
    assert ask(request_socket, short(id=odd))["id"] == odd
    assert ask(request_socket, {"prompt": "", "id": odd})["id"] == odd
    assert ask(request_socket, {"op": "status", "id": odd})["id"] == odd
    assert "id" not in ask(request_socket, short())


def test_an_id_that_is_still_being_answered_is_refused(ring: StandingRing) -> None:
    body = json.dumps(short(max_tokens=60, ignore_eos=True, id="twice")).encode()
    with plain(zmq.DEALER, ring.endpoint) as one, plain(zmq.DEALER, ring.endpoint) as other:
        with slowed(ring.head, 0.1):
            for socket in (one, one, other):
                socket.send_multipart([b"", body])
            refusal = json.loads(one.recv_multipart()[1])
        answer = json.loads(one.recv_multipart()[1])
        assert refusal["id"] == "twice"
        assert "'twice' is still being answered" in refusal["error"]["message"]
        assert len(answer["token_ids"]) == 60
        # An id means something only within its connection.
        assert json.loads(other.recv_multipart()[1])["token_ids"] == answer["token_ids"]
        # And is free again behind its answer.
        one.send_multipart([b"", json.dumps(short(id="twice")).encode()])
        assert json.loads(one.recv_multipart()[1])["token_ids"] == list(SHORT.generated[:4])


def test_a_cancelled_request_ends_once_and_its_slot_is_free(ring: StandingRing) -> None:
    with plain(zmq.DEALER, ring.endpoint) as dealer, slowed(ring.head):

        def send(body: dict[str, Any]) -> None:
            dealer.send_multipart([b"", json.dumps(body).encode()])

        for number in range(6):
            send(short(max_tokens=280, ignore_eos=True, id=f"long-{number}"))
        for number in range(6):
            send({"op": "cancel", "id": f"long-{number}"})
        send({"op": "cancel", "id": "unheard of"})
        replies = [json.loads(dealer.recv_multipart()[1]) for _ in range(13)]
        terminal = [reply for reply in replies if "cancelled" not in reply]
        assert sorted(reply["id"] for reply in terminal) == [f"long-{number}" for number in range(6)]
        assert all(reply["error"]["code"] == "cancelled" for reply in terminal)
        assert {reply["id"]: reply["cancelled"] for reply in replies if "cancelled" in reply} == {
            **{f"long-{number}": True for number in range(6)},
            "unheard of": False,
        }
        send(short())
        assert json.loads(dealer.recv_multipart()[1])["token_ids"] == list(SHORT.generated[:4])
    ring.until(lambda: ring.head.node.status()["requests"]["pending"] == 0, "no request pending")


def test_messages_without_the_shape_of_a_request_are_told_so(ring: StandingRing) -> None:
    body = json.dumps(short()).encode()
    for shape in ([body], [b"tag", body], [b"", body, body], [b"", b"", body], [b"x"] * 40):
        with plain(zmq.DEALER, ring.endpoint) as dealer:
            dealer.send_multipart(shape)
            reply = json.loads(dealer.recv_multipart()[-1])
            assert reply["error"]["code"] == "bad_request"
            dealer.send_multipart([b"", body])
            assert json.loads(dealer.recv_multipart()[-1])["token_ids"] == list(SHORT.generated[:4])


def test_many_clients_at_once_each_get_their_own_answer(ring: StandingRing) -> None:
    start = threading.Barrier(24)

    def one(number: int) -> None:
        prompt = CASE.prompts[number % 3]
        with plain(zmq.REQ, ring.endpoint) as socket:
            start.wait()
            for _ in range(2):
                reply = ask(socket, {"token_ids": list(prompt.ids), "max_tokens": 24, "id": str(number)})
                assert reply["token_ids"] == list(prompt.generated)
                assert reply["id"] == str(number)
                assert reply["usage"]["prompt_tokens"] == len(prompt.ids)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(24)))


def test_one_request_hides_no_other_behind_a_full_ring(ring: StandingRing) -> None:
    """Status and refusals do not wait for slots."""
    with plain(zmq.DEALER, ring.endpoint) as busy, plain(zmq.REQ, ring.endpoint) as socket:
        with slowed(ring.head, 0.1):
            for number in range(6):
                body = json.dumps(short(max_tokens=100, ignore_eos=True, id=str(number))).encode()
                busy.send_multipart([b"", body])
            ring.until(lambda: ring.head.node.status()["requests"]["pending"] == 6, "all are there")
            pending = ask(socket, {"op": "status"})["status"]["requests"]["pending"]
            assert ask(socket, {"prompt": ""})["error"]["code"] == "bad_request"
            assert pending == 6
        replies = [json.loads(busy.recv_multipart()[1]) for _ in range(6)]
        assert {len(reply["token_ids"]) for reply in replies} == {100}
        assert len({tuple(reply["token_ids"]) for reply in replies}) == 1


def test_the_library_raises_what_the_head_refuses(ring: StandingRing) -> None:
    with Client(ring.endpoint) as client:
        with pytest.raises(RequestError, match="this ring holds 300") as refused:
            client.generate([1] * 301)
        assert refused.value.code is ErrorCode.CONTEXT_OVERFLOW
        with pytest.raises(RequestError, match="'prompt' is empty"):
            client.generate("")
        with pytest.raises(RequestError, match="max_tokens"):
            client.generate("a", max_tokens=0)
        with pytest.raises(RequestError, match="ids are 0 to 279"):
            client.generate([280])
        assert client.generate(SHORT.ids, max_tokens=4).token_ids == SHORT.generated[:4]
        assert client.status()["state"] == "open"

    async def scenario() -> None:
        async with AsyncClient(str(ring.endpoint)) as client:
            wrong = await asyncio.gather(
                client.generate([1] * 301), client.generate(""), return_exceptions=True
            )
            assert [type(error) for error in wrong] == [RequestError, RequestError]
            reply = await client.generate(SHORT.ids, max_tokens=4, stop_token_ids=[SHORT.generated[1]])
            assert reply.token_ids == SHORT.generated[:2]

    asyncio.run(scenario())
