"""Adds a block's update to the residual and normalises the sum for what comes next, in one pass."""

from __future__ import annotations

import numpy as np

from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import F32, LANES, add, fma, load_part, splat, store_part
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.frame import SUM, Record
from cascadia_p2p.engine.kernels.norms import settle_row
from cascadia_p2p.engine.kernels.rows import I32


@part
def add_update_row(
    x: F32,
    update: F32,
    bias: F32,
    row: int,
    layer: int,
    failed: I32,
    norm: F32,
    eps: float,
    normed: F32,
) -> None:
    """`x += update + bias` for one row, then the norm if there is one.

    Where the row has not failed and its sum is not finite, `failed` becomes `layer`.
    """
    width = x.shape[1]
    squares, check = splat(0.0), splat(0.0)
    for c in range(0, width, LANES):
        value = load_part(update, row * width + c, width - c)
        if bias.shape[0] > 0:
            value = add(value, load_part(bias, c, width - c))
        value = add(load_part(x, row * width + c, width - c), value)
        store_part(x, row * width + c, value, width - c)
        squares = fma(value, value, squares)
        # Zero, unless some value is infinite or not a number.
        check = fma(value, splat(0.0), check)
    settle_row(x, row, squares, check, layer, failed, norm, eps, normed)


@kernel(
    "(float32[:,::1], float32[:,::1], float32[::1], int32, int32[::1], float32[::1], float64, float32[:,::1])"
)
def _add_update(
    x: F32, update: F32, bias: F32, layer: int, failed: I32, norm: F32, eps: float, normed: F32
) -> None:
    for row in range(x.shape[0]):
        add_update_row(x, update, bias, row, layer, failed, norm, eps, normed)


class ResidualSum:
    """`x += update + bias`, then `normed = norm * x / sqrt(mean(x^2) + eps)`.

    Args:
        width: numbers a row.
        bias: float32 [width]; None for none.
        norm: float32 [width], weight of the norm that follows; None when none does.
        eps: of that norm.
        layer: number that marks rows with a non-finite sum.
    """

    def __init__(self, width: int, bias: F32 | None, norm: F32 | None, eps: float, layer: int) -> None:
        nothing = np.empty(0, np.float32)
        for name, array in (("bias", bias), ("norm", norm)):
            if array is not None:
                expect(name, array, (width,))
        self._width = width
        self._bias = nothing if bias is None else bias
        self._norm = nothing if norm is None else norm
        self._eps = eps
        self._layer = layer

    def record(self) -> Record:
        """`SUM` [1] without the address of the update; good for as long as this lives."""
        record = np.zeros(1, SUM)
        record["bias"] = self._bias.ctypes.data if self._bias.size else 0
        record["norm"] = self._norm.ctypes.data if self._norm.size else 0
        record["layer"], record["eps"] = self._layer, self._eps
        return record

    def __call__(self, x: F32, update: F32, normed: F32, failed: I32) -> None:
        """Change `x` in place and fill `normed`.

        Args:
            x: float32 [rows, width], the residual.
            update: float32 [rows, width].
            normed: float32 [rows, width]; left alone when no norm follows.
            failed: int32 [rows]; where it is negative and the row's sum is not finite, the layer is put in.
        """
        shape = (len(x), self._width)
        expect("x", x, shape)
        expect("update", update, shape)
        expect("normed", normed, shape)
        expect("failed", failed, shape[:1])
        _add_update(x, update, self._bias, self._layer, failed, self._norm, self._eps, normed)
