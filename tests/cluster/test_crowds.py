"""Many clients at once, and clients that leave, at a ring whose every answer is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from cluster.conftest import Shards
from cluster.fleet import slowed
from cluster.sockets import ask, plain
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p.cli import main
from cascadia_p2p.cli import status as status_command
from cascadia_p2p.client import Client
from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.transport.network import allow_many_descriptors
from scripts.crowds.crowd import Crowd, Known, ask_at_once

CASE = load_case("tiny12")
CONTEXT = 700
SLOTS = 6
PAUSE_S = 0.02

CLIENT = """
import sys, zmq
socket = zmq.Context().socket(getattr(zmq, sys.argv[2]))
socket.connect(sys.argv[1])
socket.send_multipart([b""] * (sys.argv[2] == "DEALER") + [sys.argv[3].encode()])
print("asked", flush=True)
while True:
    socket.recv_multipart()
    print("heard", flush=True)
"""


@pytest.fixture(scope="module")
def ring(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    model = shards(CASE, (4, 4, 4))
    root = tmp_path_factory.mktemp("crowds")
    with standing_ring(root, model, 3, context=CONTEXT, slots=SLOTS, queue=300) as made:
        yield made


def known() -> list[Known]:
    return [Known(prompt.ids, prompt.generated) for prompt in CASE.prompts[:3]]


def taken(ring: StandingRing) -> list[int]:
    return [int(body["data_thread"]["slots_taken"]) for body in ring.status()]


def rest(ring: StandingRing) -> None:
    """Wait until no node holds a slot and the head has no request."""

    def resting() -> bool:
        bodies = [member.node.status() for member in ring.fleet.members]
        requests: Any = bodies[0]["requests"]
        free = all(body["data_thread"]["slots_taken"] == 0 for body in bodies)  # type: ignore[index,call-overload]
        return free and not requests["pending"] and not requests["running"] and not requests["queued"]

    ring.until(resting, "all slots are free on every node")


def test_a_crowd_of_random_streams_gets_the_tokens_that_each_gets_alone(ring: StandingRing) -> None:
    crowd = Crowd(ring.endpoint.tcp, known(), 17)
    asyncio.run(crowd.visit(120, 40))
    assert crowd.outcome.faults == []
    assert crowd.outcome.requests == 120
    assert crowd.outcome.ended["finished"] > 40
    assert crowd.outcome.ended["cancelled"] > 5
    rest(ring)


def test_200_req_clients_at_once_are_each_answered_once(ring: StandingRing) -> None:
    allow_many_descriptors()
    answers, times = asyncio.run(ask_at_once(ring.endpoint.tcp, known(), 200, 6))
    assert answers == {"right": 200}
    assert len(times) == 200
    rest(ring)


def test_beyond_the_queue_requests_are_refused_at_once_and_the_queue_is_shown(ring: StandingRing) -> None:
    body = json.dumps({"token_ids": [5], "max_tokens": 600, "ignore_eos": True})
    running = lambda: ring.head.node.status()["requests"]["running"]  # type: ignore[index,call-overload]  # noqa: E731
    with plain(zmq.DEALER, ring.endpoint) as dealer, plain(zmq.REQ, ring.endpoint) as request, steady(ring):
        for _ in range(SLOTS + 300 + 1):
            dealer.send_multipart([b"", body.encode()])
        reply = json.loads(dealer.recv_multipart()[-1])
        assert reply["error"]["code"] == "overloaded"
        assert reply["error"]["retry_after_s"] > 0
        ring.until(lambda: running() == SLOTS, "all slots are taken")
        shown = ask(request, {"op": "status"})["status"]["requests"]
        assert (shown["queue_limit"], shown["running"]) == (300, SLOTS)
        assert 290 <= shown["queued"] <= 300
    rest(ring)


def test_a_place_in_the_queue_is_told_and_then_the_answer_comes(ring: StandingRing) -> None:
    with plain(zmq.DEALER, ring.endpoint) as busy, plain(zmq.DEALER, ring.endpoint) as waits:

        def one_waits() -> bool:
            return ring.head.node.status()["requests"]["queued"] >= 1  # type: ignore[index,call-overload,operator,no-any-return]

        with steady(ring):
            for number in range(SLOTS + 1):
                body = {"token_ids": [5], "max_tokens": 600, "ignore_eos": True, "id": str(number)}
                busy.send_multipart([b"", json.dumps(body).encode()])
            ring.until(one_waits, "the last of them waits")
            body = {"token_ids": list(CASE.prompts[1].ids), "max_tokens": 5, "stream": True, "id": "w"}
            waits.send_multipart([b"", json.dumps(body).encode()])
            replies = [json.loads(waits.recv_multipart()[-1])]
        while "finish_reason" not in replies[-1]:
            replies.append(json.loads(waits.recv_multipart()[-1]))
        assert replies[0] in ({"id": "w", "queued": 2}, {"id": "w", "queued": 1})
        assert replies[-1]["token_ids"] == list(CASE.prompts[1].generated[:5])
        assert replies[-1]["timings"]["queue_s"] > 0.05
        for _ in range(SLOTS + 1):
            busy.recv_multipart()
    rest(ring)


# --- clients that leave -------------------------------------------------------------------------------------


@contextlib.contextmanager
def client_process(ring: StandingRing, kind: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A client of its own process that has asked for a long answer."""
    body = {"token_ids": [5], "max_tokens": CONTEXT - 10, "ignore_eos": True} | more
    command = [sys.executable, "-c", CLIENT, ring.endpoint.tcp, kind, json.dumps(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            yield process
        finally:
            process.kill()


def frames(ring: StandingRing) -> int:
    return int(ring.status()[0]["data_thread"]["frames_out"])


def until_cancelled(ring: StandingRing, act: Callable[[], object]) -> tuple[float, int]:
    """Do what makes the client go once its answer is under way: seconds and frames until it is cancelled."""
    ring.until(lambda: ring.head.node.status()["data_thread"]["slots_taken"] == 1, "the answer is under way")
    before = int(ring.call(lambda: ring.head.node.status()["requests"]["cancelled"]))
    started, sent = time.monotonic(), frames(ring)
    act()
    ring.until(lambda: ring.head.node.status()["requests"]["cancelled"] == before + 1, "it is cancelled")
    seconds, at = time.monotonic() - started, frames(ring)
    rest(ring)
    # The row that was on its way, the release of the slot, and what a look at the counters takes.
    assert frames(ring) - at <= 8
    return seconds, at - sent


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize(("kind", "more"), [("REQ", {}), ("DEALER", {"stream": True, "id": "a"})])
def test_exo_15_a_killed_clients_slot_is_free_on_every_node_at_once(
    kind: str, more: dict[str, Any], ring: StandingRing
) -> None:
    rest(ring)
    with client_process(ring, kind, **more) as process, steady(ring):
        _, sent = until_cancelled(ring, process.kill)
    # Two seconds of them; whoever falls silent is noticed later.
    assert sent < 2.0 / PAUSE_S
    assert taken(ring) == [0, 0, 0]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_exo_15_a_client_that_falls_silent_is_noticed_by_the_heartbeat(ring: StandingRing) -> None:
    """As behind a cut link: its system still acknowledges, and its socket answers nothing."""
    rest(ring)
    slow = ring.head.node._worker._data
    assert slow.alive
    with client_process(ring, "REQ", max_tokens=CONTEXT - 10) as process, steady(ring):
        seconds, sent = until_cancelled(ring, lambda: os.kill(process.pid, signal.SIGSTOP))
        assert seconds > 1.5
        assert sent < 6.0 / PAUSE_S


@contextlib.contextmanager
def steady(ring: StandingRing, pause_s: float = PAUSE_S) -> Iterator[None]:
    """The second stage takes this much longer for a frame, so that an answer outlasts the test."""
    with slowed(ring.fleet.members[1], pause_s):
        yield


def test_exo_15_a_cancel_by_id_ends_the_work_within_one_token(ring: StandingRing) -> None:
    rest(ring)
    with plain(zmq.DEALER, ring.endpoint) as dealer, steady(ring, 0.2):
        body = {"token_ids": [5], "max_tokens": 600, "ignore_eos": True, "id": "a"}
        dealer.send_multipart([b"", json.dumps(body).encode()])
        _, sent = until_cancelled(
            ring, lambda: dealer.send_multipart([b"", json.dumps({"op": "cancel", "id": "a"}).encode()])
        )
        assert sent <= 2
        replies = [json.loads(dealer.recv_multipart()[-1]) for _ in range(2)]
        assert [list(reply) for reply in replies] == [["id", "cancelled"], ["id", "error"]]


# --- rows of the field --------------------------------------------------------------------------------------


def test_rpc_13_the_stage_that_is_slow_is_the_one_that_status_names(
    ring: StandingRing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # However long a busy machine's nodes take to say where their time goes.
    monkeypatch.setattr(status_command, "WORK_S", 60.0)
    rest(ring)
    with steady(ring, 0.05), Client(ring.endpoint) as client:
        client.generate([5], max_tokens=60, ignore_eos=True)
    assert main(["status", "--endpoint", str(ring.endpoint)]) == 0
    shown = capsys.readouterr().out
    assert "stage 1 (" in shown
    (line,) = [line for line in shown.splitlines() if "is the slowest" in line]
    assert line.startswith("stage 1 (")
    assert str(ring.fleet.members[1].node._profile.node)[:8] in line
    assert "ms a hop" in shown
    assert shown.count("busy ") == shown.count("waiting ") == 3


def test_dll_04_a_conversation_to_the_limit_ends_by_length_and_the_next_turn_is_refused(
    ring: StandingRing,
) -> None:
    with Client(ring.endpoint) as client:
        first = client.generate([7] * (CONTEXT - 50), max_tokens=500, ignore_eos=True)
        assert first.finish_reason == "length"
        # The last token needs no position of its own.
        assert first.usage.completion_tokens == 51
        with pytest.raises(RequestError, match=f"this ring holds {CONTEXT}") as refused:
            client.generate([7] * (CONTEXT - 50) + list(first.token_ids) + [1], max_tokens=5)
        assert refused.value.code is ErrorCode.CONTEXT_OVERFLOW
        assert str(CONTEXT + 2) in refused.value.message
        # The ring serves on.
        assert client.generate([5], max_tokens=2).usage.completion_tokens == 2


def test_pet_07_all_slots_are_filled_to_the_context_at_once(ring: StandingRing) -> None:
    """Memory is taken when the shard is loaded: no stream is let in that could not grow to its end."""
    with plain(zmq.DEALER, ring.endpoint) as dealer:
        for number in range(SLOTS):
            body = {"token_ids": [number + 1] * (CONTEXT - 30), "max_tokens": 999, "ignore_eos": True}
            dealer.send_multipart([b"", json.dumps(body).encode()])
        replies = [json.loads(dealer.recv_multipart()[-1]) for _ in range(SLOTS)]
    assert [reply.get("finish_reason") for reply in replies] == ["length"] * SLOTS
    assert all(reply["usage"]["completion_tokens"] == 31 for reply in replies)
    rest(ring)


def test_stk_08_every_frame_that_left_has_arrived(ring: StandingRing) -> None:
    before = frames(ring)
    with Client(ring.endpoint) as client:
        client.generate([5], max_tokens=600, ignore_eos=True)
    rest(ring)

    def all_arrived() -> bool:
        counted = [body["data_thread"] for body in ring.status()]
        sent = [each["frames_out"] for each in counted]
        # One message a hop for each token: DLL-12.
        assert 600 <= sent[0] - before < 630
        assert all(not each["dropped"] for each in counted)
        return [each["frames_in"] for each in counted] == [sent[-1], *sent[:-1]]

    # The last frame, which frees the slots, comes round to the head after them.
    deadline = time.monotonic() + 10
    while not all_arrived():
        assert time.monotonic() < deadline
        time.sleep(0.02)
