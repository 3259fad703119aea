"""Answers are found by who has their key and asks the same, for a while and within bounds."""

from __future__ import annotations

import pytest

from cascadia_p2p.node.kept import ANSWER_IDS, AnswerName, Asked, KeptAnswers, Record
from cascadia_p2p.types import Sampling
from cascadia_p2p.wire.client import FinishReason

PROMPT = (1, 2, 3)
ASKED = Asked(PROMPT, 10, (), frozenset({9}), Sampling(0.8, seed=5), None)
A, B, C, D, E = (AnswerName("", letter) for letter in "abcde")


def answer(name: AnswerName, *ids: int, finish: FinishReason | None = FinishReason.STOP) -> Record:
    return Record(1, name, ASKED, list(ids), finish=finish)


def test_an_answer_is_found_by_key_prompt_and_beginning() -> None:
    kept = KeptAnswers()
    kept.keep(answer(A, 7, 8, 9), 0.0)
    for held in ((), (7,), (7, 8), (7, 8, 9)):
        assert kept.find(A, ASKED, held, 1.0) is not None
    assert kept.find(B, ASKED, (), 1.0) is None
    assert kept.find(A, ASKED, (8,), 1.0) is None
    assert kept.find(A, ASKED, (7, 8, 9, 1), 1.0) is None


@pytest.mark.parametrize(
    "other",
    [
        Asked((1, 2), 10, (), frozenset({9}), Sampling(0.8, seed=5), None),
        Asked(PROMPT, 11, (), frozenset({9}), Sampling(0.8, seed=5), None),
        Asked(PROMPT, 10, ("x",), frozenset({9}), Sampling(0.8, seed=5), None),
        Asked(PROMPT, 10, (), frozenset(), Sampling(0.8, seed=5), None),
        Asked(PROMPT, 10, (), frozenset({9}), Sampling(0.8, seed=6), None),
        Asked(PROMPT, 10, (), frozenset({9}), Sampling(0.8, seed=5), 0),
    ],
    ids=["prompt", "max_tokens", "stop", "stop_ids", "seed", "logprobs"],
)
def test_what_was_asked_differently_is_another_answer(other: Asked) -> None:
    kept = KeptAnswers()
    kept.keep(answer(A, 7), 0.0)
    assert kept.find(A, other, (), 1.0) is None


def test_who_names_no_seed_goes_on_with_that_of_before() -> None:
    kept = KeptAnswers()
    kept.keep(answer(A, 7), 0.0)
    found = kept.find(A, ASKED.with_seed(77), (), 1.0, seeded=False)
    assert found is not None
    assert found.asked.sampling.seed == 5


def test_an_answer_that_broke_off_is_found_by_who_has_more_of_it_too() -> None:
    kept = KeptAnswers()
    kept.keep(answer(A, 7, 8, finish=None), 0.0)
    for held in ((), (7,), (7, 8), (7, 8, 6)):
        assert kept.find(A, ASKED, held, 1.0) is not None
    assert kept.find(A, ASKED, (7, 6), 1.0) is None


def test_nobody_takes_up_what_another_clients_key_asked_for() -> None:
    kept = KeptAnswers()
    alice, bob = AnswerName("alice", "a"), AnswerName("bob", "a")
    kept.keep(answer(alice, 7), 0.0)
    assert kept.find(bob, ASKED, (), 1.0) is None
    assert kept.find(A, ASKED, (), 1.0) is None, "nor does who asks in the clear"
    kept.keep(answer(bob, 8), 0.0)
    assert kept.find(alice, ASKED, (), 1.0) is not None, "nor is it replaced"
    # Who asked in the clear, on the PC of a head that died, may have to prove himself to the next.
    kept.keep(answer(B, 6), 0.0)
    found = kept.find(AnswerName("alice", "b"), ASKED, (), 1.0)
    assert found is not None
    assert found.ids == [6]


def test_answers_go_after_their_time_and_when_there_are_too_many() -> None:
    gone: list[str] = []
    kept = KeptAnswers(
        keep_s=600.0, max_ids=3 * (ANSWER_IDS + 5), forgotten=lambda each: gone.append(each.name.key)
    )
    kept.keep(answer(A, 7, 8), 0.0)
    kept.keep(answer(B, 7, 8), 300.0)
    assert kept.find(A, ASKED, (), 600.0) is not None
    assert kept.find(A, ASKED, (), 601.0) is None
    assert len(kept) == 1
    kept.keep(answer(B, 7), 301.0)
    kept.keep(answer(C, 7, 8), 302.0)
    assert len(kept) == 2
    kept.keep(answer(D, 7, 8), 303.0)
    kept.keep(answer(E, 7, 8), 304.0)
    assert kept.find(B, ASKED, (), 304.0) is None
    assert len(kept) == 3
    assert gone == ["a", "b", "b"]
