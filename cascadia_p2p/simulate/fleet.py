"""What the simulator needs to know of a fleet: its stages' times, its hops, and what it can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from cascadia_p2p.errors import UsageError
from cascadia_p2p.ring.stagetime import RingTime, StageTime, ring_time
from cascadia_p2p.simulate.tables import StageTable
from cascadia_p2p.types import Promise

MOST_STAGES: Final = 4096


@dataclass(frozen=True)
class Stage:
    """A stage of the ring.

    Args:
        name: of its machine.
        table: seconds by rows of a frame.
        layers: that it holds.
        head: seconds of the vocabulary head by rows that ask for a token; None for all but the tail.
    """

    name: str
    table: StageTable
    layers: int
    head: StageTable | None = None

    def seconds(self, rows: int, asking: int) -> float:
        """Seconds for a frame.

        Args:
            rows: of the frame.
            asking: rows that ask the tail for a token.
        """
        own = self.table.of(rows)
        return own if self.head is None or not asking else own + self.head.of(asking)


@dataclass(frozen=True, slots=True)
class Hop:
    """A way from one stage to the next.

    Args:
        latency_s: seconds before the first byte arrives.
        row_s: seconds that a row occupies the wire.
    """

    latency_s: float
    row_s: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """Stages in ring order.

    Args:
        name: for people.
        stages: the head first, the tail last.
        hops: one from each stage, the way of token frames back to the head last; none for a ring of one.
        promise: what every stage can hold.
    """

    name: str
    stages: tuple[Stage, ...]
    hops: tuple[Hop, ...]
    promise: Promise

    def __post_init__(self) -> None:
        wanted = 0 if len(self.stages) == 1 else len(self.stages)
        if not 1 <= len(self.stages) <= MOST_STAGES or len(self.hops) != wanted:
            raise UsageError(f"a fleet of {len(self.stages)} stages can not have {len(self.hops)} hops")

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def most_rows(self) -> int:
        """The largest frame that every stage was measured with."""
        return min(stage.table.most_rows for stage in self.stages)

    def slowest(self, rows: int) -> int:
        """The stage that takes longest for a frame of decode rows."""
        return max(range(len(self.stages)), key=lambda place: self.stages[place].seconds(rows, rows))

    def pace(self) -> RingTime:
        """The times of its stages as a scheduler is told them: of all numbers of rows that were measured.

        Raises:
            UsageError: the times do not grow with rows.
        """
        most = min(self.most_rows, self.promise.rows)
        found = ring_time([self._measured(stage, most) for stage in self.stages])
        if found is None:
            raise UsageError(
                f"the times of fleet '{self.name}' do not grow with rows: give times of at least two sizes, "
                "and let a frame have more than one row"
            )
        return found

    def with_hops(self, seconds: float) -> Fleet:
        """The fleet with every hop taking so long for one row; wires keep their width.

        Raises:
            UsageError: no time.
        """
        if not 0 <= seconds < 60:
            raise UsageError(f"a hop of {seconds * 1e3:g} ms: expected 0 to 60000")
        hops = tuple(Hop(max(seconds - hop.row_s, 0.0), min(hop.row_s, seconds)) for hop in self.hops)
        return replace(self, hops=hops)

    def with_promise(self, promise: Promise) -> Fleet:
        """The fleet with another promise."""
        return replace(self, promise=promise)

    @staticmethod
    def _measured(stage: Stage, most: int) -> StageTime | None:
        return StageTime.measured([(rows, stage.seconds(rows, rows)) for rows in range(1, most + 1)])


def even_hops(stages: int, hop: Hop) -> tuple[Hop, ...]:
    """The hops of a ring whose ways are alike; token frames are too short to occupy a wire."""
    if stages == 1:
        return ()
    return (*[hop] * (stages - 1), Hop(hop.latency_s))
