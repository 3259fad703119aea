"""Rotary attention with grouped queries: biases, norms a head, turning and windows in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import prange

from cascadia_p2p.compiled.compiling import part, threads, twin_kernels, warm_up
from cascadia_p2p.compiled.simd import F32, LANES
from cascadia_p2p.engine.kernels.attention_items import (
    attend_tile,
    merge_item,
    planned,
    queries_at,
    work_numbers,
)
from cascadia_p2p.engine.kernels.blocks import (
    BLOCK,
    NUMBA_NUMBERS,
    Blocks,
    Storage,
    block_bytes,
    new_blocks,
    put_key,
    put_value,
    stored_dim,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.frame import ATTENTION, Record, put_addresses
from cascadia_p2p.engine.kernels.rotary import biased, turn
from cascadia_p2p.engine.kernels.rows import I32, RowTable


@part
def append_head(
    k: F32,
    v: F32,
    k_bias: F32,
    v_bias: F32,
    k_norm: F32,
    eps: float,
    cosines: F32,
    sines: F32,
    keys: Blocks,
    values: Blocks,
    table: I32,
    slots: I32,
    positions: I32,
    row: int,
    head: int,
) -> None:
    """Turn one head's key of a row, and put key and value into their block."""
    kv_heads, dim = keys.shape[1], keys.shape[2]
    position = positions[row]
    block, offset = table[slots[row], position // BLOCK % table.shape[1]], position % BLOCK
    scratch, at = np.empty(dim + LANES, np.float32), (row * kv_heads + head) * dim
    biased(k, at, k_bias, head * dim, dim, scratch, 0)
    turn(scratch, 0, k_norm, eps, cosines, sines, row, dim, np.float32(1.0))
    put_key(scratch, 0, keys, block, head, offset)
    biased(v, at, v_bias, head * dim, dim, scratch, 0)
    put_value(scratch, 0, dim, values, block, head, offset)


@part
def attend_item(
    items: I32,
    item: int,
    q: F32,
    q_bias: F32,
    q_norm: F32,
    eps: float,
    cosines: F32,
    sines: F32,
    keys: Blocks,
    values: Blocks,
    table: I32,
    slots: I32,
    positions: I32,
    window: int,
    scale: float,
    partials: F32,
    work: F32,
    out: F32,
) -> None:
    """Turn and scale the queries of a planned item, and attend with them."""
    kv_head, first, rows = items[item, 0], items[item, 1], items[item, 2]
    dim, group = keys.shape[2], q.shape[1] // (keys.shape[1] * keys.shape[2])
    query = queries_at(work)
    for row in range(first, first + rows):
        for head in range(kv_head * group, (kv_head + 1) * group):
            biased(q, row * q.shape[1] + head * dim, q_bias, head * dim, dim, work, query)
            turn(work, query, q_norm, eps, cosines, sines, row, dim, np.float32(scale))
            query += dim
    attend_tile(
        items,
        item,
        group,
        np.empty((0, 0), np.float32),
        0,
        keys,
        values,
        table,
        slots[first],
        positions[first],
        window,
        partials,
        work,
        out,
    )


def _attend(
    q: F32,
    k: F32,
    v: F32,
    q_bias: F32,
    k_bias: F32,
    v_bias: F32,
    q_norm: F32,
    k_norm: F32,
    eps: float,
    keys: Blocks,
    values: Blocks,
    table: I32,
    window: int,
    scale: float,
    cosines: F32,
    sines: F32,
    slots: I32,
    positions: I32,
    after: I32,
    workers: int,
    out: F32,
) -> None:
    rows, kv_heads, dim, stored = q.shape[0], keys.shape[1], keys.shape[2], values.shape[3]
    group = q.shape[1] // (kv_heads * dim)
    for i in prange(rows * kv_heads):
        append_head(
            k,
            v,
            k_bias,
            v_bias,
            k_norm,
            eps,
            cosines,
            sines,
            keys,
            values,
            table,
            slots,
            positions,
            i // kv_heads,
            i % kv_heads,
        )
    count, merging, items, merges, partials = planned(
        positions, after, kv_heads, group, window, workers, stored
    )
    for i in prange(count):
        attend_item(
            items,
            i,
            q,
            q_bias,
            q_norm,
            eps,
            cosines,
            sines,
            keys,
            values,
            table,
            slots,
            positions,
            window,
            scale,
            partials,
            np.empty(work_numbers(group, dim, stored, 0), np.float32),
            out,
        )
    for i in prange(merging):
        work = np.empty(work_numbers(group, dim, stored, 0), np.float32)
        merge_item(merges, i, group, kv_heads, dim, stored, positions, window, partials, work, out)


@cache
def _kernel(storage: Storage) -> Callable[..., None]:
    number = NUMBA_NUMBERS[storage]
    signature = (
        "(float32[:,::1], float32[:,::1], float32[:,::1], float32[::1], float32[::1], float32[::1], "
        f"float32[::1], float32[::1], float64, {number}[:,:,:,::1], {number}[:,:,:,::1], int32[:,::1], "
        "int64, float64, float32[:,::1], float32[:,::1], int32[::1], int32[::1], int32[::1], int64, "
        "float32[:,::1])"
    )
    return twin_kernels(signature, f"rotary_{storage}")(_attend)


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

    def block_bytes(self, storage: Storage = "f32") -> int:
        """Memory of one block's keys and values."""
        return block_bytes(self.kv_heads, self.dim, storage)


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
        storage: how keys and values are kept.
        alone: whether it is called by itself, rather than as steps of a stage's program.
        blocks: in the pool that the table's numbers are of; None for as many as the table names.

    Raises:
        CascadiaError: a weight has another shape.
    """

    def __init__(
        self,
        sizes: RotarySizes,
        weights: RotaryWeights,
        table: I32,
        eps: float,
        storage: Storage = "f32",
        alone: bool = True,
        blocks: int | None = None,
    ) -> None:
        widths = {"q_bias": sizes.heads, "k_bias": sizes.kv_heads, "v_bias": sizes.kv_heads}
        shapes = {name: heads * sizes.dim for name, heads in widths.items()}
        for name, length in (shapes | {"q_norm": sizes.dim, "k_norm": sizes.dim}).items():
            array: F32 = getattr(weights, name)
            if array.size:
                expect(name, array, (length,))
        self._sizes = sizes
        blocks = int(table.max()) + 1 if blocks is None else blocks
        self._keys, self._values = new_blocks(blocks, sizes.kv_heads, sizes.dim, storage)
        self._run = _kernel(storage) if alone else None
        # Kernels that only some stages need are compiled here, not at the first frame.
        warm_up()
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

    def record(self) -> Record:
        """`ATTENTION` [1] without the addresses of rows; good for as long as this lives."""
        q_bias, k_bias, v_bias, q_norm, k_norm, eps, keys, values, table, window, scale = self._state
        sizes, record = self._sizes, np.zeros(1, ATTENTION)
        for name in ("heads", "kv_heads", "dim"):
            record[name] = getattr(sizes, name)
        record["stored"], record["window"] = sizes.stored_dim, window
        small = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias, "q_norm": q_norm, "k_norm": k_norm}
        for name, array in small.items():
            record[name] = array.ctypes.data if array.size else 0
        put_addresses(record, {"keys": keys, "values": values, "table": table})
        record["slots"], record["ring"] = table.shape
        record["blocks"] = len(keys)
        record["eps"], record["scale"] = eps, scale
        return record

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
        assert self._run is not None, "its program has to call it"
        self._run(
            q,
            k,
            v,
            *self._state,
            cosines,
            sines,
            rows.slots,
            rows.positions,
            rows.after,
            threads(),
            out,
        )
