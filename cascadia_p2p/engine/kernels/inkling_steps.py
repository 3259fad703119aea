"""Inkling's steps of a layer as kernels that the stage's program calls by address."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np

from cascadia_p2p.compiled.addresses import (
    cube_of,
    floats,
    integers,
    pointer,
    rows_of,
    table_of,
)
from cascadia_p2p.compiled.compiling import kernel
from cascadia_p2p.engine.kernels.attention import append_head, attend_item
from cascadia_p2p.engine.kernels.attention_items import ITEM
from cascadia_p2p.engine.kernels.blocks import BLOCK, Storage
from cascadia_p2p.engine.kernels.convolution import add_convolved_row, remember
from cascadia_p2p.engine.kernels.frame import STEP, WORKING_STEP, attention_at, frame_at, sum_at


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
            rows_of(a.key_taps, a.taps, width),
            rows_of(a.value_taps, a.taps, width),
            cube_of(a.key_history, a.slots, a.depth, width),
            cube_of(a.value_history, a.slots, a.depth, width),
            floats(a.k_norm, a.dim),
            numba.carray(pointer(a.keys), (a.blocks, a.kv_heads, a.dim, BLOCK), number),
            numba.carray(pointer(a.values), (a.blocks, a.kv_heads, BLOCK, a.stored), number),
            table_of(a.table, a.slots, a.ring),
            integers(frame.slots, frame.rows),
            integers(frame.positions, frame.rows),
            integers(frame.before, frame.rows),
            index // a.kv_heads,
            index % a.kv_heads,
            a.eps,
        )

    return kernel(STEP, f"inkling_{storage}")(append)


@cache
def attend_step(storage: Storage) -> Callable[[int, int, int, int, int], None]:
    """One planned item; behind the index come address and length of the thread's memory."""
    number = np.float32 if storage == "f32" else np.uint16

    def attend(own: int, now: int, index: int, work: int, work_numbers: int) -> None:
        a, frame = attention_at(own), frame_at(now)
        attend_item(
            table_of(frame.items, frame.places, ITEM),
            index,
            rows_of(a.q, frame.rows, a.heads * a.dim),
            rows_of(a.r, frame.rows, a.heads * a.ranks),
            floats(a.q_norm, a.dim),
            rows_of(a.bias, a.ranks, a.extent + 2 * BLOCK),
            a.extent,
            numba.carray(pointer(a.keys), (a.blocks, a.kv_heads, a.dim, BLOCK), number),
            numba.carray(pointer(a.values), (a.blocks, a.kv_heads, BLOCK, a.stored), number),
            table_of(a.table, a.slots, a.ring),
            integers(frame.slots, frame.rows),
            integers(frame.positions, frame.rows),
            a.window,
            a.floor,
            a.alpha,
            a.eps,
            floats(frame.partials, frame.partial_numbers),
            floats(work, work_numbers),
            rows_of(a.out, frame.rows, a.heads * a.dim),
        )

    return kernel(WORKING_STEP, f"inkling_{storage}")(attend)


@kernel(STEP, "inkling")
def remember_attention(own: int, now: int, index: int) -> None:
    """Keep what went into the convolution of keys (index 0) or of values (1)."""
    a, frame = attention_at(own), frame_at(now)
    width = a.kv_heads * a.dim
    remember(
        rows_of(a.k if index == 0 else a.v, frame.rows, width),
        cube_of(a.key_history if index == 0 else a.value_history, a.slots, a.depth, width),
        integers(frame.slots, frame.rows),
        integers(frame.positions, frame.rows),
        integers(frame.after, frame.rows),
    )


@kernel(STEP, "inkling")
def add_row(own: int, now: int, index: int) -> None:
    """Convolve one row's update, add it to the residual, and normalise for what follows."""
    s, frame = sum_at(own), frame_at(now)
    add_convolved_row(
        rows_of(frame.x, frame.rows, frame.hidden),
        rows_of(s.update, frame.rows, frame.hidden),
        cube_of(s.history, s.slots, s.depth, frame.hidden),
        rows_of(s.taps, s.tap_count, frame.hidden),
        index,
        integers(frame.slots, frame.rows)[index],
        integers(frame.positions, frame.rows)[index],
        integers(frame.before, frame.rows)[index],
        s.layer,
        integers(frame.failed, frame.rows),
        floats(s.norm, frame.hidden if s.norm != 0 else 0),
        s.eps,
        rows_of(frame.normed, frame.rows, frame.hidden),
    )


@kernel(STEP, "inkling")
def remember_sum(own: int, now: int, index: int) -> None:
    """Keep what went into the convolution of an update."""
    s, frame = sum_at(own), frame_at(now)
    remember(
        rows_of(s.update, frame.rows, frame.hidden),
        cube_of(s.history, s.slots, s.depth, frame.hidden),
        integers(frame.slots, frame.rows),
        integers(frame.positions, frame.rows),
        integers(frame.after, frame.rows),
    )


# What most stages need is compiled with all other kernels, by one process of several.
append_step("f32")
attend_step("f32")
