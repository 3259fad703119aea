"""A head dies while its standby has the journal: answers go on where they were, nothing is made twice."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from cluster.conftest import Shards
from cluster.fleet import Member, fleet
from cluster.sockets import plain
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient, Client
from cascadia_p2p.local import HOST, LocalRing, free_ports
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import GenerateReply, TokenScore

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
LENGTH = 400
SEEN = 20
PATIENCE_S = 100.0
FLAGS = ("--threads", "1", "--slots", "4", "--context", "2048")


def status(client: Endpoint) -> dict[str, Any]:
    with Client(client, timeout_s=PATIENCE_S) as asking:
        return dict(asking.status())


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def send(dealer: zmq.Socket[bytes], key: str, **fields: object) -> None:
    body = {"token_ids": list(PROMPT.ids), "ignore_eos": True, "key": key} | fields
    dealer.send_multipart([b"", json.dumps(body).encode()])


def heard(dealer: zmq.Socket[bytes]) -> dict[str, Any]:
    return dict(json.loads(dealer.recv_multipart()[-1]))


def seen(dealer: zmq.Socket[bytes], count: int) -> list[int]:
    """The first ids of an answer in pieces, so many at least."""
    ids: list[int] = []
    while len(ids) < count:
        ids += heard(dealer).get("token_ids", ())
    return ids


def read_scored(
    client: Endpoint, begun: threading.Event, notices: list[str]
) -> tuple[list[TokenScore], GenerateReply]:
    """An answer with logprobs, in pieces, and what is said between them."""
    scores: list[TokenScore] = []
    with Client(client, timeout_s=PATIENCE_S) as asking:
        answer = asking.stream(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
        for piece in answer:
            scores += piece.logprobs or ()
            notices += [] if piece.notice is None else [piece.notice]
            if len(scores) >= SEEN:
                begun.set()
        return scores, answer.reply


def test_answers_go_on_at_the_standby_of_a_head_that_was_killed(shards: Shards, tmp_path: Path) -> None:
    """Asked whole, read in pieces with logprobs, drawn without a seed by a plain socket, and complete."""
    client = Endpoint(HOST, free_ports())
    serves = ("--shard", "0", "--client-port", str(client.port))
    running, complete = secrets.token_hex(16), secrets.token_hex(16)
    drawn: dict[str, object] = {"max_tokens": LENGTH, "temperature": 1.5, "stream": True}
    with LocalRing(shards(CASE, (6, 6)), tmp_path, flags=FLAGS) as ring, ThreadPoolExecutor(2) as pool:
        slow = tmp_path / "slow"
        head = ring.start_node(*serves)
        program = (sys.executable, str(Path(__file__).with_name("slow.py")), str(slow))
        ring.start_node("--shard", "1", program=program)
        # Both are to serve clients at the same port: the second only when it has met the first.
        ring.wait_for("ring_open", PATIENCE_S)
        ring.start_node(*serves)
        ring.wait_for("journal_followed", PATIENCE_S)
        ring_is_open = lambda: status(client)["state"] == "open"  # noqa: E731
        until(ring_is_open, "the ring is open")
        with plain(zmq.DEALER, client) as unread, plain(zmq.DEALER, client) as dealer:
            send(unread, complete, max_tokens=30)
            assert unread.poll(1000 * PATIENCE_S)
            until(lambda: not status(client)["journal"]["told"][0]["unread_bytes"], "the standby knows all")
            begun = threading.Event()
            notices: list[str] = []
            # Much of each answer is still to come when the head is killed.
            slow.write_text("0.02")
            scored = pool.submit(read_scored, client, begun, notices)
            with_library = pool.submit(whole, client)
            send(dealer, running, **drawn)
            before = seen(dealer, SEEN)
            assert begun.wait(PATIENCE_S)
            head.process.kill()
            head.process.wait()
            slow.unlink()
        with plain(zmq.DEALER, client) as dealer:
            send(dealer, running, **drawn)
            pieces = [heard(dealer)]
            while "final" not in pieces[-1]:
                pieces.append(heard(dealer))
            last = pieces.pop()
            assert pieces[0]["token_ids"][: len(before)] == before, "by no other seed, and at once"
            assert [each for piece in pieces for each in piece.get("token_ids", ())] == last["token_ids"]
        scores, reply = scored.result(PATIENCE_S)
        assert sum("the connection to the head was lost" in each for each in notices) == 1, notices
        greedy = with_library.result(PATIENCE_S)
        right = whole(client, logprobs=2)
        assert greedy.token_ids == reply.token_ids == right.token_ids
        assert tuple(scores) == reply.logprobs == right.logprobs
        again = whole(client, temperature=1.5, seed=last["seed"])
        assert list(again.token_ids) == last["token_ids"]
        assert len(again.token_ids) == LENGTH
        no_row_for_what_is_complete(client, complete, right)


def whole(client: Endpoint, **options: Any) -> GenerateReply:
    with Client(client, timeout_s=PATIENCE_S) as asking:
        return asking.generate(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True, **options)


def no_row_for_what_is_complete(client: Endpoint, key: str, right: GenerateReply) -> None:
    def computed() -> tuple[int, int]:
        body = status(client)
        return body["data_thread"]["rows"], body["requests"]["accepted"]

    before = computed()
    with plain(zmq.REQ, client) as request:
        send_body = {"token_ids": list(PROMPT.ids), "ignore_eos": True, "key": key, "max_tokens": 30}
        request.send(json.dumps(send_body).encode())
        reply = json.loads(request.recv())
    assert reply["token_ids"] == list(right.token_ids[:30])
    assert reply["finish_reason"] == "length"
    assert computed() == before


def test_a_standby_that_comes_late_is_told_all_and_so_is_the_next(shards: Shards, tmp_path: Path) -> None:
    """Two heads die, one after the other: what was complete before the first is there after the second."""

    async def complete(head: Member, key: str) -> list[int]:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(head.client.tcp)
            body = {"token_ids": list(PROMPT.ids), "ignore_eos": True, "key": key, "max_tokens": 30}
            await dealer.send_multipart([b"", json.dumps(body).encode()])
            return list(json.loads((await dealer.recv_multipart())[-1])["token_ids"])

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), fleet(tmp_path) as ring:
            model, key = shards(CASE, (6, 6)), secrets.token_hex(16)
            places: dict[str, int] = {"shard": 0, "client_port": free_ports(), "context": 2048}
            head = await ring.start(model, **places)
            await ring.start(model, shard=1, context=2048)
            await ring.open()
            right = await complete(head, key)
            assert right[: CASE.new_tokens] == list(PROMPT.generated)
            assert head.node.status()["journal"]["told"] == []
            options: Any = {"max_tokens": 500, "ignore_eos": True, "logprobs": 1}
            async with AsyncClient(head.client, timeout_s=PATIENCE_S) as client:
                asking = asyncio.create_task(client.generate(PROMPT.ids, **options))
                await ring.until(lambda: head.node.status()["requests"]["pending"] == 1, "it runs")
                for _ in range(2):
                    standby = await ring.start(model, **places)
                    await ring.until(lambda: standby.node.status()["journal"]["answers"] == 2, "it is told")  # noqa: B023
                    assert standby.node.status()["journal"]["from"] == head.node.status()["node"]
                    head.task.cancel()
                    await asyncio.gather(head.task, return_exceptions=True)
                    head = standby
                    assert await complete(head, key) == right
                reply = await asking
                assert head.node.status()["requests"]["accepted"] <= 1, "the one that ran"
                assert reply.logprobs == (await client.generate(PROMPT.ids, **options)).logprobs

    asyncio.run(scenario())
