"""The dynamic programmes against trying everything."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.planning.split import (
    balanced_split,
    cheapest_split,
    fewest_stages,
    nothing_backwards,
    shortest_round,
    smallest_maximum,
    soonest_split,
)


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), stages - 1)
    ]


def costs_of(split: tuple[int, ...], costs: list[np.ndarray]) -> list[float]:
    ends = np.cumsum([0, *split])
    return [float(cost[a, b]) for cost, (a, b) in zip(costs, pairwise(ends), strict=True)]


@st.composite
def problems(draw: st.DrawFn) -> list[np.ndarray]:
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, layers))
    values = st.one_of(st.integers(0, 20).map(float), st.just(np.inf))
    size = (layers + 1) ** 2
    return [
        nothing_backwards(
            np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(layers + 1, layers + 1)
        )
        for _ in range(stages)
    ]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_balanced_split_is_the_best_of_all(costs: list[np.ndarray]) -> None:
    layers = len(costs[0]) - 1
    every = {split: costs_of(split, costs) for split in all_splits(layers, len(costs))}
    least = min(max(each) for each in every.values())
    assert smallest_maximum(costs) == least
    found = balanced_split(costs)
    if least == np.inf:
        assert found is None
        return
    assert found is not None
    assert sum(found) == layers
    assert max(every[found]) == least
    assert sum(every[found]) == min(sum(each) for each in every.values() if max(each) <= least)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 20))
def test_the_cheapest_split_stays_below_its_bound(costs: list[np.ndarray], most: int) -> None:
    layers = len(costs[0]) - 1
    sums = [
        sum(each) for split in all_splits(layers, len(costs)) if max(each := costs_of(split, costs)) <= most
    ]
    found = cheapest_split(costs, most)
    assert (found is None) == (not sums)
    if found is not None:
        assert max(costs_of(found, costs)) <= most
        assert sum(costs_of(found, costs)) == min(sums)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 6), st.integers(0, 30))
def test_the_soonest_split_is_the_soonest_of_all(costs: list[np.ndarray], frames: int, beside: int) -> None:
    rounds = [
        max(sum(each) + beside, frames * max(each))
        for split in all_splits(len(costs[0]) - 1, len(costs))
        if max(each := costs_of(split, costs)) < np.inf
    ]
    found = soonest_split(costs, frames, beside)
    assert (found is None) == (not rounds)
    if found is not None:
        taken = costs_of(found[1], costs)
        assert found[0] == max(sum(taken) + beside, frames * max(taken)) == min(rounds)
        assert shortest_round(costs, frames, beside) <= found[0]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_fewest_stages_are_the_fewest(costs: list[np.ndarray]) -> None:
    cost = costs[0]
    layers = len(cost) - 1
    possible = [
        stages
        for stages in range(1, layers + 1)
        if any(max(costs_of(split, [cost] * stages)) < np.inf for split in all_splits(layers, stages))
    ]
    assert fewest_stages(np.isfinite(cost)) == (possible[0] if possible else None)


@pytest.mark.parametrize(("layers", "stages"), [(66, 11), (12, 5), (7, 7), (9, 1)])
def test_equal_layers_are_shared_evenly(layers: int, stages: int) -> None:
    at = np.arange(layers + 1, dtype=float)
    cost = nothing_backwards(at[None, :] - at[:, None])
    split = balanced_split([cost] * stages)
    assert split is not None
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
