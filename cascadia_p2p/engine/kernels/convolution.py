"""Causal depthwise convolutions over few taps, with the inputs that a stream's next rows need kept per slot.

History is a ring a slot: the input of position p lies at index p modulo the ring's depth. Going back in a
stream therefore moves nothing; a depth of taps - 1 + R lets a stream go back by up to R positions.
"""

from __future__ import annotations

import numpy as np

from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    Lanes,
    add,
    fma,
    load_part,
    mul,
    splat,
    store_part,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.frame import SUM, Record
from cascadia_p2p.engine.kernels.norms import settle_row
from cascadia_p2p.engine.kernels.rows import I32, RowTable


@part
def convolved(
    inputs: F32, history: F32, taps: F32, row: int, ring: int, position: int, before: int, c: int
) -> Lanes:
    """Sixteen channels from `c` on of `convolution(input) + input` for one row.

    `ring` is the row's place in history, counted in rows: slot * depth + position % depth.
    """
    depth, width = history.shape[1], history.shape[2]
    last, left = taps.shape[0] - 1, width - c
    x = load_part(inputs, row * width + c, left)
    result = mul(x, load_part(taps, last * width + c, left))
    first = ring // depth * depth
    for back in range(1, min(last, position) + 1):
        if back <= before:
            earlier = load_part(inputs, (row - back) * width + c, left)
        else:
            place = ring - back
            if place < first:
                place += depth
            earlier = load_part(history, place * width + c, left)
        result = fma(earlier, load_part(taps, (last - back) * width + c, left), result)
    return add(result, x)


@part
def remember(inputs: F32, history: F32, slots: I32, positions: I32, after: I32) -> None:
    """Keep the inputs that later rows may need; call it when all rows of the frame have been convolved."""
    depth, width = history.shape[1], history.shape[2]
    for row in range(inputs.shape[0]):
        if after[row] < depth:
            place = (slots[row] * depth + positions[row] % depth) * width
            for c in range(0, width, LANES):
                store_part(history, place + c, load_part(inputs, row * width + c, width - c), width - c)


@part
def add_convolved_row(
    x: F32,
    inputs: F32,
    history: F32,
    taps: F32,
    row: int,
    slot: int,
    position: int,
    before: int,
    layer: int,
    failed: I32,
    norm: F32,
    eps: float,
    normed: F32,
) -> None:
    """`x += convolution(input) + input` for one row, then the norm if there is one.

    Where the row has not failed and its sum is not finite, `failed` becomes `layer`.
    """
    depth, width = history.shape[1], history.shape[2]
    ring = slot * depth + position % depth
    squares, check = splat(0.0), splat(0.0)
    for c in range(0, width, LANES):
        update = convolved(inputs, history, taps, row, ring, position, before, c)
        value = add(load_part(x, row * width + c, width - c), update)
        store_part(x, row * width + c, value, width - c)
        squares = fma(value, value, squares)
        # Zero, unless some value is infinite or not a number.
        check = fma(value, splat(0.0), check)
    settle_row(x, row, squares, check, layer, failed, norm, eps, normed)


@kernel(
    "(float32[:,::1], float32[:,::1], float32[:,:,::1], float32[:,::1], int32[::1], int32[::1], int32[::1], "
    "int32[::1], int32, int32[::1], float32[::1], float64, float32[:,::1])"
)
def _add_convolved(
    x: F32,
    inputs: F32,
    history: F32,
    taps: F32,
    slots: I32,
    positions: I32,
    before: I32,
    after: I32,
    layer: int,
    failed: I32,
    norm: F32,
    eps: float,
    normed: F32,
) -> None:
    for row in range(x.shape[0]):
        add_convolved_row(
            x,
            inputs,
            history,
            taps,
            row,
            slots[row],
            positions[row],
            before[row],
            layer,
            failed,
            norm,
            eps,
            normed,
        )
    remember(inputs, history, slots, positions, after)


def taps_first(weight: F32) -> F32:
    """A convolution's weight [channels, taps] as the kernels read it: contiguous [taps, channels]."""
    return np.ascontiguousarray(weight.T, dtype=np.float32)


def new_history(slots: int, depth: int, channels: int) -> F32:
    """Room for every slot's last inputs, in memory from the start: float32 [slots, depth, channels]."""
    history = np.empty((slots, depth, channels), np.float32)
    history.fill(0.0)
    return history


class ResidualConvolution:
    """Adds `convolution(update) + update` to the residual rows and normalises the sum for what comes next.

    Args:
        weight: float32 [channels, taps].
        slots: streams at once.
        rewind: positions by which a stream may go back.
        norm: float32 [channels], weight of the norm that follows; None when none does.
        eps: of that norm.
        layer: number that marks rows with a non-finite sum.
    """

    def __init__(
        self, weight: F32, slots: int, rewind: int, norm: F32 | None, eps: float, layer: int
    ) -> None:
        channels, taps = weight.shape
        self._taps = taps_first(weight)
        self._history = new_history(slots, taps - 1 + rewind, channels)
        self._norm = np.empty(0, np.float32) if norm is None else norm
        self._eps = eps
        self._layer = layer
        if norm is not None:
            expect("norm", norm, (channels,))

    @property
    def history(self) -> F32:
        """The inputs; float32 [slots, depth, channels], position p at p % depth."""
        return self._history

    def record(self) -> Record:
        """`SUM` [1] without the address of the update; good for as long as this lives."""
        record = np.zeros(1, SUM)
        record["taps"], record["history"] = self._taps.ctypes.data, self._history.ctypes.data
        record["tap_count"] = len(self._taps)
        record["slots"], record["depth"], _ = self._history.shape
        record["norm"] = self._norm.ctypes.data if self._norm.size else 0
        record["layer"], record["eps"] = self._layer, self._eps
        return record

    def __call__(self, rows: RowTable, x: F32, update: F32, normed: F32, failed: I32) -> None:
        """Change `x` in place and fill `normed`.

        Args:
            rows: the frame's rows.
            x: float32 [rows, channels], the residual.
            update: float32 [rows, channels], the convolution's new inputs.
            normed: float32 [rows, channels]; left alone when no norm follows.
            failed: int32 [rows]; where it is negative and the row's sum is not finite, the layer is put in.
        """
        shape = (len(rows), self._history.shape[2])
        expect("x", x, shape)
        expect("update", update, shape)
        expect("normed", normed, shape)
        expect("failed", failed, shape[:1])
        _add_convolved(
            x,
            update,
            self._history,
            self._taps,
            rows.slots,
            rows.positions,
            rows.before,
            rows.after,
            self._layer,
            failed,
            self._norm,
            self._eps,
            normed,
        )
