"""Rotary position embedding: the angles of a frame's rows, and turning one head by them."""

from __future__ import annotations

import math

import numpy as np

from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    Real,
    add,
    load_part,
    mul,
    splat,
    store_part,
    sub,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.norms import inverse_rms, scale_row
from cascadia_p2p.engine.kernels.rows import I32


@part
def biased(source: F32, at: int, bias: F32, bias_at: int, dim: int, out: F32, out_at: int) -> None:
    """Copy one head and add its bias, if there is one; flat indices."""
    for c in range(0, dim, LANES):
        x = load_part(source, at + c, dim - c)
        if bias.shape[0] > 0:
            x = add(x, load_part(bias, bias_at + c, dim - c))
        store_part(out, out_at + c, x, dim - c)


@part
def turn(
    values: F32, at: int, norm: F32, eps: float, cosines: F32, sines: F32, row: int, dim: int, scale: Real
) -> None:
    """Normalise one head in place if `norm` has numbers, turn its first numbers, and scale it.

    Numbers i and i + half of the head are a pair, for i < half = columns of `cosines`.
    """
    if norm.shape[0] > 0:
        scale_row(values, at, norm, inverse_rms(values, at, dim, eps), 1.0, values, at)
    half = cosines.shape[1]
    for c in range(0, half, LANES):
        left = half - c
        a, b = load_part(values, at + c, left), load_part(values, at + half + c, left)
        cosine, sine = load_part(cosines, row * half + c, left), load_part(sines, row * half + c, left)
        store_part(values, at + c, sub(mul(a, cosine), mul(b, sine)), left)
        store_part(values, at + half + c, add(mul(b, cosine), mul(a, sine)), left)
    if scale != 1.0:
        for c in range(0, dim, LANES):
            x = mul(load_part(values, at + c, dim - c), splat(scale))
            store_part(values, at + c, x, dim - c)


@kernel("(int32[::1], float32[::1], float32[:,::1], float32[:,::1])")
def _angles(positions: I32, frequencies: F32, cosines: F32, sines: F32) -> None:
    for row in range(positions.shape[0]):
        for i in range(frequencies.shape[0]):
            # The angle in float32 is what models are trained with; its functions are taken exactly, so that
            # every platform has the same.
            angle = np.float64(np.float32(positions[row]) * frequencies[i])
            cosines[row, i] = math.cos(angle)
            sines[row, i] = math.sin(angle)


def angles(positions: I32, frequencies: F32, cosines: F32, sines: F32) -> None:
    """Cosine and sine of position x frequency.

    Args:
        positions: int32 [rows].
        frequencies: float32 [pairs], radians a position.
        cosines: float32 [rows, pairs], comes out.
        sines: float32 [rows, pairs], comes out.
    """
    shape = (len(positions), len(frequencies))
    expect("cosines", cosines, shape)
    expect("sines", sines, shape)
    _angles(positions, frequencies, cosines, sines)
