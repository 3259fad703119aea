"""The head's door for clients: requests in, exactly one final reply out for each, pieces of it before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

import structlog
from pydantic import JsonValue

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node.answers import ID_BYTES, LONG_ANSWER, Answer, AnswerDesk, memory_of
from cascadia_p2p.node.conductor import DataCaller, HeadConductor, ring_incomplete
from cascadia_p2p.node.journal import JournalWriter, Standby
from cascadia_p2p.node.kept import AnswerName, Asked, KeptAnswers, Record
from cascadia_p2p.node.meters import HeadCounts, HeadMeter
from cascadia_p2p.node.outbox import Outbox
from cascadia_p2p.node.queue_places import QueuePlaces
from cascadia_p2p.node.reading import Reading
from cascadia_p2p.node.requests import Pending, PendingRequests
from cascadia_p2p.ring.scheduler import Stream, StreamRequest, Update
from cascadia_p2p.transport.client_server import ClientCall, ClientFault, ClientGone, ClientServer, Route
from cascadia_p2p.transport.looping import SocketClosedError
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.messages import (
    AckRequest,
    CancelReply,
    CancelRequest,
    ErrorReply,
    FinishReason,
    GenerateRequest,
    StatusReply,
    StatusRequest,
    decode_request,
    encode,
)
from cascadia_p2p.wire.model import encode_flat

PIECE_S: Final = 0.02
"""Least time between two pieces of one answer: tokens that come faster are sent together."""

MAX_PIECES: Final = 256
"""Pieces of one answer that may wait for a client that does not take them.

Of a client that tells what it has read (`AckRequest`) all count that it has not; of another, those that
neither its socket nor its system takes any more.
"""

SURPLUS_RETRY_S: Final = 5.0
"""When a client that is one too many may try again."""

AGAIN_S: Final = 0.5
"""When to ask again where a head leaves, in seconds."""

_ASKED_AGAIN: Final = "the request was asked again over another connection, which gets the answer"

_log = structlog.get_logger()

StatusBody: TypeAlias = dict[str, JsonValue]
T = TypeVar("T")


class HeadService:
    """Serves the client port of the head node for as long as it is the head.

    Args:
        server: bound sockets; closed by `close`.
        desk: judges requests and words replies.
        conductor: the scheduler's side in the data thread.
        data: the way into the data thread.
        status: what a status request is answered with.
        missing: shards that nobody serves, now.
        queue_wait_s: longest wait for a slot, in seconds.
        recovery_s: longest wait without a ring, in seconds.
        watch: told of every task that has ended, by its failure too.
        journal: tells standbys of answers.
        kept: answers of the head whose place this one takes, the complete ones first and by age.
    """

    def __init__(
        self,
        server: ClientServer,
        desk: AnswerDesk,
        conductor: HeadConductor,
        data: DataCaller,
        *,
        status: Callable[[], StatusBody],
        missing: Callable[[], Sequence[int]],
        queue_wait_s: float,
        recovery_s: float,
        watch: Callable[[asyncio.Task[None]], None],
        journal: JournalWriter,
        kept: Iterable[Record] = (),
    ) -> None:
        self._server = server
        self._desk = desk
        self._conductor = conductor
        self._data = data
        self._status = status
        self._missing = missing
        self._queue_wait_s = queue_wait_s
        self._recovery_s = recovery_s
        self._watch = watch
        self._pending = PendingRequests()
        self._tasks: list[asyncio.Task[None]] = []
        self._reading = Reading(conductor.overload)
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(server, lambda route: self._cancel_peer(*route.peer))
        self._places = QueuePlaces(
            self._pending, self._outbox, lambda hear: data.call(lambda: conductor.tell_places(hear))
        )
        self._due: set[StreamId] = set()
        self._due_timer: asyncio.TimerHandle | None = None
        self._draining: RequestError | None = None
        self.journal = journal
        self._kept = KeptAnswers(forgotten=journal.dropped)
        for record in kept:
            record.number = conductor.number_stream()
            self._kept.keep(record, self._loop.time() if record.finish is None else record.since)
        self.counts = HeadCounts()
        self.meter = HeadMeter()

    @property
    def pending(self) -> int:
        """Requests without their final reply."""
        return len(self._pending)

    @property
    def server(self) -> ClientServer:
        """The door's sockets."""
        return self._server

    def needs(self, promise: Promise) -> tuple[int, int]:
        """What the requests that have no final reply need of the `promise` of their ring: slots, context."""
        longest = max((pending.positions for _, pending in self._pending), default=0)
        return min(len(self._pending), promise.slots), min(longest, promise.context)

    def interrupted(self, reason: str) -> None:
        """The ring is lost: tell those who read their answers as they come that there is a pause."""
        for stream, pending in self._pending:
            if pending.request.stream and not pending.cancelled and pending.answer is not None:
                notice = pending.answer.notice(f"{reason}; the answer goes on as soon as the ring does")
                self._outbox.send(pending.route, encode(notice), stream)

    def drain(self, reason: str) -> None:
        """Start nothing more; what runs goes on."""
        text = f"its head takes nothing new: {reason}; ask again soon"
        self._draining = ring_incomplete(text, (), AGAIN_S)
        self._data.call(partial(self._conductor.drop_waiting, self._draining))

    def start(self) -> None:
        """Take requests from now on."""
        self._tasks = [
            asyncio.create_task(self._serve(), name="clients"),
            asyncio.create_task(self._expire(), name="queue-limit"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._watch)

    async def close(self, reason: str) -> None:
        """Answer everybody who still waits, then unbind."""
        error = ring_incomplete(reason, self._missing(), AGAIN_S)
        for stream, _ in self._pending:
            self._data.call(lambda stream=stream: self._conductor.drop(stream, error))  # type: ignore[misc]
            self._fail(stream, error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reading.close()
        if self._due_timer is not None:
            self._due_timer.cancel()
        self._places.close()
        self._outbox.close()
        self._server.close()

    def expel(self) -> None:
        """End the connections of clients whose key was withdrawn."""
        self._server.expel()

    def follow(self, standbys: Sequence[Standby]) -> None:
        """Tell these, and no others, of all answers; to be called again and again."""
        self.journal.follow(standbys, self._records, self._loop.time())

    def deliver(self, updates: Sequence[Update]) -> None:
        """Take what happened to streams; in the event loop."""
        came = [(update, pending) for update in updates if (pending := self._take_update(update)) is not None]
        self.journal.flush(self._loop.time())
        for update, pending in came:
            stream = update.stream.request.stream
            if stream not in self._pending or pending.answer is None:
                continue
            if pending.answer.stopped:
                self._finish(pending, pending.answer, update.stream, FinishReason.STOP)
                if not update.terminal:
                    self._drop(stream, "a stop string was met")
            elif update.error is not None:
                self._send_piece(stream, pending)
                self._fail(stream, update.error)
            elif update.finish is not None:
                self._finish(pending, pending.answer, update.stream, update.finish)
            elif pending.request.stream:
                self._offer_piece(stream, pending)

    # --- inside -------------------------------------------------------------------------------------------

    def _records(self) -> Iterator[Record]:
        """Of all answers that run or are kept."""
        yield from (pending.record for _, pending in self._pending if pending.record is not None)
        yield from self._kept.records()

    def _take_update(self, update: Update) -> Pending | None:
        """Take new tokens and what they mean, but say nothing yet; whose they are, None for nobody's."""
        pending = self._pending.get(update.stream.request.stream)
        if pending is None or pending.answer is None:
            return None
        if update.tokens:
            self._measure(pending, update)
        pending.answer.take(update.tokens, update.scores)
        if pending.record is not None and update.error is None:
            self._note(pending.record, pending.answer, update)
        return pending

    def _note(self, record: Record, answer: Answer, update: Update) -> None:
        """Keep a complete answer, and let the standbys know what has come."""
        finish = FinishReason.STOP if answer.stopped else update.finish
        if finish is not None and record.finish is None:
            self._complete(record, update.stream, finish)
        if self.journal.active:
            self.journal.changed(record)

    def _complete(self, record: Record, stream: Stream, finish: FinishReason) -> None:
        record.finish, record.cached = finish, stream.reused
        self._kept.keep(record, self._loop.time())

    def _measure(self, pending: Pending, update: Update) -> None:
        """Count tokens that came, and how long they took."""
        now, before = self._loop.time(), pending.token_at
        pending.token_at = now
        for _ in update.tokens:
            if before is None:
                self.meter.first(len(update.stream.request.prompt), now - pending.came_at)
            else:
                self.meter.next(now - before)
            before = now

    async def _serve(self) -> None:
        with contextlib.suppress(SocketClosedError):
            while True:
                event = await self._server.receive()
                match event:
                    case ClientCall():
                        self._take(event)
                    case ClientFault():
                        self._refuse(event.route, RequestError(ErrorCode.BAD_REQUEST, event.reason))
                    case ClientGone():
                        self._outbox.forget(event.connection)
                        self._cancel_peer(event.connection)

    def _take(self, call: ClientCall) -> None:
        route = call.route
        try:
            request = decode_request(call.data)
            if call.surplus and isinstance(request, GenerateRequest):
                text = f"{self._server.limit} clients are connected, the most that this node serves"
                raise RequestError(
                    ErrorCode.OVERLOADED, text, request_id=request.id, retry_after_s=SURPLUS_RETRY_S
                )
            match request:
                case GenerateRequest():
                    self._generate(call, request)
                case AckRequest():
                    self._read_up_to(route, request)
                case CancelRequest():
                    cancelled = self._cancel(route, request.id)
                    self._send(route, encode(CancelReply(id=request.id, cancelled=cancelled)))
                case StatusRequest():
                    self._send(route, encode(StatusReply(id=request.id, status=self._status())))
        except RequestError as error:
            self._refuse(route, error)
        except Exception:
            # One request must never take the door down, whatever is wrong with it.
            self._refuse(route, _failed())

    def _generate(self, call: ClientCall, request: GenerateRequest) -> None:
        route = call.route
        if self._draining is not None:
            raise _named(self._draining, request)
        if request.id is not None and self._pending.find(route, request.id) is not None:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                f"field 'id': '{request.id}' is still being answered on this connection: choose another",
                request_id=request.id,
            )
        if request.stream and call.one_reply:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                "field 'stream': a REQ socket takes one reply a request: use a DEALER socket, or send false",
                request_id=request.id,
            )
        stream = self._conductor.number_stream()
        name = None if request.key is None else AnswerName(call.client, request.key)
        pending = Pending(route, request, self._loop.time(), name)
        if self._desk.is_long(request, len(call.data)):
            size = memory_of(request)
            if (refusal := self._reading.refusal(size)) is not None:
                raise _named(refusal, request)
            self._pending.add(stream, pending)
            self._reading.start(self._read(stream, pending), size)
            return
        accepted, pending.answer = self._desk.accept(request, stream)
        self._pending.add(stream, pending)
        self._submit(accepted, pending)

    async def _read(self, stream: StreamId, pending: Pending) -> None:
        """Accept a request that takes long to be read."""
        found = await self._beside(stream, pending, partial(self._desk.accept, pending.request, stream))
        if found is not None:
            accepted, pending.answer = found
            pending.request = pending.answer.request
            self._submit(accepted, pending)

    async def _replay(self, accepted: StreamRequest, pending: Pending, answer: Answer, found: Record) -> None:
        """Bring an answer to where it is known, and go on as if its client had held it up to there.

        What is known may be another by then, and nothing was made of it yet.
        """
        stream = accepted.stream
        replay = partial(answer.replay, found.ids, found.scores, len(accepted.held))
        if await self._beside(stream, pending, replay) is not None:
            pending.answer = answer
            self._submit(replace(accepted, held=tuple(answer.ids)), pending)

    async def _beside(self, stream: StreamId, pending: Pending, read: Callable[[], T]) -> T | None:
        """What a thread reads of a request; None if nobody waits for it any more, or is refused by now."""
        found, failure = None, None
        try:
            found = await self._reading.read(read, lambda: stream in self._pending and self._draining is None)
        except RequestError as error:
            failure = error
        except Exception:
            failure = _failed(pending.request.id)
        # Its client may have gone meanwhile, and the head may be about to.
        if failure is None and self._draining is not None:
            failure = _named(self._draining, pending.request)
        if failure is not None:
            if self._pending.remove(stream) is not None:
                self._refuse(pending.route, failure)
            return None
        return found if stream in self._pending else None

    def _submit(self, accepted: StreamRequest, pending: Pending) -> None:
        if (answer := pending.answer) is None or not self._takes_place(accepted.stream, pending):
            return
        left, failure = None, None
        try:
            left = self._resume(accepted, pending, answer)
        except RequestError as error:
            failure = error
        except Exception:
            failure = _failed(pending.request.id)
        if failure is not None and self._pending.remove(accepted.stream) is not None:
            self._refuse(pending.route, failure)
        if left is None:
            return
        self.counts.accepted += 1
        pending.positions = len(left.prompt) + left.max_tokens
        self._places.ask_soon()
        self._data.call(lambda: self._conductor.submit(left, self._refused))

    def _resume(self, accepted: StreamRequest, pending: Pending, answer: Answer) -> StreamRequest | None:
        """Take up what is known of an answer; what is left to do for it, None when it is complete."""
        asked = Asked(
            accepted.prompt,
            accepted.max_tokens,
            pending.request.stop or (),
            accepted.stop_ids,
            accepted.sampling,
            pending.request.logprobs,
        )
        found = self._recall(accepted, pending, asked)
        unread = 0 if found is None or answer.stopped else len(found.ids) - len(accepted.held)
        if found is not None and unread > LONG_ANSWER:
            self._start_replay(accepted, pending, answer, found)
            return None
        known = len(answer.scores) if found is None else len(found.scores)
        if asked.logprobs is not None and len(accepted.held) > known:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                f"field 'held': this head knows logprobs of {known} of these {len(accepted.held)} ids, so "
                "the answer can not go on behind them: ask again, without 'held'",
                request_id=pending.request.id,
            )
        if found is not None:
            asked, accepted = found.asked, self._take_up(found, accepted, answer)
        stream = Stream(accepted, [*accepted.prompt, *accepted.held], submitted_at=self._loop.time())
        if found is not None and found.finish is not None:
            stream.reused = found.cached
            self._finish(pending, answer, stream, found.finish)
            return None
        if pending.name is not None:
            self._kept.forget(pending.name)
            pending.record = Record(accepted.stream, pending.name, asked, answer.ids, answer.scores)
            self.journal.changed(pending.record)
        stopped = answer.stopped or (accepted.held and accepted.held[-1] in accepted.stop_ids)
        if stopped or len(accepted.held) >= accepted.max_tokens:
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            if pending.record is not None:
                self._complete(pending.record, stream, finish)
            self._finish(pending, answer, stream, finish)
            return None
        self._send_piece(accepted.stream, pending)
        return accepted

    def _start_replay(self, accepted: StreamRequest, pending: Pending, answer: Answer, found: Record) -> None:
        size = found.weight * ID_BYTES
        if (refusal := self._reading.refusal(size)) is not None:
            raise _named(refusal, pending.request)
        pending.answer = None
        self._reading.start(self._replay(accepted, pending, answer, found), size)

    def _takes_place(self, stream: StreamId, pending: Pending) -> bool:
        """Whether a request is the last of its name that came; an earlier one ends, be it this one.

        They may be read in another order than they came.
        """
        if pending.name is None:
            return True
        first, last = self._pending.take_place(pending.name, stream)
        if first != last and (replaced := self._pending.remove(first)) is not None:
            self._drop(first, _ASKED_AGAIN)
            self._break_off(replaced)
            self.counts.cancelled += 1
            asker = self._pending.get(last)
            if asker is None or (asker.route, asker.request.id) != (replaced.route, replaced.request.id):
                error = _named(RequestError(ErrorCode.CANCELLED, _ASKED_AGAIN), replaced.request)
                self._send(replaced.route, encode(ErrorReply.of(error)))
        return last == stream

    def _recall(self, accepted: StreamRequest, pending: Pending, asked: Asked) -> Record | None:
        """What is known of an answer."""
        name, request = pending.name, pending.request
        if name is None:
            return None
        seeded = not request.temperature or request.seed is not None
        return self._kept.find(name, asked, accepted.held, self._loop.time(), seeded=seeded)

    def _take_up(self, found: Record, accepted: StreamRequest, answer: Answer) -> StreamRequest:
        """Bring an answer to where it was; the request that goes on from there."""
        sampling, held = accepted.sampling, len(accepted.held)
        if sampling.temperature:
            sampling = replace(sampling, seed=found.asked.sampling.seed)
            answer.seed = sampling.seed
        answer.replay(found.ids, found.scores, held)
        if found.finish is None:
            # It goes on under the name of who has come back.
            self._kept.forget(found.name)
        return replace(accepted, sampling=sampling, held=tuple(answer.ids))

    def _break_off(self, pending: Pending) -> None:
        """Keep what there is of an answer: its client may come back for it."""
        if pending.record is not None and pending.record.finish is None:
            self._kept.keep(pending.record, self._loop.time())

    def _refused(self, stream: StreamId, error: RequestError) -> None:
        """The scheduler has no place for a stream; called in the data thread."""
        self._loop.call_soon_threadsafe(partial(self._fail, stream, error, rejected=True))

    def _finish(self, pending: Pending, answer: Answer, stream: Stream, finish: FinishReason) -> None:
        self._pending.remove(stream.request.stream)
        piece = answer.finish()
        if piece is not None and pending.request.stream:
            self._outbox.send(pending.route, encode_flat(piece))
        reply = answer.reply(stream, finish)
        self.counts.finished += 1
        self.counts.prompt_tokens += reply.usage.prompt_tokens
        self.counts.completion_tokens += reply.usage.completion_tokens
        self._send(pending.route, encode(reply))

    def _fail(self, stream: StreamId, error: RequestError, *, rejected: bool = False) -> None:
        pending = self._pending.remove(stream)
        if pending is None:
            return
        if error.code is ErrorCode.RING_INCOMPLETE:
            self._break_off(pending)
        elif pending.record is not None:
            self.journal.dropped(pending.record)
        if error.code is ErrorCode.CANCELLED:
            self.counts.cancelled += 1
        else:
            self.counts.failed += 1
            (self.meter.rejected if rejected else self.meter.failed)[error.code] += 1
        self._send(pending.route, encode(ErrorReply.of(_named(error, pending.request))))

    def _refuse(self, route: Route, error: RequestError) -> None:
        self.counts.refused += 1
        self.meter.rejected[error.code] += 1
        self._send(route, encode(ErrorReply.of(error)))

    def _read_up_to(self, route: Route, request: AckRequest) -> None:
        stream = self._pending.find(route, request.id)
        pending = None if stream is None else self._pending.get(stream)
        # An answer that has ended meanwhile needs no word any more.
        if pending is not None:
            pending.read = max(pending.read, request.seq)

    def _cancel(self, route: Route, request_id: str) -> bool:
        stream = self._pending.find(route, request_id)
        pending = None if stream is None else self._pending.get(stream)
        if stream is None or pending is None:
            return False
        pending.cancelled = True
        if pending.answer is None:
            self._fail(stream, RequestError(ErrorCode.CANCELLED, "the client cancelled this request"))
        else:
            self._drop(stream, "the client cancelled this request")
        return True

    def _cancel_peer(self, connection: int, identity: bytes | None = None) -> None:
        """Let go of what a connection asked for, or of that only what came from this client over it."""
        for stream in self._pending.of_connection(connection, identity):
            if (pending := self._pending.remove(stream)) is not None:
                self._break_off(pending)
            self.counts.cancelled += 1
            self._drop(stream, "the client has gone")

    def _drop(self, stream: StreamId, reason: str) -> None:
        error = RequestError(ErrorCode.CANCELLED, reason)
        self._data.call(lambda: self._conductor.drop(stream, error))

    def _send(self, route: Route, data: bytes) -> None:
        self._outbox.send(route, data)

    # --- pieces -------------------------------------------------------------------------------------------

    def _offer_piece(self, stream: StreamId, pending: Pending) -> None:
        """Send what has become visible: at once, or a little later together with what follows."""
        if self._loop.time() - pending.piece_at >= PIECE_S:
            self._send_piece(stream, pending)
            return
        self._due.add(stream)
        if self._due_timer is None:
            self._due_timer = self._loop.call_later(PIECE_S, self._send_due)

    def _send_due(self) -> None:
        self._due_timer = None
        due, self._due = self._due, set()
        for stream in due:
            if (pending := self._pending.get(stream)) is not None:
                self._send_piece(stream, pending)

    def _send_piece(self, stream: StreamId, pending: Pending) -> None:
        if not pending.request.stream or pending.cancelled or pending.answer is None:
            return
        piece = pending.answer.piece()
        if piece is None:
            return
        pending.piece_at = self._loop.time()
        self._outbox.send(pending.route, encode_flat(piece), stream)
        unread = piece.seq - pending.read if pending.request.acks else 0
        if max(unread, self._outbox.waiting(pending.route, stream)) > MAX_PIECES:
            self._outbox.discard(pending.route, stream)
            text = f"the client has not read the last {MAX_PIECES} pieces of the answer: read them faster"
            self._fail(stream, RequestError(ErrorCode.SLOW_CLIENT, text))
            self._drop(stream, text)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._queue_wait_s / 4, self._recovery_s / 4))
            expire = partial(
                self._conductor.expire, self._queue_wait_s, self._recovery_s, tuple(self._missing())
            )
            self._data.call(expire)


def _failed(request_id: str | None = None) -> RequestError:
    """What a client is told of the exception that is being handled."""
    _log.exception("request_failed", message="a request could not be handled", request=request_id)
    return RequestError(ErrorCode.INTERNAL, "the head could not handle this request", request_id=request_id)


def _named(error: RequestError, request: GenerateRequest) -> RequestError:
    """The same error under the request's id."""
    return RequestError(error.code, error.message, request_id=request.id, retry_after_s=error.retry_after_s)
