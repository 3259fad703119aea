"""Tokens and logits against what transformers gave."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from engine_world import PROMISE, Ring, Window, sample_weights
from fixtures.reference import Prompt, load_case, relative_error

WINDOWS = (1, 8, 64)
SPLITS = {"1 stage": (12,), "3 stages": (5, 3, 4), "12 stages": (1,) * 12}


@cache
def ring(case: str, split: tuple[int, ...]) -> Ring:
    found = load_case(case)
    return Ring(found.recipe, split, PROMISE, sample_weights(found.recipe, found.seed))


def check(ring: Ring, prompt: Prompt, window: int) -> None:
    """Logits of prompt and answer in windows, then the answer generated anew, unless that takes long."""
    ring.start(stream=9)
    logits = ring.prefill(9, prompt.ids + prompt.generated[:-1], window)
    assert relative_error(logits[list(prompt.positions)], prompt.logits) < 1e-4
    assert tuple(logits[len(prompt.ids) - 1 :].argmax(1).tolist()) == prompt.generated
    if len(prompt.ids) < 100 or window > 1:
        assert ring.generate(10, prompt.ids, len(prompt.generated), window) == prompt.generated


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_every_split_and_window_gives_the_reference_tokens(split: tuple[int, ...], window: int) -> None:
    for prompt in load_case("tiny12").prompts:
        check(ring("tiny12", split), prompt, window)


@pytest.mark.parametrize("case", ["tiny12-log", "tiny12-heads", "tiny12-noeos", "tiny12-eos"])
def test_every_variant_gives_the_reference_tokens(case: str) -> None:
    for prompt, window in zip(load_case(case).prompts, (1, 8, 1, 64), strict=True):
        check(ring(case, (7, 5)), prompt, window)


def test_66_layers_on_eleven_stages_give_the_reference_tokens() -> None:
    """The longest prompt, of 300 ids, passes every ring of keys and values several times."""
    case = load_case("tiny66")
    prompt = max(case.prompts, key=lambda prompt: len(prompt.ids))
    eleven = Ring(case.recipe, (6,) * 11, PROMISE, sample_weights(case.recipe, case.seed))
    eleven.start(stream=1)
    logits = eleven.prefill(1, prompt.ids + prompt.generated[:-1], 64)
    assert relative_error(logits[list(prompt.positions)], prompt.logits) < 1e-4
    assert tuple(logits[len(prompt.ids) - 1 :].argmax(1).tolist()) == prompt.generated


def test_logprobs_are_those_of_the_logits() -> None:
    case = load_case("tiny12")
    one = ring("tiny12", (12,))
    one.start(stream=3)
    marked, rows = one.send([Window(3, 0, case.prompts[1].ids, want=True)])
    record = one.stages[-1].tokens(marked, rows)[0][0]
    logits = one.stages[-1].logits(rows)[-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert record["token"] == expected.argmax()
    assert record["logprob"] == pytest.approx(expected.max(), abs=1e-5)
