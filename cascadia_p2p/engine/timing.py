"""What a stage's time goes into, by part, as every kind of model counts it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

I64: TypeAlias = npt.NDArray[np.int64]


class WorkPart(StrEnum):
    """A kind of work of a stage."""

    PROJECTIONS = "projections"
    ATTENTION = "attention"
    ROUTER = "router"
    EXPERTS = "experts"
    DENSE = "dense"
    HEAD = "head"
    GLUE = "glue"
    """Norms, convolutions, sums, codes of activations, and everything between the parts."""


@dataclass(slots=True)
class WorkTimes:
    """Running totals since the stage was loaded.

    Args:
        seconds: by part; what a stage does not have stays at zero.
        frames: frames computed.
        rows: rows computed.
    """

    seconds: dict[WorkPart, float] = field(default_factory=lambda: dict.fromkeys(WorkPart, 0.0))
    frames: int = 0
    rows: int = 0

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def since(self, before: WorkTimes) -> WorkTimes:
        """What came after earlier totals of the same stage."""
        seconds = {part: each - before.seconds[part] for part, each in self.seconds.items()}
        return WorkTimes(seconds, self.frames - before.frames, self.rows - before.rows)

    def copy(self) -> WorkTimes:
        """The totals as they are now."""
        return WorkTimes(dict(self.seconds), self.frames, self.rows)


class WorkClock:
    """Counts the time of layers that run one after another, by part: time since the last lap goes to a part.

    One thread laps; any thread may read.
    """

    def __init__(self) -> None:
        self._nanoseconds = dict.fromkeys(WorkPart, 0)
        self._frames = self._rows = 0
        self._mark = time.perf_counter_ns()

    def frame(self, rows: int) -> None:
        """A frame of so many rows begins."""
        self._frames += 1
        self._rows += rows
        self._mark = time.perf_counter_ns()

    def start(self) -> None:
        """What was before belongs to no part."""
        self._mark = time.perf_counter_ns()

    def lap(self, part: WorkPart) -> None:
        """What was since the last lap belongs to this part."""
        now = time.perf_counter_ns()
        self._nanoseconds[part] += now - self._mark
        self._mark = now

    def share(self, nanoseconds: int, parts: Sequence[WorkPart], ticks: I64) -> None:
        """Divide a time among parts, in proportion to ticks of each."""
        total = int(ticks.sum())
        for part, count in zip(parts, ticks.tolist(), strict=True):
            self._nanoseconds[part] += nanoseconds * count // max(total, 1)
        self._mark = time.perf_counter_ns()

    def times(self) -> WorkTimes:
        """The totals so far."""
        seconds = {part: count / 1e9 for part, count in self._nanoseconds.items()}
        return WorkTimes(seconds, self._frames, self._rows)
