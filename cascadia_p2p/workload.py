"""The protocol of a throughput curve: who asks what and when, and what is reckoned from the times of tokens.

At a level of C streams, cohorts of C requests run one after another until at least `least_requests` have run.
Request j of a cohort starts j gaps after it, and asks a prompt of the next family. With a the latest time of
a first token in a cohort, b the earliest time of a last token and u the tokens that came in (a, b],

    decode = sum of u / sum of (b - a)      all streams of a cohort decode, none reads its prompt
    phase  = all tokens / from the first request to the last token
    TTFT   = first token - start of its request

over all cohorts of the level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cascadia_p2p.errors import UsageError

LEVELS: Final = (1, 2, 4, 6, 8, 11, 15, 22, 32, 48, 64, 88, 96, 128, 176)
"""The streams of the published curve."""

MOST_STREAMS: Final = 4096

PROMPTS: Final = {
    "explanation": "Explain to a curious twelve year old how a refrigerator keeps food cold although the "
    "kitchen around it is warm, and why its back gets hot while it does so.",
    "code": "Write a Python function that takes a list of whole numbers and returns the longest run "
    "of equal neighbours in it, and say in one sentence how it works.",
    "arithmetic": "A baker sells 37 loaves on Monday, 52 on Tuesday and twice as many as both together on "
    "Wednesday. How many loaves is that? Show each step.",
    "story": "Tell a short story about a lighthouse keeper who finds a bottle with a letter in it that "
    "she herself wrote many years ago, and let it end well.",
    "tips": "Give me seven practical tips for growing tomatoes on a small balcony that gets sun only "
    "in the afternoon, and say for each of them why it helps.",
    "table": "Make a table with five rows that compares a bicycle, a tram, a car and a train for the "
    "way to work by cost, speed, comfort and noise.",
    "rewriting": "Rewrite this sentence politely and clearly for a letter to a neighbour: your dog barks "
    "all night and nobody in this house can sleep any more, do something.",
    "facts": "List eight facts about the planet Saturn that most people do not know, and mark the one "
    "that surprised astronomers the most when they found it.",
    "poem": "Write a poem of four stanzas about the first snow in a harbour town, with rhymes at the "
    "ends of the lines and without the word white in it.",
    "instructions": "Give step by step instructions for changing the inner tube of a bicycle wheel beside "
    "the road, with the tools that one needs and the usual mistakes.",
    "translation": "Translate into German and into French: the last train leaves at a quarter past eleven, "
    "so we have to be at the station before the shops close.",
    "true or false": "Say whether each is true or false and why: sound is faster in water than in air; glass "
    "is a slow liquid; bats are blind; the Nile flows north.",
}
"""A prompt of each of the twelve families, of about 33 tokens."""

FAMILIES: Final = tuple(PROMPTS)


@dataclass(frozen=True, slots=True)
class Protocol:
    """What is asked at every level.

    Args:
        tokens: each request asks for.
        gap_s: seconds from one request's start to the next in its cohort.
        least_requests: a level has at least so many.

    Raises:
        UsageError: a number out of its range.
    """

    tokens: int = 128
    gap_s: float = 0.015
    least_requests: int = 12

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise UsageError(f"{self.tokens} tokens a request: a decode rate needs at least 2")
        if not 0 <= self.gap_s <= 3600:
            raise UsageError(f"a gap of {self.gap_s:g} s between requests: expected 0 to 3600")
        if self.least_requests < 1:
            raise UsageError(f"{self.least_requests} requests a level: expected at least 1")

    def cohorts(self, streams: int) -> int:
        """Cohorts of a level."""
        return -(-self.least_requests // streams)

    def offset_s(self, place: int) -> float:
        """Seconds from the cohort's start to the start of its request `place`, counted from 0."""
        return place * self.gap_s

    def family(self, request: int) -> str:
        """The family of a level's request, counted from 0 over all its cohorts."""
        return FAMILIES[request % len(FAMILIES)]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of one request, in seconds of any one steady clock.

    Args:
        start: when it was sent.
        tokens: when each of its tokens came, in order; tokens that came in one message have one time.
        prompt_tokens: of its prompt.
    """

    start: float
    tokens: tuple[float, ...]
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a request without a token has no times to reckon with")

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.tokens[0]

    @property
    def last(self) -> float:
        """When the last token came."""
        return self.tokens[-1]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first - self.start


@dataclass(frozen=True, slots=True)
class LevelResult:
    """What a level gave.

    Args:
        streams: at once.
        cohorts, requests: that ran.
        prompt_tokens, tokens: of all requests together.
        decode_tok_s: tokens a second while all streams of a cohort decode; None where that never was.
        decode_tokens, decode_s: from which it is.
        phase_tok_s: tokens a second of the whole level.
        phase_s: seconds of the whole level.
        ttft_median_s, ttft_p95_s: seconds to the first token.
    """

    streams: int
    cohorts: int
    requests: int
    prompt_tokens: int
    tokens: int
    decode_tok_s: float | None
    decode_tokens: int
    decode_s: float
    phase_tok_s: float
    phase_s: float
    ttft_median_s: float
    ttft_p95_s: float


def level_result(streams: int, cohorts: Sequence[Sequence[Timeline]]) -> LevelResult:
    """Reckon a level from the times of its requests.

    Args:
        streams: of the level.
        cohorts: the requests of each, all of them ended.

    Raises:
        ValueError: no request.
    """
    requests = [each for cohort in cohorts for each in cohort]
    if not requests:
        raise ValueError(f"the level of {streams} streams has no request")
    decode_tokens, decode_s = 0, 0.0
    for cohort in cohorts:
        if (window := decode_window(cohort)) is not None:
            begin, end = window
            decode_s += end - begin
            decode_tokens += sum(1 for each in cohort for time in each.tokens if begin < time <= end)
    tokens = sum(len(each.tokens) for each in requests)
    phase_s = max(each.last for each in requests) - min(each.start for each in requests)
    waits = [each.ttft_s for each in requests]
    return LevelResult(
        streams=streams,
        cohorts=len(cohorts),
        requests=len(requests),
        prompt_tokens=sum(each.prompt_tokens for each in requests),
        tokens=tokens,
        decode_tok_s=decode_tokens / decode_s if decode_s > 0 else None,
        decode_tokens=decode_tokens,
        decode_s=decode_s,
        phase_tok_s=tokens / phase_s if phase_s > 0 else 0.0,
        phase_s=phase_s,
        ttft_median_s=quantile(waits, 0.5),
        ttft_p95_s=quantile(waits, 0.95),
    )


def decode_window(cohort: Sequence[Timeline]) -> tuple[float, float] | None:
    """From when to when every stream of a cohort decodes; None when that never is."""
    if not cohort:
        return None
    begin = max(each.first for each in cohort)
    end = min(each.last for each in cohort)
    return (begin, end) if end > begin else None


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share lies, on straight lines between the values in order.

    Raises:
        ValueError: no value, or a share outside 0 to 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no quantile {share:g} of {len(values)} values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    # Rounding must not carry it beyond the larger one.
    return min(ordered[below] + (place - below) * (ordered[above] - ordered[below]), ordered[above])


def parse_levels(flag: str, text: str) -> tuple[int, ...]:
    """Numbers of streams from `1,2,4`, in rising order.

    Raises:
        UsageError: something else than numbers from 1 to 4096 with commas between them.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= MOST_STREAMS for word in words):
        raise UsageError(
            f"{flag} '{text}' is no list of streams: expected numbers from 1 to {MOST_STREAMS} with commas "
            "between them, as in 1,8,88"
        )
    return tuple(sorted({int(word) for word in words}))
