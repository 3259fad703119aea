from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import UsageError
from cascadia_p2p.planning.split import F64, nothing_backwards
from cascadia_p2p.simulate.placement import (
    best_order,
    best_order_and_split,
    check_order,
    check_split,
    placements,
)
from cascadia_p2p.simulate.published import published
from cascadia_p2p.simulate.published_machines import LastRole, PublishedMachines
from cascadia_p2p.simulate.study import PolicyName, Study
from cascadia_p2p.workload import Protocol


def cost_of(speed: float, layers: list[float]) -> F64:
    behind = np.concatenate([[0.0], np.cumsum(layers)]) * speed
    return nothing_backwards(behind[None, :] - behind[:, None])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.5, 3), min_size=4, max_size=4), st.lists(st.floats(0.5, 3), min_size=8, max_size=8)
)
def test_the_best_order_is_the_best_of_all(speeds: list[float], layers: list[float]) -> None:
    costs, split = [cost_of(speed, layers) for speed in speeds], (2, 2, 2, 2)

    def slowest(order: tuple[int, ...]) -> float:
        return max(float(costs[machine][2 * place, 2 * place + 2]) for place, machine in enumerate(order))

    found = best_order(costs, split)
    assert sorted(found) == [0, 1, 2, 3]
    assert slowest(found) == min(slowest(order) for order in permutations(range(4)))


def test_machines_that_are_alike_stay() -> None:
    costs = [cost_of(1.0, [1.0] * 6)] * 3
    assert best_order(costs, (2, 2, 2)) == (0, 1, 2)
    assert best_order_and_split(costs, (0, 1, 2)) == ((0, 1, 2), (2, 2, 2))


def test_a_fast_machine_takes_more_layers() -> None:
    costs = [cost_of(speed, [1.0] * 12) for speed in (1.0, 0.5, 1.0)]
    order, split = best_order_and_split(costs, (0, 1, 2))
    assert split[order.index(1)] == 6


@pytest.mark.parametrize("last", list(LastRole))
def test_machines_at_their_own_places_take_what_was_read(last: LastRole) -> None:
    machines = PublishedMachines(published(), last)
    own = machines.fleet(tuple(range(11)), machines.split)
    for placed, read in zip(own.stages, published().fleet().stages, strict=True):
        for rows in (1, 2, 3, 8, 9, 16):
            assert placed.seconds(rows, rows) == pytest.approx(read.seconds(rows, rows), rel=1e-9)


@pytest.mark.parametrize("last", list(LastRole))
def test_each_freedom_makes_the_published_fleet_faster(last: LastRole) -> None:
    machines, rates = PublishedMachines(published(), last), []
    for placement in placements(machines):
        fleet = machines.fleet(placement.order, placement.split)
        level = Study(fleet, Protocol(tokens=48), 2).level(PolicyName.PUBLISHED, 88)
        assert level.result.decode_tok_s is not None
        rates.append(level.result.decode_tok_s)
        assert sum(placement.split) == 66
        assert set(placement.split) <= {5, 6, 7}
    given_rate, order, split, both = rates
    assert given_rate == pytest.approx(60, rel=0.02)
    # The numbers' source says about 64 for the slowest machines at the ends.
    assert given_rate * 1.04 < order < split < both < 69


def test_a_machine_gets_no_more_experts_than_it_holds() -> None:
    machines = PublishedMachines(published())
    for placement in placements(machines, most=6)[2:]:
        ends = np.cumsum([0, *placement.split])
        # The first two layers are dense.
        assert all(end - max(start, 2) <= 6 for start, end in pairwise(ends.tolist()))
    with pytest.raises(UsageError, match="can hold"):
        placements(machines, most=5)


def test_the_order_of_a_flag() -> None:
    assert check_order("--order", [2, 0, 1], 3) == (2, 0, 1)
    for wrong in ([0, 1], [0, 1, 1], [1, 2, 3]):
        with pytest.raises(UsageError, match="each of the machines 0 to 2 once"):
            check_order("--order", wrong, 3)


def test_the_split_of_a_flag() -> None:
    assert check_split("--split", [3, 1], 2, 4) == (3, 1)
    for wrong in ([4], [2, 1], [4, 0]):
        with pytest.raises(UsageError, match="expected 2 numbers of layers"):
            check_split("--split", wrong, 2, 4)
