"""Where a layer's keys and values lie: paged blocks of 64 positions, as float32 or as bfloat16.

Position p of a slot is in block `table[slot, p // 64 % n]` at offset `p % 64`; with n blocks fewer than the
context the table is a ring. In a block, values stand as [kv head, offset, dim], keys transposed as [kv head,
dim, offset], so that the scores of sixteen positions come out of one vector without a sum over lanes.

Bfloat16 is held as uint16. Kernels are generic over the two: `put` stores a number either way, and `fetch`
finds a block as float32, in place or widened into the caller's memory.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numba import types
from numba.extending import overload

from cascadia_p2p.compiled.compiling import part
from cascadia_p2p.compiled.simd import BF16, F32, LANES, load_bf16, put, store

Storage: TypeAlias = Literal["f32", "bf16"]
"""How keys and values are kept."""

Blocks: TypeAlias = F32 | BF16

BLOCK: Final = 64
"""Positions in a block."""

NUMBER_BYTES: Final[dict[Storage, int]] = {"f32": 4, "bf16": 2}
"""Bytes of one stored number."""

NUMBA_NUMBERS: Final[dict[Storage, str]] = {"f32": "float32", "bf16": "uint16"}
"""The type of one stored number in numba's notation."""

_TYPES: Final[dict[Storage, type[np.float32] | type[np.uint16]]] = {"f32": np.float32, "bf16": np.uint16}
_CACHE_LINE: Final = 64


def stored_dim(dim: int) -> int:
    """Numbers that a value of `dim` numbers takes in a block: up to a whole vector."""
    return -(-dim // LANES) * LANES


def block_bytes(kv_heads: int, dim: int, storage: Storage = "f32") -> int:
    """Memory of one block's keys and values."""
    return NUMBER_BYTES[storage] * BLOCK * kv_heads * (dim + stored_dim(dim))


def new_blocks(blocks: int, kv_heads: int, dim: int, storage: Storage = "f32") -> tuple[Blocks, Blocks]:
    """Keys [blocks, kv_heads, dim, 64] and values [blocks, kv_heads, 64, stored], all in memory at once.

    They start at cache lines, so that no vector lies across two.
    """
    keys = _zeros((blocks, kv_heads, dim, BLOCK), storage)
    return keys, _zeros((blocks, kv_heads, BLOCK, stored_dim(dim)), storage)


def _zeros(shape: tuple[int, ...], storage: Storage) -> Blocks:
    number = np.dtype(_TYPES[storage])
    count = int(np.prod(shape)) * number.itemsize
    memory = np.empty(count + _CACHE_LINE, np.uint8)
    # Memory that is only promised is taken by the first write.
    memory.fill(0)
    first = -memory.ctypes.data % _CACHE_LINE
    return memory[first : first + count].view(number).reshape(shape)


@part
def address(array: Blocks) -> int:
    """Where an array's numbers start, as a signed integer: numba would add others to floats."""
    place: int = np.int64(array.ctypes.data)  # type: ignore[assignment]
    return place


@part
def put_key(key: F32, at: int, keys: Blocks, block: int, head: int, offset: int) -> None:
    """Put one head's key, which starts at a flat index, into its block."""
    dim = keys.shape[2]
    place = (np.int64(block) * keys.shape[1] + head) * dim * BLOCK + offset
    for d in range(dim):
        put(keys, place + d * BLOCK, key[at + d])


@part
def put_value(value: F32, at: int, dim: int, values: Blocks, block: int, head: int, offset: int) -> None:
    """Put one head's value, which starts at a flat index, into its block; zeros up to a whole vector."""
    stored = values.shape[3]
    place = ((np.int64(block) * values.shape[1] + head) * BLOCK + offset) * stored
    for d in range(dim):
        put(values, place + d, value[at + d])
    for d in range(dim, stored):
        put(values, place + d, np.float32(0.0))


@part
def _widen(blocks: BF16, at: int, count: int, room: int) -> None:
    for c in range(0, count, LANES):
        store(room, c, load_bf16(blocks, at + c))


def fetch(blocks: Blocks, at: int, count: int, room: int) -> int:
    """The address of float32 numbers that are those of `blocks` from `at` on.

    Bfloat16 is widened into memory at the address `room`; `count` is a multiple of 16.
    """
    raise NotImplementedError("exists only in compiled kernels")


# Numba wants the same annotations in both levels of an overload.
def _fetch(blocks: Any, at: Any, count: Any, room: Any) -> object:
    def in_place(blocks: Any, at: Any, count: Any, room: Any) -> Any:
        return address(blocks) + at * blocks.itemsize

    def widened(blocks: Any, at: Any, count: Any, room: Any) -> Any:
        _widen(blocks, at, count, room)
        return room

    return in_place if blocks.dtype == types.float32 else widened


overload(fetch)(_fetch)
