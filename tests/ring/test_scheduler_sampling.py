"""What the scheduler carries between a request and the tail: options there, scores back."""

from __future__ import annotations

import numpy as np

from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest
from cascadia_p2p.types import GREEDY, Promise, Sampling, StreamId
from cascadia_p2p.wire.frames import RECORD, OperationKind, Table, alternative_table

PROMISE = Promise(slots=2, context=64, rows=16)
WARM = Sampling(temperature=0.5, top_k=7, top_p=0.25, seed=2**64 - 1)


def started(plan: Plan | None) -> dict[int, tuple[float, int, float, int, int]]:
    assert plan is not None
    return {
        int(each["stream"]): (
            float(each["temperature"]),
            int(each["top_k"]),
            float(each["top_p"]),
            int(each["seed"]),
            int(each["logprobs"]),
        )
        for each in plan.operations
        if each["kind"] == OperationKind.START
    }


def answered(plan: Plan, named: dict[int, int]) -> tuple[Table, Table]:
    """A token for each segment, with so many alternatives for each stream."""
    records = np.zeros(len(plan.segments), RECORD)
    records["stream"], records["slot"] = plan.segments["stream"], plan.segments["slot"]
    records["position"] = plan.segments["start"] + plan.segments["rows"]
    records["token"], records["logprob"] = 5, -0.5
    records["alternatives"] = [named[int(stream)] for stream in records["stream"]]
    alternatives = alternative_table(int(records["alternatives"].sum()))
    alternatives["token"] = np.repeat(records["stream"], records["alternatives"])
    alternatives["logprob"] = -1.0
    return records, alternatives


def test_options_go_out_with_every_start_also_when_a_stream_is_put_back() -> None:
    scheduler = Scheduler(Policy())
    scheduler.open(3, PROMISE)
    scheduler.submit(StreamRequest(StreamId(1), (1, 2), 9, frozenset(), WARM, 20), 0.0)
    scheduler.submit(StreamRequest(StreamId(2), (3,), 9), 0.0)
    greedy = (GREEDY.temperature, GREEDY.top_k, GREEDY.top_p, GREEDY.seed, 0)
    expected = {1: (0.5, 7, 0.25, 2**64 - 1, 20), 2: greedy}
    assert started(scheduler.schedule(0.0)) == expected
    scheduler.close()
    scheduler.open(3, PROMISE)
    assert started(scheduler.schedule(0.0)) == expected


def test_each_stream_gets_the_scores_of_its_own_record() -> None:
    scheduler = Scheduler(Policy())
    scheduler.open(1, PROMISE)
    named = {1: 3, 2: 2}
    for stream, count in named.items():
        scheduler.submit(StreamRequest(StreamId(stream), (1,), 4, frozenset(), GREEDY, count), 0.0)
    seen = dict.fromkeys(named, 0)
    while (plan := scheduler.schedule(0.0)) is not None:
        for update in scheduler.on_tokens(plan.number, *_split(answered(plan, named))):
            stream = update.stream.request.stream
            (score,) = update.scores
            assert score.logprob == -0.5
            assert score.alternatives == ((stream, -1.0),) * named[stream]
            seen[stream] += 1
    assert seen == {1: 4, 2: 4}


def _split(answer: tuple[Table, Table]) -> tuple[Table, float, Table]:
    records, alternatives = answer
    return records, 0.0, alternatives
