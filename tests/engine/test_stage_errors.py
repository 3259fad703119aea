"""A segment that fails takes nobody with it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from engine_world import NO_OPERATIONS, Promise, Ring, SampleWeights, Window, operations, segments
from fixtures.reference import load_case
from structlog.testing import capture_logs

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.wire.frames import OperationKind, SegmentError

RECIPE = load_case("tiny12").recipe
IDS = tuple(np.random.default_rng(2).integers(0, RECIPE.vocab_valid, 60).tolist())
PROMISE = Promise(slots=4, context=60, rows=100)


@cache
def ring() -> Ring:
    return Ring(RECIPE, (4, 4, 4), PROMISE)


@cache
def expected() -> np.ndarray:
    ring().start(1)
    return ring().prefill(1, IDS, 64)


def fresh(*streams: int) -> Ring:
    """The ring with streams 1, 2, ... in slots 0, 1, ..."""
    for stage in ring().stages:
        stage.reset()
    for slot, stream in enumerate(streams):
        ring().start(stream, slot)
    return ring()


WRONG = {
    "unknown stream": (Window(99, 0, [1, 2, 3], 1), SegmentError.UNKNOWN_STREAM),
    "free slot": (Window(2, 0, [1, 2, 3], 3), SegmentError.UNKNOWN_STREAM),
    "no such slot": (Window(2, 0, [1, 2, 3], 4000), SegmentError.UNKNOWN_STREAM),
    "start too high": (Window(2, 1, [1, 2, 3], 1), SegmentError.POSITION),
    "beyond the context": (Window(2, 0, [1] * 61, 1), SegmentError.CONTEXT),
    "token id out of range": (Window(2, 0, [1, RECIPE.vocab_valid, 3], 1), SegmentError.INTERNAL),
    "negative token id": (Window(2, 0, [-1], 1), SegmentError.INTERNAL),
}


@pytest.mark.parametrize("behind", [True, False], ids=["behind", "in front"])
@pytest.mark.parametrize(("window", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_segment_is_marked_and_others_are_as_without_it(
    window: Window, error: SegmentError, behind: bool
) -> None:
    logits = expected()[:30]
    world = fresh(1, 2)
    right = Window(1, 0, IDS[:30], 0)
    order = [right, window] if behind else [window, right]
    place = order.index(right)
    marked, rows = world.send(order)
    assert marked["error"].tolist()[place] == SegmentError.NONE
    assert marked["error"].tolist()[1 - place] == error
    assert marked["stage"].tolist() == [0, 0]
    parts = np.split(rows, [len(order[0].ids)])
    assert np.array_equal(world.stages[-1].logits(parts[place]), logits)
    assert not parts[1 - place].any()
    assert [stage.held(0) for stage in world.stages] == [30, 30, 30]


def test_a_second_window_of_a_slot_in_one_frame_is_refused() -> None:
    """Its first rows would not know the rows in front of them."""
    logits = expected()[:30]
    world = fresh(1)
    marked, rows = world.send([Window(1, 0, IDS[:30]), Window(1, 30, IDS[30:32])])
    assert marked["error"].tolist() == [SegmentError.NONE, SegmentError.POSITION]
    assert np.array_equal(world.stages[-1].logits(rows[:30]), logits)


def test_an_error_from_an_earlier_stage_travels_on_untouched() -> None:
    world = fresh(1, 2)
    last = world.stages[-1]
    hidden = np.zeros((5, RECIPE.hidden), np.float32)
    table = segments(Window(1, 0, [0, 0], 0, want=True), Window(2, 0, [0, 0, 0], 1))
    table["error"][0], table["stage"][0] = SegmentError.NON_FINITE, 1
    rows = last.apply(table, NO_OPERATIONS, hidden, lambda: None)
    assert (last.held(0), last.held(1)) == (0, 3)
    records, _ = last.tokens(table, rows)
    assert records["stream"].tolist() == [1]
    assert (records["status"][0], records["stage"][0], records["token"][0]) == (
        SegmentError.NON_FINITE,
        1,
        -1,
    )


def test_records_come_for_wanted_tokens_and_for_errors_only() -> None:
    world = fresh(1, 2, 3)
    marked, rows = world.send(
        [Window(1, 0, IDS[:4], 0), Window(2, 5, IDS[:2], 1), Window(3, 0, IDS[:8], 2, want=True)]
    )
    records, _ = world.stages[-1].tokens(marked, rows)
    assert records["stream"].tolist() == [2, 3]
    assert records["status"].tolist() == [SegmentError.POSITION, SegmentError.NONE]
    assert records["position"].tolist() == [7, 8]
    assert records["slot"].tolist() == [1, 2]
    assert records["token"].tolist() == [-1, int(expected()[7].argmax())]


def poisoned(layer: int, token: int) -> Ring:
    """A model in which one token, and no other, overflows float32 at one layer."""
    weights = SampleWeights(RECIPE)
    # Only this token's embedding reaches the last column, which one layer's MLP then blows up.
    embedding = weights.tensors["embed.weight"]
    embedding[:, -1] = 0.0
    embedding[token, -1] = 1.0
    for number in range(RECIPE.layers):
        for name in ("o", "down", "experts.down", "shared.down"):
            if (matrix := weights.tensors.get(f"layers.{number}.{name}")) is not None:
                matrix[..., -1, :] = 0.0
    norm = weights.tensors[f"layers.{layer}.mlp_norm"]
    norm[-1] = 3e38
    return Ring(RECIPE, (4, 4, 4), PROMISE, weights)


def test_cas_13_a_layer_that_overflows_gives_an_error_with_its_number_and_never_a_token() -> None:
    world = poisoned(layer=6, token=200)
    clean = [token if token != 200 else 201 for token in IDS[:20]]
    for stream, slot in ((1, 0), (2, 1)):
        world.start(stream, slot)
    alone = world.logits([Window(1, 0, clean, 0)])
    world.start(1, 0)
    bad = [*clean[:5], 200, *clean[5:9]]
    with capture_logs() as logs:
        marked, rows = world.send([Window(2, 0, bad, 1, want=True), Window(1, 0, clean, 0, want=True)])
    assert marked["error"].tolist() == [SegmentError.NON_FINITE, SegmentError.NONE]
    assert marked["stage"][0] == 1
    found = [entry for entry in logs if entry["event"] == "layer_not_finite"]
    assert [(entry["layer"], entry["stream"], entry["position"]) for entry in found] == [(6, 2, 5)]
    records, _ = world.stages[-1].tokens(marked, rows)
    assert records["status"].tolist() == [SegmentError.NON_FINITE, SegmentError.NONE]
    assert records["token"].tolist() == [-1, int(alone[-1].argmax())]
    assert np.array_equal(world.stages[-1].logits(rows[len(bad) :]), alone)
    assert not rows[: len(bad)].any()
    # What follows in the same stream fails in the same way, until the slot is started anew.
    marked, _ = world.send([Window(2, len(bad), clean[:2], 1)])
    assert marked["error"].tolist() == [SegmentError.NON_FINITE]
    world.start(2, 1)
    assert np.array_equal(world.logits([Window(2, 0, clean, 1)]), alone)


def test_logits_that_are_not_finite_give_no_token() -> None:
    weights = SampleWeights(RECIPE)
    weights.tensors["final_norm"][:] = 3e38
    weights.tensors["head.weight"][:] *= 1e4
    world = Ring(RECIPE, (12,), PROMISE, weights)
    world.start(1)
    marked, rows = world.send([Window(1, 0, IDS[:3], want=True)])
    assert marked["error"].tolist() == [SegmentError.NONE]
    record = world.stages[-1].tokens(marked, rows)[0][0]
    assert (record["status"], record["token"], record["logprob"]) == (SegmentError.NON_FINITE, -1, 0.0)


class AbandonedError(Exception):
    pass


def test_a_frame_that_is_abandoned_between_layers_leaves_no_half_done_stream() -> None:
    world = fresh(1, 2)
    stage = world.stages[0]
    calls = 0

    def on_layer() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise AbandonedError

    with pytest.raises(AbandonedError):
        stage.apply(segments(Window(1, 0, IDS[:9])), NO_OPERATIONS, np.array(IDS[:9], np.int32), on_layer)
    assert stage.held(0) == 0
    marked, _ = world.send([Window(1, 0, IDS[:9], 0), Window(2, 0, IDS[:30], 1)])
    assert marked["error"].tolist() == [SegmentError.INTERNAL, SegmentError.NONE]
    for each in world.stages:
        each.reset()
    world.start(1)
    assert np.array_equal(world.logits([Window(1, 0, IDS[:30])]), expected()[:30])


def test_on_layer_is_called_once_a_layer_and_not_for_frames_without_rows() -> None:
    world = fresh(1)
    calls: list[int] = []
    ids = np.array(IDS[:3], np.int32)
    world.stages[0].apply(segments(Window(1, 0, IDS[:3])), NO_OPERATIONS, ids, lambda: calls.append(1))
    assert len(calls) == 4
    nothing = world.stages[0].apply(
        segments(), operations((OperationKind.RELEASE, 1, 0)), ids[:0], lambda: calls.append(1)
    )
    assert (nothing.shape, len(calls)) == ((0, RECIPE.hidden), 4)


def test_a_layer_that_raises_fails_its_streams_and_the_ring_goes_on() -> None:
    world = Ring(RECIPE, (12,), PROMISE)
    world.start(1)

    class Broken:
        number = 3

        def __call__(self, *arguments: object) -> None:
            raise RuntimeError("out of something")

    layers = list(world.stages[0].model.layers)
    broken = [*layers[:3], Broken(), *layers[4:]]
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(world.stages[0].model, "_layers", broken)
        marked, rows = world.send([Window(1, 0, IDS[:30])])
    assert marked["error"].tolist() == [SegmentError.INTERNAL]
    assert [entry["event"] for entry in logs] == ["stage_failed"]
    assert not rows.any()
    world.start(1)
    assert np.array_equal(world.logits([Window(1, 0, IDS[:30])]), expected()[:30])


def test_frames_that_do_not_fit_the_stage_are_refused_in_words() -> None:
    first, *_, last = fresh(1).stages
    table = segments(Window(1, 0, [1] * 101))
    with pytest.raises(CascadiaError, match="101 rows: this stage promised 100"):
        first.apply(table, NO_OPERATIONS, np.ones(101, np.int32), lambda: None)
    table = segments(Window(1, 0, [1, 2]))
    with pytest.raises(CascadiaError, match=r"float32 \[2, 63\]: expected float32 \[2, 64\]"):
        last.apply(table, NO_OPERATIONS, np.zeros((2, 63), np.float32), lambda: None)
    with pytest.raises(CascadiaError, match=r"expected int32 \[2\]"):
        first.apply(table, NO_OPERATIONS, np.zeros(3, np.int32), lambda: None)


def test_inputs_may_be_read_only_and_unaligned_and_are_not_kept() -> None:
    """As they come out of a receive buffer."""
    world = fresh(1, 1)
    raw = bytearray(4 + 4 * 8 * RECIPE.hidden)
    rows = np.frombuffer(raw, np.uint8)[3 : 3 + 4 * 8 * RECIPE.hidden].view(np.float32).reshape(8, -1)
    rows[:] = np.random.default_rng(0).standard_normal(rows.shape)
    aligned = rows.copy()
    rows.flags.writeable = False
    stage = world.stages[1]
    table = segments(Window(1, 0, [0] * 8))
    out = stage.apply(table, operations((OperationKind.START, 1, 0)), rows, lambda: None)
    raw[:] = bytes(len(raw))
    again = stage.apply(table, operations((OperationKind.START, 1, 0)), aligned, lambda: None)
    assert np.array_equal(out, again)
    assert out.flags.c_contiguous
    assert not np.shares_memory(out, again)
