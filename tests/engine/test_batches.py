"""Layers of a stage in one call or in several: the same bits, the same times, and nothing of a wrong size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from engine_world import Window, operations, sample_weights, segments
from fixtures.dense import MODELS, dense_tensors
from stored_world import Coded, gated, stored

from cascadia_p2p.engine.compiled_layers import Batch, CompiledLayers, LayerParts, Steps
from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.inkling_steps import add_row, append_step, attend_step
from cascadia_p2p.engine.kernels.router import Router
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32
from cascadia_p2p.engine.model import StagePlan
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.engine.timing import WorkClock, WorkPart
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.models.stages import stage_builder
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind

RECIPE = Recipe("batches", layers=7, dense_layers=2)
PROMISE = Promise(1, 128, 50)
PROMPT = np.random.default_rng(4).integers(0, 200, 50).tolist()


def inkling() -> tuple[ModelConfig, Coded]:
    return RECIPE.config(), Coded(sample_weights(RECIPE).tensors)


def llama() -> tuple[ModelConfig, Coded]:
    return MODELS["mistral-window"].read(), Coded(dense_tensors(MODELS["mistral-window"]))


def stage(family: Callable[[], tuple[ModelConfig, Coded]], call_bytes: int) -> Stage:
    config, source = family()
    plan = StagePlan(range(config.layers), PROMISE, 0, call_bytes=call_bytes)
    model = stage_builder(config)(plan, source, KernelBackend("fine", PROMISE.rows, 1), None)
    return Stage(model, PROMISE, 0)


def batches(of: Stage) -> list[Batch]:
    found = [layer for layer in of.model.layers if isinstance(layer, Batch)]
    assert len(found) == len(of.model.layers)
    return found


def hidden(of: Stage) -> F32:
    """Two windows of a stream, then a row; behind the last layer."""
    table = operations((OperationKind.START, 1, 0))
    done: list[F32] = []
    for start, ids in ((0, PROMPT), (50, PROMPT[:7]), (57, PROMPT[:1])):
        told: list[None] = []
        marked = segments(Window(1, start, ids))
        done.append(of.apply(marked, table, np.array(ids, np.int32), lambda told=told: told.append(None)))
        assert not marked["error"].any()
        assert len(told) == len(of.model.layers)
        table = operations()
    return np.concatenate(done)


@pytest.mark.parametrize("family", [inkling, llama])
def test_layers_in_one_call_or_in_several_give_the_same_bits(
    family: Callable[[], tuple[ModelConfig, Coded]],
) -> None:
    apart = stage(family, 1)
    parts = batches(apart)[0].layers._parts
    assert [batch.number for batch in batches(apart)] == list(range(len(parts)))
    expected = hidden(apart)
    for call_bytes in (parts[0].weight_bytes + 1, 3 * parts[-1].weight_bytes, 2**40):
        some = stage(family, call_bytes)
        found = batches(some)
        # Each takes as many layers as make up the bytes, and the last one what is left.
        assert [place for batch in found for place in batch.places] == list(range(len(parts)))
        assert [batch.number for batch in found] == [batch.places.start for batch in found]
        for batch in found:
            sizes = [parts[place].weight_bytes for place in batch.places]
            assert sum(sizes[:-1]) < call_bytes
            assert sum(sizes) >= call_bytes or batch is found[-1]
        assert len(found) < len(parts)
        assert np.array_equal(hidden(some), expected)


def test_times_of_parts_add_up_to_the_frames() -> None:
    whole = stage(inkling, 2**40)
    hidden(whole)
    shares = []
    for _ in range(5):
        before, begin = whole.times(), time.perf_counter()
        hidden(whole)
        spent, passed = whole.times().since(before), time.perf_counter() - begin
        assert 0 < spent.total <= passed
        assert (spent.frames, spent.rows) == (3, 58)
        for part in (WorkPart.PROJECTIONS, WorkPart.ATTENTION, WorkPart.EXPERTS, WorkPart.ROUTER):
            assert spent.seconds[part] > 0
        assert spent.seconds[WorkPart.HEAD] == 0
        shares.append(spent.total / passed)
    assert max(shares) > 0.4


def test_a_shared_time_is_divided_in_proportion() -> None:
    clock = WorkClock()
    parts = (WorkPart.ATTENTION, WorkPart.EXPERTS, WorkPart.GLUE)
    clock.share(1_000_000, parts, np.array([1, 3, 0], np.int64))
    seconds = clock.times().seconds
    assert [seconds[part] for part in parts] == [0.00025, 0.00075, 0.0]
    clock.share(5, parts, np.zeros(3, np.int64))
    assert clock.times().total == pytest.approx(1e-3, rel=1e-5)


@pytest.fixture(scope="module")
def layers() -> CompiledLayers:
    return batches(stage(inkling, 2**40))[0].layers


def table(rows: int) -> RowTable:
    return RowTable.from_windows(*(np.array([n], np.int32) for n in (0, 0, rows)))


def test_rows_that_would_leave_their_memory_are_refused(layers: CompiledLayers) -> None:
    width, marks = RECIPE.hidden, np.zeros(4, np.int32)
    right = np.zeros((4, width), np.float32)
    everything = range(RECIPE.layers)
    layers(everything, table(4), right, marks)
    wrong = [
        (table(51), np.zeros((51, width), np.float32), np.zeros(51, np.int32)),
        (table(3), right, marks),
        (table(4), right, marks[:3]),
        (table(4), right, marks.astype(np.int64)),
        (table(4), right[:, :-1], marks),
        (table(4), right.astype(np.float64), marks),
        (table(4), np.asfortranarray(right), marks),
    ]
    for rows, x, failed in wrong:
        with pytest.raises(CascadiaError):
            layers(everything, rows, x, failed)
    for places in (range(0), range(8), range(-1, 2), range(0, 4, 2)):
        with pytest.raises(CascadiaError):
            layers(places, table(4), right, marks)


def matrix(*shape: int) -> StoredMatrix:
    return stored(Encoding.INT4, 1, *shape)


def changed(part: LayerParts) -> dict[str, LayerParts]:
    """A sparse layer, each time with one part of a size that does not fit."""
    q, *others = part.inward
    narrow = gated(Encoding.INT4, 1, 48, 32, 2)
    assert part.router is not None
    assert part.routed is not None
    weight, bias, scale = part.router.parts
    return {
        "queries of a head too few": replace(part, inward=[matrix(q.outputs - 16, q.inputs), *others]),
        "queries of another width": replace(part, inward=[matrix(q.outputs, q.inputs + 64), *others]),
        "output of another width": replace(part, output=matrix(48, part.output.inputs)),
        "output of more heads": replace(part, output=matrix(64, 128)),
        "shared experts of another width": replace(part, always=narrow),
        "all experts of another width": replace(part, always=narrow, routed=narrow),
        "more than there are": replace(part, chosen=13),
        "none chosen": replace(part, chosen=0),
        "no router": replace(part, router=None),
        "a router for another width": replace(part, router=Router(weight[:, :-1].copy(), bias, scale, 50)),
        "a router for fewer experts": replace(part, router=Router(weight, bias[:-1].copy(), scale, 50)),
        "a router without shared experts": replace(part, router=Router(weight[:12].copy(), bias, scale, 50)),
        "a router with gaps": replace(part, router=Router(np.repeat(weight, 2, 1)[:, ::2], bias, scale, 50)),
        "no routed experts": replace(part, routed=None, chosen=0),
    }


def refused(part: LayerParts) -> bool:
    steps = Steps(append_step("f32"), attend_step("f32"), add_row)
    normed = np.zeros((50, RECIPE.hidden), np.float32)
    try:
        CompiledLayers([part], steps, 2, normed, None, WorkClock(), 1)
    except CascadiaError:
        return True
    return False


def test_parts_that_do_not_fit_together_are_refused(layers: CompiledLayers) -> None:
    part = layers._parts[-1]
    # Addresses go into the records of what is made.
    records = [record.copy() for record in (part.attention, part.after_attention, part.after_mlp)]
    own = replace(part, attention=records[0], after_attention=records[1], after_mlp=records[2])
    assert not refused(own)
    assert [name for name, wrong in changed(own).items() if not refused(wrong)] == []
