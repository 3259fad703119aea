"""What keeps two sides apart is told whichever of them hangs up first."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import zmq

from cascadia_p2p.errors import NotAdmittedError
from cascadia_p2p.local import free_ports
from cascadia_p2p.transport import client_connection, control, greeting
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial, knock
from cascadia_p2p.transport.curve import KeyPair, Keys, Knock, failed_handshake
from cascadia_p2p.transport.greeting import Greetings, read_mechanism, why_hung_up
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

DEADLINE_S = 60.0
FLEET = KeyPair.new()
HELLO = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
SIGNATURE = 10
RESET = struct.pack("ii", 1, 0)
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
    monkeypatch.setattr(greeting, "GREETING_S", DEADLINE_S)

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


class Mutes:
    """Ports that reset every handshake of ZeroMQ, and say nothing to who only looks."""

    def __init__(self, count: int) -> None:
        self.looks: list[socket.socket] = []
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.endpoints = [Endpoint(*each.getsockname()) for each in self._listeners]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in self._listeners:
                selector.register(each, selectors.EVENT_READ, each)
            while not self._over.is_set():
                for key, _ in selector.select(0.05):
                    self._take(key.data.accept()[0])

    def _take(self, caller: socket.socket) -> None:
        caller.settimeout(DEADLINE_S)
        heard = b""
        with contextlib.suppress(OSError):
            while len(heard) < SIGNATURE and (part := caller.recv(64)):
                heard += part
            # ZeroMQ says no more than its signature before it has heard the other's.
            if len(heard) > SIGNATURE:
                self.looks.append(caller)
                return
            caller.sendall(HELLO)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        caller.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)
        for each in (*self._listeners, *self.looks):
            each.close()


def watched_threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the running loop hands to its threads from now on, none of which is done."""
    loop = asyncio.get_running_loop()
    handed: list[object] = []

    def hand(*call: object) -> asyncio.Future[object]:
        handed.append(call)
        return loop.create_future()

    monkeypatch.setattr(loop, "run_in_executor", hand)
    return handed


@pytest.fixture
def mutes() -> Iterator[Mutes]:
    made = Mutes(12)
    yield made
    made.close()


def test_looks_at_the_mute_leave_the_loops_threads_to_others(
    monkeypatch: pytest.MonkeyPatch, mutes: Mutes
) -> None:
    monkeypatch.setattr(control, "failed_handshake", hung_up_first)

    async def scenario() -> None:
        threads = watched_threads(monkeypatch)
        with Network() as network, contextlib.ExitStack() as dialled:
            tasks = []
            for endpoint in mutes.endpoints:
                dialer = ControlDialer(network, endpoint)
                dialled.callback(dialer.close, 0)
                tasks.append(asyncio.create_task(dialer.receive()))
            async with asyncio.timeout(DEADLINE_S):
                while len(mutes.looks) < len(mutes.endpoints) and not threads:  # noqa: ASYNC110 - another thread's
                    await asyncio.sleep(0.01)
            assert not threads
            assert await knock(Endpoint("127.0.0.1", free_ports()), DEADLINE_S) is Dial.REFUSED
            assert not threads
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_an_address_that_was_mute_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.2)
    monkeypatch.setattr(greeting, "REST", 1000)
    monkeypatch.setattr(greeting, "KNOWN", 2)

    async def scenario() -> None:
        greetings = Greetings()
        with contextlib.ExitStack() as opened:
            made = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            mute, *others = (Endpoint(*each.getsockname()) for each in made)
            made[0].setblocking(False)
            for _ in range(2):
                assert await greetings.why_hung_up(mute, keyed=True) is Knock.HUNG_UP
            made[0].accept()[0].close()
            with pytest.raises(BlockingIOError):
                made[0].accept()
            for other in others:
                await greetings.why_hung_up(other, keyed=True)
            # Two later findings took its place.
            await greetings.why_hung_up(mute, keyed=True)
            made[0].accept()[0].close()

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%1"])
def test_a_knock_needs_no_thread_to_read_an_address(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    async def scenario() -> None:
        threads = watched_threads(monkeypatch)
        assert await knock(Endpoint(host, free_ports())) in (Dial.REFUSED, Dial.UNANSWERED)
        assert not threads

    asyncio.run(scenario())


def test_a_look_in_a_loop_finds_what_a_blocking_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "REST", 0)

    async def scenario() -> None:
        greetings = Greetings()
        with Network(None) as network:
            server = ControlServer(network, "127.0.0.1", 0)
            async with asyncio.timeout(DEADLINE_S):
                for keyed, why in ((True, Knock.MECHANISM), (False, Knock.HUNG_UP)):
                    while await greetings.why_hung_up(server.endpoint, keyed=keyed) is not why:
                        pass
            server.close()
        assert await greetings.why_hung_up(server.endpoint, keyed=True) is Knock.HUNG_UP

    asyncio.run(scenario())
