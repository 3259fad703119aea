"""Panels of activations: rows as codes of 8 bits a group of 32, or as plain float32, in the order products
read.

With one plane a group of x is `code * scale`, scale = largest / 127. With two the rounding that the first
leaves is coded again, 254 times finer: `code * scale + rest * scale / 254`, which takes the place of a
second row.

A group with a number that is not finite gets the scale NaN, so that the row's results are not finite either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from cascadia_p2p.compiled.addresses import floats
from cascadia_p2p.compiled.compiling import part
from cascadia_p2p.compiled.emitting import Builder, Value, constant, emit_call, spread
from cascadia_p2p.matrices.encoding import GROUP, INPUTS

FINEST: Final = 254.0
"""How much finer the second plane is."""

_LANES: Final = 16
_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
_FLOATS, _INTS, _BYTES = (ir.VectorType(kind, _LANES) for kind in (_FLOAT, _INT, _BYTE))
_LEAST: Final = 1e-30
"""A group whose largest number is smaller counts as zeros: its codes would need factors beyond float32."""


def _place(b: Builder, address: Value, offset: int, kind: Any) -> Value:
    return b.inttoptr(b.add(address, _LONG(offset)), kind.as_pointer())


def _store_codes(b: Builder, values: list[Value], codes: Value, offset: int) -> tuple[list[Value], Value]:
    """Round to codes and store 32 bytes; the rounded numbers, and the sum of the codes."""
    rounded = [emit_call(b, "llvm.rint.v16f32", _FLOATS, (value,)) for value in values]
    whole = [b.fptosi(value, _INTS) for value in rounded]
    for half, code in enumerate(whole):
        b.store(b.trunc(code, _BYTES), _place(b, codes, offset + 16 * half, _BYTES), align=1)
    total = emit_call(b, "llvm.vector.reduce.add.v16i32", _INT, (b.add(*whole),))
    return rounded, total


def _largest(b: Builder, vector: Value) -> Value:
    """The largest lane of numbers of which none is NaN."""
    lanes = _LANES
    while lanes > 1:
        lanes //= 2
        anything = ir.Constant(vector.type, ir.Undefined)
        places = [ir.Constant(ir.VectorType(_INT, lanes), range_) for range_ in _halves(lanes)]
        low, high = (b.shuffle_vector(vector, anything, place) for place in places)
        vector = b.select(b.fcmp_ordered(">", low, high), low, high)
    return b.extract_element(vector, _INT(0))


def _halves(lanes: int) -> tuple[list[int], list[int]]:
    return list(range(lanes)), list(range(lanes, 2 * lanes))


def _emit(b: Builder, planes: int, arguments: Sequence[Value]) -> None:
    x, codes, scales, offsets = arguments
    values = []
    for half in range(2):
        value = b.load(_place(b, x, 64 * half, _FLOATS), typ=_FLOATS)
        value.align = 4
        values.append(value)
    # A product with zero is zero, unless the number is infinite or none at all.
    zeros = [b.fmul(value, constant(_FLOATS, 0.0)) for value in values]
    good = [b.fcmp_ordered("==", zero, constant(_FLOATS, 0.0)) for zero in zeros]
    bits = ir.IntType(_LANES)
    finite = b.icmp_unsigned("==", b.bitcast(b.and_(*good), bits), bits(2**_LANES - 1))
    # What is not finite would not convert to an integer, and would need slower ways to the largest.
    values = [b.select(keep, value, constant(_FLOATS, 0.0)) for keep, value in zip(good, values, strict=True)]
    sizes = [emit_call(b, "llvm.fabs.v16f32", _FLOATS, (value,)) for value in values]
    larger = b.select(b.fcmp_ordered(">", sizes[0], sizes[1]), sizes[0], sizes[1])
    largest = _largest(b, larger)
    there = b.and_(b.fcmp_ordered(">=", largest, _FLOAT(float(np.float32(_LEAST)))), finite)
    factor = b.select(there, b.fdiv(_FLOAT(127.0), largest), _FLOAT(0.0))
    scale = b.select(there, b.fdiv(largest, _FLOAT(127.0)), _FLOAT(0.0))
    scale = b.select(finite, scale, _FLOAT(float("nan")))
    scaled = [b.fmul(value, spread(b, factor, _LANES)) for value in values]
    rounded, total = _store_codes(b, scaled, codes, 0)
    b.store(scale, _place(b, scales, 0, _FLOAT), align=4)
    b.store(b.mul(total, _INT(-8)), _place(b, offsets, 0, _INT), align=4)
    if planes == 1:
        return
    rests = [b.fmul(b.fsub(v, r), constant(_FLOATS, FINEST)) for v, r in zip(scaled, rounded, strict=True)]
    _, total = _store_codes(b, rests, codes, 32)
    b.store(b.fdiv(scale, _FLOAT(FINEST)), _place(b, scales, 4, _FLOAT), align=4)
    b.store(b.mul(total, _INT(-8)), _place(b, offsets, 4, _INT), align=4)


def _coder(planes: int) -> Callable[[int, int, int, int], None]:
    name = f"code_group_{planes}"

    def code(typing: object, x: object, codes: object, scales: object, offsets: object) -> object:
        def generate(context: Any, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
            function = builder.module.globals.get(name)
            if function is None:
                function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_LONG] * 4), name)
                function.linkage = "internal"
                inner = ir.IRBuilder(function.append_basic_block())
                _emit(inner, planes, function.args)
                inner.ret_void()
            builder.call(function, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return cast("Callable[[int, int, int, int], None]", intrinsic(code))


_code_group_1 = _coder(1)
_code_group_2 = _coder(2)


@part
def put_codes(
    x: int, inputs: int, codes: int, scales: int, offsets: int, rows: int, row: int, planes: int
) -> None:
    """Code one row into its place of a panel.

    Args:
        x: address of float32 [inputs].
        inputs: how many; groups behind them, up to whole blocks, are zeros.
        codes: address of the panel's int8 [groups][rows * planes][32].
        scales: address of its float32 [groups][rows * planes].
        offsets: address of its int32 [groups][rows * planes], minus the sums of the codes times 8.
        rows: of the panel.
        row: the row's place.
        planes: 1 or 2.
    """
    whole = inputs // GROUP
    wide = rows * planes
    for g in range(whole):
        put_group(x + 128 * g, codes, scales, offsets, g * wide + row * planes, planes)
    groups = (inputs + INPUTS - 1) // INPUTS * (INPUTS // GROUP)
    if groups == whole:
        return
    # Lives until its last use, which has to come after the last read by address.
    rest = np.zeros(INPUTS, np.float32)
    source = floats(x, inputs)
    for k in range(whole * GROUP, inputs):
        rest[k - whole * GROUP] = source[k]
    for g in range(whole, groups):
        at = rest.ctypes.data + 4 * GROUP * (g - whole)
        put_group(at, codes, scales, offsets, g * wide + row * planes, planes)


@part
def put_group(x: int, codes: int, scales: int, offsets: int, place: int, planes: int) -> None:
    """Code 32 numbers; `place` counts groups of 32 codes from the start of the panel."""
    if planes == 1:
        _code_group_1(x, codes + 32 * place, scales + 4 * place, offsets + 4 * place)
    else:
        _code_group_2(x, codes + 32 * place, scales + 4 * place, offsets + 4 * place)


@part
def put_floats(x: int, inputs: int, out: int, width: int) -> None:
    """Copy one float32 row to an address, with zeros behind it up to `width`."""
    source, target = floats(x, inputs), floats(out, width)
    for k in range(inputs):
        target[k] = source[k]
    for k in range(inputs, width):
        target[k] = 0.0
