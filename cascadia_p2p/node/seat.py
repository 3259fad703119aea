"""A node's place in one formation of the ring, and what its data thread needs for it and tells of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.types import Endpoint, Epoch
from cascadia_p2p.wire.frames import FrameFault, FrameLimits, Rows, SegmentError, Table

Inputs: TypeAlias = npt.NDArray[Any]
"""int32 token ids [rows] on the first stage, float32 [rows, hidden] on the others."""


class StageLike(Protocol):
    """The engine of one node, as the data thread uses it; see `engine.stage.Stage`."""

    number: int

    def apply(
        self, segments: Table, operations: Table, inputs: Inputs, on_layer: Callable[[], None]
    ) -> npt.NDArray[np.float32]:
        """Fresh C-contiguous float32 [rows, hidden]; marks failed segments; `on_layer` may raise."""
        ...

    def tokens(self, segments: Table, hidden: npt.NDArray[np.float32]) -> tuple[Table, Table]:
        """RECORD table: the token of every segment that wants one, the status of every one that failed.

        And the ALTERNATIVE table of the records.
        """
        ...

    def reset(self) -> None:
        """Drop every stream's state."""
        ...


class PlanLike(Protocol):
    """One frame for the head to run and send; see `ring.scheduler.Plan`."""

    @property
    def number(self) -> int:
        """1, 2, 3, ... within an epoch."""
        ...

    @property
    def segments(self) -> Table:
        """SEGMENT table in row order."""
        ...

    @property
    def operations(self) -> Table:
        """OPERATION table."""
        ...

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [rows]."""
        ...


class ConductorLike(Protocol):
    """Decides on the head what goes into the ring; called in the data thread only."""

    def schedule(self) -> PlanLike | None:
        """The next frame, or None when there is no work or no credit."""
        ...

    def on_tokens(self, number: int, records: Table, alternatives: Table) -> None:
        """Take the answer to frame `number`; ValueError when none such is due."""
        ...


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in an epoch.

    Args:
        epoch: the formation.
        index: place in the ring, 0 for the head.
        stages: nodes in the ring.
        stage: this node's engine.
        limits: what a frame may hold.
        successor: the data address of the next node; the tail's is the head. Not used in a ring of one.
        conductor: on the head only.
    """

    epoch: Epoch
    index: int
    stages: int
    stage: StageLike
    limits: FrameLimits
    successor: Endpoint
    conductor: ConductorLike | None = None

    @property
    def head(self) -> bool:
        """First in the ring."""
        return self.index == 0

    @property
    def tail(self) -> bool:
        """Last in the ring."""
        return self.index == self.stages - 1

    @property
    def alone(self) -> bool:
        """A ring of one node, which needs no socket."""
        return self.stages == 1


class Drop(StrEnum):
    """Why a frame was dropped, besides the faults of its bytes (`FrameFault`)."""

    NO_EPOCH = "no_epoch"
    EPOCH = "epoch"
    REPEATED = "repeated"
    GAP = "gap"
    BROKEN = "broken"
    PLACE = "place"
    PAYLOAD = "payload"
    ABANDONED = "abandoned"


def _no_drops() -> dict[str, int]:
    return {str(reason): 0 for reasons in (FrameFault, Drop) for reason in reasons}


def _no_failures() -> dict[str, int]:
    return {error.name.lower(): 0 for error in SegmentError if error is not SegmentError.NONE}


@dataclass(frozen=True, slots=True)
class DataTotals:
    """Frames of all epochs that a data thread has been in, the present one among them.

    Args:
        frames_in, frames_out, rows, rounds: see `DataCounters`.
        round_ns: nanoseconds of all rounds.
    """

    frames_in: int = 0
    frames_out: int = 0
    rows: int = 0
    rounds: int = 0
    round_ns: int = 0


@dataclass(slots=True)
class DataCounters:
    """What the data thread does; only it writes, any thread may read any field at any time.

    Args:
        progress: ticks, at least one a layer, over the life of the process.
        epoch: the epoch that it is in.
        frames_in: frames taken in this epoch, token frames on the head included.
        frames_out: frames handed to the successor's socket in this epoch.
        rows: rows computed in this epoch.
        waiting_send: a frame is ready and the successor's socket does not take it.
        probe_seen: number of the last probe of this epoch that came by, 0 for none.
        errors: frames whose computation failed.
        busy_ns, wait_ns, send_ns: nanoseconds in the stage, in waiting for frames, in handing frames over,
            over the life of the process.
        round_ns, rounds: on the head, from handing a frame over to its tokens, and of how many frames in
            this epoch.
        dropped: frames that were not taken, by reason.
        failed: segments that could not be computed here, by reason.
        earlier: the totals of the epochs before this one.
        turn: held while an epoch's counts become part of `earlier`.
    """

    progress: int = 0
    epoch: Epoch | None = None
    frames_in: int = 0
    frames_out: int = 0
    rows: int = 0
    waiting_send: bool = False
    probe_seen: int = 0
    errors: int = 0
    busy_ns: int = 0
    wait_ns: int = 0
    send_ns: int = 0
    round_ns: int = 0
    rounds: int = 0
    dropped: dict[str, int] = field(default_factory=_no_drops)
    failed: dict[str, int] = field(default_factory=_no_failures)
    earlier: DataTotals = DataTotals()
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def totals(self) -> DataTotals:
        """The totals over the life of the process; from any thread."""
        # Without the lock an epoch that ends meanwhile would be counted twice, or not at all.
        with self.turn:
            return self._totals()

    def _totals(self) -> DataTotals:
        before = self.earlier
        return DataTotals(
            before.frames_in + self.frames_in,
            before.frames_out + self.frames_out,
            before.rows + self.rows,
            before.rounds + self.rounds,
            before.round_ns + self.round_ns,
        )

    def enter(self, epoch: Epoch | None) -> None:
        """Begin an epoch, or be in none."""
        self.epoch = None
        with self.turn:
            self.earlier = self._totals()
            self.frames_in = self.frames_out = self.rows = self.probe_seen = 0
            self.round_ns = self.rounds = 0
        self.waiting_send = False
        self.epoch = epoch


class DataReports(Protocol):
    """Takes what the owner must know; called in the data thread, must not block."""

    def switched(self, epoch: Epoch) -> None:
        """The epoch is entered: older state is dropped, the successor is being connected."""
        ...

    def switch_failed(self, epoch: Epoch, sentence: str) -> None:
        """The epoch can not be entered."""
        ...

    def probe_returned(self, epoch: Epoch, number: int) -> None:
        """A probe came round to this head."""
        ...

    def hop_broken(self, epoch: Epoch, sentence: str) -> None:
        """Frames were lost or out of order: the ring must be formed anew. Told once an epoch."""
        ...

    def died(self, sentence: str) -> None:
        """The thread has ended on its own."""
        ...


def empty_rows(limits: FrameLimits) -> Rows:
    """Memory for the largest payload, float32 [rows, hidden], aligned to 64 bytes."""
    size = limits.payload_bytes
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(limits.rows, limits.hidden)
