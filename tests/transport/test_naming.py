"""PET-05: a name with several addresses leads to the one that answers, whatever its family and its place."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from cascadia_p2p.errors import UnreachableError
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.naming import locate
from cascadia_p2p.types import Endpoint

SILENT = "192.0.2.1"
"""An address of documents, which nobody has."""

Names = Callable[..., None]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """`names(pc=["fd99::7", "127.0.0.1"])` lets a name stand for addresses; no other name is known."""

    def give(**known: list[str]) -> None:
        def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (each, port, 0, 0))
                if ":" in each
                else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
                for each in known[host]
            ]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return give


@pytest.fixture
def listening() -> Iterator[Callable[[str], int]]:
    """`listening("::1")` listens there, and gives the port."""
    with ExitStack() as opened:

        def listen(host: str) -> int:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                server = opened.enter_context(socket.create_server((host, 0), family=family))
            except OSError:
                pytest.skip(f"nothing can listen at {host} here")
            return int(server.getsockname()[1])

        yield listen


@pytest.mark.parametrize(
    ("known", "there"),
    [
        (["fd99::7", "127.0.0.1"], "127.0.0.1"),
        ([SILENT, "127.0.0.1"], "127.0.0.1"),
        (["127.0.0.1", "::1"], "::1"),
        (["::1"], "::1"),
        ([SILENT, "fd99::7", "::1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_pet_05_the_address_that_answers_is_taken_at_once(
    names: Names, listening: Callable[[str], int], known: list[str], there: str
) -> None:
    port = listening(there)
    names(pc=known)
    started = time.monotonic()
    assert locate(Endpoint("pc", port), 20.0) == Endpoint(there, port)
    assert time.monotonic() - started < 10.0, "nobody waits for those that are silent"


def test_pet_05_what_answered_while_this_pc_was_busy_is_taken(
    names: Names, listening: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listening("127.0.0.1")
    names(pc=[SILENT, "127.0.0.1"])
    # Nobody looks before the time is over.
    clock = iter([0.0, 1000.0, 1000.0])
    monkeypatch.setattr("cascadia_p2p.transport.naming.time.monotonic", lambda: next(clock))
    assert locate(Endpoint("pc", port), 20.0) == Endpoint("127.0.0.1", port)


def test_pet_05_without_any_that_answers_one_is_named_soon(names: Names) -> None:
    names(pc=[SILENT, "fd99::7"], scoped=["fe80::1"])
    assert locate(Endpoint("pc", 9), 0.05).host in (SILENT, "fd99::7")
    assert locate(Endpoint("10.0.0.1", 9)) == Endpoint("10.0.0.1", 9)
    assert Endpoint.of(("fe80::1", 9, 0, 3)) == Endpoint("fe80::1%3", 9)


def test_dll_14_a_name_that_nobody_knows_is_said_at_once(names: Names) -> None:
    names()
    endpoint = Endpoint("pc", 7700)
    with (
        ClientConnection(endpoint) as connection,
        pytest.raises(UnreachableError, match=r"at pc:7700: the name 'pc' can not be looked up: Name or"),
    ):
        connection.request(b"x", 5)

    async def both() -> None:
        async with AsyncClientConnection(endpoint) as connection:
            with pytest.raises(UnreachableError, match="the name 'pc' can not be looked up"):
                await connection.request(b"x", 5)
        with pytest.raises(UnreachableError, match="the name 'pc' can not be looked up"):
            await ask_node(endpoint)

    asyncio.run(both())
