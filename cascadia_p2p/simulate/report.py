"""A simulated curve as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from cascadia_p2p.simulate.fleet import Fleet
from cascadia_p2p.simulate.placement import Placement
from cascadia_p2p.simulate.published import CurvePoint
from cascadia_p2p.simulate.study import LevelStudy
from cascadia_p2p.workload import Protocol

FORMAT: Final = 1

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class PlacedLevel:
    """A placement and a level that was run with it."""

    placement: Placement
    level: LevelStudy


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was simulated.

    Args:
        fleet: on which.
        protocol: of the workload.
        prompt: tokens of each prompt.
        levels: by policy, then by streams.
        published: the curve to compare with; empty for other fleets.
        placed: other placements; empty when nobody asked.
    """

    fleet: Fleet
    protocol: Protocol
    prompt: int
    levels: Sequence[LevelStudy]
    published: Sequence[CurvePoint] = ()
    placed: Sequence[PlacedLevel] = ()

    def point(self, streams: int) -> CurvePoint | None:
        """The published level of so many streams, if there is one."""
        return next((point for point in self.published if point.streams == streams), None)


def as_json(report: Report) -> Json:
    """The report in values that JSON has; seconds end in `_s`, milliseconds in `_ms`."""
    return {
        "format": FORMAT,
        "fleet": _fleet(report.fleet),
        "protocol": {**asdict(report.protocol), "prompt": report.prompt},
        "levels": [_level(each) for each in report.levels],
        "published": [each.model_dump() for each in report.published],
        "placements": [{**asdict(each.placement), "level": _level(each.level)} for each in report.placed],
    }


def _fleet(fleet: Fleet) -> Json:
    rows = range(1, min(fleet.promise.rows, fleet.most_rows) + 1)
    return {
        "name": fleet.name,
        "promise": asdict(fleet.promise),
        "stages": [
            {
                "name": stage.name,
                "layers": stage.layers,
                "frame_ms": [round(1e3 * stage.table.of(r), 3) for r in rows],
                "head_ms": [0.0 if stage.head is None else round(1e3 * stage.head.of(r), 3) for r in rows],
            }
            for stage in fleet.stages
        ],
        "hops": [asdict(hop) for hop in fleet.hops],
    }


def _level(level: LevelStudy) -> Json:
    trip = level.trip
    return {
        "policy": level.policy.value,
        **asdict(level.result),
        "bound_tok_s": level.bound_tok_s,
        "slowest": level.stages[level.slowest].name,
        "stages": [asdict(each) for each in level.stages],
        "trip": {
            "frames": trip.frames,
            "rows": trip.rows,
            "trip_s": trip.seconds,
            "stages_s": trip.stages,
            "hops_s": trip.hops,
            "queued_s": trip.queued,
        },
    }
