"""Which stage or hop a ring waits for, read from the counters that every stage's beats carry.

Slow is not stuck: as long as a stage ticks, however seldom it finishes a frame, nobody is blamed. Blamed is

- a stage that has taken a frame, not passed it on, and does not tick;
- a hop whose far end neither takes the frames that were sent nor ticks: the frame is lost or the way is
  closed;
- a hop whose near end can not send while the far end does not tick.

Each for longer than a limit that the caller sets from the profiled time of a layer. Time in which this node
itself was stalled does not count (`silence` of the membership table is handed in as the measure).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cascadia_p2p.wire.messages import Beat


@dataclass(frozen=True, slots=True)
class Blame:
    """What holds the ring up.

    Args:
        stage: the stage that does not go on, or the far end of the hop.
        hop: the hop from the stage before it is at fault, not the stage's compute.
        seconds: for how long.
    """

    stage: int
    hop: bool
    seconds: float


@dataclass(slots=True)
class _Stage:
    beat: Beat | None
    computing_since: float
    taking_since: float


class HopWatch:
    """The counters of one epoch's stages over time."""

    def __init__(self, stages: int, now: float) -> None:
        self._stages = [_Stage(None, now, now) for _ in range(stages)]

    def update(self, stage: int, beat: Beat, now: float) -> None:
        """Take in a beat of a stage in this epoch; the head hands in its own."""
        entry, before = self._stages[stage], self._stages[stage].beat
        entry.beat = beat
        ticked = before is None or beat.progress != before.progress
        if ticked or stage == 0 or beat.waiting_send or beat.frames_in <= beat.frames_out:
            entry.computing_since = now
        previous = self._stages[stage - 1].beat
        pending = previous is not None and (previous.frames_out > beat.frames_in or previous.waiting_send)
        if ticked or not pending or (before is not None and beat.frames_in != before.frames_in):
            entry.taking_since = now

    def beat(self, stage: int) -> Beat | None:
        """The last beat of a stage."""
        return self._stages[stage].beat

    def held(self, stage: int) -> int:
        """The first frame that the stage had not passed on when its successor beat last."""
        beat = self._stages[(stage + 1) % len(self._stages)].beat
        return 1 if beat is None else beat.frames_in + 1

    def blame(self, silence: Callable[[float], float], limit: float) -> Blame | None:
        """The first stage or hop that has stood still for `limit` seconds; None when all goes on."""
        if len(self._stages) == 1:
            return None
        for index, entry in enumerate(self._stages):
            if (stood := silence(entry.computing_since)) >= limit:
                return Blame(index, False, stood)
        for index, entry in enumerate(self._stages):
            if (stood := silence(entry.taking_since)) >= limit:
                return Blame(index, True, stood)
        return None

    def unseen(self, number: int) -> int:
        """The first stage that has not seen a probe of this number or a later one; 0 for the head alone."""
        for index, entry in enumerate(self._stages[1:], start=1):
            if entry.beat is None or entry.beat.probe_seen < number:
                return index
        return 0
