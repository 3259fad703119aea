"""Paged blocks against a plain model: a row looks back to what its stream wrote, whoever shares that."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from engine_world import Window, operations, segments
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.paging import NO_BLOCK, BlockPool, Geometry, Paging
from cascadia_p2p.engine.slots import Slots
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

PROMISE = Promise(slots=3, context=640, rows=70, kept=3)
REWIND, INPUTS = 9, 3
WINDOWS = (None, 1, 64, 65, 66, 150, 10_000)
ROWS = st.one_of(st.sampled_from([64, 64, 70]), st.integers(1, 70))
SLOT, ENTRY = st.integers(0, PROMISE.slots - 1), st.integers(0, PROMISE.kept - 1)


def seen(window: int | None, position: int) -> range:
    """Positions that the row at `position` looks back to, its own among them."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


class Memory:
    """Blocks of one geometry, as kernels write and read them."""

    def __init__(self, pool: BlockPool, window: int | None) -> None:
        self.pool, self.window = pool, window
        self.blocks = np.zeros((pool.blocks, BLOCK), np.int64)

    def at(self, slot: int, positions: range) -> tuple[np.ndarray, np.ndarray]:
        where = np.array(positions)
        return self.pool.table[slot, where // BLOCK % self.pool.table.shape[1]], where % BLOCK


class Pages(RuleBasedStateMachine):
    """A head that counts nothing: it keeps, attaches, goes back and appends as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.paging = Paging(PROMISE, REWIND)
        self.memories = [Memory(self.paging.pool(window), window) for window in WINDOWS]
        self.history = np.zeros((PROMISE.slots, INPUTS + REWIND, 1), np.float32)
        self.paging.add_history(self.history, INPUTS)
        self.slots = Slots(PROMISE, REWIND, self.paging)
        self.numbers = count(1)
        self.streams: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self.lowest = dict.fromkeys(range(PROMISE.slots), 0)
        self.highest = dict.fromkeys(range(PROMISE.slots), 0)
        self.ended = False

    def operate(self, kind: OperationKind, slot: int, position: int = 0, entry: int = 0) -> None:
        before = self.slots.misfits
        self.slots.operate(operations((kind, 1, slot, position, entry)))
        assert self.slots.misfits == before

    @rule(slot=SLOT)
    def start(self, slot: int) -> None:
        self.operate(OperationKind.START, slot)
        self.streams[slot], self.lowest[slot], self.highest[slot] = [], 0, 0

    @rule(slot=SLOT)
    def release(self, slot: int) -> None:
        if slot in self.streams:
            self.operate(OperationKind.RELEASE, slot)
            del self.streams[slot]

    @rule(slot=SLOT, rows=ROWS)
    def append(self, slot: int, rows: int) -> None:
        self.frame({slot: rows})

    @rule(rows=st.dictionaries(SLOT, st.integers(1, 20), min_size=2))
    def append_to_several(self, rows: dict[int, int]) -> None:
        self.frame(rows)

    @rule(slot=SLOT, blocks=st.integers(1, 4), entry=ENTRY)
    def prefill_and_keep(self, slot: int, blocks: int, entry: int) -> None:
        """As a head does: windows are cut where something is kept."""
        for _ in range(blocks):
            if slot in self.streams and len(self.streams[slot]) < PROMISE.context:
                self.frame({slot: BLOCK - len(self.streams[slot]) % BLOCK})
        self.keep(slot, entry)

    @rule(slot=SLOT, entry=ENTRY)
    def keep(self, slot: int, entry: int) -> None:
        held = self.streams.get(slot, [])
        if held and len(held) % BLOCK == 0:
            self.operate(OperationKind.KEEP, slot, len(held), entry)
            self.kept[entry], self.lowest[slot] = list(held), len(held)

    @rule(entry=ENTRY)
    def evict(self, entry: int) -> None:
        self.operate(OperationKind.EVICT, 0, entry=entry)
        self.kept.pop(entry, None)

    @rule(slot=SLOT, entry=ENTRY)
    def start_and_attach(self, slot: int, entry: int) -> None:
        if entry in self.kept:
            self.start(slot)
            held = self.kept[entry]
            self.operate(OperationKind.ATTACH, slot, len(held), entry)
            self.streams[slot] = list(held)
            self.lowest[slot] = self.highest[slot] = len(held)

    @rule(slot=SLOT, back=st.one_of(st.integers(1, REWIND), st.just(PROMISE.context)))
    def go_back(self, slot: int, back: int) -> None:
        if slot not in self.streams:
            return
        lowest = max(self.highest[slot] - REWIND, self.lowest[slot])
        position = max(len(self.streams[slot]) - back, lowest) if back <= REWIND else 0
        if position <= len(self.streams[slot]):
            self.operate(OperationKind.REWIND, slot, position)
            del self.streams[slot][position:]
            if position == 0:
                self.lowest[slot] = self.highest[slot] = 0

    @rule(slot=SLOT)
    def go_back_into_what_is_shared(self, slot: int) -> None:
        if self.lowest[slot] and slot in self.streams:
            self.slots.operate(operations((OperationKind.REWIND, 1, slot, self.lowest[slot] - 1)))
            right = self.slots.admit(segments(Window(1, self.lowest[slot] - 1, [0], slot)), 0)
            assert not right.any()
            self.release(slot)

    def frame(self, rows: dict[int, int]) -> None:
        windows = [
            Window(
                1,
                len(self.streams[slot]),
                [0] * min(rows[slot], PROMISE.context - len(self.streams[slot])),
                slot,
            )
            for slot in rows
            if slot in self.streams and len(self.streams[slot]) < PROMISE.context
        ]
        table, before = segments(*windows), self.state()
        right, free = self.slots.admit(table, 0), self.paging.pool(None).free
        self.slots.begin(table[right])
        self.slots.commit(table[right])
        for window, good, error in zip(windows, right.tolist(), table["error"].tolist(), strict=True):
            if good:
                self.write(window)
            else:
                assert error == SegmentError.ROOM
                self.assert_full(window, before[window.slot], free)
                # Such a stream is over.
                self.release(window.slot)

    def state(self) -> list[list[np.ndarray]]:
        return [[memory.pool.table[slot].copy() for memory in self.memories] for slot in range(PROMISE.slots)]

    def assert_full(self, window: Window, before: list[np.ndarray], free: int) -> None:
        """It lacked blocks that no window bounds, for of the others there are enough; and nothing changed."""
        first, end = -(-window.start // BLOCK), -(-(window.start + len(window.ids)) // BLOCK)
        assert all(
            np.array_equal(memory.pool.table[window.slot], old)
            for memory, old in zip(self.memories, before, strict=True)
        )
        assert end - first > free

    def write(self, window: Window) -> None:
        """What kernels do with a frame's rows: append all of them, then look back from each."""
        numbers = [next(self.numbers) for _ in window.ids]
        stream, slot = self.streams[window.slot], window.slot
        stream += numbers
        rows = range(window.start, len(stream))
        self.highest[slot] = max(self.highest[slot], len(stream))
        for memory in self.memories:
            blocks, offsets = memory.at(slot, rows)
            assert (blocks != NO_BLOCK).all()
            assert (memory.pool.counts[blocks] == 1).all()
            memory.blocks[blocks, offsets] = numbers
            for row in (rows[0], rows[-1]):
                self.assert_seen(memory, slot, row, stream)
        before = max(window.start - INPUTS, 0)
        assert (
            self.history[slot, np.arange(before, window.start) % (INPUTS + REWIND), 0].tolist()
            == (stream[before : window.start])
        )
        for position, number in zip(rows, numbers, strict=True):
            self.history[slot, position % (INPUTS + REWIND)] = number

    @staticmethod
    def assert_seen(memory: Memory, slot: int, row: int, stream: list[int]) -> None:
        positions = seen(memory.window, row)
        blocks, offsets = memory.at(slot, positions)
        assert memory.blocks[blocks, offsets].tolist() == [stream[p] for p in positions]

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        for pool in self.paging.pools:
            held = np.concatenate([pool.table.ravel(), pool.kept.ravel()])
            counts = np.bincount(held, minlength=pool.blocks)
            counts[NO_BLOCK] = 0
            assert np.array_equal(pool.counts, counts)
            assert pool.free == (counts[1:] == 0).sum()

    def teardown(self) -> None:
        for slot in list(self.streams):
            self.release(slot)
        for entry in range(PROMISE.kept):
            self.evict(entry)
        for pool in self.paging.pools:
            assert pool.free == pool.blocks - 1
            assert sorted(pool._free) == list(range(1, pool.blocks))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("window", [1, 2, 64, 65, 66, 67, 128, 512, 513])
@pytest.mark.parametrize(("rows", "rewind"), [(1, 0), (1, 16), (64, 16), (65, 3), (7, 100)])
def test_a_ring_has_just_the_blocks_that_rows_may_touch(window: int, rows: int, rewind: int) -> None:
    geometry = Geometry.of(Promise(1, 2**20, rows), window, rewind)
    touched = 0
    for first in range(64):
        start = 4096 + first
        oldest, newest = start - window + 1, start + max(rows, rewind) - 1
        touched = max(touched, newest // BLOCK - oldest // BLOCK + 1)
    assert geometry.blocks == touched
    back = {4096 // BLOCK - 1 - p // BLOCK for p in range(4096 - window + 1, 4096)}
    assert geometry.reach == len(back)


def test_layers_whose_window_is_no_bound_share_the_blocks_of_those_without() -> None:
    promise = Promise(slots=4, context=1000, rows=64, kept=5)
    paging = Paging(promise, 16)
    whole, ring = paging.pool(None), paging.pool(512)
    assert paging.pool(900) is whole
    assert paging.pool(512) is ring
    assert (whole.table.shape, ring.table.shape) == ((4, 16), (4, 10))
    # Kept prefixes take blocks that slots leave free, but of a ring no slot leaves any.
    assert (whole.blocks, ring.blocks) == (1 + 4 * 16, 1 + 4 * 10 + 5 * 8)


def test_tables_stay_where_they_are_and_histories_too() -> None:
    """Compiled programs have their addresses."""
    paging = Paging(PROMISE, REWIND)
    pool = paging.pool(66)
    address = pool.table.ctypes.data
    slots = Slots(PROMISE, REWIND, paging)
    slots.operate(operations((OperationKind.START, 1, 0)))
    slots.admit(segments(Window(1, 0, [0] * 70)), 0)
    slots.reset()
    assert pool.table.ctypes.data == address
    assert pool.free == pool.blocks - 1
