"""The book of slots against a plain model of it, and its arithmetic of rings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_world import Window, operations, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from cascadia_p2p.engine.paging import Geometry, Paging
from cascadia_p2p.engine.slots import Slots
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

SLOTS, CONTEXT, REWIND, ENTRIES = 3, 200, 5, 2
NONE, UNKNOWN, POSITION, OVERFLOW, PREFIX = (
    SegmentError.NONE,
    SegmentError.UNKNOWN_STREAM,
    SegmentError.POSITION,
    SegmentError.CONTEXT,
    SegmentError.PREFIX,
)
HERE = -1
"""In place of a window's start: where its slot is."""

Frame = tuple[list[tuple[OperationKind, int, int, int, int]], list[Window]]


@dataclass
class Slot:
    """What one slot should know; `inputs` are the positions whose inputs its histories still hold."""

    stream: int
    held: int = 0
    inputs: frozenset[int] = frozenset()
    shared: int = 0
    failed: SegmentError = NONE


def frames() -> st.SearchStrategy[list[Frame]]:
    # Few streams, that mostly stay where they are, so that much fits.
    stream, slot = st.sampled_from([1, 1, 1, 2]), st.sampled_from([0, 0, 0, 1, SLOTS])
    position = st.one_of(st.sampled_from([64, 64, 128]), st.integers(0, CONTEXT))
    entry = st.sampled_from([0, 0, 1, ENTRIES])
    kind = st.sampled_from([*OperationKind, OperationKind.START, OperationKind.KEEP, OperationKind.ATTACH])
    window = st.builds(
        lambda stream, start, count, slot: Window(stream, start, [0] * count, slot),
        stream,
        st.one_of(st.just(HERE), st.just(HERE), st.integers(0, CONTEXT)),
        st.one_of(st.just(64), st.integers(1, 12)),
        slot,
    )
    operation = st.tuples(kind, stream, slot, position, entry)
    return st.lists(
        st.tuples(st.lists(operation, max_size=3), st.lists(window, max_size=3)), min_size=1, max_size=12
    )


class World:
    """The slots, and beside them what they should say."""

    def __init__(self) -> None:
        self.slots = Slots(Promise(SLOTS, CONTEXT, 64, ENTRIES), REWIND)
        self.expected: dict[int, Slot] = {}
        self.kept = dict.fromkeys(range(ENTRIES), 0)

    def operate(self, kind: OperationKind, stream: int, slot: int, position: int, entry: int) -> None:
        self.slots.operate(operations((kind, stream, slot, position, entry)))
        mine = self.expected.get(slot)
        mine = None if mine is None or mine.stream != stream else mine
        if kind is OperationKind.EVICT:
            self.kept |= {entry: 0} if entry in self.kept else {}
        elif kind is OperationKind.KEEP:
            if entry in self.kept:
                fits = (
                    mine is not None
                    and not mine.failed
                    and position == mine.held
                    and position in (64, 128, 192)
                )
                self.kept[entry] = position if fits else 0
                if mine is not None and fits:
                    mine.shared = position
        elif slot >= SLOTS:
            return
        elif kind is OperationKind.START:
            self.expected[slot] = Slot(stream)
        elif mine is None:
            return
        elif kind is OperationKind.RELEASE:
            del self.expected[slot]
        elif kind is OperationKind.ATTACH:
            if mine.held or mine.failed or not position or self.kept.get(entry) != position:
                mine.failed = PREFIX
            else:
                mine.held = mine.shared = position
                mine.inputs = frozenset(range(position - 3, position))
        else:
            self.go_back(mine, position)

    def go_back(self, mine: Slot, position: int) -> None:
        if position == 0:
            mine.held, mine.inputs, mine.shared = 0, frozenset(), 0
        elif (
            position > mine.held
            or not set(range(position - 3, position)) <= mine.inputs | {-1, -2, -3}
            or position < mine.shared
        ):
            mine.failed = POSITION
        else:
            mine.held = position

    def judge(self, window: Window, seen: set[int]) -> SegmentError:
        mine = self.expected.get(window.slot)
        if mine is None or mine.stream != window.stream:
            return UNKNOWN
        if mine.failed:
            return mine.failed
        if window.start + len(window.ids) > CONTEXT:
            return OVERFLOW
        return POSITION if window.start != mine.held or window.slot in seen else NONE

    def compute(self, windows: list[Window]) -> None:
        held = {slot: mine.held for slot, mine in self.expected.items()}
        windows = [
            replace(window, start=held.get(window.slot, 0) if window.start == HERE else window.start)
            for window in windows
        ]
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


@settings(max_examples=150, deadline=None)
@given(frames())
def test_slots_say_what_a_plain_model_says(frames: list[Frame]) -> None:
    world = World()
    for steps, windows in frames:
        for step in steps:
            world.operate(*step)
        world.compute(windows)
        for slot in range(SLOTS):
            mine = world.expected.get(slot)
            assert world.slots.held(slot) == (mine.held if mine else 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(1, 30),
)
def test_a_plain_walk_is_always_admitted(walk: list[tuple[int, int]], window: int) -> None:
    """Append some rows, go back by at most R, append again: whatever a row sees is still in its ring."""
    promise = Promise(1, 10_000, 12)
    ring = Geometry.of(promise, window, 5).positions
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


def test_operations_that_do_not_fit_are_counted_and_logged_ever_more_rarely() -> None:
    slots = Slots(Promise(2, 200, 64, 1), 4)
    slots.operate(operations((OperationKind.START, 1, 0)))
    wrong = (
        (OperationKind.RELEASE, 2, 0),
        (OperationKind.START, 1, 2),
        (OperationKind.KEEP, 1, 0, 64, 0),
        (OperationKind.KEEP, 1, 7, 64, 0),
        (OperationKind.KEEP, 1, 0, 64, 1),
        (OperationKind.EVICT, 0, 0, 0, 9),
        (OperationKind.ATTACH, 2, 0, 64, 0),
    )
    with capture_logs() as logs:
        for _ in range(100):
            slots.operate(operations(*wrong))
    assert slots.misfits == 700
    assert [entry["misfits"] for entry in logs] == [2**n for n in range(10)]
    # None of them concerned the stream in a way that it could not go on.
    assert slots.admit(segments(Window(1, 0, [0] * 64)), 0).all()


def test_a_frame_that_has_no_block_left_marks_its_segment_and_leaves_the_others() -> None:
    """An entry holds what a miscounting head gives to streams as well."""
    promise = Promise(slots=2, context=128, rows=128, kept=2)
    paging = Paging(promise, 0)
    pool = paging.pool(None)
    slots = Slots(promise, 0, paging)

    def compute(*windows: Window) -> list[int]:
        table = segments(*windows)
        right = slots.admit(table, 3)
        slots.begin(table[right])
        slots.commit(table[right])
        assert (table["stage"][~right] == 3).all()
        errors: list[int] = table["error"].tolist()
        return errors

    start = ((OperationKind.START, 1, 0), (OperationKind.START, 2, 1))
    slots.operate(operations(*start))
    assert compute(Window(1, 0, [0] * 64), Window(2, 0, [0] * 64, 1)) == [NONE, NONE]
    keep = ((OperationKind.KEEP, 1, 0, 64, 0), (OperationKind.KEEP, 2, 1, 64, 1))
    slots.operate(operations(*keep, (OperationKind.RELEASE, 1, 0), (OperationKind.START, 3, 0)))
    assert pool.free == 2
    assert compute(Window(3, 0, [0] * 128)) == [NONE]
    assert pool.free == 0
    assert compute(Window(2, 64, [0], 1), Window(3, 128, [0])) == [SegmentError.ROOM, OVERFLOW]
    assert compute(Window(2, 64, [0], 1)) == [SegmentError.ROOM]
    # It is over with the slot, and with what was kept too much.
    slots.operate(operations((OperationKind.EVICT, 0, 0, 0, 0), (OperationKind.START, 4, 1)))
    assert compute(Window(4, 0, [0] * 64, 1)) == [NONE]
    slots.reset()
    assert pool.free == 4
