"""What a node counts for its status and its metrics; used in the event loop alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cascadia_p2p.errors import ErrorCode
from cascadia_p2p.types import Epoch

FIRST_TOKEN_S: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the time to the first token, in seconds."""

BETWEEN_TOKENS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the time from one token to the next, in seconds."""


class Histogram:
    """Counts of values up to fixed bounds, and their sum.

    Args:
        bounds: upper bounds, each of which belongs to its bucket, in ascending order.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """The upper bound of each bucket and how many values are at most that; the last bound is +Inf."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


def _no_errors() -> dict[ErrorCode, int]:
    return dict.fromkeys(ErrorCode, 0)


@dataclass(slots=True)
class HeadCounts:
    """What the door has seen since it opened."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class HeadMeter:
    """What the head delivers to clients, since its door opened.

    Args:
        prompt_tokens: tokens of prompts whose first token came.
        generated_tokens: tokens that came.
        rejected: requests that were not taken, by reason.
        failed: requests that were taken and ended with an error, by reason.
        first_token: seconds from the arrival of a request to its first token.
        between_tokens: seconds from one token of an answer to the next, a pause for want of a ring included.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    rejected: dict[ErrorCode, int] = field(default_factory=_no_errors)
    failed: dict[ErrorCode, int] = field(default_factory=_no_errors)
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))

    def first(self, prompt: int, waited_s: float) -> None:
        """The first token of an answer to a prompt of so many tokens."""
        self.prompt_tokens += prompt
        self.generated_tokens += 1
        self.first_token.observe(waited_s)

    def next(self, waited_s: float) -> None:
        """Any further token."""
        self.generated_tokens += 1
        self.between_tokens.observe(waited_s)


@dataclass(slots=True)
class RingMeter:
    """The rings that this node was a stage of, since the process began.

    Args:
        opened: epochs that opened.
        lost: open epochs that ended.
        recovered: epochs that opened after an open one had ended.
        outage_s: seconds from such an end to the next opening.
    """

    opened: int = 0
    lost: int = 0
    recovered: int = 0
    outage_s: float = 0.0
    _open: Epoch | None = None
    _lost_at: float | None = None

    def open(self, epoch: Epoch, now: float) -> None:
        """An epoch serves from now on."""
        if epoch == self._open:
            return
        self._open = epoch
        self.opened += 1
        if self._lost_at is not None:
            self.recovered += 1
            self.outage_s += now - self._lost_at
            self._lost_at = None

    def close(self, epoch: Epoch, now: float) -> None:
        """An epoch is over; one that never opened does not count."""
        if epoch == self._open:
            self._open = None
            self.lost += 1
            self._lost_at = now
