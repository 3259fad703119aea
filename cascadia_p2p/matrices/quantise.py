"""From float32 numbers to stored matrices: codes, scales and blocks, each scale chosen by its squared error.

A scale for 32 inputs is searched for in two steps. A dozen candidates, each the group's largest number
divided by something between 4 and 10, give codes; for given codes the best scale is known (least squares),
and with it how much of the group's energy it accounts for. The winner's scale, rounded to FP16, then competes
as it stands with the plain rules: the largest magnitude at 7, or at -8; and where the group looks as if it
had been quantised before, with all rules that put the largest magnitude at a code.

A scale for an output is searched for among eight that clip more and more of the row.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import prange

from cascadia_p2p.compiled.compiling import part, twin_kernels, warm_up
from cascadia_p2p.compiled.simd import (
    LANES,
    Lanes,
    Real,
    add,
    choose,
    div,
    fma,
    larger,
    load,
    mul,
    splat,
    store,
    sub,
)
from cascadia_p2p.matrices.encoding import (
    F32,
    GROUP,
    INPUTS,
    OUTPUTS,
    Encoding,
    StoredMatrix,
    block_counts,
)

U16: TypeAlias = npt.NDArray[np.uint16]

LARGEST: Final = 8.0 * 65504.0
"""The largest magnitude that encodings with FP16 scales take."""

_INT4_DIVISORS: Final = np.array([8, 7, 6, 5, 4, 6.5, 7.3, 7.6, 8.3, 8.6, 9, 9.5, 10], np.float32)
_INT8_DIVISORS: Final = np.array([127.5, 127, 128], np.float32)
_LEAST_CLIPPED: Final = np.array([1, 0.97, 0.94, 0.9, 0.86, 0.81, 0.75, 0.67], np.float32)

# 1.5 * 2^23: added and taken off again, it rounds numbers below 2^22 to whole ones, half to even.
_ROUNDER = np.float32(12582912.0)
_HALF_LARGEST = np.float32(65504.0)
# Below it, half of the least FP16 number, a scale is zero.
_NO_SCALE = np.float32(2.0**-25)
_HALF_NORMAL = np.float32(2.0**-14)
# 0.75 does to FP16's subnormal numbers, multiples of 2^-24, what _ROUNDER does to whole ones.
_HALF_ROUNDER = np.float32(0.75)
# Leaves 11 of 24 bits: x * split - (x * split - x).
_HALF_SPLIT = np.float32(8193.0)
# A group of which codes account for all but a millionth may have been quantised before: rounding hides which
# of several scales, each a simple fraction of another, is the one that FP16 has.
_ALL = np.float32(1.0 - 1e-6)
# The same goes for groups whose scales may be subnormal, whose fractions FP16 does not have.
_SMALL = np.float32(2.0**-9)
# Rows of smaller numbers than this are rows of zeros: their reciprocals would overflow.
_NOTHING = np.float32(2.0**-100)


@part
def _magnitude(x: Lanes) -> Lanes:
    return larger(x, sub(splat(0.0), x))


@part
def _smaller(a: Lanes, b: Lanes) -> Lanes:
    return choose(a, b, a, b)


@part
def _rounded(x: Lanes) -> Lanes:
    return sub(add(x, splat(_ROUNDER)), splat(_ROUNDER))


@part
def _to_half(x: Lanes) -> Lanes:
    """The nearest FP16 numbers, none infinite."""
    x = larger(_smaller(x, splat(_HALF_LARGEST)), splat(-_HALF_LARGEST))
    wide = mul(x, splat(_HALF_SPLIT))
    normal = sub(wide, sub(wide, x))
    tiny = sub(add(x, splat(_HALF_ROUNDER)), splat(_HALF_ROUNDER))
    return choose(_magnitude(x), splat(_HALF_NORMAL), tiny, normal)


@part
def _reciprocal(scale: Lanes) -> Lanes:
    """1 / scale; 0 where there is no scale."""
    none = splat(_NO_SCALE)
    return choose(_magnitude(scale), none, splat(0.0), div(splat(1.0), scale))


@part
def _code(x: Lanes, factor: Lanes, low: Lanes, high: Lanes) -> Lanes:
    return _rounded(larger(_smaller(mul(x, factor), high), low))


@part
def _least_squares(tile: F32, at: int, factor: Lanes, low: Lanes, high: Lanes) -> tuple[Lanes, Lanes]:
    """The best scale for the codes that a factor gives, and the squares that it accounts for."""
    products, squares = splat(0.0), splat(0.0)
    for i in range(GROUP):
        x = load(tile, at + i * LANES)
        q = _code(x, factor, low, high)
        products = fma(x, q, products)
        squares = fma(q, q, squares)
    scale = div(products, larger(squares, splat(1.0)))
    return scale, mul(scale, products)


@part
def _error(tile: F32, at: int, scale: Lanes, low: Lanes, high: Lanes) -> Lanes:
    factor, negative = _reciprocal(scale), sub(splat(0.0), scale)
    result = splat(0.0)
    for i in range(GROUP):
        x = load(tile, at + i * LANES)
        difference = fma(_code(x, factor, low, high), negative, x)
        result = fma(difference, difference, result)
    return result


@part
def _extreme(tile: F32, at: int) -> tuple[Lanes, Lanes]:
    """Of each output's group the number of largest magnitude, the first of several; its sum of squares."""
    result, most, squares = splat(0.0), splat(0.0), splat(0.0)
    for i in range(GROUP):
        x = load(tile, at + i * LANES)
        size = _magnitude(x)
        result = choose(most, size, x, result)
        most = larger(size, most)
        squares = fma(x, x, squares)
    return result, squares


@part
def _group_scale(tile: F32, at: int, divisors: F32, lowest: Real, spare: F32) -> Lanes:
    """The scales, FP16 numbers, of a group of 32 inputs of sixteen outputs."""
    low, high = splat(lowest), splat(-lowest - 1.0)
    extreme, squares = _extreme(tile, at)
    size = _magnitude(extreme)
    towards_low = choose(size, splat(_NO_SCALE), splat(0.0), div(splat(-1.0), extreme))
    best, most = splat(0.0), splat(0.0)
    for candidate in range(divisors.shape[0]):
        scale, score = _least_squares(tile, at, mul(towards_low, splat(divisors[candidate])), low, high)
        best = choose(most, score, scale, best)
        most = larger(score, most)
    best = _to_half(best)
    least = _error(tile, at, best, low, high)
    for plain in range(2):
        rule = _to_half(div(extreme, low) if plain == 0 else div(size, high))
        error = _error(tile, at, rule, low, high)
        best = choose(error, least, rule, best)
        least = _smaller(error, least)
    if lowest == -8.0:
        doubtful = choose(mul(squares, splat(_ALL)), most, splat(1.0), splat(0.0))
        doubtful = choose(size, splat(_SMALL), splat(1.0), doubtful)
        store(spare, 0, choose(splat(0.0), size, doubtful, splat(0.0)))
        for lane in range(LANES):
            if spare[lane] > 0.0:
                return _whole_scale(tile, at, extreme, load(spare, 0), best, least)
    return best


@part
def _whole_scale(tile: F32, at: int, extreme: Lanes, doubtful: Lanes, best: Lanes, least: Lanes) -> Lanes:
    """Where `doubtful` is 1, the best of eight scales that put the extreme at a code, and of `best`."""
    low, high, none = splat(-8.0), splat(7.0), splat(0.0)
    for code in range(1, 9):
        scale = _to_half(div(extreme, splat(-code)))
        error = _error(tile, at, scale, low, high)
        # Zero is not below a negative number: lanes without doubt stay as they are.
        gain = choose(none, doubtful, sub(least, error), splat(-1.0))
        best = choose(none, gain, scale, best)
        least = choose(none, gain, error, least)
    return best


@part
def _transpose(x: F32, row: int, column: int, count: int, tile: F32) -> None:
    """Sixteen rows by `count` columns of x into [column][row], with zeros where there are none."""
    rows, columns = min(OUTPUTS, x.shape[0] - row), min(count, x.shape[1] - column)
    if rows < OUTPUTS or columns < count:
        tile[: count * LANES] = 0.0
    for r in range(rows):
        for c in range(columns):
            tile[c * LANES + r] = x[row + r, column + c]


@part
def _store_int4(tile: F32, at: int, factor: Lanes, spare: F32, out: U16, start: int) -> None:
    low, high, sixteen = splat(-8.0), splat(7.0), splat(16.0)
    eight, wide = splat(8.0), splat(256.0)
    for step in range(4):
        for half in range(2):
            first = at + (8 * step + 2 * half) * LANES
            a = add(_code(load(tile, first), factor, low, high), eight)
            b = add(_code(load(tile, first + LANES), factor, low, high), eight)
            c = add(_code(load(tile, first + 4 * LANES), factor, low, high), eight)
            d = add(_code(load(tile, first + 5 * LANES), factor, low, high), eight)
            store(spare, 0, fma(fma(d, sixteen, b), wide, fma(c, sixteen, a)))
            for lane in range(LANES):
                out[start + step * 32 + lane * 2 + half] = np.uint16(np.int32(spare[lane]))


@part
def _store_int8(
    tile: F32, at: int, count: int, factor: Lanes, lowest: Real, spare: F32, out: U16, start: int
) -> None:
    low, high, middle = splat(lowest), splat(127.0), splat(128.0)
    for step in range(count // 4):
        for half in range(2):
            first = at + (4 * step + 2 * half) * LANES
            a = add(_code(load(tile, first), factor, low, high), middle)
            b = add(_code(load(tile, first + LANES), factor, low, high), middle)
            store(spare, 0, fma(b, splat(256.0), a))
            for lane in range(LANES):
                out[start + step * 32 + lane * 2 + half] = np.uint16(np.int32(spare[lane]))


@part
def _encode_groups(x: F32, high: int, divisors: F32, lowest: Real, out: U16, scales: F32) -> None:
    """The blocks of sixteen outputs; their first 32 words, the scales, are left to the caller."""
    tile, spare = np.empty(INPUTS * LANES, np.float32), np.empty(LANES, np.float32)
    for wide in range(out.shape[0]):
        _transpose(x, high * OUTPUTS, wide * INPUTS, INPUTS, tile)
        for group in range(2):
            at = group * GROUP * LANES
            scale = _group_scale(tile, at, divisors, lowest, spare)
            store(scales, (wide * 2 + group) * LANES, scale)
            factor = _reciprocal(scale)
            if lowest == -8.0:
                _store_int4(tile, at, factor, spare, out[wide], 32 + group * 128)
            else:
                _store_int8(tile, at, GROUP, factor, lowest, spare, out[wide], 32 + group * 256)


@twin_kernels(
    "(Array(float32, 2, 'A', readonly=True), Array(float32, 1, 'C', readonly=True), float32, "
    "uint16[:, :, ::1], float32[:, ::1])"
)
def _grouped(x: F32, divisors: F32, lowest: Real, out: U16, scales: F32) -> None:
    for high in prange(out.shape[0]):
        _encode_groups(x, high, divisors, lowest, out[high], scales[high])


@part
def _encode_outputs(x: F32, high: int, clipped: F32, out: U16, scales: F32) -> None:
    """The blocks and scales of sixteen outputs with one scale each."""
    columns = out.shape[0] * INPUTS
    tile, spare = np.empty(columns * LANES, np.float32), np.empty(LANES, np.float32)
    _transpose(x, high * OUTPUTS, 0, columns, tile)
    size = splat(0.0)
    for c in range(columns):
        size = larger(_magnitude(load(tile, c * LANES)), size)
    nothing = splat(_NOTHING)
    size = choose(size, nothing, splat(0.0), size)
    factor = choose(size, nothing, splat(0.0), div(splat(127.0), size))
    low, top = splat(-127.0), splat(127.0)
    best, least = splat(1.0), splat(np.float32(np.inf))
    for candidate in range(clipped.shape[0]):
        share = splat(clipped[candidate])
        each, negative = div(factor, share), sub(splat(0.0), share)
        error = splat(0.0)
        for c in range(columns):
            # In units of the plain scale, so that no square overflows.
            x_c = load(tile, c * LANES)
            difference = fma(_code(x_c, each, low, top), negative, mul(x_c, factor))
            error = fma(difference, difference, error)
        best = choose(error, least, share, best)
        least = _smaller(error, least)
    store(scales, 0, mul(div(size, top), best))
    each = div(factor, best)
    for wide in range(out.shape[0]):
        _store_int8(tile, wide * INPUTS * LANES, INPUTS, each, -127.0, spare, out[wide], 0)


@twin_kernels(
    "(Array(float32, 2, 'A', readonly=True), Array(float32, 1, 'C', readonly=True), uint16[:, :, ::1], "
    "float32[:, ::1])"
)
def _by_output(x: F32, clipped: F32, out: U16, scales: F32) -> None:
    for high in prange(out.shape[0]):
        _encode_outputs(x, high, clipped, out[high], scales[high])


def prepare() -> None:
    """Compile what `encode` needs, or load it from the cache; to be called once before."""
    warm_up()


def encode(encoding: Encoding, values: F32) -> StoredMatrix:
    """Store numbers in an encoding; deterministic, and the same for an output whatever stands beside it.

    Args:
        encoding: of the result.
        values: float32 [outputs, inputs] for integer encodings, of any shape for the others; finite, and not
            beyond `LARGEST` where scales are FP16. Not changed.

    Returns:
        Bfloat16 rounded to the nearest, half to even. With integer encodings zeros for groups whose largest
        magnitude is no more than half of the least FP16 number (2^-25), or for rows below 2^-100.
    """
    if encoding is Encoding.F32:
        return StoredMatrix.of(values)
    if encoding is Encoding.BF16:
        return StoredMatrix(encoding, values.shape, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    high, wide = block_counts(values.shape)
    block = encoding.block_bytes or 0
    codes = np.empty((high, wide, block), np.uint8)
    words = codes.view(np.uint16)
    if encoding is Encoding.INT8:
        by_output = np.empty((high, OUTPUTS), np.float32)
        _by_output(values, _LEAST_CLIPPED, words, by_output)
        return StoredMatrix(encoding, values.shape, codes, by_output.reshape(-1))
    scales = np.empty((high, wide * 2 * OUTPUTS), np.float32)
    if encoding is Encoding.INT4:
        _grouped(values, _INT4_DIVISORS, np.float32(-8.0), words, scales)
    else:
        _grouped(values, _INT8_DIVISORS, np.float32(-128.0), words, scales)
    words[..., :32] = scales.reshape(high, wide, 32).astype(np.float16).view(np.uint16)
    return StoredMatrix(encoding, values.shape, codes)
