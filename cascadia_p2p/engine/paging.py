"""Which blocks of positions a stage's slots have, which of them kept prefixes share, and which are free.

Layers that cache the same positions share one pool: a table of block numbers, which kernels read in place,
and a count of references for every block. Blocks are memory from the start; only their numbers change hands.
A stream's block i (positions 64 i to 64 i + 63) stands at place i modulo n of its slot's n places. Where all
positions are cached that never wraps; where a window bounds what is seen, the places are a ring.

A block belongs to the slots and the kept prefixes that refer to it. A slot writes only into blocks that
nobody else refers to: a kept prefix ends at the end of a block, a stream can not go back below it, and where
a ring comes round to a block that is shared it takes another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.kernels.rows import I32
from cascadia_p2p.engine.matrix import F32
from cascadia_p2p.types import Promise

Mask: TypeAlias = npt.NDArray[np.bool_]

NO_BLOCK: Final = 0
"""Stands in a table where a slot has no block. It is one of the pool that nobody has, so that whoever calls
layers for a slot without blocks harms no stream and no other memory."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many blocks layers of one kind give a slot, and how many of them a kept prefix is.

    Args:
        blocks: of a slot.
        reach: blocks before the end of one that rows behind it look back to; None where a kept prefix is all
            of its blocks.
    """

    blocks: int
    reach: int | None = None

    @classmethod
    def of(cls, promise: Promise, window: int | None, rewind: int) -> Geometry:
        """Of layers whose rows see `window` positions, their own among them, or all."""
        whole = -(-promise.context // BLOCK)
        if window is None:
            return cls(whole)
        # What a frame's first row sees, and what stands behind that row: the frame's other rows, or the
        # positions that the stream went back over. A block is replaced as a whole, so that all blocks that
        # these positions touch, wherever the first lies in its own, have to stand side by side.
        positions = window - 1 + max(promise.rows, rewind)
        blocks = (positions - 2) // BLOCK + 2
        if blocks >= whole:
            return cls(whole)
        return cls(blocks, -(-(window - 1) // BLOCK))

    @property
    def positions(self) -> int:
        """Positions of a slot that blocks have room for."""
        return self.blocks * BLOCK

    def kept_blocks(self) -> int:
        """Blocks in the pool for each kept prefix; none where it takes what slots leave free."""
        return self.reach or 0

    def pool_blocks(self, promise: Promise) -> int:
        """Blocks of the pool, the one that nobody has among them."""
        return 1 + promise.slots * self.blocks + promise.kept * self.kept_blocks()


class BlockPool:
    """The blocks of all layers of one geometry.

    Args:
        geometry: of these layers.
        promise: slots, context and kept prefixes.
    """

    def __init__(self, geometry: Geometry, promise: Promise) -> None:
        self.geometry = geometry
        self.blocks = geometry.pool_blocks(promise)
        self.table = np.full((promise.slots, geometry.blocks), NO_BLOCK, np.int32)
        """int32 [slots, n]: a slot's block at each of its places."""
        self._counts = np.zeros(self.blocks, np.int32)
        self._free = np.empty(self.blocks - 1, np.int32)
        length = geometry.blocks if geometry.reach is None else geometry.reach
        self._kept = np.full((promise.kept, length), NO_BLOCK, np.int32)
        self.reset()

    @property
    def free(self) -> int:
        """Blocks that nobody refers to."""
        return self._left

    @property
    def counts(self) -> I32:
        """References to each block, a copy: int32 [blocks]."""
        return self._counts.copy()

    @property
    def kept(self) -> I32:
        """The blocks of each kept prefix, a copy: int32 [kept, most], `NO_BLOCK` where there are none."""
        return self._kept.copy()

    def reset(self) -> None:
        """Nobody has any block."""
        self.table.fill(NO_BLOCK)
        self._kept.fill(NO_BLOCK)
        self._counts.fill(0)
        # Taken from the end: the lowest numbers first.
        self._free[:] = np.arange(self.blocks - 1, NO_BLOCK, -1)
        self._left = len(self._free)

    def lacking(self, slot: int, begin: int, end: int) -> I32:
        """Places of the block indices `begin` to `end` - 1 that need a free block before they are written."""
        places = np.arange(begin, end, dtype=np.int32) % self.geometry.blocks
        there = self.table[slot, places]
        lacking: I32 = places[(there == NO_BLOCK) | (self._counts[there] > 1)]
        return lacking

    def take(self, slot: int, places: I32) -> None:
        """Put free blocks at places that `lacking` named; there have to be as many free ones."""
        row = self.table[slot]
        shared = row[places]
        self._counts[shared[shared != NO_BLOCK]] -= 1
        left = self._left - len(places)
        taken = self._free[left : self._left][::-1]
        self._counts[taken] = 1
        row[places] = taken
        self._left = left

    def release(self, slot: int) -> None:
        """The slot refers to nothing."""
        self._drop(self.table[slot])

    def keep(self, entry: int, slot: int, blocks: int) -> None:
        """An entry without blocks refers to those that rows behind the slot's first `blocks` look back to."""
        places, count = self._places(blocks)
        found = self.table[slot, places]
        self._counts[found] += 1
        self._kept[entry, :count] = found

    def attach(self, slot: int, entry: int, blocks: int) -> None:
        """A slot that has nothing refers to the blocks of an entry, which keeps so many."""
        places, count = self._places(blocks)
        found = self._kept[entry, :count]
        self._counts[found] += 1
        self.table[slot, places] = found

    def evict(self, entry: int) -> None:
        """The entry refers to nothing."""
        self._drop(self._kept[entry])

    def _places(self, blocks: int) -> tuple[I32, int]:
        count = min(blocks, self._kept.shape[1])
        return np.arange(blocks - count, blocks, dtype=np.int32) % self.geometry.blocks, count

    def _drop(self, references: I32) -> None:
        blocks = references[references != NO_BLOCK]
        self._counts[blocks] -= 1
        gone = blocks[self._counts[blocks] == 0]
        self._free[self._left : self._left + len(gone)] = gone[::-1]
        self._left += len(gone)
        references.fill(NO_BLOCK)


class Histories:
    """The inputs that convolutions look back to, of slots and of kept prefixes.

    Args:
        kept: prefixes.
    """

    def __init__(self, kept: int) -> None:
        self._entries = kept
        self._arrays: dict[tuple[int, int], list[tuple[F32, F32]]] = {}

    def add(self, history: F32, inputs: int) -> None:
        """Keep so many inputs of this history, float32 [slots, depth, channels], with every prefix."""
        if inputs and self._entries:
            kept = np.empty((self._entries, inputs, history.shape[2]), np.float32)
            # Memory that is only promised is taken by the first write.
            kept.fill(0.0)
            self._arrays.setdefault((history.shape[1], inputs), []).append((history, kept))

    def keep(self, entry: int, slot: int, position: int) -> None:
        """Copy the last inputs before `position`, all that the slot's stream holds, into an entry."""
        for (depth, inputs), arrays in self._arrays.items():
            places = np.arange(position - inputs, position) % depth
            for history, kept in arrays:
                history[slot].take(places, axis=0, out=kept[entry], mode="clip")

    def attach(self, slot: int, entry: int, position: int) -> None:
        """Copy an entry's inputs, which are those before `position`, into a slot."""
        for (depth, inputs), arrays in self._arrays.items():
            places = np.arange(position - inputs, position) % depth
            for history, kept in arrays:
                history[slot, places] = kept[entry]


class Paging:
    """All that layers of a stage keep of streams and of kept prefixes, by slot and by entry.

    Layers get their tables and hand in their histories while the stage is made.

    Args:
        promise: what there is to be room for.
        rewind: positions by which a stream can go back.
    """

    def __init__(self, promise: Promise, rewind: int) -> None:
        self._promise, self._rewind = promise, rewind
        self._pools: dict[Geometry, BlockPool] = {}
        self._histories = Histories(promise.kept)
        self._blocks = np.zeros(promise.slots, np.int64)
        self._positions = np.zeros(promise.kept, np.int64)

    @property
    def entries(self) -> int:
        """Prefixes that can be kept."""
        return len(self._positions)

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """One for each geometry."""
        return tuple(self._pools.values())

    def pool(self, window: int | None) -> BlockPool:
        """The pool of layers whose rows see so many positions, or all; made when it is first asked for."""
        geometry = Geometry.of(self._promise, window, self._rewind)
        if geometry not in self._pools:
            self._pools[geometry] = BlockPool(geometry, self._promise)
        return self._pools[geometry]

    def add_history(self, history: F32, inputs: int) -> None:
        """Keep a history's last inputs with every prefix; see `Histories.add`."""
        self._histories.add(history, inputs)

    def reset(self) -> None:
        """Nobody has anything."""
        for pool in self._pools.values():
            pool.reset()
        self._blocks.fill(0)
        self._positions.fill(0)

    def kept(self, entry: int) -> int:
        """Positions that an entry keeps; 0 for nothing."""
        return int(self._positions[entry])

    def grow(self, slots: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], wanted: Mask) -> Mask:
        """Make sure of the blocks below position `ends` for the slots that are wanted.

        Args:
            slots: [n], each wanted one once.
            ends: [n], at most the promised context; at most the promised rows beyond what a slot holds.
            wanted: [n].

        Returns:
            True for wanted slots for which there were not enough free blocks; these are left as they were.
        """
        blocks = (ends + (BLOCK - 1)) // BLOCK
        short = wanted & (blocks > self._blocks[slots])
        if short.any():
            for index in np.flatnonzero(short).tolist():
                short[index] = not self._grow(int(slots[index]), int(blocks[index]))
        return short

    def _grow(self, slot: int, blocks: int) -> bool:
        begin = int(self._blocks[slot])
        lacking = [(pool, pool.lacking(slot, begin, blocks)) for pool in self._pools.values()]
        if any(len(places) > pool.free for pool, places in lacking):
            return False
        for pool, places in lacking:
            if len(places):
                pool.take(slot, places)
        self._blocks[slot] = blocks
        return True

    def release(self, slot: int) -> None:
        """The slot has nothing."""
        if self._blocks[slot]:
            for pool in self._pools.values():
                pool.release(slot)
            self._blocks[slot] = 0

    def keep(self, entry: int, slot: int, position: int) -> None:
        """Keep a slot's positions, all that it holds and a multiple of 64, in place of what was kept."""
        self.evict(entry)
        for pool in self._pools.values():
            pool.keep(entry, slot, position // BLOCK)
        self._histories.keep(entry, slot, position)
        self._positions[entry] = position

    def attach(self, slot: int, entry: int) -> None:
        """A slot that has nothing takes over all that an entry keeps."""
        position = self.kept(entry)
        for pool in self._pools.values():
            pool.attach(slot, entry, position // BLOCK)
        self._histories.attach(slot, entry, position)
        self._blocks[slot] = position // BLOCK

    def evict(self, entry: int) -> None:
        """The entry keeps nothing."""
        if self._positions[entry]:
            for pool in self._pools.values():
                pool.evict(entry)
            self._positions[entry] = 0
