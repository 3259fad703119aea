"""What a node says in its status of where its time goes; a bounded part of a status report."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, JsonValue, ValidationError

from cascadia_p2p.wire.model import Count, Message, Name

MAX_PARTS: Final = 32
"""Parts of a stage's work, at most."""

Seconds = Annotated[float, Field(ge=0.0, le=1e12)]


class WorkReport(Message):
    """Times of one node since its shard was loaded, or its process started.

    Args:
        seconds: in the stage, by part of its work (`engine.timing.WorkPart`).
        frames: that the stage computed.
        rows: in all these frames.
        wait_s: waiting for a frame.
        send_s: handing frames to the successor's socket.
        other_s: around the stage's parts: checks, operations, tables.
    """

    seconds: Annotated[dict[Name, Seconds], Field(max_length=MAX_PARTS)]
    frames: Count = 0
    rows: Count = 0
    wait_s: Seconds = 0.0
    send_s: Seconds = 0.0
    other_s: Seconds = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in the stage."""
        return sum(self.seconds.values()) + self.other_s

    def frame_ms(self) -> dict[str, float]:
        """Mean milliseconds a frame, by part; empty before the first frame."""
        return self._mean(self.frames)

    def row_ms(self) -> dict[str, float]:
        """Mean milliseconds a row, by part; empty before the first frame."""
        return self._mean(self.rows)

    def shares(self) -> dict[str, float]:
        """Shares of the time in the stage, by part, the largest first; parts that took none are left out."""
        whole = self.busy_s
        parts = self._by_part()
        return {name: parts[name] / whole for name in sorted(parts, key=lambda n: -parts[n]) if parts[name]}

    def _mean(self, count: int) -> dict[str, float]:
        return {name: 1e3 * each / count for name, each in self._by_part().items()} if count else {}

    def _by_part(self) -> dict[str, float]:
        return {**self.seconds, "other": self.other_s}


def read_work(value: JsonValue) -> WorkReport | None:
    """The report in a node's status; None where there is none, or what another version says."""
    if not isinstance(value, dict):
        return None
    known = {name: value[name] for name in WorkReport.model_fields if name in value}
    try:
        return WorkReport.model_validate(known)
    except ValidationError:
        return None
