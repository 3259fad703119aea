"""From codes and scales to blocks and back, in plain numpy: what all else is tested by."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.matrices.encoding import (
    F32,
    GROUP,
    INPUTS,
    OUTPUTS,
    U8,
    Encoding,
    StoredMatrix,
    block_counts,
)

Codes = npt.NDArray[np.int8]
"""int8 [..., outputs, inputs], in whole blocks."""

_FOUR_BIT: Final = {Encoding.INT4: np.int8(8), Encoding.INT4_AFFINE: np.int8(0)}
"""Encodings of two codes a byte, with what is added to a code there."""


def dense(matrix: StoredMatrix) -> F32:
    """The numbers that a stored matrix stands for: float32 of its shape, each rounded once."""
    if matrix.encoding is Encoding.F32:
        return np.asarray(matrix.codes, np.float32)
    if matrix.encoding is Encoding.BF16:
        return (matrix.codes.astype(np.uint32) << 16).view(np.float32)
    codes, scales = unpack(matrix)
    group = 1 if matrix.encoding is Encoding.INT8 else GROUP
    wide = scales[..., None] if group == 1 else np.repeat(scales, group, axis=-1)
    values = codes.astype(np.float32) * wide
    if matrix.encoding is Encoding.INT4_AFFINE:
        values += np.repeat(group_offsets(matrix), GROUP, axis=-1)
    return np.ascontiguousarray(values[..., : matrix.outputs, : matrix.inputs])


def unpack(matrix: StoredMatrix) -> tuple[Codes, F32]:
    """Codes and scales of an integer encoding, in whole blocks.

    Returns:
        int8 [..., outputs, inputs], and float32 [..., outputs] with one scale an output or [..., outputs,
        inputs / 32] with one a group.
    """
    blocks: U8 = matrix.codes
    *stack, high, wide, _ = blocks.shape
    shape = (*stack, high * OUTPUTS, wide * INPUTS)
    if matrix.encoding in _FOUR_BIT:
        raw = blocks[..., -512:].reshape(*stack, high, wide, 2, 4, OUTPUTS, 4)
        nibbles = np.stack([raw & 15, raw >> 4], axis=-1).astype(np.int8) - _FOUR_BIT[matrix.encoding]
        # [high, wide, group, step, output, byte, nibble] to [high, output, wide, group, step, nibble, byte]
        codes = _moved(nibbles, len(stack), (0, 4, 1, 2, 3, 6, 5)).reshape(shape)
        return codes, _group_numbers(blocks, 0)
    start = 64 if matrix.encoding is Encoding.INT8_GROUPED else 0
    raw = blocks[..., start:].reshape(*stack, high, wide, 16, OUTPUTS, 4)
    signed = (raw ^ np.uint8(0x80)).view(np.int8)
    codes = _moved(signed, len(stack), (0, 3, 1, 2, 4)).reshape(shape)
    if matrix.scales is not None:
        return codes, matrix.scales
    return codes, _group_numbers(blocks, 0)


def group_offsets(matrix: StoredMatrix) -> F32:
    """The offsets of `Encoding.INT4_AFFINE`, in whole blocks: float32 [..., outputs, inputs / 32]."""
    return _group_numbers(matrix.codes, 64)


def pack(
    encoding: Encoding, shape: tuple[int, ...], codes: Codes, scales: F32, offsets: F32 | None = None
) -> StoredMatrix:
    """Put codes and scales into blocks.

    Args:
        encoding: one of the integer ones.
        shape: (..., outputs, inputs), without what fills up blocks.
        codes: int8 of `shape`.
        scales: float32 [..., outputs] with `Encoding.INT8`, else [..., outputs, groups of 32 inputs].
        offsets: float32 of the shape of `scales` with `Encoding.INT4_AFFINE`.
    """
    high, wide = block_counts(shape)
    *stack, outputs, inputs = shape
    whole = np.zeros((*stack, high * OUTPUTS, wide * INPUTS), np.int8)
    whole[..., :outputs, :inputs] = codes
    if encoding in _FOUR_BIT:
        parts = whole.reshape(*stack, high, OUTPUTS, wide, 2, 4, 2, 4)
        nibbles = _moved(parts, len(stack), (0, 2, 3, 4, 1, 6, 5)).astype(np.int16) + _FOUR_BIT[encoding]
        raw = (nibbles[..., 0] | nibbles[..., 1] << 4).astype(np.uint8).reshape(*stack, high, wide, 512)
        if offsets is not None:
            raw = _behind(offsets, raw, outputs)
        return StoredMatrix(encoding, shape, _behind(scales, raw, outputs))
    parts = whole.reshape(*stack, high, OUTPUTS, wide, 16, 4)
    parts = _moved(parts, len(stack), (0, 2, 3, 1, 4))
    raw = (np.ascontiguousarray(parts).view(np.uint8) ^ np.uint8(0x80)).reshape(*stack, high, wide, 1024)
    if encoding is Encoding.INT8_GROUPED:
        return StoredMatrix(encoding, shape, _behind(scales, raw, outputs))
    filled = np.zeros((*stack, high * OUTPUTS), np.float32)
    filled[..., :outputs] = scales
    return StoredMatrix(encoding, shape, raw, filled)


def _moved(array: npt.NDArray[Any], stack: int, order: tuple[int, ...]) -> npt.NDArray[Any]:
    """The axes behind the first `stack` in another order."""
    return array.transpose(*range(stack), *(stack + axis for axis in order))


def _group_numbers(blocks: U8, start: int) -> F32:
    """The FP16 numbers [2 groups][16 outputs] from a byte of each block on, as [outputs, groups]."""
    *stack, high, wide, _ = blocks.shape
    halves = np.ascontiguousarray(blocks[..., start : start + 64]).view("<f2")
    halves = halves.reshape(*stack, high, wide, 2, OUTPUTS)
    numbers = _moved(halves, len(stack), (0, 3, 1, 2)).reshape(*stack, high * OUTPUTS, wide * 2)
    return numbers.astype(np.float32)


def _behind(numbers: F32, raw: U8, outputs: int) -> U8:
    """Blocks with FP16 numbers of their groups in front."""
    *stack, high, wide, _ = raw.shape
    filled = np.zeros((*stack, high * OUTPUTS, wide * 2), np.float16)
    filled[..., :outputs, : numbers.shape[-1]] = numbers
    parts = filled.reshape(*stack, high, OUTPUTS, wide, 2)
    parts = np.ascontiguousarray(_moved(parts, len(stack), (0, 2, 3, 1))).view(np.uint8)
    return np.concatenate([parts.reshape(*stack, high, wide, 64), raw], axis=-1)
