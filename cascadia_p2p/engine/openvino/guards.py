"""Keeps FP16 within its range: powers of two around a device that computes in it, and a way behind it.

Weights of a row's experts are divided by a power of two of at least their sum, so that a weighted sum is
never larger than its largest term; the inner width of a layer may be kept smaller by a power of two in its up
matrix. Both are multiplied back in float32, exactly. A row that leaves the range all the same is computed
again by a fallback and counted; without one it stays not finite, which the stage turns into an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from cascadia_p2p.engine.matrix import F32, I32, Experts, Projections, RowMap

Rows: TypeAlias = npt.NDArray[Any]
"""[rows, width] in FP16 or float32."""
Mask: TypeAlias = npt.NDArray[np.bool_]

FP16_MOST: Final = 65504.0
"""The largest finite number of FP16."""

_log = structlog.get_logger()


class DeviceExperts(Protocol):
    """The experts of a layer as the device computes them."""

    def __call__(self, x: F32, ids: I32, weights: F32, shared: F32) -> Rows:
        """Weighted sums [rows, width]; arguments as those of `Experts`."""


class DeviceRowMap(Protocol):
    """A map of rows as the device computes it."""

    def __call__(self, x: F32) -> Rows:
        """[rows, in] to [rows, out]."""


class DeviceProjections(Protocol):
    """Several products of the same rows as the device computes them."""

    def __call__(self, x: F32) -> Sequence[Rows]:
        """[rows, in] to one [rows, out] a matrix."""


class Recomputed:
    """Counts rows that a fallback computed again."""

    def __init__(self) -> None:
        self.layers: dict[str, int] = {}

    @property
    def rows(self) -> int:
        """Of all layers."""
        return sum(self.layers.values())

    def add(self, name: str, rows: int) -> None:
        """Count rows of a layer; its first ones are logged."""
        if name not in self.layers:
            _log.warning("layer_recomputed", layer=name, rows=rows)
        self.layers[name] = self.layers.get(name, 0) + rows


def power_above(values: F32) -> F32:
    """The least power of two that is not below each value, and not below one; one where it is not finite."""
    mantissa, exponent = np.frexp(np.maximum(values, np.float32(1.0)))
    exponent = exponent - (mantissa == 0.5)
    return np.ldexp(np.float32(1.0), np.where(np.isfinite(values), exponent, 0)).astype(np.float32)


def routing_factors(weights: F32, shared: F32) -> F32:
    """What each row's weights are divided by: float32 [rows, 1], powers of two.

    Args:
        weights: float32 [rows, chosen].
        shared: float32 [rows, shared].
    """
    total = np.abs(weights).sum(axis=1, keepdims=True) + np.abs(shared).sum(axis=1, keepdims=True)
    return power_above(total)


def input_factors(x: F32) -> F32:
    """What each row of a linear product is divided by: float32 [rows, 1], powers of two."""
    return power_above(np.maximum(x.max(axis=1, keepdims=True), -x.min(axis=1, keepdims=True)))


def restore(results: Rows, factors: F32, out: F32) -> Mask:
    """Multiply results back.

    Args:
        results: [rows, width] as the device gave them.
        factors: float32 [rows, 1].
        out: float32 [rows, width], becomes the product.

    Returns:
        Whether each row left the range: it has a number that is not finite, or at FP16's end.
    """
    np.multiply(results, factors, out=out, dtype=np.float32)
    limit = np.broadcast_to(factors, (len(out), 1))[:, 0] * np.float64(FP16_MOST)
    # Written so that what is not a number counts as outside.
    return np.asarray(~((out.max(axis=1) < limit) & (out.min(axis=1) > -limit)))


def out_of_range(x: F32) -> Mask:
    """Whether each row has a number that FP16 can not hold."""
    return np.asarray(~((x.max(axis=1) <= FP16_MOST) & (x.min(axis=1) >= -FP16_MOST)))


class GuardedExperts:
    """`Experts` on a device that computes in FP16.

    Args:
        run: the device's operation, with up matrices times 2 ** -attenuation.
        width: numbers a row.
        rows: most rows a call.
        attenuation: how far the up matrices are scaled down.
        fallback: makes what computes rows again; None leaves them not finite.
        recomputed: where they are counted.
        name: of the layer.
    """

    def __init__(
        self,
        run: DeviceExperts,
        width: int,
        rows: int,
        attenuation: int,
        fallback: Callable[[], Experts] | None,
        recomputed: Recomputed,
        name: str,
    ) -> None:
        self._run, self._raised = run, np.float32(2.0**attenuation)
        self._out = np.zeros((rows, width), np.float32)
        self._again = _Again(fallback, recomputed, name)

    def __call__(self, x: F32, ids: I32, weights: F32, shared: F32) -> F32:
        out = self._out[: len(x)]
        factors = routing_factors(weights, shared)
        results = self._run(x, ids, weights / factors, shared / factors)
        outside = restore(results, factors * self._raised, out) | out_of_range(x)
        if outside.any():
            self._again(outside, (out,), x, ids, weights, shared)
        return out


class GuardedRowMap:
    """`RowMap` of a gated MLP on a device that computes in FP16.

    Args:
        run: the device's operation.
        width: numbers a row of the result.
        rows: most rows a call.
        factor: of the result, in float32.
        fallback: as in `GuardedExperts`.
        recomputed: as in `GuardedExperts`.
        name: of the layer.
    """

    def __init__(
        self,
        run: DeviceRowMap,
        width: int,
        rows: int,
        factor: float,
        fallback: Callable[[], RowMap] | None,
        recomputed: Recomputed,
        name: str,
    ) -> None:
        self._run, self._factor = run, np.full((1, 1), factor, np.float32)
        self._out = np.zeros((rows, width), np.float32)
        self._again = _Again(fallback, recomputed, name)

    def __call__(self, x: F32) -> F32:
        out = self._out[: len(x)]
        outside = restore(self._run(x), self._factor, out) | out_of_range(x)
        if outside.any():
            self._again(outside, (out,), x)
        return out


class GuardedProjections:
    """`Projections` on a device that computes in FP16: each row is scaled down into -1 to 1.

    Args:
        run: the device's operation.
        widths: numbers a row of each result.
        rows: most rows a call.
        fallback: as in `GuardedExperts`.
        recomputed: as in `GuardedExperts`.
        name: of the layer.
    """

    def __init__(
        self,
        run: DeviceProjections,
        widths: Sequence[int],
        rows: int,
        fallback: Callable[[], Projections] | None,
        recomputed: Recomputed,
        name: str,
    ) -> None:
        self._run = run
        self._out = tuple(np.zeros((rows, width), np.float32) for width in widths)
        self._again = _Again(fallback, recomputed, name)

    def __call__(self, x: F32) -> tuple[F32, ...]:
        outs = tuple(out[: len(x)] for out in self._out)
        factors = input_factors(x)
        outside = np.zeros(len(x), np.bool_)
        for results, out in zip(self._run(x / factors), outs, strict=True):
            outside |= restore(results, factors, out)
        if outside.any():
            self._again(outside, outs, x)
        return outs


class _Again:
    """Computes rows again."""

    def __init__(
        self, fallback: Callable[[], Callable[..., Any]] | None, recomputed: Recomputed, name: str
    ) -> None:
        self._make, self._recomputed, self._name = fallback, recomputed, name
        self._call: Callable[..., Any] | None = None

    def __call__(self, outside: Mask, outs: tuple[F32, ...], *arguments: Rows) -> None:
        for out in outs:
            out[outside] = np.nan
        # Rows that came without numbers failed in an earlier layer: nothing makes them right again.
        chosen = outside & np.isfinite(arguments[0]).all(axis=1)
        if self._make is None or not chosen.any():
            return
        if self._call is None:
            self._call = self._make()
        again = self._call(*(np.ascontiguousarray(argument[chosen]) for argument in arguments))
        for out, results in zip(outs, again if isinstance(again, tuple) else (again,), strict=True):
            out[chosen] = results
        self._recomputed.add(self._name, int(chosen.sum()))
