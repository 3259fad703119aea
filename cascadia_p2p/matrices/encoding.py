"""The encodings of stored matrices: bytes, blocks, and a matrix as it lies in its file.

Integer encodings keep blocks of 16 outputs by 64 inputs, so that one vector of codes holds the same inputs of
sixteen outputs and a product needs no sum over lanes. Outputs and inputs are filled up to whole blocks with
codes that mean zero.

A block of 4-bit codes is 576 bytes: FP16 scales [2 groups][16 outputs], then
[2 groups][4 steps][16 outputs][4 bytes], where byte b of step j holds the code of input `8 j + b` of its
group in the low nibble and of input `8 j + 4 + b` in the high one, each plus 8. Where codes have an offset
instead of a sign, they stand without the 8, and 64 bytes of FP16 offsets follow the scales: 640 bytes.

A block of 8-bit codes is 1024 bytes, [16 steps][16 outputs][4 bytes]: byte b of step j is the code of input
`4 j + b`, plus 128. With one scale an output, float32 scales stand behind all codes of the tensor; with one
for 32 inputs, the block starts with 64 bytes of FP16 scales as above and is 1088 bytes long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]

OUTPUTS: Final = 16
"""Outputs of a block."""

INPUTS: Final = 64
"""Inputs of a block."""

GROUP: Final = 32
"""Inputs that share a scale, in the encodings that have one scale a group."""

ALIGNMENT: Final = 64
"""Bytes at whose multiples blocks and scales start."""


class Encoding(StrEnum):
    """The stored form of a matrix."""

    F32 = "f32"
    """Float32, row-major."""
    BF16 = "bf16"
    """Bfloat16, row-major."""
    INT8 = "int8"
    """8-bit codes -127 to 127 and a float32 scale an output."""
    INT8_GROUPED = "int8g32"
    """8-bit codes -128 to 127 and an FP16 scale for 32 inputs of an output."""
    INT4 = "int4"
    """4-bit codes -8 to 7 and an FP16 scale for 32 inputs of an output."""
    INT4_AFFINE = "int4a"
    """4-bit codes 0 to 15, and an FP16 scale and an FP16 offset for 32 inputs: code x scale + offset."""

    @property
    def block_bytes(self) -> int | None:
        """Bytes of a block; None for row-major encodings."""
        return _BLOCK_BYTES.get(self)


_BLOCK_BYTES: Final = {
    Encoding.INT4: 576,
    Encoding.INT4_AFFINE: 640,
    Encoding.INT8: 1024,
    Encoding.INT8_GROUPED: 1088,
}
_NUMBER_BYTES: Final = {Encoding.F32: 4, Encoding.BF16: 2}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix, or a stack of such, as it is stored: usually views of a mapped file.

    Args:
        encoding: of its numbers.
        shape: (..., outputs, inputs), without what fills up blocks.
        codes: float32 or uint16 of `shape` for row-major encodings; uint8 [..., blocks of outputs, blocks of
            inputs, bytes of a block] for the others.
        scales: float32 [..., outputs up to whole blocks] with `Encoding.INT8`; None with all others.
    """

    encoding: Encoding
    shape: tuple[int, ...]
    codes: npt.NDArray[Any]
    scales: F32 | None = None

    @property
    def outputs(self) -> int:
        """Numbers that one matrix gives."""
        return self.shape[-2]

    @property
    def inputs(self) -> int:
        """Numbers that one matrix takes."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @classmethod
    def of(cls, values: F32) -> StoredMatrix:
        """Float32 numbers as they are."""
        return cls(Encoding.F32, values.shape, values)


def block_counts(shape: Sequence[int]) -> tuple[int, int]:
    """Blocks of outputs and of inputs of a matrix (..., outputs, inputs)."""
    return -(-shape[-2] // OUTPUTS), -(-shape[-1] // INPUTS)


def stored_bytes(encoding: Encoding, shape: Sequence[int]) -> int:
    """Bytes of a tensor; of fewer than two axes only where it is row-major."""
    block = encoding.block_bytes
    if block is None:
        return _NUMBER_BYTES[encoding] * math.prod(shape)
    high, wide = block_counts(shape)
    stack = math.prod(shape[:-2])
    scales = 4 * OUTPUTS * high if encoding is Encoding.INT8 else 0
    return stack * (high * wide * block + scales)


def stored_view(encoding: Encoding, shape: Sequence[int], raw: U8) -> StoredMatrix:
    """The matrix in so many bytes, without a copy.

    Args:
        encoding: of its numbers.
        shape: (..., outputs, inputs).
        raw: uint8 [stored_bytes(encoding, shape)], at an aligned address.
    """
    whole = tuple(shape)
    block = encoding.block_bytes
    if block is None:
        kind = "<f4" if encoding is Encoding.F32 else "<u2"
        return StoredMatrix(encoding, whole, raw.view(kind).reshape(whole))
    high, wide = block_counts(whole)
    stack = whole[:-2]
    end = math.prod(stack) * high * wide * block
    codes = raw[:end].reshape(*stack, high, wide, block)
    if encoding is not Encoding.INT8:
        return StoredMatrix(encoding, whole, codes)
    return StoredMatrix(encoding, whole, codes, raw[end:].view("<f4").reshape(*stack, high * OUTPUTS))
