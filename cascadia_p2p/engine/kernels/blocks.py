"""Scores and weighted sums over paged keys and values, read in place; shared by every kind of attention.

Keys and values of a layer lie in blocks of 64 positions. Position p of a slot is in block `table[slot, p //
64 % n]` at offset `p % 64`; with n blocks fewer than the context the table is a ring. In a block, values
stand as [kv head, offset, dim], keys transposed as [kv head, dim, offset], so that the scores of sixteen
positions come out of one vector without a sum over lanes.

Scores of a row are taken block by block in one pass (online softmax). Blocks are cut at absolute positions,
and each number is a chain of operations whose order is fixed by the position alone, so a row's result does
not depend on the rows around it, on the threads, or on how a prompt was cut into windows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cascadia_p2p.compiled.compiling import part
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    Lanes,
    add,
    exp,
    fma,
    keep,
    larger,
    largest,
    load,
    mul,
    splat,
    store,
    sub,
    total,
)
from cascadia_p2p.engine.kernels.rows import I32

BLOCK: Final = 64
"""Positions in a block."""

_MINUS_INFINITY: Final = np.float32(-np.inf)


@part
def _probabilities(
    s0: Lanes, s1: Lanes, s2: Lanes, s3: Lanes, low: int, high: int, state: F32, head: int, out: F32
) -> None:
    """Turn one head's scores of a block into exponentials, and bring its running maximum and sum up to date.

    `state` [heads, 4] holds maximum, sum, and the factor that what was summed so far has to be scaled by.
    """
    if low > 0 or high < BLOCK:
        s0 = keep(s0, low, high, _MINUS_INFINITY)
        s1 = keep(s1, low - LANES, high - LANES, _MINUS_INFINITY)
        s2 = keep(s2, low - 2 * LANES, high - 2 * LANES, _MINUS_INFINITY)
        s3 = keep(s3, low - 3 * LANES, high - 3 * LANES, _MINUS_INFINITY)
    old = state[head, 0]
    top = max(old, largest(larger(larger(s0, s1), larger(s2, s3))))
    peak = splat(top)
    s0, s1 = exp(sub(s0, peak)), exp(sub(s1, peak))
    s2, s3 = exp(sub(s2, peak)), exp(sub(s3, peak))
    store(out, head * BLOCK, s0)
    store(out, head * BLOCK + LANES, s1)
    store(out, head * BLOCK + 2 * LANES, s2)
    store(out, head * BLOCK + 3 * LANES, s3)
    factor = largest(exp(splat(old - top)))
    state[head, 0] = top
    state[head, 1] = state[head, 1] * factor + total(add(add(s0, s1), add(s2, s3)))
    state[head, 2] = factor


@part
def _score_block(
    q: F32,
    r: F32,
    head: int,
    keys: F32,
    at: int,
    bias: F32,
    bias_at: int,
    low: int,
    high: int,
    state: F32,
    out: F32,
) -> None:
    """Scores of two heads against the 64 positions of a block, then their exponentials."""
    dim, ranks, width = q.shape[1], r.shape[1], bias.shape[1]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(0.0)
    if bias_at > 0:
        for c in range(ranks):
            ra, rb = splat(r[head, c]), splat(r[head + 1, c])
            p0, p1 = load(bias, c * width + bias_at), load(bias, c * width + bias_at + LANES)
            p2 = load(bias, c * width + bias_at + 2 * LANES)
            p3 = load(bias, c * width + bias_at + 3 * LANES)
            a0, a1, a2, a3 = fma(ra, p0, a0), fma(ra, p1, a1), fma(ra, p2, a2), fma(ra, p3, a3)
            b0, b1, b2, b3 = fma(rb, p0, b0), fma(rb, p1, b1), fma(rb, p2, b2), fma(rb, p3, b3)
    for d in range(dim):
        qa, qb = splat(q[head, d]), splat(q[head + 1, d])
        k0, k1 = load(keys, at + d * BLOCK), load(keys, at + d * BLOCK + LANES)
        k2, k3 = load(keys, at + d * BLOCK + 2 * LANES), load(keys, at + d * BLOCK + 3 * LANES)
        a0, a1, a2, a3 = fma(qa, k0, a0), fma(qa, k1, a1), fma(qa, k2, a2), fma(qa, k3, a3)
        b0, b1, b2, b3 = fma(qb, k0, b0), fma(qb, k1, b1), fma(qb, k2, b2), fma(qb, k3, b3)
    _probabilities(a0, a1, a2, a3, low, high, state, head, out)
    _probabilities(b0, b1, b2, b3, low, high, state, head + 1, out)


@part
def _sum_block(
    weights: F32, head: int, values: F32, at: int, low: int, high: int, state: F32, sums: F32
) -> None:
    """Scale two heads' sums to the new maximum and add the block's values by their exponentials."""
    stored = sums.shape[1]
    fa, fb = splat(state[head, 2]), splat(state[head + 1, 2])
    row_a, row_b = head * stored, (head + 1) * stored
    wide = stored // (4 * LANES) * (4 * LANES)
    for d in range(0, wide, 4 * LANES):
        a0, a1 = mul(load(sums, row_a + d), fa), mul(load(sums, row_a + d + LANES), fa)
        a2 = mul(load(sums, row_a + d + 2 * LANES), fa)
        a3 = mul(load(sums, row_a + d + 3 * LANES), fa)
        b0, b1 = mul(load(sums, row_b + d), fb), mul(load(sums, row_b + d + LANES), fb)
        b2 = mul(load(sums, row_b + d + 2 * LANES), fb)
        b3 = mul(load(sums, row_b + d + 3 * LANES), fb)
        for j in range(low, high):
            wa, wb = splat(weights[head, j]), splat(weights[head + 1, j])
            place = at + j * stored + d
            v0, v1 = load(values, place), load(values, place + LANES)
            v2, v3 = load(values, place + 2 * LANES), load(values, place + 3 * LANES)
            a0, a1, a2, a3 = fma(wa, v0, a0), fma(wa, v1, a1), fma(wa, v2, a2), fma(wa, v3, a3)
            b0, b1, b2, b3 = fma(wb, v0, b0), fma(wb, v1, b1), fma(wb, v2, b2), fma(wb, v3, b3)
        store(sums, row_a + d, a0)
        store(sums, row_a + d + LANES, a1)
        store(sums, row_a + d + 2 * LANES, a2)
        store(sums, row_a + d + 3 * LANES, a3)
        store(sums, row_b + d, b0)
        store(sums, row_b + d + LANES, b1)
        store(sums, row_b + d + 2 * LANES, b2)
        store(sums, row_b + d + 3 * LANES, b3)
    for d in range(wide, stored, LANES):
        a0, b0 = mul(load(sums, row_a + d), fa), mul(load(sums, row_b + d), fb)
        for j in range(low, high):
            v0 = load(values, at + j * stored + d)
            a0, b0 = fma(splat(weights[head, j]), v0, a0), fma(splat(weights[head + 1, j]), v0, b0)
        store(sums, row_a + d, a0)
        store(sums, row_b + d, b0)


@part
def attend_blocks(
    queries: F32,
    relative: F32,
    bias: F32,
    extent: int,
    keys: F32,
    values: F32,
    table: I32,
    kv_head: int,
    slot: int,
    position: int,
    window: int,
    state: F32,
    weights: F32,
    sums: F32,
) -> None:
    """Take all query heads of one row that share a key and value head over the positions that the row sees.

    `queries` [heads, dim] are scaled, and of an even number. `relative` [heads, ranks] mixes `bias` [ranks,
    extent + 2 * 64], which goes by falling distance with a block of zeros on either side; no ranks, no bias.
    `window` 0 sees all. `sums` [heads, stored] has to come as zeros and comes out as the sum of values
    weighted by exponentials, whose own sum comes out in `state[:, 1]`; `state` [heads, 4] and `weights`
    [heads, 64] are scratch.
    """
    heads, dim, stored, kv_heads = queries.shape[0], queries.shape[1], sums.shape[1], keys.shape[1]
    for h in range(heads):
        state[h, 0] = _MINUS_INFINITY
    first = max(0, position - window + 1) if window > 0 else 0
    ring = table.shape[1]
    for b in range(first // BLOCK, position // BLOCK + 1):
        start = b * BLOCK
        low, high = max(first - start, 0), min(position - start + 1, BLOCK)
        # Distances fall as positions rise, and so does the bias table.
        bias_at = extent + BLOCK - 1 - position + start
        block = np.int64(table[slot, b % ring]) * kv_heads + kv_head
        for h in range(0, heads, 2):
            _score_block(
                queries, relative, h, keys, block * dim * BLOCK, bias, bias_at, low, high, state, weights
            )
            _sum_block(weights, h, values, block * BLOCK * stored, low, high, state, sums)


@part
def put_value(scratch: F32, values: F32, block: int, head: int, offset: int, dim: int) -> None:
    """Put one head's value into its block, zeros behind it up to a whole vector."""
    for d in range(dim):
        values[block, head, offset, d] = scratch[head * dim + d]
    for d in range(dim, values.shape[3]):
        values[block, head, offset, d] = 0.0


def stored_dim(dim: int) -> int:
    """Numbers that a value of `dim` numbers takes in a block: up to a whole vector."""
    return -(-dim // LANES) * LANES


def block_bytes(kv_heads: int, dim: int) -> int:
    """Memory of one block's keys and values."""
    return 4 * BLOCK * kv_heads * (dim + stored_dim(dim))


def new_blocks(blocks: int, kv_heads: int, dim: int) -> tuple[F32, F32]:
    """Keys [blocks, kv_heads, dim, 64] and values [blocks, kv_heads, 64, stored], all in memory at once."""
    keys = np.empty((blocks, kv_heads, dim, BLOCK), np.float32)
    values = np.empty((blocks, kv_heads, BLOCK, stored_dim(dim)), np.float32)
    for array in (keys, values):
        array.fill(0.0)
    return keys, values
