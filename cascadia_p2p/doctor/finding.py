"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue


class Level(StrEnum):
    """How bad it is, best first."""

    OK = "ok"
    WARN = "warn"
    """It works, but slower or less surely than it could."""
    FAIL = "fail"
    """A node would not work here as it is asked for."""

    @property
    def rank(self) -> int:
        """The higher is worse."""
        return _ORDER.index(self)


_ORDER = tuple(Level)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        check: its stable name.
        level: how bad it is.
        message: a sentence.
        advice: what to do; empty when there is nothing to do.
        facts: the numbers behind it.
    """

    check: str
    level: Level
    message: str
    advice: str = ""
    facts: Mapping[str, JsonValue] = field(default_factory=dict)

    def as_json(self) -> dict[str, JsonValue]:
        """All of it."""
        return {
            "check": self.check,
            "level": self.level.value,
            "message": self.message,
            "advice": self.advice,
            "facts": dict(self.facts),
        }


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all; ok when there is none."""
    return max((finding.level for finding in findings), key=lambda level: level.rank, default=Level.OK)
