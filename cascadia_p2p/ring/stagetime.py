"""How a stage's time grows with the rows of a frame: a line, or measured points joined by lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MAX_POINTS: Final = 64
"""Points of a table, at most."""

Pace: TypeAlias = tuple[tuple[int, float], ...]
"""Rows of a frame and the time that it takes, by growing rows."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time of one stage for a frame of r rows, in any one unit.

    Args:
        fixed, per_row: the line `fixed + per_row * r`, used where there are no points.
        points: (rows, time) by growing rows, times that never fall; see `measured`.
    """

    fixed: float = 1.0
    per_row: float = 0.15
    points: Pace = ()

    def of(self, rows: float) -> float:
        """The time for `rows` rows; a broken number is a mean of frames of whole rows.

        Between points it lies on the line through both, behind the last on the line through the last two,
        before the first it is the time of the first.
        """
        points = self.points
        if not points:
            return self.fixed + self.per_row * rows
        place = bisect_left(points, (rows, 0.0))
        if place == 0:
            return points[0][1]
        (low, before), (high, after) = points[place - 1 : place + 1] if place < len(points) else points[-2:]
        return before + (after - before) / (high - low) * (rows - low)

    @classmethod
    def measured(cls, times: Sequence[tuple[int, float]]) -> StageTime | None:
        """The table of measured times.

        Of several times for one number of rows the least counts; a time that falls with more rows is a
        disturbance and is raised to the time before it.

        Args:
            times: rows and times, in any order; of more than `MAX_POINTS` some are left out.

        Returns:
            None when they say nothing: fewer than two numbers of rows, or times that do not grow with them.
        """
        least: dict[int, float] = {}
        for rows, time in times:
            if rows >= 1 and time > 0:
                least[rows] = min(time, least.get(rows, time))
        points: list[tuple[int, float]] = []
        for rows in sorted(least):
            points.append((rows, max(least[rows], points[-1][1] if points else 0.0)))
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        # The last line leads to all longer frames: it must not be level.
        while points[-1][1] <= points[-2][1]:
            del points[-2]
        step = max(1, -(-(len(points) - 1) // (MAX_POINTS - 1)))
        return cls(points=(*points[:-1:step], points[-1]))


DEFAULT_TIME: Final = StageTime()
"""For a ring of which nothing was measured: a row costs a seventh of a frame."""


@dataclass(frozen=True, slots=True)
class RingTime:
    """The times of a whole ring.

    Args:
        slowest: of the slowest stage, for each number of rows.
        trip: of all stages together: what a frame needs for its way when no other is before it.
    """

    slowest: StageTime
    trip: StageTime


def ring_time(stages: Sequence[StageTime | None]) -> RingTime | None:
    """The ring's times from those of its stages; None when none is known.

    Args:
        stages: in any order; a stage whose times are not known counts as the mean of the others, which is
            how it neither speeds up nor holds up anything.
    """
    known = [stage for stage in stages if stage is not None]
    if not known:
        return None
    rows = sorted({count for stage in known for count, _ in stage.points}) or [1, 2]
    times = {count: [stage.of(count) for stage in known] for count in rows}
    slowest = StageTime.measured([(count, max(each)) for count, each in times.items()])
    share = len(stages) / len(known)
    trip = StageTime.measured([(count, sum(each) * share) for count, each in times.items()])
    return None if slowest is None or trip is None else RingTime(slowest, trip)
