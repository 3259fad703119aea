"""The client library: ask a ring for an answer, blocking or in an event loop.

    with Client() as client:
        print(client.generate("The sky is", max_tokens=32).text)
        print(client.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
        with client.stream("The sky is") as answer:
            for piece in answer:
                print(piece.text, end="", flush=True)

Any ZeroMQ REQ socket can do the same with one JSON frame each way, or a DEALER socket with pieces; this
library adds finding the head by mDNS, time limits, and noticing at once when the head dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from typing import Final, Self, TypeAlias, TypedDict, Unpack, cast

from pydantic import JsonValue, ValidationError

from cascadia_p2p.discovery.lookup import find_head, find_head_sync
from cascadia_p2p.errors import ErrorCode, RequestError, UnreachableError, UsageError, WireError
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import (
    CancelRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    StatusReply,
    StatusRequest,
    StreamPiece,
    decode_reply,
)
from cascadia_p2p.wire.model import Message, encode, explain

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatOptions",
    "Client",
    "GenerateReply",
    "Messages",
    "Options",
    "Prompt",
    "Stream",
    "StreamPiece",
]

FIND_S: Final = 5.0
"""Seconds that looking for the head by mDNS may take."""

CONNECT_S: Final = 3.0

Messages: TypeAlias = Sequence[Mapping[str, object]]
"""A conversation: objects with `role` and `content`; see `wire.client.ChatMessage`."""

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Options(TypedDict, total=False):
    """How tokens are chosen and an answer ends; see `wire.client.GenerateRequest`."""

    max_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: int | bool


class ChatOptions(Options, total=False):
    """The same, and what only conversations have."""

    tools: Sequence[Mapping[str, object]]
    reasoning_effort: float | str


def _request(
    prompt: Prompt | None, messages: Messages | None, options: ChatOptions, *, stream: bool = False
) -> GenerateRequest:
    fields: dict[str, object] = {**options, "stream": stream}
    if isinstance(prompt, str):
        fields["prompt"] = prompt
    elif prompt is not None:
        fields["token_ids"] = tuple(prompt)
    if messages is not None:
        fields["messages"] = [dict(message) for message in messages]
    if "tools" in options:
        fields["tools"] = [dict(tool) for tool in options["tools"]]
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = _listed(name, fields[name])
    if stream:
        # By it the answer can be cancelled.
        fields["id"] = secrets.token_hex(8)
    try:
        request = GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestError(ErrorCode.BAD_REQUEST, f"this can not be sent: {explain(error)}") from None
    try:
        encode(request)
    except (TypeError, ValueError):
        text = "this can not be sent: a text in it is no Unicode; was it read in another encoding?"
        raise RequestError(ErrorCode.BAD_REQUEST, text) from None
    return request


def _listed(name: str, value: object) -> tuple[object, ...]:
    """The items; a lone text would be taken for its characters."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(ErrorCode.BAD_REQUEST, f"this can not be sent: field '{name}' should be a list")
    return tuple(value)


def _next(data: bytes, seq: int) -> StreamPiece | GenerateReply:
    """The next of an answer's replies; pieces are numbered without a gap."""
    reply = decode_reply(data)
    if isinstance(reply, ErrorReply):
        raise reply.to_error()
    if not isinstance(reply, StreamPiece | GenerateReply):
        raise WireError("the head answered a prompt with something else than an answer")
    if reply.seq != seq:
        raise WireError(f"the head sent piece {reply.seq} of the answer where piece {seq} was due")
    return reply


def _answer(data: bytes) -> GenerateReply:
    reply = decode_reply(data)
    if isinstance(reply, ErrorReply):
        raise reply.to_error()
    if not isinstance(reply, GenerateReply):
        raise WireError("the head answered a prompt with something else than an answer")
    return reply


def _status(data: bytes) -> dict[str, JsonValue]:
    reply = decode_reply(data)
    if isinstance(reply, ErrorReply):
        raise reply.to_error()
    if not isinstance(reply, StatusReply):
        raise WireError("the head answered a status request with something else than its status")
    return reply.status


class Stream:
    """An answer as it comes: iterate over its pieces; closing it earlier cancels the request.

    Every call raises what those of `Client` raise. The time limit is that for one piece.
    """

    def __init__(self, pieces: Generator[StreamPiece, None, GenerateReply]) -> None:
        self._pieces = pieces
        self._reply: GenerateReply | None = None

    @property
    def reply(self) -> GenerateReply:
        """The whole answer, once all pieces were read.

        Raises:
            UsageError: it is not complete.
        """
        return _whole(self._reply)

    def close(self) -> None:
        """Ask for no more; the head stops generating."""
        self._pieces.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamPiece:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._reply = end.value or self._reply
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncStream:
    """The same in an event loop; leaving its `async with` block early cancels the request at once."""

    def __init__(self, pieces: AsyncGenerator[StreamPiece | GenerateReply, None]) -> None:
        self._pieces = pieces
        self._reply: GenerateReply | None = None

    @property
    def reply(self) -> GenerateReply:
        """The whole answer, once all pieces were read.

        Raises:
            UsageError: it is not complete.
        """
        return _whole(self._reply)

    async def aclose(self) -> None:
        """Ask for no more; the head stops generating."""
        await self._pieces.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamPiece:
        piece = await anext(self._pieces)
        if isinstance(piece, GenerateReply):
            self._reply = piece
            await self._pieces.aclose()
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _whole(reply: GenerateReply | None) -> GenerateReply:
    if reply is None:
        raise UsageError("the answer is not complete: read all its pieces first")
    return reply


class Client:
    """Blocking client; use it in one thread, as a context manager or with `close`.

    Args:
        endpoint: the head's client address (`Endpoint`, or text as in `tcp://192.168.1.20:7700`); found by
            mDNS when None, anew after the head was lost.
        fleet: whose head to look for.
        timeout_s: how long an answer may take, in seconds; None for as long as the head lives.

    All calls raise `UnreachableError` (nobody there, the head went away, time over) and `RequestError`
    (the head's own refusal; see `code`). None of them hangs when the head dies.
    """

    def __init__(
        self,
        endpoint: Endpoint | str | None = None,
        *,
        fleet: str = "cascadia",
        timeout_s: float | None = 600.0,
    ) -> None:
        self._given = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._connection: ClientConnection | None = None
        self._streaming = False

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> GenerateReply:
        """The continuation of `prompt` (text, or token ids), greedy unless a temperature is given."""
        return _answer(self._ask(_request(prompt, None, cast(ChatOptions, options))))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> GenerateReply:
        """The model's answer to a conversation."""
        return _answer(self._ask(_request(None, messages, options)))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """The answer to a prompt, or to a conversation, as it comes; it is asked for with the first piece.

        Nothing else can be asked before the answer is complete or closed.
        """
        return Stream(self._pieces(_request(prompt, messages, options, stream=True)))

    def status(self) -> dict[str, JsonValue]:
        """What the head knows of the ring."""
        return _status(self._ask(StatusRequest()))

    def close(self) -> None:
        """Hang up; the head cancels what it still does for this client."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, message: Message) -> bytes:
        connection = self._connected()
        try:
            return connection.request(encode(message), self._timeout_s)
        except BaseException:
            # A head that was found may be another one next time.
            self.close()
            raise

    def _pieces(self, request: GenerateRequest) -> Generator[StreamPiece, None, GenerateReply]:
        connection = self._connected()
        self._streaming = True
        over = False
        try:
            tag = connection.send(encode(request))
            for seq in itertools.count(1):
                reply = _next(connection.receive(tag, self._timeout_s), seq)
                if isinstance(reply, GenerateReply):
                    over = True
                    return reply
                yield reply
            raise AssertionError
        except RequestError:
            over = True
            raise
        except UnreachableError:
            # A head that was found may be another one next time.
            self.close()
            raise
        finally:
            self._streaming = False
            if not over:
                connection.hang_up()

    def _connected(self) -> ClientConnection:
        if self._streaming:
            raise UsageError("an answer is still coming: read it to its end, or close it first")
        if self._connection is None:
            endpoint = self._given or find_head_sync(self._fleet, timeout=FIND_S).clients[0]
            self._connection = ClientConnection(endpoint, connect_timeout_s=CONNECT_S)
        return self._connection


class AsyncClient:
    """The same in an event loop; any number of calls at a time.

    Args:
        endpoint: as for `Client`.
        fleet: as for `Client`.
        timeout_s: as for `Client`.
    """

    def __init__(
        self,
        endpoint: Endpoint | str | None = None,
        *,
        fleet: str = "cascadia",
        timeout_s: float | None = 600.0,
    ) -> None:
        self._given = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._connection: AsyncClientConnection | None = None
        self._finding = asyncio.Lock()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> GenerateReply:
        """The continuation of `prompt` (text, or token ids), greedy unless a temperature is given."""
        return _answer(await self._ask(_request(prompt, None, cast(ChatOptions, options))))

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> GenerateReply:
        """The model's answer to a conversation."""
        return _answer(await self._ask(_request(None, messages, options)))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """The answer to a prompt, or to a conversation, as it comes; it is asked for with the first piece."""
        return AsyncStream(self._pieces(_request(prompt, messages, options, stream=True)))

    async def status(self) -> dict[str, JsonValue]:
        """What the head knows of the ring."""
        return _status(await self._ask(StatusRequest()))

    async def close(self) -> None:
        """Hang up; the head cancels what it still does for this client."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _ask(self, message: Message) -> bytes:
        async with self._through_connection() as connection:
            return await connection.request(encode(message), self._timeout_s)

    async def _pieces(self, request: GenerateRequest) -> AsyncGenerator[StreamPiece | GenerateReply, None]:
        async with self._through_connection() as connection:
            exchange = await connection.exchange(encode(request))
            over = False
            try:
                for seq in itertools.count(1):
                    reply = _next(await exchange.receive(self._timeout_s), seq)
                    over = isinstance(reply, GenerateReply)
                    yield reply
                    if over:
                        return
            except RequestError:
                over = True
                raise
            finally:
                exchange.end(None if over else encode(CancelRequest(id=request.id or "")))

    @contextlib.asynccontextmanager
    async def _through_connection(self) -> AsyncIterator[AsyncClientConnection]:
        async with self._finding:
            if self._connection is None:
                endpoint = self._given or (await find_head(self._fleet, timeout=FIND_S)).clients[0]
                self._connection = AsyncClientConnection(endpoint, connect_timeout_s=CONNECT_S)
            connection = self._connection
        try:
            yield connection
        except UnreachableError:
            # A head that was found may be another one next time; the other calls fail with this one.
            if self._given is None and self._connection is connection:
                await self.close()
            raise
