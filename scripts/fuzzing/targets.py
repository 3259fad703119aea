"""All targets by name."""

from __future__ import annotations

from typing import Final

from fuzzing import file_targets, ring_targets, wire_targets
from fuzzing.target import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target for target in (*wire_targets.TARGETS, *ring_targets.TARGETS, *file_targets.TARGETS)
}
