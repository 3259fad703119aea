"""The scheduler under a virtual clock, with the stage times of the published fleet: eleven PCs, one a role.

A small model of such a ring: the head composes a frame as soon as it is free, every stage takes its time for
the frame's rows in order of arrival, and the answer is back a moment after the last stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import numpy as np

from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest
from cascadia_p2p.ring.stagetime import StageTime, ring_time
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.frames import RECORD, SegmentFlag

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16)
MS_PER_ROW = {
    0: (36.0, 22.4, 19.1, 16.4, 13.2, 11.3, 13.7, 12.7, 11.1),
    1: (35.2, 25.9, 23.5, 20.3, 16.8, 14.9, 18.6, 17.7, 15.6),
    2: (38.0, 27.9, 25.6, 22.2, 17.4, 15.9, 19.9, 18.8, 16.6),
    3: (39.7, 28.8, 25.8, 22.2, 17.9, 16.7, 21.2, 19.6, 17.4),
    4: (34.8, 25.6, 23.3, 20.2, 16.7, 14.6, 18.1, 16.9, 14.7),
    5: (35.0, 25.5, 23.3, 20.2, 16.7, 14.6, 18.2, 16.9, 14.7),
    6: (34.8, 25.6, 23.3, 20.2, 16.7, 14.6, 18.1, 16.9, 14.7),
    7: (34.5, 25.8, 23.3, 20.1, 16.7, 14.7, 18.0, 16.9, 14.7),
    8: (37.7, 27.3, 24.2, 21.4, 16.7, 15.5, 18.7, 17.5, 15.1),
    9: (32.2, 22.9, 20.7, 18.1, 15.0, 12.9, 16.0, 15.0, 12.9),
    10: (31.2, 21.8, 18.6, 15.9, 13.2, 11.0, 13.9, 12.9, 11.1),
}
"""Of each role, as published, between the levels' mean rows along a line."""

VOCABULARY_MS = 11.6
TRIP_S = 0.042
"""Network and waiting of a trip."""


def stage_times() -> list[StageTime]:
    times = []
    for role, per_row in MS_PER_ROW.items():
        more = VOCABULARY_MS if role == 10 else 0.0
        points = [(rows, (rows * ms + more) / 1e3) for rows, ms in zip(ROWS, per_row, strict=True)]
        time = StageTime.measured(points)
        assert time is not None
        times.append(time)
    return times


TIMES = stage_times()
_known = ring_time(TIMES)
assert _known is not None
POLICY = Policy(stage_time=_known.slowest, trip_time=_known.trip)


@dataclass
class Fleet:
    """One run: when each stream came, and when its tokens did."""

    scheduler: Scheduler
    came: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    frames: list[int] = field(default_factory=list)
    busy: bool = False
    free: list[float] = field(default_factory=lambda: [0.0] * len(TIMES))
    events: list[tuple[float, int, int, object]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)

    def at(self, time: float, kind: int, what: object) -> None:
        heapq.heappush(self.events, (time, next(self.order), kind, what))

    def run(self, arrivals: Iterable[tuple[float, int, int]]) -> None:
        """Streams of so many prompt rows and tokens, each coming at a time."""
        for number, (time, prompt, tokens) in enumerate(arrivals):
            self.at(time, 0, StreamRequest(StreamId(number), tuple(range(prompt)), tokens))
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind == 0:
                assert isinstance(what, StreamRequest)
                self.came[what.stream] = now
                self.scheduler.submit(what, now)
            elif kind == 1:
                assert isinstance(what, Plan)
                self.busy = False
                self.pass_on(what, now)
            else:
                assert isinstance(what, Plan)
                self.answer(what, now)
            if not self.busy and (plan := self.scheduler.schedule(now)) is not None:
                self.busy = True
                self.frames.append(len(plan.tokens))
                self.at(now + TIMES[0].of(len(plan.tokens)), 1, plan)

    def pass_on(self, plan: Plan, now: float) -> None:
        for stage in range(1, len(TIMES)):
            now = self.free[stage] = max(now, self.free[stage]) + TIMES[stage].of(len(plan.tokens))
        self.at(now + TRIP_S, 2, plan)

    def answer(self, plan: Plan, now: float) -> None:
        asked = plan.segments[plan.segments["flags"] == SegmentFlag.WANT_TOKEN]
        records = np.zeros(len(asked), RECORD)
        records["stream"], records["slot"] = asked["stream"], asked["slot"]
        records["position"] = asked["start"] + asked["rows"]
        for update in self.scheduler.on_tokens(plan.number, records, now):
            if update.tokens:
                self.tokens.setdefault(int(update.stream.id), []).append(now)

    def first(self, stream: int) -> float:
        """Seconds to a stream's first token."""
        return self.tokens[stream][0] - self.came[stream]

    def decode_rate(self) -> float:
        """Tokens a second while all streams decode, as it was published."""
        begin = max(times[0] for times in self.tokens.values())
        end = min(times[-1] for times in self.tokens.values())
        return sum(begin < time <= end for times in self.tokens.values() for time in times) / (end - begin)


def burst(streams: int, tokens: int = 128) -> Fleet:
    fleet = Fleet(Scheduler(POLICY))
    fleet.scheduler.open(len(TIMES), Promise(max(streams, 8), 4096, 64))
    fleet.run((number * 0.015, 33, tokens) for number in range(streams))
    return fleet


def test_few_streams_have_the_pipeline_to_themselves() -> None:
    """One row a frame, a frame a stream: nothing without speculation is faster."""
    for streams, published in ((2, 4.53), (4, 9.16), (8, 18.60)):
        assert burst(streams, 48).decode_rate() >= 0.96 * published


def test_a_burst_of_fifteen_has_its_first_tokens_soon_and_decodes_no_slower() -> None:
    fleet = burst(15)
    assert median(fleet.first(stream) for stream in range(15)) < 6.05
    assert fleet.decode_rate() >= 24.6 * 0.98
    assert max(fleet.first(stream) for stream in range(15)) < 10.11, "published for one in twenty"
    # In order of arrival, for all are equally long.
    firsts = [fleet.tokens[stream][0] for stream in range(15)]
    assert firsts == sorted(firsts)


def test_there_is_no_fall_behind_eight_rows_a_frame() -> None:
    for streams, published_ttft in ((96, 38.94), (176, 76.83)):
        fleet = burst(streams)
        assert fleet.decode_rate() >= 59.0
        assert median(fleet.first(stream) for stream in range(streams)) < published_ttft


def test_a_long_prompt_holds_back_neither_answers_nor_short_prompts() -> None:
    alone, beside = (Fleet(Scheduler(POLICY)) for _ in range(2))
    for fleet in (alone, beside):
        fleet.scheduler.open(len(TIMES), Promise(8, 4096, 64))
    short = [(number * 0.015, 33, 64) for number in range(4)] + [(6.0, 33, 16)]
    alone.run(short)
    beside.run([*short, (5.0, 1500, 8)])
    assert beside.first(4) < 1.5 * alone.first(4), "a short prompt behind the long one"
    for stream in range(4):
        gaps = np.diff(beside.tokens[stream])
        assert gaps.max() < 5 * np.median(np.diff(alone.tokens[stream])), "no answer stands still"
    assert beside.first(5) < 35.0, "nor does the long one starve: 1,500 rows at 60 a second are 25 s"
    assert max(beside.frames) <= 9


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one() -> None:
    fleet = Fleet(Scheduler(POLICY))
    fleet.scheduler.open(len(TIMES), Promise(64, 4096, 64))
    # Sixty prompt rows a second, which is all that the ring can do, for 40 s.
    fleet.run([(0.0, 600, 4), *((0.5 + number * 0.55, 33, 2) for number in range(72))])
    assert fleet.first(0) < 2.5 * 600 / 60 + 5.0


def test_cas_15_of_48_arrivals_at_once_nobody_starves() -> None:
    """The first token comes in order of arrival; from then on all get on alike."""
    fleet = Fleet(Scheduler(POLICY))
    fleet.scheduler.open(len(TIMES), Promise(48, 4096, 64))
    fleet.run((0.0, 33, 48) for _ in range(48))
    firsts = [fleet.first(stream) for stream in range(48)]
    assert firsts == sorted(firsts)
    # 48 prompts of 33 rows, of which a ring takes about sixty a second, while answers run beside them.
    assert firsts[-1] < 1.5 * 48 * 33 / 60
    rates = [47 / (times[-1] - times[0]) for times in fleet.tokens.values()]
    assert min(rates) > 0.6 * max(rates)
    for times in fleet.tokens.values():
        gaps = np.diff(times)
        assert gaps.max() < 6 * np.median(gaps), "no answer stands still while others are let in"
