"""How many rows a frame carries and how long a prompt window is, from a model of a stage's time.

A stage takes `T(r) = fixed + per_row * r` for a frame of r rows. With n streams decoding on S stages a round
of all streams takes `max(S * T(r), ceil(n / r) * T(r))`: the first term is one frame's trip, the second the
time any one stage needs for all frames. A prompt of p rows in windows of w takes
`(S - 1 + ceil(p / w)) * T(w)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time of one stage for a frame of r rows: `fixed + per_row * r`, in any one unit."""

    fixed: float = 1.0
    per_row: float = 0.15

    def of(self, rows: int) -> float:
        """The time for `rows` rows."""
        return self.fixed + self.per_row * rows

    @classmethod
    def fitted(cls, measured: Sequence[tuple[int, float]]) -> StageTime | None:
        """The line through measured times with the least relative errors.

        Args:
            measured: rows and times.

        Returns:
            None when that says nothing: fewer than two numbers of rows, or times that do not grow with them.
        """
        points = [(rows, time) for rows, time in measured if time > 0]
        if len({rows for rows, _ in points}) < 2:
            return None
        # Relative errors: the sum of squares of (fixed + per_row * r) / t - 1.
        ones = [1 / time for _, time in points]
        slopes = [rows / time for rows, time in points]
        aa, bb = sum(a * a for a in ones), sum(b * b for b in slopes)
        ab = sum(a * b for a, b in zip(ones, slopes, strict=True))
        determinant = aa * bb - ab * ab
        if determinant <= 1e-12 * aa * bb:
            return None
        fixed = (bb * sum(ones) - ab * sum(slopes)) / determinant
        per_row = (aa * sum(slopes) - ab * sum(ones)) / determinant
        return cls(max(fixed, 0.0), per_row) if per_row > 0 else None


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds and cost model of the scheduler.

    Args:
        stage_time: the time of the slowest stage.
        decode_rows_limit: most decode rows in one frame.
        frames_in_flight: most frames in the ring at once.
        shared_window: most prompt rows in one frame while other streams run.
        queue_limit: most requests that wait.
        retry_after_s: what an overloaded client is told to wait.
    """

    stage_time: StageTime = StageTime()
    decode_rows_limit: int = 8
    frames_in_flight: int = 64
    shared_window: int = 8
    queue_limit: int = 1024
    retry_after_s: float = 5.0

    def decode_rows(self, streams: int, stages: int, limit: int) -> int:
        """Rows a frame that finish a round of `streams` streams soonest; the fewest among equals."""
        return _decode_rows(
            max(streams, 1), stages, max(1, min(limit, self.decode_rows_limit)), self.stage_time
        )

    def window(self, pending: int, stages: int, limit: int, *, shared: bool) -> int:
        """Rows of the next prompt window, at least 1 and at most `pending` and `limit`."""
        most = max(1, min(pending, limit, self.shared_window if shared else limit))
        return _window(pending, stages, most, self.stage_time)


@lru_cache(maxsize=4096)
def _decode_rows(streams: int, stages: int, most: int, time: StageTime) -> int:
    return min(range(1, most + 1), key=lambda r: (max(stages, -(-streams // r)) * time.of(r), r))


@lru_cache(maxsize=4096)
def _window(pending: int, stages: int, most: int, time: StageTime) -> int:
    return min(range(1, most + 1), key=lambda w: ((stages - 1 + -(-pending // w)) * time.of(w), w))
