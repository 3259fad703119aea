"""The scheduler against a model ring that checks every frame as the stages do."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.policy import Policy, StageTime
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.frames import RECORD, OperationKind, SegmentError, SegmentFlag

VOCAB = 97


def next_token(ids: list[int]) -> int:
    """A deterministic stand-in for a model: depends on every id and its position."""
    value = 7
    for i, token in enumerate(ids):
        value = (value * 31 + token + i) % 1_000_003
    return value % VOCAB


class ModelRing:
    """Stages in one: holds ids by slot, refuses what a stage would refuse, answers in frame order."""

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self.slots: dict[int, tuple[int, list[int]]] = {}
        self.frames: deque[tuple[int, np.ndarray]] = deque()
        self.number = 0

    def run(self, plan: Plan) -> None:
        self.number += 1
        assert plan.number == self.number
        assert len(plan.operations) <= 2 * self.promise.slots
        for operation in plan.operations:
            slot, stream = int(operation["slot"]), int(operation["stream"])
            assert 0 <= slot < self.promise.slots
            if operation["kind"] == OperationKind.START:
                assert slot not in self.slots, "a slot is started before it was released"
                self.slots[slot] = (stream, [])
            else:
                assert operation["kind"] == OperationKind.RELEASE
                assert self.slots.pop(slot)[0] == stream
        assert len(plan.tokens) == plan.segments["rows"].sum() <= self.promise.rows
        assert len(set(plan.segments["stream"].tolist())) == len(plan.segments)
        offset, records = 0, []
        for segment in plan.segments:
            stream, ids = self.slots[int(segment["slot"])]
            rows = int(segment["rows"])
            assert rows >= 1
            assert stream == segment["stream"]
            assert len(ids) == segment["start"], "a window does not start where the slot ends"
            ids += plan.tokens[offset : offset + rows].tolist()
            assert len(ids) <= self.promise.context
            offset += rows
            if segment["flags"] & SegmentFlag.WANT_TOKEN:
                record = np.zeros((), RECORD)
                record["stream"], record["slot"] = stream, segment["slot"]
                record["position"], record["token"] = len(ids), next_token(ids)
                records.append(record)
        self.frames.append((plan.number, np.array(records, RECORD)))

    def answer(self, scheduler: Scheduler, now: float) -> list[Update]:
        number, records = self.frames.popleft()
        return scheduler.on_tokens(number, records, now)


def expected(request: StreamRequest, context: int) -> list[int]:
    ids = list(request.prompt)
    while True:
        token = next_token(ids)
        ids.append(token)
        generated = len(ids) - len(request.prompt)
        if token in request.stop_ids or generated >= request.max_tokens or len(ids) > context:
            return ids[len(request.prompt) :]


def drain(scheduler: Scheduler, ring: ModelRing, now: float = 0.0) -> list[Update]:
    updates: list[Update] = []
    for _ in range(100_000):
        while (plan := scheduler.schedule(now)) is not None:
            ring.run(plan)
        if not ring.frames:
            return updates
        updates += ring.answer(scheduler, now)
    raise AssertionError("the scheduler does not come to rest")


def request(number: int, prompt: int, max_tokens: int, stops: frozenset[int] = frozenset()) -> StreamRequest:
    ids = tuple((number * 13 + 5 * i) % VOCAB for i in range(prompt))
    return StreamRequest(StreamId(number), ids, max_tokens, stops)


def opened(stages: int = 3, slots: int = 4, context: int = 64, rows: int = 16, policy: Policy | None = None):
    promise = Promise(slots, context, rows)
    scheduler = Scheduler(policy or Policy())
    scheduler.open(stages, promise)
    return scheduler, ModelRing(promise)


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


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, answers and cancels; each stream's tokens must be those it has alone."""

    @initialize(
        stages=st.integers(1, 5),
        slots=st.integers(1, 4),
        rows=st.integers(1, 12),
        flight=st.integers(1, 8),
        window=st.integers(1, 8),
    )
    def start(self, stages: int, slots: int, rows: int, flight: int, window: int) -> None:
        self.context = 24
        self.stages = stages
        self.promise = Promise(slots, self.context, rows)
        self.scheduler = Scheduler(Policy(frames_in_flight=flight, shared_window=window))
        self.scheduler.open(stages, self.promise)
        self.ring = ModelRing(self.promise)
        self.requests: dict[int, StreamRequest] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            number = int(update.stream.request.stream)
            assert number not in self.ended, "something came after the terminal update"
            self.tokens[number] += update.tokens
            if update.terminal:
                self.ended[number] = "error" if update.error else "done"

    @rule(
        prompt=st.integers(1, 24),
        max_tokens=st.integers(1, 12),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    )
    def submit(self, prompt: int, max_tokens: int, stop: set[int]) -> None:
        number = len(self.requests) + 1
        self.requests[number] = request(number, prompt, max_tokens, frozenset(stop))
        self.tokens[number] = []
        self.scheduler.submit(self.requests[number], 0.0)

    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            if (plan := self.scheduler.schedule(0.0)) is not None:
                self.ring.run(plan)

    @rule(count=st.integers(1, 6))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.ring.frames))):
            self.take(self.ring.answer(self.scheduler, 0.0))

    @rule(which=st.integers(1, 30))
    def cancel(self, which: int) -> None:
        update = self.scheduler.drop(StreamId(which), RequestError(ErrorCode.CANCELLED, "cancelled"))
        assert (update is not None) == (which in self.requests and which not in self.ended)
        self.take([update] if update else [])

    @rule()
    def lose_the_ring(self) -> None:
        self.scheduler.close()
        self.ring = ModelRing(self.promise)
        self.scheduler.open(self.stages, self.promise)

    @invariant()
    def in_flight_matches(self) -> None:
        assert self.scheduler.in_flight == len(self.ring.frames)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.take(drain(self.scheduler, self.ring))
        assert set(self.ended) == set(self.requests), "a stream starved"
        assert not self.ring.slots, "a slot leaked"
        for number, wanted in self.requests.items():
            right = expected(wanted, self.context)
            got = self.tokens[number]
            assert got == right if self.ended[number] == "done" else got == right[: len(got)]


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


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
