"""A storm: nodes that are killed, frozen or cut off at random times, by a plan that a seed makes again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .seats import Seats

WEIGHTS: Final = {"kill": 0.4, "freeze": 0.4, "cut": 0.2}
GAP_S: Final = 7.0
"""From one event to the next on average."""

LONG_S: Final = (2.5, 6.0)
"""Of a silence that costs a node its place; the other half of them is shorter than what is noticed."""

SHORT_S: Final = (0.05, 1.5)
AWAY_S: Final = (0.0, 4.0)
"""From a kill to the start of the next process at that seat."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happens to a seat.

    Args:
        at_s: seconds after the start.
        kind: "kill" (SIGKILL), "freeze" (SIGSTOP, then SIGCONT) or "cut" (frames are dropped, no FIN).
        seat: number of the seat.
        for_s: seconds until it is over.
    """

    at_s: float
    kind: str
    seat: int
    for_s: float


def plan(
    seed: int, seconds: float, killed: Sequence[int], seats: int, *, cuts: bool, gap_s: float = GAP_S
) -> list[Event]:
    """The events of so many seconds, in order.

    Args:
        seed: the same gives the same.
        seconds: all is over by then.
        killed: seats whose processes may be killed; the others are frozen and cut off only.
        seats: how many there are.
        cuts: whether links can be cut.
        gap_s: seconds from one event to the next on average.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in WEIGHTS if cuts or kind != "cut"]
    events: list[Event] = []
    at = 0.0
    while True:
        at += draw.uniform(0.2, 1.8) * gap_s
        kind = draw.choices(kinds, [WEIGHTS[each] for each in kinds])[0]
        seat = draw.choice(killed) if kind == "kill" else draw.randrange(seats)
        span = AWAY_S if kind == "kill" else draw.choice((SHORT_S, LONG_S))
        length = draw.uniform(*span)
        if at + length > seconds:
            return events
        events.append(Event(round(at, 2), kind, seat, round(length, 2)))


class Storm:
    """Lets a plan happen to a fleet.

    Args:
        seats: the fleet.
        events: the plan.
        cut: cuts a seat, by its number, off (True) or puts the cable back (False); None where there is none.
    """

    def __init__(
        self, seats: Seats, events: Sequence[Event], cut: Callable[[int, bool], None] | None = None
    ) -> None:
        self._seats = seats
        self._events = events
        self._cut = cut
        self._busy: set[int] = set()
        self.happened: list[dict[str, Any]] = []
        """The plan, with what was skipped because that seat had something else to bear."""

    async def rage(self) -> None:
        """Everything; returns when the last event is over and every process runs."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.TaskGroup() as group:
            for event in self._events:
                await asyncio.sleep(started + event.at_s - loop.time())
                free = event.seat not in self._busy
                self.happened.append(asdict(event) | {"skipped": not free})
                if free:
                    self._busy.add(event.seat)
                    group.create_task(self._happen(event))

    async def _happen(self, event: Event) -> None:
        seat = self._seats.seats[event.seat]
        try:
            match event.kind:
                case "kill":
                    await asyncio.to_thread(self._seats.kill, seat)
                    await asyncio.sleep(event.for_s)
                    self._seats.start(seat)
                case "freeze":
                    process = seat.process.process
                    process.send_signal(signal.SIGSTOP)
                    try:
                        await asyncio.sleep(event.for_s)
                    finally:
                        process.send_signal(signal.SIGCONT)
                case "cut" if self._cut is not None:
                    await asyncio.to_thread(self._cut, event.seat, True)
                    try:
                        await asyncio.sleep(event.for_s)
                    finally:
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.to_thread(self._cut, event.seat, False)
        finally:
            self._busy.discard(event.seat)
