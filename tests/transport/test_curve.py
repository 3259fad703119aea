from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import structlog
import zmq

from cascadia_p2p.errors import CascadiaError, NotAdmittedError, UnreachableError
from cascadia_p2p.transport import curve
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.client_server import ClientCall, ClientGone, ClientServer
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial, Stranger
from cascadia_p2p.transport.curve import Authenticator, Domain, KeyPair, Keys, Knock
from cascadia_p2p.transport.data import DataReceiver, DataSender
from cascadia_p2p.transport.network import Network

DEADLINE_S = 90.0
FLEET, OTHER, CLIENT = KeyPair.new(), KeyPair.new(), KeyPair.new()
LAN = "127.0.0.2"
"""Stands for an address that others reach."""


def admit(domain: Domain, key: bytes) -> bool:
    return key == FLEET.public or (domain is Domain.CLIENTS and key in ADMITTED)


ADMITTED: set[bytes] = set()
NODE = Keys(FLEET, FLEET.public, admit)
ALICE = Keys(CLIENT, FLEET.public)
STRANGER = Keys(OTHER, FLEET.public)
"""Knows the fleet's public key and is not admitted."""
OTHER_FLEET = Keys(OTHER, OTHER.public, lambda _domain, key: key == OTHER.public)


@pytest.fixture(autouse=True)
def _admitted() -> None:
    ADMITTED.clear()
    ADMITTED.add(CLIENT.public)


def run(scenario: Callable[[Network], Coroutine[Any, Any, None]], keys: Keys | None = NODE) -> None:
    async def bounded() -> None:
        with Network(keys) as network:
            await asyncio.wait_for(scenario(network), DEADLINE_S)

    asyncio.run(bounded())


async def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def dialled(keys: Keys | None, server: ControlServer) -> Dial:
    """What becomes of an attempt to reach a server that somebody reads."""
    with Network(keys) as network:
        dialer = ControlDialer(network, server.endpoint)
        reading = asyncio.create_task(server.receive())
        try:
            while True:
                happened = await dialer.receive()
                assert isinstance(happened, Dial)
                if happened is not Dial.HANDSHAKE_FAILED or not network.guarded:
                    return happened
        finally:
            # The end of the connection follows its failure.
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            dialer.close(0)


async def tells(
    keys: Keys | None, server: ControlServer, turned_away: list[Stranger], why: Knock | None
) -> None:
    """See that the server says why, in the end: of two sides that differ, either may hang up first."""
    if why is None:
        assert not turned_away
        return
    while Stranger("127.0.0.1", why) not in turned_away:
        assert await dialled(keys, server) is not Dial.CONNECTED
    assert {each.why for each in turned_away} <= {why, Knock.HUNG_UP, Knock.FOREIGN}


# --- nodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "dial", "why"),
    [
        (NODE, Dial.CONNECTED, None),
        (None, Dial.CLOSED, Knock.MECHANISM),
        (OTHER_FLEET, Dial.OTHER_KEY, Knock.KEY),
        (STRANGER, Dial.OTHER_KEY, Knock.REFUSED),
        (ALICE, Dial.OTHER_KEY, Knock.REFUSED),
    ],
    ids=["the fleet's key", "no key", "another fleet's key", "no node's key", "a client's key"],
)
def test_a_control_port_opens_for_the_fleets_key_only(
    keys: Keys | None, dial: Dial, why: Knock | None
) -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        turned_away: list[Stranger] = []
        server.turned_away = turned_away.append
        assert await dialled(keys, server) is dial
        await tells(keys, server, turned_away, why)
        server.close()

    run(scenario)


def test_who_has_a_key_sends_nothing_to_a_port_in_the_clear() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        turned_away: list[Stranger] = []
        server.turned_away = turned_away.append
        while await dialled(NODE, server) is not Dial.IN_THE_CLEAR:
            pass
        await tells(NODE, server, turned_away, Knock.MECHANISM)
        server.close()

    run(scenario, None)


def test_a_frame_as_large_as_allowed_is_not_too_large_once_it_is_encrypted() -> None:
    rows = np.arange(1 << 19, dtype=np.float32).reshape(64, -1)
    with Network(NODE) as here, Network(NODE) as there:
        receiver = DataReceiver(here, "127.0.0.1", 0, max_part=rows.nbytes)
        sender = DataSender(there, receiver.endpoint)
        deadline = time.monotonic() + DEADLINE_S
        while not sender.send(b"header", rows):
            assert time.monotonic() < deadline
            sender.wait(100)
        while receiver.recv_header(True) is None:
            assert time.monotonic() < deadline
        out = np.empty_like(rows)
        assert receiver.recv_payload(out)
        assert (out == rows).all()
        sender.close()
        receiver.close()


@pytest.mark.parametrize(
    "keys", [NODE, None, OTHER_FLEET, STRANGER], ids=["right", "none", "other", "stranger"]
)
def test_frames_arrive_with_the_fleets_key_only(keys: Keys | None) -> None:
    rows = np.arange(6144, dtype=np.float32).reshape(1, -1)
    with Network(NODE) as here, Network(keys) as there:
        receiver = DataReceiver(here, "127.0.0.1", 0, max_part=1 << 20)
        sender = DataSender(there, receiver.endpoint)
        deadline = time.monotonic() + (DEADLINE_S if keys is NODE else 1.0)
        got, sent = None, False
        while time.monotonic() < deadline and got is None:
            sent = sent or sender.send(b"header", rows)
            got = receiver.recv_header(False)
            time.sleep(0.005)
        if keys is NODE:
            assert got == b"header"
            out = np.empty_like(rows)
            assert receiver.recv_payload(out)
            assert (out == rows).all()
        else:
            assert got is None
            assert not sent, "a frame was queued for a connection that is none"
        # The process's own wake needs no key.
        assert min(awakened(receiver) for _ in range(5)) < 0.2
        sender.close()
        receiver.close()


# --- a door that can not be guarded is shut ----------------------------------------------------------------


def test_an_authenticator_whose_callback_raises_refuses_and_goes_on() -> None:
    angry = threading.Event()
    angry.set()

    raised: list[bytes] = []

    def raising(domain: Domain, key: bytes) -> bool:
        if angry.is_set():
            raised.append(key)
            raise RuntimeError("a bug in the callback")
        return admit(domain, key)

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        for _ in range(2):
            assert await dialled(NODE, server) is Dial.OTHER_KEY
        assert network.guarded
        angry.clear()
        assert await dialled(NODE, server) is Dial.CONNECTED
        # Before it is closed, a dialer that was refused may have tried again.
        assert len(raised) >= 2
        assert network.turned_away == len(raised)
        server.close()

    with structlog.testing.capture_logs() as said:
        run(scenario, Keys(FLEET, FLEET.public, raising))
    assert [line["event"] for line in said] == ["authentication_failed"] * len(raised)


@pytest.mark.parametrize("answer", [1, "yes", b"200", object()], ids=["one", "yes", "200", "object"])
def test_only_a_plain_yes_opens(answer: object) -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        assert await dialled(NODE, server) is Dial.OTHER_KEY
        server.close()

    run(scenario, Keys(FLEET, FLEET.public, lambda _domain, _key: answer))  # type: ignore[arg-type, return-value]


def knock(keys: Keys | None, port: int, host: str = "127.0.0.1", patience_s: float = 0.4) -> bool:
    """Whether a socket is let in within this time."""
    with Network(keys) as there:
        dealer = there.socket(zmq.DEALER, linger_ms=0, max_part=1 << 16)
        there.present(dealer)
        dealer.connect(f"tcp://{host}:{port}")
        opened = bool(dealer.poll(int(1000 * patience_s), zmq.POLLOUT))
        dealer.close()
        return opened


def awakened(receiver: DataReceiver) -> float:
    """Seconds until a wait ends that the own process ends."""
    receiver.wake()
    started = time.monotonic()
    assert receiver.recv_header(True) is None
    return time.monotonic() - started


def test_an_authenticator_that_died_leaves_every_port_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(network: Network) -> None:
        server, clients = ControlServer(network, "127.0.0.1", 0), ClientServer(network)
        receiver = DataReceiver(network, "127.0.0.1", 0, max_part=1 << 16)
        door = clients.bind(LAN, 0, guarded=True)
        assert knock(NODE, server.endpoint.port, patience_s=DEADLINE_S)
        assert knock(ALICE, door.port, LAN, DEADLINE_S)
        monkeypatch.setattr(
            Authenticator, "_answer", lambda _self, _question: (_ for _ in ()).throw(MemoryError())
        )
        while network.guarded:
            assert not knock(NODE, server.endpoint.port)
        monkeypatch.undo()
        for keys in (NODE, STRANGER, None):
            assert not knock(keys, server.endpoint.port)
            assert not knock(keys, receiver.endpoint.port)
            assert not knock(keys, door.port, LAN)
        assert not knock(ALICE, door.port, LAN)
        receiver.close()
        clients.close()
        server.close()

    with structlog.testing.capture_logs() as said:
        run(scenario)
    assert "authenticator_failed" in [line["event"] for line in said]


def test_no_authenticator_at_all_leaves_the_port_shut() -> None:
    """What `close_door` demands, without anybody who answers: ZeroMQ itself would let all in."""

    async def scenario(network: Network) -> None:
        made = network.socket(zmq.ROUTER, linger_ms=0, max_part=1 << 16)
        curve.close_door(made, NODE, Domain.NODES)
        port = made.bind_to_random_port("tcp://127.0.0.1")
        for keys in (NODE, STRANGER):
            assert not knock(keys, port)
        made.close()

    run(scenario, None)


def test_a_context_where_nobody_can_authenticate_binds_nothing() -> None:
    with Network(NODE) as network:
        taken = network.context.socket(zmq.REP)
        taken.bind("inproc://zeromq.zap.01")
        made = network.socket(zmq.ROUTER, linger_ms=0, max_part=1 << 16)
        with pytest.raises(CascadiaError, match="authenticated"):
            network.guard(made, Domain.NODES)
        taken.close(linger=0)


@pytest.mark.parametrize(
    "question",
    [
        [],
        [b"1.0"],
        [b"1.0", b"1", b"nodes", b"", b"", b"NULL"],
        [b"1.0", b"1", b"nodes", b"", b"", b"PLAIN", b"user", b"password"],
        [b"1.0", b"1", b"nowhere", b"", b"", b"CURVE", curve.raw_key(FLEET.public)],
        [b"1.0", b"1", b"*", b"", b"", b"CURVE", curve.raw_key(FLEET.public)],
        [b"2.0", b"1", b"nodes", b"", b"", b"CURVE", curve.raw_key(FLEET.public)],
        [b"1.0", b"1", b"nodes", b"", b"", b"CURVE", FLEET.public],
        [b"1.0", b"1", b"nodes", b"", b"", b"CURVE", b""],
        [b"1.0", b"1", b"nodes", b"", b"", b"CURVE", curve.raw_key(FLEET.public), b"more"],
    ],
    ids=lambda question: f"{len(question)} parts",
)
def test_questions_of_other_shapes_are_refused(question: list[bytes]) -> None:
    with Network() as network:
        with structlog.testing.capture_logs():
            judge = Authenticator(network.context, admit)
            asker = network.context.socket(zmq.REQ)
            asker.setsockopt(zmq.RCVTIMEO, 60_000)
            asker.connect("inproc://zeromq.zap.01")
            asker.send_multipart(question or [b""])
            assert asker.recv_multipart()[2] == b"400"
            assert judge.alive
            judge.stop()
        assert not judge.alive
        asker.close(linger=0)


# --- clients ------------------------------------------------------------------------------------------------


async def serve(server: ClientServer, gone: list[int]) -> None:
    """Answer every request with itself."""
    while True:
        event = await server.receive()
        if isinstance(event, ClientCall):
            server.reply(event.route, event.data)
        elif isinstance(event, ClientGone):
            gone.append(event.connection)


@contextlib.asynccontextmanager
async def client_door(network: Network) -> Any:
    """A server in the clear on this machine's own address and guarded on another."""
    server = ClientServer(network)
    plain, guarded = server.bind("127.0.0.1", 0), server.bind(LAN, 0, guarded=True)
    gone: list[int] = []
    task = asyncio.create_task(serve(server, gone))
    try:
        yield server, plain, guarded, gone
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


def test_one_door_is_plain_on_its_own_pc_and_guarded_on_the_lan() -> None:
    async def scenario(network: Network) -> None:
        async with client_door(network) as (_, plain, guarded, _gone):
            for endpoint, keys in ((plain, None), (guarded, ALICE), (guarded, NODE)):
                async with AsyncClientConnection(endpoint, keys=keys, connect_timeout_s=60.0) as connection:
                    assert await connection.request(b"question", 60.0) == b"question"
                with ClientConnection(endpoint, keys=keys, connect_timeout_s=60.0) as blocking:
                    assert await asyncio.to_thread(blocking.request, b"question", 60.0) == b"question"
            for endpoint, keys, words in (
                (guarded, None, "takes only clients with a key"),
                (guarded, STRANGER, "does not admit this key"),
                (plain, ALICE, "speaks in the clear"),
            ):
                started = time.monotonic()
                patient: Any = {"keys": keys, "connect_timeout_s": 60.0}
                async with AsyncClientConnection(endpoint, **patient) as connection:
                    with pytest.raises(NotAdmittedError, match=words):
                        await connection.request(b"secret", 60.0)
                with (
                    ClientConnection(endpoint, **patient) as blocking,
                    pytest.raises(NotAdmittedError, match=words),
                ):
                    await asyncio.to_thread(blocking.request, b"secret", 60.0)
                assert time.monotonic() - started < 30.0, "it knows long before the time is over"
            async with AsyncClientConnection(guarded, keys=OTHER_FLEET, connect_timeout_s=5.0) as connection:
                with pytest.raises(UnreachableError, match="another fleet's key"):
                    await connection.request(b"secret", 60.0)

    run(scenario)


def test_a_guarded_address_makes_no_plain_one_behind_it() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        server.bind(LAN, 0, guarded=True)
        with pytest.raises(ValueError, match="before"):
            server.bind("127.0.0.1", 0)
        server.close()

    run(scenario)


def test_a_withdrawn_key_ends_its_connections_and_no_others() -> None:
    async def scenario(network: Network) -> None:
        bob = KeyPair.new()
        ADMITTED.add(bob.public)
        async with client_door(network) as (server, plain, guarded, gone):
            alice = AsyncClientConnection(guarded, keys=ALICE, connect_timeout_s=60.0)
            second = AsyncClientConnection(guarded, keys=Keys(bob, FLEET.public), connect_timeout_s=60.0)
            local = AsyncClientConnection(plain, connect_timeout_s=60.0)
            for connection in (alice, second, local):
                assert await connection.request(b"question", 60.0) == b"question"
            with Network(ALICE) as there:
                silent = there.socket(zmq.DEALER, linger_ms=0, max_part=1 << 16)
                there.present(silent)
                silent.connect(guarded.tcp)
                await until(lambda: bool(silent.poll(0, zmq.POLLOUT)))
                await until(lambda: server.connections == 4)
                ADMITTED.discard(CLIENT.public)
                server.expel()
                await until(lambda: server.connections == 2)
                assert server.expelled == 2, "who had asked, and who had been silent"
                # Whoever is refused tries again, and each try is a connection that ends.
                await until(lambda: {1, 4} <= set(gone))
                assert not {2, 3} & set(gone)
                await asyncio.sleep(0.3)
                assert not silent.poll(0, zmq.POLLOUT)
                silent.close()
            with pytest.raises(UnreachableError):
                await alice.request(b"again", 60.0)
            with pytest.raises(NotAdmittedError):
                await alice.request(b"again", 60.0)
            for connection in (second, local):
                assert await connection.request(b"question", 60.0) == b"question"
            for connection in (alice, second, local):
                await connection.close()

    run(scenario)


def test_a_message_of_a_withdrawn_key_is_not_taken() -> None:
    """Should its connection have survived, nothing that comes over it counts."""

    async def scenario(network: Network) -> None:
        async with client_door(network) as (server, _, guarded, _gone):
            alice = AsyncClientConnection(guarded, keys=ALICE, connect_timeout_s=60.0)
            assert await alice.request(b"question", 60.0) == b"question"
            ADMITTED.discard(CLIENT.public)
            with pytest.raises(UnreachableError):
                await alice.request(b"again", 60.0)
            await until(lambda: server.connections == 0)
            await alice.close()

    run(scenario)


# --- keys ---------------------------------------------------------------------------------------------------


def test_a_secret_key_is_never_shown() -> None:
    shown = f"{FLEET} {FLEET!r} {NODE} {NODE!r} {[NODE]}"
    assert FLEET.secret.decode() not in shown
    assert curve.raw_key(FLEET.secret).hex() not in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    "secret",
    [b"", b"x" * 39, b'"' * 40, b"\xff" * 40, b"0" * 40, FLEET.secret[:-1] + b"\n"],
    ids=["empty", "short", "no digits", "bytes", "zeros", "line end"],
)
def test_what_is_no_key_makes_no_pair(secret: bytes) -> None:
    with pytest.raises(ValueError, match="key"):
        KeyPair.of(secret)
    assert KeyPair.of(FLEET.secret) == FLEET


def test_noise_and_silence_at_a_guarded_port_leave_it_as_it_is() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        place = (server.endpoint.host, server.endpoint.port)
        silent = socket.create_connection(place)
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(300),
            b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(200),
        ):
            with socket.create_connection(place) as stray:
                stray.sendall(noise)
        assert await dialled(NODE, server) is Dial.CONNECTED
        silent.close()
        server.close()

    run(scenario)
