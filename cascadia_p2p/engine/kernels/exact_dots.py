"""Products of sixteen outputs with float32 activations, which leave the weights' numbers as they are.

Inputs of a coded block are taken one after the other in four interleaved sums a group, those of a float32 row
sixteen at a time: either way the order of operations depends on nothing but the number of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from cascadia_p2p.compiled.addresses import F32, floats
from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.emitting import (
    Builder,
    Value,
    constant,
    emit_call,
    emit_loop,
    function_by_rows,
    load_behind,
    spread,
)
from cascadia_p2p.compiled.simd import LANES, fma, load_part, splat, total
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.matrices.encoding import Encoding

MOST_ROWS: Final = 4
"""Rows that one pass over weights takes."""

_INT, _LONG, _BYTE = ir.IntType(32), ir.IntType(64), ir.IntType(8)
_HALF, _FLOAT, _VOID = ir.HalfType(), ir.FloatType(), ir.VoidType()
_INTS, _FLOATS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_INT, _FLOAT, _HALF))
_SUMS: Final = 4
_FOUR_BIT: Final = (Encoding.INT4, Encoding.INT4_AFFINE)


def _fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return emit_call(b, "llvm.fma.v16f32", _FLOATS, (x, y, z))


def _total(b: Builder, parts: list[Value]) -> Value:
    return b.fadd(b.fadd(parts[0], parts[1]), b.fadd(parts[2], parts[3]))


def _numbers(b: Builder, codes: Value, shift: int, bits: int, more: int) -> Value:
    """Unsigned codes at a place of each lane, as float32 without what they are stored too large by.

    Codes go into the low bits of 2^23, whose float32 neighbours are one apart.
    """
    shifted = b.lshr(codes, constant(_INTS, shift)) if shift else codes
    code = b.and_(shifted, constant(_INTS, (1 << bits) - 1))
    number = b.bitcast(b.or_(code, constant(_INTS, 0x4B000000)), _FLOATS)
    return b.fsub(number, constant(_FLOATS, 8388608.0 + more))


def _places(encoding: Encoding) -> list[tuple[int, int, int]]:
    """For each input of a group: the vector of codes, the place in its lanes, the input. In order of
    loads."""
    if encoding in _FOUR_BIT:
        return [
            (j, 8 * b + 4 * half, 8 * j + 4 * half + b) for j in range(4) for half in (0, 1) for b in range(4)
        ]
    return [(j, 8 * b, 4 * j + b) for j in range(8) for b in range(4)]


def _emit(b: Builder, rows: int, arguments: Sequence[Value], *, encoding: Encoding) -> None:
    weights, x, out = (b.inttoptr(address, _BYTE.as_pointer()) for address in arguments[:3])
    blocks, stride = arguments[3:]
    affine = encoding is Encoding.INT4_AFFINE
    grouped, bits = encoding is not Encoding.INT8, 4 if encoding in _FOUR_BIT else 8
    size, step = encoding.block_bytes or 0, 64 * (4 if bits == 4 else 8)
    first, more = 64 * (grouped + affine), 0 if affine else 1 << (bits - 1)
    starts = [b.gep(x, [b.mul(stride, _LONG(r))]) for r in range(rows)]

    def group(g: int, w: Value, inputs: list[Value], sums: list[Value]) -> None:
        parts = [[constant(_FLOATS, 0.0)] * _SUMS for _ in range(rows)]
        plain = [[constant(_FLOATS, 0.0)] * _SUMS for _ in range(rows)]
        loaded: dict[int, Value] = {}
        for vector, shift, k in _places(encoding):
            if vector not in loaded:
                loaded[vector] = load_behind(b, w, first + g * step + 64 * vector, _INTS, 64)
            number = _numbers(b, loaded[vector], shift, bits, more)
            for r in range(rows):
                value = spread(b, load_behind(b, inputs[r], 4 * (32 * g + k), _FLOAT, 4), LANES)
                place = k % _SUMS
                parts[r][place] = _fma(b, number, value, parts[r][place])
                if affine:
                    plain[r][place] = b.fadd(plain[r][place], value)
        scale = (
            b.fpext(load_behind(b, w, g * 32, _HALVES, 32), _FLOATS) if grouped else constant(_FLOATS, 1.0)
        )
        for r in range(rows):
            sums[r] = _fma(b, _total(b, parts[r]), scale, sums[r])
            if affine:
                offset = b.fpext(load_behind(b, w, 64 + g * 32, _HALVES, 32), _FLOATS)
                sums[r] = _fma(b, _total(b, plain[r]), offset, sums[r])

    def body(i: Value, sums: list[Value]) -> list[Value]:
        w = b.gep(weights, [b.mul(i, _LONG(size))])
        inputs = [b.gep(start, [b.mul(i, _LONG(256))]) for start in starts]
        for g in range(2):
            group(g, w, inputs, sums)
        return sums

    for r, value in enumerate(emit_loop(b, blocks, [constant(_FLOATS, 0.0)] * rows, body)):
        b.store(value, b.bitcast(b.gep(out, [_LONG(64 * r)]), _FLOATS.as_pointer()), align=4)


def _exact_dot(encoding: Encoding) -> Callable[[int, int, int, int, int, int], None]:
    def dot(
        typing: object,
        rows: object,
        weights: object,
        x: object,
        out: object,
        blocks: object,
        stride: object,
    ) -> object:
        def generate(context: Any, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
            emit = partial(_emit, encoding=encoding)
            function = function_by_rows(builder.module, f"exact_dot_{encoding}", 6, MOST_ROWS, emit)
            builder.call(function, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return cast("Callable[[int, int, int, int, int, int], None]", intrinsic(dot))


_exact_dot_int4 = _exact_dot(Encoding.INT4)
_exact_dot_int4_affine = _exact_dot(Encoding.INT4_AFFINE)
_exact_dot_int8 = _exact_dot(Encoding.INT8)
_exact_dot_int8_grouped = _exact_dot(Encoding.INT8_GROUPED)

_SIGNATURE: Final = "(int64, int64, int64, int64, int64, int64)"


@kernel(_SIGNATURE, usable=instructions() is not None)
def exact_dot_int4(rows: int, weights: int, x: int, out: int, blocks: int, stride: int) -> None:
    """One block row times up to four float32 rows.

    Args:
        rows: of x.
        weights: address of the block row.
        x: address of the first row, whose inputs go up to whole blocks.
        out: address of float32 [rows][16].
        blocks: of inputs, one or more.
        stride: bytes from one row of x to the next.
    """
    _exact_dot_int4(rows, weights, x, out, blocks, stride)


@kernel(_SIGNATURE, usable=instructions() is not None)
def exact_dot_int4_affine(rows: int, weights: int, x: int, out: int, blocks: int, stride: int) -> None:
    """As `exact_dot_int4`, for codes with a scale and an offset a group."""
    _exact_dot_int4_affine(rows, weights, x, out, blocks, stride)


@kernel(_SIGNATURE, usable=instructions() is not None)
def exact_dot_int8(rows: int, weights: int, x: int, out: int, blocks: int, stride: int) -> None:
    """As `exact_dot_int4`, for 8-bit codes; the scale of an output is not in the result."""
    _exact_dot_int8(rows, weights, x, out, blocks, stride)


@kernel(_SIGNATURE, usable=instructions() is not None)
def exact_dot_int8_grouped(rows: int, weights: int, x: int, out: int, blocks: int, stride: int) -> None:
    """As `exact_dot_int4`, for 8-bit codes with a scale a group."""
    _exact_dot_int8_grouped(rows, weights, x, out, blocks, stride)


@kernel("(int64, int64, int64, int64, int64, int64, int64)", usable=instructions() is not None)
def exact_dot_f32(rows: int, weights: int, x: int, out: int, inputs: int, stride: int, outputs: int) -> None:
    """Up to sixteen rows of a float32 matrix times up to four rows of x; the rest of out comes as it was.

    `weights` and `x` are addresses of row-major numbers, `stride` bytes from one row of x to the next, whose
    inputs go up to a multiple of 64, and `out` that of float32 [rows][16].
    """
    result = floats(out, rows * 16)
    matrix = floats(weights, outputs * inputs)
    values = floats(x, rows * (stride // 4))
    width = stride // 4
    for n in range(0, outputs, 2):
        other = min(n + 1, outputs - 1)
        _two_outputs(rows, matrix, n, other, values, width, inputs, result)


@part
def _two_outputs(
    rows: int, matrix: F32, n: int, other: int, values: F32, width: int, inputs: int, result: F32
) -> None:
    """Rows beyond the last are taken as the last again."""
    one, two, three = min(1, rows - 1) * width, min(2, rows - 1) * width, min(3, rows - 1) * width
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(0.0)
    for k in range(0, inputs, LANES):
        wa = load_part(matrix, n * inputs + k, inputs - k)
        wb = load_part(matrix, other * inputs + k, inputs - k)
        x0 = load_part(values, k, inputs - k)
        a0, b0 = fma(wa, x0, a0), fma(wb, x0, b0)
        if rows > 1:
            x1 = load_part(values, one + k, inputs - k)
            x2 = load_part(values, two + k, inputs - k)
            x3 = load_part(values, three + k, inputs - k)
            a1, b1 = fma(wa, x1, a1), fma(wb, x1, b1)
            a2, b2 = fma(wa, x2, a2), fma(wb, x2, b2)
            a3, b3 = fma(wa, x3, a3), fma(wb, x3, b3)
    result[n], result[other] = total(a0), total(b0)
    if rows > 1:
        result[16 + n], result[16 + other] = total(a1), total(b1)
    if rows > 2:
        result[32 + n], result[32 + other] = total(a2), total(b2)
    if rows > 3:
        result[48 + n], result[48 + other] = total(a3), total(b3)
