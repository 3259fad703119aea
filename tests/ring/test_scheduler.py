"""The scheduler against a model ring that checks every frame as the stages do."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_world import BLOCK, ModelRing, assert_at_rest, drain, expected, opened, request

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.operations import Operations
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, Sampling, StreamId
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.frames import RECORD, OperationKind, SegmentError


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


def test_cas_17_hundreds_of_windows_without_a_token_end_nothing() -> None:
    scheduler, ring = opened(stages=3, slots=2, context=4000, rows=8)
    long, short = request(1, 3500, 3), request(2, 2, 900)
    scheduler.submit(long, 0.0)
    scheduler.submit(short, 0.0)
    updates = drain(scheduler, ring)
    for wanted in (long, short):
        told = [update for update in updates if update.stream.request is wanted]
        assert [t for update in told for t in update.tokens] == expected(wanted, 4000)
        assert [update.finish for update in told if update.terminal] == [FinishReason.LENGTH]
    assert ring.number > 400
    assert_at_rest(scheduler, ring)


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


def test_those_that_were_put_back_go_on_while_admission_is_paused() -> None:
    scheduler, ring = opened()
    scheduler.submit(request(1, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    scheduler.set_apart([StreamId(1)])
    scheduler.close()
    scheduler.open(3, Promise(4, 64, 16))
    scheduler.admitting = False
    scheduler.submit(request(2, 3, 4), 0.0)
    assert {int(u.stream.request.stream) for u in drain(scheduler, ModelRing(Promise(4, 64, 16)))} == {1}


def test_an_answer_out_of_order_is_an_error() -> None:
    scheduler, ring = opened()
    scheduler.submit(request(1, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    with pytest.raises(ValueError, match="answers no frame"):
        scheduler.on_tokens(7, np.zeros(0, RECORD), 0.0)


def test_requests_that_are_to_come_have_their_places_in_the_queue_and_in_free_slots() -> None:
    closed, (open_, _) = Scheduler(Policy(queue_limit=2)), opened(slots=3, policy=Policy(queue_limit=2))
    for scheduler, places in ((closed, 2), (open_, 5)):
        assert scheduler.overload(0.0, places - 1) is None
        refusal = scheduler.overload(0.0, places)
        assert refusal is not None
        assert refusal.code is ErrorCode.OVERLOADED
    open_.submit(request(1, 5, 4), 0.0)
    assert open_.overload(0.0, 3) is None
    assert open_.overload(0.0, 4) is not None


def test_overloaded_says_when_to_come_back() -> None:
    scheduler = Scheduler(Policy(queue_limit=2))
    assert scheduler.submit(request(1, 1, 1), 0.0) == 0
    assert scheduler.submit(request(2, 1, 1), 0.0) == 1
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request(3, 1, 1), 0.0)
    assert caught.value.code is ErrorCode.OVERLOADED
    assert caught.value.retry_after_s == Policy().retry_after_s, "nothing has ended yet"


def test_overloaded_says_when_half_of_the_queue_will_have_started() -> None:
    scheduler, ring = opened(slots=1, policy=Policy(queue_limit=20))
    for number in range(1, 21):
        scheduler.submit(request(number, 1, 1), 0.0)
    for second in range(1, 11):
        ring.run(scheduler.schedule(float(second)))
        assert ring.answer(scheduler, second + 0.5)[0].finish
    for number in range(21, 31):
        scheduler.submit(request(number, 1, 1), 11.0)
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request(31, 1, 1), 11.5)
    # Ten answers ended in the ten seconds since 1.5; ten of the twenty that wait need as long again.
    assert caught.value.retry_after_s == pytest.approx(10.0)
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request(31, 1, 1), 1e6)
    assert caught.value.retry_after_s == 600.0, "bounded, and slow when nothing has ended lately"


def test_a_cancelled_stream_leaves_its_place_in_any_state() -> None:
    scheduler, ring = opened(slots=1, rows=4, stages=1)
    for number in (1, 2, 3, 4):
        scheduler.submit(request(number, 9, 5), 0.0)
    gone = RequestError(ErrorCode.CANCELLED, "gone")
    assert scheduler.drop(StreamId(4), gone) is not None, "waiting"
    ring.run(scheduler.schedule(0.0))
    assert scheduler.drop(StreamId(1), gone) is not None, "its prompt half sent"
    ring.run(scheduler.schedule(0.0))
    while not any(stream.generated for stream in scheduler.streams()):
        assert not [u for u in ring.answer(scheduler, 0.0) if u.stream.id == 1]
        while (plan := scheduler.schedule(0.0)) is not None:
            ring.run(plan)
    assert scheduler.drop(StreamId(2), gone) is not None, "decoding"
    assert scheduler.drop(StreamId(2), gone) is None
    rest = drain(scheduler, ring)
    assert {u.stream.id for u in rest} == {3}
    assert_at_rest(scheduler, ring)


def test_a_start_that_never_left_is_taken_back() -> None:
    scheduler, ring = opened(stages=1, slots=2, policy=Policy(frames_in_flight=1))
    scheduler.submit(request(1, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    scheduler.submit(request(2, 3, 4), 0.0)
    assert scheduler.schedule(0.0) is None, "admitted, and no credit"
    scheduler.drop(StreamId(2), RequestError(ErrorCode.CANCELLED, "gone"))
    drain(scheduler, ring)
    assert_at_rest(scheduler, ring)


# --- what the ring may do wrong -----------------------------------------------------------------------------


def first_answer(scheduler: Scheduler, ring: ModelRing) -> tuple[int, np.ndarray]:
    """Two streams are asked for; the first frame back that brings a token, not yet given to the scheduler."""
    scheduler.submit(request(1, 3, 5), 0.0)
    scheduler.submit(request(2, 3, 5), 0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        ring.run(plan)
    while not len(ring.frames[0][1]):
        assert not ring.answer(scheduler, 0.0)
    return ring.frames.popleft()


def goes_on_without(scheduler: Scheduler, ring: ModelRing, lost: int) -> None:
    rest = drain(scheduler, ring)
    assert {update.stream.id for update in rest} == {1, 2} - {lost}
    assert all(update.error is None for update in rest)
    assert_at_rest(scheduler, ring)


def test_a_stream_whose_token_a_frame_does_not_bring_back_ends_and_no_other() -> None:
    scheduler, ring = opened(slots=2, stages=2)
    number, records = first_answer(scheduler, ring)
    (lost, *others) = scheduler.on_tokens(number, records[1:], 0.0)[::-1]
    assert lost.stream.id == int(records["stream"][0])
    assert lost.error is not None
    assert f"frame {number} came back without its token" in lost.error.message
    assert not any(update.terminal for update in others)
    goes_on_without(scheduler, ring, int(lost.stream.id))


@pytest.mark.parametrize(
    ("token", "logprob"), [(-1, -0.5), (5, np.nan), (5, np.inf)], ids=["negative", "no number", "infinite"]
)
def test_an_answer_that_is_no_token_fails_its_stream_only(token: int, logprob: float) -> None:
    scheduler, ring = opened(slots=2, stages=2)
    number, records = first_answer(scheduler, ring)
    records["token"][0], records["logprob"][0] = token, logprob
    wrong = scheduler.on_tokens(number, records, 0.0)[0]
    assert wrong.stream.id == int(records["stream"][0])
    assert wrong.error is not None
    assert not wrong.tokens
    goes_on_without(scheduler, ring, int(wrong.stream.id))


def test_pri_08_an_answer_for_another_position_fails_its_stream_only() -> None:
    scheduler, ring = opened()
    scheduler.submit(request(1, 3, 4), 0.0)
    scheduler.submit(request(2, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    ring.frames[0][1]["position"][0] += 1
    wrong, *others = drain(scheduler, ring)
    assert wrong.error is not None
    assert "answered position 4 where 3 was due" in str(wrong.error)
    assert [t for u in others for t in u.tokens] == expected(request(2, 3, 4), 64)
    assert_at_rest(scheduler, ring)


def test_pri_08_a_lost_a_repeated_and_an_early_answer_are_errors() -> None:
    scheduler, ring = opened(stages=4)
    scheduler.submit(request(1, 60, 4), 0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        ring.run(plan)
    assert len(ring.frames) >= 3
    first, second = ring.frames[0], ring.frames[1]
    with pytest.raises(ValueError, match="answers no frame"):
        scheduler.on_tokens(*second, 0.0)
    scheduler.on_tokens(*first, 0.0)
    with pytest.raises(ValueError, match="answers no frame"):
        scheduler.on_tokens(*first, 0.0)


def test_ring_08_late_answers_reach_nobody() -> None:
    """Neither rows of a stream that was cancelled, nor those of the ring before."""
    scheduler, ring = opened(slots=1)
    scheduler.submit(request(1, 3, 4), 0.0)
    ring.run(scheduler.schedule(0.0))
    scheduler.drop(StreamId(1), RequestError(ErrorCode.CANCELLED, "gone"))
    scheduler.submit(request(2, 5, 3), 0.0)
    ring.run(scheduler.schedule(0.0))
    assert ring.answer(scheduler, 0.0) == [], "the slot is another's already"
    late = ring.frames[0]
    scheduler.close()
    with pytest.raises(ValueError, match="answers no frame"):
        scheduler.on_tokens(*late, 0.0)
    scheduler.open(3, ring.promise)
    ring = ModelRing(ring.promise)
    assert [t for u in drain(scheduler, ring) for t in u.tokens] == expected(request(2, 5, 3), 64)


# --- kept prefixes ------------------------------------------------------------------------------------------


def run_one(scheduler: Scheduler, ring: ModelRing, number: int, ids: tuple[int, ...], tokens: int) -> Update:
    scheduler.submit(StreamRequest(StreamId(number), ids, tokens), 0.0)
    return drain(scheduler, ring)[-1]


def test_dll_04_a_chat_to_the_limit_starts_each_turn_where_the_last_ended() -> None:
    scheduler, ring = opened(context=64, kept=8)
    ids, turns, reused = (1, 2, 3), 0, []
    while len(ids) <= 64:
        last = run_one(scheduler, ring, turns, ids, 9)
        assert last.finish is FinishReason.LENGTH
        assert last.stream.ids[len(ids) :] == expected(last.stream.request, 64)
        reused.append((last.stream.reused, len(ids)))
        ids, turns = (*last.stream.ids, 7, 8), turns + 1
    assert turns == 6
    with pytest.raises(RequestError) as caught:
        run_one(scheduler, ring, turns, ids, 9)
    assert caught.value.code is ErrorCode.CONTEXT_OVERFLOW
    # All that the turn before had sent, up to a block's end: its last token was never sent, two are new.
    assert reused == [(0, 3)] + [((length - 3) // BLOCK * BLOCK, length) for _, length in reused[1:]]
    assert_at_rest(scheduler, ring)


def test_the_same_prompt_again_leaves_only_its_last_block_to_compute() -> None:
    scheduler, ring = opened(kept=2)
    for length, reused in ((9, 8), (8, 4), (5, 4), (4, 0)):
        ids = tuple(range(length * 100, length * 100 + length))
        assert run_one(scheduler, ring, length, ids, 3).stream.reused == 0
        again = run_one(scheduler, ring, 100 + length, ids, 3)
        assert again.stream.reused == reused
        assert again.stream.ids[length:] == expected(again.stream.request, 64)


def test_what_prompts_share_is_kept_when_it_is_seen_again() -> None:
    scheduler, ring = opened(kept=8)
    system = tuple(range(50, 64))
    reused = [run_one(scheduler, ring, n, (*system, *range(n, n + 7)), 2).stream.reused for n in (1, 20, 40)]
    assert reused == [0, 0, 12], "unknown, then seen before, then kept"


def test_the_prefix_used_least_lately_goes_first() -> None:
    scheduler, ring = opened(kept=2)
    prompts = {n: tuple(range(n * 10, n * 10 + 6)) for n in range(1, 5)}
    for number, prompt in enumerate((1, 2, 1, 3, 1, 2)):
        last = run_one(scheduler, ring, number, prompts[prompt], 1)
        assert last.stream.reused == (4 if number in (2, 4) else 0)
    counts = scheduler.prefix_counts
    assert (counts.hits, counts.misses, counts.tokens_reused) == (2, 4, 8)
    assert (counts.keeps, counts.evictions, counts.kept, counts.entries) == (4, 2, 2, 2)


@pytest.mark.parametrize(("prompt", "kept", "used"), [(13, 5, 15), (5, 6, 6)])
def test_running_streams_have_room_before_kept_prefixes(prompt: int, kept: int, used: int) -> None:
    """Eight blocks a slot: two streams of full length leave none to entries alone."""
    scheduler, ring = opened(slots=2, context=32, kept=6)
    for number in range(6):
        run_one(scheduler, ring, number, tuple(range(number * 40, number * 40 + prompt)), 1)
    # Of sixteen blocks, five entries of three leave room for the sixth stream.
    assert (scheduler.prefix_counts.kept, ring.used) == (kept, used)
    for number in (10, 11):
        scheduler.submit(request(number, 20, 12), 0.0)
    ring.run(scheduler.schedule(0.0))
    assert not ring.entries
    drain(scheduler, ring)
    assert_at_rest(scheduler, ring)


def test_a_stream_whose_prefix_a_stage_lacks_starts_again_without() -> None:
    scheduler, ring = opened(kept=3)
    ids = tuple(range(10))
    run_one(scheduler, ring, 1, ids, 2)
    for entry in list(ring.entries):
        ring.lose_entry(entry)
    last = run_one(scheduler, ring, 2, ids, 5)
    assert last.finish is FinishReason.LENGTH
    assert last.stream.reused == 0
    assert last.stream.ids[10:] == expected(last.stream.request, 64)
    assert run_one(scheduler, ring, 3, ids, 5).stream.reused == 8
    # Many windows are on their way when the first comes back: their answers are those of the first try.
    for entry in list(ring.entries):
        ring.lose_entry(entry)
    last = run_one(scheduler, ring, 4, (*ids, *range(40)), 5)
    assert last.stream.ids[50:] == expected(last.stream.request, 64)
    assert_at_rest(scheduler, ring)


def test_what_was_kept_of_a_stream_that_failed_is_kept_no_more() -> None:
    scheduler, ring = opened(kept=3)
    scheduler.submit(request(1, 9, 30), 0.0)
    while scheduler.prefix_counts.kept < 2:
        while (plan := scheduler.schedule(0.0)) is not None:
            ring.run(plan)
        ring.answer(scheduler, 0.0)
    ring.poison.add(1)
    assert drain(scheduler, ring)[-1].error is not None
    assert scheduler.prefix_counts.kept == 0
    assert not ring.entries
    assert_at_rest(scheduler, ring)


def test_a_conversation_that_runs_keeps_its_place_from_others() -> None:
    """With one entry, what a running stream has come to is not given up for another's."""
    scheduler, ring = opened(kept=1, slots=2)
    scheduler.submit(request(1, 2, 30), 0.0)
    scheduler.submit(request(2, 2, 30), 0.0)
    drain(scheduler, ring)
    assert scheduler.prefix_counts.evictions == 0
    assert scheduler.prefix_counts.keeps > 5


def test_an_operation_carries_how_its_stream_is_sampled() -> None:
    scheduler, _ = opened()
    how = Sampling(temperature=0.5, top_k=3, top_p=0.25, seed=2**63)
    scheduler.submit(StreamRequest(StreamId(2**63), (1, 2), 3, sampling=how, alternatives=4), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (start,) = plan.operations
    assert [start[name] for name in ("seed", "top_k", "temperature", "top_p", "logprobs")] == [
        2**63, 3, 0.5, 0.25, 4,
    ]  # fmt: skip
    assert (start["kind"], start["stream"], start["slot"]) == (OperationKind.START, 2**63, 0)


def test_a_frame_has_at_most_four_operations_a_slot_and_one_eviction_an_entry() -> None:
    operations = Operations()
    for _ in range(3):
        operations.evict(5)
        operations.keep(StreamId(1), 0, 8, 5)
    operations.evict(5)
    operations.evict(6)
    table = operations.take()
    assert table["kind"].tolist() == [OperationKind.KEEP] * 3 + [OperationKind.EVICT] * 2
    assert table["entry"].tolist() == [5, 5, 5, 5, 6]
    assert not len(operations.take())
