"""What a stream gets does not depend on its company, on windows, threads or detours."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from engine_world import Promise, Ring, Window, operations
from fixtures.reference import load_case

from cascadia_p2p.compiled import compiling
from cascadia_p2p.wire.frames import OperationKind, SegmentError

# More positions than any ring holds, so that rings wrap; log scaling makes positions matter on global layers.
RECIPE = load_case("tiny12-log").recipe
RNG = np.random.default_rng(5)
LONG = tuple(RNG.integers(0, RECIPE.vocab_valid, 230).tolist())
OTHER = tuple(RNG.integers(0, RECIPE.vocab_valid, 230).tolist())


@cache
def ring() -> Ring:
    return Ring(RECIPE, (2, 10), Promise(slots=3, context=320, rows=64))


@cache
def alone() -> np.ndarray:
    """The long stream's logits in windows of 64, by itself."""
    ring().start(1, slot=0)
    return ring().prefill(1, LONG, 64)


@pytest.mark.parametrize("window", [1, 3, 8, 31])
def test_windows_change_no_bit(window: int) -> None:
    ring().start(1, slot=2)
    assert np.array_equal(ring().prefill(1, LONG, window, slot=2), alone())


def test_company_changes_no_bit() -> None:
    """Two more streams in the same frames, in windows of other sizes."""
    world = ring()
    for stream, slot in ((1, 1), (2, 0), (3, 2)):
        world.start(stream, slot)
    got: dict[int, list[np.ndarray]] = {1: [], 2: []}
    at = {1: 0, 2: 0}
    for frame in range(60):
        windows = [
            Window(stream, at[stream], ids[at[stream] : at[stream] + 1 + (frame * step) % 7], slot)
            for stream, ids, slot, step in ((2, OTHER, 0, 3), (1, LONG, 1, 5))
        ]
        windows.insert(1, Window(3, frame, [frame], 2))
        logits = world.logits(windows)
        parts = np.split(logits, np.cumsum([len(window.ids) for window in windows])[:-1])
        for window, rows in zip(windows, parts, strict=True):
            if window.stream in got:
                got[window.stream].append(rows)
                at[window.stream] += len(window.ids)
    mine = np.concatenate(got[1])
    assert len(mine) > 150
    assert np.array_equal(mine, alone()[: len(mine)])
    other = np.concatenate(got[2])
    world.start(4, slot=1)
    assert np.array_equal(other, world.prefill(4, OTHER[: len(other)], 64, slot=1))


def test_threads_change_no_bit() -> None:
    compiling.set_threads(2)
    try:
        if compiling.threads() == 1:
            pytest.skip("one core only")
        compiling.warm_up()
        threaded = Ring(RECIPE, (12,), Promise(slots=3, context=320, rows=64), threads=2)
        threaded.start(1)
        assert np.array_equal(threaded.prefill(1, LONG, 64), alone())
    finally:
        compiling.set_threads(1)


@pytest.mark.parametrize("back", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("length", [20, 63, 64, 130, 200])
def test_a_rewound_slot_goes_on_as_if_nothing_had_happened(length: int, back: int) -> None:
    """Wrong rows are appended and taken back, then the right ones follow."""
    world = ring()
    world.start(1, slot=1)
    world.prefill(1, LONG[:length], 64, slot=1)
    world.logits([Window(1, length, OTHER[:back], 1)])
    goal = operations((OperationKind.REWIND, 1, 1, length))
    logits = world.logits([Window(1, length, LONG[length : length + 9], 1)], goal)
    assert np.array_equal(logits, alone()[length : length + 9])


def test_rewinding_in_two_steps_reaches_no_further_than_in_one() -> None:
    """The limit counts from the highest position ever held: its inputs took the older ones' place."""
    world = ring()
    world.start(1, slot=0)
    world.prefill(1, LONG[:100], 64)
    twice = operations((OperationKind.REWIND, 1, 0, 90), (OperationKind.REWIND, 1, 0, 84))
    assert np.array_equal(world.logits([Window(1, 84, LONG[84:86])], twice), alone()[84:86])
    too_far = operations((OperationKind.REWIND, 1, 0, 83))
    marked, _ = world.send([Window(1, 83, LONG[83:85])], too_far)
    assert marked["error"].tolist() == [SegmentError.POSITION]


def test_a_rewind_to_nothing_always_works() -> None:
    world = ring()
    world.start(1, slot=0)
    world.prefill(1, OTHER[:150], 64)
    start_over = operations((OperationKind.REWIND, 1, 0, 0))
    assert np.array_equal(world.logits([Window(1, 0, LONG[:40])], start_over), alone()[:40])


def test_a_slot_taken_over_remembers_nothing() -> None:
    world = ring()
    world.start(7, slot=2)
    world.prefill(7, OTHER, 64, slot=2)
    swap = operations((OperationKind.RELEASE, 7, 2), (OperationKind.START, 8, 2))
    logits = world.logits([Window(8, 0, LONG[:64], 2)], swap)
    assert np.array_equal(logits, alone()[:64])


def test_pet_07_every_slot_can_be_filled_to_the_promised_context() -> None:
    """Caches are there from the start: filling all slots takes no further memory and leaves no bit astray."""
    promise = Promise(slots=2, context=150, rows=16)
    full = Ring(RECIPE, (12,), promise)
    for slot in range(promise.slots):
        full.start(slot, slot)
    for at in range(0, promise.context, 8):
        width = min(8, promise.context - at)
        logits = full.logits([Window(slot, at, LONG[at : at + width], slot) for slot in range(promise.slots)])
        expected = alone()[at : at + width]
        assert np.array_equal(logits, np.concatenate([expected] * promise.slots))
    marked, _ = full.send([Window(0, promise.context, [1], 0)])
    assert marked["error"].tolist() == [SegmentError.CONTEXT]
