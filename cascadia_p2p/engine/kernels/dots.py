"""Products of one block row of coded weights with a panel of coded activations, as LLVM instructions.

A block row is sixteen outputs over all inputs (`matrices.encoding`). A panel holds M rows of activations:
codes int8 [groups of 32][M][32], scales float32 [groups][M], and minus the sums of codes
times 8, int32 [groups][M], which make up for weights being stored without a sign. A 32-bit lane belongs to
one output, so there is no sum over lanes; activations are broadcast four bytes at a time.

Sums of codes are exact integers, and the float32 sum of an output over groups goes in order of the groups:
a row's result depends neither on the instruction set nor on M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from cascadia_p2p.compiled.compiling import kernel
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
from cascadia_p2p.engine.kernels.instructions import Instructions, instructions, least_prefetched
from cascadia_p2p.matrices.encoding import Encoding

_BIT, _BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_HALF, _FLOAT, _VOID = ir.HalfType(), ir.FloatType(), ir.VoidType()

_OUTPUTS: Final = 16
_SCALES: Final = 64
"""Bytes of a block's FP16 scales."""


def _vector(kind: object, lanes: int) -> Any:
    return ir.VectorType(kind, lanes)


class _Emitter:
    """Vector instructions for one set.

    Args:
        builder: of the function that is written.
        chosen: the set.
    """

    def __init__(self, builder: Builder, chosen: Instructions) -> None:
        self.b = builder
        self.set = chosen
        self.lanes = chosen.lanes
        self.halves = _OUTPUTS // chosen.lanes

    def constant(self, kind: object, lanes: int, value: float) -> Value:
        return constant(_vector(kind, lanes), value)

    def ints(self, value: int) -> Value:
        return self.constant(_INT, self.lanes, value)

    def call(self, name: str, result: object, arguments: Sequence[Value]) -> Value:
        return emit_call(self.b, name, result, arguments)

    def at(self, base: Value, offset: Value | int) -> Value:
        """The address so many bytes behind another."""
        value = _LONG(offset) if isinstance(offset, int) else offset
        return self.b.gep(base, [value])

    def load(self, base: Value, offset: int, kind: Any, align: int) -> Value:
        return load_behind(self.b, base, offset, kind, align)

    def spread(self, base: Value, offset: int, kind: Any) -> Value:
        """Four bytes in every lane."""
        return spread(self.b, self.load(base, offset, kind, 4), self.lanes)

    def fma(self, a: Value, x: Value, y: Value) -> Value:
        return self.call(f"llvm.fma.v{self.lanes}f32", a.type, (a, x, y))

    def start(self, initial: Value, bits: int) -> Value:
        """An empty sum of products."""
        if self.set is not Instructions.AVX2:
            return initial
        return self.constant(_SHORT, 16, 0) if bits == 4 else self.ints(0)

    def add_products(self, total: Value, weights: Value, activations: Value, bits: int) -> Value:
        """Four products of an unsigned and a signed byte onto each lane's sum."""
        if self.set is Instructions.AVX512_VNNI:
            return self.call("llvm.x86.avx512.vpdpbusd.512", total.type, (total, weights, activations))
        if self.set is Instructions.AVX_VNNI:
            return self.call("llvm.x86.avx512.vpdpbusd.256", total.type, (total, weights, activations))
        bytes_, shorts = _vector(_BYTE, 32), _vector(_SHORT, 16)
        weights = self.b.bitcast(weights, bytes_)
        activations = self.b.bitcast(activations, bytes_)
        if bits == 4:
            # Sums of 16 bits hold a whole group: 16 products of at most 15 x 127.
            pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", shorts, (weights, activations))
            return self.b.add(total, pairs)
        # Two products of 255 x 127 would not fit 16 bits: the sign goes to the activations, at most 128
        # stays.
        signed = self.b.xor(weights, self.constant(_BYTE, 32, 0x80))
        size = self.call("llvm.abs.v32i8", bytes_, (signed, _BIT(0)))
        turned = self.call("llvm.x86.avx2.psign.b", bytes_, (activations, signed))
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", shorts, (size, turned))
        ones = self.constant(_SHORT, 16, 1)
        return self.b.add(total, self.call("llvm.x86.avx2.pmadd.wd", total.type, (pairs, ones)))

    def finish(self, total: Value, initial: Value, bits: int) -> Value:
        """A sum as signed weights would have given it."""
        if self.set is not Instructions.AVX2 or bits == 8:
            # AVX2's way with 8 bits works with signed weights from the start.
            return total
        ones = self.constant(_SHORT, 16, 1)
        pairs = self.call("llvm.x86.avx2.pmadd.wd", initial.type, (total, ones))
        return self.b.add(initial, pairs)


class _Block:
    """Writes what happens with one block of weights."""

    def __init__(self, e: _Emitter, encoding: Encoding, rows: int) -> None:
        self.e, self.rows = e, rows
        self.affine = encoding is Encoding.INT4_AFFINE
        self.bits = 4 if self.affine or encoding is Encoding.INT4 else 8
        self.grouped = encoding is not Encoding.INT8
        self.size = encoding.block_bytes or 0
        self.first_code = _SCALES * (self.grouped + self.affine)
        # With few rows an addition would wait for the one before: every other goes to a second sum. With many
        # rows of 4 bits that only costs the addition of both; 8 bits have more additions a row.
        self.two = rows == 1 or (e.lanes == _OUTPUTS and (rows < 4 or self.bits == 8))
        # One row keeps products of high nibbles sixteen times too large in it: no shifts.
        self.apart = self.bits == 4 and rows == 1 and e.set is not Instructions.AVX2

    def prefetch(self, near: Value) -> None:
        """Ask for as many bytes as a block has."""
        e = self.e
        if self.rows < least_prefetched():
            return
        for line in range(0, self.size, 64):
            e.call("llvm.prefetch.p0", _VOID, (e.at(near, line), _INT(0), _INT(3), _INT(1)))

    def group(self, g: int, w: Value, q: Value, s: Value, c: Value, sums: list[Value]) -> None:
        """Add one group of 32 inputs to every row's float32 sums."""
        e, b, rows = self.e, self.e.b, self.rows
        initial = [self._initial(c, g, r) for r in range(rows)]
        one = [[e.start(initial[r], self.bits)] * e.halves for r in range(rows)]
        other = [[e.start(e.ints(0), self.bits)] * e.halves for _ in range(rows)] if self.two else one
        for step in range(4 if self.bits == 4 else 8):
            codes = self._codes(w, g, step)
            if self.bits == 8:
                self._products(other if step % 2 else one, codes, q, g, 4 * step)
                continue
            mask = e.ints(0x0F0F0F0F)
            self._products(one, [b.and_(v, mask) for v in codes], q, g, 8 * step)
            if self.apart:
                upper = [b.and_(v, e.ints(0xF0F0F0F0)) for v in codes]
            else:
                upper = [b.and_(b.lshr(v, e.ints(4)), mask) for v in codes]
            self._products(other, upper, q, g, 8 * step + 4)
        scales = self._halves(w, g * 2 * _OUTPUTS) if self.grouped else []
        offsets = self._halves(w, _SCALES + g * 2 * _OUTPUTS) if self.affine else []
        # Of what is eightfold and negative in the panel.
        eighth = e.constant(_FLOAT, e.lanes, -0.125)
        offsets = [b.fmul(offset, eighth) for offset in offsets]
        for r in range(rows):
            own = e.spread(s, (g * rows + r) * 4, _FLOAT)
            for h in range(e.halves):
                total = one[r][h]
                if self.two:
                    more = b.ashr(other[r][h], e.ints(4)) if self.apart else other[r][h]
                    total = b.add(total, more)
                total = e.finish(total, initial[r], self.bits)
                number = b.sitofp(total, _vector(_FLOAT, e.lanes))
                factor = b.fmul(own, scales[h]) if self.grouped else own
                at = r * e.halves + h
                sums[at] = e.fma(number, factor, sums[at])
                if self.affine:
                    minus = b.sitofp(e.spread(c, (g * rows + r) * 4, _INT), _vector(_FLOAT, e.lanes))
                    sums[at] = e.fma(minus, b.fmul(own, offsets[h]), sums[at])

    def _initial(self, c: Value, g: int, r: int) -> Value:
        """What makes up for weights being stored too large by 8 or 128; offsets of their own need nothing."""
        e = self.e
        if self.affine:
            return e.ints(0)
        eightfold = e.spread(c, (g * self.rows + r) * 4, _INT)
        return eightfold if self.bits == 4 else e.b.shl(eightfold, e.ints(4))

    def _codes(self, w: Value, g: int, step: int) -> list[Value]:
        e = self.e
        steps = 4 if self.bits == 4 else 8
        at = self.first_code + (g * steps + step) * 64
        kind, size = _vector(_INT, e.lanes), 4 * e.lanes
        return [e.load(w, at + h * size, kind, size) for h in range(e.halves)]

    def _products(self, sums: list[list[Value]], weights: list[Value], q: Value, g: int, k: int) -> None:
        e = self.e
        for r in range(self.rows):
            x = e.spread(q, (g * self.rows + r) * 32 + k, _INT)
            # Both halves use one broadcast before the next is loaded; else registers run out.
            for h in range(e.halves):
                sums[r][h] = e.add_products(sums[r][h], weights[h], x, self.bits)

    def _halves(self, w: Value, at: int) -> list[Value]:
        """Sixteen FP16 numbers of a group, as float32."""
        e = self.e
        kind, size = _vector(_HALF, e.lanes), 2 * e.lanes
        halves = [e.load(w, at + h * size, kind, size) for h in range(e.halves)]
        return [e.b.fpext(half, _vector(_FLOAT, e.lanes)) for half in halves]


def _emit(
    b: Builder, rows: int, arguments: Sequence[Value], *, chosen: Instructions, encoding: Encoding
) -> None:
    *addresses, blocks, ahead, step = arguments
    w, q, s, c, out = (b.inttoptr(address, _BYTE.as_pointer()) for address in addresses)
    e = _Emitter(b, chosen)
    block = _Block(e, encoding, rows)

    def body(i: Value, sums: list[Value]) -> list[Value]:
        weights = e.at(w, b.mul(i, _LONG(block.size)))
        codes = e.at(q, b.mul(i, _LONG(64 * rows)))
        scales, offsets = (e.at(base, b.mul(i, _LONG(8 * rows))) for base in (s, c))
        block.prefetch(e.at(w, b.add(ahead, b.mul(i, step))))
        for g in range(2):
            block.group(g, weights, codes, scales, offsets, sums)
        return sums

    zero = e.constant(_FLOAT, e.lanes, 0.0)
    for at, value in enumerate(emit_loop(b, blocks, [zero] * (rows * e.halves), body)):
        place = b.bitcast(e.at(out, at * 4 * e.lanes), value.type.as_pointer())
        b.store(value, place, align=4)


def _dot(encoding: Encoding) -> Callable[[int, int, int, int, int, int, int, int, int], None]:
    chosen = instructions()

    def dot(
        typing: object,
        rows: object,
        weights: object,
        codes: object,
        scales: object,
        offsets: object,
        out: object,
        blocks: object,
        ahead: object,
        step: object,
    ) -> object:
        def generate(context: Any, builder: Builder, sig: object, arguments: Sequence[Value]) -> Value:
            if chosen is not None:
                emit = partial(_emit, chosen=chosen, encoding=encoding)
                function = function_by_rows(builder.module, f"dot_{encoding}", 9, chosen.most_rows, emit)
                builder.call(function, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return cast("Callable[[int, int, int, int, int, int, int, int, int], None]", intrinsic(dot))


_dot_int4 = _dot(Encoding.INT4)
_dot_int4_affine = _dot(Encoding.INT4_AFFINE)
_dot_int8 = _dot(Encoding.INT8)
_dot_int8_grouped = _dot(Encoding.INT8_GROUPED)

_SIGNATURE: Final = "(int64, int64, int64, int64, int64, int64, int64, int64, int64)"


@kernel(_SIGNATURE, usable=instructions() is not None)
def dot_int4(
    rows: int,
    weights: int,
    codes: int,
    scales: int,
    offsets: int,
    out: int,
    blocks: int,
    ahead: int,
    step: int,
) -> None:
    """One block row times a panel.

    Args:
        rows: of the panel, at most `Instructions.most_rows`.
        weights: address of the block row.
        codes: address of the panel's int8 [groups][rows][32].
        scales: address of its float32 [groups][rows].
        offsets: address of its int32 [groups][rows], minus the sums of codes times 8.
        out: address of float32 [rows][16].
        blocks: of inputs, one or more.
        ahead: how many bytes behind the block row's start weights are asked for with its first block.
        step: how many bytes further with each block.
    """
    _dot_int4(rows, weights, codes, scales, offsets, out, blocks, ahead, step)


@kernel(_SIGNATURE, usable=instructions() is not None)
def dot_int4_affine(
    rows: int,
    weights: int,
    codes: int,
    scales: int,
    offsets: int,
    out: int,
    blocks: int,
    ahead: int,
    step: int,
) -> None:
    """As `dot_int4`, for codes with a scale and an offset a group."""
    _dot_int4_affine(rows, weights, codes, scales, offsets, out, blocks, ahead, step)


@kernel(_SIGNATURE, usable=instructions() is not None)
def dot_int8(
    rows: int,
    weights: int,
    codes: int,
    scales: int,
    offsets: int,
    out: int,
    blocks: int,
    ahead: int,
    step: int,
) -> None:
    """As `dot_int4`, for 8-bit codes; the scale of an output is not in the result."""
    _dot_int8(rows, weights, codes, scales, offsets, out, blocks, ahead, step)


@kernel(_SIGNATURE, usable=instructions() is not None)
def dot_int8_grouped(
    rows: int,
    weights: int,
    codes: int,
    scales: int,
    offsets: int,
    out: int,
    blocks: int,
    ahead: int,
    step: int,
) -> None:
    """As `dot_int4`, for 8-bit codes with a scale a group."""
    _dot_int8_grouped(rows, weights, codes, scales, offsets, out, blocks, ahead, step)
