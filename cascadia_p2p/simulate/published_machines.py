"""The published machines at other places than their own: their speed apart from the work of their roles.

Roles 1 to 9 do the same work (six layers with experts each), so what their times differ by is the speed of
their machines. Role 0 has two dense layers among its six, and its times are what these and four of the others
take on a machine of mean speed; bytes read say the same (0.75 of the others' at eight rows; its time is
0.76). Role 10 reads as much as the others but takes 0.74 of their time, beside the vocabulary head: whether
its work is lighter or its machine faster can not be told, so it is one of two `LastRole`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cascadia_p2p.planning.split import F64, Split, nothing_backwards
from cascadia_p2p.simulate.fleet import Fleet, Stage
from cascadia_p2p.simulate.placement import Order, even_split
from cascadia_p2p.simulate.published import Published
from cascadia_p2p.simulate.tables import StageTable, published_padding

_Row = npt.NDArray[np.float64]


class LastRole(StrEnum):
    """Why the last role is faster than the others."""

    LIGHT = "light"
    """Its work is lighter, its machine of mean speed."""
    FAST = "fast"
    """Its work is the others', its machine faster."""


@dataclass(frozen=True)
class PublishedMachines:
    """Eleven machines, numbered by the roles that they had.

    Args:
        numbers: as they were given.
        last: how role 10 is taken.
    """

    numbers: Published
    last: LastRole = LastRole.LIGHT

    @property
    def count(self) -> int:
        """How many."""
        return self.numbers.roles

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.numbers.layers

    @property
    def split(self) -> Split:
        """Layers of each place, as they stood."""
        return even_split(self)

    @property
    def heavy(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(layer >= self.numbers.dense_layers for layer in range(self.layers))

    def costs(self, machine: int, rows: int) -> F64:
        """Seconds for layers i to j - 1 at [i, j]; infinite where there is no layer."""
        own = [self._table(machine, range(layer, layer + 1)).of(rows) for layer in range(self.layers)]
        behind = np.concatenate([[0.0], np.cumsum(own)])
        between: F64 = behind[None, :] - behind[:, None]
        between[:, -1] += self.numbers.head_ms / 1e3
        return nothing_backwards(between)

    def fleet(self, order: Order, split: Split) -> Fleet:
        """The ring of this order and split; the published one gives the times that were read."""
        base = self.numbers.fleet()
        ends = np.cumsum([0, *split]).tolist()
        stages = tuple(
            Stage(
                f"machine {machine}",
                self._table(machine, range(ends[place], ends[place + 1])),
                split[place],
                base.stages[place].head,
            )
            for place, machine in enumerate(order)
        )
        return Fleet(base.name, stages, base.hops, base.promise)

    def _table(self, machine: int, layers: range) -> StageTable:
        """Times of some layers on a machine."""
        seconds = self._speed(machine) * sum(self._layer(layer) for layer in layers)
        points = zip(self._rows, np.asarray(seconds).tolist(), strict=True)
        return StageTable(tuple(points), published_padding)

    @cached_property
    def _rows(self) -> tuple[float, ...]:
        return tuple(rows for rows, _ in self.numbers.points(0))

    @cached_property
    def _times(self) -> tuple[_Row, ...]:
        return tuple(
            np.array([seconds for _, seconds in self.numbers.points(role)])
            for role in range(self.numbers.roles)
        )

    @cached_property
    def _middle(self) -> _Row:
        """Times of the roles that do the same work, on a machine of mean speed."""
        middle: _Row = np.mean(np.stack(self._times[1:-1]), axis=0)
        return middle

    def _speed(self, machine: int) -> _Row:
        """Times of a machine in those of one of mean speed."""
        ends = (0, self.count - 1) if self.last is LastRole.LIGHT else (0,)
        return np.ones(len(self._rows)) if machine in ends else self._times[machine] / self._middle

    def _layer(self, layer: int) -> _Row:
        """Times of a layer on a machine of mean speed."""
        each = self.layers // self.count
        if layer < self.numbers.dense_layers:
            dense = self.numbers.dense_layers
            rest: _Row = self._times[0] - (each - dense) / each * self._middle
            return rest / dense
        light = layer >= self.layers - each and self.last is LastRole.LIGHT
        return (self._times[-1] if light else self._middle) / each
