"""What is looked at of rows before they are encoded: largest magnitude, and how strongly they can answer."""

from __future__ import annotations

import numpy as np
from numba import prange

from cascadia_p2p.compiled.compiling import twin_kernels
from cascadia_p2p.compiled.simd import LANES, fma, larger, largest, load_part, mul, splat, sub, total
from cascadia_p2p.matrices.encoding import F32


@twin_kernels("(Array(float32, 2, 'A', readonly=True), float32[::1], float32[::1])")
def _row_energies(x: F32, weights: F32, out: F32) -> None:
    width, step = x.shape[1], x.strides[0] // 4
    for row in prange(x.shape[0]):
        squares = splat(0.0)
        for c in range(0, width, LANES):
            product = mul(load_part(x, row * step + c, width - c), load_part(weights, c, width - c))
            squares = fma(product, product, squares)
        out[row] = total(squares)


@twin_kernels("(Array(float32, 2, 'A', readonly=True), float32[::1])")
def _row_magnitudes(x: F32, out: F32) -> None:
    width, step = x.shape[1], x.strides[0] // 4
    for row in prange(x.shape[0]):
        most, nothing = splat(0.0), splat(0.0)
        for c in range(0, width, LANES):
            values = load_part(x, row * step + c, width - c)
            most = larger(larger(values, sub(splat(0.0), values)), most)
            # Zero, unless one of them is infinite or not a number.
            nothing = fma(values, splat(0.0), nothing)
        out[row] = largest(most) + total(nothing)


def largest_magnitude(x: F32) -> float:
    """The largest magnitude of all numbers; not a number where one is infinite or not a number.

    Args:
        x: float32 [rows, width].
    """
    if x.strides[1] != x.itemsize or x.strides[0] % x.itemsize:
        x = np.ascontiguousarray(x)
    out = np.zeros(max(1, len(x)), np.float32)
    _row_magnitudes(x, out)
    return float(out.max())


def row_energies(x: F32, weights: F32) -> F32:
    """For each row the sum of squares of its numbers times the weights, as float32 [rows].

    Args:
        x: float32 [rows, width]; numbers of a row lie next to each other.
        weights: float32 [width], contiguous.
    """
    if weights.shape != x.shape[1:]:
        raise ValueError(f"weights are {weights.shape}: expected {x.shape[1:]}")
    if x.strides[1] != x.itemsize or x.strides[0] % x.itemsize:
        x = np.ascontiguousarray(x)
    out = np.empty(len(x), np.float32)
    _row_energies(x, weights, out)
    return out
