"""The client library: ask a ring for an answer, blocking or in an event loop.

    with Client() as client:
        print(client.generate("The sky is", max_tokens=32).text)

Any ZeroMQ REQ socket can do the same with one JSON frame each way; this library adds finding the head by
mDNS, time limits, and noticing at once when the head dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Self

from pydantic import JsonValue, ValidationError

from cascadia_p2p.discovery.lookup import find_head, find_head_sync
from cascadia_p2p.errors import ErrorCode, RequestError, UnreachableError, WireError
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import (
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    StatusReply,
    StatusRequest,
    decode_reply,
)
from cascadia_p2p.wire.model import Message, encode, explain

__all__ = ["AsyncClient", "Client", "GenerateReply"]

FIND_S: Final = 5.0
"""Seconds that looking for the head by mDNS may take."""

CONNECT_S: Final = 3.0


def _request(
    prompt: str | Sequence[int], max_tokens: int, stop_token_ids: Sequence[int], ignore_eos: bool
) -> GenerateRequest:
    try:
        return GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else tuple(prompt),
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        )
    except ValidationError as error:
        raise RequestError(ErrorCode.BAD_REQUEST, f"this can not be sent: {explain(error)}") from None


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

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> GenerateReply:
        """The greedy continuation of `prompt` (text, or token ids)."""
        return _answer(self._ask(_request(prompt, max_tokens, stop_token_ids, ignore_eos)))

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
        if self._connection is None:
            endpoint = self._given or find_head_sync(self._fleet, timeout=FIND_S).clients[0]
            self._connection = ClientConnection(endpoint, connect_timeout_s=CONNECT_S)
        try:
            return self._connection.request(encode(message), self._timeout_s)
        except BaseException:
            # A head that was found may be another one next time.
            self.close()
            raise


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

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> GenerateReply:
        """The greedy continuation of `prompt` (text, or token ids)."""
        return _answer(await self._ask(_request(prompt, max_tokens, stop_token_ids, ignore_eos)))

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
        async with self._finding:
            if self._connection is None:
                endpoint = self._given or (await find_head(self._fleet, timeout=FIND_S)).clients[0]
                self._connection = AsyncClientConnection(endpoint, connect_timeout_s=CONNECT_S)
            connection = self._connection
        try:
            return await connection.request(encode(message), self._timeout_s)
        except UnreachableError:
            # A head that was found may be another one next time; the other calls fail with this one.
            if self._given is None and self._connection is connection:
                await self.close()
            raise
