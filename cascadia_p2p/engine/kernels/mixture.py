"""Mixtures of gated MLPs: every row passes some of them, and each one's weights are read once for all its
rows.

A row's result is the sum over its members, in order of their numbers, of `weight * down(silu(gate x) * up
x)`. Routed experts come first and shared ones behind them; a dense MLP is a mixture of one member that all
rows pass.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.addresses import floats, integers, longs, pointer
from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import F32, LANES, add, div, exp, load, mul, splat, store, sub
from cascadia_p2p.engine.kernels.frame import record_of
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.kernels.panels import put_group
from cascadia_p2p.engine.kernels.products import (
    ACTIVATIONS,
    MATRIX,
    SCRATCH,
    Matrices,
    Matrix,
    Panels,
    block_product,
    chunk_size,
    panel_limit,
    panel_start,
    put_row,
)
from cascadia_p2p.engine.kernels.team import announce, announced, claim, done, wait
from cascadia_p2p.matrices.encoding import GROUP, INPUTS, OUTPUTS

MIXTURE: Final = record_of(
    "gate up down always_gate always_up always_down routed always chosen outer_floats inner_floats"
)
"""A mixture as kernels see it: indexes of its stacks among the matrices, members that are routed and that all
rows pass, members chosen a row, and whether float32 activations are wanted outside and between the
products."""

PICKS: Final = record_of("x result ids weights always order members panels counts")
"""Addresses of what a mixture works with.

float32 x and result [rows][width]; int32 ids [rows][chosen] and float32 weights [rows][chosen] of routed
members, float32 weights [rows][always]; int64 order [picks]: which pick stands where, sorted by member;
members [n][3]: number, first panel, last + 1; panels [n][2]: first place, rows; and counts [members + 1]
for sorting.
"""

Mixture: TypeAlias = Any
Picks: TypeAlias = Any
Table: TypeAlias = npt.NDArray[np.void]

MIXING: Final = record_of("counters mixture matrices count picks outer inner rows planes threads scratch")
"""One call of a mixture: addresses of counters of `PHASES` phases at zero, of `MIXTURE` [1], `MATRIX`
[count], `PICKS` [1] and of `ACTIVATIONS` [1] each for what goes into gate and up and into down; rows;
planes of codes; threads; and address of float32 scratch [threads][SCRATCH]."""


PHASES: Final = 4
"""Phases of `mix`."""

_UNIT: Final = 2
"""Blocks of gate and of up that make one group of 32 inputs of down."""


@part
def _sort_picks(m: Mixture, picks: Picks, rows: int, limit: int) -> tuple[int, int]:
    """Sort the rows' picks by member, and cut each member's into panels of nearly equal size; how many of
    each."""
    chosen, every = m.chosen, m.chosen + m.always
    total = m.routed + m.always
    ids = integers(picks.ids, rows * chosen)
    counts = longs(picks.counts, total + 1)
    for e in range(total + 1):
        counts[e] = 0
    for row in range(rows):
        for k in range(chosen):
            counts[ids[row * chosen + k] + 1] += 1
    for e in range(m.routed, total):
        counts[e + 1] += rows
    order, members = longs(picks.order, rows * every), longs(picks.members, 3 * total)
    panels = longs(picks.panels, 2 * rows * every)
    found, panel, start = 0, 0, 0
    for e in range(total):
        count = counts[e + 1]
        # From here on where the member's next pick goes.
        counts[e + 1] = start
        if count == 0:
            continue
        parts = (count + limit - 1) // limit
        members[3 * found], members[3 * found + 1] = e, panel
        for p in range(parts):
            first = panel_start(count, parts, p)
            panels[2 * panel] = start + first
            panels[2 * panel + 1] = panel_start(count, parts, p + 1) - first
            panel += 1
        members[3 * found + 2] = panel
        found += 1
        start += count
    for row in range(rows):
        for k in range(chosen):
            e = ids[row * chosen + k]
            order[counts[e + 1]] = row * every + k
            counts[e + 1] += 1
        for k in range(m.always):
            e = m.routed + k
            order[counts[e + 1]] = row * every + chosen + k
            counts[e + 1] += 1
    return found, panel


@part
def mix(
    counters: int,
    phase: int,
    m: Mixture,
    matrices: Matrices,
    picks: Picks,
    outer: Panels,
    inner: Panels,
    rows: int,
    planes: int,
    threads: int,
    scratch: int,
) -> None:
    """Four phases: sort the picks, put rows into panels, gate and up, down.

    Args:
        counters: address of the team's.
        phase: number of the first phase.
        m: `MIXTURE`.
        matrices: `MATRIX` [n].
        picks: `PICKS`.
        outer: `ACTIVATIONS` for what goes into gate and up, one row a pick.
        inner: `ACTIVATIONS` for what goes into down, one row a pick.
        rows: of x.
        planes: of codes, or `EXACT`.
        threads: of the team.
        scratch: address of float32 [4][8][16] of this thread.
    """
    if claim(counters, phase, 1) == 0:
        found, panels = _sort_picks(m, picks, rows, panel_limit(planes))
        announce(counters, phase + 1, panels)
        announce(counters, phase + 2, found)
        done(counters, phase)
    wait(counters, phase, 1)
    panels, found = announced(counters, phase + 1), announced(counters, phase + 2)
    _fill(
        counters,
        phase + 1,
        m,
        matrices[m.gate if m.routed > 0 else m.always_gate],
        picks,
        outer,
        panels,
        planes,
    )
    _inward(counters, phase + 2, m, matrices, picks, outer, inner, found, planes, threads, scratch)
    _outward(counters, phase + 3, m, matrices, picks, inner, found, rows, planes, threads, scratch)


@part
def _fill(
    counters: int, phase: int, m: Mixture, gate: Matrix, picks: Picks, outer: Panels, count: int, planes: int
) -> None:
    """Put every pick's row into its member's panel."""
    every = m.chosen + m.always
    panels = longs(picks.panels, 2 * count)
    while True:
        panel = claim(counters, phase, count)
        if panel < 0:
            break
        start, rows = panels[2 * panel], panels[2 * panel + 1]
        order = longs(picks.order, start + rows)
        for row in range(rows):
            x = picks.x + 4 * (order[start + row] // every) * gate.inputs
            put_row(x, gate.inputs, outer, start, rows, row, planes, m.outer_floats != 0)
        done(counters, phase)
    wait(counters, phase, count)


@part
def _inward(
    counters: int,
    phase: int,
    m: Mixture,
    matrices: Matrices,
    picks: Picks,
    outer: Panels,
    inner: Panels,
    found: int,
    planes: int,
    threads: int,
    scratch: int,
) -> None:
    """Gate, up, and what becomes of both, as activations for down: a group of 32 at a time."""
    down = matrices[m.down if m.routed > 0 else m.always_down]
    gate = matrices[m.gate if m.routed > 0 else m.always_gate]
    units = down.blocks * INPUTS // GROUP
    members = longs(picks.members, 3 * found)
    size = chunk_size(found * units, 2 * _UNIT * gate.block_row, threads)
    chunks = (found * units + size - 1) // size
    while True:
        chunk = claim(counters, phase, chunks)
        if chunk < 0:
            break
        for item in range(chunk * size, min((chunk + 1) * size, found * units)):
            at = item // units
            e, unit = members[3 * at], item % units
            if e < m.routed:
                one, other, index = matrices[m.gate], matrices[m.up], e
            else:
                one, other, index = matrices[m.always_gate], matrices[m.always_up], e - m.routed
            for panel in range(members[3 * at + 1], members[3 * at + 2]):
                turn = panel - members[3 * at + 1]
                turns = members[3 * at + 2] - members[3 * at + 1]
                _unit(
                    m,
                    one,
                    other,
                    index,
                    unit,
                    panel,
                    picks,
                    outer,
                    inner,
                    down.blocks,
                    planes,
                    turn,
                    turns,
                    scratch,
                )
        done(counters, phase)
    wait(counters, phase, chunks)


@part
def _unit(
    m: Mixture,
    gate: Matrix,
    up: Matrix,
    index: int,
    unit: int,
    panel: int,
    picks: Picks,
    outer: Panels,
    inner: Panels,
    blocks: int,
    planes: int,
    turn: int,
    turns: int,
    scratch: int,
) -> None:
    """32 inputs of down for one panel; scratch is float32 [4][8][16]."""
    panels = longs(picks.panels, 2 * panel + 2)
    start, rows = panels[2 * panel], panels[2 * panel + 1]
    size = 8 * OUTPUTS * 4
    for half in range(_UNIT):
        block = _UNIT * unit + half
        if block < gate.high:
            block_product(
                gate, index, block, outer, start, rows, planes, turn, turns, _UNIT, scratch + half * size
            )
            block_product(
                up, index, block, outer, start, rows, planes, turn, turns, _UNIT, scratch + (2 + half) * size
            )
    values = floats(scratch, 4 * 8 * OUTPUTS)
    numbers = np.zeros(GROUP, np.float32)
    width = blocks * INPUTS
    for row in range(rows):
        for half in range(_UNIT):
            block = _UNIT * unit + half
            at = (half * 8 + row) * OUTPUTS
            if block < gate.high:
                g, u = load(values, at), load(values, at + 2 * 8 * OUTPUTS)
                store(numbers, half * LANES, mul(div(g, add(splat(1.0), exp(sub(splat(0.0), g)))), u))
                for n in range(gate.outputs - block * OUTPUTS, OUTPUTS):
                    numbers[half * LANES + n] = 0.0
        if planes == 0 or m.inner_floats != 0:
            target = floats(inner.numbers + 4 * ((start + row) * width + unit * GROUP), GROUP)
            for k in range(GROUP):
                target[k] = numbers[k]
        if planes > 0:
            at = start * planes * width
            place = unit * rows * planes + row * planes
            scales, offsets = inner.scales + at // 8, inner.offsets + at // 8
            put_group(numbers.ctypes.data, inner.codes + at, scales, offsets, place, planes)


@part
def _outward(
    counters: int,
    phase: int,
    m: Mixture,
    matrices: Matrices,
    picks: Picks,
    inner: Panels,
    found: int,
    rows: int,
    planes: int,
    threads: int,
    scratch: int,
) -> None:
    """Down, added up by the rows' weights: each chunk has outputs of its own."""
    down = matrices[m.down if m.routed > 0 else m.always_down]
    members = longs(picks.members, 3 * found)
    size = chunk_size(down.high, found * down.block_row, threads)
    chunks = (down.high + size - 1) // size
    result = floats(picks.result, rows * down.outputs)
    while True:
        chunk = claim(counters, phase, chunks)
        if chunk < 0:
            break
        first, last = chunk * size, min((chunk + 1) * size, down.high)
        start, end = first * OUTPUTS, min(last * OUTPUTS, down.outputs)
        for row in range(rows):
            for n in range(row * down.outputs + start, row * down.outputs + end):
                result[n] = 0.0
        for at in range(found):
            e = members[3 * at]
            for block in range(first, last):
                for panel in range(members[3 * at + 1], members[3 * at + 2]):
                    turn = panel - members[3 * at + 1]
                    turns = members[3 * at + 2] - members[3 * at + 1]
                    if e < m.routed:
                        _add(
                            m,
                            matrices[m.down],
                            e,
                            block,
                            panel,
                            picks,
                            inner,
                            planes,
                            turn,
                            turns,
                            result,
                            scratch,
                        )
                    else:
                        own = e - m.routed
                        stack = matrices[m.always_down]
                        _add(m, stack, own, block, panel, picks, inner, planes, turn, turns, result, scratch)
        done(counters, phase)
    wait(counters, phase, chunks)


@part
def _add(
    m: Mixture,
    down: Matrix,
    index: int,
    block: int,
    panel: int,
    picks: Picks,
    inner: Panels,
    planes: int,
    turn: int,
    turns: int,
    result: F32,
    scratch: int,
) -> None:
    """Sixteen outputs of a member onto the results of its rows."""
    panels = longs(picks.panels, 2 * panel + 2)
    start, rows = panels[2 * panel], panels[2 * panel + 1]
    block_product(down, index, block, inner, start, rows, planes, turn, turns, 1, scratch)
    values = floats(scratch, rows * OUTPUTS)
    order = longs(picks.order, start + rows)
    every, first = m.chosen + m.always, block * OUTPUTS
    for place in range(rows):
        pick = order[start + place]
        row, k = pick // every, pick % every
        if k < m.chosen:
            weight = floats(picks.weights, (row + 1) * m.chosen)[row * m.chosen + k]
        else:
            weight = floats(picks.always, (row + 1) * m.always)[row * m.always + k - m.chosen]
        at = row * down.outputs + first
        for n in range(min(OUTPUTS, down.outputs - first)):
            result[at + n] += weight * values[place * OUTPUTS + n]


@kernel("(int64, int64)", usable=instructions() is not None)
def work_mixture(own: int, thread: int) -> None:
    """Rows through a mixture.

    Args:
        own: address of a `MIXING` record.
        thread: of the team; see `team.run_team`.
    """
    r = numba.carray(pointer(own), (1,), MIXING)[0]
    mixture = numba.carray(pointer(r.mixture), (1,), MIXTURE)[0]
    matrices = numba.carray(pointer(r.matrices), (r.count,), MATRIX)
    picks = numba.carray(pointer(r.picks), (1,), PICKS)[0]
    outer = numba.carray(pointer(r.outer), (1,), ACTIVATIONS)[0]
    inner = numba.carray(pointer(r.inner), (1,), ACTIVATIONS)[0]
    scratch = r.scratch + thread * 4 * SCRATCH
    mix(r.counters, 0, mixture, matrices, picks, outer, inner, r.rows, r.planes, r.threads, scratch)
