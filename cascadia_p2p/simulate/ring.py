"""Frames on their way round a ring under a virtual clock: stages and wires serve in the order of arrival.

Frames do not overtake one another, so all that will happen to one is known when the head sends it:

    leaves(s)  = max(arrives(s), free(s)) + stage(s)
    arrives(s) = max(leaves(s - 1), wire free) + hop
"""

from __future__ import annotations

from dataclasses import dataclass

from cascadia_p2p.simulate.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Load:
    """What a frame carries.

    Args:
        rows: of all segments.
        asking: rows that ask for a token.
        prompt_rows: of the rows, those of prompts that are being read.
    """

    rows: int
    asking: int
    prompt_rows: int = 0


@dataclass(frozen=True, slots=True)
class Journey:
    """A frame's way round, in seconds of the virtual clock.

    Args:
        load: what it carried.
        begins, ends: of its work at each stage.
        hops_s: on the wire and before the head could read it.
        back: when the head can read its token frame.
    """

    load: Load
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    hops_s: float
    back: float

    @property
    def trip_s(self) -> float:
        """From the head's start to the answer."""
        return self.back - self.begins[0]

    @property
    def stages_s(self) -> float:
        """In all stages."""
        return sum(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    @property
    def queued_s(self) -> float:
        """Behind other frames."""
        return max(self.trip_s - self.stages_s - self.hops_s, 0.0)


class VirtualRing:
    """The stages and wires of a fleet, all idle at time 0.

    Args:
        fleet: their times.
        reply_wait_s: seconds from the tail's end to the head, when that is more than the last hop.
    """

    def __init__(self, fleet: Fleet, reply_wait_s: float | None = None) -> None:
        self.fleet = fleet
        self._reply_wait_s = reply_wait_s
        self._stages_free = [0.0] * len(fleet.stages)
        self._wires_free = [0.0] * len(fleet.hops)
        self._last_back = 0.0
        self._times: dict[tuple[int, int], tuple[float, ...]] = {}

    def send(self, load: Load, now: float) -> Journey:
        """Start a frame at the head.

        Raises:
            ValueError: the head is at work on another frame.
        """
        if now < self._stages_free[0]:
            raise ValueError(
                f"a frame at {now:.6f} s, but the head is at work until {self._stages_free[0]:.6f}"
            )
        begins: list[float] = []
        ends: list[float] = []
        at, hops_s = now, 0.0
        for place, seconds in enumerate(self._stage_times(load)):
            begin = max(at, self._stages_free[place])
            end = begin + seconds
            self._stages_free[place] = end
            begins.append(begin)
            ends.append(end)
            at, on_the_way = self._hop(place, load, end)
            hops_s += on_the_way
        # Clients' answers leave in the order of frames, as their bytes do.
        self._last_back = max(self._last_back, at)
        return Journey(load, tuple(begins), tuple(ends), hops_s, self._last_back)

    def _hop(self, place: int, load: Load, end: float) -> tuple[float, float]:
        """When a frame arrives behind a stage, and the seconds that this took on a free wire."""
        hops = self.fleet.hops
        if not hops:
            return end, 0.0
        if place == len(hops) - 1 and self._reply_wait_s is not None:
            return end + self._reply_wait_s, self._reply_wait_s
        busy = hops[place].row_s * load.rows
        leaves = max(end, self._wires_free[place])
        self._wires_free[place] = leaves + busy
        seconds = hops[place].latency_s + busy
        return leaves + seconds, seconds

    def _stage_times(self, load: Load) -> tuple[float, ...]:
        key = (load.rows, load.asking)
        if key not in self._times:
            self._times[key] = tuple(stage.seconds(*key) for stage in self.fleet.stages)
        return self._times[key]
