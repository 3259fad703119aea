"""Inkling's attention: convolved keys and values, norms, relative bias, window and log scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import prange

from cascadia_p2p.compiled.compiling import part, twin_kernels
from cascadia_p2p.compiled.simd import F32, LANES, Real, div, load, splat, store_part
from cascadia_p2p.engine.kernels.blocks import (
    BLOCK,
    attend_blocks,
    block_bytes,
    new_blocks,
    put_value,
    stored_dim,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.convolution import convolved, new_history, remember, taps_first
from cascadia_p2p.engine.kernels.norms import inverse_rms, scale_row
from cascadia_p2p.engine.kernels.rows import I32, RowTable


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
    kv_heads, dim = keys.shape[1], k_norm.shape[0]
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
        put_value(scratch, values, block, head, offset, dim)


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
    attend_blocks(
        queries,
        relative,
        bias,
        extent,
        keys,
        values,
        table,
        kv_head,
        slot,
        position,
        window,
        state,
        weights,
        sums,
    )
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
        return stored_dim(self.dim)

    def block_bytes(self) -> int:
        """Memory of one block's keys and values."""
        return block_bytes(self.kv_heads, self.dim)

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
        self._keys, self._values = new_blocks(blocks, sizes.kv_heads, sizes.dim)
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
