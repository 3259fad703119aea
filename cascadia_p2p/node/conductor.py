"""The scheduler in the data thread: all calls are made there, what happened goes to the event loop.

When the ring is lost its streams stay, and the next ring takes them up from their first row: what they have
generated is prefilled with the prompt. A stream whose rows lay at a stage that was lost is suspected of the
loss. The next token behind these rows clears it, since then they were computed without harm; a second loss
before that ends it. So that it ends alone, a suspect that had no token in the ring that was lost is set apart
in the next one: it starts when all others have had a token there. Were several suspects with the stage at a
second loss all the same, all of them are set apart, and go on one after the other.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.policy import StageTime
from cascadia_p2p.ring.scheduler import Plan, PrefixCounts, Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, StreamId

Deliver = Callable[[Sequence[Update]], None]
"""Takes updates, from the data thread; must not block."""


MOST_SPARED: Final = 5
"""Losses after which a stream is suspected though the node has survived: it may make nodes fall silent."""

SUSPECTED_FRAMES: Final = 2
"""A process that dies may take the frame before the one that it was computing with it, unsent."""


@dataclass(frozen=True, slots=True)
class _Outage:
    """The time without a ring: from the loss of one, or from the start, to the next.

    Args:
        since: when the ring was lost.
        reason: why there is none, in words.
        missing: shards that were lost.
    """

    since: float
    reason: str
    missing: tuple[int, ...]


class DataCaller(Protocol):
    """Runs a function in the data thread, soon."""

    def call(self, function: Callable[[], None]) -> None:
        """Hand `function` over; from any thread."""
        ...


class HeadConductor:
    """Gives the data thread its frames and takes the tail's answers.

    Args:
        scheduler: used by no other thread once the data thread runs.
        deliver: takes what happened to the streams.
    """

    def __init__(self, scheduler: Scheduler, deliver: Deliver) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._numbers = itertools.count(1)
        self._in_flight: deque[tuple[int, npt.NDArray[np.uint64]]] = deque()
        self._suspected: dict[StreamId, int] = {}
        self._latest: set[StreamId] = set()
        self._spared: dict[StreamId, tuple[int, int]] = {}
        self._outage: _Outage | None = _no_ring_yet()
        """None while a ring is open."""
        self._opened_at = 0.0

    def number_stream(self) -> StreamId:
        """A number that no stream has had, at whichever door; from any thread."""
        return StreamId(next(self._numbers))

    def schedule(self) -> Plan | None:
        """The next frame, or None when there is nothing to send now."""
        plan = self._scheduler.schedule(time.monotonic())
        if plan is not None:
            self._in_flight.append((plan.number, plan.segments["stream"]))
        return plan

    def on_tokens(
        self, number: int, records: npt.NDArray[np.void], alternatives: npt.NDArray[np.void]
    ) -> None:
        """Take the answer to frame `number`: RECORD and ALTERNATIVE tables.

        Raises:
            ValueError: it answers no frame in flight.
        """
        self._tell(self._scheduler.on_tokens(number, records, time.monotonic(), alternatives))
        self._in_flight.popleft()

    def begin(self) -> None:
        """This node has become the head: if no ring is open, none that it has lost is to blame."""
        if self._outage is not None:
            self._outage = _no_ring_yet()

    def open(self, stages: int, promise: Promise, *, survived: bool = False) -> None:
        """The ring serves from now on; streams of the one before go on in it.

        Args:
            stages: of the ring.
            promise: what all of them hold.
            survived: the stage that was lost is back as it was: what it computed has not ended it.
        """
        self._outage, self._opened_at = None, time.monotonic()
        if survived:
            self._spare()
        self._in_flight.clear()
        self._scheduler.admitting = True
        self._tell(self._scheduler.open(stages, promise))

    def suspend(self, reason: str, missing: tuple[int, ...], held: int) -> None:
        """The ring is lost; its streams wait for the next.

        Args:
            reason: why, in words.
            missing: shards that were lost.
            held: the first frame that a lost stage had not passed on; 0 when no stage is to blame.
        """
        self._scheduler.close()
        since = time.monotonic() if self._outage is None else self._outage.since
        self._outage = _Outage(since, f"{reason}, and nothing took its place", missing)
        if held:
            self._suspect(held, reason)
        self._in_flight.clear()

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

    def overload(self, reading: int) -> RequestError | None:
        """See `Scheduler.overload`; from any thread."""
        return self._scheduler.overload(time.monotonic(), reading)

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

    def drop_waiting(self, error: RequestError) -> None:
        """End the streams that have never had a slot with `error`."""
        for stream in list(self._scheduler.streams()):
            if stream.started_at is None:
                self.drop(stream.request.stream, error)

    def expire(self, queue_s: float, recovery_s: float, missing: Sequence[int]) -> None:
        """End the streams that have waited too long: for a ring or, while one is open, for their first slot.

        Args:
            queue_s: longest wait for a slot, in seconds.
            recovery_s: longest wait without a ring, in seconds.
            missing: shards that nobody serves.
        """
        now, outage = time.monotonic(), self._outage
        since, longest = (self._opened_at, queue_s) if outage is None else (outage.since, recovery_s)
        for stream in list(self._scheduler.streams()):
            waited = now - max(since, stream.submitted_at)
            if waited <= longest:
                continue
            if outage is not None:
                text = f"{outage.reason} within {waited:.0f} s"
                self.drop(stream.request.stream, ring_incomplete(text, missing or outage.missing))
            elif stream.started_at is None:
                text = f"the request waited {waited:.0f} s for a free slot: try again later"
                error = RequestError(ErrorCode.OVERLOADED, text, retry_after_s=queue_s)
                self.drop(stream.request.stream, error)

    def _suspect(self, held: int, reason: str) -> None:
        """Note whose rows lay at the lost stage; end who alone was there twice without a token in between."""
        streams = {stream.request.stream: stream for stream in self._scheduler.streams()}

        def stands(stream: StreamId, ids: int) -> bool:
            return stream in streams and len(streams[stream].ids) <= ids

        before = {i: at for i, at in self._suspected.items() if stands(i, at)}
        self._suspected, self._latest = dict(before), set()
        self._spared = {i: spared for i, spared in self._spared.items() if stands(i, spared[0])}
        guilty: Collection[StreamId] = ()
        unproven = set(self._scheduler.unproven)
        if self._in_flight:
            # The successor's last beat may be older than the last answer.
            held = max(held, self._in_flight[0][0])
        for _, ids in [each for each in self._in_flight if held <= each[0] < held + SUSPECTED_FRAMES]:
            found = {StreamId(int(each)) for each in ids} & streams.keys()
            guilty = guilty or found & before.keys()
            self._latest |= found - before.keys()
            for stream in found:
                self._suspected[stream] = len(streams[stream].ids)
            self._scheduler.set_apart(found & unproven)
        if len(guilty) > 1:
            self._scheduler.set_apart(guilty)
            return
        for stream in guilty:
            text = f"a node was lost twice while it computed this request, which may be the cause: {reason}"
            self.drop(stream, RequestError(ErrorCode.INTERNAL, text))

    def _spare(self) -> None:
        """Suspect those no more who came under suspicion with the latest loss."""
        for stream in self._latest & self._suspected.keys():
            times = self._spared.get(stream, (0, 0))[1] + 1
            self._spared[stream] = (self._suspected[stream], times)
            if times <= MOST_SPARED:
                del self._suspected[stream]
        self._latest = set()

    def _tell(self, updates: Sequence[Update]) -> None:
        if updates:
            self._deliver(updates)


def _no_ring_yet() -> _Outage:
    return _Outage(time.monotonic(), "no ring has formed", ())


def ring_incomplete(reason: str, missing: Sequence[int], retry_after_s: float | None = None) -> RequestError:
    """The error of requests that a ring with missing shards can not answer."""
    named = (
        f"; missing: {'shard' if len(missing) == 1 else 'shards'} {', '.join(map(str, missing))}"
        if missing
        else ""
    )
    text = f"the ring is incomplete: {reason}{named}"
    return RequestError(ErrorCode.RING_INCOMPLETE, text, retry_after_s=retry_after_s)
