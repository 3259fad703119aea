"""Real frames of a ring, recorded and sent again: twice, out of order, damaged, and in a later epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq
from cluster.conftest import Shards
from cluster.sockets import plain
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p.client import Client
from cascadia_p2p.transport.data import DataSender
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
Frames = dict[Endpoint, list[list[bytes]]]


@pytest.fixture(scope="module")
def ring(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    with standing_ring(tmp_path_factory.mktemp("replays"), shards(CASE, (6, 6)), 2) as made:
        yield made


def answer(ring: StandingRing) -> tuple[int, ...]:
    with Client(ring.endpoint, timeout_s=30) as client:
        return client.generate(PROMPT.ids, max_tokens=24).token_ids


@pytest.fixture
def recorded(ring: StandingRing, monkeypatch: pytest.MonkeyPatch) -> Frames:
    """What each data port received for one answer."""
    found: Frames = {member.data: [] for member in ring.fleet.members}
    order = [member.data for member in ring.fleet.members]
    honest = DataSender.send

    def send(self: DataSender, header: bytes | bytearray, payload: object) -> bool:
        sent = honest(self, header, payload)  # type: ignore[arg-type]
        if sent:
            # The head sends activations to the tail, the tail tokens to the head.
            target = order[0] if header[6] == 2 else order[1]
            parts = [bytes(header)] if payload is None else [bytes(header), payload.tobytes()]  # type: ignore[attr-defined]
            found[target].append(parts)
        return sent

    monkeypatch.setattr(DataSender, "send", send)
    assert answer(ring) == PROMPT.generated
    monkeypatch.undo()
    assert all(len(frames) >= 20 for frames in found.values())
    return found


def dropped(ring: StandingRing, *reasons: str) -> int:
    """Frames dropped at both nodes; in the ring's loop."""
    counted = [member.node.status()["data_thread"] for member in ring.fleet.members]
    return sum(each["dropped"].get(reason, 0) for each in counted for reason in reasons)  # type: ignore[index, call-overload, union-attr, misc]


def replay(ring: StandingRing, frames: Frames, *reasons: str) -> None:
    """Send them; every one must be dropped for one of the reasons."""
    wanted = ring.call(lambda: dropped(ring, *reasons)) + sum(map(len, frames.values()))
    with ExitStack() as held:
        for port, messages in frames.items():
            sender = held.enter_context(plain(zmq.PUSH, port))
            for parts in messages:
                sender.send_multipart(parts)
        ring.until(lambda: dropped(ring, *reasons) >= wanted, f"all are dropped as {reasons}")


def test_frames_that_were_taken_are_not_taken_again_in_any_order(
    ring: StandingRing, recorded: Frames
) -> None:
    epoch = ring.status()[0]["epoch"]
    replay(ring, recorded, "repeated")
    mixed = {port: random.Random(3).sample(frames, len(frames)) for port, frames in recorded.items()}
    replay(ring, mixed, "repeated")
    # To the other port: tokens to the tail, activations to the head.
    ports = list(recorded)
    replay(ring, dict(zip(ports, [recorded[ports[1]], recorded[ports[0]]], strict=True)), "place", "hidden")
    assert answer(ring) == PROMPT.generated
    assert ring.status()[0]["epoch"] == epoch


def test_frames_of_an_epoch_that_is_over_do_nothing(ring: StandingRing, recorded: Frames) -> None:
    before = ring.status()[0]["epoch"]["counter"]
    future = bytearray(recorded[ring.fleet.members[1].data][0][0])
    future[24:32] = (10**6).to_bytes(8, "little")
    with plain(zmq.PUSH, ring.fleet.members[1].data) as sender:
        sender.send_multipart([bytes(future), recorded[ring.fleet.members[1].data][0][1]])
        ring.until(
            lambda: all(
                body["state"] == "open" and body["epoch"]["counter"] > before  # type: ignore[index, call-overload, operator]
                for body in (member.node.status() for member in ring.fleet.members)
            ),
            "a new epoch is open",
        )
    replay(ring, recorded, "epoch")
    assert answer(ring) == PROMPT.generated


def test_damaged_frames_are_refused_and_never_computed(ring: StandingRing, recorded: Frames) -> None:
    """Flipped and cut anywhere but in their number, which alone could stand for frames that were lost."""
    draw = random.Random(8)
    damaged: Frames = {}
    for port, frames in recorded.items():
        damaged[port] = []
        for parts in frames:
            header = bytearray(parts[0])
            at = draw.choice([*range(24), *range(32, len(header))])
            header[at] ^= 1 << draw.randrange(8)
            cut = draw.choice((len(header), draw.randrange(1, len(header))))
            damaged[port].append([bytes(header[:cut]), *parts[1:]])
    reasons = (
        "foreign",
        "version",
        "kind",
        "length",
        "limit",
        "hidden",
        "form",
        "table",
        "epoch",
        "repeated",
    )
    before = ring.rows()
    replay(ring, damaged, *reasons, "place", "payload")
    assert ring.rows() == before
    assert answer(ring) == PROMPT.generated
