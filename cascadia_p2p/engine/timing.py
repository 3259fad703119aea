"""What a stage's time goes into, by part, as every kind of model counts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


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

    def copy(self) -> WorkTimes:
        """The totals as they are now."""
        return WorkTimes(dict(self.seconds), self.frames, self.rows)
