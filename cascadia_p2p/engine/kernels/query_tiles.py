"""Tiles of query vectors against paged keys and values, in one pass (online softmax) with fixed bits.

A tile is a few consecutive rows of one slot times the query heads that share a key and value head. Its
vectors take each block together while it is in cache, four of them at a time in registers.

Each number of a row is a chain of operations whose order its position alone decides: blocks are cut at
multiples of 64 positions, softmaxes start anew at multiples of `SEGMENT` positions, and the segments of a row
are folded from the first to the last. What a row does not see, it passes without an operation. So a row's
result depends neither on its tile, nor on the threads, nor on who folds its segments.

What one query vector has summed up is a record of `stored + 32` numbers: the sums of its values, sixteen
lanes of the sum of its exponentials, and its greatest score. Arrays are float32, and go by their addresses.
"""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
from numba.core import codegen

from cascadia_p2p.compiled.compiling import part
from cascadia_p2p.compiled.simd import (
    LANES,
    Lanes,
    add,
    broadcast,
    div,
    exp,
    fma,
    keep,
    larger,
    largest,
    load,
    mul,
    number,
    prefetch,
    put,
    splat,
    store,
    store_part,
    sub,
    total,
)
from cascadia_p2p.engine.kernels.blocks import BLOCK

SEGMENT_BLOCKS: Final = 32
"""Blocks of one softmax."""

TOGETHER: Final = 4
"""Query vectors that registers hold at once."""

_SHARES: Final = 4
"""Fours of vectors that together prefetch a block, `hop` for each row that they multiply."""

_WIDE: Final = "+avx512f" in (numba.config.CPU_FEATURES or str(codegen.get_host_cpu_features()))
"""Of what numba compiles for: whether sixteen vectors of sums fit into the registers; otherwise four do."""

_MINUS_INFINITY: Final = np.float32(-np.inf)


@part
def record_numbers(stored: int) -> int:
    """Numbers of one record."""
    return stored + 2 * LANES


@part
def padded(queries: int) -> int:
    """Records of so many query vectors, which are taken by fours."""
    return (queries + TOGETHER - 1) // TOGETHER * TOGETHER


@part
def _load4(array: int, at: int) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    return load(array, at), load(array, at + LANES), load(array, at + 2 * LANES), load(array, at + 3 * LANES)


@part
def _store4(array: int, at: int, a: Lanes, b: Lanes, c: Lanes, d: Lanes) -> None:
    store(array, at, a)
    store(array, at + LANES, b)
    store(array, at + 2 * LANES, c)
    store(array, at + 3 * LANES, d)


@part
def _multiply_narrow(
    left: int,
    row: int,
    step: int,
    count: int,
    right: int,
    at: int,
    stride: int,
    sums: int,
    place: int,
    gap: int,
) -> None:
    """Four rows of `left`, `step` apart, times sixteen columns of `right`, added to sums `gap` apart."""
    a, b = load(sums, place), load(sums, place + gap)
    c, d = load(sums, place + 2 * gap), load(sums, place + 3 * gap)
    for i in range(row, row + count):
        x = load(right, at)
        at += stride
        a, b = fma(broadcast(left, i), x, a), fma(broadcast(left, i + step), x, b)
        c, d = fma(broadcast(left, i + 2 * step), x, c), fma(broadcast(left, i + 3 * step), x, d)
    store(sums, place, a)
    store(sums, place + gap, b)
    store(sums, place + 2 * gap, c)
    store(sums, place + 3 * gap, d)


@part
def _multiply_wide(
    left: int,
    row: int,
    step: int,
    count: int,
    right: int,
    at: int,
    stride: int,
    sums: int,
    place: int,
    gap: int,
    next_one: int,
    near: int,
    also: int,
    hop: int,
) -> None:
    """The same with 64 columns; memory at `next_one` is prefetched as it goes.

    For each row that is a cache line at `near`, which moves on by `hop`, and one `also` behind it; all three
    in float32 numbers.
    """
    a0, a1, a2, a3 = _load4(sums, place)
    b0, b1, b2, b3 = _load4(sums, place + gap)
    c0, c1, c2, c3 = _load4(sums, place + 2 * gap)
    d0, d1, d2, d3 = _load4(sums, place + 3 * gap)
    for i in range(row, row + count):
        x0, x1, x2, x3 = _load4(right, at)
        prefetch(next_one, near)
        prefetch(next_one, near + also)
        at += stride
        near += hop
        w = broadcast(left, i)
        a0, a1, a2, a3 = fma(w, x0, a0), fma(w, x1, a1), fma(w, x2, a2), fma(w, x3, a3)
        w = broadcast(left, i + step)
        b0, b1, b2, b3 = fma(w, x0, b0), fma(w, x1, b1), fma(w, x2, b2), fma(w, x3, b3)
        w = broadcast(left, i + 2 * step)
        c0, c1, c2, c3 = fma(w, x0, c0), fma(w, x1, c1), fma(w, x2, c2), fma(w, x3, c3)
        w = broadcast(left, i + 3 * step)
        d0, d1, d2, d3 = fma(w, x0, d0), fma(w, x1, d1), fma(w, x2, d2), fma(w, x3, d3)
    _store4(sums, place, a0, a1, a2, a3)
    _store4(sums, place + gap, b0, b1, b2, b3)
    _store4(sums, place + 2 * gap, c0, c1, c2, c3)
    _store4(sums, place + 3 * gap, d0, d1, d2, d3)


@part
def _multiply(
    left: int,
    row: int,
    step: int,
    count: int,
    right: int,
    at: int,
    stride: int,
    columns: int,
    sums: int,
    place: int,
    gap: int,
    next_one: int,
    near: int,
    also: int,
    hop: int,
) -> None:
    """Four rows of `left` times all columns of `right`, whose rows are `stride` apart, added to `sums`."""
    wide = columns // BLOCK * BLOCK if _WIDE else 0
    for c in range(0, wide, BLOCK):
        _multiply_wide(
            left, row, step, count, right, at + c, stride, sums, place + c, gap, next_one, near, also, hop
        )
        near += count * hop
    for c in range(wide, columns, LANES):
        _multiply_narrow(left, row, step, count, right, at + c, stride, sums, place + c, gap)


@part
def _add_one(
    work: int, weight: int, low: int, high: int, values: int, place: int, stored: int, records: int, at: int
) -> None:
    """Add values `low` to `high - 1` of a block, by one vector's exponentials, to its record."""
    wide = stored // BLOCK * BLOCK
    for d in range(0, wide, BLOCK):
        a0, a1, a2, a3 = _load4(records, at + d)
        for j in range(low, high):
            w = broadcast(work, weight + j)
            x0, x1, x2, x3 = _load4(values, place + j * stored + d)
            a0, a1, a2, a3 = fma(w, x0, a0), fma(w, x1, a1), fma(w, x2, a2), fma(w, x3, a3)
        _store4(records, at + d, a0, a1, a2, a3)
    for d in range(wide, stored, LANES):
        a0 = load(records, at + d)
        for j in range(low, high):
            a0 = fma(broadcast(work, weight + j), load(values, place + j * stored + d), a0)
        store(records, at + d, a0)


@part
def _soften(work: int, score: int, low: int, high: int, stored: int, records: int, at: int) -> None:
    """Turn one vector's scores of a block into exponentials, and scale its record to the greatest score."""
    s0, s1, s2, s3 = _load4(work, score)
    if low > 0 or high < BLOCK:
        s0 = keep(s0, low, high, _MINUS_INFINITY)
        s1 = keep(s1, low - LANES, high - LANES, _MINUS_INFINITY)
        s2 = keep(s2, low - 2 * LANES, high - 2 * LANES, _MINUS_INFINITY)
        s3 = keep(s3, low - 3 * LANES, high - 3 * LANES, _MINUS_INFINITY)
    lanes = at + stored
    old = number(records, lanes + LANES)
    top = max(old, largest(larger(larger(s0, s1), larger(s2, s3))))
    peak = splat(top)
    s0, s1 = exp(sub(s0, peak)), exp(sub(s1, peak))
    s2, s3 = exp(sub(s2, peak)), exp(sub(s3, peak))
    _store4(work, score, s0, s1, s2, s3)
    if top != old:
        put(records, lanes + LANES, top)
        factor = exp(splat(old - top))
        for d in range(0, stored + LANES, LANES):
            store(records, at + d, mul(load(records, at + d), factor))
    store(records, lanes, add(load(records, lanes), add(add(s0, s1), add(s2, s3))))


@part
def _seen(position: int, window: int, start: int) -> tuple[int, int]:
    """The offsets, from one to before the other, of a block that a row sees; none where they do not
    ascend."""
    low = max(position - window + 1 - start, 0) if window > 0 else 0
    return low, min(position - start + 1, BLOCK)


@part
def _ahead(four: int, count: int, share: int) -> tuple[int, int]:
    """Where one of the fours of vectors starts to prefetch, and how far behind that it prefetches too.

    The first four fours take a share of the block each; where there are fewer, they take two.
    """
    if four >= _SHARES:
        return 0, 0
    return four * share, 0 if count > (_SHARES - 1) * TOGETHER else 2 * share


@part
def _bias_scores(
    work: int,
    relative: int,
    ranks: int,
    bias: int,
    extent: int,
    group: int,
    rows: int,
    position: int,
    window: int,
    start: int,
    scores: int,
) -> None:
    """Start the scores of a block with the relative bias of each row."""
    width, zero = extent + 2 * BLOCK, splat(0.0)
    # What the four vectors write beyond their row's, the next row writes anew.
    for row in range(rows):
        low, high = _seen(position + row, window, start)
        if low < high:
            # Distances fall as positions rise, and so does the bias table.
            bias_at = extent + BLOCK - 1 - position - row + start
            for h in range(row * group, (row + 1) * group, TOGETHER):
                for d in range(0, TOGETHER * BLOCK, LANES):
                    store(work, scores + h * BLOCK + d, zero)
                if bias_at > 0:
                    _multiply(
                        work,
                        relative + h * ranks,
                        ranks,
                        ranks,
                        bias,
                        bias_at,
                        width,
                        BLOCK,
                        work,
                        scores + h * BLOCK,
                        BLOCK,
                        bias,
                        bias_at,
                        0,
                        0,
                    )


@part
def score_block(
    work: int,
    queries: int,
    relative: int,
    scores: int,
    dim: int,
    ranks: int,
    bias: int,
    extent: int,
    group: int,
    rows: int,
    position: int,
    window: int,
    start: int,
    keys: int,
    next_one: int,
    hop: int,
) -> None:
    """Scores of a tile's query vectors against the block whose first position is `start`.

    In `work` stand the vectors [padded, dim] from `queries` on, their `relative` [padded, ranks], and room
    for `scores` [padded + 4, 64]. The rows' positions start with `position`. At `next_one`
    the next block's keys are prefetched, of which `hop` float32 numbers are as large as sixteen of them.
    """
    count = rows * group
    biased = ranks > 0 and extent + BLOCK - 1 - position + start > 0
    if biased:
        _bias_scores(work, relative, ranks, bias, extent, group, rows, position, window, start, scores)
    zero = splat(0.0)
    for t in range(0, count, TOGETHER):
        low, high = _seen(position + t // group, window, start)
        last_low, last_high = _seen(position + min(t + TOGETHER - 1, count - 1) // group, window, start)
        if low < high or last_low < last_high:
            score = scores + t * BLOCK
            if not biased:
                for d in range(0, TOGETHER * BLOCK, LANES):
                    store(work, score + d, zero)
            near, also = _ahead(t // TOGETHER, count, dim * hop)
            _multiply(
                work,
                queries + t * dim,
                dim,
                dim,
                keys,
                0,
                BLOCK,
                BLOCK,
                work,
                score,
                BLOCK,
                next_one,
                near,
                also,
                hop,
            )


@part
def add_block(
    work: int,
    scores: int,
    group: int,
    rows: int,
    position: int,
    window: int,
    start: int,
    values: int,
    stored: int,
    next_one: int,
    hop: int,
    records: int,
    base: int,
) -> None:
    """Turn the scores that `score_block` left into exponentials, and add values by them to the records."""
    count, size = rows * group, record_numbers(stored)
    for i in range(count):
        first, end = _seen(position + i // group, window, start)
        if first < end:
            _soften(work, scores + i * BLOCK, first, end, stored, records, base + i * size)
    for t in range(0, count, TOGETHER):
        last = min(t + TOGETHER, count) - 1
        low, high = _seen(position + t // group, window, start)
        last_low, last_high = _seen(position + last // group, window, start)
        if low >= high and last_low >= last_high:
            continue
        # Ranges of rows ascend, so what the first and the last see, all see.
        both, both_end = max(low, last_low), min(high, last_high)
        mixed = low != last_low or high != last_high
        if mixed:
            if both >= both_end:
                both = both_end = BLOCK
            for i in range(t, last + 1):
                first, end = _seen(position + i // group, window, start)
                end, weight, record = min(end, both), scores + i * BLOCK, base + i * size
                _add_one(work, weight, first, end, values, 0, stored, records, record)
        at, left, record = both * stored, scores + t * BLOCK + both, base + t * size
        near, also = _ahead(t // TOGETHER, count, stored * hop)
        _multiply(
            work,
            left,
            BLOCK,
            both_end - both,
            values,
            at,
            stored,
            stored,
            records,
            record,
            size,
            next_one,
            near,
            also,
            hop,
        )
        if mixed:
            for i in range(t, last + 1):
                first, end = _seen(position + i // group, window, start)
                first, weight, record = max(first, both_end), scores + i * BLOCK, base + i * size
                _add_one(work, weight, first, end, values, 0, stored, records, record)


@part
def clear(records: int, base: int, count: int, stored: int) -> None:
    """Make records of nothing."""
    size = record_numbers(stored)
    for i in range(count):
        for d in range(0, size, LANES):
            store(records, base + i * size + d, splat(0.0))
        put(records, base + i * size + stored + LANES, _MINUS_INFINITY)


@part
def fold(into: int, at: int, of: int, place: int, stored: int) -> None:
    """Add the record of a later segment to that of the earlier ones."""
    peak = stored + LANES
    old, new = number(into, at + peak), number(of, place + peak)
    top = max(old, new)
    a, b = exp(splat(old - top)), exp(splat(new - top))
    for d in range(0, peak, LANES):
        store(into, at + d, fma(load(of, place + d), b, mul(load(into, at + d), a)))
    put(into, at + peak, top)


@part
def copy_record(into: int, at: int, of: int, place: int, stored: int) -> None:
    """Take the record of a row's first segment as it is."""
    for d in range(0, record_numbers(stored), LANES):
        store(into, at + d, load(of, place + d))


@part
def finish(records: int, at: int, stored: int, dim: int, out: int, place: int) -> None:
    """Write the mean of values that a record stands for."""
    shares = splat(total(load(records, at + stored)))
    for d in range(0, dim, LANES):
        store_part(out, place + d, div(load(records, at + d), shares), dim - d)
