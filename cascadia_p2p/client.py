"""The client library: ask a ring for an answer, blocking or in an event loop.

    with Client() as client:
        print(client.generate("The sky is", max_tokens=32).text)
        print(client.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
        with client.stream("The sky is") as answer:
            for piece in answer:
                print(piece.text, end="", flush=True)

Any ZeroMQ REQ socket can do the same with one JSON frame each way, or a DEALER socket with pieces; this
library adds finding the head by mDNS, time limits, and going on with an answer when its head is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from pathlib import Path
from typing import Final, Self, Unpack, cast

from pydantic import JsonValue

from cascadia_p2p.asking import (
    ChatOptions,
    Flow,
    Messages,
    Noticed,
    Options,
    Patience,
    Prompt,
    Queued,
    make_cancel,
    make_request,
    pass_on,
    read_answer,
    read_status,
    unnumbered,
)
from cascadia_p2p.discovery.lookup import find_head
from cascadia_p2p.errors import (
    HeadLostError,
    LateReplyError,
    NotAdmittedError,
    RequestError,
    UnreachableError,
    UsageError,
    WrongAddressError,
)
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.keys.places import find_client_key, named_key
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.transport.network import uninterrupted
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import (
    GenerateReply,
    GenerateRequest,
    StatusRequest,
    StreamPiece,
)
from cascadia_p2p.wire.model import Message, encode

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

MAX_WRONG: Final = 64
"""Addresses that are announced as the head's and are not, after which no other is tried."""

KEY_VARIABLE: Final = "CASCADIA_KEY"
"""Environment variable that names a key file."""


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
    return find_client_key(fleet, key=None if named is None else named_key(named))


def _keys_for(endpoint: Endpoint, fleet: str, key: str | Path | None) -> Keys | None:
    """What to prove oneself with to a head there; on its own machine it is served in the clear."""
    found = None if endpoint.loopback else _find_key(fleet, key)
    return None if found is None else Keys(found.pair, found.server)


class _Heads:
    """Looks for the head by mDNS, and remembers what was announced as one and is none."""

    def __init__(self, fleet: str, timeout_s: float | None) -> None:
        self._fleet = fleet
        self._find_s = FIND_S if timeout_s is None else min(FIND_S, timeout_s)
        self._wrong: dict[Endpoint, UnreachableError] = {}

    async def find(self) -> Endpoint:
        """Where a head listens; raises `UnreachableError`."""
        try:
            return await find_head(self._fleet, timeout=self._find_s, besides=self._wrong)
        except UnreachableError:
            if self._wrong:
                # What was wrong with the one that there is says more than that there is no other.
                raise self._wrong.popitem()[1] from None
            raise

    def failed(self, endpoint: Endpoint, error: UnreachableError) -> UnreachableError:
        """The error to raise for what came of a connection to an address that was found."""
        if (
            isinstance(error, HeadLostError | LateReplyError | NotAdmittedError)
            or len(self._wrong) >= MAX_WRONG
        ):
            return error
        self._wrong[endpoint] = error
        return WrongAddressError(str(error))


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
        retry: ask again, within the time limit, when the head has no room for the request (`overloaded`),
            and for half a minute when it was lost: another one, or the same once it is back, goes on with
            the answer where it broke off; with `logprobs` only one that knows those of what has come.

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
        self._heads = _Heads(fleet, timeout_s)
        self._connection: ClientConnection | None = None
        self._streaming = False

    def generate(
        self,
        prompt: Prompt,
        *,
        on_queued: Queued | None = None,
        on_notice: Noticed | None = None,
        **options: Unpack[Options],
    ) -> GenerateReply:
        """The continuation of `prompt` (text, or token ids), greedy unless a temperature is given.

        `on_queued` and `on_notice` hear what pieces would tell while it waits: its place, and why an answer
        pauses; nothing where `logprobs` are asked for.
        """
        request = make_request(prompt, None, cast(ChatOptions, options))
        return self._answer(request, on_queued, on_notice)

    def chat(
        self,
        messages: Messages,
        *,
        on_queued: Queued | None = None,
        on_notice: Noticed | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerateReply:
        """The model's answer to a conversation."""
        return self._answer(make_request(None, messages, options), on_queued, on_notice)

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
        return Stream(self._pieces(make_request(prompt, messages, options, stream=True), on_queued))

    def status(self) -> dict[str, JsonValue]:
        """What the head knows of the ring."""
        return read_status(self._ask(StatusRequest(), self._timeout_s))

    def close(self) -> None:
        """Hang up; the head cancels what it still does for this client."""
        with uninterrupted():
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answer(
        self, request: GenerateRequest, on_queued: Queued | None, on_notice: Noticed | None
    ) -> GenerateReply:
        if request.stream:
            pieces = self._pieces(request, on_queued, whole=True)
            while True:
                try:
                    pass_on(next(pieces), on_notice)
                except StopIteration as end:
                    return unnumbered(end.value)
        patience = Patience(self._timeout_s, retry=self._retry, whole=True)
        while True:
            patience.asked()
            try:
                return read_answer(self._ask(request, patience.left_s))
            except RequestError as error:
                time.sleep(patience.pause_s(error))
            except UnreachableError as error:
                time.sleep(patience.return_s(error))

    def _ask(self, message: Message, timeout_s: float | None) -> bytes:
        connection = self._connected()
        try:
            return connection.request(encode(message), timeout_s)
        except BaseException as error:
            # A head that was found may be another one next time.
            self.close()
            if self._given is None and isinstance(error, UnreachableError):
                raise self._heads.failed(connection.endpoint, error) from error
            raise

    def _pieces(
        self, request: GenerateRequest, on_queued: Queued | None, *, whole: bool = False
    ) -> Generator[StreamPiece, None, GenerateReply]:
        patience = Patience(self._timeout_s, retry=self._retry, whole=whole)
        flow = Flow(request, on_queued)
        while True:
            try:
                return (yield from self._flow(flow, patience))
            except RequestError as error:
                time.sleep(patience.pause_s(error))
            except UnreachableError as error:
                pause_s = patience.return_s(error, flow.place)
                if (piece := flow.paused(error)) is not None:
                    yield piece
                time.sleep(pause_s)
            flow = flow.again()

    def _flow(self, flow: Flow, patience: Patience) -> Generator[StreamPiece, None, GenerateReply]:
        connection = self._connected()
        self._streaming = True
        try:
            if hold_back_s := patience.hold_back_s:
                connection.open()
                time.sleep(hold_back_s)
            tag = connection.send(encode(flow.request))
            patience.asked()
            while True:
                reply = flow.take(connection.receive(tag, patience.reply_s, patience.limit_s))
                patience.heard(reply)
                if isinstance(reply, GenerateReply):
                    return reply
                if reply is not None:
                    yield reply
                    if (word := flow.word()) is not None:
                        connection.post(word)
        except UnreachableError as error:
            # A head that was found may be another one next time.
            self.close()
            if self._given is None:
                raise self._heads.failed(connection.endpoint, error) from error
            raise
        finally:
            self._streaming = False
            if not flow.over:
                connection.hang_up()

    def _connected(self) -> ClientConnection:
        if self._streaming:
            raise UsageError("an answer is still coming: read it to its end, or close it first")
        if self._connection is None:
            endpoint = self._given or asyncio.run(self._heads.find())
            keys = _keys_for(endpoint, self._fleet, self._key)
            with uninterrupted():
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
        self._heads = _Heads(fleet, timeout_s)
        self._connection: AsyncClientConnection | None = None
        self._finding = asyncio.Lock()
        self._closings = 0

    async def generate(
        self,
        prompt: Prompt,
        *,
        on_queued: Queued | None = None,
        on_notice: Noticed | None = None,
        **options: Unpack[Options],
    ) -> GenerateReply:
        """The continuation of `prompt` (text, or token ids), greedy unless a temperature is given."""
        request = make_request(prompt, None, cast(ChatOptions, options))
        return await self._answer(request, on_queued, on_notice)

    async def chat(
        self,
        messages: Messages,
        *,
        on_queued: Queued | None = None,
        on_notice: Noticed | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerateReply:
        """The model's answer to a conversation."""
        return await self._answer(make_request(None, messages, options), on_queued, on_notice)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        on_queued: Queued | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """As of `Client`, beside others."""
        return AsyncStream(self._pieces(make_request(prompt, messages, options, stream=True), on_queued))

    async def status(self) -> dict[str, JsonValue]:
        """What the head knows of the ring."""
        return read_status(await self._ask(StatusRequest(), self._timeout_s))

    async def close(self) -> None:
        """Hang up; the head cancels what it still does for this client, and calls that wait fail."""
        self._closings += 1
        await self._hang_up()

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _answer(
        self, request: GenerateRequest, on_queued: Queued | None, on_notice: Noticed | None
    ) -> GenerateReply:
        if request.stream:
            async with contextlib.aclosing(self._pieces(request, on_queued, whole=True)) as replies:
                async for reply in replies:
                    if isinstance(reply, GenerateReply):
                        return unnumbered(reply)
                    pass_on(reply, on_notice)
        patience, closings = Patience(self._timeout_s, retry=self._retry, whole=True), self._closings
        while True:
            patience.asked()
            try:
                return read_answer(await self._ask(request, patience.left_s))
            except RequestError as error:
                await self._pause(patience.pause_s(error), closings, error)
            except UnreachableError as error:
                await self._pause(patience.return_s(error), closings, error)

    async def _pause(self, seconds: float, closings: int, error: Exception) -> None:
        """Wait before the next try, unless the client was closed meanwhile: then the error stands."""
        if self._closings == closings:
            await asyncio.sleep(seconds)
        if self._closings != closings:
            raise error

    async def _ask(self, message: GenerateRequest | StatusRequest, timeout_s: float | None) -> bytes:
        async with self._through_connection() as connection:
            cancel = make_cancel(message.id) if message.id and isinstance(message, GenerateRequest) else None
            return await connection.request(encode(message), timeout_s, cancel=cancel)

    async def _pieces(
        self, request: GenerateRequest, on_queued: Queued | None, *, whole: bool = False
    ) -> AsyncGenerator[StreamPiece | GenerateReply, None]:
        patience, closings = Patience(self._timeout_s, retry=self._retry, whole=whole), self._closings
        flow = Flow(request, on_queued)
        while True:
            try:
                async with contextlib.aclosing(self._flow(flow, patience)) as replies:
                    async for reply in replies:
                        yield reply
                return
            except RequestError as error:
                await self._pause(patience.pause_s(error), closings, error)
            except UnreachableError as error:
                pause_s = patience.return_s(error, flow.place)
                if (piece := flow.paused(error)) is not None:
                    yield piece
                await self._pause(pause_s, closings, error)
            flow = flow.again()

    async def _flow(
        self, flow: Flow, patience: Patience
    ) -> AsyncGenerator[StreamPiece | GenerateReply, None]:
        async with self._through_connection() as connection:
            if hold_back_s := patience.hold_back_s:
                await connection.open()
                await asyncio.sleep(hold_back_s)
            exchange = await connection.exchange(encode(flow.request))
            patience.asked()
            try:
                while not flow.over:
                    reply = flow.take(await exchange.receive(patience.reply_s, patience.limit_s))
                    patience.heard(reply)
                    if reply is not None:
                        yield reply
                        if not flow.over and (word := flow.word()) is not None:
                            exchange.post(word)
            finally:
                exchange.end(None if flow.over else flow.cancel())

    @contextlib.asynccontextmanager
    async def _through_connection(self) -> AsyncIterator[AsyncClientConnection]:
        connection = await self._connected()
        try:
            yield connection
        except UnreachableError as error:
            if self._given is not None or self._connection is not connection:
                raise
            # That one call's time is over is no reason to end others.
            if isinstance(error, LateReplyError) and connection.busy:
                raise
            # A head that was found may be another one next time; the other calls fail with this one.
            await self._hang_up()
            raise self._heads.failed(connection.endpoint, error) from error

    async def _connected(self) -> AsyncClientConnection:
        """The connection, or a new one; fails if the client is closed before there is one."""
        closings = self._closings
        async with self._finding:
            endpoint = self._given
            if endpoint is None and self._connection is None and self._closings == closings:
                endpoint = await self._heads.find()
            if self._closings != closings:
                raise HeadLostError("the client was closed before it had found the head", hung_up=True)
            if self._connection is None:
                assert endpoint is not None
                keys = _keys_for(endpoint, self._fleet, self._key)
                self._connection = AsyncClientConnection(endpoint, connect_timeout_s=CONNECT_S, keys=keys)
            return self._connection
