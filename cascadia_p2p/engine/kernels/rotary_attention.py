"""Rotary attention with grouped queries: biases, norms a head, turning and windows in one kernel."""

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
from cascadia_p2p.engine.kernels.rotary import biased, turn
from cascadia_p2p.engine.kernels.rows import I32, RowTable


@part
def _append_turned(
    k: F32,
    v: F32,
    k_bias: F32,
    v_bias: F32,
    k_norm: F32,
    eps: float,
    cosines: F32,
    sines: F32,
    keys: F32,
    values: F32,
    row: int,
    offset: int,
    block: int,
) -> None:
    """Put one row's keys, turned, and values into their block."""
    kv_heads, dim = keys.shape[1], keys.shape[2]
    scratch = np.empty(kv_heads * dim + LANES, np.float32)
    for head in range(kv_heads):
        biased(k, (row * kv_heads + head) * dim, k_bias, head * dim, dim, scratch, head * dim)
        turn(scratch, head * dim, k_norm, eps, cosines, sines, row, dim, 1.0)
        for d in range(dim):
            keys[block, head, d, offset] = scratch[head * dim + d]
    for head in range(kv_heads):
        biased(v, (row * kv_heads + head) * dim, v_bias, head * dim, dim, scratch, head * dim)
        put_value(scratch, values, block, head, offset, dim)


@part
def _attend_turned(
    q: F32,
    q_bias: F32,
    q_norm: F32,
    eps: float,
    cosines: F32,
    sines: F32,
    keys: F32,
    values: F32,
    table: I32,
    row: int,
    kv_head: int,
    slot: int,
    position: int,
    window: int,
    scale: Real,
    out: F32,
) -> None:
    """All query heads of one row that share a key and value head."""
    kv_heads, dim, stored = keys.shape[1], keys.shape[2], values.shape[3]
    group = q.shape[1] // (kv_heads * dim)
    # Heads are taken in pairs; an odd last one has a partner of zeros.
    heads = group + group % 2
    queries = np.zeros((heads, dim), np.float32)
    weights = np.empty((heads, BLOCK), np.float32)
    sums = np.zeros((heads, stored), np.float32)
    state = np.zeros((heads, 4), np.float32)
    no_bias = np.empty((heads, 0), np.float32)
    first = kv_head * group
    for h in range(group):
        at = (first + h) * dim
        biased(q, row * q.shape[1] + at, q_bias, at, dim, queries, h * dim)
        turn(queries, h * dim, q_norm, eps, cosines, sines, row, dim, scale)
    attend_blocks(
        queries,
        no_bias,
        no_bias,
        0,
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
        at = row * q.shape[1] + (first + h) * dim
        for d in range(0, dim, LANES):
            store_part(out, at + d, div(load(sums, h * stored + d), splat(state[h, 1])), dim - d)


@twin_kernels(
    "(float32[:,::1], float32[:,::1], float32[:,::1], float32[::1], float32[::1], float32[::1], "
    "float32[::1], float32[::1], float64, float32[:,:,:,::1], float32[:,:,:,::1], int32[:,::1], "
    "int64, float64, float32[:,::1], float32[:,::1], int32[::1], int32[::1], float32[:,::1])"
)
def _rotary_attention(
    q: F32,
    k: F32,
    v: F32,
    q_bias: F32,
    k_bias: F32,
    v_bias: F32,
    q_norm: F32,
    k_norm: F32,
    eps: float,
    keys: F32,
    values: F32,
    table: I32,
    window: int,
    scale: float,
    cosines: F32,
    sines: F32,
    slots: I32,
    positions: I32,
    out: F32,
) -> None:
    rows, kv_heads = q.shape[0], keys.shape[1]
    for row in range(rows):
        position = positions[row]
        block = table[slots[row], position // BLOCK % table.shape[1]]
        offset = position % BLOCK
        _append_turned(k, v, k_bias, v_bias, k_norm, eps, cosines, sines, keys, values, row, offset, block)
    # Neighbouring items share a key and value head, so a thread's rows find its blocks in their cache.
    for item in prange(rows * kv_heads):
        kv_head, row = item // rows, item % rows
        _attend_turned(
            q,
            q_bias,
            q_norm,
            eps,
            cosines,
            sines,
            keys,
            values,
            table,
            row,
            kv_head,
            slots[row],
            positions[row],
            window,
            np.float32(scale),
            out,
        )


@dataclass(frozen=True, slots=True)
class RotarySizes:
    """The sizes of one layer's attention.

    Args:
        heads: query heads; a multiple of `kv_heads`.
        kv_heads: key and value heads.
        dim: numbers a head.
        pairs: pairs of numbers of a head that turn, at most dim / 2.
        window: positions that a row sees, its own among them; None for all.
    """

    heads: int
    kv_heads: int
    dim: int
    pairs: int
    window: int | None

    @property
    def stored_dim(self) -> int:
        """Numbers that a value takes in a block: `dim` up to a whole vector."""
        return stored_dim(self.dim)

    def block_bytes(self) -> int:
        """Memory of one block's keys and values."""
        return block_bytes(self.kv_heads, self.dim)


@dataclass(frozen=True, slots=True)
class RotaryWeights:
    """One layer's small weights, all float32; those that a model does not have are empty.

    Args:
        q_bias: [heads * dim].
        k_bias: [kv_heads * dim].
        v_bias: [kv_heads * dim].
        q_norm: [dim].
        k_norm: [dim].
    """

    q_bias: F32
    k_bias: F32
    v_bias: F32
    q_norm: F32
    k_norm: F32


class RotaryAttention:
    """One layer's attention together with its keys and values for every slot.

    `score(p, j) = turn(norm(q + b), p) . turn(norm(k_j + b), j) / sqrt(dim)`.

    Args:
        sizes: of this layer.
        weights: of this layer.
        table: int32 [slots, n], the blocks of each slot; shared with other layers of the same window.
        eps: of the norms of queries and keys.

    Raises:
        CascadiaError: a weight has another shape.
    """

    def __init__(self, sizes: RotarySizes, weights: RotaryWeights, table: I32, eps: float) -> None:
        widths = {"q_bias": sizes.heads, "k_bias": sizes.kv_heads, "v_bias": sizes.kv_heads}
        shapes = {name: heads * sizes.dim for name, heads in widths.items()}
        for name, length in (shapes | {"q_norm": sizes.dim, "k_norm": sizes.dim}).items():
            array: F32 = getattr(weights, name)
            if array.size:
                expect(name, array, (length,))
        self._sizes = sizes
        self._keys, self._values = new_blocks(int(table.max()) + 1, sizes.kv_heads, sizes.dim)
        self._state = (
            weights.q_bias,
            weights.k_bias,
            weights.v_bias,
            weights.q_norm,
            weights.k_norm,
            eps,
            self._keys,
            self._values,
            table,
            sizes.window or 0,
            1.0 / math.sqrt(sizes.dim),
        )

    def __call__(self, rows: RowTable, q: F32, k: F32, v: F32, cosines: F32, sines: F32, out: F32) -> None:
        """Append the rows' keys and values, then attend.

        Args:
            rows: the frame's rows.
            q: float32 [rows, heads * dim], as projected.
            k: float32 [rows, kv_heads * dim], as projected.
            v: float32 [rows, kv_heads * dim], as projected.
            cosines: float32 [rows, pairs], of the rows' angles.
            sines: float32 [rows, pairs].
            out: float32 [rows, heads * dim], what goes into the output projection.
        """
        count, sizes = len(rows), self._sizes
        expect("q", q, (count, sizes.heads * sizes.dim))
        expect("k", k, (count, sizes.kv_heads * sizes.dim))
        expect("v", v, (count, sizes.kv_heads * sizes.dim))
        expect("cosines", cosines, (count, sizes.pairs))
        expect("sines", sines, (count, sizes.pairs))
        expect("out", out, q.shape)
        _rotary_attention(q, k, v, *self._state, cosines, sines, rows.slots, rows.positions, out)
