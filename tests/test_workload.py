from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import UsageError
from cascadia_p2p.workload import (
    FAMILIES,
    LEVELS,
    PROMPTS,
    Protocol,
    Timeline,
    level_result,
    parse_levels,
    quantile,
)


def test_a_level_by_hand() -> None:
    # One second a token; the second request starts and gets its first token later.
    first = Timeline(0.0, (2.0, 3.0, 4.0, 5.0), prompt_tokens=30)
    second = Timeline(0.5, (3.5, 4.5, 5.5, 6.5), prompt_tokens=40)
    result = level_result(2, [[first, second]])
    # From 3.5 to 5: 4.0 and 5.0 of the first, 4.5 of the second; 3.5 itself is the one that ends the prompt.
    assert (result.decode_tokens, result.decode_s) == (3, 1.5)
    assert result.decode_tok_s == pytest.approx(2.0)
    assert result.phase_tok_s == pytest.approx(8 / 6.5)
    assert result.ttft_median_s == pytest.approx(2.5)
    assert result.ttft_p95_s == pytest.approx(2.95)
    assert (result.requests, result.tokens, result.prompt_tokens) == (2, 8, 70)


def test_cohorts_are_weighed_by_their_time() -> None:
    fast = [Timeline(0.0, (1.0, 2.0))]
    slow = [Timeline(2.0, (3.0, 6.0))]
    result = level_result(1, [fast, slow])
    assert result.decode_tok_s == pytest.approx(2 / 4)
    assert result.phase_s == pytest.approx(6.0)
    assert result.cohorts == 2


def test_streams_that_never_decode_together_have_no_decode_rate() -> None:
    result = level_result(2, [[Timeline(0.0, (1.0, 2.0)), Timeline(0.0, (3.0, 4.0))]])
    assert result.decode_tok_s is None
    assert result.phase_tok_s == pytest.approx(1.0)


def test_the_published_protocol() -> None:
    protocol = Protocol()
    assert (protocol.tokens, protocol.gap_s) == (128, 0.015)
    assert {level: protocol.cohorts(level) * level for level in (1, 8, 11, 15, 176)} == {
        1: 12,
        8: 16,
        11: 22,
        15: 15,
        176: 176,
    }
    assert len(FAMILIES) == 12
    assert [protocol.family(n) for n in (0, 11, 12)] == [FAMILIES[0], FAMILIES[11], FAMILIES[0]]
    assert protocol.offset_s(4) == pytest.approx(0.06)
    assert all(20 <= len(prompt.split()) <= 32 for prompt in PROMPTS.values())
    assert len(LEVELS) == 15


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_lies_within(values: list[float], share: float) -> None:
    assert min(values) <= quantile(values, share) <= max(values)
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)


def test_levels_are_read() -> None:
    assert parse_levels("--streams", "8, 1,88,8") == (1, 8, 88)


@pytest.mark.parametrize("text", ["", "0", "1,x", "5000", "-1", "1.5"])
def test_other_levels_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--streams"):
        parse_levels("--streams", text)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [({"tokens": 1}, "1 tokens"), ({"gap_s": -1.0}, "gap"), ({"gap_s": float("nan")}, "gap"),
     ({"least_requests": 0}, "0 requests")],
)  # fmt: skip
def test_bad_numbers_are_named(numbers: dict[str, float], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Protocol(**numbers)  # type: ignore[arg-type]


def test_a_request_without_a_token_has_no_times() -> None:
    with pytest.raises(ValueError, match="without a token"):
        Timeline(0.0, ())
    with pytest.raises(ValueError, match="no request"):
        level_result(3, [[]])
