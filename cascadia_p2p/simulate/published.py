"""The published fleet: its numbers as they were given, and the fleet that they describe.

Its streams went round in at most eleven groups, so a mean of 2.91 rows a frame is ten frames of three rows
and one of two. Where both sizes are padded alike, a mean lies on the line between them. Where a row more
needs a larger call (two to three rows, eight to nine), the time of the larger frames is taken out of the
mean: `tables.unmixed`. Roles 4 and 6 were not read and are the mean of 5 and 7.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from cascadia_p2p.simulate.drivers import FixedGroups
from cascadia_p2p.simulate.fleet import Fleet, Hop, Stage, even_hops
from cascadia_p2p.simulate.tables import StageTable, published_padding, unmixed
from cascadia_p2p.types import Promise

NAME: Final = "published"

GIGABIT: Final = 117e6
"""Bytes a second that get through a gigabit wire."""

SLOTS: Final = 176
"""The most streams that it was measured with."""

WINDOW: Final = 8
"""Rows of a prompt's window. The fleet read 54 prompt tokens a second: its slowest role takes 16.7 ms a row
in frames of eight and 39 in frames of one."""

WINDOWS_A_STAGE: Final = 2
"""Windows in flight for each stage: one at work and one that waits. Nobody gave this number; decode rates
do not depend on it, times to the first token do."""

_ROW_OVERHEAD: Final = 32
_Positive = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=100_000)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageRead(_Section):
    """What the stages took for a row while so many streams decoded.

    Args:
        streams: that decoded.
        ms: milliseconds a row, by the roles that were read.
    """

    streams: _Count
    ms: tuple[_Positive, ...]


class CurvePoint(_Section):
    """A level of the published curve; the names are those of `workload.LevelResult`."""

    streams: _Count
    decode_tok_s: _Positive
    phase_tok_s: _Positive
    ttft_median_s: _Positive
    ttft_p95_s: _Positive


class Published(_Section):
    """The numbers as they were given.

    Args:
        format: of this file.
        name, about: for people.
        groups: that streams were put into, at most.
        head_ms: of the vocabulary head, a call; not in the times of the last role.
        hop_ms: of a frame of one row.
        trip_waiting_ms: of a trip, for network and waiting together.
        prefill_tok_s: prompt tokens a second, the whole fleet.
        layers, dense_layers, hidden: of the model.
        roles_read: whose times are given.
        stage_ms_per_row: the times.
        curve: what clients saw.
    """

    format: Literal[1]
    name: str
    about: str
    groups: _Count
    head_ms: _Positive
    hop_ms: _Positive
    trip_waiting_ms: _Positive
    prefill_tok_s: _Positive
    layers: _Count
    dense_layers: _Count
    hidden: _Count
    roles_read: tuple[int, ...]
    stage_ms_per_row: tuple[StageRead, ...]
    curve: tuple[CurvePoint, ...]

    @property
    def roles(self) -> int:
        """Stages of the ring."""
        return max(self.roles_read) + 1

    @property
    def reply_wait_s(self) -> float:
        """Seconds of a trip that are neither computing nor hops between stages."""
        return (self.trip_waiting_ms - (self.roles - 1) * self.hop_ms) / 1e3

    def policy(self, slots: int) -> FixedGroups:
        """Its policy, with nothing running.

        Args:
            slots: streams at once; others wait.
        """
        return FixedGroups(self.groups, WINDOW, WINDOWS_A_STAGE * self.roles, slots)

    def ms_per_row(self, read: StageRead, role: int) -> float:
        """Milliseconds a row at a role; one that was not read is the mean of roles 5 and 7."""
        if role in self.roles_read:
            return read.ms[self.roles_read.index(role)]
        return (self.ms_per_row(read, 5) + self.ms_per_row(read, 7)) / 2

    def points(self, role: int) -> tuple[tuple[float, float], ...]:
        """Rows of a frame and its seconds at a role."""
        found: dict[float, float] = {}
        for read in sorted(self.stage_ms_per_row, key=lambda each: each.streams):
            # Fewer streams than groups also make frames of one row, but let clocks fall between them.
            if read.streams < self.groups:
                continue
            rows = read.streams / self.groups
            seconds = self.ms_per_row(read, role) / 1e3 * rows
            below, over = divmod(read.streams, self.groups)
            if not over:
                found[float(below)] = seconds
            elif published_padding(below) != published_padding(below + 1):
                found[float(below + 1)] = unmixed(read.streams, self.groups, seconds, found[float(below)])
            else:
                found[rows] = seconds
        return tuple(sorted(found.items()))

    def fleet(self) -> Fleet:
        """The fleet in the order and with the layers that it had."""
        head = StageTable(((1.0, self.head_ms / 1e3), (64.0, self.head_ms / 1e3)))
        each = self.layers // self.roles
        stages = tuple(
            Stage(
                f"role {role}",
                StageTable(self.points(role), published_padding),
                each,
                head if role == self.roles - 1 else None,
            )
            for role in range(self.roles)
        )
        row_s = (4 * self.hidden + _ROW_OVERHEAD) / GIGABIT
        hop = Hop(self.hop_ms / 1e3 - row_s, row_s)
        rows = min(stage.table.most_rows for stage in stages)
        return Fleet(self.name, stages, even_hops(self.roles, hop), Promise(SLOTS, 2048, rows))


@cache
def published() -> Published:
    """The published numbers."""
    raw = files("cascadia_p2p.simulate").joinpath("fleets", f"{NAME}.json").read_bytes()
    return Published.model_validate_json(raw)
