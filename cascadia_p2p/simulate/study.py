"""Runs levels of a workload on a simulated fleet, and says for each where the time went.

What a level gives is the fleet's own time: stage times and hops, no time for the software between them. A
ring of real nodes with these stage times is slower by what that software takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cascadia_p2p.simulate.clock import Simulation
from cascadia_p2p.simulate.drivers import Driver, FixedGroups, SchedulerDriver
from cascadia_p2p.simulate.fleet import Fleet
from cascadia_p2p.simulate.published import WINDOW, WINDOWS_A_STAGE
from cascadia_p2p.simulate.ring import Journey, VirtualRing
from cascadia_p2p.workload import LevelResult, Protocol, Timeline, decode_window, level_result

PROMPT: Final = 33
"""Tokens of a prompt of the published protocol."""


class PolicyName(StrEnum):
    """Who decides what goes into the ring."""

    OURS = "ours"
    """The product's scheduler."""
    PUBLISHED = "published"
    """Fixed groups, as the published fleet had them."""


@dataclass(frozen=True, slots=True)
class StageUse:
    """A stage while all streams decode.

    Args:
        name: of its machine.
        busy: share of the time in which it works.
        row_ms: milliseconds of its work for a row.
    """

    name: str
    busy: float
    row_ms: float


@dataclass(frozen=True, slots=True)
class Trip:
    """Mean seconds of a frame's way round the ring while all streams decode, and what they went to.

    Args:
        frames: that started in this time.
        rows: of a frame.
        seconds: from the head's start to the answer at the head.
        stages: in the stages.
        hops: on the wires, and between the tail and the head that reads its answer.
        queued: behind other frames.
    """

    frames: int
    rows: float
    seconds: float
    stages: float
    hops: float
    queued: float


@dataclass(frozen=True, slots=True)
class LevelStudy:
    """A level and where its time went; shares and trips are of the decode windows, or else of all of it.

    Args:
        policy: that was followed.
        result: of the level.
        stages: in ring order.
        trip: of a frame.
        bound_tok_s: tokens a second if the slowest stage had never waited.
    """

    policy: PolicyName
    result: LevelResult
    stages: tuple[StageUse, ...]
    trip: Trip
    bound_tok_s: float

    @property
    def slowest(self) -> int:
        """The stage that works most."""
        return max(range(len(self.stages)), key=lambda place: self.stages[place].busy)


@dataclass(frozen=True, slots=True)
class Study:
    """What is run.

    Args:
        fleet: on which.
        protocol: of the workload.
        prompt: tokens of each prompt.
        reply_wait_s: with the published policy, seconds from the tail to the head; None for the last hop.
    """

    fleet: Fleet
    protocol: Protocol
    prompt: int = PROMPT
    reply_wait_s: float | None = None

    def level(self, policy: PolicyName, streams: int) -> LevelStudy:
        """Run a level on a fleet at rest.

        Raises:
            RequestError: the fleet can not hold the prompts.
        """
        ours = policy is PolicyName.OURS
        ring = VirtualRing(self.fleet, None if ours else self.reply_wait_s)
        simulation = Simulation(self._driver(policy), ring)
        cohorts = simulation.cohorts(streams, self.protocol, self.prompt)
        return _studied(policy, streams, cohorts, simulation.journeys, self.fleet)

    def _driver(self, policy: PolicyName) -> Driver:
        if policy is PolicyName.OURS:
            return SchedulerDriver(self.fleet)
        stages = len(self.fleet.stages)
        return FixedGroups(stages, WINDOW, WINDOWS_A_STAGE * stages, self.fleet.promise.slots)


def _studied(
    policy: PolicyName,
    streams: int,
    cohorts: Sequence[Sequence[Timeline]],
    journeys: Sequence[Journey],
    fleet: Fleet,
) -> LevelStudy:
    result = level_result(streams, cohorts)
    windows = [window for cohort in cohorts if (window := decode_window(cohort)) is not None]
    tokens = result.decode_tokens
    if not windows:
        windows = [(cohorts[0][0].start, max(each.last for cohort in cohorts for each in cohort))]
        tokens = result.tokens
    seconds = sum(end - begin for begin, end in windows)
    busy = [0.0] * len(fleet.stages)
    for journey in journeys:
        for begin, end in windows:
            if journey.begins[0] < end and journey.ends[-1] > begin:
                for place, (start, stop) in enumerate(zip(journey.begins, journey.ends, strict=True)):
                    busy[place] += max(min(stop, end) - max(start, begin), 0.0)
    inside = [each for each in journeys if any(begin <= each.begins[0] < end for begin, end in windows)]
    trip = _trip(inside or journeys)
    uses = tuple(
        StageUse(stage.name, share / seconds, 1e3 * _row_seconds(inside or journeys, place))
        for place, (stage, share) in enumerate(zip(fleet.stages, busy, strict=True))
    )
    return LevelStudy(policy, result, uses, trip, tokens / max(busy))


def _row_seconds(journeys: Sequence[Journey], place: int) -> float:
    rows = sum(each.load.rows for each in journeys)
    return sum(each.ends[place] - each.begins[place] for each in journeys) / max(rows, 1)


def _trip(journeys: Sequence[Journey]) -> Trip:
    count = len(journeys)
    return Trip(
        frames=count,
        rows=sum(each.load.rows for each in journeys) / count,
        seconds=sum(each.trip_s for each in journeys) / count,
        stages=sum(each.stages_s for each in journeys) / count,
        hops=sum(each.hops_s for each in journeys) / count,
        queued=sum(each.queued_s for each in journeys) / count,
    )
