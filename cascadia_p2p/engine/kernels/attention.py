"""Inkling's attention: convolved keys and values, norms, relative bias, window and log scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import prange

from cascadia_p2p.compiled.compiling import part, threads, twin_kernels, warm_up
from cascadia_p2p.compiled.simd import F32, LANES, store_part
from cascadia_p2p.engine.kernels.attention_items import (
    attend_tile,
    merge_item,
    planned,
    queries_at,
    relative_at,
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
from cascadia_p2p.engine.kernels.convolution import convolved, new_history, remember, taps_first
from cascadia_p2p.engine.kernels.frame import ATTENTION, Record, put_addresses
from cascadia_p2p.engine.kernels.norms import inverse_rms, scale_row
from cascadia_p2p.engine.kernels.rows import I32, RowTable


@part
def append_head(
    k: F32,
    v: F32,
    key_taps: F32,
    value_taps: F32,
    key_history: F32,
    value_history: F32,
    k_norm: F32,
    keys: Blocks,
    values: Blocks,
    table: I32,
    slots: I32,
    positions: I32,
    before: I32,
    row: int,
    head: int,
    eps: float,
) -> None:
    """Convolve one head's key and value of a row, normalise the key, and put both into their block."""
    dim, depth = k_norm.shape[0], key_history.shape[1]
    slot, position = slots[row], positions[row]
    block, offset = table[slot, position // BLOCK % table.shape[1]], position % BLOCK
    ring, start = slot * depth + position % depth, head * dim
    scratch = np.empty(dim + LANES, np.float32)
    for c in range(0, dim, LANES):
        new = convolved(k, key_history, key_taps, row, ring, position, before[row], start + c)
        store_part(scratch, c, new, dim - c)
    scale_row(scratch, 0, k_norm, inverse_rms(scratch, 0, dim, eps), 1.0, scratch, 0)
    put_key(scratch, 0, keys, block, head, offset)
    for c in range(0, dim, LANES):
        new = convolved(v, value_history, value_taps, row, ring, position, before[row], start + c)
        store_part(scratch, c, new, dim - c)
    put_value(scratch, 0, dim, values, block, head, offset)


@part
def attend_item(
    items: I32,
    item: int,
    q: F32,
    r: F32,
    q_norm: F32,
    bias: F32,
    extent: int,
    keys: Blocks,
    values: Blocks,
    table: I32,
    slots: I32,
    positions: I32,
    window: int,
    floor: float,
    alpha: float,
    eps: float,
    partials: F32,
    work: F32,
    out: F32,
) -> None:
    """Normalise and scale the queries of a planned item, and attend with them.

    `floor` and `alpha` are those of log scaling, 0 for none; `bias` is as `attend_tile` takes it.
    """
    kv_head, first, rows = items[item, 0], items[item, 1], items[item, 2]
    dim, ranks, group = q_norm.shape[0], bias.shape[0], q.shape[1] // (keys.shape[1] * q_norm.shape[0])
    query, relative = queries_at(work), relative_at(work, rows * group, dim)
    for row in range(first, first + rows):
        scale = np.float32(1.0)
        if floor > 0.0:
            scale = np.float32(1.0 + alpha * math.log(max((positions[row] + 1) / floor, 1.0)))
        for head in range(kv_head * group, (kv_head + 1) * group):
            at = row * q.shape[1] + head * dim
            scale_row(q, at, q_norm, inverse_rms(q, at, dim, eps), np.float32(dim), work, query)
            for d in range(query, query + dim):
                work[d] *= scale
            for c in range(ranks):
                work[relative + c] = r[row, head * ranks + c] * scale
            query += dim
            relative += ranks
    attend_tile(
        items,
        item,
        group,
        bias,
        extent,
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
    r: F32,
    key_taps: F32,
    value_taps: F32,
    key_history: F32,
    value_history: F32,
    q_norm: F32,
    k_norm: F32,
    bias: F32,
    extent: int,
    keys: Blocks,
    values: Blocks,
    table: I32,
    slots: I32,
    positions: I32,
    before: I32,
    after: I32,
    window: int,
    floor: float,
    alpha: float,
    eps: float,
    workers: int,
    out: F32,
) -> None:
    rows, kv_heads, dim, stored = q.shape[0], keys.shape[1], q_norm.shape[0], values.shape[3]
    group, ranks = q.shape[1] // (kv_heads * dim), bias.shape[0]
    for i in prange(rows * kv_heads):
        append_head(
            k,
            v,
            key_taps,
            value_taps,
            key_history,
            value_history,
            k_norm,
            keys,
            values,
            table,
            slots,
            positions,
            before,
            i // kv_heads,
            i % kv_heads,
            eps,
        )
    remember(k, key_history, slots, positions, after)
    remember(v, value_history, slots, positions, after)
    count, merging, items, merges, partials = planned(
        positions, after, kv_heads, group, window, workers, stored
    )
    for i in prange(count):
        attend_item(
            items,
            i,
            q,
            r,
            q_norm,
            bias,
            extent,
            keys,
            values,
            table,
            slots,
            positions,
            window,
            floor,
            alpha,
            eps,
            partials,
            np.empty(work_numbers(group, dim, stored, ranks), np.float32),
            out,
        )
    for i in prange(merging):
        work = np.empty(work_numbers(group, dim, stored, 0), np.float32)
        merge_item(merges, i, group, kv_heads, dim, stored, positions, window, partials, work, out)


@cache
def _kernel(storage: Storage) -> Callable[..., None]:
    number = NUMBA_NUMBERS[storage]
    signature = (
        "(float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], "
        "float32[:,:,::1], float32[:,:,::1], float32[::1], float32[::1], float32[:,::1], int64, "
        f"{number}[:,:,:,::1], {number}[:,:,:,::1], int32[:,::1], int32[::1], int32[::1], int32[::1], "
        "int32[::1], int64, float64, float64, float64, int64, float32[:,::1])"
    )
    return twin_kernels(signature, storage)(_attend)


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

    def block_bytes(self, storage: Storage = "f32") -> int:
        """Memory of one block's keys and values."""
        return block_bytes(self.kv_heads, self.dim, storage)

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
        storage: how keys and values are kept.
        alone: whether it is called by itself, rather than as steps of a stage's program.
        blocks: in the pool that the table's numbers are of; None for as many as the table names.

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
        storage: Storage = "f32",
        alone: bool = True,
        blocks: int | None = None,
    ) -> None:
        width = sizes.kv_heads * sizes.dim
        expect("q_norm", weights.q_norm, (sizes.dim,))
        expect("k_norm", weights.k_norm, (sizes.dim,))
        expect("k_conv", weights.k_conv, (width, sizes.taps))
        expect("v_conv", weights.v_conv, (width, sizes.taps))
        expect("rel_proj", weights.profiles, (sizes.ranks, sizes.extent))
        slots, depth = table.shape[0], sizes.taps - 1 + rewind
        blocks = int(table.max()) + 1 if blocks is None else blocks
        self._sizes = sizes
        self._window = sizes.window or 0
        self._scaling = (0.0, 0.0) if log_scaling is None else log_scaling
        self._eps = eps
        self._table = table
        self._keys, self._values = new_blocks(blocks, sizes.kv_heads, sizes.dim, storage)
        self._run = _kernel(storage) if alone else None
        # Kernels that only some stages need are compiled here, not at the first frame.
        warm_up()
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

    @property
    def histories(self) -> tuple[F32, F32]:
        """The inputs of both convolutions; float32 [slots, depth, channels], position p at p % depth."""
        _, _, keys, values, *_ = self._state
        return keys, values

    def record(self) -> Record:
        """`ATTENTION` [1] without the addresses of rows; good for as long as this lives."""
        key_taps, value_taps, key_history, value_history, q_norm, k_norm, bias, *_ = self._state
        sizes, record = self._sizes, np.zeros(1, ATTENTION)
        for name in ("heads", "kv_heads", "dim", "ranks", "extent", "taps"):
            record[name] = getattr(sizes, name)
        record["stored"], record["window"] = sizes.stored_dim, self._window
        addressed = {
            "key_taps": key_taps,
            "value_taps": value_taps,
            "key_history": key_history,
            "value_history": value_history,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "bias": bias,
            "keys": self._keys,
            "values": self._values,
            "table": self._table,
        }
        put_addresses(record, addressed)
        record["slots"], record["depth"], _ = key_history.shape
        record["blocks"], record["ring"] = len(self._keys), self._table.shape[1]
        record["floor"], record["alpha"] = self._scaling
        record["eps"] = self._eps
        return record

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
        assert self._run is not None, "its program has to call it"
        self._run(
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
            threads(),
            out,
        )
