"""Measures what a loaded stage takes for frames: decoding rows of several streams, and windows of one prompt.

Frames are those that a ring would send; their numbers are random, so that rows choose among experts about
evenly. Memory's speed is sampled before and after each group of frames, because it changes by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cascadia_p2p.engine.footprint import Footprint
from cascadia_p2p.engine.stage import Inputs, Stage
from cascadia_p2p.engine.timing import WorkPart, WorkTimes
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.models.sizes import ModelSizes
from cascadia_p2p.planning.measured import FrameTime, PartTime, Timed
from cascadia_p2p.planning.stagetime import Reading
from cascadia_p2p.wire.frames import OperationKind, SegmentError, SegmentFlag, operation_table, segment_table

AHEAD: Final = 16
"""Positions that a stream decodes before it goes back to where it was measured from."""

WARM: Final = 2
"""Frames of a group that are computed and not counted."""

_LEAST_FRAMES: Final = 5
_MOST_FRAMES: Final = 64
_GROUP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What to measure.

    Args:
        rows: numbers of streams that decode in a frame; each at most the slots and rows of the promise.
        positions: that each stream holds while it decodes.
        window: rows of a prompt's window.
    """

    rows: tuple[int, ...]
    positions: int
    window: int


@dataclass(slots=True)
class _Group:
    """Frames of one kind."""

    layers: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    parts: list[WorkTimes] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a frame, the median."""
        return statistics.median(a + b for a, b in zip(self.layers, self.head, strict=True))

    def part(self, part: WorkPart) -> float:
        """Of one part, the median."""
        return statistics.median(each.seconds[part] for each in self.parts)


@dataclass(frozen=True, slots=True)
class StageProfile:
    """What was measured of a stage.

    Args:
        frames: of each kind.
        times: of one layer of each kind, of the head, and of what a frame costs besides.
    """

    frames: tuple[FrameTime, ...]
    times: tuple[PartTime, ...]


class StageProfiler:
    """Sends frames through one stage and times them.

    Args:
        stage: freshly loaded; what its slots hold is lost.
        layers: of the stage.
        sizes: of the whole model.
        footprint: how the stage is kept.
        wish: what to measure.
        bus: measures how many bytes a second memory gives now.
        tell: told what is done next.
        seconds: that a group of frames goes on for.
    """

    def __init__(
        self,
        stage: Stage,
        layers: range,
        sizes: ModelSizes,
        footprint: Footprint,
        wish: Wish,
        bus: Callable[[], float],
        tell: Callable[[str], None],
        seconds: float = _GROUP_S,
    ) -> None:
        self._stage, self._layers, self._sizes = stage, layers, sizes
        self._footprint, self._wish, self._bus, self._tell = footprint, wish, bus, tell
        self._seconds = seconds
        self._reading = Reading(sizes, footprint, wish.positions)
        self._random = np.random.default_rng(0)
        self._held = [0] * max(wish.rows)

    def run(self) -> StageProfile:
        """Measure everything.

        Raises:
            CascadiaError: the stage does not compute a frame.
        """
        frames = [self._prefill()]
        decoding: list[tuple[int, _Group]] = []
        for rows in self._wish.rows:
            self._tell(f"decoding {rows} rows a frame")
            before = self._bus()
            group = self._decode(rows)
            decoding.append((rows, group))
            frames.append(self._frame_time("decode", rows, group, before))
        return StageProfile(tuple(frames), tuple(self._times(decoding)))

    def _prefill(self) -> FrameTime:
        """Fill all slots to the wished positions; the last whole window of each is timed."""
        wish, group = self._wish, _Group()
        before = self._bus()
        slots = len(self._held)
        most = max(slots, _LEAST_FRAMES + WARM)
        for turn in range(most):
            slot = turn % slots
            self._tell(f"prefill, stream {turn + 1} of {most}")
            self._start(slot)
            while self._held[slot] < wish.positions:
                count = min(wish.window, wish.positions - self._held[slot])
                last = self._held[slot] + count + wish.window > wish.positions
                timed = self._frame([slot], count, want=False)
                if turn >= WARM and last and count == min(wish.window, wish.positions):
                    _add(group, timed)
        return self._frame_time("prefill", min(wish.window, wish.positions), group, before)

    def _decode(self, rows: int) -> _Group:
        group, slots = _Group(), list(range(rows))
        end = time.perf_counter() + self._seconds
        for turn in range(WARM + _MOST_FRAMES):
            timed = self._frame(slots, 1, want=True)
            if turn >= WARM:
                _add(group, timed)
            if self._held[0] == self._wish.positions + AHEAD:
                self._rewind(slots)
            if len(group.parts) >= _LEAST_FRAMES and time.perf_counter() > end:
                break
        self._rewind(slots)
        return group

    # --- frames -------------------------------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        self._operate(OperationKind.START, [slot])
        self._held[slot] = 0

    def _rewind(self, slots: Sequence[int]) -> None:
        self._operate(OperationKind.REWIND, slots)
        for slot in slots:
            self._held[slot] = self._wish.positions

    def _operate(self, kind: OperationKind, slots: Sequence[int]) -> None:
        table = operation_table(len(slots))
        table["kind"], table["slot"] = kind, slots
        table["stream"] = np.array(slots) + 1
        table["position"] = self._wish.positions if kind is OperationKind.REWIND else 0
        self._stage.apply(segment_table(), table, self._inputs(0), _nothing)

    def _frame(self, slots: Sequence[int], count: int, *, want: bool) -> tuple[float, float, WorkTimes]:
        """Compute `count` rows of each of these slots.

        Returns:
            Seconds in the layers, seconds for choosing tokens, and the stage's own account of both.
        """
        segments = segment_table(len(slots))
        segments["stream"] = np.array(slots) + 1
        segments["slot"], segments["rows"] = slots, count
        segments["start"] = [self._held[slot] for slot in slots]
        segments["flags"] = SegmentFlag.WANT_TOKEN if want else 0
        inputs, operations = self._inputs(count * len(slots)), operation_table()
        before = self._stage.times()
        start = time.perf_counter()
        rows = self._stage.apply(segments, operations, inputs, _nothing)
        middle = time.perf_counter()
        if want and self._stage.model.last:
            self._stage.tokens(segments, rows)
        end = time.perf_counter()
        if (segments["error"] != SegmentError.NONE).any():
            error = SegmentError(int(segments["error"].max())).name.lower()
            raise CascadiaError(f"the stage could not compute a frame of {len(rows)} rows: {error}")
        for slot in slots:
            self._held[slot] += count
        return middle - start, end - middle, self._stage.times().since(before)

    def _inputs(self, rows: int) -> Inputs:
        model = self._stage.model
        if model.first:
            return self._random.integers(0, model.vocab, rows, np.int32)
        return self._random.standard_normal((rows, model.hidden), np.float32)

    # --- what it means ------------------------------------------------------------------------------------

    def _frame_time(self, kind: str, rows: int, group: _Group, before: float) -> FrameTime:
        streams = rows if kind == "decode" else 1
        read = sum(self._reading.layer(self._sizes.layers[n], rows, streams) for n in self._layers)
        if kind == "decode" and self._stage.model.last:
            read += self._reading.head()
        return FrameTime(
            kind="decode" if kind == "decode" else "prefill",
            rows=rows,
            positions=self._wish.positions,
            frames=len(group.parts),
            seconds=group.seconds,
            parts={part.value: group.part(part) for part in WorkPart},
            read_bytes=round(read),
            bus_before=before,
            bus_after=self._bus(),
        )

    def _times(self, decoding: Sequence[tuple[int, _Group]]) -> list[PartTime]:
        """The times of single layers: what all kinds have is shared evenly, the rest by kind."""
        layers = [self._sizes.layers[number] for number in self._layers]
        found: list[PartTime] = []
        for kind, timed, own in (
            (True, Timed.SPARSE, (WorkPart.ROUTER, WorkPart.EXPERTS)),
            (False, Timed.DENSE, (WorkPart.DENSE,)),
        ):
            alike = [layer for layer in layers if layer.sparse is kind]
            if not alike:
                continue
            weights = sum(sum(map(self._footprint.bytes_of, layer.matrices)) for layer in alike) // len(alike)
            for rows, group in decoding:
                seconds = sum(map(group.part, _COMMON)) / len(layers)
                seconds += sum(map(group.part, own)) / len(alike)
                found.append(PartTime(part=timed, rows=rows, seconds=seconds, weight_bytes=weights))
        for rows, group in decoding:
            inside = sum(group.part(part) for part in WorkPart if part is not WorkPart.HEAD)
            besides = max(statistics.median(group.layers) - inside, 0.0)
            found.append(PartTime(part=Timed.FRAME, rows=rows, seconds=besides))
            if self._stage.model.last:
                head = self._footprint.bytes_of(self._sizes.head)
                seconds = statistics.median(group.head)
                found.append(PartTime(part=Timed.HEAD, rows=rows, seconds=seconds, weight_bytes=head))
        return found


_COMMON: Final = (WorkPart.PROJECTIONS, WorkPart.ATTENTION, WorkPart.GLUE)


def _add(group: _Group, timed: tuple[float, float, WorkTimes]) -> None:
    layers, head, parts = timed
    group.layers.append(layers)
    group.head.append(head)
    group.parts.append(parts)


def _nothing() -> None:
    """Nobody counts the layers of a measurement."""
