"""What a standby knows of answers, whatever is lost on the way: beginnings of them, and in the end all."""

from __future__ import annotations

import itertools
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.node import journal as journal_module
from cascadia_p2p.node.journal import CHUNK, WINDOW, JournalWriter
from cascadia_p2p.node.journal_copy import JournalCopy
from cascadia_p2p.node.kept import ANSWER_IDS, MAX_IDS, AnswerName, Asked, KeptAnswers, Record
from cascadia_p2p.ring.streams import Score
from cascadia_p2p.types import Instance, NodeId, Sampling
from cascadia_p2p.wire.control import MAX_CONTROL_BYTES
from cascadia_p2p.wire.journal import Journal
from cascadia_p2p.wire.messages import FinishReason, decode_control

HEAD = (NodeId("aa" * 8), Instance("ab" * 8))
STANDBY = (NodeId("bb" * 8), Instance("bc" * 8))
NAMES = [AnswerName("", f"{n:032x}") for n in range(3)] + [AnswerName("alice", f"{0:032x}")]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    def drop(*_: object) -> NoReturn:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])


def asked(prompt: tuple[int, ...] = (1, 2, 3), logprobs: int | None = None) -> Asked:
    return Asked(prompt, 10**6, ("end",), frozenset({0}), Sampling(0.7, 5, 0.9, 2**64 - 1), logprobs)


def score(token: int) -> Score:
    return Score(-token / 3, ((token, -token / 3), (token + 1, float("-inf"))))


@dataclass
class World:
    """A head, its standby, and what is on its way between them."""

    max_ids: int = MAX_IDS
    now: float = 0.0
    taken: bool = True
    records: dict[int, Record] = field(default_factory=dict)
    said: defaultdict[AnswerName, list[Record]] = field(default_factory=lambda: defaultdict(list))
    wire: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = itertools.count(1)
        self.writer = JournalWriter(*HEAD, self.post, itertools.count(1))
        self.copy = JournalCopy(*STANDBY, self.max_ids)

    def post(self, node: NodeId, data: bytes) -> bool:
        assert node == STANDBY[0]
        assert len(data) <= MAX_CONTROL_BYTES
        if self.taken:
            self.wire.append(data)
        return self.taken

    def follow(self) -> None:
        self.writer.follow([STANDBY], self.records.values, self.now)

    def begin(self, name: AnswerName, what: Asked) -> Record:
        for old in [record for record in self.records.values() if record.name == name]:
            self.drop(old)
        record = Record(next(self.numbers), name, what, [])
        self.records[record.number] = record
        self.said[name].append(record)
        self.writer.changed(record)
        return record

    def grow(self, record: Record, ids: list[int], finish: FinishReason | None = None) -> None:
        if record.finish is not None:
            return
        record.ids += ids
        if record.asked.logprobs is not None:
            record.scores += map(score, ids)
        if finish is not None:
            record.finish, record.cached, record.since = finish, 2, self.now
        self.writer.changed(record)
        self.writer.flush(self.now)

    def drop(self, record: Record) -> None:
        del self.records[record.number]
        self.writer.dropped(record)

    def deliver(self, *, lost: bool = False) -> None:
        """One message arrives, or never does."""
        if self.wire:
            message = decode_control(self.wire.pop(0))
            assert isinstance(message, Journal)
            if not lost and (ack := self.copy.hear(message, self.now)) is not None:
                self.writer.heard(ack, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if (ack := self.copy.due(self.now)) is not None:
            self.writer.heard(ack, self.now)
        self.follow()

    def settle(self) -> None:
        """Nothing is lost any more."""
        self.taken = True
        for _ in range(200):
            self.wait(0.5)
            while self.wire:
                self.deliver()

    def known(self) -> list[Record]:
        """What a takeover would go on with now."""
        told = self.copy.report()["ids"]
        assert isinstance(told, int)
        found = self.copy.take_over()
        assert sum(record.weight for record in found) <= told <= self.max_ids
        assert not len(self.copy)
        return found

    def right(self) -> None:
        """All that a takeover would go on with is a beginning of what the head made for that name."""
        for record in self.known():
            assert any(begins(record, each) for each in self.said[record.name])


def begins(record: Record, whole: Record) -> bool:
    if record.asked != whole.asked or record.ids != whole.ids[: len(record.ids)]:
        return False
    if record.finish is not None:
        return (record.ids, record.finish, record.cached) == (whole.ids, whole.finish, whole.cached)
    wanted = [] if record.asked.logprobs is None else map(finite, map(score, record.ids))
    return record.scores == list(wanted)


def finite(each: Score) -> Score:
    return Score(each.logprob, tuple((token, max(value, -3.4e38)) for token, value in each.alternatives))


FIRST = st.tuples(st.just("grow"), st.just(0), st.just(1))
ONE = st.tuples(st.just("deliver"), st.just(1))
LOST = st.tuples(st.just("lose"))
STEPS = st.one_of(
    *(FIRST, FIRST, FIRST, ONE, ONE, ONE, LOST, LOST),
    st.tuples(st.just("begin"), st.sampled_from(NAMES), st.integers(1, 30), st.sampled_from([None, 2])),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(1, 20)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("deliver"), st.integers(1, 9)),
    st.tuples(st.just("taken"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.05, 0.3, 4.0])),
)


def step(world: World, what: tuple[object, ...]) -> None:
    match what:
        case ("begin", AnswerName() as name, int(length), None | int() as logprobs):
            world.begin(name, asked(tuple(range(1, 1 + length)), logprobs))
        case ("deliver", int(count)):
            for _ in range(count):
                world.deliver()
        case ("lose",):
            world.deliver(lost=True)
        case ("taken", bool(taken)):
            world.taken = taken
        case ("wait", float(seconds)):
            world.wait(seconds)
        case (str(kind), int(place), *rest):
            found = list(world.records.values())
            if not found:
                return
            record = found[place % len(found)]
            match kind, rest:
                case "grow", [int(count)]:
                    # No id twice: one that is left out is seen.
                    world.grow(record, list(range(len(record.ids), len(record.ids) + count)))
                case "end", []:
                    world.grow(record, [7], FinishReason.STOP)
                case "drop", []:
                    world.drop(record)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=10, max_size=60), st.booleans())
def test_whatever_is_lost_a_takeover_goes_on_behind_beginnings(
    steps: list[tuple[object, ...]], tight: bool
) -> None:
    world = World(max_ids=250 if tight else MAX_IDS)
    for each in [("begin", NAMES[0], 3, None), ("wait", 0.05), ("deliver", 1), *steps]:
        step(world, each)
    world.right()


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_once_nothing_is_lost_any_more_the_standby_knows_all(steps: list[tuple[object, ...]]) -> None:
    world = World()
    for each in steps:
        step(world, each)
    world.settle()
    told = {(record.name, tuple(record.ids), record.finish) for record in world.records.values()}
    assert {(record.name, tuple(record.ids), record.finish) for record in world.known()} == told
    (report,) = world.writer.report()
    assert isinstance(report, dict)
    assert report["followed"]
    assert not report["unread_bytes"]


def test_a_frame_of_many_answers_is_one_message() -> None:
    world = World()
    world.wait(0.0)
    records = [world.begin(AnswerName("", f"{n:032x}"), asked()) for n in range(176)]
    world.settle()
    sent = len(world.wire)
    for record in records:
        record.ids.append(5)
        world.writer.changed(record)
    world.writer.flush(world.now)
    assert len(world.wire) - sent == 1


def test_without_a_standby_nothing_is_sent_or_kept() -> None:
    world = World()
    assert not world.writer.active
    world.grow(world.begin(NAMES[0], asked()), [1, 2, 3])
    world.writer.follow([], world.records.values, 1.0)
    assert not world.wire
    assert world.writer.report() == []


def test_a_long_telling_goes_in_small_messages_and_waits_for_its_reader() -> None:
    """Stop strings of control characters are the longest that JSON makes of a request."""
    world = World()
    stop = tuple(chr(1 + n) * 256 for n in range(16))
    for n in range(16):
        what = Asked(tuple(range(2**31 - 12_001, 2**31 - 1)), 9, stop, frozenset(range(80)), Sampling(), 20)
        record = world.begin(AnswerName("k" * 40, f"{n:0128x}"), what)
        record.ids += [2**31 - 1] * 50
        record.scores += [Score(-1e-300 / 3, ((2**31 - 1, -1.2345678901234567e-300),) * 20)] * 50
    world.wait(0.0)
    on_the_way = sum(map(len, world.wire))
    assert WINDOW <= on_the_way < WINDOW + 4 * CHUNK
    world.settle()
    assert len(world.known()) == 16


def test_who_acknowledges_nothing_is_given_up_once_and_told_anew() -> None:
    world = World()
    record = world.begin(NAMES[0], asked())
    world.wait(0.0)
    sessions = set()
    for _ in range(40):
        world.now += 1.0
        world.grow(record, [4])
        world.follow()
        sessions |= {decode_control(data).session for data in world.wire}  # type: ignore[union-attr]
        world.wire.clear()
    assert 3 <= len(sessions) <= 7, "less and less often"
    assert world.writer.active
    world.settle()
    assert [each.ids for each in world.known()] == [record.ids]
    assert journal_module.LONGEST_AGAIN_S == 30.0


def test_what_an_earlier_head_told_goes_when_the_present_one_has_told_all() -> None:
    world = World()
    world.grow(world.begin(NAMES[0], asked()), [1, 2])
    world.settle()
    other = World()
    other.copy = world.copy
    later = (NodeId("cc" * 8), Instance("cd" * 8))
    other.writer = JournalWriter(*later, other.post, itertools.count(1))
    other.grow(other.begin(NAMES[1], asked()), [3])
    other.follow()
    assert len(other.copy) == 1
    other.settle()
    assert [record.ids for record in other.known()] == [[3]]


def test_behind_a_message_that_was_lost_nothing_is_taken_until_all_is_told_anew() -> None:
    world = World()
    record = world.begin(NAMES[0], asked())
    world.settle()
    world.grow(record, [1])
    world.deliver()
    for token in (2, 3):
        world.grow(record, [token])
    world.deliver(lost=True)
    world.deliver()
    assert not world.wire
    assert [each.ids for each in copy_of(world)] == [[1]]
    world.settle()
    assert [each.ids for each in world.known()] == [[1, 2, 3]]


def copy_of(world: World) -> list[Record]:
    """What a takeover would go on with, without one."""
    return deepcopy(world.copy).take_over()


def test_old_messages_of_the_head_do_nothing() -> None:
    world = World()
    record = world.begin(NAMES[0], asked())
    world.settle()
    world.grow(record, [1])
    old = list(world.wire)
    world.deliver()
    world.grow(record, [2])
    world.deliver()
    world.wire += old * 3
    while world.wire:
        world.deliver()
    assert [each.ids for each in world.known()] == [[1, 2]]


def test_an_answer_that_is_too_heavy_is_not_taken_whatever_is_told_of_it() -> None:
    world = World(max_ids=4 * ANSWER_IDS)
    world.grow(world.begin(NAMES[0], asked()), [1] * 10, FinishReason.STOP)
    heavy = world.begin(NAMES[1], asked())
    world.grow(heavy, [1] * 5 * ANSWER_IDS)
    world.grow(heavy, [2])
    light = world.begin(NAMES[2], asked())
    world.grow(light, [3])
    world.settle()
    assert [each.ids for each in world.known()] == [[3]]


def test_a_taken_over_answer_is_as_old_as_it_was() -> None:
    world = World()
    world.now = 100.0
    world.grow(world.begin(NAMES[0], asked()), [1], FinishReason.LENGTH)
    world.now = 650.0
    world.settle()
    (record,) = world.known()
    assert record.since == 100.0
    kept = KeptAnswers()
    kept.keep(record, record.since)
    assert kept.find(NAMES[0], asked(), (), 700.0) is record
    assert kept.find(NAMES[0], asked(), (), 701.0) is None


def test_what_was_told_long_ago_is_forgotten_and_told_anew_when_it_goes_on() -> None:
    world = World()
    record = world.begin(NAMES[0], asked())
    world.grow(record, [1])
    world.settle()
    assert len(world.copy) == 1
    world.wait(601.0)
    assert not len(world.copy)
    world.grow(record, [2])
    world.settle()
    assert [each.ids for each in world.known()] == [[1, 2]]
