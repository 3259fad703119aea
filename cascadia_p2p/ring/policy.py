"""How many frames are in the ring and how many rows each carries, from a model of a stage's time.

With n streams decoding in F frames on S stages, a round of all takes `max(trip(n / F), F * T(n / F))`, where
the first term is one frame's way round the ring, and the second the time that the slowest stage needs for
all frames. T is the slowest stage's time (`StageTime`), and the trip is S * T where nobody measured it.
n / F need not be whole: frames of both numbers of rows then take turns.

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
        prompt_share: of a frame's rows that is for prompts, when both prompts and decode rows wait.
    """

    stage_time: StageTime = DEFAULT_TIME
    decode_rows_limit: int = 8
    frames_in_flight: int = 64
    shared_window: int = 8
    queue_limit: int = 1024
    retry_after_s: float = 5.0
    trip_time: StageTime | None = None
    stretch: float = 2.0
    prompt_share: float = 0.5

    def frames(self, streams: int, stages: int, limit: int) -> int:
        """Frames in flight that finish a round of `streams` decoding streams soonest; the most among equals.

        Args:
            streams: that decode.
            stages: of the ring.
            limit: rows that a frame can hold.
        """
        most, times = self._most_decode_rows(limit), (self.stage_time, self.trip_time)
        return _frames(max(streams, 1), stages, most, max(1, self.frames_in_flight), *times)

    def decode_rows(self, streams: int, stages: int, limit: int) -> int:
        """Most decode rows of one frame, when the streams are shared out among `frames` evenly."""
        frames = self.frames(streams, stages, limit)
        return min(self._most_decode_rows(limit), -(-max(streams, 1) // frames))

    def window(self, pending: int, stages: int, limit: int, *, shared: bool) -> int:
        """Rows of the next prompt window, at least 1 and at most `pending` and `limit`."""
        most = max(1, min(pending, limit, self.shared_window if shared else limit))
        return _window(max(pending, 1), stages, most, self.stage_time)

    def mixed_rows(self, pending: int, prompts: int, decoding: int, stages: int, limit: int) -> int:
        """Rows of a frame while prompts wait, decode rows included.

        Args:
            pending: rows of all prompts that wait.
            prompts: how many they are. Of k equal prompts that follow each other the mean one is through when
                (k + 1) / 2k of all rows are: that much is to be through soonest.
            decoding: streams that decode; with them a frame is held short (`stretch`).
            stages: of the ring.
            limit: rows that a frame can hold.
        """
        amount = pending * (prompts + 1) // (2 * max(prompts, 1))
        most = limit
        if decoding:
            rows = self.decode_rows(decoding, stages, limit)
            longest = self.stretch * self.stage_time.of(rows)
            most = min(limit, max(rows + self.shared_window, _most_rows(self.stage_time, longest, limit)))
        return _window(_rounded(max(amount, 1)), stages, max(1, most), self.stage_time)

    def _most_decode_rows(self, limit: int) -> int:
        points = self.stage_time.points
        return max(1, min(limit, max(self.decode_rows_limit, points[-1][0] if points else 0)))


def _rounded(rows: int) -> int:
    """The number to two or three binary digits, so that few different ones are decided on."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


@lru_cache(maxsize=4096)
def _frames(
    streams: int, stages: int, most_rows: int, most_frames: int, time: StageTime, trip: StageTime | None
) -> int:
    fewest = min(-(-streams // most_rows), most_frames)

    def round_time(frames: int) -> float:
        rows = streams / frames
        way = stages * _mean(time, rows) if trip is None else max(_mean(trip, rows), _mean(time, rows))
        return max(way, frames * _mean(time, rows))

    return min(range(fewest, min(streams, most_frames) + 1), key=lambda f: (round_time(f), -f))


def _mean(time: StageTime, rows: float) -> float:
    """The mean time of frames of whole rows that hold `rows` in the mean."""
    low = int(rows)
    part = rows - low
    return time.of(low) if not part else (1 - part) * time.of(low) + part * time.of(low + 1)


@lru_cache(maxsize=4096)
def _window(pending: int, stages: int, most: int, time: StageTime) -> int:
    sizes = [*range(1, min(most, 32) + 1), *range(40, most, 8), most]
    return min(sizes, key=lambda w: ((stages - 1 + -(-pending // w)) * time.of(w), w))


@lru_cache(maxsize=1024)
def _most_rows(time: StageTime, longest: float, limit: int) -> int:
    """Most rows whose time is at most `longest`; 0 for none."""
    low, high = 0, limit
    middle: int
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if time.of(middle) <= longest else (low, middle - 1)
    return low
