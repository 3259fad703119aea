"""Complete answers are found by who has their key and asks the same, for a while and within bounds."""

from __future__ import annotations

from cascadia_p2p.node.finished import Finished, FinishedAnswers
from cascadia_p2p.ring.streams import Stream, StreamRequest
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.client import FinishReason

PROMPT = (1, 2, 3)


def answer(*ids: int) -> Finished:
    request = StreamRequest(StreamId(1), PROMPT, 10)
    return Finished(Stream(request, [*PROMPT, *ids], submitted_at=0.0), FinishReason.STOP)


def test_an_answer_is_found_by_key_prompt_and_beginning() -> None:
    kept = FinishedAnswers()
    kept.keep("a", answer(7, 8, 9), 0.0)
    for held in ((), (7,), (7, 8), (7, 8, 9)):
        assert kept.find("a", PROMPT, held, 1.0) is not None
    assert kept.find("b", PROMPT, (), 1.0) is None
    assert kept.find("a", (1, 2), (), 1.0) is None
    assert kept.find("a", PROMPT, (8,), 1.0) is None
    assert kept.find("a", PROMPT, (7, 8, 9, 1), 1.0) is None


def test_answers_go_after_their_time_and_when_there_are_too_many() -> None:
    kept = FinishedAnswers(keep_s=600.0, max_ids=15)
    kept.keep("a", answer(7, 8), 0.0)
    kept.keep("b", answer(7, 8), 300.0)
    assert kept.find("a", PROMPT, (), 600.0) is not None
    assert kept.find("a", PROMPT, (), 601.0) is None
    assert len(kept) == 1
    kept.keep("b", answer(7), 301.0)
    kept.keep("c", answer(7, 8), 302.0)
    assert len(kept) == 2
    kept.keep("d", answer(7, 8), 303.0)
    kept.keep("e", answer(7, 8), 304.0)
    assert kept.find("b", PROMPT, (), 304.0) is None
    assert len(kept) == 3
