"""Vectors of sixteen float32 for the compiled kernels.

A kernel that computes with `Lanes` has one order of operations on every processor: sixteen lanes are one
AVX-512 register, two AVX ones or four of NEON, and a sum over lanes is a fixed tree. A row's result therefore
depends neither on the instruction set nor on how many rows share the call.

Indices are flat, into C-contiguous arrays, and are **not checked**: the wrapper that starts a kernel has to
have checked all shapes. Arrays are float32; those of uint16 hold bfloat16, the upper half of a float32. In an
array's place may stand the address of float32 numbers, which is what large kernels compile fastest with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

import llvmlite.ir as ir
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from cascadia_p2p.compiled.emitting import Builder, Value, emit_call, spread

LANES: Final = 16
"""Float32 numbers in one vector."""

F32: TypeAlias = npt.NDArray[np.float32]
BF16: TypeAlias = npt.NDArray[np.uint16]
Numbers: TypeAlias = F32 | int
"""A float32 array, or the address of one."""
Real: TypeAlias = float | np.float32


class Lanes:
    """Sixteen float32, as the type checker sees them; exists only inside compiled kernels."""


_Emit: TypeAlias = Callable[[Builder, Sequence[Value]], Value]

_FLOAT = ir.FloatType()
_BIT, _INT16, _INT32, _INT64 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTEGERS = ir.VectorType(_INT32, LANES)
_BITS = ir.VectorType(_BIT, LANES)
_ANYTHING = ir.Constant(_VECTOR, ir.Undefined)


class _LanesType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: object, front_end_type: object) -> None:
        super().__init__(manager, front_end_type, _VECTOR)


def _constant(value: float) -> Value:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * LANES)


def _integers(values: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(_INT32, len(values)), list(values))


def _splat(builder: Builder, scalar: Value) -> Value:
    return spread(builder, scalar, LANES)


def _first_lanes(builder: Builder, count: Value) -> Value:
    """Bits of the lanes below an int64 count."""
    narrow = builder.trunc(count, _INT32)
    return builder.icmp_signed("<", _integers(range(LANES)), _splat(builder, narrow))


def _fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    return emit_call(builder, "llvm.fma.v16f32", _VECTOR, (a, b, c))


def _tree(combine: Callable[[Value, Value], Value], builder: Builder, vector: Value) -> Value:
    """Fold the upper half onto the lower one until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        anything = ir.Constant(vector.type, ir.Undefined)
        low = builder.shuffle_vector(vector, anything, _integers(range(width)))
        high = builder.shuffle_vector(vector, anything, _integers(range(width, 2 * width)))
        vector = combine(low, high)
    return builder.extract_element(vector, _INT32(0))


def _larger(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_exp(builder: Builder, arguments: Sequence[Value]) -> Value:
    """Take out multiples of ln 2, then a polynomial (Cephes `expf`), then scale by the power of two."""
    (x,) = arguments
    # Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum; integer conversion of a
    # non-finite number would be undefined.
    magic = _constant(12582912.0)
    shifted = _fma(builder, x, _constant(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = _fma(builder, n, _constant(-0.693359375), x)
    r = _fma(builder, n, _constant(2.12194440e-4), r)
    p = _constant(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = _fma(builder, p, r, _constant(coefficient))
    p = _fma(builder, builder.fmul(p, r), r, r)
    p = builder.fadd(p, _constant(1.0))
    bits = builder.sub(builder.bitcast(shifted, _INTEGERS), _integers([0x4B400000] * LANES))
    bits = builder.shl(builder.add(bits, _integers([127] * LANES)), _integers([23] * LANES))
    result = builder.fmul(p, builder.bitcast(bits, _VECTOR))
    too_low = builder.fcmp_ordered("<", x, _constant(-87.0))
    too_high = builder.fcmp_ordered(">", x, _constant(88.0))
    result = builder.select(too_high, _constant(float("inf")), result)
    return builder.select(too_low, _constant(0.0), result)


def _emit_choose(builder: Builder, arguments: Sequence[Value]) -> Value:
    low, high, one, other = arguments
    return builder.select(builder.fcmp_ordered("<", low, high), one, other)


def _emit_keep(builder: Builder, arguments: Sequence[Value]) -> Value:
    vector, low, high, other = arguments
    inside = builder.and_(_first_lanes(builder, high), builder.not_(_first_lanes(builder, low)))
    return builder.select(inside, vector, _splat(builder, other))


# What a kernel may pass to an operation: lanes, a float, an integer.
_KINDS: Final = {"v": _lanes, "f": types.float32, "i": types.int64}


def _operation(kinds: str, result: str, emit: _Emit) -> object:
    """An intrinsic on lanes (v), floats (f) and integers (i); `result` is one of these letters."""
    signature = _KINDS[result](*(_KINDS[kind] for kind in kinds))

    def generate(context: object, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
        return emit(builder, arguments)

    # Numba reads the number of arguments off the function, so there is one form for each count.
    if len(kinds) == 1:
        return intrinsic(lambda typing, a: (signature, generate))
    if len(kinds) == 2:
        return intrinsic(lambda typing, a, b: (signature, generate))
    if len(kinds) == 3:
        return intrinsic(lambda typing, a, b, c: (signature, generate))
    return intrinsic(lambda typing, a, b, c, d: (signature, generate))


def _address(context: Any, builder: Builder, array_type: object, array: Value, index: Value) -> Value:
    if isinstance(array_type, types.Integer):
        return builder.gep(builder.inttoptr(array, _FLOAT.as_pointer()), [index])
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _wide(builder: Builder, address: Value) -> Value:
    return builder.bitcast(address, _VECTOR.as_pointer())


def _load_all(builder: Builder, address: Value) -> Value:
    value = builder.load(_wide(builder, address), typ=_VECTOR)
    value.align = 4
    return value


def _store_all(builder: Builder, address: Value, vector: Value) -> None:
    builder.store(vector, _wide(builder, address), align=4)


def _load_masked(builder: Builder, address: Value, count: Value) -> Value:
    pointer = _wide(builder, address)
    mask = _first_lanes(builder, count)
    arguments = (pointer, _INT32(4), mask, ir.Constant(_VECTOR, None))
    return emit_call(builder, "llvm.masked.load.v16f32.p0", _VECTOR, arguments)


def _store_masked(builder: Builder, address: Value, vector: Value, count: Value) -> None:
    pointer = _wide(builder, address)
    arguments = (vector, pointer, _INT32(4), _first_lanes(builder, count))
    emit_call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


def _is_whole(builder: Builder, count: Value) -> Value:
    return builder.icmp_signed(">=", count, _INT64(LANES))


def _load(typing: object, array: object, index: object) -> object:
    def generate(context: object, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        return _load_all(builder, _address(context, builder, sig.args[0], arguments[0], arguments[1]))

    return _lanes(array, types.int64), generate


def _store(typing: object, array: object, index: object, vector: object) -> object:
    def generate(context: Any, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        _store_all(builder, address, arguments[2])
        return context.get_dummy_value()

    return types.void(array, types.int64, _lanes), generate


def _load_part(typing: object, array: object, index: object, count: object) -> object:
    def generate(context: object, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        result = cgutils.alloca_once(builder, _VECTOR)
        with builder.if_else(_is_whole(builder, arguments[2])) as (whole, part):
            with whole:
                builder.store(_load_all(builder, address), result)
            with part:
                builder.store(_load_masked(builder, address, arguments[2]), result)
        return builder.load(result)

    return _lanes(array, types.int64, types.int64), generate


def _store_part(typing: object, array: object, index: object, vector: object, count: object) -> object:
    def generate(context: Any, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        with builder.if_else(_is_whole(builder, arguments[3])) as (whole, part):
            with whole:
                _store_all(builder, address, arguments[2])
            with part:
                _store_masked(builder, address, arguments[2], arguments[3])
        return context.get_dummy_value()

    return types.void(array, types.int64, _lanes, types.int64), generate


def _broadcast(typing: object, array: object, index: object) -> object:
    def generate(context: object, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        return _splat(builder, builder.load(address, typ=_FLOAT))

    return _lanes(array, types.int64), generate


def _prefetch(typing: object, array: object, index: object) -> object:
    def generate(context: Any, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        pointer = builder.bitcast(address, ir.IntType(8).as_pointer())
        # To read, into the second level, data.
        emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), (pointer, _INT32(0), _INT32(2), _INT32(1)))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def _number(typing: object, array: object, index: object) -> object:
    def generate(context: object, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        return builder.load(_address(context, builder, sig.args[0], arguments[0], arguments[1]), typ=_FLOAT)

    return types.float32(array, types.int64), generate


def _load_bf16(typing: object, array: object, index: object) -> object:
    def generate(context: object, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        narrow = ir.VectorType(_INT16, LANES)
        halves = builder.load(builder.bitcast(address, narrow.as_pointer()), typ=narrow)
        halves.align = 2
        bits = builder.shl(builder.zext(halves, _INTEGERS), _integers([16] * LANES))
        return builder.bitcast(bits, _VECTOR)

    return _lanes(array, types.int64), generate


def _rounded_half(builder: Builder, number: Value) -> Value:
    """Bits of the nearest bfloat16, ties to even; what is not a number stays so."""
    bits = builder.bitcast(number, _INT32)
    upper = builder.lshr(bits, _INT32(16))
    odd = builder.and_(upper, _INT32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _INT32(0x7FFF))), _INT32(16))
    quiet = builder.or_(upper, _INT32(0x40))
    unordered = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(unordered, quiet, rounded), _INT16)


def _put(typing: object, array: Any, index: object, number: object) -> object:
    def generate(context: Any, builder: Builder, sig: Any, arguments: Sequence[Value]) -> Value:
        address = _address(context, builder, sig.args[0], arguments[0], arguments[1])
        number = arguments[2]
        if getattr(sig.args[0], "dtype", None) == types.uint16:
            number = _rounded_half(builder, number)
        builder.store(number, address)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), generate


load = cast("Callable[[Numbers, int], Lanes]", intrinsic(_load))
"""`load(array, index)`: sixteen numbers from a flat index on."""

store = cast("Callable[[Numbers, int, Lanes], None]", intrinsic(_store))
"""`store(array, index, lanes)`."""

load_part = cast("Callable[[Numbers, int, int], Lanes]", intrinsic(_load_part))
"""`load_part(array, index, count)`: the first `count` numbers, zeros behind; all sixteen when count >= 16."""

store_part = cast("Callable[[Numbers, int, Lanes, int], None]", intrinsic(_store_part))
"""`store_part(array, index, lanes, count)`: store the first `count` lanes; all when count >= 16."""

broadcast = cast("Callable[[Numbers, int], Lanes]", intrinsic(_broadcast))
"""`broadcast(array, index)`: one number of an array in every lane."""

number = cast("Callable[[Numbers, int], float]", intrinsic(_number))
"""`number(array, index)`: one number of an array."""

load_bf16 = cast("Callable[[BF16, int], Lanes]", intrinsic(_load_bf16))
"""`load_bf16(array, index)`: sixteen bfloat16 from a flat index on, widened."""

prefetch = cast("Callable[[Numbers, int], None]", intrinsic(_prefetch))
"""`prefetch(array, index)`: have the cache line of a flat index brought near; any index will do."""

put = cast("Callable[[Numbers | BF16, int, Real], None]", intrinsic(_put))
"""`put(array, index, number)`: store one number as the array keeps it; bfloat16 to nearest, ties to even."""

splat = cast("Callable[[Real], Lanes]", _operation("f", "v", lambda b, a: _splat(b, a[0])))
"""One number in every lane."""

add = cast("Callable[[Lanes, Lanes], Lanes]", _operation("vv", "v", lambda b, a: b.fadd(a[0], a[1])))
sub = cast("Callable[[Lanes, Lanes], Lanes]", _operation("vv", "v", lambda b, a: b.fsub(a[0], a[1])))
mul = cast("Callable[[Lanes, Lanes], Lanes]", _operation("vv", "v", lambda b, a: b.fmul(a[0], a[1])))
div = cast("Callable[[Lanes, Lanes], Lanes]", _operation("vv", "v", lambda b, a: b.fdiv(a[0], a[1])))

fma = cast("Callable[[Lanes, Lanes, Lanes], Lanes]", _operation("vvv", "v", lambda b, a: _fma(b, *a)))
"""`a * b + c` with one rounding."""

larger = cast("Callable[[Lanes, Lanes], Lanes]", _operation("vv", "v", lambda b, a: _larger(b, a[0], a[1])))
"""The larger of two in each lane; the second where one is not a number."""

choose = cast("Callable[[Lanes, Lanes, Lanes, Lanes], Lanes]", _operation("vvvv", "v", _emit_choose))
"""`choose(low, high, one, other)`: lanes of `one` where low < high, of `other` elsewhere."""

exp = cast("Callable[[Lanes], Lanes]", _operation("v", "v", _emit_exp))
"""e to the x, relative error below 3e-7; 0 below -87, infinite above 88, not a number where x is not."""

keep = cast("Callable[[Lanes, int, int, Real], Lanes]", _operation("viif", "v", _emit_keep))
"""`keep(lanes, low, high, other)`: lanes `low` to `high - 1` as they are, `other` elsewhere."""

total = cast("Callable[[Lanes], float]", _operation("v", "f", lambda b, a: _tree(b.fadd, b, a[0])))
"""The sum over all lanes, as a tree of halves."""

largest = cast(
    "Callable[[Lanes], float]",
    _operation("v", "f", lambda b, a: _tree(lambda low, high: _larger(b, low, high), b, a[0])),
)
"""The largest lane."""
