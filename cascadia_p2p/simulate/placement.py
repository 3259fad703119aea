"""Which machine takes which place of the ring, and how many layers: the order and split that hold up least.

With enough streams a ring is as fast as its slowest stage, so that is what is made short. For a given split
the best order is exact: the least time for which machines and places can be matched. For a free split the
split of an order is exact, and orders are improved by exchanging two machines as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final, Protocol, TypeAlias

import numpy as np

from cascadia_p2p.errors import UsageError
from cascadia_p2p.planning.split import F64, Split, balanced_split, smallest_maximum
from cascadia_p2p.simulate.fleet import Fleet

ROWS: Final = 8
"""Rows of the frames that stages are balanced for."""

SPREAD: Final = 1
"""Layers that a stage may have more or fewer than an even split gives."""

Order: TypeAlias = tuple[int, ...]
"""Numbers of machines in ring order."""


class Machines(Protocol):
    """Machines that can take any place of a ring."""

    @property
    def count(self) -> int:
        """How many."""

    @property
    def layers(self) -> int:
        """Of the model."""

    @property
    def heavy(self) -> Sequence[bool]:
        """Whether each layer is one of those that fill a machine's memory."""

    @property
    def split(self) -> Split:
        """Layers of each place, as they stand."""

    def costs(self, machine: int, rows: int) -> F64:
        """Seconds for layers i to j - 1 at [i, j]; infinite where there is no layer."""

    def fleet(self, order: Order, split: Split) -> Fleet:
        """The ring of this order and split."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who takes what.

    Args:
        label: how it was found.
        order: of machines.
        split: layers of each place.
    """

    label: str
    order: Order
    split: Split


def placements(machines: Machines, most: int | None = None, rows: int = ROWS) -> list[Placement]:
    """The machines as they stand, and what the best order, the best split and both make of it.

    Args:
        machines: to be placed.
        most: heavy layers that one can hold; None for no bound but `SPREAD`.
        rows: of the frames that stages are balanced for.

    Raises:
        UsageError: the machines can not hold the model so.
    """
    given = tuple(range(machines.count))
    costs = [_bounded(machines, machine, rows, most) for machine in given]
    order = best_order([machines.costs(machine, rows) for machine in given], machines.split)
    free, split = best_order_and_split(costs, order)
    return [
        Placement("as given", given, machines.split),
        Placement("best order", order, machines.split),
        Placement("best split", given, _split_of(costs)),
        Placement("best order and split", free, split),
    ]


def even_split(machines: Machines) -> Split:
    """As many layers for each as can be; the first take one more."""
    each, over = divmod(machines.layers, machines.count)
    return tuple(each + (place < over) for place in range(machines.count))


def best_order(costs: Sequence[F64], split: Split) -> Order:
    """The order whose slowest stage is fastest; machines that may stay where they are do.

    Args:
        costs: of each machine.
        split: layers of each place.
    """
    ends = np.cumsum([0, *split]).tolist()
    times = np.array([[float(cost[a, b]) for a, b in pairwise(ends)] for cost in costs])
    limits = np.unique(times)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _matched(times <= limits[middle]) is not None else (middle + 1, high)
    found = _matched(times <= limits[low])
    assert found is not None  # with the largest limit everyone may go everywhere
    return found


def best_order_and_split(costs: Sequence[F64], start: Order) -> tuple[Order, Split]:
    """An order that no exchange of two machines improves, and its best split.

    Args:
        costs: of each machine, infinite for stages that it must not have.
        start: the order to begin with.
    """
    order, best = start, smallest_maximum([costs[machine] for machine in start])
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            found = smallest_maximum([costs[machine] for machine in swapped])
            if found < best * (1 - 1e-9):
                order, best, improved = tuple(swapped), found, True
    return order, _split_of([costs[machine] for machine in order])


def check_order(flag: str, order: Sequence[int], count: int) -> Order:
    """The order, if it names every machine once.

    Raises:
        UsageError: it does not.
    """
    if sorted(order) != list(range(count)):
        raise UsageError(
            f"{flag} {','.join(map(str, order))}: expected each of the machines 0 to {count - 1} once, in "
            "ring order"
        )
    return tuple(order)


def check_split(flag: str, split: Sequence[int], count: int, layers: int) -> Split:
    """The split, if every place has a layer and all are given away.

    Raises:
        UsageError: it is for another number of machines or layers.
    """
    if len(split) != count or sum(split) != layers or min(split) < 1:
        raise UsageError(
            f"{flag} {','.join(map(str, split))}: expected {count} numbers of layers, each at least 1, "
            f"{layers} together (these are {len(split)} with {sum(split)})"
        )
    return tuple(split)


def _bounded(machines: Machines, machine: int, rows: int, most: int | None) -> F64:
    """Costs of stages whose size is near that of an even split, and that fit."""
    cost = machines.costs(machine, rows)
    even = machines.layers / machines.count
    sizes = np.arange(len(cost))[None, :] - np.arange(len(cost))[:, None]
    near = (sizes >= int(even) - SPREAD) & (sizes <= -int(-even // 1) + SPREAD)
    if most is not None:
        behind = np.cumsum([0, *machines.heavy])
        near &= behind[None, :] - behind[:, None] <= most
    return np.where(near, cost, np.inf)


def _split_of(costs: Sequence[F64]) -> Split:
    split = balanced_split(costs)
    if split is None:
        raise UsageError(
            "no split gives every machine a number of layers that it can hold: let one hold more, or give "
            "more machines"
        )
    return split


def _matched(allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Order | None:
    """Machines by place, each where it is allowed, or None; at [machine, place]."""
    holder: dict[int, int] = {}

    def settle(machine: int, tried: set[int]) -> bool:
        places = sorted(np.flatnonzero(allowed[machine]).tolist(), key=lambda place: place != machine)
        for place in places:
            if place in tried:
                continue
            tried.add(place)
            if place not in holder or settle(holder[place], tried):
                holder[place] = machine
                return True
        return False

    if not all(settle(machine, set()) for machine in range(len(allowed))):
        return None
    return tuple(holder[place] for place in range(len(allowed)))
