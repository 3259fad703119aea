"""The head's door for clients: requests in, exactly one final reply out for each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import structlog
from pydantic import JsonValue

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node.answers import AnswerDesk
from cascadia_p2p.node.conductor import HeadConductor, ring_incomplete
from cascadia_p2p.ring.scheduler import Update
from cascadia_p2p.transport.client_server import ClientCall, ClientFault, ClientGone, ClientServer, Route
from cascadia_p2p.transport.looping import Delivery, SocketClosedError
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.messages import (
    CancelReply,
    CancelRequest,
    ErrorReply,
    GenerateRequest,
    StatusReply,
    StatusRequest,
    decode_request,
    encode,
)

_log = structlog.get_logger()

StatusBody: TypeAlias = dict[str, JsonValue]


class DataCaller(Protocol):
    """Runs a function in the data thread, soon."""

    def call(self, function: Callable[[], None]) -> None:
        """Hand `function` over; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that has no final reply yet."""

    route: Route
    request: GenerateRequest


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
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._server = server
        self._desk = desk
        self._conductor = conductor
        self._data = data
        self._status = status
        self._missing = missing
        self._queue_wait_s = queue_wait_s
        self._watch = watch
        self._numbers = itertools.count(1)
        self._pending: dict[StreamId, _Pending] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self.counts = HeadCounts()

    @property
    def pending(self) -> int:
        """Requests without their final reply."""
        return len(self._pending)

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
        error = ring_incomplete(reason, self._missing())
        for stream in list(self._pending):
            self._data.call(lambda stream=stream: self._conductor.drop(stream, error))  # type: ignore[misc]
            self._fail(stream, error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()

    def deliver(self, updates: Sequence[Update]) -> None:
        """Take what happened to streams; in the event loop."""
        for update in updates:
            pending = self._pending.get(update.stream.request.stream)
            if pending is None or not update.terminal:
                continue
            if update.error is not None:
                self._fail(update.stream.request.stream, update.error)
            elif update.finish is not None:
                del self._pending[update.stream.request.stream]
                reply = self._desk.reply(pending.request, update.stream, update.finish)
                self.counts.finished += 1
                self.counts.prompt_tokens += reply.usage.prompt_tokens
                self.counts.completion_tokens += reply.usage.completion_tokens
                self._send(pending.route, encode(reply))

    # --- inside -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        with contextlib.suppress(SocketClosedError):
            while True:
                event = await self._server.receive()
                match event:
                    case ClientCall():
                        self._take(event.route, event.data)
                    case ClientFault():
                        self._refuse(event.route, RequestError(ErrorCode.BAD_REQUEST, event.reason))
                    case ClientGone():
                        self._cancel_connection(event.connection)

    def _take(self, route: Route, data: bytes) -> None:
        try:
            request = decode_request(data)
            match request:
                case GenerateRequest():
                    self._generate(route, request)
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

    def _generate(self, route: Route, request: GenerateRequest) -> None:
        if request.id is not None and self._find(route, request.id) is not None:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                f"field 'id': '{request.id}' is still being answered on this connection: choose another",
                request_id=request.id,
            )
        stream = StreamId(next(self._numbers))
        accepted = self._desk.accept(request, stream)
        self._pending[stream] = _Pending(route, request)
        self.counts.accepted += 1
        self._data.call(lambda: self._conductor.submit(accepted, self._refused))

    def _refused(self, stream: StreamId, error: RequestError) -> None:
        """The scheduler has no place for a stream; called in the data thread."""
        self._loop.call_soon_threadsafe(self._fail, stream, error)

    def _fail(self, stream: StreamId, error: RequestError) -> None:
        pending = self._pending.pop(stream, None)
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

    def _find(self, route: Route, request_id: str) -> StreamId | None:
        for stream, pending in self._pending.items():
            same = pending.route.connection == route.connection and pending.route.identity == route.identity
            if same and pending.request.id == request_id:
                return stream
        return None

    def _cancel(self, route: Route, request_id: str) -> bool:
        stream = self._find(route, request_id)
        if stream is None:
            return False
        self._drop(stream, "the client cancelled this request")
        return True

    def _cancel_connection(self, connection: int) -> None:
        for stream, pending in list(self._pending.items()):
            if pending.route.connection == connection:
                del self._pending[stream]
                self.counts.cancelled += 1
                self._drop(stream, "the client has gone")

    def _drop(self, stream: StreamId, reason: str) -> None:
        error = RequestError(ErrorCode.CANCELLED, reason)
        self._data.call(lambda: self._conductor.drop(stream, error))

    def _send(self, route: Route, data: bytes) -> None:
        if self._server.reply(route, data) is Delivery.GONE:
            self._cancel_connection(route.connection)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._queue_wait_s / 4))
            missing = tuple(self._missing())

            def reason(waited: float, missing: tuple[int, ...] = missing) -> RequestError:
                if missing:
                    return ring_incomplete(f"the request waited {waited:.0f} s", missing)
                text = f"the request waited {waited:.0f} s for a free slot: try again later"
                return RequestError(ErrorCode.OVERLOADED, text, retry_after_s=self._queue_wait_s)

            self._data.call(lambda reason=reason: self._conductor.expire(self._queue_wait_s, reason))  # type: ignore[misc]
