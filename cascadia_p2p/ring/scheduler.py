"""The head's scheduler: which rows of which streams go into the next frame.

Pure and deterministic: no socket, no thread, no clock of its own (`now` is handed in, in seconds of any
steady clock). Streams wait, then run in a slot. `schedule` composes the next frame, `on_tokens` takes the
tail's answer, and nothing else moves a running stream forward.

Prefill and decode are one thing here: a stream has ids (prompt and generated), of which the first `sent` went
into the ring. Whatever is not sent is pending; a window of pending rows that reaches the end of the ids asks
for the next token, and the stream then has nothing to send until that token is back. Putting a stream back
after a lost node therefore is `sent = 0`.

A frame (`Policy` has the numbers):

- While only answers run, a frame takes the rows that are ready, up to the number that ends a round soonest.
- While prompts wait, frames are longer. Decode rows that are ready go first, and prompts fill the rest; when
  both are more than fits, each side gets its share over the frames, one row at least in the end.
- Prompts go in the order in which they are due (`turns`), as many in one frame as fit. Their windows follow
  each other without waiting for answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.operations import Operations
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.prefixes import BLOCK, PrefixCounts, Prefixes
from cascadia_p2p.ring.streams import Plan, Score, Stream, StreamRequest, Update
from cascadia_p2p.ring.turns import Turns
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.frames import SEGMENT, SegmentError, SegmentFlag, alternative_table

__all__ = ["Plan", "PrefixCounts", "Scheduler", "Score", "Stream", "StreamRequest", "Update"]

NO_ALTERNATIVES: Final = alternative_table()

_WANT_TOKEN: Final = int(SegmentFlag.WANT_TOKEN)
_NONE: Final = int(SegmentError.NONE)
_LONGEST_RETRY_S: Final = 600.0
_FINISHES: Final = 64
"""Ends of answers from which the rate of a busy ring is told."""


@dataclass(slots=True)
class _Ring:
    """The open ring the scheduler composes frames for."""

    stages: int
    promise: Promise
    free: list[int]
    prefixes: Prefixes | None
    number: int = 0
    in_flight: deque[int] = field(default_factory=deque)
    asked: deque[tuple[Stream, ...]] = field(default_factory=deque)
    """For each frame in flight, the streams whose next token it asks for."""


class Scheduler:
    """Decides what goes into the ring; every submitted stream ends in exactly one terminal update.

    Args:
        policy: rows a frame, windows and bounds; may be replaced at any time.
        block: positions in a block at the stages; prefixes are kept up to a block's end.
    """

    def __init__(self, policy: Policy, block: int = BLOCK) -> None:
        self.policy = policy
        self.admitting = True
        """Whether waiting streams may start; those that run go on either way."""
        self.prefix_counts = PrefixCounts()
        self._block = block
        self._waiting: OrderedDict[StreamId, Stream] = OrderedDict()
        self._running: dict[StreamId, Stream] = {}
        self._unproven: dict[StreamId, Stream] = {}
        """Running streams without a token since their start in this ring."""
        self._turns = Turns()
        self._operations = Operations()
        self._ring: _Ring | None = None
        self._owed = 0.0
        self._mixed = 0
        self._shaped: Policy | None = None
        self._shapes: dict[int, tuple[int, int]] = {}
        """Rows and frames by the number of streams that decode, for the policy `_shaped`."""
        self._finished: deque[float] = deque(maxlen=_FINISHES)

    # --- the ring -----------------------------------------------------------------------------------------

    def open(self, stages: int, promise: Promise) -> list[Update]:
        """Start composing frames for a newly opened ring; its stages hold no stream yet.

        Streams that were running are put back to the front of the queue, those with the least to prefill
        first and those that were set apart last; what they generated stays. Streams that this ring can not
        hold end, and are returned.
        """
        back = sorted(self._running.values(), key=lambda s: (s.apart, len(s.ids), s.id))
        for stream in reversed(back):
            self._put_back(stream)
        self._running.clear()
        self._unproven.clear()
        self._turns.clear()
        self._operations.clear()
        self._owed, self._mixed, self._shaped = 0.0, 0, None
        self.prefix_counts.entries = self.prefix_counts.kept = 0
        prefixes = Prefixes(promise, self.prefix_counts, self._block) if promise.kept else None
        self._ring = _Ring(stages, promise, list(range(promise.slots - 1, -1, -1)), prefixes)
        too_long = [stream for stream in self._waiting.values() if len(stream.ids) > promise.context]
        for stream in too_long:
            del self._waiting[stream.id]
        return [self._outgrown(stream, promise.context) for stream in too_long]

    def close(self) -> None:
        """Compose nothing more until the next `open`."""
        self._ring = None

    @property
    def in_flight(self) -> int:
        """Frames sent whose token frame is not back."""
        return len(self._ring.in_flight) if self._ring else 0

    @property
    def waiting(self) -> int:
        """Streams without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Streams with a slot."""
        return len(self._running)

    def streams(self) -> Iterator[Stream]:
        """Every stream that has not ended, the running ones first."""
        yield from self._running.values()
        yield from self._waiting.values()

    # --- streams ------------------------------------------------------------------------------------------

    def submit(self, request: StreamRequest, now: float) -> int:
        """Queue a request and return how many wait before it.

        Raises:
            RequestError: `overloaded` when the queue is full, `context_overflow` when an open ring can not
                hold the prompt.
        """
        ids = [*request.prompt, *request.held]
        if self._ring is not None and len(ids) > self._ring.promise.context:
            raise _overflow(len(ids), self._ring.promise.context)
        if (error := self.overload(now)) is not None:
            raise error
        self._waiting[request.stream] = Stream(request, ids, submitted_at=now)
        return len(self._waiting) - 1

    def overload(self, now: float, coming: int = 0) -> RequestError | None:
        """What the next request is refused with, None when there is a place for it; from any thread.

        Args:
            now: the time.
            coming: requests before it that are to be submitted; they may find free slots.
        """
        ring, waiting = self._ring, len(self._waiting)
        if coming:
            waiting += max(0, coming - (0 if ring is None else len(ring.free)))
        if waiting < self.policy.queue_limit:
            return None
        return RequestError(
            ErrorCode.OVERLOADED,
            f"{waiting} requests wait already, the most this node queues: try again later",
            retry_after_s=self.retry_after(now),
        )

    def retry_after(self, now: float) -> float:
        """Seconds until half of the queue will have started, at the rate at which answers ended lately."""
        if len(self._finished) < 2 or now <= self._finished[0]:
            return self.policy.retry_after_s
        rate = len(self._finished) / (now - self._finished[0])
        return round(min(max(len(self._waiting) / (2 * rate), 1.0), _LONGEST_RETRY_S), 1)

    def drop(self, stream: StreamId, error: RequestError) -> Update | None:
        """End a stream in any state with `error`; None when it has ended already."""
        waiting = self._waiting.pop(stream, None)
        if waiting is not None:
            return Update(waiting, error=error)
        found = self._running.get(stream)
        if found is None:
            return None
        self._retire(found, keep=True)
        return Update(found, error=error)

    @property
    def unproven(self) -> Collection[StreamId]:
        """Streams that run, or ran until the ring was lost, without a token since they were started in it."""
        return self._unproven.keys()

    def set_apart(self, streams: Collection[StreamId]) -> None:
        """Let each of these start in the next ring when all who run there have had a token, and alone.

        If it is what kills nodes it is then with nobody else of whom that could be thought. Its next token
        ends this.
        """
        for stream in self.streams():
            stream.apart = stream.apart or stream.id in streams

    # --- frames -------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan | None:
        """Compose the next frame, or None when there is nothing to send or no credit to send it with."""
        ring = self._ring
        if ring is None:
            return None
        if self._waiting:
            self._admit(ring, now)
        rows, frames = self._shape(ring)
        if len(ring.in_flight) >= self._credits(ring, frames):
            return None
        windows = self._take_windows(ring, rows)
        if not windows and not self._operations:
            return None
        return self._compose(ring, windows)

    def on_tokens(
        self,
        number: int,
        records: npt.NDArray[np.void],
        now: float,
        alternatives: npt.NDArray[np.void] = NO_ALTERNATIVES,
    ) -> list[Update]:
        """Take the tail's answer to frame `number`; the credit of that frame is free again.

        Args:
            number: of the frame.
            records: `RECORD` array.
            now: the time.
            alternatives: `ALTERNATIVE` array, those of all records one after the other.

        Raises:
            ValueError: the frame is not the oldest one in flight; the ring has lost its order.
        """
        ring = self._ring
        if ring is None or not ring.in_flight or ring.in_flight[0] != number:
            raise ValueError(f"the token frame {number} answers no frame in flight")
        ring.in_flight.popleft()
        asked = ring.asked.popleft()
        updates: list[Update] = []
        if not len(records) and not asked:
            return updates
        named = alternatives.tolist() if len(alternatives) else []
        first = 0
        for stream_id, _, position, token, logprob, status, stage, count in records.tolist():
            stream = self._running.get(stream_id)
            # What was sent before a stream was put back is answered after it.
            if stream is not None and number < stream.started_frame:
                stream = None
            last = first + count
            if status != _NONE:
                updates += self._fail(ring, stream_id, stream, SegmentError(status), stage)
            elif stream is not None:
                score = Score(logprob, tuple(named[first:last]))
                updates.append(self._advance(stream, position, token, score, now))
            first = last
        for stream in asked:
            # One that went on awaits a later frame's token, if any; one that was put back started later.
            if stream.awaited and number >= stream.started_frame and self._running.get(stream.id) is stream:
                updates.append(self._give_up(stream, f"frame {number} came back without its token"))
        return updates

    # --- admission ----------------------------------------------------------------------------------------

    def _outgrown(self, stream: Stream, context: int) -> Update:
        """The end of a stream that is too long: an answer that was under way ends as one of full length."""
        if stream.generated:
            return Update(stream, finish=FinishReason.LENGTH)
        return Update(stream, error=_overflow(len(stream.ids), context))

    def _admit(self, ring: _Ring, now: float) -> None:
        while self._waiting and ring.free:
            stream = next(iter(self._waiting.values()))
            # Those that were put back are no new ones.
            if not self.admitting and stream.started_at is None:
                return
            # One that is set apart starts when all have had a token, and until its own nobody else does.
            if self._unproven and (stream.apart or next(iter(self._unproven.values())).apart):
                return
            del self._waiting[stream.id]
            stream.slot, stream.started_frame = ring.free.pop(), ring.number + 1
            if ring.prefixes is not None:
                self._look_up(ring.prefixes, stream)
            else:
                self._operations.start(stream.request, stream.slot)
            if stream.started_at is None:
                stream.started_at, stream.reused = now, stream.sent
            self._running[stream.id] = self._unproven[stream.id] = stream
            self._turns.add_prompt(stream)

    def _look_up(self, prefixes: Prefixes, stream: Stream) -> None:
        """Start a stream from the longest kept prefix of its ids."""
        slot = 0 if stream.slot is None else stream.slot
        tokens = stream.request.max_tokens - stream.generated
        stream.holding, entry, evicted = prefixes.begin(stream.id, stream.ids, tokens, attach=stream.attach)
        self._evict(evicted)
        self._operations.start(stream.request, slot)
        if entry is not None:
            self._operations.attach(stream.id, slot, entry.position, entry.number)
            stream.sent = entry.position

    def _put_back(self, stream: Stream) -> None:
        """Let a stream wait again, before all others."""
        stream.put_back()
        self._waiting[stream.id] = stream
        self._waiting.move_to_end(stream.id, last=False)

    # --- composing ----------------------------------------------------------------------------------------

    def _shape(self, ring: _Ring) -> tuple[int, int]:
        """Rows a frame and frames in flight for the streams that decode now."""
        decoding = len(self._running) - self._turns.prompts
        if self.policy is not self._shaped:
            self._shaped = self.policy
            self._shapes.clear()
        shape = self._shapes.get(decoding)
        if shape is None:
            policy, streams = self.policy, max(decoding, 1)
            rows = policy.decode_rows(streams, ring.stages, ring.promise.rows)
            shape = rows, policy.frames(streams, ring.stages, ring.promise.rows)
            self._shapes[decoding] = shape
        return shape

    def _credits(self, ring: _Ring, frames: int) -> int:
        """Frames that may be in flight; with prompts, one a stage and one on the way."""
        if self._turns.prompts:
            frames = max(frames, ring.stages + 1)
        return min(frames, max(1, self.policy.frames_in_flight))

    def _take_windows(self, ring: _Ring, decode_rows: int) -> list[tuple[Stream, int]]:
        """Choose (stream, rows): decode rows, the one that has waited longest first, then prompts."""
        turns = self._turns
        if not turns.prompts:
            self._mixed = 0
            return [(turns.take_decoding(), 1) for _ in range(min(turns.decoding, decode_rows))]
        decoding = len(self._running) - turns.prompts
        rows = self._mixed = self.policy.mixed_rows(
            turns.pending, turns.prompts, decoding, ring.stages, ring.promise.rows, self._mixed
        )
        ready = min(turns.decoding, rows)
        if ready + turns.pending > rows:
            self._owed = min(self._owed + rows * self.policy.share(turns.prompts), rows) if ready else 0.0
            ready = min(ready, rows - min(int(self._owed), turns.pending))
        taken = [(turns.take_decoding(), 1) for _ in range(ready)]
        left = rows - ready
        for stream in turns.waiting_prompts():
            if not left:
                break
            window = min(stream.pending, left)
            if stream.holding is not None:
                window = min(window, stream.holding.rows_to_cut(stream.sent) or window)
            taken.append((stream, window))
            left -= window
        self._owed = max(0.0, self._owed - (rows - ready - left))
        return taken

    def _compose(self, ring: _Ring, windows: list[tuple[Stream, int]]) -> Plan:
        ring.number += 1
        ring.in_flight.append(ring.number)
        segments: list[tuple[int, int, int, int, int, int, int]] = []
        tokens: list[int] = []
        for stream, rows in windows:
            start, end = stream.sent, stream.sent + rows
            slot = 0 if stream.slot is None else stream.slot
            self._keep(ring, stream)
            stream.sent = end
            stream.awaited = end == len(stream.ids)
            self._turns.sent(stream, rows)
            tokens += stream.ids[start:end]
            segments.append((stream.id, slot, start, rows, _WANT_TOKEN if stream.awaited else 0, 0, 0))
        ring.asked.append(tuple(stream for stream, _ in windows if stream.awaited))
        return Plan(
            ring.number,
            np.array(segments, SEGMENT),
            self._operations.take(),
            np.array(tokens, np.int32),
        )

    def _keep(self, ring: _Ring, stream: Stream) -> None:
        """Have kept what a stream holds, if that ends where something is kept of it."""
        if ring.prefixes is None or stream.holding is None or not stream.sent or stream.sent % self._block:
            return
        generating = stream.generated > 0
        entry = ring.prefixes.keep(stream.holding, stream.ids, stream.sent, generating=generating)
        if entry is not None:
            slot = 0 if stream.slot is None else stream.slot
            self._operations.keep(stream.id, slot, stream.sent, entry)

    # --- answers ------------------------------------------------------------------------------------------

    def _advance(self, stream: Stream, position: int, token: int, score: Score, now: float) -> Update:
        if position != len(stream.ids) or not stream.awaited:
            text = f"the ring answered position {position} where {len(stream.ids)} was due"
            return self._give_up(stream, text)
        if not _sound(token, score):
            return self._give_up(stream, f"the ring answered {token} with {score.logprob}, which is no token")
        stream.ids.append(token)
        stream.awaited = stream.apart = False
        self._unproven.pop(stream.id, None)
        stream.last_token_at = now
        if stream.first_token_at is None:
            stream.first_token_at = now
        finish = self._finish(stream, token)
        if finish is None:
            self._turns.add_decoding(stream)
        else:
            self._retire(stream, keep=True)
            self._finished.append(now)
        return Update(stream, (token,), finish, scores=(score,))

    def _give_up(self, stream: Stream, why: str) -> Update:
        """End a stream to which the ring gave a wrong answer, or none."""
        self._retire(stream, keep=False)
        return Update(stream, error=RequestError(ErrorCode.INTERNAL, why))

    def _finish(self, stream: Stream, token: int) -> FinishReason | None:
        if token in stream.request.stop_ids:
            return FinishReason.STOP
        context = self._ring.promise.context if self._ring else 0
        if stream.generated >= stream.request.max_tokens or len(stream.ids) > context:
            return FinishReason.LENGTH
        return None

    def _fail(
        self, ring: _Ring, stream_id: StreamId, stream: Stream | None, status: SegmentError, stage: int
    ) -> list[Update]:
        """A stage could not compute a stream, which may have ended meanwhile.

        What was kept of it may be missing at that stage. A stream that started from a prefix that is missing
        there starts again from nothing, once.
        """
        if ring.prefixes is not None:
            self._evict(ring.prefixes.evict_kept_from(stream_id))
        if stream is None:
            return []
        attached = 0 if stream.holding is None else stream.holding.attached
        self._retire(stream, keep=False)
        if status is not SegmentError.PREFIX or not attached or ring.prefixes is None:
            return [Update(stream, error=_stage_error(status, stage))]
        self._evict(ring.prefixes.evict_prefix_of(stream.ids, attached))
        stream.attach, stream.reused = False, 0
        self._put_back(stream)
        return []

    def _evict(self, entries: list[int]) -> None:
        for number in entries:
            self._operations.evict(number)

    def _retire(self, stream: Stream, *, keep: bool) -> None:
        """Take a stream out of its slot; its release goes out before the slot's next start.

        A start that has not gone out is taken back: the ring never knew the stream.

        Args:
            stream: that runs.
            keep: what it holds may be kept.
        """
        del self._running[stream.id]
        self._unproven.pop(stream.id, None)
        self._turns.remove(stream)
        ring = self._ring
        if ring is not None and stream.slot is not None:
            if stream.started_frame > ring.number:
                self._operations.take_back_start(stream.id)
            else:
                if keep:
                    self._keep(ring, stream)
                self._operations.release(stream.id, stream.slot)
            if ring.prefixes is not None and stream.holding is not None:
                ring.prefixes.end(stream.holding)
            ring.free.append(stream.slot)
        stream.slot, stream.holding = None, None


def _sound(token: int, score: Score) -> bool:
    """Whether a tail's answer can be a token: what is no number is not below infinity."""
    named = all(each >= 0 and logprob < math.inf for each, logprob in score.alternatives)
    return token >= 0 and score.logprob < math.inf and named


def _overflow(prompt: int, context: int) -> RequestError:
    return RequestError(
        ErrorCode.CONTEXT_OVERFLOW,
        f"prompt is {prompt} tokens; this ring holds {context} a stream: shorten it, or start the nodes with "
        "a larger --context",
    )


def _stage_error(status: SegmentError, stage: int) -> RequestError:
    reasons: dict[SegmentError, str] = {
        SegmentError.NON_FINITE: "computed a value that is not finite",
        SegmentError.CONTEXT: "has no room for another position of this stream",
        SegmentError.ROOM: "has no block free for another position of this stream",
        SegmentError.PREFIX: "does not keep the prefix that this stream was to start from",
    }
    what = reasons.get(status, f"could not compute this stream ({status.name.lower()})")
    return RequestError(ErrorCode.INTERNAL, f"stage {stage} {what}")
