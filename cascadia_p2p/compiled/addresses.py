"""Raw memory, atomic counters and clock cycles inside compiled kernels.

Nothing here checks bounds or keeps memory alive: whoever hands an address to a kernel has checked shapes and
holds the array until the kernel has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import llvmlite.ir as ir
import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cascadia_p2p.compiled.compiling import part
from cascadia_p2p.compiled.emitting import Builder, Value, emit_call

F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]

_INT64 = ir.IntType(64)


def _pointer(typing: object, address: object) -> object:
    def generate(context: object, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _fetch_add(typing: object, address: object, value: object) -> object:
    def generate(context: object, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _load_acquire(typing: object, address: object) -> object:
    def generate(context: object, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8, typ=_INT64)

    return types.int64(types.int64), generate


def _cycles(typing: object) -> object:
    def generate(context: object, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
        return emit_call(builder, "llvm.readcyclecounter", _INT64, ())

    return types.int64(), generate


def _pause(typing: object) -> object:
    def generate(context: Any, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
        emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), ())
        return context.get_dummy_value()

    return types.void(), generate


def _call(typing: object, function: object, arguments: Any) -> object:
    def generate(context: Any, builder: Builder, sig: Any, values: Sequence[Value]) -> Value:
        kinds = sig.args[1].types
        given = cgutils.unpack_tuple(builder, values[1], len(kinds))
        # What numba's own calls look like: places for a result and an error, then the arguments.
        nothing = cgutils.alloca_once(builder, cgutils.voidptr_t)
        error = cgutils.alloca_once(builder, cgutils.voidptr_t)
        signature = ir.FunctionType(
            ir.IntType(32), [nothing.type, error.type, *(value.type for value in given)]
        )
        target = builder.inttoptr(values[0], signature.as_pointer())
        builder.call(target, [nothing, error, *given])
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


pointer = cast("Callable[[int], Any]", intrinsic(_pointer))
"""`pointer(address)`: an untyped pointer, for `numba.carray`."""

fetch_add = cast("Callable[[int, int], int]", intrinsic(_fetch_add))
"""`fetch_add(address, value)`: add to an int64 as one step of all threads; what was there before."""

load_acquire = cast("Callable[[int], int]", intrinsic(_load_acquire))
"""`load_acquire(address)`: an int64, with all that other threads wrote before they counted it up."""

cycles = cast("Callable[[], int]", intrinsic(_cycles))
"""`cycles()`: the processor's time stamp, at a rate that does not change; x86 only."""

pause = cast("Callable[[], None]", intrinsic(_pause))
"""`pause()`: tell the core that its thread is only waiting; x86 only."""


call = cast("Callable[[int, tuple[int, ...]], None]", intrinsic(_call))
"""`call(address, arguments)`: run a kernel that takes int64 only, whose address `compiling.address` gave."""


@part
def floats(address: int, count: int) -> F32:
    """float32 [count] at an address."""
    found: F32 = numba.carray(pointer(address), (count,), np.float32)
    return found


@part
def rows_of(address: int, rows: int, width: int) -> F32:
    """float32 [rows, width] at an address."""
    found: F32 = numba.carray(pointer(address), (rows, width), np.float32)
    return found


@part
def integers(address: int, count: int) -> I32:
    """int32 [count] at an address."""
    found: I32 = numba.carray(pointer(address), (count,), np.int32)
    return found


@part
def longs(address: int, count: int) -> I64:
    """int64 [count] at an address."""
    found: I64 = numba.carray(pointer(address), (count,), np.int64)
    return found


@part
def cube_of(address: int, first: int, second: int, third: int) -> F32:
    """float32 [first, second, third] at an address."""
    found: F32 = numba.carray(pointer(address), (first, second, third), np.float32)
    return found


@part
def table_of(address: int, rows: int, width: int) -> I32:
    """int32 [rows, width] at an address."""
    found: I32 = numba.carray(pointer(address), (rows, width), np.int32)
    return found
