"""What kernels and operations written as LLVM instructions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import llvmlite.ir as ir
from numba.core import cgutils

# Llvmlite has no types of its own.
Builder: TypeAlias = Any
Value: TypeAlias = Any

_INT, _LONG = ir.IntType(32), ir.IntType(64)


def emit_call(b: Builder, name: str, result: object, arguments: Sequence[Value]) -> Value:
    """Call a function, usually one of LLVM's own, by its name."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def constant(kind: Any, value: float) -> Value:
    """A vector with the same number in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def spread(b: Builder, value: Value, lanes: int) -> Value:
    """A vector with a value in every lane."""
    anything = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = b.insert_element(anything, value, _INT(0))
    return b.shuffle_vector(first, anything, constant(ir.VectorType(_INT, lanes), 0))


def load_behind(b: Builder, base: Value, offset: int, kind: Any, align: int) -> Value:
    """What lies so many bytes behind a pointer to bytes."""
    value = b.load(b.bitcast(b.gep(base, [_LONG(offset)]), kind.as_pointer()), typ=kind)
    value.align = align
    return value


def emit_loop(
    b: Builder,
    count: Value,
    initial: Sequence[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """`for i in range(count): values = body(i, values)` for a count of one or more; the last values."""
    before = b.block
    head, behind = b.function.append_basic_block("loop"), b.function.append_basic_block("behind")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(_LONG)
    index.add_incoming(_LONG(0), before)
    carried = []
    for value in initial:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        carried.append(phi)
    values = body(index, list(carried))
    following = b.add(index, _LONG(1))
    index.add_incoming(following, b.block)
    for phi, value in zip(carried, values, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), head, behind)
    b.position_at_end(behind)
    return values


def function_by_rows(
    module: Any, name: str, arguments: int, most: int, emit: Callable[[Builder, int, Sequence[Value]], None]
) -> Value:
    """A function of int64 arguments whose first is a number of rows, with code of its own for each number.

    A function of its own keeps its caller small, and either's registers out of the other's way.

    Args:
        module: that calls it; the function is made once.
        name: of the function.
        arguments: how many, the rows among them.
        most: rows; with more, or none, the function does nothing.
        emit: writes the code for a number of rows, given the other arguments.
    """
    function = module.globals.get(name)
    if function is not None:
        return function
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_LONG] * arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block())
    rows, *others = function.args
    behind = function.append_basic_block("none")
    choice = b.switch(rows, behind)
    for count in range(1, most + 1):
        block = function.append_basic_block(f"rows{count}")
        choice.add_case(_LONG(count), block)
        b.position_at_end(block)
        emit(b, count, others)
        b.ret_void()
    b.position_at_end(behind)
    b.ret_void()
    return function
