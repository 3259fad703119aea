"""A fleet from what `profile` measured on its nodes, with a model whose layers they can share in any way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from cascadia_p2p.planning.measured import MeasuredNode
from cascadia_p2p.planning.predict import hop_times
from cascadia_p2p.planning.split import F64, Split
from cascadia_p2p.planning.stagetime import Reading, StageTimes
from cascadia_p2p.simulate.fleet import Fleet, Hop, Stage
from cascadia_p2p.simulate.placement import Order, even_split
from cascadia_p2p.simulate.tables import StageTable
from cascadia_p2p.types import Promise

_ROWS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)


@dataclass(frozen=True)
class ProfiledMachines:
    """Machines in the order in which their profiles were given.

    Args:
        name: of the fleet, for people.
        nodes: what was measured.
        reading: of the model.
        promise: what each can hold.
        exported: the split that the model was exported with.
    """

    name: str
    nodes: tuple[MeasuredNode, ...]
    reading: Reading
    promise: Promise
    exported: Split | None = None

    @property
    def count(self) -> int:
        """How many."""
        return len(self.nodes)

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.reading.sizes.layers)

    @property
    def split(self) -> Split:
        """Layers of each place: as exported, if that was for so many machines, else evenly many."""
        if self.exported is not None and len(self.exported) == self.count:
            return self.exported
        return even_split(self)

    @property
    def heavy(self) -> tuple[bool, ...]:
        """Whether each layer has experts; all of them in a model without any."""
        sparse = tuple(layer.sparse for layer in self.reading.sizes.layers)
        return sparse if any(sparse) else (True,) * len(sparse)

    def costs(self, machine: int, rows: int) -> F64:
        """Seconds for layers i to j - 1 at [i, j]; infinite where there is no layer."""
        return self._times[machine].matrix(rows)

    def fleet(self, order: Order, split: Split) -> Fleet:
        """The ring of this order and split."""
        ends = np.cumsum([0, *split]).tolist()
        stages = tuple(
            self._stage(machine, range(ends[place], ends[place + 1])) for place, machine in enumerate(order)
        )
        return Fleet(self.name, stages, self._hops([self.nodes[machine] for machine in order]), self.promise)

    def _stage(self, machine: int, layers: range) -> Stage:
        times, tail = self._times[machine], layers.stop == self.layers
        rows = sorted({row for row in _ROWS if row < self.promise.rows} | {self.promise.rows})
        heads = [times.head(row) if tail else 0.0 for row in rows]
        seconds = [times.stage(layers, row) for row in rows]
        own = tuple((float(r), max(s - h, 1e-9)) for r, s, h in zip(rows, seconds, heads, strict=True))
        head = tuple((float(row), max(each, 1e-9)) for row, each in zip(rows, heads, strict=True))
        name = self.nodes[machine].name
        return Stage(name, StageTable(own), len(layers), StageTable(head) if tail else None)

    def _hops(self, nodes: Sequence[MeasuredNode]) -> tuple[Hop, ...]:
        hidden = self.reading.sizes.hidden
        one, two = hop_times(nodes, hidden, 1), hop_times(nodes, hidden, 2)
        return tuple(
            Hop(a.seconds - (b.busy - a.busy), b.busy - a.busy) for a, b in zip(one, two, strict=True)
        )

    @cached_property
    def _times(self) -> tuple[StageTimes, ...]:
        return tuple(StageTimes(node, self.reading) for node in self.nodes)
