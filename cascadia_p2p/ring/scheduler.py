"""The head's scheduler: which rows of which streams go into the next frame.

Pure and deterministic: no socket, no thread, no clock of its own (`now` is handed in, in seconds of any
steady clock). Streams wait, then run in a slot. `schedule` composes the next frame, `on_tokens` takes the
tail's answer, and nothing else moves a running stream forward.

Prefill and decode are one thing here: a stream has ids (prompt and generated), of which the first `sent` went
into the ring. Whatever is not sent is pending; a window of pending rows that reaches the end of the ids asks
for the next token, and the stream then has nothing to send until that token is back. Putting a stream back
after a lost node therefore is `sent = 0`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.types import GREEDY, Promise, Sampling, StreamId
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.frames import (
    OPERATION,
    SEGMENT,
    OperationKind,
    SegmentError,
    SegmentFlag,
    alternative_table,
)

NO_ALTERNATIVES: Final = alternative_table()


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request in token ids.

    Args:
        stream: the number the head gave it.
        prompt: at least one id, each within the vocabulary.
        max_tokens: at least 1; the scheduler lowers it to what the context can hold.
        stop_ids: a generated id among these ends the answer and is its last id.
        sampling: how its tokens are chosen.
        alternatives: likeliest tokens to be named beside each of its own.
    """

    stream: StreamId
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    alternatives: int = 0


@dataclass(slots=True)
class Stream:
    """The state of one request; positions are counted from 0, times in seconds of the caller's clock."""

    request: StreamRequest
    ids: list[int]
    submitted_at: float
    slot: int | None = None
    sent: int = 0
    awaited: bool = False
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def pending(self) -> int:
        """Rows that can be sent now."""
        return 0 if self.awaited else len(self.ids) - self.sent

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        """The prompt is through: what is pending is the one row of the newest token."""
        return self.generated > 0 and self.sent == len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One frame to run and send.

    Args:
        number: 1, 2, 3, ... within an epoch.
        segments: `SEGMENT` array, in row order.
        operations: `OPERATION` array, applied before the rows, in order.
        tokens: int32 `[rows]`, the ids to embed.
    """

    number: int
    segments: npt.NDArray[np.void]
    operations: npt.NDArray[np.void]
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Score:
    """Natural logarithms of probabilities at temperature 1, before any cut.

    Args:
        logprob: of the token that was chosen.
        alternatives: ids and logprobs of the likeliest tokens, the likeliest first.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What happened to one stream: new tokens, and at the end exactly one finish or error.

    Args:
        stream: the stream's state; finished streams are no longer changed by the scheduler.
        tokens: the ids that came with this update.
        finish: set when the answer is complete.
        error: set when the stream failed.
        scores: of the tokens, as many.
    """

    stream: Stream
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    scores: tuple[Score, ...] = ()

    @property
    def terminal(self) -> bool:
        """Nothing more comes for this stream."""
        return self.finish is not None or self.error is not None


@dataclass(slots=True)
class _Ring:
    """The open ring the scheduler composes frames for."""

    stages: int
    promise: Promise
    free: list[int]
    number: int = 0
    in_flight: deque[int] = field(default_factory=deque)


class Scheduler:
    """Decides what goes into the ring; every submitted stream ends in exactly one terminal update.

    Args:
        policy: rows a frame, windows and bounds.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.admitting = True
        """Whether waiting streams may start; those that run go on either way."""
        self._waiting: deque[Stream] = deque()
        self._running: dict[StreamId, Stream] = {}
        self._turns: deque[StreamId] = deque()
        self._operations: list[tuple[OperationKind, StreamId, int]] = []
        self._ring: _Ring | None = None

    # --- the ring -----------------------------------------------------------------------------------------

    def open(self, stages: int, promise: Promise) -> list[Update]:
        """Start composing frames for a newly opened ring; its stages hold no stream yet.

        Streams that were running are put back to the front of the queue, those with the least to prefill
        first; what they generated stays. Streams that this ring can not hold end, and are returned.
        """
        back = sorted(self._running.values(), key=lambda s: (len(s.ids), s.request.stream))
        for stream in reversed(back):
            stream.slot, stream.sent, stream.awaited = None, 0, False
            self._waiting.appendleft(stream)
        self._running.clear()
        self._turns.clear()
        self._operations.clear()
        self._ring = _Ring(stages, promise, free=list(range(promise.slots - 1, -1, -1)))
        too_long = [stream for stream in self._waiting if len(stream.ids) > promise.context]
        for stream in too_long:
            self._waiting.remove(stream)
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
        yield from self._waiting

    # --- streams ------------------------------------------------------------------------------------------

    def submit(self, request: StreamRequest, now: float) -> int:
        """Queue a request and return how many wait before it.

        Raises:
            RequestError: `overloaded` when the queue is full, `context_overflow` when an open ring can not
                hold the prompt.
        """
        if self._ring is not None and len(request.prompt) > self._ring.promise.context:
            raise _overflow(len(request.prompt), self._ring.promise.context)
        if len(self._waiting) >= self.policy.queue_limit:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{len(self._waiting)} requests wait already, the most this node queues: try again later",
                retry_after_s=self.policy.retry_after_s,
            )
        self._waiting.append(Stream(request, list(request.prompt), submitted_at=now))
        return len(self._waiting) - 1

    def drop(self, stream: StreamId, error: RequestError) -> Update | None:
        """End a stream in any state with `error`; None when it has ended already."""
        found = self._running.get(stream)
        if found is not None:
            self._retire(found)
            return Update(found, error=error)
        for waiting in self._waiting:
            if waiting.request.stream == stream:
                self._waiting.remove(waiting)
                return Update(waiting, error=error)
        return None

    def drop_all(self, error: RequestError) -> list[Update]:
        """End every stream with `error`."""
        ids = [stream.request.stream for stream in self.streams()]
        return [update for i in ids if (update := self.drop(i, error)) is not None]

    # --- frames -------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan | None:
        """Compose the next frame, or None when there is nothing to send or no credit to send it with."""
        ring = self._ring
        if ring is None:
            return None
        self._admit(ring, now)
        if len(ring.in_flight) >= self._credits(ring):
            return None
        windows = self._take_windows(ring)
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
        updates, named = [], 0
        for record in records:
            stream = self._running.get(StreamId(int(record["stream"])))
            first, named = named, named + int(record["alternatives"])
            if stream is not None:
                updates.append(self._advance(stream, record, alternatives[first:named], now))
        return updates

    # --- inside -------------------------------------------------------------------------------------------

    def _outgrown(self, stream: Stream, context: int) -> Update:
        """The end of a stream that is too long: an answer that was under way ends as one of full length."""
        if stream.generated:
            return Update(stream, finish=FinishReason.LENGTH)
        return Update(stream, error=_overflow(len(stream.ids), context))

    def _admit(self, ring: _Ring, now: float) -> None:
        while self.admitting and self._waiting and ring.free:
            stream = self._waiting.popleft()
            stream.slot = ring.free.pop()
            if stream.started_at is None:
                stream.started_at = now
            self._running[stream.request.stream] = stream
            self._turns.append(stream.request.stream)
            self._operations.append((OperationKind.START, stream.request.stream, stream.slot))

    def _credits(self, ring: _Ring) -> int:
        """Frames that may be in flight: one a stage, and no more than all streams fill."""
        streams = list(self._running.values())
        rows = self.policy.decode_rows(len(streams), ring.stages, ring.promise.rows)
        frames = -(-len(streams) // rows)
        if any(not stream.decoding and stream.pending for stream in streams):
            frames = max(frames, ring.stages + 1)
        return max(1, min(frames, self.policy.frames_in_flight))

    def _take_windows(self, ring: _Ring) -> list[tuple[Stream, int]]:
        """Choose (stream, rows) in turn order: decode rows up to their bound, then one prompt's window."""
        ready = [self._running[i] for i in self._turns if self._running[i].pending]
        decode_rows = self.policy.decode_rows(len(self._running), ring.stages, ring.promise.rows)
        taken = [(stream, 1) for stream in ready if stream.decoding][:decode_rows]
        left = ring.promise.rows - len(taken)
        prompt = next((stream for stream in ready if not stream.decoding), None)
        if prompt is not None and left > 0:
            shared = len(self._running) > 1
            taken.append((prompt, self.policy.window(prompt.pending, ring.stages, left, shared=shared)))
        for stream, _ in taken:
            self._turns.remove(stream.request.stream)
            self._turns.append(stream.request.stream)
        return taken

    def _compose(self, ring: _Ring, windows: list[tuple[Stream, int]]) -> Plan:
        segments = np.zeros(len(windows), SEGMENT)
        tokens: list[int] = []
        for segment, (stream, rows) in zip(segments, windows, strict=True):
            end = stream.sent + rows
            stream.awaited = end == len(stream.ids)
            segment["stream"] = stream.request.stream
            segment["slot"] = 0 if stream.slot is None else stream.slot
            segment["start"], segment["rows"] = stream.sent, rows
            segment["flags"] = SegmentFlag.WANT_TOKEN if stream.awaited else 0
            tokens += stream.ids[stream.sent : end]
            stream.sent = end
        operations = np.zeros(len(self._operations), OPERATION)
        for operation, (kind, stream_id, slot) in zip(operations, self._operations, strict=True):
            operation["kind"], operation["stream"], operation["slot"] = kind, stream_id, slot
            if kind is OperationKind.START:
                self._put_sampling(operation, self._running[stream_id].request)
        self._operations.clear()
        ring.number += 1
        ring.in_flight.append(ring.number)
        return Plan(ring.number, segments, operations, np.array(tokens, np.int32))

    @staticmethod
    def _put_sampling(operation: np.void, request: StreamRequest) -> None:
        sampling = request.sampling
        for name in ("seed", "top_k", "temperature", "top_p"):
            operation[name] = getattr(sampling, name)
        operation["logprobs"] = request.alternatives

    def _advance(
        self, stream: Stream, record: np.void, alternatives: npt.NDArray[np.void], now: float
    ) -> Update:
        status = SegmentError(int(record["status"]))
        if status is not SegmentError.NONE:
            self._retire(stream)
            return Update(stream, error=_stage_error(status, int(record["stage"])))
        if int(record["position"]) != len(stream.ids) or not stream.awaited:
            self._retire(stream)
            text = f"the ring answered position {int(record['position'])} where {len(stream.ids)} was due"
            return Update(stream, error=RequestError(ErrorCode.INTERNAL, text))
        token = int(record["token"])
        stream.ids.append(token)
        stream.awaited = False
        stream.last_token_at = now
        if stream.first_token_at is None:
            stream.first_token_at = now
        finish = self._finish(stream, token)
        if finish is not None:
            self._retire(stream)
        named = tuple(zip(alternatives["token"].tolist(), alternatives["logprob"].tolist(), strict=True))
        return Update(stream, (token,), finish, scores=(Score(float(record["logprob"]), named),))

    def _finish(self, stream: Stream, token: int) -> FinishReason | None:
        if token in stream.request.stop_ids:
            return FinishReason.STOP
        context = self._ring.promise.context if self._ring else 0
        if stream.generated >= stream.request.max_tokens or len(stream.ids) > context:
            return FinishReason.LENGTH
        return None

    def _retire(self, stream: Stream) -> None:
        """Take a stream out of its slot; its release goes out before the slot's next start.

        A start that has not gone out is taken back: a frame has at most two operations a slot.
        """
        del self._running[stream.request.stream]
        self._turns.remove(stream.request.stream)
        if self._ring is not None and stream.slot is not None:
            start = (OperationKind.START, stream.request.stream, stream.slot)
            if start in self._operations:
                self._operations.remove(start)
            else:
                self._operations.append((OperationKind.RELEASE, stream.request.stream, stream.slot))
            self._ring.free.append(stream.slot)
        stream.slot = None


def _overflow(prompt: int, context: int) -> RequestError:
    return RequestError(
        ErrorCode.CONTEXT_OVERFLOW, f"prompt is {prompt} tokens; this ring holds {context} a stream"
    )


def _stage_error(status: SegmentError, stage: int) -> RequestError:
    reasons: dict[SegmentError, str] = {
        SegmentError.NON_FINITE: "computed a value that is not finite",
        SegmentError.CONTEXT: "has no room for another position of this stream",
    }
    what = reasons.get(status, f"could not compute this stream ({status.name.lower()})")
    return RequestError(ErrorCode.INTERNAL, f"stage {stage} {what}")
