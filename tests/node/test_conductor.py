"""What becomes of streams when a ring is lost: which go on, which are suspected, which waited too long."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from types import FunctionType, ModuleType

import numpy as np
import pytest

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node import conductor as conductor_module
from cascadia_p2p.node.conductor import MOST_SPARED, HeadConductor
from cascadia_p2p.ring.policy import Policy, StageTime
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.frames import SegmentFlag, alternative_table, record_table

PROMISE = Promise(4, 64, 8)


class Clock:
    """Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class World:
    """A conductor whose ring answers when told to."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.conductor = HeadConductor(Scheduler(Policy()), self.updates.extend)

    def submit(self, stream: int, prompt: int = 3, max_tokens: int = 10) -> None:
        def refused(_: StreamId, error: RequestError) -> None:
            raise error

        request = StreamRequest(StreamId(stream), tuple(range(1, prompt + 1)), max_tokens)
        self.conductor.submit(request, refused)

    def plan(self) -> Plan:
        plan = self.conductor.schedule()
        assert plan is not None
        return plan

    def answer(self, plan: Plan) -> None:
        """Each stream's token is the number of ids that it has."""
        wanting = plan.segments[(plan.segments["flags"] & SegmentFlag.WANT_TOKEN) != 0]
        records = record_table(len(wanting))
        for name in ("stream", "slot"):
            records[name] = wanting[name]
        records["position"] = records["token"] = wanting["start"] + wanting["rows"]
        self.conductor.on_tokens(plan.number, records, alternative_table())

    def drain(self) -> None:
        while (plan := self.conductor.schedule()) is not None:
            self.answer(plan)

    def lose(self, held: int) -> None:
        self.conductor.suspend("pc2 is gone", (1,), held)

    def errors(self) -> dict[int, RequestError]:
        return {int(u.stream.request.stream): u.error for u in self.updates if u.error is not None}

    def ids(self) -> dict[int, list[int]]:
        return {int(u.stream.request.stream): u.stream.ids for u in self.updates}


def test_streams_go_on_in_the_next_ring_with_what_they_have() -> None:
    quiet, disturbed = World(), World()
    for world in (quiet, disturbed):
        world.conductor.open(3, PROMISE)
        for stream in range(6):
            world.submit(stream, prompt=2 + stream)
    for _ in range(3):
        disturbed.answer(disturbed.plan())
    disturbed.plan()
    disturbed.lose(4)
    assert disturbed.conductor.schedule() is None
    disturbed.submit(6)
    quiet.submit(6)
    disturbed.conductor.open(3, PROMISE)
    quiet.drain()
    disturbed.drain()
    assert disturbed.errors() == {}
    assert disturbed.ids() == quiet.ids()
    assert sum(len(u.tokens) for u in disturbed.updates) == 7 * 10


def test_who_lay_at_the_lost_stage_twice_is_given_up_alone() -> None:
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1)
    world.drain()
    world.submit(2)
    culprit = world.plan()
    world.lose(culprit.number)
    assert world.errors() == {}
    world.submit(3)
    world.conductor.open(3, PROMISE)
    again = world.plan()
    assert 2 in again.segments["stream"]
    world.lose(again.number)
    error = world.errors().pop(2)
    assert error.code is ErrorCode.INTERNAL
    assert "a node was lost twice while it computed this request" in error.message
    assert "pc2 is gone" in error.message
    world.conductor.open(3, PROMISE)
    world.drain()
    assert len(world.ids()[3]) == 13


@pytest.mark.parametrize(("tokens", "losses"), [(0, 2), (1, 3), (3, 2)])
def test_a_stream_that_kills_each_node_that_computes_it_ends_alone(tokens: int, losses: int) -> None:
    """At its prompt, or at a token of its own; others are with it in the frame, new and old ones."""
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1)
    world.answer(world.plan())
    for stream in (2, 3):
        world.submit(stream, prompt=2)
    lost, generated = 0, 0
    while not world.errors():
        plan = world.plan()
        windows = plan.segments[plan.segments["stream"] == 2]
        if generated >= tokens and len(windows):
            lost += 1
            assert lost <= losses
            world.lose(plan.number)
            if not world.errors():
                world.submit(3 + lost)
            world.conductor.open(3, PROMISE)
        else:
            world.answer(plan)
            generated += len(windows)
    assert lost == losses
    assert list(world.errors()) == [2]
    world.drain()
    assert list(world.errors()) == [2]
    assert {stream: len(ids) for stream, ids in world.ids().items() if stream != 2} == {
        1: 13,
        3: 12,
        **{3 + number: 13 for number in range(1, losses)},
    }


@pytest.mark.parametrize("given_up", [False, True], ids=["spared", "too_often"])
def test_who_lay_at_a_stage_that_came_back_as_it_was_is_spared_so_often(given_up: bool) -> None:
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1)
    for _ in range(MOST_SPARED + 2 * given_up):
        world.lose(world.plan().number)
        world.conductor.open(3, PROMISE, survived=True)
    world.drain()
    assert (1 in world.errors()) == given_up
    if not given_up:
        assert len(world.ids()[1]) == 13


def test_a_token_behind_the_rows_clears_a_stream() -> None:
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1)
    for _ in range(4):
        plan = world.plan()
        world.lose(plan.number)
        world.conductor.open(3, PROMISE)
        world.answer(world.plan())
    world.drain()
    assert world.errors() == {}
    assert len(world.ids()[1]) == 13


@pytest.mark.parametrize(("held", "guilty"), [(0, False), (1, True), (2, False)])
def test_only_frames_that_the_stage_had_not_passed_on_count(held: int, guilty: bool) -> None:
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1)
    for _ in range(2):
        assert world.plan().number == 1
        world.lose(held)
        world.conductor.open(3, PROMISE)
    assert (1 in world.errors()) is guilty


def test_a_beat_that_is_older_than_the_answers_hides_nobody() -> None:
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1)
    for answered in (5, 0):
        for _ in range(answered):
            world.answer(world.plan())
        world.plan()
        world.lose(1)
        world.conductor.open(3, PROMISE)
    assert list(world.errors()) == [1]


def test_a_stream_that_fits_no_longer_ends_as_one_of_full_length() -> None:
    world = World()
    world.conductor.open(3, PROMISE)
    world.submit(1, prompt=20)
    while not world.updates:
        world.answer(world.plan())
    world.lose(0)
    world.conductor.open(3, Promise(4, 20, 8))
    assert world.updates[-1].finish is not None
    assert len(world.ids()[1]) == 21


def test_waiting_has_two_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(conductor_module, "time", clock)
    world = World()
    world.conductor.open(3, Promise(1, 64, 8))
    world.submit(1)
    world.submit(2)
    world.answer(world.plan())
    clock.now += 50
    world.conductor.expire(60, 20, ())
    assert world.errors() == {}
    world.lose(0)
    clock.now += 15
    world.submit(3)
    world.conductor.expire(60, 20, (1,))
    assert world.errors() == {}, "without a ring its limit alone holds, also for who never ran"
    clock.now += 6
    world.conductor.expire(60, 20, (1,))
    assert set(world.errors()) == {1, 2}
    error = world.errors()[1]
    assert error.code is ErrorCode.RING_INCOMPLETE
    assert "pc2 is gone, and nothing took its place within 21 s; missing: shard 1" in error.message
    clock.now += 10
    world.lose(0)
    world.conductor.expire(60, 20, (1,))
    assert 3 not in world.errors(), "its wait began when it came"
    world.conductor.open(3, PROMISE)
    clock.now += 10
    world.conductor.expire(60, 20, ())
    world.drain()
    assert len(world.ids()[3]) == 13
    assert np.all(np.diff(world.ids()[3][3:]) == 1)


def test_the_queues_limit_begins_anew_with_the_next_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(conductor_module, "time", clock)
    world = World()
    world.conductor.open(3, Promise(1, 64, 8))
    world.submit(1, max_tokens=60)
    world.submit(2)
    world.answer(world.plan())
    world.lose(0)
    clock.now += 100
    world.conductor.open(3, Promise(1, 64, 8))
    world.conductor.expire(60, 200, ())
    assert world.errors() == {}, "nobody could have a slot meanwhile"
    world.answer(world.plan())
    clock.now += 61
    world.conductor.expire(60, 200, ())
    error = world.errors()[2]
    assert error.code is ErrorCode.OVERLOADED
    assert "waited 61 s for a free slot" in error.message
    assert 1 not in world.errors()


@pytest.mark.parametrize("was_head", [False, True])
def test_a_head_without_a_ring_lets_all_wait_for_one_as_long_as_after_a_loss(
    was_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(conductor_module, "time", clock)
    world = World()
    if was_head:
        world.conductor.open(3, PROMISE)
        world.lose(0)
        clock.now += 500
    world.conductor.begin()
    world.submit(1)
    clock.now += 150
    world.conductor.expire(60, 200, (1,))
    assert world.errors() == {}
    clock.now += 51
    world.conductor.expire(60, 200, (1,))
    error = world.errors()[1]
    assert error.code is ErrorCode.RING_INCOMPLETE
    assert error.message == "the ring is incomplete: no ring has formed within 201 s; missing: shard 1"


def test_a_door_that_opens_behind_its_ring_leaves_the_ring_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client port that is in use is tried again, for so long that the ring may be there before."""
    clock = Clock()
    monkeypatch.setattr(conductor_module, "time", clock)
    world = World()
    world.conductor.open(3, PROMISE)
    world.conductor.begin()
    world.submit(1)
    world.answer(world.plan())
    clock.now += 1000
    world.conductor.expire(60, 200, ())
    assert world.errors() == {}
    world.drain()
    assert len(world.ids()[1]) == 13


def held_by(root: object) -> int:
    """Values that an object keeps alive, code aside."""
    seen, rest = {id(root)}, [root]
    while rest:
        for each in gc.get_referents(rest.pop()):
            if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
                seen.add(id(each))
                rest.append(each)
    return len(seen)


def test_pet_14_two_hours_of_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand on a clock of its own, some of them cancelled, with a ring that is lost at times."""
    clock = Clock()
    monkeypatch.setattr(conductor_module, "time", clock)
    ended: Counter[int] = Counter()
    # Rows that cost nothing beside a frame: frames are as long as they may be.
    even = StageTime.measured(((1, 1.0), (256, 1.001)))
    assert even is not None

    def told(updates: Sequence[Update]) -> None:
        ended.update(int(update.stream.id) for update in updates if update.terminal)

    conductor = HeadConductor(Scheduler(Policy(stage_time=even)), told)
    world, promise = World(), Promise(64, 64, 256, 8)
    world.conductor = conductor
    conductor.open(3, promise)
    began, held = clock.now, []
    for turn in range(2000):
        for number in range(turn * 50, turn * 50 + 50):
            prompt = (turn % 7, number % 11, 5)
            conductor.submit(StreamRequest(StreamId(number), prompt, 1 + number % 2), lambda *_: None)
        if turn % 10 == 3:
            conductor.drop(StreamId(turn * 50), RequestError(ErrorCode.CANCELLED, "gone"))
        if turn % 100 == 7:
            conductor.suspend("pc2 is gone", (1,), world.plan().number)
            conductor.open(3, promise)
        world.drain()
        clock.now += 4.0
        conductor.expire(60, 900, ())
        if turn in (999, 1999):
            held.append(held_by(conductor))
    assert clock.now - began > 7200
    assert len(ended) == 100_000
    assert set(ended.values()) == {1}
    assert (conductor.running, conductor.waiting, len(conductor._in_flight)) == (0, 0, 0)
    assert held[1] < held[0] + 1000, "half of all requests left something"
