"""Finds the order of the nodes and the split that answer fastest within every node's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Final

import numpy as np

from cascadia_p2p.planning.machine import Machine
from cascadia_p2p.planning.measured import MeasuredNode
from cascadia_p2p.planning.needs import Needs
from cascadia_p2p.planning.predict import Ring, hop_times
from cascadia_p2p.planning.split import (
    F64,
    Split,
    balanced_split,
    shortest_round,
    smallest_maximum,
    soonest_split,
)
from cascadia_p2p.planning.stagetime import Reading, StageTimes

BALANCE_ROWS: Final = 8
"""Rows a frame for which equal nodes are balanced when no times are known: the best number in the field."""

WORTH: Final = 1.02
"""A ring without a node must be this much faster for the node to be called harmful."""

_ALL_ENDS: Final = 12
_SLOWEST_ENDS: Final = 5

_ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Place:
    """A PC that may take part: its memory, and its measured times where there are any."""

    machine: Machine
    times: StageTimes | None = None

    @property
    def name(self) -> str:
        """For people."""
        return self.machine.name


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who takes what.

    Args:
        places: in ring order.
        split: layers of each.
    """

    places: tuple[Place, ...]
    split: Split

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each, as numbers."""
        ends = [0, *np.cumsum(self.split).tolist()]
        return tuple(range(a, b) for a, b in pairwise(ends))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A node without which the ring is better off.

    Args:
        name: of the node.
        before, after: tokens a second with and without it.
        why: a sentence.
    """

    name: str
    before: float
    after: float
    why: str


@dataclass(frozen=True, slots=True)
class _Task:
    """One order of places and one number of rows, for which the split is looked for.

    Args:
        order: of the places.
        costs: of each place, in seconds a frame.
        frames: in flight.
        hops: seconds of all hops together.
        wire: seconds that the busiest hop needs for all frames.
    """

    order: tuple[Place, ...]
    costs: list[F64]
    frames: int
    hops: float
    wire: float

    def at_least(self) -> float:
        """No split's round is shorter than this."""
        return max(shortest_round(self.costs, self.frames, self.hops), self.wire)

    def solve(self) -> tuple[float, Split] | None:
        """The shortest round and its split."""
        found = soonest_split(self.costs, self.frames, self.hops)
        return None if found is None else (max(found[0], self.wire), found[1])


class Search:
    """The search for one model, demand and number of streams."""

    def __init__(self, needs: Needs, reading: Reading, streams: int) -> None:
        self._needs = needs
        self._reading = reading
        self._streams = streams
        self._lacks: dict[Machine, F64] = {}
        self._seconds: dict[tuple[int, int], F64] = {}

    def best(self, places: Sequence[Place]) -> Arrangement | None:
        """The best arrangement of all these places, or None when they can not hold the model.

        With times the nodes at both ends are chosen among all, because their work differs; the others keep
        their order. Without, the bytes that a frame reads are balanced.
        """
        if len(places) > len(self._reading.sizes.layers):
            return None
        if any(place.times is None for place in places):
            rows = min(BALANCE_ROWS, self._needs.demand.promise.rows, self._streams)
            costs = [self._allowed(place, self._reading.matrix(rows)) for place in places]
            split = balanced_split(costs)
            return None if split is None else Arrangement(tuple(places), split)
        return self._best_of(_orders(tuple(places)))

    def least_lack(self, places: Sequence[Place]) -> Arrangement:
        """The arrangement in which the node that lacks most lacks least, for when not all fits."""
        split = balanced_split([self._lack(place) for place in places])
        assert split is not None  # lacks are finite wherever a stage has a layer
        return Arrangement(tuple(places), split)

    def rate(self, arrangement: Arrangement, streams: int) -> float:
        """Predicted tokens a second; the places have times."""
        return self.ring(arrangement).rate(streams)

    def ring(self, arrangement: Arrangement) -> Ring:
        """The arrangement as a ring to predict; the places have times."""
        times = [place.times for place in arrangement.places if place.times is not None]
        return Ring(times, arrangement.split, self._reading.sizes.hidden, self._needs.demand.promise.rows)

    def without_harmful(self, arrangement: Arrangement) -> tuple[Arrangement, tuple[LeftOut, ...]]:
        """Leave out, one after another, the node whose absence helps most, as long as that helps."""
        left: list[LeftOut] = []
        rate = self.rate(arrangement, self._streams)
        while len(arrangement.places) > 1:
            found = [
                (self.rate(smaller, self._streams), place, smaller)
                for place in _different(arrangement.places)
                if (smaller := self._without(arrangement, place)) is not None
            ]
            if not found:
                break
            _, place, smaller = max(found, key=lambda each: each[0])
            smaller = self.best(smaller.places) or smaller
            after = self.rate(smaller, self._streams)
            if after < rate * WORTH:
                break
            left.append(LeftOut(place.name, rate, after, self._why(arrangement, place, rate, after)))
            arrangement, rate = smaller, after
        return arrangement, tuple(left)

    def rates_without(self, arrangement: Arrangement) -> tuple[float | None, ...]:
        """Tokens a second if each place in turn were left out; None where the rest has no room."""
        if len(arrangement.places) < 2:
            return (None,) * len(arrangement.places)
        rates: dict[object, float | None] = {}
        for place in _different(arrangement.places):
            rest = self._without(arrangement, place)
            rates[_kind(place)] = None if rest is None else self.rate(rest, self._streams)
        return tuple(rates[_kind(place)] for place in arrangement.places)

    def missing_without(self, arrangement: Arrangement, place: Place) -> int:
        """Bytes that the node with the least room would lack if this place were left out; 0 when none."""
        rest = [each for each in arrangement.places if each is not place]
        if not rest:
            return 0
        return max(round(smallest_maximum([self._lack(each) for each in rest])), 0)

    # --- inside -------------------------------------------------------------------------------------------

    def _without(self, arrangement: Arrangement, place: Place) -> Arrangement | None:
        """The rest in the same order, which is enough to tell whom to leave out."""
        return self._best_of([tuple(each for each in arrangement.places if each is not place)])

    def _why(self, arrangement: Arrangement, place: Place, before: float, after: float) -> str:
        now = self.ring(arrangement).predict(self._streams)
        index = arrangement.places.index(place)
        hops = [hop for hop in now.hops if place.name in (hop.sender, hop.receiver)]
        network = sum(hop.seconds for hop in hops)
        others = [seconds for number, seconds in enumerate(now.stages) if number != index]
        rate = f"{after:.2f} tokens/s without {place.name}, {before:.2f} with it"
        if network > now.stages[index]:
            assert place.times is not None
            link = place.times.node.link.rate * 8 / 1e6
            return (
                f"{rate}: its two hops take {network * 1e3:.0f} ms of a frame's {now.trip_s * 1e3:.0f} ms "
                f"(link of {link:.0f} Mbit/s)"
            )
        return (
            f"{rate}: it takes {now.stages[index] * 1e3:.1f} ms for its {arrangement.split[index]} layers, "
            f"the others {sum(others) / len(others) * 1e3:.1f} ms on average"
        )

    def _lack(self, place: Place) -> F64:
        if place.machine not in self._lacks:
            self._lacks[place.machine] = self._needs.lack(place.machine)
        return self._lacks[place.machine]

    def _allowed(self, place: Place, cost: F64) -> F64:
        return np.where(self._lack(place) <= 0, cost, np.inf)

    def _best_of(self, orders: Iterable[tuple[Place, ...]]) -> Arrangement | None:
        """The arrangement with the shortest round among these orders."""
        tasks = [self._task(order, rows) for order in orders for rows in self._rows()]
        bounds = [task.at_least() for task in tasks]
        best: tuple[float, Arrangement] | None = None
        for place in sorted(range(len(tasks)), key=bounds.__getitem__):
            if bounds[place] == np.inf or (best is not None and bounds[place] >= best[0]):
                break
            found = tasks[place].solve()
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], Arrangement(tasks[place].order, found[1]))
        return None if best is None else best[1]

    def _task(self, order: tuple[Place, ...], rows: int) -> _Task:
        times = [place.times for place in order if place.times is not None]
        costs = [self._times(place, each, rows) for place, each in zip(order, times, strict=True)]
        hops = hop_times([each.node for each in times], self._reading.sizes.hidden, rows)
        frames = self._frames(rows)
        wire = frames * max((hop.busy for hop in hops), default=0.0)
        return _Task(order, costs, frames, sum(hop.seconds for hop in hops), wire)

    def _times(self, place: Place, times: StageTimes, rows: int) -> F64:
        """What a place can take, in seconds; kept, because all orders share it."""
        key = (id(times), rows)
        if key not in self._seconds:
            self._seconds[key] = self._allowed(place, times.matrix(rows))
        return self._seconds[key]

    def _frames(self, rows: int) -> int:
        return -(-self._streams // rows)

    def _rows(self) -> Iterator[int]:
        most = min(self._needs.demand.promise.rows, self._streams)
        return (rows for rows in sorted({*_ROWS, most}) if rows <= most)


def _orders(places: tuple[Place, ...]) -> list[tuple[Place, ...]]:
    """This order, and others that differ in the first and the last.

    Of many nodes only the slowest are tried there, because the ends can be given the lightest work.
    """
    if len(places) < 2 or len(_different(places)) == 1:
        return [places]
    tried: Sequence[int] = range(len(places))
    if len(places) > _ALL_ENDS:
        slowest = sorted(tried, key=lambda number: _slowness(places[number]), reverse=True)
        tried = sorted({0, len(places) - 1, *slowest[:_SLOWEST_ENDS]})
    ends = [
        (places[a], *(each for number, each in enumerate(places) if number not in (a, b)), places[b])
        for a, b in permutations(tried, 2)
    ]
    return list(dict.fromkeys([places, *ends]))


def _slowness(place: Place) -> float:
    """Seconds for a frame through one layer in the middle of the model."""
    if place.times is None:
        return 0.0
    cost = place.times.matrix(BALANCE_ROWS)
    middle = (len(cost) - 1) // 2
    return float(cost[middle, middle + 1])


def _different(places: Sequence[Place]) -> list[Place]:
    """One of each kind of place."""
    kinds: dict[object, Place] = {}
    for place in places:
        kinds.setdefault(_kind(place), place)
    return list(kinds.values())


def _kind(place: Place) -> tuple[int, int, int | None, MeasuredNode | None]:
    """Equal for places that differ in nothing but their names."""
    machine = place.machine
    node = None if place.times is None else place.times.node.named("any")
    return machine.shown, machine.usable, machine.gpu, node
