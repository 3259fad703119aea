"""Any order of arrivals, answers, cancels and failures: each stream has the tokens that it has alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import BLOCK, VOCAB, ModelRing, assert_at_rest, drain, expected

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, StreamId

CONTEXT = 30
CANCELLED = RequestError(ErrorCode.CANCELLED, "cancelled")


def family(number: int, length: int, own: int) -> tuple[int, ...]:
    """Ids that begin as all of their family do, up to the last `own`."""
    shared = [(number * 7 + 3 * i) % VOCAB for i in range(length)]
    return tuple(shared[: length - own] + [(i * 11 + own + number) % VOCAB for i in range(min(own, length))])


class Life:
    """A scheduler, its ring, and what every stream was told."""

    def __init__(self, stages: int, promise: Promise, policy: Policy) -> None:
        self.stages, self.promise = stages, promise
        self.scheduler = Scheduler(policy, BLOCK)
        self.scheduler.open(stages, promise)
        self.ring = ModelRing(promise)
        self.requests: dict[int, StreamRequest] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Update] = {}
        self.waited: dict[int, int] = {}

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            number = int(update.stream.request.stream)
            assert number not in self.ended, "something came after the terminal update"
            assert not (update.finish and update.error)
            assert len(update.scores) == len(update.tokens)
            self.tokens[number] += update.tokens
            if update.terminal:
                self.ended[number] = update
                self.waited.pop(number, None)

    def submit(self, prompt: tuple[int, ...], max_tokens: int, stops: frozenset[int] = frozenset()) -> int:
        number = len(self.requests) + 1
        self.requests[number] = StreamRequest(StreamId(number), prompt, max_tokens, stops)
        self.tokens[number] = []
        before = self.scheduler.waiting
        assert self.scheduler.submit(self.requests[number], 0.0) == before
        return number

    def send(self) -> bool:
        """One frame; whether there was one. No stream with rows to send is passed over for ever."""
        ready = {int(s.id) for s in self.scheduler.streams() if s.slot is not None and s.pending}
        plan = self.scheduler.schedule(0.0)
        if plan is None:
            return False
        self.ring.run(plan)
        if len(plan.segments):
            served = set(plan.segments["stream"].tolist())
            self.waited = {n: self.waited.get(n, 0) + 1 for n in ready - served}
            # A decode row has one frame in four at least; a prompt those of all prompts that are due before.
            bound = 4 * self.promise.slots * (CONTEXT + self.promise.slots)
            assert max(self.waited.values(), default=0) <= bound, "a stream starves"
        return True

    def cancel(self, number: int) -> None:
        update = self.scheduler.drop(StreamId(number), CANCELLED)
        assert (update is not None) == (number in self.requests and number not in self.ended)
        self.take([update] if update else [])

    def lose_ring(self) -> None:
        self.scheduler.close()
        assert self.scheduler.schedule(0.0) is None
        self.ring = ModelRing(self.promise)
        self.take(self.scheduler.open(self.stages, self.promise))
        self.waited.clear()

    def finish(self) -> None:
        self.take(drain(self.scheduler, self.ring))
        assert set(self.ended) == set(self.requests), "a stream starved"
        assert_at_rest(self.scheduler, self.ring)
        for number, wanted in self.requests.items():
            right, got, how = expected(wanted, CONTEXT), self.tokens[number], self.ended[number]
            assert got == right if how.error is None else got == right[: len(got)]
            if how.error is not None and how.error.code is not ErrorCode.CANCELLED:
                assert number in self.ring.poison or how.error.code is not ErrorCode.INTERNAL


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        stages=st.integers(1, 5),
        slots=st.integers(1, 4),
        rows=st.integers(1, 12),
        kept=st.sampled_from([0, 1, 2, 5]),
        flight=st.integers(1, 8),
        window=st.integers(1, 8),
        share=st.sampled_from([0.125, 0.75]),
    )
    def start(
        self, stages: int, slots: int, rows: int, kept: int, flight: int, window: int, share: float
    ) -> None:
        policy = Policy(frames_in_flight=flight, shared_window=window, prompt_share=share)
        self.life = Life(stages, Promise(slots, CONTEXT, rows, kept), policy)

    @rule(
        number=st.integers(0, 1),
        prompt=st.integers(1, CONTEXT),
        own=st.integers(0, 6),
        max_tokens=st.integers(1, 14),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    )
    def submit(self, number: int, prompt: int, own: int, max_tokens: int, stop: set[int]) -> None:
        self.life.submit(family(number, prompt, own), max_tokens, frozenset(stop))

    @rule(which=st.integers(1, 30), more=st.integers(1, 5), max_tokens=st.integers(1, 8))
    def go_on_with_a_conversation(self, which: int, more: int, max_tokens: int) -> None:
        life = self.life
        if which in life.ended and life.ended[which].error is None:
            ids = (*life.requests[which].prompt, *life.tokens[which], *range(more))
            if len(ids) <= CONTEXT:
                life.submit(ids, max_tokens)

    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            self.life.send()

    @rule(count=st.integers(1, 6))
    def answer(self, count: int) -> None:
        life = self.life
        for _ in range(min(count, len(life.ring.frames))):
            life.take(life.ring.answer(life.scheduler, 0.0))

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.send(6)
            self.answer(1)

    @rule(which=st.integers(1, 30))
    def cancel(self, which: int) -> None:
        self.life.cancel(which)

    @rule(which=st.integers(1, 30))
    def a_stage_can_not_compute(self, which: int) -> None:
        self.life.ring.poison.add(which)

    @precondition(lambda self: self.life.promise.kept)
    @rule(entry=st.integers(0, 4))
    def a_stage_lacks_a_prefix(self, entry: int) -> None:
        self.life.ring.lose_entry(entry)

    @rule()
    def lose_the_ring(self) -> None:
        poison = self.life.ring.poison
        self.life.lose_ring()
        self.life.ring.poison |= poison

    @invariant()
    def in_flight_matches(self) -> None:
        if hasattr(self, "life"):
            assert self.life.scheduler.in_flight == len(self.life.ring.frames)

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.finish()


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("kept", [0, 6])
def test_stk_28_a_thousand_requests_leave_nothing_behind(kept: int) -> None:
    """Random lengths, arrivals and cancels; each ends once, with the tokens it has alone."""
    rng = random.Random(kept)
    life = Life(4, Promise(8, CONTEXT, 16, kept), Policy(queue_limit=1000))
    while len(life.requests) < 1000 or life.scheduler.running:
        for _ in range(rng.randrange(4)):
            if len(life.requests) < 1000:
                length = rng.randint(1, CONTEXT)
                life.submit(family(rng.randrange(5), length, rng.randrange(6)), rng.randint(1, 10))
        while life.send():
            pass
        if life.ring.frames:
            life.take(life.ring.answer(life.scheduler, 0.0))
        if rng.random() < 0.1:
            live = [int(stream.id) for stream in life.scheduler.streams()]
            if live:
                life.cancel(rng.choice(live))
    life.finish()
    counts = life.scheduler.prefix_counts
    assert (counts.hits > 100) == bool(kept)
    assert counts.entries == kept
