"""Which stream has which slot of a stage, and how far it has come; tells right segments from wrong ones."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.kernels.rows import I32
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

Table: TypeAlias = npt.NDArray[np.void]
Mask: TypeAlias = npt.NDArray[np.bool_]

_log = structlog.get_logger()


class Slots:
    """The slots of one stage.

    A slot holds `held` positions. It can go back to any of the `rewind` positions below the highest that it
    ever held, because that is how far the histories and rings of the layers reach, or to nothing.
    A slot that failed stays so, and fails all segments of its stream, until it is started or released.

    Args:
        promise: slots and context.
        rewind: positions by which a stream can go back.
    """

    def __init__(self, promise: Promise, rewind: int) -> None:
        self._context = promise.context
        self._rewind = rewind
        self._count = promise.slots
        self._live = np.zeros(promise.slots, np.bool_)
        self._stream = np.zeros(promise.slots, np.uint64)
        self._held = np.zeros(promise.slots, np.int64)
        self._highest = np.zeros(promise.slots, np.int64)
        self._failed = np.zeros(promise.slots, np.uint16)

    def held(self, slot: int) -> int:
        """Positions that the slot's stream has; 0 for a free slot."""
        return int(self._held[slot]) if self._live[slot] else 0

    @property
    def taken(self) -> int:
        """Slots that hold a stream; may be asked from any thread."""
        return int(np.count_nonzero(self._live))

    def reset(self) -> None:
        """Free every slot."""
        self._live.fill(False)

    def operate(self, operations: Table) -> None:
        """Apply a frame's operations in order.

        One that does not fit the slot's state is logged; where it concerns the slot's own stream, it fails
        the slot.
        """
        for operation in operations:
            kind, slot = int(operation["kind"]), int(operation["slot"])
            stream, position = int(operation["stream"]), int(operation["position"])
            if slot >= self._count:
                _log.warning("operation_on_unknown_slot", slot=slot, slots=self._count, stream=stream)
            elif kind == OperationKind.START:
                self._start(slot, stream)
            elif not self._live[slot] or int(self._stream[slot]) != stream:
                _log.warning("operation_on_unknown_stream", slot=slot, stream=stream, kind=kind)
            elif kind == OperationKind.RELEASE:
                self._live[slot] = False
            else:
                self._go_back(slot, position)

    def _start(self, slot: int, stream: int) -> None:
        self._live[slot], self._stream[slot] = True, stream
        self._held[slot] = self._highest[slot] = 0
        self._failed[slot] = SegmentError.NONE

    def _go_back(self, slot: int, position: int) -> None:
        held, highest = int(self._held[slot]), int(self._highest[slot])
        if position == 0:
            self._held[slot] = self._highest[slot] = 0
        elif highest - self._rewind <= position <= held:
            self._held[slot] = position
        else:
            _log.warning(
                "rewind_out_of_reach", slot=slot, position=position, held=held, lowest=highest - self._rewind
            )
            self._failed[slot] = SegmentError.POSITION

    def admit(self, segments: Table, stage: int) -> Mask:
        """Tell which segments can be computed; mark the others with what is wrong, and with the stage.

        Segments that came marked stay as they are.
        """
        came_right = segments["error"] == SegmentError.NONE
        slot = segments["slot"].astype(np.int64)
        place = np.where(slot < self._count, slot, 0)
        start = segments["start"].astype(np.int64)
        error = self._failed[place]
        self._mark(error, start + segments["rows"] > self._context, SegmentError.CONTEXT)
        self._mark(error, start != self._held[place], SegmentError.POSITION)
        # A second window of one slot has rows that the first does not know to be its neighbours.
        self._mark(error, self._repeated(np.minimum(slot, self._count)), SegmentError.POSITION)
        unknown = (slot >= self._count) | ~self._live[place] | (self._stream[place] != segments["stream"])
        error[unknown] = SegmentError.UNKNOWN_STREAM
        wrong = came_right & (error != SegmentError.NONE)
        segments["error"][wrong] = error[wrong]
        segments["stage"][wrong] = stage
        right: Mask = came_right & ~wrong
        return right

    @staticmethod
    def _mark(error: npt.NDArray[np.uint16], where: Mask, kind: SegmentError) -> None:
        error[where & (error == SegmentError.NONE)] = kind

    def _repeated(self, slots: npt.NDArray[np.int64]) -> Mask:
        """True where the same number, at most the count of slots, stood before."""
        order = np.arange(len(slots))
        first = np.empty(self._count + 1, np.int64)
        first[slots[::-1]] = order[::-1]
        result: Mask = first[slots] != order
        return result

    def begin(self, segments: Table) -> None:
        """Mark admitted segments' slots as failed for as long as their layers are half done."""
        self._failed[segments["slot"]] = SegmentError.INTERNAL

    def commit(self, segments: Table) -> None:
        """Count rows of begun segments that are computed as held."""
        slot = segments["slot"]
        self._held[slot] += segments["rows"]
        self._highest[slot] = np.maximum(self._highest[slot], self._held[slot])
        self._failed[slot] = SegmentError.NONE

    def fail(self, slot: int, error: SegmentError) -> None:
        """Let every further segment of the slot's stream fail with this."""
        self._failed[slot] = error


def cached_positions(promise: Promise, window: int | None, rewind: int) -> int:
    """Positions a slot whose keys and values a layer keeps: all, or a ring that covers its window.

    The ring also holds what going back makes visible again and what one frame appends, in whole blocks.
    """
    positions = promise.context
    if window is not None:
        positions = min(positions, window + rewind + promise.rows)
    return -(-positions // BLOCK) * BLOCK


def block_table(slots: int, positions: int) -> I32:
    """Blocks for every slot, laid out slot by slot: int32 [slots, positions / 64]."""
    blocks = positions // BLOCK
    return np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
