"""A ring among strangers: port scans, other programs, broken and forged messages, other versions."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from cluster.conftest import Shards
from cluster.sockets import ask, plain
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p import __version__
from cascadia_p2p.client import Client
from cascadia_p2p.errors import RequestError
from cascadia_p2p.types import Endpoint, Epoch, Instance
from cascadia_p2p.wire.frames import OPERATION, PROTOCOL, RECORD, SEGMENT, Frame, FrameKind, encode_header

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]


@pytest.fixture(scope="module")
def standing(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    with standing_ring(tmp_path_factory.mktemp("strangers"), shards(CASE, (4, 4, 4)), 3) as made:
        yield made


@pytest.fixture
def ring(standing: StandingRing) -> Iterator[StandingRing]:
    """The ring; behind the test it must stand as before, and answer rightly."""
    before, lines = standing.status(), len(standing.said)
    assert answer(standing) == PROMPT.generated
    yield standing
    assert answer(standing) == PROMPT.generated
    for was, body in zip(before, standing.status(), strict=True):
        assert body["state"] == "open"
        assert body["epoch"] == was["epoch"]
        assert len(body["nodes"]) == 3
        assert body["data_thread"]["errors"] == 0
    said = standing.said[lines:]
    assert not [line for line in said if line["level"] == "error" or "exc_info" in line]
    assert len(said) < 30, "a stranger must not fill the log"


def answer(ring: StandingRing) -> tuple[int, ...]:
    with Client(ring.endpoint, timeout_s=30) as client:
        return client.generate(PROMPT.ids, max_tokens=24).token_ids


def every_port(ring: StandingRing) -> list[Endpoint]:
    return [
        *(member.control for member in ring.fleet.members),
        *(member.data for member in ring.fleet.members),
        ring.endpoint,
    ]


def counted(ring: StandingRing, *path: str) -> int:
    """A counter of `status`, summed over the nodes."""
    total = 0
    for body in ring.status():
        value: Any = body
        for key in path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        total += value if isinstance(value, int) else 0
    return total


def rises(ring: StandingRing, before: int, *path: str, by: int = 1) -> None:
    ring.until(lambda: counted_in_loop(ring, *path) >= before + by, f"{path} rises by {by}")


def counted_in_loop(ring: StandingRing, *path: str) -> int:
    total = 0
    for member in ring.fleet.members:
        value: Any = member.node.status()
        for key in path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        total += value if isinstance(value, int) else 0
    return total


# --- bytes that are no ZeroMQ -----------------------------------------------------------------------------

ZMTP = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"

RAW = {
    "nothing": b"",
    "one byte": b"\x00",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(190),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "half a greeting": ZMTP[:20],
    "a greeting and no more": ZMTP,
    "another version's greeting": ZMTP[:10] + b"\x09" + ZMTP[11:],
    "a frame of 2**62 bytes": ZMTP + READY + b"\x02" + struct.pack(">Q", 2**62) + b"x" * 100,
    "a command of 4 GiB": ZMTP + b"\x06" + struct.pack(">Q", 2**32) + b"x" * 100,
    "noise": random.Random(5).randbytes(4000),
}


@pytest.mark.parametrize("garbage", RAW.values(), ids=RAW)
def test_other_protocols_on_every_port(ring: StandingRing, garbage: bytes) -> None:
    for port in every_port(ring):
        for reset in (False, True):
            with socket.create_connection((port.host, port.port), timeout=60) as stray:
                stray.sendall(garbage)
                if reset:
                    stray.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_cas_24_stray_connections_take_nobodys_place(ring: StandingRing) -> None:
    """A port scan, and connections that stay open and say nothing."""
    with ExitStack() as held:
        for port in every_port(ring):
            for _ in range(10):
                socket.create_connection((port.host, port.port), timeout=60).close()
                held.enter_context(socket.create_connection((port.host, port.port), timeout=60))
        assert answer(ring) == PROMPT.generated


# --- ZeroMQ messages that are none of ours ----------------------------------------------------------------


def hello(ring: StandingRing, **changes: Any) -> dict[str, Any]:
    """A greeting that would be right, but for what a test changes."""
    greeting = ring.call(lambda: ring.head.node._machine.greeting(time.monotonic()))
    body = greeting.model_dump(mode="json") | {"type": "hello", "node": "0" * 16, "instance": "1" * 16}
    return {name: value for name, value in (body | changes).items() if value is not None}


BROKEN_CONTROL: dict[str, list[bytes]] = {
    "empty": [b""],
    "noise": [random.Random(6).randbytes(300)],
    "truncated": [b'{"type": "state", "node": "00'],
    "a list": [b"[]"],
    "no type": [b"{}"],
    "unknown type": [b'{"type": "shutdown", "node": "0000000000000000", "instance": "0000000000000000"}'],
    "deep": [b'{"type":' + b"[" * 5000],
    "wrong types": [b'{"type": "beat", "node": 1, "instance": null, "epoch": -1}'],
    "not a number": [b'{"type": "beat", "node": "0000000000000000", "progress": NaN}'],
    "two parts": [b"{}", b"{}"],
    "many parts": [b"x"] * 200,
    "300 kB": [b'{"type": "bye", "reason": "' + b"x" * 300_000 + b'"}'],
}


@pytest.mark.parametrize("parts", BROKEN_CONTROL.values(), ids=BROKEN_CONTROL)
def test_exo_19_broken_control_messages_are_counted_and_dropped(
    ring: StandingRing, parts: list[bytes]
) -> None:
    counter = "malformed_messages" if len(parts) > 1 else "undecodable_messages"
    before = counted(ring, "dropped", counter)
    with ExitStack() as held:
        for member in ring.fleet.members:
            dealer = held.enter_context(plain(zmq.DEALER, member.control))
            for _ in range(5):
                dealer.send_multipart(parts)
        if len(parts[0]) < 300_000:
            rises(ring, before, "dropped", counter, by=15)
        else:
            # ZeroMQ itself hangs up on a part of that size.
            assert answer(ring) == PROMPT.generated


def test_messages_of_nodes_that_nobody_knows_change_nothing(ring: StandingRing) -> None:
    epoch = ring.status()[0]["epoch"]
    sender = {"node": "0" * 16, "instance": "1" * 16}
    forged = [
        {"type": "bye", "reason": "all go home"},
        {"type": "close", "epoch": epoch, "reason": "all go home"},
        {"type": "assign", "shard": 0},
        {"type": "open", "epoch": epoch, "promise": {"slots": 1, "context": 1, "rows": 1}},
        {"type": "ready", "epoch": epoch},
        {"type": "reject", "epoch": epoch, "reason": "no"},
        {"type": "beat", "epoch": epoch["counter"], "progress": 5},
        {"type": "state", "claim": {"shard": 0, "state": "serving", "age_s": 1e9}},
        {
            "type": "form",
            "epoch": {"counter": epoch["counter"] + 1, "head": "1" * 16},
            "members": [sender | {"shard": 0, "data": {"host": "127.0.0.1", "port": 9}}],
            "promise": {"slots": 1, "context": 1, "rows": 1},
        },
    ]
    before = counted(ring, "dropped", "ignored_messages")
    with ExitStack() as held:
        for member in ring.fleet.members:
            dealer = held.enter_context(plain(zmq.DEALER, member.control))
            for message in forged:
                dealer.send(json.dumps(message | sender).encode())
        rises(ring, before, "dropped", "ignored_messages", by=3 * len(forged))


@pytest.mark.parametrize("protocol", [0, 99])
def test_rpc_05_another_protocol_is_refused_with_both_versions(ring: StandingRing, protocol: int) -> None:
    before = counted(ring, "dropped", "refused_greetings")
    body = {"type": "hello", "protocol": protocol, "software": "9.9.9+build.7", "new field": {"a": 1}}
    with plain(zmq.DEALER, ring.head.control) as dealer:
        dealer.send(json.dumps(body).encode())
        refusal = json.loads(dealer.recv())
        assert (refusal["type"], refusal["code"]) == ("refusal", "version")
        assert (refusal["protocol"], refusal["software"]) == (PROTOCOL, __version__)
        for words in (
            f"cascadia-p2p {__version__} (protocol {PROTOCOL})",
            f"cascadia-p2p 9.9.9+build.7 (protocol {protocol})",
            "need the same protocol number",
            "install the same release on both",
        ):
            assert words in refusal["message"]
        rises(ring, before, "dropped", "refused_greetings")
    # Said on this console too.
    assert any(
        f"(protocol {protocol})" in line["message"] for line in ring.said if line["event"] == "refused"
    )


def test_exo_06_a_node_of_another_fleet_or_model_is_refused_in_words(ring: StandingRing) -> None:
    cases = [
        (hello(ring, fleet="the-others"), "fleet", "'the-others'"),
        (hello(ring, fingerprint="ab" * 32), "model", "abababababababab"),
        (hello(ring, shards=5), "model", "split into 3 shards"),
        (hello(ring, node=ring.status()[0]["node"]), "identity", "--state-dir"),
    ]
    for body, code, words in cases:
        with plain(zmq.DEALER, ring.head.control) as dealer:
            dealer.send(json.dumps(body).encode())
            refusal = json.loads(dealer.recv())
            assert (refusal["type"], refusal["code"]) == ("refusal", code)
            assert words in refusal["message"]
            assert refusal["serving"] is True


def test_exo_19_a_greeting_that_can_not_be_is_told_what_is_wrong(ring: StandingRing) -> None:
    with plain(zmq.DEALER, ring.head.control) as dealer:
        deadline = time.monotonic() + 30
        while True:
            dealer.send(json.dumps(hello(ring, hidden="many")).encode())
            # Told once in ten seconds, whoever else sends garbage.
            if dealer.poll(1000):
                break
            assert time.monotonic() < deadline
        refusal = json.loads(dealer.recv())
    assert (refusal["type"], refusal["code"]) == ("refusal", "malformed")
    assert "'hello.hidden' should be a valid integer" in refusal["message"]


# --- data frames ------------------------------------------------------------------------------------------


def forged(epoch: Epoch, number: int, kind: FrameKind = FrameKind.ACTIVATIONS) -> list[bytes]:
    """A whole frame that no stage sent."""
    import numpy as np

    if kind is FrameKind.TOKENS:
        records = np.zeros(1, RECORD)
        records["token"] = 7
        return [encode_header(Frame(kind, epoch, number, records=records))]
    if kind is FrameKind.PROBE:
        return [encode_header(Frame(kind, epoch, number))]
    segments = np.zeros(1, SEGMENT)
    segments["rows"], segments["flags"] = 2, 1
    operations = np.zeros(1, OPERATION)
    operations["kind"] = 1
    header = encode_header(Frame(kind, epoch, number, 64, segments, operations))
    return [header, np.ones((2, 64), np.float32).tobytes()]


def present(ring: StandingRing) -> Epoch:
    epoch = ring.status()[0]["epoch"]
    return Epoch(int(epoch["counter"]), Instance(str(epoch["head"])))


def push(ring: StandingRing, make: Callable[[], list[list[bytes]]], *dropped: str) -> None:
    """Send frames to every data port; each node must drop all of them, under one of these reasons."""
    frames = make()
    before = sum(counted(ring, "data_thread", "dropped", reason) for reason in dropped)
    with ExitStack() as held:
        for member in ring.fleet.members:
            sender = held.enter_context(plain(zmq.PUSH, member.data))
            for frame in frames:
                sender.send_multipart(frame)
        wanted = before + 3 * len(frames)
        ring.until(
            lambda: (
                sum(counted_in_loop(ring, "data_thread", "dropped", reason) for reason in dropped) >= wanted
            ),
            f"{len(frames)} frames dropped as {dropped}",
        )


def test_noise_on_the_data_ports_is_counted(ring: StandingRing) -> None:
    noise = random.Random(9)

    def make() -> list[list[bytes]]:
        return [[noise.randbytes(noise.randrange(1, 300))] for _ in range(100)]

    push(ring, make, "foreign", "length")
    push(ring, lambda: [[os.urandom(100)] * parts for parts in (2, 3, 50)], "foreign", "length")


def test_frames_with_one_wrong_field_are_counted_by_what_is_wrong(ring: StandingRing) -> None:
    good = forged(present(ring), 10**6)[0]

    def with_bytes(at: int, value: bytes) -> list[list[bytes]]:
        return [[good[:at] + value + good[at + len(value) :], bytes(512)]]

    push(ring, lambda: with_bytes(0, b"XXXX"), "foreign")
    push(ring, lambda: with_bytes(4, b"\x63\x00"), "version")
    push(ring, lambda: with_bytes(6, b"\x09\x00"), "kind")
    push(ring, lambda: with_bytes(32, b"\xff\xff\xff\xff"), "limit")
    push(ring, lambda: with_bytes(36, b"\x41\x00\x00\x00"), "hidden")
    push(ring, lambda: with_bytes(48, b"\x01\x00\x00\x00"), "length", "form")
    push(ring, lambda: [[good[:-1], bytes(512)]], "length")


def test_frames_of_another_epoch_are_dropped(ring: StandingRing) -> None:
    epoch = present(ring)
    others = [
        Epoch(epoch.counter - 1, epoch.head),
        Epoch(epoch.counter + 1, epoch.head),
        Epoch(epoch.counter, Instance("0123456789abcdef")),
    ]
    for kind in FrameKind:
        push(ring, lambda kind=kind: [forged(other, 1, kind) for other in others], "epoch")  # type: ignore[misc]


def test_frames_that_came_before_or_belong_elsewhere_are_dropped(ring: StandingRing) -> None:
    # A frame that was taken already, and at the head, or from it, one of the wrong direction.
    push(ring, lambda: [forged(present(ring), number) for number in (0, 1, 5)], "repeated", "place")
    push(
        ring,
        lambda: [forged(present(ring), number, FrameKind.TOKENS) for number in (0, 1, 5)],
        "repeated",
        "place",
    )


def test_a_forged_probe_goes_nowhere(ring: StandingRing) -> None:
    with plain(zmq.PUSH, ring.fleet.members[1].data) as sender:
        for number in (0, 1, 2**63):
            sender.send_multipart(forged(present(ring), number, FrameKind.PROBE))
        assert answer(ring) == PROMPT.generated


def test_parts_too_large_to_be_ours_end_the_connection_only(ring: StandingRing) -> None:
    huge = bytes(64 * 2**20)
    for port in every_port(ring):
        kind = zmq.PUSH if port in [member.data for member in ring.fleet.members] else zmq.DEALER
        with plain(kind, port) as sender:
            sender.send_multipart([b"", huge])


def test_a_flood_of_foreign_frames_does_not_starve_the_ring(ring: StandingRing) -> None:
    frame = forged(Epoch(1, Instance("0123456789abcdef")), 1)
    with ExitStack() as held:
        senders = [held.enter_context(plain(zmq.PUSH, member.data)) for member in ring.fleet.members]
        for _ in range(3000):
            for sender in senders:
                sender.send_multipart(frame)
        assert answer(ring) == PROMPT.generated


# --- the right program at the wrong port ------------------------------------------------------------------


def test_a_client_at_a_control_port_is_told_where_it_is(ring: StandingRing) -> None:
    with Client(ring.fleet.members[1].control, timeout_s=60) as client:
        with pytest.raises(RequestError, match="control port") as refused:
            client.generate("hello")
        assert "7700" in str(refused.value)
    with plain(zmq.REQ, ring.fleet.members[1].control) as request:
        assert ask(request, {"prompt": "a"})["error"]["code"] == "bad_request"


def test_a_forged_frame_of_the_future_costs_one_formation(standing: StandingRing) -> None:
    """It looks like frames that were lost: the hop is named, and the ring formed anew."""
    before = present(standing)
    with plain(zmq.PUSH, standing.fleet.members[1].data) as sender:
        sender.send_multipart(forged(before, 10**6))
        standing.until(
            lambda: all(
                body["state"] == "open" and body["epoch"]["counter"] > before.counter
                for body in (member.node.status() for member in standing.fleet.members)
            ),
            "a new epoch is open",
        )
    assert answer(standing) == PROMPT.generated
    assert any("frames were lost" in str(line.get("message")) for line in standing.said)
