"""Which stream has which slot of a stage, and how far it has come; tells right segments from wrong ones."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.paging import Mask, Paging
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

Table: TypeAlias = npt.NDArray[np.void]

_WITH_ENTRY: Final = frozenset(map(int, (OperationKind.ATTACH, OperationKind.KEEP, OperationKind.EVICT)))

_log = structlog.get_logger()


class Slots:
    """The slots of one stage.

    A slot holds `held` positions. It can go back to any of the `rewind` positions below the highest that it
    ever held, because that is how far the histories and rings of the layers reach, but not below a position
    at which it was kept or that it took over; or to nothing. A slot that failed stays so, and fails all
    segments of its stream, until it is started or released.

    Args:
        promise: slots, context and kept prefixes.
        rewind: positions by which a stream can go back.
        paging: the blocks and histories of the stage's layers; without it, those of no layers.
    """

    def __init__(self, promise: Promise, rewind: int, paging: Paging | None = None) -> None:
        self._context = promise.context
        self._rewind = rewind
        self._count = promise.slots
        self._paging = Paging(promise, rewind) if paging is None else paging
        self._live = np.zeros(promise.slots, np.bool_)
        self._stream = np.zeros(promise.slots, np.uint64)
        self._held = np.zeros(promise.slots, np.int64)
        self._highest = np.zeros(promise.slots, np.int64)
        self._lowest = np.zeros(promise.slots, np.int64)
        self._failed = np.zeros(promise.slots, np.uint16)
        self.misfits = 0
        """Operations so far that did not fit the state of slots and entries."""

    def held(self, slot: int) -> int:
        """Positions that the slot's stream has; 0 for a free slot."""
        return int(self._held[slot]) if self._live[slot] else 0

    @property
    def taken(self) -> int:
        """Slots that hold a stream; may be asked from any thread."""
        return int(np.count_nonzero(self._live))

    def reset(self) -> None:
        """Free every slot, and keep nothing."""
        self._live.fill(False)
        self._paging.reset()

    def operate(self, operations: Table) -> None:
        """Apply a frame's operations in order.

        One that does not fit the state is counted and logged; where it concerns the slot's own stream, it
        fails the slot, except that what can not be kept only leaves its entry empty.
        """
        if not len(operations):
            return
        columns = (operations[name].tolist() for name in ("kind", "slot", "stream", "position", "entry"))
        for kind, slot, stream, position, entry in zip(*columns, strict=True):
            if kind in _WITH_ENTRY and entry >= self._paging.entries:
                self._misfit("operation_on_unknown_entry", slot, entry=entry, entries=self._paging.entries)
                if kind == OperationKind.ATTACH and self._is_of(slot, stream):
                    self._failed[slot] = SegmentError.PREFIX
            elif kind == OperationKind.EVICT:
                self._paging.evict(entry)
            elif kind == OperationKind.KEEP:
                self._keep(slot, stream, position, entry)
            elif slot >= self._count:
                self._misfit("operation_on_unknown_slot", slot, slots=self._count, stream=stream)
            elif kind == OperationKind.START:
                self._start(slot, stream)
            elif not self._is_of(slot, stream):
                self._misfit("operation_on_unknown_stream", slot, stream=stream, kind=kind)
            elif kind == OperationKind.RELEASE:
                self._live[slot] = False
                self._paging.release(slot)
            elif kind == OperationKind.ATTACH:
                self._attach(slot, position, entry)
            else:
                self._go_back(slot, position)

    def _is_of(self, slot: int, stream: int) -> bool:
        return slot < self._count and bool(self._live[slot]) and int(self._stream[slot]) == stream

    def _misfit(self, event: str, slot: int, **details: int) -> None:
        """Count; log the first, second, fourth and so on, so that no head can fill a disk with this."""
        self.misfits += 1
        if self.misfits & (self.misfits - 1) == 0:
            _log.warning(event, slot=slot, misfits=self.misfits, **details)

    def _start(self, slot: int, stream: int) -> None:
        self._live[slot], self._stream[slot] = True, stream
        self._failed[slot] = SegmentError.NONE
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._held[slot] = self._highest[slot] = self._lowest[slot] = 0
        self._paging.release(slot)

    def _go_back(self, slot: int, position: int) -> None:
        held = int(self._held[slot])
        lowest = max(int(self._highest[slot]) - self._rewind, int(self._lowest[slot]))
        if position == 0:
            self._empty(slot)
        elif lowest <= position <= held:
            self._held[slot] = position
        else:
            self._misfit("rewind_out_of_reach", slot, position=position, held=held, lowest=lowest)
            self._failed[slot] = SegmentError.POSITION

    def _keep(self, slot: int, stream: int, position: int, entry: int) -> None:
        mine = self._is_of(slot, stream)
        # What a stream that failed holds may be anything.
        good = mine and self._failed[slot] == SegmentError.NONE and self._held[slot] == position
        if good and position > 0 and position % BLOCK == 0:
            self._paging.keep(entry, slot, position)
            self._lowest[slot] = position
            return
        self._misfit("keep_does_not_fit", slot, position=position, held=self.held(slot) if mine else 0)
        self._paging.evict(entry)

    def _attach(self, slot: int, position: int, entry: int) -> None:
        kept, held = self._paging.kept(entry), int(self._held[slot])
        if kept and kept == position and held == 0 and self._failed[slot] == SegmentError.NONE:
            self._empty(slot)
            self._paging.attach(slot, entry)
            self._held[slot] = self._highest[slot] = self._lowest[slot] = position
            return
        self._misfit("attach_does_not_fit", slot, position=position, kept=kept, held=held)
        self._failed[slot] = SegmentError.PREFIX

    def admit(self, segments: Table, stage: int) -> Mask:
        """Tell which segments can be computed; mark the others with what is wrong, and with the stage.

        Those that can have the blocks that they will be written into. Segments that came marked stay as they
        are.
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
        full = self._paging.grow(place, start + segments["rows"], came_right & (error == SegmentError.NONE))
        if full.any():
            _log.error("no_block_is_free", streams=segments["stream"][full].tolist())
            error[full] = self._failed[place[full]] = SegmentError.ROOM
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
