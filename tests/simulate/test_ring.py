from __future__ import annotations

import pytest

from cascadia_p2p.errors import UsageError
from cascadia_p2p.simulate.fleet import Fleet, Hop, Stage, even_hops
from cascadia_p2p.simulate.ring import Load, VirtualRing
from cascadia_p2p.simulate.tables import StageTable
from cascadia_p2p.types import Promise

PROMISE = Promise(64, 256, 16)
NO_TIME = Hop(0.0)


def stage(seconds: float, row: float = 0.0, head: float | None = None) -> Stage:
    table = StageTable(((1, seconds + row), (16, seconds + 16 * row)))
    return Stage("any", table, 1, None if head is None else StageTable(((1, head), (16, head))))


def fleet(stages: list[Stage], hop: Hop = NO_TIME) -> Fleet:
    return Fleet("test", tuple(stages), even_hops(len(stages), hop), PROMISE)


def test_a_frame_alone_takes_all_stages_and_hops() -> None:
    ring = VirtualRing(fleet([stage(1), stage(2), stage(3, head=0.5)], Hop(0.25, 0.125)))
    journey = ring.send(Load(2, 1), 10.0)
    assert journey.begins == (10.0, 11.5, 14.0)
    assert journey.ends == (11.0, 13.5, 17.5)
    # The answer is short: it takes the latency alone.
    assert journey.back == 17.75
    assert (journey.trip_s, journey.stages_s, journey.hops_s, journey.queued_s) == (7.75, 6.5, 1.25, 0.0)


def test_frames_wait_for_the_slowest_stage_in_order() -> None:
    ring = VirtualRing(fleet([stage(1), stage(3), stage(1)]))
    journeys = [ring.send(Load(1, 1), float(n)) for n in range(3)]
    assert [each.begins[1] for each in journeys] == [1.0, 4.0, 7.0]
    assert [each.back for each in journeys] == [5.0, 8.0, 11.0]
    assert [each.queued_s for each in journeys] == [0.0, 2.0, 4.0]


def test_a_wire_carries_one_frame_at_a_time() -> None:
    ring = VirtualRing(fleet([stage(0.1), stage(0.1)], Hop(0.0, 1.0)))
    first, second = ring.send(Load(2, 1), 0.0), ring.send(Load(2, 1), 0.1)
    assert first.begins[1] == pytest.approx(2.1)
    assert second.begins[1] == pytest.approx(4.1)


def test_a_late_reader_adds_to_the_trip() -> None:
    ring = VirtualRing(fleet([stage(1), stage(1)], Hop(0.5)), reply_wait_s=4.0)
    assert ring.send(Load(1, 1), 0.0).back == 6.5


def test_a_head_at_work_can_not_start_another_frame() -> None:
    ring = VirtualRing(fleet([stage(1), stage(1)]))
    ring.send(Load(1, 1), 0.0)
    with pytest.raises(ValueError, match="at work"):
        ring.send(Load(1, 1), 0.5)


def test_a_frame_that_asks_for_nothing_passes_no_head() -> None:
    one = fleet([stage(1, row=1.0, head=5.0)])
    assert VirtualRing(one).send(Load(3, 0), 0.0).back == 4.0
    assert VirtualRing(one).send(Load(3, 2), 0.0).back == 9.0
    assert VirtualRing(one).send(Load(0, 0), 0.0).back == 0.0


def test_hops_can_be_set() -> None:
    wide = fleet([stage(1), stage(1)], Hop(0.3, 0.1)).with_hops(1.0)
    assert wide.hops[0] == Hop(0.9, 0.1)
    assert fleet([stage(1), stage(1)], Hop(0.3, 0.1)).with_hops(0.05).hops[0] == Hop(0.0, 0.05)
    with pytest.raises(UsageError, match="a hop of"):
        wide.with_hops(-1.0)


def test_the_scheduler_learns_of_the_slowest_stage() -> None:
    slow = fleet([stage(1, 0.5), stage(4, 0.25), stage(1, 0.5)])
    pace = slow.pace()
    assert [pace.slowest.of(rows) for rows in (1, 8)] == pytest.approx([4.25, 6.0])
    assert [pace.trip.of(rows) for rows in (1, 8)] == pytest.approx([7.25, 16.0])
    assert slow.slowest(8) == 1
    with pytest.raises(UsageError, match="do not grow"):
        fleet([stage(1)]).pace()
