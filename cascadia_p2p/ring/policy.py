"""How many frames are in the ring and how many rows each carries, from a model of a stage's time.

With n streams decoding, r rows a frame, there are F = ceil(n / r) frames in flight, and a round of all takes
`max(trip(r), F * T(n / F))`: the first term is one frame's way round the ring, the second the time that the
slowest stage needs for all frames. T is the slowest stage's time (`StageTime`); the trip is S * T on S
stages where nobody measured it. Frames do not overtake each other, so the longest decides how long a trip is.

A prompt of p rows in windows of w takes `(S - 1 + ceil(p / w)) * T(w)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cascadia_p2p.ring.stagetime import DEFAULT_TIME, StageTime

__all__ = ["Policy", "StageTime"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds and cost model of the scheduler.

    Args:
        stage_time: the time of the slowest stage.
        decode_rows_limit: most decode rows in one frame; a longer table of measured times raises it.
        frames_in_flight: most frames in the ring at once.
        shared_window: prompt rows that may join any frame of decode rows.
        queue_limit: most requests that wait.
        retry_after_s: what an overloaded client is told to wait while no rate is known.
        trip_time: of all stages together, in the unit of `stage_time`; None for stages x `stage_time`.
        stretch: prompt rows beyond `shared_window` may make a frame so many times as long as it would be with
            its decode rows alone.
        prompt_share: most of the rows that prompts get while decode rows wait; each prompt counts as much as
            all answers together.
    """

    stage_time: StageTime = DEFAULT_TIME
    decode_rows_limit: int = 8
    frames_in_flight: int = 64
    shared_window: int = 8
    queue_limit: int = 1024
    retry_after_s: float = 5.0
    trip_time: StageTime | None = None
    stretch: float = 2.0
    prompt_share: float = 0.75

    def frames(self, streams: int, stages: int, limit: int) -> int:
        """Frames in flight for a round of `streams` decoding streams: see `decode_rows`."""
        rows = self.decode_rows(streams, stages, limit)
        return min(max(1, self.frames_in_flight), -(-max(streams, 1) // rows))

    def decode_rows(self, streams: int, stages: int, limit: int) -> int:
        """Rows a frame that finish a round of `streams` streams soonest; the fewest among equals.

        Args:
            streams: that decode.
            stages: of the ring.
            limit: rows that a frame can hold.
        """
        points = self.stage_time.points
        most = max(1, min(limit, max(self.decode_rows_limit, points[-1][0] if points else 0)))
        return _decode_rows(max(streams, 1), stages, most, self.stage_time, self.trip_time)

    def share(self, prompts: int) -> float:
        """The part of the rows that so many prompts get while decode rows wait."""
        return min(self.prompt_share, prompts / (prompts + 1))

    def mixed_rows(
        self, pending: int, prompts: int, decoding: int, stages: int, limit: int, before: int = 0
    ) -> int:
        """Rows of a frame while prompts wait, decode rows included.

        Args:
            pending: rows of all prompts that wait.
            prompts: how many they are. Of k equal prompts that follow each other the mean one is through when
                (k + 1) / 2k of all rows are: that much is to be through soonest.
            decoding: streams that decode; with them a frame is held short (`stretch`).
            stages: of the ring.
            limit: rows that a frame can hold.
            before: rows of the frame before, of the same prompts. Behind long frames a short one is no sooner
                round the ring, so frames do not get shorter as a backlog comes to its end.
        """
        amount = pending * (prompts + 1) // (2 * max(prompts, 1))
        most = limit
        if decoding:
            rows = self.decode_rows(decoding, stages, limit)
            longest = self.stretch * self.stage_time.of(rows)
            most = min(limit, max(rows + self.shared_window, _most_rows(self.stage_time, longest, limit)))
        rows = _window(_rounded(max(amount, 1)), stages, max(1, most), self.stage_time)
        return max(rows, min(before, most))


def _rounded(rows: int) -> int:
    """The number up to four binary digits, so that few different ones are decided on."""
    step: int = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


@lru_cache(maxsize=4096)
def _decode_rows(streams: int, stages: int, most: int, time: StageTime, trip: StageTime | None) -> int:
    def round_time(rows: int) -> float:
        frames = -(-streams // rows)
        way = stages * time.of(rows) if trip is None else trip.of(rows)
        return max(way, frames * _mean(time, streams / frames))

    rows: int = min(range(1, min(most, streams) + 1), key=lambda r: (round_time(r), r))
    return rows


def _mean(time: StageTime, rows: float) -> float:
    """The mean time of frames of whole rows that hold `rows` in the mean."""
    low = int(rows)
    part = rows - low
    return time.of(low) if not part else (1 - part) * time.of(low) + part * time.of(low + 1)


@lru_cache(maxsize=4096)
def _window(pending: int, stages: int, most: int, time: StageTime) -> int:
    sizes = [*range(1, min(most, 32) + 1), *range(40, most, 8), most]
    rows: int = min(sizes, key=lambda w: ((stages - 1 + -(-pending // w)) * time.of(w), w))
    return rows


@lru_cache(maxsize=1024)
def _most_rows(time: StageTime, longest: float, limit: int) -> int:
    """Most rows whose time is at most `longest`; 0 for none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if time.of(middle) <= longest else (low, middle - 1)
    return low
