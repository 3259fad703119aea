"""How long a node takes for a frame, by layers and rows: measured where it was, from its bandwidth elsewhere.

Decoding is bound by memory: a frame reads every weight that one of its rows passes, once, and each row reads
the keys and values of its stream. R rows that take k of E experts read the share `1 - (1 - k / E)^R` of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from cascadia_p2p.engine.footprint import Footprint
from cascadia_p2p.models.sizes import LayerSizes, Matrices, ModelSizes, Part
from cascadia_p2p.planning.measured import MeasuredNode, Timed
from cascadia_p2p.planning.split import F64, nothing_backwards

EFFICIENCY: Final = 0.7
"""Share of a memory's bandwidth that products reach where nothing was measured; 0.67 to 0.74 in the field."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What frames read.

    Args:
        sizes: of the model.
        footprint: how its weights are kept.
        positions: positions that a stream holds, on average.
    """

    sizes: ModelSizes
    footprint: Footprint
    positions: int

    def layer(self, layer: LayerSizes, rows: int, streams: int | None = None) -> float:
        """Bytes that one layer reads for a frame, of so many streams; each has one row if not said."""
        weights = sum(self._matrices(each, rows) for each in layer.matrices)
        kept = self._keys_and_values(layer, rows if streams is None else streams)
        return weights + self.footprint.small_bytes(layer.small) + kept

    def head(self) -> float:
        """Bytes that the head reads for a frame."""
        return self.footprint.bytes_of(self.sizes.head)

    def stage(self, layers: range, rows: int) -> float:
        """Bytes that a stage reads for a frame."""
        inside = sum(self.layer(self.sizes.layers[number], rows) for number in layers)
        return inside + self.head() if layers.stop == len(self.sizes.layers) else inside

    def by_part(self, rows: int) -> dict[str, int]:
        """Bytes that all stages together read for a frame, by what they are."""
        result: dict[str, float] = {}
        every = self.sizes.matrices(range(len(self.sizes.layers)))
        for matrices in every:
            result[matrices.part] = result.get(matrices.part, 0.0) + self._matrices(matrices, rows)
        small = self.footprint.small_bytes(sum(layer.small for layer in self.sizes.layers))
        kept = sum(self._keys_and_values(layer, rows) for layer in self.sizes.layers)
        parts = {str(part): round(count) for part, count in result.items()}
        return parts | {str(Part.SMALL): small, "keys and values": kept}

    def matrix(self, rows: int) -> F64:
        """`stage` for layers i to j - 1 at [i, j]."""
        return _between(_sums([self.layer(layer, rows) for layer in self.sizes.layers]), self.head(), 0.0)

    def _keys_and_values(self, layer: LayerSizes, rows: int) -> int:
        seen = self.positions if layer.cache.window is None else min(self.positions, layer.cache.window)
        return rows * seen * self.footprint.position_bytes(layer.cache)

    def _matrices(self, matrices: Matrices, rows: int) -> float:
        return self.footprint.bytes_of(matrices) * matrices.share_read(rows)


class StageTimes:
    """The times of one node's stages.

    Args:
        node: its measurements.
        reading: what frames read.
    """

    def __init__(self, node: MeasuredNode, reading: Reading) -> None:
        self.node = node
        self._reading = reading
        self._curves: dict[Timed, list[tuple[int, float, int | None]]] = {}
        for time in sorted(node.times, key=lambda each: each.rows):
            curve = self._curves.setdefault(time.part, [])
            curve.append((time.rows, time.seconds, time.weight_bytes))
        self._behind: dict[int, F64] = {}

    def matrix(self, rows: int) -> F64:
        """Seconds for layers i to j - 1 at [i, j]; infinite where there is no layer."""
        return _between(self._sums(rows), self.head(rows), self._frame(rows))

    def stage(self, layers: range, rows: int) -> float:
        """Seconds for one stage."""
        behind = self._sums(rows)
        seconds = float(behind[layers.stop] - behind[layers.start]) + self._frame(rows)
        return seconds + self.head(rows) if layers.stop == len(behind) - 1 else seconds

    def _sums(self, rows: int) -> F64:
        """Seconds for all layers before each, and for all."""
        if rows not in self._behind:
            # Most models have few different layers.
            kinds: dict[LayerSizes, float] = {}
            for layer in self._reading.sizes.layers:
                if layer not in kinds:
                    kinds[layer] = self._layer(layer, rows)
            self._behind[rows] = _sums([kinds[layer] for layer in self._reading.sizes.layers])
        return self._behind[rows]

    def _layer(self, layer: LayerSizes, rows: int) -> float:
        weights = sum(self._reading.footprint.bytes_of(each) for each in layer.matrices)
        part = Timed.SPARSE if layer.sparse else Timed.DENSE
        return self._of(part, rows, weights, self._reading.layer(layer, rows))

    def head(self, rows: int) -> float:
        """Seconds of the vocabulary head, which the last stage has besides its layers."""
        read = self._reading.head()
        return self._of(Timed.HEAD, rows, round(read), read)

    def _frame(self, rows: int) -> float:
        return _interpolated(self._curves[Timed.FRAME], rows, None) if Timed.FRAME in self._curves else 0.0

    def _of(self, part: Timed, rows: int, weights: int, read: float) -> float:
        if part in self._curves:
            return _interpolated(self._curves[part], rows, weights)
        return read / (self.node.bandwidth * EFFICIENCY)


def _interpolated(curve: list[tuple[int, float, int | None]], rows: int, weights: int | None) -> float:
    """The time at `rows`: on straight lines between what was measured, and beyond it along the last line.

    Args:
        curve: rows, seconds and weights of what was timed, by rows.
        rows: of the frame.
        weights: of what the time is wanted for.
    """
    seconds = [
        value * (weights / held if weights is not None and held is not None else 1.0)
        for _, value, held in curve
    ]
    at = [each for each, _, _ in curve]
    place = bisect_left(at, rows)
    if place < len(at) and (at[place] == rows or place == 0):
        return seconds[place]
    if len(at) == 1:
        # A single point says nothing of the slope: rows beyond it cost in proportion.
        return seconds[0] * rows / at[0]
    right = min(place, len(at) - 1)
    slope = (seconds[right] - seconds[right - 1]) / (at[right] - at[right - 1])
    return max(seconds[right - 1] + slope * (rows - at[right - 1]), 0.0)


def _sums(layers: list[float]) -> F64:
    return np.concatenate([[0.0], np.cumsum(layers)])


def _between(behind: F64, head: float, fixed: float) -> F64:
    between: F64 = behind[None, :] - behind[:, None] + fixed
    between[:, -1] += head
    return nothing_backwards(between)
