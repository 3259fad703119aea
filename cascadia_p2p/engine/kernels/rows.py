"""The rows of one frame as the kernels see them: whose state each belongs to, and what stands around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

I32: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowTable:
    """Four int32 arrays [rows]; whoever makes one answers for the ranges, which kernels do not check again.

    Args:
        slots: state index, 0 to slots - 1.
        positions: position in the stream, 0 to context - 1; rows of a slot stand together and ascend by one.
        before: rows of the same slot in front of this one in the frame.
        after: rows of the same slot behind this one in the frame.
    """

    slots: I32
    positions: I32
    before: I32
    after: I32

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def from_windows(cls, slots: I32, starts: I32, counts: I32) -> RowTable:
        """Rows of windows one after the other: for each its slot, first position and number of rows."""
        total = int(counts.sum())
        ends = np.cumsum(counts, dtype=np.int32)
        before = np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts)
        after = np.repeat(counts, counts) - before
        after -= 1
        return cls(np.repeat(slots, counts), np.repeat(starts, counts) + before, before, after)
