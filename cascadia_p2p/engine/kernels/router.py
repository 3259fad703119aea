"""The router of a mixture-of-experts layer: which experts a row passes, and with what weights, in float32."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import prange

from cascadia_p2p.compiled.compiling import part, twin_kernels
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    add,
    div,
    exp,
    fma,
    load_part,
    splat,
    store_part,
    sub,
    total,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.rows import I32
from cascadia_p2p.errors import CascadiaError

TILE: Final = 4
"""Experts whose logits are taken together."""

_NOTHING: Final = np.float32(-np.inf)


@part
def logits_of_tile(x: F32, weight: F32, first: int, logits: F32) -> None:
    """Logits of four experts for all rows; the last tile moves down to hold four as well."""
    width, count = weight.shape[1], weight.shape[0]
    e = max(0, min(first, count - TILE))
    w0 = e * width
    w1, w2, w3 = min(e + 1, count - 1) * width, min(e + 2, count - 1) * width, min(e + 3, count - 1) * width
    for row in range(x.shape[0]):
        a0 = a1 = a2 = a3 = splat(0.0)
        for c in range(0, width, LANES):
            left = width - c
            y = load_part(x, row * width + c, left)
            a0 = fma(y, load_part(weight, w0 + c, left), a0)
            a1 = fma(y, load_part(weight, w1 + c, left), a1)
            a2 = fma(y, load_part(weight, w2 + c, left), a2)
            a3 = fma(y, load_part(weight, w3 + c, left), a3)
        logits[row, e] = total(a0)
        if e + 1 < count:
            logits[row, e + 1] = total(a1)
        if e + 2 < count:
            logits[row, e + 2] = total(a2)
        if e + 3 < count:
            logits[row, e + 3] = total(a3)


@part
def choose(logits: F32, scores: F32, row: int, bias: F32, ids: I32) -> None:
    """The experts with the largest sigmoid + bias, ties to the lower id; ids ascending.

    `scores` is scratch of at least as many numbers as there are routed experts.
    """
    experts, chosen = bias.shape[0], ids.shape[1]
    one = splat(1.0)
    for c in range(0, experts, LANES):
        left = experts - c
        minus = sub(splat(0.0), load_part(logits, row * logits.shape[1] + c, left))
        score = add(div(one, add(one, exp(minus))), load_part(bias, c, left))
        store_part(scores, c, score, left)
    for place in range(chosen):
        best = -1
        best_score = _NOTHING
        for e in range(experts):
            if scores[e] > best_score:
                best, best_score = e, scores[e]
        # Nothing exceeds what is not a number; any id will do then, the row's result is not finite either.
        ids[row, place] = best if best >= 0 else place
        if best >= 0:
            scores[best] = _NOTHING
    for place in range(1, chosen):
        moved = ids[row, place]
        at = place
        while at > 0 and ids[row, at - 1] > moved:
            ids[row, at] = ids[row, at - 1]
            at -= 1
        ids[row, at] = moved


@part
def weigh(logits: F32, row: int, experts: int, scale: float, ids: I32, weights: F32, shared: F32) -> None:
    """Weights `sigmoid / (sum of all sigmoids) * scale` over the chosen and the shared experts.

    Numerators carry a common factor that keeps the largest near one: they never vanish all at once.
    """
    chosen, always = ids.shape[1], shared.shape[1]
    top = -math.inf
    for place in range(chosen):
        top = max(top, logits[row, ids[row, place]])
    for s in range(always):
        top = max(top, logits[row, experts + s])
    lift = min(top, 0.0)
    denominator = 0.0
    for place in range(chosen):
        denominator += _lifted_sigmoid(logits[row, ids[row, place]], lift)
    for s in range(always):
        denominator += _lifted_sigmoid(logits[row, experts + s], lift)
    for place in range(chosen):
        share = _lifted_sigmoid(logits[row, ids[row, place]], lift) / denominator
        weights[row, place] = share * scale
    for s in range(always):
        shared[row, s] = _lifted_sigmoid(logits[row, experts + s], lift) / denominator * scale


@part
def _lifted_sigmoid(logit: float, lift: float) -> float:
    """sigmoid(logit) * exp(-lift), in float64."""
    x = float(logit)
    return math.exp(min(x, 0.0) - lift) / (1.0 + math.exp(-abs(x)))


@twin_kernels(
    "(float32[:,::1], float32[:,::1], float32[::1], float64, float32[:,::1], int32[:,::1], float32[:,::1], "
    "float32[:,::1])"
)
def _route(
    x: F32, weight: F32, bias: F32, scale: float, logits: F32, ids: I32, weights: F32, shared: F32
) -> None:
    experts = bias.shape[0]
    for tile in prange((weight.shape[0] + TILE - 1) // TILE):
        logits_of_tile(x, weight, tile * TILE, logits)
    scores = np.empty(experts, np.float32)
    for row in range(x.shape[0]):
        choose(logits, scores, row, bias, ids)
        weigh(logits, row, experts, scale, ids, weights, shared)


class Router:
    """Chooses a layer's experts.

    Args:
        weight: float32 [routed + shared, width].
        bias: float32 [routed], added to the sigmoids for the choice only.
        scale: what a row's weights add up to.
        rows: most rows a call.
    """

    def __init__(self, weight: F32, bias: F32, scale: float, rows: int) -> None:
        if len(bias) > len(weight):
            raise CascadiaError(f"a router of {len(weight)} rows has a bias for {len(bias)} experts")
        self._weight, self._bias, self._scale = weight, bias, scale
        self._logits = np.empty((rows, weight.shape[0]), np.float32)

    @property
    def parts(self) -> tuple[F32, F32, float]:
        """Weight, bias and scale."""
        return self._weight, self._bias, self._scale

    def __call__(self, x: F32, ids: I32, weights: F32, shared: F32) -> None:
        """Fill in each row's experts, ids ascending, and the weights of chosen and shared ones.

        Args:
            x: float32 [rows, width].
            ids: int32 [rows, chosen].
            weights: float32 [rows, chosen].
            shared: float32 [rows, shared].
        """
        rows, always = len(x), self._weight.shape[0] - len(self._bias)
        expect("x", x, (rows, self._weight.shape[1]))
        expect("ids", ids, (rows, min(ids.shape[1], len(self._bias))))
        expect("weights", weights, ids.shape)
        expect("shared", shared, (rows, always))
        _route(x, self._weight, self._bias, self._scale, self._logits[:rows], ids, weights, shared)
