"""Times of a stage by the rows of a frame, on straight lines between what was measured.

Where an engine pads the rows of a call, time jumps when a row more needs a larger call. Lines then run only
between points of one padded size; a size without a point costs what its last row would on the line before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cascadia_p2p.errors import UsageError

Padding = Callable[[int], int]
"""Rows of a call for so many rows of a frame."""


def published_padding(rows: int) -> int:
    """Rows that the published fleet computes: 2, multiples of 8 up to 32, then multiples of 32."""
    if rows <= 2:
        return 2
    step = 8 if rows <= 32 else 32
    return -(-rows // step) * step


@dataclass(frozen=True)
class StageTable:
    """Seconds of a stage by rows.

    Args:
        points: rows (not always whole: a mean over frames of several sizes) and seconds, by rising rows.
        padding: of calls; None when there is none.

    Raises:
        UsageError: no point, rows that do not rise or are below 1, or a time that is not above 0.
    """

    points: tuple[tuple[float, float], ...]
    padding: Padding | None = None

    def __post_init__(self) -> None:
        rising = all(a < b for (a, _), (b, _) in pairwise(self.points))
        if not self.points or self.points[0][0] < 1 or not rising:
            raise UsageError("a table of stage times needs points of rising rows, from 1 row on")
        if not all(0 < seconds < float("inf") for _, seconds in self.points):
            raise UsageError("a table of stage times needs times above 0")

    @property
    def most_rows(self) -> int:
        """The largest frame that was measured."""
        return int(self.points[-1][0])

    def of(self, rows: int) -> float:
        """Seconds for a frame of so many rows; none for a frame without rows."""
        if rows <= 0:
            return 0.0
        if self.padding is None:
            return _on_lines(self.points, rows)
        inside = [point for point in self.points if self._size(point[0]) == self.padding(rows)]
        if inside:
            return _on_lines(inside, rows) if len(inside) > 1 else inside[0][1]
        return _on_lines(self.points, self.padding(rows))

    def scaled(self, factor: float) -> StageTable:
        """The table of a stage that takes so many times as long."""
        return StageTable(tuple((rows, seconds * factor) for rows, seconds in self.points), self.padding)

    def _size(self, rows: float) -> int:
        whole = int(rows) if rows == int(rows) else int(rows) + 1
        return whole if self.padding is None else self.padding(whole)


def unmixed(streams: int, groups: int, mean: float, smaller: float) -> float:
    """Time of the larger frames, when `streams` streams fill `groups` frames of two sizes.

    The frames hold k and k + 1 rows, k = streams // groups, streams % groups of them the larger number.

    Args:
        streams: that do not fill the groups evenly.
        groups: frames.
        mean: time of a frame, over all of them.
        smaller: time of a frame of k rows.

    Raises:
        ValueError: all frames are of one size.
    """
    larger = streams % groups
    if not larger:
        raise ValueError(f"{streams} streams fill {groups} groups evenly")
    return (groups * mean - (groups - larger) * smaller) / larger


def _on_lines(points: Sequence[tuple[float, float]], rows: float) -> float:
    """The time at `rows`: between points on straight lines, beyond them along the nearest one.

    A single point says nothing of the slope: other rows cost in proportion. Below all points no frame costs
    less than its share of the smallest one.
    """
    if len(points) == 1:
        return points[0][1] * rows / points[0][0]
    place = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
    (left, before), (right, after) = points[place - 1], points[place]
    seconds = before + (after - before) * (rows - left) / (right - left)
    return max(seconds, points[0][1] * min(rows / points[0][0], 1.0))
