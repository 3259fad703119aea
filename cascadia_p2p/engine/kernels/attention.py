"""Attention over paged keys and values, read in place: relative bias, window and log scaling inside.

Keys and values of a layer lie in blocks of 64 positions. Position p of a slot is in block `table[slot, p //
64 % n]` at offset `p % 64`; with n blocks fewer than the context the table is a ring. In a block, values
stand as [kv head, offset, dim], keys transposed as [kv head, dim, offset], so that the scores of sixteen
positions come out of one vector without a sum over lanes.

Scores of a row are taken block by block in one pass (online softmax). Blocks are cut at absolute positions,
and each number is a chain of operations whose order is fixed by the position alone, so a row's result does
not depend on the rows around it, on the threads, or on how a prompt was cut into windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numba import prange

from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.compiling import part, twin_kernels
from cascadia_p2p.engine.kernels.convolution import convolved, new_history, remember, taps_first
from cascadia_p2p.engine.kernels.norms import inverse_rms, scale_row
from cascadia_p2p.engine.kernels.rows import I32, RowTable
from cascadia_p2p.engine.kernels.simd import (
    F32,
    LANES,
    Lanes,
    Real,
    add,
    div,
    exp,
    fma,
    keep,
    larger,
    largest,
    load,
    mul,
    splat,
    store,
    store_part,
    sub,
    total,
)

BLOCK: Final = 64
"""Positions in a block."""

_MINUS_INFINITY: Final = np.float32(-np.inf)


@part
def _append(
    k: F32,
    v: F32,
    key_taps: F32,
    value_taps: F32,
    key_history: F32,
    value_history: F32,
    k_norm: F32,
    keys: F32,
    values: F32,
    row: int,
    slot: int,
    position: int,
    before: int,
    block: int,
    eps: float,
) -> None:
    """Convolve one row's key and value, normalise the key a head, and put both into their block."""
    kv_heads, dim, stored = keys.shape[1], k_norm.shape[0], values.shape[3]
    width, depth, offset = kv_heads * dim, key_history.shape[1], position % BLOCK
    ring = slot * depth + position % depth
    scratch = np.empty(width + LANES, np.float32)
    for c in range(0, width, LANES):
        new = convolved(k, key_history, key_taps, row, ring, position, before, c)
        store_part(scratch, c, new, width - c)
    for head in range(kv_heads):
        scale_row(
            scratch,
            head * dim,
            k_norm,
            inverse_rms(scratch, head * dim, dim, eps),
            1.0,
            scratch,
            head * dim,
        )
        for d in range(dim):
            keys[block, head, d, offset] = scratch[head * dim + d]
    for c in range(0, width, LANES):
        new = convolved(v, value_history, value_taps, row, ring, position, before, c)
        store_part(scratch, c, new, width - c)
    for head in range(kv_heads):
        for d in range(dim):
            values[block, head, offset, d] = scratch[head * dim + d]
        for d in range(dim, stored):
            values[block, head, offset, d] = 0.0


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
def _attend_group(
    q: F32,
    r: F32,
    q_norm: F32,
    bias: F32,
    extent: int,
    keys: F32,
    values: F32,
    table: I32,
    row: int,
    kv_head: int,
    slot: int,
    position: int,
    window: int,
    scale: Real,
    eps: float,
    out: F32,
) -> None:
    """All query heads of one row that share a key and value head; `scale` is the log scaling."""
    kv_heads, dim, stored = keys.shape[1], q_norm.shape[0], values.shape[3]
    group, ranks = q.shape[1] // (kv_heads * dim), bias.shape[0]
    # Heads are taken in pairs; an odd last one has a partner of zeros.
    heads = group + group % 2
    queries = np.zeros((heads, dim), np.float32)
    relative = np.zeros((heads, ranks), np.float32)
    weights = np.empty((heads, BLOCK), np.float32)
    sums = np.zeros((heads, stored), np.float32)
    state = np.zeros((heads, 4), np.float32)
    for h in range(group):
        at = row * q.shape[1] + (kv_head * group + h) * dim
        scale_row(q, at, q_norm, inverse_rms(q, at, dim, eps), np.float32(dim), queries.reshape(-1), h * dim)
        for d in range(dim):
            queries[h, d] *= scale
        for c in range(ranks):
            relative[h, c] = r[row, (kv_head * group + h) * ranks + c] * scale
    for h in range(heads):
        state[h, 0] = _MINUS_INFINITY
    first = max(0, position - window + 1) if window > 0 else 0
    ring = table.shape[1]
    for b in range(first // BLOCK, position // BLOCK + 1):
        start = b * BLOCK
        low, high = max(first - start, 0), min(position - start + 1, BLOCK)
        # Distances fall as positions rise, and so does the bias table; a block of zeros stands on either
        # side.
        bias_at = extent + BLOCK - 1 - position + start
        block = np.int64(table[slot, b % ring]) * kv_heads + kv_head
        for h in range(0, heads, 2):
            _score_block(
                queries, relative, h, keys, block * dim * BLOCK, bias, bias_at, low, high, state, weights
            )
            _sum_block(weights, h, values, block * BLOCK * stored, low, high, state, sums)
    for h in range(group):
        at = row * q.shape[1] + (kv_head * group + h) * dim
        for d in range(0, dim, LANES):
            store_part(out, at + d, div(load(sums, h * stored + d), splat(state[h, 1])), dim - d)


@twin_kernels(
    "(float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], "
    "float32[:,:,::1], float32[:,:,::1], float32[::1], float32[::1], float32[:,::1], int64, "
    "float32[:,:,:,::1], float32[:,:,:,::1], int32[:,::1], int32[::1], int32[::1], int32[::1], int32[::1], "
    "int64, float64, float64, float64, float32[:,::1])"
)
def _attend(
    q: F32,
    k: F32,
    v: F32,
    r: F32,
    key_taps: F32,
    value_taps: F32,
    key_history: F32,
    value_history: F32,
    q_norm: F32,
    k_norm: F32,
    bias: F32,
    extent: int,
    keys: F32,
    values: F32,
    table: I32,
    slots: I32,
    positions: I32,
    before: I32,
    after: I32,
    window: int,
    floor: float,
    alpha: float,
    eps: float,
    out: F32,
) -> None:
    rows, kv_heads = q.shape[0], keys.shape[1]
    for row in range(rows):
        position = positions[row]
        block = table[slots[row], position // BLOCK % table.shape[1]]
        _append(
            k,
            v,
            key_taps,
            value_taps,
            key_history,
            value_history,
            k_norm,
            keys,
            values,
            row,
            slots[row],
            position,
            before[row],
            block,
            eps,
        )
    remember(k, key_history, slots, positions, after)
    remember(v, value_history, slots, positions, after)
    # Neighbouring items share a key and value head, so a thread's rows find its blocks in their cache.
    for item in prange(rows * kv_heads):
        kv_head, row = item // rows, item % rows
        position = positions[row]
        scale = 1.0
        if floor > 0.0:
            scale = 1.0 + alpha * math.log(max((position + 1) / floor, 1.0))
        _attend_group(
            q,
            r,
            q_norm,
            bias,
            extent,
            keys,
            values,
            table,
            row,
            kv_head,
            slots[row],
            position,
            window,
            np.float32(scale),
            eps,
            out,
        )


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes of one layer's attention.

    Args:
        heads: query heads; a multiple of `kv_heads`.
        kv_heads: key and value heads.
        dim: numbers a head.
        ranks: numbers a head from which the relative bias is mixed.
        extent: distances 0 to extent - 1 have a bias.
        window: positions that a row sees, its own among them; None for all.
        taps: of the convolutions over keys and values.
    """

    heads: int
    kv_heads: int
    dim: int
    ranks: int
    extent: int
    window: int | None
    taps: int

    @property
    def stored_dim(self) -> int:
        """Numbers that a value takes in a block: `dim` up to a whole vector."""
        return -(-self.dim // LANES) * LANES

    def block_bytes(self) -> int:
        """Memory of one block's keys and values."""
        return 4 * BLOCK * self.kv_heads * (self.dim + self.stored_dim)

    def history_bytes(self, rewind: int) -> int:
        """Memory of one slot's inputs to both convolutions."""
        return 2 * 4 * (self.taps - 1 + rewind) * self.kv_heads * self.dim


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's small weights, all float32.

    Args:
        q_norm: [dim].
        k_norm: [dim].
        k_conv: [kv_heads * dim, taps].
        v_conv: [kv_heads * dim, taps].
        profiles: [ranks, extent]: bias by distance, of which each head of each row mixes its own.
    """

    q_norm: F32
    k_norm: F32
    k_conv: F32
    v_conv: F32
    profiles: F32


class Attention:
    """One layer's attention together with its keys, values and histories for every slot.

    `score(p, j) = tau * (norm(q) . norm(k_j) / dim + r . profiles[:, p - j])`, with `tau = 1 + alpha *
    ln(max((p + 1) / floor, 1))`.

    Args:
        sizes: of this layer.
        weights: of this layer.
        table: int32 [slots, n], the blocks of each slot; shared with other layers of the same kind.
        rewind: positions by which a stream may go back.
        eps: of the norms of queries and keys.
        log_scaling: floor and alpha; None for no scaling.

    Raises:
        CascadiaError: a weight has another shape.
    """

    def __init__(
        self,
        sizes: AttentionSizes,
        weights: AttentionWeights,
        table: I32,
        rewind: int,
        eps: float,
        log_scaling: tuple[float, float] | None,
    ) -> None:
        width = sizes.kv_heads * sizes.dim
        expect("q_norm", weights.q_norm, (sizes.dim,))
        expect("k_norm", weights.k_norm, (sizes.dim,))
        expect("k_conv", weights.k_conv, (width, sizes.taps))
        expect("v_conv", weights.v_conv, (width, sizes.taps))
        expect("rel_proj", weights.profiles, (sizes.ranks, sizes.extent))
        slots, blocks, depth = table.shape[0], int(table.max()) + 1, sizes.taps - 1 + rewind
        self._sizes = sizes
        self._window = sizes.window or 0
        self._scaling = (0.0, 0.0) if log_scaling is None else log_scaling
        self._eps = eps
        self._table = table
        self._keys = np.empty((blocks, sizes.kv_heads, sizes.dim, BLOCK), np.float32)
        self._values = np.empty((blocks, sizes.kv_heads, BLOCK, sizes.stored_dim), np.float32)
        for array in (self._keys, self._values):
            array.fill(0.0)
        self._state = (
            taps_first(weights.k_conv),
            taps_first(weights.v_conv),
            new_history(slots, depth, width),
            new_history(slots, depth, width),
            np.ascontiguousarray(weights.q_norm),
            np.ascontiguousarray(weights.k_norm),
            np.ascontiguousarray(np.pad(weights.profiles[:, ::-1], ((0, 0), (BLOCK, BLOCK)))),
            sizes.extent,
            self._keys,
            self._values,
            table,
        )

    def __call__(self, rows: RowTable, q: F32, k: F32, v: F32, r: F32, out: F32) -> None:
        """Append the rows' keys and values, then attend.

        Args:
            rows: the frame's rows.
            q: float32 [rows, heads * dim], as projected.
            k: float32 [rows, kv_heads * dim], as projected.
            v: float32 [rows, kv_heads * dim], as projected.
            r: float32 [rows, heads * ranks], as projected.
            out: float32 [rows, heads * dim], what goes into the output projection.
        """
        count, sizes = len(rows), self._sizes
        expect("q", q, (count, sizes.heads * sizes.dim))
        expect("k", k, (count, sizes.kv_heads * sizes.dim))
        expect("v", v, (count, sizes.kv_heads * sizes.dim))
        expect("r", r, (count, sizes.heads * sizes.ranks))
        expect("out", out, q.shape)
        _attend(
            q,
            k,
            v,
            r,
            *self._state,
            rows.slots,
            rows.positions,
            rows.before,
            rows.after,
            self._window,
            *self._scaling,
            self._eps,
            out,
        )
