"""Cuts consecutive layers into stages: the exact optimum, by dynamic programming over where stages end.

A cost matrix [layers + 1, layers + 1] says what it costs a node to take layers i to j - 1, at [i, j];
infinite where it can not. All sums and maxima run over one matrix a node, in ring order; every node takes at
least one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Split: TypeAlias = tuple[int, ...]
"""Layers of each stage, in order."""


def smallest_maximum(costs: Sequence[F64]) -> float:
    """The least that the most expensive stage can cost; infinite when there is no split."""
    best = _start(costs[0])
    for cost in costs:
        best = np.maximum(best[:, None], cost).min(0)
    return float(best[-1])


def cheapest_split(costs: Sequence[F64], most: float = np.inf) -> Split | None:
    """The split with the least sum of costs, none above `most`; among equal sums the most even one.

    None when there is no such split.
    """
    # A weight that can not change the order of different sums, and prefers evenness among equal ones.
    finite = [cost[np.isfinite(cost)] for cost in costs]
    largest = max((float(np.abs(values).max()) for values in finite if values.size), default=1.0) or 1.0
    allowed = [np.where(cost <= most, cost + 1e-7 * cost * cost / largest, np.inf) for cost in costs]
    return _traced(allowed)


def balanced_split(costs: Sequence[F64]) -> Split | None:
    """The split whose most expensive stage is cheapest, and among these the cheapest and most even one."""
    most = smallest_maximum(costs)
    return cheapest_split(costs, most) if most < np.inf else None


def soonest_split(costs: Sequence[F64], frames: int, beside: float) -> tuple[float, Split] | None:
    """The split with the shortest round, and that round: the longer of one trip and all frames' work.

    The trip is the sum of all costs plus `beside`, the work `frames` times the greatest cost. With a bound on
    the greatest cost, the least sum falls as the bound rises and the work rises with it: the best bound is
    where they meet. None when there is no split.
    """
    least = smallest_maximum(costs)
    if not least < np.inf:
        return None
    bounds = np.unique(np.concatenate([cost[np.isfinite(cost) & (cost >= least)] for cost in costs]))
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if frames * bounds[middle] >= _least_sum(costs, float(bounds[middle])) + beside:
            high = middle
        else:
            low = middle + 1
    best: tuple[float, Split] | None = None
    for place in (low - 1, low):
        split = cheapest_split(costs, float(bounds[place])) if place >= 0 else None
        if split is None:
            continue
        taken = _taken(costs, split)
        round_s = max(sum(taken) + beside, frames * max(taken))
        if best is None or round_s < best[0]:
            best = (round_s, split)
    return best


def shortest_round(costs: Sequence[F64], frames: int, beside: float) -> float:
    """No split's round is shorter than this."""
    return max(_least_sum(costs, np.inf) + beside, frames * smallest_maximum(costs))


def fewest_stages(allowed: Bools) -> int | None:
    """The least number of equal nodes that can take all layers, or None when no number can.

    Args:
        allowed: [layers + 1, layers + 1]; at [i, j] whether a node can take layers i to j - 1.
    """
    layers = len(allowed) - 1
    reached: Bools = np.zeros(layers + 1, np.bool_)
    reached[0] = True
    for stages in range(1, layers + 1):
        reached = np.logical_or.reduce(reached[:, None] & allowed, axis=0)
        if reached[-1]:
            return stages
    return None


def nothing_backwards(cost: F64) -> F64:
    """The matrix with infinite cost wherever a stage would have no layer."""
    return np.where(np.triu(np.ones(cost.shape, np.bool_), 1), cost, np.inf)


def _least_sum(costs: Sequence[F64], most: float) -> float:
    best = np.full(len(costs[0]), np.inf)
    best[0] = 0.0
    for cost in costs:
        best = (best[:, None] + np.where(cost <= most, cost, np.inf)).min(0)
    return float(best[-1])


def _taken(costs: Sequence[F64], split: Split) -> list[float]:
    ends = np.cumsum([0, *split]).tolist()
    return [float(cost[a, b]) for cost, (a, b) in zip(costs, pairwise(ends), strict=True)]


def _start(cost: F64) -> F64:
    best = np.full(len(cost), np.inf)
    best[0] = -np.inf
    return best


def _traced(costs: Sequence[F64]) -> Split | None:
    """The split with the least sum."""
    layers = len(costs[0]) - 1
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    came_from: list[npt.NDArray[np.intp]] = []
    for cost in costs:
        joined = best[:, None] + cost
        came_from.append(joined.argmin(0))
        best = joined.min(0)
    if not np.isfinite(best[-1]):
        return None
    ends = [layers]
    for choice in reversed(came_from):
        ends.append(int(choice[ends[-1]]))
    return tuple(after - before for before, after in pairwise(reversed(ends)))
