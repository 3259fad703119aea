"""The head's door for clients: requests in, exactly one final reply out for each, pieces of it before."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeAlias

import structlog
from pydantic import JsonValue

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node.answers import Answer, AnswerDesk
from cascadia_p2p.node.conductor import HeadConductor, ring_incomplete
from cascadia_p2p.node.finished import Finished, FinishedAnswers
from cascadia_p2p.node.outbox import Outbox
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
    QueueNotice,
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

PLACE_S: Final = 0.05
"""From a request to the first word of its place in the queue, if it still waits then."""

PLACES_S: Final = 1.0
"""Least time between two words of a place."""

AGAIN_S: Final = 0.5
"""When to ask again where a head leaves, in seconds."""

_log = structlog.get_logger()

StatusBody: TypeAlias = dict[str, JsonValue]


class DataCaller(Protocol):
    """Runs a function in the data thread, soon."""

    def call(self, function: Callable[[], None]) -> None:
        """Hand `function` over; from any thread."""
        ...


@dataclass(slots=True)
class _Pending:
    """A request that has no final reply yet.

    Args:
        route: the way back.
        request: what was asked.
        answer: None while the prompt is still being read.
        positions: of its stream at most, prompt and answer; 0 while the prompt is still being read.
        piece_at: when its last piece was sent.
        read: number of the last piece that its client has read, as far as it tells.
        place: the last that was told of its place in the queue.
        cancelled: its client wants no more pieces.
    """

    route: Route
    request: GenerateRequest
    answer: Answer | None = None
    positions: int = 0
    piece_at: float = float("-inf")
    read: int = 0
    place: int | None = None
    cancelled: bool = False


@dataclass(slots=True)
class HeadCounts:
    """What the door has seen since it opened."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


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
        self._numbers = itertools.count(1)
        self._pending: dict[StreamId, _Pending] = {}
        self._named: dict[tuple[int, bytes, str], StreamId] = {}
        self._of_connection: defaultdict[int, set[StreamId]] = defaultdict(set)
        self._place_timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(server, self._cancel_connection)
        self._due: set[StreamId] = set()
        self._due_timer: asyncio.TimerHandle | None = None
        self._draining: RequestError | None = None
        self._keyed: dict[str, StreamId] = {}
        self._finished = FinishedAnswers()
        self.counts = HeadCounts()

    @property
    def pending(self) -> int:
        """Requests without their final reply."""
        return len(self._pending)

    def needs(self, promise: Promise) -> tuple[int, int]:
        """What the requests that have no final reply need of the `promise` of their ring: slots, context."""
        longest = max((pending.positions for pending in self._pending.values()), default=0)
        return min(len(self._pending), promise.slots), min(longest, promise.context)

    def interrupted(self, reason: str) -> None:
        """The ring is lost: tell those who read their answers as they come that there is a pause."""
        for stream, pending in list(self._pending.items()):
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
        for stream in list(self._pending):
            self._data.call(lambda stream=stream: self._conductor.drop(stream, error))  # type: ignore[misc]
            self._fail(stream, error)
        for task in (*self._tasks, *self._reading):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._reading, return_exceptions=True)
        if self._due_timer is not None:
            self._due_timer.cancel()
        if self._place_timer is not None:
            self._place_timer.cancel()
        self._outbox.close()
        self._server.close()

    def expel(self) -> None:
        """End the connections of clients whose key was withdrawn."""
        self._server.expel()

    def deliver(self, updates: Sequence[Update]) -> None:
        """Take what happened to streams; in the event loop."""
        for update in updates:
            stream = update.stream.request.stream
            pending = self._pending.get(stream)
            if pending is None or pending.answer is None:
                continue
            pending.answer.take(update.tokens, update.scores)
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
                        self._cancel_connection(event.connection)

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
                    self._generate(route, request, one_reply=call.one_reply)
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
            _log.exception("request_failed", message="a request could not be handled")
            self._refuse(route, RequestError(ErrorCode.INTERNAL, "the head could not handle this request"))

    def _generate(self, route: Route, request: GenerateRequest, *, one_reply: bool) -> None:
        if self._draining is not None:
            raise RequestError(
                self._draining.code, self._draining.message, request_id=request.id, retry_after_s=AGAIN_S
            )
        if request.id is not None and self._find(route, request.id) is not None:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                f"field 'id': '{request.id}' is still being answered on this connection: choose another",
                request_id=request.id,
            )
        if request.stream and one_reply:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                "field 'stream': a REQ socket takes one reply a request: use a DEALER socket, or send false",
                request_id=request.id,
            )
        stream = StreamId(next(self._numbers))
        pending = _Pending(route, request)
        if self._desk.is_long(request):
            self._add(stream, pending)
            task = asyncio.create_task(self._read(stream, pending), name="prompt")
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
            return
        accepted, pending.answer = self._desk.accept(request, stream)
        self._add(stream, pending)
        self._submit(accepted, pending)

    async def _read(self, stream: StreamId, pending: _Pending) -> None:
        """Accept a request whose prompt takes long to be turned into ids."""
        try:
            accepted, answer = await asyncio.to_thread(self._desk.accept, pending.request, stream)
        except RequestError as error:
            failure = error
        except Exception:
            _log.exception("request_failed", message="a request could not be handled")
            failure = RequestError(
                ErrorCode.INTERNAL, "the head could not handle this request", request_id=pending.request.id
            )
        else:
            # Its client may have gone meanwhile.
            if stream in self._pending:
                pending.answer = answer
                self._submit(accepted, pending)
            return
        if self._remove(stream) is not None:
            self._refuse(pending.route, failure)

    def _resume(self, accepted: StreamRequest, pending: _Pending) -> bool:
        """Take up what was asked before under the same key; whether the answer is complete already."""
        key, answer, held = pending.request.key, pending.answer, accepted.held
        if answer is None:
            return False
        if key is not None:
            before = self._keyed.get(key)
            if before is not None and before != accepted.stream and self._remove(before) is not None:
                self._drop(before, "the request was asked again")
            self._keyed[key] = accepted.stream
            done = self._finished.find(key, accepted.prompt, held, self._loop.time())
            if done is not None:
                answer.take(done.stream.ids[len(accepted.prompt) + len(held) :])
                self._finish(pending, answer, replace(done.stream, request=accepted), done.finish)
                return True
        stopped = answer.stopped or (held and held[-1] in accepted.stop_ids)
        if not stopped and len(held) < accepted.max_tokens:
            return False
        stream = Stream(accepted, [*accepted.prompt, *held], submitted_at=self._loop.time())
        self._finish(pending, answer, stream, FinishReason.STOP if stopped else FinishReason.LENGTH)
        return True

    def _submit(self, accepted: StreamRequest, pending: _Pending) -> None:
        if self._resume(accepted, pending):
            return
        self.counts.accepted += 1
        pending.positions = len(accepted.prompt) + accepted.max_tokens
        self._ask_places(PLACE_S)
        self._data.call(lambda: self._conductor.submit(accepted, self._refused))

    def _refused(self, stream: StreamId, error: RequestError) -> None:
        """The scheduler has no place for a stream; called in the data thread."""
        self._loop.call_soon_threadsafe(self._fail, stream, error)

    def _finish(self, pending: _Pending, answer: Answer, stream: Stream, finish: FinishReason) -> None:
        self._remove(stream.request.stream)
        piece = answer.finish()
        if piece is not None and pending.request.stream:
            self._outbox.send(pending.route, encode_flat(piece))
        reply = answer.reply(stream, finish)
        if (key := pending.request.key) is not None:
            self._finished.keep(key, Finished(stream, finish), self._loop.time())
        self.counts.finished += 1
        self.counts.prompt_tokens += reply.usage.prompt_tokens
        self.counts.completion_tokens += reply.usage.completion_tokens
        self._send(pending.route, encode(reply))

    def _fail(self, stream: StreamId, error: RequestError) -> None:
        pending = self._remove(stream)
        if pending is None:
            return
        if error.code is ErrorCode.CANCELLED:
            self.counts.cancelled += 1
        else:
            self.counts.failed += 1
        named = RequestError(
            error.code, error.message, request_id=pending.request.id, retry_after_s=error.retry_after_s
        )
        self._send(pending.route, encode(ErrorReply.of(named)))

    def _refuse(self, route: Route, error: RequestError) -> None:
        self.counts.refused += 1
        self._send(route, encode(ErrorReply.of(error)))

    def _add(self, stream: StreamId, pending: _Pending) -> None:
        self._pending[stream] = pending
        self._of_connection[pending.route.connection].add(stream)
        if (name := _name(pending)) is not None:
            self._named[name] = stream

    def _remove(self, stream: StreamId) -> _Pending | None:
        pending = self._pending.pop(stream, None)
        if pending is None:
            return None
        if (key := pending.request.key) is not None and self._keyed.get(key) == stream:
            del self._keyed[key]
        connection = pending.route.connection
        self._of_connection[connection].discard(stream)
        if not self._of_connection[connection]:
            del self._of_connection[connection]
        if (name := _name(pending)) is not None:
            del self._named[name]
        return pending

    def _find(self, route: Route, request_id: str) -> StreamId | None:
        return self._named.get((route.connection, route.identity, request_id))

    def _read_up_to(self, route: Route, request: AckRequest) -> None:
        stream = self._find(route, request.id)
        # An answer that has ended meanwhile needs no word any more.
        if stream is not None:
            pending = self._pending[stream]
            pending.read = max(pending.read, request.seq)

    def _cancel(self, route: Route, request_id: str) -> bool:
        stream = self._find(route, request_id)
        if stream is None:
            return False
        pending = self._pending[stream]
        pending.cancelled = True
        if pending.answer is None:
            self._fail(stream, RequestError(ErrorCode.CANCELLED, "the client cancelled this request"))
        else:
            self._drop(stream, "the client cancelled this request")
        return True

    def _cancel_connection(self, connection: int) -> None:
        self._outbox.forget(connection)
        for stream in list(self._of_connection.get(connection, ())):
            self._remove(stream)
            self.counts.cancelled += 1
            self._drop(stream, "the client has gone")

    def _drop(self, stream: StreamId, reason: str) -> None:
        error = RequestError(ErrorCode.CANCELLED, reason)
        self._data.call(lambda: self._conductor.drop(stream, error))

    def _send(self, route: Route, data: bytes) -> None:
        self._outbox.send(route, data)

    # --- pieces -------------------------------------------------------------------------------------------

    def _offer_piece(self, stream: StreamId, pending: _Pending) -> None:
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

    def _send_piece(self, stream: StreamId, pending: _Pending) -> None:
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

    # --- the queue ----------------------------------------------------------------------------------------

    def _ask_places(self, after_s: float) -> None:
        """Soon ask the scheduler who waits, for those who read as they come."""
        if self._place_timer is None:
            self._place_timer = self._loop.call_later(after_s, self._look_at_queue)

    def _look_at_queue(self) -> None:
        self._place_timer = None
        self._data.call(lambda: self._conductor.tell_places(self._hear_places))

    def _hear_places(self, waiting: Sequence[StreamId]) -> None:
        """Called in the data thread."""
        if waiting:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell_places, waiting)

    def _tell_places(self, waiting: Sequence[StreamId]) -> None:
        """Tell who waits his place, where it has changed and the last word of it was taken."""
        for place, stream in enumerate(waiting, 1):
            pending = self._pending.get(stream)
            if pending is None or not pending.request.stream or pending.cancelled or pending.place == place:
                continue
            if not self._outbox.blocked(pending.route):
                pending.place = place
                self._send(pending.route, encode(QueueNotice(id=pending.request.id, queued=place)))
        self._ask_places(PLACES_S)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._queue_wait_s / 4, self._recovery_s / 4))
            expire = partial(
                self._conductor.expire, self._queue_wait_s, self._recovery_s, tuple(self._missing())
            )
            self._data.call(expire)


def _name(pending: _Pending) -> tuple[int, bytes, str] | None:
    """By what its client can speak of a request."""
    route, request_id = pending.route, pending.request.id
    return None if request_id is None else (route.connection, route.identity, request_id)
