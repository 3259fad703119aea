"""The book of slots against a plain model of it, and its arithmetic of rings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from engine_world import Window, operations, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.engine.slots import Slots, block_table, cached_positions
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

SLOTS, CONTEXT, REWIND = 3, 40, 5
NONE, UNKNOWN, POSITION, OVERFLOW = (
    SegmentError.NONE,
    SegmentError.UNKNOWN_STREAM,
    SegmentError.POSITION,
    SegmentError.CONTEXT,
)


@dataclass
class Slot:
    """What one slot should know; `inputs` are the positions whose inputs its histories still hold."""

    stream: int
    held: int = 0
    inputs: frozenset[int] = frozenset()
    failed: bool = False


def frames() -> st.SearchStrategy[list[tuple[list[tuple[OperationKind, int, int, int]], list[Window]]]]:
    stream, slot = st.integers(1, 3), st.integers(0, SLOTS)
    operation = st.tuples(st.sampled_from(OperationKind), stream, slot, st.integers(0, CONTEXT))
    window = st.builds(
        lambda stream, start, count, slot: Window(stream, start, [0] * count, slot),
        stream,
        st.integers(0, CONTEXT),
        st.integers(1, 12),
        slot,
    )
    return st.lists(
        st.tuples(st.lists(operation, max_size=2), st.lists(window, max_size=3)), min_size=1, max_size=12
    )


class World:
    """The slots, and beside them what they should say."""

    def __init__(self) -> None:
        self.slots = Slots(Promise(SLOTS, CONTEXT, 64), REWIND)
        self.expected: dict[int, Slot] = {}

    def operate(self, kind: OperationKind, stream: int, slot: int, position: int) -> None:
        self.slots.operate(operations((kind, stream, slot, position)))
        if slot >= SLOTS:
            return
        if kind is OperationKind.START:
            self.expected[slot] = Slot(stream)
        elif (mine := self.expected.get(slot)) is None or mine.stream != stream:
            return
        elif kind is OperationKind.RELEASE:
            del self.expected[slot]
        elif position == 0:
            mine.held, mine.inputs = 0, frozenset()
        elif position > mine.held or not set(range(position - 3, position)) <= mine.inputs | {-1, -2, -3}:
            mine.failed = True
        else:
            mine.held = position

    def judge(self, window: Window, seen: set[int]) -> SegmentError:
        mine = self.expected.get(window.slot)
        if mine is None or mine.stream != window.stream:
            return UNKNOWN
        if mine.failed:
            return POSITION
        if window.start + len(window.ids) > CONTEXT:
            return OVERFLOW
        return POSITION if window.start != mine.held or window.slot in seen else NONE

    def compute(self, windows: list[Window]) -> None:
        table = segments(*windows)
        right = self.slots.admit(table, stage=4)
        seen: set[int] = set()
        for window, error in zip(windows, table["error"].tolist(), strict=True):
            assert error == self.judge(window, seen)
            seen.add(window.slot)
        assert right.tolist() == (table["error"] == NONE).tolist()
        assert (table["stage"][~right] == 4).all()
        assert (table["stage"][right] == 0).all()
        self.slots.begin(table[right])
        self.slots.commit(table[right])
        for window, good in zip(windows, right.tolist(), strict=True):
            if good:
                mine = self.expected[window.slot]
                mine.held += len(window.ids)
                highest = max([mine.held - 1, *mine.inputs])
                written = mine.inputs | set(range(mine.held - len(window.ids), mine.held))
                mine.inputs = frozenset(p for p in written if p > highest - 3 - REWIND)


@settings(max_examples=300, deadline=None)
@given(frames())
def test_slots_say_what_a_plain_model_says(
    frames: list[tuple[list[tuple[OperationKind, int, int, int]], list[Window]]],
) -> None:
    world = World()
    for steps, windows in frames:
        for step in steps:
            world.operate(*step)
        world.compute(windows)
        for slot in range(SLOTS):
            mine = world.expected.get(slot)
            assert world.slots.held(slot) == (mine.held if mine else 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(1, 30),
)
def test_a_plain_walk_is_always_admitted(walk: list[tuple[int, int]], window: int) -> None:
    """Append some rows, go back by at most R, append again: whatever a row sees is still in its ring."""
    promise = Promise(1, 10_000, 12)
    ring = cached_positions(promise, window, 5)
    slots = Slots(promise, 5)
    slots.operate(operations((OperationKind.START, 1, 0)))
    held, highest, owner = 0, 0, {}
    for count, back in walk:
        table = segments(Window(1, held, [0] * count))
        assert slots.admit(table, 0).all()
        slots.begin(table)
        slots.commit(table)
        owner |= {p % ring: p for p in range(held, held + count)}
        for row in range(held, held + count):
            assert all(owner[p % ring] == p for p in range(max(0, row - window + 1), row + 1))
        held += count
        highest = max(highest, held)
        held = max(held - back, highest - 5, 0)
        slots.operate(operations((OperationKind.REWIND, 1, 0, held)))
        assert slots.held(0) == held


def test_a_failed_slot_stays_failed_until_it_is_started_anew() -> None:
    slots = Slots(Promise(2, 100, 8), 4)
    slots.operate(operations((OperationKind.START, 5, 1)))
    first = segments(Window(5, 0, [1, 2], 1))
    slots.begin(first)
    slots.fail(1, SegmentError.NON_FINITE)
    again = segments(Window(5, 0, [1, 2], 1))
    assert not slots.admit(again, 7).any()
    assert (again["error"][0], again["stage"][0]) == (SegmentError.NON_FINITE, 7)
    slots.operate(operations((OperationKind.START, 6, 1)))
    assert slots.admit(segments(Window(6, 0, [1], 1)), 7).all()


def test_what_came_marked_stays_marked_as_it_came() -> None:
    slots = Slots(Promise(2, 100, 8), 4)
    table = segments(Window(5, 3, [1]), Window(6, 3, [1], 1))
    table["error"][0], table["stage"][0] = SegmentError.NON_FINITE, 2
    assert not slots.admit(table, 9).any()
    assert table["error"].tolist() == [SegmentError.NON_FINITE, UNKNOWN]
    assert table["stage"].tolist() == [2, 9]


def test_block_tables_give_every_slot_its_own_blocks() -> None:
    promise = Promise(slots=4, context=1000, rows=64)
    everything = cached_positions(promise, None, 16)
    ring = cached_positions(promise, 512, 16)
    assert (everything, ring) == (1024, 640)
    table = block_table(promise.slots, ring)
    assert table.shape == (4, 10)
    assert np.array_equal(np.sort(table.ravel()), np.arange(40))
