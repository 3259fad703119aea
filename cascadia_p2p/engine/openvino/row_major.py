"""From stored blocks to row-major codes and scales, as constants of OpenVINO take them.

A plugin's 4-bit code is a nibble in two's complement, the even input in the low half of its byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.matrices.encoding import F32, GROUP, INPUTS, OUTPUTS, U8, Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import dense, group_offsets

Scales: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16]

_CHUNK: Final = 1 << 20
"""Bytes of blocks that are turned at once, so that they stay in the processor's cache."""


class Element(StrEnum):
    """What a constant holds, in OpenVINO's words."""

    F32 = "f32"
    I8 = "i8"
    I4 = "i4"


@dataclass(frozen=True, slots=True)
class RowMajor:
    """A matrix, or a stack of such, as a constant takes it.

    Args:
        element: of its codes.
        shape: (..., outputs, inputs).
        codes: float32 or int8 of `shape`; uint8 [..., outputs, inputs / 2] with `Element.I4`.
        scales: FP16 or float32 [..., outputs, 1 or inputs / 32]; None with float32 codes.
        offsets: float32 [outputs, inputs / 32] to be added to the numbers of a group; None: none.
    """

    element: Element
    shape: tuple[int, ...]
    codes: npt.NDArray[Any]
    scales: Scales | None = None
    offsets: F32 | None = None

    @property
    def grouped(self) -> bool:
        """Whether each 32 inputs have a scale of their own."""
        return self.scales is not None and self.scales.shape[-1] > 1


def element_of(encoding: Encoding) -> Element:
    """What the constants of a stored form hold."""
    if encoding in (Encoding.INT4, Encoding.INT4_AFFINE):
        return Element.I4
    return Element.I8 if encoding in (Encoding.INT8, Encoding.INT8_GROUPED) else Element.F32


def row_major(matrix: StoredMatrix, outputs: int, inputs: int) -> RowMajor:
    """One stored matrix, filled up with zeros to `outputs` by `inputs`.

    Args:
        matrix: of any encoding.
        outputs: as many as the matrix has, or more.
        inputs: as many as the matrix has, or more; a multiple of 32 where scales are of groups.
    """
    alone = StoredMatrix(
        matrix.encoding,
        (1, *matrix.shape),
        matrix.codes[None],
        None if matrix.scales is None else matrix.scales[None],
    )
    if matrix.encoding is not Encoding.INT4_AFFINE:
        return at_index(row_major_stack((alone,), outputs, inputs), 0)
    turned = at_index(_coded_stack((alone,), outputs, inputs, 1), 0)
    offsets = np.zeros((outputs, inputs // GROUP), np.float32)
    found = group_offsets(matrix)[: matrix.outputs, : offsets.shape[1]]
    offsets[: matrix.outputs, : found.shape[1]] = found
    # A plugin's codes have a sign: eight less than the stored ones.
    offsets += 8 * np.asarray(turned.scales, np.float32)
    return replace(turned, offsets=offsets)


def at_index(stack: RowMajor, index: int) -> RowMajor:
    """One matrix of a stack."""
    scales = None if stack.scales is None else stack.scales[index]
    return RowMajor(stack.element, stack.shape[1:], stack.codes[index], scales)


def row_major_stack(stacks: Sequence[StoredMatrix], outputs: int, inputs: int, least: int = 0) -> RowMajor:
    """Stacks of one encoding, one behind the other, each matrix filled up as in `row_major`.

    Args:
        stacks: [matrices, outputs, inputs] each.
        outputs: of every matrix of the result.
        inputs: of every matrix of the result.
        least: matrices of the result; ones of zeros stand behind the others if there are fewer.

    Returns:
        Codes and scales; float32 numbers where the encoding has offsets, which sparse nodes do not take.
    """
    first = stacks[0]
    count = max(least, sum(stack.shape[0] for stack in stacks))
    shape = (count, outputs, inputs)
    if element_of(first.encoding) is not Element.F32 and first.encoding is not Encoding.INT4_AFFINE:
        return _coded_stack(stacks, outputs, inputs, count)
    if len(stacks) == 1 and first.shape == shape:
        return RowMajor(Element.F32, shape, dense(first))
    values = np.zeros(shape, np.float32)
    for stack, at in _placed(stacks):
        values[at, : stack.outputs, : stack.inputs] = dense(stack)
    return RowMajor(Element.F32, shape, values)


def _coded_stack(stacks: Sequence[StoredMatrix], outputs: int, inputs: int, count: int) -> RowMajor:
    first = stacks[0]
    element = element_of(first.encoding)
    kind, width = (np.uint8, inputs // 2) if element is Element.I4 else (np.int8, inputs)
    codes = np.zeros((count, outputs, width), kind)
    single = first.scales is not None
    groups = 1 if single else inputs // GROUP
    scales = np.zeros((count, outputs, groups), np.float32 if single else np.float16)
    for stack, at in _placed(stacks):
        for blocks, target in zip(stack.codes, codes[at], strict=True):
            _turn_codes(stack, blocks, target.view(np.uint8))
        found = _scales(stack)[:, : stack.outputs, :groups]
        scales[at, : stack.outputs, : found.shape[2]] = found
    return RowMajor(element, (count, outputs, inputs), codes, scales)


def _placed(stacks: Sequence[StoredMatrix]) -> Iterator[tuple[StoredMatrix, slice]]:
    at = 0
    for stack in stacks:
        yield stack, slice(at, at + stack.shape[0])
        at += stack.shape[0]


def cut_outputs(matrix: RowMajor, count: int) -> RowMajor:
    """A matrix as a stack of `count` that each give a part of its outputs."""
    outputs, inputs = matrix.shape
    codes = matrix.codes.reshape(count, outputs // count, -1)
    scales = matrix.scales
    if scales is not None:
        scales = scales.reshape(count, outputs // count, -1)
    return RowMajor(matrix.element, (count, outputs // count, inputs), codes, scales)


def cut_inputs(matrix: RowMajor, count: int) -> RowMajor:
    """A matrix as a stack of `count` that each take a part of its inputs, cut between groups."""
    outputs, inputs = matrix.shape

    def turned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array.reshape(outputs, count, -1).transpose(1, 0, 2))

    scales = matrix.scales
    if scales is not None:
        scales = np.asarray(turned(scales) if matrix.grouped else np.tile(scales, (count, 1, 1)))
    return RowMajor(matrix.element, (count, outputs, inputs // count), turned(matrix.codes), scales)


def joined_inputs(stack: RowMajor) -> RowMajor:
    """The reverse of `cut_inputs`, for a stack of matrices with scales of groups or without scales."""
    count, outputs, inputs = stack.shape

    def turned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(outputs, -1)

    scales = stack.scales
    return RowMajor(
        stack.element,
        (outputs, count * inputs),
        turned(stack.codes),
        None if scales is None else turned(scales),
    )


def attenuated(matrix: RowMajor, exponent: int) -> RowMajor:
    """The matrix times 2 ** -exponent, exactly: scales that FP16 can not hold then become float32."""
    if exponent == 0:
        return matrix
    scales, offsets = matrix.scales, matrix.offsets
    if scales is None:
        return replace(matrix, codes=np.ldexp(matrix.codes, -exponent))
    smaller = np.ldexp(scales, -exponent)
    if not np.array_equal(np.ldexp(smaller, exponent), scales):
        smaller = np.ldexp(scales.astype(np.float32), -exponent)
    if offsets is not None:
        offsets = np.ldexp(offsets, -exponent)
    return replace(matrix, scales=smaller, offsets=offsets)


def with_scales_of(matrix: RowMajor, half: bool) -> RowMajor:
    """The matrix with float32 scales, or with FP16 ones where those keep their precision."""
    scales = matrix.scales
    if scales is None or (half and scales.dtype == np.float16):
        return matrix
    if half:
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        near = np.abs(halves.astype(np.float32) - scales) <= np.abs(scales) * 2.0**-11
        return replace(matrix, scales=halves) if near.all() else matrix
    return replace(matrix, scales=scales.astype(np.float32))


def _turn_codes(matrix: StoredMatrix, blocks: U8, target: U8) -> None:
    """Codes of one matrix, uint8 [blocks, blocks, bytes] to [outputs, bytes of a row]."""
    four = element_of(matrix.encoding) is Element.I4
    high, wide, size = blocks.shape
    skipped = size - OUTPUTS * INPUTS // (2 if four else 1)
    row = wide * (INPUTS // 2 if four else INPUTS)
    kept = min(row, target.shape[1])
    step = max(1, _CHUNK // (wide * size))
    for at in range(0, high, step):
        words = blocks[at : at + step, :, skipped:].view("<u4").reshape(-1, wide, (size - skipped) // 64, 16)
        # [block, block, step, output] to [block, output, block, step]
        words = np.ascontiguousarray(words.transpose(0, 3, 1, 2))
        if four:
            _interleave_nibbles(words)
        words ^= np.uint32(0x88888888 if four else 0x80808080)
        rows = words.reshape(-1).view(np.uint8).reshape(-1, row)
        start = at * OUTPUTS
        count = min(len(rows), matrix.outputs - start)
        target[start : start + count, :kept] = rows[:count, :kept]


def _interleave_nibbles(words: npt.NDArray[np.uint32]) -> None:
    """Inputs 0 to 3 in the low nibbles and 4 to 7 in the high ones, to inputs 0 to 7 in order; in place."""
    high = words >> np.uint32(4)
    for part in (words, high):
        part &= np.uint32(0x0F0F0F0F)
        part |= part >> np.uint32(4)
        part &= np.uint32(0x00FF00FF)
        part |= part >> np.uint32(8)
        part &= np.uint32(0x0000FFFF)
    high <<= np.uint32(16)
    words |= high


def _scales(stack: StoredMatrix) -> Scales:
    """Scales of a stack in whole blocks, [matrices, outputs, 1 or groups]."""
    if stack.scales is not None:
        return stack.scales[..., None]
    count, high, wide, _ = stack.codes.shape
    halves = np.ascontiguousarray(stack.codes[..., :64]).view("<f2").reshape(count, high, wide, 2, OUTPUTS)
    return np.moveaxis(halves, -1, 2).reshape(count, high * OUTPUTS, wide * 2)
