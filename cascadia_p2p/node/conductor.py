"""The scheduler in the data thread: all calls are made there, what happened goes to the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.policy import StageTime
from cascadia_p2p.ring.scheduler import Plan, PrefixCounts, Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, StreamId

Deliver = Callable[[Sequence[Update]], None]
"""Takes updates, from the data thread; must not block."""


class HeadConductor:
    """Gives the data thread its frames and takes the tail's answers.

    Args:
        scheduler: used by no other thread once the data thread runs.
        deliver: takes what happened to the streams.
    """

    def __init__(self, scheduler: Scheduler, deliver: Deliver) -> None:
        self._scheduler = scheduler
        self._deliver = deliver

    def schedule(self) -> Plan | None:
        """The next frame, or None when there is nothing to send now."""
        return self._scheduler.schedule(time.monotonic())

    def on_tokens(
        self, number: int, records: npt.NDArray[np.void], alternatives: npt.NDArray[np.void]
    ) -> None:
        """Take the answer to frame `number`: RECORD and ALTERNATIVE tables.

        Raises:
            ValueError: it answers no frame in flight.
        """
        self._tell(self._scheduler.on_tokens(number, records, time.monotonic(), alternatives))

    def open(self, stages: int, promise: Promise) -> None:
        """The ring serves from now on."""
        self._scheduler.admitting = True
        self._tell(self._scheduler.open(stages, promise))

    def close(self, error: RequestError) -> None:
        """The ring serves no more; every stream ends with `error`."""
        self._scheduler.close()
        self._tell(self._scheduler.drop_all(error))

    def pace(self, stage_time: StageTime, trip_time: StageTime | None = None) -> None:
        """Compose frames for a ring with these times.

        Args:
            stage_time: of its slowest stage.
            trip_time: of all its stages together; None when only the slowest is known.
        """
        self._scheduler.policy = replace(self._scheduler.policy, stage_time=stage_time, trip_time=trip_time)

    def admit(self, admitting: bool) -> None:
        """Start waiting streams, or leave them waiting."""
        self._scheduler.admitting = admitting

    @property
    def prefixes(self) -> PrefixCounts:
        """What prefix reuse has done; any thread may read any field at any time."""
        return self._scheduler.prefix_counts

    def submit(self, request: StreamRequest, refused: Callable[[StreamId, RequestError], None]) -> None:
        """Queue a stream; `refused` is called instead when there is no place for it."""
        try:
            self._scheduler.submit(request, time.monotonic())
        except RequestError as error:
            refused(request.stream, error)

    def drop(self, stream: StreamId, error: RequestError) -> None:
        """End a stream with `error`, unless it has ended."""
        update = self._scheduler.drop(stream, error)
        if update is not None:
            self._tell([update])

    @property
    def waiting(self) -> int:
        """Streams that wait for a slot; from any thread."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """Streams that have a slot; from any thread."""
        return self._scheduler.running

    def tell_places(self, hear: Callable[[Sequence[StreamId]], None]) -> None:
        """Let `hear` know the streams that wait for a slot, the next one first."""
        hear([stream.request.stream for stream in self._scheduler.streams() if stream.slot is None])

    def expire(self, wait_s: float, reason: Callable[[float], RequestError]) -> None:
        """End the streams that have waited for a slot longer than `wait_s` seconds."""
        now = time.monotonic()
        for stream in list(self._scheduler.streams()):
            waited = now - stream.submitted_at
            if stream.slot is None and waited > wait_s:
                self.drop(stream.request.stream, reason(waited))

    def _tell(self, updates: Sequence[Update]) -> None:
        if updates:
            self._deliver(updates)


def ring_incomplete(reason: str, missing: Sequence[int]) -> RequestError:
    """The error of requests that a ring with missing shards can not answer."""
    named = (
        f"; missing: {'shard' if len(missing) == 1 else 'shards'} {', '.join(map(str, missing))}"
        if missing
        else ""
    )
    return RequestError(ErrorCode.RING_INCOMPLETE, f"the ring is incomplete: {reason}{named}")
