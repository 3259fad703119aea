"""PRI-08 on real nodes: a data frame is lost, repeated or late; it is refused in words, no token is wrong."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
from cluster.conftest import Shards
from cluster.fleet import Fleet, Member, ask, fleet, slowed
from fixtures.reference import load_case

from cascadia_p2p.transport.data import DataReceiver, DataTransport
from cascadia_p2p.transport.faulty import Faults, FaultyTransport
from cascadia_p2p.transport.interfaces import FrameSender
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
LENGTH = 300
SPLIT = (4, 4, 4)
STREAMS = 4

Twins = defaultdict[DataTransport, FaultyTransport]

_connect = DataTransport.connect


class Honest:
    """A node's data transport, whatever was put before it."""

    def __init__(self, transport: DataTransport) -> None:
        self._transport = transport

    def bind(self, host: str, port: int, *, max_part: int) -> DataReceiver:
        return self._transport.bind(host, port, max_part=max_part)

    def connect(self, endpoint: Endpoint) -> FrameSender:
        return _connect(self._transport, endpoint)


class TwinTable(Twins):
    """The faulty twin of every node's transport; idle until a test makes it active.

    Args:
        faults: what each of them commits.
    """

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def __missing__(self, transport: DataTransport) -> FaultyTransport:
        made = self[transport] = FaultyTransport(Honest(transport), self._faults)
        made.active = False
        return made


async def disturbed(ring: Fleet, head: Member, twin: FaultyTransport, whole: tuple[int, ...]) -> int:
    """Commit the fault while streams run; how many epochs that took. All answers must be right."""
    epoch = head.node.measure().epoch
    frames = head.node.measure().data.frames_in
    asked = [ask(head, CASE.prompts[1].ids, max_tokens=LENGTH, ignore_eos=True) for _ in range(STREAMS)]
    # That they still run is certain, however late this is seen to; that frames follow closely, too.
    with slowed(head, 0.005):
        waiting = [asyncio.create_task(each) for each in asked]
        await ring.until(lambda: head.node.measure().data.frames_in > frames + 20, "streams run")
        twin.active = True
        await ring.until(lambda: twin.counts.faults == 1, "the fault is committed")
        assert not any(each.done() for each in waiting)
    assert [reply.token_ids for reply in await asyncio.gather(*waiting)] == [whole] * STREAMS
    return head.node.measure().epoch - epoch


@pytest.mark.parametrize(
    ("faults", "epochs"),
    [
        (Faults(drop=1.0, most=1), 1),
        (Faults(duplicate=1.0, most=1), 0),
        (Faults(reorder=1.0, most=1), 1),
    ],
    ids=["lost", "repeated", "swapped"],
)
def test_pri_08_a_frame_that_does_not_come_as_it_was_sent_changes_no_token(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, epochs: int
) -> None:
    """On each hop in turn, the one that carries tokens to the head too."""
    twins = TwinTable(faults)
    monkeypatch.setattr(
        DataTransport, "connect", lambda transport, endpoint: twins[transport].connect(endpoint)
    )

    async def scenario() -> None:
        async with asyncio.timeout(250), fleet(tmp_path) as ring:
            model = shards(CASE, SPLIT)
            # One row a frame, so that frames follow each other closely.
            settings = {"rows": 1, "slots": STREAMS}
            for shard in range(len(SPLIT)):
                await ring.start(model, shard=shard, **settings)
            head = await ring.open()
            whole = (await ask(head, CASE.prompts[1].ids, max_tokens=LENGTH, ignore_eos=True)).token_ids
            for stage, sender in enumerate(ring.members):
                ring.said.clear()
                took = await disturbed(ring, head, twins[sender.places.transport], whole)
                assert took == epochs, ring.sentences("ring_closed")
                receiver = ring.members[(stage + 1) % len(SPLIT)]
                if epochs:
                    name = f"{receiver.places.identity.node_id[:8]} (shard {(stage + 1) % len(SPLIT)})"
                    assert any(
                        name in sentence and "frames were lost on the way here" in sentence
                        for sentence in ring.sentences("ring_closed")
                    ), ring.sentences("ring_closed")
                else:
                    assert receiver.node.measure().data.dropped["repeated"] == 1

    asyncio.run(scenario())
