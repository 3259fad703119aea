"""Root mean square norms of rows, alone and behind an embedding look-up."""

from __future__ import annotations

import math
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    Lanes,
    Real,
    div,
    fma,
    load_part,
    mul,
    splat,
    store_part,
    total,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.rows import I32

U16: TypeAlias = npt.NDArray[np.uint16]
U32: TypeAlias = npt.NDArray[np.uint32]


@part
def inverse_rms(values: F32, at: int, width: int, eps: float) -> Real:
    """1 / sqrt(mean of squares + eps) of `width` numbers from a flat index on."""
    squares = splat(0.0)
    for c in range(0, width, LANES):
        x = load_part(values, at + c, width - c)
        squares = fma(x, x, squares)
    return np.float32(1.0 / math.sqrt(total(squares) / width + eps))


@part
def scale_row(source: F32, at: int, weight: F32, factor: Real, divisor: Real, out: F32, out_at: int) -> None:
    """`out = weight * (source * factor) / divisor` over the length of `weight`, from flat indices on."""
    width = weight.shape[0]
    for c in range(0, width, LANES):
        x = mul(load_part(source, at + c, width - c), splat(factor))
        x = mul(x, load_part(weight, c, width - c))
        store_part(out, out_at + c, div(x, splat(divisor)), width - c)


@part
def settle_row(
    x: F32,
    row: int,
    squares: Lanes,
    check: Lanes,
    layer: int,
    failed: I32,
    norm: F32,
    eps: float,
    normed: F32,
) -> None:
    """Mark a row of the residual that is not finite with its layer, and normalise it for what follows.

    `squares` are the sums of the row's squares, `check` of its numbers times zero.
    """
    width = x.shape[1]
    if failed[row] < 0 and total(check) != 0.0:
        failed[row] = layer
    if norm.shape[0] > 0:
        factor = np.float32(1.0 / math.sqrt(total(squares) / width + eps))
        scale_row(x, row * width, norm, factor, 1.0, normed, row * width)


@kernel("(float32[:,::1], float32[::1], float64, float64, float32[:,::1])")
def _normalise(x: F32, weight: F32, eps: float, divisor: float, out: F32) -> None:
    width = weight.shape[0]
    for row in range(x.shape[0]):
        factor = inverse_rms(x, row * width, width, eps)
        scale_row(x, row * width, weight, factor, divisor, out, row * width)


@kernel("(int32[::1], uint16[:,::1], uint32[:,::1])")
def _look_up_bf16(ids: I32, table: U16, bits: U32) -> None:
    """Bfloat16 is the upper half of a float32."""
    for row in range(ids.shape[0]):
        for c in range(table.shape[1]):
            bits[row, c] = np.uint32(table[ids[row], c]) << np.uint32(16)


@kernel("(int32[::1], float32[:,::1], float32[::1], float64, float32[:,::1])")
def _embed(ids: I32, table: F32, weight: F32, eps: float, out: F32) -> None:
    width = weight.shape[0]
    for row in range(ids.shape[0]):
        at = ids[row] * width
        factor = inverse_rms(table, at, width, eps)
        scale_row(table, at, weight, factor, 1.0, out, row * width)


def normalise(x: F32, weight: F32, eps: float, out: F32, divisor: float = 1.0) -> None:
    """`out = weight * x / sqrt(mean(x^2) + eps) / divisor` for each row.

    Args:
        x: float32 [rows, width].
        weight: float32 [width].
        eps: added to the mean of squares.
        out: float32 [rows, width]; may be `x`.
        divisor: by which the normalised row is divided.
    """
    expect("weight", weight, (x.shape[1],))
    expect("out", out, x.shape)
    _normalise(x, weight, eps, divisor, out)


def look_up(ids: I32, table: F32 | U16, out: F32) -> None:
    """Look rows of an embedding up.

    Args:
        ids: int32 [rows], each 0 to vocabulary - 1; the caller has checked that.
        table: [vocabulary, width], float32, or uint16 that are bfloat16.
        out: float32 [rows, width].
    """
    expect("out", out, (len(ids), table.shape[1]))
    if table.dtype == np.uint16:
        _look_up_bf16(ids, cast("U16", table), out.view(np.uint32))
    else:
        np.take(table, ids, axis=0, out=out, mode="clip")


def embed(ids: I32, table: F32 | U16, weight: F32, eps: float, out: F32) -> None:
    """Look rows of an embedding up, and normalise them.

    Args:
        ids: int32 [rows], each 0 to vocabulary - 1; the caller has checked that.
        table: [vocabulary, width], float32, or uint16 that are bfloat16.
        weight: float32 [width], of the norm.
        eps: added to the mean of squares.
        out: float32 [rows, width].
    """
    expect("weight", weight, (table.shape[1],))
    expect("out", out, (len(ids), table.shape[1]))
    if table.dtype == np.uint16:
        look_up(ids, table, out)
        _normalise(out, weight, eps, 1.0, out)
    else:
        _embed(ids, cast("F32", table), weight, eps, out)
