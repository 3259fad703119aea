"""Tells who waits for a slot which place in the queue a request has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from cascadia_p2p.node.outbox import Outbox
from cascadia_p2p.node.requests import PendingRequests
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.messages import QueueNotice, encode

PLACE_S: Final = 0.05
"""From a request to the first word of its place in the queue, if it still waits then."""

PLACES_S: Final = 1.0
"""Least time between two words of a place."""

Hear: TypeAlias = Callable[[Sequence[StreamId]], None]


class QueuePlaces:
    """Asks the scheduler who waits, for those who read their answers as they come; in the event loop.

    Args:
        pending: the requests.
        outbox: takes the words.
        ask: has the scheduler tell those who wait, the next one first, in any thread.
    """

    def __init__(self, pending: PendingRequests, outbox: Outbox, ask: Callable[[Hear], None]) -> None:
        self._pending = pending
        self._outbox = outbox
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def ask_soon(self, after_s: float = PLACE_S) -> None:
        """Ask within so many seconds; and again, as long as somebody waits."""
        if self._timer is None:
            self._timer = self._loop.call_later(after_s, self._look)

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        self._ask(self._hear)

    def _hear(self, waiting: Sequence[StreamId]) -> None:
        """Called in the data thread."""
        if waiting:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell, waiting)

    def _tell(self, waiting: Sequence[StreamId]) -> None:
        """Tell who waits his place, where it has changed and the last word of it was taken."""
        for place, stream in enumerate(waiting, 1):
            pending = self._pending.get(stream)
            if pending is None or not pending.request.stream or pending.cancelled or pending.place == place:
                continue
            if not self._outbox.blocked(pending.route):
                pending.place = place
                self._outbox.send(pending.route, encode(QueueNotice(id=pending.request.id, queued=place)))
        self.ask_soon(PLACES_S)
