"""Attention of a frame as items that any number of threads can take in any order.

The protocol, for a kernel of any form; arrays have to be C-contiguous, and every item is independent of the
others of its step:

1. **Append** the new keys and values, one call of the family's `append_head` for each row and key and value
   head; where there are convolutions, then `remember` for their inputs. No row may attend before all rows of
   the frame are appended.
2. **Plan**, on one thread: `count, merging = plan_items(...)` fills `items` and `merges`, int32 [n, 8] with n
   from `most_items`. A plan depends on positions, heads and window only, so layers that agree in these share
   it. It needs no keys and may be made before step 1.
3. **Attend**: the family's `attend_item(items, i, ...)` for i in 0 to count - 1. Each thread has its own
   `work`, float32 of `work_numbers(...)`; `partials`, float32 of any length, is shared by all. Items whose
   segments are not apart write their rows of `out`.
4. **Merge**, if there is anything: `merge_item(merges, i, ...)` for i in 0 to merging - 1 writes the rest.

Only what positions decide enters a result, so `workers` and the length of `partials` may be anything.

An item, and a merge, is [key and value head, first row, rows, first block, block behind the last, first
record in `partials` or -1, 0, 0].
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cascadia_p2p.compiled.compiling import part
from cascadia_p2p.compiled.simd import F32, LANES
from cascadia_p2p.engine.kernels.blocks import BLOCK, Blocks, address, fetch
from cascadia_p2p.engine.kernels.query_tiles import (
    SEGMENT_BLOCKS,
    add_block,
    clear,
    copy_record,
    finish,
    fold,
    padded,
    record_numbers,
    score_block,
)
from cascadia_p2p.engine.kernels.rows import I32

ITEM: Final = 8
"""Numbers of an item."""

PARTIAL_NUMBERS: Final = 4 * 2**20
"""Numbers for segments apart that a kernel makes room for where it may need them; any number would do."""

_FLOAT: Final = 4
"""Bytes of a number."""

_QUERIES: Final = 64
"""Query vectors of a tile, as long as a row does not have more."""

_FEW_QUERIES: Final = 16
"""Below so many query vectors reading keys costs more than using them."""

_ITEMS_A_WORKER: Final = 4
"""Items that a worker should find, so that none waits long for the last."""


@part
def most_items(rows: int, kv_heads: int, group: int, partials: int, stored: int) -> int:
    """Rows that `items` needs, with `partials` numbers for segments apart; `merges` needs no more."""
    return rows * kv_heads + partials // (padded(group) * record_numbers(stored))


@part
def work_numbers(group: int, dim: int, stored: int, ranks: int) -> int:
    """Numbers of one thread's memory."""
    queries = padded(max(group, _QUERIES)) + 4
    return queries * (dim + ranks + BLOCK + 2 * record_numbers(stored)) + BLOCK * (dim + stored) + 2 * LANES


@part
def _blocks_seen(position: int, last: int, window: int) -> tuple[int, int]:
    """The first block that rows at `position` to `last` see, and the one behind the last."""
    first = max(0, position - window + 1) if window > 0 else 0
    return first // BLOCK, last // BLOCK + 1


@part
def may_split(positions: I32, window: int) -> bool:
    """Whether some row sees more than one segment, so that a plan can make use of `partials`."""
    for row in range(positions.shape[0]):
        first, end = _blocks_seen(positions[row], positions[row], window)
        if end - first > SEGMENT_BLOCKS:
            return True
    return False


@part
def _tile_rows(positions: I32, kv_heads: int, group: int, window: int, workers: int) -> int:
    """Rows of a tile: as many as are good for arithmetic, fewer where workers would find nothing to do."""
    rows, most = positions.shape[0], max(1, _QUERIES // group)
    blocks = 1
    for row in range(rows):
        first, end = _blocks_seen(positions[row], positions[row], window)
        blocks = max(blocks, end - first)
    segments = (blocks + SEGMENT_BLOCKS - 1) // SEGMENT_BLOCKS
    while most > 1 and most * group > _FEW_QUERIES:
        if (rows + most - 1) // most * kv_heads * segments >= workers:
            break
        most = (most + 1) // 2
    return most


@part
def plan_items(
    positions: I32,
    after: I32,
    kv_heads: int,
    group: int,
    window: int,
    workers: int,
    partials: int,
    stored: int,
    items: I32,
    merges: I32,
) -> tuple[int, int]:
    """Divide a frame's attention into items; the numbers of items and of merges.

    Args:
        positions: int32 [rows], of the frame's rows.
        after: int32 [rows], rows of the same slot behind each.
        kv_heads: key and value heads.
        group: query heads of each.
        window: positions that a row sees; 0 for all.
        workers: threads that will take items.
        partials: numbers that `partials` holds; 0 keeps all segments together.
        stored: numbers of a stored value.
        items: int32 [most_items(...), 8], comes out.
        merges: the same.
    """
    rows, size = positions.shape[0], record_numbers(stored)
    most = _tile_rows(positions, kv_heads, group, window, workers)
    wanted = _ITEMS_A_WORKER * workers if workers > 1 else 0
    apart = (rows + most - 1) // most * kv_heads < wanted
    count = merging = used = 0
    for kv_head in range(kv_heads):
        row = 0
        while row < rows:
            left = after[row] + 1
            tiles = (left + most - 1) // most
            taken = (left + tiles - 1) // tiles
            first, end = _blocks_seen(positions[row], positions[row + taken - 1], window)
            segments = (end - 1) // SEGMENT_BLOCKS - first // SEGMENT_BLOCKS + 1
            records = padded(taken * group)
            partial, table, place = -1, items, count
            if apart and end - first > SEGMENT_BLOCKS and (used + records * segments) * size <= partials:
                partial, table, place = used, merges, merging
            table[place, 0], table[place, 1], table[place, 2] = kv_head, row, taken
            table[place, 3], table[place, 4], table[place, 5] = first, end, partial
            if partial < 0:
                count += 1
            else:
                merging += 1
                used += records * segments
                at = first
                while at < end:
                    stop = min(end, (at // SEGMENT_BLOCKS + 1) * SEGMENT_BLOCKS)
                    items[count, 0], items[count, 1], items[count, 2] = kv_head, row, taken
                    items[count, 3], items[count, 4], items[count, 5] = at, stop, partial
                    partial += records
                    at = stop
                    count += 1
            row += taken
    return count, merging


@part
def queries_at(work: F32) -> int:
    """Where in `work` an item's query vectors [rows * group, dim] have to stand when it attends."""
    return (-address(work) // 4) % LANES


@part
def relative_at(work: F32, queries: int, dim: int) -> int:
    """Where their mixing numbers [rows * group, ranks] have to stand."""
    return queries_at(work) + (padded(queries) + 4) * dim


@part
def attend_tile(
    items: I32,
    item: int,
    group: int,
    bias: F32,
    extent: int,
    keys: Blocks,
    values: Blocks,
    table: I32,
    slot: int,
    position: int,
    window: int,
    partials: F32,
    work: F32,
    out: F32,
) -> None:
    """Attend with the query vectors that stand in `work`.

    Args:
        items: of `plan_items`.
        item: which.
        group: query heads of a key and value head.
        bias: float32 [ranks, extent + 128] by falling distance, a block of zeros on either side; no ranks,
            no bias.
        extent: distances that have a bias.
        keys: [blocks, kv_heads, dim, 64].
        values: [blocks, kv_heads, 64, stored].
        table: int32 [slots, n], the blocks of each slot.
        slot: of the item's rows.
        position: of its first row.
        window: positions that a row sees; 0 for all.
        partials: float32, for items whose segments are apart.
        work: float32, this thread's.
        out: float32 [rows, heads * dim].
    """
    kv_heads, dim, stored, ring = keys.shape[1], keys.shape[2], values.shape[3], table.shape[1]
    kv_head, rows, first, end = items[item, 0], items[item, 2], items[item, 3], items[item, 4]
    partial, count, size, ranks = items[item, 5], rows * group, record_numbers(stored), bias.shape[0]
    query, memory, room = queries_at(work), address(work), padded(count) + 4
    relative, hop = relative_at(work, count, dim), LANES * keys.itemsize // _FLOAT
    scores = relative + (room * ranks + LANES - 1) // LANES * LANES
    run = scores + room * BLOCK
    folded = run + room * size
    wide_keys = memory + (folded + room * size) * _FLOAT
    wide_values = wide_keys + dim * BLOCK * _FLOAT
    for h in range(query + count * dim, query + padded(count) * dim):
        work[h] = 0.0
    records, base = memory, run
    if partial >= 0:
        records, base = address(partials), partial * size
    several = partial < 0 and (end - 1) // SEGMENT_BLOCKS > first // SEGMENT_BLOCKS
    clear(records, base, padded(count), stored)
    for b in range(first, end):
        block = np.int64(table[slot, b % ring]) * kv_heads + kv_head
        following = np.int64(table[slot, (b + 1) % ring]) * kv_heads + kv_head
        score_block(
            memory,
            query,
            relative,
            scores,
            dim,
            ranks,
            address(bias),
            extent,
            group,
            rows,
            position,
            window,
            b * BLOCK,
            fetch(keys, block * dim * BLOCK, dim * BLOCK, wide_keys),
            address(keys) + following * dim * BLOCK * keys.itemsize,
            hop,
        )
        add_block(
            memory,
            scores,
            group,
            rows,
            position,
            window,
            b * BLOCK,
            fetch(values, block * BLOCK * stored, BLOCK * stored, wide_values),
            stored,
            address(values) + following * BLOCK * stored * values.itemsize,
            hop,
            records,
            base,
        )
        if several and ((b + 1) % SEGMENT_BLOCKS == 0 or b + 1 == end):
            segment = b // SEGMENT_BLOCKS
            _fold_segment(memory, run, folded, segment, group, rows, position, window, stored)
            clear(memory, run, padded(count), stored)
    if partial < 0:
        done = folded if several else run
        for i in range(count):
            heads = ((items[item, 1] + i // group) * kv_heads + kv_head) * group + i % group
            finish(memory, done + i * size, stored, dim, address(out), heads * dim)


@part
def _fold_segment(
    work: int,
    run: int,
    folded: int,
    segment: int,
    group: int,
    rows: int,
    position: int,
    window: int,
    stored: int,
) -> None:
    """Add the records of a segment to those of the earlier ones, for the rows that see it."""
    size = record_numbers(stored)
    for row in range(rows):
        first, end = _blocks_seen(position + row, position + row, window)
        for i in range(row * group, (row + 1) * group):
            if segment == first // SEGMENT_BLOCKS:
                copy_record(work, folded + i * size, work, run + i * size, stored)
            elif first // SEGMENT_BLOCKS < segment <= (end - 1) // SEGMENT_BLOCKS:
                fold(work, folded + i * size, work, run + i * size, stored)


@part
def merge_item(
    merges: I32,
    item: int,
    group: int,
    kv_heads: int,
    dim: int,
    stored: int,
    positions: I32,
    window: int,
    partials: F32,
    work: F32,
    out: F32,
) -> None:
    """Fold the segments of a tile whose items were apart, and write its rows of `out`."""
    kv_head, row, rows, begin = merges[item, 0], merges[item, 1], merges[item, 2], merges[item, 3]
    size, count = record_numbers(stored), rows * group
    base, at, memory, apart = merges[item, 5] * size, queries_at(work), address(work), address(partials)
    for i in range(count):
        position = positions[row + i // group]
        first, end = _blocks_seen(position, position, window)
        first_segment = first // SEGMENT_BLOCKS
        for segment in range(first_segment, (end - 1) // SEGMENT_BLOCKS + 1):
            place = base + ((segment - begin // SEGMENT_BLOCKS) * padded(count) + i) * size
            if segment == first_segment:
                copy_record(memory, at, apart, place, stored)
            else:
                fold(memory, at, apart, place, stored)
        heads = ((row + i // group) * kv_heads + kv_head) * group + i % group
        finish(memory, at, stored, dim, address(out), heads * dim)
