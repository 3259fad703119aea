"""The layers of a stage as one compiled program, which a team of threads goes through together.

A layer is: projections, append keys and values, attend, output projection, sum; then the mixture, sum. Each
step is one or a few phases of the team. What differs between model families are the steps that a layer's
record names by their addresses (`frame`), and whether it has a router.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.addresses import (
    I64,
    call,
    cycles,
    floats,
    integers,
    longs,
    pointer,
    rows_of,
    table_of,
)
from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import F32
from cascadia_p2p.engine.kernels.attention_items import ITEM, merge_item, plan_items
from cascadia_p2p.engine.kernels.frame import FRAME, attention_at, record_of
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.kernels.mixture import MIXTURE, PHASES, PICKS, mix
from cascadia_p2p.engine.kernels.products import (
    ACTIVATIONS,
    MATRIX,
    SCRATCH,
    fill_panels,
    fill_row,
    project,
)
from cascadia_p2p.engine.kernels.router import TILE, choose, logits_of_tile, weigh
from cascadia_p2p.engine.kernels.team import announce, announced, claim, done, wait

LAYER: Final = record_of(
    "first_matrix matrices in_floats output out_floats attention append attend remember_attention "
    "after_attention after_mlp add remember_sum router mixture picks"
)
"""A layer: index and number of its inward projections, index of the output projection, and whether either
takes float32 activations; addresses of its `ATTENTION` record and of the steps on it, of its two `SUM`
records and of the steps on them (0 for one that the family does not have), of its `ROUTER` record or 0;
indexes of mixture and picks."""

ROUTER: Final = record_of("weight bias logits scores ids weights shared chosen routed always", "scale")
"""A router: addresses of its weight float32 [routed + always][hidden] and bias float32 [routed], of float32
logits [rows][routed + always] and scores [rows][routed], and of what comes out, see `Router`."""

RUN: Final = record_of(
    "counters frame layers mixtures matrices matrix_count picks panels first last planes threads "
    "scratch work work_numbers ticks"
)
"""One call of the program: addresses of the team's counters, `LAYER_PHASES` phases a layer and one more, at
zero; of `FRAME` [1], `LAYER` [n], `MIXTURE` [n], `MATRIX` [matrix_count], `PICKS` [n] and `ACTIVATIONS`
[4]; the layer to start with and the one to stop in front of; planes of codes of activations; threads; and
addresses of float32 scratch [threads][SCRATCH] for products, work [threads][work_numbers] for attention,
and int64 ticks [len(PARTS)], to which processor cycles are added."""

HIDDEN, ATTENDED, OUTER, INNER = 0, 1, 2, 3
"""The sets of panels: of normed rows, of attention's results, and of what goes into gate and up, and into
down."""

PARTS: Final = ("projections", "attention", "router", "experts", "dense", "glue")
"""What the program counts time for, in the order of its ticks."""

_PROJECTIONS, _ATTENTION, _ROUTER, _EXPERTS, _DENSE, _GLUE = range(6)

_HALF: Final = 9
"""Phases of a layer up to its router."""

LAYER_PHASES: Final = _HALF + 4 + PHASES
"""Phases of a layer; in front of the first one there is one more."""

_APPENDED: Final = 4
"""Heads that one chunk appends."""

Table: TypeAlias = npt.NDArray[np.void]


@part
def _router_at(address: int) -> Any:
    return numba.carray(pointer(address), (1,), ROUTER)[0]


@part
def _tick(ticks: I64, thread: int, what: int, since: int) -> int:
    """Count the time since then, on the first thread; the time now."""
    now = cycles()
    if thread == 0:
        ticks[what] += now - since
    return now


@part
def _append(counters: int, phase: int, layer: Any, frame: Any, now: int) -> None:
    """Put new keys and values into their blocks."""
    items = frame.rows * attention_at(layer.attention).kv_heads
    chunks = (items + _APPENDED - 1) // _APPENDED
    while True:
        chunk = claim(counters, phase, chunks)
        if chunk < 0:
            break
        for i in range(chunk * _APPENDED, min((chunk + 1) * _APPENDED, items)):
            call(layer.append, (layer.attention, now, i))
        done(counters, phase)
    wait(counters, phase, chunks)


@part
def _plan(counters: int, phase: int, layer: Any, frame: Any, now: int) -> None:
    """Cut attention into items, and meanwhile keep what went into convolutions."""
    chunks = 3 if layer.remember_attention != 0 else 1
    while True:
        chunk = claim(counters, phase, chunks)
        if chunk < 0:
            break
        if chunk == 0:
            a = attention_at(layer.attention)
            count, merging = plan_items(
                integers(frame.positions, frame.rows),
                integers(frame.after, frame.rows),
                a.kv_heads,
                a.heads // a.kv_heads,
                a.window,
                frame.workers,
                frame.partial_numbers,
                a.stored,
                table_of(frame.items, frame.places, ITEM),
                table_of(frame.merges, frame.places, ITEM),
            )
            announce(counters, phase + 1, count)
            announce(counters, phase + 2, merging)
        else:
            call(layer.remember_attention, (layer.attention, now, chunk - 1))
        done(counters, phase)
    wait(counters, phase, chunks)


@part
def _attend(counters: int, phase: int, layer: Any, frame: Any, now: int, work: F32) -> None:
    """Take the items, then merge what was apart: two phases."""
    a = attention_at(layer.attention)
    count, merging = announced(counters, phase), announced(counters, phase + 1)
    while True:
        item = claim(counters, phase, count)
        if item < 0:
            break
        call(layer.attend, (layer.attention, now, item, work.ctypes.data, work.shape[0]))
        done(counters, phase)
    wait(counters, phase, count)
    if merging == 0:
        return
    while True:
        item = claim(counters, phase + 1, merging)
        if item < 0:
            break
        merge_item(
            table_of(frame.merges, frame.places, ITEM),
            item,
            a.heads // a.kv_heads,
            a.kv_heads,
            a.dim,
            a.stored,
            integers(frame.positions, frame.rows),
            a.window,
            floats(frame.partials, frame.partial_numbers),
            work,
            rows_of(a.out, frame.rows, a.heads * a.dim),
        )
        done(counters, phase + 1)
    wait(counters, phase + 1, merging)


@part
def _sum(
    counters: int,
    phase: int,
    layer: Any,
    own: int,
    frame: Any,
    now: int,
    panels: Any,
    planes: int,
    floats_too: int,
    fill: bool,
) -> None:
    """Add an update to the residual, normalise, and make the next panel of it; then remember: two phases."""
    rows = frame.rows
    while True:
        row = claim(counters, phase, rows)
        if row < 0:
            break
        call(layer.add, (own, now, row))
        if fill:
            x = frame.normed + 4 * row * frame.hidden
            fill_row(x, frame.hidden, panels, rows, row, planes, floats_too != 0)
        done(counters, phase)
    wait(counters, phase, rows)
    if layer.remember_sum == 0:
        return
    if claim(counters, phase + 1, 1) == 0:
        call(layer.remember_sum, (own, now, 0))
        done(counters, phase + 1)
    wait(counters, phase + 1, 1)


@part
def _route(counters: int, phase: int, address: int, frame: Any) -> None:
    """Logits, then choice and weights of every row: two phases."""
    r, rows = _router_at(address), frame.rows
    every = r.routed + r.always
    x, logits = rows_of(frame.normed, rows, frame.hidden), rows_of(r.logits, rows, every)
    tiles = (every + TILE - 1) // TILE
    while True:
        tile = claim(counters, phase, tiles)
        if tile < 0:
            break
        logits_of_tile(x, rows_of(r.weight, every, frame.hidden), tile * TILE, logits)
        done(counters, phase)
    wait(counters, phase, tiles)
    while True:
        row = claim(counters, phase + 1, rows)
        if row < 0:
            break
        ids, weights = table_of(r.ids, rows, r.chosen), rows_of(r.weights, rows, r.chosen)
        choose(logits, floats(r.scores + 4 * row * r.routed, r.routed), row, floats(r.bias, r.routed), ids)
        weigh(logits, row, r.routed, r.scale, ids, weights, rows_of(r.shared, rows, r.always))
        done(counters, phase + 1)
    wait(counters, phase + 1, rows)


class _Tables(NamedTuple):
    """What `RUN` names of the stage."""

    frames: Table
    layers: Table
    mixtures: Table
    matrices: Table
    picks: Table
    panels: Table


class _Worker(NamedTuple):
    """A thread of the team, and what it works in: see `RUN`."""

    counters: int
    planes: int
    threads: int
    thread: int
    scratch: int
    work: F32
    ticks: I64


@part
def _attention_half(t: _Tables, w: _Worker, index: int, phase: int, at: int) -> int:
    """Projections, attention and its sum: nine phases from `phase` on; the time now."""
    layer, frame, now, rows = t.layers[index], t.frames[0], t.frames.ctypes.data, t.frames[0].rows
    normed, attended = t.panels[HIDDEN], t.panels[ATTENDED]
    first, count = layer.first_matrix, layer.matrices
    c, planes, threads = w.counters, w.planes, w.threads
    project(c, phase, t.matrices, first, count, normed, rows, planes, threads, w.scratch)
    at = _tick(w.ticks, w.thread, _PROJECTIONS, at)
    _append(c, phase + 1, layer, frame, now)
    _plan(c, phase + 2, layer, frame, now)
    _attend(c, phase + 3, layer, frame, now, w.work)
    at = _tick(w.ticks, w.thread, _ATTENTION, at)
    a = attention_at(layer.attention)
    fill_panels(c, phase + 5, a.out, a.heads * a.dim, attended, rows, planes, layer.out_floats != 0)
    at = _tick(w.ticks, w.thread, _GLUE, at)
    project(c, phase + 6, t.matrices, layer.output, 1, attended, rows, planes, threads, w.scratch)
    at = _tick(w.ticks, w.thread, _PROJECTIONS, at)
    _sum(c, phase + 7, layer, layer.after_attention, frame, now, normed, planes, 0, False)
    return _tick(w.ticks, w.thread, _GLUE, at)


@part
def _mixture_half(t: _Tables, w: _Worker, index: int, last: int, phase: int, at: int) -> int:
    """Router, mixture and its sum, which fills the next layer's panels: four phases and those of `mix`."""
    layer, frame, now = t.layers[index], t.frames[0], t.frames.ctypes.data
    c, planes = w.counters, w.planes
    if layer.router != 0:
        _route(c, phase, layer.router, frame)
        at = _tick(w.ticks, w.thread, _ROUTER, at)
    mixture, picks = t.mixtures[layer.mixture], t.picks[layer.picks]
    outer, inner = t.panels[OUTER], t.panels[INNER]
    mix(c, phase + 2, mixture, t.matrices, picks, outer, inner, frame.rows, planes, w.threads, w.scratch)
    at = _tick(w.ticks, w.thread, _EXPERTS if layer.router != 0 else _DENSE, at)
    more = index + 1 < last
    floats_too = t.layers[index + 1].in_floats if more else 0
    phase += 2 + PHASES
    _sum(c, phase, layer, layer.after_mlp, frame, now, t.panels[HIDDEN], planes, floats_too, more)
    return _tick(w.ticks, w.thread, _GLUE, at)


@part
def _work(t: _Tables, w: _Worker, first: int, last: int, start: int) -> None:
    """What every thread of the team does."""
    frame, floats_too = t.frames[0], t.layers[first].in_floats != 0
    fill_panels(w.counters, 0, frame.normed, frame.hidden, t.panels[HIDDEN], frame.rows, w.planes, floats_too)
    at = _tick(w.ticks, w.thread, _GLUE, start)
    for index in range(first, last):
        phase = (index - first) * LAYER_PHASES + 1
        at = _attention_half(t, w, index, phase, at)
        at = _mixture_half(t, w, index, last, phase + _HALF, at)


@kernel("(int64, int64)", usable=instructions() is not None)
def work_layers(own: int, thread: int) -> None:
    """Take a frame, whose rows are normalised for the first of the layers, through some layers.

    Args:
        own: address of a `RUN` record.
        thread: of the team; see `team.run_team`.
    """
    run = numba.carray(pointer(own), (1,), RUN)[0]
    tables = _Tables(
        numba.carray(pointer(run.frame), (1,), FRAME),
        numba.carray(pointer(run.layers), (run.last,), LAYER),
        numba.carray(pointer(run.mixtures), (run.last,), MIXTURE),
        numba.carray(pointer(run.matrices), (run.matrix_count,), MATRIX),
        numba.carray(pointer(run.picks), (run.last,), PICKS),
        numba.carray(pointer(run.panels), (4,), ACTIVATIONS),
    )
    scratch = run.scratch + thread * 4 * SCRATCH
    work = floats(run.work + thread * 4 * run.work_numbers, run.work_numbers)
    ticks = longs(run.ticks, len(PARTS))
    worker = _Worker(run.counters, run.planes, run.threads, thread, scratch, work, ticks)
    _work(tables, worker, run.first, run.last, cycles())
