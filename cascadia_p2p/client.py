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
import os
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypeAlias, TypedDict, Unpack, cast

from pydantic import JsonValue, ValidationError

from cascadia_p2p.discovery.interfaces import nearest
from cascadia_p2p.discovery.lookup import find_head, find_head_sync
from cascadia_p2p.errors import ErrorCode, RequestError, UnreachableError, UsageError, WireError
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.keys.places import find_client_key
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import (
    AckRequest,
    CancelRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    QueueNotice,
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
    "node_keys",
]

FIND_S: Final = 5.0
"""Seconds that looking for the head by mDNS may take."""

CONNECT_S: Final = 3.0

KEY_VARIABLE: Final = "CASCADIA_KEY"
"""Environment variable that names a key file."""
ACK_PIECES: Final = 64
"""Pieces after which the head is told that they were read; it allows 256 that were not."""

RETRY_S: Final = 1.0
"""Pause before a request is repeated where the head names none, in seconds."""

Queued: TypeAlias = Callable[[int], None]
"""Told the place of a request that waits: 1 is next."""

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
        # By it the answer can be cancelled, and read pieces be told.
        fields |= {"id": secrets.token_hex(8), "acks": True}
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


class _Flow:
    """One answer in pieces as its reader sees it: what comes, in order, and what is to be said back."""

    def __init__(self, request: GenerateRequest, on_queued: Queued | None) -> None:
        self._id = request.id or ""
        self._on_queued = on_queued
        self._seq = 0
        self.over = False
        """The head has said its last word."""

    def take(self, data: bytes) -> StreamPiece | GenerateReply | None:
        """What a reply brings; None for a word of the queue. Pieces are numbered without a gap."""
        reply = decode_reply(data)
        if isinstance(reply, QueueNotice):
            if self._on_queued is not None:
                self._on_queued(reply.queued)
            return None
        if isinstance(reply, ErrorReply):
            self.over = True
            raise reply.to_error()
        if not isinstance(reply, StreamPiece | GenerateReply):
            raise WireError("the head answered a prompt with something else than an answer")
        self._seq += 1
        if reply.seq != self._seq:
            raise WireError(f"the head sent piece {reply.seq} of the answer where piece {self._seq} was due")
        self.over = isinstance(reply, GenerateReply)
        return reply

    def word(self) -> bytes | None:
        """To be sent once the piece was read: every so often the head must know of it."""
        return None if self._seq % ACK_PIECES else encode(AckRequest(id=self._id, seq=self._seq))

    def cancel(self) -> bytes:
        """To be sent when no more is wanted."""
        return encode(CancelRequest(id=self._id))

    def begun(self) -> bool:
        """Whether a piece has come."""
        return self._seq > 0


class _Patience:
    """How often a request that the head has no room for is asked again: as long as its time allows.

    Args:
        timeout_s: seconds; None for ever.
        retry: False asks once.
    """

    def __init__(self, timeout_s: float | None, *, retry: bool) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._retry = retry

    @property
    def left_s(self) -> float | None:
        """Seconds that are left."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause_s(self, error: RequestError) -> float:
        """Seconds to wait before the next try; raises the error when there is none."""
        if error.code is not ErrorCode.OVERLOADED or not self._retry:
            raise error
        # All who were sent away together must not come back together.
        pause = (error.retry_after_s or RETRY_S) * random.uniform(1.0, 1.3)
        if self._end is not None and time.monotonic() + pause >= self._end:
            raise error
        return pause


def _find_s(timeout_s: float | None) -> float:
    """Seconds that looking for the head may take where an answer may take so long."""
    return FIND_S if timeout_s is None else min(FIND_S, timeout_s)


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


def _find_key(fleet: str, key: str | Path | None) -> KeyFile | None:
    named = key or os.environ.get(KEY_VARIABLE) or None
    return find_client_key(fleet, key=None if named is None else Path(named).expanduser())


def _keys_for(endpoint: Endpoint, fleet: str, key: str | Path | None) -> Keys | None:
    """What to prove oneself with to a head there; on its own machine it is served in the clear."""
    found = None if endpoint.loopback else _find_key(fleet, key)
    return None if found is None else Keys(found.pair, found.server)


def node_keys(fleet: str, key: str | Path | None = None) -> Keys | None:
    """What opens the nodes' control ports: the fleet's own key, not a client's; None without it.

    Args:
        fleet: the fleet's name.
        key: as for `Client`.

    Raises:
        UsageError: the key file can not be used.
    """
    found = _find_key(fleet, key)
    return None if found is None or found.client is not None else Keys(found.pair, found.server)


class Client:
    """Blocking client; use it in one thread, as a context manager or with `close`.

    Args:
        endpoint: the head's client address (`Endpoint`, or text as in `tcp://192.168.1.20:7700`); found by
            mDNS when None, anew after the head was lost.
        fleet: whose head to look for.
        timeout_s: how long an answer may take, in seconds; None for as long as the head lives.
        key: file of the key that the fleet admits; by default the one that `CASCADIA_KEY` names, else
            `keys/FLEET.client.key` or `keys/FLEET.key` in the user's configuration directory. Not needed
            on the head's own machine.
        retry: ask again, within the time limit, when the head has no room for the request (`overloaded`).

    All calls raise `UnreachableError` (nobody there, the head went away, time over) and `RequestError`
    (the head's own refusal; see `code`). None of them hangs when the head dies.
    """

    def __init__(
        self,
        endpoint: Endpoint | str | None = None,
        *,
        fleet: str = "cascadia",
        timeout_s: float | None = 600.0,
        key: str | Path | None = None,
        retry: bool = True,
    ) -> None:
        self._key = key
        self._given = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._retry = retry
        self._connection: ClientConnection | None = None
        self._streaming = False

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> GenerateReply:
        """The continuation of `prompt` (text, or token ids), greedy unless a temperature is given."""
        return self._answer(_request(prompt, None, cast(ChatOptions, options)))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> GenerateReply:
        """The model's answer to a conversation."""
        return self._answer(_request(None, messages, options))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        on_queued: Queued | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """The answer to a prompt, or to a conversation, as it comes; it is asked for with the first piece.

        Nothing else can be asked before the answer is complete or closed. `on_queued` hears the request's
        place while it waits.
        """
        return Stream(self._pieces(_request(prompt, messages, options, stream=True), on_queued))

    def status(self) -> dict[str, JsonValue]:
        """What the head knows of the ring."""
        return _status(self._ask(StatusRequest(), self._timeout_s))

    def close(self) -> None:
        """Hang up; the head cancels what it still does for this client."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answer(self, request: GenerateRequest) -> GenerateReply:
        patience = _Patience(self._timeout_s, retry=self._retry)
        while True:
            try:
                return _answer(self._ask(request, patience.left_s))
            except RequestError as error:
                time.sleep(patience.pause_s(error))

    def _ask(self, message: Message, timeout_s: float | None) -> bytes:
        connection = self._connected()
        try:
            return connection.request(encode(message), timeout_s)
        except BaseException:
            # A head that was found may be another one next time.
            self.close()
            raise

    def _pieces(
        self, request: GenerateRequest, on_queued: Queued | None
    ) -> Generator[StreamPiece, None, GenerateReply]:
        patience = _Patience(self._timeout_s, retry=self._retry)
        while True:
            flow = _Flow(request, on_queued)
            try:
                return (yield from self._flow(flow, request))
            except RequestError as error:
                if flow.begun():
                    raise
                time.sleep(patience.pause_s(error))

    def _flow(self, flow: _Flow, request: GenerateRequest) -> Generator[StreamPiece, None, GenerateReply]:
        connection = self._connected()
        self._streaming = True
        try:
            tag = connection.send(encode(request))
            while True:
                reply = flow.take(connection.receive(tag, self._timeout_s))
                if isinstance(reply, GenerateReply):
                    return reply
                if reply is not None:
                    yield reply
                    if (word := flow.word()) is not None:
                        connection.post(word)
        except UnreachableError:
            # A head that was found may be another one next time.
            self.close()
            raise
        finally:
            self._streaming = False
            if not flow.over:
                connection.hang_up()

    def _connected(self) -> ClientConnection:
        if self._streaming:
            raise UsageError("an answer is still coming: read it to its end, or close it first")
        if self._connection is None:
            endpoint = self._given or nearest(
                find_head_sync(self._fleet, timeout=_find_s(self._timeout_s)).clients[0]
            )
            keys = _keys_for(endpoint, self._fleet, self._key)
            self._connection = ClientConnection(endpoint, connect_timeout_s=CONNECT_S, keys=keys)
        return self._connection


class AsyncClient:
    """The same in an event loop; any number of calls at a time.

    Args:
        endpoint: as for `Client`.
        fleet: as for `Client`.
        timeout_s: as for `Client`.
        key: as for `Client`.
        retry: as for `Client`.
    """

    def __init__(
        self,
        endpoint: Endpoint | str | None = None,
        *,
        fleet: str = "cascadia",
        timeout_s: float | None = 600.0,
        key: str | Path | None = None,
        retry: bool = True,
    ) -> None:
        self._key = key
        self._given = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._retry = retry
        self._connection: AsyncClientConnection | None = None
        self._finding = asyncio.Lock()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> GenerateReply:
        """The continuation of `prompt` (text, or token ids), greedy unless a temperature is given."""
        return await self._answer(_request(prompt, None, cast(ChatOptions, options)))

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> GenerateReply:
        """The model's answer to a conversation."""
        return await self._answer(_request(None, messages, options))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        on_queued: Queued | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """As of `Client`, beside others."""
        return AsyncStream(self._pieces(_request(prompt, messages, options, stream=True), on_queued))

    async def status(self) -> dict[str, JsonValue]:
        """What the head knows of the ring."""
        return _status(await self._ask(StatusRequest(), self._timeout_s))

    async def close(self) -> None:
        """Hang up; the head cancels what it still does for this client."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _answer(self, request: GenerateRequest) -> GenerateReply:
        patience = _Patience(self._timeout_s, retry=self._retry)
        while True:
            try:
                return _answer(await self._ask(request, patience.left_s))
            except RequestError as error:
                await asyncio.sleep(patience.pause_s(error))

    async def _ask(self, message: Message, timeout_s: float | None) -> bytes:
        async with self._through_connection() as connection:
            return await connection.request(encode(message), timeout_s)

    async def _pieces(
        self, request: GenerateRequest, on_queued: Queued | None
    ) -> AsyncGenerator[StreamPiece | GenerateReply, None]:
        patience = _Patience(self._timeout_s, retry=self._retry)
        while True:
            flow = _Flow(request, on_queued)
            try:
                async with contextlib.aclosing(self._flow(flow, request)) as replies:
                    async for reply in replies:
                        yield reply
                return
            except RequestError as error:
                if flow.begun():
                    raise
                await asyncio.sleep(patience.pause_s(error))

    async def _flow(
        self, flow: _Flow, request: GenerateRequest
    ) -> AsyncGenerator[StreamPiece | GenerateReply, None]:
        async with self._through_connection() as connection:
            exchange = await connection.exchange(encode(request))
            try:
                while not flow.over:
                    reply = flow.take(await exchange.receive(self._timeout_s))
                    if reply is not None:
                        yield reply
                        if not flow.over and (word := flow.word()) is not None:
                            exchange.post(word)
            finally:
                exchange.end(None if flow.over else flow.cancel())

    @contextlib.asynccontextmanager
    async def _through_connection(self) -> AsyncIterator[AsyncClientConnection]:
        async with self._finding:
            if self._connection is None:
                endpoint = self._given or nearest(
                    (await find_head(self._fleet, timeout=_find_s(self._timeout_s))).clients[0]
                )
                keys = _keys_for(endpoint, self._fleet, self._key)
                self._connection = AsyncClientConnection(endpoint, connect_timeout_s=CONNECT_S, keys=keys)
            connection = self._connection
        try:
            yield connection
        except UnreachableError:
            # A head that was found may be another one next time; the other calls fail with this one.
            if self._given is None and self._connection is connection:
                await self.close()
            raise
