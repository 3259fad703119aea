"""The Llama family's steps of a layer as kernels that the stage's program calls by address."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np

from cascadia_p2p.compiled.addresses import floats, integers, pointer, rows_of, table_of
from cascadia_p2p.compiled.compiling import kernel
from cascadia_p2p.engine.kernels.attention_items import ITEM
from cascadia_p2p.engine.kernels.blocks import BLOCK, Storage
from cascadia_p2p.engine.kernels.frame import STEP, WORKING_STEP, attention_at, frame_at, sum_at
from cascadia_p2p.engine.kernels.residual import add_update_row
from cascadia_p2p.engine.kernels.rotary_attention import append_head, attend_item


@cache
def append_step(storage: Storage) -> Callable[[int, int, int], None]:
    """One row's and head's key and value into their block; the index counts heads, then rows."""
    number = np.float32 if storage == "f32" else np.uint16

    def append(own: int, now: int, index: int) -> None:
        a, frame = attention_at(own), frame_at(now)
        width = a.kv_heads * a.dim
        append_head(
            rows_of(a.k, frame.rows, width),
            rows_of(a.v, frame.rows, width),
            floats(a.k_bias, width if a.k_bias != 0 else 0),
            floats(a.v_bias, width if a.v_bias != 0 else 0),
            floats(a.k_norm, a.dim if a.k_norm != 0 else 0),
            a.eps,
            rows_of(frame.cosines, frame.rows, frame.pairs),
            rows_of(frame.sines, frame.rows, frame.pairs),
            numba.carray(pointer(a.keys), (a.blocks, a.kv_heads, a.dim, BLOCK), number),
            numba.carray(pointer(a.values), (a.blocks, a.kv_heads, BLOCK, a.stored), number),
            table_of(a.table, a.slots, a.ring),
            integers(frame.slots, frame.rows),
            integers(frame.positions, frame.rows),
            index // a.kv_heads,
            index % a.kv_heads,
        )

    return kernel(STEP, f"llama_{storage}")(append)


@cache
def attend_step(storage: Storage) -> Callable[[int, int, int, int, int], None]:
    """One planned item; behind the index come address and length of the thread's memory."""
    number = np.float32 if storage == "f32" else np.uint16

    def attend(own: int, now: int, index: int, work: int, work_numbers: int) -> None:
        a, frame = attention_at(own), frame_at(now)
        width = a.heads * a.dim
        attend_item(
            table_of(frame.items, frame.places, ITEM),
            index,
            rows_of(a.q, frame.rows, width),
            floats(a.q_bias, width if a.q_bias != 0 else 0),
            floats(a.q_norm, a.dim if a.q_norm != 0 else 0),
            a.eps,
            rows_of(frame.cosines, frame.rows, frame.pairs),
            rows_of(frame.sines, frame.rows, frame.pairs),
            numba.carray(pointer(a.keys), (a.blocks, a.kv_heads, a.dim, BLOCK), number),
            numba.carray(pointer(a.values), (a.blocks, a.kv_heads, BLOCK, a.stored), number),
            table_of(a.table, a.slots, a.ring),
            integers(frame.slots, frame.rows),
            integers(frame.positions, frame.rows),
            a.window,
            a.scale,
            floats(frame.partials, frame.partial_numbers),
            floats(work, work_numbers),
            rows_of(a.out, frame.rows, width),
        )

    return kernel(WORKING_STEP, f"llama_{storage}")(attend)


@kernel(STEP, "llama")
def add_row(own: int, now: int, index: int) -> None:
    """Add one row's update to the residual, and normalise for what follows."""
    s, frame = sum_at(own), frame_at(now)
    add_update_row(
        rows_of(frame.x, frame.rows, frame.hidden),
        rows_of(s.update, frame.rows, frame.hidden),
        floats(s.bias, frame.hidden if s.bias != 0 else 0),
        index,
        s.layer,
        integers(frame.failed, frame.rows),
        floats(s.norm, frame.hidden if s.norm != 0 else 0),
        s.eps,
        rows_of(frame.normed, frame.rows, frame.hidden),
    )


# What most stages need is compiled with all other kernels, by one process of several.
append_step("f32")
attend_step("f32")
