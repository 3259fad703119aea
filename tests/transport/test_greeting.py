"""What keeps two sides apart is told whichever of them hangs up first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
import zmq

from cascadia_p2p.errors import NotAdmittedError
from cascadia_p2p.transport import client_connection, control
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial
from cascadia_p2p.transport.curve import KeyPair, Keys, Knock, failed_handshake
from cascadia_p2p.transport.greeting import read_mechanism, why_hung_up
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

DEADLINE_S = 30.0
FLEET = KeyPair.new()
KEYS = Keys(FLEET, FLEET.public, lambda _domain, key: key == FLEET.public)


@pytest.mark.parametrize(("keys", "mechanism"), [(None, "NULL"), (KEYS, "CURVE")])
def test_a_greeting_names_the_mechanism(keys: Keys | None, mechanism: str) -> None:
    async def scenario() -> None:
        with Network(keys) as network:
            server = ControlServer(network, "127.0.0.1", 0)
            for timeout_s in (DEADLINE_S, 2 * DEADLINE_S):
                assert await asyncio.to_thread(read_mechanism, server.endpoint, timeout_s) == mechanism
            server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "words", [b"", b"220 mail.example.org ESMTP\r\n" * 4, b"\xff" + bytes(8) + b"\x7f\x03"]
)
def test_what_is_no_zeromq_or_says_too_little_names_none(words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def talk() -> None:
            caller, _ = stranger.accept()
            with caller, contextlib.suppress(OSError):
                caller.sendall(words)
                caller.settimeout(DEADLINE_S)
                while caller.recv(100):
                    pass

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        endpoint = Endpoint("127.0.0.1", stranger.getsockname()[1])
        assert read_mechanism(endpoint, 0.3) is None
        thread.join(DEADLINE_S)
    assert read_mechanism(endpoint, 0.3) is None
    assert why_hung_up(endpoint, keyed=True) is Knock.HUNG_UP


def hung_up_first(event: zmq.Event, value: int) -> Knock | None:
    """As if the other side's hanging up were always seen first."""
    return None if failed_handshake(event, value) is None else Knock.HUNG_UP


@pytest.mark.parametrize(
    ("theirs", "ours", "dial"), [(KEYS, None, Dial.CLOSED), (None, KEYS, Dial.IN_THE_CLEAR)]
)
def test_a_node_knows_a_door_that_hung_up_first(
    monkeypatch: pytest.MonkeyPatch, theirs: Keys | None, ours: Keys | None, dial: Dial
) -> None:
    monkeypatch.setattr(control, "failed_handshake", hung_up_first)

    async def scenario() -> None:
        with Network(theirs) as there, Network(ours) as here:
            server = ControlServer(there, "127.0.0.1", 0)
            dialer = ControlDialer(here, server.endpoint)
            assert await asyncio.wait_for(dialer.receive(), DEADLINE_S) is dial
            dialer.close(0)
            server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [(KEYS, None, "takes only clients with a key"), (None, KEYS, "speaks in the clear")],
)
def test_a_client_knows_a_door_that_hung_up_first(
    monkeypatch: pytest.MonkeyPatch, theirs: Keys | None, ours: Keys | None, words: str
) -> None:
    monkeypatch.setattr(client_connection, "failed_handshake", hung_up_first)

    async def scenario() -> None:
        with Network(theirs) as there:
            server = ControlServer(there, "127.0.0.1", 0)
            wait = {"connect_timeout_s": DEADLINE_S}
            async with AsyncClientConnection(server.endpoint, keys=ours, **wait) as connection:
                with pytest.raises(NotAdmittedError, match=words):
                    await connection.request(b"x", DEADLINE_S)
            with (
                ClientConnection(server.endpoint, keys=ours, **wait) as blocking,
                pytest.raises(NotAdmittedError, match=words),
            ):
                await asyncio.to_thread(blocking.request, b"x", DEADLINE_S)
            server.close()

    asyncio.run(scenario())
