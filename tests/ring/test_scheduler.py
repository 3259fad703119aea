"""The scheduler against a model ring that checks every frame as the stages do."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_world import ModelRing, drain, expected, opened, request

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.policy import Policy, StageTime
from cascadia_p2p.ring.scheduler import Scheduler
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.frames import RECORD, SegmentError


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 63, 64])
def test_one_stream_gets_its_tokens(prompt: int) -> None:
    scheduler, ring = opened()
    wanted = request(1, prompt, 10)
    scheduler.submit(wanted, 0.0)
    updates = drain(scheduler, ring)
    assert [t for u in updates for t in u.tokens] == expected(wanted, 64)
    assert updates[-1].finish is FinishReason.LENGTH
    assert not ring.slots, "the last release never went out"


def test_pet_08_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    scheduler, ring = opened(context=20)
    for length, tokens in ((19, 2), (20, 1)):
        scheduler.submit(request(length, length, 9), 0.0)
        assert len([t for u in drain(scheduler, ring) for t in u.tokens]) == tokens
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request(3, 21, 9), 0.0)
    assert caught.value.code is ErrorCode.CONTEXT_OVERFLOW
    assert "21" in str(caught.value)
    assert "20" in str(caught.value)


def test_a_ring_with_less_context_ends_what_it_can_not_hold() -> None:
    scheduler, ring = opened(context=64)
    scheduler.submit(request(1, 30, 9), 0.0)
    while not any(stream.generated for stream in scheduler.streams()):
        while (plan := scheduler.schedule(0.0)) is not None:
            ring.run(plan)
        ring.answer(scheduler, 0.0)
    scheduler.submit(request(2, 40, 9), 0.0)
    ended = {u.stream.request.stream: u for u in scheduler.open(3, Promise(4, 25, 16))}
    assert ended[1].finish is FinishReason.LENGTH
    assert ended[2].error is not None
    assert ended[2].error.code is ErrorCode.CONTEXT_OVERFLOW
    assert not list(scheduler.streams())


def test_windows_of_one_prompt_follow_each_other_without_waiting() -> None:
    scheduler, ring = opened(stages=4, context=256, rows=8)
    scheduler.submit(request(1, 100, 1), 0.0)
    sent = 0
    while (plan := scheduler.schedule(0.0)) is not None:
        ring.run(plan)
        sent += 1
    assert sent == 5, "four stages are kept busy by five frames"


def test_a_long_prompt_does_not_hold_back_running_answers() -> None:
    scheduler, ring = opened(stages=2, slots=8, context=2000, rows=64)
    for number in range(1, 4):
        scheduler.submit(request(number, 2, 50), 0.0)
    while any(not s.decoding and s.pending for s in scheduler.streams()):
        ring.run(scheduler.schedule(0.0))
        ring.answer(scheduler, 0.0)
    scheduler.submit(request(9, 1500, 1), 0.0)
    done: list[int] = []
    for _ in range(4000):
        while (plan := scheduler.schedule(0.0)) is not None:
            ring.run(plan)
        done += [u.stream.request.stream for u in ring.answer(scheduler, 0.0) if u.terminal]
        if len(done) == 4:
            break
    assert done[-1] == 9


def test_failed_segment_fails_its_stream_only() -> None:
    scheduler, ring = opened()
    scheduler.submit(request(1, 3, 4), 0.0)
    scheduler.submit(request(2, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    _, records = ring.frames[0]
    assert records["stream"].tolist() == [1]
    records["status"], records["stage"] = SegmentError.NON_FINITE, 2
    updates = ring.answer(scheduler, 0.0)
    assert updates[0].error is not None
    assert updates[0].error.code is ErrorCode.INTERNAL
    assert "stage 2" in str(updates[0].error)
    rest = drain(scheduler, ring)
    assert [t for u in rest for t in u.tokens] == expected(request(2, 3, 4), 64)


def test_reopened_ring_continues_every_stream_where_it_was() -> None:
    scheduler, ring = opened(slots=2)
    wanted = [request(number, 5, 8) for number in (1, 2, 3)]
    for each in wanted:
        scheduler.submit(each, 0.0)
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for _ in range(4):
        while (plan := scheduler.schedule(0.0)) is not None:
            ring.run(plan)
        for update in ring.answer(scheduler, 0.0):
            tokens[update.stream.request.stream] += update.tokens
    scheduler.close()
    assert scheduler.schedule(0.0) is None
    scheduler.open(3, Promise(2, 64, 16))
    ring = ModelRing(Promise(2, 64, 16))
    for update in drain(scheduler, ring):
        tokens[update.stream.request.stream] += update.tokens
    assert tokens == {r.stream: expected(r, 64) for r in wanted}


def test_nothing_new_starts_while_admission_is_paused() -> None:
    scheduler, ring = opened()
    scheduler.submit(request(1, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    scheduler.admitting = False
    scheduler.submit(request(2, 3, 4), 0.0)
    assert {int(u.stream.request.stream) for u in drain(scheduler, ring)} == {1}
    scheduler.admitting = True
    assert {int(u.stream.request.stream) for u in drain(scheduler, ring)} == {2}


def test_an_answer_out_of_order_is_an_error() -> None:
    scheduler, ring = opened()
    scheduler.submit(request(1, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    with pytest.raises(ValueError, match="answers no frame"):
        scheduler.on_tokens(7, np.zeros(0, RECORD), 0.0)


def test_overloaded_says_when_to_come_back() -> None:
    scheduler = Scheduler(Policy(queue_limit=2))
    assert scheduler.submit(request(1, 1, 1), 0.0) == 0
    assert scheduler.submit(request(2, 1, 1), 0.0) == 1
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request(3, 1, 1), 0.0)
    assert caught.value.code is ErrorCode.OVERLOADED
    assert caught.value.retry_after_s


@pytest.mark.parametrize(
    ("streams", "stages", "rows"),
    [(1, 11, 1), (11, 11, 1), (22, 11, 2), (88, 11, 8), (176, 11, 8), (8, 1, 8)],
)
def test_decode_rows_fill_the_ring_before_they_share_frames(streams: int, stages: int, rows: int) -> None:
    assert Policy(stage_time=StageTime(16, 19)).decode_rows(streams, stages, 64) == rows


# --- the policy's times -------------------------------------------------------------------------------------


def test_stage_times_are_fitted_by_relative_error() -> None:
    exact = StageTime.fitted([(rows, 3.0 + 0.5 * rows) for rows in (1, 2, 4, 8, 64)])
    assert exact is not None
    assert (exact.fixed, exact.per_row) == (pytest.approx(3.0), pytest.approx(0.5))
    # An error of the long frame counts as much as one of the same share of the short one.
    bent = StageTime.fitted([(1, 1.0), (8, 1.7), (64, 14.6)])
    assert bent is not None
    assert all(abs(bent.of(rows) / time - 1) < 0.35 for rows, time in ((1, 1.0), (8, 1.7), (64, 14.6)))
    # Through the origin at least: no frame takes less than nothing.
    steep = StageTime.fitted([(1, 0.1), (8, 2.0)])
    assert steep is not None
    assert steep.fixed == 0.0


@pytest.mark.parametrize(
    "measured", [[], [(4, 1.0)], [(4, 1.0), (4, 1.1)], [(1, 2.0), (8, 1.0)], [(1, 0.0), (8, 0.0)]]
)
def test_times_that_say_nothing_are_not_fitted(measured: list[tuple[int, float]]) -> None:
    assert StageTime.fitted(measured) is None


def test_rows_a_frame_follow_the_measured_times() -> None:
    """Where rows cost nothing there is one frame a stage; where they cost all, one a stream."""
    free, dear = Policy(stage_time=StageTime(1.0, 1e-6)), Policy(stage_time=StageTime(0.0, 1.0))
    assert free.decode_rows(8, 2, 64) == 4
    assert dear.decode_rows(2, 2, 64) == 1
