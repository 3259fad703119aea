from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import zmq

from cascadia_p2p.errors import ErrorCode, HeadLostError, RequestError, UnreachableError
from cascadia_p2p.local import free_ports
from cascadia_p2p.transport import client_connection, client_server, looping
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.client_server import (
    ClientCall,
    ClientFault,
    ClientGone,
    ClientServer,
    Route,
)
from cascadia_p2p.transport.looping import SKIPPED_PARTS, Delivery
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import MAX_REQUEST_BYTES

DEADLINE_S = 60.0


def run(scenario: Callable[[Network], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        with Network() as network:
            await asyncio.wait_for(scenario(network), DEADLINE_S)

    asyncio.run(bounded())


def client(network: Network, kind: int, *endpoints: Endpoint, **options: int) -> zmq.Socket[bytes]:
    made = network.socket(kind, linger_ms=0, max_part=1 << 16)
    made.setsockopt(zmq.IMMEDIATE, 0)
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    for endpoint in endpoints:
        made.connect(endpoint.tcp)
    return made


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)


async def taken(server: ClientServer, route: Route, data: bytes) -> None:
    await until(lambda: server.reply(route, data) is not Delivery.FULL)


async def got(made: zmq.Socket[bytes]) -> list[bytes]:
    await until(lambda: bool(made.poll(0)))
    return made.recv_multipart()


def test_req_clients_are_served_on_every_address() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoints = [server.bind("127.0.0.1", 0), server.bind("localhost", 0)]
        assert server.endpoints == endpoints
        for endpoint in endpoints:
            for options in ({}, {"REQ_CORRELATE": 1, "REQ_RELAXED": 1}):
                request = client(network, zmq.REQ, endpoint, **options)
                request.send(b"question")
                event = await server.receive()
                while isinstance(event, ClientGone):
                    event = await server.receive()
                assert isinstance(event, ClientCall)
                assert event.data == b"question"
                assert server.reply(event.route, b"answer") is Delivery.SENT
                assert await got(request) == [b"answer"]
                request.close()
        server.close()

    run(scenario)


def test_a_message_of_very_many_parts_leaves_the_loop_its_turns() -> None:
    """It is dropped bit by bit, and what came behind it on other connections is taken as it was sent."""

    async def scenario(network: Network) -> None:
        server, turns, slices = ClientServer(network), 0, 20
        endpoint = server.bind("127.0.0.1", 0)

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        flood, other = (client(network, zmq.DEALER, endpoint, SNDHWM=0) for _ in range(2))
        events = looping.watch(flood, zmq.EVENT_DISCONNECTED)
        for _ in range(slices * SKIPPED_PARTS):
            flood.send(b"", zmq.SNDMORE)
        flood.send(b"end")
        fault = await server.receive()
        assert isinstance(fault, ClientFault)
        other.send_multipart([b"", b"question"])
        counting, before = asyncio.create_task(count_turns()), turns
        call = await server.receive()
        if isinstance(call, ClientGone):
            assert call.connection == fault.route.connection
            call = await server.receive()
        assert isinstance(call, ClientCall)
        assert call.data == b"question"
        assert turns - before >= slices - 1
        counting.cancel()
        # Its connection has ended, and nothing is left of it that the next question could be taken for.
        await until(lambda: bool(events.poll(0)))
        flood.send_multipart([b"", b"sorry"])
        while isinstance(again := await server.receive(), ClientGone):
            assert again.connection == fault.route.connection
        assert isinstance(again, ClientCall)
        assert again.data == b"sorry"
        assert again.route.connection != fault.route.connection
        looping.unwatch(flood)
        events.close()
        server.close()

    run(scenario)


def test_the_whole_envelope_comes_back() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0))
        dealer.send_multipart([b"hop", b"tag", b"", b"question"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        assert server.reply(event.route, b"answer") is Delivery.SENT
        assert await got(dealer) == [b"hop", b"tag", b"", b"answer"]
        server.close()

    run(scenario)


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        ([b"question"], [b"why"]),
        ([b"a", b"b"], [b"why"]),
        ([b"", b"one", b"two"], [b"", b"why"]),
        ([b"", b"", b"x"], [b"", b"why"]),
        ([b"a", b""], [b"a", b"", b"why"]),
        ([b"a"] * 9 + [b"", b"x"], [b"", b"why"]),
        ([b"a" * 600, b"", b"x"], [b"", b"why"]),
        ([b"a"] * 500, [b"why"]),
    ],
)
def test_other_shapes_are_refused_in_words(sent: list[bytes], back: list[bytes]) -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0))
        dealer.send_multipart(sent)
        event = await server.receive()
        assert isinstance(event, ClientFault)
        assert event.reason
        assert server.faults == 1
        assert server.reply(event.route, b"why") is Delivery.SENT
        assert await got(dealer) == back
        server.close()

    run(scenario)


def test_a_vanished_client_is_reported_once_with_its_own_connection() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        stays = client(network, zmq.REQ, endpoint)
        leaves = client(network, zmq.REQ, endpoint)
        stays.send(b"stays")
        leaves.send(b"leaves")
        calls: dict[bytes, ClientCall] = {}
        for _ in range(2):
            event = await server.receive()
            assert isinstance(event, ClientCall)
            calls[event.data] = event
        assert server.connections == 2
        leaves.close()
        assert await server.receive() == ClientGone(calls[b"leaves"].route.connection)
        assert server.connections == 1
        await until(lambda: server.reply(calls[b"leaves"].route, b"x") is Delivery.GONE)
        assert server.reply(calls[b"stays"].route, b"x") is Delivery.SENT
        server.close()

    run(scenario)


def test_requests_of_clients_that_left_at_once_end_too() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        for _ in range(30):
            hasty = client(network, zmq.REQ, endpoint)
            hasty.send(b"question")
            # Sent, and gone before anybody read it.
            hasty.close(linger=1000 * int(DEADLINE_S))
        await asyncio.sleep(0.3)
        calls: set[int] = set()
        gone: set[int] = set()
        while len(calls) < 30 or not calls <= gone:
            event = await server.receive()
            if isinstance(event, ClientCall):
                calls.add(event.route.connection)
            elif isinstance(event, ClientGone):
                gone.add(event.connection)
        assert len(calls) == 30
        server.close()

    run(scenario)


def test_garbage_on_the_client_port_is_survived() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 400, bytes(256)):
            with socket.create_connection((endpoint.host, endpoint.port)) as stray:
                stray.sendall(garbage)
                linger = struct.pack("ii", 1, 0)
                stray.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request = client(network, zmq.REQ, endpoint)
        request.send(b"question")
        while not isinstance(event := await server.receive(), ClientCall):
            pass
        assert event.data == b"question"
        server.close()

    run(scenario)


def test_a_slow_client_is_told_from_a_dead_one() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0), RCVHWM=1, RCVBUF=4096)
        dealer.send_multipart([b"", b"question"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        chunk = bytes(60_000)
        for _ in range(3000):
            if (delivery := server.reply(event.route, chunk)) is not Delivery.SENT:
                break
        assert delivery is Delivery.FULL
        dealer.close()
        assert await server.receive() == ClientGone(event.route.connection)
        await until(lambda: server.reply(event.route, b"x") is Delivery.GONE)
        server.close(0)

    run(scenario)


class Head:
    """A head in a thread: answers each request as `answer` says, None for not at all."""

    def __init__(self, answer: Callable[[bytes], bytes | None], port: int = 0) -> None:
        self.answer = answer
        self.gone = 0
        self.started = threading.Event()
        self.stopping = threading.Event()
        # Of the ports that nothing else takes before another head is bound there.
        self._port = port or free_ports()
        self.endpoint = Endpoint("127.0.0.1", self._port)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self.started.wait(DEADLINE_S)

    async def _run(self) -> None:
        with Network() as network:
            server = ClientServer(network)
            self.endpoint = server.bind("127.0.0.1", self._port)
            self.started.set()
            serving = asyncio.create_task(self._serve(server))
            await until(self.stopping.is_set)
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            server.close(0)

    async def _serve(self, server: ClientServer) -> None:
        late: list[tuple[Any, bytes]] = []
        while True:
            event = await server.receive()
            if isinstance(event, ClientGone):
                self.gone += 1
            elif isinstance(event, ClientCall):
                reply = self.answer(event.data)
                if reply is None:
                    late.append((event.route, b"late " + event.data))
                    continue
                for route, data in late:
                    server.reply(route, data)
                late.clear()
                await taken(server, event.route, reply)

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head(lambda data: None if data.startswith(b"slow") else b"re: " + data)
    yield made
    made.stop()


def test_the_blocking_client_asks_and_asks_again(head: Head) -> None:
    with ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        for number in range(50):
            assert connection.request(b"%d" % number, DEADLINE_S) == b"re: %d" % number


def test_cas_01_a_late_reply_is_never_the_next_requests(head: Head) -> None:
    with ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        with pytest.raises(UnreachableError, match="no reply within"):
            connection.request(b"slow one", 0.1)
        assert connection.request(b"next", DEADLINE_S) == b"re: next"


def test_cas_01_nor_on_a_shared_connection(head: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            patient = asyncio.create_task(connection.request(b"slow but awaited", DEADLINE_S))
            with pytest.raises(UnreachableError, match="no reply within"):
                await connection.request(b"slow one", 0.1)
            assert await connection.request(b"next", DEADLINE_S) == b"re: next"
            assert await patient == b"late slow but awaited"
            assert connection.late <= 1
            assert await connection.request(b"last", DEADLINE_S) == b"re: last"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_many_requests_share_one_asyncio_connection(head: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            replies = await asyncio.gather(*(connection.request(b"%d" % at, DEADLINE_S) for at in range(100)))
            assert replies == [b"re: %d" % at for at in range(100)]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_cas_02_clients_cancelled_at_random_lose_nothing_of_others(head: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:

            async def one(number: int) -> None:
                assert await connection.request(b"%d" % number, DEADLINE_S) == b"re: %d" % number

            tasks = [asyncio.create_task(one(number)) for number in range(200)]
            for at, task in enumerate(tasks):
                if at % 3 == 0:
                    await asyncio.sleep(0)
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            others = [result for at, result in enumerate(results) if at % 3]
            assert others == [None] * len(others)
            assert await connection.request(b"after", DEADLINE_S) == b"re: after"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("timeout", [None, DEADLINE_S])
def test_stk_04_a_dead_head_ends_the_wait_and_a_new_one_is_found(timeout: float | None) -> None:
    asked = threading.Event()
    head = Head(lambda data: asked.set())
    port = head.endpoint.port
    connection = ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S)

    def stop() -> None:
        asked.wait(DEADLINE_S)
        head.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    started = time.monotonic()
    with pytest.raises(UnreachableError, match="lost"):
        connection.request(b"question", timeout)
    assert time.monotonic() - started < DEADLINE_S / 2
    stopper.join()
    head = Head(lambda data: b"re: " + data, port)
    assert connection.request(b"again", DEADLINE_S) == b"re: again"
    head.stop()
    connection.close()


def test_stk_04_a_dead_head_ends_every_asyncio_wait() -> None:
    heard: list[bytes] = []
    head = Head(heard.append)
    port = head.endpoint.port

    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            waits = [asyncio.create_task(connection.request(b"%d" % at)) for at in range(5)]
            await until(lambda: len(heard) == 5)
            await asyncio.to_thread(head.stop)
            results = await asyncio.gather(*waits, return_exceptions=True)
            assert len(results) == 5
            assert all(isinstance(result, HeadLostError) and not result.hung_up for result in results)
            again = await asyncio.to_thread(Head, lambda data: b"re: " + data, port)
            assert await connection.request(b"again", DEADLINE_S) == b"re: again"
            await asyncio.to_thread(again.stop)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize(("kind", "one_reply"), [(zmq.REQ, True), (zmq.DEALER, False)])
def test_a_socket_that_takes_one_reply_is_told_apart(kind: int, one_reply: bool) -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        made = client(network, kind, server.bind("127.0.0.1", 0))
        made.send_multipart([b"question"] if one_reply else [b"", b"question"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        assert event.one_reply is one_reply
        server.close()

    run(scenario)


class Counting(Head):
    """Answers a number with that many replies."""

    def __init__(self) -> None:
        super().__init__(lambda data: None)

    async def _serve(self, server: ClientServer) -> None:
        while True:
            event = await server.receive()
            if isinstance(event, ClientGone):
                self.gone += 1
            elif isinstance(event, ClientCall):
                for number in range(int(event.data)):
                    await taken(server, event.route, b"%d of %s" % (number, event.data))


@pytest.fixture
def counting() -> Iterator[Head]:
    made = Counting()
    yield made
    made.stop()


def test_several_replies_come_in_order(counting: Head) -> None:
    with ClientConnection(counting.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        tag = connection.send(b"200")
        assert [connection.receive(tag, DEADLINE_S) for _ in range(200)] == [
            b"%d of 200" % at for at in range(200)
        ]
        # What nobody took is never taken for another request's.
        tag = connection.send(b"3")
        assert connection.receive(tag, DEADLINE_S) == b"0 of 3"
        assert connection.request(b"1", DEADLINE_S) == b"0 of 1"
        with pytest.raises(UnreachableError, match="no reply within"):
            connection.receive(connection.send(b"0"), 0.05)


def test_hanging_up_is_seen_and_the_next_request_is_served(counting: Head) -> None:
    with ClientConnection(counting.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        tag = connection.send(b"2")
        assert connection.receive(tag, DEADLINE_S) == b"0 of 2"
        connection.hang_up()
        with pytest.raises(UnreachableError, match="lost"):
            connection.receive(tag, DEADLINE_S)
        assert connection.request(b"1", DEADLINE_S) == b"0 of 1"
        deadline = time.monotonic() + DEADLINE_S
        while counting.gone < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_exchanges_share_a_connection(counting: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(counting.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            exchanges = [await connection.exchange(b"%d" % count) for count in range(1, 40)]
            for count, exchange in enumerate(exchanges, 1):
                replies = [await exchange.receive(DEADLINE_S) for _ in range(count)]
                assert replies == [b"%d of %d" % (number, count) for number in range(count)]
                exchange.end()
            given_up = await connection.exchange(b"500")
            await given_up.receive(DEADLINE_S)
            # As a head understands it, this asks for one reply that nobody waits for.
            given_up.end(b"1")
            assert await connection.request(b"1", DEADLINE_S) == b"0 of 1"
            last = await connection.exchange(b"1")
            assert await last.receive(DEADLINE_S) == b"0 of 1"
            await asyncio.to_thread(counting.stop)
            for _ in range(2):
                with pytest.raises(UnreachableError, match="lost"):
                    await last.receive(DEADLINE_S)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_client_that_gives_up_is_seen_by_the_head(head: Head) -> None:
    connection = ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S)
    with pytest.raises(UnreachableError):
        connection.request(b"slow", 0.05)
    deadline = time.monotonic() + DEADLINE_S
    while head.gone < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    connection.close()


def absent() -> Endpoint:
    return Endpoint("127.0.0.1", free_ports())


def test_nobody_there_is_said_with_the_reason() -> None:
    with (
        ClientConnection(absent(), connect_timeout_s=2.0) as connection,
        pytest.raises(UnreachableError, match="nothing listens"),
    ):
        connection.request(b"x", DEADLINE_S)


def test_nobody_there_is_said_with_the_reason_in_asyncio() -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(absent(), connect_timeout_s=2.0) as connection:
            with pytest.raises(UnreachableError, match="nothing listens"):
                await connection.request(b"x", DEADLINE_S)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_the_reason_that_came_while_the_caller_was_held_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = client_connection._Line.wait

    def late(line: client_connection._Line, deadline: float | None) -> bool:
        assert deadline is not None
        assert line.monitor.poll(1000 * int(DEADLINE_S))
        time.sleep(max(0.0, deadline - time.monotonic()))
        return wait(line, deadline)

    monkeypatch.setattr(client_connection._Line, "wait", late)
    with (
        ClientConnection(absent(), connect_timeout_s=0.3) as connection,
        pytest.raises(UnreachableError, match="nothing listens"),
    ):
        connection.request(b"x", DEADLINE_S)

    async def never(_: looping.Signal) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with AsyncClientConnection(absent(), connect_timeout_s=2.0) as connection:
            with pytest.raises(UnreachableError, match="nothing listens"):
                await connection.request(b"x", DEADLINE_S)

    monkeypatch.setattr(looping.Signal, "wait", never)
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_connection_that_is_closed_ends_the_calls_that_wait_for_it_to_open() -> None:
    """One of many callers finds the head lost and hangs up: the others come back as it does."""

    async def scenario(_: Network) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            endpoint = Endpoint("127.0.0.1", mute.getsockname()[1])
            connection = AsyncClientConnection(endpoint, connect_timeout_s=DEADLINE_S)
            calls = [asyncio.create_task(connection.request(b"{}")) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert not any(call.done() for call in calls)
            await connection.close()
            ends = await asyncio.gather(*calls, connection.request(b"{}"), return_exceptions=True)
            assert [type(end) for end in ends] == [HeadLostError] * 4
            assert all(end.hung_up for end in ends if isinstance(end, HeadLostError))

    run(scenario)


def test_a_stranger_there_is_said() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = stranger.accept()
                    caller.sendall(b"220 mail.example.org ESMTP\r\n" * 4)
                    caller.close()

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        endpoint = Endpoint("127.0.0.1", stranger.getsockname()[1])
        with (
            ClientConnection(endpoint, connect_timeout_s=2.0) as connection,
            pytest.raises(UnreachableError, match="does not speak"),
        ):
            connection.request(b"x", DEADLINE_S)
        stranger.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_one_client_too_many_is_told_so_and_none_is_served_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_server, "SURPLUS", 2)

    async def scenario(network: Network) -> None:
        server = ClientServer(network, limit=3)
        endpoint = server.bind("127.0.0.1", 0)
        served: list[bool] = []
        dealers = []
        for number in range(5):
            dealers.append(client(network, zmq.DEALER, endpoint))
            dealers[-1].send_multipart([b"", b"%d" % number])
            event = await server.receive()
            assert isinstance(event, ClientCall)
            assert event.data == b"%d" % number
            assert server.reply(event.route, b"seen") is Delivery.SENT
            served.append(event.surplus)
        assert served == [False, False, False, True, True]
        with Network() as elsewhere:
            late = client(elsewhere, zmq.DEALER, endpoint, IMMEDIATE=0)
            late.send_multipart([b"", b"late"])
            waiting = asyncio.create_task(server.receive())
            for _ in range(5):
                # It is cut off again and again, and never served.
                await asyncio.sleep(0.1)
                if waiting.done():
                    event = waiting.result()
                    assert isinstance(event, ClientGone) or event.surplus
                    waiting = asyncio.create_task(server.receive())
            assert (await got(dealers[0]))[-1] == b"seen"
            waiting.cancel()
            late.close()
        for dealer in dealers[1:4]:
            dealer.close()
        while server.connections > 2:
            await server.receive()
        fresh = client(network, zmq.DEALER, endpoint)
        fresh.send_multipart([b"", b"fresh"])
        event = await server.receive()
        while isinstance(event, ClientGone) or event.surplus:
            if isinstance(event, ClientCall) and event.data == b"fresh":
                # The one that was cut off was not gone yet.
                fresh.send_multipart([b"", b"fresh"])
            event = await server.receive()
        assert isinstance(event, ClientCall)
        assert event.data == b"fresh"
        assert server.reply(event.route, b"seen") is Delivery.SENT
        server.close()

    run(scenario)


def test_one_client_too_many_is_not_served_even_when_it_left_at_once() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network, limit=1)
        endpoint = server.bind("127.0.0.1", 0)
        client(network, zmq.DEALER, endpoint).send_multipart([b"", b"first"])
        assert (await server.receive()).surplus is False
        with Network() as elsewhere:
            late = client(elsewhere, zmq.DEALER, endpoint)
            late.send_multipart([b"", b"late"])
            late.close(linger=1000 * int(DEADLINE_S))
        await asyncio.sleep(0.2)
        event = await server.receive()
        while isinstance(event, ClientGone):
            event = await server.receive()
        assert isinstance(event, ClientCall)
        assert (event.data, event.surplus) == (b"late", True)
        server.close()

    run(scenario)


def test_one_client_too_many_is_served_as_soon_as_another_has_left() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network, limit=1)
        endpoint = server.bind("127.0.0.1", 0)
        first, second = (client(network, zmq.DEALER, endpoint) for _ in range(2))
        for number, dealer in enumerate((first, second)):
            dealer.send_multipart([b"", b"%d" % number])
            assert (await server.receive()).surplus is bool(number)
        first.close()
        assert isinstance(await server.receive(), ClientGone)
        second.send_multipart([b"", b"again"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        assert (event.data, event.surplus) == (b"again", False)
        third = client(network, zmq.DEALER, endpoint)
        third.send_multipart([b"", b"third"])
        assert (await server.receive()).surplus is True
        server.close()

    run(scenario)


def test_a_request_that_no_head_takes_is_refused_before_it_is_sent(head: Head) -> None:
    large = b"x" * (MAX_REQUEST_BYTES + 1)

    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            with pytest.raises(RequestError, match="8,388,609 bytes, and a head takes 8,388,608") as refused:
                await connection.request(large, DEADLINE_S)
            assert refused.value.code is ErrorCode.BAD_REQUEST
            assert await connection.request(large[1:4], DEADLINE_S) == b"re: xxx"

    asyncio.run(scenario())
    with ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        with pytest.raises(RequestError, match="shorten it"):
            connection.request(large, DEADLINE_S)
        assert connection.request(large[1:4], DEADLINE_S) == b"re: xxx"


@pytest.mark.parametrize("name", [b"forged", b"\xff\xfe"])
def test_in_the_clear_nobody_can_pose_as_the_owner_of_a_key(name: bytes) -> None:
    """The names of metadata are the peer's own, and so are their values."""

    def frame(body: bytes, flags: int = 0) -> bytes:
        return bytes([flags, len(body)]) + body

    def named(key: bytes, value: bytes) -> bytes:
        return bytes([len(key)]) + key + struct.pack(">I", len(value)) + value

    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        with socket.create_connection((endpoint.host, endpoint.port)) as made:
            made.sendall(b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48))
            ready = b"\5READY" + named(b"Socket-Type", b"DEALER") + named(b"User-Id", name)
            made.settimeout(DEADLINE_S)
            greeting = b""
            while len(greeting) < 64:
                greeting += made.recv(64 - len(greeting))
            made.sendall(frame(ready, 4))
            assert b"READY" in made.recv(1000)
            made.sendall(frame(b"", 1) + frame(b"question"))
            event = await server.receive()
            assert isinstance(event, ClientCall)
            assert (event.data, event.client) == (b"question", "")
        server.close()

    run(scenario)


def test_nobody_can_guess_the_name_that_a_client_gets() -> None:
    """ZeroMQ ends the process where a peer has taken the next one for its own."""
    program = (
        "import zmq\n"
        "from cascadia_p2p.transport.network import Network\n"
        "with Network() as network:\n"
        "    made = network.socket(zmq.ROUTER, linger_ms=0, max_part=100)\n"
        "    port = made.bind_to_random_port('tcp://127.0.0.1')\n"
        "    peer = network.socket(zmq.DEALER, linger_ms=0, max_part=100)\n"
        "    peer.setsockopt(zmq.IMMEDIATE, 0)\n"
        "    peer.connect(f'tcp://127.0.0.1:{port}')\n"
        "    peer.send(b'x')\n"
        "    print(made.recv_multipart()[0].hex())\n"
    )
    names = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=200).stdout
        for _ in range(2)
    }
    assert len(names) == 2


def test_a_connection_is_ended_by_its_number() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        client(network, zmq.DEALER, endpoint).send_multipart([b"", b"x"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        server.hang_up(event.route.connection + 1)
        server.hang_up(event.route.connection)
        assert await server.receive() == ClientGone(event.route.connection)
        server.close()

    run(scenario)


def test_requests_without_end_leave_turns_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "TURN_S", 0.0)

    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0))
        for number in range(300):
            dealer.send_multipart([b"", b"%d" % number])
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        # All of them are there before the first is taken.
        time.sleep(0.3)  # noqa: ASYNC251
        ticking = asyncio.create_task(tick())
        for number in range(300):
            event = await server.receive()
            assert isinstance(event, ClientCall)
            assert event.data == b"%d" % number
        assert turns >= 299
        ticking.cancel()
        server.close()

    run(scenario)
