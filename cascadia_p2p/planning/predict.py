"""Predicts a ring's speed from the times of its stages and hops, and names what limits it.

n streams go round in `ceil(n / r)` frames of r rows. A round takes as long as the longer of two things: the
trip of one frame (all stages and all hops, one after another), and the time that the slowest stage or hop
needs for all frames. The rate is n tokens a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from cascadia_p2p.planning.measured import MeasuredNode
from cascadia_p2p.planning.split import Split
from cascadia_p2p.planning.stagetime import StageTimes

_SEGMENT_BYTES: Final = 32
_TOKEN_BYTES: Final = 32
_HEADER_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class HopTime:
    """What one hop takes for a frame.

    Args:
        sender, receiver: names.
        seconds: from the sender's last byte handed over to the receiver's last byte received.
        busy: seconds that it occupies the wire.
    """

    sender: str
    receiver: str
    seconds: float
    busy: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """How fast a ring answers so many streams.

    Args:
        streams: that run.
        rows: of each frame.
        frames: in flight.
        tokens_s: tokens a second, all streams together.
        round_s: seconds of one round, which gives every stream a token.
        trip_s: seconds that one frame alone needs.
        stages: seconds of each stage for a frame.
        hops: of the ring, the way back to the head last; none for a ring of one.
        slowest: index of the slowest stage.
        slowest_hop: index of the slowest hop; None for a ring of one.
        limit: a sentence that names what limits the rate.
    """

    streams: int
    rows: int
    frames: int
    tokens_s: float
    round_s: float
    trip_s: float
    stages: tuple[float, ...]
    hops: tuple[HopTime, ...]
    slowest: int
    slowest_hop: int | None
    limit: str


def hop_times(nodes: Sequence[MeasuredNode], hidden: int, rows: int) -> tuple[HopTime, ...]:
    """The hops of a ring for a frame of so many rows; none for a ring of one, which calls directly."""
    if len(nodes) == 1:
        return ()
    forward = _HEADER_BYTES + rows * (4 * hidden + _SEGMENT_BYTES)
    back = _HEADER_BYTES + rows * _TOKEN_BYTES
    pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return tuple(
        _hop(a, b, back if place == len(nodes) - 1 else forward) for place, (a, b) in enumerate(pairs)
    )


class Ring:
    """Nodes in ring order with a split.

    Args:
        nodes: the times of their stages.
        split: layers of each.
        hidden: numbers a row.
        most_rows: rows a frame, at most.
    """

    def __init__(self, nodes: Sequence[StageTimes], split: Split, hidden: int, most_rows: int) -> None:
        self._nodes = tuple(nodes)
        self._measured = tuple(each.node for each in nodes)
        ends = np.cumsum([0, *split]).tolist()
        self._layers = [range(a, b) for a, b in pairwise(ends)]
        self._hidden = hidden
        self._most_rows = most_rows

    def predict(self, streams: int) -> Prediction:
        """The speed with the number of rows a frame that is best for so many streams."""
        choices = range(1, min(streams, self._most_rows) + 1)
        rates = {rows: streams / self._round(streams, rows)[0] for rows in choices}
        best = max(rates.values())
        # Among equals the smallest frames: they leave the most room.
        rows = next(rows for rows, rate in rates.items() if rate >= best * (1 - 1e-9))
        return self._described(streams, rows)

    def rate(self, streams: int) -> float:
        """Tokens a second, all streams together."""
        choices = range(1, min(streams, self._most_rows) + 1)
        return max(streams / self._round(streams, rows)[0] for rows in choices)

    def _stages(self, rows: int) -> tuple[float, ...]:
        return tuple(node.stage(layers, rows) for node, layers in zip(self._nodes, self._layers, strict=True))

    def _round(self, streams: int, rows: int) -> tuple[float, float, float]:
        """Seconds of a round; of one frame's trip; that the slowest stage or hop needs for all frames."""
        stages, hops = self._stages(rows), hop_times(self._measured, self._hidden, rows)
        frames = -(-streams // rows)
        trip = sum(stages) + sum(hop.seconds for hop in hops)
        busy = frames * max([*stages, *(hop.busy for hop in hops)])
        return max(trip, busy, 1e-12), trip, busy

    def _described(self, streams: int, rows: int) -> Prediction:
        stages, hops = self._stages(rows), hop_times(self._measured, self._hidden, rows)
        round_s, trip, busy = self._round(streams, rows)
        slowest = int(np.argmax(stages))
        slowest_hop = int(np.argmax([hop.seconds for hop in hops])) if hops else None
        return Prediction(
            streams=streams,
            rows=rows,
            frames=-(-streams // rows),
            tokens_s=streams / round_s,
            round_s=round_s,
            trip_s=trip,
            stages=stages,
            hops=hops,
            slowest=slowest,
            slowest_hop=slowest_hop,
            limit=self._limit(stages, hops, trip, busy),
        )

    def _limit(self, stages: Sequence[float], hops: Sequence[HopTime], trip: float, busy: float) -> str:
        slowest = int(np.argmax(stages))
        name = self._nodes[slowest].node.name
        if not hops:
            return f"node {name}: {stages[0] * 1e3:.1f} ms a frame"
        widest = max(hops, key=lambda hop: hop.busy)
        if busy >= trip:
            if widest.busy > stages[slowest]:
                wire = f"{widest.busy * 1e3:.1f} ms a frame on the wire"
                return f"hop {widest.sender} to {widest.receiver}: {wire}"
            rest = (sum(stages) - stages[slowest]) / max(len(stages) - 1, 1)
            return (
                f"node {name}: {stages[slowest] * 1e3:.1f} ms a frame, the others {rest * 1e3:.1f} on average"
            )
        network = sum(hop.seconds for hop in hops)
        return (
            f"the trip of {trip * 1e3:.0f} ms, too few frames to keep all nodes busy "
            f"(network {network / trip:.0%}, node {name} {stages[slowest] / trip:.0%})"
        )


def _hop(sender: MeasuredNode, receiver: MeasuredNode, count: int) -> HopTime:
    link = sender.hop_to(receiver)
    busy = count / link.rate
    return HopTime(sender.name, receiver.name, link.latency_s + busy, busy)
