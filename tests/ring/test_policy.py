"""Rows a frame, frames in flight and windows, as stage times want them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascadia_p2p.ring.policy import Policy, StageTime
from cascadia_p2p.ring.stagetime import MAX_POINTS, ring_time

FLEET = StageTime(points=((1, 40.0), (2, 58.0), (4, 88.0), (8, 134.0), (9, 187.0), (16, 278.0)))
"""The slowest stage of the published fleet, milliseconds."""


# --- stage times --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "measured", [[], [(4, 1.0)], [(4, 1.0), (4, 1.1)], [(1, 2.0), (8, 1.0)], [(1, 0.0), (8, 0.0)]]
)
def test_times_that_say_nothing_are_no_table(measured: list[tuple[int, float]]) -> None:
    assert StageTime.measured(measured) is None


def test_a_table_goes_through_its_points_and_on_along_its_last_line() -> None:
    time = StageTime.measured([(8, 134.0), (1, 35.0), (3, 73.0), (9, 187.0), (8, 140.0)])
    assert time is not None
    assert [time.of(rows) for rows in (1, 3, 8, 9)] == [35.0, 73.0, 134.0, 187.0]
    assert time.of(2) == 54.0
    assert time.of(11) == 187.0 + 2 * 53.0
    assert time.of(0.5) == 35.0


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(1e-6, 10.0)), max_size=120))
def test_a_table_never_falls_and_is_bounded(measured: list[tuple[int, float]]) -> None:
    time = StageTime.measured(measured)
    if time is None:
        return
    assert 2 <= len(time.points) <= MAX_POINTS
    times = [time.of(rows) for rows in range(1, 500)]
    assert all(before <= after + 1e-9 for before, after in itertools.pairwise(times))
    assert time.of(100_000) > times[-1]


def test_a_ring_is_as_slow_as_its_slowest_stage_and_as_long_as_all() -> None:
    one, two = StageTime.measured([(1, 1.0), (3, 3.0)]), StageTime.measured([(1, 2.0), (2, 2.5), (4, 3.0)])
    times = ring_time([one, two, None, None])
    assert times is not None
    assert times.slowest.points == ((1, 2.0), (2, 2.5), (3, 3.0), (4, 4.0))
    assert times.trip.points == ((1, 6.0), (2, 9.0), (3, 11.5), (4, 14.0))
    assert ring_time([None, None]) is None


# --- decode rows and frames ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streams", "stages", "rows"),
    [(1, 11, 1), (11, 11, 1), (22, 11, 2), (88, 11, 8), (176, 11, 8), (8, 1, 8)],
)
def test_decode_rows_fill_the_ring_before_they_share_frames(streams: int, stages: int, rows: int) -> None:
    policy = Policy(stage_time=StageTime(16, 19))
    assert policy.decode_rows(streams, stages, 64) == rows
    assert policy.frames(streams, stages, 64) == -(-streams // rows)


def test_rows_a_frame_follow_the_measured_times() -> None:
    """Where rows cost nothing there is one frame a stage; where they cost all, one a stream."""
    free, dear = Policy(stage_time=StageTime(1.0, 1e-6)), Policy(stage_time=StageTime(0.0, 1.0))
    assert free.decode_rows(8, 2, 64) == 4
    assert dear.decode_rows(2, 2, 64) == 1


@pytest.mark.parametrize("streams", [88, 96, 128, 176, 400])
def test_frames_stop_where_the_table_jumps(streams: int) -> None:
    """Beyond eight rows this fleet pads: more frames in flight, not longer ones."""
    policy = Policy(stage_time=FLEET)
    assert policy.decode_rows(streams, 11, 64) == 8
    assert policy.frames(streams, 11, 64) == -(-streams // 8)


def test_a_table_raises_the_bound_of_decode_rows() -> None:
    flat = Policy(stage_time=StageTime(points=((1, 1.0), (64, 1.1))))
    assert flat.decode_rows(88, 2, 64) == 44
    assert flat.decode_rows(88, 2, 16) == 15, "six frames either way"
    assert Policy(stage_time=StageTime(1.0, 0.001)).decode_rows(88, 2, 64) == 8


def test_a_ring_with_one_slow_stage_needs_fewer_frames() -> None:
    """The slow stage is all that counts: while it works, the others are done with the next frame."""
    slow = StageTime(points=((1, 10.0), (8, 24.0)))
    trip = StageTime(points=((1, 20.0), (8, 48.0)))
    assert Policy(stage_time=slow).frames(8, 10, 64) == 8
    assert Policy(stage_time=slow, trip_time=trip).frames(8, 10, 64) == 2


# --- windows ------------------------------------------------------------------------------------------------


def test_windows_grow_when_nobody_else_runs() -> None:
    policy = Policy()
    alone = [policy.mixed_rows(rows, 1, 0, 4, 512) for rows in (1, 16, 256, 4096)]
    assert alone == sorted(alone)
    assert alone[0] == 1
    assert alone[-1] > 64
    assert policy.mixed_rows(4096, 1, 1, 4, 512) < 16


def test_prompt_rows_stretch_a_frame_no_further_than_allowed() -> None:
    policy = Policy(stage_time=StageTime(points=((1, 1.0), (64, 5.0))))
    for decoding in (1, 8, 60):
        rows = policy.mixed_rows(10_000, 4, decoding, 4, 512)
        alone = policy.decode_rows(decoding, 4, 512)
        assert rows > alone
        longest = max(policy.stretch * policy.stage_time.of(alone), policy.stage_time.of(alone + 8))
        assert policy.stage_time.of(rows) <= longest
    assert Policy(stage_time=FLEET).mixed_rows(495, 15, 5, 11, 64) == 8


@given(
    st.integers(1, 5000), st.integers(1, 200), st.integers(0, 200), st.integers(1, 16), st.integers(1, 600)
)
def test_frames_with_prompts_fit(pending: int, prompts: int, decoding: int, stages: int, limit: int) -> None:
    for time in (StageTime(), FLEET):
        assert 1 <= Policy(stage_time=time).mixed_rows(pending, prompts, decoding, stages, limit) <= limit


def test_frames_do_not_get_shorter_as_a_backlog_ends() -> None:
    policy = Policy(stage_time=FLEET)
    assert policy.mixed_rows(20, 1, 3, 11, 64) < 8
    assert policy.mixed_rows(20, 1, 3, 11, 64, before=8) == 8
    # What decode rows bear bounds it all the same.
    assert policy.mixed_rows(20, 1, 3, 11, 64, before=64) == 9


def test_each_prompt_counts_as_much_as_all_answers() -> None:
    policy = Policy()
    assert [policy.share(prompts) for prompts in (1, 2, 3, 50)] == [0.5, pytest.approx(2 / 3), 0.75, 0.75]
