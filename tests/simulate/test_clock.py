from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.simulate.clock import Simulation
from cascadia_p2p.simulate.drivers import Driver, FixedGroups, SchedulerDriver, token_of
from cascadia_p2p.simulate.fleet import Fleet, Hop, Stage, even_hops
from cascadia_p2p.simulate.ring import VirtualRing
from cascadia_p2p.simulate.study import PolicyName, Study
from cascadia_p2p.simulate.tables import StageTable
from cascadia_p2p.types import Promise
from cascadia_p2p.workload import Protocol


def make_fleet(stages: int, slots: int = 64, hop: float = 0.0) -> Fleet:
    """Stages of 1 second and 0.001 a row."""
    table = StageTable(((1, 1.001), (16, 1.016)))
    parts = tuple(Stage(f"stage {place}", table, 1) for place in range(stages))
    return Fleet("test", parts, even_hops(stages, Hop(hop)), Promise(slots, 512, 16))


def driver(policy: PolicyName, fleet: Fleet) -> Driver:
    if policy is PolicyName.OURS:
        return SchedulerDriver(fleet)
    return FixedGroups(len(fleet.stages), 8, 2 * len(fleet.stages), fleet.promise.slots)


@pytest.mark.parametrize("policy", list(PolicyName))
def test_one_stream_on_one_stage_by_hand(policy: PolicyName) -> None:
    fleet = make_fleet(1)
    simulation = Simulation(driver(policy, fleet), VirtualRing(fleet))
    ((only,),) = simulation.cohorts(1, Protocol(tokens=5, least_requests=1), prompt=1)
    # The prompt is one row, and so is every token behind it: five frames, one after another.
    assert only.tokens == pytest.approx([1.001 * n for n in range(1, 6)])
    assert only.ttft_s == pytest.approx(1.001)


@pytest.mark.parametrize("policy", list(PolicyName))
def test_one_stream_on_a_ring_by_hand(policy: PolicyName) -> None:
    fleet = make_fleet(3, hop=0.5)
    study = Study(fleet, Protocol(tokens=5, least_requests=2), 1).level(policy, 1)
    trip = 3 * 1.001 + 3 * 0.5
    assert study.result.decode_tok_s == pytest.approx(1 / trip)
    assert study.result.ttft_median_s == pytest.approx(trip)
    assert (study.result.cohorts, study.result.tokens) == (2, 10)
    assert study.trip.seconds == pytest.approx(trip)
    assert (study.trip.stages, study.trip.hops) == (pytest.approx(3.003), pytest.approx(1.5))
    assert [each.busy for each in study.stages] == pytest.approx([1.001 / trip] * 3)
    assert study.bound_tok_s == pytest.approx(1 / 1.001)


def test_groups_of_the_published_policy_keep_their_streams() -> None:
    # Four streams in three groups: one frame of two rows and two of one go round, none overtakes.
    fleet = make_fleet(3)
    study = Study(fleet, Protocol(tokens=40, gap_s=0.0, least_requests=1), 1)
    level = study.level(PolicyName.PUBLISHED, 4)
    assert level.trip.rows == pytest.approx(4 / 3, rel=0.02)
    # A round lasts as long as the slowest stage needs for all three frames.
    assert level.result.decode_tok_s == pytest.approx(4 / (2 * 1.001 + 1.002), rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(PolicyName),
    stages=st.integers(1, 6),
    streams=st.integers(1, 30),
    slots=st.integers(1, 40),
    tokens=st.integers(2, 12),
    prompt=st.integers(1, 40),
    gap=st.sampled_from([0.0, 0.015, 3.0]),
)
def test_every_request_ends_with_all_its_tokens(
    policy: PolicyName, stages: int, streams: int, slots: int, tokens: int, prompt: int, gap: float
) -> None:
    fleet = make_fleet(stages, slots, hop=0.1)
    simulation = Simulation(driver(policy, fleet), VirtualRing(fleet))
    cohorts = simulation.cohorts(streams, Protocol(tokens, gap, least_requests=1), prompt)
    assert [len(cohort) for cohort in cohorts] == [streams]
    for request in cohorts[0]:
        assert len(request.tokens) == tokens
        assert request.start < request.tokens[0]
        # A token needs the one before it: a whole way round lies between them.
        assert all(b - a >= stages for a, b in pairwise(request.tokens))
    journeys = simulation.journeys
    # Nothing runs twice or never: every prompt row once, and every token but the last as a row.
    assert sum(each.load.rows for each in journeys) == streams * (prompt + tokens - 1)
    assert sum(each.load.asking for each in journeys) == streams * tokens
    for before, after in pairwise(journeys):
        assert before.ends[0] <= after.begins[0]
        assert before.back <= after.back
        assert all(a <= b for a, b in zip(before.ends, after.begins, strict=True))
    # No more streams at once than there are slots.
    events = sorted([(each.first, 1) for each in cohorts[0]] + [(each.last, -1) for each in cohorts[0]])
    running = 0
    for _, step in events:
        running += step
        assert running <= slots


def test_the_same_question_has_the_same_answer() -> None:
    study = Study(make_fleet(4), Protocol(tokens=8), 20)
    assert study.level(PolicyName.OURS, 7) == study.level(PolicyName.OURS, 7)


def test_a_token_depends_on_stream_and_position_alone() -> None:
    assert token_of(3, 5) == token_of(3, 5)
    assert len({token_of(3, position) for position in range(50)}) > 40


class _Silent:
    """A driver that takes requests and starts nothing."""

    def submit(self, request: object, now: float) -> None: ...

    def next_frame(self, now: float) -> None:
        return None

    def on_answer(self, now: float) -> list[object]:
        raise AssertionError("no frame was started")


def test_a_ring_that_stands_still_is_an_error() -> None:
    simulation = Simulation(_Silent(), VirtualRing(make_fleet(2)))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="2 requests have not ended"):
        simulation.cohorts(2, Protocol(), 1)
